"""Where answers find what draws them: analyses come before reports, so reports register themselves here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = [
    "PLOTTERS",
    "plotter",
]

#: Function that draws each kind of answer, `plot(answer, path) -> figure`; filled by `costgraph.report.plots`.
PLOTTERS: dict[str, Callable[[Any, Any], Any]] = {}


def plotter(answer: str) -> Callable[[Any, Any], Any]:
    """Return what draws a kind of answer; the module of plots is imported when one is first asked for."""
    if answer not in PLOTTERS:
        import_module("costgraph.report.plots")
    return PLOTTERS[answer]
