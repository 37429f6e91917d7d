"""Ops in place whose own gradient reads what they write over: they write beside it, as torch keeps a copy for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...graph.graph import Graph
from ...graph.op import Op
from ...ops.pointwise import Pointwise
from ..rewrite import Rewriter
from .flow import active_in

__all__ = ["apart"]


def apart(graph: Graph) -> Graph:
    """Return a copy of a forward graph whose ops leave what the gradients of their operands read."""
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    rewriter = _Beside()
    for op in graph.ops:
        if isinstance(op.kind, Pointwise) and op.kind.inplace:
            x, stated = op.operands[0], op.kind.function.grad or ()
            places = [i for i, s in enumerate(op.kind.scalars or (None,) * len(op.operands)) if s is None]
            wanted = [i for i, t in zip(places, op.operands, strict=True) if t in active]
            # of a part the rest would have to be written as well
            whole = x.is_contiguous and x.numel == x.storage.elements
            if whole and any("a" in _names(expression) for i in wanted for expression in stated[i : i + 1]):
                rewriter.ops.add(op)
    return rewriter.run(graph)


def _names(expression: Any) -> Iterator[str]:
    """Yield the names in the gradient of a function."""
    if isinstance(expression, tuple):
        for part in expression[1:]:
            yield from _names(part)
    elif isinstance(expression, str):
        yield expression


class _Beside(Rewriter):
    """Copies a graph, some of whose ops in place get a result of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Op] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if op in self.ops and isinstance(op.kind, Pointwise):
            self.add(op, replace(op.kind, inplace=False), [self.tensors[t] for t in op.operands], new)
        else:
            super().emit(op, new, suffix)
