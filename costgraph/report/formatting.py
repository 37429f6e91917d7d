"""Format amounts for people, and define the quantities that reports and the command line know by name."""

from __future__ import annotations

import sympy
from rich.markup import escape

from ..bind.evaluate import Formula
from ..hardware.units import format_bytes, format_quantity
from .formula import formula_text

__all__ = ["amount", "exact", "percent", "show"]


# -- amounts -----------------------------------------------------------------------------------------------------------


def show(value: Formula, unit: str) -> str:
    """Format an amount with its unit; formulas have the unit in brackets.

    Examples
    --------
    >>> show(16_060_522_496, "B"), show(140_786_504_056_832, "FLOP"), show(8_030_261_248, "1")
    ('16.06 GB (14.96 GiB)', '140.8 TFLOP', '8,030,261,248')
    """
    if isinstance(value, sympy.Expr):
        text = formula_text(value, grouped=True)
        return text if unit == "1" else f"{text}  [{unit}]"
    if unit == "B":
        return format_bytes(value)
    if unit == "1" and isinstance(value, int):
        return f"{value:,}"
    return format_quantity(value, unit)


def exact(value: Formula, unit: str) -> str:
    """Return the exact count with grouped digits if `show` rounds it, else an empty string."""
    if not isinstance(value, int) or unit == "1" or value < 10_000:
        return ""
    return f"{value:,} {unit}"


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * share:.1f}%"


def amount(value: Formula, unit: str) -> str:
    """Format an amount, with its exact count if rounded, escaped for rich."""
    text, count = show(value, unit), exact(value, unit)
    return escape(f"{text} = {count}" if count else text)
