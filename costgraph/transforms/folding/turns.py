"""Turns of loops that a program has run, put into loops again whose count is a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...algebra.polynomial import Poly
from ...errors import GraphError
from ...graph.adding import added_since
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.fill import Revised
from ...ops.keep import Keep
from ...ops.layout import permute, reshape, slice_axis
from .apart import Apart, Beginning
from .around import Around, once
from .build import Folder
from .cuts import Cut, Cuts, Path, Turns
from .equal import Differs, layout
from .fold import equal_blocks, without_an_edge
from .listed import with_lists
from .match import Match, Plan
from .runs import FEWEST, Run, unnumbered
from .values import Family, Owned, Shared

__all__ = ["fold_turns"]


def fold_turns(graph: Graph, turns: Turns) -> Graph:
    """Put the turns of all loops into a Repeat each, inner ones first.

    GraphError if turns are not alike, or one reads or writes what is no part of its own of something outside.
    """
    turns = with_lists(graph, turns)
    while True:
        depth = max(map(len, turns.paths.values()), default=0)
        if not depth:
            return graph
        inner = {path[-1][0] for path in turns.paths.values() if len(path) == depth}
        counts = {turns.counts[number] for number in inner}
        for count in sorted(counts, key=str):
            group = {number for number in inner if turns.counts[number] == count}
            graph, turns = _folded(graph, turns, group, depth)


def _folded(graph: Graph, turns: Turns, group: set[int], depth: int) -> tuple[Graph, Turns]:
    """Fold loops of one count that are equally deep in others."""
    played = turns.played[min(group)]
    if played < FEWEST:
        raise GraphError(
            f"has too few turns at the sizes that were given ({played}), expected {FEWEST} at least: give larger ones"
        )
    cuts = Cuts(graph, turns, group, depth)
    apart = Apart(cuts)
    plain = apart.run(graph)
    labels = _Labels(apart, cuts)
    runs, blocks = labels.runs(plain), range(labels.count)
    standing = {
        op for op in plain.ops if isinstance(op.kind, Keep) and op.operands[0].name in (apart.after | turns.joins)
    }
    while True:
        match = equal_blocks(plain, labels, runs, blocks)
        try:
            around = Around(match, standing)
            break
        except Differs as error:  # a list has nothing of the first turns, or of the last ones: these stand outside
            blocks = without_an_edge(plain, match.blocks, error)
    folder = _Folder(match, around, cuts, apart)
    made = folder.run(plain)

    def left(path: Path) -> Path:
        """Return the turns that an op is still of."""
        return path[:-1] if len(path) == depth and path[-1][0] in group else path

    paths = {new: path for new, old in folder.made_of.items() if (path := left(apart.paths.get(old, ())))}
    return made, replace(turns, paths=paths)


class _Labels:
    """Which turn an op and a slice belong to, as `Match` asks for it."""

    scope = ""

    def __init__(self, apart: Apart, cuts: Cuts) -> None:
        self.cuts, self.apart = cuts, apart
        self.ops = apart.labels
        self.count = cuts.played
        self.sources: dict[Tensor, int] = {}

    def runs(self, graph: Graph) -> list[Run]:
        """Return the loops, as passes over the turns."""
        cut_of = {t: self.apart.cut_of[t.name] for t in graph.tensors if t.name in self.apart.cut_of}
        self.sources = {t: self.cuts.at(cut.loop, turn) for t, (cut, turn) in cut_of.items()}
        passes: dict[tuple[int, str], Run] = {}
        for i, op in enumerate(graph.ops):
            if op in self.ops:
                number = self.apart.paths[op][-1][0]
                run = passes.setdefault((number, op.phase), Run(op.phase))
                if not run.blocks or run.blocks[-1] != self.ops[op]:
                    run.blocks.append(self.ops[op])
                    run.starts.append(i)
        return list(passes.values())

    @staticmethod
    def relative(name: str, block: int) -> str:
        """Return a scope as it is seen from a turn."""
        return name

    @staticmethod
    def plain(name: str) -> str:
        """Return a name without the number of a turn."""
        return unnumbered(name)


class _Folder(Beginning, Folder):
    """Copies a graph with loops in place of turns, which are given views of what their slices were cut from."""

    def __init__(self, match: Match, around: Around, cuts: Cuts, apart: Apart) -> None:
        super().__init__(match, around, cuts.count - (cuts.played - len(match.blocks)))
        self.cuts, self.apart = cuts, apart
        self.made_of: dict[Op, Op] = {}
        """which op of the old graph each one stands for"""
        self.left = {base: list(parts) for base, parts in apart.parts.items()}
        """what is written into a tensor from here on, in the order of turns"""
        self.wholes: dict[Tensor, Tensor] = {}
        """what it is after what was written"""

    def _inside(self) -> dict[Owned, Plan]:
        return {}

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy a source; what stands for slices is made where a loop reads them."""
        own = old.name in self.apart.cut_of or old.name in self.apart.after
        return None if own or self._joins(old) else super().source(old, new, suffix)

    def _joins(self, t: Tensor) -> bool:
        """Whether it stands for a join of what these loops have made."""
        join = self.cuts.turns.joins.get(t.name)
        return join is not None and join.loop in self.cuts.group

    def owned(self, family: Family, new: Graph) -> Tensor:
        """Return the view of something outside whose first axis is that of the turns."""
        if isinstance(family, Owned) and family not in self.families:
            cut, _ = self.apart.cut_of[family.members[0].name]
            self.families[family] = self._in_turns(cut)
        return self.families[family]

    def _in_turns(self, cut: Cut) -> Tensor:
        x, axis, count = self._now(cut.base), cut.axis, self.count
        start, step = self._span(cut)
        if step != cut.size:  # one position each, and others between them
            assert isinstance(step.constant, int)
            x = slice_axis(x, axis, start, count, step.constant)
        elif start or step * count != x.sizes[axis]:
            x = slice_axis(x, axis, start, count * step)
        x = reshape(x, (*x.sizes[:axis], count, cut.size, *x.sizes[axis + 1 :]))
        return permute(x, (axis, *(i for i in range(x.ndim) if i != axis)))

    def _span(self, cut: Cut) -> tuple[Poly, Poly]:
        """Return where the first position is that turns of the loop have, and by how much they go on."""
        # of one that goes back, the last turn's comes first
        last = cut.start + cut.step * (self.cuts.count - 1 - self.match.blocks.start)
        if cut.loop in self.cuts.back:
            return last, -cut.step
        return cut.start + cut.step * self.match.blocks.start, cut.step

    def outer(self, value: Any) -> Tensor:
        """Return the tensor for what is read outside: a slice that a turn outside of the loop has."""
        if isinstance(value, Shared) and value.tensor.name in self.apart.cut_of:
            t = value.tensor
            if self.tensors[t] is None:
                cut, turn = self.apart.cut_of[t.name]
                self.tensors[t] = slice_axis(self._now(cut.base), cut.axis, self.cuts.start(cut, turn), cut.size)
            found: Tensor = self.tensors[t]
            return found
        return super().outer(value)

    def outside(self, op: Op, new: Graph) -> None:
        """Copy an op from outside, or join what turns have made and name what they have written."""
        name = op.operands[0].name if isinstance(op.kind, Keep) else ""
        if name in self.apart.after:
            self.tensors[op.results[0]] = self._now(self.apart.after[name])
        elif name and self._joins(op.operands[0]):
            operands = [self.outer(v) for v in once(self.around.reads[op])[1:]]
            join = self.cuts.turns.joins[name]
            kind = replace(join.kind, reverse=join.back != (join.loop in self.cuts.back))
            made = self.add(op, kind, operands, new, op.name).results[0]
            if self.laid_out(made) != self.laid_out(op.results[0]):
                raise GraphError(f"{made!r} joins what turns have made, expected {op.results[0]!r}")
        else:
            super().outside(op, new)

    def _now(self, base: Tensor) -> Tensor:
        """Return a tensor after the parts of it that are written so far."""
        whole: Tensor = self.wholes.get(base) or self.tensors[self.apart.tensors[base]]
        left = self.left.get(base, [])
        while left:
            cut, turn, t = left[0]
            family = self.around.family(t) if t.producer in self.match.places else None
            made = self.tensors.get(t) if family is None else self.families.get(family)
            if made is None:
                break
            start, step = (self.cuts.start(cut, turn), cut.size) if family is None else self._span(cut)
            part = made if family is None else self._merged(made, cut.axis)
            by = 1 if step == cut.size else int(step.constant or 1)
            kind = Revised(axes=(cut.axis,), starts=(start,), steps=(by,), unseen=cut.unseen)
            whole = self.new.add_op(kind, [whole, part], "revised", "forward").results[0]
            del left[: 1 if family is None else len(self.match.blocks)]
        self.wholes[base] = whole
        return whole

    @staticmethod
    def _merged(part: Tensor, axis: int) -> Tensor:
        """Return what all turns have as positions of the axis that they were cut from."""
        part = permute(part, (*range(1, axis + 1), 0, *range(axis + 1, part.ndim)))
        sizes = (*part.sizes[:axis], part.sizes[axis] * part.sizes[axis + 1], *part.sizes[axis + 2 :])
        return reshape(part, sizes)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op, which is of the turns around it that the op is of."""
        before = len(new)
        super().emit(op, new, suffix)
        if op.graph.parent is None:
            self.made_of |= dict.fromkeys(added_since(new, before), op)

    def again(self, op: Op, operands: Sequence[Tensor], new: Graph, name: str) -> Op:
        """Copy an op with other operands."""
        self.begin(op, operands)
        return super().again(op, operands, new, name)

    def laid_out(self, t: Tensor) -> tuple[object, ...]:
        """Return how a tensor lies in memory, wherever it begins."""
        return layout(t)[:3]

    def name_of(self, plan: Plan) -> str:
        """Return a name for a loop: the path that its ops have in common."""
        start = plan.run.starts[-1]
        paths = [op.scope.split("/") for op in self.match.ops[start : start + plan.run.length]]
        return "/".join((*(level for level in _common(paths) if level), "scan"))


def _common(paths: Sequence[Sequence[str]]) -> Iterator[str]:
    for levels in zip(*paths, strict=False):
        if len(set(levels)) > 1:
            return
        yield levels[0]
