"""Output of commands: standard output, files and plots."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..algebra.symbols import printable
from ..errors import FormatError
from ..ir.graph import Graph
from ..notation.progress import hush
from ..report.figures import check_path
from ..report.rich_tables import WIDTH
from ..text_file import write_file

if TYPE_CHECKING:
    from ..report.collect import Report

__all__ = ["check_files", "draw_report", "say", "screen", "write_files"]


def say(lines: str, *, styled: bool = False) -> None:
    """Write lines to standard output, without control characters except the styles of `text.draw`.

    Characters that the encoding lacks become question marks, and rules become hyphens.
    """
    lines = lines if styled else printable(lines)
    encoding = sys.stdout.encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        lines = lines.replace("\u2500", "-").encode(encoding, "replace").decode(encoding)
    hush()
    sys.stdout.write(lines + "\n")


def screen() -> tuple[int, bool]:
    """Return the width of the output, and whether it supports colors."""
    terminal = sys.stdout.isatty()
    # a pipe has no width: use the default unless COLUMNS is set
    width = shutil.get_terminal_size().columns if terminal or "COLUMNS" in os.environ else WIDTH
    return max(width, 40), terminal and "NO_COLOR" not in os.environ


def check_files(json: str | None, csv: str | None, *plots: str | None) -> None:
    """Raise an error for files that cannot be written, before any computation."""
    if json == csv == "-":
        raise FormatError("--json - and --csv -: both write to standard output, expected a file for one of them")
    for path in plots:
        if path is not None:
            check_path(path)


def write_files(*files: tuple[str | None, Callable[[], str]]) -> bool:
    """Write each file; `-` is standard output. Return whether standard output was used."""
    for path, content in files:
        if path == "-":
            # DEL is valid in JSON, but `say` would strip it
            say(content().removesuffix("\n").replace("\x7f", "\\u007f"))
        elif path is not None:
            write_file(path, content())
    return any(path == "-" for path, _ in files)


def draw_report(
    graph: Graph, report: Report, dims: Mapping[str, Any], plot: str | None, memory_plot: str | None
) -> None:
    """Draw the requested plots."""
    if plot is not None:
        report.plot(plot)
    if memory_plot is not None:
        from ..analysis.memory import timeline
        from ..report.plots import plot_timeline

        capacity = None if report.hardware is None else float(report.hardware.capacity().value)
        arch = report.peak.arch
        memory = timeline(graph, device=None if arch is None else "cuda", arch=arch, **dims)
        plot_timeline(memory, memory_plot, capacity=capacity)
