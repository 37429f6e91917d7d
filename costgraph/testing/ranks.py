"""All ranks of a mesh at once: each runs its graph on NumPy, and they meet where a collective stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import numpy as np

from ..errors import GraphError
from ..graph.graph import Graph, need_graph
from ..graph.op import OpKind
from ..graph.placement import Factors, Mesh, Placement
from ..ops.collectives import Collective, Part
from ..ops.index import Gather, Scatter
from ..ops.stochastic import Dropout
from .interpreter import Run, run
from .meanings import MEANINGS, Meaning
from .meetings import cut, together
from .reference import REFERENCE, whole
from .reference import collective as reference_collective
from .values import Array, At, Sizes, Value

__all__ = ["assembled", "part_of", "run_ranks"]

Rank = dict[str, int]


def ranks_of(mesh: Mesh, degrees: Mapping[str, int]) -> Iterator[Rank]:
    """Yield the place of every rank on a mesh, the innermost axis the fastest."""
    names = list(mesh)
    for place in product(*(range(degrees[n]) for n in names)):
        yield dict(zip(names, place, strict=True))


def _index(factors: Factors, size: int, rank: Rank, degrees: Mapping[str, int]) -> Array:
    """Return the positions along an axis that a rank has."""
    if not factors:
        return np.arange(size)
    splits = [degrees[f] if isinstance(f, str) else None for f in factors]
    known = prod(n for n in splits if n is not None)
    sizes = [degrees[f] if isinstance(f, str) else f for f in factors]
    free = [i for i, n in enumerate(splits) if n is None]
    # the last part is what is left: what stands before it is known by number
    shape = [n if isinstance(n, int) else int(n.constant or 0) for n in sizes]
    if free:
        shape[free[-1]] = size // (known * prod(shape[i] for i in free[:-1]))
    grid = np.arange(size).reshape(shape)
    return grid[tuple(rank[f] if isinstance(f, str) else slice(None) for f in factors)].reshape(-1)


def part_of(array: Array, at: Placement, rank: Rank, degrees: Mapping[str, int], sizes: Sizes) -> Array:
    """Return what a rank has of an array."""
    out = array
    for i, factors in enumerate(at.dims):
        bound = tuple(f if isinstance(f, str) else _number(sizes, f) for f in factors)
        out = np.take(out, _index(bound, array.shape[i], rank, degrees), axis=i)
    return out


def _number(sizes: Sizes, f: Any) -> Any:
    from ..algebra.polynomial import as_poly

    return as_poly(sizes(f))


def assembled(parts: list[tuple[Rank, Array]], shape: tuple[int, ...], at: Placement, degrees: Mapping[str, int], sizes: Sizes) -> Array:
    """Put the parts of all ranks together; those that several ranks have must be the same.

    Raises
    ------
    AssertionError
        If two ranks that have the same elements have other numbers there.
    """
    out = np.full(shape, np.nan)
    for rank, part in parts:
        index = []
        for i, factors in enumerate(at.dims):
            bound = tuple(f if isinstance(f, str) else _number(sizes, f) for f in factors)
            index.append(_index(bound, shape[i], rank, degrees))
        place = np.ix_(*index) if index else ()
        there = out[place]
        same = np.isnan(there) | np.isclose(there, part, rtol=1e-9, atol=1e-12, equal_nan=True)
        assert bool(np.all(same)), f"ranks have other numbers where they should have the same, at {rank}"
        out[place] = part
    return out


class _Meeting:
    """Where ranks put what they bring, and take what the others brought."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.barrier = Barrier(len(ranks))
        self.brought: dict[int, Array] = {}

    def group(self, me: int, axis: str) -> list[int]:
        """Return the ranks that are on one line with a rank, in order."""
        mine = self.ranks[me]
        found = [i for i, r in enumerate(self.ranks) if all(r[a] == mine[a] for a in mine if a != axis)]
        return sorted(found, key=lambda i: self.ranks[i][axis])

    def degree(self, axis: str) -> int:
        """Return how many ranks an axis has."""
        return 1 + max(r[axis] for r in self.ranks)

    def exchange(self, me: int, axis: str, array: Array) -> list[Array]:
        """Return what all of a group have brought."""
        self.brought[me] = np.array(array)
        self.barrier.wait()
        found = [self.brought[i] for i in self.group(me, axis)]
        self.barrier.wait()
        return found


def _meanings(me: int, meeting: _Meeting) -> dict[type[OpKind], Meaning]:
    """Return what op kinds do on one rank."""
    rank = meeting.ranks[me]

    def collective(at: At[Collective]) -> Array:
        kind, x = at.kind, at.operands[0].array
        if not kind.axis:  # declared by hand, for ranks that all bring the same
            return alone(at)
        found = meeting.exchange(me, kind.axis, x)
        assert len(found) == at.of(kind.ranks), f"{at.op.name!r}: {len(found)} ranks, expected {at.of(kind.ranks)}"
        if kind.inplace:
            at.made[0] = Value(at.operands[0].buffer.array, at.operands[0].buffer)
        return together(at, found, rank[kind.axis])

    alone = reference_collective

    def part(at: At[Part]) -> None:
        kind, ranks, blocks = at.kind, at.of(at.kind.ranks), at.of(at.kind.blocks)
        if blocks == 1:
            size = at.operands[0].array.shape[kind.dim] // ranks
            own = slice(rank[kind.axis] * size, (rank[kind.axis] + 1) * size)
            at.view(lambda array: array[(slice(None),) * kind.dim + (own,)])
        else:
            whole(lambda at: cut(at.operands[0].array, kind.dim, blocks, ranks, rank[kind.axis]))(at)

    def looked_up(at: At[Gather]) -> Array:
        kind = at.kind
        table, ids = at.operands[0].array, at.operands[1].array.astype(int)
        rows = table.shape[kind.batch]
        own = ids % (rows * meeting.degree(kind.part)) - rank[kind.part] * rows
        inside = (own >= 0) & (own < rows)
        lead = np.indices(ids.shape)[: kind.batch]
        found = table[(*lead, np.where(inside, own, 0))]
        return np.where(inside.reshape(*inside.shape, *(1,) * (found.ndim - inside.ndim)), found, 0.0)

    def scattered(at: At[Scatter]) -> Array:
        kind = at.kind
        target, ids, updates = (v.array for v in at.operands)
        if kind.overwrites():
            at.made[0] = at.operands[0]
        rows = target.shape[kind.batch]
        ids = ids.astype(int) % (rows * meeting.degree(kind.part)) - rank[kind.part] * rows
        inside = (ids >= 0) & (ids < rows)
        out = np.array(target)
        lead = [i[inside] for i in np.indices(ids.shape)[: kind.batch]]
        place = (*lead, ids[inside])
        if kind.mode == "set":
            out[place] = updates[inside]
        else:
            (np.add if kind.mode == "add" else np.maximum).at(out, place, updates[inside])
        return out

    def dropped(at: At[Dropout]) -> None:
        """Leave all elements: which ones are zeros is another question on each rank."""
        for i, made in enumerate((at.operands[0].array / (1 - at.kind.p), np.ones(at.operands[0].array.shape))):
            whole(lambda at, made=made: made, to=i)(at)

    plain: dict[type[OpKind], Meaning] = {**MEANINGS, **REFERENCE}
    return {
        **plain,
        Dropout: dropped,
        Collective: whole(collective),
        Part: part,
        Gather: lambda at: (whole(looked_up) if at.kind.part else plain[Gather])(at),
        Scatter: lambda at: (whole(scattered) if at.kind.part else plain[Scatter])(at),
    }


def run_ranks(
    graph: Graph, inputs: Mapping[str, Array], degrees: Mapping[str, int] | None = None, **dims: int
) -> list[tuple[Rank, Run]]:
    """Run the graph of a rank on every rank of its mesh.

    Parameters
    ----------
    graph : Graph
        What `costgraph.shard` made.
    inputs : mapping of str to array
        Values of all sources, whole.
    **dims : int
        Sizes, the degrees of the mesh among them.

    Returns
    -------
    list of (rank, Run)
        Of each rank its place on the mesh, and what was counted there.
    """
    need_graph("run_ranks", graph)
    sharding = graph.sharding
    if sharding is None:
        raise GraphError(f"run_ranks of graph {graph.name!r}, which is on no mesh: expected one that shard made")
    sizes = Sizes({k: int(v) for k, v in {**graph.defaults, **dims}.items()})
    given = degrees or {}
    degrees = {name: given[name] if name in given else int(sizes(n)) for name, n in sharding.mesh.axes}
    sizes.point |= {n.constant is None and str(n): degrees[name] for name, n in sharding.mesh.axes}  # type: ignore[misc]
    ranks = list(ranks_of(sharding.mesh, degrees))
    meeting = _Meeting(ranks)
    out: list[Any] = [None] * len(ranks)

    def one(me: int) -> None:
        own = {n: part_of(np.asarray(a, dtype=float), sharding.places[n], ranks[me], degrees, sizes) for n, a in inputs.items()}
        try:
            out[me] = run(graph, own, meanings=_meanings(me, meeting), **dims)
        except BaseException as error:
            out[me] = error
            meeting.barrier.abort()

    threads = [Thread(target=one, args=(i,)) for i in range(len(ranks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    failed = [e for e in out if isinstance(e, BaseException)]
    for error in sorted(failed, key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return list(zip(ranks, out, strict=True))
