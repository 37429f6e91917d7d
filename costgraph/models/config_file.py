"""Reading a config.json of transformers from a file, a folder, or a mapping of its fields; GGUF says the same."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from ..algebra.symbols import shown
from ..errors import FormatError
from ..text_file import place_of, read_text
from .config import Config, keyed

__all__ = ["read_config"]

_LARGEST = 2**20  # bytes: configurations are a few thousand


def read_config(path: object) -> Config:
    """Read a configuration from a file, a folder that holds a config.json, a GGUF file, or a mapping of its fields."""
    if isinstance(path, Mapping):
        return Config(keyed(path, "config"), "config")
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"from_config of {type(path).__name__}, expected a path or a mapping")
    # what there is no such path for is no folder
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    place = place_of(file)
    if os.fspath(file).lower().endswith(".gguf"):
        from .gguf_config import gguf_config  # its reader, which lists of models do without

        return Config(keyed(gguf_config(file), place), place)
    text = read_text(file, place, _LARGEST, "a config.json")
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {shown(str(error), 200)}, expected JSON") from None
    if not isinstance(fields, Mapping):
        raise FormatError(f"{place}: {shown(fields)}, expected an object")
    return Config(keyed(fields, place), place)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} twice in one object, expected it once")
    return fields
