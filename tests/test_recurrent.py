"""Recurrences over positions: costs, decode state, values, and gradients."""

import numpy as np
import pytest
from each import each

import costgraph as cg
from costgraph.testing import run

B, S, D, E, H, K, N = cg.dims("B S D E H K N")


def graph(build, dtype="fp32"):
    with cg.Graph("g", dtype=dtype) as g:
        g.output(build(g))
    return g


def decaying(scan="kernel", *, mean=False):
    """h = exp(a) * h + x outer b, read by b; the state is D x N per sequence."""

    def build(g):
        x, b, a = g.input("x", (B, S, D)), g.input("b", (B, S, N)), g.param("a", (D, N))
        start = cg.ops.initial_state((B, D, N), name="h")

        def step(h, now):
            x, b = now
            h = cg.ops.pointwise("fma", cg.ops.pointwise("exp", a), h, cg.einsum(x, b, "b d, b n -> b d n"))
            return h, cg.einsum(h, b, "b d n, b n -> b d")

        with cg.nn.scan_kernel("decaying", scan):
            y = cg.nn.recurrence(step, start, (x, b))
        return cg.reduce(y, "b s d -> ", "mean") if mean else y

    return graph(build)


# -- costs -----------------------------------------------------------------------------------------------------------


def test_kernel_internal_states_take_no_memory():
    kernel, ops = decaying(), decaying("ops")
    assert cg.matmul_flops(kernel) == cg.matmul_flops(ops) == 2 * B * S * D * N
    # x, b and y once per position, the initial state, and the decays; no tensor of B*S*D*N elements
    assert cg.bytes_moved(kernel) == 4 * (2 * B * S * D + B * S * N + 2 * B * D * N + D * N)
    states = cg.bytes_moved(ops).coeff(S).coeff(N).coeff(D).coeff(B)
    # x outer b written and read, h read and written, h read by the product
    assert states == 4 * 5


def test_training_step_recomputes_states():
    kernel, ops = cg.training_step(decaying(mean=True)), cg.training_step(decaying("ops", mean=True))
    assert cg.matmul_flops(kernel) == cg.matmul_flops(ops)  # reads of the states are not recomputed
    assert not cg.peak_memory(kernel, B=2, S=3, D=5).has(N * S)
    stacked = cg.peak_memory(ops, B=2, D=5, N=7)
    assert stacked.subs(S, 1000) - stacked.subs(S, 999) >= 4 * 2 * 5 * 7


@each("axis", [0, 1, 2, -1, -3])
def test_positions_may_lie_on_any_axis(axis):
    def build(g):
        rest = [n for i, n in enumerate((3, 4, 5)) if i != axis % 3]
        return cg.nn.recurrence(
            lambda h, x: (h + x, h + x), cg.ops.initial_state(rest), g.input("x", (3, 4, 5)), axis=axis
        )

    x = np.arange(60.0).reshape(3, 4, 5)
    assert np.array_equal(run(graph(build), {"x": x}).outputs[0], np.cumsum(x, axis))


# -- values and gradients in numbers ---------------------------------------------------------------------------------


def numbers(seed, *shape):
    return np.random.default_rng(seed).uniform(-1, 1, shape)


def test_cumulative_sum_values():
    x = numbers(0, 3, 5, 2)
    for axis in (0, 1, 2, -1):
        g = graph(lambda g, axis=axis: cg.nn.cumulative_sum(g.input("x", (3, 5, 2)), axis), "fp64")
        assert np.allclose(run(g, {"x": x}).outputs[0], np.cumsum(x, axis))


def test_token_shift_values():
    x = numbers(1, 2, 5, 3)
    found = run(graph(lambda g: cg.nn.token_shift(g.input("x", (2, 5, 3))), "fp64"), {"x": x}).outputs[0]
    assert np.array_equal(found[:, 1:], x[:, :-1])
    assert not found[:, 0].any()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_lstm_values_match_torch_equations():
    """torch's equations, with gates in the order input, forget, cell, output."""
    x, w, u = numbers(2, 2, 4, 3), numbers(3, 3, 20), numbers(4, 5, 20)
    a, b = numbers(5, 20), numbers(6, 20)
    values = {"x": x, "lstm/input/weight": w, "lstm/input/bias": a, "lstm/state/weight": u, "lstm/state/bias": b}
    found = run(graph(lambda g: cg.nn.lstm(g.input("x", (2, 4, 3)), 5), "fp64"), values).outputs[0]
    h = c = np.zeros((2, 5))
    for t in range(4):
        i, f, g, o = np.split(x[:, t] @ w + a + h @ u + b, 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        assert np.allclose(found[:, t], h)


def test_gru_values_match_torch_equations():
    """torch's equations, with gates in the order reset, update, new."""
    x, w, u = numbers(2, 2, 4, 3), numbers(3, 3, 15), numbers(4, 5, 15)
    a, b = numbers(5, 15), numbers(6, 15)
    values = {"x": x, "gru/input/weight": w, "gru/input/bias": a, "gru/state/weight": u, "gru/state/bias": b}
    found = run(graph(lambda g: cg.nn.gru(g.input("x", (2, 4, 3)), 5), "fp64"), values).outputs[0]
    h = np.zeros((2, 5))
    for t in range(4):
        (r, z, n), (p, q, m) = np.split(x[:, t] @ w + a, 3, -1), np.split(h @ u + b, 3, -1)
        r, z = sigmoid(r + p), sigmoid(z + q)
        h = (1 - z) * np.tanh(n + r * m) + z * h
        assert np.allclose(found[:, t], h)


@pytest.mark.parametrize("bias", [False, True])
def test_head_norm_values(bias):
    x, w, b = numbers(7, 2, 3, 4), numbers(8, 12), numbers(9, 12)
    g = graph(lambda g: cg.nn.head_norm(g.input("x", (2, 3, 4)), bias=bias), "fp64")
    values = {"x": x, "head_norm/weight": w} | ({"head_norm/bias": b} if bias else {})
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    assert np.allclose(run(g, values).outputs[0], normal.reshape(2, 12) * w + b * bias)


def looped(scan):
    """Build a recurrence whose backward pass needs the states, the values read from them, and loop-invariant values."""

    def build(g):
        x, w, a = g.param("x", (2, 4, 3)), g.param("w", (3, 3)), g.param("a", (3,))
        start = cg.ops.initial_state((2, 3))
        with cg.nn.scan_kernel("looped", scan):
            decay, fed = cg.sigmoid(x * a), cg.tanh(x)

            def step(h, now):
                decay, fed = now
                h = decay * h + cg.tanh(cg.einsum(h, w, "b d, d e -> b e") + fed)
                return h, cg.ops.pointwise("exp", h) * fed

            y = cg.nn.recurrence(step, start, (decay, fed)) * cg.silu(x)
        return cg.reduce(y, "b s d -> ", "sum")

    return graph(build, "fp64")


LOSSES = {
    "recurrence in a kernel": lambda: looped("kernel"),
    "recurrence of ops": lambda: looped("ops"),
    "lstm": lambda: total(lambda g: cg.nn.lstm(g.param("x", (2, 3, 2)), 2)),
    "gru": lambda: total(lambda g: cg.nn.gru(g.param("x", (2, 3, 2)), 2)),
    "cumulative_sum": lambda: total(lambda g: cg.nn.cumulative_sum(g.param("x", (2, 3, 2)), 1)),
    "token_shift": lambda: total(lambda g: cg.nn.token_shift(g.param("x", (2, 3, 2)))),
    "causal_conv": lambda: total(lambda g: cg.nn.causal_conv(g.param("x", (2, 3, 2)), 3)),
    "head_norm": lambda: total(lambda g: cg.nn.head_norm(g.param("x", (2, 3, 2)))),
}


def total(build):
    def squares(g):
        y = build(g)
        names = " ".join(f"a{i}" for i in range(y.ndim))
        return cg.reduce(y * y, f"{names} -> ", "sum")

    return graph(squares, "fp64")


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_finite_differences(name):
    g = LOSSES[name]()
    values = {t.name: numbers(i, *(int(n) for n in t.shape)) for i, t in enumerate(g.params)}
    found = run(cg.backward(g), values).gradients
    for name, value in values.items():
        for index in np.ndindex(value.shape):
            up, down = value.copy(), value.copy()
            up[index] += 1e-5
            down[index] -= 1e-5
            slope = sum(s * run(g, values | {name: at}).outputs[0] for s, at in ((1, up), (-1, down))) / 2e-5
            assert np.isclose(found[name][index], slope, rtol=1e-5, atol=1e-7), (name, index)


# -- inference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", ["kernel", "ops"])
def test_decode_keeps_only_the_state(scan):
    g = decaying(scan)
    step = cg.decode(g)
    assert cg.cache_bytes(step) == 4 * B * D * N  # independent of the length
    assert cg.matmul_flops(step) == 2 * B * D * N
    several = cg.decode(g, "T")
    assert cg.matmul_flops(several) == 2 * B * D * N * cg.dims("T")


def test_fused_decode_step_reads_and_writes_state_once():
    step = cg.decode(decaying())
    # x, b and y of one position, the state read and written, the decays
    assert cg.bytes_moved(step) == 4 * (2 * B * D + B * N + 2 * B * D * N + D * N)
    # no other tensor as large as the state is ever live
    assert cg.peak_memory(step) == 4 * (2 * B * D + B * N + B * D * N + D * N)
    assert cg.bytes_moved(cg.prefill(decaying())) - cg.bytes_moved(decaying()) == 4 * B * D * N


@pytest.mark.parametrize("scan", ["kernel", "ops"])
def test_decode_continues_from_prefill(scan):
    values = {"x": numbers(1, 2, 5, 3), "b": numbers(2, 2, 5, 4), "a": numbers(3, 3, 4)}
    sizes = {"B": 2, "D": 3, "N": 4}

    def part(first, last):
        return values | {n: values[n][:, first:last] for n in "xb"}

    whole = run(decaying(scan), values, **sizes, S=5).outputs[0]
    prompt, step = cg.prefill(decaying(scan)), cg.decode(decaying(scan))
    (held,) = [t.name for t in prompt.tensors if t.role == "cache" and t.producer is None]
    (again,) = [t.name for t in step.tensors if t.role == "cache" and t.producer is None]
    state = cached(prompt, part(0, 3), held, **sizes, S=3)
    for t in (3, 4):
        given = part(t, t + 1) | {again: state}
        assert np.allclose(run(step, given, **sizes, S=t + 1).outputs[0], whole[:, t : t + 1])
        state = cached(step, given, again, **sizes, S=t + 1)


def cached(g, values, name, **sizes):
    """Return the final cache contents of a graph."""
    return next(v.array for t, v in run(g, values, **sizes).values if t.name == name)


# -- errors ----------------------------------------------------------------------------------------------------------


@each(
    ("build", "text"),
    [
        (
            lambda x: cg.nn.recurrence(lambda h, x: (h, x), x, ()),
            "without xs, expected a tensor with a position axis",
        ),
        (
            lambda x: cg.nn.recurrence(lambda h, x: (h, x), x, x, axis=3),
            "axis 3 of x(2, 3, 4; fp32), expected an integer",
        ),
        (
            lambda x: cg.nn.recurrence(lambda h, x: (h, x), x, x, axis=True),
            "recurrence: axis is True, expected an integer",
        ),
        (lambda x: cg.nn.recurrence(None, x, x), "step"),
        (lambda x: cg.nn.token_shift(x[0, 0]), "expected at least two axes (batch, positions)"),
        (lambda x: cg.nn.cumulative_sum(x, 3), "axis 3 of"),
        (lambda x: cg.nn.head_norm(x[0, 0]), "expected at least two axes (heads, size)"),
        (lambda x: cg.nn.head_norm(x, bias=1), "bias"),
        (lambda x: cg.nn.causal_conv(x[0], 3), "expected three axes (batch, positions, channels)"),
        (lambda x: cg.nn.causal_conv(x, 0), "window=0"),
        (lambda x: cg.nn.lstm(x[0], 3), "expected three axes (batch, positions, width)"),
        (lambda x: cg.nn.gru(x, 0), "gru: hidden"),
        (lambda x: cg.nn.lstm(x, 3, bias=None), "bias"),
        (lambda x: cg.nn.lstm(x.shape, 3), "lstm"),
    ],
)
def test_errors_name_the_expectation(build, text):
    with cg.Graph("g") as g, pytest.raises(cg.CostGraphError) as caught:
        build(g.input("x", (2, 3, 4)))
    assert text in str(caught.value)


def test_unknown_recurrence_implementation_is_refused():
    with cg.Graph("g"), pytest.raises(cg.GraphError) as caught, cg.nn.scan_kernel("states", "fused"):
        pass
    assert str(caught.value) == "kernel 'states': scan 'fused', expected one of kernel, ops"


def test_causal_convolution_requires_one_axis_without_stride():
    for options, text in (
        ({"window": 3, "stride": 2}, "padding='causal' with stride=2, expected a stride of 1"),
        ({"window": (3, 3)}, "padding='causal' of a window over 2 axes, expected the position axis only"),
    ):
        pattern, shape = ("b c s -> b o s", (2, 3, 7)) if "stride" in options else ("b c h w -> b o h w", (2, 3, 5, 5))
        with cg.Graph("g") as g, pytest.raises(cg.ShapeError) as caught:
            cg.conv(g.input("x", shape), pattern, padding="causal", o=3, **options)
        assert str(caught.value) == text


def test_causal_convolution_flops_match_torch():
    # Conv1d computes S + 3*(window - 1) outputs at dilation 3, of which the first S are kept
    g = graph(lambda g: cg.conv(g.input("x", (B, D, S)), "b c s -> b o s", window=5, dilation=3, padding="causal", o=E))
    assert g.outputs[0].shape == (B, E, S)
    assert (cg.matmul_flops(g) - 2 * 5 * B * D * E * (S + 12)).expand() == 0
