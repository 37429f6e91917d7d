"""Numbers that are no fractions, such as the root of a cache's size, and the fractions between which they lie."""

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

# Bits of the fractions; sympy works out twice as many digits.
_BITS = 48


def is_root(key: str) -> bool:
    """Whether a generator is a number that is no fraction, such as sqrt(42) or 1/(sqrt(2) + 1)."""
    return key[0] == "~" and not names_in(key)


@cached(1 << 10)
def enclosed(key: str) -> tuple[Fraction, Fraction]:
    """Return fractions between which such a number lies, apart by some 2**-48 of it."""
    value = Fraction(str(sympy.N(generator(key), 2 * _BITS)))
    scale = Fraction(2) ** (_BITS - value.numerator.bit_length() + value.denominator.bit_length())
    return (floor(value * scale) - 1) / scale, (ceil(value * scale) + 1) / scale
