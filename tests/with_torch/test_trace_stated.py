"""Paired forward and backward kernels, resampling and adaptive pools: traced forward, and differentiated."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import costgraph as cg
from costgraph.torch import lower, trace


class Net(nn.Module):
    """Sums functions applied to a layer's output."""

    def __init__(self, functions):
        super().__init__()
        self.before, self.functions = nn.Conv2d(3, 5, 1), functions

    def forward(self, x):
        x = self.before(x)
        return sum(f(x).square().mean() for f in self.functions)


def resampled(**options):
    return lambda x: functional.interpolate(x, **options)


CASES = {
    "resampled": [
        resampled(scale_factor=2, mode="bilinear"), resampled(size=(11, 13), mode="bilinear", align_corners=True),
        resampled(scale_factor=0.5, mode="bilinear"), resampled(scale_factor=2, mode="bicubic"),
        resampled(size=(11, 13)), resampled(scale_factor=2, mode="nearest-exact"),
        lambda x: resampled(scale_factor=2, mode="bilinear")(x.to(memory_format=torch.channels_last)),
    ],
    "parts and places": [
        lambda x: functional.adaptive_avg_pool2d(x, (7, 3)), lambda x: functional.adaptive_max_pool2d(x, 4),
        lambda x: functional.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derived_kernel_gradients_cost_the_same_as_traced(name):
    torch.manual_seed(3)
    net, x, dims = Net(CASES[name]), torch.randn(2, 3, 8, 10), [("B", None, "H", "W")]
    g, step = trace(net, x, dims=dims), trace(net, x, dims=dims, train=True)
    for graph in g, step:
        assert not [op.name for op in graph.walk() if op.kind.name == "custom_call"]
    derived = cg.backward(g)
    sizes = {"B": 3, "H": 13, "W": 17}
    assert cg.flops(derived, **sizes) == cg.flops(step, **sizes)
    assert [t.name for t in derived.gradients] == ["before/weight", "before/bias"]
    half = cg.apply_precision(g, "bf16")
    assert cg.flops(half, **sizes) == cg.flops(g, **sizes)
    assert cg.param_bytes(half) * 2 == cg.param_bytes(g)
    low = lower(g, B=2, H=8, W=10)
    low.load_state_dict(net.state_dict())
    torch.testing.assert_close(low(x), net(x))
