"""Floors and ceilings in comparisons: bounds by their arguments, and exact divisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import prod

import sympy

from .polynomial import (
    SLACK,
    Monomial,
    Poly,
    Rational,
    denominator,
    generator,
    is_whole,
    poly,
    total,
)
from .solving import alone

__all__ = ["exact", "opened", "put", "solve_rounded"]


def _is_rounded(key: str) -> bool:
    return key[0] == "~" and isinstance(generator(key), sympy.floor | sympy.ceiling)


def opened(p: Poly, has_sign: Callable[[Monomial], bool]) -> Iterator[Poly]:
    """Replace floors and ceilings by their arguments, in lower bounds of `p`.

    Parameters
    ----------
    p : Poly
        A sum; roundings in denominators are kept.
    has_sign : callable
        Whether a monomial is known to be nonnegative.

    Yields
    ------
    Poly
        Lower bounds in sizes, and for each rounding one in which it replaces a size: S is `8*ceiling(S/8) - r` with r
        from 0 to 7, and all values between are taken.

    Notes
    -----
    `x <= ceiling(x) < x + 1` and `x - 1 < floor(x) <= x`, tighter by 1/q if x is an integer divided by q.
    """
    values, upper = dict[str, Poly](), dict[str, Rational]()
    if mine := _open(p, values, upper):
        yield _beneath(p.substitute(mine), upper, has_sign)
    for key, value in mine.items():
        remaining = p.substitute({k: v for k, v in mine.items() if k != key})
        for name in sorted(remaining.generators() & value.generators() - _divisors(remaining)):
            if name[0] not in "~" + SLACK and (isolated := alone(value, name)) is not None:
                size = (Poly({((key, 1),): 1}) - isolated[1]) / isolated[0]
                yield _beneath(remaining.substitute({name: size}), upper, has_sign)


def _open(p: Poly, values: dict[str, Poly], upper: dict[str, Rational]) -> dict[str, Poly]:
    """Write the roundings in a sum, including nested ones, as their arguments plus nonnegative slacks."""
    keys = sorted(set(filter(_is_rounded, p.generators())) - _divisors(p))
    for key in keys:
        if key not in values:
            inner = poly(generator(key).args[0])
            is_integral = all(map(is_whole, inner.terms))
            upper[beyond := SLACK + key + "%"] = 1 - Fraction(1, denominator(inner.terms)) if is_integral else 1
            low = 0 if isinstance(generator(key), sympy.ceiling) else -upper[beyond]
            values[key] = inner.substitute(_open(inner, values, upper)) + low + Poly({((beyond, 1),): 1})
    return {key: values[key] for key in keys}


def _divisors(p: Poly) -> set[str]:
    return {k for m in p.terms for k, e in m if e < 0}


def _beneath(p: Poly, upper: Mapping[str, Rational], has_sign: Callable[[Monomial], bool]) -> Poly:
    """Replace slacks by their upper bounds where their coefficient is not known to be positive."""

    def bounded(m: Monomial, c: Rational) -> Poly:
        kept_factors = tuple(f for f in m if f[0] not in upper)
        if c > 0 or not has_sign(kept_factors):
            return Poly({m: c})
        return Poly({kept_factors: c * prod(upper[k] ** e for k, e in m if k in upper)})

    return total(bounded(m, c) for m, c in p.terms.items())


def exact(p: Poly) -> tuple[str, Poly] | None:
    """Return a rounding that `p == 0` makes exact: floor(S/4) where S == 4*floor(S/4)."""
    for key in sorted(p.generators()):
        if _is_rounded(key):
            factor = Poly({tuple(f for f in m if f[0] != key): c for m, c in p.terms.items() if (key, 1) in m})
            inner = poly(generator(key).args[0])
            if factor.terms and p == factor * (Poly({((key, 1),): 1}) - inner):
                return key, inner
    return None


def solve_rounded(p: Poly) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a linear rounding: ceiling(S/2) where ceiling(S/2) == 2*ceiling(S/4)."""
    isolated = {
        key: isolated_atom
        for key in filter(_is_rounded, p.generators())
        if (isolated_atom := alone(p, key)) is not None
    }
    for key in sorted(
        isolated, key=lambda k: (abs(isolated[k][0]), k)
    ):  # the smallest factor usually divides the others
        factor, remainder = isolated[key]
        if not any(k[0] == "~" and generator(k).has(generator(key)) for k in remainder.generators()):
            return key, remainder / -factor
    return None


def put(p: Poly, atom: str, value: Poly) -> Poly:
    """Replace an atom, including inside other atoms."""
    old = generator(atom)
    atoms = {k: generator(k) for k in p.generators() if k[0] == "~" and k != atom}
    new = {k: poly(expr.xreplace({old: value.expr})) for k, expr in atoms.items() if expr.has(old)}
    return p.substitute({**new, atom: value})
