"""Tables to which users add: what ops and functions mean, and how ops are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import GraphError

__all__ = ["adding"]

F = TypeVar("F")


def adding(table: dict[str, F], name: str, what: str, has: str) -> Callable[[F], F]:
    """Return a decorator that puts what it decorates into a table under a name that is new there.

    Raises
    ------
    GraphError
        If the name is taken: the decorator raises it.
    """

    def register(function: F) -> F:
        if name in table:
            raise GraphError(f"{what} {name!r} has {has} already, expected a new name")
        table[name] = function
        return function

    return register
