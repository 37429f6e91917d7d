"""Decompose composite ops that dispatch modes cannot see into, so that their intermediates are recorded.

The decompositions follow torch's CPU kernels call by call (`native/transformers/attention.cpp`, `transformer.cpp`),
including the lifetimes of local variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn import functional

from ...errors import UnsupportedError

__all__ = [
    "COMPOSITES",
    "encoder_layer",
    "is_composed",
    "run_eagerly",
    "uncompiled",
]


# -- composites --------------------------------------------------------------------------------------------------------

aten = torch.ops.aten


def _qkv_by_head(qkv: torch.Tensor, qkv_bias: torch.Tensor, num_heads: int) -> Any:
    """Return queries, keys and values by head, in one storage."""
    batch, length, width = qkv.shape
    return aten.split(qkv.new_empty([3 * batch, num_heads, length, width // 3 // num_heads]), batch)


# torch has a kernel only for real tensors
torch.library.register_fake("aten::_transform_bias_rescale_qkv", _qkv_by_head)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run multi-head attention, writing the result into the queries."""
    batch, length, _ = query.shape
    lead, size = (batch * num_head, length), embed_dim // num_head
    qkv = _qkv_projection(query, key, value, embed_dim, qkv_weight)
    q, k, v = (t.view(*lead, size) for t in aten._transform_bias_rescale_qkv(qkv, qkv_bias, num_head))
    del qkv
    scores = torch.bmm(q, k.mT)
    if mask is None:
        aten._softmax.out(scores, -1, False, out=scores)
    else:
        scores = _masked_softmax(scores.view(batch, num_head, length, length), mask, mask_type).view(*lead, length)
    context = torch.bmm(scores, v, out=q).view(batch, num_head, length, size)
    weights = scores.view(batch, num_head, length, length) if need_weights else None
    del scores
    heads = context.transpose(1, 2).contiguous().view(batch, length, embed_dim)
    out = functional.linear(heads, proj_weight, proj_bias)
    del heads
    if weights is not None and average_attn_weights:
        weights = weights.sum(1)
        weights /= num_head
    return out, weights


def _qkv_projection(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, width: int, weight: torch.Tensor
) -> torch.Tensor:
    """Return concatenated queries, keys and values; a single matmul for self-attention."""
    if key is not value:
        return torch.cat([x @ w.T for x, w in zip((query, key, value), weight.chunk(3), strict=True)], 2)
    if query is key:
        return query @ weight.T
    first, others = aten.split_with_sizes(weight, [width, 2 * width])
    return torch.cat([query @ first.T, key @ others.T], 2)


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor, kind: int | None) -> torch.Tensor:
    out: torch.Tensor = aten._masked_softmax(scores, mask.to(torch.bool), scores.ndim - 1, kind)
    return out


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
    *,
    attention: Callable[..., Any] = _attention,
) -> torch.Tensor:
    """Run an encoder layer: attention and a feed-forward block, with norms before or after."""

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    def linears(x: torch.Tensor) -> torch.Tensor:
        inner = aten._addmm_activation(ffn_bias_1, x.view(-1, embed_dim), ffn_weight_1.T, use_gelu=use_gelu)
        return torch.addmm(ffn_bias_2, inner, ffn_weight_2.T).view(x.shape)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    x, _ = attention(x, x, x, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type)
    x.add_(src)
    x = before = x if norm_first else norm(x, norm_weight_1, norm_bias_1)
    x = linears(norm(x, norm_weight_2, norm_bias_2) if norm_first else x)
    x.add_(before)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


def _euclidean_distances(x1: torch.Tensor, x2: torch.Tensor) -> torch.Tensor:
    """Return distances of rows by one matmul (`native/Distance.cpp`): |x|^2 - 2*x*y + |y|^2, norms as extra columns."""
    norm_1 = x1.pow(2).sum(-1, keepdim=True)
    ones_1 = torch.ones_like(norm_1)
    norm_2 = x2.pow(2).sum(-1, keepdim=True)
    ones_2 = torch.ones_like(norm_2)
    left = torch.cat([x1.mul(-2), norm_1, ones_1], -1)
    del norm_1, ones_1
    right = torch.cat([x2, ones_2, norm_2], -1)
    del norm_2, ones_2
    return torch.matmul(left, right.mT).clamp_min_(0).sqrt_()


#: By op, with the op's signature.
COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: _attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten._euclidean_dist.default: _euclidean_distances,
    # whether a padding mask allows packing is data; assume that it does not
    aten._nested_tensor_from_mask_left_aligned.default: lambda tensor, mask: False,
}


@cache
def is_composed(func: OpOverload) -> bool:
    """Whether torch decomposes an op on every device."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    schema = func._schema
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    # ops that only query a property, such as a size, are unknown to the dispatcher
    if not torch._C._dispatch_has_kernel(name):
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # ops with a CPU kernel are composed only on other devices
    return has_kernel(name, key) and not has_kernel(name, "CPU")


# -- higher-order ops --------------------------------------------------------------------------------------------------
# Control-flow ops run eagerly.


@contextmanager
def uncompiled() -> Iterator[None]:
    """Disable `torch.compile`, which torch's own functions apply to such ops."""
    with patch.object(torch, "compile", lambda model=None, **_: (lambda f: f) if model is None else model):
        yield


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    while cond_fn(*carried, *additional_inputs):
        carried = body_fn(*carried, *additional_inputs)
    return tuple(carried)


def _scan(
    combine_fn: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    """Scan over rows, carrying values and stacking outputs."""
    carried, count, outputs = list(init), len(init), list[Sequence[Any]]()
    for rows in zip(*(x.unbind(0) for x in xs), strict=True):
        out = combine_fn(*carried, *rows, *additional_inputs)
        carried = list(out[:count])
        outputs.append(out[count:])
    return (*carried, *(torch.stack(tensors) for tensors in zip(*outputs, strict=True)))


#: Ops whose own kernels reject dispatch modes.
_KERNELS: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}


def run_eagerly(func: HigherOrderOperator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a higher-order op eagerly: the branch taken, or every step of a loop.

    Conditions on tensor values are refused where they are evaluated. UnsupportedError if torch has no eager kernel.
    """
    kernel = _KERNELS.get(str(func)) or func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if kernel is None:
        raise UnsupportedError(f"{func!s}: torch runs this op only compiled; expected an op with an eager kernel")
    return kernel(*args, **kwargs)
