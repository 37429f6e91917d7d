"""Conversion of graphs to and from the data of a file, in memory."""

from __future__ import annotations

import json
from typing import Any

from ..files.write import graph_of, text_of
from ..graph.graph import Graph

__all__ = ["loaded", "saved"]

Data = dict[str, Any]


def saved(graph: Graph) -> Data:
    """Return what a file of the graph holds."""
    data: Data = json.loads(text_of(graph, "saved"))
    return data


def loaded(data: Data) -> Graph:
    """Return the graph that a file with this content holds."""
    return graph_of(json.loads(json.dumps(data)), "loaded")
