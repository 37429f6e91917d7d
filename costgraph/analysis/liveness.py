"""Live ranges: when each storage is allocated and freed, saved tensors, and the bytes that are live at each step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import lcm
from operator import mul
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from ..algebra.conditions import Condition, Conditions, LoopCounts, Validity
from ..algebra.dominance import prune, reached_by
from ..algebra.extremum import Owner, extremum, smaller
from ..algebra.polynomial import ONE, ZERO, Monomial, Poly, Rational, as_poly, poly, total
from ..algebra.symbols import symbol
from ..bind.evaluate import Formula, bound_answer
from ..errors import GraphError
from ..ir.graph import (
    FORWARD,
    Bindings,
    Graph,
    Held,
    InFlightMicroBatches,
    Loop,
    Op,
    Storage,
    Tensor,
    bindings,
    is_pass,
    loops,
    need_graph,
)
from ..ir.strides import numel
from ..ops.collectives import Receive, Send
from ..ops.layout import KeepAlive
from ..ops.loops import Env, LoopExecutor, PlayedIteration
from .costs import collection_paused
from .params import cached

__all__ = [
    "PipelineBuffers",
    "behind",
    "deferred_grad_bytes",
    "saved_by_pass",
    "saved_bytes",
    "saved_for_weights",
    "LoopStorages",
    "HeldStorage",
    "LiveRange",
    "UnplayedIterations",
    "piece",
    "corners",
    "Copies",
    "Program",
    "Step",
    "copies_for",
    "copies_needed",
    "period",
    "play",
    "closed",
    "holds_from",
    "live_bytes",
    "live_cases",
]


# -- buffers of a pipeline stage ---------------------------------------------------------------------------------------


class _Direction(NamedTuple):
    """Bytes sent or received in one direction: equal per group of layers, except for a group at an end of the model."""

    each: Poly
    """bytes per group and micro-batch"""
    lacking: Poly
    """bytes missing for the rank's group at the end of the model: `each`, or zero"""

    def of(self, groups: Poly, without: Poly) -> Poly:
        """Return the bytes for `groups` layer groups, including `without` groups at an end of the model."""
        return self.each * groups - self.lacking * without


class PipelineBuffers:
    """Communication buffer bytes in torch's pipeline stages, derived from the send and receive ops in one pass.

    Each stage allocates receive buffers for every micro-batch, in both directions, before the first step
    (`torch.distributed.pipelining.stage`), so received tensors saved for the backward pass take no extra memory. In a
    folded pipeline, the rank at the turn passes tensors to itself through these buffers. The output of a stage stays
    in `fwd_cache` until its backward pass. Sent tensors stay until the schedule waits for the send: after the next
    pass in 1F1B, after all passes of a direction in GPipe, and at the end of the step in all other schedules.
    """

    def __init__(self, passes: Loop, waiting: InFlightMicroBatches) -> None:
        self.waiting, self.count = waiting, passes.count
        directions = [
            _direction(passes.body, kind, back, waiting.groups) for kind in (Receive, Send) for back in (False, True)
        ]
        self.received, self.sent = directions[:2], directions[2:]
        if waiting.groups != ONE and not any(loop.body.ops[0].kind == Send() for loop in _loops(passes.body)):
            self.received = [direction._replace(lacking=ZERO) for direction in self.received]  # receives from itself
        layers = [loop for loop in _loops(passes.body) if loop.op.phase == "forward"]
        self.kept = any(f.storage in {t.storage for t in loop.saved} for loop in layers for f in loop.carries)

    @property
    def buffers(self) -> Poly:
        """Receive buffer bytes."""
        return self.count * total(direction.of(self.waiting.groups, ONE) for direction in self.received)

    def extra_bytes(self, held: Held, *, later: bool) -> Poly:
        """Return the bytes kept in addition to the saved tensors, minus the saved tensors that lie in receive buffers.

        `held` counts the in-flight micro-batches during a pass. `later` is true for the last such peak, when all
        forward passes are done, and all backward passes except those in flight.
        """
        groups, schedule = self.waiting.groups, self.waiting.schedule
        waits, weights = held[0] + groups, held[1]
        first, last = (n if groups == ONE else smaller(n, waits) for n in self.waiting.ends)
        buffered = self.sent[0].of(waits + weights, last + held[5])
        if later and schedule not in ("1f1b", "gpipe"):
            buffered = self.sent[0].of(groups, ONE) * self.count
        if later and schedule != "1f1b":
            buffered = buffered + self.sent[1].of(groups, ONE) * self.count - self.sent[1].of(waits, first)
        return buffered - self.received[0].of(waits + weights, first + held[3]) if self.kept else buffered


def _direction(body: Graph, kind: type, back: bool, groups: Poly) -> _Direction:
    """Return the bytes that `kind` ops transfer in one direction of a pass, between groups and at the ends."""
    ends = _bytes(body.ops, kind, back)
    between = [(n, loop.count) for loop in _loops(body) if (n := _bytes(loop.body.ops, kind, back))]
    each = total(n for n, _ in between) or ends
    return _Direction(each, each * groups - total(n * count for n, count in between) - ends)


def _loops(body: Graph) -> list[Loop]:
    """Return the loops in a pass."""
    return [op.loop for op in body.ops if op.loop is not None]


def _bytes(ops: Iterable[Op], kind: type, back: bool) -> Poly:
    """Return the bytes that `kind` ops transfer in one direction."""
    transfers = (op for op in ops if isinstance(op.kind, kind) and (op.phase != "forward") == back)
    return total((op.operands or op.results)[0].storage.bytes for op in transfers)


# -- saved tensors -----------------------------------------------------------------------------------------------------


def saved_bytes(graph: Graph, /, **dims: int) -> dict[str, Formula]:
    """Return the bytes that the forward pass leaves for the backward pass.

    Parameters
    ----------
    graph : Graph
        A step, of `training_step` or `backward`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    dict of str to int or sympy.Expr
        Bytes saved per iteration by each forward loop, by loop name. Nested loops have their own entries. Tensors saved
        outside loops are under the name "". Inputs, parameters and buffers do not count.

    Raises
    ------
    GraphError
        If the graph has no backward pass.
    BindingError
        If a size cannot be bound.

    Notes
    -----
    A storage counts if a forward op produces it and a backward or recompute op reads it. It counts once and in full,
    even if only a view is read. Papers call this activation memory. Recomputed tensors do not count.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, L = cg.dims("B D F L")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     layer = lambda x: x + cg.nn.mlp(x, F)
    ...     x = cg.repeat(L, layer, cg.linear(g.input("x", (B, D)), "b d -> b e", e=D), name="layers")
    ...     g.output(cg.reduce(x, "b d -> ", "mean"))
    >>> cg.saved_bytes(cg.training_step(g))["layers"]
    2*B*D + 4*B*F
    >>> cg.saved_bytes(cg.training_step(g, checkpoint=cg.every_block()))["layers"]
    2*B*D
    """
    need_graph("saved_bytes", graph)
    if all(op.phase == "forward" for op in graph.walk()):
        raise GraphError(
            f"saved_bytes: graph {graph.name!r} has no backward pass; expected the result of training_step"
        )
    values = bindings(graph, dims)
    by_scope: dict[str, list[Storage]] = {"": list(dict.fromkeys(_saved_storages(graph)))}
    for op in graph.walk():
        if op.loop is not None and op.phase == "forward":
            by_scope[op.name] = list(dict.fromkeys((*_stacked_storages(op.loop), *_saved_storages(op.loop.body))))
    return {name: bound_answer(total(s.bytes for s in storages), values) for name, storages in by_scope.items()}


def saved_by_pass(graph: Graph) -> tuple[Poly, Poly, Poly]:
    """Return the device bytes saved by a forward pass: stacked by loops, before the loops, and after them."""
    forward_loops = [op.loop for op in graph.ops if op.loop is not None and op.phase == "forward"]
    layers = [
        loop.count * total([_of_device(_stacked_storages(loop)), *saved_by_pass(loop.body)]) for loop in forward_loops
    ]
    return total(layers), *_split_bytes(graph, _saved_storages(graph))


def saved_for_weights(graph: Graph) -> tuple[Poly, Poly, Poly]:
    """Return the bytes needed by weight gradients after the input gradients have been sent, as in `saved_by_pass`.

    Saved tensors read by weight gradients before the layers count as before.
    """
    late = behind(graph)
    produced = _produced_storages(op for op in graph.ops if op not in late) - _preexisting_storages(graph)
    read = dict.fromkeys(t for op in late for t in op.operands)
    return _of_pieces(read), *_split_bytes(graph, (t.storage for t in read if t.storage in produced))


def deferred_grad_bytes(graph: Graph) -> Poly:
    """Return the gradient bytes that backward loops keep for weight gradients."""
    read = dict.fromkeys(t for op in behind(graph) for t in op.operands)
    return _of_pieces(t for t in read if t.producer is not None and t.producer.phase != "forward")


def _of_pieces(read: Iterable[Tensor]) -> Poly:
    """Return the device bytes of stacked residuals, counting each storage once."""
    requested, pieces = dict.fromkeys(read), dict[Storage, Poly]()
    for loop in (t.producer.loop for t in requested if t.producer is not None and _is_stacked(t)):
        assert loop is not None
        stacked = {inner.storage for t, inner in zip(loop.pieces, loop.saved, strict=True) if t in requested}
        pieces |= {s: loop.count * s.bytes for s in _stacked_storages(loop) if s in stacked and not s.host}
    return total(pieces.values())


def behind(graph: Graph) -> list[Op]:
    """List the ops after the last input gradient in a pass: they compute only weight gradients."""
    ops = graph.ops
    last = max((i for i, op in enumerate(ops) if op.phase != "forward" and _passes_gradient(op)), default=len(ops))
    return [op for op in ops[last + 1 :] if op.phase != "optimizer"]


def _split_bytes(graph: Graph, storages: Iterable[Storage]) -> tuple[Poly, Poly]:
    """Return the device bytes of storages produced before the layers or as their final gradients, and of all others."""
    before: set[Storage] = set()
    for op in graph.ops:
        if op.loop is not None and op.loop.pieces:
            break
        before |= {t.storage for t in op.results}
    before |= {t.storage for op in graph.ops if op.phase != "forward" and _passes_gradient(op) for t in op.results}
    unique = dict.fromkeys(storages)
    return _of_device(s for s in unique if s in before), _of_device(s for s in unique if s not in before)


def _passes_gradient(op: Op) -> bool:
    """Whether an op passes a gradient to earlier layers or to other ranks."""
    return isinstance(op.kind, Send) or (op.loop is not None and bool(op.loop.starts))


def _of_device(storages: Iterable[Storage]) -> Poly:
    """Return the bytes in device memory."""
    return total(s.bytes for s in dict.fromkeys(storages) if not s.host)


def _saved_storages(graph: Graph) -> Iterator[Storage]:
    """Yield the storages that forward ops produce and backward or recompute ops read, in one graph or body."""
    produced = _produced_storages(op for op in graph.ops if op.phase == "forward") - _preexisting_storages(graph)
    for op in graph.ops:
        if op.phase in ("backward", "recompute"):
            yield from (t.storage for t in op.operands if t.storage in produced)


def _stacked_storages(loop: Loop) -> Iterator[Storage]:
    """Yield the storages that a loop stacks per iteration: produced in its body or carried, not captured."""
    per_iteration = (_produced_storages(loop.body.ops) - _preexisting_storages(loop.body)) | {
        f.storage for f in loop.carries
    }
    yield from (t.storage for t in loop.saved if t.storage in per_iteration)


def _produced_storages(ops: Iterable[Op]) -> set[Storage]:
    """Return the storages that ops produce, except the stacked residuals of inner loops."""
    return {t.storage for op in ops for t in op.results if not _is_stacked(t)}


def _preexisting_storages(graph: Graph) -> set[Storage]:
    """Return the storages that no op in a graph or body produces."""
    return {t.storage for t in graph.tensors if t.producer is None}


def _is_stacked(t: Tensor) -> bool:
    """Whether a tensor is a stacked residual of a loop."""
    return t.producer is not None and t.producer.loop is not None and t in t.producer.loop.pieces


# -- live ranges -------------------------------------------------------------------------------------------------------


# -- live ranges -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class LiveRange:
    """The live range of a storage."""

    name: str
    """name of the tensor that allocated it, with its iteration"""
    role: str
    """input, param, buffer, cache, state, gradient, output, activation or temporary"""
    bytes: Poly
    """size in bytes"""
    born: int | None
    """step that allocates it, None if it exists from the start"""
    dies: int | None
    """last step that needs it, None if it lives to the end"""
    many: Poly = ONE
    """number of equal storages that this entry represents"""
    made: tuple[object, ...] = ()
    """identity: its storage in the body, and the iteration of each enclosing loop"""
    host: bool = False
    """whether it is in host memory"""

    def every(self) -> Iterator[LiveRange]:
        """Yield itself; a family yields its members."""
        yield self


class LoopStorages:
    """Per-iteration storages that a loop stacks: one live range per unrolled iteration, and the rest as one."""

    def __init__(self, slots: Sequence[HeldStorage], unplayed: list[LiveRange]) -> None:
        self.slots = slots
        self.unplayed = unplayed

    def every(self) -> Iterator[LiveRange]:
        """Yield the live ranges of all members."""
        yield from self.played()
        yield from self.unplayed

    def played(self) -> Iterator[LiveRange]:
        """Yield the live ranges that belong to unrolled iterations."""
        for slot in self.slots:
            if slot is not None:
                yield from slot.every()


# The storage behind a tensor; None for an accumulator before its first term.
HeldStorage = LiveRange | LoopStorages | None


def piece(held: HeldStorage, i: int) -> HeldStorage:
    """Return the member of a family that iteration `i` reads, or the storage that all iterations share."""
    return held.slots[i] if isinstance(held, LoopStorages) else held


@dataclass
class UnplayedIterations:
    """Per-iteration storages for the iterations of a loop that are not unrolled."""

    start: int
    """first step of the loop"""
    depth: int
    """number of enclosing loops"""
    turn: int = 0
    """first step after the iterations that are not unrolled"""
    count: Poly = ZERO
    """number of iterations that are not unrolled"""
    middle: int = 0
    """iteration that represents them, in execution order"""
    read: Sequence[HeldStorage] = ()
    """families that the loop reads"""
    lives: dict[tuple[object, ...], LiveRange] = field(default_factory=dict)

    def family(self, slots: Sequence[HeldStorage], *, reverse: bool) -> LoopStorages:
        """Return the family behind a result whose slices from unrolled iterations are `slots`."""
        member = slots[-1 - self.middle if reverse else self.middle] if self.count and slots else None
        unplayed = [life for m in member.every() for life in self.others(m)] if member is not None else []
        return LoopStorages(slots, list(dict.fromkeys(unplayed)))

    def others(self, member: LiveRange) -> Iterator[LiveRange]:
        """Yield the entries that represent a storage in the iterations that are not unrolled."""
        for family in self.read:  # a slice updated in place
            if isinstance(family, LoopStorages) and any(member is life for life in family.played()):
                yield from family.unplayed
                return
        if member.born is None or member.born < self.start:
            return  # shared by all iterations
        storage, *label = member.made
        key = (storage, *label[: self.depth], *label[self.depth + 1 :])
        if key not in self.lives:
            last = str(self.count + self.middle).replace(" ", "")
            label = [*label[: self.depth], f"[{self.middle + 1}..{last}]", *label[self.depth + 1 :]]
            name = getattr(storage, "name", "") + "".join(map(str, label))
            bytes_, pieces = member.bytes * self.count, member.many * self.count
            identity = (storage, *label)
            self.lives[key] = LiveRange(name, member.role, bytes_, self.turn, self.turn, pieces, identity, member.host)
        yield self.lives[key]


# -- peak candidates ---------------------------------------------------------------------------------------------------


class _Named(Protocol):
    """Anything that names the op it belongs to."""

    @property
    def op(self) -> str | None: ...


Label = TypeVar("Label", bound=_Named)


def corners(candidates: Iterable[tuple[Poly, Label]]) -> list[tuple[Poly, Label]]:
    """Drop candidates for the maximum that never exceed a convex combination of two others.

    Candidates are in program order. Layers declared one by one add residuals or gradients of equal size, so only the
    first and the last layer remain. Ops whose names differ only in numbers are compared layer by layer. The names only
    guide the search: each dropped candidate is dominated by candidates that are kept.
    """
    rows: dict[str, list[tuple[int, tuple[Poly, Label]]]] = {}
    for i, (p, owner) in enumerate(candidates):
        row = rows.setdefault(re.sub(r"\d+", "", owner.op or ""), [])
        while len(row) > 1 and _between(row[-2][1][0], row[-1][1][0], p):
            row.pop()
        row.append((i, (p, owner)))
    return [candidate for _, candidate in sorted((item for row in rows.values() for item in row), key=lambda c: c[0])]


def _between(a: Poly, b: Poly, c: Poly) -> bool:
    """Whether `b <= share*a + (1 - share)*c` term by term for some share from 0 to 1."""
    first, middle, last = _integer_terms(a, b, c)
    m = next((m for m in {**first, **last} if first.get(m, 0) != last.get(m, 0)), None)
    if m is None:
        return middle == first
    numerator, divisor = middle.get(m, 0) - last.get(m, 0), first.get(m, 0) - last.get(m, 0)
    if divisor < 0:
        numerator, divisor = -numerator, -divisor
    if not 0 <= numerator <= divisor:
        return False
    for k in {**first, **middle, **last}:
        difference = numerator * first.get(k, 0) + (divisor - numerator) * last.get(k, 0) - divisor * middle.get(k, 0)
        # an atom such as a ceiling can have any value: its coefficients have to be equal
        if difference < 0 or (difference and any(name[0] == "~" for name, _ in k)):
            return False
    return True


def _integer_terms(*ps: Poly) -> Iterator[Mapping[Monomial, Rational]]:
    """Yield the terms of polynomials scaled by a common factor to integers, since fractions are much slower."""
    scale = lcm(*(c.denominator for p in ps for c in p.terms.values()))
    for p in ps:
        yield p.terms if scale == 1 else {m: c.numerator * (scale // c.denominator) for m, c in p.terms.items()}


# -- unrolling ---------------------------------------------------------------------------------------------------------

#: Number of iterations to unroll for a loop.
Copies = Callable[[Loop], int]


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the program, at one iteration of the enclosing loops."""

    op: Op
    """the op"""
    where: str
    """its name, with the iteration of each enclosing loop"""
    workspace: Poly
    """workspace in bytes, in addition to operands and results"""


@dataclass
class Program:
    """A graph in execution order, with loops partly unrolled."""

    steps: list[Step] = field(default_factory=list)
    """Ops in order."""
    lives: list[LiveRange] = field(default_factory=list)
    """Device storages, those that live throughout first."""
    away: list[LiveRange] = field(default_factory=list)
    """Host storages."""


def _handed_on(loop: Loop) -> dict[int, int]:
    """Return the carries that a body forwards to another position: destination index to source index."""
    entries = {f.storage: i for i, f in enumerate(loop.carries)}
    return {i: entries[t.storage] for i, t in enumerate(loop.nexts) if entries.get(t.storage, i) != i}


def copies_needed(loop: Loop) -> int:
    """Return how many iterations represent all of them: the first, one in the middle, the last.

    A body that permutes its carries needs more: a storage produced in one iteration then lives through several others,
    which have to be unrolled before and after the middle one.
    """
    if not _leaves_storages(loop):
        return 3 + 2 * len(_handed_on(loop))
    # stacked residuals change from one iteration to the next: unroll two in the middle, at either end
    copies = 4 + 2 * max(len(_handed_on(inner)) for inner in _leaving(loop))
    # a loop bounded by the index of an outer loop needs its iterations within those after the middle
    root = loop.op.graph.root
    if "until" not in root.cache:
        root.cache["until"] = any(inner.until for inner in loops(root))
    return copies + 2 * int(root.cache["until"])


def _leaves_storages(loop: Loop) -> bool:
    """Whether a loop writes or reads one storage per iteration that does not live throughout."""
    return bool(loop.saved) or any(t.storage.pieces and t.role in ("activation", "formal") for t in loop.xs)


def _leaving(loop: Loop) -> list[Loop]:
    """List the loops with per-iteration storages: all of them unroll the same number of iterations."""
    root = loop.op.graph.root
    if "leaving" not in root.cache:
        root.cache["leaving"] = [inner for inner in loops(root) if _leaves_storages(inner)]
    leaving: list[Loop] = root.cache["leaving"]
    return leaving


def period(loop: Loop) -> int:
    """Return the number of iterations after which permuted carries are back in their positions."""
    return lcm(*map(_period, _leaving(loop) if _leaves_storages(loop) else [loop]))


def _period(loop: Loop) -> int:
    moves, out = _handed_on(loop), 1
    for start in moves:
        position, length = moves[start], 1
        while position in moves and position != start and length <= len(moves):
            position, length = moves[position], length + 1
        out = lcm(out, length) if position == start else out
    return out


class _Player(LoopExecutor[tuple[str, ...]]):
    """Records the first and last use of each storage. The place of an op is the list of enclosing iterations."""

    def __init__(self, copies: Copies, values: Mapping[str, Poly]) -> None:
        super().__init__()
        self.copies = copies
        self.values = values
        self.program = Program()
        self.passes: list[int] = []
        """first steps of the micro-batches of a pipeline stage"""
        self.unplayed: list[UnplayedIterations] = []
        """for each enclosing loop, the storages of iterations that are not unrolled"""

    def key(self, t: Tensor) -> Storage:
        return t.storage

    def sources(self, graph: Graph, env: dict[Storage, HeldStorage], times: Poly = ONE) -> None:
        """Add storages that live throughout; inside a loop body, for all iterations at once."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                pieces = times * numel(t.sizes[: t.storage.pieces])
                life = env[t.storage] = LiveRange(t.name, t.role, t.storage.bytes * times, None, None, pieces)
                life.host = t.storage.host
                self.program.lives.append(life)
        for op in graph.ops:
            if op.body is not None:
                self.sources(op.body, env, times if op.loop is None else times * op.loop.count)

    def step(self, op: Op, env: Env, place: tuple[str, ...]) -> None:
        now = len(self.program.steps)
        for t in op.operands:
            self.touch(env[t.storage], now)
        for t in op.results:
            if t.storage not in env:
                env[t.storage] = self.birth(t, place, op.phase)
            self.touch(env[t.storage], now)
        workspace = ZERO if op.on_host else op.workspace
        self.program.steps.append(Step(op, op.name + "".join(place), workspace))

    def birth(self, t: Tensor, place: tuple[str, ...], phase: str) -> LiveRange:
        role, now = "activation" if phase == "forward" else "temporary", len(self.program.steps)
        pieces = numel(t.sizes[: t.storage.pieces])
        identity = (t.storage, *place)
        life = LiveRange(t.name + "".join(place), role, t.storage.bytes, now, now, pieces, identity, t.storage.host)
        self.program.lives.append(life)
        return life

    @staticmethod
    def touch(held: HeldStorage, now: int) -> None:
        for life in held.every() if held is not None else ():
            if life.dies is not None:
                life.dies = max(life.dies, now)

    def loop(self, loop: Loop, env: Env, place: tuple[str, ...]) -> None:
        self.unplayed.append(UnplayedIterations(len(self.program.steps), len(place)))
        super().loop(loop, env, place)
        self.program.lives += self.unplayed.pop().lives.values()

    def turns(self, loop: Loop, xs: Sequence[HeldStorage]) -> Iterator[PlayedIteration]:
        unplayed = self.unplayed[-1]
        count, times = loop.count.bind(self.values), self.copies(loop)
        if loop.until:
            count, times = self.before(loop)
        middle = times - times // 2 if loop.reverse else times // 2
        unplayed.count, unplayed.middle, unplayed.read = count - times, middle - 1, xs
        for i in range(times):
            if i == middle:
                unplayed.turn = len(self.program.steps)
                for life in (life for family in xs if isinstance(family, LoopStorages) for life in family.unplayed):
                    self.touch(life, unplayed.turn - 1)  # iterations that are not unrolled read their slices
            yield PlayedIteration(times - 1 - i if loop.reverse else i, times, count)

    def before(self, loop: Loop) -> tuple[Poly, int]:
        """Return how many iterations of the enclosing loop precede the current one, and how many to unroll."""
        around = self.around[-1]
        index_played, times, count = around.at, around.times, around.count
        index = (
            as_poly(index_played)
            if count.constant == times or index_played < times // 2
            else count - (times - index_played)
        )
        needed = copies_needed(loop)
        return index, needed if index.constant is None else min(int(index.constant), needed)

    def stack(self, loop: Loop, t: Tensor, env: Env, place: tuple[str, ...]) -> HeldStorage:
        # allocated before the first slice is written; if several loops write into it, before all of them
        return env.get(t.storage) or self.birth(t, place, loop.op.phase)

    def slice(self, loop: Loop, value: HeldStorage, turn: PlayedIteration, place: tuple[str, ...]) -> HeldStorage:
        return piece(value, turn.at)

    def inside(self, env: Env) -> Env:
        return {**env}

    def iteration(
        self, loop: Loop, env: Env, turn: PlayedIteration, stacks: Sequence[HeldStorage], place: tuple[str, ...]
    ) -> None:
        env |= {t.storage: life for t, life in zip(loop.ys, stacks, strict=True)}
        if not place and loop.op.phase == "forward":
            self.passes.append(len(self.program.steps))
        self.play(loop.body.ops, env, (*place, f"[{_iteration(turn)}]"))

    def hold(self, graph: Graph, waiting: InFlightMicroBatches) -> None:
        """Add the tensors that other in-flight micro-batches hold, before and after the first gradients exist.

        A pass runs through all layer groups of a rank, but only one group is unrolled and the others count as held.
        After the pass, the groups that it freed are held again. Gradients kept for weight gradients exist for one group
        at a time.
        """
        if waiting.schedule == FORWARD:  # each batch has its own caches
            bytes_ = cached(graph) * (waiting.micro_batches - 1)
            self.program.lives.append(LiveRange("other batches", "cache", bytes_, 0, len(self.program.steps) - 1))
            return
        loop = next((op.loop for op in graph.ops if op.loop is not None and is_pass(op.loop.body)), None)
        if loop is None:
            return
        ready, of_weights = saved_by_pass(loop.body), saved_for_weights(loop.body)
        each = [p for pair in zip(ready, of_weights, strict=True) for p in pair]
        each[:2] = (p / waiting.groups for p in each[:2])
        steps, loops = self.program.steps, {*loop.body.ops}
        lasts = {op for op in loop.body.ops if isinstance(op.kind, KeepAlive)}  # saved tensors may live until these
        group_grads = deferred_grad_bytes(loop.body) / waiting.groups
        other_grads = group_grads * (waiting.groups - 1)
        handing = {op for op in loop.body.ops if op.phase != "forward" and op.loop is not None and op.loop.pieces}
        end = max(i for i, step in enumerate(steps) if step.op.phase != "optimizer")
        buffers = PipelineBuffers(loop, waiting) if waiting.handed else None
        if buffers is not None:
            self.program.lives.append(LiveRange("received", "buffer", buffers.buffers, None, None))
        for i, (start, stop) in enumerate(pairwise((*self.passes, end + 1))):
            times = waiting.later if i else waiting.first
            turn = next((k for k in range(start, stop) if steps[k].op.phase != "forward"), stop)
            # a pass that computes all gradients at once leaves nothing for separate weight gradients
            frees_grads = any(saved[6] for saved in times)
            for begin, last, freed in (
                ((start, turn, ZERO), (turn, stop, group_grads)) if frees_grads else ((start, stop, ZERO),)
            ):
                amounts = [total(map(mul, saved, each)) - saved[6] * freed for saved in times]
                if buffers is not None:
                    amounts = [
                        n + buffers.extra_bytes(saved, later=bool(i)) for n, saved in zip(amounts, times, strict=True)
                    ]
                bytes_ = amounts[0] if len(amounts) == 1 else poly(extremum([(p, Owner()) for p in amounts]))
                self.program.lives.append(LiveRange("waiting", "activation", bytes_, begin, last - 1))
            within = (k for k in range(start, stop) if steps[k].op.graph.owner in loops or steps[k].op in lasts)
            behind = max(within, default=stop)
            if waiting.groups != ONE and behind + 1 < stop:
                refilled = each[0] * (waiting.groups - 1)
                self.program.lives.append(LiveRange("other groups", "activation", refilled, behind + 1, stop - 1))
            if waiting.groups != ONE and other_grads:
                hands = [k for k in range(start, stop) if steps[k].op.graph.owner in handing]
                first = steps[hands[0]].where.removeprefix(steps[hands[0]].op.name)
                begin = next((k for k in hands if not steps[k].where.endswith(first)), hands[-1])
                self.program.lives.append(LiveRange("other groups", "temporary", -other_grads, begin, behind))

    def collected(self, loop: Loop, rows: Sequence[HeldStorage]) -> HeldStorage:
        return self.unplayed[-1].family(rows, reverse=loop.reverse)


def _iteration(turn: PlayedIteration) -> str:
    """Name an iteration by its index, symbolically where the trip count is a symbol."""
    i, times, count = turn.at, turn.times, turn.count
    if count.constant == times or i < times // 2:
        return str(i)
    middle = times % 2 and i == times // 2
    return "i" if middle else str(count - (times - i)).replace(" ", "")


def play(
    graph: Graph, copies: Copies = copies_needed, values: Mapping[str, Poly] = MappingProxyType({}),
    waiting: InFlightMicroBatches | None = None,
) -> Program:  # fmt: skip
    """Unroll a graph into a program; `copies` returns the number of iterations to unroll for each loop.

    Bound sizes in `values` name the iterations. `waiting` describes the other pipeline stages, by default those of the
    graph.
    """
    player = _Player(copies, values)
    env: dict[Storage, HeldStorage] = {}
    player.sources(graph, env)
    player.play(graph.ops, env, ())
    waiting = waiting or graph.waiting
    if waiting is not None:
        player.hold(graph, waiting)
    for role, results in (("output", graph.outputs), ("gradient", graph.gradients.values())):
        for t in results:
            storage_lives = env[t.storage]
            for life in storage_lives.every() if storage_lives is not None else ():
                if life.born is not None:
                    life.role, life.dies = role, None
    program = player.program
    program.away = [life for life in program.lives if life.host]
    program.lives = [life for life in program.lives if not life.host]
    return program


def copies_for(values: Mapping[str, Poly], extra: int = 0) -> Copies:
    """Return the unrolling rule for bound sizes; loops with an open trip count unroll `extra` more iterations."""

    def copies(loop: Loop) -> int:
        count, needed = loop.count.bind(values).constant, copies_needed(loop)
        if count is None:
            return needed + extra % period(loop)
        return int(count) if count <= needed else needed + (int(count) - needed) % period(loop)

    return copies


# -- live bytes --------------------------------------------------------------------------------------------------------

#: Projects a program onto one memory, such as host memory.
View = Callable[[Graph, Program], Program] | None


class Instant(NamedTuple):
    """A step of a program; -1 is before the first step."""

    program: Program
    at: int

    @property
    def op(self) -> str | None:
        """Name of the running op."""
        return self.program.steps[self.at].where if self.at >= 0 else None

    def owner(self) -> Owner:
        """Return the owner of a peak at this step, with live bytes by role."""
        if self.at < 0:
            return Owner(roles=self.roles())
        step = self.program.steps[self.at]
        return Owner(step.where, step.op.phase, label(step.op), self.roles())

    def roles(self) -> tuple[tuple[str, Poly], ...]:
        """Return the live bytes by storage role."""
        by_role: dict[str, list[Poly]] = {}
        for life in self.program.lives:
            if (life.born is None or life.born <= self.at) and (life.dies is None or life.dies >= self.at):
                by_role.setdefault(life.role, []).append(life.bytes)
        if self.at >= 0 and self.program.steps[self.at].workspace:
            by_role.setdefault("workspace", []).append(self.program.steps[self.at].workspace)
        return tuple((role, total(amounts)) for role, amounts in by_role.items())


def label(op: Op) -> str:
    """Describe an op for readers: scope, operation, parameter or gradient, and phase."""
    produced = {t.storage for t in op.results}
    param = next((t.name for t, grad in op.graph.root.gradients.items() if grad.storage in produced), None)
    read_param = next(
        (t.name for t in op.operands if t.role == "param" and not t.name.startswith(f"{op.scope}/")), None
    )
    about = f" for the gradient of {param}" if param else f" with {read_param}" if read_param else ""
    scope, _, last = op.name.rpartition("/")
    scope = scope if op.scope in ("", op.name) else op.scope  # a kernel is its own scope
    return f"{scope}: {re.sub(r'_[0-9]+$', '', last)}{about} ({op.phase})".removeprefix(": ")


def live_bytes(program: Program) -> Iterator[tuple[int, Poly]]:
    """Yield the live bytes at each step that allocates a storage or needs workspace."""
    births: dict[int, list[Poly]] = {}
    deaths: dict[int, list[Poly]] = {}
    start = [life.bytes for life in program.lives if life.born is None]
    for life in program.lives:
        if life.born is not None:
            births.setdefault(life.born, []).append(life.bytes)
            if life.dies is not None:
                deaths.setdefault(life.dies, []).append(life.bytes)
    live: dict[Monomial, Rational] = dict(total(start).terms)
    if not program.steps:
        yield -1, Poly(dict(live))
    for now, step in enumerate(program.steps):
        for p in births.get(now, ()):
            _accumulate(live, p, 1)
        if now in births or now == 0 or step.workspace:
            amount = Poly(dict(live))
            yield now, amount + step.workspace if step.workspace else amount
        for p in deaths.get(now, ()):
            _accumulate(live, p, -1)


def _accumulate(live: dict[Monomial, Rational], p: Poly, sign: int) -> None:
    for m, c in p.terms.items():
        value = live.get(m, 0) + sign * c
        if value:
            live[m] = value
        else:
            del live[m]


@collection_paused()
def live_cases(graph: Graph, values: Mapping[str, Poly], view: View = None) -> list[tuple[Poly, Owner]]:
    """Return the live bytes at each op that can be the peak, without dominated ones.

    Only bound trip counts matter here, not other sizes. `view` selects a memory of the program.
    """
    every = list(loops(graph))
    # if a body permutes carries, an open trip count can leave them in any position
    ends = lcm(*(period(loop) for loop in every if loop.count.bind(values).constant is None))
    rules = [copies_for(values, extra) for extra in range(ends)]
    key: tuple[object, ...] = ("peak", view, tuple(copies(loop) for copies in rules for loop in every))
    counts: Mapping[str, Poly] = {}
    if any(loop.until for loop in every):  # the iteration index bounds these loops
        counts = values
        key = (*key, tuple(loop.count.bind(values) for loop in every))
    if key not in graph.cache:
        programs = [play(graph, copies, counts) for copies in rules]
        if view is not None:
            programs = [view(graph, program) for program in programs]
        # a generator, since most candidates are equal and only the first of equal ones is kept
        candidates = ((p, Instant(program, step)) for program in programs for step, p in live_bytes(program))
        undominated = prune(corners(candidates), Bindings(graph).validity.known)
        graph.cache[key] = [(p, instant.owner()) for p, instant in undominated]
    out: list[tuple[Poly, Owner]] = graph.cache[key]
    return out


def closed(graph: Graph, values: Bindings, view: View = None) -> tuple[Validity, ...]:
    """Return the conditions under which closed forms for live bytes hold, where trip counts are open."""
    sure = {name: count for name, count in _sufficient_counts(graph, values).items() if count > 1}
    conditions = _of_several(graph, values, view)
    all_conditions = values.validity.conditions
    if conditions:
        all_conditions = Conditions(all_conditions.relations, (*all_conditions.declared, *conditions))
    if not sure:
        return (replace(values.validity, conditions=all_conditions),) if conditions else values.held
    key = ("closed", view, values.validity.values)

    def holds(chosen: dict[str, int]) -> bool:
        # the graph may have changed since
        return graph.cache.get(key) is counts and _has_same_result(graph, values, chosen, view)

    counts: LoopCounts = graph.cache.setdefault(key, LoopCounts(sure, holds))
    return (replace(values.validity, conditions=all_conditions, counts=counts),)


def _of_several(graph: Graph, values: Mapping[str, Poly], view: View) -> tuple[Condition, ...]:
    """Return the trip counts from which a form holds if they are not in one symbol, such as L/P layers per stage."""
    key = ("several", view, tuple(sorted((k, p) for k, p in values.items())))
    if key not in graph.cache:
        counts: dict[Poly, int] = {}
        for loop in loops(graph):
            count = loop.count.bind(values)
            names = sorted(count.names())
            if len(names) > 1 or (names and not (count * poly(symbol(*names))).names()):
                counts[count] = max(counts.get(count, 1), copies_needed(loop))
        smallest = {count: _smallest_count(graph, values, view, count, copies) for count, copies in counts.items()}
        graph.cache[key] = tuple(
            Condition(
                count - (n - 1), f"number of loop iterations beyond {n - 1} (the formula holds from {n})", 1, True,
                frozenset(count.names()),
            )
            for count, n in smallest.items() if n > 1
        )  # fmt: skip
    out: tuple[Condition, ...] = graph.cache[key]
    return out


def _smallest_count(graph: Graph, values: Mapping[str, Poly], view: View, count: Poly, copies: int) -> int:
    """Return the smallest trip count for which a form holds, tested at sizes that give this count."""
    for name in sorted(count.names()):
        one = poly(symbol(name))
        for factor, up in ((count / one, True), (count * one, False)):
            if name in factor.names():
                continue
            for k in range(copies - 1, 0, -1):
                size = poly(k) / factor if up else factor / k
                # only integer sizes can occur
                if (size.names() or size.is_size) and not _has_same_result(graph, values, {name: size}, view):
                    return k + 1
            return 1
    return 1


def _open_counts(graph: Graph, values: Mapping[str, Poly]) -> dict[str, list[tuple[Poly, Loop]]]:
    """Group the loops whose trip count is open in a single symbol by that symbol."""
    out: dict[str, list[tuple[Poly, Loop]]] = {}
    for loop in loops(graph):
        count = loop.count.bind(values)
        if len(count.names()) == 1:
            (name,) = count.names()
            out.setdefault(name, []).append((count, loop))
    return out


def _sufficient_counts(graph: Graph, values: Mapping[str, Poly]) -> dict[str, int]:
    """Return for each trip-count symbol a value at which all iterations that can differ exist."""
    out = {}
    for name, open_loops in sorted(_open_counts(graph, values).items()):
        value = 1
        while any((p.bind({name: as_poly(value)}).constant or 0) < copies_needed(loop) for p, loop in open_loops):
            value += 1
        out[name] = value
    return out


def holds_from(graph: Graph, values: Mapping[str, Poly], view: View = None) -> dict[str, int]:
    """Return for each trip-count symbol the smallest value from which the formulas hold.

    With the symbol bound, a formula has to equal the result for loops with that many iterations. Symbols are tested one
    by one, with the others open or at their smallest valid value. Counts in several symbols, such as L/P, become
    conditions of the formulas instead.
    """
    smallest: dict[str, int] = {}
    for name, value in _sufficient_counts(graph, values).items():
        tried = [
            dict(zip(smallest, picked, strict=True)) for picked in product(*((None, k) for k in smallest.values()))
        ]
        while value > 1 and all(_has_same_result(graph, values, {**others, name: value - 1}, view) for others in tried):
            value -= 1
        smallest[name] = value
    return smallest


def _has_same_result(
    graph: Graph, values: Mapping[str, Poly], chosen: Mapping[str, int | Poly | None], view: View
) -> bool:
    """Whether the formula with trip counts substituted equals the result with loops of that length."""
    bound = {**values, **{name: poly(k) for name, k in chosen.items() if k is not None}}
    relations = Bindings(graph, bound).validity.known
    formula, played = (
        dict.fromkeys(p.bind(bound) for p, _ in live_cases(graph, sizes, view)) for sizes in (values, bound)
    )
    # most occur in both, which settles them
    return all(
        reached_by([p for p in ps if p not in others], others, relations)
        for ps, others in ((formula, played), (played, formula))
    )
