"""What a formula holds for: what its graph asks of sizes, and what was bound when it was derived."""

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
    "Asked",
    "Condition",
    "Conditions",
    "Counts",
    "Validity",
    "conditioned",
    "held_by",
    "plain",
]


# -- conditions --------------------------------------------------------------------------------------------------------

# Counts of loops that are looked at before a formula goes to another process, where its graph is not.
_MOST_LOOKED_AT = 16


class Asked(NamedTuple):
    """What a number has to be: at least `least`, more than that, exactly that, or whole as well."""

    amount: Poly
    least: int = 0
    whole: bool = False
    equal: bool = False
    strict: bool = False

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it is so at a point."""
        try:
            number = self.amount.bind({name: as_poly(size) for name, size in sizes.items()}).number
        except ShapeError:  # a division by zero, the root of a negative number
            return False
        if isinstance(number, int | Fraction):
            return bool(self.passed(number.numerator, number.denominator))
        return not self.whole and not self.equal and number is not None and bool(number >= self.least)

    def passed(self, above: Any, below: Any) -> Any:
        """Whether a fraction, of which the lower part is positive, is such a number; of arrays element by element.

        In float64 that is exact where both parts are below 2**53: what is not whole is then a larger part of the
        quotient away from it than the quotient is rounded by.
        """
        least = self.least * below
        if self.equal:
            return above == least
        large = above > least if self.strict else above >= least
        if not self.whole or (isinstance(below, int) and below == 1):
            return large
        if np.result_type(above, below).kind != "f":
            return large & (above % below == 0)
        quotient = above / below
        return large & (np.floor(quotient) == quotient)


class Condition(NamedTuple):
    """What a formula of a graph has to be wherever its sizes are bound: a size, a place on an axis, a stated amount."""

    formula: Poly
    """The formula."""
    place: str
    """What has it, in words."""
    least: int
    """Its least value."""
    whole: bool
    """Whether it has to be a whole number."""
    names: frozenset[str]
    """Symbols in it."""

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError if values for all of its symbols make it anything else."""
        if not self.names <= values.keys():
            return
        try:
            number = self.formula.bind(values).number
            if number is None:
                return  # an assumed equality ties an open symbol to others
            met, holds = _value(poly(number)), self._holds(number)
        except ShapeError as error:  # a division by zero, the root of a negative number
            met, holds = f"undefined ({error})", False
        if holds:
            return
        used = ", ".join(f"{n}={_value(values[n])}" for n in sorted(self.names)) or "any sizes"
        kind = "whole number" if self.whole else "amount"
        expected = f"a positive {kind}" if self.least else f"a{'' if self.whole else 'n'} {kind} that is not negative"
        has = "has size" if self.whole else "is"
        raise BindingError(f"{used}: {self.place} {has} {self.formula.brief()} = {met}, expected {expected}")

    def _holds(self, number: Rational | sympy.Expr) -> bool:
        return (isinstance(number, int) or not self.whole) and bool(number >= self.least)


@dataclass(frozen=True, eq=False)
class Conditions:
    """What a graph asks of sizes."""

    relations: tuple[Relation, ...]
    """what is assumed"""
    declared: tuple[Condition, ...]
    """what it is declared with, as far as sizes may break it"""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the symbols that something is asked of."""
        return frozenset().union(*(r.difference.names() for r in self.relations), *(c.names for c in self.declared))

    @cached_property
    def known(self) -> Relations:
        """What may be taken for granted of sizes wherever the conditions hold."""
        return _known(self.relations, self.declared)

    def settle(self, values: dict[str, Poly]) -> None:
        """Add what follows from bound sizes by equalities, or raise BindingError if the sizes break a condition."""
        self._apply_equalities(values)
        for relation in self.relations:
            relation.check(values)
        for condition in self.declared:
            condition.check(values)

    def _apply_equalities(self, values: dict[str, Poly]) -> None:
        for relation in self.relations:
            if not relation.equal:
                continue
            found = solve(relation.difference.bind(values), relation.subject)
            if found is None:
                continue
            name, value = found
            if not value.names() and not value.is_size:
                raise BindingError(
                    f"assumption {relation.text!r} makes {name}={_value(value)}, expected a positive integer"
                )
            for k, v in values.items():
                values[k] = v.bind({name: value})
            values[name] = value


def _known(relations: Iterable[Relation], declared: Iterable[Condition]) -> Relations:
    """Return assumptions, and that what is declared is large enough, as what a comparison puts in."""
    stated = tuple(relations)
    # bounds of one size or atom; several symbols, as in D/H, would take the place of what is assumed of them
    single = [c for c in declared if len(c.formula.generators()) == 1]
    asked = tuple(Relation(f"{c.place} >= {c.least}", c.formula - c.least, equal=False) for c in single)
    for found in ((*stated, *asked), stated):
        try:
            return Relations(found)
        except (PatternError, ShapeError):  # no size satisfies what is declared: nothing is compared there
            continue
    return NOTHING_KNOWN


def _value(p: Poly) -> str:
    return shown(p.constant) if isinstance(p.constant, int) else str(p)


class Counts:
    """For which counts of loops a closed form holds; smaller ones are looked at when they are met.

    Parameters
    ----------
    sure : mapping of str to int
        Counts, by symbol, from which on it holds for certain.
    holds : callable, optional
        Whether it holds where some counts are below these; without it, only where that is known.
    known : mapping, optional
        For which of them it does.
    """

    def __init__(
        self,
        sure: Mapping[str, int],
        holds: Callable[[dict[str, int]], bool] | None = None,
        known: Mapping[frozenset[tuple[str, int]], bool] = MappingProxyType({}),
    ) -> None:
        self.sure, self._holds = dict(sure), holds
        self._known = {**known, frozenset(): True}

    def hold(self, counts: Mapping[str, int]) -> bool:
        """Whether the form holds for these counts, the others being large."""
        small = frozenset((name, count) for name, count in counts.items() if count < self.sure[name])
        if small not in self._known:
            self._known[small] = self._holds is not None and self._holds(dict(small))
        return self._known[small]

    def check(self, values: Mapping[str, Poly]) -> None:
        """Raise BindingError where it does not hold for the counts among bound sizes."""
        bound = {name: values[name].constant for name in self.sure if name in values}
        counts = {name: int(count) for name, count in bound.items() if count is not None}
        if self.hold(counts):
            return
        # the one of which a larger count would do, and from which on
        name, least = next(
            ((n, k) for n in counts for k in range(counts[n], self.sure[n] + 1) if self.hold({**counts, n: k})),
            next(iter(self.sure.items())),
        )
        raise BindingError(
            f"{name}={_value(values[name])}: the formula holds from {name}={least} on, expected the question to be "
            f"asked of the graph with {name} bound"
        )

    def __deepcopy__(self, memo: object) -> Counts:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        if self._holds is not None and prod(self.sure.values()) <= _MOST_LOOKED_AT:
            for counts in product(*(range(1, most) for most in self.sure.values())):
                self.hold(dict(zip(self.sure, counts, strict=True)))
        return Counts, (self.sure, None, self._known)


@dataclass(frozen=True)
class Validity:
    """What a formula holds for, of one graph: its conditions, and what was bound when the formula was derived."""

    conditions: Conditions
    """what the graph asks"""
    values: tuple[tuple[str, Poly | None], ...] = ()
    """what its symbols stand for, by name: numbers, formulas in other symbols, None for what is no size"""
    counts: Counts | None = None
    """where the formula is a closed form over loops"""

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the open symbols that something is asked of."""
        mine = dict(self.values)
        asked = self.conditions.names | (self.counts.sure.keys() if self.counts else frozenset())
        inside = [v.names() for v in mine.values() if v is not None]
        return (asked - mine.keys()).union(*inside)

    def bound(self, change: Callable[[Poly], Poly | None], names: Iterable[str]) -> Validity:
        """Return what is left after symbols of these names are changed; BindingError if that breaks a condition."""
        values: dict[str, Poly | None] = {k: v if v is None else change(v) for k, v in self.values}
        values |= {n: change(poly(symbol(n))) for n in self.names & set(names) if n not in values}
        out = replace(self, values=tuple(sorted(values.items(), key=itemgetter(0))))
        out.settled()
        return out

    def at(self, values: Mapping[str, Poly]) -> Validity:
        """Return what is left once symbols are replaced; BindingError if that breaks a condition."""
        return self.bound(lambda p: p.bind(values), values)

    def settled(self) -> dict[str, Poly]:
        """Return the numbers that are known, those that follow from equalities included; BindingError as `at`."""
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
        """What may be taken for granted of the open symbols."""
        if not self.values:
            return self.conditions.known
        put, unknown = {k: v for k, v in self.values if v is not None}, {k for k, v in self.values if v is None}
        relations = [r.at(put) for r in self.conditions.relations if unknown.isdisjoint(r.difference.names())]
        declared = [c for c in self.conditions.declared if unknown.isdisjoint(c.names)]
        declared = [c._replace(formula=c.formula.bind(put)) for c in declared]
        return _known(
            (r for r in relations if r.difference.constant is None),
            (c for c in declared if c.formula.constant is None),
        )

    def counted(self) -> dict[str, Poly]:
        """Return the counts of loops that the formula is a closed form over, in the symbols that are open."""
        put = {k: v for k, v in self.values if v is not None}
        sure = self.counts.sure if self.counts else {}
        return {name: put.get(name, poly(symbol(name))) for name in sure if dict(self.values).get(name, 1) is not None}

    def tests(self) -> list[Asked]:
        """Return what is asked of the open symbols, counts of loops aside."""
        known, unknown = self.settled(), {k for k, v in self.values if v is None}
        put = {k: v for k, v in self.values if v is not None and k not in known}
        made = [Asked(c.formula, c.least, whole=c.whole) for c in self.conditions.declared]
        made += [Asked(r.difference, equal=r.equal, strict=r.strict) for r in self.conditions.relations]
        # what symbols stand for, and what follows from equalities, are sizes as well
        made += [Asked(poly(symbol(k)), 1, whole=True) for k in (*known, *put)]
        inside = [a._replace(amount=a.amount.bind(known)) for a in made]
        seen = [a._replace(amount=a.amount.bind(put)) for a in inside if unknown.isdisjoint(a.amount.names())]
        return [a for a in dict.fromkeys(seen) if a.amount.constant is None and not _always(a)]


def _always(asked: Asked) -> bool:
    whole = all(
        isinstance(c, int) and all(e > 0 and (k[0] != "~" or generator(k).is_integer) for k, e in m)
        for m, c in asked.amount.terms.items()
    )
    if asked.equal or (asked.whole and not whole):
        return False
    least: Rational | None = lower(asked.amount)
    return least is not None and (least > asked.least or (least == asked.least and not asked.strict))


# -- carried -----------------------------------------------------------------------------------------------------------
# Expressions that carry what they hold for.
#
# A question answers with a sympy expression while a size is open. Where its graph asks something of sizes, the
# expression is of a subclass of its own class that has one thing more, `held`; in all else, comparison and printing
# included, it is the plain expression. Its operators and methods hand on what it holds for. sympy's own functions are
# given the plain one (`sympify` returns it), so that nothing of it is kept in their caches.


def plain(value: Any) -> Any:
    """Return an expression without what it holds for, anything else as it is."""
    return value._plain if isinstance(value, _Conditioned) else value


def held_by(*values: object) -> tuple[Validity, ...]:
    """Return what some values hold for together; empty for plain expressions and for what is none."""
    return tuple(dict.fromkeys(v for value in values if isinstance(value, _Conditioned) for v in value.held))


def conditioned(value: Any, held: Iterable[Validity]) -> Any:
    """Return a formula that holds for this; itself where that says nothing, or where it is no formula in symbols."""
    held = tuple(v for v in held if v.names or v.values)
    if not held or not isinstance(value, sympy.Expr) or not value.free_symbols:
        return plain(value)
    kind: Any = type(plain(value))
    out: Any = object.__new__(_class_of(kind))
    out._plain, out.held = plain(value), held
    return out


@cache
def _class_of(base: Any) -> Any:
    """Return the subclass of a class of expressions that carries what they hold for.

    All but what `_Conditioned` defines is asked of the plain expression: sympy puts numbers into expressions to find
    out about them, which is nobody's binding.
    """
    # printers and the order of terms go by the name
    space: dict[str, Any] = {"__slots__": ("_plain", "held"), "__module__": base.__module__, "__doc__": base.__doc__}
    for name in dir(base):
        own = name.startswith("__") or hasattr(_Conditioned, name)
        if not own and isinstance(getattr_static(base, name), FunctionType | property | MemberDescriptorType):
            space[name] = property(attrgetter(f"_plain.{name}"))
    return type(base)(base.__name__, (_Conditioned, base), space)


class _Conditioned:
    """Common part of the classes of expressions that carry what they hold for."""

    __slots__ = ()
    _plain: sympy.Expr
    held: tuple[Validity, ...]
    _op_priority = 10.01  # numbers and plain expressions leave an operation to this class
    __sympy__ = None  # sympify() asks _sympy_

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
        """What rebuilds the plain expression."""
        return self._plain.func

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return conditioned, (self._plain, self.held)


def _carrying(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("subs"):  # sizes at which evalf is asked
            self.subs(kwargs["subs"])
        out = getattr(self._plain, name)(*map(plain, args), **kwargs)
        return conditioned(out, held_by(self, *args))

    return method


def _replacing(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = _each(lambda value: value, args)  # what can be gone through once, such as zip(), is a list then
        bare = _each(plain, args)

        def changed(p: Poly) -> Poly | None:
            try:
                return p if p.constant is not None else poly(getattr(p.expr, name)(*bare, **kwargs))
            except ShapeError:  # floats and symbols of other origin: nothing is known of these
                return None

        put: list[Any] = []
        _each(put.append, args)  # formulas, which hold for something themselves
        held = [v.bound(changed, v.names) for v in self.held]
        return conditioned(getattr(self._plain, name)(*bare, **kwargs), [*held, *held_by(*put)])

    return method


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to what stands in lists, tuples, sets and mappings."""
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
