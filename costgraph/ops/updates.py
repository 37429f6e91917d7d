"""What torch's optimizers do in one pass over their operands: elementwise functions, and kinds that write in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.tensor import Tensor
from . import rules
from .functions import FUNCTIONS, Function
from .registry import register
from .rules import Flops

__all__ = [
    "ADD_PRODUCT", "ADD_QUOTIENT", "ADD_SCALED", "ADD_SCALED_PRODUCT", "ADD_SCALED_QUOTIENT", "FUSED_UPDATE",
    "NON_FINITE", "UNSCALE", "ZERO_GRAD", "Step",
]  # fmt: skip

ADD_SCALED = Function("add_scaled", 3, 2, formula="a + t * b")
ADD_PRODUCT = Function("add_product", 3, 2, formula="a + b * c")
ADD_QUOTIENT = Function("add_quotient", 3, 2, formula="a + b / c")
ADD_SCALED_PRODUCT = Function("add_scaled_product", 4, 3, formula="a + t * b * c")
ADD_SCALED_QUOTIENT = Function("add_scaled_quotient", 4, 3, formula="a + t * b / c")
NON_FINITE = Function("non_finite", 1, 1, formula="1 where x is infinite or no number, else 0")

#: An elementwise function, its numbers with None where a register is read, those registers, and the one it writes.
Step = tuple[Function, tuple[float | None, ...], tuple[int, ...], int]


def _same_place(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    if attrs.get("inplace") is not True or len(operands) not in (1, 3) or any(t.ndim for t in operands[1:]):
        raise GraphError(f"in place into {list(operands)!r}, expected a tensor and scalars, and 'inplace'")
    x = operands[0]
    if x.touched != x.numel:
        raise ShapeError(f"in place into {x!r}: expected a tensor that is not expanded")
    return [Result(x.sizes, x.dtype, x.strides, of=0, offset=x.offset, domain=x.domain)]


def _checked_and_scaled(op: Op) -> Flops:
    """Count a product and a check of each gradient."""
    return Flops(pointwise=rules.points(op.operands[0]) * (FUNCTIONS["mul"].flops + NON_FINITE.flops))


#: Zeros in place: what was there is not read.
ZERO_GRAD = register(OpKind("zero_grad", _same_place, flops=rules.free, reads=rules.nothing, writes=rules.all_results))
#: A gradient times a scalar in place, and a flag that is set where it is not finite, which alone writes the flag.
UNSCALE = register(
    OpKind("unscale", _same_place, flops=_checked_and_scaled, reads=rules.whole, writes=rules.all_results)
)


def _infer(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    _need_description(operands, attrs)
    first = operands[0]
    for t in operands[1 : attrs["updated"]]:
        if t.ndim != first.ndim or not all(map(first.graph.same, t.sizes, first.sizes)):
            raise ShapeError(f"fused update of {first!r} with {t!r}: expected equal shapes")
    for i in attrs["changed"]:
        if operands[i].touched != operands[i].numel:
            raise ShapeError(f"fused update of {operands[i]!r}: expected a tensor that is not expanded")
    changed = [(i, operands[i]) for i in attrs["changed"]]
    return [Result(t.sizes, t.dtype, t.strides, of=i, offset=t.offset, domain=t.domain) for i, t in changed]


def _need_description(operands: Sequence[Tensor], attrs: Attrs) -> None:
    """Raise GraphError where attributes, of a file perhaps, do not describe an update of the operands."""
    updated: Any = attrs.get("updated")
    changed: Any = attrs.get("changed")
    steps: Any = attrs.get("steps")
    fits = attrs.get("inplace") is True and type(updated) is int and 0 < updated <= len(operands)
    fits = fits and isinstance(changed, tuple) and isinstance(steps, tuple) and 0 < len(set(changed)) == len(changed)
    if not fits:
        raise GraphError(
            f"fused update: {shown(updated)} tensors, of which {shown(changed)} change in place, expected places among "
            f"the {len(operands)} operands"
        )
    registers = updated
    for step in steps:
        if not _is_step(step, registers):
            raise GraphError(f"fused update: step {shown(step)}, expected a function of registers and numbers")
        registers += step[3] == registers
    written = {step[3] for step in steps if step[3] < updated}
    if list(changed) != sorted(written):
        raise GraphError(f"fused update: {shown(changed)} change in place, expected {sorted(written)}")


def _is_step(step: object, registers: int) -> bool:
    if not isinstance(step, tuple) or len(step) != 4 or not isinstance(step[0], Function):
        return False
    record, scalars, places, target = step
    if not isinstance(scalars, tuple) or not isinstance(places, tuple):
        return False
    return (
        len(scalars) == record.arity
        and all(n is None or (isinstance(n, int | float) and not isinstance(n, bool)) for n in scalars)
        and len(places) == scalars.count(None)
        and all(type(i) is int and 0 <= i < registers for i in places)
        and type(target) is int
        and 0 <= target <= registers
    )


def _flops(op: Op) -> Flops:
    return rules.applied(rules.points(op.operands[0]), *(step[0] for step in op.attrs["steps"]))


FUSED_UPDATE = register(OpKind("fused_update", _infer, flops=_flops, reads=rules.whole, writes=rules.all_results))
