"""Which tensors a backward pass goes through: what may want a gradient, and what one comes to."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from ...algebra.polynomial import ONE
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.fill import Revised
from ...ops.foreign import Foreign
from ...ops.keep import Keep

__all__ = ["active_in", "active_inside", "graded_in", "graded_inside", "is_leaf"]


def active_in(ops: Iterable[Op], start: Iterable[Tensor], standing: Container[Op] = ()) -> set[Tensor]:
    """Return the tensors whose gradient may be wanted: those given, and what is computed from them.

    Some of the ops that hold tensors may be `standing` for what has computed something of these.
    """
    active = set(start)
    for op in ops:
        if op.body is not None and op.loop is not None:
            _active_carries(op, active)
        elif is_leaf(op):
            active.update(op.results)
        elif _passes(op) and any(t in active for t in (op.operands if op in standing else _before(op))):
            active.update(t for t in op.results if t.dtype.kind in ("float", "complex"))
    return active


def is_leaf(op: Op) -> bool:
    """Whether an op makes a leaf of autograd, whose gradient is asked for whatever its operand is."""
    return isinstance(op.kind, Keep) and op.kind.leaf


def _before(op: Op) -> Sequence[Tensor]:
    """Return the operands that a gradient may go to: what is held until an op, or written unseen, has none of it."""
    alone = isinstance(op.kind, Keep) or (isinstance(op.kind, Revised) and op.kind.unseen)
    return op.operands[:1] if alone else op.operands


def _passes(op: Op) -> bool:
    return op.kind.passes_gradients and not (isinstance(op.kind, Foreign) and op.kind.is_blind)


def active_inside(op: Op, active: set[Tensor]) -> set[Tensor]:
    """Return the active tensors of a body, in any of its iterations."""
    body, loop = op.body, op.loop
    assert body is not None
    start = [f for f, t in zip(body.formals, op.operands, strict=True) if t in active]
    start += [t for t in body.tensors if t.producer is None and t.requires_grad]
    if loop is not None and loop.count != ONE:  # what an iteration makes is what the next one starts from
        start += [f for f, r in zip(loop.carries, loop.lasts, strict=True) if r in active]
    return active_in(body.ops, start)


def _active_carries(op: Op, active: set[Tensor]) -> None:
    """Add the results of a loop that depend on what is active; a carry makes itself active an iteration later."""
    assert op.body is not None
    while True:
        inside = active_inside(op, active)
        found = {r for r, t in zip(op.results, op.body.outputs, strict=True) if t in inside} - active
        if not found:
            return
        active |= found


def graded_in(ops: Iterable[Op], active: set[Tensor], ends: Iterable[Tensor]) -> set[Tensor]:
    """Return the active tensors that a gradient comes to: those given, and what they are computed from."""
    graded = active.intersection(ends)
    for op in reversed(list(ops)):
        if not any(t in graded for t in op.results):
            continue
        if op.body is None:
            graded.update(t for t in op.operands if t in active)
        else:
            inside = graded_inside(op, active, graded)
            pairs = zip(op.body.formals, op.operands, strict=True)
            graded.update(t for f, t in pairs if f in inside and t in active)
    return graded


def graded_inside(op: Op, active: set[Tensor], graded: set[Tensor]) -> set[Tensor]:
    """Return the tensors of a body that a gradient comes to, in any of its iterations."""
    body, loop = op.body, op.loop
    assert body is not None
    within = active_inside(op, active)
    ends = {t for t, r in zip(body.outputs, op.results, strict=False) if r in graded}
    while True:
        found = graded_in(body.ops, within, ends)
        if loop is None or loop.count == ONE:
            return found
        # what an iteration starts from is what the one before has made
        more = {t for f, t in zip(loop.carries, loop.nexts, strict=True) if f in found} - ends
        if not more:
            return found
        ends |= more
