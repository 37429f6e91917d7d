"""Calibrated time model: efficiency relative to roofline peaks, fitted to measurements on many devices."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import ceil, exp, log, prod
from pathlib import Path
from typing import Annotated, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from ..algebra.polynomial import ONE, Poly, as_poly, poly
from ..dtypes import dtype
from ..errors import FormatError
from ..hardware.specs import Hardware
from ..ir.graph import Op
from ..notation.pattern import Affine, Pattern
from ..notation.validation import Rule, Text, read_record
from ..ops.einsum import Einsum
from ..text_file import place_of, read_text
from .costs import compute_dtype, executions
from .work import DeviceQuestion, Rates, Work

__all__ = [
    "CLASSES",
    "Load",
    "Product",
    "load_of",
    "COMPUTE",
    "DEVICE",
    "LAUNCH",
    "MEMORY",
    "PLACE",
    "Rows",
    "facts_of",
    "rows_of",
    "SHIPPED",
    "Attained",
    "Calibration",
    "Figures",
    "load_calibration",
    "loads_of",
    "shipped",
]


# -- loads -------------------------------------------------------------------------------------------------------------

#: Op classes; the first that fits applies. Two matmuls in one kernel are attention, a matmul that is no einsum, such as
#: one of experts, is grouped, and a kernel with a reduction and more is a norm.
CLASSES = (
    "attention", "grouped", "convolution", "product", "indexed", "norm", "reduction", "pointwise", "copy", "other",
)  # fmt: skip
#: Kinds with data-dependent memory access.
_INDEXED = frozenset({"gather", "scatter", "sort", "top_k", "dispatch"})


@dataclass(frozen=True)
class Product:
    """A contraction as a batched matmul, m×k by k×n; convolutions as implicit matmuls with unfolded windows."""

    flops: float
    """FLOPs per execution"""
    batch: float = 1.0
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0
    format: str = "fp32"
    """number format of the operands"""
    windows: str = ""
    """convolution: summed; its weight gradient: kept; its input gradient: spread; otherwise empty"""
    window: float = 1.0
    """window size, or output size where that is smaller"""
    strided: bool = False
    """whether the stride exceeds 1"""
    fewest: float = 1.0
    """FLOPs of the cheapest algorithm relative to direct evaluation"""


@dataclass(frozen=True)
class Load:
    """Resource demand per execution."""

    role: str
    """one of `CLASSES`"""
    times: float
    """number of executions"""
    flops: tuple[tuple[str, str, float], ...]
    """kind, number format and FLOPs"""
    bytes: float
    """bytes read and written"""
    read: float
    """share of them that is read"""
    bits: int
    """bits per element, for the widest operand or result"""
    product: Product | None = None
    """largest matmul by FLOPs"""
    link: str | None = None
    """link that a transfer uses"""


def _number(value: Poly, sizes: Mapping[str, Poly]) -> float:
    bound = value.bind(sizes)
    return float(bound.expr if bound.constant is None else bound.constant)


def load_of(work: Work, sizes: Mapping[str, Poly]) -> Load:
    """Return an op's resource demand."""
    op, times = work.op, _number(work.times, sizes)
    inner_ops = [(op, ONE)] if op.body is None else [(o, t) for o, t, _ in executions(op.body, moves=False)]
    products = sorted(_products(inner_ops, sizes), key=lambda p: -p.flops)
    read = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.operands, op.kind.reads(op), strict=False))
    written = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.results, op.kind.writes(op), strict=False))
    return Load(
        role=_role(inner_ops, products, work),
        times=times,
        flops=tuple((*key, _number(amount, sizes) / times) for key, amount in work.flops.items()),
        bytes=_number(work.bytes, sizes) / times,
        read=read / (read + written) if read + written else 0.0,
        bits=max((t.dtype.bits for t in (*op.operands, *op.results)), default=0),
        product=products[0] if products else None,
        link=work.link,
    )


def _role(inner_ops: list[tuple[Op, Poly]], products: list[Product], work: Work) -> str:
    if products:
        if len(products) > 1:
            return "attention"
        if not any(isinstance(op.kind, Einsum) for op, _ in inner_ops):
            return "grouped"
        return "convolution" if products[0].windows else "product"
    kinds = {op.kind.name for op, _ in inner_ops}
    if kinds & _INDEXED:
        return "indexed"
    if "reduce" in kinds:
        return "norm" if "pointwise" in kinds else "reduction"
    if kinds <= {"pointwise", "rearrange"}:
        return "pointwise" if work.flops else "copy"
    return "other"


def _products(inner_ops: list[tuple[Op, Poly]], sizes: Mapping[str, Poly]) -> Iterator[Product]:
    for op, times in inner_ops:
        flops = op.kind.flops(op).matmul
        if flops:
            amount = _number(flops * times, sizes)
            if isinstance(op.kind, Einsum) and len(op.operands) == 2:
                yield _einsum(op, op.kind, amount, sizes)
            else:  # grouped or chained: assume a square result
                side = max(_number(op.results[0].numel, sizes), 1.0) ** 0.5
                yield Product(amount, 1.0, side, side, max(amount / (2 * side * side), 1.0), compute_dtype(op))


def _einsum(op: Op, kind: Einsum, flops: float, sizes: Mapping[str, Poly]) -> Product:
    """Return a two-operand contraction as a matmul."""
    extents = {name: _number(as_poly(n), sizes) for name, n in kind.extents.items()}
    first, second = (frozenset(kind.pattern.operand_names(i)) for i in range(2))
    result_names = frozenset(kind.pattern.result_names)

    def points(names: frozenset[str]) -> float:
        return prod((extents[name] for name in names), start=1.0)

    m, n, k = (
        points((first - second) & result_names),
        points((second - first) & result_names),
        points((first | second) - result_names),
    )
    slid = [dim for dims in (*kind.pattern.operands, kind.pattern.result) for dim in dims if _slides(dim)]
    for dim, size in zip(kind.pattern.result, op.results[0].sizes, strict=True):
        if _slides(dim):  # overlapping windows are summed
            along, across = sorted(dim.names, key=lambda name: name not in first)
            places = _number(size, sizes)
            m, n, k = m * places / extents[along], n / extents[across], k * points(frozenset(dim.names)) / places
    executed = _number(kind.flops(op).matmul, sizes)
    return Product(
        flops, points(first & second & result_names), m, n, k, compute_dtype(op), _windows(slid, kind.pattern, extents),
        prod((min(extents[name] for name in dim.names) for dim in slid), start=1.0),
        any(factor > 1 for dim in slid for _, factor in dim.terms),
        _number(kind.least(op), sizes) / executed if executed else 1.0,
    )  # fmt: skip


def _slides(dim: object) -> TypeGuard[Affine]:
    return isinstance(dim, Affine) and len(dim.terms) == 2


def _windows(slid: list[Affine], pattern: Pattern, extents: Mapping[str, float]) -> str:
    if not slid:
        return ""
    if any(_slides(dim) for dim in pattern.result):
        return "spread"
    # windows have the smaller factor; between equal factors, the longer axis is the output position
    outermost = min((factor, extents[name], name) for dim in slid for name, factor in dim.terms)[2]
    return "kept" if outermost in pattern.result_names else "summed"


# -- features ----------------------------------------------------------------------------------------------------------

Array = NDArray[np.float64]

#: Device facts, as natural logarithms; missing ones take the typical value.
DEVICE = ("intensity", "cores", "share", "cache", "power", "units", "bandwidth")
#: Edge of the square output tiles that libraries assign to a core.
_TILE = 128
#: Devices with fewer cores count units that tiles are not assigned to.
_FEWEST_CORES = 16
#: Length of a sum from which it is split across cores, and limits for short and long sums.
_SPLIT, _SHORT, _LONG = 512, 500, 1100
#: Rows or columns below which tiles are mostly empty.
_NARROW = 64
#: Sizes that are not multiples waste part of memory loads and matrix-unit steps.
_ALIGNED = 8
_PRODUCTS = ("attention", "grouped", "convolution", "product")
_WIDE = ("fp32", "tf32", "bf16", "fp16")
_WINDOWS = ("summed", "kept", "spread")
_TILING = ("full tiles", "busy cores", "busy cores, sums split", "whole waves", "short sums", "narrow", "long sums")


def facts_of(hardware: Hardware) -> dict[str, float]:
    """Return the device facts other than rates that affect calibrated times, as logarithms.

    Ridge point of the fastest format with at least 16 bits in FLOP/byte, cores, bandwidth per core, L2 cache bytes,
    FLOP/s per watt, ratio of matrix to vector rate, and bandwidth. Facts that the specification lacks are left out.
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
    """Ops on a device: seconds at peak rates, and features that predict the attained fraction."""

    times: Array
    """executions per op"""
    matrix: Array
    """seconds of matmuls"""
    vector: Array
    """seconds of pointwise FLOPs"""
    special: Array
    """seconds of transcendental FLOPs at the pointwise rate"""
    memory: Array
    """seconds of memory or link traffic"""
    compute: Array
    """matmul features: one row per op, one column per entry of `COMPUTE`"""
    traffic: Array
    """traffic features: columns of `MEMORY`"""
    launch: Array
    """launch features: columns of `LAUNCH`"""
    shape: Array
    """coordinates for the kernel regression: similar ops are close"""

    @classmethod
    def joined(cls, tables: Sequence[Rows]) -> Rows:
        """Concatenate the rows of several graphs."""
        return cls(*(np.concatenate([getattr(table, f.name) for table in tables]) for f in fields(cls)))

    def __getitem__(self, which: NDArray[np.bool_]) -> Rows:
        return Rows(*(getattr(self, f.name)[which] for f in fields(Rows)))


def _tiling(p: Product, cores: float) -> tuple[float, ...]:
    """Return tile occupancy, busy cores and last-wave occupancy as logarithms, then short, narrow and long sums."""
    down, across = ceil(p.m / _TILE), ceil(p.n / _TILE)
    tiles = p.batch * down * across
    waves = max(tiles / cores, 1.0)
    return (
        -log(p.m * p.n / (down * across * _TILE**2)), -min(0.0, log(tiles / cores)),
        -min(0.0, log(tiles * max(1.0, p.k / _SPLIT) / cores)), -log(waves / ceil(waves)),
        max(0.0, log(_SHORT / p.k)), max(0.0, log(_NARROW / min(p.m, p.n))), max(0.0, log(p.k / _LONG)),
    )  # fmt: skip


#: Matmul features: unit and format, windows, device occupancy, and device facts.
COMPUTE = (
    "matrix unit", "vector unit", "8 bits", "32 bits", "attention", "grouped",
    *(f"windows {name}{on}" for name in _WINDOWS for on in ("", ", matrix unit")),
    *(f"{name}, {unit} unit" for unit in ("matrix", "vector") for name in _TILING),
    "fewest products, matrix unit", "fewest products, vector unit", "strided gradient by the input",
    "strided gradient by the weight", "16 bits unaligned", "8 bits unaligned",
    "intensity, matrix unit", "power, matrix unit", "power, vector unit", "cores",
)  # fmt: skip
#: Traffic features: op class, bytes, and device facts.
MEMORY = (
    "all", *CLASSES, "fits in the cache", "beyond the cache", "share read", "32 bits", "64 bits", "cores", "share",
    "intensity",
)  # fmt: skip
#: Launch features: per launch, and for ops that run repeatedly.
LAUNCH = ("all", "repeated", "often repeated", "product")
_OFTEN = 100
#: Weight given to device facts in the distance: measurements only transfer between nearly equal devices.
_APART = 4.0
#: Coordinates per op.
PLACE = 31


def rows_of(loads: Sequence[Load], rates: Rates, typical: Mapping[str, float]) -> Rows:
    """Return op features on a device, with device facts relative to a typical device."""
    device_facts = facts_of(rates.hardware)
    device = {name: device_facts.get(name, typical[name]) - typical[name] for name in DEVICE}
    cores = exp(device_facts.get("cores", typical["cores"]))
    cache = device_facts.get("cache", typical["cache"])
    alike = Counter(loads)
    rows = [_row(load, count, rates, device, cores, cache) for load, count in alike.items()]
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
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
    """Return an op's coordinates for the kernel regression."""
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


# -- model -------------------------------------------------------------------------------------------------------------

SCHEMA = "costgraph/calibration/1"
"""Schema name of the JSON format; the number changes with the features."""

SHIPPED = Path(__file__).with_name("published_gpus.json")
"""Path to the model that ships with the library."""

#: Exponent of the smooth maximum over compute and memory time: they overlap almost completely.
_OVERLAP = 3.0
#: Launch overhead in seconds without measurements; a prior that the fit adjusts.
_LAUNCH = 5e-6
#: Limit of each correction as a logarithm, against extrapolation to unmeasured devices.
_MOST = 4.0
#: Limit on absolute coefficients in a model file.
_LARGEST = 100
_MOST_BYTES = 2**24


class Attained(NamedTuple):
    """Op times, with their derivatives by component for the fit."""

    seconds: Array
    """per execution"""
    work: Array
    """share of the time beyond the launch overhead"""
    matrix: Array
    """derivative of log(`work`) by log(matrix time); vector, special and memory alike"""
    vector: Array
    special: Array
    memory: Array


def attained(rows: Rows, compute: Array, traffic: Array, launch: Array, unit: Sequence[float], near: Array) -> Attained:
    """Return op times from the logarithmic corrections of their components.

    `compute` and `traffic` correct matmul and memory time at peak, `launch` the usual launch overhead, `unit` pointwise
    and transcendental FLOPs, and `near` the result, by similar measured ops.
    """
    matrix = rows.matrix * np.exp(np.clip(compute, -_MOST, _MOST))
    vector, special = rows.vector * np.exp(unit[0]), rows.special * np.exp(unit[1])
    busy, memory = matrix + vector + special, rows.memory * np.exp(np.clip(traffic, -_MOST, _MOST))
    tiny = 1e-18  # seconds, so that an op without work takes a launch
    combined = (busy**_OVERLAP + memory**_OVERLAP + tiny**_OVERLAP) ** (1 / _OVERLAP)
    work = combined * np.exp(np.clip(near, -_MOST, _MOST))
    seconds = work + _LAUNCH * np.exp(np.clip(launch, -_MOST, _MOST))
    in_compute = (busy / combined) ** _OVERLAP / np.maximum(busy, tiny)
    return Attained(seconds, work / seconds, in_compute * matrix, in_compute * vector, in_compute * special,
                    (memory / combined) ** _OVERLAP)  # fmt: skip


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_grid(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(row, Sequence) and len(row) == PLACE and all(map(_is_finite, row)) for row in value
    )


_Number = Annotated[float, Rule("a number", _is_finite)]
_Width = Annotated[float, Rule("a number above 0", lambda value: _is_finite(value) and value > 0)]
_Table = Mapping[str, _Number]


@dataclass(frozen=True)
class Figures:
    """Model accuracy: shares of measurements predicted within 25 %."""

    rows: int
    """measurements in total"""
    fitted: _Number
    """share among the fitted measurements"""
    folds: _Number
    """share in tenfold cross-validation"""
    shapes: _Number
    """share in tenfold cross-validation by shapes and models"""
    devices: _Number
    """share in leave-one-device-out cross-validation"""
    families: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """measurement count and the same four shares, by family"""


@dataclass(frozen=True)
class Calibration:
    """Fitted efficiency model: logarithms of time over time at peak, as sums of feature terms.

    An execution takes a launch plus a smooth maximum of compute and memory time. Each of these is its time at peak
    times the exponential of a linear term: unit and format, tile occupancy, op class, and device facts. Measured
    devices add four terms each. A kernel regression over similar measured ops adds the last term, zero without similar
    ops.
    """

    records: Text
    """measurement file"""
    versions: Mapping[str, str]
    """versions of the library and its dependencies at the fit"""
    date: Text
    """date of the fit"""
    compute: _Table = field(repr=False)
    memory: _Table = field(repr=False)
    launch: _Table = field(repr=False)
    vector: _Number
    """for pointwise FLOPs"""
    special: _Number
    """for transcendental FLOPs, which run on fewer units"""
    typical: _Table = field(repr=False)
    """device facts of the typical device"""
    devices: Mapping[str, _Table] = field(repr=False)
    """per measured device: terms for the matrix and vector units, memory and launches"""
    width: _Width
    """bandwidth of the kernel regression"""
    places: Annotated[Sequence[Sequence[float]], Rule(f"rows of {PLACE} numbers", _is_grid)] = field(repr=False)
    """support points for the kernel regression"""
    weights: Sequence[_Number] = field(repr=False)
    """weights for the support points"""
    figures: Figures | None = None
    """accuracy, if it was evaluated"""

    def of(self, rows: Rows, device: str) -> Attained:
        """Return op times on a device."""
        corrections = self.devices.get(device, {})
        compute, traffic, launch = (
            terms @ np.array([coefficients.get(name, 0.0) for name in names])
            for terms, coefficients, names in (
                (rows.compute, self.compute, COMPUTE), (rows.traffic, self.memory, MEMORY),
                (rows.launch, self.launch, LAUNCH))
        )  # fmt: skip
        for unit in range(2):
            compute += rows.compute[:, unit] * corrections.get(COMPUTE[unit], 0.0)
        near = alike(rows.shape, np.array(self.places), self.width) @ np.array(self.weights) if self.weights else 0.0
        return attained(rows, compute, traffic + corrections.get("memory", 0.0),
                        launch + corrections.get("launch", 0.0), (self.vector, self.special),
                        np.asarray(near))  # fmt: skip

    def times(self, loads: Sequence[Load], rates: Rates) -> list[float]:
        """Return the seconds of each op over all its executions."""
        alike = list(dict.fromkeys(loads))
        if not alike:
            return []
        rows = rows_of(alike, rates, self.typical)
        seconds = (self.of(rows, rates.hardware.id).seconds * rows.times).tolist()
        seconds_by_load = dict(zip(alike, seconds, strict=True))
        return [seconds_by_load[load] for load in loads]

    def seconds(self, loads: Sequence[Load], rates: Rates) -> float:
        """Return the total seconds of ops on a device, without overlap."""
        return sum(self.times(loads, rates))


def alike(places: Array, others: Array, width: float) -> Array:
    """Return the Gaussian kernel matrix for two sets of coordinates: 1 for equal ops, 0 for distant ones."""
    squared_distance = (places**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * places @ others.T
    kernel: Array = np.exp(-0.5 * np.maximum(squared_distance, 0.0) / width**2)
    return kernel


def loads_of(asked: DeviceQuestion, phases: Sequence[str] = ()) -> list[Load]:
    """Return the loads of a graph's ops with sizes bound, optionally only for some phases."""
    works = [work for work in asked.works if not phases or work.op.phase in phases]
    return [load_of(work, asked.values) for work in works if work.times]


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Load a calibrated time model from a file.

    Parameters
    ----------
    path : str or path-like
        JSON file, as written by `costgraph calibrate --records`.

    Raises
    ------
    FormatError
        If the file cannot be read, or is not such a model.
    """
    place = place_of(path)
    expected = "a model written by costgraph calibrate --records"
    text = read_text(path, place, _MOST_BYTES, expected)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {error}, expected {expected}") from None
    if not isinstance(record, dict) or record.pop("schema", None) != SCHEMA:
        raise FormatError(f"{place}: no schema {SCHEMA}, expected {expected}")
    calibration = read_record(place, record, Calibration)
    missing = next((name for name in DEVICE if name not in calibration.typical), None)
    if missing is not None or len(calibration.places) != len(calibration.weights):
        problem = (
            f"typical has no {missing!r}"
            if missing
            else f"{len(calibration.places)} places, {len(calibration.weights)} weights"
        )
        raise FormatError(f"{place}: {problem}, expected {expected}")
    return calibration


@cache
def shipped() -> Calibration:
    """Return the model that ships with the library."""
    return load_calibration(SHIPPED)
