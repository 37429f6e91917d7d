"""Walking back over a fused kernel: as one kernel again, as separate ops, or by a rule of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ..graph import Graph, current_graph
from ..op import Op
from ..ops.blocks import kernel
from ..tensor import Tensor
from ..vjp.kernels import INSIDE, KERNELS, Inside
from ..vjp.table import Pull
from .rewrite import Rewriter
from .walk import Walk, active_inside

__all__ = ["pull_kernel"]

Grads = Sequence[Tensor | None]


@dataclass
class _Inside:
    """What stands for the tensors of a kernel's body in its backward pass: what it saves, or computes again."""

    op: Op
    walk: Walk
    own: Inside
    seen: dict[Tensor, Tensor] = field(default_factory=dict)

    def saved(self, t: Tensor) -> Tensor:
        """Return what stands for a tensor of the body."""
        if t not in self.seen:
            self.seen[t] = self.find(t)
        return self.seen[t]

    def find(self, t: Tensor) -> Tensor:
        body, maker = self.op.body, t.producer
        assert body is not None
        if maker is None:
            return self.walk.saved(self.op.operands[body.formals.index(t)])
        if t in self.own.rebuilt:
            return self.own.rebuilt[t](self.saved)
        if maker.attrs.get("save") or t in self.own.kept:
            return self.walk.saved(body.export(t))
        again = Rewriter()
        again.tensors |= {o: self.saved(o) for o in maker.operands}
        made = again.copy(maker, current_graph())
        for op in (made, *(made.body.walk() if made.body is not None else ())):
            op.phase, op.attrs = "backward", MappingProxyType({**op.attrs, "again": True})
        self.seen |= dict(zip(maker.results, made.results, strict=True))
        return self.seen[t]


def pull_kernel(walk: Walk, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add what makes the gradients of the operands of a kernel.

    The attribute `backward` of the kernel says how: `ops` for an op each, the name of a rule of its own, or nothing
    for one kernel in which the rules of the ops inside are asked.
    """
    how = op.attrs.get("backward", "")
    if how in KERNELS:
        return KERNELS[how](Pull(op, tuple(grads), tuple(needs), walk.saved))
    inside = _Inside(op, walk, INSIDE[how](op, grads, walk.saved) if how in INSIDE else Inside())
    if how == "ops" or walk.fused:
        return _pulled(walk, inside, grads, needs, fused=walk.fused)
    with kernel(f"{op.name.rpartition('/')[2]}_backward".replace(".", "_")) as body:
        made = _pulled(walk, inside, grads, needs, fused=True)
    out = [None if g is None else _handed_out(body, g) for g in made]
    owner = body.owner
    assert owner is not None
    owner.scope = op.scope
    if not owner.results:  # every gradient is one that came in
        owner.graph.remove_node(owner)
    return out


def _handed_out(body: Graph, grad: Tensor) -> Tensor:
    return body.export(grad) if grad in body else grad


def _pulled(walk: Walk, inside: _Inside, grads: Grads, needs: Sequence[bool], *, fused: bool) -> Grads:
    op, body = inside.op, inside.op.body
    assert body is not None
    # what a kernel computes again it says itself
    hooks = replace(walk.hooks, runs=lambda ops: ())
    back = Walk(hooks, active_inside(op, walk.active), inside.saved, fused=fused, rules=inside.own.rules)
    back.held = walk.held
    for t, grad in zip(body.outputs, grads, strict=False):
        if grad is not None:
            back.put(t, current_graph().adopt(grad))
    back.run(body.ops)
    return [back.take(f) if need else None for f, need in zip(body.formals, needs, strict=True)]
