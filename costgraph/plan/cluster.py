"""Training runs on a cluster: throughput, days and cost from the step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import ONE, Poly
from ..algebra.symbols import shown
from ..analysis.step_time import seconds
from ..analysis.training import Fallback, given, main_format, model_flops, other_formats, rate_of, tokens_poly
from ..analysis.training_memory import is_step
from ..bind.evaluate import Formula, answer
from ..errors import GraphError
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..ir.graph import (
    Bindings,
    Graph,
    known_names,
    need_graph,
    of_stages,
)
from ..notation.validation import guarded
from ..transforms.pipeline_schedules import SCHEDULES
from .pipeline import bubble as idle_share

__all__ = ["Run", "run", "served", "spread"]

_HOUR = 3600


@guarded()
@dataclass(frozen=True)
class Run:
    """Throughput, duration and cost of a training run; formulas while a size is symbolic."""

    devices: Formula
    """device count, on all pipeline stages"""
    seconds: Formula
    """seconds per step, including pipeline idle time"""
    step_tokens: Formula
    """tokens per step on all devices"""
    tokens_per_second: Formula
    """tokens per second on all devices"""
    mfu: Formula
    """model FLOPs utilization per rank, the mean over pipeline stages; work that ranks duplicate counts on each"""
    dtype: str
    """format whose peak rate defines the MFU"""
    others: Mapping[str, Formula]
    """matmul FLOPs per rank in other formats, by format"""
    steps: Formula
    """step count, not rounded"""
    days: Formula
    """days of 86,400 seconds, without restarts"""
    device_hours: Formula
    """hours summed over all devices"""
    cost: Formula | None
    """in the currency of the price; None without a price"""


def run(
    step: Graph, hardware: str | Hardware, /, tokens: Formula, *, network: str | Network | None = None,
    price: Formula | None = None, overlap: str = "none", bubble: Formula = 0, schedule: str | None = None,
    pp: Formula = 1, micro_batches: Formula = 1, virtual_stages: Formula | None = None, dtype: str | None = None,
    fallback: Fallback = None, **dims: int,
) -> Run:  # fmt: skip
    """Return throughput, duration and cost of a training run with a given number of tokens.

    Parameters
    ----------
    step : Graph
        A training step, such as a result of `parallelize`; without a mesh it runs on one device. A graph with pipeline
        stages includes the pipeline.
    hardware : str, path-like or Hardware
        The devices.
    tokens : number or sympy.Expr
        Tokens to train on.
    network : str, path-like or Network, optional
        Network between the interconnect domains, as in `roofline`.
    price : number or sympy.Expr, optional
        Price per device hour, in any currency.
    overlap : str
        Overlap of communication, as in `roofline`.
    bubble : number or sympy.Expr
        Idle time in a pipeline as a fraction of busy time.
    schedule : str, optional
        Pipeline schedule, if the step is one pipeline rank. The idle fraction is then that of `bubble`, with equal
        times for the forward pass and both gradients.
    pp, micro_batches, virtual_stages : int or sympy.Expr, optional
        Pipeline ranks, micro-batches per step and model chunks per rank, as in `bubble`.
    dtype : str, optional
        Format whose peak rate counts, by default as in `mfu`.
    fallback : str or mapping, optional
        As in `Hardware.rate`.
    **dims : int
        Sizes, including symbolic mesh sizes.

    Returns
    -------
    Run
        Step time, run time, tokens per second, MFU, device hours and cost.

    Raises
    ------
    BindingError, GraphError, SpecError, UnsupportedError
        If an amount is not positive, the graph is not a training step, or both a bubble and a schedule are given; as in
        `seconds`, `mfu` and `bubble`.

    Notes
    -----
    The time is the estimate of `seconds`, based on vendors' peak rates, times 1 + `bubble`.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16")
    >>> s = cg.parallelize(step, dp=8, zero=3)
    >>> found = cg.plan.run(s, "h100-sxm", 15e12, price=2, B=8, S=8192)
    >>> f"{found.tokens_per_second:,.0f} tokens/s, MFU {found.mfu:.0%}, {found.days:,.0f} days, {found.cost / 1e6:.2f}M"
    '101,070 tokens/s, MFU 66%, 1,718 days, 0.66M'
    """
    need_graph("run", step)
    if not is_step(step):
        raise GraphError(f"run: graph {step.name!r} has no gradients; expected a training step")
    (_, values), *_ = stages = of_stages(step, dims)
    busy = seconds(step, hardware, fallback=fallback, hierarchical=False, overlap=overlap, network=network, **dims)
    idle, ranks = _idle(bubble, schedule, pp, micro_batches, virtual_stages)
    step_flops = as_expr(model_flops(step, "executed", **_own(step, dims)))
    if step.parts:
        if ranks != 1 or idle != 0:
            raise GraphError(
                f"run: graph {step.name!r} already has pipeline stages; expected no bubble and no schedule"
            )
        step_flops, ranks = _mean(stages, dims)
    step_seconds = given("run: seconds", busy) * (1 + idle)
    tokens_of_rank, (mesh, splits) = tokens_poly(step), spread("run", step)
    if step.waiting is not None and SCHEDULES[step.waiting.schedule].both_ways:
        splits *= 2  # half of the micro-batches enter at each end
    devices, tokens_of_step = (as_expr(answer(p.bind(values), values.held)) for p in (mesh, tokens_of_rank * splits))
    devices *= ranks
    sizes = _own(step, dims)
    dtype = main_format(step, **sizes) if dtype is None else dtype
    rate = rate_of("run", hardware, dtype, step, sizes, fallback)
    steps = given("run: tokens", tokens) / tokens_of_step
    hours = steps * step_seconds * devices / _HOUR
    return Run(
        devices=answer(devices),
        seconds=answer(step_seconds),
        step_tokens=answer(tokens_of_step),
        tokens_per_second=answer(tokens_of_step / step_seconds),
        mfu=answer(step_flops / (step_seconds * rate)),
        dtype=dtype,
        others=other_formats(step, dtype, **sizes),
        steps=answer(steps),
        days=answer(steps * step_seconds / (24 * _HOUR)),
        device_hours=answer(hours),
        cost=None if price is None else answer(hours * given("run: price", price)),
    )


def _mean(stages: Sequence[tuple[Graph, Bindings]], dims: Mapping[str, int]) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the mean model FLOPs over the pipeline stages, and the number of stages."""
    flops, ranks = sympy.Integer(0), sympy.Integer(0)
    for g, values in stages:
        assert g.waiting is not None
        alike = as_expr(answer(g.waiting.alike.bind(values), values.held))
        flops, ranks = flops + alike * as_expr(model_flops(g, "executed", **_own(g, dims))), ranks + alike
    return flops / ranks, ranks


def _own(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    return {name: n for name, n in dims.items() if name in known_names(graph)} if graph.waiting else dict(dims)


def _idle(
    bubble: Formula, schedule: str | None, pp: Formula, micro_batches: Formula, virtual_stages: Formula | None
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the idle fraction, and the number of pipeline ranks."""
    none = isinstance(bubble, int | float) and bubble == 0
    if schedule is None:
        for name, value in (("pp", pp), ("micro_batches", micro_batches), ("virtual_stages", virtual_stages)):
            if value not in (1, None):
                raise GraphError(f"run: {name} is {shown(value)} without a schedule; add schedule=")
        return sympy.Integer(0) if none else given("run: bubble", bubble), sympy.Integer(1)
    if not none:
        raise GraphError(f"run: bubble is {shown(bubble)} with schedule {shown(schedule)}; expected only one of them")
    return as_expr(idle_share(schedule, pp, micro_batches, virtual_stages)), as_expr(pp)


def spread(place: str, graph: Graph) -> tuple[Poly, Poly]:
    """Return the number of devices that a graph runs on, and the number of parts that they split tokens into."""
    sharding = graph.sharding
    if sharding is None:
        return ONE, ONE
    mesh = sharding.mesh
    inputs = (t.name for t in graph.tensors if t.producer is None and t.role == "input" and t.dtype.kind != "float")
    splits_by_input = {name: prod((mesh[axis] for axis in sharding.places[name].axes), start=ONE) for name in inputs}
    splits = set(splits_by_input.values())
    if len(splits) != 1:
        description = ", ".join(f"{name!r} into {n}" for name, n in splits_by_input.items())
        raise GraphError(
            f"{place}: graph {graph.name!r} splits {description}, expected the same split of all integer inputs"
        )
    return mesh.devices, splits.pop()


def served(place: str, graph: Graph) -> tuple[Poly, Poly]:
    """Return the number of devices that a pass runs on, and how often the graph's tokens pass through all of them."""
    devices, splits = spread(place, graph)
    of_stage = graph.waiting
    return (devices, splits) if of_stage is None else (devices * of_stage.stages, splits * of_stage.micro_batches)
