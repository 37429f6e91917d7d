"""Formula and sizes -> number, or a NumPy function for a whole sweep. Symbols end here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from typing import Any, TypeAlias

import numpy as np
import sympy

from ..algebra.carried import conditioned, held_by, plain
from ..algebra.conditions import Asked, Validity
from ..algebra.extremum import as_expr
from ..algebra.generators import cached
from ..algebra.polynomial import Poly, Rational, as_poly, poly
from ..algebra.symbols import check_symbol, is_number_like, shorten, shown, symbol
from ..errors import BindingError, CostGraphError, ShapeError
from ..graph.arguments import need_choice
from ..graph.sizes import Bindings, size_of
from .exactly import At, NoRuleError, allowed, exactly
from .sweep import aligned, checked, in_chunks, lambdified, outside, plan, too_few

__all__ = ["Formula", "answer", "bound_answer", "compile", "evaluate", "need_bound", "number", "real"]

#: What a question answers with: a number once every symbol is bound, else a formula.
Formula: TypeAlias = int | float | sympy.Expr


def number(value: Rational) -> int | float:
    """Return an exact number as Python's: int where it is whole."""
    try:
        return int(value) if value.denominator == 1 else float(value)
    except OverflowError:
        raise BindingError("a fraction beyond 1.8e308: expected smaller sizes") from None


def real(value: Rational) -> float:
    """Return an exact number as a float."""
    try:
        return float(value)
    except OverflowError:
        raise BindingError("a number beyond 1.8e308: expected smaller sizes") from None


def answer(value: Poly | sympy.Expr, held: Iterable[Validity] = ()) -> Formula:
    """Return a formula as it is handed out: a Python number once no symbol is left, int where it is whole.

    `held` is what it holds for, beside what an expression carries already.
    """
    if isinstance(value, Poly):
        constant = value.constant
        if constant is not None:
            return number(constant)
        value = value.expr
    if value.is_Rational:
        return number(Fraction(int(value.p), int(value.q)))
    if value.free_symbols:
        return conditioned(value, dict.fromkeys((*held_by(value), *held)))
    if value.is_finite is not True or value.is_real is not True:
        raise BindingError(f"{shorten(str(value))}: expected a finite number")
    try:  # the largest of numbers, as of the stages of a pipeline
        return number(Fraction(exactly(poly(value))({})))
    except (NoRuleError, ShapeError, ZeroDivisionError):
        return float(value)


def bound_answer(value: Poly, values: Bindings) -> Formula:
    """Return what was derived from a graph, with sizes put in, as it is handed out."""
    return answer(value.bind(values), values.held)


def need_bound(formulas: Iterable[Formula], question: str) -> None:
    """Raise BindingError if a symbol is left in what has to be a number."""
    left = {s.name for f in formulas if isinstance(f, sympy.Expr) for s in f.free_symbols}
    if left:
        raise BindingError(f"{question}: expected numbers, still unbound: {', '.join(sorted(left))}")


def evaluate(formula: Formula, /, **dims: int) -> int | float:
    """Put sizes into a formula.

    Parameters
    ----------
    formula : sympy.Expr or number
        A formula in symbols of `costgraph.dims`.
    **dims : int
        A size for every symbol.

    Returns
    -------
    int or float
        Exact: int where the number is whole.

    Raises
    ------
    BindingError
        If a symbol is left, a name is not in the formula, a size is not a positive integer or another one than the
        formula was derived with, or the graph that the formula was derived from refuses the sizes.

    Examples
    --------
    >>> from costgraph import dims
    >>> N, D = dims("N D")
    >>> evaluate(6*N*D, N=70*10**9, D=15*10**12)
    6300000000000000000000000
    """
    formula = as_expr(formula)
    held, formula = held_by(formula), plain(formula)
    names, at = _prepared(formula)
    asked = names.union(*(v.names for v in held)) if held else names
    dims = _left_open(dims, asked, held)
    for name in dims:
        if name not in asked:
            raise BindingError(
                f"{shorten(name)} is not in the formula, expected one of {', '.join(sorted(names)) or 'none'}; a size "
                f"that a preset has bound is given to the question that derives the formula"
            )
    missing = sorted(names - dims.keys())
    if missing:
        raise BindingError(f"evaluate: no size for {', '.join(missing)}")
    sizes = {name: size_of(name, value) for name, value in dims.items()}
    # what follows from a size that is not in the formula is looked at closely
    found = None if at is None or len(sizes) > len(names) else _at_once(at, sizes, held)
    return _in_full(formula, sizes, held) if found is None else number(found)


def _left_open(sizes: Mapping[str, Any], asked: Collection[str], held: Iterable[Validity]) -> dict[str, Any]:
    """Leave out sizes that a formula was derived with; BindingError for others in their place."""
    left = dict(sizes)
    bound = {name: p for v in held for name, p in v.values if name not in asked and p is not None and not p.names()}
    for name in sizes.keys() & bound.keys():
        if not np.all(np.asarray(left.pop(name), dtype=object) == bound[name].constant):
            raise BindingError(
                f"{name}={shown(sizes[name])}: the formula was derived with {name}={bound[name]}; give another size to "
                f"the question that derives it"
            )
    return left


def _at_once(at: At, sizes: Mapping[str, int], held: tuple[Validity, ...]) -> Rational | None:
    """Return the exact value; None where there is none, or where the formula is not known to hold."""
    try:
        return at(sizes) if all(allowed(v, sizes) for v in held) else None
    except (ZeroDivisionError, CostGraphError, NoRuleError):
        return None


def _in_full(formula: sympy.Expr, sizes: Mapping[str, int], held: tuple[Validity, ...]) -> int | float:
    """Return the value of a formula by putting sizes into it, or raise what is wrong with them."""
    values = {name: as_poly(size) for name, size in sizes.items()}
    try:
        for v in held:
            v.at(values)
        try:
            found = poly(formula)
        except ShapeError:  # floats, which costs do not have
            return _answered(formula.xreplace({symbol(k): v.expr for k, v in values.items()}))
        return _answered(found.bind(values))
    except ShapeError as error:  # a division by zero, or a number without end
        raise BindingError(f"{', '.join(f'{k}={v}' for k, v in values.items())}: {error}") from None


@cached(1 << 10)
def _prepared(formula: sympy.Expr) -> tuple[frozenset[str], At | None]:
    """Return the names in a formula, and what works it out in whole numbers, None where nothing does."""
    try:
        return _names_in(formula), exactly(poly(formula))
    except ShapeError:
        return _names_in(formula), None  # floats, which costs do not have


@lru_cache(maxsize=1 << 10)
def _names_in(formula: sympy.Expr) -> frozenset[str]:
    """Return the names of a formula's symbols, which a walk through all of it finds; ShapeError for those of others."""
    found = formula.free_symbols
    for s in found:
        check_symbol(s)
    return frozenset(s.name for s in found)


def _answered(value: Poly | sympy.Expr) -> int | float:
    out = answer(value)
    if not isinstance(out, int | float):
        raise BindingError(f"{shorten(str(out))}: expected a number")
    return out


# -- sweeps ------------------------------------------------------------------------------------------------------


class Compiled:
    """A formula as a function of named arrays; made by `compile`."""

    def __init__(self, formula: Formula, outside: str = "error") -> None:
        need_choice("compile: outside", outside, ("error", "nan"))
        self.formula = as_expr(formula)
        self.names: tuple[str, ...] = tuple(sorted(_names_in(plain(self.formula))))
        """Arguments, in alphabetical order."""
        self._held, self._outside = held_by(self.formula), outside
        try:
            self._plan = plan(poly(self.formula))
        except ShapeError:  # floats, which costs do not have
            if not is_number_like(plain(self.formula)):
                raise
            self._plan = lambdified(plain(self.formula))

    @cached_property
    def _asked(self) -> list[Asked]:
        return [a for v in self._held for a in v.tests()]

    def __reduce__(self) -> tuple[object, ...]:
        return Compiled, (self.formula, self._outside)

    def __repr__(self) -> str:
        return f"Compiled({', '.join(self.names)} -> {self.formula})"

    def __call__(self, /, **arrays: Any) -> Any:
        """Evaluate at every point.

        Parameters
        ----------
        **arrays : int or array_like of int
            Sizes by name; shapes broadcast, those of arrays with named dimensions, as of xarray, by these names.

        Returns
        -------
        int, float, numpy.ndarray or what was given with named dimensions
            Exact for Python integers; float64 of the common shape for arrays, since int64 would overflow silently.

        Raises
        ------
        BindingError
            If a name is missing or unknown, a size is not a positive integer, or a result is no finite number; where
            the graph that the formula was derived from refuses sizes, unless NaN was asked for.
        """
        arrays = _left_open(arrays, {*self.names, *(n for v in self._held for n in v.names)}, self._held)
        extra = arrays.keys() - set(self.names)
        if len(arrays) - len(extra) < len(self.names) or any(all(n not in v.names for v in self._held) for n in extra):
            raise BindingError(f"compiled formula: got {sorted(arrays)}, expected sizes for {list(self.names)}")
        if all(hasattr(v, "__index__") and not np.ndim(v) for v in arrays.values()):
            return evaluate(self.formula, **arrays)
        given, labelled = aligned(arrays)
        sizes = {name: checked(name, value) for name, value in given.items()}
        try:
            shape = np.broadcast_shapes(*(array.shape for array in sizes.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in sizes.items())
            raise BindingError(f"compiled formula: shapes {shapes}, expected such as broadcast") from None
        wrong = self._wrong(sizes, apart=bool(extra))
        if wrong is not None and self._outside == "error":
            self._refuse(np.broadcast_to(wrong, shape), sizes)
        found = self._worked_out([sizes[name] for name in self.names], finite=wrong is None)
        if wrong is not None or extra:
            found = np.where(np.broadcast_to(False if wrong is None else wrong, shape), np.nan, found)
        if wrong is not None and not (np.isfinite(found) | wrong).all():
            raise self._endless()
        return labelled(found)

    def _wrong(self, sizes: dict[str, np.ndarray[Any, Any]], *, apart: bool) -> np.ndarray[Any, Any] | None:
        """Return where the formula does not hold, in a shape that broadcasts, or None; by single points if `apart`."""
        if apart:  # what follows by equalities depends on the names that are given

            def refused(*point: Any) -> bool:
                return self._refusal(dict(zip(sizes, point, strict=True))) is not None

            every = np.asarray(np.frompyfunc(refused, len(sizes), 1)(*sizes.values()), dtype=bool)
            return every if every.any() else None
        found = [outside(self._asked, sizes)]
        for v in self._held:
            if v.counts is not None:
                found.append(too_few(v.counts, v.counted(), sizes))
        wrong = [w for w in found if w is not None]
        return reduce(np.logical_or, wrong) if wrong else None

    def _refuse(self, wrong: np.ndarray[Any, Any], sizes: dict[str, np.ndarray[Any, Any]]) -> None:
        """Raise what the graph says of the first point that is outside."""
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        point = {name: int(np.broadcast_to(array, wrong.shape)[at]) for name, array in sorted(sizes.items())}
        place = f"at [{', '.join(map(str, at))}] ({', '.join(f'{k}={shown(v)}' for k, v in point.items())})"
        raise BindingError(f"{place}: {self._refusal(point) or 'expected sizes that the formula holds for'}") from None

    def _refusal(self, point: Mapping[str, Any]) -> CostGraphError | None:
        values = {name: as_poly(int(size)) for name, size in point.items()}
        try:
            for v in self._held:
                v.at(values)
        except CostGraphError as error:
            return error
        return None

    def _endless(self) -> BindingError:
        return BindingError(f"{shorten(str(self.formula))}: beyond 1.8e308, or a division by zero")

    def _worked_out(self, operands: list[Any], *, finite: bool) -> Any:
        """Run the plan over arrays, in chunks."""
        loop = np.nditer([*operands, None], **in_chunks(len(operands), 1))
        with loop, np.errstate(all="ignore"):
            for *chunk, out in loop:
                out[...] = self._plan(dict(zip(self.names, chunk, strict=True)))
                if finite and not np.isfinite(out).all():
                    raise self._endless()
            return loop.operands[-1][()]


def compile(formula: Formula, /, *, outside: str = "error") -> Compiled:
    """Turn a formula into a function of named NumPy arrays.

    Parameters
    ----------
    formula : sympy.Expr or number
        A formula in symbols of `costgraph.dims`.
    outside : str
        error, or nan: what becomes of a point in an array that the graph refuses which the formula was derived from.

    Returns
    -------
    Compiled
        `f(B=..., S=...)`: exact for Python integers, float64 for arrays, which are worked on in chunks.

    Examples
    --------
    >>> import numpy as np
    >>> from costgraph import dims
    >>> N, D = dims("N D")
    >>> compile(6*N*D)(N=np.array([10**9, 70*10**9]), D=15*10**12)
    array([9.0e+22, 6.3e+24])
    """
    return Compiled(formula, outside)
