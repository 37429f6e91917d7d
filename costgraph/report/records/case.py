"""What a record is of, as graphs: each family of records has a function that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...hardware.specs import Hardware, list_hardware, load_hardware
from ...notation.records import near
from .record import Record

__all__ = ["FAMILIES", "Case", "Family", "Printed", "Run", "device_of", "family", "measured_bytes", "measured_rate"]

#: Of units of time, in seconds.
_TIMES = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
#: Of units of memory, in bytes.
_BYTES = {
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9, "GB (GiB by arithmetic)": 2**30,
}  # fmt: skip
#: Of units of rates, in FLOP, bytes, tokens or samples in a second.
_RATES = {
    "TFLOP/s": Fraction(10**12), "GB/s": Fraction(10**9), "tok/s": Fraction(1), "samples/s": Fraction(1),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A graph with sizes, and how much of what a rate counts is done in one run of it."""

    graph: Graph
    sizes: Mapping[str, int]
    work: Fraction = Fraction(1)
    """FLOP, bytes, tokens or samples; 1 where a time was measured"""
    phases: tuple[str, ...] = ()
    """those that were measured; all of the graph where none is named"""
    times: int = 1
    """how often it ran"""
    then: Run | None = None
    """what ran behind it, in the same measurement"""

    def parts(self) -> Iterator[Run]:
        """Yield it and what ran behind it."""
        part: Run | None = self
        while part is not None:
            yield part
            part = part.then


@dataclass(frozen=True)
class Printed:
    """A share of a device's peak that a source prints, and what it follows from."""

    share: Fraction
    """of the peak"""
    flops: Fraction
    """FLOPs for one token or sample of the rate"""
    format: str
    """whose peak it is"""


@dataclass(frozen=True)
class Case:
    """What a record measured, as it is predicted."""

    runs: tuple[Run, ...] = ()
    """what was timed; of several the best one was reported"""
    repeated: bool = False
    """whether a run may find in a cache what the run before left there"""
    printed: Printed | None = None
    """a share of the peak beside the rate"""
    subject: str = ""
    """what limits are stated for, where it is not that of the family"""
    peak: Run | None = None
    """what ran while an allocator counted; nothing is timed then"""
    assumed: bool = False
    """whether some of what ran is not stated and was assumed, so that nothing is fitted to its time"""
    params: bool = False
    """whether the bytes are those of its parameters alone"""


@dataclass(frozen=True)
class Family:
    """A family of records: how one of them becomes a case, and what it belongs to."""

    name: str
    subject: str
    case: Callable[[Record], Case] = field(repr=False)


#: Families by name.
FAMILIES: dict[str, Family] = {}


def family(*names: str, subject: str) -> Callable[[Callable[[Record], Case]], Callable[[Record], Case]]:
    """Return a decorator that makes a function the one of families, whose records have the same inputs.

    `subject` is what they are measurements of: limits are stated for all families of a subject together.
    """

    def registered(case: Callable[[Record], Case]) -> Callable[[Record], Case]:
        for name in names:
            assert name not in FAMILIES, name
            FAMILIES[name] = Family(name, subject, case)
        return case

    return registered


def measured_bytes(record: Record) -> tuple[Fraction, Fraction]:
    """Return the bytes of a record, and its unit in bytes.

    UnsupportedError if the number is none of bytes.
    """
    if record.unit not in _BYTES:
        raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join(_BYTES)}")
    return Fraction(record.value) * _BYTES[record.unit], Fraction(_BYTES[record.unit])


def measured_rate(record: Record) -> tuple[bool, Fraction]:
    """Return whether the number of a record is a rate, and its unit in seconds, or in what is done in a second.

    UnsupportedError if the number is neither a time nor a rate.
    """
    for is_rate, units in ((False, _TIMES), (True, _RATES)):
        if record.unit in units:
            return is_rate, units[record.unit]
    raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join([*_TIMES, *_RATES])}")


def device_of(name: str) -> Hardware:
    """Return a device of the list: a record is from outside, and names no files."""
    if name not in _devices():
        raise UnsupportedError(f"device {name!r} has no specification, {near(name, _devices())}expected one")
    return _devices()[name]


@cache
def _devices() -> dict[str, Hardware]:
    return {name: load_hardware(name) for name in list_hardware()}
