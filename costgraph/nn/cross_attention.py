"""Attention from one sequence to another: a decoder's to the results of an encoder."""

from __future__ import annotations

from ..graph.arguments import need_flag, need_tensor
from ..graph.scopes import scope
from ..graph.tensor import Tensor
from ..ops.cached import cache
from ..ops.layout import rearrange
from .attention import attention, merged
from .linear import linear

__all__ = ["cross_attention"]


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
    """Attend from one sequence to all of another, such as the results of an encoder, with the linear layers around.

    Parameters
    ----------
    x : Tensor
        Shape (b, s, d): what asks.
    memory : Tensor
        Shape (b, m, e): what keys and values are made from.
    heads, size, groups, kernel, bias, key_bias, out_bias, score_bias, p : object
        As in `self_attention`.
    cached : bool
        Mark keys and values as what `prefill` makes once and `decode` reads (`cache` without an axis that grows).
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
    >>> B, S, M, D, H, K = cg.dims("B S M D H K")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.nn.cross_attention(g.input("x", (B, S, D)), g.input("memory", (B, M, D)), H, K))
    >>> cg.param_count(g), cg.matmul_flops(g)
    (4*D*H*K, 4*B*D*H*K*M + 4*B*D*H*K*S + 4*B*H*K*M*S)
    """
    need_tensor(f"attention {name!r}", x, memory)
    need_flag(f"attention {name!r}", cached=cached)

    def made(what: str, source: Tensor, count: object) -> Tensor:
        shifted = bias if what != "k" or key_bias is None else key_bias
        y = linear(source, "b s d -> b s h k", h=count, k=size, bias=shifted, name=f"{name}/{what}")
        return rearrange(y, "b s h k -> b h s k")

    shared = heads if groups is None else groups
    q, k, v = made("q", x, heads), made("k", memory, shared), made("v", memory, shared)
    if cached:
        with scope(name):
            k, v = (cache(t, "b g t k", name=what) for what, t in (("k_cache", k), ("v_cache", v)))
    y = attention(q, k, v, causal=False, kernel=kernel, bias=score_bias, p=p, name=name)
    return merged(y, x.sizes[2], bias=out_bias, name=name)
