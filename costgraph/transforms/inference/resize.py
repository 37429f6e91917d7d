"""Records of ops whose operands have become longer or shorter along the positions of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from ...algebra.polynomial import ONE, Poly, poly
from ...algebra.symbols import symbol
from ...errors import UnsupportedError
from ...graph.op import Op, OpKind
from ...graph.sizes import _polys
from ...graph.strides import numel
from ...graph.tensor import Tensor
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.blocks import Repeat
from ...ops.contraction import Einsum
from ...ops.fill import Assign, Pad
from ...ops.index import Arange, Gather, Scatter
from ...ops.keep import Keep
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ...ops.pooling import Pool
from ...ops.reduce import Reduce
from ...ops.stochastic import Dropout
from ..rewrite import bound, bound_record

__all__ = ["Lengths", "resized"]

K = TypeVar("K", bound=OpKind)


@dataclass(frozen=True)
class Lengths:
    """What the number of positions becomes: not the same everywhere."""

    symbol: str
    """the number of positions in the graph as declared"""
    own: Poly
    """positions that a step computes"""
    others: tuple[Poly, ...] = ()
    """positions that a step sees: those in caches, or a single one"""

    @property
    def earlier(self) -> Poly:
        """Positions before those that a step computes."""
        return poly(symbol(self.symbol)) - self.own

    def with_other(self, length: Poly) -> Lengths:
        """Return the same with one more number of positions that a step sees."""
        known = length in (self.own, *self.others)
        return self if known else Lengths(self.symbol, self.own, (*self.others, length))

    def of(self, old: Poly, new: Poly, place: str) -> Poly | None:
        """Return the number of positions with which a size has become another one, None where it says nothing."""
        if self.symbol not in old.names():
            return None
        for length in (self.own, *self.others):
            if old.bind({self.symbol: length}) == new:
                return length
        raise UnsupportedError(
            f"{place}: an axis of size {old} has become {new}, expected one that follows from the positions"
        )

    def bound(self, value: Any, length: Poly | None = None) -> Any:
        """Return a fact with a number of positions put in, by default those that a step computes."""
        return bound(value, {self.symbol: self.own if length is None else length})

    def record(self, kind: K, length: Poly | None = None) -> K:
        """Return a record with a number of positions put into all of its facts, by default those of a step."""
        return bound_record(kind, {self.symbol: self.own if length is None else length})


def resized(op: Op, operands: Sequence[Any], lengths: Lengths) -> OpKind:
    """Return the record of an op for other operands, None for what is not made any more; a body is still the old one.

    `lengths` say what the number of positions has become. UnsupportedError if the op states a formula in a number of
    positions that it does not tell apart.
    """
    rule: _Rule = _RULES.get(type(op.kind), _bound)
    return rule(op, op.kind, operands, lengths)


def _axes(op: Op, operands: Sequence[Any], lengths: Lengths) -> list[list[Poly | None]]:
    """Return the number of positions that each axis of each operand speaks of."""
    return [
        []
        if new is None
        else [lengths.of(a, b, f"operand {i + 1} of {op.name!r}") for a, b in zip(old.sizes, new.sizes, strict=True)]
        for i, (old, new) in enumerate(zip(op.operands, operands, strict=True))
    ]


def _bound(op: Op, kind: K, operands: Sequence[Any], lengths: Lengths) -> K:
    """Put one number of positions into everything that is stated: the one that all operands speak of."""
    if all(lengths.symbol not in p.names() for p in _polys(kind.stated())):
        return kind
    found = {n for axes in _axes(op, operands, lengths) for n in axes if n is not None}
    if found - {lengths.own}:
        raise UnsupportedError(
            f"op {op.name!r} states its sizes or costs in {lengths.symbol}, and reads what is cached: expected an op "
            f"that tells new positions from all that are seen"
        )
    return lengths.record(kind)


def _contraction(op: Op, kind: Einsum, operands: Sequence[Any], lengths: Lengths) -> Einsum:
    """Take the sizes of axes from the operands; outputs of a sliding window follow the axis that it slides over."""
    if kind.causal and operands[0].sizes[-1] != lengths.own:
        return _after_history(kind, lengths)
    by_name, slid = _by_name(op, kind.pattern, operands, lengths)
    if kind.orders is not None and any(n not in (None, lengths.own) for n in by_name.values()):
        raise UnsupportedError(f"op {op.name!r} has no contraction order of its own, expected order= where it is made")
    extents = {n: lengths.bound(size, by_name.get(n)) for n, size in kind.extents.items()}
    return replace(lengths.record(kind), extents=extents, rooms=lengths.bound(kind.rooms, slid))


def _pooled(op: Op, kind: Pool, operands: Sequence[Any], lengths: Lengths) -> Pool:
    by_name, _ = _by_name(op, kind.pattern, operands, lengths)
    return replace(kind, extents={n: lengths.bound(size, by_name.get(n)) for n, size in kind.extents.items()})


def _by_name(
    op: Op, pattern: Pattern, operands: Sequence[Any], lengths: Lengths
) -> tuple[dict[str, Poly | None], Poly | None]:
    """Return the number of positions that each axis of a pattern speaks of, and that of the one that is slid over."""
    by_name: dict[str, Poly | None] = {}
    slid: Poly | None = None
    for axes, dims in zip(_axes(op, operands, lengths), pattern.operands, strict=True):
        for length, dim in zip(axes, dims, strict=True):
            for name in dim.names:
                if isinstance(dim, Affine) or length is not None or name not in by_name:
                    by_name[name] = length
            if isinstance(dim, Affine) and length is not None:
                slid = length
    return by_name, slid


def _after_history(kind: Einsum, lengths: Lengths) -> Einsum:
    """A causal convolution whose earlier inputs stand in front of the new ones: no padding, as many outputs as new."""
    pattern = kind.pattern
    *kept, last = pattern.operands[0]
    assert isinstance(last, Affine)
    slides = Affine(last.terms, 0)
    out = {n for n, _ in last.terms if n in pattern.result_names}
    extents = {n: lengths.own if n in out else lengths.bound(size) for n, size in kind.extents.items()}
    pattern = Pattern(((*kept, slides), *pattern.operands[1:]), pattern.result)
    return replace(lengths.record(kind), pattern=pattern, extents=extents, causal=False, rooms=())


def _rearranged(op: Op, kind: Rearrange, operands: Sequence[Any], lengths: Lengths) -> Rearrange:
    (x,), (old,), pattern = operands, op.operands, kind.pattern
    (axes,) = _axes(op, operands, lengths)
    if pattern is None:
        merged = x.sizes if kind.merged == old.sizes else _reshaped(op, kind, x, axes, lengths)
        return replace(kind, split=x.sizes, merged=merged)
    names = pattern.operand_names(0)
    sizes = dict(zip(names, kind.split, strict=True))
    for length, dim in zip(axes, pattern.operands[0], strict=True):
        sizes |= {n: lengths.bound(sizes[n], length) for n in dim.names}
    merged = tuple(prod((sizes[n] for n in a.names), start=ONE) for a in pattern.result if isinstance(a, Axes))
    return replace(kind, split=tuple(sizes[n] for n in names), merged=merged)


def _reshaped(op: Op, kind: Rearrange, x: Tensor, axes: Sequence[Poly | None], lengths: Lengths) -> tuple[Poly, ...]:
    """Return a shape of as many elements, where all axes speak of one number of positions."""
    found = {n for n in axes if n is not None} or {lengths.own}
    for length in found:
        merged = tuple(n.bind({lengths.symbol: length}) for n in kind.merged)
        if len(found) == 1 and numel(merged) == x.numel:
            return merged
    raise UnsupportedError(f"op {op.name!r} reshapes {x!r}, expected a rearrange that names its axes")


def _cut(op: Op, kind: Slice, operands: Sequence[Any], lengths: Lengths) -> Slice:
    """Bind what is said of one axis as that axis is."""
    length = _axes(op, operands, lengths)[0][kind.axis]
    made = lengths.record(kind, length)
    if length is not None or lengths.symbol not in kind.size.names():
        return made
    # rows of a table of positions: those of the new ones come after the others
    room = None if made.room is None else made.room - lengths.earlier
    return replace(made, start=made.start + lengths.earlier, room=room)


def _padded(op: Op, kind: Pad, operands: Sequence[Any], lengths: Lengths) -> Pad:
    """Bind what is said of one axis as that axis is."""
    return lengths.record(kind, _axes(op, operands, lengths)[0][kind.axis])


def _expanded(op: Op, kind: Expand, operands: Sequence[Any], lengths: Lengths) -> Expand:
    """Axes that the operand has keep its sizes, others follow the positions of a step."""
    (x,), (old,) = operands, op.operands
    sizes = tuple(
        x.sizes[at] if at is not None and size == old.sizes[at] else lengths.bound(size)
        for size, at in zip(kind.sizes, kind.kept, strict=True)
    )
    return replace(kind, sizes=sizes)


def _positions(op: Op, kind: Arange, operands: Sequence[Any], lengths: Lengths) -> Arange:
    if kind.context:
        return kind
    made = _bound(op, kind, operands, lengths)
    return made if kind.back else replace(made, start=kind.start + lengths.earlier)


def _as_it_is(op: Op, kind: OpKind, operands: Sequence[Any], lengths: Lengths) -> OpKind:
    """Sizes come from the operands alone."""
    return kind


def _looped(op: Op, kind: Repeat, operands: Sequence[Any], lengths: Lengths) -> Repeat:
    """As many iterations as what is read slice by slice has slices."""
    slices = kind.parts(op).slices
    read = (t for f, t in zip(kind.body.formals, operands, strict=True) if f in slices)
    return replace(kind, count=next(read).sizes[0] if slices else lengths.bound(kind.count))


#: What stands for the record of an op of some kind, with its new operands.
_Rule = Callable[[Op, Any, Sequence[Any], Lengths], OpKind]

#: Kinds whose facts speak of single axes; of others, one number of positions is put into all of them.
_RULES: dict[type[OpKind], _Rule] = {
    Einsum: _contraction,
    Pool: _pooled,
    Rearrange: _rearranged,
    Slice: _cut,
    Pad: _padded,
    Expand: _expanded,
    Arange: _positions,
    Repeat: _looped,
    Reduce: _as_it_is,
    Concat: _as_it_is,
    Keep: _as_it_is,
    Assign: _as_it_is,
    Dropout: _as_it_is,
    Gather: _as_it_is,
    Scatter: _as_it_is,
}
