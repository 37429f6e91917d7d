"""Values of many polynomials at a few points, in whole numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from math import lcm

from .polynomial import Poly, Rational

__all__ = ["apart", "compared_at"]


def apart(candidates: Collection[Poly]) -> dict[Poly, Poly]:
    """Return each polynomial without the terms that all of them have, which no comparison depends on."""
    shared = set.intersection(*(set(p.terms.items()) for p in candidates))
    return {p: Poly({m: c for m, c in p.terms.items() if (m, c) not in shared}) for p in candidates}


def compared_at(parts: Mapping[Poly, Poly], points: Sequence[Mapping[str, Rational]]) -> dict[Poly, list[int]]:
    """Return the value of each polynomial at each point, in units that all polynomials share at a point.

    Parameters
    ----------
    parts : mapping of Poly to Poly
        What is evaluated, by what it stands for.
    points : sequence of mapping of str to int or Fraction
        Values of generators, all above 0.

    Returns
    -------
    dict of Poly to list of int
        Values at one point compare as those of the polynomials do. Of a graph they have most monomials in common,
        each of which is evaluated once at each point.

    Examples
    --------
    >>> from costgraph.algebra.polynomial import poly
    >>> from costgraph.algebra.symbols import dims
    >>> B, D = dims("B D")
    >>> compared_at({p: p for p in map(poly, (B / D, B))}, [{"B": 1, "D": 3}]).values()
    dict_values([[1], [3]])
    """
    monomials = list({m: None for part in parts.values() for m in part.terms})
    whole = lcm(*(Fraction(c).denominator for part in parts.values() for c in part.terms.values()))
    rows = {p: [(m, int(c * whole)) for m, c in part.terms.items()] for p, part in parts.items()}
    out: dict[Poly, list[int]] = {p: [] for p in parts}
    for values in points:
        amounts = []
        for monomial in monomials:
            above = below = 1
            for key, power in monomial:
                number = values[key]
                top, bottom = (number.numerator, number.denominator)[:: 1 if power > 0 else -1]
                above, below = above * top ** abs(power), below * bottom ** abs(power)
            amounts.append(Fraction(above, below))
        scale = lcm(*(amount.denominator for amount in amounts))
        at = {m: int(amount * scale) for m, amount in zip(monomials, amounts, strict=True)}
        for p, row in rows.items():
            out[p].append(sum(at[m] * c for m, c in row))
    return out
