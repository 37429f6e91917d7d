"""Gradients of ops that move or rename elements, and of those that make them from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...algebra.polynomial import ONE, Poly, total
from ...errors import UnsupportedError
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.cached import Cache, InitialState
from ...ops.fill import Assign, Fill, Pad, Revised, fill, pad
from ...ops.index import Arange
from ...ops.keep import Keep
from ...ops.layout import concat, permute, reshape, slice_axis
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ...ops.pointwise import cast
from ...ops.stacks import Empty
from ...ops.updates import ZeroGrad
from .common import summed
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


def _only(pull: Pull[Any]) -> Tensor | None:
    """Return the gradient of the only result, None where that of the only operand is not wanted."""
    return pull.grads[0] if pull.needs[0] else None


@vjp(Rearrange)
def _rearrange(pull: Pull[Rearrange]) -> Sequence[Tensor | None]:
    """Go the other way; a copy that was made for its layout alone has the gradient of its result."""
    g, kind, (x,) = _only(pull), pull.kind, pull.op.operands
    split, order = kind.split, kind.order
    if g is None or (kind.merged == x.sizes and list(order) == sorted(order)):
        return [g]
    back = Rearrange(
        split=tuple(split[i] for i in order), order=tuple(order.index(i) for i in range(len(order))), merged=x.sizes
    )
    return [apply(back, [g], "rearrange")[0]]


@vjp(Slice)
def _slice(pull: Pull[Slice]) -> Sequence[Tensor | None]:
    g, kind = _only(pull), pull.kind
    full = pull.op.operands[0].sizes[kind.axis]
    return [None if g is None else pad(g, kind.axis, kind.start, full, kind.step)]


@vjp(Pad)
def _pad(pull: Pull[Pad]) -> Sequence[Tensor | None]:
    g, kind = _only(pull), pull.kind
    size = pull.op.operands[0].sizes[kind.axis]
    return [None if g is None else slice_axis(g, kind.axis, kind.start, size, kind.step)]


@vjp(Expand)
def _expand(pull: Pull[Expand]) -> Sequence[Tensor | None]:
    """Sum over the axes along which it was repeated."""
    g, (x,), kept = _only(pull), pull.op.operands, pull.kind.kept
    if g is None:
        return [None]
    names = [f"n{i}" for i in range(g.ndim)]
    left = []
    for axis, size in enumerate(x.sizes):
        at = kept.index(axis) if axis in kept else None
        left.append("1" if at is None or (size == ONE and g.sizes[at] != ONE) else names[at])
    return [summed(g, names, left)]


@vjp(Concat)
def _concat(pull: Pull[Concat]) -> Sequence[Tensor | None]:
    """Cut the gradient into views: of what a loop has left, one whose first axis is that of the iterations."""
    (g,), kind, parts = pull.grads, pull.kind, pull.op.operands
    assert g is not None
    sizes = kind.extents(parts)
    made = [
        slice_axis(g, kind.axis, total(sizes[:i]), size) if wanted else None
        for i, (size, wanted) in enumerate(zip(sizes, pull.needs, strict=True))
    ]
    return [None if part is None else _part(part, t, kind) for part, t in zip(made, parts, strict=True)]


def _part(g: Tensor, t: Tensor, kind: Concat) -> Tensor:
    """Return the gradient of an operand as it is: with an axis of iterations, or without that along which it is one."""
    axis = kind.axis
    if t.storage.pieces > 1 or (t.storage.pieces and kind.reverse):
        raise UnsupportedError(
            f"backward: a concat of {t.name!r}, the last iteration's first or of loops inside each other; expected the "
            f"first one's, of one loop"
        )
    if not t.storage.pieces:
        return reshape(g, t.sizes) if kind.stacked else g
    own = () if kind.stacked else (t.sizes[1:][axis],)
    g = reshape(g, (*g.sizes[:axis], t.sizes[0], *own, *g.sizes[axis + 1 :]))
    return permute(g, (axis, *(i for i in range(g.ndim) if i != axis)))


@vjp(Keep)
def _keep(pull: Pull[Keep]) -> Sequence[Tensor | None]:
    """What is only held has no part in the result."""
    if pull.kind.pulled_by:
        by, graph = pull.kind.pulled_by, pull.op.graph.root
        if pull.kind.leaf:
            raise UnsupportedError(
                f"backward: graph {graph.name!r}: {by}, so its gradient goes to no parameter of the graph; expected "
                f"tensors that are made, converted and marked before the trace; or trace with train=True"
            )
        raise UnsupportedError(
            f"backward: {pull.op.name!r} of graph {graph.name!r} has the gradient that {by} of the program states, "
            f"expected declared ops; trace with train=True"
        )
    return [_only(pull), *(None for _ in pull.op.operands[1:])]


@vjp(Cache)
def _cache(pull: Pull[Cache]) -> Sequence[Tensor | None]:
    """Nothing happens in training."""
    return [_only(pull)]


@vjp(Assign)
def _assign(pull: Pull[Assign]) -> Sequence[Tensor | None]:
    """What was overwritten has no gradient."""
    (g,), (_, value) = pull.grads, pull.op.operands
    assert g is not None
    return [None, cast(g, value.dtype) if pull.needs[1] else None]


@vjp(ZeroGrad)
def _zeros(pull: Pull[ZeroGrad]) -> Sequence[Tensor | None]:
    """Nothing of what was there is left."""
    return [None]


@vjp(Revised)
def _revised(pull: Pull[Revised]) -> Sequence[Tensor | None]:
    """What has been written gets its part, and what was there before the rest, with zeros in its place."""
    (g,), (x, part), places = pull.grads, pull.op.operands, pull.kind.places
    assert g is not None
    if pull.kind.unseen:
        return [g, None]
    own = g
    for axis, start, step in places:
        own = slice_axis(own, axis, start, part.sizes[axis], step)
    if not pull.needs[0]:
        return [None, own]
    if all(step == 1 for *_, step in places):
        return [_without(g, part, places), own if pull.needs[1] else None]
    alone = own
    for axis, start, step in places:
        alone = pad(alone, axis, start, x.sizes[axis], step)
    return [g - alone, own if pull.needs[1] else None]


def _without(g: Tensor, part: Tensor, places: Sequence[tuple[int, Poly, int]]) -> Tensor:
    """Return a gradient with zeros where a part is, at places that follow each other."""
    if not places:
        return fill(part.sizes, 0, g.dtype)
    (axis, start, _), *others = places
    size, whole = part.sizes[axis], g.sizes[axis]
    behind = start + size
    pieces = [_without(slice_axis(g, axis, start, size) if others else g, part, others)]
    if start:
        pieces.insert(0, slice_axis(g, axis, 0, start))
    if whole - behind:
        pieces.append(slice_axis(g, axis, behind, whole - behind))
    return concat(pieces, axis)


@vjp(Fill, Arange, Empty, InitialState)
def _nothing(pull: Pull[Any]) -> Sequence[Tensor | None]:
    """Return no gradient: there is no operand."""
    return []
