"""Lower data movement: views, copies, constructors, transfers, Fourier transforms, and updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.collectives import Receive, Send
from ...ops.fill import Assign, Fill, Pad, SliceUpdate
from ...ops.fourier import SCALES, Fourier, ViewAs
from ...ops.index import Arange
from ...ops.kv_cache import Append, Cache, InitialState
from ...ops.layout import Concat, Expand, KeepAlive, Rearrange, Slice, StopGradient
from ...ops.loops import Accumulate, Empty, Stacked
from ...ops.opaque import Transfer
from ...ops.updates import FusedUpdate, Unscale, ZeroGrad
from ...transforms.rewrite import flat
from .context import LoweringContext, lowering, strided
from .elementwise import IN_PLACE, KERNELS, function_for, item, masked_operand
from .module import keep_alive

__all__: list[str] = []


# -- layout ------------------------------------------------------------------------------------------------------------


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


# -- updates -----------------------------------------------------------------------------------------------------------


#: Elements per chunk of a fused update.
_CHUNK = 1 << 16


@lowering(Accumulate)
def _accumulate(site: LoweringContext[Accumulate]) -> None:
    site.alias(site.call(torch.Tensor.add_, *site.operands))


@lowering(StopGradient)
def _stop(site: LoweringContext[StopGradient]) -> None:
    site.alias(site.call(torch.Tensor.detach, site.operands[0]))


@lowering(KeepAlive)
def _keep_alive(site: LoweringContext[KeepAlive]) -> None:
    site.alias(site.call(keep_alive, *site.operands, like=site.shadow(site.operands[0])))


@lowering(Cache)
def _cache(site: LoweringContext[Cache]) -> None:
    site.alias(site.call(torch.Tensor.view_as, site.operands[0], site.operands[0]))


def appended(cache: torch.Tensor, values: torch.Tensor, axis: int, later: int = 0) -> torch.Tensor:
    """Write the last new positions to the end of a cache, without those that belong to later ranks."""
    capacity, count = cache.shape[axis], max(values.shape[axis] - later * cache.shape[axis], 0)
    copied = min(capacity, count)
    cache.narrow(axis, capacity - copied, copied).copy_(values.narrow(axis, count - copied, copied))
    return cache


@lowering(Append)
def _append(site: LoweringContext[Append]) -> None:
    group = site.shared.groups.get(site.kind.mesh_axis)
    later = 0 if group is None else group.ranks - 1 - group.rank
    site.alias(site.call(appended, *site.operands, site.kind.axis, later))


@lowering(ZeroGrad)
def _zero_grad(site: LoweringContext[ZeroGrad]) -> None:
    site.alias(site.call(torch.Tensor.zero_, site.operands[0]))


def unscaled(grad: torch.Tensor, inverse: torch.Tensor, found_inf: torch.Tensor) -> torch.Tensor:
    """Unscale a gradient in place, and set a flag if it is not finite."""
    if grad.dtype == inverse.dtype == found_inf.dtype == torch.float32 and grad.device.type != "meta":
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inverse)
        return grad
    found_inf.masked_fill_(torch.isfinite(grad).all().logical_not_(), 1)
    return grad.mul_(inverse)


@lowering(Unscale)
def _unscale(site: LoweringContext[Unscale]) -> None:
    site.alias(site.call(unscaled, *site.operands))


# -- fused updates -----------------------------------------------------------------------------------------------

#: Elementwise function, its scalars with None for registers, the registers read, and the target register.
Step = tuple[str, tuple[Any, ...], tuple[int, ...], int]


def updated(steps: Sequence[Step], count: int, changed: Sequence[int], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Apply the steps of an update to chunks of its tensors, and write changed ones in place."""
    if all(t.is_contiguous() for t in tensors[:count]):
        flat = [t.view(-1) for t in tensors[:count]]
        for start in range(0, flat[0].numel(), _CHUNK):
            _apply(steps, [t[start : start + _CHUNK] for t in flat])
    else:
        _apply(steps, list(tensors[:count]))
    return [tensors[i] for i in changed]


def _apply(steps: Sequence[Step], registers: list[torch.Tensor]) -> None:
    count, operands = len(registers), list(registers)
    for name, scalars, operand_registers, target in steps:
        positions = iter(operand_registers)
        arguments = [registers[next(positions)] if s is None else s for s in scalars]
        if name in IN_PLACE and arguments[0] is registers[min(target, len(registers) - 1)] and target < len(registers):
            value = IN_PLACE[name](*arguments)
        else:
            function, ordered = function_for(name, arguments)
            value = function(*ordered)
        if target < count:
            value = operands[target].copy_(value)
        registers[target:] = [value, *registers[target + 1 :]]


@lowering(FusedUpdate)
def _fused_update(site: LoweringContext[FusedUpdate]) -> None:
    changed, count = site.kind.changed, site.kind.updated
    steps = tuple((record.name, *step) for record, *step in site.of(site.kind.steps))
    unknown = [name for name, *_ in steps if name not in KERNELS]
    if unknown:
        raise UnsupportedError(
            f"lower {site.op.name!r}: torch has no function {unknown[0]!r}, expected one that torch has a kernel for"
        )
    like = [site.shadow(site.operands[i]) for i in changed]
    results = site.call(updated, steps, count, changed, *site.operands, like=like)
    for i in range(len(changed)):
        site.alias(site.call(item, results, i), i)
