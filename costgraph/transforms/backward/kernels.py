"""Walking back over a fused kernel: as one kernel again, as separate ops, or by a rule of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...algebra.polynomial import ZERO, Poly, total
from ...graph.changes import modify
from ...graph.graph import Graph, apply, current_graph
from ...graph.op import Op
from ...graph.scopes import building
from ...graph.strides import dense_in, memory_format
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel, kernel
from ...ops.keep import keep
from ...ops.moves import Rearrange
from ...ops.pointwise import Pointwise
from ..rewrite import Rewriter
from ..vjp.common import is_alone
from ..vjp.kernels import INSIDE, KERNELS, Inside
from ..vjp.table import Pull, rule_of
from .flow import active_in, active_inside
from .loops import left_behind
from .walk import Walk, is_view_op

__all__ = ["pull_kernel"]

Grads = Sequence[Tensor | None]


@dataclass
class _Inside:
    """What stands for the tensors of a kernel's body in its backward pass: what it saves, or computes again."""

    op: Op
    walk: Walk
    own: Inside
    graph: Graph = field(default_factory=current_graph)
    """where it is computed again: a loop that goes back inside it reads slices of what stands there"""
    seen: dict[Tensor, Tensor] = field(default_factory=dict)
    loops: dict[Op, tuple[Op, Rewriter]] = field(default_factory=dict)
    """loops that are computed again, and what stands for the tensors of their bodies"""

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
        if maker.kind.save or t in self.own.kept:
            return self.walk.saved(body.export(t))
        if maker.loop is not None:
            self.seen[t] = self.repeated(maker, t)
            return self.seen[t]
        nested = isinstance(maker.kind, Kernel) and maker.kind.backward in INSIDE
        found = self.handed_out(t) if nested or is_alone(maker) else None
        if nested or found is not None:
            return self.walk.saved(body.export(t)) if found is None else found
        again = Rewriter()
        again.tensors |= {o: self.saved(o) for o in maker.operands}
        with building(self.graph):
            made = again.copy(maker, self.graph)
        _mark((made, *(made.body.walk() if made.body is not None else ())))
        self.seen |= dict(zip(maker.results, made.results, strict=True))
        return self.seen[t]

    def handed_out(self, t: Tensor) -> Tensor | None:
        """Return what the kernel hands out of a tensor of the body, with its axes put back; None for nothing."""
        body = self.op.body
        assert body is not None
        for out, result in zip(body.outputs, self.op.results, strict=False):
            moves: list[Op] = []
            while out is not t and out.producer is not None and isinstance(out.producer.kind, Rearrange):
                moves.append(out.producer)
                (out,) = out.producer.operands
            if out is t:
                value = self.walk.saved(result)
                for op in moves:  # the gradient of a rearrangement is the one back
                    (moved,) = rule_of(op)(Pull(op, (value,), (True,), self.saved))
                    assert moved is not None
                    value = moved
                return value
        return None

    def repeated(self, op: Op, result: Tensor) -> Tensor:
        """Return a result of a loop: what its iterations carry on, or a part of the rest, which is asked for."""
        if op not in self.loops:
            self.loops[op] = self.loop(op)
        made, again = self.loops[op]
        old, new = op.loop, made.loop
        assert old is not None
        assert new is not None
        if result in old.lasts:
            return new.lasts[old.lasts.index(result)]
        t = old.body.outputs[op.results.index(result)]
        _compute(again, t, new.body)
        return (_stacked if result in old.stacks else left_behind)(made, again.tensors[t])

    def loop(self, op: Op) -> tuple[Op, Rewriter]:
        """Run the iterations of a loop again, for what they carry on alone."""
        loop = op.loop
        assert loop is not None
        again = Rewriter()
        again.tensors |= {o: self.saved(o) for o in op.operands}
        with building(self.graph):
            body = self.graph.start_body(loop.body.name, fused=False)
            for f in loop.body.formals:
                again.tensors[f] = again.formal(f, body)
            for t in loop.nexts:
                _compute(again, t, body)
            body.outputs += [body.adopt(again.tensors[t]) for t in loop.nexts]
            operands = [self.graph.adopt(again.tensors[o]) for o in op.operands]
            made = self.graph.add_op(replace(loop.kind, body=body, saved=0), operands, op.name)
        made.scope, body.owner = op.scope, made
        _mark([made])
        return made, again


def _compute(again: Rewriter, t: Tensor, body: Graph) -> None:
    """Copy the ops into a body that a tensor is made by there and that are not in it yet."""
    if t in again.tensors:
        return
    maker = t.producer
    assert maker is not None
    for o in maker.operands:
        _compute(again, o, body)
    made = again.copy(maker, body)
    _mark((made, *(made.body.walk() if made.body is not None else ())))


def _stacked(op: Op, t: Tensor) -> Tensor:
    """Let the iterations of a loop write a tensor of its body into one stack, as they do what a scan returns."""
    loop = op.loop
    assert loop is not None
    modify(op.graph, op.name)
    at = len(loop.lasts) + len(loop.stacks)
    loop.body.outputs.insert(at, t)
    op.graph.add_result(op, op.kind.infer(op.operands)[at], f"{t.name}.again")
    *others, made = op.results
    op.results = (*others[:at], made, *others[at:])  # in the order of the outputs
    return made


def _mark(ops: Iterable[Op]) -> None:
    """Note of ops that they are computed again."""
    for op in ops:
        op.phase = "backward"
        op.state(again=True)


def pull_kernel(walk: Walk, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add what makes the gradients of the operands of a kernel.

    The field `backward` of the kernel says how: `ops` for an op each, the name of a rule of its own, or nothing
    for one kernel in which the rules of the ops inside are asked.
    """
    assert isinstance(op.kind, Kernel)
    how = op.kind.backward
    if how in KERNELS:
        return walk.asked(KERNELS[how], op, grads, needs)
    own = INSIDE[how](op, grads, walk.saved) if how in INSIDE else Inside()
    if how == "ops" or walk.fused:
        return _pulled(walk, _Inside(op, walk, own), grads, needs, fused=walk.fused)
    operands = (op.operands[i] for i in op.kind.saved_operands)
    saved = [walk.saved(t) for t in operands if t.role in ("activation", "formal")]
    with kernel(f"{op.name.rpartition('/')[2]}_backward".replace(".", "_")) as body:
        made = _pulled(walk, _Inside(op, walk, own), grads, needs, fused=True)
    owner = body.owner
    assert owner is not None
    if op.kind.copies_grad_input:
        x = op.operands[0]
        owner.state(strides=(dense_in(x.sizes, memory_format(x.sizes, x.strides)),))
    out = [None if g is None else _handed_out(body, g) for g in made]
    for i, g in enumerate(out):
        if saved and g is not None and g.role == "activation":
            out[i] = keep(g, *saved)
            break
    owner.scope = op.scope
    space = op.kind.gradient_workspace if all(g is None or g.is_contiguous for g in grads) else ZERO
    if op.kind.workspace or space:
        owner.state(workspace=_casts(body) + space)
    if not owner.results:  # every gradient is one that came in
        owner.graph.remove_node(owner)
    return out


def _casts(body: Graph) -> Poly:
    """Return the bytes of what a kernel that casts its operands first casts again on the way back."""
    formats = [
        (t, op.results[0].dtype)
        for op in body.ops
        if isinstance(op.kind, Pointwise) and op.kind.function.name not in ("cast", "where", "masked_fill")
        for t in op.operands
        if t in body.formals and t.sizes
    ]
    return total(t.numel * made.bytes for t, made in formats if made.kind != "bool" and t.dtype != made)


def _handed_out(body: Graph, grad: Tensor) -> Tensor:
    if grad not in body:
        return grad
    view = _view_outside(body, grad)
    return body.export(grad) if view is None else view


def _view_outside(body: Graph, t: Tensor) -> Tensor | None:
    """Return the same view of the operand outside, None if a kernel computes the tensor."""
    lies = (t.storage, t.offset, t.sizes, t.strides)
    pairs = ((outer, body.adopt(outer)) for outer in body.captured)
    outer = next((outer for outer, x in pairs if (x.storage, x.offset, x.sizes, x.strides) == lies), None)
    if outer is not None or t.producer is None or not is_view_op(t.producer):
        return outer
    source = _view_outside(body, t.producer.operands[0])
    return None if source is None else apply(t.producer.kind, [source], t.producer.kind.name)[0]


def _pulled(walk: Walk, inside: _Inside, grads: Grads, needs: Sequence[bool], *, fused: bool) -> Grads:
    op, body = inside.op, inside.op.body
    assert body is not None
    # what a kernel computes again it says itself
    hooks = replace(walk.hooks, runs=lambda ops: ())
    active = active_inside(op, walk.active) | active_in(body.ops, inside.own.joint)
    needs = [need or f in inside.own.joint for f, need in zip(body.formals, needs, strict=True)]
    back = Walk(hooks, active, inside.saved, fused=fused, rules=inside.own.rules)
    back.held = walk.held
    for t, grad in zip(body.outputs, grads, strict=False):
        if grad is not None:
            back.put(t, current_graph().adopt(grad))
    back.run(body.ops)
    return [back.take(f) if need else None for f, need in zip(body.formals, needs, strict=True)]
