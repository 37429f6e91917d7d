"""Pooling, resampling, losses and scans: FLOPs against a walk over the touched elements."""

from math import ceil, floor

import pytest

pytest.importorskip("torch")

import sympy
import torch
from aten_calls import Calls, calls_of, number, spec
from torch.nn import functional

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.algebra.symbols import symbol
from costgraph.errors import UnsupportedError
from costgraph.torch.tracing.call import Call
from costgraph.torch.tracing.rules import counts_of


def rand(*sizes):
    return torch.rand(sizes, requires_grad=True)


def flops_of(program, name):
    """Return the FLOPs of an op's single call, without matmuls and transcendentals."""
    return number(calls_of(program).of(name).counts.pointwise)


# -- pooling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
def test_pooling_flops_equal_window_by_window_count(window, stride, padding):
    n = 11
    places = len(range(0, n + 2 * padding - window + 1, stride))
    elements = 2 * 3 * places**2
    x = rand(2, 3, n, n)
    shape = {"kernel_size": window, "stride": stride, "padding": padding}
    for name in ("max_pool2d", "avg_pool2d"):
        pooling = getattr(functional, name)
        calls = calls_of(lambda pooling=pooling: pooling(x, **shape).sum().backward())
        forward, backward = (s for s in calls.seen if "pool" in s.call.name)
        assert number(forward.counts.pointwise) == elements * window**2
        # a maximum passes its gradient to one element, a mean to all elements
        assert number(backward.counts.pointwise) == elements * (1 if name == "max_pool2d" else window**2)


def reached(n, k):
    """Count the elements of all adaptive windows that divide n elements into k parts, as torch's kernel visits them."""
    return sum(ceil((i + 1) * n / k) - floor(i * n / k) for i in range(k))


@pytest.mark.parametrize(("n", "k"), [(12, 4), (11, 4), (7, 7), (5, 7), (13, 1), (12, 8)])
def test_adaptive_pooling_counts_its_windows(n, k):
    x = rand(2, 3, n, 11)
    elements = 2 * 3 * reached(n, k) * reached(11, 5)
    calls = calls_of(lambda: functional.adaptive_avg_pool2d(x, (k, 5)).sum().backward())
    assert number(calls.of("_adaptive_avg_pool2d").counts.pointwise) == elements
    assert number(calls.of("_adaptive_avg_pool2d_backward").counts.pointwise) == elements


@pytest.mark.parametrize("n", [7, 12, 14, 15])
def test_adaptive_pooling_counts_windows_of_an_open_axis(n):
    x, y = spec(2, 3, poly(symbol("N")), 8), spec(2, 3, 5, 4)
    counts = counts_of(Call("_adaptive_avg_pool2d", "", False, {"self": x, "output_size": (5, 4)}, (y,)))
    assert counts.pointwise.bind({"N": poly(n)}) == 2 * 3 * reached(n, 5) * 8


def test_adaptive_pooling_with_symbolic_output_size_is_refused():
    n, k = map(poly, cg.dims("N K"))
    with pytest.raises(UnsupportedError) as error:
        counts_of(Call("_adaptive_avg_pool2d", "default", False, {"self": spec(1, 1, n, 8)}, (spec(1, 1, k, 8),)))
    assert str(error.value) == (
        "aten::_adaptive_avg_pool2d.default: the size of K windows over N elements is unknown; expected a "
        "constant number, or one that divides N"
    )


# -- resampling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "taps", "axes"), [("linear", 2, 1), ("bilinear", 2, 2), ("trilinear", 2, 3), ("bicubic", 4, 2)]
)
def test_interpolation_flops_are_counted_axis_by_axis(mode, taps, axes):
    x = rand(2, 3, *(4,) * axes)
    elements = 2 * 3 * 8**axes
    calls = calls_of(lambda: functional.interpolate(x, scale_factor=2, mode=mode).sum().backward())
    forward, backward = (s for s in calls.seen if "upsample" in s.call.name)
    one = 0
    for axis in range(axes):  # interpolations along this axis per element
        one += taps ** (axes - 1 - axis) * (taps + taps - 1)  # products and their sums
    assert number(forward.counts.pointwise) == elements * one
    assert number(backward.counts.pointwise) == elements * 2 * taps**axes


def test_nearest_interpolation_is_a_copy():
    x = rand(2, 3, 4, 4)
    assert flops_of(lambda: functional.interpolate(x, scale_factor=2), "upsample_nearest2d") == 0
    small = calls_of(lambda: functional.interpolate(x, scale_factor=0.5)).of("upsample_nearest2d").counts
    assert [number(n) for n in small.reads] == [4 * 2 * 3 * 2 * 2]  # skipped elements are not read


def test_antialiased_downsampling_uses_wider_windows():
    x = rand(1, 1, 12, 12)
    # a window twice the scale on either side of the centre: at most 2 * ceil(2) + 1 neighbours
    across, down = 12 * 6, 6 * 6
    program = lambda: functional.interpolate(x, size=6, mode="bilinear", antialias=True)  # noqa: E731  # one of two places
    assert flops_of(program, "_upsample_bilinear2d_aa") == 2 * 5 * (across + down)


# -- losses, against their decomposition -------------------------------------------------------------------------------

STEPS = {
    "mse_loss": lambda x, t: ((x - t) ** 2).mean(),
    "l1_loss": lambda x, t: (x - t).abs().mean(),
}


@pytest.mark.parametrize("name", STEPS)
def test_loss_costs_the_same_as_its_decomposition(name):
    x, t = torch.rand(3, 5), torch.rand(3, 5)
    whole, steps = (calls_of(lambda f=f: f(x, t)) for f in (getattr(functional, name), STEPS[name]))
    assert [whole.total(k) for k in ("pointwise", "transcendental")] == [
        steps.total(k) for k in ("pointwise", "transcendental")
    ]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_without_reduction_has_no_sum(reduction):
    x, t = torch.rand(3, 5), torch.rand(3, 5)
    flops = calls_of(lambda: functional.mse_loss(x, t, reduction=reduction)).total("pointwise")
    assert flops == 15 * (2 if reduction == "none" else 3)


# -- reductions ----------------------------------------------------------------------------------------------------

REDUCED = {
    "sum": (lambda x: x.sum(1), 15, 0),
    "of an expanded tensor": (lambda x: x[:1].expand(7, 5).sum(), 35, 0),
    "mean": (lambda x: x.mean(), 15, 0),
    "amax": (lambda x: x.amax(1), 15, 0),
    "largest and where": (lambda x: x.max(1), 15, 0),
    "the larger of two": (lambda x: torch.max(x, x), 15, 0),
    "smallest and largest": (lambda x: x.aminmax(), 30, 0),
    "variance": (lambda x: x.var(1), 4 * 15, 0),
    "deviation": (lambda x: x.std(1), 4 * 15, 3),
    "logarithm of a sum of exponentials": (lambda x: x.logsumexp(1), 3 * 15 + 3, 15 + 3),
    "norm": (lambda x: x.norm(), 2 * 15, 1),
    "norm of rows": (lambda x: torch.linalg.vector_norm(x, dim=1), 2 * 15, 3),
    "1-norm": (lambda x: torch.linalg.vector_norm(x, 1), 2 * 15, 0),
    "largest magnitude": (lambda x: torch.linalg.vector_norm(x, float("inf")), 2 * 15, 0),
    "3-norm": (lambda x: torch.linalg.vector_norm(x, 3), 15 * 3 + 1, 15 * 2 + 2),
    "cumulative sum": (lambda x: x.cumsum(1), 15, 0),
    "trace": (lambda x: x.trace(), 3, 0),
    "the largest few": (lambda x: x.topk(2), 15, 0),
}


@pytest.mark.parametrize("name", REDUCED)
def test_reductions(name):
    program, pointwise, transcendental = REDUCED[name]
    calls = calls_of(lambda: program(torch.rand(3, 5)))
    assert (calls.total("pointwise"), calls.total("transcendental")) == (pointwise, transcendental)


# -- recurrent layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm_flops_are_its_matmuls_at_every_step(layers, directions):
    T, B, I, H = 5, 3, 7, 11
    lstm = torch.nn.LSTM(I, H, num_layers=layers, bidirectional=directions == 2)
    points = 0
    for layer in range(layers):
        width = I if layer == 0 else directions * H
        points += directions * T * B * 4 * H * (width + H)  # four gates, for input and state
    x = rand(T, B, I)
    calls = calls_of(lambda: lstm(x)[0].sum().backward())
    assert calls.total("matmul") == 3 * 2 * points  # forward, and the gradients of operands and weights


def test_lstm_costs_the_same_as_a_loop_over_cells():
    T, B, I, H = 5, 3, 7, 11
    lstm, cell = torch.nn.LSTM(I, H), torch.nn.LSTMCell(I, H)

    def loop(x):
        state = None
        for step in x:
            state = cell(step, state)

    whole, steps = Calls(), Calls()
    x = torch.rand(T, B, I)
    with torch.no_grad():
        with whole:
            lstm(x)
        with steps:
            loop(x)
    assert whole.total("matmul") == steps.total("matmul") == 2 * T * B * 4 * H * (I + H)
    for kind in ("pointwise", "transcendental"):
        assert whole.total(kind) == steps.total(kind)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_fused_recurrent_layers_cost_the_same_as_single_layers(kind):
    T, B, I, H = 5, 3, 7, 11
    layer = getattr(torch.nn, kind)(I, H, num_layers=2, bidirectional=True)
    x = spec(T, B, I)
    arguments = {
        "input": x, "weight": [spec(*p.shape) for p in layer.parameters()], "mode": {"LSTM": 2, "GRU": 3}[kind],
        "num_layers": 2, "dropout": 0.0, "train": True, "bidirectional": True, "batch_sizes": (),
        "grad_output": spec(T, B, 2 * H),
    }  # fmt: skip
    operand = rand(T, B, I)
    calls = Calls()
    with calls:
        made = layer(operand)[0]
    whole = counts_of(Call("_cudnn_rnn", "", False, arguments, (spec(T, B, 2 * H),)))
    assert number(whole.matmul) == calls.total("matmul")
    if kind == "LSTM":  # here too, one kernel per layer
        assert number(whole.pointwise) == calls.total("pointwise")
        assert number(whole.transcendental) == calls.total("transcendental")
        gradients = counts_of(Call("_cudnn_rnn_backward", "", False, arguments, (x,)))
        backward = calls_of(lambda: made.backward(torch.ones_like(made)))
        kernels = [s.counts for s in backward.seen if s.call.name == "mkldnn_rnn_layer_backward"]
        assert number(gradients.matmul) == sum(number(c.matmul) for c in kernels)
        assert number(gradients.pointwise) == sum(number(c.pointwise) for c in kernels)


# -- transforms ----------------------------------------------------------------------------------------------------


def test_fft_stages_are_rounded_up():
    n, b = map(poly, cg.dims("N B"))
    x = spec(b, n)
    counts = counts_of(Call("_fft_c2c", "", False, {"self": x, "dim": (1,)}, (x,)))
    assert counts.pointwise.bind({"N": poly(1024), "B": poly(3)}) == 5 * 3 * 1024 * 10
    assert counts.pointwise.bind({"N": poly(1000), "B": poly(3)}) == 5 * 3 * 1000 * 10
    assert counts.pointwise == 5 * n * b * poly(sympy.ceiling(sympy.log(n.expr, 2)))


# -- decompositions, against the steps of their loops --------------------------------------------------------------


def test_lu_flops_equal_the_elimination_loop():
    n = 7
    # quotients, then products and differences in the trailing submatrix
    steps = sum(k + 2 * k * k for k in range(1, n))
    assert calls_of(lambda: torch.linalg.lu_factor(torch.rand(3, n, n))).total("pointwise") == 3 * steps
    assert abs(steps - 2 * n**3 / 3) < n**2


def test_cholesky_flops_equal_the_loop():
    n = 7
    steps = sum(k + k * (k + 1) for k in range(1, n))
    calls = calls_of(lambda: torch.linalg.cholesky(torch.eye(n)))
    assert (calls.of("linalg_cholesky_ex").counts.pointwise, calls.of("linalg_cholesky_ex").counts.transcendental) == (
        steps,
        n,
    )


@pytest.mark.parametrize(("m", "n"), [(7, 7), (11, 5), (5, 11)])
def test_qr_and_svd_flops_equal_householder_loops(m, n):
    long, short = max(m, n), min(m, n)
    left = sum(4 * (long - j) * (short - j) for j in range(short))
    right = sum(4 * (long - j) * (short - j - 1) for j in range(short))
    x = torch.rand(m, n)
    assert flops_of(lambda: torch.linalg.qr(x, mode="r"), "linalg_qr") == left
    assert flops_of(lambda: torch.ops.aten._linalg_svd(x, compute_uv=False), "_linalg_svd") == left + right
