"""One record and what is predicted of it: a time and its lower bound, a share of the peak, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ...algebra.polynomial import Poly
from ...analysis.memory import peak_memory, timeline
from ...analysis.params import param_bytes
from ...analysis.seconds import estimate, in_seconds, spent, unit_times
from ...analysis.work import Asked, ask
from ...errors import CostGraphError, UnsupportedError
from ...hardware.specs import Hardware
from ...notation.records import near
from .case import FAMILIES, Case, Printed, Run, device_of, measured_bytes, measured_rate
from .record import Record

__all__ = ["Row", "predict", "times_of"]


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
