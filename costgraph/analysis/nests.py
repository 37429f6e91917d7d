"""Loop nests: the index points of a contraction, or of all ops of a kernel together, and the arrays that they reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..algebra.symbols import shown
from ..errors import UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.strides import windows_along
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes
from ..ops.blocks import Kernel
from ..ops.contraction import Einsum
from ..ops.pointwise import Pointwise
from ..ops.reduce import Reduce
from ..ops.stochastic import Dropout
from .exponents import Access, Row

__all__ = ["Array", "Body", "Nest", "contraction_nest", "moved_once", "nest_of", "products_inside"]


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
