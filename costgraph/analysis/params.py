"""Parameters: how many, and how many bytes."""

from __future__ import annotations

from ..bind import Formula, answer
from ..graph import Graph, need_graph
from ..polynomial import Poly, total
from ..sizes import bindings
from .traffic import repeated_bodies

__all__ = ["param_bytes", "param_count"]


def _sum(graph: Graph, *, of_bytes: bool) -> Poly:
    need_graph("parameters", graph)
    return total(
        (t.storage.bytes if of_bytes else t.storage.elements) * times
        for g, times in repeated_bodies(graph)
        for t in g.tensors
        if t.role == "param" and t.producer is None  # a view of one is not another
    )


def param_count(graph: Graph, /, **dims: int) -> Formula:
    """Return the number of parameters, frozen ones included; tied ones count once, a Repeat's once an iteration.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Elements of all parameters; buffers are none.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    """
    return answer(_sum(graph, of_bytes=False).bind(bindings(graph, dims)))


def param_bytes(graph: Graph, /, **dims: int) -> Formula:
    """Return the bytes of all parameters, scales of block formats included.

    Parameters
    ----------
    graph : Graph
        What is asked.
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
    return answer(_sum(graph, of_bytes=True).bind(bindings(graph, dims)))
