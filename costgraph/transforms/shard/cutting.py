"""Split fused kernels where a collective is needed, and exchange heads for the sequence around attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...algebra.polynomial import ONE
from ...ir.graph import Graph, Op, Tensor
from ...ops.index import Scatter
from ...ops.loops import Kernel
from ...ops.reduce import Reduce
from .kernels import (
    SplitKernel,
    before,
    heads,
    live,
    passes,
    swapped,
    views,
)
from .placed_tensors import (
    RequestedPlacements,
    UnplacedSource,
)
from .token_routing import TokenRouting

__all__ = ["Cutting"]


class Cutting(TokenRouting):
    """Copies kernels."""

    def __init__(self, stated: RequestedPlacements) -> None:
        super().__init__(stated)
        self.scattered: dict[Tensor, tuple[int, Tensor]] = {}
        """Results of scatters into zeros with one value along an axis: that axis, and the values."""

    def note_scattered(self, op: Op, operands: Sequence[Tensor], made: Tensor) -> None:
        """Record a scatter into zeros with one value along a sharded axis."""
        kind = op.kind
        if not isinstance(kind, Scatter) or kind.mode != "add" or len(operands) != 3:
            return
        zero, values, axis = self.tensors[op.operands[0]], operands[2], kind.batch
        one = values.sizes == (*made.sizes[:axis], ONE, *made.sizes[axis + 1 :])
        if (
            isinstance(zero, UnplacedSource)
            and zero.zero
            and one
            and any(isinstance(f, str) for f in self.at[made].dims[axis])
        ):
            self.scattered[made] = axis, values

    def is_summed(self, op: Op) -> bool:
        """Whether an op sums such a scatter along its axis: all ranks have the values already."""
        if not isinstance(op.kind, Reduce) or op.kind.operation != "sum":
            return False
        found = self.tensors[op.operands[0]]
        if found not in self.scattered:
            return False
        axis, values = self.scattered[found]
        x, (r,) = op.operands[0], op.results
        if r.sizes != (*x.sizes[:axis], ONE, *x.sizes[axis + 1 :]) or r.dtype != values.dtype:
            return False
        self.tensors[r] = values
        return True

    def plain(self, op: Op, new: Graph) -> None:
        """Add an op with local sizes."""
        raise NotImplementedError

    def kernel(self, op: Op, new: Graph) -> None:
        """Copy a kernel; it becomes several if collectives are needed between its ops."""
        kind = op.kind
        assert isinstance(kind, Kernel)
        body = kind.body
        places = heads(body) if self.stated.exchanged else {}
        for old in op.operands:
            if old.sizes in places and old not in self.inside:
                self.swap(old, *places[old.sizes], new, op.phase)
        operands = [self.prepared(op, i, new, self.inside if places else {}) for i in range(len(op.operands))]
        outer, self.piece = self.piece, SplitKernel(op, kind, operands, new, self.piece)
        for f, t in zip(body.formals, operands, strict=True):
            self.tensors[f] = t
        needed = live(body)
        for inner in body.ops:
            self.emit(inner, new)
            self.piece.useful |= inner in needed
        made = [self.value(o, new) for o in body.outputs]
        self.piece.outputs = made
        self.piece.useful |= any(t.graph is self.piece.body for t in made)
        self.piece.close(last=True)
        self.piece = outer
        for old, f, t in zip(op.operands, body.formals, operands, strict=True):
            if self.tensors[f] is not t:  # rows were exchanged
                self.tensors[old] = self.tensors[f]
        for t, inner_t in zip(op.results, made, strict=True):
            result = self.here(new).adopt(inner_t)
            self.stands_for(result, inner_t)
            if inner_t in self.homes:
                self.homes[result] = self.homes[inner_t]
            if inner_t in self.scattered:
                self.scattered[result] = self.scattered[inner_t]
            self.tensors[t] = result
            if t.sizes in places:
                self.swap_back(t, *places[t.sizes], new, op.phase)

    def swap(self, old: Tensor, head: int, position: int, new: Graph, phase: str) -> None:
        """Redistribute an attention operand from sequence to heads; the base of its views is moved, which is saved."""
        t = self.value(old, new)
        at = self.at[t]
        for axis in self.stated.exchanged:
            if at.dim(axis) == position:
                at = swapped(at, axis, head, old.sizes, self.mesh)
        if at == self.at[t]:
            return
        base, chain = old, list[Op]()
        for op in views(old) if phase == "forward" else ():
            wanted = before(op.kind.placed(op), at, self.mesh)  # type: ignore[arg-type]  # it has a rule
            if wanted is None:
                break
            at, base = wanted, op.operands[0]
            chain.append(op)
        known = {t: self.tensors[t] for t in (base, *(op.results[0] for op in chain))}
        self.inside[base] = self.tensors[base] = self.moved_to(self.value(base, new), at, new, phase)
        for op in reversed(chain):
            self.plain(op, new)
        self.inside[old] = self.tensors[old]
        self.tensors |= known

    def swap_back(self, old: Tensor, head: int, position: int, new: Graph, phase: str) -> None:
        """Redistribute an attention result from heads to the sequence."""
        t = self.tensors[old]
        at = self.at[t]
        for axis in self.stated.exchanged:
            if at.dim(axis) == head:
                at = swapped(at, axis, position, old.sizes, self.mesh)
        if at != self.at[t]:
            self.inside[old], self.tensors[old] = t, self.moved_to(t, at, new, phase)

    def prepared(self, op: Op, i: int, new: Graph, inside: Mapping[Tensor, Tensor]) -> Tensor:
        """Return a kernel operand, with a partial sum reduced to the placement of a similar operand."""
        old = op.operands[i]
        similar = (
            self.at[self.tensors[o]]
            for o in op.operands
            if o is not old and o.sizes == old.sizes and isinstance(self.tensors[o], Tensor)
            and not self.at[self.tensors[o]].pending
        )  # fmt: skip
        if isinstance(self.tensors[old], UnplacedSource):
            return self.value(old, new, next(similar, None), op.phase)
        t = inside[old] if old in inside else self.value(old, new)
        at = self.at[t]
        if t in self.params and op.phase != "optimizer":
            at = at.without(self.params[t] & at.axes, self.mesh)
        if t in self.undecided:
            at = next(similar, at)
        shared = all(self.mesh.beside(axis) & at.axes for axis in at.pending)
        assert isinstance(op.kind, Kernel)
        # row offsets are rank-local partial sums that ops inside handle themselves
        reduced = at.pending and t not in self.rows.own
        if reduced and not (shared and passes(op.kind.body, op.kind.body.formals[i])):
            at = next(similar, at.without(at.pending, self.mesh))
        return self.moved_to(t, at, new, op.phase)
