"""Convolutional networks and diffusion U-Nets: published counts, supported questions, and refused configurations."""

import pytest
from shared import load

import costgraph as cg
from costgraph import models

#: Parameters and 10^9 multiply-adds from torchvision's table of classification weights (224 x 224 images).
TORCHVISION = {
    "alexnet": (61_100_840, 0.71),
    "vgg11": (132_863_336, 7.61),
    "vgg11-bn": (132_868_840, 7.61),
    "vgg13": (133_047_848, 11.31),
    "vgg13-bn": (133_053_736, 11.31),
    "vgg16": (138_357_544, 15.47),
    "vgg16-bn": (138_365_992, 15.47),
    "vgg19": (143_667_240, 19.63),
    "vgg19-bn": (143_678_248, 19.63),
    "resnet18": (11_689_512, 1.81),
    "resnet34": (21_797_672, 3.66),
    "resnet50": (25_557_032, 4.09),
    "resnet101": (44_549_160, 7.80),
    "resnet152": (60_192_808, 11.51),
    "resnext50-32x4d": (25_028_904, 4.23),
    "resnext101-32x8d": (88_791_336, 16.41),
    "resnext101-64x4d": (83_455_272, 15.46),
    "wide-resnet50-2": (68_883_240, 11.40),
    "wide-resnet101-2": (126_886_696, 22.75),
    "densenet121": (7_978_856, 2.83),
    "densenet161": (28_681_000, 7.73),
    "densenet169": (14_149_480, 3.36),
    "densenet201": (20_013_928, 4.29),
}
#: Ho et al. 2020, appendix B: 35.7M; the UNet2DConditionModel in stable-diffusion-v1-5 has 859,520,964.
UNETS = {"ddpm-cifar10": 35_746_307, "stable-diffusion-1.5-unet": 859_520_964}


#: test_models_zoo.py checks these models' parameters against published numbers in every run.
LARGER = ("-bn", "13", "19", "101", "101-2", "152", "161", "169", "201", "64x4d")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n.endswith(LARGER) else n for n in TORCHVISION]
)
def test_parameters_and_multiply_adds_match_torchvision(name):
    parameters, multiply_adds = TORCHVISION[name]
    g = load(name)
    assert cg.param_count(g) == parameters
    assert round(cg.matmul_flops(g, B=1) / 2 / 10**9, 2) == multiply_adds


@pytest.mark.parametrize("name", UNETS)
def test_unet_parameters_match_published_counts(name):
    assert cg.param_count(load(name)) == UNETS[name]


#: One model per family and per block type.
FEW = ["alexnet", "vgg11-bn", "resnet18", "resnext50-32x4d", "ddpm-cifar10"]


@pytest.mark.parametrize("name", FEW)
def test_only_batch_is_symbolic_by_default(name):
    g = load(name)
    assert {s.name for s in cg.flops(g).free_symbols | cg.peak_memory(g).free_symbols} == {"B"}
    assert cg.flops(g, B=3) > 0
    assert cg.peak_memory(g, B=3) > cg.param_bytes(g)
    assert name in str(cg.report(g, "h100-sxm", B=3))


@pytest.mark.parametrize("name", FEW)
def test_symbolic_leaves_all_sizes_open(name):
    g, preset = load(name, symbolic=True), load(name)
    assert g.defaults == {}
    free = {s.name for f in (cg.flops(g), cg.param_count(g), cg.peak_memory(g)) for s in f.free_symbols}
    assert free == {"B", *preset.defaults}
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(g, B=2, **preset.defaults) == question(preset, B=2)


@pytest.mark.parametrize(
    "name", [n if n in ("alexnet", "resnet18") else pytest.param(n, marks=pytest.mark.long) for n in FEW]
)
def test_training_step_has_three_times_forward_matmuls(name):
    g = load(name, attention="eager", dtype="fp32")  # flash attention recomputes its scores
    step = cg.training_step(g, optimizer=cg.SGD())
    assert cg.param_count(step) == cg.param_count(g)
    # every matmul has two in the backward pass, except for images and time embeddings
    assert 2.7 < cg.matmul_flops(step, B=2) / cg.matmul_flops(g, B=2) < 3
    assert cg.peak_memory(step, B=2) > 2 * cg.param_bytes(g)


def test_depth_is_symbolic():
    g = load("resnet50")
    block = 2 * 1024 * 256 + 9 * 256**2 + 2 * (256 + 256 + 1024)  # 1x1 down, 3x3, 1x1 up, and three norms
    assert cg.param_count(g, L3=23) == cg.param_count(g) + 17 * block == 44_549_160  # ResNet-101
    assert cg.peak_memory(g, L3=23, B=1) == cg.peak_memory(load("resnet101"), B=1)


def test_too_small_image_is_refused():
    with pytest.raises(cg.BindingError, match="R=32"):
        cg.flops(load("alexnet"), R=32, B=1)
    assert cg.matmul_flops(load("resnet18"), R=1, B=1) > 0


def test_odd_densenet_channels_are_refused():
    with pytest.raises(cg.BindingError, match="whole number"):
        cg.flops(load("densenet121"), B=1, D=63)


def test_batch_or_running_statistics_can_be_chosen():
    """Frozen norms train with running statistics; the forward pass runs as after `eval()`."""
    auto, batch, frozen = (load("resnet18", statistics=s) for s in ("auto", "batch", "running"))
    assert cg.flops(auto, B=2) == cg.flops(frozen, B=2) < cg.flops(batch, B=2)
    a, b, f = (cg.flops(cg.training_step(g), B=2) for g in (auto, batch, frozen))
    assert a == b > f
    with pytest.raises(cg.GraphError, match="statistics"):
        load("resnet18", statistics="eval")


def test_densenet_block_counts_can_be_chosen():
    shallow = load("densenet121", blocks=(2, 3))
    # 64 + 2*32 = 128 channels, halved; 64 + 3*32 = 160 at the end: two norm rows and one head row each
    assert cg.param_count(shallow, C=1) - cg.param_count(load("densenet121", blocks=(2, 2)), C=1) == (
        2 * 128 + 128 * 128 + 2 * 128 + 9 * 128 * 32 + 3 * 32
    )
    with pytest.raises(cg.GraphError, match="expected one of"):
        load("resnet50", width=2)


# -- configurations of transformers ----------------------------------------------------------------------------------

RESNET50 = {
    "architectures": ["ResNetForImageClassification"], "model_type": "resnet", "num_channels": 3, "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck", "hidden_act": "relu",
    "downsample_in_first_stage": False, "num_labels": 1000, "torch_dtype": "float32",
}  # fmt: skip


def test_configurations_match_presets():
    g = models.from_config(RESNET50)
    assert cg.param_count(g) == 25_557_032
    assert cg.param_bytes(g) == 4 * 25_557_032
    bare = models.from_config(RESNET50 | {"architectures": ["ResNetModel"]})
    assert cg.param_count(bare) == 25_557_032 - 2048 * 1000 - 1000
    assert len(bare.outputs) == 2
    assert bare.loss is None


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"layer_type": "fancy"}, cg.UnsupportedError, "layer_type is 'fancy', expected one of basic, bottleneck"),
        ({"hidden_act": "cubic"}, cg.UnsupportedError, "hidden_act is 'cubic'"),
        ({"depths": [3, 4, 6]}, cg.UnsupportedError, "hidden_sizes is .* expected '3 numbers, the length of depths'"),
        ({"depths": [3, 4, 0, 3]}, cg.FormatError, "depths"),
        ({"depths": "3463"}, cg.FormatError, "depths"),
        ({"squeeze": True}, cg.UnsupportedError, "squeeze is True, expected a known field"),
        ({"embedding_size": 64.5}, cg.FormatError, "embedding_size"),
        ({"downsample_in_bottleneck": "yes"}, cg.FormatError, "downsample_in_bottleneck"),
    ],
)
def test_unsupported_configurations_are_refused(changes, error, text):
    with pytest.raises(error, match=text):
        models.from_config(RESNET50 | changes)
