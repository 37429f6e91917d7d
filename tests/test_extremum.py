"""Max and Min as sympy objects: every operation agrees with Python's max and min at points."""

import copy
import math
import pickle
import random
import warnings

import numpy as np
import pytest
import sympy
from algebra import SYMBOLS, A, B, C, D, mixed, points, sums
from each import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import costgraph as cg
from costgraph import Max, Min, ShapeError, dims, regimes
from costgraph.algebra.extremum import Owner, extremum
from costgraph.algebra.polynomial import poly
from costgraph.testing import value

fast = settings(max_examples=25, deadline=None)
several = st.lists(st.one_of(sums(0, 2, 3, st.integers(-3, 5)), mixed()), min_size=1, max_size=5)
extremes = st.sampled_from([(Max, max), (Min, min)])


def at(expr, point):
    return expr.xreplace({s: sympy.Integer(point[s.name]) for s in SYMBOLS})


def exactly(number):
    return sympy.Rational(number.numerator, number.denominator)


def big(seed=1, arguments=20, terms=20):
    """A Max over polynomials with many terms in 8 symbols."""
    rnd = random.Random(seed)
    names = dims("A B C D E F G H")
    return Max(
        *(
            sympy.Add(
                *(
                    rnd.randint(1, 50) * sympy.Mul(*(s ** rnd.choice([0, 0, 1, 1, 2]) for s in names))
                    for _ in range(terms)
                )
            )
            for _ in range(arguments)
        )
    )


# -- values ------------------------------------------------------------------------------------------------------------


@fast
@given(several, extremes, points())
def test_value_is_that_of_python(exprs, kinds, point):
    ours, python = kinds
    expected = python(value(e, point) for e in exprs)
    built = ours(*exprs)
    assert value(built, point) == expected
    assert at(built, point) == exactly(expected)
    assert built.subs({s: point[s.name] for s in SYMBOLS}) == exactly(expected)
    one_by_one = built
    for s in SYMBOLS:
        one_by_one = one_by_one.subs(s, point[s.name])
    assert one_by_one == exactly(expected)


@fast
@given(several, extremes, points())
def test_arithmetic_and_nesting_keep_the_value(exprs, kinds, point):
    ours, python = kinds
    expected = python(value(e, point) for e in exprs)
    built = ours(*exprs)
    x = point["A"]
    assert value(built + A, point) == expected + x
    assert value(3 * A * built, point) == 3 * x * expected
    assert value(built**2, point) == expected**2
    assert value(Max(A, built), point) == max(x, expected)
    assert value(Min(A, 1 + built), point) == min(x, 1 + expected)
    assert value(sympy.expand((A + 1) * (built + 1)), point) == (x + 1) * (expected + 1)
    assert (poly(built) * 2 - poly(A)).bind({k: poly(v) for k, v in point.items()}) == poly(2 * exactly(expected) - x)


@fast
@given(several, extremes, points(9))
def test_substituting_formulas(exprs, kinds, point):
    ours, python = kinds
    inner = {**point, "A": point["B"] * point["C"]}
    expected = python(value(e, inner) for e in exprs)
    assert value(ours(*exprs).subs(A, B * C), point) == expected
    assert value(ours(*exprs).xreplace({A: B * C}), point) == expected


@fast
@given(several, extremes)
def test_form_is_canonical(exprs, kinds):
    ours, _ = kinds
    built = ours(*exprs)
    assert ours(*reversed(exprs)) == built
    assert hash(ours(*reversed(exprs))) == hash(built)
    assert not isinstance(built, Max | Min) or built.func(*built.args) == built
    assert pickle.loads(pickle.dumps(built)) == built
    assert copy.copy(built) == copy.deepcopy(built) == built
    assert ours(built, built) == built
    assert not built.atoms(sympy.Float)


def test_arguments_are_flattened_and_pruned():
    assert Max(B * D, 2 * B * D, A * B) == Max(A * B, 2 * B * D)
    assert str(Max(B * D, 2 * B * D, A * B)) == "Max(A*B, 2*B*D)"
    assert Max(A, Max(B, C)) == Max(A, B, C)
    assert Max(A, Max(B, C).subs(B, D)) == Max(A, C, D)
    assert Max(A, B).subs(B, Max(C, D)) == Max(A, C, D)
    assert Max(3, 5) == 5
    assert Max(A) == A
    assert Max(A, 1) == A
    assert Max(A, B).free_symbols == {A, B}
    assert Max(A, B).is_positive
    assert Max(A, B).is_integer
    assert Max(A, B).is_real


@each("wrong", ["A", None, True, [A], sympy.true, A > 1, sympy.nan, sympy.I, sympy.oo, sympy.zoo, object])
def test_non_formula_arguments_raise(wrong):
    with pytest.raises(ShapeError):
        Max(A, wrong)
    with pytest.raises(ShapeError):
        Max()


# -- derivatives -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(sums(0, 3, 3, st.integers(-3, 5)), min_size=2, max_size=4), extremes, points())
def test_derivatives_away_from_ties(exprs, kinds, point):
    ours, python = kinds
    values = [value(e, point) for e in exprs]
    assume(values.count(python(values)) == 1)
    expected = value(sympy.expand(sympy.diff(exprs[values.index(python(values))], A)), point)
    slope = ours(*exprs).diff(A)
    assert at(slope, point) == exactly(expected)
    assert slope.subs({s: point[s.name] for s in SYMBOLS}) == exactly(expected)
    numbers = [point[s.name] for s in SYMBOLS]
    for modules in ("numpy", "math"):
        assert float(sympy.lambdify(SYMBOLS, slope, modules)(*numbers)) == pytest.approx(float(expected))
    # a difference quotient small enough that no other argument takes over
    step = 1e-6
    call = sympy.lambdify(SYMBOLS, ours(*exprs), "math")
    ahead, behind = (call(numbers[0] + h, *numbers[1:]) for h in (step, -step))
    gap = min(abs(v - python(values)) for v in values if v != python(values))
    if gap > 1:
        assert (ahead - behind) / (2 * step) == pytest.approx(
            float(expected), rel=1e-3, abs=1e-2 * max(1, abs(python(values)))
        )


def test_derivative_broadcasts_over_arrays():
    slope = sympy.lambdify((A, B), Max(A * B, B**2, 5 * A).diff(A), "numpy")
    a, b = np.arange(1.0, 5).reshape(4, 1), np.arange(1.0, 9)
    expected = np.select(
        [a * b == np.maximum(np.maximum(a * b, b**2), 5 * a), 5 * a >= np.maximum(a * b, b**2)], [b + 0 * a, 5.0], 0.0
    )
    assert np.array_equal(slope(a, b), expected)
    assert Max(A, B).diff(C) == 0
    assert Max(A, B).diff(A).diff(A) == 0
    assert Max(A**2, B).diff(A).diff(A).subs({A: 3, B: 1}) == 2
    assert (C * Max(A, B) ** 2).diff(A).subs({A: 3, B: 1, C: 2}) == 12


# -- sympy's own functions ---------------------------------------------------------------------------------------------


@fast
@given(several, extremes, points())
def test_lambdify_on_numpy_and_math(exprs, kinds, point):
    ours, python = kinds
    built, numbers = ours(*exprs), [point[s.name] for s in SYMBOLS]
    expected = float(python(value(e, point) for e in exprs))
    assert float(sympy.lambdify(SYMBOLS, built, "math")(*numbers)) == pytest.approx(expected)
    arrays = [np.array([n, n], dtype=float) for n in numbers]
    assert np.allclose(sympy.lambdify(SYMBOLS, built, "numpy")(*arrays), expected)


def test_lambdify_with_more_arguments_than_python_nesting_limit():
    rows = Max(*(k * A + (300**2 - k**2) * B for k in range(1, 210)))
    assert len(rows.args) == 209  # each lies above the means of its neighbours
    call = sympy.lambdify((A, B), rows, "numpy")
    assert call(np.array([1.0]), np.array([2.0]))[0] == int(rows.subs({A: 1, B: 2}))


def test_printed_forms():
    m = Max(A * B, C)
    assert str(m) == repr(m) == "Max(A*B, C)"
    assert str(2 * m + 1) == "2*Max(A*B, C) + 1"
    assert str(m**2) == "Max(A*B, C)**2"
    assert sympy.latex(m) == r"\max\left(A B, C\right)"
    assert sympy.latex(Min(A, B) ** 2) == r"\min\left(A, B\right)^{2}"
    assert sympy.pretty(m, use_unicode=False) == "Max(A*B, C)"
    assert sympy.ccode(m)
    assert sympy.pycode(m) == "max(A*B, C)"


def test_rewrite_and_evalf_keep_the_value():
    m = Max(A * B, C)
    rewritten = m.rewrite(sympy.Max)
    assert type(rewritten) is sympy.Max
    assert rewritten.subs({A: 2, B: 3, C: 5}) == 6
    assert m.evalf() == m
    assert float(m.evalf(subs={A: 2, B: 3, C: 5})) == 6.0
    assert Max(sympy.sqrt(2), sympy.Rational(3, 2)).evalf() == 1.5


def test_sympy_functions_keep_the_value():
    m, point = Max(A * B, C, D**2), {"A": 3, "B": 4, "C": 7, "D": 2}
    number = 12
    for name, expr, expected in [
        ("expand", sympy.expand((A + 1) * (m + B)), 4 * (number + 4)),
        ("simplify", sympy.simplify(m * A + m), number * 4),
        ("collect", sympy.collect(A * m + B * m, m), number * 7),
        ("factor", sympy.factor(A * m + B * m), number * 7),
        ("together", sympy.together(m / A + 1), 5),
        ("cancel", sympy.cancel((A * m + A) / A), number + 1),
        ("subexpressions", sympy.cse(m + A)[1][0].subs(list(reversed(sympy.cse(m + A)[0]))), number + 3),
        ("doit", m.doit(), number),
        ("nsimplify", sympy.nsimplify(m), number),
        ("Piecewise", sympy.Piecewise((m, A > 2), (B, True)), number),
        ("sympy.Max", sympy.Max(m, A), number),
        ("sympy.Min", sympy.Min(m, 5), 5),
        ("Abs", abs(m), number),
        ("replace", m.replace(D, C), 49),
        ("ordered", sorted([m, A, Min(A, B)], key=sympy.default_sort_key)[-1] * 0 + m, number),
    ]:
        assert expr.subs({s: point[s.name] for s in SYMBOLS}) == expected, name
    assert sympy.solve(D - m.subs(D, 1), D) == [m.subs(D, 1)]
    assert m.subs(sympy.Symbol("A"), 5) == m, "another symbol of that name"
    assert m.subs(A * B, C) == Max(C, D**2)


def test_user_floats_are_kept():
    m = Max(A, B)
    assert (0.5 * m + 1.5).subs({A: 3, B: 4}) == 3.5
    assert Max(A, 2.5).subs(A, 2) == 2.5
    assert m.subs(A, 0.5).subs(B, 3) == 3
    assert cg.evaluate(0.5 * m, A=3, B=4) == 2.0
    assert Max(2.5, 1) == 2.5
    with pytest.raises(ShapeError, match=r"Max\(2.5, A\)': expected an exact size"):
        poly(Max(A, 2.5))


# -- owners and regimes ------------------------------------------------------------------------------------------------

OWNED = Max(A * B, C, D**2, owners=[Owner("up", "forward"), Owner("down", "backward"), Owner(None, None)])


def owners(m):
    return {str(r.formula): (r.op, r.phase) for r in regimes(m)}


def test_owners_follow_their_arguments():
    expected = {"A*B": ("up", "forward"), "C": ("down", "backward"), "D**2": (None, None)}
    assert owners(OWNED) == expected
    for same in (
        pickle.loads(pickle.dumps(OWNED)),
        copy.deepcopy(OWNED),
        OWNED.func(*OWNED.args),
        Max(OWNED),
        poly(3 * OWNED + A).expr.atoms(Max).pop(),
        sympy.expand(2 * OWNED).atoms(Max).pop(),
        OWNED.subs(sympy.Symbol("x"), 1),
    ):
        assert same == OWNED
        assert owners(same) == expected
    assert owners(OWNED.subs(A, 2)) == {"2*B": ("up", "forward"), "C": ("down", "backward"), "D**2": (None, None)}
    assert owners(OWNED.xreplace({D: B, C: D})) == {
        "A*B": ("up", "forward"),
        "D": ("down", "backward"),
        "B**2": (None, None),
    }
    assert owners(Max(OWNED, A**5))["A**5"] == (None, None)
    assert Max(A * B, C, D**2) != OWNED
    assert {OWNED, Max(A * B, C, D**2)} == {Max(*OWNED.args, owners=OWNED.owners), Max(A * B, C, D**2)}
    assert str(OWNED + Max(A * B, C, D**2)) == "Max(A*B, C, D**2) + Max(A*B, C, D**2)"


@each(
    ("formula", "expected"),
    [
        (Max(A, B), [A, B]),
        (Min(A, B), [A, B]),
        (1 + Max(A, B), [A + 1, B + 1]),
        (C * Max(A, B), [A * C, B * C]),
        (3 * C * Max(A, B) + D, [3 * A * C + D, 3 * B * C + D]),
        (Max(A, C + Min(B, D)), [A, C + Min(B, D)]),
        (A * B + 1, [A * B + 1]),
        (5, [5]),
        (2.5, [2.5]),
    ],
)
def test_regimes(formula, expected):
    assert [r.formula for r in regimes(formula)] == expected


def test_regimes_of_a_non_formula_raise():
    with pytest.raises(ShapeError, match="expected a number or a formula"):
        regimes("Max(A, B)")


def test_extremum_accepts_pruned_candidates():
    minimum = extremum([(poly(A), Owner("a")), (poly(B), Owner("b"))], largest=False)
    assert minimum == Min(A, B, owners=[Owner("a"), Owner("b")])
    assert extremum([(poly(A), Owner("a"))]) == A


# -- size --------------------------------------------------------------------------------------------------------------


def test_large_max_supports_all_operations():
    m, point = big(), {n: i + 2 for i, n in enumerate("ABCDEFGH")}
    bound = {s: point[s.name] for s in m.free_symbols}
    expected = max(value(a, point) for a in m.args)
    assert len(m.args) > 15
    assert m.subs(bound) == m.xreplace({s: sympy.Integer(v) for s, v in bound.items()}) == expected
    assert (A * m + 1).subs(bound) == 2 * expected + 1
    assert pickle.loads(pickle.dumps(m)) == m == m.func(*m.args)
    order = sorted(m.free_symbols, key=str)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sympy.lambdify(order, m, "numpy")(*(float(bound[s]) for s in order)) == expected
    assert m.diff(A).subs(bound) == value(
        sympy.expand(next(a for a in m.args if value(a, point) == expected).diff(A)), point
    )
    # a derivative holds each argument once, not one copy per argument
    assert m.diff(A).count_ops() < 4 * m.count_ops()
    assert math.isclose(cg.evaluate(m, **point), expected)
    assert len(regimes(1 + m)) == len(m.args)


# -- derivatives -------------------------------------------------------------------------------------------------------


@each(
    ("formula", "by", "sizes", "expected"),
    [
        (Max(2**A, 16 * B), A, {A: 10, B: 3}, 1024 * sympy.log(2)),  # 1024 > 48
        (Max(2**A, 16 * B), A, {A: 3, B: 5}, 0),
        (Min(2**A, 16 * B), A, {A: 10, B: 3}, 0),
        (Max(A**3 * B, A * D), A, {A: 2, B: 3, D: 5}, 3 * 2**2 * 3),
        (Max(A**3 * B, A * D), A, {A: 1, B: 3, D: 5}, 5),
        (Min(A**3 * B, A * D), A, {A: 2, B: 3, D: 5}, 5),
        (Max(A / B, D), B, {A: 7, B: 2, D: 3}, sympy.Rational(-7, 4)),
        (Max(A**2 * Min(B, C), A * D), A, {A: 3, B: 5, C: 7, D: 2}, 2 * 3 * 5),
        (Max(A**2 * Min(B, C), A * D), B, {A: 3, B: 5, C: 7, D: 2}, 9),
        (Max(A**2 * Min(B, C), A * D), C, {A: 3, B: 5, C: 7, D: 2}, 0),
        (Max(2.5 * A, B), A, {A: 2, B: 3}, 2.5),
        (Max(2.5 * A, B), A, {A: 1, B: 3}, 0),
    ],
)
def test_derivative_follows_the_active_argument(formula, by, sizes, expected):
    slope = formula.diff(by)
    assert sympy.simplify(slope.subs(sizes) - expected) == 0
    first, *others = sizes.items()
    assert sympy.simplify(slope.subs(dict([first])).subs(dict(others)) - expected) == 0


def test_derivative_at_ties_follows_first_argument():
    for formula in (Max(A, B), Min(A, B)):
        first = formula.args[0]
        assert formula.diff(first).subs({A: 3, B: 3}) == 1
        assert formula.diff(formula.args[1]).subs({A: 3, B: 3}) == 0


def test_derivative_is_real_and_survives_sympy_operations():
    slope = Max(A, B).diff(A)
    assert slope.is_real is True
    assert sympy.simplify(slope) == slope
    assert slope.subs(sympy.floor(C / 2), 3) == slope  # substituting an absent term changes nothing
    assert slope.subs(C, 3) == slope
    assert (slope + 1).subs({A: 5, B: 2}) == 2


def test_second_derivative_follows_the_active_argument():
    slope = Max(A**3, B * A**2).diff(A).diff(A)
    assert slope.subs({A: 5, B: 2}) == 6 * 5
    assert slope.subs({A: 2, B: 5}) == 2 * 5


# -- assumptions about extrema -----------------------------------------------------------------------------------------


@each(
    ("formula", "positive"),
    [
        (Max(A - 5, B), True),  # one positive argument suffices
        (Min(A - 5, B), None),
        (Max(A - 5, B - 5), None),
        (Min(A, B), True),
        (Max(A, B), True),
    ],
)
def test_max_needs_one_positive_argument_and_min_all(formula, positive):
    assert formula.is_positive is positive


@each(
    ("formula", "whole"), [(Max(A / 2, B), None), (Max(A, B), True), (Min(A / 2, B / 2), None), (Min(A, 3 * B), True)]
)
def test_extremum_is_integer_if_all_arguments_are(formula, whole):
    assert formula.is_integer is whole


# -- sympy's own tools -------------------------------------------------------------------------------------------------


def test_ownerless_extremum_rebuilds_from_its_class():
    assert Max(A, B).func is Max
    assert Min(A, B).func is Min
    assert Max(A, B).func(A, B) == Max(A, B)


@pytest.mark.parametrize("owners", [[Owner("up", "forward"), Owner()], [Owner(), Owner(None, "backward")]])
def test_owned_extremum_rebuilds_with_owners(owners):
    formula = Max(A, B, owners=owners)
    assert formula.func(*formula.args).owners == tuple(owners)
    assert formula.func(*formula.args) == formula


def test_extrema_with_different_owners_differ():
    made = {
        Max(A, B, owners=[Owner(op, phase), Owner("down", "forward")])
        for op in ("up", None)
        for phase in ("forward", "backward", None)
    }
    assert len(made) == 6


def test_symbols_and_subexpressions_are_replaced_simultaneously():
    formula = Max(A * D, sympy.floor(B / 2))
    assert formula.xreplace({A: C, sympy.floor(B / 2): 7 * C}) == Max(C * D, 7 * C)
    assert (1 + formula).xreplace({formula: C}) == C + 1


def test_rewrite_returns_sympy_class():
    assert type(Max(A, B).rewrite(sympy.Max)) is type(sympy.Max(A, B))
    assert type(Min(A, B).rewrite(sympy.Min)) is type(sympy.Min(A, B))
    for other in (sympy.Min, sympy.Abs):
        assert Max(A, B).rewrite(other) == Max(A, B)
        assert type(Max(A, B).rewrite(other)) is Max


def test_latex_of_a_power_shows_exponent():
    assert sympy.latex(Max(A, B)) == r"\max\left(A, B\right)"
    assert sympy.latex(Min(A, B) ** 2) == r"\min\left(A, B\right)^{2}"


@pytest.mark.parametrize(("kind", "low", "high"), [(Max, 2.5, 7), (Min, 2.5, 2)])
def test_floats_are_compared_once_symbols_are_bound(kind, low, high):
    formula = kind(A, sympy.Float(2.5))
    assert type(formula) is kind
    assert formula.free_symbols == {A}
    for size in (2, 7):
        assert float(formula.subs(A, size)) == (max if kind is Max else min)(size, 2.5)
    assert {float(formula.subs(A, 2)), float(formula.subs(A, 7))} == {low, float(high)}
