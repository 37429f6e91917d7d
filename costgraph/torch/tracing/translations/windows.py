"""Convolutions and poolings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....algebra.polynomial import poly
from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....nn.conv import convolved, pooling
from ..call import Call
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


def _numbers(values: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """Return one number for each axis of a window, None where one is a formula."""
    known = tuple(values) * (rank if len(values) == 1 else 1)
    return known if all(isinstance(n, int) for n in known) else None


@translation("convolution")
def convolution(call: Call) -> Tensor | None:
    """A contraction over a window and the channels of a group, and a bias."""
    x, weight = call["input"], call["weight"]
    rank = weight.ndim - 2
    stride, padding, dilation = (_numbers(call[name], rank) for name in ("stride", "padding", "dilation"))
    if stride is None or padding is None or dilation is None or any(n.constant is None for n in weight.sizes[2:]):
        return None
    if call["transposed"] or x.dtype != weight.dtype:
        return None
    groups = poly(call["groups"])
    return convolved(x, weight, call.get("bias"), stride=stride, padding=padding, dilation=dilation, groups=groups)


@translation("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(call: Call) -> Sequence[Tensor] | None:
    """The maximum of each window, and where it stood."""
    window = _numbers(call["kernel_size"], call["self"].ndim - 2)
    if window is None or any(n != 1 for n in call["dilation"]) or call["ceil_mode"]:
        return None
    stride = _numbers(call["stride"] or window, len(window))
    padding = _numbers(call["padding"], len(window))
    if stride is None or padding is None:
        return None
    kind = pooling(call["self"], "max", window, stride, padding)
    return apply(replace(kind, indices=True), [call["self"]], "max_pool")
