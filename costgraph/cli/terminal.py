"""Where the command line writes: the standard output, files and pictures."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..algebra.symbols import printable
from ..errors import FormatError
from ..graph.graph import Graph
from ..notation.progress import hush
from ..report.drawing import check_path
from ..report.grids import WIDTH
from ..text_file import write_file

if TYPE_CHECKING:
    from ..report.collect import Report

__all__ = ["check_files", "draw_report", "say", "screen", "write_files"]


def say(lines: str, *, styled: bool = False) -> None:
    """Write lines to the standard output: of control characters only those of styles, where `text.draw` set them.

    What the output's encoding lacks becomes a question mark, and a rule a row of hyphens.
    """
    lines = lines if styled else printable(lines)
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        lines = lines.replace("\u2500", "-").encode(encoding, "replace").decode(encoding)
    hush()
    sys.stdout.write(lines + "\n")


def screen() -> tuple[int, bool]:
    """Return the columns of the output, and whether it shows colors."""
    terminal = sys.stdout.isatty()
    # 80 where nobody says otherwise: a pipe has no width
    width = shutil.get_terminal_size().columns if terminal or "COLUMNS" in os.environ else WIDTH
    return max(width, 40), terminal and "NO_COLOR" not in os.environ


def check_files(json: str | None, csv: str | None, *plots: str | None) -> None:
    """Refuse what cannot be written before anything is derived."""
    if json == csv == "-":
        raise FormatError("--json - and --csv -: the standard output takes one of them, expected a file for the other")
    for path in plots:
        if path is not None:
            check_path(path)


def write_files(*files: tuple[str | None, Callable[[], str]]) -> bool:
    """Write what functions return to their files, if any; a hyphen is the standard output: whether one took that."""
    for path, content in files:
        if path == "-":
            # JSON leaves this one as it is, and has one way to escape it
            say(content().removesuffix("\n").replace("\x7f", "\\u007f"))
        elif path is not None:
            write_file(path, content())
    return any(path == "-" for path, _ in files)


def draw_report(
    graph: Graph, found: Report, dims: Mapping[str, Any], plot: str | None, memory_plot: str | None
) -> None:
    """Draw the pictures that were asked for."""
    if plot is not None:
        found.plot(plot)
    if memory_plot is not None:
        from ..analysis.memory import timeline
        from ..report.timeline_plot import plot_timeline

        room = None if found.hardware is None else float(found.hardware.capacity().value)
        arch = found.peak.arch
        line = timeline(graph, device=None if arch is None else "cuda", arch=arch, **dims)
        plot_timeline(line, memory_plot, capacity=room)
