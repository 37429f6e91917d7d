"""Rules of torchvision ops under the schemas that it registers, without the package."""

import pytest
import torch
from torch import nn

import costgraph as cg
from costgraph.torch import trace

#: Schemas in torchvision 0.2x, and each result's shape.
SIZES = "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w"
TENSORS = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
CONV = f"{TENSORS}, {SIZES}, SymInt groups, SymInt offset_groups"
BINS = "Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
MAP = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"


def bins(input, rois, scale, height, width, *_):
    return input.new_empty(rois.shape[0], input.shape[1], height, width)


def parts_of_bins(input, rois, scale, height, width, *_):
    result = input.new_empty(rois.shape[0], input.shape[1] // (height * width), height, width)
    return result, result.new_empty(result.shape, dtype=torch.int32)


def of_map(grad, *args):
    return grad.new_empty([n for n in args if isinstance(n, int | torch.SymInt) and not isinstance(n, bool)][-4:])


def convolved(input, weight, offset, *_):
    return input.new_empty(input.shape[0], weight.shape[0], *offset.shape[2:])


OPS = {
    f"deform_conv2d({CONV}, bool use_mask) -> Tensor": convolved,
    f"_deform_conv2d_backward(Tensor grad, {CONV}, bool use_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)": (
        lambda grad, *args: tuple(map(torch.empty_like, args[:5]))
    ),
    f"roi_align(Tensor input, {BINS}, int sampling_ratio, bool aligned) -> Tensor": bins,
    f"_roi_align_backward(Tensor grad, {BINS}, {MAP}, int sampling_ratio, bool aligned) -> Tensor": (
        lambda *args: of_map(*args[:-2])
    ),
    f"roi_pool(Tensor input, {BINS}) -> (Tensor, Tensor)": lambda *args: (bins(*args), bins(*args).int()),
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {BINS[13:]}, {MAP}) -> Tensor": of_map,
    f"ps_roi_align(Tensor input, {BINS}, int sampling_ratio) -> (Tensor, Tensor)": parts_of_bins,
    f"ps_roi_pool(Tensor input, {BINS}) -> (Tensor, Tensor)": parts_of_bins,
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {BINS[13:]}, {MAP}) -> Tensor": of_map,
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor": (
        lambda dets, *_: dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema, fake in OPS.items():
        name = schema.partition("(")[0]
        if not torch._C._dispatch_has_kernel(f"torchvision::{name}"):  # unless torchvision is installed
            library.define(schema)
            torch.library.register_fake(f"torchvision::{name}", fake, lib=library)
    yield
    library._destroy()


class Call(nn.Module):
    """An op, its tensors, and its further arguments."""

    def __init__(self, name, *rest):
        super().__init__()
        self.name, self.rest = name, rest

    def forward(self, *tensors):
        return getattr(torch.ops.torchvision, self.name)(*tensors, *self.rest)


GEOMETRY = (2, 1, 1, 1, 1, 1)  # strides, padding, dilation
CONV2D = nn.Conv2d(6, 8, 3, stride=(2, 1), padding=1, groups=2)
IMAGES, WEIGHT, BIAS = torch.zeros(4, 6, 12, 10), torch.zeros(8, 3, 3, 3), torch.zeros(8)
OFFSET, MASK = torch.zeros(4, 2 * 3 * 9, 6, 10), torch.zeros(4, 3 * 9, 6, 10)
FEATURES, ROIS = torch.zeros(2, 36, 14, 16), torch.zeros(50, 5)


def test_deformable_convolution_has_convolution_matmuls():
    axes = [("B", None, "H", "W"), None, ("B", None, None, None), ("B", None, None, None), None]
    tensors = (IMAGES, WEIGHT, OFFSET, MASK, BIAS)
    g = trace(Call("deform_conv2d", *GEOMETRY, 2, 3, True), *tensors, dims=axes)
    plain = trace(CONV2D, IMAGES)
    assert cg.matmul_flops(g, B=4) == cg.matmul_flops(plain) == 2 * 4 * 8 * 6 * 10 * 3 * 9
    sampled = 4 * 6 * 9 * 6 * 10
    assert cg.flops(g, B=4) - cg.matmul_flops(g, B=4) == sampled * 18 + 4 * 8 * 6 * 10
    back = trace(Call("_deform_conv2d_backward", *GEOMETRY, 2, 3, True), torch.zeros(4, 8, 6, 10), *tensors)
    assert cg.matmul_flops(back) == 2 * cg.matmul_flops(plain)


def test_deformable_convolution_columns_hold_at_most_32_images():
    def workspace(batch):
        tensors = [torch.zeros(batch, *t.shape[1:]) for t in (IMAGES, OFFSET, MASK)]
        images, offset, mask = tensors
        g = trace(Call("deform_conv2d", *GEOMETRY, 2, 3, True), images, WEIGHT, offset, mask, BIAS)
        (op,) = g.ops
        return (op.kind.workspace.constant - 4 * op.results[0].numel.constant) / (4 * 6 * 9 * 6 * 10)

    assert [workspace(n) for n in (4, 32, 48, 64, 37)] == [4, 32, 24, 32, 1]


@pytest.mark.parametrize(
    ("name", "rest", "pointwise"),
    [
        ("roi_align", (0.5, 7, 7, 2, True), 50 * 49 * (4 * 12 + 36 * (4 * 8 + 1))),
        ("roi_align", (0.5, 7, 4, -1, True), 50 * 28 * (8 * 12 + 36 * (8 * 8 + 1))),
        ("ps_roi_align", (0.5, 3, 3, 2), 50 * 9 * (4 * 12 + 4 * (4 * 8 + 1))),
        ("roi_pool", (0.5, 7, 4), 50 * 36 * 14 * 16),
        ("ps_roi_pool", (0.5, 2, 2), 50 * 9 * 14 * 16),
    ],
)
def test_roi_op_costs(name, rest, pointwise):
    R = cg.dims("R")
    g = trace(Call(name, *rest), FEATURES, ROIS, dims=[None, ("R", None)])
    assert cg.matmul_flops(g) == 0
    assert cg.flops(g, R=50) == pointwise
    assert cg.flops(g) == pointwise // 50 * R


@pytest.mark.parametrize(
    ("name", "tensors", "rest", "flops"),
    [
        ("_roi_align_backward", 2, (0.5, 7, 7, 2, 36, 14, 16, 2, True), 50 * 36 * 49 * 4 * 24),
        ("_roi_pool_backward", 3, (0.5, 7, 7, 2, 36, 14, 16), 50 * 36 * 49),
        ("_ps_roi_pool_backward", 3, (0.5, 7, 7, 2, 36, 14, 16), 50 * 36 * (14 * 16 + 49)),
    ],
)
def test_roi_gradient_costs(name, tensors, rest, flops):
    grad = torch.zeros(50, 36, 7, 7)
    g = trace(Call(name, *rest), *(grad, ROIS, torch.zeros(50, 36, 7, 7, dtype=torch.int32))[:tensors])
    assert cg.flops(g) == flops


def test_nms_compares_each_pair_of_boxes():
    g = trace(Call("nms", 0.5), torch.zeros(20, 4), torch.zeros(20), unknown="symbol")
    assert cg.flops(g) == 20 * 3 + 20 * 19 // 2 * 13
