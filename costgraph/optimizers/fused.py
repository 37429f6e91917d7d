"""An update in one kernel: every tensor is read once, and the parameter and its state are written in place.

The kernel takes the steps that the same update takes as ops of its own, and so counts their FLOPs; what passes from
one step to the next stays in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..graph.graph import Graph, apply
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.tensor import Tensor
from ..ops import rules
from ..ops.keep import KEEP
from ..ops.pointwise import Function
from ..ops.registry import register
from ..ops.rules import Flops
from .calls import Calls, Column, Update

__all__ = ["FUSED_UPDATE", "fused_update"]

#: An elementwise function, its numbers with None where a register is read, those registers, and the one it writes.
Step = tuple[Function, tuple[float | None, ...], tuple[int, ...], int]


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
    count = rules.points(op.operands[0])
    functions = [step[0] for step in op.attrs["steps"]]
    return Flops(
        pointwise=count * sum(f.flops for f in functions),
        transcendental=count * sum(f.transcendentals for f in functions),
    )


FUSED_UPDATE = register(OpKind("fused_update", _infer, flops=_flops, reads=rules.whole, writes=rules.all_results))


def fused_update(update: Update, group: Column, beside: Column = (), *, name: str) -> Column:
    """Run a whole update of one parameter in one kernel.

    Parameters
    ----------
    update : callable
        Elementwise ops on columns of one tensor each.
    group : tuple of Tensor
        What is updated, its gradient and its state.
    beside : tuple of Tensor
        What the kernel reads as well: a step counter.
    name : str
        Name of the op.

    Returns
    -------
    tuple of Tensor
        What is updated, and its gradient, as they are afterwards.
    """
    steps, changed = _steps(update, group)
    attrs = {"steps": steps, "changed": changed, "updated": len(group), "inplace": True}
    made = dict(zip(changed, apply(FUSED_UPDATE, [*group, *beside], attrs, name), strict=True))
    return made.get(0, group[0]), made.get(1, group[1])


def _steps(update: Update, group: Column) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Write an update down as steps on registers: the first ones hold the operands."""
    with Graph("update") as scratch:
        scratch.relations = group[0].graph.root.relations
        given = [scratch.input(f"operand{i}", t.sizes, t.dtype) for i, t in enumerate(group)]
        update(Calls(listed=False), *((t,) for t in given))
    registers = {t: i for i, t in enumerate(given)}
    steps: list[Step] = []
    free = len(given)
    for op in scratch.ops:
        if op.kind is KEEP:  # nothing is kept in memory here
            registers[op.results[0]] = registers[op.operands[0]]
            continue
        if op.kind.name != "pointwise":
            raise GraphError(f"fused update: op {op.name!r} of kind {op.kind.name!r}, expected elementwise ops alone")
        places = tuple(registers[t] for t in op.operands)
        target = places[0] if op.attrs.get("inplace") else free
        free += target == free
        registers[op.results[0]] = target
        steps.append((op.attrs["function"], op.attrs.get("scalars", (None,) * len(places)), places, target))
    written = {step[3] for step in steps}
    return tuple(steps), tuple(i for i in range(len(given)) if i in written)
