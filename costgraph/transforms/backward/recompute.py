"""Computing a run of ops again in the backward pass, in place of keeping what it made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.polynomial import ONE
from ...errors import GraphError
from ...graph.graph import Graph, current_graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.keep import Keep, keep
from ..rewrite import Rewriter
from ..shard.sums import origin
from ..vjp.table import Pull, Rule
from .flow import active_in
from .walk import Walk

__all__ = ["again"]

Made = Mapping[Tensor, Tensor]


def again(walk: Walk, run: Sequence[Op]) -> None:
    """Compute a run of ops again from its inputs, and walk back over what that makes.

    As in torch's checkpoint without reentrance, the ops run in their order and stop after the last one that the
    backward pass reads anything of, unless the policy has no early stop. Inputs of the run, and results that are kept,
    stay until the walk has left the run, read or not.
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
    kept = {op: _kept(walk, op) for op in run if walk.hooks.keeps(op)}
    copies = [_recall(copier, op, kept[op], graph) if op in kept else copier.copy(op, graph) for op in run]
    for op in _every(copies):
        op.phase = "recompute"
    recalled = {copier.tensors[op.results[0]].producer for op in kept}
    active = active_in(copies, (m for t, m in inputs.items() if t in walk.active), recalled)
    leaves = {m: walk.leaves[t] for t, m in inputs.items() if t in walk.leaves}
    hooks = walk.hooks.within or replace(walk.hooks, runs=lambda ops: (), keeps=lambda op: False, start=False)
    own, standins, read = set(copies), set(inputs.values()), set[Tensor]()

    def saved(t: Tensor) -> Tensor:
        """Return what stands for a tensor of the forward pass: for one that is computed again it is itself."""
        read.add(t)
        if t in standins or t.producer in own:
            return t
        return copier.tensors[t] if t in copier.tensors else walk.saved(t)

    back = Walk(hooks, active, saved, leaves=leaves)
    back.rules = {copier.tensors[op.results[0]].producer: _forward_rule(back, op) for op in kept}
    back.active |= {t for op in kept for t in op.operands if copier.tensors[t] in active}
    _walk_back(walk, back, run, copies, copier.tensors, inputs)
    if walk.hooks.early_stop:
        _stop_early(graph, copies)
    left = [t for op, t in kept.items() if copier.tensors[op.results[0]] not in graph]
    if read:  # else there is nothing that would call the run again, which is what names its arguments
        left += (now for t, now in inputs.items() if origin(t).role in ("activation", "input"))
    _hold(walk, inputs, left)


def _walk_back(
    walk: Walk, back: Walk, run: Sequence[Op], copies: Sequence[Op], made: Made, inputs: Mapping[Tensor, Tensor]
) -> None:
    """Walk back over what is computed again, from the gradients of its results to those of what it starts from."""
    back.held, back.carried = walk.held, walk.carried
    # a gradient is complete in here if no op outside is still to contribute
    back.readers.update({m: walk.readers[t] - sum(t in op.operands for op in run) for t, m in inputs.items()})
    for t in (t for op in run for t in op.results):
        grad = walk.take(t)
        if grad is not None:
            back.keep(made[t], grad)
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


def _hold(walk: Walk, inputs: Iterable[Tensor], left: Sequence[Tensor]) -> None:
    """Let what a run starts from, and keeps, live until a gradient leaves it, as torch's frame of the run does."""
    last = next((t for t in inputs if t in walk.grads and t not in walk.leaves), None)
    if left and last is not None:
        grad = walk.take(last)
        assert grad is not None
        walk.keep(last, keep(grad, *left))


def _kept(walk: Walk, op: Op) -> Tensor:
    """Return what an op of the forward pass has made, which is kept."""
    if len(op.results) > 1:
        raise GraphError(f"keep: {op.name!r} has {len(op.results)} results, expected an op with one")
    return walk.saved(op.results[0])


def _recall(copier: Rewriter, op: Op, kept: Tensor, graph: Graph) -> Op:
    """Add what stands for an op whose result is kept: its operands are made again, it is not."""
    return copier.add(op, Keep(), [kept, *(copier.tensors[t] for t in op.operands)], graph)


def _forward_rule(back: Walk, op: Op) -> Rule[Any]:
    """Return the rule of an op that stands for one whose result is kept: that of the op itself."""

    def rule(pull: Pull[Any]) -> Sequence[Tensor | None]:
        return [None, *back.gradients(op, pull.grads, pull.needs[1:])]

    return rule


def _every(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _every(op.body.ops)


def _stop_early(graph: Graph, copies: Sequence[Op]) -> None:
    """Remove the ops after the last op whose result is read, also within a last iteration."""
    for op in reversed(copies):
        if any(_is_read(t) for t in op.results):
            if op.loop is not None and op.loop.count == ONE:
                _stop_within(op, op.loop)
            return
        graph.remove_nodes_from([*op.results, op])


def _is_read(t: Tensor) -> bool:
    return t.graph.out_degree(t) > 0 or t in t.graph.outputs


def _stop_within(op: Op, loop: Loop) -> None:
    """Stop early within a loop of one iteration whose carries are not read."""
    body, unread = loop.body, [t for t in loop.stacks if not _is_read(t)]
    for i, (start, t) in enumerate(zip(loop.starts, loop.lasts, strict=True)):
        if not _is_read(t):  # the carry passes through unchanged
            body.outputs[i] = loop.carries[i]
            t.storage, t.offset = start.storage, start.offset
    body.outputs[:] = [t for t, r in zip(body.outputs, op.results, strict=True) if r not in unread]
    op.results = tuple(r for r in op.results if r not in unread)
    op.graph.remove_nodes_from(unread)
    _stop_early(body, list(body.ops))
