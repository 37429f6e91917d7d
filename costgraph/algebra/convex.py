"""Which rows of a table of integers no mean of other rows reaches: a linear program, its answer checked exactly.

A row that lies at or below a mean of other rows in every column never stands out alone, whatever weights that are not
negative the columns are given. Floating point looks for the shares of such a mean; whether it is one is decided by
integers, so that a wrong answer of the search leaves a row too many, never one too few.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Table", "corners", "reached", "skyline"]

#: Integers, a row for each candidate: int64, or Python's own where they might not fit.
Table: TypeAlias = "np.ndarray[Any, Any]"
_Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

# What the search takes for equal, relative to the largest number of a column.
_CLOSE = 1e-9
_MOST_PIVOTS = 2_000
# Shares are first taken in steps of this part of 1.
_FINE = 1 << 30
# Larger systems of shares are not solved exactly: what they would leave out is kept.
_MOST_SHARES = 40


def skyline(table: Table, order: Sequence[int]) -> list[int]:
    """Return the rows that no other row reaches in every column, of equal ones the first in the given order."""
    # a row that reaches another one has the larger sum
    sums = [int(n) for n in table.sum(axis=1)]
    kept: list[int] = []
    found = np.empty_like(table)
    for i in sorted(order, key=lambda i: -sums[i]):
        if not (found[: len(kept)] >= table[i]).all(axis=1).any():
            found[len(kept)] = table[i]
            kept.append(i)
    return kept


def corners(table: Table) -> list[int]:
    """Return the rows that no mean of other rows reaches in every column; the rows have to be a skyline.

    Examples
    --------
    >>> corners(np.array([[4, 0], [0, 4], [2, 2], [1, 1], [3, 3]]))
    [0, 1, 4]
    """
    kept = list(range(len(table)))
    most, least = table.max(axis=0), table.min(axis=0)
    first = table == most
    alone = first[:, first.sum(axis=0) == 1].any(axis=1)  # the largest of a column: no mean reaches that
    for i in np.flatnonzero(~alone):
        others = [j for j in kept if j != i]
        above = table[:, table[i] > least]
        if len(others) > 1 and reached(above[others] - above[i]):
            kept = others
    return kept


def reached(gains: Table) -> bool:
    """Whether some mean of rows, integers all, is negative in no column."""
    while len(gains):
        top = gains.max(axis=0, initial=-1)
        if (top < 0).any():
            return False
        # where the best is 0, a row below it has no share in any such mean
        possible = (gains[:, top == 0] == 0).all(axis=1)
        if possible.all():
            break
        gains = gains[possible]
    if not len(gains):
        return False
    open_ = gains[:, (gains < 0).any(axis=0)]
    return not open_.shape[1] or _mean(open_)


def _mean(gains: Table) -> bool:
    """Whether a mean is found whose exact value is negative in no column."""
    scales = np.abs(gains).max(axis=0)
    found = _game((gains / scales).astype(float) + 2.0)
    if found is None:
        return False
    rows, columns, near = found
    weights = np.array([int(share) for share in np.rint(near * _FINE)], dtype=object)
    if (weights >= 0).all() and weights.any() and (weights @ gains.astype(object) >= 0).all():
        return True
    if len(rows) > _MOST_SHARES:
        return False
    # of the game in which every column has the same value, written without a fraction
    system = [[int(gains[j, k]) + 2 * int(scales[k]) for j in rows] + [int(scales[k])] for k in columns]
    shares = _solved(system)
    if shares is None or min(shares) < 0:
        return False
    whole = lcm(*(share.denominator for share in shares))
    weights = np.array([int(share * whole) for share in shares], dtype=object)
    return bool((weights @ gains[rows].astype(object) >= 0).all())


def _game(payoff: _Floats) -> tuple[list[int], list[int], _Floats] | None:
    """Solve max sum(y), payoff @ y <= 1, y >= 0 by the simplex method, all payoffs from 1 to 3.

    Answers with the rows that the shares of the best mean are solved from, as many columns, in which it is the least,
    and the shares of all rows; None where the sum passes 1/2: each mean of rows is then below 2 in some column.
    """
    n, m = payoff.shape
    table = np.hstack([payoff, np.eye(n), np.ones((n, 1))])
    worth = np.concatenate([np.ones(m), np.zeros(n + 1)])
    basis = list(range(m, m + n))
    for turn in range(_MOST_PIVOTS):
        if -worth[-1] > 0.5 + _CLOSE:
            return None
        better = np.flatnonzero(worth[:-1] > _CLOSE)
        if not len(better):
            slack = {k - m for k in basis if k >= m}
            shares = np.maximum(-worth[m:-1], 0.0)
            return [j for j in range(n) if j not in slack], [k for k in basis if k < m], shares / shares.sum()
        # the steepest column; the first one, which cannot go round in circles, if that takes long
        enter = better[0] if turn > _MOST_PIVOTS // 2 else better[worth[better].argmax()]
        column = table[:, enter]
        rows = np.flatnonzero(column > _CLOSE)
        ratios = table[rows, -1] / column[rows]
        close = rows[ratios <= ratios.min() + _CLOSE**2]
        leave = min(close, key=basis.__getitem__)
        table[leave] /= table[leave, enter]
        change = table[:, enter].copy()
        change[leave] = 0.0
        table -= np.outer(change, table[leave])
        worth = worth - worth[enter] * table[leave]
        basis[leave] = int(enter)
    return None


def _solved(system: list[list[int]]) -> list[Fraction] | None:
    """Solve as many equations as unknowns, exactly: coefficients and the right side; None where they are dependent."""
    rows = [[Fraction(n) for n in row] for row in system]
    for i in range(len(rows)):
        at = next((j for j in range(i, len(rows)) if rows[j][i]), None)
        if at is None:
            return None
        rows[i], rows[at] = rows[at], rows[i]
        rows[i] = [n / rows[i][i] for n in rows[i]]
        for j, row in enumerate(rows):
            if j != i and row[i]:
                rows[j] = [a - row[i] * b for a, b in zip(row, rows[i], strict=True)]
    return [row[-1] for row in rows]
