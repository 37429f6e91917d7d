"""Reading `quantization_config`: in which formats the weights of a checkpoint are, where `quantize` says it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import costgraph as cg

from ..algebra.symbols import shown
from ..errors import UnsupportedError
from .config import Config

__all__ = ["formats_of"]

#: Decoders whose layers hold linear layers and norms alone.
_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3"})
#: Modules whose weights stay: what a file says of them in `modules_to_not_convert` is so anyway.
_KEPT = re.compile(
    r"((model\.)?(embed_tokens|norm)|lm_head|(mlp\.)?gate|model\.layers\.(\d{1,4}|\*)\.(mlp\.(gate|router)|"
    r"(input|post_attention)_layernorm|self_attn\.[qk]_norm))"
)


def formats_of(c: Config, kind: str) -> Callable[[cg.Graph], cg.Graph] | None:
    """Return what stores the weights of a model as a file says, or None where it says nothing.

    UnsupportedError if the method is not known, or takes other weights of this model than `quantize` does: the text
    names it.
    """
    if not c.has("quantization_config"):
        return None
    said = c.part("quantization_config")
    method = said.word("quant_method")
    read, kinds = _METHODS.get(method, (None, frozenset()))
    if read is None or kind not in kinds:
        of = f" of a {kind} model" if read else ""
        raise UnsupportedError(
            f"{c.place}: quantization_config has quant_method {shown(method)}, expected one of {', '.join(_METHODS)}: "
            f"how it stores which weights{of} is not known; dtype= declares the model as it was before"
        )
    options = read(said, c)
    stay = said.words("modules_to_not_convert")
    known = (_KEPT.fullmatch(n) or ("skip" in options and n == "model.layers.*.self_attn") for n in stay)
    other = next((n for n, so in zip(stay, known, strict=True) if not so), None)
    if other is not None or (stay and "skip" not in options and "lm_head" not in stay):
        raise UnsupportedError(
            f"{said.place}: modules_to_not_convert has {shown(other or stay)}, expected what stays anyway: lm_head, "
            f"embeddings, norms and the router"
        )
    return lambda graph: cg.quantize(graph, **options)


def _fp8(c: Config, whole: Config) -> dict[str, Any]:
    """Read fine-grained fp8: weights in blocks of 128 x 128, activations in 128 elements of a token (DeepSeek-V3)."""
    c.expect("fmt", "e4m3")
    c.expect("activation_scheme", "dynamic")
    c.expect("scale_fmt", "float")
    c.need("weight_block_size", [128, 128])
    if whole.has("moe_intermediate_size") and whole.size("moe_intermediate_size") % 128:
        raise UnsupportedError(
            f"{c.place}: blocks of 128 rows, expected moe_intermediate_size to be a multiple of it, so that experts "
            f"share no block"
        )
    return {"weights": "fp8_e4m3_b128x128_fp32", "activations": "fp8_e4m3_g128_fp32"}


def _mxfp4(c: Config, whole: Config) -> dict[str, Any]:
    """Read MXFP4 as GPT-OSS has it: the matrices of its experts alone, whatever else is named."""
    c.expect("dequantize", False)
    return {"weights": "mxfp4", "skip": ["attention", "head", "router"]}


def _awq(c: Config, whole: Config) -> dict[str, Any]:
    """Read AWQ: scales in fp16 and zero points for groups of each column."""
    c.need("bits", 4)
    c.need("zero_point", True)
    c.expect("version", "gemm", "GEMM")
    return {"weights": "int4", "group": c.size("group_size"), "scale": "fp16", "zero": True}


def _gguf(c: Config, whole: Config) -> dict[str, Any]:
    """Read a mixture of GGUF, whose name is its own."""
    return {"weights": c.word("mixture")}


#: How each method is read, and the types of models in which it takes the weights that `quantize` takes.
_METHODS: Mapping[str, tuple[Callable[[Config, Config], dict[str, Any]], frozenset[str]]] = {
    "awq": (_awq, _DENSE),
    "gguf": (_gguf, frozenset({"llama", "mixtral", "qwen2", "qwen3"})),
    "fp8": (_fp8, _DENSE | {"deepseek_v3", "qwen3_moe"}),
    "mxfp4": (_mxfp4, frozenset({"gpt_oss"})),
}
