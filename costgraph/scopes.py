"""Where an op that is made now goes: the graph that is open, and the module scope that its name starts with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from .errors import GraphError
from .symbols import is_level, shorten

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["CURRENT", "PHASE", "SCOPE", "building", "module", "phase", "scope"]

#: The graph, or the body of one, that is being built.
CURRENT: ContextVar[Graph | None] = ContextVar("costgraph_current", default=None)
#: Levels of the scope that is open.
SCOPE: ContextVar[tuple[str, ...]] = ContextVar("costgraph_scope", default=())


#: Phase of ops that are made now: forward, recompute, backward or optimizer.
PHASE: ContextVar[str] = ContextVar("costgraph_phase", default="forward")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Let ops that are made now belong to a phase."""
    token = PHASE.set(name)
    try:
        yield
    finally:
        PHASE.reset(token)


@contextmanager
def building(graph: Graph) -> Iterator[None]:
    """Let ops that are made now go to a graph, or to the body of one."""
    token = CURRENT.set(graph)
    try:
        yield
    finally:
        CURRENT.reset(token)


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
    token = SCOPE.set((*SCOPE.get(), *levels))
    try:
        yield
    finally:
        SCOPE.reset(token)


@contextmanager
def module(graph: Graph, name: str) -> Iterator[str]:
    """Open a scope that no other layer of the graph has: numbered, if one has this name already.

    Parameters
    ----------
    graph : Graph
        Whose layer it is.
    name : str
        One or several levels, separated by `/`.

    Yields
    ------
    str
        The name with its number.

    Raises
    ------
    GraphError
        If a level is no identifier.
    """
    used, number, own = graph.root.modules, 0, name
    while "/".join((*SCOPE.get(), str(own))) in used:
        number += 1
        own = f"{name}_{number}"
    used.add("/".join((*SCOPE.get(), str(own))))
    with scope(own):
        yield own
