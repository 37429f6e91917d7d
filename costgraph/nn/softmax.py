"""Softmax and its logarithm along one axis. Everything here is made of the ops below it; no cost is stated."""

from __future__ import annotations

from typing import Annotated

from ..graph.arguments import need_tensor
from ..graph.tensor import Tensor
from ..notation.door import READ
from ..ops.layout import axis_of
from ..ops.pointwise import pointwise
from ..ops.reduce import reduce
from .kernels import one_kernel

__all__ = ["along", "log_softmax", "softmax"]


def along(x: Tensor, axis: int) -> tuple[str, str]:
    """Return the patterns that reduce one axis and keep it with size 1."""
    need_tensor("softmax or norm", x)
    at, names = axis_of(x, axis), [f"a{i}" for i in range(x.ndim)]
    kept = [*names]
    kept[at] = "1"
    return " ".join(names), " ".join(kept)


def softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "softmax") -> Tensor:
    """Exponentials that add up to 1, in one kernel.

    Parameters
    ----------
    x : Tensor
        Any shape.
    axis : int
        Axis along which they add up to 1.
    name : str
        Name of the kernel.

    Returns
    -------
    Tensor
        FLOPs an element: maximum, subtraction, sum and division, and one exp (derived from the ops inside).

    Raises
    ------
    ShapeError
        If there is no such axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     p = cg.softmax(g.input("x", (B, S)), -1)
    >>> cg.flops(g), cg.bytes_moved(g)
    (5*B*S, 8*B*S)
    """
    names, kept = along(x, axis)

    def body(x: Tensor) -> Tensor:
        e = pointwise("exp", x - reduce(x, f"{names} -> {kept}", "max"))
        return e / reduce(e, f"{names} -> {kept}", "sum")

    return one_kernel(name, body, x, backward="softmax")


def log_softmax(x: Tensor, axis: Annotated[int, READ] = -1, *, name: str = "log_softmax") -> Tensor:
    """Logarithm of the softmax, in one kernel."""
    names, kept = along(x, axis)

    def body(x: Tensor) -> Tensor:
        shifted = x - reduce(x, f"{names} -> {kept}", "max")
        return shifted - pointwise("log", reduce(pointwise("exp", shifted), f"{names} -> {kept}", "sum"))

    return one_kernel(name, body, x, backward="log_softmax")
