"""Attributes of ops whose operands have become longer or shorter along the positions of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...algebra.polynomial import ONE, ZERO, Poly, poly
from ...algebra.symbols import symbol
from ...errors import UnsupportedError
from ...graph.op import Op
from ...graph.sizes import _polys
from ...graph.strides import numel
from ...graph.tensor import Tensor
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.moves import Slice
from ..rewrite import bound_attributes

__all__ = ["Lengths", "resized"]


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
        """Return an attribute with a number of positions put in, by default those that a step computes."""
        return bound_attributes(value, {self.symbol: self.own if length is None else length})


#: What stands for the attributes of an op of some kind, with its new operands: None for what is not made any more.
_Rule = Callable[[Op, Sequence[Any], Lengths], Mapping[str, Any]]


def resized(op: Op, operands: Sequence[Any], lengths: Lengths) -> dict[str, Any]:
    """Return the attributes of an op for other operands, a body left out.

    Parameters
    ----------
    op : Op
        As declared.
    operands : sequence of Tensor
        What stands for its operands.
    lengths : Lengths
        What the number of positions has become.

    Returns
    -------
    dict
        Attributes with which the op can be made.

    Raises
    ------
    UnsupportedError
        If the op states a formula in a number of positions that it does not tell apart.
    """
    rule = _RULES.get(op.kind.name, _bound)
    return {k: v for k, v in rule(op, operands, lengths).items() if k != "body"}


def _axes(op: Op, operands: Sequence[Any], lengths: Lengths) -> list[list[Poly | None]]:
    """Return the number of positions that each axis of each operand speaks of."""
    return [
        []
        if new is None
        else [lengths.of(a, b, f"operand {i + 1} of {op.name!r}") for a, b in zip(old.sizes, new.sizes, strict=True)]
        for i, (old, new) in enumerate(zip(op.operands, operands, strict=True))
    ]


def _bound(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """Put one number of positions into everything that is stated: the one that all operands speak of."""
    stated = {k: v for k, v in op.attrs.items() if k != "body"}
    if all(lengths.symbol not in p.names() for p in _polys(stated)):
        return stated
    found = {n for axes in _axes(op, operands, lengths) for n in axes if n is not None}
    if found - {lengths.own}:
        raise UnsupportedError(
            f"op {op.name!r} states its sizes or costs in {lengths.symbol}, and reads what is cached: expected an op "
            f"that tells new positions from all that are seen"
        )
    return {k: lengths.bound(v) for k, v in stated.items()}


def _contraction(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """Take the sizes of axes from the operands; outputs of a sliding window follow the axis that it slides over."""
    if op.attrs.get("causal") and operands[0].sizes[-1] != lengths.own:
        return _after_history(op, operands, lengths)
    attrs, pattern = op.attrs, op.attrs["pattern"]
    by_name: dict[str, Poly | None] = {}
    slid: Poly | None = None
    for axes, dims in zip(_axes(op, operands, lengths), pattern.operands, strict=True):
        for length, dim in zip(axes, dims, strict=True):
            for name in dim.names:
                if isinstance(dim, Affine) or length is not None or name not in by_name:
                    by_name[name] = length
            if isinstance(dim, Affine) and length is not None:
                slid = length
    out = {k: lengths.bound(v) for k, v in attrs.items() if k not in ("extents", "rooms")}
    out["extents"] = {n: lengths.bound(size, by_name.get(n)) for n, size in attrs["extents"].items()}
    if "rooms" in attrs:
        out["rooms"] = lengths.bound(attrs["rooms"], slid)
    if "orders" in attrs and any(n not in (None, lengths.own) for n in by_name.values()):
        raise UnsupportedError(f"op {op.name!r} has no contraction order of its own, expected order= where it is made")
    return out


def _after_history(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """A causal convolution whose earlier inputs stand in front of the new ones: no padding, as many outputs as new."""
    pattern: Pattern = op.attrs["pattern"]
    *kept, last = pattern.operands[0]
    assert isinstance(last, Affine)
    slides = Affine(last.terms, 0)
    out = {n for n, _ in last.terms if n in pattern.result_names}
    extents = {n: lengths.own if n in out else lengths.bound(size) for n, size in op.attrs["extents"].items()}
    plain = {k: lengths.bound(v) for k, v in op.attrs.items() if k not in ("causal", "rooms", "pattern", "extents")}
    patterns = Pattern(((*kept, slides), *pattern.operands[1:]), pattern.result)
    return {**plain, "pattern": patterns, "extents": extents}


def _rearranged(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    attrs, (x,), (old,) = op.attrs, operands, op.operands
    (axes,) = _axes(op, operands, lengths)
    if "pattern" not in attrs:
        merged = x.sizes if attrs["merged"] == old.sizes else _reshaped(op, x, axes, lengths)
        return {**attrs, "split": x.sizes, "merged": merged}
    pattern: Pattern = attrs["pattern"]
    names = pattern.operand_names(0)
    sizes = dict(zip(names, attrs["split"], strict=True))
    for length, dim in zip(axes, pattern.operands[0], strict=True):
        sizes |= {n: lengths.bound(sizes[n], length) for n in dim.names}
    merged = tuple(prod((sizes[n] for n in a.names), start=ONE) for a in pattern.result if isinstance(a, Axes))
    return {**attrs, "split": tuple(sizes[n] for n in names), "merged": merged}


def _reshaped(op: Op, x: Tensor, axes: Sequence[Poly | None], lengths: Lengths) -> tuple[Poly, ...]:
    """Return a shape of as many elements, where all axes speak of one number of positions."""
    found = {n for n in axes if n is not None} or {lengths.own}
    for length in found:
        merged = tuple(n.bind({lengths.symbol: length}) for n in op.attrs["merged"])
        if len(found) == 1 and numel(merged) == x.numel:
            return merged
    raise UnsupportedError(f"op {op.name!r} reshapes {x!r}, expected a rearrange that names its axes")


def _along_axis(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """Bind what is said of one axis as that axis is."""
    length = _axes(op, operands, lengths)[0][op.attrs["axis"]]
    out = {k: lengths.bound(v, length) for k, v in op.attrs.items()}
    if length is None and isinstance(op.kind, Slice) and lengths.symbol in op.attrs["size"].names():
        # rows of a table of positions: those of the new ones come after the others
        out["start"] = out["start"] + lengths.earlier
        out["room"] = out["room"] - lengths.earlier
    return out


def _expanded(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """Axes that the operand has keep its sizes, others follow the positions of a step."""
    (x,), (old,), kept = operands, op.operands, op.attrs["kept"]
    sizes = tuple(
        x.sizes[at] if at is not None and size == old.sizes[at] else lengths.bound(size)
        for size, at in zip(op.attrs["sizes"], kept, strict=True)
    )
    return {**op.attrs, "sizes": sizes}


def _positions(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    if op.attrs.get("context"):
        return op.attrs
    start = op.attrs.get("start", ZERO) + lengths.earlier
    return {**_bound(op, operands, lengths), **({"start": start} if start else {})}


def _as_it_is(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """Sizes come from the operands alone."""
    return op.attrs


def _looped(op: Op, operands: Sequence[Any], lengths: Lengths) -> Mapping[str, Any]:
    """As many iterations as what is read slice by slice has slices."""
    carries, xs = op.attrs["carries"], op.attrs["xs"]
    count = operands[carries].sizes[0] if xs else lengths.bound(op.attrs["count"])
    return {**op.attrs, "count": count}


#: Kinds whose attributes speak of single axes; of others, one number of positions is put into all of them.
_RULES: dict[str, _Rule] = {
    "einsum": _contraction,
    "pool": _contraction,
    "rearrange": _rearranged,
    "slice": _along_axis,
    "pad": _along_axis,
    "expand": _expanded,
    "arange": _positions,
    "reduce": _as_it_is,
    "concat": _as_it_is,
    "keep": _as_it_is,
    "assign": _as_it_is,
    "dropout": _as_it_is,
    "gather": _as_it_is,
    "scatter": _as_it_is,
    "repeat": _looped,
}
