"""Leaving out what lies between two others: live bytes that change by the same amount from layer to layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import combinations

from ..algebra.extremum import Owner
from ..algebra.polynomial import Monomial, Poly

__all__ = ["at_most", "corners"]

_Candidate = tuple[Poly, Owner]


def corners(candidates: Iterable[_Candidate]) -> list[_Candidate]:
    """Drop candidates for a maximum that are at most a mean of two others, for all sizes.

    Parameters
    ----------
    candidates : iterable of (Poly, Owner)
        In program order. Ops that have the same name but for numbers are looked at together, layer by layer: whatever
        is dropped is so because of what is kept, the names only say where to look.

    Returns
    -------
    list of (Poly, Owner)
        In program order, with the same maximum. Layers that are declared one by one add residuals or gradients of
        equal size, so that only the first and the last of them are left.
    """
    rows: dict[str, list[tuple[int, _Candidate]]] = {}
    for i, (p, owner) in enumerate(candidates):
        row = rows.setdefault(re.sub(r"\d+", "", owner.op or ""), [])
        while len(row) > 1 and _between(row[-2][1][0], row[-1][1][0], p):
            row.pop()
        row.append((i, (p, owner)))
    return [candidate for _, candidate in sorted((item for row in rows.values() for item in row), key=lambda c: c[0])]


def at_most(ps: Sequence[Poly], qs: Sequence[Poly]) -> bool:
    """Whether each of some polynomials is one of others, or at most a mean of two of them."""
    rest = set(ps).difference(qs)
    return all(any(_between(a, p, c) for a, c in combinations(qs, 2)) for p in rest)


def _between(a: Poly, b: Poly, c: Poly) -> bool:
    """Whether `b <= share*a + (1 - share)*c` term by term for some share from 0 to 1."""
    first, middle, last = a.terms, b.terms, c.terms
    m = next((m for m in {**first, **last} if first.get(m, 0) != last.get(m, 0)), None)
    if m is None:
        return middle == first
    share = Fraction(middle.get(m, 0) - last.get(m, 0)) / Fraction(first.get(m, 0) - last.get(m, 0))
    if not 0 <= share <= 1:
        return False
    mean = {k: share * first.get(k, 0) + (1 - share) * last.get(k, 0) for k in {**first, **middle, **last}}
    # an atom, such as a ceiling, may be anything: terms with one have to be equal
    return all(middle.get(k, 0) == v if _has_atom(k) else middle.get(k, 0) <= v for k, v in mean.items())


def _has_atom(m: Monomial) -> bool:
    return any(name[0] == "~" for name, _ in m)
