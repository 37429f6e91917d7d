"""Gradients of complex numbers and Fourier transforms in traces: the library's against autograd's."""

import pytest
import torch
from test_trace_gradients import Declared
from test_trace_pulled import Called, pulled
from torch import fft, nn
from transformers_classes import MORE
from transformers_suite import tiny

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.ir.graph import apply as graph_apply
from costgraph.ops.fourier import (
    Fourier,
    ViewAs,
)
from costgraph.torch import lower, trace


class Program(nn.Module):
    """A function on inputs and weights."""

    def __init__(self, function, *weights):
        super().__init__()
        torch.manual_seed(7)
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(w) + 0.5) for w in weights])

    def forward(self, x):
        return self.function(x, *self.weights)


def turned(x, w):
    """Like `apply_rotary_emb` of DeepSeek-V2: each pair is a complex number."""
    turns = torch.polar(torch.ones(3, 2), torch.arange(6.0).view(3, 2))
    z = torch.view_as_complex((x * w).float().reshape(5, 3, 2, 2))
    return torch.view_as_real(z * turns).flatten(2) ** 3


def filtered(x, w):
    """Like FNO: low frequencies times matrices, the others dropped."""
    low = fft.rfft(x)[..., :4]
    return fft.irfft(torch.einsum("bix,iox->box", low, torch.view_as_complex(w)), n=x.shape[-1]) ** 3


#: Inputs, weight shapes, and functions on both.
CASES = {
    "pairs": ((5, 3, 4), [(4,)], [turned]),
    "spectra": ((5, 7, 8), [(8,)], [
        lambda x, w: fft.fft(x * w).real ** 3,
        lambda x, w: fft.fft(x * w, dim=1, norm="ortho").imag ** 3,
        lambda x, w: fft.fftn(x * w, dim=(1, 2)).real.sin(),
        lambda x, w: fft.fft2(x * w).abs(),
        lambda x, w: fft.ifft(fft.fft(x) * fft.fft(w)).real ** 3,
    ]),
    "halves": ((5, 4, 11), [(11,)], [
        lambda x, w: fft.rfft(x * w, norm="ortho").abs().square(),
        lambda x, w: fft.rfft2(x * w).abs(),
        lambda x, w: fft.irfft(fft.rfft(x, n=22) * fft.rfft(w, n=22), n=22)[..., :11] ** 3,
        lambda x, w: fft.irfft2(fft.rfft2(x * w) * 1.5, s=(4, 11), norm="forward") ** 3,
    ]),
    "filters": ((2, 3, 11), [(3, 5, 4, 2)], [filtered]),
    "arithmetic": ((5, 7), [(5, 7)], [
        lambda x, w: (fft.rfft(x * w).conj() * fft.rfft(x).exp()).real,
        lambda x, w: (fft.rfft(x * w) / (fft.rfft(x + w) + 9)).abs(),
        lambda x, w: (fft.rfft(w) - 2 * fft.rfft(x * w)).reciprocal().real,
        lambda x, w: ((fft.rfft(x * w) ** 2).sqrt() + (fft.rfft(w) + 9).log()).imag.sin(),
        lambda x, w: (w[:, :4] * fft.rfft(x)).abs(),
    ]),
    "sums": ((5, 7), [(7,)], [
        lambda x, w: (fft.fft(x * w) @ fft.fft(x).mH).abs(),
        lambda x, w: fft.fft(x * w).sum(0).abs(),
        lambda x, w: fft.fft(x * w).mean().abs(), lambda x, w: (fft.fft(x * w).flip(0) * fft.fft(x)).abs(),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_complex_gradients_equal_autograd_in_value_and_cost(name):
    sizes, weights, functions = CASES[name]
    net = Program(lambda x, *w: sum(f(x, *w).mean() for f in functions), *weights)
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(3))
    g, step = trace(net, x), trace(net, x, train=True)
    derived = pulled(g, net, x)
    assert cg.flops(derived) == cg.flops(step)
    assert cg.matmul_flops(derived) == cg.matmul_flops(step)
    stated = {op.call.name for op in g.walk() if op.kind.name == "custom_call"}
    assert stated <= {"arange"}
    if not stated:  # run the declared ops in place of the recorded calls
        with torch.no_grad():
            low = lower(Declared().run(g))
            low.load_state_dict(net.state_dict(), strict=False)
            torch.testing.assert_close(low(x), net(x))


def test_backward_refuses_foreign_complex_calls():
    net = Program(lambda x, w: fft.rfft(x * w).diagonal().abs().sum(), (7,))
    with pytest.raises(cg.UnsupportedError, match=r"backward: 'diagonal' .* is a recorded call of diagonal.default"):
        cg.backward(trace(net, torch.rand(5, 7)))


def test_complex_sign_has_no_gradient_rule():
    net = Program(lambda x, w: fft.rfft(x * w).sgn().real.sum(), (7,))
    with pytest.raises(cg.UnsupportedError, match="backward of 'sgn': sign of complex numbers, expected real ones"):
        cg.backward(trace(net, torch.rand(5, 7)))


def test_modulus_and_angle_have_gradients():
    """The library differentiates the real and imaginary parts; torch computes with complex numbers."""
    x = torch.rand(5, 7)
    net = Program(
        lambda x, a, b: (torch.polar(a, x * b) * torch.complex(x, b)).cumsum(0).real.sin().mean(), (5, 7), (5, 7)
    )
    pulled(trace(net, x), net, x)
    assert cg.flops(trace(Called(lambda x: torch.polar(x, x)), x)) == 35 * 4  # two products, a cosine and a sine


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ViewAs(view="complex"), "as complex numbers, which needs a last axis of size 2"),
        (ViewAs(view="real"), "real view of .*, which needs complex numbers"),
        (Fourier(axes=(2,)), r"axes \(2,\) of"),
        (Fourier(axes=(1, 1)), r"axes \(1, 1\) of a transform"),
        (Fourier(axes=(1,), inverse=True), "inverse=True of .*True for complex to real, False for real to complex"),
        (Fourier(axes=(1,), last=poly(5)), "half 5 of 7 points"),
    ],
)
def test_mismatched_complex_operands_are_refused(kind, text):
    with cg.Graph("g") as g, pytest.raises(cg.ShapeError, match=text):
        graph_apply(kind, [g.input("x", (3, 7))], "made")


class Modes(nn.Module):
    """FNO's layer in 2D: low frequencies of both ends times complex weights, written into zeros."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.low, self.high = (nn.Parameter(torch.randn(3, 4, 2, 3, dtype=torch.complex64)) for _ in range(2))

    def forward(self, x):
        spectrum, out = fft.rfft2(x), torch.zeros(x.shape[0], 4, 8, 6, dtype=torch.complex64)
        out[:, :, :2, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :3], self.low)
        out[:, :, -2:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -2:, :3], self.high)
        return (fft.irfft2(out, s=(8, 11)) ** 3).mean()


def test_fno_layer_with_complex_weights_is_trained():
    net, x = Modes(), torch.rand(5, 3, 8, 11)
    g, step = trace(net, x), trace(net, x, train=True)
    seen = trace(net, x, train=True, optimizer=lambda p: torch.optim.Adam(p, foreach=True))
    derived = pulled(g, net, x)
    # weight gradients only, x is data
    assert cg.matmul_flops(derived) == cg.matmul_flops(step) == 2 * 2 * 8 * (5 * 3 * 4 * 6)
    assert cg.flops(derived) == cg.flops(step)
    trained = cg.training_step(g, optimizer=cg.Adam())
    assert cg.state_bytes(trained).state == 2 * 8 * 2 * 72
    update = [cg.costs(s).filter(phase="optimizer").total() for s in (trained, seen)]
    assert 0 <= update[1].pointwise - update[0].pointwise <= 2  # the step counter
    assert update[0].transcendental == update[1].transcendental


class Loss(nn.Module):
    """A transformers model with a next-token loss."""

    def __init__(self, name):
        super().__init__()
        import transformers

        torch.manual_seed(7)
        cls = getattr(transformers, name)
        self.model = cls(tiny(cls.config_class, {**MORE.get(name, {}), "attn_implementation": "eager"})).eval()
        for module in self.modules():
            module._non_persistent_buffers_set.clear()  # rotary angles are numbers of a run as well

    def forward(self, x):
        logits = self.model(input_ids=x, return_dict=True).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


@pytest.mark.long
@pytest.mark.parametrize("name", ["FNetForMaskedLM", "DeepseekV2ForCausalLM", "Llama4ForCausalLM"])
def test_complex_models_have_autograds_training_costs(name):
    """Compares the derived and the traced step; test_transformers_suite.py compares traced steps with real peaks."""
    net, x = Loss(name), torch.randint(3, 101, (2, 13))
    g, step = (trace(net, x, dims=[("B", "S")], train=train) for train in (False, True))
    derived = cg.backward(g)
    assert cg.flops(derived) == cg.flops(step)
    assert cg.matmul_flops(derived) == cg.matmul_flops(step)
    assert abs(cg.peak_memory(derived, B=3, S=17) - cg.peak_memory(step, B=3, S=17)) <= 8
    state = cg.state_bytes(cg.training_step(g, optimizer=cg.AdamW()))
    assert state.state == 2 * state.gradients
    if name.startswith("Llama"):  # torch lacks some gradients, or an fp32 kernel, of the others
        pulled(trace(net, x), net, x)


def test_detached_complex_parameter_gets_no_gradient():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(7, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(x * self.weight * self.weight.detach()).square().sum()

    net, x = Turned(), torch.rand(5, 7, dtype=torch.complex64)
    assert cg.flops(cg.backward(trace(net, x))) == cg.flops(trace(net, x, train=True))
