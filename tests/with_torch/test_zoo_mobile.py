"""ConvNeXt, Swin, MobileNet, EfficientNet and DLRM against small torch modules."""

from math import prod

import pytest
import torch
from lazy import lazy_import
from shared import load
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_mobile import DLRM, REFERENCES, convnext, efficientnet, mobilenet_v2, mobilenet_v3

import costgraph as cg

transformers = lazy_import("transformers")

torch.set_num_threads(1)


def _counted(module, *inputs):
    """Return torch's counts: parameters, and matmul FLOPs; `test_zoo_page.py` traces modules."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs)
    return sum(p.numel() for p in module.parameters()), counter.get_total_flops()


def _module(config, kind):
    config.architectures, config._attn_implementation = [kind], "eager"
    return getattr(transformers, kind)(config).eval()


def _assert_counts_equal(config, kind, side=None):
    """Assert that a transformers module and its declaration have equal parameters and matmul FLOPs."""
    module = _module(config, kind)
    g = cg.models.from_config(config.to_dict(), attention="eager")
    side = side or config.image_size
    images = torch.zeros(3, config.num_channels, side, side)
    assert (cg.param_count(g), cg.matmul_flops(g, count="full", B=3, R=side)) == _counted(module, images)


def _convolved_back(gradient, _x, weight, *_, out_shape, **__):
    """Return the FLOPs of a convolution's gradients, each a sum over the index points of the convolution.

    The points are the output elements times the filter elements; torch's formula ignores groups
    (docs/howto/flop_counter.md).
    """
    return 2 * prod(gradient) * prod(weight[1:]) * sum(made is not None for made in out_shape[:2])


def _assert_step_matches(g, module, inputs, loss, **sizes):
    """Assert that a training step has the matmul FLOPs of the module's forward and backward pass."""
    module.train()
    back = {torch.ops.aten.convolution_backward: _convolved_back}
    with FlopCounterMode(display=False, custom_mapping=back) as counter:
        loss(module(*inputs)).backward()
    assert cg.matmul_flops(cg.training_step(g, optimizer=cg.SGD()), count="full", **sizes) == counter.get_total_flops()


CONVNEXT = {
    "plain": {"hidden_sizes": [4, 6, 10, 12], "depths": [1, 2, 3, 1], "image_size": 67, "num_labels": 7},
    "three stages": {"hidden_sizes": [4, 4, 10], "depths": [2, 1, 2], "num_stages": 3, "image_size": 41},
    "no scale": {
        "hidden_sizes": [4, 6], "depths": [1, 2], "num_stages": 2, "patch_size": 3, "image_size": 31,
        "layer_scale_init_value": 0.0, "num_channels": 1, "hidden_act": "relu",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["ConvNextModel", "ConvNextForImageClassification"])
@pytest.mark.parametrize("sizes", CONVNEXT.values(), ids=CONVNEXT)
def test_convnext(sizes, kind):
    _assert_counts_equal(transformers.ConvNextConfig(**sizes), kind)


SWIN = {
    "plain": {"depths": [2, 2], "num_heads": [1, 2], "image_size": 48, "window_size": 3, "embed_dim": 6},
    "padded": {"depths": [2, 4, 2], "num_heads": [3, 2, 1], "image_size": 92, "window_size": 5, "embed_dim": 6},
    "odd": {"depths": [3, 1, 1], "num_heads": [1, 2, 3], "image_size": 52, "window_size": 3, "embed_dim": 6},
    "whole": {
        "depths": [2, 3], "num_heads": [1, 2], "image_size": 28, "window_size": 4, "embed_dim": 4, "qkv_bias": False,
        "use_absolute_embeddings": True, "patch_size": 2, "mlp_ratio": 1.5, "num_channels": 1, "hidden_act": "relu",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param("SwinModel", marks=pytest.mark.long), "SwinForImageClassification"])
@pytest.mark.parametrize("sizes", SWIN.values(), ids=SWIN)
def test_swin(sizes, kind):
    _assert_counts_equal(transformers.SwinConfig(**sizes), kind)


MOBILENET = {
    "plain": {"image_size": 64, "num_labels": 11},
    "odd image": {"image_size": 97, "tf_padding": False, "num_channels": 1},
    "narrow": {"image_size": 67, "depth_multiplier": 0.35},
    "narrow throughout": {"image_size": 41, "depth_multiplier": 0.35, "finegrained_output": False},
    "wide": {"image_size": 33, "depth_multiplier": 1.4, "depth_divisible_by": 4, "hidden_act": "relu"},
    # every stage has 8 channels, so that blocks without a stride have a residual
    "all equal": {"image_size": 65, "depth_multiplier": 0.01, "expand_ratio": 2.0},
    "dilated": {"image_size": 79, "output_stride": 8, "first_layer_is_expansion": False},
}


@pytest.mark.parametrize("sizes", MOBILENET.values(), ids=MOBILENET)
def test_mobilenet_v2(sizes):
    _assert_counts_equal(transformers.MobileNetV2Config(**sizes), "MobileNetV2ForImageClassification")


def test_mobilenet_v2_without_a_head():
    _assert_counts_equal(transformers.MobileNetV2Config(image_size=35), "MobileNetV2Model")


SHORT = {"in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 5], "strides": [1, 2]}
EFFICIENTNET = {
    "b0": {
        "image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "num_labels": 5,
    },
    "wide and deep": {
        "image_size": 32, "width_coefficient": 1.2, "depth_coefficient": 1.4, "hidden_dim": 1536, "num_channels": 1,
    },
    # 18 -> 9 after the stem; the first block of the second stage, the third in all, pads 9 to halve it to 5
    "padded": {
        **SHORT, "image_size": 18, "num_block_repeats": [2, 1], "expand_ratios": [1, 3], "depthwise_padding": [2],
        "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "squeeze_expansion_ratio": 0.5,
        "hidden_act": "relu",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param("EfficientNetModel", marks=pytest.mark.long), "EfficientNetForImageClassification"]
)
@pytest.mark.parametrize("sizes", EFFICIENTNET.values(), ids=EFFICIENTNET)
def test_efficientnet(sizes, kind):
    _assert_counts_equal(transformers.EfficientNetConfig(**sizes), kind)


def test_efficientnet_with_too_little_padding_is_refused():
    config = transformers.EfficientNetConfig(
        **{**EFFICIENTNET["padded"], "depthwise_padding": []}, architectures=["EfficientNetModel"]
    )
    with pytest.raises(cg.UnsupportedError, match="every odd side before a stride of 2"):
        cg.models.from_config(config.to_dict())
    # the module halves 9 to 4, where the declaration would have 5
    output = _module(config, "EfficientNetModel")(torch.zeros(1, 3, 18, 18)).last_hidden_state
    assert output.shape[2:] == (4, 4)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("mobilenet-v2", mobilenet_v2),
        ("mobilenet-v3-small", lambda classes: mobilenet_v3("small", classes)),
        ("mobilenet-v3-large", lambda classes: mobilenet_v3("large", classes)),
        ("efficientnet-b1", lambda classes: efficientnet(1.0, 1.1, classes)),
    ],
)
def test_torchvision_modules_match_at_another_size(name, module):
    g = load(name)
    images = torch.zeros(3, 3, 47, 47)
    assert (cg.param_count(g, C=13), cg.matmul_flops(g, B=3, R=47, C=13)) == _counted(module(13).eval(), images)


@pytest.mark.parametrize("itself", [False, True])
def test_dlrm(itself):
    rows, bottom, top = [17, 5, 2, 29], [7, 11, 3], [13, 19, 1]
    module = DLRM(rows, bottom, top, itself)
    sizes = {"dense": 7, "F1": 11, "D": 3, "T1": 13, "T2": 19, "N": 5, "B": 23}
    sizes |= {f"V{i}": n for i, n in enumerate(rows, 1)}
    g = load("dlrm-small", symbolic=True, tables=4, bottom=2, top=3, itself=itself)
    inputs = torch.zeros(23, 7), *(torch.zeros(23, 5, dtype=torch.int64) for _ in rows)
    assert (cg.param_count(g, **sizes), cg.matmul_flops(g, **sizes)) == _counted(module, *inputs)
    targets = torch.zeros(23, 1)
    _assert_step_matches(g, module, inputs, lambda p: nn.functional.binary_cross_entropy(p, targets), **sizes)


def _classes(logits):
    return nn.functional.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("mobilenet-v3-small", lambda: mobilenet_v3("small")),
        pytest.param("efficientnet-b0", lambda: efficientnet(1.0, 1.0), marks=pytest.mark.long),
    ],
)
def test_mobile_model_steps_match_torch(name, module):
    _assert_step_matches(load(name), module(), (torch.zeros(2, 3, 37, 37),), _classes, B=2, R=37)


def test_convnext_step_matches_torch():
    module = convnext([6, 10, 14, 22], [1, 2, 3, 1], 7)
    sizes = {"B": 2, "R": 67, "C": 7, "D1": 6, "D2": 10, "D3": 14, "D4": 22, "L1": 1, "L2": 2, "L3": 3, "L4": 1}
    _assert_step_matches(load("convnext-tiny"), module, (torch.zeros(2, 3, 67, 67),), _classes, **sizes)


@pytest.mark.long
def test_swin_step_matches_torch():
    config = transformers.SwinConfig(**SWIN["padded"], num_labels=7)
    module = _module(config, "SwinForImageClassification")
    g = cg.models.from_config(config.to_dict(), attention="eager")
    _assert_step_matches(g, module, (torch.zeros(2, 3, 92, 92),), lambda made: _classes(made.logits), B=2)


def test_every_preset_has_a_reference():
    families = ("mobilenet", "efficientnet", "convnext", "swin", "dlrm")
    assert set(REFERENCES) == {name for name in cg.models.names() if name.startswith(families)}
