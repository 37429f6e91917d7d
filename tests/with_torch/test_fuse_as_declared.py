"""Fused traces of transformers classes cost the same as the fused declarations of their configs.

Declarations use kernels where eager programs have separate ops: norms, rotary embeddings, attention, expert routing. A
fused trace moves as many bytes. The programs of four other architectures do extra work that no compiler removes: Falcon
repeats keys and values per head and adds a mask, Phi-3 copies the attention result because its queries were
concatenated, GPT-OSS concatenates sinks and scores and takes their maximum separately, and DeepSeek-V2 rotates
positions as complex numbers.
"""

import pytest
from lazy import lazy_import

import costgraph as cg
from costgraph.ir.graph import known_names
from costgraph.torch import from_config

lazy_import("transformers")

NEAR = 0.05
ENCODER = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816, "num_hidden_layers": 4}
DECODER = ENCODER | {
    "num_key_value_heads": 4, "vocab_size": 32000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip
HEADS = DECODER | {"head_dim": 64}
EXPERTS = HEADS | {"num_experts_per_tok": 2}
QWEN = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 704, "norm_topk_prob": True}
LATENT = DECODER | {
    "num_key_value_heads": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 704, "n_routed_experts": 8,
    "n_shared_experts": 2, "kv_lora_rank": 256, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
#: Model type, fields and attention implementation by architecture, with the defaults of `transformers`.
FAMILIES = {
    "GPT2LMHeadModel": ("gpt2", {"n_embd": 1024, "n_head": 16, "n_layer": 4, "n_positions": 2048, "vocab_size": 50257}),
    "LlamaForCausalLM": ("llama", DECODER),
    "MistralForCausalLM": ("mistral", DECODER | {"sliding_window": None}),
    "Qwen2ForCausalLM": ("qwen2", DECODER),
    "Qwen3ForCausalLM": ("qwen3", HEADS),
    "Gemma2ForCausalLM": ("gemma2", HEADS),  # torch's fused kernels do not soft-cap scores
    "Gemma3ForCausalLM": ("gemma3_text", HEADS),
    "Olmo2ForCausalLM": ("olmo2", DECODER),
    "MixtralForCausalLM": ("mixtral", EXPERTS | {"num_local_experts": 8, "sliding_window": None}),
    "Qwen2MoeForCausalLM": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 2816}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", QWEN),
    "DeepseekV3ForCausalLM": ("deepseek_v3", LATENT),
    "BertModel": ("bert", ENCODER | {"vocab_size": 30522, "max_position_embeddings": 2048, "type_vocab_size": 2}),
    "ViTModel": (
        "vit", ENCODER | {"image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu"}
    ),
    "ConvNextModel": (
        "convnext",
        {"hidden_sizes": [96, 192, 384], "depths": [3, 3, 9], "num_stages": 3, "image_size": 224, "patch_size": 4},
    ),
    "ResNetModel": (
        "resnet",
        {"embedding_size": 64, "hidden_sizes": [256, 512, 1024], "depths": [3, 4, 6], "num_channels": 3,
         "image_size": 224},
    ),
}  # fmt: skip
SHORT = ("Qwen3ForCausalLM",)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_fused_trace_costs_the_same_as_fused_declaration(name):
    kind, fields = FAMILIES[name]
    fields = {"architectures": [name], "model_type": kind, "dtype": "bfloat16", **fields}
    attention = "eager" if kind == "gemma2" else "flash"
    declared, traced = (make(fields, attention=attention) for make in (cg.models.from_config, from_config))
    fused = [cg.fuse(g) for g in (declared, traced)]
    for cost in (cg.flops, cg.bytes_moved):
        for sizes in ({"B": 2, "S": 1024, "R": 224}, {"B": 4, "S": 512, "R": 224}):
            open_ = [{k: v for k, v in sizes.items() if k in known_names(g) - g.defaults.keys()} for g in fused]
            expected, found = (cost(g, **own) for g, own in zip(fused, open_, strict=True))
            assert abs(found / expected - 1) <= NEAR, cost.__name__
    assert cg.bytes_moved(fused[1], **open_[1]) < cg.bytes_moved(traced, **open_[1])
