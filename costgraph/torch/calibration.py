"""What a calibration found, and the specification that is made of it."""

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
# How large the last-level cache of a device is: beyond it, memory is what is measured.

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


# -- devices -----------------------------------------------------------------------------------------------------------
# Which specification of the library is that of a device, by the name that its driver prints.

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
"""A device whose name says less than a data sheet needs, such as half of an MI250X, is not here."""


# -- probes ------------------------------------------------------------------------------------------------------------
# What is run to see how fast a device is: streams through memory, products, elementwise work and empty launches.

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats whose matrix rate is measured everywhere; tf32 is a way of CUDA devices to multiply fp32."""

_LAUNCHES = 1000


@dataclass(frozen=True)
class Probe:
    """A call that shows a rate."""

    key: tuple[str, str, str]
    """what the rate is of (`bandwidth`, `matmul`, `pointwise`, `transcendental` or `launch`), which one of these, and
    the size"""
    how: str
    """what runs, for people"""
    amount: int
    """bytes, FLOPs or launches of one call"""
    call: Callable[[], Any]
    """what is timed"""
    family: str
    """what is the same but for the size"""


def streams(pool: torch.Tensor, sizes: list[int]) -> Iterator[Probe]:
    """Yield streams through working sets, of sizes in bytes, that are the first bytes of a pool.

    Bytes are those that the cost model counts, each operand read once and each result written once. What a processor
    moves besides (a line that is read before it is overwritten) is part of how fast it appears. The pool is fp32, of
    rank one, as large as the largest set; written to before, as memory that never was is no memory.
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
            # written where it was read: a processor that fetches a line before it writes to it has it by then
            _stream("update", "a = 1 a in place", 8 * n, size, partial(x.mul_, 1.0)),
        )


def _stream(what: str, how: str, moved: int, size: int, call: Callable[[], Any]) -> Probe:
    return Probe(("bandwidth", what, str(size)), how, moved, call, f"{what} by {how}")


def products(device: torch.device, sizes: list[int]) -> Iterator[Probe]:
    """Yield square matrix products by format, smaller ones first, both ways a weight may lie, and a convolution.

    Entries are random: a device that saves power on zeros multiplies them faster than data.
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
        # cuDNN takes tf32 for fp32 convolutions unless told not to, and fp64 ones are nobody's
        if name in ("bf16", "fp16") or (name == "fp32" and device.type == "cpu"):
            yield _convolution(device, name, dtype)


def _convolution(device: torch.device, name: str, dtype: torch.dtype) -> Probe:
    # of another library than products, and faster than those on some processors
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
    """Yield elementwise work in fp32 on sets of some bytes that stay in a cache: arithmetic, and transcendentals.

    FLOPs as the cost model counts them: one for each sum and product, one for each transcendental.
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
    """Yield ops that do next to nothing, one after the other."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1)

    yield Probe(
        ("launch", "op", "1"), f"{_LAUNCHES} sums of one element, one after the other", _LAUNCHES, run, "launch"
    )


# -- spec --------------------------------------------------------------------------------------------------------------
# A specification as the text of a TOML file, in the layout that `costgraph.hardware.specs` reads.

Table = dict[str, str]
"""Entries of a table by key, as they stand in the file."""

_SCALED = {
    "FLOP/s": ("TFLOP/s", "GFLOP/s", "MFLOP/s"),
    "B/s": ("TB/s", "GB/s", "MB/s"),
    "B": ("GiB", "MiB", "KiB"),
    "s": ("s", "ms", "us", "ns"),
}
_DIGITS = 5
_ALL = 500  # of any number that a file may have: their denominators have only twos and fives in them


def _spec_text(value: str) -> str:
    # a string of JSON is one of TOML too, once DEL is written out
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _spec_text(name)


def entry(value: float, unit: str, source: str, note: str = "") -> str:
    """Return a measured number above zero, in a base unit, as it stands in a file, in a unit that people read.

    A rate is rounded up to five digits and a time down, so that no bound made of it is above what was measured. `note`
    is what a reader has to know.

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
    # bytes are counted, not measured
    precision = _ALL if unit == "B" else _DIGITS
    rounding = ROUND_FLOOR if unit == "s" else ROUND_CEILING
    return _entry(_decimal(number, Context(prec=precision, rounding=rounding)), scaled, [source], note)


def _decimal(number: Fraction, context: Context) -> str:
    quotient = context.divide(Decimal(number.numerator), Decimal(number.denominator))
    return format(context.normalize(quotient), "f")


def _entry(digits: str, unit: str, sources: list[str], note: str) -> str:
    keys = ", ".join(_spec_text(key) for key in sources)
    more = f", note = {_spec_text(note)}" if note else ""
    return f'{{ value = {digits}, unit = "{unit}", source = [{keys}]{more} }}'


def taken_over(quantity: Quantity) -> str:
    """Return a number of another specification as it stands in a file, exact and with its sources."""
    digits = _decimal(Fraction(quantity.value), Context(prec=_ALL))
    return _entry(digits, quantity.unit, quantity.source.split(", "), quantity.note)


def specification(
    name: str,
    vendor: str,
    sources: Mapping[str, str],
    tables: Mapping[str, Table],
    like: Hardware | None = None,
) -> str:
    """Return the text of a specification with references by key and entries by table; an empty table is left out.

    Numbers, types and notes of `like` are taken over where `tables` has no such entry.
    """
    known = {} if like is None else {t: {k: taken_over(q) for k, q in rows.items()} for t, rows in like.tables.items()}
    types = {} if like is None else like.types
    lines = [f"name = {_spec_text(name)}", f"vendor = {_spec_text(vendor)}"]
    if like is not None and like.arch is not None:
        lines += [f"arch = {_spec_text(like.arch)}"]
    if like is not None and like.disagreements:
        lines += ["disagreements = [", *(f"  {_spec_text(note)}," for note in like.disagreements), "]"]
    references = {**({} if like is None else like.sources), **sources}
    lines += ["", "[sources]", *(f"{_key(key)} = {_spec_text(text)}" for key, text in references.items())]
    for table in dict.fromkeys([*known, *types, *tables]):
        rows = {**known.get(table, {}), **tables.get(table, {})}
        if table in types:
            rows = {"type": _spec_text(types[table]), **rows}
        if rows:
            lines += ["", f"[{table}]", *(f"{_key(key)} = {row}" for key, row in rows.items())]
    return "\n".join(lines) + "\n"


# -- record ------------------------------------------------------------------------------------------------------------

SOURCE = "CALIBRATED"
"""Key of the source that the entries of a specification name."""

_VECTOR = "the fastest of products and elementwise work in this format: the same units do both"

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Rate:
    """How fast something ran at its fastest."""

    value: float
    """B/s, FLOP/s or launches a second"""
    how: str
    """what ran"""


@dataclass(frozen=True)
class Calibration:
    """The fastest rates that were seen on a device.

    `print` shows them, `save` writes them as a specification, `hardware` is that specification.

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
    """by what it is a rate of, which one, and the size: `("bandwidth", "read", "1048576")` in B/s"""
    cache: int | None
    """bytes of the last-level cache; None where the system does not say"""
    like: Hardware | None
    """specification that the vendor's figures are taken from"""

    def best(self, kind: str, which: str | None = None) -> Rate | None:
        """Return the fastest rate of a kind, or of one of its formats or streams; bandwidth beyond the cache.

        Parameters
        ----------
        kind : str
            bandwidth, matmul, pointwise, transcendental or launch.
        which : str, optional
            Such as read, bf16 or tanh.
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
        """Return the faster of both for every rate: a machine that was busy once was slower than it is.

        Raises
        ------
        UnsupportedError
            If the two are of different devices, numbers of threads or versions of torch.
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
        """Return the specification as the text of a TOML file."""
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
        """Write the specification, and return it as it is read from there.

        Parameters
        ----------
        path : str or path-like
            Where to, with `.toml` at its end; an existing file is replaced.

        Raises
        ------
        FormatError
            If the file cannot be written, or has another ending.
        """
        target = target_of(path, ".toml")
        write_file(target, self.text())
        return load_hardware(target)

    @property
    def hardware(self) -> Hardware:
        """The specification, as `cg.roofline` takes it; its id is `calibrated`."""
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


# -- as tables of a specification ------------------------------------------------------------------------------


def _tables(calibration: Calibration) -> dict[str, Table]:
    """Return the entries of a calibration by table and key."""
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
        # elementwise work is measured in fp32 alone
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


# -- calibration -------------------------------------------------------------------------------------------------------
# Measuring the fastest rates that torch attains on a device.

_ELEMENTWISE = [2**15, 2**18]  # bytes: in the first and in the second cache of a processor
_ROUNDS = 3
_LONGEST = 0.4  # s: no product that takes longer than this is started


def calibrate(
    device: str | torch.device = "cpu",
    *,
    quick: bool = False,
    like: str | os.PathLike[str] | Hardware | None = None,
    progress: bool | None = None,
    command: str | None = None,
) -> Calibration:
    """Measure what a device attains: bandwidth, matrix rates by format, elementwise work and launches.

    Everything is run in several rounds and the fastest run counts, as others may be busy on the machine.

    Parameters
    ----------
    device : str or torch.device
        cpu or cuda. A processor is measured with the threads that torch has now.
    quick : bool
        Fewer sizes and shorter rounds: some 15 s on two cores, where all of it takes a minute or two.
    like : str, path-like or Hardware, optional
        Specification that the vendor's figures are taken from; by default that of the library whose device has this
        name, if there is one. Without one the attained rates stand in their places.
    progress : bool, optional
        Whether a line shows how far it is; by default where the standard error is a terminal.
    command : str, optional
        What the file names as the way to measure this again; by default the words this process was started with.

    Returns
    -------
    Calibration
        `.save("my-gpu.toml")` writes the specification, `.hardware` is what `cg.roofline` takes.

    Raises
    ------
    UnsupportedError
        If there is no such device.
    SpecError
        If there is no such specification, or it was calibrated itself.

    Notes
    -----
    The attained bandwidth is the fastest of all streams (read, write, copy, triad, update in place) over working sets
    of twice the last-level cache and more, in bytes as the cost model counts them. Which stream that is depends on
    the device: a processor that fetches a line before it writes to it is fastest where it updates in place.
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
    """Probes that are run again and again, the fastest run of each kept."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self.device, self.budget = device, budget
        self.rates: dict[Key, Rate] = {}
        self.families: dict[str, float] = {}

    def run(self, probe: Probe) -> None:
        """Time a probe, unless smaller ones of its family say that it would take long, or it did."""
        known = self.families.get(probe.family)
        if known is not None and probe.amount / known > _LONGEST:
            return
        try:
            seconds = timed(probe.call, self.device, least=2, most=10**5, budget=self.budget).min
        except RuntimeError:
            if probe.key[0] != "matmul":
                raise
            return  # torch has no such product on this device, and so there is no rate of it
        rate = probe.amount / max(seconds, 1e-9)  # no clock is finer
        self.families[probe.family] = max(rate, known or rate)
        if probe.key not in self.rates or rate > self.rates[probe.key].value:
            self.rates[probe.key] = Rate(rate, probe.how)
