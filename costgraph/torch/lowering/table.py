"""The table of lowerings: what torch is called with for each op kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ...graph.op import OpKind
from ...ops.registry import adding
from .site import Site

__all__ = ["LOWERINGS", "Lowering", "lowering"]

#: Emits the calls of one op and places its results.
Lowering = Callable[[Site[Any]], None]
K = TypeVar("K", bound=OpKind)

_lowerings: dict[type[OpKind], Lowering] = {}
#: Lowering of each op kind.
LOWERINGS: Mapping[type[OpKind], Lowering] = MappingProxyType(_lowerings)


def lowering(kind: type[K]) -> Callable[[Callable[[Site[K]], None]], Callable[[Site[K]], None]]:
    """Register the lowering of an op kind.

    Parameters
    ----------
    kind : subclass of OpKind
        Of which ops it is.

    Returns
    -------
    callable
        Decorator of a function of `Site`, which emits torch's calls and places every result: `site.kind` is the
        record, `site.of(site.kind.size)` puts numbers into one of its facts.

    Raises
    ------
    GraphError
        If the kind has a lowering already.
    """
    return adding(_lowerings, "a lowering", kind)
