"""Formula and sizes -> number, or a NumPy function for a whole sweep. Symbols end here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from .dominance import solve
from .errors import BindingError, ShapeError
from .extremum import Max, Min
from .graph import Graph
from .polynomial import Poly, Rational, as_poly, generator, poly
from .symbols import shorten

__all__ = ["Formula", "answer", "bindings", "compile", "evaluate", "known_names", "need_bound"]

#: What a question answers with: a number once every symbol is bound, else a formula.
Formula = int | float | sympy.Expr

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


def _delicate(graph: Graph) -> list[tuple[Poly, str]]:
    """Sizes that may turn out not to be positive whole numbers, each with a tensor that has it."""
    if "delicate" not in graph.cache:
        found: dict[Poly, str] = {}
        for g in graph.bodies():
            for t in g.tensors:
                for i, n in enumerate(t.sizes):
                    if n not in found and not _always_size(n):
                        found[n] = f"axis {i} of {t.name!r}"
            for op in g.ops:
                if "count" in op.attrs and not _always_size(op.attrs["count"]):
                    found.setdefault(op.attrs["count"], f"count of {op.name!r}")
        graph.cache["delicate"] = list(found.items())
    out: list[tuple[Poly, str]] = graph.cache["delicate"]
    return out


def _always_size(p: Poly) -> bool:
    return all(
        isinstance(c, int) and c > 0 and all(e > 0 and k[0] != "~" for k, e in m) for m, c in p.terms.items()
    )


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
                f"{shorten(name)} is no dimension of graph {graph.root.name!r}, expected one of {', '.join(sorted(names))}"
            )
    chosen = {**{k: v for k, v in graph.root.defaults.items() if k in names}, **dims}
    values = {name: as_poly(size_of(name, value)) for name, value in chosen.items()}
    _apply_equalities(graph, values)
    for relation in graph.root.relations.relations:
        relation.check(values)
    for size, place in _delicate(graph):
        if size.names() <= values.keys():
            bound = size.bind(values).constant
            if bound is not None and (not isinstance(bound, int) or bound < 1):
                used = ", ".join(f"{n}={values[n]}" for n in sorted(size.names()))
                raise BindingError(
                    f"{used}: {place} has size {size} = {bound}, expected a positive whole number"
                )
    return values


def size_of(name: str, value: object) -> int:
    """Return a bound size, or raise BindingError if it is not a positive integer."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        if isinstance(value, sympy.Integer):
            value = int(value)
        else:
            raise BindingError(f"{name}={value!r}: expected a positive integer")
    size = int(value.__index__())
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
            raise BindingError(
                f"assumption {relation.text!r} makes {name}={number}, expected a positive integer"
            )
        for k, v in values.items():
            values[k] = v.bind({name: value})
        values[name] = value


# -- answers -----------------------------------------------------------------------------------------------------


def number(value: Rational) -> int | float:
    """Return an exact number as Python's: int where it is whole."""
    return int(value) if isinstance(value, int) or value.denominator == 1 else float(value)


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
    return value if value.free_symbols else float(value)


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
    formula = sympy.sympify(formula, strict=True)
    names = {s.name for s in formula.free_symbols}
    for name in dims:
        if name not in names:
            raise BindingError(
                f"{shorten(name)} is not in the formula, expected one of {', '.join(sorted(names)) or 'none'}"
            )
    missing = sorted(names - dims.keys())
    if missing:
        raise BindingError(f"evaluate: no size for {', '.join(missing)}")
    values = {name: as_poly(size_of(name, value)) for name, value in dims.items()}
    try:
        return answer(poly(formula).bind(values))  # type: ignore[return-value]  # nothing is left to bind
    except ShapeError:  # floats and functions that costs do not have
        return answer(formula.subs({k: v.expr for k, v in values.items()}))  # type: ignore[return-value]


# -- sweeps ------------------------------------------------------------------------------------------------------

_Chunk = np.ndarray[Any, np.dtype[np.float64]]
_Plan = Callable[[dict[str, Any]], Any]


def _plan(p: Poly) -> _Plan:
    """Nest a polynomial around its commonest generators (Horner): fewer passes over the arrays."""
    counts: dict[str, int] = {}
    for m in p.terms:
        for k, e in m:
            if e > 0:
                counts[k] = counts.get(k, 0) + 1
    best = max(sorted(counts), key=counts.__getitem__, default=None)
    if best is None or counts[best] < 2:
        return _sum(p)
    over = Poly({((best, 1),): 1})
    inside = Poly({m: c for m, c in p.terms.items() if dict(m).get(best, 0) > 0}) / over
    rest = Poly({m: c for m, c in p.terms.items() if dict(m).get(best, 0) <= 0})
    factor, inner, outer = _generator(best), _plan(inside), _plan(rest) if rest else None
    if outer is None:
        return lambda env: inner(env) * factor(env)

    def nested(env: dict[str, Any]) -> Any:
        product = inner(env) * factor(env)
        # the product is an array of this call alone
        return (
            np.add(product, outer(env), out=product)
            if isinstance(product, np.ndarray)
            else product + outer(env)
        )

    return nested


def _sum(p: Poly) -> _Plan:
    terms = [(float(c), [(_generator(k), e) for k, e in m]) for m, c in p.terms.items()]

    def total(env: dict[str, Any]) -> Any:
        out: Any = 0.0
        for c, factors in terms:
            part: Any = c
            for factor, e in factors:
                part = part * (factor(env) if e == 1 else factor(env) ** float(e))
            out = out + part
        return out

    return total


def _generator(key: str) -> _Plan:
    if key[0] != "~":
        return lambda env: env[key]
    expr = generator(key)
    parts = [_plan(poly(a)) for a in expr.args]
    if isinstance(expr, Max | Min):
        join = np.maximum if isinstance(expr, Max) else np.minimum
        return lambda env: _fold(join, [part(env) for part in parts])
    if isinstance(expr, sympy.floor | sympy.ceiling):
        step = np.floor if isinstance(expr, sympy.floor) else np.ceil
        return lambda env: step(parts[0](env))
    if isinstance(expr, sympy.Pow):
        return lambda env: np.power(np.asarray(parts[0](env), dtype=np.float64), parts[1](env))
    names = sorted(s.name for s in expr.free_symbols)
    call = sympy.lambdify([sympy.Symbol(n, integer=True, positive=True) for n in names], expr, "numpy")
    return lambda env: call(*(env[n] for n in names))


def _fold(join: Any, values: list[Any]) -> Any:
    out = values[0]
    for v in values[1:]:
        out = join(out, v)
    return out


class Compiled:
    """A formula as a function of named arrays; made by `compile`."""

    def __init__(self, formula: Formula) -> None:
        self.formula = sympy.sympify(formula, strict=True)
        self.names: tuple[str, ...] = tuple(sorted(s.name for s in self.formula.free_symbols))
        """Arguments, in alphabetical order."""
        self._plan = _plan(poly(self.formula))

    def __repr__(self) -> str:
        return f"Compiled({', '.join(self.names)} -> {self.formula})"

    def __call__(self, **arrays: Any) -> Any:
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
            If a name is missing or unknown, or a size is not a positive integer.
        """
        if arrays.keys() != set(self.names):
            raise BindingError(
                f"compiled formula: got {sorted(arrays)}, expected sizes for {list(self.names)}"
            )
        if all(isinstance(v, int) for v in arrays.values()):
            return evaluate(self.formula, **arrays)
        operands = [_checked(name, arrays[name]) for name in self.names]
        loop = np.nditer(
            [*operands, None],
            flags=["external_loop", "buffered", "zerosize_ok"],
            op_flags=[["readonly"]] * len(operands) + [["writeonly", "allocate"]],  # type: ignore[list-item]
            op_dtypes=[np.dtype(np.float64)] * (len(operands) + 1),
            casting="unsafe",
            buffersize=_CHUNK,
        )
        with loop:
            for *chunk, out in loop:
                out[...] = self._plan(dict(zip(self.names, chunk, strict=True)))
            return loop.operands[-1]


def _checked(name: str, value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or (array.size and not (array.min() >= 1)):
        raise BindingError(f"{name}: array of {array.dtype} from {value!r:.80}, expected positive integers")
    if (
        array.dtype.kind == "f"
        and array.size
        and not (np.isfinite(array).all() and (array == np.floor(array)).all())
    ):
        raise BindingError(f"{name}: array of {array.dtype} from {value!r:.80}, expected positive integers")
    return array


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
