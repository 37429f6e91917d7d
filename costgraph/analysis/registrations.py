"""Registry of plot functions, filled by `costgraph.report` so that analyses do not import reports."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = [
    "PLOTTERS",
    "plotter",
]

#: Plot function by answer type, `plot(answer, path) -> figure`; filled by `costgraph.report.plots`.
PLOTTERS: dict[str, Callable[[Any, Any], Any]] = {}


def plotter(answer: str) -> Callable[[Any, Any], Any]:
    """Return the plot function for an answer type, importing `costgraph.report.plots` on first use."""
    if answer not in PLOTTERS:
        import_module("costgraph.report.plots")
    return PLOTTERS[answer]
