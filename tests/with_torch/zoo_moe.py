"""transformers decoders with experts: the size fields of each published config.json.

Experts run as a grouped matmul (`experts_implementation="grouped_mm"`), which counts 2 per row and matrix element; a
loop over the non-empty experts is data-dependent and cannot be traced.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from lazy import lazy_import
from zoo_reference import Reference

transformers = lazy_import("transformers")

#: Options for exact counts: countable attention matmuls, a grouped matmul for all experts, and no cache.
EXACT = {"attn_implementation": "eager", "experts_implementation": "grouped_mm", "use_cache": False}
#: B sequences of S tokens, S a prime.
SIZES = {"B": 2, "S": 13}

# -- field by field -------------------------------------------------------------------------------------------------


def layers(D: int, H: int, G: int, L: int, V: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": D, "num_attention_heads": H, "num_key_value_heads": G, "num_hidden_layers": L, "vocab_size": V,
        **more,
    }  # fmt: skip


def mixtral(D: int, H: int, L: int, Fe: int, V: int) -> dict[str, Any]:
    return layers(D, H, 8, L, V, intermediate_size=Fe, num_local_experts=8, num_experts_per_tok=2)


def qwen(D: int, H: int, G: int, L: int, F: int, E: int, k: int, Fe: int, **more: Any) -> dict[str, Any]:
    experts = {"num_experts": E, "num_experts_per_tok": k, "moe_intermediate_size": Fe}
    return layers(D, H, G, L, 151936, intermediate_size=F, **experts, **more)


def deepseek(D: int, H: int, L: int, V: int, F: int, E: int, k: int, Fe: int, Es: int, **more: Any) -> dict[str, Any]:
    experts = {"n_routed_experts": E, "num_experts_per_tok": k, "moe_intermediate_size": Fe, "n_shared_experts": Es}
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return layers(D, H, H, L, V, intermediate_size=F, **experts, **latent, **more)


THIRD = {"head_dim": 128, "norm_topk_prob": True}
OF_160 = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "MixtralConfig MixtralForCausalLM": {
        "mixtral-8x7b": mixtral(4096, 32, 32, 14336, 32000),
        "mixtral-8x22b": mixtral(6144, 48, 56, 16384, 32768),
    },
    "Qwen2MoeConfig Qwen2MoeForCausalLM": {
        "qwen1.5-moe-a2.7b": qwen(2048, 16, 16, 24, 5632, 60, 4, 1408, shared_expert_intermediate_size=5632),
        "qwen2-57b-a14b": qwen(3584, 28, 4, 28, 18944, 64, 8, 2560, shared_expert_intermediate_size=20480),
    },
    "Qwen3MoeConfig Qwen3MoeForCausalLM": {
        "qwen3-30b-a3b": qwen(2048, 32, 4, 48, 6144, 128, 8, 768, **THIRD),
        "qwen3-235b-a22b": qwen(4096, 64, 4, 94, 12288, 128, 8, 1536, **THIRD),
    },
    "GptOssConfig GptOssForCausalLM": {
        "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
        "gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
    },
    "DeepseekV2Config DeepseekV2ForCausalLM": {
        "deepseek-v2": deepseek(
            5120, 128, 60, 102400, 12288, 160, 6, 1536, 2, q_lora_rank=1536, first_k_dense_replace=1, **OF_160
        ),
        "deepseek-v2-lite": deepseek(
            2048, 16, 27, 102400, 10944, 64, 6, 1408, 2, q_lora_rank=None, first_k_dense_replace=1
        ),
    },
    "DeepseekV3Config DeepseekV3ForCausalLM": {
        "deepseek-v3": deepseek(7168, 128, 61, 129280, 18432, 256, 8, 2048, 1, q_lora_rank=1536),
    },
}


def config(classes: str, **fields: Any) -> Any:
    """Return a config with its architecture, as in config.json."""
    name, model = classes.split()
    # special tokens of small vocabularies: they do not affect costs
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return getattr(transformers, name)(**tokens, **fields, **EXACT, architectures=[model])


# -- modules ---------------------------------------------------------------------------------------------------------


class Turns(torch.nn.Module):
    """Separate cosines and sines, where DeepSeek-V2 has complex numbers, which graphs do not support."""

    def __init__(self, inverse: torch.Tensor) -> None:
        super().__init__()
        self.inverse = inverse

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angles = position_ids[..., None].float() * self.inverse
        return torch.stack([angles.cos(), angles.sin()], -1)


def turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V2's `apply_rotary_emb` in real numbers."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        cos, sin = turns[:, None, ..., 0], turns[:, None, ..., 1]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)

    return turn(q), turn(k)


class Logits(torch.nn.Module):
    """A causal language model as a function from tokens to logits."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.model = getattr(transformers, made.architectures[0])(made)
        if isinstance(self.model, transformers.DeepseekV2ForCausalLM):
            self.model.model.rotary_emb = Turns(self.model.model.rotary_emb.inv_freq)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.models.deepseek_v2 import modeling_deepseek_v2

        with mock.patch.object(modeling_deepseek_v2, "apply_rotary_emb", turned):
            return self.model(tokens, use_cache=False).logits


def tokens() -> tuple[torch.Tensor]:
    return (torch.zeros(SIZES["B"], SIZES["S"], dtype=torch.int64),)


def reference(classes: str, fields: dict[str, Any]) -> Reference:
    """Build a published config's module."""
    return Reference(
        lambda: Logits(config(classes, **fields)), tokens, SIZES, {"attention": "eager"}, name=classes.split()[1]
    )


#: Each preset's reference.
REFERENCES: dict[str, Callable[[], Reference]] = {
    name: partial(reference, classes, fields) for classes, models in CONFIGS.items() for name, fields in models.items()
}
