"""Ops in place whose own gradient reads what they write over: they write beside it, as torch keeps a copy for them.

One that writes into a part of a tensor cannot, as the rest would have to be written as well: it gets that copy.
"""

from __future__ import annotations

from dataclasses import replace

from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.fill import Revised
from ...ops.functions import FUNCTIONS, names_in
from ...ops.pointwise import Pointwise
from ..rewrite import Rewriter
from .flow import active_in

__all__ = ["apart", "overwritten"]


def apart(graph: Graph) -> Graph:
    """Return a copy of a forward graph whose ops leave what the gradients of their operands read."""
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    rewriter = _Beside()
    for op in graph.ops:
        if isinstance(op.kind, Pointwise) and op.kind.inplace and not _is_unseen(op):
            x, stated = op.operands[0], op.kind.function.grad or ()
            places = [i for i, s in enumerate(op.kind.scalars or (None,) * len(op.operands)) if s is None]
            wanted = [i for i, t in zip(places, op.operands, strict=True) if t in active]
            if any("a" in names_in(expression) for i in wanted for expression in stated[i : i + 1]):
                whole = x.is_contiguous and x.numel == x.storage.elements
                (rewriter.ops if whole else rewriter.parts).add(op)
    return rewriter.run(graph)


def _is_unseen(op: Op) -> bool:
    """Whether a backward pass knows nothing of an op in place: all who read the tensor have it as it was."""
    readers = [o.kind for o in op.graph.successors(op.results[0])]
    return bool(readers) and all(isinstance(kind, Revised) and kind.unseen for kind in readers)


class _Beside(Rewriter):
    """Copies a graph, some of whose ops in place get a result, or a copy of what they write over, of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Op] = set()
        self.parts: set[Op] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if op in self.ops and isinstance(op.kind, Pointwise):
            self.add(op, replace(op.kind, inplace=False), [self.tensors[t] for t in op.operands], new)
            return
        if op in self.parts:
            kind = Pointwise(function=FUNCTIONS["copy"])
            new.add_op(kind, [self.tensors[op.operands[0]]], "clone", op.phase).scope = op.scope
        super().emit(op, new, suffix)


def overwritten(op: Op, t: Tensor) -> Tensor:
    """Return what stands for an operand behind an op: of what the op writes over, a copy that was made before it."""
    if not isinstance(op.kind, Pointwise) or not op.kind.inplace or t is not op.operands[0]:
        return t
    copies = [o for o in t.graph.successors(t) if isinstance(o.kind, Pointwise) and o.kind.function.name == "copy"]
    return copies[-1].results[0] if copies else t
