"""Lists of what turns of a loop have made, joined: as many parts as the loop has turns, whose number is a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .counted import Loops
from .events import Event, Handle, Joined
from .marks import Barrier
from .scopes import Scopes

__all__ = ["JOINS", "joined"]

aten = torch.ops.aten

#: What joins tensors of a list.
JOINS = (aten.cat.default, aten.stack.default)


class Recording(Protocol):
    """What notes the calls of a program."""

    turns: Loops
    scopes: Scopes
    phase: str
    events: list[Event]

    @staticmethod
    def barrier(t: torch.Tensor, mark: Barrier = ...) -> None:
        """Note that no gradient passes to what made a tensor."""

    def known(self, t: torch.Tensor) -> Handle:
        """Return what a tensor is."""

    def made(self, t: torch.Tensor) -> Handle:
        """Return what a tensor is that the program has made just now."""


def joined(recorder: Recording, func: Any, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Record a join of what a loop has made, and return what it makes; None where the list is any other."""
    found = recorder.turns.joined(parts)
    if found is None:
        return None
    first, stacked = parts[found.first], func is aten.stack.default
    shape, axis = list(first.shape), dim % (first.ndim + stacked)
    each = [1 if stacked else t.shape[axis] for t in parts]
    many = sum(each[: found.first]) + sum(each[found.last :]) + found.count * each[found.first]
    shape[axis : axis + 1 - stacked] = [many]
    made: torch.Tensor = aten.new_empty.default(first, shape)
    known = tuple(map(recorder.known, parts))
    barrier = next((h.barrier for h in known if h.barrier is not None), None)
    if barrier is not None:
        recorder.barrier(made, barrier)
    scope, _ = recorder.scopes.now()
    recorder.events.append(
        Joined(known, recorder.made(made), found.loop, axis, stacked, found.back, scope, recorder.phase)
    )
    return made
