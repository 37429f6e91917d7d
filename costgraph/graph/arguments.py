"""What public functions ask of their arguments before they look inside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy

from ..algebra.dominance import lower
from ..algebra.generators import cached
from ..algebra.polynomial import Poly, generator, poly
from ..algebra.symbols import kind_of, shown
from ..errors import CostGraphError, GraphError, ShapeError
from .strides import Sizes, numel
from .tensor import Tensor

__all__ = [
    "amount", "named", "need_call", "need_choice", "need_flag", "need_list", "need_name", "need_tensor", "positive",
    "sizes", "sizes_of",
]  # fmt: skip


_LONGEST_NAME = 500  # scopes included
_MOST_AXES = 1000  # a list without an end is no shape


def need_tensor(place: str, *values: object) -> None:
    """Raise GraphError if a value is no tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            raise GraphError(f"{place}: got {kind_of(value)}, expected a tensor")


def need_choice(place: str, value: object, choices: Collection[str]) -> None:
    """Raise GraphError if a value is none of some words."""
    if not isinstance(value, str) or value not in choices:
        raise GraphError(f"{place} {shown(value)}, expected one of {', '.join(choices)}")


def need_flag(place: str, **flags: object) -> None:
    """Raise GraphError if a switch is something else than True or False: a tensor there is a mistake."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise GraphError(f"{place}: {name} is {kind_of(value)}, expected True or False")


def need_call(place: str, value: object) -> None:
    """Raise GraphError if a value is no function."""
    if not callable(value) or isinstance(value, type):
        raise GraphError(f"{place}: got {kind_of(value)}, expected a function")


def need_list(place: str, value: object) -> Sequence[Any]:
    """Return a list or tuple, or raise GraphError: text and sets have no order that anyone meant."""
    if not isinstance(value, list | tuple):
        raise GraphError(f"{place}: got {kind_of(value)}, expected a list")
    return value


def need_name(place: str, value: object) -> None:
    """Raise GraphError if a value cannot name an op: it stands in tables, files and error messages."""
    text = value if isinstance(value, str) else ""
    if not 0 < len(text) <= _LONGEST_NAME or not text.isprintable() or " " in text:
        raise GraphError(f"{place}: name {shown(value)}, expected text without spaces")


def named(name: object, default: str) -> Any:
    """Return the name, or the default where it is empty."""
    return default if isinstance(name, str) and not name else name


def _text(size: Poly) -> str:
    return shown(size.constant) if isinstance(size.constant, int) else size.brief()


def positive(place: str, value: object) -> Poly:
    """Return a size as a polynomial, known to be a positive integer where it is a number."""
    try:
        out = poly(value)
    except CostGraphError as error:
        raise type(error)(f"{place}: {error}") from None
    if _is_no_size(out):
        raise ShapeError(f"{place}: {_text(out)}, expected a positive integer")
    return out


@cached(1 << 12)  # asked of every axis of every tensor, and they are the same few
def _is_no_size(size: Poly) -> bool:
    if size.constant is not None:
        return not isinstance(size.constant, int) or size.constant < 1
    most = lower(-size)
    return (most is not None and most >= 0) or not _may_be_whole(size)  # -B is below 1 for all sizes


def _may_be_whole(p: Poly) -> bool:
    """Whether a formula can be a whole number for some sizes: one without a logarithm that nothing rounds."""
    return p.constant is not None or (
        bool(p.names()) and not any(_has_log(generator(k)) for k in p.generators() if k[0] == "~")
    )


def _has_log(expr: sympy.Expr) -> bool:
    return isinstance(expr, sympy.log) or (
        not isinstance(expr, sympy.floor | sympy.ceiling) and any(map(_has_log, expr.args))
    )


def amount(place: str, value: object) -> Poly:
    """Return stated FLOPs, bytes or elements as a polynomial, not negative where it is a number."""
    try:
        out = poly(value)
    except CostGraphError as error:
        raise type(error)(f"{place}: {error}") from None
    most = lower(-out) if out.constant is None else -out.constant
    if most is not None and most > 0:
        raise ShapeError(f"{place}: {_text(out)}, expected an amount that is not negative")
    return out


def sizes_of(shape: Sequence[object], place: str) -> Sizes:
    """Return a shape as polynomials, each known to be positive where it is a number."""
    unordered = type(shape) is not tuple and isinstance(shape, str | bytes | set | frozenset | Mapping | Tensor)
    try:
        given = None if unordered else [size for size, _ in zip(shape, range(_MOST_AXES + 1), strict=False)]
    except TypeError:  # NumPy's scalars look like lists too
        given = None
    if given is None or len(given) > _MOST_AXES:
        raise GraphError(f"{place}: shape {shown(shape)}, expected a tuple of sizes such as (B, S, D)")
    sizes = [positive(f"{place}: axis {i}", size) for i, size in enumerate(given)]
    try:
        numel(sizes)
    except ShapeError as error:  # each is a size, but nothing has so many elements
        raise ShapeError(f"{place}: {error}") from None
    return tuple(sizes)


def sizes(place: str, given: Mapping[str, object]) -> dict[str, Poly]:
    """Return the sizes that a caller gave by name of the axis."""
    return {name: positive(f"{place}: size of {shown(name)}", value) for name, value in given.items()}
