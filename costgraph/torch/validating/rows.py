"""Rows of a validation: what one case was predicted to take, and took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...notation.door import Rule
from ...notation.records import Count, Size, at_least, one_of
from ..measuring import Times
from .case import Case
from .judging import OUTCOMES, agrees

__all__ = ["Failed", "Measured", "Modelled", "Predicted", "Row"]

_Seconds = Annotated[float, at_least(0, float)]
_IN_ORDER = Rule("them in order", lambda t: t.min <= t.lower <= t.median <= t.upper <= t.max)


@dataclass(frozen=True)
class Predicted:
    """What a graph says."""

    flops: Count
    """matmul FLOPs, every domain ignored"""
    uncounted: Count
    """those of them in ops that torch's FlopCounterMode counts as none"""
    peak: Size
    """bytes at the peak; on CUDA in blocks of 512 B"""


@dataclass(frozen=True)
class Measured:
    """What torch took."""

    flops: Count
    """matmul FLOPs as FlopCounterMode counts them"""
    held: Count
    """bytes of parameters, buffers, inputs and optimizer state, there throughout"""
    above: Count
    """bytes at the peak above those"""
    left: int
    """bytes that are there afterwards and were not before"""

    @property
    def peak(self) -> int:
        """Bytes at the peak, those that are there throughout included."""
        return self.held + self.above


@dataclass(frozen=True)
class Modelled:
    """Where the declared graph stands on the roof; seconds and bytes."""

    bound: _Seconds
    """no run from device memory is faster: the roofline's `lower_bound` with the device's own peaks"""
    estimate: _Seconds
    """the roofline's `estimate`"""
    fused: Count
    """bytes that have to move at least"""
    moved: Size
    """bytes moved as declared"""
    flops: Count
    """FLOPs of all kinds, as executed"""
    limit: Annotated[str, one_of(("compute", "memory"))]
    """compute or memory: what the roofline says bounds it"""
    memory: _Seconds
    """bytes moved at the measured bandwidth"""
    compute: _Seconds
    """FLOPs at the measured peaks"""


@dataclass(frozen=True)
class Row:
    """One case, predicted and measured."""

    case: Case
    """what ran"""
    seconds: Annotated[Times, _IN_ORDER]
    """how long"""
    measured: Measured
    """FLOPs and bytes that torch took"""
    declared: Predicted
    """what the declared graph says"""
    traced: Predicted | None
    """what the graph traced from the module says; None where there is none"""
    untraced: str
    """why there is none"""
    modelled: Modelled
    """what the roofline says of the declared graph"""
    outcome: Annotated[str, one_of(OUTCOMES)]
    """what bounds it by its measured time, see `outcome`"""

    @property
    def agrees(self) -> bool | None:
        """Whether that is what the roofline says; None for more than one op, and where nothing tells."""
        return agrees(self.modelled.limit, self.outcome) if self.case.mode == "kernel" else None

    def beyond(self, cache: int | None) -> bool:
        """Say whether a last-level cache holds a quarter at most of the bytes that the case has to move."""
        return self.modelled.fused > 4 * (cache or 0)

    def off(self, which: str = "declared") -> int | None:
        """Return predicted bytes at the peak less the measured ones; None where nothing was traced."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.peak - self.measured.peak

    def counted(self, which: str = "declared") -> bool | None:
        """Say whether the FLOPs are those that torch counts, and those that it is known to leave out."""
        found: Predicted | None = getattr(self, which)
        return None if found is None else found.flops - found.uncounted == self.measured.flops


@dataclass(frozen=True)
class Failed:
    """A case that could not run."""

    case: Case
    """what was to run"""
    error: str
    """what torch said, or the library"""
