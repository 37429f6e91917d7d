"""Loop nests: the index points of a contraction, or of all ops of a kernel together, and the arrays that they reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from functools import reduce as fold
from itertools import combinations, permutations, product
from math import lcm, prod
from typing import Any

import numpy as np
import sympy

from ..algebra.extremum import Max, as_expr, at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, as_poly, poly, power, total
from ..algebra.subspaces import Matrix, closure, image_rank, kernel, reduced, solved
from ..algebra.symbols import shown
from ..bind.evaluate import Formula, answer, bound_answer
from ..bind.evaluate import compile as compiled
from ..errors import BindingError, CostGraphError, GraphError, UnsupportedError
from ..hardware.units import UNITS, quantity
from ..ir.graph import Bindings, Graph, Op, Tensor, bindings, known_names
from ..ir.strides import windows_along
from ..notation.pattern import Affine, Axes
from ..ops.einsum import Einsum
from ..ops.elementwise import Dropout, Pointwise
from ..ops.loops import Kernel
from ..ops.reduce import Reduce

__all__ = [
    "Access",
    "Exponents",
    "Row",
    "exponents",
    "feasible",
    "Array",
    "Body",
    "Nest",
    "contraction_nest",
    "moved_once",
    "nest_of",
    "products_inside",
    "chains",
    "of_chain",
    "BLOCK",
    "ONE_EACH",
    "WHOLE",
    "Axis",
    "Loops",
    "Schedule",
    "block_sizes",
    "chosen",
    "coefficients",
    "degree",
    "grown",
    "schedules",
    "largest",
    "least_traffic",
    "parts_of_traffic",
    "proved",
    "unavoidable",
    "Tile",
    "Tiling",
    "cache_bytes",
    "tiling",
]


# -- exponents ---------------------------------------------------------------------------------------------------------
# Exponents of the Hölder-Brascamp-Lieb inequality: how many index points some elements of each array can make.
#
# A set of index points E whose images under the index maps phi_j have F_j elements, in a box of L_i positions along
# index i, has at most prod F_j^s_j * prod L_i^t_i points wherever s and t are not negative and
#
#     rank(H) <= sum s_j rank(phi_j H) + sum t_i rank(pi_i H)    for every subspace H,
#
# pi_i the projection onto index i (Christ, Demmel, Knight, Scanlon and Yelick 2013, theorem 3.2; a bounded index is
# one more projection: Dinh and Demmel 2020). The subspaces that matter are those that the kernels of the maps make
# under sum and intersection (Valdimarsson 2010). Maps that are products over groups of indices are looked at group by
# group, since the inequality of a product of spaces is the product of theirs: where no index is a sum, that leaves a
# constraint an index.
#
# Every pair (s, t) that keeps the constraints gives a bound that holds; which of them are listed is a matter of how
# good it is.

#: One axis of an array: index names with their coefficients.
Row = tuple[tuple[str, int], ...]
#: The axes of an array.
Access = tuple[Row, ...]

# Four planes in general position already make a lattice without end. Beyond this a sum of indices is left out of the
# map of its array, which is then taken to have fewer elements for as many points: what is proved still holds.
_MOST_SUBSPACES = 64
# Arrays whose exponents are looked for; with more, nothing is said beyond that each is read once.
_MOST_ARRAYS = 6
_MOST_CHOICES = 64


@dataclass(frozen=True)
class Exponents:
    """One pair (s, t)."""

    arrays: tuple[Fraction, ...]
    """s, one for each array."""
    indices: tuple[tuple[str, Fraction], ...]
    """t of the indices where it is not zero, by name."""

    @property
    def total(self) -> Fraction:
        """Sum of s: a cache of M bytes makes traffic fall as M**(1 - total)."""
        return sum(self.arrays, start=Fraction(0))


@dataclass(frozen=True)
class _Constraint:
    """`rank <= sum arrays*s + sum indices*t`."""

    arrays: tuple[int, ...]
    indices: tuple[tuple[str, int], ...]
    rank: int

    def lack(self, s: Sequence[Fraction]) -> Fraction:
        """Return what s leaves to t."""
        return self.rank - sum((a * x for a, x in zip(self.arrays, s, strict=True)), start=Fraction(0))


def _groups(names: Sequence[str], accesses: Iterable[Access]) -> list[tuple[str, ...]]:
    """Return the indices, those together that stand in one sum."""
    group = {name: {name} for name in names}
    for row in (row for access in accesses for row in access):
        joined = set().union(*(group[name] for name, _ in row))
        group |= dict.fromkeys(joined, joined)
    return list(dict.fromkeys(tuple(n for n in names if n in group[name]) for name in names))


def _constraints_of(group: tuple[str, ...], accesses: Sequence[Access]) -> set[_Constraint]:
    size = len(group)
    unit = {name: tuple(Fraction(int(other == name)) for other in group) for name in group}
    maps = [
        reduced([[dict(row).get(name, 0) for name in group] for row in access if any(n in group for n, _ in row)])
        for access in accesses
    ]
    kernels = [kernel(m, size) for m in maps] + [kernel((unit[name],), size) for name in group]
    spaces = closure(kernels, size, _MOST_SUBSPACES)
    if spaces is None:
        plain = [tuple(row for row in access if len(row) == 1) for access in accesses]
        return {c for name in group for c in _constraints_of((name,), plain)}
    return {
        _Constraint(
            tuple(image_rank(m, space) for m in maps),
            tuple((name, 1) for name in group if image_rank((unit[name],), space)),
            len(space),
        )
        for space in (*spaces, _whole(size))
        if space
    }


def _whole(size: int) -> Matrix:
    return reduced([[int(i == j) for j in range(size)] for i in range(size)])


def _least(constraints: Sequence[_Constraint], s: Sequence[Fraction]) -> list[dict[str, Fraction]]:
    """Return the vertices of what t may be, given s: as little as keeps the constraints of one group."""
    names = sorted({n for c in constraints for n, _ in c.indices})
    rows = [([dict(c.indices).get(n, 0) for n in names], c.lack(s)) for c in constraints]
    rows += [([int(m == n) for m in names], Fraction(0)) for n in names]
    out = []
    for chosen in combinations(rows, len(names)):
        t = solved([r for r, _ in chosen], [lack for _, lack in chosen])
        if t is None or min(t) < 0 or any(sum(a * x for a, x in zip(r, t, strict=True)) < lack for r, lack in rows):
            continue
        found = dict(zip(names, t, strict=True))
        if found not in out:
            out.append(found)
    return out


def _starts(constraints: Iterable[_Constraint], count: int) -> Iterator[tuple[Fraction, ...]]:
    """Yield the vertices of the arrangement that constraints make in s where t is zero."""
    planes = {(c.arrays, c.rank) for c in constraints if any(c.arrays)}
    planes |= {(tuple(int(i == j) for j in range(count)), 0) for i in range(count)}
    for chosen in combinations(sorted(planes), count):
        s = solved([a for a, _ in chosen], [rank for _, rank in chosen])
        if s is not None and all(0 <= x <= 1 for x in s):
            yield s


def _better(a: Exponents, b: Exponents) -> bool:
    """Whether a bounds at least as well as b for every cache and all sizes, constants left out."""
    small, large = dict(a.indices), dict(b.indices)
    return a.total <= b.total and all(t <= large.get(n, 0) for n, t in small.items())


def _mean(found: Sequence[Exponents]) -> Exponents:
    """Return the mean of exponents with one sum and one t: it keeps the constraints, as they are convex."""
    columns = zip(*(e.arrays for e in found), strict=True)
    return Exponents(tuple(sum(c, start=Fraction(0)) / len(found) for c in columns), found[0].indices)


def feasible(names: Sequence[str], accesses: Sequence[Access], found: Exponents) -> bool:
    """Whether exponents keep all constraints of some index maps."""
    t = dict(found.indices)
    return all(
        c.lack(found.arrays) <= sum(t.get(n, 0) * a for n, a in c.indices)
        for group in _groups(names, accesses)
        for c in _constraints_of(group, accesses)
    )


@lru_cache(maxsize=1 << 10)
def exponents(names: tuple[str, ...], accesses: tuple[Access, ...]) -> tuple[tuple[Exponents, ...], ...]:
    """Return the exponents that bound traffic, those of equal sum and equal t together.

    They are vertices with a sum of s above 1 that no other pair betters, each set with its mean at the end. Sums up to
    1 say no more than that every array is moved once.
    """
    if not 0 < len(accesses) <= _MOST_ARRAYS:
        return ()
    by_group = [list(_constraints_of(group, accesses)) for group in _groups(names, accesses)]
    found: dict[tuple[Fraction, tuple[tuple[str, Fraction], ...]], list[Exponents]] = {}
    for s in dict.fromkeys(_starts([c for group in by_group for c in group], len(accesses))):
        choices = [_least(group, s) for group in by_group]
        for picked, _ in zip(product(*choices), range(_MOST_CHOICES), strict=False):
            t = _joined(picked)
            found.setdefault((sum(s, start=Fraction(0)), t), []).append(Exponents(s, t))
    firsts = [sets[0] for sets in found.values()]
    kept = [e for e in firsts if e.total > 1 and not any(_better(o, e) for o in firsts if o is not e)]
    sets = [found[e.total, e.indices] for e in kept]
    return tuple((*each, _mean(each)) if len(each) > 1 else tuple(each) for each in sets)


def _joined(picked: Iterable[Mapping[str, Fraction]]) -> tuple[tuple[str, Fraction], ...]:
    return tuple(sorted((n, x) for each in picked for n, x in each.items() if x))


# -- nests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Array:
    """What index points read or make."""

    name: str
    """Of the tensor."""
    access: Access
    """The index of each axis that is longer than 1."""
    bits: int
    """Bits of an element, without scales that several share."""
    role: str
    """read; made: a result; held: what a kernel passes from op to op, which takes room alone."""
    storage: object = field(compare=False)
    """Equal for arrays that may have elements in common."""

    @property
    def weight(self) -> Fraction:
        """Bytes of an element."""
        return Fraction(self.bits, 8)

    @property
    def names(self) -> frozenset[str]:
        """Indices that it depends on."""
        return frozenset(name for row in self.access for name, _ in row)


@dataclass(frozen=True)
class Nest:
    """Index points and arrays."""

    name: str
    """Of the op."""
    extents: dict[str, Poly]
    """Positions of each index that has more than one."""
    arrays: tuple[Array, ...]
    """Those that are read, made and held."""
    points: Poly
    """Index points that read and make elements which there are: padding left out."""
    whole: frozenset[str] = frozenset()
    """Indices that a kernel has to go through before the next of its ops can begin."""

    @property
    def is_plain(self) -> bool:
        """Whether no index of an array is a sum of several."""
        return all(len(row) == 1 for a in self.arrays for row in a.access)

    @property
    def moved(self) -> tuple[Array, ...]:
        """Arrays that are outside of the cache before or after."""
        return tuple(a for a in self.arrays if a.role != "held")


def moved_once(op: Op) -> Poly:
    """Return the bytes that an op touches, each element moved once."""
    parts = [a * t.element_bytes() for t, a in zip(op.operands, op.kind.reads(op), strict=False)]
    return total([*parts, *(a * t.element_bytes() for t, a in zip(op.results, op.kind.writes(op), strict=False))])


def nest_of(op: Op) -> Nest:
    """Return the loop nest of an op.

    UnsupportedError if it is something else than contractions, reductions and elementwise functions, or a kernel of
    these.
    """
    kind = op.kind
    if isinstance(kind, Einsum):
        return contraction_nest(op, kind)
    return Body(op).nest()


# -- contractions ------------------------------------------------------------------------------------------------


def contraction_nest(op: Op, kind: Einsum) -> Nest:
    """Return the loop nest of a contraction: every index point multiplies one element of each operand."""
    extents = {name: n for name, n in kind.extents.items() if n != ONE}
    arrays = []
    for t, dims in (*zip(op.operands, kind.pattern.operands, strict=True), (op.results[0], kind.pattern.result)):
        role = "made" if t is op.results[0] else "read"
        rows = _rows([d for d, stride in zip(dims, t.strides, strict=True) if stride], extents)
        arrays.append(Array(t.name, rows, t.dtype.bits, role, t.region()[0]))
    return Nest(op.name, extents, tuple(arrays), _inside(op, kind))


def _rows(dims: Iterable[Axes | Affine], extents: dict[str, Poly]) -> Access:
    """Return the indices of axes, each different one once."""
    found: list[Row] = []
    for dim in dims:
        if isinstance(dim, Axes):
            found += [((name, 1),) for name in dim.names if name in extents]
        else:
            terms = tuple((name, factor) for name, factor in dim.terms if name in extents)
            found += [((terms[0][0], 1),) if len(terms) == 1 else terms] if terms else []
    return tuple(dict.fromkeys(found))


def _inside(op: Op, kind: Einsum) -> Poly:
    """Count index points of which every element lies inside its array: at least so many have to be computed."""
    extents = dict(kind.extents)
    if kind.domain is not None:
        domain, query, key = kind.domain
        others = prod((n for name, n in extents.items() if name not in (query, key)), start=ONE)
        return others * domain.points(extents[query], extents[key], op.graph.root.relations)
    narrowed: set[str] = set()
    for t, dims in (*zip(op.operands, kind.pattern.operands, strict=True), (op.results[0], kind.pattern.result)):
        for dim, size in zip(dims, t.sizes, strict=True):
            if not isinstance(dim, Affine):
                continue
            # along the output, whose extent is a symbol or the larger one, every place of the window has to be inside
            along, step = max(dim.terms, key=lambda term: _length(kind.extents[term[0]]))
            if along in narrowed:
                return ZERO
            narrowed.add(along)
            last = total((kind.extents[name] - 1) * factor for name, factor in dim.terms if name != along)
            first = max(0, -(dim.offset // step))
            places = smaller(kind.extents[along], windows_along(size, last + dim.offset, step))
            extents[along] = at_least_zero(places - first) if first else places
    return prod(extents.values(), start=ONE)


def _length(extent: Poly) -> tuple[bool, Fraction]:
    return extent.constant is None, Fraction(extent.constant or 0)


def products_inside(op: Op, kind: Kernel) -> Iterator[Nest]:
    """Yield the loop nests of products inside a kernel, nested ones too, of two tensors that it reads."""
    outside: dict[object, object] = {}
    for formal, t, i in zip(kind.body.formals, op.operands, range(len(op.operands)), strict=True):
        if i not in kind.changed:  # what is written into holds other values afterwards
            outside[formal.storage] = t.region()[0]
    yield from _products(kind.body, outside)


def _products(body: Graph, outside: Mapping[object, object]) -> Iterator[Nest]:
    for op in body.ops:
        kind = op.kind
        if isinstance(kind, Kernel):
            inner = zip(kind.body.formals, op.operands, strict=True)
            yield from _products(kind.body, {f.storage: outside[t.storage] for f, t in inner if t.storage in outside})
        if isinstance(kind, Einsum) and len(op.operands) == 2 and all(t.storage in outside for t in op.operands):
            nest = contraction_nest(op, kind)
            if nest.is_plain:
                read = (replace(a, storage=outside[t.storage]) for a, t in zip(nest.arrays, op.operands, strict=False))
                yield replace(nest, arrays=(*read, nest.arrays[-1]))


# -- kernels -----------------------------------------------------------------------------------------------------

#: A tensor, and the axis names of an op along it; "" where it has one position.
_Use = tuple[Tensor, list[str]]


class Body:
    """The ops of a kernel, nested kernels opened: an axis of what one op hands to another is one index of both.

    With `all_known` an op of another kind than a tile can have is refused; else its axes are indices of their own.
    """

    def __init__(self, op: Op, *, all_known: bool = True) -> None:
        self.op = op
        self.all_known = all_known
        self.source: dict[Tensor, Tensor] = {}
        self.uses: list[tuple[Op, list[_Use], list[_Use]]] = []
        self.names: dict[str, str] = {}
        self.parent: dict[str, str] = {}
        self.sizes: dict[str, Poly] = {}
        self._open(op)
        self.outside, self.outputs = set(map(self.source_of, op.operands)), set(map(self.source_of, op.results))

    def _open(self, op: Op) -> None:
        if not isinstance(op.kind, Kernel):
            self.uses.append((op, *self._axes(op)))
            return
        body = op.kind.body
        self.source |= zip(body.formals, op.operands, strict=True)
        for inner in body.ops:
            self._open(inner)
        self.source |= zip(op.results, body.outputs, strict=True)

    def source_of(self, t: Tensor) -> Tensor:
        """Return what a tensor of a nested kernel is outside of that one."""
        while t in self.source:
            t = self.source[t]
        return t

    def _axes(self, op: Op) -> tuple[list[_Use], list[_Use]]:
        """Return operands and results with the name of the index along each axis, "" where it has one position."""
        kind, mark = op.kind, f"{len(self.uses)}."
        if isinstance(kind, Einsum | Reduce) and (self.all_known or _is_known(op)):
            named = [[_single(self.op, d) for d in dims] for dims in (*kind.pattern.operands, kind.pattern.result)]
        elif isinstance(kind, Pointwise | Dropout):
            made = op.results[0]
            named = [
                [f"a{made.ndim - t.ndim + i}" if n != ONE else "" for i, n in enumerate(t.sizes)]
                for t in (*op.operands, *op.results)
            ]
        elif not self.all_known:
            named = [[f"{i}_{j}" for j in range(t.ndim)] for i, t in enumerate((*op.operands, *op.results))]
        else:
            raise UnsupportedError(
                f"tiling of {self.op.name!r}: {op.name!r} is {kind.name}, expected contractions, reductions and "
                "elementwise functions alone"
            )
        tensors = (*op.operands, *op.results)
        found = []
        for t, names in zip(tensors, named, strict=True):
            axes = [mark + name if name and n != ONE else "" for name, n in zip(names, t.sizes, strict=True)]
            self.sizes |= {a: n for a, n in zip(axes, t.sizes, strict=True) if a}
            found.append((self.source_of(t), axes))
        return found[: len(op.operands)], found[len(op.operands) :]

    def _root(self, axis: str) -> str:
        while self.parent[axis] != axis:
            axis = self.parent[axis]
        return axis

    def joined(self, *, operands: bool) -> Op | None:
        """Make one index of the axes that an op writes and others read; return an op where two of its axes meet.

        With `operands` the axes of what comes from outside are one wherever it is read, as those of a row that is
        normalised are. A tensor that is multiplied with itself is read along two indices.
        """
        self.parent = {axis: axis for axis in self.sizes}
        made: dict[Tensor, list[str]] = {}
        for _, read, written in self.uses:
            for t, axes in (*read, *written):
                first = made.setdefault(t, axes) if operands or t not in self.outside else axes
                for a, b in zip(axes, first, strict=True):
                    if a and b:
                        self.parent[self._root(a)] = self._root(b)
        for op, read, written in self.uses:
            local = {a for _, axes in (*read, *written) for a in axes if a}
            if len({self._root(a) for a in local}) < len(local) and _is_known(op):
                return op
        return None

    def nest(self) -> Nest:
        """Return the nest of all ops."""
        wrong = self.joined(operands=True) and self.joined(operands=False)
        if wrong:
            raise UnsupportedError(
                f"tiling of {self.op.name!r}: {wrong.name!r} meets two axes that were one before, expected each index "
                "of what ops hand on to be one"
            )
        self.name()
        arrays: dict[tuple[Tensor, Access], Array] = {}
        for _, read, written in self.uses:
            for t, axes in (*read, *written):
                if t in self.outside | self.outputs:
                    role = "read" if t in self.outside else "made"
                    # an expanded axis repeats the same elements
                    own = self._rows(a for a, n in zip(axes, t.strides, strict=True) if n or role == "made")
                    arrays.setdefault((t, own), Array(t.name, own, t.dtype.bits, role, t))
        held = (Array(t.name, self._rows(axes), t.dtype.bits, "held", t) for t, axes in self._slots())
        extents = {self.index(a): n for a, n in self.sizes.items()}
        return Nest(self.op.name, extents, (*arrays.values(), *held), ZERO, frozenset(self._whole(frozenset(extents))))

    def name(self) -> None:
        """Name the indices as the first op that has one calls it."""
        for axis in self.sizes:
            root, plain = self._root(axis), axis.partition(".")[2]
            if root not in self.names:
                taken = set(self.names.values())
                free = (n for n in (plain, *(f"{plain}{i}" for i in range(1, len(self.sizes) + 1))) if n not in taken)
                self.names[root] = next(free)

    def index(self, axis: str) -> str:
        """Return the name of the index that an axis is."""
        return self.names[self._root(axis)]

    def _rows(self, axes: Iterable[str]) -> Access:
        return tuple(dict.fromkeys(((self.index(a), 1),) for a in axes if a))

    def _indices(self, uses: Iterable[_Use]) -> set[str]:
        return {self.index(a) for _, axes in uses for a in axes if a}

    def _slots(self) -> Iterator[_Use]:
        """Yield what takes room between ops: an elementwise result stands where an operand was that ends with it."""
        last = {t: i for i, (_, read, _) in enumerate(self.uses) for t, _ in read}
        staying = self.outside | self.outputs
        for i, (op, read, written) in enumerate(self.uses):
            ends = [t for t, _ in read if last[t] == i and t not in staying]
            for t, axes in written:
                if isinstance(op.kind, Reduce):
                    staying.add(t)  # goes on from block to block
                if t in self.outputs:
                    continue
                free = next((o for o in ends if o.sizes == t.sizes and o.dtype.bits >= t.dtype.bits), None)
                if free is not None and not isinstance(op.kind, Einsum | Reduce):
                    ends.remove(free)
                else:
                    yield t, axes

    def _whole(self, names: frozenset[str]) -> Iterator[str]:
        """Yield the indices that cannot be cut: what a product that is held sums over, or what it does not have.

        A reduction may be cut where nothing that is handed out has its index: partial results are carried on.
        """
        made = self._indices(use for _, _, written in self.uses for use in written if use[0] in self.outputs)
        for op, read, written in self.uses:
            if isinstance(op.kind, Einsum) and written[0][0] not in self.outputs:
                yield from names - self._indices(written)
            if isinstance(op.kind, Reduce):
                yield from (self._indices(read) - self._indices(written)) & made


def _is_known(op: Op) -> bool:
    """Whether each axis of an op is one index."""
    if isinstance(op.kind, Einsum | Reduce):
        dims = (d for dims in (*op.kind.pattern.operands, op.kind.pattern.result) for d in dims)
        return all(isinstance(d, Axes) and len(d.names) < 2 for d in dims)
    return isinstance(op.kind, Pointwise | Dropout)


def _single(op: Op, dim: Axes | Affine) -> str:
    if isinstance(dim, Affine) or len(dim.names) > 1:
        raise UnsupportedError(f"tiling of kernel {op.name!r}: axis {shown(str(dim))}, expected one name an axis")
    return dim.names[0] if dim.names else ""


# -- chains ------------------------------------------------------------------------------------------------------------
# What a kernel makes and uses up inside, position by position, and the rows outside that each position needs.

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
    for matmul, read, written in body.uses:
        uses = (*read, *written)
        if not isinstance(matmul.kind, Einsum) or tensors.isdisjoint(t for t, _ in uses):
            continue
        nest = contraction_nest(matmul, matmul.kind)
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


# -- tiles -------------------------------------------------------------------------------------------------------------
# Tiled schedules of a loop nest: what they keep in the cache, and what they move.
#
# A schedule is an order of loops over blocks of indices. The cache holds the present block of every array; a block is
# fetched when an index of it moves on. An array therefore goes through the cache once for each round of the loops
# outside of its own innermost one whose indices it lacks. A result's block begins in the cache; where it comes back it
# is fetched, and it is written each time that it leaves. Nothing else is assumed of the machine: every schedule here
# can be carried out with loads and stores that the program says, block by block.

#: How an index is cut: single positions, blocks of a common length, or not at all.
ONE_EACH, BLOCK, WHOLE = "one", "block", "whole"

# Ways to cut every index and to order the loops that are looked at; beyond, fewer ways to cut the first indices.
_MOST_SCHEDULES = 2500
# Steps by which blocks are made to fit, each of a thousandth at least.
_MOST_CHANGES = 200


@dataclass(frozen=True)
class _Row:
    """One axis of an array: a sum of indices with coefficients."""

    terms: tuple[tuple[int, int], ...]
    """Numbers of axes, with coefficients."""
    dense: bool
    """Whether several index points may reach one place: all that lies between the ends is then taken."""


@dataclass(frozen=True)
class Axis:
    """Indices that stand in the same arrays, which are as good as one."""

    names: tuple[str, ...]
    """Of the indices, slowest first."""
    extent: Poly
    """Positions of all of them together."""
    whole: bool
    """Whether it cannot be cut."""

    def __str__(self) -> str:
        return " ".join(self.names) if len(self.names) == 1 else f"({' '.join(self.names)})"


@dataclass(frozen=True)
class Schedule:
    """How a nest is cut, and the order of its loops."""

    order: tuple[int, ...]
    """Axes, outermost loop first."""
    cuts: tuple[str, ...]
    """How each axis is cut."""


class Loops:
    """A nest whose indices are gathered to axes."""

    def __init__(self, nest: Nest) -> None:
        summed = {n for a in nest.arrays for row in a.access if len(row) > 1 for n, _ in row}
        alike: dict[object, list[str]] = {}
        for name in nest.extents:
            own = name if name in summed else tuple(name in a.names for a in nest.arrays)
            alike.setdefault((own, name in nest.whole), []).append(name)
        self.nest = nest
        self.axes = tuple(
            Axis(tuple(names), prod((nest.extents[n] for n in names), start=ONE), names[0] in nest.whole)
            for names in alike.values()
        )
        self._place = {name: i for i, axis in enumerate(self.axes) for name in axis.names}
        self.extents = tuple(axis.extent for axis in self.axes)
        self._of = {a: self._gathered(a) for a in nest.arrays}
        self._own = {a: frozenset(i for row in rows for i, _ in row.terms) for a, rows in self._of.items()}

    def _gathered(self, array: Array) -> tuple[_Row, ...]:
        rows = tuple(dict.fromkeys(tuple((self._place[n], factor) for n, factor in row) for row in array.access))
        places = [i for row in rows for i, _ in row]
        if len(set(places)) < len(places):
            raise UnsupportedError(
                f"tiling of {self.nest.name!r}: {array.name!r} has one index in two axes, expected each index in one"
            )
        return tuple(_Row(row, self._dense(row)) for row in rows)

    def _dense(self, row: tuple[tuple[int, int], ...]) -> bool:
        reach: Poly = ONE
        for i, factor in sorted(row, key=lambda term: (self.extents[term[0]].constant is None, term[1])):
            if reach.constant is None or factor < reach.constant:
                return len(row) > 1
            reach = reach + (self.extents[i] - 1) * factor
        return False

    def held(self, array: Array, sizes: Sequence[Any]) -> Any:
        """Return the elements of a block."""
        out: Any = 1
        for row in self._of[array]:
            if row.dense:
                out = out * (sum(factor * (sizes[i] - 1) for i, factor in row.terms) + 1)
            else:
                for i, _ in row.terms:
                    out = out * sizes[i]
        return out

    def power(self, array: Array, blocks: Sequence[bool]) -> int:
        """Return the power of a common length that a block's elements are of, for axes that are cut to it."""
        cut = ((row.dense, [blocks[i] for i, _ in row.terms]) for row in self._of[array])
        return sum(any(c) if dense else sum(c) for dense, c in cut)

    def once(self, array: Array, extents: Sequence[Any], rounds: Sequence[Any]) -> Any:
        """Return the elements of all blocks of an array together."""
        out: Any = 1
        for row in self._of[array]:
            if row.dense:  # the sum over blocks of the sum of factor * (length - 1), and of 1
                others = {i: prod((rounds[j] for j, _ in row.terms if j != i), start=1) for i, _ in row.terms}
                blocks = prod((rounds[i] for i, _ in row.terms), start=1)
                out = out * (sum(factor * (extents[i] - rounds[i]) * others[i] for i, factor in row.terms) + blocks)
            else:
                for i, _ in row.terms:
                    out = out * extents[i]
        return out

    def footprint(self, sizes: Sequence[Any]) -> Any:
        """Return the bits of one block of every array: bits, as numbers stay whole."""
        out: Any = 0
        for a in self.nest.arrays:
            out = out + self.held(a, sizes) * a.bits
        return out

    def visits(self, array: Array, order: Sequence[int], cut: Sequence[bool], rounds: Sequence[Any]) -> Any:
        """Return how often a block comes into the cache."""
        own = self._own[array]
        inner = max((at for at, i in enumerate(order) if i in own and cut[i]), default=0)
        out: Any = 1
        for i in order[:inner]:
            if i not in own and cut[i]:
                out = out * rounds[i]
        return out

    def traffic(self, order: Sequence[int], cut: Sequence[bool], extents: Sequence[Any], rounds: Sequence[Any]) -> Any:
        """Return the bits that are moved."""
        out: Any = 0
        for a in self.nest.arrays:
            times = self.visits(a, order, cut, rounds)
            # a block that is made begins in the cache; one that is held is no more when it is done with
            times = {"read": times, "made": 2 * times - 1, "held": 2 * times - 2}[a.role]
            out = out + self.once(a, extents, rounds) * times * a.bits
        return out

    def orders(self) -> list[tuple[int, ...]]:
        """Return orders of the loops: the indices of one array outside, within them those of another, and so on.

        The innermost loops are then those that the first array lacks, which stays where it is meanwhile.
        """
        own, places = self._own, range(len(self.axes))
        arrays = list(self.nest.moved)[:4]
        return list(
            dict.fromkeys(
                tuple(sorted(places, key=lambda i: [i not in own[a] for a in turn])) for turn in permutations(arrays)
            )
        )


def schedules(loops: Loops) -> list[Schedule]:
    """Return the schedules of a nest that are looked at."""
    orders = loops.orders()
    choices = [[WHOLE] if axis.whole else [ONE_EACH, BLOCK, WHOLE] for axis in loops.axes]
    for choice in choices:
        if prod(map(len, choices)) * len(orders) > _MOST_SCHEDULES and BLOCK in choice:
            choice.remove(BLOCK)
    return [Schedule(order, cuts) for cuts in product(*choices) for order in orders]


def block_sizes(cuts: Sequence[str], block: Any, extents: Sequence[Any]) -> list[Any]:
    """Return the length of a block along each axis."""
    return [{ONE_EACH: 1, BLOCK: block}.get(cut, n) for cut, n in zip(cuts, extents, strict=True)]


def degree(loops: Loops, cuts: Sequence[str]) -> int:
    """Return the highest power of the block length in a footprint."""
    return max((loops.power(a, [cut == BLOCK for cut in cuts]) for a in loops.nest.arrays), default=0)


def coefficients(loops: Loops, cuts: Sequence[str], extents: Sequence[Any], unit: Any) -> tuple[Any, Any, Any]:
    """Return c, b, a of a footprint c + b*x + a*x**2 where blocks are of length x; unit is 1 of the numbers' kind."""
    zero, one, two = (loops.footprint(block_sizes(cuts, x, extents)) for x in (0 * unit, unit, 2 * unit))
    square = (two - one - one + zero) / 2
    return zero, one - zero - square, square


# -- in numbers --------------------------------------------------------------------------------------------------


def chosen(
    loops: Loops, extents: Sequence[np.ndarray[Any, Any]], cache: np.ndarray[Any, Any]
) -> Iterator[tuple[Schedule, np.ndarray[Any, Any]]]:
    """Yield schedules with the bits that they move at some points; infinite where a cache of so many is too small."""
    blocks: dict[tuple[str, ...], Any] = {}
    for schedule in schedules(loops):
        cuts = schedule.cuts
        if cuts not in blocks:
            blocks[cuts] = _block(loops, cuts, extents, cache)
        block, fits = blocks[cuts]
        sizes = [np.minimum(s, n) for s, n in zip(block_sizes(cuts, block, extents), extents, strict=True)]
        rounds = [np.ceil(n / s) for n, s in zip(extents, sizes, strict=True)]
        moved = loops.traffic(schedule.order, [cut != WHOLE for cut in cuts], extents, rounds)
        yield schedule, np.where(fits, moved, np.inf)


def _block(loops: Loops, cuts: Sequence[str], extents: Sequence[Any], cache: Any) -> tuple[Any, Any]:
    most = degree(loops, cuts)
    least = loops.footprint([np.float64(s) + 0 * cache for s in block_sizes(cuts, 1.0, extents)])
    if most == 0:
        return np.ones_like(cache), least <= cache
    if most > 2:
        block = np.floor((cache / least) ** (1 / most) + 1e-12)
    else:
        c, b, a = coefficients(loops, cuts, extents, 1.0)
        room = np.maximum(cache - c, 0)
        block = np.floor((np.sqrt(b * b + 4 * a * room) - b) / (2 * a) if most == 2 else room / b)
    return np.maximum(block, 1), least <= cache


def exact(loops: Loops, order: Sequence[int], sizes: Sequence[int], extents: Sequence[int]) -> int:
    """Return the bits that blocks of some lengths move."""
    rounds = [-(-n // s) for n, s in zip(extents, sizes, strict=True)]
    moved: int = loops.traffic(order, [r > 1 for r in rounds], extents, rounds)
    return moved


def grown(
    loops: Loops, order: Sequence[int], sizes: list[int], extents: Sequence[int], cache: int
) -> tuple[list[int], int]:
    """Return blocks that no change of one length, another made to fit, betters; and the bits that they move."""
    best, moved = list(sizes), exact(loops, order, sizes, extents)
    for _ in range(_MOST_CHANGES * 64 // max(64, cache.bit_length())):  # long numbers are slow
        found = ((exact(loops, order, new, extents), new) for new in _changed(loops, best, extents, cache))
        better = next(((less, new) for less, new in found if less * 1024 < moved * 1023), None)
        if better is None:
            break
        moved, best = better
    return best, moved


def _changed(loops: Loops, sizes: list[int], extents: Sequence[int], cache: int) -> Iterator[list[int]]:
    free = [i for i, axis in enumerate(loops.axes) if not axis.whole and extents[i] > 1]
    for i in free:
        s, n = sizes[i], extents[i]
        for length in sorted({x for x in (n, 2 * s, s + 1, s, s - 1, s // 2, 1) if 1 <= x <= n}, reverse=True):
            for other in free:
                trial = [*sizes[:i], length, *sizes[i + 1 :]]
                made = trial if other == i else _filled(loops, trial, other, extents, cache)
                if loops.footprint(made) <= cache:
                    yield made


def _filled(loops: Loops, sizes: list[int], i: int, extents: Sequence[int], cache: int) -> list[int]:
    """Make one length as large as fits."""
    low, high = 1, extents[i]
    while low < high:
        middle = (low + high + 1) // 2
        if loops.footprint([*sizes[:i], middle, *sizes[i + 1 :]]) <= cache:
            low = middle
        else:
            high = middle - 1
    return [*sizes[:i], low, *sizes[i + 1 :]]


# -- bounds ------------------------------------------------------------------------------------------------------------
# Bytes that no schedule of a loop nest moves fewer of, through a cache of a given size.

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


# -- tiling ------------------------------------------------------------------------------------------------------------
# Traffic through a fast memory: the least of any schedule, and the tile that comes near it.

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
    of exponents (`costgraph.analysis.tiling`), with S the sum of s and w_j the bytes of an element of array j,

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
    (derived, in `costgraph.analysis.tiling`), and what follows elementwise from one product to the next, such as
    scores: an element that is made and used up needs its rows of all that is outside (derived, in
    `costgraph.analysis.tiling`; for attention 4*N**2*d**2/M elements from M = 8*d**2 on, of the order of Saha and Ye
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
