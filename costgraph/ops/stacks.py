"""Stacks of slices, one of each iteration, without a loop around: made empty, and full once all slices are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..algebra.polynomial import ZERO, Poly
from ..errors import ShapeError
from ..graph.op import OpKind, Result, itself
from ..graph.strides import contiguous, numel
from ..graph.tensor import Storage, Tensor
from . import rules
from .fresh import Fresh
from .registry import register

__all__ = ["Empty", "Stacked"]


@register
@dataclass(frozen=True, kw_only=True)
class Empty(Fresh):
    """A stack of slices before any of them is written: storage without content."""

    name = "empty"
    writes = rules.nothing


@register
@dataclass(frozen=True, kw_only=True)
class Stacked(OpKind):
    """The same stack when all of its slices are written: a name that says on what it depends."""

    name = "stacked"
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the first operand; the others are written into it from now on."""
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
        return [itself(stack)]


def _move(t: Tensor, old: Storage, new: Storage, offset: Poly) -> None:
    """Let a tensor, and what is a view of it, lie in another storage."""
    left = [t]
    while left:
        moved = left.pop()
        moved.storage, moved.offset = new, moved.offset + offset
        left += [r for op in moved.graph.successors(moved) for r in op.results if r.storage is old and r not in left]
