"""Lookups and updates by index: rows touched, not the table."""

from __future__ import annotations

from collections.abc import Sequence

from ..algebra.polynomial import Poly
from ..dtypes import dtype as find_dtype
from ..errors import ShapeError
from ..graph.arguments import need_choice, need_flag, positive
from ..graph.graph import apply
from ..graph.op import Attrs, Op, OpKind, Result
from ..graph.strides import Sizes
from ..graph.tensor import Tensor
from . import rules
from .registry import register

__all__ = ["GATHER", "SCATTER", "arange", "gather", "scatter", "take_along"]


def _need_integers(ids: Tensor) -> None:
    if ids.dtype.kind != "int":
        raise ShapeError(f"indices {ids!r}: expected an integer format")


def _gathered(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    table, ids = operands
    _need_integers(ids)
    if attrs["mode"] == "rows":
        if table.ndim == 0:
            raise ShapeError(f"gather from {table!r}: expected at least one axis")
        return [Result((*ids.sizes, *table.sizes[1:]), table.dtype)]
    if table.ndim != ids.ndim or not all(map(table.graph.same, table.sizes[:-1], ids.sizes[:-1])):
        raise ShapeError(f"indices {ids!r} along {table!r}: expected the same axes except the last")
    return [Result(ids.sizes, table.dtype)]


def _scattered(operands: Sequence[Tensor], attrs: Attrs) -> Sequence[Result]:
    target, ids, updates = operands
    _need_integers(ids)
    expected: Sizes = ids.sizes if attrs.get("along") else (*ids.sizes, *target.sizes[1:])
    if attrs.get("along") and (
        target.ndim != ids.ndim or not all(map(target.graph.same, target.sizes[:-1], ids.sizes[:-1]))
    ):
        raise ShapeError(f"indices {ids!r} along {target!r}: expected the same axes except the last")
    if len(expected) != updates.ndim or not all(map(target.graph.same, expected, updates.sizes)):
        raise ShapeError(f"updates {updates!r}: expected ({', '.join(map(str, expected))}) for {ids!r} into {target!r}")
    if updates.dtype != target.dtype:
        raise ShapeError(f"updates {updates!r} into {target!r}: expected one number format")
    if not attrs.get("inplace"):
        return [Result(target.sizes, target.dtype)]
    return [Result(target.sizes, target.dtype, target.strides, of=0, offset=target.offset)]


def _scatter_reads(op: Op) -> tuple[Poly, ...]:
    # a result of its own starts as a copy of the target
    rows = rules.rows_written(op)
    return rows if op.attrs.get("inplace") else (rules.elements(op.operands[0]), *rows[1:])


def _scatter_writes(op: Op) -> tuple[Poly, ...]:
    return rules.updates_written(op) if op.attrs.get("inplace") else rules.all_results(op)


GATHER = register(OpKind("gather", _gathered, flops=rules.free, reads=rules.rows_read, writes=rules.all_results))
SCATTER = register(OpKind("scatter", _scattered, flops=rules.per_update, reads=_scatter_reads, writes=_scatter_writes))
ARANGE = register(
    OpKind(
        "arange",
        lambda operands, attrs: [Result((attrs["size"],), attrs["dtype"])],
        flops=rules.free,
        reads=lambda op: (),
        writes=rules.all_results,
    )
)


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
    return apply(GATHER, [table, ids], {"mode": "rows"}, name)[0]


def take_along(x: Tensor, ids: Tensor, *, name: str = "take_along") -> Tensor:
    """Pick elements along the last axis: `numpy.take_along_axis(x, ids, -1)`, as a loss picks its targets."""
    return apply(GATHER, [x, ids], {"mode": "along"}, name)[0]


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
    attrs = {"mode": mode, **({"inplace": True} if inplace else {}), **({"along": True} if along else {})}
    return apply(SCATTER, [target, ids, updates], attrs, name)[0]


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
    attrs = {"size": positive("arange: size", size), "dtype": find_dtype(dtype)} | (
        {"context": True} if context else {}
    )
    return apply(ARANGE, [], attrs, name)[0]
