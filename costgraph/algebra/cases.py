"""What stands for an extremum in sympy's hands: its derivative, its cases with their conditions, its limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from ..errors import ShapeError, UnsupportedError
from .polynomial import Poly, generator, poly
from .symbols import is_dimension, shown

__all__ = ["AtOnce", "Chosen", "Remade", "as_known", "eventually", "no_inverse", "piecewise", "slope"]


class AtOnce(sympy.Expr):  # type: ignore[misc]  # sympy has no types
    """What replaces many symbols by numbers in one pass, where sympy takes one pass for each."""

    __slots__ = ()

    def subs(self, *args: Any, **kwargs: Any) -> sympy.Expr:
        """Replace as sympy does; the order of numbers has no say."""
        rule = args[0] if len(args) == 1 and isinstance(args[0], dict) else {}
        if rule and all(k in self.free_symbols and isinstance(v, int | sympy.Integer) for k, v in rule.items()):
            return self.xreplace({k: sympy.Integer(v) for k, v in rule.items()})
        return super().subs(*args, **kwargs)


class Chosen(AtOnce):
    """The value that belongs to the extreme one of some keys, the first of equals: the derivative of an extremum.

    `sign` is 1 where the largest key decides, -1 where the smallest does; there is one value for each key.
    """

    is_commutative = True
    is_real = True
    is_Function = True  # noqa: N815  # as above

    def __new__(cls, sign: int, keys: sympy.Tuple, values: sympy.Tuple) -> sympy.Expr:
        """Return the value itself once it is decided."""
        if len(set(values)) == 1:
            return values[0]
        if all(k.is_number for k in keys):
            return values[max(range(len(keys)), key=lambda i: (sign * keys[i], -i))]
        return sympy.Expr.__new__(cls, sympy.Integer(sign), keys, values)

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr | None:
        try:
            values = {old.name: poly(new)} if old in self.free_symbols else {}
            keys, slopes = ([poly(e).bind(values).expr for e in part] for part in self.args[1:])
        except ShapeError:  # what the algebra does not know
            return None
        return Chosen(self.args[0], sympy.Tuple(*keys), sympy.Tuple(*slopes))

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        sign, keys, values = self.args
        slopes = sympy.Tuple(*(slope(v, symbol) for v in values))
        if any(slopes) or symbol not in keys.free_symbols:
            return Chosen(sign, keys, slopes)
        # it equals 0, but for the step where the case changes: `solve` takes a plain 0 for no symbol at all
        return sympy.Expr.__new__(Chosen, sign, keys, slopes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | sympy.Integer):
            return other == 0 and not any(self.args[2])
        return super().__eq__(other)  # type: ignore[no-any-return]  # sympy has no types

    def __hash__(self) -> int:
        return hash(self.args) if any(self.args[2]) else hash(0)

    def _eval_rewrite_as_Piecewise(self, *args: sympy.Expr, **hints: object) -> sympy.Expr:  # noqa: N802  # sympy's naming
        sign, keys, values = args
        return piecewise(keys, values, largest=sign == 1)

    def _eval_simplify(self, **kwargs: object) -> sympy.Expr:
        if not all(map(is_dimension, self.free_symbols)):  # an inequality, which would not know of its steps
            raise _RefusedError(f"inequality of {shown(self)}, a slope of a maximum, expected the maximum itself")
        return self

    def _smtlib(self, printer: Any) -> str:
        return str(printer._print(self.rewrite(sympy.Piecewise)))

    def _code(self, printer: Any, choice: str) -> str:
        sign, keys, values = ([printer._print(e) for e in part] for part in ([self.args[0]], *self.args[1:]))
        return f"(lambda k, v: {choice})([{sign[0]}*({f'), {sign[0]}*('.join(keys)})], [{', '.join(values)}])"

    def _numpycode(self, printer: Any) -> str:
        select, maximum = (printer._module_format(f"numpy.{name}") for name in ("select", "maximum"))
        reduce = printer._module_format("functools.reduce")
        return self._code(printer, f"{select}([x == {reduce}({maximum}, k) for x in k], v)")

    _scipycode = _numpycode

    def _pythoncode(self, printer: Any) -> str:
        return self._code(printer, "v[k.index(max(k))]")

    _lambdacode = _mpmathcode = _pythoncode


def slope(expr: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr:
    """Return the derivative of a sum of monomials term by term, of anything else by sympy."""
    try:
        p = poly(expr)
    except ShapeError:
        return expr.diff(symbol)
    if any(symbol in generator(k).free_symbols for k in p.generators() if k[0] == "~"):
        return expr.diff(symbol)
    powers = {m: dict(m).get(symbol.name, 0) for m in p.terms}
    return (Poly({m: c * powers[m] for m, c in p.terms.items() if powers[m]}) / Poly({((symbol.name, 1),): 1})).expr


class Remade:
    """What makes an extremum of other arguments, its owners kept: sympy's printers ask it for the name of the class."""

    def __init__(self, kind: Callable[..., sympy.Expr], owners_of: Callable[..., Sequence[object] | None]) -> None:
        self.kind, self.owners_of, self.__name__ = kind, owners_of, kind.__name__

    def __call__(self, *args: object) -> sympy.Expr:
        """Return it, without owners where there are other arguments."""
        return self.kind(*args, owners=self.owners_of(args))


def piecewise(cases: Sequence[sympy.Expr], values: Sequence[sympy.Expr], *, largest: bool) -> sympy.Expr:
    """Return the value of the extreme case, the first of equals, with conditions of which nothing is compared."""
    at_least = sympy.Ge if largest else sympy.Le
    pieces = [
        (value, sympy.And(*(at_least(case, other, evaluate=False) for other in cases[i:]), evaluate=False))
        for i, (case, value) in enumerate(zip(cases[:-1], values, strict=False), start=1)
    ]
    return sympy.Piecewise(*pieces, (values[-1], True), evaluate=False)


def as_known(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression itself, or as cases with conditions where sympy has put a symbol of its own into it.

    It does so where it looks for a period, and without end in a function of several arguments that it does not know.
    """
    return expr if all(map(is_dimension, expr.free_symbols)) else expr.rewrite(sympy.Piecewise)


class _RefusedError(UnsupportedError, NotImplementedError):
    """What users of this library expect of a refusal, and sympy's solvers too."""


def no_inverse(expr: sympy.Expr) -> UnsupportedError:
    """Return the refusal of `solve`, which asks for the inverse: an equation may hold for a range of sizes."""
    return _RefusedError(
        f"solve of an equation with {shown(expr)}: it has no inverse, expected its cases: .rewrite(sympy.Piecewise)"
    )


def eventually(cases: Sequence[sympy.Expr], growing: sympy.Symbol, *, largest: bool) -> sympy.Expr:
    """Return the case that holds once a symbol is large enough."""
    best = cases[0]
    for case in cases[1:]:
        gap = sympy.limit(case - best, growing, sympy.oo)
        if not (gap.is_extended_positive or gap.is_extended_negative):
            raise UnsupportedError(f"limit of a maximum: {case} and {best} stay {gap} apart, expected one to win")
        best = case if gap.is_extended_positive is largest else best
    return best
