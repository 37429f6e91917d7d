"""Gradients of a unit: reduced by one collective once all of them are there, and what waits for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...algebra.polynomial import total
from ...dtypes import dtype as find_dtype
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.placement import Placement
from ...graph.tensor import Storage, Tensor
from ...ops.collectives import Collective
from .buffers import Buffers
from .flat import added, cast_to, from_rows, in_rows, joined, pieces
from .frames import is_cast
from .sums import adds
from .tensors import Stated

__all__ = ["Reducing"]


class Reducing(Buffers):
    """Puts off the reduction of gradients until those of their unit are there."""

    def __init__(self, stated: Stated) -> None:
        super().__init__(stated)
        self.reduced: dict[Storage, Tensor] = {}
        """What is left of storages of gradients."""

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what stands for an op."""
        raise NotImplementedError

    def put_off(self, op: Op) -> bool:
        """Whether an op waits until the gradients that it reads are reduced, with the others of their unit."""
        frame = self.frame
        if op.results and op.results[0] in frame.casts:  # what is put together has the format
            self.tensors[op.results[0]] = self.tensors[op.operands[0]]
            return True
        found = op.loop is None and any(t in frame.late or t in frame.waiting for t in op.operands)
        if not found or (op.phase == "optimizer" and not frame.layer):
            return False
        frame.waiting |= dict.fromkeys(op.results, op)
        return True

    def unfinished(self, t: Tensor) -> bool:
        """Whether an old tensor is a part of a sum that ranks add up before they reduce it."""
        if self.stated.reduce_each or self.policy is None or not self.policy.by_unit:
            return False
        return any(self._adds_to_parts(op) for op in t.graph.successors(t))

    def _adds_to_parts(self, op: Op) -> bool:
        """Whether an op adds to what is a part of a sum on each rank already."""
        t = op.operands[0] if adds(op) else None
        while t is not None and t not in self.tensors:
            t = t.producer.operands[0] if t.producer is not None and adds(t.producer) else None
        base = None if t is None else self.tensors[t]
        return isinstance(base, Tensor) and bool(self.at[base].pending)

    def defer(self, t: Tensor) -> bool:
        """Let a gradient be reduced with the others of its unit; False where it is none that can be."""
        made = self.tensors[t]
        axes = self.reducible(made, self.wanted[t])
        if self.policy is None or not self.policy.by_unit or self.piece is not None or not axes:
            return False
        self.frame.late[t] = self._unit(t)
        return True

    def _unit(self, t: Tensor) -> str:
        """Return the unit that an old tensor is a gradient of."""
        frame = self.frame
        if frame.split:
            op = t.producer
            # a sum is in no layer, its terms are
            while op is not None and adds(op) and frame.unit_at(op) == "layer":
                op = op.operands[1].producer
            return "layer" if op is None else frame.unit_at(op)
        return "layer" if frame.layer else frame.owners.get(t, "")

    def narrow(self, op: Op) -> bool:
        """Let a gradient be reduced as it is computed, and cast behind that; False where it is none."""
        t, found = op.results[0], self.tensors.get(op.operands[0]) if op.operands else None
        policy = self.policy
        if policy is None or policy.param_dtype is None or self.piece is not None or not isinstance(found, Tensor):
            return False
        made = is_cast(op) and t in self.wanted and found.dtype.name == policy.param_dtype
        if not made or self.unfinished(t) or not self.reducible(found, self.wanted[t]):
            return False
        self.tensors[t] = found
        return True

    def reducible(self, t: Tensor, want: Placement) -> tuple[str, ...]:
        """Return the axes along which parts of a sum become parts of a gradient."""
        pending = self.at[t].pending
        return tuple(a for a in self.mesh if a in self.stated.gathered and a in pending and want.dim(a) is not None)

    def reduce(self, grads: Iterable[Tensor], new: Graph) -> None:
        """Reduce gradients, those that one collective can have by one."""
        groups: dict[object, list[Tensor]] = {}
        grads = [*grads]
        # over axes along which the whole unit is copied, what is left of it is reduced: less
        copied = {a for a in self.mesh if all(self._summed(t, a) for t in grads)}
        for t in grads:
            del self.frame.late[t]
            want = self.wanted[t]
            axes = self.reducible(self.tensors[t], want)
            pending = tuple(p for p in self.at[self.tensors[t]].partial if p[0] in {*axes, *copied})
            middle = Placement(want.without(axes, self.mesh).dims, pending)
            assert t.producer is not None
            self.tensors[t] = self.moved_to(self.tensors[t], middle, new, t.producer.phase)
            groups.setdefault((axes, pending, t.dtype, self.tensors[t].dtype), []).append(t)
        inputs = [self._at_once(members, new) for members in groups.values()]
        if self.policy is not None and self.policy.prefetch and (self.frame.split or not self.frame.layer):
            self.frame.inputs += inputs
        waiting = list(dict.fromkeys(self.frame.waiting.values()))
        for op in waiting:
            if not any(t in self.frame.late or t in self.frame.waiting for t in op.operands):
                for t in op.results:
                    del self.frame.waiting[t]
                self.emit(op, new)

    def _summed(self, t: Tensor, axis: str) -> bool:
        """Whether a gradient is reduced over an axis and is whole along it."""
        return axis in self.at[self.tensors[t]].pending and self.wanted[t].dim(axis) is None

    def _at_once(self, grads: Sequence[Tensor], new: Graph) -> Tensor:
        """Reduce gradients by one collective; returns the buffer that it reads."""
        first, wanted = self.tensors[grads[0]], [self.wanted[t] for t in grads]
        axes, how = self.reducible(first, wanted[0]), self.at[first].pending
        assert grads[0].producer is not None
        assert self.policy is not None
        phase = grads[0].producer.phase
        rows = [in_rows(new, self.tensors[t], at, axes, self.mesh, phase) for t, at in zip(grads, wanted, strict=True)]
        parts, dtype = [row.sizes[-1] for row in rows], find_dtype(self.policy.reduce_dtype or first.dtype)
        unit = new.name if self.frame.layer and not self.frame.split else self._unit(grads[0]) or "root"
        name = f"{unit}.reduce_scatter"
        if self.policy.prefetch:
            rows[0] = self.before_input(rows[0], total(parts), dtype, new, phase)
        flat = brought = joined(new, rows, dtype, f"{name}.copy_in", phase)
        if self.policy.prefetch and self.frame.layer and not self.frame.split:
            self.frame.carried[-1].next = flat
        for i, a in enumerate(axes):
            kind = Collective(collective="reduce_scatter", ranks=self.mesh[a], axis=a, dim=i, operation=how[a])
            flat = added(new, kind, [flat], name, phase)
        for a in (a for a in how if a not in axes):
            kind = Collective(collective="all_reduce", ranks=self.mesh[a], axis=a, operation=how[a])
            flat = added(new, kind, [flat], f"{name}.all_reduce", phase)
        flat = cast_to(new, flat, grads[0].dtype, f"{name}.cast", phase)
        for t, at, row in zip(grads, wanted, pieces(new, flat, parts, name, phase), strict=True):
            sizes = at.local(t.sizes)
            made = from_rows(new, row, at, sizes, axes, self.mesh, f"{t.name}.reduce_scatter", phase, whole=False)
            self.tensors[t], self.at[made] = made, at
            self.reduced[t.storage] = made
        return brought
