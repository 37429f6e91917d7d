"""What a program asked of the sizes on its way, as assumptions on the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from ...algebra.dominance import lower
from ...algebra.polynomial import Poly, poly
from ...algebra.symbols import symbol
from ...errors import CostGraphError
from .shapes import Shapes
from .sizes import Translator

__all__ = ["assumptions"]

_SIGNS = {sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "=="}


def assumptions(shapes: Shapes, translator: Translator) -> list[str]:
    """Return what sizes must keep so that the program goes the way that was recorded.

    Sizes are in general position, as everywhere in the library: larger than 1, and equal only where they must be. What
    follows from that is left out.

    Parameters
    ----------
    shapes : Shapes
        After the run.
    translator : Translator
        For its formulas.

    Returns
    -------
    list of str
        Relations as `Graph.assume` reads them.
    """
    found = [f"{name} == {translator.formula(expr)}" for name, expr in shapes.equal]
    for guard in shapes.guards:
        for relation in _parts(guard.expr):
            text = _text(relation, translator)
            if text is not None:
                found.append(text)
    return list(dict.fromkeys(found))


def _parts(expr: Any) -> Iterator[Any]:
    if isinstance(expr, sympy.And):
        for part in expr.args:
            yield from _parts(part)
    else:
        yield expr


def _text(relation: Any, translator: Translator) -> str | None:
    sign = _SIGNS.get(type(relation))
    if sign is None:
        return None  # an inequality, which general position means, or a choice between several relations
    left, right = (translator.formula(side) for side in relation.args)
    if _follows(left - right, sign):
        return None
    return f"{left} {sign} {right}"


def _follows(difference: Poly, sign: str) -> bool:
    """Whether a relation holds for all sizes above 1."""
    if not difference:
        return sign in (">=", "<=", "==")
    larger = {n: poly(symbol(n) + 1) for n in difference.names()}
    try:
        shifted = difference.substitute(larger)
        least = lower(shifted if sign in (">=", ">") else -shifted)
    except CostGraphError:
        return False
    return least is not None and (least > 0 if sign in (">", "<") else least >= 0) and sign != "=="
