"""Mixture-of-experts ops: top-k, token dispatch to experts, and grouped matmuls."""

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
    "ROUTINGS", "Dispatch", "Dispatched", "GroupedMatmul", "GroupedOuter", "TopK", "dispatch", "grouped_matmul",
    "grouped_outer",
    "top_k",
]  # fmt: skip

#: Assumptions about how tokens are routed to experts.
ROUTINGS = ("balanced", "expected", "capacity")


class Dispatched(NamedTuple):
    """Rows sorted by expert, and each choice's row."""

    tokens: Tensor
    """(R,) each row's token, rows sorted by expert"""
    ends: Tensor
    """(E,) each expert's end offset"""
    places: Tensor
    """(..., k) each choice's row"""
    owners: Tensor | None = None
    """(R,) each row's expert, if requested"""
    dropped: Tensor | None = None
    """(..., k) whether a choice exceeds the expert's capacity"""


@register
@dataclass(frozen=True, kw_only=True)
class TopK(OpKind):
    """Largest elements along the last axis, with their indices."""

    name = "top_k"
    k: Size
    room: Room | None = None
    """Number of other elements, checked when sizes are bound."""
    smallest: Flag = False
    """Whether to return the smallest elements, in ascending order."""
    flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer values and indices."""
        (x,) = operands
        remaining = None if x.ndim == 0 else (x.sizes[-1] - self.k).constant
        if x.ndim == 0 or (remaining is not None and remaining < 0):
            raise ShapeError(f"top {self.k} of {x!r}: expected a last axis of at least {self.k}")
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
    """Expert choices sorted by expert."""

    name = "dispatch"
    experts: Size
    capacity: Annotated[Poly | None, optional("an amount above 0", _is_above_zero), Limit(0, whole=False)] = None
    """Capacity factor: an expert's rows relative to an even share; None for no limit."""
    owners: Flag = False
    """Whether to also return each row's expert."""
    reads, writes = rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer rows, end offsets and each choice's row."""
        (ids,) = operands
        if ids.dtype.kind != "int" or ids.ndim == 0:
            raise ShapeError(f"dispatch of {ids!r}: expected expert indices (..., k) in an integer format")
        integer, rows = find_dtype("int64"), numel(ids.sizes)
        if self.capacity is not None:
            rows = poly(sympy.ceiling((self.capacity * rows / self.experts).expr)) * self.experts
        results = [Result((rows,), integer), Result((self.experts,), find_dtype("int32")), Result(ids.sizes, integer)]
        results += [Result((rows,), integer)] if self.owners else []
        return results + ([] if self.capacity is None else [Result(ids.sizes, find_dtype("bool"))])

    def placed(self, op: Op) -> Split | None:
        """Split the choices: each rank sorts its own, with local rows, offsets and places."""
        if self.capacity is not None:  # capacities are rounded up globally
            return None
        names = tuple((f"i{i}",) for i in range(op.operands[0].ndim))
        rows = (tuple(n for (n,) in names),)
        extents = {n: size for (n,), size in zip(names, op.operands[0].sizes, strict=True)} | {"e": self.experts}
        results = (rows, (("e",),), names, *([rows] if self.owners else []))
        return Split((names,), results, extents, lambda local_sizes, ranks: self, whole=frozenset({"e", *names[-1]}))

    def flops(self, op: Op) -> Flops:
        """Count one per choice to sort it, one to count it, and the prefix sum over experts."""
        return Flops(pointwise=2 * rules.elements(op.operands[0]) + self.experts)


def _grouped_flops(kind: OpKind, op: Op) -> Flops:
    """Count 2 per row and column of its expert's matrix."""
    rows, columns, _ = op.operands
    return Flops(matmul=2 * numel(rows.sizes) * columns.sizes[-1])


@register
@dataclass(frozen=True, kw_only=True)
class GroupedMatmul(OpKind):
    """Grouped matmul: rows (R, D), sorted by expert, times the expert matrices (E, D, F)."""

    name = "grouped_matmul"
    routing: Annotated[str, one_of(*ROUTINGS)]
    """Routing assumption, which sets how many experts' weights are read."""
    chosen: Annotated[Poly, Rule("an amount above 0", _is_above_zero), Limit(0, whole=False)]
    """Experts that a token chooses; on one rank, the mean number of local ones."""
    dtype: Annotated[DType | None, optional("a number format", lambda v: isinstance(v, DType))] = None
    """Result dtype, None to promote."""
    unpack_flops: Index = 0
    """Operations to unpack each weight element that is read, such as a multiply by a group scale."""
    writes = rules.all_results

    def flops(self, op: Op) -> Flops:
        """Count 2 per row and column of its expert's matrix, and operations to unpack weights."""
        return _grouped_flops(self, op) + Flops(pointwise=self.unpack_flops * self.reads(op)[1])

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one row per input row."""
        rows, weights, ends = operands
        equal = rows.graph.same
        fits = (rows.ndim, weights.ndim, ends.ndim) == (2, 3, 1) and ends.dtype.kind == "int"
        if not fits or not equal(rows.sizes[1], weights.sizes[1]) or not equal(weights.sizes[0], ends.sizes[0]):
            raise ShapeError(
                f"grouped product of {rows!r}, {weights!r} and {ends!r}: expected (rows, d), (experts, d, f) and "
                f"integers (experts,)"
            )
        dtype = promote(rows.dtype, weights.dtype) if self.dtype is None else self.dtype
        return [Result((rows.sizes[0], weights.sizes[2]), dtype)]

    def placed(self, op: Op) -> Split:
        """Split both matrix axes; rows and experts stay whole, as the offsets are global."""
        operands = ((("r",), ("d",)), (("e",), ("d",), ("f",)), (("e",),))
        return sharding_rule.across(
            op, operands, (("r",), ("f",)), lambda own, ranks: self, reduced={"d": "sum"}, whole=frozenset("er")
        )

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return all rows, and the weights of experts that receive rows."""
        rows, weights, ends = rules.whole(self, op)
        experts, count = op.operands[1].sizes[0], op.operands[0].sizes[0]
        if self.routing == "balanced":
            weights = smaller(weights, weights / experts * count)
        elif self.routing == "expected":
            weights = weights / experts * _expected_experts(experts, self.chosen, count / self.chosen)
        return rows, weights, ends


def _expected_experts(experts: Poly, chosen: Poly, tokens: Poly) -> Poly:
    """Return the mean number of distinct experts chosen by tokens with independent uniform routing.

    A token misses an expert with probability 1 - k/E.
    """
    return experts * (ONE - power(ONE - chosen / experts, tokens))


@register
@dataclass(frozen=True, kw_only=True)
class GroupedOuter(OpKind):
    """Sum of outer products per expert: rows (R, D) times rows (R, F), a grouped matmul's weight gradient."""

    name = "grouped_outer"
    flops, reads, writes = _grouped_flops, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer one matrix per expert."""
        a, b, ends = operands
        fits = (a.ndim, b.ndim, ends.ndim) == (2, 2, 1) and ends.dtype.kind == "int"
        if not fits or not a.graph.same(a.sizes[0], b.sizes[0]):
            raise ShapeError(
                f"grouped product of {a!r}, {b!r} and {ends!r}: expected (rows, d), (rows, f) and integers (experts,)"
            )
        return [Result((ends.sizes[0], a.sizes[1], b.sizes[1]), promote(a.dtype, b.dtype))]

    def placed(self, op: Op) -> Split:
        """Split both matrix axes."""
        operands = ((("r",), ("d",)), (("r",), ("f",)), (("e",),))
        return sharding_rule.across(
            op, operands, (("e",), ("d",), ("f",)), lambda own, ranks: self, reduced={"r": "sum"}, whole=frozenset("er")
        )


# -- functions ---------------------------------------------------------------------------------------------------


def top_k(x: Tensor, k: object, *, name: str = "top_k") -> tuple[Tensor, Tensor]:
    """Return the largest elements along the last axis, as `torch.topk`.

    Parameters
    ----------
    x : Tensor
        Shape (..., n).
    k : sympy.Expr or int
        Number of elements, at most n; checked again when sizes are bound.
    name : str
        Op name.

    Returns
    -------
    tuple of Tensor
        Values with the dtype of `x` and indices in int64, both (..., k). FLOPs: 1 per element of `x`.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or its last axis is too short.

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
    """Sort the expert choices from all tokens by expert.

    Parameters
    ----------
    ids : Tensor
        Expert indices, (..., k) in an integer dtype.
    experts : sympy.Expr or int
        Number of experts.
    capacity : number or sympy.Expr, optional
        Capacity factor: each expert has ceiling(capacity * T * k / experts) rows, padded if fewer tokens arrive, and
        further tokens are dropped. By default there is no limit.
    owners : bool
        Whether to also return each row's expert.
    name : str
        Op name.

    Returns
    -------
    Dispatched
        Integer tensors, and a mask for dropped choices. FLOPs: 2 per choice and 1 per expert, in one kernel.

    Raises
    ------
    GraphError, ShapeError
        If an argument is invalid.

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
        capacity=None if capacity is None else _positive_factor("dispatch: capacity", capacity),
        owners=owners,
    )
    tokens, ends, places, *extras = apply(kind, [ids], name)
    owner = extras.pop(0) if owners else None
    return Dispatched(tokens, ends, places, owner, extras.pop() if extras else None)


def _positive_factor(place: str, value: object) -> Poly:
    """Return a positive number or formula; floats count as the decimals that they print."""
    error = GraphError(f"{place} {shown(value)}, expected a number above 0")
    try:
        factor = poly(Fraction(str(value)) if isinstance(value, float) else value)
    except (ShapeError, ValueError):  # ValueError for inf and nan
        raise error from None
    if factor.constant is not None and factor.constant <= 0:
        raise error
    return factor


def grouped_matmul(
    rows: Tensor,
    weights: Tensor,
    ends: Tensor,
    chosen: object,
    *,
    routing: str = "balanced",
    name: str = "grouped_matmul",
) -> Tensor:
    """Multiply each row by its expert's matrix, in one kernel, as torch's `grouped_mm`.

    Parameters
    ----------
    rows : Tensor
        Shape (R, d), sorted by expert.
    weights : Tensor
        Shape (E, d, f).
    ends : Tensor
        Each expert's end offset, (E,) from `dispatch`.
    chosen : sympy.Expr or int
        Experts that a token chooses: the rows belong to R/chosen tokens.
    routing : str
        Assumption on how many experts' weights are read: balanced, Min(E, R); expected, E*(1 - (1 - k/E)**(R/k)), the
        mean for independent uniform choices; capacity, E.
    name : str
        Op name.

    Returns
    -------
    Tensor
        Shape (R, f). FLOPs of kind matmul: 2*R*d*f, including rows that pad a capacity.

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
    ...     y = cg.ops.grouped_matmul(x, w, g.input("ends", (E,), dtype="int32"), 1)
    >>> cg.matmul_flops(g), cg.bytes_moved(g, R=2, E=8, D=16, F=32)  # two experts are read
    (2*D*F*R, 2272)
    """
    need_tensor("grouped_matmul", rows, weights, ends)
    need_choice("grouped_matmul: routing", routing, ROUTINGS)
    kind = GroupedMatmul(routing=routing, chosen=positive("grouped_matmul: chosen", chosen))
    return apply(kind, [rows, weights, ends], name)[0]


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor, *, name: str = "grouped_outer") -> Tensor:
    """Sum outer products per expert: (R, d) and (R, f) to (E, d, f), the gradient of expert weights.

    FLOPs of kind matmul: 2*R*d*f. Experts without rows get zeros, so the whole result is written.
    """
    need_tensor("grouped_outer", a, b, ends)
    return apply(GroupedOuter(), [a, b, ends], name)[0]
