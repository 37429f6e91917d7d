"""Sizes of the axes of a pattern, from the shapes of the operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..errors import ShapeError
from ..graph import Graph
from ..pattern import Affine, Axes, Pattern
from ..polynomial import ONE, Poly
from ..tensor import Tensor

__all__ = ["extents_of"]


def extents_of(
    graph: Graph, pattern: Pattern, operands: Sequence[Tensor], given: Mapping[str, Poly] | None = None
) -> dict[str, Poly]:
    """Return the size of every axis of a pattern.

    Parameters
    ----------
    graph : Graph
        Whose assumptions say which sizes are equal.
    pattern : Pattern
        Names of the axes.
    operands : sequence of Tensor
        One for each operand of the pattern.
    given : mapping of str to Poly, optional
        Sizes that the shapes alone do not tell.

    Returns
    -------
    dict
        Axis name to size.

    Raises
    ------
    ShapeError
        If a name has two sizes, the number of axes differs, or a size cannot be told.
    """
    extents: dict[str, Poly] = dict(given or {})
    origin = dict.fromkeys(extents, "the given sizes")
    merged: list[tuple[Axes, Poly, str]] = []

    def bind(name: str, size: Poly, where: str) -> None:
        known = extents.setdefault(name, size)
        origin.setdefault(name, where)
        if not graph.same(known, size):
            raise ShapeError(
                f"axis {name!r} has size {known} in {origin[name]} and {size} in {where}, expected one size"
            )

    for i, t in enumerate(operands):
        dims = pattern.operands[i]
        if len(dims) != t.ndim:
            raise ShapeError(
                f"operand {i + 1} {t!r} has {t.ndim} axes, the pattern {' '.join(map(str, dims))!r} has {len(dims)}"
            )
        for dim, size in zip(dims, t.sizes, strict=True):
            where = f"operand {i + 1} {t!r}"
            if isinstance(dim, Affine):
                continue
            if len(dim.names) == 1:
                bind(dim.names[0], size, where)
            elif not dim.names and size != ONE:
                raise ShapeError(f"{where}: an axis of size {size} where the pattern has 1")
            else:
                merged.append((dim, size, where))
    for dim, size, where in merged:
        _split(graph, dim, size, where, extents, bind)
    return extents


def _split(graph: Graph, dim: Axes, size: Poly, where: str, extents: dict[str, Poly], bind: Any) -> None:
    unknown = [n for n in dim.names if n not in extents]
    known = prod((extents[n] for n in dim.names if n in extents), start=ONE)
    if len(unknown) > 1:
        raise ShapeError(
            f"{where}: sizes of {' and '.join(unknown)} in {dim} are not known, expected all but one"
        )
    if unknown:
        quotient = size / known
        value = quotient.constant
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ShapeError(
                f"{where}: an axis of size {size} does not split into {dim} with {unknown[0]} = {size}/{known}"
            )
        bind(unknown[0], quotient, where)
    elif not graph.same(known, size):
        raise ShapeError(f"{where}: an axis of size {size}, but {dim} makes {known}")
