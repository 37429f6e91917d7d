"""Collectives in a torus: rings of devices, one for each dimension, with a link to either side and no switches."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from math import prod
from typing import NamedTuple

from ..algebra.polynomial import ZERO, Poly, poly
from ..errors import SpecError, UnsupportedError
from ..hardware.links import extents, wire
from ..hardware.specs import Hardware

__all__ = ["around", "covered", "least_around"]


class _Dimension(NamedTuple):
    """What a group of ranks has of a dimension: the whole ring, or devices of it in a line."""

    devices: int
    latency: Fraction
    """s of a message over one link, beside its bytes"""
    bandwidth: Fraction
    """B/s of one link in each direction"""
    links: int
    """over which a device at the end receives: two of a ring, one of a line"""

    @property
    def rate(self) -> Fraction:
        """B/s that a device at the end receives."""
        return self.links * self.bandwidth

    @property
    def hops(self) -> int:
        """Links between the two devices that are the furthest from each other."""
        return self.devices // 2 if self.links == 2 else self.devices - 1

    @property
    def crossed(self) -> Fraction:
        """Seconds for each byte that a rank sends to all alike: half of them cross the middle."""
        return self.devices**2 // 4 / (self.devices * self.rate)


def covered(name: str, ranks: Poly, apart: Poly, hardware: Hardware) -> tuple[tuple[str, Poly], ...]:
    """Return the dimensions that ranks lie along, and how many of each: the first dimension is filled first.

    From one rank to the next are `apart` devices. UnsupportedError if a degree is open, since which rings there are
    depends on it; SpecError if ranks fill whole dimensions and devices in a line of one more in no way: they start in
    the middle of a dimension, where several groups would share its links, or end there in the middle of a row.
    """
    place, has = f"time of {name!r}", f"{ranks} ranks that are {apart} apart"
    if ranks.constant is None or apart.constant is None:
        raise UnsupportedError(f"{place}: {has} in a torus, expected numbers: its rings depend on them")
    first, end, low, out = apart.constant, apart.constant * ranks.constant, 1, []
    for dimension, high in extents(hardware):
        assert high is not None
        start, stop = max(low, min(first, high)), max(low, min(end, high))
        if start != stop and (start != low or stop % low):
            size = high // low
            raise SpecError(
                f"{place}: {has}, expected whole dimensions of the torus, and the first devices of one more: these "
                f"have {stop / start:g} of the {size} devices along {dimension}, {start / low:g} apart"
            )
        out.append((dimension, poly(stop) / start))
        low = high
    if end > low and ranks.constant > 1:
        raise SpecError(f"{place}: {has}, expected the {low:,} devices that the torus joins at most")
    return tuple((dimension, count) for dimension, count in out if count.constant != 1) or tuple(out[:1])


def _dimensions(levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> dict[str, _Dimension]:
    assert hardware.cluster is not None
    rings, inside = {}, 1
    for name, level in hardware.cluster.levels.items():
        reached = int(level["devices"].number)
        rings[name] = level["ring"].number if "ring" in level else reached // inside
        inside = reached
    out = {}
    for name, many in levels:
        count, link = _number(many), wire(hardware, name)
        links = 2 if 2 < count == rings[name] else 1  # two devices have one link between them
        if count != 1:
            out[name] = _Dimension(int(count), _number(link.latency), _number(link.bandwidth), links)
    return out


def _number(p: Poly) -> Fraction:
    assert p.constant is not None
    return Fraction(p.constant)


def _gathered(found: dict[str, _Dimension]) -> tuple[tuple[str, ...], int, Fraction]:
    """Return the dimensions that an all-gather is bound by, how many devices are along these, and seconds for a byte.

    Devices that differ in other dimensions alone have a whole together, of which all but one part of P comes from
    outside, over their links along these dimensions.
    """
    n = prod(d.devices for d in found.values())
    best: tuple[tuple[str, ...], int, Fraction] = ((), 1, Fraction(0))
    for some in (names for k in range(len(found), 0, -1) for names in combinations(found, k)):
        along = prod(found[name].devices for name in some)
        spent = Fraction(along - 1, n) / sum(found[name].rate for name in some)
        if spent > best[2]:
            best = some, along, spent
    return best


def around(collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> Poly:
    """Return the seconds that a collective, or a send, takes once in a torus, over levels as `covered` returns them.

    The bytes are of the whole that is gathered or reduced, and of what a rank sends otherwise.

    Parts go around a ring both ways at once, dimension after dimension. With d dimensions, the orders of these run at
    the same time with a share of the bytes each, chosen so that all links are busy to the end: (n - 1)/n of the bytes
    over all links of a device. Shares that do so exist if and only if no set of dimensions needs longer (orders give
    loads that are the base polytope of a submodular function), so that the time is the longest over all sets. An
    all-reduce is a reduce-scatter and an all-gather. In an all-to-all, messages between the halves of a dimension cross
    it at two places of a ring and at one of a line; the longest dimension takes as long as all.
    """
    found = _dimensions(levels, hardware)
    if not found:
        return ZERO
    latency = sum(d.hops * d.latency for d in found.values())
    if collective == "send":  # to a neighbour, along any of them
        slowest = min(found.values(), key=lambda d: d.bandwidth)
        return slowest.latency + size / slowest.bandwidth
    if collective == "all_to_all":
        return latency + size * max(d.crossed for d in found.values())
    once = latency + size * _gathered(found)[2]
    return 2 * once if collective == "all_reduce" else once


def least_around(
    collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware
) -> dict[str, Poly]:
    """Return the least seconds that a collective keeps links along dimensions busy; parameters as `around`.

    Of a sum that devices share each number has to come from outside once. Of an all-to-all in a line, the device at its
    end counts, and not the middle, so that times of several collectives are those of the same links.
    """
    found = _dimensions(levels, hardware)
    if not found:
        return {}
    names, along, spent = _gathered(found)
    if collective == "all_to_all":
        name, longest = max(found.items(), key=lambda item: item[1].crossed)
        at_end = (longest.devices - 1) / (longest.devices * longest.rate)
        return {name: size * (longest.crossed if longest.links == 2 else at_end)}
    if collective == "send":  # half of it may go around the other way
        return {"+".join(found): size / (2 * sum(d.rate for d in found.values()))}
    return {"+".join(names): size * spent * (Fraction(along, along - 1) if collective == "all_reduce" else 1)}
