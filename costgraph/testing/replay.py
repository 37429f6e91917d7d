"""Memory by replay: buffers are taken when an op makes them and given back after the last op that touches them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .values import Buffer

__all__ = ["Event", "peak_of"]


@dataclass
class Event:
    """An op that ran."""

    op: str
    """its name, with the iteration of each loop around it"""
    made: list[Buffer]
    """buffers that it took"""
    touched: list[Buffer]
    """buffers that it needed, these included"""
    workspace: Any = 0
    """bytes beside them"""


def peak_of(events: Sequence[Event], throughout: Iterable[Buffer], kept: Iterable[Buffer]) -> tuple[Any, str]:
    """Return the most bytes of the device live at once, and the op at which they first are, empty if no op ran.

    Buffers of `throughout` are there before the first op and after the last one; outputs are `kept` from birth to the
    end.
    """
    last: dict[Buffer, int] = {}
    events = [_of_device(event) for event in events]
    throughout = [b for b in throughout if not b.host]
    for i, event in enumerate(events):
        for buffer in (*event.made, *event.touched):
            last[buffer] = i
    for buffer in kept:
        last[buffer] = len(events)
    live = set(throughout)
    fixed = set(live)
    most, where = sum((b.bytes for b in live), start=Fraction(0)), ""
    taken = most
    for i, event in enumerate(events):
        new = set(event.made) - live
        live |= new
        taken += sum(b.bytes for b in new)
        if taken + event.workspace > most:
            most, where = taken + event.workspace, event.op
        gone = {b for b in (*event.made, *event.touched) if b in live and b not in fixed and last[b] <= i}
        live -= gone
        taken -= sum(b.bytes for b in gone)
    return most, where


def _of_device(event: Event) -> Event:
    made, touched = ([b for b in found if not b.host] for found in (event.made, event.touched))
    return Event(event.op, made, touched, event.workspace)
