"""Links between devices: those of a domain that reach each other fast, and the network between domains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from costgraph.algebra.polynomial import Poly, poly
from costgraph.errors import SpecError
from costgraph.hardware.file import PER_LINK
from costgraph.hardware.networks import Network, load_network
from costgraph.hardware.specs import Hardware, load_hardware

__all__ = ["Wire", "domain_of", "extents", "joined", "wire"]


class Wire(NamedTuple):
    """What a message over a link costs: so long in any case, and so long for each byte."""

    name: str
    """interconnect, network or a level of one"""
    latency: Poly
    """s from the start of a message to the arrival of its first byte"""
    bandwidth: Poly
    """B/s that a device sends, and as many that it receives at the same time"""
    pair: Poly
    """B/s of these from one device to one other"""


def joined(hardware: str | Hardware, network: str | Network | None) -> Hardware:
    """Return a device in a network, as both are named; None: its cards reach any other one at the same rate.

    SpecError if there is no such device or network.
    """
    device = load_hardware(hardware)
    return device if network is None else replace(device, cluster=load_network(network))


def domain_of(hardware: Hardware) -> int:
    """Return how many devices an interconnect joins: 1 where the specification has no interconnect.

    SpecError if there is an interconnect, and it is not said how many devices it joins, or that is no whole number.
    """
    table = hardware.tables.get("interconnect", {})
    if not table:
        return 1
    if "domain" not in table:
        raise SpecError(
            f"hardware {hardware.id}: interconnect.domain is missing; expected how many devices its interconnect joins"
        )
    found = table["domain"].number
    if not isinstance(found, int) or found < 1:
        raise SpecError(f"hardware {hardware.id}: interconnect.domain is {found}, expected a whole number above 0")
    return found


def extents(hardware: Hardware) -> Iterator[tuple[str, int | None]]:
    """Yield the links of a device, the nearest first, and how many devices each joins: None where there is no end.

    SpecError as `domain_of`, or if a level of its network joins fewer devices than what is below it.
    """
    if hardware.cluster is not None and hardware.cluster.torus:  # its links are the interconnect
        least = 1
    else:
        least = domain_of(hardware)
        yield "interconnect", least
    if hardware.cluster is None:
        yield "network", None
        return
    for name, level in hardware.cluster.levels.items():
        found = int(level["devices"].number)
        if found < least:
            raise SpecError(
                f"network {hardware.cluster.id}: {name}.devices is {found}, expected {least} of {hardware.id} or more"
            )
        yield name, found


def wire(hardware: Hardware, name: str) -> Wire:
    """Return the interconnect of a device, its network, or a level of the network that it is in.

    A level has the rates of [network] where it states none; a dimension of a torus has the rate of one link. Where a
    device has one link less than there are devices in its domain, each of these has a link of its own, with its part of
    the bandwidth; else a switch hands all of the bandwidth to any. SpecError if it has no such link, or bandwidth or
    latency of it are not stated.

    Examples
    --------
    >>> import costgraph as cg
    >>> found = wire(cg.load_hardware("mi300x"), "interconnect")
    >>> f"{found.bandwidth.constant / 10**9} GB/s, {found.pair.constant / 10**9} GB/s to one other"
    '448.0 GB/s, 64.0 GB/s to one other'
    """
    level = hardware.cluster.levels.get(name) if hardware.cluster is not None else None
    of = name if level is None else "interconnect" if PER_LINK in level else "network"
    table = {**hardware.tables.get(of, {}), **(level or {})}
    stated = [level[key] for key in ("per_direction", PER_LINK) if level and key in level]
    bandwidth = poly((stated or [hardware.link(of)])[0].value)
    if "oversubscription" in table:
        bandwidth = bandwidth / poly(table["oversubscription"].value)
    if "latency" not in table:
        raise SpecError(
            f"hardware {hardware.id}: {of}.latency is missing; expected the seconds that a "
            f"message over it takes beside its bytes"
        )
    links = table["links"].number if name == "interconnect" and "links" in table else None
    pair = bandwidth if links is None or links + 1 != domain_of(hardware) else bandwidth / links
    return Wire(name, poly(table["latency"].number), bandwidth, pair)
