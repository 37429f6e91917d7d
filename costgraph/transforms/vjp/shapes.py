"""Gradients of ops that move or rename elements, and of those that make them from nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ...algebra.polynomial import ONE, total
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.fill import pad
from ...ops.layout import slice_axis
from ...ops.moves import Rearrange
from ...ops.pointwise import cast
from .common import summed
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


def _only(pull: Pull) -> Tensor | None:
    """Return the gradient of the only result, None where that of the only operand is not wanted."""
    return pull.grads[0] if pull.needs[0] else None


@vjp("rearrange")
def _rearrange(pull: Pull) -> Sequence[Tensor | None]:
    """Go the other way; a copy that was made for its layout alone has the gradient of its result."""
    g, attrs = _only(pull), pull.op.attrs
    (x,) = pull.op.operands
    split, order = attrs["split"], attrs["order"]
    if g is None or (attrs["merged"] == x.sizes and list(order) == sorted(order)):
        return [g]
    back = Rearrange(
        split=tuple(split[i] for i in order), order=tuple(order.index(i) for i in range(len(order))), merged=x.sizes
    )
    return [apply(back, [g], "rearrange")[0]]


@vjp("slice")
def _slice(pull: Pull) -> Sequence[Tensor | None]:
    g, attrs = _only(pull), pull.op.attrs
    full = pull.op.operands[0].sizes[attrs["axis"]]
    return [None if g is None else pad(g, attrs["axis"], attrs["start"], full, attrs["step"])]


@vjp("pad")
def _pad(pull: Pull) -> Sequence[Tensor | None]:
    g, attrs = _only(pull), pull.op.attrs
    size = pull.op.operands[0].sizes[attrs["axis"]]
    return [None if g is None else slice_axis(g, attrs["axis"], attrs["start"], size, attrs["step"])]


@vjp("expand")
def _expand(pull: Pull) -> Sequence[Tensor | None]:
    """Sum over the axes along which it was repeated."""
    g, op = _only(pull), pull.op
    if g is None:
        return [None]
    (x,), kept = op.operands, op.attrs["kept"]
    names = [f"n{i}" for i in range(g.ndim)]
    left = []
    for axis, size in enumerate(x.sizes):
        at = kept.index(axis) if axis in kept else None
        left.append("1" if at is None or (size == ONE and g.sizes[at] != ONE) else names[at])
    return [summed(g, names, left)]


@vjp("concat")
def _concat(pull: Pull) -> Sequence[Tensor | None]:
    """Cut the gradient into views."""
    (g,), axis, parts = pull.grads, pull.op.attrs["axis"], pull.op.operands
    assert g is not None
    sizes = [t.sizes[axis] for t in parts]
    return [
        slice_axis(g, axis, total(sizes[:i]), size) if wanted else None
        for i, (size, wanted) in enumerate(zip(sizes, pull.needs, strict=True))
    ]


@vjp("keep")
def _keep(pull: Pull) -> Sequence[Tensor | None]:
    """What is only held has no part in the result."""
    return [_only(pull), *(None for _ in pull.op.operands[1:])]


@vjp("cache")
def _cache(pull: Pull) -> Sequence[Tensor | None]:
    """Nothing happens in training."""
    return [_only(pull)]


@vjp("assign")
def _assign(pull: Pull) -> Sequence[Tensor | None]:
    """What was overwritten has no gradient."""
    (g,), (_, value) = pull.grads, pull.op.operands
    assert g is not None
    return [None, cast(g, value.dtype) if pull.needs[1] else None]


def _nothing(pull: Pull) -> Sequence[Tensor | None]:
    """Return no gradient: there is no operand."""
    return []


for _kind in ("fill", "arange", "empty", "initial_state"):
    vjp(_kind)(_nothing)
