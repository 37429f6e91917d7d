"""Indexed reads and writes, index ranges and sorting: costs count the rows touched, not the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Annotated, ClassVar

from ..algebra.polynomial import ONE, ZERO, Poly
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import GraphError, ShapeError
from ..ir.graph import (
    Flag,
    Flops,
    Index,
    Length,
    Op,
    OpKind,
    Result,
    Split,
    Start,
    Tensor,
    apply,
    is_count,
    itself,
    need_choice,
    need_flag,
    need_tensor,
    one_of,
    optional,
    positive,
)
from ..ir.strides import distinct
from . import rules
from . import sharding_rule as splits
from .layout import permute
from .registry import register

__all__ = [
    "Arange",
    "Gather",
    "Scatter",
    "arange",
    "gather",
    "reverse",
    "scatter",
    "take_along",
    "Sort",
    "sort",
]


# -- gather and scatter ------------------------------------------------------------------------------------------------


def _need_integers(ids: Tensor) -> None:
    if ids.dtype.kind != "int":
        raise ShapeError(f"indices {ids!r}: expected an integer format")


def _need_batch(table: Tensor, places: Sequence[Tensor], batch: int) -> None:
    ids = places[0]
    for t in places:
        _need_integers(t)
        if t.ndim != ids.ndim or not all(map(table.graph.same, t.sizes, ids.sizes)):
            raise ShapeError(f"indices {t!r} with {ids!r}: expected equal shapes")
    if len(places) > 1 and (batch or table.ndim < len(places)):
        raise ShapeError(
            f"{len(places)} index tensors into {table!r}: expected a table axis for each and no batch axes"
        )
    if table.ndim <= batch:
        expected = "one axis" if not batch else f"{batch + 1} axes, {batch} of them batch axes"
        raise ShapeError(f"rows of {table!r}: expected at least {expected}")
    shared = zip(table.sizes[:batch], ids.sizes[:batch], strict=True) if ids.ndim >= batch else [(None, None)]
    if not all(a is not None and b is not None and table.graph.same(a, b) for a, b in shared):
        raise ShapeError(f"indices {ids!r} into {table!r}: expected equal sizes on the first {batch} axes of both")


Axes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Indexed(OpKind):
    """Indexed access to table rows along axis `batch`; tables and indices share the axes before it.

    With `batch` 0, indices select rows of the whole table; if `batch` is the last axis, rows are single elements.
    Several index tensors, all with one shape, each index one table axis, from the first on.
    """

    after: ClassVar[int] = 0
    """Number of operands after the indices."""
    batch: Index = 0
    padding_idx: Annotated[int | None, optional("the number of a row", is_count)] = None
    """Row that receives no gradient, as in torch's `Embedding`."""
    mesh_axis: str = ""
    """Mesh axis that splits the rows: other ranks' rows read as zeros, and writes to them are skipped."""

    def places(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the index tensors."""
        return operands[1 : len(operands) - self.after]

    def names(self, op: Op) -> tuple[Axes, Axes, tuple[str, ...]]:
        """Return the factors of table axes and index axes, and the indexed ones among them."""
        count, table, ids = len(self.places(op.operands)), op.operands[0], op.operands[1]
        batch = tuple((f"b{i}",) for i in range(self.batch))
        rows = tuple(f"v{i}" for i in range(count))
        row_axes = tuple((f"r{i}",) for i in range(table.ndim - self.batch - count))
        return (
            (*batch, *((n,) for n in rows), *row_axes),
            (*batch, *((f"i{i}",) for i in range(self.batch, ids.ndim))),
            rows,
        )

    def row(self, operands: Sequence[Tensor]) -> slice:
        """Return a row's table axes, as a slice."""
        return slice(self.batch + len(self.places(operands)), None)

    def different(self, ids: Sequence[Tensor]) -> Poly:
        """Return the maximal number of distinct indexed positions; expanded axes count once."""
        strides = [
            next((s for s in axis_strides if s), ZERO) for axis_strides in zip(*(t.strides for t in ids), strict=True)
        ]
        return distinct(ids[0].sizes[self.batch :], strides[self.batch :]) if ids else ONE


def _with_row_shard(
    kind: Indexed, rows: Sequence[str], extents: Mapping[str, Poly], ranks: Mapping[str, str]
) -> OpKind:
    """Return the op kind for a rank with a shard of the rows."""
    return replace(kind, mesh_axis=ranks.get(rows[0], "")) if rows else kind


@register
@dataclass(frozen=True, kw_only=True)
class Gather(Indexed):
    """Table rows, selected by index."""

    name = "gather"
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the selected rows."""
        rules.need_operands(self, operands[:2], 2)
        table, ids = operands[0], self.places(operands)
        _need_batch(table, ids, self.batch)
        return [Result((*ids[0].sizes, *table.sizes[self.row(operands)]), table.dtype)]

    def placed(self, op: Op) -> Split:
        """Split rows, indices and row contents; with split rows, results are partial sums over ranks."""
        table, ids, rows = self.names(op)
        result = (*ids, *table[self.batch + len(rows) :])
        reduced = dict.fromkeys(rows, "sum") if len(rows) == 1 else {}
        return splits.across(
            op,
            [table, *(ids for _ in rows)],
            result,
            partial(_with_row_shard, self, rows),
            reduced=reduced,
            once=frozenset(rows),
        )

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the selected rows, not the table, and the indices."""
        (table, *ids), batch, row = op.operands, self.batch, self.row(op.operands)
        # rows in an expanded table are all the same
        moving = [t for t, stride in zip(ids, table.strides[batch:], strict=False) if stride]
        lead = zip(ids[0].sizes[:batch], ids[0].strides[:batch], table.strides[:batch], strict=True)
        rows = prod((n for n, i, t in lead if t or (i and moving)), start=ONE)
        row_elements = rows * self.different(moving) * distinct(table.sizes[row], table.strides[row])
        return row_elements, *map(rules.elements, ids)


@register
@dataclass(frozen=True, kw_only=True)
class Scatter(Indexed):
    """Updates that are added to target rows, replace them, or are maximized with them."""

    name = "scatter"
    after = 1
    mode: Annotated[str, one_of("add", "set", "max")]
    inplace: Flag = False
    """Whether it writes into the target, else into a copy."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the updated target."""
        rules.need_operands(self, operands[:3], 3)
        (target, *_, updates), (ids, *other_ids) = operands, self.places(operands)
        _need_batch(target, [ids, *other_ids], self.batch)
        if other_ids and self.mode == "max":
            raise ShapeError(f"maximum in {target!r} by {len(other_ids) + 1} index tensors: expected one")
        expected = (*ids.sizes, *target.sizes[self.row(operands)])
        if len(expected) != updates.ndim or not all(map(target.graph.same, expected, updates.sizes)):
            raise ShapeError(
                f"updates {updates!r}: expected ({', '.join(map(str, expected))}) for {ids!r} into {target!r}"
            )
        if updates.dtype != target.dtype:
            raise ShapeError(f"updates {updates!r} into {target!r}: expected the same number format")
        return [itself(target) if self.inplace else Result(target.sizes, target.dtype)]

    def placed(self, op: Op) -> Split:
        """Split rows and their contents; split updates only if the target is zero or a partial sum."""
        table, ids, rows = self.names(op)
        row_axes = table[self.batch + len(rows) :]
        index_axes = {n for axis in ids for n in axis} - {n for axis in table for n in axis}
        return splits.across(
            op, [table, *(ids for _ in rows), (*ids, *row_axes)], table, partial(_with_row_shard, self, rows),
            reduced=dict.fromkeys(index_axes, "sum") if self.mode == "add" else {}, into=0, once=frozenset(rows),
            whole=frozenset(rows) if len(rows) > 1 else frozenset(),
        )  # fmt: skip

    def flops(self, op: Op) -> Flops:
        """Count an addition or comparison for each update element."""
        return Flops() if self.mode == "set" else Flops(pointwise=rules.points(op.operands[-1]))

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return indices and updates, and the target: its rows if they are read in place, or all of a copy."""
        target, *others = op.operands
        rows = ZERO if self.mode == "set" else self._rows(op)
        return (rows if self.inplace else rules.elements(target)), *map(rules.elements, others)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the changed rows, or the whole copy."""
        return (self._rows(op),) if self.inplace else rules.all_results(self, op)

    def overwrites(self) -> tuple[int, ...]:
        """Return the target if the op works in place."""
        return (0,) if self.inplace else ()

    def _rows(self, op: Op) -> Poly:
        """Return the number of target elements that updates reach."""
        sizes, row_count = op.operands[0].sizes, self.different(self.places(op.operands))
        return prod((*sizes[: self.batch], *sizes[self.row(op.operands)]), start=row_count)


@register
@dataclass(frozen=True, kw_only=True)
class Arange(OpKind):
    """Consecutive integers."""

    name = "arange"
    size: Length
    dtype: DType
    context: Flag = False
    """Whether these are key positions: in `decode`, key positions cover the cache, others only the new tokens."""
    start: Start = ZERO
    reverse: Flag = False
    """Whether they count down from the start."""
    flops, reads, writes = rules.free, rules.no_operands, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer the integers."""
        rules.need_operands(self, operands, 0)
        return [Result((self.size,), self.dtype)]


def gather(table: Tensor, ids: Tensor, *, batch: int = 0, name: str = "gather") -> Tensor:
    """Select rows by index: `table[ids]`, with the index axes first, then the row axes.

    Parameters
    ----------
    table : Tensor
        Rows along the axis after the batch axes.
    ids : Tensor
        Integer indices.
    batch : int
        Number of leading axes that table and indices share: with 1, each sequence in a batch selects among its own
        positions, (B, T, D) by (B, K) to (B, K, D).
    name : str
        Op name.

    Returns
    -------
    Tensor
        No FLOPs; reads the indices and one row per index, writes the rows.

    Raises
    ------
    GraphError, ShapeError
        If the indices are not integers, or the batch axes differ.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, V, D = cg.dims("B S V D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.ops.gather(g.param("table", (V, D)), g.input("ids", (B, S), dtype="int64"))
    >>> cg.bytes_moved(g)
    8*B*D*S + 8*B*S
    """
    need_tensor("gather", table, ids)
    return apply(Gather(batch=_checked_batch("gather", batch)), [table, ids], name)[0]


def _checked_batch(place: str, batch: int) -> int:
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 0:
        raise GraphError(f"{place}: batch {batch!r}, expected a number of leading axes")
    return batch


def take_along(x: Tensor, ids: Tensor, *, name: str = "take_along") -> Tensor:
    """Select elements along the last axis: `numpy.take_along_axis(x, ids, -1)`, as a loss selects its targets."""
    need_tensor("take_along", x, ids)
    return apply(Gather(batch=_last_axis(x, ids)), [x, ids], name)[0]


def reverse(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Reverse some axes, as `numpy.flip`: a copy by index."""
    for axis in axes:
        n, order = x.sizes[axis], [axis, *(i for i in range(x.ndim) if i != axis)]
        (places,) = apply(Arange(size=n, dtype=find_dtype("int64"), start=n - 1, reverse=True), [], "arange")
        x = permute(gather(permute(x, order), places), [order.index(i) for i in range(x.ndim)])
    return x


def _last_axis(x: Tensor, ids: Tensor) -> int:
    _need_integers(ids)
    fits = x.ndim == ids.ndim > 0 and all(map(x.graph.same, x.sizes[:-1], ids.sizes[:-1]))
    if not fits:
        raise ShapeError(f"indices {ids!r} along {x!r}: expected the same axes except the last")
    return x.ndim - 1


def scatter(
    target: Tensor,
    ids: Tensor,
    updates: Tensor,
    mode: str = "add",
    *,
    inplace: bool = True,
    batch: int = 0,
    along: bool = False,
    name: str = "scatter",
) -> Tensor:
    """Add updates to target rows, replace rows, or take the maximum: the reverse of `gather`.

    Parameters
    ----------
    target : Tensor
        Rows along the axis after the batch axes.
    ids : Tensor
        Row index for each update.
    updates : Tensor
        Updates, with the index axes first, then the row axes.
    mode : str
        add (one FLOP per update element), max (a comparison per element) or set (no FLOPs).
    inplace : bool
        Whether to write into the target instead of a copy.
    batch : int
        Number of leading axes that target and indices share, as in `gather`.
    along : bool
        Whether indices are positions along the last axis, as in `take_along`; all other axes are batch axes.
    name : str
        Op name.

    Returns
    -------
    Tensor
        The updated target.

    Raises
    ------
    GraphError, ShapeError
        If the mode is unknown, or shapes or dtypes do not fit.
    """
    need_choice("scatter: mode", mode, ("add", "set", "max"))
    need_flag("scatter", inplace=inplace, along=along)
    need_tensor("scatter", target, ids, updates)
    kind = Scatter(
        mode=mode, inplace=inplace, batch=_last_axis(target, ids) if along else _checked_batch("scatter", batch)
    )
    return apply(kind, [target, ids, updates], name)[0]


def arange(size: object, dtype: object = "int64", *, context: bool = False, name: str = "arange") -> Tensor:
    """Create the integers 0 to size - 1 in the open graph: no FLOPs, one write.

    Parameters
    ----------
    size : sympy.Expr or int
        Number of integers.
    dtype : str or DType
        Dtype.
    context : bool
        Whether these are key positions: in `decode`, key positions cover the cache, others only the new tokens.
    name : str
        Op name.

    Returns
    -------
    Tensor
        Shape (size,).
    """
    need_flag("arange", context=context)
    kind = Arange(size=positive("arange: size", size), dtype=find_dtype(dtype), context=context)
    return apply(kind, [], name)[0]


# -- sorting -----------------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True, kw_only=True)
class Sort(OpKind):
    """Elements sorted along the last axis, with their original indices."""

    name = "sort"
    descending: Flag = False
    flops, reads, writes = rules.per_element_reduced, rules.whole, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Infer values and indices."""
        rules.need_operands(self, operands, 1)
        (x,) = operands
        if not x.ndim:
            raise ShapeError(f"sort of {x!r}: expected at least one axis")
        return [Result(x.sizes, x.dtype), Result(x.sizes, find_dtype("int64"))]

    def placed(self, op: Op) -> Split:
        """Split the other axes."""
        return splits.alike(op, whole=[op.results[0].ndim - 1])


def sort(x: Tensor, *, descending: bool = False, name: str = "sort") -> tuple[Tensor, Tensor]:
    """Sort the elements along the last axis, as `torch.sort`.

    Parameters
    ----------
    x : Tensor
        Shape (..., n).
    descending : bool
        Whether the largest comes first.
    name : str
        Op name.

    Returns
    -------
    tuple of Tensor
        Values with the dtype of `x` and indices in int64, both with its shape. FLOPs: 1 per element, as `top_k`; the
        number of comparisons depends on the algorithm, and radix sorts need none.

    Raises
    ------
    GraphError, ShapeError
        If `x` is not a tensor, or has no axis.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S = cg.dims("B S")
    >>> with cg.Graph("g") as g:
    ...     values, ids = cg.ops.sort(g.input("x", (B, S)))
    >>> ids.shape, cg.flops(g), cg.bytes_moved(g)
    ((B, S), B*S, 16*B*S)
    """
    need_tensor("sort", x)
    need_flag("sort", descending=descending)
    values, ids = apply(Sort(descending=descending), [x], name)
    return values, ids
