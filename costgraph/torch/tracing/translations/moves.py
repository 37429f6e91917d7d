"""Translations of data movement: views, copies, constructors, indexing, sorting, and fused optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ....algebra.dominance import lower
from ....algebra.polynomial import ONE, ZERO, Poly, poly, total
from ....dtypes import dtype as find_dtype
from ....ir.graph import Tensor, apply
from ....ir.strides import Sizes, memory_order
from ....nn.activations import one_kernel
from ....ops.elementwise import cast, pointwise
from ....ops.experts import TopK
from ....ops.fill import assign, fill, pad
from ....ops.index import Arange, Gather, Scatter, Sort, reverse, scatter, take_along
from ....ops.layout import Rearrange, broadcast, concat, permute, reshape, roll, slice_axis, split
from ....ops.loops import Empty, fused
from ....ops.updates import ZeroGrad
from ....optimizers import SGD, AdaGrad, Adam, AdamW, Optimizer
from ....optimizers.optimizer import fused_update
from ..call import Call, Spec
from ..rules.table import is_number
from .table import translation

__all__: list[str] = []


# -- moves -------------------------------------------------------------------------------------------------------------


# -- views -------------------------------------------------------------------------------------------------------------


@translation("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze")
def viewed(call: Call) -> Tensor:
    """Translate into a reshape."""
    return reshape(call["self"], call.out.sizes)


@translation("t")
def transposed(call: Call) -> Tensor:
    """Translate into a transposition."""
    x: Tensor = call["self"]
    return permute(x, range(x.ndim)[::-1])


@translation("transpose")
def exchanged(call: Call) -> Tensor:
    """Translate into an exchange of two axes."""
    x: Tensor = call["self"]
    order = list(range(x.ndim))
    a, b = call["dim0"], call["dim1"]
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(x, order)


@translation("permute")
def permutation(call: Call) -> Tensor:
    """Translate into a permutation of axes."""
    return permute(call["self"], call["dims"])


@translation("expand")
def expand(call: Call) -> Tensor:
    """Translate into a broadcast."""
    return broadcast(call["self"], call.out.sizes)


def _start(call: Call, size: Poly) -> Poly:
    return _nonnegative_index(poly(call.get("start") or 0), size)


def _nonnegative_index(index: Poly, size: Poly) -> Poly:
    """Return an index from the start; negative indices count from the end."""
    lower_bound = lower(-index)
    return index + size if lower_bound is not None and lower_bound > 0 else index


@translation("slice")
def sliced(call: Call) -> Tensor:
    """Translate into a slice of an axis."""
    x: Tensor = call["self"]
    axis = call["dim"] % x.ndim
    return slice_axis(x, axis, _start(call, x.sizes[axis]), call.out.sizes[axis], call["step"])


def _position(call: Call, size: Poly) -> Poly:
    return _nonnegative_index(poly(call["index"]), size)


@translation("select")
def selected(call: Call) -> Tensor:
    """Translate into a slice of length 1 without its axis."""
    x: Tensor = call["self"]
    axis = call["dim"] % x.ndim
    return reshape(slice_axis(x, axis, _position(call, x.sizes[axis]), ONE), call.out.sizes)


@translation("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def parts(call: Call) -> Sequence[Tensor]:
    """Translate into consecutive parts of an axis."""
    axis = call["dim"] % call["self"].ndim
    return split(call["self"], [result.sizes[axis] for result in call.results], axis)


@translation("unbind")
def unbound(call: Call) -> list[Tensor]:
    """Translate into all positions of an axis, without that axis."""
    cuts = split(call["self"], [ONE for _ in call.results], call["dim"])
    return [reshape(cut, result.sizes) for cut, result in zip(cuts, call.results, strict=True)]


# -- copies ------------------------------------------------------------------------------------------------------


@translation("clone", "_to_copy")
def copied(call: Call) -> Tensor:
    """Translate into a cast or a copy, possibly in another memory format."""
    x: Tensor = call["self"]
    if call.out.dtype != x.dtype:
        return cast(x, call.out.dtype)
    if call.get("memory_format") == {"torch": "contiguous_format"}:
        return apply(Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=x.sizes, copy=True), [x], "copy")[0]
    return pointwise("copy", x)


@translation("copy")
def written(call: Call) -> Tensor | None:
    """Translate `copy_`."""
    target, source = call["self"], call["src"]
    if not call.inplace or not isinstance(source, Tensor):
        return None
    return assign(target, source if source.sizes == target.sizes else broadcast(source, target.sizes))


@translation("cat")
def joined(call: Call) -> Tensor | None:
    """Translate a concatenation, without its empty operands."""
    tensors = [t for t in call["tensors"] if isinstance(t, Tensor)]
    return _concatenated(tensors, call["dim"])


def _concatenated(tensors: Sequence[Tensor], axis: int) -> Tensor | None:
    if not tensors or len({t.dtype for t in tensors}) > 1:
        return None
    return concat(tensors, axis) if len(tensors) > 1 else pointwise("copy", tensors[0])


@translation("stack")
def stacked(call: Call) -> Tensor | None:
    """Translate into a concatenation along a new axis."""
    tensors, shape = call["tensors"], call.out.sizes
    axis = call["dim"] % len(shape)
    return _concatenated([reshape(t, (*t.sizes[:axis], ONE, *t.sizes[axis:])) for t in tensors], axis)


@translation("constant_pad_nd")
def padded(call: Call) -> Tensor | None:
    """Translate constant padding, last axis first; negative padding, as in gradients, is a slice."""
    x, widths, value = call["self"], list(map(poly, call["pad"])), call["value"]
    out: Tensor = x
    for i in range(0, len(widths), 2):
        axis, (before, after) = x.ndim - 1 - i // 2, widths[i : i + 2]
        cropped = [-n if (bound := lower(-n)) is not None and bound >= 0 else ZERO for n in (before, after)]
        if any(cropped):
            out = slice_axis(out, axis, cropped[0], out.sizes[axis] - total(cropped))
        before, after = before + cropped[0], after + cropped[1]
        if before or after:
            out = _pad_axis(out, axis, before, after, value)
    return pointwise("copy", out) if out is x or out.is_view else out


def _pad_axis(x: Tensor, axis: int, before: Poly, after: Poly, value: float) -> Tensor:
    """Pad a tensor with a number at both ends of an axis."""
    if value == 0:
        return pad(x, axis, before, x.sizes[axis] + before + after)
    sizes = [(*x.sizes[:axis], n, *x.sizes[axis + 1 :]) for n in (before, after)]
    first, last = ([fill(shape, float(value), x.dtype)] if shape[axis] else [] for shape in sizes)
    return concat([*first, x, *last], axis)


@translation("repeat")
def repeated(call: Call) -> Tensor:
    """Translate into a copy of a broadcast."""
    x, sizes = call["self"], call.out.sizes
    aligned_sizes = (*(ONE for _ in sizes[x.ndim :]), *x.sizes)
    times = [result_size / n for result_size, n in zip(sizes, aligned_sizes, strict=True)]
    split_shape = reshape(x, [n for size in aligned_sizes for n in (ONE, size)])
    out = reshape(broadcast(split_shape, [n for pair in zip(times, aligned_sizes, strict=True) for n in pair]), sizes)
    return pointwise("copy", out) if out.is_view or out is x else out


@translation("roll")
def rolled(call: Call) -> Tensor | None:
    """Translate into cyclic shifts of axes."""
    x, shifts, dims = call["self"], call["shifts"], call["dims"]
    if len(shifts) != len(dims):
        return None  # of the flattened tensor
    out: Tensor = x
    for shift, dim in zip(shifts, dims, strict=True):
        amount, size = poly(shift), x.sizes[dim].constant
        if amount.constant is not None and isinstance(size, int):
            amount = poly(amount.constant % size)
        out = roll(out, amount.expr, dim)
    return pointwise("copy", out) if out is x else out


@translation("pixel_shuffle", "pixel_unshuffle")
def shuffled(call: Call) -> Tensor:
    """Translate into a permutation between channels and image blocks."""
    x, sizes = call["self"], call.out.sizes
    lead, last = list(range(x.ndim - 3)), x.ndim - 3
    if call.name == "pixel_shuffle":
        r = poly(call["upscale_factor"])
        split_sizes, order = (sizes[last], r, r, *x.sizes[-2:]), (0, 3, 1, 4, 2)
    else:
        r = poly(call["downscale_factor"])
        split_sizes, order = (x.sizes[last], sizes[-2], r, sizes[-1], r), (0, 2, 4, 1, 3)
    return reshape(permute(reshape(x, (*x.sizes[:-3], *split_sizes)), [*lead, *(last + i for i in order)]), sizes)


@translation(*(f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3)))
def mirrored(call: Call) -> Tensor | None:
    """Translate reflection or replication padding."""
    x, widths, mirror = call["self"], call["padding"], call.name.startswith("reflection")
    if not all(isinstance(n, int) and 0 <= n <= _MAX_MIRRORED for n in widths):
        return None
    out: Tensor = x
    for i in range(0, len(widths), 2):
        axis = x.ndim - 1 - i // 2
        last = out.sizes[axis] - 1
        before = [poly(k if mirror else 0) for k in range(widths[i], 0, -1)]
        after = [last - k if mirror else last for k in range(1, widths[i + 1] + 1)]
        ends = [[slice_axis(out, axis, position.expr, 1) for position in positions] for positions in (before, after)]
        out = concat([*ends[0], out, *ends[1]], axis) if any(ends) else out
    return pointwise("copy", out) if out is x else out


#: Limit of padding per end, which is written position by position.
_MAX_MIRRORED = 64


@translation("tril", "triu")
def triangle(call: Call) -> Tensor:
    """Translate into a comparison of row and column indices, and a selection."""
    x, shift = call["self"], call["diagonal"]
    rows, columns = (
        apply(Arange(size=n, dtype=find_dtype("int64"), start=ZERO), [], "arange")[0] for n in x.sizes[-2:]
    )
    rows = reshape(pointwise("add", rows, shift) if shift else rows, (x.sizes[-2], ONE))
    mask = pointwise("less_equal", *((columns, rows) if call.name == "tril" else (rows, columns)))
    if x.dtype.kind == "bool":
        return pointwise("logical_and", x, mask, inplace=call.inplace)
    if call.inplace:
        return pointwise("masked_fill", x, pointwise("logical_not", mask), inplace=True)
    return pointwise("where", mask, x, 0, dtype=x.dtype)


@translation("slice_backward")
def put_back(call: Call) -> Tensor:
    """Translate into zeros with the gradient in a slice; an empty gradient leaves zeros."""
    grad: Tensor | None = call["grad_output"]
    if grad is None:
        return fill(call.out.sizes, 0, call.out.dtype)
    axis = call["dim"] % grad.ndim
    return pad(grad, axis, _start(call, call.out.sizes[axis]), call.out.sizes[axis], call["step"])


@translation("select_backward")
def put_back_at(call: Call) -> Tensor:
    """Translate into zeros with the gradient at one position of an axis."""
    grad, sizes = call["grad_output"], call.out.sizes
    axis = call["dim"] % len(sizes)
    expanded = reshape(grad, (*sizes[:axis], ONE, *sizes[axis + 1 :]))
    return pad(expanded, axis, _position(call, sizes[axis]), sizes[axis])


# -- constructors ------------------------------------------------------------------------------------------------


@translation("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
def uninitialized(call: Call) -> Tensor | None:
    """Translate into an uninitialized tensor."""
    return _in_run_layout(call.out, lambda sizes: apply(Empty(sizes=sizes, dtype=call.out.dtype), [], "empty")[0])


def _in_run_layout(out: Spec, make: Callable[[Sizes], Tensor]) -> Tensor | None:
    """Return a new tensor in the memory order of the run; None if that is not dense."""
    order = memory_order(out.sizes, out.strides)
    if order is None:
        return None
    dense = make(tuple(out.sizes[i] for i in order))
    return dense if order == tuple(range(len(order))) else permute(dense, [order.index(i) for i in range(len(order))])


@translation("fill")
def overwritten(call: Call) -> Tensor | None:
    """Translate an in-place fill."""
    x, value = call["self"], call["value"]
    if not call.inplace or not isinstance(value, bool | int | float | Tensor):
        return None
    number = value if isinstance(value, Tensor) else fill((), float(value), x.dtype)
    return assign(x, broadcast(number, x.sizes))


_VALUES = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}


@translation(*_VALUES, "full", "new_full", "full_like", "scalar_tensor")
def filled(call: Call) -> Tensor | None:
    """Translate into a constant tensor."""
    value = _VALUES.get(call.name, call.get("fill_value") if call.name != "scalar_tensor" else call["s"])
    if not isinstance(value, bool | int | float):
        return None
    return _in_run_layout(call.out, lambda sizes: fill(sizes, float(value), call.out.dtype))


@translation("arange")
def counted(call: Call) -> Tensor | None:
    """Translate into consecutive integers."""
    start, step = call.get("start"), call.get("step")
    is_integer_start = start is None or (isinstance(start, int | Poly) and not isinstance(start, bool))
    if not is_integer_start or step not in (None, 1) or call.out.dtype.kind != "int":
        return None
    first = poly(start or 0)
    if first.constant is not None and first.constant < 0:
        return None
    return apply(Arange(size=call.out.sizes[0], dtype=call.out.dtype, start=first), [], "arange")[0]


# -- permuted copies ---------------------------------------------------------------------------------------------------


@translation("flip", "rot90")
def flipped(call: Call) -> Tensor | None:
    """Translate into reversed axes; an odd quarter turn also exchanges the axes."""
    x, dims = call["self"], [d % call["self"].ndim for d in call["dims"]]
    order = list(range(x.ndim))
    if call.name == "rot90":
        quarters = call["k"] % 4
        if quarters % 2:
            order[dims[0]], order[dims[1]] = dims[1], dims[0]
        dims = [[], dims[1:], dims, dims[:1]][quarters]
    if not dims:
        return None

    reversed_axes = one_kernel("flip", reverse, x, backward="flip", axes=dims)
    return reversed_axes if order == list(range(x.ndim)) else permute(reversed_axes, order)


@translation("diag_embed")
def diagonal(call: Call) -> Tensor | None:
    """Translate into zeros with the elements on a diagonal."""
    x: Tensor = call["self"]
    if call["offset"] or call["dim1"] % (x.ndim + 1) != x.ndim - 1 or call["dim2"] % (x.ndim + 1) != x.ndim:
        return None
    n = x.sizes[-1]
    (positions,) = apply(Arange(size=n, dtype=find_dtype("int64"), start=ZERO), [], "arange")
    ids = broadcast(reshape(positions, (n, ONE)), (*x.sizes, ONE))
    return scatter(fill((*x.sizes, n), 0, x.dtype), ids, reshape(x, (*x.sizes, ONE)), "set", along=True)


@translation("channel_shuffle")
def channel_shuffled(call: Call) -> Tensor:
    """Translate into a permutation that interleaves the channels of all groups."""
    x, groups = call["self"], poly(call["groups"])
    split_sizes = (x.sizes[0], groups, x.sizes[1] / groups, *x.sizes[2:])
    out = reshape(permute(reshape(x, split_sizes), [0, 2, 1, *range(3, x.ndim + 1)]), x.sizes)
    return pointwise("copy", out) if out.is_view else out


# -- updates -----------------------------------------------------------------------------------------------------------

_MOMENTS = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
#: The library's optimizer, and the arguments with its state.
_UPDATES: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "_fused_adam": (Adam, _MOMENTS),
    "_fused_adamw": (AdamW, _MOMENTS),
    "_fused_sgd": (SGD, ("momentum_buffer_list",)),
    "_fused_adagrad": (AdaGrad, ("state_sums",)),
}


@translation(*_UPDATES)
def updated(call: Call) -> Sequence[Tensor]:
    """Translate into the library's optimizer step, after unscaling the gradient if needed.

    Scalars known only to the device have no cost.
    """
    kind, states = _UPDATES[call.name]
    hyperparameters: dict[str, Any] = {
        f.name: n for f in fields(kind) if isinstance(n := call.get(f.name), bool | int | float)
    }
    update = kind(**hyperparameters)._update
    param, grad, *state = (call[n] for n in ("self", "grads", *states) if call[n] is not None)
    scale = call.get("grad_scale")
    if scale is not None:
        grad = pointwise("div", grad, scale, inplace=True)
    group = (param, grad, *state)
    scalars = [
        t for k, t in call.arguments.items() if isinstance(t, Tensor) and k in ("state_steps", "lr", "found_inf")
    ]
    return [*fused_update(update, group, tuple(scalars), name="fused_update"), *scalars]


@translation("zero")
def zeros(call: Call) -> Tensor | None:
    """Translate in-place zeroing."""
    return apply(ZeroGrad(), [call["self"]], "zero_")[0] if call.inplace else None


# -- lookups -----------------------------------------------------------------------------------------------------------


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
def index_selected(call: Call) -> Tensor | None:
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
