"""The backward pass of a step in two halves: gradients that are handed back first, those of weights behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op, OpKind
from ..graph.tensor import Tensor
from ..ops.keep import Keep
from ..ops.pieces import Accumulate
from ..ops.pointwise import FUNCTIONS, Pointwise
from .rewrite import Rewriter, bound_record
from .stages_plan import BACK, Plan

__all__ = ["Halves"]


@dataclass(frozen=True)
class _Parts:
    """The ops of a backward pass, those of weights apart."""

    late: frozenset[Op]
    """What reaches gradients of weights alone."""
    apart: frozenset[Op]
    """Ops in place whose result gets a storage of its own, as what they would overwrite is read by what comes late."""


def _parts(ops: Sequence[Op], wanted: Collection[Tensor]) -> _Parts:
    """Return which ops reach gradients of weights alone: all that what is wanted does not come from.

    What cannot come later, as a tensor that it reads is overwritten by then, or the other way round, does not.
    """
    soon, read = set[Op](), set(wanted)
    while True:
        for op in reversed(ops):
            if op in soon or not read.isdisjoint(op.results):
                soon.add(op)
                read |= {*op.operands}
        late = [op for op in ops if op not in soon]
        apart, moved = _overwriting(ops, late)
        if not moved:
            return _Parts(frozenset(late), frozenset(apart))
        soon |= moved


def _overwriting(ops: Sequence[Op], late: Collection[Op]) -> tuple[set[Op], set[Op]]:
    """Return which ops need a storage of their own for the sake of late ones, and which of these have to come first."""
    asked = {t for op in late for t in op.operands}
    place: dict[Tensor, object] = {}
    there: dict[object, set[Tensor]] = {}
    apart, moved = set[Op](), set[Op]()
    for op in ops:
        for t in op.operands:
            there.setdefault(place.setdefault(t, t.storage), set()).add(t)
        if op in late:
            continue
        for i in op.kind.overwrites():
            at = place[op.operands[i]]
            spoiled = there[at] & asked
            if spoiled and _fresh(op.kind) is not None:
                apart.add(op)
            else:
                moved |= {o for o in late if not spoiled.isdisjoint(o.operands)}
        read = {t.storage for t in op.operands}
        before = (o for o in ops[: ops.index(op)] if o in late)
        moved |= {o for o in before if any(o.operands[i].storage in read for i in o.kind.overwrites())}
        for t in op.results:
            same = next((place[o] for o in op.operands if o.storage is t.storage), t.storage)
            place[t] = op if op in apart else same
            there.setdefault(place[t], set()).add(t)
    return apart, moved


def _fresh(kind: OpKind) -> OpKind | None:
    """Return the kind that does the same into a storage of its own, None where there is none."""
    if isinstance(kind, Accumulate):
        return Pointwise(function=FUNCTIONS["add"])
    return replace(kind, inplace=False) if isinstance(kind, Pointwise) and kind.inplace else None


class Halves(Rewriter):
    """Copies a step, the backward pass of each micro-batch in two halves.

    The first half makes the gradients that layers hand back, the second one those of weights: a loop over layers each.
    What the second one needs of the first one is left behind, with a storage for each iteration.
    """

    def __init__(self, plan: Plan, *, whole: bool = False) -> None:
        super().__init__()
        assert plan.backward is not None
        self.back, loop = plan.backward, plan.backward.loop
        assert loop is not None
        if loop.until or plan.before or any(t.producer is None and t.role != "formal" for t in loop.body.tensors):
            raise UnsupportedError(
                f"parallelize: schedule: {loop.op.name!r} goes back through layers of several kinds, or through a part "
                f"of them, expected one loop to take gradients of weights out of"
            )
        self.plan, self.loop, self.held, self.whole = plan, loop, list[Op](), whole
        before = [op for op in plan.home.ops if op.phase in BACK]
        self.around = _parts(before[: before.index(self.back)], self.back.operands)
        self.inside = _parts(loop.body.ops, loop.nexts)
        self.again = set[Op]()
        self.crossing = list(dict.fromkeys(self.needed()))

    def needed(self) -> Iterator[Tensor]:
        """Yield what gradients of weights need of what has gone before, and note the views of it to make again."""
        ahead = [t for op in reversed(self.loop.body.ops) if op in self.inside.late for t in op.operands]
        own = {*self.loop.slices, *self.loop.captured}
        for t in ahead:  # it grows on the way
            op = t.producer
            if t in own or op in self.inside.late:
                continue
            if op is None or op in self.inside.apart or op.kind.overwrites() or not _is_view(op):
                yield t
            else:
                self.again.add(op)
                ahead += op.operands[:1] if isinstance(op.kind, Keep) else op.operands

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op: what comes late waits for the loop over layers."""
        if op in self.around.late:
            self.held.append(op)
        elif op in self.around.apart or op in self.inside.apart:
            kind = _fresh(op.kind)
            assert kind is not None
            self.add(op, kind, [self.tensors[t] for t in op.operands], new)
        elif op is self.back:
            self.both(new)
        else:
            super().emit(op, new, suffix)

    # -- loops over layers -----------------------------------------------------------------------------------------

    def both(self, new: Graph) -> None:
        """Add the loop that hands gradients back, and that which makes gradients of weights."""
        loop, late = self.loop, self.inside.late
        outer = dict(zip(loop.slices, loop.xs, strict=True)) | dict(zip(loop.captured, loop.shared, strict=True))
        given = {f: self.tensors[t] for f, t in outer.items()}
        soon = [op for op in loop.body.ops if op not in late]
        made = self.half(soon, given, loop.carries, new)
        for op in self.held:
            self.copy(op, new)
        given = dict(zip(self.crossing, made, strict=True)) | given
        self.half([op for op in loop.body.ops if op in late or op in self.again], given, (), new)
        if self.whole:
            self.keep_saved(new)

    def keep_saved(self, new: Graph) -> None:
        """Let what the forward pass has saved live until gradients of weights are there, as the graph of autograd does.

        What is saved behind the last op with weights is not reached from any of these, and goes before.
        """
        late, home, loop = self.around.late, self.plan.home, self.loop
        soon = [op for op in home.ops if op.phase in BACK and op not in late]
        reached = {t for op in late for t in op.operands} & {t for op in soon for t in op.results}
        read: list[Tensor] = []
        for op in soon[: soon.index(self.back)]:
            if not reached.isdisjoint(op.operands):
                reached |= {*op.results}
                read += op.operands
        made = (t for i, t in enumerate(loop.op.results) if self.is_late(i, loop.body.outputs[i]))
        outside = (t for op in self.held for t in op.results if t in home.outputs or {*home.successors(t)} - late)
        for done, saved in ((next(made, None), loop.xs), (next(outside, None), read)):
            kept = [t for t in dict.fromkeys(saved) if t.producer is not None and t.producer.phase == "forward"]
            if done is not None and kept:
                op = new.add_op(Keep(), [self.tensors[t] for t in (done, *kept)], f"{done.name}.kept", "backward")
                op.scope = loop.op.scope
                self.tensors[done] = op.results[0]

    def half(
        self, ops: Sequence[Op], given: Mapping[Tensor, Tensor], carries: Sequence[Tensor], new: Graph
    ) -> Sequence[Tensor]:
        """Add a loop of some of the ops of that which goes back, and return what it leaves for the other one."""
        loop = self.loop
        fixed, first = len(loop.nexts) + len(loop.ys), bool(carries)
        outputs = [(i, t) for i, t in enumerate(loop.body.outputs) if self.is_late(i, t) != first]
        crossing = self.crossing if first else []
        read = {t for op in ops for t in op.operands} | {t for _, t in outputs}
        slices = [t for t in given if t in read and t not in loop.captured]
        shared = [t for t in given if t in read and t in loop.captured]
        starts = [self.tensors[t] for t in loop.starts] if first else []
        body = new.start_body(loop.body.name, fused=False)
        for t in (*carries, *slices, *shared):
            self.tensors[t] = self.formal(t, body)
        for op in ops:
            if op in self.again and not first and isinstance(op.kind, Keep):
                self.tensors[op.results[0]] = self.tensors[op.operands[0]]
            elif first:
                self.emit(op, body)
            else:
                self.copy(op, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in (*(t for _, t in outputs), *crossing)]
        saved = sum(i >= fixed for i, _ in outputs) + len(crossing)
        kind = replace(bound_record(loop.kind, {}), body=body, carries=len(carries), xs=len(slices), saved=saved)
        operands = [*starts, *(given[t] for t in (*slices, *shared))]
        made = new.add_op(kind, operands, loop.op.name if first else f"{loop.op.name}.weights", loop.op.phase)
        made.scope, body.owner = loop.op.scope, made
        results = [loop.op.results[i] for i, _ in outputs]
        self.tensors |= dict(zip(results, made.results[: len(results)], strict=True))
        return made.results[len(results) :]

    def is_late(self, i: int, t: Tensor) -> bool:
        """Whether what a body returns is of the second half."""
        return i >= len(self.loop.nexts) and t.producer in self.inside.late


def _is_view(op: Op) -> bool:
    return any(op.results[0].storage is t.storage for t in op.operands)
