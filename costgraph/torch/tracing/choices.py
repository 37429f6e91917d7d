"""Record why a device runs a kernel where torch has several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Choice", "Choices"]


@dataclass(frozen=True)
class Choice:
    """Reason why a call runs on a device."""

    rule: str
    """name of the rule"""
    why: str
    """conditions that decided it"""


@dataclass
class Choices:
    """Kernel choices, which also apply to their gradients."""

    _current: Choice | None = None
    _starts: list[int] = field(default_factory=list)
    _intervals: list[tuple[int, Choice]] = field(default_factory=list)

    def current(self) -> Choice | None:
        """Return the choice behind the current call, None if every device would run it."""
        if self._current is not None:
            return self._current
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        sequence_number = node._sequence_nr()
        index = bisect_right(self._starts, sequence_number) - 1
        if index < 0 or sequence_number >= self._intervals[index][0]:
            return None
        return self._intervals[index][1]

    @contextmanager
    def by(self, rule: str, why: str) -> Iterator[None]:
        """Attribute the calls inside, and their gradients, to a choice."""
        outer, self._current = self._current, Choice(rule, why)
        start = _node_count()
        try:
            yield
        finally:
            if _node_count() > start and outer is None:
                self._starts.append(start)
                self._intervals.append((_node_count(), self._current))
            self._current = outer


def _node_count() -> int:
    """Return how many autograd nodes exist so far."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # torch has no types for it
