"""What monomials are made of: symbols, and atoms that stand for anything that is no polynomial."""

from __future__ import annotations

from functools import lru_cache

import sympy

from .errors import ShapeError
from .symbols import check_exact, symbol

__all__ = ["HIGHEST_EXPONENT", "Monomial", "atom_key", "generator", "product", "times"]

Monomial = tuple[tuple[str, int], ...]  # sorted by generator key

# Beyond this no size of a tensor has an exponent, and evaluating one would take for ever.
HIGHEST_EXPONENT = 1024

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
