"""Convolutional networks and diffusion U-Nets against plain modules: exact parameters and matmul FLOPs."""

from functools import cache

import pytest
import torch
from diffusers_unets import UNet
from lazy import lazy_import
from shared import load, training_step
from torch.utils.flop_counter import FlopCounterMode
from torchvision_convnets import VGG, AlexNet, BasicBlock, Bottleneck, DenseNet, ResNet
from zoo_convnets import REFERENCES

import costgraph as cg
from costgraph.torch import trace
from costgraph.transforms.loss import with_loss

transformers = lazy_import("transformers")

torch.set_num_threads(1)

BOTTLENECKS = {"D0": 8, "D1": 32, "D2": 64, "D3": 128, "D4": 256, "C": 7}


def alexnet():
    sizes = {"D1": 3, "D2": 5, "D3": 7, "D4": 11, "D5": 13, "F": 17, "C": 7}
    return "alexnet", {}, sizes, lambda: AlexNet(7, widths=(3, 5, 7, 11, 13), hidden=17)


def vgg(norm=False):
    sizes = {
        "D1": 3,
        "D2": 5,
        "D3": 7,
        "D4": 11,
        "D5": 13,
        "L1": 2,
        "L2": 3,
        "L3": 2,
        "L4": 2,
        "L5": 4,
        "F": 17,
        "C": 7,
    }
    cfg = [3, 3, "M", 5, 5, 5, "M", 7, 7, "M", 11, 11, "M", 13, 13, 13, 13, "M"]
    return ("vgg13-bn" if norm else "vgg13"), {}, sizes, lambda: VGG(cfg, norm, 7, hidden=17)


def resnet(name, block, layers, sizes, **options):
    sizes = sizes | {f"L{i}": n for i, n in enumerate(layers, 1)}
    return name, {}, sizes, lambda: ResNet(block, layers, 7, inplanes=8, **options)


def densenet():
    return (
        "densenet121",
        {"blocks": (2, 3, 1)},
        {"D": 8, "K": 4, "Z": 3, "C": 7},
        lambda: DenseNet(4, (2, 3, 1), 8, 3, 0.0, 7),
    )


BASICS = {"D0": 8, "D2": 16, "D3": 32, "D4": 64, "C": 7}
VISION = {
    "alexnet": alexnet(),
    "vgg": vgg(),
    "vgg-bn": vgg(norm=True),
    "basic": resnet("resnet34", BasicBlock, [2, 2, 3, 2], BASICS),
    "bottleneck": resnet("resnet50", Bottleneck, [2, 2, 3, 2], BOTTLENECKS),
    "wide": resnet("wide-resnet50-2", Bottleneck, [2, 2, 2, 2], BOTTLENECKS, width_per_group=128),
    "grouped": resnet(
        "resnext50-32x4d", Bottleneck, [2, 2, 2, 2], BOTTLENECKS | {"G": 4}, groups=4, width_per_group=32
    ),
    "densenet": densenet(),
}


class Scored(torch.nn.Module):
    """A module and the mean of its squared results."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def bound(shape, sizes):
    return tuple(int(n.subs({s: sizes[s.name] for s in n.free_symbols})) for n in shape)


# -- published sizes: test_zoo_page.py compares the presets with their modules -----------------------------------------


def test_every_preset_has_a_reference():
    from costgraph.models import alexnet, densenet, resnet, unet, vgg

    names = [n for m in (alexnet, densenet, resnet, unet, vgg) for f in m.FAMILIES for n in f.presets]
    assert sorted(REFERENCES) == sorted(names)


# -- small sizes, odd sides --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [pytest.param(64, marks=pytest.mark.long), 71])
@pytest.mark.parametrize("case", sorted(VISION))
def test_small_convnets_with_odd_sides_match_torch(case, side):
    name, options, sizes, build = VISION[case]
    module, x = build().eval(), torch.zeros(3, 3, side, side)
    g = load(name, **options)
    assert cg.param_count(g, **sizes) == sum(p.numel() for p in module.parameters())
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert cg.matmul_flops(g, count="full", B=3, R=side, **sizes) == counter.get_total_flops()


def test_convnet_elementwise_flops_equal_the_trace():
    """Norms with running statistics, activations, pooling, sums and the head, at odd sizes."""
    for case in ("bottleneck", "densenet", "alexnet"):
        name, options, sizes, build = VISION[case]
        g = load(name, dtype="fp32", **options)
        ours = cg.costs(g, B=2, R=71, **sizes).total()
        theirs = cg.costs(trace(build().eval(), torch.zeros(2, 3, 71, 71))).total()
        assert (ours.pointwise, ours.transcendental) == (theirs.pointwise, theirs.transcendental)


def test_buffer_bytes_equal_the_module():
    name, options, sizes, build = VISION["bottleneck"]
    g = load(name, **options)
    held = sum(life.bytes for life in cg.lifetimes(g, B=1, R=64, **sizes) if life.role == "buffer")
    assert held == sum(b.numel() * b.element_size() for b in build().buffers())


# -- training ----------------------------------------------------------------------------------------------------------


def squared(axes):
    """Declare the mean squared result."""
    return lambda y: cg.reduce(cg.ops.pointwise("square", y), f"{axes} -> ", "mean")


@cache
def traced_step(case):
    """Trace a step of a module without dropout, which declarations lack."""
    module = VISION[case][-1]().train()
    for layer in module.modules():
        layer.p = 0.0
    return trace(Scored(module), torch.zeros(2, 3, 71, 71), train=True)


def counted_step(module, *inputs):
    with FlopCounterMode(display=False) as counter:
        module(*inputs).square().mean().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", [pytest.param("alexnet", marks=pytest.mark.long), "vgg-bn", "basic", "densenet"])
def test_matmul_flops_of_a_step(case):
    name, options, sizes, build = VISION[case]
    step = training_step(load(name, **options), optimizer=cg.SGD())
    theirs = counted_step(build().train(), torch.zeros(2, 3, 71, 71))
    assert cg.matmul_flops(step, count="full", B=2, R=71, **sizes) == theirs


def test_matmul_flops_of_a_step_with_groups():
    """The counter ignores groups in the backward pass (docs/howto/flop_counter.md); the trace of the step does not."""
    name, options, sizes, build = VISION["grouped"]
    step = training_step(load(name, **options), optimizer=cg.SGD())
    ours = cg.matmul_flops(step, count="full", B=2, R=71, **sizes)
    counted = counted_step(build().train(), torch.zeros(2, 3, 71, 71))
    assert ours == cg.matmul_flops(traced_step("grouped"), count="full") < counted


def test_elementwise_flops_of_norms_in_a_step():
    """Forward: batch statistics, and the update of the running ones."""
    name, options, sizes, _ = VISION["basic"]
    step = training_step(load(name, dtype="fp32", **options))
    ours = cg.costs(step, B=2, R=71, **sizes).filter(phase="forward", direction="compute")
    ours = sum(r.amount.constant for r in ours.rows if "norm" in r.scope)
    theirs = cg.costs(traced_step("basic")).filter(phase="forward", direction="compute")
    norms = sum(r.amount.constant for r in theirs.rows if "batch_norm" in r.op)
    assert ours == norms > 0


@pytest.mark.parametrize("case", ["basic", pytest.param("vgg-bn", marks=pytest.mark.long), "densenet"])
def test_convnet_peak_equals_the_trace(case):
    """In-place ops, saved statistics and lifetimes; a step also has the scalar gradient of the loss."""
    name, options, sizes, build = VISION[case]
    g, x = load(name, dtype="fp32", **options), torch.zeros(2, 3, 71, 71)
    assert cg.peak_memory(g, B=2, R=71, **sizes) == cg.peak_memory(trace(build().eval(), x))
    step = cg.backward(with_loss(g, squared("b c")))
    seen = traced_step(case)
    # torch's gradient of a channel norm allocates a workspace, as in real runs; declarations have none
    room = max((op.workspace.constant for op in seen.ops if "batch_norm_backward" in op.name), default=0)
    assert 0 <= cg.peak_memory(seen) - cg.peak_memory(step, B=2, R=71, **sizes) <= 4 + room


# -- transformers' ResNet ----------------------------------------------------------------------------------------------


def config(**changes):
    fields = {"embedding_size": 8, "hidden_sizes": [32, 64, 128], "depths": [2, 3, 2], "num_labels": 7}
    return transformers.ResNetConfig(**fields | changes)


CHANGES = {
    "bottleneck": {},
    "basic": {"layer_type": "basic", "hidden_sizes": [8, 16, 24]},
    "basic-widened": {"layer_type": "basic", "hidden_sizes": [12, 16, 24]},
    "early": {"downsample_in_bottleneck": True},
    "first-halved": {"downsample_in_first_stage": True},
    "first-halved-unchanged": {"downsample_in_first_stage": True, "layer_type": "basic", "hidden_sizes": [8, 16, 24]},
    "single": {"depths": [1, 2, 1]},
    "two-stages": {"depths": [2, 2], "hidden_sizes": [16, 24]},
    "channels": {"num_channels": 5, "hidden_act": "silu"},
}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param(name, change, marks=() if (i % 3 == 0) == (name == "ResNetModel") else pytest.mark.long)
        for i, change in enumerate(CHANGES.values())
        for name in ("ResNetForImageClassification", "ResNetModel")
    ],
)
def test_transformers_resnet_configs_match_their_modules(architecture, changes):
    c = config(**changes)
    module = getattr(transformers, architecture)(c).eval()
    g = cg.models.from_config({**c.to_dict(), "architectures": [architecture]})
    assert cg.param_count(g) == sum(p.numel() for p in module.parameters())
    x = torch.zeros(2, c.num_channels, 71, 71)
    with FlopCounterMode(display=False) as counter:
        out = module(x)
    assert cg.matmul_flops(g, B=2, R=71) == counter.get_total_flops()
    shapes = [tuple(t.shape) for t in (out.values() if architecture == "ResNetModel" else [out.logits])]
    sizes = {**g.defaults, "B": 2, "R": 71}
    assert [bound(t.shape, sizes) for t in g.outputs] == shapes


def test_resnet50_config_equals_the_preset():
    g = cg.models.from_config(
        {**transformers.ResNetConfig(num_labels=1000).to_dict(), "architectures": ["ResNetForImageClassification"]}
    )
    assert cg.param_count(g) == cg.param_count(load("resnet50"))
    assert cg.matmul_flops(g, B=1) == cg.matmul_flops(load("resnet50"), B=1)


# -- U-Nets ------------------------------------------------------------------------------------------------------------


def small_unet(text):
    options = {"levels": 4, "kept": (3,), "blocks": 1, "attended": (2, 4), "attention": "eager"}
    sizes = {"D1": 6, "D2": 10, "D4": 14, "H": 2, "N": 2, "IC": 3, "OC": 5}

    def build():
        more = {"context": 11, "depth": 2} if text else {}
        return UNet(3, 5, (6, 10, 10, 14), (1, 3), layers=1, heads=2, groups=2, **more)

    return options | {"text": text}, sizes | ({"L": 2, "M": 13, "E": 11} if text else {}), build


@pytest.mark.parametrize("side", [16, 13, 9])
@pytest.mark.parametrize("text", [False, True])
def test_small_unets_with_odd_sides_match_torch(text, side):
    """Includes numbers of levels, blocks and attention levels that no preset has."""
    options, sizes, build = small_unet(text)
    module = build().eval()
    g = load("stable-diffusion-1.5-unet", symbolic=True, **options)
    inputs = [
        torch.zeros(3, 3, side, side),
        torch.zeros(3, dtype=torch.int64),
        *([torch.zeros(3, 13, 11)] if text else []),
    ]
    assert cg.param_count(g, **sizes) == sum(p.numel() for p in module.parameters())
    with FlopCounterMode(display=False) as counter:
        out = module(*inputs)
    assert cg.matmul_flops(g, B=3, R=side, **sizes) == counter.get_total_flops()
    assert bound(g.outputs[0].shape, {"B": 3, "R": side, **sizes}) == tuple(out.shape) == (3, 5, side, side)


@pytest.mark.parametrize("text", [pytest.param(False, marks=pytest.mark.long), True])
def test_unet_step_matmul_flops_match_torch(text):
    options, sizes, build = small_unet(text)
    loss = with_loss(load("stable-diffusion-1.5-unet", symbolic=True, **options), squared("b c h w"))
    step = cg.backward(loss)
    inputs = [torch.zeros(3, 3, 13, 13), torch.zeros(3, dtype=torch.int64), *([torch.zeros(3, 13, 11)] if text else [])]
    assert cg.matmul_flops(step, B=3, R=13, **sizes) == counted_step(build().train(), *inputs)
