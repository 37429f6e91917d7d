"""Lower optimizer steps, gradient accumulation, KV-cache updates and keep-alive ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import UnsupportedError
from ...ops.keep_alive import (
    KeepAlive,
    StopGradient,
)
from ...ops.kv_cache import (
    Append,
    Cache,
)
from ...ops.loops import Accumulate
from ...ops.updates import FusedUpdate, Unscale, ZeroGrad
from .context import LoweringContext, lowering
from .elementwise import (
    IN_PLACE,
    KERNELS,
    function_for,
    item,
)
from .module import keep_alive

__all__: list[str] = []  # its lowerings are found in LOWERINGS

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
