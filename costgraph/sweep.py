"""A formula as passes over arrays of sizes: what `costgraph.compile` runs on each chunk."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import numpy as np
import sympy

from .errors import BindingError
from .extremum import Max, Min
from .polynomial import Poly, generator, poly
from .symbols import shown, symbol

__all__ = ["checked", "lambdified", "plan"]

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
    over = Poly({((best, 1),): 1})
    inside = Poly({m: c for m, c in p.terms.items() if dict(m).get(best, 0) > 0}) / over
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


def _generator(key: str) -> Plan:
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
    array = np.asarray(value)
    whole = array.dtype.kind in "iu" or (
        array.dtype.kind == "f" and bool(np.isfinite(array).all() and (array == np.floor(array)).all())
    )
    if not whole or (array.size and array.min() < 1):
        raise BindingError(f"{name}: array of {array.dtype} from {shown(value, 80)}, expected positive integers")
    return array
