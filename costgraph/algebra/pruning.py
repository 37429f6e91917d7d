"""Leaving out of a maximum or minimum what its other arguments reach for every admissible size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import TypeVar

import numpy as np

from .convex import Table, corners, skyline
from .dominance import NOTHING_KNOWN, Relations
from .polynomial import Monomial, Poly
from .roots import is_root

__all__ = ["prune", "reached_by"]

Label = TypeVar("Label")

# Sums of products of integers below this are far from where int64 ends.
_MOST = 1 << 62


def prune(
    candidates: Iterable[tuple[Poly, Label]], relations: Relations = NOTHING_KNOWN, *, largest: bool = True
) -> list[tuple[Poly, Label]]:
    """Drop every candidate that another one, or a mean of several others, reaches for all sizes.

    `largest` keeps what a maximum needs, otherwise what a minimum does; of equal polynomials the first label is kept.

    Generators are written as their lower bounds plus something that is not negative: a candidate goes if the
    coefficients of a convex combination of others are nowhere below its own then. That is sufficient, not necessary.
    """
    first: dict[Poly, Label] = {}
    for p, label in candidates:
        first.setdefault(p, label)
    kept = list(first)
    if len(kept) == 2:  # most often, and fast without a table
        a, b = sorted(kept, key=Poly.sort_key)
        sign = relations.sign(a - b if largest else b - a)
        kept = {1: [a], -1: [b], 0: kept}[sign]
    elif len(kept) > 1:
        # of generators that are at least 0 whatever is known of them, which is fast where candidates are many
        kept = _best(kept, relations, None, largest=largest)
        more = relations.relations or any(is_root(k) for p in kept for k in p.generators())
        for known in (False, True) if more else (False,):
            images = relations.spread(sorted({m for p in kept for m in p.terms}), known=known)
            if len(kept) > 1 and images is not None:
                kept = _best(kept, relations, images, largest=largest)
    final = set(kept)
    return [(p, label) for p, label in first.items() if p in final]


def reached_by(ps: Iterable[Poly], others: Iterable[Poly], relations: Relations = NOTHING_KNOWN) -> bool:
    """Whether each of some polynomials is one of others, or nowhere above the largest of them."""
    return all(is_other for _, is_other in prune([*((q, True) for q in others), *((p, False) for p in ps)], relations))


def _best(
    ps: Sequence[Poly], relations: Relations, images: Mapping[Monomial, Poly] | None, *, largest: bool
) -> list[Poly]:
    """Keep what others do not reach by coefficients: of the sums as they are, or of what their monomials become."""
    table = _coefficients(ps)
    monomials = list({m: None for p in ps for m in p.terms})
    columns = {m: Poly({m: 1}) for m in monomials} if images is None else {m: images[m] for m in monomials}
    if images is not None:
        table = _product(table, _coefficients(list(columns.values())))
        monomials = list({m: None for p in columns.values() for m in p.terms})
    free = np.array([not relations.has_sign(m) for m in monomials], dtype=bool)
    changing = (table != table[0]).any(axis=0)
    table = np.hstack([table[:, changing], -table[:, changing & free]])
    table = table if largest else -table
    order = range(len(ps)) if images is None else sorted(range(len(ps)), key=lambda i: ps[i].sort_key())
    found = skyline(table, order)
    if images is not None:
        found = [found[i] for i in corners(table[found])]
    return [ps[i] for i in found]


def _coefficients(ps: Sequence[Poly]) -> Table:
    """Return the coefficients of sums, a row each and a column for each monomial in the order of their first use.

    All are multiplied by one number that makes them whole.
    """
    monomials = {m: i for i, m in enumerate({m: None for p in ps for m in p.terms})}
    whole = lcm(*{c.denominator for p in ps for c in p.terms.values()})
    rows: list[list[int]] = [[0] * len(monomials) for _ in ps]
    for row, p in zip(rows, ps, strict=True):
        for m, c in p.terms.items():
            row[monomials[m]] = c if type(c) is int and whole == 1 else int(c * whole)
    most = max((abs(c) for row in rows for c in row), default=0)
    shape = (len(ps), len(monomials))
    return np.array(rows, dtype=np.int64 if most * max(len(monomials), 2) < _MOST else object).reshape(shape)


def _product(a: Table, b: Table) -> Table:
    """Return a product of tables, exact."""
    most = int(np.abs(a).max(initial=0)) * int(np.abs(b).max(initial=0)) * max(a.shape[1], 2)
    return a @ b if most < _MOST else a.astype(object) @ b.astype(object)
