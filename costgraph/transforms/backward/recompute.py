"""Computing a run of ops again in the backward pass, in place of keeping what it made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...graph.graph import Graph, current_graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ..rewrite import Rewriter
from .flow import active_in
from .walk import Hooks, Walk

__all__ = ["again"]


def again(walk: Walk, run: Sequence[Op]) -> None:
    """Compute a run of ops again from its inputs, and walk back over what that makes.

    As torch's checkpoint without reentrance does, the ops run in their order and stop after the last one that the
    backward pass reads anything of.
    """
    results = [t for op in run for t in op.results]
    if not any(t in walk.grads or t in walk.parts for t in results):
        return
    graph = current_graph()
    copier, made = Rewriter(), set(results)
    inputs: dict[Tensor, Tensor] = {}
    for t in (t for op in run for t in op.operands if t not in made):
        if t not in inputs:
            inputs[t] = copier.tensors[t] = walk.saved(t)
    copies = [copier.copy(op, graph) for op in run]
    for op in _every(copies):
        op.phase = "recompute"
    active = active_in(copies, (m for t, m in inputs.items() if t in walk.active))
    leaves = {m: walk.leaves[t] for t, m in inputs.items() if t in walk.leaves}
    hooks = walk.hooks.within or Hooks(walk.hooks.fused, walk.hooks.repeated, walk.hooks.again, lambda ops: ())
    back = Walk(hooks, active, lambda t: t, leaves=leaves)
    back.held, back.carried = walk.held, walk.carried
    # a gradient is complete in here if no op outside is still to contribute
    back.readers.update({m: walk.readers[t] - sum(t in op.operands for op in run) for t, m in inputs.items()})
    for t in results:
        grad = walk.take(t)
        if grad is not None:
            back.keep(copier.tensors[t], grad)
    for t, standin in inputs.items():
        before = walk.grads.pop(t, None)
        if before is not None:
            walk.held[before.storage] -= 1
            back.keep(standin, before)
    back.run(copies)
    for t, standin in inputs.items():
        if standin in back.final:
            walk.final[t] = back.final[standin]
        grad = back.take(standin)
        if grad is not None:
            walk.keep(t, grad)
    _stop_early(graph, copies)


def _every(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _every(op.body.ops)


def _stop_early(graph: Graph, copies: Sequence[Op]) -> None:
    """Remove the ops behind the last one of which anything is read."""
    own = set(copies)
    for op in reversed(copies):
        if any(reader not in own for t in op.results for reader in graph.successors(t)):
            return
        graph.remove_nodes_from([*op.results, op])
        own.discard(op)
