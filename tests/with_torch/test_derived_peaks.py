"""Derived backward passes have the same peaks as traced steps and the allocator, for every gradient and layout."""

from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn import functional
from traced import real_peak

import costgraph as cg
from costgraph.ops.functions import ATEN, FUNCTIONS
from costgraph.torch import trace
from costgraph.torch.lowering import lower
from costgraph.torch.tracing.translations import elementwise

#: Programs by the name of the call whose gradient has a formula.
FORMULAS = {
    **{name: getattr(torch, name) for name in (
        "acos", "acosh", "asinh", "atanh", "cosh", "erfinv", "frac", "nan_to_num", "sinc", "sinh", "asin", "atan",
        "erfc", "exp2", "log10", "log2", "logit", "tan", "ceil", "trunc",
    )},
    "copysign": lambda x: torch.copysign(x, x.detach() + 1),
    "fmax": lambda x: torch.fmax(x, x.cos()), "fmin": lambda x: torch.fmin(x, x.cos()),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.cos()),
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
#: Other calls, whose gradients torch decomposes, or computes by kernels that copy first.
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
#: Functions of several tensors, and their number: each is constant in turn, and all others are.
SEVERAL = {
    "atan2": (torch.atan2, 2), "hypot": (torch.hypot, 2), "logaddexp": (torch.logaddexp, 2), "mul": (torch.mul, 2),
    "div": (torch.div, 2), "xlogy": (lambda x, y: torch.xlogy(x, y.abs() + 1), 2), "maximum": (torch.maximum, 2),
    "copysign of": (torch.copysign, 2), "pow": (lambda x, y: torch.pow(x.exp(), y), 2), "lerp of": (torch.lerp, 3),
    "addcmul of": (torch.addcmul, 3), "addcdiv of": (torch.addcdiv, 3), "clamp": (torch.clamp, 3),
    "where": (lambda x, y: torch.where(x > 0, x, y), 2), "clamp_min": (lambda x, y: torch.clamp(x, min=y), 2),
    "clamp_max": (lambda x, y: torch.clamp(x, max=y), 2), "fmod of": (torch.fmod, 2), "sub": (torch.sub, 2),
    "remainder of": (torch.remainder, 2), "fmax": (torch.fmax, 2), "logaddexp2": (torch.logaddexp2, 2),
    "complex": (lambda x, y: torch.complex(x, y).abs(), 2), "polar": (lambda x, y: torch.polar(x, y).abs(), 2),
}  # fmt: skip


def partly_constant(function, constant, count):
    """Apply a function to tensors, some of them constant: the others are computed from the input."""

    def applied(x):
        others = [x, x.cos(), x.exp()]
        return function(*(torch.ones(x.shape) if i in constant else others[i] for i in range(count)))

    return applied


CONSTANT = {
    f"{name}, operand {' and '.join(map(str, constant))} constant": partly_constant(function, constant, count)
    for name, (function, count) in SEVERAL.items()
    for constant in sorted(set(combinations(range(count), 1)) | set(combinations(range(count), count - 1)))
}
#: Matmuls, for which libraries copy expanded factors, and identities without an op.
PRODUCTS = {
    "nothing": lambda x: x,
    "by the transpose": lambda x: x @ x.mT,
    "by a row": lambda x: x.mT @ x[:, :1].expand(-1, x.shape[1], -1),
    "by a column": lambda x: x[..., :1].expand(-1, -1, 16) @ x.mT,
    "matrix by a row": lambda x: x[0].mT @ x[0, :1].expand(x.shape[1], -1),
    "matrix by a column": lambda x: x[0, :, :1].expand(-1, 16) @ x[0].mT,
    "einsum": lambda x: torch.einsum("bsi,bti->bst", x, x.cos()),
}
ARITHMETIC = {"plus": torch.add, "minus": torch.sub, "times": torch.mul, "over": torch.div}
#: Complex numbers, computed from x and from its cosine, and with a scalar.
COMPLEX = {
    f"{'real' if real else 'complex'} {name} {number}": lambda x, f=f, number=number, real=real: f(
        x if real else torch.complex(x, x.cos()), number
    ).abs()
    for name, f in ARITHMETIC.items()
    for number, real in ((2.5, False), (2j, False), (2j, True))
} | {
    "complex to the power 2": lambda x: (torch.complex(x, x.cos()) ** 2).abs(),
    "number over complex": lambda x: (2 / torch.complex(x, x.cos())).abs(),
    "exp of complex": lambda x: torch.complex(x, x.cos()).exp().abs(),
}
#: Reductions, losses, norms and windows, whose gradients are separate kernels or several steps.
KERNELS = {
    "prod": lambda x: x.prod(-1), "prod of all": torch.prod, "max": torch.max, "min": lambda x: x.min() * x,
    "max along": lambda x: x.max(1).values, "argmax": lambda x: x.max(-1, keepdim=True)[0] - x,
    "sort": lambda x: x.sort(1)[0],
    **{
        f"norm {n}": lambda x, n=n: torch.linalg.vector_norm(x, n, dim=1)
        for n in (1, 2, 3, 1.5, 0.5, torch.inf, -torch.inf)
    },
    "norm of all": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "complex": lambda x: torch.complex(x, x.cos()).abs(), "polar": lambda x: torch.polar(x, x.cos()).abs(),
    "conjugate": lambda x: (torch.complex(x, x.cos()).conj() * torch.complex(x, x.sin())).real,
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: functional.group_norm(x, 1),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "gelu": functional.gelu, "tanh gelu": lambda x: functional.gelu(x, approximate="tanh"),
    **{
        f"{f.__name__} {n}": lambda x, f=f, n=n: f(x.sigmoid(), torch.ones(x.shape), reduction=n)
        for f in (
            functional.soft_margin_loss, functional.binary_cross_entropy, functional.huber_loss,
            functional.binary_cross_entropy_with_logits,
        )
        for n in ("none", "mean")
    },
    "weighted entropy": lambda x: functional.binary_cross_entropy_with_logits(
        x, torch.ones(x.shape), pos_weight=torch.ones(x.shape[-1])
    ),
    "multilabel_soft_margin_loss": lambda x: functional.multilabel_soft_margin_loss(x, torch.ones(x.shape)),
    **{
        f"nll_loss {n}": lambda x, n=n: functional.nll_loss(
            x, torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64), reduction=n
        )
        for n in ("none", "mean")
    },
    **{
        name: lambda x, name=name: getattr(functional, name)(x if name.endswith("1d") else x[None], 2)
        for name in (
            "avg_pool1d", "avg_pool2d", "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
            "adaptive_max_pool2d",
        )
    },
    "overlapping windows": lambda x: functional.avg_pool2d(x[None], 3, 1, 1),
    **{
        f"{mode} padding": lambda x, mode=mode: functional.pad(x[None], (1, 1, 1, 1), mode=mode)
        for mode in ("reflect", "replicate", "circular")
    },
}  # fmt: skip
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT,
    "sliced": lambda x: x[:, 1:, 2:14],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
}
#: Consumers of a function's result, by their gradient: an expanded scalar, or a full tensor in the memory order of the
#: result or in another one.
ENDS = {
    "sum": lambda y: y.sum(), "product": lambda y: (y * y.detach().cos()).sum(),
    "transposed product": lambda y: (y.transpose(1, -1).contiguous() * 2.0).sum() if y.ndim > 1 else y.sum(),
}  # fmt: skip
#: Functions that a trace decomposes as torch does without data, or for tensor subclasses.
GENERAL = {"prod", "prod of all", "max", "min", "weighted entropy"}
PROGRAMS = FORMULAS | OTHERS | CONSTANT | COMPLEX | PRODUCTS | KERNELS


class Applied(nn.Module):
    def __init__(self, function, layout, end):
        super().__init__()
        self.layer, self.function, self.layout, self.end = nn.Linear(16, 16), function, layout, end

    def forward(self, x):
        return self.end(self.function(self.layout(self.layer(x))).float())


def test_every_formula_has_a_program():
    stated = {name.strip("_") for name, f in ATEN.items() if f.grad is not None and f != FUNCTIONS.get(f.name)}
    assert stated
    assert FORMULAS.keys() >= {*stated, *elementwise._PARAMETRIC_GRADIENTS}


#: Deviations documented in docs/concepts/limits.md: autograd's explicit zeros, a mask cast on CPUs, a fixed slope.
STATED = {"ceil", "trunc", "floor_divide", "copysign", "nan_to_num", "prelu_kernel"}
#: Functions with jointly computed gradients in torch, or with complex operands.
JOINT = {"atan2, operand 1 constant", "clamp, operand 0 constant", "complex times 2j"}
QUICK = JOINT | {
    "matrix by a row", "addcdiv", "amin", "fft", "rfft", "logsigmoid", "xlogy", "hardtanh", "sinc", "prod", "polar",
    "norm inf", "nll_loss mean", "layer norm", "max_pool2d", "soft_margin_loss mean",
}  # fmt: skip
#: Channels last in memory: a CPU's kernel copies the operand's gradient into another memory format.
CHANNELS_LAST = {("avg_pool1d", "transposed", "sum")}


def marks(*case):
    quick = case in CHANNELS_LAST or (case[0] in QUICK and case[1] == "dense" and case[2] != "transposed product")
    return [] if quick else [pytest.mark.long]


CASES = [
    pytest.param(name, layout, end, marks=marks(name, layout, end))
    for name in PROGRAMS
    if name not in STATED
    for layout in LAYOUTS
    for end in (ENDS if name in KERNELS | PRODUCTS else ["sum"])
    if layout == "dense" or (end != "transposed product" and name not in CONSTANT | COMPLEX | PRODUCTS)
]


@pytest.mark.parametrize(("name", "layout", "end"), CASES)
def test_derived_backward_peak_equals_trace_and_allocator(name, layout, end):
    net = Applied(PROGRAMS[name], LAYOUTS[layout], ENDS[end])
    batch, length = 5, 26
    forward, step = (
        trace(net, torch.zeros(3, 13, 16), dims=[("B", "S", None)], train=train) for train in (False, True)
    )
    derived, traced = (float(cg.peak_memory(g, B=batch, S=length)) for g in (cg.backward(forward), step))
    x = torch.randn(batch, length, 16)
    real = real_peak(lambda: (net(x).backward(), net.zero_grad()), *net.parameters(), x)
    assert derived == pytest.approx(real, rel=0.01, abs=ROUNDING)
    if name not in GENERAL:
        assert derived == pytest.approx(traced, rel=0.01)


#: Bytes for the RNG states, seeds and scalars in a small step.
ROUNDING = 256


#: A zero gradient takes no op.
NO_GRADIENT = {"copysign of, operand 0 constant"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in JOINT else [pytest.mark.long])
        for name in (*CONSTANT, *COMPLEX)
        if name not in NO_GRADIENT
    ],
)
def test_derived_gradients_of_several_operands_equal_autograd(name):
    torch.manual_seed(0)
    net, x = Applied(PROGRAMS[name], LAYOUTS["dense"], ENDS["product"]), torch.randn(2, 5, 16)
    graph = cg.backward(trace(net, torch.zeros(3, 13, 16), dims=[("B", "S", None)]))
    with graph:
        graph.outputs.extend(graph.gradients.values())
    module = lower(graph, B=2, S=5)
    module.load_state_dict(net.state_dict())
    net(x).backward()
    for gradient, parameter in zip(module(x)[1:], graph.gradients, strict=True):
        expected = net.get_parameter(parameter.name.replace("/", ".")).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)


#: Kernels that copy non-dense operands.
COPYING = {
    **{k: f for k, f in KERNELS.items() if k in ("reflect padding", "replicate padding", "adaptive_max_pool2d", "max")},
    "binary_cross_entropy_with_logits none": KERNELS["binary_cross_entropy_with_logits none"],
    "logsigmoid": functional.logsigmoid, "pixel_unshuffle": lambda x: functional.pixel_unshuffle(x[None], 1),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", COPYING)
def test_forward_peak_equals_the_allocator(name, layout):
    net, x = Applied(COPYING[name], LAYOUTS[layout], ENDS["sum"]), torch.randn(5, 26, 16)
    graph = trace(net, torch.zeros(3, 13, 16), dims=[("B", "S", None)])
    with torch.no_grad():
        real = real_peak(lambda: net(x), *net.parameters(), x)
    assert float(cg.peak_memory(graph, B=5, S=26)) == pytest.approx(real, rel=0.01, abs=ROUNDING)
