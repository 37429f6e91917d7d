"""What sympy's own tools make of a maximum: the right answer, or a refusal."""

import random

import pytest
import sympy

import costgraph as cg
from costgraph.algebra.extremum import Owner

B, S, D = cg.dims("B S D")
OWNED = cg.Max(8 * B * S, 4 * B * S + 4 * D, 7 * D**2, owners=[Owner(n, "forward") for n in "abc"])
FORMULAS = [cg.Max(30, 2 * B), OWNED, cg.Min(S, B), 1 + 2 * OWNED, OWNED + cg.Max(D, B) / S]


@pytest.mark.parametrize(
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
def test_code_of_a_maximum_with_owners(write, text):
    assert write(OWNED) == text


def test_code_that_has_no_maximum_has_its_cases():
    assert sympy.julia_code(cg.Max(30, 2 * B)) == "(((30 >= 2 * B) ? (30) : (2 * B)))"


@pytest.mark.parametrize("formula", FORMULAS, ids=str)
def test_cases_with_conditions_and_functions_have_its_values(formula):
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


@pytest.mark.parametrize(
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


def test_a_limit_that_sizes_decide_is_refused():
    with pytest.raises(cg.UnsupportedError, match=r"limit of a maximum: .* apart, expected one to win"):
        sympy.limit(cg.Max(B * S, B * D) / B, B, sympy.oo)
    assert sympy.limit(cg.Max(30, 2 * B), B, 3) == 30


def test_equations_are_solved_or_refused():
    for formula in (cg.Max(30, 2 * B), OWNED, cg.Min(S * D, B * D), cg.Max(30, 2 * B) * D):
        for equation in (formula - 40, sympy.Eq(formula, 40)):
            with pytest.raises(NotImplementedError):
                sympy.solve(equation, B)
    assert sympy.solve((cg.Max(30, 2 * B) - 40).rewrite(sympy.Piecewise), B) == [20]
    assert sympy.solveset(cg.Max(30, 2 * B) - 40, B, sympy.S.Reals) == {20}
