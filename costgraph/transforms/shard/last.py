"""The last micro-batch of a step apart from those before it: it is the one that reduces the gradients of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ...algebra.polynomial import ZERO
from ...graph.graph import Graph
from ...graph.loop import Loop, is_pass
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.moves import Slice
from ...ops.stacks import Empty, Stacked
from ..rewrite import Rewriter
from ..unroll import position
from .flat import added

__all__ = ["LastApart"]

T = TypeVar("T")


class LastApart(Rewriter):
    """Copies a graph with the last iteration of a loop over micro-batches written out behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[Tensor, Tensor] = {}
        """What stands for tensors of the old graph in the iterations before the last one."""

    def said(self, of: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Return what is said of tensors of the old graph, of those that stand for them."""
        return {made: what for t, what in of.items() for made in (self.tensors[t], self.before.get(t, self.tensors[t]))}

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, and a loop over micro-batches as one of all but the last, and the ops of that one.

        Gradients in buffers that a step keeps are reduced behind it where they are.
        """
        loop = op.loop if new.parent is None else None
        if loop is not None and is_pass(loop.body) and all(t.storage.role == "activation" for t in loop.starts):
            self.apart(loop, new)
        else:
            super().emit(op, new, suffix)

    def apart(self, loop: Loop, new: Graph) -> None:
        """Copy a loop but for its last iteration, and then that."""
        op, rest = loop.op, loop.count - 1
        whole = {t: self.tensors[t] for t in (*loop.xs, *loop.shared)}
        for t in loop.xs:
            first = Slice(axis=0, start=ZERO, size=rest, step=1, split=True)
            self.tensors[t] = added(new, first, [whole[t]], f"{t.name}.first", op.phase)
        stacks = {t: added(new, Empty(sizes=t.sizes, dtype=t.dtype), [], t.name, op.phase) for t in loop.stacks}
        least = 0 if rest.constant is None else 1
        body = self.body(loop.body, new, "")
        kind = replace(loop.kind, body=body, count=rest, least=least)
        made = self.add(op, kind, [self.tensors[t] for t in op.operands], new)
        self.tensors |= whole
        self.before |= self.tensors
        self.tensors |= dict(zip(loop.carries, made.results, strict=False))
        for f, t in zip(loop.slices, loop.xs, strict=True):
            self.tensors[f] = position(whole[t], rest, new, op)
        self.tensors |= {f: whole[t] for f, t in zip(loop.captured, loop.shared, strict=True)}
        self.fill(loop.body, new, ".last")
        self.tensors |= {t: self.tensors[o] for t, o in zip(loop.lasts, loop.nexts, strict=True)}
        before = dict(zip(op.results, made.results, strict=True))
        for t, o in zip(loop.stacks, loop.ys, strict=True):
            slices = [stacks[t], before[t], self.tensors[o]]
            self.tensors[t] = added(new, Stacked(), slices, f"{t.name}.filled", op.phase)
