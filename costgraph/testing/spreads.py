"""Strategies for meshes, and for where the sources of a graph lie on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

from ..algebra.symbols import dims
from ..graph.graph import Graph
from ..graph.placement import Mesh
from ..transforms.shard.fully import FullyShard
from ..transforms.shard.shard import mesh
from .values import Sizes

__all__ = ["Spread", "spreads"]


class Spread(NamedTuple):
    """A mesh, and placements on it."""

    mesh: Mesh
    """its degrees are symbols, or numbers"""
    degrees: dict[str, int]
    """ranks by axis"""
    sizes: dict[str, int]
    """the same by symbol, where degrees are symbols"""
    placements: dict[str, str]
    """of sources"""
    gather: FullyShard
    """along which axes parameters are put together where they are read, and how"""


def spreads(graph: Graph, point: Mapping[str, int]) -> st.SearchStrategy[Spread]:
    """Draw a mesh of two to six ranks, and for each source which of its axes are split.

    Parameters
    ----------
    graph : Graph
        Of whose sources.
    point : mapping of str to int
        A size for every dimension: what the ranks do not divide there is not split.

    Returns
    -------
    strategy of Spread
        What `costgraph.shard` takes.
    """
    return _spreads(graph, dict(point))


@st.composite
def _spreads(draw: Callable[[Any], Any], graph: Graph, point: dict[str, int]) -> Spread:
    degrees = draw(st.sampled_from([{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]))
    symbols = draw(st.booleans())
    named = {axis: f"ranks_{axis}" for axis in degrees}
    sizes, placements = Sizes({**graph.defaults, **point}), {}
    for t in (t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"):
        own = t.sizes[t.storage.pieces :]
        left = [int(sizes(n)) for n in own]
        axes = [[f"n{i}"] for i in range(len(own))]
        for axis, ranks in degrees.items():
            fits = [i for i, n in enumerate(left) if n % ranks == 0]
            at = draw(st.sampled_from([None, *fits, *fits]))
            if at is not None:
                axes[at].append(axis)
                left[at] //= ranks
        placements[t.name] = " ".join(f"({' '.join(names)})" if len(names) > 1 else names[0] for names in axes)
    made = mesh(**{axis: dims(named[axis]) if symbols else n for axis, n in degrees.items()})
    gathered = tuple(axis for axis in degrees if draw(st.booleans()))
    between = draw(st.sampled_from([True, False, *gathered]))
    flags = {name: draw(st.booleans()) for name in ("reshard_root", "prefetch", "by_unit")}
    gather = FullyShard(gathered, reshard_after_forward=between, **flags)
    return Spread(made, degrees, {named[a]: n for a, n in degrees.items()} if symbols else {}, placements, gather)
