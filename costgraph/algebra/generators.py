"""What monomials are made of: symbols, and atoms that stand for anything that is no polynomial."""

from __future__ import annotations

import gc
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from threading import Lock
from typing import TypeVar
from weakref import WeakValueDictionary

import sympy

from ..errors import ShapeError
from .symbols import check_exact, symbol

__all__ = [
    "HIGHEST_EXPONENT", "SLACK", "Monomial", "Rational", "atom_key", "cached", "generator", "is_reciprocal",
    "names_in", "number_power", "product", "tidy", "times",
]  # fmt: skip

Rational = int | Fraction
Monomial = tuple[tuple[str, int], ...]  # sorted by generator key

# Beyond this no size of a tensor has an exponent, and evaluating one would take for ever.
HIGHEST_EXPONENT = 1024
# A number raised to a power when symbols are bound stays exact up to this many bits, about what 10**6 operations do.
_MOST_BITS = 1 << 18

#: First letter of a generator that is at least 0, which only comparisons have.
SLACK = "+"

T = TypeVar("T")


class _Key(str):
    """The key of an atom: text that sorts and hashes as any other, and the expression that it stands for."""

    __slots__ = ("__weakref__", "expr", "names", "root")
    expr: sympy.Expr
    names: frozenset[str]
    root: tuple[str, int] | None
    """Of B**(1/2) the symbol and 2: its square is the symbol."""

    def __reduce__(self) -> tuple[object, ...]:
        return atom_key, (self.expr,)  # another process has keys of its own


# An atom lives as long as a formula that holds its key.
_by_expr: WeakValueDictionary[sympy.Expr, _Key] = WeakValueDictionary()
_by_text: WeakValueDictionary[str, _Key] = WeakValueDictionary()
_lock = Lock()
_caches: list[Callable[[], None]] = []
_limit = _FEWEST = 1 << 12  # atoms, before the caches have to let go of those that nothing else holds


def cached(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keep the results of a function of monomials or formulas, as lru_cache does, until atoms have to go."""

    def keep(function: Callable[..., T]) -> Callable[..., T]:
        kept = lru_cache(maxsize=size)(function)
        _caches.append(kept.cache_clear)
        return kept

    return keep


def generator(key: str) -> sympy.Expr:
    """Return the sympy expression that a generator's key stands for."""
    return key.expr if isinstance(key, _Key) else symbol(key) if key[0] != SLACK else sympy.Symbol(key)


def names_in(key: str) -> frozenset[str]:
    """Return the names of the symbols in a generator."""
    return key.names if isinstance(key, _Key) else frozenset((key,))


def atom_key(expr: sympy.Expr) -> str:
    """Return the key of an atom, the same for equal expressions, or raise ShapeError: no exact size, or a huge one."""
    key = _by_expr.get(expr)
    if key is not None:
        return key
    check_exact(expr)
    _let_go()
    with _lock:
        key = _by_expr.get(expr)
        if key is None:
            text = _text(expr)
            while text in _by_text:  # equal text, another expression: the owners of a maximum may differ
                text += "'"
            key = _Key(text)
            key.expr, key.root, key.names = expr, _root(expr), frozenset(s.name for s in expr.free_symbols)
            _by_expr[expr] = _by_text[text] = key
        return key


def _text(expr: sympy.Expr) -> str:
    try:
        return f"~{expr}"
    except ValueError:  # Python refuses to write out integers of more than 4,300 digits
        bits = max(int(n.p).bit_length() for n in expr.atoms(sympy.Rational))
        raise ShapeError(
            f"{type(expr).__name__} of a number of {bits} bits: no size of a tensor, expected at most 4,300 digits"
        ) from None


def _root(expr: sympy.Expr) -> tuple[str, int] | None:
    plain = expr.is_Pow and expr.base.is_Symbol and expr.exp.is_Rational and expr.exp.p == 1
    return (expr.base.name, int(expr.exp.q)) if plain else None


def _let_go() -> None:
    """Empty the caches once there are twice as many atoms as were left the last time."""
    global _limit
    if len(_by_expr) >= _limit:
        for clear in _caches:
            clear()
        gc.collect()  # graphs are cycles
        _limit = max(_FEWEST, 2 * len(_by_expr))


@cached(1 << 16)
def times(a: Monomial, b: Monomial) -> Monomial:
    """Return a product of monomials, or raise ShapeError if an exponent is too large."""
    powers = dict(a)
    for key, power in b:
        powers[key] = powers.get(key, 0) + power
        if key[0] == "~" and isinstance(key, _Key) and key.root is not None:
            name, degree = key.root
            whole, powers[key] = divmod(powers[key], degree)
            powers[name] = powers.get(name, 0) + whole
    if powers and max(map(abs, powers.values())) > HIGHEST_EXPONENT:
        key, power = max(powers.items(), key=lambda item: abs(item[1]))
        raise ShapeError(f"{key.lstrip('~')}**{power}: expected an exponent within {HIGHEST_EXPONENT}")
    return tuple(sorted((k, p) for k, p in powers.items() if p))


@cached(1 << 16)
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
