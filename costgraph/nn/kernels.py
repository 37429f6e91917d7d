"""Layers that are one kernel: ops whose results in between never reach memory."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.tensor import Tensor
from ..ops.blocks import fused

__all__ = ["one_kernel"]


def one_kernel(
    name: str, function: Callable[..., Tensor], *operands: Tensor, backward: str = "", **options: object
) -> Tensor:
    """Run a function of tensors that returns one of them inside a kernel (`fused`)."""
    made = fused(name, function, *operands, backward=backward, **options)
    assert isinstance(made, Tensor)
    return made
