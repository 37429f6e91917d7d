"""Products along an axis, whose gradients torch makes in another way of tensors without data, as of ones with zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import _prims_common

__all__ = ["cumprod", "in_place"]


class _Products(torch.autograd.Function):
    """Goes back as torch does where nothing is zero: by sums from the end, and a division."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        made = torch.cumprod(x, dim)
        ctx.save_for_backward(x, made)
        ctx.dim = dim
        return made

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, made = ctx.saved_tensors
        shares = made * g
        zeros = x == 0  # which lives to the end
        zeros.any()
        return _from_the_end(shares, ctx.dim).div(x), None


def _from_the_end(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Add up an axis from its end; what is in between lives until that is done, as in C++."""
    turned = x.flip(dim)
    added = turned.cumsum(dim)
    return added.flip(dim)


def cumprod(input: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor | None:
    """Multiply along an axis; None where torch's own function has to, as no gradient is made, or axes have names."""
    if not torch.is_grad_enabled() or not input.requires_grad or not isinstance(dim, int):
        return None
    x = input if dtype is None else input.to(dtype)
    made: torch.Tensor = _Products.apply(x, dim)  # type: ignore[no-untyped-call]  # torch has no types for it
    return made


def in_place(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Add a bias to a product in place, as torch does where rows do not lie one behind another; None where they do.

    Of tensors without data it would make another one.
    """
    flat = input.ndim < 3 or weight.ndim != 2 or _prims_common.is_contiguous_or_false(input)
    if bias is None or flat or torch.is_autocast_enabled(input.device.type):  # whose casts come before all
        return None
    return torch.matmul(input, weight.T).add_(bias)
