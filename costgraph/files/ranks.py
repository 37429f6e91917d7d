"""Placements and pipeline schedules of per-rank graphs in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..algebra.polynomial import Poly
from ..graph.graph import Graph
from ..graph.placement import Mesh, Placement, Sharding, Waiting

__all__ = ["RANKS", "ranks_data", "read_ranks"]

#: Keys in a file.
RANKS = ("sharding", "waiting")

Encode = Callable[[Any], Any]


def ranks_data(graph: Graph, encode: Encode) -> dict[str, Any]:
    """Encode the placements and the pipeline schedule of a per-rank graph."""
    out: dict[str, Any] = {}
    if graph.sharding is not None:
        own = graph.sharding
        placed = {"places": own.places, "gradients": own.gradients}
        out["sharding"] = {
            "mesh": [encode(own.mesh.axes), encode(own.mesh.joint)],
            "outputs": [_placement_data(at, encode) for at in own.outputs],
            "replicated": list(own.replicated),
            "resharded": list(own.resharded),
            "own": list(own.own),
            **{key: {name: _placement_data(at, encode) for name, at in at_.items()} for key, at_ in placed.items()},
        }
    if graph.waiting is not None:
        out["waiting"] = {f.name: encode(getattr(graph.waiting, f.name)) for f in fields(Waiting)}
    return out


def _placement_data(at: Placement, encode: Encode) -> list[Any]:
    return [encode(at.dims), encode(at.partial)]


def read_ranks(graph: Graph, facts: Mapping[str, Any], decode: Encode) -> None:
    """Decode placements and a pipeline schedule into a graph; TypeError or similar if they are malformed."""
    if "sharding" in facts:
        own = facts["sharding"]
        axes, joint = map(decode, own["mesh"])
        _need(all(isinstance(name, str) and isinstance(n, Poly) for name, n in axes), "mesh")
        mesh = Mesh(axes, joint)
        names = {t.name: t.ndim for g in graph.bodies() for t in g.tensors}

        def placement(data: Any, ndim: int) -> Placement:
            made = Placement(*map(decode, data))
            known = all(f in mesh if isinstance(f, str) else isinstance(f, Poly) for dim in made.dims for f in dim)
            _need(len(made.dims) == ndim and known, "placement")
            return made

        outputs = zip(own["outputs"], graph.outputs, strict=True)
        graph.sharding = Sharding(
            mesh,
            {name: placement(data, names[name]) for name, data in own["places"].items()},
            tuple(placement(data, t.ndim) for data, t in outputs),
            {name: placement(data, names[name]) for name, data in own["gradients"].items()},
            tuple(map(_text, own["resharded"])),
            tuple(map(_text, own["own"])),
            replicated=tuple(map(_text, own["replicated"])),
        )
    if "waiting" in facts:
        graph.waiting = Waiting(**{name: decode(value) for name, value in facts["waiting"].items()})


def _text(value: Any) -> str:
    _need(isinstance(value, str), "text")
    return str(value)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise TypeError(f"{what} of a rank, expected axes, sizes and names")
