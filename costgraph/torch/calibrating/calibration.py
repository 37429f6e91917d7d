"""Measuring the fastest rates that torch attains on a device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ...errors import SpecError
from ...hardware.specs import Hardware, load_hardware
from ..measuring import environment, progressing, timed
from ..measuring.clock import collector_off
from ..measuring.environment import find_device, memory_bytes
from .caches import last_level_cache, working_sets
from .devices import BUILT_IN
from .probes import Probe, elementwise, launches, products, streams
from .record import SOURCE, Calibration, Key, Rate

__all__ = ["calibrate"]

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
