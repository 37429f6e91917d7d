"""Leaving out of a maximum or minimum what another of its arguments dominates for every admissible size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import ge
from typing import TypeVar

from .dominance import NOTHING_KNOWN, Relations
from .polynomial import Poly
from .sampling import apart, compared_at

__all__ = ["prune"]

Label = TypeVar("Label")

# Points at which candidates are compared before anything is proved: small, large and mixed sizes.
_POINTS: tuple[Callable[[int], int], ...] = (
    lambda i: 1,
    lambda i: 3 + 2 * i,
    lambda i: 10 ** (5 - i % 5),
    lambda i: 10 ** (1 + i % 5),
    lambda i: 10**3 + 77 * i,
)


def prune(
    candidates: Iterable[tuple[Poly, Label]], relations: Relations = NOTHING_KNOWN, *, largest: bool = True
) -> list[tuple[Poly, Label]]:
    """Drop every candidate that another one dominates.

    Parameters
    ----------
    candidates : iterable of (Poly, label)
        Of equal polynomials the first label is kept.
    relations : Relations
        What is known of the sizes.
    largest : bool
        Keep what a maximum needs, or, if False, what a minimum needs.

    Returns
    -------
    list of (Poly, label)
        In the order of the candidates.
    """
    first: dict[Poly, Label] = {}
    for p, label in candidates:
        first.setdefault(p, label)
    if len(first) < 2:
        return list(first.items())
    values = _samples(first, relations, 1 if largest else -1)

    def dominates(q: Poly, p: Poly) -> bool:
        # a point where q is smaller settles it; only the others need a proof
        return all(map(ge, values[q], values[p])) and relations.nonnegative((q - p) if largest else (p - q))

    kept: list[Poly] = []
    for p in sorted(first, key=lambda p: (values[p][::-1], p.sort_key()), reverse=True):
        if not any(dominates(q, p) for q in kept):
            kept.append(p)
    # ties at the samples may have put a dominated one first
    final = {p for p in kept if not any(q is not p and dominates(q, p) for q in kept)}
    return [(p, label) for p, label in first.items() if p in final]


def _samples(candidates: Collection[Poly], relations: Relations, sign: int) -> dict[Poly, list[int]]:
    """Values of each candidate at a few admissible points: exact, since all sizes there are integers."""
    parts = apart(candidates)
    keys = relations.free({k for part in parts.values() for k in part.generators()})
    points = [{k: at(i) for i, k in enumerate(keys)} for at in _POINTS]
    # one generator large among small ones, and small among large ones
    points += [
        {k: big if k == one else small for k in keys} for one in keys[:16] for big, small in ((10**6, 1), (1, 999))
    ]
    admissible = [values for at in points if (values := relations.sample(at)) is not None]
    return {p: [sign * v for v in row] for p, row in compared_at(parts, admissible).items()}
