"""What a report says, as plain facts: figures, the peak, rooflines and tables by scope and phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from ..analysis.regimes import Regime
from ..analysis.roofline import Roofline
from ..analysis.table import Cost
from ..bind.evaluate import Formula
from ..hardware.specs import Hardware
from .quantities import Figure
from .training import Training

__all__ = ["Facts", "Part", "Peak", "Sent"]


@dataclass(frozen=True)
class Sent:
    """What a rank sends by collectives of one kind over one axis of its mesh."""

    axis: str
    """of the mesh"""
    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send"""
    times: Formula
    """how often they run"""
    ring_bytes: Formula
    """bytes that a rank sends in rings, all times together"""
    seconds: Formula | None
    """that they take; None without a device"""
    link: str
    """what they go over; empty without a device"""


@dataclass(frozen=True)
class Part:
    """What a module scope or a phase costs."""

    name: str
    """scope or phase; empty for ops in no scope"""
    value: Cost
    """FLOPs and bytes, sizes bound"""
    formula: Cost
    """FLOPs and bytes, no size bound"""
    seconds: float | None = None
    """estimated seconds; None without a device, or while a size is open"""
    share: float | None = None
    """part of the graph's estimated time"""
    bound: str | None = None
    """compute, memory or link: what bounds most of its time"""
    bound_share: float | None = None
    """part of its time that is bound so"""


@dataclass(frozen=True)
class Peak:
    """What holds the peak memory."""

    value: Formula
    """bytes"""
    op: str | None
    """op that runs then; None while a size is open"""
    phase: str | None
    """phase of that op"""
    by_role: Mapping[str, Formula]
    """bytes by role of the storage; empty while a size is open"""
    regimes: tuple[Regime, ...]
    """cases with the sizes that are bound: formula, op, phase"""
    formula: tuple[Regime, ...]
    """cases with no size bound"""
    arch: str | None = None
    """compute capability whose libraries and kernels are counted; None for tensors alone"""


@dataclass(frozen=True, repr=False)
class Facts:
    """The costs of a graph, on a device if there is one."""

    graph: str
    """name of the graph"""
    hardware: Hardware | None
    """the device"""
    sizes: Mapping[str, int]
    """bound sizes"""
    given: frozenset[str]
    """those of them that were asked for, no defaults"""
    unbound: tuple[str, ...]
    """dimensions without a size"""
    unused: tuple[str, ...]
    """dimensions that show up in no figure, and have no default"""
    figures: Mapping[str, Figure]
    """by name, see `QUANTITIES`; intensities are missing where nothing is moved"""
    peak: Peak
    """peak memory"""
    roofline: Roofline | None
    """times; None without a device, or while a size is open"""
    scopes: tuple[Part, ...]
    """by module scope, in program order"""
    phases: tuple[Part, ...]
    """by phase"""
    count: str
    """how matmul FLOPs of the tables are counted: executed or full"""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """default sizes of the graph"""
    open_roofline: Roofline | None = None
    """times as formulas; None without a device, or once all sizes are bound"""
    training: Training | None = None
    """what a step of training has beside; None for other graphs"""
    unused_params: Mapping[str, Formula] = field(default_factory=dict)
    """number of parameters that no op reads, by scope"""
    sent: tuple[Sent, ...] = ()
    """by axis and kind of collective, of the graph of one rank"""
    origin: str = ""
    """where its kernels come from: `declared, fused kernels`, `traced, eager`, or `traced, fused kernels`"""

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into the usable memory; None without a device, or while a size is open."""
        if self.hardware is None or isinstance(self.peak.value, sympy.Expr):
            return None
        return bool(self.peak.value <= self.hardware.capacity().value)
