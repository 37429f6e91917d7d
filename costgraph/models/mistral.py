"""Mistral 7B and NeMo: Llama's layers, in the first version with attention to a window of 4096 positions.

Sizes: Jiang et al. 2023 (arXiv 2310.06825), table 1, and the `config.json` of mistralai/Mistral-7B-v0.1,
Mistral-7B-v0.3 and Mistral-Nemo-Base-2407. Order of ops: `MistralForCausalLM` of transformers, whose
`sliding_window` counts the own position as `window` does here.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .config import Config
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
    """Declare Mistral: tokens (B, S) to logits (B, S, V); with `window` a query sees the last W positions."""
    B, S, D, H, G, K, F, L, V, W = cg.dims("B S D H G K F L V W")

    with cg.Graph(name, dtype=dtype) as g:
        g.assume("H >= G")
        tokens = g.input("tokens", (B, S), dtype="int64")
        table = g.param("tokens/table", (V, D))
        rope = cg.nn.rotary_tables(cg.ops.arange(S), K)

        def block(x: cg.Tensor) -> cg.Tensor:
            y = cg.rms_norm(x, name="attention/norm")
            x = x + cg.nn.self_attention(
                y, H, K, groups=G, rope=rope, window=W if window else None, kernel=attention, p=dropout
            )
            y = cg.rms_norm(x, name="mlp/norm")
            return x + cg.nn.gated_mlp(y, F, activation=partial(cg.ops.pointwise, activation))

        x = cg.repeat(L, block, cg.embedding(tokens, table), name="layers")
        x = cg.rms_norm(x, name="norm")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def read(c: Config) -> Preset:
    """Read a config.json of transformers' MistralConfig."""
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
