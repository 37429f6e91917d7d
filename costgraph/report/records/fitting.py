"""The terms of a calibrated model of time, fitted to measurements: least squares of logarithms, large errors damped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...analysis.calibrated.model import Attained, alike, attained
from ...analysis.calibrated.terms import COMPUTE, LAUNCH, MEMORY, Rows

__all__ = ["DEVICE_TERMS", "Fitted", "Measured", "WIDTH", "fit"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Terms that a device of its own has, beside those of all.
DEVICE_TERMS = ("matrix unit", "vector unit", "memory", "launch")
#: Squares of what terms are away from 0 cost as much as that many squares of logarithms: of terms of all devices, of
#: one device, of pointwise and transcendental FLOPs, of one place.
_OF_ALL, _OF_ONE, _OF_UNITS, _OF_PLACE = 0.3, 3.0, 0.1, 0.1
#: A device has terms of its own from so many measurements on.
_FEWEST = 3
#: An error of a logarithm beyond which its weight falls: some measurements are of something else than they say.
_LARGE = 0.25
#: Places that ops are compared with, and how far apart they are still alike.
_PLACES, WIDTH = 600, 1.5
#: Ops of a smaller share of a measurement take what they take while the places are fitted; half of it before.
_SHARE = 0.004
#: Steps at the most, how much of the cost the last one has to gain, and how short one may be made.
_STEPS, _ENOUGH, _TOO_CAREFUL = 25, 1e-3, 1e6


@dataclass(frozen=True)
class Measured:
    """What was measured, and the ops that ran."""

    seconds: Array
    """of each measurement"""
    devices: NDArray[np.str_]
    """its device"""
    rows: Rows
    """ops of all measurements, in their order"""
    of: NDArray[np.intp]
    """measurement that each op is of"""

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Fitted:
    """Terms by name, as `Calibration` has them, and the logarithms that they predict for all measurements."""

    compute: Mapping[str, float]
    memory: Mapping[str, float]
    launch: Mapping[str, float]
    units: tuple[float, float]
    devices: Mapping[str, Mapping[str, float]]
    places: Array
    weights: Array
    predicted: Array


class _Terms:
    """The arrays whose sums are logarithms, those of devices among them, and where each is in one vector."""

    def __init__(self, found: Measured, known: Sequence[str]) -> None:
        self.known = known
        on = [found.devices[found.of] == name for name in known]
        rows = found.rows
        units = [rows.compute[:, unit] * here for here in on for unit in range(2)]
        self.blocks: list[NDArray[np.floating]] = [
            np.column_stack([rows.compute, *units]), np.column_stack([rows.traffic, *on]),
            np.column_stack([rows.launch, *on]), np.zeros((len(found.of), 0)),
        ]  # fmt: skip
        own = [2 * len(known), len(known), len(known), 0]
        costs = [[_OF_ALL] * (b.shape[1] - n) + [_OF_ONE] * n for b, n in zip(self.blocks, own, strict=True)]
        self.cost = np.array([*costs[0], *costs[1], *costs[2], _OF_UNITS, _OF_UNITS])

    def compared(self, near: NDArray[np.float32]) -> None:
        """Add what ops that are alike took."""
        self.blocks[3] = near
        self.cost = np.concatenate([self.cost, np.full(near.shape[1], _OF_PLACE)])

    def split(self, terms: Array) -> list[Array]:
        """Return the terms of each block, and in the place before the last those of units."""
        ends = np.cumsum([b.shape[1] for b in self.blocks[:3]] + [2])
        return [np.asarray(part, dtype=float) for part in np.split(terms, ends)]

    def times(self, rows: Rows, terms: Array) -> Attained:
        """Return the times of all ops."""
        *sums, unit, near = self.split(terms)
        compute, traffic, launch, alike_ones = (b @ t for b, t in zip(self.blocks, [*sums, near], strict=True))
        return attained(rows, compute, traffic, launch, unit.tolist(), alike_ones)


def _totals(found: Measured, seconds: Array) -> Array:
    summed: Array = np.bincount(found.of, seconds * found.rows.times, len(found)).astype(float)
    return summed


class _Errors:
    """What some ops of each measurement are asked to add up to; the seconds of its other ops stay as they are."""

    def __init__(self, found: Measured, terms: _Terms, use: Mask, rest: Array) -> None:
        self.rows, self.terms, self.use = found.rows[use], terms, use
        self.ids, self.of = np.unique(found.of[use], return_inverse=True)
        self.starts = np.searchsorted(self.of, np.arange(len(self.ids)))
        self.wanted, self.rest = np.log(found.seconds[self.ids]), rest[self.ids]
        self.blocks = [b[use] for b in terms.blocks]

    def at(self, now: Array) -> tuple[Attained, Array, Array, float]:
        """Return the times, the error of each measurement, the share of each op in it, and the cost of all."""
        *sums, unit, near = self.terms.split(now)
        compute, traffic, launch, alike_ones = (b @ t for b, t in zip(self.blocks, [*sums, near], strict=True))
        found = attained(self.rows, compute, traffic, launch, unit.tolist(), alike_ones)
        seconds = found.seconds * self.rows.times
        total = self.rest + np.bincount(self.of, seconds, len(self.ids))
        error = self.wanted - np.log(total)
        size = np.abs(error)
        damped = np.where(size < _LARGE, error**2 / 2, _LARGE * (size - _LARGE / 2))
        return found, error, seconds / total[self.of], float(damped.sum() + (self.terms.cost * now**2).sum() / 2)

    def slope(self, at: Attained, share: Array, first: int) -> Array:
        """Return by how much the logarithm of each measurement grows with each term from `first` on."""
        work = share * at.work
        parts = (work * at.matrix, work * at.memory, share - work, work * at.vector, work * at.special, work)
        of_units = np.ones((len(work), 1))
        arrays = [*self.blocks[:3], of_units, of_units, self.blocks[3]]
        ends = np.cumsum([a.shape[1] for a in arrays])
        slopes = [
            np.add.reduceat(part[:, None] * array, self.starts, axis=0)
            for part, array, end in zip(parts, arrays, ends, strict=True)
            if array.shape[1] and end > first
        ]
        return np.concatenate(slopes, axis=1)


def _descend(errors: _Errors, start: Array, first: int = 0) -> Array:
    """Return the terms that are best: Gauss and Newton's steps, shorter where one does not help.

    Those before `first`, which is where a block of them ends, stay as they are.
    """
    now, caution = start.copy(), 0.1
    at, error, share, before = errors.at(now)
    for _ in range(_STEPS):
        slope = errors.slope(at, share, first)
        weight = np.minimum(1.0, _LARGE / np.maximum(np.abs(error), 1e-12))
        square = (slope * weight[:, None]).T @ slope + np.diag(errors.terms.cost[first:])
        down = slope.T @ (weight * error) - errors.terms.cost[first:] * now[first:]
        while True:
            there = now.copy()
            there[first:] += np.linalg.solve(square + caution * np.diag(np.diag(square)), down)
            found = errors.at(there)
            if found[3] < before or caution > _TOO_CAREFUL:
                break
            caution *= 4
        gain = before - found[3]
        if gain <= 0:
            break
        now, caution = there, caution / 3
        at, error, share, before = found
        if gain < _ENOUGH * before:
            break
    return now


def _spread(places: Array, count: int) -> Array:
    """Return places that are far apart: each next one is that which is farthest from those before."""
    left: Array = np.unique(np.round(places, 2), axis=0)
    chosen, apart = [0], ((left - left[0]) ** 2).sum(1)
    while len(chosen) < min(count, len(left)) and apart.max() > 1e-3:
        chosen.append(int(apart.argmax()))
        apart = np.minimum(apart, ((left - left[chosen[-1]]) ** 2).sum(1))
    return left[chosen]


def fit(found: Measured, train: Mask) -> Fitted:
    """Fit the terms to the measurements of `train`, and predict all: what is not in it leaves no trace in them."""
    names, counts = np.unique(found.devices[train], return_counts=True)
    known = [str(name) for name, count in zip(names, counts, strict=True) if count >= _FEWEST]
    terms, seen = _Terms(found, known), train[found.of]
    times, large = _shares(found, terms, np.zeros(len(terms.cost)), _SHARE / 2)
    first = _descend(_Errors(found, terms, seen & large, _totals(found, times * ~large)), np.zeros(len(terms.cost)))
    times, large = _shares(found, terms, first, _SHARE)
    places = _spread(found.rows.shape[seen & large], _PLACES)
    near = np.zeros((len(large), len(places)), dtype=np.float32)
    near[large] = alike(found.rows.shape[large], places, WIDTH)
    terms.compared(near)
    errors = _Errors(found, terms, seen & large, _totals(found, times * ~large))
    last = _descend(errors, np.concatenate([first, np.zeros(len(places))]), len(first))
    return _named(terms, last, places, np.log(_totals(found, terms.times(found.rows, last).seconds)))


def _shares(found: Measured, terms: _Terms, now: Array, least: float) -> tuple[Array, Mask]:
    """Return the times of all ops, and which of them are more than a share of what was measured with them."""
    times = terms.times(found.rows, now).seconds
    return times, times * found.rows.times > least * _totals(found, times)[found.of]


def _named(terms: _Terms, found: Array, places: Array, predicted: Array) -> Fitted:
    compute, memory, launch, units, weights = (each.tolist() for each in terms.split(found))
    own = [compute[len(COMPUTE) :: 2], compute[len(COMPUTE) + 1 :: 2], memory[len(MEMORY) :], launch[len(LAUNCH) :]]
    devices = {
        name: dict(zip(DEVICE_TERMS, values, strict=True))
        for name, values in zip(terms.known, zip(*own, strict=True), strict=True)
    }
    return Fitted(
        dict(zip(COMPUTE, compute, strict=False)), dict(zip(MEMORY, memory, strict=False)),
        dict(zip(LAUNCH, launch, strict=False)), (units[0], units[1]), devices, places, np.array(weights), predicted,
    )  # fmt: skip
