"""Mistral 7B and NeMo: Llama's layers, in the first version with sliding-window attention over 4096 positions.

Sizes: Jiang et al. 2023 (arXiv 2310.06825), table 1, and the `config.json` of mistralai/Mistral-7B-v0.1,
Mistral-7B-v0.3 and Mistral-Nemo-Base-2407. Op order: `MistralForCausalLM` in transformers, whose `sliding_window`
includes the query's own position, as `window` does here.
"""

from __future__ import annotations

import costgraph as cg

from .blocks import Tables, block, causal_attention, gated_mlp
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def mistral(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    window: bool = False,
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Mistral: tokens (B, S) to logits (B, S, V); with `window`, a query attends to the last W positions."""
    K, L, W = cg.dims("K L W")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = causal_attention(attention, dropout, rope, window=W if window else None)
        return cg.repeat(L, block(attention=mixer, mlp=gated_mlp(activation)), x, name="layers")

    return decoder(name, dtype, stack, rope=K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `MistralConfig`."""
    c.ignore("max_position_embeddings")
    window = c.optional("sliding_window")
    structure = {"window": window is not None, "tied": c.flag("tie_word_embeddings")}
    return Preset(
        c.decoder() | ({} if window is None else {"W": window}),
        {**structure, "activation": c.activation("hidden_act")},
    )


_7B = {"D": 4096, "H": 32, "G": 8, "K": 128, "F": 14336, "L": 32}

FAMILIES = (
    Family(
        mistral,
        {
            "mistral-7b": Preset({**_7B, "V": 32000, "W": 4096}, {"window": True}),
            "mistral-7b-v0.3": Preset({**_7B, "V": 32768}),
            "mistral-nemo-12b": Preset({**_7B, "D": 5120, "L": 40, "V": 131072}),
        },
        architectures={"MistralForCausalLM": "mistral"},
        read=read,
    ),
)
