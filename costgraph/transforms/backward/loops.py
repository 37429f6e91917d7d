"""Walking back over a loop: its iterations in reverse, each reading what the forward one left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...algebra.polynomial import ONE, ZERO
from ...graph.changes import modify
from ...graph.checks import overwritten_by
from ...graph.graph import Graph, current_graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.scopes import building
from ...graph.strides import contiguous
from ...graph.tensor import Tensor
from ...ops.blocks import Repeat
from ...ops.fill import fill
from ...ops.keep import Keep
from ...ops.layout import contiguous_copy, slice_axis
from ...ops.pieces import Absent, Accumulate, slice_of
from ...ops.pointwise import pointwise
from ...ops.stacks import Stacked
from ..rewrite import Rewriter
from ..vjp.common import restricted
from ..vjp.table import Pull, vjp
from .flow import active_inside, graded_inside
from .walk import Walk, is_view_op, stack_of

__all__ = ["pull_loop"]

Grads = Sequence[Tensor | None]

# Formats below are for operands of matrix products alone: their gradients are in the graph's own.
_LEAST_BITS = 16


@dataclass
class _Reverse:
    """The loop that is being built: its inputs and results as they turn out to be needed."""

    forward: Loop
    """loop of the forward pass"""
    outer: Walk
    """walk over the graph that the loop is in"""
    body: Graph
    """what each iteration does"""
    carries: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """inputs that are carried, and what they start from if it is known"""
    xs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """inputs that are slices, and of what"""
    seen: dict[Tensor, Tensor] = field(default_factory=dict)
    """what stands for tensors of the forward body"""

    @cached_property
    def shared(self) -> set[int]:
        """Places of the operands that all iterations of the forward pass read whole."""
        return {i for i, f in enumerate(self.forward.body.formals) if f in self.forward.captured}

    def carry(self, like: Tensor, name: str, start: Tensor | None) -> Tensor:
        """Add an input that the iterations hand on."""
        made = self.body.formal(like, name, like.sizes, contiguous(like.sizes))
        self.carries.append((made, start))
        return made

    def drop(self, formal: Tensor) -> None:
        """Remove an input that nothing reads."""
        self.carries = [c for c in self.carries if c[0] is not formal]
        self.xs = [x for x in self.xs if x[0] is not formal]
        self.body.remove_node(formal)
        self.body.formals.remove(formal)

    def slice(self, outer: Tensor, name: str) -> Tensor:
        """Add an input that is one position along the first axis."""
        found = next((f for f, t in self.xs if t is outer), None)
        if found is None:
            found = slice_of(self.body, outer, name)
            self.xs.append((found, outer))
        return found

    def part(self, outer: Tensor, name: str) -> Tensor:
        """Add an input that is one position of a tensor that was declared further out."""
        around = self.body.parent
        assert around is not None
        return self.slice(around.adopt(outer), name)

    def saved(self, t: Tensor) -> Tensor:
        """Return what stands for a tensor of the forward body."""
        if t not in self.seen:
            self.seen[t] = self.find(t)
        return self.seen[t]

    def find(self, t: Tensor) -> Tensor:
        loop, around = self.forward, self.body.parent
        assert around is not None
        if t in loop.slices:
            return self.slice(around.adopt(self.outer.saved(loop.xs[loop.slices.index(t)])), f"{t.name}.again")
        if t in loop.captured:
            return self.body.adopt(around.adopt(self.outer.saved(loop.shared[loop.captured.index(t)])))
        if t in loop.carries and self.outer.hooks.start:
            return self.from_start()[loop.carries.index(t)]
        if t.producer is not None and isinstance(t.producer.kind, Keep):  # what was held is not held here
            return self.saved(t.producer.operands[0])
        if t.producer is not None and is_view_op(t.producer):
            base = self.saved(t.producer.operands[0])
            op = self.body.add_op(t.producer.kind, [base], t.producer.name + ".again")
            return op.results[0]
        return self.slice(around.adopt(self.outer.saved(left_behind(loop.op, t))), f"{t.name}.saved")

    def from_start(self) -> tuple[Tensor, ...]:
        """Compute again what an iteration starts from, by all iterations before it."""
        loop, around = self.forward, self.body.parent
        assert around is not None
        operands = [self.body.adopt(around.adopt(self.outer.saved(t))) for t in loop.op.operands]
        again = Rewriter().body(loop.body, self.body, "")
        del again.outputs[len(loop.nexts) :]
        before = replace(loop.kind, body=again, saved=0, until=True)
        made = self.body.add_op(before, operands, f"{loop.op.name}.before")
        again.owner, made.scope = made, loop.op.scope
        for each in (made, *again.walk()):
            each.phase = "recompute"
        self.seen |= dict(zip(loop.carries, made.results, strict=False))
        return made.results


def left_behind(op: Op, t: Tensor) -> Tensor:
    """Return the result of a loop that keeps a tensor of its body, one storage an iteration."""
    loop = op.loop
    assert loop is not None
    if t in loop.saved:
        return loop.pieces[loop.saved.index(t)]
    modify(op.graph, op.name)
    loop.body.outputs.append(t)
    op.state(saved=loop.kind.saved + 1)
    result = op.kind.infer(op.operands)[-1]
    op.graph.add_result(op, replace(result, of=None) if result.of is not None else result, f"{t.name}.kept")
    return op.results[-1]


def pull_loop(walk: Walk, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add the loop that makes the gradients of the operands of a loop."""
    loop = op.loop
    assert loop is not None
    made = _Reverse(loop, walk, current_graph().start_body(f"{loop.body.name}_backward", fused=False))
    active = active_inside(op, walk.active)
    with building(made.body):
        back = Walk(walk.hooks, active, made.saved)
        carried = _seed(made, back, grads)
        sums = _start_sums(made, back, needs)
        back.run(loop.body.ops)
        out = _Out(made, back, carried)
        for p in list(carried):
            out.carry(p, back.taken(loop.carries[p]))
        for i in list(sums):
            out.sum(i, back.taken(loop.body.formals[i]), sums)
        out.slices(needs)
    return _close(walk, out, grads, sums)


def _seed(made: _Reverse, back: Walk, grads: Grads) -> list[int]:
    """Put the gradients of what an iteration hands on and writes; returns the places of carries that have one."""
    loop = made.forward
    once = loop.count == ONE
    of = dict(zip(loop.op.results, grads, strict=True))
    graded = graded_inside(loop.op, made.outer.active, {t for t, g in of.items() if g is not None})
    carried, seeds = [], []
    for p, (f, t, last) in enumerate(zip(loop.carries, loop.nexts, loop.lasts, strict=True)):
        grad = of[last]
        if f in graded or (t in graded and not once):
            carried.append(p)
            seed = made.carry(last, f"{last.name}.grad", grad)
            back.carried.add(seed)
            if grad is not None or not once:
                seeds.append((t, seed))
        elif grad is not None and t in graded:  # what the only iteration starts from wants no gradient
            seed = made.body.adopt(grad)
            if made.outer.writable(grad):
                back.carried.add(seed)
            back.put(t, seed)
    for t, seed in seeds:
        back.put(t, seed)
    for t, r in (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True)):
        grad = of[r]
        if grad is not None and t in back.active:
            back.put(t, made.slice(grad, f"{t.name}.grad"))
    return carried


def _start_sums(made: _Reverse, back: Walk, needs: Sequence[bool]) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Begin the gradients of what all iterations share, and go on with those of slices that are there already."""
    loop, walk = made.forward, made.outer
    sums: dict[int, tuple[Tensor, Tensor | None]] = {}
    for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
        if not needs[i] or f in loop.carries:
            continue
        before = walk.grads.get(t)
        if f in loop.slices and t in walk.leaves and walk.readers[t] == 1 and t.storage.pieces:
            leaf = walk.leaves[t]
            total = None if leaf.total is None else made.slice(leaf.total, f"{t.name}.total")
            update = None if leaf.update is None else leaf.update.inside(made.part, loop.count)
            back.leaves[f] = replace(leaf, total=total, update=update)
        if before is not None:
            walk.held[before.storage] -= 1
        fits = before is not None and (bool(before.storage.pieces) or (walk.writable(before) and before.is_contiguous))
        if before is not None:
            walk.held[before.storage] += 1
        if f in loop.captured:
            start = made.carry(t, f"{t.name}.sum", before if fits else None)
            if t.dtype.bits < _LEAST_BITS:
                start.dtype = t.graph.root.dtype  # no gradient has so few bits
        elif t.storage.pieces and before is not None:
            start = made.slice(before, f"{t.name}.sum")
        else:
            continue
        back.carried.add(start)
        back.keep(f, start)
        sums[i] = start, before if fits else None
    return sums


class _Out:
    """Results of the loop that is being built."""

    def __init__(self, made: _Reverse, back: Walk, carried: list[int]) -> None:
        self.made = made
        self.back = back
        self.carried = carried
        self.passed: dict[int, Tensor | None] = {}
        self.after: list[Tensor] = []
        self.stacks: list[tuple[int, Tensor]] = []
        self.kept: list[tuple[int, Tensor]] = []

    def carry(self, p: int, grad: Tensor | None) -> None:
        """Hand on a gradient to the iteration before; one that no iteration changes is the one that came in."""
        like, start = self.made.carries[len(self.after)]
        if grad is like and not any(self.made.body.successors(like)):
            self.made.drop(like)
            self.carried.remove(p)
            self.passed[p] = start
            return
        if grad is None:
            grad = fill(like.shape, dtype=like.dtype)
        mine = {f.storage for f, _ in self.made.carries}
        lent = grad.role == "formal" and grad.storage not in mine
        twice = any(grad.storage is t.storage for t in self.after)
        self.after.append(pointwise("copy", grad, name="own") if lent or twice else contiguous_copy(grad))

    def sum(self, i: int, grad: Tensor | None, sums: dict[int, tuple[Tensor, Tensor | None]]) -> None:
        """Hand on the gradient of what all iterations share; one that nothing was added to is none."""
        start, _ = sums[i]
        if grad is None or grad is start:
            del sums[i]
            self.made.drop(start)
        elif i in self.made.shared:
            self.after.append(contiguous_copy(grad))
        else:
            self.kept.append((i, grad))

    def slices(self, needs: Sequence[bool]) -> None:
        """Keep the gradients of slices: of what has a storage for each iteration so, of others in one stack."""
        loop, done = self.made.forward, {i for i, _ in self.kept}
        for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
            wanted = f in loop.slices and needs[i] and i not in done
            grad = self.back.taken(f) if wanted else None
            if grad is None:
                continue
            own = grad.role == "activation" and not any(grad.storage is t.storage for t in self.after)
            if t.storage.pieces:
                leaf = self.back.leaves.get(f)
                if leaf is not None and leaf.update is not None:
                    continue  # the parameter is updated, the gradient is of no use any more
                if leaf is None or leaf.total is None:  # else it lies in the sum that it was added to
                    grad = self.back.own(grad) if own else pointwise("copy", grad, name="own")
                self.kept.append((i, grad))
            else:
                looped = grad.producer is not None and grad.producer.loop is not None
                fresh = own and grad.is_contiguous and not grad.is_view and not looped
                fresh = fresh and not any(grad.storage is t.storage for _, t in (*self.stacks, *self.kept))
                grad = grad if fresh else pointwise("copy", grad, name="stack")
                self.stacks.append((i, contiguous_copy(grad)))


def _close(walk: Walk, out: _Out, grads: Grads, sums: dict[int, tuple[Tensor, Tensor | None]]) -> Grads:
    """Append the loop and hand out what it makes."""
    made, old, op = out.made, out.made.forward, out.made.forward.op
    body, graph = made.body, made.body.parent
    assert graph is not None
    body.outputs += [*out.after, *(t for _, t in out.stacks), *(t for _, t in out.kept)]
    for f in [f for f, _ in made.xs if not body.out_degree(f) and f not in body.outputs]:
        made.drop(f)  # what is computed again has stopped before it
    results: list[Tensor | None] = [out.passed.get(i) for i in range(len(op.operands))]
    if not body.outputs:
        return results
    body.formals[:] = [*(f for f, _ in made.carries), *(f for f, _ in made.xs), *map(body.capture, body.captured)]
    # a start that the loop reads under another name as well must not be written into
    several = Counter(t.storage for _, t in (*made.carries, *made.xs) if t is not None)
    several.update(t.storage for t in body.captured)
    starts = []
    for i, (f, t) in enumerate(made.carries):
        # of sums, which stand behind gradients that came in, it is known that they may be written into
        begun, shared = i >= len(out.carried), t is not None and several[t.storage] > 1
        starts.append(_start(walk, graph, body, f, t, begun=begun, shared=shared))
    kind = Repeat(
        body=body, count=old.count, carries=len(starts), xs=len(made.xs), saved=len(out.kept),
        reverse=not old.reverse, least=old.kind.least,
    )  # fmt: skip
    for i, t in out.stacks:
        stack_of(walk, op.operands[i], t.dtype)
    # a name is made complete by the scope that is open
    loop = graph.add_op(
        kind, (*starts, *(t for _, t in made.xs), *body.captured), f"{op.name.rpartition('/')[2]}.backward"
    )
    body.owner = loop
    sliced = [i for i, _ in (*out.stacks, *out.kept)]
    listed = [*out.carried, *(i for i in sums if i in made.shared), *sliced]
    for i, t in zip(listed, loop.results, strict=True):
        if (i in sums and sums[i][1] is not None) or (i in sums and op.operands[i].storage.pieces):
            before = walk.grads.pop(op.operands[i])
            walk.held[before.storage] -= 1
            walk.keep(op.operands[i], t)
        else:
            results[i] = t
    return results


def _start(
    walk: Walk, graph: Graph, body: Graph, f: Tensor, start: Tensor | None, *, begun: bool, shared: bool
) -> Tensor:
    """Return what a carry starts from: nothing where the first iteration only adds to it, else zeros."""
    if start is None:
        readers = list(body.successors(f))
        # what a loop only adds to; the first term becomes it
        absent = len(readers) < 2 and all(_only_added_to(op, f) for op in readers) and f not in body.outputs
        absent = absent or _passed_on(body, f)
        if absent:
            nothing = Absent(sizes=f.sizes, dtype=f.dtype, pieces=f.storage.pieces, domain=f.domain)
            return graph.add_op(nothing, [], "absent").results[0]
        return restricted(fill(f.shape, dtype=f.dtype), f)
    start = graph.adopt(start)
    if start.storage.pieces or begun:
        return start
    written = any(s is f.storage for inner in body.ops for s in overwritten_by(inner))
    # what is handed on, in any place, is written into afterwards
    written |= any(t.role == "formal" for t in body.outputs[: len(body.formals) - len(body.captured)])
    if written and (shared or (start not in walk.carried and not walk.writable(start))):
        return pointwise("copy", start, name="own")
    return contiguous_copy(start)


def _only_added_to(op: Op, f: Tensor) -> bool:
    return isinstance(op.kind, Accumulate) and op.operands[0] is f


def _passed_on(body: Graph, f: Tensor) -> bool:
    """Whether only a loop inside reads a sum, which adds to it in turn."""
    readers = list(body.successors(f))
    if len(readers) != 1 or readers[0].loop is None or f in body.outputs:
        return False
    op = readers[0]
    inner = op.body.formals[op.operands.index(f)]
    found = list(op.body.successors(inner))
    adds = len(found) == 1 and _only_added_to(found[0], inner)
    return adds or _passed_on(op.body, inner)


@vjp(Stacked)
def _unstacked(pull: Pull[Stacked]) -> Grads:
    """Return the part of the gradient for each part of a stack: a slice of an unrolled one, several of a loop."""
    grad, at, out = pull.grads[0], ZERO, list[Tensor | None]([None])
    assert grad is not None
    for i, (t, need) in enumerate(zip(pull.op.operands[1:], pull.needs[1:], strict=True)):
        several = t.ndim == grad.ndim
        out.append((slice_axis(grad, 0, at, t.sizes[0]) if several else grad[i]) if need else None)
        at = at + t.sizes[0] if several else at
    return out


@vjp(Accumulate)
def _added(pull: Pull[Accumulate]) -> Grads:
    return [pull.grads[0] if need else None for need in pull.needs]


@vjp(Absent)
def _absent(pull: Pull[Absent]) -> Grads:
    return []
