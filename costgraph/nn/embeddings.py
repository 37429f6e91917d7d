"""What tokens, positions, times and images become before the first layer, and what a table makes behind the last."""

from __future__ import annotations

from ..dtypes import DType
from ..errors import ShapeError
from ..graph.arguments import need_flag, need_tensor, positive
from ..graph.graph import current_graph
from ..graph.scopes import module
from ..graph.strides import windows_along
from ..graph.tensor import Tensor
from ..ops.einsum import einsum
from ..ops.index import gather
from ..ops.layout import concat, rearrange
from ..ops.pointwise import cast, pointwise
from .conv import conv
from .kernels import one_kernel

__all__ = ["embedding", "patch_embedding", "relative_bias", "tied_head", "timestep_embedding"]


def embedding(ids: Tensor, table: Tensor, *, name: str = "embedding") -> Tensor:
    """Look up rows of a table: no FLOPs, reads the rows and the indices (see `gather`)."""
    return gather(table, ids, name=name)


def tied_head(x: Tensor, table: Tensor, *, name: str = "head") -> Tensor:
    """Logits from the table of embeddings: (b, s, d) and (v, d) to (b, s, v), a parameter that counts once."""
    need_tensor("tied_head", x, table)
    with module(current_graph(x.graph), name):
        return einsum(x, table, "... d, v d -> ... v", name="matmul")


def relative_bias(
    queries: Tensor,
    keys: Tensor,
    heads: object,
    *,
    buckets: object = 32,
    bidirectional: bool = True,
    dtype: str | DType | None = None,
    name: str = "relative_bias",
) -> Tensor:
    """Make what T5 adds to attention scores: a learned number for each head and bucket of distances.

    Raffel et al. 2020 (arXiv 1910.10683), section 2.1. Half of the buckets are distances of their own, the others
    ranges that grow with the logarithm of the distance.

    Parameters
    ----------
    queries, keys : Tensor
        Positions, integers of shape (s,) and (t,): `arange(S)` and `arange(S, context=True)`.
    heads : sympy.Expr or int
        Heads of queries.
    buckets : sympy.Expr or int
        Rows of the table.
    bidirectional : bool
        Later keys have buckets apart from earlier ones; otherwise all of them share the one of distance 0.
    dtype : str or DType, optional
        Format of the table, the graph's by default.
    name : str
        Scope of the table and of the ops.

    Returns
    -------
    Tensor
        Shape (1, heads, s, t), a view of what was looked up, for `bias` of `attention`. FLOPs: the buckets' alone,
        10 pointwise and 1 transcendental for each pair of positions (2 pointwise more with `bidirectional`).

    Raises
    ------
    ShapeError
        If positions are no integers of one axis, or a size is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> S, H = cg.dims("S H")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.relative_bias(cg.ops.arange(S), cg.ops.arange(S, context=True), H))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((1, H, S, S), 32*H)
    """
    need_tensor("relative_bias", queries, keys)
    need_flag("relative_bias", bidirectional=bidirectional)
    for t in (queries, keys):
        if t.dtype.kind != "int" or t.ndim != 1:
            raise ShapeError(f"relative_bias: positions {t!r}, expected integers of one axis")
    rows = positive("relative_bias: buckets", buckets)
    # whole numbers, rounded down: what is added to an index is one
    own = windows_along(rows, 1, 2) if bidirectional else rows  # buckets of a direction
    exact = windows_along(own, 1, 2)  # those of a distance of their own

    def body(queries: Tensor, keys: Tensor) -> Tensor:
        away = rearrange(keys, "t -> 1 t") - rearrange(queries, "s -> s 1")
        later = pointwise("less", 0, away) if bidirectional else None
        away = pointwise("abs", away) if bidirectional else -pointwise("minimum", away, 0)
        # the base of the logarithm, which the largest distance sets, changes no cost
        growing = pointwise("log", cast(away, "fp32") / exact) / 1.0 * (own - exact)
        far = pointwise("minimum", cast(growing, "int64") + exact, own - 1)
        found = pointwise("where", pointwise("less", away, exact), away, far)
        return found if later is None else found + cast(later, "int64") * own

    with module(current_graph(queries.graph), name) as _:
        table = current_graph(queries.graph).param("table", (rows, heads), dtype=dtype)
        found = one_kernel("buckets", body, queries, keys)
        return rearrange(embedding(found, table, name="lookup"), "s t h -> 1 h s t", name="heads")


def timestep_embedding(times: Tensor, size: object, *, dtype: object = None, name: str = "timesteps") -> Tensor:
    """Make the sinusoids of diffusion times: cosines and sines of time times a frequency.

    Parameters
    ----------
    times : Tensor
        Shape (b,), of any format.
    size : sympy.Expr or int
        Elements of an embedding, even: half of them cosines, half sines.
    dtype : str or DType, optional
        Format of the result, the graph's by default; in between it is fp32.
    name : str
        Scope of the frequencies, a buffer in fp32, and of the ops.

    Returns
    -------
    Tensor
        Shape (b, size). FLOPs: half a product and one cosine or sine for each element.

    Raises
    ------
    ShapeError
        If `times` has another number of axes, or the size is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> B = cg.dims("B")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(cg.nn.timestep_embedding(g.input("t", (B,), dtype="int64"), 256))
    >>> g.outputs[0].shape, cg.flops(g)
    ((B, 256), 384*B)
    """
    need_tensor("timestep_embedding", times)
    if times.ndim != 1:
        raise ShapeError(f"timestep_embedding: times {times!r}, expected one axis")
    graph = current_graph(times.graph)
    half = positive("timestep_embedding: size", size) / 2
    with module(graph, name):
        frequencies = graph.buffer("frequencies", (half,), dtype="fp32")
        angles = einsum(cast(times, "fp32"), frequencies, "b, k -> b k", name="angles")
        made = concat([pointwise("cos", angles), pointwise("sin", angles)], -1)
        return cast(made, graph.root.dtype if dtype is None else dtype)


def patch_embedding(x: Tensor, size: int, d: object, *, bias: bool = True, name: str = "patches") -> Tensor:
    """Cut images into squares and map each of them to a vector: a convolution whose stride is its window.

    Parameters
    ----------
    x : Tensor
        Images, shape (b, c, h, w).
    size : int
        Side of a patch; what is left over at the end of an axis belongs to none.
    d : sympy.Expr or int
        Elements of a vector.
    bias : bool
        Add a parameter of size d.
    name : str
        Scope of the parameters and of the ops.

    Returns
    -------
    Tensor
        Shape (b, n, d), patches row by row, n = floor(h/size) * floor(w/size). FLOPs: 2 * b * n * d * c * size**2, and
        with a bias 1 for each element.

    Raises
    ------
    ShapeError
        If `x` has another number of axes, or a size is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.patch_embedding(g.input("images", (B, 3, 224, 224)), 16, D))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((B, 196, D), 769*D)
    """
    need_tensor("patch_embedding", x)
    if x.ndim != 4:
        raise ShapeError(f"patch_embedding of {x!r}: expected four axes (batch, channels, height, width)")
    y = conv(x, "b c h w -> b d h w", window=(size, size), stride=size, bias=bias, d=d, name=name)
    return rearrange(y, "b d h w -> b (h w) d", name=f"{name}/tokens")
