"""The time of a graph whose collectives run on streams of their own, each op as soon as what it needs is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.loop import Loop, loops
from ..graph.op import Op
from ..graph.tensor import Storage, Tensor
from ..ops.collectives import Collective
from ..ops.stated import Transfer

__all__ = ["finished"]

#: Ops that are played at most.
_MOST = 10**6
#: By what part of it the times of an iteration may be off where floats are rounded.
_EXACT = 1e-12


def finished(graph: Graph, seconds: Mapping[Op, Any], iterations: Mapping[Op, int]) -> Any:
    """Return when a graph is done whose collectives over each axis of a mesh have a stream, and all else another one.

    What goes over the link of a host has a stream in each direction, and what the host runs has one. `seconds` are of
    all iterations of an op together, numbers or arrays of them at several points; views take none. `iterations` are
    those of each loop. UnsupportedError if more than a million ops are to be played one by one.

    A list schedule (Graham 1969): a stream runs its ops in the order of the program, each once its operands are there,
    and once all that reads what it overwrites is done. What puts the operands of a collective next to each other goes
    with it. A stack of slices is there when its last one is. Nothing limits how far ahead a stream is of the others:
    what is gathered early takes memory that `peak_memory` does not count.

    Of a loop a few iterations are played: where two of them have moved each time by the same amount, and the last one
    does too when all between are left out, these do. Each time is the largest of sums, so that over iterations that
    begin on a line it is a convex function of their number; of which three points are on a line, it is that line.
    """
    runs = Counter[Op]()
    _count(graph, {0: 1}, iterations, runs)
    played = _Play(graph, {op: s / runs[op] for op, s in seconds.items() if runs[op]}, iterations)
    played.run(graph, {})
    return _last(0.0, *played.free.values())


def _count(graph: Graph, turns: Mapping[int, int], iterations: Mapping[Op, int], runs: Counter[Op]) -> None:
    """Count how often ops run; `turns`: how often the graph does after so many iterations of the loop that it is of."""
    often = sum(turns.values())
    for op in graph.ops:
        if op.loop is None:
            runs[op] += often
            continue
        body, count = op.loop.body, iterations[op.loop.op]
        if op.loop.until:
            inner = dict(enumerate(accumulate(turns.get(n, 0) for n in range(max(turns, default=0), 0, -1))))
            inner = {len(inner) - 1 - i: times for i, times in inner.items()}
        elif any(loop.until for loop in loops(body)):
            inner = dict.fromkeys(range(min(count, _MOST + 1)), often)  # of more it is an error to play them
        else:
            inner = {0: often * count}
        _count(body, inner, iterations, runs)


def _last(time: Any, *times: Any) -> Any:
    """Return the largest of some times, at each point."""
    for t in times:
        numbers = type(t) is float and type(time) is float
        time = max(time, t) if numbers else np.maximum(time, t)
    return time


def _stream(op: Op) -> str:
    """Return the stream of an op: of what does no arithmetic that of the collectives that alone read its results."""
    if isinstance(op.kind, Collective):
        return f"over {op.kind.axis}"
    if isinstance(op.kind, Transfer) or op.on_host:
        return f"to the {op.kind.to}" if isinstance(op.kind, Transfer) else "host"
    if any(op.kind.flops(op).by_kind().values()) or any(t in op.graph.outputs for t in op.results):
        return ""
    kinds = (reader.kind for t in op.results for reader in op.graph.successors(t))
    axes = {kind.axis if isinstance(kind, Collective) else None for kind in kinds}
    return f"over {axis}" if len(axes) == 1 and (axis := axes.pop()) is not None else ""


class _Step(NamedTuple):
    """What is asked of an op each time that it runs."""

    op: Op
    loop: Loop | None
    stream: str
    overwritten: tuple[Storage, ...]
    made: tuple[Storage, ...]
    touched: tuple[Storage, ...]
    same: bool
    """whether all iterations of a loop do what the first one does"""

    @classmethod
    def of(cls, op: Op) -> _Step:
        given = {t.storage for t in op.operands}
        made = tuple(t.storage for t in op.results if t.storage not in given)
        overwritten = tuple(op.operands[i].storage for i in op.kind.overwrites())
        touched = tuple(dict.fromkeys(t.storage for t in (*op.operands, *op.results)))
        loop = op.loop
        same = loop is None or not any(inner.until for inner in loops(loop.body))
        return cls(op, loop, _stream(op), overwritten, made, touched, same)


class _Play:
    """Ops one after the other, and when each of their results is there."""

    def __init__(self, graph: Graph, seconds: Mapping[Op, Any], iterations: Mapping[Op, int]) -> None:
        self.graph, self.seconds, self.iterations = graph, seconds, iterations
        self.played = 0
        self.free: dict[str, Any] = {}
        """When each stream is free."""
        self.memory: dict[Storage, object] = {}
        """What a storage is at the moment: each iteration has others for those that its ops make."""
        self.touched: dict[object, Any] = {}
        """When the last op is done that reads or writes such a memory."""

    def run(self, graph: Graph, ready: dict[Tensor, Any], nth: int = 0) -> None:
        """Play the ops of a graph; `ready` is when its inputs are there, and then all of its tensors."""
        steps: list[_Step] | None = graph.cache.get("streams")
        if steps is None:
            steps = graph.cache["streams"] = [_Step.of(op) for op in graph.ops]
        self.played += len(steps)
        if self.played > _MOST:
            raise UnsupportedError(
                f"overlap 'streams' of graph {self.graph.name!r}: more than {_MOST:,} ops one by one, expected no more"
            )
        for step in steps:
            if step.loop is not None:
                self.repeat(step, step.loop, ready, nth)
                continue
            done = self.done(step, ready)
            self.make(step.made)
            for storage in step.touched:
                self.touch(storage, done)
            ready.update(dict.fromkeys(step.op.results, done))

    def done(self, step: _Step, ready: Mapping[Tensor, Any]) -> Any:
        """Return when an op is done, which keeps its stream until then."""
        begin = _last(0.0, *[ready.get(t, 0.0) for t in step.op.operands])
        if step.op not in self.seconds:
            return begin
        overwritten = [self.touched.get(self.at(storage), 0.0) for storage in step.overwritten]
        free = _last(begin, self.free.get(step.stream, 0.0), *overwritten) + self.seconds[step.op]
        self.free[step.stream] = free
        return free

    def touch(self, storage: Storage, done: Any) -> None:
        """Note when an op is done that reads or writes a storage."""
        memory = self.at(storage)
        self.touched[memory] = _last(self.touched.get(memory, 0.0), done)

    def at(self, storage: Storage) -> object:
        """Return the memory that a storage is at the moment."""
        return self.memory.get(storage, storage)

    def make(self, storages: Iterable[Storage]) -> None:
        """Give what an op makes a memory of its own."""
        for storage in storages:
            self.memory[storage] = object()

    def enter(self, formals: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note which memory a body's inputs are in, of all at once: an iteration may exchange them."""
        self.memory.update([(f.storage, self.at(t.storage)) for f, t in formals])

    def repeat(self, step: _Step, loop: Loop, ready: dict[Tensor, Any], around: int) -> None:
        """Play the iterations of a loop; `around` is how many the loop around it has had before."""
        count = around if loop.until else self.iterations[loop.op]
        self.make(step.made)
        turns = _Iterations(self, loop, ready)
        nth, seen = 0, list[_Boundary]()
        while nth < count:
            turns.play(nth)
            nth, seen = nth + 1, [*seen[-2:], turns.boundary()]
            by = _moved(*seen) if step.same and len(seen) == 3 and nth + 1 < count else None
            if by is not None and (ahead := turns.ahead(by, count - nth)):
                nth, seen = nth + ahead, []
        turns.leave(ready)


class _Boundary(NamedTuple):
    """What there is between two iterations."""

    shared: tuple[object, ...]
    """which tensors lie in one memory, and which streams there are"""
    times: np.ndarray[Any, Any]
    """when all of it is there, by points"""


def _alike(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any], longest: np.ndarray[Any, Any]) -> bool:
    return bool((np.abs(found - wanted) <= _EXACT * longest.max(0, initial=0)).all())


def _moved(first: _Boundary, second: _Boundary, third: _Boundary) -> np.ndarray[Any, Any] | None:
    """Return by how much an iteration moves each time, None where two of them differ."""
    if not first.shared == second.shared == third.shared:
        return None
    by = third.times - second.times
    return by if _alike(by, second.times - first.times, third.times) else None


class _Iterations:
    """The iterations of a loop, and what one hands on to the next."""

    def __init__(self, play: _Play, loop: Loop, ready: Mapping[Tensor, Any]) -> None:
        self.of, self.loop, self.ready = play, loop, ready
        self.given = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        self.handed = [ready.get(t, 0.0) for t in loop.starts]
        self.lying: Sequence[Tensor] = loop.starts
        """in what memory that is"""
        self.left: dict[Tensor, Any] = dict.fromkeys((*loop.stacks, *loop.pieces), 0.0)

    def play(self, nth: int) -> None:
        """Play one iteration."""
        loop, play = self.loop, self.of
        play.enter([*self.given, *zip(loop.carries, self.lying, strict=True)])
        inner = {f: self.ready.get(t, 0.0) for f, t in self.given} | dict(zip(loop.carries, self.handed, strict=True))
        play.run(loop.body, inner, nth)
        self.handed, self.lying = [inner.get(t, 0.0) for t in loop.nexts], loop.nexts
        for t, made in zip(self.left, (*loop.ys, *loop.saved), strict=True):
            self.left[t] = _last(self.left[t], inner.get(made, 0.0))
            play.touch(t.storage, play.touched.get(play.at(made.storage), 0.0))

    def leave(self, ready: dict[Tensor, Any]) -> None:
        """Say when the results of the loop are there."""
        for t, time, made in zip(self.loop.lasts, self.handed, self.lying, strict=True):
            ready[t] = time
            self.of.touch(t.storage, self.of.touched.get(self.of.at(made.storage), 0.0))
        ready.update(self.left)

    def memories(self) -> list[object]:
        """Return the memories that iterations share."""
        return [self.of.at(t.storage) for t in (*(t for _, t in self.given), *self.left, *self.lying)]

    def boundary(self) -> _Boundary:
        """Return what there is after the iterations that were played."""
        memories, streams = self.memories(), sorted(self.of.free)
        touched = [self.of.touched.get(m, 0.0) for m in memories]
        times = [*self.handed, *self.left.values(), *touched, *(self.of.free[name] for name in streams)]
        return _Boundary((*map(memories.index, memories), *streams), np.array(np.broadcast_arrays(*times)))

    def ahead(self, by: np.ndarray[Any, Any], left: int) -> int:
        """Leave out as many iterations as are on a line, and play one behind them; return how many that is."""
        play, before = self.of, self.boundary()
        kept: tuple[Any, ...] = (
            self.handed,
            dict(self.left),
            dict(play.free),
            dict(play.touched),
            dict(play.memory),
        )
        out = left - 1
        while out:
            self.put(before.times + out * by)
            self.play(0)
            after = self.boundary()
            wanted = before.times + (out + 1) * by
            if after.shared == before.shared and _alike(after.times, wanted, wanted):
                return out + 1
            self.handed, self.left, play.free, play.touched, play.memory = (copy(part) for part in kept)
            out //= 2
        return 0

    def put(self, times: np.ndarray[Any, Any]) -> None:
        """Put other times in the place of those of the boundary."""
        found = iter(times.tolist() if times.ndim == 1 else times)
        self.handed = [next(found) for _ in self.handed]
        self.left = {t: next(found) for t in self.left}
        self.of.touched.update([(memory, next(found)) for memory in self.memories()])
        self.of.free = {name: next(found) for name in sorted(self.of.free)}
