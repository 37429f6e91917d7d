"""Rows that ranks have sent to those that have their experts, put in order there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..graph.facts import Amount, Flag, Size
from ..graph.op import Flops, Op, OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["Merge"]


@register
@dataclass(frozen=True, kw_only=True)
class Merge(OpKind):
    """Rows that came from several ranks, those of each ordered by expert, as one list that is ordered by expert.

    It is given where on each rank the rows of this one's experts end, rank by rank. As many rows come from each.
    """

    name = "merge"
    restricted = True
    ranks: Size
    """How many they are."""
    axis: str
    """The axis of a mesh that they are on."""
    rows: Size
    """How many rows have come."""
    chosen: Amount
    """How many of the experts here a token chooses, in the mean."""
    owners: Flag = False
    """Whether the expert of each row is wanted as well: its number here."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Where the rows of each expert end, which row stands where, and where each one is."""
        rules.need_operands(self, operands, 1)
        (ends,) = operands
        if ends.ndim != 1 or ends.dtype.kind != "int":
            raise ShapeError(f"rows that end at {ends!r}: expected integers (ranks * experts,)")
        rows = [Result((self.rows,), find_dtype("int64"))] * (3 if self.owners else 2)
        return [Result((ends.sizes[0] / self.ranks,), ends.dtype), *rows]

    def flops(self, op: Op) -> Flops:
        """Count one for each row to order it, and the sums over experts of all ranks: where rows end."""
        return Flops(pointwise=self.rows + rules.elements(op.operands[0]))
