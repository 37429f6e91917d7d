"""Multi-head latent attention: keys and values of all heads from one short vector, which alone is cached."""

from __future__ import annotations

from functools import partial

from ..algebra.polynomial import Poly
from ..errors import ShapeError
from ..graph.arguments import need_flag, need_tensor, positive
from ..graph.graph import current_graph
from ..graph.scopes import module, scope
from ..graph.tensor import Tensor
from ..ops.cached import cache
from ..ops.einsum import einsum
from ..ops.layout import concat, contiguous_copy, expand, rearrange, split
from .attention import attention, merged
from .linear import linear
from .norms import rms_norm
from .rotary import rotary

__all__ = ["latent_attention"]


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
    """Attend within a sequence by keys and values that come from one latent vector a position (MLA).

    A key has a part of its own for each head, made from the latent vector, and a rotated part that all heads share.
    Inference keeps the latent vector and the rotated part: `latent + rotated` elements a position, for all heads.

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    heads : sympy.Expr or int
        Heads of queries, and of the keys and values that are made.
    latent : sympy.Expr or int
        Elements of the latent vector (kv_lora_rank).
    nope, rotated, value : sympy.Expr or int
        Elements of a head: of queries and keys without positions, of those with rotary positions, and of values.
    rope : pair of Tensor
        Cosines and sines of `rotated` elements, from `rotary_tables`.
    query_latent : sympy.Expr or int, optional
        Elements of a latent vector that queries are made from (q_lora_rank); by default straight from `x`.
    absorbed : bool
        False: keys and values of all heads are made from the latent vectors, of every position that is seen. True: the
        matrix of the keys is applied to the queries and that of the values to the results, and all heads attend to the
        latent vectors themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): more FLOPs for each pair of
        positions, none for each position of the cache.
    causal, kernel : object
        As in `self_attention`.
    bias : bool
        Add biases to the layers that make the latent vectors, and to the layer back.
    p : float
        As in `self_attention`.
    cached : bool
        Mark what inference keeps (`cache`): two tensors, or with `absorbed` one that holds both side by side.
    contiguous : bool
        Copy values that are made, so that the product whose other part is in the keys is not kept whole, as
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
        If shapes do not fit, or an argument is none.

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
    own, turned, held, values = (
        positive(f"{place}: {what}", size)
        for what, size in (("nope", nope), ("rotated", rotated), ("latent", latent), ("value", value))
    )
    q_own, q_turned = split(_queries(x, heads, own + turned, query_latent, bias=bias, name=name), (own, turned), -1)
    both = linear(x, "b s d -> b s e", e=held + turned, bias=bias, name=f"{name}/kv_a")
    vector, shared = split(both, (held, turned), -1)
    vector = rms_norm(vector, name=f"{name}/kv_norm")
    with scope(name):
        q_turned = rotary(q_turned, *rope)
        shared = rotary(rearrange(shared, "b s k -> b 1 s k"), *rope)
    attend = _absorbed if absorbed else partial(_made, contiguous=contiguous)
    y = attend(q_own, q_turned, vector, shared, values, cached=cached, causal=causal, kernel=kernel, p=p, name=name)
    return merged(y, x.sizes[2], bias=bias, name=name)


def _queries(x: Tensor, heads: object, size: Poly, rank: object, *, bias: bool, name: str) -> Tensor:
    """Return queries (b, h, s, k)."""
    if rank is None:
        q = linear(x, "b s d -> b s h k", h=heads, k=size, name=f"{name}/q")
    else:
        short = linear(x, "b s d -> b s r", r=rank, bias=bias, name=f"{name}/q_a")
        q = linear(rms_norm(short, name=f"{name}/q_norm"), "b s r -> b s h k", h=heads, k=size, name=f"{name}/q_b")
    return rearrange(q, "b s h k -> b h s k")


def _made(
    q_own: Tensor, q_turned: Tensor, vector: Tensor, shared: Tensor, values: Poly, *, cached: bool, causal: bool,
    kernel: str, p: float, name: str, contiguous: bool,
) -> Tensor:  # fmt: skip
    """Attend with keys and values of all heads, made from what is cached."""
    heads, own = q_own.sizes[1], q_own.sizes[3]
    if cached:
        with scope(name):
            vector = cache(vector, "b t l", along="t", name="latent_cache")
            shared = cache(shared, "b one t k", along="t", name="rotated_cache")
    both = linear(vector, "b t l -> b t h e", h=heads, e=own + values, name=f"{name}/kv_b")
    with scope(name):
        k, v = split(rearrange(both, "b t h e -> b h t e"), (own, values), -1)
        v = contiguous_copy(v, name="values") if contiguous else v
        k = concat([k, expand(shared, "b 1 t k -> b h t k", h=heads)], -1, name="keys")
        q = concat([q_own, q_turned], -1, name="queries")
    return attention(q, k, v, causal=causal, kernel=kernel, p=p, name=name)


def _absorbed(
    q_own: Tensor, q_turned: Tensor, vector: Tensor, shared: Tensor, values: Poly, *, cached: bool, causal: bool,
    kernel: str, p: float, name: str,
) -> Tensor:  # fmt: skip
    """Attend to what is cached itself: one key for all heads, whose first part is the value."""
    heads, own, held = q_own.sizes[1], q_own.sizes[3], vector.sizes[2]
    graph = current_graph(vector.graph)
    with module(graph, f"{name}/kv_b"):
        weight = graph.param("weight", (held, heads, own + values))
    with scope(name):
        of_keys, of_values = split(weight, (own, values), -1)
        q = einsum(q_own, of_keys, "b h s k, l h k -> b h s l", name="absorb_keys")
        q = concat([q, q_turned], -1, name="queries")
        k = concat([rearrange(vector, "b t l -> b 1 t l"), shared], -1, name="keys")
        if cached:
            k = cache(k, "b one t k", along="t", name="latent_cache")
        v = split(k, (held, k.sizes[3] - held), -1)[0]
    y = attention(q, k, v, causal=causal, kernel=kernel, p=p, name=name)
    with scope(name):
        return einsum(y, of_values, "b h s l, l h v -> b h s v", name="absorb_values")
