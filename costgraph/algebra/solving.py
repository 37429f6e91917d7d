"""Solve equations for a symbol where the solution is unique for all sizes."""

from __future__ import annotations

from collections.abc import Sequence

from .polynomial import ONE, SLACK, Poly, Rational

__all__ = ["alone", "solve", "symbols_in"]


def symbols_in(p: Poly) -> set[str]:
    """Return the names of symbols that are generators, not inside atoms."""
    return {k for k in p.generators() if k[0] not in "~" + SLACK}


def alone(p: Poly, key: str) -> tuple[Rational, Poly] | None:
    """Return the coefficient of a generator and the rest, if the generator occurs once and linearly."""
    coefficient = p.terms.get(((key, 1),))
    remainder = p - Poly({((key, 1),): coefficient or 0})
    return None if coefficient is None or key in remainder.names() else (coefficient, remainder)


def solve(p: Poly, prefer: Sequence[str] = ()) -> tuple[str, Poly] | None:
    """Solve `p == 0` for a symbol that occurs linearly with a number, or as a factor in one of two monomials."""
    names = [*prefer, *sorted(symbols_in(p) - set(prefer))]
    for key in names:
        if (isolated := alone(p, key)) is not None:
            return key, isolated[1] / -isolated[0]
    if len(p.terms) == 2:
        (m, c), (n, d) = sorted(p.terms.items())
        ratio = Poly({m: -c}) / Poly({n: d})  # == 1
        for key in names:
            power = next((e for m in ratio.terms for k, e in m if k == key), 0)
            if abs(power) == 1:
                cofactor = ratio / Poly({((key, power),): 1})
                if key not in cofactor.names():
                    return key, cofactor if power == -1 else ONE / cofactor
    return None
