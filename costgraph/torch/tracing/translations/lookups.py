"""Lookups by index, what adds to rows or writes over them, and orders."""

from __future__ import annotations

from collections.abc import Sequence

from ....algebra.polynomial import poly
from ....graph.graph import apply
from ....graph.tensor import Tensor
from ....ops.fill import fill
from ....ops.grouped import TopK
from ....ops.index import gather, scatter, take_along
from ....ops.layout import broadcast
from ....ops.ordering import Sort
from ..call import Call
from ..rules.amounts import is_number
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


@translation("embedding")
def embedding(call: Call) -> Tensor:
    """Rows of a table."""
    return gather(call["weight"], call["indices"])


@translation("embedding_dense_backward")
def embedding_backward(call: Call) -> Tensor | None:
    """Gradients added to rows of zeros."""
    if call["scale_grad_by_freq"]:
        return None
    grad: Tensor = call["grad_output"]
    return scatter(fill(call.out.sizes, 0, grad.dtype), call["indices"], grad)


@translation("index_select")
def selected(call: Call) -> Tensor | None:
    """Rows of the first axis."""
    return gather(call["self"], call["index"]) if call["dim"] == 0 and call["index"].ndim else None


@translation("index")
def indexed(call: Call) -> Tensor | None:
    """Rows of the first axis by one tensor of integers."""
    rows = _rows(call)
    return None if rows is None else gather(call["self"], rows)


@translation("gather")
def picked(call: Call) -> Tensor | None:
    """Elements along the last axis."""
    x, ids = call["self"], call["index"]
    return take_along(x, ids) if _is_last(x, call["dim"]) else None


def _is_last(x: Tensor, dim: int) -> bool:
    return x.ndim > 0 and dim % x.ndim == x.ndim - 1


@translation("topk")
def largest(call: Call) -> Sequence[Tensor] | None:
    """The largest elements along the last axis, and where they are."""
    x, k = call["self"], poly(call["k"])
    if not call["largest"] or not _is_last(x, call["dim"]):
        return None
    return apply(TopK(k=k, room=x.sizes[-1] - k), [x], "top_k")


@translation("sort")
def ordered(call: Call) -> Sequence[Tensor] | None:
    """All elements along the last axis in order, and where they were."""
    x: Tensor = call["self"]
    return apply(Sort(descending=bool(call["descending"])), [x], "sort") if _is_last(x, call["dim"]) else None


def _rows(call: Call) -> Tensor | None:
    """Return the only tensor of integers that an indexing of the first axis has."""
    first, *others = call["indices"]
    fits = isinstance(first, Tensor) and first.dtype.kind == "int" and not any(t is not None for t in others)
    return first if fits else None


@translation("index_put", "_index_put_impl")
def put(call: Call) -> Tensor | None:
    """Rows of the first axis added to, or written over."""
    target, rows, values = call["self"], _rows(call), call["values"]
    if rows is None or values.dtype != target.dtype:
        return None
    whole = (*rows.sizes, *target.sizes[1:])
    values = values if values.sizes == whole else broadcast(values, whole)
    return scatter(target, rows, values, "add" if call["accumulate"] else "set", inplace=call.inplace)


@translation("index_add", "index_copy")
def added(call: Call) -> Tensor | None:
    """Rows of the first axis that others are added to, or that others take the place of."""
    target, rows, source = call["self"], call["index"], call["source"]
    plain = call.get("alpha") is None or is_number(call["alpha"], 1)
    if call["dim"] or not plain or rows.ndim != 1 or not target.ndim:
        return None
    return scatter(target, rows, source, "add" if call.name == "index_add" else "set", inplace=call.inplace)


@translation("scatter_add", "scatter.src")
def along(call: Call) -> Tensor | None:
    """Elements along the last axis that others are added to, or that others take the place of."""
    target, ids, source = call["self"], call["index"], call["src"]
    if not _is_last(target, call["dim"]) or source.sizes != ids.sizes:
        return None
    mode = "add" if call.name == "scatter_add" else "set"
    return scatter(target, ids, source, mode, inplace=call.inplace, along=True)
