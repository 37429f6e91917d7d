"""Choosing the largest, ordering rows by expert, products by expert."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import GraphError
from ...graph.op import OpKind
from ...ops.grouped import Dispatch, Grouped, GroupedOuter, TopK
from ...ops.merge import Merge
from ...ops.ordering import Sort
from .functions import item
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


@lowering(TopK)
def _top_k(site: Site[TopK]) -> None:
    made = site.call(torch.topk, site.operands[0], site.of(site.kind.k), -1, not site.kind.smallest)
    for i in (0, 1):
        site.settle(site.call(item, made, i), i)


@lowering(Sort)
def _sort(site: Site[Sort]) -> None:
    made = site.call(torch.sort, site.operands[0], -1, site.kind.descending)
    for i in (0, 1):
        site.settle(site.call(item, made, i), i)


def dispatched(ids: torch.Tensor, experts: int, room: int | None, owners: bool) -> list[torch.Tensor]:
    """Order choices by expert: tokens, ends, places, owners and what found no room."""
    flat = ids.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    owner = flat[order]
    ends = torch.cumsum(torch.bincount(flat, minlength=experts), 0)
    if room is None:
        rows, tokens, kept = torch.arange(len(flat), device=ids.device), order // ids.shape[-1], None
    else:
        nth = torch.arange(len(flat), device=ids.device) - (ends - torch.bincount(flat, minlength=experts))[owner]
        kept = nth < room
        rows = torch.where(kept, owner * room + nth, 0)
        tokens = torch.zeros(experts * room, dtype=torch.long, device=ids.device)
        tokens[rows[kept]] = order[kept] // ids.shape[-1]
        owner = torch.arange(experts, device=ids.device).repeat_interleave(room)
        ends = torch.arange(1, experts + 1, device=ids.device) * room
    places = torch.empty_like(order)
    places[order] = rows
    made = [tokens, ends.int(), places.reshape(ids.shape), *([owner] if owners else [])]
    if kept is not None:
        dropped = torch.empty_like(kept)
        dropped[order] = ~kept
        made.append(dropped.reshape(ids.shape))
    return made


@lowering(Dispatch)
def _dispatch(site: Site[Dispatch]) -> None:
    """Experts that nothing says to be there are taken modulo their number."""
    ids, experts = site.operands[0], site.of(site.kind.experts)
    if not site.shared.indices.within(site.op.operands[0], experts):
        ids = site.call(torch.remainder, ids, experts)
    sizes = [site.sizes(t) for t in site.op.results]
    room = None if site.kind.capacity is None else sizes[0][0] // experts
    like = [torch.empty(n, dtype=site.dtype(t), device="meta") for n, t in zip(sizes, site.op.results, strict=True)]
    made = site.call(dispatched, ids, experts, room, site.kind.owners, like=like)
    for i in range(len(sizes)):
        site.settle(site.call(item, made, i), i)


def merged(ends: torch.Tensor, ranks: int, rows: int, owners: bool, rank: int) -> list[torch.Tensor]:
    """Order rows that ranks have sent to one of them by expert: ends, rows in order, places, owners."""
    sent = ends.reshape(ranks, -1).long() - rank * (rows // ranks)  # each has as many for those before
    counts = torch.diff(sent, prepend=torch.zeros_like(sent[:, :1]))
    owner = torch.arange(sent.shape[1], device=ends.device).repeat(ranks).repeat_interleave(counts.reshape(-1))
    if len(owner) != rows:
        raise GraphError(f"{len(owner)} rows from {ranks} ranks, expected {rows}: the routing is not balanced")
    order = torch.argsort(owner, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(rows, device=ends.device)
    return [torch.cumsum(counts.sum(0), 0).to(ends.dtype), order, places, *([owner[order]] if owners else [])]


@lowering(Merge)
def _merge(site: Site[Merge]) -> None:
    kind, like = site.kind, [torch.empty(site.sizes(t), dtype=site.dtype(t), device="meta") for t in site.op.results]
    group = site.shared.groups.get(kind.axis)
    facts = (site.of(kind.ranks), site.of(kind.rows), kind.owners, 0 if group is None else group.rank)
    made = site.call(merged, site.operands[0], *facts, like=like)
    for i in range(len(like)):
        site.settle(site.call(item, made, i), i)


def _aligned(*operands: torch.Tensor) -> bool:
    """Whether torch's kernel takes them: rows of whole 16 bytes in one of three formats."""
    formats = {x.dtype for x in operands}
    fits = len(formats) == 1 and formats <= {torch.float32, torch.bfloat16, torch.float16}
    strides = [s * x.itemsize for x in operands for s in x.stride() if s != 1]
    return fits and all(s % 16 == 0 for s in strides) and all(x.data_ptr() % 16 == 0 for x in operands)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the matrix of its expert; torch's kernel where it takes the operands."""
    if rows.shape[0] and rows.device.type == "cuda" and _aligned(rows, weights):
        return torch._grouped_mm(rows, weights, offs=ends)
    out = rows.new_zeros((rows.shape[0], weights.shape[2]), dtype=torch.promote_types(rows.dtype, weights.dtype))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(rows[start:end].to(out.dtype), weights[expert].to(out.dtype), out=out[start:end])
        start = end
    return out


def grouped_outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Add up products of rows by expert."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    if a.shape[0] and a.device.type == "cuda" and _aligned(a, b):
        return torch._grouped_mm(a.t(), b, offs=ends)
    out = a.new_zeros((ends.shape[0], a.shape[1], b.shape[1]), dtype=dtype)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(a[start:end].t().to(dtype), b[start:end].to(dtype), out=out[expert])
        start = end
    return out


def _made(site: Site[Grouped | GroupedOuter], function: Any) -> None:
    result = site.op.results[0]
    like = torch.empty(site.sizes(result), dtype=_common(site), device="meta")
    site.settle(site.call(function, *site.operands, like=like))


def _common(site: Site[OpKind]) -> torch.dtype:
    a, b = (site.shadow(n).dtype for n in site.operands[:2])
    return torch.promote_types(a, b)


@lowering(Grouped)
def _grouped(site: Site[Grouped]) -> None:
    _made(site, grouped)


@lowering(GroupedOuter)
def _grouped_outer(site: Site[GroupedOuter]) -> None:
    _made(site, grouped_outer)
