"""Dimension names and size expressions as users write them."""

import pytest
import sympy
from each import each

from costgraph import BindingError, PatternError, ShapeError, dims
from costgraph.algebra.symbols import check_exact, check_symbol, is_name, read_size, shorten, symbol

# -- dims --------------------------------------------------------------------------------------------------------------


def test_dims_are_positive_integers_and_the_same_everywhere():
    B, S = dims("B S")
    assert (B, S) == dims("B, S") == dims(" B,S ") == dims("B\tS\n")
    assert dims("B") is B is symbol("B")
    assert sympy.Symbol("B", integer=True, positive=True) == B
    assert sympy.Symbol("B") != B
    assert B.is_positive
    assert B.is_integer
    assert dims("B B") == (B, B)


@each("name", ["B", "d_model", "_x", "x1", "a" * 64, "lambda", "S", "I", "E", "N", "pi", "oo"])
def test_valid_names(name):
    assert is_name(name)
    assert dims(name).name == name


@each("name", ["1x", "a-b", "a.b", "é", "B²", "x\u0661", "a" * 65, "__import__('os')", "a\n", "*", "", 5, None, b"B"])
def test_invalid_names_are_refused(name):
    assert not is_name(name)
    with pytest.raises(PatternError):
        symbol(name)


@each("wrong", ["", "  ", ",", 5, None, ["B"], b"B", "B 1x"])
def test_dims_of_non_strings_are_refused(wrong):
    with pytest.raises(PatternError, match="expected"):
        dims(wrong)


def test_errors_truncate_long_texts():
    with pytest.raises(PatternError) as caught:
        dims("x" * 10**6)
    assert len(str(caught.value)) < 300
    assert shorten("a" * 100) == repr("a" * 57 + "...")
    assert shorten("ab") == "'ab'"


def test_foreign_symbols_are_refused():
    check_symbol(dims("B"))
    for other in (sympy.Symbol("B"), sympy.Dummy("B", integer=True, positive=True), sympy.Symbol("a b")):
        with pytest.raises(ShapeError, match=r"symbol '(B|a b)' has the assumptions .*; expected the positive integer"):
            check_symbol(other)


@each("wrong", [sympy.Float(1.5), sympy.I, sympy.oo, sympy.nan, sympy.zoo, sympy.Symbol("B") + 1])
def test_inexact_sizes_are_refused(wrong):
    check_exact(sympy.floor(dims("B") / 2))
    with pytest.raises(ShapeError, match="expected"):
        check_exact(wrong)


# -- sizes -------------------------------------------------------------------------------------------------------------


@each(
    ("text", "size"),
    [
        ("1", 1),
        ("8192", 8192),
        ("007", 7),
        ("8Ki", 8192),
        ("1Mi", 2**20),
        ("2Gi", 2**31),
        ("1Ti", 2**40),
        ("8K", 8000),
        ("8k", 8000),
        ("7M", 7 * 10**6),
        ("70B", 70 * 10**9),
        ("70G", 70 * 10**9),
        ("15T", 15 * 10**12),
        ("1.5M", 1_500_000),
        ("0.5Ki", 512),
        ("1.0", 1),
        ("6.70B", 6_700_000_000),
        ("1e6", 10**6),
        ("1E6", 10**6),
        ("1e+6", 10**6),
        ("2.5e3", 2500),
        ("1.5e1Ki", 15 * 1024),
        ("1e99", 10**99),
        ("123456789012345678901234567890", 123456789012345678901234567890),
    ],
)
def test_sizes(text, size):
    assert read_size(text, "B") == size
    assert type(read_size(text, "B")) is int


@each(
    "text",
    [
        *["", " ", "K", "8 Ki", "8ki", "8KB", "8m", "-1", "+1", "1e-3", "1.", ".5", "1,000", "1_000", "0x10", "inf"],
        *["nan", "٣", "\uff18Ki", "1e100", "1" * 31, "1\n", "2**3", "B", "1e6e6", "²", "9" * 10**6, None, 8, 8.0, True],
    ],
    ids=lambda t: repr(t)[:20],
)
def test_invalid_sizes_are_refused(text):
    with pytest.raises(
        BindingError, match=r"^--batch: got '.*', expected a size such as 8192, 8Ki, 1\.5M or 70B"
    ) as caught:
        read_size(text, "--batch")
    assert len(str(caught.value)) < 200


@each("text", ["0", "0.0K", "1.5", "0.3Ki", "1.2345K", "0e5"])
def test_non_positive_or_fractional_sizes_are_refused(text):
    with pytest.raises(BindingError, match=f"S: got '{text}', expected a positive whole number"):
        read_size(text, "S")


def test_trailing_comma_gives_one_tuple():
    assert dims("B,") == (dims("B"),)
