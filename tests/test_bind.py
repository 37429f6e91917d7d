"""From formulas to numbers: exact for integers, float64 for arrays, errors for invalid sizes."""

from fractions import Fraction

import numpy as np
import pytest
import sympy
from algebra import NAMES, SYMBOLS, A, B, C, D, atoms, mixed, points
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limited

import costgraph as cg
from costgraph import BindingError, CostGraphError, Max, Min, ShapeError
from costgraph.algebra.polynomial import poly
from costgraph.bind import evaluate
from costgraph.bind.evaluate import answer, need_bound
from costgraph.ir.graph import (
    bindings,
    known_names,
)
from costgraph.ir.graph import (
    dimension_size as size_of,
)
from costgraph.notation.grammar import parse_formula
from costgraph.testing import value

fast = settings(max_examples=60, deadline=None)


def only(expr, point):
    return {s.name: point[s.name] for s in expr.free_symbols}


# -- one point ---------------------------------------------------------------------------------------------------------


@fast
@given(st.one_of(mixed(), atoms()), points(10**6))
def test_evaluate_is_exact(x, point):
    point.update(B=point["B"] % 30 + 1, C=point["C"] % 9 + 1, D=point["D"] % 9 + 1)  # these can be exponents
    expected, found = value(x, point), cg.evaluate(x, **only(x, point))
    if expected.denominator == 1:
        assert found == int(expected)
        assert type(found) is int
    else:
        assert found == float(expected)
        assert type(found) is float


def test_evaluate_is_exact_for_large_integers():
    N, T = cg.dims("N T")
    assert cg.evaluate(6 * N * T, N=70 * 10**9, T=15 * 10**12) == 6300000000000000000000000
    assert cg.evaluate(N**20 + 1, N=10**30) == 10**600 + 1
    assert cg.evaluate(N / T, N=3, T=2) == 1.5
    assert cg.evaluate(5) == 5
    assert cg.evaluate(2.5) == 2.5
    assert cg.evaluate(sympy.Rational(1, 2)) == 0.5
    assert cg.evaluate(sympy.sqrt(N), N=16) == 4
    assert cg.evaluate(sympy.log(N) / 2 + 0.5, N=1) == 0.5
    assert cg.evaluate(0.5 * Max(N, T), N=3, T=4) == 2.0
    assert cg.evaluate(T * (1 - (1 - 2 / T) ** N), T=8, N=10**12) == 8


WRONG_SIZES = [
    (0, "0"),
    (-3, "-3"),
    (True, "True"),
    (np.bool_(True), "True"),
    (2.0, "2.0"),
    (np.float64(2), "2.0"),
    ("8Ki", "'8Ki'"),
    (None, "None"),
    (1j, "1j"),
    (float("nan"), "nan"),
    (sympy.Integer(0), "0"),
    (sympy.Float(2), "2.0"),
    (sympy.Rational(1, 2), "1/2"),
    (A, "A"),
    ([3], "[3]"),
    (np.array([3]), "array([3])"),
    (int, "int"),
    (Fraction(3), "Fraction(3, 1)"),
]


@each(("wrong", "named"), WRONG_SIZES, ids=[n for _, n in WRONG_SIZES])
def test_sizes_that_are_not_positive_integers_raise(wrong, named):
    with pytest.raises(BindingError) as caught:
        cg.evaluate(A * B, A=wrong, B=2)
    assert str(caught.value).startswith("A=")
    assert named in str(caught.value)
    assert str(caught.value).endswith("expected a positive integer")
    with pytest.raises(BindingError):
        bindings(small_graph(), {"B": wrong})


@each("size", [3, np.int64(3), np.uint8(3), sympy.Integer(3), np.array(3)])
def test_all_integer_types_are_valid_sizes(size):
    assert size_of("A", size) == 3
    assert type(size_of("A", size)) is int
    assert cg.evaluate(A * B, A=size, B=2) == 6


@each(
    ("formula", "dims", "what"),
    [
        (A * B, {"A": 1}, "no size for B"),
        (A, {"A": 1, "X": 2}, "'X' is not in the formula, expected one of A; pass a size that a preset"),
        (sympy.Integer(3), {"X": 2}, "expected one of none"),
        (1 / (A - B), {"A": 2, "B": 2}, "A=2, B=2: "),
        (2**A, {"A": 10**12}, "bits is no size"),
        (1.5 / (A - B), {"A": 2, "B": 2}, "expected a finite number"),
        (A ** (sympy.Rational(1, 2) + B) / (10 ** (300 * B) + C) - A**400, {"A": 7, "B": 2, "C": 1}, ""),
    ],
)
def test_unbound_unknown_or_infinite_evaluations_raise(formula, dims, what):
    if not what:  # large, but a number
        assert cg.evaluate(formula, **dims) < 0
        return
    with pytest.raises(BindingError) as caught:
        cg.evaluate(formula, **dims)
    assert what in str(caught.value)


@each("question", [
    cg.flops, cg.bytes_moved, cg.peak_memory, cg.activation_memory, lambda *a, **dims: cg.saved_bytes(*a, **dims)[""],
])  # fmt: skip
def test_rebinding_a_size_to_another_value_raises(question):
    with cg.Graph("g") as g:
        y = cg.linear(cg.linear(g.input("x", (A, B)), "a b -> a c", c=C), "a c -> a d", d=D)
        g.output(cg.reduce(y * y, "a d -> ", "mean"))
        g.defaults = {"C": 5}
    step, point = cg.training_step(g), {"A": 3, "B": 2, "D": 7}
    bound = {"B": 2, "C": 5}
    for formula in (question(step, B=2), question(step, B=2) * 2 / 2):
        free = {name: size for name, size in point.items() if cg.dims(name) in formula.free_symbols}
        for ask in (lambda f, **sizes: cg.evaluate(f, **sizes), lambda f, **sizes: cg.compile(f)(**sizes)):
            assert ask(formula, **free, **bound) == question(step, **point, C=5) == question(step, **point)
            with pytest.raises(BindingError, match=r"C=6: the formula was derived with C=5; pass another size to the"):
                ask(formula, **free, C=6)
        values = cg.compile(formula)(**{**free, "A": np.array([3, 4])}, C=np.array([5, 5]))
        assert values.tolist() == [question(step, **{**point, "A": n}) for n in (3, 4)]
    # in a ratio, the size remains symbolic in one of the two formulas
    ratio = question(step) / question(step, A=1)
    free = {name: size for name, size in point.items() if cg.dims(name) in ratio.free_symbols}
    at_one = question(step, **{**point, "A": 1})
    assert cg.evaluate(ratio, **free, C=5) == pytest.approx(question(step, **point) / at_one)


@each("wrong", ["A*B", None, True, [A], A > 1, object(), sympy.Symbol("A"), sympy.Symbol("A") * A])
def test_evaluating_a_non_formula_raises(wrong):
    with pytest.raises(ShapeError, match="expected"):
        cg.evaluate(wrong, A=1)
    with pytest.raises(ShapeError, match="expected"):
        cg.compile(wrong)


def test_answers():
    assert answer(poly(3)) == 3
    assert answer(poly(Fraction(1, 2))) == 0.5
    assert answer(poly(2 * A)) == 2 * A
    assert answer(sympy.Rational(4, 2)) == 2
    assert type(answer(sympy.Integer(4))) is int
    assert answer(sympy.sqrt(2)) == pytest.approx(2**0.5)
    for wrong in (sympy.oo, sympy.nan, sympy.zoo, sympy.I):
        with pytest.raises(BindingError, match="expected a finite number"):
            answer(wrong)
    with pytest.raises(BindingError, match="expected smaller sizes"):
        answer(poly(Fraction(10**400, 3)))
    need_bound([3, 2.5], "peak")
    with pytest.raises(BindingError, match="peak: expected numbers, still unbound: A, B"):
        need_bound([B, 3, A], "peak")


# -- arrays ------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.one_of(mixed(), atoms()), st.lists(points(60), min_size=2, max_size=5))
def test_compile_agrees_with_evaluate(x, rows):
    for p in rows:
        p["C"], p["D"] = p["C"] % 5 + 1, p["D"] % 5 + 1
    call = cg.compile(x)
    expected = [float(value(x, p)) for p in rows]
    scale = max(1.0, *map(abs, expected))
    columns = {n: np.array([p[n] for p in rows]) for n in call.names}
    if not columns:
        assert call() == pytest.approx(expected[0])
        return
    for kind in (np.int64, np.float64, np.uint16):
        found = call(**{n: c.astype(kind) for n, c in columns.items()})
        assert found.dtype == np.float64
        # cancellation can lose digits
        assert np.allclose(found, expected, rtol=1e-9, atol=1e-9 * scale)
    assert call(**only(x, rows[0])) == cg.evaluate(x, **only(x, rows[0]))


@each("k", [3, 5, 7, 49, 100, 128])
def test_rounding_is_exact_if_division_is_exact(k):
    sizes = np.arange(1, 4001)
    assert np.array_equal(cg.compile(sympy.floor(A / k))(A=sizes), sizes // k)
    assert np.array_equal(cg.compile(sympy.ceiling(A / k))(A=sizes), -(-sizes // k))
    assert np.array_equal(cg.compile(sympy.floor((A + k - 1) / (k * B)))(A=sizes, B=3), (sizes + k - 1) // (3 * k))


def test_shapes():
    f = cg.compile(Max(A * B, C**2) + Min(A, C))
    assert f.names == ("A", "B", "C")
    a, c = np.arange(1, 5).reshape(4, 1), np.arange(1, 4)
    expected = np.maximum(a * 2, c**2) + np.minimum(a, c)
    assert np.array_equal(f(A=a, B=2, C=c), expected)
    assert np.array_equal(f(A=a.tolist(), B=np.int64(2), C=c.astype(float)), expected)
    assert np.array_equal(f(A=np.asfortranarray(np.ones((2, 3), int)), B=1, C=1), np.full((2, 3), 2.0))
    assert f(A=np.empty((0, 3), int), B=2, C=c).shape == (0, 3)
    assert f(A=[], B=2, C=1).shape == (0,)
    assert f(A=a[::2], B=2, C=c[::-1]).shape == (2, 3)
    assert cg.compile(5)() == 5
    assert np.array_equal(cg.compile(A - A + B)(B=c), c)
    with pytest.raises(BindingError, match=r"broadcast together with shapes A \(3,\), B \(2,\), C \(\)"):
        f(A=np.ones(3, int), B=np.ones(2, int), C=1)


@each("two", [2, np.int64(2), np.array(2), sympy.Integer(2)])
def test_scalars_are_exact(two):
    N, T = cg.dims("N T")
    values = cg.compile(6 * N * T)(N=10**24, T=two)
    assert values == 12 * 10**24
    assert type(values) is int


def test_int64_overflow_gives_float():
    N, T = cg.dims("N T")
    values = cg.compile(6 * N * T)(N=np.array([70 * 10**9]), T=np.array([15 * 10**12]))
    assert values[0] == pytest.approx(6.3e24)
    with pytest.raises(BindingError, match=r"beyond 1\.8e308, or a division by zero"):
        cg.compile(N**40)(N=np.array([10**9]))
    with pytest.raises(BindingError, match="division by zero"):
        cg.compile(1 / (N - T))(N=np.array([2, 3]), T=3)
    with pytest.raises(BindingError, match=r"coefficient beyond 1\.8e308"):
        cg.compile(10**400 * N)


@each(
    "wrong",
    [
        *([0], [-1], [1, 0], [1.5], [np.nan], [np.inf], [True, False], ["1"], [None], [1j], [2**80], 1.5, True, "1"),
        *(np.datetime64("2020-01-01"), [[1], [0]], float("nan"), None, np.array([1, 2], dtype=object), A),
    ],
    ids=repr,
)
def test_arrays_of_invalid_dtype_raise(wrong):
    with pytest.raises(BindingError, match=r"A.*expected (a )?positive integer"):
        cg.compile(A * B)(A=wrong, B=np.array([1, 2]))


def test_names_of_arguments():
    f = cg.compile(A * B)
    for wrong in ({"A": 1}, {}, {"A": 1, "B": 2, "X": 3}):
        with pytest.raises(BindingError, match=r"expected sizes for \['A', 'B'\]"):
            f(**wrong)
    same = cg.dims("self")
    assert cg.compile(2 * same)(self=3) == 6
    assert repr(f) == "Compiled(A, B -> A*B)"


def test_sweeps_larger_than_a_chunk():
    n = 3 * evaluate._CHUNK + 17
    a = np.arange(1, n + 1)
    assert np.array_equal(cg.compile(A**3 + A * B - 7)(A=a, B=5), a.astype(float) ** 3 + a * 5.0 - 7)
    grid = cg.compile(Max(A, B))(A=a[: 2 * evaluate._CHUNK].reshape(-1, 2), B=[[1, 10**9]])
    assert grid.shape == (evaluate._CHUNK, 2)
    assert (grid[:, 1] == 10**9).all()


def test_other_functions_and_floats_compile():
    a = np.array([1, 4, 9])
    assert np.allclose(cg.compile(sympy.sqrt(A) * B)(A=a, B=2), [2, 4, 6])
    assert np.allclose(cg.compile(0.5 * Max(A, B) + 1)(A=a, B=2), [2, 3, 5.5])
    assert np.allclose(cg.compile(sympy.log(A) + A)(A=a), np.log(a) + a)
    assert cg.compile(0.5 * A)(A=3) == 1.5


def test_compiled_plan_passes_are_bounded_by_factors_per_term():
    x = sympy.expand((A + B) ** 3 * (C + D))
    with limited():
        sizes = np.arange(1, 10**5)
        values = cg.compile(x)(A=sizes, B=2, C=3, D=4)
        assert np.allclose(values, (sizes + 2.0) ** 3 * 7)


# -- graphs ------------------------------------------------------------------------------------------------------------


def small_graph(*assumptions):
    sizes = cg.dims("B D H F")
    with cg.Graph("small") as g:
        x = g.input("x", (sizes[0], sizes[1]))
        y = cg.einsum(x, g.param("w", (sizes[1], sizes[3])), "b d, d f -> b f")
        g.output(cg.rearrange(y, "b (h k) -> b h k", h=sizes[2]))
        g.assume(*assumptions)
    return g


def test_bindings_of_a_graph():
    g = small_graph()
    assert known_names(g) == {"B", "D", "F", "H"}
    bound = bindings(g, {"B": 2, "F": np.int64(6), "H": sympy.Integer(3)})
    assert {k: v.constant for k, v in bound.items()} == {"B": 2, "F": 6, "H": 3}
    assert cg.flops(g, B=2, D=5, F=6, H=3) == 2 * 2 * 5 * 6
    assert cg.flops(g, D=5) == 10 * cg.dims("B") * cg.dims("F")


def test_unknown_size_names_are_listed():
    with pytest.raises(BindingError, match="'X' is not a dimension of graph 'small', expected one of B, D, F, H"):
        bindings(small_graph(), {"X": 2})
    with pytest.raises(BindingError) as caught:
        bindings(small_graph(), {"X" * 10**5: 2})
    assert len(str(caught.value)) < 300


def test_fractional_bound_size_raises():
    with pytest.raises(
        BindingError, match=r"F=10, H=3: axis \d of '.*' has size F/H = 10/3, expected a positive whole"
    ):
        bindings(small_graph(), {"F": 10, "H": 3})
    bindings(small_graph(), {"F": 10})


def test_binding_solves_assumed_equalities():
    g = small_graph("F == 4*D", "D == H*K", "K >= 2")
    K = cg.dims("K")
    bound = bindings(g, {"D": 12, "H": 3})
    assert {k: v.constant for k, v in bound.items()} == {"D": 12, "H": 3, "F": 48, "K": 4}
    assert bindings(g, {"H": 3})["D"] == poly(3 * K)
    assert bindings(g, {"H": 3})["F"] == poly(12 * K)
    with pytest.raises(BindingError, match=r"'D == H\*K' makes K=10/3, expected a positive integer"):
        bindings(g, {"D": 10, "H": 3})
    with pytest.raises(BindingError, match=r"D=5, F=10: against the assumption 'F == 4\*D'"):
        bindings(g, {"D": 5, "F": 10})
    with pytest.raises(BindingError, match="K=1: against the assumption 'K >= 2'"):
        bindings(g, {"D": 4, "H": 4})


def test_given_sizes_override_defaults():
    g = small_graph()
    with g:
        g.defaults = {"B": 2, "D": 3, "unused": 5}
    assert {k: v.constant for k, v in bindings(g, {"D": 7}).items()} == {"B": 2, "D": 7}


def test_errors_are_costgraph_errors():
    for call in (
        lambda: cg.flops(small_graph(), B=0),
        lambda: cg.flops(small_graph(), B=1.0),
        lambda: cg.peak_memory(small_graph(), Z=1),
        lambda: small_graph("F >="),
    ):
        with pytest.raises(CostGraphError):
            call()
    assert set(NAMES) == {s.name for s in SYMBOLS}


B, H, L, S, W = cg.dims("B H L S W")


def test_fractional_loop_count_raises_with_loop_name():
    with cg.Graph("g") as g:
        g.output(cg.repeat(L / 2, cg.relu, g.input("x", (B,)), name="layers"))
    assert cg.flops(g, L=6, B=5) == 3 * 5
    with pytest.raises(BindingError, match=r"L=7: count of 'layers' has size L/2 = 7/2, expected a positive whole"):
        cg.flops(g, L=7, B=5)


@each(
    ("size", "good", "bad", "becomes"),
    [
        (S - 2, 3, 2, "0"),
        (S - 5, 6, 3, "-2"),
        (S / 3, 6, 7, "7/3"),
        (S * (S - 1) / 6, 3, 2, "1/3"),
    ],
)
def test_axis_size_must_bind_to_a_positive_integer(size, good, bad, becomes):
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (size, B))))
    assert cg.flops(g, S=good, B=7) == int(size.subs(S, good)) * 7
    with pytest.raises(
        BindingError, match=f"S={bad}: axis 0 of 'x' has size .* = {becomes}, expected a positive whole"
    ):
        cg.flops(g, S=bad, B=7)


def test_rounded_sizes_are_validated():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (S, B))[1::2]))
    assert cg.flops(g, S=6, B=7) == 3 * 7
    with pytest.raises(BindingError, match="S=1"):
        cg.flops(g, S=1, B=7)


def test_binding_a_slice_beyond_its_axis_raises():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (S, 3))[:W]))
    assert cg.flops(g, S=7, W=7) == 21
    with pytest.raises(BindingError, match="expected a nonnegative integer"):
        cg.flops(g, S=7, W=11)


def test_size_names_are_found_in_domains_counts_and_formulas():
    with cg.Graph("g") as g:
        q, k, v = (g.input(n, (2, 3, S, 5)) for n in "qkv")
        y = cg.attention(q, k, v, causal=True, window=W)  # only in a domain
        y = cg.repeat(L, cg.relu, y)  # in a loop count
        (z,) = cg.opaque("op", [y], [((7,), "fp32")], flops=H)  # in a declared formula
        g.output(z)
    for name in "SWLH":
        assert cg.flops(g, **{name: 11}) != cg.flops(g)
    with pytest.raises(BindingError, match="'B' is not a dimension of graph 'g', expected one of H, L, S, W"):
        cg.flops(g, B=3)


def test_sum_of_many_powers_is_parsed():
    text = " + ".join(["A**2", "(B**2)**3", "2**C"] * 70)
    assert parse_formula(text) == parse_formula("70*A**2 + 70*B**6 + 70*2**C")
    many = "*".join(["A**2"] * 100)
    assert parse_formula(many) == parse_formula("A**200")
