"""Pictures of timelines: live bytes by role over the steps of a program, and its phases behind them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..analysis.memory import Timeline
from ..bind.evaluate import need_bound
from ..hardware.units import format_bytes
from .drawing import COLORS, FAINT, ROOF, check_path, new_figure, note, saved, short, units_on

__all__ = ["plot_timeline"]

#: What is there throughout below, what comes and goes above it.
_ROLES = {
    "param": "#1f5aa6", "buffer": "#5b7fb0", "cache": "#7b97bd", "input": "#9db3d1", "state": "#6a4c93",
    "gradient": "#2c8a57", "output": "#8fb996", "activation": "#e0a030", "temporary": "#c2571a", "workspace": "#7a7a7a",
}  # fmt: skip
_PHASES = {"forward": "#ffffff", "recompute": "#f3e3c3", "backward": "#dfeee0", "optimizer": "#e7e0f1"}

# More changes of phase than these would be a hatching of lines and names.
_MOST_NAMED = 6


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
        One step for each op at which memory is taken, bytes stacked by role, the peak marked with its op; with
        several phases, each has a color behind.

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
    figure = new_figure(10, 4.6)
    ax = figure.subplots()
    live = [float(m.bytes) for m in timeline.moments]
    at = max(range(len(live)), key=live.__getitem__)
    # the last step is as wide as the others
    ax.step(range(len(live) + 1), [*live, live[-1]], where="post", color=ROOF, linewidth=1)
    ax.plot([at], [live[at]], "o", color=COLORS["pointwise"], zorder=4)
    name = short(timeline.op) or "throughout"
    late = at > len(live) / 2
    text = f"peak, {name}\n{format_bytes(timeline.peak)}"
    note(ax, text, (at, live[at]), (-8 if late else 8, 8), "right" if late else "left")
    if capacity is not None:
        ax.axhline(capacity, color=ROOF, linewidth=1, linestyle="--")
        note(ax, f"capacity, {format_bytes(capacity)}", (0, capacity), (2, 4), "left")
    _roles(ax, timeline, live)
    _phases(ax, timeline)
    ax.set(xlabel="step [ops that take memory, in program order]", ylabel="live memory [B]")
    ax.margins(x=0.02)
    ax.set_ylim(0, 1.25 * max(live[at], capacity or 0) or 1)
    units_on(ax.yaxis, "B")
    _key(ax)
    return saved(figure, path)


def _roles(ax: Any, timeline: Timeline, live: list[float]) -> None:
    """Stack the roles; the whole alone where they are not known."""
    steps = range(len(live) + 1)
    below = [0.0] * len(steps)
    for role, color in _ROLES.items():
        own = [float(v) for v in timeline.roles.get(role, ())]
        if any(own):
            top = [b + v for b, v in zip(below, [*own, own[-1]], strict=True)]
            ax.fill_between(steps, below, top, step="post", color=color, linewidth=0, label=role)
            below = top
    if not timeline.roles:
        ax.fill_between(steps, [*live, live[-1]], step="post", color="#cfe0f3")


def _spans(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield where a phase begins and ends, as often as it comes."""
    first = 0
    moments = timeline.moments
    for i in range(1, len(moments) + 1):
        if i == len(moments) or moments[i].phase != moments[first].phase:
            yield first, i, moments[first].phase
            first = i


def _phases(ax: Any, timeline: Timeline) -> None:
    """Color what is behind each phase, and name it where it begins if that does not happen often."""
    spans = list(_spans(timeline))
    if len({phase for *_, phase in spans}) < 2:
        return
    for wanted, color in _PHASES.items():
        own = [(start, end - start) for start, end, phase in spans if phase == wanted]
        if own:
            ax.broken_barh(
                own, (0, 1), transform=ax.get_xaxis_transform(), facecolors=color, edgecolor=FAINT, linewidth=0,
                zorder=0, label=f"phase {wanted}",
            )  # fmt: skip
    for start, _, phase in spans if len(spans) <= _MOST_NAMED else ():
        ax.axvline(start, color=FAINT, linewidth=0.8, linestyle=":")
        ax.annotate(
            phase, (start, 0.96), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=8,
            color="#555555", va="top",
        )  # fmt: skip


def _key(ax: Any) -> None:
    """Explain the colors beside the axes, the uppermost role first."""
    handles, labels = ax.get_legend_handles_labels()
    roles = [i for i, label in enumerate(labels) if not label.startswith("phase ")]
    order = [*reversed(roles), *(i for i in range(len(labels)) if i not in roles)]
    if order:
        legend = ax.figure.legend(
            [handles[i] for i in order], [labels[i] for i in order], loc="outside right upper", fontsize=8,
            frameon=False,
        )  # fmt: skip
        for patch in legend.legend_handles:
            patch.set(edgecolor=FAINT, linewidth=0.5)  # the forward pass has the color of paper
