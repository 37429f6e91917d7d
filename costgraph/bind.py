"""Formula and sizes -> number, or a NumPy function for a whole sweep. Symbols end here."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import sympy

from .errors import BindingError, ShapeError
from .extremum import as_expr
from .polynomial import Poly, Rational, as_poly, poly
from .sizes import size_of
from .sweep import checked, lambdified, plan
from .symbols import check_symbol, shorten

__all__ = ["Formula", "answer", "compile", "evaluate", "need_bound", "number", "real"]

#: What a question answers with: a number once every symbol is bound, else a formula.
Formula: TypeAlias = int | float | sympy.Expr

# A chunk of each array and of the sums built from it stays in the second-level cache.
_CHUNK = 1 << 14


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


def answer(value: Poly | sympy.Expr) -> Formula:
    """Return a formula as it is handed out: a Python number once no symbol is left.

    Parameters
    ----------
    value : Poly or sympy.Expr
        What was derived.

    Returns
    -------
    int, float or sympy.Expr
        int where the number is whole.
    """
    if isinstance(value, Poly):
        constant = value.constant
        if constant is not None:
            return number(constant)
        value = value.expr
    if value.is_Rational:
        return number(Fraction(int(value.p), int(value.q)))
    if value.free_symbols:
        return value
    if value.is_finite is not True or value.is_real is not True:
        raise BindingError(f"{shorten(str(value))}: expected a finite number")
    return float(value)


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
        If a symbol is left, a name is not in the formula, or a size is not a positive integer.

    Examples
    --------
    >>> from costgraph import dims
    >>> N, D = dims("N D")
    >>> evaluate(6*N*D, N=70*10**9, D=15*10**12)
    6300000000000000000000000
    """
    formula = as_expr(formula)
    for s in formula.free_symbols:
        check_symbol(s)
    symbols = {s.name: s for s in formula.free_symbols}
    for name in dims:
        if name not in symbols:
            raise BindingError(
                f"{shorten(name)} is not in the formula, expected one of {', '.join(sorted(symbols)) or 'none'}"
            )
    missing = sorted(symbols.keys() - dims.keys())
    if missing:
        raise BindingError(f"evaluate: no size for {', '.join(missing)}")
    values = {name: as_poly(size_of(name, value)) for name, value in dims.items()}
    try:
        found = poly(formula)
    except ShapeError:  # floats, which costs do not have
        return _answered(formula.xreplace({symbols[k]: v.expr for k, v in values.items()}))
    try:
        return _answered(found.bind(values))
    except ShapeError as error:  # a division by zero, or a number without end
        raise BindingError(f"{', '.join(f'{k}={v}' for k, v in values.items())}: {error}") from None


def _answered(value: Poly | sympy.Expr) -> int | float:
    out = answer(value)
    if not isinstance(out, int | float):
        raise BindingError(f"{shorten(str(out))}: expected a number")
    return out


# -- sweeps ------------------------------------------------------------------------------------------------------


class Compiled:
    """A formula as a function of named arrays; made by `compile`."""

    def __init__(self, formula: Formula) -> None:
        self.formula = as_expr(formula)
        for s in self.formula.free_symbols:
            check_symbol(s)
        self.names: tuple[str, ...] = tuple(sorted(s.name for s in self.formula.free_symbols))
        """Arguments, in alphabetical order."""
        try:
            self._plan = plan(poly(self.formula))
        except ShapeError:  # floats, which costs do not have
            self._plan = lambdified(self.formula)

    def __repr__(self) -> str:
        return f"Compiled({', '.join(self.names)} -> {self.formula})"

    def __call__(self, /, **arrays: Any) -> Any:
        """Evaluate at every point.

        Parameters
        ----------
        **arrays : int or array_like of int
            Sizes by name; shapes broadcast.

        Returns
        -------
        int, float or numpy.ndarray
            Exact for Python integers; float64 of the common shape for arrays, since int64 would overflow silently.

        Raises
        ------
        BindingError
            If a name is missing or unknown, a size is not a positive integer, or a result is no finite number.
        """
        if arrays.keys() != set(self.names):
            raise BindingError(f"compiled formula: got {sorted(arrays)}, expected sizes for {list(self.names)}")
        if all(hasattr(v, "__index__") and not np.ndim(v) for v in arrays.values()):
            return evaluate(self.formula, **arrays)
        operands: list[Any] = [checked(name, arrays[name]) for name in self.names]
        settings: dict[str, Any] = {
            "flags": ["external_loop", "buffered", "zerosize_ok"],
            "op_flags": [["readonly"]] * len(operands) + [["writeonly", "allocate"]],
            "op_dtypes": [np.dtype(np.float64)] * (len(operands) + 1),
            "casting": "unsafe",
            "buffersize": _CHUNK,
        }
        loop = np.nditer([*operands, None], **settings)
        with loop, np.errstate(all="ignore"):
            for *chunk, out in loop:
                out[...] = self._plan(dict(zip(self.names, chunk, strict=True)))
                if not np.isfinite(out).all():
                    raise BindingError(f"{shorten(str(self.formula))}: beyond 1.8e308, or a division by zero")
            return loop.operands[-1][()]


def compile(formula: Formula, /) -> Compiled:
    """Turn a formula into a function of named NumPy arrays.

    Parameters
    ----------
    formula : sympy.Expr or number
        A formula in symbols of `costgraph.dims`.

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
    return Compiled(formula)
