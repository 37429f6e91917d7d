"""Gradients of lookups and updates by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import UnsupportedError
from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.fill import fill
from ...ops.index import Gather, Scatter, gather, scatter
from ...ops.pointwise import cast, pointwise
from .common import also_saved, expanded
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


@vjp(Gather)
def _gather(pull: Pull[Gather]) -> Sequence[Tensor | None]:
    """Add what each row got to a table of zeros, as torch's `embedding_dense_backward`."""
    (g,), (table, *ids) = pull.grads, pull.op.operands
    if g is None or not pull.needs[0]:
        return [None, *(None for _ in ids)]
    if pull.kind.batch:  # `take_along`
        also_saved(pull, table)
    kind = Scatter(mode="add", inplace=True, batch=pull.kind.batch, passed=pull.kind.passed)
    added = apply(kind, [fill(table.sizes, 0, table.dtype), *map(pull.saved, ids), g], "scatter")
    return [*added, *(None for _ in ids)]


@vjp(Scatter)
def _scatter(pull: Pull[Scatter]) -> Sequence[Tensor | None]:
    """Look up what the updates got; of rows that were overwritten the target has no gradient."""
    (g,), (_, *ids, updates) = pull.grads, pull.op.operands
    assert g is not None
    if pull.kind.passed is not None:
        raise UnsupportedError(f"backward of {pull.op.name!r}: it passes row {pull.kind.passed} by, expected all rows")
    if pull.kind.mode == "max":
        return _largest(pull, g)
    if [t.ndim for t in ids] == [1] and not pull.kind.inplace:  # `index_add` and `index_copy` ask it for its shape
        also_saved(pull, updates)
    target, rows = g if pull.needs[0] else None, list(map(pull.saved, ids))
    if target is not None and pull.kind.mode == "set":
        zeros = expanded(fill((), 0, updates.dtype), updates.sizes, (None,) * updates.ndim)
        (target,) = apply(replace(pull.kind, inplace=False), [g, *rows, zeros], "scatter")
    found = apply(Gather(batch=pull.kind.batch), [g, *rows], "gather")[0] if pull.needs[-1] else None
    return [target, *(None for _ in ids), found]


def _largest(pull: Pull[Scatter], g: Tensor) -> Sequence[Tensor | None]:
    """Share the gradient among what is as large as the result, as torch's `scatter_reduce_backward` of amax."""
    batch, (target, ids, updates) = pull.kind.batch, pull.op.operands
    if pull.kind.inplace:
        raise UnsupportedError(
            f"backward of {pull.op.name!r}: a maximum in place leaves nothing of its target, expected inplace=False"
        )
    rows, result = pull.saved(ids), pull.saved(pull.op.results[0])
    own = pointwise("eq", pull.saved(target), result)
    theirs = pointwise("eq", pull.saved(updates), gather(result, rows, batch=batch))
    count = scatter(cast(own, g.dtype), rows, cast(theirs, g.dtype), "add", batch=batch)
    each = pointwise("div", g, count)
    made = pointwise("mul", each, own) if pull.needs[0] else None
    return [made, None, pointwise("mul", gather(each, rows, batch=batch), theirs) if pull.needs[2] else None]
