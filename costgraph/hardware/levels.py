"""Levels of memory: what each hands out in a second, and what lies between it and the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from costgraph.algebra.polynomial import ZERO, Poly, poly, total
from costgraph.hardware.specs import Hardware
from costgraph.hardware.units import Quantity

__all__ = ["Level", "levels"]

#: From the memory to the arithmetic; of places on a line the first that a specification has, as it holds the others.
_ORDER = (
    ("last_level",), ("l2",), ("cmem",), ("sram",), ("vmem",), ("sbuf",), ("l1_and_shared_per_core", "shared_per_core"),
    ("tensor_memory_per_core",), ("registers_per_core",),
)  # fmt: skip
#: Where these are known, nothing that counts is missing.
_NEAREST = {"l1_and_shared_per_core", "registers_per_core"}


class Level(NamedTuple):
    """A level of memory."""

    name: str
    """memory, last_level or l2"""
    bandwidth: Quantity
    """B/s from it to what is nearer to the arithmetic"""
    nearer: Poly
    """bytes of all stores that are nearer, those of all cores together"""
    whole: bool
    """whether the specification has all of these: with registers, and with first caches and not shared memory alone"""


def levels(hardware: Hardware) -> tuple[Level, ...]:
    """Return the levels of a device's memory that have a bandwidth, from the memory to the arithmetic.

    Parameters
    ----------
    hardware : Hardware
        The device, of numbers or of symbols.

    Returns
    -------
    tuple of Level
        The memory, and each cache whose bandwidth the specification has and that has something nearer.

    Examples
    --------
    >>> import costgraph as cg
    >>> [(level.name, str(level.bandwidth)) for level in levels(cg.load_hardware("a100-80-sxm"))]
    [('memory', '2.039 TB/s'), ('l2', '7.219 TB/s')]
    """
    cache = hardware.tables.get("cache", {})
    stores = [next(key for key in places if key in cache) for places in _ORDER if not cache.keys().isdisjoint(places)]
    sizes = [_whole_device(hardware, cache, key) for key in stores]
    whole = _NEAREST.issubset(stores) and bool(sizes[-1])
    out = [Level("memory", hardware.bandwidth, total(sizes), whole)]
    for i, key in enumerate(stores, start=1):
        rate = cache.get(f"{key}_bandwidth")
        if rate is not None and sizes[i:]:
            out.append(Level(key, rate, total(sizes[i:]), whole))
    return tuple(out)


def _whole_device(hardware: Hardware, cache: Mapping[str, Quantity], key: str) -> Poly:
    """Return the bytes of a store, of all cores together; nothing where it is not known how many there are."""
    if not key.endswith("_per_core"):
        return poly(cache[key].value)
    count = hardware.tables.get("cores", {}).get("count")
    return ZERO if count is None else poly(cache[key].value) * poly(count.value)
