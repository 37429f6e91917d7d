"""What is asked of a whole file of records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .predicting import Row

__all__ = ["LIMITS", "Limit"]

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
