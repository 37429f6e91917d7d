"""Measure the attained rates of a device, and write them as a hardware specification."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import conv2d

from ..errors import SpecError, UnsupportedError
from ..hardware.specs import Hardware, load_hardware
from ..hardware.units import UNITS, Quantity, format_quantity
from ..notation.progress import progressing
from ..text_file import target_of, write_file
from .measurement import collector_off, counted, environment, find_device, memory_bytes, timed

__all__ = [
    "last_level_cache",
    "working_sets",
    "BUILT_IN",
    "FORMATS",
    "Probe",
    "elementwise",
    "launches",
    "products",
    "streams",
    "Table",
    "entry",
    "specification",
    "taken_over",
    "SOURCE",
    "Calibration",
    "Key",
    "Rate",
    "calibrate",
]


# -- caches ------------------------------------------------------------------------------------------------------------
# Memory bandwidth must be measured beyond the last-level cache.

_CPUS = Path("/sys/devices/system/cpu")
_ASSUMED = 64 * 2**20
"""bytes, if the system does not report a size: more than most machines have per processor"""

_MOST = 2**32  # a container may have far less memory than its machine


def last_level_cache(device: torch.device, cpus: Path = _CPUS) -> int | None:
    """Return the total bytes of a device's last-level caches, or None if unknown.

    `cpus` is Linux' sysfs folder of processors.
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
    """Return the working sets to measure in bytes: within the last-level cache, and beyond it.

    Larger sets have at least twice its size, up to 4 GiB and an eighth of the memory. At twice the size some hits
    remain, so the fastest bandwidth is biased upwards.

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


# -- built-in devices --------------------------------------------------------------------------------------------------
# Specifications by driver name.

BUILT_IN = {
    "NVIDIA A10": "a10",
    "NVIDIA A30": "a30",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA A100-SXM4-40GB": "a100-40-sxm",
    "NVIDIA A100 80GB PCIe": "a100-80-pcie",
    "NVIDIA A100-SXM4-80GB": "a100-80-sxm",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
}
"""excludes devices whose name is ambiguous, such as half of an MI250X"""


# -- probes ------------------------------------------------------------------------------------------------------------

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""formats measured on every device; tf32 is a mode of fp32 matmuls on CUDA"""

_LAUNCHES = 1000


@dataclass(frozen=True)
class Probe:
    """A call that reveals a rate."""

    key: tuple[str, str, str]
    """(`bandwidth`, `matmul`, `pointwise`, `transcendental` or `launch`; format or stream; size)"""
    how: str
    """description"""
    amount: int
    """bytes, FLOPs or launches per call"""
    call: Callable[[], Any]
    """the timed call"""
    family: str
    """probes that differ only in size"""


def streams(pool: torch.Tensor, sizes: list[int]) -> Iterator[Probe]:
    """Yield memory streams over working sets (in bytes) at the start of a pool.

    Bytes are counted as in the cost model: each operand is read once, each result written once. Extra traffic, such as
    write-allocate, lowers the apparent bandwidth. The pool is a 1-D fp32 tensor with the size of the largest set. It
    must have been written, because untouched pages are not backed by memory.
    """
    for size in sizes:
        x = pool[: size // 4]
        n, h, t = len(x), len(x) // 2, len(x) // 3
        a, b, c = (x[i * t : (i + 1) * t] for i in range(3))
        total, largest = x.new_empty(()), x.new_empty(())
        yield from (
            _stream("read", "sum", 4 * n, size, partial(torch.sum, x, 0, out=total)),
            _stream("read", "amax", 4 * n, size, partial(torch.amax, x, 0, out=largest)),
            _stream("write", "fill", 4 * n, size, partial(x.fill_, 0.5)),
            _stream("copy", "copy", 8 * h, size, partial(x[:h].copy_, x[h : 2 * h])),
            _stream("triad", "a = b + 2 c", 12 * t, size, partial(torch.add, b, c, alpha=2, out=a)),
            # in place, so that write-allocate needs no extra traffic
            _stream("update", "a = 1 a in place", 8 * n, size, partial(x.mul_, 1.0)),
        )


def _stream(what: str, how: str, moved: int, size: int, call: Callable[[], Any]) -> Probe:
    return Probe(("bandwidth", what, str(size)), how, moved, call, f"{what} by {how}")


def products(device: torch.device, sizes: list[int]) -> Iterator[Probe]:
    """Yield square matmuls by format (smaller first, with both weight layouts), and a convolution.

    Entries are random, because some devices save power on zeros and run faster.
    """
    formats = [*FORMATS, "tf32"] if device.type == "cuda" else [*FORMATS]
    for name in formats:
        precision = "high" if name == "tf32" else "highest"
        dtype = FORMATS.get(name, torch.float32)
        for n in sizes:
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            for way, right in (("a @ b", b), ("a @ b.T", b.T)):
                call = partial(_product, precision, a, right)
                yield Probe(("matmul", name, str(n)), f"{way} of {n} x {n}", 2 * n**3, call, f"{name} {way}")
        # skip fp32 on CUDA, where cuDNN uses tf32 by default, and fp64, which is unused
        if name in ("bf16", "fp16") or (name == "fp32" and device.type == "cpu"):
            yield _convolution(device, name, dtype)


def _convolution(device: torch.device, name: str, dtype: torch.dtype) -> Probe:
    # convolutions use another library than matmuls, which is faster on some processors
    b, c, edge = (2, 256, 28) if device.type == "cpu" else (64, 256, 56)
    image = torch.randn(b, c, edge, edge, device=device).to(dtype)
    window = torch.randn(c, c, 3, 3, device=device).to(dtype)
    flops = 2 * b * c * c * 9 * (edge - 2) ** 2
    how = f"3 x 3 convolution of {b} images of {edge} x {edge} with {c} channels"
    return Probe(("matmul", name, "convolution"), how, flops, partial(conv2d, image, window), f"{name} convolution")


def _product(precision: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def elementwise(device: torch.device, sizes: list[int]) -> Iterator[Probe]:
    """Yield cache-resident elementwise work in fp32: arithmetic and transcendentals. `sizes` are in bytes.

    FLOPs are counted as in the cost model: one per addition, multiplication or transcendental.
    """
    for size in sizes:
        n = size // 16
        x, y, z, out = (torch.rand(n, device=device) + 0.5 for _ in range(4))
        yield _elementwise("pointwise", "add", n, 1, partial(torch.add, x, y, out=out))
        yield _elementwise("pointwise", "addcmul", n, 2, partial(torch.addcmul, x, y, z, out=out))
        for name in ("exp", "log", "tanh", "erf", "sin"):
            yield _elementwise("transcendental", name, n, 1, partial(getattr(torch, name), x, out=out))


def _elementwise(kind: str, name: str, n: int, each: int, call: Callable[[], Any]) -> Probe:
    return Probe((kind, name, str(16 * n)), f"{name} of {n} elements", each * n, call, name)


def launches(device: torch.device) -> Iterator[Probe]:
    """Yield sequences of trivial ops."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    yield Probe(
        ("launch", "op", "1"), f"{_LAUNCHES} sums of one element, one after the other", _LAUNCHES, run, "launch"
    )


# -- specification -----------------------------------------------------------------------------------------------------
# Writes the TOML layout that `costgraph.hardware.specs` reads.

Table = dict[str, str]
"""TOML text by key"""

_SCALED = {
    "FLOP/s": ("TFLOP/s", "GFLOP/s", "MFLOP/s"),
    "B/s": ("TB/s", "GB/s", "MB/s"),
    "B": ("GiB", "MiB", "KiB"),
    "s": ("s", "ms", "us", "ns"),
}
_DIGITS = 5
_ALL = 500  # enough for any number in a specification: denominators have only factors 2 and 5


def _toml_string(value: str) -> str:
    # JSON strings are valid TOML once DEL is escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_string(name)


def entry(value: float, unit: str, source: str, note: str = "") -> str:
    """Format a positive measured number, given in a base unit, as a TOML entry with a readable unit.

    Rates are rounded up to five digits and times down, so that lower bounds stay below the measurement. `note` is for
    readers.

    Examples
    --------
    >>> print(entry(29_312_345_678.9, "B/s", "RUN"))
    { value = 29.313, unit = "GB/s", source = ["RUN"] }
    >>> print(entry(2.38629e-6, "s", "RUN"))
    { value = 2.3862, unit = "us", source = ["RUN"] }
    """
    exact = Fraction(value)
    scaled = next((u for u in _SCALED[unit] if exact >= UNITS[u][0]), _SCALED[unit][-1])
    number = exact / UNITS[scaled][0]
    # bytes are exact
    precision = _ALL if unit == "B" else _DIGITS
    rounding = ROUND_FLOOR if unit == "s" else ROUND_CEILING
    return _entry(_decimal(number, Context(prec=precision, rounding=rounding)), scaled, [source], note)


def _decimal(number: Fraction, context: Context) -> str:
    quotient = context.divide(Decimal(number.numerator), Decimal(number.denominator))
    return format(context.normalize(quotient), "f")


def _entry(digits: str, unit: str, sources: list[str], note: str) -> str:
    keys = ", ".join(_toml_string(key) for key in sources)
    more = f", note = {_toml_string(note)}" if note else ""
    return f'{{ value = {digits}, unit = "{unit}", source = [{keys}]{more} }}'


def taken_over(quantity: Quantity) -> str:
    """Format a number from another specification as a TOML entry, exactly and with its sources."""
    digits = _decimal(Fraction(quantity.value), Context(prec=_ALL))
    return _entry(digits, quantity.unit, quantity.source.split(", "), quantity.note)


def specification(
    name: str,
    vendor: str,
    sources: Mapping[str, str],
    tables: Mapping[str, Table],
    like: Hardware | None = None,
) -> str:
    """Return a specification as TOML, with sources by key and entries by table. Empty tables are omitted.

    Numbers, types and notes missing from `tables` are copied from `like`.
    """
    known = {} if like is None else {t: {k: taken_over(q) for k, q in rows.items()} for t, rows in like.tables.items()}
    types = {} if like is None else like.types
    lines = [f"name = {_toml_string(name)}", f"vendor = {_toml_string(vendor)}"]
    if like is not None and like.arch is not None:
        lines += [f"arch = {_toml_string(like.arch)}"]
    if like is not None and like.disagreements:
        lines += ["disagreements = [", *(f"  {_toml_string(note)}," for note in like.disagreements), "]"]
    references = {**({} if like is None else like.sources), **sources}
    lines += ["", "[sources]", *(f"{_key(key)} = {_toml_string(text)}" for key, text in references.items())]
    for table in dict.fromkeys([*known, *types, *tables]):
        rows = {**known.get(table, {}), **tables.get(table, {})}
        if table in types:
            rows = {"type": _toml_string(types[table]), **rows}
        if rows:
            lines += ["", f"[{table}]", *(f"{_key(key)} = {row}" for key, row in rows.items())]
    return "\n".join(lines) + "\n"


# -- result ------------------------------------------------------------------------------------------------------------

SOURCE = "CALIBRATED"
"""key of the calibration in the sources of entries"""

_VECTOR = "the fastest of products and elementwise work in this format: the same units do both"

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Rate:
    """The fastest observed rate."""

    value: float
    """B/s, FLOP/s or launches a second"""
    how: str
    """description of the probe"""


@dataclass(frozen=True)
class Calibration:
    """Fastest observed rates of a device.

    Print it, `save` it as a specification, or pass `.hardware` to analyses.

    Examples
    --------
    >>> from costgraph.torch import environment
    >>> rates = {("bandwidth", "read", "1073741824"): Rate(2e10, "sum"), ("matmul", "fp32", "256"): Rate(1e11, "a @ b")}
    >>> found = Calibration(environment("cpu"), rates, cache=None, like=None).hardware
    >>> print(found.rate("fp32"), found.bandwidth, found.ridge("fp32"), sep=" | ")
    100 GFLOP/s | 20 GB/s | 5
    """

    environment: Mapping[str, str | int | bool]
    """device, versions, threads, date and command"""
    rates: Mapping[Key, Rate]
    """rates by kind, format or stream, and size: `("bandwidth", "read", "1048576")` in B/s"""
    cache: int | None
    """bytes of last-level cache; None if unknown"""
    like: Hardware | None
    """specification with the vendor's figures"""

    def best(self, kind: str, which: str | None = None) -> Rate | None:
        """Return the fastest rate of a kind, optionally of one format or stream; bandwidth only beyond the cache.

        Parameters
        ----------
        kind : str
            "bandwidth", "matmul", "pointwise", "transcendental" or "launch".
        which : str, optional
            Format, stream or function, such as "read", "bf16" or "tanh".
        """
        beyond = min(2 * self.cache, self._largest) if self.cache else self._largest
        found = [
            rate
            for (of, one, size), rate in self.rates.items()
            if of == kind and which in (None, one) and (of != "bandwidth" or int(size) >= beyond)
        ]
        return max(found, key=lambda r: r.value, default=None)

    @property
    def _largest(self) -> int:
        return max((int(size) for of, _, size in self.rates if of == "bandwidth"), default=0)

    def faster(self, other: Calibration) -> Calibration:
        """Return the faster of both for every rate, because a busy machine is slower.

        Raises
        ------
        UnsupportedError
            If the devices, thread counts or torch versions differ.
        """
        for name in ("name", "threads", "torch"):
            here, there = self.environment[name], other.environment[name]
            if here != there:
                raise UnsupportedError(
                    f"calibration: {name} {here} and {there}, expected two of one device and setting"
                )
        rates = dict(self.rates)
        for key, rate in other.rates.items():
            rates[key] = max(rates.get(key, rate), rate, key=lambda r: r.value)
        return replace(self, rates=rates)

    def text(self) -> str:
        """Return the specification as TOML."""
        of = self.environment
        source = (
            f"costgraph calibrate on {of['name']}, {counted(of['threads'])}, torch {of['torch']}, "
            f"Python {of['python']}, {of['platform']}, {of['date']}; command: {of['command']}"
        )
        tables = _tables(self)
        name = str(of["name"]) + (f", {counted(of['threads'])}" if of["device"] == "cpu" else "")
        name, vendor = (name, _vendor(name)) if self.like is None else (self.like.name, self.like.vendor)
        return specification(name, vendor, {SOURCE: source}, tables, self.like)

    def save(self, path: str | os.PathLike[str]) -> Hardware:
        """Write the specification and return it as read back.

        Parameters
        ----------
        path : str or path-like
            Path with extension `.toml`. Existing files are replaced.

        Raises
        ------
        FormatError
            If the file cannot be written or has another extension.
        """
        target = target_of(path, ".toml")
        write_file(target, self.text())
        return load_hardware(target)

    @property
    def hardware(self) -> Hardware:
        """The specification for `cg.roofline`, with id `calibrated`."""
        with tempfile.TemporaryDirectory() as folder:
            return self.save(Path(folder) / "calibrated.toml")

    def __str__(self) -> str:
        of = self.environment
        lines = [f"{of['name']}, {counted(of['threads'])}, torch {of['torch']}, {of['date']}"]
        for kind, unit in (("bandwidth", "B/s"), ("matmul", "FLOP/s"), ("pointwise", "FLOP/s")):
            for which in dict.fromkeys(one for of_, one, _ in self.rates if of_ == kind):
                found = self.best(kind, which)
                if found is not None:
                    lines.append(f"{kind:10} {which:8} {format_quantity(found.value, unit):>14}   {found.how}")
        launch = self.best("launch")
        if launch is not None:
            lines.append(f"{'launch':19} {format_quantity(1 / launch.value, 's'):>14}")
        return "\n".join(lines)


def _vendor(name: str) -> str:
    known = ("NVIDIA", "AMD", "Intel", "Apple", "Arm", "Ampere", "Qualcomm", "IBM")
    return next((v for v in known if v.lower() in name.lower()), "unknown")


# -- result: specification tables --------------------------------------------------------------------------------------


def _tables(calibration: Calibration) -> dict[str, Table]:
    """Return the entries by table and key."""
    attained = _attained(calibration)
    bytes_ = int(calibration.environment["memory_bytes"])
    tables: dict[str, Table] = {"peak": {}, "vector": {}, "memory": {"measured": entry(bytes_, "B", SOURCE)}}
    if calibration.like is None:
        vectors = {key.removeprefix("vector_"): e for key, e in attained.items() if key.startswith("vector_")}
        peaks = {key: e for key, e in attained.items() if key not in ("bandwidth", "launch") and key[:7] != "vector_"}
        memory = {"capacity": entry(bytes_, "B", SOURCE, "all that the system shows"), **tables["memory"]}
        tables |= {"peak": peaks, "vector": vectors, "memory": {**memory, "bandwidth": attained["bandwidth"]}}
        if calibration.cache:
            tables["cache"] = {"last_level": entry(calibration.cache, "B", SOURCE)}
    return tables | {"attained": attained, "measured": _measured(calibration)}


def _attained(calibration: Calibration) -> Table:
    out: Table = {}
    for dtype in dict.fromkeys(which for kind, which, _ in calibration.rates if kind == "matmul"):
        best = calibration.best("matmul", dtype)
        if best is not None:
            out[dtype] = entry(best.value, "FLOP/s", SOURCE, best.how)
    for dtype in ("fp64", "fp32"):
        # elementwise work is only measured in fp32
        kinds = ("matmul", "pointwise") if dtype == "fp32" else ("matmul",)
        found = [calibration.best(kind, dtype if kind == "matmul" else None) for kind in kinds]
        fastest = max((r for r in found if r is not None), key=lambda r: r.value, default=None)
        if fastest is not None:
            out[f"vector_{dtype}"] = entry(fastest.value, "FLOP/s", SOURCE, f"{_VECTOR}; {fastest.how}")
    bandwidth = calibration.best("bandwidth")
    if bandwidth is not None:
        note = f"{bandwidth.how}, the fastest stream beyond the last-level cache"
        out["bandwidth"] = entry(bandwidth.value, "B/s", SOURCE, note)
    launch = calibration.best("launch")
    if launch is not None:
        out["launch"] = entry(1 / launch.value, "s", SOURCE, launch.how)
    return out


def _measured(calibration: Calibration) -> Table:
    out: Table = {}
    for kind, which, size in calibration.rates:
        rate = calibration.rates[kind, which, size]
        if kind == "bandwidth":
            label, sets = _size(int(size)), [r for (k, _, s), r in calibration.rates.items() if (k, s) == (kind, size)]
            fastest = max(sets, key=lambda r: r.value)
            out[f"bandwidth_{label}"] = entry(fastest.value, "B/s", SOURCE, f"working set of {label}; {fastest.how}")
        elif kind == "matmul":
            out[f"matmul_{which}_{size}"] = entry(rate.value, "FLOP/s", SOURCE, rate.how)
    for kind in ("bandwidth", "pointwise", "transcendental"):
        unit, where = (
            ("B/s", "beyond the last-level cache; ") if kind == "bandwidth" else ("FLOP/s", "within a cache; ")
        )
        for which in dict.fromkeys(one for of, one, _ in calibration.rates if of == kind):
            best = calibration.best(kind, which)
            if best is not None:
                out[f"{kind}_{which}"] = entry(best.value, unit, SOURCE, where + best.how)
    return out


def _size(n: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n % 2**power == 0:
            return f"{n >> power}{unit}"
    return f"{n}B"


# -- measurement -------------------------------------------------------------------------------------------------------

_ELEMENTWISE = [2**15, 2**18]  # bytes: fits the L1 and L2 cache of a processor
_ROUNDS = 3
_LONGEST = 0.4  # s: skip matmuls that take longer


def calibrate(
    device: str | torch.device = "cpu",
    *,
    quick: bool = False,
    like: str | os.PathLike[str] | Hardware | None = None,
    progress: bool | None = None,
    command: str | None = None,
) -> Calibration:
    """Measure the attained rates of a device: bandwidth, matmuls by format, elementwise work and launches.

    Takes the fastest of several rounds, because other processes may use the machine.

    Parameters
    ----------
    device : str or torch.device
        "cpu" or "cuda". A CPU is measured with torch's current number of threads.
    quick : bool
        Fewer sizes and shorter rounds: about 15 s on two cores, instead of one or two minutes.
    like : str, path-like or Hardware, optional
        Specification with the vendor's figures, by default the built-in one with this device name. Without one the
        attained rates are used.
    progress : bool, optional
        Whether to show progress, by default if standard error is a terminal.
    command : str, optional
        Command to record for reproduction, by default this process's command line.

    Returns
    -------
    Calibration
        `.save("my-gpu.toml")` writes the specification; `.hardware` is for `cg.roofline`.

    Raises
    ------
    UnsupportedError
        If the device does not exist.
    SpecError
        If the specification does not exist, or is itself a calibration.

    Notes
    -----
    The attained bandwidth is that of the fastest stream (read, write, copy, triad, update in place). Working sets have
    at least twice the size of the last-level cache, and bytes are counted as in the cost model. The fastest stream
    depends on the device: with write-allocate caches it is the update in place.
    """
    where = find_device(device)
    name = BUILT_IN.get(str(environment(where)["name"])) if like is None and where.type == "cuda" else like
    known = None if name is None else load_hardware(name)
    if known is not None and SOURCE in known.sources:
        raise SpecError(f"hardware {known.id}: it was calibrated itself, expected a data sheet to be like")
    cache = last_level_cache(where)
    rounds = _Rounds(where, budget=0.02 if quick else 0.1)
    with torch.no_grad(), collector_off():
        probes = list(_probes(where, cache, quick))
        with progressing("calibrate", _ROUNDS * len(probes), progress) as step:
            for probe in probes * _ROUNDS:
                step(" ".join(probe.key[:2]))
                rounds.run(probe)
    return Calibration(environment(where, command), rounds.rates, cache, known)


def _probes(device: torch.device, cache: int | None, quick: bool) -> Iterator[Probe]:
    within, beyond = working_sets(cache, memory_bytes(device), quick)
    sizes = [256, 1024] if quick else [128, 256, 512, 1024, 2048]
    if device.type == "cuda":
        sizes = [1024, 4096] if quick else [512, 1024, 2048, 4096, 8192]
    pool = torch.rand(max(within + beyond) // 4, device=device)
    yield from launches(device)
    yield from elementwise(device, _ELEMENTWISE if device.type == "cpu" else [2**24, 2**27])
    yield from products(device, sizes)
    yield from streams(pool, within + beyond)


class _Rounds:
    """Repeats probes, and keeps the fastest run of each."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget = device, budget
        self.rates: dict[Key, Rate] = {}
        self.families: dict[str, float] = {}

    def run(self, probe: Probe) -> None:
        """Time a probe, unless smaller ones of its family predict too long a run."""
        known = self.families.get(probe.family)
        if known is not None and probe.amount / known > _LONGEST:
            return
        try:
            seconds = timed(probe.call, self.device, least=2, most=10**5, budget=self.budget).min
        except RuntimeError:
            if probe.key[0] != "matmul":
                raise
            return  # torch does not support this matmul on the device
        rate = probe.amount / max(seconds, 1e-9)  # clock resolution
        self.families[probe.family] = max(rate, known or rate)
        if probe.key not in self.rates or rate > self.rates[probe.key].value:
            self.rates[probe.key] = Rate(rate, probe.how)
