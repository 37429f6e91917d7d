"""Time of one forward, one backward of stages that differ: the longest path through their passes, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..algebra.dominance import Relations
from ..algebra.polynomial import ONE, ZERO, Poly, total
from .seconds import largest

__all__ = ["Alike", "one_by_one"]


class Alike(NamedTuple):
    """Neighbouring ranks of a pipeline whose stages take the same times."""

    first: Poly
    last: Poly
    forward: Poly
    backward: Poly


class _Rank(NamedTuple):
    """A rank beside others: which of those alike, and its number."""

    run: int
    at: Poly


def one_by_one(runs: Sequence[Alike], m: Poly, known: Relations) -> Poly:
    """Return the seconds of a step of 1F1B, without sends.

    Parameters
    ----------
    runs : sequence of Alike
        All ranks, in their order.
    m : Poly
        Micro-batches, two for each rank or more.
    known : Relations
        What is assumed of sizes.

    Notes
    -----
    Derived. The longest path from the first forward to the last backward goes through forwards alone to some rank a,
    p - 1 - a times on the slowest rank on its way; then forwards down the ranks and backwards up in turn, as often as
    it can on one rank s; and through backwards alone from some rank c on. Where s is fixed, a and c are chosen apart.
    It takes 2 p micro-batches: of fewer some of these paths are none, and the sum is too large.
    """
    p = runs[-1].last + 1
    paths = _Paths(runs, known)
    ends = paths.ends()
    found = []
    for s in ends:
        into, out = (largest([(paths.way(a, s, back=back), "") for a in ends], known) for back in (False, True))
        found.append((into + out + (m - p + s.at) * paths.both(s), ""))
    return largest(found, known)


class _Paths:
    """Parts of paths through the passes of ranks."""

    def __init__(self, runs: Sequence[Alike], known: Relations) -> None:
        self.runs, self.p = runs, runs[-1].last + 1
        self.times = [[run.forward for run in runs], [run.backward for run in runs]]
        # of the ranks up to one of a run, the slowest
        self.most = [
            [largest([(t, "") for t in times[: k + 1]], known) for k in range(len(runs))] for times in self.times
        ]

    def ends(self) -> list[_Rank]:
        """Return the first and the last rank of all that are alike: a path that is longest is at one of these."""
        both = ((k, at) for k, run in enumerate(self.runs) for at in dict.fromkeys((run.first, run.last)))
        return [_Rank(k, at) for k, at in both]

    def both(self, s: _Rank) -> Poly:
        """Return the time of a forward and a backward of a rank."""
        return self.times[0][s.run] + self.times[1][s.run]

    def through(self, a: _Rank, s: _Rank, *, back: bool) -> Poly:
        """Return the time of forwards, or of backwards, of the ranks from one to another."""
        counts = (
            (s.at if k == s.run else run.last) - (a.at if k == a.run else run.first) + ONE
            for k, run in enumerate(self.runs[a.run : s.run + 1], a.run)
        )
        return total(n * t for n, t in zip(counts, self.times[back][a.run : s.run + 1], strict=True))

    def way(self, a: _Rank, s: _Rank, *, back: bool) -> Poly:
        """Return what a path on s takes more that goes alone one way up to rank a or, back, from there on."""
        alone = self.through(_Rank(0, ZERO), a, back=back) + (self.p - 1 - a.at) * self.most[back][a.run]
        if _ahead(a, s):
            turns = s.at - a.at + 1
            return alone + self.times[not back][a.run] + self.through(a, s, back=back) - turns * self.both(s)
        return alone + self.through(s, a, back=not back) - self.times[not back][s.run]


def _ahead(a: _Rank, s: _Rank) -> bool:
    """Whether a rank comes before another one; of those alike there are the first and the last one, or numbers."""
    if a.run != s.run or a.at == s.at:
        return a.run < s.run
    between = (s.at - a.at).constant
    return between is None or between > 0
