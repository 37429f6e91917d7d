"""Translations of elementwise ops: a library function, or a record with FLOPs and gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log, pi
from typing import Any

from ....algebra.polynomial import Poly
from ....ir.graph import Tensor
from ....ops.elementwise import pointwise
from ....ops.functions import FUNCTIONS, Function, names_in
from ....ops.layout import split
from ....ops.loops import save
from ....ops.reduce import reduce
from ....ops.updates import ADD_PRODUCT, ADD_QUOTIENT, ADD_SCALED, ADD_SCALED_PRODUCT, ADD_SCALED_QUOTIENT
from ..call import Call
from ..rules.elementwise import gelu_steps, power_steps, steps_of
from ..rules.table import is_number
from .table import translation

__all__ = [
    "elementwise",
    "nondefault_parameters",
    "smooth_l1",
    "entropy",
    "gated",
    "log_sigmoid",
    "margin",
    "mse_loss",
]


# -- elementwise -------------------------------------------------------------------------------------------------------

#: Comparisons: the library's function, and whether its operands are exchanged.
_COMPARISONS = {"lt": ("less", False), "le": ("less_equal", False), "gt": ("less", True), "ge": ("less_equal", True),
             "ne": ("ne", False)}  # fmt: skip
#: Sums: the plain function, the function with a factor, and the factor's argument.
_SCALED: dict[str, tuple[str | Function, Function, str]] = {
    "add": ("add", ADD_SCALED, "alpha"),
    "addcmul": (ADD_PRODUCT, ADD_SCALED_PRODUCT, "value"),
    "addcdiv": (ADD_QUOTIENT, ADD_SCALED_QUOTIENT, "value"),
}


#: Default parameters of the library's functions; other values define a separate function.
_DEFAULTS: dict[str, dict[str, float]] = {
    "leaky_relu": {"negative_slope": 0.01}, "elu": {"alpha": 1, "scale": 1, "input_scale": 1}, "celu": {"alpha": 1},
    "softplus": {"beta": 1, "threshold": 20}, "hardtanh": {"min_val": 0, "max_val": 6},
}  # fmt: skip


_G: Any = "g"
_UNDER_ROOT: Any = ("rsqrt", ("add", ("mul", ("neg", "a"), "a"), 1))
_SQUARES: Any = ("shared", ("add", ("mul", "a", "a"), ("mul", "b", "b")))
_BOTH_SQUARED: Any = ("shared", ("masked_fill", ("reciprocal", _SQUARES), ("eq", _SQUARES, 0)))
_PI_A: Any = ("mul", "a", pi)
_PI_SQUARED: Any = ("call", ("mul", ("mul", "a", "a"), pi))
_OF_SINC: Any = (
    "masked_fill",
    ("call", ("mul", _G, ("div", ("sub", ("mul", _PI_A, ("cos", _PI_A)), ("sin", _PI_A)), _PI_SQUARED))),
    ("eq", _PI_SQUARED, 0),
)
_QUOTIENT: Any = ("div", "a", "b")


def _extremum_gradients(smaller: str, larger: str) -> tuple[Any, Any]:
    """Return the gradients of `fmax` or `fmin`: the first operand gets it where it is chosen, or b is NaN."""
    first = ("ne_", ("less_equal", smaller, larger), ("ne", "b", "b"))  # never both true
    return ("masked_fill", _G, ("logical_not_", first)), ("masked_fill", _G, first)


#: Gradients of functions outside the library's table, as torch's autograd computes them.
_GRADIENTS: dict[str, tuple[Any, ...]] = {
    "acos": (("mul", ("neg", _G), _UNDER_ROOT),),
    "acosh": (("mul", _G, ("rsqrt", ("sub", ("square", "a"), 1))),),
    "asinh": (("mul", _G, ("rsqrt", ("add", ("square", "a"), 1))),),
    "atanh": (("div", ("mul", _G, 1), ("sub", 1, ("square", "a"))),),
    "copysign": (("mul", _G, ("masked_fill_", ("div", "y", "a"), ("eq", "a", 0))), None),
    "cosh": (("mul", _G, ("one", ("mul", 0.5, ("sub", ("exp", "a"), ("exp", ("neg", "a")))))),),
    "erfinv": (("mul", ("mul", pi**0.5 / 2, ("exp", ("square", ("again", "a")))), _G),),
    "frac": (_G,),
    "hypot": (("mul", _G, ("div", "a", "y")), ("mul", _G, ("div", "b", "y"))),
    "logaddexp": (
        ("div", _G, ("add", ("exp", ("sub", "b", "a")), 1)), ("div", _G, ("add", ("exp", ("sub", "a", "b")), 1)),
    ),
    "logaddexp2": (
        ("div", _G, ("add", ("pow", 2, ("sub", "b", "a")), 1)), ("div", _G, ("add", ("pow", 2, ("sub", "a", "b")), 1)),
    ),
    "nan_to_num": (("mul", _G, ("call", ("mul", ("ne", ("abs", "a"), float("inf")), ("eq", "a", "a")))),),
    "sinc": (_OF_SINC,),
    "sinh": (("mul", _G, ("one", ("mul", 0.5, ("add", ("exp", "a"), ("exp", ("neg", "a")))))),),
    "special_entr": (("mul", _G, ("neg", ("add", ("log", "a"), 1))),),
    "xlogy": (
        ("masked_fill", ("one", ("mul", _G, ("log", "b"))), ("logical_and", ("less_equal", "b", 0), ("eq", "a", 0))),
        ("div", ("mul", _G, "a"), "b"),
    ),
    "asin": (("mul", _G, _UNDER_ROOT),),
    "atan": (("div", _G, ("add", ("mul", "a", "a"), 1)),),
    "atan2": (("mul", ("mul", _G, "b"), _BOTH_SQUARED), ("mul", ("mul", _G, ("neg", "a")), _BOTH_SQUARED)),
    "erfc": (("mul", ("mul", ("exp", ("neg", ("square", "a"))), -2 / pi**0.5), _G),),
    "exp2": (("mul", ("mul", _G, "y"), log(2)),),
    "log10": (("div", _G, ("mul", "a", log(10))),),
    "log2": (("div", _G, ("mul", "a", log(2))),),
    "logit": (("one", ("div", _G, ("mul", "a", ("sub", 1, "a")))),),
    "prelu_kernel": (
        ("one", ("where", ("less", 0, "a"), _G, ("mul", "b", _G))),
        ("one", ("where", ("less", 0, "a"), 0, ("mul", "a", _G))),
    ),
    "remainder": (_G, ("mul", ("neg", _G), ("floor_", _QUOTIENT))),
    "fmod": (
        _G,
        ("mul", ("neg", _G), ("one", (
            "where", ("less", _QUOTIENT, 0), ("neg", ("floor", ("neg", _QUOTIENT))), ("floor", _QUOTIENT),
        ))),
    ),
    "fmax": _extremum_gradients("b", "a"),
    "fmin": _extremum_gradients("a", "b"),
    "tan": (("mul", _G, ("add", ("square", "y"), 1)),),
    **dict.fromkeys(("ceil", "trunc", "floor_divide"), (None,)),
}  # fmt: skip


#: Functions of the library's table with other gradients.
_OTHER_GRADIENTS = frozenset({"fmax", "fmin"})


def _zero_up_to(bound: float, where: Any = "a") -> tuple[Any]:
    """Return the gradient of a function that is constant up to a bound."""
    return (("one", ("where", ("less_equal", where, bound), 0, _G)),)


def _elu_gradient(alpha: float, scale: float = 1, input_scale: float = 1) -> tuple[Any]:
    def times(x: Any, number: float) -> Any:
        return x if number == 1 else ("mul", x, number)

    below = ("mul", _G, ("mul", alpha * scale * input_scale, ("exp", times("a", input_scale))))
    return (("one", ("where", ("less", 0, "a"), times(_G, scale), below)),)


#: Gradients of functions with parameters.
_PARAMETRIC_GRADIENTS: dict[str, Callable[[Call], tuple[Any]]] = {
    "celu": lambda call: _elu_gradient(call["alpha"], input_scale=1 / call["alpha"]),
    "elu": lambda call: _elu_gradient(call["alpha"], call["scale"], call["input_scale"]),
    "hardshrink": lambda call: _zero_up_to(call["lambd"], ("abs", "a")),
    "hardtanh": lambda call: (
        ("one", ("where", ("logical_and", ("less", call["min_val"], "a"), ("less", "a", call["max_val"])), _G, 0)),
    ),
    "leaky_relu": lambda call: (("one", ("where", ("less", 0, "a"), _G, ("mul", call["negative_slope"], _G))),),
    "softplus": lambda call: (
        (
            "one",
            (
                "where",
                ("less", call["threshold"], ("mul", "a", call["beta"])),
                _G,
                ("mul", _G, ("sigmoid", ("mul", "a", call["beta"]))),
            ),
        ),
    ),
    "softshrink": lambda call: _zero_up_to(call["lambd"], ("abs", "a")),
    "threshold": lambda call: _zero_up_to(call["threshold"]),
}


def _gradient(call: Call, arity: int) -> tuple[Any, ...] | None:
    """Return the gradient per tensor operand; None if unknown for this many operands."""
    name = call.name.strip("_")
    if name in _PARAMETRIC_GRADIENTS:
        return (
            _PARAMETRIC_GRADIENTS[name](call)
            if all(isinstance(v, int | float) for v in list(call.arguments.values())[1:])
            else None
        )
    gradients = _GRADIENTS.get(name, ())
    if len(gradients) > arity and isinstance(call.get("self"), Tensor):  # the other operands are numbers
        gradients = tuple(e for e in gradients[:arity] if not {*names_in(e)} & {*"abcd"[arity:]})
    return gradients if len(gradients) == arity else None


def _is_operand(value: Any) -> bool:
    return isinstance(value, Tensor | Poly | int | float | complex) and not isinstance(value, bool)


def _operands(call: Call) -> list[Any]:
    return [v for v in call.arguments.values() if _is_operand(v)]


def _apply(call: Call, function: str | Function, operands: Sequence[Any]) -> Tensor | None:
    """Apply a function with the call's in-place flag and result dtype."""
    record = FUNCTIONS[function] if isinstance(function, str) else function
    if call.inplace and not isinstance(operands[0], Tensor):
        return None
    dtypes = {t.dtype for t in operands if isinstance(t, Tensor)}
    has_result_dtype = dtypes == {call.out.dtype} or (record.result == "bool" and call.out.dtype.name == "bool")
    return pointwise(record, *operands, inplace=call.inplace, dtype=None if has_result_dtype else call.out.dtype)


def _function_of(call: Call, steps: Sequence[str | Function]) -> Function | str:
    """Return one function for the steps that a kernel applies to each element."""
    tensors = [v for v in call.arguments.values() if isinstance(v, Tensor)]
    if (
        len(steps) == 1
        and isinstance(steps[0], str)
        and FUNCTIONS[steps[0]].arity in (len(tensors), len(_operands(call)))
    ):
        grad = _gradient(call, len(tensors)) if call.name in _OTHER_GRADIENTS else None
        return steps[0] if grad is None else replace(FUNCTIONS[steps[0]], grad=grad)
    records = [FUNCTIONS[s] if isinstance(s, str) else s for s in steps]
    flops, transcendentals = sum(f.flops for f in records), sum(f.transcendentals for f in records)
    name, arity = call.name.strip("_"), len(tensors)
    return Function(name, arity, flops, transcendentals, grad=_gradient(call, arity))


# other ops are tagged as pointwise by torch
@translation(
    "pointwise", "_prelu_kernel", "hardswish", "hardswish_backward", "hardsigmoid_backward", "mish_backward",
)  # fmt: skip
def elementwise(call: Call) -> Tensor | None:
    """Translate into the library's function, or into the kernel's steps."""
    if len(call.results) != 1 or any(isinstance(v, tuple) for v in call.arguments.values()):
        return None
    function = _function_of(call, steps_of(call.name))
    tensors = [v for v in call.arguments.values() if isinstance(v, Tensor)]
    arity = FUNCTIONS[function].arity if isinstance(function, str) else function.arity
    operands = tensors if arity == len(tensors) else _operands(call)
    if not tensors or len(operands) != arity:
        return None
    parameters = nondefault_parameters(call, operands)
    if parameters and isinstance(function, str):
        numbers = re.sub(r"\W", "_", "_".join(f"{k}_{v}" for k, v in parameters.items()))
        function = replace(FUNCTIONS[function], name=f"{function}_{numbers}", grad=_gradient(call, arity))
    return _apply(call, function, operands)


def nondefault_parameters(call: Call, operands: Sequence[Any]) -> dict[str, int | float | Poly]:
    """Return a call's parameters that are neither operands nor the library function's defaults."""
    defaults = _DEFAULTS.get(call.name) or _DEFAULTS.get(call.name.removesuffix("_backward"), {})
    numbers = {k: v for k, v in call.arguments.items() if isinstance(v, int | float | Poly) and v is not False}
    return {
        k: v for k, v in numbers.items() if not any(v is o for o in operands) and not is_number(v, defaults.get(k, 0))
    }


@translation("masked_fill")
def filled(call: Call) -> Tensor | Sequence[Tensor | None] | None:
    """Translate `masked_fill` with a number."""
    if call.inplace or not isinstance(call["value"], int | float) or is_number(call["value"], 0):
        return elementwise(call)
    return _apply(call, "where", [call["mask"], call["value"], call["self"]])


@translation(*_COMPARISONS)
def compared(call: Call) -> Tensor | None:
    """Translate a comparison."""
    function, swapped = _COMPARISONS[call.name]
    operands = [call["self"], call["other"]]
    return _apply(call, function, operands[::-1] if swapped else operands)


@translation(*_SCALED)
def added(call: Call) -> Tensor | None:
    """Translate a sum, possibly with a scaled operand."""
    unscaled, scaled, name = _SCALED[call.name]
    factor = call.get(name)
    operands = [v for k, v in call.arguments.items() if k != name and _is_operand(v)]
    if factor is None or is_number(factor, 1):
        return _apply(call, unscaled, operands)
    return _apply(call, scaled, [operands[0], factor, *operands[1:]]) if _is_operand(factor) else None


@translation("sub", "rsub")
def subtracted(call: Call) -> Tensor | None:
    """Translate a difference; a scaled one is a sum with a negative factor."""
    a, b, factor = call["self"], call["other"], call.get("alpha")
    if call.name == "rsub":
        a, b = b, a
    if factor is None or is_number(factor, 1):
        return _apply(call, "sub", [a, b])
    return _apply(call, ADD_SCALED, [a, -factor, b]) if _is_operand(factor) else None


@translation("div")
def divided(call: Call) -> Tensor | None:
    """Translate a quotient, possibly rounded."""
    operands = [call["self"], call["other"]]
    if call.get("rounding_mode") is None:
        return _apply(call, "div", operands)
    tensors = [v for v in operands if isinstance(v, Tensor)]
    return _apply(call, Function("rounded_quotient", len(tensors), 2, grad=(None,) * len(tensors)), tensors)


@translation("max.other", "min.other")
def extremum(call: Call) -> Tensor | None:
    """Translate `max` or `min` with two operands."""
    return _apply(call, "maximum" if call.name == "max" else "minimum", [call["self"], call["other"]])


@translation("gelu", "gelu_backward")
def gelu(call: Call) -> Tensor | None:
    """Translate GELU by its approximation."""
    (name,) = gelu_steps(call["approximate"])
    is_backward = call.name == "gelu_backward"
    return _apply(
        call,
        f"{name}_backward" if is_backward else name,
        [call["grad_output"], call["self"]] if is_backward else [call["self"]],
    )


@translation("pow")
def power(call: Call) -> Tensor | None:
    """Translate a power by its exponent; a square is one product."""
    number = call["exponent"]
    steps = power_steps(number)
    if not isinstance(number, int | float) or number == 1:
        return _apply(call, steps[0], [call["self"], number] if steps == ("pow",) else [call["self"]])
    lower_power: Any = "a"  # the power with an exponent one less, in its steps
    for step in power_steps(number - 1):
        lower_power = (step, lower_power, number - 1) if step == "pow" else (step, lower_power)
    lower_power = ("one", lower_power) if len(power_steps(number - 1)) > 1 else lower_power
    slope = (("mul", _G, ("conj", ("mul", number, lower_power))),)
    if steps == ("pow",):
        return _apply(call, replace(FUNCTIONS["pow"], grad=(*slope, None)), [call["self"], number])
    if len(steps) == 1:
        return _apply(call, replace(FUNCTIONS[steps[0]], grad=slope), [call["self"]])
    records = [FUNCTIONS[s] for s in steps]
    function = Function("power", 1, sum(f.flops for f in records), sum(f.transcendentals for f in records), grad=slope)
    return _apply(
        call, replace(function, result="float") if call.out.dtype.kind == "float" else function, [call["self"]]
    )


@translation("clamp", "clamp_min", "clamp_max")
def clamped(call: Call) -> Tensor | None:
    """Translate a clamp; at a bound, elements get the full gradient, where `maximum` halves it."""
    low, high = call.get("min"), call.get("max")
    if (low is None) != (high is None):
        name, (smaller, larger) = ("maximum", ("b", "a")) if high is None else ("minimum", ("a", "b"))
        slopes = ("where", ("less_equal", smaller, larger), "g", 0), ("where", ("less", larger, smaller), "g", 0)
        return _apply(call, replace(FUNCTIONS[name], grad=slopes), [call["self"], low if high is None else high])
    tensors = [v for v in (call["self"], low, high) if isinstance(v, Tensor)]
    if len(tensors) == 3:
        return _apply(call, _BETWEEN, tensors)
    in_range = ("logical_and_", ("less_equal", low, "a"), ("less_equal", "a", high))
    slope = (("where", in_range, "g", 0),) if len(tensors) == 1 else None
    return _apply(call, Function("clamp_between", len(tensors), 2, grad=slope), tensors)


#: A bound gets the gradient where it is the result, which includes a lower bound below the upper one.
_BETWEEN = Function("clamp_between", 3, 2, grad=(
    ("where", ("logical_and_", ("less_equal", "b", "a"), ("less_equal", "a", "c")), _G, 0),
    ("where", ("logical_and_", ("less", "b", "c"), ("less", "a", "b")), _G, 0),
    ("where", ("logical_not_", ("logical_and_", ("less_equal", "b", "c"), ("less_equal", "a", "c"))), _G, 0),
), order=(1, 2, 0))  # fmt: skip


# -- losses ------------------------------------------------------------------------------------------------------------

#: Reductions of torch.nn by number.
_REDUCTIONS = (None, "mean", "sum")


def _reduce_loss(call: Call, losses: Tensor) -> Tensor:
    """Reduce an elementwise loss."""
    operation = _REDUCTIONS[call["reduction"]]
    return (
        losses
        if operation is None
        else reduce(losses, f"{' '.join(f'a{i}' for i in range(losses.ndim))} -> ", operation)
    )


def _same_shape(x: Tensor, target: Tensor) -> bool:
    """Whether input and target have the same shape."""
    return x.ndim == target.ndim and all(map(x.graph.same, x.sizes, target.sizes))


def _difference(call: Call) -> Tensor | None:
    x, target = call["self"], call["target"]
    return pointwise("sub", x, target) if x.dtype == target.dtype and _same_shape(x, target) else None


@translation("mse_loss")
def mse_loss(call: Call) -> Tensor | None:
    """Translate into squared differences."""
    difference = _difference(call)
    return None if difference is None else _reduce_loss(call, pointwise("square", difference))


@translation("smooth_l1_loss", "huber_loss")
def smooth_l1(call: Call) -> Tensor | None:
    """Translate into squares of small differences and linear large ones; the gradient is bounded."""
    difference, huber = _difference(call), call.name == "huber_loss"
    bound = float(call["delta"] if huber else call["beta"])
    if difference is None or not bound:
        return None
    slope: Any = ("minimum", ("maximum", "a", -bound), bound)
    function = Function(
        f"{call.name}_{bound:g}".translate(str.maketrans(".-", "__")), 1, 7 if huber else 6,
        formula="x*x / 2 where x is small, else |x|",
        grad=(("mul", "g", slope if huber else ("div", slope, bound)),),
    )  # fmt: skip
    return _reduce_loss(call, pointwise(function, difference))


#: Binary cross entropy from a probability or a logit: its steps, and torch's gradients for both operands.
_ENTROPIES: dict[str, tuple[Sequence[str], tuple[Any, ...]]] = {
    "binary_cross_entropy": (
        ("log", "maximum", "mul", "sub", "sub", "log", "maximum", "mul", "add", "neg"),
        (
            ("one", ("mul", "g", ("div", ("sub", "a", "b"), ("maximum", ("mul", ("sub", 1, "a"), "a"), 1e-12)))),
            ("mul", "g", ("sub", ("log", ("sub", 1, "a")), ("log", "a"))),
        ),
    ),
    "binary_cross_entropy_with_logits": (
        ("sub", "mul", "minimum", "abs", "neg", "exp", "log1p", "sub", "sub"),
        (("mul_", ("sub_", ("sigmoid", "a"), "b"), "g"), ("mul", ("neg", "a"), "g")),
    ),
}


@translation(*_ENTROPIES)
def entropy(call: Call) -> Tensor | None:
    """Translate binary cross entropy, with optional positive-class and element weights."""
    x, target, pos_weight, weight = call["self"], call["target"], call.get("pos_weight"), call.get("weight")
    if not _same_shape(x, target):
        return None
    steps, slopes = _ENTROPIES[call.name]
    operands, formula = [x, target], "-(t * log(p) + (1 - t) * log(1 - p))"
    if pos_weight is not None:  # 1 + (w - 1) * t instead of 1
        weighted_target: Any = ("mul", "c", "b")
        slope = (
            "mul_",
            ("sub_", ("mul_", ("sub_", ("add", weighted_target, 1), "b"), ("sigmoid", "a")), weighted_target),
            "g",
        )
        steps, slopes, operands = (*steps, "sub", "mul", "add", "mul"), (slope, None, None), [x, target, pos_weight]
        formula = "-(w * t * log(p) + (1 - t) * log(1 - p))"
    records = [FUNCTIONS[s] for s in steps]
    flops, transcendentals = sum(f.flops for f in records), sum(f.transcendentals for f in records)
    function = Function(call.name, len(operands), flops, transcendentals, "float", formula, slopes)
    losses = pointwise(function, *operands)
    return _reduce_loss(call, losses if weight is None else pointwise("mul", losses, weight))


@translation("soft_margin_loss")
def margin(call: Call) -> Tensor | None:
    """Translate into log(1 + exp(-t * x))."""
    x, target = call["self"], call["target"]
    if not _same_shape(x, target):
        return None
    odds: Any = ("call", ("exp", ("mul", ("neg", "b"), "a")))
    slope: Any = ("mul_", ("div_", ("mul_", ("mul", "b", odds), -1), ("add_", odds, 1)), "g")
    function = Function("soft_margin_loss", 2, 2, 2, "float", "log(1 + exp(-t * x))", (slope, None))
    return _reduce_loss(call, pointwise(function, x, target))


@translation("log_sigmoid_forward")
def log_sigmoid(call: Call) -> Sequence[Tensor]:
    """Translate into the logarithm of a sigmoid, and the exponential that its gradient reads."""
    x: Tensor = call["self"]
    small = save(pointwise("exp", pointwise("neg", pointwise("abs", x))))
    return pointwise("sub", pointwise("minimum", x, 0), pointwise("log1p", small)), small


@translation("glu")
def gated(call: Call) -> Tensor:
    """Translate into one half times the sigmoid of the other half."""
    x: Tensor = call["self"]
    half = call.out.sizes[call["dim"] % x.ndim]
    a, b = split(x, [half, half], call["dim"])
    return pointwise("mul", a, pointwise("sigmoid", b))
