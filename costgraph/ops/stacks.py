"""Stacks of slices, one of each iteration, without a loop around: made empty, and full once all slices are written."""

from __future__ import annotations

from collections.abc import Sequence

from ..algebra.polynomial import ZERO, Poly
from ..errors import ShapeError
from ..graph.op import Attrs, OpKind, Result
from ..graph.strides import contiguous, numel
from ..graph.tensor import Storage, Tensor
from .registry import register
from .rules import free, nothing

__all__ = ["EMPTY", "STACKED"]

# A stack of slices before any of them is written: storage without content.
EMPTY = register(
    OpKind(
        name="empty",
        infer=lambda operands, attrs: [Result(attrs["sizes"], attrs["dtype"])],
        flops=free,
        reads=nothing,
        writes=nothing,
    )
)


def _whole(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    stack, at = operands[0], ZERO
    for t in operands[1:]:
        if t.sizes[t.ndim - stack.ndim + 1 :] != stack.sizes[1:] or t.dtype != stack.dtype:
            raise ShapeError(f"stack {stack!r} of {operands[1:]!r}, expected slices of it, one or several each")
        if t.storage is not stack.storage:
            # what an iteration makes for a stack is written into its slice at once: there it lies from now on
            t.strides = contiguous(t.sizes)
            _move(t, t.storage, stack.storage, at)
        at = at + numel(t.sizes)
    if not stack.graph.same(at, stack.numel):
        raise ShapeError(f"stack {stack!r} of {operands[1:]!r}, expected all of its slices")
    return [Result(stack.sizes, stack.dtype, stack.strides, of=0, offset=stack.offset)]


# The same stack when all of its slices are written: a name that says on what it depends.
STACKED = register(OpKind(name="stacked", infer=_whole, flops=free, reads=nothing, writes=nothing))


def _move(t: Tensor, old: Storage, new: Storage, offset: Poly) -> None:
    """Let a tensor, and what is a view of it, lie in another storage."""
    left = [t]
    while left:
        moved = left.pop()
        moved.storage, moved.offset = new, moved.offset + offset
        left += [r for op in moved.graph.successors(moved) for r in op.results if r.storage is old and r not in left]
