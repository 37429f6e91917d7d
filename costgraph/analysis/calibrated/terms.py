"""What a calibrated time depends on: terms of ops and of devices, as arrays with a row for each op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil, exp, log

import numpy as np
from numpy.typing import NDArray

from ...algebra.polynomial import poly
from ...dtypes import dtype
from ...hardware.specs import Hardware
from ..work import Rates
from .loads import CLASSES, Load, Product

__all__ = ["COMPUTE", "DEVICE", "LAUNCH", "MEMORY", "PLACE", "Rows", "facts_of", "rows_of"]

Array = NDArray[np.float64]

#: Facts of a device, natural logarithms; one that a specification lacks is taken as typical.
DEVICE = ("intensity", "cores", "share", "cache", "power", "units", "bandwidth")
#: Side of the square tiles of products that libraries give to a core.
_TILE = 128
#: A device of fewer cores has others than those that a tile is given to.
_FEWEST_CORES = 16
#: Terms of a product that a core can sum before other cores take a part of the sum, and where sums are short or long.
_SPLIT, _SHORT, _LONG = 512, 500, 1100
#: Rows or columns below which a tile is mostly empty.
_NARROW = 64
#: Sizes that are no multiple of this leave loads of memory, and steps of the matrix unit, in part empty.
_ALIGNED = 8
_PRODUCTS = ("attention", "grouped", "convolution", "product")
_WIDE = ("fp32", "tf32", "bf16", "fp16")
_WINDOWS = ("summed", "kept", "spread")
_TILING = ("full tiles", "busy cores", "busy cores, sums split", "whole waves", "short sums", "narrow", "long sums")


def facts_of(hardware: Hardware) -> dict[str, float]:
    """Return those facts of a device that a calibrated time depends on beside its rates, as logarithms.

    FLOP per byte at the ridge of the fastest format of 16 bits or more, cores, bandwidth for each of them, bytes of the
    L2 cache, FLOP/s for a watt, rate of the matrix over that of the vector unit, and bandwidth; what the specification
    lacks is left out.
    """
    bandwidth = float(hardware.bandwidth.number)
    wide = max((float(q.number) for key, q in hardware.peak.items() if key in _WIDE), default=0.0)
    vector = max((float(q.number) for q in hardware.vector.values()), default=0.0)
    cores, cache, power = (
        float(hardware.tables[table][key].number) if key in hardware.tables.get(table, {}) else 0.0
        for table, key in (("cores", "count"), ("cache", "l2"), ("power", "tdp"))
    )
    cores = cores if cores >= _FEWEST_CORES else 0.0
    pairs = ((wide, bandwidth), (cores, 1.0), (bandwidth, cores), (cache, 1.0), (wide, power), (wide, vector),
             (bandwidth, 1.0))  # fmt: skip
    return {name: log(x / y) for name, (x, y) in zip(DEVICE, pairs, strict=True) if x and y}


@dataclass(frozen=True)
class Rows:
    """Ops on a device: times of one run at the peaks, and the terms that say what of the peaks is attained."""

    times: Array
    """how often each runs"""
    matrix: Array
    """seconds of products"""
    vector: Array
    """seconds of pointwise FLOPs"""
    special: Array
    """seconds of transcendental FLOPs, were they pointwise ones"""
    memory: Array
    """seconds of bytes, or over a link"""
    compute: Array
    """terms of products: a row for each op, a column for each of `COMPUTE`"""
    traffic: Array
    """terms of bytes: columns of `MEMORY`"""
    launch: Array
    """terms of what a run takes beside: columns of `LAUNCH`"""
    shape: Array
    """place of the op among others: what is alike is near"""

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of several graphs one after the other."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def __getitem__(self, which: NDArray[np.bool_]) -> Rows:
        return Rows(*(getattr(self, f.name)[which] for f in fields(Rows)))


def _tiling(p: Product, cores: float) -> tuple[float, ...]:
    """Return how full tiles are, how many cores have one, and how full the last wave of them is, as logarithms."""
    down, across = ceil(p.m / _TILE), ceil(p.n / _TILE)
    tiles = p.batch * down * across
    waves = max(tiles / cores, 1.0)
    return (
        -log(p.m * p.n / (down * across * _TILE**2)), -min(0.0, log(tiles / cores)),
        -min(0.0, log(tiles * max(1.0, p.k / _SPLIT) / cores)), -log(waves / ceil(waves)),
        max(0.0, log(_SHORT / p.k)), max(0.0, log(_NARROW / min(p.m, p.n))), max(0.0, log(p.k / _LONG)),
    )  # fmt: skip


#: Terms of products: which unit and format, windows, how the device is filled, and the device.
COMPUTE = (
    "matrix unit", "vector unit", "8 bits", "32 bits", "attention", "grouped",
    *(f"windows {name}{on}" for name in _WINDOWS for on in ("", ", matrix unit")),
    *(f"{name}, {unit} unit" for unit in ("matrix", "vector") for name in _TILING),
    "fewest products, matrix unit", "fewest products, vector unit", "strided gradient by the input",
    "strided gradient by the weight", "16 bits unaligned", "8 bits unaligned",
    "intensity, matrix unit", "power, matrix unit", "power, vector unit", "cores",
)  # fmt: skip
#: Terms of bytes: what kind of op moves them, how many, and the device.
MEMORY = (
    "all", *CLASSES, "fits in the cache", "beyond the cache", "share read", "32 bits", "64 bits", "cores", "share",
    "intensity",
)  # fmt: skip
#: Terms of what a run takes beside: launches, and those of an op that runs again and again.
LAUNCH = ("all", "repeated", "often repeated", "product")
_OFTEN = 100
#: Devices are far apart: what ops take on one of them is held against another only where the two are almost the same.
_APART = 4.0
#: Numbers that say where an op is among others.
PLACE = 31


def rows_of(loads: Sequence[Load], rates: Rates, typical: Mapping[str, float]) -> Rows:
    """Return the terms of ops on a device, whose facts are compared with those of a `typical` one in the middle."""
    own = facts_of(rates.hardware)
    device = {name: own.get(name, typical[name]) - typical[name] for name in DEVICE}
    cores = exp(own.get("cores", typical["cores"]))
    cache = own.get("cache", typical["cache"])
    alike = Counter(loads)
    found = [_row(load, count, rates, device, cores, cache) for load, count in alike.items()]
    columns = [np.array(column, dtype=float) for column in zip(*found, strict=True)]
    return Rows(*columns)


def _row(
    load: Load, count: int, rates: Rates, device: Mapping[str, float], cores: float, cache: float
) -> tuple[object, ...]:
    seconds = dict.fromkeys(("matmul", "pointwise", "transcendental"), 0.0)
    for kind, form, amount in load.flops:
        seconds[kind] += amount / float(rates.of(kind, form).constant or 1)
    link = rates.bandwidth if load.link is None else poly(rates.hardware.link(load.link).value) * 2
    memory = load.bytes / float(link.constant or 1)
    on_matrix = load.product is not None and not rates.shares_unit("matmul", load.product.format)
    size = log(max(load.bytes, 1.0))
    return (
        load.times * count, seconds["matmul"], seconds["pointwise"], seconds["transcendental"], memory,
        _compute(load, on_matrix, cores, device), _traffic(load, size - cache, device),
        (1, load.times > 1, load.times > _OFTEN, load.role in _PRODUCTS), _place(load, on_matrix, size, device),
    )  # fmt: skip


def _compute(load: Load, on_matrix: bool, cores: float, device: Mapping[str, float]) -> list[float]:
    p = load.product
    if p is None:
        return [0.0] * len(COMPUTE)
    bits, unit = dtype(p.format).bits, (float(on_matrix), float(not on_matrix))
    tiling, fewest = _tiling(p, cores), log(p.fewest) if p.windows else 0.0
    aligned = all(size % _ALIGNED == 0 for size in (p.m, p.n, p.k))
    windows = [float(p.windows == name) for name in _WINDOWS]
    return [
        *unit, on_matrix * (bits == 8), on_matrix * (bits == 32), load.role == "attention", load.role == "grouped",
        *(on * share for on in windows for share in (1.0, unit[0])),
        *(share * value for share in unit for value in tiling),
        *(share * fewest for share in unit), p.strided * windows[2], p.strided * windows[1],
        on_matrix * (bits == 16 and not aligned), on_matrix * (bits == 8 and not aligned),
        device["intensity"] * unit[0], device["power"] * unit[0], device["power"] * unit[1], device["cores"],
    ]  # fmt: skip


def _traffic(load: Load, beyond: float, device: Mapping[str, float]) -> list[float]:
    return [
        1.0, *(load.role == name for name in CLASSES), max(0.0, -beyond), max(0.0, beyond - 1), load.read,
        load.bits == 32, load.bits == 64, device["cores"], device["share"], device["intensity"],
    ]  # fmt: skip


def _place(load: Load, on_matrix: bool, size: float, device: Mapping[str, float]) -> list[float]:
    """Return the place of an op among others: one apart is little alike."""
    p = load.product
    kind = [float(load.role == name) for name in CLASSES]
    near = [_APART * device[name] for name in ("intensity", "cores", "power", "units")]
    near += [_APART * device["bandwidth"] / 2]
    alike = [size / 3, load.read, float(load.times > 1), 2.0 * (p is not None), *kind, *near]
    if p is None:
        return [*alike, *[0.0] * (PLACE - len(alike))]
    wide, narrow = max(p.m, p.n), min(p.m, p.n)
    aligned = sum(x % _ALIGNED == 0 for x in (p.m, p.n, p.k))
    return [
        *alike, log(wide) / 3, log(narrow) / 1.5, log(p.k) / 1.5, log(p.batch) / 3, on_matrix,
        log(dtype(p.format).bits, 2), 1.5 * bool(p.windows), 1.5 * (p.windows == "kept"), 1.5 * (p.windows == "spread"),
        log(p.window) / 2.5, 0.7 * p.strided, aligned / 3,
    ]  # fmt: skip
