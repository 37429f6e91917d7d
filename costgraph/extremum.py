"""Max and Min of formulas that stay fast: compared by dominance, never by relational inference.

`sympy.Max` of twenty polynomials takes seconds to build and minutes to nest. These print, substitute, differentiate,
lambdify and rewrite like it, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import sympy
from sympy.printing.str import StrPrinter

from .dominance import BOUNDS, lower, prune
from .polynomial import Poly, Rational, atom, poly

__all__ = ["Max", "Min", "Owner", "Regime", "extremum", "regimes"]


class Owner(NamedTuple):
    """What holds an extremum in one of its regimes."""

    op: str | None = None
    """Name of the op, None where the formula is not of a graph."""
    phase: str | None = None
    """Phase of the op: forward, recompute, backward or optimizer."""


class Regime(NamedTuple):
    """One argument of a Max or Min."""

    formula: sympy.Expr
    """The formula that holds in this regime."""
    op: str | None
    """Name of the op that owns it."""
    phase: str | None
    """Phase of that op."""


class _Extremum(sympy.Expr):  # type: ignore[misc]  # sympy has no types
    """Common part of Max and Min: arguments are pruned when the object is made."""

    __slots__ = ("owners",)
    is_commutative = True
    is_extended_real = True
    is_real = True
    _largest: ClassVar[bool]
    _numpy: ClassVar[str]
    _python: ClassVar[str]
    _sympy: ClassVar[Any]

    def __new__(cls, *args: object, owners: Sequence[Owner] | None = None) -> sympy.Expr:
        flat: list[tuple[sympy.Expr, Owner]] = []
        for i, arg in enumerate(args):
            expr = sympy.sympify(arg, strict=True)
            owner = owners[i] if owners is not None else Owner()
            flat += zip(expr.args, expr.owners, strict=True) if isinstance(expr, cls) else [(expr, owner)]
        if not flat:
            raise TypeError(f"{cls.__name__}: expected at least one argument")
        if any(e.is_Float for e, _ in flat) and all(e.is_number for e, _ in flat):
            return cls._sympy(*(e for e, _ in flat))
        return _build(cls, prune([(poly(e), o) for e, o in flat], largest=cls._largest))

    @property
    def func(self) -> Any:
        """Rebuild with the owners kept: what sympy's traversals call."""
        if not any(self.owners):
            return type(self)
        return lambda *args: type(self)(*args, owners=self.owners if len(args) == len(self.owners) else None)

    def _hashable_content(self) -> tuple[object, ...]:
        return (*self.args, self.owners)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.owners)

    __reduce_ex__ = lambda self, protocol: self.__reduce__()  # noqa: E731  # sympy defines it for its own slots

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr | None:
        return self._bound({old: new})

    def _xreplace(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> tuple[sympy.Basic, bool]:
        if self in rule:
            return rule[self], True
        if self.free_symbols.isdisjoint(rule) and all(k.is_Symbol for k in rule):
            return self, False
        bound = self._bound(rule)
        return super()._xreplace(rule) if bound is None else (bound, True)

    def _bound(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> sympy.Expr | None:
        """Replace symbols without building a sympy sum on the way; None where the rule is of another kind."""
        if not all(
            k.is_Symbol and isinstance(v, sympy.Expr) and not v.has(sympy.Float) for k, v in rule.items()
        ):
            return None
        values = {k.name: poly(v) for k, v in rule.items()}
        candidates = [(poly(a).bind(values), o) for a, o in zip(self.args, self.owners, strict=True)]
        return _build(type(self), prune(candidates, largest=self._largest))

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        # where one argument is the extremum, the derivative is that argument's
        return sympy.Add(*(Holds(i, self) * a.diff(symbol) for i, a in enumerate(self.args)))

    def _eval_is_positive(self) -> bool | None:
        found = [a.is_positive for a in self.args]
        return True if (any if self._largest else all)(f is True for f in found) else None

    def _eval_is_integer(self) -> bool | None:
        return True if all(a.is_integer for a in self.args) else None

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return self._sympy(*(a._evalf(prec) for a in self.args)) if not self.free_symbols else None

    def _eval_rewrite(self, rule: object, args: Sequence[sympy.Expr], **hints: object) -> sympy.Expr | None:
        # sympy's own class compares when it is made: that is what is too slow
        return self._sympy(*args, evaluate=False) if rule is self._sympy else None

    def _eval_simplify(self, **kwargs: object) -> sympy.Expr:
        return self

    def _join(self, printer: StrPrinter, name: str) -> str:
        return f"{name}({', '.join(printer._print(a) for a in self.args)})"

    def _sympystr(self, printer: StrPrinter) -> str:
        return self._join(printer, type(self).__name__)

    _sympyrepr = _sympystr

    def _latex(self, printer: StrPrinter, exp: str | None = None) -> str:
        inside = ", ".join(printer._print(a) for a in self.args)
        text = rf"\{self._python}\left({inside}\right)"
        return text if exp is None else rf"{text}^{{{exp}}}"

    def _pretty(self, printer: Any) -> Any:
        return printer._print_Function(sympy.Function(type(self).__name__)(*self.args))

    def _pythoncode(self, printer: StrPrinter) -> str:
        return self._join(printer, self._python)

    _lambdacode = _mpmathcode = _pythoncode

    def _numpycode(self, printer: StrPrinter) -> str:
        # maximum.reduce would need arguments of one shape
        text = printer._print(self.args[0])
        for a in self.args[1:]:
            text = f"{printer._module_format(f'numpy.{self._numpy}')}({text}, {printer._print(a)})"
        return str(text)

    _scipycode = _numpycode


class Max(_Extremum):
    """The largest of some formulas, dominated ones left out.

    Parameters
    ----------
    *args : sympy.Expr or int
        Formulas in symbols of `costgraph.dims`.
    owners : sequence of Owner, optional
        What each argument belongs to, as `regimes` reports it.

    Examples
    --------
    >>> from costgraph import dims
    >>> B, D, F = dims("B D F")
    >>> Max(B*D, 2*B*D, B*F)
    Max(2*B*D, B*F)
    """

    __slots__ = ()
    _largest, _numpy, _python, _sympy = True, "maximum", "max", sympy.Max


class Min(_Extremum):
    """The smallest of some formulas, dominating ones left out.

    Parameters
    ----------
    *args : sympy.Expr or int
        Formulas in symbols of `costgraph.dims`.

    Examples
    --------
    >>> from costgraph import dims
    >>> S, W = dims("S W")
    >>> Min(S, W, 2*S)
    Min(S, W)
    """

    __slots__ = ()
    _largest, _numpy, _python, _sympy = False, "minimum", "min", sympy.Min


class Holds(sympy.Expr):  # type: ignore[misc]  # sympy has no types
    """1 where argument number `index` is the extremum (the first of equals), else 0: what a derivative needs."""

    is_commutative = True
    is_real = True

    def __new__(cls, index: int, of: sympy.Expr) -> sympy.Expr:
        """Return a number where the extremum has none or only numeric arguments left."""
        index = sympy.Integer(index)
        if not isinstance(of, _Extremum):
            # the extremum was decided by a substitution; which argument it was is no longer known
            return sympy.Expr.__new__(cls, index, of)
        return sympy.Expr.__new__(cls, index, of)

    @property
    def free_symbols(self) -> set[sympy.Symbol]:
        """Symbols on which the choice depends."""
        return set(self.args[1].free_symbols)

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr:
        return self._decide({old: new})

    def _xreplace(self, rule: dict[sympy.Expr, sympy.Expr]) -> tuple[sympy.Expr, bool]:
        return self._decide(rule), True

    def _decide(self, rule: dict[sympy.Expr, sympy.Expr]) -> sympy.Expr:
        index, of = self.args
        args = [a.xreplace(rule) for a in of.args]
        if all(a.is_number for a in args):
            best = max(args) if of._largest else min(args)
            return sympy.Integer(int(args.index(best) == index))
        kept = sympy.Expr.__new__(type(of), *args)  # unpruned: the index must keep its meaning
        kept.owners = of.owners
        return sympy.Expr.__new__(Holds, index, kept)

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        return sympy.Integer(0)

    def _numpycode(self, printer: Any) -> str:
        index, of = self.args
        own = printer._print(of.args[index])
        return f"(({own}) == ({printer._print(of)}))"

    _lambdacode = _pythoncode = _mpmathcode = _scipycode = _numpycode


def _restore(cls: type[_Extremum], args: tuple[sympy.Expr, ...], owners: tuple[Owner, ...]) -> sympy.Expr:
    return cls(*args, owners=owners)


def _build(cls: type[_Extremum], kept: list[tuple[Poly, Owner]]) -> sympy.Expr:
    if len(kept) == 1:
        return kept[0][0].expr
    kept.sort(key=lambda item: item[0].sort_key())
    out = sympy.Expr.__new__(cls, *(p.expr for p, _ in kept))
    out.owners = tuple(o for _, o in kept)
    return out


def extremum(candidates: Sequence[tuple[Poly, Owner]], *, largest: bool = True) -> sympy.Expr:
    """Return the Max (or Min) of candidates that were pruned already, with their owners."""
    return _build(Max if largest else Min, list(candidates))


def regimes(formula: sympy.Expr | int | float) -> list[Regime]:
    """List what a formula can be, with the op and the phase that own each case.

    Parameters
    ----------
    formula : sympy.Expr or number
        A Max or Min, also multiplied by or added to something, or anything else.

    Returns
    -------
    list of Regime
        `(formula, op, phase)` for each argument of the Max or Min; one entry for anything else.

    Examples
    --------
    >>> from costgraph import dims
    >>> B, D, F = dims("B D F")
    >>> [r.formula for r in regimes(1 + Max(B*D, B*F))]
    [B*D + 1, B*F + 1]
    """
    formula = sympy.sympify(formula, strict=True)
    found = next((e for e in sympy.preorder_traversal(formula) if isinstance(e, _Extremum)), None)
    if found is None:
        return [Regime(formula, None, None)]
    out = []
    for arg, owner in zip(found.args, found.owners, strict=True):
        # args of a Max may hold another one: a minimum over windows in a count of FLOPs
        part = formula if formula is found else formula.xreplace({found: arg})
        out.append(Regime(arg if formula is found else part, owner.op, owner.phase))
    return out


def least_of(expr: sympy.Expr) -> Rational | None:
    """Lower bound of a Max or Min from those of its arguments."""
    bounds = [lower(poly(a)) for a in expr.args]
    if isinstance(expr, Max):
        return max((b for b in bounds if b is not None), default=None)
    return None if None in bounds else min(b for b in bounds if b is not None)


BOUNDS |= {Max: least_of, Min: least_of}


def at_least_zero(p: Poly) -> Poly:
    """Return max(0, p) as a polynomial: p itself where it is known not to be negative."""
    return _as_generator(Max(0, p.expr))


def smaller(a: Poly, b: Poly) -> Poly:
    """Return min(a, b) as a polynomial."""
    return a if a == b else _as_generator(Min(a.expr, b.expr))


def _as_generator(expr: sympy.Expr) -> Poly:
    return atom(expr) if isinstance(expr, _Extremum) else poly(expr)
