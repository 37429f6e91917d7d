"""Qwen with experts: Qwen1.5-MoE and Qwen2 with a gated shared expert, Qwen3 without one.

Sizes: Yang et al. 2024 (arXiv 2407.10671), table 1, Yang et al. 2025 (arXiv 2505.09388), table 2, and the `config.json`
of Qwen/Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B, Qwen3-30B-A3B and Qwen3-235B-A22B. Op order: `Qwen2MoeForCausalLM` and
`Qwen3MoeForCausalLM` in transformers with grouped matmuls for experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import costgraph as cg

from .blocks import Tables, block, causal_attention, gated_mlp, mixture_of_experts
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def qwen_moe(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    routing: str = "balanced",
    capacity: float | None = None,
    kinds: Sequence[str] = ("moe",),
    rest: int = 0,
    shared: bool = False,
    normalize: bool = True,
    window: bool = False,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "head",
    tied: bool = False,
    activation: str = "silu",
) -> cg.Graph:
    """Declare Qwen with experts: tokens (B, S) to logits (B, S, V); `kinds` lists moe and dense layers."""
    K, L, W = cg.dims("K L W")
    act = partial(cg.ops.pointwise, activation)
    experts = mixture_of_experts(routing, capacity, activation=act, normalize=normalize)

    def mixture(y: cg.Tensor) -> cg.Tensor:
        routed = experts(y)
        if not shared:
            return routed
        gate = cg.sigmoid(cg.linear(y, "b s d -> b s one", one=1, name="shared_gate"))
        return routed + gate * cg.nn.gated_mlp(y, cg.dims("Fs"), activation=act, name="shared")

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        options = {"bias": bias, "out_bias": out_bias, "qk_norm": qk_norm, "window": W if window else None}
        mixer = causal_attention(attention, dropout, rope, **options)
        bodies = {
            kind: block(attention=mixer, mlp=f) for kind, f in (("moe", mixture), ("dense", gated_mlp(activation)))
        }
        return cg.nn.layers(L, bodies, x, kinds, rest=rest)

    return decoder(name, dtype, stack, rope=K, tied=tied)


def read(c: Config) -> Preset:
    """Read a transformers `Qwen2MoeConfig` or `Qwen3MoeConfig`."""
    third = c.architecture == "Qwen3MoeForCausalLM"
    c.expect("output_router_logits", False)  # the load-balancing loss is not declared
    c.ignore("max_position_embeddings", "router_aux_loss_coef", "max_window_layers")
    sizes = c.decoder()
    if not third:
        c.expect("use_sliding_window", False)
        c.layer_types({"full_attention": "global"}, sizes["L"], ["full_attention"])
    window = c.optional("sliding_window") if c.flag("use_sliding_window") else None
    c.ignore("sliding_window")
    sizes |= {"E": c.size("num_experts"), "k": c.size("num_experts_per_tok")}
    sizes |= {"Fe": c.size("moe_intermediate_size")} | ({} if window is None else {"W": window})
    sizes |= {} if third else {"Fs": c.size("shared_expert_intermediate_size")}
    kinds, rest = _kinds(c, sizes["L"])
    if "dense" not in kinds:
        del sizes["F"]
    biases = c.flag("attention_bias") if third else c.flag("qkv_bias")
    structure = {"kinds": kinds, "rest": rest, "shared": not third, "window": window is not None}
    structure |= {"normalize": c.flag("norm_topk_prob"), "bias": biases, "out_bias": biases and third}
    structure |= {"qk_norm": "head" if third else "none", "tied": c.flag("tie_word_embeddings")}
    return Preset(sizes, structure | {"activation": c.activation("hidden_act")})


def _kinds(c: Config, depth: int) -> tuple[tuple[str, ...], int]:
    """Return which layers have experts: every n-th one, except those listed as dense."""
    step, limit = c.size("decoder_sparse_step"), 2**16
    dense = {i for i in c.sizes("mlp_only_layers", minimum=0, empty=True, limit=limit) if i < depth}
    length = c.list_length(depth if dense else step) if dense or step <= depth else 1
    kinds = ["dense" if i in dense or (i + 1) % step else "moe" for i in range(length)]
    return c.period("mlp_only_layers", kinds, depth)


def _second(D: int, H: int, G: int, k: int, L: int, E: int, Fe: int, Fs: int) -> Preset:
    sizes = {"D": D, "H": H, "G": G, "K": 128, "L": L, "V": 151936, "E": E, "k": k, "Fe": Fe, "Fs": Fs}
    return Preset(sizes, {"shared": True, "normalize": False, "bias": True, "qk_norm": "none"})


def _third(D: int, H: int, L: int, Fe: int) -> Preset:
    return Preset({"D": D, "H": H, "G": 4, "K": 128, "L": L, "V": 151936, "E": 128, "k": 8, "Fe": Fe})


FAMILIES = (
    Family(
        qwen_moe,
        {
            "qwen1.5-moe-a2.7b": _second(2048, 16, 16, 4, 24, 60, 1408, 5632),
            "qwen2-57b-a14b": _second(3584, 28, 4, 8, 28, 64, 2560, 20480),
            "qwen3-30b-a3b": _third(2048, 32, 48, 768),
            "qwen3-235b-a22b": _third(4096, 64, 94, 1536),
        },
        architectures={"Qwen2MoeForCausalLM": "qwen2_moe", "Qwen3MoeForCausalLM": "qwen3_moe"},
        read=read,
        legend={"Fs": "shared expert width"},
    ),
)
