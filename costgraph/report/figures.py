"""Shared style of all plots. matplotlib is imported inside functions, and its global state is not touched."""

from __future__ import annotations

import os
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from ..algebra.symbols import shorten, shown
from ..errors import FormatError, UnsupportedError
from ..hardware.units import format_quantity
from ..text_file import place_of, write_file

__all__ = [
    "COLORS",
    "FAINT",
    "PALETTE",
    "PALE",
    "ROOF",
    "check_path",
    "framed",
    "new_figure",
    "saved",
    "short",
    "units_on",
]


_ENDINGS = (".png", ".svg", ".pdf")
#: Color-blind safe palette (Okabe and Ito 2008).
PALETTE = {
    "blue": "#0072b2", "vermilion": "#d55e00", "green": "#009e73", "purple": "#cc79a7", "orange": "#e69f00",
    "sky": "#56b4e9", "yellow": "#f0e442", "black": "#000000",
}  # fmt: skip
ROOF, FAINT, PALE = "#222222", "#7a7a7a", "#dddddd"
#: By FLOP kind.
COLORS = {
    "matmul": PALETTE["blue"], "pointwise": PALETTE["vermilion"], "transcendental": PALETTE["green"],
    "data": PALETTE["purple"],
}  # fmt: skip


def new_figure(width: float, height: float, path: object = None) -> Any:
    """Check the path, then return an empty figure (size in inches) without pyplot's global state."""
    if path is not None:
        check_path(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError('plot: matplotlib is not installed: pip install "costgraph[plot]"') from None
    figure: Any = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure._repr_png_ = partial(_png, figure)  # notebooks display only pyplot figures by themselves
    return figure


def _png(figure: Any) -> bytes:
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def check_path(path: object) -> None:
    """Raise FormatError if a plot cannot be written to this path."""
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"plot: path {shown(path, 80)}, expected a string or a path")
    if Path(path).suffix.lower() not in _ENDINGS:
        raise FormatError(f"plot: {shorten(os.fspath(path), 200)}, expected a file ending in {', '.join(_ENDINGS)}")


def saved(figure: Any, path: str | os.PathLike[str] | None) -> Any:
    """Write the figure to a file if given, and return it."""
    if path is None:
        return figure
    picture = BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:].lower())
    write_file(path, picture.getvalue(), f"plot: {place_of(path)}")
    return figure


def short(text: str, most: int = 34) -> str:
    """Escape a name for matplotlib, without math mode, and truncate it on the left."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return (text if len(text) <= most else "..." + text[3 - most :]).replace("$", r"\$")


def units_on(axis: Any, unit: str) -> None:
    """Format the ticks of an axis with a unit."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(float(value), unit)))


def framed(ax: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Apply title, axis labels, frame and grid."""
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(which="major", color=PALE, linewidth=0.6)
    ax.set_axisbelow(True)
