"""Activations, softmax and log-softmax, and the helper that runs a function as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from ..ir.graph import Tensor, need_choice, need_tensor, positive, scope
from ..notation.validation import READ
from ..ops.elementwise import pointwise
from ..ops.fill import fill
from ..ops.index import gather, scatter
from ..ops.layout import axis_of
from ..ops.loops import fused
from ..ops.reduce import reduce

__all__ = [
    "gelu",
    "relu",
    "sigmoid",
    "silu",
    "tanh",
    "one_kernel",
    "segment_softmax",
    "along",
    "log_softmax",
    "softmax",
]


# -- activations -------------------------------------------------------------------------------------------------------


def relu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return max(x, 0): 1 FLOP per element."""
    return pointwise("relu", x, inplace=inplace)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return GELU: 5 FLOPs per element with erf, 9 with `approximate="tanh"`, one of them transcendental."""
    need_choice("gelu: approximate", approximate, ("none", "tanh"))
    return pointwise("gelu" if approximate == "none" else "gelu_tanh", x)


def silu(x: Tensor, *, inplace: bool = False) -> Tensor:
    """Return x / (1 + exp(-x)): 4 FLOPs per element, one of them transcendental."""
    return pointwise("silu", x, inplace=inplace)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)): 4 FLOPs per element, one of them transcendental."""
    return pointwise("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """Return tanh(x): one transcendental per element."""
    return pointwise("tanh", x)


# -- kernels -----------------------------------------------------------------------------------------------------------


def one_kernel(
    name: str, function: Callable[..., Tensor], *operands: Tensor, backward: str = "", **options: object
) -> Tensor:
    """Run a function that returns a single tensor as one kernel (`fused`)."""
    result = fused(name, function, *operands, backward=backward, **options)
    assert isinstance(result, Tensor)
    return result


# -- segment softmax ---------------------------------------------------------------------------------------------------


def segment_softmax(x: Tensor, segments: Tensor, count: object, *, name: str = "segment_softmax") -> Tensor:
    """Apply softmax over the rows of each segment, as attention over the edges of a graph does.

    Parameters
    ----------
    x : Tensor
        Rows along its first axis, (E, ...).
    segments : Tensor
        Segment of each row, (E,) integers.
    count : sympy.Expr or int
        Number of segments.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape of `x`. Seven kernels: a maximum and a sum per segment, two lookups and three elementwise ops.

    Raises
    ------
    GraphError, ShapeError
        If an argument is not a tensor, or `segments` is not one integer per row.

    Examples
    --------
    >>> import costgraph as cg
    >>> E, N, H = cg.dims("E N H")
    >>> with cg.Graph("g") as g:
    ...     p = cg.nn.segment_softmax(g.input("scores", (E, H)), g.input("ends", (E,), "int64"), N)
    >>> cg.flops(g)  # a comparison, a subtraction, an exp, an addition and a division
    5*E*H
    """
    need_tensor("segment_softmax", x, segments)
    shape = (positive("segment_softmax: count", count), *x.sizes[1:])
    with scope(name):
        lowest = fill(shape, float("-inf"), x.dtype, name="lowest")
        # not in place: the backward pass compares the maxima with their initial values
        largest = scatter(lowest, segments, x, "max", inplace=False, name="largest")
        e = pointwise("exp", x - gather(largest, segments, name="largest_of_each"))
        total = scatter(fill(shape, 0, x.dtype, name="nothing"), segments, e, "add", name="sum")
        return e / gather(total, segments, name="sum_of_each")


# -- softmax -----------------------------------------------------------------------------------------------------------


def along(x: Tensor, axis: int) -> tuple[str, str]:
    """Return the patterns that reduce one axis and keep it with size 1."""
    need_tensor("softmax or norm", x)
    dim, names = axis_of(x, axis), [f"a{i}" for i in range(x.ndim)]
    kept_names = [*names]
    kept_names[dim] = "1"
    return " ".join(names), " ".join(kept_names)


def softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "softmax") -> Tensor:
    """Apply softmax along an axis, in one kernel.

    Parameters
    ----------
    x : Tensor
        Any shape.
    axis : int
        Axis along which the results sum to 1.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        FLOPs per element: maximum, subtraction, sum and division, and one exp (derived from the ops inside).

    Raises
    ------
    ShapeError
        If the axis does not exist.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     p = cg.softmax(g.input("x", (B, S)), -1)
    >>> cg.flops(g), cg.bytes_moved(g)
    (5*B*S, 8*B*S)
    """
    names, row = along(x, axis)

    def body(x: Tensor) -> Tensor:
        e = pointwise("exp", x - reduce(x, f"{names} -> {row}", "max"))
        return e / reduce(e, f"{names} -> {row}", "sum")

    return one_kernel(name, body, x, backward="softmax")


def log_softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "log_softmax") -> Tensor:
    """Apply log-softmax along an axis, in one kernel."""
    names, row = along(x, axis)

    def body(x: Tensor) -> Tensor:
        shifted = x - reduce(x, f"{names} -> {row}", "max")
        return shifted - pointwise("log", reduce(pointwise("exp", shifted), f"{names} -> {row}", "sum"))

    return one_kernel(name, body, x, backward="log_softmax")
