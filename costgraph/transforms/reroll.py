"""Rerolling: turn equal consecutive blocks of a graph, or executed loop iterations, into loops with symbolic counts.

`fold` compares a stack's blocks op by op, describes each operand relative to its block, and builds one loop per
pass over the stack. `fold_turns` does the same for iterations that a traced program executed.
"""

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
    BodyKind,
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
from ..ops.fill import SliceUpdate
from ..ops.layout import Concat, KeepAlive, Slice, permute, reshape, slice_axis
from ..ops.loops import Repeat, Undef
from .rewrite import Rewriter

__all__ = [
    "BlocksDiffer",
    "difference",
    "layout",
    "unlike",
    "FinalCarry",
    "EarlierIteration",
    "Family",
    "EarlierRunSlices",
    "SameIteration",
    "Member",
    "PerBlock",
    "LoopInvariant",
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
    "StridedSlice",
    "StridedSlices",
    "Join",
    "Path",
    "LoopTrace",
    "OutsideReads",
    "Outer",
    "unique_families",
    "label_list_loops",
    "SliceSeparator",
    "KernelPrologues",
    "Folder",
    "equal_blocks",
    "fold",
    "larger_side",
    "fold_turns",
]


# -- op equality -------------------------------------------------------------------------------------------------------

Names = Callable[[str], str]


class BlocksDiffer(CostGraphError):  # noqa: N818  # no error that anyone sees
    """Two neighbouring blocks differ; caught where blocks at the edges are excluded."""

    def __init__(self, blocks: tuple[int, int], text: str) -> None:
        super().__init__(text)
        self.low = min(blocks)


def layout(t: Tensor) -> tuple[object, ...]:
    """Return the key that tensors of equal read cost share."""
    return t.sizes, t.dtype, t.strides, t.offset, t.domain


def _aliased_operands(op: Op) -> list[int | None]:
    """Return, for each result, the index of the operand that shares its storage, or None."""
    stored = [t.storage for t in op.operands]
    return [stored.index(t.storage) if t.storage in stored else None for t in op.results]


def difference(a: Op, b: Op, names: tuple[Names, Names]) -> str | None:
    """Describe how two ops at the same position of two blocks differ, ignoring their operands; None if equal.

    `names` map a scope to its form relative to each block.
    """
    facts: dict[str, tuple[Any, Any]] = {
        "kind": (a.kind.name, b.kind.name),
        "phase": (a.phase, b.phase),
        "scope": (names[0](a.scope), names[1](b.scope)),
        "operands": (len(a.operands), len(b.operands)),
    }
    if a.call is not None and b.call is not None:
        facts["target"] = a.call.target, b.call.target
    for name, (value_a, value_b) in facts.items():
        if value_a != value_b:
            return f"{b.name!r} has {name} {value_b!r}, {a.name!r} has {value_a!r}"
    if [*map(_stored, a.results)] != [*map(_stored, b.results)] or _aliased_operands(a) != _aliased_operands(b):
        return f"{b.name!r} returns {_tensor_list(b.results)}, {a.name!r} returns {_tensor_list(a.results)}"
    facts_b = b.kind.facts()
    for name, value_a in a.kind.facts().items():
        value_b = facts_b[name]
        if name != "body" and value_a != value_b:
            return f"{b.name!r} has {name} {shown(value_b, 120)}, {a.name!r} has {shown(value_a, 120)}"
    if a.call != b.call:
        return f"{b.name!r} has call {shown(b.call, 120)}, {a.name!r} has {shown(a.call, 120)}"
    if a.body is not None and b.body is not None:
        return _body_difference(a.body, b.body, names)
    return None


def _stored(t: Tensor) -> tuple[object, ...]:
    return *layout(t), t.storage.bytes, t.storage.pieces


def _tensor_list(tensors: Sequence[Tensor]) -> str:
    return ", ".join(map(repr, tensors[:3])) or "nothing"


def _body_difference(a: Graph, b: Graph, names: tuple[Names, Names]) -> str | None:
    """Describe how two bodies differ: ops are compared in order."""
    if len(a.ops) != len(b.ops) or a.fused != b.fused:
        return f"body {b.name!r} has {len(b.ops)} ops, {a.name!r} has {len(a.ops)}"
    numbers_a, numbers_b = _tensor_numbers(a), _tensor_numbers(b)
    if [layout(t) for t in numbers_a] != [layout(t) for t in numbers_b]:
        return f"body {b.name!r} has other tensors than {a.name!r}"
    for x, y in zip(a.ops, b.ops, strict=True):
        text = difference(x, y, names)
        if text is None and [numbers_a[t] for t in x.operands] != [numbers_b[t] for t in y.operands]:
            text = f"{y.name!r} reads other tensors than {x.name!r}"
        if text is not None:
            return text
    same = [numbers_a[t] for t in a.outputs] == [numbers_b[t] for t in b.outputs]
    return None if same else f"body {b.name!r} has other outputs than {a.name!r}"


def unlike(a: Graph, b: Graph) -> str | None:
    """Describe how two graphs differ, ignoring tensor names; None if equal."""
    roles = [[(t.role, *layout(t)) for t in g.tensors if t.producer is None] for g in (a, b)]
    if roles[0] != roles[1]:
        return "other parameters, inputs or buffers"
    return _body_difference(a, b, (str, str))


def _tensor_numbers(graph: Graph) -> dict[Tensor, int]:
    """Number a body's tensors: formals first, then op results, then its own sources."""
    sources = [t for t in graph.tensors if t.producer is None and t.role != "formal"]
    return {t: i for i, t in enumerate([*graph.formals, *(r for op in graph.ops for r in op.results), *sources])}


# -- block-relative values ---------------------------------------------------------------------------------------------
# Describe an op's operands relative to its block, so that equal blocks have equal descriptions.


@dataclass(frozen=True)
class SameIteration:
    """An op's result in the same iteration."""

    position: int
    """position of the op in the iteration"""
    result: int
    """index of the result"""


@dataclass(frozen=True)
class LoopInvariant:
    """A tensor from outside, the same in all iterations."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class PerBlock:
    """Parameters, buffers or states, one per block."""

    members: tuple[Tensor, ...]
    """in block order"""


@dataclass(frozen=True)
class EarlierRunSlices:
    """Stacked residuals from an earlier run, one storage per iteration."""

    run: int
    value: SameIteration | EarlierIteration


Family = PerBlock | EarlierRunSlices


@dataclass(frozen=True)
class Member:
    """The family member of the iteration's block; outside runs, the whole family."""

    family: Family


@dataclass(frozen=True)
class EarlierIteration:
    """A value from `len(starts)` iterations earlier, which is carried."""

    of: SameIteration | Member
    starts: tuple[Tensor | None, ...]
    """initial values, read in the first iterations; None if not read"""

    @property
    def nearer(self) -> EarlierIteration | SameIteration | Member:
        """The value one iteration closer, which becomes this one in the next iteration."""
        return EarlierIteration(self.of, self.starts[1:]) if len(self.starts) > 1 else self.of


@dataclass(frozen=True)
class View:
    """A view that an earlier run made of a value, for the same block."""

    of: Value
    run: int
    position: int
    result: int


@dataclass(frozen=True)
class FinalCarry:
    """Outside runs: a carry's final value."""

    run: int
    value: EarlierIteration


Value = SameIteration | LoopInvariant | Member | EarlierIteration | View


# -- runs --------------------------------------------------------------------------------------------------------------
# Assign ops and sources to blocks, and find a program's passes over the blocks.

#: Fewest equal blocks to reroll: two could be equal by chance.
FEWEST = 3
#: Most layers per period: published models alternate at most 8.
_LONGEST = 16


def unnumbered(name: str) -> str:
    """Strip a trailing iteration number from a name."""
    return re.sub(r"\.i\d+(?=_\d+$|$)", "", name)


class Numbered(Protocol):
    """Assignment of ops and sources to blocks."""

    scope: str
    ops: dict[Op, int]
    sources: dict[Tensor, int]
    count: int

    def relative(self, name: str, block: int) -> str:
        """Return a name or scope relative to a block: equal for equal blocks."""

    def plain(self, name: str) -> str:
        """Strip the block number from a name or scope."""


class Labels:
    """The blocks of a stack, with `period` layers each.

    `scope` is the path whose children `0`, `1`, ... are the layers, or the loop name in an unrolled graph. Raises
    GraphError if there are no such blocks, or too few.
    """

    def __init__(self, graph: Graph, scope: str, period: int = 1) -> None:
        self.period = period
        path = f"{re.escape(scope)}/" if scope else ""
        self.scope = scope
        self._prefix = f"{scope}/" if scope else ""
        self._scoped = re.compile(rf"^{path}(\d+)(?=/|$)")
        # the names of optimizer sources are the path of their parameter after an 'optimizer' level
        self._named = re.compile(rf"(?<![^/]){path}(\d+)(?=/|$)" if scope else r"(?:^|(?<=^optimizer/))(\d+)(?=/|$)")
        self._played = re.compile(rf"^{path}.*\.i(\d+)(?=_\d+$|$)")
        self.unrolled = not any(self._scoped.match(op.scope) for op in graph.ops)
        self.sources = {
            t: number for t in graph.tensors if t.producer is None and (number := self._number(t.name)) is not None
        }
        """block of each source"""
        self.ops = self._labelled(graph)
        """block of each op"""
        numbers = {*self.ops.values()}
        self.layers = 1 + max(numbers, default=-1)
        if not numbers or numbers != set(range(self.layers)):
            raise GraphError(
                f"fold of graph {graph.name!r}: no blocks 0, 1, ... in scope {shorten(scope)}, "
                f"expected {_stack_choices(graph)}"
            )
        if self.layers < FEWEST:
            raise GraphError(
                f"fold of graph {graph.name!r}: {self.layers} blocks in scope {scope!r}, expected at least "
                f"{FEWEST} equal blocks"
            )
        self.ops = {op: layer // period for op, layer in self.ops.items()}
        self.sources = {t: layer // period for t, layer in self.sources.items()}
        self.count = -(-self.layers // period)

    def _number(self, name: str) -> int | None:
        match = (self._played if self.unrolled else self._named).search(name)
        return None if match is None else int(match.group(1))

    def _labelled(self, graph: Graph) -> dict[Op, int]:
        """Assign each op to the block of its scope, or to the only block whose sources it reads.

        Sources are parameters and states, and for an update also gradients.
        """
        stored = {t.storage: block for t, block in self.sources.items()}
        grads = {g.storage: b for t, b in self.sources.items() if (g := graph.gradients.get(t)) is not None}
        out: dict[Op, int] = {}
        for op in graph.ops:
            match = self._played.match(op.name) if self.unrolled else self._scoped.match(op.scope)
            block_of = {**grads, **stored} if op.phase == "optimizer" else stored
            read = {block_of[t.storage] for t in op.operands if t.storage in block_of}
            if match is not None:
                out[op] = int(match.group(1))
            elif len(read) == 1 and not isinstance(op.kind, KeepAlive):  # a `KeepAlive` follows when memory is freed
                (out[op],) = read
                if op.phase == "optimizer":  # an update's later ops read its results
                    stored |= {t.storage: out[op] for t in op.results}
        return out

    def alternation_period(self) -> int:
        """Return the period of alternating layers: the shortest one with the longest periodic stretch."""
        signatures: list[list[object]] = [[] for _ in range(self.layers)]
        for op, layer in {} if self.unrolled else self.ops.items():
            sizes = tuple(t.sizes for t in op.results)
            signatures[layer].append((op.kind.name, op.phase, self.relative(op.scope, layer), sizes))
        periods = range(1, min(_LONGEST, self.layers // FEWEST) + 1)
        stretches = {
            p: p + max(_stretches([a == b for a, b in zip(signatures, signatures[p:], strict=False)])) for p in periods
        }
        return max(periods, key=lambda p: (stretches[p] // p >= FEWEST, stretches[p], -p))

    def relative(self, name: str, block: int) -> str:
        """Return a name or scope with layer numbers relative to a block: equal for equal blocks."""
        if self.unrolled:
            return name
        return self._named.sub(lambda m: f"{self._prefix}{int(m.group(1)) - block * self.period:+d}", name)

    def plain(self, name: str) -> str:
        """Strip the block number from a name or scope."""
        if self.unrolled:
            return unnumbered(name)
        if self.period > 1:  # keep a layer's position within its block
            return self._named.sub(lambda m: f"{self._prefix}{int(m.group(1)) % self.period}", name)
        return self._named.sub(self.scope, name).replace("//", "/").strip("/")


def stacks_of(graph: Graph) -> list[str]:
    """Return the scopes with children 0, 1 and 2, in program order, outer before inner."""
    children: dict[str, set[str]] = {}
    for op in graph.ops:
        levels = op.scope.split("/")
        for i, level in enumerate(levels):
            if level.isdigit():
                children.setdefault("/".join(levels[:i]), set()).add(level)
    return [scope for scope, numbers in children.items() if {"0", "1", "2"} <= numbers]


def _stretches(equal: Sequence[bool]) -> Iterator[int]:
    """Yield the lengths of consecutive True values."""
    yield 0
    yield from (len(list(group)) for holds, group in groupby(equal) if holds)


def _stack_choices(graph: Graph) -> str:
    stacks = stacks_of(graph)
    return f"one of {', '.join(map(repr, stacks))}" if stacks else "a graph with a stack of layers"


@dataclass(eq=False)
class Run:
    """A pass over the blocks, forward or backward."""

    phase: str
    """phase of the first op"""
    blocks: list[int] = field(default_factory=list)
    """blocks in execution order"""
    starts: list[int] = field(default_factory=list)
    """program index of each block's first op"""
    length: int = 0
    """number of ops per iteration, including those between blocks"""

    @property
    def step(self) -> int:
        """1 if blocks run in ascending order, -1 if in descending order."""
        return 1 if self.blocks[0] < self.blocks[-1] else -1

    def can_follow(self, block: int) -> bool:
        """Whether a block can follow."""
        step = block - self.blocks[-1]
        return block not in self.blocks and (step == self.step if len(self.blocks) > 1 else abs(step) == 1)

    def within(self, blocks: range) -> Run:
        """Restrict the run to some blocks."""
        pairs = [(b, s) for b, s in zip(self.blocks, self.starts, strict=True) if b in blocks]
        out = Run(self.phase, [b for b, _ in pairs], [s for _, s in pairs])
        out.length = min((b - a for a, b in zip(out.starts, out.starts[1:], strict=False)), default=0)
        return out


def find_runs(ops: Sequence[Op], labels: Labels) -> list[Run]:
    """Return the passes over the blocks, in program order."""
    labelled = [(i, op, labels.ops[op]) for i, op in enumerate(ops) if op in labels.ops]
    runs: list[Run] = []
    for phase, group in groupby(labelled, lambda row: _PASS.get(row[1].phase, row[1].phase)):
        runs += _passes(phase, [(i, label) for i, _, label in group], labels.count)
    return [run for run in runs if len(run.blocks) >= FEWEST]


_PASS: Mapping[str, str] = {"recompute": "backward"}


def _passes(phase: str, labelled: Sequence[tuple[int, int]], count: int) -> Iterator[Run]:
    run = Run(phase)
    for i, label in labelled:
        if run.blocks and (label == run.blocks[-1] or (label in run.blocks and len(run.blocks) < count)):
            continue
        if run.blocks and not run.can_follow(label):
            yield run
            run = Run(phase)
        run.blocks.append(label)
        run.starts.append(i)
    yield run


# -- matching ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Plan:
    """A run and the loop it becomes."""

    run: Run
    number: int
    reads: list[tuple[Value, ...]] = field(default_factory=list)
    """operands at each position in an iteration"""
    carries: dict[EarlierIteration, None] = field(default_factory=dict)
    slices: dict[Family, None] = field(default_factory=dict)
    saved: dict[SameIteration | EarlierIteration, None] = field(default_factory=dict)

    def carry(self, value: EarlierIteration) -> EarlierIteration:
        """Carry a value between iterations."""
        while isinstance(value.nearer, EarlierIteration):
            self.carries[value] = None
            value = value.nearer
        self.carries[value] = None
        if isinstance(value.of, Member):
            self.slices[value.of.family] = None
        return value

    def carried_value(self, of: SameIteration | Member, distance: int) -> EarlierIteration:
        """Return a value from some iterations earlier that no iteration reads, for an op after the loop."""
        longest = max((c for c in self.carries if c.of == of), key=lambda c: len(c.starts), default=None)
        starts = () if longest is None else longest.starts[-distance:]
        out = EarlierIteration(of, (None,) * (distance - len(starts)) + starts)
        self.carry(out)
        return out


class Match:
    """Compares a range of blocks.

    Raises BlocksDiffer if two neighbours are not equal, and GraphError if equal blocks read values that a loop cannot
    express.
    """

    def __init__(self, graph: Graph, labels: Numbered, runs: Sequence[Run], blocks: range) -> None:
        self.graph, self.labels, self.blocks = graph, labels, blocks
        self.ops = graph.ops
        self.owners: dict[Tensor, PerBlock] = {}
        self.plans: list[Plan] = []
        self.places: dict[Op, tuple[Plan, int, int]] = {}
        for run in runs:
            if set(run.blocks) & set(blocks):
                self._place(run)
        if not self.plans:
            raise GraphError(
                f"fold of graph {graph.name!r}: no pass executes the blocks in order, expected a stack of layers"
            )
        self._match_sources()
        for plan in self.plans:
            self._equal(plan)
        self._leftover()
        for plan in self.plans:
            self._read(plan)
        self._consistent()

    # -- positions -----------------------------------------------------------------------------------------------

    def _place(self, run: Run) -> None:
        missing = [b for b in self.blocks if b not in run.blocks]
        if missing:
            low = min(missing[0], self.blocks[-1] - 1)
            raise BlocksDiffer((low, low + 1), f"block {missing[0]} has no {run.phase} pass, unlike the others")
        plan = Plan(run.within(self.blocks), len(self.plans))
        self.plans.append(plan)
        for iteration, start in enumerate(plan.run.starts):
            for position, op in enumerate(self.ops[start : start + plan.run.length]):
                self.places[op] = plan, iteration, position

    def _match_sources(self) -> None:
        """Find each block's sources, by names that differ only in the block number."""
        named: dict[str, dict[int, Tensor]] = {}
        for t, block in self.labels.sources.items():
            if block in self.blocks:
                named.setdefault(self.labels.plain(t.name), {})[block] = t
        for by_block in named.values():
            for a, b in zip(self.blocks, self.blocks[1:], strict=False):
                source_a, source_b = by_block.get(a), by_block.get(b)
                if source_a is None and source_b is None:  # only a later block has it
                    continue
                if source_a is None or source_b is None:
                    has, lacks = (b, a) if source_a is None else (a, b)
                    text = (
                        f"blocks {a} and {b} differ: block {has} has {by_block[has].name!r}, but block {lacks} has "
                        f"no counterpart"
                    )
                    raise BlocksDiffer((a, b), text)
                if _facts(source_a) != _facts(source_b):
                    text = (
                        f"blocks {a} and {b} differ: {source_b.name!r} is {source_b!r}, "
                        f"{source_a.name!r} is {source_a!r}"
                    )
                    raise BlocksDiffer((a, b), text)
            self.add_family(tuple(by_block[b] for b in self.blocks))

    def add_family(self, members: tuple[Tensor, ...]) -> PerBlock:
        """Register a family of sources, one per block."""
        family = PerBlock(members)
        self.owners |= dict.fromkeys(members, family)
        return family

    def _equal(self, plan: Plan) -> None:
        """Compare ops in neighbouring iterations, apart from their operands."""
        run = plan.run
        for iteration in range(len(run.blocks) - 1):
            pair = run.blocks[iteration], run.blocks[iteration + 1]
            starts = run.starts[iteration], run.starts[iteration + 1]
            ends = starts[1], run.starts[iteration + 2] if iteration + 2 < len(run.starts) else starts[1] + run.length
            names = [lambda name, b=b: self.labels.relative(name, b) for b in pair]
            ops_a, ops_b = (self.ops[s:e] for s, e in zip(starts, ends, strict=True))
            for a, b in zip(ops_a, ops_b, strict=False):
                text = difference(a, b, (names[0], names[1]))
                if text is not None:
                    raise BlocksDiffer(pair, f"blocks {pair[0]} and {pair[1]} differ: {text}")
            if len(ops_a) != len(ops_b):
                counts_text = f"{len(ops_a)} and {len(ops_b)} ops in their {run.phase} pass"
                raise BlocksDiffer(pair, f"blocks {pair[0]} and {pair[1]} differ: {counts_text}")

    def _leftover(self) -> None:
        """Check that all ops in the blocks belong to runs."""
        for op, block in self.labels.ops.items():
            if block in self.blocks and op not in self.places:
                low = min(block, self.blocks[-2])
                raise BlocksDiffer(
                    (low, low + 1), f"{op.name!r} of block {block} is separate from the other ops of the block"
                )

    def _consistent(self) -> None:
        """Check that no block-specific source is read by all blocks."""
        for plan in self.plans:
            for position, values in enumerate(plan.reads):
                outside = [t for v in values if (t := _outside_tensor(v)) in self.owners]
                if outside:
                    raise GraphError(
                        f"fold of graph {self.graph.name!r}: {self.ops[plan.run.starts[-1] + position].name!r} reads "
                        f"{outside[0]!r} in every block, but it belongs to a single block"
                    )

    # -- operands ------------------------------------------------------------------------------------------------

    def _read(self, plan: Plan) -> None:
        run = plan.run
        for position in range(run.length):
            ops = [self.ops[start + position] for start in run.starts]
            values = tuple(self.value(plan, ops, [op.operands[i] for op in ops]) for i in range(len(ops[0].operands)))
            plan.reads.append(values)

    def value(self, plan: Plan, ops: Sequence[Op], tensors: Sequence[Tensor]) -> Value:
        """Return the value at one operand position of a run."""
        refs = [self.ref(plan, iteration, t) for iteration, t in enumerate(tensors)]
        if all(ref == refs[0] for ref in refs) and isinstance(refs[0], _RunResult) and not refs[0].distance:
            return SameIteration(refs[0].position, refs[0].result)
        tensors = [as_stored(t) for t in tensors]
        outside_values = {self.from_outside(t) for t in tensors}
        if len(outside_values) == 1 and None not in outside_values:
            (value,) = outside_values
            assert value is not None
            return value
        refs = [self.ref(plan, iteration, t) for iteration, t in enumerate(tensors)]
        reads = _OperandReads(self, plan, ops, tensors, refs)
        for typical in (refs[-1], refs[len(refs) // 2]):  # the edges may read other values
            if isinstance(typical, _RunResult):
                return reads.from_run(typical)
            if isinstance(typical, _Member):
                return reads.from_family(typical)
        return reads.from_outside()

    def ref(self, plan: Plan, iteration: int, t: Tensor) -> _RunResult | _Member | Tensor:
        """Describe a tensor relative to an iteration."""
        block = plan.run.blocks[iteration]
        if t in self.owners:
            family = self.owners[t]
            return _Member(family, self.blocks[family.members.index(t)] - block)
        if t.producer is None or t.producer not in self.places:
            return t
        other, producer_iteration, position = self.places[t.producer]
        result = t.producer.results.index(t)
        if other is plan:
            return _RunResult(iteration - producer_iteration, position, result)
        return _Member(
            EarlierRunSlices(other.number, SameIteration(position, result)),
            other.run.blocks[producer_iteration] - block,
        )

    def from_outside(self, t: Tensor) -> LoopInvariant | View | None:
        """Return the value of a tensor from outside the blocks, or a view of one, whichever block made the view."""
        if t in self.owners:
            return None
        if t.producer is None or t.producer not in self.places:
            return LoopInvariant(t)
        of = self.from_outside(t.producer.operands[0]) if is_free_view(t.producer) else None
        plan, _, position = self.places[t.producer]
        return None if of is None else View(of, plan.number, position, 0)

    def tensor_at(self, plan: Plan, value: SameIteration, iteration: int = -1) -> Tensor:
        """Return a value's tensor in an iteration."""
        return self.ops[plan.run.starts[iteration] + value.position].results[value.result]

    def typical(self, plan: Plan, value: Value | Family) -> Tensor:
        """Return a tensor with the layout of a value."""
        if isinstance(value, SameIteration):
            return self.tensor_at(plan, value)
        if isinstance(value, EarlierIteration | View):
            return self.typical(plan, value.of) if isinstance(value, EarlierIteration) else self._viewed(value)
        if isinstance(value, LoopInvariant):
            return value.tensor
        family = value.family if isinstance(value, Member) else value
        return (
            self.typical(self.plans[family.run], family.value)
            if isinstance(family, EarlierRunSlices)
            else family.members[0]
        )

    def _viewed(self, value: View) -> Tensor:
        return self.tensor_at(self.plans[value.run], SameIteration(value.position, value.result))


@dataclass(frozen=True)
class _RunResult:
    """A result from the same run, some iterations earlier."""

    distance: int
    position: int
    result: int


@dataclass(frozen=True)
class _Member:
    """A family member, and its block's offset from the current one."""

    family: Family
    shift: int


@dataclass
class _OperandReads:
    """One operand at one position, in all iterations."""

    match: Match
    plan: Plan
    ops: Sequence[Op]
    tensors: Sequence[Tensor]
    refs: Sequence[_RunResult | _Member | Tensor]

    def differs(self, iteration: int) -> BlocksDiffer:
        """Return the error for an iteration that reads another value than the next one."""
        iteration = min(iteration, len(self.ops) - 2)
        pair = self.plan.run.blocks[iteration], self.plan.run.blocks[iteration + 1]
        a, b = (f"{self.ops[i].name!r} reads {self.tensors[i].name!r}" for i in (iteration, iteration + 1))
        return BlocksDiffer(pair, f"blocks {pair[0]} and {pair[1]} differ: {b}, {a}")

    def from_run(self, typical: _RunResult) -> Value:
        for iteration, ref in enumerate(self.refs):
            regular = ref == typical if iteration >= typical.distance else not isinstance(ref, _RunResult)
            if not regular or layout(self.tensors[iteration]) != layout(self.tensors[-1]):
                raise self.differs(iteration)
        of = SameIteration(typical.position, typical.result)
        return self.carried(EarlierIteration(of, tuple(self.tensors[: typical.distance]))) if typical.distance else of

    def carried(self, value: EarlierIteration) -> EarlierIteration:
        self.plan.carry(value)
        return value

    def from_outside(self) -> Value:
        changes = [t is not self.tensors[i + 1] for i, t in enumerate(self.tensors[:-1])]
        if any(not isinstance(ref, Tensor) for ref in self.refs) or not all(changes):
            raise self.differs(changes.index(any(changes)))
        if len({*self.tensors}) < len(self.tensors) or any(t.producer is not None for t in self.tensors):
            raise self.differs(0)
        members = self.tensors[:: self.plan.run.step]
        for iteration, (a, b) in enumerate(zip(self.tensors, self.tensors[1:], strict=False)):
            if _facts(a) != _facts(b):
                raise self.differs(iteration)
        return self.slice(self.match.add_family(tuple(members)))

    def slice(self, family: Family) -> Member:
        self.plan.slices[family] = None
        if isinstance(family, EarlierRunSlices):
            self.match.plans[family.run].saved[family.value] = None
            if isinstance(family.value, EarlierIteration):
                self.match.plans[family.run].carry(family.value)
        return Member(family)

    def from_family(self, typical: _Member) -> Value:
        blocks, shift = self.match.blocks, typical.shift
        for iteration, ref in enumerate(self.refs):
            regular = ref == typical if self.plan.run.blocks[iteration] + shift in blocks else isinstance(ref, Tensor)
            if not regular or layout(self.tensors[iteration]) != layout(self.tensors[-1]):
                raise self.differs(iteration)
        if not shift:
            return self.view(typical.family) or self.slice(typical.family)
        if shift * self.plan.run.step < 0:
            starts = tuple(self.tensors[: abs(shift)])
            return self.carried(EarlierIteration(self.slice(typical.family), starts))
        family = typical.family
        run = self.match.plans[family.run].run if isinstance(family, EarlierRunSlices) else None
        if run is None or run.step == self.plan.run.step:
            raise self.differs(0)  # computed later in this run, and by no earlier one
        assert isinstance(family, EarlierRunSlices)
        assert isinstance(family.value, SameIteration)
        starts = tuple(self.tensors[::-1][: abs(shift)])
        return self.slice(EarlierRunSlices(family.run, EarlierIteration(family.value, starts)))

    def view(self, family: Family) -> View | None:
        """Return the value as a view to repeat rather than save, if it is one."""
        op = self.tensors[0].producer
        if (
            not isinstance(family, EarlierRunSlices)
            or not isinstance(family.value, SameIteration)
            or op is None
            or not is_free_view(op)
        ):
            return None
        makers = [t.producer for t in self.tensors]
        bases = [maker.operands[0] for maker in makers if maker is not None]
        of = self.match.value(self.plan, self.ops, bases)
        return View(of, family.run, family.value.position, family.value.result)


def is_free_view(op: Op) -> bool:
    """Whether an op is a free view of its only operand."""
    if len(op.operands) != 1 or len(op.results) != 1 or op.results[0].storage is not op.operands[0].storage:
        return False
    return op.body is None and not op.kind.overwrites() and not any((*op.kind.reads(op), *op.kind.writes(op)))


def _outside_tensor(value: Value) -> Tensor | None:
    """Return the tensor from outside that a value is or views."""
    while isinstance(value, View):
        value = value.of
    return value.tensor if isinstance(value, LoopInvariant) else None


def as_stored(t: Tensor) -> Tensor:
    """Return the earliest tensor with the same storage and layout, seen through views of views."""
    stored = t
    while t.is_view and t.producer is not None and not t.producer.kind.overwrites():
        t = next(o for o in t.producer.operands if o.storage is t.storage)
        if layout(t) == layout(stored):
            stored = t
    return stored


def _facts(t: Tensor) -> tuple[object, ...]:
    return (*layout(t), t.role, t.requires_grad, t.storage.bytes, t.storage.pieces)


# -- slices per iteration ----------------------------------------------------------------------------------------------
# Finds slices of outside tensors that advance from one executed iteration to the next, and writes into them.

#: Enclosing loops with their iterations, outermost first.
Path = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Join:
    """A concat of values from all iterations, by an op outside the loop."""

    loop: int
    kind: Concat
    back: bool = False
    """whether the last iteration comes first"""


@dataclass(eq=False)
class LoopTrace:
    """Loops that a program has executed."""

    counts: dict[int, Poly] = field(default_factory=dict)
    """symbolic iteration count by loop number"""
    played: dict[int, int] = field(default_factory=dict)
    """number of executed iterations"""
    paths: dict[Op, Path] = field(default_factory=dict)
    """iterations that an op belongs to"""
    joins: dict[str, Join] = field(default_factory=dict)
    """joins by placeholder name: a `KeepAlive` of the placeholder represents the join of its other operands"""


@dataclass(eq=False)
class StridedSlice:
    """Positions along an axis of an outside tensor that advance with the iteration."""

    loop: int
    base: Tensor
    axis: int
    start: Poly
    """first position in iteration 0"""
    step: Poly
    size: Poly
    untracked: bool = False
    """whether writes are hidden from autograd"""
    members: dict[int, Op] = field(default_factory=dict)
    """each iteration's slice op"""

    def span(self) -> tuple[object, ...]:
        """Return the key that cuts of the same positions share."""
        return self.axis, self.start, self.step, self.size


class StridedSlices:
    """Finds the slices that advance with the iterations, and the writes into them."""

    def __init__(self, graph: Graph, trace: LoopTrace, group: set[int], depth: int) -> None:
        self.graph, self.trace, self.group, self.depth = graph, trace, group, depth
        self.loops: dict[int, dict[int, list[Op]]] = {}
        """ops of each iteration, by loop"""
        for op, path in trace.paths.items():
            if len(path) == depth and path[-1][0] in group:
                number, iteration = path[-1]
                self.loops.setdefault(number, {}).setdefault(iteration, []).append(op)
        self.count = trace.counts[min(group)]
        self.played = trace.played[min(group)]
        self.slices: dict[Op, tuple[StridedSlice, int]] = {}
        """cut and iteration of each slice"""
        self.writes: dict[Op, tuple[StridedSlice, int]] = {}
        """cut and iteration of each `SliceUpdate` op, which names the sliced tensor after a write"""
        self.duplicates: dict[Op, Op] = {}
        """loop-invariant views, mapped to the first of each"""
        self.invariant_views: dict[int, list[Op]] = {}
        """first loop-invariant views by loop"""
        self.reversed_loops = set[int]()
        """loops that run from the last position to the first"""
        for number, iterations in self.loops.items():
            self._hoist(number, iterations)
            self._find_slices(number, iterations)

    def iteration_position(self, op: Op) -> int | None:
        """Return the position of an op's iteration, in ascending order of slices."""
        path = self.trace.paths.get(op, ())
        is_inside = len(path) == self.depth and path[-1][0] in self.group and op not in self.duplicates
        return self.slice_position(*path[-1]) if is_inside else None

    def loop(self, op: Op) -> int | None:
        """Return an op's loop."""
        path = self.trace.paths.get(op, ())
        return path[-1][0] if len(path) == self.depth and path[-1][0] in self.group else None

    def slice_position(self, number: int, iteration: int) -> int:
        """Convert between an iteration and its position in ascending order of slices."""
        return self.played - 1 - iteration if number in self.reversed_loops else iteration

    def first_view(self, t: Tensor) -> Tensor:
        """Return the first of equal views."""
        return t if t.producer not in self.duplicates else self.duplicates[t.producer].results[0]

    def writes_again(self, op: Op) -> bool:
        """Whether the same iteration writes to the part again."""
        after = (r for t in op.results for s in t.graph.successors(t) for r in s.results if s in self.writes)
        return any(self.trace.paths.get(t.producer) == self.trace.paths[op] for t in after if t.producer is not None)

    def start(self, cut: StridedSlice, iteration: int) -> Poly:
        """Return the start of an iteration's slice, in the second half relative to the last iteration."""
        late = iteration >= self.played // 2
        return cut.start + cut.step * (self.count - (self.played - iteration) if late else poly(iteration))

    def _hoist(self, number: int, iterations: dict[int, list[Op]]) -> None:
        """Find loop-invariant views, to keep only one of each."""
        loop_ops = {op for ops in iterations.values() for op in ops}
        written = {op.operands[i].storage for op in loop_ops for i in op.kind.overwrites()}
        alike: dict[tuple[object, ...], list[Op]] = {}
        first: dict[Tensor, Tensor] = {}
        for ops in iterations.values():
            repeats = Counter[tuple[object, ...]]()
            for op in (op for op in ops if is_free_view(op) and op.results[0].ndim):
                t = first.get(op.operands[0], op.operands[0])
                if t.storage in written or (t.producer in loop_ops and t not in first.values()):
                    continue
                key = (t, op.kind, *layout(op.results[0]))
                same = alike.setdefault((*key, repeats[key]), [])
                repeats[key] += 1
                same.append(op)
                first[op.results[0]] = same[0].results[0]
        for ops in alike.values():
            if len(ops) >= max(FEWEST, self.played - 2):
                self.duplicates |= dict.fromkeys(ops, ops[0])
                self.invariant_views.setdefault(number, []).append(ops[0])

    def _find_slices(self, number: int, iterations: dict[int, list[Op]]) -> None:
        loop_ops = dict.fromkeys(op for ops in iterations.values() for op in ops if op not in self.duplicates)
        slices: dict[tuple[object, ...], dict[int, Op]] = {}
        for iteration, ops in iterations.items():
            repeats: dict[tuple[object, ...], int] = {}
            for op in ops:
                is_slice = isinstance(op.kind, Slice) and op in loop_ops
                base = self._base(op.operands[0], loop_ops) if is_slice else None
                if base is None or not isinstance(op.kind, Slice):
                    continue
                key = (base, op.kind.axis, op.kind.size, op.kind.step)
                repeats[key] = repeats.get(key, -1) + 1
                slices.setdefault((*key, repeats[key]), {})[iteration] = op
        for (of, axis, size, *_), ops_of in slices.items():
            assert isinstance(of, Tensor)
            assert isinstance(axis, int)
            assert isinstance(size, Poly)
            self._cut(number, of, axis, size, ops_of)
        steps = {cut.step.constant for cut, _ in self.slices.values() if cut.loop == number}
        back = [isinstance(n, int) and n < 0 for n in steps]
        if any(back) and not all(back):
            raise GraphError(
                "slices one tensor in ascending and another in descending order, expected the same direction"
            )
        self.reversed_loops |= {number} if any(back) else set()
        self._writes(loop_ops)

    def _base(self, t: Tensor, loop_ops: Collection[Op | None]) -> Tensor | None:
        """Return an outside tensor as it was before the iterations wrote to it; None for an iteration's results."""
        while t.producer is not None and t.producer in loop_ops and isinstance(t.producer.kind, SliceUpdate):
            t = t.producer.operands[0]
        return None if t.producer in loop_ops else self.first_view(t)

    def _cut(self, number: int, base: Tensor, axis: int, size: Poly, ops: Mapping[int, Op]) -> None:
        """Record the slices that advance by equal steps: the longest stretch of iterations."""
        starts = {iteration: op.kind.start for iteration, op in ops.items() if isinstance(op.kind, Slice)}
        steps = {
            iteration: starts[iteration + 1] - start for iteration, start in starts.items() if iteration + 1 in starts
        }
        stretches: list[list[int]] = []
        for iteration in sorted(steps):
            if stretches and stretches[-1][-1] == iteration - 1 and steps[iteration - 1] == steps[iteration]:
                stretches[-1].append(iteration)
            else:
                stretches.append([iteration])
        longest = max(stretches, key=len, default=[])
        if len(longest) + 1 < FEWEST or not steps[longest[0]]:
            return
        first, step = longest[0], steps[longest[0]]
        cut = StridedSlice(number, base, axis, starts[first] - step * first, step, size)
        if step * step != size * size and size != ONE:
            raise GraphError(
                f"reads slices of {size} positions of {base.name!r} that advance by {step}, expected a step equal to "
                f"the size"
            )
        for iteration in (*longest, longest[-1] + 1):
            cut.members[iteration] = ops[iteration]
            self.slices[ops[iteration]] = cut, iteration

    def _writes(self, loop_ops: Collection[Op]) -> None:
        """Find writes into slices of outside tensors, and check that their other parts are not read meanwhile."""
        written: dict[Tensor, dict[int, tuple[Op, StridedSlice]]] = {}
        for op in loop_ops:
            base = self._base(op.operands[0], loop_ops) if isinstance(op.kind, SliceUpdate) else None
            if base is None:
                continue
            iteration = self.trace.paths[op][-1][1]
            slices = ((s.results[0], c) for s, (c, k) in self.slices.items() if k == iteration and c.base is base)
            cut = next((c for t, c in slices if same_place(t, op.operands[1])), None)
            previous = written.get(base, {}).get(iteration, (op, cut))[1]
            if cut is None or previous is None or previous.span() != cut.span():
                raise GraphError(
                    f"{op.operands[1].name!r} is written into {base.name!r}, expected one slice per iteration, "
                    f"which advances with the iterations"
                )
            cut.untracked |= isinstance(op.kind, SliceUpdate) and op.kind.untracked
            written.setdefault(base, {})[iteration] = op, cut
            self.writes[op] = cut, iteration
        for op in loop_ops if written else ():
            for t in op.operands:
                base = self._base(t, loop_ops)
                if base not in written or op in self.writes:
                    continue
                spans = {cut.span() for _, cut in written[base].values()}
                if op not in self.slices or {self.slices[op][0].span()} != spans:
                    raise GraphError(f"{op.name!r} reads {base.name!r}, parts of which other iterations have written")


# -- ops outside runs --------------------------------------------------------------------------------------------------

Outer = LoopInvariant | View | Member | FinalCarry


class OutsideReads:
    """Describes operands outside the runs, and records in the plans which values must leave a loop.

    Raises GraphError if a value of one block other than the last is read. A `KeepAlive` may hold the values of only
    some blocks if the others are needed later anyway; those in `exact` represent their reader and must hold all.
    """

    def __init__(self, match: Match, exact: Collection[Op] = ()) -> None:
        self.match, self.exact = match, exact
        self.reads: dict[Op, tuple[Outer, ...]] = {}
        """operands of outside ops: a family replaces each of its members"""
        self.starts: dict[tuple[int, Tensor], Outer] = {}
        """initial values of carries, by run and tensor"""
        self.gradients: dict[Outer, Outer] = {}
        self._index = {op: i for i, op in enumerate(match.graph.ops)}
        starts = {plan.run.starts[0]: plan for plan in match.plans}
        for i, op in enumerate(match.ops):
            if i in starts:
                self._describe_starts(starts[i], i)
            if op not in match.places:
                self._describe_operands(op, i)
        end = len(match.ops)
        self.outputs = unique_families(self._describe_all(match.graph.outputs, end, "an output"))
        self._gradients(end)

    def _describe_starts(self, plan: Plan, i: int) -> None:
        """Describe the initial values of a run's carries."""
        for value in plan.carries:
            for t in value.starts:
                if t is not None:
                    self.starts[plan.number, t] = self.describe(t, i, f"block {plan.run.blocks[0]}")

    def _describe_operands(self, op: Op, i: int) -> None:
        """Describe an outside op's operands."""
        if isinstance(op.kind, KeepAlive):
            index = len(self.match.ops) if op in self.exact else i
            if op in self.exact:
                self._need_edges(op)
            self.reads[op] = tuple(self._describe_all(op.operands, index, repr(op.name)))
        else:
            self.reads[op] = tuple(self.describe(t, i, repr(op.name)) for t in op.operands)

    def _need_edges(self, op: Op) -> None:
        """Raise BlocksDiffer if a list lacks values from blocks at an edge."""
        among, blocks = {as_stored(t) for t in op.operands}, self.match.blocks
        for family in {f for t in op.operands if (f := self.family(t)) is not None}:
            present = [b for b, t in zip(blocks, self.members(family), strict=True) if t in among]
            if present != [*range(present[0], present[-1] + 1)]:
                continue
            for low in (present[0] - 1, present[-1]):
                if blocks.start <= low < blocks.stop - 1:
                    pair = low, low + 1
                    raise BlocksDiffer(pair, f"{op.name!r} has a value of only one of blocks {low} and {low + 1}")

    def _in_blocks(self, t: Tensor) -> bool:
        """Whether a tensor is computed or owned by a block."""
        return t in self.match.owners or t.producer in self.match.places

    def family(self, t: Tensor) -> Family | None:
        """Return a tensor's family, None if it has none."""
        t = as_stored(t)
        if t in self.match.owners:
            return self.match.owners[t]
        if t.producer is None or t.producer not in self.match.places:
            return None
        plan, _, position = self.match.places[t.producer]
        return EarlierRunSlices(plan.number, SameIteration(position, t.producer.results.index(t)))

    def members(self, family: Family) -> tuple[Tensor, ...]:
        """Return the tensors of a family in block order."""
        if not isinstance(family, EarlierRunSlices):
            return family.members
        plan = self.match.plans[family.run]
        assert isinstance(family.value, SameIteration)
        iterations = range(len(plan.run.blocks))[:: plan.run.step]
        return tuple(self.match.tensor_at(plan, family.value, iteration) for iteration in iterations)

    def _complete(self, tensors: Sequence[Tensor], i: int) -> set[Family]:
        """Return the families whose members are all among `tensors`, or needed after position `i` anyway."""
        families = {f for t in tensors if (f := self.family(t)) is not None}
        among = {as_stored(t) for t in tensors}
        return {f for f in families if all(t in among or self._needed(t, i) for t in self.members(f))}

    def _needed(self, t: Tensor, i: int) -> bool:
        """Whether a tensor is an output or read from a position on; `KeepAlive` ops just before count as part of it."""
        graph, ops = self.match.graph, self.match.ops
        if i == len(ops):
            return False
        while i and isinstance(ops[i].kind, KeepAlive):
            i -= 1
        return t in graph.outputs or any(self._index[op] >= i for op in graph.successors(t))

    def _describe_all(self, tensors: Sequence[Tensor], i: int, reader: str) -> list[Outer]:
        """Describe a list of tensors that may contain whole families."""
        out: list[Outer] = []
        complete = self._complete(tensors, i)
        for t in tensors:
            family = self.family(t)
            is_complete = family is not None and family in complete
            out.append(self._whole_family(family) if is_complete and family else self.describe(t, i, reader))
        return out

    def _whole_family(self, family: Family) -> Member:
        if isinstance(family, EarlierRunSlices):
            self.match.plans[family.run].saved[family.value] = None
        return Member(family)

    def describe(self, t: Tensor, i: int, reader: str) -> Outer:
        """Describe a single tensor for a reader at position `i` of the program."""
        if not self._in_blocks(t):
            return LoopInvariant(t)
        t = as_stored(t)
        outside = self.match.from_outside(t)
        if outside is not None:
            return outside
        nearest = min(self._carrying_runs(t, i), key=lambda row: row[0], default=None)
        if nearest is not None:
            distance, plan, of = nearest
            carried = max((len(c.starts) for c in plan.carries if c.of == of), default=1)
            if distance < carried:
                return FinalCarry(plan.number, plan.carried_value(of, distance + 1))
        raise GraphError(
            f"fold of graph {self.match.graph.name!r}: {reader} reads {t.name!r} of one block, expected a value of the "
            f"last block or of every block"
        )

    def _carrying_runs(self, t: Tensor, i: int) -> list[tuple[int, Plan, SameIteration | Member]]:
        """Return the runs that carry or slice a tensor, with the number of iterations before their end."""
        out: list[tuple[int, Plan, SameIteration | Member]] = []
        family = self.family(t)
        for plan in self.match.plans:
            if plan.run.starts[0] >= i or family is None:
                continue
            if isinstance(family, EarlierRunSlices) and family.run == plan.number:
                assert t.producer is not None
                assert isinstance(family.value, SameIteration)
                iteration = self.match.places[t.producer][1]
                out.append((len(plan.run.blocks) - 1 - iteration, plan, family.value))
            elif family in plan.slices:
                block = self.match.blocks[self.members(family).index(t)]
                out.append((abs(plan.run.blocks[-1] - block), plan, Member(family)))
        return out

    def _gradients(self, end: int) -> None:
        """Describe each source's gradient."""
        grads_of: dict[Family, dict[Tensor, Tensor]] = {}
        for t, g in self.match.graph.gradients.items():
            family = self.family(t)
            if family is None:
                self.gradients[LoopInvariant(t)] = self.describe(g, end, f"the gradient of {t.name!r}")
            else:
                grads_of.setdefault(family, {})[as_stored(t)] = g
        for family, pairs in grads_of.items():
            grads = [pairs.get(t) for t in self.members(family)]
            grad_family = None if grads[0] is None else self.family(grads[0])
            if grad_family is None or [*self.members(grad_family)] != [
                None if g is None else as_stored(g) for g in grads
            ]:
                raise GraphError(
                    f"fold of graph {self.match.graph.name!r}: the gradient of {next(iter(pairs)).name!r} is not "
                    f"computed at the same position in every block"
                )
            self.gradients[Member(family)] = self._whole_family(grad_family)


def unique_families(values: Iterable[Outer]) -> list[Outer]:
    """Keep only each family's first occurrence."""
    out: list[Outer] = []
    for value in values:
        if not isinstance(value, Member) or value not in out:
            out.append(value)
    return out


# -- loops over lists --------------------------------------------------------------------------------------------------
# A loop over a list of results of another loop is not recorded; it is recognized by the order of its reads.

#: Iterations at the edges that a loop over a list may lack.
_EDGES = 2


def label_list_loops(graph: Graph, trace: LoopTrace) -> LoopTrace:
    """Label ops that process a loop's results one by one as iterations of another loop."""
    ops = graph.ops
    counts, played, paths = dict(trace.counts), dict(trace.played), dict(trace.paths)
    rows = [
        (stretch, outer_path, loop)
        for (outer_path, loop), reads in _loop_reads(ops, trace).items()
        for stretch in _ordered_stretches(reads)
        if len(stretch) >= max(FEWEST, trace.played[loop] - _EDGES)
    ]
    starts = [stretch[0][0] for stretch, *_ in rows]
    for stretch, outer_path, loop in sorted(rows, key=lambda row: row[0][0]):
        iteration_of = {op: iteration for iteration, part in _iteration_ops(ops, stretch, starts) for op in part}
        if any(paths.get(op) != trace.paths.get(op) or not _is_within(op, outer_path, trace) for op in iteration_of):
            continue  # labelled already, or interleaved with other iterations
        number = max(counts) + 1
        counts[number], played[number] = trace.counts[loop], trace.played[loop]
        for op, iteration in iteration_of.items():
            paths[op] = (*outer_path, (number, iteration), *trace.paths.get(op, ())[len(outer_path) :])
    return replace(trace, counts=counts, played=played, paths=paths)


def _is_within(op: Op, outer_path: Path, trace: LoopTrace) -> bool:
    return trace.paths.get(op, ())[: len(outer_path)] == outer_path


def _loop_reads(ops: Sequence[Op], trace: LoopTrace) -> dict[tuple[Path, int], list[tuple[int, int]]]:
    """Return positions and iterations of reads from each loop, by common outer iterations and loop."""
    out: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    for i, op in enumerate(ops):
        outer_path, inputs = trace.paths.get(op, ()), set[tuple[int, int]]()
        for t in op.operands if not isinstance(op.kind, KeepAlive) else ():
            path = () if t.producer is None else trace.paths.get(t.producer, ())
            if len(path) > len(outer_path) and path[: len(outer_path)] == outer_path:
                inputs.add(path[len(outer_path)])
        for loop in {n for n, _ in inputs}:
            iteration, *earlier = sorted((k for n, k in inputs if n == loop), reverse=True)
            if len(earlier) <= 1:  # at most one besides the previous one
                out.setdefault((outer_path, loop), []).append((i, iteration))
    return out


def _ordered_stretches(reads: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the stretches in which iterations are read in order, forward or backward, with their first reads."""
    stretch: list[tuple[int, int]] = []
    for index, iteration in reads:
        if stretch and iteration == stretch[-1][1]:
            continue
        steps = {b - a for (_, a), (_, b) in pairwise([*stretch, (index, iteration)])}
        if stretch and steps not in ({1}, {-1}):
            yield stretch
            stretch = []
        stretch.append((index, iteration))
    yield stretch


def _iteration_ops(
    ops: Sequence[Op], stretch: Sequence[tuple[int, int]], other_starts: Sequence[int]
) -> Iterator[tuple[int, Sequence[Op]]]:
    """Yield each iteration's ops; an iteration begins where it reads its part.

    The last one is as long as the one before, unless another loop begins there.
    """
    starts = [start for start, _ in stretch]
    ends = [*starts[1:], min(2 * starts[-1] - starts[-2], *(n for n in other_starts if n > starts[-1]), len(ops))]
    for (start, iteration), end in zip(stretch, ends, strict=True):
        yield iteration, ops[start:end]


# -- separated iterations ----------------------------------------------------------------------------------------------
# Give each iteration its own slices as sources, and move shared values outside.


class KernelPrologues(Rewriter):
    """Copies kernels whose formals take their operands' offsets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begins: dict[Tensor, Poly] = {}
        """offsets of kernel formals"""

    def begin(self, op: Op, operands: Sequence[Tensor]) -> None:
        """Record operand offsets for the op to copy next."""
        if op.body is not None and op.body.fused:
            self.begins |= {f: t.offset for f, t in zip(op.body.formals, operands, strict=True)}

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        """Copy a formal with its operand's offset."""
        copied = super().formal(old, body, suffix)
        copied.offset = self.begins.get(old, copied.offset)
        return copied


class SliceSeparator(KernelPrologues):
    """Copies a graph, giving each iteration its slices as separate sources."""

    def __init__(self, cuts: StridedSlices) -> None:
        super().__init__()
        self.cuts = cuts
        self.paths: dict[Op, Path] = {}
        self.labels: dict[Op, int] = {}
        """position of each op's iteration"""
        self.cut_of: dict[str, tuple[StridedSlice, int]] = {}
        """cut and iteration of each slice source, by name"""
        self.after: dict[str, Tensor] = {}
        """base tensor of each placeholder for a written tensor, by name"""
        self.parts: dict[Tensor, list[tuple[StridedSlice, int, Tensor]]] = {}
        """cut, iteration and value of each part written to a tensor"""
        self._numbers: dict[StridedSlice, int] = {}
        self._begun: set[int] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, except slices and `SliceUpdate` ops."""
        number = self.cuts.loop(op)
        if number is not None and number not in self._begun:
            self._begun.add(number)
            for view in self.cuts.invariant_views.get(number, ()):
                super().emit(view, new, suffix)
        if op in self.cuts.duplicates:
            self.tensors[op.results[0]] = self.tensors[self.cuts.duplicates[op].results[0]]
        elif op.graph.parent is not None:
            super().emit(op, new, suffix)
        elif op in self.cuts.slices and op.operands[0].producer in self.cuts.writes and self._was_written(op):
            self.tensors[op.results[0]] = self.tensors[op.operands[0].producer.operands[1]]
        elif op in self.cuts.slices:
            cut, iteration = self.cuts.slices[op]
            t, number = op.results[0], self._numbers.setdefault(cut, len(self._numbers))
            name = f"cut.{number}.i{self.cuts.slice_position(cut.loop, iteration)}"
            self.tensors[t] = self._source(new, name, t, ZERO)
            self.cut_of[name] = cut, iteration
        elif op in self.cuts.writes:
            self._written(op, *self.cuts.writes[op], new)
        else:
            super().emit(op, new, suffix)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; outside loops, an iteration's slices are taken from the base again."""
        if op.graph.parent is None and self.cuts.loop(op) is None:
            views = {t: self._outside_view(t, new) for t in op.operands if self._is_cut(t)}
            previous = {t: self.tensors[t] for t in views}
            self.tensors |= views
            self.begin(op, [self.tensors[t] for t in op.operands])
            copied = super().copy(op, new, suffix)
            self.tensors |= previous
            return copied
        if op.graph.parent is None:
            self.begin(op, [self.tensors[t] for t in op.operands])
        return super().copy(op, new, suffix)

    def _is_cut(self, t: Tensor) -> bool:
        """Whether a tensor is a slice that advances with the iterations, or a view of one."""
        op = t.producer
        return op in self.cuts.slices or (op is not None and is_free_view(op) and self._is_cut(op.operands[0]))

    def _outside_view(self, t: Tensor, new: Graph) -> Tensor:
        """Repeat a view outside the iteration that made it."""
        op = t.producer
        if op is None or not (op in self.cuts.slices or self._is_cut(op.operands[0])):
            tensor: Tensor = self.tensors[t]
            return tensor
        kind = op.kind
        if isinstance(kind, Slice) and op in self.cuts.slices:
            kind = replace(kind, start=self.cuts.start(*self.cuts.slices[op]), room=None)
        view = new.add_op(kind, [self._outside_view(op.operands[0], new)], op.name, op.phase)
        view.scope = op.scope
        return view.results[0]

    def add(self, op: Op, kind: Any, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add a copy in the op's iteration."""
        position = self.cuts.iteration_position(op)
        if position is not None:
            name = re.sub(r"_\d+$", "", op.name) + f".i{position}"
        copied = super().add(op, kind, operands, new, name)
        if op in self.cuts.trace.paths:
            path = self.cuts.trace.paths[op]
            self.paths[copied] = path[:-1] if op in self.cuts.duplicates else path
        if position is not None:
            self.labels[copied] = position
        return copied

    def _was_written(self, op: Op) -> bool:
        """Whether a slice was written by the same iteration before."""
        producer = op.operands[0].producer
        return producer is not None and self.cuts.iteration_position(producer) == self.cuts.iteration_position(op)

    def _written(self, op: Op, cut: StridedSlice, iteration: int, new: Graph) -> None:
        """Record a written part; after the last one, add a placeholder for the whole."""
        parts = self.parts.setdefault(cut.base, [])
        if parts and parts[-1][1] == iteration:
            parts.pop()  # overwritten by the same iteration
        parts.append((cut, iteration, self.tensors[op.operands[1]]))
        if iteration + 1 < self.cuts.played or self.cuts.writes_again(op):
            return
        if len(parts) < self.cuts.played:
            raise GraphError(
                f"{len(parts)} of {self.cuts.played} iterations write into {cut.base.name!r}, expected all"
            )
        name = f"after.{len(self.after)}"
        self.after[name] = cut.base
        placeholder = self._source(new, name, cut.base, cut.base.offset)
        keep_op = new.add_op(KeepAlive(), [placeholder, *(t for *_, t in parts)], "written", op.phase)
        keep_op.scope = op.scope
        self.paths[keep_op] = self.cuts.trace.paths[op][:-1]
        self.tensors[op.results[0]] = keep_op.results[0]

    @staticmethod
    def _source(new: Graph, name: str, like: Tensor, offset: Poly) -> Tensor:
        source = Tensor(new, name, like.sizes, like.dtype, role="buffer", strides=like.strides, offset=offset)
        new.add_node(source)
        return source


# -- building loops ----------------------------------------------------------------------------------------------------


class Folder(Rewriter):
    """Copies a graph with a loop of `count` blocks for each run."""

    keeps_suffixes = False

    def __init__(self, match: Match, outside_reads: OutsideReads, count: Poly) -> None:
        super().__init__()
        self.match, self.outside_reads, self.count = match, outside_reads, count
        self.families: dict[Family, Tensor] = {}
        """New tensor for a family, with one storage per block."""
        self.ends: dict[FinalCarry, Tensor] = {}
        self.views: dict[View, Tensor] = {}
        self.first = {match.ops[plan.run.starts[0]]: plan for plan in match.plans}
        self.body_families = self._body_families()

    def _body_families(self) -> dict[PerBlock, Plan]:
        """Return the families declared in a loop body, because no other loop or op reads them."""
        readers: dict[PerBlock, list[Plan | None]] = {f: [] for f in dict.fromkeys(self.match.owners.values())}
        for plan in self.match.plans:
            for family in plan.slices:
                if isinstance(family, PerBlock):
                    readers[family].append(plan)
        outside_values = [*self.outside_reads.reads.values(), self.outside_reads.outputs, self.outside_reads.gradients]
        for value in (v for values in outside_values for v in values):
            if isinstance(value, Member) and isinstance(value.family, PerBlock):
                readers[value.family].append(None)
        home = {f: (plans[0] if plans else self.match.plans[0]) for f, plans in readers.items() if len(plans) < 2}
        return {f: plan for f, plan in home.items() if plan is not None and not f.members[0].storage.pieces}

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the new graph."""
        self.new = new = Graph(old.name if name is None else name, dtype=old.dtype)
        # a default of the count's symbol belongs to a loop that existed before
        defaults = {name: size for name, size in old.defaults.items() if name not in self.count.names()}
        layers = frozenset(scope for scope in old.layers if not iterations_of(scope))
        carry_facts(old, new, defaults=defaults, layers=layers)
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(self.outer(v) for v in self.outside_reads.outputs))
            new.gradients = {self.outer(t): self.outer(g) for t, g in self.outside_reads.gradients.items()}
        if old.sharding is not None:
            new.sharding = self.laid(old, old.sharding)
        return new.freeze()

    def laid(self, old: Graph, sharding: Sharding) -> Sharding:
        """Return the placements of the new tensors: as in one block, with an unsharded leading axis."""
        for family in dict.fromkeys(self.match.owners.values()):
            first, *others = family.members
            other = next((t for t in others if sharding.places[t.name] != sharding.places[first.name]), None)
            if other is not None:
                raise GraphError(
                    f"fold of graph {old.name!r}: {first.name!r} has placement {sharding.places[first.name]}, "
                    f"{other.name!r} has {sharding.places[other.name]}; expected the same placement in all blocks"
                )

        def place(t: Tensor, placement: Placement) -> Placement:
            return placement.with_dims([*[()] * (t.ndim - len(placement.dims)), *placement.dims])

        return replace(
            sharding,
            places={new.name: place(new, sharding.places[t.name]) for new, t in self.origins.items()},
            outputs=tuple(place(t, placement) for t, placement in zip(self.new.outputs, sharding.outputs, strict=True)),
            gradients={t.name: place(t, sharding.gradients[self.origins[t].name]) for t in self.new.gradients},
        )

    # -- outside loops -------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; those of a family are declared together, here or in a loop's body."""
        family = self.match.owners.get(old)
        if old.graph.parent is not None:
            return self.declare(old, new, old.sizes, old.storage.pieces)
        if family is None:
            return super().source(old, new, suffix)
        if family not in self.body_families:
            self.family_tensor(family, new)
        return None

    def family_tensor(self, family: Family, new: Graph) -> Tensor:
        """Return the tensor for a family, declared where it is first needed."""
        if isinstance(family, PerBlock) and family not in self.families:
            old = family.members[0]
            self.families[family] = self.declare(old, new, (self.count, *old.sizes), old.storage.pieces + 1)
        return self.families[family]

    def declare(self, old: Tensor, new: Graph, sizes: Sequence[Poly], pieces: int) -> Tensor:
        """Declare a source of the blocks."""
        source = Tensor(
            new, new.unique(self.match.labels.plain(old.name)), tuple(sizes), old.dtype,
            role=old.role, requires_grad=old.requires_grad, pieces=pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(source)
        self.origins[source] = old
        return source

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op in a body, without the block number in its name."""
        return self.copy_with_operands(
            op, [self.tensors[t] for t in op.operands], new, self.match.labels.plain(op.name)
        )

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or add a loop in place of a run's first op."""
        if op.graph.parent is not None:
            super().emit(op, new, suffix)
            return
        if op in self.first:
            self.loop(self.first[op], new)
        if op not in self.match.places:
            self.copy_outside(op, new)

    def outer(self, value: Outer) -> Tensor:
        """Return the tensor for a value read outside."""
        if isinstance(value, FinalCarry):
            return self.ends[value]
        if isinstance(value, Member):
            return self.family_tensor(value.family, self.new)
        if isinstance(value, LoopInvariant):
            tensor: Tensor = self.tensors[value.tensor]
            return tensor
        if value not in self.views:
            assert isinstance(value.of, LoopInvariant | View)
            self.views[value] = self.repeat_view(value, self.outer(value.of), self.new)
        return self.views[value]

    def repeat_view(self, value: View, of: Tensor, new: Graph, phase: str = "forward") -> Tensor:
        """Repeat a view."""
        plan = self.match.plans[value.run]
        op = self.match.ops[plan.run.starts[-1] + value.position]
        view = self.copy_with_operands(op, [of], new, self.match.labels.plain(op.name))
        view.phase = phase
        return view.results[0]

    def copy_outside(self, op: Op, new: Graph) -> None:
        """Copy an op outside the blocks."""
        self.copy_with_operands(
            op, [self.outer(v) for v in unique_families(self.outside_reads.reads[op])], new, op.name
        )

    def copy_with_operands(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        kind = op.kind
        if isinstance(kind, BodyKind):
            kind = replace(kind, body=self.body(kind.body, new, ""))
        copied = self.add(op, kind, operands, new, name)
        copied.scope = self.match.labels.plain(op.scope)
        copied.call = op.call if len(operands) == len(op.operands) else None
        for t, copy in zip(op.results, copied.results, strict=True):
            may_differ = isinstance(kind, KeepAlive) and not op.graph.out_degree(t)  # may hold values of all iterations
            if not may_differ and self.memory_layout(t) != self.memory_layout(copy):
                raise GraphError(f"fold: {copy!r} of {copied.name!r} has a different memory layout from {t!r}")
        return copied

    def memory_layout(self, t: Tensor) -> tuple[object, ...]:
        """Return the memory layout that a copy must share."""
        return layout(t)

    # -- loops ---------------------------------------------------------------------------------------------------

    def name_of(self, plan: Plan) -> str:
        """Return a run's loop name."""
        return self.match.labels.scope or "blocks"  # if the module itself is the list

    def loop(self, plan: Plan, new: Graph) -> None:
        """Add a run's loop."""
        scope = self.name_of(plan)
        body = new.start_body(scope.rpartition("/")[2], fused=False)
        inner = _LoopBody(self, plan, body)
        inner.fill_body()
        operands = [self.start(plan, c, new) for c in inner.carries] + [
            self.family_tensor(f, new) for f in inner.slices
        ]
        kind = Repeat(
            body=body, count=self.count, carries=len(inner.carries), xs=len(inner.slices), saved=len(plan.saved),
            reverse=plan.run.step < 0,
        )  # fmt: skip
        name = scope if plan.run.phase == "forward" else f"{scope}.{plan.run.phase}"
        op = new.add_op(kind, (*operands, *body.captured), name, self.match.ops[plan.run.starts[0]].phase)
        body.owner = op
        results = iter(op.results)
        self.ends |= {FinalCarry(plan.number, c): next(results) for c in inner.carries}
        self.families |= {EarlierRunSlices(plan.number, v): next(results) for v in plan.saved}

    def start(self, plan: Plan, carry: EarlierIteration, new: Graph) -> Tensor:
        """Return a carry's initial value, undefined if no iteration reads it."""
        t = carry.starts[0]
        if t is not None:
            return self.outer(self.outside_reads.starts[plan.number, t])
        like = self.match.typical(plan, carry)
        undef = Undef(sizes=like.sizes, dtype=like.dtype, pieces=like.storage.pieces)
        return new.add_op(undef, [], "undef", self.match.ops[plan.run.starts[0]].phase).results[0]


class _LoopBody:
    """Builds a loop body."""

    def __init__(self, folder: Folder, plan: Plan, body: Graph) -> None:
        self.folder, self.plan, self.body = folder, plan, body
        self.values: dict[Value, Tensor] = {}
        self.carries = list(plan.carries)
        self.slices = [f for f in plan.slices if not (isinstance(f, PerBlock) and folder.body_families.get(f) is plan)]
        match = folder.match
        for i, value in enumerate(self.carries):
            self.values[value] = self.formal(match.typical(plan, value), f"carry{i}")
        for i, family in enumerate(self.slices):
            self.values[Member(family)] = self.formal(match.typical(plan, family), f"x{i}")
        for owned, home in folder.body_families.items():
            if home is plan:
                t = owned.members[-1]
                self.values[Member(owned)] = folder.declare(t, body, t.sizes, 0)

    def formal(self, like: Tensor, name: str) -> Tensor:
        """Add a formal with the layout of a tensor in the blocks."""
        formal = self.body.formal(like, f"{self.body.name}.{name}", like.sizes, like.strides)
        formal.offset, formal.domain = like.offset, like.domain
        return formal

    def fill_body(self) -> None:
        """Add one iteration's ops, and its carries and residuals as outputs."""
        match, plan = self.folder.match, self.plan
        start = plan.run.starts[-1]
        for position, op in enumerate(match.ops[start : start + plan.run.length]):
            operands = [self.tensor(v) for v in plan.reads[position]]
            copied = self.folder.copy_with_operands(op, operands, self.body, match.labels.plain(op.name))
            self.values |= {SameIteration(position, i): t for i, t in enumerate(copied.results)}
        next_carries = [self.tensor(c.nearer) for c in self.carries]
        self.body.outputs += [*next_carries, *map(self.tensor, plan.saved)]

    def tensor(self, value: Value) -> Tensor:
        """Return the tensor for a value."""
        if value not in self.values:
            if isinstance(value, LoopInvariant):
                self.values[value] = self.body.adopt(self.folder.tensors[value.tensor])
            elif isinstance(value, View):
                of, phase = self.tensor(value.of), self.plan.run.phase
                self.values[value] = self.folder.repeat_view(value, of, self.body, phase)
            else:
                raise AssertionError(value)
        return self.values[value]


# -- stacks of blocks --------------------------------------------------------------------------------------------------


def fold(graph: Graph, scope: str | None = None, count: str = "L", /, *, default: bool = False) -> Graph:
    """Reroll a stack's equal blocks into loops, so that the depth becomes a symbol.

    Parameters
    ----------
    graph : Graph
        With separate ops for each block, as made by a trace or `unroll`; it is not modified.
    scope : str, optional
        Path whose children `0`, `1`, ... are the blocks, such as `transformer/h`, or the name of an unrolled loop. By
        default every stack with equal blocks that the op paths of a trace show; among nested stacks the outer one, if
        its blocks are equal.
    count : str
        Name of the symbol for the number of blocks. With several stacks, the symbols also have the part of the path in
        which the stacks differ, such as `L_encoder_layer`.
    default : bool
        Whether the current number of blocks becomes the default size of the symbol, as in presets.

    Returns
    -------
    Graph
        With a Repeat for each pass over the blocks: forward, backward (in reverse, reading the stacked residuals of the
        forward pass) and optimizer updates. Bound to the current number of blocks, all costs equal those of the given
        graph; bound to another number, those of a model with that depth. Differing blocks at either end stay
        outside the loops but count. Alternating layers form a block together: with two kinds, the loop runs L/2 times.

    Raises
    ------
    GraphError
        If there are no such blocks, fewer than three neighbours are equal (the message names the first op that
        differs), an op outside reads a value of a middle block, or the symbol is in use.

    Notes
    -----
    Blocks are equal if their ops are, in program order: kind, phase, fields, shapes, layouts, and operands. An operand
    may come from the same block, the previous block, the same block in an earlier pass, a parameter of the block, or a
    tensor shared by all blocks. Ops without a scope between two blocks belong to the first of them.

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
    outer_blocks, remainder = labels.count - len(match.blocks), labels.layers % labels.period
    # the last block may be incomplete
    outer_layers = labels.period * outer_blocks - (labels.period - remainder if remainder else 0)
    new = Folder(match, OutsideReads(match), (poly(dims(count)) - outer_layers) / labels.period).run(graph)
    with new:
        if outer_layers:
            new.assume(f"{count} >= {outer_layers + labels.period}")
        if default:
            new.defaults = new.defaults | {count: labels.layers}
    return new


def _fold_all(graph: Graph, count: str, default: bool) -> Graph:
    """Fold every stack with equal blocks; if there is none, raise the first stack's error."""
    foldable: list[str] = []
    first_error: GraphError | None = None
    for scope in stacks_of(graph):
        if any(not outer or scope.startswith(f"{outer}/") for outer in foldable):
            continue
        try:
            fold(graph, scope, count)
        except GraphError as error:
            first_error = first_error or error
        else:
            foldable.append(scope)
    if not foldable:
        raise first_error or GraphError(
            f"fold of graph {graph.name!r}: no scope has blocks 0, 1, ..., expected a graph with a stack of layers"
        )
    for scope, name in zip(foldable, _names(count, foldable), strict=True):
        graph = fold(graph, scope, name, default=default)
    return graph


def _names(count: str, scopes: Sequence[str]) -> list[str]:
    """Return a symbol for each stack's depth; for several, append the path from where they differ."""
    if len(scopes) == 1:
        return [count]
    paths = [scope.split("/") for scope in scopes]
    common = next(i for i, levels in enumerate(zip(*paths, strict=False)) if len(set(levels)) > 1)
    return [re.sub(r"\W", "_", "_".join((count, *path[common:]))) for path in paths]


def _matched(graph: Graph, scope: str) -> tuple[Labels, Match]:
    """Compare a stack's blocks: single layers, or periods of alternating ones."""
    labels = Labels(graph, scope)
    if (period := labels.alternation_period()) > 1:
        labels = Labels(graph, scope, period)
    return labels, equal_blocks(graph, labels, find_runs(graph.ops, labels))


def equal_blocks(graph: Graph, labels: Numbered, runs: Sequence[Run], blocks: range | None = None) -> Match:
    """Compare some blocks, or all, excluding differing ones at the edges."""
    blocks = range(labels.count) if blocks is None else blocks
    while True:
        try:
            return Match(graph, labels, runs, blocks)
        except BlocksDiffer as error:
            blocks = larger_side(graph, blocks, error)


def larger_side(graph: Graph, blocks: range, error: BlocksDiffer) -> range:
    """Return the blocks on the larger side of a difference; raise GraphError if it is too small."""
    after = error.low + 1
    front = after - blocks.start <= blocks.stop - after
    blocks = range(after, blocks.stop) if front else range(blocks.start, after)
    if len(blocks) < FEWEST:
        raise GraphError(
            f"fold of graph {graph.name!r}: {error}, expected at least {FEWEST} consecutive equal blocks, "
            f"not counting the edges"
        ) from None
    return blocks


# -- executed iterations -----------------------------------------------------------------------------------------------


def fold_turns(graph: Graph, trace: LoopTrace) -> Graph:
    """Reroll all executed iterations into Repeats, inner loops first.

    Raises GraphError if iterations differ, or one accesses an outside tensor other than through its own slice.
    """
    trace = label_list_loops(graph, trace)
    while True:
        depth = max(map(len, trace.paths.values()), default=0)
        if not depth:
            return graph
        inner = {path[-1][0] for path in trace.paths.values() if len(path) == depth}
        counts = {trace.counts[number] for number in inner}
        for count in sorted(counts, key=str):
            group = {number for number in inner if trace.counts[number] == count}
            graph, trace = _folded(graph, trace, group, depth)


def _folded(graph: Graph, trace: LoopTrace, group: set[int], depth: int) -> tuple[Graph, LoopTrace]:
    """Reroll loops with the same count at the same depth."""
    executed = trace.played[min(group)]
    if executed < FEWEST:
        raise GraphError(
            f"has too few iterations at the given sizes ({executed}), expected at least {FEWEST}: pass larger sizes"
        )
    cuts = StridedSlices(graph, trace, group, depth)
    separator = SliceSeparator(cuts)
    separated = separator.run(graph)
    labels = _IterationLabels(separator, cuts)
    runs, blocks = labels.runs(separated), range(labels.count)
    placeholders = {
        op
        for op in separated.ops
        if isinstance(op.kind, KeepAlive) and op.operands[0].name in (separator.after | trace.joins)
    }
    while True:
        match = equal_blocks(separated, labels, runs, blocks)
        try:
            outside_reads = OutsideReads(match, placeholders)
            break
        except BlocksDiffer as error:  # a list lacks values of the first or last iterations, which then stay outside
            blocks = larger_side(separated, match.blocks, error)
    folder = _IterationFolder(match, outside_reads, cuts, separator)
    folded = folder.run(separated)

    def remaining(path: Path) -> Path:
        """Return the iterations that an op still belongs to."""
        return path[:-1] if len(path) == depth and path[-1][0] in group else path

    paths = {new: path for new, old in folder.old_ops.items() if (path := remaining(separator.paths.get(old, ())))}
    return folded, replace(trace, paths=paths)


class _IterationLabels:
    """Assignment of ops and slices to iterations, as `Match` needs it."""

    scope = ""

    def __init__(self, separator: SliceSeparator, cuts: StridedSlices) -> None:
        self.cuts, self.separator = cuts, separator
        self.ops = separator.labels
        self.count = cuts.played
        self.sources: dict[Tensor, int] = {}

    def runs(self, graph: Graph) -> list[Run]:
        """Return the loops as passes over the iterations."""
        cut_of = {t: self.separator.cut_of[t.name] for t in graph.tensors if t.name in self.separator.cut_of}
        self.sources = {t: self.cuts.slice_position(cut.loop, iteration) for t, (cut, iteration) in cut_of.items()}
        passes: dict[tuple[int, str], Run] = {}
        for i, op in enumerate(graph.ops):
            if op in self.ops:
                number = self.separator.paths[op][-1][0]
                run = passes.setdefault((number, op.phase), Run(op.phase))
                if not run.blocks or run.blocks[-1] != self.ops[op]:
                    run.blocks.append(self.ops[op])
                    run.starts.append(i)
        return list(passes.values())

    @staticmethod
    def relative(name: str, block: int) -> str:
        """Return the scope: it does not depend on the iteration."""
        return name

    @staticmethod
    def plain(name: str) -> str:
        """Strip the iteration number from a name."""
        return unnumbered(name)


class _IterationFolder(KernelPrologues, Folder):
    """Copies a graph with loops in place of iterations; their slices are views of the original tensors."""

    def __init__(
        self, match: Match, outside_reads: OutsideReads, cuts: StridedSlices, separator: SliceSeparator
    ) -> None:
        super().__init__(match, outside_reads, cuts.count - (cuts.played - len(match.blocks)))
        self.cuts, self.separator = cuts, separator
        self.old_ops: dict[Op, Op] = {}
        """old op for each new one"""
        self.pending = {base: list(parts) for base, parts in separator.parts.items()}
        """parts still to be written to a tensor, in iteration order"""
        self.updated: dict[Tensor, Tensor] = {}
        """tensors after the writes so far"""

    def _body_families(self) -> dict[PerBlock, Plan]:
        return {}

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; those for slices are created where a loop reads them."""
        is_placeholder = old.name in self.separator.cut_of or old.name in self.separator.after
        return None if is_placeholder or self._is_join(old) else super().source(old, new, suffix)

    def _is_join(self, t: Tensor) -> bool:
        """Whether a tensor is a placeholder for joined results of these loops."""
        join = self.cuts.trace.joins.get(t.name)
        return join is not None and join.loop in self.cuts.group

    def family_tensor(self, family: Family, new: Graph) -> Tensor:
        """Return an outside tensor as a view whose first axis counts iterations."""
        if isinstance(family, PerBlock) and family not in self.families:
            cut, _ = self.separator.cut_of[family.members[0].name]
            self.families[family] = self._stacked_slices(cut)
        return self.families[family]

    def _stacked_slices(self, cut: StridedSlice) -> Tensor:
        x, axis, count = self._current(cut.base), cut.axis, self.count
        start, step = self._span(cut)
        if step != cut.size:  # single positions with gaps between them
            assert isinstance(step.constant, int)
            x = slice_axis(x, axis, start, count, step.constant)
        elif start or step * count != x.sizes[axis]:
            x = slice_axis(x, axis, start, count * step)
        x = reshape(x, (*x.sizes[:axis], count, cut.size, *x.sizes[axis + 1 :]))
        return permute(x, (axis, *(i for i in range(x.ndim) if i != axis)))

    def _span(self, cut: StridedSlice) -> tuple[Poly, Poly]:
        """Return the first position of the loop's slices, and the step."""
        # in a reversed loop, the last iteration has the first position
        last = cut.start + cut.step * (self.cuts.count - 1 - self.match.blocks.start)
        if cut.loop in self.cuts.reversed_loops:
            return last, -cut.step
        return cut.start + cut.step * self.match.blocks.start, cut.step

    def outer(self, value: Any) -> Tensor:
        """Return the tensor for a value read outside, such as the slice of an iteration outside the loop."""
        if isinstance(value, LoopInvariant) and value.tensor.name in self.separator.cut_of:
            t = value.tensor
            if self.tensors[t] is None:
                cut, iteration = self.separator.cut_of[t.name]
                self.tensors[t] = slice_axis(
                    self._current(cut.base), cut.axis, self.cuts.start(cut, iteration), cut.size
                )
            tensor: Tensor = self.tensors[t]
            return tensor
        return super().outer(value)

    def copy_outside(self, op: Op, new: Graph) -> None:
        """Copy an op, or replace a placeholder by a join or a written tensor."""
        name = op.operands[0].name if isinstance(op.kind, KeepAlive) else ""
        if name in self.separator.after:
            self.tensors[op.results[0]] = self._current(self.separator.after[name])
        elif name and self._is_join(op.operands[0]):
            operands = [self.outer(v) for v in unique_families(self.outside_reads.reads[op])[1:]]
            join = self.cuts.trace.joins[name]
            kind = replace(join.kind, reverse=join.back != (join.loop in self.cuts.reversed_loops))
            joined = self.add(op, kind, operands, new, op.name).results[0]
            if self.memory_layout(joined) != self.memory_layout(op.results[0]):
                raise GraphError(f"{joined!r} concatenates the results of all iterations, expected {op.results[0]!r}")
        else:
            super().copy_outside(op, new)

    def _current(self, base: Tensor) -> Tensor:
        """Return a tensor after the writes so far."""
        value: Tensor = self.updated.get(base) or self.tensors[self.separator.tensors[base]]
        pending = self.pending.get(base, [])
        while pending:
            cut, iteration, t = pending[0]
            family = self.outside_reads.family(t) if t.producer in self.match.places else None
            values = self.tensors.get(t) if family is None else self.families.get(family)
            if values is None:
                break
            start, step = (self.cuts.start(cut, iteration), cut.size) if family is None else self._span(cut)
            part = values if family is None else self._merged(values, cut.axis)
            stride = 1 if step == cut.size else int(step.constant or 1)
            kind = SliceUpdate(axes=(cut.axis,), starts=(start,), steps=(stride,), untracked=cut.untracked)
            value = self.new.add_op(kind, [value, part], "slice_update", "forward").results[0]
            del pending[: 1 if family is None else len(self.match.blocks)]
        self.updated[base] = value
        return value

    @staticmethod
    def _merged(part: Tensor, axis: int) -> Tensor:
        """Merge the iteration axis into the sliced axis."""
        part = permute(part, (*range(1, axis + 1), 0, *range(axis + 1, part.ndim)))
        sizes = (*part.sizes[:axis], part.sizes[axis] * part.sizes[axis + 1], *part.sizes[axis + 2 :])
        return reshape(part, sizes)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, recording the old op for each new one."""
        before = len(new)
        super().emit(op, new, suffix)
        if op.graph.parent is None:
            self.old_ops |= dict.fromkeys(added_since(new, before), op)

    def copy_with_operands(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        self.begin(op, operands)
        return super().copy_with_operands(op, operands, new, name)

    def memory_layout(self, t: Tensor) -> tuple[object, ...]:
        """Return the memory layout that a copy must share, without the offset."""
        return layout(t)[:3]

    def name_of(self, plan: Plan) -> str:
        """Return the loop name: the common scope of its ops."""
        start = plan.run.starts[-1]
        paths = [op.scope.split("/") for op in self.match.ops[start : start + plan.run.length]]
        return "/".join((*(level for level in _common_prefix(paths) if level), "scan"))


def _common_prefix(paths: Sequence[Sequence[str]]) -> Iterator[str]:
    for levels in zip(*paths, strict=False):
        if len(set(levels)) > 1:
            return
        yield levels[0]
