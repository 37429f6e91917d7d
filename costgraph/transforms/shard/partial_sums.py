"""Partial sums: accumulators of loops, and the terms that add up to a gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

from ...ir.graph import Graph, Loop, Op, OpKind, Placement, Tensor, is_pass
from ...ops.elementwise import Pointwise
from ...ops.layout import KeepAlive
from ...ops.loops import Accumulate

__all__ = [
    "accumulated_stacks",
    "adds",
    "reduced_after_loop",
    "origin",
    "pending_of",
    "chain_to_gradient",
    "weight_gradients",
    "targets",
]


# -- accumulators ------------------------------------------------------------------------------------------------------


def adds(op: Op) -> bool:
    """Whether an op accumulates a term in place, in any format."""
    kind = op.kind
    into = isinstance(kind, Pointwise) and kind.inplace and kind.function.name == "add" and len(op.operands) == 2
    return isinstance(kind, Accumulate) or (into and op.operands[1].sizes == op.results[0].sizes)


def origin(t: Tensor) -> Tensor:
    """Return the source whose storage a tensor is in, through in-place ops and loop carries.

    If there is none, return the first tensor in that storage.
    """
    while True:
        op, owner = t.producer, t.graph.owner
        if op is None:
            if t.role != "formal" or owner is None:
                return t
            t = owner.operands[t.graph.formals.index(t)]
            continue
        before = next((o for o in op.operands if o.storage is t.storage), None)
        if before is None and op.loop is not None:
            output = op.loop.body.outputs[op.results.index(t)]
            pairs = zip(op.loop.body.formals, op.operands, strict=True)
            before = next((o for f, o in pairs if f.storage is output.storage), None)
        if before is None:
            return t
        t = before


class PartialSums(NamedTuple):
    """A stack that a loop reads in slices, adds terms to, and stacks again."""

    result: Tensor
    read: Tensor
    slice: Tensor
    last: Tensor
    """The slice as an iteration leaves it."""
    terms: list[Tensor]


def accumulated_stacks(loop: Loop) -> list[PartialSums]:
    """Return the stacks to whose slices a loop does nothing but add terms."""
    of = dict(zip(loop.slices, loop.xs, strict=True))
    out = []
    for r, last in zip((*loop.stacks, *loop.pieces), (*loop.ys, *loop.saved), strict=True):
        start, terms = _chain(last)
        if terms and start in of:
            out.append(PartialSums(r, of[start], start, last, terms))
    return out


def _chain(t: Tensor, adds: Callable[[Op], bool] = adds) -> tuple[Tensor, list[Tensor]]:
    """Return the accumulator a tensor is built from, here or slice by slice in a loop, and the terms."""
    out: list[Tensor] = []
    while t.producer is not None:
        op = t.producer
        if adds(op):
            t, term = op.operands
            out.append(term)
            continue
        stack = next((a for a in accumulated_stacks(op.loop) if a.result is t), None) if op.loop is not None else None
        if stack is None:
            break
        t = stack.read
        out += stack.terms
    return t, out


def _accumulates(op: Op) -> bool:
    return isinstance(op.kind, Accumulate)


def _terms(loop: Loop, i: int, adds: Callable[[Op], bool] = adds) -> list[Tensor]:
    """Return the terms an iteration adds to a carry; empty if it uses the carry otherwise."""
    start, terms = _chain(loop.nexts[i], adds)
    alone = start is loop.carries[i] and len({*loop.body.successors(start)}) == 1
    return terms if alone else []


def reduced_after_loop(loop: Loop, i: int, each: bool) -> bool:
    """Whether a carry is a partial sum that is reduced once, after the loop.

    With `each`, carries of micro-batch loops are not, nor are buffers in another format.
    """
    return bool(_terms(loop, i, _accumulates if each else adds)) and not (each and is_pass(loop.body))


def pending_of(
    loop: Loop, i: int, tensors: Mapping[Tensor, Any], placements: Mapping[Any, Placement]
) -> Placement | None:
    """Return the common placement of a carry's terms, None if they are not all partial sums alike."""
    carry = loop.carries[i]
    ndims = {placements.get(tensors[t]): t.ndim for t in _terms(loop, i)}
    (first, ndim), *others = ndims.items()
    if others or first is None or not first.partial or any(operation != "sum" for _, operation in first.partial):
        return None
    return first.with_dims([*((),) * (carry.ndim - ndim), *first.dims])


# -- terms of gradients ------------------------------------------------------------------------------------------------
# Terms are reduced to the placement of their gradient.

T = TypeVar("T")


def _adds(op: Op) -> bool:
    return isinstance(op.kind, Accumulate)


def targets(graph: Graph, gradients: Mapping[Tensor, T], adds: Callable[[Op], bool] = _adds) -> dict[Tensor, T]:
    """Extend a mapping of gradients to the terms that are accumulated into them."""
    extended = dict(gradients)
    worklist = list(gradients)
    while worklist:
        t = worklist.pop()
        op = t.producer
        if op is None or not (isinstance(op.kind, KeepAlive) or adds(op)):
            continue
        for o in op.operands[: 1 if isinstance(op.kind, KeepAlive) else 2]:
            if o.sizes == t.sizes and o.producer is not None and o not in extended:
                extended[o] = extended[t]
                worklist.append(o)
    return extended


def chain_to_gradient(t: Tensor, gradients: Collection[Tensor], same: tuple[type[OpKind], ...]) -> list[Op] | None:
    """Return the unary ops that turn a tensor into a gradient by a cast or another axis order.

    The list is empty for a gradient itself; None if the tensor does not become a gradient.
    """
    ops: list[Op] = []
    while t not in gradients:
        # a `KeepAlive` only extends the lifetime of its further operands
        readers = [op for op in t.graph.successors(t) if not isinstance(op.kind, KeepAlive) or op.operands[0] is t]
        if len(readers) != 1 or not isinstance(readers[0].kind, same) or len(readers[0].operands) != 1:
            return None
        ops += readers
        (t,) = readers[0].results
    return ops


def weight_gradients(graph: Graph, adds: Callable[[Op], bool], same: tuple[type[OpKind], ...]) -> set[Tensor]:
    """Return the parameter gradients and their terms, also inside loops, in other formats and axis orders."""
    worklist = [g for t, g in graph.gradients.items() if t.role == "param"]
    grads = {*worklist}
    while worklist:
        t = worklist.pop()
        op = t.producer
        if op is None:
            continue
        if op.loop is not None:
            before = [op.loop.body.outputs[op.results.index(t)]]
        elif adds(op):
            before = [*op.operands[:2]]
        else:
            alone = isinstance(op.kind, KeepAlive) or (isinstance(op.kind, same) and len(op.operands) == 1)
            before = [*op.operands[:1]] if alone else []
        worklist += [o for o in before if o not in grads]
        grads |= {*before}
    return grads
