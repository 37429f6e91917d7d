"""Carries of a loop that terms are added to: gradients of what all iterations read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...graph.loop import Loop
from ...graph.placement import Placement
from ...graph.tensor import Tensor
from ...ops.pieces import Accumulate
from .frames import is_pass

__all__ = ["late", "pending_of"]


def _terms(loop: Loop, i: int) -> list[Tensor]:
    """Return what an iteration adds to a carry, nothing where it does anything else with it."""
    t, out = loop.nexts[i], list[Tensor]()
    while t.producer is not None and isinstance(t.producer.kind, Accumulate):
        t, term = t.producer.operands
        out.append(term)
    return out if t is loop.carries[i] else []


def late(loop: Loop, i: int) -> bool:
    """Whether a carry is a sum that is reduced once, behind the loop: of micro-batches each one is reduced."""
    return bool(_terms(loop, i)) and not is_pass(loop)


def pending_of(loop: Loop, i: int, tensors: Mapping[Tensor, Any], at: Mapping[Any, Placement]) -> Placement | None:
    """Return where terms lie that are all parts of the same sums, None where they are not."""
    first, *others = {at.get(tensors[t]) for t in _terms(loop, i)}
    if others or first is None or not first.partial or any(how != "sum" for _, how in first.partial):
        return None
    return first
