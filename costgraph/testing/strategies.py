"""Strategies for the small things: sizes, points, number formats and pattern texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import sympy
from hypothesis import strategies as st

from ..algebra.symbols import dims
from ..dtypes import DTYPES, DType

__all__ = ["DrawnPattern", "dtypes", "patterns", "points", "sizes"]

_PRIMES = (2, 3, 5, 7)


class DrawnPattern(NamedTuple):
    """A pattern text, and a size for each of its axes."""

    text: str
    """such as `b (h k), k d -> b d`"""
    extents: dict[str, int]
    """small primes, or 1"""
    shapes: tuple[tuple[int, ...], ...]
    """shapes of the operands that it takes"""
    result: tuple[int, ...]
    """shape of the result"""


def sizes(names: Sequence[str] = ("A", "B", "C")) -> st.SearchStrategy[sympy.Expr]:
    """Draw a size: a product of symbols and small numbers, sometimes a sum of two.

    Parameters
    ----------
    names : sequence of str
        Symbols that it may be made of.

    Returns
    -------
    strategy of sympy.Expr
        Positive whole numbers at every point.
    """
    return _sizes(tuple(names))


@st.composite
def _sizes(draw: Callable[[Any], Any], names: Sequence[str]) -> sympy.Expr:
    symbols = [dims(n) for n in names]
    factors = draw(st.lists(st.sampled_from(symbols), max_size=3))
    out = sympy.Mul(draw(st.sampled_from([1, 1, 2, 3])), *factors)
    return out + draw(st.sampled_from([0, 0, 1, *symbols]))


def points(names: Sequence[str]) -> st.SearchStrategy[dict[str, int]]:
    """Draw a point: a small prime for each name.

    Parameters
    ----------
    names : sequence of str
        Symbols.

    Returns
    -------
    strategy of dict
        Name to prime.
    """
    return st.fixed_dictionaries({n: st.sampled_from(_PRIMES) for n in names})


def dtypes(kind: str | None = None) -> st.SearchStrategy[DType]:
    """Draw a number format.

    Parameters
    ----------
    kind : str, optional
        float, int or bool; any by default.

    Returns
    -------
    strategy of DType
        One of `costgraph.DTYPES`.
    """
    return st.sampled_from([d for d in DTYPES.values() if kind in (None, d.kind)])


def patterns(operands: int = 1) -> st.SearchStrategy[DrawnPattern]:
    """Draw a pattern: of one operand a rearrangement, of several a contraction.

    Parameters
    ----------
    operands : int
        How many operands the pattern has.

    Returns
    -------
    strategy of DrawnPattern
        The text, and sizes and shapes that fit it.
    """
    return _patterns(operands)


@st.composite
def _patterns(draw: Callable[[Any], Any], operands: int) -> DrawnPattern:
    letters = draw(st.lists(st.sampled_from("abhkst"), min_size=1, max_size=5))
    names = [f"{letter}{i}" for i, letter in enumerate(letters)]
    extents = {n: draw(st.sampled_from([1, 2, 2, 3, 5])) for n in names}
    used = [list(names)] if operands == 1 else [draw(_some(names)) for _ in range(operands)]
    known = list(dict.fromkeys(n for axes in used for n in axes))
    kept = draw(st.permutations(known if operands == 1 else draw(_some(known))))
    sides = [draw(_grouped(draw(st.permutations(axes)))) for axes in (*used, kept)]
    texts = [" ".join(f"({' '.join(g)})" if len(g) != 1 else g[0] for g in side) for side in sides]
    shapes = [tuple(prod(extents[n] for n in g) for g in side) for side in sides]
    text = f"{', '.join(texts[:-1])} -> {texts[-1]}"
    return DrawnPattern(text, {n: extents[n] for n in known}, tuple(shapes[:-1]), shapes[-1])


def _some(names: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(list(names)), unique=True) if names else st.just([])


@st.composite
def _grouped(draw: Callable[[Any], Any], names: Sequence[str]) -> list[list[str]]:
    """Put neighbours in brackets, sometimes with empty brackets for an axis of size 1 between them."""
    out: list[list[str]] = []
    for n in names:
        if out and out[-1] and draw(st.booleans()):
            out[-1].append(n)
        else:
            out += [[n]] if draw(st.integers(0, 5)) else [[], [n]]
    return out
