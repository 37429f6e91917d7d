"""Training runs: FLOPs, tokens, time and cost, as formulas and from the step time of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import ONE, Poly, poly
from ..algebra.symbols import shown
from ..analysis.params import param_count
from ..analysis.step_time import seconds
from ..analysis.training import Fallback, given, main_format, model_flops, other_formats, rate_of, tokens_poly
from ..analysis.training_memory import is_step
from ..bind.evaluate import Formula, answer
from ..errors import BindingError, GraphError
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..ir.graph import Bindings, Graph, bindings, known_names, need_graph, of_stages
from ..notation.validation import guarded
from ..transforms.pipeline_schedules import SCHEDULES
from .pipeline import bubble as idle_share

__all__ = [
    "LeadingTerm",
    "leading_term",
    "training_days",
    "training_flops",
    "training_seconds",
    "training_tokens",
    "Run",
    "run",
    "served",
    "spread",
]


# -- formulas ----------------------------------------------------------------------------------------------------------


#: Seconds.
_DAY = 24 * 60 * 60


def _expanded(value: sympy.Expr) -> sympy.Expr:
    # expanded, terms of a difference cancel
    return value.expand() if value.free_symbols else value


def _per_token(place: str, model: Graph | Formula, count: str, dims: Mapping[str, int]) -> sympy.Expr:
    """Return the model FLOPs for each token: derived from a step, or 6*N for N parameters."""
    if not isinstance(model, Graph):
        if dims:
            raise BindingError(
                f"{place}: sizes {', '.join(sorted(dims))} with a number of parameters; expected a graph, or no sizes"
            )
        return 6 * given(f"{place}: parameters", model)
    if not is_step(model):
        raise GraphError(f"{place}: graph {model.name!r} has no gradients; expected the result of training_step")
    values = bindings(model, dims)
    work = poly(as_expr(model_flops(model, count, **dims)))
    return as_expr(answer(work / tokens_poly(model).bind(values), values.held))


def training_flops(model: Graph | Formula, /, tokens: Formula, *, count: str = "executed", **dims: int) -> Formula:
    """Return the FLOPs for training on a number of tokens.

    Parameters
    ----------
    model : Graph, number or sympy.Expr
        A training step, whose `model_flops` are divided by its tokens; or the number of parameters N, for the rule of
        thumb 6*N FLOPs for each token.
    tokens : number or sympy.Expr
        Tokens to train on.
    count : str
        executed, or full: attention without skipping masked positions.
    **dims : int
        Sizes of the step; the batch size cancels.

    Returns
    -------
    int, float or sympy.Expr
        FLOPs.

    Raises
    ------
    BindingError, GraphError
        If an amount is not positive, a size cannot be bound, or the graph is not a training step.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.training_flops(70e9, 15e12)
    6300000000000000000000000
    >>> step = cg.training_step(cg.models.load("llama-2-70b"))
    >>> cg.plan.training_flops(step, cg.dims("T"))
    3932160*S*T + 412283043840*T
    """
    per_token = _per_token("training_flops", model, count, dims)
    return answer(_expanded(per_token * given("training_flops: tokens", tokens)))


@guarded()
@dataclass(frozen=True)
class LeadingTerm:
    """Training FLOPs, split into the rule of thumb and the remainder."""

    params: Formula
    """number of parameters N; active parameters in a mixture of experts"""
    leading: Formula
    """6 * N * tokens"""
    remainder: Formula
    """attention scores, minus embeddings and norms"""

    @property
    def total(self) -> Formula:
        """Sum of both."""
        return answer(_expanded(as_expr(self.leading) + as_expr(self.remainder)))


def leading_term(step: Graph, /, tokens: Formula, *, count: str = "executed", **dims: int) -> LeadingTerm:
    """Split training FLOPs into 6 * active parameters * tokens and a remainder.

    Parameters
    ----------
    step : Graph
        A training step.
    tokens : number or sympy.Expr
        Tokens to train on.
    count : str
        executed, or full.
    **dims : int
        Sizes of the step.

    Returns
    -------
    LeadingTerm
        `.leading`, `.remainder` and their `.total`, which is `training_flops`.

    Raises
    ------
    BindingError, GraphError
        As in `training_flops`.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, V = cg.dims("B D V")
    >>> with cg.Graph("g") as g:
    ...     x = cg.embedding(g.input("tokens", (B,), dtype="int64"), g.param("table", (V, D)))
    ...     g.output(cg.linear(x, "b d -> b v", v=V))
    >>> cg.plan.leading_term(cg.training_step(g, "cross_entropy"), 10)
    LeadingTerm(params=2*D*V, leading=120*D*V, remainder=-60*D*V)
    """
    if not isinstance(step, Graph):
        raise GraphError(f"leading_term: got {type(step).__name__}, expected a graph")
    all_flops = as_expr(training_flops(step, tokens, count=count, **dims))
    params = param_count(step, active=True, **dims)
    leading = 6 * as_expr(params) * given("leading_term: tokens", tokens)
    return LeadingTerm(params, answer(_expanded(leading)), answer(_expanded(all_flops - leading)))


# -- time ------------------------------------------------------------------------------------------------------------


def _speed(
    place: str, hardware: object, devices: Formula, mfu: Formula, dtype: str | None, graph: Graph | None,
    dims: Mapping[str, int], fallback: Fallback,
) -> sympy.Expr:  # fmt: skip
    """Return the model FLOPs per second of all devices."""
    rate = rate_of(place, hardware, dtype, graph, dims, fallback)
    return rate * given(f"{place}: devices", devices) * given(f"{place}: mfu", mfu, most=1)


def training_seconds(
    flops: Formula, hardware: object, *, devices: Formula = 1, mfu: Formula = 1, dtype: str | None = None,
    fallback: Fallback = None,
) -> Formula:  # fmt: skip
    """Return the seconds that a number of model FLOPs takes.

    Parameters
    ----------
    flops : number or sympy.Expr
        Model FLOPs, such as those of `training_flops`.
    hardware : str, path-like, Hardware, number or sympy.Expr
        The device, or its peak rate in FLOP/s.
    devices : number or sympy.Expr
        Number of devices.
    mfu : number or sympy.Expr
        Model FLOPs utilization, above 0 and up to 1.
    dtype : str, optional
        Format of the peak rate; required with a device.
    fallback : str or mapping, optional
        As in `Hardware.rate`.

    Returns
    -------
    int, float or sympy.Expr
        Seconds.

    Raises
    ------
    BindingError, SpecError
        If an amount is not positive, the format is missing, or the device or its rate is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.plan.training_seconds(1e18, 500e12, devices=4, mfu=0.5)
    1000
    """
    speed = _speed("training_seconds", hardware, devices, mfu, dtype, None, {}, fallback)
    return answer(given("training_seconds: FLOPs", flops) / speed)


def training_days(
    flops: Formula, hardware: object, *, devices: Formula = 1, mfu: Formula = 1, dtype: str | None = None,
    fallback: Fallback = None,
) -> Formula:  # fmt: skip
    """Return the days of 86,400 seconds that a number of model FLOPs takes.

    Parameters
    ----------
    flops, hardware, devices, mfu, dtype, fallback : object
        As in `training_seconds`.

    Returns
    -------
    int, float or sympy.Expr
        Days.

    Raises
    ------
    BindingError, SpecError
        As in `training_seconds`.

    Examples
    --------
    >>> import costgraph as cg
    >>> round(cg.plan.training_days(cg.plan.training_flops(70e9, 15e12), 989.5e12, devices=1024, mfu=0.5))
    144
    >>> n = cg.dims("n")
    >>> cg.plan.training_days(cg.plan.training_flops(70e9, 15e12), "h100-sxm", devices=n, mfu=0.5, dtype="bf16")
    2187500000/(14841*n)
    """
    speed = _speed("training_days", hardware, devices, mfu, dtype, None, {}, fallback)
    return answer(given("training_days: FLOPs", flops) / speed / _DAY)


def training_tokens(
    model: Graph | Formula, /, seconds: Formula, hardware: object, *, devices: Formula = 1, mfu: Formula = 1,
    dtype: str | None = None, count: str = "executed", fallback: Fallback = None, **dims: int,
) -> Formula:  # fmt: skip
    """Return the number of tokens that can be trained on in a given time.

    Parameters
    ----------
    model : Graph, number or sympy.Expr
        A training step, or the number of parameters N, for 6*N FLOPs for each token.
    seconds : number or sympy.Expr
        Time in seconds.
    hardware, devices, mfu : object
        As in `training_seconds`.
    dtype : str, optional
        Format of the peak rate, by default the one with the most matmul FLOPs in the step.
    count : str
        executed, or full.
    fallback : object
        As in `training_seconds`.
    **dims : int
        Sizes of the step.

    Returns
    -------
    int, float or sympy.Expr
        Tokens, not rounded.

    Raises
    ------
    BindingError, GraphError, SpecError
        As in `training_flops` and `training_seconds`.

    Examples
    --------
    >>> import costgraph as cg
    >>> round(cg.plan.training_tokens(7e9, 30 * 86400, 1e15, devices=64, mfu=0.5) / 1e12, 2)
    1.97
    """
    graph = model if isinstance(model, Graph) else None
    per_token = _per_token("training_tokens", model, count, dims)
    speed = _speed("training_tokens", hardware, devices, mfu, dtype, graph, dims, fallback)
    return answer(given("training_tokens: seconds", seconds) * speed / per_token)


# -- cluster -----------------------------------------------------------------------------------------------------------


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
