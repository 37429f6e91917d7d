"""Validation of arguments and file records by their type annotations.

The public namespace hands out checked functions, so calls inside the library cost nothing extra. Sizes and formulas
(`object`, `sympy.Expr`), and text with another meaning (`str | Hardware`), are validated by the function itself, with a
more specific message. Missing or unexpected arguments raise Python's TypeError.
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
import warnings
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
    "with_earlier_keywords",
    "Count",
    "Size",
    "Text",
    "at_least",
    "near",
    "one_of",
    "read_fields",
    "read_record",
]


# -- arguments ---------------------------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")
#: Earlier spellings of keyword arguments, accepted with a DeprecationWarning until the next release.
RENAMED_KEYWORDS = {
    "composed": "eager_ops",
    "hold": "keep_gathered",
    "reduce_each": "reduce_every_microbatch",
    "virtual": "virtual_stages",
}
_PACKAGE = __name__.partition(".")[0]


class Rule(NamedTuple):
    """Requirement on an argument. In `Annotated[int, Rule(...)]` it refines the type."""

    expected: str
    """Description for error messages."""
    holds: Callable[[Any], bool]
    """Whether a value meets it."""
    error: type[CostGraphError] = GraphError
    """Error class for other values."""


_ANYTHING = Rule("anything", lambda value: True)
#: Validated by the function itself, with a more specific message, as for sizes.
READ = Rule("what can be read", _ANYTHING.holds)
#: A float that may be infinite or NaN.
REAL = Rule("a number", lambda value: _is_real(value, finite=False))
NUMBER = Rule("a number", lambda value: isinstance(value, complex) or _is_real(value, finite=False))


def _is_real(value: object, *, finite: bool = True) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and (math.isfinite(float(value)) or not finite)
    except OverflowError:  # an integer beyond the float range
        return False


# Python limits int to str to 4,300 digits; valid integers are far smaller
_MOST_BITS = 1 << 12


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value).bit_length() <= _MOST_BITS


_PLAIN: dict[object, Rule] = {
    Any: _ANYTHING,
    object: _ANYTHING,
    types.NoneType: Rule("None", lambda value: value is None),
    bool: Rule("True or False", lambda value: isinstance(value, bool)),
    int: Rule("an integer", _is_whole),
    float: Rule("a number", _is_real),
    sympy.Expr: Rule("a formula", lambda value: isinstance(value, sympy.Expr)),
    Poly: Rule("a size", lambda value: isinstance(value, Poly)),
    str: Rule("text", lambda value: isinstance(value, str)),
    # classes are callable, but are not functions of tensors
    abc.Callable: Rule("a function", lambda value: callable(value) and not isinstance(value, type)),
}


def rule(hint: Any) -> Rule:
    """Return the rule for an annotation; type variables and unknown forms accept anything."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        own_rules = [a for a in args[1:] if isinstance(a, Rule)]
        return own_rules[0] if own_rules else rule(args[0])
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


def _either(alternatives: list[Rule]) -> Rule:
    # int is implied by float, and None is merely the default
    shown_rules = [
        p
        for p in alternatives
        if p is not _PLAIN[types.NoneType] and (p is not _PLAIN[int] or _PLAIN[float] not in alternatives)
    ]
    *others, last = dict.fromkeys(p.expected for p in shown_rules)
    text = f"{', '.join(others)} or {last}" if others else last
    return (
        _ANYTHING
        if _ANYTHING in alternatives
        else Rule(text, lambda v: any(p.holds(v) for p in alternatives), shown_rules[0].error)
    )


def _holding(origin: type, args: tuple[Any, ...]) -> Rule:
    """Return the rule for a container and its elements."""
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
        # strings and sets do not count as ordered sequences; iterators are not consumed
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
    """Rules for the arguments of a function."""

    place: str
    positional: tuple[tuple[str, Rule], ...]
    more: tuple[str, Rule] | None
    named: Mapping[str, Rule]

    def enter(self, args: tuple[object, ...], named: Mapping[str, object]) -> None:
        """Raise GraphError for the first invalid argument."""
        for value, (name, annotation) in zip(args, self.positional, strict=False):
            if not annotation.holds(value):
                self.refuse(name, value, annotation)
        if self.more is not None and len(args) > len(self.positional):
            name, annotation = self.more
            for i, value in enumerate(args[len(self.positional) :]):
                if not annotation.holds(value):
                    self.refuse(f"{name}[{i}]", value, annotation)
        for name, value in named.items():
            if name in self.named and not self.named[name].holds(value):
                self.refuse(name, value, self.named[name])

    def refuse(self, name: str, value: object, annotation: Rule) -> None:
        raise annotation.error(f"{self.place}: {name} is {shown(value)}, expected {annotation.expected}")


def _plan(function: Callable[..., Any], *, reads: bool = True) -> _Plan:
    hints = _hints(function)
    positional, named, more = [], {}, None
    for p in inspect.signature(function).parameters.values():
        parameter_rule = (_asked if reads else rule)(hints.get(p.name, Any))
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append((p.name, parameter_rule))
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            named[p.name] = parameter_rule
        if p.kind is p.VAR_POSITIONAL:
            more = (p.name, parameter_rule)
    place = function.__qualname__.removesuffix(".__init__")
    return _Plan(place, tuple(positional), more, named)


def _asked(hint: Any) -> Rule:
    """Return the rule for a checked argument; formulas and text with another meaning are left to the function."""
    forms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = str in forms and not {*forms} <= {str, types.NoneType}
    return _ANYTHING if words or sympy.Expr in forms else rule(hint)


def hints_of(annotated: object) -> dict[str, Any]:
    """Return resolved annotations; names imported only for type checking are looked up in the package.

    Fields that a class inherits are read in the module of the class that declares them.
    """
    hints: dict[str, Any] = {}
    for member in reversed(annotated.__mro__) if isinstance(annotated, type) else (annotated,):
        home = sys.modules.get(getattr(member, "__module__", None) or _PACKAGE)
        resolved = typing.get_type_hints(member, localns=_Names(home, sys.modules[_PACKAGE]), include_extras=True)
        own_annotations = (
            getattr(member, "__annotations__", {}) if member is annotated else vars(member).get("__annotations__", {})
        )
        hints |= (
            {name: resolved[name] for name in own_annotations if name in resolved}
            if isinstance(member, type)
            else resolved
        )
    return hints


class _Names(dict[str, Any]):
    """Module namespaces, including lazily imported names."""

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
    # a dataclass may inherit fields annotated in another module
    generated = getattr(owner, "__dataclass_params__", None)
    return hints_of(owner if generated is not None and generated.init else function)


def _own(value: object) -> Any:
    """Convert a NumPy integer to int, since NumPy's overflow silently."""
    return int(value) if isinstance(value, Integral) and not isinstance(value, int | sympy.Integer) else value


def _all_own(value: Any) -> Any:
    """Convert NumPy integers to int, including those in a list."""
    if type(value) not in (list, tuple):
        return _own(value)
    converted = list(map(_own, value))
    return value if all(map(is_, converted, value)) else type(value)(converted)


def checked(function: F, *, reads: bool = True) -> F:
    """Validate the arguments of a function by its annotations.

    Calls raise GraphError with the function, argument, value and expectation. `reads` states whether the function
    itself validates formulas and names of things; a record that only stores them does not.
    """
    plan: _Plan | None = None

    @wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if plan is None:
            plan = _plan(function, reads=reads)  # on the first call, since most programs use few functions
        args, kwargs = tuple(map(_all_own, args)), {name: _all_own(value) for name, value in kwargs.items()}
        plan.enter(args, kwargs)
        return function(*args, **kwargs)

    return cast(F, entered)


def with_earlier_keywords(function: F) -> F:
    """Let a function accept the earlier spellings of its keyword arguments, with a DeprecationWarning."""
    code = inspect.unwrap(function).__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    renamed = {old: new for old, new in RENAMED_KEYWORDS.items() if new in parameters and old not in parameters}
    if not renamed:
        return function

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        for old in kwargs.keys() & renamed.keys():
            new, place = renamed[old], function.__name__
            if new in kwargs:
                raise GraphError(f"{place}: {old} and {new} are two names of one argument; pass only {new}")
            warnings.warn(f"{place}: {old}= is now {new}=", DeprecationWarning, stacklevel=2)
            kwargs[new] = kwargs.pop(old)
        return function(*args, **kwargs)

    return cast(F, called)


def guard(
    module: types.ModuleType,
    function: Any,
    inside: Collection[str] = (),
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Any:
    """Return the public version of a module member: functions validate their arguments, other members are unchanged.

    Functions named in `inside` are not validated, because the library calls them for each op. `around` wraps each
    function before validation.
    """
    if not inspect.isfunction(function):
        return function
    if function not in _GUARDED_FUNCTIONS:
        name = function.__name__
        public = with_earlier_keywords(around(function) if name in inside else checked(around(function)))
        public.__module__ = module.__name__  # so that pickle finds it
        _GUARDED_FUNCTIONS[function] = _GUARDED_FUNCTIONS[public] = public
    return _GUARDED_FUNCTIONS[function]


#: Checked version of each function; a checked function maps to itself.
_GUARDED_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


#: Classes whose methods validate their arguments.
GUARDED: list[type] = []


def guarded(*inside: str) -> Callable[[type[K]], type[K]]:
    """Validate the arguments of all public methods of a class, except those named in `inside`.

    Apply it above `@dataclass` to validate the generated `__init__` too.
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


guarded()(CostGraphError)  # errors cannot import this module


# -- records -----------------------------------------------------------------------------------------------------------
# File contents become dataclasses. Fields may be of the types that `rule` supports, records, or lists and mappings of
# them; a `Rule` in `Annotated` refines a type. Unknown keys, and missing fields without a default, raise an error.

T = TypeVar("T")


def at_least(minimum: float, kind: type[int] | type[float] = int) -> Rule:
    """Return the rule for a number with a lower bound."""
    base = rule(kind)
    return Rule(f"{base.expected} of at least {minimum}", lambda value: base.holds(value) and value >= minimum)


def one_of(names: Collection[str]) -> Rule:
    """Return the rule for a choice among names."""
    return Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


Count = Annotated[int, at_least(0)]
Size = Annotated[int, at_least(1)]
#: Text that is not empty.
Text = Annotated[str, Rule("a text", lambda value: isinstance(value, str) and bool(value.strip()))]


def near(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests similar names, or an empty string."""
    names = difflib.get_close_matches(name.lower(), list(known), n=3)
    return f"did you mean {' or '.join(names)}? " if names else ""


def read_record(place: str, record: object, kind: type[T], error: type[CostGraphError] = FormatError) -> T:
    """Create a dataclass from file contents.

    Errors of class `error` name the place, key, value and expectation.
    """
    return kind(**read_fields(place, record, *_fields(cast(Any, kind)), error))


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the annotations of a dataclass, and the names of fields with a default."""
    hints, dataclass_fields = typing.get_type_hints(kind, include_extras=True), fields(kind)
    optional = [f.name for f in dataclass_fields if f.default is not MISSING or f.default_factory is not MISSING]
    return {f.name: hints[f.name] for f in dataclass_fields}, optional


def read_fields(
    place: str,
    values: object,
    hints: Mapping[str, Any],
    optional: Collection[str] = (),
    error: type[CostGraphError] = FormatError,
) -> dict[str, Any]:
    """Validate named values by annotations; `read_record` does the same for a dataclass."""
    names = ", ".join(hints)
    if not isinstance(values, Mapping):
        raise error(f"{place}: {shown(values)}, expected a record with {names}")
    for key in values:
        if key not in hints:
            raise error(f"{place}: key {shown(key)} is unknown, {near(key, hints)}expected {names}")
    for key in hints:
        if key not in values and key not in optional:
            raise error(f"{place}: no {key!r}, expected {names}")
    return {key: _value(place, key, value, hints[key], error) for key, value in values.items()}


def _value(place: str, key: str, value: object, hint: Any, error: type[CostGraphError]) -> object:
    value_rule, key_place = rule(hint), f"{place}: {key}"
    plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    origin, args = typing.get_origin(plain), typing.get_args(plain)
    if origin in (typing.Union, types.UnionType) and type(None) in args:
        (plain,) = (a for a in args if a is not type(None))
        return None if value is None else _value(place, key, value, plain, error)
    fits, converted = True, value
    if isinstance(plain, type) and is_dataclass(plain):
        converted = read_record(key_place, value, plain, error)
    elif origin is abc.Mapping and (fits := isinstance(value, Mapping)):
        for name in value:
            if not rule(args[0]).holds(name):
                raise error(f"{key_place}: key {shown(name)}, expected {rule(args[0]).expected}")
        converted = {name: _value(key_place, name, item, args[1], error) for name, item in value.items()}
    elif origin is abc.Sequence and (fits := isinstance(value, list)):
        converted = tuple(_value(place, f"{key}[{i}]", item, args[0], error) for i, item in enumerate(value))
    if not fits or not value_rule.holds(converted):
        raise error(f"{key_place} {shown(value)}, expected {value_rule.expected}")
    return converted
