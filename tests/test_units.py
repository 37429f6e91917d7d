from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from each import each

from costgraph.errors import SpecError
from costgraph.hardware.units import BASE_UNITS, UNITS, Quantity, exact, format_bytes, format_quantity, quantity


@each(
    ("value", "unit", "expected", "base"),
    [
        (989.4, "TFLOP/s", 989_400_000_000_000, "FLOP/s"),
        (Decimal("2.25"), "PFLOP/s", 2_250_000_000_000_000, "FLOP/s"),
        (8.1, "GFLOP/s", 8_100_000_000, "FLOP/s"),
        (3.35, "TB/s", 3_350_000_000_000, "B/s"),
        (933, "GB/s", 933_000_000_000, "B/s"),
        (1, "KB/s", 1000, "B/s"),
        (800, "GiB/s", 858_993_459_200, "B/s"),  # 800 * 2**30
        (400, "Gbit/s", 50_000_000_000, "B/s"),  # 400e9 / 8
        (80, "GB", 80_000_000_000, "B"),
        (80, "GiB", 85_899_345_920, "B"),  # 80 * 2**30
        (228, "KiB", 233_472, "B"),
        (40339.3125, "MiB", 42_298_834_944, "B"),  # 40339.3125 * 2**20
        (1, "kB", 1000, "B"),
        (1, "KB", 1000, "B"),
        (1830, "MHz", 1_830_000_000, "Hz"),
        (700, "W", 700, "W"),
        (132, "1", 132, "1"),
        (20, "us", Fraction(1, 50_000), "s"),
        (0.1, "ms", Fraction(1, 10_000), "s"),
    ],
)
def test_scaled_units_are_exact(value, unit, expected, base):
    made = quantity(value, unit)
    assert made.value == expected
    assert type(made.value) is (int if Fraction(expected).denominator == 1 else Fraction)
    assert made.unit == base


def test_vocabulary_is_closed_and_has_no_second_meaning_of_giga():
    assert {base for _, base in UNITS.values()} == set(BASE_UNITS)
    assert UNITS["GB"][0] == 10**9
    assert UNITS["GiB"][0] == 2**30
    assert "Gb" not in UNITS
    assert "TFLOPS" not in UNITS


def test_exact_parses_printed_numbers():
    assert exact(989.4) == Fraction(9894, 10)
    assert exact(np.float64(989.4)) == Fraction(9894, 10)
    assert exact(np.int64(7)) == 7
    assert type(exact(np.int64(7))) is int
    assert exact(Fraction(4, 2)) == 2
    assert exact(10**399) == 10**399


@each(
    ("value", "text"),
    [
        (True, "quantity: value True is not a number; expected an int, a Fraction, a Decimal or a float"),
        ("3", "quantity: value '3' is not a number; expected an int, a Fraction, a Decimal or a float"),
        (None, "quantity: value None is not a number; expected an int, a Fraction, a Decimal or a float"),
        (float("nan"), "quantity: value nan is out of range; expected a finite number to 1e400"),
        (float("inf"), "quantity: value inf is out of range; expected a finite number to 1e400"),
        (
            Decimal("1e999999999"),
            "quantity: value 1E+999999999 is out of range; expected a finite number to 1e400",
        ),
        (10**500, "quantity: value is out of range; expected a number to 1e400"),
    ],
)
def test_non_numbers_are_refused(value, text):
    with pytest.raises(SpecError) as error:
        exact(value)
    assert str(error.value) == text


@each("unit", ["TFLOPS", "Gb", "gb", "", "FLOP/s/W", 5])
def test_unknown_unit_lists_the_known_ones(unit):
    with pytest.raises(SpecError) as error:
        quantity(1, unit)
    assert str(error.value) == f"quantity: unit {unit!r} of value 1 is unknown; expected one of {', '.join(UNITS)}"


def test_quantities_require_base_units():
    with pytest.raises(SpecError) as error:
        Quantity(80, "GB")
    assert str(error.value) == (
        "quantity: unit 'GB' is not a base unit; expected one of FLOP/s, B/s, B, Hz, W, s, 1, FLOP, FLOP/B"
    )


def test_division_gives_quotient_unit():
    peak, bandwidth = quantity(989.4, "TFLOP/s"), quantity(3.35, "TB/s")
    ridge = peak / bandwidth
    assert (ridge.value, ridge.unit) == (Fraction(98940, 335), "FLOP/B")
    assert quantity(1, "GB") / quantity(2, "GB/s") == Quantity(Fraction(1, 2), "s")
    assert quantity(3, "TFLOP") / quantity(1, "TFLOP/s") == Quantity(3, "s")
    assert quantity(6, "GB") / quantity(3, "GB") == Quantity(2, "1")
    assert quantity(6, "GB") / quantity(3, "1") == quantity(2, "GB")


def test_arithmetic_without_meaning_is_refused():
    with pytest.raises(SpecError) as error:
        quantity(1, "GB") + quantity(1, "GB/s")
    assert str(error.value) == "quantity: 1 GB in B and 1 GB/s in B/s cannot be added; expected the same unit"
    with pytest.raises(SpecError) as error:
        quantity(1, "W") / quantity(1, "GB")
    assert str(error.value).startswith(
        "quantity: 1 W divided by 1 GB has no supported unit; expected one of (FLOP/s)/(B/s)"
    )
    with pytest.raises(SpecError, match="expected a nonzero divisor"):
        quantity(1, "W") / quantity(0, "W")
    with pytest.raises(TypeError):
        quantity(1, "W") + 1
    with pytest.raises(TypeError):
        quantity(1, "W") / 2


def test_sums_are_exact():
    assert quantity(0.1, "GB") + quantity(0.2, "GB") == quantity(0.3, "GB")
    assert quantity(1, "GiB") - quantity(1, "GB") == Quantity(73_741_824, "B")


@each(
    ("value", "unit", "text"),
    [
        (989_400_000_000_000, "FLOP/s", "989.4 TFLOP/s"),
        (80e9, "B", "80 GB"),
        (80, "GB", "80 GB"),
        (0, "FLOP", "0 FLOP"),
        (999_949, "B", "999.9 kB"),
        (999_960, "B", "1 MB"),  # 999.96 kB rounds to 1000 kB at four digits
        (Fraction(1, 3), "s", "333.3 ms"),
        (2e-12, "s", "0.002 ns"),
        (7200, "s", "7200 s"),
        (10**6, "s", "1e+06 s"),
        (6.3e24, "FLOP", "6.3e+24 FLOP"),
        (10**300, "B", "1e+300 B"),
        (1.83e9, "Hz", "1.83 GHz"),
        (-5_000, "B", "-5 kB"),
        (8, "1", "8"),
        (295.34, "FLOP/B", "295.3 FLOP/B"),
        (0.25, "FLOP/B", "0.25 FLOP/B"),
    ],
)
def test_human_readable_text(value, unit, text):
    assert format_quantity(value, unit) == text


@each(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB (1000 B)"),
        (12288 * 49152 * 4, "2.416 GB (2.25 GiB)"),  # GPT-3's fp32 feed-forward matrix: 2304 MiB
        (2**30 - 1, "1.074 GB (1 GiB)"),
        (8.03e9 * 2, "16.06 GB (14.96 GiB)"),
        (10**18, "1 EB (888.2 PiB)"),
    ],
)
def test_bytes_show_decimal_and_binary_units(n, text):
    assert format_bytes(n) == text


def test_non_numeric_bytes_are_refused():
    with pytest.raises(SpecError):
        format_bytes(float("inf"))
