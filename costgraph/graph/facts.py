"""What the fields of op records may hold: types that say in words, and as a test, what a file has to have there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_args

from ..algebra.polynomial import Poly
from ..errors import CostGraphError, GraphError, ShapeError
from ..notation.door import Rule, hints_of
from .arguments import amount, positive

__all__ = [
    "Amount", "Amounts", "Count", "Extents", "Flag", "Index", "Length", "Limit", "MemoryFormat", "Places", "Room",
    "Rooms", "Shape", "Size", "Sizes", "Start", "all_of", "hints", "is_amount", "is_count", "is_size", "limits_of",
    "need", "one_of", "optional",
]  # fmt: skip


class Limit(NamedTuple):
    """What the formulas in a field have to be once sizes are bound; in an annotation, the last one counts."""

    least: int
    """Least value."""
    whole: bool = True
    """Whether they have to be whole."""
    words: str = ""
    """What stands before the name of the op where they are not; by default what the field is called."""


_known: dict[type, dict[str, Limit]] = {}


def hints(record: type) -> dict[str, Any]:
    """Return the annotations of a record as what they name.

    GraphError if one names what its module has for type checkers alone.
    """
    try:
        return hints_of(record)
    except NameError as error:
        raise GraphError(
            f"op kind {record.__name__}: {error} in its annotations, expected names that its module has when it runs"
        ) from None


def limits_of(record: type) -> dict[str, Limit]:
    """Return the limits of fields, by name; of fields that state none, or several, nothing is asked."""
    if record not in _known:
        limits = {name: _limit(hint) for name, hint in hints(record).items()}
        _known[record] = {name: limit for name, limit in limits.items() if limit is not None}
    return _known[record]


def _limit(hint: Any) -> Limit | None:
    """Return the limit that an annotation states: its own, or the one of what it holds."""
    own = [a for a in getattr(hint, "__metadata__", ()) if isinstance(a, Limit)]
    if own:
        return own[-1]
    inner = {_limit(a) for a in get_args(hint)} - {None}
    return inner.pop() if len(inner) == 1 else None


def _passes(check: Callable[[str, object], Poly], value: object) -> bool:
    if not isinstance(value, Poly):
        return False
    try:
        check("", value)
    except CostGraphError:
        return False
    return True


def is_size(value: object) -> bool:
    """Whether it is a size: not known to be less than 1, or broken."""
    return _passes(positive, value)


def is_amount(value: object) -> bool:
    """Whether it is an amount: not known to be negative."""
    return _passes(amount, value)


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is an integer from `least` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def all_of(fits: Callable[[Any], bool]) -> Callable[[object], bool]:
    """Return a test of tuples."""
    return lambda v: isinstance(v, tuple) and all(map(fits, v))


def one_of(*words: str) -> Rule:
    """Return what a field asks that holds one of some words."""
    text = " or ".join(words) if len(words) == 2 else f"one of {', '.join(words)}"
    return Rule(text, lambda v: isinstance(v, str) and v in words)


def optional(expected: str, fits: Callable[[Any], bool]) -> Rule:
    """Return what a field asks that may be None."""
    return Rule(expected, lambda v: v is None or fits(v))


def need(holds: bool, what: str) -> None:
    """Raise ShapeError where a field says something else than the operands."""
    if not holds:
        raise ShapeError(f"{what}: expected what agrees with the operands")


def _is_extents(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_size, value.values()))


#: Of a result, which is looked at itself when sizes are bound.
Length = Annotated[Poly, Rule("a positive size", is_size)]
Shape = Annotated[tuple[Poly, ...], Rule("a tuple of positive sizes", all_of(is_size))]

Size = Annotated[Length, Limit(1)]
Sizes = Annotated[Shape, Limit(1)]
Extents = Annotated[Mapping[str, Poly], Rule("positive sizes by axis", _is_extents), Limit(1)]
Amount = Annotated[Poly, Rule("an amount that is not negative", is_amount), Limit(0, whole=False)]
Amounts = Annotated[
    tuple[Poly, ...] | None,
    Rule("None or a tuple of amounts", lambda v: v is None or all_of(is_amount)(v)),
    Limit(0, whole=False),
]
#: Where something begins on an axis, and how much of the axis is left behind it.
Start = Annotated[Amount, Limit(0)]
Room = Annotated[Amount, Limit(0, words="what is left beyond")]
Rooms = Annotated[
    tuple[Poly, ...],
    Rule("a tuple of formulas", all_of(lambda v: isinstance(v, Poly))),
    Limit(0, words="what is left beyond"),
]
Index = Annotated[int, Rule("an integer of at least 0", is_count)]
Count = Annotated[int, Rule("an integer of at least 1", lambda v: is_count(v, 1))]
Places = Annotated[tuple[int, ...], Rule("a tuple of integers of at least 0", all_of(is_count))]
Flag = Annotated[bool, Rule("True, or nothing", lambda v: v is True)]
MemoryFormat = Annotated[
    str, Rule("contiguous, grad, operand, bshd, or nothing", ("", "contiguous", "grad", "operand", "bshd").__contains__)
]
