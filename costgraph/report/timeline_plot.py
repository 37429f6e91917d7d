"""Pictures of timelines: live bytes by role over the steps of a program, and its phases behind them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..analysis.memory import Timeline
from ..bind.evaluate import need_bound
from ..hardware.units import format_bytes
from .drawing import FAINT, PALETTE, ROOF, framed, new_figure, saved, short, units_on
from .labels import Label, place_labels

__all__ = ["plot_timeline"]

#: What is there throughout below, what comes and goes above it.
_ROLES = {
    "param": PALETTE["blue"], "buffer": FAINT, "cache": PALETTE["sky"], "input": "#bbbbbb",
    "state": PALETTE["purple"], "gradient": PALETTE["green"], "output": PALETTE["yellow"],
    "activation": PALETTE["orange"], "temporary": PALETTE["vermilion"], "workspace": PALETTE["black"],
}  # fmt: skip
_PHASES = {"forward": "#ffffff", "recompute": "#f3e3c3", "backward": "#dfeee0", "optimizer": "#e7e0f1"}

# A capacity above so many peaks would press the rest flat.
_MOST_PEAKS = 2.5
# Phases that are so much of all steps are named.
_NAMED = 0.12


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
        Bytes of a device, drawn as a line; where that is far above the peak, the axis is broken below it.

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
    figure = new_figure(10, 4.6, path)
    ax = figure.subplots()
    live = [float(m.bytes) for m in timeline.moments]
    at = max(range(len(live)), key=live.__getitem__)
    # the last step is as wide as the others
    ax.step(range(len(live) + 1), [*live, live[-1]], where="post", color=ROOF, linewidth=1)
    ax.plot([at], [live[at]], "o", color=PALETTE["vermilion"], zorder=4)
    labels = [(f"peak, {short(timeline.op) or 'throughout'}\n{format_bytes(timeline.peak)}", (float(at), live[at]))]
    _roles(ax, timeline, live)
    _phases(ax, timeline)
    title = f"memory of {short(timeline.graph)}, step by step" if timeline.graph else "memory, step by step"
    framed(ax, title, "step [ops that take memory, in program order]", "live memory [B]")
    if ax.texts:
        ax.set_title(title, pad=18)  # above the names of phases
    ax.margins(x=0.02)
    ax.set_ylim(0, 1.45 * live[at] or 1)
    if capacity is not None:
        labels.insert(0, _capacity(ax, capacity, live[at]))
    units_on(ax.yaxis, "B")
    _key(ax)
    place_labels(ax, labels)
    return saved(figure, path)


def _capacity(ax: Any, capacity: float, peak: float) -> Label:
    """Draw the line of a capacity, over a break of the axis where it is far above the peak; return its name."""
    text = f"capacity, {format_bytes(capacity)}"
    if far := capacity > _MOST_PEAKS * peak > 0:
        scale, place = 1.3 * peak, 1.5 * peak
        ax.spines["left"].set_bounds(0, scale)  # above it there is no scale
        ax.set_yticks([y for y in ax.get_yticks() if y <= scale])
        style = {"marker": (2, 0, 60), "markersize": 9, "color": ROOF, "linestyle": "none"}
        ax.plot([0, 0], [scale, 1.36 * peak], transform=ax.get_yaxis_transform(), clip_on=False, **style)
        times = float(f"{capacity / peak:.3g}")
        text += f", {times:,.{0 if times >= 100 else 1}f} times the peak"
    else:
        place = capacity
    ax.set_ylim(0, 1.12 * place if far else 1.25 * max(place, peak) or 1)
    ax.axhline(place, color=ROOF, linewidth=1, linestyle="--")
    return text, (ax.get_xlim()[0], place)


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
        ax.fill_between(steps, [*live, live[-1]], step="post", color=PALETTE["sky"])


def _spans(timeline: Timeline) -> Iterator[tuple[int, int, str]]:
    """Yield where a phase begins and ends, as often as it comes."""
    first = 0
    moments = timeline.moments
    for i in range(1, len(moments) + 1):
        if i == len(moments) or moments[i].phase != moments[first].phase:
            yield first, i, moments[first].phase
            first = i


def _phases(ax: Any, timeline: Timeline) -> None:
    """Color what is behind each phase, and name it above if it is long enough for that."""
    spans = list(_spans(timeline))
    if len({phase for *_, phase in spans}) < 2:
        return
    wide = [span for span in spans if span[1] - span[0] >= _NAMED * len(timeline.moments)]
    named = {phase for *_, phase in wide}
    for wanted, color in _PHASES.items():
        own = [(start, end - start) for start, end, phase in spans if phase == wanted]
        if own:
            ax.broken_barh(
                own, (0, 1), transform=ax.get_xaxis_transform(), facecolors=color, edgecolor=FAINT, linewidth=0,
                zorder=0, label="_above" if wanted in named else f"phase {wanted}",
            )  # fmt: skip
    for start, end, phase in wide:
        ax.text((start + end) / 2, 1.01, phase, transform=ax.get_xaxis_transform(), fontsize=8, ha="center")


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
