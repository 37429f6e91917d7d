"""First and last iterations taken out of loops, where fewer gradients go through them than through the others.

What a loop starts from may want no gradient: the first layer's dX is not computed where its input is data. What it ends
with may be read by nobody: the last state of a recurrence has none, so that what made it has none there either. And
recomputation may stop early in the last iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algebra.polynomial import ONE, ZERO, Poly
from ...graph.graph import Graph
from ...graph.loop import Loop
from ...graph.op import Op
from ...graph.scopes import building
from ...graph.tensor import Tensor
from ...ops.fill import Revised
from ...ops.layout import split
from ...ops.stacks import Empty, Stacked
from ..rewrite import Rewriter, flat
from .flow import active_in, active_inside, graded_in

__all__ = ["peel"]

Carries = frozenset[int]


def peel(graph: Graph, stops_early_in: Callable[[Op], bool]) -> Graph:
    """Split loops of which some iterations at either end have other gradients than those in the middle.

    Which of its carries want a gradient, and to which one comes, follows from those of the iteration before it, or
    behind it: the iterations up to where that repeats itself are taken out. In place of such a loop there are loops of
    one iteration each, and one of the rest, which may be none, that read parts of its slices, and write into one stack.
    Loops inside of kernels stay as they are. Those for which `stops_early_in` is true have their last iteration apart.
    """
    if not any(op.loop is not None for op in graph.walk()):
        return graph
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    losses = (t for t in graph.outputs if not t.sizes and t.dtype.kind == "float")
    peeler = _Peeler(active, graded_in(graph.ops, active, losses), stops_early_in)
    made = peeler.run(graph)
    return made if peeler.found else graph


@dataclass(frozen=True)
class _Turn:
    """Iterations of a loop through which the same gradients go."""

    name: str
    """what the name of the loop ends with"""
    count: Poly
    """how many there are"""
    active: Carries
    """what they start from that may want a gradient"""
    graded: Carries
    """what they end with that a gradient comes to"""


def _states(first: Carries, step: Callable[[Carries], Carries]) -> tuple[list[Carries], int]:
    """Return what follows from a state until it comes back, and which one that is."""
    seen: list[Carries] = []
    while first not in seen:
        seen.append(first)
        first = step(first)
    return seen, seen.index(first)


def _places(tensors: Sequence[Tensor], of: set[Tensor]) -> Carries:
    return frozenset(i for i, t in enumerate(tensors) if t in of)


class _Loop:
    """What goes through a loop of which it is known what is active, and graded, around it."""

    def __init__(self, op: Op, active: set[Tensor], graded: set[Tensor], *, stops: bool) -> None:
        assert op.loop is not None
        self.stops = int(stops)
        self.op = op
        self.parts = loop = op.loop
        self.fixed = [t for t in loop.body.tensors if t.producer is None and t.requires_grad]
        given = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        self.fixed += [f for f, t in given if t in active]
        made = (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True))
        self.ends = [t for t, r in made if r in graded]
        self.anywhere = active_inside(op, active)
        self.entered, first = _states(_places(loop.starts, active), self._enter)
        self.left, self.last = _states(_places(loop.lasts, graded), self._leave)
        self.middle = frozenset().union(*self.entered[first:]), frozenset().union(*self.left[self.last :])
        wanted = self._leave(self.middle[1])  # what starts without a gradient that is zero anyway is as all others
        while first and self.entered[first - 1] & wanted == self.entered[first] & wanted:
            first -= 1
        self.first = first

    def _enter(self, carries: Carries) -> Carries:
        return _places(self.parts.nexts, self.active(carries))

    def _leave(self, carries: Carries) -> Carries:
        return _places(self.parts.carries, self.graded(self.anywhere, carries))

    def active(self, carries: Carries) -> set[Tensor]:
        """Return what is active in an iteration that starts from these."""
        return active_in(self.parts.body.ops, [*self.fixed, *(self.parts.carries[i] for i in carries)])

    def graded(self, active: set[Tensor], carries: Carries) -> set[Tensor]:
        """Return what a gradient comes to in an iteration of whose results these have one."""
        return graded_in(self.parts.body.ops, active, [*self.ends, *(self.parts.nexts[i] for i in carries)])

    def turns(self) -> list[_Turn]:
        """Return the loops that stand for it."""
        count = self.parts.count
        first, last = (self.first, max(self.last, self.stops)) if self._can_be_split() else (0, 0)
        if isinstance(count.constant, int):
            first = min(first, count.constant)
            last = min(last, count.constant - first)
        rest = count - first - last
        out = [self._turn(f".first{i or ''}", ONE, i, None) for i in range(first)]
        out += [self._turn("", rest, None, None)] if rest else []
        return out + [self._turn(f".last{i or ''}", ONE, None, i) for i in reversed(range(last))]

    def _turn(self, name: str, count: Poly, i: int | None, behind: int | None) -> _Turn:
        """Describe iteration `i`, or the one that so many come behind, or None of both: those in the middle."""
        whole = self.parts.count.constant
        if whole == 1:
            i = behind = 0
        elif isinstance(whole, int) and i is not None:
            behind = whole - 1 - i
        elif isinstance(whole, int) and behind is not None:
            i = whole - 1 - behind
        active = self.entered[i] if i is not None and i < len(self.entered) else self.middle[0]
        graded = self.left[behind] if behind is not None and behind < len(self.left) else self.middle[1]
        return _Turn(name, count, active, graded)

    def may_be_empty(self, middle: _Turn) -> bool:
        """Whether the others go through all that the iterations in the middle do: without these it has a gradient."""
        peeled = [t for turn in self.turns() if turn.name for t in self.reached(turn)]
        return self.reached(middle).intersection((*self.parts.slices, *self.parts.captured)) <= set(peeled)

    def reached(self, turn: _Turn) -> set[Tensor]:
        """Return what a gradient comes to in some iterations."""
        return self.graded(self.active(turn.active), turn.graded)

    def _can_be_split(self) -> bool:
        loop = self.parts
        if loop.count == ONE or loop.reverse or loop.until:
            return False
        # what iterations have left is there in several parts then, which a list takes
        left = [t for t in loop.pieces if t.storage.pieces]
        readers = (op for t in left for op in t.graph.successors(t))
        if any(t in t.graph.outputs for t in left) or not all(op.kind.takes_lists for op in readers):
            return False
        # what has a storage for each iteration has no parts
        pieces = any(t.storage.pieces for t in loop.xs)
        return not pieces and bool(self.middle[1] or self.left[0] or self.ends)


class _Peeler(Rewriter):
    def __init__(self, active: set[Tensor], graded: set[Tensor], stops_early_in: Callable[[Op], bool]) -> None:
        super().__init__()
        self.stops_early_in = stops_early_in
        self.active, self.graded = active, graded
        """Tensors of the graph, or body, that is being copied: what may want a gradient, and what one comes to."""
        self.found = False

    def loop(self, loop: _Loop, turn: _Turn, operands: Sequence[Tensor], new: Graph) -> Loop:
        """Copy a loop for some of its iterations."""
        op, old, around = loop.op, loop.parts, (self.active, self.graded)
        self.active, self.graded = loop.active(turn.active), loop.reached(turn)
        kind = replace(old.kind, body=self.body(old.body, new, turn.name), count=turn.count)
        if turn.count.constant is None and turn.count != old.count and loop.may_be_empty(turn):
            kind = replace(kind, least=0)
        made = self.add(op, kind, operands, new, op.name + turn.name).loop
        assert made is not None
        self.active, self.graded = around
        return made

    def split(self, loop: _Loop, turns: Sequence[_Turn], new: Graph) -> None:
        """Copy a loop as several, which read parts of its slices and write parts of its stacks."""
        op, old = loop.op, loop.parts
        if any(not t.storage.pieces for t in old.pieces):  # of what is written in place, parts are apart only so
            new.root.assume(*(f"{turn.count} >= 0" for turn in turns if turn.count.constant is None))
        state, dense, shared = ([self.tensors[t] for t in ts] for ts in (old.starts, old.xs, old.shared))
        counts = [turn.count.expr for turn in turns]
        with building(new):
            parts = [split(t, counts, 0, name=f"{op.name}.slices") for t in dense]
        stacks = [new.add_op(Empty(sizes=r.sizes, dtype=r.dtype), [], r.name, op.phase).results[0] for r in old.stacks]
        made = []
        for i, turn in enumerate(turns):
            made.append(self.loop(loop, turn, [*state, *(part[i] for part in parts), *shared], new))
            state = list(made[-1].lasts)
        whole = [
            new.add_op(Stacked(), [t, *(part.stacks[k] for part in made)], f"{t.name}.filled", op.phase).results[0]
            for k, t in enumerate(stacks)
        ]
        left = [self._left(old, k, made, new) for k in range(len(old.pieces))]
        self.tensors |= dict(zip(op.results, [*state, *whole, *left], strict=True))

    def _left(self, old: Loop, k: int, made: Sequence[Loop], new: Graph) -> Any:
        """Return what all parts of a loop have left behind, or the operand that they have written."""
        x = old.revised(k)
        if x is None:
            return [part.pieces[k] for part in made]
        whole, at = self.tensors[x], ZERO
        for part in made:
            kind = Revised(axes=(0,), starts=(at,), steps=(1,))
            (whole,) = new.add_op(kind, [whole, part.pieces[k]], f"{old.pieces[k].name}.part", old.op.phase).results
            at = at + part.count
        return whole

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; a list may have more in it."""
        if any(isinstance(self.tensors[t], list) for t in op.operands):
            return self.add(op, op.kind, flat(op, self.tensors), new, op.name)
        return super().copy(op, new, suffix)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        if op.loop is None or new.fused:
            super().emit(op, new, suffix)
            return
        loop = _Loop(op, self.active, self.graded, stops=self.stops_early_in(op))
        turns = loop.turns()
        if len(turns) > 1:
            self.found = True
            self.split(loop, turns, new)
        else:
            self.loop(loop, turns[0], [self.tensors[t] for t in op.operands], new)
