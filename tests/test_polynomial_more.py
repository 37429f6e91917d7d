"""The algebra of costs at its edges: values by plain arithmetic, limits at and beyond their last allowed case."""

import math
from fractions import Fraction

import numpy as np
import pytest
import sympy
from algebra import A, B, C, mixed, points, sums
from hypothesis import given, settings
from hypothesis import strategies as st

from costgraph import ShapeError
from costgraph.algebra.generators import HIGHEST_EXPONENT
from costgraph.algebra.polynomial import ONE, ZERO, as_poly, poly, power
from costgraph.testing import value

fast = settings(max_examples=60, deadline=None)


def at(p, **sizes):
    """Value of a polynomial at numbers."""
    found = p.bind({k: as_poly(v) for k, v in sizes.items()}).constant
    assert found is not None
    return Fraction(found)


# -- values of generators --------------------------------------------------------------------------------------------


@fast
@given(sums(), points())
def test_evaluating_at_integers_is_exact(x, point):
    found = poly(x).evaluate(point.__getitem__)
    assert found == value(x, point)
    assert isinstance(found, int | Fraction)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (A / B**2, Fraction(3, 25)),
        (A**2 * B + 1, 46),
        (1 / A - 1 / B, Fraction(2, 15)),
        (A * B / C, Fraction(15, 7)),
        (7 * A**-3, Fraction(7, 27)),
        (sympy.Integer(11), 11),
        (sympy.Integer(0), 0),
    ],
)
@pytest.mark.parametrize("kind", [int, Fraction, float, np.float64])
def test_evaluating_gives_numbers_of_the_kind_that_it_was_given(formula, expected, kind):
    sizes = {"A": kind(3), "B": kind(5), "C": kind(7)}
    found = poly(formula).evaluate(sizes.__getitem__)
    if kind in (int, Fraction):
        assert found == expected
    else:
        assert found == pytest.approx(float(expected), rel=1e-15)


def test_evaluating_takes_arrays_and_asks_for_each_generator_once():
    asked = []

    def sizes(key):
        asked.append(key)
        return {"A": np.array([1.0, 2.0]), "B": np.array([4.0, 8.0])}[key]

    found = poly(A**2 + A * B + A / B).evaluate(sizes)
    np.testing.assert_array_equal(found, [1 + 4 + 0.25, 4 + 16 + 0.25])
    assert sorted(asked) == ["A", "B"]


# -- numbers of other kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), Fraction(3)])
def test_arithmetic_takes_whole_numbers_of_every_kind(three):
    assert poly(A) + three == poly(A + 3)
    assert three - poly(A) == poly(3 - A)
    assert poly(A) * three == poly(3 * A)
    assert poly(A) / three == poly(A / 3)
    assert as_poly(three) == 3
    assert as_poly(three).constant == 3


def test_sums_that_are_equal_have_one_sort_key_and_others_another():
    keys = [poly(f).sort_key() for f in (A + B, B + A, A - B, A + 2 * B, A * B, A / B, sympy.Integer(3))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6
    backwards = keys[:0:-1]
    assert sorted(keys[1:]) == sorted(backwards)


def test_a_number_is_found_in_a_dictionary_by_its_polynomial():
    assert {3: "three", Fraction(1, 2): "half", 0: "zero"}[poly(3)] == "three"
    assert {3: "three", Fraction(1, 2): "half"}[poly(Fraction(1, 2))] == "half"
    assert {0: "zero"}[poly(A) - A] == "zero"


# -- division ----------------------------------------------------------------------------------------------------------


def test_zero_divided_by_a_sum_is_zero():
    assert ZERO / poly(A + B) == ZERO
    assert (ZERO / poly(A - B)).terms == {}


@fast
@given(sums(0, 2, 3, st.integers(1, 9)), points())
def test_a_reciprocal_times_its_sum_has_the_value_one(x, point):
    p = poly(x)
    if len(p.terms) > 1:
        assert at(ONE / p * p, **point) == 1
        assert at(ONE / (p * -6 * A) * p, **point) == Fraction(-1, 6 * point["A"])


def test_what_is_left_of_a_division_keeps_it_from_being_exact():
    for above, below in ((A**2 + 1, A + 1), (A * B + 1, A + B), (A**2 * B + A, A * B - 1)):
        p = poly(above) / poly(below)
        assert any(k[0] == "~" for k in p.generators())
        assert at(p, A=3, B=5) == Fraction(int(above.subs({A: 3, B: 5})), int(below.subs({A: 3, B: 5})))


# -- one form ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (sympy.floor(A * (B + 1) / 2), sympy.floor((A * B + A) / 2)),
        (sympy.ceiling((A + 1) * (A - 1) / 3), sympy.ceiling((A**2 - 1) / 3)),
        (sympy.floor(A * (B + C) / (2 * A)), sympy.floor((B + C) / 2)),
        (sympy.floor((2 * A + 2 * B) / 4), sympy.floor((A + B) / 2)),
        (sympy.floor(sympy.floor(A * (B + 1) / 2) / 3), sympy.floor(sympy.floor((A * B + A) / 2) / 3)),
    ],
)
def test_what_is_rounded_has_one_form_however_it_was_written(one, other):
    assert poly(one) == poly(other)
    assert poly(one).terms == poly(other).terms


@fast
@given(mixed(), points())
def test_a_symbol_bound_inside_an_atom_is_bound_in_the_formula_too(x, point):
    names = {k: v for k, v in point.items() if k == "A"}
    half = poly(x).bind({k: as_poly(v) for k, v in names.items()})
    assert "A" not in half.names()
    assert at(half, **point) == value(x, point)


# -- powers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [-HIGHEST_EXPONENT, -65, -1, 0, 1, 65, HIGHEST_EXPONENT])
def test_powers_of_one_term_have_exponents_up_to_the_limit(exponent):
    assert (poly(A) ** exponent).expr == A**exponent
    with pytest.raises(ShapeError, match="expected an exponent"):
        poly(A) ** (HIGHEST_EXPONENT + 1)
    with pytest.raises(ShapeError, match="expected an exponent"):
        poly(A) ** -(HIGHEST_EXPONENT + 1)


def test_powers_of_a_sum_have_exponents_up_to_64():
    p = poly(A + 1) ** 64
    assert len(p.terms) == 65
    assert p.terms[(("A", 32),)] == math.comb(64, 32)
    for exponent in (65, -65):
        with pytest.raises(ShapeError, match="expected an exponent between -64 and 64"):
            poly(A + 1) ** exponent
    assert at(poly(A + 1) ** -64, A=1) == Fraction(1, 2**64)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ((A**2 * B) ** C, (9 * 5) ** 3),
        ((A**3 / B) ** C, Fraction(27, 5) ** 3),
        ((A / (2 * B)) ** C, Fraction(3, 10) ** 3),
        ((1 - 1 / A) ** (-C), Fraction(2, 3) ** -3),
        ((1 - 1 / A) ** (-2 * C), Fraction(2, 3) ** -6),
        ((1 - 1 / A) ** (1 - C), Fraction(2, 3) ** -2),
        ((A + B) ** (-C), Fraction(1, 8**3)),
        (2 ** (C - 7), Fraction(1, 16)),
        (A ** (2 * C - B), 3),
        ((-2) ** C, -8),
        ((-2) ** (C + 1), 16),
        (sympy.Rational(3, 7) ** C, Fraction(27, 343)),
        (sympy.Rational(1, 7) ** (C - 1), Fraction(1, 49)),
    ],
)
def test_powers_with_symbols_in_the_exponent_have_the_values_of_python(formula, expected):
    assert at(poly(formula), A=3, B=5, C=3) == expected
    # bound one after the other
    half = poly(formula).bind({"C": as_poly(3)})
    assert at(half, A=3, B=5) == expected


def test_no_product_holds_a_coefficient_of_zero():
    assert (poly(A + 1) * poly(A - 1)).terms == {(("A", 2),): 1, (): -1}
    assert (poly(A + B) * poly(A - B)).generators() == {"A", "B"}
    assert len((poly(A + B) * poly(A - B)).terms) == 2


def test_half_an_exponent_of_a_square_is_a_whole_one():
    assert at(power(as_poly(Fraction(3, 7)), poly(C) / 2), C=4) == Fraction(9, 49)
    assert at(power(as_poly(4), poly(C) + Fraction(1, 2)), C=3) == 128  # 4**3 * 2
    assert at(power(as_poly(4), poly(C) / 2), C=3) == 8
    assert at(power(as_poly(9), poly(C) - Fraction(1, 2)), C=2) == 27


@pytest.mark.parametrize("base", [-2, Fraction(-1, 3), -1])
def test_a_negative_base_with_half_an_exponent_is_refused(base):
    for exponent in (poly(C) / 2, poly(C) + Fraction(1, 2), poly(C) / 2 + poly(A)):
        with pytest.raises(ShapeError, match="expected a base that is not negative"):
            power(as_poly(base), exponent)
    assert at(power(as_poly(base), poly(C)), C=3) == Fraction(base) ** 3


@pytest.mark.parametrize("exponent", [-1, -2, -(10**9)])
def test_zero_to_a_negative_power_is_refused(exponent):
    with pytest.raises(ShapeError, match="expected a base that is not zero"):
        power(ZERO, as_poly(exponent))


def test_powers_of_zero_and_one_stay_exact_however_large_the_exponent():
    huge = 10**9
    assert power(ZERO, as_poly(huge)) == 0
    assert power(ZERO, ZERO) == 1
    assert power(ONE, as_poly(-huge)) == 1
    assert power(as_poly(-1), as_poly(huge)) == 1
    assert power(as_poly(-1), as_poly(huge + 1)) == -1


def test_large_powers_of_fractions_are_those_of_floats():
    close = Fraction(1_000_001, 1_000_000)
    found = power(as_poly(close), as_poly(100_000)).constant
    assert float(found) == pytest.approx(math.exp(100_000 * math.log1p(1e-6)), rel=1e-9)
    assert power(as_poly(Fraction(1, 3)), as_poly(10**6)) == 0  # below every float
    assert power(as_poly(3), as_poly(-(10**6))) == 0
    for base, exponent in ((Fraction(3, 2), 10**6), (Fraction(2, 3), -(10**6)), (3, 10**6)):
        with pytest.raises(ShapeError, match="bits is no size of a tensor"):
            power(as_poly(base), as_poly(exponent))


def test_a_number_of_many_bits_is_exact_up_to_the_limit():
    assert power(as_poly(3), as_poly((1 << 17) - 1)) == 3 ** ((1 << 17) - 1)  # two bits each
    assert power(as_poly(3), as_poly(1 << 17)) == 3 ** (1 << 17)
    with pytest.raises(ShapeError, match="a power of 262146 bits"):
        power(as_poly(3), as_poly((1 << 17) + 1))
    near = Fraction(5, 4)  # three bits each
    assert power(as_poly(near), as_poly(87_381)) == near**87_381
    with pytest.raises(ShapeError, match="a power of 262146 bits"):
        power(as_poly(near), as_poly(87_382))
