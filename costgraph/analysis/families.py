"""Storages while a program runs: single ones, and those that a loop leaves behind, one an iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..algebra.polynomial import ONE, ZERO, Poly

__all__ = ["Family", "Held", "Life", "Rest", "piece"]


@dataclass(eq=False, slots=True)
class Life:
    """A storage while the program runs."""

    name: str
    """name of the tensor that it was made for, with its iteration"""
    role: str
    """input, param, buffer, cache, state, gradient, output, activation or temporary"""
    bytes: Poly
    """bytes it takes"""
    born: int | None
    """step that makes it, None for what is there from the start"""
    dies: int | None
    """last step that needs it, None for what stays to the end"""
    many: Poly = ONE
    """how many storages of one size it stands for"""
    made: tuple[object, ...] = ()
    """what makes it: its storage in the body, and the iteration of each loop around"""
    host: bool = False
    """whether it is memory of the host"""

    def every(self) -> Iterator[Life]:
        """Yield itself: a family yields its members."""
        yield self


class Family:
    """Storages that a loop leaves behind, one an iteration: those of the iterations played, and all others as one."""

    def __init__(self, slots: Sequence[Held], rest: list[Life]) -> None:
        self.slots = slots
        self.rest = rest

    def every(self) -> Iterator[Life]:
        """Yield the lives of all members."""
        yield from self.played()
        yield from self.rest

    def played(self) -> Iterator[Life]:
        """Yield the lives of the members of iterations that are played."""
        for slot in self.slots:
            if slot is not None:
                yield from slot.every()


# What stands behind a tensor; None for a sum before its first term.
Held = Life | Family | None


def piece(held: Held, i: int) -> Held:
    """Return what an iteration reads: a member of a family, or what is the same for all of them."""
    return held.slots[i] if isinstance(held, Family) else held


@dataclass
class Rest:
    """What the iterations of a loop leave behind that are not played: as many storages as there are of them."""

    start: int
    """first step of the loop"""
    depth: int
    """loops around this one"""
    turn: int = 0
    """first step behind the iterations that are not played"""
    count: Poly = ZERO
    """how many are not played"""
    middle: int = 0
    """iteration that stands for them, in the order in which they run"""
    read: Sequence[Held] = ()
    """families that the loop reads"""
    lives: dict[tuple[object, ...], Life] = field(default_factory=dict)

    def family(self, slots: Sequence[Held], *, reverse: bool) -> Family:
        """Return what stands behind a result of which these are the slices of the iterations that were played."""
        member = slots[-1 - self.middle if reverse else self.middle] if self.count and slots else None
        rest = [life for m in member.every() for life in self.others(m)] if member is not None else []
        return Family(slots, list(dict.fromkeys(rest)))

    def others(self, member: Life) -> Iterator[Life]:
        """Yield what stands for a storage in the iterations that are not played."""
        for family in self.read:  # a slice that was written into in place
            if isinstance(family, Family) and any(member is life for life in family.played()):
                yield from family.rest
                return
        if member.born is None or member.born < self.start:
            return  # the same one in all iterations
        storage, *label = member.made
        key = (storage, *label[: self.depth], *label[self.depth + 1 :])
        if key not in self.lives:
            last = str(self.count + self.middle).replace(" ", "")
            label = [*label[: self.depth], f"[{self.middle + 1}..{last}]", *label[self.depth + 1 :]]
            name = getattr(storage, "name", "") + "".join(map(str, label))
            bytes_, many = member.bytes * self.count, member.many * self.count
            made = (storage, *label)
            self.lives[key] = Life(name, member.role, bytes_, self.turn, self.turn, many, made, member.host)
        yield self.lives[key]
