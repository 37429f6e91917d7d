"""Which parameters a body reads as one unit, and from which op to which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...graph.graph import Graph
from ...graph.loop import is_pass
from ...graph.op import Op
from ...graph.tensor import Storage, Tensor
from ...ops.keep import Keep
from ...ops.pointwise import Pointwise

__all__ = ["Frame", "Unit", "is_cast", "reads", "window"]

#: The pass of a phase: what is computed again belongs to the backward pass.
_WINDOWS = {"forward": "forward", "recompute": "backward", "backward": "backward"}


def window(op: Op) -> str | None:
    """Return the pass that an op belongs to, None of an update."""
    return _WINDOWS.get(op.phase)


def is_cast(op: Op) -> bool:
    """Whether an op does nothing but convert to another format."""
    return isinstance(op.kind, Pointwise) and op.kind.function.name == "cast"


def reads(op: Op) -> Sequence[Tensor]:
    """Return what an op reads as a whole: of a loop not what its iterations read in slices, or put together."""
    if op.loop is None:
        return () if isinstance(op.kind, Keep) else op.operands
    return (*op.loop.starts, *(() if is_pass(op.loop.body) else op.loop.shared))


@dataclass
class Unit:
    """Parameters that are put together at once."""

    key: str
    """The beginning of their names; nothing of the root."""
    members: list[Tensor] = field(default_factory=list)
    """Old tensors."""
    first: dict[str, Op] = field(default_factory=dict)
    """The first op of each pass that reads one."""
    last: dict[str, Op] = field(default_factory=dict)
    """The last one."""


@dataclass
class Carried:
    """What an iteration hands to the next one so that it lives as long."""

    what: str
    """flat or input"""
    start: Tensor
    next: Tensor | None = None


@dataclass
class Frame:
    """A body, and what there is of its units while it is copied."""

    around: Op | None = None
    """The loop, None of the graph itself."""
    layer: bool = False
    """Whether it is that of a loop over layers, which is one unit from its beginning to its end."""
    split: bool = False
    """Whether an iteration has several layers, each of which is a unit."""
    units: list[Unit] = field(default_factory=list)
    of: dict[Storage, Unit] = field(default_factory=dict)
    """The unit of the storage of an old tensor: views of a member are of its unit as well."""
    casts: dict[Tensor, Tensor] = field(default_factory=dict)
    """Old tensors that are members in the format that these are put together in, and the members."""
    shards: dict[Tensor, Tensor] = field(default_factory=dict)
    """What a rank has of each member."""
    halves: dict[Tensor, Tensor] = field(default_factory=dict)
    """What a rank has of each between the passes, where that is more."""
    open: dict[str, dict[Tensor, Tensor]] = field(default_factory=dict)
    """Members that are put together now, by unit."""
    ahead: dict[str, list[Tensor]] = field(default_factory=dict)
    """Buffers of units that have been asked for already."""
    late: dict[Tensor, str] = field(default_factory=dict)
    """Old tensors that are gradients yet to be reduced, and their unit."""
    waiting: dict[Tensor, Op] = field(default_factory=dict)
    """Old tensors that are made once gradients are reduced, and the ops that make them."""
    owners: dict[Tensor, str] = field(default_factory=dict)
    """Units of old tensors that are gradients."""
    flats: list[Tensor] = field(default_factory=list)
    """Buffers of parameters that live until the next ones are there."""
    inputs: list[Tensor] = field(default_factory=list)
    """Buffers of gradients that live until the next ones are made."""
    carried: list[Carried] = field(default_factory=list)
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Members that are kept for the backward pass, put together."""
    end: Op | None = None
    """The last op of the forward pass that reads any."""

    def note(self, old: Graph, members: Mapping[Tensor, str], dtype: str | None = None) -> None:
        """Note the units of members, casts to the format that they have there, and where each begins and ends."""
        read = {t.storage for op in old.ops if window(op) for t in reads(op)}
        for t, key in members.items():
            if t.storage in read:
                unit = next((u for u in self.units if u.key == key), None) or self._added(key)
                self.of[t.storage] = unit
                unit.members.append(t)
        for op in old.ops:
            c = op.results[0] if op.results else None
            if c is not None and self._narrows(op, c, dtype):
                self.casts[c], self.of[c.storage] = op.operands[0], self.of[op.operands[0].storage]
        root = next((u for u in self.units if not u.key), None)
        for op in old.ops:
            found = window(op)
            if found is None or (op.results and op.results[0] in self.casts):
                continue
            touched = list(self._at(op))
            for unit in touched:
                unit.first.setdefault(found, op)
                unit.last[found] = op
            if found == "forward" and (touched or op.loop is not None):
                self.end = op
            if root is not None and found in root.first and (found == "backward" or touched):
                root.last[found] = op

    def ordered(self, phase: str, old: Graph) -> list[Unit]:
        """Return the units that a pass reads, in its order."""
        found = [u for u in self.units if phase in u.first]
        return sorted(found, key=lambda u: old.ops.index(u.first[phase]))

    def unit_at(self, op: Op) -> str:
        """Return the unit whose layer has the scope of an op; gradients of other ops are reduced behind all layers."""
        scope = f"{op.scope}/"
        return next((u.key for u in self.units if scope.startswith(f"{u.key}/")), "layer")

    def _narrows(self, op: Op, made: Tensor, dtype: str | None) -> bool:
        """Whether an op casts a member for a pass and nobody else."""
        handed = made in op.graph.outputs and (self.around is None or made not in self.around.loop.saved)  # type: ignore[union-attr]
        member = is_cast(op) and any(op.operands[0] in unit.members for unit in self.units)
        return member and made.dtype.name == dtype and not handed and all(map(window, (op, *op.graph.successors(made))))

    def _added(self, key: str) -> Unit:
        self.units.append(Unit(key))
        return self.units[-1]

    def _at(self, op: Op) -> Iterator[Unit]:
        """Yield the units that an op belongs to: it reads them, or stands in their scope."""
        read = {self.of[t.storage].key for t in reads(op) if t.storage in self.of}
        scope = re.sub(r"[/.]+", ".", op.scope) + "."
        for unit in self.units:
            if unit.key in read or (unit.key and scope.startswith(re.sub(r"[/.]+", ".", unit.key) + ".")):
                yield unit

    def beginning(self, op: Op) -> Iterator[tuple[Unit, str]]:
        """Yield the units that begin at an op."""
        yield from ((u, w) for u in self.units for w, first in u.first.items() if first is op)

    def ending(self, op: Op) -> Iterator[tuple[Unit, str]]:
        """Yield the units that end at an op, the root the last."""
        units = sorted(self.units, key=lambda u: not u.key)
        yield from ((u, w) for u in units for w, last in u.last.items() if last is op)

    def following(self, unit: Unit, old: Graph) -> Unit | Op | None:
        """Return the unit that the backward pass reads next, or the loop that comes before it."""
        order: list[Unit | Op] = []
        for op in old.ops:
            order += [u for u, w in self.beginning(op) if w == "backward"]
            order += [op] if op.loop is not None else []
        at = order.index(unit) + 1
        return order[at] if at < len(order) else None
