"""Which block an op or a source belongs to, and in which order a program goes over the blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from ...algebra.symbols import shorten
from ...errors import GraphError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.keep import Keep

__all__ = ["FEWEST", "Labels", "Numbered", "Run", "find_runs", "stacks_of", "unnumbered"]

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
