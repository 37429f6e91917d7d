"""Trace a Hugging Face transformers model of any installed architecture from its config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sympy import prevprime
from torch import nn

from ..algebra.symbols import is_name, shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import FormatError, GraphError, UnsupportedError
from ..ir.graph import Graph
from ..models.config import Config, read_config
from ..transforms.reroll import fold
from .lowering.context import torch_dtype
from .tracing import trace

__all__ = [
    "from_config",
]

#: Names in transformers; None keeps the default, which is SDPA if the class supports it.
_ATTENTION = {"flash": None, "eager": "eager"}
#: Trace sizes. They decide size-dependent branches; primes differ from other sizes.
_BATCH, _LENGTH = 3, 2053
#: Limit on layers and experts, which some classes create one by one. The largest models have about 130 and 512.
_MOST_LAYERS_OR_EXPERTS = 1024
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")


def from_config(
    path: object,
    attention: str = "flash",
    dtype: str | DType | None = None,
    device: str = "cuda",
    arch: str | None = None,
) -> Graph:
    """Trace the model that a config.json describes.

    Use this for architectures that `costgraph.models.from_config`, which needs no torch, does not know. The
    transformers class is built without weights and run once on tensors without data; stacks of equal layers are
    folded. Custom code in a configuration (`auto_map`) never runs.

    Parameters
    ----------
    path : str, path-like, mapping or transformers.PreTrainedConfig
        The file, its folder, or the fields.
    attention : str
        "flash": SDPA, with the kernel that torch selects. "eager": one op per step.
    dtype : str or DType, optional
        Floating-point format, by default that in the file, else bf16.
    device, arch : str, optional
        Target device as in `trace`, by default a GPU. No GPU is needed.

    Returns
    -------
    Graph
        The model in `eval()` mode without a cache. Inputs are tokens (B, S), plus (B, T) for encoder-decoder models, or
        B images. Outputs are only the token logits if the class returns any, otherwise everything. Depth is the symbol
        L (one per stack) with the file's layer count as default, or a number if no three consecutive layers are equal.
        Models with token logits have a loss: `transformers` if they are causal language models, else `cross_entropy`.

    Raises
    ------
    UnsupportedError
        If transformers is missing or lacks the architecture, a call has no rule, or the model is quantized or takes
        neither tokens nor images.
    FormatError
        If the file cannot be read, or transformers cannot build a model from its fields.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.torch import from_config
    >>> fields = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_size": 64,
    ...           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 5,
    ...           "vocab_size": 101, "tie_word_embeddings": False}
    >>> g = from_config(fields)
    >>> g.defaults, cg.param_count(g)
    ({'L': 5}, 167936)
    >>> 5 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 4 * 64) + 2 * 101 * 64 + 2 * 64  # layers, two tables, norm
    167936
    """
    config = read_config(path)
    if attention not in _ATTENTION:
        raise GraphError(f"{config.place}: attention {shown(attention)}, expected 'flash' or 'eager'")
    format_ = find_dtype(config.dtype or "bf16" if dtype is None else dtype)
    model = _build_model(config, _ATTENTION[attention], format_)
    inputs, dims = _inputs(config, model)
    uses_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    graph = trace(
        model, keywords=inputs | uses_cache, keyword_dims=dims, name=config.architecture, device=device, arch=arch
    )
    with graph:
        if graph.outputs[0].ndim == 3 and graph.outputs[0].sizes[-1] == getattr(model.config, "vocab_size", None):
            graph.outputs, graph.loss = graph.outputs[:1], "transformers" if config.is_causal_lm else "cross_entropy"
    try:
        return fold(graph, default=True)
    except GraphError:  # no stack with three equal layers: keep the graph unfolded
        return graph


def _build_model(config: Config, attention: str | None, format_: DType) -> nn.Module:
    """Build the module without data."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            f"{config.place}: transformers, which builds the model, is not installed: pip install transformers"
        ) from None
    name = config.architecture
    model_class = getattr(transformers, name, None) if is_name(name) else None
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        raise UnsupportedError(
            f"{config.place}: architecture {shown(name)}, expected a model class of transformers "
            f"{transformers.__version__}"
        )
    if config.has("quantization_config"):
        raise UnsupportedError(
            f"{config.place}: quantization_config is set, expected a model that is not quantized: transformers "
            f"runs other ops for a quantized model"
        )
    fields = config.fields
    for field, value in _integers(fields):
        if ("layer" in field or "experts" in field or field == "depth") and value > _MOST_LAYERS_OR_EXPERTS:
            raise UnsupportedError(f"{config.place}: {field} is {value}, expected at most {_MOST_LAYERS_OR_EXPERTS}")
    torch_format, previous = torch_dtype(config.place, format_), torch.get_default_dtype()
    try:
        with torch.device("meta"):
            torch.set_default_dtype(torch_format)
            kind: Any = model_class.config_class
            model: Any = model_class(kind.from_dict({**fields, "attn_implementation": attention}))
    except Exception as error:  # a transformers class may raise anything on unsuitable fields
        raise FormatError(
            f"{config.place}: transformers {transformers.__version__} cannot build {name} from it: "
            f"{type(error).__name__}: {shown(str(error), 300)}"
        ) from error
    finally:
        torch.set_default_dtype(previous)
    built: nn.Module = model.eval()
    return built


def _integers(fields: Mapping[str, object]) -> list[tuple[str, int]]:
    """Return all integers in a configuration with their field names, nested parts included."""
    numbers = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            numbers += _integers(value)
        elif isinstance(value, int):
            numbers.append((name, value))
    return numbers


def _inputs(config: Config, model: Any) -> tuple[dict[str, object], dict[str, Sequence[str | None]]]:
    """Return the model's keyword arguments and axis names."""
    name, model_config = model.main_input_name, model.config
    if name == "input_ids":
        inputs: dict[str, object] = {name: _tokens(model_config)}
        dims: dict[str, Sequence[str | None]] = {name: ("B", "S")}
        if model_config.is_encoder_decoder:
            inputs["decoder_input_ids"], dims["decoder_input_ids"] = _tokens(model_config), ("B", "T")
        return inputs, dims
    image_size = getattr(model_config, "image_size", None)
    if name == "pixel_values" and image_size is not None:
        height, width = image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
        shape = _BATCH, getattr(model_config, "num_channels", 3), height, width
        return {name: torch.empty(shape, dtype=model.dtype, device="meta")}, {name: ("B", None, None, None)}
    raise UnsupportedError(
        f"{config.place}: {config.architecture} takes {name}, expected tokens, or images with a size in the "
        f"configuration: trace the module with your own inputs, costgraph.torch.trace"
    )


def _tokens(config: Any) -> torch.Tensor:
    """Return tokens, limited by the number of positions."""
    limit = min(
        (n for name in _POSITIONS if isinstance(n := getattr(config, name, None), int) and n > 2), default=_LENGTH
    )
    return torch.zeros(_BATCH, prevprime(min(limit, _LENGTH) + 1), dtype=torch.int64, device="meta")
