"""Costs of ops without arithmetic: copies, casts, views, constructors, and indexing, where each index reads its row."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ....algebra.polynomial import ONE, ZERO, Poly
from ..call import Call, Counts, Spec
from .table import is_number, operand_bytes, per_element, rule, unsupported
from .workspaces import overlapping

__all__: list[str] = []


# -- copies ------------------------------------------------------------------------------------------------------------


@rule(
    "_assert_async", "_assert_tensor_metadata", "_chunk_cat", "_linalg_check_errors", "_local_scalar_dense",
    "_pin_memory", "_reshape_alias_copy", "_to_copy", "alias_copy", "as_strided_scatter", "block_diag", "cat",
    "channel_shuffle", "clone", "complex", "constant_pad_nd", "diag_embed", "diagonal_backward", "diagonal_scatter",
    "expand_copy", "flip", "is_same_size", "lift", "lift_fresh", "lu_unpack", "masked_scatter_backward",
    "max_unpool2d", "max_unpool3d", "permute_copy", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "repeat", "repeat_interleave.self_int", "replication_pad1d", "replication_pad2d", "replication_pad3d", "roll",
    "rot90", "select_backward", "select_scatter", "slice_backward", "slice_scatter", "split_copy",
    "split_with_sizes_copy", "stack", "unbind_copy", "unfold_copy",
)  # fmt: skip
def moves(call: Call) -> Counts:
    """Count no FLOPs: operands are read and results written, or a value is passed to the host."""
    return Counts()


@rule(
    "arange", "bernoulli.Tensor", "bernoulli.float", "bernoulli.p", "cauchy", "copy", "exponential", "eye", "fill",
    "full", "full_like", "geometric", "hann_window", "hamming_window", "blackman_window", "bartlett_window",
    "kaiser_window", "linspace", "log_normal", "logspace", "new_full", "new_ones", "new_zeros", "normal", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "random",
    "scalar_tensor", "tril_indices", "triu_indices", "uniform", "zero", "zeros", "zeros_like", "_efficientzerotensor",
)  # fmt: skip
def constructors(call: Call) -> Counts:
    """Count no FLOPs: results are generated; an operand that is overwritten, or only gives a shape, is not read."""
    return Counts(reads=operand_bytes(call, self=ZERO))


@rule(
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_as",
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "set", "squeeze", "t",
    "transpose", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view",
)  # fmt: skip
def views_and_allocations(call: Call) -> Counts:
    """Count nothing: memory is allocated but not accessed, or a view is returned."""
    return Counts(reads=(ZERO,) * len(call.operands), writes=(ZERO,) * len(call.results))


@rule("bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "normal.Tensor_float",
      "normal.float_Tensor", "normal.Tensor_Tensor")  # fmt: skip
def random_draws(call: Call) -> Counts:
    """Count no FLOPs, as for all random numbers; parameters are read, an overwritten operand is not."""
    return Counts(reads=operand_bytes(call, self=ZERO) if call.inplace else None)


@rule("unfold_backward")
def unfold_backward(call: Call) -> Counts:
    """Count an addition per window element; the kernel allocates int64 indices for the axis."""
    index_bytes = call.out.sizes[call["dim"]] * 8
    return Counts(pointwise=call["grad_in"].numel, workspace=index_bytes)


@rule("repeat_interleave.Tensor")
def repeated(call: Call) -> Counts:
    """Count no FLOPs: each index is written as often as the operand states."""
    if call.get("output_size") is None:
        raise unsupported(call, "the result is as long as the sum of the operand, which is data", "output_size")
    return Counts()


@rule("col2im")
def col2im(call: Call) -> Counts:
    """Count an addition per window element.

    The CPU kernel allocates as much as the columns need and resizes that to the image: a second storage if the image is
    larger, as it is where windows leave out elements.
    """
    columns: Spec = call["self"]
    resized = not overlapping(call) and columns.numel != call.out.numel
    return Counts(pointwise=columns.numel, workspace=columns.bytes if resized else ZERO)


# -- lookups -----------------------------------------------------------------------------------------------------------


def _element_bytes(operand: Spec, count: Poly) -> Poly:
    """Return the bytes of `count` elements."""
    return count * operand.dtype.bytes


# -- reads -------------------------------------------------------------------------------------------------------


@rule("index", "_unsafe_index", "index_select", "gather", "take")
def picked(call: Call) -> Counts:
    """Count no FLOPs; one operand element is read per result element, besides the indices."""
    return Counts(reads=operand_bytes(call, self=_element_bytes(call["self"], call.out.numel)))


@rule("_unsafe_masked_index")
def picked_where(call: Call) -> Counts:
    """Count the selection; one operand element is read per result element."""
    read = operand_bytes(call, self=_element_bytes(call["self"], call.out.numel))
    return Counts(pointwise=call.out.numel, reads=read)


# -- writes -----------------------------------------------------------------------------------------------------


def _update(call: Call, count: Poly, *, reads: bool, flops: Poly = ZERO, **read: Poly) -> Counts:
    """Return the cost to change `count` elements in `self`, in place or in a full copy."""
    operand: Spec = call["self"]
    if not call.inplace:
        return Counts(pointwise=flops, reads=operand_bytes(call, **read))
    touched = _element_bytes(operand, count)
    return Counts(
        pointwise=flops, reads=operand_bytes(call, self=touched if reads else ZERO, **read), writes=(touched,)
    )


def _region(operand: Spec, indices: Sequence[Any]) -> Poly:
    """Return how many elements are indexed; a mask may select every position that it covers."""
    shapes: list[Sequence[Poly]] = []
    axis, unindexed = 0, ONE
    for index in indices:
        if index is None:
            unindexed, axis = unindexed * operand.sizes[axis], axis + 1
        elif index.dtype.name in ("bool", "uint8"):
            shapes.append((prod(index.sizes, start=ONE),))
            axis += len(index.sizes)
        else:
            shapes.append(index.sizes)
            axis += 1
    return unindexed * prod(operand.sizes[axis:], start=_broadcast(shapes))


def _broadcast(shapes: Sequence[Sequence[Poly]]) -> Poly:
    rank = max(map(len, shapes), default=0)
    out = ONE
    for i in range(1, rank + 1):
        out = out * next((s[-i] for s in shapes if len(s) >= i and s[-i] != ONE), ONE)
    return out


@rule("index_put", "_unsafe_index_put", "_index_put_impl", "put")
def index_put(call: Call) -> Counts:
    """Count an addition per element if values are accumulated, else nothing."""
    count = call["index"].numel if call.name == "put" else _region(call["self"], call["indices"])
    adds = bool(call["accumulate"])
    return _update(call, count, reads=adds, flops=count if adds else ZERO)


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_copy")
def scatter(call: Call) -> Counts:
    """Count 1 per index, or per indexed row element, if the old value enters the result; else nothing.

    A scaled source counts 2; a mean also counts the indices, and divides each result element.
    """
    count = (call["source"] if "source" in call.arguments else call["index"]).numel
    joins = call.name not in ("scatter", "index_copy") or call.get("reduce") is not None
    flops = count if joins else ZERO
    if call.get("alpha") is not None and not is_number(call["alpha"], 1):
        flops = 2 * flops
    if call.get("reduce") == "mean":
        flops = 2 * count + call["self"].numel
    source = call.get("src")
    read = {"src": _element_bytes(source, count)} if isinstance(source, Spec) else {}
    return _update(call, count, reads=joins, flops=flops, **read)


@rule("index_fill")
def index_fill(call: Call) -> Counts:
    """Count no FLOPs; rows are overwritten."""
    operand: Spec = call["self"]
    if not operand.sizes:
        return _update(call, ONE, reads=False)
    rows = operand.numel / operand.sizes[call["dim"]] * call["index"].numel
    return _update(call, rows, reads=False)


@rule("masked_scatter")
def masked_scatter(call: Call) -> Counts:
    """Count no FLOPs; up to one source element is read per position."""
    return Counts(reads=operand_bytes(call, source=_element_bytes(call["source"], call["self"].numel)))


# -- embedding bags ----------------------------------------------------------------------------------------------


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(call: Call) -> Counts:
    """Count 1 per row element, 2 if rows have weights, and the division for a mean."""
    weight: Spec = call["weight"]
    rows = call["indices"].numel * weight.sizes[1]
    steps = ["mul", "add"] if call.get("per_sample_weights") is not None else ["add"]
    counts = per_element(rows, *steps)
    mean = call.out.numel if call["mode"] == 1 else ZERO
    read = operand_bytes(call, weight=_element_bytes(weight, rows))
    return Counts(pointwise=counts.pointwise + mean, reads=read)


@rule("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(call: Call) -> Counts:
    """Count an addition per row element, 2 if the row has a weight or enters a mean."""
    if call.get("sparse"):
        raise unsupported(call, "the gradient is sparse", "sparse=False")
    rows = call["indices"].numel * call["grad"].sizes[1]
    scaled = call.get("per_sample_weights") is not None or call["mode"] == 1
    return per_element(rows, *(("mul", "add") if scaled else ("add",)))


@rule("_embedding_bag_per_sample_weights_backward")
def bag_weights_backward(call: Call) -> Counts:
    """Count a dot product per index."""
    rows = call["indices"].numel * call["weight"].sizes[1]
    return Counts(matmul=2 * rows, reads=operand_bytes(call, weight=_element_bytes(call["weight"], rows)))


# -- search ------------------------------------------------------------------------------------------------------


@rule("isin")
def contained(call: Call) -> Counts:
    """Count a comparison per element and test element."""
    tests = call.get("test_elements")
    return per_element(call.out.numel * (tests.numel if isinstance(tests, Spec) else ONE), "eq")
