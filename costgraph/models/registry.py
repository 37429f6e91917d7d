"""The model registry: names, presets and supported architectures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from inspect import signature
from numbers import Real
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from ..algebra.symbols import shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import BindingError, FormatError, GraphError, UnsupportedError
from ..ir.graph import Graph, bindings, known_names, need_flag
from ..notation.validation import with_earlier_keywords
from . import (
    alexnet,
    bert,
    clip,
    convnext,
    deepseek,
    densenet,
    dit,
    dlrm,
    efficientnet,
    falcon,
    gemma,
    gpt2,
    gpt_oss,
    linear_attention,
    llama,
    mamba,
    mistral,
    mixtral,
    mlp,
    mobilenet,
    olmo,
    phi,
    qwen,
    qwen_moe,
    resnet,
    rnn,
    rwkv,
    swin,
    t5,
    unet,
    vgg,
    vit,
    whisper,
    xlstm,
)
from .config import formats_of, read_config
from .family import Family, Preset

__all__ = [
    "FAMILIES",
    "from_config",
    "is_known",
    "load",
    "names",
    "PARAMETERS",
    "published",
]


# -- registry ----------------------------------------------------------------------------------------------------------

_MODULES = (
    alexnet, bert, clip, convnext, deepseek, densenet, dit, dlrm, efficientnet, falcon, gemma, gpt2, gpt_oss,
    linear_attention, llama, mamba, mistral, mixtral, mlp, mobilenet, olmo, phi, qwen, qwen_moe, resnet, rnn, rwkv,
    swin, t5, unet, vgg, vit, whisper, xlstm,
)  # fmt: skip

#: All model families.
FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)

#: The family of each model, by name.
_MODELS = {name: family for family in FAMILIES for name in family.presets}

#: The family of each transformers architecture, by name.
_ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}


def names() -> list[str]:
    """List the names of models that `load` accepts.

    Returns
    -------
    list of str
        In alphabetical order.

    Examples
    --------
    >>> import costgraph as cg
    >>> [name for name in cg.models.names() if name.startswith("gpt2")]
    ['gpt2', 'gpt2-large', 'gpt2-medium', 'gpt2-xl']
    """
    return sorted(_MODELS)


@with_earlier_keywords
def load(
    name: str,
    symbolic: bool = False,
    attention: str = "flash",
    dropout: float = 0,
    dtype: str | DType = "bf16",
    eager_ops: bool = False,
    **structure: object,
) -> Graph:
    """Declare a model: a symbolic graph whose `defaults` bind the published sizes.

    Parameters
    ----------
    name : str
        One of `names()`.
    symbolic : bool
        Leave every size symbolic, including the depth.
    attention : str
        flash: one fused kernel that skips masked pairs. eager: separate ops for scores, scale, mask, softmax and
        weighted sum. Models without attention accept either.
    dropout : float
        Dropout probability, wherever the reference module applies dropout in training.
    dtype : str or DType
        Floating format of parameters and activations.
    eager_ops : bool
        Decompose functions into the ops that the reference module runs in eager mode, and keep tensors alive as long as
        its Python variables do. By default each function is one kernel, and a tensor dies after its last reader.
        Available for GPT-2, Llama and the mlp.
    **structure : object
        Further options of the family, such as `routing="expected"` for a mixture of experts, `absorbed=True` for
        latent attention, or `system="megatron"` for layers as in Megatron-LM; by default as published.

    Returns
    -------
    Graph
        From the inputs of the reference module, such as tokens (B, S) or images, to logits or features; `loss` is named
        if there is one outside of the graph. B and S are symbolic, and each analysis can override any default.

    Raises
    ------
    GraphError
        If the model is unknown, or an argument is invalid.
    FormatError
        If the number format is unknown or is not a floating format.
    UnsupportedError
        If `eager_ops` is not available for the model.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("llama-3-8b")
    >>> cg.param_count(g), cg.matmul_flops(g, B=1, S=8192)
    (8030261248, 140550657277952)
    >>> cg.param_count(g, L=1)
    1268789248
    >>> cg.param_count(cg.models.load("mlp", symbolic=True))
    C*F + C + D*F + F**2*L + F*L + F
    """
    if not isinstance(name, str) or name not in _MODELS:
        near = get_close_matches(shown(name).lower().strip("'"), _MODELS, n=4, cutoff=0.5)
        raise GraphError(f"model {shown(name)}: unknown, expected one of {', '.join(near or names())}")
    need_flag(f"model {name!r}", eager_ops=eager_ops, symbolic=symbolic)
    family = _MODELS[name]
    preset = family.presets[name]
    return _declare(family, preset, structure, name, attention, dropout, dtype, eager_ops=eager_ops, symbolic=symbolic)


def from_config(
    path: object,
    symbolic: bool = False,
    attention: str = "flash",
    dropout: float = 0,
    dtype: str | DType | None = None,
    **structure: object,
) -> Graph:
    """Declare the model of a transformers config.json; transformers itself is not required.

    Parameters
    ----------
    path : str, path-like, mapping or transformers.PreTrainedConfig
        A file, a folder with a `config.json`, a GGUF file, the fields, or a configuration object.
    symbolic, attention, dropout : object
        As in `load`.
    dtype : str or DType, optional
        Floating format; by default that of the file, or bf16, with weights quantized by the file's
        `quantization_config`: fp8 of DeepSeek-V3, mxfp4 of GPT-OSS, AWQ, GGUF mixtures. An explicit format applies to
        all parameters.
    **structure : object
        As in `load`.

    Returns
    -------
    Graph
        A graph as from `load`, with the sizes of the file as defaults. The loss of causal language models is that of
        transformers, which casts logits to fp32; presets of `load` name `cross_entropy`.

    Raises
    ------
    UnsupportedError
        If the architecture or quantization method is unknown, or a field that may change the cost is not supported; the
        message names it. Also if there are more than 32 stages, or 128 runs of equal layers without a period.
    FormatError
        If the file cannot be read, or a field is missing, invalid, duplicated, or given under two names with different
        values. Fields with a default in transformers are optional, except sizes that every file states.

    Examples
    --------
    >>> import costgraph as cg
    >>> fields = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_attention_heads": 32,
    ...           "num_key_value_heads": 8, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256,
    ...           "tie_word_embeddings": True}
    >>> cg.param_count(cg.models.from_config(fields))
    1235814400
    """
    config = read_config(path)
    name = config.architecture
    family = _ARCHITECTURES.get(name)
    if family is None or family.read is None:
        near = get_close_matches(name, _ARCHITECTURES, n=4, cutoff=0.5) or sorted(_ARCHITECTURES)
        raise UnsupportedError(
            f"{config.place}: architecture {shown(name)} is unknown, expected one of {', '.join(near)}; or trace the "
            f"transformers model: costgraph.torch.from_config"
        )
    need_flag(f"model {name!r}", symbolic=symbolic)
    config.apply_defaults(family.architectures[name])
    preset = family.read(config)
    stored = formats_of(config, family.architectures[name]) if dtype is None else None
    config.ignore("quantization_config")
    config.finish()
    format_ = config.dtype or "bf16" if dtype is None else dtype
    graph = _declare(family, preset, structure, name, attention, dropout, format_, eager_ops=False, symbolic=symbolic)
    try:
        bindings(graph, {})  # reject sizes that violate conditions of the graph
    except BindingError as error:
        raise FormatError(f"{config.place}: {error}") from None
    if config.is_causal_lm:
        graph.loss = "transformers"
    return graph if stored is None else stored(graph)


def is_known(path: object) -> bool:
    """Whether `from_config` supports the architecture of a configuration."""
    family = _ARCHITECTURES.get(read_config(path).architecture)
    return family is not None and family.read is not None


def _declare(
    family: Family,
    preset: Preset,
    structure: dict[str, object],
    name: str,
    attention: str,
    dropout: float,
    dtype: str | DType,
    *,
    eager_ops: bool,
    symbolic: bool,
) -> Graph:
    """Declare a model of a family with the chosen structure."""
    place = f"model {name!r}"
    if not isinstance(attention, str) or attention not in ("flash", "eager"):
        raise GraphError(f"{place}: attention {shown(attention)}, expected 'flash' or 'eager'")
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise GraphError(f"{place}: dropout {shown(dropout)}, expected a number from 0 to below 1")
    format_ = find_dtype(dtype)
    if format_.kind != "float":
        raise FormatError(f"{place}: dtype {format_.name!r}, expected a floating format")
    if eager_ops and not family.eager_ops:
        raise UnsupportedError(f"{place}: eager_ops=True, expected a model that supports it")
    declare = partial(family.declare, eager_ops=True) if eager_ops else family.declare
    options = [p.name for p in signature(family.declare).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(set(structure) - set(options))
    if unknown:
        raise GraphError(f"{place}: {unknown[0]}={shown(structure[unknown[0]])}, expected {_alternatives(options)}")
    _need_options(place, family.declare, structure)
    graph = declare(name, attention, dropout, format_.name, **{**preset.structure, **structure})
    names = known_names(graph)  # options may change which sizes exist
    with graph:
        graph.legend = family.describe(names)
        if not symbolic:
            graph.defaults = graph.defaults | {name: size for name, size in preset.sizes.items() if name in names}
    return graph


def _need_options(place: str, declare: Callable[..., Graph], structure: dict[str, object]) -> None:
    """Raise an error for options that do not match the annotations of the declaration: flags or literals."""
    hints = get_type_hints(declare)
    for name, value in structure.items():
        hint = hints.get(name)
        choices = (True, False) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
        if choices and not any(type(value) is type(c) and value == c for c in choices):
            expected = " or ".join(map(repr, choices))
            raise GraphError(f"{place}: {name}={shown(value)}, expected {expected}")


def _alternatives(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if names else "no structure options"


# -- published parameters ----------------------------------------------------------------------------------------------
# Stored in a file, so that listing all models declares none.

PARAMETERS = Path(__file__).with_name("parameters.json")
"""Number of parameters of each model's public module or, if none is public, of the declaration.
`tests/with_torch/zoo_page.py` generates the file, and tests compare every declaration with it."""


def published() -> Iterator[tuple[str, int, Mapping[str, int]]]:
    """Yield the name, number of parameters, and sizes of every model."""
    parameters = json.loads(PARAMETERS.read_text(encoding="utf-8"))
    presets = {name: preset for family in FAMILIES for name, preset in family.presets.items()}
    for name, preset in sorted(presets.items()):
        yield name, parameters[name], preset.sizes
