"""The algebra of costs: exact sums of monomials in positive symbols.

A size or a cost is a sum of products of generators with integer exponents, negative ones included, times rationals.
A generator is a symbol, or an atom: anything that is no polynomial (a floor, a maximum, a power with a symbol in its
exponent), kept as the sympy expression that it is. sympy is met only at the two ends, `poly` and `Poly.expr`:
its own sums are three orders of magnitude slower to build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import chain

import sympy

from .errors import ShapeError
from .symbols import symbol

__all__ = ["ONE", "ZERO", "Monomial", "Poly", "Rational", "generator", "poly", "total"]

Rational = int | Fraction
Monomial = tuple[tuple[str, int], ...]  # sorted by generator key

# Powers beyond this are no sizes of tensors; expanding them would take for ever.
_HIGHEST_POWER = 64
_MOST_TERMS = 100_000

_atoms: dict[str, sympy.Expr] = {}
_keys: dict[sympy.Expr, str] = {}


def generator(key: str) -> sympy.Expr:
    """Return the sympy expression that a generator's key stands for."""
    return _atoms[key] if key[0] == "~" else symbol(key)


def _atom_key(expr: sympy.Expr) -> str:
    key = _keys.get(expr)
    if key is None:
        key = f"~{expr}"
        while key in _atoms:  # equal text, another expression: the owners of a maximum may differ
            key += "'"
        _atoms[key], _keys[expr] = expr, key
    return key


def _tidy(value: Rational) -> Rational:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value


@lru_cache(maxsize=1 << 16)
def _times(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for key, power in b:
        powers[key] = powers.get(key, 0) + power
    return tuple(sorted((k, p) for k, p in powers.items() if p))


class Poly:
    """An immutable sum of monomials with rational coefficients.

    Parameters
    ----------
    terms : mapping of Monomial to int or Fraction
        Coefficients; zeros must have been left out.
    """

    __slots__ = ("_expr", "_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, Rational]) -> None:
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
        other = as_poly(other)
        if len(self.terms) * len(other.terms) > _MOST_TERMS:
            raise ShapeError(
                f"a product of {len(self.terms)} by {len(other.terms)} terms is no size of a tensor"
            )
        out: dict[Monomial, Rational] = {}
        for m, c in self.terms.items():
            for n, d in other.terms.items():
                key = _times(m, n)
                out[key] = out.get(key, 0) + c * d
        return Poly({m: _tidy(c) for m, c in out.items() if c})

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Poly:
        if abs(power) > _HIGHEST_POWER:
            raise ShapeError(
                f"({self})**{power}: expected an exponent between -{_HIGHEST_POWER} and {_HIGHEST_POWER}"
            )
        if power < 0:
            return (ONE / self) ** -power
        out = ONE
        for _ in range(power):
            out = out * self
        return out

    def __truediv__(self, other: Poly | Rational) -> Poly:
        other = as_poly(other)
        if not other.terms:
            raise ShapeError(f"({self}) / 0: expected a divisor that is not zero")
        if len(other.terms) == 1:
            ((m, c),) = other.terms.items()
            return self * Poly({tuple((k, -p) for k, p in m): _tidy(Fraction(1) / c)})
        quotient = self._divide(other)
        return self * atom(1 / other.expr) if quotient is None else quotient

    def _divide(self, divisor: Poly) -> Poly | None:
        """Return the exact quotient by a sum, or None; leading terms are those of the highest total degree."""
        lead, coefficient = max(divisor.terms.items(), key=_degree)
        inverse = Poly({tuple((k, -p) for k, p in lead): _tidy(Fraction(1) / coefficient)})
        rest, parts = self, []
        for _ in range(len(self.terms)):
            if not rest.terms:
                return total(parts)
            part = Poly(dict([max(rest.terms.items(), key=_degree)])) * inverse
            parts.append(part)
            rest = rest - part * divisor
        return None if rest.terms else total(parts)

    # -- identity ------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | Fraction):
            other = as_poly(other)
        return self.terms == other.terms if isinstance(other, Poly) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __repr__(self) -> str:
        return str(self.expr)

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

    def keys(self) -> set[str]:
        """Keys of the generators that occur."""
        return {k for m in self.terms for k, _ in m}

    def names(self) -> set[str]:
        """Names of the symbols that occur, inside atoms too."""
        found = set()
        for key in self.keys():
            found |= {s.name for s in _atoms[key].free_symbols} if key[0] == "~" else {key}
        return found

    def bind(self, values: Mapping[str, Poly]) -> Poly:
        """Replace symbols by polynomials, inside atoms too."""
        keys = self.keys()
        inside = {k for k in keys if k[0] == "~" and any(s.name in values for s in _atoms[k].free_symbols)}
        if not inside and keys.isdisjoint(values):
            return self
        new = {k: v for k, v in values.items() if k in keys}
        exprs = {symbol(k): v.expr for k, v in values.items()} if inside else {}
        new |= {k: poly(_atoms[k].xreplace(exprs)) for k in inside}
        return self.substitute(new)

    def substitute(self, new: Mapping[str, Poly]) -> Poly:
        """Replace generators by polynomials, without looking inside atoms."""
        parts = []
        for m, c in self.terms.items():
            kept = tuple((k, p) for k, p in m if k not in new)
            part = Poly({kept: c})
            for k, p in m:
                if k in new:
                    part = part * new[k] ** p
            parts.append(part)
        return total(parts)

    def evaluate(self, value: Callable[[str], float]) -> float:
        """Return the sum with every generator replaced by a number: exact if those are ints or Fractions."""
        out: float = 0
        seen: dict[str, float] = {}
        for m, c in self.terms.items():
            part: float = c
            for k, p in m:
                x = seen.get(k)
                if x is None:
                    x = seen[k] = value(k)
                part = (
                    part * x**p if p > 0 else part * (Fraction(1) / x if isinstance(x, int) else 1 / x) ** -p
                )
            out += part
        return out

    @property
    def expr(self) -> sympy.Expr:
        """The same sum as a sympy expression."""
        if self._expr is None:
            self._expr = sympy.Add(*(_monomial_expr(m, c) for m, c in self.terms.items()))
        return self._expr


def _degree(item: tuple[Monomial, Rational]) -> tuple[int, Monomial]:
    return sum(p for _, p in item[0]), item[0]


def _monomial_expr(monomial: Monomial, coefficient: Rational) -> sympy.Expr:
    number = sympy.Rational(coefficient.numerator, coefficient.denominator)
    return sympy.Mul(number, *(sympy.Pow(generator(k), p) for k, p in monomial))


ZERO = Poly({})
ONE = Poly({(): 1})


def as_poly(value: Poly | Rational) -> Poly:
    """Return a number as a polynomial, a polynomial as it is."""
    if isinstance(value, Poly):
        return value
    return Poly({(): value}) if value else ZERO


def total(parts: Iterable[Poly]) -> Poly:
    """Return the sum of polynomials in one pass."""
    out: dict[Monomial, Rational] = {}
    for monomial, c in chain.from_iterable(p.terms.items() for p in parts):
        out[monomial] = out.get(monomial, 0) + c
    return Poly({m: _tidy(c) for m, c in out.items() if c})


def atom(expr: sympy.Expr) -> Poly:
    """Return an expression as one generator, or its value where it is a number."""
    if expr.is_Rational:
        return as_poly(_tidy(Fraction(expr.p, expr.q)))
    return Poly({((_atom_key(expr), 1),): 1})


@lru_cache(maxsize=1 << 14)
def _from_expr(expr: sympy.Expr) -> Poly:
    if expr.is_Symbol:
        if expr != symbol(expr.name):
            raise ShapeError(
                f"symbol {expr.name} has assumptions {expr.assumptions0}; expected the positive integer symbol "
                f"that costgraph.dims({expr.name!r}) returns"
            )
        return Poly({((expr.name, 1),): 1})
    if expr.is_Rational:
        return as_poly(_tidy(Fraction(int(expr.p), int(expr.q))))
    if expr.is_Add:
        return total(_from_expr(a) for a in expr.args)
    if expr.is_Mul:
        out = ONE
        for a in expr.args:
            out = out * _from_expr(a)
        return out
    if expr.is_Pow and expr.exp.is_Integer and abs(expr.exp.p) <= _HIGHEST_POWER:
        base = _from_expr(expr.base)
        return base**expr.exp.p if expr.exp.p > 0 or len(base.terms) == 1 else atom(expr)
    if expr.is_Float or not expr.is_commutative or expr.is_finite is False:
        raise ShapeError(
            f"{expr}: expected an exact size, made of integers and of symbols from costgraph.dims"
        )
    return atom(expr)


def poly(value: object) -> Poly:
    """Return a size or formula as a polynomial.

    Parameters
    ----------
    value : Poly, int, Fraction or sympy.Expr
        A size. bool, float and text are refused.

    Raises
    ------
    ShapeError
        If the value is none of these, or holds a float or a symbol that `dims` did not make.
    """
    if isinstance(value, Poly):
        return value
    if isinstance(value, sympy.Expr):
        return _from_expr(value)
    if isinstance(value, bool | str | float):
        raise ShapeError(
            f"size {value!r}: expected an integer or an expression in symbols from costgraph.dims"
        )
    if isinstance(value, Fraction):
        return as_poly(_tidy(value))
    try:
        return as_poly(value.__index__())  # type: ignore[attr-defined]  # NumPy's integers have it too
    except AttributeError:
        raise ShapeError(
            f"size {value!r}: expected an integer or an expression in symbols from costgraph.dims"
        ) from None
