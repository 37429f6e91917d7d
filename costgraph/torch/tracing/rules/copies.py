"""Ops that move or make numbers and calculate nothing: copies, casts, factories, random numbers, joins, pads."""

from __future__ import annotations

from ....algebra.polynomial import ONE, ZERO
from ....ops.reach import larger
from ..call import Call, Counts, Spec
from .amounts import operand_bytes, size, unsupported
from .table import rule

__all__: list[str] = []  # its rules are found in RULES


@rule(
    "_chunk_cat", "_pin_memory", "_reshape_alias_copy", "_to_copy", "alias_copy", "block_diag", "cat",
    "channel_shuffle", "clone", "complex", "diag_embed", "expand_copy", "flip", "lift", "lift_fresh",
    "permute_copy", "pixel_shuffle", "pixel_unshuffle", "repeat", "repeat_interleave.self_int", "roll", "rot90",
    "split_copy", "split_with_sizes_copy", "stack", "unbind_copy",
)  # fmt: skip
def moved(call: Call) -> Counts:
    """Count no FLOPs: operands are read and results written."""
    return Counts()


@rule("copy")
def copy(call: Call) -> Counts:
    """Count no FLOPs; what is written over is not read."""
    return Counts(reads=operand_bytes(call, self=ZERO))


@rule(
    "arange", "bernoulli.p", "cauchy", "exponential", "eye", "fill", "full", "full_like", "geometric", "hann_window",
    "hamming_window", "blackman_window", "bartlett_window", "kaiser_window", "linspace", "log_normal", "logspace",
    "new_full", "new_ones", "new_zeros", "normal", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "random", "scalar_tensor", "tril_indices", "triu_indices",
    "uniform", "zero", "zeros", "zeros_like", "_efficientzerotensor",
)  # fmt: skip
def made(call: Call) -> Counts:
    """Count no FLOPs: numbers are made, random ones too; of tensors only shape and format are looked at."""
    return Counts(reads=operand_bytes(call, self=ZERO))


@rule("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_as")
def nothing(call: Call) -> Counts:
    """Count nothing at all: memory is taken and not touched."""
    return Counts(reads=(ZERO,) * len(call.operands), writes=(ZERO,) * len(call.results))


@rule(
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "set", "squeeze", "t",
    "transpose", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view",
)  # fmt: skip
def seen_otherwise(call: Call) -> Counts:
    """Count nothing at all: the same elements in another shape, of a new tensor or in place."""
    return nothing(call)


@rule("bernoulli", "multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "normal.Tensor_float",
      "normal.float_Tensor", "normal.Tensor_Tensor")  # fmt: skip
def drawn(call: Call) -> Counts:
    """Count no FLOPs, as of all random numbers; what is drawn from is read, what is written over is not."""
    return Counts(reads=operand_bytes(call, self=ZERO) if call.inplace else None)


@rule("bernoulli.float", "bernoulli.Tensor")
def masked(call: Call) -> Counts:
    """Count no FLOPs; the mask is written over."""
    return Counts(reads=operand_bytes(call, self=ZERO))


@rule("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
      "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(call: Call) -> Counts:
    """Count no FLOPs: the operand is read once, the result written."""
    return Counts()


@rule("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
      "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")  # fmt: skip
def pad_backward(call: Call) -> Counts:
    """Count an addition for each element of the padded gradient; the operand gives its shape alone."""
    return Counts(pointwise=call["grad_output"].numel, reads=operand_bytes(call, self=ZERO))


@rule("select_backward", "slice_backward", "diagonal_backward")
def placed(call: Call) -> Counts:
    """Count no FLOPs: zeros are written, and the gradient into them."""
    return Counts()


@rule("unfold_backward")
def unfold_backward(call: Call) -> Counts:
    """Count an addition for each element of each window; the kernel makes a list of all places of the axis."""
    places = call.out.sizes[call["dim"]] * 8
    return Counts(pointwise=call["grad_in"].numel, workspace=places)


@rule("repeat_interleave.Tensor")
def repeated(call: Call) -> Counts:
    """Count no FLOPs: each index is written as often as the operand says."""
    if call.get("output_size") is None:
        raise unsupported(call, "a result as long as the sum of the operand", "output_size")
    return Counts()


@rule("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
def replaced(call: Call) -> Counts:
    """Count no FLOPs: a copy of the operand in which a part is replaced."""
    return Counts()


@rule("tril", "triu")
def triangle(call: Call) -> Counts:
    """Count no FLOPs: elements are kept or zeros are written."""
    return Counts()


@rule("unfold_copy")
def unfolded(call: Call) -> Counts:
    """Count no FLOPs: every window is written out."""
    return Counts()


# A CPU's kernels make a result as large as the operand, and then one of the right size where that is larger. Windows
# that overlap are more than what they are taken from.


def _overlapping(call: Call) -> bool:
    return any(size(k) != s and size(k) != ONE for k, s in zip(call["kernel_size"], call["stride"], strict=True))


@rule("im2col")
def im2col(call: Call) -> Counts:
    """Count no FLOPs: every window is written out."""
    return Counts(workspace=call["self"].bytes if _overlapping(call) else ZERO)


@rule("col2im")
def col2im(call: Call) -> Counts:
    """Count an addition for each element of each window."""
    columns: Spec = call["self"]
    if _overlapping(call):
        extra = larger(columns.bytes, call.out.bytes) - call.out.bytes
    else:
        extra = ZERO if columns.numel == call.out.numel else columns.bytes
    return Counts(pointwise=columns.numel, workspace=extra)


@rule("_local_scalar_dense", "_assert_async", "_assert_tensor_metadata", "is_same_size")
def on_host(call: Call) -> Counts:
    """Count no FLOPs: a number is handed to the host, or a check is made."""
    return Counts()
