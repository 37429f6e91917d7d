"""Resampling of images: interpolation on a grid, and at places that are data.

Counted is what is done with the values of neighbours; the weights of a regular grid are made once for each row and
column and are not counted, those of places that are data are.
"""

from __future__ import annotations

from math import prod

import sympy

from ....algebra.polynomial import ONE, ZERO, Poly, poly
from ..call import Call, Counts, Spec
from .amounts import each, operand_bytes, together, unsupported
from .table import Rule, rule
from .workspaces import neighbours

__all__: list[str] = []  # its rules are found in RULES

#: Neighbours along each axis, and the number of axes.
_NEIGHBOURS = {
    "upsample_linear1d": (2, 1),
    "upsample_bilinear2d": (2, 2),
    "upsample_trilinear3d": (2, 3),
    "upsample_bicubic2d": (4, 2),
}
_NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")  # fmt: skip


def _forward(taps: int, axes: int) -> Rule:
    """One axis after the other: of n neighbours n products and n - 1 sums, for each of those of the axes before."""
    flops = sum((2 * taps - 1) * taps**i for i in range(axes))
    return lambda call: Counts(pointwise=call.out.numel * flops, workspace=neighbours(call, taps))


def _backward(taps: int, axes: int) -> Rule:
    """A product and a sum for each neighbour."""
    return lambda call: Counts(pointwise=call["grad_output"].numel * (2 * taps**axes))


for _name, (_width, _axes) in _NEIGHBOURS.items():
    rule(_name)(_forward(_width, _axes))
    rule(f"{_name}_backward")(_backward(_width, _axes))


@rule(*_NEAREST)
def nearest(call: Call) -> Counts:
    """Count no FLOPs; one element is read for each of the result, or all of them where they are fewer."""
    operand: Spec = call["self"] if "self" in call.arguments else call["input"]
    larger = all(
        (n / k).constant is None or (n / k).constant >= 1 for n, k in zip(call.out.sizes, operand.sizes, strict=True)
    )
    reads = None if larger else operand_bytes(call, self=call.out.numel * operand.dtype.bytes)
    return Counts(reads=reads)


@rule(*(f"{name}_backward" for name in _NEAREST))
def nearest_backward(call: Call) -> Counts:
    """Count an addition for each element of the gradient."""
    return each(call["grad_output"].numel, "add")


# -- with antialiasing -------------------------------------------------------------------------------------------

_FILTERS = {"_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 4, "_upsample_lanczos2d_aa": 6}


def _taps(whole: Poly, made: Poly, width: int) -> Poly:
    """Return how many neighbours a filter of this width reaches at the most: it is widened where an image shrinks."""
    scale = whole / made
    number = scale.constant
    if number is not None:
        return poly(2 * -int(-(max(number, 1) * width / 2) // 1) + 1)
    return 2 * poly(sympy.ceiling(sympy.Max(1, scale.expr) * sympy.Rational(width, 2))) + 1


def _separable(large: Spec, made: Spec, width: int) -> Poly:
    """Return products and sums: along the last axis for all rows, then along the one before."""
    lead = prod(large.sizes[:-2], start=ONE)
    (height, length), (rows, columns) = large.sizes[-2:], made.sizes[-2:]
    across = lead * height * columns * _taps(length, columns, width)
    return 2 * (across + lead * rows * columns * _taps(height, rows, width))


@rule(*_FILTERS)
def smoothed(call: Call) -> Counts:
    """Count two passes, a product and a sum for each neighbour that the filter may reach."""
    operand: Spec = call["self"] if "self" in call.arguments else call["input"]
    return Counts(pointwise=_separable(operand, call.out, _FILTERS[call.name]))


@rule(*(f"{name}_backward" for name in _FILTERS))
def smoothed_backward(call: Call) -> Counts:
    """Count as many products and sums as forward."""
    width = _FILTERS[call.name.removesuffix("_backward")]
    return Counts(pointwise=_separable(call.out, call["grad_output"], width))


# -- places that are data ----------------------------------------------------------------------------------------

#: For one coordinate: ((x + 1) * n - 1) / 2, its whole part, and the distances to both sides.
_COORDINATE = ("add", "mul", "sub", "div", "floor", "sub", "sub")
_BILINEAR, _NEAREST_MODE = 0, 1


def _places(call: Call) -> tuple[Poly, int, int]:
    """Return the places that are looked at, their coordinates, and the mode."""
    mode = call.get("interpolation_mode") or _BILINEAR
    if mode not in (_BILINEAR, _NEAREST_MODE):
        raise unsupported(call, f"interpolation mode {mode}", "bilinear or nearest")
    grid: Spec = call["grid"]
    return prod(grid.sizes[:-1], start=ONE), 2 if "2d" in call.name else 3, mode


@rule("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
def sampled(call: Call) -> Counts:
    """Count coordinates and weights for each place, a product and a sum of each neighbour for each element."""
    count, axes, mode = _places(call)
    if mode == _NEAREST_MODE:
        return each(count * axes, *_COORDINATE[:4], "round")
    corners = 2**axes
    weights = count * (corners * (axes - 1))
    return together(
        each(count * axes, *_COORDINATE),
        Counts(pointwise=weights + call.out.numel * (2 * corners - 1)),
    )


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward")
def sampled_backward(call: Call) -> Counts:
    """Count coordinates and weights again, then for each neighbour its share, and what the place moves the value by."""
    count, axes, mode = _places(call)
    elements = call["grad_output"].numel
    wanted = call.get("output_mask") or (True, True)
    if mode == _NEAREST_MODE:
        return together(each(count * axes, *_COORDINATE[:4], "round"), each(elements, "add") if wanted[0] else Counts())
    corners = 2**axes
    shares = elements * (2 * corners) if wanted[0] else ZERO
    moved = elements * (corners * axes * 3) if wanted[1] else ZERO  # value * distances * gradient, added up
    return together(each(count * axes, *_COORDINATE), Counts(pointwise=count * (corners * (axes - 1)) + shares + moved))


@rule("affine_grid_generator")
def affine_grid(call: Call) -> Counts:
    """Count the product of each place, with a 1 behind its coordinates, and the matrix of its image."""
    axes = len(call["size"]) - 2
    return Counts(matmul=call.out.numel * (2 * (axes + 1)))
