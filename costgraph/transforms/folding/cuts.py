"""What turns of a loop read and write of their own: slices of something outside that go on from turn to turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ...algebra.polynomial import ONE, Poly, poly
from ...errors import GraphError
from ...graph.graph import Graph
from ...graph.loop import same_place
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.fill import Revised
from ...ops.moves import Concat, Slice
from .equal import layout
from .match import is_free_view
from .runs import FEWEST

__all__ = ["Cut", "Cuts", "Join", "Path", "Turns"]

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
