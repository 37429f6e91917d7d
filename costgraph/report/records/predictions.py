"""A file of records held to predictions: every record a row, ratios by family and device, and limits."""

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
from ...analysis.work import Asked, ask
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


# -- predicting --------------------------------------------------------------------------------------------------------
# One record and what is predicted of it: a time and its lower bound, a share of the peak, or why there is none.


@dataclass(frozen=True)
class Row:
    """A record beside its prediction."""

    record: Record
    """what was measured"""
    subject: str
    """what limits are stated for"""
    reason: str = ""
    """why nothing is predicted; empty where something is"""
    seconds: float | None = None
    """measured, of one run"""
    estimate: float | None = None
    """seconds, as declared"""
    bound: float | None = None
    """seconds that no run is below"""
    violated: bool = False
    """whether the measured time is below the bound by more than its last printed digit tells"""
    printed: float | None = None
    """share of the peak that the source prints, over the one derived from its rate"""
    bytes: int | None = None
    """measured, at the peak"""
    peak: int | None = None
    """bytes that are predicted there"""
    notes: tuple[str, ...] = ()
    """rates that stand in for missing ones"""
    ops: int | None = None
    """how many ops, iterations of loops counted, do something in what was timed"""

    @property
    def ratio(self) -> float | None:
        """Measured time over the estimate."""
        return None if self.seconds is None or not self.estimate else self.seconds / self.estimate


def predict(record: Record, last: Decimal) -> Row:
    """Predict what a record measured; the row has a reason where there is no prediction.

    `last` is one in the last digit that its source prints.
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
    # what was printed may have been the slower by half of its last digit
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
    """Return estimate and lower bound of a run and of what ran behind it, rates that stand in, and how many ops."""
    parts = [(part.times, times_of(part, hardware, resident=resident)) for part in run.parts()]
    taken = sum(n * found[0] for n, found in parts)
    bound = sum(n * found[1] for n, found in parts)
    ops = sum(n * found[3] for n, found in parts)
    return taken, bound, tuple(dict.fromkeys(note for _, found in parts for note in found[2])), ops


def _peak(run: Run, hardware: Hardware) -> int:
    """Return the bytes at the peak of a run, as torch's allocator counts them on a device."""
    how: dict[str, Any] = dict(run.sizes)
    if hardware.arch:  # else tensors alone
        how |= {"device": "cuda", "arch": hardware.arch}
    if run.phases and (found := timeline(run.graph, **how).phase) not in run.phases:
        raise UnsupportedError(f"peak memory: {found} before it has more than the {run.phases[0]} counted")
    return int(peak_memory(run.graph, allocator="cuda", **how))


def _share(printed: Printed, rate: Fraction, hardware: Hardware) -> Fraction:
    """Return the share of the peak that a rate is."""
    return printed.flops * rate / Fraction(hardware.rate(printed.format).number)


def times_of(run: Run, hardware: Hardware, *, resident: bool) -> tuple[float, float, tuple[str, ...], int]:
    """Return estimate and lower bound in seconds, the rates that stand in, and the number of ops.

    `resident` says whether the last-level cache may hold what a run before left in it: those bytes need no memory.
    """
    asked = ask(run.graph, hardware, None, run.sizes, "records")
    asked.need_numbers("records")
    if run.phases:
        asked = Asked(run.graph, asked.rates, asked.values, [w for w in asked.works if w.op.phase in run.phases])
    taken = estimate((spent(work, asked) for work in asked.works), run.graph.root.relations)
    busy = {unit: _number(time, asked) for unit, time in unit_times(asked).items()}
    if run.phases:  # what moves between phases is not known to reach memory
        del busy["memory"]
    elif resident:  # where nothing is known of a cache, it may hold all
        cache = hardware.last_level_cache
        kept = 0.0 if cache is None else busy["memory"] - float(cache) / float(hardware.bandwidth)
        busy["memory"] = max(0.0, kept)
    notes = tuple(str(instead) for instead in asked.rates.stand_ins.values())
    ops = sum(round(_number(work.times, asked)) for work in asked.works)
    return _number(taken, asked), max(busy.values(), default=0.0), notes, ops


def _number(time: Poly, asked: Asked) -> float:
    return float(in_seconds(time, asked))


# -- limits ------------------------------------------------------------------------------------------------------------
# What is asked of a whole file of records.

#: Of measured over estimated time, in the median of a subject: launches and attained rates take up to twice the time.
_LEAST, _MOST = 0.9, 2.0
#: Subjects whose times are those of large work, for which the estimate is meant.
_TIMED = ("products", "mlp", "vision", "decode", "training")
#: Printed over derived shares of the peak.
_PRINTED = 0.04
#: What is counted to the byte, as totals of whole processes and of what is reserved are not.
_COUNTED = "max_memory_allocated"
#: Bytes that a predicted peak may be off by, which are a few small blocks, and the share of rows that has to be.
_NEAR, _MOST_OFTEN = 4 * 2**10, 0.95


@dataclass(frozen=True)
class Limit:
    """One thing that is asked, and what was found."""

    asked: str
    """what, and within which limits"""
    found: str
    """in words"""
    holds: bool
    """whether it is so"""

    def __str__(self) -> str:
        return f"{self.asked}: {self.found}"

    def facts(self) -> dict[str, object]:
        """Return what it says, by name."""
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


#: Each reads all rows and says what they come to; of what no row measures nothing is asked.
LIMITS: tuple[Callable[[Sequence[Row]], Iterator[Limit]], ...] = (_bounds, _medians, _shares, _peaks)


# -- held --------------------------------------------------------------------------------------------------------------

SCHEMA = "costgraph/held/1"
"""What the JSON of this version calls itself; another number means other keys."""


@dataclass(frozen=True)
class Group:
    """What the records of one family on one device come to."""

    family: str
    device: str
    rows: int
    """records"""
    predicted: int
    """those of them with a prediction"""
    violations: int
    """times below the lower bound"""
    p10: float | None
    """measured over estimate: what a tenth is below"""
    median: float | None
    p90: float | None


def spread(ratios: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return what a tenth, a half and nine tenths of some numbers are below; None of none."""
    if len(ratios) < 2:
        return (ratios[0],) * 3 if ratios else (None,) * 3
    tenths = quantiles(ratios, n=10, method="inclusive")
    return tenths[0], median(ratios), tenths[-1]


@dataclass(frozen=True, repr=False)
class Held(Table):
    """Records of measurements and what is predicted of each.

    `.rows` are the families by device, `.records` a row for each record, `.save(path)` writes all of it as JSON.
    """

    name: str
    """of the file"""
    records: tuple[Row, ...]
    """in the order of the file"""

    @cached_property
    def rows(self) -> tuple[Group, ...]:
        """Families by device, in the order of the file."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.records:
            groups.setdefault((row.record.family, row.record.device), []).append(row)
        return tuple(_group(*key, found) for key, found in groups.items())

    @cached_property
    def reasons(self) -> Mapping[tuple[str, str], int]:
        """How many records of a family are not predicted, by family and reason."""
        return Counter((row.record.family, row.reason) for row in self.records if row.reason)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What is asked of the whole file, and whether it holds."""
        return tuple(found for ask in LIMITS for found in ask(self.records))

    @property
    def holds(self) -> bool:
        """Whether all limits hold."""
        return all(limit.holds for limit in self.limits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every record with its prediction, or the reason that there is none, as JSON.

        Raises
        ------
        FormatError
            If the file cannot be written, or does not end in .json.
        """
        whole = {
            "schema": SCHEMA, "records": self.name, "limits": [limit.facts() for limit in self.limits],
            "rows": [_facts(row) for row in self.records],
        }  # fmt: skip
        write_file(target_of(path, ".json"), json.dumps(whole, indent=1) + "\n")

    def _about(self) -> str:
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
    """Return what a row says, by name: what it has nothing to say of left out."""
    own = {
        name: getattr(row, name)
        for name in ("subject", "reason", "seconds", "estimate", "bound", "printed", "bytes", "peak")
    }
    found = {name: value for name, value in own.items() if value not in (None, "")}
    more = {"violated": True} if row.violated else {}
    return {"id": row.record.id, **found, **more} | ({"notes": list(row.notes)} if row.notes else {})


def hold(path: str | os.PathLike[str]) -> Held:
    """Predict every record of a file.

    Parameters
    ----------
    path : str or path-like
        JSON, as `read_records` reads it.

    Returns
    -------
    Held
        A row for each record: a prediction, or the reason that there is none.

    Raises
    ------
    FormatError
        If the file cannot be read, or is no list of records.
    """
    found = read_records(path)
    last = last_digits(found)
    # a list first: a trace looks at all that refers to tensors, and a tuple that is still made may not be looked at
    rows = [predict(record, last[column(record)]) for record in found]
    return Held(os.path.basename(os.fspath(path)), tuple(rows))
