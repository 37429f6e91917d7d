"""A calibrated model of time: what devices were seen to attain of their peaks, as a function of ops and of devices."""

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
from .work import Asked, Rates, Work

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
# What an op asks of a device, as numbers: how often it runs, its FLOPs and bytes, and the shape of its products.

#: What an op is to a device. The first that fits: two products in one kernel are attention, a product without axes of
#: its own (of experts, say) is grouped; a kernel that sums and does more is a norm.
CLASSES = (
    "attention", "grouped", "convolution", "product", "indexed", "norm", "reduction", "pointwise", "copy", "other",
)  # fmt: skip
#: Kinds whose places in memory depend on data.
_INDEXED = frozenset({"gather", "scatter", "sort", "top_k", "dispatch"})


@dataclass(frozen=True)
class Product:
    """A contraction as a product of matrices, `batch` of m by k with k by n: a convolution with its window unfolded."""

    flops: float
    """FLOPs of one run"""
    batch: float = 1.0
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0
    format: str = "fp32"
    """number format of the operands"""
    windows: str = ""
    """summed: a convolution; kept: its gradient by the weight; spread: by the input; empty where there are none"""
    window: float = 1.0
    """places of a window, or positions of it where these are fewer"""
    strided: bool = False
    """whether windows lie further apart than one place"""
    fewest: float = 1.0
    """FLOPs of the algorithm that needs the fewest, over those of all index points"""


@dataclass(frozen=True)
class Load:
    """What one op asks of a device in one run of it."""

    role: str
    """one of `CLASSES`"""
    times: float
    """how often it runs"""
    flops: tuple[tuple[str, str, float], ...]
    """kind, number format and FLOPs"""
    bytes: float
    """bytes read and written"""
    read: float
    """share of them that is read"""
    bits: int
    """of an element, the widest of operands and results"""
    product: Product | None = None
    """that of most FLOPs"""
    link: str | None = None
    """the link that a transfer goes over"""


def _number(value: Poly, sizes: Mapping[str, Poly]) -> float:
    found = value.bind(sizes)
    return float(found.expr if found.constant is None else found.constant)


def load_of(work: Work, sizes: Mapping[str, Poly]) -> Load:
    """Return what an op asks of a device."""
    op, times = work.op, _number(work.times, sizes)
    inside = [(op, ONE)] if op.body is None else [(o, t) for o, t, _ in executions(op.body, moves=False)]
    products = sorted(_products(inside, sizes), key=lambda p: -p.flops)
    read = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.operands, op.kind.reads(op), strict=False))
    written = sum(_number(a * t.element_bytes(), sizes) for t, a in zip(op.results, op.kind.writes(op), strict=False))
    return Load(
        role=_role(inside, products, work),
        times=times,
        flops=tuple((*key, _number(amount, sizes) / times) for key, amount in work.flops.items()),
        bytes=_number(work.bytes, sizes) / times,
        read=read / (read + written) if read + written else 0.0,
        bits=max((t.dtype.bits for t in (*op.operands, *op.results)), default=0),
        product=products[0] if products else None,
        link=work.link,
    )


def _role(inside: list[tuple[Op, Poly]], products: list[Product], work: Work) -> str:
    if products:
        if len(products) > 1:
            return "attention"
        if not any(isinstance(op.kind, Einsum) for op, _ in inside):
            return "grouped"
        return "convolution" if products[0].windows else "product"
    kinds = {op.kind.name for op, _ in inside}
    if kinds & _INDEXED:
        return "indexed"
    if "reduce" in kinds:
        return "norm" if "pointwise" in kinds else "reduction"
    if kinds <= {"pointwise", "rearrange"}:
        return "pointwise" if work.flops else "copy"
    return "other"


def _products(inside: list[tuple[Op, Poly]], sizes: Mapping[str, Poly]) -> Iterator[Product]:
    for op, times in inside:
        flops = op.kind.flops(op).matmul
        if flops:
            amount = _number(flops * times, sizes)
            if isinstance(op.kind, Einsum) and len(op.operands) == 2:
                yield _einsum(op, op.kind, amount, sizes)
            else:  # of rows that are sorted among matrices, or of a chain: as square as its result
                side = max(_number(op.results[0].numel, sizes), 1.0) ** 0.5
                yield Product(amount, 1.0, side, side, max(amount / (2 * side * side), 1.0), compute_dtype(op))


def _einsum(op: Op, kind: Einsum, flops: float, sizes: Mapping[str, Poly]) -> Product:
    """Return a contraction of two tensors as a product of matrices."""
    extents = {name: _number(as_poly(n), sizes) for name, n in kind.extents.items()}
    first, second = (frozenset(kind.pattern.operand_names(i)) for i in range(2))
    made = frozenset(kind.pattern.result_names)

    def points(names: frozenset[str]) -> float:
        return prod((extents[name] for name in names), start=1.0)

    m, n, k = points((first - second) & made), points((second - first) & made), points((first | second) - made)
    slid = [dim for dims in (*kind.pattern.operands, kind.pattern.result) for dim in dims if _slides(dim)]
    for dim, size in zip(kind.pattern.result, op.results[0].sizes, strict=True):
        if _slides(dim):  # many points put on one place: they are summed there
            along, across = sorted(dim.names, key=lambda name: name not in first)
            places = _number(size, sizes)
            m, n, k = m * places / extents[along], n / extents[across], k * points(frozenset(dim.names)) / places
    executed = _number(kind.flops(op).matmul, sizes)
    return Product(
        flops, points(first & second & made), m, n, k, compute_dtype(op), _windows(slid, kind.pattern, extents),
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
    # positions are a stride apart, places of a window next to each other; of two steps of one the longer is positions
    found = min((factor, extents[name], name) for dim in slid for name, factor in dim.terms)[2]
    return "kept" if found in pattern.result_names else "summed"


# -- terms -------------------------------------------------------------------------------------------------------------
# What a calibrated time depends on: terms of ops and of devices, as arrays with a row for each op.

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


# -- model -------------------------------------------------------------------------------------------------------------

SCHEMA = "costgraph/calibration/1"
"""What the JSON of this version calls itself; another number means other terms."""

SHIPPED = Path(__file__).with_name("published_gpus.json")
"""The model that comes with the library."""

#: Time in compute and in memory overlap almost whole: the larger one, and little of the other.
_OVERLAP = 3.0
#: Seconds of a launch where nothing was measured; a guess that measurements move.
_LAUNCH = 5e-6
#: Most that terms may make of a time, as a logarithm: a device that nobody saw is no thousand times slower.
_MOST = 4.0
#: No logarithm of what a device does is as large.
_LARGEST = 100
_MOST_BYTES = 2**24


class Attained(NamedTuple):
    """Times of ops, and by how much they grow with each of the sums that they are made of."""

    seconds: Array
    """of one run each"""
    work: Array
    """of these the share that is no launch"""
    matrix: Array
    """share of products in a step of the logarithm of `work`; those of vector, special and memory alike"""
    vector: Array
    special: Array
    memory: Array


def attained(rows: Rows, compute: Array, traffic: Array, launch: Array, unit: Sequence[float], near: Array) -> Attained:
    """Return the times of ops from the sums of their terms, which are logarithms.

    `compute` and `traffic` are of what products and bytes take over the peaks, `launch` of launches over a usual one,
    `unit` of pointwise and of transcendental FLOPs, `near` of what ops that are alike took over all this.
    """
    matrix = rows.matrix * np.exp(np.clip(compute, -_MOST, _MOST))
    vector, special = rows.vector * np.exp(unit[0]), rows.special * np.exp(unit[1])
    busy, memory = matrix + vector + special, rows.memory * np.exp(np.clip(traffic, -_MOST, _MOST))
    tiny = 1e-18  # of a second: an op that does nothing takes a launch
    both = (busy**_OVERLAP + memory**_OVERLAP + tiny**_OVERLAP) ** (1 / _OVERLAP)
    work = both * np.exp(np.clip(near, -_MOST, _MOST))
    seconds = work + _LAUNCH * np.exp(np.clip(launch, -_MOST, _MOST))
    in_compute = (busy / both) ** _OVERLAP / np.maximum(busy, tiny)
    return Attained(seconds, work / seconds, in_compute * matrix, in_compute * vector, in_compute * special,
                    (memory / both) ** _OVERLAP)  # fmt: skip


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
    """How good a model is: shares of measurements that it is within 25 % of."""

    rows: int
    """measurements"""
    fitted: _Number
    """share of those that it was fitted to"""
    folds: _Number
    """share where a tenth of the measurements was left out, and predicted"""
    shapes: _Number
    """share where all measurements of a tenth of the shapes and models were left out, and predicted"""
    devices: _Number
    """share where all measurements of a device were left out, and predicted"""
    families: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """the same four for each family, after how many measurements it has"""


@dataclass(frozen=True)
class Calibration:
    """What devices attain: logarithms of times over those at the peaks, as sums of terms.

    A run of an op takes a launch, and the larger of its time in compute and in memory with a little of the other. Each
    of these is that at the peaks times the exponential of a sum of terms: of which unit and format, how tiles fill the
    device, what kind of op moves the bytes, and facts of the device. A device that was measured has four terms of its
    own. What ops that are alike took over all this is the last term: of ops that are like none it is 0.
    """

    records: Text
    """file of the measurements"""
    versions: Mapping[str, str]
    """of the library, and of what it was fitted with"""
    date: Text
    """when it was fitted"""
    compute: _Table = field(repr=False)
    memory: _Table = field(repr=False)
    launch: _Table = field(repr=False)
    vector: _Number
    """of pointwise FLOPs"""
    special: _Number
    """of transcendental FLOPs, done by units that are fewer"""
    typical: _Table = field(repr=False)
    """facts of a device in the middle"""
    devices: Mapping[str, _Table] = field(repr=False)
    """by name: terms of the matrix and vector unit, of memory and of launches"""
    width: _Width
    """how far apart places of ops are that are still alike"""
    places: Annotated[Sequence[Sequence[float]], Rule(f"rows of {PLACE} numbers", _is_grid)] = field(repr=False)
    """of ops that others are compared with"""
    weights: Sequence[_Number] = field(repr=False)
    """what these take over the sum of terms"""
    figures: Figures | None = None
    """how good it is, where that was asked for"""

    def of(self, rows: Rows, device: str) -> Attained:
        """Return the times of ops on a device."""
        own = self.devices.get(device, {})
        compute, traffic, launch = (
            terms @ np.array([given.get(name, 0.0) for name in names])
            for terms, given, names in (
                (rows.compute, self.compute, COMPUTE), (rows.traffic, self.memory, MEMORY),
                (rows.launch, self.launch, LAUNCH))
        )  # fmt: skip
        for unit in range(2):
            compute += rows.compute[:, unit] * own.get(COMPUTE[unit], 0.0)
        near = alike(rows.shape, np.array(self.places), self.width) @ np.array(self.weights) if self.weights else 0.0
        return attained(rows, compute, traffic + own.get("memory", 0.0), launch + own.get("launch", 0.0),
                        (self.vector, self.special), np.asarray(near))  # fmt: skip

    def times(self, loads: Sequence[Load], rates: Rates) -> list[float]:
        """Return the time of each op, all its runs together."""
        alike = list(dict.fromkeys(loads))
        if not alike:
            return []
        rows = rows_of(alike, rates, self.typical)
        found = (self.of(rows, rates.hardware.id).seconds * rows.times).tolist()
        known = dict(zip(alike, found, strict=True))
        return [known[load] for load in loads]

    def seconds(self, loads: Sequence[Load], rates: Rates) -> float:
        """Return the time of ops on a device, one after the other."""
        return sum(self.times(loads, rates))


def alike(places: Array, others: Array, width: float) -> Array:
    """Return how much alike ops are to others: 1 where they are the same, 0 where they are far apart."""
    apart = (places**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * places @ others.T
    found: Array = np.exp(-0.5 * np.maximum(apart, 0.0) / width**2)
    return found


def loads_of(asked: Asked, phases: Sequence[str] = ()) -> list[Load]:
    """Return what each op of a graph asks of a device, all sizes put in; those of some phases where these are named."""
    works = [work for work in asked.works if not phases or work.op.phase in phases]
    return [load_of(work, asked.values) for work in works if work.times]


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Return a calibrated model of time from a file.

    Parameters
    ----------
    path : str or path-like
        JSON, as `costgraph calibrate --records` writes it.

    Raises
    ------
    FormatError
        If it cannot be read, or is no such model.
    """
    place = place_of(path)
    expected = "a model that costgraph calibrate --records writes"
    text = read_text(path, place, _MOST_BYTES, expected)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {error}, expected {expected}") from None
    if not isinstance(given, dict) or given.pop("schema", None) != SCHEMA:
        raise FormatError(f"{place}: no schema {SCHEMA}, expected {expected}")
    found = read_record(place, given, Calibration)
    missing = next((name for name in DEVICE if name not in found.typical), None)
    if missing is not None or len(found.places) != len(found.weights):
        what = f"typical has no {missing!r}" if missing else f"{len(found.places)} places, {len(found.weights)} weights"
        raise FormatError(f"{place}: {what}, expected {expected}")
    return found


@cache
def shipped() -> Calibration:
    """Return the model that comes with the library."""
    return load_calibration(SHIPPED)
