"""Batch norms in training mode: batch statistics, with the running ones updated."""

from __future__ import annotations

from ..ir.graph import Graph, Op, opened
from ..nn.norms import over_the_batch
from ..ops.loops import Kernel
from .rewrite import Rewriter

__all__ = ["Trained"]


class Trained(Rewriter):
    """Copies a graph, with batch statistics in batch norms whose mode is `auto`."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or replace a batch norm."""
        if not isinstance(op.kind, Kernel) or op.kind.statistics != "auto":
            super().emit(op, new, suffix)
            return
        *levels, name = op.name.split("/")
        with opened(graph=new, levels=tuple(levels), phase=op.phase):
            result = over_the_batch(*(self.tensors[t] for t in op.operands), name=name)
        self.tensors[op.results[0]] = result
