"""Elementwise ops: what the library's table of functions says for each element of the result.

An op that torch tags as pointwise and that stands in none of the tables here counts 1 for each element.
"""

from __future__ import annotations

from ....algebra.polynomial import ONE, total
from ....ops.functions import POWERS, Function
from ....ops.updates import NON_FINITE
from ..call import Call, Counts
from .amounts import each, is_number
from .table import Rule, rule

__all__ = ["gelu_steps", "power_steps", "steps_of"]

#: The library's functions that aten has under the same name.
_SAME = (
    "abs", "cos", "elu", "elu_backward", "eq", "erf", "exp", "expm1", "floor", "hardsigmoid", "hardsigmoid_backward",
    "hardswish", "hardswish_backward", "leaky_relu", "leaky_relu_backward", "lerp", "log", "log1p", "logical_and",
    "logical_not", "masked_fill", "maximum", "minimum", "mish", "mish_backward", "mul", "neg", "reciprocal", "relu",
    "round", "rsqrt", "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "softplus",
    "softplus_backward", "sqrt", "tanh", "tanh_backward", "threshold_backward", "where",
)  # fmt: skip

#: Functions of aten that are compositions of the library's.
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
    "_prelu_kernel_backward": ("less", "mul", "where", "mul", "where"),  # before those of the weight are added up
    "bucketize": ("less",),  # of each that is looked up: steps of the search are up to the data
    "searchsorted": ("less",),
    "linalg_cross": ("mul", "mul", "sub"),
}

#: Functions of one transcendental each, as exp is.
_TRANSCENDENTAL = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "digamma", "erfc", "erfinv", "exp2", "i0",
    "igamma", "igammac", "lgamma", "log10", "log2", "polygamma", "sinh", "special_bessel_j0", "special_bessel_j1",
    "special_bessel_y0", "special_bessel_y1", "special_erfcx", "special_i0e", "special_i1", "special_i1e",
    "special_log_ndtr", "special_ndtri", "special_zeta", "tan",
)  # fmt: skip


#: What is done with each element of an argument that has another shape than the result, or where there is none.
_OF_ARGUMENT: dict[str, tuple[str, tuple[str | Function, ...]]] = {
    "_unsafe_masked_index_put_accumulate": ("values", ("where", "add")),
    "embedding_dense_backward": ("grad_output", ("add",)),  # of each row that was looked up; all is written
    "equal": ("self", ("eq",)),
    "glu_backward": ("grad_output", ("sigmoid", "mul", "sub", "mul", "mul")),  # s, g * s and g * s * (1 - s) * a
    "multi_margin_loss_backward": ("self", ("sub", "add", "less", "where", "add")),  # margin, its sign, the target's
}


def _of(*steps: str | Function) -> Rule:
    return lambda call: each(call.out.numel, *steps)


def _of_argument(name: str, steps: tuple[str | Function, ...]) -> Rule:
    return lambda call: each(call[name].numel, *steps)


for _name, _argument in _OF_ARGUMENT.items():
    rule(_name)(_of_argument(*_argument))
for _name in _SAME:
    rule(_name)(_of(_name))
for _name, _steps in _COMPOSED.items():
    rule(_name)(_of(*_steps))
for _name in _TRANSCENDENTAL:
    rule(_name)(_of("exp"))


def steps_of(name: str) -> tuple[str | Function, ...]:
    """Return the functions that an elementwise op applies one after another: one that no table names counts 1."""
    if name in _SAME:
        return (name,)
    if name in _TRANSCENDENTAL:
        return (Function(name.strip("_"), 1, 0, 1),)
    return _COMPOSED.get(name, (Function(name.strip("_"), 1, 1),))


def gelu_steps(approximate: object) -> tuple[str]:
    """Return the function that GELU is with this approximation."""
    return ("gelu_tanh",) if approximate == "tanh" else ("gelu",)


def power_steps(exponent: object) -> tuple[str, ...]:
    """Return the functions that a power with this exponent is."""
    return next((steps for number, steps in POWERS.items() if is_number(exponent, number)), ("pow",))


@rule("native_dropout", "_fused_dropout")
def dropout(call: Call) -> Counts:
    """Count mask and scale; random numbers are not counted, and without training it is a copy."""
    if call.get("train") is False:
        return Counts()
    return each(call.out.numel, "mul", "mul")


# -- scaled gradients --------------------------------------------------------------------------------------------


@rule("_amp_foreach_non_finite_check_and_unscale")
def unscale(call: Call) -> Counts:
    """Count a look for what is not finite, and the product with the reciprocal scale."""
    return each(total(t.numel for t in call["self"]), NON_FINITE, "mul")


@rule("_amp_update_scale")
def update_scale(call: Call) -> Counts:
    """Count the comparison, the count of good steps and the product, of one number each."""
    return each(ONE, "eq", "add", "mul")
