"""What ranks of a pipeline hold of micro-batches that wait, from their schedules."""

from __future__ import annotations

from collections.abc import Iterator

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..graph.placement import Held
from .schedules import SCHEDULES, in_flight

__all__ = ["Order"]


class Order:
    """The order in which ranks of a pipeline work: of one whose micro-batches enter at both ends, of one half of it.

    A rank has some groups of layers, a step some micro-batches.
    """

    def __init__(self, name: str, pp: Poly, micro_batches: Poly, groups: Poly) -> None:
        self.name, self.v, self.made = name, groups, SCHEDULES[name]
        self.whole = pp, micro_batches
        half = 2 if self.made.both_ways else 1
        self.p, self.m = pp / half, micro_batches / half
        self.splits = any("W" in words for words, _ in self.made.phases(*_SOME))
        """Whether gradients of weights come later than those that are handed back."""

    def held(self, rank: Poly, *, first: bool, last: bool, later: bool) -> Iterator[Held]:
        """Yield what a rank holds beside a pass through all of its groups, at times at which that may be the most.

        Ranks are counted from 0; `first` and `last` say whether it has that end of the model, `later` whether gradients
        of all its weights are there.
        """
        p, m = self.whole
        until = [poly(in_flight(self.name, p.expr, m.expr, self.v.expr, rank.expr, u)) for u in _UNTIL]
        most = [(until[0] - 1, until[1] - until[0])]
        if self.made.drained is not None:
            forward, weights = self.made.drained(self.p.expr, rank.expr)
            most.append((poly(forward), poly(weights)))
        for waits, weights in most:
            if later and not self.made.folded:
                # gradients are there once each group has gone back: one by one, in blocks of p micro-batches
                left = self.m * self.v - (self.v - 1) * self.p - 2
                every = smaller(waits + weights, left)
                weights = smaller(weights, every) if weights else ZERO
                waits = every - weights
            # what waits for its backward pass beyond the groups that the pass itself goes through
            beyond = waits - (self.v - 1)
            beyond = at_least_zero(beyond) if self.v != ONE else beyond
            yield (beyond, weights, *self.before(beyond, weights, first), *self.behind(beyond, weights, last))

    def before(self, waits: Poly, weights: Poly, first: bool) -> tuple[Poly, Poly]:
        """Return how many of the groups that wait have what is before the layers."""
        return (smaller(self.m, 2 * self.p) - 1 if first and self.v != ONE else waits), weights

    def behind(self, waits: Poly, weights: Poly, last: bool) -> tuple[Poly, Poly]:
        """Return how many have what is behind them: of several groups, the last one of the model goes back at once."""
        return (ZERO if last and self.v != ONE else waits), weights


_UNTIL = ("input", "weights")
#: Micro-batches, ranks, groups and a rank for which each schedule has all of its phases.
_SOME = (12, 4, 2, 1)
