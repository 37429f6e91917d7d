"""Progress display on standard error for long-running work."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from time import monotonic

__all__ = ["Step", "hush", "progressing", "waiting"]

#: Called before each part with its name.
Step = Callable[[str], None]
#: Seconds until elapsed time is shown, and between updates.
_AFTER, _EVERY = 1.0, 0.2


class _Clock:
    """Background thread that shows the elapsed seconds until other output appears."""

    def __init__(self, label: str) -> None:
        self.label, self.width = label, 0
        self.over, self.lock, self.start = Event(), Lock(), monotonic()

    def run(self) -> None:
        wait = _AFTER
        while not self.over.wait(wait):
            line, wait = f"{self.label}: {monotonic() - self.start:.0f} s", _EVERY
            with self.lock:
                if not self.over.is_set():
                    self.width = max(self.width, len(line))
                    sys.stderr.write("\r" + line)
                    sys.stderr.flush()

    def stop(self) -> None:
        with self.lock:
            if not self.over.is_set() and self.width:
                sys.stderr.write("\r" + " " * self.width + "\r")
                sys.stderr.flush()
            self.over.set()


_CLOCKS: list[_Clock] = []


@contextmanager
def waiting(label: str, show: bool | None = None) -> Iterator[None]:
    """Show the elapsed time of work that takes longer than a second, until it ends or other output appears.

    By default it is shown only if standard error is a terminal.
    """
    if not (_on_terminal() if show is None else show):
        yield
        return
    clock = _Clock(label)
    _CLOCKS.append(clock)
    Thread(target=clock.run, daemon=True).start()
    try:
        yield
    finally:
        clock.stop()
        _CLOCKS.remove(clock)


def hush() -> None:
    """Clear the line of `waiting` before other output."""
    for clock in _CLOCKS:
        clock.stop()


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progressing(label: str, parts: int, show: bool | None = None) -> Iterator[Step]:
    """Show how many parts are done; call the yielded function with each part's name before it starts.

    Parameters
    ----------
    label : str
        Description of the work.
    parts : int
        Number of parts.
    show : bool, optional
        Whether to show progress; by default if standard error is a terminal.

    Examples
    --------
    >>> with progressing("measure", 2, show=False) as step:
    ...     step("time")
    ...     step("peak")
    """
    if not (_on_terminal() if show is None else show):
        yield lambda text: None
        return
    hush()
    if importlib.util.find_spec("rich") is None:
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

    # names may contain square brackets
    texts = TextColumn("{task.description}", markup=False)
    columns = (texts, BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=parts)
        done = -1  # the named part is still running

        def step(text: str) -> None:
            nonlocal done
            done += 1
            # drawn synchronously: a thread would disturb timing measurements
            bar.update(task, description=f"{label}: {text}", completed=done, refresh=True)

        yield step
