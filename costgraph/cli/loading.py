"""Resolve a MODEL argument: a preset, a saved graph, a configuration, or a model on the Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from typing import Any

from .. import models
from ..algebra.symbols import shorten
from ..errors import CostGraphError, FormatError, UnsupportedError
from ..files.graphs import load
from ..ir.graph import Graph
from ..models.registry import is_known
from ..report.quantities import symbolic
from ..text_file import read_text

__all__ = ["load_model"]


#: Largest file in bytes that is parsed as a configuration; they have a few thousand.
_LARGEST_CONFIG = 2**20
#: Timeout in seconds for requests to the Hub.
_TIMEOUT = 10


def load_model(
    model: str,
    attention: str | None,
    dtype: str | None,
    dropout: float | None,
    eager_ops: bool = False,
    symbolic_: bool = False,
) -> Graph:
    """Load a preset, a saved graph, or the model of a config.json.

    The content decides the type of a file. Safetensors and GGUF files use the config.json in their folder; a GGUF file
    without one describes the model itself. OWNER/NAME is a model of the Hub unless it is a path. Options are those of
    `costgraph.models.load`; `eager_ops` applies to presets only, and a saved graph accepts none. Raise an error if
    there is no such file or model, a file has another type, or an option does not apply.
    """
    arguments = {"attention": attention, "dtype": dtype, "dropout": dropout, "eager_ops": eager_ops or None}
    options: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    if model not in models.names():
        model = _config_of(model)
    is_file = model not in models.names() and (os.path.exists(model) or model.lower().endswith((".json", ".gguf")))
    is_config = is_file and (os.path.isdir(model) or model.lower().endswith(".gguf") or _is_config(model))
    read = (_configured(model) if is_config else load) if is_file else models.load
    for name in options if is_file else ():
        if name not in signature(read).parameters or name == "eager_ops":
            kind = "a config.json" if is_config else "a saved graph"
            raise FormatError(f"--{name}: {shorten(model)} is {kind}, expected a preset for this option")
    graph = read(model, **options)
    return symbolic(graph) if symbolic_ else graph


def _configured(path: str) -> Callable[..., Graph]:
    """Return the function that loads a configuration: the model's declaration, else a trace of transformers."""
    if is_known(path) or any(find_spec(name) is None for name in ("torch", "transformers")):
        return models.from_config  # its error lists unknown fields
    from ..torch import from_config

    return from_config


def _config_of(model: str) -> str:
    """Return the configuration for weights or a Hub model; return other arguments unchanged."""
    if model.lower().endswith((".safetensors", ".safetensors.index.json", ".gguf")):
        config = os.path.join(os.path.dirname(model), "config.json")
        if os.path.exists(config) or model.lower().endswith(".gguf"):
            return config if os.path.exists(config) else model
        raise FormatError(
            f"{shorten(model)}: weights without a model description, expected a config.json in the same folder"
        )
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model, re.ASCII) and not model.lower().endswith(".json")
    return _from_hub(model) if is_id and not os.path.exists(model) else model


def _from_hub(name: str) -> str:
    """Return the path of a Hub model's config.json, from the cache or the network."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    except ImportError:
        raise UnsupportedError(
            f"{shorten(name)}: no such path, and Hub models need huggingface_hub, which is not installed: "
            f"pip install huggingface_hub"
        ) from None
    try:
        path = try_to_load_from_cache(name, "config.json")
        if not isinstance(path, str):
            # without a network, a download would retry five times and log each attempt
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_TIMEOUT)
            path = hf_hub_download(name, "config.json")
        return path
    except Exception as error:  # the exception types depend on the version of the HTTP client
        reason = str(error).strip().partition("\n")[0]
        raise FormatError(
            f"{shorten(name)}: no such path, and its config.json cannot be read from the Hub: {type(error).__name__}: "
            f"{shorten(reason, 300)}, expected one in the cache or on the network"
        ) from None


def _is_config(path: str) -> bool:
    try:
        fields = json.loads(read_text(path, path, _LARGEST_CONFIG))
    except (CostGraphError, ValueError, RecursionError):  # loading it as a graph reports the error
        return False
    return isinstance(fields, dict) and not fields.keys().isdisjoint({"architectures", "model_type"})
