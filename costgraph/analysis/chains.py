"""What a kernel makes and uses up inside, position by position, and the rows outside that each position needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, Poly, as_poly, power, total
from ..graph.op import Op
from ..graph.tensor import Tensor
from ..ops.blocks import Kernel
from ..ops.contraction import Einsum
from ..ops.pointwise import Pointwise
from ..ops.stochastic import Dropout
from .exponents import Access, exponents
from .nests import Body, contraction_nest

__all__ = ["chains", "of_chain"]

_Indices = frozenset[str]


@dataclass(frozen=True)
class _Chain:
    """Tensors of the same indices that follow from each other elementwise, such as scores and probabilities."""

    extents: Mapping[str, Poly]
    """Positions of their indices."""
    entries: Poly
    """How many positions there are: what a mask hides is left out."""
    weight: Fraction
    """Bytes of an element, of the narrowest."""
    rows: Mapping[_Indices, Poly]
    """By some of the indices: bytes of what products with the tensors read and make for each position of these."""


def chains(op: Op, *, stored: bool) -> Iterator[_Chain]:
    """Yield the chains of a kernel, those of which it is known what their products have outside.

    With `stored` that is also what the kernel hands out, where products make it.
    """
    if not isinstance(op.kind, Kernel):
        return
    body = Body(op, all_known=False)
    if body.joined(operands=False) is not None:
        return
    body.name()
    outside = _outside(body, op, op.kind.changed, stored=stored)
    for tensors, names in _components(body):
        found = _chain(body, tensors, names, outside)
        if found is not None:
            yield found


def _is_elementwise(op: Op) -> bool:
    return isinstance(op.kind, Pointwise | Dropout)


def _outside(body: Body, op: Op, changed: Iterable[int], *, stored: bool) -> dict[Tensor, Fraction]:
    """Return the bytes of an element of what is loaded and, with `stored`, of what follows by position from sums.

    A sum is begun in the cache and stored as what is made of it, of fewer bytes maybe.
    """
    over = {body.source_of(op.operands[i]) for i in changed}
    out = {t: Fraction(t.dtype.bits, 8) for t in body.outside - over}
    if stored:
        made = {t: Fraction(t.dtype.bits, 8) for t in body.outputs}
        for use, read, written in reversed(body.uses):
            for t, axes in written if _is_elementwise(use) else ():
                same = [s for s, its in read if t in made and _indices(body, its) == _indices(body, axes)]
                made |= {s: min(made[t], Fraction(s.dtype.bits, 8)) for s in same}
        out |= {t: size for t, size in made.items() if t not in body.outside}
    return out


def _indices(body: Body, axes: Iterable[str]) -> _Indices:
    return frozenset(body.index(a) for a in axes if a)


def _components(body: Body) -> Iterator[tuple[set[Tensor], _Indices]]:
    """Yield tensors that stay inside, those together of which one follows from another position by position."""
    inside = {t: _indices(body, axes) for _, read, written in body.uses for t, axes in (*read, *written)}
    inside = {t: names for t, names in inside.items() if t not in body.outside | body.outputs and len(names) > 1}
    together = {t: {t} for t in inside}
    for op, read, written in body.uses:
        here = [t for t, _ in (*read, *written) if t in inside] if _is_elementwise(op) else []
        for names in {inside[t] for t in here}:
            joined = set[Tensor]().union(*(together[t] for t in here if inside[t] == names))
            together |= dict.fromkeys(joined, joined)
    for tensors in {id(found): found for found in together.values()}.values():
        yield tensors, inside[next(iter(tensors))]


def _chain(body: Body, tensors: set[Tensor], names: _Indices, outside: Mapping[Tensor, Fraction]) -> _Chain | None:
    sizes = {body.index(a): n for a, n in body.sizes.items()}
    entries: set[Poly] = set()
    rows: dict[_Indices, dict[object, Poly]] = {}
    for product, read, written in body.uses:
        uses = (*read, *written)
        if not isinstance(product.kind, Einsum) or tensors.isdisjoint(t for t, _ in uses):
            continue
        nest = contraction_nest(product, product.kind)
        if not names <= set().union(*(_indices(body, axes) for _, axes in uses)):
            return None  # it has no index for each axis
        summed = set().union(*(_indices(body, axes) for _, axes in uses)) - names
        entries.add(nest.points / prod((sizes[n] for n in summed), start=ONE))
        for t, axes in uses:
            # an expanded axis repeats the same elements
            own = _indices(body, (a for a, n in zip(axes, t.strides, strict=True) if n or t not in body.outside))
            if t in outside and t not in tensors and own & names:
                row = as_poly(outside[t]) * prod((sizes[n] for n in own - names), start=ONE)
                rows.setdefault(own & names, {}).setdefault(t.region()[0], row)
    storages = [key for found in rows.values() for key in found]
    if len(entries) != 1 or len(set(storages)) < len(storages):  # rows of one storage in two places may be the same
        return None
    weight = min(Fraction(t.dtype.bits, 8) for t in tensors)
    return _Chain({n: sizes[n] for n in names}, entries.pop(), weight, {k: total(v.values()) for k, v in rows.items()})


def of_chain(chain: _Chain, cache: Poly) -> Iterator[Poly]:
    """Yield bytes that no schedule moves fewer of, of M bytes of cache.

    Cut a schedule into parts of T bytes each, loaded or results begun, which are stored later: M + T bytes of elements
    are in the cache at any time during a part. An entry of a chain is done within a part, with all of its terms in
    all products: then every row that it needs is there, and the inequality of `tiling` over the indices of the chain
    bounds these entries by C*(M + T - x)**S, with x bytes in use for others. Or a part finds it begun, in the cache or
    to be loaded, x/w entries at most, with w bytes of an element. The sum is convex in x, so that no part has more
    entries than the larger of C*(M + T)**S and (M + T)/w. With V entries T*V divided by that, less T, is a bound for
    each T: yielded for T = M/(S - 1), the best where rows decide, and for the T at which both are equal, which is the
    best where the cache is smaller (derived; attention: 4*N**2*d**2/M elements from M = 8*d**2 on, what the tile of
    FlashAttention moves there, where Saha and Ye 2024 prove the order).
    """
    names = sorted(chain.extents)
    indices = sorted(chain.rows, key=sorted)
    accesses: tuple[Access, ...] = tuple(tuple(((n, 1),) for n in sorted(row)) for row in indices)
    entries = chain.entries
    for alike in exponents(tuple(names), accesses):
        degree = alike[-1].total
        most = prod((power(chain.extents[n], as_poly(t)) for n, t in alike[-1].indices), start=ONE)
        for row, s in zip(indices, alike[-1].arrays, strict=True):
            if s:
                most *= power(as_poly(s / degree) / chain.rows[row], as_poly(s))
        more = degree - 1
        part = cache / more
        done = most * power(part * degree, as_poly(degree))
        yield smaller(part * entries / done, entries * (chain.weight / degree)) - part
        equal = power(most * chain.weight, as_poly(-1 / more))
        yield at_least_zero(equal - cache) * (entries * chain.weight / equal - 1)
