"""The numbers of `forward.json`, and the register of what derives them from declared graphs."""

import json
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from pathlib import Path

FILE = json.loads(Path(__file__).with_name("forward.json").read_text())
ROWS = {row["id"]: row for row in FILE["answered"]}
LATER = {row["id"]: (who, row) for who, rows in FILE["later"].items() for row in rows}
DERIVED = {}


def derives(*ids):
    """Register what answers these rows; the row is its argument."""

    def register(function):
        for i in ids:
            assert i not in DERIVED
            DERIVED[i] = function
        return function

    return register


def rounded(value, row):
    """Round a derived value to the digits that the source prints."""
    exact = Fraction(value)
    value = Decimal(exact.numerator) / exact.denominator  # 28 digits
    if "digits" not in row or not value:
        return value
    last = Decimal(1).scaleb(value.adjusted() + 1 - row["digits"])
    return value.quantize(last, ROUND_FLOOR if row.get("rounding") == "down" else ROUND_HALF_EVEN)
