"""One call, measured: its time, its matmul FLOPs, and its peak bytes."""

from __future__ import annotations

import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..algebra.symbols import shown
from ..errors import BindingError, UnsupportedError
from ..hardware.units import format_bytes, format_quantity
from ..notation.progress import progressing
from ..notation.validation import Size, at_least

__all__ = [
    "NOISY",
    "Times",
    "collector_off",
    "synchronize",
    "timed",
    "counted",
    "cpu_name",
    "device_name",
    "environment",
    "find_device",
    "memory_bytes",
    "peak_bytes",
    "Measurement",
    "measure",
]


# -- clock -------------------------------------------------------------------------------------------------------------
# How long a call takes: repeated until a budget is spent, with the spread of the runs.

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
    once = _clock_events if device.type == "cuda" else _clock
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


def _clock_events(call: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        kept = call()
        end.record()
        end.synchronize()
    del kept
    return float(start.elapsed_time(end)) / 1e3


# -- environment -------------------------------------------------------------------------------------------------------
# Where a figure was measured: device, versions, threads, date and command.

_KINDS = ("cpu", "cuda")


def find_device(device: str | torch.device) -> torch.device:
    """Return a device that can be measured.

    UnsupportedError if torch knows no such device, or this machine has none, or there is no way to measure it.

    Examples
    --------
    >>> find_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).split("\n")[0][:200]
        raise UnsupportedError(f"device {str(device)[:80]!r}: {reason}; expected cpu or cuda") from None
    if found.type not in _KINDS:
        raise UnsupportedError(f"device {str(found)!r}: no way to measure it, expected cpu or cuda")
    if found.type == "cuda":
        there = torch.cuda.device_count()
        index = torch.cuda.current_device() if found.index is None and there else found.index or 0
        if index >= there:
            raise UnsupportedError(f"device {str(found)!r}: torch sees {there} CUDA devices, expected one of them")
        return torch.device("cuda", index)
    return found


def cpu_name() -> str:
    """Return the model of the processor, as the system prints it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n"):
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if said:
            return said
    return platform.processor() or platform.machine() or "unknown processor"


def device_name(device: torch.device) -> str:
    """Return the name of a device, as its driver or the system prints it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory that a device shows; of the machine for its processor.

    UnsupportedError if the system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise UnsupportedError(
            "device cpu: this system does not say how much memory it has, expected sysconf"
        ) from None


def counted(threads: object) -> str:
    """Return a number of threads as people read it."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def environment(device: str | torch.device = "cpu", command: str | None = None) -> dict[str, str | int | bool]:
    """Return what a record says of the place where it was measured.

    Parameters
    ----------
    device : str or torch.device
        Which device.
    command : str, optional
        How it was measured; by default the words that this process was started with.

    Returns
    -------
    dict
        Strings, integers and truth values by name, as JSON takes them; `memory_bytes` in bytes.

    Raises
    ------
    UnsupportedError
        If there is no such device.

    Examples
    --------
    >>> found = environment("cpu", command="an example")
    >>> [found[k] == v for k, v in (("device", "cpu"), ("command", "an example"), ("torch", torch.__version__))]
    [True, True, True]
    """
    where = find_device(device)
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv and sys.argv[0] else [Path(sys.executable).name]
    found: dict[str, str | int | bool] = {
        "device": where.type,
        "name": device_name(where),
        "memory_bytes": memory_bytes(where),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cores": os.cpu_count() or 0,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(words) if command is None else command,
    }
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        found |= {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "multiprocessors": int(properties.multi_processor_count),
            "l2_bytes": int(getattr(properties, "L2_cache_size", 0)),
        }
    return found


# -- allocations -------------------------------------------------------------------------------------------------------
# Bytes that a call allocates: the most that lived at once above what was there before it, and what it leaves.
#
# On CUDA the allocator counts. On the CPU nothing does, but torch's profiler notes each allocation and each free in the
# thread that makes it, so that a running sum of them in order of time is exact.

_MARK = "costgraph: the measured call"


def peak_bytes(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the bytes above the baseline at the peak of a call, and those that are left after it.

    The baseline is what lives before the call, which has to be in its steady state: one that was run before, and frees
    as much from its last run as it leaves to its next. What it returns is still held when the rest is counted; that is
    negative where a call frees more than it allocates.

    On the CPU each storage counts with its own bytes; workspace of libraries that torch's allocator does not hand out
    is not seen, nor are allocations of threads that the call starts itself. On CUDA storages count in blocks of 512 B,
    and workspace of libraries that was there before is part of the baseline.

    Examples
    --------
    >>> x = torch.ones(10, 10)
    >>> peak_bytes(lambda: (x + 1).relu(), torch.device("cpu"))  # two of 400 B live, one of them is returned
    (800, 400)
    """
    with collector_off():
        return _cuda(call, device) if device.type == "cuda" else _cpu(call)


def _cuda(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    synchronize(device)
    peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del kept
    return peak - before, after - before


def _cpu(call: Callable[[], Any]) -> tuple[int, int]:
    # a free is known by an address whose allocation was seen too: the run before the measured one shows those
    # that the measured one frees, such as the gradients of the last step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
        gc.collect()
        with record_function(_MARK):
            pass
        kept = call()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found = _peak_of(_events(results.experimental_event_tree()))
    del kept
    return found


def _events(roots: Iterable[Any]) -> Iterator[tuple[int, int] | None]:
    """Yield address and bytes of each allocation (negative where it is freed) in order of time; None at the mark."""
    flat, left = [], list(reversed(list(roots)))
    while left:
        event = left.pop()
        flat.append(event)
        left.extend(reversed(event.children))
    for event in sorted(flat, key=lambda e: int(e.start_time_ns)):
        if event.name == _MARK:
            yield None
        elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield int(event.extra_fields.ptr), int(event.extra_fields.alloc_size)


def _peak_of(events: Iterable[tuple[int, int] | None]) -> tuple[int, int]:
    sizes: dict[int, int] = {}
    live = baseline = peak = 0
    for event in events:
        if event is None:
            baseline = peak = live
            continue
        address, size = event
        if size > 0:
            sizes[address] = size
            live += size
        else:
            # the profiler has sizes of earlier sessions for addresses that it did not see since: not these
            live -= sizes.pop(address, 0)
        peak = max(peak, live)
    return peak - baseline, live - baseline


# -- measurement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What a call took."""

    time: Times
    """seconds"""
    flops: int | None
    """matmul FLOPs as torch's FlopCounterMode counts them; None where not asked for"""
    peak: int | None
    """bytes at the peak above those before the call; None where not asked for"""
    left: int | None
    """bytes that live after the call and did not before it, what it returns included; None where not asked for"""
    environment: dict[str, str | int | bool]
    """device, versions, threads, date and command"""

    def record(self) -> dict[str, Any]:
        """Return everything by name, as JSON takes it: times in seconds, the rest in FLOPs and bytes."""
        return {
            "seconds": self.time.record(),
            "flops": self.flops,
            "peak_bytes": self.peak,
            "left_bytes": self.left,
            "environment": dict(self.environment),
        }

    def __str__(self) -> str:
        parts = [f"time    {self.time}"]
        if self.flops is not None:
            parts.append(f"matmul  {format_quantity(self.flops, 'FLOP')}")
        if self.peak is not None and self.left is not None:
            parts.append(f"peak    {format_bytes(self.peak)} above the baseline, {format_bytes(self.left)} left")
        of = self.environment
        parts.append(f"on      {of['name']}, {counted(of['threads'])}, torch {of['torch']}, {of['date']}")
        return "\n".join(parts)


def measure(
    call: Callable[..., Any],
    *args: Any,
    device: str | torch.device | None = None,
    least: int = 5,
    most: int = 100,
    budget: float = 0.5,
    flops: bool = True,
    peak: bool = True,
    progress: bool | None = None,
    command: str | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Measurement:
    """Run a call often, and return its time, matmul FLOPs and peak bytes.

    The call has to be repeatable: it is run twice first, so that libraries are warm and an optimizer has its state,
    then against the clock, then for its bytes. Python's collector of cycles is off meanwhile.

    Parameters
    ----------
    call : callable
        What is measured: a function, a module, a step of training.
    *args
        What it is called with.
    device : str or torch.device, optional
        cpu or cuda; by default that of the ops that the call runs.
    least, most : int
        Fewest and most runs against the clock.
    budget : float
        Seconds after which no such run starts, once there were the fewest.
    flops, peak : bool
        Whether these are measured.
    progress : bool, optional
        Whether a line shows how far it is; by default where the standard error is a terminal.
    command : str, optional
        What the record names as the way to measure this again; by default the words this process was started with.
    kwargs : dict, optional
        What the call is called with by name.

    Returns
    -------
    Measurement
        `.time` in seconds, `.flops`, `.peak` and `.left` in bytes, `.record()` for JSON.

    Raises
    ------
    UnsupportedError
        If the ops run elsewhere than on one CPU or CUDA device that is here, or on fake tensors.
    BindingError
        If a number of runs or the budget is none.

    Notes
    -----
    FLOPs are FlopCounterMode's, right or wrong: fused attention on the CPU counts zero there. Peak bytes are
    exact on the CPU, `peak_bytes` says what they leave out.

    Examples
    --------
    >>> a, b = torch.ones(7, 11), torch.ones(11, 13)
    >>> found = measure(torch.mm, a, b, budget=0)
    >>> found.flops, found.peak, found.left, found.time.runs  # 2*7*11*13 FLOPs; 4*7*13 bytes, which are returned
    (2002, 364, 364, 5)
    """
    named = kwargs or {}

    def run() -> Any:
        return call(*args, **named)

    given = None if device is None else find_device(device)
    with progressing("measure", 3, progress) as step:
        step("FLOPs")
        where, counted = _first(run, given, flops)
        run()
        step("time")
        times = timed(run, where, least, most, budget)
        step("peak")
        most_bytes, left = peak_bytes(run, where) if peak else (None, None)
    return Measurement(times, counted, most_bytes, left, environment(where, command))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Notes the devices of all tensors that ops take and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.devices: set[torch.device] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, FakeTensor):
                raise UnsupportedError(f"measure: {func} ran on fake tensors, expected tensors with data")
            if isinstance(leaf, torch.Tensor):
                self.devices.add(leaf.device)
        return out


def _first(run: Callable[[], Any], given: torch.device | None, flops: bool) -> tuple[torch.device, int | None]:
    """Run a call once: return where its ops ran, and its matmul FLOPs."""
    with _Watch() as watch:
        if flops:
            with FlopCounterMode(display=False) as counter:
                run()
            counted = int(counter.get_total_flops())
        else:
            run()
    return _where(watch.devices, given), counted if flops else None


def _where(seen: set[torch.device], given: torch.device | None) -> torch.device:
    # numbers on the CPU take part in ops of other devices
    others = {d for d in seen if d.type != "cpu"}
    if len(others) > 1 or (given is not None and seen and given not in (others or seen)):
        said = ", ".join(sorted(map(str, others or seen)))
        raise UnsupportedError(f"measure: ops ran on {said}, expected {given or 'one device'} alone")
    if given is not None:
        return given
    if not seen and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        raise UnsupportedError("measure: no op of torch was seen, expected device= that says where the call runs")
    return find_device(next(iter(others), torch.device("cpu")))
