"""The registry of op kinds, which tests enumerate and files name, and how a table of what they do grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from ..algebra.symbols import shown
from ..errors import GraphError
from ..ir.graph import OpKind, Repeat
from ..ir.graph import kinds as _kinds

__all__ = ["KINDS", "adding", "register"]

F = TypeVar("F")
K = TypeVar("K", bound=type[OpKind])
Key = TypeVar("Key", str, type[OpKind])

#: Every op kind by name.
KINDS: Mapping[str, type[OpKind]] = MappingProxyType(_kinds)


def register(kind: K) -> K:
    """Add an op kind, so that graphs with it can be saved, loaded and held to the laws: a decorator of its class.

    Parameters
    ----------
    kind : subclass of OpKind
        A frozen dataclass; its name must be new.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    GraphError
        If it is no such class, or the name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, OpKind) and isinstance(getattr(kind, "name", None), str)):
        raise GraphError(f"register: got {shown(kind)}, expected a subclass of OpKind with a name")
    adding(_kinds, "a record", kind.name)(kind)
    return kind


def adding(table: dict[Key, F], has: str, *keys: Key, what: str = "op kind") -> Callable[[F], F]:
    """Return a decorator that puts what it decorates into a table, under names or kinds that are new there.

    If one is taken, the decorator raises GraphError.
    """

    def decorate(found: F) -> F:
        for key in keys:
            if key in table:
                name = key if isinstance(key, str) else key.name
                raise GraphError(f"{what} {name!r} has {has} already, expected a new name")
            table[key] = found
        return found

    return decorate


register(Repeat)
