"""Table of elementwise functions: FLOPs per element, and the gradient of each operand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import pi
from typing import Annotated, Any

from ..errors import UnsupportedError
from ..ir.graph import (
    all_of,
    is_count,
)
from ..notation.validation import Rule

__all__ = ["COMPLEX", "FUNCTIONS", "POWERS", "Elementwise", "Function", "names_in", "of_complex"]


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


def _arithmetic() -> list[Function]:  # a table
    f = Function
    return [
        f("copy", 1, 0, formula="x", grad=("g",)),
        f("cast", 1, 0, formula="x in another format", grad=("g",)),
        f("add", 2, 1, formula="a + b", grad=("g", "g")),
        f("sub", 2, 1, formula="a - b", grad=("g", ("neg", "g"))),
        f("mul", 2, 1, formula="a * b", grad=(("mul", "g", "b"), ("mul", "g", "a"))),
        f("div", 2, 1, 0, "float", "a / b",
          (("div", "g", "b"), ("mul", ("neg", "g"), ("conj", ("div", ("div", "a", "b"), "b"))))),
        f("maximum", 2, 1, formula="max(a, b)", grad=_extreme("a", "b")),
        f("minimum", 2, 1, formula="min(a, b)", grad=_extreme("b", "a")),
        f("pow", 2, 1, 2, "float", "exp(b * log(a))", (
            ("where", ("eq", "b", 0), 0, ("mul", "g", ("conj", ("mul", "b", ("pow", "a", ("sub", "b", 1)))))),
            ("mul", "g", ("where", ("call", ("logical_and", ("eq", "a", 0), ("less_equal", 0, "b"))), 0,
                          ("mul", "y", ("log", "a")))),
        )),
        f("eq", 2, 1, 0, "bool", "a == b", (None, None)),
        f("ne", 2, 1, 0, "bool", "a != b", (None, None)),
        f("less", 2, 1, 0, "bool", "a < b", (None, None)),
        f("less_equal", 2, 1, 0, "bool", "a <= b", (None, None)),
        f("logical_and", 2, 1, 0, "bool", "a and b", (None, None)),
        f("where", 3, 1, formula="a if c else b", grad=(None, ("where", "a", "g", 0), ("where", "a", 0, "g"))),
        f("masked_fill", 2, 1, formula="fill if mask else x", grad=(("masked_fill", "g", "b"), None)),
        f("causal_mask", 1, 1, formula="x, or -inf where the query does not see the key",
          grad=(("causal_mask_backward", "g"),)),
        f("fma", 3, 2, formula="a * b + c", grad=(("mul", "g", "b"), ("mul", "g", "a"), "g")),
        f("lerp", 3, 3, formula="a + t * (b - a)",
          grad=(("mul", "g", ("sub", 1, "c")), ("mul", "g", "c"), ("mul", "g", ("sub", "b", "a"))), order=(1, 0, 2)),
        f("masked_scale", 3, 2, formula="x * mask * scale",
          grad=(("masked_scale", "g", "b", "c"), None, ("masked_scale", "g", "b", "a"))),
        f("neg", 1, 1, formula="-x", grad=(("neg", "g"),)),
        f("abs", 1, 1, formula="|x|", grad=(("mul", "g", ("sign", "a")),)),
        f("sign", 1, 1, formula="sign(x)", grad=(None,)),
        f("square", 1, 1, formula="x * x", grad=(("mul", "g", ("conj", ("mul", 2, ("copy", "a")))),)),
        f("reciprocal", 1, 1, 0, "float", "1 / x", (("mul", ("neg", "g"), ("conj", ("mul", "y", "y"))),)),
        f("clamp", 1, 2, formula="min(max(x, low), high)",
          grad=(("where", ("logical_and_", ("less_equal", 0, "a"), ("less_equal", "a", 1)), "g", 0),)),
        f("round", 1, 1, formula="nearest integer", grad=(None,)),
        f("floor", 1, 1, formula="largest integer below", grad=(None,)),
        f("logical_not", 1, 1, 0, "bool", "not x", (None,)),
    ]  # fmt: skip


def _extreme(a: str, b: str) -> tuple[Any, ...]:
    """Return the gradients of a maximum or minimum: equal operands get half each, as in torch."""
    halved = ("where", ("eq", "a", "b"), ("div", "g", 2), "g")
    return ("masked_fill_", halved, ("less", a, b)), ("masked_fill_", halved, ("less", b, a))


def _transcendental() -> list[Function]:
    f = Function
    return [
        f("exp", 1, 0, 1, "float", "exp(x)", (("mul", "g", "y"),)),
        f("expm1", 1, 0, 1, "float", "exp(x) - 1", (("mul", "g", ("add", "y", 1)),)),
        f("log", 1, 0, 1, "float", "log(x)", (("div", "g", "a"),)),
        f("log1p", 1, 0, 1, "float", "log(1 + x)", (("div", "g", ("add", "a", 1)),)),
        f("sqrt", 1, 0, 1, "float", "sqrt(x)", (("div", "g", ("mul", 2, "y")),)),
        f("rsqrt", 1, 0, 1, "float", "1 / sqrt(x)", (("mul", ("mul", -0.5, "g"), ("conj", ("cubed", "y"))),)),
        f("sin", 1, 0, 1, "float", "sin(x)", (("mul", "g", ("conj", ("cos", "a"))),)),
        f("cos", 1, 0, 1, "float", "cos(x)", (("mul", "g", ("conj", ("neg", ("sin", "a")))),)),
        f("tanh", 1, 0, 1, "float", "tanh(x)", (("tanh_backward", "g", "y"),)),
        f("erf", 1, 0, 1, "float", "erf(x)",
          (("mul", ("mul", 2 / pi**0.5, ("exp", ("neg", ("square", "a")))), "g"),)),
        f("cubed", 1, 2, formula="x * x * x", grad=(("mul", "g", ("conj", ("mul", 3, ("square", "a")))),)),
    ]  # fmt: skip


def _activations() -> list[Function]:
    f = Function
    return [
        f("relu", 1, 1, formula="max(x, 0)", grad=(("threshold_backward", "g", "y"),)),
        f("relu6", 1, 2, formula="min(max(x, 0), 6)", grad=(("relu6_backward", "g", "a"),)),
        f("relu2", 1, 2, formula="max(x, 0)**2", grad=(("relu2_backward", "g", "a"),)),
        f("leaky_relu", 1, 2, formula="max(x, slope * x)", grad=(("leaky_relu_backward", "g", "a"),)),
        f("sigmoid", 1, 3, 1, "float", "1 / (1 + exp(-x))", (("sigmoid_backward", "g", "y"),)),
        f("silu", 1, 3, 1, "float", "x / (1 + exp(-x))", (("silu_backward", "g", "a"),)),
        f("gelu", 1, 4, 1, "float", "0.5 * x * (1 + erf(x * sqrt(1/2)))", (("gelu_backward", "g", "a"),)),
        f("gelu_tanh", 1, 8, 1, "float", "0.5 * x * (1 + tanh(c * (x + 0.044715 * x*x*x)))",
          (("gelu_tanh_backward", "g", "a"),)),
        f("quick_gelu", 1, 3, 1, "float", "x / (1 + exp(-1.702 * x))", (("quick_gelu_backward", "g", "a"),)),
        f("softplus", 1, 1, 2, "float", "log(1 + exp(x))", (("softplus_backward", "g", "a"),)),
        f("mish", 1, 2, 3, "float", "x * tanh(log(1 + exp(x)))", (("mish_backward", "g", "a"),)),
        f("elu", 1, 4, 1, "float", "x if x > 0 else a * (exp(x) - 1)", (("elu_backward", "g", "a"),)),
        f("softcap", 1, 2, 1, "float", "c * tanh(x / c)", (("softcap_backward", "g", "y"),)),
        f("hardsigmoid", 1, 4, formula="min(max(x + 3, 0), 6) / 6", grad=(("hardsigmoid_backward", "g", "a"),)),
        f("hardswish", 1, 5, formula="x * min(max(x + 3, 0), 6) / 6", grad=(("hardswish_backward", "g", "a"),)),
    ]  # fmt: skip


def _backward() -> list[Function]:
    """Return the functions that are backward kernels; second derivatives are not defined."""
    f = Function
    return [
        f("causal_mask_backward", 1, 1, formula="g, or 0 where the query does not see the key"),
        f("threshold_backward", 2, 2, formula="g if y > 0 else 0"),
        f("relu6_backward", 2, 4, formula="0 if x <= 0 or x >= 6 else g"),
        f("relu2_backward", 2, 3, formula="g * 2 * max(x, 0)"),
        f("leaky_relu_backward", 2, 3, formula="g if x > 0 else slope * g"),
        f("tanh_backward", 2, 3, formula="g * (1 - y * y)"),
        f("sigmoid_backward", 2, 3, formula="g * (1 - y) * y"),
        f("silu_backward", 2, 8, 1, formula="g * s * (1 + x * (1 - s)), s = 1 / (1 + exp(-x))"),
        f("gelu_backward", 2, 9, 2,
          formula="g * (cdf + x * pdf), cdf = 0.5 * (1 + erf(x * c)), pdf = k * exp(-0.5 * x*x)"),
        f("gelu_tanh_backward", 2, 17, 1,
          formula="g * (0.5*(1+t) + 0.5*x * (1-t*t) * (c*(1 + 3*0.044715*s))), t = tanh(c * (x + k*(s*x))), s = x*x"),
        f("quick_gelu_backward", 2, 9, 1, formula="g * s * (1 + 1.702*x * (1 - s)), s = 1 / (1 + exp(-1.702 * x))"),
        f("softplus_backward", 2, 3, 1, formula="g * z / (z + 1), z = exp(x)"),
        f("mish_backward", 2, 10, 4, formula="g * (t + x*s*(1-t*t)), t = tanh(log(1+exp(x))), s = 1 / (1 + exp(-x))"),
        f("elu_backward", 2, 4, 1, formula="g if x > 0 else g * a * exp(x)"),
        f("softcap_backward", 2, 4, formula="g * (1 - t * t), t = y / c"),
        f("hardsigmoid_backward", 2, 5, formula="0 if x <= -3 else 0 if x >= 3 else g / 6"),
        f("hardswish_backward", 2, 7, formula="0 if x < -3 else g * (x / 3 + 0.5) if x <= 3 else g"),
    ]  # fmt: skip


#: Every elementwise function by name.
FUNCTIONS: dict[str, Function] = {
    row.name: row for row in (*_arithmetic(), *_transcendental(), *_activations(), *_backward())
}

#: Exponents for which torch's power kernel multiplies or takes a root.
POWERS: dict[float, tuple[str, ...]] = {
    0: (), 1: ("copy",), 2: ("square",), 3: ("cubed",), 0.5: ("sqrt",), -0.5: ("rsqrt",), -1: ("reciprocal",),
    -2: ("square", "reciprocal"),
}  # fmt: skip

_MODULUS = (3, 1)  # a*a, b*b, their sum and its root

#: Costs on complex numbers z = a + b*i: FLOPs of real arithmetic, and transcendentals.
COMPLEX: dict[str, tuple[int, int]] = {
    "copy": (0, 0),
    "cast": (0, 0),
    "add": (2, 0),
    "sub": (2, 0),
    "neg": (2, 0),
    "where": (2, 0),
    "masked_fill": (2, 0),
    "masked_scale": (4, 0),  # mask and scale are real
    "eq": (3, 0),  # both parts
    "ne": (3, 0),
    "mul": (6, 0),  # a*c - b*d, a*d + b*c
    "square": (6, 0),
    "fma": (8, 0),
    "lerp": (10, 0),
    "cubed": (12, 0),
    "reciprocal": (6, 0),  # a and -b divided by the squared modulus
    "div": (11, 0),  # z * conj(w), both parts divided by the squared modulus of w
    "abs": _MODULUS,
    "sign": (_MODULUS[0] + 2, 1),
    "exp": (2, 3),  # exp(a) * (cos(b), sin(b))
    "log": (_MODULUS[0], 3),  # log of the modulus, and the angle
    "sqrt": (_MODULUS[0] + 4, 2),  # t = sqrt((|z| + |a|) / 2), b / (2*t)
    "pow": (_MODULUS[0] + 8, 6),  # exp(w * log(z))
}


def of_complex(function: Function) -> Function:
    """Return a function with its complex costs; raise UnsupportedError if they are not defined."""
    if function.name not in COMPLEX:
        raise UnsupportedError(
            f"{function.name} of complex numbers has no cost rule, expected one of {', '.join(COMPLEX)}"
        )
    flops, transcendentals = COMPLEX[function.name]
    return replace(function, flops=flops, transcendentals=transcendentals)
