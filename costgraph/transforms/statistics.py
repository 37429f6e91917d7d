"""Batch norms as they train: with the statistics of the batch, and running ones updated."""

from __future__ import annotations

from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.scopes import opened
from ..nn.norms import over_the_batch
from .rewrite import Rewriter

__all__ = ["trained"]


def trained(rewriter: Rewriter, op: Op, new: Graph) -> bool:
    """Add a batch norm with statistics of the batch for one that leaves the choice; for use as `emit`."""
    if op.attrs.get("statistics") != "auto":
        return False
    *levels, name = op.name.split("/")
    with opened(graph=new, levels=tuple(levels), phase=op.phase):
        made = over_the_batch(*(rewriter.tensors[t] for t in op.operands), name=name)
    rewriter.tensors[op.results[0]] = made
    return True
