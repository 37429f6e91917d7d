"""transformers decoders without experts: the size fields of each published config.json."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lazy import lazy_import
from zoo_reference import Reference

transformers = lazy_import("transformers")

#: Options for exact counts: countable attention matmuls, and no cache.
EXACT = {"attn_implementation": "eager", "use_cache": False}
#: B sequences of S tokens, S a prime.
SIZES = {"B": 2, "S": 13}

# -- field by field -------------------------------------------------------------------------------------------------


def llama(D: int, H: int, G: int, F: int, L: int, V: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": D, "num_attention_heads": H, "num_key_value_heads": G, "intermediate_size": F,
        "num_hidden_layers": L, "vocab_size": V, **more,
    }  # fmt: skip


def gpt2(D: int, H: int, L: int, P: int = 1024) -> dict[str, Any]:
    return {"n_embd": D, "n_head": H, "n_layer": L, "n_positions": P, "vocab_size": 50257}


def gemma3(D: int, H: int, G: int, K: int, F: int, L: int, V: int, W: int) -> dict[str, Any]:
    return llama(D, H, G, F, L, V, head_dim=K, sliding_window=W, sliding_window_pattern=6, query_pre_attn_scalar=K)


def falcon(D: int, H: int, L: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": D, "num_attention_heads": H, "num_hidden_layers": L, "vocab_size": 65024, **more}


NEW = {"new_decoder_architecture": True, "num_kv_heads": 8}
TIED = {"tie_word_embeddings": True}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "GPT2Config GPT2LMHeadModel": {
        "gpt2": gpt2(768, 12, 12),
        "gpt2-medium": gpt2(1024, 16, 24),
        "gpt2-large": gpt2(1280, 20, 36),
        "gpt2-xl": gpt2(1600, 25, 48),
        "gpt3-175b": gpt2(12288, 96, 96, 2048),
    },
    "LlamaConfig LlamaForCausalLM": {
        "llama-2-7b": llama(4096, 32, 32, 11008, 32, 32000),
        "llama-2-13b": llama(5120, 40, 40, 13824, 40, 32000),
        "llama-2-70b": llama(8192, 64, 8, 28672, 80, 32000),
        "llama-3-8b": llama(4096, 32, 8, 14336, 32, 128256),
        "llama-3-70b": llama(8192, 64, 8, 28672, 80, 128256),
        "llama-3.1-8b": llama(4096, 32, 8, 14336, 32, 128256),
        "llama-3.1-70b": llama(8192, 64, 8, 28672, 80, 128256),
        "llama-3.1-405b": llama(16384, 128, 8, 53248, 126, 128256),
        "llama-3.2-1b": llama(2048, 32, 8, 8192, 16, 128256, **TIED),
        "llama-3.2-3b": llama(3072, 24, 8, 8192, 28, 128256, **TIED),
        "llama-3.3-70b": llama(8192, 64, 8, 28672, 80, 128256),
    },
    "MistralConfig MistralForCausalLM": {
        "mistral-7b": llama(4096, 32, 8, 14336, 32, 32000, sliding_window=4096),
        "mistral-7b-v0.3": llama(4096, 32, 8, 14336, 32, 32768, sliding_window=None),
        "mistral-nemo-12b": llama(5120, 32, 8, 14336, 40, 131072, head_dim=128, sliding_window=None),
    },
    "Qwen2Config Qwen2ForCausalLM": {
        "qwen2.5-0.5b": llama(896, 14, 2, 4864, 24, 151936, **TIED),
        "qwen2.5-1.5b": llama(1536, 12, 2, 8960, 28, 151936, **TIED),
        "qwen2.5-3b": llama(2048, 16, 2, 11008, 36, 151936, **TIED),
        "qwen2.5-7b": llama(3584, 28, 4, 18944, 28, 152064),
        "qwen2.5-14b": llama(5120, 40, 8, 13824, 48, 152064),
        "qwen2.5-32b": llama(5120, 40, 8, 27648, 64, 152064),
        "qwen2.5-72b": llama(8192, 64, 8, 29568, 80, 152064),
    },
    "Qwen3Config Qwen3ForCausalLM": {
        "qwen3-0.6b": llama(1024, 16, 8, 3072, 28, 151936, head_dim=128, **TIED),
        "qwen3-1.7b": llama(2048, 16, 8, 6144, 28, 151936, head_dim=128, **TIED),
        "qwen3-4b": llama(2560, 32, 8, 9728, 36, 151936, head_dim=128, **TIED),
        "qwen3-8b": llama(4096, 32, 8, 12288, 36, 151936, head_dim=128),
        "qwen3-14b": llama(5120, 40, 8, 17408, 40, 151936, head_dim=128),
        "qwen3-32b": llama(5120, 64, 8, 25600, 64, 151936, head_dim=128),
    },
    "Gemma2Config Gemma2ForCausalLM": {
        "gemma-2-2b": llama(2304, 8, 4, 9216, 26, 256000, head_dim=256),
        "gemma-2-9b": llama(3584, 16, 8, 14336, 42, 256000, head_dim=256),
        "gemma-2-27b": llama(4608, 32, 16, 36864, 46, 256000, head_dim=128, query_pre_attn_scalar=144),
    },
    "Gemma3TextConfig Gemma3ForCausalLM": {
        "gemma-3-1b": gemma3(1152, 4, 1, 256, 6912, 26, 262144, 512),
        "gemma-3-4b": gemma3(2560, 8, 4, 256, 10240, 34, 262208, 1024),
        "gemma-3-12b": gemma3(3840, 16, 8, 256, 15360, 48, 262208, 1024),
        "gemma-3-27b": gemma3(5376, 32, 16, 128, 21504, 62, 262208, 1024),
    },
    "Phi3Config Phi3ForCausalLM": {
        "phi-3-mini": llama(3072, 32, 32, 8192, 32, 32064, sliding_window=2047),
        "phi-3.5-mini": llama(3072, 32, 32, 8192, 32, 32064, sliding_window=262144),
        "phi-3-medium": llama(5120, 40, 10, 17920, 40, 32064, sliding_window=2047),
        "phi-4": llama(5120, 40, 10, 17920, 40, 100352, sliding_window=None),
        "phi-4-mini": llama(3072, 24, 8, 8192, 32, 200064, sliding_window=262144, rope_parameters=PARTIAL, **TIED),
    },
    "FalconConfig FalconForCausalLM": {
        "falcon-7b": falcon(4544, 71, 32, multi_query=True, parallel_attn=True),
        "falcon-11b": falcon(4096, 32, 60, num_ln_in_parallel_attn=1, tie_word_embeddings=False, **NEW),
        "falcon-40b": falcon(8192, 128, 60, **NEW),
        "falcon-180b": falcon(14848, 232, 80, **NEW),
    },
    "Olmo2Config Olmo2ForCausalLM": {
        "olmo-2-1b": llama(2048, 16, 16, 8192, 16, 100352),
        "olmo-2-7b": llama(4096, 32, 32, 11008, 32, 100352),
        "olmo-2-13b": llama(5120, 40, 40, 13824, 40, 100352),
        "olmo-2-32b": llama(5120, 40, 8, 27648, 64, 100352),
    },
}


def config(classes: str, **fields: Any) -> Any:
    """Return a config with its architecture, as in config.json."""
    name, model = classes.split()
    # special tokens of small vocabularies: they do not affect costs
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return getattr(transformers, name)(**tokens, **fields, **EXACT, architectures=[model])


def module(classes: str, fields: dict[str, Any]) -> torch.nn.Module:
    """Build a config's module."""
    return getattr(transformers, classes.split()[1])(config(classes, **fields))


def inputs() -> tuple[torch.Tensor, ...]:
    return (torch.zeros(SIZES["B"], SIZES["S"], dtype=torch.int64),)


REFERENCES: dict[str, Callable[[], Reference]] = {
    name: partial(Reference, partial(module, classes, fields), inputs, SIZES, {"attention": "eager"})
    for classes, published in CONFIGS.items()
    for name, fields in published.items()
}
