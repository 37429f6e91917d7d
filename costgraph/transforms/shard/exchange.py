"""Attention whose ranks exchange a part of the sequence for a part of the heads, as Ulysses does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.placement import Factors, Mesh, Placement, Split, distributed, tidy
from ...graph.strides import Sizes
from ...graph.tensor import Tensor
from ...ops.contraction import Einsum
from ...ops.moves import Rearrange

__all__ = ["before", "common", "heads", "swapped", "views"]


def heads(body: Graph) -> dict[Sizes, tuple[int, int]]:
    """Return which axis of operands and results of a kernel is that of heads, and which of positions, by their shape.

    What the kernel keeps to itself has pairs of positions as its last axes, as many of both; heads are the last axis
    before them that all tensors of the same product have.
    """
    found: dict[Sizes, tuple[int, int]] = {}
    for op in body.ops:
        if not isinstance(op.kind, Einsum) or len(op.operands) != 2:
            continue
        rule = op.kind.placed(op)
        both = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
        sides = [(labels, t) for labels, t in both if labels]
        for labels, t in sides:
            if t in body.formals or t in body.outputs or len(labels) < 3 or t.sizes[-1] != t.sizes[-2]:
                continue
            shared = [n for n in labels[:-2] if n and all(n in other for other, _ in sides)]
            for other, u in sides if shared else ():
                own = next((n for n in labels[-2:] if n in other), None)
                if u is not t and own is not None:
                    found.setdefault(u.sizes, (other.index(shared[-1]), other.index(own)))
    return found


def swapped(at: Placement, axis: str, there: int, sizes: Sizes, mesh: Mesh) -> Placement:
    """Return a placement with an axis of the mesh that splits another axis of the tensor, within what does already."""
    free = at.without([axis], mesh)
    *parts, last = free.dims[there] or (sizes[there],)
    assert not isinstance(last, str)
    dims = [tidy((*parts, axis, last / mesh[axis])) if i == there else dim for i, dim in enumerate(free.dims)]
    return free.with_dims(dims)


def before(rule: Split, want: Placement, mesh: Mesh) -> Placement | None:
    """Return where the one operand of an op lies, from where its result lies; None where there is no such place."""
    labels = rule.operands[0]
    parts: dict[str, Factors] = {}
    for names, dim in zip(rule.results[0], want.dims, strict=True):
        found = distributed(dim, [rule.extents[n] for n in names], mesh) if names else ()
        if found is None:
            return None
        parts |= dict(zip(names, found, strict=True))
    if labels is None:
        return None
    return Placement(
        tuple(tidy(f for n in names for f in (parts.get(n) or (rule.extents[n],))) for names in labels), want.partial
    )


def common(rule: Split, given: Sequence[Placement | None]) -> dict[str, str]:
    """Return which name that all operands have is summed, by axis of the mesh that splits it in one of them."""
    out: dict[str, str] = {}
    for labels, at in zip(rule.operands, given, strict=True):
        for names, dim in zip(labels or (), () if at is None else at.dims, strict=False):
            if len(names) == 1 and names[0] in rule.reduced and all(o and names in o for o in rule.operands):
                out |= dict.fromkeys((f for f in dim if isinstance(f, str)), names[0])
    return out


def views(t: Tensor) -> Iterator[Op]:
    """Yield the ops that made a tensor of what holds its elements, with other axes, the last one first."""
    while t.producer is not None and isinstance(t.producer.kind, Rearrange):
        yield t.producer
        (t,) = t.producer.operands
