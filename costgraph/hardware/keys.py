"""What a specification of a device may have: tables, their keys, and the unit of each."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CACHE_SYMBOLS", "LEVEL", "LINK_KINDS", "PEAKS", "PER_LINK", "RATE_KEYS", "SYMBOLS", "TABLES", "symbols_of"]

_TEXT = "text"
PEAKS = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "nvfp4", "int8", "int4"]
# GeForce multiplies twice as fast where it keeps the sum in fp16
_FP16_SUMS = ["fp16_accum_fp16", "fp8_accum_fp16"]
_CACHES = ["l2", "l2_reported_by_driver", "last_level", "l1_and_shared_per_core", "shared_per_core"]
_SCRATCHPADS = ["tensor_memory_per_core", "registers_per_core", "vmem", "cmem", "sbuf", "sram"]
# from the store to what is nearer to the arithmetic
_CACHE_RATES = ["last_level_bandwidth", "l2_bandwidth"]
_LINKS = ["per_direction", "bidirectional", "per_link_per_direction", "c2c_per_direction"]
_CHIP_LINKS = ["per_chip", "bidirectional_per_chip", "per_axis_bidirectional"]
TABLES: dict[str, dict[str, str]] = {
    "peak": dict.fromkeys(PEAKS + _FP16_SUMS, "FLOP/s"),
    "vector": dict.fromkeys(("fp64", "fp32"), "FLOP/s"),
    "memory": {"type": _TEXT, "capacity": "B", "measured": "B", "reported": "B", "bandwidth": "B/s"},
    "cache": dict.fromkeys(_CACHES + _SCRATCHPADS, "B") | dict.fromkeys(_CACHE_RATES, "B/s"),
    "cores": {"type": _TEXT, "count": "1"},
    "clock": dict.fromkeys(("boost", "max", "reached"), "Hz"),
    "power": dict.fromkeys(("tdp", "measured_min", "measured_mean", "measured_max"), "W"),
    "interconnect": {"type": _TEXT, "links": "1", "domain": "1", "latency": "s"}
    | dict.fromkeys(_LINKS + _CHIP_LINKS, "B/s"),
    "pcie": {"generation": "1", "x16_per_direction": "B/s"},
    "network": {"type": _TEXT, "per_direction": "B/s", "latency": "s"},
    "host": {"type": _TEXT, "bandwidth": "B/s"},
    "attained": dict.fromkeys([*PEAKS, "vector_fp64", "vector_fp32"], "FLOP/s") | {"bandwidth": "B/s", "launch": "s"},
    "measured": {},
}
"""Tables of a specification, their keys and the base unit of each; [measured] takes any name and unit."""

PER_LINK = "per_link_per_direction"
LEVEL = {"devices": "1", "per_direction": "B/s", PER_LINK: "B/s", "ring": "1", "latency": "s", "oversubscription": "1"}
"""Keys of a level of a network, and the base unit of each; one with PER_LINK is a dimension of a torus."""

LINK_KINDS = {
    "interconnect": ("interconnect", "per_direction"), "c2c": ("interconnect", "c2c_per_direction"),
    "pcie": ("pcie", "x16_per_direction"), "network": ("network", "per_direction"),
}  # fmt: skip

# tensor cores take the two 8-bit floats at one rate, and the block formats at that of their elements
RATE_KEYS = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2"), "fp8"),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2", "mxfp6", "mxfp6_e3m2"), "fp6"),
    **dict.fromkeys(("fp4_e2m1", "mxfp4"), "fp4"),
    "uint8": "int8",
}

SYMBOLS = {
    **{f"peak.{key}": f"peak_{key}" for key in PEAKS},
    **{f"vector.{key}": f"vector_{key}" for key in TABLES["vector"]},
    "memory.bandwidth": "bandwidth",
    **{f"{table}.{key}": kind for kind, (table, key) in LINK_KINDS.items()},
}
"""What is a symbol of hardware as an unknown, and its name."""

CACHE_SYMBOLS = {key: f"{key}_size" if unit == "B" else key for key, unit in TABLES["cache"].items()}
"""The same of [cache], which devices have in part."""


def symbols_of(tables: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return what is a symbol of a device as an unknown, and its name: of [cache] what the device has."""
    return SYMBOLS | {f"cache.{key}": CACHE_SYMBOLS[key] for key in tables.get("cache", ())}
