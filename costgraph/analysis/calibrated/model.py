"""A calibrated model of time: what devices were seen to attain of their peaks, as a function of ops and of devices."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FormatError
from ...notation.door import Rule
from ...notation.records import Text, read_record
from ...text_file import place_of, read_text
from ..work import Asked, Rates
from .loads import Load, load_of
from .terms import COMPUTE, DEVICE, LAUNCH, MEMORY, PLACE, Rows, rows_of

__all__ = ["SHIPPED", "Attained", "Calibration", "Figures", "load_calibration", "loads_of", "shipped"]

Array = NDArray[np.float64]

SCHEMA = "costgraph/calibration/1"
"""What the JSON of this version calls itself; another number means other terms."""

SHIPPED = Path(__file__).with_name("published_gpus.json")
"""The model that comes with the library."""

#: Time in compute and in memory overlap almost whole: the larger one, and little of the other.
_OVERLAP = 3.0
#: Seconds of a launch where nothing was measured; a guess that measurements move.
_LAUNCH = 5e-6
#: Most that terms may make of a time, as a logarithm: a device that nobody saw is no thousand times slower.
_MOST = 4.0
#: No logarithm of what a device does is as large.
_LARGEST = 100
_MOST_BYTES = 2**24


class Attained(NamedTuple):
    """Times of ops, and by how much they grow with each of the sums that they are made of."""

    seconds: Array
    """of one run each"""
    work: Array
    """of these the share that is no launch"""
    matrix: Array
    """share of products in a step of the logarithm of `work`; those of vector, special and memory alike"""
    vector: Array
    special: Array
    memory: Array


def attained(rows: Rows, compute: Array, traffic: Array, launch: Array, unit: Sequence[float], near: Array) -> Attained:
    """Return the times of ops from the sums of their terms, which are logarithms.

    `compute` and `traffic` are of what products and bytes take over the peaks, `launch` of launches over a usual one,
    `unit` of pointwise and of transcendental FLOPs, `near` of what ops that are alike took over all this.
    """
    matrix = rows.matrix * np.exp(np.clip(compute, -_MOST, _MOST))
    vector, special = rows.vector * np.exp(unit[0]), rows.special * np.exp(unit[1])
    busy, memory = matrix + vector + special, rows.memory * np.exp(np.clip(traffic, -_MOST, _MOST))
    tiny = 1e-18  # of a second: an op that does nothing takes a launch
    both = (busy**_OVERLAP + memory**_OVERLAP + tiny**_OVERLAP) ** (1 / _OVERLAP)
    work = both * np.exp(np.clip(near, -_MOST, _MOST))
    seconds = work + _LAUNCH * np.exp(np.clip(launch, -_MOST, _MOST))
    in_compute = (busy / both) ** _OVERLAP / np.maximum(busy, tiny)
    return Attained(seconds, work / seconds, in_compute * matrix, in_compute * vector, in_compute * special,
                    (memory / both) ** _OVERLAP)  # fmt: skip


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_grid(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(row, Sequence) and len(row) == PLACE and all(map(_is_finite, row)) for row in value
    )


_Number = Annotated[float, Rule("a number", _is_finite)]
_Width = Annotated[float, Rule("a number above 0", lambda value: _is_finite(value) and value > 0)]
_Table = Mapping[str, _Number]


@dataclass(frozen=True)
class Figures:
    """How good a model is: shares of measurements that it is within 25 % of."""

    rows: int
    """measurements"""
    fitted: _Number
    """share of those that it was fitted to"""
    folds: _Number
    """share where a tenth of the measurements was left out, and predicted"""
    shapes: _Number
    """share where all measurements of a tenth of the shapes and models were left out, and predicted"""
    devices: _Number
    """share where all measurements of a device were left out, and predicted"""
    families: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """the same four for each family, after how many measurements it has"""


@dataclass(frozen=True)
class Calibration:
    """What devices attain: logarithms of times over those at the peaks, as sums of terms.

    A run of an op takes a launch, and the larger of its time in compute and in memory with a little of the other. Each
    of these is that at the peaks times the exponential of a sum of terms: of which unit and format, how tiles fill the
    device, what kind of op moves the bytes, and facts of the device. A device that was measured has four terms of its
    own. What ops that are alike took over all this is the last term: of ops that are like none it is 0.
    """

    records: Text
    """file of the measurements"""
    versions: Mapping[str, str]
    """of the library, and of what it was fitted with"""
    date: Text
    """when it was fitted"""
    compute: _Table = field(repr=False)
    memory: _Table = field(repr=False)
    launch: _Table = field(repr=False)
    vector: _Number
    """of pointwise FLOPs"""
    special: _Number
    """of transcendental FLOPs, done by units that are fewer"""
    typical: _Table = field(repr=False)
    """facts of a device in the middle"""
    devices: Mapping[str, _Table] = field(repr=False)
    """by name: terms of the matrix and vector unit, of memory and of launches"""
    width: _Width
    """how far apart places of ops are that are still alike"""
    places: Annotated[Sequence[Sequence[float]], Rule(f"rows of {PLACE} numbers", _is_grid)] = field(repr=False)
    """of ops that others are compared with"""
    weights: Sequence[_Number] = field(repr=False)
    """what these take over the sum of terms"""
    figures: Figures | None = None
    """how good it is, where that was asked for"""

    def of(self, rows: Rows, device: str) -> Attained:
        """Return the times of ops on a device."""
        own = self.devices.get(device, {})
        compute, traffic, launch = (
            terms @ np.array([given.get(name, 0.0) for name in names])
            for terms, given, names in (
                (rows.compute, self.compute, COMPUTE), (rows.traffic, self.memory, MEMORY),
                (rows.launch, self.launch, LAUNCH))
        )  # fmt: skip
        for unit in range(2):
            compute += rows.compute[:, unit] * own.get(COMPUTE[unit], 0.0)
        near = alike(rows.shape, np.array(self.places), self.width) @ np.array(self.weights) if self.weights else 0.0
        return attained(rows, compute, traffic + own.get("memory", 0.0), launch + own.get("launch", 0.0),
                        (self.vector, self.special), np.asarray(near))  # fmt: skip

    def times(self, loads: Sequence[Load], rates: Rates) -> list[float]:
        """Return the time of each op, all its runs together."""
        alike = list(dict.fromkeys(loads))
        if not alike:
            return []
        rows = rows_of(alike, rates, self.typical)
        found = (self.of(rows, rates.hardware.id).seconds * rows.times).tolist()
        known = dict(zip(alike, found, strict=True))
        return [known[load] for load in loads]

    def seconds(self, loads: Sequence[Load], rates: Rates) -> float:
        """Return the time of ops on a device, one after the other."""
        return sum(self.times(loads, rates))


def alike(places: Array, others: Array, width: float) -> Array:
    """Return how much alike ops are to others: 1 where they are the same, 0 where they are far apart."""
    apart = (places**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * places @ others.T
    found: Array = np.exp(-0.5 * np.maximum(apart, 0.0) / width**2)
    return found


def loads_of(asked: Asked, phases: Sequence[str] = ()) -> list[Load]:
    """Return what each op of a graph asks of a device, all sizes put in; those of some phases where these are named."""
    works = [work for work in asked.works if not phases or work.op.phase in phases]
    return [load_of(work, asked.values) for work in works if work.times]


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Return a calibrated model of time from a file.

    Parameters
    ----------
    path : str or path-like
        JSON, as `costgraph calibrate --records` writes it.

    Raises
    ------
    FormatError
        If it cannot be read, or is no such model.
    """
    place = place_of(path)
    expected = "a model that costgraph calibrate --records writes"
    text = read_text(path, place, _MOST_BYTES, expected)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {error}, expected {expected}") from None
    if not isinstance(given, dict) or given.pop("schema", None) != SCHEMA:
        raise FormatError(f"{place}: no schema {SCHEMA}, expected {expected}")
    found = read_record(place, given, Calibration)
    missing = next((name for name in DEVICE if name not in found.typical), None)
    if missing is not None or len(found.places) != len(found.weights):
        what = f"typical has no {missing!r}" if missing else f"{len(found.places)} places, {len(found.weights)} weights"
        raise FormatError(f"{place}: {what}, expected {expected}")
    return found


@cache
def shipped() -> Calibration:
    """Return the model that comes with the library."""
    return load_calibration(SHIPPED)
