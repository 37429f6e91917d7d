"""Oracles and strategies for the algebra tests: exact Fractions at points, without library code."""

import subprocess
import sys
from fractions import Fraction

import sympy
from budget import is_plain
from hypothesis import strategies as st

from costgraph import Max, Min, dims

NAMES = ("A", "B", "C", "D")
SYMBOLS = dims("A B C D")
A, B, C, D = SYMBOLS


def points(most: int = 50, names: tuple[str, ...] = NAMES) -> st.SearchStrategy[dict[str, int]]:
    """Draw sizes for every name, small and large."""
    size = st.one_of(st.integers(1, 3), st.integers(1, most))
    return st.fixed_dictionaries(dict.fromkeys(names, size))


rationals = st.fractions(min_value=-20, max_value=20, max_denominator=6)


@st.composite
def sums(draw, lowest: int = -2, highest: int = 3, most: int = 5, coefficients=rationals) -> sympy.Expr:
    """Draw a sum of monomials in A, B, C, D as a sympy expression."""
    terms = draw(
        st.lists(st.tuples(coefficients, st.tuples(*[st.integers(lowest, highest)] * 4)), min_size=0, max_size=most)
    )
    return sympy.Add(
        *(
            sympy.Rational(c.numerator, c.denominator) * sympy.Mul(*(s**e for s, e in zip(SYMBOLS, es, strict=True)))
            for c, es in ((Fraction(c), es) for c, es in terms)
        )
    )


whole = st.integers(-9, 9)


@st.composite
def atoms(draw) -> sympy.Expr:
    """Draw a non-polynomial: rounded sums, extremes, reciprocals, or powers with symbolic exponents."""
    one, two = draw(sums(0, 2, 3, whole)), draw(sums(0, 1, 3, whole))
    k = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["floor", "ceiling", "Max", "Min", "reciprocal", "routing", "power"]))
    if kind == "floor":
        return sympy.floor(one / k)
    if kind == "ceiling":
        return sympy.ceiling(one / (k * A))
    if kind == "Max":
        return Max(one, two)
    if kind == "Min":
        return Min(one, two, k)
    if kind == "reciprocal":
        return 1 / (k * A + B)
    if kind == "routing":
        return (1 - A / (A + k * B)) ** draw(st.sampled_from([C, 2 * C, C + D]))
    return draw(st.sampled_from([sympy.Integer(2), sympy.Integer(k), sympy.Rational(1, 2), A])) ** (B + draw(whole))


@st.composite
def mixed(draw) -> sympy.Expr:
    """Draw a sum of monomials, some multiplied by an atom."""
    parts = draw(st.lists(st.tuples(sums(-1, 2, 2), atoms()), max_size=2))
    return sympy.Add(draw(sums(most=3)), *(p * a for p, a in parts))


def outputs_under_hash_seeds(code: str) -> set[str]:
    """Run a program under several values of PYTHONHASHSEED and return its outputs."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (("0", "77") if is_plain() else ("0", "5", "77"))
    }
