"""What a record is of, as graphs: each family of records has a function that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from ...errors import UnsupportedError
from ...graph.graph import Graph
from .record import Record

__all__ = ["FAMILIES", "Case", "Family", "Printed", "Run", "family", "measured_rate"]

#: Of units of time, in seconds.
_TIMES = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
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


@dataclass(frozen=True)
class Family:
    """A family of records: how one of them becomes a case, and what it belongs to."""

    name: str
    subject: str
    case: Callable[[Record], Case] = field(repr=False)


#: Families by name.
FAMILIES: dict[str, Family] = {}


def family(*names: str, subject: str) -> Callable[[Callable[[Record], Case]], Callable[[Record], Case]]:
    """Return a decorator that makes a function the one of families.

    Parameters
    ----------
    *names : str
        Families whose records have the same inputs.
    subject : str
        What they are measurements of: limits are stated for all families of a subject together.
    """

    def registered(case: Callable[[Record], Case]) -> Callable[[Record], Case]:
        for name in names:
            assert name not in FAMILIES, name
            FAMILIES[name] = Family(name, subject, case)
        return case

    return registered


def measured_rate(record: Record) -> tuple[bool, Fraction]:
    """Return whether the number of a record is a rate, and its unit in seconds, or in what is done in a second.

    Raises
    ------
    UnsupportedError
        If the number is neither a time nor a rate.
    """
    for is_rate, units in ((False, _TIMES), (True, _RATES)):
        if record.unit in units:
            return is_rate, units[record.unit]
    raise UnsupportedError(f"unit: {record.quantity} in {record.unit}, expected one of {', '.join([*_TIMES, *_RATES])}")
