"""What a file holds becomes a record: annotations say what each field has to be, as they do of arguments.

A record is a dataclass. Its fields are what `door.rule` knows, records, and lists and mappings of these; a `Rule` in
`Annotated` says more than the type. Keys that no field has, and fields without a default that have no key, are refused.
"""

from __future__ import annotations

import collections.abc as abc
import difflib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, cast

from ..algebra.symbols import shown
from ..errors import CostGraphError, FormatError
from .door import Rule, rule

__all__ = ["Count", "Size", "Text", "at_least", "near", "one_of", "read_fields", "read_record"]

T = TypeVar("T")


def at_least(least: float, kind: type[int] | type[float] = int) -> Rule:
    """Return the rule of a number that is not below another one."""
    asked = rule(kind)
    return Rule(f"{asked.expected} of at least {least}", lambda value: asked.holds(value) and value >= least)


def one_of(names: Collection[str]) -> Rule:
    """Return the rule of a text that is one of some names."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


Count = Annotated[int, at_least(0)]
Size = Annotated[int, at_least(1)]
#: A text with something in it.
Text = Annotated[str, Rule("a text", lambda value: isinstance(value, str) and bool(value.strip()))]


def near(name: str, known: Iterable[str]) -> str:
    """Return a question that proposes the names like this one, or nothing."""
    names = difflib.get_close_matches(name.lower(), list(known), n=3)
    return f"did you mean {' or '.join(names)}? " if names else ""


def read_record(place: str, given: object, kind: type[T], error: type[CostGraphError] = FormatError) -> T:
    """Read a dataclass from what a file holds.

    An error is of the kind given: its text names the place, the key, the value, and what was expected.
    """
    return kind(**read_fields(place, given, *_fields(cast(Any, kind)), error))


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the annotations of a dataclass, and which of its fields have a default."""
    hints, own = typing.get_type_hints(kind, include_extras=True), fields(kind)
    optional = [f.name for f in own if f.default is not MISSING or f.default_factory is not MISSING]
    return {f.name: hints[f.name] for f in own}, optional


def read_fields(
    place: str,
    given: object,
    hints: Mapping[str, Any],
    optional: Collection[str] = (),
    error: type[CostGraphError] = FormatError,
) -> dict[str, Any]:
    """Read the fields of a record by name, each as its annotation says; `read_record` is the same of a dataclass."""
    names = ", ".join(hints)
    if not isinstance(given, Mapping):
        raise error(f"{place}: {shown(given)}, expected a record with {names}")
    for key in given:
        if key not in hints:
            raise error(f"{place}: key {shown(key)} is unknown, {near(key, hints)}expected {names}")
    for key in hints:
        if key not in given and key not in optional:
            raise error(f"{place}: no {key!r}, expected {names}")
    return {key: _value(place, key, value, hints[key], error) for key, value in given.items()}


def _value(place: str, key: str, value: object, hint: Any, error: type[CostGraphError]) -> object:
    asked, inside = rule(hint), f"{place}: {key}"
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    origin, args = typing.get_origin(plain), typing.get_args(plain)
    if origin in (typing.Union, types.UnionType) and type(None) in args:
        (plain,) = (a for a in args if a is not type(None))
        return None if value is None else _value(place, key, value, plain, error)
    fits, found = True, value
    if isinstance(plain, type) and is_dataclass(plain):
        found = read_record(inside, value, plain, error)
    elif origin is abc.Mapping and (fits := isinstance(value, Mapping)):
        for name in value:
            if not rule(args[0]).holds(name):
                raise error(f"{inside}: key {shown(name)}, expected {rule(args[0]).expected}")
        found = {name: _value(inside, name, part, args[1], error) for name, part in value.items()}
    elif origin is abc.Sequence and (fits := isinstance(value, list)):
        found = tuple(_value(place, f"{key}[{i}]", part, args[0], error) for i, part in enumerate(value))
    if not fits or not asked.holds(found):
        raise error(f"{inside} {shown(value)}, expected {asked.expected}")
    return found
