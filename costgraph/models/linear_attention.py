"""A causal transformer with linear attention, whose state has a constant size.

Sizes: Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.2: images as sequences of pixels with 256 values, 8
layers for MNIST and 16 for CIFAR-10, 8 heads of 32 elements, a feed-forward layer of four times the width. Op order:
`TransformerEncoderLayer` and `CausalLinearAttention` of idiap/fast-transformers, with post-norm, biases and sinusoidal
positions. The head predicts all values, where the paper's predicts a mixture of ten logistics.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .blocks import block, with_dropout
from .decoder import decoder
from .family import Family, Preset


def linear_attention(name: str, attention: str, dropout: float, dtype: str, *, scan: str = "kernel") -> cg.Graph:
    """Declare a linear transformer: tokens (B, S) to logits (B, S, V); `attention` has no effect."""
    S, D, F, L, P = cg.dims("S D F L P")

    mixer = with_dropout(partial(_attend, dtype=dtype, scan=scan), dropout)

    def stack(x: cg.Tensor) -> cg.Tensor:
        x = x + cg.embedding(cg.ops.arange(S), x.graph.buffer("positions/table", (P, D)))
        channels = partial(cg.nn.mlp, f=F, activation=cg.relu, bias=True, p=dropout)
        layer = block(attention=mixer, mlp=channels, norm=cg.layer_norm, norms="behind")
        return cg.repeat(L, layer, cg.dropout(x, dropout), name="layers")

    return decoder(name, dtype, stack, norm=cg.layer_norm, head_bias=True, assume=("S <= P",))


def _attend(x: cg.Tensor, dtype: str, scan: str) -> cg.Tensor:
    """Accumulate products of keys and values, and keys for the normalizer, over positions (eq. 16 to 20)."""
    B, D, H = cg.dims("B D H")
    qkv = [cg.linear(x, "b s d -> b s h k", h=H, k=D / H, bias=True, name=f"attention/{n}") for n in ("q", "k", "v")]
    state = cg.ops.initial_state((B, H, D / H, D / H), dtype, name="attention/state")
    norm = cg.ops.initial_state((B, H, D / H), dtype, name="attention/norm_state")

    def step(
        carried: tuple[cg.Tensor, cg.Tensor], now: tuple[cg.Tensor, ...]
    ) -> tuple[tuple[cg.Tensor, cg.Tensor], cg.Tensor]:
        (q, k, v), (s, z) = now, carried
        s, z = s + cg.einsum(k, v, "b h k, b h v -> b h k v"), z + k
        y = cg.einsum(q, s, "b h k, b h k v -> b h v", name="reduce")
        scale = cg.einsum(q, z, "b h k, b h k -> b h", name="normalise")
        return (s, z), y / cg.rearrange(scale + 1e-6, "b h -> b h 1")

    with cg.nn.scan_kernel("linear_attention", scan):
        q, k = (cg.ops.pointwise("elu", t) + 1.0 for t in qkv[:2])
        y = cg.nn.recurrence(step, (state, norm), (q, k, qkv[2]))
    y = cg.rearrange(y, "b s h v -> b s (h v)", name="attention/merge")
    return cg.linear(y, "b s e -> b s d", d=D, bias=True, name="attention/proj")


def _sizes(L: int, P: int) -> Preset:
    return Preset({"D": 256, "H": 8, "F": 1024, "L": L, "V": 256, "P": P})


FAMILIES = (
    Family(
        linear_attention,
        {"linear-attention-mnist": _sizes(8, 28 * 28), "linear-attention-cifar10": _sizes(16, 3 * 32 * 32)},
    ),
)
