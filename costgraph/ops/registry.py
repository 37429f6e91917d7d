"""Registry of op kinds, for saving and loading graphs and for property tests."""

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

#: All op kinds by name.
KINDS: Mapping[str, type[OpKind]] = MappingProxyType(_kinds)


def register(kind: K) -> K:
    """Register an op kind, so that graphs with it can be saved, loaded and tested; a class decorator.

    Parameters
    ----------
    kind : subclass of OpKind
        A frozen dataclass with a new name.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    GraphError
        If it is not such a class, or the name is taken.
    """
    if not (isinstance(kind, type) and issubclass(kind, OpKind) and isinstance(getattr(kind, "name", None), str)):
        raise GraphError(f"register: got {shown(kind)}, expected a subclass of OpKind with a name")
    adding(_kinds, "a record", kind.name)(kind)
    return kind


def adding(table: dict[Key, F], entry: str, *keys: Key, what: str = "op kind") -> Callable[[F], F]:
    """Return a decorator that adds functions to a table under the given keys.

    The decorator raises GraphError if a key is taken.
    """

    def decorate(function: F) -> F:
        for key in keys:
            if key in table:
                name = key if isinstance(key, str) else key.name
                raise GraphError(f"{what} {name!r} already has {entry}, expected a new name")
            table[key] = function
        return function

    return decorate


register(Repeat)
