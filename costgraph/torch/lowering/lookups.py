"""Lookups and updates by index."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.index import Gather, Scatter
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


def _ids(site: Site[Gather | Scatter], rows: int) -> Any:
    """Return the indices; those that nothing says to be rows are taken modulo their number."""
    ids = site.operands[1]
    if not site.shared.indices.valid(site.op):
        ids = site.call(torch.remainder, ids, rows)
    return ids


def along(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Pick elements along the last axis."""
    return torch.gather(table, -1, ids.long())


@lowering(Gather)
def _gather(site: Site[Gather]) -> None:
    table, sizes = site.operands[0], site.sizes(site.op.operands[0])
    if site.kind.mode == "along":
        ids = _ids(site, sizes[-1])
        if site.shadow(ids).dtype == torch.int64:
            site.own(torch.gather, table, -1, ids)
        else:
            site.own(along, table, ids)
        return
    ids = _ids(site, sizes[0])
    if len(sizes) == 2 and site.shadow(ids).dtype in (torch.int32, torch.int64):
        site.own(torch.embedding, table, ids)
        return
    ids = site.cast(ids, torch.int64)
    flat = site.shaped(ids, (site.shadow(ids).numel(),))
    site.own(torch.index_select, table, 0, flat, shape=(site.shadow(flat).numel(), *sizes[1:]))


@lowering(Scatter)
def _scatter(site: Site[Scatter]) -> None:
    target, _, updates = site.operands
    sizes, last = site.sizes(site.op.operands[0]), site.kind.along
    ids = site.cast(_ids(site, sizes[-1 if last else 0]), torch.int64)
    if not site.kind.overwrites():
        site.own(torch.clone, target)
        target = site.made[0]
    add = site.kind.mode == "add"
    if last:
        site.alias(site.call(torch.Tensor.scatter_add_ if add else torch.Tensor.scatter_, target, -1, ids, updates))
        return
    count = site.shadow(ids).numel()
    flat, rows = site.shaped(ids, (count,)), site.shaped(updates, (count, *sizes[1:]))
    site.alias(site.call(torch.Tensor.index_add_ if add else torch.Tensor.index_copy_, target, 0, flat, rows))
