"""Evaluate formulas: exactly at one point, or vectorized over NumPy arrays of sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from math import ceil, floor, lcm
from operator import itemgetter, mul
from typing import Any, TypeAlias

import numpy as np
import sympy

from ..algebra.conditions import LoopCounts, Requirement, Validity, conditioned, held_by, plain
from ..algebra.extremum import Max, Min, as_expr
from ..algebra.polynomial import Monomial, Poly, Rational, as_poly, cached, generator, poly
from ..algebra.symbols import check_symbol, is_number_like, shorten, shown, symbol
from ..errors import BindingError, CostGraphError, ShapeError
from ..ir.graph import Bindings, need_choice
from ..ir.graph import dimension_size as size_of

__all__ = [
    "At",
    "NoRuleError",
    "allowed",
    "exactly",
    "aligned",
    "checked",
    "in_chunks",
    "lambdified",
    "largest_met",
    "outside",
    "plan",
    "too_few",
    "Formula",
    "answer",
    "bound_answer",
    "compile",
    "evaluate",
    "need_bound",
    "number",
    "real",
]


# -- exact evaluation --------------------------------------------------------------------------------------------------
# Integer arithmetic, computing each product once.

At = Callable[[Mapping[str, Any]], Any]


class NoRuleError(Exception):
    """A value that is not a fraction, such as a logarithm."""


@cached(1 << 10)
def exactly(p: Poly) -> At:
    """Compile a sum to a function of sizes by name that returns an int or a Fraction.

    The function raises ZeroDivisionError, ShapeError or NoRuleError for sizes without such a value.

    Examples
    --------
    >>> from costgraph.algebra.symbols import dims
    >>> B, S = dims("B S")
    >>> exactly(poly(Max(30, 2*B) / S))({"B": 21, "S": 2})
    Fraction(21, 1)
    """
    return _joined([p], itemgetter(0))


def _joined(polys: Sequence[Poly], join: Callable[[list[Any]], Any]) -> At:
    """Compile several sums with a common denominator and a function `join` of their numerators."""
    lowest: dict[str, int] = {}
    for m in (m for p in polys for m in p.terms):
        for k, e in m:
            if e < 0:
                lowest[k] = min(e, lowest.get(k, 0))
    if len(polys) > 1 and any(k[0] == "~" for k in lowest):  # a negative denominator would reverse the comparison
        each = [_joined([p], itemgetter(0)) for p in polys]
        return lambda sizes: join([atom(sizes) for atom in each])
    scale = lcm(*(c.denominator for p in polys for c in p.terms.values()))
    divisor = tuple(sorted((k, -e) for k, e in lowest.items()))
    scaled = [p * Poly({divisor: scale}) for p in polys]
    monomials = list(dict.fromkeys(m for p in scaled for m in p.terms))
    rows = [_row(p, monomials) for p in scaled]
    products, divisors = _products(monomials), _products([divisor])
    atoms = {k: _atom(k) for m in (*monomials, divisor) for k, _ in m if k[0] == "~"}
    plain = scale == 1 and not divisor

    def at(sizes: Mapping[str, Any]) -> Any:
        if atoms:
            sizes = {**sizes, **{k: atom(sizes) for k, atom in atoms.items()}}
        values = products(sizes)
        value = join([sum(map(mul, numbers, pick(values))) for pick, numbers in rows])
        return value if plain else Fraction(value) / (scale * divisors(sizes)[0])

    return at


def _row(p: Poly, monomials: list[Monomial]) -> tuple[Callable[[list[Any]], Any], tuple[Any, ...]]:
    """Return a getter for the monomials of a sum, and their coefficients, padded so that the getter returns a tuple."""
    position = {m: i for i, m in enumerate(monomials)}
    terms = [(position[m], c) for m, c in p.terms.items()] + [(0, 0)] * 2
    if not monomials:
        return lambda values: (), ()
    return itemgetter(*(i for i, _ in terms)), tuple(c for _, c in terms)


def _products(monomials: list[Monomial]) -> Callable[[Mapping[str, Any]], list[Any]]:
    def values(sizes: Mapping[str, Any]) -> list[Any]:
        out = []
        for m in monomials:
            product = 1
            for key, power in m:
                product *= sizes[key] if power == 1 else sizes[key] ** power
            out.append(product)
        return out

    return values


def _atom(key: str) -> At:
    expr = generator(key)
    if isinstance(expr, Max | Min):
        return _joined([poly(a) for a in expr.args], max if isinstance(expr, Max) else min)
    if isinstance(expr, sympy.floor | sympy.ceiling):
        inner, step = exactly(poly(expr.args[0])), floor if isinstance(expr, sympy.floor) else ceil
        return lambda sizes: step(inner(sizes))
    if expr.is_Pow and expr.exp == -1:
        base = exactly(poly(expr.base))
        return lambda sizes: 1 / Fraction(base(sizes))
    names, generator_poly = [s.name for s in expr.free_symbols], Poly({((key, 1),): 1})

    def bound(sizes: Mapping[str, Any]) -> Any:
        value = generator_poly.bind({name: as_poly(sizes[name]) for name in names}).constant
        if value is None:
            raise NoRuleError
        return value

    return bound


# -- validity ----------------------------------------------------------------------------------------------------------


def allowed(validity: Validity, sizes: Mapping[str, int]) -> bool:
    """Whether a formula is known to hold for sizes; False if that needs a closer check."""
    return _validity_test(validity)(sizes)


@cached(1 << 7)
def _validity_test(validity: Validity) -> Callable[[Mapping[str, int]], bool]:
    requirements = [(a, a.amount.names(), exactly(a.amount)) for a in validity.tests()]
    counts = {name: (p.names(), exactly(p)) for name, p in validity.counted().items()} if validity.counts else {}

    def passes(sizes: Mapping[str, int]) -> bool:
        names_bound = sizes.keys()
        for a, names, at in requirements:
            if names <= names_bound:
                value = at(sizes)
                if not a.passed(value.numerator, value.denominator):
                    return False
            elif a.equal and not names.isdisjoint(names_bound):  # it implies other sizes
                return False
        met = {name: int(at(sizes)) for name, (names, at) in counts.items() if names <= names_bound}
        return validity.counts is None or validity.counts.hold(met)

    return passes


# -- vectorized evaluation ---------------------------------------------------------------------------------------------

# Chunks of each array and the sums built from it fit the L2 cache.
_CHUNK = 1 << 14

Plan = Callable[[dict[str, Any]], Any]


def plan(p: Poly) -> Plan:
    """Compile a polynomial with Horner's scheme around its most frequent generators, for fewer array passes."""
    counts: dict[str, int] = {}
    for m in p.terms:
        for k, e in m:
            if e > 0:
                counts[k] = counts.get(k, 0) + 1
    best = max(sorted(counts), key=counts.__getitem__, default=None)
    if best is None or counts[best] < 2:
        return _sum(p)
    # no division: a reciprocal times its sum is simplified by the product
    lower = {m: tuple((k, e - (k == best)) for k, e in m if (k, e) != (best, 1)) for m in p.terms}
    divisible = Poly({lower[m]: c for m, c in p.terms.items() if dict(m).get(best, 0) > 0})
    remainder = Poly({m: c for m, c in p.terms.items() if dict(m).get(best, 0) <= 0})
    factor, inner, outer = _generator(best), plan(divisible), plan(remainder) if remainder else None
    if outer is None:
        return lambda env: inner(env) * factor(env)

    def nested(env: dict[str, Any]) -> Any:
        product = inner(env) * factor(env)
        # the product is a temporary array
        return np.add(product, outer(env), out=product) if isinstance(product, np.ndarray) else product + outer(env)

    return nested


def _sum(p: Poly) -> Plan:
    try:
        terms = [(float(c), [_factor(k, e) for k, e in m]) for m, c in p.terms.items()]
    except OverflowError:
        raise BindingError(f"{p.brief():.60}: a coefficient beyond 1.8e308, expected smaller ones") from None

    def total(env: dict[str, Any]) -> Any:
        out: Any = None
        for c, factors in terms:
            term: Any = c
            for factor in factors:
                term = term * factor(env)
            out = term if out is None else out + term
        return 0.0 if out is None else out

    return total


def _factor(key: str, exponent: int) -> Plan:
    base = _generator(key)
    if exponent == 1:
        return base
    if abs(exponent) > 4:
        return lambda env: base(env) ** float(exponent)

    def product(env: dict[str, Any]) -> Any:
        # four multiplications are cheaper than a power
        x = base(env)
        out = x
        for _ in range(abs(exponent) - 1):
            out = out * x
        return out if exponent > 0 else 1.0 / out

    return product


@cached(1 << 12)
def _generator(key: str) -> Plan:
    """Compile a generator, cached since formulas of one graph share most atoms."""
    if key[0] != "~":
        return lambda env: env[key]
    expr = generator(key)
    if isinstance(expr, Max | Min):
        join = np.maximum if isinstance(expr, Max) else np.minimum
        arguments = [plan(poly(a)) for a in expr.args]
        return lambda env: _fold(join, [argument(env) for argument in arguments])
    if isinstance(expr, sympy.floor | sympy.ceiling):
        step = np.floor if isinstance(expr, sympy.floor) else np.ceil
        above, below = map(plan, _fraction(poly(expr.args[0])))
        return lambda env: step(above(env) / below(env))
    if isinstance(expr, sympy.Pow):
        base, exponent = (plan(poly(a)) for a in expr.args)
        return lambda env: np.power(np.asarray(base(env), dtype=np.float64), exponent(env))
    return lambdified(expr)


def _fraction(p: Poly) -> tuple[Poly, Poly]:
    """Split into integer numerator and denominator: floor(49/7) is 7, but floor(49*(1/7)) is 6 in floats."""
    lowest: dict[str, int] = {}
    scale = 1
    for m, c in p.terms.items():
        scale = lcm(scale, c.denominator)
        for k, e in m:
            lowest[k] = min(e, lowest.get(k, 0))
    below = Poly({tuple(sorted((k, -e) for k, e in lowest.items() if e)): scale})
    return p * below, below


def lambdified(expr: sympy.Expr) -> Plan:
    """Compile a non-polynomial formula with sympy."""
    names = sorted(s.name for s in expr.free_symbols)
    call = sympy.lambdify([symbol(n) for n in names], expr, "numpy")
    return lambda env: call(*(env[n] for n in names))


def _fold(join: Any, values: list[Any]) -> Any:
    out = values[0]
    for v in values[1:]:
        out = join(out, v)
    return out


def checked(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return sizes as an array; BindingError if one is not a positive integer."""
    try:
        array = np.asarray(value)
    except ValueError:  # ragged lists
        raise BindingError(f"{name}: {shown(value, 80)} is not an array; expected rows of equal length") from None
    is_integral = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    )
    if not is_integral or (array.size and array.min() < 1):
        raise BindingError(f"{name}: array of {array.dtype} from {shown(value, 80)}, expected positive integers")
    return array


def in_chunks(reads: int, writes: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    """Return np.nditer arguments that broadcast, convert and chunk arrays."""
    return {
        "flags": ["external_loop", "buffered", "zerosize_ok"],
        "op_flags": [["readonly"]] * reads + [["writeonly", "allocate"]] * writes,
        "op_dtypes": [np.dtype(dtype)] * (reads + writes),
        "casting": "unsafe",
        "buffersize": _CHUNK,
    }


# -- labelled arrays ---------------------------------------------------------------------------------------------------


def aligned(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Align arrays with named dimensions, as in xarray; return them with a function that labels the result.

    Raises BindingError if labels of a dimension differ, or only some arrays have named dimensions.
    """
    labelled = {name: v for name, v in arrays.items() if isinstance(getattr(v, "dims", None), tuple)}
    if not labelled:
        return dict(arrays), lambda result: result
    for name, v in arrays.items():
        if name not in labelled and np.ndim(v):
            raise BindingError(
                f"{name}: an array without dimension names; expected named dimensions, as in {min(labelled)}"
            )
    axes = tuple(dict.fromkeys(axis for v in labelled.values() for axis in v.dims))
    labels: dict[str, Any] = {}
    for name, v in labelled.items():
        for axis in v.dims:
            labels_of_axis = getattr(v, "coords", {}).get(axis)
            if labels_of_axis is not None and not np.array_equal(
                labels_of_axis, labels.setdefault(axis, labels_of_axis)
            ):
                raise BindingError(
                    f"{name}: labels of {shown(axis)} differ from those of other arrays; expected equal labels"
                )
    out = dict(arrays)
    for name, v in labelled.items():
        labels_of_axis = [axis for axis in axes if axis in v.dims]
        array = checked(name, v).transpose([v.dims.index(axis) for axis in labels_of_axis])
        out[name] = np.expand_dims(array, tuple(i for i, axis in enumerate(axes) if axis not in labels_of_axis))
    make = type(next(iter(labelled.values())))
    return out, lambda result: make(result, dims=axes, coords=labels)


# -- vectorized validity -----------------------------------------------------------------------------------------------


class _NotIntegerError(Exception):
    """A formula that cannot be evaluated in integers."""


def outside(asked: Iterable[Requirement], arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """Return a broadcastable mask of points that violate a requirement, or None if there are none.

    Requirements on sizes that are not given are skipped.
    """
    out: np.ndarray[Any, Any] | None = None
    for a in asked:
        names = a.amount.names()
        if not names <= arrays.keys():
            continue
        passed = _passed(a, {n: arrays[n] for n in names})
        if not passed.all():
            out = ~passed if out is None else out | ~passed
    return out


def too_few(
    counts: LoopCounts, amounts: Mapping[str, Poly], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any] | None:
    """Return a broadcastable mask of points with too few loop iterations for a closed form, or None."""
    bound = {name: p for name, p in amounts.items() if p.names() <= arrays.keys()}
    code: Any = np.zeros((), dtype=np.int64)
    for name, p in bound.items():  # sufficient counts are one case
        sure = counts.sure[name]
        code = code * (sure + 1) + np.minimum(plan(p)(dict(arrays)), sure).astype(np.int64)
    cases, inverse = np.unique(code, return_inverse=True)
    holds = []
    for case in cases.tolist():
        point = {}
        for name in reversed(bound):
            case, point[name] = divmod(case, counts.sure[name] + 1)
        holds.append(counts.hold(point))
    return None if all(holds) else ~np.array(holds)[inverse.reshape(np.shape(code))]


def _passed(asked: Requirement, arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Test sizes exactly: in float64 or int64 if they are large enough, else in Python integers."""
    if not all(array.size for array in arrays.values()):
        return np.ones((), dtype=bool)
    numerator, denominator = _fraction(asked.amount)
    largest = {n: int(array.max()) for n, array in arrays.items()}
    try:
        bound = (_magnitude(numerator, largest) + _magnitude(denominator, largest)) * (asked.least + 1)
        dtype = np.float64 if bound < 1 << 53 else np.int64 if bound < 1 << 63 else object
        if dtype is not object:
            for chunk in np.nditer(list(arrays.values()), **in_chunks(len(arrays), dtype=dtype)):
                env = dict(zip(arrays, chunk if isinstance(chunk, tuple) else (chunk,), strict=True))
                if not np.all(asked.passed(_eval_integer(numerator, env), _eval_integer(denominator, env))):
                    break
            else:
                return np.ones((), dtype=bool)
        exact = {n: _python_ints(array) if dtype is object else array.astype(dtype) for n, array in arrays.items()}
        passed = asked.passed(_eval_integer(numerator, exact), _eval_integer(denominator, exact))
    except _NotIntegerError:
        names = list(arrays)

        def at(*sizes: Any) -> bool:
            return asked.holds({n: int(size) for n, size in zip(names, sizes, strict=True)})

        passed = np.frompyfunc(at, len(names), 1)(*arrays.values())
    return np.asarray(passed, dtype=bool)


_python_ints = np.frompyfunc(int, 1, 1)


def _eval_integer(p: Poly, env: Mapping[str, Any]) -> Any:
    """Evaluate a sum with integer coefficients."""
    out: Any = 0
    for m, c in p.terms.items():
        term: Any = int(c)
        for k, e in m:
            term = term * _eval_generator(k, env) ** e
        out = out + term
    return out


def _eval_generator(key: str, env: Mapping[str, Any]) -> Any:
    if key[0] != "~":
        return env[key]
    expr = generator(key)
    if isinstance(expr, sympy.floor):
        numerator, denominator = _fraction(poly(expr.args[0]))
        return _eval_integer(numerator, env) // _eval_integer(denominator, env)
    if isinstance(expr, sympy.ceiling):
        numerator, denominator = _fraction(poly(expr.args[0]))
        return -(-_eval_integer(numerator, env) // _eval_integer(denominator, env))
    return _fold(np.maximum if isinstance(expr, Max) else np.minimum, [_eval_integer(poly(a), env) for a in expr.args])


def largest_met(p: Poly, largest: Mapping[str, int]) -> int | None:
    """Return a bound on all intermediate values when evaluating a sum in integers; None if that is impossible."""
    try:
        return _magnitude(p, largest)
    except _NotIntegerError:
        return None


def _magnitude(p: Poly, largest: Mapping[str, int]) -> int:
    """Return a bound on all intermediate values of `_eval_integer`."""
    out = 0
    for m, c in p.terms.items():
        if c.denominator != 1 or any(e < 0 for _, e in m):
            raise _NotIntegerError
        term = abs(int(c))
        for k, e in m:
            term *= (largest[k] if k[0] != "~" else _generator_magnitude(generator(k), largest)) ** e
        out += term
    return out


def _generator_magnitude(expr: sympy.Expr, largest: Mapping[str, int]) -> int:
    if isinstance(expr, sympy.floor | sympy.ceiling):
        numerator, denominator = _fraction(poly(expr.args[0]))
        if any(k[0] == "~" for k in denominator.generators()):  # may be negative or zero
            raise _NotIntegerError
        return _magnitude(numerator, largest) + _magnitude(denominator, largest)
    if isinstance(expr, Max | Min):
        return sum(_magnitude(poly(a), largest) for a in expr.args)
    raise _NotIntegerError


# -- public functions --------------------------------------------------------------------------------------------------

#: Result type: a number once every symbol is bound, else a formula.
Formula: TypeAlias = int | float | sympy.Expr


def number(value: Rational) -> int | float:
    """Convert an exact number to int if it is integral, else to float."""
    try:
        return int(value) if value.denominator == 1 else float(value)
    except OverflowError:
        raise BindingError("a fraction beyond 1.8e308: expected smaller sizes") from None


def real(value: Rational) -> float:
    """Convert an exact number to float."""
    try:
        return float(value)
    except OverflowError:
        raise BindingError("a number beyond 1.8e308: expected smaller sizes") from None


def answer(value: Poly | sympy.Expr, validities: Iterable[Validity] = ()) -> Formula:
    """Return a formula as a public result: a Python number if no symbol is left, int if it is integral.

    `held` adds conditions to those that the expression carries already.
    """
    if isinstance(value, Poly):
        constant = value.constant
        if constant is not None:
            return number(constant)
        value = value.expr
    if value.is_Rational:
        return number(Fraction(int(value.p), int(value.q)))
    if value.free_symbols:
        return conditioned(value, dict.fromkeys((*held_by(value), *validities)))
    if value.is_finite is not True or value.is_real is not True:
        raise BindingError(f"{shorten(str(value))}: expected a finite number")
    try:  # a maximum of numbers, such as over pipeline stages
        return number(Fraction(exactly(poly(value))({})))
    except (NoRuleError, ShapeError, ZeroDivisionError):
        return float(value)


def bound_answer(value: Poly, values: Bindings) -> Formula:
    """Bind sizes in a polynomial derived from a graph, and return a public result."""
    return answer(value.bind(values), values.held)


def need_bound(formulas: Iterable[Formula], question: str) -> None:
    """Raise BindingError if formulas that need to be numbers have unbound symbols."""
    unbound = {s.name for f in formulas if isinstance(f, sympy.Expr) for s in f.free_symbols}
    if unbound:
        raise BindingError(f"{question}: expected numbers, still unbound: {', '.join(sorted(unbound))}")


def evaluate(formula: Formula, /, **dims: int) -> int | float:
    """Evaluate a formula for given sizes.

    Parameters
    ----------
    formula : sympy.Expr or number
        A formula in symbols of `costgraph.dims`.
    **dims : int
        A size for every symbol.

    Returns
    -------
    int or float
        Exact value: int if it is integral.

    Raises
    ------
    BindingError
        If a symbol has no size, a name is not in the formula, a size is not a positive integer or differs from the one
        bound when the formula was derived, or the sizes violate conditions of the graph.

    Examples
    --------
    >>> from costgraph import dims
    >>> N, D = dims("N D")
    >>> evaluate(6*N*D, N=70*10**9, D=15*10**12)
    6300000000000000000000000
    """
    formula = as_expr(formula)
    validities, formula = held_by(formula), plain(formula)
    names, exact = _prepared(formula)
    allowed_names = names.union(*(v.names for v in validities)) if validities else names
    dims = _without_bound(dims, allowed_names, validities)
    for name in dims:
        if name not in allowed_names:
            raise BindingError(
                f"{shorten(name)} is not in the formula, expected one of {', '.join(sorted(names)) or 'none'}; pass a "
                f"size that a preset binds to the function that derives the formula"
            )
    missing = sorted(names - dims.keys())
    if missing:
        raise BindingError(f"evaluate: no size for {', '.join(missing)}")
    sizes = {name: size_of(name, value) for name, value in dims.items()}
    # implied sizes need the full check
    out = None if exact is None or len(sizes) > len(names) else _exact_value(exact, sizes, validities)
    return _substituted_value(formula, sizes, validities) if out is None else number(out)


def _without_bound(sizes: Mapping[str, Any], names: Collection[str], validities: Iterable[Validity]) -> dict[str, Any]:
    """Drop sizes already bound when the formula was derived; BindingError if they differ."""
    unbound = dict(sizes)
    bound = {
        name: p for v in validities for name, p in v.values if name not in names and p is not None and not p.names()
    }
    for name in sizes.keys() & bound.keys():
        if not np.all(np.asarray(unbound.pop(name), dtype=object) == bound[name].constant):
            raise BindingError(
                f"{name}={shown(sizes[name])}: the formula was derived with {name}={bound[name]}; pass another size to "
                f"the function that derives it"
            )
    return unbound


def _exact_value(exact: At, sizes: Mapping[str, int], validities: tuple[Validity, ...]) -> Rational | None:
    """Return the exact value; None if it has none, or the formula is not known to hold."""
    try:
        return exact(sizes) if all(allowed(v, sizes) for v in validities) else None
    except (ZeroDivisionError, CostGraphError, NoRuleError):
        return None


def _substituted_value(formula: sympy.Expr, sizes: Mapping[str, int], validities: tuple[Validity, ...]) -> int | float:
    """Evaluate by substitution, with specific errors for invalid sizes."""
    values = {name: as_poly(size) for name, size in sizes.items()}
    try:
        for v in validities:
            v.at(values)
        try:
            value_poly = poly(formula)
        except ShapeError:  # floats, which costs do not contain
            return _answered(formula.xreplace({symbol(k): v.expr for k, v in values.items()}))
        return _answered(value_poly.bind(values))
    except ShapeError as error:  # division by zero, or a huge number
        raise BindingError(f"{', '.join(f'{k}={v}' for k, v in values.items())}: {error}") from None


@cached(1 << 10)
def _prepared(formula: sympy.Expr) -> tuple[frozenset[str], At | None]:
    """Return the names in a formula, and its compiled integer form, if there is one."""
    try:
        return _names_in(formula), exactly(poly(formula))
    except ShapeError:
        return _names_in(formula), None  # floats, which costs do not contain


@lru_cache(maxsize=1 << 10)
def _names_in(formula: sympy.Expr) -> frozenset[str]:
    """Return the names of a formula's symbols, cached; ShapeError for foreign symbols."""
    symbols = formula.free_symbols
    for s in symbols:
        check_symbol(s)
    return frozenset(s.name for s in symbols)


def _answered(value: Poly | sympy.Expr) -> int | float:
    out = answer(value)
    if not isinstance(out, int | float):
        raise BindingError(f"{shorten(str(out))}: expected a number")
    return out


# -- compiled formulas -------------------------------------------------------------------------------------------------


class Compiled:
    """A formula as a function of named arrays, created by `compile`."""

    def __init__(self, formula: Formula, outside: str = "error") -> None:
        need_choice("compile: outside", outside, ("error", "nan"))
        self.formula = as_expr(formula)
        self.names: tuple[str, ...] = tuple(sorted(_names_in(plain(self.formula))))
        """Arguments, in alphabetical order."""
        self._held, self._outside = held_by(self.formula), outside
        try:
            self._plan = plan(poly(self.formula))
        except ShapeError:  # floats, which costs do not contain
            if not is_number_like(plain(self.formula)):
                raise
            self._plan = lambdified(plain(self.formula))

    @cached_property
    def _asked(self) -> list[Requirement]:
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
            Sizes by name; shapes broadcast, by dimension names for labelled arrays such as xarray's.

        Returns
        -------
        int, float, numpy.ndarray or labelled array
            Exact for Python integers; float64 for arrays, since int64 would overflow silently.

        Raises
        ------
        BindingError
            If a name is missing or unknown, a size is not a positive integer, or a result is not finite; if sizes
            violate conditions of the graph, unless `outside="nan"`.
        """
        arrays = _without_bound(arrays, {*self.names, *(n for v in self._held for n in v.names)}, self._held)
        extra = arrays.keys() - set(self.names)
        if len(arrays) - len(extra) < len(self.names) or any(all(n not in v.names for v in self._held) for n in extra):
            raise BindingError(f"compiled formula: got {sorted(arrays)}, expected sizes for {list(self.names)}")
        if all(hasattr(v, "__index__") and not np.ndim(v) for v in arrays.values()):
            return evaluate(self.formula, **arrays)
        values, labelled = aligned(arrays)
        sizes = {name: checked(name, value) for name, value in values.items()}
        try:
            shape = np.broadcast_shapes(*(array.shape for array in sizes.values()))
        except ValueError:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in sizes.items())
            raise BindingError(
                f"compiled formula: operands could not be broadcast together with shapes {shapes}"
            ) from None
        wrong = self._wrong(sizes, pointwise=bool(extra))
        if wrong is not None and self._outside == "error":
            self._refuse(np.broadcast_to(wrong, shape), sizes)
        out = self._worked_out([sizes[name] for name in self.names], finite=wrong is None)
        if wrong is not None or extra:
            out = np.where(np.broadcast_to(False if wrong is None else wrong, shape), np.nan, out)
        if wrong is not None and not (np.isfinite(out) | wrong).all():
            raise self._endless()
        return labelled(out)

    def _wrong(self, sizes: dict[str, np.ndarray[Any, Any]], *, pointwise: bool) -> np.ndarray[Any, Any] | None:
        """Return a broadcastable mask of invalid points, or None; `pointwise` tests each point by itself."""
        if pointwise:  # implied sizes depend on the given names

            def refused(*point: Any) -> bool:
                return self._refusal(dict(zip(sizes, point, strict=True))) is not None

            every = np.asarray(np.frompyfunc(refused, len(sizes), 1)(*sizes.values()), dtype=bool)
            return every if every.any() else None
        masks = [outside(self._asked, sizes)]
        for v in self._held:
            if v.counts is not None:
                masks.append(too_few(v.counts, v.counted(), sizes))
        wrong = [w for w in masks if w is not None]
        return reduce(np.logical_or, wrong) if wrong else None

    def _refuse(self, wrong: np.ndarray[Any, Any], sizes: dict[str, np.ndarray[Any, Any]]) -> None:
        """Raise the graph's error for the first invalid point."""
        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        point = {name: int(np.broadcast_to(array, wrong.shape)[index]) for name, array in sorted(sizes.items())}
        place = f"at [{', '.join(map(str, index))}] ({', '.join(f'{k}={shown(v)}' for k, v in point.items())})"
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
        """Evaluate the plan over arrays in chunks."""
        loop = np.nditer([*operands, None], **in_chunks(len(operands), 1))
        with loop, np.errstate(all="ignore"):
            for *chunk, out in loop:
                out[...] = self._plan(dict(zip(self.names, chunk, strict=True)))
                if finite and not np.isfinite(out).all():
                    raise self._endless()
            return loop.operands[-1][()]


def compile(formula: Formula, /, *, outside: str = "error") -> Compiled:
    """Compile a formula to a function of named NumPy arrays.

    Parameters
    ----------
    formula : sympy.Expr or number
        A formula in symbols of `costgraph.dims`.
    outside : str
        "error", or "nan" to return NaN for array points that violate conditions of the graph.

    Returns
    -------
    Compiled
        `f(B=..., S=...)`: exact for Python integers, float64 for arrays, evaluated in chunks.

    Examples
    --------
    >>> import numpy as np
    >>> from costgraph import dims
    >>> N, D = dims("N D")
    >>> compile(6*N*D)(N=np.array([10**9, 70*10**9]), D=15*10**12)
    array([9.0e+22, 6.3e+24])
    """
    return Compiled(formula, outside)
