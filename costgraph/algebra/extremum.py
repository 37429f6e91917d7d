"""Max and Min of formulas that stay fast: compared by dominance, never by relational inference.

`sympy.Max` of twenty polynomials takes seconds to build and minutes to nest. These print, substitute, differentiate,
lambdify and rewrite like it, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, ClassVar, NamedTuple

import sympy
from sympy.printing.str import StrPrinter

from ..errors import GraphError, ShapeError
from .carried import conditioned, held_by, plain
from .cases import AtOnce, Chosen, Remade, as_known, eventually, no_inverse, piecewise, slope
from .dominance import BOUNDS, Relations, lower
from .lines import as_latex
from .polynomial import Poly, Rational, poly
from .pruning import prune
from .symbols import FUNCTIONS, is_number_like, shown

__all__ = ["Max", "Min", "Owner", "extremum"]


class Owner(NamedTuple):
    """What holds an extremum in one of its regimes."""

    op: str | None = None
    """Name of the op, None where the formula is not of a graph."""
    phase: str | None = None
    """Phase of the op: forward, recompute, backward or optimizer."""
    label: str = ""
    """The op as a reader knows it."""
    roles: tuple[tuple[str, Poly], ...] = ()
    """What the argument consists of, where it is a sum of amounts with names."""

    def bound(self, values: Mapping[str, Poly]) -> Owner:
        """Return the owner of the argument with symbols replaced."""
        return self._replace(roles=tuple((role, p.bind(values)) for role, p in self.roles)) if self.roles else self

    @property
    def key(self) -> tuple[object, ...]:
        """What tells owners apart, in a form that has an order."""
        return self.op or "", self.phase or "", self.label, tuple((role, p.sort_key()) for role, p in self.roles)


class _Extremum(AtOnce):
    """Common part of Max and Min: arguments are pruned when the object is made."""

    __slots__ = ("owners",)
    is_commutative = True
    is_extended_real = True
    is_real = True
    is_Function = True  # noqa: N815  # sympy's naming: `solve` would take it for an unknown of its own
    _largest: ClassVar[bool]
    _numpy: ClassVar[str]
    _python: ClassVar[str]
    _sympy: ClassVar[Any]

    def __new__(cls, *args: object, owners: Sequence[Owner] | None = None) -> sympy.Expr:
        if not args:
            raise ShapeError(f"{cls.__name__}: expected at least one argument")
        named = owners is None or (isinstance(owners, list | tuple) and len(owners) == len(args))
        if not named or not all(isinstance(o, Owner) for o in owners or ()):
            raise GraphError(f"{cls.__name__}: owners is {shown(owners)}, expected an owner for each argument")
        given = list(zip(map(plain, map(as_expr, args)), owners or [Owner()] * len(args), strict=True))
        try:
            found = _build(cls, prune(_flat(cls, [(poly(e), o) for e, o in given]), largest=cls._largest))
            return conditioned(found, held_by(*args))
        except ShapeError:
            if not all(is_number_like(e) for e, _ in given):
                raise
        # floats, and symbols that sympy puts in for a while: left as they are
        if all(e.is_number for e, _ in given):
            return cls._sympy(*(e for e, _ in given))
        return conditioned(_node(cls, sorted(given, key=lambda item: sympy.default_sort_key(item[0]))), held_by(*args))

    @property
    def func(self) -> Any:
        """Rebuild with the owners kept: what sympy's traversals call."""
        if not any(o.op or o.phase for o in self.owners):
            return type(self)
        return Remade(type(self), self._owners_of)

    def _owners_of(self, args: Sequence[sympy.Expr]) -> list[Owner] | None:
        """Return the owners of arguments in place of its own: what one consists of is known of that alone."""
        if len(args) != len(self.owners):
            return None
        pairs = zip(args, self.args, self.owners, strict=True)
        return [owner if new == old else owner._replace(roles=()) for new, old, owner in pairs]

    def _hashable_content(self) -> tuple[object, ...]:
        return (*self.args, tuple(o.key for o in self.owners))  # sympy compares these by <

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.owners)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return self.__reduce__()  # sympy defines it for its own slots

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr | None:
        if new in (sympy.oo, -sympy.oo):  # no size, but what sympy's inequalities try: an answer for a while
            return self._sympy(*(a.subs(old, new) for a in self.args))
        return self._bound({old: new})

    def _xreplace(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> tuple[sympy.Basic, bool]:
        if not isinstance(rule, Mapping):  # a function of every node that sympy's own tools pass
            return super()._xreplace(rule)
        if self in rule:
            return rule[self], True
        if self.free_symbols.isdisjoint(rule) and all(k.is_Symbol for k in rule):
            return self, False
        bound = self._bound(rule)
        return super()._xreplace(rule) if bound is None else (bound, True)

    def _bound(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> sympy.Expr | None:
        """Replace symbols without building a sympy sum on the way; None where the rule is of another kind."""
        if not all(k.is_Symbol for k in rule):
            return None
        try:
            return self.bound({k.name: poly(v) for k, v in rule.items() if k in self.free_symbols})
        except ShapeError:  # what the algebra does not know
            return None

    def bound(self, values: Mapping[str, Poly]) -> sympy.Expr:
        """Replace symbols in every argument; ShapeError where a number would be too large to be written out."""
        candidates = [(poly(a).bind(values), o.bound(values)) for a, o in zip(self.args, self.owners, strict=True)]
        return _build(type(self), prune(_flat(type(self), candidates), largest=self._largest))

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        # where one argument is the extremum, the derivative is that argument's
        slopes = sympy.Tuple(*(slope(a, symbol) for a in self.args))
        return Chosen(1 if self._largest else -1, sympy.Tuple(*self.args), slopes)

    def _eval_is_positive(self) -> bool | None:
        found = [a.is_positive for a in self.args]
        return True if (any if self._largest else all)(f is True for f in found) else None

    def _eval_is_integer(self) -> bool | None:
        return True if all(a.is_integer for a in self.args) else None

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return self._sympy(*(a._evalf(prec) for a in self.args)) if not self.free_symbols else None

    def _eval_rewrite(self, rule: Any, args: Sequence[sympy.Expr], **hints: object) -> sympy.Expr | None:
        # sympy's own class compares when it is made: that is what is too slow
        return self._sympy(*args, evaluate=False) if rule is self._sympy else None

    def _eval_rewrite_as_Piecewise(self, *args: sympy.Expr, **hints: object) -> sympy.Expr:  # noqa: N802  # sympy's naming
        return piecewise(args, args, largest=self._largest)

    _smtlib = Chosen._smtlib

    def inverse(self, argindex: int = 1) -> None:
        """Raise UnsupportedError: `sympy.solve` asks for it."""
        raise no_inverse(self)

    def _eval_rewrite_as_tractable(
        self, *args: sympy.Expr, limitvar: sympy.Symbol = None, **hints: object
    ) -> sympy.Expr:
        # what sympy asks for before it takes a limit at infinity
        return self if limitvar not in self.free_symbols else eventually(args, limitvar, largest=self._largest)

    def _eval_simplify(self, **kwargs: object) -> sympy.Expr:
        return as_known(self)

    def _join(self, printer: StrPrinter, name: str) -> str:
        return f"{name}({', '.join(printer._print(a) for a in self.args)})"

    def _sympystr(self, printer: StrPrinter) -> str:
        return self._join(printer, type(self).__name__)

    _sympyrepr = _sympystr

    def _latex(self, printer: StrPrinter, exp: str | None = None) -> str:
        inside = ", ".join(printer._print(a) for a in self.args)
        text = rf"\{self._python}\left({inside}\right)"
        return text if exp is None else rf"{text}^{{{exp}}}"

    def _repr_latex_(self) -> str:
        """Return what a notebook shows."""
        cases = [(poly(a), o.label or o.op or "") for a, o in zip(self.args, self.owners, strict=True)]
        return rf"$\displaystyle {as_latex(cases, largest=self._largest)}$"

    def _pretty(self, printer: Any) -> Any:
        return printer._print_Function(sympy.Function(type(self).__name__)(*self.args))

    def _pythoncode(self, printer: StrPrinter) -> str:
        return self._join(printer, self._python)

    _lambdacode = _mpmathcode = _pythoncode

    def _numpycode(self, printer: StrPrinter) -> str:
        # maximum.reduce would need arguments of one shape; in pairs of pairs, as Python limits nested brackets
        join = printer._module_format(f"numpy.{self._numpy}")
        texts = [printer._print(a) for a in self.args]
        while len(texts) > 1:
            pairs = [texts[i : i + 2] for i in range(0, len(texts), 2)]
            texts = [f"{join}({', '.join(pair)})" if len(pair) > 1 else pair[0] for pair in pairs]
        return str(texts[0])

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


def _restore(cls: type[_Extremum], args: tuple[sympy.Expr, ...], owners: tuple[Owner, ...]) -> sympy.Expr:
    return cls(*args, owners=owners)


def as_expr(value: object) -> sympy.Expr:
    """Return a number or formula as sympy has it, or raise ShapeError: text and truth values are neither."""
    if held_by(value):
        return value
    try:
        # an array of NumPy's may hold anything, even where sympy takes it for a number
        known = isinstance(value, Number | sympy.Basic) and not isinstance(value, bool)
        expr = sympy.sympify(value, strict=True) if known else None
    except (sympy.SympifyError, TypeError, ValueError):
        expr = None
    if not isinstance(expr, sympy.Expr):
        raise ShapeError(f"{shown(value)}: expected a number or a formula in symbols from costgraph.dims")
    return expr


def _flat(cls: type[_Extremum], candidates: Sequence[tuple[Poly, Owner]]) -> list[tuple[Poly, Owner]]:
    """Take the arguments of a Max inside a Max as its own."""
    out: list[tuple[Poly, Owner]] = []
    for p, owner in candidates:
        inner = p.expr if len(p.terms) == 1 and p.generators() and len(p.generators()) == 1 else None
        if isinstance(inner, cls):
            out += zip(map(poly, inner.args), inner.owners, strict=True)
        else:
            out.append((p, owner))
    return out


def _build(cls: type[_Extremum], kept: list[tuple[Poly, Owner]]) -> sympy.Expr:
    if len(kept) == 1:
        return kept[0][0].expr
    kept.sort(key=lambda item: (len(item[0].terms), item[0].sort_key()))
    return _node(cls, [(p.expr, o) for p, o in kept])


def _node(cls: type[_Extremum], given: Sequence[tuple[sympy.Expr, Owner]]) -> sympy.Expr:
    out = sympy.Expr.__new__(cls, *(e for e, _ in given))
    out.owners = tuple(o for _, o in given)
    return out


def extremum(candidates: Sequence[tuple[Poly, Owner]], *, largest: bool = True) -> sympy.Expr:
    """Return the Max (or Min) of candidates that were pruned already, with their owners."""
    return _build(Max if largest else Min, list(candidates))


def least_of(expr: sympy.Expr, known: Relations) -> Rational | None:
    """Lower bound of a Max or Min from those of its arguments."""
    bounds = [lower(poly(a), known) for a in expr.args]
    if isinstance(expr, Max):
        return max((b for b in bounds if b is not None), default=None)
    return None if None in bounds else min(b for b in bounds if b is not None)


BOUNDS |= {Max: least_of, Min: least_of}
FUNCTIONS.update((Max, Min))


def at_least_zero(p: Poly) -> Poly:
    """Return max(0, p) as a polynomial: p itself where it is known not to be negative."""
    return poly(Max(0, p.expr))


def smaller(a: Poly, b: Poly) -> Poly:
    """Return min(a, b) as a polynomial."""
    return a if a == b else poly(Min(a.expr, b.expr))
