"""A formula as passes over arrays of sizes: what `costgraph.compile` runs on each chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import lcm
from typing import Any

import numpy as np
import sympy

from ..algebra.conditions import Asked, Counts
from ..algebra.extremum import Max, Min
from ..algebra.generators import cached
from ..algebra.polynomial import Poly, generator, poly
from ..algebra.symbols import shown, symbol
from ..errors import BindingError

__all__ = ["aligned", "checked", "in_chunks", "lambdified", "largest_met", "outside", "plan", "too_few"]

# A chunk of each array and of the sums built from it stays in the second-level cache.
_CHUNK = 1 << 14

Plan = Callable[[dict[str, Any]], Any]


def plan(p: Poly) -> Plan:
    """Nest a polynomial around its commonest generators (Horner): fewer passes over the arrays."""
    counts: dict[str, int] = {}
    for m in p.terms:
        for k, e in m:
            if e > 0:
                counts[k] = counts.get(k, 0) + 1
    best = max(sorted(counts), key=counts.__getitem__, default=None)
    if best is None or counts[best] < 2:
        return _sum(p)
    # not a division: by a reciprocal that is a product with its sum
    lower = {m: tuple((k, e - (k == best)) for k, e in m if (k, e) != (best, 1)) for m in p.terms}
    inside = Poly({lower[m]: c for m, c in p.terms.items() if dict(m).get(best, 0) > 0})
    rest = Poly({m: c for m, c in p.terms.items() if dict(m).get(best, 0) <= 0})
    factor, inner, outer = _generator(best), plan(inside), plan(rest) if rest else None
    if outer is None:
        return lambda env: inner(env) * factor(env)

    def nested(env: dict[str, Any]) -> Any:
        product = inner(env) * factor(env)
        # the product is an array of this call alone
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
            part: Any = c
            for factor in factors:
                part = part * factor(env)
            out = part if out is None else out + part
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
    """Return a generator as a function; formulas of one graph have most of their atoms in common."""
    if key[0] != "~":
        return lambda env: env[key]
    expr = generator(key)
    if isinstance(expr, Max | Min):
        join = np.maximum if isinstance(expr, Max) else np.minimum
        parts = [plan(poly(a)) for a in expr.args]
        return lambda env: _fold(join, [part(env) for part in parts])
    if isinstance(expr, sympy.floor | sympy.ceiling):
        step = np.floor if isinstance(expr, sympy.floor) else np.ceil
        above, below = map(plan, _fraction(poly(expr.args[0])))
        return lambda env: step(above(env) / below(env))
    if isinstance(expr, sympy.Pow):
        base, exponent = (plan(poly(a)) for a in expr.args)
        return lambda env: np.power(np.asarray(base(env), dtype=np.float64), exponent(env))
    return lambdified(expr)


def _fraction(p: Poly) -> tuple[Poly, Poly]:
    """Split into integers above and below the line: of 49/7 the floor is 7, of 49*(1/7) in floats it is 6."""
    lowest: dict[str, int] = {}
    scale = 1
    for m, c in p.terms.items():
        scale = lcm(scale, c.denominator)
        for k, e in m:
            lowest[k] = min(e, lowest.get(k, 0))
    below = Poly({tuple(sorted((k, -e) for k, e in lowest.items() if e)): scale})
    return p * below, below


def lambdified(expr: sympy.Expr) -> Plan:
    """Return a formula that is no polynomial as a function, written out by sympy."""
    names = sorted(s.name for s in expr.free_symbols)
    call = sympy.lambdify([symbol(n) for n in names], expr, "numpy")
    return lambda env: call(*(env[n] for n in names))


def _fold(join: Any, values: list[Any]) -> Any:
    out = values[0]
    for v in values[1:]:
        out = join(out, v)
    return out


def checked(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return sizes as an array, or raise BindingError if one is not a positive integer."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise BindingError(f"{name}: {shown(value, 80)} is no array, expected rows of one length") from None
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    )
    if not whole or (array.size and array.min() < 1):
        raise BindingError(f"{name}: array of {array.dtype} from {shown(value, 80)}, expected positive integers")
    return array


def in_chunks(reads: int, writes: int = 0, dtype: Any = np.float64) -> dict[str, Any]:
    """Return how np.nditer goes over arrays in parts, broadcast against each other and converted."""
    return {
        "flags": ["external_loop", "buffered", "zerosize_ok"],
        "op_flags": [["readonly"]] * reads + [["writeonly", "allocate"]] * writes,
        "op_dtypes": [np.dtype(dtype)] * (reads + writes),
        "casting": "unsafe",
        "buffersize": _CHUNK,
    }


# -- labelled arrays -----------------------------------------------------------------------------------------------


def aligned(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return arrays with axes in one order of their names, as xarray's have them, and what names those of a result.

    Raises BindingError where labels of one dimension differ, or some arrays have names and others none.
    """
    labelled = {name: v for name, v in arrays.items() if isinstance(getattr(v, "dims", None), tuple)}
    if not labelled:
        return dict(arrays), lambda result: result
    for name, v in arrays.items():
        if name not in labelled and np.ndim(v):
            raise BindingError(f"{name}: an array without names of its axes, expected one with, as {min(labelled)} has")
    axes = tuple(dict.fromkeys(axis for v in labelled.values() for axis in v.dims))
    labels: dict[str, Any] = {}
    for name, v in labelled.items():
        for axis in v.dims:
            own = getattr(v, "coords", {}).get(axis)
            if own is not None and not np.array_equal(own, labels.setdefault(axis, own)):
                raise BindingError(
                    f"{name}: labels of {shown(axis)} differ from those of other arrays, expected the same"
                )
    out = dict(arrays)
    for name, v in labelled.items():
        own = [axis for axis in axes if axis in v.dims]
        array = checked(name, v).transpose([v.dims.index(axis) for axis in own])
        out[name] = np.expand_dims(array, tuple(i for i, axis in enumerate(axes) if axis not in own))
    make = type(next(iter(labelled.values())))
    return out, lambda result: make(result, dims=axes, coords=labels)


# -- what a formula holds for ----------------------------------------------------------------------------------------


class _NotWholeError(Exception):
    """A formula that is not worked out in whole numbers."""


def outside(asked: Iterable[Asked], arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """Return where something that is asked of sizes is not so, in a shape that broadcasts; None where it is everywhere.

    What is asked of sizes that are not given is not looked at.
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
    counts: Counts, amounts: Mapping[str, Poly], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any] | None:
    """Return where loops have too few iterations for a closed form, in a shape that broadcasts; None for nowhere."""
    given = {name: p for name, p in amounts.items() if p.names() <= arrays.keys()}
    code: Any = np.zeros((), dtype=np.int64)
    for name, p in given.items():  # all that is sure is one case
        sure = counts.sure[name]
        code = code * (sure + 1) + np.minimum(plan(p)(dict(arrays)), sure).astype(np.int64)
    cases, place = np.unique(code, return_inverse=True)
    held = []
    for case in cases.tolist():
        found = {}
        for name in reversed(given):
            case, found[name] = divmod(case, counts.sure[name] + 1)
        held.append(counts.hold(found))
    return None if all(held) else ~np.array(held)[place.reshape(np.shape(code))]


def _passed(asked: Asked, arrays: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Test sizes exactly: in floats or in 64 bits where these are, else in Python's integers."""
    if not all(array.size for array in arrays.values()):
        return np.ones((), dtype=bool)
    above, below = _fraction(asked.amount)
    largest = {n: int(array.max()) for n, array in arrays.items()}
    try:
        most = (_most(above, largest) + _most(below, largest)) * (asked.least + 1)
        dtype = np.float64 if most < 1 << 53 else np.int64 if most < 1 << 63 else object
        if dtype is not object:
            for chunk in np.nditer(list(arrays.values()), **in_chunks(len(arrays), dtype=dtype)):
                env = dict(zip(arrays, chunk if isinstance(chunk, tuple) else (chunk,), strict=True))
                if not np.all(asked.passed(_whole(above, env), _whole(below, env))):
                    break
            else:
                return np.ones((), dtype=bool)
        whole = {n: _python_ints(array) if dtype is object else array.astype(dtype) for n, array in arrays.items()}
        passed = asked.passed(_whole(above, whole), _whole(below, whole))
    except _NotWholeError:
        names = list(arrays)

        def at(*sizes: Any) -> bool:
            return asked.holds({n: int(size) for n, size in zip(names, sizes, strict=True)})

        passed = np.frompyfunc(at, len(names), 1)(*arrays.values())
    return np.asarray(passed, dtype=bool)


_python_ints = np.frompyfunc(int, 1, 1)


def _whole(p: Poly, env: Mapping[str, Any]) -> Any:
    """Return the values of a sum with whole coefficients."""
    out: Any = 0
    for m, c in p.terms.items():
        part: Any = int(c)
        for k, e in m:
            part = part * _whole_generator(k, env) ** e
        out = out + part
    return out


def _whole_generator(key: str, env: Mapping[str, Any]) -> Any:
    if key[0] != "~":
        return env[key]
    expr = generator(key)
    if isinstance(expr, sympy.floor):
        above, below = _fraction(poly(expr.args[0]))
        return _whole(above, env) // _whole(below, env)
    if isinstance(expr, sympy.ceiling):
        above, below = _fraction(poly(expr.args[0]))
        return -(-_whole(above, env) // _whole(below, env))
    return _fold(np.maximum if isinstance(expr, Max) else np.minimum, [_whole(poly(a), env) for a in expr.args])


def largest_met(p: Poly, largest: Mapping[str, int]) -> int | None:
    """Return a number that nothing exceeds which is met while a sum is worked out; None where that is not whole."""
    try:
        return _most(p, largest)
    except _NotWholeError:
        return None


def _most(p: Poly, largest: Mapping[str, int]) -> int:
    """Return a number that nothing exceeds which is met while `_whole` works a sum out."""
    out = 0
    for m, c in p.terms.items():
        if c.denominator != 1 or any(e < 0 for _, e in m):
            raise _NotWholeError
        part = abs(int(c))
        for k, e in m:
            part *= (largest[k] if k[0] != "~" else _most_of(generator(k), largest)) ** e
        out += part
    return out


def _most_of(expr: sympy.Expr, largest: Mapping[str, int]) -> int:
    if isinstance(expr, sympy.floor | sympy.ceiling):
        above, below = _fraction(poly(expr.args[0]))
        if any(k[0] == "~" for k in below.generators()):  # may be negative or zero
            raise _NotWholeError
        return _most(above, largest) + _most(below, largest)
    if isinstance(expr, Max | Min):
        return sum(_most(poly(a), largest) for a in expr.args)
    raise _NotWholeError
