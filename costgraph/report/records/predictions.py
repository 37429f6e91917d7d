"""Compare published measurements with predictions: one row per record, ratios by family, and limits."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from statistics import median, quantiles
from typing import Any

from ...algebra.polynomial import Poly
from ...analysis.memory import peak_memory, timeline
from ...analysis.params import param_bytes
from ...analysis.step_time import estimate, in_seconds, spent, unit_times
from ...analysis.work import DeviceQuestion, ask
from ...errors import CostGraphError, UnsupportedError
from ...hardware.specs import Hardware
from ...hardware.tables import Column, Fact, Table
from ...notation.validation import near
from ...text_file import target_of, write_file
from . import families as generation  # noqa: F401  # families register themselves
from . import families as kernels  # noqa: F401  # families register themselves
from . import families as models  # noqa: F401  # families register themselves
from . import families as recurrent  # noqa: F401  # families register themselves
from . import families as traced  # noqa: F401  # families register themselves
from . import families as training  # noqa: F401  # families register themselves
from .families import FAMILIES, Case, Printed, Run, device_of, measured_bytes, measured_rate
from .record import Record, column, last_digits, read_records

__all__ = [
    "Row",
    "predict",
    "times_of",
    "LIMITS",
    "Limit",
    "Group",
    "Held",
    "hold",
]


# -- prediction --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A record with its prediction."""

    record: Record
    """the measurement"""
    subject: str
    """group for limits"""
    reason: str = ""
    """reason for a missing prediction, else empty"""
    seconds: float | None = None
    """measured time of one run"""
    estimate: float | None = None
    """estimated time"""
    bound: float | None = None
    """lower bound of the time"""
    violated: bool = False
    """whether the measured time is below the bound by more than its printed precision"""
    printed: float | None = None
    """printed share of the peak rate, divided by the share derived from the printed rate"""
    bytes: int | None = None
    """measured peak memory"""
    peak: int | None = None
    """predicted peak memory in bytes"""
    notes: tuple[str, ...] = ()
    """rates used in place of missing ones"""
    ops: int | None = None
    """timed ops that do work, counting loop iterations"""

    @property
    def ratio(self) -> float | None:
        """Measured over estimated time."""
        return None if self.seconds is None or not self.estimate else self.seconds / self.estimate


def predict(record: Record, last: Decimal) -> Row:
    """Predict a record's measurement; the row has a reason if there is no prediction.

    `last` is one unit of the last digit that the source prints.
    """
    found = FAMILIES.get(record.family)
    subject = "" if found is None else found.subject
    try:
        if found is None:
            raise UnsupportedError(f"{near(record.family, FAMILIES)}expected a family that has a prediction")
        hardware = device_of(record.device)
        case = found.case(record)
        return _row(record, case, case.subject or subject, hardware, Fraction(last))
    except CostGraphError as error:
        return Row(record, subject, reason=str(error))
    except OverflowError:
        return Row(record, subject, reason="inputs: the numbers are too large, expected sizes of what could run")


def _row(record: Record, case: Case, subject: str, hardware: Hardware, last: Fraction) -> Row:
    if case.peak is not None:
        counted, _ = measured_bytes(record)
        own = case.peak
        found = param_bytes(own.graph, **own.sizes) if case.params else _peak(own, hardware)
        room = hardware.tables["memory"].get("measured", hardware.tables["memory"]["capacity"])
        if found > room.number:
            raise UnsupportedError(
                f"peak memory: {found / 1e9:.1f} GB, more than {hardware.id} has: something that saves memory is not "
                f"stated"
            )
        return Row(record, subject, bytes=round(counted), peak=int(found))
    is_rate, unit = measured_rate(record)
    value = Fraction(record.value)
    # slowest time that rounds to the printed number
    slowest = max(value - last / 2, value / 2) if is_rate else value + last / 2
    times = [_times(run, hardware, resident=case.repeated) for run in case.runs]
    works = [float(run.work) for run in case.runs]
    best = min(range(len(times)), key=lambda i: times[i][0] / works[i])
    bound = min(t[1] / w for t, w in zip(times, works, strict=True)) * works[best]
    seconds, longest = (works[best] / float(v * unit) if is_rate else float(v * unit) for v in (value, slowest))
    printed = None if case.printed is None else float(case.printed.share / _share(case.printed, value * unit, hardware))
    return Row(record, subject, "", seconds, times[best][0], bound, longest < bound, printed,
               notes=times[best][2], ops=times[best][3])  # fmt: skip


def _times(run: Run, hardware: Hardware, *, resident: bool) -> tuple[float, float, tuple[str, ...], int]:
    """Return estimate, lower bound, substitute rates and op count for a run and its followers."""
    parts = [(part.times, times_of(part, hardware, resident=resident)) for part in run.parts()]
    taken = sum(n * found[0] for n, found in parts)
    bound = sum(n * found[1] for n, found in parts)
    ops = sum(n * found[3] for n, found in parts)
    return taken, bound, tuple(dict.fromkeys(note for _, found in parts for note in found[2])), ops


def _peak(run: Run, hardware: Hardware) -> int:
    """Return a run's peak memory as torch's device allocator counts it."""
    how: dict[str, Any] = dict(run.sizes)
    if hardware.arch:  # otherwise tensors only
        how |= {"device": "cuda", "arch": hardware.arch}
    if run.phases and (found := timeline(run.graph, **how).phase) not in run.phases:
        raise UnsupportedError(f"peak memory: {found} before it has more than the {run.phases[0]} counted")
    return int(peak_memory(run.graph, allocator="cuda", **how))


def _share(printed: Printed, rate: Fraction, hardware: Hardware) -> Fraction:
    """Return the share of the peak rate."""
    return printed.flops * rate / Fraction(hardware.rate(printed.format).number)


def times_of(run: Run, hardware: Hardware, *, resident: bool) -> tuple[float, float, tuple[str, ...], int]:
    """Return estimate and lower bound in seconds, substitute rates and op count.

    With `resident`, data that a previous run left in the last-level cache need no memory traffic.
    """
    asked = ask(run.graph, hardware, None, run.sizes, "records")
    asked.need_numbers("records")
    if run.phases:
        asked = DeviceQuestion(
            run.graph, asked.rates, asked.values, [w for w in asked.works if w.op.phase in run.phases]
        )
    taken = estimate((spent(work, asked) for work in asked.works), run.graph.root.relations)
    busy = {unit: _number(time, asked) for unit, time in unit_times(asked).items()}
    if run.phases:  # data between phases may stay in a cache
        del busy["memory"]
    elif resident:  # a cache of unknown size may hold everything
        cache = hardware.last_level_cache
        kept = 0.0 if cache is None else busy["memory"] - float(cache) / float(hardware.bandwidth)
        busy["memory"] = max(0.0, kept)
    notes = tuple(str(instead) for instead in asked.rates.stand_ins.values())
    ops = sum(round(_number(work.times, asked)) for work in asked.works)
    return _number(taken, asked), max(busy.values(), default=0.0), notes, ops


def _number(time: Poly, asked: DeviceQuestion) -> float:
    return float(in_seconds(time, asked))


# -- limits ------------------------------------------------------------------------------------------------------------

#: Range of the median measured over estimated time per subject; launches and attained rates may double the time.
_LEAST, _MOST = 0.9, 2.0
#: Subjects with large workloads, for which estimates are valid.
_TIMED = ("products", "mlp", "vision", "decode", "training")
#: Maximum relative difference between printed and derived shares of the peak rate.
_PRINTED = 0.04
#: Quantity that is exact to the byte, unlike process totals and reserved memory.
_COUNTED = "max_memory_allocated"
#: Maximum error in bytes of a predicted peak (a few small blocks), and share of the rows that must satisfy it.
_NEAR, _MOST_OFTEN = 4 * 2**10, 0.95


@dataclass(frozen=True)
class Limit:
    """A limit with the result of its check."""

    asked: str
    """description, with thresholds"""
    found: str
    """result as text"""
    holds: bool
    """whether the limit holds"""

    def __str__(self) -> str:
        return f"{self.asked}: {self.found}"

    def facts(self) -> dict[str, object]:
        """Return its data by name."""
        return {"asked": self.asked, "found": self.found, "holds": self.holds}


def _bounds(rows: Sequence[Row]) -> Iterator[Limit]:
    bounded = [row for row in rows if row.bound is not None]
    below = [row for row in bounded if row.violated]
    if bounded:
        yield Limit("no time is below its lower bound", f"{len(below)} of {len(bounded)} are", not below)


def _medians(rows: Sequence[Row]) -> Iterator[Limit]:
    for subject in _TIMED:
        ratios = [row.ratio for row in rows if row.subject == subject and row.ratio is not None]
        if ratios:
            middle = median(ratios)
            asked = f"measured over estimated times of {subject} are from {_LEAST} to {_MOST} in the median"
            yield Limit(asked, f"{middle:.2f} of {len(ratios)}", _LEAST <= middle <= _MOST)


def _shares(rows: Sequence[Row]) -> Iterator[Limit]:
    off = [abs(row.printed - 1) for row in rows if row.printed is not None]
    if off:
        asked = f"printed shares of the peak are within {_PRINTED:.0%} of those derived"
        far = sum(each > _PRINTED for each in off)
        yield Limit(asked, f"{far} of {len(off)} are not, off by {max(off):.1%} at most", not far)


def _peaks(rows: Sequence[Row]) -> Iterator[Limit]:
    counted = [row for row in rows if row.record.quantity == _COUNTED]
    known = [(row.peak, row.bytes) for row in counted if row.peak is not None and row.bytes is not None]
    others = sum(row.record.quantity == _COUNTED and row.peak is None for row in rows)
    if not known and others:
        yield Limit("peaks that an allocator counted are predicted", f"0 of {others} are", holds=False)
    if known:
        near = sum(abs(peak - counted) <= _NEAR for peak, counted in known)
        middle = median(abs(peak - counted) / max(counted, 1) for peak, counted in known)
        asked = f"at least {_MOST_OFTEN:.0%} of predicted peaks are within {_NEAR // 2**10} KiB of those counted"
        found = f"{near} of {len(known)} are, off by {middle:.2%} in the median; {others} have no prediction"
        yield Limit(asked, found, near >= _MOST_OFTEN * len(known))


#: Each checks all rows, and yields nothing without relevant measurements.
LIMITS: tuple[Callable[[Sequence[Row]], Iterator[Limit]], ...] = (_bounds, _medians, _shares, _peaks)


# -- results -----------------------------------------------------------------------------------------------------------

SCHEMA = "costgraph/held/1"
"""schema of the JSON; changes when keys change"""


@dataclass(frozen=True)
class Group:
    """Results for one family on one device."""

    family: str
    device: str
    rows: int
    """record count"""
    predicted: int
    """predicted records"""
    violations: int
    """times below the lower bound"""
    p10: float | None
    """10th percentile (measured over estimated time)"""
    median: float | None
    p90: float | None


def spread(ratios: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the 10th, 50th and 90th percentile, or None without numbers."""
    if len(ratios) < 2:
        return (ratios[0],) * 3 if ratios else (None,) * 3
    tenths = quantiles(ratios, n=10, method="inclusive")
    return tenths[0], median(ratios), tenths[-1]


@dataclass(frozen=True, repr=False)
class Held(Table):
    """Measurements with their predictions.

    `.rows` has the families by device, `.records` a row per record. `.save(path)` writes everything as JSON.
    """

    name: str
    """file name"""
    records: tuple[Row, ...]
    """rows in file order"""

    @cached_property
    def rows(self) -> tuple[Group, ...]:
        """Families by device, in file order."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.records:
            groups.setdefault((row.record.family, row.record.device), []).append(row)
        return tuple(_group(*key, found) for key, found in groups.items())

    @cached_property
    def reasons(self) -> Mapping[tuple[str, str], int]:
        """Counts of missing predictions by family and reason."""
        return Counter((row.record.family, row.reason) for row in self.records if row.reason)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits for the whole file, with their results."""
        return tuple(found for ask in LIMITS for found in ask(self.records))

    @property
    def holds(self) -> bool:
        """Whether all limits hold."""
        return all(limit.holds for limit in self.limits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every record with its prediction or reason as JSON.

        Raises
        ------
        FormatError
            If the file cannot be written or has no .json extension.
        """
        whole = {
            "schema": SCHEMA, "records": self.name, "limits": [limit.facts() for limit in self.limits],
            "rows": [_facts(row) for row in self.records],
        }  # fmt: skip
        write_file(target_of(path, ".json"), json.dumps(whole, indent=1) + "\n")

    def _description(self) -> str:
        return f"{len(self.records)} records of {self.name}"

    def _columns(self) -> Sequence[Column]:
        def ratio(value: float | None) -> str:
            return "" if value is None else f"{value:.2f}"

        return (
            *map(Column, ("family", "device")), Column("rows", "1"), Column("predicted", "1"),
            Column("violations", "1", title="below bound"),
            *(Column(name, "1", text=ratio) for name in ("p10", "median", "p90")),
        )  # fmt: skip

    def _facts(self) -> Iterable[Fact]:
        return [Fact("holds" if limit.holds else "fails", str(limit)) for limit in self.limits]


def _group(family: str, device: str, rows: Sequence[Row]) -> Group:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    counts = (len(rows), sum(not row.reason for row in rows), sum(row.violated for row in rows))
    return Group(family, device, *counts, *spread(ratios))


def _facts(row: Row) -> dict[str, object]:
    """Return a row's data by name, without empty values."""
    own = {
        name: getattr(row, name)
        for name in ("subject", "reason", "seconds", "estimate", "bound", "printed", "bytes", "peak")
    }
    found = {name: value for name, value in own.items() if value not in (None, "")}
    more = {"violated": True} if row.violated else {}
    return {"id": row.record.id, **found, **more} | ({"notes": list(row.notes)} if row.notes else {})


def hold(path: str | os.PathLike[str]) -> Held:
    """Predict all records of a file.

    Parameters
    ----------
    path : str or path-like
        JSON file, as for `read_records`.

    Returns
    -------
    Held
        A row per record, with a prediction or a reason.

    Raises
    ------
    FormatError
        If the file cannot be read or is invalid.
    """
    found = read_records(path)
    last = last_digits(found)
    # not a generator in `tuple()`: traces search the objects that refer to tensors and would find the unfinished tuple
    rows = [predict(record, last[column(record)]) for record in found]
    return Held(os.path.basename(os.fspath(path)), tuple(rows))
