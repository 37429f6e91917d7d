"""Parameters by name, by scope, and by the layers of a stack: `head`, `*/bias`, `layers[16:]`, `layers/31/mlp`.

Parameters of a loop belong to all of its iterations. Where a pattern names some of them, the loop is split into loops
that follow each other, so that each has parameters of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate, count, pairwise

from ..algebra.polynomial import ONE, ZERO, Poly, as_poly, poly
from ..algebra.symbols import shown
from ..errors import GraphError, UnsupportedError
from ..ir.graph import Graph, Op, Tensor, base_name, iterations_of, scopes_of
from .rewrite import Rewriter

__all__ = [
    "Layers",
    "layers_of",
    "Names",
    "patterns_of",
    "split_at_layers",
    "with_frozen",
]


# -- layers ------------------------------------------------------------------------------------------------------------
# Which ops make up one layer of a stack: in a loop, in an unrolled loop, and in numbered scopes of a program.
#
# A layer is one iteration of a loop. Where layers of several kinds take turns, it is each scope that
# `costgraph.nn.layers` has marked in `Graph.layers`. `unroll` adds each iteration to `Graph.layers`, as a scope with
# the iteration behind it: `layers.i3`, or `layers/local.i0.i3`. Without a loop, the scopes `h/0`, `h/1`, ... are
# layers.


def layers_of(loop: Op, suffix: str) -> set[str]:
    """Return the entries of `Graph.layers` for one iteration of a loop that is unrolled.

    Parameters
    ----------
    loop : Op
        The loop.
    suffix : str
        The iteration, with those of the loops around it, such as `.i0.i3`.

    Returns
    -------
    set of str
        The scope of the loop, unless it is inside another layer, and the marked scopes that its own ops stand in.
    """
    if loop.phase != "forward" or loop.body is None:
        return set()
    marked = loop.graph.root.layers
    scope = base_name(loop.name)
    around = {level for level in scopes_of(scope) if level in marked}
    own = {found for op in loop.body.ops for found in scopes_of(op.scope) if found in marked and found not in around}
    outermost = suffix.count(".i") == 1
    return {f"{each}{suffix}" for each in (own | {scope} if outermost else own)}


class Layers:
    """The layers that the ops of a graph, or of the body of a loop, belong to.

    Parameters
    ----------
    graph : Graph
        The graph or the body.
    """

    def __init__(self, graph: Graph) -> None:
        self.marked = graph.root.layers
        self.stacks = _stacks(graph)

    def layer(self, op: Op) -> str:
        """Return the innermost layer that an op stands in, empty where it stands in none."""
        return self.layer_of(op.scope, op.name)

    def layer_of(self, scope: str, name: str) -> str:
        """Return the innermost layer for a scope and a name."""
        suffixes = [*accumulate(iterations_of(name))]
        for own in reversed(scopes_of(scope)):
            for suffix in reversed(suffixes):
                if f"{own}{suffix}" in self.marked:
                    return f"{own}{suffix}"
            if own in self.marked and not suffixes:
                return own
        return self.numbered(scope)

    def period(self, op: Op) -> tuple[str, int] | None:
        """Return the outermost loop or stack that an op stands in, and the iteration; None outside of all."""
        return self.period_of(op.scope, op.name)

    def period_of(self, scope: str, name: str) -> tuple[str, int] | None:
        """Return the outermost loop or stack, and the iteration, for a scope and a name."""
        iterations = iterations_of(name)
        for own in scopes_of(scope):
            if iterations and f"{own}{iterations[0]}" in self.marked:
                return own, int(iterations[0][2:])
        stack, _, number = self.numbered(scope).rpartition("/")
        return (stack, int(number)) if number else None

    def numbered(self, scope: str) -> str:
        """Return the numbered scope of a stack that a scope is in."""
        levels = scope.split("/")
        for n, level in enumerate(levels):
            if level.isdigit() and "/".join(levels[:n]) in self.stacks:
                return "/".join(levels[: n + 1])
        return ""


def _stacks(graph: Graph) -> set[str]:
    """Return the scopes whose numbered children are layers.

    Of stacks inside each other, the outer one has the layers, unless all of its children differ, such as the stages of
    a hierarchical model. Inside the body of a loop, only the scope of the loop itself counts: an iteration is a layer,
    whatever numbered parts it has.
    """
    owner = graph.owner
    inside = None if owner is None or owner.loop is None else base_name(owner.name)
    children: dict[str, dict[str, list[object]]] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        levels = op.scope.split("/")
        for n, level in enumerate(levels):
            stack = "/".join(levels[:n])
            if level.isdigit() and (inside is None or stack == inside):
                sizes = tuple(t.sizes for t in op.results)
                row = ("/".join(levels[n + 1 :]), op.kind.name, sizes)
                children.setdefault(stack, {}).setdefault(level, []).append(row)
    found = set[str]()
    for stack, parts in children.items():  # in program order, an outer one before those inside it
        if any(_is_inside(stack, outer) for outer in found):
            continue
        nested = any(other != stack and _is_inside(other, stack) for other in children)
        if nested and len(parts) > 1 and not _any_equal(parts.values()):
            continue
        found.add(stack)
    return found


def _is_inside(stack: str, outer: str) -> bool:
    return stack != outer and (not outer or stack.startswith(f"{outer}/"))


def _any_equal(parts: Iterable[Sequence[object]]) -> bool:
    rows = [tuple(part) for part in parts]
    return len(set(rows)) < len(rows)


# -- selecting ---------------------------------------------------------------------------------------------------------

#: One layer or several, after the name of a stack: `[16:]`, `[-1]`, or `/31`.
_PLACE = re.compile(r"\[(-?\d+)?(:)?(-?\d+)?\]|/(\d+)(?=/|$)")


@dataclass(frozen=True)
class _LayerRange:
    """A pattern that names some layers of a stack."""

    text: str
    stack: str
    first: int | None
    last: int | None
    """end of the range, as in a slice; None where it has none"""
    rest: str
    """pattern of names within a layer, empty for all"""

    def bounds(self, count: Poly, defaults: dict[str, Poly]) -> tuple[Poly, Poly]:
        """Return the first layer and the end, of so many layers."""
        known = count.bind(defaults).constant
        return self._at(self.first, ZERO, count, known), self._at(self.last, count, count, known)

    def _at(self, place: int | None, default: Poly, count: Poly, known: object) -> Poly:
        if place is None:
            return default
        if isinstance(known, int) and not -known <= place <= known:
            raise GraphError(f"{self.text!r} of {known} layers in {self.stack!r}: expected at most {known}")
        # where the number of layers is a symbol, a range that ends with the stack does so for other numbers as well
        return count if place == known else count + place if place < 0 else as_poly(place)


@dataclass(frozen=True)
class _Segment:
    """Layers of a stack that have the same parameters: one layer, or the iterations of a loop."""

    first: Poly
    last: Poly
    loop: Op | None
    period: int = 1
    """layers of one iteration"""


class Names:
    """Names of parameters, with the layers that patterns can select.

    Parameters
    ----------
    graph : Graph
        A forward pass.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers = Layers(graph)
        self.stacks: dict[str, list[_Segment]] = {}
        self._loops: dict[Op, str] = {}
        self._keys: dict[str, tuple[str, _Segment]] = {}
        for op in graph.ops:
            self._add(op)
        self.defaults = {name: poly(size) for name, size in graph.defaults.items()}

    def _add(self, op: Op) -> None:
        if op.loop is not None:
            name, period = base_name(op.name), _layers_in(op.loop.body)
            self._loops[op] = name
            self._append(name, op.loop.count * period, op, period)
            return
        key = self.layers.layer_of(op.scope, op.name)
        if key and key not in self._keys:
            around = self.layers.period_of(op.scope, op.name)
            name = key.rpartition("/")[0] if around is None else around[0]
            if name.endswith("_rest") and name.removesuffix("_rest") in self.stacks:
                name = name.removesuffix("_rest")
            self._keys[key] = name, self._append(name, ONE, None, 1)

    def _append(self, stack: str, count: Poly, loop: Op | None, period: int) -> _Segment:
        segments = self.stacks.setdefault(stack, [])
        first = segments[-1].last if segments else ZERO
        segments.append(_Segment(first, first + count, loop, period))
        return segments[-1]

    def place(self, t: Tensor) -> tuple[str, _Segment] | None:
        """Return the stack and the layers that have a parameter."""
        owner, graph = None, t.graph
        while graph.parent is not None:
            owner, graph = graph.owner, graph.parent
        if owner is not None and owner in self._loops:
            stack = self._loops[owner]
            return stack, next(s for s in self.stacks[stack] if s.loop is owner)
        return self._keys.get(self.layers.layer_of(t.name.rpartition("/")[0], t.name))

    def layer_range(self, pattern: str) -> _LayerRange | None:
        """Return the layers that a pattern selects, None where it has names alone."""
        for found in _PLACE.finditer(pattern):
            first, colon, last, number = found.groups()
            stack, rest = pattern[: found.start()], pattern[found.end() :]
            single = first if number is None else number
            if (rest and not rest.startswith("/")) or not any(fnmatchcase(s, stack) for s in self.stacks):
                continue
            if colon is None and (single is None or last is not None):
                continue
            begin = None if single is None else int(single)
            end = (None if last is None else int(last)) if colon else None if begin in (-1, None) else begin + 1
            return _LayerRange(pattern, stack, begin, end, rest.removeprefix("/"))
        return None

    def ranges(self, layers: _LayerRange) -> Iterator[tuple[str, Poly, Poly]]:
        """Yield the stacks that a pattern names, and of each the first layer and the end."""
        for stack, segments in self.stacks.items():
            if fnmatchcase(stack, layers.stack):
                yield stack, *layers.bounds(segments[-1].last, self.defaults)

    def answers(self, t: Tensor, patterns: Sequence[str]) -> bool:
        """Whether one of some patterns matches a parameter, or a scope around it."""
        own = {t.name, base_name(t.name)}
        for pattern in patterns:
            if any(_matches(name, pattern) for name in own):
                return True
            layers, at = self.layer_range(pattern), self.place(t)
            if layers is None or at is None:
                continue
            for stack, first, last in self.ranges(layers):
                if stack != at[0] or not self._covers(stack, first, last, at[1]):
                    continue
                if not layers.rest or any(_matches(n, layers.rest) for n in _within(own, stack, at[1].first)):
                    return True
        return False

    def _covers(self, stack: str, first: Poly, last: Poly, segment: _Segment) -> bool:
        """Whether a segment lies within a range. The range begins and ends with segments: loops are split there."""
        segments = self.stacks[stack]
        begin = next((i for i, s in enumerate(segments) if s.first == first), len(segments))
        end = next((i for i, s in enumerate(segments) if s.last == last), -1)
        return begin <= segments.index(segment) <= end


def _within(names: set[str], stack: str, number: Poly) -> Iterator[str]:
    """Yield names relative to a layer."""
    for name in names:
        rest = name.removeprefix(f"{stack}/") if name.startswith(f"{stack}/") else name.partition("/")[2]
        yield rest
        yield rest.removeprefix(f"{number}/")


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(scope, pattern) for scope in scopes_of(name))


def _layers_in(body: Graph) -> int:
    """Return how many layers an iteration of a loop has."""
    marked = body.root.layers
    own = {op.scope[: len(s)] for op in body.ops if op.loop is None for s in marked if _matches(op.scope, s)}
    inner = 0
    for op in body.ops:
        if op.loop is not None and any(_matches(o.scope, s) for o in op.loop.body.walk() for s in marked):
            times = op.loop.count.constant
            if not isinstance(times, int):
                raise UnsupportedError(f"layers of {op.name!r}: {op.loop.count} in a period, expected a number")
            inner += times * _layers_in(op.loop.body)
    return max(1, len(own) + inner)


def split_at_layers(place: str, graph: Graph, *given: object) -> Graph:
    """Split the loops of a graph where patterns name some of their layers.

    Parameters
    ----------
    place : str
        What is asked, for errors.
    graph : Graph
        A forward pass; it stays as it is.
    *given : str or sequence of str
        Patterns, as a caller gives them.

    Returns
    -------
    Graph
        The graph where nothing is split. Every cost stays.

    Raises
    ------
    GraphError
        If there are fewer layers.
    UnsupportedError
        If a range begins or ends within the iteration of a loop, or a loop does more than hand on its carries.
    """
    listed = [[patterns] if isinstance(patterns, str) else patterns for patterns in given]
    texts = [p for patterns in listed if isinstance(patterns, list | tuple) for p in patterns if isinstance(p, str)]
    if not any(map(_PLACE.search, texts)):
        return graph
    names, cuts = Names(graph), dict[Op, list[Poly]]()
    for text in texts:
        layers = names.layer_range(text)
        for stack, first, last in () if layers is None else names.ranges(layers):
            for segment in names.stacks[stack]:
                _cut(place, text, names, segment, (first, last), cuts)
    return _Cutter(names.defaults, cuts).run(graph) if cuts else graph


def _cut(
    place: str, text: str, names: Names, segment: _Segment, ends: tuple[Poly, Poly], cuts: dict[Op, list[Poly]]
) -> None:
    """Note the iterations of a loop at which a range begins or ends."""
    if segment.loop is None:
        return
    for end in ends:
        before, behind = ((end - segment.first), (segment.last - end))
        sizes = [d.bind(names.defaults).constant for d in (before, behind)]
        if any(n is not None and n <= 0 for n in sizes):
            continue
        # numbers are counted from the first layer, and what depends on their number from the last one
        apart = end.constant is None and segment.last.constant is not None
        apart |= end.constant is not None and segment.first.constant is None
        if None in sizes and apart:
            continue
        at = before / segment.period
        known = at.bind(names.defaults).constant
        if known is not None and not isinstance(known, int):
            raise UnsupportedError(
                f"{place} {text!r}: {segment.period} layers take turns in an iteration of {segment.loop.name!r}, "
                f"expected a multiple of {segment.period}, or a graph that costgraph.unroll has made"
            )
        if at not in cuts.setdefault(segment.loop, []):
            cuts[segment.loop].append(at)


class _Cutter(Rewriter):
    """Copies a graph and splits some of its loops into several that follow each other."""

    lies = True

    def __init__(self, defaults: dict[str, Poly], cuts: dict[Op, list[Poly]]) -> None:
        super().__init__()
        self.defaults, self.cuts = defaults, cuts

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, a loop in its parts."""
        if op not in self.cuts or op.loop is None:
            super().emit(op, new, suffix)
            return
        if op.loop.xs or len(op.results) > len(op.loop.starts):
            raise UnsupportedError(
                f"{op.name!r} reads or writes a slice in each iteration, expected a loop that only hands on carries"
            )
        before = {t: self.tensors[t] for t in op.loop.starts}
        ends = [ZERO, *sorted(self.cuts[op], key=self._order), op.loop.count]
        taken = {other.name for other in op.graph.ops}  # parts that the loop was split into earlier
        free = (part for n in count(1) if op.name + (part := f".cut{n}") not in taken)
        for n, (begin, end) in enumerate(pairwise(ends)):
            part, times = next(free) if n else "", end - begin
            if times.constant is None:
                new.root.assume(f"{times} >= 1")
            kind = replace(op.loop.kind, body=self.body(op.loop.body, new, suffix + part), count=times)
            made = self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix + part)
            self.tensors |= zip(op.loop.starts, made.results, strict=True)  # where the next part goes on
        self.tensors |= before

    def _order(self, cut: Poly) -> tuple[bool, object]:
        known = cut.bind(self.defaults).constant
        return (False, known) if known is not None else (True, cut.terms.get((), 0))


def patterns_of(place: str, given: object, names: Names, tensors: Sequence[Tensor]) -> Sequence[str]:
    """Return patterns of names, scopes or layers; GraphError where one is none, or no tensor answers to it."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise GraphError(f"{place} {shown(given)}, expected names or scopes, such as 'layers/*'")
    for pattern in patterns:
        if not any(names.answers(t, [pattern]) for t in tensors):
            known = ", ".join(dict.fromkeys(base_name(t.name) for t in tensors))
            raise GraphError(f"{place} {pattern!r} is no parameter or scope, expected some of {known}")
    return patterns


# -- frozen ------------------------------------------------------------------------------------------------------------
# Which parameters are trained: others have neither gradient nor state.


def with_frozen(graph: Graph, freeze: object, trainable: object) -> Graph:
    """Return the graph with some of its parameters frozen, or the graph where nothing is asked for.

    Patterns are of names, scopes or layers: of what is frozen, or of what alone is not. GraphError if a pattern is
    none, or no parameter answers to it, or there are patterns of both kinds.
    """
    if freeze is None and trainable is None:
        return graph
    if freeze is not None and trainable is not None:
        raise GraphError("training_step: freeze beside trainable, expected one of the two")
    what, given = ("freeze", freeze) if trainable is None else ("trainable", trainable)
    graph = split_at_layers(f"training_step: {what}", graph, given)
    names = Names(graph)
    patterns = patterns_of(f"training_step: {what}", given, names, graph.params)
    return _Freezer(names, patterns, named=trainable is None).run(graph)


class _Freezer(Rewriter):
    def __init__(self, names: Names, patterns: Sequence[str], *, named: bool) -> None:
        super().__init__()
        self.names, self.patterns, self.named = names, patterns, named

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        made: Tensor = super().source(old, new, suffix)
        if old.role == "param" and self.names.answers(old, self.patterns) == self.named:
            made.requires_grad = False
        return made
