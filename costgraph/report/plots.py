"""Matplotlib plots: rooflines, memory timelines, serving throughput and validations."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..algebra.symbols import shorten, shown
from ..analysis.memory import Timeline
from ..analysis.roofline import Roofline, RooflineRow
from ..bind.evaluate import need_bound
from ..errors import FormatError
from ..hardware.units import Quantity, format_bytes, format_quantity
from ..plan.serving import Throughput, ThroughputRow

if TYPE_CHECKING:
    from ..torch.validation import Row, Validation

from .figures import COLORS, FAINT, PALETTE, ROOF, framed, new_figure, saved, short, units_on

__all__ = [
    "FREE",
    "Label",
    "place_labels",
    "draw_roofs",
    "range_of",
    "plot_throughput",
    "plot_timeline",
    "plot_peaks",
    "plot_roof",
    "plot_validation",
    "plot_roofline",
]


# -- label placement ---------------------------------------------------------------------------------------------------

#: Text, and its point in data coordinates.
Label = tuple[str, tuple[float, float]]

#: `gid` of lines that labels may overlap.
FREE = "free"
_SIZE = 8.5
_SIDES = tuple((x, y) for x, y in product((-1, 1, 0), (1, -1, 0)) if x or y)
_STEPS = (5, 9, 16, 26, 40, 58, 80, 106, 136)  # distances of a label from its point, in points
_LEADER = 16  # distance in points from which to draw a leader line
_HALO = 2.5  # width in points of the halo around letters on lines
_GAP = 3  # pixels between two labels
# penalties, as numbers of distance steps: label on a line, label on a point, leader line through a label
_ON_LINE, _ON_POINT, _LEADER_OVER_LABEL = 150, 25, 90


def place_labels(ax: Any, labels: Sequence[Label], *, size: float = _SIZE, lead: bool = True) -> list[str]:
    """Place labels near their points without overlaps, in order of priority. Call this after drawing everything else.

    With `lead`, labels away from their point get a thin leader line. Returns the labels omitted for lack of room.
    """
    from matplotlib.patheffects import withStroke

    figure = ax.figure
    figure.draw_without_rendering()  # compute the layout first, for point positions
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    obstacles = _Obstacles(ax, scale, [_box_of(t, renderer) for t in ax.texts if t.get_text()])
    omitted = []
    for text, point in labels:
        label = ax.annotate(
            text, point, (0, 0), textcoords="offset points", ha="center", va="center", fontsize=size, zorder=5,
            annotation_clip=False, in_layout=False, path_effects=[withStroke(linewidth=_HALO, foreground="white")],
        )  # fmt: skip
        x0, y0, x1, y1 = _box_of(label, renderer)
        half, anchor = np.array([x1 - x0, y1 - y0]) / 2, ax.transData.transform(point)
        candidates = [
            (
                step + obstacles.label_penalty(box) + (obstacles.leader_penalty(anchor, middle) if lead else 0),
                step,
                middle,
                box,
            )
            for step, middle, box in _candidates(anchor, half, scale)
            if obstacles.allows(box)
        ]
        if not candidates:
            omitted.append(text)
            label.remove()
            continue
        _, step, middle, box = min(candidates, key=lambda f: f[0])
        obstacles.boxes.append(box)
        label.set_position(tuple((middle - anchor) / scale))
        if lead and step >= _LEADER:
            _draw_leader(ax, point, (middle - anchor) / scale, half / scale)
    return omitted


def _box_of(text: Any, renderer: Any) -> tuple[float, ...]:
    from matplotlib.text import Text

    # without an annotation's arrow
    return tuple(Text.get_window_extent(text, renderer).extents)


def _candidates(anchor: Any, half: Any, scale: float) -> Iterator[tuple[float, Any, tuple[float, ...]]]:
    """Yield distance, center and box of candidate positions around a point; all but the distance in pixels."""
    for step, side in product(_STEPS, _SIDES):
        direction = np.array(side)
        middle = anchor + direction * half + step * scale * direction / np.hypot(*direction)
        yield step, middle, (*(middle - half), *(middle + half))


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] + _GAP and b[0] < a[2] + _GAP and a[1] < b[3] + _GAP and b[1] < a[3] + _GAP


def _draw_leader(ax: Any, point: tuple[float, float], middle: Any, half: Any) -> None:
    """Draw a leader line from a point to the nearest edge of its label."""
    end = np.clip(0, middle - half, middle + half)
    ax.annotate(
        "", point, tuple(end), textcoords="offset points", zorder=2, in_layout=False,
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 2},
    )  # fmt: skip


class _Obstacles:
    """Obstacles for labels: points with their areas, and lines."""

    def __init__(self, ax: Any, scale: float, boxes: list[tuple[float, ...]]) -> None:
        self.frame, self.boxes = ax.bbox.extents, boxes
        self.lines = [
            line.get_transform().transform_path(line.get_path()) for line in ax.lines if line.get_gid() != FREE
        ]
        spots = [(c, c.get_offset_transform().transform(c.get_offsets())) for c in ax.collections if len(c.get_sizes())]
        self.points = np.concatenate([np.empty((0, 2)), *(p for _, p in spots)])
        radii = [np.broadcast_to(np.sqrt(c.get_sizes()) / 2 * scale, len(p)) for c, p in spots]
        self.radii = np.concatenate([np.empty(0), *radii])

    def allows(self, box: Sequence[float]) -> bool:
        """Whether a label is readable there: inside the axes and not on another label."""
        x0, y0, x1, y1 = self.frame
        within = box[0] >= x0 and box[1] >= y0 and box[2] <= x1 and box[3] <= y1
        return bool(within) and not any(_overlap(box, other) for other in self.boxes)

    def leader_penalty(self, anchor: Any, middle: Any) -> float:
        """Return the penalty of a leader line there."""
        from matplotlib.path import Path
        from matplotlib.transforms import Bbox

        line = Path([anchor, middle])
        return float(
            _LEADER_OVER_LABEL * sum(line.intersects_bbox(Bbox.from_extents(*box), filled=False) for box in self.boxes)
        )

    def label_penalty(self, box: Sequence[float]) -> float:
        """Return the penalty of a label there."""
        from matplotlib.transforms import Bbox

        nearest = np.clip(self.points, box[:2], box[2:])
        points = int((np.hypot(*(self.points - nearest).T) < self.radii).sum())
        lines = sum(path.intersects_bbox(Bbox.from_extents(*box), filled=False) for path in self.lines)
        return float(_ON_POINT * points + _ON_LINE * lines)


# -- roofs -------------------------------------------------------------------------------------------------------------

#: Share of the total time whose ops must be visible; other ops may extend the axis by one decade.
_SHARE, _DECADE = 0.99, 10.0


def range_of(points: Sequence[tuple[float, float]], ridge: float) -> tuple[float, float]:
    """Return the intensity range of the axes, from each op's intensity and time.

    Ops that take almost no time do not stretch the axes.
    """
    total, covered, visible = sum(t for _, t in points), 0.0, [x for x in (ridge,) if 0 < x < math.inf]
    for x, seconds in sorted(points, key=lambda p: -p[1]):
        if covered >= _SHARE * total and visible:
            break
        visible.append(x)
        covered += seconds
    visible = visible or [1.0]
    all_x = [x for x, _ in points] + visible
    low, high = max(min(all_x), min(visible) / _DECADE), min(max(all_x), max(visible) * _DECADE)
    widening = max(1.0, (_DECADE**2 * low / high) ** 0.5)  # at least two decades
    return low / widening / 2.5, high * widening * 6  # room for names on the right


def draw_roofs(ax: Any, memory: Quantity, rates: Mapping[str, float], ends: tuple[float, float]) -> list[Label]:
    """Draw the roofs and set the axis limits; return labels with the names of the roofs."""
    bandwidth, (low, high) = float(memory.value), ends
    ranked = sorted(rates.items(), key=lambda item: -item[1])
    top = ranked[0][1]
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=(low * bandwidth / 1.5, 4 * top))
    # the memory slope ends at the highest roof; lower roofs are dashed
    ax.plot([low, top / bandwidth], [low * bandwidth, top], color=ROOF, linewidth=1.6)
    for _, rate in ranked:
        style = "-" if rate == top else "--"
        ax.plot([rate / bandwidth, high], [rate, rate], color=ROOF, linewidth=1.6, linestyle=style)
    middle = math.sqrt(low * min(ranked[-1][1] / bandwidth, high))
    named = [(f"{name}, {format_quantity(rate, 'FLOP/s')}", (high, rate)) for name, rate in ranked]
    return [*named, (f"memory, {memory}", (middle, middle * bandwidth))]


# -- serving throughput ------------------------------------------------------------------------------------------------

_BOUNDS = {"memory": PALETTE["blue"], "compute": PALETTE["vermilion"], "link": PALETTE["green"]}

#: With more sizes than this, label every second, third, ... point.
_MAX_LABELS = 12


def plot_throughput(throughput: Throughput, path: str | os.PathLike[str] | None = None) -> Any:
    """Plot tokens per second against step time, one point per size.

    Points show the estimate, colored by bottleneck, with rings where memory does not suffice. The curve is the lower
    bound of the time.
    """
    figure = new_figure(9, 4.8, path)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log")
    rows = throughput.rows
    bounds = [(r.lower_bound, r.most_tokens_per_second) for r in rows]
    ax.plot(*zip(*bounds, strict=True), color=FAINT, linewidth=1, linestyle="--", label="lower bound of the time")
    ax.plot([r.seconds for r in rows], [r.tokens_per_second for r in rows], color=ROOF, linewidth=1, label="estimate")
    for bound, color in _BOUNDS.items():
        rows_of_bound = [r for r in rows if r.bound == bound]
        _plot_throughput(ax, [r for r in rows_of_bound if r.fits], f"bound by {bound}", face=color, edge=color)
        _plot_throughput(
            ax, [r for r in rows_of_bound if not r.fits], f"bound by {bound}, does not fit", face="white", edge=color
        )
    sizes = " ".join(f"{k}={v}" for k, v in throughput.sizes.items() if k in ("S", "B"))
    title = f"{short(throughput.graph)} on {short(throughput.hardware.name, 60)}{sizes and ', '}{sizes}"
    framed(ax, title, "time of a step [s]", "new tokens of all sequences [1/s]")
    _ticks(ax)
    ax.margins(x=0.12, y=0.1)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    label_step = -(-len(rows) // _MAX_LABELS)
    named = [r for i, r in enumerate(rows) if i % label_step == 0 or i == len(rows) - 1]
    place_labels(ax, [(f"{throughput.symbol}={r.size}", (r.seconds, r.tokens_per_second)) for r in named])
    return saved(figure, path)


def _ticks(ax: Any) -> None:
    """Label ticks with units at 1, 2 and 5 times each power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for axis, unit in ((ax.xaxis, "s"), (ax.yaxis, "1")):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
        units_on(axis, unit)


def _plot_throughput(ax: Any, rows: Sequence[ThroughputRow], label: str, *, face: str, edge: str) -> None:
    if rows:
        ax.scatter(
            [r.seconds for r in rows], [r.tokens_per_second for r in rows], 34, facecolors=face, edgecolors=edge,
            label=label, zorder=3,
        )  # fmt: skip


# -- memory timeline ---------------------------------------------------------------------------------------------------

#: Stacking order: permanent storage at the bottom, temporary storage on top.
_ROLES = {
    "param": PALETTE["blue"], "buffer": FAINT, "cache": PALETTE["sky"], "input": "#bbbbbb",
    "state": PALETTE["purple"], "gradient": PALETTE["green"], "output": PALETTE["yellow"],
    "activation": PALETTE["orange"], "temporary": PALETTE["vermilion"], "workspace": PALETTE["black"],
}  # fmt: skip
_PHASES = {"forward": "#ffffff", "recompute": "#f3e3c3", "backward": "#dfeee0", "optimizer": "#e7e0f1"}

# break the axis if the capacity exceeds this multiple of the peak
_MOST_PEAKS = 2.5
# label phases that cover at least this share of the steps
_LABELLED_SPAN = 0.12


def plot_timeline(
    timeline: Timeline, path: str | os.PathLike[str] | None = None, *, capacity: float | None = None
) -> Any:
    """Plot live bytes over the steps of a program.

    Parameters
    ----------
    timeline : Timeline
        Result of `costgraph.timeline` with all sizes bound.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.
    capacity : float, optional
        Device memory in bytes, drawn as a line. If it is far above the peak, the axis is broken.

    Returns
    -------
    matplotlib.figure.Figure
        Live bytes stacked by role, with one step per allocating op and the peak op marked. Multiple phases have
        background colors.

    Raises
    ------
    BindingError
        If a size is unbound.
    UnsupportedError
        If matplotlib is missing.
    FormatError
        If the file has another extension or cannot be written.
    """
    need_bound([timeline.peak], "plot of a timeline")
    figure = new_figure(10, 4.6, path)
    ax = figure.subplots()
    live = [float(m.bytes) for m in timeline.moments]
    peak_step = max(range(len(live)), key=live.__getitem__)
    # repeat the last value to draw the last step full width
    ax.step(range(len(live) + 1), [*live, live[-1]], where="post", color=ROOF, linewidth=1)
    ax.plot([peak_step], [live[peak_step]], "o", color=PALETTE["vermilion"], zorder=4)
    labels = [
        (
            f"peak, {short(timeline.op) or 'throughout'}\n{format_bytes(timeline.peak)}",
            (float(peak_step), live[peak_step]),
        )
    ]
    _stack_roles(ax, timeline, live)
    _shade_phases(ax, timeline)
    title = f"memory of {short(timeline.graph)}, step by step" if timeline.graph else "memory, step by step"
    framed(ax, title, "step [ops that take memory, in program order]", "live memory [B]")
    if ax.texts:
        ax.set_title(title, pad=18)  # above the phase names
    ax.margins(x=0.02)
    ax.set_ylim(0, 1.45 * live[peak_step] or 1)
    if capacity is not None:
        labels.insert(0, _capacity(ax, capacity, live[peak_step]))
    units_on(ax.yaxis, "B")
    _timeline_legend(ax)
    place_labels(ax, labels)
    return saved(figure, path)


def _capacity(ax: Any, capacity: float, peak: float) -> Label:
    """Draw the capacity line, above an axis break if far above the peak, and return its label."""
    text = f"capacity, {format_bytes(capacity)}"
    if far := capacity > _MOST_PEAKS * peak > 0:
        scale, height = 1.3 * peak, 1.5 * peak
        ax.spines["left"].set_bounds(0, scale)  # no scale above the break
        ax.set_yticks([y for y in ax.get_yticks() if y <= scale])
        style = {"marker": (2, 0, 60), "markersize": 9, "color": ROOF, "linestyle": "none"}
        ax.plot([0, 0], [scale, 1.36 * peak], transform=ax.get_yaxis_transform(), clip_on=False, **style)
        times = float(f"{capacity / peak:.3g}")
        text += f", {times:,.{0 if times >= 100 else 1}f} times the peak"
    else:
        height = capacity
    ax.set_ylim(0, 1.12 * height if far else 1.25 * max(height, peak) or 1)
    ax.axhline(height, color=ROOF, linewidth=1, linestyle="--")
    return text, (ax.get_xlim()[0], height)


def _stack_roles(ax: Any, timeline: Timeline, live: list[float]) -> None:
    """Stack the roles, or draw only the total if they are unknown."""
    steps = range(len(live) + 1)
    below = [0.0] * len(steps)
    for role, color in _ROLES.items():
        role_bytes = [float(v) for v in timeline.roles.get(role, ())]
        if any(role_bytes):
            top = [b + v for b, v in zip(below, [*role_bytes, role_bytes[-1]], strict=True)]
            ax.fill_between(steps, below, top, step="post", color=color, linewidth=0, label=role)
            below = top
    if not timeline.roles:
        ax.fill_between(steps, [*live, live[-1]], step="post", color=PALETTE["sky"])


def _spans(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and phase of each contiguous span."""
    first = 0
    moments = timeline.moments
    for i in range(1, len(moments) + 1):
        if i == len(moments) or moments[i].phase != moments[first].phase:
            yield first, i, moments[first].phase
            first = i


def _shade_phases(ax: Any, timeline: Timeline) -> None:
    """Color the background of each phase, and name phases that are long enough."""
    spans = list(_spans(timeline))
    if len({phase for *_, phase in spans}) < 2:
        return
    wide = [span for span in spans if span[1] - span[0] >= _LABELLED_SPAN * len(timeline.moments)]
    named = {phase for *_, phase in wide}
    for phase_name, color in _PHASES.items():
        phase_spans = [(start, end - start) for start, end, phase in spans if phase == phase_name]
        if phase_spans:
            ax.broken_barh(
                phase_spans, (0, 1), transform=ax.get_xaxis_transform(), facecolors=color, edgecolor=FAINT, linewidth=0,
                zorder=0, label="_above" if phase_name in named else f"phase {phase_name}",
            )  # fmt: skip
    for start, end, phase in wide:
        ax.text((start + end) / 2, 1.01, phase, transform=ax.get_xaxis_transform(), fontsize=8, ha="center")


def _timeline_legend(ax: Any) -> None:
    """Draw the legend beside the axes, in stacking order."""
    handles, labels = ax.get_legend_handles_labels()
    roles = [i for i, label in enumerate(labels) if not label.startswith("phase ")]
    order = [*reversed(roles), *(i for i in range(len(labels)) if i not in roles)]
    if order:
        legend = ax.figure.legend(
            [handles[i] for i in order], [labels[i] for i in order], loc="outside right upper", fontsize=8,
            frameon=False,
        )  # fmt: skip
        for patch in legend.legend_handles:
            patch.set(edgecolor=FAINT, linewidth=0.5)  # the forward phase has the background color


# -- validation --------------------------------------------------------------------------------------------------------

_MODES = {"kernel": PALETTE["vermilion"], "forward": PALETTE["green"], "step": PALETTE["blue"]}
_OUTCOMES = {
    "memory": PALETTE["blue"], "compute": PALETTE["vermilion"], "both": PALETTE["green"], "overhead": FAINT,
    "faster": PALETTE["orange"],
}  # fmt: skip


def plot_validation(validation: Validation, directory: object) -> list[Path]:
    """Write `peaks.png` and `roof.png` to a directory, created if missing.

    Raises UnsupportedError if matplotlib is missing, FormatError if writing fails.
    """
    if not isinstance(directory, str | os.PathLike):
        raise FormatError(f"plot: directory {shown(directory, 80)}, expected a path")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        name = shorten(str(folder), 200)
        raise FormatError(f"plot: {name}: {error.strerror}, expected a writable directory") from None
    plot_peaks(validation, folder / "peaks.png")
    plot_roof(validation, folder / "roof.png")
    return [folder / "peaks.png", folder / "roof.png"]


# -- validation: peak memory -------------------------------------------------------------------------------------------


def plot_peaks(validation: Validation, path: str | os.PathLike[str] | None = None) -> Any:
    """Plot predicted against measured peak bytes, and their relative difference.

    Filled points are declared graphs, rings are traced graphs.
    """
    figure = new_figure(10, 4.6)
    left, right = figure.subplots(1, 2)
    measured = [row.measured.peak for row in validation.rows] or [1]
    ends = (min(measured) / 1.5, max(measured) * 1.5)
    left.plot(ends, ends, color=ROOF, linewidth=1)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    framed(left, "predicted and measured", "measured peak", "predicted peak")
    right.axhline(0, color=ROOF, linewidth=1)
    right.set(xscale="log", xlim=ends)
    framed(right, "difference", "measured peak", "predicted less measured [% of the peak]")
    for mode, color in _MODES.items():
        for kind, face in (("declared", color), ("traced", "none")):
            points = list(_peak_pairs(validation.rows, mode, kind))
            if points:
                x, y = zip(*points, strict=True)
                style = {"edgecolors": color, "facecolors": face, "linewidths": 0.9, "zorder": 3, "alpha": 0.75}
                left.scatter(x, y, 26, label=f"{mode}, {kind}", **style)
                right.scatter(x, [100 * (b - a) / a for a, b in points], 26, **style)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        units_on(axis, "B")
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(f"bytes at the peak, {short(str(validation.environment['name']))}", fontsize=11)
    return saved(figure, path)


def _peak_pairs(rows: Sequence[Row], mode: str, kind: str) -> Iterator[tuple[int, int]]:
    for row in rows:
        prediction = getattr(row, kind)
        if row.case.mode == mode and prediction is not None:
            yield row.measured.peak, prediction.peak


# -- validation: measured roof -----------------------------------------------------------------------------------------


def plot_roof(validation: Validation, path: str | os.PathLike[str] | None = None) -> Any:
    """Plot each op's achieved rate over its intensity, under the measured roofs.

    Colors show the bottleneck. Ops without FLOPs are omitted. The slowest ops are labelled as far as there is room.
    """
    hardware = validation.hardware
    device = hardware.attained() if "attained" in hardware.tables else hardware
    rows = [r for r in validation.rows if r.case.mode == "kernel" and r.modelled.flops and r.modelled.moved]
    figure = new_figure(10, 5.2)
    ax = figure.subplots()
    points = [(r.modelled.flops / r.modelled.moved, r.modelled.flops / r.seconds.min, r) for r in rows]
    rates = {k: float(q.value) for k, q in device.peak.items() if k in {r.case.dtype for r in rows}}
    rates = rates or {k: float(q.value) for k, q in list(device.peak.items())[:1]}
    ends = range_of([(x, r.seconds.min) for x, _, r in points], max(rates.values()) / float(device.bandwidth.value))
    labels = draw_roofs(ax, device.bandwidth, {f"matmul {name}": rate for name, rate in rates.items()}, ends)
    ax.set_ylim(bottom=min([ax.get_ylim()[0], *(y / 2 for _, y, _ in points)]))
    for outcome, color in _OUTCOMES.items():
        outcome_points = [(x, y) for x, y, r in points if r.outcome == outcome]
        if outcome_points:
            ax.scatter(
                *zip(*outcome_points, strict=True),
                34,
                label=outcome,
                color=color,
                alpha=0.8,
                edgecolors="white",
                zorder=3,
            )
    title = f"ops on the measured roof of {short(str(validation.environment['name']))}"
    framed(ax, title, "arithmetic intensity, unfused [FLOP/B]", "rate of the fastest run [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    if points:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False, title="bottleneck", title_fontsize=8)
    place_labels(ax, labels, lead=False)
    # slowest first, because the last labels may find no room
    ranked = sorted(points, key=lambda point: -point[2].seconds.min)
    place_labels(ax, [(short(r.case.subject, 22), (x, y)) for x, y, r in ranked], size=7)
    return saved(figure, path)


# -- roofline ----------------------------------------------------------------------------------------------------------

#: Number of slowest ops to label.
_LABELLED_OPS = 5


def plot_roofline(roofline: Roofline, path: str | os.PathLike[str] | None = None) -> Any:
    """Plot ops on a device's log-log roofline.

    Parameters
    ----------
    roofline : Roofline
        Result of `costgraph.roofline`.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.

    Returns
    -------
    matplotlib.figure.Figure
        A point's area shows its estimated time, its color the kind of FLOPs. Ops without FLOPs or without bytes are not
        plotted, only counted in the legend.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    FormatError
        If the file has another extension or cannot be written.
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
        # at the foot of its line, away from roofs and points
        labels.append((f"ridge point, {format_quantity(roofline.ridge, 'FLOP/B')}", (roofline.ridge, ax.get_ylim()[0])))
    title = f"{short(roofline.graph)} on {short(roofline.hardware.name, 60)}"
    framed(ax, title, "arithmetic intensity, unfused [FLOP/B]", "attainable rate [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    _scatter_ops(ax, drawn)
    _legend(ax, roofline, drawn)
    place_labels(ax, labels, lead=False)
    place_labels(ax, _op_labels(r for r in drawn if low <= r.intensity <= high))
    return saved(figure, path)


def _scatter_ops(ax: Any, rows: Sequence[RooflineRow]) -> None:
    longest = max((r.seconds for r in rows), default=1.0) or 1.0
    for kind, color in COLORS.items():
        rows_of_kind = [r for r in rows if r.kind == kind]
        if rows_of_kind:
            areas = [14 + 360 * r.seconds / longest for r in rows_of_kind]
            ax.scatter(
                [r.intensity for r in rows_of_kind], [r.attainable for r in rows_of_kind], areas, label=kind,
                color=color, alpha=0.65, edgecolors="white", linewidths=0.7, zorder=3,
            )  # fmt: skip


def _legend(ax: Any, roofline: Roofline, rows: Sequence[RooflineRow]) -> None:
    """Draw the legend beside the axes, and count the ops that are not shown."""
    low, high = ax.get_xlim()
    outside = [r for r in rows if not low <= r.intensity <= high]
    lines = ["kind of FLOPs"]
    if rows:
        lines[0] += f"; area is time, up to {format_quantity(max(r.seconds for r in rows), 's')}"
    if omitted := len(roofline.rows) - len(rows):
        lines.append(f"{omitted} op(s) without FLOPs or bytes are not shown")
    if outside:
        share = sum(r.seconds for r in outside) / sum(r.seconds for r in roofline.rows)
        lines.append(f"{len(outside)} op(s) beyond these axes, {share:.1%} of the time")
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        legend = ax.figure.legend(
            handles, labels, loc="outside right upper", fontsize=8, title="\n".join(lines), title_fontsize=8,
            frameon=False, alignment="left",
        )  # fmt: skip
        for handle in legend.legend_handles:
            handle.set_sizes([50])


def _op_labels(rows: Iterable[RooflineRow]) -> list[Label]:
    """Label the slowest ops; overlapping points, such as ops of equal shape, share one label."""
    groups: dict[tuple[float, float], list[RooflineRow]] = {}
    for r in sorted(rows, key=lambda r: -r.seconds):
        groups.setdefault((round(math.log10(r.intensity), 1), round(math.log10(r.attainable), 1)), []).append(r)
    labels = []
    for first, *others in list(groups.values())[:_LABELLED_OPS]:
        note = f"\nand {len(others)} more nearby" if others else ""
        text = f"{short(first.op)}, {format_quantity(first.seconds, 's')}{note}"
        labels.append((text, (first.intensity, first.attainable)))
    return labels
