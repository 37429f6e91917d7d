"""DeepSeek-V2, V2-Lite and V3: latent attention, fine-grained experts with shared ones, and dense first layers.

Sizes: DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2 and appendix B, and 2024 (arXiv 2412.19437), section 4.2, and
the `config.json` of deepseek-ai/DeepSeek-V2, DeepSeek-V2-Lite and DeepSeek-V3. Op order: `DeepseekV2ForCausalLM` and
`DeepseekV3ForCausalLM` in transformers with grouped matmuls for experts. Multi-token prediction layers of V3 are left
out, as in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import costgraph as cg

from .blocks import System, Tables, block, gated_mlp, mixture_of_experts
from .config import Config
from .decoder import decoder
from .family import Family, Preset


def deepseek(
    name: str,
    attention: str,
    dropout: float,
    dtype: str,
    *,
    routing: str = "balanced",
    capacity: float | None = None,
    absorbed: bool = False,
    query_latent: bool = True,
    dense: bool = True,
    sparse: bool = True,
    limited: bool = True,
    sigmoid: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    bias: bool = False,
    tied: bool = False,
    system: System = "torch",
) -> cg.Graph:
    """Declare DeepSeek: tokens (B, S) to logits (B, S, V).

    The first Ld layers have a dense MLP (none without `dense`), the others have experts (none without `sparse`).
    `absorbed` attends to the latent vectors directly, `limited` restricts tokens to experts in kg of Eg groups,
    `sigmoid` is the router of V3 with its balancing bias, and `system` selects the implementation of layers.
    """
    H, L, C, Cq, Kn, Kr, Kv = cg.dims("H L C Cq Kn Kr Kv")
    Fe, Es, Eg, kg, Ld = cg.dims("Fe Es Eg kg Ld")
    options: dict[str, Any] = {"score": "sigmoid" if sigmoid else "softmax", "correction": sigmoid, "fp32": True}
    options |= {"groups": Eg, "kept_groups": kg} if limited else {}
    experts = mixture_of_experts(routing, capacity, normalize=normalize, scale=scale, system=system, **options)
    shared_experts = gated_mlp("silu", f=Es * Fe, system=system, name="shared")

    def channels(y: cg.Tensor) -> cg.Tensor:
        return experts(y) + shared_experts(y)

    def stack(x: cg.Tensor, rope: Tables) -> cg.Tensor:
        mixer = partial(
            cg.nn.latent_attention, heads=H, latent=C, nope=Kn, rotated=Kr, value=Kv, rope=rope,
            query_latent=Cq if query_latent else None, absorbed=absorbed, kernel=attention, bias=bias, p=dropout,
            contiguous=system == "megatron",
        )  # fmt: skip
        feed = gated_mlp("silu", system=system)
        if dense:
            x = cg.repeat(Ld if sparse else L, block(attention=mixer, mlp=feed), x, name="dense_layers")
        if not sparse:
            return x
        return cg.repeat(L - Ld if dense else L, block(attention=mixer, moe=channels), x, name="layers")

    return decoder(name, dtype, stack, rope=Kr, tied=tied, assume=())


def read(c: Config) -> Preset:
    """Read a transformers `DeepseekV2Config` or `DeepseekV3Config`."""
    third = c.architecture == "DeepseekV3ForCausalLM"
    c.expect("hidden_act", "silu")
    c.expect("mlp_bias", False)
    c.expect("moe_layer_freq", 1)
    c.expect("output_router_logits", False)  # the load-balancing loss is not declared
    c.expect("scoring_func", "sigmoid" if third else "softmax")
    c.ignore("max_position_embeddings", "aux_loss_alpha", "seq_aux", "ep_size", "rope_interleave")
    c.ignore("num_nextn_predict_layers", "num_mtp_layers")  # the reference module has no such layers
    c.ignore("head_dim")  # transformers overwrites it with the size of the rotated part
    sizes = {"D": c.size("hidden_size"), "H": c.size("num_attention_heads"), "L": c.size("num_hidden_layers")}
    sizes |= {"V": c.size("vocab_size"), "C": c.size("kv_lora_rank"), "Kn": c.size("qk_nope_head_dim")}
    sizes |= {"Kr": c.size("qk_rope_head_dim"), "Kv": c.size("v_head_dim")}
    experts = {"Fe": c.size("moe_intermediate_size"), "E": c.size("n_routed_experts")}
    experts |= {"k": c.size("num_experts_per_tok"), "Es": c.size("n_shared_experts")}
    c.expect("num_key_value_heads", sizes["H"], *([] if third else [None]))
    c.expect("qk_head_dim", sizes["Kn"] + sizes["Kr"])
    rank, first = c.optional("q_lora_rank"), c.size("first_k_dense_replace", minimum=0)
    sparse = first < sizes["L"]
    sizes |= {} if rank is None else {"Cq": rank}
    sizes |= {"F": c.size("intermediate_size")} if first else {}
    sizes |= {"Ld": first} if first and sparse else {}
    c.ignore("intermediate_size")
    structure: dict[str, object] = {"query_latent": rank is not None, "sigmoid": third}
    structure |= {"dense": first > 0, "sparse": sparse}
    if third:
        c.expect("topk_method", "noaux_tc")
        limited, normalize = True, c.flag("norm_topk_prob")
    else:
        limited = c.choice("topk_method", choices=("greedy", "group_limited_greedy")) != "greedy"
        c.expect("norm_topk_prob", False)
        normalize = False
    experts |= {"Eg": c.size("n_group"), "kg": c.size("topk_group")} if limited else {}
    sizes |= experts if sparse else {}
    c.ignore("n_group", "topk_group")
    structure |= {"limited": limited, "normalize": normalize, "scale": c.number("routed_scaling_factor")}
    structure |= {"bias": c.flag("attention_bias"), "tied": c.flag("tie_word_embeddings")}
    return Preset(sizes, structure)


_HEADS = {"C": 512, "Kn": 128, "Kr": 64, "Kv": 128}
_V2 = {"sigmoid": False, "normalize": False}

FAMILIES = (
    Family(
        deepseek,
        {
            "deepseek-v2": Preset(
                {"D": 5120, "H": 128, "F": 12288, "L": 60, "V": 102400, "Cq": 1536, **_HEADS, "E": 160, "k": 6,
                 "Fe": 1536, "Es": 2, "Eg": 8, "kg": 3, "Ld": 1},
                {**_V2, "scale": 16.0},
            ),
            "deepseek-v2-lite": Preset(
                {"D": 2048, "H": 16, "F": 10944, "L": 27, "V": 102400, **_HEADS, "E": 64, "k": 6,
                 "Fe": 1408, "Es": 2, "Ld": 1},
                {**_V2, "limited": False, "query_latent": False},
            ),
            "deepseek-v3": Preset(
                {"D": 7168, "H": 128, "F": 18432, "L": 61, "V": 129280, "Cq": 1536, **_HEADS, "E": 256, "k": 8,
                 "Fe": 2048, "Es": 1, "Eg": 8, "kg": 4, "Ld": 3},
                {"scale": 2.5},
            ),
        },
        architectures={"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"},
        read=read,
        legend={
            "C": "latent size of keys and values", "Cq": "latent size of queries", "Kn": "head size without positions",
            "Kr": "rotary head size", "Kv": "head size of values", "Es": "shared experts", "Eg": "expert groups",
            "kg": "groups per token", "Ld": "dense layers",
        },
    ),
)  # fmt: skip
