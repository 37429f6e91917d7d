"""Links between devices: the interconnect within a domain, and the network between domains."""

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
    """Latency-bandwidth model of a link."""

    name: str
    """interconnect, network or a network level"""
    latency: Poly
    """seconds until the first byte arrives"""
    bandwidth: Poly
    """B/s that a device sends and receives at the same time"""
    pair: Poly
    """B/s from one device to a single other one"""


def joined(hardware: str | Hardware, network: str | Network | None) -> Hardware:
    """Return a device attached to a network; with None, its cards reach any other device at the same rate.

    Raises SpecError if the device or network is unknown.
    """
    device = load_hardware(hardware)
    return device if network is None else replace(device, cluster=load_network(network))


def domain_of(hardware: Hardware) -> int:
    """Return the number of devices that an interconnect joins, 1 without an interconnect.

    Raises SpecError if the specification does not state it, or it is not a positive integer.
    """
    table = hardware.tables.get("interconnect", {})
    if not table:
        return 1
    if "domain" not in table:
        raise SpecError(
            f"hardware {hardware.id}: interconnect.domain is missing; expected the number of devices that its "
            "interconnect connects"
        )
    devices = table["domain"].number
    if not isinstance(devices, int) or devices < 1:
        raise SpecError(f"hardware {hardware.id}: interconnect.domain is {devices}, expected a positive integer")
    return devices


def extents(hardware: Hardware) -> Iterator[tuple[str, int | None]]:
    """Yield a device's links, nearest first, with the number of devices that each joins, None if unlimited.

    Raises SpecError as `domain_of`, or if a network level joins fewer devices than the level below.
    """
    if hardware.cluster is not None and hardware.cluster.torus:  # its links are the interconnect
        domain = 1
    else:
        domain = domain_of(hardware)
        yield "interconnect", domain
    if hardware.cluster is None:
        yield "network", None
        return
    for name, level in hardware.cluster.levels.items():
        devices = int(level["devices"].number)
        if devices < domain:
            raise SpecError(
                f"network {hardware.cluster.id}: {name}.devices is {devices}, expected at least the {domain} of "
                f"{hardware.id}"
            )
        yield name, devices


def wire(hardware: Hardware, name: str) -> Wire:
    """Return the interconnect of a device, its network, or a level of the network that it is attached to.

    A level inherits the rates of [network] that it does not state; a torus dimension has the rate of one link. If a
    device has one link fewer than there are devices in its domain, the domain is fully connected, and each pair has its
    share of the bandwidth. Otherwise a switch gives any pair the full bandwidth. Raises SpecError if the device lacks
    the link, its bandwidth or its latency.

    Examples
    --------
    >>> import costgraph as cg
    >>> found = wire(cg.load_hardware("mi300x"), "interconnect")
    >>> f"{found.bandwidth.constant / 10**9} GB/s, {found.pair.constant / 10**9} GB/s to one other"
    '448.0 GB/s, 64.0 GB/s to one other'
    """
    level = hardware.cluster.levels.get(name) if hardware.cluster is not None else None
    table_name = name if level is None else "interconnect" if PER_LINK in level else "network"
    table = {**hardware.tables.get(table_name, {}), **(level or {})}
    rates = [level[key] for key in ("per_direction", PER_LINK) if level and key in level]
    bandwidth = poly((rates or [hardware.link(table_name)])[0].value)
    if "oversubscription" in table:
        bandwidth = bandwidth / poly(table["oversubscription"].value)
    if "latency" not in table:
        raise SpecError(
            f"hardware {hardware.id}: {table_name}.latency is missing; expected the seconds per "
            f"message besides the transfer of its bytes"
        )
    links = table["links"].number if name == "interconnect" and "links" in table else None
    pair = bandwidth if links is None or links + 1 != domain_of(hardware) else bandwidth / links
    return Wire(name, poly(table["latency"].number), bandwidth, pair)
