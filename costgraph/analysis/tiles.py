"""Tiled schedules of a loop nest: what they keep in the cache, and what they move.

A schedule is an order of loops over blocks of indices. The cache holds the present block of every array; a block is
fetched when an index of it moves on. An array therefore goes through the cache once for each round of the loops outside
of its own innermost one whose indices it lacks. A result's block begins in the cache; where it comes back it is
fetched, and it is written each time that it leaves. Nothing else is assumed of the machine: every schedule here can be
carried out with loads and stores that the program says, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np

from ..algebra.polynomial import ONE, Poly
from ..errors import UnsupportedError
from .nests import Array, Nest

__all__ = [
    "BLOCK", "ONE_EACH", "WHOLE", "Axis", "Loops", "Schedule", "block_sizes", "chosen", "coefficients", "degree",
    "grown", "schedules",
]  # fmt: skip

#: How an index is cut: single positions, blocks of a common length, or not at all.
ONE_EACH, BLOCK, WHOLE = "one", "block", "whole"

# Ways to cut every index and to order the loops that are looked at; beyond, fewer ways to cut the first indices.
_MOST_SCHEDULES = 2500
# Steps by which blocks are made to fit, each of a thousandth at least.
_MOST_CHANGES = 200


@dataclass(frozen=True)
class _Row:
    """One axis of an array: a sum of indices with coefficients."""

    terms: tuple[tuple[int, int], ...]
    """Numbers of axes, with coefficients."""
    dense: bool
    """Whether several index points may reach one place: all that lies between the ends is then taken."""


@dataclass(frozen=True)
class Axis:
    """Indices that stand in the same arrays, which are as good as one."""

    names: tuple[str, ...]
    """Of the indices, slowest first."""
    extent: Poly
    """Positions of all of them together."""
    whole: bool
    """Whether it cannot be cut."""

    def __str__(self) -> str:
        return " ".join(self.names) if len(self.names) == 1 else f"({' '.join(self.names)})"


@dataclass(frozen=True)
class Schedule:
    """How a nest is cut, and the order of its loops."""

    order: tuple[int, ...]
    """Axes, outermost loop first."""
    cuts: tuple[str, ...]
    """How each axis is cut."""


class Loops:
    """A nest whose indices are gathered to axes."""

    def __init__(self, nest: Nest) -> None:
        summed = {n for a in nest.arrays for row in a.access if len(row) > 1 for n, _ in row}
        alike: dict[object, list[str]] = {}
        for name in nest.extents:
            own = name if name in summed else tuple(name in a.names for a in nest.arrays)
            alike.setdefault((own, name in nest.whole), []).append(name)
        self.nest = nest
        self.axes = tuple(
            Axis(tuple(names), prod((nest.extents[n] for n in names), start=ONE), names[0] in nest.whole)
            for names in alike.values()
        )
        self._place = {name: i for i, axis in enumerate(self.axes) for name in axis.names}
        self.extents = tuple(axis.extent for axis in self.axes)
        self._of = {a: self._gathered(a) for a in nest.arrays}
        self._own = {a: frozenset(i for row in rows for i, _ in row.terms) for a, rows in self._of.items()}

    def _gathered(self, array: Array) -> tuple[_Row, ...]:
        rows = tuple(dict.fromkeys(tuple((self._place[n], factor) for n, factor in row) for row in array.access))
        places = [i for row in rows for i, _ in row]
        if len(set(places)) < len(places):
            raise UnsupportedError(
                f"tiling of {self.nest.name!r}: {array.name!r} has one index in two axes, expected each index in one"
            )
        return tuple(_Row(row, self._dense(row)) for row in rows)

    def _dense(self, row: tuple[tuple[int, int], ...]) -> bool:
        reach: Poly = ONE
        for i, factor in sorted(row, key=lambda term: (self.extents[term[0]].constant is None, term[1])):
            if reach.constant is None or factor < reach.constant:
                return len(row) > 1
            reach = reach + (self.extents[i] - 1) * factor
        return False

    def held(self, array: Array, sizes: Sequence[Any]) -> Any:
        """Return the elements of a block."""
        out: Any = 1
        for row in self._of[array]:
            if row.dense:
                out = out * (sum(factor * (sizes[i] - 1) for i, factor in row.terms) + 1)
            else:
                for i, _ in row.terms:
                    out = out * sizes[i]
        return out

    def power(self, array: Array, blocks: Sequence[bool]) -> int:
        """Return the power of a common length that a block's elements are of, for axes that are cut to it."""
        cut = ((row.dense, [blocks[i] for i, _ in row.terms]) for row in self._of[array])
        return sum(any(c) if dense else sum(c) for dense, c in cut)

    def once(self, array: Array, extents: Sequence[Any], rounds: Sequence[Any]) -> Any:
        """Return the elements of all blocks of an array together."""
        out: Any = 1
        for row in self._of[array]:
            if row.dense:  # the sum over blocks of the sum of factor * (length - 1), and of 1
                others = {i: prod((rounds[j] for j, _ in row.terms if j != i), start=1) for i, _ in row.terms}
                blocks = prod((rounds[i] for i, _ in row.terms), start=1)
                out = out * (sum(factor * (extents[i] - rounds[i]) * others[i] for i, factor in row.terms) + blocks)
            else:
                for i, _ in row.terms:
                    out = out * extents[i]
        return out

    def footprint(self, sizes: Sequence[Any]) -> Any:
        """Return the bits of one block of every array: bits, as numbers stay whole."""
        out: Any = 0
        for a in self.nest.arrays:
            out = out + self.held(a, sizes) * a.bits
        return out

    def visits(self, array: Array, order: Sequence[int], cut: Sequence[bool], rounds: Sequence[Any]) -> Any:
        """Return how often a block comes into the cache."""
        own = self._own[array]
        inner = max((at for at, i in enumerate(order) if i in own and cut[i]), default=0)
        out: Any = 1
        for i in order[:inner]:
            if i not in own and cut[i]:
                out = out * rounds[i]
        return out

    def traffic(self, order: Sequence[int], cut: Sequence[bool], extents: Sequence[Any], rounds: Sequence[Any]) -> Any:
        """Return the bits that are moved."""
        out: Any = 0
        for a in self.nest.arrays:
            times = self.visits(a, order, cut, rounds)
            # a block that is made begins in the cache; one that is held is no more when it is done with
            times = {"read": times, "made": 2 * times - 1, "held": 2 * times - 2}[a.role]
            out = out + self.once(a, extents, rounds) * times * a.bits
        return out

    def orders(self) -> list[tuple[int, ...]]:
        """Return orders of the loops: the indices of one array outside, within them those of another, and so on.

        The innermost loops are then those that the first array lacks, which stays where it is meanwhile.
        """
        own, places = self._own, range(len(self.axes))
        arrays = list(self.nest.moved)[:4]
        return list(
            dict.fromkeys(
                tuple(sorted(places, key=lambda i: [i not in own[a] for a in turn])) for turn in permutations(arrays)
            )
        )


def schedules(loops: Loops) -> list[Schedule]:
    """Return the schedules of a nest that are looked at."""
    orders = loops.orders()
    choices = [[WHOLE] if axis.whole else [ONE_EACH, BLOCK, WHOLE] for axis in loops.axes]
    for choice in choices:
        if prod(map(len, choices)) * len(orders) > _MOST_SCHEDULES and BLOCK in choice:
            choice.remove(BLOCK)
    return [Schedule(order, cuts) for cuts in product(*choices) for order in orders]


def block_sizes(cuts: Sequence[str], block: Any, extents: Sequence[Any]) -> list[Any]:
    """Return the length of a block along each axis."""
    return [{ONE_EACH: 1, BLOCK: block}.get(cut, n) for cut, n in zip(cuts, extents, strict=True)]


def degree(loops: Loops, cuts: Sequence[str]) -> int:
    """Return the highest power of the block length in a footprint."""
    return max((loops.power(a, [cut == BLOCK for cut in cuts]) for a in loops.nest.arrays), default=0)


def coefficients(loops: Loops, cuts: Sequence[str], extents: Sequence[Any], unit: Any) -> tuple[Any, Any, Any]:
    """Return c, b, a of a footprint c + b*x + a*x**2 where blocks are of length x; unit is 1 of the numbers' kind."""
    zero, one, two = (loops.footprint(block_sizes(cuts, x, extents)) for x in (0 * unit, unit, 2 * unit))
    square = (two - one - one + zero) / 2
    return zero, one - zero - square, square


# -- in numbers --------------------------------------------------------------------------------------------------


def chosen(
    loops: Loops, extents: Sequence[np.ndarray[Any, Any]], cache: np.ndarray[Any, Any]
) -> Iterator[tuple[Schedule, np.ndarray[Any, Any]]]:
    """Yield schedules with the bits that they move at some points; infinite where a cache of so many is too small."""
    blocks: dict[tuple[str, ...], Any] = {}
    for schedule in schedules(loops):
        cuts = schedule.cuts
        if cuts not in blocks:
            blocks[cuts] = _block(loops, cuts, extents, cache)
        block, fits = blocks[cuts]
        sizes = [np.minimum(s, n) for s, n in zip(block_sizes(cuts, block, extents), extents, strict=True)]
        rounds = [np.ceil(n / s) for n, s in zip(extents, sizes, strict=True)]
        moved = loops.traffic(schedule.order, [cut != WHOLE for cut in cuts], extents, rounds)
        yield schedule, np.where(fits, moved, np.inf)


def _block(loops: Loops, cuts: Sequence[str], extents: Sequence[Any], cache: Any) -> tuple[Any, Any]:
    most = degree(loops, cuts)
    least = loops.footprint([np.float64(s) + 0 * cache for s in block_sizes(cuts, 1.0, extents)])
    if most == 0:
        return np.ones_like(cache), least <= cache
    if most > 2:
        block = np.floor((cache / least) ** (1 / most) + 1e-12)
    else:
        c, b, a = coefficients(loops, cuts, extents, 1.0)
        room = np.maximum(cache - c, 0)
        block = np.floor((np.sqrt(b * b + 4 * a * room) - b) / (2 * a) if most == 2 else room / b)
    return np.maximum(block, 1), least <= cache


def exact(loops: Loops, order: Sequence[int], sizes: Sequence[int], extents: Sequence[int]) -> int:
    """Return the bits that blocks of some lengths move."""
    rounds = [-(-n // s) for n, s in zip(extents, sizes, strict=True)]
    moved: int = loops.traffic(order, [r > 1 for r in rounds], extents, rounds)
    return moved


def grown(
    loops: Loops, order: Sequence[int], sizes: list[int], extents: Sequence[int], cache: int
) -> tuple[list[int], int]:
    """Return blocks that no change of one length, another made to fit, betters; and the bits that they move."""
    best, moved = list(sizes), exact(loops, order, sizes, extents)
    for _ in range(_MOST_CHANGES * 64 // max(64, cache.bit_length())):  # long numbers are slow
        found = ((exact(loops, order, new, extents), new) for new in _changed(loops, best, extents, cache))
        better = next(((less, new) for less, new in found if less * 1024 < moved * 1023), None)
        if better is None:
            break
        moved, best = better
    return best, moved


def _changed(loops: Loops, sizes: list[int], extents: Sequence[int], cache: int) -> Iterator[list[int]]:
    free = [i for i, axis in enumerate(loops.axes) if not axis.whole and extents[i] > 1]
    for i in free:
        s, n = sizes[i], extents[i]
        for length in sorted({x for x in (n, 2 * s, s + 1, s, s - 1, s // 2, 1) if 1 <= x <= n}, reverse=True):
            for other in free:
                trial = [*sizes[:i], length, *sizes[i + 1 :]]
                made = trial if other == i else _filled(loops, trial, other, extents, cache)
                if loops.footprint(made) <= cache:
                    yield made


def _filled(loops: Loops, sizes: list[int], i: int, extents: Sequence[int], cache: int) -> list[int]:
    """Make one length as large as fits."""
    low, high = 1, extents[i]
    while low < high:
        middle = (low + high + 1) // 2
        if loops.footprint([*sizes[:i], middle, *sizes[i + 1 :]]) <= cache:
            low = middle
        else:
            high = middle - 1
    return [*sizes[:i], low, *sizes[i + 1 :]]
