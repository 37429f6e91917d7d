"""Equal blocks of several runs over a stack: which ops correspond, and what each of them reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import GraphError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from .equal import Differs, difference, layout
from .runs import Numbered, Run
from .values import Before, Family, Left, Made, Member, Owned, Shared, Value, View

__all__ = ["Match", "Plan", "as_stored", "is_free_view"]


@dataclass(eq=False)
class Plan:
    """A run and the loop that it becomes."""

    run: Run
    number: int
    reads: list[tuple[Value, ...]] = field(default_factory=list)
    """what the op at each place of a turn reads"""
    carries: dict[Before, None] = field(default_factory=dict)
    slices: dict[Family, None] = field(default_factory=dict)
    saved: dict[Made | Before, None] = field(default_factory=dict)

    def carry(self, value: Before) -> Before:
        """Let the turns hand something on."""
        while isinstance(value.nearer, Before):
            self.carries[value] = None
            value = value.nearer
        self.carries[value] = None
        if isinstance(value.of, Member):
            self.slices[value.of.family] = None
        return value

    def ago(self, of: Made | Member, turns: int) -> Before:
        """Return what something was some turns ago, where no turn reads it: for what comes after the last one."""
        known = max((c for c in self.carries if c.of == of), key=lambda c: len(c.starts), default=None)
        starts = () if known is None else known.starts[-turns:]
        out = Before(of, (None,) * (turns - len(starts)) + starts)
        self.carry(out)
        return out


class Match:
    """Compares all blocks of a range.

    Differs if two neighbours are not equal; GraphError if blocks that are equal read something that has no place in a
    loop.
    """

    def __init__(self, graph: Graph, labels: Numbered, runs: Sequence[Run], blocks: range) -> None:
        self.graph, self.labels, self.blocks = graph, labels, blocks
        self.ops = graph.ops
        self.owners: dict[Tensor, Owned] = {}
        self.plans: list[Plan] = []
        self.places: dict[Op, tuple[Plan, int, int]] = {}
        for run in runs:
            if set(run.blocks) & set(blocks):
                self._place(run)
        if not self.plans:
            raise GraphError(f"fold of graph {graph.name!r}: nothing goes over the blocks in order, expected a stack")
        self._own()
        for plan in self.plans:
            self._equal(plan)
        self._leftover()
        for plan in self.plans:
            self._read(plan)
        self._consistent()

    # -- what stands where ---------------------------------------------------------------------------------------

    def _place(self, run: Run) -> None:
        missing = [b for b in self.blocks if b not in run.blocks]
        if missing:
            low = min(missing[0], self.blocks[-1] - 1)
            raise Differs((low, low + 1), f"block {missing[0]} has no {run.phase} pass, others have one")
        plan = Plan(run.within(self.blocks), len(self.plans))
        self.plans.append(plan)
        for turn, start in enumerate(plan.run.starts):
            for at, op in enumerate(self.ops[start : start + plan.run.length]):
                self.places[op] = plan, turn, at

    def _own(self) -> None:
        """Find what each block has of its own, by names that differ in the number of the block alone."""
        named: dict[str, dict[int, Tensor]] = {}
        for t, block in self.labels.sources.items():
            if block in self.blocks:
                named.setdefault(self.labels.plain(t.name), {})[block] = t
        for found in named.values():
            for a, b in zip(self.blocks, self.blocks[1:], strict=False):
                mine, other = found.get(a), found.get(b)
                if mine is None and other is None:  # a block further on has it alone
                    continue
                if mine is None or other is None:
                    has, lacks = (b, a) if mine is None else (a, b)
                    text = (
                        f"blocks {a} and {b} differ: block {has} has {found[has].name!r}, block {lacks} nothing like it"
                    )
                    raise Differs((a, b), text)
                if _facts(mine) != _facts(other):
                    text = f"blocks {a} and {b} differ: {other.name!r} is {other!r}, {mine.name!r} is {mine!r}"
                    raise Differs((a, b), text)
            self.own(tuple(found[b] for b in self.blocks))

    def own(self, members: tuple[Tensor, ...]) -> Owned:
        """Say that each block has a source of its own."""
        family = Owned(members)
        self.owners |= dict.fromkeys(members, family)
        return family

    def _equal(self, plan: Plan) -> None:
        """Compare the ops of neighbouring turns, apart from what they read."""
        run = plan.run
        for turn in range(len(run.blocks) - 1):
            pair = run.blocks[turn], run.blocks[turn + 1]
            starts = run.starts[turn], run.starts[turn + 1]
            ends = starts[1], run.starts[turn + 2] if turn + 2 < len(run.starts) else starts[1] + run.length
            names = [lambda name, b=b: self.labels.relative(name, b) for b in pair]
            mine, other = (self.ops[s:e] for s, e in zip(starts, ends, strict=True))
            for a, b in zip(mine, other, strict=False):
                text = difference(a, b, (names[0], names[1]))
                if text is not None:
                    raise Differs(pair, f"blocks {pair[0]} and {pair[1]} differ: {text}")
            if len(mine) != len(other):
                found = f"{len(mine)} and {len(other)} ops in their {run.phase} pass"
                raise Differs(pair, f"blocks {pair[0]} and {pair[1]} differ: {found}")

    def _leftover(self) -> None:
        """Check that no op of a block stands outside of the passes: there would be one for each block."""
        for op, block in self.labels.ops.items():
            if block in self.blocks and op not in self.places:
                low = min(block, self.blocks[-2])
                raise Differs((low, low + 1), f"{op.name!r} of block {block} stands apart from the rest of it")

    def _consistent(self) -> None:
        """Check that what each block has for itself is read by no other block."""
        for plan in self.plans:
            for at, values in enumerate(plan.reads):
                lent = [t for v in values if (t := _lent(v)) in self.owners]
                if lent:
                    raise GraphError(
                        f"fold of graph {self.graph.name!r}: {self.ops[plan.run.starts[-1] + at].name!r} reads "
                        f"{lent[0]!r} in every block, which one block has for itself"
                    )

    # -- what is read --------------------------------------------------------------------------------------------

    def _read(self, plan: Plan) -> None:
        run = plan.run
        for at in range(run.length):
            ops = [self.ops[start + at] for start in run.starts]
            values = tuple(self.value(plan, ops, [op.operands[i] for op in ops]) for i in range(len(ops[0].operands)))
            plan.reads.append(values)

    def value(self, plan: Plan, ops: Sequence[Op], tensors: Sequence[Tensor]) -> Value:
        """Return what the turns of a run read in one place."""
        refs = [self.ref(plan, turn, t) for turn, t in enumerate(tensors)]
        if all(ref == refs[0] for ref in refs) and isinstance(refs[0], _Made) and not refs[0].ago:
            return Made(refs[0].at, refs[0].result)
        tensors = [as_stored(t) for t in tensors]
        seen = {self.from_outside(t) for t in tensors}
        if len(seen) == 1 and None not in seen:
            (value,) = seen
            assert value is not None
            return value
        refs = [self.ref(plan, turn, t) for turn, t in enumerate(tensors)]
        reading = _Reading(self, plan, ops, tensors, refs)
        for typical in (refs[-1], refs[len(refs) // 2]):  # at the edges something else may stand
            if isinstance(typical, _Made):
                return reading.made(typical)
            if isinstance(typical, _Member):
                return reading.member(typical)
        return reading.fixed()

    def ref(self, plan: Plan, turn: int, t: Tensor) -> _Made | _Member | Tensor:
        """Tell a tensor as it is seen from a turn."""
        block = plan.run.blocks[turn]
        if t in self.owners:
            family = self.owners[t]
            return _Member(family, self.blocks[family.members.index(t)] - block)
        if t.producer is None or t.producer not in self.places:
            return t
        other, made, at = self.places[t.producer]
        result = t.producer.results.index(t)
        if other is plan:
            return _Made(turn - made, at, result)
        return _Member(Left(other.number, Made(at, result)), other.run.blocks[made] - block)

    def from_outside(self, t: Tensor) -> Shared | View | None:
        """Return what a tensor is that no block makes, or a view of such a tensor, whichever block made the view."""
        if t in self.owners:
            return None
        if t.producer is None or t.producer not in self.places:
            return Shared(t)
        of = self.from_outside(t.producer.operands[0]) if is_free_view(t.producer) else None
        plan, _, at = self.places[t.producer]
        return None if of is None else View(of, plan.number, at, 0)

    def at(self, plan: Plan, value: Made, turn: int = -1) -> Tensor:
        """Return the tensor that a value is in a turn."""
        return self.ops[plan.run.starts[turn] + value.at].results[value.result]

    def typical(self, plan: Plan, value: Value | Family) -> Tensor:
        """Return a tensor with the layout of a value."""
        if isinstance(value, Made):
            return self.at(plan, value)
        if isinstance(value, Before | View):
            return self.typical(plan, value.of) if isinstance(value, Before) else self._viewed(value)
        if isinstance(value, Shared):
            return value.tensor
        family = value.family if isinstance(value, Member) else value
        return self.typical(self.plans[family.run], family.value) if isinstance(family, Left) else family.members[0]

    def _viewed(self, value: View) -> Tensor:
        return self.at(self.plans[value.run], Made(value.at, value.result))


@dataclass(frozen=True)
class _Made:
    """Made by the same run, some turns ago."""

    ago: int
    at: int
    result: int


@dataclass(frozen=True)
class _Member:
    """Of a family, and of which block as seen from that of the turn."""

    family: Family
    shift: int


@dataclass
class _Reading:
    """One operand of the ops at one place of all turns."""

    match: Match
    plan: Plan
    ops: Sequence[Op]
    tensors: Sequence[Tensor]
    refs: Sequence[_Made | _Member | Tensor]

    def differs(self, turn: int) -> Differs:
        """Return the error that says which turn reads something else than the one after it."""
        turn = min(turn, len(self.ops) - 2)
        pair = self.plan.run.blocks[turn], self.plan.run.blocks[turn + 1]
        a, b = (f"{self.ops[i].name!r} reads {self.tensors[i].name!r}" for i in (turn, turn + 1))
        return Differs(pair, f"blocks {pair[0]} and {pair[1]} differ: {b}, {a}")

    def made(self, typical: _Made) -> Value:
        for turn, ref in enumerate(self.refs):
            regular = ref == typical if turn >= typical.ago else not isinstance(ref, _Made)
            if not regular or layout(self.tensors[turn]) != layout(self.tensors[-1]):
                raise self.differs(turn)
        of = Made(typical.at, typical.result)
        return self.carried(Before(of, tuple(self.tensors[: typical.ago]))) if typical.ago else of

    def carried(self, value: Before) -> Before:
        self.plan.carry(value)
        return value

    def fixed(self) -> Value:
        changes = [t is not self.tensors[i + 1] for i, t in enumerate(self.tensors[:-1])]
        if any(not isinstance(ref, Tensor) for ref in self.refs) or not all(changes):
            raise self.differs(changes.index(any(changes)))
        if len({*self.tensors}) < len(self.tensors) or any(t.producer is not None for t in self.tensors):
            raise self.differs(0)
        members = self.tensors[:: self.plan.run.step]
        for turn, (a, b) in enumerate(zip(self.tensors, self.tensors[1:], strict=False)):
            if _facts(a) != _facts(b):
                raise self.differs(turn)
        return self.slice(self.match.own(tuple(members)))

    def slice(self, family: Family) -> Member:
        self.plan.slices[family] = None
        if isinstance(family, Left):
            self.match.plans[family.run].saved[family.value] = None
            if isinstance(family.value, Before):
                self.match.plans[family.run].carry(family.value)
        return Member(family)

    def member(self, typical: _Member) -> Value:
        blocks, shift = self.match.blocks, typical.shift
        for turn, ref in enumerate(self.refs):
            regular = ref == typical if self.plan.run.blocks[turn] + shift in blocks else isinstance(ref, Tensor)
            if not regular or layout(self.tensors[turn]) != layout(self.tensors[-1]):
                raise self.differs(turn)
        if not shift:
            return self.view(typical.family) or self.slice(typical.family)
        if shift * self.plan.run.step < 0:
            starts = tuple(self.tensors[: abs(shift)])
            return self.carried(Before(self.slice(typical.family), starts))
        family = typical.family
        run = self.match.plans[family.run].run if isinstance(family, Left) else None
        if run is None or run.step == self.plan.run.step:
            raise self.differs(0)  # what comes later in this run, and in no earlier one
        assert isinstance(family, Left)
        assert isinstance(family.value, Made)
        starts = tuple(self.tensors[::-1][: abs(shift)])
        return self.slice(Left(family.run, Before(family.value, starts)))

    def view(self, family: Family) -> View | None:
        """Make a view again where it is needed instead of keeping it: nothing is read twice then."""
        op = self.tensors[0].producer
        if not isinstance(family, Left) or not isinstance(family.value, Made) or op is None or not is_free_view(op):
            return None
        makers = [t.producer for t in self.tensors]
        bases = [maker.operands[0] for maker in makers if maker is not None]
        of = self.match.value(self.plan, self.ops, bases)
        return View(of, family.run, family.value.at, family.value.result)


def is_free_view(op: Op) -> bool:
    """Whether an op only gives another view of its one operand, at no cost."""
    if len(op.operands) != 1 or len(op.results) != 1 or op.results[0].storage is not op.operands[0].storage:
        return False
    return op.body is None and not op.kind.overwrites() and not any((*op.kind.reads(op), *op.kind.writes(op)))


def _lent(value: Value) -> Tensor | None:
    """Return the tensor from outside that a value is, or is a view of."""
    while isinstance(value, View):
        value = value.of
    return value.tensor if isinstance(value, Shared) else None


def as_stored(t: Tensor) -> Tensor:
    """Return the first tensor that lies in the same storage in the same way: what a view of a view comes back to."""
    found = t
    while t.is_view and t.producer is not None and not t.producer.kind.overwrites():
        t = next(o for o in t.producer.operands if o.storage is t.storage)
        if layout(t) == layout(found):
            found = t
    return found


def _facts(t: Tensor) -> tuple[object, ...]:
    return (*layout(t), t.role, t.requires_grad, t.storage.bytes, t.storage.pieces)
