"""Choosing among experts, ordering rows by the expert that they go to, and one product for all experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, NamedTuple

import sympy

from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, Poly, poly, power
from ..algebra.symbols import shown
from ..dtypes import (
    DType,
    promote,
)
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Flag,
    Flops,
    Index,
    Limit,
    Op,
    OpKind,
    Result,
    Room,
    Size,
    Split,
    Tensor,
    apply,
    is_amount,
    need_choice,
    need_flag,
    need_tensor,
    one_of,
    optional,
    positive,
)
from ..ir.strides import numel
from ..notation.validation import Rule
from . import (
    rules,
    sharding_rule,
)
from .registry import register

__all__ = [
    "ROUTINGS", "Dispatch", "Dispatched", "Grouped", "GroupedOuter", "TopK", "dispatch", "grouped", "grouped_outer",
    "top_k",
]  # fmt: skip

#: What can be assumed of which experts the rows of a pass go to.
ROUTINGS = ("balanced", "expected", "capacity")


class Dispatched(NamedTuple):
    """Where each row goes, and where it is to be found again."""

    tokens: Tensor
    """(R,) the token that each row is, rows ordered by expert"""
    ends: Tensor
    """(E,) where the rows of each expert end"""
    places: Tensor
    """(..., k) the row of each choice"""
    owners: Tensor | None = None
    """(R,) the expert of each row, where it was asked for"""
    dropped: Tensor | None = None
    """(..., k) whether a choice found no room, where experts have a capacity"""


@register
@dataclass(frozen=True, kw_only=True)
class TopK(OpKind):
    """The largest elements along the last axis, and where they are."""

    name = "top_k"
    k: Size
    room: Room | None = None
    """Elements beside them, looked at when sizes are bound."""
    smallest: Flag = False
    """Whether they are the smallest ones, the smallest of them first."""
    flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Values and indices."""
        (x,) = operands
        left = None if x.ndim == 0 else (x.sizes[-1] - self.k).constant
        if x.ndim == 0 or (left is not None and left < 0):
            raise ShapeError(f"top {self.k} of {x!r}: expected a last axis of at least as many")
        sizes = (*x.sizes[:-1], self.k)
        return [Result(sizes, x.dtype), Result(sizes, find_dtype("int64"))]

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return sharding_rule.alike(op, whole=[op.results[0].ndim - 1])


def _is_above_zero(value: object) -> bool:
    return is_amount(value) and isinstance(value, Poly) and value.constant != 0


@register
@dataclass(frozen=True, kw_only=True)
class Dispatch(OpKind):
    """Choices of experts, ordered by expert."""

    name = "dispatch"
    experts: Size
    capacity: Annotated[Poly | None, optional("an amount above 0", _is_above_zero), Limit(0, whole=False)] = None
    """Times its even share, for how many rows an expert has room; None where it takes all that come."""
    owners: Flag = False
    """Whether the expert of each row is wanted as well."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Rows, where they end, and where each choice is."""
        (ids,) = operands
        if ids.dtype.kind != "int" or ids.ndim == 0:
            raise ShapeError(f"dispatch of {ids!r}: expected indices of experts (..., k) in an integer format")
        integer, rows = find_dtype("int64"), numel(ids.sizes)
        if self.capacity is not None:
            rows = poly(sympy.ceiling((self.capacity * rows / self.experts).expr)) * self.experts
        made = [Result((rows,), integer), Result((self.experts,), find_dtype("int32")), Result(ids.sizes, integer)]
        made += [Result((rows,), integer)] if self.owners else []
        return made + ([] if self.capacity is None else [Result(ids.sizes, find_dtype("bool"))])

    def placed(self, op: Op) -> Split | None:
        """Split the choices: each rank orders its own, and rows, ends and places are those of its part."""
        if self.capacity is not None:  # room is rounded up for all of them
            return None
        names = tuple((f"i{i}",) for i in range(op.operands[0].ndim))
        rows = (tuple(n for (n,) in names),)
        extents = {n: size for (n,), size in zip(names, op.operands[0].sizes, strict=True)} | {"e": self.experts}
        results = (rows, (("e",),), names, *([rows] if self.owners else []))
        return Split((names,), results, extents, lambda own, ranks: self, whole=frozenset({"e", *names[-1]}))

    def flops(self, op: Op) -> Flops:
        """Count one for each choice to order it, one to count it, and the sum over experts: where rows end."""
        return Flops(pointwise=2 * rules.elements(op.operands[0]) + self.experts)


def _products(kind: OpKind, op: Op) -> Flops:
    """Count 2 for each row and element of its expert's matrix."""
    rows, other, _ = op.operands
    return Flops(matmul=2 * numel(rows.sizes) * other.sizes[-1])


@register
@dataclass(frozen=True, kw_only=True)
class Grouped(OpKind):
    """Rows (R, D), ordered by expert, by the matrix (E, D, F) of the expert of each."""

    name = "grouped"
    routing: Annotated[str, one_of(*ROUTINGS)]
    """Of how many experts the weights are read."""
    chosen: Annotated[Poly, Rule("an amount above 0", _is_above_zero), Limit(0, whole=False)]
    """Experts that a token chooses; of those of one rank in the mean."""
    dtype: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Number format of the result, None for the common one."""
    unpacked: Index = 0
    """Operations on each element of the weights that it reads, such as a product with the scale of a group."""
    writes = rules.all_results

    def flops(self, op: Op) -> Flops:
        """Count 2 for each row and element of its expert's matrix, and what weights take that are stored packed."""
        return _products(self, op) + Flops(pointwise=self.unpacked * self.reads(op)[1])

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """One row for each row."""
        rows, weights, ends = operands
        same = rows.graph.same
        fits = (rows.ndim, weights.ndim, ends.ndim) == (2, 3, 1) and ends.dtype.kind == "int"
        if not fits or not same(rows.sizes[1], weights.sizes[1]) or not same(weights.sizes[0], ends.sizes[0]):
            raise ShapeError(
                f"grouped product of {rows!r}, {weights!r} and {ends!r}: expected (rows, d), (experts, d, f) and "
                f"integers (experts,)"
            )
        dtype = promote(rows.dtype, weights.dtype) if self.dtype is None else self.dtype
        return [Result((rows.sizes[0], weights.sizes[2]), dtype)]

    def placed(self, op: Op) -> Split:
        """Split both axes of the matrices; which rows are of which expert is known of all together."""
        operands = ((("r",), ("d",)), (("e",), ("d",), ("f",)), (("e",),))
        return sharding_rule.across(
            op, operands, (("r",), ("f",)), lambda own, ranks: self, reduced={"d": "sum"}, whole=frozenset("er")
        )

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return all rows, and of the weights those of the experts that rows go to."""
        rows, weights, ends = rules.whole(self, op)
        experts, count = op.operands[1].sizes[0], op.operands[0].sizes[0]
        if self.routing == "balanced":
            weights = smaller(weights, weights / experts * count)
        elif self.routing == "expected":
            weights = weights / experts * _expected(experts, self.chosen, count / self.chosen)
        return rows, weights, ends


def _expected(experts: Poly, chosen: Poly, tokens: Poly) -> Poly:
    """Return the mean number of different experts that tokens choose, each of them independently and evenly.

    A token leaves an expert out with probability 1 - k/E.
    """
    return experts * (ONE - power(ONE - chosen / experts, tokens))


@register
@dataclass(frozen=True, kw_only=True)
class GroupedOuter(OpKind):
    """The sum over the rows of each expert of products of a row of one (R, D) and a row of the other (R, F)."""

    name = "grouped_outer"
    flops, reads, writes = _products, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """One matrix for each expert."""
        a, b, ends = operands
        fits = (a.ndim, b.ndim, ends.ndim) == (2, 2, 1) and ends.dtype.kind == "int"
        if not fits or not a.graph.same(a.sizes[0], b.sizes[0]):
            raise ShapeError(
                f"grouped product of {a!r}, {b!r} and {ends!r}: expected (rows, d), (rows, f) and integers (experts,)"
            )
        return [Result((ends.sizes[0], a.sizes[1], b.sizes[1]), promote(a.dtype, b.dtype))]

    def placed(self, op: Op) -> Split:
        """Split both axes of the matrices."""
        operands = ((("r",), ("d",)), (("r",), ("f",)), (("e",),))
        return sharding_rule.across(
            op, operands, (("e",), ("d",), ("f",)), lambda own, ranks: self, reduced={"r": "sum"}, whole=frozenset("er")
        )


# -- functions ---------------------------------------------------------------------------------------------------


def top_k(x: Tensor, k: object, *, name: str = "top_k") -> tuple[Tensor, Tensor]:
    """Find the largest elements along the last axis, as `torch.topk`.

    Parameters
    ----------
    x : Tensor
        Shape (..., n).
    k : sympy.Expr or int
        How many of them, n at the most: looked at again when sizes are bound.
    name : str
        Name of the op.

    Returns
    -------
    tuple of Tensor
        Values in the format of `x` and indices in int64, (..., k) each. FLOPs: 1 for each element of `x`.

    Raises
    ------
    GraphError, ShapeError
        If `x` is no tensor, or has fewer elements along its last axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, E = cg.dims("B E")
    >>> with cg.Graph("g") as g:
    ...     values, ids = cg.ops.top_k(g.input("scores", (B, E)), 2)
    >>> ids.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, 2), B*E, 4*B*E + 24*B)
    """
    need_tensor("top_k", x)
    count = positive("top_k: k", k)
    values, ids = apply(TopK(k=count, room=x.sizes[-1] - count if x.ndim else None), [x], name)
    return values, ids


def dispatch(
    ids: Tensor, experts: object, *, capacity: object = None, owners: bool = False, name: str = "dispatch"
) -> Dispatched:
    """Order the choices of all tokens by expert: which token each row is, and in which row each choice is.

    Parameters
    ----------
    ids : Tensor
        Experts that tokens have chosen, (..., k) in an integer format.
    experts : sympy.Expr or int
        How many experts there are.
    capacity : number or sympy.Expr, optional
        Each expert has room for ceiling(capacity * T * k / experts) rows, filled up where fewer come; what comes
        beyond is dropped. By default it takes all that come.
    owners : bool
        Whether the expert of each row is wanted as well.
    name : str
        Name of the op.

    Returns
    -------
    Dispatched
        Integers, and of dropped choices a mask. FLOPs: 2 for each choice and 1 for each expert, in one kernel.

    Raises
    ------
    GraphError, ShapeError
        If an argument is none.

    Examples
    --------
    >>> import costgraph as cg
    >>> T, k, E = cg.dims("T k E")
    >>> with cg.Graph("g") as g:
    ...     sent = cg.ops.dispatch(g.input("ids", (T, k), dtype="int64"), E)
    >>> sent.tokens.shape, sent.ends.shape, sent.places.shape
    ((T*k,), (E,), (T, k))
    """
    need_tensor("dispatch", ids)
    need_flag("dispatch", owners=owners)
    kind = Dispatch(
        experts=positive("dispatch: experts", experts),
        capacity=None if capacity is None else _factor("dispatch: capacity", capacity),
        owners=owners,
    )
    tokens, ends, places, *rest = apply(kind, [ids], name)
    owner = rest.pop(0) if owners else None
    return Dispatched(tokens, ends, places, owner, rest.pop() if rest else None)


def _factor(place: str, value: object) -> Poly:
    """Return a number above 0, a decimal fraction as it is written, or a formula."""
    wrong = GraphError(f"{place} {shown(value)}, expected a number above 0")
    try:
        found = poly(Fraction(str(value)) if isinstance(value, float) else value)
    except (ShapeError, ValueError):  # ValueError of inf and nan
        raise wrong from None
    if found.constant is not None and found.constant <= 0:
        raise wrong
    return found


def grouped(
    rows: Tensor, weights: Tensor, ends: Tensor, chosen: object, *, routing: str = "balanced", name: str = "grouped"
) -> Tensor:
    """Multiply each row by the matrix of its expert, in one kernel (torch's `grouped_mm`).

    Parameters
    ----------
    rows : Tensor
        Shape (R, d), ordered by expert.
    weights : Tensor
        Shape (E, d, f).
    ends : Tensor
        Where the rows of each expert end, (E,) from `dispatch`.
    chosen : sympy.Expr or int
        Experts that a token chooses: R/chosen tokens are on the way.
    routing : str
        Of how many experts the weights are read: balanced, Min(E, R); expected, E*(1 - (1 - k/E)**(R/k)), the mean
        over independent even choices of k; capacity, E.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        Shape (R, f). FLOPs of kind matmul: 2*R*d*f; every row is computed, those that fill up a capacity too.

    Raises
    ------
    GraphError, ShapeError
        If shapes do not fit, or the routing is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> R, E, D, F = cg.dims("R E D F")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     x, w = g.input("x", (R, D)), g.param("w", (E, D, F))
    ...     y = cg.ops.grouped(x, w, g.input("ends", (E,), dtype="int32"), 1)
    >>> cg.matmul_flops(g), cg.bytes_moved(g, R=2, E=8, D=16, F=32)  # two experts are read
    (2*D*F*R, 2272)
    """
    need_tensor("grouped", rows, weights, ends)
    need_choice("grouped: routing", routing, ROUTINGS)
    kind = Grouped(routing=routing, chosen=positive("grouped: chosen", chosen))
    return apply(kind, [rows, weights, ends], name)[0]


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor, *, name: str = "grouped_outer") -> Tensor:
    """Add up products of rows by expert: (R, d) and (R, f) to (E, d, f), the gradient of the weights of experts.

    FLOPs of kind matmul: 2*R*d*f. Experts without rows get zeros: all of the result is written.
    """
    need_tensor("grouped_outer", a, b, ends)
    return apply(GroupedOuter(), [a, b, ends], name)[0]
