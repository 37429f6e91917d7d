"""Which attributes an op of each kind has in a file, and of what type each of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arguments import amount, positive
from .domain import Domain
from .dtypes import DTYPES, DType
from .errors import CostGraphError
from .ops.pointwise import Function
from .ops.reduce import REDUCTIONS
from .ops.stated import COLLECTIVES
from .pattern import Pattern
from .polynomial import Poly

__all__ = ["TABLE"]

_Fits = Callable[[Any], bool]


def _passes(check: Callable[[str, object], Poly], value: object) -> bool:
    if not isinstance(value, Poly):
        return False
    try:
        check("", value)
    except CostGraphError:
        return False
    return True


def _size(value: object) -> bool:
    return _passes(positive, value)


def _amount(value: object) -> bool:
    return _passes(amount, value)


def _count(least: int) -> _Fits:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _tuple(fits: _Fits) -> _Fits:
    return lambda v: isinstance(v, tuple) and all(map(fits, v))


def _maybe(fits: _Fits) -> _Fits:
    return lambda v: v is None or fits(v)


def _one_of(*words: str) -> _Fits:
    return lambda v: isinstance(v, str) and v in words


def _is(kind: type) -> _Fits:
    return lambda v: isinstance(v, kind)


def _true(value: object) -> bool:
    return value is True


def _extents(value: object) -> bool:
    return isinstance(value, dict) and all(map(_size, value.values()))


def _restriction(value: object) -> bool:
    return isinstance(value, tuple) and [type(v) for v in value] == [Domain, str, str] and value[1] != value[2]


def _output(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _tuple(_size)(value[0]) and isinstance(value[1], DType)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _probability(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1


def _function(value: object) -> bool:
    return (
        isinstance(value, Function)
        and isinstance(value.name, str)
        and isinstance(value.formula, str)
        and _count(1)(value.arity)
        and _count(0)(value.flops)
        and _count(0)(value.transcendentals)
        and _one_of("same", "float", "bool")(value.result)
    )


_Row = tuple[str, _Fits]
_SIZE: _Row = ("a positive size", _size)
_SIZES: _Row = ("a tuple of positive sizes", _tuple(_size))
_AMOUNT: _Row = ("an amount that is not negative", _amount)
_AMOUNTS: _Row = ("None or a tuple of amounts", _maybe(_tuple(_amount)))
_PATTERN: _Row = ("a pattern", _is(Pattern))
_EXTENTS: _Row = ("positive sizes by axis", _extents)
_DTYPE: _Row = ("a number format", _is(DType))
_FLAG: _Row = ("True, or nothing", _true)
_FUNCTION: _Row = ("an elementwise function", _function)
_INDEX: _Row = ("an integer of at least 0", _count(0))
_STEP: _Row = ("an integer of at least 1", _count(1))
_BODY: _Row = ("a graph", lambda v: hasattr(v, "formals"))

#: The attributes of each kind, what each has to be in words and as a test; '?' marks what may be missing. Kinds of
#: one's own check theirs when they infer.
TABLE: dict[str, dict[str, _Row]] = {
    "einsum": {
        "pattern": _PATTERN,
        "extents": _EXTENTS,
        "domain": ("None, or a domain and two axes", _maybe(_restriction)),
        "dtype": _DTYPE,
        "orders?": _AMOUNT,
        "workspace?": _AMOUNT,
        "rooms?": ("a tuple of formulas", _tuple(lambda v: isinstance(v, Poly))),
    },
    "pool": {"pattern": _PATTERN, "extents": _EXTENTS, "operation": ("max or mean", _one_of("max", "mean"))},
    "pointwise": {
        "function": _FUNCTION,
        "scalars?": ("a tuple of numbers and None", _tuple(_maybe(_is_number))),
        "numbers?": ("bool, int or float", _one_of("bool", "int", "float")),
        "inplace?": _FLAG,
        "dtype?": _DTYPE,
        "masked?": ("a domain", _is(Domain)),
    },
    "dropout": {
        "function": _FUNCTION,
        "mask": ("the name of a number format", _one_of(*DTYPES)),
        "p": ("a number between 0 and 1", _probability),
    },
    "reduce": {"pattern": _PATTERN, "operation": (f"one of {', '.join(REDUCTIONS)}", _one_of(*REDUCTIONS))},
    "rearrange": {
        "pattern?": _PATTERN,
        "split": _SIZES,
        "order": ("a tuple of integers", _tuple(_count(0))),
        "merged": _SIZES,
        "copy?": _FLAG,
    },
    "slice": {
        "axis": _INDEX,
        "start": _AMOUNT,
        "size": _SIZE,
        "step": _STEP,
        "room?": _AMOUNT,
    },
    "expand": {"sizes": _SIZES, "kept": ("a tuple of integers and None", _tuple(_maybe(_count(0))))},
    "concat": {"axis": _INDEX},
    "gather": {"mode": ("rows or along", _one_of("rows", "along"))},
    "scatter": {"mode": ("add or set", _one_of("add", "set")), "inplace?": _FLAG},
    "arange": {"size": _SIZE, "dtype": _DTYPE},
    "empty": {"sizes": _SIZES, "dtype": _DTYPE},
    "opaque": {
        "matmul": _AMOUNT,
        "pointwise": _AMOUNT,
        "transcendental": _AMOUNT,
        "outputs": ("a tuple of shapes with formats", _tuple(_output)),
        "reads": _AMOUNTS,
        "writes": _AMOUNTS,
        "workspace": _AMOUNT,
    },
    "transfer": {"link": ("the name of a link", _is(str))},
    "collective": {"collective": (f"one of {', '.join(COLLECTIVES)}", _one_of(*COLLECTIVES)), "ranks": _SIZE},
    "kernel": {"body": _BODY, "workspace": _AMOUNT},
    "repeat": {"body": _BODY, "count": _SIZE, "carries": _STEP, "xs": _INDEX},
}
