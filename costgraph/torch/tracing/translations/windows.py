"""Convolutions and poolings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....algebra.polynomial import poly
from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....nn.conv import convolved, pooling
from ....nn.transposed import spread
from ....ops.pooling import Pool
from ..call import Call
from .table import translation

__all__ = ["adaptive_mean", "convolution", "max_pool", "mean_pool"]


def _numbers(values: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """Return one number for each axis of a window, None where one is a formula."""
    known = tuple(values) * (rank if len(values) == 1 else 1)
    return known if all(isinstance(n, int) for n in known) else None


@translation("convolution")
def convolution(call: Call) -> Tensor | None:
    """A contraction over a window and the channels of a group, or what spreads over a window, and a bias."""
    x, weight = call["input"], call["weight"]
    names = ("stride", "padding", "dilation", *(("output_padding",) if call["transposed"] else ()))
    facts: Any = {name: _numbers(call[name], weight.ndim - 2) for name in names}
    if None in facts.values() or any(n.constant is None for n in weight.sizes[2:]) or x.dtype != weight.dtype:
        return None
    made = spread if call["transposed"] else convolved
    return made(x, weight, call.get("bias"), groups=poly(call["groups"]), **facts)


@translation("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(call: Call) -> Sequence[Tensor] | None:
    """The maximum of each window, and where it stood."""
    kind = _pooled(call, "max") if all(n == 1 for n in call["dilation"]) else None
    return None if kind is None else apply(replace(kind, indices=True), [call["self"]], "max_pool")


def _pooled(call: Call, operation: str) -> Pool | None:
    """Return the record of a pooling, None where windows are no numbers or reach beyond the padding."""
    window = _numbers(call["kernel_size"], call["self"].ndim - 2)
    if window is None or call["ceil_mode"]:
        return None
    stride, padding = _numbers(call["stride"] or window, len(window)), _numbers(call["padding"], len(window))
    return None if stride is None or padding is None else pooling(call["self"], operation, window, stride, padding)


@translation("avg_pool2d", "avg_pool3d")
def mean_pool(call: Call) -> Tensor | None:
    """The mean of each window."""
    outside = not call["count_include_pad"] and any(n != 0 for n in call["padding"])
    kind = _pooled(call, "mean") if call["divisor_override"] is None and not outside else None
    return None if kind is None else apply(kind, [call["self"]], "avg_pool")[0]


@translation("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_mean(call: Call) -> Tensor | None:
    """The mean of each part that an axis is divided into; None where parts differ."""
    x: Tensor = call["self"]
    rank = 3 if "3d" in call.name else 2
    sizes = call.get("output_size") or call["grad_output"].sizes[-rank:]
    shares = [(n / poly(k)).constant for n, k in zip(x.sizes[-rank:], sizes, strict=True)]
    window = tuple(n for n in shares if isinstance(n, int))
    return apply(pooling(x, "mean", window, window, 0), [x], "avg_pool")[0] if len(window) == rank else None
