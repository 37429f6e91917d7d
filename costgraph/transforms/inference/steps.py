"""One step of a trace whose caches are marked: the program's own step, for a number of new positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from ...algebra.dominance import Relations
from ...algebra.polynomial import ONE, Poly, poly
from ...algebra.symbols import shown, symbol
from ...errors import BindingError, GraphError, ShapeError, UnsupportedError
from ...graph.arguments import positive
from ...graph.graph import Graph
from ...graph.sizes import known_names
from ...graph.tensor import Tensor
from ..rewrite import Rewriter

__all__ = ["step_of", "tokens_of"]


class _Step(Rewriter):
    """Copies a step for some new positions behind those that caches hold."""

    def changed(self, old: Graph) -> dict[str, Any]:
        """Return the facts that differ: the assumptions about the sizes that are left."""
        try:
            for relation in old.relations.relations:
                relation.check(self.values)
        except BindingError as error:
            raise UnsupportedError(
                f"decode: {error}: graph {old.name!r} goes another way for so many new positions, expected a trace of "
                f"so many"
            ) from None
        left = Relations(relation.at(self.values) for relation in old.relations.relations)
        return super().changed(old) | {"relations": left}


def step_of(graph: Graph, caches: Sequence[Tensor], tokens: object, logits: str) -> Graph:
    """Return the step that a trace with marked caches is, for so many new positions.

    GraphError if it is a step already, of which nothing is open; UnsupportedError if it is not plain which sizes are
    new positions, and which are those before.
    """
    inputs = [t for t in graph.tensors if t.role == "input" and t.producer is None]
    read, held = _names(inputs), _names(caches)
    new, before = sorted(read - held), sorted(held - read)
    if graph.name.endswith((".decode", ".prefill")):
        raise GraphError(f"decode: graph {graph.name!r} is a step already, expected a forward pass")
    if len(new) > 1 or len(before) > 1:
        raise UnsupportedError(
            f"decode: inputs of graph {graph.name!r} have open sizes {shown(new)} that no cache has, and its caches "
            f"{shown(before)} that no input has, expected one at most of each: new positions, and those before"
        )
    if logits == "last":
        raise UnsupportedError("decode: logits='last' of a trace, expected a program that hands out those alone")
    if not new:
        if tokens != 1:
            raise UnsupportedError(
                f"decode: tokens {shown(tokens)} of graph {graph.name!r}, whose new positions have no name, expected a "
                f"trace that names their axis"
            )
        return Rewriter().run(graph, f"{graph.name}.decode")
    (name,) = new
    own = tokens_of("decode", graph, tokens, name)
    if own == ONE:
        raise UnsupportedError(
            f"decode: one new position of graph {graph.name!r}, whose named sizes are larger than 1, as those of all "
            f"traces: expected a trace of one that gives the axis of {name} no name (None), or tokens= above 1"
        )
    made = _Step({name: own} | {n: poly(symbol(name)) - own for n in before}).run(graph, f"{graph.name}.decode")
    if before:
        with made:
            made.assume(f"{name} > {own} + 1")
    return made


def _names(tensors: Iterable[Tensor]) -> set[str]:
    return set().union(*(n.names() for t in tensors for n in t.sizes))


def tokens_of(place: str, graph: Graph, tokens: object, name: str) -> Poly:
    """Return the number of new positions; a symbol must not be one that the graph has already."""
    given = positive(f"{place}: tokens", symbol(tokens) if isinstance(tokens, str) else tokens)
    if given.constant is None and not isinstance(given.expr, sympy.Symbol):
        raise ShapeError(f"{place}: tokens {given}, expected a whole number or one symbol")
    if given.names() & known_names(graph) - {name}:
        raise GraphError(f"{place}: tokens {given} is a dimension of graph {graph.name!r}, expected another name")
    return given
