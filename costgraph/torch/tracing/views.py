"""Views of tensors without data, made at once: fake tensors work each of them out in a thousand steps of Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

__all__ = ["direct", "expanded", "viewed"]


def _view(x: FakeTensor, function: Callable[..., Any], *args: Any) -> FakeTensor:
    """Return what a function of a tensor's shape and storage makes of it."""
    with in_kernel_invocation_manager(x.fake_mode):
        made = function(x, *args)
    return FakeTensor(x.fake_mode, made, x.fake_device)


def _without_data(x: Any) -> TypeGuard[FakeTensor]:
    # the value of a constant, which a program may ask for, has to be handed on
    return type(x) is FakeTensor and x.constant is None


def direct(func: Any) -> Callable[..., Any]:
    """Return a function for an op whose own kernel takes symbols for sizes."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return _view(x, func, *args) if _without_data(x) and not kwargs else func(x, *args, **kwargs)

    return run


def viewed(x: torch.Tensor, sizes: Sequence[Any]) -> Any:
    """Return a dense tensor with other sizes; what is not dense, or has a size to be found, goes the long way."""
    if not _without_data(x) or any(isinstance(n, int) and n < 1 for n in (*x.shape, *sizes)) or not x.is_contiguous():
        return torch.ops.aten.view.default(x, sizes)
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step = step * n
    if step != x.numel():  # asked even where it holds at the sizes of the run: S need not be 4*(S//4)
        return torch.ops.aten.view.default(x, sizes)
    return _view(x, torch.ops.aten.as_strided.default, list(sizes), strides[::-1], x.storage_offset())


def expanded(x: torch.Tensor, sizes: Sequence[Any], **kwargs: Any) -> Any:
    """Return a tensor that repeats its elements along axes of size 1."""
    if not _without_data(x):
        return torch.ops.aten.expand.default(x, sizes, **kwargs)
    new = len(sizes) - x.ndim
    out: list[tuple[Any, Any]] = []
    for i in range(len(sizes) - 1, -1, -1):
        after, step = out[-1] if out else (1, 1)
        size, stride = (x.shape[i - new], x.stride()[i - new]) if i >= new else (1, after * step)
        wanted = size if isinstance(sizes[i], int) and sizes[i] == -1 else sizes[i]
        repeated = isinstance(size, int) and size == 1 and not (isinstance(wanted, int) and wanted == 1)
        if not repeated and wanted != size:
            return torch.ops.aten.expand.default(x, sizes, **kwargs)
        out.append((wanted, 0 if repeated else stride))
    shape, strides = zip(*reversed(out), strict=True) if out else ((), ())
    return _view(x, torch.ops.aten.as_strided.default, list(shape), list(strides), x.storage_offset())
