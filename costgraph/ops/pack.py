"""Tensors beside each other in one buffer: what a collective of many of them brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..algebra.polynomial import Poly, total
from ..errors import ShapeError
from ..graph.op import Op, OpKind, Result, itself
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["Pack"]


@register
@dataclass(frozen=True, kw_only=True)
class Pack(OpKind):
    """The elements of all further operands, one after the other, written into the first."""

    name = "pack"
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the buffer."""
        if len(operands) < 2:
            raise ShapeError(f"pack of {len(operands)} operands, expected a buffer and a tensor at least")
        buffer, *parts = operands
        size = total(t.numel for t in parts)
        if not buffer.graph.same(buffer.numel, size) or any(t.dtype != buffer.dtype for t in parts):
            raise ShapeError(f"pack of {parts!r} into {buffer!r}, expected one format and {size} elements")
        return [itself(buffer)]

    def overwrites(self) -> tuple[int, ...]:
        """Return the buffer."""
        return (0,)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return all parts, and nothing of the buffer."""
        return (rules.nothing(self, op)[0], *rules.whole(self, op)[1:])
