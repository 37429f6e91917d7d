"""Norms of tensors, each one kernel that reads its operand once."""

from __future__ import annotations

from ..graph.tensor import Tensor
from ..ops.blocks import fused
from ..ops.pointwise import pointwise
from ..ops.reduce import reduce

__all__ = ["norm", "root_mean_square"]


def _root(x: Tensor, axis: int | None, operation: str, name: str) -> Tensor:
    names = [f"a{i}" for i in range(x.ndim)]
    kept = ["1" if axis is not None and i == axis % x.ndim else n for i, n in enumerate(names)]
    pattern = f"{' '.join(names)} -> {'' if axis is None else ' '.join(kept)}"

    def body(x: Tensor) -> Tensor:
        squares = pointwise("square", x)
        return pointwise("sqrt", reduce(squares, pattern, operation) if x.ndim else squares)

    made = fused(name, body, x)
    assert isinstance(made, Tensor)
    return made


def norm(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the 2-norm of all elements, or along one axis, which stays with size 1."""
    return _root(x, axis, "sum", "norm")


def root_mean_square(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the 2-norm divided by the root of the number of elements: the division is part of the mean."""
    return _root(x, axis, "mean", "norm")
