"""Views of a graph that modules imported later make: they register themselves here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["SHOWN", "explore", "summary"]

#: Filled by `costgraph.report.explore` and `costgraph.report.summary`.
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
    return _view("explore")(self, path, views=views)


def summary(self: Graph) -> str:
    """Return the table of scopes that `print` shows."""
    text: str = _view("summary")(self)
    return text


def _view(name: str) -> Callable[..., Any]:
    if name not in SHOWN:  # imported when it is first asked for
        import_module(f"costgraph.report.{name}")
    return SHOWN[name]
