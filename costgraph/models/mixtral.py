"""Mixtral 8x7B and 8x22B: Mistral's attention, and a mixture of 8 experts in every layer, 2 for each token.

Sizes: Jiang et al. 2024 (arXiv 2401.04088), table 1, and the `config.json` of mistralai/Mixtral-8x7B-v0.1 and
Mixtral-8x22B-v0.1. Op order: `MixtralForCausalLM` in transformers with grouped matmuls for experts.
"""

from __future__ import annotations

from functools import partial

import costgraph as cg

from .blocks import System, Tables, block, causal_attention, mixture_of_experts
from .config import Config
from .decoder import decoder
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
    system: System = "torch",
) -> cg.Graph:
    """Declare Mixtral: tokens (B, S) to logits (B, S, V), with E experts of width Fe, k for each token.

    `system` selects the implementation of layers.
    """
    K, L, W = cg.dims("K L W")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = causal_attention(attention, dropout, rope, window=W if window else None)
        act = partial(cg.ops.pointwise, activation)
        channels = mixture_of_experts(routing, capacity, activation=act, normalize=True, system=system)
        return cg.repeat(L, block(attention=mixer, moe=channels), x, name="layers")

    return decoder(name, dtype, stack, rope=K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `MixtralConfig`."""
    c.expect("output_router_logits", False)  # the load-balancing loss is not declared
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
