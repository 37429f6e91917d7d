"""Functions of torch that work out sizes as numbers before any op that could be seen: called with symbols here."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import overrides
from torch.nn.functional import interpolate, linear, max_pool1d
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from .counted import Loops, Parts, Range
from .formats import Formats
from .layers import RECURRENT, gru_cell, lstm_cell
from .products import cumprod, in_place
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
    """Lets what asks for numbers have symbols for sizes: the ops below it take them.

    A program that asks whether its tensors are special ones, as layers with a fast path do, is told what it would be
    told without this mode. The state of random numbers that it saves, as checkpointing does, is memory as any other.
    `formats`, if given, calls all functions, and looks at the formats that they are asked for.
    """

    unseen = True

    def __init__(self, turns: Loops, formats: Formats | None = None) -> None:
        super().__init__()
        self._turns, self._formats = turns, formats

    def __enter__(self) -> SymbolicSizes:
        self._asked = overrides.has_torch_function
        self._replaced = ExitStack()
        for module, name, instead in (
            (overrides, "has_torch_function", self._special),
            (torch, "get_rng_state", _saved_state),
            (torch, "set_rng_state", lambda state: None),  # what is drawn has no data
        ):
            self._replaced.enter_context(patch.object(module, name, instead))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types for it
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self._replaced.close()

    def _replaces(self) -> None:
        if self._formats is not None:
            self._formats.replaced = True

    def _special(self, tensors: Any) -> bool:
        with ExitStack() as popped:
            while _own(torch._C._len_torch_function_stack()):
                popped.enter_context(_pop_mode_temporarily())
            return self._asked(tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RECURRENT and isinstance(args[3], bool) and _open(args[0]):  # else a packed sequence
            self._replaces()
            return RECURRENT[func](self._turns, *args)
        instead = _INSTEAD.get(func)
        made = None if instead is None else instead(*args, **(kwargs or {}))
        if func in _PARTED:
            made = _PARTED[func](self._turns, *args, **(kwargs or {}))
        if made is not None:
            self._replaces()
            return made
        return func(*args, **(kwargs or {})) if self._formats is None else self._formats(func, args, kwargs or {})


def _own(modes: int) -> bool:
    """Whether the innermost of so many modes is one that a program is not to see."""
    return modes > 0 and getattr(torch._C._get_function_stack_at(modes - 1), "unseen", False)


def _saved_state() -> torch.Tensor:
    """Make as many bytes as the state of torch's generator has."""
    return torch.empty(torch.default_generator.get_state().numel(), dtype=torch.uint8)


def _open(x: torch.Tensor) -> bool:
    return any(isinstance(n, torch.SymInt) for n in x.shape)


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
    if mode not in _RESAMPLING or antialias or (size is None) == (scale_factor is None):
        return None
    given = size if scale_factor is None else scale_factor
    each = list(given) if isinstance(given, tuple | list) else [given] * axes
    if len(each) != axes:
        return None
    name, flagged = _RESAMPLING[mode]
    flags = [bool(align_corners)] if flagged else []
    stated = scale_factor is not None and not recompute_scale_factor
    factors = [float(f) for f in each] if stated else [None] * axes
    sizes = each if scale_factor is None else [_scaled(n, f) for n, f in zip(input.shape[2:], each, strict=True)]
    made: torch.Tensor = getattr(torch.ops.aten, name.format(axes)).default(input, sizes, *flags, *factors)
    return made


def _scaled(size: Any, factor: float) -> Any:
    """Return a size times a factor, rounded down as torch does it."""
    if isinstance(factor, torch.SymFloat):
        return math.floor(size * factor)
    if round(factor) == factor:
        return size * round(factor)
    part = round(1 / factor) if factor else 0
    if part and 1 / part == factor:
        return size // part
    return torch.sym_int(size * factor)  # type: ignore[no-untyped-call]  # torch has no types for it


def _largest_in_windows(
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor | None:
    """Return the maximum of each window along one axis, as of an image one element high: torch does so itself."""
    if not _open(input) or return_indices:
        return None
    given = (1, kernel_size), (1, stride or kernel_size), (0, padding), (1, dilation)
    facts = [(high, *n) if isinstance(n, tuple | list) else (high, n) for high, n in given]
    made = torch.ops.aten.max_pool2d_with_indices.default(input.unsqueeze(-2), *facts, ceil_mode)
    largest: torch.Tensor = made[0].squeeze(-2)
    return largest


def _taken_along(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return elements along an axis, the other axes of both tensors broadcast."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    axis = dim % input.ndim
    shapes = ([*t.shape[:axis], 1, *t.shape[axis + 1 :]] for t in (input, indices))
    lead = list(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch has no types for it
    x, places = (t.expand([*lead[:axis], t.shape[axis], *lead[axis + 1 :]]) for t in (input, indices))
    return x.gather(axis, places.remainder(input.shape[axis]))  # from the end on where they are negative


def _count(n: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    """Return the numbers from 0 on, of which there are as many as a size."""
    place = device or torch.get_default_device()
    made: torch.Tensor = torch.ops.aten.arange.default(n, dtype=dtype or torch.get_default_dtype(), device=place)
    return made


def _evenly(
    start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> torch.Tensor | None:
    """Return numbers at equal distances, of which there are as many as a size: those from 0 on, scaled and shifted."""
    if not isinstance(steps, torch.SymInt) or options.get("out") is not None:
        return None
    return _count(steps, dtype, device).mul_((end - start) / (steps - 1)).add_(start)


def _hann_window(
    window_length: Any, periodic: bool = True, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any
) -> torch.Tensor | None:
    """Return a raised cosine as torch makes it: where it is periodic, of one point more without that point."""
    if not isinstance(window_length, torch.SymInt):
        return None
    points = window_length + 1 if periodic else window_length
    made = _count(points, dtype, device).mul_(2 * math.pi / (points - 1)).cos_().mul_(-0.5).add_(0.5)
    return made.narrow(0, 0, window_length) if periodic else made


def _of_open_sizes(step: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a step of a batch whose size is a number to torch."""
    return lambda input, *args: step(input, *args) if _open(input) else None


def _unbound(turns: Loops, input: torch.Tensor, dim: int = 0) -> Parts | None:
    return turns.parts(input, dim) if input.ndim else None


def _split(turns: Loops, tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Parts | None:
    return turns.parts(tensor, dim, split_size) if isinstance(split_size, int) and tensor.ndim else None


#: Functions that take a tensor apart: as many parts as a size are there for loops over them.
_PARTED: dict[Any, Callable[..., Any]] = {
    torch.unbind: _unbound,
    torch.Tensor.unbind: _unbound,
    torch.split: _split,
    torch.Tensor.split: _split,
}


def _chosen(x: torch.Tensor, index: Any) -> torch.Tensor | None:
    """Return the positions of a tensor that sizes say, which torch takes as bounds alone; None of other indices."""
    given = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, k in enumerate(given) if isinstance(k, torch.SymInt)), None)
    if at is None or any(isinstance(k, torch.Tensor | list | bool) for k in given):
        return None
    k, given[at] = given[at], slice(None)
    left = given[:at]
    axes = x.ndim - sum(i is not None and i is not Ellipsis for i in given)  # that an ellipsis stands for
    axis = sum(axes if i is Ellipsis else not isinstance(i, int) for i in left)
    return x[tuple(given)].select(axis, k)


def _written(x: torch.Tensor, index: Any, value: Any) -> bool | None:
    """Write into positions that sizes say."""
    part = _chosen(x, index)
    if part is None:
        return None
    part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)
    return True


def _numbers(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> torch.Tensor | None:
    """Return the numbers of a range that has as many as a size."""
    if not isinstance(data, Range) or options.get("requires_grad"):
        return None
    made = _count(data.count, torch.int64, device)
    made = made if data.step == 1 else made.mul_(data.step)
    made = made if isinstance(data.start, int) and not data.start else made.add_(data.start)
    return made if dtype is None else made.to(dtype)


#: By function of torch: what is called for it, which gives None where the function itself has to run.
_INSTEAD: dict[Any, Callable[..., Any]] = {
    interpolate: _resampled,
    linear: in_place,
    torch.Tensor.__getitem__: _chosen,
    torch.Tensor.__setitem__: _written,
    torch.tensor: _numbers,
    torch.as_tensor: _numbers,
    torch.linspace: _evenly,
    torch.hann_window: _hann_window,
    torch.stft: stft,
    torch.istft: istft,
    torch.einsum: einsum,
    torch.cumprod: cumprod,
    torch.Tensor.cumprod: cumprod,
    torch.max_pool1d: _largest_in_windows,
    max_pool1d: _largest_in_windows,
    torch.take_along_dim: _taken_along,
    torch.Tensor.take_along_dim: _taken_along,
    torch.gru_cell: _of_open_sizes(gru_cell),
    torch.lstm_cell: _of_open_sizes(lstm_cell),
}
