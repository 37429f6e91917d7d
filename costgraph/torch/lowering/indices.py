"""How large indices may be: rows of the tables that they look up, followed back to where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.strides import numel
from ...graph.tensor import Tensor
from ...ops.grouped import Dispatch
from ...ops.index import Gather, Scatter
from .emitter import Numbers

__all__ = ["Indices"]

#: Kinds that hand their operands' numbers on.
_MOVES = frozenset(
    {
        "rearrange",
        "slice",
        "expand",
        "concat",
        "keep",
        "cache",
        "append",
        "transfer",
        "collective",
        "gather",
        "stacked",
        "assign",
    }
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
    """What is known of the integers of a graph before it runs.

    Parameters
    ----------
    graph : Graph
        Followed through views, copies, fused bodies and loops.
    numbers : Numbers
        Of its formulas.
    """

    def __init__(self, graph: Graph, numbers: Numbers) -> None:
        self._numbers = numbers
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
        origin = self._origins.get(op.operands[1], _Origin(below=inf))
        return origin.below <= self._rows(op)

    def within(self, t: Tensor, rows: int) -> bool:
        """Whether integers are below a number, where sources are."""
        return self._of(t).below <= rows

    def _rows(self, op: Op) -> int:
        along = op.attrs.get("mode") == "along" or op.attrs.get("along")
        return self._numbers(op.operands[0].sizes[-1 if along else 0])

    def _follow(self, graph: Graph) -> None:
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                self._origins[t] = _Origin(frozenset([t]))
        for op in graph.ops:
            if isinstance(op.kind, Dispatch):
                for source in self._of(op.operands[0]).sources:
                    most = self._numbers(op.attrs["experts"])
                    self._limits[source] = min(self._limits.get(source, most), most)
            if isinstance(op.kind, Gather | Scatter):
                for source in self._of(op.operands[1]).sources:
                    self._limits[source] = min(self._limits.get(source, self._rows(op)), self._rows(op))
            if op.body is not None:
                self._through(op)
            else:
                for i, t in enumerate(op.results):
                    self._origins[t] = self._sent(op, i) if isinstance(op.kind, Dispatch) else self._made(op)

    def _sent(self, op: Op, i: int) -> _Origin:
        """Return what the numbers of a dispatch are below: tokens, ends, rows, experts."""
        rows, experts = op.results[0].sizes[0], op.attrs["experts"]
        tokens = numel(op.operands[0].sizes[:-1])
        return _Origin(below=self._numbers((tokens, rows + 1, rows, experts)[min(i, 3)]))

    def _through(self, op: Op) -> None:
        assert op.body is not None
        carries = op.attrs.get("carries", 0)
        for i, (outer, inner) in enumerate(zip(op.operands, op.body.formals, strict=True)):
            before = self._origins.get(op.body.outputs[i]) if i < carries else None
            self._origins[inner] = self._of(outer) if before is None else self._of(outer) | before
        self._follow(op.body)
        for outer, inner in zip(op.results, op.body.outputs, strict=True):
            self._origins[outer] = self._of(inner)

    def _of(self, t: Tensor) -> _Origin:
        return self._origins.get(t, _Origin(below=inf))

    def _made(self, op: Op) -> _Origin:
        name = op.kind.name
        copies = name == "pointwise" and op.attrs["function"].name in ("copy", "cast")
        if (name in _MOVES or copies) and op.operands:
            given = {"gather": op.operands[:1], "assign": op.operands[1:], "append": op.operands[1:]}.get(
                name, op.operands
            )
            found = self._of(given[0])
            for t in given[1:]:
                found |= self._of(t)
            return found
        if name == "arange":
            return _Origin(below=self._numbers(op.attrs["size"] + op.attrs.get("start", 0)))
        if name == "reduce" and op.attrs["operation"].startswith("arg"):
            pattern = op.attrs["pattern"]
            names = pattern.operand_names(0)
            at = next(
                i
                for i, a in enumerate(pattern.operands[0])
                if a.names and a.names[0] in set(names) - set(pattern.result_names)
            )
            return _Origin(below=self._numbers(op.operands[0].sizes[at]))
        if name == "top_k":
            return _Origin(below=self._numbers(op.operands[0].sizes[-1]))
        if name == "fill":
            value = op.attrs["value"]
            return _Origin(below=value + 1 if value >= 0 else inf)
        return _Origin(below=inf)
