"""Graphs in files of pickle and as deep copies.

Tensors and ops name each other and their graph, in chains as long as the graph. A graph is therefore written as its
nodes, empty, in a row, and then what is in them; wherever a node is met, its graph and its place in the row stand for
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["Attributes", "Node", "filled", "reduced"]

#: Of a graph that is open, or has been asked, no copy has what is only true of this one.
_OF_ONE = ("__networkx_cache__", "_places", "cache", "journal")


class Attributes(dict[str, Any]):
    """What networkx hands on from a graph to its copies and views: entries of users, and what the library knows.

    The latter are beside the entries, as writers of networkx have no form for them.
    """

    def __init__(self, entries: Any = (), facts: Any = ()) -> None:
        super().__init__(entries)
        self.facts: dict[str, Any] = dict(facts)

    def update(self, *others: Any, **entries: Any) -> None:
        """Take over entries, and of the attributes of another graph all that the library knows."""
        super().update(*others, **entries)
        for other in others:
            if isinstance(other, Attributes):
                self.facts.update(other.facts)

    def copy(self) -> Attributes:
        """Return others with the same entries."""
        return Attributes(self, self.facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attributes:
        return Attributes(deepcopy(dict(self), memo), self.facts)  # networkx copies these alone, for the same nodes


class Node:
    """Common part of tensors and ops: how they are copied with their graph."""

    __slots__ = ()
    graph: Graph

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        places = _own(self.graph)[1]
        if self in places:
            return _node, (self.graph, places[self])
        return _node_of, (type(self),), _contents(self)  # it was removed

    def __copy__(self) -> Any:
        return self

    def __setstate__(self, contents: dict[str, Any]) -> None:
        for name, value in contents.items():
            setattr(self, name, value)


def _contents(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())}


def _own(graph: Graph) -> tuple[list[Any], dict[Any, int]]:
    """Return the nodes of a graph that are not another one's, and the place of each."""
    if _own not in graph.cache:
        nodes = [n for n in graph._node if isinstance(n, Node) and n.graph is graph]
        graph.cache[_own] = nodes, {n: i for i, n in enumerate(nodes)}
    found: tuple[list[Any], dict[Any, int]] = graph.cache[_own]
    return found


def reduced(graph: Graph) -> tuple[Any, ...]:
    """Return what pickle and deepcopy make a graph of."""
    graph.cache.pop(_own, None)  # networkx may have removed some since
    nodes, _ = _own(graph)
    state = {
        name: value
        for name, value in vars(graph).items()
        if name not in _OF_ONE and not isinstance(getattr(type(graph), name, None), cached_property)
    }
    state["graph"] = dict(graph.graph), graph.graph.facts
    return _graph_of, (type(graph), [type(n) for n in nodes]), (state, [_contents(n) for n in nodes])


def filled(graph: Graph, state: Iterable[Any]) -> None:
    """Put into a graph and into its nodes what they had."""
    attributes, contents = state
    graph.__dict__.update(attributes)
    graph.graph = Attributes(*graph.graph)
    for node, content in zip(_own(graph)[0], contents, strict=True):
        node.__setstate__(content)


def _graph_of(kind: type[Graph], kinds: Iterable[type[Node]]) -> Graph:
    graph = kind()
    nodes = [_node_of(k) for k in kinds]
    graph.cache[_own] = nodes, {n: i for i, n in enumerate(nodes)}
    return graph


def _node_of(kind: type[Node]) -> Node:
    return kind.__new__(kind)


def _node(graph: Graph, place: int) -> Node:
    found: Node = _own(graph)[0][place]
    return found
