"""Where a figure was measured: device, versions, threads, date and command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from ...errors import UnsupportedError

__all__ = ["counted", "cpu_name", "device_name", "environment", "find_device", "memory_bytes"]

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
