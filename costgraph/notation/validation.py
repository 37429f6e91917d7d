"""One check at the door: a public function is given what its annotations say, or refuses with the argument's name.

Annotations are the only source: mypy reads them before a program runs, and this module when it does. Functions are
checked where the public namespace hands them out, so that calls within the library pay nothing. Sizes and formulas
(`object`, `sympy.Expr`), and text that stands for something else (`str | Hardware`), are read by the function itself,
which says what it expects. An argument that is missing or not in the signature stays Python's own TypeError.
"""

from __future__ import annotations

import collections.abc as abc
import difflib
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from operator import is_
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import sympy

from ..algebra.polynomial import Poly
from ..algebra.symbols import shown
from ..errors import CostGraphError, FormatError, GraphError

__all__ = [
    "GUARDED",
    "NUMBER",
    "READ",
    "REAL",
    "Rule",
    "checked",
    "guard",
    "guarded",
    "hints_of",
    "rule",
    "Count",
    "Size",
    "Text",
    "at_least",
    "near",
    "one_of",
    "read_fields",
    "read_record",
]


# -- door --------------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")
_PACKAGE = __name__.partition(".")[0]


class Rule(NamedTuple):
    """What an argument has to be. In `Annotated[int, Rule(...)]` it says more than the type before it."""

    expected: str
    """In words, as errors say it."""
    holds: Callable[[Any], bool]
    """Whether a value is one."""
    error: type[CostGraphError] = GraphError
    """What is raised for another one."""


_ANYTHING = Rule("anything", lambda value: True)
#: What the function reads, as it does with sizes: its own words say more than the type.
READ = Rule("what can be read", _ANYTHING.holds)
#: A float where infinities and NaN have a meaning.
REAL = Rule("a number", lambda value: _is_real(value, finite=False))
NUMBER = Rule("a number", lambda value: isinstance(value, complex) or _is_real(value, finite=False))


def _is_real(value: object, *, finite: bool = True) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and (math.isfinite(float(value)) or not finite)
    except OverflowError:  # an integer that no float holds
        return False


# Python refuses to write out integers of more than 4,300 digits, and nothing here has a third of that
_MOST_BITS = 1 << 12


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value).bit_length() <= _MOST_BITS


_PLAIN: dict[object, Rule] = {
    Any: _ANYTHING,
    object: _ANYTHING,
    types.NoneType: Rule("None", lambda value: value is None),
    bool: Rule("True or False", lambda value: isinstance(value, bool)),
    int: Rule("a whole number", _is_whole),
    float: Rule("a number", _is_real),
    sympy.Expr: Rule("a formula", lambda value: isinstance(value, sympy.Expr)),
    Poly: Rule("a size", lambda value: isinstance(value, Poly)),
    str: Rule("text", lambda value: isinstance(value, str)),
    # a class is no function of tensors, though it can be called
    abc.Callable: Rule("a function", lambda value: callable(value) and not isinstance(value, type)),
}


def rule(hint: Any) -> Rule:
    """Return what an annotation asks of a value: type variables and unknown forms ask nothing."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        own = [a for a in args[1:] if isinstance(a, Rule)]
        return own[0] if own else rule(args[0])
    if origin in (typing.Union, types.UnionType):
        return _either([rule(a) for a in args])
    if origin in _PLAIN:
        return _PLAIN[origin]
    if isinstance(hint, type) and origin is None:
        return Rule(_words(hint), lambda value: isinstance(value, hint))
    return _holding(origin, args) if isinstance(origin, type) else _ANYTHING


def _words(kind: type) -> str:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _either(parts: list[Rule]) -> Rule:
    # a whole number is a number, and None is what stands there by default
    left = [
        p for p in parts if p is not _PLAIN[types.NoneType] and (p is not _PLAIN[int] or _PLAIN[float] not in parts)
    ]
    *others, last = dict.fromkeys(p.expected for p in left)
    text = f"{', '.join(others)} or {last}" if others else last
    return _ANYTHING if _ANYTHING in parts else Rule(text, lambda v: any(p.holds(v) for p in parts), left[0].error)


def _holding(origin: type, args: tuple[Any, ...]) -> Rule:
    """Return what a container asks, of itself and of what it holds."""
    if issubclass(origin, abc.Mapping):
        key, value = map(rule, args)
        return Rule(
            f"a mapping from {key.expected} to {value.expected}",
            lambda v: isinstance(v, origin) and all(key.holds(k) and value.holds(x) for k, x in v.items()),
        )
    if origin is tuple and args[-1] is not Ellipsis:
        each = list(map(rule, args))
        return Rule(
            f"({', '.join(r.expected for r in each)})",
            lambda v: (
                isinstance(v, list | tuple)
                and len(v) == len(each)
                and all(r.holds(x) for r, x in zip(each, v, strict=True))
            ),
        )
    if issubclass(origin, abc.Iterable) and args:
        inner = rule(args[0])
        if inner is _ANYTHING:
            return _ANYTHING
        # text and sets have no order that anyone meant; what can be read once alone is not looked into
        kinds: Any = (list, tuple) if origin in (tuple, abc.Sequence) else origin
        return Rule(
            f"{'a list' if kinds == (list, tuple) else _words(origin)}, each {inner.expected}",
            lambda v: (
                isinstance(v, kinds)
                and not isinstance(v, str | bytes)
                and (not isinstance(v, abc.Collection) or all(map(inner.holds, v)))
            ),
        )
    return rule(origin)


class _Plan(NamedTuple):
    """What a function asks of its arguments."""

    place: str
    positional: tuple[tuple[str, Rule], ...]
    more: tuple[str, Rule] | None
    named: Mapping[str, Rule]

    def enter(self, args: tuple[object, ...], named: Mapping[str, object]) -> None:
        """Raise GraphError for the first argument that is not what is asked for."""
        for value, (name, asked) in zip(args, self.positional, strict=False):
            if not asked.holds(value):
                self.refuse(name, value, asked)
        if self.more is not None and len(args) > len(self.positional):
            name, asked = self.more
            for i, value in enumerate(args[len(self.positional) :]):
                if not asked.holds(value):
                    self.refuse(f"{name}[{i}]", value, asked)
        for name, value in named.items():
            if name in self.named and not self.named[name].holds(value):
                self.refuse(name, value, self.named[name])

    def refuse(self, name: str, value: object, asked: Rule) -> None:
        raise asked.error(f"{self.place}: {name} is {shown(value)}, expected {asked.expected}")


def _plan(function: Callable[..., Any], *, reads: bool = True) -> _Plan:
    hints = _hints(function)
    positional, named, more = [], {}, None
    for p in inspect.signature(function).parameters.values():
        asked = (_asked if reads else rule)(hints.get(p.name, Any))
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append((p.name, asked))
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            named[p.name] = asked
        if p.kind is p.VAR_POSITIONAL:
            more = (p.name, asked)
    place = function.__qualname__.removesuffix(".__init__")
    return _Plan(place, tuple(positional), more, named)


def _asked(hint: Any) -> Rule:
    """Return what the door asks of an argument: a formula, or what else than text text may stand for, the function."""
    forms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = str in forms and not {*forms} <= {str, types.NoneType}
    return _ANYTHING if words or sympy.Expr in forms else rule(hint)


def hints_of(annotated: object) -> dict[str, Any]:
    """Return annotations as what they name; names that a module imports for them alone are found in the package.

    Fields that a class inherits are read in the module of the class that declares them.
    """
    hints: dict[str, Any] = {}
    for part in reversed(annotated.__mro__) if isinstance(annotated, type) else (annotated,):
        home = sys.modules.get(getattr(part, "__module__", None) or _PACKAGE)
        own = typing.get_type_hints(part, localns=_Names(home, sys.modules[_PACKAGE]), include_extras=True)
        stated = getattr(part, "__annotations__", {}) if part is annotated else vars(part).get("__annotations__", {})
        hints |= {name: own[name] for name in stated if name in own} if isinstance(part, type) else own
    return hints


class _Names(dict[str, Any]):
    """Names of modules, those among them that are imported when they are asked for."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        self.modules = modules

    def __missing__(self, name: str) -> Any:
        for module in self.modules:
            with suppress(AttributeError):
                return getattr(module, name)
        raise KeyError(name)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    owner = function.__globals__.get(function.__qualname__.removesuffix(".__init__"))
    # a record has fields of another one too, which are annotated where that one stands
    generated = getattr(owner, "__dataclass_params__", None)
    return hints_of(owner if generated is not None and generated.init else function)


def _own(value: object) -> Any:
    """Return an integer of NumPy as Python's: theirs wraps around."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, int | sympy.Integer) else value


def _all_own(value: Any) -> Any:
    """Return integers of NumPy as Python's, those of a list too."""
    if type(value) not in (list, tuple):
        return _own(value)
    own = list(map(_own, value))
    return value if all(map(is_, own, value)) else type(value)(own)


def checked(function: F, *, reads: bool = True) -> F:
    """Let a function refuse arguments that are not what its annotations say.

    GraphError when it is called: the text names function, argument, value, and what was expected. `reads` says whether
    it looks at formulas, and names of things, by itself; a record that only keeps them does not.
    """
    plan: _Plan | None = None

    @wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if plan is None:
            plan = _plan(function, reads=reads)  # at the first call: most programs call few of them
        args, kwargs = tuple(map(_all_own, args)), {name: _all_own(value) for name, value in kwargs.items()}
        plan.enter(args, kwargs)
        return function(*args, **kwargs)

    return cast(F, entered)


def guard(
    module: types.ModuleType,
    function: Any,
    inside: Collection[str] = (),
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Any:
    """Return what a public module hands out: a function checks its arguments, all else is what it was.

    Functions of `inside` are not checked: for what the library itself calls for each op it would cost more than it is
    worth. `around` says what each function becomes before its arguments are checked.
    """
    if not inspect.isfunction(function):
        return function
    if function not in _DOORS:
        name = function.__name__
        door = around(function) if name in inside else checked(around(function))
        door.__module__ = module.__name__  # where pickle finds this one
        _DOORS[function] = _DOORS[door] = door
    return _DOORS[function]


#: What functions have become; a door stays what it is.
_DOORS: dict[Callable[..., Any], Callable[..., Any]] = {}


#: Classes whose methods check their arguments.
GUARDED: list[type] = []


def guarded(*inside: str) -> Callable[[type[K]], type[K]]:
    """Let all public methods of a class check their arguments, but those named `inside`.

    It stands above `@dataclass`, whose `__init__` is checked too.
    """

    def close(kind: type[K]) -> type[K]:
        fields = getattr(kind, "__dataclass_fields__", {})
        keeps = fields and not hasattr(kind, "__post_init__")
        for key, member in list(vars(kind).items()):
            public = key == "__init__" or (not key.startswith("_") and key not in fields)
            if public and inspect.isfunction(member) and key not in inside:
                setattr(kind, key, checked(member, reads=key != "__init__" or not keeps))
        GUARDED.append(kind)
        return kind

    return close


guarded()(CostGraphError)  # the errors stand below this module


# -- records -----------------------------------------------------------------------------------------------------------
# What a file holds becomes a record: annotations say what each field has to be, as they do of arguments.
#
# A record is a dataclass. Its fields are what `door.rule` knows, records, and lists and mappings of these; a `Rule` in
# `Annotated` says more than the type. Keys that no field has, and fields without a default that have no key, are
# refused.

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
