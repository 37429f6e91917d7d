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
from .choice import RankOrderedRows, at_places
from .fsdp_policy import FullyShard
from .kernels import SplitKernel, before
from .partial_sums import targets

__all__ = [
    "reductions",
    "steps",
    "in_rings",
    "UnplacedSource",
    "PlacedTensors",
    "RequestedPlacements",
    "repeated",
]


# -- redistribution ----------------------------------------------------------------------------------------------------

Step = tuple[OpKind, Placement, str]


def steps(have: Placement, want: Placement, mesh: Mesh, query: int | None = None) -> Iterator[Step]:
    """Yield the ops that redistribute a tensor, as tuples (op kind, placement after it, name).

    Equal collectives along neighbouring mesh axes with a joint name become one collective along the joint axis. If the
    tensor is restricted to a domain, each rank must have consecutive blocks of queries after every step. Mesh axes that
    split the query axis are therefore removed innermost first and added innermost last, as in DTensor.
    """
    yield from _joined(have, _apart(have, want, mesh, query), mesh)


def reductions(have: Placement, want: Placement, mesh: Mesh) -> Iterator[Step]:
    """Yield the in-place reductions of partial sums; each rank's own part must be contiguous.

    Where it is not, the sum is all-reduced. Readers move the tensor to its final placement.
    """
    yield from _joined(have, _reduced(have, want, mesh, one_piece=True), mesh)


def _joined(have: Placement, apart: Iterable[Step], mesh: Mesh) -> Iterator[Step]:
    """Yield steps, with equal steps along neighbouring mesh axes joined."""
    before, waiting = have, list[Step]()
    for step in apart:
        if waiting:
            both = _as_one(before, waiting[-1], step, mesh)
            if both is not None:
                waiting[-1] = both
                continue
            yield waiting[-1]
            before = waiting.pop()[1]
        waiting.append(step)
    yield from waiting


def _as_one(before: Placement, first: Step, second: Step, mesh: Mesh) -> Step | None:
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
    split = a.dim if name in ("part", "reduce_scatter", "all_to_all") else None
    if not all(_beside(p.dims[i], axes) for p, i in ((before, gathered), (after, split)) if i is not None):
        return None
    return replace(a, axis=joint, ranks=mesh[joint]), after, name


def _beside(dim: Factors, axes: Sequence[str]) -> bool:
    """Whether mesh axes split a tensor axis one directly within the other."""
    at = dim.index(axes[0])
    return dim[at : at + len(axes)] == tuple(axes)


def _apart(have: Placement, want: Placement, mesh: Mesh, query: int | None) -> Iterator[Step]:
    """Yield the redistribution along each mesh axis.

    A partial sum is reduced, scattered if the target is sharded. A mesh axis that moves to another tensor axis is an
    all-to-all, one that is removed an all-gather, and a new one a local slice, which is free.
    """
    at, inner = have, _inner(have, want, query)
    # removed axes first: they make room for new ones
    for axis in (*inner, *sorted((a for a in mesh if a not in inner), key=lambda axis: want.dim(axis) is not None)):
        if axis in at.pending:
            continue
        here, there = at.dim(axis), want.dim(axis)
        stays = axis not in inner if here == query else here == there and here is not None
        if here is None or (stays and agree(at.dims[here], want.dims[here], mesh)):
            continue
        free = at.without([axis], mesh)
        room = there is not None and axis not in want.pending and _fits(free, want, axis, there, mesh, query)
        if there is not None and there != here and room:
            at, kind = _exchange(at, want, axis, here, there, mesh)
            yield kind, at, "all_to_all"
        else:
            kind = Collective(
                collective="all_gather", ranks=mesh[axis], axis=axis, dim=here, blocks=blocks(at.dims[here], axis)
            )
            at = free
            yield kind, at, "all_gather"
    for step in _reduced(at, want, mesh, query):
        yield step
        at = step[1]
    outer = () if query is None else _axes(want.dims[query])
    for axis in (*outer, *(a for a in mesh if a not in outer)):
        there = want.dim(axis)
        if there is not None and axis not in at.axes:
            at = _into(at, want, axis, there, mesh)
            yield LocalShard(ranks=mesh[axis], axis=axis, dim=there, blocks=blocks(at.dims[there], axis)), at, "part"


def _axes(dim: Factors) -> list[str]:
    return [f for f in dim if isinstance(f, str)]


def _inner(have: Placement, want: Placement, query: int | None) -> list[str]:
    """Return the mesh axes that must leave the query axis, innermost first; some are added again later."""
    if query is None:
        return []
    now, then = _axes(have.dims[query]), _axes(want.dims[query])
    alike = next((i for i, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then)))
    return now[alike:][::-1]


def _reduced(
    at: Placement, want: Placement, mesh: Mesh, query: int | None = None, *, one_piece: bool = False
) -> Iterator[Step]:
    """Yield the reductions along each mesh axis, reduce-scatters first: less is left to reduce."""
    for axis, how in sorted(at.partial, key=lambda part: want.dim(part[0]) is None):
        if want.pending.get(axis) == how:
            continue
        there = want.dim(axis)
        free = at.without([axis], mesh)
        into = None
        if there is not None and _fits(free, want, axis, there, mesh, query):
            into = _into(free, want, axis, there, mesh)
        if there is not None and into is not None and (not one_piece or blocks(into.dims[there], axis) == ONE):
            at = into
            kind = Collective(
                collective="reduce_scatter", ranks=mesh[axis], axis=axis, dim=there,
                blocks=blocks(at.dims[there], axis), operation=how,
            )  # fmt: skip
            yield kind, at, "reduce_scatter"
        else:
            at = free
            yield Collective(collective="all_reduce", ranks=mesh[axis], axis=axis, operation=how), at, "all_reduce"


def _fits(at: Placement, want: Placement, axis: str, dim: int, mesh: Mesh, query: int | None) -> bool:
    """Whether a mesh axis can split its target axis in addition to those that split it already."""
    stay = all(f in want.dims[dim] for f in at.dims[dim] if isinstance(f, str))
    if dim == query:
        beside = [*_axes(at.dims[dim]), axis]
        stay = _axes(want.dims[dim])[: len(beside)] == beside
    return stay and agree(at.dims[dim], want.dims[dim], mesh)


def _into(at: Placement, want: Placement, axis: str, dim: int, mesh: Mesh) -> Placement:
    there = frozenset(f for f in at.dims[dim] if isinstance(f, str)) | {axis}
    return at.with_dims([seen(want.dims[dim], there, mesh) if i == dim else d for i, d in enumerate(at.dims)])


def _exchange(
    at: Placement, want: Placement, axis: str, here: int, there: int, mesh: Mesh
) -> tuple[Placement, Collective]:
    after = _into(at.without([axis], mesh), want, axis, there, mesh)
    kind = Collective(
        collective="all_to_all", ranks=mesh[axis], axis=axis, dim=there, blocks=blocks(after.dims[there], axis),
        source=here, source_blocks=blocks(at.dims[here], axis),
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
        self.found: dict[Op, _Ring] = {}
        """Rings, by kernel."""
        self.within: set[Op] = set()
        """Collectives that are part of a ring."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        for op in () if old.fused else old.ops:
            if isinstance(op.kind, Kernel):
                self.look(op, op.kind)
        super().fill(old, new, suffix)

    def look(self, op: Op, kind: Kernel) -> None:
        """Record the all-gathers of matmul operands, and the reduce-scatters of matmul results."""
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
        """Whether an op is the given collective along one of the ring axes."""
        kind = op.kind
        return isinstance(kind, Collective) and kind.collective == collective and kind.axis in self.axes

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if op in self.found:
            self.ring(op, self.found[op], new)
        elif op not in self.within:
            self.copy(op, new, suffix)

    def ring(self, op: Op, ring: _Ring, new: Graph) -> None:
        """Add a kernel with its collectives inside."""
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
        """Return the outputs of a kernel by the outer tensor they replace; reduced sums are this rank's part."""
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
        """Return this rank's parts of the reduced sums."""
        return [self.tensors[reader.results[0]] for reader in ring.summed]


def _only(t: Tensor, op: Op) -> bool:
    """Whether an op is the only reader of a tensor."""
    return t not in t.graph.outputs and all(reader is op for reader in t.graph.successors(t))


# -- tensors -----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def repeated(t: Tensor) -> frozenset[int]:
    """Return the axes along which a tensor is expanded without a copy."""
    kind = None if t.producer is None else t.producer.kind
    if not isinstance(kind, Expand) or t.producer is None:
        return frozenset()
    (x,) = t.producer.operands
    return frozenset(i for i, at in enumerate(kind.kept) if at is None or x.sizes[at] != t.sizes[i])


@dataclass(frozen=True)
class RequestedPlacements:
    """The requested placements of sources and gradients, and how parameters are gathered."""

    mesh: Mesh
    places: Mapping[Tensor, Placement]
    """Placements of old sources, and other old tensors with a stated placement."""
    gradients: Mapping[Tensor, Placement]
    """Placements of old gradients."""
    staying: Mapping[Tensor, frozenset[str]]
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
    held: frozenset[str] = frozenset()
    """Mesh axes along which all-gathered activations are saved for the backward pass."""
    reduce_each: bool = True
    """Whether the gradients of each micro-batch are reduced."""
    kept: Mapping[Tensor, Placement] = field(default_factory=dict)
    """Placements of old gradient buffers in which ranks accumulate partial sums."""
    fused: bool = False
    """Whether matmuls accumulate into these buffers (gradient accumulation fusion)."""
    products: Mapping[Tensor, DType] = field(default_factory=dict)
    """Buffers that matmuls accumulate into, and the format of the products."""


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
    """Copies tensors with their local sizes; `at` holds the placement of each new tensor."""

    replays = False

    def __init__(self, stated: RequestedPlacements) -> None:
        super().__init__()
        self.stated, self.mesh = stated, stated.mesh
        self.at: dict[Tensor, Placement] = {}
        self.stacks: dict[Tensor, Placement] = {}
        """Stacks of the old graph whose slices have another placement than stated, and that placement."""
        self.names: dict[Tensor, str] = {}
        """More descriptive names for new tensors: a formal's outer name, or a gradient's."""
        self.params: dict[Tensor, frozenset[str]] = {}
        """New tensors that are parameters or alias them, and the mesh axes along which they are gathered."""
        self.fixed: set[Tensor] = set()
        """New tensors that are inputs with a stated placement, or alias them."""
        self.copies: dict[tuple[Tensor, Placement, Graph, str], Tensor] = {}
        self.held: dict[Tensor, Tensor] = {}
        """Tensors that were all-gathered for both passes, and the results."""
        self.elsewhere: dict[Tensor, Tensor] = {}
        """Results of all-to-alls, and the tensors exchanged."""
        self.moved: list[str] = []
        """Unrequested redistributions, in words."""
        self.wanted: dict[Tensor, Placement] = {}
        """Gradients of the old graph, and their placements."""
        self.staying: dict[Tensor, frozenset[str]] = {}
        self.rows = RankOrderedRows(stated.mesh)
        """New tensors whose rows are in rank-local order."""
        self.carried: set[Storage] = set()
        """Storages that are carried: the next iteration reads them with the same placement."""
        self.undecided: dict[Tensor, tuple[Op, int]] = {}
        """New carries that start as an expanded scalar, and their loop and position: the first reader decides."""
        self.met_by: dict[Tensor, Placement] = {}
        """Old tensors that are carried out, and the placement of the carry."""
        self.homes: dict[Any, Placement] = {}
        """New partial sums, and their natural placement: gradients of keys are sharded like the queries."""
        self.inside: dict[Tensor, Tensor] = {}
        """Old tensors that attention reads split by heads, and the new tensors with that placement."""
        self.piece: SplitKernel | None = None
        """The kernel that is being split."""
        self.parts: dict[Storage, tuple[Tensor, Placement]] = {}
        """Storages that each rank has written a part of: the last old tensor in each, and its target placement."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the per-rank graph."""
        self.wanted = self.aims(old, self.stated.gradients)
        self.staying = self.terms_of(old, self.stated.staying)
        return super().run(old, name)

    def aims(self, old: Graph, gradients: Mapping[Tensor, Placement]) -> dict[Tensor, Placement]:
        """Return placements for gradients and the terms that are accumulated into them."""
        return self.terms_of(old, gradients)

    def terms_of(self, old: Graph, gradients: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Extend a mapping of gradients to the terms that are accumulated into them."""
        return targets(old, gradients)

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops, and all-gather tensors that ranks have written in parts."""
        around, self.parts = self.parts, {}
        super().fill(old, new, suffix)
        self.close(old, new)
        for t, place in self.parts.values():
            self.put_together(t, place, new)
        self.parts = around
        if old.parent is None:
            for t in old.outputs:
                now = self.value(t, new)
                if now in self.rows.own or now in self.rows.ordered:
                    self.rows.refuse(now)
                self.tensors[t] = self.moved_to(
                    now, self.at[now].without(self.at[now].pending, self.mesh), new, "forward"
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
        place = self.stated.places.get(old, Placement(((),) * old.ndim))
        sizes = place.local(old.sizes)
        strides = in_the_order_of(old.sizes, old.strides, sizes)
        tensor = Tensor(
            new, new.unique(old.name + suffix), sizes, old.dtype, strides=strides,
            role=old.role, requires_grad=old.requires_grad, pieces=old.storage.pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(tensor)
        self.at[tensor] = place
        if old.role == "param":
            self.params[tensor] = self.stated.gathered - self.stated.resident.get(old, frozenset())
        elif old in self.stated.places:
            self.fixed.add(tensor)
        return tensor

    def value(self, old: Tensor, new: Graph, want: Placement | None = None, phase: str = "forward") -> Tensor:
        """Return the new tensor of an old one at a placement; create it now if it is deferred."""
        found = self.tensors[old]
        if isinstance(found, UnplacedSource):
            key = (old, want or Placement(((),) * old.ndim), self.here(new), "")
            if key not in self.copies:  # one copy for each placement
                self.copies[key] = self.made(found, old, new, key[1])
            return self.copies[key]
        return found if want is None else self.moved_to(found, want, new, phase)

    def here(self, new: Graph) -> Graph:
        """Return the graph that ops are added to: the kernel that is being written, if there is one."""
        return new if self.piece is None else self.piece.graph()

    def made(self, later: UnplacedSource, old: Tensor, new: Graph, want: Placement) -> Tensor:
        """Create the result of a deferred op with local sizes."""
        if not later.zero:
            want = want.without(want.pending, self.mesh)
        kind, here = later.op.kind, self.here(new)
        if isinstance(kind, DenseFactory | Expand):
            kind = at_places(replace(kind, sizes=want.local(old.sizes)), want, self.mesh)
        operands = [self.value(t, new, want if t.ndim else None) for t in later.op.operands]
        op = here.add_op(kind, operands, later.op.name, later.op.phase)
        op.scope = later.op.scope
        self.at[op.results[0]] = want
        return op.results[0]

    def moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Redistribute a tensor; readers of the same phase share the result."""
        have = self.at[t]
        if have == want:
            return t
        key, always = (t, want, new, "" if t in self.params else phase), (t, want, new, "")
        if key in self.copies or always in self.copies:
            return self.copies.get(key) or self.copies[always]
        if t in self.undecided and not want.pending and want.axes > have.axes:
            loop, i = self.undecided[t]
            raise WiderError(loop, {i: want})
        way, param = list(steps(have, want, self.mesh, None if t.domain is None else t.domain[1])), t in self.params
        made = self.again(t, want, new, phase) if repeated(t) and {name for *_, name in way} != {"part"} else None
        if made is not None:
            self.copies[key] = made
            return made
        made = t
        self.rows.need_kept(t, have.dims, want.dims)
        for kind, after, name in way:
            made = self.step(kind, made, name, new, phase)
            self.at[made] = after
        if have.pending:  # a sum is reduced once for all passes
            key = always
        elif not param and phase in ("forward", "recompute") and self.stated.held and self.is_held(way):
            key = always
            self.held[t] = made
        if {name for *_, name in way} == {"all_to_all"}:  # both have the same size: either may be saved
            key = always
            self.copies[made, have, new, ""] = t
            self.elsewhere[made] = t
        if self.at[made] != want:
            raise UnsupportedError(
                f"shard: {t.name!r} lies as {have} and is wanted as {want}, to which no collective moves it; expected "
                f"placements that agree"
            )
        if have.pending == want.pending or t not in self.rows.own:  # a reduced count is the same on all ranks
            self.rows.stands_for(made, t)
        if param:
            self.params[made] = self.params[t]
        self.copies[key] = made
        return made

    def again(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor | None:
        """Redistribute the operand of an expand and expand it again; return None if that is impossible here."""
        op = t.producer
        assert op is not None
        assert isinstance(op.kind, Expand)
        (x,), have = op.operands, self.at[t]
        if want.pending or self.piece is not None or x.graph is not new:
            return None
        dims: list[Factors] = [()] * x.ndim
        for i, at in enumerate(op.kind.kept):
            if at is not None and i not in repeated(t):
                dims[at] = want.dims[i]
        ranks = (prod((self.mesh[f] for f in d if isinstance(f, str)), start=ONE) for d in have.dims)
        whole = tuple(n * m for n, m in zip(t.sizes, ranks, strict=True))
        source = self.moved_to(x, Placement(tuple(dims)), new, phase)
        again = new.add_op(
            at_places(replace(op.kind, sizes=want.local(whole)), want, self.mesh), [source], op.name, phase
        )
        again.scope = op.scope
        self.at[again.results[0]] = want
        return again.results[0]

    def is_held(self, way: Sequence[tuple[OpKind, Placement, str]]) -> bool:
        """Whether all of these ops are all-gathers whose results are saved for the backward pass, as in autograd."""
        kinds = [kind for kind, _, _ in way if isinstance(kind, Collective) and kind.collective == "all_gather"]
        return len(kinds) == len(way) and all(self.stated.held >= {*self.mesh.parts(kind.axis)} for kind in kinds)

    def slices_moved_to(self, t: Tensor, want: Placement, new: Graph, phase: str) -> Tensor:
        """Return a stack at another placement; ranks reduce its separate storages one after the other."""
        if not t.storage.pieces or not self.at[t].pending:
            return self.moved_to(t, want, new, phase)
        name = self.names.get(t, t.name)
        body = new.start_body(f"{name}.slices", fused=False)
        slice_ = body.formal(t, name, t.sizes[1:], t.strides[1:], t.storage.pieces - 1)
        self.at[slice_] = self.at[t].with_dims(self.at[t].dims[1:])
        made = self.slices_moved_to(slice_, want.with_dims(want.dims[1:]), body, phase)
        body.outputs.append(made)
        kind = Repeat(body=body, count=t.sizes[0], carries=0, xs=1, saved=1)
        op = new.add_op(kind, [t], body.name, phase)
        op.scope, body.owner = name.rpartition("/")[0], op
        self.at[op.results[0]] = want
        return op.results[0]

    def stands_for(self, made: Tensor, t: Tensor) -> None:
        """Note that a new tensor aliases another, in or outside of a body."""
        self.at[made] = self.at[t]
        if t in self.params:
            self.params[made] = self.params[t]
        if t in self.fixed:
            self.fixed.add(made)
        self.rows.stands_for(made, t)

    def step(self, kind: OpKind, t: Tensor, name: str, new: Graph, phase: str, *others: Tensor) -> Tensor:
        """Add an op that redistributes a tensor, outside of a kernel, which is split there."""
        graph = new if self.piece is None else self.piece.outside(t)
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
        (made,) = graph.add_op(kind, [t], name, phase).results
        self.stands_for(made, t)
        return made

    def stack(self, op: Op, new: Graph) -> None:
        """Add an empty stack; if its slices turn out to have another placement, the graph is built again."""
        (stack,) = op.results
        place = self.stated.stacks.get(stack, Placement(((),) * stack.ndim))
        self.tensors[stack] = self.made(UnplacedSource(op), stack, new, place)

    def note_made(self, t: Tensor, place: Placement | None) -> None:
        """Note that an allocated tensor inherits the placement of the values written; the graph is built again."""
        while place is not None and t.producer is not None and not isinstance(t.producer.kind, DenseFactory):
            op = t.producer
            rule = op.kind.placed(op)
            if rule is None or not op.operands or op.operands[0].storage is not t.storage:
                return
            t, place = op.operands[0], before(rule, place, self.mesh)
        if place is not None and t.producer is not None and t not in self.stated.stacks:
            self.stacks[t] = place

    def stacked(self, op: Op, new: Graph) -> None:
        """Add the filled stack, and note the placement of its slices."""
        stack, *slices = op.operands
        place, rest = self.at[self.tensors[stack]], stack.ndim - 1
        now = [self.at[self.value(t, new)] for t in slices]
        dims = {at.dims[len(at.dims) - rest :] for at in now}
        found = Placement(((), *dims.pop())) if len(dims) == 1 else Placement(((),) * stack.ndim)
        if found != place and stack not in self.stated.stacks:
            self.stacks[stack] = found
        wanted = [Placement((*((),) * (t.ndim - rest), *place.dims[1:])) for t in slices]
        for t, at, want in zip(slices, now, wanted, strict=True):
            self.tell(op, t, at, want, "other slices of its stack lie otherwise")
        moved = [self.value(t, new, want, op.phase) for t, want in zip(slices, wanted, strict=True)]
        (made,) = self.add(op, op.kind, [self.tensors[stack], *moved], self.here(new)).results
        self.at[made] = place

    def tell(self, op: Op, t: Tensor, at: Placement, want: Placement, why: str) -> None:
        """Note the mesh axes along which a tensor is redistributed without a request."""
        axes = sorted(axis for axis in at.axes if want.dim(axis) != at.dim(axis))
        self.moved += [f"{op.name!r}: {t.name!r} put together along {axis}: {why}" for axis in axes]

    def note_part(self, before: Tensor, written: Tensor, after: Tensor) -> None:
        """Note a tensor that is written in parts although it is replicated."""
        storage = written.storage
        if storage in self.parts:
            self.parts[storage] = after, self.parts[storage][1]
            return
        found = self.tensors[before]
        own = storage.role == "activation" or storage in self.carried
        if isinstance(found, Tensor) and not own and self.at[written] != self.at[found]:
            self.parts[storage] = after, self.at[found]

    def put_together(self, old: Tensor, place: Placement, new: Graph) -> None:
        """All-gather, in place, the parts of a replicated tensor that ranks have written."""
        t = self.tensors[old]
        for axis in reversed(list(self.mesh)):
            at = self.at[t]
            dim = at.dim(axis)
            if dim is None or place.dim(axis) is not None:
                continue
            kind = Collective(collective="all_gather", ranks=self.mesh[axis], axis=axis, dim=dim, inplace=True)
            assert old.producer is not None
            op = new.add_op(kind, [t], f"{t.name}.all_gather", old.producer.phase)
            op.scope = old.producer.scope
            (t,) = op.results
            self.at[t] = at.without([axis], self.mesh)
        self.tensors[old] = t
