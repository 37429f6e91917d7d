"""Named cost rules that op kinds assign: FLOPs, and elements read and written.

FLOP rules return `Flops`; read and write rules return one number of elements per operand or result. Rules with the
signature (kind, op) are assigned directly, `reads = rules.whole`; the others are called from methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..errors import GraphError, UnsupportedError
from ..ir.graph import (
    Flops,
    Op,
    OpKind,
    Tensor,
)
from ..ir.strides import windows_along
from ..notation.pattern import Affine, Pattern
from .access_footprint import (
    larger,
    points,
    reached,
)
from .functions import Function

if TYPE_CHECKING:
    from ..ir.graph import Domain

__all__ = [
    "Flops", "all_results", "applied", "elements", "free", "in_elements", "in_the_body", "moved_if_copied",
    "need_operands", "no_operands", "nothing", "once", "per_element_reduced", "per_result", "points",
    "reached_by_index", "under_the_result", "whole", "written_if_copied",
]  # fmt: skip


def need_operands(kind: OpKind, operands: Sequence[Tensor], count: int) -> None:
    """Raise GraphError unless there are as many operands as expected."""
    if len(operands) != count:
        raise GraphError(f"{kind.name} of {len(operands)} operands, expected {count}")


# -- index points ------------------------------------------------------------------------------------------------


def elements(t: Tensor) -> Poly:
    """Count a tensor's distinct elements within its domain."""
    return points(t, stored=True)


def once(op: Op, amounts: Sequence[Poly]) -> tuple[Poly, ...]:
    """Count elements that operands share once, at the first of them."""
    counts = list(amounts)
    first_index: dict[tuple[object, ...], int] = {}
    for i, t in enumerate(op.operands):
        region = t.region()
        j = first_index.setdefault(region, i)
        if j != i:
            counts[j], counts[i] = larger(counts[j], counts[i]), ZERO
    for region, i in first_index.items():
        whole_region = (region[0],)
        if region != whole_region and whole_region in first_index:
            j = first_index[whole_region]  # the index may reach only a part of it
            counts[j], counts[i] = larger(counts[j], counts[i]), ZERO
    return tuple(counts)


# -- FLOPs -------------------------------------------------------------------------------------------------------


def free(kind: OpKind, op: Op) -> Flops:
    """Return no FLOPs, for ops that only move or rename."""
    return Flops()


def in_the_body(kind: OpKind, op: Op) -> Flops:
    """Return no FLOPs: ops in the body are counted themselves."""
    return Flops()


def per_element_reduced(kind: OpKind, op: Op) -> Flops:
    """Count one FLOP per operand element, two for complex numbers."""
    return Flops(pointwise=points(op.operands[0]) * _components(op.operands[0]))


def per_result(kind: OpKind, op: Op) -> Flops:
    """Count one FLOP per result element, two for complex numbers."""
    return Flops(pointwise=points(op.results[0]) * _components(op.results[0]))


def _components(t: Tensor) -> int:
    return 2 if t.dtype.kind == "complex" else 1


def applied(count: Poly, *functions: Function) -> Flops:
    """Return the FLOPs for functions applied in sequence at `count` points."""
    return Flops(
        pointwise=count * sum(f.flops for f in functions),
        transcendental=count * sum(f.transcendentals for f in functions),
    )


# -- elements read -----------------------------------------------------------------------------------------------


def nothing(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return zero per operand, for ops that touch no memory themselves."""
    return (ZERO,) * max(len(op.operands), len(op.results))


def whole(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return the distinct elements in every operand, shared ones once."""
    return once(op, [elements(t) for t in op.operands])


def under_the_result(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return the elements that the result reaches in every operand by broadcasting."""
    result = op.results[0]
    if result.domain is None:
        return whole(kind, op)
    return once(op, [reached(t, result.sizes, result.domain, [bool(s) for s in t.strides]) for t in op.operands])


def moved_if_copied(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return all elements if the result is a copy, none if it is a view."""
    return whole(kind, op) if op.results[0].storage is not op.operands[0].storage else nothing(kind, op)


def written_if_copied(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return the result's elements if it is a copy, none if it is a view."""
    return all_results(kind, op) if op.results[0].storage is not op.operands[0].storage else nothing(kind, op)


def no_operands(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return an empty tuple, for ops without operands."""
    return ()


def reached_by_index(
    op: Op, pattern: Pattern, extents: Mapping[str, Poly], restriction: tuple[Domain, str, str] | None = None
) -> tuple[Poly, ...]:
    """Return the elements that a contraction's index points reach in each operand."""
    amounts = []
    for i, t in enumerate(op.operands):
        # an expanded axis repeats the same elements
        names = [n for dim, stride in zip(pattern.operands[i], t.strides, strict=True) if stride for n in dim.names]
        count, domain_axes = ONE, set[str]()
        if restriction is not None:
            domain, query, key = restriction
            domain_axes = {query, key}.intersection(names)
            flags = {"query": query in domain_axes, "key": key in domain_axes}
            count = domain.reached(extents[query], extents[key], op.graph.root.relations, **flags)
        counted: set[str] = set()
        for dim, size, stride in zip(pattern.operands[i], t.sizes, t.strides, strict=True):
            if not stride:
                continue
            if isinstance(dim, Affine):
                count = count * _reached_positions(dim, extents, size)
            else:
                uncounted = [n for n in dim.names if n not in domain_axes and n not in counted]
                count = prod((extents[n] for n in uncounted), start=count)
                counted.update(uncounted)  # a diagonal: one axis in two places
        amounts.append(count)
    return once(op, amounts)


def _reached_positions(index: Affine, extents: Mapping[str, Poly], size: Poly) -> Poly:
    """Count the positions that an affine index reaches on an axis, without padding.

    With `stride*h + dilation*r - padding`, the window positions fall into residue classes modulo the stride. Within a
    class, each starts a run with one position per h.
    """
    if len(index.terms) == 1:
        ((name, step),) = index.terms
        return (
            extents[name]
            if index.offset >= 0
            else _reached_by_runs([(0, 0)], 0, extents[name], step, index.offset, size)
        )
    # the symbolic extent, or the larger one, runs along the output, the other along the window
    terms = sorted(index.terms, key=lambda term: _window_first(extents[term[0]]))
    (window, dilation), *others = terms
    if len(others) != 1 or not isinstance(extents[window].constant, int):
        sizes = [extents[n] for n, _ in index.terms]
        if all(step == 1 for _, step in index.terms) and index.offset >= 0:
            return sum(sizes, start=ZERO) - (len(sizes) - 1)
        raise UnsupportedError(
            f"index {index}: expected a window of constant size, to count the elements that it reaches"
        )
    output, stride = others[0]
    width = int(extents[window].constant or 0)
    if dilation == 1 and stride <= width and index.offset <= 0:
        return _reached_by_adjacent_windows(width, extents[output], stride, -index.offset, size)
    classes: dict[int, list[tuple[int, int]]] = {}
    for r in range(width):
        start = r * dilation // stride
        class_runs = classes.setdefault(r * dilation % stride, [])
        if class_runs and start <= class_runs[-1][1] + 1:
            class_runs[-1] = (class_runs[-1][0], start)
        else:
            class_runs.append((start, start))
    counts = [
        _reached_by_runs(class_runs, residue, extents[output], stride, index.offset, size)
        for residue, class_runs in classes.items()
    ]
    return sum(counts, start=ZERO)


def _window_first(extent: Poly) -> tuple[bool, int]:
    size = extent.constant
    return size is None, int(size or 0)


def _reached_by_adjacent_windows(width: int, count: Poly, stride: int, padding: int, size: Poly) -> Poly:
    """Count the positions reached by windows that touch or overlap: from the first to the end of the last."""
    fits = windows_along(size, width - 1 - 2 * padding, stride)
    if count == fits and padding >= stride - 1:
        return size  # at most stride - 1 positions remain, all padding
    return at_least_zero(smaller((count - 1) * stride + width - padding, size))  # 0 if all are padding


def _reached_by_runs(
    runs: Sequence[tuple[int, int]], first: int, count: Poly, stride: int, offset: int, size: Poly
) -> Poly:
    """Count k with a <= k < b + count for one of the runs (a, b), and 0 <= first + stride*k + offset < size."""
    begin = max(0, -((first + offset) // stride))
    end = windows_along(size, first + offset, stride)
    if len(runs) == 1:  # consecutive runs have no gaps, and the padding is smaller than the window
        ((a, b),) = runs
        return at_least_zero(smaller(count + b, end) - max(a, begin))
    counts = []
    for i, (a, b) in enumerate(runs):
        stop = smaller(count + b, end)
        if i + 1 < len(runs):  # positions that the next run also reaches count there
            stop = smaller(stop, poly(max(runs[i + 1][0], begin)))
        counts.append(at_least_zero(stop - max(a, begin)))
    return sum(counts, start=ZERO)


def in_elements(tensors: Sequence[Tensor], amounts: Sequence[Poly]) -> tuple[Poly, ...]:
    """Convert bytes of tensors to elements."""
    return tuple(a / t.element_bytes() for t, a in zip(tensors, amounts, strict=True))


# -- elements written --------------------------------------------------------------------------------------------


def all_results(kind: OpKind, op: Op) -> tuple[Poly, ...]:
    """Return all elements of every result."""
    return tuple(elements(t) for t in op.results)
