"""The tensors of a checkpoint beside the parameters that a graph declares.

Names and layouts of checkpoints differ from those of a declaration: one tensor a layer and expert, axes in another
order, heads merged, queries, keys and values in one tensor or three. What agrees is the size: axes of a tensor are
products of declared ones, and tensors that are put together or taken apart have the same elements. Names only decide
between tensors of equal shape.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

from ..bind.evaluate import bound_answer
from ..errors import BindingError, FormatError
from ..files.checkpoints import Weights, read_weights
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import Graph, bindings, need_graph
from ..notation.validation import guarded
from .costs import repeated_bodies

__all__ = [
    "WeightComparison",
    "WeightDifference",
    "compare_weights",
]

#: Tensors that one is put together of, or taken apart into, and how many are looked at for it.
_MOST_PARTS, _MOST_NEAR = 6, 12
#: Axes of a tensor that are put together in all ways; names of a checkpoint, numbers apart.
_MOST_AXES, _MOST_GROUPS = 8, 2**12
#: Part of the words of two names that makes them those of one tensor, whatever their shapes.
_LIKE = 0.35


@guarded()
@dataclass(frozen=True)
class WeightDifference:
    """Tensors in which a checkpoint and a graph differ."""

    kind: str
    """missing in the checkpoint, unexpected in it, or of another shape or format"""
    declared: str
    """path of the parameter, empty where none is like it"""
    stored: str
    """name in the checkpoint, numbers as #, empty where none is like it"""
    tensors: int
    """how many differ, those of the checkpoint where it has any"""
    expected: str
    """shape and format as declared"""
    found: str
    """shape and format in the checkpoint"""


@guarded()
@dataclass(frozen=True, repr=False)
class WeightComparison(Table):
    """A checkpoint beside a graph: parameters, bytes, and a row for each difference."""

    rows: tuple[WeightDifference, ...]
    """differences, none where all agrees"""
    parameters: tuple[int, int]
    """elements of the declared parameters, and of all tensors of the checkpoint"""
    bytes: tuple[int, int]
    """bytes of both"""
    names: tuple[str, str] = ("", "")
    """name of the graph, and place of the checkpoint"""

    @property
    def agree(self) -> bool:
        """Whether every parameter is there in its shape and format, and nothing else."""
        return not self.rows

    def _about(self) -> str:
        return f"{self.names[0]} and {self.names[1]}: {len(self.rows)} differences"

    def _columns(self) -> Sequence[Column]:
        return (
            *map(Column, ("kind", "declared", "stored")),
            Column("tensors", "1"),
            Column("expected"),
            Column("found"),
        )

    def _facts(self) -> Iterator[Fact]:
        for what, unit, pair in (("parameters", "1", self.parameters), ("bytes", "B", self.bytes)):
            yield from (Fact(f"{what}, {of}", n, unit) for of, n in zip(("declared", "stored"), pair, strict=True))
        yield Fact("differences", len(self.rows), "1")


@dataclass
class _Group:
    """Equal tensors: those of a parameter, one an iteration, or those of a checkpoint that differ in numbers alone."""

    name: str
    shape: tuple[int, ...]
    format: str
    left: int
    """how many are not matched yet"""
    bytes: int
    """of one"""
    packed: bool = False
    """whether scales, or several elements in one, make other tensors of it in a checkpoint"""
    optional: bool = False
    """a buffer, which a checkpoint may have"""
    words: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.words = frozenset(re.findall(r"[a-z]+", self.name.lower()))

    def amount(self, of_bytes: bool) -> int:
        """Return elements, or bytes, of those that are not matched."""
        return self.left * (self.bytes if of_bytes else prod(self.shape))

    def __str__(self) -> str:
        return f"{self.shape} {self.format}"


def compare_weights(graph: Graph, weights: Weights | str | os.PathLike[str], /, **dims: int) -> WeightComparison:
    """Set the tensors of a checkpoint beside the parameters of a graph, and name the differences.

    A tensor of the checkpoint is a declared one if its axes are products of declared axes, in any order: names of both
    only decide between equal shapes. Several together are one, or one is several, if they have the same elements; of a
    format with scales, or of packed elements, the same bytes.

    Parameters
    ----------
    graph : Graph
        What is declared.
    weights : Weights, str or path-like
        What `read_weights` returned, or what it reads.
    **dims : int
        Sizes to bind.

    Returns
    -------
    WeightComparison
        `.agree`, `.rows`, `.parameters`, `.bytes`; `print` it. Buffers, such as running statistics, may be there.

    Raises
    ------
    BindingError
        If a size of a parameter is left open.
    FormatError
        If the checkpoint cannot be read, or has more than 4096 tensors whose names differ in more than numbers.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.files.checkpoints import Weight, Weights
    >>> with cg.Graph("net", dtype="bf16") as g:
    ...     x = g.input("x", (3, 5))
    ...     g.output(cg.linear(cg.linear(x, "b d -> b f", f=7, name="up"), "b f -> b d", d=5, name="down"))
    >>> file = Weights((Weight("up.weight", (7, 5), "bf16", 70), Weight("down.weight", (5, 7), "fp32", 140)))
    >>> for row in cg.compare_weights(g, file).rows:
    ...     print(row.kind, row.declared, row.stored, row.expected, "->", row.found)
    format down/weight down.weight (7, 5) bf16 -> (5, 7) fp32
    """
    need_graph("compare_weights", graph)
    held = weights if isinstance(weights, Weights) else read_weights(weights)
    declared, stored = _declared(graph, dims), _stored(held)
    elements, size = (sum(d.amount(of_bytes) for d in declared if not d.optional) for of_bytes in (False, True))
    needed, buffers = ([d for d in declared if d.optional is so] for so in (False, True))
    rows = [row for match in (_alike, _regrouped) for row in match(needed, stored)]
    rows += _alike(buffers, stored)  # what parameters have left over
    rows += _others(needed, [s for s in stored if s.left])
    return WeightComparison(tuple(rows), (elements, held.elements), (size, held.bytes), (graph.name, held.place))


def _number(found: Any) -> int:
    if not isinstance(found, int):
        names = ", ".join(sorted(map(str, found.free_symbols)))
        raise BindingError(f"compare_weights: {names} left open, expected a size for each dimension of a parameter")
    return found


def _declared(graph: Graph, dims: dict[str, int]) -> list[_Group]:
    """Return parameters and buffers; those with scales once, whatever body they are in, as their parts are."""
    values, found = bindings(graph, dims), dict[tuple[object, ...], _Group]()
    for body, times in repeated_bodies(graph):
        for t in body.tensors:
            if t.role not in ("param", "buffer") or t.producer is not None:
                continue
            shape = tuple(_number(bound_answer(n, values)) for n in t.sizes)
            count, size = (_number(bound_answer(n, values)) for n in (times, t.storage.bytes))
            packed = bool(t.dtype.scale) or t.dtype.bits % 8 != 0
            name = t.name.split("/")[-2:] if packed else [t.name]
            first = found.setdefault(
                (*name, shape, t.dtype.name), _Group(t.name, shape, t.dtype.name, 0, size, packed, t.role == "buffer")
            )
            first.left += count
    return list(found.values())


def _stored(weights: Weights) -> list[_Group]:
    """Return tensors by name without its numbers, shape and format."""
    found = Counter((re.sub(r"\d+", "#", w.name), w.shape, w.format, w.bytes) for w in weights.rows)
    if len(found) > _MOST_GROUPS:
        raise FormatError(
            f"{weights.place}: {len(found)} tensors whose names differ in more than numbers, expected {_MOST_GROUPS} "
            f"at the most"
        )
    return [_Group(name, shape, format_, n, size) for (name, shape, format_, size), n in found.items()]


# -- which are the same ------------------------------------------------------------------------------------------


def _made_of(axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether each axis is the product of some sizes, each size used once at most."""
    if not axes:
        return True
    return any(
        prod(sizes[i] for i in chosen) == axes[0]
        and _made_of(axes[1:], [n for i, n in enumerate(sizes) if i not in chosen])
        for count in range(1, len(sizes) + 1)
        for chosen in combinations(range(len(sizes)), count)
    )


@lru_cache(maxsize=1 << 14)
def _reshaped(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether one shape is the other with axes merged, in another order; of the same elements."""
    few, many = sorted(([n for n in shape if n != 1] for shape in (a, b)), key=len)
    return prod(a) == prod(b) and len(many) <= _MOST_AXES and _made_of(few, many)


@lru_cache(maxsize=1 << 14)
def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape can be a part of the other: of one, all axes but one are made of the other's."""
    few, many = sorted(([n for n in shape if n != 1] for shape in (a, b)), key=len)
    within = len(many) <= _MOST_AXES
    return within and (not few or any(_made_of(few[:i] + few[i + 1 :], many) for i in range(len(few))))


def _likeness(a: _Group, b: _Group) -> float:
    """Return which part of the words of both names they have in common."""
    return len(a.words & b.words) / max(1, len(a.words | b.words))


def _differs(d: _Group, s: _Group, kind: str, count: int) -> WeightDifference:
    return WeightDifference(kind, d.name, s.name, count, str(d), str(s))


def _alike(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Match tensors of equal shape, those of equal formats and like names first; yield where formats differ."""
    pairs = [(d, s) for d in declared for s in stored if not d.packed and _reshaped(d.shape, s.shape)]
    pairs.sort(key=lambda pair: (pair[0].format != pair[1].format, -_likeness(*pair)))
    for d, s in pairs:
        same = min(d.left, s.left)
        d.left, s.left = d.left - same, s.left - same
        if same and d.format != s.format:
            yield _differs(d, s, "format", same)


def _regrouped(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Match one to several that have as many elements together, or bytes; yield where formats differ."""
    for ones, others in ((declared, stored), (stored, declared)):
        for one in ones:
            parts = _parts(one, [g for g in others if g.left]) if one.left else ()
            for part in parts:
                d, s = (one, part) if ones is declared else (part, one)
                if not d.packed and d.format != s.format:
                    yield _differs(d, s, "format", s.left)
            for part in parts:
                part.left = one.left = 0


def _parts(one: _Group, others: list[_Group]) -> Sequence[_Group]:
    """Return the fewest of the others, those first whose names are like, that are as large as this one together."""
    near = [g for g in others if one.packed or g.packed or _shared(one.shape, g.shape)]
    near = sorted(near, key=lambda g: -_likeness(one, g))[:_MOST_NEAR]
    for count in range(1, min(_MOST_PARTS, len(near)) + 1):
        for chosen in combinations(near, count):
            packed = one.packed or any(g.packed for g in chosen)
            if one.amount(packed) == sum(g.amount(packed) for g in chosen):
                return chosen
    return ()


def _others(declared: list[_Group], stored: list[_Group]) -> Iterator[WeightDifference]:
    """Yield what is left: of other shapes where as many have like names, else missing or unexpected."""
    pairs = [(d, s) for d in declared for s in stored if d.left and d.left == s.left and _likeness(d, s) >= _LIKE]
    for d, s in sorted(pairs, key=lambda pair: -_likeness(*pair)):
        if d.left and s.left:
            yield _differs(d, s, "shape", s.left)
            d.left = s.left = 0
    for d in declared:
        if d.left:
            yield WeightDifference("missing", d.name, "", d.left, str(d), "")
    for s in stored:
        if s.left:
            yield WeightDifference("unexpected", "", s.name, s.left, "", str(s))
