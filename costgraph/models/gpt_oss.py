"""GPT-OSS 20B and 120B: alternating window and full attention with sinks, and experts with clamped gates.

Sizes: OpenAI 2025 (arXiv 2508.10925), table 1, and the `config.json` of openai/gpt-oss-20b and gpt-oss-120b. Op order:
`GptOssForCausalLM` in transformers with grouped matmuls for experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import costgraph as cg

from .blocks import Tables, block, causal_attention, mixture_of_experts
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def gpt_oss(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    routing: str = "balanced",
    capacity: float | None = None,
    kinds: Sequence[str] = ("local", "global"),
    rest: int = 0,
    bias: bool = True,
    tied: bool = False,
) -> cg.Graph:
    """Declare GPT-OSS: tokens (B, S) to logits (B, S, V); `kinds` lists local (last W positions) and global layers."""
    K, L, W = cg.dims("K L W")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        channels = mixture_of_experts(routing, capacity, gate=_clamped, bias=True, score="chosen", router_bias=True)
        options = {"bias": bias, "out_bias": bias, "sinks": True}
        bodies = {
            kind: block(attention=causal_attention(attention, dropout, rope, window=window, **options), moe=channels)
            for kind, window in (("global", None), ("local", W))
        }
        return cg.nn.layers(L, bodies, x, kinds, rest=rest)

    return decoder(name, dtype, stack, rope=K, tied=tied)


def _clamped(gate: cg.Tensor, up: cg.Tensor) -> cg.Tensor:
    """Apply clamped SwiGLU: gate / (1 + exp(-1.702 * gate)) * (up + 1)."""
    gate, up = cg.ops.pointwise("minimum", gate, 7.0), cg.ops.pointwise("clamp", up)
    return (up + 1) * cg.ops.pointwise("quick_gelu", gate)


def read(c: Config) -> Preset:
    """Read a transformers `GptOssConfig`."""
    c.expect("hidden_act", "silu")
    c.expect("output_router_logits", False)  # the load-balancing loss is not declared
    c.ignore("max_position_embeddings", "initial_context_length", "router_aux_loss_coef", "swiglu_limit")
    c.expect("swiglu_alpha", 1.702)
    sizes = c.decoder()
    sizes |= {"E": c.size("num_local_experts"), "k": c.size("num_experts_per_tok")}
    c.expect("experts_per_token", sizes["k"])  # in the first files; transformers does not read it
    sizes["Fe"] = sizes.pop("F")
    kind_of_type = {"sliding_attention": "local", "full_attention": "global"}
    kinds, rest = c.layer_types(kind_of_type, sizes["L"], list(kind_of_type))
    window = c.optional("sliding_window")
    if "local" in kinds and window is not None:
        sizes["W"] = window
    else:
        kinds = tuple("global" for _ in kinds)
    structure = {"kinds": kinds, "rest": rest, "bias": c.flag("attention_bias")}
    return Preset(sizes, structure | {"tied": c.flag("tie_word_embeddings")})


def _sizes(L: int, E: int) -> Preset:
    sizes = {"D": 2880, "H": 64, "G": 8, "K": 64, "L": L, "V": 201088, "W": 128}
    return Preset(sizes | {"E": E, "k": 4, "Fe": 2880})


FAMILIES = (
    Family(
        gpt_oss,
        {"gpt-oss-20b": _sizes(24, 32), "gpt-oss-120b": _sizes(36, 128)},
        architectures={"GptOssForCausalLM": "gpt_oss"},
        read=read,
    ),
)
