"""Kinds as they are asked for: a class, or the name that it has in tables and files."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..graph.op import OpKind
from ..ops.registry import KINDS

__all__ = ["Named", "kind_of"]

Named = type[OpKind] | str


def kind_of(place: str, kind: Named) -> type[OpKind]:
    """Return a registered kind.

    UnsupportedError if it is not registered.
    """
    name = kind if isinstance(kind, str) else kind.name
    found = KINDS.get(name)
    if found is None or (found is not kind and not isinstance(kind, str)):
        raise UnsupportedError(f"{place}: op kind {name!r} is not registered, expected one of {', '.join(KINDS)}")
    return found
