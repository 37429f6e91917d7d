"""Networks of clusters: levels of switches, how many devices each joins, and what a device sends through it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costgraph.hardware.file import (
    NETWORKS,
    PER_LINK,
    known,
    path_of,
    read_network,
)
from costgraph.hardware.tables import SOURCE, Column, Fact, Table
from costgraph.hardware.units import Quantity

from ..notation.validation import guarded

__all__ = ["Network", "list_networks", "load_network"]


@guarded()
@dataclass(frozen=True, repr=False)
class Network(Table):
    """The network between the domains of an interconnect, level above level.

    Examples
    --------
    >>> found = load_network("meta-24k")
    >>> [f"{name}: {level['devices'].value}" for name, level in found.levels.items()]
    ['rack: 16', 'pod: 3072', 'aggregation: 24576']
    """

    id: str
    """name of the file without its ending"""
    name: str
    topology: str
    """how its switches are joined, in words"""
    levels: Mapping[str, Mapping[str, Quantity]]
    """numbers of each level, the nearest first: `devices` that it joins; and, where they are not those of the network
    card of a device, `per_direction` in B/s, `latency` in s; `oversubscription`, by which devices get less than that
    where all of them send through this level; of the dimensions of a torus `per_link_per_direction` in B/s,
    and `ring`, the devices that are a ring, where a slice has a line of fewer"""
    sources: Mapping[str, str]
    """key of a source -> reference"""

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    @property
    def torus(self) -> bool:
        """Whether its levels are the dimensions of a torus, whose links are the interconnect of its devices."""
        return any(PER_LINK in level for level in self.levels.values())

    @property
    def rows(self) -> list[tuple[str, Quantity]]:
        """Every number with its place, level by level."""
        return [(f"{level}.{key}", q) for level, keys in self.levels.items() for key, q in keys.items()]

    def _about(self) -> str:
        return f"{self.id}: {len(self.levels)} levels of {self.name}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("place", read=lambda row: row[0]),
            Column("value", lambda row: row[1].unit, lambda row: row[1].value), SOURCE,
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        return [Fact("name", self.name), Fact("topology", self.topology)]


def list_networks() -> list[str]:
    """Return the names of the networks that come with the library, sorted.

    Examples
    --------
    >>> list_networks()
    ['dgx-superpod', 'meta-24k', 'tpu-v4', 'tpu-v5e', 'tpu-v5p']
    """
    return known(NETWORKS)


def load_network(name_or_path: str | os.PathLike[str] | Network) -> Network:
    """Return a network by its name, or from a TOML file of one's own; a Network is returned as it is.

    Parameters
    ----------
    name_or_path : str, path or Network
        One of ``list_networks()``, or a path: a text that ends with ``.toml`` or has a slash in it is one.

    Raises
    ------
    SpecError
        If there is no such network or file, or the file is no valid specification of one.

    Examples
    --------
    >>> load_network("meta-24k").levels["aggregation"]["oversubscription"].value
    7
    """
    if isinstance(name_or_path, Network):
        return name_or_path
    path = path_of(name_or_path, NETWORKS)
    return Network(id=path.stem, **read_network(path))
