"""A maximum or minimum as people read it: what all cases share once, then one case a line, with what owns it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import sympy

from .polynomial import Poly

__all__ = ["as_latex", "as_text", "shared"]

_SPECIAL = re.compile(r"([#$%&_{}])")


def shared(cases: Sequence[Poly]) -> tuple[Poly, list[Poly]]:
    """Split several sums into what all share, of each monomial the smallest coefficient, and the rest of each.

    Examples
    --------
    >>> from costgraph.algebra.polynomial import poly
    >>> from costgraph.algebra.symbols import dims
    >>> B, D = dims("B D")
    >>> shared([poly(3*B + D), poly(2*B)])
    (2*B, [B + D, 0])
    """
    least = {m: min(p.terms.get(m, 0) for p in cases) for m in sorted({m for p in cases for m in p.terms})}
    common = Poly({m: c for m, c in least.items() if c})
    return common, [p - common for p in cases]


def as_text(cases: Iterable[tuple[Poly, str]], *, largest: bool = True) -> str:
    """Write the cases of a maximum, or of a minimum, as lines of text."""
    formulas, owners = zip(*cases, strict=True)
    common, rests = shared(formulas) if len(formulas) > 1 else (Poly({}), formulas)
    texts = [str(rest.expr) for rest in rests]
    wide = max(map(len, texts))
    lines = [f"{text:{wide}}  {owner}".rstrip() for text, owner in zip(texts, owners, strict=True)]
    if len(lines) == 1:
        return lines[0]
    head = f"{common.expr} + the" if common else "the"
    return "\n  ".join([f"{head} {'largest' if largest else 'smallest'} of", *lines])


def as_latex(cases: Iterable[tuple[Poly, str]], *, largest: bool = True) -> str:
    r"""Write the cases of a maximum, or of a minimum, as LaTeX for math mode, one case a line."""
    formulas, owners = zip(*cases, strict=True)
    common, rests = shared(formulas) if len(formulas) > 1 else (Poly({}), formulas)
    words = [_SPECIAL.sub(r"\\\1", owner) for owner in owners]
    lines = [sympy.latex(r.expr) + (rf" & \text{{{w}}}" if w else "") for r, w in zip(rests, words, strict=True)]
    if len(lines) == 1:
        return str(lines[0])
    head = f"{sympy.latex(common.expr)} + " if common else ""
    return rf"{head}\{'max' if largest else 'min'}\begin{{cases}}" + r" \\ ".join(lines) + r"\end{cases}"
