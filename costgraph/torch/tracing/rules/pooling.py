"""Pooling: 1 for every element of every window, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, prod
from typing import Any

import sympy

from ....algebra.extremum import Min
from ....algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..call import Call, Counts, Spec
from .amounts import operand_bytes, size, unsupported
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


def _elements(call: Call, large: Spec, small: Spec) -> Poly:
    """Return the elements of all windows. With `ceil_mode`, the last windows end with the padding."""
    rank = _rank(call)
    window, stride, padding, dilation = (_of_each_axis(call, name, rank) for name in _FACTS)
    if not call.get("ceil_mode"):
        return small.numel * prod(window, start=ONE)
    axes = zip(large.sizes[-rank:], small.sizes[-rank:], window, stride or window, padding, dilation, strict=True)
    return prod((_along(*axis) for axis in axes), start=prod(small.sizes[:-rank], start=ONE))


_DEFAULTS: Mapping[str, Sequence[int]] = {"stride": [], "padding": [0], "dilation": [1]}
_FACTS = ("kernel_size", *_DEFAULTS)


def _of_each_axis(call: Call, name: str, rank: int) -> list[Poly]:
    """Return an argument of the windows per axis. An empty list of strides means the window."""
    given: Sequence[Any] = _DEFAULTS[name] if call.get(name) is None else call[name]
    return [size(n) for n in (given if len(given) != 1 else [*given] * rank)]


def _along(n: Poly, windows: Poly, window: Poly, stride: Poly, padding: Poly, dilation: Poly) -> Poly:
    """Return the elements of the windows along one axis. Only the last window can end beyond the padding."""
    left = n + 2 * padding - (windows - 1) * stride
    return (windows - 1) * window + poly(Min(window.expr, sympy.ceiling((left / dilation).expr)))


def _rank(call: Call) -> int:
    return 3 if "3d" in call.name else 2


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d", "fractional_max_pool2d",
      "fractional_max_pool3d", "mkldnn_max_pool2d", "mkldnn_max_pool3d")  # fmt: skip
def pool(call: Call) -> Counts:
    """Count 1 for each element of each window."""
    return Counts(pointwise=_elements(call, call["self"], call.out))


@rule("avg_pool2d_backward", "avg_pool3d_backward")
def mean_backward(call: Call) -> Counts:
    """Count 1 for each element of each window; of the operand only the shape is looked at."""
    count = _elements(call, call["self"], call["grad_output"])
    return Counts(pointwise=count, reads=operand_bytes(call, self=ZERO))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "fractional_max_pool2d_backward",
      "fractional_max_pool3d_backward", "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward",
      "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
      "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")  # fmt: skip
def picked_backward(call: Call) -> Counts:
    """Count an addition for each element of the gradient, to the one that it was taken from."""
    return Counts(pointwise=call["grad_output"].numel, reads=operand_bytes(call, self=ZERO))


# -- windows that divide an axis into as many parts as are asked for ---------------------------------------------


def _reached(call: Call, whole: Poly, parts: Poly) -> Poly:
    """Return the sizes of the windows of one axis, added up.

    Window i runs from floor(i*n/k) to ceil((i + 1)*n/k): each boundary between two windows that is no whole number
    lies within an element which belongs to both, and gcd(n, k) - 1 of the k - 1 boundaries are whole.
    """
    share = whole / parts
    if parts == ONE or all(isinstance(c, int) and all(p > 0 for _, p in m) for m, c in share.terms.items()):
        return whole
    n, k = whole.constant, parts.constant
    if isinstance(n, int) and isinstance(k, int):
        return whole + k - gcd(n, k)
    if not isinstance(k, int):
        raise unsupported(call, f"{parts} windows over {whole} elements", "a number of windows, or one that divides")
    inner = (whole * i / k for i in range(1, k))
    return whole + total(poly(sympy.ceiling(at.expr)) - poly(sympy.floor(at.expr)) for at in inner)


def _adaptive(call: Call, large: Spec, small: Spec) -> Counts:
    rank = _rank(call)
    axes = zip(large.sizes[-rank:], small.sizes[-rank:], strict=True)
    return Counts(pointwise=prod((_reached(call, n, k) for n, k in axes), start=prod(small.sizes[:-rank], start=ONE)))


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
      "mkldnn_adaptive_avg_pool2d")  # fmt: skip
def adaptive(call: Call) -> Counts:
    """Count 1 for each element of each window."""
    return _adaptive(call, call["self"], call.out)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_backward(call: Call) -> Counts:
    """Count 1 for each element of each window; of the operand only the shape is looked at."""
    counts = _adaptive(call, call["self"], call["grad_output"])
    return Counts(pointwise=counts.pointwise, reads=operand_bytes(call, self=ZERO))
