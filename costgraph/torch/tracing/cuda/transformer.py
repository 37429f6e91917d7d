"""Attention with its projections on a GPU, as modules in inference call it: a kernel of attention behind a product."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ..composites import encoder_layer
from .attention import MATH, Asked, attend, choose
from .table import Here, rule, source

__all__: list[str] = []  # its rules are found in RULES

aten = torch.ops.aten
PROJECTED = source(
    "multi-head attention: a kernel of attention",
    "aten/src/ATen/native/transformers/cuda/attention.cu, native_multi_head_attention_cuda",
)


@rule(torch._native_multi_head_attention)
def attention(
    here: Here,
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
) -> tuple[torch.Tensor, None] | None:
    """Attend to itself in a kernel where there is one; what a CPU does else."""
    size = embed_dim // num_head
    if query is not key or key is not value or size % 8 or need_weights or mask is not None:
        return None

    def by_heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, num_head, size).transpose(1, 2)

    heads = by_heads(query)
    name, why = choose(Asked(heads, heads, heads, None, 0.0, False, False, here.arch))
    if name == MATH:
        return None
    del heads
    with here.by(PROJECTED, f"{name.partition(': ')[2]}: {why}"):
        x = functional.linear(query, qkv_weight, qkv_bias)
        made = attend(here, *map(by_heads, x.chunk(3, -1))).transpose(1, 2).reshape(x.shape[0], -1, embed_dim)
        return functional.linear(made, proj_weight, proj_bias), None


@rule(torch._transformer_encoder_layer_fwd)
def layer(here: Here, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention as above, and two linear layers."""

    def attended(*given: Any, **more: Any) -> Any:
        made = attention(here, *given, **more)
        return aten._native_multi_head_attention(*given, **more) if made is None else made

    return encoder_layer(*args, **kwargs, attention=attended)
