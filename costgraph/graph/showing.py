"""What a graph shows of itself: pages are made far behind graphs, so what makes them registers itself here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["SHOWN", "explore"]

#: Filled by `costgraph.report.explore`.
SHOWN: dict[str, Callable[..., Any]] = {}


def explore(self: Graph, path: object = None, /, *, views: object = None) -> Any:
    """Return the page with sliders, as `costgraph.explore`, which a notebook shows.

    Parameters
    ----------
    path : str or path-like, optional
        HTML file to write.
    views : sequence of str or mapping of str to Graph, optional
        What can be chosen there.

    Returns
    -------
    costgraph.report.explore.Page
        `.html`, `.save(path)`.
    """
    if "explore" not in SHOWN:  # imported when it is first asked for
        import_module("costgraph.report.explore")
    return SHOWN["explore"](self, path, views=views)
