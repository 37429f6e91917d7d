"""The time of a graph whose collectives run on streams of their own, each op as soon as what it needs is there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ..algebra.polynomial import Poly, total
from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.loop import Loop
from ..graph.op import Op
from ..graph.tensor import Storage, Tensor
from ..ops.collectives import Collective
from ..ops.stated import Transfer
from .costs import executions

__all__ = ["finished"]

#: Ops that are played at most.
_MOST = 10**6


def finished(graph: Graph, seconds: Mapping[Op, float], values: Mapping[str, Poly]) -> float:
    """Return when a graph is done whose collectives over each axis of a mesh have a stream, and all else another one.

    What goes over the link of a host has a stream in each direction, and what the host runs has one. `seconds` are of
    all iterations of an op together; views take none. UnsupportedError if more than a million ops are to be played one
    by one.

    A list schedule (Graham 1969): a stream runs its ops in the order of the program, each once its operands are there,
    and once all that reads what it overwrites is done. What puts the operands of a collective next to each other goes
    with it. A stack of slices is there when its last one is. Nothing limits how far ahead a stream is of the others:
    what is gathered early takes memory that `peak_memory` does not count.
    """
    ops = total(runs for _, runs, _ in executions(graph)).bind(values)
    if (ops.constant or 0) > _MOST:
        raise UnsupportedError(
            f"overlap 'streams' of graph {graph.name!r}: {ops} ops one by one, expected {_MOST:,} at most"
        )
    counted = _Play({}, values)
    counted.run(graph, {})
    played = _Play({op: s / counted.runs[op] for op, s in seconds.items() if counted.runs[op]}, values)
    played.run(graph, {})
    return max(played.free.values(), default=0.0)


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


class _Play:
    """Ops one after the other, and when each of their results is there."""

    def __init__(self, seconds: Mapping[Op, float], values: Mapping[str, Poly]) -> None:
        self.seconds, self.values = seconds, values
        self.runs: Counter[Op] = Counter()
        self.free: dict[str, float] = defaultdict(float)
        """When each stream is free."""
        self.memory: dict[Storage, object] = {}
        """What a storage is at the moment: each iteration has others for those that its ops make."""
        self.touched: dict[object, float] = defaultdict(float)
        """When the last op is done that reads or writes such a memory."""

    def run(self, graph: Graph, ready: dict[Tensor, float], nth: int = 0) -> None:
        """Play the ops of a graph; `ready` is when its inputs are there, and then all of its tensors."""
        for op in graph.ops:
            if op.loop is not None:
                self._repeat(op.loop, ready, nth)
                continue
            self.runs[op] += 1
            done = self._done(op, ready)
            self._make(op)
            for t in (*op.operands, *op.results):
                self._touch(t, done)
            ready.update(dict.fromkeys(op.results, done))

    def _done(self, op: Op, ready: Mapping[Tensor, float]) -> float:
        """Return when an op is done, which keeps its stream until then."""
        begin = max((ready.get(t, 0.0) for t in op.operands), default=0.0)
        if op not in self.seconds:
            return begin
        overwritten = (self.touched[self._at(op.operands[i])] for i in op.kind.overwrites())
        stream = _stream(op)
        self.free[stream] = max(begin, self.free[stream], *overwritten) + self.seconds[op]
        return self.free[stream]

    def _touch(self, t: Tensor, done: float) -> None:
        memory = self._at(t)
        self.touched[memory] = max(self.touched[memory], done)

    def _at(self, t: Tensor) -> object:
        return self.memory.get(t.storage, t.storage)

    def _make(self, op: Op) -> None:
        """Give what an op makes a memory of its own, but for what lies in that of an operand."""
        given = {t.storage for t in op.operands}
        self.memory.update({t.storage: object() for t in op.results if t.storage not in given})

    def _repeat(self, loop: Loop, ready: dict[Tensor, float], around: int) -> None:
        count = around if loop.until else int(loop.count.bind(self.values).constant or 0)
        given = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        handed = dict(zip(loop.starts, (ready.get(t, 0.0) for t in loop.starts), strict=True))
        left = dict.fromkeys((*loop.stacks, *loop.pieces), 0.0)
        self._make(loop.op)
        carried = list(zip(loop.carries, loop.starts, strict=True))
        for nth in range(count):
            self._enter([*given, *carried])
            inner = {f: ready.get(t, 0.0) for f, t in given} | {f: handed[t] for f, t in carried}
            self.run(loop.body, inner, nth)
            handed = {t: inner.get(t, 0.0) for t in loop.nexts}
            carried = list(zip(loop.carries, loop.nexts, strict=True))
            for t, made in zip(left, (*loop.ys, *loop.saved), strict=True):
                left[t] = max(left[t], inner.get(made, 0.0))
                self._touch(t, self.touched[self._at(made)])
        for t, (_, made) in zip(loop.lasts, carried, strict=True):
            left[t] = handed[made]
            self._touch(t, self.touched[self._at(made)])
        ready.update(left)

    def _enter(self, formals: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note which memory a body's inputs are in, of all at once: an iteration may exchange them."""
        self.memory.update([(f.storage, self._at(t)) for f, t in formals])
