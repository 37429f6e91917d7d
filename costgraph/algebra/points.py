"""Signs that a polynomial is seen to have at a few sizes: what has both is not worth a proof of either."""

from __future__ import annotations

import random

from ..errors import ShapeError
from .generators import cached, generator
from .polynomial import Poly, as_poly

__all__ = ["signs_met"]

_POINTS = 16
#: Sizes up to 2**14, as many small ones as large ones: latencies count at some, bandwidths at others.
_LARGEST_POWER = 14


@cached(1 << 14)
def signs_met(p: Poly) -> frozenset[int]:
    """Return which of 1 and -1 are signs of a polynomial at some positive whole sizes, as far as it was tried.

    Values are exact, so that each sign is one that it has, and the sizes are the same each time. A power that is an
    atom is left alone: its number may be as long as it likes.

    Examples
    --------
    >>> from costgraph.notation.grammar import parse_formula
    >>> sorted(signs_met(parse_formula("B*S - 40*B"))), sorted(signs_met(parse_formula("B*S + 3")))
    ([-1, 1], [1])
    """
    found, draw, names = set[int](), random.Random(0), sorted(p.names())
    if any(k[0] == "~" and generator(k).is_Pow for k in p.generators()):
        return frozenset()
    for _ in range(_POINTS):
        sizes = {name: as_poly(draw.randint(1, 2 ** draw.randint(0, _LARGEST_POWER))) for name in names}
        try:
            value = p.bind(sizes).constant
        except ShapeError:  # a division by zero: no admissible sizes
            continue
        if value:
            found.add(1 if value > 0 else -1)
        if len(found) == 2:
            break
    return frozenset(found)
