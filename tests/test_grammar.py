"""Formula text, compared with Python's parser and exact evaluation of the same text."""

import ast
import operator
import re
from fractions import Fraction

import pytest
import sympy
from algebra import A, B, C, D, atoms, mixed, points
from budget import drawing
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limited

from costgraph import Max, Min, PatternError
from costgraph.algebra.polynomial import as_poly, poly
from costgraph.notation.grammar import parse_formula, parse_relation
from costgraph.testing import value

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def by_python(text, point):
    """Evaluate by Python's grammar with exact Fractions."""

    def walk(node):
        if isinstance(node, ast.Constant):
            return Fraction(str(node.value))
        if isinstance(node, ast.Name):
            return Fraction(point[node.id])
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](walk(node.operand))
        if isinstance(node, ast.Call):
            rounding = {"floor": lambda x: Fraction(x.__floor__()), "ceiling": lambda x: Fraction(x.__ceil__())}
            return {"Max": max, "Min": min, **rounding}[node.func.id](*map(walk, node.args))
        assert isinstance(node, ast.BinOp)
        left, right = walk(node.left), walk(node.right)
        if isinstance(node.op, ast.Pow):
            assert right.denominator == 1
            return left ** int(right)
        return OPERATORS[type(node.op)](left, right)

    return walk(ast.parse(text, mode="eval").body)


names = st.sampled_from(["A", "B", "C", "D"])
numbers = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["0.5", "2.25", "10.0"]))
texts = st.recursive(
    st.one_of(names, numbers),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " - ", "* "]), inner).map("".join),
        inner.map(lambda t: f"({t})"),
        inner.map(lambda t: f"-{t}"),
        st.tuples(
            st.one_of(names, inner.map(lambda t: f"({t})")), st.sampled_from(["**2", "**3", "**-1", " ** 0"])
        ).map("".join),
        st.tuples(st.sampled_from(["Max", "Min"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        st.tuples(st.sampled_from(["floor", "ceiling"]), inner).map(lambda t: f"{t[0]}({t[1]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(texts, points(9))
def test_text_means_what_it_means_in_python(text, point):
    try:
        expected = by_python(text, point)
    except ZeroDivisionError:
        return
    found = parse_formula(text).bind({k: as_poly(v) for k, v in point.items()})
    assert found == as_poly(expected)


@each(
    ("text", "expected"),
    [
        ("2**3**2", 512),
        ("-2**2", -4),
        ("(-2)**2", 4),
        ("2**-1", Fraction(1, 2)),
        ("2**-2**2", Fraction(1, 16)),
        ("--3", 3),
        ("-+3", None),
        ("8/4/2", 1),
        ("8/(4/2)", 4),
        ("8-4-2", 2),
        ("2*-3", -6),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1.50", Fraction(3, 2)),
        ("007", 7),
        ("floor(7/2) + ceiling(7/2)", 7),
        ("floor(-7/2)", -4),
        ("Max(1, 2, 3) - Min(1, 2, 3)", 2),
        ("A - A", 0),
        ("1**A", 1),
        ("0**0", 1),
    ],
)
def test_number_literals(text, expected):
    if expected is None:
        with pytest.raises(PatternError):
            parse_formula(text)
    else:
        assert parse_formula(text) == as_poly(expected)


@each(
    ("text", "expected"),
    [
        ("2*A*(B + 1)", 2 * A * B + 2 * A),
        ("A/B*C", A * C / B),
        (" A\t+\nB ", A + B),
        ("(A + B)**2/(A + B)", A + B),
        ("A/(B + C)", A / (B + C)),
        ("(1 - A/B)**C", (1 - A / B) ** C),
        ("2**C*2", 2 ** (C + 1)),
        ("A*(1 - (1 - 2/A)**C)", A - A * (1 - 2 / A) ** C),
        ("floor((A + 1)/2)", sympy.floor((A + 1) / 2)),
        ("ceiling(A/2)*Max(A, B, C*D)", sympy.ceiling(A / 2) * Max(A, B, C * D)),
        ("Min(A, B)**2", Min(A, B) ** 2),
        ("Max(A)", A),
    ],
)
def test_formula_texts(text, expected):
    assert parse_formula(text) == poly(expected)


@drawing(1000)
@given(st.one_of(mixed(), atoms()))
def test_what_is_printed_can_be_read(x):
    p = poly(x)
    assert parse_formula(str(p.expr)) == p
    assert parse_formula(str(p)) == p


@each(
    ("text", "what"),
    [
        ("", "the end of the text"),
        ("A +", "the end of the text"),
        ("A B", "'B' at position 2"),
        ("2A", "'A' at position 1"),
        ("1e6", "'e6' at position 1"),
        (".5", "character '.' at position 0"),
        ("5.", "character '.' at position 1"),
        ("A ^ B", "character '^' at position 2"),
        ("A.b", "character '.' at position 1"),
        ("A[0]", "character '[' at position 1"),
        ("'A'", 'character "\'" at position 0'),
        ("A; B", "character ';' at position 1"),
        ("Ä + 1", "character 'Ä' at position 0"),
        ("٣", "character '٣' at position 0"),
        ("A\u00a0+ B", "position 1"),
        ("A\x00", "position 1"),
        ("(A", "the end of the text, expected ')'"),
        ("A)", "')' at position 1"),
        ("()", "')' at position 1"),
        ("A,B", "',' at position 1"),
        ("A >= B", "'>=' at position 2"),
        ("Max()", "')' at position 4"),
        ("Max(A,)", "')' at position 6"),
        ("Max A", "'A' at position 4"),
        ("floor(A, B)", "2 arguments of floor, expected at most 1"),
        ("sin(A)", "function 'sin', expected one of Max, Min, floor, ceiling, sqrt, log"),
        ("sqrt(A, B)", "2 arguments of sqrt, expected at most 1"),
        ("__import__(A)", "function '__import__'"),
        ("(0-2)**0.5", "(-2)**(1/2): expected a base that is not negative"),
        ("sqrt(0-A)", "(-A)**(1/2): expected a base that is not negative"),
        ("0**A", "a power of 0, expected a positive number"),
        ("(0-2)**A", "a power of -2, expected a positive number"),
        ("A/0", "expected a divisor that is not zero"),
        ("1/(A - A)", "expected a divisor that is not zero"),
        ("0**-1", "expected a divisor that is not zero"),
        ("A**9999", "expected an exponent between"),
        ("(A + B)**65", "expected an exponent between"),
        ("9" * 41, "a number of 41 digits"),
        ("A" * 65, "AAAA"),
        ("(" * 61 + "A" + ")" * 61, "more than 60 levels of brackets"),
        ("2**" * 100 + "2", "more than 60 levels of powers"),
        ("A+" * 10_001, "20002 characters, expected at most 20000"),
        ("(((9**64)**64)**64)**64", "too large to be written out"),
        ("*".join(["(A+B+C+D+1)**9"] * 9), "terms"),
        ("Max(" + ",".join(f"A{i}" for i in range(201)) + ")", "201 arguments of Max, expected at most 200"),
    ],
    ids=lambda t: t[:30],
)
def test_errors_name_place_and_value(text, what):
    with limited(), pytest.raises(PatternError) as caught:
        parse_formula(text, "size of x")
    message = str(caught.value)
    assert message.startswith("size of x: ")
    assert what in message
    assert "expected" in message
    assert len(message) < 600


@each(
    "text",
    ["(" * 10**6, "-" * 10**6 + "A", "2**" * 10**6, "A+" * 10**6, "floor(" * 10**6, "\n" * 10**6],
    ids=lambda t: repr(t[:8]),
)
def test_very_long_text_raises_immediately(text):
    with pytest.raises(PatternError, match="characters, expected at most 20000"):
        parse_formula(text)


def test_longest_valid_texts_are_parsed():
    assert parse_formula("-" * 19_999 + "A") == -poly(A)
    assert parse_formula("+".join(["A"] * 10_000)) == 10_000 * poly(A)
    assert parse_formula("(" * 59 + "A" + ")" * 59) == poly(A)
    with limited():
        for text in (
            "Max(" * 59 + "A" + ",B)" * 59,
            "floor(" * 50 + "A/2" + ")/2" * 50,
            "+".join(f"x{i}*y{i}" for i in range(1500)),
        ):
            parse_formula(text)


@each("wrong", [None, 5, b"A", ["A"], sympy.Symbol("A")])
def test_non_text_input_raises(wrong):
    for parse in (parse_formula, parse_relation):
        with pytest.raises(PatternError, match=re.escape(repr(wrong)) + ", expected text"):
            parse(wrong)


@each(
    ("text", "difference", "equal"),
    [
        ("A >= B", A - B, False),
        ("A <= B", B - A, False),
        ("A > B", A - B - 1, False),
        ("A < B", B - A - 1, False),
        ("A == B*C", A - B * C, True),
        ("A/B > 1", A - B - 1, False),  # a fraction above 1 need not reach 2, so the denominator is cleared first
        ("A/2 < B/3", 2 * B - 3 * A - 1, False),
        ("floor(A/2) > B", sympy.floor(A / 2) - B - 1, False),
    ],
)
def test_relation_texts(text, difference, equal):
    relation = parse_relation(f" {text} ")
    assert relation.difference == poly(difference)
    assert relation.equal is equal
    assert relation.text == text
    assert not relation.strict


def test_strict_relation_between_fractions_stays_strict():
    relation = parse_relation("1/(A + B) > 1/(C + D)")
    assert relation.strict
    assert relation.difference == poly(1 / (A + B) - 1 / (C + D))


@each(
    ("text", "what"),
    [
        ("A", "the end of the text, expected one of == >= <= > <"),
        ("A = B", "character '='"),
        ("A != B", "character '!'"),
        ("A >= B >= C", "'>=' at position 7"),
        (">= B", "'>=' at position 0"),
        ("A >=", "the end of the text"),
        ("A >= 1/0", "expected a divisor that is not zero"),
    ],
)
def test_invalid_relations_raise(text, what):
    with pytest.raises(PatternError) as caught:
        parse_relation(text)
    assert what in str(caught.value)
    assert str(caught.value).startswith("assumption: ")


def test_long_formula_at_random_points():
    text = "6*A*B*C**2 - floor((A + B*C)/7)*Max(A, B - C, D**2)/D + (1 - A/(A + B))**3*ceiling(D/(2*A))"
    for seed in range(20):
        point = {n: 1 + (seed * k) % 11 for n, k in zip("ABCD", (3, 5, 7, 2), strict=True)}
        assert value(parse_formula(text).expr, point) == by_python(text, point)
