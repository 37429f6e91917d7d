"""What ops outside of all turns read of the blocks: the last one's results, or something of each of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...errors import GraphError
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from .equal import Differs
from .match import Match, Plan, as_stored
from .values import After, Family, Left, Made, Member, Shared, View

__all__ = ["Around", "Outer", "once"]

Outer = Shared | View | Member | After


class Around:
    """Tells what everything outside of the turns reads; what is read of the blocks is noted in their plans.

    GraphError if something is read of one block that is not the last. What an op holds may be held of other blocks as
    well that need it anyway, but for ops that are `exact`: they stand for what reads it.
    """

    def __init__(self, match: Match, exact: Collection[Op] = ()) -> None:
        self.match, self.exact = match, exact
        self.reads: dict[Op, tuple[Outer, ...]] = {}
        """operands of ops outside: a family in place of each of its members"""
        self.starts: dict[tuple[int, Tensor], Outer] = {}
        """what runs start from, by run and tensor"""
        self.gradients: dict[Outer, Outer] = {}
        self._at = {op: i for i, op in enumerate(match.graph.ops)}
        starts = {plan.run.starts[0]: plan for plan in match.plans}
        for i, op in enumerate(match.ops):
            if i in starts:
                self._enter(starts[i], i)
            if op not in match.places:
                self._add(op, i)
        end = len(match.ops)
        self.outputs = once(self._several(match.graph.outputs, end, "an output"))
        self._gradients(end)

    def _enter(self, plan: Plan, i: int) -> None:
        """Note what a run starts from, and what its turns share."""
        for value in plan.carries:
            for t in value.starts:
                if t is not None:
                    self.starts[plan.number, t] = self.one(t, i, f"block {plan.run.blocks[0]}")

    def _add(self, op: Op, i: int) -> None:
        """Note what an op outside reads."""
        if isinstance(op.kind, Keep):
            at = len(self.match.ops) if op in self.exact else i
            if op in self.exact:
                self._has_edges(op)
            self.reads[op] = tuple(self._several(op.operands, at, repr(op.name)))
        else:
            self.reads[op] = tuple(self.one(t, i, repr(op.name)) for t in op.operands)

    def _has_edges(self, op: Op) -> None:
        """Check that what stands for a list has something of all blocks; Differs where some at an edge have nothing."""
        among, blocks = {as_stored(t) for t in op.operands}, self.match.blocks
        for family in {f for t in op.operands if (f := self.family(t)) is not None}:
            here = [b for b, t in zip(blocks, self.members(family), strict=True) if t in among]
            if here != [*range(here[0], here[-1] + 1)]:
                continue
            for low in (here[0] - 1, here[-1]):
                if blocks.start <= low < blocks.stop - 1:
                    pair = low, low + 1
                    raise Differs(pair, f"{op.name!r} has something of one of blocks {low} and {low + 1} alone")

    def _of(self, t: Tensor) -> bool:
        """Whether the blocks make a tensor or have it for themselves."""
        return t in self.match.owners or t.producer in self.match.places

    def family(self, t: Tensor) -> Family | None:
        """Return the family that a tensor is of."""
        t = as_stored(t)
        if t in self.match.owners:
            return self.match.owners[t]
        if t.producer is None or t.producer not in self.match.places:
            return None
        plan, _, at = self.match.places[t.producer]
        return Left(plan.number, Made(at, t.producer.results.index(t)))

    def members(self, family: Family) -> tuple[Tensor, ...]:
        """Return the tensors of a family, in the order of the blocks."""
        if not isinstance(family, Left):
            return family.members
        plan = self.match.plans[family.run]
        assert isinstance(family.value, Made)
        turns = range(len(plan.run.blocks))[:: plan.run.step]
        return tuple(self.match.at(plan, family.value, turn) for turn in turns)

    def _complete(self, tensors: Sequence[Tensor], i: int) -> set[Family]:
        """Return the families of which all members are among some tensors, or needed after place `i` anyway."""
        families = {f for t in tensors if (f := self.family(t)) is not None}
        among = {as_stored(t) for t in tensors}
        return {f for f in families if all(t in among or self._needed(t, i) for t in self.members(f))}

    def _needed(self, t: Tensor, i: int) -> bool:
        """Whether a tensor is an output, or read after a place of the program, or last before it."""
        graph, ops = self.match.graph, self.match.ops
        if i == len(ops):
            return False
        while i and isinstance(ops[i].kind, Keep):
            i -= 1
        return t in graph.outputs or any(self._at[op] >= i for op in graph.successors(t))

    def _several(self, tensors: Sequence[Tensor], i: int, reader: str) -> list[Outer]:
        """Return what a list of tensors is, where all members of a family may be in it."""
        out: list[Outer] = []
        complete = self._complete(tensors, i)
        for t in tensors:
            family = self.family(t)
            whole = family is not None and family in complete
            out.append(self._whole(family) if whole and family else self.one(t, i, reader))
        return out

    def _whole(self, family: Family) -> Member:
        if isinstance(family, Left):
            self.match.plans[family.run].saved[family.value] = None
        return Member(family)

    def one(self, t: Tensor, i: int, reader: str) -> Outer:
        """Return what one tensor is for a reader at place `i` of the program."""
        if not self._of(t):
            return Shared(t)
        t = as_stored(t)
        seen = self.match.from_outside(t)
        if seen is not None:
            return seen
        found = min(self._ends(t, i), key=lambda row: row[0], default=None)
        if found is not None:
            turns, plan, of = found
            known = max((len(c.starts) for c in plan.carries if c.of == of), default=1)
            if turns < known:
                return After(plan.number, plan.ago(of, turns + 1))
        raise GraphError(
            f"fold of graph {self.match.graph.name!r}: {reader} reads {t.name!r} of one block, expected what the last "
            f"one makes or something of every block"
        )

    def _ends(self, t: Tensor, i: int) -> list[tuple[int, Plan, Made | Member]]:
        """Return the runs that have a tensor at hand near their end, and how many turns before it."""
        out: list[tuple[int, Plan, Made | Member]] = []
        family = self.family(t)
        for plan in self.match.plans:
            if plan.run.starts[0] >= i or family is None:
                continue
            if isinstance(family, Left) and family.run == plan.number:
                assert t.producer is not None
                assert isinstance(family.value, Made)
                turn = self.match.places[t.producer][1]
                out.append((len(plan.run.blocks) - 1 - turn, plan, family.value))
            elif family in plan.slices:
                at = self.match.blocks[self.members(family).index(t)]
                out.append((abs(plan.run.blocks[-1] - at), plan, Member(family)))
        return out

    def _gradients(self, end: int) -> None:
        """Note which gradient belongs to which source."""
        seen: dict[Family, dict[Tensor, Tensor]] = {}
        for t, g in self.match.graph.gradients.items():
            family = self.family(t)
            if family is None:
                self.gradients[Shared(t)] = self.one(g, end, f"the gradient of {t.name!r}")
            else:
                seen.setdefault(family, {})[as_stored(t)] = g
        for family, pairs in seen.items():
            grads = [pairs.get(t) for t in self.members(family)]
            made = None if grads[0] is None else self.family(grads[0])
            if made is None or [*self.members(made)] != [None if g is None else as_stored(g) for g in grads]:
                raise GraphError(
                    f"fold of graph {self.match.graph.name!r}: the gradient of {next(iter(pairs)).name!r}, expected "
                    f"one that is made in each block at the same place"
                )
            self.gradients[Member(family)] = self._whole(made)


def once(values: Iterable[Outer]) -> list[Outer]:
    """Leave out a family that stands for several tensors where it is there already."""
    out: list[Outer] = []
    for value in values:
        if not isinstance(value, Member) or value not in out:
            out.append(value)
    return out
