"""Cost polynomials against sympy and against exact Fractions at points."""

import math
from fractions import Fraction

import numpy as np
import pytest
import sympy
from algebra import A, B, C, D, atoms, mixed, outputs_under_hash_seeds, points, sums
from each import each
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from limits import limited

from costgraph import CostGraphError, Max, Min, ShapeError, dims
from costgraph.algebra.polynomial import HIGHEST_EXPONENT, ONE, ZERO, Poly, as_poly, generator, poly, power, total
from costgraph.testing import value

fast = settings(max_examples=40, deadline=None)


def numbers(point):
    return {k: as_poly(v) for k, v in point.items()}


def at(p: Poly, point) -> Fraction:
    found = p.bind(numbers(point)).constant
    assert found is not None
    return Fraction(found)


# -- the ring ----------------------------------------------------------------------------------------------------------


@fast
@given(sums(), sums(), sums())
def test_ring_laws_against_sympy(x, y, z):
    p, q, r = poly(x), poly(y), poly(z)
    assert (p + q).expr == sympy.expand(x + y)
    assert (p - q).expr == sympy.expand(x - y)
    assert (p * q).expr == sympy.expand(x * y)
    assert p + q == q + p
    assert p * q == q * p
    assert (p + q) + r == p + (q + r)
    assert (p * q) * r == p * (q * r)
    assert p * (q + r) == p * q + p * r
    assert p - p == ZERO == p * 0
    assert p * ONE == p + ZERO == p
    assert total([p, q, r]) == p + q + r


@fast
@given(sums(), st.integers(0, 4))
def test_powers_against_sympy(x, n):
    assert (poly(x) ** n).expr == sympy.expand(x**n)


@fast
@given(mixed(), mixed(), points())
def test_arithmetic_with_atoms_has_the_right_values(x, y, point):
    p, q = poly(x), poly(y)
    a, b = value(x, point), value(y, point)
    assert at(p, point) == a
    assert at(p + q, point) == a + b
    assert at(p * q, point) == a * b
    assert at(p - 3, point) == a - 3
    assert at(2 - p, point) == 2 - a


@fast
@given(mixed())
def test_the_expression_is_the_same_polynomial(x):
    assert poly(poly(x).expr) == poly(x)


def test_coefficients_are_nonzero_and_integers_are_ints():
    p = (poly(A) + 1) * (poly(A) - 1) + Fraction(4, 2) * poly(B)
    assert p.terms == {(("A", 2),): 1, (): -1, (("B", 1),): 2}
    assert {type(c) for c in p.terms.values()} == {int}


# -- division ----------------------------------------------------------------------------------------------------------


@fast
@given(sums(), sums())
def test_division_of_a_product_is_exact(x, y):
    p, q = poly(x), poly(y)
    assume(q.terms)
    assert (p * q) / q == p


@each(
    ("above", "below", "expected"),
    [
        (A**3 - 1, A - 1, A**2 + A + 1),  # more terms than in the dividend
        ((A + B) * (A - B) * (A * B + 1), A - B, A**2 * B + A * B**2 + A + B),
        (A * B + C / D, C, A * B / C + 1 / D),
        (6 * A * B, sympy.Rational(3, 2) * B**2, 4 * A / B),
        ((A / B + B / A) * (A - 1 / B), A / B + B / A, A - 1 / B),
        (sympy.Integer(0), A + B, 0),
    ],
)
def test_exact_quotients(above, below, expected):
    assert poly(above) / poly(below) == poly(expected)


@fast
@given(sums(), sums(0, 2, 3, st.integers(1, 9)), points())
def test_an_inexact_quotient_is_an_atom_with_the_right_value(x, y, point):
    assume(y != 0)
    assert at(poly(x) / poly(y), point) == value(x, point) / value(y, point)


def test_reciprocal_of_a_sum_is_canonical():
    for same in (1 / (2 * A * B + 2 * A * C), 1 / (A * (2 * B + 2 * C)), -1 / (-2 * A * B - 2 * A * C)):
        assert poly(same) == poly(1 / (B + C)) / poly(2 * A)
    p = poly(A) / poly(B + C)
    assert p.expr == A / (B + C)
    assert poly(1 / (B + C) ** 3) == poly(1 / (B + C)) ** 3
    assert at(poly(1 / (B + C) ** 3), {"B": 2, "C": 3}) == Fraction(1, 125)


@each("divisor", [0, poly(A) - poly(A), Fraction(0)])
def test_division_by_zero_is_refused(divisor):
    with pytest.raises(ShapeError, match=r"\(A\*B\) / 0: expected a divisor that is not zero"):
        poly(A * B) / divisor


def test_inexact_division_ends_quickly():
    with limited():
        wide = poly((A + B + C + D) ** 8)
        wide / poly(A * B + C + 7)


# -- powers ------------------------------------------------------------------------------------------------------------


@each(
    ("one", "other"),
    [
        (2 * 2**C, 2 ** (C + 1)),
        ((2**C) ** 2, 2 ** (2 * C)),
        (B**C / B, B ** (C - 1)),
        (B**C * B**D, B ** (C + D)),
        ((1 - A / B) ** C * (1 - A / B) ** C, (1 - A / B) ** (2 * C)),
        (2 ** (-C), sympy.Rational(1, 2) ** C),
        (1 / 2**C, 2 ** (-C)),
        ((2 * B) ** C, 2**C * B**C),
    ],
)
def test_equal_powers_are_equal_polynomials(one, other):
    assert poly(one) == poly(other)
    assert power(poly(B), poly(C)) == poly(B**C)


def test_power_of_zero_keeps_its_value():
    # 0**(T - 1) is 0 for T = 3, whereas 0**T / 0 would be an error
    p = poly((1 - A / B) ** (C - 1))
    assert at(p, {"A": 2, "B": 2, "C": 3}) == 0
    assert at(poly(sympy.floor(A / 2) ** (C - 1)), {"A": 1, "C": 3}) == 0
    with pytest.raises(ShapeError, match="0"):
        at(p * poly(1 / (1 - A / B)), {"A": 2, "B": 2, "C": 3})


def test_binding_huge_powers_is_fast():
    experts = poly(A * (1 - (1 - 2 / A) ** B))
    with limited():
        assert float(at(experts, {"A": 8, "B": 10**12})) == 8.0
        exact = 8 * (1 - Fraction(3, 4) ** 4096)
        assert at(experts, {"A": 8, "B": 4096}) == exact
        with pytest.raises(ShapeError, match="bits is no size of a tensor"):
            at(poly(2**B), {"B": 10**12})


@pytest.mark.parametrize(
    "make",
    [
        lambda: poly(A) ** (10**9),
        lambda: poly(A) ** -(10**9),
        lambda: poly(A + B) ** 65,
        lambda: poly(A ** (10**6)),
        lambda: poly(A**1000) * poly(A**1000),
        lambda: poly((A + B + C + D + 1) ** 64),
        lambda: poly((1 + A) ** 40 * (1 + B) ** 40 * (1 + C) ** 40 * (1 + D) ** 40),
    ],
)
def test_huge_powers_and_products_are_refused_quickly(make):
    with limited(), pytest.raises(ShapeError) as caught:
        make()
    assert len(str(caught.value)) < 400


# -- binding -----------------------------------------------------------------------------------------------------------


@fast
@given(mixed(), points(), st.sets(st.sampled_from(["A", "B", "C", "D"])))
def test_binding_in_two_steps_is_binding_in_one(x, point, first):
    values = numbers(point)
    early = {k: v for k, v in values.items() if k in first}
    late = {k: v for k, v in values.items() if k not in first}
    assert poly(x).bind(early).bind(late) == poly(x).bind(values) == as_poly(value(x, point))


@fast
@given(atoms(), points(9))
def test_symbols_inside_atoms_are_replaced_by_formulas(x, point):
    new = {"A": poly(B + C), "B": poly(2 * A)}  # simultaneously, not one after the other
    inner = {**point, "A": point["B"] + point["C"], "B": 2 * point["A"]}
    assert at(poly(x).bind(new), point) == value(x, inner)


def test_names_and_generators_of_polynomials():
    p = poly(A * sympy.floor(B / 2) + Max(C, D) + 1)
    assert p.names() == {"A", "B", "C", "D"}
    assert {str(generator(k)) for k in p.generators()} == {"A", "floor(B/2)", "Max(C, D)"}


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = [
    (1.5, "1.5"),
    (True, "True"),
    (np.float64(2), "2.0"),
    (np.bool_(True), "True"),
    ("B", "'B'"),
    (b"B", "b'B'"),
    (None, "None"),
    (1j, "1j"),
    (float("inf"), "inf"),
    (float("nan"), "nan"),
    ([1], "[1]"),
    (np.array([1, 2]), "array"),
    (int, "int"),
    (sympy.Float(2.5), "2.5"),
    (sympy.Symbol("B"), "B"),
    (sympy.Symbol("B", positive=True), "B"),
    (sympy.Dummy("B", integer=True, positive=True), "B"),
    (sympy.Symbol("a b", integer=True, positive=True), "a b"),
    (sympy.oo, "oo"),
    (sympy.zoo, "zoo"),
    (sympy.nan, "nan"),
    (sympy.I, "I"),
    (A * sympy.I, "I"),
    (sympy.Matrix([1]), "Matrix"),
    (sympy.MatrixSymbol("M", 2, 2), "M"),
    (sympy.true, "True"),
    (A > 1, "A > 1"),
    (sympy.floor(2.5 * A), "2.5"),
    (sympy.floor(sympy.Symbol("B") / 2), "B"),
    (A**0.5, "0.5"),
    (sympy.log(sympy.Symbol("x", positive=True)), "x"),
    (sympy.sqrt(-A), "I"),
]


@each(("given_value", "named"), REFUSED, ids=[n for _, n in REFUSED])
def test_inexact_sizes_are_refused_by_name(given_value, named):
    with pytest.raises(CostGraphError) as caught:
        poly(given_value)
    assert named in str(caught.value)
    assert "expected" in str(caught.value)
    with pytest.raises(CostGraphError):
        poly(A) * given_value


@each("exact", [3, np.int64(3), np.uint8(3), sympy.Integer(3), Fraction(3), np.array(3)])
def test_all_integer_types_are_sizes(exact):
    assert poly(exact) == 3
    assert type(poly(exact).constant) is int
    assert poly(A) * poly(exact) == poly(3 * A)


# -- identity ----------------------------------------------------------------------------------------------------------


def test_equality_and_hash_match_numbers():
    assert poly(3) == 3
    assert hash(poly(3)) == hash(3)
    assert hash(poly(Fraction(1, 3))) == hash(Fraction(1, 3))
    assert poly(A) != "A"
    assert hash(poly(A + B)) == hash(poly(B + A))
    assert len({poly(A + B), poly(B + A), poly(sympy.Integer(7)), as_poly(7)}) == 2


def test_same_name_gives_same_symbol():
    assert poly(dims("A")) == poly(A) == poly(sympy.Symbol("A", integer=True, positive=True))


def test_text_order_and_pruning_ignore_hash_seed():
    code = (
        "from costgraph import Max, Min, dims\n"
        "from costgraph.algebra.polynomial import poly\n"
        "A, B, C, D = dims('A B C D')\n"
        "p = poly((A + B/C + Max(A*D, B*C, C**2) + Min(A, B) + 2**C)**3)\n"
        "print(p, p.sort_key())\n"
        "from costgraph.algebra.dominance import Relations\n"
        "from costgraph.algebra.dominance import prune\n"
        "from costgraph.notation.grammar import parse_formula as f, parse_relation as r\n"
        "known = Relations(map(r, ['F >= D', 'D == H*K', 'S <= 1024']))\n"
        "texts = ['B*F', 'B*D', 'B*H*K', 'B*S', 'S**2', 'Max(B*D, S*F)', '2*B*floor(S/2)', 'Min(B, S)*F']\n"
        "print([(str(p), t) for p, t in prune([(f(t), t) for t in texts], known)])\n"
    )
    assert len(outputs_under_hash_seeds(code)) == 1


def test_extremes_with_different_owners_are_distinct():
    from costgraph.algebra.extremum import Owner

    mine = Max(A, B, owners=[Owner("a", "forward"), Owner("b", "forward")])
    other = Max(A, B)
    assert poly(mine + 1).expr.atoms(Max).pop().owners == mine.owners
    assert poly(other + 1).expr.atoms(Max).pop().owners == other.owners
    assert poly(Min(A, B)) != poly(Max(A, B))


def value_at(p, **sizes):
    """Return the value of a polynomial at a point."""
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


@each(
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
@each("kind", [int, Fraction, float, np.float64])
def test_evaluation_preserves_number_type(formula, expected, kind):
    sizes = {"A": kind(3), "B": kind(5), "C": kind(7)}
    found = poly(formula).evaluate(sizes.__getitem__)
    if kind in (int, Fraction):
        assert found == expected
    else:
        assert found == pytest.approx(float(expected), rel=1e-15)


def test_array_evaluation_computes_each_generator_once():
    asked = []

    def sizes(key):
        asked.append(key)
        return {"A": np.array([1.0, 2.0]), "B": np.array([4.0, 8.0])}[key]

    found = poly(A**2 + A * B + A / B).evaluate(sizes)
    np.testing.assert_array_equal(found, [1 + 4 + 0.25, 4 + 16 + 0.25])
    assert sorted(asked) == ["A", "B"]


# -- other number types ----------------------------------------------------------------------------------------------


@each("three", [3, np.int64(3), np.uint8(3), Fraction(3)])
def test_arithmetic_accepts_all_integer_types(three):
    assert poly(A) + three == poly(A + 3)
    assert three - poly(A) == poly(3 - A)
    assert poly(A) * three == poly(3 * A)
    assert poly(A) / three == poly(A / 3)
    assert as_poly(three) == 3
    assert as_poly(three).constant == 3


def test_sort_keys_identify_polynomials():
    keys = [poly(f).sort_key() for f in (A + B, B + A, A - B, A + 2 * B, A * B, A / B, sympy.Integer(3))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6
    backwards = keys[:0:-1]
    assert sorted(keys[1:]) == sorted(backwards)


def test_constant_polynomial_is_same_dict_key_as_number():
    assert {3: "three", Fraction(1, 2): "half", 0: "zero"}[poly(3)] == "three"
    assert {3: "three", Fraction(1, 2): "half"}[poly(Fraction(1, 2))] == "half"
    assert {0: "zero"}[poly(A) - A] == "zero"


# -- division ----------------------------------------------------------------------------------------------------------


def test_zero_divided_by_sum_is_zero():
    assert ZERO / poly(A + B) == ZERO
    assert (ZERO / poly(A - B)).terms == {}


@fast
@given(sums(0, 2, 3, st.integers(1, 9)), points())
def test_a_reciprocal_times_its_sum_has_the_value_one(x, point):
    p = poly(x)
    if len(p.terms) > 1:
        assert value_at(ONE / p * p, **point) == 1
        assert value_at(ONE / (p * -6 * A) * p, **point) == Fraction(-1, 6 * point["A"])


def test_division_with_remainder_is_inexact():
    for above, below in ((A**2 + 1, A + 1), (A * B + 1, A + B), (A**2 * B + A, A * B - 1)):
        p = poly(above) / poly(below)
        assert any(k[0] == "~" for k in p.generators())
        assert value_at(p, A=3, B=5) == Fraction(int(above.subs({A: 3, B: 5})), int(below.subs({A: 3, B: 5})))


# -- one form ----------------------------------------------------------------------------------------------------------


@each(
    ("one", "other"),
    [
        (sympy.floor(A * (B + 1) / 2), sympy.floor((A * B + A) / 2)),
        (sympy.ceiling((A + 1) * (A - 1) / 3), sympy.ceiling((A**2 - 1) / 3)),
        (sympy.floor(A * (B + C) / (2 * A)), sympy.floor((B + C) / 2)),
        (sympy.floor((2 * A + 2 * B) / 4), sympy.floor((A + B) / 2)),
        (sympy.floor(sympy.floor(A * (B + 1) / 2) / 3), sympy.floor(sympy.floor((A * B + A) / 2) / 3)),
    ],
)
def test_rounded_expressions_are_canonical(one, other):
    assert poly(one) == poly(other)
    assert poly(one).terms == poly(other).terms


@fast
@given(mixed(), points())
def test_a_symbol_bound_inside_an_atom_is_bound_in_the_formula_too(x, point):
    names = {k: v for k, v in point.items() if k == "A"}
    half = poly(x).bind({k: as_poly(v) for k, v in names.items()})
    assert "A" not in half.names()
    assert value_at(half, **point) == value(x, point)


# -- powers ------------------------------------------------------------------------------------------------------------


@each("exponent", [-HIGHEST_EXPONENT, -65, -1, 0, 1, 65, HIGHEST_EXPONENT])
def test_single_term_powers_expand_up_to_limit(exponent):
    assert (poly(A) ** exponent).expr == A**exponent
    with pytest.raises(ShapeError, match="expected an exponent"):
        poly(A) ** (HIGHEST_EXPONENT + 1)
    with pytest.raises(ShapeError, match="expected an exponent"):
        poly(A) ** -(HIGHEST_EXPONENT + 1)


def test_sum_powers_expand_up_to_64():
    p = poly(A + 1) ** 64
    assert len(p.terms) == 65
    assert p.terms[(("A", 32),)] == math.comb(64, 32)
    for exponent in (65, -65):
        with pytest.raises(ShapeError, match="expected an exponent between -64 and 64"):
            poly(A + 1) ** exponent
    assert value_at(poly(A + 1) ** -64, A=1) == Fraction(1, 2**64)


@each(
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
def test_symbolic_exponents_match_python_values(formula, expected):
    assert value_at(poly(formula), A=3, B=5, C=3) == expected
    # bound one after the other
    half = poly(formula).bind({"C": as_poly(3)})
    assert value_at(half, A=3, B=5) == expected


def test_products_drop_zero_coefficients():
    assert (poly(A + 1) * poly(A - 1)).terms == {(("A", 2),): 1, (): -1}
    assert (poly(A + B) * poly(A - B)).generators() == {"A", "B"}
    assert len((poly(A + B) * poly(A - B)).terms) == 2


def test_square_to_half_power_is_exact():
    assert value_at(power(as_poly(Fraction(3, 7)), poly(C) / 2), C=4) == Fraction(9, 49)
    assert value_at(power(as_poly(4), poly(C) + Fraction(1, 2)), C=3) == 128  # 4**3 * 2
    assert value_at(power(as_poly(4), poly(C) / 2), C=3) == 8
    assert value_at(power(as_poly(9), poly(C) - Fraction(1, 2)), C=2) == 27


@each("base", [-2, Fraction(-1, 3), -1])
def test_negative_base_with_half_exponent_is_refused(base):
    for exponent in (poly(C) / 2, poly(C) + Fraction(1, 2), poly(C) / 2 + poly(A)):
        with pytest.raises(ShapeError, match="expected a base that is not negative"):
            power(as_poly(base), exponent)
    assert value_at(power(as_poly(base), poly(C)), C=3) == Fraction(base) ** 3


@each("exponent", [-1, -2, -(10**9)])
def test_zero_to_negative_power_is_refused(exponent):
    with pytest.raises(ShapeError, match="expected a base that is not zero"):
        power(ZERO, as_poly(exponent))


def test_powers_of_zero_and_one_are_exact():
    huge = 10**9
    assert power(ZERO, as_poly(huge)) == 0
    assert power(ZERO, ZERO) == 1
    assert power(ONE, as_poly(-huge)) == 1
    assert power(as_poly(-1), as_poly(huge)) == 1
    assert power(as_poly(-1), as_poly(huge + 1)) == -1


def test_large_fraction_powers_match_floats():
    close = Fraction(1_000_001, 1_000_000)
    found = power(as_poly(close), as_poly(100_000)).constant
    assert float(found) == pytest.approx(math.exp(100_000 * math.log1p(1e-6)), rel=1e-9)
    assert power(as_poly(Fraction(1, 3)), as_poly(10**6)) == 0  # underflows every float
    assert power(as_poly(3), as_poly(-(10**6))) == 0
    for base, exponent in ((Fraction(3, 2), 10**6), (Fraction(2, 3), -(10**6)), (3, 10**6)):
        with pytest.raises(ShapeError, match="bits is no size of a tensor"):
            power(as_poly(base), as_poly(exponent))


def test_large_integers_are_exact_up_to_limit():
    assert power(as_poly(3), as_poly((1 << 17) - 1)) == 3 ** ((1 << 17) - 1)  # two bits each
    assert power(as_poly(3), as_poly(1 << 17)) == 3 ** (1 << 17)
    with pytest.raises(ShapeError, match="a power of 262146 bits"):
        power(as_poly(3), as_poly((1 << 17) + 1))
    near = Fraction(5, 4)  # three bits each
    assert power(as_poly(near), as_poly(87_381)) == near**87_381
    with pytest.raises(ShapeError, match="a power of 262146 bits"):
        power(as_poly(near), as_poly(87_382))
