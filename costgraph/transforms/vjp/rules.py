"""Gradient rules for all op kinds except fused kernels and loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import log, nan, prod
from typing import Any

import sympy

from ...algebra.polynomial import ONE, Poly, poly, total
from ...errors import UnsupportedError
from ...ir.graph import Tensor, apply, current_graph
from ...notation.pattern import Affine, Axes, Pattern
from ...ops.collectives import Collective, collective
from ...ops.einsum import Einsum, contract
from ...ops.elementwise import Dropout, Pointwise, cast, pointwise
from ...ops.experts import GroupedMatmul, GroupedOuter, TopK, grouped_outer
from ...ops.fill import Assign, Fill, Pad, SliceUpdate, fill, pad
from ...ops.fourier import Fourier, ViewAs, joined, real_part, view_as
from ...ops.functions import FUNCTIONS, names_in
from ...ops.index import Arange, Gather, Scatter, Sort, gather, scatter
from ...ops.kv_cache import Cache, InitialState
from ...ops.layout import (
    Concat,
    Expand,
    KeepAlive,
    Rearrange,
    Slice,
    concat,
    contiguous_copy,
    keep_alive,
    permute,
    rearrange,
    reshape,
    slice_axis,
)
from ...ops.loops import Empty, kernel
from ...ops.opaque import Opaque, Transfer, transfer
from ...ops.reduce import Pool, PoolBackward, Reduce, reduce
from ...ops.updates import ZeroGrad
from .table import VJPContext, also_saved, expanded, order_of_parameter, restricted, sum_to, summed, vjp

# -- contraction -------------------------------------------------------------------------------------------------------
# The gradient of a contraction contracts the result's gradient with the other operands.

_Dims = tuple[Axes | Affine, ...]


@vjp(Einsum)
def _einsum(pull: VJPContext[Einsum]) -> Sequence[Tensor | None]:
    (g,) = pull.grads
    assert g is not None
    if any(isinstance(a, Affine) for dims in pull.kind.pattern.operands for a in dims):
        also_saved(pull, *pull.op.operands)  # a convolution saves both, whichever gradient is needed
    indices = [i for i in pull.kind.order or range(len(pull.needs)) if pull.needs[i]]
    operand_grads = {i: _operand_grad(pull, g, i) for i in indices}
    return [operand_grads.get(i) for i in range(len(pull.needs))]


def _operand_grad(pull: VJPContext[Einsum], g: Tensor, i: int) -> Tensor:
    """Contract the gradient with the other operands; axes that none of them has are broadcast, which is free."""
    op, kind, x = pull.op, pull.kind, pull.op.operands[i]
    pattern, extents = kind.pattern, kind.extents
    others = [j for j in range(len(op.operands)) if j != i]
    dims = (pattern.result, *(pattern.operands[j] for j in others))
    available = {n for d in dims for a in d for n in a.names}
    target = pattern.operands[i]
    constant = _constant_axes(target, available, kind.domain)
    result, sizes = _drop_axes(target, constant, x, extents)
    order = None if constant else order_of_parameter(x)
    if order is not None:
        result, sizes = tuple(result[i] for i in order), tuple(sizes[i] for i in order)
    used_extents = {n: extents[n] for n in extents if n in available or n in {m for a in result for m in a.names}}
    backward = Einsum(
        pattern=Pattern(dims, result),
        extents=used_extents,
        domain=kind.domain,
        dtype=x.dtype,
        sizes=None if _is_plain_pattern(result, available) else sizes,
        rooms=kind.rooms,
    )
    grad = contract([g, *(_conjugate(pull.saved(op.operands[j])) for j in others)], backward)
    if order is not None:
        return permute(grad, [order.index(i) for i in range(x.ndim)])
    return _broadcast_axes(grad, result, target, constant, extents) if constant else grad


def _conjugate(t: Tensor) -> Tensor:
    return view_as(t, "conjugate") if t.dtype.kind == "complex" else t


def _constant_axes(target: _Dims, available: set[str], restriction: tuple[object, str, str] | None) -> set[str]:
    """Return an operand's axes along which its gradient is constant."""
    names = [n for a in target for n in a.names]
    varying = available.union(n for a in target if isinstance(a, Affine) for n in a.names)
    varying |= set() if restriction is None else set(restriction[1:])
    return {n for n in names if n not in varying and names.count(n) == 1}


def _is_plain_pattern(result: _Dims, available: set[str]) -> bool:
    names = [n for a in result for n in a.names]
    return all(isinstance(a, Axes) for a in result) and len(set(names)) == len(names) and available.issuperset(names)


def _drop_axes(
    target: _Dims, constant: set[str], x: Tensor, extents: Mapping[str, Poly]
) -> tuple[_Dims, tuple[Poly, ...]]:
    """Return the dimensions of an operand without the axes `constant`, and their sizes."""
    dims: list[Axes | Affine] = []
    sizes: list[Poly] = []
    for dim, size in zip(target, x.sizes, strict=True):
        if constant.intersection(dim.names):
            names = [n for n in dim.names if n not in constant]
            dims += [Axes((n,)) for n in names]
            sizes += [extents[n] for n in names]
        else:
            dims.append(dim)
            sizes.append(size)
    return tuple(dims), tuple(sizes)


def _broadcast_axes(
    grad: Tensor, result: _Dims, target: _Dims, constant: set[str], extents: Mapping[str, Poly]
) -> Tensor:
    """Broadcast along the axes `constant`, and merge axes that share a dimension."""
    kept_axes: list[int | None] = []
    sizes: list[Poly] = []
    left: list[str] = []
    right: list[str] = []
    axis = 0
    for dim in target:
        parts = [Axes((n,)) for n in dim.names] if constant.intersection(dim.names) else [dim]
        for part in parts:
            new = bool(constant.intersection(part.names))
            kept_axes.append(None if new else axis)
            sizes.append(prod((extents[n] for n in part.names), start=ONE) if new else grad.sizes[axis])
            axis += not new
        names = [f"n{len(left) + k}" for k in range(len(parts))]
        left += names
        right.append(names[0] if len(names) == 1 else f"({' '.join(names)})")
    out = expanded(grad, tuple(sizes), kept_axes)
    return out if left == right else rearrange(out, f"{' '.join(left)} -> {' '.join(right)}")


# -- reductions --------------------------------------------------------------------------------------------------------


@vjp(Reduce)
def _reduce(pull: VJPContext[Reduce]) -> Sequence[Tensor | None]:
    (g,), op = pull.grads, pull.op
    (x,), operation = op.operands, pull.kind.operation
    if g is None or not pull.needs[0] or operation in ("any", "all", "argmax", "argmin"):
        return [None]
    if operation == "sum":
        return [_spread(pull, g)]
    if operation == "mean":
        return [pointwise("div", _spread(pull, g), _count(pull))]
    if operation == "prod":
        product = _spread(pull, pointwise("mul", g, pull.saved(op.results[0])))
        return [pointwise("div", product, pull.saved(x))]
    names = [f"n{i}" for i in range(x.ndim)]
    ties = pointwise("eq", pull.saved(x), _spread(pull, pull.saved(op.results[0])))
    reduced = _reduced(pull)
    count = reduce(
        ties, f"{' '.join(names)} -> {' '.join('1' if i in reduced else n for i, n in enumerate(names))}", "sum"
    )
    share = pointwise("div", expanded(g, count.sizes, _result_axes(pull)), count)  # torch's `scale_grad_by_count`
    return [pointwise("mul", share, ties, dtype=x.dtype)]


def _reduced(pull: VJPContext[Reduce]) -> list[int]:
    """Return the indices of the reduced axes."""
    pattern = pull.kind.pattern
    return [i for i, n in enumerate(pattern.operand_names(0)) if n not in pattern.result_names]


def _spread(pull: VJPContext[Reduce], t: Tensor) -> Tensor:
    """Broadcast a tensor from the result shape to the operand shape."""
    (x,) = pull.op.operands
    return expanded(t, x.sizes, _result_axes(pull), x)


def _result_axes(pull: VJPContext[Reduce]) -> list[int | None]:
    """Return the result axis of each operand axis, None for reduced ones."""
    pattern = pull.kind.pattern
    result_names = [a.names for a in pattern.result]
    return [result_names.index(a.names) if a.names in result_names else None for a in pattern.operands[0]]


def _count(pull: VJPContext[Reduce]) -> Poly | int:
    """Return the number of elements per mean."""
    (x,) = pull.op.operands
    if x.domain is not None:
        raise UnsupportedError(f"backward of {pull.op.name!r}: mean of {x!r}, expected a tensor without a domain")
    count = prod((x.sizes[i] for i in _reduced(pull)), start=ONE)
    return count if count.constant is None else int(count.constant)


# -- pooling -----------------------------------------------------------------------------------------------------------


@vjp(Pool)
def _pool(pull: VJPContext[Pool]) -> Sequence[Tensor | None]:
    """Distribute each window's gradient to its elements; torch saves the pooling input for its shape."""
    g, op, kind = pull.grads[0], pull.op, pull.kind
    if g is None or not pull.needs[0]:
        return [None]
    operands = [g, pull.saved(op.operands[0])]
    if kind.operation == "max":
        if len(op.results) < 2:
            raise UnsupportedError(
                f"backward of {op.name!r}: the pooling does not return the indices of its maxima, expected attribute "
                f"'indices'"
            )
        operands.append(pull.saved(op.results[1]))
    back = PoolBackward(
        pattern=kind.pattern, extents=kind.extents, operation=kind.operation, exclude_padding=kind.exclude_padding
    )
    return apply(back, operands, "pool_backward")


# -- shapes ------------------------------------------------------------------------------------------------------------
# Ops that move or rename elements, and ops that create them.


def _only(pull: VJPContext[Any]) -> Tensor | None:
    """Return the gradient of the only result, None if the only operand needs none."""
    return pull.grads[0] if pull.needs[0] else None


@vjp(Rearrange)
def _rearrange(pull: VJPContext[Rearrange]) -> Sequence[Tensor | None]:
    """Invert the rearrangement; a mere copy passes the gradient on."""
    g, kind, (x,) = _only(pull), pull.kind, pull.op.operands
    if g is None or (kind.merged == x.sizes and list(kind.order) == sorted(kind.order)):
        return [g]
    return [apply(kind.inverse(x.sizes), [g], "rearrange")[0]]


@vjp(Slice)
def _slice(pull: VJPContext[Slice]) -> Sequence[Tensor | None]:
    g, kind = _only(pull), pull.kind
    full = pull.op.operands[0].sizes[kind.axis]
    return [None if g is None else pad(g, kind.axis, kind.start, full, kind.step)]


@vjp(Pad)
def _pad(pull: VJPContext[Pad]) -> Sequence[Tensor | None]:
    g, kind = _only(pull), pull.kind
    size = pull.op.operands[0].sizes[kind.axis]
    return [None if g is None else slice_axis(g, kind.axis, kind.start, size, kind.step)]


@vjp(Expand)
def _expand(pull: VJPContext[Expand]) -> Sequence[Tensor | None]:
    """Sum over the axes that were expanded."""
    g, (x,), kept_axes = _only(pull), pull.op.operands, pull.kind.kept
    if g is None:
        return [None]
    names = [f"n{i}" for i in range(g.ndim)]
    left = []
    for axis, size in enumerate(x.sizes):
        position = kept_axes.index(axis) if axis in kept_axes else None
        left.append("1" if position is None or (size == ONE and g.sizes[position] != ONE) else names[position])
    return [summed(g, names, left)]


@vjp(Concat)
def _concat(pull: VJPContext[Concat]) -> Sequence[Tensor | None]:
    """Slice the gradient into views; stacked residuals get one whose first axis counts iterations."""
    (g,), kind, parts = pull.grads, pull.kind, pull.op.operands
    assert g is not None
    sizes = kind.extents(parts)
    part_grads = [
        slice_axis(g, kind.axis, total(sizes[:i]), size) if needed else None
        for i, (size, needed) in enumerate(zip(sizes, pull.needs, strict=True))
    ]
    return [None if part is None else _concat_part(part, t, kind) for part, t in zip(part_grads, parts, strict=True)]


def _concat_part(g: Tensor, t: Tensor, kind: Concat) -> Tensor:
    """Reshape an operand's gradient: with an iteration axis, or without the stacking axis."""
    axis = kind.axis
    if t.storage.pieces > 1 or (t.storage.pieces and kind.reverse):
        raise UnsupportedError(
            f"backward: a concat of {t.name!r} joins the iterations of nested loops, or in reverse order; expected one "
            f"loop's iterations in order"
        )
    if not t.storage.pieces:
        return reshape(g, t.sizes) if kind.stacked else g
    slice_size = () if kind.stacked else (t.sizes[1:][axis],)
    g = reshape(g, (*g.sizes[:axis], t.sizes[0], *slice_size, *g.sizes[axis + 1 :]))
    return permute(g, (axis, *(i for i in range(g.ndim) if i != axis)))


@vjp(KeepAlive)
def _keep_alive(pull: VJPContext[KeepAlive]) -> Sequence[Tensor | None]:
    """Pass the gradient to the first operand; the others are only kept alive."""
    if pull.kind.custom_grad:
        by, graph = pull.kind.custom_grad, pull.op.graph.root
        if pull.kind.leaf:
            raise UnsupportedError(
                f"backward: graph {graph.name!r}: {by}, so its gradient goes to no parameter of the graph; expected "
                f"tensors that are created, converted and marked before the trace; or trace with train=True"
            )
        raise UnsupportedError(
            f"backward: {pull.op.name!r} of graph {graph.name!r} has a gradient that {by} of the program defines, "
            f"expected declared ops; trace with train=True"
        )
    return [_only(pull), *(None for _ in pull.op.operands[1:])]


@vjp(Cache)
def _cache(pull: VJPContext[Cache]) -> Sequence[Tensor | None]:
    """Pass the gradient on: caches do nothing in training."""
    return [_only(pull)]


@vjp(Assign)
def _assign(pull: VJPContext[Assign]) -> Sequence[Tensor | None]:
    """Pass the gradient to the new value; the overwritten one gets none."""
    (g,), (_, value) = pull.grads, pull.op.operands
    assert g is not None
    return [None, cast(g, value.dtype) if pull.needs[1] else None]


@vjp(ZeroGrad)
def _zeros(pull: VJPContext[ZeroGrad]) -> Sequence[Tensor | None]:
    """Return no gradient: the old value is overwritten."""
    return [None]


@vjp(SliceUpdate)
def _slice_update(pull: VJPContext[SliceUpdate]) -> Sequence[Tensor | None]:
    """Slice the gradient for the written part; the tensor before gets the rest, with zeros in the slice."""
    (g,), (x, part), places = pull.grads, pull.op.operands, pull.kind.places
    assert g is not None
    if pull.kind.untracked:
        return [g, None]
    part_grad = g
    for axis, start, step in places:
        part_grad = slice_axis(part_grad, axis, start, part.sizes[axis], step)
    if not pull.needs[0]:
        return [None, part_grad]
    if all(step == 1 for *_, step in places):
        return [_zero_slice(g, part, places), part_grad if pull.needs[1] else None]
    padded = part_grad
    for axis, start, step in places:
        padded = pad(padded, axis, start, x.sizes[axis], step)
    return [g - padded, part_grad if pull.needs[1] else None]


def _zero_slice(g: Tensor, part: Tensor, places: Sequence[tuple[int, Poly, int]]) -> Tensor:
    """Return a gradient with zeros in a contiguous slice."""
    if not places:
        return fill(part.sizes, 0, g.dtype)
    (axis, start, _), *others = places
    size, length = part.sizes[axis], g.sizes[axis]
    end = start + size
    pieces = [_zero_slice(slice_axis(g, axis, start, size) if others else g, part, others)]
    if start:
        pieces.insert(0, slice_axis(g, axis, 0, start))
    if length - end:
        pieces.append(slice_axis(g, axis, end, length - end))
    return concat(pieces, axis)


@vjp(Fill, Arange, Empty, InitialState)
def _nothing(pull: VJPContext[Any]) -> Sequence[Tensor | None]:
    """Return no gradients: there are no operands."""
    return []


# -- complex numbers ---------------------------------------------------------------------------------------------------
# Fourier transforms and complex views, in torch's convention: gradients by the conjugate.

_BACK = {"real": "complex", "complex": "real", "conjugate": "conjugate"}


@vjp(ViewAs)
def _view_as(pull: VJPContext[ViewAs]) -> Sequence[Tensor | None]:
    (g,) = pull.grads
    assert g is not None
    g = contiguous_copy(g) if pull.kind.view == "real" else g  # real and imaginary parts must be adjacent
    return [view_as(g, _BACK[pull.kind.view])]


def _transformed(kind: Fourier, x: Tensor) -> Tensor:
    """Transform, with a copy first unless the untransformed axes are contiguous."""
    workspace = joined(x, kind.axes)
    if current_graph().fused or not workspace:
        return apply(kind, [x], "fft")[0]
    with kernel("fft", workspace=workspace, backward="ops") as body:
        result = apply(kind, [x], "fft")[0]
    return body.export(result)


@vjp(Fourier)
def _fourier(pull: VJPContext[Fourier]) -> Sequence[Tensor | None]:
    """Apply the inverse transform with the same scale: the symmetric matrix has its conjugate as adjoint."""
    (g,), (x,), kind = pull.grads, pull.op.operands, pull.kind
    assert g is not None
    if x.dtype.kind != "complex":
        also_saved(pull, x)  # torch reads its size
    axis, inverse = kind.axes[-1], replace(kind, inverse=not kind.inverse, last=None)
    if kind.last is None:
        grad = _transformed(inverse, g)
        return [grad if x.dtype.kind == "complex" else real_part(grad)]
    if x.dtype.kind != "complex":  # the other half of the spectrum does not contribute to the result
        g = g if kind.last == x.sizes[axis] else pad(g, axis, 0, x.sizes[axis])
        return [real_part(_transformed(inverse, g))]
    half = x.sizes[axis]
    grad = _transformed(replace(inverse, last=half), g)
    mirrored = kind.last - half  # bins that also represent their mirror images
    if not mirrored:
        return [grad]
    part = pointwise("mul", slice_axis(grad, axis, 1, mirrored), 2, inplace=True)
    return apply(SliceUpdate(axes=(axis,), starts=(ONE,), steps=(1,)), [grad, part], "slice_update")


# -- indexing ----------------------------------------------------------------------------------------------------------


@vjp(Gather)
def _gather(pull: VJPContext[Gather]) -> Sequence[Tensor | None]:
    """Scatter-add the gradient into zeros, as torch's `embedding_dense_backward`."""
    (g,), (table, *ids) = pull.grads, pull.op.operands
    if g is None or not pull.needs[0]:
        return [None, *(None for _ in ids)]
    if pull.kind.batch:  # `take_along`
        also_saved(pull, table)
    kind = Scatter(mode="add", inplace=True, batch=pull.kind.batch, padding_idx=pull.kind.padding_idx)
    table_grad = apply(kind, [fill(table.sizes, 0, table.dtype), *map(pull.saved, ids), g], "scatter")
    return [*table_grad, *(None for _ in ids)]


@vjp(Scatter)
def _scatter(pull: VJPContext[Scatter]) -> Sequence[Tensor | None]:
    """Gather the gradient of the updates; overwritten rows of the target get zero."""
    (g,), (_, *ids, updates) = pull.grads, pull.op.operands
    assert g is not None
    if pull.kind.padding_idx is not None:
        raise UnsupportedError(f"backward of {pull.op.name!r}: it skips row {pull.kind.padding_idx}, expected all rows")
    if pull.kind.mode == "max":
        return _largest(pull, g)
    if [t.ndim for t in ids] == [1] and not pull.kind.inplace:  # `index_add` and `index_copy` save it for its shape
        also_saved(pull, updates)
    target, rows = g if pull.needs[0] else None, list(map(pull.saved, ids))
    if target is not None and pull.kind.mode == "set":
        zeros = expanded(fill((), 0, updates.dtype), updates.sizes, (None,) * updates.ndim)
        (target,) = apply(replace(pull.kind, inplace=False), [g, *rows, zeros], "scatter")
    update_grad = apply(Gather(batch=pull.kind.batch), [g, *rows], "gather")[0] if pull.needs[-1] else None
    return [target, *(None for _ in ids), update_grad]


def _largest(pull: VJPContext[Scatter], g: Tensor) -> Sequence[Tensor | None]:
    """Share the gradient among elements equal to the result, as torch's `scatter_reduce_backward` for amax."""
    batch, (target, ids, updates) = pull.kind.batch, pull.op.operands
    if pull.kind.inplace:
        raise UnsupportedError(
            f"backward of {pull.op.name!r}: an in-place maximum overwrites its target, expected inplace=False"
        )
    rows, result = pull.saved(ids), pull.saved(pull.op.results[0])
    target_hits = pointwise("eq", pull.saved(target), result)
    update_hits = pointwise("eq", pull.saved(updates), gather(result, rows, batch=batch))
    count = scatter(cast(target_hits, g.dtype), rows, cast(update_hits, g.dtype), "add", batch=batch)
    share = pointwise("div", g, count)
    target_grad = pointwise("mul", share, target_hits) if pull.needs[0] else None
    return [
        target_grad,
        None,
        pointwise("mul", gather(share, rows, batch=batch), update_hits) if pull.needs[2] else None,
    ]


# -- top-k and grouped matmuls -----------------------------------------------------------------------------------------


@vjp(TopK, Sort)
def _top_k(pull: VJPContext[Any]) -> Sequence[Tensor | None]:
    """Scatter the gradients to the selected positions, as torch's `value_selecting_reduction_backward`."""
    g, op = pull.grads[0], pull.op
    if g is None or not pull.needs[0]:
        return [None]
    (x,) = op.operands
    return [scatter(fill(x.sizes, 0, x.dtype), pull.saved(op.results[1]), g, "set", along=True)]


@vjp(GroupedMatmul)
def _grouped_matmul(pull: VJPContext[GroupedMatmul]) -> Sequence[Tensor | None]:
    """Multiply by the transposed expert weights, and sum outer products per expert."""
    (g,), op = pull.grads, pull.op
    assert g is not None
    rows, weights, ends = op.operands
    operand_grads: list[Tensor | None] = [None, None, None]
    if pull.needs[0]:
        transposed = rearrange(pull.saved(weights), "e d f -> e f d")
        operand_grads[0] = cast(apply(pull.kind, [g, transposed, pull.saved(ends)], "grouped_matmul")[0], rows.dtype)
    if pull.needs[1]:
        is_transposed = order_of_parameter(weights) == (0, 2, 1)
        first, second = (g, pull.saved(rows)) if is_transposed else (pull.saved(rows), g)
        outer = cast(grouped_outer(first, second, pull.saved(ends)), weights.dtype)
        operand_grads[1] = permute(outer, (0, 2, 1)) if is_transposed else outer
    return operand_grads


@vjp(GroupedOuter)
def _grouped_outer(pull: VJPContext[GroupedOuter]) -> Sequence[Tensor | None]:
    """Multiply each row by its expert's gradient; assume that rows go to all experts, whatever the routing."""
    (g,), (a, b, ends) = pull.grads, pull.op.operands
    assert g is not None
    kind = GroupedMatmul(routing="capacity", chosen=ends.sizes[0])
    operand_grads: list[Tensor | None] = [None, None, None]
    if pull.needs[0]:
        transposed = rearrange(g, "e d f -> e f d")
        operand_grads[0] = cast(
            apply(kind, [pull.saved(b), transposed, pull.saved(ends)], "grouped_matmul")[0], a.dtype
        )
    if pull.needs[1]:
        operand_grads[1] = cast(apply(kind, [pull.saved(a), g, pull.saved(ends)], "grouped_matmul")[0], b.dtype)
    return operand_grads


# -- transfers, collectives and opaque ops -----------------------------------------------------------------------------

#: The adjoint of each collective.
_ADJOINT_COLLECTIVE = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "send": "send",
}


@vjp(Transfer)
def _transfer(pull: VJPContext[Transfer]) -> Sequence[Tensor | None]:
    g = pull.grads[0]
    to = "host" if pull.op.operands[0].storage.host else "device"
    return [None if g is None or not pull.needs[0] else transfer(g, pull.kind.link, to=to)]


@vjp(Collective)
def _collective(pull: VJPContext[Collective]) -> Sequence[Tensor | None]:
    g = pull.grads[0]
    if g is None or not pull.needs[0]:
        return [None]
    return [collective(g, _ADJOINT_COLLECTIVE[pull.kind.collective], pull.kind.ranks.expr)]


@vjp(Opaque)
def _opaque(pull: VJPContext[Opaque]) -> Sequence[Tensor | None]:
    """Add an op with the backward costs that the caller stated."""
    op, costs = pull.op, pull.kind.backward
    if costs is None:
        raise UnsupportedError(f"backward of {op.name!r}: it has no backward costs, expected backward= of opaque")
    saved = [op.operands[i] for i in costs.inputs] + [op.results[i] for i in costs.outputs]
    grads = [i for i, g in enumerate(pull.grads) if g is not None]
    operands = [g for g in pull.grads if g is not None] + [pull.saved(t) for t in saved]
    needed_operands = [i for i, needed in enumerate(pull.needs) if needed]
    count = len(pull.grads)
    kind = Opaque(
        matmul=costs.matmul,
        pointwise=costs.pointwise,
        transcendental=costs.transcendental,
        workspace=costs.workspace,
        outputs=tuple((op.operands[i].sizes, op.operands[i].dtype) for i in needed_operands),
        bytes_read=_select_bytes(costs.reads, [*grads, *range(count, count + len(saved))], len(operands)),
        bytes_written=_select_bytes(costs.writes, needed_operands, len(needed_operands)),
    )
    operand_grads = dict(
        zip(needed_operands, apply(kind, operands, f"{op.name.rpartition('/')[2]}_backward"), strict=True)
    )
    return [operand_grads.get(i) for i in range(len(op.operands))]


def _select_bytes(amounts: Sequence[Poly] | None, indices: Sequence[int], count: int) -> tuple[Poly, ...] | None:
    """Return the bytes of some tensors; a single amount for all is assigned to the first."""
    if amounts is None or not count:
        return None
    if len(amounts) == 1:
        return (amounts[0], *(total(()),) * (count - 1))
    return tuple(amounts[i] for i in indices)


# -- elementwise -------------------------------------------------------------------------------------------------------

#: Functions evaluated directly if all arguments are numbers.
_NUMBERS: dict[str, Callable[..., Any]] = {
    "sub": lambda a, b: a - b,
    "div": lambda a, b: a / b,
    "mul": lambda a, b: a * b,
    "copy": lambda a: a,
    "eq": lambda a, b: a == b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "log": lambda a: poly(sympy.log(a.expr)) if isinstance(a, Poly) else log(a) if a > 0 else nan,
}


@vjp(Pointwise)
def _pointwise(pull: VJPContext[Pointwise]) -> Sequence[Tensor | None]:
    op, (g,) = pull.op, pull.grads
    assert g is not None
    function = pull.kind.function
    if function.name == "sign" and op.results[0].dtype.kind == "complex":
        raise UnsupportedError(f"backward of {op.name!r}: sign of complex numbers, expected real ones")
    if function.grad is None or len(function.grad) != function.arity:
        raise UnsupportedError(
            f"backward of {op.name!r}: function {function.name!r} declares no gradient, expected "
            f"{function.arity} expressions in its record"
        )
    arguments = [i for i, s in enumerate(pull.kind.scalars or (None,) * len(op.operands)) if s is None]
    if any("y" in names_in(function.grad[argument]) for argument in arguments):
        also_saved(pull, op.results[0])  # whichever gradient is needed
    evaluator = _GradientEvaluator(pull, restricted(g, op.results[0]), arguments)
    grads: dict[int, Any] = {}
    needs = dict(zip(arguments, pull.needs, strict=True))
    for argument, tensor in zip(arguments, op.operands, strict=True):
        readers = [p for p in arguments if "abcd"[argument] in names_in(function.grad[p])]
        # torch also saves an operand that a scalar makes unnecessary, and one that several gradients read
        if any(map(needs.get, readers)) or len(readers) > 1:
            also_saved(pull, tensor)
    ordered = [argument for argument in function.order or reversed(arguments) if needs.get(argument)]
    joint = [argument for argument in arguments if needs.get(argument) and any(_shared_in(function.grad[argument]))]
    if joint:
        grads |= zip(joint, evaluator.gradients([function.grad[argument] for argument in joint]), strict=True)
    for argument in ordered:
        expression = function.grad[argument]
        if expression is not None and argument not in joint:
            grads[argument] = evaluator.gradient(expression)
    argument_grads = map(grads.get, arguments)  # reduced once all of them exist
    return [sum_to(g, t) if isinstance(g, Tensor) else None for g, t in zip(argument_grads, op.operands, strict=True)]


def _cast_first(function: str, values: Sequence[Any]) -> Tensor | None:
    """Multiply or divide real and complex tensors, casting the real ones first; None for other cases."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    kinds = {t.dtype.kind for t in tensors}
    if function not in ("mul", "div") or kinds != {"float", "complex"} or current_graph().fused:
        return None
    dtype = next(t.dtype for t in tensors if t.dtype.kind == "complex")
    workspace = total(t.numel * dtype.bytes for t in tensors if t.dtype != dtype)
    with kernel(function, workspace=workspace, backward="ops") as body:
        result = pointwise(function, *values)
    return body.export(result)


def _resolved_conj(x: Tensor) -> Tensor:
    return pointwise("copy", view_as(x, "conjugate"), name="resolve_conj")


def _shared_in(expression: Any) -> Iterator[Any]:
    """Yield the shared subexpressions that a torch function computes for all gradients, in order."""
    if isinstance(expression, tuple):
        for part in expression[1:]:
            yield from _shared_in(part)
        if expression[0] == "shared":
            yield expression


class _GradientEvaluator:
    """Evaluates a function's gradient expressions, saving tensors only when read."""

    def __init__(self, pull: VJPContext[Pointwise], g: Tensor, arguments: Sequence[int]) -> None:
        self.pull = pull
        self.g = g
        self.arguments = arguments
        self.conjugates: dict[Tensor, Tensor] = {}
        self.plain = False
        """Whether complex numbers are used as they are, not conjugated."""
        self.temporaries: list[Tensor] = []
        """Temporaries of the current expression."""
        self.parts: dict[Any, Any] = {}
        """Values of subexpressions held in a C++ variable."""

    def gradient(self, expression: Any, parts: dict[Any, Any] | None = None) -> Any:
        """Evaluate an expression; its temporaries live to its end, as in C++."""
        return self.gradients([expression], parts)[0]

    def gradients(self, expressions: Sequence[Any], parts: dict[Any, Any] | None = None) -> list[Any]:
        """Evaluate the expressions of one C++ function; its temporaries live to its end."""
        self.temporaries, self.parts = [], parts or {}
        if parts is None:
            for shared in (part for expression in expressions for part in _shared_in(expression)):
                self.value(shared)
        values = list(map(self.value, expressions))
        last = values[-1]
        if not isinstance(last, Tensor) or last.producer is None or last.graph.fused:
            return values
        read = {t.storage for t in (*values, *last.producer.operands) if isinstance(t, Tensor)}
        newest = {t.storage: t for t in self.temporaries}
        early = [t for storage, t in newest.items() if storage not in read]
        return [*values[:-1], keep_alive(last, *early) if early else last]

    def value(self, expression: Any) -> Any:
        """Evaluate an expression op by op, to a tensor or number."""
        if isinstance(expression, tuple):
            if expression not in self.parts:
                self.parts[expression] = self.apply_function(*expression)
            return self.parts[expression]
        if not isinstance(expression, str):
            return expression
        if expression == "g":
            return self.g
        op = self.pull.op
        if expression == "y":
            return self.factor(op.results[0])
        index = "abcd".index(expression)
        if index not in self.arguments:
            number = self.pull.kind.scalars[index]
            return number.conjugate() if isinstance(number, complex) and not self.plain else number
        return self.factor(op.operands[self.arguments.index(index)])

    def factor(self, t: Tensor) -> Tensor:
        """Return a factor of the gradient, conjugated if complex, as torch does first.

        The gradient of a real loss is taken by the conjugate (Wirtinger), so that the gradient of f(z) is multiplied
        by the conjugate of f'(z). The modulus has no derivative; its gradient uses the sign of the number itself.
        """
        saved = self.pull.saved(t)
        if t.dtype.kind != "complex" or self.pull.kind.function.name == "abs" or self.plain:
            return saved
        if t not in self.conjugates:
            self.conjugates[t] = _resolved_conj(saved)
        return self.conjugates[t]

    def conjugated(self, expression: Any) -> Any:
        """Evaluate an expression of complex numbers, and conjugate its value."""
        was_plain, self.plain = self.plain, True
        value = self.value(expression)
        self.plain = was_plain
        if not isinstance(value, Tensor) or value.dtype.kind != "complex":
            return value
        self.temporaries.append(_resolved_conj(value))
        return self.temporaries[-1]

    def apply_function(self, name: str, *arguments: Any) -> Any:
        """Apply a function; expressions of numbers alone add no op."""
        function = name.removesuffix("_")
        if function == "causal_mask_backward":
            return apply(Pointwise(function=FUNCTIONS[function], masked=self.pull.kind.masked), [self.g], function)[0]
        if function == "one":
            return self.in_one_kernel(arguments[0])
        if function == "conj":
            return self.conjugated(arguments[0])
        if function in ("call", "shared"):
            return self.scoped_value(arguments[0])
        if function == "again":
            op = self.pull.op
            kind = replace(self.pull.kind, inplace=False)
            self.temporaries += apply(kind, [self.factor(t) for t in op.operands], function)
            self.temporaries[-1].producer.call = op.call  # type: ignore[union-attr]  # just added, so it has a producer
            return self.temporaries[-1]
        first = self.value(arguments[0])
        if not isinstance(first, Tensor) and function in ("where", "logical_and"):
            selected = arguments[1 if first else -1] if function == "where" else arguments[1] if first else False
            return self.value(selected)
        values = [first, *map(self.value, arguments[1:])]
        if function == "where" and not any(isinstance(v, Tensor) for v in values[1:]):
            raise UnsupportedError(
                f"gradient of {self.pull.op.name!r}: where selects between two numbers, expected a tensor"
            )
        if function == "logical_and" and values[1] is True:
            return first
        if not any(isinstance(v, Tensor) for v in values):
            return _NUMBERS[function](*values)
        self.temporaries.append(_cast_first(function, values) or pointwise(function, *values, inplace=name != function))
        return self.temporaries[-1]

    def scoped_value(self, expression: Any) -> Any:
        """Evaluate an expression whose temporaries are freed at its end, as in a C++ function."""
        temporaries, previous = self.temporaries, {*self.parts}
        value = self.gradient(expression, {**self.parts})
        self.temporaries = [*temporaries, value] if isinstance(value, Tensor) else temporaries
        self.parts = {k: v for k, v in self.parts.items() if k in previous}
        return value

    def in_one_kernel(self, expression: Any) -> Any:
        """Evaluate an expression in one kernel, whose temporaries need no memory."""
        if current_graph().fused:
            return self.value(expression)
        with kernel(f"{self.pull.op.name.rpartition('/')[2]}_slope".replace(".", "_")) as body:
            result, self.parts = self.value(expression), {}
        self.temporaries = [t for t in self.temporaries if t.graph is not body]
        self.temporaries.append(body.export(result))
        return self.temporaries[-1]


@vjp(Dropout)
def _dropout(pull: VJPContext[Dropout]) -> Sequence[Tensor | None]:
    g, op = pull.grads[0], pull.op
    if g is None or not pull.needs[0]:
        return [None]
    g = restricted(g, op.results[0])
    return [pointwise("masked_scale", g, pull.saved(op.results[1]), 1 / (1 - pull.kind.p))]
