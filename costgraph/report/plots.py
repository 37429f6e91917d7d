"""Pictures of rooflines; whoever asks an answer to plot itself is sent here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..analysis.hooks import PLOTTERS
from ..analysis.roofline import Roofline, RooflineRow
from ..hardware.units import format_quantity
from .drawing import COLORS, FAINT, check_path, framed, new_figure, saved, short, units_on
from .labels import FREE, Label, place_labels
from .roofs import draw_roofs, range_of
from .serving_plot import plot_throughput
from .timeline_plot import plot_timeline
from .validation_plots import plot_validation

__all__ = ["check_path", "plot_roofline", "plot_timeline"]

#: Of the ops, those that take longest are named.
_NAMED = 5


# -- roofline ----------------------------------------------------------------------------------------------------


def plot_roofline(roofline: Roofline, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw ops on the log-log roof of a device.

    Parameters
    ----------
    roofline : Roofline
        What `costgraph.roofline` returned.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.

    Returns
    -------
    matplotlib.figure.Figure
        Area of a point by its estimated time, color by its kind of FLOPs; ops without FLOPs, or without bytes, have no
        place on these axes and are counted in the legend.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    FormatError
        If the file has another ending, or cannot be written.
    """
    figure = new_figure(10, 5.2, path)
    ax = figure.subplots()
    drawn = [r for r in roofline.rows if r.flops and r.bytes and r.attainable]
    bandwidth = float(roofline.hardware.bandwidth.value)
    low, high = range_of([(r.intensity, r.seconds) for r in drawn], roofline.ridge)
    rates = {k: float(v) for k, v in roofline.rates.items()} or {"no FLOPs": bandwidth * high}
    labels = draw_roofs(ax, roofline.hardware.bandwidth, rates, (low, high))
    if roofline.ridge:
        ax.axvline(roofline.ridge, color=FAINT, linewidth=1, linestyle=":", gid=FREE)
        # at the foot of its line, where there are neither roofs nor points
        labels.append((f"ridge point, {format_quantity(roofline.ridge, 'FLOP/B')}", (roofline.ridge, ax.get_ylim()[0])))
    title = f"{short(roofline.graph)} on {short(roofline.hardware.name, 60)}"
    framed(ax, title, "arithmetic intensity, as declared [FLOP/B]", "attainable rate [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    _points(ax, drawn)
    _key(ax, roofline, drawn)
    place_labels(ax, labels, lead=False)
    place_labels(ax, _names(r for r in drawn if low <= r.intensity <= high))
    return saved(figure, path)


def _points(ax: Any, rows: Sequence[RooflineRow]) -> None:
    longest = max((r.seconds for r in rows), default=1.0) or 1.0
    for kind, color in COLORS.items():
        own = [r for r in rows if r.kind == kind]
        if own:
            areas = [14 + 360 * r.seconds / longest for r in own]
            ax.scatter(
                [r.intensity for r in own], [r.attainable for r in own], areas, label=kind, color=color,
                alpha=0.65, edgecolors="white", linewidths=0.7, zorder=3,
            )  # fmt: skip


def _key(ax: Any, roofline: Roofline, rows: Sequence[RooflineRow]) -> None:
    """Explain colors and areas beside the axes, where nothing is drawn, and say what is not shown."""
    low, high = ax.get_xlim()
    away = [r for r in rows if not low <= r.intensity <= high]
    lines = ["kind of FLOPs"]
    if rows:
        lines[0] += f"; area is time, up to {format_quantity(max(r.seconds for r in rows), 's')}"
    if left := len(roofline.rows) - len(rows):
        lines.append(f"{left} op(s) without FLOPs or bytes are not shown")
    if away:
        share = sum(r.seconds for r in away) / sum(r.seconds for r in roofline.rows)
        lines.append(f"{len(away)} op(s) beyond these axes, {share:.1%} of the time")
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        legend = ax.figure.legend(
            handles, labels, loc="outside right upper", fontsize=8, title="\n".join(lines), title_fontsize=8,
            frameon=False, alignment="left",
        )  # fmt: skip
        for handle in legend.legend_handles:
            handle.set_sizes([50])


def _names(rows: Iterable[RooflineRow]) -> list[Label]:
    """Name the ops that take longest; those that lie on one another, as ops of one shape do, have one name."""
    places: dict[tuple[float, float], list[RooflineRow]] = {}
    for r in sorted(rows, key=lambda r: -r.seconds):
        places.setdefault((round(math.log10(r.intensity), 1), round(math.log10(r.attainable), 1)), []).append(r)
    found = []
    for first, *others in list(places.values())[:_NAMED]:
        more = f"\nand {len(others)} more near it" if others else ""
        text = f"{short(first.op)}, {format_quantity(first.seconds, 's')}{more}"
        found.append((text, (first.intensity, first.attainable)))
    return found


_PLOTTERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "roofline": plot_roofline, "timeline": plot_timeline, "validation": plot_validation,
    "throughput": plot_throughput,
}  # fmt: skip
PLOTTERS.update(_PLOTTERS)
