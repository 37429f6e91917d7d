"""Placement of tensors on one rank, and the collectives that redistribute them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from ...algebra.polynomial import ONE, total
from ...dtypes import DType
from ...errors import UnsupportedError
from ...ir.graph import Factors, Graph, Mesh, Op, OpKind, Placement, Repeat, Storage, Tensor, agree, blocks, seen
from ...ir.strides import in_the_order_of
from ...ops.collectives import Collective, LocalShard, Meshed
from ...ops.einsum import Einsum
from ...ops.fill import DenseFactory, Fill
from ...ops.layout import Expand, Rearrange
from ...ops.loops import Kernel, Undef
from ..rewrite import Rewriter
from .choice import RankOrderedRows, with_local_domain
from .fsdp_policy import FullyShard
from .kernels import SplitKernel, operand_placement
from .partial_sums import targets

__all__ = [
    "reductions",
    "steps",
    "in_rings",
    "UnplacedSource",
    "PlacedTensors",
    "RequestedPlacements",
    "expanded_axes",
]


# -- redistribution ----------------------------------------------------------------------------------------------------

Step = tuple[OpKind, Placement, str]


def steps(have: Placement, want: Placement, mesh: Mesh, query: int | None = None) -> Iterator[Step]:
    """Yield the ops that redistribute a tensor, as tuples (op kind, placement after it, name).

    Equal collectives along neighbouring mesh axes with a joint name become one collective along the joint axis. If the
    tensor is restricted to a domain, each rank must have consecutive blocks of queries after every step. Mesh axes that
    split the query axis are therefore removed innermost first and added innermost last, as in DTensor.
    """
    yield from _joined(have, _per_axis(have, want, mesh, query), mesh)


def reductions(have: Placement, want: Placement, mesh: Mesh) -> Iterator[Step]:
    """Yield the in-place reductions of partial sums; each rank's own part must be contiguous.

    Where it is not, the sum is all-reduced. Readers move the tensor to its final placement.
    """
    yield from _joined(have, _reduction_steps(have, want, mesh, one_piece=True), mesh)


def _joined(have: Placement, unmerged: Iterable[Step], mesh: Mesh) -> Iterator[Step]:
    """Yield steps, with equal steps along neighbouring mesh axes joined."""
    before, waiting = have, list[Step]()
    for step in unmerged:
        if waiting:
            merged = _merged(before, waiting[-1], step, mesh)
            if merged is not None:
                waiting[-1] = merged
                continue
            yield waiting[-1]
            before = waiting.pop()[1]
        waiting.append(step)
    yield from waiting


def _merged(before: Placement, first: Step, second: Step, mesh: Mesh) -> Step | None:
    """Return one op for two equal ops along neighbouring mesh axes, None if they cannot be joined."""
    (a, _, name), (b, after, _) = first, second
    assert isinstance(a, Meshed)
    assert isinstance(b, Meshed)
    axes = (*mesh.parts(a.axis), *mesh.parts(b.axis))
    joint = mesh.together(axes)
    source = a.source if isinstance(a, Collective) else None
    # relative to the first op, the second has more blocks: as many times as the first has ranks
    same: dict[str, Any] = {"axis": a.axis, "ranks": a.ranks, "blocks": a.blocks}
    same |= {"source_blocks": a.source_blocks} if isinstance(a, Collective) else {}
    if joint is None or type(a) is not type(b) or replace(b, **same) != a:
        return None
    gathered = source if source is not None else a.dim if name == "all_gather" else None
    split = a.dim if name in ("local_shard", "reduce_scatter", "all_to_all") else None
    if not all(_is_nested(p.dims[i], axes) for p, i in ((before, gathered), (after, split)) if i is not None):
        return None
    return replace(a, axis=joint, ranks=mesh[joint]), after, name


def _is_nested(dim: Factors, axes: Sequence[str]) -> bool:
    """Whether mesh axes split a tensor axis one directly within the other."""
    start = dim.index(axes[0])
    return dim[start : start + len(axes)] == tuple(axes)


def _per_axis(have: Placement, want: Placement, mesh: Mesh, query: int | None) -> Iterator[Step]:
    """Yield the redistribution along each mesh axis.

    A partial sum is reduced, scattered if the target is sharded. A mesh axis that moves to another tensor axis is an
    all-to-all, one that is removed an all-gather, and a new one a local slice, which is free.
    """
    current, inner = have, _inner(have, want, query)
    # removed axes first: they make room for new ones
    for axis in (*inner, *sorted((a for a in mesh if a not in inner), key=lambda axis: want.dim(axis) is not None)):
        if axis in current.pending:
            continue
        source_dim, target_dim = current.dim(axis), want.dim(axis)
        stays = axis not in inner if source_dim == query else source_dim == target_dim and source_dim is not None
        if source_dim is None or (stays and agree(current.dims[source_dim], want.dims[source_dim], mesh)):
            continue
        free = current.without([axis], mesh)
        room = target_dim is not None and axis not in want.pending and _fits(free, want, axis, target_dim, mesh, query)
        if target_dim is not None and target_dim != source_dim and room:
            current, kind = _exchange(current, want, axis, source_dim, target_dim, mesh)
            yield kind, current, "all_to_all"
        else:
            kind = Collective(
                collective="all_gather",
                ranks=mesh[axis],
                axis=axis,
                dim=source_dim,
                blocks=blocks(current.dims[source_dim], axis),
            )
            current = free
            yield kind, current, "all_gather"
    for step in _reduction_steps(current, want, mesh, query):
        yield step
        current = step[1]
    outer = () if query is None else _axes(want.dims[query])
    for axis in (*outer, *(a for a in mesh if a not in outer)):
        target_dim = want.dim(axis)
        if target_dim is not None and axis not in current.axes:
            current = _with_axis(current, want, axis, target_dim, mesh)
            yield (
                LocalShard(ranks=mesh[axis], axis=axis, dim=target_dim, blocks=blocks(current.dims[target_dim], axis)),
                current,
                "local_shard",
            )


def _axes(dim: Factors) -> list[str]:
    return [f for f in dim if isinstance(f, str)]


def _inner(have: Placement, want: Placement, query: int | None) -> list[str]:
    """Return the mesh axes that must leave the query axis, innermost first; some are added again later."""
    if query is None:
        return []
    current, target = _axes(have.dims[query]), _axes(want.dims[query])
    common = next(
        (i for i, (a, b) in enumerate(zip(current, target, strict=False)) if a != b), min(len(current), len(target))
    )
    return current[common:][::-1]


def _reduction_steps(
    current: Placement, want: Placement, mesh: Mesh, query: int | None = None, *, one_piece: bool = False
) -> Iterator[Step]:
    """Yield the reductions along each mesh axis, reduce-scatters first: less is left to reduce."""
    for axis, operation in sorted(current.partial, key=lambda part: want.dim(part[0]) is None):
        if want.pending.get(axis) == operation:
            continue
        target_dim = want.dim(axis)
        free = current.without([axis], mesh)
        scattered = None
        if target_dim is not None and _fits(free, want, axis, target_dim, mesh, query):
            scattered = _with_axis(free, want, axis, target_dim, mesh)
        if (
            target_dim is not None
            and scattered is not None
            and (not one_piece or blocks(scattered.dims[target_dim], axis) == ONE)
        ):
            current = scattered
            kind = Collective(
                collective="reduce_scatter", ranks=mesh[axis], axis=axis, dim=target_dim,
                blocks=blocks(current.dims[target_dim], axis), operation=operation,
            )  # fmt: skip
            yield kind, current, "reduce_scatter"
        else:
            current = free
            yield (
                Collective(collective="all_reduce", ranks=mesh[axis], axis=axis, operation=operation),
                current,
                "all_reduce",
            )


def _fits(placement: Placement, want: Placement, axis: str, dim: int, mesh: Mesh, query: int | None) -> bool:
    """Whether a mesh axis can split its target axis in addition to those that split it already."""
    stay = all(f in want.dims[dim] for f in placement.dims[dim] if isinstance(f, str))
    if dim == query:
        nested = [*_axes(placement.dims[dim]), axis]
        stay = _axes(want.dims[dim])[: len(nested)] == nested
    return stay and agree(placement.dims[dim], want.dims[dim], mesh)


def _with_axis(placement: Placement, want: Placement, axis: str, dim: int, mesh: Mesh) -> Placement:
    split_by = frozenset(f for f in placement.dims[dim] if isinstance(f, str)) | {axis}
    return placement.with_dims(
        [seen(want.dims[dim], split_by, mesh) if i == dim else d for i, d in enumerate(placement.dims)]
    )


def _exchange(
    placement: Placement, want: Placement, axis: str, source_dim: int, target_dim: int, mesh: Mesh
) -> tuple[Placement, Collective]:
    after = _with_axis(placement.without([axis], mesh), want, axis, target_dim, mesh)
    kind = Collective(
        collective="all_to_all", ranks=mesh[axis], axis=axis,
        dim=target_dim, blocks=blocks(after.dims[target_dim], axis),
        source=source_dim, source_blocks=blocks(placement.dims[source_dim], axis),
    )  # fmt: skip
    return after, kind


# -- ring --------------------------------------------------------------------------------------------------------------
# Ring attention: kernels use each part of a tensor as it arrives, without an all-gather.


def in_rings(graph: Graph, axes: frozenset[str]) -> Graph:
    """Move all-gathers and reduce-scatters of attention kernels into these kernels, as rings.

    In a ring of n ranks, each rank computes with one part while it sends this part on and receives the next, n - 1
    times. A sum goes around once, n times, and each rank adds to it. For each tensor, the part that leaves and the part
    that arrives are in flight (Liu et al. 2023, arXiv 2310.01889). FLOPs are unchanged.
    """
    return _Rings(axes).run(graph)


@dataclass(frozen=True)
class _Ring:
    """Collectives that become part of a kernel."""

    gathered: tuple[Op, ...]
    """all-gathers of operands"""
    summed: tuple[Op, ...]
    """reduce-scatters of results"""


class _Rings(Rewriter):
    """Copies a graph with collectives moved into the kernels that use them."""

    lies = True

    def __init__(self, axes: frozenset[str]) -> None:
        super().__init__()
        self.axes = axes
        self.rings: dict[Op, _Ring] = {}
        """Rings, by kernel."""
        self.ring_ops: set[Op] = set()
        """Collectives that are part of a ring."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        for op in () if old.fused else old.ops:
            if isinstance(op.kind, Kernel):
                self.find_ring(op, op.kind)
        super().fill(old, new, suffix)

    def find_ring(self, op: Op, kind: Kernel) -> None:
        """Record the all-gathers of matmul operands, and the reduce-scatters of matmul results."""
        gathered = [
            gather for f, t in zip(kind.body.formals, op.operands, strict=True)
            if (gather := t.producer) is not None and self.joins(gather, "all_gather")
            and _only(t, op) and gather.operands[0].role != "param"
            and any(isinstance(inner.kind, Einsum) for inner in kind.body.successors(f))
        ]  # fmt: skip
        summed = [
            reader for t, inner in zip(op.results, kind.body.outputs, strict=True)
            for reader in op.graph.successors(t)
            if self.joins(reader, "reduce_scatter") and _only(t, reader)
            and inner.producer is not None and isinstance(inner.producer.kind, Einsum)
        ]  # fmt: skip
        if gathered:
            self.rings[op] = _Ring(tuple(gathered), tuple(summed))
            self.ring_ops |= {*gathered, *summed}

    def joins(self, op: Op, collective: str) -> bool:
        """Whether an op is the given collective along one of the ring axes."""
        kind = op.kind
        return isinstance(kind, Collective) and kind.collective == collective and kind.axis in self.axes

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if op in self.rings:
            self.ring(op, self.rings[op], new)
        elif op not in self.ring_ops:
            self.copy(op, new, suffix)

    def ring(self, op: Op, ring: _Ring, new: Graph) -> None:
        """Add a kernel with its collectives inside."""
        kind, old = op.kind, op.body
        assert isinstance(kind, Kernel)
        assert old is not None
        shards = {t: gather.operands[0] for gather in ring.gathered for t in gather.results}
        outer = list(dict.fromkeys(shards.get(t, t) for t in op.operands))
        body = new.start_body(old.name, fused=True)
        formals = {}
        for t in outer:
            outer_t = self.tensors[t]
            formals[t] = body.formal(outer_t, f"{outer_t.name}.in", outer_t.sizes, outer_t.strides)
            formals[t].offset = outer_t.offset
        for gather in ring.gathered:
            in_ring = replace(gather.kind, ring=True)  # type: ignore[call-arg]  # a collective
            self.tensors[gather.results[0]] = self.add(gather, in_ring, [formals[gather.operands[0]]], body).results[0]
        for f, t in zip(old.formals, op.operands, strict=True):
            self.tensors[f] = self.tensors[t] if t in shards else formals[t]
        super().fill(old, body)
        outputs = self.ends(op, old, ring, body)
        body.outputs += [body.adopt(t) for t in outputs.values()]
        in_flight = total(
            2 * t.storage.bytes for t in (*(formals[m.operands[0]] for m in ring.gathered), *self.sums(ring))
        )
        kernel = self.add(
            op, replace(kind, body=body, workspace=kind.workspace + in_flight), [self.tensors[t] for t in outer], new
        )  # fmt: skip
        self.tensors |= dict(zip(outputs, kernel.results, strict=True))

    def ends(self, op: Op, old: Graph, ring: _Ring, body: Graph) -> dict[Tensor, Tensor]:
        """Return the outputs of a kernel by the outer tensor they replace; reduced sums are this rank's part."""
        scattered = {t: reader for reader in ring.summed for t in reader.operands}
        out = {}
        for t, inner in zip(op.results, old.outputs, strict=True):
            reader = scattered.get(t)
            if reader is None:
                out[t] = self.tensors[inner]
                continue
            in_ring = replace(reader.kind, ring=True)  # type: ignore[call-arg]  # a collective
            out[reader.results[0]] = self.add(reader, in_ring, [self.tensors[inner]], body).results[0]
        return out

    def sums(self, ring: _Ring) -> Sequence[Tensor]:
        """Return this rank's parts of the reduced sums."""
        return [self.tensors[reader.results[0]] for reader in ring.summed]


def _only(t: Tensor, op: Op) -> bool:
    """Whether an op is the only reader of a tensor."""
    return t not in t.graph.outputs and all(reader is op for reader in t.graph.successors(t))


# -- tensors -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def expanded_axes(t: Tensor) -> frozenset[int]:
    """Return the axes along which a tensor is expanded without a copy."""
    kind = None if t.producer is None else t.producer.kind
    if not isinstance(kind, Expand) or t.producer is None:
        return frozenset()
    (x,) = t.producer.operands
    return frozenset(i for i, dim in enumerate(kind.kept) if dim is None or x.sizes[dim] != t.sizes[i])


@dataclass(frozen=True)
class RequestedPlacements:
    """The requested placements of sources and gradients, and how parameters are gathered."""

    mesh: Mesh
    placements: Mapping[Tensor, Placement]
    """Placements of old sources, and other old tensors with a stated placement."""
    gradients: Mapping[Tensor, Placement]
    """Placements of old gradients."""
    param_axes: Mapping[Tensor, frozenset[str]]
    """Mesh axes along which the parameter of a gradient stays sharded while an op reads it."""
    gathered: frozenset[str]
    """Mesh axes along which parameters are all-gathered before use."""
    resident: Mapping[Tensor, frozenset[str]] = field(default_factory=dict)
    """Old parameters that stay sharded along some of these axes, and these axes."""
    stacks: Mapping[Tensor, Placement] = field(default_factory=dict)
    """Placements of old stacks, inherited from the slices written into them."""
    policy: FullyShard | None = None
    """How parameters are gathered."""
    exchanged: frozenset[str] = frozenset()
    """Mesh axes that split heads inside attention and the sequence outside of it."""
    saved: frozenset[str] = frozenset()
    """Mesh axes along which all-gathered activations are saved for the backward pass."""
    reduce_every_microbatch: bool = True
    """Whether the gradients of each micro-batch are reduced."""
    buffers: Mapping[Tensor, Placement] = field(default_factory=dict)
    """Placements of old gradient buffers in which ranks accumulate partial sums."""
    fused: bool = False
    """Whether matmuls accumulate into these buffers (gradient accumulation fusion)."""
    products: Mapping[Tensor, DType] = field(default_factory=dict)
    """Buffers that matmuls accumulate into, and the format of the products."""
    carries: Mapping[Tensor, Placement] = field(default_factory=dict)
    """Placement of carries that start as an expanded scalar, from an earlier attempt to build the graph."""


class UnplacedSource:
    """A tensor without a placement, which is created when a reader requests one.

    It is the result of an op without operands, a scalar that is expanded, or an elementwise function of one.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        value = op.kind.value if isinstance(op.kind, Fill) else None
        self.zero = isinstance(op.kind, Undef) or value == 0


class WiderError(Exception):
    """Raised when a carry of a loop should be sharded along more mesh axes than it starts with."""

    def __init__(self, loop: Op, starts: Mapping[int, Placement]) -> None:
        self.loop, self.starts = loop, starts


class PlacedTensors(Rewriter):
    """Copies tensors with their local sizes; `placements` holds the placement of each new tensor."""

    replays = False

    def __init__(self, requested: RequestedPlacements) -> None:
        super().__init__()
        self.requested, self.mesh = requested, requested.mesh
        self.placements: dict[Tensor, Placement] = {}
        self.stacks: dict[Tensor, Placement] = {}
        """Stacks of the old graph whose slices have another placement than stated, and that placement."""
        self.names: dict[Tensor, str] = {}
        """More descriptive names for new tensors: a formal's outer name, or a gradient's."""
        self.params: dict[Tensor, frozenset[str]] = {}
        """New tensors that are parameters or alias them, and the mesh axes along which they are gathered."""
        self.fixed: set[Tensor] = set()
        """New tensors that are inputs with a stated placement, or alias them."""
        self.copies: dict[tuple[Tensor, Placement, Graph, str], Tensor] = {}
        self.saved_gathers: dict[Tensor, Tensor] = {}
        """Tensors that were all-gathered for both passes, and the results."""
        self.exchange_sources: dict[Tensor, Tensor] = {}
        """Results of all-to-alls, and the tensors exchanged."""
        self.resharded: list[str] = []
        """Unrequested redistributions, in words."""
        self.grad_placements: dict[Tensor, Placement] = {}
        """Gradients of the old graph, and their placements."""
        self.param_axes: dict[Tensor, frozenset[str]] = {}
        self.rows = RankOrderedRows(requested.mesh)
        """New tensors whose rows are in rank-local order."""
        self.carried: set[Storage] = set()
        """Storages that are carried: the next iteration reads them with the same placement."""
        self.undecided: dict[Tensor, tuple[Op, int]] = {}
        """New carries that start as an expanded scalar, with their loop and position: the first reader places them."""
        self.decided_carries = dict(requested.carries)
        """Old formals of carries, and the placement that their loop started with after all attempts."""
        self.carry_placements: dict[Tensor, Placement] = {}
        """Old tensors that are carried out, and the placement of the carry."""
        self.natural: dict[Any, Placement] = {}
        """New partial sums, and their natural placement: gradients of keys are sharded like the queries."""
        self.by_heads: dict[Tensor, Tensor] = {}
        """Old tensors that attention reads split by heads, and the new tensors with that placement."""
        self.open_kernel: SplitKernel | None = None
        """The kernel that is being split."""
        self.partial_writes: dict[Storage, tuple[Tensor, Placement]] = {}
        """Storages that each rank has written a part of: the last old tensor in each, and its target placement."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the per-rank graph."""
        self.grad_placements = self.target_placements(old, self.requested.gradients)
        self.param_axes = self.terms_of(old, self.requested.param_axes)
        return super().run(old, name)

    def target_placements(self, old: Graph, gradients: Mapping[Tensor, Placement]) -> dict[Tensor, Placement]:
        """Return placements for gradients and the terms that are accumulated into them."""
        return self.terms_of(old, gradients)

    def terms_of(self, old: Graph, gradients: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Extend a mapping of gradients to the terms that are accumulated into them."""
        return targets(old, gradients)

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops, and all-gather tensors that ranks have written in parts."""
        outer_parts, self.partial_writes = self.partial_writes, {}
        super().fill(old, new, suffix)
        self.close(old, new)
        for t, placement in self.partial_writes.values():
            self.gather_writes(t, placement, new)
        self.partial_writes = outer_parts
        if old.parent is None:
            for t in old.outputs:
                local = self.value(t, new)
                if local in self.rows.indices or local in self.rows.ordered:
                    self.rows.refuse(local)
                self.tensors[t] = self.moved_to(
                    local, self.placements[local].without(self.placements[local].pending, self.mesh), new, "forward"
                )
            for g in old.gradients.values():
                self.tensors[g] = self.value(g, new)

    def close(self, old: Graph, new: Graph) -> None:
        """Finish a body after all of its ops are copied."""

    # -- tensors -----------------------------------------------------------------------------------------------------

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Declare a source with its local sizes."""
        if old in self.tensors:
            return self.tensors[old]
        placement = self.requested.placements.get(old, Placement(((),) * old.ndim))
        sizes = placement.local(old.sizes)
        strides = in_the_order_of(old.sizes, old.strides, sizes)
        tensor = Tensor(
            new, new.unique(old.name + suffix), sizes, old.dtype, strides=strides,
            role=old.role, requires_grad=old.requires_grad, pieces=old.storage.pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(tensor)
        self.placements[tensor] = placement
        if old.role == "param":
            self.params[tensor] = self.requested.gathered - self.requested.resident.get(old, frozenset())
        elif old in self.requested.placements:
            self.fixed.add(tensor)
        return tensor

    def value(self, old: Tensor, new: Graph, want: Placement | None = None, phase: str = "forward") -> Tensor:
        """Return the new tensor of an old one at a placement; create it now if it is deferred."""
        local = self.tensors[old]
        if isinstance(local, UnplacedSource):
            key = (old, want or Placement(((),) * old.ndim), self.current_graph(new), "")
            if key not in self.copies:  # one copy for each placement
                self.copies[key] = self.create(local, old, new, key[1])
            return self.copies[key]
        return local if want is None else self.moved_to(local, want, new, phase)

    def current_graph(self, new: Graph) -> Graph:
        """Return the graph that ops are added to: the kernel that is being written, if there is one."""
        return new if self.open_kernel is None else self.open_kernel.graph()

    def create(self, later: UnplacedSource, old: Tensor, new: Graph, want: Placement) -> Tensor:
        """Create the result of a deferred op with local sizes."""
        if not later.zero:
            want = want.without(want.pending, self.mesh)
        kind, graph = later.op.kind, self.current_graph(new)
        if isinstance(kind, DenseFactory | Expand):
            kind = with_local_domain(replace(kind, sizes=want.local(old.sizes)), want, self.mesh)
        operands = [self.value(t, new, want if t.ndim else None) for t in later.op.operands]
        op = graph.add_op(kind, operands, later.op.name, later.op.phase)
        op.scope = later.op.scope
        self.placements[op.results[0]] = want
        return op.results[0]

    def moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Redistribute a tensor; readers of the same phase share the result."""
        have = self.placements[t]
        if have == want:
            return t
        key, always = (t, want, new, "" if t in self.params else phase), (t, want, new, "")
        if key in self.copies or always in self.copies:
            return self.copies.get(key) or self.copies[always]
        if t in self.undecided and not want.pending and want.axes > have.axes:
            loop, i = self.undecided[t]
            raise WiderError(loop, {i: want})
        path, param = list(steps(have, want, self.mesh, None if t.domain is None else t.domain[1])), t in self.params
        moved = (
            self.expand_again(t, want, new, phase)
            if expanded_axes(t) and {name for *_, name in path} != {"local_shard"}
            else None
        )
        if moved is not None:
            self.copies[key] = moved
            return moved
        moved = t
        self.rows.need_kept(t, have.dims, want.dims)
        for kind, after, name in path:
            moved = self.step(kind, moved, name, new, phase)
            self.placements[moved] = after
        if have.pending:  # a sum is reduced once for all passes
            key = always
        elif not param and phase in ("forward", "recompute") and self.requested.saved and self.is_saved(path):
            key = always
            self.saved_gathers[t] = moved
        if {name for *_, name in path} == {"all_to_all"}:  # both have the same size: either may be saved
            key = always
            self.copies[moved, have, new, ""] = t
            self.exchange_sources[moved] = t
        if self.placements[moved] != want:
            raise UnsupportedError(
                f"shard: {t.name!r} is placed as {have} but needed as {want}, and no collective converts between the "
                f"two; expected compatible placements"
            )
        if have.pending == want.pending or t not in self.rows.indices:  # a reduced count is the same on all ranks
            self.rows.note_alias(moved, t)
        if param:
            self.params[moved] = self.params[t]
        self.copies[key] = moved
        return moved

    def expand_again(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor | None:
        """Redistribute the operand of an expand and expand it again; return None if that is impossible here."""
        op = t.producer
        assert op is not None
        assert isinstance(op.kind, Expand)
        (x,), have = op.operands, self.placements[t]
        if want.pending or self.open_kernel is not None or x.graph is not new:
            return None
        dims: list[Factors] = [()] * x.ndim
        for i, dim in enumerate(op.kind.kept):
            if dim is not None and i not in expanded_axes(t):
                dims[dim] = want.dims[i]
        ranks = (prod((self.mesh[f] for f in d if isinstance(f, str)), start=ONE) for d in have.dims)
        full_sizes = tuple(n * m for n, m in zip(t.sizes, ranks, strict=True))
        source = self.moved_to(x, Placement(tuple(dims)), new, phase)
        expand = new.add_op(
            with_local_domain(replace(op.kind, sizes=want.local(full_sizes)), want, self.mesh), [source], op.name, phase
        )
        expand.scope = op.scope
        self.placements[expand.results[0]] = want
        return expand.results[0]

    def is_saved(self, path: Sequence[tuple[OpKind, Placement, str]]) -> bool:
        """Whether all of these ops are all-gathers whose results are saved for the backward pass, as in autograd."""
        kinds = [kind for kind, _, _ in path if isinstance(kind, Collective) and kind.collective == "all_gather"]
        return len(kinds) == len(path) and all(self.requested.saved >= {*self.mesh.parts(kind.axis)} for kind in kinds)

    def slices_moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Return a stack at another placement; ranks reduce its separate storages one after the other."""
        if not t.storage.pieces or not self.placements[t].pending:
            return self.moved_to(t, want, new, phase)
        name = self.names.get(t, t.name)
        body = new.start_body(f"{name}.slices", fused=False)
        slice_ = body.formal(t, name, t.sizes[1:], t.strides[1:], t.storage.pieces - 1)
        self.placements[slice_] = self.placements[t].with_dims(self.placements[t].dims[1:])
        moved = self.slices_moved_to(slice_, want.with_dims(want.dims[1:]), body, phase)
        body.outputs.append(moved)
        kind = Repeat(body=body, count=t.sizes[0], carries=0, xs=1, saved=1)
        op = new.add_op(kind, [t], body.name, phase)
        op.scope, body.owner = name.rpartition("/")[0], op
        self.placements[op.results[0]] = want
        return op.results[0]

    def note_alias(self, alias: Tensor, t: Tensor) -> None:
        """Note that a new tensor aliases another, in or outside of a body."""
        self.placements[alias] = self.placements[t]
        if t in self.params:
            self.params[alias] = self.params[t]
        if t in self.fixed:
            self.fixed.add(alias)
        self.rows.note_alias(alias, t)

    def step(self, kind: OpKind, t: Tensor, name: str, new: Graph, phase: str, *others: Tensor) -> Tensor:
        """Add an op that redistributes a tensor, outside of a kernel, which is split there."""
        graph = new if self.open_kernel is None else self.open_kernel.outside(t)
        base = self.names.get(t, t.name).removesuffix(".in")
        op = graph.add_op(kind, [t, *others], f"{base}.{name}", phase)
        op.scope = base.rpartition("/")[0]
        return op.results[0]

    def dense(self, t: Tensor, graph: Graph, phase: str) -> Tensor:
        """Return a carry in contiguous form, as every iteration leaves it."""
        return t if t.is_contiguous else self.copied(t, graph, f"{t.name}.contiguous", phase)

    def copied(self, t: Tensor, graph: Graph, name: str, phase: str) -> Tensor:
        """Return a contiguous copy of a tensor."""
        kind = Rearrange(split=t.sizes, order=tuple(range(t.ndim)), merged=t.sizes, copy=True)
        (copy,) = graph.add_op(kind, [t], name, phase).results
        self.note_alias(copy, t)
        return copy

    def stack(self, op: Op, new: Graph) -> None:
        """Add an empty stack; if its slices turn out to have another placement, the graph is built again."""
        (stack,) = op.results
        placement = self.requested.stacks.get(stack, Placement(((),) * stack.ndim))
        self.tensors[stack] = self.create(UnplacedSource(op), stack, new, placement)

    def inherit_placement(self, t: Tensor, placement: Placement | None) -> None:
        """Note that an allocated tensor inherits the placement of the values written; the graph is built again."""
        while placement is not None and t.producer is not None and not isinstance(t.producer.kind, DenseFactory):
            op = t.producer
            rule = op.kind.placed(op)
            if rule is None or not op.operands or op.operands[0].storage is not t.storage:
                return
            t, placement = op.operands[0], operand_placement(rule, placement, self.mesh)
        if placement is not None and t.producer is not None and t not in self.requested.stacks:
            self.stacks[t] = placement

    def stacked(self, op: Op, new: Graph) -> None:
        """Add the filled stack, and note the placement of its slices."""
        stack, *slices = op.operands
        placement, slice_ndim = self.placements[self.tensors[stack]], stack.ndim - 1
        current = [self.placements[self.value(t, new)] for t in slices]
        dims = {have.dims[len(have.dims) - slice_ndim :] for have in current}
        inferred = Placement(((), *dims.pop())) if len(dims) == 1 else Placement(((),) * stack.ndim)
        if inferred != placement and stack not in self.requested.stacks:
            self.stacks[stack] = inferred
        required = [Placement((*((),) * (t.ndim - slice_ndim), *placement.dims[1:])) for t in slices]
        for t, have, want in zip(slices, current, required, strict=True):
            self.note_resharded(op, t, have, want, "other slices of its stack have another placement")
        moved = [self.value(t, new, want, op.phase) for t, want in zip(slices, required, strict=True)]
        (filled,) = self.add(op, op.kind, [self.tensors[stack], *moved], self.current_graph(new)).results
        self.placements[filled] = placement

    def note_resharded(self, op: Op, t: Tensor, have: Placement, want: Placement, why: str) -> None:
        """Note the mesh axes along which a tensor is redistributed without a request."""
        axes = sorted(axis for axis in have.axes if want.dim(axis) != have.dim(axis))
        self.resharded += [f"{op.name!r}: {t.name!r} is redistributed along {axis}: {why}" for axis in axes]

    def note_partial_write(self, before: Tensor, written: Tensor, after: Tensor) -> None:
        """Note a tensor that is written in parts although it is replicated."""
        storage = written.storage
        if storage in self.partial_writes:
            self.partial_writes[storage] = after, self.partial_writes[storage][1]
            return
        local = self.tensors[before]
        temporary = storage.role == "activation" or storage in self.carried
        if isinstance(local, Tensor) and not temporary and self.placements[written] != self.placements[local]:
            self.partial_writes[storage] = after, self.placements[local]

    def gather_writes(self, old: Tensor, placement: Placement, new: Graph) -> None:
        """All-gather, in place, the parts of a replicated tensor that ranks have written."""
        t = self.tensors[old]
        for axis in reversed(list(self.mesh)):
            current = self.placements[t]
            dim = current.dim(axis)
            if dim is None or placement.dim(axis) is not None:
                continue
            kind = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=dim, inplace=True)
            assert old.producer is not None
            op = new.add_op(kind, [t], f"{t.name}.all_gather", old.producer.phase)
            op.scope = old.producer.scope
            (t,) = op.results
            self.placements[t] = current.without([axis], self.mesh)
        self.tensors[old] = t
