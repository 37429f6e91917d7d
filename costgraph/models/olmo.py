"""OLMo 2: Llama's layers with norms after attention and feed-forward layer, and norms over all queries and keys.

Sizes: OLMo Team 2024 (arXiv 2501.00656), table 3, and the `config.json` of allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B
and -0325-32B. Op order: `Olmo2ForCausalLM` in transformers.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import Tables, block, causal_attention, gated_mlp
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def olmo(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    bias: bool = False,
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare OLMo 2: tokens (B, S) to logits (B, S, V); `bias` applies to the four projections of attention."""
    K, L = cg.dims("K L")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = causal_attention(attention, dropout, rope, qk_norm="all", bias=bias, out_bias=bias)
        return cg.repeat(L, block(attention=mixer, mlp=gated_mlp(activation), norms="after"), x, name="layers")

    return decoder(name, dtype, stack, rope=K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `Olmo2Config`."""
    c.ignore("max_position_embeddings")
    structure = {"bias": c.flag("attention_bias"), "tied": c.flag("tie_word_embeddings")}
    return Preset(c.decoder(), {**structure, "activation": c.activation("hidden_act")})


def _sizes(D: int, H: int, G: int, F: int, L: int) -> Preset:
    return Preset({"D": D, "H": H, "G": G, "K": 128, "F": F, "L": L, "V": 100352})


FAMILIES = (
    Family(
        olmo,
        {
            "olmo-2-1b": _sizes(2048, 16, 16, 8192, 16),
            "olmo-2-7b": _sizes(4096, 32, 32, 11008, 32),
            "olmo-2-13b": _sizes(5120, 40, 40, 13824, 40),
            "olmo-2-32b": _sizes(5120, 40, 8, 27648, 64),
        },
        architectures={"Olmo2ForCausalLM": "olmo2"},
        read=read,
    ),
)
