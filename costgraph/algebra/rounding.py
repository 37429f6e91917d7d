"""Floors and ceilings of one value in one form, on terms alone."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import floor, lcm

import sympy

from .division import Terms
from .generators import Monomial, Rational, generator, tidy

__all__ = ["denominator", "is_whole", "split"]


def split(terms: Terms, *, up: bool, inside: Callable[[str], Terms]) -> tuple[Terms, Terms, bool]:
    """Write the floor or ceiling of a sum as a whole number and the floor or ceiling of what is left.

    Parameters
    ----------
    terms : Terms
        The sum.
    up : bool
        Whether it is rounded up.
    inside : callable
        What a generator that is a floor or ceiling rounds.

    Returns
    -------
    tuple of Terms, Terms and bool
        The whole part; the rest, whose coefficients are from 0 on and below 1; whether it is rounded up, which is so
        where it then needs no number. Where something else than whole numbers is divided, all of it is the rest.

    Notes
    -----
    `ceiling(n/q)` is `floor((n + q - 1)/q)`, and `floor((floor(x) + m)/q)` is `floor((x + m)/q)`, for whole m, n and q.
    """
    found = _floored(terms, up=up)
    while found is not None:
        opened = next((o for m in found if (o := _opened(found, m, inside)) is not None), None)
        if opened is None:
            break
        found = opened
    if found is None:
        return {}, terms, up
    whole = {m: floor(c) for m, c in found.items() if floor(c)}
    rest = {m: tidy(c - floor(c)) for m, c in found.items() if c != floor(c)}
    number, divisor = rest.get((), 0), denominator(rest)
    if divisor > 1 and number == Fraction(divisor - 1, divisor) and len(rest) > 1:
        return whole, {m: c for m, c in rest.items() if m}, True
    return whole, rest, False


def denominator(terms: Terms) -> int:
    """Return the least number that makes all coefficients whole."""
    return lcm(*(c.denominator for c in terms.values()))


def is_whole(m: Monomial) -> bool:
    """Whether a monomial is a whole number for all sizes."""
    return all(e > 0 and (k[0] != "~" or generator(k).is_integer) for k, e in m)


def _floored(terms: Terms, *, up: bool) -> Terms | None:
    """Return what has the floor that a sum, rounded up or down, is; None where it is no quotient of whole numbers."""
    if not all(map(is_whole, terms)):
        return None
    divisor = denominator(terms)
    return _plus(terms, {(): Fraction(divisor - 1, divisor)}) if up else terms


def _plus(a: Terms, b: Terms) -> Terms:
    out: dict[Monomial, Rational] = {m: tidy(Fraction(a.get(m, 0) + b.get(m, 0))) for m in (*a, *b)}
    return {m: c for m, c in out.items() if c}


def _opened(terms: Terms, m: Monomial, inside: Callable[[str], Terms]) -> Terms | None:
    """Put what an inner floor or ceiling rounds in its place; None where that may change the value."""
    if len(m) != 1 or m[0][1] != 1 or m[0][0][0] != "~" or terms[m].numerator != 1:
        return None
    expr = generator(m[0][0])
    if not isinstance(expr, sympy.floor | sympy.ceiling):
        return None
    divisor, rest = terms[m].denominator, {n: c for n, c in terms.items() if n != m}
    inner = _floored(inside(m[0][0]), up=isinstance(expr, sympy.ceiling))
    if divisor == 1 or inner is None or any(c * divisor != int(c * divisor) for c in rest.values()):
        return None
    return _plus(rest, {n: tidy(Fraction(c) / divisor) for n, c in inner.items()})
