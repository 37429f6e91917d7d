"""Ops of torchvision, by the names and schemas under which it registers them (`torchvision/csrc/ops`).

Boxes and offsets are data. Counts that would follow from the extents of boxes are upper bounds: each box covers the
whole feature map, and non-maximum suppression compares each pair.
"""

from __future__ import annotations

from ....algebra.polynomial import ONE, ZERO, Poly
from ..call import Call, Counts, Spec
from .amounts import each, product, size, together
from .table import rule

__all__: list[str] = []  # its rules are found in RULES

#: Bilinear interpolation: distances to both sides along each axis, four weights, four products and their sum.
_BILINEAR = 4 + 4 + 7
#: Images whose columns lie in memory together, at the most (`kMaxParallelImgs`).
_PARALLEL = 32


# -- deformable convolution ----------------------------------------------------------------------------------------


def _columns(call: Call, result: Spec) -> tuple[Poly, Poly]:
    """Return the number of sampled elements of a deformable convolution, in all and in one batch of columns."""
    operand, weight = call["input"], call["weight"]
    images, places = operand.sizes[0], product(result.sizes[2:])
    of_one = operand.sizes[1] * product(weight.sizes[2:]) * places
    number = images.constant
    together_ = images if number is None else max(n for n in range(1, _PARALLEL + 1) if not number % n) * ONE
    return images * of_one, together_ * of_one


@rule("torchvision.deform_conv2d")
def deform_conv2d(call: Call) -> Counts:
    """Count the convolution, and one bilinear sample for each column element.

    The kernel takes memory for columns of up to 32 images, whose number divides the batch; an open batch is one of
    them. Its buffer of results is copied once.
    """
    made, weight = call.out, call["weight"]
    sampled, columns = _columns(call, made)
    masked = sampled if call.get("use_mask") else ZERO
    return together(
        Counts(matmul=2 * made.numel * product(weight.sizes[1:])),
        Counts(pointwise=sampled * (2 + _BILINEAR) + masked),
        each(made.numel, "add"),
        Counts(workspace=(columns + made.numel) * made.dtype.bytes),
    )


@rule("torchvision._deform_conv2d_backward")
def deform_conv2d_backward(call: Call) -> Counts:
    """Count two products, and for each column element two samples and four additions to neighbours.

    Columns are computed from the gradient for operand, offset and mask, and sampled again for the weight.
    """
    grad, weight = call["grad"], call["weight"]
    sampled, columns = _columns(call, grad)
    masked = 2 * sampled if call.get("use_mask") else ZERO
    shares = 4 * 8 * sampled  # of the operand: two distances and their product, times the gradient, added
    moved = 2 * (_BILINEAR + 2) * sampled  # of the offset, along each axis
    return together(
        Counts(matmul=4 * grad.numel * product(weight.sizes[1:])),
        Counts(pointwise=sampled * (2 + _BILINEAR) + shares + moved + masked),
        each(grad.numel, "add"),  # of the bias
        Counts(workspace=columns * grad.dtype.bytes),
    )


# -- regions of interest -------------------------------------------------------------------------------------------


def _samples(call: Call, height: Poly, width: Poly) -> Poly:
    """Return the samples per bin: `sampling_ratio`, else the elements of a bin that covers the whole map."""
    ratio: int = call["sampling_ratio"]
    if ratio > 0:
        return size(ratio * ratio)
    return _cells(call, height, width)


def _cells(call: Call, height: Poly, width: Poly) -> Poly:
    """Return the map elements per bin, for a box that covers the map."""
    return height * width / (size(call["pooled_height"]) * size(call["pooled_width"]))


def _forward(call: Call, samples: Poly) -> Counts:
    """Count bilinear weights once per sample position, four multiply-adds per sample, and a mean."""
    bins = call["rois"].sizes[0] * size(call["pooled_height"]) * size(call["pooled_width"])
    return Counts(pointwise=bins * samples * (4 + 8) + call.out.numel * (samples * 8 + 1))


def _backward(call: Call, samples: Poly) -> Counts:
    """Count bilinear weights per sample and channel, and four multiply-adds into the gradient."""
    return Counts(pointwise=call["grad"].numel * samples * (4 + 8 + 4 * 3))


@rule("torchvision.roi_align", "torchvision.ps_roi_align")
def roi_align(call: Call) -> Counts:
    """Count bilinear samples; with `sampling_ratio=-1` those of boxes that cover the map."""
    return _forward(call, _samples(call, *call["input"].sizes[2:]))


@rule("torchvision._roi_align_backward", "torchvision._ps_roi_align_backward")
def roi_align_backward(call: Call) -> Counts:
    """Count what each sample adds to its neighbours."""
    return _backward(call, _samples(call, size(call["height"]), size(call["width"])))


@rule("torchvision.roi_pool", "torchvision.ps_roi_pool")
def roi_pool(call: Call) -> Counts:
    """Count one comparison or addition per element, for boxes that cover the map."""
    return Counts(pointwise=call.out.numel * _cells(call, *call["input"].sizes[2:]))


@rule("torchvision._roi_pool_backward")
def roi_pool_backward(call: Call) -> Counts:
    """Count an addition for each maximum."""
    return each(call["grad"].numel, "add")


@rule("torchvision._ps_roi_pool_backward")
def ps_roi_pool_backward(call: Call) -> Counts:
    """Count one multiply-add per bin element, for boxes that cover the map."""
    cells = _cells(call, size(call["height"]), size(call["width"]))
    return Counts(pointwise=call["grad"].numel * (cells + 1))


@rule("torchvision.nms")
def nms(call: Call) -> Counts:
    """Count areas, and the overlap of each pair of boxes: two maxima, two minima, areas, quotient, comparison."""
    boxes = call["dets"].sizes[0]
    return Counts(pointwise=boxes * 3 + boxes * (boxes - 1) / 2 * (4 + 4 + 1 + 2 + 1 + 1))
