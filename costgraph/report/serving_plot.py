"""Pictures of serving: tokens in a second against the time of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..plan.serving import Throughput, ThroughputRow
from .drawing import FAINT, PALETTE, ROOF, framed, new_figure, saved, short, units_on
from .labels import place_labels

__all__ = ["plot_throughput"]

_BOUNDS = {"memory": PALETTE["blue"], "compute": PALETTE["vermilion"], "link": PALETTE["green"]}

# More sizes than these are named at every second, third, ... point.
_MOST_NAMED = 12


def plot_throughput(found: Throughput, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw tokens in a second against the time of a step, a point for each size.

    The estimate has points, colored by what bounds most of a step, rings where memory is not enough; beside it is the
    curve of the lower bound.
    """
    figure = new_figure(9, 4.8, path)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log")
    rows = found.rows
    bounds = [(r.lower_bound, r.most_tokens_per_second) for r in rows]
    ax.plot(*zip(*bounds, strict=True), color=FAINT, linewidth=1, linestyle="--", label="lower bound: no run is above")
    ax.plot([r.seconds for r in rows], [r.tokens_per_second for r in rows], color=ROOF, linewidth=1, label="estimate")
    for bound, color in _BOUNDS.items():
        own = [r for r in rows if r.bound == bound]
        _points(ax, [r for r in own if r.fits], f"bound by {bound}", face=color, edge=color)
        _points(ax, [r for r in own if not r.fits], f"bound by {bound}, does not fit", face="white", edge=color)
    sizes = " ".join(f"{k}={v}" for k, v in found.sizes.items() if k in ("S", "B"))
    title = f"{short(found.graph)} on {short(found.hardware.name, 60)}{sizes and ', '}{sizes}"
    framed(ax, title, "time of a step [s]", "new tokens of all sequences [1/s]")
    _ticks(ax)
    ax.margins(x=0.12, y=0.1)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    every = -(-len(rows) // _MOST_NAMED)
    named = [r for i, r in enumerate(rows) if i % every == 0 or i == len(rows) - 1]
    place_labels(ax, [(f"{found.symbol}={r.size}", (r.seconds, r.tokens_per_second)) for r in named])
    return saved(figure, path)


def _ticks(ax: Any) -> None:
    """Write amounts with their units at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis, unit in ((ax.xaxis, "s"), (ax.yaxis, "1")):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
        units_on(axis, unit)


def _points(ax: Any, rows: Sequence[ThroughputRow], label: str, *, face: str, edge: str) -> None:
    if rows:
        ax.scatter(
            [r.seconds for r in rows], [r.tokens_per_second for r in rows], 34, facecolors=face, edgecolors=edge,
            label=label, zorder=3,
        )  # fmt: skip
