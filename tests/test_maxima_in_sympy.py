"""Maxima in sympy's own tools: the correct result, or a refusal."""

import random

import pytest
import sympy
from each import each

import costgraph as cg
from costgraph.algebra.extremum import Owner

B, S, D = cg.dims("B S D")
OWNED = cg.Max(8 * B * S, 4 * B * S + 4 * D, 7 * D**2, owners=[Owner(n, "forward") for n in "abc"])
FORMULAS = [cg.Max(30, 2 * B), OWNED, cg.Min(S, B), 1 + 2 * OWNED, OWNED + cg.Max(D, B) / S]


@each(
    ("write", "text"),
    [
        (sympy.jscode, "Math.max(8*B*S, 7*Math.pow(D, 2), 4*B*S + 4*D)"),
        (sympy.ccode, "fmax(8*B*S, fmax(7*pow(D, 2), 4*B*S + 4*D))"),
        (sympy.rcode, "max(8*B*S, 7*D^2, 4*B*S + 4*D)"),
        (sympy.octave_code, "max(8*B.*S, max(7*D.^2, 4*B.*S + 4*D))"),
        (sympy.pycode, "max(8*B*S, 7*D**2, 4*B*S + 4*D)"),
        (sympy.mathematica_code, "Max(8*B*S, 7*D^2, 4*B*S + 4*D)"),
    ],
)
def test_code_printers_accept_maxima_with_owners(write, text):
    assert write(OWNED) == text


def test_languages_without_maximum_print_cases():
    assert sympy.julia_code(cg.Max(30, 2 * B)) == "(((30 >= 2 * B) ? (30) : (2 * B)))"


def test_smt_prints_cases():
    # SMT-LIB has no maximum
    largest = "(ite (and (>= (* 8 B S) (* 7 (pow D 2))) (>= (* 8 B S) (+ (* 4 D) (* 4 B S)))) (* 8 B S) "
    rest = "(ite (>= (* 7 (pow D 2)) (+ (* 4 D) (* 4 B S))) (* 7 (pow D 2)) (+ (* 4 D) (* 4 B S))))"
    assert sympy.smtlib_code(OWNED, auto_declare=False) == largest + rest
    asserted = sympy.smtlib_code(cg.Max(30, 2 * B) < 40)
    assert asserted == "(declare-const B Int)\n(assert (< (ite (>= 30 (* 2 B)) 30 (* 2 B)) 40))"
    assert sympy.smtlib_code(cg.Max(30, 2 * B).diff(B), auto_declare=False) == "(ite (>= 30 (* 2 B)) 0 2)"


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_piecewise_forms_have_same_values(formula):
    pick, names = random.Random(7), sorted(formula.free_symbols, key=str)
    split = formula.rewrite(sympy.Piecewise)
    assert split.has(sympy.Piecewise)
    calls = [sympy.lambdify(names, formula, modules) for modules in ("math", "numpy", "mpmath")]
    for _ in range(20):
        at = {s: sympy.Integer(pick.choice((1, 2, 15, 16, 97, 10**6))) for s in names}
        expected = cg.evaluate(formula, **{s.name: int(v) for s, v in at.items()})
        assert split.subs(at) == formula.subs(at) == pytest.approx(expected)
        for call in calls:
            assert float(call(*map(int, at.values()))) == pytest.approx(expected)


@each(
    ("formula", "limit"),
    [
        (cg.Max(30, 2 * B), sympy.oo),
        (cg.Max(30, 2 * B) / B, 2),
        (OWNED / B, 8 * S),
        (cg.Min(30, 2 * B), 30),
        (cg.Max(8 * B * S, 9 * B * S + 1) / B, 9 * S),
        (cg.Max(1 / B, 3 / S + 1 / B**2) * S, 3),
        (B / (B + cg.Max(7, B)), sympy.Rational(1, 2)),
    ],
)
def test_limits(formula, limit):
    assert sympy.limit(formula, B, sympy.oo) == limit


def test_size_dependent_limit_is_refused():
    with pytest.raises(cg.UnsupportedError, match=r"limit of a maximum: .* apart, expected one to win"):
        sympy.limit(cg.Max(B * S, B * D) / B, B, sympy.oo)
    assert sympy.limit(cg.Max(30, 2 * B), B, 3) == 30


def test_equations_with_maxima_are_solved_or_refused():
    for formula in (cg.Max(30, 2 * B), OWNED, cg.Min(S * D, B * D), cg.Max(30, 2 * B) * D):
        for equation in (formula - 40, sympy.Eq(formula, 40)):
            with pytest.raises(NotImplementedError):
                sympy.solve(equation, B)
    assert sympy.solve((cg.Max(30, 2 * B) - 40).rewrite(sympy.Piecewise), B) == [20]
    assert sympy.solveset(cg.Max(30, 2 * B) - 40, B, sympy.S.Reals) == {20}


@each(
    "formula",
    [cg.Min(S, B), cg.Max(2 * B, 3 * S), D * cg.Max(2 * B, 3 * S), 2 / cg.Min(S, B), cg.Max(2 * B, 3 * S) + B,
     cg.Max(B, S) - cg.Max(D, 2 * B), cg.Max(30, 2 * B) / B, cg.Max(30, 2 * B).diff(B), cg.Min(S, B).diff(B)],
    ids=str,
)  # fmt: skip
def test_equation_true_on_a_range_is_not_reported_unsolvable(formula):
    # depending on S, Min(S, B) is 40 only at B = 40, for all B from 40 on, or never
    with pytest.raises(NotImplementedError):
        sympy.solve(formula - 40, B)


def test_piecewise_form_of_refused_equation_is_solvable():
    with pytest.raises(cg.UnsupportedError, match=r"solve of an equation with Min\(B, S\): it has no inverse, exp"):
        sympy.solve(cg.Min(S, B) - 40, B)
    (found,) = sympy.solve((cg.Min(S, B) - 40).rewrite(sympy.Piecewise), B)
    assert found.subs(S, 50) == 40
    assert found.subs(S, 30) is sympy.nan


def test_second_derivative_is_zero_in_every_case():
    for formula in (cg.Max(30, 2 * B), cg.Min(S, B), 1 + 2 * OWNED):
        assert formula.diff(B, 2).subs({B: 7, S: 5, D: 3}) == 0
    assert cg.Max(30, 2 * B).diff(B, 2) == 0
    assert hash(cg.Max(30, 2 * B).diff(B, 2)) == hash(0)
    assert cg.Max(30, 2 * B).diff(B) != 0
    assert cg.Max(30, B**2).diff(B, 2).subs(B, 6) == 2
    assert cg.Max(30, 2 * S).diff(B) == 0


#: Left-hand side, relation, right-hand side.
INEQUALITIES = [
    (cg.Max(30, 2 * B), "<", 40), (cg.Max(30, 2 * B), ">=", 40), (cg.Max(30, 2 * B), "<", 20),
    (cg.Max(30, 2 * B), ">", 20), (cg.Min(30, 2 * B), "<", 20), (cg.Min(30, 2 * B), "<", 40),
    (2 * cg.Max(30, 2 * B) + B, "<=", 100), (cg.Max(30, 2 * B) - cg.Min(B, 40), ">", 20),
    (cg.Max(30, 2 * B) / B, "<=", 3), (B * cg.Min(30, 2 * B), ">", 10),
    (cg.Max(30, 2 * B, B**2), "<", 400), (cg.Max(2 * cg.Max(3, B), 10 * B), "<=", 95),
    (cg.Max(7, 60 - B) * cg.Min(B, 20), ">=", 500),
]  # fmt: skip


@pytest.mark.parametrize(("left", "sign", "right"), INEQUALITIES, ids=str)
def test_univariate_inequalities_are_solved(left, sign, right):
    solutions = sympy.solve(sympy.Rel(left, right, sign), B)
    for size in range(1, 101):
        expected = {"<": float.__lt__, "<=": float.__le__, ">": float.__gt__, ">=": float.__ge__}[sign]
        assert bool(solutions.subs(B, size)) is expected(float(cg.evaluate(left, B=size)), float(right)), size


def test_inequalities_are_solved_or_refused():
    for wrong in (cg.Min(S, B) < 40, OWNED >= 7, S * cg.Max(30, 2 * B) < 400, cg.Max(30, 2 * B) <= 30):
        with pytest.raises(NotImplementedError):
            sympy.solve(wrong, B)
    with pytest.raises(cg.UnsupportedError, match=r"inequality of SelectedBranch.*, a slope of a maximum, expected"):
        sympy.solve(cg.Max(30, 2 * B).diff(B) >= 1, B)
    assert not sympy.is_increasing(-cg.Max(30, B), sympy.Interval(1, 50), B)
    assert sympy.is_increasing(cg.Max(30, B), sympy.Interval(1, 50), B)
