"""Parse einsum-style patterns, without tensors or sympy.

pattern = operand {"," operand} "->" operand
operand = {axis}                          axes separated by spaces; none at all is a scalar
axis    = name | "1" | "..." | "(" {name} ")" | affine
affine  = term {("+" | "-") term}         without spaces: h*2+r, h+2*r-1
term    = name | name "*" int | int "*" name | int
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from ..algebra.symbols import is_name, shorten, shown
from ..errors import PatternError
from .validation import READ

__all__ = ["Affine", "Axes", "Pattern", "PatternText", "parse_pattern"]

#: A pattern as written by the caller, parsed by `parse_pattern`.
PatternText = Annotated[str, READ]

_LONGEST = 4000
_HIDDEN = re.compile(r"_\d+\Z", re.ASCII)  # an axis hidden in '...'
_TOKEN = re.compile(r"\(|\)|[^\s()]+")
_TERM = re.compile(r"([+-]?)(?:(\d{1,9})\*)?([A-Za-z_]\w*|\d{1,9})(?:\*(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Axes:
    """A dimension composed of named axes: one name, several merged ones, or none (a literal 1)."""

    names: tuple[str, ...]
    """Axis names, slowest first."""

    def __str__(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"({' '.join(self.names)})" if self.names else "1"


@dataclass(frozen=True)
class Affine:
    """A dimension indexed by `sum(coefficient * axis) + offset`, such as the input of a convolution."""

    terms: tuple[tuple[str, int], ...]
    """Axis names with positive integer coefficients."""
    offset: int
    """Constant part, the negative padding."""

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names in the index."""
        return tuple(n for n, _ in self.terms)

    def __str__(self) -> str:
        text = "+".join(n if c == 1 else f"{n}*{c}" for n, c in self.terms)
        return text + (f"{self.offset:+d}" if self.offset else "")


@dataclass(frozen=True)
class Pattern:
    """Axes of every operand and the result."""

    operands: tuple[tuple[Axes | Affine, ...], ...]
    """One tuple of dimensions per operand."""
    result: tuple[Axes | Affine, ...]
    """Dimensions of the result."""

    def __str__(self) -> str:
        left = ", ".join(" ".join(map(str, o)) for o in self.operands)
        return f"{left} -> {' '.join(map(str, self.result))}"

    @property
    def result_names(self) -> tuple[str, ...]:
        """Axis names of the result, in order."""
        return tuple(n for a in self.result for n in a.names)

    def operand_names(self, i: int) -> tuple[str, ...]:
        """Axis names of operand number `i`, in order."""
        return tuple(n for a in self.operands[i] for n in a.names)


def _affine(token: str, text: str) -> Axes | Affine:
    terms: dict[str, int] = {}
    offset = end = 0
    for match in _TERM.finditer(token):
        sign, before, term, after = match.groups()
        if match.start() != end or (end and not sign):
            break
        end = match.end()
        factor = int(before or 1) * int(after or 1) * (-1 if sign == "-" else 1)
        if term.isdigit():
            offset += factor * int(term)
            continue
        if term in terms or factor < 1 or not is_name(term):
            raise PatternError(
                f"pattern {shorten(text)}: index {shorten(token)}, expected each axis once with a positive factor"
            )
        terms[term] = factor
    if end != len(token) or not terms:
        raise PatternError(
            f"pattern {shorten(text)}: {shorten(token)} is neither a name, 1, (a b) nor an index such as h*2+r"
        )
    if not offset and list(terms.values()) == [1]:
        return Axes(tuple(terms))
    return Affine(tuple(terms.items()), offset)


def _operand(operand: str, text: str, rank: int | None) -> tuple[Axes | Affine, ...]:
    out: list[Axes | Affine] = []
    group: list[str] | None = None
    for token in _TOKEN.findall(operand):
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            out.append(Axes(tuple(group)))
            group = None
        elif token in "()":
            raise PatternError(f"pattern {shorten(text)}: unexpected {token!r}, expected brackets in pairs, not nested")
        elif group is not None:
            if token != "1" and not is_name(token):
                raise PatternError(f"pattern {shorten(text)}: {shorten(token)} in brackets, expected axis names")
            group += [token] if token != "1" else []
        elif token == "1":
            out.append(Axes(()))
        elif token == "...":
            out.append(Axes(("...",)))
        elif is_name(token):
            out.append(Axes((token,)))
        else:
            out.append(_affine(token, text))
    if group is not None:
        raise PatternError(f"pattern {shorten(text)}: '(' without ')'")
    return _without_ellipsis(out, text, rank)


def _without_ellipsis(axes: list[Axes | Affine], text: str, rank: int | None) -> tuple[Axes | Affine, ...]:
    positions = [i for i, a in enumerate(axes) if a.names == ("...",)]
    if not positions:
        return tuple(axes)
    if len(positions) > 1:
        raise PatternError(f"pattern {shorten(text)}: '...' twice in one operand, expected at most one")
    if any(_HIDDEN.match(n) for a in axes for n in a.names):
        raise PatternError(
            f"pattern {shorten(text)}: names such as '_0' together with '...', which generates them; rename the axes"
        )
    if rank is None:
        return tuple(axes)
    hidden = rank - (len(axes) - 1)
    if hidden < 0:
        raise PatternError(f"pattern {shorten(text)}: an operand of {rank} axes, expected at least {len(axes) - 1}")
    # numbered from the last axis, so that operands of different rank align as in NumPy
    names = [Axes((f"_{i}",)) for i in range(hidden - 1, -1, -1)]
    return tuple(axes[: positions[0]] + names + axes[positions[0] + 1 :])


def parse_pattern(text: str, ranks: tuple[int, ...] | None = None, *, scattered: bool = False) -> Pattern:
    """Parse a pattern such as `"b s d, d f -> b s f"`.

    `ranks`, the axis count of each operand, determines the axes that `...` represents. `scattered` allows affine
    indices and diagonals in the result, as in gradients of contractions. Raises PatternError if the text is invalid,
    the number of operands differs from `ranks`, or an operand has too few axes.

    Examples
    --------
    >>> str(parse_pattern("b (h k) ->  b h k"))
    'b (h k) -> b h k'
    """
    if not isinstance(text, str):
        raise PatternError(f"pattern {shown(text)}: expected text such as 'b s d -> b s'")
    return _parsed(text, ranks, scattered)


@lru_cache(maxsize=4096)
def _parsed(text: str, ranks: tuple[int, ...] | None, scattered: bool) -> Pattern:
    if len(text) > _LONGEST:
        raise PatternError(f"pattern of {len(text)} characters, expected at most {_LONGEST}")
    sides = text.split("->")
    if len(sides) != 2:
        raise PatternError(f"pattern {shorten(text)}: expected exactly one '->'")
    operand_texts = sides[0].split(",")
    if ranks is not None and len(operand_texts) != len(ranks):
        raise PatternError(f"pattern {shorten(text)}: describes {len(operand_texts)} operands, got {len(ranks)}")
    operands = tuple(_operand(p, text, ranks[i] if ranks else None) for i, p in enumerate(operand_texts))
    result = _operand(sides[1], text, None)
    if ranks is not None:
        result = _without_ellipsis(list(result), text, _longest_ellipsis(operand_texts, operands) + len(result) - 1)
    if not scattered:
        _check_names(operands, result, text)
    return Pattern(operands, result)


def _longest_ellipsis(operand_texts: Sequence[str], operands: Sequence[Sequence[Axes | Affine]]) -> int:
    counts = [sum(_HIDDEN.match(n) is not None for a in o for n in a.names) for o in operands]
    return max((c for c, p in zip(counts, operand_texts, strict=True) if "..." in p), default=0)


def _check_names(operands: Sequence[Sequence[Axes | Affine]], result: Sequence[Axes | Affine], text: str) -> None:
    for where, dims in [(f"operand {i + 1}", o) for i, o in enumerate(operands)] + [("the result", result)]:
        # an axis may occur in two affine indices of one operand, but only once as a plain axis
        names = [n for a in dims if isinstance(a, Axes) for n in a.names]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice and where == "the result":
            raise PatternError(f"pattern {shorten(text)}: axis {twice[0]!r} twice in {where}, expected once")
    if any(isinstance(a, Affine) for a in result):
        raise PatternError(f"pattern {shorten(text)}: an index with '*' or '+' in the result, expected plain axes")
