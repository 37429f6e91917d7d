"""Pictures of a validation: predicted against measured peaks, and ops on the measured roof."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algebra.symbols import shorten, shown
from ..errors import FormatError
from .drawing import FAINT, PALETTE, ROOF, framed, new_figure, saved, short, units_on
from .labels import place_labels
from .roofs import draw_roofs, range_of

if TYPE_CHECKING:
    from ..torch.validating import Row, Validation

__all__ = ["plot_peaks", "plot_roof", "plot_validation"]

_MODES = {"kernel": PALETTE["vermilion"], "forward": PALETTE["green"], "step": PALETTE["blue"]}
_OUTCOMES = {
    "memory": PALETTE["blue"], "compute": PALETTE["vermilion"], "both": PALETTE["green"], "overhead": FAINT,
    "faster": PALETTE["orange"],
}  # fmt: skip


def plot_validation(validation: Validation, directory: object) -> list[Path]:
    """Draw `peaks.png` and `roof.png` in a directory, which is made if it is not there.

    UnsupportedError if matplotlib is missing; FormatError if the files cannot be written.
    """
    if not isinstance(directory, str | os.PathLike):
        raise FormatError(f"plot: directory {shown(directory, 80)}, expected a path")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        place = shorten(str(folder), 200)
        raise FormatError(f"plot: {place}: {error.strerror}, expected a directory that can be written") from None
    plot_peaks(validation, folder / "peaks.png")
    plot_roof(validation, folder / "roof.png")
    return [folder / "peaks.png", folder / "roof.png"]


# -- peaks ---------------------------------------------------------------------------------------------------------


def plot_peaks(validation: Validation, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw predicted against measured bytes at the peak, and by how much they differ.

    Filled points are of declared graphs, rings of traced ones.
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
    framed(right, "what is between them", "measured peak", "predicted less measured [% of the peak]")
    for mode, color in _MODES.items():
        for which, face in (("declared", color), ("traced", "none")):
            points = list(_points(validation.rows, mode, which))
            if points:
                x, y = zip(*points, strict=True)
                style = {"edgecolors": color, "facecolors": face, "linewidths": 0.9, "zorder": 3, "alpha": 0.75}
                left.scatter(x, y, 26, label=f"{mode}, {which}", **style)
                right.scatter(x, [100 * (b - a) / a for a, b in points], 26, **style)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        units_on(axis, "B")
    left.legend(fontsize=8, frameon=False)
    figure.suptitle(f"bytes at the peak, {short(str(validation.environment['name']))}", fontsize=11)
    return saved(figure, path)


def _points(rows: Sequence[Row], mode: str, which: str) -> Iterator[tuple[int, int]]:
    for row in rows:
        found = getattr(row, which)
        if row.case.mode == mode and found is not None:
            yield row.measured.peak, found.peak


# -- the measured roof ---------------------------------------------------------------------------------------------


def plot_roof(validation: Validation, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw the rate that each op reached over its intensity, under the roofs that were measured.

    Color is by what the time follows; ops without FLOPs have no place on these axes. Ops are named as far as there is
    room, those that take longest first.
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
        own = [(x, y) for x, y, r in points if r.outcome == outcome]
        if own:
            ax.scatter(*zip(*own, strict=True), 34, label=outcome, color=color, alpha=0.8, edgecolors="white", zorder=3)
    title = f"ops on the measured roof of {short(str(validation.environment['name']))}"
    framed(ax, title, "arithmetic intensity, as declared [FLOP/B]", "rate of the fastest run [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    if points:
        figure.legend(loc="outside right upper", fontsize=8, frameon=False, title="the time follows", title_fontsize=8)
    place_labels(ax, labels, lead=False)
    # those that take longest first: the last ones find no room
    ranked = sorted(points, key=lambda point: -point[2].seconds.min)
    place_labels(ax, [(short(r.case.subject, 22), (x, y)) for x, y, r in ranked], size=7)
    return saved(figure, path)
