"""Collectives: over torch's process groups, or as one rank plays them among ranks that all bring the same."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.collectives import REDUCING, Around, Collective, Pack, Part
from .context import (
    Site,
    lowering,
    strided,
)

__all__: list[str] = []  # its lowerings are found in LOWERINGS

#: What torch calls a reduction; a mean is a sum and a division, as gloo has none.
_OPERATIONS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min"}


def _run(name: str, *arguments: Any) -> torch.Tensor:
    """Call one of torch's functional collectives and wait for it."""
    functional = torch.ops._c10d_functional
    made: torch.Tensor = functional.wait_tensor(getattr(functional, name)(*arguments))
    return made


def all_reduce(x: torch.Tensor, operation: str, ranks: int, group: str) -> torch.Tensor:
    """Put the values of all ranks together."""
    made = _run("all_reduce", x.contiguous(), _OPERATIONS[operation], group)
    return made.div_(ranks) if operation == "mean" else made


def all_gather(x: torch.Tensor, dim: int, blocks: int, ranks: int, group: str) -> torch.Tensor:
    """Put the parts of all ranks beside each other, block by block."""
    made = _run("all_gather_into_tensor", x.contiguous(), ranks, group)
    return _beside(made.view(ranks, *x.shape), dim, blocks)


def reduce_scatter(x: torch.Tensor, dim: int, blocks: int, operation: str, ranks: int, group: str) -> torch.Tensor:
    """Put the values of all ranks together, of each block a part on each rank."""
    made = _run("reduce_scatter_tensor", _apart(x, dim, blocks, ranks), _OPERATIONS[operation], ranks, group)
    made = made.squeeze(0).flatten(dim, dim + 1)
    return made.div_(ranks) if operation == "mean" else made


def all_to_all(
    x: torch.Tensor, dim: int, blocks: int, source: int, source_blocks: int, ranks: int, group: str
) -> torch.Tensor:
    """Split one axis over the ranks, and put another one together."""
    each = [1] * ranks
    made = _run("all_to_all_single", _apart(x, dim, blocks, ranks), each, each, group)
    return _beside(made.flatten(dim + 1, dim + 2), source, source_blocks)


def pass_on(x: torch.Tensor, rank: int, ranks: int, group: str) -> torch.Tensor:
    """Send a tensor to the next rank of a ring and return what the one before has sent, as torch's rings do."""
    flat = x.contiguous().view(-1)
    to, of = ([flat.numel() if i == (rank + step) % ranks else 0 for i in range(ranks)] for step in (1, -1))
    return _run("all_to_all_single", flat, of, to, group).view(x.shape)


def gather_in_ring(x: torch.Tensor, dim: int, blocks: int, rank: int, ranks: int, group: str) -> torch.Tensor:
    """Put the parts of all ranks beside each other, each of which passes by all others."""
    parts = [x] * ranks
    for i in range(1, ranks):
        x = parts[rank - i] = pass_on(x, rank, ranks, group)
    return _beside(torch.stack(parts), dim, blocks)


def reduce_in_ring(
    x: torch.Tensor, dim: int, blocks: int, operation: str, rank: int, ranks: int, group: str
) -> torch.Tensor:
    """Let sums go once around, to which each rank adds what it has for a part, and home."""
    own = _apart(x, dim, blocks, ranks)
    made = own[rank]
    for i in range(1, ranks + 1):
        made = pass_on(made, rank, ranks, group)
        made = made + own[rank - i] if i < ranks else made
    made = made.flatten(dim, dim + 1)
    return made / ranks if operation == "mean" else made


def gather_in_place(x: torch.Tensor, whole: torch.Tensor, dim: int, ranks: int, group: str) -> torch.Tensor:
    """Write the parts of the other ranks beside one's own."""
    if dim or not whole.is_contiguous():
        return whole.copy_(all_gather(x, dim, 1, ranks, group))
    functional = torch.ops._c10d_functional
    functional.wait_tensor(functional.all_gather_into_tensor_out(x, ranks, group, out=whole))
    return whole


def reduce_in_place(
    x: torch.Tensor, dim: int, collective: str, operation: str, rank: int, ranks: int, group: str
) -> torch.Tensor:
    """Put the values of all ranks together where they are: all of them, or a part on each rank, which is returned."""
    if collective == "all_reduce":
        return x.copy_(all_reduce(x, operation, ranks, group))
    own: torch.Tensor = torch.ops.aten.tensor_split(x, ranks, dim)[rank]
    return own.copy_(reduce_scatter(x, dim, 1, operation, ranks, group))


def _apart(x: torch.Tensor, dim: int, blocks: int, ranks: int) -> torch.Tensor:
    """Return what is for each rank, one behind the other."""
    parts: torch.Tensor = torch.ops.aten.unflatten(x, dim, (blocks, ranks, -1))
    return parts.movedim(dim + 1, 0).contiguous()


def _beside(parts: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """Return the parts of all ranks beside each other, block by block."""
    split: torch.Tensor = torch.ops.aten.unflatten(parts, dim + 1, (blocks, -1))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


@lowering(Collective)
def _collective(site: Site[Collective]) -> None:
    group = site.shared.groups.get(site.kind.axis)
    if group is None:
        _alone(site)
        return
    kind, x, sizes = site.kind, site.operands[0], site.sizes(site.op.results[0])
    dim, blocks, like = kind.dim, site.of(kind.blocks), torch.empty(sizes, dtype=site.shadow(x).dtype, device="meta")
    there: tuple[Any, ...] = (group.ranks, group.name)
    if kind.inplace and kind.collective == "all_gather":
        site.alias(_in_place(site))
    elif kind.inplace:
        site.alias(site.call(reduce_in_place, x, dim, kind.collective, kind.operation, group.rank, *there))
    elif kind.ring and kind.collective == "all_gather":
        site.settle(site.call(gather_in_ring, x, dim, blocks, group.rank, *there, like=like))
    elif kind.ring:
        site.settle(site.call(reduce_in_ring, x, dim, blocks, kind.operation, group.rank, *there, like=like))
    elif kind.collective == "all_reduce" or (kind.collective == "reduce_scatter" and not sizes):
        site.settle(site.call(all_reduce, x, kind.operation, *there, like=like))
    elif kind.collective == "send":
        raise UnsupportedError(f"lower {site.op.name!r}: send says not to whom, expected a collective of all ranks")
    elif not sizes:
        site.own(torch.clone, x)
    elif kind.collective == "all_gather":
        site.settle(site.call(all_gather, x, dim, blocks, *there, like=like))
    elif kind.collective == "reduce_scatter":
        site.settle(site.call(reduce_scatter, x, dim, blocks, kind.operation, *there, like=like))
    else:
        source = (dim, blocks) if kind.source is None else (kind.source, site.of(kind.source_blocks))
        site.settle(site.call(all_to_all, x, dim, blocks, *source, *there, like=like))


def _around(site: Site[Any]) -> Any:
    """Return the tensor of which the operand is a rank's part: that of the first one, where there is no group."""
    (x,), (t,), dim = site.operands, site.op.results, site.kind.dim
    group, sizes, strides = site.shared.groups.get(site.kind.axis), site.sizes(t), site.numbers.of(t.strides)
    before = 0 if group is None else group.rank * site.shadow(x).shape[dim] * strides[dim]
    return site.call(strided, x, sizes, strides, -before)


@lowering(Around)
def _whole(site: Site[Around]) -> None:
    site.settle(_around(site))


def _in_place(site: Site[Collective]) -> Any:
    """Return the tensor of which the operand is a rank's part, once it has those of all ranks."""
    (x,), dim, group = site.operands, site.kind.dim, site.shared.groups[site.kind.axis]
    whole = _around(site)
    return site.call(gather_in_place, x, whole, dim, group.ranks, group.name, like=site.shadow(whole))


def _alone(site: Site[Collective]) -> None:
    """Play one rank among ranks that all bring the same: a sum is a multiple, what is gathered is repeated."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    sizes, aten = site.sizes(site.op.results[0]), torch.ops.aten
    made, scaled = x, kind.collective in REDUCING and kind.operation == "sum"
    if sizes and kind.collective == "all_gather":
        made = _repeated(site, made, kind.dim, site.of(kind.blocks), ranks)
    elif sizes and (kind.collective == "reduce_scatter" or kind.source is not None):
        made = _own(site, made, kind.dim, site.of(kind.blocks), ranks, 0)
    if sizes and kind.source is not None:
        made = _repeated(site, made, kind.source, site.of(kind.source_blocks), ranks)
    if scaled:
        site.own(torch.mul, made, ranks)
    else:
        site.own(torch.clone, site.call(aten.reshape, made, sizes))


def _own(site: Site[Any], x: Any, dim: int, blocks: int, ranks: int, rank: int) -> Any:
    """Return a rank's part of each block."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, ranks, -1))
    return site.call(torch.flatten, site.call(torch.select, parts, dim + 1, rank), dim, dim + 1)


def _repeated(site: Site[Any], x: Any, dim: int, blocks: int, ranks: int) -> Any:
    """Return each block as often as there are ranks."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, 1, -1))
    return site.call(torch.flatten, site.call(torch.cat, [parts] * ranks, dim + 1), dim, dim + 2)


@lowering(Part)
def _part(site: Site[Part]) -> None:
    """Take the rank's own part: that of the first one, where there is no group."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    group = site.shared.groups.get(kind.axis)
    rank = 0 if group is None else group.rank
    if site.of(kind.blocks) == 1:
        size = site.sizes(site.op.results[0])[kind.dim]
        site.settle(site.call(torch.ops.aten.slice, x, kind.dim, rank * size, (rank + 1) * size))
    else:
        site.own(torch.clone, _own(site, x, kind.dim, site.of(kind.blocks), ranks, rank))


def packed(buffer: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Write tensors one after the other."""
    buffer.view(-1).copy_(torch.cat([x.reshape(-1) for x in parts]))
    return buffer


@lowering(Pack)
def _pack(site: Site[Pack]) -> None:
    site.alias(site.call(packed, *site.operands))
