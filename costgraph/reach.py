"""Which elements of a tensor the ops of a graph read together: slices add up, whole readers do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from .dominance import lower
from .extremum import Max
from .op import Op
from .polynomial import ZERO, Poly, poly, total
from .tensor import Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["at_least", "elements_read", "larger"]


def at_least(a: Poly, b: Poly) -> bool:
    """Whether `a >= b` is known of two amounts for all sizes."""
    if a == b or not b:  # amounts are never negative
        return True
    least = lower(a - b)
    return least is not None and least >= 0


def larger(a: Poly, b: Poly) -> Poly:
    """Return the larger of two amounts, a Max where it depends on the sizes."""
    if not a:
        return b
    return a if at_least(a, b) else b if at_least(b, a) else poly(Max(a.expr, b.expr))


def elements_read(graph: Graph, tensor: Tensor) -> Poly:
    """Return the different elements of a tensor that the ops of a graph read.

    Parameters
    ----------
    graph : Graph
        The tensor is one of its nodes; bodies are followed.
    tensor : Tensor
        What is read, directly or through views.

    Returns
    -------
    Poly
        Elements. Of readers whose parts may overlap the widest one counts, so that it is never too much.
    """
    most = ZERO
    slices: dict[int, list[tuple[Poly, Poly, Poly]]] = {}
    for op in graph.successors(tensor):
        result = op.results[0] if op.results else None
        if (
            op.kind.body is None
            and result is not None
            and result.storage is tensor.storage
            and not op.attrs.get("inplace")
        ):
            inner = elements_read(graph, result)
            if op.kind.name == "slice":
                start, size, step = op.attrs["start"], op.attrs["size"], op.attrs["step"]
                slices.setdefault(op.attrs["axis"], []).append((start, start + (size - 1) * step + 1, inner))
            else:
                most = larger(most, inner)
            continue
        most = larger(most, _read_by(op, tensor))
    for parts in slices.values():
        most = larger(most, _together(parts))
    return most


def _read_by(op: Op, tensor: Tensor) -> Poly:
    most = ZERO
    amounts: Sequence[Poly] = () if op.kind.body == "repeated" else op.kind.reads(op)
    for i, t in enumerate(op.operands):
        if t is not tensor:
            continue
        if op.kind.body == "repeated":
            most = larger(most, _read_by_loop(op, i))
        elif i < len(amounts):
            most = larger(most, amounts[i])
    return most


def _read_by_loop(op: Op, i: int) -> Poly:
    body, first = op.body, op.attrs["carries"]
    assert body is not None
    inner = elements_read(body, body.formals[i])
    return inner * op.attrs["count"] if first <= i < first + op.attrs["xs"] else inner


def _together(parts: list[tuple[Poly, Poly, Poly]]) -> Poly:
    """Add up slices of one axis that are known not to overlap; of others take the widest."""
    parts = list(dict.fromkeys(parts))
    if all(begin.constant is not None for begin, _, _ in parts):
        parts.sort(key=lambda part: part[0].constant or 0)
        apart = all(at_least(b[0], a[1]) for a, b in pairwise(parts))
    else:
        apart = all(at_least(b[0], a[1]) or at_least(a[0], b[1]) for i, a in enumerate(parts) for b in parts[i + 1 :])
    if apart:
        return total(amount for _, _, amount in parts)
    most = ZERO
    for _, _, amount in parts:
        most = larger(most, amount)
    return most
