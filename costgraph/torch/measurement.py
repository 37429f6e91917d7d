"""Measure a call: time, matmul FLOPs and peak memory, with its environment."""

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


# -- time --------------------------------------------------------------------------------------------------------------

NOISY = 0.1
"""spread above which times are reported as noisy: half of the runs vary by more than a tenth of the median"""


Seconds = Annotated[float, at_least(1e-12, float)]
"""positive time in seconds"""


@dataclass(frozen=True)
class Times:
    """Statistics over the run times of one call.

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
    """number of runs"""

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """Summarize a non-empty list of run times in seconds."""
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
        return cls(median, min(seconds), max(seconds), lower, upper, len(seconds))

    @property
    def spread(self) -> float:
        """Interquartile range divided by the median."""
        return (self.upper - self.lower) / self.median if self.median else 0.0

    @property
    def noisy(self) -> bool:
        """Whether the spread is above `NOISY`, or unknown with fewer than 3 runs."""
        return self.runs < 3 or self.spread > NOISY

    def record(self) -> dict[str, float | int | bool]:
        """Return the statistics in seconds and the spread as JSON data."""
        return asdict(self) | {"spread": self.spread, "noisy": self.noisy}

    def __str__(self) -> str:
        low, middle, high = (format_quantity(s, "s") for s in (self.min, self.median, self.max))
        if self.runs == 1:
            return f"{middle} (a single run: noisy)"
        noisy = ": noisy" if self.noisy else ""
        return f"{middle} (median of {self.runs} runs from {low} to {high}, spread {self.spread:.0%}{noisy})"


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable Python's garbage collector, which would free tensors at arbitrary times."""
    if not gc.isenabled():  # already disabled by an outer context, which has collected; collecting is slow
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], Any], device: torch.device, least: int = 5, most: int = 100, budget: float = 0.5) -> Times:
    """Time a call, after one warm-up run.

    On CUDA this is the time between two events around the call, so a short kernel shows its launch time. The result is
    freed outside the timed region.

    Parameters
    ----------
    call : callable
        A function without arguments that can be repeated.
    device : torch.device
        Device of its ops.
    least, most : int
        Minimum and maximum number of runs.
    budget : float
        Seconds after which no more runs start, beyond the minimum.

    Raises
    ------
    BindingError
        If a number of runs is not positive, or the budget is negative.

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
    once = _time_with_events if device.type == "cuda" else _time_on_cpu
    call()
    synchronize(device)
    seconds: list[float] = []
    with collector_off():
        start = time.perf_counter()
        while len(seconds) < least or (len(seconds) < most and time.perf_counter() - start < budget):
            seconds.append(once(call, device))
    return Times.of(seconds)


def _time_on_cpu(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    result = call()
    end = time.perf_counter()
    del result
    return end - start


def _time_with_events(call: Callable[[], Any], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        start.record()
        result = call()
        end.record()
        end.synchronize()
    del result
    return float(start.elapsed_time(end)) / 1e3


# -- environment -------------------------------------------------------------------------------------------------------

_KINDS = ("cpu", "cuda")


def find_device(device: str | torch.device) -> torch.device:
    """Return a device that can be measured.

    Raises UnsupportedError if torch or this machine has no such device, or measurement does not support it.

    Examples
    --------
    >>> find_device("cpu")
    device(type='cpu')
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).split("\n")[0][:200]
        raise UnsupportedError(f"device {str(device)[:80]!r}: {reason}; expected cpu or cuda") from None
    if parsed.type not in _KINDS:
        raise UnsupportedError(f"device {str(parsed)!r}: cannot be measured, expected cpu or cuda")
    if parsed.type == "cuda":
        device_count = torch.cuda.device_count()
        index = torch.cuda.current_device() if parsed.index is None and device_count else parsed.index or 0
        if index >= device_count:
            raise UnsupportedError(
                f"device {str(parsed)!r}: torch sees {device_count} CUDA devices, expected one of them"
            )
        return torch.device("cuda", index)
    return parsed


def cpu_name() -> str:
    """Return the processor's model name as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n"):
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        brand = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if brand:
            return brand
    return platform.processor() or platform.machine() or "unknown processor"


def device_name(device: torch.device) -> str:
    """Return the device name as the driver or system reports it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def memory_bytes(device: torch.device) -> int:
    """Return the device memory in bytes, or the machine's memory for the CPU.

    Raises UnsupportedError if the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        raise UnsupportedError("device cpu: this system does not report its memory through os.sysconf") from None


def counted(threads: object) -> str:
    """Format a number of threads."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def environment(device: str | torch.device = "cpu", command: str | None = None) -> dict[str, str | int | bool]:
    """Return the environment of a measurement.

    Parameters
    ----------
    device : str or torch.device
        The device.
    command : str, optional
        Command to record for reproduction, by default this process's command line.

    Returns
    -------
    dict
        Strings, integers and booleans by name, as JSON data; `memory_bytes` is in bytes.

    Raises
    ------
    UnsupportedError
        If the device does not exist.

    Examples
    --------
    >>> found = environment("cpu", command="an example")
    >>> [found[k] == v for k, v in (("device", "cpu"), ("command", "an example"), ("torch", torch.__version__))]
    [True, True, True]
    """
    target = find_device(device)
    command_words = [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv and sys.argv[0] else [Path(sys.executable).name]
    values: dict[str, str | int | bool] = {
        "device": target.type,
        "name": device_name(target),
        "memory_bytes": memory_bytes(target),
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cores": os.cpu_count() or 0,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(command_words) if command is None else command,
    }
    if target.type == "cuda":
        properties = torch.cuda.get_device_properties(target)
        values |= {
            "cuda": str(torch.version.cuda or torch.version.hip),
            "multiprocessors": int(properties.multi_processor_count),
            "l2_bytes": int(getattr(properties, "L2_cache_size", 0)),
        }
    return values


# -- allocations -------------------------------------------------------------------------------------------------------
# On CUDA torch's allocator counts bytes. On the CPU the profiler records every allocation and free in its thread, so
# that a running sum in time order is exact.

_MARK = "costgraph: the measured call"


def peak_bytes(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the peak bytes of a call above the baseline, and the bytes left after it.

    The baseline is the memory in use before the call. The call must be in a steady state: it ran before, and frees as
    much from its last run as it leaves for the next. Bytes left include the result; they are negative if a call frees
    more than it allocates.

    On the CPU every storage counts with its exact size. Library workspaces outside torch's allocator and allocations in
    threads that the call starts are missing. On CUDA storages count in blocks of 512 B, and existing library workspaces
    are part of the baseline.

    Examples
    --------
    >>> x = torch.ones(10, 10)
    >>> peak_bytes(lambda: (x + 1).relu(), torch.device("cpu"))  # two of 400 B live, one of them is returned
    (800, 400)
    """
    with collector_off():
        return _cuda_peak(call, device) if device.type == "cuda" else _cpu_peak(call)


def _cuda_peak(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated_before = torch.cuda.memory_allocated(device)
    result = call()
    synchronize(device)
    peak, allocated_after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result
    return peak - allocated_before, allocated_after - allocated_before


def _cpu_peak(call: Callable[[], Any]) -> tuple[int, int]:
    # a free is only attributed if its allocation was recorded: the preceding run records those that the measured
    # run frees, such as the gradients of the last step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
        gc.collect()
        with record_function(_MARK):
            pass
        result = call()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    peak_and_left = _peak_of(_events(results.experimental_event_tree()))
    del result
    return peak_and_left


def _events(roots: Iterable[Any]) -> Iterator[tuple[int, int] | None]:
    """Yield address and bytes of each allocation in time order, negative bytes for a free, None at the mark."""
    flat, stack = [], list(reversed(list(roots)))
    while stack:
        event = stack.pop()
        flat.append(event)
        stack.extend(reversed(event.children))
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
            # ignore the profiler's sizes from earlier sessions for addresses not allocated in this one
            live -= sizes.pop(address, 0)
        peak = max(peak, live)
    return peak - baseline, live - baseline


# -- measurement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Measured costs of a call."""

    time: Times
    """seconds"""
    flops: int | None
    """matmul FLOPs from torch's FlopCounterMode; None if not requested"""
    peak: int | None
    """peak bytes above those before the call; None if not requested"""
    left: int | None
    """bytes allocated by the call and still live after it, result included; None if not requested"""
    environment: dict[str, str | int | bool]
    """device, versions, threads, date and command"""

    def record(self) -> dict[str, Any]:
        """Return all fields as JSON data: seconds, FLOPs and bytes."""
        return {
            "seconds": self.time.record(),
            "flops": self.flops,
            "peak_bytes": self.peak,
            "left_bytes": self.left,
            "environment": dict(self.environment),
        }

    def __str__(self) -> str:
        lines = [f"time    {self.time}"]
        if self.flops is not None:
            lines.append(f"matmul  {format_quantity(self.flops, 'FLOP')}")
        if self.peak is not None and self.left is not None:
            lines.append(f"peak    {format_bytes(self.peak)} above the baseline, {format_bytes(self.left)} left")
        env = self.environment
        lines.append(f"on      {env['name']}, {counted(env['threads'])}, torch {env['torch']}, {env['date']}")
        return "\n".join(lines)


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
    """Run a call repeatedly, and measure its time, matmul FLOPs and peak bytes.

    The call must be repeatable. It runs twice to warm up libraries and create optimizer states, then for its time, then
    for its memory. Python's garbage collector is disabled meanwhile.

    Parameters
    ----------
    call : callable
        A function, a module or a training step.
    *args
        Positional arguments of the call.
    device : str or torch.device, optional
        "cpu" or "cuda", by default the device of the call's ops.
    least, most : int
        Minimum and maximum number of timed runs.
    budget : float
        Seconds after which no more timed runs start, beyond the minimum.
    flops, peak : bool
        Whether to measure them.
    progress : bool, optional
        Whether to show progress, by default if standard error is a terminal.
    command : str, optional
        Command to record for reproduction, by default this process's command line.
    kwargs : dict, optional
        Keyword arguments of the call.

    Returns
    -------
    Measurement
        `.time` in seconds, `.flops`, `.peak` and `.left` in bytes, `.record()` for JSON.

    Raises
    ------
    UnsupportedError
        If the ops do not run on a single CPU or CUDA device of this machine, or run on fake tensors.
    BindingError
        If a number of runs or the budget is invalid.

    Notes
    -----
    FLOPs come from FlopCounterMode, including its errors: fused attention on the CPU counts zero. Peak bytes are exact
    on the CPU, except for the omissions listed in `peak_bytes`.

    Examples
    --------
    >>> a, b = torch.ones(7, 11), torch.ones(11, 13)
    >>> found = measure(torch.mm, a, b, budget=0)
    >>> found.flops, found.peak, found.left, found.time.runs  # 2*7*11*13 FLOPs; 4*7*13 bytes, which are returned
    (2002, 364, 364, 5)
    """
    keywords = kwargs or {}

    def run() -> Any:
        return call(*args, **keywords)

    requested = None if device is None else find_device(device)
    with progressing("measure", 3, progress) as step:
        step("FLOPs")
        used, counted = _first_run(run, requested, flops)
        run()
        step("time")
        times = timed(run, used, least, most, budget)
        step("peak")
        peak_above_baseline, left = peak_bytes(run, used) if peak else (None, None)
    return Measurement(times, counted, peak_above_baseline, left, environment(used, command))


class _DeviceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    """Records the devices of all tensors that ops read and return."""

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


def _first_run(run: Callable[[], Any], requested: torch.device | None, flops: bool) -> tuple[torch.device, int | None]:
    """Run a call once, and return the device of its ops and its matmul FLOPs."""
    with _DeviceRecorder() as recorder:
        if flops:
            with FlopCounterMode(display=False) as counter:
                run()
            counted = int(counter.get_total_flops())
        else:
            run()
    return _single_device(recorder.devices, requested), counted if flops else None


def _single_device(used: set[torch.device], requested: torch.device | None) -> torch.device:
    # CPU scalars may be operands of ops on other devices
    accelerators = {d for d in used if d.type != "cpu"}
    if len(accelerators) > 1 or (requested is not None and used and requested not in (accelerators or used)):
        names = ", ".join(sorted(map(str, accelerators or used)))
        raise UnsupportedError(f"measure: ops ran on {names}, expected only {requested or 'one device'}")
    if requested is not None:
        return requested
    if not used and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        raise UnsupportedError("measure: the call ran no torch op, expected device= to name its device")
    return find_device(next(iter(accelerators), torch.device("cpu")))
