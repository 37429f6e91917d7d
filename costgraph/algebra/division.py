"""Exact division of sums by sums, on their terms alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import gcd, lcm

from .generators import Monomial, Rational, is_reciprocal, tidy, times

__all__ = ["Terms", "content", "quotient", "reciprocal"]

Terms = Mapping[Monomial, Rational]

_MOST_STEPS = 2000


def reciprocal(m: Monomial) -> Monomial:
    """Return 1/m."""
    return times((), tuple((k, -p) for k, p in m))


def content(terms: Terms) -> tuple[Monomial, Rational]:
    """Return the common factor of all terms, so that multiples of a sum have one reciprocal as an atom."""
    scale = Fraction(gcd(*(c.numerator for c in terms.values())), lcm(*(c.denominator for c in terms.values())))
    common = tuple((k, low) for k in _keys(terms) if (low := _range(terms, k)[0]))
    # of what is left once it is divided out: the sign is then that of the sum, whatever it is multiplied by
    rest = {times(m, reciprocal(common)): c for m, c in terms.items()}
    return common, scale if rest[max(rest)] > 0 else -scale


def quotient(terms: Terms, divisor: Terms) -> Terms | None:
    """Return the exact quotient, or None: least and greatest exponents of a product are sums."""
    keys = _keys([*terms, *divisor])
    ranges = [(_range(terms, k), _range(divisor, k)) for k in keys]
    allowed = [(low - its_low, high - its_high) for (low, high), (its_low, its_high) in ranges]

    def rank(m: Monomial) -> tuple[int, ...]:
        powers = dict(m)
        return sum(powers.values()), *(powers.get(k, 0) for k in keys)

    lead = max(divisor, key=rank)
    if any(p > 0 and is_reciprocal(k) for k, p in lead):  # whose reciprocal is a sum
        return None
    inverse, scale = reciprocal(lead), Fraction(1) / divisor[lead]
    rest, parts = dict(terms), dict[Monomial, Rational]()
    for _ in range(_MOST_STEPS):
        if not rest:
            return {m: c for m, c in parts.items() if c}
        top = max(rest, key=rank)
        part, factor = times(top, inverse), tidy(rest[top] * scale)
        powers = dict(part)
        if any(not low <= powers.get(k, 0) <= high for k, (low, high) in zip(keys, allowed, strict=True)):
            return None
        parts[part] = tidy(parts.get(part, 0) + factor)
        for m, c in divisor.items():
            key = times(part, m)
            rest[key] = tidy(rest.get(key, 0) - factor * c)
            if not rest[key]:
                del rest[key]
    return None


def _keys(monomials: Iterable[Monomial]) -> list[str]:
    return sorted({k for m in monomials for k, _ in m})


def _range(terms: Terms, key: str) -> tuple[int, int]:
    found = [dict(m).get(key, 0) for m in terms]
    return min(found, default=0), max(found, default=0)
