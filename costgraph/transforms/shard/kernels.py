"""Split fused kernels into several bodies, and find the heads and positions of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...errors import UnsupportedError
from ...ir.graph import Factors, Graph, Mesh, Op, Placement, Split, Tensor, distributed, tidy
from ...ir.strides import Sizes, in_the_order_of
from ...ops.einsum import Einsum
from ...ops.layout import Rearrange
from ...ops.loops import Kernel

__all__ = [
    "operand_placement",
    "shared_contraction",
    "heads",
    "with_axis_moved",
    "views",
    "SplitKernel",
    "live_ops",
    "is_linear_in",
]


# -- heads and positions -----------------------------------------------------------------------------------------------
# DeepSpeed-Ulysses exchanges sequence shards for head shards.


def heads(body: Graph) -> dict[Sizes, tuple[int, int]]:
    """Return the head and position axis for operands and results of an attention kernel, by shape.

    Scores are intermediates whose last two axes have equal length. Heads are the last axis before them that all tensors
    of the same matmul share.
    """
    axes: dict[Sizes, tuple[int, int]] = {}
    for op in body.ops:
        if not isinstance(op.kind, Einsum) or len(op.operands) != 2:
            continue
        rule = op.kind.placed(op)
        pairs = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
        sides = [(labels, t) for labels, t in pairs if labels]
        for labels, t in sides:
            if t in body.formals or t in body.outputs or len(labels) < 3 or t.sizes[-1] != t.sizes[-2]:
                continue
            shared = [n for n in labels[:-2] if n and all(n in other for other, _ in sides)]
            for other, u in sides if shared else ():
                position = next((n for n in labels[-2:] if n in other), None)
                if u is not t and position is not None:
                    axes.setdefault(u.sizes, (other.index(shared[-1]), other.index(position)))
    return axes


def with_axis_moved(placement: Placement, axis: str, target_dim: int, sizes: Sizes, mesh: Mesh) -> Placement:
    """Return a placement with a mesh axis moved to another tensor axis, within its other factors."""
    free = placement.without([axis], mesh)
    *parts, last = free.dims[target_dim] or (sizes[target_dim],)
    assert not isinstance(last, str)
    dims = [tidy((*parts, axis, last / mesh[axis])) if i == target_dim else dim for i, dim in enumerate(free.dims)]
    return free.with_dims(dims)


def operand_placement(rule: Split, want: Placement, mesh: Mesh) -> Placement | None:
    """Return the operand placement of a unary op from that of its result, None if there is none."""
    labels = rule.operands[0]
    parts: dict[str, Factors] = {}
    for names, dim in zip(rule.results[0], want.dims, strict=True):
        factors = distributed(dim, [rule.extents[n] for n in names], mesh) if names else ()
        if factors is None:
            return None
        parts |= dict(zip(names, factors, strict=True))
    if labels is None:
        return None
    return Placement(
        tuple(tidy(f for n in names for f in (parts.get(n) or (rule.extents[n],))) for names in labels), want.partial
    )


def shared_contraction(rule: Split, placements: Sequence[Placement | None]) -> dict[str, str]:
    """Return the contracted name that all operands share, by the mesh axis that splits it in one of them."""
    out: dict[str, str] = {}
    for labels, placement in zip(rule.operands, placements, strict=True):
        for names, dim in zip(labels or (), () if placement is None else placement.dims, strict=False):
            if len(names) == 1 and names[0] in rule.reduced and all(o and names in o for o in rule.operands):
                out |= dict.fromkeys((f for f in dim if isinstance(f, str)), names[0])
    return out


def views(t: Tensor) -> Iterator[Op]:
    """Yield the rearrangements that produced a tensor, last one first."""
    while t.producer is not None and isinstance(t.producer.kind, Rearrange):
        yield t.producer
        (t,) = t.producer.operands


# -- splitting ---------------------------------------------------------------------------------------------------------


def live_ops(body: Graph) -> set[Op]:
    """Return the ops of a body that its outputs depend on, and those that write into its operands."""
    ops: set[Op] = set()
    needed = set(body.outputs)
    for op in reversed(body.ops):
        outside = any(op.operands[i].role == "formal" for i in op.kind.overwrites())
        if needed.intersection(op.results) or outside:
            ops.add(op)
            needed.update(op.operands)
    return ops


def is_linear_in(body: Graph, formal: Tensor) -> bool:
    """Whether a body is linear in an input, so that a partial sum may pass through."""
    parts = {formal}
    for op in body.ops:
        having = [t for t in op.operands if t in parts]
        if not having:
            continue
        rule = op.kind.placed(op)
        all_partial = len(having) == len(op.operands)
        if rule is None or not ((rule.linear and all_partial) or (rule.product and len(having) == 1)):
            return False
        parts.update(op.results)
    return True


def _bodies(t: Tensor) -> Iterator[Graph]:
    """Yield the graph of a tensor and its parents, innermost first."""
    graph: Graph | None = t.graph
    while graph is not None:
        yield graph
        graph = graph.parent


class SplitKernel:
    """A kernel that is being rewritten: a collective ends the current body, and a new one starts after it."""

    def __init__(self, op: Op, kind: Kernel, operands: Sequence[Tensor], new: Graph, outer: SplitKernel | None) -> None:
        self.op, self.kind, self.new, self.outer = op, kind, new, outer
        self.operands = list(operands)
        self.body: Graph | None = None
        self.cuts = 0
        self.useful = False
        """Whether a result of the current body is used."""
        self.outputs: list[Tensor] = []

    def graph(self) -> Graph:
        """Return the body that ops are added to."""
        if self.body is None:
            home = self.new if self.outer is None else self.outer.graph()
            self.body = home.start_body(self.op.body.name, fused=True)  # type: ignore[union-attr]
            if not self.cuts:
                for t in self.operands:
                    self.body.adopt(t)
        return self.body

    def outside(self, t: Tensor) -> Graph:
        """Return the graph for an op that redistributes a tensor; the kernel ends first if it produced the tensor."""
        if self.body is not None and self.body in _bodies(t):
            self.close()
        return self.new if self.outer is None else self.outer.outside(t)

    def strides(self, t: Tensor, i: int) -> Sizes | None:
        """Return a result's strides, with the axis order of the full tensor."""
        full_strides = self.kind.strides[i] if i < len(self.kind.strides) else None
        return None if full_strides is None else in_the_order_of(self.kind.body.outputs[i].sizes, full_strides, t.sizes)

    def close(self, *, last: bool = False) -> None:
        """Add the kernel that was written so far."""
        if self.body is None or not self.body.ops:
            self.body = None if not last else self.body
            if self.body is None:
                return
        if not self.useful and (self.cuts or not last):  # drop ops whose results are unused
            self.body = None
            return
        if (self.cuts or not last) and self.kind.changed:
            raise UnsupportedError(
                f"shard: {self.op.name!r} is a kernel that writes into its operands and would need a collective "
                f"inside; expected placements that do not split the kernel"
            )
        self.cuts += 1
        self.useful = False
        body, self.body = self.body, None
        places = {t: i for i, t in reversed([*enumerate(self.outputs)]) if t.graph is body} if last else {}
        body.outputs += sorted(places, key=places.__getitem__)
        strides = tuple(self.strides(t, places[t]) for t in body.outputs if t in places)
        kind = replace(
            self.kind if self.cuts == 1 else Kernel(body=body), body=body, strides=strides if any(strides) else ()
        )
        assert body.parent is not None
        op = body.parent.add_op(kind, body.captured, self.op.name, self.op.phase)
        op.scope = self.op.scope
        body.owner = op
        if self.outer is not None:
            self.outer.useful = True
