"""Ops whose costs are stated, and collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.collectives import REDUCING, Collective, Part
from ...ops.stated import Opaque
from .functions import item
from .site import Site
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


def _function(site: Site[Opaque]) -> Callable[..., Any]:
    """Return what the caller has for an opaque op, by its name with or without scope and number."""
    last = site.op.name.rpartition("/")[2]
    names = (site.op.name, last, re.sub(r"_\d+\Z", "", last))
    for name in names:
        if name in site.shared.functions:
            return site.shared.functions[name]
    raise UnsupportedError(
        f"lower {site.op.name!r}: nothing says what an opaque op computes, expected a function of torch in "
        f"functions={{{names[-1]!r}: ...}}"
    )


def _checked(function: Callable[..., Any], name: str, outputs: Sequence[tuple[Any, Any]]) -> Callable[..., Any]:
    """Return a function of the caller whose results are looked at and made dense."""

    def opaque(*operands: torch.Tensor) -> list[torch.Tensor]:
        made = function(*operands)
        found = made if isinstance(made, tuple | list) else (made,)
        shapes = [(tuple(y.shape), y.dtype) if isinstance(y, torch.Tensor) else type(y).__name__ for y in found]
        if shapes != list(outputs):
            raise UnsupportedError(f"function of opaque op {name!r} returned {shapes}, expected {list(outputs)}")
        return [y.contiguous() for y in found]

    return opaque


@lowering(Opaque)
def _opaque(site: Site[Opaque]) -> None:
    outputs = tuple((site.sizes(t), site.dtype(t)) for t in site.op.results)
    like = [torch.empty(sizes, dtype=dtype, device="meta") for sizes, dtype in outputs]
    made = site.call(_checked(_function(site), site.op.name, outputs), *site.operands, like=like)
    for i in range(len(outputs)):
        site.settle(site.call(item, made, i), i)


@lowering(Collective)
def _collective(site: Site[Collective]) -> None:
    """Play one rank among ranks that all bring the same: a sum is a multiple, what is gathered is repeated."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    sizes, aten = site.sizes(site.op.results[0]), torch.ops.aten
    made, scaled = x, kind.collective in REDUCING and kind.operation == "sum"
    if sizes and kind.source is not None:
        made = _beside(site, made, kind.source, site.of(kind.source_blocks), ranks)
    if sizes and kind.collective == "all_gather":
        made = _beside(site, made, kind.dim, site.of(kind.blocks), ranks)
    elif sizes and (kind.collective == "reduce_scatter" or kind.source is not None):
        made = _own(site, made, kind.dim, site.of(kind.blocks), ranks)
    if scaled:
        site.own(torch.mul, made, ranks)
    else:
        site.own(torch.clone, site.call(aten.reshape, made, sizes))


def _own(site: Site[Any], x: Any, dim: int, blocks: int, ranks: int) -> Any:
    """Return the first rank's part of each block."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, ranks, -1))
    return site.call(torch.flatten, site.call(torch.select, parts, dim + 1, 0), dim, dim + 1)


def _beside(site: Site[Any], x: Any, dim: int, blocks: int, ranks: int) -> Any:
    """Return each block as often as there are ranks."""
    parts = site.call(torch.ops.aten.unflatten, x, dim, (blocks, 1, -1))
    return site.call(torch.flatten, site.call(torch.cat, [parts] * ranks, dim + 1), dim, dim + 2)


@lowering(Part)
def _part(site: Site[Part]) -> None:
    """Take the part of the first rank."""
    kind, ranks, x = site.kind, site.of(site.kind.ranks), site.operands[0]
    if site.of(kind.blocks) == 1:
        size = site.sizes(site.op.results[0])[kind.dim]
        site.settle(site.call(torch.ops.aten.slice, x, kind.dim, 0, size))
    else:
        site.own(torch.clone, _own(site, x, kind.dim, site.of(kind.blocks), ranks))
