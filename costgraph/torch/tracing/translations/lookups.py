"""Translations of indexing: gather, scatter, sort and top-k."""

from __future__ import annotations

from collections.abc import Sequence

from ....algebra.polynomial import ONE, poly
from ....ir.graph import Tensor, apply
from ....ops.elementwise import pointwise
from ....ops.fill import assign, fill
from ....ops.grouped import TopK
from ....ops.index import Gather, Scatter, Sort, scatter, take_along
from ....ops.layout import broadcast, permute, reshape
from ....ops.loops import fused
from ..call import Call
from ..rules.table import is_number
from .table import translation

__all__: list[str] = []  # its translations are found in TRANSLATIONS


@translation("embedding")
def embedding(call: Call) -> Tensor:
    """Translate into a gather of rows."""
    return apply(Gather(padding_idx=_padding(call)), [call["weight"], call["indices"]], "gather")[0]


def _padding(call: Call) -> int | None:
    """Return the row that receives no gradient."""
    row = call["padding_idx"]
    return int(row) if isinstance(row, int) and row >= 0 else None


@translation("embedding_dense_backward")
def embedding_backward(call: Call) -> Tensor | None:
    """Translate into a scatter-add into zeros."""
    if call["scale_grad_by_freq"]:
        return None
    grad: Tensor = call["grad_output"]
    zeros, kind = fill(call.out.sizes, 0, grad.dtype), Scatter(mode="add", inplace=True, padding_idx=_padding(call))
    return apply(kind, [zeros, call["indices"], grad], "scatter")[0]


@translation("index_select")
def selected(call: Call) -> Tensor | None:
    """Translate into a gather along an axis."""
    x: Tensor = call["self"]
    return _gather(x, [None] * (call["dim"] % x.ndim) + [call["index"]]) if x.ndim and call["index"].ndim else None


@translation("index")
def indexed(call: Call) -> Tensor | None:
    """Translate indexing of adjacent axes by integer tensors."""
    return _gather(call["self"], call["indices"])


def _gather(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    indexing = _indexing(x, indices)
    if indexing is None:
        return None
    first, ids = indexing
    (rows,) = apply(Gather(), [_move_to_front(x, first, len(ids)), *ids], "gather")
    return _move_to_front(rows, ids[0].ndim, first)  # the indexed axes moved to the front


def _indexing(x: Tensor, indices: Sequence[Tensor | None]) -> tuple[int, list[Tensor]] | None:
    """Return the first indexed axis, and broadcast indices of the indexed axes."""
    present = [(i, t) for i, t in enumerate(indices) if t is not None]
    ids = [t for _, t in present]
    adjacent = bool(present) and [i for i, _ in present] == list(range(present[0][0], present[0][0] + len(ids)))
    if not adjacent or any(t.dtype.kind != "int" for t in ids):
        return None  # separated indices move their axes to the front; the size selected by a mask is data
    if len(ids) == 1:
        return present[0][0], ids
    rank = max(t.ndim for t in ids)
    candidates = [[t.sizes[i - rank + t.ndim] for t in ids if i - rank + t.ndim >= 0] for i in range(rank)]
    sizes = [next((n for n in ns if n != ONE), ONE) for ns in candidates]
    return present[0][0], [t if t.sizes == tuple(sizes) else broadcast(t, sizes) for t in ids]


def _move_to_front(x: Tensor, first: int, count: int) -> Tensor:
    """Move some axes in front of those before them."""
    order = [*range(first, first + count), *range(first), *range(first + count, x.ndim)]
    return permute(x, order) if order != list(range(x.ndim)) else x


@translation("gather")
def picked(call: Call) -> Tensor | None:
    """Translate into a gather along an axis."""
    x, dim = call["self"], call["dim"]
    return _move_last_to(take_along(_move_to_end(x, dim), _move_to_end(call["index"], dim)), dim) if x.ndim else None


def _move_to_end(x: Tensor, dim: int) -> Tensor:
    """Move an axis to the end."""
    return x if _is_last(x, dim) else permute(x, [*(i for i in range(x.ndim) if i != dim % x.ndim), dim])


def _move_last_to(x: Tensor, dim: int) -> Tensor:
    """Move the last axis to a position."""
    order = list(range(x.ndim - 1))
    order.insert(dim % x.ndim, x.ndim - 1)
    return x if _is_last(x, dim) else permute(x, order)


def _is_last(x: Tensor, dim: int) -> bool:
    return x.ndim > 0 and dim % x.ndim == x.ndim - 1


@translation("topk")
def largest(call: Call) -> Sequence[Tensor] | None:
    """Translate into top-k values and indices."""
    x, dim, k = call["self"], call["dim"], poly(call["k"])
    return _ordered_along(TopK(k=k, room=x.sizes[dim] - k, smallest=not call["largest"]), x, dim) if x.ndim else None


def _ordered_along(kind: TopK | Sort, x: Tensor, dim: int) -> Sequence[Tensor]:
    """Order the elements along an axis; one kernel, even if it is not the last axis."""
    if _is_last(x, dim):
        return apply(kind, [x], kind.name)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(_move_last_to(t, dim) for t in apply(kind, [_move_to_end(x, dim)], kind.name))

    outputs = fused(kind.name, body, x, backward="order")
    return (outputs,) if isinstance(outputs, Tensor) else outputs


@translation("max.dim", "argmax", "min.dim", "argmin")
def largest_one(call: Call) -> Sequence[Tensor] | Tensor | None:
    """Translate an extremum along an axis, and its index."""
    x, dim = call["self"], call.get("dim")
    if not x.ndim or dim is None or x.dtype.kind == "bool":
        return None
    kind = TopK(k=ONE, room=x.sizes[dim] - 1, smallest="min" in call.name)
    outputs = [reshape(t, call.out.sizes) for t in _ordered_along(kind, x, dim)]
    return outputs[1] if call.name.startswith("arg") else outputs


@translation("sort")
def ordered(call: Call) -> Sequence[Tensor] | None:
    """Translate into sorted values and their indices."""
    x, dim = call["self"], call["dim"]
    return _ordered_along(Sort(descending=bool(call["descending"])), x, dim) if x.ndim else None


@translation("index_put", "_index_put_impl")
def put(call: Call) -> Tensor | None:
    """Translate indexed assignment or accumulation; a mask with a scalar value is a `where`."""
    target, values, (first, *others) = call["self"], call["values"], call["indices"]
    if not call["accumulate"] and first is not None and first.dtype.kind == "bool" and not (values.ndim or any(others)):
        mask = reshape(first, (*first.sizes, *(ONE for _ in target.sizes[first.ndim :])))
        result = pointwise("where", mask, values, target)
        return assign(target, result) if call.inplace else result
    indexing = _indexing(target, call["indices"])
    if indexing is None or values.dtype != target.dtype:
        return None
    first, ids = indexing
    moved_target = _move_to_front(target, first, len(ids))
    n, rank = len(ids), ids[0].ndim
    values_shape = (*target.sizes[:first], *ids[0].sizes, *target.sizes[first + n :])
    values = values if values.sizes == values_shape else broadcast(values, values_shape)
    kind = Scatter(mode="add" if call["accumulate"] else "set", inplace=call.inplace)
    (result,) = apply(kind, [moved_target, *ids, _move_to_front(values, first, rank)], "scatter")
    return _move_to_front(result, n, first)


@translation("index_add", "index_copy", "index_fill")
def added(call: Call) -> Tensor | None:
    """Translate addition to, or replacement of, rows along an axis."""
    target, dim, rows, source = call["self"], call["dim"], call["index"], call.get("source")
    if rows.ndim != 1 or not target.ndim:
        return None
    axis = dim % target.ndim
    if call.name == "index_fill":
        sizes = (*target.sizes[:axis], rows.sizes[0], *target.sizes[axis + 1 :])
        if not isinstance(call["value"], bool | int | float):
            return None
        source = broadcast(fill((), float(call["value"]), target.dtype), sizes)
    elif call.get("alpha") is not None and not is_number(call["alpha"], 1):
        source = source * call["alpha"]
    mode = "add" if call.name == "index_add" else "set"
    result = scatter(_move_to_front(target, axis, 1), rows, _move_to_front(source, axis, 1), mode, inplace=call.inplace)
    return _move_to_front(result, 1, axis)


@translation("scatter_add", "scatter.src", "scatter.value")
def along(call: Call) -> Tensor | None:
    """Translate addition to, or replacement of, elements along an axis."""
    target, dim, index = call["self"], call["dim"], call["index"]
    values = call.get("src")
    if values is None and isinstance(call.get("value"), bool | int | float):
        values = fill(index.sizes, float(call["value"]), target.dtype)
    if not target.ndim or values is None or values.sizes != index.sizes:
        return None
    target, ids, source = (_move_to_end(t, dim) for t in (target, index, values))
    mode = "add" if call.name == "scatter_add" else "set"
    return _move_last_to(scatter(target, ids, source, mode, inplace=call.inplace, along=True), dim)
