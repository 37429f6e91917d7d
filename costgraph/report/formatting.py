"""The quantities that a report shows and that the command line knows by name."""

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
# Amounts as people read them.


def show(value: Formula, unit: str) -> str:
    """Return an amount for people, with its unit; a formula with the unit in brackets.

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
    """Return an exact count with its unit and grouped digits, where `show` rounds one."""
    if not isinstance(value, int) or unit == "1" or value < 10_000:
        return ""
    return f"{value:,} {unit}"


def percent(share: float) -> str:
    """Return a part of a whole as text."""
    return f"{100 * share:.1f}%"


def amount(value: Formula, unit: str) -> str:
    """Return an amount and, where that rounds it, its exact count; as rich may print it."""
    text, count = show(value, unit), exact(value, unit)
    return escape(f"{text} = {count}" if count else text)


# -- quantities --------------------------------------------------------------------------------------------------------

_Ask = Callable[..., Formula]


@dataclass(frozen=True)
class Figure:
    """One quantity of a graph."""

    title: str
    """what it is called"""
    unit: str
    """1, B, FLOP or FLOP/B"""
    value: Formula
    """with sizes bound: a number, or a formula in what is open"""
    formula: Formula
    """with no size bound"""


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
"""Title, unit and question of each figure, by name."""


def symbolic(graph: Graph) -> Graph:
    """Return the same graph without its default sizes, for answers that are formulas; ops and tensors are shared."""
    twin = Graph.__new__(Graph)
    twin.__dict__.update(vars(graph.root))
    twin.frozen = False
    twin.graph = twin.graph.copy()  # its own facts, all else shared: what is derived of it, which has no sizes put in
    twin.graph.facts["defaults"] = {}
    return twin


def quantity_of(graph: Graph, name: str, dims: Mapping[str, int]) -> Formula | None:
    """Return one of `QUANTITIES`, or None for an intensity of what moves nothing."""
    if "intensity" in name and bytes_moved(graph, "fused" in name, **dims) == 0:
        return None
    return QUANTITIES[name][2](graph, **dims)
