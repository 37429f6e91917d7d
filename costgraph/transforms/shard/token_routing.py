"""Token routing of expert parallelism: all-to-alls that send tokens to their experts and back."""

from __future__ import annotations

from dataclasses import replace

from ...ir.graph import Graph, Op, Placement, Tensor
from ...ops.collectives import Collective, Merge
from ...ops.elementwise import Pointwise
from ...ops.experts import Dispatch, GroupedMatmul
from ...ops.index import Gather, Indexed
from .choice import Routing
from .fsdp import ParamGroups
from .placed_tensors import RequestedPlacements

__all__ = [
    "TokenRouting",
]


class TokenRouting(ParamGroups):
    """Sends rows where an op needs them: to their tokens' rank or to their experts' rank.

    Each rank sorts the rows of its tokens by expert and exchanges them by an all-to-all along a mesh axis, after one
    with row offsets; received rows are sorted by expert again. Routing is assumed to be balanced: every rank sends
    equally many rows to each other. Later readers use the exchanged rows.
    """

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.exchanged: dict[tuple[Tensor, str, Graph], Tensor] = {}
        """Exchanged rows."""
        self.local_ends: dict[tuple[Tensor, Graph], Tensor] = {}
        """Row offsets for one rank's experts, after the exchange."""
        self.joined: dict[Tensor, frozenset[str]] = {}
        """Old token indices, and the mesh axes along which their tokens are replicated."""
        self.read: dict[Tensor, list[Tensor]] = {}
        """New tensors that ops have read for an old one."""
        self.merged: dict[tuple[Tensor, Graph, bool], Op] = {}
        """The order of received rows, computed once for each pass."""

    def routed(self, op: Op, new: Graph) -> str:
        """Bring the rows of all operands together; return the mesh axis along which they are with their experts."""
        if isinstance(op.kind, Dispatch):
            self.joined[op.results[0]] = self.width_axes(op)
            self.join(op.operands[0], self.width_axes(op), new, op.phase)
        elif isinstance(op.kind, Gather) and op.operands[1] in self.joined:
            self.join(op.operands[0], self.joined[op.operands[1]], new, op.phase)
        inputs = [self.tensors[t] for t in op.operands]
        location = self.rows.location(op, inputs, self.expert_placement(op))
        if location is None:
            return ""
        axis, routing = location
        for old, t in zip(op.operands, inputs, strict=True):
            order, indices = self.rows.ordered.get(t), self.rows.indices.get(t)
            if (
                order is None
                or order.axis == axis
                or (indices is not None and indices.meaning == "tokens" and not axis)
            ):
                continue
            self.tensors[old] = moved = self.exchange_rows(t, axis, routing, new, op.phase)
            if self.open_kernel is not None:  # the kernel reads the exchanged rows instead
                self.open_kernel.operands = [moved if o is t else o for o in self.open_kernel.operands]
        return axis

    def join(self, old: Tensor, axes: frozenset[str], new: Graph, phase: str) -> None:
        """Replicate tokens along mesh axes that split expert widths: expert parameters are not moved."""
        t = self.tensors[old]
        if isinstance(t, Tensor) and axes & self.placements[t].axes and t not in self.rows.ordered:
            self.tensors[old] = self.moved_to(t, self.placements[t].without(axes, self.mesh), new, phase)

    def width_axes(self, op: Op) -> frozenset[str]:
        """Return the mesh axes that split the matrices of each expert and are not gathered."""
        axes: set[str] = set()
        for reader in op.graph.successors(op.results[1]):
            if not isinstance(reader.kind, GroupedMatmul):
                continue
            weights = reader.operands[1]
            while weights.producer is not None and isinstance(weights.producer.kind, Pointwise):  # a cast
                weights = weights.producer.operands[0]
            local = self.tensors.get(weights)
            placement = self.placements[local] if isinstance(local, Tensor) else self.requested.placements.get(weights)
            axes |= {f for dim in (placement.dims[1:] if placement else ()) for f in dim if isinstance(f, str)}
        return frozenset(axes) - self.requested.gathered

    def expert_placement(self, op: Op) -> Placement | None:
        """Return the placement of the expert parameters that an op reads, after gathering."""
        index = 1 if isinstance(op.kind, GroupedMatmul) else 0 if isinstance(op.kind, Indexed) else None
        local = None if index is None else self.tensors[op.operands[index]]
        if not isinstance(local, Tensor):
            return None
        gathered = self.params.get(local, frozenset()) if op.phase != "optimizer" else frozenset()
        return self.placements[local].without(gathered & self.placements[local].axes, self.mesh)

    def exchange_rows(self, t: Tensor, axis: str, routing: Routing, new: Graph, phase: str) -> Tensor:
        """Return rows with their experts along a mesh axis, or with their tokens if `axis` is empty."""
        graph = new if self.open_kernel is None else self.open_kernel.outside(t)
        key = t, axis, graph
        if key in self.exchanged:
            return self.exchanged[key]
        order, indices = self.rows.ordered[t], self.rows.indices.get(t)
        if order.dims != {0} or (indices is not None and (indices.meaning != "owners" or not axis)):
            self.rows.refuse(t)
        along = axis or order.axis
        merge = self.merge(routing, along, graph, phase)
        if indices is not None:
            rows = merge.results[3]
            self.rows.indices[rows] = replace(indices, axis=axis)
        else:
            exchange = self.all_to_all(along)
            kinds = (exchange, Gather()) if axis else (Gather(), exchange)
            rows = t
            for kind in kinds:
                sources = () if kind is exchange else (merge.results[1 if axis else 2],)
                rows = self.step(kind, rows, kind.collective if kind is exchange else kind.name, new, phase, *sources)
            self.exchanged[rows, order.axis, graph] = t
        self.placements[rows], self.rows.ordered[rows] = self.placements[t], replace(order, axis=axis)
        self.exchanged[key] = rows
        return rows

    def all_to_all(self, axis: str) -> Collective:
        """Return an all-to-all of the first axis that concatenates the received pieces."""
        return Collective(collective="all_to_all", ranks=self.mesh[axis], axis=axis, source=0)

    def ends(self, routing: Routing, axis: str, graph: Graph, phase: str) -> Tensor:
        """Return the row offsets for this rank's experts."""
        home: Graph | None = graph
        while home is not None and (routing, home) not in self.rows.ends:
            home = home.parent
        assert home is not None  # rows with their experts come from a grouped matmul, which reads their offsets
        ends = self.rows.ends[routing, home]
        if self.rows.indices[ends].axis:
            return ends
        if (ends, graph) not in self.local_ends:
            local_ends = self.step(self.all_to_all(axis), ends, "all_to_all", graph, phase)
            self.placements[local_ends] = Placement(((),))
            self.rows.indices[local_ends] = replace(self.rows.indices[ends], axis=axis)
            self.local_ends[ends, graph] = local_ends
        return self.local_ends[ends, graph]

    def merge(self, routing: Routing, axis: str, graph: Graph, phase: str) -> Op:
        """Return the op that sorts received rows by expert."""
        ends = self.ends(routing, axis, graph, phase)
        key = ends, graph, phase == "forward"
        if key not in self.merged:
            ranks = self.mesh[axis]
            kind = Merge(
                ranks=ranks, axis=axis, rows=routing.rows, chosen=routing.chosen / ranks, owners=routing.owners
            )
            merged = self.step(kind, ends, "merge", graph, phase)
            op = merged.producer
            assert op is not None
            self.placements |= {t: Placement(((),)) for t in op.results}
            self.merged[key] = op
        return self.merged[key]

    def saved_tensor(self, old: Tensor, t: Tensor) -> Tensor:
        """Return the tensor saved for the backward pass in place of an old one: the exchanged one, if readers used it.

        It may be a result of an all-to-all, or row offsets after the exchange.
        """
        if t in self.rows.indices:
            return self.local_ends.get((t, t.graph), t)
        read = self.read.get(old, [])
        return read[0] if read and all(r is read[0] for r in read) and self.exchange_sources.get(read[0]) is t else t
