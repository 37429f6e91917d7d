"""Lower gathers, scatters, top-k, sorting and mixture-of-experts routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...errors import GraphError
from ...ir.graph import OpKind
from ...ops.collectives import Merge
from ...ops.experts import Dispatch, GroupedMatmul, GroupedOuter, TopK
from ...ops.index import Gather, Scatter, Sort
from .context import LoweringContext, lowering
from .elementwise import item

# -- gather and scatter ------------------------------------------------------------------------------------------------


def _ids(site: LoweringContext[Gather | Scatter], rows: int, axis: int = 0) -> Any:
    """Return the indices, modulo the row count if they may be out of range.

    For a sharded table they are relative to the rank's first row; other ranks' rows are out of range.
    """
    ids, group = site.operands[1 + axis], site.shared.groups.get(site.kind.mesh_axis)
    if not site.shared.indices.valid(site.op):
        ids = site.call(torch.remainder, ids, rows * (1 if group is None else group.ranks))
    return ids if group is None else site.call(torch.sub, ids, rows * group.rank)


def _local_mask(ids: torch.Tensor, rows: int, shape: Sequence[int]) -> torch.Tensor:
    """Return a mask for elements whose indices belong to this rank's rows."""
    local = (ids >= 0) & (ids < rows)
    return local.reshape(*ids.shape, *(1,) * (len(shape) - ids.ndim))


def zero_remote_rows(looked_up: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero the rows looked up on other ranks."""
    return looked_up.masked_fill_(~_local_mask(ids, rows, looked_up.shape), 0)


def scatter_local(
    target: torch.Tensor, ids: torch.Tensor, updates: torch.Tensor, batch: int, mode: str, skipped: int | None = None
) -> torch.Tensor:
    """Write updates to this rank's rows in place, except for the row `padding_idx`."""
    rows, ids = target.shape[batch], ids.long()
    local = _local_mask(ids, rows, ids.shape)
    local = local if skipped is None else local & (ids != skipped)
    if mode == "max":
        lowest = -torch.inf if target.is_floating_point() else torch.iinfo(target.dtype).min
        updates = updates.masked_fill(~_local_mask(ids, rows, updates.shape), lowest)
        row_shape = target.shape[batch + 1 :]
        positions = ids.clamp(0, rows - 1).reshape(*ids.shape[:batch], -1, *(1,) * len(row_shape))
        shape = (*positions.shape[: batch + 1], *row_shape)
        return target.scatter_reduce_(batch, positions.expand(shape), updates.reshape(shape), "amax")
    coordinates = local.nonzero(as_tuple=True)
    return target.index_put_((*coordinates[:batch], ids[coordinates]), updates[coordinates], mode == "add")


def add_except(
    target: torch.Tensor, batch: int, positions: torch.Tensor, updates: torch.Tensor, skipped: int
) -> torch.Tensor:
    """Add rows in place, except for the row `padding_idx`."""
    row = target.select(batch, skipped)
    original = row.clone()
    (target.scatter_add_ if batch else target.index_add_)(batch, positions, updates)
    row.copy_(original)
    return target


def _indices_per_axis(site: LoweringContext[Gather | Scatter], sizes: tuple[int, ...]) -> list[Any]:
    """Return the indices per indexed axis."""
    count = len(site.kind.places(site.op.operands))
    return [site.cast(_ids(site, sizes[k], k), torch.int64) for k in range(count)]


def gather_last(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gather elements along the last axis."""
    return torch.gather(table, -1, ids.long())


@lowering(Gather)
def _gather(site: LoweringContext[Gather]) -> None:
    sizes, batch = site.sizes(site.op.operands[0]), site.kind.batch
    if len(site.operands) > 2:
        site.own(torch.ops.aten.index, site.operands[0], _indices_per_axis(site, sizes))
        return
    ids, rows = _ids(site, sizes[batch]), sizes[batch]
    if site.kind.mesh_axis not in site.shared.groups:
        _look_up(site, ids)
        return
    _look_up(site, site.call(torch.clamp, ids, 0, rows - 1))
    site.alias(site.call(zero_remote_rows, site.results[0], ids, rows))


def _look_up(site: LoweringContext[Gather], ids: Any) -> None:
    """Look up rows by indices within the table."""
    table, sizes, batch = site.operands[0], site.sizes(site.op.operands[0]), site.kind.batch
    if batch and batch == len(sizes) - 1 == len(site.sizes(site.op.operands[1])) - 1:
        if site.shadow(ids).dtype == torch.int64:
            site.own(torch.gather, table, -1, ids)
        else:
            site.own(gather_last, table, ids)
        return
    if not batch and len(sizes) == 2 and site.shadow(ids).dtype in (torch.int32, torch.int64):
        site.own(torch.embedding, table, ids)
        return
    flat, count = _flat(site, site.cast(ids, torch.int64), sizes, by_row=not batch)
    shape = (*sizes[:batch], count, *sizes[batch + 1 :])
    if batch:
        site.own(torch.gather, table, batch, site.call(torch.Tensor.expand, flat, shape), shape=shape)
    else:
        site.own(torch.index_select, table, 0, flat, shape=shape)


def _flat(
    site: LoweringContext[Gather | Scatter], ids: Any, sizes: tuple[int, ...], *, by_row: bool
) -> tuple[Any, int]:
    """Return the indices with a single axis after the batch axes, broadcastable over rows, and their number."""
    batch = site.kind.batch
    count = prod(site.sizes(site.op.operands[1])[batch:])
    trailing = () if by_row else (1,) * (len(sizes) - batch - 1)
    return site.shaped(ids, (*sizes[:batch], count, *trailing)), count


#: Torch functions for table rows, and along any axis.
_ROWS: Mapping[str, Callable[..., Any]] = {"add": torch.Tensor.index_add_, "set": torch.Tensor.index_copy_}
_ALONG: Mapping[str, Callable[..., Any]] = {
    "add": torch.Tensor.scatter_add_,
    "set": torch.Tensor.scatter_,
    "max": torch.Tensor.scatter_reduce_,
}


@lowering(Scatter)
def _scatter(site: LoweringContext[Scatter]) -> None:
    target, *_, updates = site.operands
    sizes, batch, mode = site.sizes(site.op.operands[0]), site.kind.batch, site.kind.mode
    if not site.kind.overwrites():
        site.own(torch.clone, target)
        target = site.results[0]
    if len(site.operands) > 3:
        site.alias(site.call(torch.ops.aten.index_put_, target, _indices_per_axis(site, sizes), updates, mode == "add"))
        return
    if site.kind.mesh_axis in site.shared.groups:
        like = site.shadow(target)
        group = site.shared.groups[site.kind.mesh_axis]
        skipped = None if site.kind.padding_idx is None else site.kind.padding_idx - sizes[batch] * group.rank
        site.alias(site.call(scatter_local, target, _ids(site, sizes[batch]), updates, batch, mode, skipped, like=like))
        return
    by_row = not batch and mode in _ROWS
    positions, count = _flat(site, site.cast(_ids(site, sizes[batch]), torch.int64), sizes, by_row=by_row)
    shape = (*sizes[:batch], count, *sizes[batch + 1 :])
    if not by_row:
        positions = site.call(torch.Tensor.expand, positions, shape)
    if site.kind.padding_idx is not None:
        arguments = target, batch, positions, site.shaped(updates, shape), site.kind.padding_idx
        site.alias(site.call(add_except, *arguments, like=site.shadow(target)))
        return
    function, reduction = (_ROWS if by_row else _ALONG)[mode], ("amax",) if mode == "max" else ()
    site.alias(site.call(function, target, batch, positions, site.shaped(updates, shape), *reduction))


# -- routing -----------------------------------------------------------------------------------------------------------


@lowering(TopK)
def _top_k(site: LoweringContext[TopK]) -> None:
    results = site.call(torch.topk, site.operands[0], site.of(site.kind.k), -1, not site.kind.smallest)
    for i in (0, 1):
        site.settle(site.call(item, results, i), i)


@lowering(Sort)
def _sort(site: LoweringContext[Sort]) -> None:
    results = site.call(torch.sort, site.operands[0], -1, site.kind.descending)
    for i in (0, 1):
        site.settle(site.call(item, results, i), i)


def dispatched(ids: torch.Tensor, experts: int, capacity: int | None, owners: bool) -> list[torch.Tensor]:
    """Order choices by expert; return tokens, ends, positions, owners and the mask of dropped choices."""
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    owner = flat[order]
    ends = torch.cumsum(torch.bincount(flat, minlength=experts), 0)
    if capacity is None:
        rows, tokens, within_capacity = torch.arange(len(flat), device=ids.device), order // ids.shape[-1], None
    else:
        rank_in_expert = (
            torch.arange(len(flat), device=ids.device) - (ends - torch.bincount(flat, minlength=experts))[owner]
        )
        within_capacity = rank_in_expert < capacity
        rows = torch.where(within_capacity, owner * capacity + rank_in_expert, 0)
        tokens = torch.zeros(experts * capacity, dtype=torch.long, device=ids.device)
        tokens[rows[within_capacity]] = order[within_capacity] // ids.shape[-1]
        owner = torch.arange(experts, device=ids.device).repeat_interleave(capacity)
        ends = torch.arange(1, experts + 1, device=ids.device) * capacity
    positions = torch.empty_like(order)
    positions[order] = rows
    results = [tokens, ends.int(), positions.reshape(ids.shape), *([owner] if owners else [])]
    if within_capacity is not None:
        dropped = torch.empty_like(within_capacity)
        dropped[order] = ~within_capacity
        results.append(dropped.reshape(ids.shape))
    return results


@lowering(Dispatch)
def _dispatch(site: LoweringContext[Dispatch]) -> None:
    """Lower a dispatch; expert indices that may be out of range are taken modulo their number."""
    ids, experts = site.operands[0], site.of(site.kind.experts)
    if not site.shared.indices.within(site.op.operands[0], experts):
        ids = site.call(torch.remainder, ids, experts)
    sizes = [site.sizes(t) for t in site.op.results]
    room = None if site.kind.capacity is None else sizes[0][0] // experts
    like = [torch.empty(n, dtype=site.dtype(t), device="meta") for n, t in zip(sizes, site.op.results, strict=True)]
    results = site.call(dispatched, ids, experts, room, site.kind.owners, like=like)
    for i in range(len(sizes)):
        site.settle(site.call(item, results, i), i)


def merged(ends: torch.Tensor, ranks: int, rows: int, owners: bool, rank: int) -> list[torch.Tensor]:
    """Order rows received from all ranks by expert; return ends, row order, positions and owners."""
    sent = ends.reshape(ranks, -1).long() - rank * (rows // ranks)  # skip each sender's rows for earlier ranks
    counts = torch.diff(sent, prepend=torch.zeros_like(sent[:, :1]))
    owner = torch.arange(sent.shape[1], device=ends.device).repeat(ranks).repeat_interleave(counts.reshape(-1))
    if len(owner) != rows:
        raise GraphError(f"{len(owner)} rows from {ranks} ranks, expected {rows}: the routing is not balanced")
    order = torch.argsort(owner, stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(rows, device=ends.device)
    return [torch.cumsum(counts.sum(0), 0).to(ends.dtype), order, positions, *([owner[order]] if owners else [])]


@lowering(Merge)
def _merge(site: LoweringContext[Merge]) -> None:
    kind, like = site.kind, [torch.empty(site.sizes(t), dtype=site.dtype(t), device="meta") for t in site.op.results]
    group = site.shared.groups.get(kind.axis)
    arguments = (site.of(kind.ranks), site.of(kind.rows), kind.owners, 0 if group is None else group.rank)
    results = site.call(merged, site.operands[0], *arguments, like=like)
    for i in range(len(like)):
        site.settle(site.call(item, results, i), i)


def _aligned(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped matmul supports the operands: equal 16- or 32-bit floats, strides aligned to 16 bytes."""
    formats = {x.dtype for x in operands}
    fits = len(formats) == 1 and formats <= {torch.float32, torch.bfloat16, torch.float16}
    strides = [s * x.itemsize for x in operands for s in x.stride() if s != 1]
    return fits and all(s % 16 == 0 for s in strides) and all(x.data_ptr() % 16 == 0 for x in operands)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's matrix, with torch's grouped matmul if it supports the operands."""
    if rows.shape[0] and rows.device.type == "cuda" and _aligned(rows, weights):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_zeros((rows.shape[0], weights.shape[2]), dtype=torch.promote_types(rows.dtype, weights.dtype))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end].to(out.dtype), weights[expert].to(out.dtype), out=out[start:end])
        start = end
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sum outer products of rows per expert."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    if a.shape[0] and a.device.type == "cuda" and _aligned(a, b):
        return torch._grouped_mm(a.t(), b, offs=ends)
    out = a.new_zeros((ends.shape[0], a.shape[1], b.shape[1]), dtype=dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(a[start:end].t().to(dtype), b[start:end].to(dtype), out=out[expert])
        start = end
    return out


def _lower_grouped(site: LoweringContext[GroupedMatmul | GroupedOuter], function: Any) -> None:
    result = site.op.results[0]
    like = torch.empty(site.sizes(result), dtype=_promoted_dtype(site), device="meta")
    site.settle(site.call(function, *site.operands, like=like))


def _promoted_dtype(site: LoweringContext[OpKind]) -> torch.dtype:
    a, b = (site.shadow(n).dtype for n in site.operands[:2])
    return torch.promote_types(a, b)


@lowering(GroupedMatmul)
def _grouped_matmul(site: LoweringContext[GroupedMatmul]) -> None:
    _lower_grouped(site, grouped)


@lowering(GroupedOuter)
def _grouped_outer(site: LoweringContext[GroupedOuter]) -> None:
    _lower_grouped(site, grouped_outer)
