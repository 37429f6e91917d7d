"""Bytes that a call allocates: the most that lived at once above what was there before it, and what it leaves.

On CUDA the allocator counts. On the CPU nothing does, but torch's profiler notes each allocation and each free in the
thread that makes it, so that a running sum of them in order of time is exact.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .clock import collector_off, synchronize

__all__ = ["peak_bytes"]

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
