"""Workspaces of torch's kernels beyond operands and results: contiguous or cast copies, and other temporaries.

Entries were checked against the allocator with contiguous, transposed, expanded and sliced operands. Workspaces of BLAS
and convolution libraries are measured in docs/accuracy/workspaces.md and not included here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ....algebra.polynomial import ONE, ZERO, Poly, total
from ....dtypes import (
    DType,
    promote,
)
from ....dtypes import dtype as find_dtype
from ....ir.strides import (
    has_blas_layout,
    is_contiguous_in,
    memory_format,
)
from ..call import Call, Spec
from .table import (
    contiguous_copy,
    size,
)

__all__ = ["copied", "copies_matmul_operands", "copies_results", "neighbours", "overlapping", "workspace_of"]

#: Padding modes that copy elements near the borders.
_PADDING = ("reflection", "replication")
#: Arguments that a kernel makes contiguous, by op.
_DENSE: dict[str, tuple[str, ...]] = {
    "_softmax": ("self",),
    "_log_softmax": ("self",),
    "_softmax_backward_data": ("grad_output", "output"),
    "_log_softmax_backward_data": ("grad_output", "output"),
    "native_layer_norm": ("input",),
    "native_layer_norm_backward": ("grad_out", "input"),
    "nll_loss_forward": ("self",),
    "embedding_dense_backward": ("grad_output",),
    "im2col": ("self",),
    "col2im": ("self",),
    "_cdist_forward": ("x1", "x2"),
    "_cdist_backward": ("grad", "x1", "x2"),
    "avg_pool3d": ("self",),
    **{f"{kind}_pad1d": ("self",) for kind in _PADDING},
    **{f"{name}_backward": ("grad_output",) for name in (
        "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d", "upsample_nearest1d", "_upsample_nearest_exact1d",
        "upsample_linear1d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
        *(f"{kind}_pad1d" for kind in _PADDING),
    )},
}  # fmt: skip
#: Arguments that a kernel copies unless they are contiguous in their own memory format, which may be channels last.
_IN_OWN_FORMAT: dict[str, tuple[str, ...]] = {
    "max_pool2d_with_indices": ("self",),
    "max_pool3d_with_indices": ("self",),
    "avg_pool2d": ("self",),
    "_adaptive_avg_pool2d": ("self",),
    "adaptive_max_pool2d": ("self",),
    "pixel_shuffle": ("self",),
    "pixel_unshuffle": ("self",),
    **{f"{kind}_pad{rank}d": ("self",) for kind in _PADDING for rank in (2, 3)},
    "native_group_norm_backward": ("grad_out", "input"),
}  # fmt: skip
#: Arguments and results that a kernel copies unless they are contiguous in the memory format of another argument.
_IN_FORMAT_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    "adaptive_max_pool2d_backward": ("self", ("grad_output", "indices")),
    **{f"max_pool{rank}d_with_indices_backward": ("grad_output", ("grad_output", "indices")) for rank in (2, 3)},
    **{f"{name}_backward": ("grad_output", ("grad_output",)) for name in (
        "avg_pool2d", "_adaptive_avg_pool2d", *(f"{kind}_pad{rank}d" for kind in _PADDING for rank in (2, 3)),
    )},
}  # fmt: skip
#: The same if that gradient is contiguous in its own format; otherwise it is made contiguous.
_CHANNELS_LAST_OR_DENSE: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{name}_backward": ("grad_output", ("grad_output",))
    for name in (
        "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_trilinear3d",
        "upsample_nearest3d", "_upsample_nearest_exact3d",
    )
}  # fmt: skip
#: Arguments that a kernel copies unless they are contiguous as (batch, sequence, heads, width).
_BSHD = {"_scaled_dot_product_flash_attention_for_cpu_backward": ("grad_out",)}
#: Kernels on contiguous operands that copy results with another layout.
_DENSE_RESULTS = frozenset({"_upsample_bilinear2d_aa_backward", "gelu_backward"})
#: Arguments made contiguous only on a CPU.
_DENSE_ON_CPU: dict[str, tuple[str, ...]] = {
    "gelu_backward": ("grad_output",),
    "log_sigmoid_forward": ("self",),
    "max.default": ("self",),
    "min.default": ("self",),
    "binary_cross_entropy_with_logits": ("self",),
}
#: Matmul operands, copied if BLAS does not accept their layout, whole or one matrix at a time.
_MATMUL_OPERANDS = {
    "mm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
#: Elementwise ops whose operands a CPU casts first if dtypes differ, or are integer while the result is not.
_PROMOTED = frozenset((
    "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "clamp", "clamp_max", "clamp_min",
    "copysign", "cos", "cosh", "div", "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor_divide", "fmax", "fmin",
    "fmod", "ge", "gt", "hypot", "le", "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logical_and",
    "logical_or", "logical_xor", "lt", "maximum", "minimum", "mul", "ne", "pow", "reciprocal", "remainder", "rsqrt",
    "rsub", "sigmoid", "sin", "sinc", "sinh", "sqrt", "sub", "tan", "tanh", "where", "xlogy",
))  # fmt: skip
#: Arguments of elementwise ops that are never cast: masks.
_NEVER_CAST = frozenset({"condition", "mask"})
#: Reductions whose operand a CPU first casts to the dtype of the result.
_SUMS = frozenset({"sum", "cumsum", "cumprod", "prod", "mean"})
#: Temporaries as large as an operand.
_OPERAND_SIZED = {"logsumexp": "self", "native_batch_norm_backward": "input"}


#: Number of temporaries as large as the input, beyond the result: losses that compute each element before the
#: reduction, and a gradient in several steps.
_LOSSES = {
    "mse_loss": 1, "smooth_l1_loss": 1, "binary_cross_entropy_with_logits": 2, "huber_loss": 1,
    "soft_margin_loss_backward": 2,
}  # fmt: skip
#: The same without a reduction, and for gradients with class weights.
_UNREDUCED_LOSSES = {"binary_cross_entropy_with_logits": 1, "soft_margin_loss_backward": 2}
_WEIGHTED = {"binary_cross_entropy_with_logits_backward": 2}


#: Ops whose CUDA kernels need no temporary: they accumulate in place, or in shared memory.
_CPU_ONLY = frozenset({"native_batch_norm_backward", "native_layer_norm_backward"})


def workspace_of(call: Call) -> Poly:
    """Return the bytes of a kernel's workspace for the given layouts; 0 for kernels not listed."""
    name = call.name
    operands = copied(call)
    copies = [_copy_bytes(call.get(a), _memory_order(call, of)) for a, of in operands.items()]
    if copies_results(call) or name in _CHANNELS_LAST_OR_DENSE:
        copies.append(_copy_bytes(call.out, _memory_order(call, next(iter(operands.values())))))
    if name == "native_group_norm_backward" and call.device == "cpu":  # two sums per channel
        copies.append(2 * call["input"].sizes[0] * call["input"].sizes[1] * call["input"].dtype.bytes)
    copies += [_matrix_copy_bytes(call[a]) for a in _MATMUL_OPERANDS.get(name, ())]
    if call.device == "cpu":
        copies.append(_cast_bytes(call))
    if call.device != "cpu" and name in _CPU_ONLY:
        return total(copies)
    if name in _OPERAND_SIZED:
        copies.append(_operand_sized(call, call[_OPERAND_SIZED[name]]))
    if name == "native_layer_norm_backward" and call.get("weight") is not None:
        copies.append(2 * call["weight"].bytes)  # partial sums of both gradients per thread
    if name.startswith(("upsample_nearest", "_upsample_nearest")) and not name.endswith("_backward"):
        copies.append(neighbours(call, 1))
    if name == "kthvalue":  # sorted values and their int64 indices
        copies.append(call["self"].numel * (call["self"].dtype.bytes + 8))
    if name == "im2col" and overlapping(call):
        copies.append(call["self"].bytes)  # a copy of the operand
    if name in _LOSSES or name in _WEIGHTED:
        weighted = _WEIGHTED.get(name, 0) if call.get("pos_weight") is not None else 0
        tensors = (_LOSSES if call["reduction"] else _UNREDUCED_LOSSES).get(name, weighted)
        copies.append(tensors * call["self"].numel * call["self"].dtype.bytes)
    return total(copies)


def copied(call: Call) -> dict[str, str]:
    """Return the arguments that a kernel copies unless they are in the memory format that it computes in.

    Each maps to the argument that sets the memory format, to `bshd` for (batch, sequence, heads, width) in memory, or
    to "" if the kernel needs a contiguous tensor.
    """
    if call.name == "gelu_backward" and (call["approximate"] != "none" or contiguous_copy(call["self"])):
        return {}  # not computed by oneDNN
    names = (call.name, f"{call.name}.{call.overload}")
    tables = (_DENSE, *((_DENSE_ON_CPU,) if call.device == "cpu" else ()))
    dense = {a: "" for table in tables for name in names for a in table.get(name, ())}
    of, others = (_IN_FORMAT_OF | _CHANNELS_LAST_OR_DENSE).get(call.name, ("", ()))
    dense |= dict.fromkeys(_BSHD.get(call.name, ()), "bshd")
    return dense | {a: a for a in _IN_OWN_FORMAT.get(call.name, ())} | dict.fromkeys(others, of)


def copies_matmul_operands(call: Call) -> bool:
    """Whether a kernel is a matrix product, which copies operands whose layout BLAS does not accept."""
    return call.name in _MATMUL_OPERANDS


def copies_results(call: Call) -> bool:
    """Whether a kernel computes in the memory format of its copies, and copies results in another format back."""
    return call.name in _IN_FORMAT_OF or (call.name in _DENSE_RESULTS and bool(copied(call)))


def neighbours(call: Call, taps: int) -> Poly:
    """Return the bytes of the CPU kernel's neighbour table: indices and weights per row and column.

    For channels-last tensors only the cubic kernel builds it.
    """
    out = call.out
    if taps < 4 and out.strides[1] == ONE and out.sizes[1] != ONE:
        return ZERO
    return total(out.sizes[2:]) * (taps * (8 + out.dtype.bytes))


def overlapping(call: Call) -> bool:
    """Whether windows overlap: then CPU kernels first allocate a result as large as the operand."""
    return any(size(k) != s and size(k) != ONE for k, s in zip(call["kernel_size"], call["stride"], strict=True))


def _cast_bytes(call: Call) -> Poly:
    """Return the bytes of operands cast to the dtype in which a CPU kernel computes."""
    if call.name in _SUMS:
        dtype, operands = call.out.dtype, [call["self"]]
    elif call.name in _PROMOTED:
        operands = [t for k, t in call.arguments.items() if isinstance(t, Spec) and k not in _NEVER_CAST and t.sizes]
        dtype = _computation_dtype(call, operands)
    else:
        return ZERO
    return total(t.numel * dtype.bytes for t in operands if t.dtype != dtype)


def _computation_dtype(call: Call, operands: Sequence[Spec]) -> DType:
    """Return the dtype in which an elementwise op computes."""
    if not operands or (call.out.dtype.kind != "bool" and not call.inplace):
        return call.out.dtype
    promoted = reduce(promote, (t.dtype for t in operands))
    floats = any(isinstance(v, float) for v in call.arguments.values())
    return promoted if promoted.kind in ("float", "complex") or not floats else find_dtype("fp32")


def _operand_sized(call: Call, operand: Spec) -> Poly:
    grad: Spec | None = call.get("grad_out")
    if grad is not None and any(_copy_bytes(t, memory_format(t.sizes, t.strides)) for t in (grad, operand)):
        return ZERO  # batch norm has another kernel for noncontiguous tensors
    return operand.numel * operand.dtype.bytes


def _memory_order(call: Call, of: str) -> tuple[int, ...] | None:
    """Return the memory order of axes in which a kernel computes, None for contiguous."""
    if not of or of == "bshd":
        return (0, 2, 1, 3) if of else None
    order = memory_format(call[of].sizes, call[of].strides)
    return None if call.name in _CHANNELS_LAST_OR_DENSE and _copy_bytes(call[of], order) else order


def _copy_bytes(t: Spec | None, order: Sequence[int] | None) -> Poly:
    """Return the bytes of a copy in a given memory order; 0 if the tensor has that order, or is missing."""
    if t is None:
        return ZERO
    has_order = is_contiguous_in(t.sizes, t.strides, range(len(t.sizes)) if order is None else order)
    return ZERO if has_order else t.numel * t.dtype.bytes


def _matrix_copy_bytes(t: Spec) -> Poly:
    """Return the bytes to copy one matrix if BLAS does not accept its layout."""
    return ZERO if has_blas_layout(t.sizes, t.strides) else t.sizes[-2] * t.sizes[-1] * t.dtype.bytes
