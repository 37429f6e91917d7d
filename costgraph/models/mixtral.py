"""Mixtral 8x7B and 8x22B: Mistral's attention, and 8 experts in every layer of which a token meets 2.

Sizes: Jiang et al. 2024 (arXiv 2401.04088), table 1, and the `config.json` of mistralai/Mixtral-8x7B-v0.1 and
Mixtral-8x22B-v0.1. Order of ops: `MixtralForCausalLM` of transformers with its experts as grouped products.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .config import Config
from .family import Family, Preset


def mixtral(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    routing: str = "balanced",
    capacity: float | None = None,
    window: bool = False,
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Mixtral: tokens (B, S) to logits (B, S, V); of E experts of width Fe a token meets k."""
    B, S, D, H, G, K, L, V, W = cg.dims("B S D H G K L V W")
    E, k, Fe = cg.dims("E k Fe")

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
            y = cg.rms_norm(x, name="moe/norm")
            act = partial(cg.ops.pointwise, activation)
            return x + cg.nn.moe(y, E, k, Fe, routing=routing, capacity=capacity, activation=act, normalize=True)

        x = cg.repeat(L, block, cg.embedding(tokens, table), name="layers")
        x = cg.rms_norm(x, name="norm")
        g.output(cg.nn.tied_head(x, table) if tied else cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def read(c: Config) -> Preset:
    """Read a config.json of transformers' MixtralConfig."""
    c.expect("output_router_logits", False)  # its loss of balance is not declared
    c.expect("router_jitter_noise", 0, 0.0)
    c.ignore("max_position_embeddings", "router_aux_loss_coef")
    window = c.optional("sliding_window")
    sizes = c.decoder() | ({} if window is None else {"W": window})
    sizes |= {"E": c.size("num_local_experts"), "k": c.size("num_experts_per_tok")}
    sizes["Fe"] = sizes.pop("F")
    structure = {"window": window is not None, "tied": c.flag("tie_word_embeddings")}
    return Preset(sizes, {**structure, "activation": c.activation("hidden_act")})


def _sizes(D: int, H: int, Fe: int, L: int, V: int) -> Preset:
    return Preset({"D": D, "H": H, "G": 8, "K": 128, "L": L, "V": V, "E": 8, "k": 2, "Fe": Fe})


FAMILIES = (
    Family(
        mixtral,
        {
            "mixtral-8x7b": _sizes(4096, 32, 14336, 32, 32000),
            "mixtral-8x22b": _sizes(6144, 48, 16384, 56, 32768),
        },
        architectures={"MixtralForCausalLM": "mixtral"},
        read=read,
    ),
)
