"""Amounts as people read them."""

from __future__ import annotations

import sympy
from rich.markup import escape

from ..bind.evaluate import Formula
from ..hardware.units import format_bytes, format_quantity
from .formula import formula_text

__all__ = ["amount", "exact", "percent", "show"]


def show(value: Formula, unit: str) -> str:
    """Return an amount for people, with its unit; a formula with the unit in brackets.

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
    """Return an exact count with its unit and grouped digits, where `show` rounds one."""
    if not isinstance(value, int) or unit == "1" or value < 10_000:
        return ""
    return f"{value:,} {unit}"


def percent(share: float) -> str:
    """Return a part of a whole as text."""
    return f"{100 * share:.1f}%"


def amount(value: Formula, unit: str) -> str:
    """Return an amount and, where that rounds it, its exact count; as rich may print it."""
    text, count = show(value, unit), exact(value, unit)
    return escape(f"{text} = {count}" if count else text)
