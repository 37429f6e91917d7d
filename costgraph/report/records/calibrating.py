"""A calibrated model of time from a file of records: what they measured, how well it predicts, and the file of it."""

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

from ...analysis.calibrated.loads import Load
from ...analysis.calibrated.model import SCHEMA, Calibration, Figures, loads_of
from ...analysis.calibrated.terms import DEVICE, Rows, facts_of, rows_of
from ...analysis.work import Asked, ask
from ...errors import CostGraphError, FormatError, UnsupportedError
from ...hardware.specs import Hardware
from ...ops.collectives import Collective
from ...text_file import place_of, target_of, write_file
from . import generation, kernels, models, recurrent, traced, training  # noqa: F401  # families register themselves
from .case import FAMILIES, Case, Run, device_of, measured_rate
from .fitting import WIDTH, Fitted, Measured, fit
from .predicting import times_of
from .record import Record, read_records

__all__ = ["Calibrated", "calibrate"]

#: A prediction is near what was measured.
_NEAR = 0.25
_FOLDS = 10
#: Of the order of measurements among folds.
_SEED = 17
#: Digits that are written: terms are known to less.
_DIGITS = 4

Said = Callable[[str], None]


@dataclass(frozen=True)
class _Known:
    """A record whose time can be predicted."""

    record: Record
    seconds: float
    rows: Rows
    work: float
    """FLOPs of products, or bytes where there are none: the same for the same model or shape"""


@dataclass(frozen=True)
class Calibrated:
    """A model fitted to records, with what it predicts of them."""

    model: Calibration
    """the terms, with figures where they were asked for"""
    unpredicted: Mapping[str, int]
    """how many records have no time, by reason"""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON, which `load_calibration` reads.

        Raises
        ------
        FormatError
            If the file cannot be written, or does not end in .json.
        """
        own = {f.name: getattr(self.model, f.name) for f in fields(Calibration)}
        own["figures"] = None if self.model.figures is None else asdict(self.model.figures)
        given = {"schema": SCHEMA, **{name: value for name, value in own.items() if value is not None}}
        rows = ",\n".join(map(_short, self.model.places))
        lines = [f'"{name}": ' + (f"[\n{rows}\n]" if name == "places" else _short(x)) for name, x in given.items()]
        text = "{\n" + ",\n".join(lines) + "\n}"
        write_file(target_of(path, ".json"), text + "\n")


def calibrate(*paths: str | os.PathLike[str], validate: bool = True, say: Said | None = None) -> Calibrated:
    """Fit a calibrated model of time to files of records.

    Parameters
    ----------
    *paths : str or path-like
        JSON, as `read_records` reads it: one or several.
    validate : bool
        Also fit with a tenth of the records left out, with a tenth of shapes, and without each device, and say how well
        what was left out is predicted.
    say : callable, optional
        Is told in words how far it is.

    Returns
    -------
    Calibrated
        `.model.seconds(...)`, `.model.figures`, `.save(path)`.

    Raises
    ------
    FormatError
        If a file cannot be read or is no list of records, or they have fewer than two times that can be predicted.
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
    """Return a value as JSON on one line; zeros of a row without a fraction."""
    row = [int(x) if x == int(x) else x for x in value] if isinstance(value, list) and value else value
    return json.dumps(row, separators=(",", ":"))


# -- records -------------------------------------------------------------------------------------------------------


def _known(
    records: Sequence[Record], reasons: dict[str, int], typical: dict[str, float], said: Said
) -> Iterator[_Known]:
    """Yield the records that have a time; reasons why others have none are counted."""
    timed: list[tuple[Record, float, Asked, list[Load]]] = []
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


def _timed(record: Record) -> tuple[float, Asked, list[Load]]:
    """Return the seconds of what ran, and its ops."""
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
    """Return the run of which the best rate was reported: that with the best rate by the estimate."""
    if len(case.runs) == 1:
        return case.runs[0]
    return min(case.runs, key=lambda run: times_of(run, hardware, resident=case.repeated)[0] / float(run.work))


def _typical(devices: Sequence[Hardware] | Mapping[Hardware, None]) -> dict[str, float]:
    """Return the facts of a device in the middle; of what no specification has 0."""
    facts = [facts_of(device) for device in devices]
    values = {name: [each[name] for each in facts if name in each] for name in DEVICE}
    return {name: round(float(np.median(known)), _DIGITS) if known else 0.0 for name, known in values.items()}


# -- figures -------------------------------------------------------------------------------------------------------


def _figures(found: Sequence[_Known], measured: Measured, fitted: Fitted, said: Said) -> Figures:
    """Return how many predictions are near, of what was fitted and of what was left out."""
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
    """Return logarithms of times, of each group by a model that was fitted to the others; NaN where there are none."""
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
