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
    widest = ZERO
    slices: dict[int, list[tuple[Poly, Poly, Poly]]] = {}
    for op in graph.successors(tensor):
        result = op.results[0] if op.results else None
        if op.body is None and result is not None and result.storage is tensor.storage and not op.kind.overwrites():
            elements = elements_read(graph, result)
            if isinstance(op.kind, Slice):
                slices.setdefault(op.kind.axis, []).append((*op.kind.span(), elements))
            else:
                widest = larger(widest, elements)
            continue
        if isinstance(op.kind, Append) and op.operands[0] is tensor and result is not None:
            # elements just appended to a cache need not come from memory
            elements = elements_read(graph, result)
            appended = op.kind.writes(op)[0]
            elements = elements - appended if at_least(elements, appended) else at_least_zero(elements - appended)
            widest = larger(widest, elements)
            continue
        widest = larger(widest, _read_by(op, tensor))
    for spans in slices.values():
        widest = larger(widest, _union_of_spans(spans))
    return widest


def _read_by(op: Op, tensor: Tensor) -> Poly:
    widest = ZERO
    amounts: Sequence[Poly] = () if op.loop is not None else op.kind.reads(op)
    # stated bytes may count repeated reads of the same elements
    has_stated_bytes = isinstance(op.kind, StatedCosts) and op.kind.bytes_read is not None
    for i, t in enumerate(op.operands):
        if t is not tensor:
            continue
        if op.loop is not None:
            widest = larger(widest, _read_by_loop(op.loop, i))
        elif i < len(amounts):
            widest = larger(widest, smaller(amounts[i], points(t, stored=True)) if has_stated_bytes else amounts[i])
    return widest


def _read_by_loop(loop: Loop, i: int) -> Poly:
    formal = loop.body.formals[i]
    elements = elements_read(loop.body, formal)
    return elements * loop.count if formal in loop.slices else elements


def together(tensors: Sequence[Tensor]) -> Poly:
    """Return the distinct elements in tensors that share a storage: disjoint slices add up, others may overlap."""
    if len(tensors) == 1:
        return points(tensors[0], stored=True)
    slices = [(t, op.operands[0], op.kind) for t in tensors if (op := t.producer) and isinstance(op.kind, Slice)]
    if len(slices) == len(tensors) and len({(base, piece.axis) for _, base, piece in slices}) == 1:
        return _union_of_spans([(*piece.span(), points(t, stored=True)) for t, _, piece in slices])
    widest = ZERO
    for t in tensors:
        widest = larger(widest, points(t, stored=True))
    return widest


def _union_of_spans(spans: list[tuple[Poly, Poly, Poly]]) -> Poly:
    """Add up slices on one axis if they provably do not overlap; otherwise return the widest."""
    spans = list(dict.fromkeys(spans))
    if all(begin.constant is not None for begin, _, _ in spans):
        spans.sort(key=lambda span: span[0].constant or 0)
        disjoint = all(at_least(b[0], a[1]) for a, b in pairwise(spans))
    else:
        disjoint = all(
            at_least(b[0], a[1]) or at_least(a[0], b[1]) for i, a in enumerate(spans) for b in spans[i + 1 :]
        )
    if disjoint:
        return total(amount for _, _, amount in spans)
    widest = ZERO
    for _, _, amount in spans:
        widest = larger(widest, amount)
    return widest
