"""Cluster networks: hierarchies of switches or torus dimensions between devices."""

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
    """Network between interconnect domains, as a sequence of levels.

    Examples
    --------
    >>> found = load_network("meta-24k")
    >>> [f"{name}: {level['devices'].value}" for name, level in found.levels.items()]
    ['rack: 16', 'pod: 3072', 'aggregation: 24576']
    """

    id: str
    """file name without suffix"""
    name: str
    topology: str
    """description of the topology"""
    levels: Mapping[str, Mapping[str, Quantity]]
    """numbers of each level, nearest first: `devices` joined; optionally, if different from a device's network card,
    `per_direction` in B/s and `latency` in s; `oversubscription`, the factor by which devices get less if all send
    through this level; for torus dimensions `per_link_per_direction` in B/s, and `ring`, the devices in a full ring,
    where a slice has a shorter line"""
    sources: Mapping[str, str]
    """references by source key"""

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    @property
    def torus(self) -> bool:
        """Whether its levels are torus dimensions, whose links are the device interconnect."""
        return any(PER_LINK in level for level in self.levels.values())

    @property
    def rows(self) -> list[tuple[str, Quantity]]:
        """Every number with its key, level by level."""
        return [(f"{level}.{key}", q) for level, keys in self.levels.items() for key, q in keys.items()]

    def _description(self) -> str:
        return f"{self.id}: {len(self.levels)} levels of {self.name}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("place", read=lambda row: row[0]),
            Column("value", lambda row: row[1].unit, lambda row: row[1].value), SOURCE,
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        return [Fact("name", self.name), Fact("topology", self.topology)]


def list_networks() -> list[str]:
    """Return the sorted names of the networks that ship with the library.

    Examples
    --------
    >>> list_networks()
    ['dgx-superpod', 'meta-24k', 'tpu-v4', 'tpu-v5e', 'tpu-v5p']
    """
    return known(NETWORKS)


def load_network(name_or_path: str | os.PathLike[str] | Network) -> Network:
    """Load a network by name or from a TOML file; a Network is returned unchanged.

    Parameters
    ----------
    name_or_path : str, path or Network
        One of ``list_networks()``, or a path, which ends with ``.toml`` or contains a slash.

    Raises
    ------
    SpecError
        If the network or file does not exist, or the file is invalid.

    Examples
    --------
    >>> load_network("meta-24k").levels["aggregation"]["oversubscription"].value
    7
    """
    if isinstance(name_or_path, Network):
        return name_or_path
    path = path_of(name_or_path, NETWORKS)
    return Network(id=path.stem, **read_network(path))
