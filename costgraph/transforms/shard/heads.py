"""Fewer heads of keys and values than ranks: each of them is on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...algebra.polynomial import ONE, Poly
from ...errors import GraphError, ShapeError
from ...graph.graph import Graph
from ...graph.strides import is_integral
from .shard import groups

__all__ = ["Heads", "heads"]

Axes = tuple[tuple[str, Poly], ...]


@dataclass(frozen=True)
class Heads:
    """Axes of a mesh that tensor parallelism has, and what they split."""

    axes: Axes
    """tp, or kv and replica: ranks with other heads of keys and values, and those with the same."""
    joint: tuple[tuple[str, tuple[str, ...]], ...]
    """tp as both of them."""
    split: Mapping[str, str]
    """Placements on these axes, by name."""


def heads(graph: Graph, split: Mapping[str, str], tp: Poly) -> Heads:
    """Return the axes of tensor parallelism for what it splits, with kv among its axes where heads may be fewer.

    Of G heads of keys and values, tp > G ranks have one each, tp/G ranks the same one: the axis of G ranks splits keys
    and values, both of them the queries, whose heads lie group by group. What ranks with one head add to its gradient
    is reduced over the others of the kind.
    """
    named = {t.name: t for g in graph.bodies() for t in g.tensors if t.name in split}
    counts = {}
    for name, text in split.items():
        at = next((i for i, word in enumerate(groups(text) or ()) if "kv" in word), None)
        if at is not None:
            counts[name] = named[name].sizes[named[name].storage.pieces + at]
    few = {n for n in counts.values() if _fewer(n, tp, graph)}
    if len(few) > 1:
        raise GraphError(
            f"parallelize: layers of {' and of '.join(sorted(map(str, few)))} heads of keys and values, which are "
            f"fewer than tp={tp}: expected one number"
        )
    placed = {n: text if counts.get(n) in few else text.replace(" kv)", " tp)") for n, text in split.items()}
    if not few:
        return Heads((("tp", tp),), (), placed)
    (count,) = few
    share = tp / count
    if share.constant is not None and not isinstance(share.constant, int):
        raise ShapeError(
            f"parallelize: {count} heads of keys and values over tp={tp} ranks, expected a multiple or a divisor"
        )
    return Heads((("kv", count), ("replica", share)), (("tp", ("kv", "replica")),), placed)


def _fewer(count: Poly, ranks: Poly, graph: Graph) -> bool:
    """Whether there are fewer heads than ranks: always, or under the defaults of a graph."""
    if len(count.terms) == 1 and is_integral(ranks / count):
        return ranks != count
    defaults = {name: ONE * n for name, n in graph.root.defaults.items()}
    few, many = count.bind(defaults).constant, ranks.bind(defaults).constant
    return few is not None and many is not None and few < many
