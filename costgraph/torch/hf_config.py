"""Models of transformers by their config.json, traced: any architecture that the installed transformers builds."""

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

#: What transformers calls it; None is what a class takes by default, torch's attention where it supports that.
_ATTENTION = {"flash": None, "eager": "eager"}
#: Sizes of the run, which decide which way a program goes where it asks: primes, so that no other size is like them.
_BATCH, _LENGTH = 3, 2053
#: Layers, and experts, which some classes make one by one; the largest models have some 130, and 512.
_MOST = 1024
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")


def from_config(
    path: object,
    attention: str = "flash",
    dtype: str | DType | None = None,
    device: str = "cuda",
    arch: str | None = None,
) -> Graph:
    """Trace the model that a config.json describes, as the installed transformers builds it.

    `costgraph.models.from_config` declares the architectures that it knows, without torch. This is for all others: the
    class of transformers is made without weights, run once on tensors that hold no data, and its stacks of equal
    layers are folded. Code that a configuration names of its own (`auto_map`) is never run.

    Parameters
    ----------
    path : str, path-like or mapping
        The file, a folder with a `config.json` in it, or the fields themselves.
    attention : str
        flash: `sdpa` of transformers, with the kernel that torch chooses. eager: an op each.
    dtype : str or DType, optional
        Floating format; by default the one that the file names, bf16 where it names none.
    device, arch : str, optional
        As of `trace`: what would run it, a GPU by default, of which none is needed.

    Returns
    -------
    Graph
        From tokens (B, S), and (B, T) for a decoder beside an encoder, or images of B, to logits of tokens alone where
        the class returns some, else to all that it returns; in mode `eval()` and without a cache. Depth is the symbol L
        (one for each stack, where there are several) with the number of layers of the file as default; where no three
        layers in a row are equal, it is a number. A model that returns logits of tokens names `cross_entropy` as its
        loss.

    Raises
    ------
    UnsupportedError
        If transformers is not installed, does not have the architecture, or a call has no rule; or the model is
        quantized, or takes neither tokens nor images.
    FormatError
        If the file cannot be read, or transformers cannot build a model of its fields.

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
    model = _built(config, _ATTENTION[attention], format_)
    inputs, dims = _inputs(config, model)
    uses_cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    graph = trace(
        model, keywords=inputs | uses_cache, keyword_dims=dims, name=config.architecture, device=device, arch=arch
    )
    with graph:
        if graph.outputs[0].ndim == 3 and graph.outputs[0].sizes[-1] == getattr(model.config, "vocab_size", None):
            graph.outputs, graph.loss = graph.outputs[:1], "cross_entropy"
    try:
        return fold(graph, default=True)
    except GraphError:  # no stack, or no three layers of it are equal: the graph is right as it is
        return graph


def _built(config: Config, attention: str | None, format_: DType) -> nn.Module:
    """Return the module of a configuration, without data."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedError(
            f"{config.place}: transformers is not installed, expected it, as it builds the model: pip install "
            f"transformers"
        ) from None
    name = config.architecture
    made = getattr(transformers, name, None) if is_name(name) else None
    if not isinstance(made, type) or not issubclass(made, transformers.PreTrainedModel):
        raise UnsupportedError(
            f"{config.place}: architecture {shown(name)}, expected one of transformers {transformers.__version__}"
        )
    if config.has("quantization_config"):
        raise UnsupportedError(
            f"{config.place}: quantization_config is there, expected a model that is not quantized: what transformers "
            f"runs then is another program"
        )
    fields = config.fields
    for field, value in _numbers(fields):
        if ("layer" in field or "experts" in field or field == "depth") and value > _MOST:
            raise UnsupportedError(f"{config.place}: {field} is {value}, expected {_MOST} at the most")
    chosen, before = torch_dtype(config.place, format_), torch.get_default_dtype()
    try:
        with torch.device("meta"):
            torch.set_default_dtype(chosen)
            kind: Any = made.config_class
            model: Any = made(kind.from_dict({**fields, "attn_implementation": attention}))
    except Exception as error:  # what a class of transformers makes of fields that do not fit it can be anything
        raise FormatError(
            f"{config.place}: transformers {transformers.__version__} builds no {name} of it: {type(error).__name__}: "
            f"{shown(str(error), 300)}"
        ) from error
    finally:
        torch.set_default_dtype(before)
    built: nn.Module = model.eval()
    return built


def _numbers(fields: Mapping[str, object]) -> list[tuple[str, int]]:
    """Return all whole numbers of a configuration and its parts, with the names of their fields."""
    found = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found += _numbers(value)
        elif isinstance(value, int):
            found.append((name, value))
    return found


def _inputs(config: Config, model: Any) -> tuple[dict[str, object], dict[str, Sequence[str | None]]]:
    """Return what a model is called with, and the names of the axes."""
    name, own = model.main_input_name, model.config
    if name == "input_ids":
        inputs: dict[str, object] = {name: _tokens(own)}
        dims: dict[str, Sequence[str | None]] = {name: ("B", "S")}
        if own.is_encoder_decoder:
            inputs["decoder_input_ids"], dims["decoder_input_ids"] = _tokens(own), ("B", "T")
        return inputs, dims
    side = getattr(own, "image_size", None)
    if name == "pixel_values" and side is not None:
        height, width = side if isinstance(side, list | tuple) else (side, side)
        shape = _BATCH, getattr(own, "num_channels", 3), height, width
        return {name: torch.empty(shape, dtype=model.dtype, device="meta")}, {name: ("B", None, None, None)}
    raise UnsupportedError(
        f"{config.place}: {config.architecture} takes {name}, expected tokens, or images of a stated side: "
        f"trace it with inputs of your own, costgraph.torch.trace"
    )


def _tokens(own: Any) -> torch.Tensor:
    """Return tokens, as many as there are positions for."""
    most = min((n for name in _POSITIONS if isinstance(n := getattr(own, name, None), int) and n > 2), default=_LENGTH)
    return torch.zeros(_BATCH, prevprime(min(most, _LENGTH) + 1), dtype=torch.int64, device="meta")
