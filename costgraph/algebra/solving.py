"""Exact solving: rational enclosures of roots, equations for a symbol, and linear algebra over the rationals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import ceil, floor

import sympy

from .polynomial import ONE, SLACK, Poly, Rational, cached, generator, names_in

__all__ = [
    "enclosed",
    "is_root",
    "alone",
    "solve",
    "symbols_in",
    "Matrix",
    "Vector",
    "closure",
    "image_rank",
    "kernel",
    "reduced",
    "solved",
]


# -- roots -------------------------------------------------------------------------------------------------------------


# Precision of the enclosure in bits; sympy evaluates twice as many digits.
_BITS = 48


def is_root(key: str) -> bool:
    """Whether a generator is an irrational number, such as sqrt(42) or 1/(sqrt(2) + 1)."""
    return key[0] == "~" and not names_in(key)


@cached(1 << 10)
def enclosed(key: str) -> tuple[Fraction, Fraction]:
    """Return lower and upper rational bounds of an irrational generator, with a relative gap of about 2**-48."""
    value = Fraction(str(sympy.N(generator(key), 2 * _BITS)))
    scale = Fraction(2) ** (_BITS - value.numerator.bit_length() + value.denominator.bit_length())
    return (floor(value * scale) - 1) / scale, (ceil(value * scale) + 1) / scale


# -- equations ---------------------------------------------------------------------------------------------------------


def symbols_in(p: Poly) -> set[str]:
    """Return the names of symbols that are generators, not inside atoms."""
    return {k for k in p.generators() if k[0] not in "~" + SLACK}


def alone(p: Poly, key: str) -> tuple[Rational, Poly] | None:
    """Return the coefficient of a generator and the rest, if the generator occurs once and linearly."""
    coefficient = p.terms.get(((key, 1),))
    remainder = p - Poly({((key, 1),): coefficient or 0})
    return None if coefficient is None or key in remainder.names() else (coefficient, remainder)


def solve(p: Poly, prefer: Sequence[str] = ()) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a symbol that occurs linearly with a number, or as a factor in one of two monomials."""
    names = [*prefer, *sorted(symbols_in(p) - set(prefer))]
    for key in names:
        if (isolated := alone(p, key)) is not None:
            return key, isolated[1] / -isolated[0]
    if len(p.terms) == 2:
        (m, c), (n, d) = sorted(p.terms.items())
        ratio = Poly({m: -c}) / Poly({n: d})  # == 1
        for key in names:
            power = next((e for m in ratio.terms for k, e in m if k == key), 0)
            if abs(power) == 1:
                cofactor = ratio / Poly({((key, power),): 1})
                if key not in cofactor.names():
                    return key, cofactor if power == -1 else ONE / cofactor
    return None


# -- subspaces ---------------------------------------------------------------------------------------------------------


Vector = tuple[Fraction, ...]
Matrix = tuple[Vector, ...]


def reduced(rows: Iterable[Sequence[Fraction | int]]) -> Matrix:
    """Return the reduced row echelon form without zero rows, unique for each subspace."""
    pending = [[Fraction(x) for x in row] for row in rows]
    reduced_rows: list[list[Fraction]] = []
    for column in range(len(pending[0]) if pending else 0):
        pivot = next((row for row in pending if row[column]), None)
        if pivot is None:
            continue
        pending.remove(pivot)
        unit = [x / pivot[column] for x in pivot]
        for row in (*pending, *reduced_rows):
            factor = row[column]
            row[:] = [x - factor * y for x, y in zip(row, unit, strict=True)]
        reduced_rows.append(unit)
    return tuple(map(tuple, reduced_rows))


def kernel(rows: Matrix, size: int) -> Matrix:
    """Return a kernel basis for a matrix with `size` columns."""
    form = reduced(rows)
    pivots = [next(i for i, x in enumerate(row) if x) for row in form]
    out = []
    for free in set(range(size)) - set(pivots):
        vector = [Fraction(int(i == free)) for i in range(size)]
        for row, pivot in zip(form, pivots, strict=True):
            vector[pivot] = -row[free]
        out.append(vector)
    return reduced(out)


def image_rank(rows: Matrix, subspace: Matrix) -> int:
    """Return the rank of a linear map restricted to a subspace."""
    return len(reduced([[sum(a * b for a, b in zip(row, v, strict=True)) for row in rows] for v in subspace]))


def closure(subspaces: Iterable[Matrix], size: int, most: int) -> list[Matrix] | None:
    """Return the closure of subspaces under sum and intersection; None if it has more than `most` elements."""
    members: list[Matrix] = []
    due = list(dict.fromkeys(subspaces))
    while due:
        new = due.pop()
        if len(members) >= most:
            return None
        for old in members:
            intersection = kernel(kernel(old, size) + kernel(new, size), size)
            due += [s for s in (reduced(old + new), intersection) if s != new and s not in members and s not in due]
        members.append(new)
    return members


def solved(rows: Sequence[Sequence[Fraction | int]], right: Sequence[Fraction | int]) -> Vector | None:
    """Return the unique solution of a square linear system, or None if it is singular."""
    size = len(rows)
    form = reduced([*row, value] for row, value in zip(rows, right, strict=True))
    if len(form) < size or any(not form[i][i] for i in range(size)):
        return None
    return tuple(row[-1] for row in form)
