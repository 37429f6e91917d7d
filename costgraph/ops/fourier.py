"""Complex views and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, permutations
from math import prod
from typing import Annotated, Protocol

import sympy

from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..dtypes import DTYPES, DType
from ..errors import UnsupportedError
from ..ir.graph import (
    Flag,
    Flops,
    Limit,
    Op,
    OpKind,
    Result,
    Split,
    Tensor,
    all_of,
    apply,
    is_count,
    is_size,
    itself,
    need,
    one_of,
    optional,
)
from ..ir.strides import Sizes
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .layout import index
from .registry import register

__all__ = [
    "SCALES",
    "Fourier",
    "ViewAs",
    "joined",
    "real_part",
    "transform_flops",
    "view_as",
]

#: Transform scaling: none, by the square root of the number of points, or by that number.
SCALES = ("none", "root", "points")
_COMPLEX = {"fp32": DTYPES["complex64"], "fp64": DTYPES["complex128"]}


@register
@dataclass(frozen=True, kw_only=True)
class ViewAs(OpKind):
    """View as another dtype: complex numbers as real pairs, real pairs as complex numbers, or the conjugate.

    Conjugation is lazy as in torch: readers flip the sign, at no cost.
    """

    name = "view_as"
    takes_complex = True
    view: Annotated[str, one_of("real", "complex", "conjugate")]
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the view."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if self.view == "complex":
            need(x.dtype.name in _COMPLEX, f"{x!r} as complex numbers, which needs {' or '.join(_COMPLEX)}")
            pairs = bool(x.ndim) and x.sizes[-1] == 2 and x.strides[-1] == ONE
            need(pairs, f"{x!r} as complex numbers, which needs a last axis of size 2 and stride 1")
            strides = tuple(s / 2 for s in x.strides[:-1])
            return [Result(x.sizes[:-1], _COMPLEX[x.dtype.name], strides, of=0, offset=x.offset / 2)]
        need(x.dtype.kind == "complex", f"{self.view} view of {x!r}, which needs complex numbers")
        if self.view == "conjugate":
            return [itself(x)]
        strides = (*(2 * s for s in x.strides), ONE)
        return [Result((*x.sizes, poly(2)), DTYPES[x.dtype.element], strides, of=0, offset=2 * x.offset)]

    def placed(self, op: Op) -> Split:
        """Split any axis but the real pairs."""
        return _split_leading_axes(op, min((op.operands[0], op.results[0]), key=lambda t: t.ndim).ndim)


def _split_leading_axes(op: Op, count: int, whole: Sequence[int] = ()) -> Split:
    """Return a rule that splits the leading axes, common to operand and result, except those in `whole`."""
    names = [() if i in whole else (f"a{i}",) for i in range(count)]
    operand_axes, result_axes = (
        (*names, *(() for _ in range(t.ndim - count))) for t in (op.operands[0], op.results[0])
    )
    return splits.across(op, [operand_axes], result_axes, lambda extents, ranks: op.kind, linear=True)


def transform_flops(points: Poly, length: Poly) -> Poly:
    """Return 5 FLOPs per point and stage, with ceil(log2(n)) stages (Cooley and Tukey 1965; FFTW's benchmarks)."""
    return 5 * points * poly(sympy.ceiling(sympy.log(length.expr, 2)))


@register
@dataclass(frozen=True, kw_only=True)
class Fourier(OpKind):
    """Discrete Fourier transform along some axes: complex, real to complex, or complex to real."""

    name = "fft"
    takes_complex = True
    axes: Annotated[tuple[int, ...], Rule("a tuple of at least one axis, without repetition", all_of(is_count))]
    """Transformed axes; a real transform stores half of the last one."""
    inverse: Flag = False
    """Whether the exponents are positive."""
    scale: Annotated[str, one_of(*SCALES)] = "none"
    last: Annotated[Poly | None, optional("None or a positive size", lambda v: v is None or is_size(v)), Limit(1)] = (
        None
    )
    """Size of the result's last axis, for transforms with half of the points on one side. The result is real if
    the operand is complex."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one contiguous result."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        need(bool(self.axes) and len(set(self.axes)) == len(self.axes), f"axes {self.axes} of a transform")
        need(max(self.axes) < x.ndim, f"axes {self.axes} of {x!r}")
        complex_ = x.dtype.kind == "complex"
        to_real = complex_ and self.last is not None
        if to_real or not complex_:
            description = f"inverse={self.inverse} of {x!r} (True for complex to real, False for real to complex)"
            need(self.inverse == to_real, description)
        sizes = list(x.sizes)
        if self.last is not None:
            sizes[self.axes[-1]] = self.last
            ends = x.sizes[self.axes[-1]], self.last
            half_points, all_points = (n.constant for n in (ends if to_real else ends[::-1]))
            if isinstance(half_points, int) and isinstance(all_points, int):
                need(all_points // 2 + 1 == half_points, f"half {half_points} of {all_points} points")
        if complex_:
            return [Result(tuple(sizes), x.dtype if self.last is None else DTYPES[x.dtype.element])]
        if x.dtype.name not in _COMPLEX:
            raise UnsupportedError(f"fft of {x!r}: expected complex numbers, or {' or '.join(_COMPLEX)}")
        return [Result(tuple(sizes), _COMPLEX[x.dtype.name])]

    def flops(self, op: Op) -> Flops:
        """Count 5*n*ceil(log2(n)) per transform, half of it for real transforms."""
        (x,), (y,) = op.operands, op.results
        real = next((t for t in (x, y) if t.dtype.kind != "complex"), None)
        reference = x if real is None else real
        length = prod((reference.sizes[a] for a in self.axes), start=ONE)
        share = 1 if real is None else Fraction(1, 2)
        return Flops(pointwise=transform_flops(reference.numel, length) * share)

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return _split_leading_axes(op, op.operands[0].ndim, self.axes)


class Layout(Protocol):
    """Layout: sizes, strides and dtype, from a tensor or a tensor specification."""

    @property
    def sizes(self) -> Sizes: ...
    @property
    def strides(self) -> Sizes: ...
    @property
    def dtype(self) -> DType: ...


def joined(operand: Layout, axes: Sequence[int]) -> Poly:
    """Return the bytes for a transform's contiguous copy of its operand, 0 if none is needed.

    No copy is needed if the other axes can be merged into one. Expanded operands are always copied.
    """
    copy = prod(operand.sizes, start=ONE) * operand.dtype.bytes
    if any(n != ONE and not step for n, step in zip(operand.sizes, operand.strides, strict=True)):
        return copy
    other_axes = [i for i, n in enumerate(operand.sizes) if i not in axes and n != ONE]
    steps, sizes = operand.strides, operand.sizes
    mergeable = any(
        all(steps[i] == steps[j] * sizes[j] for i, j in pairwise(order)) for order in permutations(other_axes)
    )
    return ZERO if mergeable else copy


def view_as(x: Tensor, view: str, *, name: str = "") -> Tensor:
    """View complex numbers as `real` pairs, real pairs as `complex` numbers, or the `conjugate`."""
    return apply(ViewAs(view=view), [x], name or ("conj" if view == "conjugate" else f"view_as_{view}"))[0]


def real_part(x: Tensor) -> Tensor:
    """Return the real part as a view."""
    return index(view_as(x, "real"), (Ellipsis, 0))
