"""Mutated small configs, and parameters and FLOPs for the modules that transformers builds from them.

Shared parameters count once; torch's counter gives the FLOPs.
"""

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import config_files
import torch
from config_files import FILES
from lazy import lazy_import
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.models.config import ACTIVATIONS

transformers = lazy_import("transformers")

B, S, M = 2, 5, 7
#: Modules with more parameters are counted without running.
LARGEST_RUN = 2_000_000

#: Image models, whose sizes include an image side.
IMAGES = ("ViT", "ConvNext", "ResNet", "Swin", "MobileNet", "EfficientNet")
#: Recurrences whose module runs another algorithm: only their parameters are compared.
RECURRENT = ("Mamba", "xLSTM")


def file_of(name: str, *, whole: bool) -> dict[str, Any]:
    """Return a config as users write it, or with every field of transformers."""
    lean = config_files.file_of(name)
    if not whole:
        return lean
    config = transformers.CONFIG_MAPPING[FILES[name][0]].from_dict(copy.deepcopy(lean)).to_dict()
    return json.loads(json.dumps(config, default=str))


# -- transformers ------------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """Transformers builds no module from a config."""


def module_of(fields: dict[str, Any], device: str = "meta") -> torch.nn.Module:
    """Build the module of a config on the meta device."""
    fields = copy.deepcopy(fields)
    fields.pop("dtype", None), fields.pop("torch_dtype", None)
    try:
        config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        config._attn_implementation = config._experts_implementation = "eager"
        with torch.device(device):
            return getattr(transformers, fields["architectures"][0])(config).eval()
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {str(error)[:200]}") from None


def parameters_of(module: torch.nn.Module) -> int:
    """Count the parameters of a module, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def inputs_of(fields: dict[str, Any], config: Any) -> dict[str, torch.Tensor]:
    name = fields["architectures"][0]
    tokens = torch.zeros(B, S, dtype=torch.int64)
    if name.startswith("T5"):
        return {"input_ids": torch.zeros(B, M, dtype=torch.int64), "decoder_input_ids": tokens}
    if name.startswith("Whisper"):
        sound = torch.zeros(B, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "decoder_input_ids": tokens}
    if name.startswith("CLIP"):
        vision, text = config.vision_config, config.text_config
        tokens = torch.zeros(B, text.max_position_embeddings, dtype=torch.int64)
        return {"input_ids": tokens, "pixel_values": torch.zeros(B, vision.num_channels, *[vision.image_size] * 2)}
    if name.startswith(IMAGES):
        return {"pixel_values": torch.zeros(B, config.num_channels, *[getattr(config, "image_size", 64)] * 2)}
    return {"input_ids": tokens}


def flops_of(module: torch.nn.Module, fields: dict[str, Any]) -> int:
    """Return torch's FLOP count of a config's module."""
    if next(module.parameters()).is_meta:
        raise RefusedError("no values to run on")
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(**inputs_of(fields, module.config))
    except Exception as error:
        raise RefusedError(f"crash, {type(error).__name__}: {str(error)[:200]}") from None
    return counter.get_total_flops()


# -- costgraph ---------------------------------------------------------------------------------------------------------


def sizes_of(graph: cg.Graph, fields: dict[str, Any]) -> dict[str, int]:
    """Return values for the sizes that a config leaves open."""
    name = fields["architectures"][0]
    if name.startswith(IMAGES):
        return {"B": B} | ({"R": 64} if name.startswith("ResNet") and "image_size" not in fields else {})
    return {"B": B} if name.startswith("CLIP") else {"B": B, "S": S} | ({"M": M} if name.startswith("T5") else {})


def graph_of(fields: dict[str, Any], attention: str = "eager") -> cg.Graph:
    """Declare a config, with the module's attention implementation."""
    return cg.models.from_config(copy.deepcopy(fields), attention=attention)


def own_flops(graph: cg.Graph, fields: dict[str, Any]) -> int:
    return int(cg.matmul_flops(graph, count="full", **sizes_of(graph, fields)))


# -- mutations -------------------------------------------------------------------------------------------------------


class Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def names_in(name: str) -> list[str]:
    """Return every field that transformers or the library reads, including aliases."""
    kind = transformers.CONFIG_MAPPING[FILES[name][0]]
    names = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map) | set(file_of(name, whole=True))
    names |= {"num_experts", "num_local_experts", "num_hidden_layers", "num_labels", "rope_scaling", "rope_parameters",
            "partial_rotary_factor", "is_gated_act", "dense_act_fn", "hidden_size", "head_dim", "layer_types",
            "mlp_layer_types", "tie_word_embeddings", "sliding_window_pattern", "qk_head_dim", "num_layers",
            "scale_decoder_outputs", "n_embed", "n_head", "n_layer", "text_config_dict", "vision_config_dict",
            "quantization_config", "pretraining_tp", "num_stages", "intermediate_size", "attention_bias"}  # fmt: skip
    return sorted(names - {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"})


WORDS = [*ACTIVATIONS, *(f"gated-{a}" for a in ACTIVATIONS), "banana", "", "auto", "basic", "bottleneck", "greedy",
         "group_limited_greedy", "full_attention", "sliding_attention", "gated"]  # fmt: skip


def values_for(value: Any) -> list[Any]:
    """Return replacement values for a field: with its type, edge cases, and other types."""
    plain = [None, True, False, 0, 1, 2, 3, 5, -1, 0.5, "banana", [], {}]
    if isinstance(value, bool):
        return [not value, None, 0, 1, 2, "true", "", [], 0.5]
    if isinstance(value, int):
        near = [value + 1, value - 1, 2 * value, 3 * value, value // 2, 1, 2, 3, 4, 6, 8, 0, -1, -value]
        return [*near, None, str(value), float(value), value + 0.5, True, False, [value], [value, value]]
    if isinstance(value, float):
        return [0.0, -1.0, -value, 2 * value, value / 2, 0.5, 1.0, 0.25, 1, 2, 0, 1.1, float("nan"), float("inf"),
                1e-9, 1e30, None, str(value), True, [value]]  # fmt: skip
    if isinstance(value, str):
        return [*WORDS, None, 0, 1, True, []]
    if isinstance(value, list):
        changed = [[], value[::-1], value[:-1], value[1:], [*value, *value[-1:]], value * 2, [*value[:-1], 1],
                   [*value[:-1], 0], [*value[:-1], -1], [*value[:-1], "x"], [*value[:-1], None], value[:1]]  # fmt: skip
        changed += [[2 * v if isinstance(v, int) else v for v in value], [0], [1], [0, 2], ["full_attention"] * 3]
        return [*changed, ["full_attention", "sliding_attention", "full_attention"], None, 3, "banana", {}]
    if isinstance(value, dict):
        inner = [{**value, k: v} for k in value for v in values_for(value[k])[:40]]
        parts = [{k: v for k, v in value.items() if k != left} for left in value]
        return [
            {},
            None,
            1,
            "banana",
            [],
            *inner,
            *parts,
            {"0": "a", "1": "b", "2": "c"},
            {"0": "a", "00": "b"},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            {"factor": float("nan")},
            {"factor": 0},
        ]
    lists = [["full_attention"] * 3, ["sliding_attention"] * 3, ["dense", "sparse", "sparse"], [0], [1, 2], [0, 9]]
    return [*plain, 7, 8, *lists, {"rope_type": "linear", "factor": 2.0}, {"partial_rotary_factor": 0.5},
            {"0": "a", "1": "b", "2": "c"}, {"0": "a", "00": "b"}, {"a": "b"}, "gelu", "relu"]  # fmt: skip


def mutations(name: str, *, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yield each field with each replacement value."""
    fields = file_of(name, whole=whole)
    every = file_of(name, whole=True)
    for field in names_in(name):
        if field in fields:
            yield field, MISSING
        for value in values_for(fields.get(field, every.get(field))):
            yield field, value


def changed(fields: dict[str, Any], *changes: tuple[str, Any]) -> dict[str, Any]:
    mutated = {**fields, **dict(changes)}
    return {k: v for k, v in mutated.items() if v is not MISSING}
