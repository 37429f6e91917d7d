"""Tables of elementwise functions: the value of each, from which its FLOPs follow, and the gradient of each operand."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, log, pi
from typing import Annotated, Any

from ..errors import GraphError, UnsupportedError
from ..ir.graph import (
    all_of,
    is_count,
)
from ..notation.validation import Rule

__all__ = [
    "ATEN",
    "COMPLEX",
    "FUNCTIONS",
    "LOSSES",
    "POWERS",
    "Elementwise",
    "Function",
    "define",
    "names_in",
    "of_complex",
]


@dataclass(frozen=True)
class Function:
    """Elementwise function with its cost per element."""

    name: str
    """Name in tables, files and `costgraph.ops.elementwise`."""
    arity: int
    """Number of operands."""
    flops: int
    """FLOPs: adds, multiplies, divides, comparisons and selections."""
    transcendentals: int = 0
    """Transcendentals: exp, log, sqrt, sin, tanh, erf and the like, 1 per call."""
    result: str = "same"
    """Result dtype: same as the operands', float, or bool."""
    formula: str = ""
    """Formula, for display."""
    grad: tuple[Any, ...] | None = None
    """Gradient expression of each operand, None where it is zero; None as a whole if no gradient is defined.

    "g" is the incoming gradient, "y" the result, "a" to "d" the operands; numbers are literals. `("mul", "g", "b")`
    applies a function of the table, in place if its name ends in an underscore. Equal subexpressions of one gradient
    are computed once, as a variable of torch's formula. `("one", expression)` is one kernel; temporaries of
    `("call", expression)` die at its end; `("again", "a")` is the function itself. Complex names stand for conjugates;
    inside `("conj", expression)` they do not, and its value is conjugated. Gradients with `("shared", expression)` come
    from one torch function, in operand order: its temporaries live until all of them exist, and the value is computed
    once, as a call.
    """
    order: tuple[int, ...] = ()
    """Operands in the order in which torch computes their gradients, by argument name; () means from last to first."""


def _is_function(value: object) -> bool:
    return (
        isinstance(value, Function)
        and isinstance(value.name, str)
        and isinstance(value.formula, str)
        and is_count(value.arity, 1)
        and is_count(value.flops)
        and is_count(value.transcendentals)
        and value.result in ("same", "float", "bool")
        and (value.grad is None or all_of(lambda v: v is None or _is_gradient(v))(value.grad))
        and all_of(is_count)(value.order)
        and (not value.order or sorted(value.order) == list(range(value.arity)))
    )


def _is_gradient(value: object) -> bool:
    """Return whether a value is a gradient expression."""
    if isinstance(value, tuple):
        return len(value) > 1 and isinstance(value[0], str) and all(map(_is_gradient, value[1:]))
    return value in ("g", "y", "a", "b", "c", "d") if isinstance(value, str) else isinstance(value, int | float)


def names_in(expression: Any) -> Iterator[str]:
    """Yield the names in a gradient expression."""
    if isinstance(expression, tuple):
        for part in expression[1:]:
            yield from names_in(part)
    elif isinstance(expression, str):
        yield expression


#: A function as a field of an op kind.
Elementwise = Annotated[Function, Rule("an elementwise function", _is_function)]


# -- definitions -------------------------------------------------------------------------------------------------------

#: Operators in a formula, by Python's syntax; each counts 1 FLOP.
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "square", ast.USub: "neg",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "less", ast.GtE: "less_equal",
    ast.And: "logical_and", ast.Or: "logical_or", ast.Not: "logical_not",
}  # fmt: skip
#: Calls in a formula that count 1 FLOP.
_CALLS = ("abs", "ceil", "copysign", "floor", "max", "min", "nan_to_num", "round", "sign", "trunc")
_PLAIN = frozenset({*_OPERATORS.values(), *_CALLS, "where"})
_BOOL = frozenset({"eq", "ne", "less", "less_equal", "logical_and", "logical_or", "logical_not"})

#: Primitives that each function applies; the outermost one is first.
_STEPS: dict[str, tuple[str, ...]] = {**{name: (name,) for name in _CALLS}, "cast": (), "log2p1": ("log2p1",)}


def _applied(node: ast.AST) -> tuple[str, ...]:
    """Return the primitives that one node of a formula applies."""
    match node:
        case ast.BinOp(op=op) | ast.UnaryOp(op=op) | ast.BoolOp(op=op) | ast.Compare(ops=[op]):
            return (_OPERATORS[type(op)],)
        case ast.IfExp():
            return ("where",)
        case ast.Call(func=ast.Name(id=name)) if name in _STEPS:
            return _STEPS[name]
        case ast.Call():
            raise GraphError(f"{ast.unparse(node)}: expected a call of {', '.join(_STEPS)}")
    return ()


def _steps(node: ast.AST, variables: Collection[str]) -> list[str] | None:
    """Return the primitives in a formula, the outermost one first; None for a constant."""
    if isinstance(node, ast.Name):
        return [] if node.id in variables else None
    operands = [steps for n in ast.iter_child_nodes(node) if (steps := _steps(n, variables)) is not None]
    return [*_applied(node), *chain.from_iterable(operands)] if operands else None


def define(definition: str, *grad: Any, result: str = "", order: tuple[int, ...] = ()) -> Function:
    """Return a function with the costs of its definition.

    Parameters
    ----------
    definition : str
        Name, operands and value in Python's syntax, such as "silu(x) = x / (1 + exp(-x))". Repeated subexpressions
        are named: "g * s * (1 - s), s = sigmoid(x)". Other names are constants, whose arithmetic is free. A
        transcendental has no value.
    *grad
        Gradient expression of each operand; none if no gradient is defined.
    result : str
        Result dtype, by default float for quotients and transcendentals.
    order : tuple of int
        Operands in the order in which torch computes their gradients.
    """
    signature, _, value = definition.partition(" = ")
    name, *operands = re.findall(r"\w+", signature)
    formula = value or signature
    text, *definitions = re.split(r", (?=\w+ = )", formula)
    named = dict(definition.split(" = ", 1) for definition in definitions)
    variables = {*operands, *named}
    if not value:
        _STEPS.setdefault(name, (name,))
    parts = [_steps(ast.parse(part, mode="eval"), variables) or [] for part in (text, *named.values())]
    steps = tuple(chain.from_iterable(parts))
    _STEPS.setdefault(name, steps)
    flops = sum(step in _PLAIN for step in steps)
    is_float = flops < len(steps) or "div" in steps
    result = result or ("bool" if _BOOL.intersection(steps[:1]) else "float" if is_float else "same")
    return Function(name, len(operands), flops, len(steps) - flops, result, formula, grad or None, order)


def _by_name(*functions: Function) -> dict[str, Function]:
    return {function.name: function for function in functions}


# -- the library's functions -------------------------------------------------------------------------------------------


def _extremum_gradients(a: str, b: str) -> tuple[Any, Any]:
    """Return the gradients of a maximum or minimum: equal operands get half each, as in torch."""
    halved = ("where", ("eq", "a", "b"), ("div", "g", 2), "g")
    return ("masked_fill_", halved, ("less", a, b)), ("masked_fill_", halved, ("less", b, a))


_ARITHMETIC = _by_name(
    define("copy(x) = x", "g"),
    define("cast(x) = cast(x)", "g"),
    define("add(a, b) = a + b", "g", "g"),
    define("sub(a, b) = a - b", "g", ("neg", "g")),
    define("mul(a, b) = a * b", ("mul", "g", "b"), ("mul", "g", "a")),
    define("div(a, b) = a / b", ("div", "g", "b"), ("mul", ("neg", "g"), ("conj", ("div", ("div", "a", "b"), "b")))),
    define("maximum(a, b) = max(a, b)", *_extremum_gradients("a", "b")),
    define("minimum(a, b) = min(a, b)", *_extremum_gradients("b", "a")),
    define("eq(a, b) = a == b", None, None),
    define("ne(a, b) = a != b", None, None),
    define("less(a, b) = a < b", None, None),
    define("less_equal(a, b) = a <= b", None, None),
    define("logical_and(a, b) = a and b", None, None),
    define("where(c, a, b) = a if c else b", None, ("where", "a", "g", 0), ("where", "a", 0, "g")),
    define("masked_fill(x, mask) = fill if mask else x", ("masked_fill", "g", "b"), None),
    define("causal_mask(x) = x if attended else -inf", ("causal_mask_backward", "g")),
    define("fma(a, b, c) = a * b + c", ("mul", "g", "b"), ("mul", "g", "a"), "g"),
    define("lerp(a, b, t) = a + t * (b - a)",
           ("mul", "g", ("sub", 1, "c")), ("mul", "g", "c"), ("mul", "g", ("sub", "b", "a")), order=(1, 0, 2)),
    define("masked_scale(x, mask, scale) = x * mask * scale",
           ("masked_scale", "g", "b", "c"), None, ("masked_scale", "g", "b", "a")),
    define("neg(x) = -x", ("neg", "g")),
    define("abs(x) = abs(x)", ("mul", "g", ("sign", "a"))),
    define("sign(x) = sign(x)", None),
    define("square(x) = x * x", ("mul", "g", ("conj", ("mul", 2, ("copy", "a"))))),
    define("cubed(x) = x * x * x", ("mul", "g", ("conj", ("mul", 3, ("square", "a"))))),
    define("reciprocal(x) = 1 / x", ("mul", ("neg", "g"), ("conj", ("mul", "y", "y")))),
    define("clamp(x) = min(max(x, low), high)",
           ("where", ("logical_and_", ("less_equal", 0, "a"), ("less_equal", "a", 1)), "g", 0)),
    define("round(x) = round(x)", None),
    define("floor(x) = floor(x)", None),
    define("logical_not(x) = not x", None),
)  # fmt: skip

_TRANSCENDENTAL = _by_name(
    define("exp(x)", ("mul", "g", "y")),
    define("expm1(x)", ("mul", "g", ("add", "y", 1))),
    define("log(x)", ("div", "g", "a")),
    define("log1p(x)", ("div", "g", ("add", "a", 1))),
    define("sqrt(x)", ("div", "g", ("mul", 2, "y"))),
    define("rsqrt(x)", ("mul", ("mul", -0.5, "g"), ("conj", ("cubed", "y")))),
    define("sin(x)", ("mul", "g", ("conj", ("cos", "a")))),
    define("cos(x)", ("mul", "g", ("conj", ("neg", ("sin", "a"))))),
    define("tanh(x)", ("tanh_backward", "g", "y")),
    define("erf(x)", ("mul", ("mul", 2 / pi**0.5, ("exp", ("neg", ("square", "a")))), "g")),
    define("pow(a, b) = exp(b * log(a))",
           ("where", ("eq", "b", 0), 0, ("mul", "g", ("conj", ("mul", "b", ("pow", "a", ("sub", "b", 1)))))),
           ("mul", "g", ("where", ("call", ("logical_and", ("eq", "a", 0), ("less_equal", 0, "b"))), 0,
                         ("mul", "y", ("log", "a"))))),
)  # fmt: skip

_ACTIVATIONS = _by_name(
    define("relu(x) = max(x, 0)", ("threshold_backward", "g", "y")),
    define("relu6(x) = min(max(x, 0), 6)", ("relu6_backward", "g", "a")),
    define("relu2(x) = max(x, 0)**2", ("relu2_backward", "g", "a")),
    define("leaky_relu(x) = max(x, slope * x)", ("leaky_relu_backward", "g", "a")),
    define("sigmoid(x) = 1 / (1 + exp(-x))", ("sigmoid_backward", "g", "y")),
    define("silu(x) = x / (1 + exp(-x))", ("silu_backward", "g", "a")),
    define("gelu(x) = 0.5 * x * (1 + erf(x * sqrt(1/2)))", ("gelu_backward", "g", "a")),
    define("gelu_tanh(x) = 0.5 * x * (1 + tanh(c * (x + 0.044715 * x*x*x)))", ("gelu_tanh_backward", "g", "a")),
    define("quick_gelu(x) = x / (1 + exp(-1.702 * x))", ("quick_gelu_backward", "g", "a")),
    define("softplus(x) = log(1 + exp(x))", ("softplus_backward", "g", "a")),
    define("mish(x) = x * tanh(log(1 + exp(x)))", ("mish_backward", "g", "a")),
    define("elu(x) = x if x > 0 else a * (exp(x) - 1)", ("elu_backward", "g", "a")),
    define("softcap(x) = c * tanh(x / c)", ("softcap_backward", "g", "y")),
    define("hardsigmoid(x) = min(max(x + 3, 0), 6) / 6", ("hardsigmoid_backward", "g", "a"), result="same"),
    define("hardswish(x) = x * min(max(x + 3, 0), 6) / 6", ("hardswish_backward", "g", "a"), result="same"),
)  # fmt: skip

#: Backward kernels; second derivatives are not defined.
_BACKWARD = _by_name(*(define(definition, result="same") for definition in (
    "causal_mask_backward(g) = g if attended else 0",
    "threshold_backward(g, y) = g if y > 0 else 0",
    "relu6_backward(g, x) = 0 if x <= 0 or x >= 6 else g",
    "relu2_backward(g, x) = g * 2 * max(x, 0)",
    "leaky_relu_backward(g, x) = g if x > 0 else slope * g",
    "tanh_backward(g, y) = g * (1 - y * y)",
    "sigmoid_backward(g, y) = g * (1 - y) * y",
    "silu_backward(g, x) = g * s * (1 + x * (1 - s)), s = 1 / (1 + exp(-x))",
    "gelu_backward(g, x) = g * (cdf + x * pdf), cdf = 0.5 * (1 + erf(x * c)), pdf = k * exp(-0.5 * x*x)",
    "gelu_tanh_backward(g, x) = g * (0.5*(1+t) + 0.5*x*(1-t*t)*(c*(1+0.134145*s))), t = tanh(c*(x + k*(s*x))), s = x*x",
    "quick_gelu_backward(g, x) = g * s * (1 + 1.702*x * (1 - s)), s = 1 / (1 + exp(-1.702 * x))",
    "softplus_backward(g, x) = g * z / (z + 1), z = exp(x)",
    "mish_backward(g, x) = g * (t + x*s*(1-t*t)), t = tanh(log(1+exp(x))), s = 1 / (1 + exp(-x))",
    "elu_backward(g, x) = g if x > 0 else g * a * exp(x)",
    "softcap_backward(g, y) = g * (1 - t * t), t = y / c",
    "hardsigmoid_backward(g, x) = 0 if x <= -3 else 0 if x >= 3 else g / 6",
    "hardswish_backward(g, x) = 0 if x < -3 else g * (x / 3 + 0.5) if x <= 3 else g",
)))  # fmt: skip

#: Every elementwise function by name.
FUNCTIONS: dict[str, Function] = {**_ARITHMETIC, **_TRANSCENDENTAL, **_ACTIVATIONS, **_BACKWARD}

#: Exponents for which torch's power kernel multiplies or takes a root.
POWERS: dict[float, tuple[str, ...]] = {
    0: (), 1: ("copy",), 2: ("square",), 3: ("cubed",), 0.5: ("sqrt",), -0.5: ("rsqrt",), -1: ("reciprocal",),
    -2: ("square", "reciprocal"),
}  # fmt: skip


# -- aten's functions --------------------------------------------------------------------------------------------------

_UNDER_ROOT: Any = ("rsqrt", ("add", ("mul", ("neg", "a"), "a"), 1))
_SQUARES: Any = ("shared", ("add", ("mul", "a", "a"), ("mul", "b", "b")))
_BOTH_SQUARED: Any = ("shared", ("masked_fill", ("reciprocal", _SQUARES), ("eq", _SQUARES, 0)))
_PI_A: Any = ("mul", "a", pi)
_PI_SQUARED: Any = ("call", ("mul", ("mul", "a", "a"), pi))
_QUOTIENT: Any = ("div", "a", "b")


def _selecting_gradients(smaller: str, larger: str) -> tuple[Any, Any]:
    """Return the gradients of `fmax` or `fmin`: the first operand gets it where it is chosen, or b is NaN."""
    first = ("ne_", ("less_equal", smaller, larger), ("ne", "b", "b"))  # never both true
    return ("masked_fill", "g", ("logical_not_", first)), ("masked_fill", "g", first)


#: Functions of aten ops that are not in `FUNCTIONS` by this name, with the gradients that torch's autograd computes.
ATEN: dict[str, Function] = {
    **{name: FUNCTIONS[same] for name, same in {
        "clamp_min": "maximum", "clamp_max": "minimum", "hardtanh": "relu6", "hardtanh_backward": "relu6_backward",
        "celu": "elu", "rrelu_with_noise": "leaky_relu", "sgn": "sign", "_masked_scale": "masked_scale",
        "native_dropout_backward": "masked_scale",
        "rrelu_with_noise_backward": "mul",  # the noise is the slope
    }.items()},
    "fmax": replace(FUNCTIONS["maximum"], grad=_selecting_gradients("b", "a")),
    "fmin": replace(FUNCTIONS["minimum"], grad=_selecting_gradients("a", "b")),
    **_by_name(*map(define, (
        "digamma(x)", "i0(x)", "igamma(a, x)", "igammac(a, x)", "lgamma(x)", "polygamma(x)", "special_bessel_j0(x)",
        "special_bessel_j1(x)", "special_bessel_y0(x)", "special_bessel_y1(x)", "special_erfcx(x)", "special_i0e(x)",
        "special_i1(x)", "special_i1e(x)", "special_log_ndtr(x)", "special_ndtri(x)", "special_zeta(a, b)",
    ))),
    **_by_name(
        define("acos(x)", ("mul", ("neg", "g"), _UNDER_ROOT)),
        define("acosh(x)", ("mul", "g", ("rsqrt", ("sub", ("square", "a"), 1)))),
        define("asin(x)", ("mul", "g", _UNDER_ROOT)),
        define("asinh(x)", ("mul", "g", ("rsqrt", ("add", ("square", "a"), 1)))),
        define("atan(x)", ("div", "g", ("add", ("mul", "a", "a"), 1))),
        define("atan2(a, b)",
               ("mul", ("mul", "g", "b"), _BOTH_SQUARED), ("mul", ("mul", "g", ("neg", "a")), _BOTH_SQUARED)),
        define("atanh(x)", ("div", ("mul", "g", 1), ("sub", 1, ("square", "a")))),
        define("cosh(x)", ("mul", "g", ("one", ("mul", 0.5, ("sub", ("exp", "a"), ("exp", ("neg", "a"))))))),
        define("erfc(x)", ("mul", ("mul", ("exp", ("neg", ("square", "a"))), -2 / pi**0.5), "g")),
        define("erfinv(x)", ("mul", ("mul", pi**0.5 / 2, ("exp", ("square", ("again", "a")))), "g")),
        define("exp2(x)", ("mul", ("mul", "g", "y"), log(2))),
        define("log10(x)", ("div", "g", ("mul", "a", log(10)))),
        define("log2(x)", ("div", "g", ("mul", "a", log(2)))),
        define("sinh(x)", ("mul", "g", ("one", ("mul", 0.5, ("add", ("exp", "a"), ("exp", ("neg", "a"))))))),
        define("tan(x)", ("mul", "g", ("add", ("square", "y"), 1))),
        define("ceil(x) = ceil(x)", None),
        define("trunc(x) = trunc(x)", None),
        define("frac(x) = x - trunc(x)", "g"),
        define("nan_to_num(x) = nan_to_num(x)",
               ("mul", "g", ("call", ("mul", ("ne", ("abs", "a"), inf), ("eq", "a", "a"))))),
        define("copysign(a, b) = copysign(a, b)",
               ("mul", "g", ("masked_fill_", ("div", "y", "a"), ("eq", "a", 0))), None),
        define("floor_divide(a, b) = floor(a / b)", None),
        define("remainder(a, b) = a - floor(a / b) * b", "g", ("mul", ("neg", "g"), ("floor_", _QUOTIENT))),
        define("fmod(a, b) = a - trunc(a / b) * b", "g", ("mul", ("neg", "g"), ("one", (
            "where", ("less", _QUOTIENT, 0), ("neg", ("floor", ("neg", _QUOTIENT))), ("floor", _QUOTIENT),
        )))),
        define("hypot(a, b) = sqrt(a * a + b * b)", ("mul", "g", ("div", "a", "y")), ("mul", "g", ("div", "b", "y"))),
        define("xlogy(a, b) = a * log(b)",
               ("masked_fill", ("one", ("mul", "g", ("log", "b"))),
                ("logical_and", ("less_equal", "b", 0), ("eq", "a", 0))),
               ("div", ("mul", "g", "a"), "b")),
        define("special_xlog1py(a, b) = a * log1p(b)"),
        define("special_entr(x) = -x * log(x)", ("mul", "g", ("neg", ("add", ("log", "a"), 1)))),
        define("logaddexp(a, b) = max(a, b) + log1p(exp(-abs(a - b)))",
               ("div", "g", ("add", ("exp", ("sub", "b", "a")), 1)),
               ("div", "g", ("add", ("exp", ("sub", "a", "b")), 1))),
        define("logaddexp2(a, b) = max(a, b) + log2p1(exp2(-abs(a - b)))",
               ("div", "g", ("add", ("pow", 2, ("sub", "b", "a")), 1)),
               ("div", "g", ("add", ("pow", 2, ("sub", "a", "b")), 1))),
        define("sinc(x) = sin(z) / z, z = pi * x", (
            "masked_fill",
            ("call", ("mul", "g", ("div", ("sub", ("mul", _PI_A, ("cos", _PI_A)), ("sin", _PI_A)), _PI_SQUARED))),
            ("eq", _PI_SQUARED, 0),
        )),
        define("logit(x) = log(x / (1 - x))", ("one", ("div", "g", ("mul", "a", ("sub", 1, "a"))))),
        define("logit_backward(g, x) = g / (x * (1 - x))"),
        define("polar(r, angle) = (r * cos(angle), r * sin(angle))"),
        define("threshold(x) = value if x <= threshold else x"),
        define("_add_relu(a, b) = relu(a + b)"),
        define("_prelu_kernel(x, w) = max(x, w * x)",  # for w <= 1, as with `leaky_relu`
               ("one", ("where", ("less", 0, "a"), "g", ("mul", "b", "g"))),
               ("one", ("where", ("less", 0, "a"), 0, ("mul", "a", "g")))),
        # before the sum for the weight
        define("_prelu_kernel_backward(g, x, w) = (g if p else w * g, 0 if p else x * g), p = x > 0"),
        define("glu(a, b) = a * sigmoid(b)"),
        define("log_sigmoid_forward(x) = min(x, 0) - log1p(exp(-abs(x)))"),
        define("log_sigmoid_backward(g, x) = g * (n - s * (z / (1 + z))), "
               "n = 1 if p else 0, s = 1 if p else -1, p = x < 0, z = exp(-abs(x))"),
        define("hardshrink(x) = 0 if abs(x) <= lambd else x"),
        define("hardshrink_backward(g, x) = 0 if abs(x) <= lambd else g"),
        define("softshrink(x) = sign(x) * max(abs(x) - lambd, 0)"),
        define("softshrink_backward(g, x) = 0 if abs(x) <= lambd else g"),
    ),
}  # fmt: skip

_EXP: Any = ("call", ("exp", ("mul", ("neg", "b"), "a")))
_WEIGHTED_TARGET: Any = ("mul", "c", "b")

#: Elementwise losses of aten, for an input x and a target t, or for their difference d.
LOSSES: dict[str, Function] = _by_name(
    define("smooth_l1_loss(d) = 0.5 / beta * d * d if m < beta else m - 0.5 * beta, m = abs(d)"),
    define("huber_loss(d) = 0.5 * d * d if m < delta else delta * (m - 0.5 * delta), m = abs(d)"),
    define("soft_margin_loss(x, t) = log1p(exp(-t * x))",
            ("mul_", ("div_", ("mul_", ("mul", "b", _EXP), -1), ("add_", _EXP, 1)), "g"), None),
    define("binary_cross_entropy(x, t) = -(t * max(log(x), -100) + (1 - t) * max(log(1 - x), -100))",
            ("one", ("mul", "g", ("div", ("sub", "a", "b"), ("maximum", ("mul", ("sub", 1, "a"), "a"), 1e-12)))),
            ("mul", "g", ("sub", ("log", ("sub", 1, "a")), ("log", "a")))),
    define("binary_cross_entropy_with_logits(x, t) = (1 - t) * x - (min(x, 0) - log1p(exp(-abs(x))))",
            ("mul_", ("sub_", ("sigmoid", "a"), "b"), "g"), ("mul", ("neg", "a"), "g")),
    define("weighted_cross_entropy_with_logits(x, t, w) = "
            "(1 - t) * x - (1 + (w - 1) * t) * (min(x, 0) - log1p(exp(-abs(x))))",
            ("mul_",
             ("sub_", ("mul_", ("sub_", ("add", _WEIGHTED_TARGET, 1), "b"), ("sigmoid", "a")), _WEIGHTED_TARGET),
             "g"), None, None),
)  # fmt: skip


# -- complex numbers ---------------------------------------------------------------------------------------------------

_MODULUS = 3  # a*a, b*b, their sum; and its root

_COMPLEX_STEPS = {
    "add": (2, 0),
    "sub": (2, 0),
    "neg": (2, 0),
    "where": (2, 0),
    "eq": (3, 0),  # both parts
    "ne": (3, 0),
    "mul": (6, 0),  # a*c - b*d, a*d + b*c
    "div": (11, 0),  # z * conj(w), both parts divided by the squared modulus of w
    "abs": (_MODULUS, 1),
    "sign": (_MODULUS + 2, 1),
    "exp": (2, 3),  # exp(a) * (cos(b), sin(b))
    "log": (_MODULUS, 3),  # log of the modulus, and the angle
    "sqrt": (_MODULUS + 4, 2),  # t = sqrt((|z| + |a|) / 2), b / (2*t)
}

#: Costs on complex numbers z = a + b*i: FLOPs of real arithmetic, and transcendentals.
COMPLEX: dict[str, tuple[int, int]] = {
    **{
        name: (sum(_COMPLEX_STEPS[s][0] for s in _STEPS[name]), sum(_COMPLEX_STEPS[s][1] for s in _STEPS[name]))
        for name in (*_ARITHMETIC, *_TRANSCENDENTAL)
        if _COMPLEX_STEPS.keys() >= {*_STEPS[name]}
    },
    "reciprocal": (6, 0),  # a and -b divided by the squared modulus
    "masked_scale": (4, 0),  # mask and scale are real
}


def of_complex(function: Function) -> Function:
    """Return a function with its complex costs; raise UnsupportedError if they are not defined."""
    if function.name not in COMPLEX:
        raise UnsupportedError(
            f"{function.name} of complex numbers has no cost rule, expected one of {', '.join(COMPLEX)}"
        )
    flops, transcendentals = COMPLEX[function.name]
    return replace(function, flops=flops, transcendentals=transcendentals)
