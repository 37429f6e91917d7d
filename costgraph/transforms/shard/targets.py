"""Gradients, and what they are made up of: all of it is reduced to where the gradient is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from ...graph.graph import Graph
from ...graph.op import Op, OpKind
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from ...ops.pieces import Accumulate

__all__ = ["becoming", "targets"]

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
        readers = list(t.graph.successors(t))
        if len(readers) != 1 or not isinstance(readers[0].kind, same) or len(readers[0].operands) != 1:
            return None
        ops += readers
        (t,) = readers[0].results
    return ops
