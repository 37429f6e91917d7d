"""Training efficiency: model FLOPs, hardware FLOPs, MFU and HFU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Number, Rational

import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import Poly, total
from ..algebra.symbols import shown
from ..bind.evaluate import Formula, answer, bound_answer
from ..errors import BindingError, GraphError
from ..hardware.specs import Hardware, load_hardware
from ..ir.graph import Graph, Op, bindings, need_choice, need_graph
from .costs import costs, executions, matmul_flops

__all__ = [
    "given",
    "goes_over",
    "hardware_flops",
    "hfu",
    "main_format",
    "mfu",
    "model_flops",
    "other_formats",
    "rate_of",
    "step_tokens",
    "tokens_poly",
]

Fallback = str | Mapping[str, str] | None

_COUNTS = ("executed", "full")
# Phases that do not count as model FLOPs.
_NOT_OF_THE_MODEL = ("recompute", "optimizer")


def _is_of_the_model(op: Op | None) -> bool:
    """Whether every implementation of the forward and backward pass needs an op."""
    while op is not None:
        if op.phase in _NOT_OF_THE_MODEL or op.kind.recompute:
            return False
        op = op.graph.owner
    return True


def _model_poly(graph: Graph, count: str) -> Poly:
    need_graph("model_flops", graph)
    need_choice("model_flops: count", count, _COUNTS)
    key = ("model flops", count)
    if key not in graph.cache:
        amounts = []
        for op, times, _ in executions(graph):
            amount = op.kind.flops(op).by_kind(count)["matmul"]
            if amount and _is_of_the_model(op):
                amounts.append(amount * times)
        graph.cache[key] = total(amounts)
    out: Poly = graph.cache[key]
    return out


def model_flops(graph: Graph, /, count: str = "executed", **dims: int) -> Formula:
    """Return the matmul FLOPs that the forward and backward pass need, whatever the implementation.

    Parameters
    ----------
    graph : Graph
        Training step; for a forward graph the result is its `matmul_flops`.
    count : str
        "executed", or "full" to count the whole square of causal attention, as PaLM does.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs as in PaLM's MFU: without activation recomputation, recomputation inside backward kernels (the scores in
        flash attention), and the optimizer (such as Muon's iterations).

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or `count` is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("gpt2")
    >>> step = cg.training_step(g, checkpoint=cg.every_block())
    >>> cg.model_flops(step, B=1, S=64) / cg.matmul_flops(g, B=1, S=64)
    3.0
    """
    return bound_answer(_model_poly(graph, count), bindings(graph, dims))


def hardware_flops(graph: Graph, /, count: str = "executed", **dims: int) -> Formula:
    """Return the matmul FLOPs that a training step executes, including recomputation.

    Parameters
    ----------
    graph : Graph
        Training step.
    count : str
        "executed", or "full" to count the whole square of causal attention.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        FLOPs, equal to `matmul_flops`.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or `count` is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("mlp"))
    >>> cg.hardware_flops(step, B=5) == cg.model_flops(step, B=5)  # nothing is computed again
    True
    """
    return matmul_flops(graph, count, **dims)


def step_tokens(graph: Graph, /, **dims: int) -> Formula:
    """Return the number of tokens, or samples, per step: the elements in its integer inputs.

    Parameters
    ----------
    graph : Graph
        Graph with integer inputs, such as tokens and targets, of equal size.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Tokens over all micro-batches.

    Raises
    ------
    GraphError
        If no input is of integer type, or their sizes differ.
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> cg.step_tokens(cg.training_step(cg.models.load("gpt2"), accumulate=cg.dims("A")))
    A*B*S
    """
    return bound_answer(tokens_poly(graph), bindings(graph, dims))


def tokens_poly(graph: Graph) -> Poly:
    """Return the tokens per step without binding sizes."""
    need_graph("step_tokens", graph)
    integer_inputs = [t for t in graph.tensors if t.producer is None and t.role == "input" and t.dtype.kind != "float"]
    counts = {t.storage.elements for t in integer_inputs}
    if len(counts) != 1:
        description = ", ".join(f"{t.name!r} with {t.storage.elements}" for t in integer_inputs) or "none"
        raise GraphError(
            f"step_tokens: integer inputs of graph {graph.name!r} are {description}; expected tokens or targets "
            f"with equal numbers of elements"
        )
    return counts.pop()


def goes_over(graph: Graph, batch: Poly) -> tuple[Poly, str]:
    """Return the amount of data in a batch of `batch` samples, and its unit, "tokens" or "samples".

    Tokens are counted if all inputs are integer sequences of equal size. Images, audio, indices with dense features,
    and pairs of sequences have no single number of tokens.
    """
    inputs = [t for t in graph.tensors if t.producer is None and t.role == "input"]
    all_integer = all(t.dtype.kind != "float" and t.ndim > 1 for t in inputs)
    tokens = inputs and all_integer and len({t.storage.elements for t in inputs}) == 1
    return (tokens_poly(graph), "tokens") if tokens else (batch, "samples")


# -- utilization -------------------------------------------------------------------------------------------------------


def given(place: str, value: object, *, most: int | None = None) -> sympy.Expr:
    """Return an argument as an exact number or formula.

    A float is read as the decimal number that it prints as. Raises BindingError, naming `place`, if the value is
    neither a positive number up to `most` nor a formula.
    """
    if isinstance(value, sympy.Expr) and value.free_symbols:
        return value
    expected = "a positive number or a formula" if most is None else f"a number above 0 and up to {most}, or a formula"
    try:
        number = _exact(value) if isinstance(value, Number | sympy.Expr) and not isinstance(value, bool) else None
    except (ValueError, TypeError, OverflowError):
        number = None
    if number is None or number <= 0 or (most is not None and number > most):
        raise BindingError(f"{place}: {shown(value)}, expected {expected}")
    return sympy.Rational(number.numerator, number.denominator)


def _exact(value: object) -> Fraction:
    if isinstance(value, Rational | sympy.Rational):
        return Fraction(int(value.numerator), int(value.denominator))
    number = float(value)  # type: ignore[arg-type]  # what has no such value is refused by the caller
    if not math.isfinite(number):
        raise ValueError
    return Fraction(repr(number))


class Utilization(float):
    """A utilization that records the peak rate it refers to."""

    dtype: str
    """number format of the peak rate"""
    rate: float
    """peak rate in FLOP/s"""
    others: Mapping[str, Formula]
    """matmul FLOPs in other formats, by format"""

    def __new__(cls, value: float, dtype: str, rate: float, others: Mapping[str, Formula]) -> Utilization:
        """Create the number with these attributes."""
        out = super().__new__(cls, value)
        out.dtype, out.rate, out.others = dtype, rate, others
        return out

    def __getnewargs__(self) -> tuple[float, str, float, Mapping[str, Formula]]:  # type: ignore[override]
        """Return the arguments for `copy` and `pickle`."""
        return float(self), self.dtype, self.rate, self.others


def other_formats(graph: Graph, dtype: str, /, **dims: int) -> dict[str, Formula]:
    """Return the executed matmul FLOPs in formats other than `dtype`, by format."""
    return {name: amount for name, amount in _matmul_formats(graph, **dims).items() if name != dtype}


def _matmul_formats(graph: Graph, **dims: int) -> dict[str, Formula]:
    """Return the executed matmul FLOPs by number format."""
    table = costs(graph, count="executed", **dims).filter(kind="matmul", direction="compute").group("dtype")
    return {name: costs_of_format.total().matmul for name, costs_of_format in table.items()}


def main_format(graph: Graph, /, **dims: int) -> str:
    """Return the number format whose peak rate applies to a graph.

    It is the matmul format of the precision policy or, without a policy, the format with the most matmul FLOPs. Raises
    BindingError if that depends on an open size, and GraphError if there is no matmul.
    """
    amounts = _matmul_formats(graph, **dims)
    if not amounts:
        raise GraphError(f"graph {graph.name!r} has no matmul, expected one: its format selects the peak rate")
    if graph.root.matmul_dtype is not None:
        return graph.root.matmul_dtype
    if len(amounts) == 1:
        return next(iter(amounts))
    if any(isinstance(v, sympy.Expr) for v in amounts.values()):
        raise BindingError(
            f"matmuls in {', '.join(sorted(amounts))}; bind all sizes, or select a peak rate with dtype="
        )
    return max(amounts, key=lambda name: float(amounts[name]))


def rate_of(
    place: str, hardware: object, dtype: str | None, graph: Graph | None, dims: Mapping[str, int], fallback: Fallback
) -> sympy.Expr:
    """Return a dense peak rate in FLOP/s: the given rate, or the device's rate for `dtype` or `main_format`."""
    if isinstance(hardware, int | float | Rational | sympy.Expr):
        return given(f"{place}: rate", hardware)
    device: Hardware = load_hardware(hardware)  # type: ignore[arg-type]  # refused there
    if dtype is None:
        if graph is None:
            raise BindingError(f"{place}: dtype=None, expected a number format with a peak rate, such as bf16")
        dtype = main_format(graph, **dims)
    return as_expr(device.rate(dtype, fallback=fallback).value)


def mfu(
    step: Graph | Formula, /, seconds: Formula, hardware: object, *, dtype: str | None = None, count: str = "executed",
    devices: Formula = 1, fallback: Fallback = None, **dims: int,
) -> Formula:  # fmt: skip
    """Return the model FLOPs utilization: model FLOP/s over the peak rate.

    Parameters
    ----------
    step : Graph, number or sympy.Expr
        Training step, or its model FLOPs.
    seconds : number or sympy.Expr
        Time per step.
    hardware : str, path-like, Hardware, number or sympy.Expr
        Device, or its peak rate in FLOP/s.
    dtype : str, optional
        Format of the peak rate, by default the matmul format of the precision policy or, without a policy, the format
        with the most matmul FLOPs.
    count : str
        "executed", or "full" to count the whole square of causal attention.
    devices : number or sympy.Expr
        Number of devices.
    fallback : str or mapping, optional
        As in `Hardware.rate`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float, int or sympy.Expr
        Fraction of 1. A number for a graph on a device also has `.dtype` and `.rate`, the format and value of the peak
        rate, and `.others`, the matmul FLOPs in other formats.

    Raises
    ------
    BindingError, GraphError, SpecError
        If an amount is not positive, a format is missing, or the device or its rate is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> round(cg.mfu(5.4e13, 0.1, 670e12), 3)  # a matmul that was measured
    0.806
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16-mixed")
    >>> round(cg.mfu(step, 0.5, "h100-sxm", B=1, S=4096), 3)
    0.399
    """
    return _utilization("mfu", step, seconds, hardware, dtype, count, devices, fallback, dims)


def hfu(
    step: Graph | Formula, /, seconds: Formula, hardware: object, *, dtype: str | None = None, count: str = "executed",
    devices: Formula = 1, fallback: Fallback = None, **dims: int,
) -> Formula:  # fmt: skip
    """Return the hardware FLOPs utilization: as `mfu`, for all executed matmul FLOPs.

    Parameters
    ----------
    step : Graph, number or sympy.Expr
        Training step, or its hardware FLOPs.
    seconds, hardware, dtype, count, devices, fallback, **dims : object
        As in `mfu`.

    Returns
    -------
    float, int or sympy.Expr
        Fraction of 1, at least the MFU.

    Raises
    ------
    BindingError, GraphError, SpecError
        As in `mfu`.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("llama-3-8b"), precision="bf16-mixed", checkpoint=cg.every_block())
    >>> round(cg.hfu(step, 0.5, "h100-sxm", B=1, S=4096), 3)
    0.497
    """
    return _utilization("hfu", step, seconds, hardware, dtype, count, devices, fallback, dims)


def _utilization(
    place: str, step: Graph | Formula, seconds: Formula, hardware: object, dtype: str | None, count: str,
    devices: Formula, fallback: Fallback, dims: Mapping[str, int],
) -> Formula:  # fmt: skip
    graph = step if isinstance(step, Graph) else None
    if graph is not None:
        work = as_expr((model_flops if place == "mfu" else hardware_flops)(graph, count, **dims))
    else:
        work = given(f"{place}: FLOPs", step)
        if dims:
            raise BindingError(
                f"{place}: sizes {', '.join(sorted(dims))} with a number of FLOPs; expected a graph, or no sizes"
            )
    of_device = not isinstance(hardware, int | float | Rational | sympy.Expr)
    if graph is not None and of_device and dtype is None:
        dtype = main_format(graph, **dims)
    rate = rate_of(place, hardware, dtype, graph, dims, fallback)
    ratio = answer(work / (given(f"{place}: seconds", seconds) * given(f"{place}: devices", devices) * rate))
    if graph is None or dtype is None or not of_device or isinstance(ratio, sympy.Expr):
        return ratio
    return Utilization(ratio, dtype, float(rate), other_formats(graph, dtype, **dims))
