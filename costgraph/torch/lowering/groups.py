"""The process groups that a rank meets others in, one for each axis of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import GraphError
from ...graph.domain import Domain
from ...graph.graph import Graph
from ...graph.op import Op
from ...ops.cached import Append
from ...ops.collectives import Meshed
from ...ops.index import Indexed
from ...ops.merge import Merge
from .emitter import Numbers

__all__ = ["Group", "Groups", "groups_of"]


@dataclass(frozen=True)
class Group:
    """Ranks on one line of a mesh."""

    name: str
    """torch's name of the process group"""
    ranks: int
    rank: int
    """place of this process among them"""


#: Groups by the name of their axis.
Groups = Mapping[str, Group]


def groups_of(graph: Graph, mesh: object, numbers: Numbers) -> Groups:
    """Return the groups that a graph needs.

    GraphError if the graph is that of one rank of a mesh and no groups are given, or not those that it needs.
    """
    place = f"lower of graph {graph.name!r}"
    sharding = graph.sharding
    needed = dict(_degrees(graph, numbers))
    if mesh is None:
        if sharding is not None and needed:
            raise GraphError(f"{place}: it is that of one rank of {sharding.mesh}, expected mesh=, torch's DeviceMesh")
        return {}
    found = {axis: _group(place, axis, mesh) for axis in needed}
    for axis, ranks in needed.items():
        if ranks is not None and found[axis].ranks != ranks:
            raise GraphError(f"{place}: mesh has {found[axis].ranks} ranks along {axis!r}, expected {ranks}")
    return found


def _degrees(graph: Graph, numbers: Numbers) -> Iterator[tuple[str, int | None]]:
    """Yield the axes along which ranks of a graph meet, with how many there are."""
    for op in graph.walk():
        if isinstance(op.kind, Indexed | Append) and op.kind.part:
            yield op.kind.part, None if graph.sharding is None else numbers(graph.sharding.mesh[op.kind.part])
    for op in graph.walk():
        if isinstance(op.kind, Meshed | Merge) and op.kind.axis:
            yield op.kind.axis, numbers(op.kind.ranks)
        for domain in domains(op):
            yield from ((axis, numbers(n)) for axis, n in domain.ranks)


def domains(op: Op) -> Iterator[Domain]:
    """Yield which pairs of a query and a key an op has to do with: where queries are split, each rank has others."""
    for name in ("domain", "masked"):
        fact = getattr(op.kind, name, None)
        if fact is not None:
            yield fact[0] if isinstance(fact, tuple) else fact
    yield from (t.domain[0] for t in (*op.operands, *op.results) if t.domain is not None)


def _group(place: str, axis: str, mesh: Any) -> Group:
    """Return the group of an axis, of a mesh of torch or of a mapping."""
    known = mesh if isinstance(mesh, Mapping) else getattr(mesh, "mesh_dim_names", None) or ()
    if axis not in known:
        what = f"axes {list(known)}" if isinstance(mesh, Mapping) or known else f"{type(mesh).__name__}, no names"
        raise GraphError(f"{place}: mesh has {what}, expected a DeviceMesh or process groups by name with {axis!r}")
    try:
        group: Any = mesh[axis] if isinstance(mesh, Mapping) else mesh.get_group(axis)
    except (RuntimeError, LookupError) as error:  # as torch has it, for a mesh without this process
        raise GraphError(f"{place}: mesh has no process group along {axis!r} for this process, expected one") from error
    if not (hasattr(torch.distributed, "ProcessGroup") and isinstance(group, torch.distributed.ProcessGroup)):
        raise GraphError(f"{place}: mesh has {type(group).__name__} along {axis!r}, expected a process group")
    return Group(group.group_name, group.size(), group.rank())
