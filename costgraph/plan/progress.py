"""A line on the terminal that says how far long work is: on the standard error, and gone afterwards."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Step", "progressing"]

#: Called before each part, with its name.
Step = Callable[[str], None]


@contextmanager
def progressing(label: str, parts: int, show: bool | None = None) -> Iterator[Step]:
    """Show how many parts of some work are done; the value is called with the name of each before it starts.

    Parameters
    ----------
    label : str
        What the work is.
    parts : int
        How many parts it has.
    show : bool, optional
        Whether anything is shown; by default where the standard error is a terminal.

    Examples
    --------
    >>> with progressing("measure", 2, show=False) as step:
    ...     step("time")
    ...     step("peak")
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda text: None
    elif importlib.util.find_spec("rich") is None:
        yield from _plain(label, parts)
    else:
        yield from _bar(label, parts)


def _plain(label: str, parts: int) -> Iterator[Step]:
    done = width = 0

    def step(text: str) -> None:
        nonlocal done, width
        done += 1
        line = f"{label} {done}/{parts}: {text}"
        sys.stderr.write("\r" + line.ljust(width))
        sys.stderr.flush()
        width = max(width, len(line))

    try:
        yield step
    finally:
        sys.stderr.write("\r" + " " * width + "\r")


def _bar(label: str, parts: int) -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # what is measured may print square brackets of its own in its name
    texts = TextColumn("{task.description}", markup=False)
    columns = (texts, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=parts)
        done = -1  # the part that is named has not been done yet

        def step(text: str) -> None:
            nonlocal done
            done += 1
            # drawn now and not by a thread, which would run while something is timed
            bar.update(task, description=f"{label}: {text}", completed=done, refresh=True)

        yield step
