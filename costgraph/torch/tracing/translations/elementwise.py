"""Translations of elementwise ops: a library function, or a record with FLOPs and gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....algebra.polynomial import Poly
from ....ir.graph import Tensor
from ....ops.elementwise import pointwise
from ....ops.functions import FUNCTIONS, LOSSES, Function, names_in
from ....ops.layout import split
from ....ops.loops import save
from ....ops.reduce import reduce
from ....ops.updates import ADD_PRODUCT, ADD_QUOTIENT, ADD_SCALED, ADD_SCALED_PRODUCT, ADD_SCALED_QUOTIENT
from ..call import Call
from ..rules.elementwise import function_of, gelu_steps, power_steps
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


def _parametric_gradient(call: Call) -> tuple[Any] | None:
    """Return the gradient of a function with parameters; None if one is not a number."""
    gradient = _PARAMETRIC_GRADIENTS.get(call.name)
    numbers = [*call.arguments.values()][1:]
    return gradient(call) if gradient is not None and all(isinstance(v, int | float) for v in numbers) else None


def _gradient(call: Call, gradients: tuple[Any, ...], arity: int) -> tuple[Any, ...] | None:
    """Return the gradient per tensor operand; None if unknown for this many operands."""
    if call.name in _PARAMETRIC_GRADIENTS:
        return _parametric_gradient(call)
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


def _function_of(call: Call) -> Function:
    """Return the library's function if it takes the call's operands, or else aten's."""
    function = function_of(call.name)
    tensors = [v for v in call.arguments.values() if isinstance(v, Tensor)]
    is_declared = function.name in FUNCTIONS
    if is_declared and function.arity in (len(tensors), len(_operands(call))):
        return function
    grad = _gradient(call, () if is_declared else function.grad or (), len(tensors))
    return replace(function, name=call.name.strip("_"), arity=len(tensors), result="same", grad=grad)


# other ops are tagged as pointwise by torch
@translation(
    "pointwise", "_prelu_kernel", "hardswish", "hardswish_backward", "hardsigmoid_backward", "mish_backward",
)  # fmt: skip
def elementwise(call: Call) -> Tensor | None:
    """Translate into the library's function, or into the kernel's steps."""
    if len(call.results) != 1 or any(isinstance(v, tuple) for v in call.arguments.values()):
        return None
    function = _function_of(call)
    tensors = [v for v in call.arguments.values() if isinstance(v, Tensor)]
    operands = tensors if function.arity == len(tensors) else _operands(call)
    if not tensors or len(operands) != function.arity:
        return None
    parameters = nondefault_parameters(call, operands)
    if parameters and function.name in FUNCTIONS:
        numbers = re.sub(r"\W", "_", "_".join(f"{k}_{v}" for k, v in parameters.items()))
        function = replace(function, name=f"{function.name}_{numbers}", grad=_parametric_gradient(call))
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
    name = f"{call.name}_{bound:g}".translate(str.maketrans(".-", "__"))
    grad = (("mul", "g", slope if huber else ("div", slope, bound)),)
    function = replace(LOSSES[call.name], name=name, grad=grad)
    return _reduce_loss(call, pointwise(function, difference))


@translation("binary_cross_entropy", "binary_cross_entropy_with_logits")
def entropy(call: Call) -> Tensor | None:
    """Translate binary cross entropy, with optional positive-class and element weights."""
    x, target, pos_weight, weight = call["self"], call["target"], call.get("pos_weight"), call.get("weight")
    if not _same_shape(x, target):
        return None
    if pos_weight is None:
        losses = pointwise(LOSSES[call.name], x, target)
    else:
        weighted = replace(LOSSES["weighted_cross_entropy_with_logits"], name=call.name)
        losses = pointwise(weighted, x, target, pos_weight)
    return _reduce_loss(call, losses if weight is None else pointwise("mul", losses, weight))


@translation("soft_margin_loss")
def margin(call: Call) -> Tensor | None:
    """Translate into log(1 + exp(-t * x))."""
    x, target = call["self"], call["target"]
    return _reduce_loss(call, pointwise(LOSSES[call.name], x, target)) if _same_shape(x, target) else None


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
