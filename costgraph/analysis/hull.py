"""Leaving out what lies between two others: live bytes that change by the same amount from layer to layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from typing import Protocol, TypeVar

from ..algebra.polynomial import Monomial, Poly, Rational

__all__ = ["corners"]


class _Named(Protocol):
    """What says which op it belongs to."""

    @property
    def op(self) -> str | None: ...


Label = TypeVar("Label", bound=_Named)


def corners(candidates: Iterable[tuple[Poly, Label]]) -> list[tuple[Poly, Label]]:
    """Drop candidates for a maximum, in program order, that are at most a mean of two others, for all sizes.

    Layers that are declared one by one add residuals or gradients of equal size, so that only the first and the last of
    them are left. Ops that have the same name but for numbers are looked at together, layer by layer: whatever is
    dropped is so because of what is kept, the names only say where to look.
    """
    rows: dict[str, list[tuple[int, tuple[Poly, Label]]]] = {}
    for i, (p, owner) in enumerate(candidates):
        row = rows.setdefault(re.sub(r"\d+", "", owner.op or ""), [])
        while len(row) > 1 and _between(row[-2][1][0], row[-1][1][0], p):
            row.pop()
        row.append((i, (p, owner)))
    return [candidate for _, candidate in sorted((item for row in rows.values() for item in row), key=lambda c: c[0])]


def _between(a: Poly, b: Poly, c: Poly) -> bool:
    """Whether `b <= share*a + (1 - share)*c` term by term for some share from 0 to 1."""
    first, middle, last = _whole(a, b, c)
    m = next((m for m in {**first, **last} if first.get(m, 0) != last.get(m, 0)), None)
    if m is None:
        return middle == first
    above, below = middle.get(m, 0) - last.get(m, 0), first.get(m, 0) - last.get(m, 0)
    if below < 0:
        above, below = -above, -below
    if not 0 <= above <= below:
        return False
    for k in {**first, **middle, **last}:
        left = above * first.get(k, 0) + (below - above) * last.get(k, 0) - below * middle.get(k, 0)
        # an atom, such as a ceiling, may be anything: terms with one have to be equal
        if left < 0 or (left and any(name[0] == "~" for name, _ in k)):
            return False
    return True


def _whole(*ps: Poly) -> Iterator[Mapping[Monomial, Rational]]:
    """Yield the terms of some sums times one number that makes them whole: fractions take many times as long."""
    scale = lcm(*(c.denominator for p in ps for c in p.terms.values()))
    for p in ps:
        yield p.terms if scale == 1 else {m: c.numerator * (scale // c.denominator) for m, c in p.terms.items()}
