"""What the fields of op records may hold: types that say in words, and as a test, what a file has to have there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from ..algebra.polynomial import Poly
from ..errors import CostGraphError
from ..notation.door import Rule
from .arguments import amount, positive

__all__ = [
    "Amount", "Amounts", "Count", "Extents", "Flag", "Formulas", "Index", "Size", "Sizes", "all_of", "is_amount",
    "is_count", "is_size", "one_of", "optional",
]  # fmt: skip


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


def _is_extents(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(is_size, value.values()))


Size = Annotated[Poly, Rule("a positive size", is_size)]
Sizes = Annotated[tuple[Poly, ...], Rule("a tuple of positive sizes", all_of(is_size))]
Amount = Annotated[Poly, Rule("an amount that is not negative", is_amount)]
Amounts = Annotated[
    tuple[Poly, ...] | None, Rule("None or a tuple of amounts", lambda v: v is None or all_of(is_amount)(v))
]
Formulas = Annotated[tuple[Poly, ...], Rule("a tuple of formulas", all_of(lambda v: isinstance(v, Poly)))]
Extents = Annotated[Mapping[str, Poly], Rule("positive sizes by axis", _is_extents)]
Index = Annotated[int, Rule("an integer of at least 0", is_count)]
Count = Annotated[int, Rule("an integer of at least 1", lambda v: is_count(v, 1))]
Flag = Annotated[bool, Rule("True, or nothing", lambda v: v is True)]
