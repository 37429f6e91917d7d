"""Elementwise functions by their own names: comparisons, choices, exponentials, and tensors of one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from ..graph.graph import current_graph
from ..graph.tensor import Tensor
from ..notation.door import REAL
from .fill import fill
from .pointwise import pointwise

__all__ = [
    "equal", "exp", "full", "greater", "greater_equal", "less", "less_equal", "log", "maximum", "minimum", "sqrt",
    "where", "zeros",
]  # fmt: skip

#: A tensor, or a number, which is free to read.
Operand = Tensor | Annotated[float, REAL]


def exp(x: Tensor) -> Tensor:
    """Return e to the power of each element: one transcendental each."""
    return pointwise("exp", x)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of each element: one transcendental each."""
    return pointwise("log", x)


def sqrt(x: Tensor) -> Tensor:
    """Return the square root of each element: one transcendental each."""
    return pointwise("sqrt", x)


def maximum(a: Operand, b: Operand) -> Tensor:
    """Return the larger of two, element by element: 1 FLOP each."""
    return pointwise("maximum", a, b)


def minimum(a: Operand, b: Operand) -> Tensor:
    """Return the smaller of two, element by element: 1 FLOP each."""
    return pointwise("minimum", a, b)


def equal(a: Operand, b: Operand) -> Tensor:
    """Whether two are equal, element by element, a bool: 1 FLOP each. `==` of tensors asks if they are the same one."""
    return pointwise("eq", a, b)


def less(a: Operand, b: Operand) -> Tensor:
    """Whether `a < b`, element by element, a bool: 1 FLOP each."""
    return pointwise("less", a, b)


def less_equal(a: Operand, b: Operand) -> Tensor:
    """Whether `a <= b`, element by element, a bool: 1 FLOP each."""
    return pointwise("less_equal", a, b)


def greater(a: Operand, b: Operand) -> Tensor:
    """Whether `a > b`, element by element, a bool: 1 FLOP each."""
    return pointwise("less", b, a)


def greater_equal(a: Operand, b: Operand) -> Tensor:
    """Whether `a >= b`, element by element, a bool: 1 FLOP each."""
    return pointwise("less_equal", b, a)


def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Return the element of `a` where the condition holds, else that of `b`: 1 FLOP each.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, S))
    ...     y = cg.ops.where(x > 0, x, 0.1 * x)
    >>> y.dtype.name, cg.flops(g)
    ('fp32', 3*B*S)
    """
    return pointwise("where", condition, a, b)


def full(shape: Sequence[object], value: float, dtype: object = None, *, name: str = "full") -> Tensor:
    """Make a tensor of one number, in the graph's number format by default: no FLOPs, one write."""
    return fill(shape, value, current_graph().root.dtype if dtype is None else dtype, name=name)


def zeros(shape: Sequence[object], dtype: object = None, *, name: str = "zeros") -> Tensor:
    """Make a tensor of zeros, in the graph's number format by default: no FLOPs, one write."""
    return full(shape, 0, dtype, name=name)
