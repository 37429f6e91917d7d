"""Meta kernels for ops on which fake tensors are slow or fail with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from .cuda import CUDA_RESULTS
from .meta_results import RESULTS
from .onednn import PAGE, Lstm

__all__ = [
    "direct",
    "expanded",
    "viewed",
    "STAND_INS",
]


# -- views -------------------------------------------------------------------------------------------------------------
# Computed directly, since the Python implementations for fake tensors are slow.


def _view(x: FakeTensor, function: Callable[..., Any], *args: Any) -> FakeTensor:
    """Return a view of a fake tensor, computed on its meta tensor."""
    with in_kernel_invocation_manager(x.fake_mode):
        meta = function(x, *args)
    return FakeTensor(x.fake_mode, meta, x.fake_device)


def _without_data(x: Any) -> TypeGuard[FakeTensor]:
    # a constant keeps its value through torch's own implementation
    return type(x) is FakeTensor and x.constant is None


def direct(func: Any) -> Callable[..., Any]:
    """Return a fast path for a view op whose own kernel accepts symbolic sizes."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _view(x, func, *args) if _without_data(x) and not kwargs else func(x, *args, **kwargs)

    return run


def viewed(x: torch.Tensor, sizes: Sequence[Any]) -> Any:
    """Return a contiguous tensor in another shape; other tensors, and sizes of -1, take torch's path."""
    if not _without_data(x) or any(isinstance(n, int) and n < 1 for n in (*x.shape, *sizes)) or not x.is_contiguous():
        return torch.ops.aten.view.default(x, sizes)
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step = step * n
    if step != x.numel():  # asked even if true at the hints: S need not be 4*(S//4)
        return torch.ops.aten.view.default(x, sizes)
    return _view(x, torch.ops.aten.as_strided.default, list(sizes), strides[::-1], x.storage_offset())


def expanded(x: torch.Tensor, sizes: Sequence[Any], **kwargs: Any) -> Any:
    """Expand axes of size 1."""
    if not _without_data(x):
        return torch.ops.aten.expand.default(x, sizes, **kwargs)
    added_axes = len(sizes) - x.ndim
    out: list[tuple[Any, Any]] = []
    for i in range(len(sizes) - 1, -1, -1):
        after, step = out[-1] if out else (1, 1)
        size, stride = (x.shape[i - added_axes], x.stride()[i - added_axes]) if i >= added_axes else (1, after * step)
        target = size if isinstance(sizes[i], int) and sizes[i] == -1 else sizes[i]
        repeated = isinstance(size, int) and size == 1 and not (isinstance(target, int) and target == 1)
        if not repeated and target != size:
            return torch.ops.aten.expand.default(x, sizes, **kwargs)
        out.append((target, 0 if repeated else stride))
    shape, strides = zip(*reversed(out), strict=True) if out else ((), ())
    return _view(x, torch.ops.aten.as_strided.default, list(shape), list(strides), x.storage_offset())


# -- results -----------------------------------------------------------------------------------------------------------

aten = torch.ops.aten


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the result of a grouped matmul, which fake tensors support only in bf16."""
    lead = [offs.shape[0]] if a.ndim == b.ndim == 2 else [a.shape[0]] if a.ndim == b.ndim else []
    return a.new_empty([*lead, a.shape[-2], b.shape[-1]], dtype=out_dtype or a.dtype)


def _constant_pad(x: torch.Tensor, pad: Sequence[Any], value: Any = 0) -> torch.Tensor:
    """Pad a tensor; for zero padding, fake tensors would specialize sizes."""
    shape = list(x.shape)
    for i in range(len(pad) // 2):
        shape[-1 - i] = shape[-1 - i] + pad[2 * i] + pad[2 * i + 1]
    return _like(x, shape)


def _like(x: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """Return a tensor with the memory format of another one."""
    layout = torch._prims_common.suggest_memory_format(x)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _interpolation(x: torch.Tensor, sizes: Sequence[Any], *rest: Any) -> torch.Tensor:
    """Return the result of an interpolation, whose fake-tensor decomposition requires concrete sizes."""
    return _like(x, [*x.shape[:2], *sizes])


def _interpolation_backward(
    grad: torch.Tensor, sizes: Sequence[Any], input_size: Sequence[Any], *rest: Any
) -> torch.Tensor:
    return _like(grad, input_size)


def _baddbmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """Return the result of `baddbmm`; fake tensors would specialize sizes to broadcast the first operand."""
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        aten.baddbmm.default(x, a, b, beta=beta, alpha=alpha)  # raises the error
    return a.new_empty([a.shape[0], a.shape[1], b.shape[2]])


def _lstm_layer(x: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *rest: Any) -> Any:
    """Return the results of an LSTM layer with its saved tensor, which fake tensors leave empty."""
    *outputs, saved = aten.mkldnn_rnn_layer.default(x, weight, hidden, *rest)
    if torch.is_grad_enabled():
        layer = Lstm(x.shape[0], x.shape[1], weight.shape[1], hidden.shape[1], x.element_size())
        saved = saved.new_empty([layer.saved(lambda n: (n + PAGE - 1) // PAGE * PAGE)])
    return (*outputs, saved)


def _lstm_layer_backward(*args: Any) -> Any:
    """Return one tensor as the gradient of both biases, as the kernel does; fake tensors do so only the first time."""
    grads = list(aten.mkldnn_rnn_layer_backward.default(*args))
    grads[4] = grads[3]
    return tuple(grads)


def _with_broadcast_operands(func: Any) -> Callable[..., Any]:
    """Expand operands to a common shape first; fake tensors would specialize sizes to broadcast them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        shapes = (a.shape for a in args if isinstance(a, torch.Tensor))
        shape = torch._refs._broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # torch has no types for it
        broadcast_args = (expanded(a, shape) if isinstance(a, torch.Tensor) and a.shape != shape else a for a in args)
        return func(*broadcast_args, **kwargs)

    return run


def _like_input(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the result of an elementwise op, whose fake-tensor implementation specializes sizes."""
    return torch.empty_like(x)


def _without_guards(func: Any) -> Callable[..., Any]:
    """Suppress guards of an op: its choice of kernel affects no shape."""

    def run(*args: Any, **kwargs: Any) -> Any:
        mode = detect_fake_mode(args)
        with mode.shape_env.suppress_guards() if mode is not None and mode.shape_env else nullcontext():
            return func(*args, **kwargs)

    return run


#: By op; each reproduces the shapes, layouts and storages of the op.
STAND_INS: dict[Any, Callable[..., Any]] = {
    **RESULTS,
    **CUDA_RESULTS,
    aten._unsafe_view.default: viewed,
    aten.view.default: viewed,
    aten.expand.default: expanded,
    **{op: direct(op) for op in (aten.t.default, aten.transpose.int, aten.unsqueeze.default, aten.select.int)},
    **{op: direct(op) for op in (aten.detach.default, aten.alias.default)},
    aten._grouped_mm.default: _grouped_mm,
    aten.constant_pad_nd.default: _constant_pad,
    aten.baddbmm.default: _baddbmm,
    **{
        op: _with_broadcast_operands(op)
        for op in (aten.addcmul.default, aten.addcdiv.default, aten.lerp.Scalar, aten.lerp.Tensor)
    },
    **{
        op: _with_broadcast_operands(op)
        for op in (aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor)
    },
    **dict.fromkeys((aten.hardshrink.default, aten.hardshrink_backward.default), _like_input),
    **dict.fromkeys((aten.softshrink.default, aten.softshrink_backward.default), _like_input),
    aten.mkldnn_rnn_layer.default: _lstm_layer,
    aten.mkldnn_rnn_layer_backward.default: _lstm_layer_backward,
    aten.upsample_linear1d.default: _interpolation,
    aten.upsample_bilinear2d.default: _interpolation,
    aten.upsample_bicubic2d.default: _interpolation,
    aten.upsample_trilinear3d.default: _interpolation,
    aten.upsample_linear1d_backward.default: _interpolation_backward,
    aten.upsample_nearest1d_backward.default: _interpolation_backward,
    aten._upsample_nearest_exact1d_backward.default: _interpolation_backward,
    aten.upsample_bilinear2d_backward.default: _interpolation_backward,
    aten.upsample_bicubic2d_backward.default: _interpolation_backward,
    aten.upsample_trilinear3d_backward.default: _interpolation_backward,
    aten.convolution.default: _without_guards(aten.convolution.default),
    aten.convolution_backward.default: _without_guards(aten.convolution_backward.default),
}
