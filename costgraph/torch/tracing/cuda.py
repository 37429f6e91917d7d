"""Trace as on an NVIDIA GPU without one: kernel selection by torch's own conditions, and results of CUDA kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode

from ...errors import UnsupportedError
from ...hardware.specs import Arch
from ...ir.graph import Graph, need_graph
from ...ops.registry import adding
from .choices import Choices
from .composites import encoder_layer
from .meta_results import hint

__all__ = [
    "RULES",
    "SOURCES",
    "ProgramDevice",
    "Rule",
    "rule",
    "source",
    "CUDA_RESULTS",
    "CUDA_STATISTICS",
    "choose",
    "KERNELS",
    "on_cuda",
    "Dispatched",
    "dispatched",
]


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramDevice:
    """The device that the program appears to run on."""

    arch: Arch
    choices: Choices

    def by(self, rule: str, why: str) -> AbstractContextManager[None]:
        """Attribute the calls inside to a rule with a source."""
        assert rule in SOURCES, rule
        return self.choices.by(rule, why)


#: Maps the device and a function's arguments to its result; None if the function itself must run.
Rule = Callable[..., Any]

#: Rules by torch function.
RULES: dict[Any, Rule] = {}

#: Location of each rule in torch's sources, by rule name.
SOURCES: dict[str, str] = {}


def source(name: str, where: str) -> str:
    """Register the source of a rule; return the rule's name."""
    adding(SOURCES, "a source", name, what="rule")(where)
    return name


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Register a rule for torch functions."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


# -- results -----------------------------------------------------------------------------------------------------------
# Shapes, layouts and dtypes that CUDA kernels return, including tensors saved for the backward pass.
#
# torch's meta registrations omit where seeds are stored, cuDNN's reserve space, and several ops.

aten = torch.ops.aten
_ROWS = 32  # row block to which row sums are padded (kAlignLSE in mem_eff_attention/kernel_forward.h)
_GRU_SAVED_PER_UNIT = 5  # values saved by a GRU cell per hidden unit (GRU_WORKSPACE_MULTIPLIER in RNN.cu)
# by torch's RNN mode: values saved per step and hidden unit, i.e. gates, and the cell state of an LSTM
_SAVED_PER_UNIT = {0: 1, 1: 1, 2: 5, 3: 4}


# -- attention ---------------------------------------------------------------------------------------------------


def _random_state(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a tensor for the generator's seed or offset: eight bytes, whatever the integer dtype."""
    return x.new_empty(sizes, dtype=torch.int64)


def _logsumexp(x: torch.Tensor, *sizes: Any) -> torch.Tensor:
    return x.new_empty(sizes, dtype=torch.float32)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any) -> Any:
    """Return the output, the logsumexp of each row, and the generator's state (flash_api.cpp)."""
    out, empty = torch.empty_like(q), q.new_empty(0)
    return (
        out,
        _logsumexp(q, *q.shape[:3]),
        None,
        None,
        q.shape[2],
        k.shape[2],
        _random_state(q, 2),
        _random_state(q),
        empty,
    )


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, keeps: bool, *more: Any, **options: Any
) -> Any:
    """Return the output in BSHD layout, and the padded logsumexp if a gradient follows (attention.cu)."""
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    rows = (length + _ROWS - 1) // _ROWS * _ROWS if keeps else 0
    return out, _logsumexp(q, batch, heads, rows), _random_state(q), _random_state(q)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, keeps: bool, *more: Any, **options: Any
) -> Any:
    """Return the output in the layout of the queries, and the logsumexp if a gradient follows (cudnn/MHA.cpp)."""
    shape = (*q.shape[:3], v.shape[-1])
    order = sorted(range(4), key=lambda i: (-hint(q.stride()[i]), i))
    out = torch.empty_permuted(shape, order, dtype=q.dtype, device=q.device)
    rows = (*q.shape[:3], 1) if keeps else (0,)
    return out, _logsumexp(q, *rows), None, None, q.shape[2], k.shape[2], _random_state(q), _random_state(q), None


# -- recurrent layers --------------------------------------------------------------------------------------------


def _cudnn_rnn(
    x: torch.Tensor, weight: Sequence[torch.Tensor], per_layer: int, buffer: Any, h: torch.Tensor, c: Any, mode: int,
    size: Any, projected: Any, count: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    *rest: Any
) -> Any:  # fmt: skip
    """Return outputs, final states, and a lower bound on cuDNN's reserve space: gates and states for all steps."""
    directions, width = 1 + bidirectional, projected or size
    out = x.new_empty((*x.shape[:2], width * directions))
    last = h.new_empty((count * directions, *h.shape[1:]))
    cell = x.new_empty(0) if c is None else c.new_empty((count * directions, *c.shape[1:]))
    inner = _SAVED_PER_UNIT[mode] * size * count + width * (count - 1)
    reserve = x.shape[0] * x.shape[1] * directions * inner * x.element_size() if train else 0
    return out, last, cell, x.new_empty((reserve,), dtype=torch.uint8), buffer


def _cudnn_rnn_backward(
    x: torch.Tensor, weight: Sequence[torch.Tensor], per_layer: int, buffer: Any, h: torch.Tensor, c: Any, *rest: Any
) -> Any:
    """Return the requested gradients."""
    mask = rest[-1]
    grads = [
        None if t is None or not requested else torch.empty_like(t)
        for t, requested in zip((x, h, c), mask, strict=False)
    ]
    return *grads, [torch.empty_like(w) for w in weight] if mask[3] else []


def _gru_cell(x: torch.Tensor, gates: torch.Tensor, h: torch.Tensor, *biases: Any) -> Any:
    rows, size = h.shape
    return torch.empty_like(h), h.new_empty((rows, _GRU_SAVED_PER_UNIT * size))


def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, biased: bool) -> Any:
    rows, size = grad.shape
    gates = [grad.new_empty((rows, 3 * size)) for _ in range(2)]
    return *gates, torch.empty_like(grad), *(grad.new_empty(3 * size) if biased else None for _ in range(2))


# -- norms -------------------------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, shape: Sequence[Any], weight: Any, eps: Any) -> Any:
    """Return a contiguous output, and the reciprocal root mean square of each row."""
    lead = x.shape[: x.ndim - len(shape)]
    return x.new_empty(x.shape), x.new_empty((*lead, *(1 for _ in shape)), dtype=_accumulation_dtype(x))


def _accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the accumulation dtype in CUDA kernels (toAccumulateType in AccumulateType.h)."""
    return torch.float32 if x.dtype.itemsize == 2 else x.dtype


def _with_wide_statistics(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return mean and reciprocal deviation of a norm in the accumulation dtype; on a CPU they have the input's dtype.

    `layer_norm_cuda` in layer_norm_kernel.cu, `batch_norm_cuda` in Normalization.cu; `GroupNormKernelImpl` rounds too.
    """

    def run(x: torch.Tensor, *rest: Any) -> Any:
        out, *statistics = norm(x, *rest)
        return out, *(torch.empty_like(t, dtype=_accumulation_dtype(x)) for t in statistics)

    return run


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[Any], scale: Any, weight: Any, mask: Sequence[bool]
) -> Any:
    grad_input = x.new_empty(x.shape) if mask[0] else None
    return grad_input, weight.new_empty(weight.shape) if mask[1] and weight is not None else None


# -- counts ------------------------------------------------------------------------------------------------------


def _histogram(x: torch.Tensor, bins: int = 100, *limits: Any, **more: Any) -> torch.Tensor:
    """Return one count per bin; CUDA also accepts integers (SummaryOps.cu)."""
    return x.new_empty((bins,))


#: By op.
CUDA_RESULTS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}

#: By op; a CPU runs these too, with other results.
CUDA_STATISTICS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histogram,
    **{norm: _with_wide_statistics(norm) for norm in (aten.native_layer_norm.default, aten.native_batch_norm.default)},
}


# -- attention ---------------------------------------------------------------------------------------------------------

_CHOICE = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
_CALL = "aten/src/ATen/native/transformers/attention.cpp, scaled_dot_product_attention"
CUDNN = source("attention: cuDNN", f"{_CHOICE}, check_prefer_cudnn_attention, can_use_cudnn_attention; {_CALL}")
FLASH = source("attention: flash", f"{_CHOICE}, can_use_flash_attention; {_CALL}")
EFFICIENT = source("attention: efficient", f"{_CHOICE}, can_use_mem_efficient_attention; {_CALL}")
MATH = source("attention: math", f"{_CHOICE}, select_sdp_backend; {_CALL}")

_HALF = (torch.float16, torch.bfloat16)
_MAX_CUDNN_AXIS = 65535  # cuDNN's limit for batch entries and for heads
_MASK_ALIGNMENT = 8  # elements to which rows of a mask are padded


@dataclass(frozen=True)
class FunctionCall:
    """Arguments of `scaled_dot_product_attention`, and the device."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    """whether keys and values may have fewer heads (`enable_gqa`)"""
    arch: Arch

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether a gradient follows."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


# -- common conditions: None if met, else the reason --------------------------------------------------------------

Check = Callable[[FunctionCall], str | None]


def _four_axes(a: FunctionCall) -> str | None:
    """check_tensor_shapes."""
    return None if all(t.ndim == 4 for t in a.tensors) else "tensors without four axes"


def _last_axis(a: FunctionCall) -> str | None:
    """check_last_dim_stride_equals_1_dense."""
    tensors = a.tensors if a.mask is None else (*a.tensors, a.mask)
    return None if all(t.stride(-1) == 1 for t in tensors) else "a last axis that is not contiguous"


def _batch(a: FunctionCall) -> str | None:
    sizes = [t.shape[0] for t in a.tensors]
    return None if sizes[0] == sizes[1] == sizes[2] else "batches of different sizes"


def _heads(a: FunctionCall, *, grouped: bool, same: bool = True) -> str | None:
    """check_batch_size_and_num_heads_dense."""
    q, k, v = (t.shape[-3] for t in a.tensors)
    if _batch(a):
        return _batch(a)
    if not (a.grouped and grouped):
        return None if q == k == v else "unequal numbers of query, key and value heads"
    if (same and k != v) or q % k or q % v:
        return "head counts that do not divide"
    return None


def _grouped(a: FunctionCall) -> str | None:
    return _heads(a, grouped=True)


def _grouped_unequal_kv(a: FunctionCall) -> str | None:
    return _heads(a, grouped=True, same=False)


def _all_heads(a: FunctionCall) -> str | None:
    return _heads(a, grouped=False)


def _half_precision(a: FunctionCall) -> str | None:
    """check_dtypes_low_precision."""
    formats = _HALF if a.arch.major >= 8 else _HALF[:1]
    fits = a.query.dtype in formats and len({t.dtype for t in a.tensors}) == 1
    return None if fits else f"{_format_name(a.query.dtype)} on {a.arch}"


def _format_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _since(major: int) -> Check:
    return lambda a: None if a.arch.major >= major else str(a.arch)


# -- cuDNN -------------------------------------------------------------------------------------------------------


def _preferred(a: FunctionCall) -> str | None:
    """check_prefer_cudnn_attention: otherwise cuDNN ranks after the math backend, which always applies."""
    return None if a.arch.major in (9, 10) else str(a.arch)


def _enabled_cudnn(a: FunctionCall) -> str | None:
    return None if torch._C._get_cudnn_sdp_enabled() else "switched off"


def _mask_shape(a: FunctionCall) -> str | None:
    """check_attn_mask_shape."""
    mask = a.mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "a mask with a gradient"
    expected = (a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
    fits = mask.ndim in (2, 4) and all(
        _equals(n, 1) or n == m for n, m in zip(mask.shape, expected[4 - mask.ndim :], strict=True)
    )
    return None if fits else "a mask of another shape"


def _equals(n: Any, number: int) -> bool:
    return isinstance(n, int) and n == number


def _cudnn_dropout(a: FunctionCall) -> str | None:
    """check_cudnn_dropout."""
    return None if a.dropout * 16 == floor(a.dropout * 16) else "dropout that is not a multiple of 1/16"


def _cudnn_shapes(a: FunctionCall) -> str | None:
    """check_cudnn_tensor_shapes."""
    size, value_size = a.query.shape[3], a.value.shape[3]
    limit = 128
    if a.arch == Arch(9, 0):
        limit = 256
    elif a.arch.major == 10 and (size, value_size) == (192, 128):
        limit = 192
    if size > limit or value_size > limit:
        return f"a head size above {limit}"
    if size % 8 or value_size % 8:
        return "a head size that is not a multiple of 8"
    if _equals(a.key.shape[2], 1):
        return "one key"
    if a.dropout and _equals(a.query.shape[2], 1):
        return "one query with dropout"
    return (
        None
        if all(n <= _MAX_CUDNN_AXIS for n in a.query.shape[:2])
        else f"more than {_MAX_CUDNN_AXIS} batch entries or heads"
    )


_CUDNN_CHECKS: tuple[Check, ...] = (
    _preferred, _enabled_cudnn, _four_axes, _half_precision, _mask_shape, _since(8), _cudnn_dropout, _last_axis,
    _grouped_unequal_kv, _cudnn_shapes,
)  # fmt: skip


# -- flash -------------------------------------------------------------------------------------------------------


def _enabled_flash(a: FunctionCall) -> str | None:
    """check_runtime_disabled_flash."""
    return None if torch._C._get_flash_sdp_enabled() else "switched off"


def _no_mask(a: FunctionCall) -> str | None:
    """check_for_attn_mask."""
    return None if a.mask is None else "a mask"


def _flash_head_size(a: FunctionCall) -> str | None:
    """check_head_dim_size_flash."""
    sizes = [t.shape[-1] for t in a.tensors]
    return (
        None if sizes[0] == sizes[1] == sizes[2] and sizes[0] <= 256 else "a head size above 256, or unequal head sizes"
    )


def _large_gradient(a: FunctionCall) -> str | None:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    small = Arch(8, 6) <= a.arch <= Arch(8, 9) or a.arch.major == 12
    size = a.query.shape[-1]
    fits = not (a.trains and small) or size <= 192 or (not a.dropout and size > 224)
    return None if fits else f"gradients for head size {size} on {a.arch}"


def _square(a: FunctionCall) -> str | None:
    """check_flash_causal_non_square_seqlens."""
    return None if not a.causal or a.query.shape[-2] == a.key.shape[-2] else "a causal mask that is not square"


_FLASH_CHECKS: tuple[Check, ...] = (
    _enabled_flash, _four_axes, _no_mask, _flash_head_size, _since(8), _large_gradient, _square, _half_precision,
    _grouped, _last_axis,
)  # fmt: skip


# -- efficient ---------------------------------------------------------------------------------------------------


def _enabled_efficient(a: FunctionCall) -> str | None:
    """check_runtime_disabled_mem_efficient."""
    return None if torch._C._get_mem_efficient_sdp_enabled() else "switched off"


def _alignment(a: FunctionCall) -> int:
    """Return the alignment in elements: minimum_gemm_alignment."""
    half = a.query.dtype in _HALF
    minimum = 4 if a.arch.major >= 8 else 1
    return max(minimum, 128 // (16 if half else 32)) if a.arch.major >= 8 or (a.arch.major == 7 and half) else minimum


def _efficient_head_size(a: FunctionCall) -> str | None:
    """check_head_dim_size_mem_efficient, check_data_ptr_alignment_mem_efficient."""
    step = _alignment(a)
    q, k, v = (t.shape[-1] for t in a.tensors)
    if q != k or q % step or v % step:
        return f"a head size that is not a multiple of {step}"
    offsets = [t.storage_offset() for t in a.tensors]
    skewed = a.arch.major >= 8 and any(isinstance(n, int) and n % step for n in offsets)
    return f"a storage offset that is not a multiple of {step}" if skewed else None


def _efficient_formats(a: FunctionCall) -> str | None:
    formats = (torch.float32, *(_HALF if a.arch.major >= 8 else _HALF[:1]))
    return None if a.query.dtype in formats else f"{_format_name(a.query.dtype)} on {a.arch}"


_EFFICIENT_CHECKS: tuple[Check, ...] = (
    _enabled_efficient, _four_axes, _efficient_head_size, _last_axis, _all_heads, _efficient_formats,
)  # fmt: skip

_KERNELS = ((CUDNN, _CUDNN_CHECKS), (FLASH, _FLASH_CHECKS), (EFFICIENT, _EFFICIENT_CHECKS))


def choose(call: FunctionCall) -> tuple[str, str]:
    """Return the first backend whose conditions are met, and why each earlier one was rejected."""
    rejected: list[str] = []
    for name, checks in _KERNELS:
        why = next((text for check in checks if (text := check(call)) is not None), None)
        if why is None:
            return name, "; ".join(rejected) or f"the first in torch's order on {call.arch}"
        rejected.append(f"not {name.partition(': ')[2]}: {why}")
    return MATH, "; ".join(rejected)


# -- the call ----------------------------------------------------------------------------------------------------


@rule(torch.nn.functional.scaled_dot_product_attention)
def attend(
    device: ProgramDevice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the selected backend."""
    call = FunctionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, device.arch)
    name, why = choose(call)
    with device.by(name, why):
        return _ATTENTION_BACKENDS[name](call, scale)


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype, masked_value: float) -> torch.Tensor | None:
    """Convert a boolean mask to an additive one: convert_boolean_attn_mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(masked_value, dtype=dtype))


def _by_cudnn(a: FunctionCall, scale: float | None) -> torch.Tensor:
    mask = _additive_mask(a.mask, a.query.dtype, -65504.0)
    more = (mask, a.trains, a.dropout, a.causal, False)
    return _first(aten._scaled_dot_product_cudnn_attention(*a.tensors, *more, scale=scale))


def _by_flash(a: FunctionCall, scale: float | None) -> torch.Tensor:
    """Pad heads to a multiple of 8, and slice the result."""
    size = a.query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    padded = [torch.nn.functional.pad(t, (0, -size % 8)) if size % 8 else t for t in a.tensors]
    out = _first(aten._scaled_dot_product_flash_attention(*padded, a.dropout, a.causal, False, scale=scale))
    return out[..., :size] if size % 8 else out


def _by_efficient(a: FunctionCall, scale: float | None) -> torch.Tensor:
    mask = _additive_mask(a.mask, a.query.dtype, float("-inf"))
    if mask is not None:
        mask = _aligned(mask).expand(*a.query.shape[:3], a.key.shape[2])
    more = (mask, a.trains, a.dropout, a.causal)
    return _first(aten._scaled_dot_product_efficient_attention(*a.tensors, *more, scale=scale))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose row strides are multiples of 8 elements: preprocess_mask."""
    if mask.stride(-1) == 1 and all(s % _MASK_ALIGNMENT == 0 for s in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


def _by_math(a: FunctionCall, scale: float | None) -> torch.Tensor:
    mask = _additive_mask(a.mask, a.query.dtype, float("-inf"))
    more = (mask, a.dropout, a.causal, None)
    return _first(aten._scaled_dot_product_attention_math(*a.tensors, *more, scale=scale, enable_gqa=a.grouped))


def _first(outputs: Any) -> torch.Tensor:
    out: torch.Tensor = outputs[0]
    return out


_ATTENTION_BACKENDS: dict[str, Callable[[FunctionCall, float | None], torch.Tensor]] = {
    CUDNN: _by_cudnn,
    FLASH: _by_flash,
    EFFICIENT: _by_efficient,
    MATH: _by_math,
}


# -- layers ------------------------------------------------------------------------------------------------------------
# Dropout, softmax and norms with CUDA-only kernels.

DROPOUT = source("dropout: one kernel", "aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable")
SOFTMAX = source("softmax: to fp32 in the kernel", "aten/src/ATen/native/SoftMax.cpp, softmax, log_softmax")
BATCH_NORM = source("batch norm: cuDNN", "aten/src/ATen/native/Normalization.cpp, _batch_norm_impl_index")
RMS_NORM = source("RMS norm: one kernel", "aten/src/ATen/native/layer_norm.cpp, rms_norm_symint")
_MAX_BATCH_IN_TRAINING, _MAX_BATCH_IN_INFERENCE, _MAX_ELEMENTS = 880801, 65535, 2**31 - 1


@rule(torch.dropout)
def dropout(device: ProgramDevice, input: torch.Tensor, p: float, train: bool) -> torch.Tensor | None:
    """Call the fused dropout kernel, which saves the mask."""
    if not train or not 0 < p < 1:
        return None
    with device.by(DROPOUT, f"p = {p} in training"):
        out: torch.Tensor = aten.native_dropout(input, p, train)[0]
    return out


@rule(torch.softmax, torch.Tensor.softmax)
def softmax(
    device: ProgramDevice, input: torch.Tensor, dim: Any, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Cast fp16 to fp32 inside the kernel."""
    return _softmax_to_fp32(device, aten._softmax, input, dim, dtype)


@rule(torch.log_softmax, torch.Tensor.log_softmax)
def log_softmax(
    device: ProgramDevice, input: torch.Tensor, dim: Any, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """Cast fp16 to fp32 inside the kernel."""
    return _softmax_to_fp32(device, aten._log_softmax, input, dim, dtype)


def _softmax_to_fp32(
    device: ProgramDevice, kernel: Any, x: torch.Tensor, dim: Any, dtype: torch.dtype | None
) -> torch.Tensor | None:
    if x.dtype != torch.float16 or dtype != torch.float32 or not isinstance(dim, int):
        return None
    with device.by(SOFTMAX, "fp16 in, fp32 out"):
        out: torch.Tensor = kernel(x, dim, True)
    return out


# -- batch norm --------------------------------------------------------------------------------------------------


@rule(torch.batch_norm)
def batch_norm(
    device: ProgramDevice,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor | None:
    """Call cuDNN's kernel if it accepts the tensors; torch's own CUDA kernel has the same op name as the CPU's."""
    if weight is None or bias is None or not cudnn_enabled or input.ndim < 3:
        return None
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return None
    formats = input.dtype, weight.dtype
    if torch.bfloat16 in formats or (formats[0] == torch.float16 and formats[1] != torch.float32):
        return None
    limit = _MAX_BATCH_IN_TRAINING if training else _MAX_BATCH_IN_INFERENCE
    if not (input.shape[0] <= limit and input.numel() < _MAX_ELEMENTS):
        return None
    dense = input.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))
    with device.by(BATCH_NORM, f"{input.ndim} axes of {str(input.dtype).removeprefix('torch.')}"):
        out: torch.Tensor = aten.cudnn_batch_norm(
            dense, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    return out


# -- RMS norm ----------------------------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    """The fused kernel and its backward kernel; for CPU tensors torch would decompose the op."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: Any) -> torch.Tensor:
        """Normalize, and save the reciprocal root mean square of each row."""
        with torch._C._AutoDispatchBelowAutograd():
            normalized, scale = aten._fused_rms_norm(x, list(shape), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.shape = shape
        out: torch.Tensor = normalized
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the requested gradients."""
        x, weight, scale = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            dx, dw = aten._fused_rms_norm_backward(
                grad, x, list(ctx.shape), scale, weight, list(ctx.needs_input_grad[:2])
            )
        return dx, dw, None, None


@rule(torch.rms_norm)
def rms_norm(
    device: ProgramDevice,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor | None:
    """Call the fused kernel if the weight has the operand's dtype."""
    if weight is not None and weight.dtype != input.dtype:
        return None
    with device.by(RMS_NORM, "a scale in the format of the operand" if weight is not None else "no scale"):
        out: torch.Tensor = _RmsNorm.apply(input, weight, normalized_shape, eps)  # type: ignore[no-untyped-call]
    return out


# -- recurrent layers --------------------------------------------------------------------------------------------------
# On a GPU, cuDNN runs all layers and steps in one call; cells run as one kernel after their matmuls.

LAYERS = source(
    "recurrent: cuDNN", "aten/src/ATen/native/RNN.cpp, lstm; aten/src/ATen/native/cudnn/RNN.cpp, _cudnn_impl"
)
CELL = source("recurrent: cell in one kernel", "aten/src/ATen/native/RNN.cpp, LSTMCell, GRUCell")
_FORMATS = (torch.float64, torch.float32, torch.float16)  # cudnn_is_acceptable
# torch's RNN modes
_RELU, _TANH, _LSTM, _GRU = range(4)


def _cudnn_layers(
    device: ProgramDevice,
    mode: int,
    x: Any,
    state: Any,
    cell: Any,
    weights: Sequence[torch.Tensor],
    flags: Sequence[Any],
) -> Any:
    if x.dtype not in _FORMATS or not torch.backends.cudnn.enabled:
        raise UnsupportedError(f"cuDNN has no recurrent layers in {x.dtype}; expected fp32, fp16 or fp64")
    biased, count, dropout, train, bidirectional, batch_first = flags
    size, projected = state.shape[2], 0
    if cell is not None and cell.shape[2] != size:
        size, projected = cell.shape[2], size
    per_layer = (4 if biased else 2) + bool(projected)
    # the weights are consecutive in memory, so cuDNN's weight buffer is not allocated separately
    sizes: tuple[Any, ...] = (mode, size, projected, count, batch_first, dropout, train, bidirectional, [], None)
    with device.by(LAYERS, f"{str(x.dtype).removeprefix('torch.')}"):
        return aten._cudnn_rnn(x, list(weights), per_layer, x.new_empty(0), state, cell, *sizes)[:3]


def _need_padded(has_biases: object) -> None:
    """Raise for a packed sequence."""
    if not isinstance(has_biases, bool):
        raise UnsupportedError("the lengths of a packed sequence are data; expected a padded batch")


@rule(torch.lstm)
def lstm(device: ProgramDevice, input: Any, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
    """Call cuDNN."""
    _need_padded(has_biases)
    state, cell = hx
    return tuple(_cudnn_layers(device, _LSTM, input, state, cell, params, (has_biases, *rest)))


def _single_state_layers(mode: int) -> Callable[..., Any]:
    def layers(device: ProgramDevice, input: Any, hx: Any, params: Any, has_biases: Any, *rest: Any) -> Any:
        _need_padded(has_biases)
        return tuple(_cudnn_layers(device, mode, input, hx, None, params, (has_biases, *rest))[:2])

    return layers


for _function, _mode in ((torch.rnn_relu, _RELU), (torch.rnn_tanh, _TANH), (torch.gru, _GRU)):
    rule(_function)(_single_state_layers(_mode))


# -- cells -------------------------------------------------------------------------------------------------------


@rule(torch.lstm_cell)
def lstm_cell(
    device: ProgramDevice, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Run both matmuls, then the fused cell with its biases."""
    h, c = hx
    gates = input @ w_ih.t(), h @ w_hh.t()
    with device.by(CELL, "an LSTM's"):
        return tuple(aten._thnn_fused_lstm_cell(*gates, c, b_ih, b_hh)[:2])


@rule(torch.gru_cell)
def gru_cell(
    device: ProgramDevice, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Run both matmuls, then the fused cell with its biases."""
    gates = input @ w_ih.t(), hx @ w_hh.t()
    with device.by(CELL, "a GRU's"):
        return aten._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]


# -- transformer -------------------------------------------------------------------------------------------------------
# Fast path of multi-head attention in inference: a QKV projection and a fused attention kernel.

PROJECTED = source(
    "multi-head attention: a kernel of attention",
    "aten/src/ATen/native/transformers/cuda/attention.cu, native_multi_head_attention_cuda",
)


@rule(torch._native_multi_head_attention)
def attention(
    device: ProgramDevice,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, None] | None:
    """Run self-attention with a fused kernel; None if only the CPU's path applies."""
    size = embed_dim // num_head
    if query is not key or key is not value or size % 8 or need_weights or mask is not None:
        return None

    def by_heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, num_head, size).transpose(1, 2)

    heads = by_heads(query)
    name, why = choose(FunctionCall(heads, heads, heads, None, 0.0, False, False, device.arch))
    if name == MATH:
        return None
    del heads
    with device.by(PROJECTED, f"{name.partition(': ')[2]}: {why}"):
        x = functional.linear(query, qkv_weight, qkv_bias)
        context = attend(device, *map(by_heads, x.chunk(3, -1))).transpose(1, 2).reshape(x.shape[0], -1, embed_dim)
        return functional.linear(context, proj_weight, proj_bias), None


@rule(torch._transformer_encoder_layer_fwd)
def layer(device: ProgramDevice, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an encoder layer with the attention above."""

    def attended(*inputs: Any, **options: Any) -> Any:
        result = attention(device, *inputs, **options)
        return aten._native_multi_head_attention(*inputs, **options) if result is None else result

    return encoder_layer(*args, **kwargs, attention=attended)


# -- device ------------------------------------------------------------------------------------------------------------
# A CPU build of torch records no autograd nodes for CUDA tensors. So tensors report a CUDA device to the program but
# stay on the CPU below, and the rules above replace torch's device checks in C++.

#: Ops with a CUDA kernel that torch decomposes only on a CPU (`CompositeImplicitAutograd` with `CUDA` but without `CPU`
#: in native_functions.yaml).
KERNELS = frozenset({torch.ops.aten._fused_rms_norm.default})

_HOST = torch.device("cpu")
_REPORTED = torch.device("cuda", 0)
#: Device attributes of a tensor.
_DEVICE_ATTRIBUTES: dict[Any, Any] = {
    torch.Tensor.device.__get__: _REPORTED,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]  # torch has no types for it
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]  # torch has no types for it
    torch.Tensor.get_device: 0,
}
#: Checks for overridden torch functions, by module.
_OVERRIDE_CHECKS = ((torch._tensor, "has_torch_function_unary"), (torch.autograd, "has_torch_function"))
_TENSORS_WITHOUT_DATA = str(Path(torch.__file__).parent / "_subclasses")


class OnCuda(TorchFunctionMode):
    """Function mode under which torch functions behave as on a GPU."""

    unseen = True

    def __init__(self, device: ProgramDevice) -> None:
        super().__init__()
        self.device = device
        self._reentered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DEVICE_ATTRIBUTES:
            return _DEVICE_ATTRIBUTES[func]
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_on_host(a, func is torch.Tensor.to) for a in args)
        kwargs = {k: _on_host(v, k == "device") for k, v in kwargs.items()}
        if torch.is_autocast_enabled("cuda"):
            raise UnsupportedError(
                'torch.autocast("cuda") cannot be traced, since its casts depend on the device of each tensor; '
                "trace the module in fp32 and cast the graph with apply_precision"
            )
        replacement = RULES.get(func)
        result = None if replacement is None else replacement(self.device, *args, **kwargs)
        if result is not None:
            return result
        if func in _BACKWARD:
            self._reentered = True  # the function checks for overrides, and would dispatch to this mode once more
            with self:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def override_check(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """Return an override check that is False for a function being called again under this mode."""

        def has_override(*tensors: Any) -> bool:
            if self._reentered:
                self._reentered = False
                return False
            return original(*tensors)

        return has_override


#: Functions that may rerun the program, as recomputation does.
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _device(original: property) -> property:
    """Return the device property of fake tensors: CPU below the recorder, CUDA above."""

    def device(self: FakeTensor) -> Any:
        assert original.fget is not None
        return original.fget(self) if torch._C._is_torch_function_all_disabled() else _REPORTED

    return property(device)


def _on_host(value: Any, name: bool) -> Any:
    """Return an argument with CUDA devices replaced by the CPU."""
    if isinstance(value, torch.device):
        return _HOST if value.type == "cuda" else value
    return _HOST if name and isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _available(original: Callable[[], bool]) -> Callable[[], bool]:
    def is_available() -> bool:
        from_torch = sys._getframe(1).f_code.co_filename.startswith(_TENSORS_WITHOUT_DATA)
        return original() if from_torch else True

    return is_available


@contextmanager
def on_cuda(program_device: ProgramDevice) -> Iterator[None]:
    """Run a program as on a GPU."""
    mode = OnCuda(program_device)
    arch = program_device.arch
    answers: dict[str, Callable[..., Any]] = {
        "is_available": _available(torch.cuda.is_available),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or arch.major >= 8,
        "get_device_capability": lambda device=None: (arch.major, arch.minor),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    with ExitStack() as replaced:
        for name, answer in answers.items():
            replaced.enter_context(patch.object(torch.cuda, name, answer))
        for module, name in _OVERRIDE_CHECKS:
            replaced.enter_context(patch.object(module, name, mode.override_check(getattr(module, name))))
        replaced.enter_context(patch.object(FakeTensor, "device", _device(vars(FakeTensor)["device"])))
        # optimizers use foreach ops only if all tensors are plain CUDA tensors
        kinds = [*optimizers._foreach_supported_types, FakeTensor]
        replaced.enter_context(patch.object(optimizers, "_foreach_supported_types", kinds))
        replaced.enter_context(mode)
        yield


# -- calls by rule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispatched:
    """A call selected by a device-specific rule."""

    op: str
    """name of the op in the graph"""
    call: str
    """torch op with its overload"""
    rule: str
    """name of the rule"""
    why: str
    """conditions that decided it"""
    source: str
    """location of the rule in torch's sources; empty for a rule unknown to this version"""


def dispatched(graph: Graph) -> list[Dispatched]:
    """Return the calls of a trace that a device-specific rule selected, in program order.

    Parameters
    ----------
    graph : Graph
        Graph from `trace(..., device="cuda")`; other graphs have no such calls.

    Returns
    -------
    list of Dispatched
        One row per op whose call depends on the device.

    Raises
    ------
    GraphError
        If `graph` is not a graph.

    Examples
    --------
    >>> import torch
    >>> from costgraph.torch import dispatched, trace
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> x = torch.zeros(2, 3, 5, 64, dtype=torch.bfloat16)
    >>> for arch in "sm_90", "sm_80", "sm_75":
    ...     g = trace(Attention(), x, dims=[("B", None, "S", None)], device="cuda", arch=arch)
    ...     for row in dispatched(g)[:1]:
    ...         print(f"{row.rule} ({row.why})")
    attention: cuDNN (the first in torch's order on sm_90)
    attention: flash (not cuDNN: sm_80)
    attention: math (not cuDNN: sm_75; not flash: sm_75; not efficient: bfloat16 on sm_75)
    """
    need_graph("dispatched", graph)
    calls = ((op, op.call) for op in graph.walk())
    return [
        Dispatched(op.name, call.target, call.rule, call.why, SOURCES.get(call.rule, ""))
        for op, call in calls
        if call is not None and call.rule
    ]
