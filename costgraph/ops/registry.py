"""The registry of op kinds: what tests enumerate and files name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import GraphError
from ..graph.op import OpKind

__all__ = ["KINDS", "register"]

_kinds: dict[str, OpKind] = {}
#: Every op kind by name.
KINDS: Mapping[str, OpKind] = MappingProxyType(_kinds)


def register(kind: OpKind) -> OpKind:
    """Add an op kind, so that graphs with it can be saved, loaded and held to the laws.

    Parameters
    ----------
    kind : OpKind
        Its name must be new.

    Returns
    -------
    OpKind
        The same record.

    Raises
    ------
    GraphError
        If the name is taken.
    """
    if kind.name in _kinds:
        raise GraphError(f"op kind {kind.name!r} is registered already, expected a new name")
    _kinds[kind.name] = kind
    return kind
