"""Fit a calibrated time model to published measurements, and cross-validate it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ...analysis.calibrated import (
    COMPUTE,
    DEVICE,
    LAUNCH,
    MEMORY,
    SCHEMA,
    Attained,
    Calibration,
    Figures,
    Load,
    Rows,
    alike,
    attained,
    facts_of,
    loads_of,
    rows_of,
)
from ...analysis.work import DeviceQuestion, ask
from ...errors import CostGraphError, FormatError, UnsupportedError
from ...hardware.specs import Hardware
from ...ops.collectives import Collective
from ...text_file import place_of, target_of, write_file
from . import families as generation  # noqa: F401  # families register themselves
from . import families as kernels  # noqa: F401  # families register themselves
from . import families as models  # noqa: F401  # families register themselves
from . import families as recurrent  # noqa: F401  # families register themselves
from . import families as traced  # noqa: F401  # families register themselves
from . import families as training  # noqa: F401  # families register themselves
from .families import FAMILIES, Case, Run, device_of, measured_rate
from .predictions import times_of
from .record import Record, read_records

__all__ = [
    "DEVICE_TERMS",
    "Fitted",
    "Measured",
    "WIDTH",
    "fit",
    "Calibrated",
    "calibrate",
]


# -- regression --------------------------------------------------------------------------------------------------------
# Nonlinear least squares on log times, with Huber weights and L2 regularization.

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Terms per device, in addition to the common ones.
DEVICE_TERMS = ("matrix unit", "vector unit", "memory", "launch")
#: L2 penalties of common terms, device terms, pointwise and transcendental FLOPs, and reference shapes.
_OF_ALL, _OF_ONE, _OF_UNITS, _OF_PLACE = 0.3, 3.0, 0.1, 0.1
#: Minimum measurement count for device terms.
_FEWEST = 3
#: Log error above which Huber weights decrease, because some measurements are mislabelled.
_LARGE = 0.25
#: Number of reference shapes, and the kernel width of the similarity.
_PLACES, WIDTH = 600, 1.5
#: Ops below this share of a measurement keep their time while reference shapes are fitted; half of it before.
_SHARE = 0.004
#: Maximum step count, minimum relative gain per step, and maximum damping.
_STEPS, _ENOUGH, _TOO_CAREFUL = 25, 1e-3, 1e6


@dataclass(frozen=True)
class Measured:
    """Measured times, and the ops that ran."""

    seconds: Array
    """time by measurement"""
    devices: NDArray[np.str_]
    """device by measurement"""
    rows: Rows
    """ops of all measurements, in order"""
    of: NDArray[np.intp]
    """index of each op's measurement"""

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Fitted:
    """Fitted terms by name, as in `Calibration`, and the predicted log times of all measurements."""

    compute: Mapping[str, float]
    memory: Mapping[str, float]
    launch: Mapping[str, float]
    units: tuple[float, float]
    devices: Mapping[str, Mapping[str, float]]
    places: Array
    weights: Array
    predicted: Array


class _Terms:
    """Design matrices of the model, with device terms, and their layout in the parameter vector."""

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
        """Add the similarity to reference shapes."""
        self.blocks[3] = near
        self.cost = np.concatenate([self.cost, np.full(near.shape[1], _OF_PLACE)])

    def split(self, terms: Array) -> list[Array]:
        """Split the parameter vector into blocks; unit terms are second to last."""
        ends = np.cumsum([b.shape[1] for b in self.blocks[:3]] + [2])
        return [np.asarray(part, dtype=float) for part in np.split(terms, ends)]

    def times(self, rows: Rows, terms: Array) -> Attained:
        """Return all op times."""
        *sums, unit, near = self.split(terms)
        compute, traffic, launch, alike_ones = (b @ t for b, t in zip(self.blocks, [*sums, near], strict=True))
        return attained(rows, compute, traffic, launch, unit.tolist(), alike_ones)


def _totals(found: Measured, seconds: Array) -> Array:
    summed: Array = np.bincount(found.of, seconds * found.rows.times, len(found)).astype(float)
    return summed


class _Errors:
    """Residuals as functions of selected ops; other ops keep their time."""

    def __init__(self, found: Measured, terms: _Terms, use: Mask, rest: Array) -> None:
        self.rows, self.terms, self.use = found.rows[use], terms, use
        self.ids, self.of = np.unique(found.of[use], return_inverse=True)
        self.starts = np.searchsorted(self.of, np.arange(len(self.ids)))
        self.wanted, self.rest = np.log(found.seconds[self.ids]), rest[self.ids]
        self.blocks = [b[use] for b in terms.blocks]

    def at(self, now: Array) -> tuple[Attained, Array, Array, float]:
        """Return times, errors by measurement, shares by op, and the total cost."""
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
        """Return the Jacobian of log times with respect to terms from `first` on."""
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
    """Minimize the cost with damped Gauss-Newton (Levenberg-Marquardt) steps.

    Terms before `first`, a block boundary, stay fixed.
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
    """Select distant points by farthest-point sampling."""
    left: Array = np.unique(np.round(places, 2), axis=0)
    chosen, apart = [0], ((left - left[0]) ** 2).sum(1)
    while len(chosen) < min(count, len(left)) and apart.max() > 1e-3:
        chosen.append(int(apart.argmax()))
        apart = np.minimum(apart, ((left - left[chosen[-1]]) ** 2).sum(1))
    return left[chosen]


def fit(found: Measured, train: Mask) -> Fitted:
    """Fit the terms to the measurements in `train` only, and predict all."""
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
    """Return all op times, and a mask of ops above a share of their measurement."""
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


# -- calibration -------------------------------------------------------------------------------------------------------

#: Relative error up to which a prediction counts as near.
_NEAR = 0.25
_FOLDS = 10
#: Seed for cross-validation folds.
_SEED = 17
#: Rounding digits; the terms are less certain.
_DIGITS = 4

Said = Callable[[str], None]


@dataclass(frozen=True)
class _Known:
    """A record with a predictable time."""

    record: Record
    seconds: float
    rows: Rows
    work: float
    """matmul FLOPs, or bytes without any; equal for equal models or shapes"""


@dataclass(frozen=True)
class Calibrated:
    """A model fitted to records."""

    model: Calibration
    """the fitted model, with accuracy figures if requested"""
    unpredicted: Mapping[str, int]
    """records without a time, counted by reason"""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON for `load_calibration`.

        Raises
        ------
        FormatError
            If the file cannot be written or has no .json extension.
        """
        own = {f.name: getattr(self.model, f.name) for f in fields(Calibration)}
        own["figures"] = None if self.model.figures is None else asdict(self.model.figures)
        given = {"schema": SCHEMA, **{name: value for name, value in own.items() if value is not None}}
        rows = ",\n".join(map(_short, self.model.places))
        lines = [f'"{name}": ' + (f"[\n{rows}\n]" if name == "places" else _short(x)) for name, x in given.items()]
        text = "{\n" + ",\n".join(lines) + "\n}"
        write_file(target_of(path, ".json"), text + "\n")


def calibrate(*paths: str | os.PathLike[str], validate: bool = True, say: Said | None = None) -> Calibrated:
    """Fit a calibrated time model to files of measurements.

    Parameters
    ----------
    *paths : str or path-like
        One or more JSON files, as for `read_records`.
    validate : bool
        Cross-validate: hold out a tenth of the records, a tenth of the shapes, and each device, and report the accuracy
        on them.
    say : callable, optional
        Callback for progress messages.

    Returns
    -------
    Calibrated
        The fitted model: `.model.seconds(...)`, `.model.figures`, `.save(path)`.

    Raises
    ------
    FormatError
        If a file cannot be read or is invalid, or fewer than two times are predictable.
    """
    said = say or (lambda text: None)
    reasons: dict[str, int] = {}
    typical: dict[str, float] = {}
    found = list(_known([record for path in paths for record in read_records(path)], reasons, typical, said))
    place = ", ".join(map(place_of, paths)) or "calibrate"
    if len(found) < 2:
        raise FormatError(f"{place}: {len(found)} records with a time that is predicted, expected two at least")
    measured = Measured(
        np.array([each.seconds for each in found]), np.array([each.record.device for each in found]),
        Rows.joined([each.rows for each in found]),
        np.repeat(np.arange(len(found)), [len(each.rows.times) for each in found]),
    )  # fmt: skip
    said(f"fitting {len(found)} records")
    fitted = fit(measured, np.ones(len(found), dtype=bool))
    figures = _figures(found, measured, fitted, said) if validate else None
    names = ", ".join(os.path.basename(os.fspath(path)) for path in paths)
    return Calibrated(_model(names, fitted, typical, figures), reasons)


def _short(value: object) -> str:
    """Return a value as one line of JSON; integers in a row lose their fraction."""
    row = [int(x) if x == int(x) else x for x in value] if isinstance(value, list) and value else value
    return json.dumps(row, separators=(",", ":"))


# -- training data -----------------------------------------------------------------------------------------------------


def _known(
    records: Sequence[Record], reasons: dict[str, int], typical: dict[str, float], said: Said
) -> Iterator[_Known]:
    """Yield the records with a predictable time, and count the reasons for the others."""
    timed: list[tuple[Record, float, DeviceQuestion, list[Load]]] = []
    for i, record in enumerate(records):
        if not i % 250:
            said(f"record {i} of {len(records)}")
        try:
            timed.append((record, *_timed(record)))
        except CostGraphError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
        except OverflowError:
            reasons["the numbers are too large"] = reasons.get("the numbers are too large", 0) + 1
    typical |= _typical(dict.fromkeys(asked.hardware for _, _, asked, _ in timed))
    for record, seconds, asked, loads in timed:
        products = sum(load.times * load.product.flops for load in loads if load.product is not None)
        moved = sum(load.times * load.bytes for load in loads)
        yield _Known(record, seconds, rows_of(loads, asked.rates, typical), round(products or moved))


def _timed(record: Record) -> tuple[float, DeviceQuestion, list[Load]]:
    """Return the measured seconds and the ops that ran."""
    family = FAMILIES.get(record.family)
    if family is None:
        raise UnsupportedError(f"family {record.family!r}: expected one that has a prediction")
    hardware, case = device_of(record.device), family.case(record)
    if not case.runs:
        raise UnsupportedError("bytes were measured, expected a time")
    if case.assumed:
        raise UnsupportedError("some of what ran is not stated, expected a time that can be fitted")
    run = _fastest(case, hardware)
    is_rate, unit = measured_rate(record)
    value = float(Fraction(record.value) * unit)
    asked = ask(run.graph, hardware, None, run.sizes, "records")
    asked.need_numbers("records")
    if any(isinstance(op.kind, Collective) for op in run.graph.walk()):
        raise UnsupportedError("ranks exchange what they have, expected the ops of one device")
    loads = loads_of(asked, run.phases)
    if not loads:
        raise UnsupportedError("nothing is done, expected an op")
    return float(run.work) / value if is_rate else value, asked, loads


def _fastest(case: Case, hardware: Hardware) -> Run:
    """Return the run with the best estimated rate, to which a reported best rate belongs."""
    if len(case.runs) == 1:
        return case.runs[0]
    return min(case.runs, key=lambda run: times_of(run, hardware, resident=case.repeated)[0] / float(run.work))


def _typical(devices: Sequence[Hardware] | Mapping[Hardware, None]) -> dict[str, float]:
    """Return median device properties; 0 if no specification has one."""
    facts = [facts_of(device) for device in devices]
    values = {name: [each[name] for each in facts if name in each] for name in DEVICE}
    return {name: round(float(np.median(known)), _DIGITS) if known else 0.0 for name, known in values.items()}


# -- accuracy ----------------------------------------------------------------------------------------------------------


def _figures(found: Sequence[_Known], measured: Measured, fitted: Fitted, said: Said) -> Figures:
    """Return the share of near predictions, for fitted and for held-out records."""
    order = np.random.default_rng(_SEED)
    wanted = np.log(measured.seconds)
    devices = np.unique(measured.devices, return_inverse=True)[1]
    shapes = np.unique([each.work for each in found], return_inverse=True)[1]
    groups = {
        "a tenth": order.permutation(len(found)) % _FOLDS,
        "a tenth of the shapes": (order.permutation(shapes.max() + 1) % _FOLDS)[shapes],
        "a device": devices,
    }
    near = [np.abs(np.expm1(fitted.predicted - wanted)) <= _NEAR]
    for name, group in groups.items():
        near.append(np.abs(np.expm1(_left_out(measured, group, name, said) - wanted)) <= _NEAR)
    families: dict[str, list[int]] = {}
    for i, each in enumerate(found):
        families.setdefault(each.record.family, []).append(i)
    by_family = {name: [len(own), *(_share(each[own]) for each in near)] for name, own in families.items()}
    fitted_ones, folds, shapes_out, devices_out = map(_share, near)
    return Figures(len(found), fitted_ones, folds, shapes_out, devices_out, by_family)


def _share(near: NDArray[np.bool_]) -> float:
    return round(float(near.mean()), _DIGITS)


def _left_out(measured: Measured, group: NDArray[np.intp], name: str, said: Said) -> NDArray[np.float64]:
    """Return held-out log times: each group is predicted by a model fitted to the others, NaN without others."""
    predicted = np.full(len(measured), np.nan)
    kinds = np.unique(group)
    for i, kind in enumerate(kinds):
        said(f"{name} left out: {i + 1} of {len(kinds)}")
        out = group == kind
        if not out.all():
            predicted[out] = fit(measured, ~out).predicted[out]
    return predicted


def _model(name: str, fitted: Fitted, typical: Mapping[str, float], figures: Figures | None) -> Calibration:
    from ... import __version__

    def short(given: Mapping[str, float]) -> dict[str, float]:
        return {key: round(value, _DIGITS) for key, value in given.items()}

    return Calibration(
        records=name, versions={"costgraph": __version__, "numpy": np.__version__, "python": platform.python_version()},
        date=f"{datetime.now(UTC):%Y-%m-%d}", compute=short(fitted.compute), memory=short(fitted.memory),
        launch=short(fitted.launch), vector=round(fitted.units[0], _DIGITS), special=round(fitted.units[1], _DIGITS),
        typical=typical, devices={device: short(own) for device, own in fitted.devices.items()}, width=WIDTH,
        places=np.round(fitted.places, _DIGITS).tolist(), weights=np.round(fitted.weights, _DIGITS).tolist(),
        figures=figures,
    )  # fmt: skip
