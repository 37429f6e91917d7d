"""How large indices may be: rows of the tables that they look up, followed back to where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ...algebra.polynomial import Poly
from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.strides import numel
from ...graph.tensor import Tensor
from ...ops.cached import Append, Cache
from ...ops.collectives import Around, Collective, Part
from ...ops.fill import Assign, Fill, Revised
from ...ops.grouped import Dispatch, TopK
from ...ops.index import Arange, Gather, Indexed
from ...ops.keep import Keep, StopGradient
from ...ops.merge import Merge
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ...ops.ordering import Sort
from ...ops.pack import Pack
from ...ops.pointwise import Pointwise
from ...ops.reduce import Reduce
from ...ops.stacks import Stacked
from ...ops.stated import Transfer
from .emitter import Numbers

__all__ = ["Indices"]

#: Kinds that hand their operands' numbers on.
_MOVES = (
    Rearrange
    | Slice
    | Expand
    | Concat
    | Keep
    | StopGradient
    | Cache
    | Append
    | Transfer
    | Around
    | Collective
    | Part
    | Pack
    | Gather
    | Stacked
    | Revised
    | Assign
)


@dataclass(frozen=True)
class _Origin:
    """Where integers come from."""

    sources: frozenset[Tensor] = frozenset()
    """sources whose numbers can be chosen"""
    below: float = 0
    """what the numbers that an op makes are less than"""

    def __or__(self, other: _Origin) -> _Origin:
        return _Origin(self.sources | other.sources, max(self.below, other.below))


class Indices:
    """What is known of a graph's integers before it runs: followed through views, copies, fused bodies and loops."""

    def __init__(self, graph: Graph, numbers: Numbers) -> None:
        self._numbers = numbers
        self._mesh = graph.sharding.mesh if graph.sharding is not None else None
        self._limits: dict[Tensor, int] = {}
        self._origins: dict[Tensor, _Origin] = {}
        self._seen: dict[Tensor, set[Op]] = {}
        for _ in range(2):  # the second time with what a loop carries from one iteration to the next
            self._follow(graph)

    def limit(self, t: Tensor) -> int | None:
        """Return how many rows the smallest table has that a source looks up, None for one that looks up nothing."""
        return self._limits.get(t)

    def valid(self, op: Op) -> bool:
        """Whether the indices of a lookup are within its table, where sources are."""
        return all(self._of(t).below <= rows for t, rows in self._rows(op))

    def within(self, t: Tensor, rows: int) -> bool:
        """Whether integers are below a number, where sources are."""
        return self._of(t).below <= rows

    def _rows(self, op: Op) -> list[tuple[Tensor, int]]:
        """Return the tensors of indices, and what each of them has to be below."""
        assert isinstance(op.kind, Indexed)
        sizes = op.operands[0].sizes[op.kind.batch :]
        if op.kind.part and self._mesh is not None:  # indices name rows of all ranks
            sizes = (sizes[0] * self._mesh[op.kind.part], *sizes[1:])
        return [(t, self._numbers(n)) for t, n in zip(op.kind.places(op.operands), sizes, strict=False)]

    def _follow(self, graph: Graph) -> None:
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                self._origins[t] = _Origin(frozenset([t]))
        for op in graph.ops:
            if isinstance(op.kind, Dispatch):
                for source in self._of(op.operands[0]).sources:
                    most = self._numbers(op.kind.experts)
                    self._limits[source] = min(self._limits.get(source, most), most)
            if isinstance(op.kind, Indexed):
                for t, rows in self._rows(op):
                    self._limits |= {s: min(self._limits.get(s, rows), rows) for s in self._of(t).sources}
            if op.body is not None:
                self._through(op)
            else:
                for i, t in enumerate(op.results):
                    self._origins[t] = self._made(op, i)

    def _sent(self, op: Op, experts: Poly, i: int) -> _Origin:
        """Return what the numbers of a dispatch are below: tokens, ends, rows, experts."""
        rows, tokens = op.results[0].sizes[0], numel(op.operands[0].sizes[:-1])
        return _Origin(below=self._numbers((tokens, rows + 1, rows, experts)[min(i, 3)]))

    def _through(self, op: Op) -> None:
        assert op.body is not None
        handed_on = {} if op.loop is None else dict(zip(op.loop.carries, op.loop.nexts, strict=True))
        for outer, inner in zip(op.operands, op.body.formals, strict=True):
            before = self._origins.get(handed_on[inner]) if inner in handed_on else None
            self._origins[inner] = self._of(outer) if before is None else self._of(outer) | before
        self._follow(op.body)
        for outer, inner in zip(op.results, op.body.outputs, strict=True):
            self._origins[outer] = self._of(inner)

    def _of(self, t: Tensor) -> _Origin:
        return self._origins.get(t, _Origin(below=inf))

    def _made(self, op: Op, i: int) -> _Origin:
        below: float = inf
        match op.kind:
            case kind if op.operands and _hands_on(kind):
                found = _Origin()
                for t in _moved(kind, op.operands):
                    found |= self._of(t)
                return found
            case Dispatch() as kind:
                return self._sent(op, kind.experts, i)
            case Merge() as kind:
                rows = self._numbers(kind.rows)
                below = (rows + 1, rows, rows, self._numbers(op.results[0].sizes[0]))[i]
            case Arange() as kind:
                below = self._numbers(kind.start + 1 if kind.back else kind.size + kind.start)
            case Reduce() as kind if kind.operation.startswith("arg"):
                axes = zip(kind.pattern.operands[0], op.operands[0].sizes, strict=True)
                kept = kind.pattern.result_names
                below = self._numbers(next(n for a, n in axes if a.names and a.names[0] not in kept))
            case TopK() | Sort():
                below = self._numbers(op.operands[0].sizes[-1])
            case Fill() as kind if (value := self._numbers.fact(kind.value)) >= 0:
                below = value + 1
        return _Origin(below=below)


def _hands_on(kind: OpKind) -> bool:
    """Whether the numbers of its results are those of operands."""
    return isinstance(kind, _MOVES) or (isinstance(kind, Pointwise) and kind.function.name in ("copy", "cast"))


def _moved(kind: OpKind, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the operands whose numbers are handed on."""
    if isinstance(kind, Gather):
        return operands[:1]
    return operands[1:] if isinstance(kind, Assign | Append) else operands
