"""A mixture put to a graph: the format of each parameter in each iteration, and loops in parts of equal formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from ...algebra.polynomial import ONE, Poly, as_poly
from ...dtypes import DType
from ...dtypes import dtype as find_dtype
from ...errors import BindingError, GraphError, UnsupportedError
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.sizes import bindings
from ...graph.tensor import Tensor
from ..rewrite import Rewriter
from .mixtures import FALLBACKS, ROLES, Mixture, Model
from .uses import is_in, summed_axes, weights_of

__all__ = ["mixed"]

#: What makes names unique: of modules, and of iterations that are played out.
_NUMBER = re.compile(r"_\d+(?=/|$)|\..*", re.ASCII)
_MOST_TURNS = 1 << 12  # no model has as many layers
#: Iterations of the loops that a parameter is in, from the outermost one.
_Path = tuple[int, ...]


def mixed(graph: Graph, name: str, mixture: Mixture, kept: Sequence[str]) -> tuple[Graph, dict[str, DType]]:
    """Give each matrix of a forward pass the format that a mixture says; return the formats by parameters as well.

    The graph has a loop for all iterations of the same formats. BindingError if formats depend on sizes that are no
    numbers; GraphError if there is nothing to give a format to, or nothing that the mixture has rules for;
    UnsupportedError if a loop that has to be parted reads or writes slices, or a matrix is of no decoder.
    """
    parter = _Parter(_Plan(graph, name, mixture, kept))
    return parter.run(graph), parter.formats


# -- which format ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """A parameter in one iteration."""

    param: Tensor
    path: _Path
    role: str
    layer: tuple[object, ...]
    """what others of the same layer have alike"""


class _Plan:
    """The format of each parameter in each iteration, and how many iterations a loop has."""

    def __init__(self, graph: Graph, name: str, mixture: Mixture, kept: Sequence[str]) -> None:
        self.place, self.mixture = f"quantize: weights {name!r}", mixture
        self.chosen: dict[Tensor, tuple[int, ...]] = {}
        """What gets a format, and the axes that products sum."""
        self.heads: set[Tensor] = set()
        """What makes logits, tables of embeddings that do among them."""
        for t, uses in weights_of(graph, kept, embeddings=True).items():
            kinds = {u.kind for u in uses}
            if kinds == {"lookup"} and not is_in(t.name, "tokens"):
                continue  # of positions and the like
            self.chosen[t] = summed_axes(t, uses)
            if is_in(t.name, "head") or len(kinds) > 1:
                self.heads.add(t)
        self.sizes = bindings(graph, {})
        self.turns: dict[Op, int] = {}
        self.formats: dict[tuple[Tensor, _Path], DType] = {}
        seen: dict[tuple[str, _Path], int] = {}
        places = list(self.walk(graph, (), seen))
        self.need_roles({p.role for p in places})
        model = self.model(places)
        orders: dict[str, dict[tuple[object, ...], int]] = {}
        for p in places:
            order = orders.setdefault(p.role, {})
            found = mixture.format(p.role, order.setdefault(p.layer, len(order)), model)
            self.formats[p.param, p.path] = find_dtype(self.fitting(p.param, found))

    def walk(self, graph: Graph, path: _Path, seen: dict[tuple[str, _Path], int]) -> Iterator[_Place]:
        """Yield the parameters of all iterations in the order in which they run."""
        for node in list(graph.nodes):
            if isinstance(node, Tensor):
                if node in self.chosen:
                    yield self.placed(node, path, seen)
            elif node.body is not None:
                inside = any(t in self.chosen for t in node.body.params)
                turns = self.count(node) if inside and node.loop is not None else 1
                for i in range(turns if inside else 0):
                    yield from self.walk(node.body, path if node.loop is None else (*path, i), seen)

    def placed(self, t: Tensor, path: _Path, seen: dict[tuple[str, _Path], int]) -> _Place:
        """Return what a parameter is; where layers come one after the other, names alike are numbered."""
        stem = _NUMBER.sub("", t.name)
        levels = tuple(stem.split("/"))
        again = seen[stem, path] = seen.get((stem, path), -1) + 1
        if t in self.heads:
            return _Place(t, path, "head", ())
        for last, role in ROLES.items():
            if levels[-len(last) :] == last:
                return _Place(t, path, role, (path, again, levels[: -len(last)]))
        if "cross" in levels:
            raise UnsupportedError(f"{self.place}: {t.name!r} is of no decoder, which alone is known")
        return _Place(t, path, "", ())

    def count(self, op: Op) -> int:
        """Return the iterations of a loop, 1 where nothing depends on them."""
        assert op.loop is not None
        if not self.mixture.layered:
            return 1
        if op not in self.turns:
            turns = self.number(op.loop.count, f"iterations of {op.name!r}")
            if turns > _MOST_TURNS:
                raise BindingError(f"{self.place}: {turns} iterations of {op.name!r}, expected at most {_MOST_TURNS}")
            self.turns[op] = int(turns)
        return self.turns[op]

    def number(self, size: Poly, what: str) -> Fraction:
        found = size.bind(self.sizes).constant
        if found is None:
            raise BindingError(f"{self.place}: {what} are {size}, expected a number: formats depend on it")
        return Fraction(found)

    def need_roles(self, roles: set[str]) -> None:
        known = roles | {"value", "packed"} if roles & {"value", "packed"} else roles
        missing = sorted(set(self.mixture.rules) - known)
        if missing:
            raise GraphError(
                f"{self.place} names {', '.join(missing)}, none of which the graph has; expected layers of costgraph.nn"
            )

    def model(self, places: Sequence[_Place]) -> Model:
        """Return what rules ask: layers, experts, and heads that share a value."""
        first = {p.role: p.param for p in reversed(places)}
        layers = len({p.layer for p in places if p.role in ("value", "packed")})
        experts = [p.param.sizes[0] for p in places if p.param.ndim == 3 and p.role == "down"]
        shared = 1
        if {"query", "key"} <= first.keys() and self.mixture.layered:
            query, key = (prod(first[role].sizes, start=ONE) for role in ("query", "key"))
            shared = int(self.number(query / key, "heads that share a value"))
        return Model(layers, int(self.number(experts[0], "experts")) if experts else 1, shared)

    def fitting(self, t: Tensor, name: str) -> str:
        """Return a format whose blocks a row of a parameter is a multiple of, where there is one."""
        row = prod((t.sizes[i] for i in self.chosen[t]), start=ONE).bind(self.sizes).constant
        for found in (name, FALLBACKS.get(name, name)):
            block = max(s.per or 1 for s in find_dtype(found).scale)
            if row is None or row % block == 0:
                return found
        return "fp16"


# -- loops in parts --------------------------------------------------------------------------------------------------


class _Parter(Rewriter):
    """Copies a graph; of a loop one for all iterations whose parameters have the same formats.

    Which iterations come first is no matter to any cost, so that those of one part need not follow each other.
    """

    lies = True

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.formats: dict[str, DType] = {}
        """Formats by the names of parameters in the new graph."""
        self.path: _Path = ()
        """First iterations of the parts that are copied."""
        different: dict[Tensor, set[DType]] = {}
        for (t, _), found in plan.formats.items():
            different.setdefault(t, set()).add(found)
        self.cut = any(len(found) > 1 for found in different.values())
        counts = [op.loop.count for op in plan.turns if op.loop is not None and self.cut]
        names = set[str]().union(*(count.names() for count in counts))
        super().__init__({name: size for name, size in plan.sizes.items() if name in names})

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        made = super().source(old, new, suffix)
        if old in self.plan.chosen:
            self.formats[made.name] = self.plan.formats[old, self.path]
        return made

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, a loop in its parts."""
        if op.loop is None or not any(t in self.plan.chosen for t in op.loop.body.params):
            return super().copy(op, new, suffix)
        outer, parts = self.path, self.parts(op.loop)
        before = {t: self.tensors[t] for t in op.loop.starts}
        for n, part in enumerate(parts):
            self.path = (*outer, part[0])
            made = self.part(op, op.loop, new, f"{suffix}.part{n}" if n else suffix, len(part) if len(parts) > 1 else 0)
            self.tensors |= zip(op.loop.starts, made.results, strict=False)  # where the next part goes on
        self.tensors |= before
        self.path = outer
        return made

    def part(self, op: Op, loop: Loop, new: Graph, suffix: str, count: int) -> Op:
        """Copy a loop with some of its iterations; with all of them where the count is 0."""
        if not count:
            return super().copy(op, new, suffix)
        if loop.xs or len(op.results) > len(loop.starts):
            raise UnsupportedError(
                f"{self.plan.place}: {op.name!r} reads or writes a slice in each iteration, expected one that hands on "
                f"alone"
            )
        kind = replace(loop.kind, body=self.body(loop.body, new, suffix), count=as_poly(count))
        return self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix)

    def parts(self, loop: Loop) -> list[list[int]]:
        """Return the iterations of a loop, those of equal formats together."""
        if not self.cut:
            return [[0]]
        own, depth = set(loop.body.params), len(self.path) + 1
        formats: dict[int, list[DType]] = {}
        for (t, path), found in self.plan.formats.items():
            if t in own and path[: depth - 1] == self.path:
                formats.setdefault(path[depth - 1], []).append(found)
        parts: dict[tuple[DType, ...], list[int]] = {}
        for i, found_there in formats.items():
            parts.setdefault(tuple(found_there), []).append(i)
        return list(parts.values())
