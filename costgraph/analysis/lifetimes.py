"""When each storage is born and when it dies, with the iterations of a Repeat that can differ played one by one.

Program order is the schedule. A storage lives from the op that makes it to the last op that reads it or a view of it;
inputs, parameters, buffers and caches live throughout, outputs to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from types import MappingProxyType

from ..algebra.polynomial import ONE, ZERO, Poly, as_poly
from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, bound_answer
from ..graph.graph import Graph, need_graph
from ..graph.op import Op
from ..graph.sizes import bindings
from ..graph.strides import numel
from ..graph.tensor import Storage, Tensor
from ..hardware.tables import Column, Fact, Table
from ..ops.pieces import Absent, Accumulate
from .families import Family, Held, Life, Rest, piece

__all__ = ["Life", "Lifetime", "Lifetimes", "Program", "Step", "copies_needed", "lifetimes", "period", "play"]


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
    """Storages, those that live throughout first."""


def _handed_on(op: Op) -> dict[int, int]:
    """Carries that a body hands on in another place: where each goes, and which one it was."""
    body = op.body
    assert body is not None
    carries = op.attrs["carries"]
    entries = {f.storage: i for i, f in enumerate(body.formals[:carries])}
    return {i: entries[t.storage] for i, t in enumerate(body.outputs[:carries]) if entries.get(t.storage, i) != i}


def copies_needed(op: Op) -> int:
    """Return how many iterations of a Repeat stand for all of them: the first, one in the middle, the last.

    More where a body hands its carries around: what is made in one iteration then lives through some more, and the
    one in the middle needs as many before it and after it.
    """
    if not _leaves_storages(op):
        return 3 + 2 * len(_handed_on(op))
    # what an iteration leaves behind changes from one to the next: two in the middle, at either end, are looked at
    most = 4 + 2 * max(len(_handed_on(o)) for o in _leaving(op))
    # a loop up to the iteration of another one has as many iterations as it needs in those behind the middle
    root = op.graph.root
    if "until" not in root.cache:
        root.cache["until"] = any(o.attrs.get("until") for o in root.walk())
    return most + 2 * int(root.cache["until"])


def _leaves_storages(op: Op) -> bool:
    """Whether a loop makes, or reads, one storage an iteration that does not live throughout."""
    first = op.attrs["carries"]
    read = op.operands[first : first + op.attrs["xs"]]
    return bool(op.attrs.get("saved")) or any(t.storage.pieces and t.role in ("activation", "formal") for t in read)


def _leaving(op: Op) -> list[Op]:
    """List the loops of a graph that leave storages behind: as many iterations are looked at of each of them."""
    root = op.graph.root
    if "leaving" not in root.cache:
        loops = (o for o in root.walk() if o.loop is not None)
        root.cache["leaving"] = [o for o in loops if _leaves_storages(o)]
    found: list[Op] = root.cache["leaving"]
    return found


def period(op: Op) -> int:
    """Return after how many iterations the carries that a body only exchanges are back in their places."""
    return lcm(*map(_period, _leaving(op) if _leaves_storages(op) else [op]))


def _period(op: Op) -> int:
    moves, out = _handed_on(op), 1
    for start in moves:
        at, length = moves[start], 1
        while at in moves and at != start and length <= len(moves):
            at, length = moves[at], length + 1
        out = lcm(out, length) if at == start else out
    return out


class _Player:
    """Runs a graph step by step, keeping track of which storage stands behind each tensor."""

    def __init__(self, copies: Callable[[Op], int], values: Mapping[str, Poly]) -> None:
        self.copies = copies
        self.values = values
        self.program = Program()
        self.around: list[tuple[int, int, Poly]] = []
        """iteration of each loop around, of how many that are played, and the count"""

    def sources(self, graph: Graph, env: dict[Storage, Held], times: Poly = ONE) -> None:
        """Add what lives throughout: in a Repeat's body, that of all its iterations at once."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                many = times * numel(t.sizes[: t.storage.pieces])
                life = env[t.storage] = Life(t.name, t.role, t.storage.bytes * times, None, None, many)
                self.program.lives.append(life)
        for op in graph.ops:
            if op.body is not None:
                self.sources(op.body, env, times * op.attrs["count"] if op.loop is not None else times)

    def run(self, graph: Graph, env: dict[Storage, Held], label: tuple[object, ...]) -> None:
        for op in graph.ops:
            if op.loop is not None:
                self.loop(op, env, label)
            elif isinstance(op.kind, Absent):
                env[op.results[0].storage] = None
            elif isinstance(op.kind, Accumulate) and env[op.operands[0].storage] is None:
                env[op.operands[0].storage] = env[op.operands[1].storage]
            else:
                self.step(op, env, label)

    def step(self, op: Op, env: dict[Storage, Held], label: tuple[object, ...]) -> None:
        now = len(self.program.steps)
        for t in op.operands:
            self.touch(env[t.storage], now)
        for t in op.results:
            if t.storage not in env:
                env[t.storage] = self.birth(t, now, label, op.phase)
            self.touch(env[t.storage], now)
        self.program.steps.append(Step(op, op.name + "".join(map(str, label)), op.attrs.get("workspace", ZERO)))

    def birth(self, t: Tensor, now: int, label: tuple[object, ...], phase: str) -> Life:
        role = "activation" if phase == "forward" else "temporary"
        many = numel(t.sizes[: t.storage.pieces])
        life = Life(t.name + "".join(map(str, label)), role, t.storage.bytes, now, now, many, (t.storage, *label))
        self.program.lives.append(life)
        return life

    @staticmethod
    def touch(held: Held, now: int) -> None:
        for life in held.every() if held is not None else ():
            if life.dies is not None:
                life.dies = max(life.dies, now)

    def loop(self, op: Op, env: dict[Storage, Held], label: tuple[object, ...]) -> None:
        body, carries, reverse = op.body, op.attrs["carries"], op.attrs.get("reverse", False)
        assert body is not None
        start, saved = len(self.program.steps), len(op.results) - op.attrs.get("saved", 0)
        # the stacks are there before the first slice is written, those that several loops write into before the loops
        stacks = [env.get(t.storage) or self.birth(t, start, label, op.phase) for t in op.results[carries:saved]]
        fixed = {f.storage: env[t.storage] for f, t in zip(body.formals, op.operands, strict=True)}
        xs = dict(list(fixed.items())[carries : carries + op.attrs["xs"]])
        state = [env[t.storage] for t in op.operands[:carries]]
        count, times = op.attrs["count"].bind(self.values), self.copies(op)
        if op.attrs.get("until"):
            count, times = self.before(op)
        left: list[list[Held]] = []
        turn = start
        middle = times - times // 2 if reverse else times // 2
        for i in range(times):
            if i == middle:
                self.rest_read(xs.values())
                turn = len(self.program.steps)
            inner = {**env, **fixed}
            at = times - 1 - i if reverse else i
            inner |= {f: piece(held, at) for f, held in xs.items()}
            inner |= {f.storage: held for f, held in zip(body.formals[:carries], state, strict=True)}
            inner |= {t.storage: life for t, life in zip(body.outputs[carries:saved], stacks, strict=True)}
            self.around.append((at, times, count))
            self.run(body, inner, (*label, f"[{_iteration(at, times, count)}]"))
            self.around.pop()
            state = [inner[t.storage] for t in body.outputs[:carries]]
            left.append([inner[t.storage] for t in body.outputs[saved:]])
        rest = Rest(start, turn, count - times, len(label), middle - 1, list(xs.values()))
        made: list[Held] = [rest.family([row[k] for row in left], reverse) for k in range(len(op.results) - saved)]
        self.program.lives += rest.lives.values()
        env |= {t.storage: held for t, held in zip(op.results, [*state, *stacks, *made], strict=True)}

    def before(self, op: Op) -> tuple[Poly, int]:
        """Return how many iterations of the loop around come before the one that runs, and how many to play."""
        at, times, count = self.around[-1]
        index = as_poly(at) if count.constant == times or at < times // 2 else count - (times - at)
        needed = copies_needed(op)
        return index, needed if index.constant is None else min(int(index.constant), needed)

    def rest_read(self, families: Iterable[Held]) -> None:
        """Let the iterations that are not played read their slices."""
        for held in families:
            if isinstance(held, Family):
                for life in held.rest:
                    self.touch(life, len(self.program.steps) - 1)


def _iteration(i: int, times: int, count: Poly) -> str:
    """Name an iteration: its number, or what it stands for where the count is a symbol."""
    if count.constant == times or i < times // 2:
        return str(i)
    middle = times % 2 and i == times // 2
    return "i" if middle else str(count - (times - i)).replace(" ", "")


def play(
    graph: Graph, copies: Callable[[Op], int] = copies_needed, values: Mapping[str, Poly] = MappingProxyType({})
) -> Program:
    """Run a graph.

    Parameters
    ----------
    graph : Graph
        What runs.
    copies : callable
        How many iterations to play of each Repeat.
    values : mapping of str to Poly
        Bound sizes: they name the iterations.

    Returns
    -------
    Program
        Steps and storages.
    """
    player = _Player(copies, values)
    env: dict[Storage, Held] = {}
    player.sources(graph, env)
    player.run(graph, env, ())
    for role, kept in (("output", graph.outputs), ("gradient", graph.gradients.values())):
        for t in kept:
            held = env[t.storage]
            for life in held.every() if held is not None else ():
                if life.born is not None:
                    life.role, life.dies = role, None
    return player.program


@dataclass(frozen=True)
class Lifetime:
    """One storage: what it is, and when it is there."""

    tensor: str
    """name of the tensor that it was made for; iterations of a Repeat in brackets"""
    role: str
    """input, param, buffer, cache, output or activation"""
    bytes: Formula
    """bytes it takes"""
    born: str | None
    """op that makes it, None for what is there from the start"""
    dies: str | None
    """last op that needs it, None for what stays to the end"""


class Lifetimes(Table, list[Lifetime]):
    """The storages of a graph. Made by `lifetimes`; in all else a list."""

    graph = ""
    """name of the graph"""

    @property
    def rows(self) -> tuple[Lifetime, ...]:
        """The storages."""
        return tuple(self)

    def _about(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self)} storages"

    def _columns(self) -> Sequence[Column]:
        return Column("tensor"), Column("role"), Column("bytes", "B"), Column("born"), Column("dies")

    def _facts(self) -> Sequence[Fact]:
        throughout = [r.bytes for r in self if r.born is None and r.dies is None]
        return (Fact("throughout", sum(throughout), "B"),) if throughout else ()


def copies_for(values: Mapping[str, Poly], extra: int = 0) -> Callable[[Op], int]:
    """Return the rule for how many iterations to play, once some sizes are bound; `extra` where a count is open."""

    def copies(op: Op) -> int:
        count = op.attrs["count"].bind(values).constant
        needed = copies_needed(op)
        if count is None:
            return needed + extra % period(op)
        return int(count) if count <= needed else needed + (int(count) - needed) % period(op)

    return copies


def lifetimes(graph: Graph, /, **dims: int) -> Lifetimes:
    """List every storage with its birth and death.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Lifetimes
        A list of `Lifetime`, rows (tensor, role, bytes, born, dies), what lives throughout first. Of a Repeat the
        first, a middle and the last iteration are listed.

    Raises
    ------
    BindingError
        If a size cannot be bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     g.output(cg.relu(cg.relu(x)))
    >>> [(r.tensor, r.role, r.born, r.dies) for r in cg.lifetimes(g)]
    [('x', 'input', None, None), ('relu', 'activation', 'relu', 'relu_1'), ('relu_1', 'output', 'relu_1', None)]
    """
    need_graph("lifetimes", graph)
    out = Lifetimes(_rows(graph, dims))
    out.graph = graph.name
    return out


def _rows(graph: Graph, dims: Mapping[str, object]) -> Iterator[Lifetime]:
    values = bindings(graph, dims)
    program = play(graph, copies_for(values), values)
    for life in program.lives:
        born = None if life.born is None else program.steps[life.born].where
        dies = None if life.dies is None else program.steps[life.dies].where
        yield Lifetime(life.name, life.role, bound_answer(life.bytes, values), born, dies)
