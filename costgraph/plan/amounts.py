"""Training FLOPs, time and tokens as formulas; any argument may be a symbol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import poly
from ..analysis.params import param_count
from ..analysis.training import given, model_flops, rate_of, tokens_poly
from ..analysis.training_memory import is_step
from ..bind.evaluate import Formula, answer
from ..errors import BindingError, GraphError
from ..ir.graph import Graph, bindings
from ..notation.validation import guarded

__all__ = [
    "LeadingTerm",
    "leading_term",
    "training_days",
    "training_flops",
    "training_seconds",
    "training_tokens",
]

Fallback = str | Mapping[str, str] | None

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
