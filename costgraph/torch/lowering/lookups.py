"""Lookups and updates by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...ops.index import Gather, Scatter
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


def _ids(site: Site[Gather | Scatter], rows: int, place: int = 0) -> Any:
    """Return the indices; those that nothing says to be rows are taken modulo their number.

    Where a rank has a part of the rows they are counted from its first one, and those of other ranks are outside.
    """
    ids, group = site.operands[1 + place], site.shared.groups.get(site.kind.part)
    if not site.shared.indices.valid(site.op):
        ids = site.call(torch.remainder, ids, rows * (1 if group is None else group.ranks))
    return ids if group is None else site.call(torch.sub, ids, rows * group.rank)


def _inside(ids: torch.Tensor, rows: int, shape: Sequence[int]) -> torch.Tensor:
    """Return which elements belong to indices of own rows."""
    inside = (ids >= 0) & (ids < rows)
    return inside.reshape(*ids.shape, *(1,) * (len(shape) - ids.ndim))


def zero_others(found: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Put zeros where rows of other ranks were to be looked up."""
    return found.masked_fill_(~_inside(ids, rows, found.shape), 0)


def scatter_own(
    target: torch.Tensor, ids: torch.Tensor, updates: torch.Tensor, batch: int, mode: str, passed: int | None = None
) -> torch.Tensor:
    """Write the updates of own rows, in place, but for one that is passed by."""
    rows, ids = target.shape[batch], ids.long()
    inside = _inside(ids, rows, ids.shape)
    inside = inside if passed is None else inside & (ids != passed)
    if mode == "max":
        least = -torch.inf if target.is_floating_point() else torch.iinfo(target.dtype).min
        updates = updates.masked_fill(~_inside(ids, rows, updates.shape), least)
        behind = target.shape[batch + 1 :]
        places = ids.clamp(0, rows - 1).reshape(*ids.shape[:batch], -1, *(1,) * len(behind))
        shape = (*places.shape[: batch + 1], *behind)
        return target.scatter_reduce_(batch, places.expand(shape), updates.reshape(shape), "amax")
    at = inside.nonzero(as_tuple=True)
    return target.index_put_((*at[:batch], ids[at]), updates[at], mode == "add")


def add_others(
    target: torch.Tensor, batch: int, places: torch.Tensor, updates: torch.Tensor, passed: int
) -> torch.Tensor:
    """Add rows in place, but for one that is passed by."""
    row = target.select(batch, passed)
    before = row.clone()
    (target.scatter_add_ if batch else target.index_add_)(batch, places, updates)
    row.copy_(before)
    return target


def _each(site: Site[Gather | Scatter], sizes: tuple[int, ...]) -> list[Any]:
    """Return the indices of each of several axes."""
    count = len(site.kind.places(site.op.operands))
    return [site.cast(_ids(site, sizes[k], k), torch.int64) for k in range(count)]


def along(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Pick elements along the last axis."""
    return torch.gather(table, -1, ids.long())


@lowering(Gather)
def _gather(site: Site[Gather]) -> None:
    sizes, batch = site.sizes(site.op.operands[0]), site.kind.batch
    if len(site.operands) > 2:
        site.own(torch.ops.aten.index, site.operands[0], _each(site, sizes))
        return
    ids, rows = _ids(site, sizes[batch]), sizes[batch]
    if site.kind.part not in site.shared.groups:
        _look_up(site, ids)
        return
    _look_up(site, site.call(torch.clamp, ids, 0, rows - 1))
    site.alias(site.call(zero_others, site.made[0], ids, rows))


def _look_up(site: Site[Gather], ids: Any) -> None:
    """Look up rows by indices that are all within the table."""
    table, sizes, batch = site.operands[0], site.sizes(site.op.operands[0]), site.kind.batch
    if batch and batch == len(sizes) - 1 == len(site.sizes(site.op.operands[1])) - 1:
        if site.shadow(ids).dtype == torch.int64:
            site.own(torch.gather, table, -1, ids)
        else:
            site.own(along, table, ids)
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


def _flat(site: Site[Gather | Scatter], ids: Any, sizes: tuple[int, ...], *, by_row: bool) -> tuple[Any, int]:
    """Return the indices with one axis behind those of the batch, and one of size 1 for each of a row, and how many."""
    batch = site.kind.batch
    count = prod(site.sizes(site.op.operands[1])[batch:])
    rest = () if by_row else (1,) * (len(sizes) - batch - 1)
    return site.shaped(ids, (*sizes[:batch], count, *rest)), count


#: What torch calls on rows of a whole table, and along any axis.
_ROWS: Mapping[str, Callable[..., Any]] = {"add": torch.Tensor.index_add_, "set": torch.Tensor.index_copy_}
_ALONG: Mapping[str, Callable[..., Any]] = {
    "add": torch.Tensor.scatter_add_,
    "set": torch.Tensor.scatter_,
    "max": torch.Tensor.scatter_reduce_,
}


@lowering(Scatter)
def _scatter(site: Site[Scatter]) -> None:
    target, *_, updates = site.operands
    sizes, batch, mode = site.sizes(site.op.operands[0]), site.kind.batch, site.kind.mode
    if not site.kind.overwrites():
        site.own(torch.clone, target)
        target = site.made[0]
    if len(site.operands) > 3:
        site.alias(site.call(torch.ops.aten.index_put_, target, _each(site, sizes), updates, mode == "add"))
        return
    if site.kind.part in site.shared.groups:
        like = site.shadow(target)
        group = site.shared.groups[site.kind.part]
        passed = None if site.kind.passed is None else site.kind.passed - sizes[batch] * group.rank
        site.alias(site.call(scatter_own, target, _ids(site, sizes[batch]), updates, batch, mode, passed, like=like))
        return
    by_row = not batch and mode in _ROWS
    places, count = _flat(site, site.cast(_ids(site, sizes[batch]), torch.int64), sizes, by_row=by_row)
    shape = (*sizes[:batch], count, *sizes[batch + 1 :])
    if not by_row:
        places = site.call(torch.Tensor.expand, places, shape)
    if site.kind.passed is not None:
        given = target, batch, places, site.shaped(updates, shape), site.kind.passed
        site.alias(site.call(add_others, *given, like=site.shadow(target)))
        return
    function, how = (_ROWS if by_row else _ALONG)[mode], ("amax",) if mode == "max" else ()
    site.alias(site.call(function, target, batch, places, site.shaped(updates, shape), *how))
