"""Sizes of a graph: which dimensions it has, and what binding some of them makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from operator import index

from .dominance import solve
from .errors import BindingError
from .graph import Graph
from .polynomial import Poly, as_poly
from .symbols import shorten, shown

__all__ = ["bindings", "known_names", "need_open", "size_of"]


# No size has so many, and what is multiplied out of them could not be printed.
_MOST_BITS = 1024


def _polys(value: object) -> Iterable[Poly]:
    """Yield the formulas among the attributes of an op."""
    if isinstance(value, Poly):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _polys(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _polys(v)
    elif hasattr(value, "window"):
        yield from _polys(value.window)


def known_names(graph: Graph) -> frozenset[str]:
    """Return the names of all dimensions of a graph, bodies included."""
    if "names" not in graph.cache:
        found: set[str] = set()
        seen: set[Poly] = set()
        for g in graph.bodies():
            for t in g.tensors:
                seen.update(t.sizes)
            for op in g.ops:
                seen.update(p for v in op.attrs.values() for p in _polys(v))
        for p in seen:
            found |= p.names()
        for relation in graph.root.relations.relations:
            found |= relation.difference.names()
        graph.cache["names"] = frozenset(found)
    names: frozenset[str] = graph.cache["names"]
    return names


def _delicate(graph: Graph) -> list[tuple[Poly, str, int]]:
    """Sizes that may turn out not to be whole numbers or too small, each with what has it and its least value."""
    if "delicate" not in graph.cache:
        found: dict[Poly, str] = {}
        rooms: dict[Poly, str] = {}
        for g in graph.bodies():
            for t in g.tensors:
                for i, n in enumerate(t.sizes):
                    if i < t.storage.pieces:
                        continue  # as many as a loop has iterations, whose count is looked at
                    if n not in found and not _always_size(n):
                        found[n] = f"axis {i} of {t.name!r}"
            for op in g.ops:
                if "count" in op.attrs and not _always_size(op.attrs["count"]):
                    where = rooms if op.attrs.get("least") == 0 else found
                    where.setdefault(op.attrs["count"], f"count of {op.name!r}")
                if "room" in op.attrs and not _always_size(op.attrs["room"]):
                    rooms.setdefault(op.attrs["room"], f"what is left beyond {op.name!r}")
                for room in op.attrs.get("rooms", ()):
                    if not _always_size(room):
                        rooms.setdefault(room, f"what is left beyond {op.name!r}")
                if "start" in op.attrs and not _always_size(op.attrs["start"]):
                    rooms.setdefault(op.attrs["start"], f"start of {op.name!r}")
        sizes = [(p, place, 1) for p, place in found.items()]
        graph.cache["delicate"] = sizes + [(p, place, 0) for p, place in rooms.items()]
    out: list[tuple[Poly, str, int]] = graph.cache["delicate"]
    return out


@lru_cache(maxsize=1 << 12)
def _always_size(p: Poly) -> bool:
    return all(isinstance(c, int) and c > 0 and all(e > 0 and k[0] != "~" for k, e in m) for m, c in p.terms.items())


def bindings(graph: Graph, dims: Mapping[str, object]) -> dict[str, Poly]:
    """Return what to put in for each bound symbol: the graph's defaults, overridden by the given sizes.

    Parameters
    ----------
    graph : Graph
        Its dimensions are the names that can be bound.
    dims : mapping of str to int
        Sizes.

    Returns
    -------
    dict of str to Poly
        Numbers, and where an assumed equality ties an open symbol to others, a formula in those.

    Raises
    ------
    BindingError
        If a name is not in the graph, a size is not a positive integer or against an assumption, or a size of a
        tensor is then not a positive whole number.
    """
    names = known_names(graph)
    for name in dims:
        if name not in names:
            raise BindingError(
                f"{shorten(name)} is no dimension of graph {graph.root.name!r}, "
                f"expected one of {', '.join(sorted(names))}"
            )
    chosen = {**{k: v for k, v in graph.root.defaults.items() if k in names}, **dims}
    values = {name: as_poly(size_of(name, value)) for name, value in chosen.items()}
    _apply_equalities(graph, values)
    for relation in graph.root.relations.relations:
        relation.check(values)
    for size, place, least in _delicate(graph):
        if size.names() <= values.keys():
            bound = size.bind(values).constant
            if bound is not None and (not isinstance(bound, int) or bound < least):
                used = ", ".join(f"{n}={_value(values[n])}" for n in sorted(size.names()))
                expected = "a positive whole number" if least else "a whole number that is not negative"
                raise BindingError(f"{used}: {place} has size {size} = {_value(as_poly(bound))}, expected {expected}")
    return values


def _value(p: Poly) -> str:
    return shown(p.constant) if isinstance(p.constant, int) else str(p)


def size_of(name: str, value: object) -> int:
    """Return a bound size, or raise BindingError if it is not a positive integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        size = index(value)  # type: ignore[arg-type]  # what has no such method is refused here
    except TypeError:
        raise BindingError(f"{name}={shown(value)}: expected a positive integer") from None
    if size.bit_length() > _MOST_BITS:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer of at most {_MOST_BITS} bits")
    if size < 1:
        raise BindingError(f"{name}={shown(size)}: expected a positive integer")
    return size


def _apply_equalities(graph: Graph, values: dict[str, Poly]) -> None:
    for relation in graph.root.relations.relations:
        if not relation.equal:
            continue
        found = solve(relation.difference.bind(values), relation.subject)
        if found is None:
            continue
        name, value = found
        number = value.constant
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BindingError(
                f"assumption {relation.text!r} makes {name}={_value(as_poly(number))}, expected a positive integer"
            )
        for k, v in values.items():
            values[k] = v.bind({name: value})
        values[name] = value


def need_open(graph: Graph, symbol: str, dims: Mapping[str, object], question: str) -> None:
    """Raise BindingError unless a symbol is a dimension of the graph that is not bound: what is solved for."""
    names = known_names(graph)
    if symbol not in names or symbol in dims:
        raise BindingError(f"{question}: {shown(symbol)}, expected an open dimension of {', '.join(sorted(names))}")
