"""Translations of reductions, norms, cumulative sums and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ....algebra.polynomial import ONE, Poly, poly
from ....ir.graph import Tensor, apply, current_graph
from ....nn.activations import one_kernel
from ....nn.recurrent import cumulative_sum, running
from ....ops.elementwise import cast, pointwise
from ....ops.fill import fill
from ....ops.fourier import SCALES, Fourier, view_as
from ....ops.layout import concat, reshape
from ....ops.loops import fused
from ....ops.reduce import reduce
from ..call import Call
from ..rules.table import is_number
from .table import translation

__all__ = [
    "weight_norm",
]


# -- reductions --------------------------------------------------------------------------------------------------------

_OPERATIONS = {
    "sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "prod": "prod", "any": "any", "all": "all",
    "max": "max", "min": "min",
}  # fmt: skip
#: Reductions whose gradients have masks, which a CPU casts, and the gradient rules.
_MASKED_GRADIENTS = {"max": "extremum", "min": "extremum", "prod": "product"}


def _axes(x: Tensor, dims: int | Sequence[int] | None) -> set[int]:
    """Return the reduced axes; all if none is given."""
    dimensions = [dims] if isinstance(dims, int) else list(dims or ())
    return {d % x.ndim for d in dimensions} or set(range(x.ndim))


def _pattern(x: Tensor, axes: set[int], *, keepdim: bool) -> str:
    before = " ".join(f"a{i}" for i in range(x.ndim))
    after = " ".join("1" if i in axes else f"a{i}" for i in range(x.ndim) if keepdim or i not in axes)
    return f"{before} -> {after}"


@translation(*(n for n in _OPERATIONS if n not in ("max", "min")), "max.default", "min.default")
def reduced(call: Call) -> Tensor | None:
    """Translate into a reduction of some or all axes."""
    x: Tensor = call["self"]
    x = x if x.ndim else reshape(x, (ONE,))
    operand = x
    if call.name in ("sum", "mean", "prod") and call.out.dtype != x.dtype:
        operand = cast(x, call.out.dtype)
    pattern = _pattern(x, _axes(x, call.get("dim")), keepdim=bool(call.get("keepdim") and call.out.sizes))
    operation = _OPERATIONS[call.name]
    if call.device == "cpu" and operation in _MASKED_GRADIENTS:
        return one_kernel(
            operation, lambda x: reduce(x, pattern, operation), operand, backward=_MASKED_GRADIENTS[operation]
        )
    return reduce(operand, pattern, operation)


@translation("linalg_vector_norm", "norm")
def vector_norm(call: Call) -> Tensor | None:
    """Translate a vector norm of any order but 0."""
    x, order = call["self"], call.get("p" if call.name == "norm" else "ord")
    if not x.ndim or x.dtype.kind != "float":
        return None
    x = cast(x, call.out.dtype)
    pattern = _pattern(x, _axes(x, call.get("dim")), keepdim=bool(call.get("keepdim")))
    if order is None or is_number(order, 2):

        def body(x: Tensor) -> Tensor:
            return pointwise("sqrt", reduce(pointwise("square", x), pattern, "sum"))

        return one_kernel("norm", body, x, backward="norm")
    operations = ((1, "sum"), (float("inf"), "max"), (float("-inf"), "min"))
    operation = next((name for n, name in operations if is_number(order, n)), None)
    if is_number(order, 0) or not isinstance(order, int | float):
        return None

    def general_norm(x: Tensor) -> Tensor:
        if operation is not None:
            return reduce(pointwise("abs", x), pattern, operation)
        return pointwise("pow", reduce(pointwise("pow", pointwise("abs", x), order), pattern, "sum"), 1 / order)

    return one_kernel("norm", general_norm, x, backward="norm")


@translation("_weight_norm_interface")
def weight_norm(call: Call) -> tuple[Tensor, ...]:
    """Translate into rescaled rows, and their original norms."""
    v, axis = call["v"], call["dim"] % call["v"].ndim
    rows = _pattern(v, set(range(v.ndim)) - {axis}, keepdim=True)

    def body(v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        length = pointwise("sqrt", reduce(pointwise("square", v), rows, "sum"))
        return v * (scale / length), length

    results: Any = fused("weight_norm", body, v, call["g"], backward="weight_norm")
    return tuple(results)


@translation("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> tuple[Tensor, ...] | None:
    """Translate into variance or standard deviation, possibly with the mean."""
    x, correction = call["self"], call.get("correction")
    if not x.ndim or x.dtype.kind != "float" or call.overload not in ("correction", "correction_out"):
        return None
    axes, keepdim = _axes(x, call.get("dim")), bool(call.get("keepdim"))
    rows, result_pattern = _pattern(x, axes, keepdim=True), _pattern(x, axes, keepdim=keepdim)
    correction_ = 1 if correction is None else correction
    count: Poly = prod((x.sizes[i] for i in axes), start=ONE) - poly(correction_)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        mean = reduce(x, rows, "mean")
        squares = pointwise("square", x - mean)
        if is_number(correction_, 0):
            out = reduce(squares, result_pattern, "mean")
        else:
            out = pointwise("div", reduce(squares, result_pattern, "sum"), count)
        out = pointwise("sqrt", out) if call.name.startswith("std") else out
        if not call.name.endswith("_mean"):
            return (out,)
        return out, mean if keepdim else reduce(x, result_pattern, "mean")

    out = fused(call.name, body, x, backward="variance")
    return (out,) if isinstance(out, Tensor) else out


@translation("logsumexp")
def log_of_sums(call: Call) -> Tensor | None:
    """Translate into a log-sum-exp, stabilized by the maximum."""
    x: Tensor = call["self"]
    if not x.ndim or x.dtype.kind != "float":
        return None
    axes, keepdim = _axes(x, call["dim"]), bool(call.get("keepdim"))

    def body(x: Tensor) -> Tensor:
        largest = reduce(x, _pattern(x, axes, keepdim=True), "max")
        sums = reduce(pointwise("exp", x - largest), _pattern(x, axes, keepdim=keepdim), "sum")
        return pointwise("log", sums) + (largest if keepdim else reshape(largest, sums.sizes))

    return one_kernel("logsumexp", body, x, backward="logsumexp")


@translation("cumsum")
def sums(call: Call) -> Tensor | None:
    """Translate into a cumulative sum."""
    x: Tensor = call["self"]
    return cumulative_sum(cast(x, call.out.dtype), call["dim"]) if x.ndim else None


@translation("cumprod")
def products(call: Call) -> Tensor | None:
    """Translate into a cumulative product."""
    x, name = cast(call["self"], call.out.dtype), "cumulative_product"
    return running(x, call["dim"], "mul", 1, name, backward=name) if x.ndim else None


# -- Fourier transforms ------------------------------------------------------------------------------------------------
# Including views between real and complex tensors.

_VIEWS = {"view_as_real": "real", "view_as_complex": "complex", "_conj": "conjugate"}


@translation(*_VIEWS)
def viewed(call: Call) -> Tensor:
    """Translate into a view; a complex factor in a product is converted itself."""
    if isinstance(call["self"], complex):
        return fill((), call["self"].conjugate(), call.out.dtype)
    return view_as(call["self"], _VIEWS[call.name])


@translation("complex", "polar")
def complex_from_parts(call: Call) -> Tensor | None:
    """Translate into complex numbers from real and imaginary parts, or from moduli and angles."""
    first, second = call.arguments.values()
    if first.sizes != second.sizes:
        return None

    def body(*parts: Tensor) -> Tensor:
        modulus, angle = map(current_graph().adopt, parts)  # fixes the operand order
        return _complex_view(*(pointwise("mul", modulus, pointwise(part, angle)) for part in ("cos", "sin")))

    if call.name == "polar":
        return one_kernel("polar", body, first, second, backward="polar")
    return _complex_view(first, second)


def _complex_view(*parts: Tensor) -> Tensor:
    """Return complex numbers from real and imaginary parts."""
    return view_as(concat([reshape(t, (*t.sizes, ONE)) for t in parts], -1), "complex")


@translation("_fft_c2c", "_fft_r2c", "_fft_c2r")
def transformed(call: Call) -> Tensor:
    """Translate into a transform along some axes, possibly one-sided in the last one."""
    x: Tensor = call["self"]
    if not call["dim"]:
        return pointwise("copy", x)
    axes = tuple(d % x.ndim for d in call["dim"])
    half = call.name == "_fft_c2r" or (call.name == "_fft_r2c" and call["onesided"])
    kind = Fourier(
        axes=axes,
        inverse=call.name == "_fft_c2r" or (call.name == "_fft_c2c" and not call["forward"]),
        scale=SCALES[call["normalization"]],
        last=call.out.sizes[axes[-1]] if half else None,
    )
    return apply(kind, [x], "fft")[0]
