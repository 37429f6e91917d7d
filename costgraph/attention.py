"""Scaled dot-product attention: as separate ops, or as one kernel that never writes the scores."""

from __future__ import annotations

from numbers import Real
from typing import Any

from .arguments import need_choice, need_flag, need_tensor, positive
from .domain import Domain
from .errors import GraphError, ShapeError
from .graph import apply, current_graph
from .nn import softmax
from .ops.blocks import fused
from .ops.einsum import einsum
from .ops.layout import rearrange
from .ops.pointwise import FUNCTIONS, POINTWISE, pointwise
from .ops.stochastic import dropout
from .scopes import scope
from .tensor import Tensor

__all__ = ["attention"]

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
    p: float = 0,
    name: str = "attention",
) -> Tensor:
    """Attend from queries to keys: softmax(q @ k.T / sqrt(K)) @ v.

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
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise GraphError(f"{place}: softcap {softcap!r}, expected a positive number")
    need_flag(place, causal=causal)
    q, k, v = _checked(place, q, k, v)
    domain = None
    if causal or window is not None:
        domain = Domain(causal, None if window is None else positive(f"{place}: window", window))
    q = rearrange(q, "b (g r) s k -> b g r s k", g=k.sizes[1].expr, name="groups")
    if kernel == "flash":
        made = fused(name, _flash, q, k, v, backward="flash", domain=domain, softcap=softcap, p=p)
    else:
        with scope(name):
            made = _eager(q, k, v, domain=domain, softcap=softcap, p=p)
    assert isinstance(made, Tensor)
    order = "b s g r v" if kernel == "flash" else "b g r s v"
    return rearrange(made, f"{order} -> b (g r) s v", name="heads")


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


def _flash(q: Tensor, k: Tensor, v: Tensor, *, domain: Domain | None, softcap: float | None, p: float) -> Tensor:
    # nothing outside the domain is computed, by the first product or by those that read it
    restricted: dict[str, Any] = {} if domain is None else {"domain": domain, "over": ("s", "t")}
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul", **restricted)
    y = softmax(_scaled(scores, softcap))
    return _reduced(dropout(y, p), v, _FLASH_REDUCE)


def _eager(q: Tensor, k: Tensor, v: Tensor, *, domain: Domain | None, softcap: float | None, p: float) -> Tensor:
    with scope("scores"):
        scores = einsum(q, k, _SCORES, name="matmul")
    y = _scaled(scores, softcap)
    if domain is not None:  # which keys are hidden changes no cost of an op on the whole square
        attrs = {"function": FUNCTIONS["causal_mask"], "masked": domain}
        (y,) = apply(POINTWISE, [y], attrs, "mask")
    return _reduced(dropout(softmax(y), p), v, _REDUCE)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _scaled(scores: Tensor, softcap: float | None) -> Tensor:
    y = pointwise("mul", scores, 1.0, name="scale")
    return y if softcap is None else pointwise("softcap", y)


def _reduced(y: Tensor, v: Tensor, pattern: str) -> Tensor:
    with scope("reduce"):
        return einsum(y, v, pattern, name="matmul")
