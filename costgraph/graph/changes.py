"""Changes that are taken back where a call is refused.

A public function that adds to a graph does it whole or not at all: what it notes is taken back where it, or a function
that it was given, ends in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from .scopes import here
from .tensor import Tensor

__all__ = ["Journal", "whole"]


class Journal:
    """What takes back the changes of a graph since the outermost call that is made whole or not at all."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] | None = None
        self.asked = ""
        """Name of the outermost call."""

    def note(self, undo: Callable[[], object]) -> None:
        """Note what takes back a change that is made now."""
        if self._undo is not None:
            self._undo.append(undo)

    @contextmanager
    def whole(self, asked: str = "") -> Iterator[None]:
        """Take back the changes made inside, by a call of some name, if it ends in an error."""
        outermost = self._undo is None
        if outermost:
            self.asked = asked
        undo = self._undo = [] if self._undo is None else self._undo
        before = len(undo)
        try:
            yield
        except BaseException:
            while len(undo) > before:
                undo.pop()()
            raise
        finally:
            if outermost:
                self._undo, self.asked = None, ""


def whole(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Let a function that is refused leave the graph of its operands, or the one that is open, as it was."""
    asked = name or function.__name__

    @wraps(function)
    def called(*args: Any, **named: Any) -> Any:
        operand = next(_tensors(args), None) or next(_tensors(named.values()), None)
        graph = here().graph if operand is None else operand.graph
        if graph is None:
            return function(*args, **named)
        with graph.whole(asked):
            return function(*args, **named)

    return called


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))
