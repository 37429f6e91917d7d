"""What a calibration found, and the specification that is made of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UnsupportedError
from ...hardware.specs import Hardware, load_hardware
from ...hardware.units import format_quantity
from ...text_file import target_of, write_file
from ..measuring.environment import counted
from .spec import Table, entry, specification

__all__ = ["SOURCE", "Calibration", "Key", "Rate"]

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
