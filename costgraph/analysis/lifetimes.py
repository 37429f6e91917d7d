"""When each storage is born and when it dies, with the iterations of a Repeat that can differ played one by one.

Program order is the schedule. A storage lives from the op that makes it to the last op that reads it or a view of it;
inputs, parameters, buffers and caches live throughout, outputs to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from types import MappingProxyType

from ..bind import Formula, answer
from ..graph import Graph, need_graph
from ..op import Op
from ..polynomial import ONE, ZERO, Poly
from ..sizes import bindings
from ..tensor import Storage, Tensor

__all__ = ["Life", "Lifetime", "Program", "Step", "copies_needed", "lifetimes", "period", "play"]


@dataclass(eq=False, slots=True)
class Life:
    """A storage while the program runs."""

    name: str
    """name of the tensor that it was made for, with its iteration"""
    role: str
    """input, param, buffer, cache, output or activation"""
    bytes: Poly
    """bytes it takes"""
    born: int | None
    """step that makes it, None for what is there from the start"""
    dies: int | None
    """last step that needs it, None for what stays to the end"""


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
    return 3 + 2 * len(_handed_on(op))


def period(op: Op) -> int:
    """Return after how many iterations the carries that a body only exchanges are back in their places."""
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

    def sources(self, graph: Graph, env: dict[Storage, Life], times: Poly = ONE) -> None:
        """Add what lives throughout: in a Repeat's body, that of all its iterations at once."""
        for t in graph.tensors:
            if t.producer is None and t.role != "formal":
                env[t.storage] = Life(t.name, t.role, t.storage.bytes * times, None, None)
                self.program.lives.append(env[t.storage])
        for op in graph.ops:
            if op.body is not None:
                self.sources(op.body, env, times * op.attrs["count"] if op.kind.body == "repeated" else times)

    def run(self, graph: Graph, env: dict[Storage, Life], label: str) -> None:
        for op in graph.ops:
            if op.kind.body == "repeated":
                self.loop(op, env, label)
                continue
            now = len(self.program.steps)
            for t in op.operands:
                self.touch(env[t.storage], now)
            for t in op.results:
                if t.storage not in env:
                    env[t.storage] = self.birth(t, now, label)
                self.touch(env[t.storage], now)
            self.program.steps.append(Step(op, op.name + label, op.attrs.get("workspace", ZERO)))

    def birth(self, t: Tensor, now: int, label: str) -> Life:
        life = Life(t.name + label, "activation", t.storage.bytes, now, now)
        self.program.lives.append(life)
        return life

    @staticmethod
    def touch(life: Life, now: int) -> None:
        if life.dies is not None:
            life.dies = max(life.dies, now)

    def loop(self, op: Op, env: dict[Storage, Life], label: str) -> None:
        body, carries = op.body, op.attrs["carries"]
        assert body is not None
        start = len(self.program.steps)
        # the stacks are there before the first slice is written
        stacks = [self.birth(t, start, label) for t in op.results[carries:]]
        fixed = {f.storage: env[t.storage] for f, t in zip(body.formals, op.operands, strict=True)}
        state = [env[t.storage] for t in op.operands[:carries]]
        count, times = op.attrs["count"].bind(self.values), self.copies(op)
        for i in range(times):
            inner = {**env, **fixed}
            inner |= {f.storage: life for f, life in zip(body.formals[:carries], state, strict=True)}
            inner |= {t.storage: life for t, life in zip(body.outputs[carries:], stacks, strict=True)}
            self.run(body, inner, f"{label}[{_iteration(i, times, count)}]")
            state = [inner[t.storage] for t in body.outputs[:carries]]
        env |= {t.storage: life for t, life in zip(op.results, [*state, *stacks], strict=True)}


def _iteration(i: int, times: int, count: Poly) -> str:
    """Name an iteration: its number, or what it stands for where the count is a symbol."""
    if count.constant == times:
        return str(i)
    middle = times // 2
    return str(i) if i < middle else "i" if i == middle else str(count - (times - i)).replace(" ", "")


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
    env: dict[Storage, Life] = {}
    player.sources(graph, env)
    player.run(graph, env, "")
    for t in graph.outputs:
        life = env[t.storage]
        if life.born is not None:
            life.role, life.dies = "output", None
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


def copies_for(values: Mapping[str, Poly], extra: int = 0) -> Callable[[Op], int]:
    """Return the rule for how many iterations to play, once some sizes are bound; `extra` where a count is open."""

    def copies(op: Op) -> int:
        count = op.attrs["count"].bind(values).constant
        needed = copies_needed(op)
        if count is None:
            return needed + extra % period(op)
        return int(count) if count <= needed else needed + (int(count) - needed) % period(op)

    return copies


def lifetimes(graph: Graph, /, **dims: int) -> list[Lifetime]:
    """List every storage with its birth and death.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    list of Lifetime
        Rows (tensor, role, bytes, born, dies), what lives throughout first. Of a Repeat the first, a middle and the
        last iteration are listed.

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
    return list(_rows(graph, dims))


def _rows(graph: Graph, dims: Mapping[str, object]) -> Iterator[Lifetime]:
    values = bindings(graph, dims)
    program = play(graph, copies_for(values), values)
    for life in program.lives:
        born = None if life.born is None else program.steps[life.born].where
        dies = None if life.dies is None else program.steps[life.dies].where
        yield Lifetime(life.name, life.role, answer(life.bytes.bind(values)), born, dies)
