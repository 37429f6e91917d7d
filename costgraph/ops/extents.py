"""Sizes of the axes of a pattern, from the shapes of the operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from ..algebra.polynomial import ONE, Poly
from ..errors import ShapeError
from ..graph.graph import Graph
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes, Pattern

__all__ = ["extents_of"]


def extents_of(
    graph: Graph, pattern: Pattern, operands: Sequence[Tensor], given: Mapping[str, Poly] | None = None
) -> dict[str, Poly]:
    """Return the size of every axis of a pattern; the graph's assumptions say which sizes are equal.

    `given` are sizes that the shapes alone do not tell. ShapeError if a name has two sizes, the number of axes differs,
    or a size cannot be told.
    """
    extents: dict[str, Poly] = dict(given or {})
    origin: dict[str, int | None] = dict.fromkeys(extents)
    merged: list[tuple[Axes, Poly, int]] = []

    def place(i: int | None) -> str:
        return "the given sizes" if i is None else f"operand {i + 1} {operands[i]!r}"

    def bind(name: str, size: Poly, i: int) -> None:
        known = extents.setdefault(name, size)
        origin.setdefault(name, i)
        if not graph.same(known, size):
            raise ShapeError(
                f"axis {name!r} has size {known} in {place(origin[name])} and {size} in {place(i)}, expected one size"
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
                raise ShapeError(f"{place(i)}: an axis of size {size} where the pattern has 1")
            else:
                merged.append((dim, size, i))
    for dim, size, i in merged:
        try:
            _split(graph, dim, size, extents, partial(bind, i=i))
        except _UnfitError as error:
            raise ShapeError(f"{place(i)}: {error}") from None
    return extents


class _UnfitError(Exception):
    """What does not fit of one axis: its operand is named where it is known."""


def _split(graph: Graph, dim: Axes, size: Poly, extents: dict[str, Poly], bind: Callable[[str, Poly], None]) -> None:
    unknown = [n for n in dim.names if n not in extents]
    known = prod((extents[n] for n in dim.names if n in extents), start=ONE)
    if len(unknown) > 1:
        raise _UnfitError(f"sizes of {' and '.join(unknown)} in {dim} are not known, expected all but one")
    if unknown:
        quotient = size / known
        value = quotient.constant
        if value is not None and (not isinstance(value, int) or value < 1):
            raise _UnfitError(f"an axis of size {size} does not split into {dim} with {unknown[0]} = {size}/{known}")
        bind(unknown[0], quotient)
    elif not graph.same(known, size):
        raise _UnfitError(f"an axis of size {size}, but {dim} makes {known}")
