"""What is divided: the dimension of the batch, and which degrees divide what a structure has split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..algebra.polynomial import poly
from ..algebra.symbols import symbol
from ..analysis.arrays import Values
from ..errors import CostGraphError, GraphError
from ..graph.graph import Graph
from ..transforms.shard.parallelize import shares
from .structures import Family, Structure

__all__ = ["batch_of", "whole"]

_AXES = ("dp", "cp", "tp", "ep")


def whole(family: Family, structure: Structure, degrees: Mapping[str, Any]) -> Any:
    """Return at which degrees ranks have whole parts of what is split: graphs of others are against their sizes."""
    graph = family.step(structure)
    known = {name: poly(n) for name, n in {**graph.defaults, **family.dims}.items()}
    own = {axis: family.degree(axis, structure) for axis in _AXES}
    try:
        with family.at_ranks(graph, structure):
            found = {p.bind(known) for p in shares(graph, own, structure.zero, structure.sequence, family.system)}
    except CostGraphError:  # whoever derives it says why
        found = set()
    sizes = family.sizes(degrees, structure)
    value, out = Values(sizes), np.True_
    for p in (p for p in found if p.names() <= sizes.keys()):
        out = out & (value(p) % 1 == 0)
    return out


def batch_of(model: Graph) -> str:
    """Return the name of the dimension of the batch: the first axis of all inputs."""
    firsts = {t.sizes[0] for t in model.tensors if t.producer is None and t.role == "input" and t.ndim}
    names = {name for n in firsts for name in n.names()}
    if len(names) != 1 or firsts != {poly(symbol(*names))}:
        found = ", ".join(sorted(map(str, firsts))) or "no axis"
        raise GraphError(
            f"search: inputs of graph {model.name!r} begin with {found}, expected one dimension: the batch"
        )
    return names.pop()
