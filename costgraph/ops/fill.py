"""Constants, assignment and padding: ops that write memory without reading its previous contents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Annotated

from ..algebra.polynomial import ZERO, Poly, poly
from ..algebra.symbols import shown
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Count,
    Flag,
    Index,
    Length,
    Limit,
    Op,
    OpKind,
    Result,
    Room,
    Shape,
    Split,
    Start,
    Tensor,
    all_of,
    apply,
    is_amount,
    is_count,
    itself,
    need,
    need_tensor,
    positive,
    sizes_of,
)
from ..notation.validation import Rule
from . import rules
from . import sharding_rule as splits
from .access_footprint import alike, carried
from .layout import axis_of, need_within, room
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = [
    "DenseFactory",
    "Assign",
    "Fill",
    "Pad",
    "SliceUpdate",
    "assign",
    "fill",
    "pad",
]


# -- base class --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DenseFactory(OpKind):
    """Kind of op that creates a contiguous tensor from a shape and dtype, without operands."""

    sizes: Shape
    dtype: DType
    host: Flag = False
    """Whether it is created in host memory."""
    flops, reads, writes = rules.free, rules.no_operands, rules.all_results
    placed = splits.fresh

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the new tensor."""
        rules.need_operands(self, operands, 0)
        return [Result(self.sizes, self.dtype, host=self.host)]


# -- op kinds ----------------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class Fill(DenseFactory):
    """Tensor filled with one value."""

    name = "fill"
    value: Annotated[
        complex | Poly, Rule("a number, or a formula", lambda v: isinstance(v, int | float | complex | Poly))
    ]


@register
@dataclass(frozen=True, kw_only=True)
class Assign(OpKind):
    """Copy into a target with the same shape."""

    name = "assign"
    restricted = True
    flops, writes = rules.free, rules.all_results
    placed = splits.same_shape

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the target."""
        rules.need_operands(self, operands, 2)
        target, value = operands
        if target.ndim != value.ndim or not all(map(target.graph.same, target.sizes, value.sizes)):
            raise ShapeError(f"assign {value!r} to {target!r}: expected equal shapes")
        alike(operands)
        return [itself(target)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the value; the target is not read."""
        return ZERO, rules.elements(op.operands[1])

    def overwrites(self) -> tuple[int, ...]:
        """Return the target."""
        return (0,)


@register
@dataclass(frozen=True, kw_only=True)
class SliceUpdate(OpKind):
    """Tensor after a write to some of its positions along given axes: a rename that depends on the write."""

    name = "slice_update"
    renames = True
    axes: Annotated[tuple[int, ...], Rule("a tuple of axes", all_of(is_count))]
    starts: Annotated[tuple[Poly, ...], Rule("a tuple of amounts", all_of(is_amount)), Limit(0)]
    """First position on each axis."""
    steps: Annotated[tuple[int, ...], Rule("a tuple of integers of at least 1", all_of(lambda v: is_count(v, 1)))]
    untracked: Flag = False
    """Whether the write is invisible to autograd, which sees the tensor before it."""
    flops, reads, writes = rules.free, rules.nothing, rules.nothing

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the first operand; the second is the part that has been written."""
        rules.need_operands(self, operands, 2)
        (x, part), axes = operands, self.axes
        need(len(axes) == len(self.starts) == len(self.steps), f"{len(axes)} axes, starts and steps")
        need(max(axes, default=0) < x.ndim, f"axes {axes} of {x!r}")
        fits = part.ndim == x.ndim and all(
            i in axes or x.graph.same(a, b) for i, (a, b) in enumerate(zip(x.sizes, part.sizes, strict=True))
        )
        if not fits or part.storage is not x.storage:
            positions = f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes}"
            raise ShapeError(f"{part!r} as a slice of {x!r}: expected positions of {positions} in the same storage")
        return [itself(x)]

    @property
    def places(self) -> list[tuple[int, Poly, int]]:
        """Axis, first position and step, for each axis that the part does not cover."""
        return list(zip(self.axes, self.starts, self.steps, strict=True))

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return splits.alike(op, whole=self.axes, linear=True)


@register
@dataclass(frozen=True, kw_only=True)
class Pad(OpKind):
    """Tensor with zeros around it and between its positions, along one axis."""

    name = "pad"
    restricted = True
    axis: Index
    start: Start
    step: Count
    full: Length
    room: Room
    """Positions after the last one, checked when sizes are bound."""
    causal: Flag = False
    """Whether zeros at the start stand for earlier positions, which `decode` caches."""
    flops, reads, writes = rules.free, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one contiguous result."""
        rules.need_operands(self, operands, 1)
        (x,), axis, start, step, full = operands, self.axis, self.start, self.step, self.full
        need(axis < x.ndim, f"axis {axis} of {x!r}")
        expected = f"{x.sizes[axis]} positions from {start} by {step} within {full}"
        need_within(f"pad of {x!r}", axis, expected, start=start, room=room(full, start, x.sizes[axis], step))
        domain = carried(x, [None if i == axis else i for i in range(x.ndim)])
        return [Result((*x.sizes[:axis], full, *x.sizes[axis + 1 :]), x.dtype, domain=domain)]

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return splits.alike(op, whole=[self.axis], linear=True)

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Check the room against the axis."""
        remaining = room(self.full, self.start, operands[0].sizes[self.axis], self.step)
        need(self.room == remaining, f"room {shown(str(self.room))}")


def fill(shape: Sequence[object], value: complex | Poly = 0, dtype: object = "fp32", *, name: str = "zeros") -> Tensor:
    """Create a tensor filled with a number, or a formula of sizes, in the open graph: no FLOPs, one write.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import fill
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     zeros = fill((B, D))
    >>> cg.flops(g), cg.bytes_moved(g)
    (0, 4*B*D)
    """
    if isinstance(value, bool) or not isinstance(value, Real | complex | Poly):
        raise GraphError(f"fill: value {value!r}, expected a number")
    number = value if isinstance(value, complex | Poly) else float(value)
    return apply(Fill(sizes=sizes_of(shape, "fill"), dtype=find_dtype(dtype), value=number), [], name)[0]


def assign(target: Tensor, value: Tensor, *, name: str = "assign") -> Tensor:
    """Copy a tensor into a target or a view, as torch's `copy_`: one read, one write, no FLOPs.

    Both have the same shape; values are cast to the target's dtype.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import assign
    >>> N = cg.dims("N")
    >>> with cg.Graph("g") as g:
    ...     y = assign(g.input("total", (N,)), g.input("part", (N,), "bf16"))
    >>> cg.flops(g), cg.bytes_moved(g)
    (0, 6*N)
    """
    need_tensor("assign", target, value)
    return apply(Assign(), [target, value], name)[0]


def pad(
    x: Tensor, axis: int, start: object, full: object, step: int = 1, *, causal: bool = False, name: str = "pad"
) -> Tensor:
    """Pad with zeros: place a tensor at `start`, `start + step`, ... on an axis of size `full`; reverses `slice_axis`.

    The result is contiguous: no FLOPs, one read of `x`, one write of the result. Set `causal` if the axis holds
    positions and the zeros at its start stand for earlier ones, which `decode` caches.

    Examples
    --------
    >>> import costgraph as cg
    >>> from costgraph.ops.fill import pad
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     y = pad(g.input("x", (B, S)), 1, 0, 2*S)
    >>> y.shape, cg.bytes_moved(g)
    ((B, 2*S), 12*B*S)
    """
    need_tensor("pad", x)
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ShapeError(f"pad of {x!r}: step {step!r}, expected a positive integer")
    dim, offset, size = axis_of(x, axis), poly(start), positive("pad: full", full)
    remaining = room(size, offset, x.sizes[dim], step)
    return apply(Pad(axis=dim, start=offset, step=step, full=size, room=remaining, causal=causal), [x], name)[0]
