"""Bytes that no schedule of a loop nest moves fewer of, through a cache of a given size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce as fold
from math import lcm, prod

import sympy

from ..algebra.extremum import Max
from ..algebra.polynomial import ONE, Poly, as_poly, poly, power
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.sizes import Bindings
from ..ops.blocks import Kernel
from ..ops.contraction import Einsum
from .chains import chains, of_chain
from .exponents import Exponents, exponents
from .nests import Array, Nest, contraction_nest, moved_once, products_inside

__all__ = ["largest", "least_traffic", "parts_of_traffic", "proved", "unavoidable"]


#: Roles of what no op of a graph makes.
_GIVEN = frozenset({"input", "param", "buffer"})


def proved(op: Op, cache: Poly) -> list[Poly]:
    """Return bytes that no schedule of an op goes below: what it touches, and what follows from reuse in a cache."""
    parts = [moved_once(op)]
    if isinstance(op.kind, Einsum):
        parts += _of_points(contraction_nest(op, op.kind), cache)
    if isinstance(op.kind, Kernel):
        parts += (p for nest in products_inside(op, op.kind) for p in _handed_on(nest, cache))
        parts += (p for chain in chains(op, stored=True) for p in of_chain(chain, cache))
    return parts


def least_traffic(op: Op, cache: Poly, values: Bindings) -> Poly:
    """Return the largest of these with sizes put in, for the cheapest way to do what an op does.

    A product of three tensors or more is made in pairs: what is known is that each of them is moved once.
    """
    return largest([p.bind(values) for p in parts_of_traffic(op, cache)])


def parts_of_traffic(op: Op, cache: Poly) -> list[Poly]:
    """Return what `least_traffic` is the largest of; of a cache that is not known what is moved once."""
    several = isinstance(op.kind, Einsum) and len(op.operands) > 2
    return list(dict.fromkeys([moved_once(op)] if several or not cache else proved(op, cache)))


def unavoidable(graph: Graph, cache: Poly) -> list[Poly]:
    """Return bytes that no run of a graph moves fewer of through a memory, whatever is fused: each an op's.

    Of a product whose operands are inputs, parameters or buffers of the graph each element has to be loaded, and
    is in the cache at no other time; what is handed on may be made and used up there. What an op that is repeated moves
    counts once, and ops are not added up, as they may share what is loaded.
    """
    out = []
    for op in graph.walk():
        if not all(t.storage.role in _GIVEN for t in op.operands):
            continue
        if isinstance(op.kind, Kernel):
            out += [p for nest in products_inside(op, op.kind) for p in _handed_on(nest, cache)]
            out += [p for chain in chains(op, stored=False) for p in of_chain(chain, cache)]
        elif isinstance(op.kind, Einsum) and len(op.operands) == 2:
            nest = contraction_nest(op, op.kind)
            if nest.is_plain:  # a convolution can be done with fewer products
                stored = any(t is op.results[0] for t in graph.outputs)
                out += _of_points(nest, cache) if stored else _handed_on(nest, cache)
    return list(dict.fromkeys(out))


def largest(parts: Sequence[Poly]) -> Poly:
    """Return the largest of some formulas; of numbers, roots among them, the one that it is."""
    if all(not p.names() for p in parts):
        return max(parts, key=lambda p: sympy.N(p.expr, 30))
    return poly(Max(*(p.expr for p in parts)))


def _power(base: Poly | Fraction, exponent: Fraction) -> Poly:
    return power(as_poly(base), as_poly(exponent))


def _sums(arrays: Sequence[Array], s: Sequence[Fraction]) -> dict[object, tuple[Fraction, Fraction]]:
    """Return exponent and bytes of an element of each storage: its elements may serve two arrays at once."""
    out: dict[object, tuple[Fraction, Fraction]] = {}
    for a, x in zip(arrays, s, strict=True):
        before, weight = out.get(a.storage, (Fraction(0), a.weight))
        out[a.storage] = before + x, min(a.weight, weight)
    return {k: (x, w) for k, (x, w) in out.items() if x}


def _constant(powers: Sequence[tuple[Fraction, Fraction]]) -> tuple[Fraction, int]:
    """Return a product of powers of numbers as a number, and the degree of the root to take of it."""
    degree = fold(lcm, (x.denominator for _, x in powers), 1)
    return prod((base ** int(x * degree) for base, x in powers), start=Fraction(1)), degree


def _shares(arrays: Sequence[Array], s: Sequence[Fraction]) -> list[tuple[Fraction, Fraction]]:
    """Return w/s of each storage with its exponent s."""
    return [(weight / x, x) for x, weight in _sums(arrays, s).values()]


def _of_points(nest: Nest, cache: Poly) -> list[Poly]:
    """Return what each pair of exponents says of a contraction: see `tiling`."""
    out = []
    for alike in exponents(tuple(nest.extents), tuple(a.access for a in nest.moved)):
        more = alike[0].total - 1
        found = (_constant([*_shares(nest.moved, e.arrays), (more, more)]) for e in alike)
        value, degree = max(found, key=lambda c: float(c[0]) ** (1 / c[1]))
        reuse = _root(value, degree) * _power(cache, -more)
        out.append(nest.points * _small(nest.extents, alike[0], -1) * reuse - cache / more)
    return out


def _root(value: Fraction, degree: int) -> Poly:
    return _power(value, Fraction(1, degree))


def _small(extents: Mapping[str, Poly], found: Exponents, sign: int) -> Poly:
    return prod((_power(extents[n], sign * t) for n, t in found.indices), start=ONE)


def _handed_on(nest: Nest, cache: Poly) -> Iterator[Poly]:
    """Yield bounds of a product of what a kernel reads, whose result is handed on inside.

    Its elements may be begun and used up without a load or a store. Cut the schedule into parts of M bytes loaded and
    stored. During a part 2*M bytes of the operands are in the cache at any time. An element of the result is either
    summed from its first term to its last within the part: each operand was there for all positions of the summed
    indices, so that F_j elements are as many as F_j/prod L_r rows of it, and the inequality over the other indices
    bounds these. Or it is there at the beginning or the end of the part, loaded or stored: at most 3*M bytes are, and
    the inequality over all indices bounds the points. With V <= parts * (complete + partial) the bytes of all parts are
    M*V/(complete + partial) - M at least (derived; for attention N**2*d**2/M times 1/(1 + sqrt(3)*d/sqrt(M)), in
    elements: the order that Saha and Ye 2024 prove).
    """
    *read, made = nest.arrays
    kept = made.names
    rows = tuple(tuple(r for r in a.access if {n for n, _ in r} <= kept) for a in read)
    whole = exponents(tuple(n for n in nest.extents if n in kept), rows)
    part = exponents(tuple(nest.extents), tuple(a.access for a in nest.arrays))
    for one in whole:
        for some in part:
            complete = _most(read, one[-1].arrays, cache) * _small(nest.extents, one[-1], 1)
            for name, n in nest.extents.items():
                if name not in kept:  # L_r positions for each row that an operand with this index has
                    shared = (x for a, x in zip(read, one[-1].arrays, strict=True) if name in a.names)
                    complete = complete * _power(n, 1 - sum(shared, start=Fraction(0)))
            *s, last = some[-1].arrays
            partial = _most(read, s, cache) * _small(nest.extents, some[-1], 1)
            partial = partial * _root(*_constant([(3 / made.weight, last)])) * _power(cache, last)
            yield cache * nest.points / (complete + partial) - cache


def _most(arrays: Sequence[Array], s: Sequence[Fraction], cache: Poly) -> Poly:
    """Return the largest prod F**s with 2*M bytes of F elements of each array."""
    total = sum(s, start=Fraction(0))
    shares = [(2 / (total * base), x) for base, x in _shares(arrays, s)]
    return _root(*_constant(shares)) * _power(cache, total)
