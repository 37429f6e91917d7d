"""Gradients of lookups and updates by index."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.tensor import Tensor
from ...ops.fill import fill
from ...ops.index import Gather, Scatter, gather, scatter, take_along
from .common import expanded
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


@vjp(Gather)
def _gather(pull: Pull[Gather]) -> Sequence[Tensor | None]:
    """Add what each row got to a table of zeros, as torch's `embedding_dense_backward`."""
    (g,), (table, ids) = pull.grads, pull.op.operands
    if g is None or not pull.needs[0]:
        return [None, None]
    zeros = fill(table.sizes, 0, table.dtype)
    return [scatter(zeros, pull.saved(ids), g, "add", along=pull.kind.mode == "along"), None]


@vjp(Scatter)
def _scatter(pull: Pull[Scatter]) -> Sequence[Tensor | None]:
    """Look up what the updates got; of rows that were overwritten the target has no gradient."""
    (g,), (_, ids, updates) = pull.grads, pull.op.operands
    assert g is not None
    along = pull.kind.along
    target = g if pull.needs[0] else None
    if target is not None and pull.kind.mode == "set":
        zeros = expanded(fill((), 0, updates.dtype), updates.sizes, (None,) * updates.ndim)
        target = scatter(g, pull.saved(ids), zeros, "set", inplace=False, along=along)
    look = take_along if along else gather
    return [target, None, look(g, pull.saved(ids)) if pull.needs[2] else None]
