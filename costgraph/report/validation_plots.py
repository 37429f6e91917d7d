"""Pictures of a validation: predicted against measured peaks, and ops on the measured roof."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..algebra.symbols import shorten, shown
from ..errors import FormatError
from ..hardware.units import format_quantity
from .drawing import COLORS, FAINT, ROOF, new_figure, note, saved, short, units_on

if TYPE_CHECKING:
    from ..hardware.specs import Hardware
    from ..torch.validating import Row, Validation

__all__ = ["plot_peaks", "plot_roof", "plot_validation"]

_MODES = {"kernel": COLORS["pointwise"], "forward": COLORS["transcendental"], "step": COLORS["matmul"]}
_OUTCOMES = {
    "memory": COLORS["matmul"], "compute": COLORS["pointwise"], "both": COLORS["transcendental"],
    "overhead": COLORS["data"], "faster": "#b5a642",
}  # fmt: skip


def plot_validation(validation: Validation, directory: object) -> list[Path]:
    """Draw `peaks.png` and `roof.png` in a directory, which is made if it is not there.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    FormatError
        If the files cannot be written.
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

    Parameters
    ----------
    validation : Validation
        What was measured.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.

    Returns
    -------
    matplotlib.figure.Figure
        Filled points are of declared graphs, rings of traced ones.
    """
    figure = new_figure(10, 4.6)
    left, right = figure.subplots(1, 2)
    measured = [row.measured.peak for row in validation.rows] or [1]
    ends = (min(measured) / 1.5, max(measured) * 1.5)
    left.plot(ends, ends, color=ROOF, linewidth=1)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured peak", ylabel="predicted peak")
    right.axhline(0, color=ROOF, linewidth=1)
    right.set(xscale="log", xlim=ends, xlabel="measured peak", ylabel="predicted less measured [% of the peak]")
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
    for ax in (left, right):
        ax.grid(which="major", color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
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

    Parameters
    ----------
    validation : Validation
        What was measured.
    path : str or path-like, optional
        File to write: .png, .svg or .pdf.

    Returns
    -------
    matplotlib.figure.Figure
        Color by what the time follows; ops without FLOPs have no place on these axes.
    """
    hardware = validation.hardware
    device = hardware.attained() if "attained" in hardware.tables else hardware
    rows = [r for r in validation.rows if r.case.mode == "kernel" and r.modelled.flops and r.modelled.moved]
    figure = new_figure(10, 5.2)
    ax = figure.subplots()
    points = [(r.modelled.flops / r.modelled.moved, r.modelled.flops / r.seconds.min, r) for r in rows]
    _roofs(ax, device, points)
    for outcome, color in _OUTCOMES.items():
        own = [(x, y) for x, y, r in points if r.outcome == outcome]
        if own:
            ax.scatter(*zip(*own, strict=True), 34, label=outcome, color=color, alpha=0.8, edgecolors="white", zorder=3)
    for x, y, r in points:
        ax.annotate(short(r.case.subject, 22), (x, y), (4, -6), textcoords="offset points", fontsize=5, color=FAINT)
    ax.set(xlabel="arithmetic intensity, as declared [FLOP/B]", ylabel="rate of the fastest run [FLOP/s]")
    units_on(ax.yaxis, "FLOP/s")
    ax.grid(which="major", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    if points:
        ax.legend(fontsize=8, frameon=False, title="the time follows", title_fontsize=8)
    ax.set_title(f"ops on the measured roof of {short(str(validation.environment['name']))}", fontsize=11)
    return saved(figure, path)


def _roofs(ax: Any, device: Hardware, points: Sequence[tuple[float, float, Row]]) -> None:
    """Draw the slope of the memory, and a roof for each format that a point has."""
    bandwidth, formats = float(device.bandwidth.value), {r.case.dtype for _, _, r in points}
    rates = {k: float(q.value) for k, q in device.peak.items() if k in formats}
    rates = rates or {k: float(q.value) for k, q in list(device.peak.items())[:1]}
    ridge = max(rates.values()) / bandwidth
    low = min([x for x, _, _ in points] + [ridge]) / 2
    high = max([x for x, _, _ in points] + [ridge]) * 3
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    ax.plot([low, ridge], [low * bandwidth, ridge * bandwidth], color=ROOF, linewidth=1.6)
    for name, rate in rates.items():
        ax.plot([rate / bandwidth, high], [rate, rate], color=ROOF, linewidth=1.2)
        note(ax, f"matmul {name}, {format_quantity(rate, 'FLOP/s')}", (high, rate), (-5, 4), "right")
    middle = math.sqrt(low * ridge)
    note(ax, f"memory, {device.bandwidth}", (middle, middle * bandwidth), (-9, 4), "right")
