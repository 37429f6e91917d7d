"""Validity conditions of formulas: assumptions on sizes, and sizes bound when a formula was derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from inspect import getattr_static
from itertools import product
from math import prod
from operator import attrgetter, itemgetter
from types import FunctionType, MappingProxyType, MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import sympy

from ..errors import BindingError, PatternError, ShapeError
from .dominance import NOTHING_KNOWN, Relation, Relations, lower
from .polynomial import Poly, Rational, as_poly, generator, poly
from .solving import solve
from .symbols import shown, symbol

__all__ = [
    "Requirement",
    "Condition",
    "Conditions",
    "LoopCounts",
    "Validity",
    "conditioned",
    "held_by",
    "plain",
]


# -- conditions --------------------------------------------------------------------------------------------------------

# Maximum number of trip counts to test before a formula is pickled, since its graph is not.
_MOST_LOOKED_AT = 16


class Requirement(NamedTuple):
    """Requirement on an amount: at least `least`, optionally strict, equal or whole."""

    amount: Poly
    least: int = 0
    whole: bool = False
    equal: bool = False
    strict: bool = False

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds at a point."""
        try:
            number = self.amount.bind({name: as_poly(size) for name, size in sizes.items()}).number
        except ShapeError:  # division by zero, or the root of a negative number
            return False
        if isinstance(number, int | Fraction):
            return bool(self.passed(number.numerator, number.denominator))
        return not self.whole and not self.equal and number is not None and bool(number >= self.least)

    def passed(self, above: Any, below: Any) -> Any:
        """Whether the fraction above/below, with positive `below`, meets the requirement; elementwise for arrays.

        This is exact in float64 if both parts are below 2**53: the distance of a non-integer quotient from the nearest
        integer then exceeds the rounding error.
        """
        bound = self.least * below
        if self.equal:
            return above == bound
        large = above > bound if self.strict else above >= bound
        if not self.whole or (isinstance(below, int) and below == 1):
            return large
        if np.result_type(above, below).kind != "f":
            return large & (above % below == 0)
        quotient = above / below
        return large & (np.floor(quotient) == quotient)


class Condition(NamedTuple):
    """Requirement on a formula wherever sizes are bound: a size, an index on an axis, or a declared amount."""

    formula: Poly
    """Formula that has to meet it."""
    place: str
    """Description for error messages."""
    least: int
    """Minimum value."""
    whole: bool
    """Whether it has to be an integer."""
    names: frozenset[str]
    """Symbols in it."""

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if values for all its symbols violate it."""
        if not self.names <= values.keys():
            return
        try:
            number = self.formula.bind(values).number
            if number is None:
                return  # an equality assumption ties an open symbol to others
            met, holds = _value(poly(number)), self._holds(number)
        except ShapeError as error:  # division by zero, or the root of a negative number
            met, holds = f"undefined ({error})", False
        if holds:
            return
        used = ", ".join(f"{n}={_value(values[n])}" for n in sorted(self.names)) or "any sizes"
        kind = "integer" if self.whole else "amount"
        expected = (
            f"a positive {kind}"
            if self.least
            else "a nonnegative integer"
            if self.whole
            else "an amount that is not negative"
        )
        verb = "has size" if self.whole else "is"
        raise BindingError(f"{used}: {self.place} {verb} {self.formula.brief()} = {met}, expected {expected}")

    def _holds(self, number: Rational | sympy.Expr) -> bool:
        return (isinstance(number, int) or not self.whole) and bool(number >= self.least)


@dataclass(frozen=True, eq=False)
class Conditions:
    """Requirements of a graph on sizes."""

    relations: tuple[Relation, ...]
    """assumptions"""
    declared: tuple[Condition, ...]
    """requirements of declarations that sizes may violate"""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of constrained symbols."""
        return frozenset().union(*(r.difference.names() for r in self.relations), *(c.names for c in self.declared))

    @cached_property
    def known(self) -> Relations:
        """Facts about sizes wherever the conditions hold."""
        return _known(self.relations, self.declared)

    def settle(self, values: dict[str, Poly]) -> None:
        """Add sizes implied by equalities, or raise BindingError if bound sizes violate a condition."""
        self._apply_equalities(values)
        for relation in self.relations:
            relation.check(values)
        for condition in self.declared:
            condition.check(values)

    def _apply_equalities(self, values: dict[str, Poly]) -> None:
        for relation in self.relations:
            if not relation.equal:
                continue
            solution = solve(relation.difference.bind(values), relation.subject)
            if solution is None:
                continue
            name, value = solution
            if not value.names() and not value.is_size:
                raise BindingError(
                    f"assumption {relation.text!r} makes {name}={_value(value)}, expected a positive integer"
                )
            for k, v in values.items():
                values[k] = v.bind({name: value})
            values[name] = value


def _known(relations: Iterable[Relation], declared: Iterable[Condition]) -> Relations:
    """Return assumptions and lower bounds from declarations as known relations."""
    assumptions = tuple(relations)
    # only bounds on a single size or atom: D/H >= 1 would replace assumptions about its symbols
    single = [c for c in declared if len(c.formula.generators()) == 1]
    bounds = tuple(Relation(f"{c.place} >= {c.least}", c.formula - c.least, equal=False) for c in single)
    for candidates in ((*assumptions, *bounds), assumptions):
        try:
            return Relations(candidates)
        except (PatternError, ShapeError):  # unsatisfiable declarations: nothing to compare
            continue
    return NOTHING_KNOWN


def _value(p: Poly) -> str:
    return shown(p.constant) if isinstance(p.constant, int) else str(p)


class LoopCounts:
    """Trip counts for which a closed form holds; smaller ones are tested on demand.

    Parameters
    ----------
    sure : mapping of str to int
        Counts by symbol from which the form certainly holds.
    holds : callable, optional
        Tests whether it holds for smaller counts; without it, only `known` counts are accepted.
    known : mapping, optional
        Results of earlier tests.
    """

    def __init__(
        self,
        sure: Mapping[str, int],
        holds: Callable[[dict[str, int]], bool] | None = None,
        results: Mapping[frozenset[tuple[str, int]], bool] = MappingProxyType({}),
    ) -> None:
        self.sure, self._holds = dict(sure), holds
        self._known = {**results, frozenset(): True}

    def hold(self, counts: Mapping[str, int]) -> bool:
        """Whether the form holds for these counts, with all others large."""
        small = frozenset((name, count) for name, count in counts.items() if count < self.sure[name])
        if small not in self._known:
            self._known[small] = self._holds is not None and self._holds(dict(small))
        return self._known[small]

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if it does not hold for the counts among bound sizes."""
        bound = {name: values[name].constant for name in self.sure if name in values}
        counts = {name: int(count) for name, count in bound.items() if count is not None}
        if self.hold(counts):
            return
        # a symbol for which a larger count suffices, with the smallest such count
        name, smallest = next(
            ((n, k) for n in counts for k in range(counts[n], self.sure[n] + 1) if self.hold({**counts, n: k})),
            next(iter(self.sure.items())),
        )
        raise BindingError(
            f"{name}={_value(values[name])}: the formula holds only from {name}={smallest}; derive it "
            f"from the graph with {name} bound"
        )

    def __deepcopy__(self, memo: object) -> LoopCounts:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self._holds is not None and prod(self.sure.values()) <= _MOST_LOOKED_AT:
            for counts in product(*(range(1, limit) for limit in self.sure.values())):
                self.hold(dict(zip(self.sure, counts, strict=True)))
        return LoopCounts, (self.sure, None, self._known)


@dataclass(frozen=True)
class Validity:
    """Conditions under which a formula of one graph holds, with the sizes bound when it was derived."""

    conditions: Conditions
    """requirements of the graph"""
    values: tuple[tuple[str, Poly | None], ...] = ()
    """values of its symbols: numbers, formulas in other symbols, None for invalid sizes"""
    counts: LoopCounts | None = None
    """trip counts, for closed forms over loops"""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of constrained open symbols."""
        mine = dict(self.values)
        constrained = self.conditions.names | (self.counts.sure.keys() if self.counts else frozenset())
        bound_names = [v.names() for v in mine.values() if v is not None]
        return (constrained - mine.keys()).union(*bound_names)

    def bound(self, change: Callable[[Poly], Poly | None], names: Iterable[str]) -> Validity:
        """Return the validity after changing the named symbols; BindingError if that violates a condition."""
        values: dict[str, Poly | None] = {k: v if v is None else change(v) for k, v in self.values}
        values |= {n: change(poly(symbol(n))) for n in self.names & set(names) if n not in values}
        out = replace(self, values=tuple(sorted(values.items(), key=itemgetter(0))))
        out.settled()
        return out

    def at(self, values: Mapping[str, Poly]) -> Validity:
        """Return the validity after replacing symbols; BindingError if that violates a condition."""
        return self.bound(lambda p: p.bind(values), values)

    def settled(self) -> dict[str, Poly]:
        """Return the known sizes, including those implied by equalities; BindingError as in `at`."""
        known: dict[str, Poly] = {}
        for name, p in self.values:
            if p is None or p.names():
                continue
            if not p.is_size:
                raise BindingError(f"{name}={_value(p)}: expected a positive integer")
            known[name] = p
        self.conditions.settle(known)
        if self.counts is not None:
            self.counts.check(known)
        return known

    @cached_property
    def known(self) -> Relations:
        """Facts about the open symbols."""
        if not self.values:
            return self.conditions.known
        bound, unknown = {k: v for k, v in self.values if v is not None}, {k for k, v in self.values if v is None}
        relations = [r.at(bound) for r in self.conditions.relations if unknown.isdisjoint(r.difference.names())]
        declared = [c for c in self.conditions.declared if unknown.isdisjoint(c.names)]
        declared = [c._replace(formula=c.formula.bind(bound)) for c in declared]
        return _known(
            (r for r in relations if r.difference.constant is None),
            (c for c in declared if c.formula.constant is None),
        )

    def counted(self) -> dict[str, Poly]:
        """Return the trip counts of the closed form, in terms of open symbols."""
        bound = {k: v for k, v in self.values if v is not None}
        sure = self.counts.sure if self.counts else {}
        return {
            name: bound.get(name, poly(symbol(name))) for name in sure if dict(self.values).get(name, 1) is not None
        }

    def tests(self) -> list[Requirement]:
        """Return the requirements on open symbols, except trip counts."""
        settled, unknown = self.settled(), {k for k, v in self.values if v is None}
        bound = {k: v for k, v in self.values if v is not None and k not in settled}
        requirements = [Requirement(c.formula, c.least, whole=c.whole) for c in self.conditions.declared]
        requirements += [Requirement(r.difference, equal=r.equal, strict=r.strict) for r in self.conditions.relations]
        # values of symbols, and sizes implied by equalities, are sizes as well
        requirements += [Requirement(poly(symbol(k)), 1, whole=True) for k in (*settled, *bound)]
        with_settled = [a._replace(amount=a.amount.bind(settled)) for a in requirements]
        with_bound = [
            a._replace(amount=a.amount.bind(bound)) for a in with_settled if unknown.isdisjoint(a.amount.names())
        ]
        return [a for a in dict.fromkeys(with_bound) if a.amount.constant is None and not _always(a)]


def _always(requirement: Requirement) -> bool:
    is_integral = all(
        isinstance(c, int) and all(e > 0 and (k[0] != "~" or generator(k).is_integer) for k, e in m)
        for m, c in requirement.amount.terms.items()
    )
    if requirement.equal or (requirement.whole and not is_integral):
        return False
    bound: Rational | None = lower(requirement.amount)
    return bound is not None and (bound > requirement.least or (bound == requirement.least and not requirement.strict))


# -- conditioned expressions -------------------------------------------------------------------------------------------
# Results with open sizes are sympy expressions. If a graph has conditions on sizes, the result is an instance of a
# subclass of its own sympy class with one extra attribute, `held`. It compares and prints like the plain expression,
# and its operators and methods propagate the conditions. sympy's own functions receive the plain expression (`sympify`
# returns it), so sympy's caches never hold conditions.


def plain(value: Any) -> Any:
    """Return an expression without its conditions, other values unchanged."""
    return value._plain if isinstance(value, _Conditioned) else value


def held_by(*values: object) -> tuple[Validity, ...]:
    """Return the conditions of several values together; empty for plain expressions and other values."""
    return tuple(dict.fromkeys(v for value in values if isinstance(value, _Conditioned) for v in value.held))


def conditioned(value: Any, validities: Iterable[Validity]) -> Any:
    """Return a formula with conditions attached; unchanged if there are none, or if it has no symbols."""
    validities = tuple(v for v in validities if v.names or v.values)
    if not validities or not isinstance(value, sympy.Expr) or not value.free_symbols:
        return plain(value)
    kind: Any = type(plain(value))
    out: Any = object.__new__(_class_of(kind))
    out._plain, out.held = plain(value), validities
    return out


@cache
def _class_of(base: Any) -> Any:
    """Return the subclass of an expression class that carries conditions.

    Every attribute that `_Conditioned` does not define is delegated to the plain expression, since sympy evaluates
    expressions at numbers internally, which is not a binding.
    """
    # printers and term order depend on the class name
    space: dict[str, Any] = {"__slots__": ("_plain", "held"), "__module__": base.__module__, "__doc__": base.__doc__}
    for name in dir(base):
        has_override = name.startswith("__") or hasattr(_Conditioned, name)
        if not has_override and isinstance(getattr_static(base, name), FunctionType | property | MemberDescriptorType):
            space[name] = property(attrgetter(f"_plain.{name}"))
    return type(base)(base.__name__, (_Conditioned, base), space)


class _Conditioned:
    """Base class for expressions that carry conditions."""

    __slots__ = ()
    _plain: sympy.Expr
    held: tuple[Validity, ...]
    _op_priority = 10.01  # takes precedence over numbers and plain expressions
    __sympy__ = None  # so that sympify() calls _sympy_

    def _sympy_(self) -> sympy.Expr:
        return self._plain

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == plain(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._plain)

    @property
    def func(self) -> Any:
        """Constructor of the plain expression."""
        return self._plain.func

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return conditioned, (self._plain, self.held)


def _carrying(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("subs"):  # sizes for evalf
            self.subs(kwargs["subs"])
        out = getattr(self._plain, name)(*map(plain, args), **kwargs)
        return conditioned(out, held_by(self, *args))

    return method


def _replacing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = _each(lambda value: value, args)  # iterators such as zip() become lists
        bare = _each(plain, args)

        def changed(p: Poly) -> Poly | None:
            try:
                return p if p.constant is not None else poly(getattr(p.expr, name)(*bare, **kwargs))
            except ShapeError:  # floats and foreign symbols: nothing is known
                return None

        substituted: list[Any] = []
        _each(substituted.append, args)  # substituted formulas have conditions too
        validities = [v.bound(changed, v.names) for v in self.held]
        return conditioned(getattr(self._plain, name)(*bare, **kwargs), [*validities, *held_by(*substituted)])

    return method


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the elements of nested lists, tuples, sets and mappings."""
    if isinstance(value, Mapping):
        return {k: _each(change, v) for k, v in value.items()}
    if isinstance(value, Iterator):
        value = list(value)
    return type(value)(_each(change, v) for v in value) if type(value) in (list, tuple, set) else change(value)


_OPERATORS = [
    f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for side in ("", "r")
]
_METHODS = (
    "__neg__", "__pos__", "__abs__", "apart", "cancel", "collect", "diff", "doit", "evalf", "expand", "factor",
    "integrate", "n", "normal", "nsimplify", "powsimp", "radsimp", "ratsimp", "rewrite", "simplify",
    "together",
)  # fmt: skip
for _name in (*_OPERATORS, *_METHODS):
    setattr(_Conditioned, _name, _carrying(_name))
for _name in ("subs", "xreplace", "replace"):
    setattr(_Conditioned, _name, _replacing(_name))
