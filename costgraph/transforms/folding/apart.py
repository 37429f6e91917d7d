"""Turns of loops with their slices for themselves: what they share with each other is left outside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...algebra.polynomial import ZERO, Poly
from ...errors import GraphError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.keep import Keep
from ...ops.moves import Slice
from ..rewrite import Rewriter
from .cuts import Cut, Cuts, Path
from .match import is_free_view

__all__ = ["Apart", "Beginning"]


class Beginning(Rewriter):
    """Copies kernels whose inputs begin where what they are given does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begins: dict[Tensor, Poly] = {}
        """where inputs of kernels begin"""

    def begin(self, op: Op, operands: Sequence[Tensor]) -> None:
        """Note where the operands of an op begin that is copied next."""
        if op.body is not None and op.body.fused:
            self.begins |= {f: t.offset for f, t in zip(op.body.formals, operands, strict=True)}

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        """Copy an input of a body."""
        made = super().formal(old, body, suffix)
        made.offset = self.begins.get(old, made.offset)
        return made


class Apart(Beginning):
    """Copies a graph in which each turn has its slices for itself, as nobody has made them."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts
        self.paths: dict[Op, Path] = {}
        self.labels: dict[Op, int] = {}
        """place of the turn of each op"""
        self.cut_of: dict[str, tuple[Cut, int]] = {}
        """the cut that a tensor stands for, and its turn, by name"""
        self.after: dict[str, Tensor] = {}
        """by the name of what a `keep` holds, the tensor whose parts were written"""
        self.parts: dict[Tensor, list[tuple[Cut, int, Tensor]]] = {}
        """what was written into a tensor: the cut that it is of, and its turn"""
        self._numbers: dict[Cut, int] = {}
        self._begun: set[int] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, but for slices and names of what was written."""
        number = self.cuts.loop(op)
        if number is not None and number not in self._begun:
            self._begun.add(number)
            for view in self.cuts.ahead.get(number, ()):
                super().emit(view, new, suffix)
        if op in self.cuts.same:
            self.tensors[op.results[0]] = self.tensors[self.cuts.same[op].results[0]]
        elif op.graph.parent is not None:
            super().emit(op, new, suffix)
        elif op in self.cuts.of and op.operands[0].producer in self.cuts.written and self._again(op):
            self.tensors[op.results[0]] = self.tensors[op.operands[0].producer.operands[1]]
        elif op in self.cuts.of:
            cut, turn = self.cuts.of[op]
            t, number = op.results[0], self._numbers.setdefault(cut, len(self._numbers))
            name = f"cut.{number}.i{self.cuts.at(cut.loop, turn)}"
            self.tensors[t] = self._source(new, name, t, ZERO)
            self.cut_of[name] = cut, turn
        elif op in self.cuts.written:
            self._written(op, *self.cuts.written[op], new)
        else:
            super().emit(op, new, suffix)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; one outside of loops that reads what a turn has cut out reads a view of its own."""
        if op.graph.parent is None and self.cuts.loop(op) is None:
            seen = {t: self._apart(t, new) for t in op.operands if self._is_cut(t)}
            before = {t: self.tensors[t] for t in seen}
            self.tensors |= seen
            self.begin(op, [self.tensors[t] for t in op.operands])
            made = super().copy(op, new, suffix)
            self.tensors |= before
            return made
        if op.graph.parent is None:
            self.begin(op, [self.tensors[t] for t in op.operands])
        return super().copy(op, new, suffix)

    def _is_cut(self, t: Tensor) -> bool:
        """Whether a tensor is a slice that goes on with the turns, or a view of one."""
        op = t.producer
        return op in self.cuts.of or (op is not None and is_free_view(op) and self._is_cut(op.operands[0]))

    def _apart(self, t: Tensor, new: Graph) -> Tensor:
        """Make a view again, outside of the turn that has made it."""
        op = t.producer
        if op is None or not (op in self.cuts.of or self._is_cut(op.operands[0])):
            found: Tensor = self.tensors[t]
            return found
        kind = op.kind
        if isinstance(kind, Slice) and op in self.cuts.of:
            kind = replace(kind, start=self.cuts.start(*self.cuts.of[op]), room=None)
        made = new.add_op(kind, [self._apart(op.operands[0], new)], op.name, op.phase)
        made.scope = op.scope
        return made.results[0]

    def add(self, op: Op, kind: Any, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add a copy, in the turn of the op."""
        at = self.cuts.turn(op)
        if at is not None:
            name = re.sub(r"_\d+$", "", op.name) + f".i{at}"
        made = super().add(op, kind, operands, new, name)
        if op in self.cuts.turns.paths:
            path = self.cuts.turns.paths[op]
            self.paths[made] = path[:-1] if op in self.cuts.same else path
        if at is not None:
            self.labels[made] = at
        return made

    def _again(self, op: Op) -> bool:
        """Whether a slice is what the same turn has written there before."""
        before = op.operands[0].producer
        return before is not None and self.cuts.turn(before) == self.cuts.turn(op)

    def _written(self, op: Op, cut: Cut, turn: int, new: Graph) -> None:
        """Note a part; once all are written, a name for the whole."""
        parts = self.parts.setdefault(cut.base, [])
        if parts and parts[-1][1] == turn:
            parts.pop()  # it has written there before
        parts.append((cut, turn, self.tensors[op.operands[1]]))
        if turn + 1 < self.cuts.played or self.cuts.goes_on(op):
            return
        if len(parts) < self.cuts.played:
            raise GraphError(f"{len(parts)} of {self.cuts.played} turns write into {cut.base.name!r}, expected all")
        name = f"after.{len(self.after)}"
        self.after[name] = cut.base
        whole = self._source(new, name, cut.base, cut.base.offset)
        held = new.add_op(Keep(), [whole, *(t for *_, t in parts)], "written", op.phase)
        held.scope = op.scope
        self.paths[held] = self.cuts.turns.paths[op][:-1]
        self.tensors[op.results[0]] = held.results[0]

    @staticmethod
    def _source(new: Graph, name: str, like: Tensor, offset: Poly) -> Tensor:
        made = Tensor(new, name, like.sizes, like.dtype, role="buffer", strides=like.strides, offset=offset)
        new.add_node(made)
        return made
