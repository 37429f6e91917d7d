"""Reference semantics and sample strategies of op kinds outside the interpreter's core.

Covers KV caches, gradient ops, top-k and expert routing, point-to-point transfers, gather and scatter, collectives,
gradient accumulation and optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import ceil, comb
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..algebra.polynomial import poly
from ..algebra.symbols import dims
from ..dtypes import DTYPES
from ..ir.graph import OpKind, Tensor, apply
from ..nn.conv import pool
from ..ops.collectives import REDUCING, Collective, LocalShard, Merge, Pack, Receive, Send, Unshard
from ..ops.elementwise import pointwise
from ..ops.experts import (
    ROUTINGS,
    Dispatch,
    GroupedMatmul,
    GroupedOuter,
    TopK,
    dispatch,
    grouped_matmul,
    grouped_outer,
    top_k,
)
from ..ops.fill import Assign, Fill, Pad, SliceUpdate, assign, fill, pad
from ..ops.index import Gather, Scatter, Sort, arange, gather, sort, take_along
from ..ops.kv_cache import Append, Cache, InitialState, append, cache, initial_state
from ..ops.layout import KeepAlive, StopGradient, contiguous_copy, expand, keep_alive, slice_axis, stop_gradient
from ..ops.loops import Accumulate, Empty, Stacked, Undef, accumulate, undef
from ..ops.opaque import CustomCall, Opaque, StatedCosts
from ..ops.reduce import Pool, PoolBackward
from ..ops.updates import FusedUpdate, Unscale, ZeroGrad
from ..optimizers.adaptive import Adam
from ..optimizers.optimizer import fused_update
from ..optimizers.sgd import SGD
from .arithmetic import FUNCTIONS, Number, function, tally
from .interpreter import Array, At, Point, Value, reference_semantics
from .strategies import Sketch, strategy

__all__ = [
    "appended",
    "merged",
    "cut",
    "joined",
    "together",
]


# -- KV cache ----------------------------------------------------------------------------------------------------------


@reference_semantics(Cache)
def _cache(at: At[Cache]) -> None:
    at.view(np.asarray)


@strategy(Cache)
def _drawn_cache(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    names = [f"a{i}" for i in range(x.ndim)]
    along = s.one_of([None, *names])
    return [cache(x, " ".join(names), along=along, window=s.one_of([None, 2]) if along else None)]


@reference_semantics(InitialState)
def _initial_state(at: At[InitialState]) -> None:
    for index in at.result().index():
        at.write(0.0, *index)


@strategy(InitialState)
def _drawn_state(s: Sketch) -> Sequence[Tensor]:
    return [initial_state(s.shape(), s.one_of(["fp32", "bf16"]))]


def appended(at: At[Append], reserved: int = 0) -> None:
    """Write the new positions to the end of the cache, except the last `reserved`, which later ranks hold."""
    at.made[0] = at.operands[0]
    axis = at.kind.axis
    room, count = at.operands[0].array.shape[axis], max(at.operands[1].array.shape[axis] - reserved, 0)
    written = min(room, count)
    for index in at.operands[1].points():
        position = index[axis] - (count - written)
        if 0 <= position < written:
            target = (*index[:axis], room - written + position, *index[axis + 1 :])
            at.write(at.read(1, *index), *target)


reference_semantics(Append)(appended)


@strategy(Append)
def _drawn_append(s: Sketch) -> Sequence[Tensor]:
    positions = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis = s.number(0, positions.ndim - 1)
    room = s.one_of([positions.shape[axis], positions.shape[axis] + 2, 1])
    cached = fill((*positions.shape[:axis], room, *positions.shape[axis + 1 :]), 1.5, s.one_of(["fp32", "bf16"]))
    return [append(cached, positions, axis)]


# -- gradient ops ------------------------------------------------------------------------------------------------------


@reference_semantics(Fill)
def _fill(at: At[Fill]) -> None:
    (value,) = at.of((at.kind.value,))
    for index in at.result().index():
        at.write(value, *index)


@strategy(Fill)
def _drawn_fill(s: Sketch) -> Sequence[Tensor]:
    return [fill(s.shape(), s.one_of([0, 1, -1.5]), s.one_of(["fp32", "bf16"]))]


@reference_semantics(Assign)
def _assign(at: At[Assign]) -> None:
    at.made[0] = at.operands[0]
    for index in at.operands[1].points():
        at.write(at.read(1, *index), *index)


@strategy(Assign)
def _drawn_assign(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor()
    target = x if s.may_change(x) and x.touched == x.numel else fill(x.shape, dtype=s.one_of(["fp32", "bf16"]))
    value = s.one_of(s.others(lambda t: t.sizes == x.sizes and t.storage is not x.storage) or [s.like(x)])
    return [assign(target, value)]


@reference_semantics(Pad)
def _pad(at: At[Pad]) -> None:
    axis, start, step = at.kind.axis, at.of(at.kind.start), at.kind.step
    x = at.operands[0].array
    for index in product(*map(range, at.result().array.shape)):
        position = (index[axis] - start) / step
        if not at.operands[0].holds((*index[:axis], 0, *index[axis + 1 :])):
            continue  # zeros outside the domain
        if position in range(x.shape[axis]):
            at.write(at.read(0, *index[:axis], int(position), *index[axis + 1 :]), *index)
        else:
            at.write(0.0, *index)


@strategy(Pad)
def _drawn_pad(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and s.elements(t) <= 24, s.shape(s.number(1, 3), 24))
    axis, step, start = s.axis(x), s.number(1, 2), s.one_of([0, 1, dims("A")])
    padded_size = start + (x.sizes[axis].expr - 1) * step + s.number(1, 2)
    return [pad(x, axis, start, padded_size, step)]


@strategy(PoolBackward)
def _drawn_pool_backward(s: Sketch) -> Sequence[Tensor]:
    x = s.fresh((*s.shape(1, 6), s.number(3, 5)))
    width = s.number(1, 3)
    operation = s.one_of(["max", "mean"])
    pooled = pool(x, operation, window=(width,), stride=s.number(1, 3), padding=s.number(0, width // 2))
    assert pooled.producer is not None
    kind = pooled.producer.kind
    assert isinstance(kind, Pool)
    gradient_kind = PoolBackward(
        pattern=kind.pattern, extents=kind.extents, operation=kind.operation, exclude_padding=kind.exclude_padding
    )
    places = [s.fresh(pooled.shape, "int64", "input")] if operation == "max" else []
    return apply(gradient_kind, [s.fresh(pooled.shape, x.dtype.name), x, *places], "pool_backward")


# -- top-k and expert routing ------------------------------------------------------------------------------------------


@reference_semantics(TopK)
def _top_k(at: At[TopK]) -> None:
    *lead, length = at.operands[0].array.shape
    for index in product(*map(range, lead)):
        values = [at.read(0, *index, i) for i in range(length)]
        # stable: the first of equal values wins
        order = sorted(range(length), key=values.__getitem__, reverse=not at.kind.smallest)
        at.tally.pointwise += length
        for j in range(at.of(at.kind.k)):
            at.write(values[order[j]], *index, j)
            at.write(order[j], *index, j, to=1)


@reference_semantics(Sort)
def _sort(at: At[Sort]) -> None:
    *lead, length = at.operands[0].array.shape
    for index in product(*map(range, lead)):
        values = [at.read(0, *index, i) for i in range(length)]
        order = sorted(range(length), key=values.__getitem__, reverse=at.kind.descending)
        at.tally.pointwise += length
        for j in range(length):
            at.write(values[order[j]], *index, j)
            at.write(order[j], *index, j, to=1)


@reference_semantics(Dispatch)
def _dispatch(at: At[Dispatch]) -> None:
    """Sort choices stably by expert; padding rows up to an expert's capacity point to the first token."""
    shape, experts, capacity = at.operands[0].array.shape, at.of(at.kind.experts), at.kind.capacity
    places = list(product(*map(range, shape)))
    chosen = {index: int(at.read(0, *index)) % experts for index in places}
    room = None if capacity is None else ceil(at.of(capacity) * Fraction(len(places), experts))
    rows: list[tuple[int, int]] = []
    dropped = {}
    for expert in range(experts):
        choices = [i for i, index in enumerate(places) if chosen[index] == expert]
        accepted = choices if room is None else choices[:room]
        for row, i in enumerate(accepted, len(rows)):
            at.write(row, *places[i], to=2)
        for i in choices:
            dropped[places[i]] = i not in accepted
            if i not in accepted:
                at.write(0, *places[i], to=2)
        rows += [(i // shape[-1], expert) for i in accepted]
        rows += [(0, expert)] * (0 if room is None else room - len(accepted))
        at.write(len(rows), expert, to=1)
    for row, (token, expert) in enumerate(rows):
        at.write(token, row)
        if at.kind.owners:
            at.write(expert, row, to=3)
    if room is not None:
        for index, is_dropped in dropped.items():
            at.write(float(is_dropped), *index, to=len(at.op.results) - 1)
    at.tally.pointwise += 2 * len(places) + experts


def merged(at: At[Merge], rank: int = 0) -> None:
    """Order the rows for a rank's experts by expert, then by sender."""
    ranks, count = at.of(at.kind.ranks), at.operands[0].array.shape[0] // at.of(at.kind.ranks)
    rows_per_rank = at.of(at.kind.rows) // ranks
    ends = [
        [int(at.read(0, sender * count + e)) - rank * rows_per_rank for e in range(count)] for sender in range(ranks)
    ]
    for sender, sender_ends in enumerate(ends):
        balanced = sender_ends[0] >= 0 and sender_ends[-1] == rows_per_rank
        assert balanced, (
            f"{at.op.name!r}: rank {sender} has rows up to {sender_ends[-1] + rank * rows_per_rank} for rank {rank} "
            f"of {ranks} and "
            f"those before, expected {(rank + 1) * rows_per_rank}: the routing is not balanced"
        )
    row = 0
    for e in range(count):
        for sender, sender_ends in enumerate(ends):
            for i in range(sender_ends[e - 1] if e else 0, sender_ends[e]):
                at.write(sender * rows_per_rank + i, row, to=1)
                at.write(row, sender * rows_per_rank + i, to=2)
                if at.kind.owners:
                    at.write(e, row, to=3)
                row += 1
        at.write(row, e)
    at.tally.pointwise += ranks * (rows_per_rank + count)


reference_semantics(Merge)(merged)


def _owners(at: At[OpKind], rows: int) -> list[int | None]:
    """Return the expert of each row, None for rows after the last expert's end."""
    ends = [int(at.read(2, e)) for e in range(at.operands[2].array.shape[0])]
    return [next((e for e, end in enumerate(ends) if row < end), None) for row in range(rows)]


@reference_semantics(GroupedMatmul)
def _grouped_matmul(at: At[GroupedMatmul]) -> None:
    """Multiply rows by their expert's matrix, and flag rows that differ from the routing assumption."""
    (rows, width), (experts, _, features) = at.operands[0].array.shape, at.operands[1].array.shape
    owners = _owners(at, rows)
    for row, owner in enumerate(owners):
        for f in range(features):
            total = 0.0
            for d in range(width):
                x = at.read(0, row, d)
                total += 0.0 if owner is None else x * at.read(1, owner, d, f)
                at.tally.matmul += 2
                at.tally.full += 2
            at.write(total, row, f)
    routing, active = at.kind.routing, len(set(owners) - {None})
    experts_read: Fraction | int = experts if routing == "capacity" else active
    if routing == "capacity":
        for index in product(range(experts), range(width), range(features)):
            at.read(1, *index)
    elif routing == "balanced":
        at.repeats = at.repeats or active != min(experts, rows)
    else:
        chosen = at.of(at.kind.chosen)
        experts_read = _mean_touched(experts, chosen, Fraction(rows, chosen))
        sizes = [b.element * b.array.size for b in (at.operands[0].buffer, at.operands[2].buffer)]
        at.stated["reads"] = sum(sizes) + experts_read * width * features * at.operands[1].buffer.element
        at.repeats = True  # the formula assumes the mean number of experts, not the actual one
    at.tally.pointwise += at.kind.unpack_flops * width * features * experts_read


def _mean_touched(experts: int, chosen: int, tokens: Fraction) -> Fraction:
    """Return the expected number of active experts if tokens choose independently and uniformly."""
    miss = Fraction(comb(experts - 1, chosen), comb(experts, chosen))
    assert tokens.denominator == 1
    return experts * (1 - miss ** int(tokens))


@reference_semantics(GroupedOuter)
def _grouped_outer(at: At[GroupedOuter]) -> None:
    (rows, a_width), b_width = at.operands[0].array.shape, at.operands[1].array.shape[1]
    gradient = at.result().array
    for index in product(*map(range, gradient.shape)):
        at.write(0.0, *index)
    for row, owner in enumerate(_owners(at, rows)):
        for i, j in product(range(a_width), range(b_width)):
            term = at.read(0, row, i) * at.read(1, row, j)
            at.tally.matmul += 2
            at.tally.full += 2
            if owner is not None:
                at.write(gradient[owner, i, j] + term, owner, i, j)


# -- expert routing: samples -------------------------------------------------------------------------------------------


@strategy(TopK)
def _drawn_top_k(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1 and t.sizes[-1].constant is not None, (*s.shape(s.number(0, 2), 6), 3))
    values, ids = top_k(x, s.number(1, s.value(x.sizes[-1])))
    return [values, take_along(x, ids)]  # the order of equal elements is undefined


@strategy(Sort)
def _drawn_sort(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.ndim >= 1, (*s.shape(s.number(0, 2), 6), 3))
    values, ids = sort(x, descending=s.chance(1))
    return [values, take_along(x, ids)]  # the order of equal elements is undefined


def _sent(s: Sketch, capacity: object = None) -> tuple[int, int, Tensor, Tensor]:
    """Draw expert choices 0, 1, 2, ..., which are balanced."""
    experts, chosen = s.number(1, 4), s.number(1, 2)
    tokens = s.one_of([1, 2, 3, *dims("A B")])
    ids = s.fresh((tokens, min(chosen, experts)), s.one_of(["int64", "int32"]), "input")
    sent = dispatch(ids, experts, capacity=capacity)
    return experts, min(chosen, experts), sent.ends, sent.tokens


@strategy(Dispatch)
def _drawn_dispatch(s: Sketch) -> Sequence[Tensor]:
    experts, tokens = s.number(1, 4), s.one_of([1, 2, 3, *dims("A B")])
    ids = s.fresh((tokens, s.number(1, 2)), "int64", "input")
    sent = dispatch(ids, experts, capacity=s.one_of([None, None, 0.5, 1, 1.25]), owners=s.chance(1))
    table = s.fresh((tokens, s.number(1, 2)), "fp32")
    rows = gather(table, sent.tokens)
    return [rows, gather(rows, sent.places)]


@strategy(Merge)
def _drawn_merge(s: Sketch) -> Sequence[Tensor]:
    """Exchange rows between two ranks with equal choices and balanced experts."""
    ranks, experts, chosen = 2, 2 * s.number(1, 2), s.number(1, 2)
    ids = expand(arange(experts), "token -> token choice", choice=chosen)
    sent = dispatch(contiguous_copy(ids), experts)
    exchange = Collective(collective="all_to_all", ranks=poly(ranks), axis="x", source=0)
    (ends,) = apply(exchange, [sent.ends], "all_to_all")
    rows = poly(experts * chosen)
    kind = Merge(ranks=poly(ranks), axis="x", rows=rows, chosen=poly(chosen) / ranks, owners=s.chance(1))
    return apply(kind, [ends], "merge")


@strategy(GroupedMatmul)
def _drawn_grouped_matmul(s: Sketch) -> Sequence[Tensor]:
    routing = s.one_of(ROUTINGS)
    experts, chosen, ends, tokens = _sent(s, 1.25 if routing == "capacity" else None)
    width, features = s.number(1, 3), s.one_of([1, 2, *dims("A B")])
    rows = s.fresh((*tokens.shape, width), s.one_of(["fp32", "bf16"]))
    weights = s.fresh((experts, width, features), "fp32")
    return [grouped_matmul(rows, weights, ends, chosen, routing=routing)]


@strategy(GroupedOuter)
def _drawn_grouped_outer(s: Sketch) -> Sequence[Tensor]:
    _, _, ends, tokens = _sent(s)
    a, b = (s.fresh((*tokens.shape, s.number(1, 3)), s.one_of(["fp32", "bf16"])) for _ in range(2))
    return [grouped_outer(a, b, ends)]


# -- point-to-point transfers ------------------------------------------------------------------------------------------
# The interpreter runs a single stage: it sends to no one and receives zeros.


@reference_semantics(Send)
def _send(at: At[Send]) -> None:
    for index in at.operands[0].points():
        at.read(0, *index)
    at.view(np.asarray)


@reference_semantics(Receive)
def _receive(at: At[Receive]) -> None:
    for index in np.ndindex(*at.result().array.shape):
        at.write(0, *index)


@strategy(Send)
def _drawn_send(s: Sketch) -> Sequence[Tensor]:
    return apply(Send(), [s.tensor()], "send")


@strategy(Receive)
def _drawn_receive(s: Sketch) -> Sequence[Tensor]:
    return apply(Receive(sizes=tuple(map(poly, s.shape())), dtype=s.fresh(()).dtype), [], "receive")


# -- gather, scatter and opaque ops ------------------------------------------------------------------------------------


def _rows(at: At[Gather | Scatter]) -> dict[Point, Point]:
    """Read every index once and return its table row, modulo the table size.

    Repeated rows are recorded.
    """
    (table, *ids), batch = at.operands[: len(at.operands) - at.kind.after], at.kind.batch
    rows = {}
    for index in product(*map(range, ids[0].array.shape)):
        table_index = (int(at.read(k + 1, *index)) % table.array.shape[batch + k] for k in range(len(ids)))
        rows[index] = (*index[:batch], *table_index)
    lookups: dict[int, set[tuple[int, ...]]] = {}
    for index, row in rows.items():
        row_address = table.address(row + (0,) * (table.array.ndim - len(row)))
        lookups.setdefault(row_address, set()).add(tuple(t.address(index) for t in ids))
    at.repeats = at.repeats or any(len(cells) > 1 for cells in lookups.values())
    return rows


def _row_contents(at: At[Gather | Scatter]) -> list[Point]:
    return list(product(*map(range, at.operands[0].array.shape[at.kind.row(at.op.operands)])))


@reference_semantics(Gather)
def _gather(at: At[Gather]) -> None:
    for index, row in _rows(at).items():
        for content in _row_contents(at):
            at.write(at.read(0, *row, *content), *index, *content)


@reference_semantics(Scatter)
def _scatter(at: At[Scatter]) -> None:
    target, *_, updates = at.operands
    if at.kind.overwrites():
        at.made[0] = target
    else:
        for index in product(*map(range, target.array.shape)):
            at.write(at.read(0, *index), *index)
    result = at.result().array
    for index, row in _rows(at).items():
        for content in _row_contents(at):
            x, target_index = at.number(len(at.operands) - 1, *index, *content), (*row, *content)
            if at.kind.mode == "set":
                at.write(x, *target_index)
                continue
            if at.kind.overwrites():
                at.read(0, *target_index)
            if at.kind.mode == "add":
                added = x + result[target_index]
                at.write(result[target_index] if row[at.kind.batch] == at.kind.padding_idx else added, *target_index)
            else:
                at.tally.pointwise += 1
                at.write(max(x.value, result[target_index]), *target_index)
    assert updates.array.size or at.kind.mode == "set"


# -- declared costs ----------------------------------------------------------------------------------------------------


@reference_semantics(CustomCall, Opaque)
def _declared_costs(at: At[StatedCosts]) -> None:
    """Trust the declared costs: opaque ops have no semantics."""
    kind = at.kind
    full_matmul = kind.full if isinstance(kind, CustomCall) else kind.matmul
    at.tally = tally(*map(at.of, (kind.matmul, full_matmul, kind.pointwise, kind.transcendental)))
    for i, t in enumerate(at.op.results):
        if any(t.storage is x.storage for x in at.op.operands):
            _view(at, i)
            continue
        for index in product(*map(range, at.result(i).array.shape)):
            at.write(0.0, *index, to=i)
    for i, v in enumerate(at.operands):
        for index in v.points():
            at.read(i, *index)
    for direction, amounts in (("reads", kind.bytes_read), ("writes", kind.bytes_written)):
        if amounts is not None:
            at.stated[direction] = sum(at.of(amounts))


def _view(at: At[StatedCosts], i: int) -> None:
    """Make a result that shares an operand's storage, possibly beyond the operand's own elements."""
    t = at.op.results[i]
    base = next(n for n, x in enumerate(at.op.operands) if x.storage is t.storage)
    x, source = at.op.operands[base], at.operands[base]
    if not isinstance(source, Value) or x.dtype.bits != t.dtype.bits:
        return  # per-iteration lists, and views with another element size
    shape, strides = at.of(t.sizes), at.of(t.strides)
    base_array = source.buffer.array
    start = source.address((0,) * source.array.ndim) // base_array.itemsize + at.of(t.offset - x.offset)
    end = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert 0 <= start <= end < base_array.size, f"{at.op.name!r} reads beyond the storage of operand {base + 1}"
    flat = as_strided(base_array, (base_array.size,), (base_array.itemsize,))  # in memory order
    at.made[i] = Value(as_strided(flat[start:], shape, [s * base_array.itemsize for s in strides]), source.buffer)


# -- collectives -------------------------------------------------------------------------------------------------------

# -- a single rank, as if all ranks contributed equal values -----------------------------------------------------------


def _global_position(i: int, length: int, ranks: int, blocks: int) -> int:
    """Return the global position of the first rank's i-th position on a blockwise sharded axis."""
    block = length // blocks
    return (i // block) * block * ranks + i % block


def _local_position(i: int, length: int, ranks: int, blocks: int) -> int:
    """Return the local position on a rank for position i of a blockwise gathered axis."""
    block = length // blocks
    return (i // (block * ranks)) * block + i % block


def _source_index(at: At[Collective], index: Point, result_shape: Point) -> Point:
    """Return the operand element at an index point of the first rank's result."""
    kind, ranks, source = at.kind, at.of(at.kind.ranks), list(index)
    if not source:
        return index
    shape = at.operands[0].array.shape
    if kind.source == kind.dim:
        length = shape[kind.dim] // ranks
        position = _local_position(index[kind.dim], length, ranks, at.of(kind.source_blocks))
        source[kind.dim] = _global_position(position, length, ranks, at.of(kind.blocks))
        return tuple(source)
    if kind.collective == "all_gather":
        source[kind.dim] = _local_position(index[kind.dim], shape[kind.dim], ranks, at.of(kind.blocks))
    elif kind.collective == "reduce_scatter" or kind.source is not None:
        source[kind.dim] = _global_position(index[kind.dim], result_shape[kind.dim], ranks, at.of(kind.blocks))
    if kind.source is not None:
        source[kind.source] = _local_position(index[kind.source], shape[kind.source], ranks, at.of(kind.source_blocks))
    return tuple(source)


@reference_semantics(Collective)
def _collective(at: At[Collective]) -> None:
    """Run the collective with equal contributions from all ranks, and charge each its share of the additions."""
    kind, ranks = at.kind, at.of(at.kind.ranks)
    reducing, additions = kind.collective in REDUCING, 0
    totals = {}
    for index in at.operands[0].points():
        total = Number(at.read(0, *index), tally())
        for _ in range(ranks - 1 if reducing else 0):
            contribution = at.operands[0].array[index]
            total = total + contribution if kind.operation in ("sum", "mean") else total
            additions += 1
        totals[index] = total.value / ranks if kind.operation == "mean" and reducing else total.value
    if kind.inplace:
        shard_size = at.operands[0].array.shape[kind.dim] // ranks if kind.collective == "reduce_scatter" else None
        at.view(lambda array: array[((slice(None),) * kind.dim + (slice(0, shard_size),))] if array.ndim else array)
    result = at.result()
    for index in list(result.index()):
        source = _source_index(at, index, result.array.shape)
        if source in totals:  # elements outside the domain are absent
            at.write(totals[source], *index)
    at.tally.pointwise += Fraction(additions, ranks)


@reference_semantics(Pack)
def _pack(at: At[Pack]) -> None:
    at.made[0] = at.operands[0]
    places = iter(list(at.operands[0].index()))
    for i in range(1, len(at.operands)):
        for index in list(at.operands[i].points()):
            at.write(at.read(i, *index), *next(places))


@reference_semantics(Unshard)
def _unshard(at: At[Unshard]) -> None:
    source, ranks, dim = at.operands[0], at.of(at.kind.ranks), at.kind.dim
    flat = source.buffer.array.reshape(-1)[source.address((0,) * source.array.ndim) // source.array.itemsize :]
    shape = [n * ranks if i == dim else n for i, n in enumerate(source.array.shape)]
    at.made[0] = Value(np.lib.stride_tricks.as_strided(flat, shape, source.array.strides), source.buffer)


@reference_semantics(LocalShard)
def _local_shard(at: At[LocalShard]) -> None:
    kind, ranks, blocks = at.kind, at.of(at.kind.ranks), at.of(at.kind.blocks)
    if blocks == 1:
        lead = (slice(None),) * kind.dim
        at.view(lambda array: array[(*lead, slice(0, array.shape[kind.dim] // ranks))])
        return
    result = at.result()
    for index in list(result.index()):
        source = list(index)
        source[kind.dim] = _global_position(index[kind.dim], result.array.shape[kind.dim], ranks, blocks)
        if at.operands[0].holds(tuple(source)):
            at.write(at.read(0, *source), *index)


# -- all ranks ---------------------------------------------------------------------------------------------------------

_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def cut(array: Array, dim: int, blocks: int, ranks: int, rank: int) -> Array:
    """Return a rank's shard of each block along an axis."""
    shape = array.shape
    size = shape[dim]
    split = array.reshape(*shape[:dim], blocks, ranks, size // blocks // ranks, *shape[dim + 1 :])
    shard: Array = np.take(split, rank, axis=dim + 1)
    return shard.reshape(*shape[:dim], size // ranks, *shape[dim + 1 :])


def joined(shards: Sequence[Array], dim: int, blocks: int) -> Array:
    """Concatenate the shards of all ranks block by block."""
    shape = shards[0].shape
    split = [p.reshape(*shape[:dim], blocks, 1, shape[dim] // blocks, *shape[dim + 1 :]) for p in shards]
    return np.concatenate(split, axis=dim + 1).reshape(*shape[:dim], shape[dim] * len(shards), *shape[dim + 1 :])


def together(at: At[Collective], contributions: Sequence[Array], rank: int) -> Array:
    """Return a rank's result of a collective, from the contributions of its group."""
    kind, ranks, blocks = at.kind, len(contributions), at.of(at.kind.blocks)
    if kind.collective in REDUCING:
        total: Array = np.asarray(_REDUCE[kind.operation](np.stack(contributions), axis=0))
        if kind.collective == "all_reduce" or not total.ndim:
            return total
        return cut(total, kind.dim, blocks, ranks, rank)
    if kind.collective == "all_gather":
        return joined(contributions, kind.dim, blocks) if contributions[0].ndim else contributions[rank]
    if kind.source is None:
        return contributions[rank]
    shards = [cut(p, kind.dim, blocks, ranks, rank) for p in contributions]
    return joined(shards, kind.source, at.of(kind.source_blocks))


# -- accumulation in loops ---------------------------------------------------------------------------------------------


@reference_semantics(Accumulate)
def _accumulate(at: At[Accumulate]) -> None:
    at.made[0] = at.operands[0]
    for index in list(at.operands[0].points()):
        at.write(at.number(0, *index) + at.number(1, *index), *index)


@strategy(Accumulate)
def _drawn(s: Sketch) -> Sequence[Tensor]:
    x = s.tensor(lambda t: t.dtype.kind == "float")
    term = s.like(x)
    so_far = x if s.may_change(x) and x.touched == x.numel else fill(x.shape, dtype=x.dtype)
    return [accumulate(so_far, term)]


@reference_semantics(Empty)
def _empty(at: At[Empty]) -> None:
    at.result()


@reference_semantics(Stacked, SliceUpdate)
def _stacked(at: At[Any]) -> None:
    at.made[0] = at.operands[0]  # the slices are views of it


@strategy(Stacked)
def _drawn_stack(s: Sketch) -> Sequence[Tensor]:
    y = s.fresh(s.shape(1))
    sizes = (poly(2), *y.sizes)
    stack = apply(Empty(sizes=sizes, dtype=y.dtype), [], "empty")[0]
    return list(apply(Stacked(), [stack, y + 1, y * y], "stacked"))


@strategy(SliceUpdate)
def _drawn_slice_update(s: Sketch) -> Sequence[Tensor]:
    x = fill((poly(3), *s.fresh(s.shape(1)).sizes), 1.0)
    start, size = s.one_of([(0, 1), (1, 1), (1, 2)])
    target = slice_axis(x, 0, start, size)
    written = assign(target, pointwise("copy", target))
    return list(apply(SliceUpdate(axes=(0,), starts=(poly(start),), steps=(1,)), [x, written], "slice_update"))


@reference_semantics(Undef)
def _undef(at: At[Undef]) -> None:
    """Do nothing: an undefined tensor has no value until `accumulate` gets its first term."""


@strategy(Undef)
def _drawn_undef(s: Sketch) -> Sequence[Tensor]:
    undef(s.fresh(s.shape(1)).sizes, s.one_of([DTYPES["fp32"], DTYPES["bf16"]]))
    return []


# -- optimizer updates -------------------------------------------------------------------------------------------------


@function("add_scaled")
def _add_scaled(a: Any, b: Any, t: Any) -> Any:
    return a + t * b


@function("add_product")
def _add_product(a: Any, b: Any, c: Any) -> Any:
    return a + b * c


@function("add_quotient")
def _add_quotient(a: Any, b: Any, c: Any) -> Any:
    return a + b / c


@function("add_scaled_product")
def _add_scaled_product(a: Any, b: Any, c: Any, t: Any) -> Any:
    return a + t * b * c


@function("add_scaled_quotient")
def _add_scaled_quotient(a: Any, b: Any, c: Any, t: Any) -> Any:
    return a + t * b / c


@function("non_finite")
def _non_finite(x: Number) -> Number:
    return x.once(float(not np.isfinite(x.value)))


# -- fused updates -----------------------------------------------------------------------------------------------------


def _changeable(s: Sketch) -> Tensor:
    """Draw a tensor that ops may write in place."""
    x = s.tensor(lambda t: s.may_change(t) and t.touched == t.numel)
    return x if s.may_change(x) and x.touched == x.numel else fill(x.shape, 1.5)


@reference_semantics(KeepAlive)
def _keep_alive(at: At[KeepAlive]) -> None:
    at.view(np.asarray)


@reference_semantics(StopGradient)
def _stop(at: At[StopGradient]) -> None:
    at.view(np.asarray)


@strategy(StopGradient)
def _drawn_stop(s: Sketch) -> Sequence[Tensor]:
    return [stop_gradient(s.tensor())]


@strategy(KeepAlive)
def _drawn_keep_alive(s: Sketch) -> Sequence[Tensor]:
    return [keep_alive(s.tensor(), *(s.tensor() for _ in range(s.number(0, 2))))]


@reference_semantics(FusedUpdate)
def _fused_update(at: At[FusedUpdate]) -> None:
    """Run the update's steps per element, with intermediates in registers."""
    changed, steps, updated = at.kind.changed, at.kind.steps, at.kind.updated
    for i, register in enumerate(changed):
        at.made[i] = at.operands[register]
    for index in at.operands[0].points():
        registers: list[Any] = [at.number(i, *index) for i in range(updated)]
        for record, scalars, places, target in steps:
            register_indices = iter(places)
            arguments = [registers[next(register_indices)] if s is None else Number(s, at.tally) for s in scalars]
            output = FUNCTIONS[record.name](*arguments)
            registers[target:] = [output, *registers[target + 1 :]]
        for i, register in enumerate(changed):
            at.write(registers[register], *index, to=i)
    for i in range(updated, len(at.operands)):  # scalars read by every element, such as the step counter
        for index in at.operands[i].points():
            at.read(i, *index)


@strategy(FusedUpdate)
def _drawn_fused_update(s: Sketch) -> Sequence[Tensor]:
    x = _changeable(s)
    optimizer, count = s.one_of(
        [(SGD(), 0), (SGD(momentum=0.9, weight_decay=0.1), 1), (Adam(), 2), (Adam(amsgrad=True, maximize=True), 3)]
    )
    states = [fill(x.shape, 0.5, name="state") for _ in range(count)]
    scalars = (fill((), 1.0),) if s.chance(2) else ()
    return fused_update(optimizer._update, (x, s.fresh(x.shape, "fp32"), *states), scalars, name="fused_update")[:1]


@reference_semantics(ZeroGrad)
def _zero_grad(at: At[ZeroGrad]) -> None:
    at.made[0] = at.operands[0]
    for index in at.operands[0].points():
        at.write(0.0, *index)


@strategy(ZeroGrad)
def _drawn_zero_grad(s: Sketch) -> Sequence[Tensor]:
    return apply(ZeroGrad(), [_changeable(s)], "zero_")


@strategy(Unscale)
def _drawn_unscale(s: Sketch) -> Sequence[Tensor]:
    operands = [_changeable(s), s.fresh((), "fp32"), fill((), 0.0)]
    return apply(Unscale(), operands, "unscale")


@reference_semantics(Unscale)
def _unscale(at: At[Unscale]) -> None:
    at.made[0], (gradient, _, flag) = at.operands[0], at.operands
    inverse = at.number(1)
    at.read(2)
    for index in gradient.points():
        x = at.number(0, *index)
        if _non_finite(x).value:
            flag.array[()] = 1
        at.write(x * inverse, *index)
