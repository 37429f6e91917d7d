"""What stages of a pipeline hand to their neighbours, as one of them sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.op import OpKind, Result, itself
from ..graph.tensor import Tensor
from . import rules, splits
from .fresh import Fresh
from .registry import register

__all__ = ["Receive", "Send"]


@register
@dataclass(frozen=True, kw_only=True)
class Receive(Fresh):
    """A tensor that a neighbour along an axis of the mesh has sent."""

    name = "receive"
    axis: str = "pp"
    """Name of the axis."""


@register
@dataclass(frozen=True, kw_only=True)
class Send(OpKind):
    """A tensor that goes to a neighbour along an axis of the mesh; its result is the tensor, which stays here."""

    name = "send"
    axis: str = "pp"
    """Name of the axis."""
    flops, reads, writes = rules.free, rules.whole, rules.nothing
    placed = splits.as_it_is

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the tensor."""
        rules.need_operands(self, operands, 1)
        return [itself(operands[0])]
