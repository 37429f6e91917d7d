"""What an op of a block reads, told in a way that is the same for all blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ...graph.tensor import Tensor

__all__ = ["After", "Before", "Family", "Left", "Made", "Member", "Owned", "Shared", "Value", "View"]


@dataclass(frozen=True)
class Made:
    """What an op of the same turn makes."""

    at: int
    """place of the op in the turn"""
    result: int
    """which of its results"""


@dataclass(frozen=True)
class Shared:
    """A tensor from outside that is the same in all turns."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Owned:
    """Parameters, buffers or states of which each block has its own."""

    members: tuple[Tensor, ...]
    """in the order of the blocks"""


@dataclass(frozen=True)
class Left:
    """What the turns of an earlier run leave behind, one storage each."""

    run: int
    value: Made | Before


Family = Owned | Left


@dataclass(frozen=True)
class Member:
    """The one of a family that belongs to the block of the turn; outside of runs, all of them."""

    family: Family


@dataclass(frozen=True)
class Before:
    """What something was as many turns ago as there are `starts`."""

    of: Made | Member
    starts: tuple[Tensor | None, ...]
    """what is read in its place in the first turns; None where nothing is"""

    @property
    def nearer(self) -> Before | Made | Member:
        """What it was one turn later: what is handed on to become it."""
        return Before(self.of, self.starts[1:]) if len(self.starts) > 1 else self.of


@dataclass(frozen=True)
class View:
    """A view of a value, as an op of an earlier run made it for the same block."""

    of: Value
    run: int
    at: int
    result: int


@dataclass(frozen=True)
class After:
    """Outside of runs: what a value that a run carries is when its last turn is over."""

    run: int
    value: Before


Value = Made | Shared | Member | Before | View
