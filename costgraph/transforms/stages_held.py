"""What ranks of a pipeline hold of micro-batches that wait, from their schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, ZERO, Poly
from ..graph.placement import Held
from .in_flight import at_last, beside, of_end, reached
from .schedules import SCHEDULES

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
        sizes = {**dict(zip("pm", self.whole, strict=True)), "v": self.v, "place": rank + 1}
        for *pair, at_once in beside(self.name):
            waits, weights = (n.bind(sizes) for n in pair)
            if later:  # all that are left but the one that runs
                every = smaller(waits + weights, self.m * self.v - reached(self.name).bind(sizes) - 1)
                weights = smaller(weights, every) if weights else ZERO
                waits = every - weights
            # what waits for its backward pass beyond the groups that the pass itself goes through
            beyond = waits - (self.v - 1)
            before, behind = (
                self.of_end(at_end, sizes) if there and self.v != ONE else (beyond, weights)
                for there, at_end in ((first, False), (last, True))
            )
            yield (beyond, weights, *before, *behind, ONE if at_once else ZERO)

    def of_end(self, last: bool, sizes: Mapping[str, Poly]) -> tuple[Poly, Poly]:
        """Return how many micro-batches of an end of the model wait, one that runs left out."""
        waits, weights = (n.bind(sizes) for n in of_end(self.name, last))
        return waits - 1, weights

    def ends(self, *, first: bool, last: bool, turns: bool) -> tuple[Poly, Poly]:
        """Return how many micro-batches wait at the last forward where nothing is received, and where nothing is sent.

        These are the first and the last group of the model, and on the rank where a folded pipeline turns the second
        and the first one of its own.
        """
        if self.v == ONE:  # a rank has that group alone, or none of it
            return ZERO, ZERO
        folded, sizes = self.made.folded, {**dict(zip("pm", self.whole, strict=True)), "v": self.v}
        if folded and turns and not last:
            found = at_last(self.name, -1, "last"), at_last(self.name, 0, "last")
        else:
            found = at_last(self.name, 0, "first"), at_last(self.name, -1, "first" if folded else "last")
        return found[0].bind(sizes), found[1].bind(sizes)


#: Micro-batches, ranks, groups and a rank for which each schedule has all of its phases.
_SOME = (12, 4, 2, 1)
