"""What a recorder notes of a program: storages that are there, calls that ran, and what was given back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...algebra.polynomial import Poly
from .call import Call, Counts, Spec
from .choices import Choice
from .marks import Barrier
from .translations.table import Translation

__all__ = ["Asked", "Death", "Event", "Handle", "Joined", "Made", "Source", "Turn"]


@dataclass(frozen=True)
class Handle(Spec):
    """A view of a storage: what one of torch's tensors is."""

    storage: int
    """number of the storage"""
    offset: Poly
    """first element within the storage"""
    signs: tuple[bool, bool] = (False, False)
    """whether it stands for the conjugate of what is stored, and for its negative"""
    barrier: Barrier | None = None
    """why no gradient passes to its producer, None where one does"""


@dataclass
class Source:
    """A storage that is there before the first op."""

    name: str
    role: str
    handle: Handle
    bytes: Poly
    grad: bool = False


@dataclass
class Made:
    """One op that ran."""

    target: str
    """name and overload, as in torch.ops.aten; with its namespace where that is another one"""
    operands: tuple[Handle, ...]
    outputs: list[tuple[Handle, int | None, int, Poly | None]]
    """results: the operand whose storage each shares, the place among what the call returned (-1: that operand
    itself), and the bytes of the storage where they are not those of the tensor"""
    counts: Counts | None
    """what its rule says, None where its translation does"""
    moves: bool
    """False for a view, which touches no memory"""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    scope: str
    phase: str
    call: Call | None
    """the same, by the names of the schema"""
    translation: Translation | None
    """what makes declared ops of it"""
    tags: Collection[Any] = ()
    """what torch says of its op"""
    choice: Choice | None = None
    """why a device runs it, None where torch's own way leads to it on any device"""
    line: str = ""
    """line of the program, of a call whose costs are not known yet"""
    unseen: bool = False
    """whether it writes in place where the program lets a backward pass know nothing of it"""
    no_grad: bool = False
    """whether it ran without autograd"""

    @property
    def name(self) -> str:
        """Name of the op without its overload."""
        return self.target.partition(".")[0] or "op"


@dataclass
class Death:
    """A storage is given back."""

    storage: int


@dataclass
class Asked:
    """A program states the format of a tensor, which has it already."""

    of: Handle
    made: Handle
    """what the program has from there on, in a storage of its own as a cast would make one, or the same"""
    scope: str
    phase: str
    fixed: bool | None = None
    """whether it is that format in whatever format the model is; None where it is not known"""


@dataclass
class Turn:
    """A turn of a loop over a size begins or ends."""

    path: tuple[tuple[int, int], ...]
    """numbers of the loops around what follows, and the turn of each"""


@dataclass
class Joined:
    """A tensor of what all turns of a loop have made, and of others beside it: its size follows from their number."""

    parts: tuple[Handle, ...]
    made: Handle
    loop: int
    axis: int
    stacked: bool
    """whether each of them is one position of a new axis"""
    back: bool
    """whether what the last turn has made comes first"""
    scope: str
    phase: str


Event = Made | Death | Asked | Turn | Joined
