"""Gradient of a contraction: a contraction of the result's gradient with the other operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...algebra.polynomial import ONE, Poly
from ...graph.tensor import Tensor
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.contraction import Einsum
from ...ops.einsum import contract
from ...ops.layout import permute, rearrange
from ...ops.spectra import view_as
from .common import also_saved, expanded, order_of_parameter
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES

_Dims = tuple[Axes | Affine, ...]


@vjp(Einsum)
def _einsum(pull: Pull[Einsum]) -> Sequence[Tensor | None]:
    (g,) = pull.grads
    assert g is not None
    if any(isinstance(a, Affine) for dims in pull.kind.pattern.operands for a in dims):
        also_saved(pull, *pull.op.operands)  # of a convolution, whichever gradient is wanted
    wanted = [i for i in pull.kind.order or range(len(pull.needs)) if pull.needs[i]]
    made = {i: _of_operand(pull, g, i) for i in wanted}
    return [made.get(i) for i in range(len(pull.needs))]


def _of_operand(pull: Pull[Einsum], g: Tensor, i: int) -> Tensor:
    """Contract the gradient with the other operands; an axis that no other one has is repeated, which is free."""
    op, kind, x = pull.op, pull.kind, pull.op.operands[i]
    pattern, extents = kind.pattern, kind.extents
    others = [j for j in range(len(op.operands)) if j != i]
    dims = (pattern.result, *(pattern.operands[j] for j in others))
    inside = {n for d in dims for a in d for n in a.names}
    target = pattern.operands[i]
    lone = _lone(target, inside, kind.domain)
    result, sizes = _without(target, lone, x, extents)
    order = None if lone else order_of_parameter(x)
    if order is not None:
        result, sizes = tuple(result[i] for i in order), tuple(sizes[i] for i in order)
    used = {n: extents[n] for n in extents if n in inside or n in {m for a in result for m in a.names}}
    back = Einsum(
        pattern=Pattern(dims, result),
        extents=used,
        domain=kind.domain,
        dtype=x.dtype,
        sizes=None if _plain(result, inside) else sizes,
        rooms=kind.rooms,
    )
    made = contract([g, *(_conjugate(pull.saved(op.operands[j])) for j in others)], back)
    if order is not None:
        return permute(made, [order.index(i) for i in range(x.ndim)])
    return _with(made, result, target, lone, extents) if lone else made


def _conjugate(t: Tensor) -> Tensor:
    return view_as(t, "conjugate") if t.dtype.kind == "complex" else t


def _lone(target: _Dims, inside: set[str], restriction: tuple[object, str, str] | None) -> set[str]:
    """Return the axes of an operand along which its gradient is the same everywhere."""
    names = [n for a in target for n in a.names]
    kept = inside.union(n for a in target if isinstance(a, Affine) for n in a.names)
    kept |= set() if restriction is None else set(restriction[1:])
    return {n for n in names if n not in kept and names.count(n) == 1}


def _plain(result: _Dims, inside: set[str]) -> bool:
    names = [n for a in result for n in a.names]
    return all(isinstance(a, Axes) for a in result) and len(set(names)) == len(names) and inside.issuperset(names)


def _without(target: _Dims, lone: set[str], x: Tensor, extents: Mapping[str, Poly]) -> tuple[_Dims, tuple[Poly, ...]]:
    """Return the dimensions of an operand without some of its axes, and their sizes."""
    dims: list[Axes | Affine] = []
    sizes: list[Poly] = []
    for a, size in zip(target, x.sizes, strict=True):
        if lone.intersection(a.names):
            left = [n for n in a.names if n not in lone]
            dims += [Axes((n,)) for n in left]
            sizes += [extents[n] for n in left]
        else:
            dims.append(a)
            sizes.append(size)
    return tuple(dims), tuple(sizes)


def _with(made: Tensor, result: _Dims, target: _Dims, lone: set[str], extents: Mapping[str, Poly]) -> Tensor:
    """Repeat along the axes that were left out, and merge those that stand in one dimension."""
    kept: list[int | None] = []
    sizes: list[Poly] = []
    left: list[str] = []
    right: list[str] = []
    at = 0
    for a in target:
        parts = [Axes((n,)) for n in a.names] if lone.intersection(a.names) else [a]
        for part in parts:
            new = bool(lone.intersection(part.names))
            kept.append(None if new else at)
            sizes.append(prod((extents[n] for n in part.names), start=ONE) if new else made.sizes[at])
            at += not new
        names = [f"n{len(left) + k}" for k in range(len(parts))]
        left += names
        right.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
    out = expanded(made, tuple(sizes), kept)
    return out if left == right else rearrange(out, f"{' '.join(left)} -> {' '.join(right)}")
