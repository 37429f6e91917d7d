"""Format amounts for people, and define the quantities that reports and the command line know by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from rich.markup import escape

from ..analysis.costs import bytes_moved, flops, flops_of_kind, intensity, matmul_flops
from ..analysis.params import param_bytes, param_count
from ..bind.evaluate import Formula
from ..hardware.units import format_bytes, format_quantity
from ..ir.graph import Graph
from .formula import formula_text

__all__ = [
    "amount",
    "exact",
    "percent",
    "show",
    "QUANTITIES",
    "Figure",
    "quantity_of",
    "symbolic",
]


# -- amounts -----------------------------------------------------------------------------------------------------------


def show(value: Formula, unit: str) -> str:
    """Format an amount with its unit; formulas have the unit in brackets.

    Examples
    --------
    >>> show(16_060_522_496, "B"), show(140_786_504_056_832, "FLOP"), show(8_030_261_248, "1")
    ('16.06 GB (14.96 GiB)', '140.8 TFLOP', '8,030,261,248')
    """
    if isinstance(value, sympy.Expr):
        text = formula_text(value, grouped=True)
        return text if unit == "1" else f"{text}  [{unit}]"
    if unit == "B":
        return format_bytes(value)
    if unit == "1" and isinstance(value, int):
        return f"{value:,}"
    return format_quantity(value, unit)


def exact(value: Formula, unit: str) -> str:
    """Return the exact count with grouped digits if `show` rounds it, else an empty string."""
    if not isinstance(value, int) or unit == "1" or value < 10_000:
        return ""
    return f"{value:,} {unit}"


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * share:.1f}%"


def amount(value: Formula, unit: str) -> str:
    """Format an amount, with its exact count if rounded, escaped for rich."""
    text, count = show(value, unit), exact(value, unit)
    return escape(f"{text} = {count}" if count else text)


# -- quantities --------------------------------------------------------------------------------------------------------

_Ask = Callable[..., Formula]


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


QUANTITIES: dict[str, tuple[str, str, _Ask]] = {
    "params": ("parameters", "1", param_count),
    "param-bytes": ("bytes of parameters", "B", param_bytes),
    "flops": ("FLOPs", "FLOP", flops),
    "matmul-flops": ("matmul FLOPs", "FLOP", matmul_flops),
    "matmul-flops-full": ("matmul FLOPs, full squares", "FLOP", lambda g, **d: matmul_flops(g, "full", **d)),
    "pointwise-flops": ("pointwise FLOPs", "FLOP", lambda g, **d: flops_of_kind(g, "pointwise", d)),
    "transcendental-flops": ("transcendental FLOPs", "FLOP", lambda g, **d: flops_of_kind(g, "transcendental", d)),
    "bytes": ("bytes moved, as declared", "B", bytes_moved),
    "fused-bytes": ("bytes moved, fused bound", "B", lambda g, **d: bytes_moved(g, True, **d)),
    "intensity": ("intensity, as declared", "FLOP/B", intensity),
    "fused-intensity": ("intensity, fused bound", "FLOP/B", lambda g, **d: intensity(g, True, **d)),
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
