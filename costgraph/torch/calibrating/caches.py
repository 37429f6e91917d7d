"""How large the last-level cache of a device is: beyond it, memory is what is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["last_level_cache", "working_sets"]

_CPUS = Path("/sys/devices/system/cpu")
_ASSUMED = 64 * 2**20
"""Bytes where the system does not say: more than most machines have for each processor."""

_MOST = 2**32  # a container may have far less memory than its machine


def last_level_cache(device: torch.device, cpus: Path = _CPUS) -> int | None:
    """Return the bytes of the last-level cache of a device, all its parts together; None where nothing says.

    `cpus` is the folder in which Linux describes processors.
    """
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or None
    if sys.platform == "darwin":
        names = ["hw.l3cachesize", "hw.perflevel0.l2cachesize", "hw.l2cachesize"]
        said = (
            subprocess.run(["sysctl", "-n", n], capture_output=True, text=True, check=False).stdout.strip()
            for n in names
        )
        return next((int(s) for s in said if s.isdigit() and int(s)), None)
    parts: dict[tuple[int, str], int] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size, shared = (_text(index / name) for name in ("level", "size", "shared_cpu_list"))
        found = re.fullmatch(r"([0-9]+)([KMG]?)", size)
        if level.isdigit() and found:
            parts[int(level), shared] = int(found[1]) * 2 ** (10 * " KMG".index(found[2] or " "))
    last = max((level for level, _ in parts), default=0)
    return sum(size for (level, _), size in parts.items() if level == last) or None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def working_sets(cache: int | None, memory: int, quick: bool) -> tuple[list[int], list[int]]:
    """Return the bytes of the working sets that are measured: within the last-level cache, and beyond it.

    Beyond it are twice its size and more, up to 4 GiB and an eighth of the memory: at twice its size the cache still
    holds some of the set, so that a bandwidth which is the fastest of these errs upwards.

    Examples
    --------
    >>> within, beyond = working_sets(32 * 2**20, 24 * 2**30, quick=True)
    >>> [n / 2**20 for n in within], [n // 2**20 for n in beyond]
    ([0.25, 8.0], [64, 256])
    """
    level = cache or _ASSUMED
    within = [2**18] if quick else [n for n in (2**k for k in range(16, 40, 2)) if n < level // 4]
    beyond = [times * level for times in ((2, 8) if quick else (2, 4, 8, 16)) if times == 2 or times * level <= _MOST]
    within = [n for n in [*within, level // 4] if n]
    return within, [min(n, memory // 8) // 2**12 * 2**12 for n in beyond]
