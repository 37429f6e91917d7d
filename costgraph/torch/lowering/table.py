"""The table of lowerings: what torch is called with for each op kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...ops.registry import adding
from .site import Site

__all__ = ["LOWERINGS", "Lowering", "lowering"]

#: Emits the calls of one op and places its results.
Lowering = Callable[[Site], None]

_lowerings: dict[str, Lowering] = {}
#: Lowering of each op kind, by its name.
LOWERINGS: Mapping[str, Lowering] = MappingProxyType(_lowerings)


def lowering(kind: str) -> Callable[[Lowering], Lowering]:
    """Register the lowering of an op kind.

    Parameters
    ----------
    kind : str
        Name of the op kind.

    Returns
    -------
    callable
        Decorator of a function of `Site`, which emits torch's calls and places every result.

    Raises
    ------
    GraphError
        If the kind has a lowering already.
    """
    return adding(_lowerings, "a lowering", kind)
