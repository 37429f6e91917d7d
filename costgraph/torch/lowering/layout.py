"""Lower views, copies, constructors, transfers and Fourier transforms."""

from __future__ import annotations

import torch

from ...ops.collectives import Receive, Send
from ...ops.fill import Assign, Fill, Pad, SliceUpdate
from ...ops.fourier import SCALES, Fourier, ViewAs
from ...ops.index import Arange
from ...ops.kv_cache import InitialState
from ...ops.layout import Concat, Expand, Rearrange, Slice
from ...ops.loops import Empty, Stacked
from ...ops.opaque import Transfer
from ...transforms.rewrite import flat
from .context import LoweringContext, lowering, strided
from .elementwise import masked_operand

# -- views, copies and constructors ------------------------------------------------------------------------------------


@lowering(Rearrange)
def _rearrange(site: LoweringContext[Rearrange]) -> None:
    op = site.op
    split, order, merged = site.of(site.kind.split), site.kind.order, site.of(site.kind.merged)
    if op.results[0].storage is op.operands[0].storage:
        node = site.permuted(site.viewed(site.operands[0], split), order)
        site.alias(site.viewed(node, merged))
        return
    # permute a view as far as possible, so that the final copy is the only one
    site.settle(site.permuted(site.shaped(site.operands[0], split), order), fresh=False)


@lowering(Slice)
def _slice(site: LoweringContext[Slice]) -> None:
    axis, start, size, step = site.kind.axis, site.of(site.kind.start), site.of(site.kind.size), site.kind.step
    stop = start + (size - 1) * step + 1
    site.alias(site.call(torch.ops.aten.slice, site.operands[0], axis, start, stop, step))


@lowering(Expand)
def _expand(site: LoweringContext[Expand]) -> None:
    """Expand by strides of 0 and permute axes in one view."""
    source_axes, sizes, x = site.kind.kept, site.of(site.kind.sizes), site.operands[0]
    shadow = site.shadow(x)
    strides = [
        0 if k is None or shadow.shape[k] != n else shadow.stride(k) for k, n in zip(source_axes, sizes, strict=True)
    ]
    site.alias(site.call(strided, x, tuple(sizes), tuple(strides), 0))


@lowering(Concat)
def _concat(site: LoweringContext[Concat]) -> None:
    parts = flat(site.op, dict(zip(site.op.operands, site.operands, strict=True)))
    site.own(torch.stack if site.kind.stacked else torch.cat, parts, site.kind.axis)


def padded(x: torch.Tensor, sizes: tuple[int, ...], axis: int, start: int, stop: int, step: int) -> torch.Tensor:
    """Return zeros with a tensor in a slice along an axis."""
    result = x.new_zeros(sizes)
    torch.ops.aten.slice(result, axis, start, stop, step).copy_(x)
    return result


@lowering(Pad)
def _pad(site: LoweringContext[Pad]) -> None:
    axis, start, step = site.kind.axis, site.of(site.kind.start), site.kind.step
    sizes = site.sizes(site.op.results[0])
    stop = start + (site.sizes(site.op.operands[0])[axis] - 1) * step + 1
    site.own(padded, site.operands[0], sizes, axis, start, stop, step)


@lowering(Fill)
def _fill(site: LoweringContext[Fill]) -> None:
    t = site.op.results[0]
    site.own(
        torch.full, site.sizes(t), site.numbers.bind(site.kind.value), dtype=site.dtype(t), device=site.emitter.device
    )


@lowering(InitialState)
def _initial_state(site: LoweringContext[InitialState]) -> None:
    site.own(
        torch.zeros, site.sizes(site.op.results[0]), dtype=site.dtype(site.op.results[0]), device=site.emitter.device
    )


@lowering(Arange)
def _arange(site: LoweringContext[Arange]) -> None:
    start, step = site.of(site.kind.start), -1 if site.kind.reverse else 1
    dtype = site.dtype(site.op.results[0])
    site.own(torch.arange, start, start + step * site.of(site.kind.size), step, dtype=dtype, device=site.emitter.device)


@lowering(Empty)
def _empty(site: LoweringContext[Empty]) -> None:
    t = site.op.results[0]
    site.own(torch.empty, site.sizes(t), dtype=site.dtype(t), device=site.emitter.device)


@lowering(Receive)
def _receive(site: LoweringContext[Receive]) -> None:
    """Return zeros: other stages do not run."""
    t = site.op.results[0]
    site.own(torch.zeros, site.sizes(t), dtype=site.dtype(t), device=site.emitter.device)


@lowering(Send)
def _send(site: LoweringContext[Send]) -> None:
    site.alias(site.call(torch.Tensor.view_as, site.operands[0], site.operands[0]))


@lowering(Stacked)
def _stacked(site: LoweringContext[Stacked]) -> None:
    site.alias(site.operands[0])  # the slices are views of it


@lowering(SliceUpdate)
def _slice_update(site: LoweringContext[SliceUpdate]) -> None:
    site.alias(site.operands[0])  # the slice was written in place


@lowering(Assign)
def _assign(site: LoweringContext[Assign]) -> None:
    site.alias(site.call(torch.Tensor.copy_, site.operands[0], site.operands[1]))


@lowering(Transfer)
def _transfer(site: LoweringContext[Transfer]) -> None:
    """Copy on the device: the link's other end does not run."""
    if site.kind.into:
        site.alias(site.call(torch.Tensor.copy_, site.operands[0], site.operands[1]))
        return
    site.own(torch.clone, masked_operand(site, 0, 0.0) if site.op.operands[0].domain is not None else site.operands[0])


# -- Fourier transforms ------------------------------------------------------------------------------------------------

_VIEWS = {"real": torch.view_as_real, "complex": torch.view_as_complex, "conjugate": torch.conj}
aten = torch.ops.aten


@lowering(ViewAs)
def _view_as(site: LoweringContext[ViewAs]) -> None:
    site.alias(site.call(_VIEWS[site.kind.view], site.operands[0]))


@lowering(Fourier)
def _fourier(site: LoweringContext[Fourier]) -> None:
    kind, (x,) = site.kind, site.operands
    axes, scale = list(kind.axes), SCALES.index(kind.scale)
    if site.op.operands[0].dtype.kind != "complex":
        site.own(aten._fft_r2c.default, x, axes, scale, kind.last is not None)
    elif kind.last is not None:
        site.own(aten._fft_c2r.default, x, axes, scale, site.of(kind.last))
    else:
        site.own(aten._fft_c2c.default, x, axes, scale, not kind.inverse)
