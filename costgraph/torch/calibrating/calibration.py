"""Calibration: the fastest rates that torch attains on a device, and the specification that is made of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...errors import FormatError, SpecError, UnsupportedError
from ...hardware.specs import Hardware, load_hardware
from ...hardware.units import format_quantity
from ...text_file import write_file
from ..measuring import environment, progressing, timed
from ..measuring.clock import collector_off
from ..measuring.environment import counted, find_device, memory_bytes
from .caches import last_level_cache, working_sets
from .devices import BUILT_IN
from .probes import Probe, elementwise, launches, products, streams
from .spec import specification
from .tables import tables_of

__all__ = ["Calibration", "Rate", "calibrate", "check_target"]

_SOURCE = "CALIBRATED"
_ELEMENTWISE = [2**15, 2**18]  # bytes: in the first and in the second cache of a processor
_ROUNDS = 3
_LONGEST = 0.4  # s: no product that takes longer than this is started

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
        tables = tables_of(self, _SOURCE)
        name = str(of["name"]) + (f", {counted(of['threads'])}" if of["device"] == "cpu" else "")
        name, vendor = (name, _vendor(name)) if self.like is None else (self.like.name, self.like.vendor)
        return specification(name, vendor, {_SOURCE: source}, tables, self.like)

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
        target = check_target(path)
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


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of a specification that is to be written.

    Raises
    ------
    FormatError
        If it does not end in `.toml`, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix != ".toml":
        raise FormatError(f"{target}: expected a path that ends in .toml, as a specification is read from there")
    if not target.parent.is_dir():
        raise FormatError(f"{target}: no such folder, expected a file that can be written")
    return target


def _vendor(name: str) -> str:
    known = ("NVIDIA", "AMD", "Intel", "Apple", "Arm", "Ampere", "Qualcomm", "IBM")
    return next((v for v in known if v.lower() in name.lower()), "unknown")


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
    if known is not None and _SOURCE in known.sources:
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
