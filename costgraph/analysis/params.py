"""Parameter and cache sizes: element counts and bytes."""

from __future__ import annotations

from ..algebra.polynomial import ONE, Poly, total
from ..bind.evaluate import Formula, bound_answer
from ..ir.graph import (
    Graph,
    Op,
    Tensor,
    bindings,
    need_flag,
    need_graph,
    scopes_of,
)
from ..ops.collectives import Merge
from ..ops.elementwise import Pointwise
from ..ops.experts import Dispatch, GroupedMatmul
from ..ops.index import Gather
from ..ops.layout import Rearrange
from ..ops.opaque import Opaque
from .costs import repeated_bodies

__all__ = ["cache_bytes", "cached", "param_bytes", "param_count", "unused_params"]


def _sum(graph: Graph, *, of_bytes: bool, active: bool = False) -> Poly:
    need_graph("parameters", graph)
    return total(
        (t.storage.bytes if of_bytes else t.storage.elements) * (_used_fraction(g, t) if active else ONE) * times
        for g, times in repeated_bodies(graph)
        for t in g.tensors
        if t.role == "param" and t.producer is None  # views do not count again
    )


def _used_fraction(graph: Graph, t: Tensor) -> Poly:
    """Return the fraction of a parameter used per token: the chosen share of stacked experts, otherwise 1."""
    fractions = (_fraction_used_by(op, t) for op in graph.successors(t))
    return next((p for p in fractions if p != ONE), ONE)


def _fraction_used_by(op: Op, t: Tensor) -> Poly:
    if op.body is not None:
        fractions = (
            _used_fraction(op.body, f) for f, outer in zip(op.body.formals, op.operands, strict=True) if outer is t
        )
        return next((p for p in fractions if p != ONE), ONE)
    if isinstance(op.kind, GroupedMatmul) and op.operands[1] is t:
        return op.kind.chosen / t.sizes[0]
    sender = op.operands[1].producer if isinstance(op.kind, Gather) else None
    if sender is not None and isinstance(sender.kind, Dispatch):  # a table row for the expert of each row
        return sender.operands[0].sizes[-1] / t.sizes[0]
    if sender is not None and isinstance(sender.kind, Merge):
        return sender.kind.chosen / t.sizes[0]
    # a view or another format of it, or its dequantized values
    passes_on = isinstance(op.kind, Pointwise | Rearrange | Opaque) and op.results[0].numel == t.numel
    return _used_fraction(op.graph, op.results[0]) if passes_on else ONE


def unused_params(graph: Graph, /, **dims: int) -> dict[str, Formula]:
    """Return the number of parameters that no op reads, by outermost unused scope.

    For example, a vision tower skipped by a text-only forward pass has parameters but neither FLOPs nor activations.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    **dims : int
        Sizes to bind.

    Returns
    -------
    dict of str to int or sympy.Expr
        Elements by scope or parameter name; empty if all parameters are read.

    Raises
    ------
    GraphError, BindingError
        If the argument is not a graph, or a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (3, 4))
    ...     unused = [g.param(f"tower/{name}/weight", (4, 4)) for name in "ab"]
    ...     g.output(cg.linear(x, "b d -> b f", f=5, name="text"))
    >>> unused_params(g)
    {'tower': 32}
    """
    need_graph("unused_params", graph)
    used, unused = set[str](), dict[str, list[Poly]]()
    for g, times in repeated_bodies(graph):
        for t in g.tensors:
            if t.role == "param" and t.producer is None:
                if next(iter(g.successors(t)), None) is None:
                    unused.setdefault(t.name, []).append(t.storage.elements * times)
                else:
                    used |= set(scopes_of(t.name))
    values, by_scope = bindings(graph, dims), dict[str, list[Poly]]()
    for name, counts in unused.items():
        by_scope.setdefault(next(s for s in scopes_of(name) if s not in used or s == name), []).extend(counts)
    return {scope: bound_answer(total(counts), values) for scope, counts in by_scope.items()}


def param_count(graph: Graph, /, *, active: bool = False, **dims: int) -> Formula:
    """Return the number of parameters, including frozen ones; tied ones count once, those in a loop once per iteration.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    active : bool
        Count the parameters used per token: k of E experts and everything else, including embedding and head.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Elements in all parameters, without buffers.

    Raises
    ------
    GraphError, BindingError
        If `active` is not a bool, or a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("mixtral-8x7b")
    >>> cg.param_count(g), cg.param_count(g, active=True)
    (46702792704, 12879925248)
    """
    need_flag("param_count", active=active)
    return bound_answer(_sum(graph, of_bytes=False, active=active), bindings(graph, dims))


def param_bytes(graph: Graph, /, **dims: int) -> Formula:
    """Return the bytes of all parameters, including scales of block formats.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    """
    return bound_answer(_sum(graph, of_bytes=True), bindings(graph, dims))


def cache_bytes(graph: Graph, /, **dims: int) -> Formula:
    """Return the bytes of all caches: keys and values, latent vectors, recurrent states.

    Parameters
    ----------
    graph : Graph
        Graph from `prefill` or `decode`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes, including scales of block formats; caches in a loop count once per iteration.

    Raises
    ------
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.decode(cg.models.load("llama-2-7b"))
    >>> cg.cache_bytes(step)  # 2*H*K elements for each layer and position, of two bytes
    524288*B*S
    """
    need_graph("cache_bytes", graph)
    return bound_answer(cached(graph), bindings(graph, dims))


def cached(graph: Graph) -> Poly:
    """Return the bytes of all caches as a polynomial."""
    return total(
        t.storage.bytes * times
        for g, times in repeated_bodies(graph)
        for t in g.tensors
        if t.role == "cache" and t.producer is None
    )
