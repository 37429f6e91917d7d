"""When each storage is born and when it dies, with the iterations of a Repeat that can differ played one by one.

Program order is the schedule. A storage lives from the op that makes it to the last op that reads it or a view of it;
inputs, parameters, buffers and caches live throughout, outputs to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from operator import mul
from types import MappingProxyType

from ..algebra.extremum import Owner, extremum
from ..algebra.polynomial import ONE, ZERO, Poly, as_poly, poly, total
from ..graph.graph import Graph
from ..graph.loop import Loop, is_pass, loops
from ..graph.op import Op
from ..graph.placement import FORWARD, Waiting
from ..graph.strides import numel
from ..graph.tensor import Storage, Tensor
from ..ops.keep import Keep
from ..ops.play import Env, Player, Turn
from .families import Family, Held, Life, Rest, piece
from .handed import Handed
from .params import cached
from .saved import handed_back, left, left_for_weights

__all__ = ["Copies", "Life", "Program", "Step", "copies_for", "copies_needed", "period", "play"]


#: How many iterations to play of a loop.
Copies = Callable[[Loop], int]


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the program, at one iteration of the loops around it."""

    op: Op
    """the op"""
    where: str
    """its name, with the iteration of each loop around it"""
    workspace: Poly
    """bytes that it needs beside operands and results"""


@dataclass
class Program:
    """A graph in the order in which it runs, loops played out as often as asked."""

    steps: list[Step] = field(default_factory=list)
    """Ops in order."""
    lives: list[Life] = field(default_factory=list)
    """Storages of the device, those that live throughout first."""
    away: list[Life] = field(default_factory=list)
    """Storages of the host."""


def _handed_on(loop: Loop) -> dict[int, int]:
    """Carries that a body hands on in another place: where each goes, and which one it was."""
    entries = {f.storage: i for i, f in enumerate(loop.carries)}
    return {i: entries[t.storage] for i, t in enumerate(loop.nexts) if entries.get(t.storage, i) != i}


def copies_needed(loop: Loop) -> int:
    """Return how many iterations of a loop stand for all of them: the first, one in the middle, the last.

    More where a body hands its carries around: what is made in one iteration then lives through some more, and the
    one in the middle needs as many before it and after it.
    """
    if not _leaves_storages(loop):
        return 3 + 2 * len(_handed_on(loop))
    # what an iteration leaves behind changes from one to the next: two in the middle, at either end, are looked at
    most = 4 + 2 * max(len(_handed_on(other)) for other in _leaving(loop))
    # a loop up to the iteration of another one has as many iterations as it needs in those behind the middle
    root = loop.op.graph.root
    if "until" not in root.cache:
        root.cache["until"] = any(other.until for other in loops(root))
    return most + 2 * int(root.cache["until"])


def _leaves_storages(loop: Loop) -> bool:
    """Whether a loop makes, or reads, one storage an iteration that does not live throughout."""
    return bool(loop.saved) or any(t.storage.pieces and t.role in ("activation", "formal") for t in loop.xs)


def _leaving(loop: Loop) -> list[Loop]:
    """List the loops of a graph that leave storages behind: as many iterations are looked at of each of them."""
    root = loop.op.graph.root
    if "leaving" not in root.cache:
        root.cache["leaving"] = [other for other in loops(root) if _leaves_storages(other)]
    found: list[Loop] = root.cache["leaving"]
    return found


def period(loop: Loop) -> int:
    """Return after how many iterations the carries that a body only exchanges are back in their places."""
    return lcm(*map(_period, _leaving(loop) if _leaves_storages(loop) else [loop]))


def _period(loop: Loop) -> int:
    moves, out = _handed_on(loop), 1
    for start in moves:
        at, length = moves[start], 1
        while at in moves and at != start and length <= len(moves):
            at, length = moves[at], length + 1
        out = lcm(out, length) if at == start else out
    return out


class _Player(Player[tuple[str, ...]]):
    """Notes of every storage its first use and its last one; a place is the iterations around, as they are named."""

    def __init__(self, copies: Copies, values: Mapping[str, Poly]) -> None:
        super().__init__()
        self.copies = copies
        self.values = values
        self.program = Program()
        self.passes: list[int] = []
        """first steps of the micro-batches of a stage of a pipeline"""
        self.rests: list[Rest] = []
        """of the loops around, what their iterations leave behind that are not played"""

    def key(self, t: Tensor) -> Storage:
        return t.storage

    def sources(self, graph: Graph, env: dict[Storage, Held], times: Poly = ONE) -> None:
        """Add what lives throughout: in a loop's body, that of all its iterations at once."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                many = times * numel(t.sizes[: t.storage.pieces])
                life = env[t.storage] = Life(t.name, t.role, t.storage.bytes * times, None, None, many)
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

    def birth(self, t: Tensor, place: tuple[str, ...], phase: str) -> Life:
        role, now = "activation" if phase == "forward" else "temporary", len(self.program.steps)
        many = numel(t.sizes[: t.storage.pieces])
        made = (t.storage, *place)
        life = Life(t.name + "".join(place), role, t.storage.bytes, now, now, many, made, t.storage.host)
        self.program.lives.append(life)
        return life

    @staticmethod
    def touch(held: Held, now: int) -> None:
        for life in held.every() if held is not None else ():
            if life.dies is not None:
                life.dies = max(life.dies, now)

    def loop(self, loop: Loop, env: Env, place: tuple[str, ...]) -> None:
        self.rests.append(Rest(len(self.program.steps), len(place)))
        super().loop(loop, env, place)
        self.program.lives += self.rests.pop().lives.values()

    def turns(self, loop: Loop, xs: Sequence[Held]) -> Iterator[Turn]:
        rest = self.rests[-1]
        count, times = loop.count.bind(self.values), self.copies(loop)
        if loop.until:
            count, times = self.before(loop)
        middle = times - times // 2 if loop.reverse else times // 2
        rest.count, rest.middle, rest.read = count - times, middle - 1, xs
        for i in range(times):
            if i == middle:
                rest.turn = len(self.program.steps)
                for life in (life for held in xs if isinstance(held, Family) for life in held.rest):
                    self.touch(life, rest.turn - 1)  # the iterations that are not played read their slices
            yield Turn(times - 1 - i if loop.reverse else i, times, count)

    def before(self, loop: Loop) -> tuple[Poly, int]:
        """Return how many iterations of the loop around come before the one that runs, and how many to play."""
        around = self.around[-1]
        at, times, count = around.at, around.times, around.count
        index = as_poly(at) if count.constant == times or at < times // 2 else count - (times - at)
        needed = copies_needed(loop)
        return index, needed if index.constant is None else min(int(index.constant), needed)

    def stack(self, loop: Loop, t: Tensor, env: Env, place: tuple[str, ...]) -> Held:
        # there before the first slice is written, one that several loops write into before the loops
        return env.get(t.storage) or self.birth(t, place, loop.op.phase)

    def slice(self, loop: Loop, value: Held, turn: Turn, place: tuple[str, ...]) -> Held:
        return piece(value, turn.at)

    def inside(self, env: Env) -> Env:
        return {**env}

    def iteration(self, loop: Loop, env: Env, turn: Turn, stacks: Sequence[Held], place: tuple[str, ...]) -> None:
        env |= {t.storage: life for t, life in zip(loop.ys, stacks, strict=True)}
        if not place and loop.op.phase == "forward":
            self.passes.append(len(self.program.steps))
        self.play(loop.body.ops, env, (*place, f"[{_iteration(turn)}]"))

    def hold(self, graph: Graph, waiting: Waiting) -> None:
        """Add what other micro-batches hold while one runs: at first before there are gradients, then with all.

        A pass goes through all groups of layers of a rank, where the others of them are held as long as one runs: those
        that it has freed on its way are held again behind it, and gradients that are left for those of weights are of
        one group at a time.
        """
        if waiting.schedule == FORWARD:  # each batch has caches of its own
            many = cached(graph) * (waiting.micro_batches - 1)
            self.program.lives.append(Life("other batches", "cache", many, 0, len(self.program.steps) - 1))
            return
        loop = next((op.loop for op in graph.ops if op.loop is not None and is_pass(op.loop.body)), None)
        if loop is None:
            return
        ready, of_weights = left(loop.body), left_for_weights(loop.body)
        each = [p for pair in zip(ready, of_weights, strict=True) for p in pair]
        each[:2] = (p / waiting.groups for p in each[:2])
        steps, loops = self.program.steps, {*loop.body.ops}
        lasts = {op for op in loop.body.ops if isinstance(op.kind, Keep)}  # until which what is saved may live
        once = handed_back(loop.body) / waiting.groups
        twice = once * (waiting.groups - 1)
        handing = {op for op in loop.body.ops if op.phase != "forward" and op.loop is not None and op.loop.pieces}
        end = max(i for i, step in enumerate(steps) if step.op.phase != "optimizer")
        handed = Handed(loop, waiting) if waiting.handed else None
        if handed is not None:
            self.program.lives.append(Life("received", "buffer", handed.buffers, None, None))
        for i, (start, stop) in enumerate(pairwise((*self.passes, end + 1))):
            times = waiting.later if i else waiting.first
            turn = next((k for k in range(start, stop) if steps[k].op.phase != "forward"), stop)
            # what makes all gradients at once leaves none of those that a pass in halves does
            at_once = any(held[6] for held in times)
            for begin, last, less in ((start, turn, ZERO), (turn, stop, once)) if at_once else ((start, stop, ZERO),):
                found = [total(map(mul, held, each)) - held[6] * less for held in times]
                if handed is not None:
                    found = [n + handed.beside(held, later=bool(i)) for n, held in zip(found, times, strict=True)]
                many = found[0] if len(found) == 1 else poly(extremum([(p, Owner()) for p in found]))
                self.program.lives.append(Life("waiting", "activation", many, begin, last - 1))
            inside = (k for k in range(start, stop) if steps[k].op.graph.owner in loops or steps[k].op in lasts)
            behind = max(inside, default=stop)
            if waiting.groups != ONE and behind + 1 < stop:
                again = each[0] * (waiting.groups - 1)
                self.program.lives.append(Life("other groups", "activation", again, behind + 1, stop - 1))
            if waiting.groups != ONE and twice:
                hands = [k for k in range(start, stop) if steps[k].op.graph.owner in handing]
                first = steps[hands[0]].where.removeprefix(steps[hands[0]].op.name)
                begin = next((k for k in hands if not steps[k].where.endswith(first)), hands[-1])
                self.program.lives.append(Life("other groups", "temporary", -twice, begin, behind))

    def collected(self, loop: Loop, rows: Sequence[Held]) -> Held:
        return self.rests[-1].family(rows, reverse=loop.reverse)


def _iteration(turn: Turn) -> str:
    """Name an iteration: its number, or what it stands for where the count is a symbol."""
    i, times, count = turn.at, turn.times, turn.count
    if count.constant == times or i < times // 2:
        return str(i)
    middle = times % 2 and i == times // 2
    return "i" if middle else str(count - (times - i)).replace(" ", "")


def play(
    graph: Graph, copies: Copies = copies_needed, values: Mapping[str, Poly] = MappingProxyType({}),
    waiting: Waiting | None = None,
) -> Program:  # fmt: skip
    """Run a graph: `copies` says how many iterations to play of each loop, and bound sizes name them.

    `waiting` is what a stage of a pipeline knows of the others, by default the graph's own.
    """
    player = _Player(copies, values)
    env: dict[Storage, Held] = {}
    player.sources(graph, env)
    player.play(graph.ops, env, ())
    waiting = waiting or graph.waiting
    if waiting is not None:
        player.hold(graph, waiting)
    for role, kept in (("output", graph.outputs), ("gradient", graph.gradients.values())):
        for t in kept:
            held = env[t.storage]
            for life in held.every() if held is not None else ():
                if life.born is not None:
                    life.role, life.dies = role, None
    program = player.program
    program.away = [life for life in program.lives if life.host]
    program.lives = [life for life in program.lives if not life.host]
    return program


def copies_for(values: Mapping[str, Poly], extra: int = 0) -> Copies:
    """Return the rule for how many iterations to play, once some sizes are bound; `extra` where a count is open."""

    def copies(loop: Loop) -> int:
        count, needed = loop.count.bind(values).constant, copies_needed(loop)
        if count is None:
            return needed + extra % period(loop)
        return int(count) if count <= needed else needed + (int(count) - needed) % period(loop)

    return copies
