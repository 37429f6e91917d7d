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
    heads,
    is_linear_in,
    live_ops,
    operand_placement,
    views,
    with_axis_moved,
)
from .placed_tensors import (
    RequestedPlacements,
    UnplacedSource,
)
from .token_routing import TokenRouting

__all__ = ["Cutting"]


class Cutting(TokenRouting):
    """Copies kernels."""

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.scattered: dict[Tensor, tuple[int, Tensor]] = {}
        """Results of scatters into zeros with one value along an axis: that axis, and the values."""

    def note_scattered(self, op: Op, operands: Sequence[Tensor], result: Tensor) -> None:
        """Record a scatter into zeros with one value along a sharded axis."""
        kind = op.kind
        if not isinstance(kind, Scatter) or kind.mode != "add" or len(operands) != 3:
            return
        zero, values, axis = self.tensors[op.operands[0]], operands[2], kind.batch
        one = values.sizes == (*result.sizes[:axis], ONE, *result.sizes[axis + 1 :])
        if (
            isinstance(zero, UnplacedSource)
            and zero.zero
            and one
            and any(isinstance(f, str) for f in self.placements[result].dims[axis])
        ):
            self.scattered[result] = axis, values

    def is_summed(self, op: Op) -> bool:
        """Whether an op sums such a scatter along its axis: all ranks have the values already."""
        if not isinstance(op.kind, Reduce) or op.kind.operation != "sum":
            return False
        local = self.tensors[op.operands[0]]
        if local not in self.scattered:
            return False
        axis, values = self.scattered[local]
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
        head_axes = heads(body) if self.requested.exchanged else {}
        for old in op.operands:
            if old.sizes in head_axes and old not in self.by_heads:
                self.swap(old, *head_axes[old.sizes], new, op.phase)
        operands = [self.operand(op, i, new, self.by_heads if head_axes else {}) for i in range(len(op.operands))]
        outer, self.open_kernel = self.open_kernel, SplitKernel(op, kind, operands, new, self.open_kernel)
        for f, t in zip(body.formals, operands, strict=True):
            self.tensors[f] = t
        needed = live_ops(body)
        for inner in body.ops:
            self.emit(inner, new)
            self.open_kernel.useful |= inner in needed
        outputs = [self.value(o, new) for o in body.outputs]
        self.open_kernel.outputs = outputs
        self.open_kernel.useful |= any(t.graph is self.open_kernel.body for t in outputs)
        self.open_kernel.close(last=True)
        self.open_kernel = outer
        for old, f, t in zip(op.operands, body.formals, operands, strict=True):
            if self.tensors[f] is not t:  # rows were exchanged
                self.tensors[old] = self.tensors[f]
        for t, inner_t in zip(op.results, outputs, strict=True):
            result = self.current_graph(new).adopt(inner_t)
            self.note_alias(result, inner_t)
            if inner_t in self.natural:
                self.natural[result] = self.natural[inner_t]
            if inner_t in self.scattered:
                self.scattered[result] = self.scattered[inner_t]
            self.tensors[t] = result
            if t.sizes in head_axes:
                self.swap_back(t, *head_axes[t.sizes], new, op.phase)

    def swap(self, old: Tensor, head: int, position: int, new: Graph, phase: str) -> None:
        """Redistribute an attention operand from sequence to heads; the base of its views is moved, which is saved."""
        t = self.value(old, new)
        placement = self.placements[t]
        for axis in self.requested.exchanged:
            if placement.dim(axis) == position:
                placement = with_axis_moved(placement, axis, head, old.sizes, self.mesh)
        if placement == self.placements[t]:
            return
        base, chain = old, list[Op]()
        for op in views(old) if phase == "forward" else ():
            base_placement = operand_placement(op.kind.placed(op), placement, self.mesh)  # type: ignore[arg-type]  # it has a rule
            if base_placement is None:
                break
            placement, base = base_placement, op.operands[0]
            chain.append(op)
        saved = {t: self.tensors[t] for t in (base, *(op.results[0] for op in chain))}
        self.by_heads[base] = self.tensors[base] = self.moved_to(self.value(base, new), placement, new, phase)
        for op in reversed(chain):
            self.plain(op, new)
        self.by_heads[old] = self.tensors[old]
        self.tensors |= saved

    def swap_back(self, old: Tensor, head: int, position: int, new: Graph, phase: str) -> None:
        """Redistribute an attention result from heads to the sequence."""
        t = self.tensors[old]
        placement = self.placements[t]
        for axis in self.requested.exchanged:
            if placement.dim(axis) == head:
                placement = with_axis_moved(placement, axis, position, old.sizes, self.mesh)
        if placement != self.placements[t]:
            self.by_heads[old], self.tensors[old] = t, self.moved_to(t, placement, new, phase)

    def operand(self, op: Op, i: int, new: Graph, by_heads: Mapping[Tensor, Tensor]) -> Tensor:
        """Return a kernel operand, with a partial sum reduced to the placement of a similar operand."""
        old = op.operands[i]
        similar = (
            self.placements[self.tensors[o]]
            for o in op.operands
            if o is not old and o.sizes == old.sizes and isinstance(self.tensors[o], Tensor)
            and not self.placements[self.tensors[o]].pending
        )  # fmt: skip
        if isinstance(self.tensors[old], UnplacedSource):
            return self.value(old, new, next(similar, None), op.phase)
        t = by_heads[old] if old in by_heads else self.value(old, new)
        placement = self.placements[t]
        if t in self.params and op.phase != "optimizer":
            placement = placement.without(self.params[t] & placement.axes, self.mesh)
        if t in self.undecided:
            placement = next(similar, placement)
        shared = all(self.mesh.beside(axis) & placement.axes for axis in placement.pending)
        assert isinstance(op.kind, Kernel)
        # row offsets are rank-local partial sums that ops inside handle themselves
        reduced = placement.pending and t not in self.rows.indices
        if reduced and not (shared and is_linear_in(op.kind.body, op.kind.body.formals[i])):
            placement = next(similar, placement.without(placement.pending, self.mesh))
        return self.moved_to(t, placement, new, op.phase)
