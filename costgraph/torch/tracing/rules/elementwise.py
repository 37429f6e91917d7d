"""Costs of elementwise ops, by the library's functions per result element, also for complex dtypes.

Other ops that torch tags as pointwise count 1 FLOP per element.
"""

from __future__ import annotations

from dataclasses import replace

from ....algebra.polynomial import ONE, total
from ....ops.functions import FUNCTIONS, POWERS, Function, of_complex
from ....ops.rules import applied
from ....ops.updates import NON_FINITE
from ..call import Call, Counts
from .table import Rule, combined, is_number, per_element, rule, unsupported

__all__ = [
    "gelu_steps",
    "power_steps",
    "steps_of",
    "complex_counts",
]


# -- elementwise -------------------------------------------------------------------------------------------------------

#: The library's functions with the same name in aten.
_SAME_NAME = (
    "abs", "cos", "elu", "elu_backward", "eq", "erf", "exp", "expm1", "floor", "hardsigmoid", "hardsigmoid_backward",
    "hardswish", "hardswish_backward", "leaky_relu", "leaky_relu_backward", "lerp", "log", "log1p", "logical_and",
    "logical_not", "masked_fill", "maximum", "minimum", "mish", "mish_backward", "mul", "neg", "reciprocal", "relu",
    "round", "rsqrt", "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "softplus",
    "softplus_backward", "sqrt", "tanh", "tanh_backward", "threshold_backward", "where",
)  # fmt: skip

#: aten's functions as compositions of the library's.
_COMPOSED: dict[str, tuple[str | Function, ...]] = {
    "clamp_min": ("maximum",),
    "clamp_max": ("minimum",),
    "fmax": ("maximum",),
    "fmin": ("minimum",),
    "hardtanh": ("relu6",),
    "hardtanh_backward": ("relu6_backward",),
    "threshold": ("less", "where"),
    "celu": ("elu",),
    "_prelu_kernel": ("leaky_relu",),  # x if x > 0 else weight * x
    "rrelu_with_noise": ("leaky_relu",),
    "rrelu_with_noise_backward": ("mul",),  # the noise is the slope
    "glu": ("sigmoid", "mul"),  # a * sigmoid(b), for each element of the result
    "log_sigmoid_forward": ("minimum", "abs", "neg", "exp", "log1p", "sub"),  # min(x, 0) - log1p(exp(-|x|))
    "log_sigmoid_backward": ("less", "where", "where", "abs", "neg", "exp", "add", "div", "mul", "sub", "mul"),
    "logit": ("sub", "div", "log"),  # log(x / (1 - x))
    "logit_backward": ("sub", "mul", "div"),  # g / (x * (1 - x))
    "hardshrink": ("abs", "less_equal", "where"),
    "hardshrink_backward": ("abs", "less_equal", "where"),
    "softshrink": ("less", "sub", "less", "add", "where"),
    "softshrink_backward": ("abs", "less_equal", "where"),
    "hypot": ("square", "square", "add", "sqrt"),
    "xlogy": ("log", "mul"),
    "special_xlog1py": ("log1p", "mul"),
    "special_entr": ("neg", "log", "mul"),
    "logaddexp": ("maximum", "sub", "abs", "neg", "exp", "log1p", "add"),  # max(a, b) + log1p(exp(-|a - b|))
    "logaddexp2": ("maximum", "sub", "abs", "neg", "exp", "log1p", "add"),
    "_masked_scale": ("masked_scale",),
    "native_dropout_backward": ("masked_scale",),
    "sinc": ("mul", "sin", "div"),
    "remainder": ("div", "floor", "mul", "sub"),
    "fmod": ("div", "floor", "mul", "sub"),
    "floor_divide": ("div", "floor"),
    "frac": ("floor", "sub"),
    "polar": ("cos", "mul", "sin", "mul"),
    "_add_relu": ("add", "relu"),
    "sgn": ("sign",),
    "_prelu_kernel_backward": ("less", "mul", "where", "mul", "where"),  # before the sum for the weight
    "bucketize": ("less",),  # per lookup: the number of search steps depends on the data
    "searchsorted": ("less",),
    "linalg_cross": ("mul", "mul", "sub"),
}

#: Functions that count as one transcendental, like exp.
_TRANSCENDENTAL = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "digamma", "erfc", "erfinv", "exp2", "i0",
    "igamma", "igammac", "lgamma", "log10", "log2", "polygamma", "sinh", "special_bessel_j0", "special_bessel_j1",
    "special_bessel_y0", "special_bessel_y1", "special_erfcx", "special_i0e", "special_i1", "special_i1e",
    "special_log_ndtr", "special_ndtri", "special_zeta", "tan",
)  # fmt: skip


#: Steps per element of an argument, for ops whose result has another shape or is missing.
_OF_ARGUMENT: dict[str, tuple[str, tuple[str | Function, ...]]] = {
    "_unsafe_masked_index_put_accumulate": ("values", ("where", "add")),
    "embedding_dense_backward": ("grad_output", ("add",)),  # per looked-up row; all rows are written
    "equal": ("self", ("eq",)),
    "glu_backward": ("grad_output", ("sigmoid", "mul", "sub", "mul", "mul")),  # s, g * s and g * s * (1 - s) * a
    "multi_margin_loss_backward": ("self", ("sub", "add", "less", "where", "add")),  # margin, its sign, the target's
}


def _of(*steps: str | Function) -> Rule:
    return lambda call: per_element(call.out.numel, *steps)


def _of_argument(name: str, steps: tuple[str | Function, ...]) -> Rule:
    return lambda call: per_element(call[name].numel, *steps)


for _name, _argument in _OF_ARGUMENT.items():
    rule(_name)(_of_argument(*_argument))
for _name in _SAME_NAME:
    rule(_name)(_of(_name))
for _name, _steps in _COMPOSED.items():
    rule(_name)(_of(*_steps))
for _name in _TRANSCENDENTAL:
    rule(_name)(_of("exp"))


def steps_of(name: str) -> tuple[str | Function, ...]:
    """Return the functions that an elementwise op applies in turn; unknown ops count 1 FLOP."""
    if name in _SAME_NAME:
        return (name,)
    if name in _TRANSCENDENTAL:
        return (Function(name.strip("_"), 1, 0, 1),)
    return _COMPOSED.get(name, (Function(name.strip("_"), 1, 1),))


def gelu_steps(approximate: object) -> tuple[str]:
    """Return the function for this approximation of GELU."""
    return ("gelu_tanh",) if approximate == "tanh" else ("gelu",)


def power_steps(exponent: object) -> tuple[str, ...]:
    """Return the functions for a power with this exponent."""
    return next((steps for number, steps in POWERS.items() if is_number(exponent, number)), ("pow",))


@rule("native_dropout", "_fused_dropout")
def dropout(call: Call) -> Counts:
    """Count mask and scale; random numbers are free, and without training it is a copy."""
    if call.get("train") is False:
        return Counts()
    return per_element(call.out.numel, "mul", "mul")


# -- scaled gradients --------------------------------------------------------------------------------------------


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Counts:
    """Count a check for non-finite values, and the product with the reciprocal scale."""
    return per_element(total(t.numel for t in call["self"]), NON_FINITE, "mul")


@rule("_amp_update_scale")
def update_scale(call: Call) -> Counts:
    """Count a comparison, an addition and a product for the single scale."""
    return per_element(ONE, "eq", "add", "mul")


# -- complex numbers ---------------------------------------------------------------------------------------------------
# FLOPs of complex operands count arithmetic on real and imaginary parts: 2 for an addition, 6 for a product (four
# products, two sums), 11 for a quotient; `costgraph.ops.functions.COMPLEX` has the rest. Operands count in their common
# dtype, as torch casts a real one first.

_COMPLEX_SAME_NAME = ("add", "div", "eq", "exp", "lerp", "log", "masked_fill", "mul", "neg", "pow", "reciprocal",
         "sqrt", "sub", "where")  # fmt: skip
#: The library's functions that an op applies to each element of its result.
_COMPLEX_STEPS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _COMPLEX_SAME_NAME},
    "sgn": ("sign",),
    "addcmul": ("fma",),
    "addcdiv": ("div", "add"),
    "native_dropout_backward": ("masked_scale",),
}
#: Ops whose FLOPs are additions.
_SUMS = frozenset({
    "cumsum", "embedding_dense_backward", "index_add", "index_put", "mean", "put", "scatter_add", "sum", "trace",
})  # fmt: skip
_PRODUCTS = frozenset({"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"})
#: Ops whose rules handle complex numbers themselves.
_COMPLEX_AWARE = frozenset({"_fft_c2c", "_fft_c2r", "_fft_r2c", "polar"})
_SCALES = ("alpha", "beta", "value")


def complex_counts(call: Call, counts: Counts) -> Counts:
    """Return the cost of a call with complex operands or results, from its cost for real numbers.

    Bytes are unchanged; FLOPs are those of the parts. UnsupportedError for arithmetic without a complex cost.
    """
    flops = {k: v for k, v in counts.by_kind().items() if v}
    bytes_ = {"reads": counts.reads, "writes": counts.writes}
    if call.name in ("abs", "angle"):  # the kernel computes a complex result first
        function = FUNCTIONS["exp"] if call.name == "angle" else of_complex(FUNCTIONS["abs"])
        return replace(combined(applied(call.out.numel, function), **bytes_), workspace=2 * call.out.bytes)
    if not flops or call.name in _COMPLEX_AWARE:
        return counts
    if call.name in ("conj_physical", "_conj_physical"):  # negates the imaginary part
        return Counts(pointwise=call.out.numel, reads=counts.reads, writes=counts.writes)
    scaled = [n for n in _SCALES if call.get(n) is not None and not is_number(call[n], 1)]
    if call.name in _COMPLEX_STEPS:
        steps = (*_COMPLEX_STEPS[call.name], *("mul" for _ in scaled))
        return combined(applied(call.out.numel, *(of_complex(_function(call, s)) for s in steps)), **bytes_)
    if call.name in _SUMS or (call.name in _PRODUCTS and not scaled):
        return Counts(
            matmul=counts.matmul * 4, pointwise=counts.pointwise * 2, reads=counts.reads, writes=counts.writes
        )
    raise unsupported(call, "no rule for complex operands", "real ones")


def _function(call: Call, name: str) -> Function:
    """Return a function; a power of 2 is a square, as in the kernel."""
    squared = name == "pow" and is_number(call.get("exponent"), 2)
    return FUNCTIONS["square" if squared else name]
