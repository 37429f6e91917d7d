"""Select parameters by name, scope, or layers of a stack: `head`, `*/bias`, `layers[16:]`, `layers/31/mlp`.

A parameter of a loop belongs to all its iterations. If a pattern selects only some of them, the loop is split into
consecutive loops with their own parameters.
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
# A layer is one iteration of a loop. Where kinds of layers alternate, it is a scope that `costgraph.nn.layers` has
# marked in `Graph.layers`. `unroll` adds each iteration to `Graph.layers`, as a scope with the iteration appended:
# `layers.i3`, or `layers/local.i0.i3`. Without a loop, numbered scopes `h/0`, `h/1`, ... are layers.


def layers_of(loop: Op, suffix: str) -> set[str]:
    """Return the entries in `Graph.layers` for one iteration of an unrolled loop.

    Parameters
    ----------
    loop : Op
        The loop.
    suffix : str
        The iteration, after those of the enclosing loops, such as `.i0.i3`.

    Returns
    -------
    set of str
        The scope of the loop, unless it is inside another layer, and the marked scopes of its ops.
    """
    if loop.phase != "forward" or loop.body is None:
        return set()
    marked = loop.graph.root.layers
    scope = base_name(loop.name)
    outer_layers = {level for level in scopes_of(scope) if level in marked}
    inner_layers = {
        level for op in loop.body.ops for level in scopes_of(op.scope) if level in marked and level not in outer_layers
    }
    outermost = suffix.count(".i") == 1
    return {f"{name}{suffix}" for name in (inner_layers | {scope} if outermost else inner_layers)}


class Layers:
    """Layers in a graph or loop body, by op.

    Parameters
    ----------
    graph : Graph
        The graph or the body.
    """

    def __init__(self, graph: Graph) -> None:
        self.marked = graph.root.layers
        self.stacks = _stacks(graph)

    def layer(self, op: Op) -> str:
        """Return an op's innermost layer, empty if there is none."""
        return self.layer_of(op.scope, op.name)

    def layer_of(self, scope: str, name: str) -> str:
        """Return the innermost layer for a scope and a name."""
        suffixes = [*accumulate(iterations_of(name))]
        for level in reversed(scopes_of(scope)):
            for suffix in reversed(suffixes):
                if f"{level}{suffix}" in self.marked:
                    return f"{level}{suffix}"
            if level in self.marked and not suffixes:
                return level
        return self.numbered(scope)

    def period(self, op: Op) -> tuple[str, int] | None:
        """Return the outermost loop or stack around an op, and the iteration; None if there is none."""
        return self.period_of(op.scope, op.name)

    def period_of(self, scope: str, name: str) -> tuple[str, int] | None:
        """Return the outermost loop or stack, and the iteration, for a scope and a name."""
        iterations = iterations_of(name)
        for level in scopes_of(scope):
            if iterations and f"{level}{iterations[0]}" in self.marked:
                return level, int(iterations[0][2:])
        stack, _, number = self.numbered(scope).rpartition("/")
        return (stack, int(number)) if number else None

    def numbered(self, scope: str) -> str:
        """Return the numbered scope of a stack that contains a scope."""
        levels = scope.split("/")
        for n, level in enumerate(levels):
            if level.isdigit() and "/".join(levels[:n]) in self.stacks:
                return "/".join(levels[: n + 1])
        return ""


def _stacks(graph: Graph) -> set[str]:
    """Return the scopes whose numbered children are layers.

    Among nested stacks, the outer one holds the layers, unless its children all differ, like the stages of a
    hierarchical model. Inside a loop body only the scope of the loop counts: an iteration is a layer, whatever numbered
    parts it has.
    """
    owner = graph.owner
    loop_scope = None if owner is None or owner.loop is None else base_name(owner.name)
    children: dict[str, dict[str, list[object]]] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        levels = op.scope.split("/")
        for n, level in enumerate(levels):
            stack = "/".join(levels[:n])
            if level.isdigit() and (loop_scope is None or stack == loop_scope):
                sizes = tuple(t.sizes for t in op.results)
                row = ("/".join(levels[n + 1 :]), op.kind.name, sizes)
                children.setdefault(stack, {}).setdefault(level, []).append(row)
    stacks = set[str]()
    for stack, parts in children.items():  # in program order, outer before inner
        if any(_is_inside(stack, outer) for outer in stacks):
            continue
        nested = any(other != stack and _is_inside(other, stack) for other in children)
        if nested and len(parts) > 1 and not _any_equal(parts.values()):
            continue
        stacks.add(stack)
    return stacks


def _is_inside(stack: str, outer: str) -> bool:
    return stack != outer and (not outer or stack.startswith(f"{outer}/"))


def _any_equal(parts: Iterable[Sequence[object]]) -> bool:
    rows = [tuple(part) for part in parts]
    return len(set(rows)) < len(rows)


# -- patterns ----------------------------------------------------------------------------------------------------------

#: One layer or several, after a stack's name: `[16:]`, `[-1]`, or `/31`.
_LAYER_SUFFIX = re.compile(r"\[(-?\d+)?(:)?(-?\d+)?\]|/(\d+)(?=/|$)")


@dataclass(frozen=True)
class _LayerRange:
    """A pattern that selects some layers of a stack."""

    text: str
    stack: str
    first: int | None
    last: int | None
    """end of the range, as in a slice; None if open"""
    inner_pattern: str
    """pattern for names within a layer, empty for all"""

    def bounds(self, count: Poly, defaults: dict[str, Poly]) -> tuple[Poly, Poly]:
        """Return the first layer and the end, given the number of layers."""
        layer_count = count.bind(defaults).constant
        return self._resolve(self.first, ZERO, count, layer_count), self._resolve(self.last, count, count, layer_count)

    def _resolve(self, index: int | None, default: Poly, count: Poly, layer_count: object) -> Poly:
        if index is None:
            return default
        if isinstance(layer_count, int) and not -layer_count <= index <= layer_count:
            raise GraphError(f"{self.text!r} of {layer_count} layers in {self.stack!r}: expected at most {layer_count}")
        # with a symbolic number of layers, a range that ends with the stack does so for other numbers as well
        return count if index == layer_count else count + index if index < 0 else as_poly(index)


@dataclass(frozen=True)
class _Segment:
    """Layers of a stack that share parameters: a single layer, or a loop's iterations."""

    first: Poly
    last: Poly
    loop: Op | None
    period: int = 1
    """layers per iteration"""


class Names:
    """Parameter names, and the layers that patterns can select.

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
            self._add_op(op)
        self.defaults = {name: poly(size) for name, size in graph.defaults.items()}

    def _add_op(self, op: Op) -> None:
        if op.loop is not None:
            name, period = base_name(op.name), _layers_in(op.loop.body)
            self._loops[op] = name
            self._append(name, op.loop.count * period, op, period)
            return
        key = self.layers.layer_of(op.scope, op.name)
        if key and key not in self._keys:
            outer = self.layers.period_of(op.scope, op.name)
            name = key.rpartition("/")[0] if outer is None else outer[0]
            if name.endswith("_rest") and name.removesuffix("_rest") in self.stacks:
                name = name.removesuffix("_rest")
            self._keys[key] = name, self._append(name, ONE, None, 1)

    def _append(self, stack: str, count: Poly, loop: Op | None, period: int) -> _Segment:
        segments = self.stacks.setdefault(stack, [])
        first = segments[-1].last if segments else ZERO
        segments.append(_Segment(first, first + count, loop, period))
        return segments[-1]

    def segment_of(self, t: Tensor) -> tuple[str, _Segment] | None:
        """Return the stack and segment that contain a parameter, None if there are none."""
        owner, graph = None, t.graph
        while graph.parent is not None:
            owner, graph = graph.owner, graph.parent
        if owner is not None and owner in self._loops:
            stack = self._loops[owner]
            return stack, next(s for s in self.stacks[stack] if s.loop is owner)
        return self._keys.get(self.layers.layer_of(t.name.rpartition("/")[0], t.name))

    def layer_range(self, pattern: str) -> _LayerRange | None:
        """Return the layers that a pattern selects, None for a pattern of names alone."""
        for match in _LAYER_SUFFIX.finditer(pattern):
            first, colon, last, number = match.groups()
            stack, inner = pattern[: match.start()], pattern[match.end() :]
            single = first if number is None else number
            if (inner and not inner.startswith("/")) or not any(fnmatchcase(s, stack) for s in self.stacks):
                continue
            if colon is None and (single is None or last is not None):
                continue
            begin = None if single is None else int(single)
            end = (None if last is None else int(last)) if colon else None if begin in (-1, None) else begin + 1
            return _LayerRange(pattern, stack, begin, end, inner.removeprefix("/"))
        return None

    def ranges(self, layers: _LayerRange) -> Iterator[tuple[str, Poly, Poly]]:
        """Yield each stack that a pattern matches, with the range's first layer and end."""
        for stack, segments in self.stacks.items():
            if fnmatchcase(stack, layers.stack):
                yield stack, *layers.bounds(segments[-1].last, self.defaults)

    def matches(self, t: Tensor, patterns: Sequence[str]) -> bool:
        """Whether a pattern matches a parameter or an enclosing scope."""
        names = {t.name, base_name(t.name)}
        for pattern in patterns:
            if any(_matches(name, pattern) for name in names):
                return True
            layers, located = self.layer_range(pattern), self.segment_of(t)
            if layers is None or located is None:
                continue
            for stack, first, last in self.ranges(layers):
                if stack != located[0] or not self._covers(stack, first, last, located[1]):
                    continue
                if not layers.inner_pattern or any(
                    _matches(n, layers.inner_pattern) for n in _names_in_layer(names, stack, located[1].first)
                ):
                    return True
        return False

    def _covers(self, stack: str, first: Poly, last: Poly, segment: _Segment) -> bool:
        """Whether a segment lies within a range; loops are split so that ranges consist of whole segments."""
        segments = self.stacks[stack]
        begin = next((i for i, s in enumerate(segments) if s.first == first), len(segments))
        end = next((i for i, s in enumerate(segments) if s.last == last), -1)
        return begin <= segments.index(segment) <= end


def _names_in_layer(names: set[str], stack: str, number: Poly) -> Iterator[str]:
    """Yield names relative to a layer."""
    for name in names:
        relative = name.removeprefix(f"{stack}/") if name.startswith(f"{stack}/") else name.partition("/")[2]
        yield relative
        yield relative.removeprefix(f"{number}/")


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(scope, pattern) for scope in scopes_of(name))


def _layers_in(body: Graph) -> int:
    """Return the number of layers per loop iteration."""
    marked = body.root.layers
    scopes = {op.scope[: len(s)] for op in body.ops if op.loop is None for s in marked if _matches(op.scope, s)}
    inner = 0
    for op in body.ops:
        if op.loop is not None and any(_matches(o.scope, s) for o in op.loop.body.walk() for s in marked):
            iterations = op.loop.count.constant
            if not isinstance(iterations, int):
                raise UnsupportedError(
                    f"layers of {op.name!r}: {op.loop.count} iterations of an inner loop, expected a number"
                )
            inner += iterations * _layers_in(op.loop.body)
    return max(1, len(scopes) + inner)


def split_at_layers(place: str, graph: Graph, *selections: object) -> Graph:
    """Split loops where patterns select only some of their layers.

    Parameters
    ----------
    place : str
        Caller, for error messages.
    graph : Graph
        A forward pass; it is not modified.
    *selections : str or sequence of str
        Patterns, as passed by the caller.

    Returns
    -------
    Graph
        The same object if nothing is split. Costs do not change.

    Raises
    ------
    GraphError
        If there are fewer layers.
    UnsupportedError
        If a range begins or ends within an iteration of a loop, or a loop to split has slices or stacked results.
    """
    pattern_lists = [[patterns] if isinstance(patterns, str) else patterns for patterns in selections]
    texts = [
        p for patterns in pattern_lists if isinstance(patterns, list | tuple) for p in patterns if isinstance(p, str)
    ]
    if not any(map(_LAYER_SUFFIX.search, texts)):
        return graph
    names, cuts = Names(graph), dict[Op, list[Poly]]()
    for text in texts:
        layers = names.layer_range(text)
        for stack, first, last in () if layers is None else names.ranges(layers):
            for segment in names.stacks[stack]:
                _cut(place, text, names, segment, (first, last), cuts)
    return _LoopCutter(names.defaults, cuts).run(graph) if cuts else graph


def _cut(
    place: str, text: str, names: Names, segment: _Segment, ends: tuple[Poly, Poly], cuts: dict[Op, list[Poly]]
) -> None:
    """Record the iterations at which a range splits a loop."""
    if segment.loop is None:
        return
    for end in ends:
        before, after = ((end - segment.first), (segment.last - end))
        sizes = [d.bind(names.defaults).constant for d in (before, after)]
        if any(n is not None and n <= 0 for n in sizes):
            continue
        # positions are relative to the first layer, or, if they depend on the number of layers, to the last one
        incomparable = end.constant is None and segment.last.constant is not None
        incomparable |= end.constant is not None and segment.first.constant is None
        if None in sizes and incomparable:
            continue
        iteration = before / segment.period
        value = iteration.bind(names.defaults).constant
        if value is not None and not isinstance(value, int):
            raise UnsupportedError(
                f"{place} {text!r}: {segment.loop.name!r} has {segment.period} alternating layers per iteration, "
                f"expected a multiple of {segment.period}, or a graph from costgraph.unroll"
            )
        if iteration not in cuts.setdefault(segment.loop, []):
            cuts[segment.loop].append(iteration)


class _LoopCutter(Rewriter):
    """Copies a graph, splitting loops into consecutive ones."""

    lies = True

    def __init__(self, defaults: dict[str, Poly], cuts: dict[Op, list[Poly]]) -> None:
        super().__init__()
        self.defaults, self.cuts = defaults, cuts

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or a loop in parts."""
        if op not in self.cuts or op.loop is None:
            super().emit(op, new, suffix)
            return
        if op.loop.xs or len(op.results) > len(op.loop.starts):
            raise UnsupportedError(
                f"{op.name!r} reads or writes a slice in each iteration, expected a loop that only forwards carries"
            )
        starts = {t: self.tensors[t] for t in op.loop.starts}
        ends = [ZERO, *sorted(self.cuts[op], key=self._order), op.loop.count]
        used_names = {other.name for other in op.graph.ops}  # parts from an earlier split
        part_suffixes = (part for n in count(1) if op.name + (part := f".cut{n}") not in used_names)
        for n, (begin, end) in enumerate(pairwise(ends)):
            part, iterations = next(part_suffixes) if n else "", end - begin
            if iterations.constant is None:
                new.root.assume(f"{iterations} >= 1")
            kind = replace(op.loop.kind, body=self.body(op.loop.body, new, suffix + part), count=iterations)
            new_op = self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix + part)
            self.tensors |= zip(op.loop.starts, new_op.results, strict=True)  # carried into the next part
        self.tensors |= starts

    def _order(self, cut: Poly) -> tuple[bool, object]:
        value = cut.bind(self.defaults).constant
        return (False, value) if value is not None else (True, cut.terms.get((), 0))


def patterns_of(place: str, selection: object, names: Names, tensors: Sequence[Tensor]) -> Sequence[str]:
    """Return a list of patterns; raise GraphError for invalid ones, or ones that match no tensor."""
    patterns = [selection] if isinstance(selection, str) else selection
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise GraphError(f"{place} {shown(selection)}, expected names or scopes, such as 'layers/*'")
    for pattern in patterns:
        if not any(names.matches(t, [pattern]) for t in tensors):
            examples = ", ".join(dict.fromkeys(base_name(t.name) for t in tensors))
            raise GraphError(f"{place} {pattern!r} matches no parameter or scope, expected some of {examples}")
    return patterns


# -- freezing ----------------------------------------------------------------------------------------------------------


def with_frozen(graph: Graph, freeze: object, trainable: object) -> Graph:
    """Freeze parameters: those that match `freeze`, or all except those that match `trainable`.

    Returns the graph itself if both are None. Raises GraphError for invalid patterns, patterns without a match, or if
    both are given.
    """
    if freeze is None and trainable is None:
        return graph
    if freeze is not None and trainable is not None:
        raise GraphError("training_step: freeze together with trainable, expected only one of them")
    option, selection = ("freeze", freeze) if trainable is None else ("trainable", trainable)
    graph = split_at_layers(f"training_step: {option}", graph, selection)
    names = Names(graph)
    patterns = patterns_of(f"training_step: {option}", selection, names, graph.params)
    return _Freezer(names, patterns, named=trainable is None).run(graph)


class _Freezer(Rewriter):
    def __init__(self, names: Names, patterns: Sequence[str], *, named: bool) -> None:
        super().__init__()
        self.names, self.patterns, self.named = names, patterns, named

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        copied: Tensor = super().source(old, new, suffix)
        if old.role == "param" and self.names.matches(old, self.patterns) == self.named:
            copied.requires_grad = False
        return copied
