"""Rewrite formulas in terms of named quantities, such as the number of parameters."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

import sympy

from ..algebra.conditions import (
    conditioned,
    held_by,
    plain,
)
from ..algebra.extremum import Max, Min, Owner, as_expr
from ..algebra.polynomial import (
    Monomial,
    Poly,
    Rational,
    poly,
    times,
)
from ..algebra.symbols import shown, symbol
from ..bind.evaluate import Formula, answer
from ..errors import BindingError

__all__ = ["in_terms_of"]


def in_terms_of(formula: Formula, /, **quantities: Formula) -> Formula:
    """Rewrite a formula in terms of named quantities, leaving the remainder as it is.

    Parameters
    ----------
    formula : sympy.Expr or number
        A sum, or a Max or Min, which is rewritten case by case.
    **quantities : sympy.Expr or number
        Definition of each name. They are factored out in order, including their multiples by sizes.

    Returns
    -------
    sympy.Expr or number
        Formula that equals the input if each name has the value of its quantity. From a sum, the largest multiple is
        taken out that leaves no term negative; failing that, the multiple shared by more than half the terms. A number
        is taken out as often as it fits.

    Raises
    ------
    BindingError
        If a name is also a size, or a quantity is 0.

    Examples
    --------
    >>> import costgraph as cg
    >>> llama = cg.models.load("llama-3-8b", symbolic=True)
    >>> step = cg.training_step(llama, precision="fp32", optimizer=cg.AdamW())
    >>> case = next(c for c in cg.regimes(cg.peak_memory(step)) if c.phase == "optimizer")
    >>> cg.in_terms_of(case.formula, N=cg.param_count(llama))
    16*B*S + 2*K + 20*N + 4
    """
    expr = as_expr(formula)
    out: Any = plain(expr)
    values = {name: poly(plain(as_expr(q))) for name, q in quantities.items()}
    names_used = {s.name for s in out.free_symbols}.union(*(q.names() for q in values.values()))
    for name, quantity in values.items():
        if name in names_used:
            raise BindingError(f"in_terms_of: {name} is already a size; expected another name for {shown(quantity)}")
        if not quantity:
            raise BindingError(f"in_terms_of: {name} is 0, expected a nonzero quantity")
        out = _written(out, poly(symbol(name)), quantity)
    return answer(conditioned(out, held_by(expr)))


def _written(expr: sympy.Expr, name: Poly, quantity: Poly) -> sympy.Expr:
    if isinstance(expr, Max | Min):
        owners = [Owner(o.op, o.phase, o.label) for o in expr.owners]
        return type(expr)(*(_factored(poly(a), name, quantity).expr for a in expr.args), owners=owners)
    return _factored(poly(expr), name, quantity).expr


def _factored(p: Poly, name: Poly, quantity: Poly) -> Poly:
    """Return `p` with multiples of `quantity` replaced by `name`."""
    out, inverses = p, [tuple((k, -e) for k, e in m) for m in quantity.terms]
    factors = {times(m, inverse) for m in p.terms for inverse in inverses}
    for factor in sorted(factors, key=lambda m: (-sum(e for _, e in m), m)):
        multiple = _multiple_of(out, factor, quantity) if all(e > 0 for _, e in factor) else 0
        if multiple:
            out += Poly({factor: multiple}) * (name - quantity)
    return out


def _multiple_of(p: Poly, factor: Monomial, quantity: Poly) -> Rational:
    """Return how often `factor * quantity` can be taken out."""
    ratios = [Fraction(p.terms.get(times(m, factor), 0)) / c for m, c in quantity.terms.items()]
    if quantity.constant is not None:
        return floor(ratios[0]) if ratios[0] > 0 else 0
    common = max(sorted(set(ratios)), key=ratios.count)
    if min(ratios) > 0:
        return min(ratios)
    return common if 2 * ratios.count(common) > len(ratios) else 0
