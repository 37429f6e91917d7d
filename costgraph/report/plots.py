"""Pictures of rooflines; whoever asks an answer to plot itself is sent here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..analysis.hooks import PLOTTERS
from ..analysis.roofline import Roofline, RooflineRow
from ..hardware.units import format_quantity
from .drawing import COLORS, FAINT, ROOF, check_path, new_figure, note, saved, short, units_on
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
    if path is not None:
        check_path(path)
    figure = new_figure(10, 5.2)
    ax = figure.subplots()
    drawn = [r for r in roofline.rows if r.flops and r.bytes and r.attainable]
    low, high = _range([r.intensity for r in drawn] + [roofline.ridge])
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    _roofs(ax, roofline, low, high)
    _points(ax, roofline, drawn)
    ax.set(xlabel="arithmetic intensity, as declared [FLOP/B]", ylabel="attainable rate [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    ax.set_title(f"{short(roofline.graph)} on {short(roofline.hardware.name)}", fontsize=11)
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    return saved(figure, path)


def _range(values: Sequence[float]) -> tuple[float, float]:
    found = [v for v in values if 0 < v < math.inf] or [1.0]
    return 10 ** (math.floor(math.log10(min(found))) - 0.3), 10 ** (math.ceil(math.log10(max(found))) + 0.3)


def _roofs(ax: Any, roofline: Roofline, low: float, high: float) -> None:
    bandwidth = float(roofline.hardware.bandwidth.value)
    rates = sorted(roofline.rates.items(), key=lambda item: -item[1]) or [("no FLOPs", bandwidth * high)]
    top = rates[0][1]
    # the slope ends at the highest roof; lower roofs are dashed
    ax.plot([low, top / bandwidth], [low * bandwidth, top], color=ROOF, linewidth=1.6)
    for i, (name, rate) in enumerate(rates):
        style = "-" if i == 0 else "--"
        ax.plot([rate / bandwidth, high], [rate, rate], color=ROOF, linewidth=1.6, linestyle=style)
        # points lie on the highest roof: its name stands clear of them
        note(ax, f"{name}, {format_quantity(rate, 'FLOP/s')}", (high, rate), (-5, 17 if i == 0 else 4), "right")
    ax.set_ylim(low * bandwidth / 1.5, 3 * top)
    middle = math.sqrt(low * rates[-1][1] / bandwidth)
    note(ax, f"memory, {roofline.hardware.bandwidth}", (middle, middle * bandwidth), (9, -13), "left")
    if roofline.ridge:
        ax.axvline(roofline.ridge, color=FAINT, linewidth=1, linestyle=":")
        text = f"ridge point, {format_quantity(roofline.ridge, 'FLOP/B')}"
        # at the foot of its line, where there are neither roofs nor points
        note(ax, text, (roofline.ridge, low * bandwidth / 1.5), (-6, 8), "right")


def _points(ax: Any, roofline: Roofline, rows: Sequence[RooflineRow]) -> None:
    longest = max((r.seconds for r in rows), default=1.0) or 1.0
    for kind, color in COLORS.items():
        own = [r for r in rows if r.kind == kind]
        if own:
            areas = [14 + 360 * r.seconds / longest for r in own]
            ax.scatter(
                [r.intensity for r in own], [r.attainable for r in own], areas, label=kind, color=color,
                alpha=0.65, edgecolors="white", linewidths=0.7, zorder=3,
            )  # fmt: skip
    _key(ax, roofline, rows, longest)


def _key(ax: Any, roofline: Roofline, rows: Sequence[RooflineRow], longest: float) -> None:
    """Number the ops that take longest; kinds and numbers are explained beside the axes, where nothing is drawn."""
    handles, labels = ax.get_legend_handles_labels()
    for i, group in enumerate(_places(rows)[:_NAMED], start=1):
        first = group[0]
        more = f"\n  and {len(group) - 1} more near it" if len(group) > 1 else ""
        where = (first.intensity, first.attainable)
        ax.annotate(
            str(i), where, (-9, 10), textcoords="offset points", ha="center", va="center", fontsize=8, zorder=4,
            color="white", bbox={"boxstyle": "circle,pad=0.15", "facecolor": "#222222", "edgecolor": "none"},
        )  # fmt: skip
        handles.append(ax.plot([], [], linestyle="none", marker=f"${i}$", color="#222222", markersize=6)[0])
        labels.append(f"{short(first.op)}, {format_quantity(first.seconds, 's')}{more}")
    left = len(roofline.rows) - len(rows)
    if handles:
        note = f"\n{left} op(s) without FLOPs or bytes are not shown" if left else ""
        title = f"kind of FLOPs; area is time, up to {format_quantity(longest, 's')}{note}"
        legend = ax.figure.legend(
            handles, labels, loc="outside right upper", fontsize=8, title=title, title_fontsize=8, frameon=False,
            alignment="left",
        )  # fmt: skip
        for handle in legend.legend_handles:
            if hasattr(handle, "set_sizes"):  # the kinds: one size for all
                handle.set_sizes([50])


def _places(rows: Sequence[RooflineRow]) -> list[list[RooflineRow]]:
    """Group ops that lie on one another, as those of one shape do, the longest first."""
    places: dict[tuple[float, float], list[RooflineRow]] = {}
    for r in sorted(rows, key=lambda r: -r.seconds):
        places.setdefault((round(math.log10(r.intensity), 1), round(math.log10(r.attainable), 1)), []).append(r)
    return list(places.values())


_PLOTTERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "roofline": plot_roofline, "timeline": plot_timeline, "validation": plot_validation,
    "throughput": plot_throughput,
}  # fmt: skip
PLOTTERS.update(_PLOTTERS)
