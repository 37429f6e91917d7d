"""Kernels that use each part of a tensor as it passes by, in a ring of ranks, where else all are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...algebra.polynomial import total
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.collectives import Collective
from ...ops.contraction import Einsum
from ..rewrite import Rewriter

__all__ = ["in_rings"]


def in_rings(graph: Graph, axes: frozenset[str]) -> Graph:
    """Let kernels pass around what is put together for them alone along some axes, and sums that they alone make.

    A ring of n ranks: each works on the part that it has while it hands that on to the next one and receives another, n
    - 1 times; a sum goes once around, n times, and each rank adds to it. Of each tensor the part that leaves and the
    one that arrives are in flight (Liu et al. 2023, arXiv 2310.01889). What is computed stays the same; these
    collectives are then inside of the kernels.
    """
    return _Rings(axes).run(graph)


@dataclass(frozen=True)
class _Ring:
    """What passes by a kernel."""

    gathered: tuple[Op, ...]
    """all-gathers of operands"""
    summed: tuple[Op, ...]
    """reduce-scatters of results"""


class _Rings(Rewriter):
    """Copies a graph with collectives inside of the kernels that they are for."""

    lies = True

    def __init__(self, axes: frozenset[str]) -> None:
        super().__init__()
        self.axes = axes
        self.found: dict[Op, _Ring] = {}
        """Rings, by their kernels."""
        self.within: set[Op] = set()
        """Collectives that are part of one."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        for op in () if old.fused else old.ops:
            if isinstance(op.kind, Kernel):
                self.look(op, op.kind)
        super().fill(old, new, suffix)

    def look(self, op: Op, kind: Kernel) -> None:
        """Note what passes by a kernel: tensors of which it makes products, and sums of products that it makes."""
        gathered = [
            made for f, t in zip(kind.body.formals, op.operands, strict=True)
            if (made := t.producer) is not None and self.joins(made, "all_gather")
            and _only(t, op) and made.operands[0].role != "param"
            and any(isinstance(inner.kind, Einsum) for inner in kind.body.successors(f))
        ]  # fmt: skip
        summed = [
            reader for t, inner in zip(op.results, kind.body.outputs, strict=True)
            for reader in op.graph.successors(t)
            if self.joins(reader, "reduce_scatter") and _only(t, reader)
            and inner.producer is not None and isinstance(inner.producer.kind, Einsum)
        ]  # fmt: skip
        if gathered:
            self.found[op] = _Ring(tuple(gathered), tuple(summed))
            self.within |= {*gathered, *summed}

    def joins(self, op: Op, collective: str) -> bool:
        """Whether an op puts parts together, or makes them, along one of the axes."""
        kind = op.kind
        return isinstance(kind, Collective) and kind.collective == collective and kind.axis in self.axes

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if op in self.found:
            self.ring(op, self.found[op], new)
        elif op not in self.within:
            self.copy(op, new, suffix)

    def ring(self, op: Op, ring: _Ring, new: Graph) -> None:
        """Add a kernel with its collectives."""
        kind, old = op.kind, op.body
        assert isinstance(kind, Kernel)
        assert old is not None
        inside = {t: made.operands[0] for made in ring.gathered for t in made.results}
        outer = list(dict.fromkeys(inside.get(t, t) for t in op.operands))
        body = new.start_body(old.name, fused=True)
        own = {}
        for t in outer:
            made = self.tensors[t]
            own[t] = body.formal(made, f"{made.name}.in", made.sizes, made.strides)
            own[t].offset = made.offset
        for made in ring.gathered:
            kept = replace(made.kind, ring=True)  # type: ignore[call-arg]  # a collective
            self.tensors[made.results[0]] = self.add(made, kept, [own[made.operands[0]]], body).results[0]
        for f, t in zip(old.formals, op.operands, strict=True):
            self.tensors[f] = self.tensors[t] if t in inside else own[t]
        super().fill(old, body)
        ends = self.ends(op, old, ring, body)
        body.outputs += [body.adopt(t) for t in ends.values()]
        flying = total(2 * t.storage.bytes for t in (*(own[m.operands[0]] for m in ring.gathered), *self.sums(ring)))
        made = self.add(
            op, replace(kind, body=body, workspace=kind.workspace + flying), [self.tensors[t] for t in outer], new
        )  # fmt: skip
        self.tensors |= dict(zip(ends, made.results, strict=True))

    def ends(self, op: Op, old: Graph, ring: _Ring, body: Graph) -> dict[Tensor, Tensor]:
        """Return what a kernel hands out, by what that is outside of it: of sums the part of this rank."""
        scattered = {t: reader for reader in ring.summed for t in reader.operands}
        out = {}
        for t, inner in zip(op.results, old.outputs, strict=True):
            reader = scattered.get(t)
            if reader is None:
                out[t] = self.tensors[inner]
                continue
            kept = replace(reader.kind, ring=True)  # type: ignore[call-arg]  # a collective
            out[reader.results[0]] = self.add(reader, kept, [self.tensors[inner]], body).results[0]
        return out

    def sums(self, ring: _Ring) -> Sequence[Tensor]:
        """Return the parts of sums that a rank is left with."""
        return [self.tensors[reader.results[0]] for reader in ring.summed]


def _only(t: Tensor, op: Op) -> bool:
    """Whether one op alone reads a tensor."""
    return t not in t.graph.outputs and all(reader is op for reader in t.graph.successors(t))
