"""Where an op that is made now goes: the graph that is open, and the module scope that its name starts with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..algebra.symbols import is_level, shorten
from ..errors import GraphError

if TYPE_CHECKING:
    from .graph import Graph

__all__ = [
    "Place", "base_name", "building", "close", "current_graph", "enter", "here", "iterations_of", "module", "opened",
    "phase", "same_suffix", "scope", "scopes_of", "with_suffix",
]  # fmt: skip


@dataclass(frozen=True, eq=False)  # told apart by identity: one is closed where it stands
class Place:
    """Where an op that is made now goes."""

    graph: Graph | None = None
    """The graph, or the body of one, that is being built."""
    levels: tuple[str, ...] = ()
    """Levels of the scope that is open."""
    phase: str = "forward"
    """Phase of ops: forward, recompute, backward or optimizer."""
    suffix: str = ""
    """Suffix for new names: a part of a split loop, or an iteration of an unrolled loop, such as `.i3`."""


#: Loop suffix of a name, such as `.cut1.last.i0.i3`: the part of a split loop and the iterations of unrolled loops. The
#: numbers that make a name unique come after it.
_SUFFIX = re.compile(r"(?:\.(?:(?:i|cut|part)\d+|(?:first|last)\d*))+(?=(?:_\d+)*$)")

#: What was opened and is not closed, the innermost last. Generators may close an outer one first.
_OPEN: ContextVar[tuple[Place, ...]] = ContextVar("costgraph_open", default=(Place(),))


def here() -> Place:
    """Return the innermost place."""
    return _OPEN.get()[-1]


def current_graph(of: Graph | None = None) -> Graph:
    """Return the graph that an op added now goes to: the body being built, if it is one of the same graph."""
    current = here().graph
    if of is None:
        if current is None:
            raise GraphError("no graph is open, expected 'with costgraph.Graph(...) as g:' around")
        return current
    if current is not None and current.root is of.root:
        return current
    return of.root


def enter(**facts: Any) -> Place:
    """Open a place that is like the innermost one but for some facts."""
    place = replace(here(), **facts)
    _OPEN.set((*_OPEN.get(), place))
    return place


def close(place: Place) -> bool:
    """Close a place, whether or not it is the innermost one; return whether it was."""
    inmost = here() is place
    _OPEN.set(tuple(p for p in _OPEN.get() if p is not place))
    return inmost


@contextmanager
def opened(**facts: Any) -> Iterator[None]:
    """Let ops that are made now go where some facts say: graph, levels, phase."""
    place = enter(**facts)
    try:
        yield
    finally:
        close(place)


def iterations_of(name: str) -> list[str]:
    """Return the suffixes of a name that are iterations of unrolled loops, such as `.i0` and `.i3`, outermost first."""
    return re.findall(r"\.i\d+", _suffix(name))


def base_name(name: str) -> str:
    """Return a name without its loop suffix."""
    return _SUFFIX.sub("", name) if "." in name else name


def _suffix(name: str) -> str:
    found = _SUFFIX.search(name) if "." in name else None
    return "" if found is None else found.group()


def with_suffix(name: str) -> str:
    """Return a name for a new op or parameter, with the loop suffix that is open."""
    suffix = here().suffix
    return name + suffix if suffix and not _suffix(name) else name


def same_suffix(name: str) -> AbstractContextManager[None]:
    """Give new ops and parameters the loop suffix that a name ends with."""
    suffix = _suffix(name)
    return opened(suffix=suffix) if suffix else nullcontext()


def scopes_of(name: str) -> list[str]:
    """Return the scopes around a name and the name itself, outermost first."""
    return [*accumulate(name.split("/"), "{}/{}".format)]


def phase(name: str) -> AbstractContextManager[None]:
    """Let ops that are made now belong to a phase."""
    return opened(phase=name)


def building(graph: Graph) -> AbstractContextManager[None]:
    """Let ops that are made now go to a graph, or to the body of one."""
    return opened(graph=graph)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of ops and parameters made inside: the rows of a cost table are grouped by it.

    Parameters
    ----------
    name : str
        One or several levels, separated by `/`; a number is the place in a list of layers.

    Raises
    ------
    GraphError
        If a level is neither an identifier nor a number.
    """
    levels = tuple(name.split("/")) if isinstance(name, str) else ()
    if not levels or not all(map(is_level, levels)):
        raise GraphError(f"scope {shorten(str(name))}: expected identifiers separated by '/'")
    with opened(levels=(*here().levels, *levels)):
        yield


@contextmanager
def module(graph: Graph, name: str) -> Iterator[str]:
    """Open a scope that no other layer of the graph has, and yield its name: numbered, if one has this name already.

    A name may have several levels, separated by `/`; GraphError if one is no identifier.
    """
    used, number, own = graph.root.modules, 0, name
    while "/".join((*here().levels, str(own))) in used:
        number += 1
        own = f"{name}_{number}"
    full = "/".join((*here().levels, str(own)))
    with scope(own):
        used.add(full)
        graph.note(lambda: used.discard(full))
        yield own
