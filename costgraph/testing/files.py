"""Graphs through files: what a file holds, and what comes back."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..files.write import load, save
from ..graph.graph import Graph

__all__ = ["loaded", "saved"]

Data = dict[str, Any]


def saved(graph: Graph) -> Data:
    """Return what a file of the graph holds."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        save(graph, path)
        data: Data = json.loads(path.read_text(encoding="utf-8"))
        return data


def loaded(data: Data) -> Graph:
    """Return the graph that a file with this content holds."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        return load(path)
