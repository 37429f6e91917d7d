"""Sizes as scalar operands: costs, values and serialization of ops such as `x * D**-0.5`."""

import math

import numpy as np
import pytest
import sympy
from budget import drawing
from each import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph.errors import CostGraphError, ShapeError
from costgraph.testing import check_training, run

B, S, D, H, K = cg.dims("B S D H K")

#: A formula and its value in Python.
NUMBERS = [
    (S, lambda s, d: s),
    (S - 5, lambda s, d: s - 5),
    (S * D, lambda s, d: s * d),
    (D / S, lambda s, d: d / s),
    (sympy.floor(D / S), lambda s, d: d // s),
    (D**-0.5, lambda s, d: d**-0.5),
    (sympy.sqrt(S * D), lambda s, d: math.sqrt(s * d)),
    (0.1 * S, lambda s, d: 0.1 * s),
    (S ** sympy.Rational(2, 3), lambda s, d: s ** (2 / 3)),
    (sympy.log(2 * S) / sympy.log(512), lambda s, d: math.log(2 * s, 512)),
    (sympy.pi / S, lambda s, d: math.pi / s),
    (cg.Max(S, D), lambda s, d: max(s, d)),
    (sympy.Integer(3), lambda s, d: 3),
    (sympy.sqrt(2), lambda s, d: math.sqrt(2)),
    (1 / (S + 1), lambda s, d: 1 / (s + 1)),
]
OPERATIONS = [
    (lambda x, n: x * n, np.multiply),
    (lambda x, n: n * x, np.multiply),
    (lambda x, n: x + n, np.add),
    (lambda x, n: n - x, lambda x, n: n - x),
    (lambda x, n: x / n, np.divide),
    (lambda x, n: n / x, lambda x, n: n / x),
    (lambda x, n: cg.ops.pointwise("maximum", x, n), np.maximum),
    (lambda x, n: cg.ops.pointwise("fma", x, n, 2.0), lambda x, n: x * n + 2),
]


@settings(parent=drawing(60))
@given(st.sampled_from(NUMBERS), st.sampled_from(OPERATIONS), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_a_size_is_a_number(number, operation, s, d, whole):
    (formula, exact), (apply, oracle) = number, operation
    assume(exact(s, d) != 0)  # NumPy warns about division by zero
    values = np.arange(1, s * d + 1).reshape(s, d)
    graphs = []
    for n in (formula, exact(s, d)):
        with cg.Graph("g") as g:
            g.output(apply(g.input("x", (S, D), "int64" if whole else "fp64"), n))
        graphs.append(g)
    ours, plain = graphs
    sizes = {"S": s, "D": d}
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        if plain.outputs[0].dtype == ours.outputs[0].dtype:  # in Python 4/2 is a float, and so is D/S for any D and S
            assert question(ours, **sizes) == question(plain, **sizes)
            assert question(ours) == question(plain)
    if not whole:
        result = run(ours, {"x": values.astype(float)}, **sizes)
        expected = oracle(values.astype(float), exact(s, d))
        np.testing.assert_allclose(result.outputs[0], expected, rtol=1e-12, atol=1e-12)  # n - x may cancel


def by_hand(scale):
    with cg.Graph("attention") as g:
        q, k, v = (g.input(n, (B, H, S, K), grad=True) for n in "qkv")
        scores = cg.einsum(q, k, "b h s k, b h t k -> b h s t") * scale
        g.output(cg.einsum(cg.softmax(scores), v, "b h s t, b h t k -> b h s k"))
    return g


def test_size_scaled_attention_costs_as_scalar_and_is_saved(tmp_path):
    g, plain = by_hand(K**-0.5), by_hand(0.125)
    for question in (cg.flops, cg.bytes_moved, cg.peak_memory):
        assert question(g) == question(plain)
    cg.save(g, tmp_path / "g.json")
    again = cg.load(tmp_path / "g.json")
    (scale,) = (op.kind for op in again.ops if op.kind.name == "pointwise")
    assert scale.scalars[1].expr == 1 / sympy.sqrt(K)
    assert cg.flops(again) == cg.flops(g)
    assert cg.flops(cg.unroll(again)) == cg.flops(g)


@each("wrong", [sympy.sin(S), sympy.Symbol("S"), sympy.I * S, sympy.oo, sympy.nan, S < 3, "S", None])
def test_invalid_size_operands_are_refused(wrong):
    with cg.Graph("g") as g:
        x = g.input("x", (S, D))
        with pytest.raises(CostGraphError, match=r"mul: .*expected") as caught:
            x * wrong
    assert str(wrong)[:20] in str(caught.value)


def test_known_division_by_zero_is_refused():
    with cg.Graph("g") as g:
        g.output(g.input("x", (S, D)) / (S - 5))
        with pytest.raises(ShapeError, match=r"mul: number 1/.*expected a base that is not zero"):
            g.input("y", (S,)) * (1 / sympy.Add(S, -S, evaluate=False))
    assert cg.flops(g, S=5, D=1) == 5  # the cost does not depend on it


def test_gradients_with_size_operands():
    with cg.Graph("g") as g:
        x = g.input("x", (D,), "fp64", grad=True)
        y = (x * D**-0.5) ** S + cg.ops.pointwise("pow", S + 1, x) / (D / 2)
        g.output(cg.reduce(y, "d -> ", "sum"))
    check_training(g, S=3, D=4)
