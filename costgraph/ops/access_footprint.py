"""Access footprints (elements reached by index points), and propagation of attention domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..algebra.dominance import lower
from ..algebra.extremum import Max
from ..algebra.polynomial import ONE, Poly, poly
from ..errors import ShapeError
from ..ir.graph import Tensor
from ..ir.strides import Sizes, numel

if TYPE_CHECKING:
    from ..ir.graph import Domain

__all__ = [
    "alike",
    "at_least",
    "carried",
    "carried_parts",
    "larger",
    "left_over",
    "points",
    "reached",
    "regrouped",
    "shared",
]

if TYPE_CHECKING:
    Restriction = tuple[Domain, int, int]


def at_least(a: Poly, b: Poly) -> bool:
    """Return whether `a >= b` holds for all sizes, for nonnegative amounts."""
    if a == b or not b:  # amounts are nonnegative
        return True
    lower_bound = lower(a - b)
    return lower_bound is not None and lower_bound >= 0


def larger(a: Poly, b: Poly) -> Poly:
    """Return the larger amount, as a Max if it depends on sizes."""
    if not a:
        return b
    return a if at_least(a, b) else b if at_least(b, a) else poly(Max(a.expr, b.expr))


def points(t: Tensor, *, stored: bool = False) -> Poly:
    """Count a tensor's index points within its domain; `stored` counts expanded axes once."""
    return reached(t, t.sizes, t.domain, [bool(s) or not stored for s in t.strides])


def reached(t: Tensor, sizes: Sizes, restriction: Restriction | None, runs: Sequence[bool]) -> Poly:
    """Count the positions in a tensor that a shape's index points reach by broadcasting.

    The shape has at least as many axes as the tensor, and `restriction` is its domain. `runs` tells which axes of the
    tensor count; positions along the others coincide.
    """
    # an axis of size 1 is broadcast: all positions of the longer axis reach the same element
    moving = {i + len(sizes) - t.ndim: n for i, n in enumerate(t.sizes) if runs[i] and n != ONE}
    if restriction is None:
        return numel(list(moving.values()))
    domain, query, key = restriction
    unrestricted = numel([n for axis, n in moving.items() if axis not in (query, key)])
    reaches = {"query": query in moving, "key": key in moving}
    return unrestricted * domain.reached(sizes[query], sizes[key], t.graph.root.relations, **reaches)


# -- domain propagation ------------------------------------------------------------------------------------------


def shared(operands: Sequence[Tensor], sizes: Sizes) -> Restriction | None:
    """Return an elementwise result's domain: the operands', since only those points are computed.

    Raise ShapeError if operands have different domains, or a domain axis is broadcast.
    """
    restriction = None
    for t in operands:
        if t.domain is None:
            continue
        domain, *axes = t.domain
        query, key = (i + len(sizes) - t.ndim for i in axes)
        if any(t.sizes[i] == ONE != sizes[axis] for i, axis in zip(axes, (query, key), strict=True)):
            raise ShapeError(
                f"{t!r} is restricted to a domain, expected its axes {axes[0]} and {axes[1]} not to be broadcast"
            )
        if restriction not in (None, (domain, query, key)):
            raise ShapeError("operands restricted to two different domains, expected one")
        restriction = domain, query, key
    return restriction


def alike(operands: Sequence[Tensor]) -> Restriction | None:
    """Return the operands' common domain.

    Raise ShapeError if their domains differ, or only some have one.
    """
    first = operands[0]
    for t in operands[1:]:
        if t.domain != first.domain:
            raise ShapeError(f"{first!r} and {t!r} are restricted to different domains, expected the same")
    return first.domain


def carried(x: Tensor, places: Sequence[int | None]) -> Restriction | None:
    """Return the domain after axes have moved; `places` has the old axis of each new one.

    Raise ShapeError if a domain axis is lost or changed.
    """
    if x.domain is None:
        return None
    domain, query, key = x.domain
    if query not in places or key not in places:
        raise ShapeError(f"{x!r} is restricted to a domain, expected its axes {query} and {key} unchanged")
    return domain, places.index(query), places.index(key)


def carried_parts(
    x: Tensor, split: int | None, gathered: int | None, ranks: tuple[str, Poly]
) -> tuple[Domain, int, int] | None:
    """Return a local shard's domain, after one axis is split along a mesh axis and another is gathered.

    Raise ShapeError if a domain axis is no longer in consecutive blocks.
    """
    if x.domain is None:
        return None
    domain, query, key = x.domain
    innermost = gathered != query or domain.ranks[-1:] == (ranks,)
    if key in (split, gathered) or not innermost:
        raise ShapeError(f"{x!r} is restricted to a domain, expected its axes {query} and {key} unchanged")
    query_ranks = domain.ranks[:-1] if gathered == query else domain.ranks
    return replace(domain, ranks=(*query_ranks, ranks) if split == query else query_ranks), query, key


def left_over(x: Tensor, places: Sequence[int | None]) -> Restriction | None:
    """Return the operand's domain after a reduction if both axes remain, else None."""
    if x.domain is None or not {*x.domain[1:]} <= set(places):
        return None
    return carried(x, places)


def regrouped(sizes: Sizes, axes: Sequence[int], new_sizes: Sizes) -> list[int | None]:
    """Return the index of each axis in another shape with equal element count, or None.

    Element counts cannot tell several size-1 axes apart; they are matched in order.
    """

    def alike(shape: Sizes, size: Poly, trailing: Poly) -> list[int]:
        return [i for i in reversed(range(len(shape))) if shape[i] == size and numel(shape[i + 1 :]) == trailing]

    new_axes: list[int | None] = []
    for axis in axes:
        size, trailing = sizes[axis], numel(sizes[axis + 1 :])
        old_candidates, new_candidates = (alike(shape, size, trailing) for shape in (sizes, new_sizes))
        unused = [i for i in new_candidates if i not in new_axes]
        nth = old_candidates.index(axis)
        new_axes.append(
            new_candidates[nth]
            if new_candidates[nth:] and new_candidates[nth] in unused
            else unused[-1]
            if unused
            else None
        )
    return new_axes
