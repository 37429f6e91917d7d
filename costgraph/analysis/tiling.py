"""Traffic through a fast memory: the least of any schedule, and the tile that comes near it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import ONE, ZERO, Poly, as_poly, poly, power
from ..algebra.symbols import shown
from ..bind.evaluate import Formula, answer, bound_answer
from ..bind.evaluate import compile as compiled
from ..errors import BindingError, CostGraphError, GraphError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.sizes import Bindings, bindings, known_names
from ..hardware.units import UNITS, quantity
from .bounds import largest, proved
from .nests import nest_of
from .tiles import BLOCK, WHOLE, Loops, Schedule, block_sizes, chosen, coefficients, degree, grown

__all__ = ["Tile", "Tiling", "cache_bytes", "tiling"]

#: Points at which schedules are held against each other where sizes are open.
_POINTS = 200
_MOST_TILES = 6
_LARGEST = 10**12
# Schedules of which the blocks are then made to fit.
_STARTS = 3
# A tile is left out where another one moves at most so much more at the same point.
_NEAR = 1.1


def cache_bytes(place: str, graph: Graph, cache: object) -> Poly:
    """Return the bytes of a fast memory: a number, a text such as "50 MB", or a formula of no dimensions of a graph."""
    value: object = cache
    if isinstance(cache, str):
        number, unit = cache.strip(), ""
        while number and not number[-1].isdigit():
            number, unit = number[:-1], number[-1] + unit
        try:
            value = quantity(Fraction(number.strip()), unit.strip()).value if UNITS[unit.strip()][1] == "B" else None
        except (ValueError, KeyError, ZeroDivisionError, CostGraphError):
            value = None
    try:
        out = ZERO if value is None or isinstance(value, bool) else poly(value)
    except CostGraphError:
        out = ZERO
    constant = out.constant
    if constant is not None and (constant <= 0 or Fraction(constant).denominator != 1):
        raise BindingError(
            f'{place}: cache {shown(cache)}, expected a positive number of bytes, a text such as "50 MB" or a formula'
        )
    mixed = sorted(out.names() & known_names(graph.root))
    if mixed:  # its default would be taken for bytes
        raise BindingError(
            f"{place}: cache {shown(cache)}, but {mixed[0]} is a dimension of graph {graph.root.name!r}, expected "
            "another name"
        )
    return out


# -- the tile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """One tiled schedule: loops over blocks, the outermost first."""

    order: tuple[str, ...]
    """The loops by their indices; `(i j)` are indices that stand in the same arrays, run through as one."""
    blocks: Mapping[str, Formula]
    """Length of a block along each of them: a last block may be shorter, and a block is never longer than its axis."""
    footprint: Formula
    """Bytes that are in the cache together: a block of every array."""
    traffic: Formula
    """Bytes loaded and stored."""
    least: Formula
    """Bytes of a cache from which on the tile fits."""


@dataclass(frozen=True)
class Tiling:
    """Least traffic of an op through a cache, and schedules that come near it."""

    name: str
    """Of the op."""
    cache: Formula
    """Bytes of the cache."""
    bound: Formula
    """Bytes that every schedule moves, at least."""
    tiles: tuple[Tile, ...]
    """Schedules that can be carried out; the first is the best where all sizes are bound, and else one that fits into
    the smallest cache of those."""

    @property
    def traffic(self) -> Formula:
        """Bytes that the first tile moves."""
        return self.tiles[0].traffic

    @property
    def blocks(self) -> Mapping[str, Formula]:
        """Block lengths of the first tile."""
        return self.tiles[0].blocks

    @property
    def order(self) -> tuple[str, ...]:
        """Loops of the first tile, outermost first."""
        return self.tiles[0].order

    @property
    def ratio(self) -> Formula:
        """What the first tile moves for each byte of the bound: 1 is the best that there is."""
        return answer(as_expr(self.traffic) / as_expr(self.bound))

    def __str__(self) -> str:
        lines = [f"{self.name} through a cache of {self.cache} B", f"  no schedule moves less than {self.bound} B"]
        for tile in self.tiles:
            loops = ", ".join(f"{axis} by {tile.blocks[axis]}" for axis in tile.order)
            lines += [f"  {loops}", f"    moves {tile.traffic} B where the cache has {tile.least} B or more"]
        return "\n".join(lines)


def tiling(op: Op, /, *, cache: object, **dims: int) -> Tiling:
    """Return the least traffic of an op through a fast memory, and the tile that comes near it.

    Parameters
    ----------
    op : Op
        A contraction, a reduction, an elementwise function, or a kernel of these such as attention: one of `graph.ops`.
    cache : int, str or sympy.Expr
        Bytes of the fast memory: a number, a text such as `"50 MB"`, or a formula of names that the graph has not.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Tiling
        `.bound`, bytes that every schedule moves at least; `.tiles`, schedules with blocks, order of loops, footprint
        and traffic: one where everything is bound, else a few of which each is the best somewhere; `.ratio` of the
        two.

    Raises
    ------
    BindingError, GraphError, UnsupportedError
        If a size cannot be bound, the cache is no positive number of bytes or holds less than one element of each
        array, what is asked is no op, or its index points are not known.

    Notes
    -----
    The bound, for a contraction, is the larger of what it touches, each element moved once, and for each pair (s, t)
    of exponents (`costgraph.analysis.exponents`), with S the sum of s and w_j the bytes of an element of array j,

        V * prod L_i**-t_i * prod (w_j/s_j)**s_j * (S - 1)**(S - 1) * M**(1 - S) - M/(S - 1).

    Cut a schedule into parts, each of T bytes loaded or results begun. A result that is begun is stored later, so that
    no part has more of these than loads and stores. During a part at most M + T bytes of elements are in the cache at
    any time, those of array j F_j elements, and at most prod F_j**s_j * prod L_i**t_i of the V index points are
    computed with them. With F_j = s_j*(M + T)/(S*w_j), the most that this can be, and T = M/(S - 1), there are so many
    parts that their bytes add up to the formula (derived; for a product of matrices 2*m*n*k/sqrt(M) - 2*M elements, the
    constant of Smith, Lowery, Langou and van de Geijn 2019; the argument is that of Hong and Kung 1981, Irony, Toledo
    and Tiskin 2004, and Christ et al. 2013; small dimensions as in Dinh and Demmel 2020). It holds for schedules that
    compute every index point, in any order, none twice: not for Strassen's, nor where a product of three tensors is
    made in pairs. Of a kernel the products whose operands it reads are bounded, those that it hands on inside too
    (derived, in `costgraph.analysis.bounds`), and what follows elementwise from one product to the next, such as
    scores: an element that is made and used up needs its rows of all that is outside (derived, in
    `costgraph.analysis.chains`; for attention 4*N**2*d**2/M elements from M = 8*d**2 on, of the order of Saha and Ye
    2024).

    A tile of a kernel takes its word that it is one: partial results of reductions are carried from block to block, as
    by an online softmax. Blocks that a mask hides are counted as if they were computed.

    Examples
    --------
    >>> import costgraph as cg
    >>> N, M = cg.dims("N M")
    >>> with cg.Graph("g", dtype="fp32") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> found = cg.tiling(*g.ops, cache="64 KiB", N=4096)
    >>> found.order, found.blocks
    (('i', 'j', 'k'), {'i': 128, 'j': 126, 'k': 1})
    >>> found.tiles[0].footprint, round(found.ratio, 3)
    (65528, 1.031)
    >>> cg.tiling(*g.ops, cache=M).bound
    Max(12*N**2, -2*M + 16*N**3/sqrt(M))
    """
    if not isinstance(op, Op):
        raise GraphError(f"tiling of {type(op).__name__}, expected an op: a contraction, or a kernel of some")
    size = cache_bytes("tiling", op.graph, cache)
    values = bindings(op.graph.root, dims)
    bound = bound_answer(largest([p.bind(values) for p in proved(op, size)]), values)
    loops = Loops(nest_of(op))
    extents = [n.bind(values) for n in loops.extents]
    if size.constant is not None and all(isinstance(n.constant, int) for n in extents):
        tiles = [_in_numbers(op, loops, [int(n.constant or 0) for n in extents], int(size.constant))]
    else:
        tiles = _in_formulas(op, loops, extents, size, values)
    return Tiling(op.name, answer(size), bound, tuple(tiles))


def _too_small(op: Op, size: object, least: object) -> BindingError:
    return BindingError(
        f"tiling of {op.name!r}: cache of {size} bytes, expected {least} at least: one element of each array"
    )


def _in_numbers(op: Op, loops: Loops, extents: list[int], cache: int) -> Tile:
    """Return the schedule that moves least, its blocks made to fit one by one."""
    # schedules are picked in floats, and then worked out in whole numbers
    at = [np.array([float(min(n, _LARGEST))]) for n in extents]
    found = sorted(
        ((float(m[0]), i, s) for i, (s, m) in enumerate(chosen(loops, at, np.array([8.0 * min(cache, _LARGEST)])))),
        key=lambda item: item[:2],
    )
    least = loops.footprint([n if axis.whole else 1 for n, axis in zip(extents, loops.axes, strict=True)])
    if least > 8 * cache:
        raise _too_small(op, cache, -(-least // 8))
    best: tuple[Any, ...] | None = None
    for _, _, schedule in found[:_STARTS]:
        start = [min(s, n) for s, n in zip(block_sizes(schedule.cuts, 1, extents), extents, strict=True)]
        if loops.footprint(start) > 8 * cache:
            continue
        sizes, moved = grown(loops, schedule.order, start, extents, 8 * cache)
        if best is None or moved < best[0]:
            best = moved, schedule.order, sizes
    assert best is not None
    moved, order, sizes = best
    names = [str(axis) for axis in loops.axes]
    bits = (loops.footprint(sizes), moved, least)
    blocks = {names[i]: sizes[i] for i in order}
    return Tile(tuple(blocks), blocks, *(answer(poly(n) / 8) for n in bits))


def _in_formulas(op: Op, loops: Loops, extents: list[Poly], cache: Poly, values: Bindings) -> list[Tile]:
    """Return schedules that between them come near the best one wherever sizes were tried."""
    names = sorted(set().union(cache.names(), *(n.names() for n in extents)))
    draw = np.random.default_rng(7)
    room = cache.names() - set().union(*(n.names() for n in extents))
    # lengths on both sides of those that fit
    longest = 13.0 if cache.constant is None else max(13.0, int(cache.constant).bit_length() / 2 + 2)
    at = {
        n: np.floor(2 ** (draw.uniform(6, 26, _POINTS) if n in room else draw.uniform(0, min(longest, 40), _POINTS)))
        for n in names
    }

    def numbers(p: Poly) -> np.ndarray[Any, Any]:
        mine = {n: at[n] for n in p.names()}
        return np.broadcast_to(np.asarray(compiled(p.expr)(**mine), dtype=float), (_POINTS,))

    found = list(chosen(loops, [numbers(n) for n in extents], 8 * numbers(cache)))
    moved = np.array([m for _, m in found])
    return [_formulas(loops, found[i][0], extents, cache, values) for i in _few(found, moved)]


def _few(found: Sequence[tuple[Schedule, Any]], moved: np.ndarray[Any, Any]) -> list[int]:
    """Return few schedules of which one is near the best at most points; first one that fits into the least cache."""
    near = moved <= _NEAR * moved.min(axis=0)
    near &= np.isfinite(moved)
    cuts = [sum(c == WHOLE for c in s.cuts) for s, _ in found]
    fits = np.isfinite(moved).sum(axis=1)
    first = max(range(len(found)), key=lambda i: (fits[i], -cuts[i], near[i].sum(), -i))
    kept, open_ = [first], ~near[first] & np.isfinite(moved).any(axis=0)
    while len(kept) < _MOST_TILES and open_.sum() > _POINTS // 50:
        best = max(range(len(found)), key=lambda i: ((near[i] & open_).sum(), -cuts[i], -i))
        kept.append(best)
        open_ &= ~near[best]
    return kept


def _formulas(loops: Loops, schedule: Schedule, extents: list[Poly], cache: Poly, values: Bindings) -> Tile:
    cuts, most = schedule.cuts, degree(loops, schedule.cuts)
    least = poly(loops.footprint([poly(s) for s in block_sizes(cuts, 1, extents)])) / 8
    block = ONE
    if most > 2:
        block = poly(sympy.floor(power(cache / least, as_poly(Fraction(1, most))).expr))
    elif most:
        c, b, a = (poly(x) / 8 for x in coefficients(loops, cuts, extents, ONE))
        root = power(b * b + 4 * a * (cache - c), as_poly(Fraction(1, 2)))
        block = poly(sympy.floor(((root - b) / (2 * a) if most == 2 else (cache - c) / b).expr))
    sizes = [poly(s) for s in block_sizes(cuts, block, extents)]
    rounds = [
        poly(sympy.ceiling((n / s).expr)) if cut == BLOCK else ONE if cut == WHOLE else n
        for n, s, cut in zip(extents, sizes, cuts, strict=True)
    ]
    moved = poly(loops.traffic(schedule.order, [cut != WHOLE for cut in cuts], extents, rounds)) / 8
    names = [str(axis) for axis in loops.axes]
    return Tile(
        tuple(names[i] for i in schedule.order),
        {names[i]: bound_answer(sizes[i], values) for i in schedule.order},
        bound_answer(poly(loops.footprint(sizes)) / 8, values),
        bound_answer(moved, values),
        bound_answer(least, values),
    )
