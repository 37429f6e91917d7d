"""From the graph of all devices to that of one rank: placements that propagate, and the collectives that follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ...algebra.symbols import shown
from ...errors import GraphError, PatternError, ShapeError, UnsupportedError
from ...graph.arguments import need_flag, positive
from ...graph.graph import Graph, need_graph
from ...graph.placement import Factors, Mesh, Placement, Sharding, tidy
from ...graph.tensor import Tensor
from ...notation.pattern import Axes, parse_pattern
from .sharder import Sharder, Stated

__all__ = ["mesh", "shard"]


def mesh(**axes: object) -> Mesh:
    """Return devices in a grid with named axes, the outermost first."""
    return Mesh(tuple((name, positive(f"mesh: {name}", n)) for name, n in axes.items()))


def shard(
    graph: Graph,
    devices: Mesh,
    placements: Mapping[str, str],
    *,
    gather: Iterable[str] = (),
    gradients: Mapping[str, str] | None = None,
    strict: bool = False,
) -> Graph:
    """Return the graph of one rank."""
    need_graph("shard", graph)
    need_flag("shard", strict=strict)
    used = Mesh(tuple((name, n) for name, n in devices.axes if n != 1))
    places = _found(graph, used, devices, placements)
    kept = dict(places)
    asked = _found(graph, used, devices, gradients or {})
    for t, g in graph.gradients.items():
        kept[g] = asked.get(t, places.get(t, Placement(((),) * t.ndim)))
    gathered = frozenset(gather) & {*used}
    stay = {g: places[t].axes - gathered if t in places else frozenset[str]() for t, g in graph.gradients.items()}
    stated = Stated(used, places, {g: kept[g] for g in graph.gradients.values()}, stay, gathered)
    sharder = Sharder(stated)
    made = sharder.run(graph)
    at = sharder.at
    made.sharding = Sharding(
        used,
        {t.name: at[t] for g in made.bodies() for t in g.tensors if t.producer is None and t.role != "formal"},
        tuple(at[t] for t in made.outputs),
        {t.name: at[g] for t, g in made.gradients.items()},
        tuple(sharder.moved),
    )
    if strict and sharder.moved:
        raise UnsupportedError(f"shard: {sharder.moved[0]}, expected every op to keep its placements (strict)")
    return made


def _found(graph: Graph, used: Mesh, devices: Mesh, placements: Mapping[str, str]) -> dict[Tensor, Placement]:
    named = {t.name: t for g in graph.bodies() for t in g.tensors if not g.fused}
    out: dict[Tensor, Placement] = {}
    for key, text in placements.items():
        matched = [t for name, t in named.items() if name == key or fnmatchcase(name, key)]
        if not matched:
            raise GraphError(f"shard: {shown(key)} is no tensor of graph {graph.name!r}, expected a name or a pattern")
        for t in matched:
            out[t] = _read(t, text, used, devices)
    return out


def _read(t: Tensor, text: str, used: Mesh, devices: Mesh) -> Placement:
    rank = t.ndim - t.storage.pieces
    try:
        dims = parse_pattern(f"{text} -> ", (rank,)).operands[0]
    except ShapeError as error:
        raise ShapeError(f"shard: {t.name!r}: {error}") from None
    out: list[Factors] = [()] * t.storage.pieces
    for dim, size in zip(dims, t.sizes[t.storage.pieces :], strict=True):
        assert isinstance(dim, Axes)
        names = [n for n in dim.names if n not in devices]
        axes = [n for n in dim.names if n in used]
        if len(names) != 1 and dim.names:
            raise PatternError(f"shard: {t.name!r}: {dim} of {text!r}, expected one name and axes of {devices}")
        rest = size
        for a in axes:
            rest = rest / used[a]
        out.append(tidy([*axes, rest]))
    return Placement(tuple(out))
