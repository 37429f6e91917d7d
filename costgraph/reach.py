"""Which elements of a tensor the ops of a graph read together: slices add up, whole readers do not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from .dominance import lower
from .extremum import Max, at_least_zero
from .layout import numel
from .op import Op
from .polynomial import ONE, ZERO, Poly, poly, total
from .tensor import Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["at_least", "elements_read", "larger", "points", "together"]


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


def points(t: Tensor, *, stored: bool = False) -> Poly:
    """Return the index points of a tensor that hold anything; with `stored`, each element of an expanded one once."""
    sizes = [ONE if stored and not s else n for n, s in zip(t.sizes, t.strides, strict=True)]
    if t.domain is None:
        return numel(sizes)
    domain, query, key = t.domain
    rest = prod((n for i, n in enumerate(sizes) if i not in (query, key)), start=ONE)
    queries, keys, known = t.sizes[query], t.sizes[key], t.graph.root.relations
    if stored and not t.strides[query]:
        return rest * domain.keys_used(queries, keys, known) if t.strides[key] else rest
    if stored and not t.strides[key]:
        return rest * domain.queries_used(queries, keys, known)
    return rest * domain.points(queries, keys, known)


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
                slices.setdefault(op.attrs["axis"], []).append((*_span(op), inner))
            else:
                most = larger(most, inner)
            continue
        if op.kind.name == "append" and op.operands[0] is tensor and result is not None:
            # what is seen of a cache but was not there before need not come from memory
            inner = elements_read(graph, result)
            new = op.kind.writes(op)[0]
            inner = inner - new if at_least(inner, new) else at_least_zero(inner - new)
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


def together(tensors: Sequence[Tensor]) -> Poly:
    """Return the different elements of tensors of one storage: slices that are apart add up, others may overlap."""
    if len(tensors) == 1:
        return points(tensors[0], stored=True)
    makers = [t.producer for t in tensors]
    slices = [op for op in makers if op is not None and op.kind.name == "slice"]
    if len(slices) == len(tensors) and len({(op.operands[0], op.attrs["axis"]) for op in slices}) == 1:
        return _together([(*_span(op), points(op.results[0], stored=True)) for op in slices])
    most = ZERO
    for t in tensors:
        most = larger(most, points(t, stored=True))
    return most


def _span(op: Op) -> tuple[Poly, Poly]:
    """Return where a slice begins and ends on its axis."""
    start: Poly = op.attrs["start"]
    return start, start + (op.attrs["size"] - 1) * op.attrs["step"] + 1


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
