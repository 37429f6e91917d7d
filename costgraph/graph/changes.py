"""Changes that are taken back where a call is refused, and lists of a finished graph, which take none.

A public function that adds to a graph does it whole or not at all: what it notes is taken back where it, or a function
that it was given, ends in an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ..errors import GraphError
from .scopes import here
from .tensor import Tensor

__all__ = ["Journal", "fixed", "loose", "whole"]


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


def _refusing(kind: type, *changing: str) -> type:
    def refuse(self: Any, *args: object, **named: object) -> None:
        raise GraphError(self.refusal)

    plain = {"__reduce_ex__": lambda self, protocol: (kind, (kind(self),))}  # a copy of it can be changed
    return type(f"Fixed{kind.__name__.title()}", (kind,), plain | dict.fromkeys(changing, refuse))


_KEYS = ("__setitem__", "__delitem__", "clear", "pop")
_REFUSING: dict[Any, type] = {
    list: _refusing(list, *_KEYS, "__iadd__", "__imul__", "append", "extend", "insert", "remove", "reverse", "sort"),
    dict: _refusing(dict, *_KEYS, "__ior__", "popitem", "setdefault", "update"),
}


def fixed(value: Any, refusal: str) -> Any:
    """Return a list or dictionary as one that refuses to be changed, in these words, anything else as it is."""
    if type(value) not in _REFUSING:
        return value
    out = _REFUSING[type(value)](value)
    out.refusal = refusal
    return out


def loose(value: Any) -> Any:
    """Return what `fixed` made of a list or dictionary as one that can be changed again, anything else as it is."""
    return next((kind(value) for kind, made in _REFUSING.items() if type(value) is made), value)
