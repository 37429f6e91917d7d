"""What kinds share whose results come from nothing: a shape and a number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import DType
from ..graph.facts import Flag, Shape
from ..graph.op import OpKind, Result
from ..graph.tensor import Tensor
from . import rules, splits

__all__ = ["Fresh"]


@dataclass(frozen=True, kw_only=True)
class Fresh(OpKind):
    """Makes a dense tensor, and reads nothing."""

    sizes: Shape
    dtype: DType
    host: Flag = False
    """Whether it is made in memory of the host."""
    flops, reads, writes = rules.free, rules.no_operands, rules.all_results
    placed = splits.fresh

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return it."""
        rules.need_operands(self, operands, 0)
        return [Result(self.sizes, self.dtype, host=self.host)]
