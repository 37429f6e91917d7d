"""The record of a contraction: what it computes, where it is restricted, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Annotated

from ..algebra.polynomial import ONE, Poly
from ..algebra.symbols import shown
from ..dtypes import DType
from ..errors import ShapeError
from ..graph.domain import Domain
from ..graph.facts import Extents, Flag, Limit, Places, Rooms, Shape, is_amount, need, optional
from ..graph.graph import Graph
from ..graph.op import Flops, Op, OpKind, Result, Working
from ..graph.placement import Split
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from ..notation.pattern import Affine, Axes, Pattern
from . import rules, splits
from .indexing import need_indexed, need_plain
from .order import best_orders
from .registry import register

if TYPE_CHECKING:
    from ..algebra.dominance import Relations

__all__ = ["Einsum", "Restricted", "inherited"]

#: A domain, and the axes that it is over by name.
Restricted = tuple[Domain, str, str]


def _is_restriction(value: object) -> bool:
    return isinstance(value, tuple) and [type(v) for v in value] == [Domain, str, str] and bool(value[1] != value[2])


@register
@dataclass(frozen=True, kw_only=True)
class Einsum(Working):
    """A contraction over named axes."""

    name = "einsum"
    restricted = takes_complex = True
    pattern: Pattern
    extents: Extents
    """Size of every axis of the pattern."""
    domain: Annotated[Restricted | None, optional("None, or a domain and two axes", _is_restriction), Limit(1)] = None
    """Which index points there are of two of its axes."""
    dtype: DType
    """Number format of the result."""
    orders: Annotated[Poly | None, optional("an amount that is not negative", is_amount)] = None
    """FLOPs of three operands or more where no contraction order is always the best."""
    rooms: Rooms = ()
    """What stated outputs of windows leave over of an axis."""
    sizes: Shape | None = None
    """Shape of a result whose indices alone do not tell it: zeros where nothing lands."""
    order: Places = ()
    """Operands in the order of their gradients, () from the first to the last."""
    causal: Flag = False
    """Whether its windows see earlier positions alone, which `decode` keeps."""
    writes = rules.all_results

    @property
    def summed(self) -> bool:
        """Whether a sum is made: an axis is left out, or an index of several puts points on one place."""
        return bool(set(self.extents) - set(self.pattern.result_names)) or any(
            isinstance(a, Affine) and len(a.terms) > 1 for a in self.pattern.result
        )

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """One dense result."""
        pattern, extents = self.pattern, self.extents
        for i, t in enumerate(operands):
            for dim, size in zip(pattern.operands[i], t.sizes, strict=True):
                if isinstance(dim, Axes) and not t.graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
                    raise ShapeError(
                        f"operand {i + 1} {t!r}: an axis of size {size} where the pattern {dim} makes another"
                    )
        _need_one_domain(pattern, operands, self.domain)
        domain = _result_domain(pattern, self.domain)
        if self.sizes is not None:
            sizes = _stated_sizes(pattern, extents, self.sizes, operands[0].graph)
        else:
            sizes = tuple(prod((extents[n] for n in a.names), start=ONE) for a in pattern.result)
        return [Result(sizes, self.dtype, domain=domain)]

    def flops(self, op: Op) -> Flops:
        """Count 2 for every index point where a sum is made, 1 where none is: a product alone.

        Of complex numbers 8 and 6.
        """
        if any(t.dtype.kind == "complex" for t in op.operands):
            return self._of_numbers(op) * (4 if self.summed else 6)
        return self._of_numbers(op)

    def _of_numbers(self, op: Op) -> Flops:
        if self.orders is not None:
            return Flops(matmul=self.orders) if self.summed else Flops(pointwise=self.orders)
        full = executed = prod(self.extents.values(), start=ONE)
        if self.domain is not None:
            domain, query, key = self.domain
            others = prod((n for name, n in self.extents.items() if name not in (query, key)), start=ONE)
            executed = others * domain.points(self.extents[query], self.extents[key], op.graph.root.relations)
        return Flops(matmul=2 * executed, full=2 * full) if self.summed else Flops(pointwise=executed)

    def least(self, op: Op) -> Poly:
        """Return the matmul FLOPs of the algorithm that needs the fewest, of those that windows have.

        F(n, r) of Winograd 1980 (Arithmetic Complexity of Computations, theorem 5a) makes n outputs of a window of r
        with n + r - 1 products, and none does with fewer; so does the gradient by either operand. Here n is the whole
        axis, which is the limit of tiles F(m, r): F(2x2, 3x3) needs 16/36 of the products of each tile, F(4x4, 3x3)
        36/144 (Lavin and Gray 2015, arXiv 1509.09308), and a Fourier transform more than the limit. What the
        transforms add is left out.
        """
        executed = self.flops(op).matmul
        if self.orders is not None or self.domain is not None or not executed:
            return executed
        found = dict(_window_products(self.pattern, self.extents))
        inside = {name for pair in found for name in pair}
        others = prod((n for name, n in self.extents.items() if name not in inside), start=2 * ONE)
        return prod(found.values(), start=others)

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return what its index points reach."""
        return rules.reached_by_index(op, self.pattern, self.extents, self.domain)

    def placed(self, op: Op) -> Split:
        """Split any axis that is no part of an index, each contracted one into parts of a sum."""
        pattern = self.pattern
        dims = [d for o in (*pattern.operands, pattern.result) for d in o]
        whole = {n for d in dims if isinstance(d, Affine) for n in d.names}
        for side in (*pattern.operands, pattern.result):
            names = [n for d in side for n in d.names]
            whole |= {n for n in names if names.count(n) > 1}  # of a diagonal
        inside = {n for i in range(len(pattern.operands)) for n in pattern.operand_names(i)}
        labels = [tuple(d.names if isinstance(d, Axes) else () for d in o) for o in (*pattern.operands, pattern.result)]

        def local(extents: Mapping[str, Poly], ranks: Mapping[str, str]) -> OpKind:
            own = {n: extents[n] for n in self.extents}
            made = replace(self, extents=own)
            if self.sizes is not None:
                stated = zip(labels[-1], pattern.result, self.sizes, strict=True)
                sizes = [splits.local_of([names], own)[0] if isinstance(d, Axes) else n for names, d, n in stated]
                made = replace(made, sizes=tuple(sizes))
            if self.orders is not None:
                axes = [frozenset(pattern.operand_names(i)) for i in range(len(pattern.operands))]
                found = best_orders(axes, frozenset(pattern.result_names), own, op.graph.root.relations)
                made = replace(made, orders=found.flops, workspace=found.workspace * self.dtype.bits / 8)
            return made

        return Split(
            operands=tuple(labels[:-1]),
            results=(labels[-1],),
            extents=self.extents,
            local=local,
            reduced=dict.fromkeys(inside - set(pattern.result_names), "sum"),
            whole=frozenset(whole),
            linear=len(op.operands) == 1,
            product=len(op.operands) > 1,
        )

    def verify(self, operands: Sequence[Tensor], known: Iterable[Relations]) -> None:
        """Hold pattern, extents, domain and orders against the operands."""
        pattern, restriction, several = self.pattern, self.domain, len(operands) > 2
        need(bool(operands), "no operand")
        need((self.orders is not None) == several, f"orders of {len(operands)} operands")
        need(not self.order or sorted(self.order) == [*range(len(operands))], f"order {self.order}")
        need_indexed(operands, pattern, self.extents, self.sizes, self.rooms)
        if self.sizes is None:
            need_plain(pattern)
            inside = {n for i in range(len(operands)) for n in pattern.operand_names(i)}
            need(set(pattern.result_names) <= inside, f"the result of pattern {shown(str(pattern))}")
        if restriction is not None:
            domain, query, key = restriction
            need({query, key} <= set(self.extents), f"domain over {shown(query)} and {shown(key)}")
            domain.points(self.extents[query], self.extents[key])  # refuses what it cannot count
        need(restriction is not None or all(t.domain is None for t in operands), "no domain, where an operand has one")
        if several:  # FLOPs of a product of several tensors are derived again: else they would be taken at their word
            affine = any(isinstance(a, Affine) for o in pattern.operands for a in o)
            need(not affine and restriction is None, f"{len(operands)} operands with an index or a domain")
            axes = [frozenset(pattern.operand_names(i)) for i in range(len(operands))]
            found = (best_orders(axes, frozenset(pattern.result_names), self.extents, k) for k in known)
            need(any(f.flops == self.orders for f in found), f"orders {shown(str(self.orders))}")


def _window_products(pattern: Pattern, extents: Mapping[str, Poly]) -> Iterator[tuple[tuple[str, str], Poly]]:
    """Return pairs of axes that slide along each other, with the products of the fewest: one of each has either."""
    tensors = [*pattern.operands, pattern.result]
    if len(tensors) != 3:
        return
    names = [{name for dim in dims for name in dim.names} for dims in tensors]
    for i, dims in enumerate(tensors):
        for dim in dims:
            if isinstance(dim, Affine) and len(dim.terms) == 2:
                pair = dim.names
                seen = sorted(tuple(name in names[j] for name in pair) for j in range(3) if j != i)
                if seen == [(False, True), (True, False)]:
                    yield (pair[0], pair[1]), _products(*((extents[name], step) for name, step in dim.terms))


def _products(outer: tuple[Poly, int], inner: tuple[Poly, int]) -> Poly:
    """Return the fewest products of two axes with their steps: of a stride, a window falls into one for each phase."""
    (n, stride), (r, gap) = outer, inner
    if stride == 1 < gap:
        (n, stride), (r, gap) = (r, gap), (n, stride)
    phases = 1
    if gap == 1 and isinstance(r.constant, int):
        phases = min(stride, r.constant)
    return n * phases + r - phases


def _stated_sizes(pattern: Pattern, extents: Mapping[str, Poly], sizes: Sizes, graph: Graph) -> Sizes:
    """Return the sizes of a result whose indices alone do not tell them: they stay where nothing lands, as zeros."""
    if len(sizes) != len(pattern.result):
        raise ShapeError(f"result of {len(sizes)} axes, the pattern {pattern} has {len(pattern.result)}")
    for dim, size in zip(pattern.result, sizes, strict=True):
        if isinstance(dim, Axes) and not graph.same(prod((extents[n] for n in dim.names), start=ONE), size):
            raise ShapeError(f"result: an axis of size {size} where the pattern {dim} makes another")
    return sizes


def _result_domain(pattern: Pattern, restriction: tuple[Domain, str, str] | None) -> tuple[Domain, int, int] | None:
    if restriction is None:
        return None
    # a place that an index makes is another position than that of its axis
    places = [a.names if isinstance(a, Axes) else None for a in pattern.result]
    domain, query, key = restriction
    if (query,) in places and (key,) in places:
        return domain, places.index((query,)), places.index((key,))
    return None


def inherited(pattern: Pattern, operands: Sequence[Tensor]) -> tuple[Domain, str, str] | None:
    """Return the restriction of the first operand that has one."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if t.domain is not None:
            domain, query, key = t.domain
            names = {d.names for d in (dims[query], dims[key]) if isinstance(d, Axes)}
            if len(names) != 2 or any(len(n) != 1 for n in names):
                raise ShapeError(f"{t!r} is restricted to a domain: expected a name each for axes {query} and {key}")
            return domain, dims[query].names[0], dims[key].names[0]
    return None


def _need_one_domain(pattern: Pattern, operands: Sequence[Tensor], restriction: tuple[Domain, str, str] | None) -> None:
    """Refuse operands that hold something elsewhere than at the index points of the contraction."""
    for dims, t in zip(pattern.operands, operands, strict=True):
        if inherited(Pattern((dims,), ()), [t]) not in (None, restriction):
            raise ShapeError("operands restricted to two different domains, expected one")
    indices = [d for dims in pattern.operands for d in dims if isinstance(d, Affine)]
    if restriction is not None and any(set(d.names) & set(restriction[1:]) for d in indices):
        raise ShapeError(f"domain over {' and '.join(restriction[1:])}, one of which is in an index: expected axes")
