"""Collectives, and the part of a rank: index point by index point where all bring the same, and by whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ..ops.collectives import REDUCING, Around, Collective, Part
from ..ops.pack import Pack
from .arithmetic import Number, tally
from .meanings import meaning
from .values import Array, At, Point, Value

__all__ = ["cut", "joined", "together"]

# -- index point by index point --------------------------------------------------------------------------------------


def _apart(i: int, length: int, ranks: int, blocks: int) -> int:
    """Return where the first rank's position on a part of each block is on the whole axis."""
    part = length // blocks
    return (i // part) * part * ranks + i % part


def _beside(i: int, length: int, ranks: int, blocks: int) -> int:
    """Return which position of a rank's own axis stands at one where all ranks have put theirs."""
    part = length // blocks
    return (i // (part * ranks)) * part + i % part


def _from(at: At[Collective], index: Point, made: Point) -> Point:
    """Return which element of the operand stands at a place of the result, for the first rank."""
    kind, ranks, source = at.kind, at.of(at.kind.ranks), list(index)
    if not source:
        return index
    shape = at.operands[0].array.shape
    if kind.source == kind.dim:
        length = shape[kind.dim] // ranks
        piece = _beside(index[kind.dim], length, ranks, at.of(kind.source_blocks))
        source[kind.dim] = _apart(piece, length, ranks, at.of(kind.blocks))
        return tuple(source)
    if kind.collective == "all_gather":
        source[kind.dim] = _beside(index[kind.dim], shape[kind.dim], ranks, at.of(kind.blocks))
    elif kind.collective == "reduce_scatter" or kind.source is not None:
        source[kind.dim] = _apart(index[kind.dim], made[kind.dim], ranks, at.of(kind.blocks))
    if kind.source is not None:
        source[kind.source] = _beside(index[kind.source], shape[kind.source], ranks, at.of(kind.source_blocks))
    return tuple(source)


@meaning(Collective)
def _collective(at: At[Collective]) -> None:
    """Play the ranks, all of which bring the same: additions are spread evenly over them."""
    kind, ranks = at.kind, at.of(at.kind.ranks)
    reducing, additions = kind.collective in REDUCING, 0
    totals = {}
    for index in at.operands[0].points():
        total = Number(at.read(0, *index), tally())
        for _ in range(ranks - 1 if reducing else 0):
            other = at.operands[0].array[index]
            total = total + other if kind.operation in ("sum", "mean") else total
            additions += 1
        totals[index] = total.value / ranks if kind.operation == "mean" and reducing else total.value
    if kind.inplace:
        own = at.operands[0].array.shape[kind.dim] // ranks if kind.collective == "reduce_scatter" else None
        at.view(lambda array: array[((slice(None),) * kind.dim + (slice(0, own),))] if array.ndim else array)
    made = at.result()
    for index in list(made.index()):
        source = _from(at, index, made.array.shape)
        if source in totals:  # of a restricted one, what there is
            at.write(totals[source], *index)
    at.tally.pointwise += Fraction(additions, ranks)


@meaning(Pack)
def _pack(at: At[Pack]) -> None:
    at.made[0] = at.operands[0]
    places = iter(list(at.operands[0].index()))
    for i in range(1, len(at.operands)):
        for index in list(at.operands[i].points()):
            at.write(at.read(i, *index), *next(places))


@meaning(Around)
def _around(at: At[Around]) -> None:
    source, ranks, dim = at.operands[0], at.of(at.kind.ranks), at.kind.dim
    whole = source.buffer.array.reshape(-1)[source.address((0,) * source.array.ndim) // source.array.itemsize :]
    shape = [n * ranks if i == dim else n for i, n in enumerate(source.array.shape)]
    at.made[0] = Value(np.lib.stride_tricks.as_strided(whole, shape, source.array.strides), source.buffer)


@meaning(Part)
def _part(at: At[Part]) -> None:
    kind, ranks, blocks = at.kind, at.of(at.kind.ranks), at.of(at.kind.blocks)
    if blocks == 1:
        lead = (slice(None),) * kind.dim
        at.view(lambda array: array[(*lead, slice(0, array.shape[kind.dim] // ranks))])
        return
    made = at.result()
    for index in list(made.index()):
        source = list(index)
        source[kind.dim] = _apart(index[kind.dim], made.array.shape[kind.dim], ranks, blocks)
        if at.operands[0].holds(tuple(source)):
            at.write(at.read(0, *source), *index)


# -- by whole arrays -------------------------------------------------------------------------------------------------

_TOGETHER: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def cut(array: Array, dim: int, blocks: int, ranks: int, rank: int) -> Array:
    """Return a rank's part of each block of an axis."""
    shape = array.shape
    size = shape[dim]
    split = array.reshape(*shape[:dim], blocks, ranks, size // blocks // ranks, *shape[dim + 1 :])
    out: Array = np.take(split, rank, axis=dim + 1)
    return out.reshape(*shape[:dim], size // ranks, *shape[dim + 1 :])


def joined(parts: Sequence[Array], dim: int, blocks: int) -> Array:
    """Put the parts of all ranks together, block by block."""
    shape = parts[0].shape
    split = [p.reshape(*shape[:dim], blocks, 1, shape[dim] // blocks, *shape[dim + 1 :]) for p in parts]
    return np.concatenate(split, axis=dim + 1).reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def together(at: At[Collective], brought: Sequence[Array], rank: int) -> Array:
    """Return what a rank gets of what all of its group have brought."""
    kind, ranks, blocks = at.kind, len(brought), at.of(at.kind.blocks)
    if kind.collective in REDUCING:
        total: Array = np.asarray(_TOGETHER[kind.operation](np.stack(brought), axis=0))
        if kind.collective == "all_reduce" or not total.ndim:
            return total
        return cut(total, kind.dim, blocks, ranks, rank)
    if kind.collective == "all_gather":
        return joined(brought, kind.dim, blocks) if brought[0].ndim else brought[rank]
    if kind.source is None:
        return brought[rank]
    parts = [cut(p, kind.dim, blocks, ranks, rank) for p in brought]
    return joined(parts, kind.source, at.of(kind.source_blocks))
