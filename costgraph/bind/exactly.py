"""A formula at one point, exactly: whole numbers that are multiplied and added, each product once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import ceil, floor, lcm
from operator import itemgetter, mul
from typing import Any

import sympy

from ..algebra.conditions import Validity
from ..algebra.extremum import Max, Min
from ..algebra.generators import cached
from ..algebra.polynomial import Monomial, Poly, as_poly, generator, poly

__all__ = ["At", "NoRuleError", "allowed", "exactly"]

At = Callable[[Mapping[str, Any]], Any]


class NoRuleError(Exception):
    """A value that no fraction is, such as a logarithm."""


@cached(1 << 10)
def exactly(p: Poly) -> At:
    """Return a sum as a function of sizes by name, which returns an int or a Fraction.

    Of sizes that have no such value it raises ZeroDivisionError, ShapeError or NoRuleError.

    Examples
    --------
    >>> from costgraph.algebra.symbols import dims
    >>> B, S = dims("B S")
    >>> exactly(poly(Max(30, 2*B) / S))({"B": 21, "S": 2})
    Fraction(21, 1)
    """
    return _joined([p], itemgetter(0))


def _joined(parts: Sequence[Poly], join: Callable[[list[Any]], Any]) -> At:
    """Return what joins the values of several sums; they have one divisor, so that whole numbers are compared."""
    lowest: dict[str, int] = {}
    for m in (m for p in parts for m in p.terms):
        for k, e in m:
            if e < 0:
                lowest[k] = min(e, lowest.get(k, 0))
    if len(parts) > 1 and any(k[0] == "~" for k in lowest):  # may be below 0, where the larger becomes the smaller
        each = [_joined([p], itemgetter(0)) for p in parts]
        return lambda sizes: join([one(sizes) for one in each])
    scale = lcm(*(c.denominator for p in parts for c in p.terms.values()))
    divisor = tuple(sorted((k, -e) for k, e in lowest.items()))
    whole = [p * Poly({divisor: scale}) for p in parts]
    monomials = list(dict.fromkeys(m for p in whole for m in p.terms))
    rows = [_row(p, monomials) for p in whole]
    products, below = _products(monomials), _products([divisor])
    atoms = {k: _atom(k) for m in (*monomials, divisor) for k, _ in m if k[0] == "~"}
    plain = scale == 1 and not divisor

    def at(sizes: Mapping[str, Any]) -> Any:
        if atoms:
            sizes = {**sizes, **{k: one(sizes) for k, one in atoms.items()}}
        values = products(sizes)
        found = join([sum(map(mul, numbers, pick(values))) for pick, numbers in rows])
        return found if plain else Fraction(found) / (scale * below(sizes)[0])

    return at


def _row(p: Poly, monomials: list[Monomial]) -> tuple[Callable[[list[Any]], Any], tuple[Any, ...]]:
    """Return what picks the monomials of a sum, and their coefficients; two at least, or one would be no tuple."""
    place = {m: i for i, m in enumerate(monomials)}
    terms = [(place[m], c) for m, c in p.terms.items()] + [(0, 0)] * 2
    if not monomials:
        return lambda values: (), ()
    return itemgetter(*(i for i, _ in terms)), tuple(c for _, c in terms)


def _products(monomials: list[Monomial]) -> Callable[[Mapping[str, Any]], list[Any]]:
    def values(sizes: Mapping[str, Any]) -> list[Any]:
        out = []
        for m in monomials:
            product = 1
            for key, power in m:
                product *= sizes[key] if power == 1 else sizes[key] ** power
            out.append(product)
        return out

    return values


def _atom(key: str) -> At:
    expr = generator(key)
    if isinstance(expr, Max | Min):
        return _joined([poly(a) for a in expr.args], max if isinstance(expr, Max) else min)
    if isinstance(expr, sympy.floor | sympy.ceiling):
        inner, step = exactly(poly(expr.args[0])), floor if isinstance(expr, sympy.floor) else ceil
        return lambda sizes: step(inner(sizes))
    if expr.is_Pow and expr.exp == -1:
        base = exactly(poly(expr.base))
        return lambda sizes: 1 / Fraction(base(sizes))
    names, alone = [s.name for s in expr.free_symbols], Poly({((key, 1),): 1})

    def bound(sizes: Mapping[str, Any]) -> Any:
        found = alone.bind({name: as_poly(sizes[name]) for name in names}).constant
        if found is None:
            raise NoRuleError
        return found

    return bound


# -- what a formula holds for ------------------------------------------------------------------------------------


def allowed(held: Validity, sizes: Mapping[str, int]) -> bool:
    """Whether sizes are known to be ones that a formula holds for; False where that has to be looked at closely."""
    return _gate(held)(sizes)


@cached(1 << 7)
def _gate(held: Validity) -> Callable[[Mapping[str, int]], bool]:
    asked = [(a, a.amount.names(), exactly(a.amount)) for a in held.tests()]
    counts = {name: (p.names(), exactly(p)) for name, p in held.counted().items()} if held.counts else {}

    def passes(sizes: Mapping[str, int]) -> bool:
        given = sizes.keys()
        for a, names, at in asked:
            if names <= given:
                value = at(sizes)
                if not a.passed(value.numerator, value.denominator):
                    return False
            elif a.equal and not names.isdisjoint(given):  # something follows for the others
                return False
        met = {name: int(at(sizes)) for name, (names, at) in counts.items() if names <= given}
        return held.counts is None or held.counts.hold(met)

    return passes
