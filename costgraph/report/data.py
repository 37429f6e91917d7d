"""What a report says, as plain facts: figures, the peak, rooflines and tables by scope and phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy

from ..analysis.costs import Cost
from ..analysis.regimes import Regime
from ..analysis.roofline import Roofline
from ..analysis.training import hardware_flops, main_format, model_flops, other_formats
from ..analysis.training_memory import activation_memory, bytes_per_param, is_step, saved_state_bytes, state_bytes
from ..bind.evaluate import Formula
from ..hardware.specs import Hardware
from ..ir.graph import Graph
from .formatting import Figure, symbolic

__all__ = [
    "TRAINING_QUANTITIES",
    "Training",
    "training_of",
    "Facts",
    "Part",
    "Peak",
    "Sent",
]


# -- training ----------------------------------------------------------------------------------------------------------
# What a report says of a step of training: state and activations apart, and how well the device can be used.

TRAINING_QUANTITIES: dict[str, tuple[str, str, Callable[..., Formula]]] = {
    "model-flops": ("model FLOPs", "FLOP", model_flops),
    "model-flops-full": ("model FLOPs, full squares", "FLOP", lambda g, **d: model_flops(g, "full", **d)),
    "hardware-flops": ("hardware FLOPs", "FLOP", hardware_flops),
    "state-bytes": ("state memory", "B", lambda g, **d: state_bytes(g, **d).total),
    "weight-bytes": ("weights", "B", lambda g, **d: state_bytes(g, **d).params),
    "gradient-bytes": ("gradients", "B", lambda g, **d: state_bytes(g, **d).gradients),
    "optimizer-bytes": ("optimizer state", "B", lambda g, **d: state_bytes(g, **d).state),
    "bytes-per-param": ("bytes a parameter", "B", bytes_per_param),
    "saved-state-bytes": ("saved state", "B", saved_state_bytes),
    "activation-bytes": ("activation memory", "B", activation_memory),
}
"""Title, unit and question of each figure that only a step of training has, by name."""


@dataclass(frozen=True)
class Training:
    """What a report says of a step of training. The tables by phase and the peak are those of every report."""

    figures: Mapping[str, Figure]
    """by name, see `TRAINING_QUANTITIES`"""
    dtype: str | None = None
    """format whose peak rate utilizations are of, see `main_format`; None where there is no matmul"""
    others: Mapping[str, float] = field(default_factory=dict)
    """shares of the matmul FLOPs that run in other formats, by format"""
    mfu: float | None = None
    """model FLOPs utilization at the estimated time; None where there is no time, or no matmul"""
    hfu: float | None = None
    """hardware FLOPs utilization at the estimated time"""
    most_mfu: float | None = None
    """model FLOPs utilization that no run exceeds: at the lower bound of the time"""


def training_of(graph: Graph, dims: Mapping[str, Any], times: Roofline | None) -> Training | None:
    """Return what is said of a step of training; None where the graph has no gradients of parameters."""
    if not is_step(graph) or (graph.gradients and not any(t.role == "param" for t in graph.gradients)):
        return None
    twin = symbolic(graph)
    figures = {
        name: Figure(title, unit, ask(graph, **dims), ask(twin))
        for name, (title, unit, ask) in TRAINING_QUANTITIES.items()
    }
    if times is None or not figures["hardware-flops"].value:
        return Training(figures)
    dtype = main_format(graph, **dims)
    # a rate that the roofline found, of a fallback as well
    rate = times.rates.get(f"matmul {dtype}") or float(times.hardware.nearest_rate(dtype)[0])

    def used(name: str, seconds: float) -> float:
        return float(figures[name].value) / (seconds * rate)

    return Training(
        figures,
        dtype,
        {name: float(n / figures["hardware-flops"].value) for name, n in other_formats(graph, dtype, **dims).items()},
        mfu=used("model-flops", times.estimate),
        hfu=used("hardware-flops", times.estimate),
        most_mfu=used("model-flops", times.lower_bound),
    )


# -- data --------------------------------------------------------------------------------------------------------------


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
