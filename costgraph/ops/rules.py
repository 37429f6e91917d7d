"""Named rules that op records assign: the only arithmetic of FLOPs and of elements touched.

A FLOP rule returns `Flops`; a reading or writing rule returns elements, one amount for each operand or result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold
from math import prod
from typing import TYPE_CHECKING

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, Rational, poly
from ..errors import UnsupportedError
from ..graph.op import Op
from ..graph.strides import distinct, windows_along
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Pattern
from .functions import Function
from .reach import elements_read, larger, points, reached

if TYPE_CHECKING:
    from ..graph.domain import Domain

__all__ = [
    "Flops",
    "all_results",
    "applied",
    "elements",
    "free",
    "in_the_body",
    "moved_if_copied",
    "multiply_add",
    "nothing",
    "per_element",
    "per_element_reduced",
    "per_index_point",
    "per_update",
    "points",
    "reached_by_index",
    "read_by_the_body",
    "rows_read",
    "rows_written",
    "stated_flops",
    "stated_reads",
    "stated_writes",
    "under_the_result",
    "updates_written",
    "whole",
    "written_if_copied",
]


@dataclass
class Flops:
    """FLOPs by the unit of the hardware that does them: formulas, and numbers where they are counted."""

    matmul: Poly = ZERO
    """multiplies and adds of contractions, as executed"""
    full: Poly = None  # type: ignore[assignment]  # never None once it is made
    """the same with every domain ignored: what is executed unless it is said"""
    pointwise: Poly = ZERO
    """single arithmetic operations"""
    transcendental: Poly = ZERO
    """exp, log, sqrt, sin, tanh, erf and the like"""

    def __post_init__(self) -> None:
        if self.full is None:
            self.full = self.matmul

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.full + other.full,
            self.pointwise + other.pointwise,
            self.transcendental + other.transcendental,
        )

    def __mul__(self, times: Poly | Rational) -> Flops:
        return Flops(self.matmul * times, self.full * times, self.pointwise * times, self.transcendental * times)

    def by_kind(self, count: str = "executed") -> dict[str, Poly]:
        """Return them by kind; those of contractions as executed, or with every domain ignored."""
        matmul = self.full if count == "full" else self.matmul
        return {"matmul": matmul, "pointwise": self.pointwise, "transcendental": self.transcendental}


# -- index points ------------------------------------------------------------------------------------------------


def elements(t: Tensor) -> Poly:
    """Return the different elements of a tensor that hold anything."""
    return points(t, stored=True)


def _once(op: Op, amounts: Sequence[Poly]) -> tuple[Poly, ...]:
    """Count what several operands have in common once, at the first of them."""
    out = list(amounts)
    first: dict[tuple[object, ...], int] = {}
    for i, t in enumerate(op.operands):
        region = t.region()
        j = first.setdefault(region, i)
        if j != i:
            out[j], out[i] = larger(out[j], out[i]), ZERO
    for region, i in first.items():
        whole_region = (region[0],)
        if region != whole_region and whole_region in first:
            j = first[whole_region]  # of which an index may reach a part alone
            out[j], out[i] = larger(out[j], out[i]), ZERO
    return tuple(out)


# -- FLOPs -------------------------------------------------------------------------------------------------------


def free(op: Op) -> Flops:
    """Return no FLOPs: said by ops that only move or rename."""
    return Flops()


def in_the_body(op: Op) -> Flops:
    """Return no FLOPs of its own: those of the body are counted where they stand."""
    return Flops()


def _contraction(op: Op) -> tuple[Pattern, dict[str, Poly], tuple[Domain, str, str] | None]:
    return op.attrs["pattern"], op.attrs["extents"], op.attrs.get("domain")


def multiply_add(op: Op) -> Flops:
    """Count 2 for every index point where a sum is made, 1 where none is (a product alone).

    A sum is made where the result leaves out an axis, or where an index of several axes puts points on one place.
    """
    pattern, extents, restriction = _contraction(op)
    summed = bool(set(extents) - set(pattern.result_names)) or any(
        isinstance(a, Affine) and len(a.terms) > 1 for a in pattern.result
    )
    if "orders" in op.attrs:  # several contraction orders, none of which is always the best
        cost = op.attrs["orders"]
        return Flops(matmul=cost) if summed else Flops(pointwise=cost)
    full = executed = prod(extents.values(), start=ONE)
    if restriction is not None:
        domain, query, key = restriction
        others = prod((n for name, n in extents.items() if name not in (query, key)), start=ONE)
        executed = others * domain.points(extents[query], extents[key], op.graph.root.relations)
    if summed:
        return Flops(matmul=2 * executed, full=2 * full)
    return Flops(pointwise=executed)


def applied(count: Poly, *functions: Function) -> Flops:
    """Return what the table says of functions that are applied one after another at each of some points."""
    return Flops(
        pointwise=count * sum(f.flops for f in functions),
        transcendental=count * sum(f.transcendentals for f in functions),
    )


def per_element(op: Op) -> Flops:
    """Count what the table of functions says for each index point of the result."""
    return applied(points(op.results[0]), op.attrs["function"])


def per_element_reduced(op: Op) -> Flops:
    """Count one for each element that is reduced."""
    return Flops(pointwise=points(op.operands[0]))


def per_index_point(op: Op) -> Flops:
    """Count one for every index point: each element of each window that slides over an operand."""
    return Flops(pointwise=prod(op.attrs["extents"].values(), start=ONE))


def per_update(op: Op) -> Flops:
    """Count one addition for each element that is scattered."""
    return Flops(pointwise=points(op.operands[-1])) if op.attrs.get("mode") == "add" else Flops()


def stated_flops(op: Op) -> Flops:
    """Return the formulas that the caller stated."""
    a = op.attrs
    return Flops(a["matmul"], pointwise=a["pointwise"], transcendental=a["transcendental"])


# -- elements read -----------------------------------------------------------------------------------------------


def nothing(op: Op) -> tuple[Poly, ...]:
    """Return zero for every operand: said by ops that touch no memory of their own."""
    return (ZERO,) * max(len(op.operands), len(op.results))


def whole(op: Op) -> tuple[Poly, ...]:
    """Return every different element that every operand holds, once."""
    return _once(op, [elements(t) for t in op.operands])


def under_the_result(op: Op) -> tuple[Poly, ...]:
    """Return the elements of every operand that the index points of the result reach, broadcast from the right."""
    made = op.results[0]
    if made.domain is None:
        return whole(op)
    return _once(op, [reached(t, made.sizes, made.domain, [bool(s) for s in t.strides]) for t in op.operands])


def read_by_the_body(op: Op) -> tuple[Poly, ...]:
    """Return what the ops inside a fused body read of each operand, a view inside standing for its source."""
    assert op.body is not None
    amounts = []
    for i, f in enumerate(op.body.formals):
        # a view is written out: a copy, unless it is what was written into the operand
        own = i not in op.attrs.get("changed", ())
        handed = [elements(t) for t in op.body.outputs if own and t.storage is f.storage]
        amounts.append(fold(larger, handed, elements_read(op.body, f)))
    return _once(op, amounts)


def moved_if_copied(op: Op) -> tuple[Poly, ...]:
    """Return everything if the result has a storage of its own, nothing if it is a view."""
    return whole(op) if op.results[0].storage is not op.operands[0].storage else nothing(op)


def written_if_copied(op: Op) -> tuple[Poly, ...]:
    """Return the result if it has a storage of its own, nothing if it is a view."""
    return all_results(op) if op.results[0].storage is not op.operands[0].storage else nothing(op)


def rows_read(op: Op) -> tuple[Poly, ...]:
    """Return the rows of a table that are looked up, not the table, and the indices."""
    table, ids = op.operands
    if op.attrs["mode"] == "along":
        *lead, last = zip(ids.sizes, ids.strides, table.strides, strict=True)
        rows = prod((n for n, i, t in lead if t or (i and last[2])), start=ONE)
        found = last[0] if last[1] and last[2] else ONE
        return rows * found, elements(ids)
    rows = elements(ids) if table.strides[0] else ONE  # all rows of an expanded table are one
    return rows * distinct(table.sizes[1:], table.strides[1:]), elements(ids)


def rows_written(op: Op) -> tuple[Poly, ...]:
    """Return what a scatter reads: indices and updates, and the rows that it adds to."""
    _, ids, updates = op.operands
    return (_rows(op) if op.attrs["mode"] == "add" else ZERO), elements(ids), elements(updates)


def _rows(op: Op) -> Poly:
    """Return the elements of its target that a scatter reaches: an expanded axis of indices is one row again."""
    target, ids, _ = op.operands
    if not op.attrs.get("along"):
        return elements(ids) * prod(target.sizes[1:], start=ONE)
    return prod(target.sizes[:-1], start=ids.sizes[-1] if ids.strides[-1] else ONE)


def reached_by_index(op: Op) -> tuple[Poly, ...]:
    """Return the elements that the index points of a contraction reach in each operand."""
    pattern, extents, restriction = _contraction(op)
    amounts = []
    for i, t in enumerate(op.operands):
        # an expanded axis repeats the same elements
        names = [n for dim, stride in zip(pattern.operands[i], t.strides, strict=True) if stride for n in dim.names]
        left, skip = ONE, set[str]()
        if restriction is not None:
            domain, query, key = restriction
            skip = {query, key}.intersection(names)
            both = {"query": query in skip, "key": key in skip}
            left = domain.reached(extents[query], extents[key], op.graph.root.relations, **both)
        seen: set[str] = set()
        for dim, size, stride in zip(pattern.operands[i], t.sizes, t.strides, strict=True):
            if not stride:
                continue
            if isinstance(dim, Affine):
                left = left * _reached(dim, extents, size)
            else:
                new = [n for n in dim.names if n not in skip and n not in seen]
                left = prod((extents[n] for n in new), start=left)
                seen.update(new)  # a diagonal: one axis in two places
        amounts.append(left)
    return _once(op, amounts)


def _reached(index: Affine, extents: dict[str, Poly], size: Poly) -> Poly:
    """Count the positions of an axis that an affine index reaches, padding left out.

    With `stride*h + dilation*r - padding`, the window positions fall into classes modulo the stride; within a class
    each of them is the start of a run of as many positions as there are h.
    """
    if len(index.terms) == 1:
        ((name, step),) = index.terms
        return extents[name] if index.offset >= 0 else _united([(0, 0)], 0, extents[name], step, index.offset, size)
    # the axis whose extent is no plain number, or the larger one, runs along the output, the other along the window
    terms = sorted(index.terms, key=lambda term: _window_first(extents[term[0]]))
    (window, dilation), *others = terms
    if len(others) != 1 or not isinstance(extents[window].constant, int):
        known = [extents[n] for n, _ in index.terms]
        if all(step == 1 for _, step in index.terms) and index.offset >= 0:
            return sum(known, start=ZERO) - (len(known) - 1)
        raise UnsupportedError(
            f"index {index}: expected a window of numeric size to count the elements that it reaches"
        )
    along, stride = others[0]
    width = int(extents[window].constant or 0)
    if dilation == 1 and stride <= width and index.offset <= 0:
        return _one_piece(width, extents[along], stride, -index.offset, size)
    classes: dict[int, list[tuple[int, int]]] = {}
    for r in range(width):
        at = r * dilation // stride
        runs = classes.setdefault(r * dilation % stride, [])
        if runs and at <= runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], at)
        else:
            runs.append((at, at))
    parts = [_united(runs, rest, extents[along], stride, index.offset, size) for rest, runs in classes.items()]
    return sum(parts, start=ZERO)


def _window_first(extent: Poly) -> tuple[bool, int]:
    size = extent.constant
    return size is None, int(size or 0)


def _one_piece(width: int, count: Poly, stride: int, padding: int, size: Poly) -> Poly:
    """Count the positions that windows reach which touch or overlap: all from the first to the end of the last."""
    fits = windows_along(size, width - 1 - 2 * padding, stride)
    if count == fits and padding >= stride - 1:
        return size  # what the last window leaves over, at most stride - 1, is padding
    return at_least_zero(smaller((count - 1) * stride + width - padding, size))  # all of them may be in the padding


def _united(runs: Sequence[tuple[int, int]], first: int, count: Poly, stride: int, offset: int, size: Poly) -> Poly:
    """Count k with a <= k < b + count for one of the runs (a, b), and 0 <= first + stride*k + offset < size."""
    begin = max(0, -((first + offset) // stride))
    end = windows_along(size, first + offset, stride)
    if len(runs) == 1:  # neighbours follow each other without gaps, and the padding is less than the window
        ((a, b),) = runs
        return at_least_zero(smaller(count + b, end) - max(a, begin))
    parts = []
    for i, (a, b) in enumerate(runs):
        last = smaller(count + b, end)
        if i + 1 < len(runs):  # what the next run reaches as well counts there
            last = smaller(last, poly(max(runs[i + 1][0], begin)))
        parts.append(at_least_zero(last - max(a, begin)))
    return sum(parts, start=ZERO)


def stated_reads(op: Op) -> tuple[Poly, ...]:
    """Return the elements that the stated bytes of each operand are, or each operand whole."""
    stated: Sequence[Poly] | None = op.attrs["reads"]
    return whole(op) if stated is None else _in_elements(op.operands, stated)


def stated_writes(op: Op) -> tuple[Poly, ...]:
    """Return the elements that the stated bytes of each result are, or each result whole."""
    stated: Sequence[Poly] | None = op.attrs["writes"]
    return all_results(op) if stated is None else _in_elements(op.results, stated)


def _in_elements(tensors: Sequence[Tensor], amounts: Sequence[Poly]) -> tuple[Poly, ...]:
    return tuple(a / t.element_bytes() for t, a in zip(tensors, amounts, strict=True))


# -- elements written --------------------------------------------------------------------------------------------


def all_results(op: Op) -> tuple[Poly, ...]:
    """Return every element of every result."""
    return tuple(elements(t) for t in op.results)


def updates_written(op: Op) -> tuple[Poly, ...]:
    """Return the rows that a scatter changes."""
    return (_rows(op),)
