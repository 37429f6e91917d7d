"""Exact linear algebra over the rationals: rank, kernels, and lattices of subspaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

__all__ = ["Matrix", "Vector", "closure", "image_rank", "kernel", "reduced", "solved"]

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
