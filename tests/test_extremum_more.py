"""Derivatives and assumptions of Max and Min, and how they take part in sympy's own tools."""

import pytest
import sympy
from algebra import A, B, C, D

from costgraph import Max, Min
from costgraph.algebra.extremum import Owner

# -- derivatives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
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
def test_the_derivative_is_that_of_the_argument_that_is_the_extremum(formula, by, sizes, expected):
    slope = formula.diff(by)
    assert sympy.simplify(slope.subs(sizes) - expected) == 0
    first, *others = sizes.items()
    assert sympy.simplify(slope.subs(dict([first])).subs(dict(others)) - expected) == 0


def test_of_equal_arguments_the_first_one_has_the_derivative():
    for formula in (Max(A, B), Min(A, B)):
        first = formula.args[0]
        assert formula.diff(first).subs({A: 3, B: 3}) == 1
        assert formula.diff(formula.args[1]).subs({A: 3, B: 3}) == 0


def test_a_derivative_is_real_and_survives_sympys_tools():
    slope = Max(A, B).diff(A)
    assert slope.is_real is True
    assert sympy.simplify(slope) == slope
    assert slope.subs(sympy.floor(C / 2), 3) == slope  # what does not occur
    assert slope.subs(C, 3) == slope
    assert (slope + 1).subs({A: 5, B: 2}) == 2


def test_the_second_derivative_is_that_of_the_same_argument():
    slope = Max(A**3, B * A**2).diff(A).diff(A)
    assert slope.subs({A: 5, B: 2}) == 6 * 5
    assert slope.subs({A: 2, B: 5}) == 2 * 5


# -- what is known of them ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "positive"),
    [
        (Max(A - 5, B), True),  # one that is positive is enough
        (Min(A - 5, B), None),
        (Max(A - 5, B - 5), None),
        (Min(A, B), True),
        (Max(A, B), True),
    ],
)
def test_a_maximum_is_positive_with_one_argument_a_minimum_with_all(formula, positive):
    assert formula.is_positive is positive


@pytest.mark.parametrize(
    ("formula", "whole"), [(Max(A / 2, B), None), (Max(A, B), True), (Min(A / 2, B / 2), None), (Min(A, 3 * B), True)]
)
def test_whole_numbers_only_where_all_arguments_are(formula, whole):
    assert formula.is_integer is whole


# -- sympy's own tools -------------------------------------------------------------------------------------------------


def test_without_owners_it_is_rebuilt_by_its_own_class():
    assert Max(A, B).func is Max
    assert Min(A, B).func is Min
    assert Max(A, B).func(A, B) == Max(A, B)


@pytest.mark.parametrize("owners", [[Owner("up", "forward"), Owner()], [Owner(), Owner(None, "backward")]])
def test_with_an_owner_it_is_rebuilt_with_it(owners):
    formula = Max(A, B, owners=owners)
    assert formula.func(*formula.args).owners == tuple(owners)
    assert formula.func(*formula.args) == formula


def test_formulas_of_other_ops_or_phases_differ():
    made = {
        Max(A, B, owners=[Owner(op, phase), Owner("down", "forward")])
        for op in ("up", None)
        for phase in ("forward", "backward", None)
    }
    assert len(made) == 6


def test_symbols_and_parts_are_replaced_at_once():
    formula = Max(A * D, sympy.floor(B / 2))
    assert formula.xreplace({A: C, sympy.floor(B / 2): 7 * C}) == Max(C * D, 7 * C)
    assert (1 + formula).xreplace({formula: C}) == C + 1


def test_rewriting_gives_sympys_class_where_it_is_asked_for():
    assert type(Max(A, B).rewrite(sympy.Max)) is type(sympy.Max(A, B))
    assert type(Min(A, B).rewrite(sympy.Min)) is type(sympy.Min(A, B))
    for other in (sympy.Min, sympy.Abs):
        assert Max(A, B).rewrite(other) == Max(A, B)
        assert type(Max(A, B).rewrite(other)) is Max


def test_a_power_has_its_exponent_in_latex():
    assert sympy.latex(Max(A, B)) == r"\max\left(A, B\right)"
    assert sympy.latex(Min(A, B) ** 2) == r"\min\left(A, B\right)^{2}"


@pytest.mark.parametrize(("kind", "low", "high"), [(Max, 2.5, 7), (Min, 2.5, 2)])
def test_floats_beside_symbols_are_compared_once_they_are_numbers(kind, low, high):
    formula = kind(A, sympy.Float(2.5))
    assert type(formula) is kind
    assert formula.free_symbols == {A}
    for size in (2, 7):
        assert float(formula.subs(A, size)) == (max if kind is Max else min)(size, 2.5)
    assert {float(formula.subs(A, 2)), float(formula.subs(A, 7))} == {low, float(high)}
