"""Embeddings for tokens, positions, diffusion times, image patches and recommendation, and the tied output head."""

from __future__ import annotations

from numbers import Real

from ..dtypes import DType
from ..errors import GraphError, ShapeError
from ..ir.graph import Tensor, current_graph, module, need_choice, need_flag, need_tensor, positive
from ..ir.strides import windows_along
from ..ops.einsum import einsum
from ..ops.elementwise import cast, pointwise
from ..ops.index import gather, take_along
from ..ops.layout import concat, expand, rearrange, reshape, split
from ..ops.reduce import reduce
from .activations import one_kernel
from .conv import conv

__all__ = [
    "embedding",
    "patch_embedding",
    "relative_bias",
    "tied_head",
    "timestep_embedding",
    "rotary",
    "rotary_tables",
    "dot_interaction",
    "embedding_bag",
]


# -- embeddings --------------------------------------------------------------------------------------------------------


# -- embeddings --------------------------------------------------------------------------------------------------------


def embedding(ids: Tensor, table: Tensor, *, name: str = "embedding") -> Tensor:
    """Look up rows of an embedding table: no FLOPs, reads the rows and the indices (see `gather`)."""
    return gather(table, ids, name=name)


def tied_head(x: Tensor, table: Tensor, *, name: str = "head") -> Tensor:
    """Return logits from a tied embedding table: (b, s, d) and (v, d) to (b, s, v); the parameter counts once."""
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
    """Return T5's relative position bias: a learned number per head and distance bucket.

    Raffel et al. 2020 (arXiv 1910.10683), section 2.1. Half of the buckets are single distances, the others ranges on a
    logarithmic scale.

    Parameters
    ----------
    queries, keys : Tensor
        Integer positions of shape (s,) and (t,): `arange(S)` and `arange(S, context=True)`.
    heads : sympy.Expr or int
        Query heads.
    buckets : sympy.Expr or int
        Number of buckets, the table rows.
    bidirectional : bool
        Whether later keys have their own buckets; otherwise they all share the distance-0 bucket.
    dtype : str or DType, optional
        Table dtype, the graph's by default.
    name : str
        Scope for the table and ops.

    Returns
    -------
    Tensor
        Shape (1, heads, s, t), a view of the looked-up rows, for `bias` of `attention`. FLOPs: only those of the
        buckets, 10 pointwise and 1 transcendental per pair of positions (2 pointwise more with `bidirectional`).

    Raises
    ------
    ShapeError
        If positions are not one-dimensional integers, or a size is invalid.

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
            raise ShapeError(f"relative_bias: positions {t!r}, expected integers with one axis")
    rows = positive("relative_bias: buckets", buckets)
    # rounded down: bucket counts are added to integer indices
    per_direction = windows_along(rows, 1, 2) if bidirectional else rows  # buckets per direction
    exact = windows_along(per_direction, 1, 2)  # single-distance buckets

    def body(queries: Tensor, keys: Tensor) -> Tensor:
        distance = rearrange(keys, "t -> 1 t") - rearrange(queries, "s -> s 1")
        later = pointwise("less", 0, distance) if bidirectional else None
        distance = pointwise("abs", distance) if bidirectional else -pointwise("minimum", distance, 0)
        # the maximal distance sets the base of the logarithm, which changes no cost
        log_bucket = pointwise("log", cast(distance, "fp32") / exact) / 1.0 * (per_direction - exact)
        far_bucket = pointwise("minimum", cast(log_bucket, "int64") + exact, per_direction - 1)
        bucket = pointwise("where", pointwise("less", distance, exact), distance, far_bucket)
        return bucket if later is None else bucket + cast(later, "int64") * per_direction

    with module(current_graph(queries.graph), name) as _:
        table = current_graph(queries.graph).param("table", (rows, heads), dtype=dtype)
        bucket = one_kernel("buckets", body, queries, keys)
        return rearrange(embedding(bucket, table, name="lookup"), "s t h -> 1 h s t", name="heads")


def timestep_embedding(times: Tensor, size: object, *, dtype: object = None, name: str = "timesteps") -> Tensor:
    """Return sinusoidal embeddings for diffusion times: cosines and sines of time times frequency.

    Parameters
    ----------
    times : Tensor
        Shape (b,), any dtype.
    size : sympy.Expr or int
        Embedding dimension, even: half cosines, half sines.
    dtype : str or DType, optional
        Result dtype, the graph's by default; intermediates are fp32.
    name : str
        Scope for the frequencies, an fp32 buffer, and the ops.

    Returns
    -------
    Tensor
        Shape (b, size). FLOPs per element: half a product and one cosine or sine.

    Raises
    ------
    ShapeError
        If `times` has another number of axes, or the size is invalid.

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
        embeddings = concat([pointwise("cos", angles), pointwise("sin", angles)], -1)
        return cast(embeddings, graph.root.dtype if dtype is None else dtype)


def patch_embedding(x: Tensor, size: int, d: object, *, bias: bool = True, name: str = "patches") -> Tensor:
    """Embed image patches by a convolution whose stride equals its window.

    Parameters
    ----------
    x : Tensor
        Images, shape (b, c, h, w).
    size : int
        Patch side; a remainder at the end of an axis is dropped.
    d : sympy.Expr or int
        Embedding dimension.
    bias : bool
        Whether there is a bias with size d.
    name : str
        Scope of the parameters and ops.

    Returns
    -------
    Tensor
        Shape (b, n, d), patches row by row, n = floor(h/size) * floor(w/size). FLOPs: 2 * b * n * d * c * size**2, and
        with a bias 1 per element.

    Raises
    ------
    ShapeError
        If `x` has another number of axes, or a size is invalid.

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


# -- rotary position embeddings ----------------------------------------------------------------------------------------


def rotary_tables(
    positions: Tensor, size: object, *, base: float = 10000.0, name: str = "rope"
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines for rotary position embeddings, once for all layers.

    Parameters
    ----------
    positions : Tensor
        Integers, shape (S,).
    size : sympy.Expr or int
        Head dimension, even.
    base : float
        Base for the geometric progression of frequencies; it changes no cost.
    name : str
        Scope for the frequencies, an fp32 buffer.

    Returns
    -------
    tuple of Tensor
        Cosines and sines, (S, size/2) each, in fp32.
    """
    need_tensor("rotary_tables", positions)
    if isinstance(base, bool) or not isinstance(base, Real) or not base > 0:
        raise GraphError(f"rotary_tables: base {base!r}, expected a positive number")
    if positions.dtype.kind != "int" or positions.ndim != 1:
        raise ShapeError(f"rotary_tables: positions {positions!r}, expected integers with one axis")
    graph = current_graph(positions.graph)
    half = positive("rotary_tables: size", size) / 2
    with module(graph, name):
        frequencies = graph.buffer("inv_freq", (half,), dtype="fp32")
        angles = einsum(cast(positions, "fp32"), frequencies, "s, k -> s k", name="angles")
        return pointwise("cos", angles), pointwise("sin", angles)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, name: str = "rotary") -> Tensor:
    """Apply rotary position embeddings to pairs on the last axis, in one kernel (Su et al. 2021, eq. 34).

    Parameters
    ----------
    x : Tensor
        Shape (..., S, K).
    cos, sin : Tensor
        Shape (S, R/2), from `rotary_tables`. R is K, or less for partial rotary embeddings: only the first R elements
        are rotated.
    name : str
        Kernel name.

    Returns
    -------
    Tensor
        FLOPs: 3 per rotated element (two products, and a sum or difference).

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, K, R = cg.dims("B S K R")
    >>> with cg.Graph("g") as g:
    ...     x, positions = g.input("x", (B, S, K)), g.input("positions", (S,), dtype="int64")
    ...     y = cg.nn.rotary(x, *cg.nn.rotary_tables(positions, R))
    >>> cg.costs(g).filter(scope="rotary").total().pointwise
    3*B*R*S
    """
    need_tensor("rotary", x, cos, sin)
    if x.ndim < 2:
        raise ShapeError(f"rotary of {x!r}: expected at least two axes (positions, size)")
    if cos.ndim != 2:
        raise ShapeError(f"rotary of {x!r}: cosines {cos!r}, expected two axes (positions, half the rotated size)")
    half, size = cos.sizes[-1], x.sizes[-1]
    rest_size = (
        []
        if x.graph.same(2 * half, size)
        else [positive(f"rotary of {x!r}: size that is not rotated", size - 2 * half)]
    )

    def body(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b, *rest = split(x, (half, half, *rest_size), -1)
        rotated_halves = [pointwise("sub", a * cos, b * sin), pointwise("add", b * cos, a * sin)]
        rotated = cast(concat(rotated_halves, -1), x.dtype)
        return concat([rotated, *rest], -1) if rest else rotated

    return one_kernel(name, body, x, cos, sin)


# -- recommendation models ---------------------------------------------------------------------------------------------


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
