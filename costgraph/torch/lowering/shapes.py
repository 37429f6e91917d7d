"""Ops that move or rename elements, and those that make them from nothing."""

from __future__ import annotations

import torch

from .elementwise import held
from .site import Site, strided
from .table import lowering

__all__: list[str] = []  # its lowerings are found in LOWERINGS


@lowering("rearrange")
def _rearrange(site: Site) -> None:
    op = site.op
    split, order, merged = site.attr("split"), site.attr("order"), site.attr("merged")
    if op.results[0].storage is op.operands[0].storage:
        node = site.permuted(site.viewed(site.operands[0], split), order)
        site.alias(site.viewed(node, merged))
        return
    # a view of what is copied, as far as there is one: the copy is then the only one
    site.settle(site.permuted(site.shaped(site.operands[0], split), order), fresh=False)


@lowering("slice")
def _slice(site: Site) -> None:
    axis, start, size, step = (site.attr(n) for n in ("axis", "start", "size", "step"))
    stop = start + (size - 1) * step + 1
    site.alias(site.call(torch.ops.aten.slice, site.operands[0], axis, start, stop, step))


@lowering("expand")
def _expand(site: Site) -> None:
    """Repeat by strides of 0, which torch's expand has as well, and order axes at once."""
    kept, sizes, x = site.attr("kept"), site.attr("sizes"), site.operands[0]
    shadow = site.shadow(x)
    strides = [0 if k is None or shadow.shape[k] != n else shadow.stride(k) for k, n in zip(kept, sizes, strict=True)]
    site.alias(site.call(strided, x, tuple(sizes), tuple(strides), 0))


@lowering("concat")
def _concat(site: Site) -> None:
    site.own(torch.cat, list(site.operands), site.attr("axis"))


def padded(x: torch.Tensor, sizes: tuple[int, ...], axis: int, start: int, stop: int, step: int) -> torch.Tensor:
    """Zeros of a shape, with a tensor at some positions of an axis."""
    made = x.new_zeros(sizes)
    torch.ops.aten.slice(made, axis, start, stop, step).copy_(x)
    return made


@lowering("pad")
def _pad(site: Site) -> None:
    axis, start, step = (site.attr(n) for n in ("axis", "start", "step"))
    sizes = site.sizes(site.op.results[0])
    stop = start + (site.sizes(site.op.operands[0])[axis] - 1) * step + 1
    site.own(padded, site.operands[0], sizes, axis, start, stop, step)


@lowering("fill")
def _fill(site: Site) -> None:
    t = site.op.results[0]
    site.own(torch.full, site.sizes(t), site.attr("value"), dtype=site.dtype(t), device=site.emitter.device)


@lowering("initial_state")
def _initial_state(site: Site) -> None:
    site.own(
        torch.zeros, site.sizes(site.op.results[0]), dtype=site.dtype(site.op.results[0]), device=site.emitter.device
    )


@lowering("arange")
def _arange(site: Site) -> None:
    start = site.attr("start", 0)
    dtype = site.dtype(site.op.results[0])
    site.own(torch.arange, start, start + site.attr("size"), dtype=dtype, device=site.emitter.device)


@lowering("empty")
def _empty(site: Site) -> None:
    t = site.op.results[0]
    site.own(torch.empty, site.sizes(t), dtype=site.dtype(t), device=site.emitter.device)


@lowering("stacked")
def _stacked(site: Site) -> None:
    site.alias(site.operands[0])  # the slices lie in it


@lowering("assign")
def _assign(site: Site) -> None:
    site.alias(site.call(torch.Tensor.copy_, site.operands[0], site.operands[1]))


@lowering("transfer")
def _transfer(site: Site) -> None:
    """Copy on the device: the other end of the link is not part of the run."""
    site.own(torch.clone, held(site, 0, 0.0) if site.op.operands[0].domain is not None else site.operands[0])
