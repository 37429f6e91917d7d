"""Whole parts of sizes: what they lie between, and those that are all of what they round."""

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
    """Write whole parts as what they round, in sums that `p` is never below.

    Parameters
    ----------
    p : Poly
        A sum; whole parts that it is divided by stay.
    has_sign : callable
        Whether a monomial is known to be at least 0.

    Yields
    ------
    Poly
        A sum in sizes, then for each whole part one in which it takes the place of a size: S is `8*ceiling(S/8) - r`
        with r from 0 to 7, and between two such numbers all are met.

    Notes
    -----
    `x <= ceiling(x) < x + 1` and `x - 1 < floor(x) <= x`, by 1/q less where x is a quotient of a whole number by q.
    """
    values, most = dict[str, Poly](), dict[str, Rational]()
    if mine := _open(p, values, most):
        yield _beneath(p.substitute(mine), most, has_sign)
    for key, value in mine.items():
        others = p.substitute({k: v for k, v in mine.items() if k != key})
        for name in sorted(others.generators() & value.generators() - _divisors(others)):
            if name[0] not in "~" + SLACK and (found := alone(value, name)) is not None:
                size = (Poly({((key, 1),): 1}) - found[1]) / found[0]
                yield _beneath(others.substitute({name: size}), most, has_sign)


def _open(p: Poly, values: dict[str, Poly], most: dict[str, Rational]) -> dict[str, Poly]:
    """Return what whole parts in a sum are, those inside others too: what they round, and something of at least 0."""
    keys = sorted(set(filter(_is_rounded, p.generators())) - _divisors(p))
    for key in keys:
        if key not in values:
            inner = poly(generator(key).args[0])
            whole = all(map(is_whole, inner.terms))
            most[beyond := SLACK + key + "%"] = 1 - Fraction(1, denominator(inner.terms)) if whole else 1
            low = 0 if isinstance(generator(key), sympy.ceiling) else -most[beyond]
            values[key] = inner.substitute(_open(inner, values, most)) + low + Poly({((beyond, 1),): 1})
    return {key: values[key] for key in keys}


def _divisors(p: Poly) -> set[str]:
    return {k for m in p.terms for k, e in m if e < 0}


def _beneath(p: Poly, most: Mapping[str, Rational], has_sign: Callable[[Monomial], bool]) -> Poly:
    """Put the largest values of what is at least 0 where less of it would be more."""

    def bounded(m: Monomial, c: Rational) -> Poly:
        rest = tuple(f for f in m if f[0] not in most)
        if c > 0 or not has_sign(rest):
            return Poly({m: c})
        return Poly({rest: c * prod(most[k] ** e for k, e in m if k in most)})

    return total(bounded(m, c) for m, c in p.terms.items())


def exact(p: Poly) -> tuple[str, Poly] | None:
    """Return a whole part that `p == 0` says is no less than the whole: floor(S/4) where S == 4*floor(S/4)."""
    for key in sorted(p.generators()):
        if _is_rounded(key):
            factor = Poly({tuple(f for f in m if f[0] != key): c for m, c in p.terms.items() if (key, 1) in m})
            inner = poly(generator(key).args[0])
            if factor.terms and p == factor * (Poly({((key, 1),): 1}) - inner):
                return key, inner
    return None


def solve_rounded(p: Poly) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a whole part that stands alone: ceiling(S/2) where ceiling(S/2) == 2*ceiling(S/4)."""
    found = {key: own for key in filter(_is_rounded, p.generators()) if (own := alone(p, key)) is not None}
    for key in sorted(found, key=lambda k: (abs(found[k][0]), k)):  # the smallest factor most often divides the others
        factor, rest = found[key]
        if not any(k[0] == "~" and generator(k).has(generator(key)) for k in rest.generators()):
            return key, rest / -factor
    return None


def put(p: Poly, atom: str, value: Poly) -> Poly:
    """Replace an atom, inside other atoms too."""
    old = generator(atom)
    inside = {k: generator(k) for k in p.generators() if k[0] == "~" and k != atom}
    new = {k: poly(expr.xreplace({old: value.expr})) for k, expr in inside.items() if expr.has(old)}
    return p.substitute({**new, atom: value})
