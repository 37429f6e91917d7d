"""What a program asked of the sizes on its way, as assumptions on the graph."""

from __future__ import annotations

from typing import Any

import sympy

from ...algebra.dominance import integral
from ...algebra.extremum import Max, Min
from ...algebra.polynomial import Poly, poly
from ...algebra.symbols import shown
from ...errors import CostGraphError, UnsupportedError
from ...graph.strides import is_integral
from .shapes import REMAINDERS, Shapes
from .sizes import Translator, holds, remainder

__all__ = ["assumptions"]

#: Turns in which a number of a turn may be asked of.
_FEW = 3

_SIGNS = {sympy.Ge: ">=", sympy.Gt: ">", sympy.Le: "<=", sympy.Lt: "<", sympy.Eq: "=="}


def assumptions(shapes: Shapes, translator: Translator) -> list[str]:
    """Return what sizes must keep so that the program goes the way that was recorded, as `Graph.assume` reads it.

    Sizes are in general position, as everywhere in the library: larger than 1, and equal only where they must be. What
    follows from the former is left out, and from the latter where torch itself asked, which is how tensors lie in
    memory; a program that compares two sizes goes another way where they are equal. UnsupportedError if something that
    was asked has no such form.
    """
    found = [f"{translator.formula(size)} == {translator.formula(expr)}" for size, expr in shapes.equal]
    left = (remainder(expr, translator) for expr in sorted(translator.exact, key=str))
    found += [f"{n} == 0" for n in left if n]
    named = [(s, most) for s, most in shapes.most.items() if s in translator.names]
    found += [f"{translator.names[s]} <= {translator.formula(most)}" for s, most in named]
    by_torch = {guard.expr: "" for guard in shapes.guards}
    late = {asked: line for asked, (line, turns) in shapes.late.items() if _always(turns)}
    for asked, place in (by_torch | late | shapes.asked).items():
        expr = sympy.to_nnf(asked, simplify=False)
        try:
            # what follows from general position is left out before it is written down
            found += [] if _follows(expr, translator, apart=not place) else _texts(expr, translator)
        except CostGraphError as error:
            raise UnsupportedError(
                f"{place or 'torch'}: asks whether {shown(str(expr))}, which is no relation of sizes ({error}), "
                f"expected one of sums, products and whole parts; name no dimension for its axes (None)"
            ) from error
    return list(dict.fromkeys(found))


def _always(turns: set[tuple[tuple[str, int], ...]]) -> bool:
    """Whether something is asked in so many turns of each loop around that it is not of the number of one of them.

    What reads some positions before its own, or behind it, asks of these in as many turns.
    """
    loops: dict[tuple[str, ...], list[list[int]]] = {}
    for path in turns:
        loops.setdefault(tuple(line for line, _ in path), []).append([k for _, k in path])
    return any(all(len(set(turn)) > _FEW for turn in zip(*found, strict=True)) for found in loops.values())


def _texts(expr: Any, translator: Translator) -> list[str]:
    """Return the relations that say what a guard says."""
    if isinstance(expr, sympy.And):
        return [text for part in expr.args for text in _texts(part, translator)]
    if isinstance(expr, sympy.Or):
        return [f"{_margin(expr, translator)} >= 0"]
    left, right = (translator.formula(side) for side in expr.args)
    times = None if right else _times(expr.args[0], translator)
    if times is not None and isinstance(expr, sympy.Eq | sympy.Ne):
        return [f"{times} {'==' if isinstance(expr, sympy.Eq) else '>'} 1"]
    if not isinstance(expr, sympy.Ne):
        return [f"{left} {_SIGNS[type(expr)]} {right}"]
    if holds(left - right) or (not right and isinstance(expr.args[0], REMAINDERS)):
        return [f"{left} > {right}"]
    return [f"{left} < {right}" if holds(right - left) else f"{_margin(expr, translator)} >= 0"]


def _times(expr: Any, translator: Translator) -> Poly | None:
    """Return the quotient of two sizes if it is a whole number."""
    if not isinstance(expr, REMAINDERS):
        return None
    size, block = map(translator.formula, expr.args)
    times = block / size if size.terms else size
    return times if times.terms and is_integral(times) else None


def _margin(expr: Any, translator: Translator) -> Poly:
    """Return what is at least 0 where a guard holds, and below 0 where it does not."""
    if isinstance(expr, sympy.And | sympy.Or):
        extremum = Min if isinstance(expr, sympy.And) else Max
        return poly(extremum(*(_margin(part, translator).expr for part in expr.args)))
    left, right = (translator.formula(side) for side in expr.args)
    ahead = left - right
    return {
        sympy.Ge: lambda: ahead,
        sympy.Le: lambda: -ahead,
        sympy.Gt: lambda: _above(ahead),
        sympy.Lt: lambda: _above(-ahead),
        sympy.Eq: lambda: poly(Min(ahead.expr, (-ahead).expr)),
        sympy.Ne: lambda: poly(Max(_above(ahead).expr, _above(-ahead).expr)),
    }[type(expr)]()


def _above(p: Poly) -> Poly:
    """Return what is at least 0 where a whole number is above 0."""
    whole = integral(p)
    if whole is None:
        raise UnsupportedError(f"{p} need not be a whole number")
    return whole - 1


def _follows(expr: Any, translator: Translator, *, apart: bool) -> bool:
    """Whether a guard holds for all sizes above 1; where they are `apart`, no two of them are equal."""
    if isinstance(expr, sympy.Or) and apart:
        return True  # in which order torch takes the axes of a tensor: layout is decided once
    if isinstance(expr, sympy.And | sympy.Or):
        each = (_follows(part, translator, apart=apart) for part in expr.args)
        return all(each) if isinstance(expr, sympy.And) else any(each)
    if isinstance(expr, sympy.Ne) and apart and not any(isinstance(side, REMAINDERS) for side in expr.args):
        return True
    left, right = (translator.formula(side) for side in expr.args)
    ahead = left - right
    if isinstance(expr, sympy.Eq | sympy.Ne):
        unequal = holds(ahead, strict=True) or holds(-ahead, strict=True)
        return unequal if isinstance(expr, sympy.Ne) else not ahead
    strict = isinstance(expr, sympy.Gt | sympy.Lt)
    return holds(ahead if isinstance(expr, sympy.Ge | sympy.Gt) else -ahead, strict=strict)
