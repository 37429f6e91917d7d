"""Whole parts of sizes that are all of them: floor(S/4) is S/4 where S == 4*floor(S/4) is known."""

from __future__ import annotations

import sympy

from .polynomial import Poly, generator, poly

__all__ = ["exact", "put"]


def exact(p: Poly) -> tuple[str, Poly] | None:
    """Return a whole part that `p == 0` says is no less than the whole: floor(S/4) where S == 4*floor(S/4)."""
    for key in sorted(p.generators()):
        if key[0] == "~" and isinstance(expr := generator(key), sympy.floor | sympy.ceiling):
            factor = Poly({tuple(f for f in m if f[0] != key): c for m, c in p.terms.items() if (key, 1) in m})
            inner = poly(expr.args[0])
            if factor.terms and p == factor * (Poly({((key, 1),): 1}) - inner):
                return key, inner
    return None


def put(p: Poly, atom: str, value: Poly) -> Poly:
    """Replace an atom, inside other atoms too."""
    old = generator(atom)
    inside = {k: generator(k) for k in p.generators() if k[0] == "~" and k != atom}
    new = {k: poly(expr.xreplace({old: value.expr})) for k, expr in inside.items() if expr.has(old)}
    return p.substitute({**new, atom: value})
