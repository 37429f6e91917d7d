"""Which attributes an op of each kind has in a file, and of what type each of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..algebra.polynomial import Poly
from ..dtypes import DTYPES, DType
from ..errors import CostGraphError
from ..graph.arguments import amount, positive
from ..graph.domain import Domain
from ..notation.pattern import Pattern
from ..ops.aten import ATEN
from ..ops.grouped import ROUTINGS
from ..ops.pointwise import Function
from ..ops.reduce import REDUCTIONS
from ..ops.stated import COLLECTIVES

__all__ = ["ANY", "TABLE"]

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


def _above_zero(value: object) -> bool:
    return _amount(value) and isinstance(value, Poly) and value.constant != 0


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


def _places(value: object) -> bool:
    return isinstance(value, tuple) and [type(v) for v in value] == [Domain, int, int] and value[1] != value[2]


def _output(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and _tuple(_size)(value[0]) and isinstance(value[1], DType)


def _stated_backward(value: object) -> bool:
    """Whether it says what the gradients of an opaque op cost."""
    rows = {
        "matmul": _amount, "pointwise": _amount, "transcendental": _amount, "workspace": _amount,
        "reads": _maybe(_tuple(_amount)), "writes": _maybe(_tuple(_amount)),
        "inputs": _tuple(_count(0)), "outputs": _tuple(_count(0)),
    }  # fmt: skip
    return isinstance(value, dict) and value.keys() == rows.keys() and all(rows[k](v) for k, v in value.items())


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
        and _maybe(_tuple(_maybe(_gradient)))(value.grad)
    )


def _gradient(value: object) -> bool:
    """Whether it is an expression of the gradient of a function."""
    if isinstance(value, tuple):
        return len(value) > 1 and isinstance(value[0], str) and all(map(_gradient, value[1:]))
    return _one_of("g", "y", "a", "b", "c")(value) or _is_number(value)


def _integer(value: object) -> bool:
    return isinstance(value, Poly)


def _traced_output(value: object) -> bool:
    """Whether it is a shape, a number format, strides or None, the place of an operand or None, and an offset."""
    if not isinstance(value, tuple) or len(value) != 5:
        return False
    sizes, dtype, strides, of, offset = value
    fits = _tuple(_size)(sizes) and isinstance(dtype, DType) and _amount(offset) and _maybe(_count(0))(of)
    return fits and _maybe(_tuple(_amount))(strides) and (strides is None or len(strides) == len(sizes))


def _argument(value: object) -> bool:
    """Whether it is what an op of torch can be called with: a number, a text, a tensor by its place, or a list."""
    if isinstance(value, dict):
        shapes = {"operand": _count(0), "torch": _is(str), "empty": _tuple(_integer), "dtype": _is(DType)}
        return value.keys() in ({"operand"}, {"torch"}, {"empty", "dtype"}) and all(
            shapes[k](v) for k, v in value.items()
        )
    if isinstance(value, tuple):
        return all(map(_argument, value))
    return value is None or isinstance(value, bool | int | float | str | Poly | DType)


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
_POOLING: _Row = ("max or mean", _one_of("max", "mean"))
_BODY: _Row = ("a graph", lambda v: hasattr(v, "formals"))

#: Attributes that an op of any kind may have: inside a kernel, that its result is kept for the backward pass.
ANY: dict[str, _Row] = {"save": _FLAG}

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
        "sizes?": _SIZES,
        "causal?": _FLAG,
    },
    "pool": {"pattern": _PATTERN, "extents": _EXTENTS, "operation": _POOLING, "indices?": _FLAG},
    "unpool": {"pattern": _PATTERN, "extents": _EXTENTS, "operation": _POOLING},
    "pointwise": {
        "function": _FUNCTION,
        "scalars?": ("a tuple of numbers, formulas and None", _tuple(_maybe(lambda v: _is_number(v) or _integer(v)))),
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
        "split?": _FLAG,
    },
    "pad": {"axis": _INDEX, "start": _AMOUNT, "step": _STEP, "full": _SIZE, "room": _AMOUNT, "causal?": _FLAG},
    "fill": {"sizes": _SIZES, "dtype": _DTYPE, "value": ("a number", _is_number)},
    "assign": {"inplace": _FLAG},
    "expand": {
        "sizes": _SIZES,
        "kept": ("a tuple of integers and None", _tuple(_maybe(_count(0)))),
        "domain?": ("a domain and two axes", _places),
    },
    "concat": {"axis": _INDEX},
    "gather": {"mode": ("rows or along", _one_of("rows", "along"))},
    "scatter": {"mode": ("add or set", _one_of("add", "set")), "inplace?": _FLAG, "along?": _FLAG},
    "arange": {"size": _SIZE, "dtype": _DTYPE, "context?": _FLAG, "start?": _AMOUNT},
    "cache": {"axis?": _INDEX, "window?": _SIZE},
    "initial_state": {"sizes": _SIZES, "dtype": _DTYPE},
    "append": {"axis": _INDEX, "inplace": _FLAG},
    "top_k": {"k": _SIZE, "room": _AMOUNT},
    "dispatch": {"experts": _SIZE, "capacity?": ("an amount above 0", _above_zero), "owners?": _FLAG},
    "grouped": {"routing": (f"one of {', '.join(ROUTINGS)}", _one_of(*ROUTINGS)), "chosen": _SIZE, "dtype?": _DTYPE},
    "grouped_outer": {},
    "empty": {"sizes": _SIZES, "dtype": _DTYPE},
    "opaque": {
        "matmul": _AMOUNT,
        "pointwise": _AMOUNT,
        "transcendental": _AMOUNT,
        "outputs": ("a tuple of shapes with formats", _tuple(_output)),
        "reads": _AMOUNTS,
        "writes": _AMOUNTS,
        "workspace": _AMOUNT,
        "backward?": ("the costs of a backward pass", _stated_backward),
    },
    ATEN.name: {
        "target": ("the name of an op of torch with its overload", lambda v: isinstance(v, str) and "." in v),
        "arguments": ("a tuple of arguments", _tuple(_argument)),
        "keywords": ("arguments by name", lambda v: isinstance(v, dict) and all(map(_argument, v.values()))),
        "places": ("a tuple of integers of at least -1", _tuple(_count(-1))),
        "outputs": ("a tuple of shapes with formats and layouts", _tuple(_traced_output)),
        "matmul": _AMOUNT,
        "full": _AMOUNT,
        "pointwise": _AMOUNT,
        "transcendental": _AMOUNT,
        "reads": _AMOUNTS,
        "writes": _AMOUNTS,
        "workspace": _AMOUNT,
        "pieces?": ("a tuple of numbers of axes", _tuple(_count(0))),
    },
    "transfer": {"link": ("the name of a link", _is(str))},
    "collective": {"collective": (f"one of {', '.join(COLLECTIVES)}", _one_of(*COLLECTIVES)), "ranks": _SIZE},
    "kernel": {
        "body": _BODY,
        "workspace": _AMOUNT,
        "inplace?": _FLAG,
        "changed?": ("a tuple of operand numbers", _tuple(_count(0))),
        "backward?": ("the name of a way to go back", _is(str)),
        "statistics?": ("auto, or nothing", _one_of("auto")),
    },
    "repeat": {
        "body": _BODY,
        # 0 only where 'least' says so
        "count": ("a positive size", lambda v: _size(v) or (_amount(v) and _size(v + 1))),
        "carries": _INDEX,
        "xs": _INDEX,
        "saved?": _INDEX,
        "reverse?": _FLAG,
        "until?": _FLAG,
        "least?": ("0, or nothing", lambda v: v == 0 and _count(0)(v)),
    },
    "absent": {"sizes": _SIZES, "dtype": _DTYPE, "pieces": _INDEX, "domain?": ("a domain and two axes", _places)},
    "accumulate": {"inplace": _FLAG},
    "stacked": {},
    "keep": {},
}
# of every kind: whether a kernel keeps what it makes for the backward pass, and whether it is computed again there
for _rows in TABLE.values():
    _rows |= {"save?": _FLAG, "again?": _FLAG}
