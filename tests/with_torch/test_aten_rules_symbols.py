"""Symbolic rules: a traced graph bound to sizes gives the costs of runs at those sizes."""

import pytest

pytest.importorskip("torch")

import torch
from aten_calls import Calls
from torch import nn
from torch.nn import functional

import costgraph as cg
from costgraph.torch import trace

KINDS = ("matmul", "pointwise", "transcendental")


class Loss(nn.Module):
    """A module, and the mean of its first output."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        outputs = self.body(x)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).square().mean()


class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(-2)


def image(*layers):
    return nn.Sequential(*layers), ("B", None, "N", None), (2, 4, 16, 8), (3, 4, 24, 8)


def rows(*layers):
    return nn.Sequential(*layers), ("B", "S", None), (2, 7, 8), (3, 11, 8)


PROGRAMS = {
    "mlp": rows(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)),
    "attention": rows(nn.Linear(8, 8), Attention(), nn.Dropout(0.1), nn.Softmax(-1)),
    "norms": rows(nn.RMSNorm(8), nn.LogSoftmax(-1), nn.SiLU()),
    "convolutions": image(nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
    "transposed": image(nn.ConvTranspose2d(4, 8, 2, stride=2), nn.GroupNorm(2, 8), nn.AvgPool2d(2)),
    "shuffled": image(nn.PixelUnshuffle(2), nn.Hardswish(), nn.Conv2d(16, 4, 1), nn.ELU()),
    "pooled": image(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d((1, 4))),
    "padded": image(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bound_trace_costs_equal_those_of_runs(name):
    body, axes, *shapes = PROGRAMS[name]
    module = Loss(body)
    graph = trace(module, torch.rand(shapes[0]), dims=[axes], train=True)
    for shape in shapes:
        sizes = {axis: n for axis, n in zip(axes, shape, strict=True) if axis is not None}
        total = cg.costs(graph, **sizes).total()
        with Calls() as calls:
            module(torch.rand(shape)).backward()
        module.zero_grad()
        derived = {kind: getattr(total, kind) for kind in KINDS}
        assert derived == {kind: calls.total(kind) for kind in KINDS}, sizes
