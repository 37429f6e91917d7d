"""Costs of image resampling, by interpolation or at sampled positions, and of torchvision ops.

Arithmetic on neighbouring values counts. Weights of a regular grid are computed once per row and column and do not
count; weights of data-dependent positions do.
"""

from __future__ import annotations

from math import prod

import sympy

from ....algebra.polynomial import ONE, ZERO, Poly, poly
from ..call import Call, Counts, Spec
from .table import Rule, combined, operand_bytes, per_element, product, rule, size, unsupported
from .workspaces import neighbours

# -- resampling --------------------------------------------------------------------------------------------------------

#: Neighbours per axis, and the number of axes.
_NEIGHBOURS = {
    "upsample_linear1d": (2, 1),
    "upsample_bilinear2d": (2, 2),
    "upsample_trilinear3d": (2, 3),
    "upsample_bicubic2d": (4, 2),
}
_NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")  # fmt: skip


def _forward(taps: int, axes: int) -> Rule:
    """Count one axis after the other: n products and n - 1 sums for n neighbours, per neighbour along earlier axes."""
    flops = sum((2 * taps - 1) * taps**i for i in range(axes))
    return lambda call: Counts(pointwise=call.out.numel * flops, workspace=neighbours(call, taps))


def _backward(taps: int, axes: int) -> Rule:
    """Count a product and a sum per neighbour."""
    return lambda call: Counts(pointwise=call["grad_output"].numel * (2 * taps**axes))


for _name, (_width, _axes) in _NEIGHBOURS.items():
    rule(_name)(_forward(_width, _axes))
    rule(f"{_name}_backward")(_backward(_width, _axes))


@rule(*_NEAREST)
def nearest(call: Call) -> Counts:
    """Count no FLOPs; one operand element is read per result element, or the whole operand if it is smaller."""
    operand: Spec = call["self"] if "self" in call.arguments else call["input"]
    upsampled = all(
        (n / k).constant is None or (n / k).constant >= 1 for n, k in zip(call.out.sizes, operand.sizes, strict=True)
    )
    reads = None if upsampled else operand_bytes(call, self=call.out.numel * operand.dtype.bytes)
    return Counts(reads=reads)


@rule(*(f"{name}_backward" for name in _NEAREST))
def nearest_backward(call: Call) -> Counts:
    """Count an addition per gradient element."""
    return per_element(call["grad_output"].numel, "add")


# -- antialiasing ------------------------------------------------------------------------------------------------

_FILTERS = {"_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 4, "_upsample_lanczos2d_aa": 6}


def _taps(input_size: Poly, output_size: Poly, width: int) -> Poly:
    """Return the maximal number of neighbours in a filter, which is widened for downsampling."""
    scale = input_size / output_size
    factor = scale.constant
    if factor is not None:
        return poly(2 * -int(-(max(factor, 1) * width / 2) // 1) + 1)
    return 2 * poly(sympy.ceiling(sympy.Max(1, scale.expr) * sympy.Rational(width, 2))) + 1


def _separable(large: Spec, result: Spec, width: int) -> Poly:
    """Return products and sums: along the last axis for all rows, then along the other one."""
    lead = prod(large.sizes[:-2], start=ONE)
    (height, length), (rows, columns) = large.sizes[-2:], result.sizes[-2:]
    across = lead * height * columns * _taps(length, columns, width)
    return 2 * (across + lead * rows * columns * _taps(height, rows, width))


@rule(*_FILTERS)
def smoothed(call: Call) -> Counts:
    """Count two passes, with a product and a sum per neighbour in the filter."""
    operand: Spec = call["self"] if "self" in call.arguments else call["input"]
    return Counts(pointwise=_separable(operand, call.out, _FILTERS[call.name]))


@rule(*(f"{name}_backward" for name in _FILTERS))
def smoothed_backward(call: Call) -> Counts:
    """Count as the forward pass."""
    width = _FILTERS[call.name.removesuffix("_backward")]
    return Counts(pointwise=_separable(call.out, call["grad_output"], width))


# -- sampled positions -------------------------------------------------------------------------------------------

#: Steps per coordinate: ((x + 1) * n - 1) / 2, its integer part, and the distances to both sides.
_COORDINATE = ("add", "mul", "sub", "div", "floor", "sub", "sub")
_BILINEAR, _NEAREST_MODE = 0, 1


def _sampled_positions(call: Call) -> tuple[Poly, int, int]:
    """Return the position count, the coordinates per position, and the mode."""
    mode = call.get("interpolation_mode") or _BILINEAR
    if mode not in (_BILINEAR, _NEAREST_MODE):
        raise unsupported(call, f"interpolation mode is {mode}", "bilinear or nearest")
    grid: Spec = call["grid"]
    return prod(grid.sizes[:-1], start=ONE), 2 if "2d" in call.name else 3, mode


@rule("grid_sampler_2d", "grid_sampler_3d", "cudnn_grid_sampler")
def sampled(call: Call) -> Counts:
    """Count coordinates and weights per position, and a product and a sum per neighbour and element."""
    count, axes, mode = _sampled_positions(call)
    if mode == _NEAREST_MODE:
        return per_element(count * axes, *_COORDINATE[:4], "round")
    corners = 2**axes
    weights = count * (corners * (axes - 1))
    return combined(
        per_element(count * axes, *_COORDINATE),
        Counts(pointwise=weights + call.out.numel * (2 * corners - 1)),
    )


@rule("grid_sampler_2d_backward", "grid_sampler_3d_backward", "cudnn_grid_sampler_backward")
def sampled_backward(call: Call) -> Counts:
    """Count recomputed coordinates and weights, then per neighbour its gradient, and that of the position."""
    count, axes, mode = _sampled_positions(call)
    elements = call["grad_output"].numel
    mask = call.get("output_mask") or (True, True)
    if mode == _NEAREST_MODE:
        return combined(
            per_element(count * axes, *_COORDINATE[:4], "round"), per_element(elements, "add") if mask[0] else Counts()
        )
    corners = 2**axes
    shares = elements * (2 * corners) if mask[0] else ZERO
    moved = elements * (corners * axes * 3) if mask[1] else ZERO  # value * distances * gradient, added up
    return combined(
        per_element(count * axes, *_COORDINATE), Counts(pointwise=count * (corners * (axes - 1)) + shares + moved)
    )


@rule("affine_grid_generator")
def affine_grid(call: Call) -> Counts:
    """Count the product of each homogeneous position with its image's matrix."""
    axes = len(call["size"]) - 2
    return Counts(matmul=call.out.numel * (2 * (axes + 1)))


# -- torchvision -------------------------------------------------------------------------------------------------------
# Names and schemas as registered by torchvision (`torchvision/csrc/ops`).
#
# Boxes and offsets are data. Counts that depend on box sizes are upper bounds: each box covers the whole feature map,
# and non-maximum suppression compares each pair.

#: Bilinear interpolation: distances to both sides per axis, four weights, four products and their sum.
_BILINEAR_FLOPS = 4 + 4 + 7
#: Maximal number of images per column buffer (`kMaxParallelImgs`).
_PARALLEL = 32


# -- deformable convolution ----------------------------------------------------------------------------------------


def _sampled_elements(call: Call, result: Spec) -> tuple[Poly, Poly]:
    """Return how many elements a deformable convolution samples, in total and per column buffer."""
    operand, weight = call["input"], call["weight"]
    images, positions = operand.sizes[0], product(result.sizes[2:])
    per_image = operand.sizes[1] * product(weight.sizes[2:]) * positions
    batch = images.constant
    buffered = images if batch is None else max(n for n in range(1, _PARALLEL + 1) if not batch % n) * ONE
    return images * per_image, buffered * per_image


@rule("torchvision.deform_conv2d")
def deform_conv2d(call: Call) -> Counts:
    """Count the convolution, and one bilinear sample per column element.

    The column buffer holds up to 32 images, a divisor of the batch, or a whole symbolic batch. The result buffer is
    copied once.
    """
    result, weight = call.out, call["weight"]
    sampled, columns = _sampled_elements(call, result)
    masked = sampled if call.get("use_mask") else ZERO
    return combined(
        Counts(matmul=2 * result.numel * product(weight.sizes[1:])),
        Counts(pointwise=sampled * (2 + _BILINEAR_FLOPS) + masked),
        per_element(result.numel, "add"),
        Counts(workspace=(columns + result.numel) * result.dtype.bytes),
    )


@rule("torchvision._deform_conv2d_backward")
def deform_conv2d_backward(call: Call) -> Counts:
    """Count two matmuls, and per column element two samples and four additions to neighbours.

    Columns are computed from the gradient for operand, offset and mask, and sampled again for the weight.
    """
    grad, weight = call["grad"], call["weight"]
    sampled, columns = _sampled_elements(call, grad)
    masked = 2 * sampled if call.get("use_mask") else ZERO
    shares = 4 * 8 * sampled  # operand: two distances and their product, times the gradient, added
    moved = 2 * (_BILINEAR_FLOPS + 2) * sampled  # offset, along each axis
    return combined(
        Counts(matmul=4 * grad.numel * product(weight.sizes[1:])),
        Counts(pointwise=sampled * (2 + _BILINEAR_FLOPS) + shares + moved + masked),
        per_element(grad.numel, "add"),  # bias
        Counts(workspace=columns * grad.dtype.bytes),
    )


# -- regions of interest -------------------------------------------------------------------------------------------


def _samples(call: Call, height: Poly, width: Poly) -> Poly:
    """Return the samples per bin: `sampling_ratio` squared, else the elements of a bin if the box covers the map."""
    ratio: int = call["sampling_ratio"]
    if ratio > 0:
        return size(ratio * ratio)
    return _cells(call, height, width)


def _cells(call: Call, height: Poly, width: Poly) -> Poly:
    """Return the map elements per bin, for a box that covers the map."""
    return height * width / (size(call["pooled_height"]) * size(call["pooled_width"]))


def _sampling_forward(call: Call, samples: Poly) -> Counts:
    """Count bilinear weights per sample position, four multiply-adds per sample, and a mean."""
    bins = call["rois"].sizes[0] * size(call["pooled_height"]) * size(call["pooled_width"])
    return Counts(pointwise=bins * samples * (4 + 8) + call.out.numel * (samples * 8 + 1))


def _sampling_backward(call: Call, samples: Poly) -> Counts:
    """Count bilinear weights per sample and channel, and four multiply-adds into the gradient."""
    return Counts(pointwise=call["grad"].numel * samples * (4 + 8 + 4 * 3))


@rule("torchvision.roi_align", "torchvision.ps_roi_align")
def roi_align(call: Call) -> Counts:
    """Count bilinear samples; with `sampling_ratio=-1` those of boxes that cover the map."""
    return _sampling_forward(call, _samples(call, *call["input"].sizes[2:]))


@rule("torchvision._roi_align_backward", "torchvision._ps_roi_align_backward")
def roi_align_backward(call: Call) -> Counts:
    """Count the additions of each sample to its neighbours."""
    return _sampling_backward(call, _samples(call, size(call["height"]), size(call["width"])))


@rule("torchvision.roi_pool", "torchvision.ps_roi_pool")
def roi_pool(call: Call) -> Counts:
    """Count one comparison or addition per element, for boxes that cover the map."""
    return Counts(pointwise=call.out.numel * _cells(call, *call["input"].sizes[2:]))


@rule("torchvision._roi_pool_backward")
def roi_pool_backward(call: Call) -> Counts:
    """Count an addition per maximum."""
    return per_element(call["grad"].numel, "add")


@rule("torchvision._ps_roi_pool_backward")
def ps_roi_pool_backward(call: Call) -> Counts:
    """Count one multiply-add per bin element, for boxes that cover the map."""
    cells = _cells(call, size(call["height"]), size(call["width"]))
    return Counts(pointwise=call["grad"].numel * (cells + 1))


@rule("torchvision.nms")
def nms(call: Call) -> Counts:
    """Count areas, and the overlap per pair of boxes: two maxima, two minima, areas, quotient, comparison."""
    boxes = call["dets"].sizes[0]
    return Counts(pointwise=boxes * 3 + boxes * (boxes - 1) / 2 * (4 + 4 + 1 + 2 + 1 + 1))
