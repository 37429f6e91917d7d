"""Pictures of rooflines and timelines. matplotlib is met inside functions alone, and only its objects."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.hooks import PLOTTERS
from ..analysis.memory import Timeline
from ..analysis.roofline import Roofline, RooflineRow
from ..bind import need_bound
from ..errors import FormatError, UnsupportedError
from ..symbols import shorten, shown
from ..units import format_bytes, format_quantity

__all__ = ["plot_roofline", "plot_timeline"]

_ENDINGS = (".png", ".svg", ".pdf")
_COLORS = {"matmul": "#1f5aa6", "pointwise": "#c2571a", "transcendental": "#2c8a57", "data": "#7a7a7a"}
_ROOF, _FAINT = "#222222", "#888888"

#: Of the ops, those that take longest are named.
_NAMED = 5


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError('plot: matplotlib is missing, expected it from: pip install "costgraph[plot]"') from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_path(path: object) -> None:
    """Raise FormatError if no picture can have this path."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"plot: path {shown(path, 80)}, expected a text or a path")
    if Path(path).suffix.lower() not in _ENDINGS:
        raise FormatError(f"plot: {shorten(os.fspath(path), 200)}, expected a file ending in {', '.join(_ENDINGS)}")


def _save(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    if path is None:
        return figure
    try:
        figure.savefig(os.fspath(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        place = shorten(os.fspath(path), 200)
        raise FormatError(f"plot: {place}: {reason}, expected a file that can be written") from None
    return figure


def _short(text: str, most: int = 34) -> str:
    """Return a name from outside as matplotlib may draw it: no mathematics, the end where it is long."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return (text if len(text) <= most else "..." + text[3 - most :]).replace("$", r"\$")


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
    figure = _figure(10, 5.2)
    ax = figure.subplots()
    drawn = [r for r in roofline.rows if r.flops and r.bytes and r.attainable]
    low, high = _range([r.intensity for r in drawn] + [roofline.ridge])
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    _roofs(ax, roofline, low, high)
    _points(ax, roofline, drawn)
    ax.set(xlabel="arithmetic intensity, as declared [FLOP/B]", ylabel="attainable rate [FLOP/s]")
    _units_on(ax.yaxis, "FLOP/s")
    ax.set_title(f"{_short(roofline.graph)} on {_short(roofline.hardware.name)}", fontsize=11)
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    return _save(figure, path)


def _range(values: Sequence[float]) -> tuple[float, float]:
    found = [v for v in values if 0 < v < math.inf] or [1.0]
    return 10 ** (math.floor(math.log10(min(found))) - 0.3), 10 ** (math.ceil(math.log10(max(found))) + 0.3)


def _units_on(axis: Any, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(float(value), unit)))


def _roofs(ax: Any, roofline: Roofline, low: float, high: float) -> None:
    bandwidth = float(roofline.hardware.bandwidth.value)
    rates = sorted(roofline.rates.items(), key=lambda item: -item[1]) or [("no FLOPs", bandwidth * high)]
    top = rates[0][1]
    # the slope ends at the highest roof; lower roofs are dashed
    ax.plot([low, top / bandwidth], [low * bandwidth, top], color=_ROOF, linewidth=1.6)
    for i, (name, rate) in enumerate(rates):
        style = "-" if i == 0 else "--"
        ax.plot([rate / bandwidth, high], [rate, rate], color=_ROOF, linewidth=1.6, linestyle=style)
        # points lie on the highest roof: its name stands clear of them
        _note(ax, f"{name}, {format_quantity(rate, 'FLOP/s')}", (high, rate), (-5, 17 if i == 0 else 4), "right")
    ax.set_ylim(low * bandwidth / 1.5, 3 * top)
    middle = math.sqrt(low * rates[-1][1] / bandwidth)
    _note(ax, f"memory, {roofline.hardware.bandwidth}", (middle, middle * bandwidth), (9, -13), "left")
    if roofline.ridge:
        ax.axvline(roofline.ridge, color=_FAINT, linewidth=1, linestyle=":")
        text = f"ridge point, {format_quantity(roofline.ridge, 'FLOP/B')}"
        # at the foot of its line, where there are neither roofs nor points
        _note(ax, text, (roofline.ridge, low * bandwidth / 1.5), (-6, 8), "right")


def _note(ax: Any, text: str, place: tuple[float, float], offset: tuple[float, float], side: str) -> None:
    ax.annotate(text, place, offset, textcoords="offset points", ha=side, fontsize=8.5)


def _points(ax: Any, roofline: Roofline, rows: Sequence[RooflineRow]) -> None:
    longest = max((r.seconds for r in rows), default=1.0) or 1.0
    for kind, color in _COLORS.items():
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
        labels.append(f"{_short(first.op)}, {format_quantity(first.seconds, 's')}{more}")
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


# -- timeline ----------------------------------------------------------------------------------------------------


def plot_timeline(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, capacity: float | None = None
) -> Any:
    """Draw live bytes over the steps of a program.

    Parameters
    ----------
    timeline : Timeline
        What `costgraph.timeline` returned, all sizes bound.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.
    capacity : float, optional
        Bytes of a device, drawn as a line.

    Returns
    -------
    matplotlib.figure.Figure
        One step for each op at which memory is taken, the peak marked with its op.

    Raises
    ------
    BindingError
        If a size is open.
    UnsupportedError
        If matplotlib is missing.
    FormatError
        If the file has another ending, or cannot be written.
    """
    need_bound([timeline.peak], "plot of a timeline")
    if path is not None:
        check_path(path)
    figure = _figure(8, 4.2)
    ax = figure.subplots()
    live = [float(m.bytes) for m in timeline.moments]
    at = max(range(len(live)), key=live.__getitem__)
    ax.fill_between(range(len(live)), live, step="post", color="#cfe0f3")
    ax.step(range(len(live)), live, where="post", color=_COLORS["matmul"], linewidth=1.2)
    ax.plot([at], [live[at]], "o", color=_COLORS["pointwise"], zorder=3)
    name = _short(timeline.op) or "throughout"
    late = at > len(live) / 2
    text = f"peak, {name}\n{format_bytes(timeline.peak)}"
    _note(ax, text, (at, live[at]), (-8 if late else 8, 8), "right" if late else "left")
    if capacity is not None:
        ax.axhline(capacity, color=_ROOF, linewidth=1, linestyle="--")
        _note(ax, f"capacity, {format_bytes(capacity)}", (0, capacity), (2, 4), "left")
    _phases(ax, timeline)
    ax.set(xlabel="step [ops that take memory, in program order]", ylabel="live memory [B]")
    ax.margins(x=0.02)
    ax.set_ylim(0, 1.25 * max(live[at], capacity or 0))
    _units_on(ax.yaxis, "B")
    return _save(figure, path)


def _phases(ax: Any, timeline: Timeline) -> None:
    """Draw a line where a phase begins."""
    before = None
    starts: list[tuple[int, str]] = []
    for i, m in enumerate(timeline.moments):
        if m.phase != before:
            starts.append((i, m.phase))
        before = m.phase
    # recomputation alternates with the backward pass: as lines that would be a hatching
    if not 1 < len(starts) <= 6:
        return
    for i, phase in starts:
        ax.axvline(i, color=_FAINT, linewidth=0.8, linestyle=":")
        ax.annotate(
            phase, (i, 0.03), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8,
            color="#555555",
        )  # fmt: skip


_PLOTTERS: Mapping[str, Callable[[Any, Any], Any]] = {"roofline": plot_roofline, "timeline": plot_timeline}
PLOTTERS.update(_PLOTTERS)
