"""Lower collectives to torch's process groups, or simulate one rank among identical ranks."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.collectives import REDUCING, Collective, LocalShard, Pack, Unshard
from .context import (
    LoweringContext,
    lowering,
    strided,
)

__all__: list[str] = []  # its lowerings are found in LOWERINGS

#: Torch's name of each reduction; a mean is a sum and a division, since gloo has none.
_OPERATIONS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min"}


def _run(name: str, *arguments: Any) -> torch.Tensor:
    """Call a functional collective and wait for it."""
    functional = torch.ops._c10d_functional
    result: torch.Tensor = functional.wait_tensor(getattr(functional, name)(*arguments))
    return result


def all_reduce(x: torch.Tensor, operation: str, ranks: int, group: str) -> torch.Tensor:
    """All-reduce a tensor."""
    reduced = _run("all_reduce", x.contiguous(), _OPERATIONS[operation], group)
    return reduced.div_(ranks) if operation == "mean" else reduced


def all_gather(x: torch.Tensor, dim: int, blocks: int, ranks: int, group: str) -> torch.Tensor:
    """All-gather a tensor along an axis, block by block."""
    gathered = _run("all_gather_into_tensor", x.contiguous(), ranks, group)
    return _join_ranks(gathered.view(ranks, *x.shape), dim, blocks)


def reduce_scatter(x: torch.Tensor, dim: int, blocks: int, operation: str, ranks: int, group: str) -> torch.Tensor:
    """Reduce-scatter a tensor along an axis, block by block."""
    reduced = _run("reduce_scatter_tensor", _split_by_rank(x, dim, blocks, ranks), _OPERATIONS[operation], ranks, group)
    reduced = reduced.squeeze(0).flatten(dim, dim + 1)
    return reduced.div_(ranks) if operation == "mean" else reduced


def all_to_all(
    x: torch.Tensor, dim: int, blocks: int, source: int, source_blocks: int, ranks: int, group: str
) -> torch.Tensor:
    """All-to-all: split one axis over the ranks and gather another one."""
    split_sizes = [1] * ranks
    received = _run("all_to_all_single", _split_by_rank(x, dim, blocks, ranks), split_sizes, split_sizes, group)
    return _join_ranks(received.flatten(dim + 1, dim + 2), source, source_blocks)


def send_to_next(x: torch.Tensor, rank: int, ranks: int, group: str) -> torch.Tensor:
    """Send a tensor to the next rank of a ring and return the one from the previous rank."""
    flat = x.contiguous().view(-1)
    to_next, from_previous = (
        [flat.numel() if i == (rank + step) % ranks else 0 for i in range(ranks)] for step in (1, -1)
    )
    return _run("all_to_all_single", flat, from_previous, to_next, group).view(x.shape)


def gather_in_ring(x: torch.Tensor, dim: int, blocks: int, rank: int, ranks: int, group: str) -> torch.Tensor:
    """All-gather around a ring."""
    parts = [x] * ranks
    for i in range(1, ranks):
        x = parts[rank - i] = send_to_next(x, rank, ranks, group)
    return _join_ranks(torch.stack(parts), dim, blocks)


def reduce_in_ring(
    x: torch.Tensor, dim: int, blocks: int, operation: str, rank: int, ranks: int, group: str
) -> torch.Tensor:
    """Reduce-scatter around a ring: each partial sum collects the terms of all ranks."""
    blocks_by_rank = _split_by_rank(x, dim, blocks, ranks)
    partial = blocks_by_rank[rank]
    for i in range(1, ranks + 1):
        partial = send_to_next(partial, rank, ranks, group)
        partial = partial + blocks_by_rank[rank - i] if i < ranks else partial
    partial = partial.flatten(dim, dim + 1)
    return partial / ranks if operation == "mean" else partial


def gather_in_place(x: torch.Tensor, output: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """All-gather into a buffer that contains this rank's part."""
    if dim or not output.is_contiguous():
        return output.copy_(all_gather(x, dim, 1, ranks, group))
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_gather_into_tensor_out(x, ranks, group, out=output))
    return output


def reduce_in_place(
    x: torch.Tensor, dim: int, collective: str, operation: str, rank: int, ranks: int, group: str
) -> torch.Tensor:
    """All-reduce in place, or reduce-scatter and return this rank's part."""
    if collective == "all_reduce":
        return x.copy_(all_reduce(x, operation, ranks, group))
    local: torch.Tensor = torch.ops.aten.tensor_split(x, ranks, dim)[rank]
    return local.copy_(reduce_scatter(x, dim, 1, operation, ranks, group))


def _split_by_rank(x: torch.Tensor, dim: int, blocks: int, ranks: int) -> torch.Tensor:
    """Return the parts for each rank, stacked contiguously."""
    parts: torch.Tensor = torch.ops.aten.unflatten(x, dim, (blocks, ranks, -1))
    return parts.movedim(dim + 1, 0).contiguous()


def _join_ranks(parts: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """Concatenate the parts of all ranks, block by block."""
    split: torch.Tensor = torch.ops.aten.unflatten(parts, dim + 1, (blocks, -1))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


@lowering(Collective)
def _collective(site: LoweringContext[Collective]) -> None:
    group = site.shared.groups.get(site.kind.axis)
    if group is None:
        _simulate_ranks(site)
        return
    kind, x, sizes = site.kind, site.operands[0], site.sizes(site.op.results[0])
    dim, blocks, like = kind.dim, site.of(kind.blocks), torch.empty(sizes, dtype=site.shadow(x).dtype, device="meta")
    ranks_and_group: tuple[Any, ...] = (group.ranks, group.name)
    if kind.inplace and kind.collective == "all_gather":
        site.alias(_gather_in_place(site))
    elif kind.inplace:
        site.alias(site.call(reduce_in_place, x, dim, kind.collective, kind.operation, group.rank, *ranks_and_group))
    elif kind.ring and kind.collective == "all_gather":
        site.settle(site.call(gather_in_ring, x, dim, blocks, group.rank, *ranks_and_group, like=like))
    elif kind.ring:
        site.settle(site.call(reduce_in_ring, x, dim, blocks, kind.operation, group.rank, *ranks_and_group, like=like))
    elif kind.collective == "all_reduce" or (kind.collective == "reduce_scatter" and not sizes):
        site.settle(site.call(all_reduce, x, kind.operation, *ranks_and_group, like=like))
    elif kind.collective == "send":
        raise UnsupportedError(
            f"lower {site.op.name!r}: send has no destination rank, expected a collective over all ranks"
        )
    elif not sizes:
        site.own(torch.clone, x)
    elif kind.collective == "all_gather":
        site.settle(site.call(all_gather, x, dim, blocks, *ranks_and_group, like=like))
    elif kind.collective == "reduce_scatter":
        site.settle(site.call(reduce_scatter, x, dim, blocks, kind.operation, *ranks_and_group, like=like))
    else:
        source = (dim, blocks) if kind.source is None else (kind.source, site.of(kind.source_blocks))
        site.settle(site.call(all_to_all, x, dim, blocks, *source, *ranks_and_group, like=like))


def _surrounding_view(site: LoweringContext[Any]) -> Any:
    """Return the tensor around a rank's part; without a group, the operand is the first part."""
    (x,), (t,), dim = site.operands, site.op.results, site.kind.dim
    group, sizes, strides = site.shared.groups.get(site.kind.axis), site.sizes(t), site.numbers.of(t.strides)
    offset = 0 if group is None else group.rank * site.shadow(x).shape[dim] * strides[dim]
    return site.call(strided, x, sizes, strides, -offset)


@lowering(Unshard)
def _unshard(site: LoweringContext[Unshard]) -> None:
    site.settle(_surrounding_view(site))


def _gather_in_place(site: LoweringContext[Collective]) -> Any:
    """Return the tensor around a rank's part after an all-gather."""
    (x,), dim, group = site.operands, site.kind.dim, site.shared.groups[site.kind.axis]
    gathered = _surrounding_view(site)
    return site.call(gather_in_place, x, gathered, dim, group.ranks, group.name, like=site.shadow(gathered))


def _simulate_ranks(site: LoweringContext[Collective]) -> None:
    """Simulate one rank among identical ranks: a sum is a multiple, an all-gather repeats."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    sizes, aten = site.sizes(site.op.results[0]), torch.ops.aten
    result, scaled = x, kind.collective in REDUCING and kind.operation == "sum"
    if sizes and kind.collective == "all_gather":
        result = _repeated(site, result, kind.dim, site.of(kind.blocks), ranks)
    elif sizes and (kind.collective == "reduce_scatter" or kind.source is not None):
        result = _local_block(site, result, kind.dim, site.of(kind.blocks), ranks, 0)
    if sizes and kind.source is not None:
        result = _repeated(site, result, kind.source, site.of(kind.source_blocks), ranks)
    if scaled:
        site.own(torch.mul, result, ranks)
    else:
        site.own(torch.clone, site.call(aten.reshape, result, sizes))


def _local_block(site: LoweringContext[Any], x: Any, dim: int, blocks: int, ranks: int, rank: int) -> Any:
    """Return a rank's part of each block."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, ranks, -1))
    return site.call(torch.flatten, site.call(torch.select, parts, dim + 1, rank), dim, dim + 1)


def _repeated(site: LoweringContext[Any], x: Any, dim: int, blocks: int, ranks: int) -> Any:
    """Repeat each block once per rank."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, 1, -1))
    return site.call(torch.flatten, site.call(torch.cat, [parts] * ranks, dim + 1), dim, dim + 2)


@lowering(LocalShard)
def _local_shard(site: LoweringContext[LocalShard]) -> None:
    """Return the rank's own part; the first one without a group."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    group = site.shared.groups.get(kind.axis)
    rank = 0 if group is None else group.rank
    if site.of(kind.blocks) == 1:
        size = site.sizes(site.op.results[0])[kind.dim]
        site.settle(site.call(torch.ops.aten.slice, x, kind.dim, rank * size, (rank + 1) * size))
    else:
        site.own(torch.clone, _local_block(site, x, kind.dim, site.of(kind.blocks), ranks, rank))


def packed(buffer: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Write tensors consecutively into a buffer."""
    buffer.view(-1).copy_(torch.cat([x.reshape(-1) for x in parts]))
    return buffer


@lowering(Pack)
def _pack(site: LoweringContext[Pack]) -> None:
    site.alias(site.call(packed, *site.operands))
