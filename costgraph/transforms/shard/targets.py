"""Gradients, and what they are made up of: all of it is reduced to where the gradient is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from ...ops.pieces import Accumulate

__all__ = ["becoming", "made_of", "targets"]

T = TypeVar("T")


def _adds(op: Op) -> bool:
    return isinstance(op.kind, Accumulate)


def targets(graph: Graph, gradients: Mapping[Tensor, T], adds: Callable[[Op], bool] = _adds) -> dict[Tensor, T]:
    """Return what is said of gradients, of sums on the way to them as well: what ops make that add to them."""
    found = dict(gradients)
    left = list(gradients)
    while left:
        t = left.pop()
        op = t.producer
        if op is None or not (isinstance(op.kind, Keep) or adds(op)):
            continue
        for o in op.operands[: 1 if isinstance(op.kind, Keep) else 2]:
            if o.sizes == t.sizes and o.producer is not None and o not in found:
                found[o] = found[t]
                left.append(o)
    return found


def becoming(t: Tensor, gradients: Collection[Tensor], same: tuple[type[OpKind], ...]) -> list[Op] | None:
    """Return the ops of one operand that make a gradient of a tensor: another format, or other axes.

    Of a gradient itself there are none; None where the tensor becomes no gradient.
    """
    ops: list[Op] = []
    while t not in gradients:
        # what lives as long as a program names it is read by nobody for that
        readers = [op for op in t.graph.successors(t) if not isinstance(op.kind, Keep) or op.operands[0] is t]
        if len(readers) != 1 or not isinstance(readers[0].kind, same) or len(readers[0].operands) != 1:
            return None
        ops += readers
        (t,) = readers[0].results
    return ops


def made_of(graph: Graph, adds: Callable[[Op], bool], same: tuple[type[OpKind], ...]) -> set[Tensor]:
    """Return tensors that are gradients of parameters, or added to one: inside of loops, in other formats and axes."""
    left = [g for t, g in graph.gradients.items() if t.role == "param"]
    found = {*left}
    while left:
        t = left.pop()
        op = t.producer
        if op is None:
            continue
        if op.loop is not None:
            before = [op.loop.body.outputs[op.results.index(t)]]
        elif adds(op):
            before = [*op.operands[:2]]
        else:
            alone = isinstance(op.kind, Keep) or (isinstance(op.kind, same) and len(op.operands) == 1)
            before = [*op.operands[:1]] if alone else []
        left += [o for o in before if o not in found]
        found |= {*before}
    return found
