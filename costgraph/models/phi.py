"""Phi-3, Phi-3.5 and Phi-4: Llama's layers with fused QKV and gate-up projections.

Sizes: Abdin et al. 2024 (arXiv 2404.14219; 2412.08905), and the `config.json` of microsoft/Phi-3-mini-4k-instruct,
Phi-3.5-mini-instruct, Phi-3-medium-4k-instruct, phi-4 and Phi-4-mini-instruct. Op order: `Phi3ForCausalLM` in
transformers, whose `sliding_window` includes the query's own position, as `window` does here.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import Tables, block, causal_attention, gated_mlp, with_dropout
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def phi(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    window: bool = False,
    partial_rotary: bool = False,
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Phi-3: tokens (B, S) to logits (B, S, V); with `partial_rotary` R of a head's K elements are rotated."""
    K, L, W, R = cg.dims("K L W R")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = causal_attention(attention, dropout, rope, packed=True, window=W if window else None)
        layer = block(
            attention=with_dropout(mixer, dropout), mlp=with_dropout(gated_mlp(activation, packed=True), dropout)
        )
        return cg.repeat(L, layer, x, name="layers")

    return decoder(name, dtype, stack, rope=R if partial_rotary else K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `Phi3Config`."""
    for field in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.expect(field, False)
    for field in ("full_attn_mod", "interpolate_factor"):
        c.expect(field, 1)
    c.ignore("max_position_embeddings", "resid_pdrop", "embd_pdrop")
    sizes, window = c.decoder(), c.optional("sliding_window")
    rotated = c.rotary_size(sizes["K"])
    sizes |= ({} if window is None else {"W": window}) | ({} if rotated == sizes["K"] else {"R": rotated})
    structure = {"window": window is not None, "partial_rotary": "R" in sizes}
    structure["tied"] = c.flag("tie_word_embeddings")
    return Preset(sizes, {**structure, "activation": c.activation("hidden_act")})


_MINI = {"D": 3072, "H": 32, "G": 32, "K": 96, "F": 8192, "L": 32, "V": 32064}
_MEDIUM = {"D": 5120, "H": 40, "G": 10, "K": 128, "F": 17920, "L": 40, "V": 32064}
_MINI_4 = {"D": 3072, "H": 24, "G": 8, "K": 128, "F": 8192, "L": 32, "V": 200064, "W": 262144, "R": 96}

FAMILIES = (
    Family(
        phi,
        {
            "phi-3-mini": Preset({**_MINI, "W": 2047}, {"window": True}),
            "phi-3.5-mini": Preset({**_MINI, "W": 262144}, {"window": True}),
            "phi-3-medium": Preset({**_MEDIUM, "W": 2047}, {"window": True}),
            "phi-4": Preset({**_MEDIUM, "V": 100352}),
            "phi-4-mini": Preset(_MINI_4, {"window": True, "partial_rotary": True, "tied": True}),
        },
        architectures={"Phi3ForCausalLM": "phi3"},
        read=read,
        legend={"R": "rotary head size"},
    ),
)
