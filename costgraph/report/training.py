"""What a report says of a step of training: state and activations apart, and how well the device can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..analysis.roofline import Roofline
from ..analysis.training import hardware_flops, main_format, model_flops, other_formats
from ..analysis.training_memory import activation_memory, bytes_per_param, is_step, saved_state_bytes, state_bytes
from ..bind.evaluate import Formula
from ..graph.graph import Graph
from .quantities import Figure, symbolic

__all__ = ["TRAINING_QUANTITIES", "Training", "training_of"]

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
