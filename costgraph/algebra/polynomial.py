"""The algebra of costs: exact sums of monomials in positive symbols.

A size or a cost is a sum of products of generators with integer exponents, negative ones included, times rationals.
A generator is a symbol, or an atom: anything that is no polynomial (a floor, a maximum, a power with a symbol in its
exponent), kept as the sympy expression that it is. sympy is met only at the two ends, `poly` and `Poly.expr`:
its own sums are three orders of magnitude slower to build.
"""

# A few lines above 400: sums are bound through sympy's atoms, and atoms are read into sums, so that none can go first.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import chain
from math import ceil, floor, prod
from typing import Any

import sympy

from ..errors import ShapeError
from .division import Terms, content, quotient, reciprocal
from .generators import (
    HIGHEST_EXPONENT,
    Monomial,
    Rational,
    atom_key,
    cached,
    generator,
    is_reciprocal,
    names_in,
    number_power,
    product,
    tidy,
    times,
)  # fmt: skip
from .rounding import split
from .symbols import check_symbol, integer, shown, symbol

__all__ = ["ONE", "ZERO", "Monomial", "Poly", "Rational", "generator", "poly", "total"]

# Sums raised to more than this are no sizes of tensors; expanding them would take for ever.
_HIGHEST_POWER = 64
_MOST_TERMS = 100_000


class Poly:
    """An immutable sum of monomials with rational coefficients, of which zeros must have been left out."""

    __slots__ = ("_expr", "_hash", "terms")

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._hash: int | None = None
        self._expr: sympy.Expr | None = None

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: Poly | Rational) -> Poly:
        return total((self, as_poly(other)))

    __radd__ = __add__

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly | Rational) -> Poly:
        return self + -as_poly(other)

    def __rsub__(self, other: Rational) -> Poly:
        return as_poly(other) + -self

    def __mul__(self, other: Poly | Rational) -> Poly:
        other = other if type(other) is Poly else as_poly(other)
        if self is ONE:
            return other
        if other is ONE:
            return self
        if len(self.terms) == 1 == len(other.terms):
            ((m, c),), ((n, d),) = self.terms.items(), other.terms.items()
            return _product_of_terms(m, c, n, d)
        if len(self.terms) * len(other.terms) > _MOST_TERMS:
            raise ShapeError(f"a product of {len(self.terms)} by {len(other.terms)} terms is no size of a tensor")
        out: dict[Monomial, Rational] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                key = times(m, n)
                out[key] = out.get(key, 0) + c * d
        return Poly({m: tidy(c) for m, c in out.items() if c})

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Poly:
        single = len(self.terms) == 1
        most = HIGHEST_EXPONENT if single else _HIGHEST_POWER
        if abs(power) > most:
            raise ShapeError(f"({self.brief()})**{power}: expected an exponent between -{most} and {most}")
        if power < 0:
            return (ONE / self) ** -power
        if single:
            ((m, c),) = self.terms.items()
            return Poly({times((), tuple((k, e * power) for k, e in m)): c**power})
        out = ONE
        for _ in range(power):
            out = out * self
        return out

    def __truediv__(self, other: Poly | Rational) -> Poly:
        other = as_poly(other)
        if not other.terms:
            raise ShapeError(f"({self.brief()}) / 0: expected a divisor that is not zero")
        if len(other.terms) == 1:
            ((m, c),) = other.terms.items()
            sums = [(k, p) for k, p in m if p > 0 and is_reciprocal(k)]  # 1/(1/(A + 1)) is A + 1 again
            inverse = Poly({reciprocal(tuple(f for f in m if f not in sums)): tidy(Fraction(1) / c)})
            return prod((_from_expr(1 / generator(k)) ** p for k, p in sums), start=self * inverse)
        exact = quotient(self.terms, other.terms)
        if exact is not None:
            return Poly(exact)
        common = Poly(dict([content(other.terms)]))
        return self / common * atom(1 / (other / common).expr)

    # -- identity ------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Poly):
            return self is other or self.terms == other.terms
        return self.terms == as_poly(other).terms if isinstance(other, int | Fraction) else NotImplemented

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (dict(self.terms),)  # hashes of text, and keys of atoms, are a process's own

    def __hash__(self) -> int:
        if self._hash is None:
            constant = self.constant  # equal to the number, so hashed as it
            self._hash = hash(frozenset(self.terms.items()) if constant is None else constant)
        return self._hash

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __repr__(self) -> str:
        try:
            return _text(self)
        except ValueError:  # Python refuses to write out integers of more than 4,300 digits
            return f"a formula with {shown(max((abs(c.numerator) for c in self.terms.values()), default=0))}"

    def brief(self) -> str:
        """Return the text of the first few terms: what an error message can carry."""
        return str(self) if len(self.terms) <= 8 else f"{Poly(dict(list(self.terms.items())[:8]))} + ..."

    def sort_key(self) -> tuple[tuple[Monomial, Rational], ...]:
        """Order polynomials by their content, never by the order in which they were made."""
        return tuple(sorted(self.terms.items()))

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> Rational | None:
        """The value, where there is no generator left, else None."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def number(self) -> Rational | sympy.Expr | None:
        """The value, where no symbol is left, else None: a sympy number where it is no fraction."""
        if self.constant is not None or self.names():
            return self.constant
        found = _from_expr(self.expr)  # sympy multiplies roots of numbers out
        return found.expr if found.constant is None else found.constant

    @property
    def is_size(self) -> bool:
        """Whether it is a positive whole number, with no symbol left."""
        return isinstance(self.number, int) and self.number > 0

    def generators(self) -> set[str]:
        """Keys of the generators that occur."""
        return {k for m in self.terms for k, _ in m}

    def names(self) -> set[str]:
        """Names of the symbols that occur, inside atoms too."""
        return set[str]().union(*map(names_in, self.generators()))

    def bind(self, values: Mapping[str, Poly]) -> Poly:
        """Replace symbols by polynomials, inside atoms too."""
        keys = self.generators()
        inside = {k for k in keys if k[0] == "~" and not names_in(k).isdisjoint(values)}
        if not inside and keys.isdisjoint(values):
            return self
        new = {k: v for k, v in values.items() if k in keys}
        new |= {k: _bound_atom(k, values) for k in inside}
        return self.substitute(new)

    def substitute(self, new: Mapping[str, Poly]) -> Poly:
        """Replace generators by polynomials, without looking inside atoms."""
        numbers = {k: c for k, v in new.items() if (c := v.constant)}
        out: dict[Monomial, Rational] = {}
        for m, c in self.terms.items():
            part = ONE
            for k, p in m:
                if k in numbers:
                    c = c * (numbers[k] ** p if p > 0 else Fraction(numbers[k]) ** p)
                elif k in new:
                    part = part * new[k] ** p
            rest = tuple(f for f in m if f[0] not in new)
            for n, d in part.terms.items():
                key = times(rest, n) if n else rest
                out[key] = out.get(key, 0) + c * d
        return Poly({m: tidy(c) for m, c in out.items() if c})

    def evaluate(self, value: Callable[[str], Any]) -> Any:
        """Return the sum with every generator replaced by a number: exact if those are ints or Fractions."""
        out: Any = 0
        seen: dict[str, Any] = {}
        for m, c in self.terms.items():
            part: Any = c
            for k, p in m:
                x = seen.get(k)
                if x is None:
                    x = seen[k] = value(k)
                if p == 1:
                    part = part * x
                    continue
                part = part * x**p if p > 0 else part * (1 / Fraction(x) if isinstance(x, int) else 1 / x) ** -p
            out += part
        return out

    @property
    def expr(self) -> sympy.Expr:
        """The same sum as a sympy expression."""
        if self._expr is None:
            number = sympy.Rational
            self._expr = sympy.Add(*(number(c.numerator, c.denominator) * product(m) for m, c in self.terms.items()))
        return self._expr


def _restored(terms: Terms) -> Poly:
    return Poly({times((), m): c for m, c in terms.items()})


# kept, as sympy takes long
_text: Callable[[Poly], str] = cached(1 << 14)(lambda p: str(p.expr))
ZERO = Poly({})
ONE = Poly({(): 1})


def as_poly(value: Poly | Rational) -> Poly:
    """Return a number as a polynomial, a polynomial as it is."""
    if isinstance(value, Poly):
        return value
    if type(value) is not int and not isinstance(value, Fraction):
        return poly(value)  # NumPy's integers, and the refusal of everything inexact
    return Poly({(): value}) if value else ZERO


@cached(1 << 16)
def _product_of_terms(m: Monomial, c: Rational, n: Monomial, d: Rational) -> Poly:
    # sizes are monomials nearly always, and of a large graph the same few: kept once, they are nothing to collect
    return Poly({times(m, n): tidy(c * d)})


def total(parts: Iterable[Poly]) -> Poly:
    """Return the sum of polynomials in one pass."""
    out: dict[Monomial, Rational] = {}
    for monomial, c in chain.from_iterable(p.terms.items() for p in parts):
        out[monomial] = out.get(monomial, 0) + c
    return Poly({m: tidy(c) for m, c in out.items() if c})


def atom(expr: sympy.Expr) -> Poly:
    """Return an expression as one generator, or its value where it is a number."""
    if expr.is_Rational:
        return as_poly(tidy(Fraction(expr.p, expr.q)))
    return Poly({((atom_key(expr), 1),): 1})


@cached(1 << 14)
def _from_expr(expr: sympy.Expr) -> Poly:
    if expr.is_Symbol:
        check_symbol(expr)
        return Poly({((expr.name, 1),): 1})
    if expr.is_Rational:
        return as_poly(tidy(Fraction(int(expr.p), int(expr.q))))
    if expr.is_Add:
        return total(_from_expr(a) for a in expr.args)
    if expr.is_Mul:
        return prod(map(_from_expr, expr.args), start=ONE)
    if expr.is_Pow:
        return power(_from_expr(expr.base), _from_expr(expr.exp))
    if isinstance(expr, sympy.floor | sympy.ceiling):
        return _rounded(expr)
    return atom(expr)


def _rounded(expr: sympy.Expr) -> Poly:
    """Return a floor or ceiling in one form, however its sum was written."""
    terms, up = _from_expr(expr.args[0]).terms, isinstance(expr, sympy.ceiling)
    whole, rest, up = split(terms, up=up, inside=lambda key: _from_expr(generator(key).args[0]).terms)
    made = (sympy.ceiling if up else sympy.floor)(Poly(rest).expr)
    return Poly(whole) + (atom(made) if isinstance(made, sympy.floor | sympy.ceiling) else _from_expr(made))


def power(base: Poly, exponent: Poly) -> Poly:
    """Return a power in one form, whatever it was made of: sympy joins `2 * 2**T` to `2**(T + 1)`.

    An exponent with symbols is split at its sums and whole multiples; what is then left is an atom.
    """
    fixed, number = exponent.constant, base.constant
    if isinstance(fixed, int) and number is not None:
        return as_poly(number_power(number, fixed))
    if isinstance(fixed, int) and (abs(fixed) <= _HIGHEST_POWER or len(base.terms) == 1):
        return base**fixed
    if number is None and len(base.terms) == 1:
        ((m, c),) = base.terms.items()
        if c > 0 and (c, m) != (1, ((m[0][0], 1),)):  # (2*B)**T is 2**T * B**T, as all of them are positive
            factors = [power(Poly({((k, 1),): 1}), exponent * e) for k, e in m]
            return prod(factors, start=power(as_poly(c), exponent))
    if number is not None and number < 0 and not all(isinstance(c, int) for c in exponent.terms.values()):
        raise ShapeError(f"({number})**({exponent}): expected a base that is not negative")
    if number is not None and number.numerator == 1:
        return ONE if number == 1 else power(as_poly(number.denominator), -exponent)
    if isinstance(fixed, Fraction):
        return _root_power(base, fixed)
    expr = sympy.Pow(base.expr, exponent.expr)
    if not expr.is_Pow:
        return _from_expr(expr)
    return atom(expr) if fixed is not None else _split_power(expr)


def _root_power(base: Poly, exponent: Fraction) -> Poly:
    """Return B**(-1/2) as B**(1/2)/B: one root of each degree, with the powers that it has no need of left out."""
    whole, rest = divmod(exponent, 1)
    root = sympy.Pow(base.expr, sympy.Rational(1, rest.denominator))
    if root.is_real is False:
        raise ShapeError(f"({base})**({exponent}): expected a base that is not negative")
    plain = root.is_Pow and root.exp.is_Rational
    return power(base, as_poly(whole)) * (atom(root) if plain else _from_expr(root)) ** rest.numerator


def _split_power(expr: sympy.Pow) -> Poly:
    base, exponent = expr.base, _from_expr(expr.exp)
    negative = [c < 0 for c in exponent.terms.values()]
    if any(negative) and not (base.is_Symbol or base.is_Rational):
        # 0**(T - 1) is 0, where 0**T / 0 is nothing
        return ONE / power(_from_expr(base), -exponent) if all(negative) else atom(expr)
    out = ONE
    for m, c in exponent.terms.items():
        if not m and isinstance(c, int):
            out = out * power(_from_expr(base), as_poly(c))
        else:
            unit = Poly({m: tidy(Fraction(1, c.denominator))})
            out = out * atom(sympy.Pow(base, unit.expr)) ** c.numerator
    return out


def _bound_atom(key: str, values: Mapping[str, Poly]) -> Poly:
    """Return an atom with symbols replaced."""
    expr = generator(key)
    if hasattr(expr, "bound"):  # a maximum, whose arguments are bound as sums are, with what they belong to
        return _from_expr(expr.bound(values))
    return _put_in(key, tuple((name, values[name]) for name in sorted(names_in(key)) if name in values))


@cached(1 << 12)
def _put_in(key: str, given: tuple[tuple[str, Poly], ...]) -> Poly:
    """Replace symbols of an atom, never through a power of numbers that sympy would write out."""
    expr, values = generator(key), dict(given)
    if expr.is_Pow:
        return power(_from_expr(expr.base).bind(values), _from_expr(expr.exp).bind(values))
    if isinstance(expr, sympy.floor | sympy.ceiling):
        inner, number = _from_expr(expr.args[0]).bind(values), floor if isinstance(expr, sympy.floor) else ceil
        return _from_expr(expr.func(inner.expr)) if inner.constant is None else as_poly(number(inner.constant))
    return _from_expr(expr.xreplace({symbol(k): v.expr for k, v in values.items()}))


def poly(value: object) -> Poly:
    """Return a size or formula as a polynomial.

    ShapeError if it is no int, Fraction or expression (bool, float and text are none), or holds a float or a symbol
    that `dims` did not make.
    """
    if isinstance(value, Poly):
        return value
    if isinstance(value, sympy.Expr):
        # one that carries what it holds for stands for the plain one
        return _from_expr(value if value.__sympy__ else value._sympy_())
    if isinstance(value, Fraction):
        return as_poly(tidy(value))
    try:
        return as_poly(integer(value))
    except TypeError:
        raise ShapeError(
            f"size {shown(value)}: expected an integer or an expression in symbols from costgraph.dims"
        ) from None
