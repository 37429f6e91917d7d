"""Scaled dot-product attention: as separate ops, or as one kernel that never writes the scores."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from ..algebra.polynomial import Poly, total
from ..errors import GraphError, ShapeError
from ..graph.arguments import need_choice, need_flag, need_tensor, positive
from ..graph.domain import Domain
from ..graph.graph import apply, current_graph
from ..graph.scopes import scope
from ..graph.tensor import Tensor
from ..ops.cached import cache
from ..ops.einsum import einsum
from ..ops.layout import rearrange, split
from ..ops.pointwise import FUNCTIONS, Pointwise, pointwise
from ..ops.reduce import reduce
from ..ops.stochastic import dropout
from .kernels import one_kernel
from .linear import linear
from .norms import rms_norm
from .rotary import rotary
from .softmax import softmax

__all__ = ["attention", "merged", "self_attention"]

_SCORES = "b g r s k, b g t k -> b g r s t"
_REDUCE = "b g r s t, b g t v -> b g r s v"
# flash kernels write the heads of a position side by side, so that merging them afterwards is a view
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
        Shapes (b, g, t, k) and (b, g, t, v); g divides h, each group of h/g heads shares one.
    causal : bool
        Hide later keys; queries and keys are aligned at their last positions.
    window : sympy.Expr or int, optional
        See only the last `window` keys, the own one included; without `causal`, less than that away on either side.
    kernel : str
        flash: one kernel that computes exactly the pairs that are seen and reads and writes q, k, v and the result
        alone. eager: an op each for scores, scale, mask, softmax and reduction; the whole square is computed whatever
        the mask, and the scores of size (b, h, s, t) reach memory.
    softcap : float, optional
        Bound the scores by c*tanh(scores/c).
    bias : Tensor, optional
        What is added to the scores, relative positions say: of a shape that broadcasts to (b, h, s, t). flash reads
        what belongs to the pairs that are seen.
    sinks : Tensor, optional
        A logit for each head, (h,), in the sum of the softmax beside those of the keys: what attends to nothing
        (GPT-OSS).
    p : float
        Dropout of the probabilities; flash draws it inside the kernel.
    name : str
        Scope of the ops, or name of the kernel.

    Returns
    -------
    Tensor
        Shape (b, h, s, v). FLOPs of kind matmul: 2*(k + v) for each batch, head and pair of positions.

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
    added = [] if bias is None else [_grouped(place, bias, q, k)]
    added += [] if sinks is None else [_shared_out(place, sinks, q, k)]
    options: dict[str, Any] = {"biased": bias is not None, "domain": domain, "softcap": softcap, "p": p}
    q = rearrange(q, "b (g r) s k -> b g r s k", g=k.sizes[1].expr, name="groups")
    if kernel == "flash":
        made = one_kernel(name, _flash, q, k, v, *added, backward="flash", **options)
    else:
        with scope(name):
            made = _eager(q, k, v, *added, **options)
    order = "b s g r v" if kernel == "flash" else "b g r s v"
    return rearrange(made, f"{order} -> b (g r) s v", name="heads")


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
    """Attend within a sequence, with the four linear layers around: queries, keys, values and the way back.

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d).
    heads, size : sympy.Expr or int
        Heads of queries, and elements of a head: their product need not be d.
    groups : sympy.Expr or int, optional
        Heads of keys and values (grouped-query attention; 1 for multi-query attention); as many as of queries by
        default.
    packed : bool
        One linear layer makes queries, keys and values, which are views of its result.
    rope : pair of Tensor, optional
        Cosines and sines from `rotary_tables`, by which queries and keys are rotated.
    causal, window, kernel, softcap : object
        As in `attention`.
    bias : bool
        Biases of the layers of queries, keys and values.
    key_bias : bool, optional
        Bias of the layer of keys where it differs: it adds as much to all scores of a query, which changes nothing.
    out_bias : bool
        Bias of the layer back.
    score_bias : Tensor, optional
        What is added to the scores, as `bias` of `attention`.
    sinks : bool
        Let a parameter for each head stand in the sum of the softmax, as `sinks` of `attention`.
    qk_norm : str
        none; head: RMSNorm of each head of queries and keys; all: of all heads together.
    p : float
        As in `attention`.
    cached : bool
        Mark keys and values as what inference keeps (`cache`).
    name : str
        Scope of the layers, and name of the kernel.

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
    >>> B, S, D, H, G, K = cg.dims("B S D H G K")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.self_attention(g.input("x", (B, S, D)), H, K, groups=G))
    >>> cg.param_count(g)
    2*D*G*K + 2*D*H*K
    """
    need_tensor(f"attention {name!r}", x)
    need_choice(f"attention {name!r}: qk_norm", qk_norm, ("none", "head", "all"))
    need_flag(f"attention {name!r}", sinks=sinks, cached=cached, packed=packed)
    shared, of_keys = heads if groups is None else groups, bias if key_bias is None else key_bias
    parts = (_packed if packed else _apart)(x, (heads, shared, shared), size, (bias, of_keys, bias), name)
    norms = (qk_norm, qk_norm, "none")
    q, k, v = (_by_head(y, norm, f"{name}/{what}_norm") for what, y, norm in zip("qkv", parts, norms, strict=True))
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
    """Put the results of all heads, (b, h, s, k), side by side, and multiply them: to (b, s, d)."""
    y = rearrange(y, "b h s k -> b s (h k)", name=f"{name}/merge")
    return linear(y, "b s e -> b s d", d=d, bias=bias, name=f"{name}/proj")


def _by_head(y: Tensor, norm: str, name: str) -> Tensor:
    """Return (b, h, s, k), normalised head by head or all of them at once."""
    if norm == "all":
        count = y.sizes[2]
        y = rms_norm(rearrange(y, "b s h k -> b s (h k)"), name=name)
        return rearrange(y, "b s (h k) -> b h s k", h=count)
    return rearrange(rms_norm(y, name=name) if norm == "head" else y, "b s h k -> b h s k")


def _apart(x: Tensor, counts: Sequence[object], size: object, biases: Sequence[bool], name: str) -> tuple[Tensor, ...]:
    """Return queries, keys and values (b, s, h, k), each of a layer of its own."""
    return tuple(
        linear(x, "b s d -> b s h k", h=count, k=size, bias=shifted, name=f"{name}/{what}")
        for what, count, shifted in zip("qkv", counts, biases, strict=True)
    )


def _packed(x: Tensor, counts: Sequence[object], size: object, biases: Sequence[bool], name: str) -> tuple[Tensor, ...]:
    """Return queries, keys and values (b, s, h, k), views of what one layer makes."""
    if len(set(biases)) > 1:
        raise GraphError(f"attention {name!r}: packed with another bias of keys, expected one for all")
    parts = [positive(f"attention {name!r}: heads", count) for count in counts]
    qkv = linear(x, "b s d -> b s h k", h=total(parts), k=size, bias=biases[0], name=f"{name}/qkv")
    return split(qkv, parts, 2, name=f"{name}/parts")


def _checked(place: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values as the open graph sees them."""
    need_tensor(place, *tensors)
    for what, t in zip("qkv", tensors, strict=True):
        if t.ndim != 4:
            raise ShapeError(f"{place}: {what} is {t!r}, expected four axes (batch, heads, positions, size)")
    heads, groups = tensors[0].sizes[1], tensors[1].sizes[1]
    share = (heads / groups).constant
    if share is not None and not isinstance(share, int):
        raise ShapeError(f"{place}: {heads} query heads over {groups} key heads, expected a multiple")
    graph = current_graph(tensors[0].graph)
    return tuple(graph.adopt(t) for t in tensors)


def _grouped(place: str, bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return what is added to scores with its heads in groups, as those of the queries are."""
    need_tensor(f"{place}: bias", bias)
    bias = q.graph.adopt(bias)
    wanted = (q.sizes[0], q.sizes[1], q.sizes[2], k.sizes[2])
    if bias.ndim != 4 or any(n != 1 and not q.graph.same(n, m) for n, m in zip(bias.sizes, wanted, strict=False)):
        raise ShapeError(f"{place}: bias {bias!r}, expected ({', '.join(map(str, wanted))}), any of them 1 instead")
    if bias.sizes[1] == 1:
        return rearrange(bias, "b 1 s t -> b 1 1 s t", name="groups")
    return rearrange(bias, "b (g r) s t -> b g r s t", g=k.sizes[1].expr, name="groups")


def _shared_out(place: str, sinks: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Return logits of heads with these in groups, and the same for all positions."""
    need_tensor(f"{place}: sinks", sinks)
    sinks = q.graph.adopt(sinks)
    if sinks.ndim != 1 or not q.graph.same(sinks.sizes[0], q.sizes[1]):
        raise ShapeError(f"{place}: sinks {sinks!r}, expected one for each of {q.sizes[1]} heads")
    return rearrange(sinks, "(g r) -> g r 1 1", g=k.sizes[1].expr, name="sinks")


def _added(added: tuple[Tensor, ...], biased: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to the scores, and the logits that stand beside them."""
    rest = added[int(biased) :]
    return (added[0] if biased else None), (rest[0] if rest else None)


def _softmax(x: Tensor, sinks: Tensor | None) -> Tensor:
    """Exponentials that add up to 1, or with sinks to what these leave."""
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
    *added: Tensor,
    biased: bool,
    domain: Domain | None,
    softcap: float | None,
    p: float,
) -> Tensor:
    # nothing outside the domain is computed, by the first product or by those that read it
    restricted: dict[str, Any] = {} if domain is None else {"domain": domain, "over": ("s", "t")}
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul", **restricted)
    bias, sinks = _added(added, biased)
    y = _softmax(_scaled(scores, softcap, bias), sinks)
    return _reduced(dropout(y, p), v, _FLASH_REDUCE)


def _eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *added: Tensor,
    biased: bool,
    domain: Domain | None,
    softcap: float | None,
    p: float,
) -> Tensor:
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul")
    bias, sinks = _added(added, biased)
    y = _scaled(scores, softcap, bias)
    if domain is not None:  # which keys are hidden changes no cost of an op on the whole square
        (y,) = apply(Pointwise(function=FUNCTIONS["causal_mask"], masked=domain), [y], "mask")
    return _reduced(dropout(_softmax(y, sinks), p), v, _REDUCE)


def _scaled(scores: Tensor, softcap: float | None, bias: Tensor | None) -> Tensor:
    y = pointwise("mul", scores, 1.0, name="scale")
    y = y if softcap is None else pointwise("softcap", y)
    return y if bias is None else pointwise("add", y, bias, name="bias")


def _reduced(y: Tensor, v: Tensor, pattern: str) -> Tensor:
    with scope("reduce"):
        return einsum(y, v, pattern, name="matmul")
