"""Meta kernels for ops whose fake-tensor decompositions require concrete sizes.

Fourier transforms, triangular solves, `im2col`, losses and broadcast masks, with the shapes and layouts of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = [
    "RESULTS",
    "hint",
]

aten = torch.ops.aten


def hint(n: Any) -> int:
    """Return an integer to sort strides by; their order is the same at all sizes."""
    return n if isinstance(n, int) else int(n.node.hint)


def _broadcast(*shapes: Sequence[Any]) -> Sequence[Any]:
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call,no-any-return]  # torch has no types for it


# -- Fourier transforms ------------------------------------------------------------------------------------------


def _transform_result(x: torch.Tensor, sizes: Sequence[Any], axes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the result of a transform: other axes are outermost in memory, in their original order.

    `_exec_fft` in aten/src/ATen/native/mkl/SpectralOps.cpp.
    """
    axes = [a % x.ndim for a in axes]
    outer = sorted((a for a in range(x.ndim) if a not in axes), key=lambda a: -hint(x.stride()[a]))
    order = [*outer, *axes]
    dense = torch.empty([sizes[a] for a in order], dtype=dtype, device=x.device)
    return dense.permute([order.index(a) for a in range(x.ndim)])


def _axes_by_stride(x: torch.Tensor, axes: Sequence[int]) -> list[int]:
    return sorted(axes, key=lambda a: -hint(x.stride()[a]))


def _complex_transform(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    return _transform_result(x, x.shape, _axes_by_stride(x, dim), x.dtype) if dim else x.clone()


def _real_to_complex(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    sizes = list(x.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    return _transform_result(x, sizes, [*_axes_by_stride(x, dim[:-1]), dim[-1]], x.dtype.to_complex())


def _complex_to_real(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: Any) -> torch.Tensor:
    """Return a real result; all axes but the last are transformed first, into a temporary."""
    sizes = list(x.shape)
    sizes[dim[-1]] = last_dim_size
    partial = _complex_transform(x, dim[:-1], 0, False) if len(dim) > 1 else x
    return _transform_result(partial, sizes, dim[-1:], x.dtype.to_real())


def _complex_from_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Combine two real tensors into a complex one with the layout of a binary elementwise op."""
    return torch.empty_like(torch.add(x, y), dtype=x.dtype.to_complex())


# -- linear algebra ----------------------------------------------------------------------------------------------


def _solve_triangular(
    a: torch.Tensor, b: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    """Return the solution: broadcast right-hand sides, column-major."""
    lead = _broadcast(a.shape[:-2], b.shape[:-2])
    rows, columns = b.shape[-2:]
    return (b.new_empty([*lead, columns, rows]).mT) if left else b.new_empty([*lead, rows, columns])


# -- im2col ------------------------------------------------------------------------------------------------------


def _im2col(
    x: torch.Tensor, window: Sequence[Any], dilation: Sequence[Any], padding: Sequence[Any], stride: Sequence[Any]
) -> torch.Tensor:
    """Return the elements of each window, one column per window position."""
    positions: Any = 1
    for n, k, d, p, s in zip(x.shape[-2:], window, dilation, padding, stride, strict=True):
        positions = positions * ((n + 2 * p - d * (k - 1) - 1) // s + 1)
    return x.new_empty([*x.shape[:-3], x.shape[-3] * window[0] * window[1], positions])


def _col2im(x: torch.Tensor, sizes: Sequence[Any], window: Sequence[Any], *rest: Any) -> torch.Tensor:
    """Return the image summed from columns, in a storage large enough for the columns.

    `col2im_out_cpu_template` in aten/src/ATen/native/Col2Im.cpp resizes a tensor like the columns.
    """
    image = x.new_empty([*x.shape[:-2], x.shape[-2] // (window[0] * window[1]), *sizes])
    storage_numel = torch.sym_max(x.numel(), image.numel())  # type: ignore[no-untyped-call]  # torch has no types for it
    return x.new_empty([storage_numel]).as_strided(image.shape, image.stride())


# -- constants ---------------------------------------------------------------------------------------------------


def _constant_constructor(func: Any) -> Callable[..., Any]:
    """Keep the value of a scalar tensor created from literals, as `torch.tensor` does.

    Optimizers read such scalars from their state.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and not out.ndim and not _symbolic(args):
            with unset_fake_temporarily():
                _set_constant(out, func(*args, **kwargs))
        return out

    return run


def _symbolic(args: Sequence[Any]) -> bool:
    return any(isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool) for a in args)


def _set_constant(out: FakeTensor, value: torch.Tensor) -> None:
    out.constant = value
    out.fake_mode.fake_tensor_converter.add_constant_storage_mapping(out)


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    value = source.constant if isinstance(source, FakeTensor) else None
    aten.copy_.default(x, source, non_blocking)
    if value is not None and isinstance(x, FakeTensor) and not x.ndim:
        with unset_fake_temporarily():
            _set_constant(x, value.to(x.dtype, copy=True))
    return x


# -- losses ------------------------------------------------------------------------------------------------------


def _in_elementwise_storage(func: Any) -> Callable[..., Any]:
    """Give a reduced loss the storage of its elementwise loss: torch resizes the result, which frees nothing.

    `mse_loss` and `smooth_l1_loss` in aten/src/ATen/native/BinaryOps.cpp, the others in Loss.cpp.
    """

    def run(x: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = func(x, target, *rest)
        return out if out.ndim else out.new_empty(_broadcast(x.shape, target.shape)).as_strided((), ())

    return run


# -- masks -------------------------------------------------------------------------------------------------------


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return a copy with the broadcast shape."""
    return x.new_empty(_broadcast(x.shape, mask.shape))


def _bool_scalar(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.bool)


#: By op.
RESULTS: dict[Any, Callable[..., Any]] = {
    aten._fft_c2c.default: _complex_transform,
    aten._fft_r2c.default: _real_to_complex,
    aten._fft_c2r.default: _complex_to_real,
    aten.complex.default: _complex_from_parts,
    aten.polar.default: _complex_from_parts,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.im2col.default: _im2col,
    aten.col2im.default: _col2im,
    aten.masked_scatter.default: _masked_scatter,
    **{
        op: _constant_constructor(op)
        for op in (aten.ones.default, aten.zeros.default, aten.full.default, aten.scalar_tensor.default)
    },
    aten.copy_.default: _copy,
    **{
        op: _in_elementwise_storage(op)
        for op in (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
            aten.binary_cross_entropy.default,
        )
    },
    aten._is_all_true.default: _bool_scalar,
    aten._is_any_true.default: _bool_scalar,
}
