"""Saved tensors of branches that receive no gradient.

A mask, an index or an unused variable may be computed from parameters. The backward pass never reaches these ops, yet
autograd saves tensors for them, and frees these with the last tensor of the branch.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.scopes import opened
from ...graph.tensor import Storage, Tensor
from ...ops.keep import Keep
from ..rewrite import Rewriter
from .flow import active_in, graded_in
from .walk import Hooks, Walk

__all__ = ["with_branches"]


def with_branches(graph: Graph, hooks: Hooks) -> Graph:
    """Return a forward graph in which the saved tensors of such branches live until the branch is freed.

    Recomputed ops save nothing.
    """
    ops = graph.ops
    active = active_in(ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    graded = graded_in(ops, active, (t for t in graph.outputs if not t.sizes))
    again = {op for run in hooks.runs(ops) for op in run}
    dead = [op for op in ops if op not in again and op.loop is None and _is_dead(op, active, graded)]
    if not dead:
        return graph
    places = {op: i for i, op in enumerate(ops)}
    last: dict[Storage, int] = {t.storage: places[op] for op in ops for t in op.operands}
    last |= dict.fromkeys((t.storage for t in graph.outputs), len(ops) - 1)
    ends: dict[Op, int] = {}
    held: dict[int, set[Storage]] = {}
    with graph:
        for op in reversed(dead):
            later = [ends[o] for t in op.results for o in graph.successors(t) if o in ends]
            ends[op] = max([places[op], *(last.get(t.storage, 0) for t in op.results), *later])
            for t in _saved(op, active, hooks):
                if t.role == "activation" and last.get(t.storage, -1) < ends[op]:
                    held.setdefault(ends[op], set()).add(t.storage)
    newest = {t.storage: t for op in ops for t in op.results}  # a Keep reads a storage as it is after the last write
    kept = {ops[i]: [t for storage, t in newest.items() if storage in storages] for i, storages in held.items()}
    return _Holding(kept).run(graph)


def _is_dead(op: Op, active: Collection[Tensor], graded: Collection[Tensor]) -> bool:
    return not op.kind.no_grad and any(t in active for t in op.results) and not any(t in graded for t in op.results)


def _saved(op: Op, active: set[Tensor], hooks: Hooks) -> list[Tensor]:
    """Return the tensors that the gradient rule of an op reads; none if it has no rule."""
    scratch = Graph("saved")
    scratch.relations = op.graph.root.relations
    asked: dict[Tensor, Tensor] = {}

    def stand_in(t: Tensor) -> Tensor:
        made = Tensor(scratch, scratch.unique("x"), t.sizes, t.dtype, role="input", strides=t.strides)
        made.domain = t.domain
        scratch.add_node(made)
        return made

    def saved(t: Tensor) -> Tensor:
        return asked[t] if t in asked else asked.setdefault(t, stand_in(t))

    grads = [stand_in(t) if t in active else None for t in op.results]
    with opened(graph=scratch, levels=(), phase="backward"), suppress(UnsupportedError):
        Walk(hooks, active, saved).gradients(op, grads, tuple(t in active for t in op.operands))
    return list(asked)


class _Holding(Rewriter):
    """Copies a graph, and keeps tensors alive until after some of its ops."""

    def __init__(self, held: dict[Op, list[Tensor]]) -> None:
        super().__init__()
        self.held = held

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add an op, and a `Keep` of the tensors that live until here."""
        super().emit(op, new, suffix)
        if op in self.held:
            new.add_op(Keep(), [self.tensors[t] for t in self.held[op]], "keep", op.phase)
