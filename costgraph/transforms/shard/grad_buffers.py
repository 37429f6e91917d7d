"""Gradient buffers: flat ones with a row for each rank, and persistent ones that accumulate partial sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ...algebra.polynomial import ONE, ZERO, Poly
from ...dtypes import DType
from ...ir.graph import Factors, Graph, Mesh, Op, OpKind, Placement, Repeat, Tensor
from ...ir.strides import numel
from ...ops.collectives import Collective, Unshard
from ...ops.einsum import Einsum
from ...ops.elementwise import FUNCTIONS, Pointwise
from ...ops.layout import Concat, KeepAlive, Rearrange, Slice
from ...ops.loops import Empty, Kernel
from .partial_sums import adds, origin, targets
from .placed_tensors import PlacedTensors, RequestedPlacements, reductions

__all__ = [
    "add_op",
    "cast_to",
    "from_rows",
    "in_rows",
    "joined",
    "pieces",
    "GradBuffers",
]


# -- flat buffers ------------------------------------------------------------------------------------------------------


def add_op(graph: Graph, kind: OpKind, operands: Sequence[Tensor], name: str, phase: str) -> Tensor:
    """Add an op with one result; the prefix of its name is its scope."""
    op = graph.add_op(kind, operands, name, phase)
    op.scope = name.rpartition("/")[0]
    return op.results[0]


def cast_to(graph: Graph, t: Tensor, dtype: DType, name: str, phase: str) -> Tensor:
    """Return a tensor in a format, without a cast if it has it already."""
    return (
        t if t.dtype == dtype else add_op(graph, Pointwise(function=FUNCTIONS["cast"], dtype=dtype), [t], name, phase)
    )


def joined(graph: Graph, rows: Sequence[Tensor], dtype: DType, name: str, phase: str) -> Tensor:
    """Concatenate rows in one buffer, cast if necessary."""
    kind = Concat(axis=rows[0].ndim - 1)
    if all(row.dtype == dtype for row in rows):
        return add_op(graph, kind, rows, name, phase)
    body = graph.start_body("copy_in", fused=True)
    inner = [cast_to(body, body.adopt(row), dtype, f"{name}/cast", phase) for row in rows]
    body.outputs.append(add_op(body, kind, inner, f"{name}/concat", phase))
    return add_op(graph, Kernel(body=body, backward="ops"), body.captured, name, phase)


def _parts(dim: Factors, size: Poly, axes: Sequence[str]) -> list[str | Poly]:
    """Return the factors of an axis after it is gathered along some mesh axes."""
    return [f for f in dim if not isinstance(f, str) or f in axes] or [size]


def in_rows(graph: Graph, t: Tensor, placement: Placement, axes: Sequence[str], mesh: Mesh, phase: str) -> Tensor:
    """Return a tensor as one row per rank along `axes`, which holds the shard of that rank."""
    flat = [f for dim, n in zip(placement.dims, t.sizes, strict=True) for f in _parts(dim, n, axes)]
    local_dims = [i for i, f in enumerate(flat) if not isinstance(f, str)]
    split = tuple(mesh[f] if isinstance(f, str) else f for f in flat)
    merged = (*(mesh[a] for a in axes), numel([split[i] for i in local_dims]))
    kind = Rearrange(split=split, order=(*(flat.index(a) for a in axes), *local_dims), merged=merged)
    return add_op(graph, kind, [t], f"{t.name}.rows", phase)


def pieces(graph: Graph, rows: Tensor, sizes: Sequence[Poly], name: str, phase: str) -> list[Tensor]:
    """Slice rows into pieces, one for each tensor."""
    start, out = ZERO, []
    for size in sizes:
        kind = Slice(axis=rows.ndim - 1, start=start, size=size, step=1)
        out.append(add_op(graph, kind, [rows], f"{name}.piece", phase))
        start = start + size
    return out


def from_rows(
    graph: Graph, rows: Tensor, placement: Placement, sizes: Sequence[Poly], axes: Sequence[str], mesh: Mesh, name: str,
    phase: str, *, full: bool,
) -> Tensor:  # fmt: skip
    """Return a tensor from its rows: all of it as a copy if `full`, else one rank's shard."""
    dims = [_parts(dim, n, axes) for dim, n in zip(placement.dims, sizes, strict=True)]
    local_factors = [f for dim in dims for f in dim if not isinstance(f, str)]
    positions = iter(range(len(axes), len(axes) + len(local_factors)))
    order: list[int] = [] if full else list(range(len(axes)))
    merged = []
    for dim in dims:
        factors = [f for f in dim if full or not isinstance(f, str)]
        order += [axes.index(f) if isinstance(f, str) else next(positions) for f in factors]
        merged.append(numel([mesh[f] if isinstance(f, str) else f for f in factors]))
    split = (*(mesh[a] if full else ONE for a in axes), *local_factors)
    return add_op(
        graph, Rearrange(split=split, order=tuple(order), merged=tuple(merged), copy=full), [rows], name, phase
    )


# -- persistent buffers ------------------------------------------------------------------------------------------------


T = TypeVar("T")


def _left(op: Op) -> Iterator[Tensor]:
    """Yield a term in the loop that adds its slices, and in the loops that stacked them."""
    t, owner = op.operands[1], op.graph.owner
    while owner is not None and owner.loop is not None and t in owner.loop.slices:
        yield t
        t, owner = owner.operands[owner.loop.body.formals.index(t)], owner.graph.owner
    while t.producer is not None and t.producer.loop is not None:
        yield t
        t = t.producer.loop.body.outputs[t.producer.results.index(t)]
        yield t


class GradBuffers(PlacedTensors):
    """Accumulates partial sums into buffers, reduces these in place, and clears them after the update."""

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__(requested)
        self.terms: dict[Tensor, Placement] = {}
        """Old buffers, and their placements as partial sums of the accumulated terms."""
        self.products: dict[Tensor, DType] = {}
        """Buffers that matmuls accumulate into, and the format of the products."""
        self.param_of_grad: dict[Tensor, Tensor] = {}
        """Old gradients, and their parameters."""
        self.grad_of_buffer: dict[Tensor, Tensor] = {}
        """Buffers of the old graph, and the old gradients that they hold in the end."""
        self.per_iteration: set[Tensor] = set()
        """Old loop outputs with one storage for each iteration, to be add_op to such buffers after the loop."""
        self.reduce_scatters: dict[Tensor, list[tuple[Collective, int]]] = {}
        """Old buffers whose reduction leaves a rank its own part: the collectives, and axes counted from the last."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the per-rank graph."""
        self.param_of_grad = {g: t for t, g in old.gradients.items()}
        if not self.requested.reduce_every_microbatch:
            self.grad_of_buffer = {
                source: g for g in self.param_of_grad for source in [origin(g)] if source.role == "gradient"
            }
            self.per_iteration = {t for op in old.walk() if adds(op) and self.buffer(op.operands[0]) for t in _left(op)}
        return super().run(old, name)

    def target_placements(self, old: Graph, gradients: Mapping[Tensor, Placement]) -> dict[Tensor, Placement]:
        """Return gradient placements, and target placements for the terms."""
        buffers = {g: self.buffer_placement(g) for g in self.grad_of_buffer.values()}
        placed = {g: placement for g, placement in buffers.items() if placement is not None}
        placements = self.terms_of(
            old, {g: placement for g, placement in gradients.items() if g not in buffers} | placed
        )
        return placements | {g: gradients[g] for g in buffers}

    def terms_of(self, old: Graph, gradients: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Extend a mapping of gradients to their terms, including casts into a buffer's format."""
        buffered = {*self.grad_of_buffer.values()}
        terms = super().terms_of(old, {g: value for g, value in gradients.items() if g not in buffered})
        return terms | targets(old, {g: value for g, value in gradients.items() if g in buffered}, adds)

    def buffer(self, t: Tensor) -> Tensor | None:
        """Return the old gradient buffer that an old tensor is in."""
        source = origin(t) if self.grad_of_buffer else None
        return source if source in self.grad_of_buffer else None

    def buffer_placement(self, t: Tensor) -> Placement | None:
        """Return the placement of the sum in a buffer as an old tensor sees it, None if it is unknown."""
        source = self.buffer(t)
        placement = None if source is None else self.requested.buffers.get(source)
        return None if placement is None else placement.with_dims(placement.dims[len(placement.dims) - t.ndim :])

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops, and add the dummy gradients of accumulation fusion."""
        buffers = {**self.requested.buffers} if old.parent is None else {}
        sizes = [
            (placement.local(t.sizes)[t.storage.pieces :], self.requested.products.get(t))
            for t, placement in buffers.items()
        ]
        dummies = [
            add_op(new, Empty(sizes=n, dtype=dtype), [], "gradients.handed", "forward")
            for n, dtype in dict.fromkeys(sizes)
            if dtype is not None
        ]
        super().fill(old, new, suffix)
        if dummies:
            add_op(new, KeepAlive(), dummies, "gradients.kept", "backward")

    def note_term(self, op: Op) -> None:
        """Note the mesh axes along which terms add_op to a buffer are partial sums."""
        source = self.buffer(op.operands[0]) if adds(op) else None
        term = self.tensors[op.operands[1]] if source is not None else None
        if source is None or not isinstance(term, Tensor):
            return
        placement = self.requested.placements.get(source, Placement(((),) * source.ndim))
        producer = op.operands[1].producer
        if (
            self.requested.fused
            and source.storage.pieces
            and producer is not None
            and isinstance(producer.kind, Einsum)
        ):
            self.products[source] = term.dtype
        stays = self.requested.param_axes[self.grad_of_buffer[source]]
        earlier = self.terms[source].pending if source in self.terms else None
        pending = {a for a, operation in self.placements[term].partial if operation == "sum" and a not in stays}
        pending &= {*(pending if earlier is None else earlier)}
        base = placement.without(pending, self.mesh)
        self.terms[source] = replace(base, partial=tuple((a, "sum") for a in self.mesh if a in pending))

    def in_product(self, op: Op, kind: OpKind, operands: Sequence[Tensor], new: Graph) -> Op | None:
        """Fuse an accumulation into the matmul of its term; return None if there is none."""
        source = self.buffer(op.operands[0]) if self.requested.products and adds(op) else None
        if source not in self.requested.products:
            return None
        base, term = operands
        product = term.producer
        if product is None or product not in new or [*new.successors(term)] or term.is_view:
            return None
        body = new.start_body(op.name, fused=True)
        fused_term = add_op(
            body, product.kind, [body.capture(t) for t in product.operands], product.name, product.phase
        )
        body.outputs.append(add_op(body, kind, [body.capture(base), fused_term], op.name, op.phase))
        into = body.captured.index(base)
        new.remove_nodes_from([term, product])
        return self.add(op, Kernel(body=body, changed=(into,), backward="ops"), body.captured, new, product.name)

    # -- after the last term -----------------------------------------------------------------------------------------

    def reduce_buffer(self, t: Tensor, new: Graph, phase: str) -> Tensor:
        """Reduce a buffer in place, and return a view of this rank's part."""
        local, want, source = self.tensors[t], self.grad_placements[t], self.buffer(t)
        assert source is not None
        self.names[local] = f"{self.param_of_grad[t].name}.grad"
        all_kinds = (kind for kind, _, _ in reductions(self.placements[local], want, self.mesh))
        kinds = [kind for kind in all_kinds if isinstance(kind, Collective) and kind.collective == "reduce_scatter"]
        self.reduce_scatters[source] = [(kind, kind.dim - local.ndim) for kind in kinds]
        return self._reduced(local, want, new, phase)

    def _reduced(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Reduce in place; separate storages of a stack are reduced one after the other."""
        name, path = self.names[t], list(reductions(self.placements[t], want, self.mesh))
        if not t.storage.pieces or not path:
            for kind, after, step in path:
                assert isinstance(kind, Collective)
                t = self.step(replace(kind, inplace=True), t, step, new, phase)
                self.placements[t], self.names[t] = after, name
            return t
        body = new.start_body(f"{name}.slices", fused=False)
        slice_ = body.formal(t, name, t.sizes[1:], t.strides[1:], t.storage.pieces - 1)
        self.placements[slice_], self.names[slice_] = self.placements[t].with_dims(self.placements[t].dims[1:]), name
        body.outputs.append(self._reduced(slice_, want.with_dims(want.dims[1:]), body, phase))
        op = new.add_op(Repeat(body=body, count=t.sizes[0], carries=0, xs=1, saved=1), [t], body.name, phase)
        op.scope, body.owner = name.rpartition("/")[0], op
        (reduced,) = op.results
        self.placements[reduced], self.names[reduced] = path[-1][1], name
        return reduced

    def clear(self, t: Tensor, new: Graph, phase: str) -> None:
        """Pass the whole buffer, with the parts of other ranks, to an op that zeroes a gradient."""
        source, local = self.buffer(t), self.tensors[t]
        for kind, dim in reversed(self.reduce_scatters.get(source, ()) if source is not None else ()):
            unshard = Unshard(ranks=kind.ranks, axis=kind.axis, dim=local.ndim + dim)
            full = self.step(unshard, local, "unshard", new, phase)
            self.placements[full] = self.placements[local].without(self.mesh.parts(kind.axis), self.mesh)
            local = full
        self.tensors[t] = local
