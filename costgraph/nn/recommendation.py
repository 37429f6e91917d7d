"""Layers for recommendation models: embedding bags and feature interactions."""

from __future__ import annotations

from ..errors import ShapeError
from ..ir.graph import (
    Tensor,
    current_graph,
    module,
    need_choice,
    need_flag,
    need_tensor,
)
from ..ops.einsum import einsum
from ..ops.index import gather, take_along
from ..ops.layout import expand, reshape
from ..ops.reduce import reduce
from .activations import one_kernel

__all__ = ["dot_interaction", "embedding_bag"]


def embedding_bag(ids: Tensor, table: Tensor, *, mode: str = "sum", name: str = "embedding_bag") -> Tensor:
    """Look up and reduce several rows of a table per sample, in one kernel.

    Parameters
    ----------
    ids : Tensor
        Integer indices, shape (b, n): n lookups per sample.
    table : Tensor
        Shape (v, d).
    mode : str
        Reduction over a sample's lookups: sum, mean or max.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        Shape (b, d). FLOPs: 1 per looked-up element. Reads the indices and the selected rows, not the table; writes
        only the result. The table gradient is dense, as in torch with `sparse=False`.

    Raises
    ------
    GraphError, ShapeError
        If the indices are not integers, shapes do not fit, or the mode is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, N, V, D = cg.dims("B N V D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.embedding_bag(g.input("ids", (B, N), dtype="int64"), g.param("table", (V, D)))
    >>> y.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, D), B*D*N, 4*B*D*N + 4*B*D + 8*B*N)
    """
    need_tensor("embedding_bag", ids, table)
    need_choice("embedding_bag: mode", mode, ("sum", "mean", "max"))
    if ids.ndim != 2 or table.ndim != 2:
        raise ShapeError(f"embedding_bag of {ids!r} in {table!r}: expected indices (b, n) and a table (v, d)")

    def body(ids: Tensor, table: Tensor) -> Tensor:
        return reduce(gather(table, ids, name="rows"), "b n d -> b d", mode)

    return one_kernel(name, body, ids, table)


def dot_interaction(x: Tensor, *, itself: bool = False, name: str = "interaction") -> Tensor:
    """Return the dot products of all vector pairs in a sample (Naumov et al. 2019, arXiv 1906.00091).

    Parameters
    ----------
    x : Tensor
        Shape (b, n, d).
    itself : bool
        Whether to include each vector's product with itself.
    name : str
        Scope for the ops and the pair indices, a buffer.

    Returns
    -------
    Tensor
        Shape (b, n*(n-1)/2), with `itself` (b, n*(n+1)/2). FLOPs of kind matmul: 2 * b * n**2 * d, as one batched
        matmul computes all products, from which the pairs are selected.

    Raises
    ------
    GraphError, ShapeError
        If `x` has another number of axes, or is known to have fewer than two vectors.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, N, D = cg.dims("B N D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.nn.dot_interaction(g.input("x", (B, N, D)))
    >>> y.shape, cg.matmul_flops(g)
    ((B, N**2/2 - N/2), 2*B*D*N**2)
    """
    need_tensor("dot_interaction", x)
    need_flag("dot_interaction", itself=itself)
    if x.ndim != 3:
        raise ShapeError(f"dot_interaction of {x!r}: expected three axes (batch, vectors, elements)")
    count = x.sizes[1]
    pairs = count * (count + (1 if itself else -1)) / 2
    if pairs.constant is not None and pairs.constant < 1:
        raise ShapeError(f"dot_interaction of {x!r}: expected at least two vectors")
    graph = current_graph(x.graph)
    with module(graph, name):
        square = einsum(x, x, "b n d, b m d -> b n m", name="matmul")
        pair_ids = graph.buffer("pairs", (pairs,), "int64")
        flat = reshape(square, (x.sizes[0], count * count), name="flat")
        return take_along(flat, expand(pair_ids, "p -> b p", b=x.sizes[0]), name="pick")
