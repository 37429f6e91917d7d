"""Formula and sizes -> number, or a NumPy function for a whole sweep. Symbols end here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from operator import index
from typing import Any, TypeAlias

import numpy as np
import sympy

from .dominance import solve
from .errors import BindingError, ShapeError
from .extremum import as_expr
from .graph import Graph
from .polynomial import Poly, Rational, as_poly, poly
from .sweep import checked, lambdified, plan
from .symbols import check_symbol, shorten

__all__ = ["Formula", "answer", "bindings", "compile", "evaluate", "known_names", "need_bound"]

#: What a question answers with: a number once every symbol is bound, else a formula.
Formula: TypeAlias = int | float | sympy.Expr

# A chunk of each array and of the sums built from it stays in the second-level cache.
_CHUNK = 1 << 14


# -- sizes of a graph --------------------------------------------------------------------------------------------


def _polys(value: object) -> Iterable[Poly]:
    """Yield the formulas among the attributes of an op."""
    if isinstance(value, Poly):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _polys(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _polys(v)
    elif hasattr(value, "window"):
        yield from _polys(value.window)


def known_names(graph: Graph) -> frozenset[str]:
    """Return the names of all dimensions of a graph, bodies included."""
    if "names" not in graph.cache:
        found: set[str] = set()
        seen: set[Poly] = set()
        for g in graph.bodies():
            for t in g.tensors:
                seen.update(t.sizes)
            for op in g.ops:
                seen.update(p for v in op.attrs.values() for p in _polys(v))
        for p in seen:
            found |= p.names()
        for relation in graph.root.relations.relations:
            found |= relation.difference.names()
        graph.cache["names"] = frozenset(found)
    names: frozenset[str] = graph.cache["names"]
    return names


def _delicate(graph: Graph) -> list[tuple[Poly, str, int]]:
    """Sizes that may turn out not to be whole numbers or too small, each with what has it and its least value."""
    if "delicate" not in graph.cache:
        found: dict[Poly, str] = {}
        rooms: dict[Poly, str] = {}
        for g in graph.bodies():
            for t in g.tensors:
                for i, n in enumerate(t.sizes):
                    if n not in found and not _always_size(n):
                        found[n] = f"axis {i} of {t.name!r}"
            for op in g.ops:
                if "count" in op.attrs and not _always_size(op.attrs["count"]):
                    found.setdefault(op.attrs["count"], f"count of {op.name!r}")
                if "room" in op.attrs and not _always_size(op.attrs["room"]):
                    rooms.setdefault(op.attrs["room"], f"what is left beyond {op.name!r}")
        sizes = [(p, place, 1) for p, place in found.items()]
        graph.cache["delicate"] = sizes + [(p, place, 0) for p, place in rooms.items()]
    out: list[tuple[Poly, str, int]] = graph.cache["delicate"]
    return out


def _always_size(p: Poly) -> bool:
    return all(isinstance(c, int) and c > 0 and all(e > 0 and k[0] != "~" for k, e in m) for m, c in p.terms.items())


def bindings(graph: Graph, dims: Mapping[str, object]) -> dict[str, Poly]:
    """Return what to put in for each bound symbol: the graph's defaults, overridden by the given sizes.

    Parameters
    ----------
    graph : Graph
        Its dimensions are the names that can be bound.
    dims : mapping of str to int
        Sizes.

    Returns
    -------
    dict of str to Poly
        Numbers, and where an assumed equality ties an open symbol to others, a formula in those.

    Raises
    ------
    BindingError
        If a name is not in the graph, a size is not a positive integer or against an assumption, or a size of a
        tensor is then not a positive whole number.
    """
    names = known_names(graph)
    for name in dims:
        if name not in names:
            raise BindingError(
                f"{shorten(name)} is no dimension of graph {graph.root.name!r}, "
                f"expected one of {', '.join(sorted(names))}"
            )
    chosen = {**{k: v for k, v in graph.root.defaults.items() if k in names}, **dims}
    values = {name: as_poly(size_of(name, value)) for name, value in chosen.items()}
    _apply_equalities(graph, values)
    for relation in graph.root.relations.relations:
        relation.check(values)
    for size, place, least in _delicate(graph):
        if size.names() <= values.keys():
            bound = size.bind(values).constant
            if bound is not None and (not isinstance(bound, int) or bound < least):
                used = ", ".join(f"{n}={values[n]}" for n in sorted(size.names()))
                expected = "a positive whole number" if least else "a whole number that is not negative"
                raise BindingError(f"{used}: {place} has size {size} = {bound}, expected {expected}")
    return values


def size_of(name: str, value: object) -> int:
    """Return a bound size, or raise BindingError if it is not a positive integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        size = index(value)  # type: ignore[arg-type]  # what has no such method is refused here
    except TypeError:
        raise BindingError(f"{name}={value!r:.60}: expected a positive integer") from None
    if size < 1:
        raise BindingError(f"{name}={size}: expected a positive integer")
    return size


def _apply_equalities(graph: Graph, values: dict[str, Poly]) -> None:
    for relation in graph.root.relations.relations:
        if not relation.equal:
            continue
        found = solve(relation.difference.bind(values), relation.subject)
        if found is None:
            continue
        name, value = found
        number = value.constant
        if number is not None and (not isinstance(number, int) or number < 1):
            raise BindingError(f"assumption {relation.text!r} makes {name}={number}, expected a positive integer")
        for k, v in values.items():
            values[k] = v.bind({name: value})
        values[name] = value


# -- answers -----------------------------------------------------------------------------------------------------


def number(value: Rational) -> int | float:
    """Return an exact number as Python's: int where it is whole."""
    try:
        return int(value) if value.denominator == 1 else float(value)
    except OverflowError:
        raise BindingError("a fraction beyond 1.8e308: expected smaller sizes") from None


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
