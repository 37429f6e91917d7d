"""Show published measurements against predictions, as text and as a plot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...algebra.symbols import shorten, shown
from ...errors import FormatError
from ..figures import FAINT, PALETTE, ROOF, framed, new_figure, saved, short
from ..rich_tables import clean, draw, grid, listing, texts
from .fitting import Calibrated
from .predictions import Held

__all__ = [
    "render_calibrated",
    "render_held",
    "plot_held",
    "plot_times",
]


# -- text --------------------------------------------------------------------------------------------------------------

_LONGEST_REASON = 200


def render_held(held: Held, width: int | None = None, *, color: bool = False) -> str:
    """Return ratios by family and device, reasons for missing predictions, and limits as text, as in `draw`."""
    title = f"{clean(held.name)}: {len(held.records):,} records, measured over estimated times"
    parts = [listing(title, held._columns(), held.rows, whole=("family", "device"))]
    if held.reasons:
        rows = [(f"{n:,} of {clean(family)}", clean(why, _LONGEST_REASON)) for (family, why), n in held.reasons.items()]
        parts += [grid([("not predicted", ""), *rows])]
    parts += [grid([("holds" if limit.holds else "fails", clean(str(limit), 400)) for limit in held.limits])]
    return draw(parts, {}, width, color=color)


def render_calibrated(found: Calibrated, width: int | None = None, *, color: bool = False) -> str:
    """Return the accuracy of a calibrated model by family as text; `width` and `color` as in `draw`."""
    figures = found.model.figures
    left = sum(found.unpredicted.values())
    if figures is None:
        return draw([f"{clean(found.model.records)}: fitted, {left:,} records have no time"], {}, width, color=color)
    heads = ("fitted", "folds", "shapes", "devices")
    rows = [*figures.families.items(), ("all", (figures.rows, *(getattr(figures, head) for head in heads)))]
    cells = [(name, f"{n:,.0f}", *(f"{share:.1%}" for share in shares)) for name, (n, *shares) in rows]
    title = f"{clean(found.model.records)}: share of measurements that are within 25% of the calibrated time"
    columns = texts("family", "records", *heads, amounts=("records", *heads))
    legend = grid([
        ("fitted", "all are fitted"), ("folds", "a tenth is left out, and predicted"),
        ("shapes", "all of a tenth of the shapes and models are"), ("devices", "all of a device are"),
        ("no time", f"{left:,} records"),
    ])  # fmt: skip
    return draw([listing(title, columns, cells, whole=("family",)), legend], {}, width, color=color)


# -- plot --------------------------------------------------------------------------------------------------------------

#: More families reuse the colors with another marker.
_COLORS = (*(PALETTE[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky")), FAINT)
_MARKS = ("o", "s", "^", "D")


def plot_held(held: Held, directory: str | os.PathLike[str]) -> list[Path]:
    """Write `times.png` to a directory, created if missing.

    Raises UnsupportedError if matplotlib is missing, FormatError if writing fails.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        place = shorten(str(folder), 200)
        raise FormatError(f"plot: {place}: {shown(str(error))}, expected a directory that can be written") from None
    plot_times(held, folder / "times.png")
    return [folder / "times.png"]


def plot_times(held: Held, path: str | os.PathLike[str] | None = None) -> Any:
    """Plot measured against estimated times on log axes, one color per family.

    The solid line is exact agreement, the dashed lines are a factor of 2. The file is a .png, .svg or .pdf.
    """
    figure = new_figure(7.5, 6.5)
    axes = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in held.records:
        if row.seconds is not None and row.estimate:
            points.setdefault(row.record.family, []).append((row.estimate, row.seconds))
    ends = [x for found in points.values() for pair in found for x in pair] or [1.0]
    line = (min(ends) / 2, max(ends) * 2)
    for factor, style in ((1, "-"), (2, "--"), (0.5, "--")):
        axes.plot(line, [factor * x for x in line], color=ROOF, linewidth=0.8, linestyle=style)
    for i, (name, found) in enumerate(points.items()):
        color, mark = _COLORS[i % len(_COLORS)], _MARKS[i // len(_COLORS) % len(_MARKS)]
        axes.scatter(*zip(*found, strict=True), s=9, color=color, marker=mark, alpha=0.6, linewidths=0,
                     label=short(name))  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line)
    framed(axes, "published times and estimates", "estimate [s]", "measured [s]")
    if points:
        axes.legend(fontsize=7, loc="upper left")
    return saved(figure, path)
