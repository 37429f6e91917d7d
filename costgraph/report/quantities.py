"""Quantities that reports show and commands accept, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..analysis.costs import bytes_moved, flops, flops_of_kind, intensity, matmul_flops
from ..analysis.params import param_bytes, param_count
from ..bind.evaluate import Formula
from ..ir.graph import Graph

__all__ = ["QUANTITIES", "Figure", "quantity_of", "symbolic"]


_Analysis = Callable[..., Formula]


@dataclass(frozen=True)
class Figure:
    """A quantity of a graph."""

    title: str
    """label"""
    unit: str
    """1, B, FLOP or FLOP/B"""
    value: Formula
    """value with bound sizes: a number, or a formula in the unbound ones"""
    formula: Formula
    """value with symbolic sizes"""


QUANTITIES: dict[str, tuple[str, str, _Analysis]] = {
    "params": ("parameters", "1", param_count),
    "param-bytes": ("bytes of parameters", "B", param_bytes),
    "flops": ("FLOPs", "FLOP", flops),
    "matmul-flops": ("matmul FLOPs", "FLOP", matmul_flops),
    "matmul-flops-full": ("matmul FLOPs, full squares", "FLOP", lambda g, **d: matmul_flops(g, "full", **d)),
    "pointwise-flops": ("pointwise FLOPs", "FLOP", lambda g, **d: flops_of_kind(g, "pointwise", d)),
    "transcendental-flops": ("transcendental FLOPs", "FLOP", lambda g, **d: flops_of_kind(g, "transcendental", d)),
    "bytes": ("bytes moved, unfused", "B", bytes_moved),
    "fused-bytes": ("bytes moved, ideal fusion", "B", lambda g, **d: bytes_moved(g, True, **d)),
    "intensity": ("intensity, unfused", "FLOP/B", intensity),
    "fused-intensity": ("intensity, ideal fusion", "FLOP/B", lambda g, **d: intensity(g, True, **d)),
}
"""title, unit and analysis of each figure by name"""


def symbolic(graph: Graph) -> Graph:
    """Return a shallow copy of a graph without default sizes, for symbolic results; ops and tensors are shared."""
    twin = Graph.__new__(Graph)
    twin.__dict__.update(vars(graph.root))
    twin.frozen = False
    twin.graph = twin.graph.copy()  # a separate cache for symbolic results
    twin.graph.facts["defaults"] = {}
    return twin


def quantity_of(graph: Graph, name: str, dims: Mapping[str, int]) -> Formula | None:
    """Return one of `QUANTITIES`, or None for an intensity if no bytes are moved."""
    if "intensity" in name and bytes_moved(graph, "fused" in name, **dims) == 0:
        return None
    return QUANTITIES[name][2](graph, **dims)
