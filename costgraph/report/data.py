"""Report data: figures, peak memory, rooflines, and tables by scope and phase."""

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
from ..transforms.loss import loss_title
from .quantities import Figure, symbolic

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

TRAINING_QUANTITIES: dict[str, tuple[str, str, Callable[..., Formula]]] = {
    "model-flops": ("model FLOPs", "FLOP", model_flops),
    "model-flops-full": ("model FLOPs, full squares", "FLOP", lambda g, **d: model_flops(g, "full", **d)),
    "hardware-flops": ("hardware FLOPs", "FLOP", hardware_flops),
    "state-bytes": ("state memory", "B", lambda g, **d: state_bytes(g, **d).total),
    "weight-bytes": ("weights", "B", lambda g, **d: state_bytes(g, **d).params),
    "gradient-bytes": ("gradients", "B", lambda g, **d: state_bytes(g, **d).gradients),
    "optimizer-bytes": ("optimizer state", "B", lambda g, **d: state_bytes(g, **d).state),
    "bytes-per-param": ("bytes per parameter", "B", bytes_per_param),
    "saved-state-bytes": ("checkpoint", "B", saved_state_bytes),
    "activation-bytes": ("activation memory", "B", activation_memory),
}
"""title, unit and analysis by figure name"""


@dataclass(frozen=True)
class Training:
    """Training figures, in addition to the tables and the peak that every report has."""

    figures: Mapping[str, Figure]
    """by name, see `TRAINING_QUANTITIES`"""
    loss: str | None = None
    """title of the loss; None if the model itself returns a scalar"""
    dtype: str | None = None
    """format whose peak rate is used for MFU and HFU, see `main_format`; None without matmuls"""
    others: Mapping[str, float] = field(default_factory=dict)
    """share of matmul FLOPs by other format"""
    mfu: float | None = None
    """model FLOPs utilization at the estimated time; None without a time or matmuls"""
    hfu: float | None = None
    """hardware FLOPs utilization at the estimated time"""
    most_mfu: float | None = None
    """upper bound on MFU, at the lower bound of the time"""


def training_of(graph: Graph, dims: Mapping[str, Any], times: Roofline | None) -> Training | None:
    """Return the training figures; None if the graph has no parameter gradients."""
    if not is_step(graph) or (graph.gradients and not any(t.role == "param" for t in graph.gradients)):
        return None
    twin = symbolic(graph)
    figures = {
        name: Figure(title, unit, ask(graph, **dims), ask(twin))
        for name, (title, unit, ask) in TRAINING_QUANTITIES.items()
    }
    loss = None if graph.loss is None else loss_title(graph.loss)
    if times is None or not figures["hardware-flops"].value:
        return Training(figures, loss)
    dtype = main_format(graph, **dims)
    # the roofline's rate may come from a fallback format
    rate = times.rates.get(f"matmul {dtype}") or float(times.hardware.nearest_rate(dtype)[0])

    def used(name: str, seconds: float) -> float:
        return float(figures[name].value) / (seconds * rate)

    return Training(
        figures,
        loss,
        dtype,
        {name: float(n / figures["hardware-flops"].value) for name, n in other_formats(graph, dtype, **dims).items()},
        mfu=used("model-flops", times.estimate),
        hfu=used("hardware-flops", times.estimate),
        most_mfu=used("model-flops", times.lower_bound),
    )


# -- report ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """Communication by one kind of collective over one mesh axis."""

    axis: str
    """mesh axis"""
    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send"""
    times: Formula
    """execution count"""
    ring_bytes: Formula
    """bytes that a rank sends with ring algorithms, over all executions"""
    seconds: Formula | None
    """their time; None without a device"""
    link: str
    """link that they use; empty without a device"""


@dataclass(frozen=True)
class Part:
    """Costs by module scope or phase."""

    name: str
    """scope or phase; empty for ops without a scope"""
    value: Cost
    """FLOPs and bytes with bound sizes"""
    formula: Cost
    """FLOPs and bytes with symbolic sizes"""
    seconds: float | None = None
    """estimated seconds; None without a device or with unbound sizes"""
    share: float | None = None
    """fraction of the graph's time"""
    bound: str | None = None
    """bottleneck for most of its time: compute, memory or link"""
    bound_share: float | None = None
    """time fraction with this bottleneck"""


@dataclass(frozen=True)
class Peak:
    """Peak memory."""

    value: Formula
    """bytes"""
    op: str | None
    """op at the peak; None with unbound sizes"""
    phase: str | None
    """phase of that op"""
    by_role: Mapping[str, Formula]
    """bytes by storage role; empty with unbound sizes"""
    regimes: tuple[Regime, ...]
    """cases (formula, op, phase) with bound sizes"""
    formula: tuple[Regime, ...]
    """cases with symbolic sizes"""
    arch: str | None = None
    """compute capability whose library and kernel allocations are included; None for tensors only"""


@dataclass(frozen=True, repr=False)
class Facts:
    """Costs of a graph, optionally on a device."""

    graph: str
    """graph name"""
    hardware: Hardware | None
    """the device"""
    sizes: Mapping[str, int]
    """bound sizes"""
    given: frozenset[str]
    """sizes that were passed explicitly, without defaults"""
    unbound: tuple[str, ...]
    """dimensions without a size"""
    unused: tuple[str, ...]
    """dimensions that occur in no figure and have no default"""
    figures: Mapping[str, Figure]
    """by name, see `QUANTITIES`; no intensities if no bytes are moved"""
    peak: Peak
    """peak memory"""
    roofline: Roofline | None
    """times; None without a device or with unbound sizes"""
    scopes: tuple[Part, ...]
    """costs by module scope, in program order"""
    phases: tuple[Part, ...]
    """costs by phase"""
    count: str
    """matmul FLOPs in the tables: executed or full"""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """default sizes"""
    open_roofline: Roofline | None = None
    """times as formulas; None without a device or if all sizes are bound"""
    training: Training | None = None
    """training figures; None for other graphs"""
    unused_params: Mapping[str, Formula] = field(default_factory=dict)
    """unused parameters by scope"""
    sent: tuple[Sent, ...] = ()
    """communication in a sharded graph, by mesh axis and kind"""
    origin: str = ""
    """kernel origin: `declared, fused kernels`, `traced, eager`, or `traced, fused kernels`"""
    legend: Mapping[str, str] = field(default_factory=dict)
    """descriptions of dimensions"""

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits into usable memory; None without a device or with unbound sizes."""
        if self.hardware is None or isinstance(self.peak.value, sympy.Expr):
            return None
        return bool(self.peak.value <= self.hardware.capacity().value)
