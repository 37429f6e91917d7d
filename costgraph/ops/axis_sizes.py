"""Pattern axis sizes: inference from operand shapes, and checks for patterns with windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from ..algebra.polynomial import ONE, Poly, as_poly
from ..algebra.symbols import shown
from ..errors import ShapeError
from ..ir.graph import Graph, Tensor, need
from ..ir.strides import Sizes
from ..notation.pattern import Affine, Axes, Pattern

__all__ = [
    "extents_of",
    "need_indexed",
    "need_plain",
]


# -- inference ---------------------------------------------------------------------------------------------------------


def extents_of(
    graph: Graph, pattern: Pattern, operands: Sequence[Tensor], given: Mapping[str, Poly] | None = None
) -> dict[str, Poly]:
    """Return the size of every pattern axis, up to the graph's assumptions.

    `given` are sizes that shapes do not determine. Raise ShapeError if sizes of a name disagree, the number of axes
    differs, or a size cannot be inferred.
    """
    extents: dict[str, Poly] = dict(given or {})
    origin: dict[str, int | None] = dict.fromkeys(extents)
    merged: list[tuple[Axes, Poly, int]] = []

    def operand_text(i: int | None) -> str:
        return "the given sizes" if i is None else f"operand {i + 1} {operands[i]!r}"

    def bind(name: str, size: Poly, i: int) -> None:
        bound_size = extents.setdefault(name, size)
        origin.setdefault(name, i)
        if not graph.same(bound_size, size):
            raise ShapeError(
                f"axis {name!r} has size {bound_size} in {operand_text(origin[name])} and {size} in "
                f"{operand_text(i)}, expected one size"
            )

    for i, t in enumerate(operands):
        dims = pattern.operands[i]
        if len(dims) != t.ndim:
            raise ShapeError(
                f"operand {i + 1} {t!r} has {t.ndim} axes, the pattern {' '.join(map(str, dims))!r} has {len(dims)}"
            )
        for dim, size in zip(dims, t.sizes, strict=True):
            if isinstance(dim, Affine):
                continue
            if len(dim.names) == 1:
                bind(dim.names[0], size, i)
            elif not dim.names and size != ONE:
                raise ShapeError(f"{operand_text(i)}: an axis of size {size} where the pattern has 1")
            else:
                merged.append((dim, size, i))
    for dim, size, i in merged:
        try:
            _split(graph, dim, size, extents, partial(bind, i=i))
        except _UnfitError as error:
            raise ShapeError(f"{operand_text(i)}: {error}") from None
    return extents


class _UnfitError(Exception):
    """Mismatch on one axis; the caller adds the operand to the message."""


def _split(graph: Graph, dim: Axes, size: Poly, extents: dict[str, Poly], bind: Callable[[str, Poly], None]) -> None:
    unknown = [n for n in dim.names if n not in extents]
    product = prod((extents[n] for n in dim.names if n in extents), start=ONE)
    if len(unknown) > 1:
        raise _UnfitError(f"sizes of {' and '.join(unknown)} in {dim} are unknown, expected at most one unknown size")
    if unknown:
        quotient = size / product
        value = quotient.constant
        if value is not None and (not isinstance(value, int) or value < 1):
            raise _UnfitError(f"an axis of size {size} does not split into {dim} with {unknown[0]} = {size}/{product}")
        bind(unknown[0], quotient)
    elif not graph.same(product, size):
        raise _UnfitError(f"an axis of size {size}, but the sizes in {dim} multiply to {product}")


# -- checks ------------------------------------------------------------------------------------------------------------


def need_indexed(
    operands: Sequence[Tensor],
    pattern: Pattern,
    extents: Mapping[str, Poly],
    sizes: Sizes | None = None,
    rooms: Sequence[Poly] = (),
) -> None:
    """Check a contraction or pooling pattern and its extents against the operand shapes.

    `sizes` is the shape of the result if it is given, `rooms` the positions after the last window of outputs with given
    sizes. Raise ShapeError on a mismatch.
    """
    need(
        [len(o) for o in pattern.operands] == [t.ndim for t in operands], f"pattern {shown(str(pattern))}: its operands"
    )
    names = {n for o in pattern.operands for a in o for n in a.names}
    need(set(extents) == names | set(pattern.result_names), f"extents of {shown(', '.join(extents))}")
    equal = operands[0].graph.same
    places = [
        (dim, size, f"operand {i + 1} {t!r}")
        for i, t in enumerate(operands)
        for dim, size in zip(pattern.operands[i], t.sizes, strict=True)
    ]
    if sizes is not None:
        need(len(sizes) == len(pattern.result), f"sizes of the result of pattern {shown(str(pattern))}")
        places += [(dim, n, "the result") for dim, n in zip(pattern.result, sizes, strict=True)]
    remainders = set()
    for dim, size, location in places:
        if isinstance(dim, Axes):
            need(equal(prod((extents[n] for n in dim.names), start=ONE), size), f"axis {dim} of {location}")
            continue
        last_position = sum((step * (extents[n] - 1) for n, step in dim.terms), start=as_poly(0))
        room = size - 1 - last_position - (2 if dim.offset < 0 else 1) * dim.offset
        remainders.add(room)
        out_of_bounds = room.constant is not None and room.constant < 0
        need(not out_of_bounds, f"index {dim} of {location} reaches beyond its axis")
    need(remainders.issuperset(rooms), "positions after the last window")


def need_plain(pattern: Pattern) -> None:
    """Raise ShapeError if the result has indices or diagonals, which need a contraction with given sizes."""
    plain = all(isinstance(a, Axes) for a in pattern.result) and len(set(pattern.result_names)) == len(
        pattern.result_names
    )
    need(plain, f"the result of pattern {shown(str(pattern))}")
