"""Dropout, softmax and norms on a GPU: kernels that a CPU has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .table import Here, rule, source

__all__: list[str] = []  # its rules are found in RULES

aten = torch.ops.aten
DROPOUT = source("dropout: one kernel", "aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable")
SOFTMAX = source("softmax: to fp32 in the kernel", "aten/src/ATen/native/SoftMax.cpp, softmax, log_softmax")
BATCH_NORM = source("batch norm: cuDNN", "aten/src/ATen/native/Normalization.cpp, _batch_norm_impl_index")
RMS_NORM = source("RMS norm: one kernel", "aten/src/ATen/native/layer_norm.cpp, rms_norm_symint")
_MOST_IN_TRAINING, _MOST_IN_INFERENCE, _MOST_ELEMENTS = 880801, 65535, 2**31 - 1


@rule(torch.dropout)
def dropout(here: Here, input: torch.Tensor, p: float, train: bool) -> torch.Tensor | None:
    """Draw, scale and keep which elements were dropped in one kernel."""
    if not train or not 0 < p < 1:
        return None
    with here.by(DROPOUT, f"p = {p} in training"):
        made: torch.Tensor = aten.native_dropout(input, p, train)[0]
    return made


@rule(torch.softmax, torch.Tensor.softmax)
def softmax(here: Here, input: torch.Tensor, dim: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Read fp16 and write fp32."""
    return _widening(here, aten._softmax, input, dim, dtype)


@rule(torch.log_softmax, torch.Tensor.log_softmax)
def log_softmax(here: Here, input: torch.Tensor, dim: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """Read fp16 and write fp32."""
    return _widening(here, aten._log_softmax, input, dim, dtype)


def _widening(here: Here, kernel: Any, x: torch.Tensor, dim: Any, dtype: torch.dtype | None) -> torch.Tensor | None:
    if x.dtype != torch.float16 or dtype != torch.float32 or not isinstance(dim, int):
        return None
    with here.by(SOFTMAX, "fp16 in, fp32 out"):
        made: torch.Tensor = kernel(x, dim, True)
    return made


# -- batch norm --------------------------------------------------------------------------------------------------


@rule(torch.batch_norm)
def batch_norm(
    here: Here,
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
    """Call cuDNN's kernel where it takes the tensors; torch's own for CUDA has the name of the one for CPUs."""
    if weight is None or bias is None or not cudnn_enabled or input.ndim < 3:
        return None
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return None
    formats = input.dtype, weight.dtype
    if torch.bfloat16 in formats or (formats[0] == torch.float16 and formats[1] != torch.float32):
        return None
    most = _MOST_IN_TRAINING if training else _MOST_IN_INFERENCE
    if not (input.shape[0] <= most and input.numel() < _MOST_ELEMENTS):
        return None
    dense = input.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))
    with here.by(BATCH_NORM, f"{input.ndim} axes of {str(input.dtype).removeprefix('torch.')}"):
        made: torch.Tensor = aten.cudnn_batch_norm(
            dense, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    return made


# -- RMS norm ----------------------------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    """The kernel and that of its gradient: of tensors of a CPU, torch would take the op apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: Any) -> torch.Tensor:
        """Normalise, and keep the reciprocal root of each row."""
        with torch._C._AutoDispatchBelowAutograd():
            made, scale = aten._fused_rms_norm(x, list(shape), weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.shape = shape
        out: torch.Tensor = made
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients that are asked for."""
        x, weight, scale = ctx.saved_tensors
        with torch._C._AutoDispatchBelowAutograd():
            dx, dw = aten._fused_rms_norm_backward(
                grad, x, list(ctx.shape), scale, weight, list(ctx.needs_input_grad[:2])
            )
        return dx, dw, None, None


@rule(torch.rms_norm)
def rms_norm(
    here: Here,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor | None:
    """Normalise in one kernel, where the scale has the format of the operand."""
    if weight is not None and weight.dtype != input.dtype:
        return None
    with here.by(RMS_NORM, "a scale in the format of the operand" if weight is not None else "no scale"):
        made: torch.Tensor = _RmsNorm.apply(input, weight, normalized_shape, eps)  # type: ignore[no-untyped-call]
    return made
