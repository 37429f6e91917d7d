"""What monomials are made of: symbols, and atoms that stand for anything that is no polynomial."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import sympy

from .errors import ShapeError
from .symbols import check_exact, symbol

__all__ = [
    "HIGHEST_EXPONENT", "Monomial", "Rational", "atom_key", "generator", "is_reciprocal", "number_power", "product",
    "tidy", "times",
]  # fmt: skip

Rational = int | Fraction
Monomial = tuple[tuple[str, int], ...]  # sorted by generator key

# Beyond this no size of a tensor has an exponent, and evaluating one would take for ever.
HIGHEST_EXPONENT = 1024
# A number raised to a power when symbols are bound stays exact up to this many bits, about what 10**6 operations do.
_MOST_BITS = 1 << 18

_atoms: dict[str, sympy.Expr] = {}
_keys: dict[sympy.Expr, str] = {}


def generator(key: str) -> sympy.Expr:
    """Return the sympy expression that a generator's key stands for."""
    return _atoms[key] if key[0] == "~" else symbol(key)


def atom_key(expr: sympy.Expr) -> str:
    """Return the key of an atom, the same for equal expressions, or raise ShapeError if it is no exact size."""
    key = _keys.get(expr)
    if key is None:
        check_exact(expr)
        key = f"~{expr}"
        while key in _atoms:  # equal text, another expression: the owners of a maximum may differ
            key += "'"
        _atoms[key], _keys[expr] = expr, key
    return key


@lru_cache(maxsize=1 << 16)
def times(a: Monomial, b: Monomial) -> Monomial:
    """Return a product of monomials, or raise ShapeError if an exponent is too large."""
    powers = dict(a)
    for key, power in b:
        powers[key] = powers.get(key, 0) + power
        if abs(powers[key]) > HIGHEST_EXPONENT:
            raise ShapeError(f"{key.lstrip('~')}**{powers[key]}: expected an exponent within {HIGHEST_EXPONENT}")
    return tuple(sorted((k, p) for k, p in powers.items() if p))


@lru_cache(maxsize=1 << 16)
def product(monomial: Monomial) -> sympy.Expr:
    """Return a monomial as a sympy expression."""
    return sympy.Mul(*(sympy.Pow(generator(k), p) for k, p in monomial))


def tidy(value: Rational) -> Rational:
    """Return a whole number as an int."""
    return value.numerator if type(value) is not int and value.denominator == 1 else value


def is_reciprocal(key: str) -> bool:
    """Whether a generator is an atom such as 1/(A + 1)."""
    expr = generator(key) if key[0] == "~" else None
    return expr is not None and expr.is_Pow and expr.exp == -1


def number_power(number: Rational, exponent: int) -> Rational:
    """Return a power of numbers, or raise ShapeError if it is too large to be written out."""
    if not number and exponent < 0:
        raise ShapeError(f"0**{exponent}: expected a base that is not zero")
    bits = max(number.numerator.bit_length(), number.denominator.bit_length()) * abs(exponent)
    if number in (0, 1, -1) or bits <= _MOST_BITS:
        return tidy(Fraction(number) ** exponent)
    too_large = ShapeError(f"a power of {bits} bits is no size of a tensor")
    if isinstance(number, int) and exponent > 0:
        raise too_large
    try:
        # what is no integer is handed out as a float anyway
        return tidy(Fraction(float(number) ** exponent))
    except OverflowError:
        raise too_large from None
