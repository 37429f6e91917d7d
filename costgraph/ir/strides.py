"""Symbolic sizes and strides: contiguity, views without copies, and elementwise result layouts.

The rules are torch's, with each symbol assumed to be larger than 1; axes with literal size 1 do not constrain a layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, prod

import sympy

from ..algebra.dominance import Relations, lower
from ..algebra.polynomial import ONE, ZERO, Monomial, Poly, Rational, cached, generator, is_reciprocal, poly

__all__ = [
    "Sizes",
    "apart",
    "contiguous",
    "dense_in",
    "distinct",
    "elementwise",
    "has_blas_layout",
    "in_the_order_of",
    "is_contiguous_in",
    "is_integral",
    "is_polynomial",
    "memory_format",
    "memory_order",
    "numel",
    "settled",
    "united",
    "view",
    "windows_along",
]

Sizes = tuple[Poly, ...]


def numel(sizes: Sequence[Poly]) -> Poly:
    """Return the number of elements."""
    return _product(tuple(sizes))


@cached(1 << 14)
def _product(sizes: Sizes) -> Poly:
    return prod(sizes, start=ONE)


def windows_along(size: Poly, spare: Poly | int, stride: Poly | int) -> Poly:
    """Return ceiling((size - spare) / stride), the number of windows along an axis, without nested ceilings.

    Bound sizes are integers, also D/H: stride 1 needs no rounding.
    """
    if stride == 1:
        return size - spare
    constant, variable = size.expr.as_coeff_Add()
    numerator = (
        poly(constant + variable.args[0]) if isinstance(variable, sympy.ceiling) and constant.is_integer else size
    )
    return poly(sympy.ceiling(((numerator - spare) / stride).expr))


def is_polynomial(p: Poly) -> bool:
    """Return whether a formula has symbols only, no floor or other atom."""
    return all(key[0] != "~" for m in p.terms for key, _ in m)


@cached(1 << 14)
def settled(p: Poly, sizes: frozenset[Poly]) -> Poly:
    """Return a formula without the floors and ceilings of terms that are integers whenever the given sizes are."""
    replacements = {}
    for key in p.generators():
        expr = generator(key) if key[0] == "~" else None
        if isinstance(expr, sympy.floor | sympy.ceiling):
            argument = settled(poly(expr.args[0]), sizes)
            number = argument.terms.get((), 0)
            fraction = _fractional(argument - number)
            if not fraction.terms or any(_is_multiple(fraction, _fractional(n)) for n in sizes):
                replacements[key] = (
                    argument - number + (floor(number) if isinstance(expr, sympy.floor) else ceil(number))
                )
    return p.substitute(replacements) if replacements else p


@cached(1 << 14)
def _fractional(p: Poly) -> Poly:
    """Return the terms that may be fractional."""
    return Poly({m: c for m, c in p.terms.items() if not _is_integral(m, c)})


@cached(1 << 12)
def united(a: frozenset[Poly], b: frozenset[Poly]) -> frozenset[Poly]:
    """Return the union, as one object for equal arguments: graphs of one model then share cached results."""
    return a | b


@cached(1 << 14)
def is_integral(p: Poly) -> bool:
    """Return whether a formula is an integer for all integer values of its symbols."""
    return not _fractional(p).terms


def _is_integral(m: Monomial, c: Rational) -> bool:
    return isinstance(c, int) and all(e > 0 and (k[0] != "~" or generator(k).is_integer is True) for k, e in m)


def _is_multiple(p: Poly, unit: Poly) -> bool:
    m = next(iter(p.terms))
    ratio = Fraction(p.terms[m]) / unit.terms[m] if m in unit.terms else Fraction(1, 2)
    return ratio.denominator == 1 and p == unit * ratio


@cached(1 << 14)
def contiguous(sizes: Sizes) -> Sizes:
    """Return C-contiguous strides."""
    strides = [ONE]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if sizes else ()


def in_the_order_of(sizes: Sizes, strides: Sizes, new_sizes: Sizes) -> Sizes | None:
    """Return dense strides of other sizes in the same axis order, or None if the tensor is not dense."""
    order = memory_order(sizes, strides)
    if order is None:
        return None
    return dense_in(new_sizes, order)


def memory_order(sizes: Sizes, strides: Sizes) -> tuple[int, ...] | None:
    """Return a dense tensor's axes from slowest to fastest, or None if it is not dense."""
    remaining, order, step = list(range(len(sizes))), list[int](), ONE
    while remaining:
        axis = next((i for i in reversed(remaining) if sizes[i] == ONE or strides[i] == step), None)
        if axis is None:
            return None
        remaining.remove(axis)
        order.insert(0, axis)
        step = step * sizes[axis]
    return tuple(order)


def memory_format(sizes: Sizes, strides: Sizes) -> tuple[int, ...]:
    """Return the axes from slowest to fastest as torch's `suggest_memory_format`: channels last, or in order.

    Only images and volumes, (batch, channels, *window), can be channels-last; gaps are allowed.
    """
    rank = len(sizes)
    axes = tuple(range(rank))
    order, step = (0, *axes[2:], 1), ZERO
    if rank not in (4, 5) or strides[1] == ZERO:
        return axes
    for axis in reversed(order):
        if not _is_nonnegative(strides[axis] - step, None) or (axis == 0 and step == strides[1]):
            return axes
        step = strides[axis] * sizes[axis]
    return order


def dense_in(sizes: Sizes, order: Sequence[int]) -> Sizes:
    """Return dense strides for an axis order, given from slowest to fastest."""
    steps = dict(zip(order, contiguous(tuple(sizes[i] for i in order)), strict=True))
    return tuple(steps[i] for i in range(len(sizes)))


def is_contiguous_in(sizes: Sizes, strides: Sizes, order: Sequence[int]) -> bool:
    """Return whether a tensor is dense with its axes in the given order."""
    dense = dense_in(sizes, order)
    return all(n == ONE or stride == step for n, stride, step in zip(sizes, strides, dense, strict=True))


def has_blas_layout(sizes: Sizes, strides: Sizes) -> bool:
    """Return whether BLAS accepts the last two axes as a matrix: one has stride 1, none is expanded."""
    if len(sizes) < 2:
        return True
    rows, columns = sizes[-2:]
    row_stride, column_stride = strides[-2:]
    return (column_stride == ONE and bool(row_stride or rows == ONE)) or (
        row_stride == ONE and bool(column_stride or columns == ONE)
    )


def distinct(sizes: Sequence[Poly], strides: Sequence[Poly]) -> Poly:
    """Return the number of distinct elements in a view: an expanded axis repeats the same ones."""
    return numel([n for n, s in zip(sizes, strides, strict=True) if s])


def apart(
    first: tuple[Sizes, Sizes, Poly], second: tuple[Sizes, Sizes, Poly], relations: Relations | None = None
) -> bool:
    """Return whether two views of one storage, each (sizes, strides, offset), provably share no element.

    They share none if, modulo some common stride, one view ends before the other begins.
    """
    if first[2] == second[2]:  # common case: they share the first element, and failing to prove it is slow
        return False
    return _are_disjoint(first[:2], second[:2], second[2] - first[2], relations)


# rows written one by one are compared pairwise, with few distinct layouts: cache them
@cached(1 << 14)
def _are_disjoint(
    first_view: tuple[Sizes, Sizes], second_view: tuple[Sizes, Sizes], offset: Poly, relations: Relations | None
) -> bool:
    """Return whether two views share no element; the second starts `offset` elements after the first."""
    axes = [[(n, s) for n, s in zip(*view, strict=True) if n != ONE and s] for view in (first_view, second_view)]
    steps = {s for view_axes in axes for _, s in view_axes}
    for step in (None, *steps):
        within_step = [
            [(n, s) for n, s in view_axes if step is None or not is_integral(s / step)] for view_axes in axes
        ]
        reach = [sum(((n - 1) * s for n, s in view_axes), start=ZERO) for view_axes in within_step]
        for first, second, gap in ((0, 1, offset), (1, 0, -offset)):
            slacks = [gap - reach[first] - 1]
            if step is not None:
                slacks.append(step - gap - reach[second] - 1)
            if all(_is_nonnegative(n, relations) for n in slacks):
                return True
    return False


def _is_nonnegative(n: Poly, relations: Relations | None) -> bool:
    """Return whether a number of elements is provably nonnegative."""
    lower_bound = lower(n, relations)
    if lower_bound is None or lower_bound >= 0 or relations is None or not relations.relations:
        return lower_bound is not None and lower_bound >= 0
    return relations.nonnegative(n)


def view(sizes: Sizes, strides: Sizes, new_sizes: Sizes) -> Sizes | None:
    """Return the strides of a view with the sizes `new_sizes`, or None if it needs a copy.

    Follows torch's `computeStride`: only axes that are contiguous with each other may be merged and split.
    """
    nontrivial = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != ONE]
    chunks: list[tuple[Poly, Poly]] = []  # elements and innermost stride of each chunk
    for n, s in nontrivial:
        if chunks and chunks[-1][1] == n * s:
            chunks[-1] = (chunks[-1][0] * n, s)
        else:
            chunks.append((n, s))
    new_strides: list[Poly] = []
    axis = len(new_sizes) - 1
    for elements, stride in reversed(chunks):
        covered = ONE
        while axis >= 0 and (covered != elements or new_sizes[axis] == ONE):
            new_strides.append(stride * covered)
            covered = covered * new_sizes[axis]
            axis -= 1
        if covered != elements:
            return None
    while axis >= 0:
        if new_sizes[axis] != ONE:
            return None
        new_strides.append(new_strides[-1] if new_strides else ONE)
        axis -= 1
    return tuple(reversed(new_strides))


@cached(1 << 14)
def _compare(a: Poly, b: Poly) -> int:
    if a == b:
        return 0
    if _is_at_least_one(b / a):
        return -1
    return 1 if _is_at_least_one(a / b) else 0


def _is_at_least_one(ratio: Poly) -> bool:
    """Return whether a ratio of two strides or sizes is provably at least 1."""
    if len(ratio.terms) == 1:
        ((factors, coefficient),) = ratio.terms.items()
        if coefficient >= 1 and all(power > 0 and not is_reciprocal(key) for key, power in factors):
            return True  # a product of sizes, all nonzero; a bare ceiling could be 0
    lower_bound = lower(ratio)
    return lower_bound is not None and lower_bound >= 1


def elementwise(sizes: Sizes, operands: Sequence[tuple[Sizes, Sizes]]) -> Sizes:
    """Return an elementwise result's strides, which keep the operands' axis order.

    Follows torch's `TensorIterator.reorder_dimensions`; `operands` are (sizes, strides), broadcast from the right.
    """
    unbroadcast = [s for n, s in operands if n == sizes]
    if unbroadcast and all(s == contiguous(sizes) for s in unbroadcast):
        # common case; broadcast operands alone cannot reorder axes that they lack
        return contiguous(sizes)
    rank = len(sizes)
    aligned = [_aligned(rank, n, s) for n, s in operands]
    order = list(range(rank - 1, -1, -1))  # fastest first
    for i in range(1, rank):
        moving = i
        for j in range(i - 1, -1, -1):
            swap = _should_swap(order[j], order[moving], aligned, sizes)
            if swap > 0:
                order[j], order[moving] = order[moving], order[j]
                moving = j
            elif swap < 0:
                break
    strides, step = [ONE] * rank, ONE
    for axis in order:
        strides[axis] = step
        step = step * sizes[axis]
    return tuple(strides)


def _aligned(rank: int, sizes: Sizes, strides: Sizes) -> list[Poly]:
    """Return an operand's strides under broadcasting: 0 along repeated axes."""
    return [ZERO] * (rank - len(sizes)) + [ZERO if n == ONE else s for n, s in zip(sizes, strides, strict=True)]


def _should_swap(a: int, b: int, aligned: Sequence[Sequence[Poly]], sizes: Sizes) -> int:
    for strides in aligned:
        if not strides[a] or not strides[b]:
            continue
        order = _compare(strides[a], strides[b])
        if order:
            return order
        if strides[a] == strides[b] and _compare(sizes[a], sizes[b]) > 0:
            return 1
    return 0
