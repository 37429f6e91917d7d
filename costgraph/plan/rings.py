"""Seconds of what is sent in a torus, at many points at once: which rings there are depends on the degrees of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import nan

import numpy as np

from ..algebra.polynomial import poly
from ..analysis.arrays import Array, Values
from ..analysis.exchange import message, placed, ranks_apart, taken
from ..analysis.work import Asked, exact
from ..errors import SpecError
from ..graph.op import Op
from ..hardware.specs import Hardware

__all__ = ["Rings"]


@dataclass
class Rings:
    """Times over rings, each worked out once: some seconds, and so many more for each byte."""

    hardware: Hardware
    """in a torus"""
    lines: dict[tuple[str, Fraction, Fraction], tuple[float, float]] = field(default_factory=dict)
    """by what is sent, ranks, and devices from one to the next; NaN where the torus has no rings for these"""
    why: str = ""
    """which ranks were the first that have none"""

    def seconds(self, op: Op, asked: Asked, value: Values, shape: tuple[int, ...]) -> Array:
        """Return the seconds that a collective or send takes once at points; NaN where there are no rings for it."""
        times, what, size = message(op, asked.values)
        group = (np.broadcast_to(value(p.bind(asked.values)), shape) for p in ranks_apart(op, asked.graph))
        pairs, place = np.unique(np.array([*group]), axis=1, return_inverse=True)
        each = np.array([self.line(op, what, *map(Fraction, pair)) for pair in pairs.T.tolist()])
        start, slope = each[place.reshape(-1)].T
        found: Array = np.broadcast_to(value(times) * (start + slope * value(size)), shape)
        return found

    def line(self, op: Op, what: str, ranks: Fraction, apart: Fraction) -> tuple[float, float]:
        """Return the seconds of nothing, and those of each byte."""
        key = what, ranks, apart
        if key not in self.lines:
            try:
                group = placed(op.kind.axis, poly(ranks), poly(apart), self.hardware)  # type: ignore[attr-defined]
            except SpecError as error:
                self.why, self.lines[key] = self.why or str(error), (nan, nan)
            else:
                nothing, one = (exact(taken(what, poly(n), group)) for n in (0, 1))
                self.lines[key] = float(nothing), float(one - nothing)
        return self.lines[key]
