"""Translate torch's symbolic sizes into the library's algebra."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import reduce
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from ...algebra.dominance import lower
from ...algebra.extremum import Max, Min
from ...algebra.polynomial import ONE, Poly, cached, is_whole, poly
from ...algebra.symbols import shown, symbol
from ...errors import CostGraphError, UnsupportedError

__all__ = ["Translator", "holds", "remainder"]


class Translator:
    """Translates torch's integers into formulas; results are memoized.

    `names` maps torch's symbols to named sizes, `block_counts` maps its other symbols to formulas. `exact` are floor
    divisions assumed to be exact. With `symbols`, a data-dependent size becomes a symbol named in `data_sizes`;
    otherwise it is an error.
    """

    def __init__(
        self,
        names: dict[sympy.Symbol, str],
        exact: Collection[sympy.Expr] = (),
        *,
        block_counts: Mapping[sympy.Symbol, sympy.Expr] = MappingProxyType({}),
        symbols: bool = False,
        data_sizes: Mapping[sympy.Symbol, str] = MappingProxyType({}),
    ) -> None:
        self.data_sizes = data_sizes
        self.names, self.block_counts = names, block_counts
        self.exact = exact
        self.symbols = symbols
        self._sizes: dict[Any, Poly] = {}
        self._formulas: dict[sympy.Expr, Poly] = {}
        """Formulas of expressions, valid until another axis is known."""
        self._axes = set[Poly]()

    def size(self, n: int | torch.SymInt) -> Poly:
        """Return a size, offset or stride as a formula."""
        key = n if isinstance(n, int) else n.node.expr
        result = self._sizes.get(key)
        if result is None:
            result = self._sizes[key] = poly(key) if isinstance(key, int) else self.formula(key)
        return result

    def layout(self, t: torch.Tensor) -> tuple[tuple[Poly, ...], tuple[Poly, ...]]:
        """Return a tensor's shape and strides."""
        shape = tuple(map(self.size, t.shape))
        if not self._axes.issuperset(shape):
            self._axes.update(shape)
            self._formulas.clear()
        return shape, tuple(map(self.size, t.stride()))

    def formula(self, expr: sympy.Expr) -> Poly:
        """Return an expression as a formula.

        UnsupportedError if a size cannot contain it.
        """
        if expr not in self._formulas:
            self._formulas[expr] = self._formula(expr)
        return self._formulas[expr]

    def _formula(self, expr: sympy.Expr) -> Poly:
        if expr.is_Integer:
            return poly(int(expr))
        if expr.is_Rational or expr.is_Float:
            return poly(Fraction(float(expr)) if expr.is_Float else Fraction(int(expr.p), int(expr.q)))
        if expr in self.block_counts:
            return self.formula(self.block_counts[expr])
        if expr.is_Symbol:
            if expr not in self.names and self.symbols:
                self.names[expr] = self.data_sizes.get(expr, expr.name)
            if expr not in self.names:
                raise UnsupportedError(
                    f"size {self.data_sizes.get(expr, expr)} depends on the values of tensors; trace with "
                    f"data_sizes='symbol' to name it"
                )
            return poly(symbol(self.names[expr]))
        if expr in self.exact:
            over, under = map(self.formula, expr.args)
            return over / under
        if isinstance(expr, sympy.Max | functions.Max):
            return self._maximum(*map(self.formula, expr.args))
        rule = _RULES.get(type(expr))
        if rule is None:
            raise UnsupportedError(f"size {shown(str(expr))} has no formula: {type(expr).__name__} is not supported")
        out: Poly = rule(*map(self.formula, expr.args))
        return out

    def _maximum(self, *args: Poly) -> Poly:
        """Return a maximum; the maximum of 1 and an axis size, as in strides, is that size.

        Graphs are never bound to sizes at which a tensor is empty.
        """
        args = tuple(dict.fromkeys(args))
        maximal = [a for a in args if not any(b is not a and self._is_at_least(b, a) for b in args)]
        return maximal[0] if len(maximal) == 1 else poly(Max(*(a.expr for a in maximal)))

    def _is_at_least(self, b: Poly, a: Poly) -> bool:
        return (a == ONE and b in self._axes) or holds(b - a)


@cached(1 << 14)
def holds(p: Poly, *, strict: bool = False) -> bool:
    """Whether a formula is nonnegative, or positive with `strict`, for all sizes above 1."""
    try:
        bound = lower(p.bind({n: poly(symbol(n) + 1) for n in p.names()}))
    except CostGraphError:
        return False
    return bound is not None and (bound > 0 if strict else bound >= 0)


_ROOT = 2  # denominator of square-root exponents


def _power(base: Poly, exponent: Poly) -> Poly:
    number = exponent.constant
    if isinstance(number, Fraction) and number.denominator == _ROOT:
        return poly(base.expr ** sympy.Rational(number))
    if not isinstance(number, int):
        raise UnsupportedError(f"size ({base})**({exponent}): the exponent is neither an integer nor half of one")
    return base**number if number >= 0 else poly(1) / base**-number


def remainder(expr: sympy.Expr, translator: Translator) -> Poly:
    """Return a floor division's remainder, even if it is known to be 0."""
    a, b = map(translator.formula, expr.args)
    return a - b * _floor(a, b)


def _floor(a: Poly, b: Poly) -> Poly:
    """Return a floor division, exact if every coefficient is divisible."""
    quotient = a / b
    if all(isinstance(c, int) and is_whole(m) for m, c in quotient.terms.items()):
        return quotient
    return poly(sympy.floor(quotient.expr).replace(sympy.floor, _as_ceiling))


def _as_ceiling(x: sympy.Expr) -> sympy.Expr:
    """Write a floor of a negative expression as a ceiling, for which bounds can be derived."""
    return -sympy.ceiling(-x) if x.could_extract_minus_sign() else sympy.floor(x)


def _ceiling(a: Poly, b: Poly) -> Poly:
    return -_floor(-a, b)


def _modulo(a: Poly, b: Poly) -> Poly:
    return a if holds(a) and holds(b - a, strict=True) else a - b * _floor(a, b)


def _minimum(*args: Poly) -> Poly:
    return poly(Min(*(a.expr for a in args)))


_RULES: dict[type, Any] = {
    sympy.Add: lambda *args: reduce(Poly.__add__, args),
    sympy.Mul: lambda *args: reduce(Poly.__mul__, args),
    sympy.Pow: _power,
    sympy.Min: _minimum,
    sympy.floor: lambda a: _floor(a, poly(1)),
    sympy.ceiling: lambda a: _ceiling(a, poly(1)),
    sympy.Mod: _modulo,
    functions.Min: _minimum,
    functions.FloorDiv: _floor,
    functions.CleanDiv: _floor,
    functions.CeilDiv: _ceiling,
    functions.IntTrueDiv: lambda a, b: a / b,
    functions.Mod: _modulo,
    functions.PythonMod: _modulo,
    functions.ModularIndexing: lambda a, b, c: _modulo(_floor(a, b), c),
    functions.PowByNatural: _power,
    functions.FloatPow: _power,
    functions.OpaqueUnaryFn_sqrt: lambda a: _power(a, poly(Fraction(1, 2))),
    functions.FloatTrueDiv: lambda a, b: a / b,
    functions.ToFloat: lambda a: a,
    functions.Identity: lambda a: a,
    functions.FloorToInt: lambda a: _floor(a, poly(1)),
    functions.CeilToInt: lambda a: _ceiling(a, poly(1)),
    functions.TruncToInt: lambda a: _floor(a, poly(1)),
}
