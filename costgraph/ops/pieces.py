"""What iterations of a loop leave behind, one storage each, and sums that they add to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..dtypes import DType
from ..errors import ShapeError
from ..graph.facts import Flag, Index, Shape
from ..graph.graph import Graph, apply
from ..graph.op import Op, OpKind, Result, itself
from ..graph.tensor import Tensor
from . import rules, splits
from .fresh import Fresh
from .functions import FUNCTIONS
from .layout import contiguous_copy
from .moves import Places, need_places
from .pointwise import Pointwise
from .reach import alike
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = ["Absent", "Accumulate", "absent", "accumulate", "slice_of", "taken"]


@register
@dataclass(frozen=True, kw_only=True)
class Absent(Fresh):
    """What a loop adds to before there is anything: it takes no memory, and the first term becomes it."""

    name = "absent"
    pieces: Index = 0
    """Leading axes whose positions are storages of their own."""
    domain: Places = None
    writes = rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the sum."""
        return [replace(made, pieces=self.pieces, domain=self.domain) for made in Fresh.infer(self, operands)]

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold the domain against the shape."""
        need_places(self.domain, self.sizes)


@register
@dataclass(frozen=True, kw_only=True)
class Accumulate(OpKind):
    """A term added to a sum in place; where there is nothing yet to add to, the term is the sum, at no cost.

    One that is `lent`, as it is someone else's as well, is copied there.
    """

    name = "accumulate"
    restricted = takes_complex = True
    lent: Flag = False
    flops, reads, writes = rules.per_result, rules.whole, rules.all_results
    placed = splits.summed

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the sum."""
        rules.need_operands(self, operands, 2)
        so_far, term = operands
        if so_far.sizes != term.sizes or so_far.dtype != term.dtype:
            raise ShapeError(f"accumulate {term!r} into {so_far!r}: expected one shape and format")
        alike(operands)
        return [itself(so_far)]

    def overwrites(self) -> tuple[int, ...]:
        """Return the sum."""
        return (0,)


def absent(sizes: Shape, dtype: DType, pieces: int = 0, *, name: str = "absent") -> Tensor:
    """Return a sum before its first term: a carry of a loop that `accumulate` adds to; it takes no memory."""
    return apply(Absent(sizes=sizes, dtype=dtype, pieces=pieces), [], name)[0]


def accumulate(so_far: Tensor, term: Tensor, *, lent: bool = False, name: str = "accumulate") -> Tensor:
    """Add a term in place: one FLOP an element. Where the sum is still absent the term becomes it, at no cost.

    One that is `lent`, as others hold it too, is copied there.
    """
    dense = contiguous_copy(term)
    return apply(Accumulate(lent=lent and dense is term), [so_far, dense], name)[0]


def taken(op: Op) -> Op:
    """Return what an op that adds a term that is lent does where there is nothing yet to add to: a copy of it."""
    copy = Op(op.graph, Pointwise(function=FUNCTIONS["copy"]), op.name, op.operands[1:], op.scope, op.phase)
    copy.results = op.results
    return copy


def slice_of(body: Graph, t: Tensor, name: str) -> Tensor:
    """Add an input of a loop's body that stands for one position along the first axis of a tensor."""
    inner = body.formal(t, name, t.sizes[1:], t.strides[1:], max(t.storage.pieces - 1, 0))
    inner.domain = None if t.domain is None else (t.domain[0], t.domain[1] - 1, t.domain[2] - 1)
    return inner
