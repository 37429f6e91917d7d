"""Lookups and updates by index: rows touched, not the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated

from ..algebra.polynomial import ONE, ZERO, Poly
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..graph.arguments import need_choice, need_flag, positive
from ..graph.facts import Amount, Flag, Size, one_of
from ..graph.graph import apply
from ..graph.op import Flops, Op, OpKind, Result
from ..graph.strides import Sizes, distinct
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["Arange", "Gather", "Scatter", "arange", "gather", "scatter", "take_along"]


def _need_integers(ids: Tensor) -> None:
    if ids.dtype.kind != "int":
        raise ShapeError(f"indices {ids!r}: expected an integer format")


def _need_along(table: Tensor, ids: Tensor) -> None:
    if table.ndim != ids.ndim or not all(map(table.graph.same, table.sizes[:-1], ids.sizes[:-1])):
        raise ShapeError(f"indices {ids!r} along {table!r}: expected the same axes except the last")


@register
@dataclass(frozen=True, kw_only=True)
class Gather(OpKind):
    """Rows of a table by index, or elements along its last axis."""

    name = "gather"
    mode: Annotated[str, one_of("rows", "along")]
    flops, writes = rules.free, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return what is looked up."""
        rules.need_operands(self, operands, 2)
        table, ids = operands
        _need_integers(ids)
        if self.mode == "along":
            _need_along(table, ids)
            return [Result(ids.sizes, table.dtype)]
        if table.ndim == 0:
            raise ShapeError(f"gather from {table!r}: expected at least one axis")
        return [Result((*ids.sizes, *table.sizes[1:]), table.dtype)]

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return the rows of a table that are looked up, not the table, and the indices."""
        table, ids = op.operands
        if self.mode == "along":
            *lead, last = zip(ids.sizes, ids.strides, table.strides, strict=True)
            rows = prod((n for n, i, t in lead if t or (i and last[2])), start=ONE)
            found = last[0] if last[1] and last[2] else ONE
            return rows * found, rules.elements(ids)
        rows = rules.elements(ids) if table.strides[0] else ONE  # all rows of an expanded table are one
        return rows * distinct(table.sizes[1:], table.strides[1:]), rules.elements(ids)


@register
@dataclass(frozen=True, kw_only=True)
class Scatter(OpKind):
    """Updates that are added to rows of a target, or written over them."""

    name = "scatter"
    mode: Annotated[str, one_of("add", "set")]
    inplace: Flag = False
    """Whether it writes into the target's storage, else into a copy."""
    along: Flag = False
    """Whether indices are positions along the last axis."""

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return the target with the updates in it."""
        rules.need_operands(self, operands, 3)
        target, ids, updates = operands
        _need_integers(ids)
        expected: Sizes = ids.sizes if self.along else (*ids.sizes, *target.sizes[1:])
        if self.along:
            _need_along(target, ids)
        if len(expected) != updates.ndim or not all(map(target.graph.same, expected, updates.sizes)):
            raise ShapeError(
                f"updates {updates!r}: expected ({', '.join(map(str, expected))}) for {ids!r} into {target!r}"
            )
        if updates.dtype != target.dtype:
            raise ShapeError(f"updates {updates!r} into {target!r}: expected one number format")
        if not self.inplace:
            return [Result(target.sizes, target.dtype)]
        return [Result(target.sizes, target.dtype, target.strides, of=0, offset=target.offset)]

    def flops(self, op: Op) -> Flops:
        """Count one addition for each element that is scattered."""
        return Flops(pointwise=rules.points(op.operands[-1])) if self.mode == "add" else Flops()

    def reads(self, op: Op) -> tuple[Poly, ...]:
        """Return indices and updates, and what the result starts as: rows that are added to, or a copied target."""
        target, ids, updates = op.operands
        rows = self._rows(op) if self.mode == "add" else ZERO
        return (rows if self.inplace else rules.elements(target)), rules.elements(ids), rules.elements(updates)

    def writes(self, op: Op) -> tuple[Poly, ...]:
        """Return the rows that change, or a result of its own whole."""
        return (self._rows(op),) if self.inplace else rules.all_results(self, op)

    def overwrites(self) -> tuple[int, ...]:
        """Return the target where it works in place."""
        return (0,) if self.inplace else ()

    def _rows(self, op: Op) -> Poly:
        """Return the elements of its target that it reaches: an expanded axis of indices is one row again."""
        target, ids, _ = op.operands
        if not self.along:
            return rules.elements(ids) * prod(target.sizes[1:], start=ONE)
        return prod(target.sizes[:-1], start=ids.sizes[-1] if ids.strides[-1] else ONE)


@register
@dataclass(frozen=True, kw_only=True)
class Arange(OpKind):
    """Consecutive integers."""

    name = "arange"
    size: Size
    dtype: DType
    context: Flag = False
    """Whether these are positions of keys: in `decode` then all that are cached, otherwise the new ones alone."""
    start: Amount = ZERO
    flops, reads, writes = rules.free, rules.no_operands, rules.all_results

    def infer(self, operands: Sequence[Tensor]) -> Sequence[Result]:
        """Return them."""
        rules.need_operands(self, operands, 0)
        return [Result((self.size,), self.dtype)]


def gather(table: Tensor, ids: Tensor, *, name: str = "gather") -> Tensor:
    """Look up rows: `table[ids]`, shape of `ids` followed by that of a row.

    Parameters
    ----------
    table : Tensor
        Rows along its first axis.
    ids : Tensor
        Indices of an integer format.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        No FLOPs; reads one row for each index and the indices, writes the rows.

    Raises
    ------
    ShapeError
        If the indices are no integers.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, S, V, D = cg.dims("B S V D")
    >>> with cg.Graph("g") as g:
    ...     y = cg.ops.gather(g.param("table", (V, D)), g.input("ids", (B, S), dtype="int64"))
    >>> cg.bytes_moved(g)
    8*B*D*S + 8*B*S
    """
    return apply(Gather(mode="rows"), [table, ids], name)[0]


def take_along(x: Tensor, ids: Tensor, *, name: str = "take_along") -> Tensor:
    """Pick elements along the last axis: `numpy.take_along_axis(x, ids, -1)`, as a loss picks its targets."""
    return apply(Gather(mode="along"), [x, ids], name)[0]


def scatter(
    target: Tensor,
    ids: Tensor,
    updates: Tensor,
    mode: str = "add",
    *,
    inplace: bool = True,
    along: bool = False,
    name: str = "scatter",
) -> Tensor:
    """Add rows to those of a target, or overwrite them: the reverse of `gather`.

    Parameters
    ----------
    target : Tensor
        Rows along its first axis.
    ids : Tensor
        Which row each update belongs to.
    updates : Tensor
        Shape of `ids` followed by that of a row; with `along` that of `ids`.
    mode : str
        add (one FLOP for each element of the updates) or set (none).
    inplace : bool
        Write into the target's storage; otherwise into a copy of it.
    along : bool
        Indices are positions along the last axis, as in `take_along`, and not rows.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        The target with the updates in it.

    Raises
    ------
    GraphError, ShapeError
        If the mode is unknown, or shapes or formats do not fit.
    """
    need_choice("scatter: mode", mode, ("add", "set"))
    need_flag("scatter", inplace=inplace, along=along)
    return apply(Scatter(mode=mode, inplace=inplace, along=along), [target, ids, updates], name)[0]


def arange(size: object, dtype: object = "int64", *, context: bool = False, name: str = "arange") -> Tensor:
    """Make 0, 1, ..., size - 1: no FLOPs, one write. The graph is the one that is open.

    Parameters
    ----------
    size : sympy.Expr or int
        How many.
    dtype : str or DType
        Number format.
    context : bool
        Whether these are positions of keys: in `decode` then all that are cached, otherwise the new ones alone.
    name : str
        Name of the op.

    Returns
    -------
    Tensor
        Shape (size,).
    """
    need_flag("arange", context=context)
    kind = Arange(size=positive("arange: size", size), dtype=find_dtype(dtype), context=context)
    return apply(kind, [], name)[0]
