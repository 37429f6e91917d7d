"""Costs of ops without arithmetic: copies, casts, views, constructors, random numbers and concatenations."""

from __future__ import annotations

from ....algebra.polynomial import ZERO
from ..call import Call, Counts, Spec
from .table import (
    operand_bytes,
    rule,
    unsupported,
)
from .workspaces import overlapping

__all__: list[str] = []  # its rules are found in RULES


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
