"""Translations of matrix products, convolutions, pooling and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....algebra.polynomial import ONE, poly
from ....ir.graph import Tensor, apply
from ....ir.strides import windows_along
from ....nn.conv import convolved, pooling, spread
from ....ops.einsum import Einsum, einsum
from ....ops.elementwise import pointwise
from ....ops.experts import GroupedMatmul, grouped_outer
from ....ops.fill import pad
from ....ops.layout import broadcast, concat, permute, reshape, slice_axis
from ....ops.reduce import Pool
from ..call import Call
from ..rules.table import is_number
from .kernels import stated_with_gradient
from .table import translation

__all__ = [
    "adaptive_mean",
    "convolution",
    "max_pool",
    "mean_pool",
    "repeated",
]


# -- matrix products ---------------------------------------------------------------------------------------------------

_PATTERNS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "addmm": "m k, k n -> m n",
    "_int_mm": "m k, k n -> m n",
    "baddbmm": "b m k, b k n -> b m n",
    "addbmm": "b m k, b k n -> m n",
    "mv": "m k, k -> m",
    "addmv": "m k, k -> m",
    "dot": "k, k -> ",
    "vdot": "k, k -> ",
}


@translation("mm", "bmm", "mv", "dot", "vdot", "_int_mm")
def multiply(call: Call) -> Tensor | None:
    """Translate a product of matrices, batches or vectors; a complex `vdot` conjugates and is not covered."""
    second = {"mv": "vec", "dot": "tensor", "vdot": "other"}.get(call.name, "mat2")
    if call.name == "vdot" and call["self"].dtype.kind == "complex":
        return None
    product = einsum(call["self"], call[second], _PATTERNS[call.name])
    if call.name in ("mm", "bmm") and product.producer is not None and isinstance(product.producer.kind, Einsum):
        product.producer.state(order=(1, 0))  # autograd computes the gradient of mat2 before that of self
    return product


_FACTORS = {
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "addmv": ("mat", "vec"),
}


@translation(*_FACTORS)
def add_product(call: Call) -> Tensor:
    """Translate a matrix product plus an operand, each possibly scaled."""
    first, second = (call[n] for n in _FACTORS[call.name])
    product = einsum(first, second, _PATTERNS[call.name])
    if not is_number(call["alpha"], 1):
        product = product * call["alpha"]
    if is_number(call["beta"], 0):
        return product
    added: Tensor = call["self"] if is_number(call["beta"], 1) else call["self"] * call["beta"]
    return pointwise("add", product, added, inplace=False)


@translation("linear", "mkldnn_linear")
def linear(call: Call) -> Tensor:
    """Translate a linear layer with optional bias."""
    x, w = call.get("input") or call["self"], call["weight"]
    names = " ".join(f"b{i}" for i in range(x.ndim - 1))
    product = einsum(x, w, f"{names} k, n k -> {names} n")
    return product if call.get("bias") is None else product + call["bias"]


@translation("_grouped_mm")
def grouped(call: Call) -> Tensor | None:
    """Translate a grouped matmul, with groups along the rows, the columns or the contracted axis."""
    x, y, ends = call["self"], call["mat2"], call.get("offs")
    if call.get("bias") is not None or call.get("out_dtype") is not None:
        return None
    if ends is None:
        return einsum(x, y, _PATTERNS["bmm"])
    if (x.ndim, y.ndim) == (2, 2):
        return grouped_outer(permute(x, (1, 0)), y, ends)
    kind = GroupedMatmul(routing="capacity", chosen=ends.sizes[0])  # routing is data: all weights are read
    if x.ndim == 2:
        return apply(kind, [x, y, ends], "grouped_matmul")[0]
    rows = apply(kind, [permute(y, (1, 0)), permute(x, (0, 2, 1)), ends], "grouped_matmul")[0]
    return permute(rows, (1, 0))


@translation("addr")
def add_outer(call: Call) -> Tensor:
    """Translate an outer product plus an operand, each possibly scaled."""
    product = einsum(call["vec1"], call["vec2"], "m, n -> m n")
    product = product if is_number(call["alpha"], 1) else product * call["alpha"]
    if is_number(call["beta"], 0):
        return product
    return pointwise("add", product, call["self"] if is_number(call["beta"], 1) else call["self"] * call["beta"])


# -- windows -----------------------------------------------------------------------------------------------------------


def _constants(values: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """Return one number per window axis; None if any is symbolic."""
    numbers = tuple(values) * (rank if len(values) == 1 else 1)
    return numbers if all(isinstance(n, int) for n in numbers) else None


@translation("convolution")
def convolution(call: Call) -> Tensor | None:
    """Translate a convolution, possibly transposed, with optional bias."""
    x, weight = call["input"], call["weight"]
    names = ("stride", "padding", "dilation", *(("output_padding",) if call["transposed"] else ()))
    arguments: Any = {name: _constants(call[name], weight.ndim - 2) for name in names}
    if None in arguments.values() or any(n.constant is None for n in weight.sizes[2:]) or x.dtype != weight.dtype:
        return None
    function = spread if call["transposed"] else convolved
    return function(x, weight, call.get("bias"), groups=poly(call["groups"]), **arguments)


@translation("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(call: Call) -> Sequence[Tensor] | None:
    """Translate into the maximum of each window, and its index."""
    kind = _pool_kind(call, "max") if all(n == 1 for n in call["dilation"]) else None
    return None if kind is None else apply(replace(kind, indices=True), [call["self"]], "max_pool")


def _pool_kind(call: Call, operation: str, *, excludes_padding: bool = False) -> Pool | None:
    """Return the kind of a pooling; None for symbolic windows, or windows beyond the padding."""
    window = _constants(call["kernel_size"], call["self"].ndim - 2)
    if window is None or call["ceil_mode"]:
        return None
    stride, padding = _constants(call["stride"] or window, len(window)), _constants(call["padding"], len(window))
    if stride is None or padding is None:
        return None
    return pooling(call["self"], operation, window, stride, padding, exclude_padding=excludes_padding)


@translation("avg_pool2d", "avg_pool3d")
def mean_pool(call: Call) -> Tensor | None:
    """Translate into the mean of each window."""
    excludes_padding = not call["count_include_pad"] and any(n != 0 for n in call["padding"])
    kind = _pool_kind(call, "mean", excludes_padding=excludes_padding) if call["divisor_override"] is None else None
    return None if kind is None else apply(kind, [call["self"]], "avg_pool")[0]


@translation("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_mean(call: Call) -> Tensor | Sequence[Tensor | None] | None:
    """Translate into a mean pooling if windows are equal; otherwise with stated costs."""
    x: Tensor = call["self"]
    rank = 3 if "3d" in call.name else 2
    sizes = call.get("output_size") or call["grad_output"].sizes[-rank:]
    shares = [(n / poly(k)).constant for n, k in zip(x.sizes[-rank:], sizes, strict=True)]
    window = tuple(n for n in shares if isinstance(n, int))
    return (
        apply(pooling(x, "mean", window, window, 0), [x], "avg_pool")[0]
        if len(window) == rank
        else stated_with_gradient(call)
    )


@translation("im2col")
def unfolded(call: Call) -> Tensor | None:
    """Translate into a concatenation of slices, one per window element."""
    x: Tensor = call["self"]
    window, *arguments = (_constants(call[n], 2) for n in ("kernel_size", "dilation", "padding", "stride"))
    if window is None or None in arguments or x.ndim != 4:
        return None
    dilations, paddings, strides = (tuple(argument or ()) for argument in arguments)
    counts = [
        windows_along(n + 2 * p, d * (k - 1), s)
        for n, k, d, p, s in zip(x.sizes[2:], window, dilations, paddings, strides, strict=True)
    ]
    for axis, n in enumerate(paddings, 2):
        x = pad(x, axis, n, x.sizes[axis] + 2 * n) if n else x
    parts = []
    for i in range(window[0]):
        row = slice_axis(x, 2, i * dilations[0], counts[0], strides[0])
        parts += [slice_axis(row, 3, j * dilations[1], counts[1], strides[1]) for j in range(window[1])]
    columns = [reshape(t, (*t.sizes[:2], ONE, *t.sizes[2:])) for t in parts]
    return reshape(concat(columns, 2) if len(columns) > 1 else pointwise("copy", columns[0]), call.out.sizes)


@translation("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def repeated(call: Call) -> Tensor | Sequence[Tensor | None] | None:
    """Translate integer upsampling into a broadcast; otherwise with stated costs."""
    x, sizes = call["self"], call.out.sizes
    factors = [n / k for n, k in zip(sizes[2:], x.sizes[2:], strict=True)]
    if not all(isinstance(n.constant, int) for n in factors):
        return stated_with_gradient(call)
    split_sizes = [(n, ONE) for n in x.sizes[2:]]
    repeated_sizes = [(n, k) for n, k in zip(x.sizes[2:], factors, strict=True)]
    shapes = [[*x.sizes[:2], *(n for pair in pairs for n in pair)] for pairs in (split_sizes, repeated_sizes)]
    upsampled = reshape(broadcast(reshape(x, shapes[0]), shapes[1]), sizes)
    return pointwise("copy", upsampled) if upsampled.is_view or upsampled is x else upsampled
