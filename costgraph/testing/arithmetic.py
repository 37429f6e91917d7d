"""Scalar arithmetic that counts FLOPs, and exact evaluation of formulas with `fractions.Fraction`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from math import ceil, floor, inf, log, prod
from typing import Any

import numpy as np
import sympy

from ..errors import UnsupportedError
from ..ops.registry import adding
from ..ops.rules import Flops

__all__ = ["FUNCTIONS", "Number", "erf", "function", "tally", "value"]


def tally(matmul: Any = 0, full: Any = 0, pointwise: Any = 0, transcendental: Any = 0) -> Any:
    """Return a FLOP counter: `Flops` with numbers in place of formulas."""
    return Flops(matmul, full, pointwise, transcendental)


class Number:
    """A number whose arithmetic is counted."""

    __slots__ = ("tally", "value")

    def __init__(self, value: Any, tally: Any) -> None:
        self.value = value
        self.tally = tally

    def once(self, value: Any) -> Number:
        """Count one operation and wrap its value."""
        self.tally.pointwise += 1
        return Number(value, self.tally)

    def through(self, name: str) -> Number:
        """Apply a transcendental function and count it."""
        self.tally.transcendental += 1
        return Number(_TRANSCENDENTAL[name](np.float64(self.value)), self.tally)

    def __add__(self, other: object) -> Number:
        return self.once(self.value + _value_of(other))

    def __sub__(self, other: object) -> Number:
        return self.once(self.value - _value_of(other))

    def __rsub__(self, other: object) -> Number:
        return self.once(_value_of(other) - self.value)

    def __mul__(self, other: object) -> Number:
        return self.once(self.value * _value_of(other))

    def __truediv__(self, other: object) -> Number:
        return self.once(np.float64(self.value) / _value_of(other))

    def __rtruediv__(self, other: object) -> Number:
        return self.once(_value_of(other) / np.float64(self.value))

    def __neg__(self) -> Number:
        return self.once(-self.value)

    def __radd__(self, other: object) -> Number:
        return self + other

    def __rmul__(self, other: object) -> Number:
        return self * other


def _value_of(x: object) -> Any:
    return x.value if isinstance(x, Number) else x


def erf(x: Any) -> Any:
    """Apply the error function elementwise."""
    from math import erf as one

    return np.vectorize(one, otypes=[float])(x)


_TRANSCENDENTAL: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "erf": lambda x: float(erf(x)),
}


def _larger(a: Any, b: Any) -> Number:
    return _first_number(a, b).once(np.maximum(_value_of(a), _value_of(b)))


def _smaller(a: Any, b: Any) -> Number:
    return _first_number(a, b).once(np.minimum(_value_of(a), _value_of(b)))


def _select(condition: Any, a: Any, b: Any) -> Number:
    return _first_number(condition, a, b).once(_value_of(a) if _value_of(condition) else _value_of(b))


def _first_number(*operands: Any) -> Number:
    return next(x for x in operands if isinstance(x, Number))


def _softplus(x: Number) -> Number:
    return (1 + x.through("exp")).through("log")


def _logistic(x: Number) -> Number:
    return 1 / (1 + (-x).through("exp"))


_HALF = 0.5**0.5
_GELU: float = (2 / np.pi) ** 0.5
_BELL: float = (2 * np.pi) ** -0.5

#: Reference implementation of each elementwise function on scalars. Constants that are not part of the graph
#: (slopes, limits) have their usual values.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "copy": lambda x: x,
    "cast": lambda x: x,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": _larger,
    "minimum": _smaller,
    "pow": lambda a, b: (b * Number(_value_of(a), _first_number(a, b).tally).through("log")).through("exp"),
    "eq": lambda a, b: _first_number(a, b).once(_value_of(a) == _value_of(b)),
    "ne": lambda a, b: _first_number(a, b).once(_value_of(a) != _value_of(b)),
    "less": lambda a, b: _first_number(a, b).once(_value_of(a) < _value_of(b)),
    "logical_and": lambda a, b: _first_number(a, b).once(bool(_value_of(a)) and bool(_value_of(b))),
    "where": _select,
    "masked_fill": lambda x, mask: _select(mask, 0.0, x),
    "fma": lambda a, b, c: a * b + c,
    "lerp": lambda a, b, t: a + t * (b - a),
    "neg": lambda x: -x,
    "abs": lambda x: x.once(abs(x.value)),
    "sign": lambda x: x.once(np.sign(x.value)),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1 / x,
    "clamp": lambda x: _smaller(_larger(x, 0), 1),
    "round": lambda x: x.once(np.round(x.value)),
    "floor": lambda x: x.once(np.floor(x.value)),
    "logical_not": lambda x: x.once(not x.value),
    "relu": lambda x: _larger(x, 0),
    "relu6": lambda x: _smaller(_larger(x, 0), 6),
    "relu2": lambda x: (lambda r: r * r)(_larger(x, 0)),
    "leaky_relu": lambda x: _larger(x, 0.01 * x),
    "sigmoid": lambda x: 1 / (1 + (-x).through("exp")),
    "silu": lambda x: x / (1 + (-x).through("exp")),
    "gelu": lambda x: 0.5 * x * (1 + (x * _HALF).through("erf")),
    "gelu_tanh": lambda x: 0.5 * x * (1 + (_GELU * (x + 0.044715 * x * x * x)).through("tanh")),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).through("exp")),
    "softplus": _softplus,
    "mish": lambda x: x * _softplus(x).through("tanh"),
    "elu": lambda x: _select(x.once(x.value > 0), x, 1.0 * (x.through("exp") - 1)),
    "softcap": lambda x: 30.0 * (x / 30.0).through("tanh"),
    "hardsigmoid": lambda x: _smaller(_larger(x + 3, 0), 6) / 6,
    "hardswish": lambda x: x * _smaller(_larger(x + 3, 0), 6) / 6,
}


def _silu_backward(g: Number, x: Number) -> Number:
    s = _logistic(x)
    return g * s * (1 + x * (1 - s))


def _quick_gelu_backward(g: Number, x: Number) -> Number:
    s = 1 / (1 + (-1.702 * x).through("exp"))
    return g * s * (1 + 1.702 * x * (1 - s))


def _gelu_backward(g: Number, x: Number) -> Number:
    cdf = 0.5 * (1 + (x * _HALF).through("erf"))
    return g * (cdf + x * ((x * x * -0.5).through("exp") * _BELL))


def _gelu_tanh_backward(g: Number, x: Number) -> Number:
    square = x * x
    t = (_GELU * (x + 0.044715 * (square * x))).through("tanh")
    gate, slope = 0.5 * (1 + t), _GELU * (1 + 3 * 0.044715 * square)
    return g * (gate + 0.5 * x * (1 - t * t) * slope)


def _softplus_backward(g: Number, x: Number) -> Number:
    z = x.through("exp")
    return g * z / (z + 1)


def _mish_backward(g: Number, x: Number) -> Number:
    s, t = _logistic(x), _softplus(x).through("tanh")
    return g * (t + x * s * (1 - t * t))


def _hardswish_backward(g: Number, x: Number) -> Number:
    middle = g * (x / 3 + 0.5)
    return _select(x.once(x.value < -3), 0.0, _select(x.once(x.value <= 3), middle, g))


def _tanh_backward(g: Number, y: Number) -> Number:
    return g * (1 - y * y)


FUNCTIONS |= {
    "less_equal": lambda a, b: _first_number(a, b).once(_value_of(a) <= _value_of(b)),
    "masked_scale": lambda a, b, c: a * b * c,
    "cubed": lambda x: x * x * x,
    "threshold_backward": lambda g, y: _select(y.once(y.value > 0), g, 0.0),
    "relu6_backward": lambda g, x: _select(x.once(x.value <= 0), 0.0, _select(x.once(x.value >= 6), 0.0, g)),
    "relu2_backward": lambda g, x: g * 2 * _larger(x, 0),
    "leaky_relu_backward": lambda g, x: _select(x.once(x.value > 0), g, 0.01 * g),
    "tanh_backward": _tanh_backward,
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "silu_backward": _silu_backward,
    "gelu_backward": _gelu_backward,
    "gelu_tanh_backward": _gelu_tanh_backward,
    "quick_gelu_backward": _quick_gelu_backward,
    "softplus_backward": _softplus_backward,
    "mish_backward": _mish_backward,
    "elu_backward": lambda g, x: _select(x.once(x.value > 0), g, g * (1.0 * x.through("exp"))),
    "softcap_backward": lambda g, y: _tanh_backward(g, y / 30.0),
    "hardsigmoid_backward": lambda g, x: _select(x.once(x.value <= -3), 0.0, _select(x.once(x.value >= 3), 0.0, g / 6)),
    "hardswish_backward": _hardswish_backward,
}
FUNCTIONS |= {name: partial(Number.through, name=name) for name in _TRANSCENDENTAL}


def function(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the scalar reference implementation of a custom elementwise function, so that its FLOPs can be checked.

    Parameters
    ----------
    name : str
        Name of the `Function`.

    Returns
    -------
    callable
        Decorator of a function of `Number`: `+ - * /` and `x.through("exp")` are counted.

    Raises
    ------
    GraphError
        If the name already has an implementation.
    """
    return adding(FUNCTIONS, "reference semantics", name, what="function")


# -- formulas ----------------------------------------------------------------------------------------------------------

_FOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "Add": sum,
    "Mul": prod,
    "Max": max,
    "Min": min,
    "floor": lambda x: floor(x[0]),
    "ceiling": lambda x: ceil(x[0]),
    "log": lambda x: log(x[0]),
}


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    """Return a power, exact if the result is rational."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        degree = exponent.denominator
        roots = [round(n ** (1 / degree)) if degree > 1 else n for n in (base.numerator, base.denominator)]
        if [r**degree for r in roots] == [base.numerator, base.denominator]:
            return Fraction(*roots) ** exponent.numerator
    return math.pow(base, exponent)


def value(expr: sympy.Expr | int | float, point: Mapping[str, int]) -> Fraction | float:
    """Evaluate a formula exactly, without sympy's arithmetic.

    Parameters
    ----------
    expr : sympy.Expr or number
        Sums, products, powers, Max, Min, floor, ceiling and log.
    point : mapping of str to int
        A size for each symbol.

    Returns
    -------
    fractions.Fraction or float
        The value; sympy's infinity becomes `float("inf")`.

    Raises
    ------
    UnsupportedError
        If the formula contains anything else.
    """
    if isinstance(expr, int | float):
        return Fraction(expr)
    if expr.is_Symbol:
        return Fraction(point[expr.name])
    if expr.is_Rational:
        return Fraction(int(expr.p), int(expr.q))
    if expr.is_Float:  # bytes of 6-bit elements, such as 5.25
        return Fraction(float(expr))
    if expr is sympy.oo:
        return inf
    args: list[Any] = [value(a, point) for a in expr.args]
    kind = type(expr).__name__
    if kind == "Pow":
        return _power(*args)
    if kind not in _FOLDS:
        raise UnsupportedError(f"value of {expr}: {kind}, expected one of {', '.join(_FOLDS)} or a power")
    result = _FOLDS[kind](args)
    return result if isinstance(result, float) else Fraction(result)
