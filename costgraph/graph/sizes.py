"""Sizes of a graph: which dimensions it has, and what binding some of them makes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.dominance import Relations
from ..algebra.polynomial import Poly, as_poly
from ..algebra.symbols import integer, shorten, shown
from ..errors import BindingError
from .strides import Sizes, is_integral, is_polynomial, settled
from .tensor import Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = [
    "Bindings",
    "bindings",
    "conditions",
    "known_names",
    "need_open",
    "of_stages",
    "same",
    "size_of",
    "stages",
    "told",
]

# No size has so many, and what is multiplied out of them could not be printed.
_MOST_BITS = 1024


def _polys(value: object) -> Iterable[Poly]:
    """Yield the formulas among the attributes of an op."""
    if isinstance(value, Poly):
        yield value
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _polys(v)
    elif value is None or isinstance(value, str | int):
        return  # nearly always, and what is no mapping takes long to find out
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _polys(v)
    elif hasattr(value, "window"):
        yield from _polys(value.window)


def same(graph: Graph, a: Poly, b: Poly) -> bool:
    """Whether two sizes are equal, assumptions included."""
    if a == b:
        return True
    a, b = graph.told((a, b))
    return a == b


def told(graph: Graph, sizes: Sizes) -> Sizes:
    """Return sizes or strides with all that is known put in: what is equal is then the same polynomial.

    Known are assumed equalities, and that sizes such as D/H are whole: ceiling(D/H) is then D/H.
    """
    known, whole = graph.root.relations, graph.root.quotients
    sizes = tuple(map(known.reduce, sizes)) if known.relations else sizes
    if not whole or all(map(is_polynomial, sizes)):  # nearly always: a graph of many quotients is long to look up
        return sizes
    whole = frozenset(map(known.reduce, whole)) if known.relations else whole
    return tuple(settled(n, whole) for n in sizes)


def known_names(graph: Graph) -> frozenset[str]:
    """Return the names of all dimensions of a graph, bodies included."""
    if "names" not in graph.cache:
        found: set[str] = set()
        seen: set[Poly] = set()
        for g in graph.bodies():
            for t in g.tensors:
                seen.update(t.sizes)
            for op in g.ops:
                seen.update(p for v in op.kind.facts().values() for p in _polys(v))
        for p in seen:
            found |= p.names()
        for relation in graph.root.relations.relations:
            found |= relation.difference.names()
        graph.cache["names"] = frozenset(found)
    names: frozenset[str] = graph.cache["names"]
    return names


def _declared(graph: Graph) -> Iterator[tuple[Poly, str, int, bool]]:
    """Yield what a graph and its bodies are declared with: formula, place, least value, whether it is whole."""
    for g in graph.bodies():
        none = set(_of_all_iterations(g))
        for t in g.tensors:
            # the first axes of pieces: as many as a loop has iterations, whose count is looked at
            for i, n in enumerate(t.sizes[t.storage.pieces :], t.storage.pieces):
                yield n, f"axis {i} of {t.name!r}", int(i > 0 or t not in none), True
        for op in g.ops:
            limits = op.kind.limits()
            for key, value in op.kind.facts().items():
                if key in limits:
                    least, whole, words = limits[key]
                    place = f"{words or key.replace('_', ' ') + ' of'} {op.name!r}"
                    yield from ((p, place, least, whole) for p in _polys(value))
    if graph.sharding is not None:
        yield from ((n, f"axis {name!r} of the mesh", 1, True) for name, n in graph.sharding.mesh.axes)
    if graph.waiting is not None:
        yield from ((n, place, least, True) for n, place, least in graph.waiting.asked)


def _of_all_iterations(graph: Graph) -> Iterator[Tensor]:
    """Yield what loops that may have no iteration read and write slices of."""
    for op in graph.ops:
        if op.loop is not None and op.loop.kind.least == 0:
            yield from (*op.loop.xs, *op.loop.stacks, *op.loop.pieces)


def conditions(graph: Graph) -> tuple[Condition, ...]:
    """Return what bound sizes may break: sizes that may not be whole or too small, stated amounts below 0.

    Assumptions are not among them: `graph.root.relations` has those.
    """
    if "conditions" not in graph.cache:
        known, found = graph.root.relations, dict[tuple[Poly, int, bool], str]()
        for p, place, least, whole in _declared(graph):
            found.setdefault((p, least, whole), place)
        graph.cache["conditions"] = tuple(
            Condition(p, place, least, whole, frozenset(p.names()))
            for (p, least, whole), place in found.items()
            if not _always(p, least, whole, known)
        )
    out: tuple[Condition, ...] = graph.cache["conditions"]
    return out


def _always(p: Poly, least: int, whole: bool, known: Relations) -> bool:
    """Whether a formula is known to be large enough, and whole where it has to be."""
    return (not whole or is_integral(p)) and known.nonnegative(p - least)


class Bindings(dict[str, Poly]):
    """What to put in for each bound symbol, by name."""

    def __init__(self, graph: Graph, values: Mapping[str, Poly] = MappingProxyType({})) -> None:
        super().__init__(values)
        if "asked" not in graph.cache:
            graph.cache["asked"] = Conditions(graph.root.relations.relations, conditions(graph))
        self.validity = Validity(graph.cache["asked"], tuple(sorted(values.items(), key=itemgetter(0))))
        """What a formula holds for that they are put into."""

    @property
    def held(self) -> tuple[Validity, ...]:
        """The validity as a tuple, empty if no size is bound and open sizes have no conditions."""
        return (self.validity,) if self.validity.names or self.validity.values else ()


def bindings(graph: Graph, dims: Mapping[str, object], left_open: Collection[str] = ()) -> Bindings:
    """Return what to put in for each bound symbol: the graph's defaults, overridden by the given sizes.

    Those are numbers, and where an assumed equality ties an open symbol to others, a formula in those; of names that
    are `left_open` the default is not taken. BindingError if a name is not in the graph, a size is not a positive
    integer or against an assumption, or what the graph is declared with is then no size, or no amount: one of
    `conditions`.
    """
    names = known_names(graph)
    for name in dims:
        if name not in names:
            raise BindingError(
                f"{shorten(name)} is no dimension of graph {graph.root.name!r}, "
                f"expected one of {', '.join(sorted(names))}"
            )
    defaults = {k: v for k, v in graph.root.defaults.items() if k in names and k not in left_open}
    chosen = {**defaults, **dims}
    values = Bindings(graph, {name: as_poly(size_of(name, value)) for name, value in chosen.items()})
    values.validity.conditions.settle(values)
    return values


def stages(graph: Graph) -> tuple[Graph, ...]:
    """One graph a kind of stage of a pipeline, first, middle, last; the graph itself where there is no pipeline."""
    return graph.parts or (graph,)


def of_stages(
    graph: Graph, dims: Mapping[str, object], left_open: Collection[str] = ()
) -> list[tuple[Graph, Bindings]]:
    """Return the stages of a graph with what to put in for the symbols that each has; errors as `bindings`."""
    own = [(g, known_names(g)) for g in stages(graph)]
    every = frozenset[str]().union(*(names for _, names in own))
    return [
        (g, bindings(g, {k: v for k, v in dims.items() if k in names or k not in every}, left_open)) for g, names in own
    ]


def size_of(name: str, value: object) -> int:
    """Return a bound size, or raise BindingError if it is not a positive integer."""
    try:
        size = integer(value)
    except TypeError:
        raise BindingError(f"{name}={shown(value)}: expected a positive integer") from None
    if size.bit_length() > _MOST_BITS:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer of at most {_MOST_BITS} bits")
    if size < 1:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer")
    return size


def need_open(graph: Graph, symbol: str, dims: Mapping[str, object], question: str) -> None:
    """Raise BindingError unless a symbol is a dimension of the graph that is not bound: what is solved for."""
    names = known_names(graph)
    if symbol not in names or symbol in dims:
        raise BindingError(f"{question}: {shown(symbol)}, expected an open dimension of {', '.join(sorted(names))}")
