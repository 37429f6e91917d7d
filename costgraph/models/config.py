"""Transformers configurations: every field of a config.json is read, known to change no cost, or rejected."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from numbers import Real
from typing import Any

import costgraph as cg

from ..algebra.symbols import shown
from ..errors import CostGraphError, FormatError, UnsupportedError
from ..text_file import place_of, read_text

__all__ = [
    "ACTIVATIONS",
    "ALIASES",
    "DEFAULTS",
    "NO_COST",
    "OFF",
    "ROPES",
    "Config",
    "string_keyed",
    "read_config",
    "formats_of",
]


# -- defaults ----------------------------------------------------------------------------------------------------------
# Defaults and aliases of transformers' configuration classes, by `model_type`. Source: transformers 5.23; a test
# compares each entry with the installed release. Sizes such as widths have no default here: transformers would use
# those of some published model, so a file must state them.

_HEADS = {"num_key_value_heads": None, "head_dim": None}
_DECODER = {"hidden_act": "silu", "tie_word_embeddings": False}
_MIXTURE = {**_DECODER, "output_router_logits": False}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_MOE_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}
_GEMMA = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "sliding_window": 4096,
    "layer_types": None, "tie_word_embeddings": True,
}  # fmt: skip
_LATENT = {**_MIXTURE, "attention_bias": False, "q_lora_rank": 1536}
_IMAGES = {"num_channels": 3, "image_size": 224}
_STATE = {
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "hidden_act": "silu",
    "residual_in_fp32": True,
}  # fmt: skip

_FALCON = {
    "num_ln_in_parallel_attn": None, "num_kv_heads": None, "alibi": False, "new_decoder_architecture": False,
    "multi_query": True, "parallel_attn": True, "bias": False, "ffn_hidden_size": None, "activation": "gelu",
    "tie_word_embeddings": True,
}  # fmt: skip

#: Defaults for missing fields; None means null, which the family's reader interprets.
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gpt2": {
        "n_inner": None, "activation_function": "gelu_new", "tie_word_embeddings": True, "scale_attn_weights": True,
        "reorder_and_upcast_attn": False,
    },
    "llama": {**_DECODER, **_HEADS, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_DECODER, "head_dim": None, "sliding_window": 4096},
    "mixtral": {**_MIXTURE, "head_dim": None, "sliding_window": None, "router_jitter_noise": 0.0},
    "qwen2": {**_DECODER, **_WINDOW, "max_window_layers": 28, "layer_types": None},
    "qwen3": {
        **_DECODER, **_WINDOW, "max_window_layers": 28, "layer_types": None, "head_dim": 128, "attention_bias": False,
    },
    "qwen2_moe": {**_MIXTURE, **_WINDOW, **_MOE_LAYERS, "layer_types": None, "qkv_bias": True},
    "qwen3_moe": {**_MIXTURE, **_WINDOW, **_MOE_LAYERS, "attention_bias": False},
    "gemma2": {
        **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "use_bidirectional_attention": None,
    },
    "gemma3_text": {
        **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    "phi3": {**_DECODER, "num_key_value_heads": None, "sliding_window": None},
    "falcon": _FALCON,
    # of the code published with the first Falcon checkpoints, which transformers no longer reads
    "refined_web": {**_FALCON, "new_decoder_architecture": None, "multi_query": False, "parallel_attn": False},
    "olmo2": {**_DECODER, "num_key_value_heads": None, "attention_bias": False},
    "gpt_oss": {
        **_MIXTURE, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "swiglu_alpha": 1.702,
        "layer_types": None, "attention_bias": True,
    },
    "deepseek_v2": {
        **_LATENT, "first_k_dense_replace": 0, "mlp_bias": False, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        **_LATENT, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "bert": {"hidden_act": "gelu", "tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False},
    "t5": {
        "feed_forward_proj": "relu", "num_decoder_layers": None, "relative_attention_num_buckets": 32,
        "is_encoder_decoder": True, "is_decoder": False,
    },
    "whisper": {
        "activation_function": "gelu", "tie_word_embeddings": True, "is_encoder_decoder": True,
        "apply_spec_augment": False, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    },
    "clip": {"projection_dim": 512},
    "clip_text_model": {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
        "hidden_act": "quick_gelu", "vocab_size": 49408, "max_position_embeddings": 77,
    },
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "hidden_act": "quick_gelu", "patch_size": 32, **_IMAGES,
    },
    "vit": {
        **_IMAGES, "patch_size": 16, "hidden_act": "gelu", "qkv_bias": True, "pooler_output_size": None,
        "pooler_act": "tanh",
    },
    "convnext": {
        **_IMAGES, "patch_size": 4, "num_stages": 4, "hidden_sizes": [96, 192, 384, 768], "depths": [3, 3, 9, 3],
        "hidden_act": "gelu", "layer_scale_init_value": 1e-6,
    },
    "resnet": {
        "num_channels": 3, "embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck", "hidden_act": "relu", "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    "swin": {
        **_IMAGES, "patch_size": 4, "embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24],
        "window_size": 7, "mlp_ratio": 4.0, "qkv_bias": True, "hidden_act": "gelu", "use_absolute_embeddings": False,
    },
    "mobilenet_v2": {
        **_IMAGES, "depth_multiplier": 1.0, "depth_divisible_by": 8, "min_depth": 8, "expand_ratio": 6.0,
        "output_stride": 32, "first_layer_is_expansion": True, "finegrained_output": True, "hidden_act": "relu6",
    },
    "efficientnet": {
        **_IMAGES, "image_size": 600, "width_coefficient": 2.0, "depth_coefficient": 3.1, "depth_divisor": 8,
        "kernel_sizes": [3, 3, 5, 3, 5, 5, 3], "in_channels": [32, 16, 24, 40, 80, 112, 192],
        "out_channels": [16, 24, 40, 80, 112, 192, 320], "depthwise_padding": [], "strides": [1, 2, 2, 2, 1, 2, 1],
        "num_block_repeats": [1, 2, 2, 3, 3, 4, 1], "expand_ratios": [1, 6, 6, 6, 6, 6, 6],
        "squeeze_expansion_ratio": 0.25, "hidden_act": "swish", "hidden_dim": 2560,
    },
    "mamba": {**_STATE, "state_size": 16, "time_step_rank": "auto", "tie_word_embeddings": True},
    "mamba2": {**_STATE, "state_size": 128, "n_groups": 8, "chunk_size": 256, "tie_word_embeddings": False},
    "xlstm": {
        "hidden_size": 4096, "embedding_dim": None, "num_hidden_layers": 32, "num_blocks": None, "num_heads": 8,
        "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64,
        "chunk_size": 64, "use_bias": False, "add_out_norm": True, "tie_word_embeddings": False,
        "weight_mode": "single", "inference_state_dtype": "float32",
    },
}  # fmt: skip

#: Aliases of fields, by model type: `attribute_map` of each class, and those that `__post_init__` renames.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "falcon": {"n_embed": "hidden_size"},
    "refined_web": {
        "n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    },
    "t5": {
        "hidden_size": "d_model", "num_attention_heads": "num_heads", "head_dim": "d_kv",
    },
    "whisper": {
        "num_key_value_heads": "encoder_attention_heads", "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model", "num_hidden_layers": "encoder_layers",
    },
    "convnext": {"num_hidden_layers": "num_stages"},
    "swin": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
}  # fmt: skip

#: Fields that change no cost of a forward pass or training step, in any model.
NO_COST = frozenset(
    """
    architectures model_type transformers_version _name_or_path name_or_path auto_map torch_dtype dtype return_dict
    use_cache output_hidden_states output_attentions output_router_logits _commit_hash bos_token_id eos_token_id
    pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id cls_token_id mask_token_id unk_token_id
    forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids initializer_range initializer_factor
    init_std id2label label2id num_labels finetuning_task problem_type task task_specific_params tokenizer_class
    prefix torchscript use_bfloat16 max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty gradient_checkpointing attn_implementation _attn_implementation
    _attn_implementation_autoset _experts_implementation pretraining_tp rms_norm_eps layer_norm_eps norm_eps
    layer_norm_epsilon rope_theta default_theta original_max_position_embeddings unsloth_fixed
    _attn_implementation_internal experts_implementation attention_dropout hidden_dropout resid_dropout
    cross_attention_hidden_size pruned_heads chunk_size_feed_forward classifier_dropout
    """.split()  # noqa: SIM905  # a list of seventy words in quotes is harder to read
)

#: Elementwise functions by the names in `hidden_act` and similar fields.
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "relu2", "relu6": "relu6", "silu": "silu", "swish": "silu", "sigmoid": "sigmoid", "tanh": "tanh",
    "mish": "mish", "leaky_relu": "leaky_relu", "hardswish": "hardswish",
}  # fmt: skip

#: Flags of any model that change nothing while they are off.
OFF = frozenset({"is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"})

#: Variants of rotary frequencies, all with the same cost.
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "mrope")


# -- config ------------------------------------------------------------------------------------------------------------

_LARGEST_SIZE = 2**63 - 1  # largest size, as for tensors
_STAGE_LIMIT = 32  # list entries: each stage of an image network halves a side
_LIST_LIMIT = 2**16  # layers in an aperiodic list
_RUN_LIMIT = 128  # runs of equal layers in a period: each run is declared separately


class Config:
    """The fields of a configuration, and which have been read.

    A missing field has the default of transformers (`DEFAULTS`); without one it is an error. Null has the value that
    the caller passes as `default`, or is an error if transformers has a default other than null.
    """

    def __init__(self, fields: Mapping[str, object], place: str) -> None:
        self._fields = dict(fields)
        self.place = place
        """Prefix for error messages."""
        self._defaults: Mapping[str, object] = {}
        self._used: set[str] = set()
        self._nested: list[Config] = []

    def apply_defaults(self, kind: str) -> None:
        """Apply the defaults and aliases of a model type."""
        file_type = self._fields.get("model_type")
        if isinstance(file_type, str) and file_type != kind and file_type in DEFAULTS:
            raise self._wrong("model_type", file_type, f"{kind!r}, the model type of its architecture")
        self._defaults = DEFAULTS.get(kind, {})
        for alias, name in ALIASES.get(kind, {}).items():
            if alias not in self._fields:
                continue
            value = self._fields.pop(alias)
            present = self._fields.setdefault(name, value)
            if not _same(present, value):
                raise FormatError(
                    f"{self.place}: {name} is {shown(present)} and {alias} is {shown(value)}, expected one value for "
                    f"the field and its alias"
                )

    @property
    def fields(self) -> dict[str, object]:
        """All fields in the file."""
        return dict(self._fields)

    # -- reading fields ----------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        return self._fields.get(name) is not None

    def is_present(self, name: str) -> bool:
        """Whether a field is present, possibly as null."""
        return name in self._fields

    def _get(self, name: str, default: Any = None) -> Any:
        self._used.add(name)
        default_value = self._defaults.get(name)
        value = self._fields.get(name, default_value)
        return default if value is None and default_value is None else value

    def _is_null(self, name: str) -> bool:
        """Whether a field is null, or missing with a default of null."""
        return self._get(name) is None or (self.is_present(name) and not self.has(name))

    def _wrong(self, name: str, value: object, expected: str) -> CostGraphError:
        if value is None:
            return FormatError(f"{self.place}: {name} is missing, expected {expected}")
        return FormatError(f"{self.place}: {name} is {shown(value)}, expected {expected}")

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer."""
        value = self._get(name, default)
        if not _is_size(value, minimum):
            raise self._wrong(name, value, f"an integer of at least {minimum} and below 2**63")
        return int(value)

    def optional(self, name: str) -> int | None:
        """Return an integer, or None if the field is null or has a default of null."""
        return None if self._is_null(name) else self.size(name)

    def size_or_auto(self, name: str, auto: int) -> int:
        """Return an integer, or `auto` if the field is "auto"."""
        return auto if _same(self._get(name), "auto") else self.size(name)

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        """Return a number below 2**63."""
        value = self._get(name, default)
        if not _is_finite(value) or (above is not None and value <= above):
            expected = "a number" if above is None else f"a number above {above}"
            raise self._wrong(name, value, f"{expected}, below 2**63")
        return float(value)

    def factor(self, name: str) -> float | None:
        """Return a positive number, or None if the field is null or has a default of null."""
        return None if self._is_null(name) else self.number(name, above=0)

    def flag(self, name: str, default: bool | None = None, *, null: bool | None = None) -> bool:
        """Return a flag; `null` is the meaning of null, if transformers accepts it."""
        value = self._get(name, default)
        value = null if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Collection[str], default: str | None = None) -> str:
        """Return one of some words; raise UnsupportedError for others."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise UnsupportedError(f"{self.place}: {name} is {shown(value)}, expected one of {', '.join(choices)}")
        return value

    def activation(self, name: str, default: str | None = None) -> str:
        """Return the name of an activation function in `costgraph.ops.elementwise`."""
        return ACTIVATIONS[self.choice(name, choices=ACTIVATIONS, default=default)]

    def labels(self) -> int:
        """Return the number of classes, which transformers stores as a mapping of names."""
        names = self._get("id2label")
        if names is None:
            return self.size("num_labels", default=2)
        keys = {int(k) for k in names if _is_index(k)} if isinstance(names, Mapping) else set()
        if not keys or len(keys) != len(names):
            raise self._wrong("id2label", names, "a non-empty object from class numbers to names")
        self.expect("num_labels", len(keys))
        return len(keys)

    def sizes(self, name: str, minimum: int = 1, *, empty: bool = False, limit: int = _STAGE_LIMIT) -> list[int]:
        """Return a list of integers; with `empty` it may be empty."""
        value = self._get(name, [] if empty else None)
        if not isinstance(value, list) or not (value or empty) or not all(_is_size(n, minimum) for n in value):
            raise self._wrong(name, value, f"a list of integers of at least {minimum}")
        if len(value) > limit:
            raise UnsupportedError(f"{self.place}: {name} has {len(value)} numbers, expected at most {limit}")
        return list(value)

    def words(self, name: str) -> list[str]:
        """Return a list of strings, empty if the field is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(n, str) for n in value):
            raise self._wrong(name, value, "a list of strings")
        return list(value)

    def word(self, name: str) -> str:
        """Return a string."""
        value = self._get(name)
        if not isinstance(value, str):
            raise UnsupportedError(f"{self.place} is {shown(self._fields)}, expected {name} to be a string")
        return value

    def nested(self, name: str, kind: str = "") -> Config:
        """Return a nested configuration, such as that of a vision tower, with its own model type."""
        value = self._get(name)
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        nested = Config(string_keyed(value, f"{self.place}: {name}"), f"{self.place}: {name}")
        nested.apply_defaults(kind)
        self._nested.append(nested)
        return nested

    def layer_types(
        self, kind_of_type: Mapping[str, str], depth: int, rule: Sequence[str]
    ) -> tuple[tuple[str, ...], int]:
        """Return the kinds of layers in one period, and the length of a final partial period.

        `of` maps the words of the file to kinds; `rule` is the repeating pattern if the file lists no layers.
        """
        listed = self._get("layer_types", list(rule[:depth]))
        if (
            not isinstance(listed, list)
            or not listed
            or not all(isinstance(n, str) and n in kind_of_type for n in listed)
        ):
            raise UnsupportedError(
                f"{self.place}: layer_types is {shown(listed)}, expected a list of {', '.join(kind_of_type)}"
            )
        if self.has("layer_types") and len(listed) != depth:
            raise FormatError(
                f"{self.place}: layer_types has {len(listed)} entries, expected one for each of {depth} layers"
            )
        return self.period("layer_types", [kind_of_type[layer_type] for layer_type in listed], depth)

    def period(self, name: str, kinds: Sequence[str], depth: int) -> tuple[tuple[str, ...], int]:
        """Return the shortest period of the layers' kinds, and the length of a final partial period."""
        length = _period(kinds)
        if depth > len(kinds) and len(kinds) % length:  # the given pattern restarts within the shorter period
            length = len(kinds)
        runs = sum(1 for _ in groupby(kinds[:length]))
        if runs > _RUN_LIMIT:
            raise UnsupportedError(
                f"{self.place}: {name} has {runs} runs of equal layers before it repeats, expected at most {_RUN_LIMIT}"
            )
        return tuple(kinds[:length]), depth % length

    def list_length(self, depth: int) -> int:
        """Return the length of an aperiodic list of layers; raise UnsupportedError if it is too long."""
        if depth > _LIST_LIMIT:
            raise UnsupportedError(
                f"{self.place}: {depth} layers that do not repeat, expected at most {_LIST_LIMIT} such layers"
            )
        return depth

    def need(self, name: str, value: object) -> None:
        """Raise an error if a field is missing or has another value."""
        if not self.has(name):
            raise self._wrong(name, None, shown(value))
        self.expect(name, value)

    def expect(self, name: str, *values: object) -> None:
        """Raise an error if a field has another value than these, which is not supported."""
        value, default_value = self._get(name), self._defaults.get(name)
        if value is None and default_value is None:
            return
        if not any(_same(value, v) for v in values):
            raise UnsupportedError(
                f"{self.place}: {name} is {shown(value)}, expected {' or '.join(map(shown, values)) or 'nothing'}: "
                f"the cost of other values is not modelled"
            )

    def ignore(self, *names: str) -> None:
        """Mark fields that change no cost as read."""
        self._used.update(names)

    # -- rotary positions --------------------------------------------------------------------------------------------

    def _rope(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return rotary position parameters, for all layers or by kind of layer."""
        ropes: list[tuple[str, Mapping[str, Any]]] = []
        fields = [n for n in ("rope_parameters", "rope_scaling") if self.has(n)]
        for name in fields:
            value: Any = self._fields[name]
            if not isinstance(value, Mapping):
                raise self._wrong(name, value, "an object")
            inner = [(f"{name}: {k}", v) for k, v in value.items() if isinstance(v, Mapping)]
            ropes += [(name, value), *inner]
        for path, rope in ropes:
            kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
            if not isinstance(kind, str) or kind not in ROPES:
                raise UnsupportedError(f"{self.place}: {path}: {shown(kind)}, expected one of {', '.join(ROPES)}")
            if factor is not None and not (_is_finite(factor) and factor > 0):
                raise self._wrong(f"{path}: factor", factor, "a number above 0")
        if len(fields) == 2 and not _same(self._fields[fields[0]], self._fields[fields[1]]):
            raise self._wrong(fields[1], self._fields[fields[1]], f"the value of {fields[0]}, its alias")
        return ropes

    def partial_rotary(self) -> float:
        """Return the fraction of a head's elements that is rotated."""
        self._used |= {"partial_rotary_factor", "rotary_pct"}
        factors: dict[str, Any] = {n: self._fields.get(n) for n in ("partial_rotary_factor", "rotary_pct")}
        factors |= {f"{path}: partial_rotary_factor": r.get("partial_rotary_factor") for path, r in self._rope()}
        factors = {name: value for name, value in factors.items() if value is not None}
        for name, value in factors.items():
            if not _is_finite(value) or not 0 < value <= 1:
                raise self._wrong(name, float(value) if _is_finite(value) else value, "a number above 0, up to 1")
        if len(set(factors.values())) > 1:
            raise FormatError(f"{self.place}: {shown(factors, 200)}, expected one fraction of rotated elements")
        return float(next(iter(factors.values()), 1))

    def rotary_size(self, head: int) -> int:
        """Return the number of rotated elements per head, in whole pairs."""
        fraction = self.partial_rotary()
        if int(head * fraction) < 1:
            raise self._wrong(
                "partial_rotary_factor", fraction, f"a fraction that rotates at least one of {head} elements"
            )
        return -(-int(head * fraction) // 2) * 2

    # -- unread fields -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Raise an error for unread fields, which may change the cost."""
        if "partial_rotary_factor" not in self._used and self.partial_rotary() != 1:
            raise UnsupportedError(f"{self.place}: partial_rotary_factor is {self.partial_rotary()}, expected 1")
        self._used |= {"rope_parameters", "rope_scaling"}
        understood = self._used | NO_COST | {n for n in OFF if self._fields.get(n) is False}
        unread = sorted(n for n, v in self._fields.items() if v is not None and n not in understood)
        if unread:
            name = shown(unread[0]).strip("'")
            raise UnsupportedError(
                f"{self.place}: {name} is {shown(self._fields[unread[0]])}, expected a known field: "
                f"this one may change the cost"
            )
        for nested in self._nested:
            nested.finish()

    # -- common fields -----------------------------------------------------------------------------------------------

    def decoder(self) -> dict[str, int]:
        """Return the sizes of a decoder with the usual field names."""
        D, H = self.size("hidden_size"), self.size("num_attention_heads")
        # null means as many KV heads as query heads; so does a missing field if transformers has this default
        defaults_to_heads = self.is_present("num_key_value_heads") or "num_key_value_heads" in self._defaults
        sizes = {"D": D, "H": H, "G": self.size("num_key_value_heads", default=H if defaults_to_heads else None)}
        sizes |= {"K": self.size("head_dim", default=max(1, D // H)), "F": self.size("intermediate_size")}
        return sizes | {"L": self.size("num_hidden_layers"), "V": self.size("vocab_size")}

    @property
    def architecture(self) -> str:
        """The file's single architecture."""
        value = self._fields.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
            raise FormatError(f"{self.place}: architectures is {shown(value)}, expected a list of one name")
        return value[0]

    @property
    def is_causal_lm(self) -> bool:
        """Whether transformers computes the architecture's loss with `ForCausalLMLoss`."""
        return self.architecture.endswith(("ForCausalLM", "LMHeadModel"))

    @property
    def dtype(self) -> str | None:
        """The format of the weights, None if the file states none."""
        value = self._fields.get("dtype" if self.has("dtype") else "torch_dtype")
        if value is None:
            return None
        formats = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        if name not in formats:
            raise UnsupportedError(f"{self.place}: dtype is {shown(value)}, expected one of {', '.join(formats)}")
        return formats[name]


def _same(a: object, b: object) -> bool:
    """Whether two values are equal, with true and 1 distinct; mappings passed from Python may hold any values."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


def _is_size(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= _LARGEST_SIZE


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and _is_within(value)


def _is_within(value: Any) -> bool:
    return bool(-_LARGEST_SIZE <= value <= _LARGEST_SIZE)


def _is_index(text: object) -> bool:
    return isinstance(text, int) or (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20)


def _period(kinds: Sequence[str]) -> int:
    """Return the shortest period of a list, which may end within a period, by its longest border."""
    borders, length = [0], 0
    for kind in kinds[1:]:
        while length and kind != kinds[length]:
            length = borders[length - 1]
        length += kind == kinds[length]
        borders.append(length)
    return len(kinds) - length


def string_keyed(fields: Mapping[Any, object], place: str) -> dict[str, object]:
    """Return the fields; raise an error if a key is not a string."""
    checked = dict(fields)
    wrong = next((name for name in checked if not isinstance(name, str)), "")
    if wrong != "":
        raise FormatError(f"{place}: field name {shown(wrong)}, expected a string")
    return checked


# -- config file -------------------------------------------------------------------------------------------------------

_FILE_LIMIT = 2**20  # bytes: configurations have a few thousand


def read_config(path: object) -> Config:
    """Read a configuration from a file, a folder, a GGUF file, a mapping of its fields, or a transformers object."""
    as_fields = None if isinstance(path, type) else getattr(path, "to_dict", None)
    if callable(as_fields):
        path = as_fields()
    if isinstance(path, Mapping):
        return Config(string_keyed(path, "config"), "config")
    if not isinstance(path, str | os.PathLike):
        raise FormatError(
            f"from_config of {type(path).__name__}, expected a path, a mapping, or a configuration of transformers"
        )
    # a path that does not exist is treated as a file
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    place = place_of(file)
    if os.fspath(file).lower().endswith(".gguf"):
        from .gguf_config import gguf_config

        return Config(string_keyed(gguf_config(file), place), place)
    text = read_text(file, place, _FILE_LIMIT, "a config.json")
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {shown(str(error), 200)}, expected JSON") from None
    if not isinstance(fields, Mapping):
        raise FormatError(f"{place}: {shown(fields)}, expected an object")
    return Config(string_keyed(fields, place), place)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} twice in one object, expected it once")
    return fields


# -- quantization ------------------------------------------------------------------------------------------------------
# `quantization_config`, for checkpoints whose format `quantize` supports.

#: Decoders whose layers consist of linear layers and norms.
_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3"})
#: Modules that are never quantized, so that `modules_to_not_convert` may name them.
_NEVER_QUANTIZED = re.compile(
    r"((model\.)?(embed_tokens|norm)|lm_head|(mlp\.)?gate|model\.layers\.(\d{1,4}|\*)\.(mlp\.(gate|router)|"
    r"(input|post_attention)_layernorm|self_attn\.[qk]_norm))"
)


def formats_of(c: Config, kind: str) -> Callable[[cg.Graph], cg.Graph] | None:
    """Return a function that quantizes a model as the file says, None if it is not quantized.

    Raise UnsupportedError if the method is unknown, or quantizes other weights of this model than `quantize` does.
    """
    if not c.has("quantization_config"):
        return None
    section = c.nested("quantization_config")
    method = section.word("quant_method")
    read, kinds = _METHODS.get(method, (None, frozenset()))
    if read is None or kind not in kinds:
        model_kind = f" of a {kind} model" if read else ""
        raise UnsupportedError(
            f"{c.place}: quantization_config has quant_method {shown(method)}, expected one of {', '.join(_METHODS)}: "
            f"its stored weights{model_kind} are not modelled; pass dtype= for the unquantized model"
        )
    options = read(section, c)
    unquantized = section.words("modules_to_not_convert")
    matches = (
        _NEVER_QUANTIZED.fullmatch(n) or ("skip" in options and n == "model.layers.*.self_attn") for n in unquantized
    )
    unsupported = next((n for n, matched in zip(unquantized, matches, strict=True) if not matched), None)
    if unsupported is not None or (unquantized and "skip" not in options and "lm_head" not in unquantized):
        raise UnsupportedError(
            f"{section.place}: modules_to_not_convert has {shown(unsupported or unquantized)}, expected only "
            f"modules that are never quantized: lm_head, embeddings, norms and the router"
        )
    return lambda graph: cg.quantize(graph, **options)


def _fp8(c: Config, model: Config) -> dict[str, Any]:
    """Read fine-grained fp8: weights in 128 x 128 blocks, activations in groups of 128 per token (DeepSeek-V3)."""
    c.expect("fmt", "e4m3")
    c.expect("activation_scheme", "dynamic")
    c.expect("scale_fmt", "float")
    c.need("weight_block_size", [128, 128])
    if model.has("moe_intermediate_size") and model.size("moe_intermediate_size") % 128:
        raise UnsupportedError(
            f"{c.place}: blocks of 128 rows, expected moe_intermediate_size to be a multiple of 128, since experts "
            f"share no block"
        )
    return {"weights": "fp8_e4m3_b128x128_fp32", "activations": "fp8_e4m3_g128_fp32"}


def _mxfp4(c: Config, model: Config) -> dict[str, Any]:
    """Read MXFP4 as in GPT-OSS: only expert matrices are quantized, whatever the file lists."""
    c.expect("dequantize", False)
    return {"weights": "mxfp4", "skip": ["attention", "head", "router"]}


def _awq(c: Config, model: Config) -> dict[str, Any]:
    """Read AWQ: fp16 scales and zero points for groups of each column."""
    c.need("bits", 4)
    c.need("zero_point", True)
    c.expect("version", "gemm", "GEMM")
    return {"weights": "int4", "group": c.size("group_size"), "scale": "fp16", "zero": True}


def _gguf(c: Config, model: Config) -> dict[str, Any]:
    """Read a GGUF mixture, given by name."""
    return {"weights": c.word("mixture")}


#: The reader of each method, and the model types for which it quantizes the same weights as `quantize`.
_METHODS: Mapping[str, tuple[Callable[[Config, Config], dict[str, Any]], frozenset[str]]] = {
    "awq": (_awq, _DENSE),
    "gguf": (_gguf, frozenset({"llama", "mixtral", "qwen2", "qwen3"})),
    "fp8": (_fp8, _DENSE | {"deepseek_v3", "qwen3_moe"}),
    "mxfp4": (_mxfp4, frozenset({"gpt_oss"})),
}
