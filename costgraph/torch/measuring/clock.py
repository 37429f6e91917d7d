"""How long a call takes: repeated until a budget is spent, with the spread of the runs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch

from ...algebra.symbols import shown
from ...errors import BindingError
from ...hardware.units import format_quantity
from ...notation.records import Size, at_least

__all__ = ["NOISY", "Times", "collector_off", "synchronize", "timed"]

NOISY = 0.1
"""A spread above this is said to be noisy: half of the runs then lie further apart than a tenth of the median."""


Seconds = Annotated[float, at_least(1e-12, float)]
"""No run takes less."""


@dataclass(frozen=True)
class Times:
    """How long the runs of one call took.

    Examples
    --------
    >>> times = Times.of([1.0, 1.0, 1.0, 1.5, 3.0])
    >>> times.median, times.lower, times.upper, times.spread, times.noisy
    (1.0, 1.0, 1.5, 0.5, True)
    >>> print(times)
    1 s (median of 5 runs from 1 s to 3 s, spread 50%: noisy)
    """

    median: Seconds
    """s"""
    min: Seconds
    """s"""
    max: Seconds
    """s"""
    lower: Seconds
    """first quartile, s"""
    upper: Seconds
    """third quartile, s"""
    runs: Size
    """how many runs there were"""

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Return the summary of the seconds of each run, one at least."""
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
        return cls(median, min(seconds), max(seconds), lower, upper, len(seconds))

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a part of the median."""
        return (self.upper - self.lower) / self.median if self.median else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the spread is above `NOISY`, or was not seen for want of runs."""
        return self.runs < 3 or self.spread > NOISY

    def record(self) -> dict[str, float | int | bool]:
        """Return the figures by name in seconds, and the spread, as JSON takes them."""
        return asdict(self) | {"spread": self.spread, "noisy": self.noisy}

    def __str__(self) -> str:
        low, middle, high = (format_quantity(s, "s") for s in (self.min, self.median, self.max))
        if self.runs == 1:
            return f"{middle} (a single run: noisy)"
        noisy = ": noisy" if self.noisy else ""
        return f"{middle} (median of {self.runs} runs from {low} to {high}, spread {self.spread:.0%}{noisy})"


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's collector of cycles from running, which would free tensors at times of its own."""
    if not gc.isenabled():  # an outer one has collected, which takes longer than most of what is timed
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], device: torch.device, least: int = 5, most: int = 100, budget: float = 0.5) -> Times:
    """Return how long a call takes, warmed up by one run that is not counted.

    On CUDA the time between two events around the call: a short kernel shows the time that its launch takes. What
    the call returns is freed after the clock has stopped.

    Parameters
    ----------
    call : callable
        Takes nothing; can be repeated.
    device : torch.device
        Where its ops run.
    least, most : int
        Fewest and most runs.
    budget : float
        Seconds after which no run starts, once there were the fewest.

    Raises
    ------
    BindingError
        If a number of runs is no positive integer, or the budget is negative.

    Examples
    --------
    >>> timed(lambda: torch.ones(3) + 1, torch.device("cpu"), least=7, budget=0).runs
    7
    """
    for name, runs in (("least", least), ("most", most)):
        if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
            raise BindingError(f"{name}={shown(runs)}: expected a positive number of runs")
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
        raise BindingError(f"budget={shown(budget)}: expected seconds, zero or more")
    once = _events if device.type == "cuda" else _clock
    call()
    synchronize(device)
    seconds: list[float] = []
    with collector_off():
        start = time.perf_counter()
        while len(seconds) < least or (len(seconds) < most and time.perf_counter() - start < budget):
            seconds.append(once(call, device))
    return Times.of(seconds)


def _clock(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    kept = call()
    end = time.perf_counter()
    del kept
    return end - start


def _events(call: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        kept = call()
        end.record()
        end.synchronize()
    del kept
    return float(start.elapsed_time(end)) / 1e3
