"""An update in one kernel: every tensor is read once, and the parameter and its state are written in place.

The kernel takes the steps that the same update takes as ops of its own, and so counts their FLOPs; what passes from
one step to the next stays in registers.
"""

from __future__ import annotations

from ..errors import GraphError
from ..graph.graph import Graph, apply
from ..ops.keep import Keep
from ..ops.pointwise import Pointwise
from ..ops.updates import FusedUpdate, Step
from .calls import Calls, Column, Update

__all__ = ["fused_update"]


def fused_update(update: Update, group: Column, beside: Column = (), *, name: str) -> Column:
    """Run a whole update of one parameter, elementwise ops on columns of one tensor each, in one kernel.

    `group` is what is updated, its gradient and its state; `beside` what the kernel reads as well: a step counter.
    """
    steps, changed = _steps(update, group)
    kind = FusedUpdate(steps=steps, changed=changed, updated=len(group))
    made = dict(zip(changed, apply(kind, [*group, *beside], name), strict=True))
    return tuple(made.get(i, t) for i, t in enumerate(group))


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
        if isinstance(op.kind, Keep):  # nothing is kept in memory here
            registers[op.results[0]] = registers[op.operands[0]]
            continue
        if not isinstance(op.kind, Pointwise):
            raise GraphError(f"fused update: op {op.name!r} of kind {op.kind.name!r}, expected elementwise ops alone")
        places = tuple(registers[t] for t in op.operands)
        target = places[0] if op.kind.overwrites() else free
        free += target == free
        registers[op.results[0]] = target
        steps.append(Step(op.kind.function, op.kind.scalars or (None,) * len(places), places, target))
    written = {step.target for step in steps}
    return tuple(steps), tuple(i for i in range(len(given)) if i in written)
