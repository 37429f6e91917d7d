"""Which graph a word on the command line stands for: a preset, a saved graph, or a config.json."""

from __future__ import annotations

import json
import os
from typing import Any

from .. import models
from ..algebra.symbols import shorten
from ..errors import CostGraphError, FormatError
from ..files.write import load
from ..graph.graph import Graph
from ..report.quantities import symbolic
from ..text_file import read_text

__all__ = ["load_model"]

#: Bytes up to which a file is looked at as a configuration: they have a few thousand.
_LARGEST_CONFIG = 2**20


def load_model(
    model: str,
    attention: str | None,
    dtype: str | None,
    dropout: float | None,
    composed: bool = False,
    symbolic_: bool = False,
) -> Graph:
    """Return a preset, the graph of a file that `costgraph.save` wrote, or the model that a config.json describes.

    Parameters
    ----------
    model : str
        Name, or path of a file or of a folder with a config.json; what a file is, its content says.
    attention, dtype, dropout : optional
        As `costgraph.models.load`; a saved graph has them already.
    composed : bool
        The same, of a preset alone.
    symbolic_ : bool
        Whether default sizes are dropped.

    Returns
    -------
    Graph
        The model.

    Raises
    ------
    CostGraphError
        If there is no such file or model, a file is neither, or an option does not fit.
    """
    given = {"attention": attention, "dtype": dtype, "dropout": dropout, "composed": composed or None}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    is_file = model not in models.names() and (os.path.exists(model) or model.lower().endswith(".json"))
    is_config = is_file and (os.path.isdir(model) or _is_config(model))
    for name in options if is_file else ():
        if not is_config or name == "composed":
            kind = "a config.json" if is_config else "a saved graph"
            raise FormatError(f"--{name}: {shorten(model)} is {kind}, expected a preset for that")
    read = models.from_config if is_config else load if is_file else models.load
    graph = read(model, **options)
    return symbolic(graph) if symbolic_ else graph


def _is_config(path: str) -> bool:
    try:
        fields = json.loads(read_text(path, path, _LARGEST_CONFIG))
    except (CostGraphError, ValueError, RecursionError):  # the reader of graphs says what is wrong with it
        return False
    return isinstance(fields, dict) and not fields.keys().isdisjoint({"architectures", "model_type"})
