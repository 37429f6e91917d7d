"""Traces of torchvision and timm models, where installed: FLOPs by torch's counter, and parameters."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import costgraph as cg
from costgraph.torch import trace


def assert_flops_match_counter(model, batch, *, train=False):
    """Trace with an open batch and compare with real runs of two other batches; the counter miscounts grouped
    gradients."""

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x).square().mean()

    module = Scored().train(train)
    g = trace(module, torch.zeros(batch, 3, 64, 64), dims=[("B", None, None, None)], train=train)
    assert cg.param_count(g) == sum(p.numel() for p in model.parameters())
    for size in (batch + 1, 7):
        with FlopCounterMode(display=False) as counter:
            loss = module(torch.zeros(size, 3, 64, 64))
            if train:
                loss.backward()
        assert cg.matmul_flops(g, count="full", B=size) == counter.get_total_flops()


@pytest.mark.parametrize("name", ["alexnet", "resnet18", "mobilenet_v2", "densenet121", "vgg11", "efficientnet_b0"])
def test_torchvision_forward_flops_match_the_counter(name):
    models = pytest.importorskip("torchvision.models")
    assert_flops_match_counter(getattr(models, name)(weights=None).eval(), 2)


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn"])
def test_torchvision_step_flops_match_the_counter(name):
    models = pytest.importorskip("torchvision.models")
    assert_flops_match_counter(getattr(models, name)(weights=None), 2, train=True)


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mixer_s32_224"])
def test_timm_forward_flops_match_the_counter(name):
    timm = pytest.importorskip("timm")
    options = {"img_size": 64} if name.startswith("mixer") else {}
    assert_flops_match_counter(timm.create_model(name, pretrained=False, **options).eval(), 2)
