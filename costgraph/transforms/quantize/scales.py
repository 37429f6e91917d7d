"""What kernels do with narrow operands: widening, scales of groups, channels and tokens, and rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...algebra.polynomial import ONE, Poly
from ...dtypes import DType
from ...errors import UnsupportedError
from ...graph.op import Op
from ...graph.strides import windows_along
from ...graph.tensor import Tensor
from ...notation.pattern import Pattern
from ...ops.blocks import kernel
from ...ops.contraction import Einsum
from ...ops.layout import expand, rearrange
from ...ops.pointwise import cast, pointwise
from ...ops.reduce import reduce

__all__ = ["added_up", "divided", "groups", "packing", "rounded", "row_scaled", "unpacked", "widened"]


def divided(op: Op, pattern: Pattern, place: int) -> tuple[list[int], tuple[int, ...]]:
    """Return the axes of an operand of a product that the result has, and those that are summed."""
    names = set(pattern.operand_names(place)) - set(pattern.result_names)
    dims = pattern.operands[place]
    summed = tuple(i for i, d in enumerate(dims) if d.names and names >= set(d.names))
    outer = [i for i in range(len(dims)) if i not in summed]
    if any(names & set(dims[i].names) for i in outer):
        raise UnsupportedError(
            f"quantize: {op.name!r} sums a part of an axis of its activations, expected whole axes, or its weight in "
            f"skip="
        )
    return outer, summed


def packing(stored: DType, *, scaled: bool) -> tuple[bool, bool]:
    """Return whether a weight has zero points and scales of groups; those of a block format are part of conversion."""
    return bool(stored.element) and len(stored.scale) > 1, scaled and bool(stored.element and stored.block)


def unpacked(w: Tensor, wanted: DType, *, scaled: bool) -> Tensor:
    """Widen a weight inside a kernel and apply what is stored beside it: zero points, and the scales of groups."""
    zero, scaled = packing(w.dtype, scaled=scaled)
    w = cast(w, wanted, name="widen")
    if zero:
        w = pointwise("sub", w, 0, dtype=wanted, name="zero_point")
    return pointwise("mul", w, 1.0, dtype=wanted, name="group_scale") if scaled else w


def groups(op: Op, place: int, group: int) -> Poly:
    """Return how many groups share scales along the summed axes of a product."""
    count: Poly = op.operands[place].sizes[1]
    if isinstance(op.kind, Einsum):
        pattern, count = op.kind.pattern, ONE
        for name in pattern.operand_names(place):
            count = count if name in pattern.result_names else count * op.kind.extents[name]
    return windows_along(count, 0, group)


def added_up(y: Tensor, count: Poly, wanted: DType) -> Tensor:
    """Add up the sums of groups, each times its scale: where operands are multiplied as they are stored."""
    names = " ".join(f"a{i}" for i in range(y.ndim))
    size: Any = count
    parts = expand(y, f"{names} -> g {names}", g=size, name="groups")
    scaled = pointwise("mul", parts, 1.0, dtype=wanted, name="group_scale")
    return reduce(scaled, f"g {names} -> {names}", "sum", name="group_sum")


def widened(t: Tensor, wanted: DType, *, fused: bool) -> Tensor:
    """Widen a tensor, with its scales."""
    if not t.dtype.element:
        return cast(t, wanted)
    if fused:
        made = cast(t, wanted)
        if len(t.dtype.scale) > 1:
            made = pointwise("sub", made, 0, dtype=wanted, name="zero_point")
        return pointwise("mul", made, 1.0, dtype=wanted, name="scale")
    with kernel("dequantize") as body:
        made = widened(t, wanted, fused=True)
    return body.export(made)


def row_scaled(pattern: Pattern, i: int, y: Callable[[Tensor], Tensor], other: Tensor) -> Tensor:
    """Multiply with an operand whose rows have scales: the sums by them, or the other operand where rows are kept."""
    if set(pattern.operands[i][-1].names) & set(pattern.result_names):
        return y(pointwise("mul", other, 1.0, dtype=other.dtype, name="row_scale"))
    made = y(other)
    return pointwise("mul", made, 1.0, dtype=made.dtype, name="row_scale")


def rounded(x: Tensor, outer: Sequence[int], summed: Sequence[int], wanted: DType, *, fused: bool) -> Tensor:
    """Quantize activations: the largest magnitude of what shares a scale, a division, a product and a rounding."""
    if not fused:
        with kernel("quantize") as body:
            made = rounded(x, outer, summed, wanted, fused=True)
        return body.export(made)
    names = [f"a{i}" for i in range(x.ndim)]
    kept = ["1" if i in summed else n for i, n in enumerate(names)]
    # of a block format too: a maximum over the blocks of a row compares as many elements
    largest = reduce(pointwise("abs", x), f"{' '.join(names)} -> {' '.join(kept)}", "max", name="amax")
    scale = pointwise("div", float(wanted.max), cast(largest, "fp32"), name="scale")
    x = pointwise("clamp", pointwise("mul", x, scale, dtype=x.dtype, name="scaled"))
    if len(summed) != 1 or summed[0] != x.ndim - 1:
        right = " ".join([*(names[i] for i in outer), f"({' '.join(names[i] for i in summed)})"])
        x = rearrange(x, f"{' '.join(names)} -> {right}", name="order")
    return cast(x, wanted)
