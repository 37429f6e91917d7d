"""Gradients of choosing the largest and of products by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...graph.graph import apply
from ...graph.tensor import Tensor
from ...ops.fill import fill
from ...ops.grouped import Grouped, GroupedOuter, TopK, grouped_outer
from ...ops.index import scatter
from ...ops.layout import permute, rearrange
from ...ops.ordering import Sort
from ...ops.pointwise import cast
from .common import order_of_parameter
from .table import Pull, vjp

__all__: list[str] = []  # its rules are found in RULES


@vjp(TopK, Sort)
def _top_k(pull: Pull[Any]) -> Sequence[Tensor | None]:
    """Put the gradients of the values where they were found, as torch's `value_selecting_reduction_backward`."""
    g, op = pull.grads[0], pull.op
    if g is None or not pull.needs[0]:
        return [None]
    (x,) = op.operands
    return [scatter(fill(x.sizes, 0, x.dtype), pull.saved(op.results[1]), g, "set", along=True)]


@vjp(Grouped)
def _grouped(pull: Pull[Grouped]) -> Sequence[Tensor | None]:
    """Multiply by the experts' matrices the other way round, and add up outer products by expert."""
    (g,), op = pull.grads, pull.op
    assert g is not None
    rows, weights, ends = op.operands
    made: list[Tensor | None] = [None, None, None]
    if pull.needs[0]:
        back = rearrange(pull.saved(weights), "e d f -> e f d")
        made[0] = cast(apply(pull.kind, [g, back, pull.saved(ends)], "grouped")[0], rows.dtype)
    if pull.needs[1]:
        turned = order_of_parameter(weights) == (0, 2, 1)
        first, second = (g, pull.saved(rows)) if turned else (pull.saved(rows), g)
        outer = cast(grouped_outer(first, second, pull.saved(ends)), weights.dtype)
        made[1] = permute(outer, (0, 2, 1)) if turned else outer
    return made


@vjp(GroupedOuter)
def _grouped_outer(pull: Pull[GroupedOuter]) -> Sequence[Tensor | None]:
    """Multiply each row by the gradient of its expert: of every expert, whatever is assumed of routing."""
    (g,), (a, b, ends) = pull.grads, pull.op.operands
    assert g is not None
    every = Grouped(routing="capacity", chosen=ends.sizes[0])
    made: list[Tensor | None] = [None, None, None]
    if pull.needs[0]:
        back = rearrange(g, "e d f -> e f d")
        made[0] = cast(apply(every, [pull.saved(b), back, pull.saved(ends)], "grouped")[0], a.dtype)
    if pull.needs[1]:
        made[1] = cast(apply(every, [pull.saved(a), g, pull.saved(ends)], "grouped")[0], b.dtype)
    return made
