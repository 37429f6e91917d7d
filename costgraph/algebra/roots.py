"""Rational enclosures of irrational numbers, such as the square root of a cache size."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import sympy

from .polynomial import (
    cached,
    generator,
    names_in,
)

__all__ = ["enclosed", "is_root"]

# Precision of the enclosure in bits; sympy evaluates twice as many digits.
_BITS = 48


def is_root(key: str) -> bool:
    """Whether a generator is an irrational number, such as sqrt(42) or 1/(sqrt(2) + 1)."""
    return key[0] == "~" and not names_in(key)


@cached(1 << 10)
def enclosed(key: str) -> tuple[Fraction, Fraction]:
    """Return lower and upper rational bounds of an irrational generator, with a relative gap of about 2**-48."""
    value = Fraction(str(sympy.N(generator(key), 2 * _BITS)))
    scale = Fraction(2) ** (_BITS - value.numerator.bit_length() + value.denominator.bit_length())
    return (floor(value * scale) - 1) / scale, (ceil(value * scale) + 1) / scale
