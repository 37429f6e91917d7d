"""Exact polynomial algebra for costs: rational sums of monomials in positive symbols.

Exponents are integers, including negative ones. A generator is a symbol or an atom. Atoms are non-polynomial sympy
expressions, such as a floor, a maximum, or a power with a symbolic exponent. sympy is used only in the conversions
`poly` and `Poly.expr`, since its sums are a thousand times slower to build.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import ceil, floor, gcd, lcm, prod
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import sympy

from ..errors import ShapeError
from .symbols import check_exact, check_symbol, integer, shown, symbol

__all__ = [
    "HIGHEST_EXPONENT",
    "SLACK",
    "Monomial",
    "Rational",
    "atom_key",
    "cached",
    "generator",
    "is_reciprocal",
    "names_in",
    "number_power",
    "product",
    "tidy",
    "times",
    "Terms",
    "content",
    "quotient",
    "reciprocal",
    "denominator",
    "is_whole",
    "split",
    "ONE",
    "ZERO",
    "Poly",
    "poly",
    "total",
]


# -- generators --------------------------------------------------------------------------------------------------------

Rational = int | Fraction
Monomial = tuple[tuple[str, int], ...]  # sorted by generator key

# Tensor sizes never have larger exponents, and evaluating them would not terminate.
HIGHEST_EXPONENT = 1024
# Powers of numbers are exact up to this many bits, about as expensive as 10**6 operations.
_MOST_BITS = 1 << 18

#: First letter of nonnegative slack generators, which occur only in comparisons.
SLACK = "+"

T = TypeVar("T")


class _Key(str):
    """Key of an atom: text that sorts and hashes as any other key, with its expression."""

    __slots__ = ("__weakref__", "expr", "names", "root")
    expr: sympy.Expr
    names: frozenset[str]
    root: tuple[str, int] | None
    """For B**(1/2), the symbol and 2, since its square is the symbol."""

    def __reduce__(self) -> tuple[object, ...]:
        return atom_key, (self.expr,)  # other processes have their own keys


# An atom lives as long as a formula holds its key.
_by_expr: WeakValueDictionary[sympy.Expr, _Key] = WeakValueDictionary()
_by_text: WeakValueDictionary[str, _Key] = WeakValueDictionary()
_lock = Lock()
_caches: list[Callable[[], None]] = []
_limit = _FEWEST = 1 << 12  # number of atoms from which the caches are emptied


def cached(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache results as lru_cache does, for functions of monomials or formulas, until atoms are collected."""

    def keep(function: Callable[..., T]) -> Callable[..., T]:
        cached_function = lru_cache(maxsize=size)(function)
        _caches.append(cached_function.cache_clear)
        return cached_function

    return keep


def generator(key: str) -> sympy.Expr:
    """Return the sympy expression of a generator key."""
    return key.expr if isinstance(key, _Key) else symbol(key) if key[0] != SLACK else sympy.Symbol(key)


def names_in(key: str) -> frozenset[str]:
    """Return the names of the symbols in a generator."""
    return key.names if isinstance(key, _Key) else frozenset((key,))


def atom_key(expr: sympy.Expr) -> str:
    """Return the key of an atom, unique per expression; ShapeError if the expression is inexact or huge."""
    key = _by_expr.get(expr)
    if key is not None:
        return key
    check_exact(expr)
    _release()
    with _lock:
        key = _by_expr.get(expr)
        if key is None:
            text = _text(expr)
            while text in _by_text:  # equal text for different expressions: owners may differ
                text += "'"
            key = _Key(text)
            key.expr, key.root, key.names = expr, _root(expr), frozenset(s.name for s in expr.free_symbols)
            _by_expr[expr] = _by_text[text] = key
        return key


def _text(expr: sympy.Expr) -> str:
    try:
        return f"~{expr}"
    except ValueError:  # Python limits int to str to 4,300 digits
        bits = max(int(n.p).bit_length() for n in expr.atoms(sympy.Rational))
        raise ShapeError(
            f"{type(expr).__name__} of a number of {bits} bits: no size of a tensor, expected at most 4,300 digits"
        ) from None


def _root(expr: sympy.Expr) -> tuple[str, int] | None:
    plain = expr.is_Pow and expr.base.is_Symbol and expr.exp.is_Rational and expr.exp.p == 1
    return (expr.base.name, int(expr.exp.q)) if plain else None


def _release() -> None:
    """Empty the caches once the number of atoms has doubled since the last time."""
    global _limit
    if len(_by_expr) >= _limit:
        for clear in _caches:
            clear()
        gc.collect()  # graphs are cyclic
        _limit = max(_FEWEST, 2 * len(_by_expr))


@cached(1 << 16)
def times(a: Monomial, b: Monomial) -> Monomial:
    """Return a product of monomials; ShapeError if an exponent is too large."""
    powers = dict(a)
    for key, power in b:
        powers[key] = powers.get(key, 0) + power
        if key[0] == "~" and isinstance(key, _Key) and key.root is not None:
            name, degree = key.root
            carry, powers[key] = divmod(powers[key], degree)
            powers[name] = powers.get(name, 0) + carry
    if powers and max(map(abs, powers.values())) > HIGHEST_EXPONENT:
        key, power = max(powers.items(), key=lambda item: abs(item[1]))
        raise ShapeError(f"{key.lstrip('~')}**{power}: expected an exponent within {HIGHEST_EXPONENT}")
    return tuple(sorted((k, p) for k, p in powers.items() if p))


@cached(1 << 16)
def product(monomial: Monomial) -> sympy.Expr:
    """Return a monomial as a sympy expression."""
    return sympy.Mul(*(sympy.Pow(generator(k), p) for k, p in monomial))


def tidy(value: Rational) -> Rational:
    """Convert an integral Fraction to int."""
    return value.numerator if type(value) is not int and value.denominator == 1 else value


def is_reciprocal(key: str) -> bool:
    """Whether a generator is an atom such as 1/(A + 1)."""
    expr = generator(key) if key[0] == "~" else None
    return expr is not None and expr.is_Pow and expr.exp == -1


def number_power(number: Rational, exponent: int) -> Rational:
    """Return a power of a number; ShapeError if it is too large."""
    if not number and exponent < 0:
        raise ShapeError(f"0**{exponent}: expected a base that is not zero")
    bits = max(number.numerator.bit_length(), number.denominator.bit_length()) * abs(exponent)
    if number in (0, 1, -1) or bits <= _MOST_BITS:
        return tidy(Fraction(number) ** exponent)
    too_large = ShapeError(f"a power of {bits} bits is no size of a tensor")
    if isinstance(number, int) and exponent > 0:
        raise too_large
    try:
        # non-integers are returned as floats anyway
        return tidy(Fraction(float(number) ** exponent))
    except OverflowError:
        raise too_large from None


# -- division ----------------------------------------------------------------------------------------------------------

Terms = Mapping[Monomial, Rational]

_MOST_STEPS = 2000


def reciprocal(m: Monomial) -> Monomial:
    """Return 1/m."""
    return times((), tuple((k, -p) for k, p in m))


def content(terms: Terms) -> tuple[Monomial, Rational]:
    """Return the factor common to all terms, so that multiples of a sum share one reciprocal atom."""
    scale = Fraction(gcd(*(c.numerator for c in terms.values())), lcm(*(c.denominator for c in terms.values())))
    common = tuple((k, low) for k in _keys(terms) if (low := _range(terms, k)[0]))
    # sign of the leading term after division, which does not depend on the factor
    remainder = {times(m, reciprocal(common)): c for m, c in terms.items()}
    return common, scale if remainder[max(remainder)] > 0 else -scale


def quotient(terms: Terms, divisor: Terms) -> Terms | None:
    """Return the exact quotient of two sums, or None; exponent ranges of a product add up."""
    keys = _keys([*terms, *divisor])
    ranges = [(_range(terms, k), _range(divisor, k)) for k in keys]
    allowed = [(low - its_low, high - its_high) for (low, high), (its_low, its_high) in ranges]

    def rank(m: Monomial) -> tuple[int, ...]:
        powers = dict(m)
        return sum(powers.values()), *(powers.get(k, 0) for k in keys)

    lead = max(divisor, key=rank)
    if any(p > 0 and is_reciprocal(k) for k, p in lead):  # its reciprocal is a sum
        return None
    inverse, scale = reciprocal(lead), Fraction(1) / divisor[lead]
    remainder, out = dict(terms), dict[Monomial, Rational]()
    for _ in range(_MOST_STEPS):
        if not remainder:
            return {m: c for m, c in out.items() if c}
        top = max(remainder, key=rank)
        monomial, factor = times(top, inverse), tidy(remainder[top] * scale)
        powers = dict(monomial)
        if any(not low <= powers.get(k, 0) <= high for k, (low, high) in zip(keys, allowed, strict=True)):
            return None
        out[monomial] = tidy(out.get(monomial, 0) + factor)
        for m, c in divisor.items():
            key = times(monomial, m)
            remainder[key] = tidy(remainder.get(key, 0) - factor * c)
            if not remainder[key]:
                del remainder[key]
    return None


def _keys(monomials: Iterable[Monomial]) -> list[str]:
    return sorted({k for m in monomials for k, _ in m})


def _range(terms: Terms, key: str) -> tuple[int, int]:
    powers = [dict(m).get(key, 0) for m in terms]
    return min(powers, default=0), max(powers, default=0)


# -- rounding ----------------------------------------------------------------------------------------------------------
# Normal forms of floors and ceilings.


def split(terms: Terms, *, up: bool, argument_terms: Callable[[str], Terms]) -> tuple[Terms, Terms, bool]:
    """Split the floor or ceiling of a sum into an integer part and a rounded remainder.

    Parameters
    ----------
    terms : Terms
        The sum.
    up : bool
        Whether to round up.
    inside : callable
        Returns the argument of a generator that is a floor or ceiling.

    Returns
    -------
    tuple of Terms, Terms and bool
        Integer part; remainder with coefficients in [0, 1); whether to round it up, which is chosen if it removes the
        constant. If the sum is not a quotient of integers, everything is remainder.

    Notes
    -----
    For integers m, n and q, `ceiling(n/q)` is `floor((n + q - 1)/q)`, and `floor((floor(x) + m)/q)` is `floor((x +
    m)/q)`.
    """
    floored = _floored(terms, up=up)
    while floored is not None:
        opened = next((o for m in floored if (o := _nested_opened(floored, m, argument_terms)) is not None), None)
        if opened is None:
            break
        floored = opened
    if floored is None:
        return {}, terms, up
    integers = {m: floor(c) for m, c in floored.items() if floor(c)}
    remainder = {m: tidy(c - floor(c)) for m, c in floored.items() if c != floor(c)}
    number, divisor = remainder.get((), 0), denominator(remainder)
    if divisor > 1 and number == Fraction(divisor - 1, divisor) and len(remainder) > 1:
        return integers, {m: c for m, c in remainder.items() if m}, True
    return integers, remainder, False


def denominator(terms: Terms) -> int:
    """Return the least common denominator of all coefficients."""
    return lcm(*(c.denominator for c in terms.values()))


def is_whole(m: Monomial) -> bool:
    """Whether a monomial is an integer for all sizes."""
    return all(e > 0 and (k[0] != "~" or generator(k).is_integer) for k, e in m)


def _floored(terms: Terms, *, up: bool) -> Terms | None:
    """Return a sum whose floor equals the given rounding; None if it is not a quotient of integers."""
    if not all(map(is_whole, terms)):
        return None
    divisor = denominator(terms)
    return _plus(terms, {(): Fraction(divisor - 1, divisor)}) if up else terms


def _plus(a: Terms, b: Terms) -> Terms:
    out: dict[Monomial, Rational] = {m: tidy(Fraction(a.get(m, 0) + b.get(m, 0))) for m in (*a, *b)}
    return {m: c for m, c in out.items() if c}


def _nested_opened(terms: Terms, m: Monomial, argument_terms: Callable[[str], Terms]) -> Terms | None:
    """Replace an inner floor or ceiling by its argument; None if that may change the value."""
    if len(m) != 1 or m[0][1] != 1 or m[0][0][0] != "~" or terms[m].numerator != 1:
        return None
    expr = generator(m[0][0])
    if not isinstance(expr, sympy.floor | sympy.ceiling):
        return None
    divisor, others = terms[m].denominator, {n: c for n, c in terms.items() if n != m}
    inner = _floored(argument_terms(m[0][0]), up=isinstance(expr, sympy.ceiling))
    if divisor == 1 or inner is None or any(c * divisor != int(c * divisor) for c in others.values()):
        return None
    return _plus(others, {n: tidy(Fraction(c) / divisor) for n, c in inner.items()})


# -- polynomials -------------------------------------------------------------------------------------------------------

# Tensor sizes never contain higher powers of sums, and expanding them would not terminate.
_HIGHEST_POWER = 64
_MOST_TERMS = 100_000


class Poly:
    """Immutable sum of monomials with nonzero rational coefficients."""

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
        limit = HIGHEST_EXPONENT if single else _HIGHEST_POWER
        if abs(power) > limit:
            raise ShapeError(f"({self.brief()})**{power}: expected an exponent between -{limit} and {limit}")
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
        return _restored, (dict(self.terms),)  # text hashes and atom keys differ between processes

    def __hash__(self) -> int:
        if self._hash is None:
            constant = self.constant  # equal to the number, so it has the same hash
            self._hash = hash(frozenset(self.terms.items()) if constant is None else constant)
        return self._hash

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __repr__(self) -> str:
        try:
            return _poly_text(self)
        except ValueError:  # Python limits int to str to 4,300 digits
            return f"a formula with {shown(max((abs(c.numerator) for c in self.terms.values()), default=0))}"

    def brief(self) -> str:
        """Return the text of the first terms, for error messages."""
        return str(self) if len(self.terms) <= 8 else f"{Poly(dict(list(self.terms.items())[:8]))} + ..."

    def sort_key(self) -> tuple[tuple[Monomial, Rational], ...]:
        """Return a key that orders polynomials by content."""
        return tuple(sorted(self.terms.items()))

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> Rational | None:
        """The value if there are no generators, else None."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def number(self) -> Rational | sympy.Expr | None:
        """The value if there are no symbols, else None; irrational values are sympy numbers."""
        if self.constant is not None or self.names():
            return self.constant
        value = _from_expr(self.expr)  # sympy multiplies out roots of numbers
        return value.expr if value.constant is None else value.constant

    @property
    def is_size(self) -> bool:
        """Whether it is a positive integer without symbols."""
        return isinstance(self.number, int) and self.number > 0

    def generators(self) -> set[str]:
        """Return the generator keys that occur."""
        return {k for m in self.terms for k, _ in m}

    def names(self) -> set[str]:
        """Return the symbol names that occur, including those inside atoms."""
        return set[str]().union(*map(names_in, self.generators()))

    def bind(self, values: Mapping[str, Poly]) -> Poly:
        """Replace symbols by polynomials, including those inside atoms."""
        keys = self.generators()
        bound_atoms = {k for k in keys if k[0] == "~" and not names_in(k).isdisjoint(values)}
        if not bound_atoms and keys.isdisjoint(values):
            return self
        new = {k: v for k, v in values.items() if k in keys}
        new |= {k: _bound_atom(k, values) for k in bound_atoms}
        return self.substitute(new)

    def substitute(self, new: Mapping[str, Poly]) -> Poly:
        """Replace generators by polynomials, but not inside atoms."""
        numbers = {k: c for k, v in new.items() if (c := v.constant)}
        out: dict[Monomial, Rational] = {}
        for m, c in self.terms.items():
            factor = ONE
            for k, p in m:
                if k in numbers:
                    c = c * (numbers[k] ** p if p > 0 else Fraction(numbers[k]) ** p)
                elif k in new:
                    factor = factor * new[k] ** p
            unchanged = tuple(f for f in m if f[0] not in new)
            for n, d in factor.terms.items():
                key = times(unchanged, n) if n else unchanged
                out[key] = out.get(key, 0) + c * d
        return Poly({m: tidy(c) for m, c in out.items() if c})

    def evaluate(self, value: Callable[[str], Any]) -> Any:
        """Evaluate with a number for each generator; exact for ints and Fractions."""
        out: Any = 0
        cache: dict[str, Any] = {}
        for m, c in self.terms.items():
            term: Any = c
            for k, p in m:
                x = cache.get(k)
                if x is None:
                    x = cache[k] = value(k)
                if p == 1:
                    term = term * x
                    continue
                term = term * x**p if p > 0 else term * (1 / Fraction(x) if isinstance(x, int) else 1 / x) ** -p
            out += term
        return out

    @property
    def expr(self) -> sympy.Expr:
        """The sum as a sympy expression."""
        if self._expr is None:
            number = sympy.Rational
            self._expr = sympy.Add(*(number(c.numerator, c.denominator) * product(m) for m, c in self.terms.items()))
        return self._expr


def _restored(terms: Terms) -> Poly:
    return Poly({times((), m): c for m, c in terms.items()})


# cached, since sympy's printing is slow
_poly_text: Callable[[Poly], str] = cached(1 << 14)(lambda p: str(p.expr))
ZERO = Poly({})
ONE = Poly({(): 1})


def as_poly(value: Poly | Rational) -> Poly:
    """Convert a number to a polynomial."""
    if isinstance(value, Poly):
        return value
    if type(value) is not int and not isinstance(value, Fraction):
        return poly(value)  # NumPy integers; inexact numbers raise an error
    return Poly({(): value}) if value else ZERO


@cached(1 << 16)
def _product_of_terms(m: Monomial, c: Rational, n: Monomial, d: Rational) -> Poly:
    # nearly all sizes are monomials, few of them distinct: sharing them keeps the garbage collector idle
    return Poly({times(m, n): tidy(c * d)})


def total(polys: Iterable[Poly]) -> Poly:
    """Sum polynomials in one pass."""
    out: dict[Monomial, Rational] = {}
    for monomial, c in chain.from_iterable(p.terms.items() for p in polys):
        out[monomial] = out.get(monomial, 0) + c
    return Poly({m: tidy(c) for m, c in out.items() if c})


def atom(expr: sympy.Expr) -> Poly:
    """Return an expression as a generator, or its value if it is rational."""
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
    """Return the normal form of a floor or ceiling."""
    terms, up = _from_expr(expr.args[0]).terms, isinstance(expr, sympy.ceiling)
    integers, remainder, up = split(terms, up=up, argument_terms=lambda key: _from_expr(generator(key).args[0]).terms)
    rounding = (sympy.ceiling if up else sympy.floor)(Poly(remainder).expr)
    return Poly(integers) + (
        atom(rounding) if isinstance(rounding, sympy.floor | sympy.ceiling) else _from_expr(rounding)
    )


def power(base: Poly, exponent: Poly) -> Poly:
    """Return the normal form of a power, however it was written: sympy merges `2 * 2**T` into `2**(T + 1)`.

    Symbolic exponents are split at sums and integer multiples; the remaining powers are atoms.
    """
    fixed, number = exponent.constant, base.constant
    if isinstance(fixed, int) and number is not None:
        return as_poly(number_power(number, fixed))
    if isinstance(fixed, int) and (abs(fixed) <= _HIGHEST_POWER or len(base.terms) == 1):
        return base**fixed
    if number is None and len(base.terms) == 1:
        ((m, c),) = base.terms.items()
        if c > 0 and (c, m) != (1, ((m[0][0], 1),)):  # (2*B)**T is 2**T * B**T for positive factors
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
    """Return B**(-1/2) as B**(1/2)/B, with a single root for each degree."""
    integer_part, fraction = divmod(exponent, 1)
    root = sympy.Pow(base.expr, sympy.Rational(1, fraction.denominator))
    if root.is_real is False:
        raise ShapeError(f"({base})**({exponent}): expected a base that is not negative")
    plain = root.is_Pow and root.exp.is_Rational
    return power(base, as_poly(integer_part)) * (atom(root) if plain else _from_expr(root)) ** fraction.numerator


def _split_power(expr: sympy.Pow) -> Poly:
    base, exponent = expr.base, _from_expr(expr.exp)
    negative = [c < 0 for c in exponent.terms.values()]
    if any(negative) and not (base.is_Symbol or base.is_Rational):
        # 0**(T - 1) is 0, but 0**T / 0 is undefined
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
    if hasattr(expr, "bound"):  # a maximum binds its arguments and owners
        return _from_expr(expr.bound(values))
    return _substituted_atom(key, tuple((name, values[name]) for name in sorted(names_in(key)) if name in values))


@cached(1 << 12)
def _substituted_atom(key: str, substitutions: tuple[tuple[str, Poly], ...]) -> Poly:
    """Replace symbols in an atom, without letting sympy expand huge powers of numbers."""
    expr, values = generator(key), dict(substitutions)
    if expr.is_Pow:
        return power(_from_expr(expr.base).bind(values), _from_expr(expr.exp).bind(values))
    if isinstance(expr, sympy.floor | sympy.ceiling):
        inner, number = _from_expr(expr.args[0]).bind(values), floor if isinstance(expr, sympy.floor) else ceil
        return _from_expr(expr.func(inner.expr)) if inner.constant is None else as_poly(number(inner.constant))
    return _from_expr(expr.xreplace({symbol(k): v.expr for k, v in values.items()}))


def poly(value: object) -> Poly:
    """Convert a size or formula to a polynomial.

    Raises ShapeError if it is not an int, Fraction or expression (bool, float and str are not), or contains a float or
    a symbol not created by `dims`.
    """
    if isinstance(value, Poly):
        return value
    if isinstance(value, sympy.Expr):
        # use the plain expression of one that carries conditions
        return _from_expr(value if value.__sympy__ else value._sympy_())
    if isinstance(value, Fraction):
        return as_poly(tidy(value))
    try:
        return as_poly(integer(value))
    except TypeError:
        raise ShapeError(
            f"size {shown(value)}: expected an integer or an expression in symbols from costgraph.dims"
        ) from None
