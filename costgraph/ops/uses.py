"""Total elements that ops read from a tensor: disjoint slices add up, overlapping reads do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ZERO, Poly, total
from ..ir.graph import Graph, Loop, Op, Tensor
from .access_footprint import at_least, larger, points
from .kv_cache import Append
from .layout import Slice
from .opaque import StatedCosts

__all__ = [
    "elements_read",
    "together",
]


def elements_read(graph: Graph, tensor: Tensor) -> Poly:
    """Return the distinct elements that ops in a graph and its bodies read from a tensor, also through views.

    If readers may overlap, only the widest counts, so the result is a lower bound.
    """
    most = ZERO
    slices: dict[int, list[tuple[Poly, Poly, Poly]]] = {}
    for op in graph.successors(tensor):
        result = op.results[0] if op.results else None
        if op.body is None and result is not None and result.storage is tensor.storage and not op.kind.overwrites():
            inner = elements_read(graph, result)
            if isinstance(op.kind, Slice):
                slices.setdefault(op.kind.axis, []).append((*op.kind.span(), inner))
            else:
                most = larger(most, inner)
            continue
        if isinstance(op.kind, Append) and op.operands[0] is tensor and result is not None:
            # elements just appended to a cache need not come from memory
            inner = elements_read(graph, result)
            new = op.kind.writes(op)[0]
            inner = inner - new if at_least(inner, new) else at_least_zero(inner - new)
            most = larger(most, inner)
            continue
        most = larger(most, _read_by(op, tensor))
    for parts in slices.values():
        most = larger(most, _together(parts))
    return most


def _read_by(op: Op, tensor: Tensor) -> Poly:
    most = ZERO
    amounts: Sequence[Poly] = () if op.loop is not None else op.kind.reads(op)
    # stated bytes may count repeated reads of the same elements
    stated = isinstance(op.kind, StatedCosts) and op.kind.bytes_read is not None
    for i, t in enumerate(op.operands):
        if t is not tensor:
            continue
        if op.loop is not None:
            most = larger(most, _read_by_loop(op.loop, i))
        elif i < len(amounts):
            most = larger(most, smaller(amounts[i], points(t, stored=True)) if stated else amounts[i])
    return most


def _read_by_loop(loop: Loop, i: int) -> Poly:
    formal = loop.body.formals[i]
    inner = elements_read(loop.body, formal)
    return inner * loop.count if formal in loop.slices else inner


def together(tensors: Sequence[Tensor]) -> Poly:
    """Return the distinct elements in tensors that share a storage: disjoint slices add up, others may overlap."""
    if len(tensors) == 1:
        return points(tensors[0], stored=True)
    cuts = [(t, op.operands[0], op.kind) for t in tensors if (op := t.producer) and isinstance(op.kind, Slice)]
    if len(cuts) == len(tensors) and len({(whole, cut.axis) for _, whole, cut in cuts}) == 1:
        return _together([(*cut.span(), points(t, stored=True)) for t, _, cut in cuts])
    most = ZERO
    for t in tensors:
        most = larger(most, points(t, stored=True))
    return most


def _together(parts: list[tuple[Poly, Poly, Poly]]) -> Poly:
    """Add up slices on one axis if they provably do not overlap; otherwise return the widest."""
    parts = list(dict.fromkeys(parts))
    if all(begin.constant is not None for begin, _, _ in parts):
        parts.sort(key=lambda part: part[0].constant or 0)
        apart = all(at_least(b[0], a[1]) for a, b in pairwise(parts))
    else:
        apart = all(at_least(b[0], a[1]) or at_least(a[0], b[1]) for i, a in enumerate(parts) for b in parts[i + 1 :])
    if apart:
        return total(amount for _, _, amount in parts)
    most = ZERO
    for _, _, amount in parts:
        most = larger(most, amount)
    return most
