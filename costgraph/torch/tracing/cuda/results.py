"""Results of kernels for CUDA: shapes, layouts and formats as the kernels have them, what is saved for a gradient too.

torch's own registrations leave out where seeds lie, what cuDNN reserves, and several ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..results import hint

__all__ = ["CUDA_RESULTS", "CUDA_STATISTICS"]

aten = torch.ops.aten
_ROWS = 32  # of a block, to which row sums are padded (kAlignLSE of mem_eff_attention/kernel_forward.h)
_WORKSPACE = 5  # values that a GRU's cell keeps, for each of its state (GRU_WORKSPACE_MULTIPLIER of RNN.cu)
# torch's numbers of modes, and the values of a step that a gradient starts from: gates, and an LSTM's memory
_KEPT = {0: 1, 1: 1, 2: 5, 3: 4}


# -- attention ---------------------------------------------------------------------------------------------------


def _seed(x: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Make a number of the generator's state: eight bytes, in whichever format of whole numbers."""
    return x.new_empty(sizes, dtype=torch.int64)


def _sums(x: torch.Tensor, *sizes: Any) -> torch.Tensor:
    return x.new_empty(sizes, dtype=torch.float32)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **options: Any) -> Any:
    """Make the result, the logarithm of the sum of each row, and the state of the generator (flash_api.cpp)."""
    out, nothing = torch.empty_like(q), q.new_empty(0)
    return out, _sums(q, *q.shape[:3]), None, None, q.shape[2], k.shape[2], _seed(q, 2), _seed(q), nothing


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, keeps: bool, *more: Any, **options: Any
) -> Any:
    """Make the result, positions before heads, and padded sums if a gradient follows (attention.cu)."""
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    rows = (length + _ROWS - 1) // _ROWS * _ROWS if keeps else 0
    return out, _sums(q, batch, heads, rows), _seed(q), _seed(q)


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, keeps: bool, *more: Any, **options: Any
) -> Any:
    """Make the result in the layout of the queries, and sums if a gradient follows (cudnn/MHA.cpp)."""
    shape = (*q.shape[:3], v.shape[-1])
    order = sorted(range(4), key=lambda i: (-hint(q.stride()[i]), i))
    out = torch.empty_permuted(shape, order, dtype=q.dtype, device=q.device)
    rows = (*q.shape[:3], 1) if keeps else (0,)
    return out, _sums(q, *rows), None, None, q.shape[2], k.shape[2], _seed(q), _seed(q), None


# -- recurrent layers --------------------------------------------------------------------------------------------


def _layers(
    x: torch.Tensor, weight: Sequence[torch.Tensor], each: int, buffer: Any, h: torch.Tensor, c: Any, mode: int,
    size: Any, projected: Any, count: int, batch_first: bool, dropout: float, train: bool, both: bool, *rest: Any
) -> Any:  # fmt: skip
    """Make outputs and last states, and what a gradient cannot do without: gates and states of every step.

    What cuDNN reserves is for it to say, and more than that.
    """
    sides, width = 1 + both, projected or size
    out = x.new_empty((*x.shape[:2], width * sides))
    last = h.new_empty((count * sides, *h.shape[1:]))
    memory = x.new_empty(0) if c is None else c.new_empty((count * sides, *c.shape[1:]))
    inner = _KEPT[mode] * size * count + width * (count - 1)
    kept = x.shape[0] * x.shape[1] * sides * inner * x.element_size() if train else 0
    return out, last, memory, x.new_empty((kept,), dtype=torch.uint8), buffer


def _layers_backward(
    x: torch.Tensor, weight: Sequence[torch.Tensor], each: int, buffer: Any, h: torch.Tensor, c: Any, *rest: Any
) -> Any:
    """Make the gradients that are asked for."""
    mask = rest[-1]
    made = [None if t is None or not asked else torch.empty_like(t) for t, asked in zip((x, h, c), mask, strict=False)]
    return *made, [torch.empty_like(w) for w in weight] if mask[3] else []


def _gru_cell(x: torch.Tensor, gates: torch.Tensor, h: torch.Tensor, *biases: Any) -> Any:
    rows, size = h.shape
    return torch.empty_like(h), h.new_empty((rows, _WORKSPACE * size))


def _gru_cell_backward(grad: torch.Tensor, kept: torch.Tensor, biased: bool) -> Any:
    rows, size = grad.shape
    gates = [grad.new_empty((rows, 3 * size)) for _ in range(2)]
    return *gates, torch.empty_like(grad), *(grad.new_empty(3 * size) if biased else None for _ in range(2))


# -- norms -------------------------------------------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, shape: Sequence[Any], weight: Any, eps: Any) -> Any:
    """Make a dense result, and the reciprocal root of each row."""
    lead = x.shape[: x.ndim - len(shape)]
    return x.new_empty(x.shape), x.new_empty((*lead, *(1 for _ in shape)), dtype=_wide(x))


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return the format that kernels of CUDA add up in (toAccumulateType of AccumulateType.h)."""
    return torch.float32 if x.dtype.itemsize == 2 else x.dtype


def _with_wide_statistics(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Let a norm hand out mean and reciprocal deviation as they were added up; a CPU rounds them to its input's format.

    `layer_norm_cuda` in layer_norm_kernel.cu, `batch_norm_cuda` in Normalization.cu; `GroupNormKernelImpl` rounds too.
    """

    def run(x: torch.Tensor, *rest: Any) -> Any:
        made, *statistics = norm(x, *rest)
        return made, *(torch.empty_like(t, dtype=_wide(x)) for t in statistics)

    return run


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[Any], scale: Any, weight: Any, mask: Sequence[bool]
) -> Any:
    made = x.new_empty(x.shape) if mask[0] else None
    return made, weight.new_empty(weight.shape) if mask[1] and weight is not None else None


# -- counts ------------------------------------------------------------------------------------------------------


def _histogram(x: torch.Tensor, bins: int = 100, *limits: Any, **more: Any) -> torch.Tensor:
    """Make a number for each bin, of whole numbers as well, which a CPU does not count (SummaryOps.cu)."""
    return x.new_empty((bins,))


#: By op.
CUDA_RESULTS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: _flash,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._cudnn_rnn.default: _layers,
    aten._cudnn_rnn_backward.default: _layers_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
}

#: By op that a CPU runs as well, with other results.
CUDA_STATISTICS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histogram,
    **{norm: _with_wide_statistics(norm) for norm in (aten.native_layer_norm.default, aten.native_batch_norm.default)},
}
