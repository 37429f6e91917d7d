"""Scaled dot-product attention and its variants: flash or eager, windowed, cross and latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

from ..algebra.polynomial import ZERO, Poly, poly, total
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Domain,
    Tensor,
    apply,
    current_graph,
    module,
    need_choice,
    need_flag,
    need_tensor,
    positive,
    scope,
)
from ..ir.strides import windows_along
from ..ops.einsum import einsum
from ..ops.elementwise import FUNCTIONS, Pointwise, dropout, pointwise
from ..ops.fill import pad
from ..ops.index import gather
from ..ops.kv_cache import cache
from ..ops.layout import concat, contiguous_copy, expand, rearrange, roll, slice_axis, split
from ..ops.reduce import reduce
from .activations import one_kernel, softmax
from .embeddings import rotary
from .linear import linear
from .norms import layer_norm, rms_norm

__all__ = [
    "attention",
    "merged",
    "self_attention",
    "patch_merging",
    "window_bias",
    "window_merge",
    "window_partition",
    "cross_attention",
    "latent_attention",
]


# -- self-attention ----------------------------------------------------------------------------------------------------

_SCORES = "b g r s k, b g t k -> b g r s t"
_REDUCE = "b g r s t, b g t v -> b g r s v"
# flash kernels write (batch, position, head, width), so that merging heads afterwards is a view
_FLASH_REDUCE = "b g r s t, b g t v -> b s g r v"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window: object = None,
    kernel: str = "flash",
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    p: float = 0,
    name: str = "attention",
) -> Tensor:
    """Attend from queries to keys: softmax(q @ k.T / sqrt(K) + bias) @ v.

    Parameters
    ----------
    q : Tensor
        Shape (b, h, s, k).
    k, v : Tensor
        Shapes (b, g, t, k) and (b, g, t, v); g divides h, and each group of h/g query heads shares one.
    causal : bool
        Hide later keys; queries and keys are aligned at their last positions.
    window : sympy.Expr or int, optional
        Number of last keys to see, including the query's own; without `causal`, keys less than `window` away on either
        side.
    kernel : str
        flash: one kernel that computes exactly the visible pairs, and reads and writes q, k, v and the result only.
        eager: separate ops for scores, scale, mask, softmax and reduction; the full square is computed whatever the
        mask, and the (b, h, s, t) scores reach memory.
    softcap : float, optional
        Cap the scores: c*tanh(scores/c).
    bias : Tensor, optional
        Added to the scores, such as relative positions; broadcasts to (b, h, s, t). flash reads the values of visible
        pairs only.
    sinks : Tensor, optional
        Logits (h,), one per head, that join the denominator of the softmax so that queries can attend to nothing
        (GPT-OSS).
    p : float
        Dropout of the probabilities, inside the kernel for flash.
    name : str
        Scope of the ops, or kernel name.

    Returns
    -------
    Tensor
        Shape (b, h, s, v). FLOPs of kind matmul: 2*(k + v) per batch, head and visible pair.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or the kernel is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, H, S, K = cg.dims("B H S K")
    >>> with cg.Graph("g") as g:
    ...     q, k, v = (g.input(n, (B, H, S, K)) for n in "qkv")
    ...     y = cg.attention(q, k, v, causal=True)
    >>> cg.matmul_flops(g)
    2*B*H*K*S**2 + 2*B*H*K*S
    >>> cg.matmul_flops(g, count="full")
    4*B*H*K*S**2
    """
    place = f"attention {name!r}"
    need_choice(f"{place}: kernel", kernel, ("flash", "eager"))
    if softcap is not None and not (isinstance(softcap, Real) and not isinstance(softcap, bool) and softcap > 0):
        raise GraphError(f"{place}: softcap {softcap!r}, expected a positive number")
    need_flag(place, causal=causal)
    q, k, v = _checked(place, q, k, v)
    domain = None
    if causal or window is not None:
        domain = Domain(causal, None if window is None else positive(f"{place}: window", window))
    extras = [] if bias is None else [_grouped_bias(place, bias, q, k)]
    extras += [] if sinks is None else [_grouped_sinks(place, sinks, q, k)]
    options: dict[str, Any] = {"biased": bias is not None, "domain": domain, "softcap": softcap, "p": p}
    q = rearrange(q, "b (g r) s k -> b g r s k", g=k.sizes[1].expr, name="groups")
    if kernel == "flash":
        heads = one_kernel(name, _flash, q, k, v, *extras, backward="flash", **options)
    else:
        with scope(name):
            heads = _eager(q, k, v, *extras, **options)
    order = "b s g r v" if kernel == "flash" else "b g r s v"
    return rearrange(heads, f"{order} -> b (g r) s v", name="heads")


def self_attention(
    x: Tensor,
    heads: object,
    size: object,
    *,
    groups: object = None,
    packed: bool = False,
    rope: tuple[Tensor, Tensor] | None = None,
    causal: bool = True,
    window: object = None,
    kernel: str = "flash",
    softcap: float | None = None,
    bias: bool = False,
    key_bias: bool | None = None,
    out_bias: bool = False,
    score_bias: Tensor | None = None,
    sinks: bool = False,
    qk_norm: str = "none",
    p: float = 0,
    cached: bool = True,
    name: str = "attention",
) -> Tensor:
    """Attend within a sequence, including the query, key, value and output projections.

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    heads, size : sympy.Expr or int
        Query heads and head dimension; their product need not be d.
    groups : sympy.Expr or int, optional
        Key and value heads (grouped-query attention; 1 for multi-query attention); equal to `heads` by default.
    packed : bool
        Whether one linear layer computes queries, keys and values, which are views of its result.
    rope : pair of Tensor, optional
        Cosines and sines from `rotary_tables`, to rotate queries and keys.
    causal, window, kernel, softcap : object
        As in `attention`.
    bias : bool
        Whether the query, key and value projections have biases.
    key_bias : bool, optional
        Bias of the key projection if it differs; it shifts all scores of a query equally, so softmax cancels it.
    out_bias : bool
        Whether the output projection has a bias.
    score_bias : Tensor, optional
        Added to the scores, as `bias` of `attention`.
    sinks : bool
        Whether the softmax has one learned sink logit per head, as `sinks` of `attention`.
    qk_norm : str
        none; head: RMSNorm over each query and key head; all: over all heads together.
    p : float
        As in `attention`.
    cached : bool
        Whether inference caches keys and values (`cache`).
    name : str
        Scope of the layers, and kernel name.

    Returns
    -------
    Tensor
        Shape (b, s, d).

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, H, G, K = cg.dims("B S D H G K")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.self_attention(g.input("x", (B, S, D)), H, K, groups=G))
    >>> cg.param_count(g)
    2*D*G*K + 2*D*H*K
    """
    need_tensor(f"attention {name!r}", x)
    need_choice(f"attention {name!r}: qk_norm", qk_norm, ("none", "head", "all"))
    need_flag(f"attention {name!r}", sinks=sinks, cached=cached, packed=packed)
    kv_heads, k_bias = heads if groups is None else groups, bias if key_bias is None else key_bias
    qkv = (_packed_projection if packed else _separate_projections)(
        x, (heads, kv_heads, kv_heads), size, (bias, k_bias, bias), name
    )
    norm_kinds = (qk_norm, qk_norm, "none")
    q, k, v = (
        _head_first(y, norm, f"{name}/{letter}_norm") for letter, y, norm in zip("qkv", qkv, norm_kinds, strict=True)
    )
    with scope(name):
        q, k = (q, k) if rope is None else (rotary(q, *rope), rotary(k, *rope))
        if cached:
            k, v = (cache(t, "b g t k", along="t", window=window, name=f"{c}_cache") for c, t in (("k", k), ("v", v)))
    logits = current_graph(x.graph).param(f"{name}/sinks", (heads,)) if sinks else None
    y = attention(
        q, k, v, causal=causal, window=window, kernel=kernel, softcap=softcap, bias=score_bias, sinks=logits, p=p,
        name=name,
    )  # fmt: skip
    return merged(y, x.sizes[2], bias=out_bias, name=name)


def merged(y: Tensor, d: Poly, *, bias: bool, name: str) -> Tensor:
    """Merge the heads of (b, h, s, k) and apply the output projection, to (b, s, d)."""
    y = rearrange(y, "b h s k -> b s (h k)", name=f"{name}/merge")
    return linear(y, "b s e -> b s d", d=d, bias=bias, name=f"{name}/proj")


def _head_first(y: Tensor, norm: str, name: str) -> Tensor:
    """Return (b, h, s, k), normalized per head or over all heads."""
    if norm == "all":
        count = y.sizes[2]
        y = rms_norm(rearrange(y, "b s h k -> b s (h k)"), name=name)
        return rearrange(y, "b s (h k) -> b h s k", h=count)
    return rearrange(rms_norm(y, name=name) if norm == "head" else y, "b s h k -> b h s k")


def _separate_projections(
    x: Tensor, counts: Sequence[object], size: object, biases: Sequence[bool], name: str
) -> tuple[Tensor, ...]:
    """Return queries, keys and values (b, s, h, k) from separate projections."""
    return tuple(
        linear(x, "b s d -> b s h k", h=count, k=size, bias=bias, name=f"{name}/{letter}")
        for letter, count, bias in zip("qkv", counts, biases, strict=True)
    )


def _packed_projection(
    x: Tensor, counts: Sequence[object], size: object, biases: Sequence[bool], name: str
) -> tuple[Tensor, ...]:
    """Return queries, keys and values (b, s, h, k), views of one projection."""
    if len(set(biases)) > 1:
        raise GraphError(
            f"attention {name!r}: packed with a different bias for keys, expected the same for queries, keys and values"
        )
    head_counts = [positive(f"attention {name!r}: heads", count) for count in counts]
    qkv = linear(x, "b s d -> b s h k", h=total(head_counts), k=size, bias=biases[0], name=f"{name}/qkv")
    return split(qkv, head_counts, 2, name=f"{name}/parts")


def _checked(place: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Check queries, keys and values, and adopt them into the open graph."""
    need_tensor(place, *tensors)
    for letter, t in zip("qkv", tensors, strict=True):
        if t.ndim != 4:
            raise ShapeError(f"{place}: {letter} is {t!r}, expected four axes (batch, heads, positions, size)")
    heads, groups = tensors[0].sizes[1], tensors[1].sizes[1]
    share = (heads / groups).constant
    if share is not None and not isinstance(share, int):
        raise ShapeError(f"{place}: {heads} query heads over {groups} key heads, expected a multiple of the key heads")
    graph = current_graph(tensors[0].graph)
    return tuple(graph.adopt(t) for t in tensors)


def _grouped_bias(place: str, bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the score bias with its heads grouped as those of the queries."""
    need_tensor(f"{place}: bias", bias)
    bias = q.graph.adopt(bias)
    expected = (q.sizes[0], q.sizes[1], q.sizes[2], k.sizes[2])
    if bias.ndim != 4 or any(n != 1 and not q.graph.same(n, m) for n, m in zip(bias.sizes, expected, strict=False)):
        raise ShapeError(f"{place}: bias {bias!r}, expected ({', '.join(map(str, expected))}), any of which may be 1")
    if bias.sizes[1] == 1:
        return rearrange(bias, "b 1 s t -> b 1 1 s t", name="groups")
    return rearrange(bias, "b (g r) s t -> b g r s t", g=k.sizes[1].expr, name="groups")


def _grouped_sinks(place: str, sinks: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return the sink logits with their heads grouped, broadcast over positions."""
    need_tensor(f"{place}: sinks", sinks)
    sinks = q.graph.adopt(sinks)
    if sinks.ndim != 1 or not q.graph.same(sinks.sizes[0], q.sizes[1]):
        raise ShapeError(f"{place}: sinks {sinks!r}, expected one for each of {q.sizes[1]} heads")
    return rearrange(sinks, "(g r) -> g r 1 1", g=k.sizes[1].expr, name="sinks")


def _unpack_extras(extras: tuple[Tensor, ...], biased: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the score bias and the sink logits."""
    sinks = extras[int(biased) :]
    return (extras[0] if biased else None), (sinks[0] if sinks else None)


def _softmax(x: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax, with sink logits in its denominator if there are any."""
    if sinks is None:
        return softmax(x)

    def body(x: Tensor, sinks: Tensor) -> Tensor:
        largest = pointwise("maximum", reduce(x, "b g r s t -> b g r s 1", "max"), sinks)
        e = pointwise("exp", x - largest)
        return e / (reduce(e, "b g r s t -> b g r s 1", "sum") + pointwise("exp", sinks - largest))

    return one_kernel("softmax", body, x, sinks, backward="softmax")


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *extras: Tensor,
    biased: bool,
    domain: Domain | None,
    softcap: float | None,
    p: float,
) -> Tensor:
    # no kernel computes anything outside of the domain
    restricted: dict[str, Any] = {} if domain is None else {"domain": domain, "over": ("s", "t")}
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul", **restricted)
    bias, sinks = _unpack_extras(extras, biased)
    y = _softmax(_scaled(scores, softcap, bias), sinks)
    return _reduced(dropout(y, p), v, _FLASH_REDUCE)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *extras: Tensor,
    biased: bool,
    domain: Domain | None,
    softcap: float | None,
    p: float,
) -> Tensor:
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul")
    bias, sinks = _unpack_extras(extras, biased)
    y = _scaled(scores, softcap, bias)
    if domain is not None:  # hidden keys change no cost of an op on the full square
        (y,) = apply(Pointwise(function=FUNCTIONS["causal_mask"], masked=domain), [y], "mask")
    return _reduced(dropout(_softmax(y, sinks), p), v, _REDUCE)


def _scaled(scores: Tensor, softcap: float | None, bias: Tensor | None) -> Tensor:
    y = pointwise("mul", scores, 1.0, name="scale")
    y = y if softcap is None else pointwise("softcap", y)
    return y if bias is None else pointwise("add", y, bias, name="bias")


def _reduced(y: Tensor, v: Tensor, pattern: str) -> Tensor:
    with scope("reduce"):
        return einsum(y, v, pattern, name="matmul")


# -- windowed attention ------------------------------------------------------------------------------------------------
# Swin Transformer: partition and shift of windows, relative position bias, patch merging.


def _padded(x: Tensor, multiple: Poly, name: str) -> Tensor:
    """Pad rows and columns of (b, h, w, c) with zeros to a multiple, in one kernel; a copy even without padding."""
    sizes = [multiple * windows_along(size, 0, multiple) for size in x.sizes[1:3]]
    return one_kernel(name, lambda x: pad(pad(x, 1, 0, sizes[0]), 2, 0, sizes[1]), x)


def _window(place: str, x: Tensor, side: object, shift: object) -> tuple[Poly, Poly]:
    need_tensor(place, x)
    size, offset = positive(f"{place}: side", side), poly(shift)
    if offset.constant is not None and (not isinstance(offset.constant, int) or offset.constant < 0):
        raise ShapeError(f"{place}: shift {offset}, expected a nonnegative integer")
    return size, offset


def window_partition(x: Tensor, side: object, shift: object = 0, *, name: str = "windows") -> Tensor:
    """Partition images into square windows for windowed attention (Liu et al. 2021, arXiv 2103.14030, section 3.2).

    Parameters
    ----------
    x : Tensor
        Shape (b, h, w, c). Rows and columns are zero-padded to a multiple of `side`: a copy even without padding, as
        torch's `pad`.
    side : sympy.Expr or int
        Window size in rows and columns.
    shift : sympy.Expr or int
        Number of rows and columns by which the image is rolled towards its start first.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape (b*n, side*side, c) with n = ceiling(h/side)*ceiling(w/side). No FLOPs: the image is read and written once
        for padding, once per axis for a shift, and once for the partition.

    Raises
    ------
    GraphError, ShapeError
        If `x` has another number of axes, or a size is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C = cg.dims("B C")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.window_partition(g.input("x", (B, 56, 56, C)), 7, 3))
    >>> g.outputs[0].shape
    (64*B, 49, C)
    """
    size, offset = _window("window_partition", x, side, shift)
    if x.ndim != 4:
        raise ShapeError(f"window_partition of {x!r}: expected four axes (batch, rows, columns, channels)")
    with scope(name):
        x = _padded(x, size, "pad")
        if offset != ZERO:
            x = roll(roll(x, x.sizes[1] - offset, 1), x.sizes[2] - offset, 2)
        return rearrange(x, "b (n i) (m j) c -> (b n m) (i j) c", i=size, j=size, name="partition")


def window_merge(y: Tensor, like: Tensor, side: object, shift: object = 0, *, name: str = "merge") -> Tensor:
    """Merge windows into images: the reverse of `window_partition`.

    Parameters
    ----------
    y : Tensor
        Windows, shape (b*n, side*side, c).
    like : Tensor
        Partitioned tensor, (b, h, w, c); its channels may differ.
    side, shift : sympy.Expr or int
        As in `window_partition`.
    name : str
        Scope of the ops.

    Returns
    -------
    Tensor
        Shape (b, h, w, c), a view without the padding. No FLOPs.

    Raises
    ------
    GraphError, ShapeError
        If sizes do not fit.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C, R = cg.dims("B C R")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, R, R, C))
    ...     y = cg.nn.window_merge(cg.nn.window_partition(x, 7, 3), x, 7, 3)
    >>> y.shape, cg.flops(g)
    ((B, R, R, C), 0)
    """
    size, offset = _window("window_merge", y, side, shift)
    need_tensor("window_merge", like)
    if y.ndim != 3 or like.ndim != 4:
        raise ShapeError(f"window_merge of {y!r} like {like!r}: expected windows with three axes and images with four")
    batch, rows, columns = like.sizes[:3]
    row_windows, column_windows = (windows_along(n, 0, size) for n in (rows, columns))
    with scope(name):
        x = rearrange(
            y,
            "(b n m) (i j) c -> b (n i) (m j) c",
            b=batch,
            n=row_windows,
            m=column_windows,
            i=size,
            j=size,
            name="positions",
        )
        if offset != ZERO:
            x = roll(roll(x, offset, 1), offset, 2)
        return slice_axis(slice_axis(x, 1, 0, rows), 2, 0, columns)


def window_bias(
    side: object, heads: object, *, images: object = 1, masks: object = None, name: str = "window_bias"
) -> Tensor:
    """Create the relative position bias of windowed attention (Liu et al. 2021, arXiv 2103.14030, equation 4).

    Parameters
    ----------
    side : sympy.Expr or int
        Window size in rows and columns.
    heads : sympy.Expr or int
        Query heads.
    images : sympy.Expr or int
        Number of images, needed with `masks` only.
    masks : sympy.Expr or int, optional
        Windows per image, if it was shifted: a buffer (masks, side*side, side*side) in the graph's dtype masks pairs of
        positions that are not neighbours in the image.
    name : str
        Scope of the parameter, the buffers and the ops.

    Returns
    -------
    Tensor
        Shape (1, heads, side*side, side*side), or with masks (images*masks, heads, side*side, side*side): a learned
        number per head and each of (2*side-1)**2 offsets, looked up through an index buffer. FLOPs: 1 per element of
        the sum with the masks.

    Raises
    ------
    GraphError, ShapeError
        If no graph is open, or a size is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> H = cg.dims("H")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.window_bias(7, H))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((1, H, 49, 49), 169*H)
    """
    size = positive("window_bias: side", side)
    area = size * size
    graph = current_graph()
    with module(graph, name):
        table = graph.param("table", ((2 * size - 1) * (2 * size - 1), heads))
        positions = graph.buffer("index", (area, area), "int64")
        bias = rearrange(gather(table, positions, name="lookup"), "s t h -> 1 h s t", name="heads")
        if masks is None:
            return bias
        mask = graph.buffer("mask", (masks, area, area))
        expanded = expand(mask, "n s t -> b n 1 s t", b=images, name="images")
        return bias + rearrange(expanded, "b n 1 s t -> (b n) 1 s t", name="masks")


def patch_merging(x: Tensor, *, name: str = "downsample") -> Tensor:
    """Merge patches: halve image sides, double channels (Liu et al. 2021, arXiv 2103.14030, section 3.1).

    Parameters
    ----------
    x : Tensor
        Shape (b, h, w, c). Odd rows and columns are zero-padded; the copy is made in any case.
    name : str
        Scope of the parameters and ops.

    Returns
    -------
    Tensor
        Shape (b, ceiling(h/2), ceiling(w/2), 2*c): four neighbours concatenated, LayerNorm, and a linear layer without
        bias. FLOPs of kind matmul: 16 * b * c**2 per position of the result.

    Raises
    ------
    ShapeError
        If `x` has another number of axes.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, C = cg.dims("B C")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.patch_merging(g.input("x", (B, 7, 7, C))))
    >>> g.outputs[0].shape, cg.param_count(g)
    ((B, 4, 4, 2*C), 8*C**2 + 8*C)
    """
    need_tensor("patch_merging", x)
    if x.ndim != 4:
        raise ShapeError(f"patch_merging of {x!r}: expected four axes (batch, rows, columns, channels)")
    with module(current_graph(x.graph), name):
        y = rearrange(_padded(x, poly(2), "pad"), "b (h i) (w j) c -> b h w (j i c)", i=2, j=2, name="neighbours")
        return linear(layer_norm(y), "... c -> ... d", d=2 * x.sizes[3], name="reduction")


# -- cross-attention ---------------------------------------------------------------------------------------------------


def cross_attention(
    x: Tensor,
    memory: Tensor,
    heads: object,
    size: object,
    *,
    groups: object = None,
    kernel: str = "flash",
    bias: bool = False,
    key_bias: bool | None = None,
    out_bias: bool = False,
    score_bias: Tensor | None = None,
    p: float = 0,
    cached: bool = True,
    name: str = "cross",
) -> Tensor:
    """Attend from one sequence to all of another, such as encoder outputs, including the projections.

    Parameters
    ----------
    x : Tensor
        Source of the queries, (b, s, d).
    memory : Tensor
        Source of keys and values, (b, m, e).
    heads, size, groups, kernel, bias, key_bias, out_bias, score_bias, p : object
        As in `self_attention`.
    cached : bool
        Whether `prefill` computes keys and values once for `decode` to read (`cache` without a growing axis).
    name : str
        As in `self_attention`.

    Returns
    -------
    Tensor
        Shape (b, s, d).

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, M, D, H, K = cg.dims("B S M D H K")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.cross_attention(g.input("x", (B, S, D)), g.input("memory", (B, M, D)), H, K))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (4*D*H*K, 4*B*D*H*K*M + 4*B*D*H*K*S + 4*B*H*K*M*S)
    """
    need_tensor(f"attention {name!r}", x, memory)
    need_flag(f"attention {name!r}", cached=cached)

    def project(letter: str, source: Tensor, count: object) -> Tensor:
        use_bias = bias if letter != "k" or key_bias is None else key_bias
        y = linear(source, "b s d -> b s h k", h=count, k=size, bias=use_bias, name=f"{name}/{letter}")
        return rearrange(y, "b s h k -> b h s k")

    kv_heads = heads if groups is None else groups
    q, k, v = project("q", x, heads), project("k", memory, kv_heads), project("v", memory, kv_heads)
    if cached:
        with scope(name):
            k, v = (cache(t, "b g t k", name=entry) for entry, t in (("k_cache", k), ("v_cache", v)))
    y = attention(q, k, v, causal=False, kernel=kernel, bias=score_bias, p=p, name=name)
    return merged(y, x.sizes[2], bias=out_bias, name=name)


# -- multi-head latent attention ---------------------------------------------------------------------------------------


def latent_attention(
    x: Tensor,
    heads: object,
    *,
    latent: object,
    nope: object,
    rotated: object,
    value: object,
    rope: tuple[Tensor, Tensor],
    query_latent: object = None,
    absorbed: bool = False,
    causal: bool = True,
    kernel: str = "flash",
    bias: bool = False,
    p: float = 0,
    cached: bool = True,
    contiguous: bool = False,
    name: str = "attention",
) -> Tensor:
    """Attend within a sequence, with keys and values from one latent vector per position (MLA).

    A key has one part per head, projected from the latent vector, and a rotary part that all heads share. Inference
    caches the latent vector and the rotary part: `latent + rotated` elements per position, for all heads together.

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    heads : sympy.Expr or int
        Number of heads.
    latent : sympy.Expr or int
        Latent dimension (kv_lora_rank).
    nope, rotated, value : sympy.Expr or int
        Head dimensions: of queries and keys without positions, of their rotary part, and of values.
    rope : pair of Tensor
        Cosines and sines for `rotated` elements, from `rotary_tables`.
    query_latent : sympy.Expr or int, optional
        Latent dimension of the queries (q_lora_rank); by default they are projected from `x` directly.
    absorbed : bool
        False: keys and values of all heads are projected from the latent vectors of every visible position. True: the
        key projection is absorbed into the queries and the value projection into the results, and all heads attend to
        the latent vectors themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): more FLOPs per pair of positions,
        none per cached position.
    causal, kernel : object
        As in `self_attention`.
    bias : bool
        Whether the latent projections and the output projection have biases.
    p : float
        As in `self_attention`.
    cached : bool
        Whether inference caches (`cache`) two tensors, or with `absorbed` their concatenation.
    contiguous : bool
        Whether values are copied, so that the packed projection of keys and values is freed, as in
        `MultiLatentAttention` of Megatron-LM (megatron/core/transformer/multi_latent_attention.py). By default they
        are a view of it.
    name : str
        As in `self_attention`.

    Returns
    -------
    Tensor
        Shape (b, s, d).

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or an argument is invalid.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, D, H = cg.dims("B S D H")
    >>> def layer(absorbed):
    ...     with cg.Graph("g", dtype="bf16") as g:
    ...         rope = cg.nn.rotary_tables(cg.ops.arange(S), 64)
    ...         x = g.input("x", (B, S, D))
    ...         g.output(cg.nn.latent_attention(
    ...             x, H, latent=512, nope=128, rotated=64, value=128, rope=rope, absorbed=absorbed))
    ...     return g
    >>> made, absorbed = map(layer, (False, True))
    >>> cg.param_count(made) - cg.param_count(absorbed)
    0
    >>> [cg.cache_bytes(cg.decode(g)) for g in (made, absorbed)]  # 512 + 64 elements a position
    [1152*B*S, 1152*B*S]
    >>> sizes = {"B": 1, "D": 7168, "H": 128}
    >>> [cg.matmul_flops(cg.decode(g), S=8192, **sizes) for g in (made, absorbed)]
    [276144455680, 2910715904]
    """
    place = f"attention {name!r}"
    need_tensor(place, x)
    need_flag(place, absorbed=absorbed, bias=bias, cached=cached, contiguous=contiguous)
    if x.ndim != 3:
        raise ShapeError(f"{place}: {x!r}, expected three axes (batch, positions, width)")
    nope_size, rope_size, latent_size, value_size = (
        positive(f"{place}: {label}", size)
        for label, size in (("nope", nope), ("rotated", rotated), ("latent", latent), ("value", value))
    )
    q_nope, q_rope = split(
        _queries(x, heads, nope_size + rope_size, query_latent, bias=bias, name=name), (nope_size, rope_size), -1
    )
    compressed = linear(x, "b s d -> b s e", e=latent_size + rope_size, bias=bias, name=f"{name}/kv_a")
    latents, k_rope = split(compressed, (latent_size, rope_size), -1)
    latents = rms_norm(latents, name=f"{name}/kv_norm")
    with scope(name):
        q_rope = rotary(q_rope, *rope)
        k_rope = rotary(rearrange(k_rope, "b s k -> b 1 s k"), *rope)
    attend = _attend_absorbed if absorbed else partial(_attend_expanded, contiguous=contiguous)
    y = attend(q_nope, q_rope, latents, k_rope, value_size, cached=cached, causal=causal, kernel=kernel, p=p, name=name)
    return merged(y, x.sizes[2], bias=bias, name=name)


def _queries(x: Tensor, heads: object, size: Poly, rank: object, *, bias: bool, name: str) -> Tensor:
    """Return queries (b, h, s, k)."""
    if rank is None:
        q = linear(x, "b s d -> b s h k", h=heads, k=size, name=f"{name}/q")
    else:
        compressed = linear(x, "b s d -> b s r", r=rank, bias=bias, name=f"{name}/q_a")
        q = linear(rms_norm(compressed, name=f"{name}/q_norm"), "b s r -> b s h k", h=heads, k=size, name=f"{name}/q_b")
    return rearrange(q, "b s h k -> b h s k")


def _attend_expanded(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, value_size: Poly, *, cached: bool, causal: bool,
    kernel: str, p: float, name: str, contiguous: bool,
) -> Tensor:  # fmt: skip
    """Attend with keys and values of all heads, projected from the cached latent vectors."""
    heads, nope_size = q_nope.sizes[1], q_nope.sizes[3]
    if cached:
        with scope(name):
            latents = cache(latents, "b t l", along="t", name="latent_cache")
            k_rope = cache(k_rope, "b one t k", along="t", name="rotated_cache")
    expanded = linear(latents, "b t l -> b t h e", h=heads, e=nope_size + value_size, name=f"{name}/kv_b")
    with scope(name):
        k, v = split(rearrange(expanded, "b t h e -> b h t e"), (nope_size, value_size), -1)
        v = contiguous_copy(v, name="values") if contiguous else v
        k = concat([k, expand(k_rope, "b 1 t k -> b h t k", h=heads)], -1, name="keys")
        q = concat([q_nope, q_rope], -1, name="queries")
    return attention(q, k, v, causal=causal, kernel=kernel, p=p, name=name)


def _attend_absorbed(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, value_size: Poly, *, cached: bool, causal: bool,
    kernel: str, p: float, name: str,
) -> Tensor:  # fmt: skip
    """Attend to the cached latent vectors: one key for all heads, whose first part is the value."""
    heads, nope_size, latent_size = q_nope.sizes[1], q_nope.sizes[3], latents.sizes[2]
    graph = current_graph(latents.graph)
    with module(graph, f"{name}/kv_b"):
        weight = graph.param("weight", (latent_size, heads, nope_size + value_size))
    with scope(name):
        key_weight, value_weight = split(weight, (nope_size, value_size), -1)
        q = einsum(q_nope, key_weight, "b h s k, l h k -> b h s l", name="absorb_keys")
        q = concat([q, q_rope], -1, name="queries")
        k = concat([rearrange(latents, "b t l -> b 1 t l"), k_rope], -1, name="keys")
        if cached:
            k = cache(k, "b one t k", along="t", name="latent_cache")
        v = split(k, (latent_size, k.sizes[3] - latent_size), -1)[0]
    y = attention(q, k, v, causal=causal, kernel=kernel, p=p, name=name)
    with scope(name):
        return einsum(y, value_weight, "b h s l, l h v -> b h s v", name="absorb_values")
