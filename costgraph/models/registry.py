"""Names of models, and what declares each of them."""

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

#: Every family of the zoo.
FAMILIES: tuple[Family, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)

#: The family of each model, by its name.
_MODELS = {name: family for family in FAMILIES for name in family.presets}

#: The family of each architecture of transformers, by its name.
_ARCHITECTURES = {name: family for family in FAMILIES for name in family.architectures}


def names() -> list[str]:
    """List the models that `load` knows.

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


def load(
    name: str,
    symbolic: bool = False,
    attention: str = "flash",
    dropout: float = 0,
    dtype: str | DType = "bf16",
    composed: bool = False,
    **structure: object,
) -> Graph:
    """Declare a model: a symbolic graph whose `defaults` bind the published sizes.

    Parameters
    ----------
    name : str
        One of `names()`.
    symbolic : bool
        Leave every size open, depth included.
    attention : str
        flash: one kernel that computes the pairs of the causal mask. eager: an op each for scores, scale,
        mask, softmax and reduction. Models without attention take either.
    dropout : float
        Probability, wherever the reference module drops out when it trains.
    dtype : str or DType
        Floating format of parameters and activations.
    composed : bool
        As the eager code of the reference module runs it: functions that it composes of several ops are those ops,
        and tensors that its Python variables name live as long. By default they are one kernel, and a tensor dies
        after the last op that reads it. Stated for GPT-2, Llama and the mlp.
    **structure : object
        What else of the family can be chosen, such as `routing="expected"` of a mixture of experts,
        `absorbed=True` of latent attention or `system="megatron"`, layers as Megatron-LM runs them; by default as
        published.

    Returns
    -------
    Graph
        From tokens (B, S), images, or what else the reference module takes, to logits or features, with `loss` named
        where there is one and not part of the graph. B and S are open; any default can be overridden where a
        question is asked.

    Raises
    ------
    GraphError
        If the model is unknown, or an argument is none.
    FormatError
        If the number format is unknown, or holds no fractions.
    UnsupportedError
        If nothing is stated of how eager code composes the model.

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
    need_flag(f"model {name!r}", composed=composed, symbolic=symbolic)
    family = _MODELS[name]
    preset = family.presets[name]
    return _declared(family, preset, structure, name, attention, dropout, dtype, composed=composed, symbolic=symbolic)


def from_config(
    path: object,
    symbolic: bool = False,
    attention: str = "flash",
    dropout: float = 0,
    dtype: str | DType | None = None,
    **structure: object,
) -> Graph:
    """Declare the model that a config.json of transformers describes; transformers itself is not needed.

    Parameters
    ----------
    path : str, path-like or mapping
        The file, a folder with a `config.json` in it, a GGUF file, or the fields themselves.
    symbolic, attention, dropout : object
        As in `load`.
    dtype : str or DType, optional
        Floating format; by default the one that the file names, bf16 where it names none, and what is quantized as its
        `quantization_config` says: fp8 of DeepSeek-V3, mxfp4 of GPT-OSS, AWQ, mixtures of GGUF. Given here, it is that
        of all parameters.
    **structure : object
        As in `load`.

    Returns
    -------
    Graph
        As `load` returns it, with the sizes of the file as defaults.

    Raises
    ------
    UnsupportedError
        If the architecture or the method of quantization is unknown, or a field may change the cost and is not
        understood: the text names it. So is what is too large: more than 32 stages, or 128 runs of equal layers that do
        not repeat.
    FormatError
        If the file cannot be read, or a field is missing or no size, stands there twice, or under two names with two
        values. What transformers has as a default, a file need not say, but for sizes that every file states.

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
            f"{config.place}: architecture {shown(name)} is not known, expected one of {', '.join(near)}; or one that "
            f"transformers builds: costgraph.torch.from_config traces it"
        )
    need_flag(f"model {name!r}", symbolic=symbolic)
    config.settle(family.architectures[name])
    preset = family.read(config)
    stored = formats_of(config, family.architectures[name]) if dtype is None else None
    config.ignore("quantization_config")
    config.finish()
    given = config.dtype or "bf16" if dtype is None else dtype
    graph = _declared(family, preset, structure, name, attention, dropout, given, composed=False, symbolic=symbolic)
    try:
        bindings(graph, {})  # sizes of the file that every question would refuse
    except BindingError as error:
        raise FormatError(f"{config.place}: {error}") from None
    return graph if stored is None else stored(graph)


def is_known(path: object) -> bool:
    """Whether `from_config` declares the architecture that a configuration names."""
    family = _ARCHITECTURES.get(read_config(path).architecture)
    return family is not None and family.read is not None


def _declared(
    family: Family,
    preset: Preset,
    structure: dict[str, object],
    name: str,
    attention: str,
    dropout: float,
    dtype: str | DType,
    *,
    composed: bool,
    symbolic: bool,
) -> Graph:
    """Declare a model of a family, with what was chosen of its structure."""
    place = f"model {name!r}"
    if not isinstance(attention, str) or attention not in ("flash", "eager"):
        raise GraphError(f"{place}: attention {shown(attention)}, expected 'flash' or 'eager'")
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise GraphError(f"{place}: dropout {shown(dropout)}, expected a number from 0 to below 1")
    format_ = find_dtype(dtype)
    if format_.kind != "float":
        raise FormatError(f"{place}: dtype {format_.name!r}, expected a floating format")
    if composed and not family.composed:
        raise UnsupportedError(f"{place}: composed=True, expected a model of which that is stated")
    declare = partial(family.declare, composed=True) if composed else family.declare
    known = [p.name for p in signature(family.declare).parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = sorted(set(structure) - set(known))
    if unknown:
        raise GraphError(f"{place}: {unknown[0]}={shown(structure[unknown[0]])}, expected {_listed(known)}")
    _need_options(place, family.declare, structure)
    graph = declare(name, attention, dropout, format_.name, **{**preset.structure, **structure})
    if not symbolic:
        names = known_names(graph)  # another structure may have other sizes
        with graph:
            graph.defaults = graph.defaults | {name: size for name, size in preset.sizes.items() if name in names}
    return graph


def _need_options(place: str, declare: Callable[..., Graph], structure: dict[str, object]) -> None:
    """Refuse options that are not of the type that the declaration annotates: a switch, or one of some words."""
    hints = get_type_hints(declare)
    for name, value in structure.items():
        hint = hints.get(name)
        choices = (True, False) if hint is bool else get_args(hint) if get_origin(hint) is Literal else ()
        if choices and not any(type(value) is type(c) and value == c for c in choices):
            expected = " or ".join(map(repr, choices))
            raise GraphError(f"{place}: {name}={shown(value)}, expected {expected}")


def _listed(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if names else "nothing of its structure to be chosen"


# -- published ---------------------------------------------------------------------------------------------------------
# What is published of each model, as a record: a list of all of them declares none.

PARAMETERS = Path(__file__).with_name("parameters.json")
"""Parameters of the public module of each model, or, where none is public, of the declaration.
`tests/with_torch/zoo_page.py` counts them, and tests hold every declaration to them."""


def published() -> Iterator[tuple[str, int, Mapping[str, int]]]:
    """Yield the name, the parameters, and the sizes of every model."""
    parameters = json.loads(PARAMETERS.read_text(encoding="utf-8"))
    presets = {name: preset for family in FAMILIES for name, preset in family.presets.items()}
    for name, preset in sorted(presets.items()):
        yield name, parameters[name], preset.sizes
