"""Preflight checks of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import sympy

from ..algebra.extremum import as_expr
from ..algebra.symbols import shorten
from ..analysis.costs import intensity
from ..analysis.memory import peak_memory
from ..analysis.params import param_count
from ..analysis.roofline import bound_roofline
from ..analysis.training import given, main_format, model_flops, rate_of
from ..analysis.training import mfu as utilization
from ..analysis.training_memory import activation_memory, saved_state_bytes, state_bytes
from ..bind.evaluate import Formula, answer
from ..hardware.specs import Hardware, load_hardware
from ..hardware.tables import legend_rows, names_in
from ..hardware.units import format_bytes, format_quantity
from ..ir.graph import (
    Graph,
    bindings,
    known_names,
)
from ..notation.validation import guarded
from .cluster import leading_term, training_days, training_flops

__all__ = ["PreflightCheck", "Preflight", "preflight"]

Fallback = str | Mapping[str, str] | None


@guarded()
@dataclass(frozen=True)
class PreflightCheck:
    """One check."""

    name: str
    """the quantity"""
    figure: Formula
    """its value: a number, or a formula while a size is symbolic"""
    unit: str
    """1, B, FLOP, FLOP/B, s or days"""
    limit: Formula | None = None
    """the limit, in the same unit"""
    against: str = ""
    """description of the limit"""
    verdict: str = ""
    """ok, fails, or another verdict; open while a size is symbolic, empty without a limit"""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", {self.against} {_shown(self.limit, self.unit)}"
        return f"{self.name}: {_shown(self.figure, self.unit)}{limit}{self.verdict and ': '}{self.verdict}"


def _shown(value: Formula, unit: str) -> str:
    if isinstance(value, sympy.Expr):
        return f"{value} [{unit}]"
    if unit == "B":
        return format_bytes(value)
    if unit == "days":
        return f"{format_quantity(value, '1')} days"
    return f"{value:,}" if unit == "1" and isinstance(value, int) else format_quantity(value, unit)


@guarded()
@dataclass(frozen=True, repr=False)
class Preflight:
    """The checks of a training run. Created by `preflight`."""

    graph: str
    """name of the graph"""
    hardware: Hardware
    """the device"""
    devices: Formula
    """number of devices"""
    sizes: Mapping[str, int]
    """bound sizes"""
    rows: tuple[PreflightCheck, ...]
    """the checks"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions"""

    @property
    def ok(self) -> bool | None:
        """Whether all checks pass; None while that depends on a symbolic size."""
        verdicts = {row.verdict for row in self.rows}
        return False if "fails" in verdicts else None if "open" in verdicts else True

    def __getitem__(self, name: str) -> PreflightCheck:
        """Return the check with this name; KeyError if there is none."""
        return {row.name: row for row in self.rows}[name]

    def __repr__(self) -> str:
        return f"Preflight({shorten(self.graph)} on {self.devices} {self.hardware.id})"

    def __str__(self) -> str:
        formulas = [v for row in self.rows for v in (row.figure, row.limit)]
        names = set().union(*(names_in(v, str(v)) for v in formulas))
        return "\n".join([*map(str, self.rows), *map("  ".join, legend_rows(names, self.legend))])


@dataclass(frozen=True)
class _Run:
    """The run that is checked."""

    step: Graph
    device: Hardware
    devices: sympy.Expr
    rate: sympy.Expr
    dims: dict[str, Any]  # sizes; Any, as they are passed together with keywords of other types
    fallback: Fallback

    @property
    def capacity(self) -> int | float:
        value: Fraction | int = self.device.capacity().value
        return int(value) if value == int(value) else float(value)


def _upto(
    name: str, figure: Formula, unit: str, limit: Formula, against: str, failure: str = "fails"
) -> PreflightCheck:
    """Return a check that a value is at most its limit."""
    open_ = any(isinstance(v, sympy.Expr) for v in (figure, limit))
    return PreflightCheck(name, figure, unit, limit, against, "open" if open_ else "ok" if figure <= limit else failure)


def _work(run: _Run, tokens: Formula | None, most_days: Formula | None, used: Formula | None) -> list[PreflightCheck]:
    rows = [PreflightCheck("parameters", param_count(run.step, **run.dims), "1")]
    rows.append(PreflightCheck("model FLOPs of a step", model_flops(run.step, "executed", **run.dims), "FLOP"))
    if tokens is None:
        return rows
    given("preflight: tokens", tokens)
    work, split = training_flops(run.step, tokens, **run.dims), leading_term(run.step, tokens, **run.dims)
    rows.append(PreflightCheck("training FLOPs", work, "FLOP"))
    rows.append(PreflightCheck("  6 * parameters * tokens", split.leading, "FLOP"))
    rows.append(PreflightCheck("  remainder", split.remainder, "FLOP"))
    if used is not None:
        # one expression, so that an MFU above 1 fails a check instead of raising an error
        days = training_days(work, run.rate, devices=run.devices * as_expr(used))
        if most_days is None:
            rows.append(PreflightCheck("training time", days, "days"))
        else:
            limit = answer(given("preflight: most_days", most_days))
            rows.append(_upto("training time", days, "days", limit, "at most"))
    return rows


def _memory(run: _Run) -> list[PreflightCheck]:
    state, room = state_bytes(run.step, **run.dims), run.capacity
    single_device = run.devices == 1
    everywhere = answer(run.devices * given("capacity", room))
    activations = activation_memory(run.step, **run.dims)
    total_memory = _upto(
        "peak memory of a step", peak_memory(run.step, **run.dims), "B", room, "one device has",
        "fails" if single_device else "needs sharding",
    )  # fmt: skip
    rows = [
        PreflightCheck("weights", state.params, "B"),
        PreflightCheck("gradients", state.gradients, "B"),
        PreflightCheck("optimizer state", state.state, "B"),
        _upto("state memory", state.total, "B", everywhere, "all devices have"),
        PreflightCheck("checkpoint", saved_state_bytes(run.step, **run.dims), "B"),
        _upto("activation memory", activations, "B", room, "one device has"),
        total_memory,
    ]
    if not single_device:
        share = answer(as_expr(state.total) / run.devices + as_expr(activations))
        rows.append(_upto("even share of the state, and activations", share, "B", room, "one device has"))
    return rows


def _speed(run: _Run, dtype: str, used: Formula | None, bound: Formula | None) -> list[PreflightCheck]:
    ratio, ridge = intensity(run.step, **run.dims), run.device.ridge(dtype, fallback=run.fallback)
    limit = answer(as_expr(ridge))
    verdict = "open" if isinstance(ratio, sympy.Expr) else "compute-bound" if ratio >= limit else "memory-bound"
    rows = [PreflightCheck("arithmetic intensity", ratio, "FLOP/B", limit, "the ridge point is", verdict)]
    if used is not None:
        allowed = 1 if bound is None else bound
        rows.append(_upto("MFU", used, "1", allowed, "at most" if bound is None else "the roofline allows"))
    return rows


def preflight(
    step: Graph, /, hardware: str | Hardware, *, devices: Formula = 1, tokens: Formula | None = None,
    mfu: Formula | None = None, most_days: Formula | None = None, dtype: str | None = None, fallback: Fallback = None,
    **dims: int,
) -> Preflight:  # fmt: skip
    """Check whether a training run is possible: each figure with its limit.

    Parameters
    ----------
    step : Graph
        A training step, as returned by `training_step`; sizes such as `B` are per device.
    hardware : str, path-like or Hardware
        The device; the limit is its usable memory (`Hardware.capacity`).
    devices : number or sympy.Expr
        Number of devices. The state is compared with the memory of all of them, and an even share with that of one.
    tokens : number or sympy.Expr, optional
        Tokens to train on, for FLOPs and days.
    mfu : number or sympy.Expr, optional
        Assumed model FLOPs utilization, by default that of the roofline estimate if all sizes are bound.
    most_days : number or sympy.Expr, optional
        Maximum training time in days.
    dtype : str, optional
        Format of the peak rate, by default the one with the most matmul FLOPs.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        Sizes; results are formulas in the others.

    Returns
    -------
    Preflight
        `.rows`, each with name, figure, unit, limit and verdict; `.ok`; `print` it.

    Raises
    ------
    BindingError, GraphError, SpecError
        If the graph is not a training step, an amount is not positive, or the device or its rate is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16", checkpoint=cg.every_block())
    >>> found = cg.plan.preflight(step, "h100-sxm", devices=64, tokens=1e12, mfu=0.4, B=1, S=4096)
    >>> print(found["training time"])
    training time: 22.05 days
    >>> print(found["state memory"])
    state memory: 96.36 GB (89.75 GiB), all devices have 5.441 TB (4.949 TiB): ok
    >>> found.ok, [row.name for row in found.rows if row.verdict == "needs sharding"]
    (True, ['peak memory of a step'])
    """
    state_bytes(step, **dims)  # raises an error if this is not a training step
    values = bindings(step, dims)
    sizes = {k: int(v.constant) for k, v in sorted(values.items()) if v.constant is not None}
    main_dtype = main_format(step, **dims) if dtype is None else dtype
    device = load_hardware(hardware)
    rate = rate_of("preflight", device, main_dtype, step, dims, fallback)
    run = _Run(step, device, given("preflight: devices", devices), rate, dims, fallback)
    used, bound = _utilizations(run, mfu, all_bound=known_names(step) <= sizes.keys())
    rows = [*_work(run, tokens, most_days, used), *_memory(run), *_speed(run, main_dtype, used, bound)]
    return Preflight(step.name, device, answer(run.devices), sizes, tuple(rows), dict(step.root.legend))


def _utilizations(run: _Run, assumed: Formula | None, *, all_bound: bool) -> tuple[Formula | None, Formula | None]:
    """Return the assumed MFU, and the largest that the roofline allows if all sizes are bound."""
    assumed_mfu = None if assumed is None else answer(given("preflight: mfu", assumed, most=1))
    if not all_bound:
        return assumed_mfu, None
    times = bound_roofline("preflight", run.step, run.device, run.fallback, run.dims)

    def at(seconds: float) -> Formula:
        return utilization(run.step, seconds, run.rate, **run.dims)

    return at(times.estimate) if assumed_mfu is None else assumed_mfu, min(at(times.lower_bound), 1)
