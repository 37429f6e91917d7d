"""Inference as a transform: the same declaration with a cache, for all positions at once or for the next ones."""

from __future__ import annotations

import sympy

from ...algebra.polynomial import ONE, Poly, poly
from ...algebra.symbols import symbol
from ...errors import GraphError, UnsupportedError
from ...graph.arguments import need_choice
from ...graph.graph import Graph
from ...graph.sizes import known_names
from ...ops.collectives import need_of_all
from ...ops.foreign import need_declared
from .needed import head_of, needed_ops
from .replay import Replayer, positions_of
from .resize import Lengths
from .steps import step_of, tokens_of

__all__ = ["decode", "prefill"]


def prefill(graph: Graph, chunk: object = None, *, logits: str = "all") -> Graph:
    """Return the pass over a prompt: as declared, and what `cache` marks is written to caches.

    Parameters
    ----------
    graph : Graph
        A forward pass, with what inference keeps marked by `cache` and `initial_state`; it stays as it is.
    chunk : sympy.Expr, int or str, optional
        Positions that are computed at a time: a chunk that ends at position S of the prompt and sees what the chunks
        before it have cached, as `decode(graph, chunk)` has it. By default the whole prompt.
    logits : str
        all: for every position, as declared. last: for the last one alone, as generating needs it; the head reads one
        position of what it is given.

    Returns
    -------
    Graph
        With the caches as buffers of role cache.

    Raises
    ------
    GraphError
        If the graph has a backward pass, or nothing in it is marked.
    UnsupportedError
        If an op states costs that do not tell new positions from cached ones, as a trace's do, or `logits="last"`
        finds no head.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-2-7b")
    >>> cg.flops(cg.prefill(g)) == cg.flops(g)
    True
    >>> last = cg.prefill(g, logits="last")
    >>> cg.matmul_flops(g, B=1, S=512) - cg.matmul_flops(last, B=1, S=512)  # 2*D*V for each of the others
    133955584000
    """
    return _replayed("prefill", graph, chunk, logits)


def decode(graph: Graph, tokens: object = 1, *, logits: str = "all") -> Graph:
    """Return one step of generation: new positions alone are computed, all others come from caches.

    Parameters
    ----------
    graph : Graph
        A forward pass, with what inference keeps marked by `cache` and `initial_state`, or a trace with caches that are
        marked (`trace(..., cached=...)`); it stays as it is.
    tokens : sympy.Expr, int or str
        New positions of each sequence: 1 to generate, several to verify what was guessed (speculative decoding), a
        symbol or its name to leave it open.
    logits : str
        all: for every new position. last: for the last one alone.

    Returns
    -------
    Graph
        In it S, the number of positions of the declaration, is the context with the new positions included: the
        positions that the caches hold after the step. Caches are buffers of role cache; those with a window hold
        Min(S, window + tokens - 1) positions. Of a trace, the size of the new positions is the context as well, and
        that of the positions before follows from it; caches are what the step reads, and what it makes of them with the
        new ones is made as the program does it.

    Raises
    ------
    GraphError
        If the graph has a backward pass, or nothing in it is marked.
    UnsupportedError
        If an op states costs that do not tell new positions from cached ones, as those of a trace without caches do, or
        a trace went another way than for so many new positions.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.decode(cg.models.load("llama-3-70b"))
    >>> cg.matmul_flops(step, B=1, S=8192)  # 2 for each parameter but the table, and 4*H*K*S*L of attention
    160478265344
    >>> cg.cache_bytes(step, B=1, S=1)
    327680
    """
    return _replayed("decode", graph, tokens, logits)


def _replayed(place: str, graph: Graph, tokens: object, logits: str) -> Graph:
    need_of_all(place, graph)
    caches = [t for t in graph.tensors if t.role == "cache" and t.producer is None]
    if caches and place == "decode":
        return step_of(graph, caches, tokens, logits)
    need_declared(place, graph, "trace a step with what it keeps, named in cached=")
    need_choice(f"{place}: logits", logits, ("all", "last"))
    if graph.gradients or any(op.phase != "forward" for op in graph.walk()):
        raise GraphError(f"{place}: graph {graph.name!r} has a backward pass, expected a forward pass alone")
    name = _positions(place, graph)
    context = poly(symbol(name))
    own = context if tokens is None else tokens_of(place, graph, tokens, name)
    writes = place == "prefill" and own == context
    kept = needed_ops(graph, static=not writes)
    head = head_of(place, graph, name) if logits == "last" else None

    def replayed(own: Poly) -> Graph:
        return Replayer(place, Lengths(name, own, (context, ONE)), kept, head, writes=writes).run(
            graph, f"{graph.name}.{place}"
        )

    if own == ONE:
        # one position fits into any number of them: whether sizes mean the same is seen of an open number
        replayed(poly(symbol(_unused(graph))))
    new = replayed(own)
    if own != context:
        with new:
            new.assume(f"{name} >= {own}")
    return new


def _unused(graph: Graph) -> str:
    """Return a name that is no dimension of a graph."""
    names = known_names(graph)
    return next(n for i in range(len(names) + 1) if (n := f"new{i}") not in names)


def _positions(place: str, graph: Graph) -> str:
    """Return the name of the number of positions: what the axes of all caches and recurrences run over."""
    found: dict[Poly, str] = {}
    for g in graph.bodies():
        for op in g.ops:
            size = positions_of(op)
            if size is not None:
                found.setdefault(size, op.name)
    if not found:
        raise GraphError(
            f"{place}: nothing in graph {graph.name!r} is kept between steps, expected costgraph.ops.cache on keys and "
            f"values, or a scan over positions from an initial_state"
        )
    names = {str(n) for n in found}
    size, where = next(iter(found.items()))
    if len(names) > 1 or not isinstance(size.expr, sympy.Symbol):
        raise UnsupportedError(f"{place}: {where!r} runs over {' and '.join(sorted(names))}, expected one open size")
    (found_name,) = size.names()
    return found_name
