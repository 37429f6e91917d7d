"""Config of a model from the metadata of a GGUF file, in config.json terms."""

from __future__ import annotations

import os
from typing import Any

from ..algebra.symbols import shown
from ..errors import FormatError, UnsupportedError
from ..files.checkpoints import FILE_TYPES, Gguf, read_gguf
from ..text_file import place_of

__all__ = ["gguf_config"]


#: Architectures of transformers by GGUF architecture; llama with experts is Mixtral.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MOE_ARCHITECTURES = {"llama": "MixtralForCausalLM"}

#: Fields of a config.json by GGUF key, without the architecture prefix.
_FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "vocab_size": "vocab_size", "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
#: Float formats by their names in transformers.
_FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
#: Fields without a cost.
_NO_COST = ("context_length", "rope.", "attention.layer_norm_rms_epsilon")


def gguf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Translate GGUF metadata to fields of a config.json.

    Raise UnsupportedError for an unknown architecture, field or file type; the message names it.
    """
    file, place = read_gguf(os.fspath(path)), place_of(path)
    arch = file.fields.get("general.architecture")
    experts = bool(file.fields.get(f"{arch}.expert_count"))
    architectures = _MOE_ARCHITECTURES if experts else _ARCHITECTURES
    if not isinstance(arch, str) or arch not in architectures:
        suffix = " with experts" if experts else ""
        raise UnsupportedError(
            f"{place}: architecture {shown(arch)}{suffix}, expected one of {', '.join(architectures)}"
        )
    config = {"architectures": [architectures[arch]], "vocab_size": _vocabulary_size(file)} | _fields(file, arch, place)
    # a tied head is not stored a second time
    config["tie_word_embeddings"] = all(t.name != "output.weight" for t in file.tensors)
    return config | _formats(file, place)


def _vocabulary_size(file: Gguf) -> int | None:
    """Return the vocabulary size, which not every file states."""
    sizes = (t.shape[0] for t in file.tensors if t.name == "token_embd.weight" and t.shape)
    return next(sizes, file.lengths.get("tokenizer.ggml.tokens"))


def _fields(file: Gguf, arch: str, place: str) -> dict[str, Any]:
    config = {}
    for name in (*file.fields, *file.lengths):
        key = name.removeprefix(f"{arch}.")
        if key == name or key.startswith(_NO_COST):
            continue
        value = file.fields.get(name)
        if key == "attention.value_length" and value == file.fields.get(f"{arch}.attention.key_length"):
            continue
        if key in ("expert_count", "expert_used_count") and value == 0:
            continue
        if key not in _FIELDS or value is None:
            description = f"an array of {file.lengths[name]}" if value is None else shown(value)
            raise UnsupportedError(
                f"{place}: {name} is {description}, expected a number for one of {', '.join(_FIELDS)}"
            )
        config[_FIELDS[key]] = value
    return config


def _formats(file: Gguf, place: str) -> dict[str, Any]:
    number = file.fields.get("general.file_type")
    name = FILE_TYPES.get(number) if isinstance(number, int) else None
    if number is None:  # files may omit it: infer it from matrices of one float format
        stored = {t.format for t in file.tensors if len(t.shape) > 1}
        name = stored.pop() if len(stored) == 1 and stored <= _FLOATS.keys() else None
    if name is None:
        raise FormatError(
            f"{place}: general.file_type is {shown(number)}, expected one of {', '.join(map(str, FILE_TYPES))}"
        )
    if name.startswith("Q"):
        return {"quantization_config": {"quant_method": "gguf", "mixture": name}}
    return {"dtype": _FLOATS[name]}
