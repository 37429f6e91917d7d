"""Ops that read or change what indices name: an index reads its row, also where the same one comes twice."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ....algebra.polynomial import ONE, ZERO, Poly
from ..call import Call, Counts, Spec
from .table import (
    each,
    is_number,
    operand_bytes,
    rule,
    unsupported,
)

__all__: list[str] = []  # its rules are found in RULES


def _elements(operand: Spec, count: Poly) -> Poly:
    """Return the bytes of so many elements."""
    return count * operand.dtype.bytes


# -- reading -----------------------------------------------------------------------------------------------------


@rule("index", "_unsafe_index", "index_select", "gather", "take")
def picked(call: Call) -> Counts:
    """Count no FLOPs; of the operand one element is read for each of the result, and the indices."""
    return Counts(reads=operand_bytes(call, self=_elements(call["self"], call.out.numel)))


@rule("_unsafe_masked_index")
def picked_where(call: Call) -> Counts:
    """Count the selection; of the operand one element is read for each of the result."""
    read = operand_bytes(call, self=_elements(call["self"], call.out.numel))
    return Counts(pointwise=call.out.numel, reads=read)


# -- changing rows ----------------------------------------------------------------------------------------------


def _changed(call: Call, count: Poly, *, reads: bool, flops: Poly = ZERO, **read: Poly) -> Counts:
    """Return the cost of a change to some elements of `self`: in place of those alone, else in a copy of the whole."""
    operand: Spec = call["self"]
    if not call.inplace:
        return Counts(pointwise=flops, reads=operand_bytes(call, **read))
    touched = _elements(operand, count)
    return Counts(
        pointwise=flops, reads=operand_bytes(call, self=touched if reads else ZERO, **read), writes=(touched,)
    )


def _region(operand: Spec, indices: Sequence[Any]) -> Poly:
    """Return how many elements indices name: a mask may name every place that it covers."""
    shapes: list[Sequence[Poly]] = []
    axis, rest = 0, ONE
    for index in indices:
        if index is None:
            rest, axis = rest * operand.sizes[axis], axis + 1
        elif index.dtype.name in ("bool", "uint8"):
            shapes.append((prod(index.sizes, start=ONE),))
            axis += len(index.sizes)
        else:
            shapes.append(index.sizes)
            axis += 1
    return rest * prod(operand.sizes[axis:], start=_broadcast(shapes))


def _broadcast(shapes: Sequence[Sequence[Poly]]) -> Poly:
    rank = max(map(len, shapes), default=0)
    out = ONE
    for i in range(1, rank + 1):
        out = out * next((s[-i] for s in shapes if len(s) >= i and s[-i] != ONE), ONE)
    return out


@rule("index_put", "_unsafe_index_put", "_index_put_impl", "put")
def index_put(call: Call) -> Counts:
    """Count an addition for each element where values are added up, else nothing."""
    count = call["index"].numel if call.name == "put" else _region(call["self"], call["indices"])
    adds = bool(call["accumulate"])
    return _changed(call, count, reads=adds, flops=count if adds else ZERO)


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_copy")
def scatter(call: Call) -> Counts:
    """Count 1 for each index, or element of rows, where what is there stays part of the result, else nothing.

    What is scaled counts 2; a mean counts how many there are as well, and divides each element of the result.
    """
    count = (call["source"] if "source" in call.arguments else call["index"]).numel
    joins = call.name not in ("scatter", "index_copy") or call.get("reduce") is not None
    flops = count if joins else ZERO
    if call.get("alpha") is not None and not is_number(call["alpha"], 1):
        flops = 2 * flops
    if call.get("reduce") == "mean":
        flops = 2 * count + call["self"].numel
    source = call.get("src")
    read = {"src": _elements(source, count)} if isinstance(source, Spec) else {}
    return _changed(call, count, reads=joins, flops=flops, **read)


@rule("index_fill")
def index_fill(call: Call) -> Counts:
    """Count no FLOPs; rows are written over."""
    operand: Spec = call["self"]
    if not operand.sizes:
        return _changed(call, ONE, reads=False)
    rows = operand.numel / operand.sizes[call["dim"]] * call["index"].numel
    return _changed(call, rows, reads=False)


@rule("masked_scatter")
def masked_scatter(call: Call) -> Counts:
    """Count no FLOPs: of the source as much may be read as there are places."""
    return Counts(reads=operand_bytes(call, source=_elements(call["source"], call["self"].numel)))


# -- bags of embeddings ------------------------------------------------------------------------------------------


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Counts:
    """Count 1 for each element of each row, 2 where rows have weights, and the division of a mean."""
    weight: Spec = call["weight"]
    rows = call["indices"].numel * weight.sizes[1]
    steps = ["mul", "add"] if call.get("per_sample_weights") is not None else ["add"]
    counts = each(rows, *steps)
    mean = call.out.numel if call["mode"] == 1 else ZERO
    read = operand_bytes(call, weight=_elements(weight, rows))
    return Counts(pointwise=counts.pointwise + mean, reads=read)


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(call: Call) -> Counts:
    """Count an addition for each element of each row, 2 where it has a weight or is part of a mean."""
    if call.get("sparse"):
        raise unsupported(call, "a sparse gradient", "sparse=False")
    rows = call["indices"].numel * call["grad"].sizes[1]
    scaled = call.get("per_sample_weights") is not None or call["mode"] == 1
    return each(rows, *(("mul", "add") if scaled else ("add",)))


@rule("_embedding_bag_per_sample_weights_backward")
def bag_weights_backward(call: Call) -> Counts:
    """Count a dot product of two rows for each index."""
    rows = call["indices"].numel * call["weight"].sizes[1]
    return Counts(matmul=2 * rows, reads=operand_bytes(call, weight=_elements(call["weight"], rows)))


# -- searching ---------------------------------------------------------------------------------------------------


@rule("isin")
def contained(call: Call) -> Counts:
    """Count a comparison of each element with each of the others."""
    tests = call.get("test_elements")
    return each(call.out.numel * (tests.numel if isinstance(tests, Spec) else ONE), "eq")
