"""One call, measured: its time, its matmul FLOPs, and its peak bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ...errors import UnsupportedError
from ...hardware.units import format_bytes, format_quantity
from ...notation.progress import progressing
from .allocations import peak_bytes
from .clock import Times, timed
from .environment import counted, environment, find_device

__all__ = ["Measurement", "measure"]


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
