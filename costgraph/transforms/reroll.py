"""Equal blocks of several runs over a stack: which ops correspond, and what each of them reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Protocol

from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import dims, is_name, shorten, shown
from ..errors import CostGraphError, GraphError
from ..ir.graph import (
    Bodied,
    Graph,
    Op,
    Placement,
    Sharding,
    Tensor,
    added_since,
    carry_facts,
    iterations_of,
    known_names,
    need_flag,
    need_graph,
    opened,
    same_place,
)
from ..ops.fill import Revised
from ..ops.keep_alive import Keep
from ..ops.layout import Concat, Slice, permute, reshape, slice_axis
from ..ops.loops import Absent, Repeat
from .rewrite import Rewriter

__all__ = [
    "Differs",
    "difference",
    "layout",
    "unlike",
    "After",
    "Before",
    "Family",
    "Left",
    "Made",
    "Member",
    "Owned",
    "Shared",
    "Value",
    "View",
    "FEWEST",
    "Labels",
    "Numbered",
    "Run",
    "find_runs",
    "stacks_of",
    "unnumbered",
    "Match",
    "Plan",
    "as_stored",
    "is_free_view",
    "Cut",
    "Cuts",
    "Join",
    "Path",
    "Turns",
    "Around",
    "Outer",
    "once",
    "with_lists",
    "Apart",
    "Beginning",
    "Folder",
    "equal_blocks",
    "fold",
    "without_an_edge",
    "fold_turns",
]


# -- equal -------------------------------------------------------------------------------------------------------------
# Whether two ops of two blocks are equal, and if not, in what.

Names = Callable[[str], str]


class Differs(CostGraphError):  # noqa: N818  # no error that anyone sees
    """Two neighbouring blocks are not equal: caught where blocks at the edges are left out."""

    def __init__(self, blocks: tuple[int, int], text: str) -> None:
        super().__init__(text)
        self.low = min(blocks)


def layout(t: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common whose reading costs the same."""
    return t.sizes, t.dtype, t.strides, t.offset, t.domain


def _shared(op: Op) -> list[int | None]:
    """Return for each result the operand whose storage it lies in."""
    stored = [t.storage for t in op.operands]
    return [stored.index(t.storage) if t.storage in stored else None for t in op.results]


def difference(a: Op, b: Op, names: tuple[Names, Names]) -> str | None:
    """Say in what two ops differ, apart from which tensors they read; None where they are equal.

    They are at one place of two blocks; `names` return a scope as it is seen from the block of each.
    """
    facts: dict[str, tuple[Any, Any]] = {
        "kind": (a.kind.name, b.kind.name),
        "phase": (a.phase, b.phase),
        "scope": (names[0](a.scope), names[1](b.scope)),
        "operands": (len(a.operands), len(b.operands)),
    }
    if a.call is not None and b.call is not None:
        facts["target"] = a.call.target, b.call.target
    for name, (mine, other) in facts.items():
        if mine != other:
            return f"{b.name!r} has {name} {other!r}, {a.name!r} has {mine!r}"
    if [*map(_stored, a.results)] != [*map(_stored, b.results)] or _shared(a) != _shared(b):
        return f"{b.name!r} makes {_told(b.results)}, {a.name!r} makes {_told(a.results)}"
    stated = b.kind.facts()
    for name, mine in a.kind.facts().items():
        other = stated[name]
        if name != "body" and mine != other:
            return f"{b.name!r} has {name} {shown(other, 120)}, {a.name!r} has {shown(mine, 120)}"
    if a.call != b.call:
        return f"{b.name!r} has call {shown(b.call, 120)}, {a.name!r} has {shown(a.call, 120)}"
    if a.body is not None and b.body is not None:
        return _bodies(a.body, b.body, names)
    return None


def _stored(t: Tensor) -> tuple[object, ...]:
    return *layout(t), t.storage.bytes, t.storage.pieces


def _told(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(repr, tensors[:3])) or "nothing"


def _bodies(a: Graph, b: Graph, names: tuple[Names, Names]) -> str | None:
    """Say in what two bodies differ: they are equal where their ops are, read in order."""
    if len(a.ops) != len(b.ops) or a.fused != b.fused:
        return f"body {b.name!r} has {len(b.ops)} ops, {a.name!r} has {len(a.ops)}"
    mine, other = _numbered(a), _numbered(b)
    if [layout(t) for t in mine] != [layout(t) for t in other]:
        return f"body {b.name!r} has other tensors than {a.name!r}"
    for x, y in zip(a.ops, b.ops, strict=True):
        text = difference(x, y, names)
        if text is None and [mine[t] for t in x.operands] != [other[t] for t in y.operands]:
            text = f"{y.name!r} reads other tensors than {x.name!r}"
        if text is not None:
            return text
    same = [mine[t] for t in a.outputs] == [other[t] for t in b.outputs]
    return None if same else f"body {b.name!r} has other outputs than {a.name!r}"


def unlike(a: Graph, b: Graph) -> str | None:
    """Say in what two graphs differ, whatever the names of their tensors; None where they are equal."""
    roles = [[(t.role, *layout(t)) for t in g.tensors if t.producer is None] for g in (a, b)]
    if roles[0] != roles[1]:
        return "other parameters, inputs or buffers"
    return _bodies(a, b, (str, str))


def _numbered(graph: Graph) -> dict[Tensor, int]:
    """Number the tensors of a body: its inputs first, then what ops make, then what it owns."""
    own = [t for t in graph.tensors if t.producer is None and t.role != "formal"]
    return {t: i for i, t in enumerate([*graph.formals, *(r for op in graph.ops for r in op.results), *own])}


# -- values ------------------------------------------------------------------------------------------------------------
# What an op of a block reads, told in a way that is the same for all blocks.


@dataclass(frozen=True)
class Made:
    """What an op of the same turn makes."""

    at: int
    """place of the op in the turn"""
    result: int
    """which of its results"""


@dataclass(frozen=True)
class Shared:
    """A tensor from outside that is the same in all turns."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Owned:
    """Parameters, buffers or states of which each block has its own."""

    members: tuple[Tensor, ...]
    """in the order of the blocks"""


@dataclass(frozen=True)
class Left:
    """What the turns of an earlier run leave behind, one storage each."""

    run: int
    value: Made | Before


Family = Owned | Left


@dataclass(frozen=True)
class Member:
    """The one of a family that belongs to the block of the turn; outside of runs, all of them."""

    family: Family


@dataclass(frozen=True)
class Before:
    """What something was as many turns ago as there are `starts`."""

    of: Made | Member
    starts: tuple[Tensor | None, ...]
    """what is read in its place in the first turns; None where nothing is"""

    @property
    def nearer(self) -> Before | Made | Member:
        """What it was one turn later: what is handed on to become it."""
        return Before(self.of, self.starts[1:]) if len(self.starts) > 1 else self.of


@dataclass(frozen=True)
class View:
    """A view of a value, as an op of an earlier run made it for the same block."""

    of: Value
    run: int
    at: int
    result: int


@dataclass(frozen=True)
class After:
    """Outside of runs: what a value that a run carries is when its last turn is over."""

    run: int
    value: Before


Value = Made | Shared | Member | Before | View


# -- runs --------------------------------------------------------------------------------------------------------------
# Which block an op or a source belongs to, and in which order a program goes over the blocks.

#: Equal blocks that there have to be: two of them could be alike by chance.
FEWEST = 3
#: Layers that take turns, at the most: of published models no more than 8 do.
_LONGEST = 16


def unnumbered(name: str) -> str:
    """Return a name without the number of the iteration that it ends with."""
    return re.sub(r"\.i\d+(?=_\d+$|$)", "", name)


class Numbered(Protocol):
    """Which block ops and sources belong to."""

    scope: str
    ops: dict[Op, int]
    sources: dict[Tensor, int]
    count: int

    def relative(self, name: str, block: int) -> str:
        """Return a name or scope as it is seen from a block: equal for equal blocks."""

    def plain(self, name: str) -> str:
        """Return a name or scope without the number of the block."""


class Labels:
    """The blocks of a stack, of `period` layers each, as those that take turns do.

    The scope is the path whose children `0`, `1`, ... are the layers; of a graph that was unrolled, that of the loop.
    GraphError if there are no such blocks, or too few.
    """

    def __init__(self, graph: Graph, scope: str, period: int = 1) -> None:
        self.period = period
        path = f"{re.escape(scope)}/" if scope else ""
        self.scope = scope
        self._prefix = f"{scope}/" if scope else ""
        self._scoped = re.compile(rf"^{path}(\d+)(?=/|$)")
        # sources of an optimizer have the path of their parameter behind a level of its own
        self._named = re.compile(rf"(?<![^/]){path}(\d+)(?=/|$)" if scope else r"(?:^|(?<=^optimizer/))(\d+)(?=/|$)")
        self._played = re.compile(rf"^{path}.*\.i(\d+)(?=_\d+$|$)")
        self.unrolled = not any(self._scoped.match(op.scope) for op in graph.ops)
        self.sources = {
            t: found for t in graph.tensors if t.producer is None and (found := self._number(t.name)) is not None
        }
        """the block that each source belongs to"""
        self.ops = self._labelled(graph)
        """the block that each op belongs to"""
        numbers = {*self.ops.values()}
        self.layers = 1 + max(numbers, default=-1)
        if not numbers or numbers != set(range(self.layers)):
            raise GraphError(
                f"fold of graph {graph.name!r}: no blocks 0, 1, ... in scope {shorten(scope)}, "
                f"expected {_choices(graph)}"
            )
        if self.layers < FEWEST:
            raise GraphError(
                f"fold of graph {graph.name!r}: {self.layers} blocks in scope {scope!r}, expected {FEWEST} equal ones "
                f"at least"
            )
        self.ops = {op: layer // period for op, layer in self.ops.items()}
        self.sources = {t: layer // period for t, layer in self.sources.items()}
        self.count = -(-self.layers // period)

    def _number(self, name: str) -> int | None:
        found = (self._played if self.unrolled else self._named).search(name)
        return None if found is None else int(found.group(1))

    def _labelled(self, graph: Graph) -> dict[Op, int]:
        """Find the block of each op: the one it stands in, or the only one of whose own it reads something.

        That is parameters and states, and in an update gradients as well.
        """
        stored = {t.storage: block for t, block in self.sources.items()}
        grads = {g.storage: b for t, b in self.sources.items() if (g := graph.gradients.get(t)) is not None}
        out: dict[Op, int] = {}
        for op in graph.ops:
            found = self._played.match(op.name) if self.unrolled else self._scoped.match(op.scope)
            known = {**grads, **stored} if op.phase == "optimizer" else stored
            read = {known[t.storage] for t in op.operands if t.storage in known}
            if found is not None:
                out[op] = int(found.group(1))
            elif len(read) == 1 and not isinstance(op.kind, Keep):  # which follows when something is given back
                (out[op],) = read
                if op.phase == "optimizer":  # an update goes on with what it has made
                    stored |= {t.storage: out[op] for t in op.results}
        return out

    def taking_turns(self) -> int:
        """Return how many layers take turns: the fewest that the longest stretch of layers has over and over."""
        found: list[list[object]] = [[] for _ in range(self.layers)]
        for op, layer in {} if self.unrolled else self.ops.items():
            sizes = tuple(t.sizes for t in op.results)
            found[layer].append((op.kind.name, op.phase, self.relative(op.scope, layer), sizes))
        periods = range(1, min(_LONGEST, self.layers // FEWEST) + 1)
        stretches = {p: p + max(_stretches([a == b for a, b in zip(found, found[p:], strict=False)])) for p in periods}
        return max(periods, key=lambda p: (stretches[p] // p >= FEWEST, stretches[p], -p))

    def relative(self, name: str, block: int) -> str:
        """Return a name or scope with the number of a layer told from where it is seen: equal for equal blocks."""
        if self.unrolled:
            return name
        return self._named.sub(lambda m: f"{self._prefix}{int(m.group(1)) - block * self.period:+d}", name)

    def plain(self, name: str) -> str:
        """Return a name or scope without the number of the block."""
        if self.unrolled:
            return unnumbered(name)
        if self.period > 1:  # the layers of a block keep their places in it
            return self._named.sub(lambda m: f"{self._prefix}{int(m.group(1)) % self.period}", name)
        return self._named.sub(self.scope, name).replace("//", "/").strip("/")


def stacks_of(graph: Graph) -> list[str]:
    """Return the scopes that have children 0, 1 and 2, in program order; one stands before those inside of it."""
    children: dict[str, set[str]] = {}
    for op in graph.ops:
        levels = op.scope.split("/")
        for i, level in enumerate(levels):
            if level.isdigit():
                children.setdefault("/".join(levels[:i]), set()).add(level)
    return [scope for scope, numbers in children.items() if {"0", "1", "2"} <= numbers]


def _stretches(equal: Sequence[bool]) -> Iterator[int]:
    """Yield how long it holds at a time."""
    yield 0
    yield from (len(list(group)) for holds, group in groupby(equal) if holds)


def _choices(graph: Graph) -> str:
    found = stacks_of(graph)
    return f"one of {', '.join(map(repr, found))}" if found else "a graph with a stack of layers"


@dataclass(eq=False)
class Run:
    """One pass of the program over the blocks, forward or back."""

    phase: str
    """phase of its first op"""
    blocks: list[int] = field(default_factory=list)
    """blocks in the order in which it comes to them"""
    starts: list[int] = field(default_factory=list)
    """place in the program of the first op of each"""
    length: int = 0
    """ops of each turn, and whatever stands between blocks"""

    @property
    def step(self) -> int:
        """1 where it goes from the first block to the last, -1 where it goes back."""
        return 1 if self.blocks[0] < self.blocks[-1] else -1

    def goes_on(self, block: int) -> bool:
        """Whether a block may be the next one."""
        step = block - self.blocks[-1]
        return block not in self.blocks and (step == self.step if len(self.blocks) > 1 else abs(step) == 1)

    def within(self, blocks: range) -> Run:
        """Return the part of it that goes over some of the blocks."""
        kept = [(b, s) for b, s in zip(self.blocks, self.starts, strict=True) if b in blocks]
        out = Run(self.phase, [b for b, _ in kept], [s for _, s in kept])
        out.length = min((b - a for a, b in zip(out.starts, out.starts[1:], strict=False)), default=0)
        return out


def find_runs(ops: Sequence[Op], labels: Labels) -> list[Run]:
    """Return the passes over all blocks, in program order."""
    seen = [(i, op, labels.ops[op]) for i, op in enumerate(ops) if op in labels.ops]
    runs: list[Run] = []
    for phase, group in groupby(seen, lambda row: _PASS.get(row[1].phase, row[1].phase)):
        runs += _passes(phase, [(i, label) for i, _, label in group], labels.count)
    return [run for run in runs if len(run.blocks) >= FEWEST]


_PASS: Mapping[str, str] = {"recompute": "backward"}


def _passes(phase: str, seen: Sequence[tuple[int, int]], count: int) -> Iterator[Run]:
    run = Run(phase)
    for i, label in seen:
        if run.blocks and (label == run.blocks[-1] or (label in run.blocks and len(run.blocks) < count)):
            continue
        if run.blocks and not run.goes_on(label):
            yield run
            run = Run(phase)
        run.blocks.append(label)
        run.starts.append(i)
    yield run


# -- match -------------------------------------------------------------------------------------------------------------


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


# -- cuts --------------------------------------------------------------------------------------------------------------
# What turns of a loop read and write of their own: slices of something outside that go on from turn to turn.

#: Loop and turn, of each loop around an op; the outermost first.
Path = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Join:
    """What turns of a loop have made, joined by an op outside of it."""

    loop: int
    kind: Concat
    back: bool = False
    """whether what the last turn has made comes first"""


@dataclass(eq=False)
class Turns:
    """What is known of the loops that a program has run, turn by turn."""

    counts: dict[int, Poly] = field(default_factory=dict)
    """how many turns each loop has, by its number"""
    played: dict[int, int] = field(default_factory=dict)
    """how many of them were run"""
    paths: dict[Op, Path] = field(default_factory=dict)
    """which turns an op is of"""
    joins: dict[str, Join] = field(default_factory=dict)
    """By the name of a tensor that nobody makes: a `keep` of it stands for a join of what it holds besides."""


@dataclass(eq=False)
class Cut:
    """Positions of an axis of something outside, so many further on in each turn."""

    loop: int
    base: Tensor
    axis: int
    start: Poly
    """where those of turn 0 would begin"""
    step: Poly
    size: Poly
    unseen: bool = False
    """whether no gradient is told of what is written there"""
    members: dict[int, Op] = field(default_factory=dict)
    """the op that takes them in each turn"""

    def span(self) -> tuple[object, ...]:
        """Return what two cuts of the same positions have in common."""
        return self.axis, self.start, self.step, self.size


class Cuts:
    """Finds the slices that go on from turn to turn, and what turns write into them."""

    def __init__(self, graph: Graph, turns: Turns, group: set[int], depth: int) -> None:
        self.graph, self.turns, self.group, self.depth = graph, turns, group, depth
        self.loops: dict[int, dict[int, list[Op]]] = {}
        """ops of each turn, by loop"""
        for op, path in turns.paths.items():
            if len(path) == depth and path[-1][0] in group:
                number, turn = path[-1]
                self.loops.setdefault(number, {}).setdefault(turn, []).append(op)
        self.count = turns.counts[min(group)]
        self.played = turns.played[min(group)]
        self.of: dict[Op, tuple[Cut, int]] = {}
        """the cut that a slice is of, and its turn"""
        self.written: dict[Op, tuple[Cut, int]] = {}
        """the same of the op that names what it was cut from, after it was written"""
        self.same: dict[Op, Op] = {}
        """views of something outside that all turns make, and the first of each"""
        self.ahead: dict[int, list[Op]] = {}
        """those first ones by loop"""
        self.back = set[int]()
        """loops whose turns go from the last position to the first"""
        for number, found in self.loops.items():
            self._hoist(number, found)
            self._look(number, found)

    def turn(self, op: Op) -> int | None:
        """Return the place of an op's turn among all of them, in the order of positions."""
        path = self.turns.paths.get(op, ())
        inside = len(path) == self.depth and path[-1][0] in self.group and op not in self.same
        return self.at(*path[-1]) if inside else None

    def loop(self, op: Op) -> int | None:
        """Return the loop that an op is of."""
        path = self.turns.paths.get(op, ())
        return path[-1][0] if len(path) == self.depth and path[-1][0] in self.group else None

    def at(self, number: int, turn: int) -> int:
        """Return the place of a loop's turn in the order of positions, or the turn of a place."""
        return self.played - 1 - turn if number in self.back else turn

    def once(self, t: Tensor) -> Tensor:
        """Return the first of equal views."""
        return t if t.producer not in self.same else self.same[t.producer].results[0]

    def goes_on(self, op: Op) -> bool:
        """Whether the turn that has written a part writes there once more."""
        after = (r for t in op.results for s in t.graph.successors(t) for r in s.results if s in self.written)
        return any(self.turns.paths.get(t.producer) == self.turns.paths[op] for t in after if t.producer is not None)

    def start(self, cut: Cut, turn: int) -> Poly:
        """Return where the slice of one turn begins: of one in the second half, as seen from the last."""
        late = turn >= self.played // 2
        return cut.start + cut.step * (self.count - (self.played - turn) if late else poly(turn))

    def _hoist(self, number: int, found: dict[int, list[Op]]) -> None:
        """Find the views that all turns make alike of something outside: one is enough."""
        own = {op for ops in found.values() for op in ops}
        written = {op.operands[i].storage for op in own for i in op.kind.overwrites()}
        alike: dict[tuple[object, ...], list[Op]] = {}
        first: dict[Tensor, Tensor] = {}
        for ops in found.values():
            seen = Counter[tuple[object, ...]]()
            for op in (op for op in ops if is_free_view(op) and op.results[0].ndim):
                t = first.get(op.operands[0], op.operands[0])
                if t.storage in written or (t.producer in own and t not in first.values()):
                    continue
                key = (t, op.kind, *layout(op.results[0]))
                same = alike.setdefault((*key, seen[key]), [])
                seen[key] += 1
                same.append(op)
                first[op.results[0]] = same[0].results[0]
        for ops in alike.values():
            if len(ops) >= max(FEWEST, self.played - 2):
                self.same |= dict.fromkeys(ops, ops[0])
                self.ahead.setdefault(number, []).append(ops[0])

    def _look(self, number: int, found: dict[int, list[Op]]) -> None:
        own = dict.fromkeys(op for ops in found.values() for op in ops if op not in self.same)
        slices: dict[tuple[object, ...], dict[int, Op]] = {}
        for turn, ops in found.items():
            seen: dict[tuple[object, ...], int] = {}
            for op in ops:
                cut = isinstance(op.kind, Slice) and op in own
                base = self._base(op.operands[0], own) if cut else None
                if base is None or not isinstance(op.kind, Slice):
                    continue
                key = (base, op.kind.axis, op.kind.size, op.kind.step)
                seen[key] = seen.get(key, -1) + 1
                slices.setdefault((*key, seen[key]), {})[turn] = op
        for (of, axis, size, *_), ops_of in slices.items():
            assert isinstance(of, Tensor)
            assert isinstance(axis, int)
            assert isinstance(size, Poly)
            self._cut(number, of, axis, size, ops_of)
        steps = {cut.step.constant for cut, _ in self.of.values() if cut.loop == number}
        back = [isinstance(n, int) and n < 0 for n in steps]
        if any(back) and not all(back):
            raise GraphError("turns that go forward along one tensor and back along another, expected one way")
        self.back |= {number} if any(back) else set()
        self._writes(own)

    def _base(self, t: Tensor, own: Collection[Op | None]) -> Tensor | None:
        """Return what a tensor from outside was before turns wrote parts of it; None of what a turn has made."""
        while t.producer is not None and t.producer in own and isinstance(t.producer.kind, Revised):
            t = t.producer.operands[0]
        return None if t.producer in own else self.once(t)

    def _cut(self, number: int, base: Tensor, axis: int, size: Poly, ops: Mapping[int, Op]) -> None:
        """Note the slices that go on by equal steps: the longest stretch of turns."""
        starts = {turn: op.kind.start for turn, op in ops.items() if isinstance(op.kind, Slice)}
        steps = {turn: starts[turn + 1] - start for turn, start in starts.items() if turn + 1 in starts}
        stretches: list[list[int]] = []
        for turn in sorted(steps):
            if stretches and stretches[-1][-1] == turn - 1 and steps[turn - 1] == steps[turn]:
                stretches[-1].append(turn)
            else:
                stretches.append([turn])
        longest = max(stretches, key=len, default=[])
        if len(longest) + 1 < FEWEST or not steps[longest[0]]:
            return
        first, step = longest[0], steps[longest[0]]
        cut = Cut(number, base, axis, starts[first] - step * first, step, size)
        if step * step != size * size and size != ONE:
            raise GraphError(
                f"turns that take {size} positions of {base.name!r} and go on by {step}, expected as many as they take"
            )
        for turn in (*longest, longest[-1] + 1):
            cut.members[turn] = ops[turn]
            self.of[ops[turn]] = cut, turn

    def _writes(self, own: Collection[Op]) -> None:
        """Find what turns write into parts of something outside, and see that nothing else of it is read meanwhile."""
        written: dict[Tensor, dict[int, tuple[Op, Cut]]] = {}
        for op in own:
            base = self._base(op.operands[0], own) if isinstance(op.kind, Revised) else None
            if base is None:
                continue
            turn = self.turns.paths[op][-1][1]
            mine = ((s.results[0], c) for s, (c, k) in self.of.items() if k == turn and c.base is base)
            cut = next((c for t, c in mine if same_place(t, op.operands[1])), None)
            before = written.get(base, {}).get(turn, (op, cut))[1]
            if cut is None or before is None or before.span() != cut.span():
                raise GraphError(
                    f"{op.operands[1].name!r} is written into {base.name!r}, expected one part in each turn, "
                    f"which goes on with the turns"
                )
            cut.unseen |= isinstance(op.kind, Revised) and op.kind.unseen
            written.setdefault(base, {})[turn] = op, cut
            self.written[op] = cut, turn
        for op in own if written else ():
            for t in op.operands:
                base = self._base(t, own)
                if base not in written or op in self.written:
                    continue
                spans = {cut.span() for _, cut in written[base].values()}
                if op not in self.of or {self.of[op][0].span()} != spans:
                    raise GraphError(f"{op.name!r} reads {base.name!r}, parts of which other turns have written")


# -- around ------------------------------------------------------------------------------------------------------------
# What ops outside of all turns read of the blocks: the last one's results, or something of each of them.

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


# -- listed ------------------------------------------------------------------------------------------------------------
# Loops over a list of what turns of another have made: nothing counts them, and they are known by what is read.

#: Turns of a loop at the edges of which nothing need be read: first and last ones may stand apart.
_EDGES = 2


def with_lists(graph: Graph, turns: Turns) -> Turns:
    """Label the ops that go over what a loop has made, part by part, by turns of a loop of their own."""
    ops = graph.ops
    counts, played, paths = dict(turns.counts), dict(turns.played), dict(turns.paths)
    rows = [
        (found, around, loop)
        for (around, loop), reads in _reads(ops, turns).items()
        for found in _in_order(reads)
        if len(found) >= max(FEWEST, turns.played[loop] - _EDGES)
    ]
    starts = [found[0][0] for found, *_ in rows]
    for found, around, loop in sorted(rows, key=lambda row: row[0][0]):
        own = {op: turn for turn, part in _parts(ops, found, starts) for op in part}
        if any(paths.get(op) != turns.paths.get(op) or not _within(op, around, turns) for op in own):
            continue  # of such a loop already, or of turns of another one
        number = max(counts) + 1
        counts[number], played[number] = turns.counts[loop], turns.played[loop]
        for op, turn in own.items():
            paths[op] = (*around, (number, turn), *turns.paths.get(op, ())[len(around) :])
    return replace(turns, counts=counts, played=played, paths=paths)


def _within(op: Op, around: Path, turns: Turns) -> bool:
    return turns.paths.get(op, ())[: len(around)] == around


def _reads(ops: Sequence[Op], turns: Turns) -> dict[tuple[Path, int], list[tuple[int, int]]]:
    """Return where something of one turn of a loop is read, and of which, by what is around the reader and the loop."""
    out: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    for i, op in enumerate(ops):
        around, found = turns.paths.get(op, ()), set[tuple[int, int]]()
        for t in op.operands if not isinstance(op.kind, Keep) else ():
            path = () if t.producer is None else turns.paths.get(t.producer, ())
            if len(path) > len(around) and path[: len(around)] == around:
                found.add(path[len(around)])
        for loop in {n for n, _ in found}:
            turn, *more = sorted((k for n, k in found if n == loop), reverse=True)
            if len(more) <= 1:  # no more than one beside the one before it
                out.setdefault((around, loop), []).append((i, turn))
    return out


def _in_order(reads: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the stretches in which turns are read one after the other, forward or back, with where each is first."""
    found: list[tuple[int, int]] = []
    for at, turn in reads:
        if found and turn == found[-1][1]:
            continue
        steps = {b - a for (_, a), (_, b) in pairwise([*found, (at, turn)])}
        if found and steps not in ({1}, {-1}):
            yield found
            found = []
        found.append((at, turn))
    yield found


def _parts(
    ops: Sequence[Op], found: Sequence[tuple[int, int]], others: Sequence[int]
) -> Iterator[tuple[int, Sequence[Op]]]:
    """Yield the ops of each turn, which begins where it reads its part.

    The last is as long as the one before it, unless another loop begins there.
    """
    starts = [at for at, _ in found]
    ends = [*starts[1:], min(2 * starts[-1] - starts[-2], *(n for n in others if n > starts[-1]), len(ops))]
    for (at, turn), end in zip(found, ends, strict=True):
        yield turn, ops[at:end]


# -- apart -------------------------------------------------------------------------------------------------------------
# Turns of loops with their slices for themselves: what they share with each other is left outside.


class Beginning(Rewriter):
    """Copies kernels whose inputs begin where what they are given does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begins: dict[Tensor, Poly] = {}
        """where inputs of kernels begin"""

    def begin(self, op: Op, operands: Sequence[Tensor]) -> None:
        """Note where the operands of an op begin that is copied next."""
        if op.body is not None and op.body.fused:
            self.begins |= {f: t.offset for f, t in zip(op.body.formals, operands, strict=True)}

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        """Copy an input of a body."""
        made = super().formal(old, body, suffix)
        made.offset = self.begins.get(old, made.offset)
        return made


class Apart(Beginning):
    """Copies a graph in which each turn has its slices for itself, as nobody has made them."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts
        self.paths: dict[Op, Path] = {}
        self.labels: dict[Op, int] = {}
        """place of the turn of each op"""
        self.cut_of: dict[str, tuple[Cut, int]] = {}
        """the cut that a tensor stands for, and its turn, by name"""
        self.after: dict[str, Tensor] = {}
        """by the name of what a `keep` holds, the tensor whose parts were written"""
        self.parts: dict[Tensor, list[tuple[Cut, int, Tensor]]] = {}
        """what was written into a tensor: the cut that it is of, and its turn"""
        self._numbers: dict[Cut, int] = {}
        self._begun: set[int] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, but for slices and names of what was written."""
        number = self.cuts.loop(op)
        if number is not None and number not in self._begun:
            self._begun.add(number)
            for view in self.cuts.ahead.get(number, ()):
                super().emit(view, new, suffix)
        if op in self.cuts.same:
            self.tensors[op.results[0]] = self.tensors[self.cuts.same[op].results[0]]
        elif op.graph.parent is not None:
            super().emit(op, new, suffix)
        elif op in self.cuts.of and op.operands[0].producer in self.cuts.written and self._again(op):
            self.tensors[op.results[0]] = self.tensors[op.operands[0].producer.operands[1]]
        elif op in self.cuts.of:
            cut, turn = self.cuts.of[op]
            t, number = op.results[0], self._numbers.setdefault(cut, len(self._numbers))
            name = f"cut.{number}.i{self.cuts.at(cut.loop, turn)}"
            self.tensors[t] = self._source(new, name, t, ZERO)
            self.cut_of[name] = cut, turn
        elif op in self.cuts.written:
            self._written(op, *self.cuts.written[op], new)
        else:
            super().emit(op, new, suffix)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; one outside of loops that reads what a turn has cut out reads a view of its own."""
        if op.graph.parent is None and self.cuts.loop(op) is None:
            seen = {t: self._apart(t, new) for t in op.operands if self._is_cut(t)}
            before = {t: self.tensors[t] for t in seen}
            self.tensors |= seen
            self.begin(op, [self.tensors[t] for t in op.operands])
            made = super().copy(op, new, suffix)
            self.tensors |= before
            return made
        if op.graph.parent is None:
            self.begin(op, [self.tensors[t] for t in op.operands])
        return super().copy(op, new, suffix)

    def _is_cut(self, t: Tensor) -> bool:
        """Whether a tensor is a slice that goes on with the turns, or a view of one."""
        op = t.producer
        return op in self.cuts.of or (op is not None and is_free_view(op) and self._is_cut(op.operands[0]))

    def _apart(self, t: Tensor, new: Graph) -> Tensor:
        """Make a view again, outside of the turn that has made it."""
        op = t.producer
        if op is None or not (op in self.cuts.of or self._is_cut(op.operands[0])):
            found: Tensor = self.tensors[t]
            return found
        kind = op.kind
        if isinstance(kind, Slice) and op in self.cuts.of:
            kind = replace(kind, start=self.cuts.start(*self.cuts.of[op]), room=None)
        made = new.add_op(kind, [self._apart(op.operands[0], new)], op.name, op.phase)
        made.scope = op.scope
        return made.results[0]

    def add(self, op: Op, kind: Any, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add a copy, in the turn of the op."""
        at = self.cuts.turn(op)
        if at is not None:
            name = re.sub(r"_\d+$", "", op.name) + f".i{at}"
        made = super().add(op, kind, operands, new, name)
        if op in self.cuts.turns.paths:
            path = self.cuts.turns.paths[op]
            self.paths[made] = path[:-1] if op in self.cuts.same else path
        if at is not None:
            self.labels[made] = at
        return made

    def _again(self, op: Op) -> bool:
        """Whether a slice is what the same turn has written there before."""
        before = op.operands[0].producer
        return before is not None and self.cuts.turn(before) == self.cuts.turn(op)

    def _written(self, op: Op, cut: Cut, turn: int, new: Graph) -> None:
        """Note a part; once all are written, a name for the whole."""
        parts = self.parts.setdefault(cut.base, [])
        if parts and parts[-1][1] == turn:
            parts.pop()  # it has written there before
        parts.append((cut, turn, self.tensors[op.operands[1]]))
        if turn + 1 < self.cuts.played or self.cuts.goes_on(op):
            return
        if len(parts) < self.cuts.played:
            raise GraphError(f"{len(parts)} of {self.cuts.played} turns write into {cut.base.name!r}, expected all")
        name = f"after.{len(self.after)}"
        self.after[name] = cut.base
        whole = self._source(new, name, cut.base, cut.base.offset)
        held = new.add_op(Keep(), [whole, *(t for *_, t in parts)], "written", op.phase)
        held.scope = op.scope
        self.paths[held] = self.cuts.turns.paths[op][:-1]
        self.tensors[op.results[0]] = held.results[0]

    @staticmethod
    def _source(new: Graph, name: str, like: Tensor, offset: Poly) -> Tensor:
        made = Tensor(new, name, like.sizes, like.dtype, role="buffer", strides=like.strides, offset=offset)
        new.add_node(made)
        return made


# -- build -------------------------------------------------------------------------------------------------------------
# From what was matched to a graph with a loop for each run.


class Folder(Rewriter):
    """Copies a graph, with loops of so many blocks in place of runs, and what the rest of the graph reads of them."""

    keeps_suffixes = False

    def __init__(self, match: Match, around: Around, count: Poly) -> None:
        super().__init__()
        self.match, self.around, self.count = match, around, count
        self.families: dict[Family, Tensor] = {}
        """What stands for a family: one tensor, a storage for each block."""
        self.ends: dict[After, Tensor] = {}
        self.views: dict[View, Tensor] = {}
        self.first = {match.ops[plan.run.starts[0]]: plan for plan in match.plans}
        self.inside = self._inside()

    def _inside(self) -> dict[Owned, Plan]:
        """Return what is declared in the body of a loop: what nothing else reads."""
        readers: dict[Owned, list[Plan | None]] = {f: [] for f in dict.fromkeys(self.match.owners.values())}
        for plan in self.match.plans:
            for family in plan.slices:
                if isinstance(family, Owned):
                    readers[family].append(plan)
        around = [*self.around.reads.values(), self.around.outputs, self.around.gradients]
        for value in (v for values in around for v in values):
            if isinstance(value, Member) and isinstance(value.family, Owned):
                readers[value.family].append(None)
        home = {f: (found[0] if found else self.match.plans[0]) for f, found in readers.items() if len(found) < 2}
        return {f: plan for f, plan in home.items() if plan is not None and not f.members[0].storage.pieces}

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the new graph."""
        self.new = new = Graph(old.name if name is None else name, dtype=old.dtype)
        # a default of the count is of the loop that was here before, whatever its length
        defaults = {name: size for name, size in old.defaults.items() if name not in self.count.names()}
        layers = frozenset(scope for scope in old.layers if not iterations_of(scope))
        carry_facts(old, new, defaults=defaults, layers=layers)
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(self.outer(v) for v in self.around.outputs))
            new.gradients = {self.outer(t): self.outer(g) for t, g in self.around.gradients.items()}
        if old.sharding is not None:
            new.sharding = self.laid(old, old.sharding)
        return new.freeze()

    def laid(self, old: Graph, sharding: Sharding) -> Sharding:
        """Return where the tensors of the new graph lie: as those of each block, whose number is an axis of its own."""
        for family in dict.fromkeys(self.match.owners.values()):
            first, *others = family.members
            other = next((t for t in others if sharding.places[t.name] != sharding.places[first.name]), None)
            if other is not None:
                raise GraphError(
                    f"fold of graph {old.name!r}: {first.name!r} lies as {sharding.places[first.name]}, {other.name!r} "
                    f"as {sharding.places[other.name]}: expected blocks that lie alike on the mesh"
                )

        def place(t: Tensor, at: Placement) -> Placement:
            return at.with_dims([*[()] * (t.ndim - len(at.dims)), *at.dims])

        return replace(
            sharding,
            places={made.name: place(made, sharding.places[t.name]) for made, t in self.origins.items()},
            outputs=tuple(place(t, at) for t, at in zip(self.new.outputs, sharding.outputs, strict=True)),
            gradients={t.name: place(t, sharding.gradients[self.origins[t].name]) for t in self.new.gradients},
        )

    # -- outside of loops ----------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; those of which each block has one are declared together, here or in the body of a loop."""
        family = self.match.owners.get(old)
        if old.graph.parent is not None:
            return self.declare(old, new, old.sizes, old.storage.pieces)
        if family is None:
            return super().source(old, new, suffix)
        if family not in self.inside:
            self.owned(family, new)
        return None

    def owned(self, family: Family, new: Graph) -> Tensor:
        """Return what stands for what each block has, declared where the first of them or a loop needs it."""
        if isinstance(family, Owned) and family not in self.families:
            old = family.members[0]
            self.families[family] = self.declare(old, new, (self.count, *old.sizes), old.storage.pieces + 1)
        return self.families[family]

    def declare(self, old: Tensor, new: Graph, sizes: Sequence[Poly], pieces: int) -> Tensor:
        """Add what the blocks have of their own."""
        made = Tensor(
            new, new.unique(self.match.labels.plain(old.name)), tuple(sizes), old.dtype,
            role=old.role, requires_grad=old.requires_grad, pieces=pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(made)
        self.origins[made] = old
        return made

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op of a body, with a name that has no number of a block."""
        return self.again(op, [self.tensors[t] for t in op.operands], new, self.match.labels.plain(op.name))

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op: of the blocks, a loop where the first of them begins."""
        if op.graph.parent is not None:
            super().emit(op, new, suffix)
            return
        if op in self.first:
            self.loop(self.first[op], new)
        if op not in self.match.places:
            self.outside(op, new)

    def outer(self, value: Outer) -> Tensor:
        """Return the tensor for what is read outside."""
        if isinstance(value, After):
            return self.ends[value]
        if isinstance(value, Member):
            return self.owned(value.family, self.new)
        if isinstance(value, Shared):
            found: Tensor = self.tensors[value.tensor]
            return found
        if value not in self.views:
            assert isinstance(value.of, Shared | View)
            self.views[value] = self.viewed(value, self.outer(value.of), self.new)
        return self.views[value]

    def viewed(self, value: View, of: Tensor, new: Graph, phase: str = "forward") -> Tensor:
        """Make a view again."""
        plan = self.match.plans[value.run]
        op = self.match.ops[plan.run.starts[-1] + value.at]
        made = self.again(op, [of], new, self.match.labels.plain(op.name))
        made.phase = phase
        return made.results[0]

    def outside(self, op: Op, new: Graph) -> None:
        """Copy an op from outside of the blocks."""
        self.again(op, [self.outer(v) for v in once(self.around.reads[op])], new, op.name)

    def again(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        kind = op.kind
        if isinstance(kind, Bodied):
            kind = replace(kind, body=self.body(kind.body, new, ""))
        made = self.add(op, kind, operands, new, name)
        made.scope = self.match.labels.plain(op.scope)
        made.call = op.call if len(operands) == len(op.operands) else None
        for t, copy in zip(op.results, made.results, strict=True):
            held = isinstance(kind, Keep) and not op.graph.out_degree(t)  # something of all turns, maybe
            if not held and self.laid_out(t) != self.laid_out(copy):
                raise GraphError(
                    f"fold: {copy!r} of {made.name!r} lies otherwise in memory than {t!r}, expected the same"
                )
        return made

    def laid_out(self, t: Tensor) -> tuple[object, ...]:
        """Return how a tensor lies in memory, as a copy has to."""
        return layout(t)

    # -- loops ---------------------------------------------------------------------------------------------------

    def name_of(self, plan: Plan) -> str:
        """Return a name for the loop of a run."""
        return self.match.labels.scope or "blocks"  # those of a module that is itself a list

    def loop(self, plan: Plan, new: Graph) -> None:
        """Add the loop for a run."""
        scope = self.name_of(plan)
        body = new.start_body(scope.rpartition("/")[2], fused=False)
        inner = _Inner(self, plan, body)
        inner.fill_body()
        operands = [self.start(plan, c, new) for c in inner.carries] + [self.owned(f, new) for f in inner.slices]
        kind = Repeat(
            body=body, count=self.count, carries=len(inner.carries), xs=len(inner.slices), saved=len(plan.saved),
            reverse=plan.run.step < 0,
        )  # fmt: skip
        name = scope if plan.run.phase == "forward" else f"{scope}.{plan.run.phase}"
        op = new.add_op(kind, (*operands, *body.captured), name, self.match.ops[plan.run.starts[0]].phase)
        body.owner = op
        results = iter(op.results)
        self.ends |= {After(plan.number, c): next(results) for c in inner.carries}
        self.families |= {Left(plan.number, v): next(results) for v in plan.saved}

    def start(self, plan: Plan, carry: Before, new: Graph) -> Tensor:
        """Return what a carry starts from: nothing where no turn reads that."""
        t = carry.starts[0]
        if t is not None:
            return self.outer(self.around.starts[plan.number, t])
        like = self.match.typical(plan, carry)
        nothing = Absent(sizes=like.sizes, dtype=like.dtype, pieces=like.storage.pieces)
        return new.add_op(nothing, [], "absent", self.match.ops[plan.run.starts[0]].phase).results[0]


class _Inner:
    """The body of one loop."""

    def __init__(self, folder: Folder, plan: Plan, body: Graph) -> None:
        self.folder, self.plan, self.body = folder, plan, body
        self.values: dict[Value, Tensor] = {}
        self.carries = list(plan.carries)
        self.slices = [f for f in plan.slices if not (isinstance(f, Owned) and folder.inside.get(f) is plan)]
        match = folder.match
        for i, value in enumerate(self.carries):
            self.values[value] = self.formal(match.typical(plan, value), f"carry{i}")
        for i, family in enumerate(self.slices):
            self.values[Member(family)] = self.formal(match.typical(plan, family), f"x{i}")
        for owned, home in folder.inside.items():
            if home is plan:
                t = owned.members[-1]
                self.values[Member(owned)] = folder.declare(t, body, t.sizes, 0)

    def formal(self, like: Tensor, name: str) -> Tensor:
        """Add an input of the body that lies in memory as a tensor of the blocks does."""
        made = self.body.formal(like, f"{self.body.name}.{name}", like.sizes, like.strides)
        made.offset, made.domain = like.offset, like.domain
        return made

    def fill_body(self) -> None:
        """Add the ops of one turn, and what the turns hand on and leave behind."""
        match, plan = self.folder.match, self.plan
        start = plan.run.starts[-1]
        for at, op in enumerate(match.ops[start : start + plan.run.length]):
            operands = [self.tensor(v) for v in plan.reads[at]]
            made = self.folder.again(op, operands, self.body, match.labels.plain(op.name))
            self.values |= {Made(at, i): t for i, t in enumerate(made.results)}
        handed = [self.tensor(c.nearer) for c in self.carries]
        self.body.outputs += [*handed, *map(self.tensor, plan.saved)]

    def tensor(self, value: Value) -> Tensor:
        """Return what stands for a value."""
        if value not in self.values:
            if isinstance(value, Shared):
                self.values[value] = self.body.adopt(self.folder.tensors[value.tensor])
            elif isinstance(value, View):
                of, phase = self.tensor(value.of), self.plan.run.phase
                self.values[value] = self.folder.viewed(value, of, self.body, phase)
            else:
                raise AssertionError(value)
        return self.values[value]


# -- fold --------------------------------------------------------------------------------------------------------------
# Equal blocks of a graph turned into a Repeat: what was written out block by block has a depth again.


def fold(graph: Graph, scope: str | None = None, count: str = "L", /, *, default: bool = False) -> Graph:
    """Turn the equal blocks of a stack into loops, so that their number is a symbol.

    Parameters
    ----------
    graph : Graph
        With one op for each call in each block, as a trace or `unroll` makes it; it stays as it is.
    scope : str, optional
        Path whose children `0`, `1`, ... are the blocks, such as `transformer/h`; of an unrolled graph, the name of the
        loop. By default every stack that the paths of ops show, as a trace gives them, and that has equal blocks; of
        stacks in each other the outer one, where its blocks are equal.
    count : str
        Name of the symbol for the number of blocks. Where several stacks are found, each has a symbol of this name
        and its path without what all paths begin with, such as `L_encoder_layer`.
    default : bool
        Whether the number of blocks that were there is the symbol's default size, as presets have them.

    Returns
    -------
    Graph
        With a Repeat for each pass over the blocks: forward, backward (in reverse, reading what the forward pass left
        behind, one storage a block) and the updates of an optimizer. Bound to the
        number of blocks that were there, equal to the given graph in every cost; bound to another one, to the graph of
        a model with so many blocks. Blocks at either end that are not like the others stay outside of the loops and
        count as well. Layers that take turns, as of two kinds, are a block together: the loop runs L/2 times.

    Raises
    ------
    GraphError
        If there are no such blocks, fewer than three neighbours are equal (the text names the first op that differs,
        and how), something outside reads what one block in the middle makes, or the symbol is in use.

    Notes
    -----
    Blocks are equal where their ops are, one by one in program order: kind, phase, facts, shapes, layouts, and
    what they read: something of the same block, of the one before, of the same block in an earlier pass, a parameter
    that each block has for itself, or one tensor that all of them share. Ops without a scope that stand between two
    blocks belong to the first of them.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     for i in range(4):
    ...         with cg.scope(f"h/{i}"):
    ...             x = x + cg.relu(x @ g.param("w", (D, D)))
    ...     g.output(x)
    >>> f = cg.fold(g)
    >>> cg.matmul_flops(f), cg.param_count(f)
    (2*B*D**2*L, D**2*L)
    >>> cg.peak_memory(f, L=4, B=2, D=3) == cg.peak_memory(g, B=2, D=3)
    True
    """
    need_graph("fold", graph)
    need_flag(f"fold of graph {graph.name!r}", default=default)
    if scope is None:
        return _fold_all(graph, count, default)
    if not isinstance(scope, str):
        raise GraphError(f"fold of graph {graph.name!r}: scope {shown(scope)}, expected a path such as 'transformer/h'")
    if not isinstance(count, str) or not is_name(count) or count in known_names(graph):
        raise GraphError(
            f"fold of graph {graph.name!r}: count {shown(count)}, expected the name of a symbol that is not in use"
        )
    labels, match = _matched(graph, scope)
    outside, rest = labels.count - len(match.blocks), labels.layers % labels.period
    around = labels.period * outside - (labels.period - rest if rest else 0)  # the last layers are less than a block
    new = Folder(match, Around(match), (poly(dims(count)) - around) / labels.period).run(graph)
    with new:
        if around:
            new.assume(f"{count} >= {around + labels.period}")
        if default:
            new.defaults = new.defaults | {count: labels.layers}
    return new


def _fold_all(graph: Graph, count: str, default: bool) -> Graph:
    """Fold every stack that has equal blocks; the error is that of the first one where none has."""
    found: list[str] = []
    refused: GraphError | None = None
    for scope in stacks_of(graph):
        if any(not outer or scope.startswith(f"{outer}/") for outer in found):
            continue
        try:
            fold(graph, scope, count)
        except GraphError as error:
            refused = refused or error
        else:
            found.append(scope)
    if not found:
        raise refused or GraphError(
            f"fold of graph {graph.name!r}: no scope has blocks 0, 1, ..., expected a graph with a stack of layers"
        )
    for scope, name in zip(found, _names(count, found), strict=True):
        graph = fold(graph, scope, name, default=default)
    return graph


def _names(count: str, scopes: Sequence[str]) -> list[str]:
    """Return a name for the depth of each stack: those of several have its path behind them, from where these part."""
    if len(scopes) == 1:
        return [count]
    paths = [scope.split("/") for scope in scopes]
    alike = next(i for i, levels in enumerate(zip(*paths, strict=False)) if len(set(levels)) > 1)
    return [re.sub(r"\W", "_", "_".join((count, *path[alike:]))) for path in paths]


def _matched(graph: Graph, scope: str) -> tuple[Labels, Match]:
    """Compare the blocks of a stack: single layers, or as few as take turns."""
    labels = Labels(graph, scope)
    if (period := labels.taking_turns()) > 1:
        labels = Labels(graph, scope, period)
    return labels, equal_blocks(graph, labels, find_runs(graph.ops, labels))


def equal_blocks(graph: Graph, labels: Numbered, runs: Sequence[Run], blocks: range | None = None) -> Match:
    """Compare some blocks, or all; those at the edges that are not like the others are left out."""
    blocks = range(labels.count) if blocks is None else blocks
    while True:
        try:
            return Match(graph, labels, runs, blocks)
        except Differs as error:
            blocks = without_an_edge(graph, blocks, error)


def without_an_edge(graph: Graph, blocks: range, error: Differs) -> range:
    """Return the larger part of blocks of which two neighbours differ; GraphError if it is small."""
    after = error.low + 1
    front = after - blocks.start <= blocks.stop - after
    blocks = range(after, blocks.stop) if front else range(blocks.start, after)
    if len(blocks) < FEWEST:
        raise GraphError(
            f"fold of graph {graph.name!r}: {error}, expected {FEWEST} equal blocks in a row at least, apart "
            f"from those at the edges"
        ) from None
    return blocks


# -- turns -------------------------------------------------------------------------------------------------------------
# Turns of loops that a program has run, put into loops again whose count is a size.


def fold_turns(graph: Graph, turns: Turns) -> Graph:
    """Put the turns of all loops into a Repeat each, inner ones first.

    GraphError if turns are not alike, or one reads or writes what is no part of its own of something outside.
    """
    turns = with_lists(graph, turns)
    while True:
        depth = max(map(len, turns.paths.values()), default=0)
        if not depth:
            return graph
        inner = {path[-1][0] for path in turns.paths.values() if len(path) == depth}
        counts = {turns.counts[number] for number in inner}
        for count in sorted(counts, key=str):
            group = {number for number in inner if turns.counts[number] == count}
            graph, turns = _folded(graph, turns, group, depth)


def _folded(graph: Graph, turns: Turns, group: set[int], depth: int) -> tuple[Graph, Turns]:
    """Fold loops of one count that are equally deep in others."""
    played = turns.played[min(group)]
    if played < FEWEST:
        raise GraphError(
            f"has too few turns at the sizes that were given ({played}), expected {FEWEST} at least: give larger ones"
        )
    cuts = Cuts(graph, turns, group, depth)
    apart = Apart(cuts)
    plain = apart.run(graph)
    labels = _Labels(apart, cuts)
    runs, blocks = labels.runs(plain), range(labels.count)
    standing = {
        op for op in plain.ops if isinstance(op.kind, Keep) and op.operands[0].name in (apart.after | turns.joins)
    }
    while True:
        match = equal_blocks(plain, labels, runs, blocks)
        try:
            around = Around(match, standing)
            break
        except Differs as error:  # a list has nothing of the first turns, or of the last ones: these stand outside
            blocks = without_an_edge(plain, match.blocks, error)
    folder = _Folder(match, around, cuts, apart)
    made = folder.run(plain)

    def left(path: Path) -> Path:
        """Return the turns that an op is still of."""
        return path[:-1] if len(path) == depth and path[-1][0] in group else path

    paths = {new: path for new, old in folder.made_of.items() if (path := left(apart.paths.get(old, ())))}
    return made, replace(turns, paths=paths)


class _Labels:
    """Which turn an op and a slice belong to, as `Match` asks for it."""

    scope = ""

    def __init__(self, apart: Apart, cuts: Cuts) -> None:
        self.cuts, self.apart = cuts, apart
        self.ops = apart.labels
        self.count = cuts.played
        self.sources: dict[Tensor, int] = {}

    def runs(self, graph: Graph) -> list[Run]:
        """Return the loops, as passes over the turns."""
        cut_of = {t: self.apart.cut_of[t.name] for t in graph.tensors if t.name in self.apart.cut_of}
        self.sources = {t: self.cuts.at(cut.loop, turn) for t, (cut, turn) in cut_of.items()}
        passes: dict[tuple[int, str], Run] = {}
        for i, op in enumerate(graph.ops):
            if op in self.ops:
                number = self.apart.paths[op][-1][0]
                run = passes.setdefault((number, op.phase), Run(op.phase))
                if not run.blocks or run.blocks[-1] != self.ops[op]:
                    run.blocks.append(self.ops[op])
                    run.starts.append(i)
        return list(passes.values())

    @staticmethod
    def relative(name: str, block: int) -> str:
        """Return a scope as it is seen from a turn."""
        return name

    @staticmethod
    def plain(name: str) -> str:
        """Return a name without the number of a turn."""
        return unnumbered(name)


class _Folder(Beginning, Folder):
    """Copies a graph with loops in place of turns, which are given views of what their slices were cut from."""

    def __init__(self, match: Match, around: Around, cuts: Cuts, apart: Apart) -> None:
        super().__init__(match, around, cuts.count - (cuts.played - len(match.blocks)))
        self.cuts, self.apart = cuts, apart
        self.made_of: dict[Op, Op] = {}
        """which op of the old graph each one stands for"""
        self.left = {base: list(parts) for base, parts in apart.parts.items()}
        """what is written into a tensor from here on, in the order of turns"""
        self.wholes: dict[Tensor, Tensor] = {}
        """what it is after what was written"""

    def _inside(self) -> dict[Owned, Plan]:
        return {}

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; what stands for slices is made where a loop reads them."""
        own = old.name in self.apart.cut_of or old.name in self.apart.after
        return None if own or self._joins(old) else super().source(old, new, suffix)

    def _joins(self, t: Tensor) -> bool:
        """Whether it stands for a join of what these loops have made."""
        join = self.cuts.turns.joins.get(t.name)
        return join is not None and join.loop in self.cuts.group

    def owned(self, family: Family, new: Graph) -> Tensor:
        """Return the view of something outside whose first axis is that of the turns."""
        if isinstance(family, Owned) and family not in self.families:
            cut, _ = self.apart.cut_of[family.members[0].name]
            self.families[family] = self._in_turns(cut)
        return self.families[family]

    def _in_turns(self, cut: Cut) -> Tensor:
        x, axis, count = self._now(cut.base), cut.axis, self.count
        start, step = self._span(cut)
        if step != cut.size:  # one position each, and others between them
            assert isinstance(step.constant, int)
            x = slice_axis(x, axis, start, count, step.constant)
        elif start or step * count != x.sizes[axis]:
            x = slice_axis(x, axis, start, count * step)
        x = reshape(x, (*x.sizes[:axis], count, cut.size, *x.sizes[axis + 1 :]))
        return permute(x, (axis, *(i for i in range(x.ndim) if i != axis)))

    def _span(self, cut: Cut) -> tuple[Poly, Poly]:
        """Return where the first position is that turns of the loop have, and by how much they go on."""
        # of one that goes back, the last turn's comes first
        last = cut.start + cut.step * (self.cuts.count - 1 - self.match.blocks.start)
        if cut.loop in self.cuts.back:
            return last, -cut.step
        return cut.start + cut.step * self.match.blocks.start, cut.step

    def outer(self, value: Any) -> Tensor:
        """Return the tensor for what is read outside: a slice that a turn outside of the loop has."""
        if isinstance(value, Shared) and value.tensor.name in self.apart.cut_of:
            t = value.tensor
            if self.tensors[t] is None:
                cut, turn = self.apart.cut_of[t.name]
                self.tensors[t] = slice_axis(self._now(cut.base), cut.axis, self.cuts.start(cut, turn), cut.size)
            found: Tensor = self.tensors[t]
            return found
        return super().outer(value)

    def outside(self, op: Op, new: Graph) -> None:
        """Copy an op from outside, or join what turns have made and name what they have written."""
        name = op.operands[0].name if isinstance(op.kind, Keep) else ""
        if name in self.apart.after:
            self.tensors[op.results[0]] = self._now(self.apart.after[name])
        elif name and self._joins(op.operands[0]):
            operands = [self.outer(v) for v in once(self.around.reads[op])[1:]]
            join = self.cuts.turns.joins[name]
            kind = replace(join.kind, reverse=join.back != (join.loop in self.cuts.back))
            made = self.add(op, kind, operands, new, op.name).results[0]
            if self.laid_out(made) != self.laid_out(op.results[0]):
                raise GraphError(f"{made!r} joins what turns have made, expected {op.results[0]!r}")
        else:
            super().outside(op, new)

    def _now(self, base: Tensor) -> Tensor:
        """Return a tensor after the parts of it that are written so far."""
        whole: Tensor = self.wholes.get(base) or self.tensors[self.apart.tensors[base]]
        left = self.left.get(base, [])
        while left:
            cut, turn, t = left[0]
            family = self.around.family(t) if t.producer in self.match.places else None
            made = self.tensors.get(t) if family is None else self.families.get(family)
            if made is None:
                break
            start, step = (self.cuts.start(cut, turn), cut.size) if family is None else self._span(cut)
            part = made if family is None else self._merged(made, cut.axis)
            by = 1 if step == cut.size else int(step.constant or 1)
            kind = Revised(axes=(cut.axis,), starts=(start,), steps=(by,), unseen=cut.unseen)
            whole = self.new.add_op(kind, [whole, part], "revised", "forward").results[0]
            del left[: 1 if family is None else len(self.match.blocks)]
        self.wholes[base] = whole
        return whole

    @staticmethod
    def _merged(part: Tensor, axis: int) -> Tensor:
        """Return what all turns have as positions of the axis that they were cut from."""
        part = permute(part, (*range(1, axis + 1), 0, *range(axis + 1, part.ndim)))
        sizes = (*part.sizes[:axis], part.sizes[axis] * part.sizes[axis + 1], *part.sizes[axis + 2 :])
        return reshape(part, sizes)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op, which is of the turns around it that the op is of."""
        before = len(new)
        super().emit(op, new, suffix)
        if op.graph.parent is None:
            self.made_of |= dict.fromkeys(added_since(new, before), op)

    def again(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        self.begin(op, operands)
        return super().again(op, operands, new, name)

    def laid_out(self, t: Tensor) -> tuple[object, ...]:
        """Return how a tensor lies in memory, wherever it begins."""
        return layout(t)[:3]

    def name_of(self, plan: Plan) -> str:
        """Return a name for a loop: the path that its ops have in common."""
        start = plan.run.starts[-1]
        paths = [op.scope.split("/") for op in self.match.ops[start : start + plan.run.length]]
        return "/".join((*(level for level in _common(paths) if level), "scan"))


def _common(paths: Sequence[Sequence[str]]) -> Iterator[str]:
    for levels in zip(*paths, strict=False):
        if len(set(levels)) > 1:
            return
        yield levels[0]
