"""Run all ranks of a sharded graph in threads on NumPy; collectives exchange arrays between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import numpy as np

from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Factors,
    Graph,
    Mesh,
    OpKind,
    Placement,
    Sharding,
    known_names,
    need_graph,
)
from ..ops.collectives import Collective, LocalShard, Merge, Unshard
from ..ops.elementwise import Dropout
from ..ops.index import Gather, Scatter
from ..ops.kv_cache import Append
from .interpreter import (
    RANK,
    REFERENCE_SEMANTICS,
    Array,
    At,
    Meaning,
    Run,
    Sizes,
    Value,
    run,
    whole,
)
from .semantics import (
    appended,
    cut,
    merged,
    together,
)

__all__ = ["check_sharded", "run_ranks"]

Rank = dict[str, int]


def _keep_all(at: At[Dropout]) -> None:
    """Keep all elements: each rank would draw another mask."""
    x = at.operands[0].array
    whole(lambda at: x / (1 - at.kind.p))(at)
    whole(lambda at: np.ones(x.shape), to=1)(at)


_RANK_INDEPENDENT: dict[type[OpKind], Meaning] = {**REFERENCE_SEMANTICS, Dropout: _keep_all}

# -- mesh --------------------------------------------------------------------------------------------------------------


class _Mesh:
    """Mesh ranks and their shards."""

    def __init__(self, sharding: Sharding, sizes: Sizes, degrees: Mapping[str, int]) -> None:
        self.sizes, self.degrees = sizes, degrees
        self.ranks = list(_ranks(sharding.mesh, degrees))

    def part(self, array: Array, placement: Placement, rank: Rank) -> Array:
        """Return a rank's shard of an array."""
        shard = array
        for i, factors in enumerate(placement.dims):
            shard = np.take(shard, self._positions(factors, array.shape[i], rank), axis=i)
        # the first rank holds all of a partial sum, the others zeros
        return np.zeros_like(shard) if any(rank[axis] for axis in placement.pending) else shard

    def assembled(self, shards: Sequence[Array], placement: Placement, shape: tuple[int, ...]) -> Array:
        """Assemble the global array from the shards: replicas must agree, partial sums are added."""
        if placement.partial:
            shards = [np.sum([shards[i] for i in self._along(rank, placement.pending)], axis=0) for rank in self.ranks]
        result = np.full(shape, np.nan)
        assigned = np.zeros(shape, dtype=bool)
        for rank, shard in zip(self.ranks, shards, strict=True):
            index = [self._positions(factors, n, rank) for factors, n in zip(placement.dims, shape, strict=True)]
            grid = np.ix_(*index) if index else ()
            agrees = np.isclose(result[grid], shard, rtol=1e-9, atol=1e-12, equal_nan=True) | ~assigned[grid]
            assert bool(np.all(agrees)), f"rank {rank} differs from a replica of the same shard"
            result[grid] = shard
            assigned[grid] = True
        return result

    def _along(self, rank: Rank, axes: Collection[str]) -> list[int]:
        """Return the ranks that differ from one only along some axes."""
        return [i for i, r in enumerate(self.ranks) if all(r[a] == rank[a] for a in r if a not in axes)]

    def _positions(self, factors: Factors, size: int, rank: Rank) -> Array:
        """Return the positions along an axis that a rank holds."""
        if not factors:
            return np.arange(size)
        shape = [self.degrees[f] if isinstance(f, str) else self.sizes(f) for f in factors]
        if not all(isinstance(n, int) for n in shape):
            raise ShapeError(f"an axis of size {size} in shards of {', '.join(map(str, shape))}: expected integers")
        assert prod(shape) == size, f"an axis of size {size} in shards of {shape}"
        grid = np.arange(size).reshape(shape)
        return grid[tuple(rank[f] if isinstance(f, str) else slice(None) for f in factors)].reshape(-1)


def _ranks(mesh: Mesh, degrees: Mapping[str, int]) -> Iterator[Rank]:
    """Yield the mesh coordinates of every rank, the innermost axis fastest."""
    names = list(mesh)
    for coordinates in product(*(range(degrees[n]) for n in names)):
        yield dict(zip(names, coordinates, strict=True))


# -- collectives -------------------------------------------------------------------------------------------------------


class _Rendezvous:
    """Rendezvous at which the ranks of a group exchange arrays."""

    def __init__(self, ranks: Sequence[Rank], mesh: Mesh) -> None:
        self.ranks, self.mesh = ranks, mesh
        self.barrier = Barrier(len(ranks))
        self.brought: dict[int, Array] = {}

    def group(self, me: int, axis: str) -> list[int]:
        """Return the rank's group along an axis, in order."""
        coordinates = self.ranks[me]
        fixed_axes = {*coordinates} - {*self.mesh.parts(axis)}
        return [i for i, r in enumerate(self.ranks) if all(r[a] == coordinates[a] for a in fixed_axes)]

    def place(self, me: int, axis: str) -> int:
        """Return a rank's index in its group."""
        return self.group(me, axis).index(me)

    def exchange(self, me: int, axis: str, array: Array) -> list[Array]:
        """Return the arrays of the whole group."""
        self.brought[me] = np.array(array)
        self.barrier.wait()
        arrays = [self.brought[i] for i in self.group(me, axis)]
        self.barrier.wait()
        return arrays


def _unsharded_view(shard: Value, dim: int, ranks: int, rank: int) -> Value:
    """Return a view of the whole buffer around a rank's shard."""
    flat, array = shard.buffer.array.reshape(-1), shard.array
    start = shard.address((0,) * array.ndim) - rank * array.shape[dim] * array.strides[dim]
    shape = (*array.shape[:dim], array.shape[dim] * ranks, *array.shape[dim + 1 :])
    unsharded = np.lib.stride_tricks.as_strided(flat[start // array.itemsize :], shape, array.strides)
    return Value(unsharded, shard.buffer)


def _shard_view(array: Array, dim: int, ranks: int, rank: int) -> Array:
    """Return a rank's shard along an axis, as a view."""
    size = array.shape[dim] // ranks
    return array[(slice(None),) * dim + (slice(rank * size, (rank + 1) * size),)]


class _Rank:
    """Reference semantics of the op kinds that communicate or depend on the rank."""

    def __init__(self, me: int, rendezvous: _Rendezvous) -> None:
        self.me, self.rendezvous = me, rendezvous
        self.meanings: dict[type[OpKind], Meaning] = {
            **_RANK_INDEPENDENT,
            Collective: self.collective,
            LocalShard: self.local_shard,
            Unshard: self.unshard,
            Merge: lambda at: merged(at, self.rendezvous.place(self.me, at.kind.axis)),
            Gather: self.by_table_sharding(whole(self.looked_up), _RANK_INDEPENDENT[Gather]),
            Scatter: self.by_table_sharding(whole(self.scattered), _RANK_INDEPENDENT[Scatter]),
            Append: self.by_table_sharding(self.appended, _RANK_INDEPENDENT[Append]),
        }

    @staticmethod
    def by_table_sharding(sharded: Meaning, replicated: Meaning) -> Meaning:
        """Choose between the semantics for a sharded and for a replicated table."""

        def chosen(at: At[Any]) -> None:
            (sharded if at.kind.mesh_axis else replicated)(at)

        return chosen

    def collective(self, at: At[Collective]) -> None:
        """Run a collective."""
        # without an axis, all ranks contribute the same array
        (whole(self.exchanged) if at.kind.axis else _RANK_INDEPENDENT[Collective])(at)

    def exchanged(self, at: At[Collective]) -> Array:
        """Exchange arrays with the group and return this rank's result."""
        kind = at.kind
        arrays = self.rendezvous.exchange(self.me, kind.axis, at.operands[0].array)
        assert len(arrays) == at.of(kind.ranks), f"{at.op.name!r}: {len(arrays)} ranks, expected {at.of(kind.ranks)}"
        if kind.inplace and kind.collective == "all_gather":
            at.made[0] = _unsharded_view(
                at.operands[0], kind.dim, len(arrays), self.rendezvous.place(self.me, kind.axis)
            )
        elif kind.inplace:
            group_rank = self.rendezvous.place(self.me, kind.axis) if kind.collective == "reduce_scatter" else None
            at.view(
                lambda array: array if group_rank is None else _shard_view(array, kind.dim, len(arrays), group_rank)
            )
        return together(at, arrays, self.rendezvous.place(self.me, kind.axis))

    def local_shard(self, at: At[LocalShard]) -> None:
        """Take the rank's shard."""
        kind, ranks, blocks = at.kind, at.of(at.kind.ranks), at.of(at.kind.blocks)
        me = self.rendezvous.place(self.me, kind.axis)
        if blocks == 1:
            at.view(lambda array: _shard_view(array, kind.dim, ranks, me))
        else:
            whole(lambda at: cut(at.operands[0].array, kind.dim, blocks, ranks, me))(at)

    def unshard(self, at: At[Unshard]) -> None:
        """View the whole buffer around the rank's shard."""
        kind = at.kind
        at.made[0] = _unsharded_view(
            at.operands[0], kind.dim, at.of(kind.ranks), self.rendezvous.place(self.me, kind.axis)
        )

    def local_rows(self, at: At[Any], rows: int) -> tuple[Array, Array, Array]:
        """Translate global row indices to local ones, with masks of its own rows and of `padding_idx`."""
        axis = at.kind.mesh_axis
        ranks, me = len(self.rendezvous.group(self.me, axis)), self.rendezvous.place(self.me, axis)
        index = at.operands[1].array.astype(int) % (rows * ranks)
        local_index = index - me * rows
        return local_index, (local_index >= 0) & (local_index < rows), index == at.kind.padding_idx

    def looked_up(self, at: At[Gather]) -> Array:
        """Look up the local rows, with zeros for other ranks' rows."""
        table, batch = at.operands[0].array, at.kind.batch
        local_index, is_local, _ = self.local_rows(at, table.shape[batch])
        rows = table[(*np.indices(local_index.shape)[:batch], np.where(is_local, local_index, 0))]
        return np.where(is_local.reshape(*is_local.shape, *(1,) * (rows.ndim - is_local.ndim)), rows, 0.0)

    def scattered(self, at: At[Scatter]) -> Array:
        """Write the updates to local rows."""
        kind, target, updates = at.kind, at.operands[0].array, at.operands[-1].array
        if kind.overwrites():
            at.made[0] = at.operands[0]
        local_index, is_local, is_passed = self.local_rows(at, target.shape[kind.batch])
        is_local = is_local & ~is_passed if kind.mode == "add" else is_local
        result = np.array(target)
        rows = (*(i[is_local] for i in np.indices(local_index.shape)[: kind.batch]), local_index[is_local])
        if kind.mode == "set":
            result[rows] = updates[is_local]
        else:
            (np.add if kind.mode == "add" else np.maximum).at(result, rows, updates[is_local])
        return result

    def appended(self, at: At[Append]) -> None:
        """Append the new positions that fall into the rank's cache shard; later ranks hold the positions after it."""
        axis = at.kind.mesh_axis
        later = len(self.rendezvous.group(self.me, axis)) - 1 - self.rendezvous.place(self.me, axis)
        appended(at, later * at.operands[0].array.shape[at.kind.axis])


# -- whole graphs ------------------------------------------------------------------------------------------------------


def run_ranks(
    graph: Graph, inputs: Mapping[str, Any], degrees: Mapping[str, int] | None = None, **dims: int
) -> list[tuple[Rank, Run]]:
    """Run a sharded graph on every rank of its mesh concurrently.

    Parameters
    ----------
    graph : Graph
        A graph from `costgraph.shard`.
    inputs : mapping of str to array
        Global values of sources by name. Each rank gets its shard.
    degrees : mapping of str to int, optional
        Size of mesh axes that the graph does not determine.
    **dims : int
        A size for every dimension without a default, mesh degrees included.

    Returns
    -------
    list of (dict, Run)
        The mesh coordinates of each rank, and its run.

    Raises
    ------
    GraphError
        If the graph is not sharded.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> D, F = cg.dims("D F")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.einsum(g.input("x", (D,)), g.param("w", (D, F)), "d, d f -> f"))
    >>> s = cg.shard(g, cg.mesh(tp=2), {"w": "(d tp) f"})
    >>> ranks = testing.run_ranks(s, {"x": [1, 2, 3, 4], "w": [[1], [1], [1], [1]]}, D=4, F=1)
    >>> [(place, counted.outputs[0].tolist()) for place, counted in ranks]
    [({'tp': 0}, [10.0]), ({'tp': 1}, [10.0])]
    """
    mesh = _mesh(graph, degrees or {}, dims)
    rendezvous = _Rendezvous(mesh.ranks, graph.sharding.mesh)  # type: ignore[union-attr]  # `_mesh` has looked
    sizes = {name: n for name, n in dims.items() if name in known_names(graph)}
    places = graph.sharding.places  # type: ignore[union-attr]
    rank_only = [t for t in graph.tensors if t.name in graph.sharding.own]  # type: ignore[union-attr]
    results: list[Any] = [None] * len(mesh.ranks)

    def run_rank(me: int) -> None:
        try:
            arrays = {n: np.asarray(a, dtype=float) for n, a in inputs.items()}
            RANK.set(mesh.ranks[me])  # context variables are per thread
            shards = {n: mesh.part(a, places[n], mesh.ranks[me]) for n, a in arrays.items()}
            shards |= {
                t.name: np.full(tuple(map(mesh.sizes, t.sizes)), np.nan) for t in rank_only if t.name not in shards
            }
            results[me] = run(graph, shards, meanings=_Rank(me, rendezvous).meanings, **sizes)
        except BaseException as error:  # re-raised in the main thread
            results[me] = error
            rendezvous.barrier.abort()

    threads = [Thread(target=run_rank, args=(i,)) for i in range(len(mesh.ranks))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    failed = [e for e in results if isinstance(e, BaseException)]
    for error in sorted(failed, key=lambda e: isinstance(e, BrokenBarrierError)):
        raise error
    return list(zip(mesh.ranks, results, strict=True))


def _mesh(graph: Graph, degrees: Mapping[str, int], dims: Mapping[str, int]) -> _Mesh:
    need_graph("run_ranks", graph)
    sharding = graph.sharding
    if sharding is None:
        raise GraphError(
            f"run_ranks of graph {graph.name!r}, which is not sharded: expected a graph from costgraph.shard"
        )
    point = {**graph.defaults, **dims}
    axis_sizes = {name: degrees[name] if name in degrees else int(Sizes(point)(n)) for name, n in sharding.mesh.axes}
    point |= {str(n): axis_sizes[name] for name, n in sharding.mesh.axes if n.constant is None}
    return _Mesh(sharding, Sizes(point), axis_sizes)


def check_sharded(
    graph: Graph, sharded: Graph, degrees: Mapping[str, int] | None = None, *, seed: int = 0, **dims: int
) -> None:
    """Check that a sharded graph, run on all ranks, computes the same values as the original graph.

    Outputs, gradients and tensors updated in place (parameters, optimizer states) are assembled from the shards of all
    ranks. Dropout keeps all elements because the ranks draw different masks.

    Parameters
    ----------
    graph : Graph
        The graph before sharding.
    sharded : Graph
        The graph that `costgraph.shard` returned for it.
    degrees : mapping of str to int, optional
        Size of mesh axes that the graph does not determine.
    seed : int
        Seed of the input values.
    **dims : int
        A size for every dimension, mesh degrees included.

    Raises
    ------
    AssertionError
        If a value differs by more than 1e-9 relative.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph import testing
    >>> B, D, n = cg.dims("B D n")
    >>> with cg.Graph("g") as g:
    ...     y = cg.linear(g.input("x", (B, D)), "b d -> b e", e=D)
    ...     g.output(cg.reduce(y * y, "b e -> ", "mean"))
    >>> step = cg.training_step(g)
    >>> zero = cg.shard(step, cg.mesh(dp=n), {"x": "(b dp) d", "*/weight*": "(d dp) e"}, gather="dp")
    >>> testing.check_sharded(step, zero, B=4, D=6, n=2)
    """
    mesh = _mesh(sharded, degrees or {}, dims)
    values = _numbers(graph, mesh.sizes, np.random.default_rng(seed))
    sizes = {name: n for name, n in dims.items() if name in known_names(graph)}
    expected = run(graph, values, meanings=_RANK_INDEPENDENT, **sizes)
    ranks = [counted for _, counted in run_ranks(sharded, values, degrees, **dims)]
    sharding = sharded.sharding
    assert sharding is not None  # checked by run_ranks

    def compare(quantity: str, reference: Array, target: Placement, select: Callable[[Run], Array]) -> None:
        if not reference.size:  # stacked over no iterations
            return
        assembled = mesh.assembled([select(counted) for counted in ranks], target, reference.shape)
        assert np.allclose(assembled, reference, rtol=1e-9, atol=1e-12, equal_nan=True), f"{quantity} differs on a mesh"

    for i, array in enumerate(expected.outputs):
        compare(f"output {i + 1}", array, sharding.outputs[i], lambda counted, i=i: counted.outputs[i])  # type: ignore[misc]
    for name, array in expected.gradients.items():
        placement = sharding.gradients[name]
        compare(f"gradient of {name!r}", array, placement, lambda counted, name=name: counted.gradients[name])  # type: ignore[misc]
    sources = _sources(expected)
    rank_sources = [
        {k: v for k, v in _sources(rank).items() if k.partition("[")[0] not in sharding.own} for rank in ranks
    ]
    by_run = dict(zip(map(id, ranks), rank_sources, strict=True))
    assert all(len(names) == len(sources) for names in rank_sources), "a rank has other sources"
    for name, array in sources.items():
        placement = sharding.places[name.partition("[")[0]]
        # a stacked source has one buffer per iteration: drop the leading axes
        placement = placement.with_dims(placement.dims[len(placement.dims) - array.ndim :])
        compare(f"{name!r}", array, placement, lambda counted, name=name: by_run[id(counted)][name])  # type: ignore[misc]


def _sources(run: Run) -> dict[str, Array]:
    """Return all sources' values after a run, by name and iteration."""
    return {v.buffer.name: v.array for t, v in run.values if t.producer is None and t.role != "formal"}


def _numbers(graph: Graph, sizes: Sizes, random: np.random.Generator) -> dict[str, Array]:
    """Return values for all sources: random numbers from 0.5 to 2 for floats, small indices for integers."""
    values = {}
    for t in (t for g in graph.bodies() for t in g.tensors if t.producer is None and t.role != "formal"):
        shape = tuple(sizes(n) for n in t.sizes)
        count = prod(shape)
        if t.dtype.kind == "float":
            values[t.name] = random.uniform(0.5, 2, shape)
        else:
            values[t.name] = np.arange(count, dtype=float).reshape(shape) % (
                2 if t.dtype.kind == "bool" else max(count, 1)
            )
    return values
