"""Max and Min of formulas, pruned by dominance.

They print, substitute, differentiate, lambdify and rewrite like sympy's classes. `sympy.Max` of twenty polynomials
takes seconds to build and minutes to nest, these take milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, ClassVar, NamedTuple

import sympy
from sympy.printing.str import StrPrinter

from ..errors import GraphError, ShapeError, UnsupportedError
from .conditions import conditioned, held_by, plain
from .dominance import BOUNDS, Relations, lower, prune
from .polynomial import Poly, Rational, generator, poly
from .symbols import FUNCTIONS, is_dimension, is_number_like, shown

__all__ = [
    "SimultaneousSubstitution",
    "SelectedBranch",
    "Rebuilder",
    "as_known",
    "eventually",
    "no_inverse",
    "piecewise",
    "slope",
    "as_latex",
    "as_text",
    "shared",
    "Max",
    "Min",
    "Owner",
    "extremum",
]


# -- sympy support -----------------------------------------------------------------------------------------------------
# Derivatives, Piecewise forms and limits of an extremum.


class SimultaneousSubstitution(sympy.Expr):  # type: ignore[misc]  # sympy has no types
    """Substitutes many numbers in a single pass, where sympy takes one pass per symbol."""

    __slots__ = ()

    def subs(self, *args: Any, **kwargs: Any) -> sympy.Expr:
        """Replace symbols as sympy does; the order of numbers is irrelevant."""
        rule = args[0] if len(args) == 1 and isinstance(args[0], dict) else {}
        if rule and all(k in self.free_symbols and isinstance(v, int | sympy.Integer) for k, v in rule.items()):
            return self.xreplace({k: sympy.Integer(v) for k, v in rule.items()})
        return super().subs(*args, **kwargs)


class SelectedBranch(SimultaneousSubstitution):
    """Value at the extreme key, the first among equals: the derivative of an extremum.

    `sign` is 1 for the largest key, -1 for the smallest; there is one value per key.
    """

    is_commutative = True
    is_real = True
    is_Function = True  # noqa: N815  # as below

    def __new__(cls, sign: int, keys: sympy.Tuple, values: sympy.Tuple) -> sympy.Expr:
        """Return the value itself if it is determined."""
        if len(set(values)) == 1:
            return values[0]
        if all(k.is_number for k in keys):
            return values[max(range(len(keys)), key=lambda i: (sign * keys[i], -i))]
        return sympy.Expr.__new__(cls, sympy.Integer(sign), keys, values)

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr | None:
        try:
            values = {old.name: poly(new)} if old in self.free_symbols else {}
            keys, slopes = ([poly(e).bind(values).expr for e in exprs] for exprs in self.args[1:])
        except ShapeError:  # not representable in the algebra
            return None
        return SelectedBranch(self.args[0], sympy.Tuple(*keys), sympy.Tuple(*slopes))

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        sign, keys, values = self.args
        slopes = sympy.Tuple(*(slope(v, symbol) for v in values))
        if any(slopes) or symbol not in keys.free_symbols:
            return SelectedBranch(sign, keys, slopes)
        # zero except for the step where the case changes; `solve` would treat a plain 0 as constant
        return sympy.Expr.__new__(SelectedBranch, sign, keys, slopes)

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
        if not all(map(is_dimension, self.free_symbols)):  # inequality solvers would miss the steps
            raise _RefusedError(f"inequality of {shown(self)}, a slope of a maximum, expected the maximum itself")
        return self

    def _smtlib(self, printer: Any) -> str:
        return str(printer._print(self.rewrite(sympy.Piecewise)))

    def _code(self, printer: Any, choice: str) -> str:
        sign, keys, values = ([printer._print(e) for e in exprs] for exprs in ([self.args[0]], *self.args[1:]))
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
    """Differentiate a sum of monomials term by term, other expressions with sympy."""
    try:
        p = poly(expr)
    except ShapeError:
        return expr.diff(symbol)
    if any(symbol in generator(k).free_symbols for k in p.generators() if k[0] == "~"):
        return expr.diff(symbol)
    powers = {m: dict(m).get(symbol.name, 0) for m in p.terms}
    return (Poly({m: c * powers[m] for m, c in p.terms.items() if powers[m]}) / Poly({((symbol.name, 1),): 1})).expr


class Rebuilder:
    """Constructor that keeps an extremum's owners; sympy's printers read its `__name__`."""

    def __init__(self, kind: Callable[..., sympy.Expr], owners_of: Callable[..., Sequence[object] | None]) -> None:
        self.kind, self.owners_of, self.__name__ = kind, owners_of, kind.__name__

    def __call__(self, *args: object) -> sympy.Expr:
        """Return the extremum, without owners if the argument count differs."""
        return self.kind(*args, owners=self.owners_of(args))


def piecewise(cases: Sequence[sympy.Expr], values: Sequence[sympy.Expr], *, largest: bool) -> sympy.Expr:
    """Return the value in the extreme case, the first among equals, as an unevaluated Piecewise."""
    dominates = sympy.Ge if largest else sympy.Le
    branches = [
        (value, sympy.And(*(dominates(case, other, evaluate=False) for other in cases[i:]), evaluate=False))
        for i, (case, value) in enumerate(zip(cases[:-1], values, strict=False), start=1)
    ]
    return sympy.Piecewise(*branches, (values[-1], True), evaluate=False)


def as_known(expr: sympy.Expr) -> sympy.Expr:
    """Return an expression itself, or rewritten as Piecewise if sympy has inserted its own symbol.

    sympy does so when it searches for a period, and does not terminate for unknown functions with several arguments.
    """
    return expr if all(map(is_dimension, expr.free_symbols)) else expr.rewrite(sympy.Piecewise)


class _RefusedError(UnsupportedError, NotImplementedError):
    """Refusal expected by users of this library and by sympy's solvers."""


def no_inverse(expr: sympy.Expr) -> UnsupportedError:
    """Return the error for `solve`, which requests an inverse: an equation may hold for many sizes."""
    return _RefusedError(
        f"solve of an equation with {shown(expr)}: it has no inverse, expected its cases: .rewrite(sympy.Piecewise)"
    )


def eventually(cases: Sequence[sympy.Expr], growing: sympy.Symbol, *, largest: bool) -> sympy.Expr:
    """Return the case that holds as a symbol becomes large."""
    best = cases[0]
    for case in cases[1:]:
        gap = sympy.limit(case - best, growing, sympy.oo)
        if not (gap.is_extended_positive or gap.is_extended_negative):
            raise UnsupportedError(
                f"limit of a maximum: {case} and {best} differ by {gap} in the limit; expected one to dominate"
            )
        best = case if gap.is_extended_positive is largest else best
    return best


# -- printing ----------------------------------------------------------------------------------------------------------
# A maximum is printed as the part common to all cases, then one case per line with its owner.

_SPECIAL = re.compile(r"([#$%&_{}])")


def shared(cases: Sequence[Poly]) -> tuple[Poly, list[Poly]]:
    """Split sums into a common part, with the smallest coefficient of each monomial, and the remainders.

    Examples
    --------
    >>> from costgraph.algebra.polynomial import poly
    >>> from costgraph.algebra.symbols import dims
    >>> B, D = dims("B D")
    >>> shared([poly(3*B + D), poly(2*B)])
    (2*B, [B + D, 0])
    """
    smallest = {m: min(p.terms.get(m, 0) for p in cases) for m in sorted({m for p in cases for m in p.terms})}
    common = Poly({m: c for m, c in smallest.items() if c})
    return common, [p - common for p in cases]


def as_text(cases: Iterable[tuple[Poly, str]], *, largest: bool = True) -> str:
    """Format the cases in a maximum or minimum as lines of text."""
    formulas, owners = zip(*cases, strict=True)
    common, rests = shared(formulas) if len(formulas) > 1 else (Poly({}), formulas)
    texts = [str(remainder.expr) for remainder in rests]
    wide = max(map(len, texts))
    lines = [f"{text:{wide}}  {owner}".rstrip() for text, owner in zip(texts, owners, strict=True)]
    if len(lines) == 1:
        return lines[0]
    head = f"{common.expr} + the" if common else "the"
    return "\n  ".join([f"{head} {'largest' if largest else 'smallest'} of", *lines])


def as_latex(cases: Iterable[tuple[Poly, str]], *, largest: bool = True) -> str:
    r"""Format the cases in a maximum or minimum as LaTeX for math mode, one case per line."""
    formulas, owners = zip(*cases, strict=True)
    common, rests = shared(formulas) if len(formulas) > 1 else (Poly({}), formulas)
    words = [_SPECIAL.sub(r"\\\1", owner) for owner in owners]
    lines = [sympy.latex(r.expr) + (rf" & \text{{{w}}}" if w else "") for r, w in zip(rests, words, strict=True)]
    if len(lines) == 1:
        return str(lines[0])
    head = f"{sympy.latex(common.expr)} + " if common else ""
    return rf"{head}\{'max' if largest else 'min'}\begin{{cases}}" + r" \\ ".join(lines) + r"\end{cases}"


# -- extremum ----------------------------------------------------------------------------------------------------------


class Owner(NamedTuple):
    """Owner of a case."""

    op: str | None = None
    """Name of the op, None for formulas outside a graph."""
    phase: str | None = None
    """Phase of the op: forward, recompute, backward or optimizer."""
    label: str = ""
    """Description for readers."""
    roles: tuple[tuple[str, Poly], ...] = ()
    """Named summands of the argument."""

    def bound(self, values: Mapping[str, Poly]) -> Owner:
        """Return the owner with symbols replaced."""
        return self._replace(roles=tuple((role, p.bind(values)) for role, p in self.roles)) if self.roles else self

    @property
    def key(self) -> tuple[object, ...]:
        """Sortable identity."""
        return self.op or "", self.phase or "", self.label, tuple((role, p.sort_key()) for role, p in self.roles)


class _Extremum(SimultaneousSubstitution):
    """Base class for Max and Min; arguments are pruned on construction."""

    __slots__ = ("owners",)
    is_commutative = True
    is_extended_real = True
    is_real = True
    is_Function = True  # noqa: N815  # sympy's naming: otherwise `solve` treats it as an unknown
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
        cases = list(zip(map(plain, map(as_expr, args)), owners or [Owner()] * len(args), strict=True))
        try:
            built = _build(cls, prune(_flat(cls, [(poly(e), o) for e, o in cases]), largest=cls._largest))
            return conditioned(built, held_by(*args))
        except ShapeError:
            if not all(is_number_like(e) for e, _ in cases):
                raise
        # floats, and symbols that sympy inserts temporarily: unchanged
        if all(e.is_number for e, _ in cases):
            return cls._sympy(*(e for e, _ in cases))
        return conditioned(_node(cls, sorted(cases, key=lambda item: sympy.default_sort_key(item[0]))), held_by(*args))

    @property
    def func(self) -> Any:
        """Constructor that keeps the owners, for sympy's traversals."""
        if not any(o.op or o.phase for o in self.owners):
            return type(self)
        return Rebuilder(type(self), self._owners_of)

    def _owners_of(self, args: Sequence[sympy.Expr]) -> list[Owner] | None:
        """Return the owners for replaced arguments; changed arguments lose their summands."""
        if len(args) != len(self.owners):
            return None
        pairs = zip(args, self.args, self.owners, strict=True)
        return [owner if new == old else owner._replace(roles=()) for new, old, owner in pairs]

    def _hashable_content(self) -> tuple[object, ...]:
        return (*self.args, tuple(o.key for o in self.owners))  # sympy compares these with <

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.owners)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return self.__reduce__()  # sympy defines it for its own slots

    def _eval_subs(self, old: sympy.Expr, new: sympy.Expr) -> sympy.Expr | None:
        if new in (sympy.oo, -sympy.oo):  # probed by sympy's inequality solvers
            return self._sympy(*(a.subs(old, new) for a in self.args))
        return self._bound({old: new})

    def _xreplace(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> tuple[sympy.Basic, bool]:
        if not isinstance(rule, Mapping):  # sympy's tools may pass a function of nodes
            return super()._xreplace(rule)
        if self in rule:
            return rule[self], True
        if self.free_symbols.isdisjoint(rule) and all(k.is_Symbol for k in rule):
            return self, False
        bound = self._bound(rule)
        return super()._xreplace(rule) if bound is None else (bound, True)

    def _bound(self, rule: Mapping[sympy.Basic, sympy.Basic]) -> sympy.Expr | None:
        """Replace symbols without intermediate sympy sums; None for other rules."""
        if not all(k.is_Symbol for k in rule):
            return None
        try:
            return self.bound({k.name: poly(v) for k, v in rule.items() if k in self.free_symbols})
        except ShapeError:  # not representable in the algebra
            return None

    def bound(self, values: Mapping[str, Poly]) -> sympy.Expr:
        """Replace symbols in every argument; ShapeError if a number would be too large."""
        candidates = [(poly(a).bind(values), o.bound(values)) for a, o in zip(self.args, self.owners, strict=True)]
        return _build(type(self), prune(_flat(type(self), candidates), largest=self._largest))

    def _eval_derivative(self, symbol: sympy.Symbol) -> sympy.Expr:
        # the derivative of the extreme argument
        slopes = sympy.Tuple(*(slope(a, symbol) for a in self.args))
        return SelectedBranch(1 if self._largest else -1, sympy.Tuple(*self.args), slopes)

    def _eval_is_positive(self) -> bool | None:
        signs = [a.is_positive for a in self.args]
        return True if (any if self._largest else all)(f is True for f in signs) else None

    def _eval_is_integer(self) -> bool | None:
        return True if all(a.is_integer for a in self.args) else None

    def _eval_evalf(self, prec: int) -> sympy.Expr:
        return self._sympy(*(a._evalf(prec) for a in self.args)) if not self.free_symbols else None

    def _eval_rewrite(self, rule: Any, args: Sequence[sympy.Expr], **hints: object) -> sympy.Expr | None:
        # sympy's own class compares its arguments when evaluated, which is slow
        return self._sympy(*args, evaluate=False) if rule is self._sympy else None

    def _eval_rewrite_as_Piecewise(self, *args: sympy.Expr, **hints: object) -> sympy.Expr:  # noqa: N802  # sympy's naming
        return piecewise(args, args, largest=self._largest)

    _smtlib = SelectedBranch._smtlib

    def inverse(self, argindex: int = 1) -> None:
        """Raise UnsupportedError; `sympy.solve` calls it."""
        raise no_inverse(self)

    def _eval_rewrite_as_tractable(
        self, *args: sympy.Expr, limitvar: sympy.Symbol = None, **hints: object
    ) -> sympy.Expr:
        # called by sympy before limits at infinity
        return self if limitvar not in self.free_symbols else eventually(args, limitvar, largest=self._largest)

    def _eval_simplify(self, **kwargs: object) -> sympy.Expr:
        return as_known(self)

    def _join(self, printer: StrPrinter, name: str) -> str:
        return f"{name}({', '.join(printer._print(a) for a in self.args)})"

    def _sympystr(self, printer: StrPrinter) -> str:
        return self._join(printer, type(self).__name__)

    _sympyrepr = _sympystr

    def _latex(self, printer: StrPrinter, exp: str | None = None) -> str:
        arguments = ", ".join(printer._print(a) for a in self.args)
        text = rf"\{self._python}\left({arguments}\right)"
        return text if exp is None else rf"{text}^{{{exp}}}"

    def _repr_latex_(self) -> str:
        """Return the LaTeX form for notebooks."""
        cases = [(poly(a), o.label or o.op or "") for a, o in zip(self.args, self.owners, strict=True)]
        return rf"$\displaystyle {as_latex(cases, largest=self._largest)}$"

    def _pretty(self, printer: Any) -> Any:
        return printer._print_Function(sympy.Function(type(self).__name__)(*self.args))

    def _pythoncode(self, printer: StrPrinter) -> str:
        return self._join(printer, self._python)

    _lambdacode = _mpmathcode = _pythoncode

    def _numpycode(self, printer: StrPrinter) -> str:
        # maximum.reduce needs equal shapes; a balanced tree avoids Python's limit on nested brackets
        join = printer._module_format(f"numpy.{self._numpy}")
        texts = [printer._print(a) for a in self.args]
        while len(texts) > 1:
            pairs = [texts[i : i + 2] for i in range(0, len(texts), 2)]
            texts = [f"{join}({', '.join(pair)})" if len(pair) > 1 else pair[0] for pair in pairs]
        return str(texts[0])

    _scipycode = _numpycode


class Max(_Extremum):
    """Maximum of formulas, without dominated arguments.

    Parameters
    ----------
    *args : sympy.Expr or int
        Formulas in symbols of `costgraph.dims`.
    owners : sequence of Owner, optional
        Owner of each argument, as reported by `regimes`.

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
    """Minimum of formulas, without dominated arguments.

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
    """Return a number or formula as a sympy expression; ShapeError for other values such as text and bools."""
    if held_by(value):
        return value
    try:
        # NumPy arrays may hold anything, even if sympy accepts them as numbers
        is_formula = isinstance(value, Number | sympy.Basic) and not isinstance(value, bool)
        expr = sympy.sympify(value, strict=True) if is_formula else None
    except (sympy.SympifyError, TypeError, ValueError):
        expr = None
    if not isinstance(expr, sympy.Expr):
        raise ShapeError(f"{shown(value)}: expected a number or a formula in symbols from costgraph.dims")
    return expr


def _flat(cls: type[_Extremum], candidates: Sequence[tuple[Poly, Owner]]) -> list[tuple[Poly, Owner]]:
    """Flatten a Max inside a Max, or a Min inside a Min."""
    out: list[tuple[Poly, Owner]] = []
    for p, owner in candidates:
        inner = p.expr if len(p.terms) == 1 and p.generators() and len(p.generators()) == 1 else None
        if isinstance(inner, cls):
            out += zip(map(poly, inner.args), inner.owners, strict=True)
        else:
            out.append((p, owner))
    return out


def _build(cls: type[_Extremum], cases: list[tuple[Poly, Owner]]) -> sympy.Expr:
    if len(cases) == 1:
        return cases[0][0].expr
    cases.sort(key=lambda item: (len(item[0].terms), item[0].sort_key()))
    return _node(cls, [(p.expr, o) for p, o in cases])


def _node(cls: type[_Extremum], cases: Sequence[tuple[sympy.Expr, Owner]]) -> sympy.Expr:
    out = sympy.Expr.__new__(cls, *(e for e, _ in cases))
    out.owners = tuple(o for _, o in cases)
    return out


def extremum(candidates: Sequence[tuple[Poly, Owner]], *, largest: bool = True) -> sympy.Expr:
    """Return the Max or Min of pruned candidates, with their owners."""
    return _build(Max if largest else Min, list(candidates))


def least_of(expr: sympy.Expr, relations: Relations) -> Rational | None:
    """Return a lower bound for a Max or Min from bounds on its arguments."""
    bounds = [lower(poly(a), relations) for a in expr.args]
    if isinstance(expr, Max):
        return max((b for b in bounds if b is not None), default=None)
    return None if None in bounds else min(b for b in bounds if b is not None)


BOUNDS |= {Max: least_of, Min: least_of}
FUNCTIONS.update((Max, Min))


def at_least_zero(p: Poly) -> Poly:
    """Return max(0, p) as a polynomial, simplified to p if p is known to be nonnegative."""
    return poly(Max(0, p.expr))


def smaller(a: Poly, b: Poly) -> Poly:
    """Return min(a, b) as a polynomial."""
    return a if a == b else poly(Min(a.expr, b.expr))
