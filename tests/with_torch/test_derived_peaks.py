"""Peaks of derived backward passes are those of a traced step, for every formula of a gradient and every layout."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import costgraph as cg
from costgraph.torch import trace
from costgraph.torch.tracing.translations import elementwise

#: Programs by the name of the call whose gradient has a formula here.
FORMULAS = {
    **{name: getattr(torch, name) for name in (
        "acos", "acosh", "asinh", "atanh", "cosh", "erfinv", "frac", "nan_to_num", "sinc", "sinh", "asin", "atan",
        "erfc", "exp2", "log10", "log2", "logit", "tan", "ceil", "trunc",
    )},
    "copysign": lambda x: torch.copysign(x, x.detach() + 1),
    "hypot": lambda x: torch.hypot(x, x.cos()), "logaddexp": lambda x: torch.logaddexp(x, x.cos()),
    "special_entr": lambda x: torch.special.entr(x.exp()), "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
    "atan2": lambda x: torch.atan2(x, x.cos()), "remainder": lambda x: torch.remainder(x, 0.7),
    "fmod": lambda x: torch.fmod(x, 0.7), "floor_divide": lambda x: x * torch.floor_divide(x, 0.7),
    "prelu_kernel": lambda x: functional.prelu(x.flatten(0, 1), nn.Parameter(torch.zeros(1))),
    "celu": lambda x: functional.celu(x, 0.5), "elu": lambda x: functional.elu(x, 0.5),
    "hardshrink": functional.hardshrink, "hardtanh": lambda x: functional.hardtanh(x, -0.2, 0.3),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.2), "softplus": lambda x: functional.softplus(x, 3.0, 0.2),
    "softshrink": functional.softshrink, "threshold": lambda x: functional.threshold(x, 0.1, 0.2),
}  # fmt: skip
#: Others whose gradients torch computes in steps, or by kernels that copy first.
OTHERS = {
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs() + 1),
    "addcdiv by a number": lambda x: torch.addcdiv(x, x.cos(), x.abs() + 1, value=2),
    "addcmul": lambda x: torch.addcmul(x, x[:, :1].sin(), x[:, :, :1].cos(), value=0.3),
    "lerp": lambda x: torch.lerp(x.sin(), x.cos(), x.exp()), "powers of a number": lambda x: 2**x,
    "a power below 0": lambda x: x**-1, "powers": lambda x: x.exp() ** x.cos(),
    "quotient": lambda x: x[:, :, :1] / x.exp(), "logsigmoid": functional.logsigmoid, "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: x.amin(-1, keepdim=True) * x, "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "rfft": lambda x: torch.fft.rfft(x, dim=1).abs(), "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1)),
    "fft2": lambda x: torch.fft.fft2(x).abs(), "softmax": lambda x: x.softmax(-1), "cumsum": lambda x: x.cumsum(1),
    "huber": lambda x: functional.huber_loss(x, x.detach() + 1), "selu": functional.selu,
}  # fmt: skip
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT,
    "sliced": lambda x: x[:, 1:, 2:14],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
}


class Applied(nn.Module):
    def __init__(self, function, layout):
        super().__init__()
        self.layer, self.function, self.layout = nn.Linear(16, 16), function, layout

    def forward(self, x):
        return self.function(self.layout(self.layer(x))).float().sum()


def test_every_formula_has_a_program():
    assert FORMULAS.keys() >= {*elementwise._GRADIENTS, *elementwise._SLOPES}


#: Deviations that docs/deviations.md states: zeros that autograd hands on, a mask that a CPU casts, a fixed slope.
STATED = {"ceil", "trunc", "floor_divide", "copysign", "nan_to_num", "prelu_kernel"}
QUICK = {"addcdiv", "amin", "fft", "rfft", "logsigmoid", "xlogy", "hardtanh", "sinc"}
CASES = [
    pytest.param(name, layout, marks=[] if name in QUICK and layout == "dense" else pytest.mark.long)
    for name in [*FORMULAS, *OTHERS]
    if name not in STATED
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_derived_backward_pass_has_the_peak_of_a_traced_step(name, layout):
    net = Applied((FORMULAS | OTHERS)[name], LAYOUTS[layout])
    x, sizes = torch.zeros(3, 13, 16), {"B": 5, "S": 26}
    forward, step = (trace(net, x, dims=[("B", "S", None)], train=train) for train in (False, True))
    derived, traced = (float(cg.peak_memory(g, **sizes)) for g in (cg.backward(forward), step))
    assert derived == pytest.approx(traced, rel=0.01)
