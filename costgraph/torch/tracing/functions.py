"""Functions of torch that work out sizes as numbers before any op that could be seen: called with symbols here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import interpolate
from torch.overrides import TorchFunctionMode

from .spectra import einsum, istft, stft

__all__ = ["SymbolicSizes"]

#: The op behind each mode of `interpolate`, and whether it takes the flag `align_corners`.
_RESAMPLING = {
    "nearest": ("upsample_nearest{}d", False),
    "nearest-exact": ("_upsample_nearest_exact{}d", False),
    "linear": ("upsample_linear{}d", True),
    "bilinear": ("upsample_bilinear{}d", True),
    "bicubic": ("upsample_bicubic{}d", True),
    "trilinear": ("upsample_trilinear{}d", True),
}


class SymbolicSizes(TorchFunctionMode):
    """Lets what asks for numbers have symbols for sizes: the ops below it take them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = _PARTS.get(func)
        made = None if parts is None else parts(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def _resampled(
    input: torch.Tensor,  # torch's name, which callers use
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor | None:
    """Resample as `interpolate` does; None where it has to do that itself."""
    axes = input.ndim - 2
    if mode not in _RESAMPLING or recompute_scale_factor or antialias or (size is None) == (scale_factor is None):
        return None
    given = size if scale_factor is None else scale_factor
    each = list(given) if isinstance(given, tuple | list) else [given] * axes
    if len(each) != axes:
        return None
    name, flagged = _RESAMPLING[mode]
    flags = [bool(align_corners)] if flagged else []
    factors = [None] * axes if scale_factor is None else [float(f) for f in each]
    sizes = each if scale_factor is None else [_scaled(n, f) for n, f in zip(input.shape[2:], each, strict=True)]
    made: torch.Tensor = getattr(torch.ops.aten, name.format(axes)).default(input, sizes, *flags, *factors)
    return made


def _scaled(size: Any, factor: float) -> Any:
    """Return a size times a factor, rounded down as torch does it."""
    if round(factor) == factor:
        return size * round(factor)
    part = round(1 / factor) if factor else 0
    if part and 1 / part == factor:
        return size // part
    return torch.sym_int(size * factor)  # type: ignore[no-untyped-call]  # torch has no types for it


#: By function; each returns None where torch's own has to run.
_PARTS: dict[Any, Callable[..., Any]] = {
    interpolate: _resampled,
    torch.stft: stft,
    torch.istft: istft,
    torch.einsum: einsum,
}
