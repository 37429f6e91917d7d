"""Rewriter: the base class for graph transforms, which copies a graph op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..algebra.polynomial import Poly
from ..errors import UnsupportedError
from ..ir.graph import (
    BodyKind,
    Call,
    Domain,
    Graph,
    Op,
    OpKind,
    Placement,
    Sharding,
    Tensor,
    carry_facts,
    opened,
    same_suffix,
)
from ..ops.layout import Concat

__all__ = ["Rewriter", "bound", "bound_record", "flat", "members", "map_stages"]

K = TypeVar("K", bound=OpKind)


def members(value: Any) -> Iterator[Any]:
    """Yield the new tensors for an old one: a tensor with one storage per iteration may have become a list."""
    if isinstance(value, list):
        for part in value:
            yield from members(part)
    else:
        yield value


def flat(op: Op, tensors: Mapping[Tensor, Any]) -> list[Any]:
    """Return an op's new operands one by one, in the order in which it reads list elements."""
    reverse = isinstance(op.kind, Concat) and op.kind.reverse
    new_operands = ([*members(tensors[t])] for t in op.operands)
    return [t for part in new_operands for t in part[:: -1 if reverse else 1]]


def bound(value: Any, values: Mapping[str, Poly]) -> Any:
    """Bind sizes in a value."""
    if not values:
        return value
    if isinstance(value, Poly):
        return value.bind(values)
    if isinstance(value, Domain):
        return replace(value, window=bound(value.window, values), ranks=bound(value.ranks, values))
    if isinstance(value, Call):
        return replace(value, arguments=bound(value.arguments, values), keywords=bound(value.keywords, values))
    if isinstance(value, tuple):
        return tuple(bound(v, values) for v in value)
    if isinstance(value, dict):
        return {k: bound(v, values) for k, v in value.items()}
    return value


def bound_record(kind: K, values: Mapping[str, Poly]) -> K:
    """Bind sizes in an op's record."""
    if not values:
        return kind
    return replace(kind, **{name: bound(v, values) for name, v in kind.stated().items()})


class Rewriter:
    """Copies a graph in program order; subclasses override single steps.

    `values` are sizes bound for symbols in the copy.
    """

    lies = False
    """Whether the copy preserves the placements of a per-rank graph, up to a leading iteration axis."""
    replays = True
    """Whether a traced call can be replayed for the copied op, because its operands are unchanged."""

    keeps_suffixes = True
    """Whether ops keep the suffixes of unrolled iterations."""

    def __init__(self, values: Mapping[str, Poly] | None = None) -> None:
        self.values = dict(values or {})
        self.tensors: dict[Tensor, Any] = {}
        """New tensor, or list of tensors, for each old one."""
        self.operand_of: dict[Tensor, Tensor] = {}
        """Old operand for each formal in a copied kernel."""
        self.origins: dict[Tensor, Tensor] = {}
        """Old source for each new source, which may be a part of it."""

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the new graph.

        Raises UnsupportedError if the copy would lose the placements of a per-rank graph.
        """
        keeps_placements = type(self) is Rewriter or self.lies
        if old.parts or (old.sharding is not None and not keeps_placements):
            raise UnsupportedError(
                f"graph {old.name!r} is the graph of one rank, expected the graph before costgraph.shard or parallelize"
            )
        new = Graph(old.name if name is None else name, dtype=old.dtype)
        carry_facts(old, new, **self.changed(old))
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(output for t in old.outputs for output in members(self.tensors[t])))
            for t, g in old.gradients.items():
                new.gradients |= zip(members(self.tensors[t]), members(self.tensors[g]), strict=True)
            if self.lies and old.sharding is not None:
                new.sharding = self.laid(old, old.sharding)
        return new.freeze()

    def changed(self, old: Graph) -> dict[str, Any]:
        """Return the graph attributes that differ in the copy, by name: those that contain bound sizes."""
        waiting = old.waiting
        if waiting is not None:
            waiting = replace(waiting, **{k: bound(v, self.values) for k, v in vars(waiting).items()})
        return {"waiting": waiting}

    def laid(self, old: Graph, sharding: Sharding) -> Sharding:
        """Return the placements of the new tensors; the iteration axis, which is not sharded, may be gone."""

        def place(t: Tensor, placement: Placement) -> Placement:
            return placement.with_dims(
                [bound(dim, self.values) for dim in placement.dims[len(placement.dims) - t.ndim :]]
            )

        def source(new: Tensor, t: Tensor) -> Placement:
            return place(new, self.placed(t, sharding.places[t.name]))

        gradients = [(new, sharding.gradients[t.name]) for t in old.gradients for new in members(self.tensors[t])]
        outputs = zip(old.outputs, sharding.outputs, strict=True)
        return replace(
            sharding,
            mesh=replace(sharding.mesh, axes=bound(sharding.mesh.axes, self.values)),
            places={new.name: source(new, t) for new, t in self.origins.items()},
            outputs=tuple(place(new, placement) for t, placement in outputs for new in members(self.tensors[t])),
            gradients={new.name: place(new, placement) for new, placement in gradients},
        )

    def placed(self, old: Tensor, placement: Placement) -> Placement:
        """Return the placement of a source in the axis order of the copy."""
        return placement

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops; body formals must be in `tensors` already."""
        for node in list(old.nodes):
            if isinstance(node, Op):
                with same_suffix(node.name if self.keeps_suffixes else ""):  # added ops share its iteration
                    self.emit(node, new, suffix)
            elif node.producer is None and node.role != "formal":
                self.tensors[node] = self.source(node, new, suffix)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy or replace an op."""
        self.copy(op, new, suffix)

    def source(self, old: Tensor, new: Graph, suffix: str) -> Any:
        """Copy an input, parameter, buffer or cache."""
        sizes, strides = (tuple(n.bind(self.values) for n in ns) for ns in (old.sizes, old.strides))
        tensor = Tensor(
            new, new.unique(old.name + suffix), sizes, old.dtype, strides=strides,
            role=old.role, requires_grad=old.requires_grad, pieces=old.storage.pieces, host=old.storage.host,
        )  # fmt: skip
        new.add_node(tensor)
        self.origins[tensor] = old
        return tensor

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op with its body."""
        kind = bound_record(op.kind, self.values)
        if isinstance(kind, BodyKind):
            if op.loop is None:
                self.operand_of |= dict(zip(kind.body.formals, op.operands, strict=True))
            kind = replace(kind, body=self.body(kind.body, new, suffix))
        copied = self.add(op, kind, [self.tensors[t] for t in op.operands], new, op.name + suffix)
        copied.call = bound(op.call, self.values) if self.replays else None
        return copied

    def add(self, op: Op, kind: OpKind, operands: Sequence[Tensor], new: Graph, name: str | None = None) -> Op:
        """Add an op in the scope and phase of an old one, whose results it replaces."""
        new_op = new.add_op(kind, operands, op.name if name is None else name, op.phase)
        new_op.scope = op.scope
        if new_op.body is not None:
            new_op.body.owner = new_op
        self.tensors |= dict(zip(op.results, new_op.results, strict=False))  # the new op may have more results
        return new_op

    def formal(self, old: Tensor, body: Graph, suffix: str = "") -> Tensor:
        """Copy a body's formal."""
        sizes, strides = (tuple(p.bind(self.values) for p in ps) for ps in (old.sizes, old.strides))
        formal = body.formal(old, old.name + suffix, sizes, strides)
        formal.offset = old.offset.bind(self.values)
        operand = self.operand_of.get(old)
        new_operand = None if operand is None else self.tensors[operand]
        if (
            operand is not None
            and isinstance(new_operand, Tensor)
            and new_operand.strides != bound(operand.strides, self.values)
        ):
            formal.strides, formal.offset = new_operand.strides, new_operand.offset  # the operand has another layout
        formal.domain = bound(old.domain, self.values)
        return formal

    def body(self, old: Graph, new: Graph, suffix: str) -> Graph:
        """Copy a body; the results of its op follow the order of its outputs."""
        body = new.start_body(old.name, fused=old.fused)
        for f in old.formals:
            self.tensors[f] = self.formal(f, body, suffix)
        self.fill(old, body, suffix)
        body.outputs += [body.adopt(self.tensors[t]) for t in old.outputs]
        return body


def map_stages(graph: Graph, transform: Callable[[Graph], Graph]) -> Graph:
    """Apply a transform to a graph, or to each stage of a pipeline."""
    if not graph.parts:
        return transform(graph)
    stages = tuple(map(transform, graph.parts))
    combined = Rewriter().run(stages[0], graph.name)
    combined.sharding, combined.parts = stages[0].sharding, stages
    return combined
