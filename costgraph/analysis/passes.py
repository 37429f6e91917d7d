"""Time of a pipeline from that of the passes of its stages: of 1F1B the longest path through them, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import sympy

from ..algebra.dominance import NOTHING_KNOWN, Relations
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..graph.placement import Waiting
from ..transforms.events import TIMES, idle, idle_at, sizes
from ..transforms.schedules import SCHEDULES
from .seconds import largest

__all__ = ["Alike", "Shares", "most", "of_batches", "of_few", "of_shares", "one_by_one"]

#: Times, or arrays of them.
T = TypeVar("T", bound=Any)


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
    """Return the seconds of a step of 1F1B of `m` micro-batches, without sends.

    Where the number of these or of ranks is open, it is of two micro-batches for each rank or more.

    Derived. The longest path from the first forward to the last backward goes through forwards alone to some rank a, p
    - 1 - a times on the slowest rank on its way; then forwards down the ranks and backwards up in turn, as often as it
    can on one rank s; and through backwards alone from some rank c on. Where s is fixed, a and c are chosen apart. Of
    fewer than 2 p micro-batches some of these paths are none.
    """
    p = runs[-1].last + 1
    beyond = (m - 2 * p).constant
    if beyond is not None and beyond < 0:
        each = [run for run in runs for _ in range(int((run.last - run.first + 1).constant or 0))]
        many = int(m.constant or 0)
        return of_few([r.forward for r in each], [r.backward for r in each], many, lambda found: most(found, known))
    paths = _Paths(runs, known)
    ends = paths.ends()
    found = []
    for s in ends:
        into, out = (largest([(paths.way(a, s, back=back), "") for a in ends], known) for back in (False, True))
        found.append((into + out + (m - p + s.at) * paths.both(s), ""))
    return largest(found, known)


def of_few(forward: Sequence[T], backward: Sequence[T], m: int, largest_of: Callable[[list[T]], T]) -> T:
    """Return the time of 1F1B of any number of micro-batches, as `one_by_one`, of times that have a largest of several.

    A path alone up to rank a is on the slowest rank on its way no more often than there are other micro-batches. Where
    it comes to rank s from before, each rank on the way takes a turn of those there, of which there are m - p + s.
    """
    p, found = len(forward), list[T]()
    ahead, back = (_Way(there, m, largest_of) for there in (forward, backward))
    for s in range(max(0, p - m), p):
        left, both = m - p + s, forward[s] + backward[s]
        # of a way that takes some turns, the longest of those that take no more
        into, out = ([n - both * k for k, n in way.to(s, other)] for way, other in ((ahead, back), (back, ahead)))
        most_out = list(accumulate(out, lambda one, other: largest_of([one, other])))
        for k, one in enumerate(into):
            rest = left - (k + 1 if k else 0)
            if rest >= 0:
                found.append(one + both * left + most_out[min(max(rest - 1, 0), s)])
    return largest_of(found)


class _Way(Generic[T]):
    """Paths through forwards alone, or back through backwards."""

    def __init__(self, times: Sequence[T], m: int, largest_of: Callable[[list[T]], T]) -> None:
        self.times, self.largest_of = times, largest_of
        self.sums: list[T] = list(accumulate(times))
        slowest = accumulate(times, lambda one, other: largest_of([one, other]))
        waits = (min(len(times) - 1 - a, m - 1) for a in range(len(times)))
        self.alone = [n + most * k for n, most, k in zip(self.sums, slowest, waits, strict=True)]

    def to(self, s: int, other: _Way[T]) -> Iterator[tuple[int, T]]:
        """Yield how many turns on rank s it takes to come there from each rank before, and how long it takes."""
        alone, back = self.alone, other.sums
        yield 0, self.largest_of([alone[a] + back[a] - back[s] for a in range(s, len(alone))])
        for a in range(s - 1, -1, -1):
            yield s - a + 1, alone[a] + other.times[a] + self.sums[s] - self.sums[a] + self.times[a]


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


# -- all schedules -----------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Seconds of a stage of a pipeline: of one micro-batch in its passes, and of what a step does once."""

    forward: Poly
    backward: Poly
    weights: Poly
    """of gradients of weights that come behind those that go to other ranks"""
    once: Poly


def of_shares(facts: Sequence[Waiting], shares: Sequence[Shares], send: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
    """Return the seconds of a step of a pipeline from those of its stages; `send` is the time of what one hands on.

    `facts` are what each kind of stage knows of the others.
    """
    p, m, v = facts[0].stages, facts[0].micro_batches, facts[0].groups
    passes = [forward + back + weights for forward, back, weights, _ in shares]
    once = most((share[-1] for share in shares), known)
    if facts[0].schedule not in ("gpipe", "1f1b"):
        made = SCHEDULES[facts[0].schedule]
        of_model = p if made.both_ways else p * v
        waits = 2 * (of_model - (2 if made.folded and not made.both_ways else 1))  # none where it turns, within a rank
        return m * most(passes, known) + _idle(facts[0], shares, known) + waits * send + once
    if facts[0].schedule == "gpipe":
        through = total(fact.alike * one for one, fact in zip(passes, facts, strict=True))
        slowest = most((f for f, *_ in shares), known) + most((b for _, b, *_ in shares), known)
        return through + (m - 1) * slowest + 2 * (p - 1) * send + once
    # what the last stage sends back is waited for once every p micro-batches less
    n = m + p - 1
    waits = 2 * (n - poly(sympy.ceiling((n / p).expr)))
    runs = [
        Alike(*run, forward, back)
        for fact, (forward, back, *_) in zip(facts, shares, strict=True)
        for run in fact.ranks
    ]
    if all(run.first.constant is not None for run in runs):
        runs.sort(key=lambda run: run.first.constant or 0)
    return one_by_one(runs, m, known) + waits * send + once


def of_batches(facts: Sequence[Waiting], times: Sequence[Poly], send: Poly, known: Relations) -> Poly:
    """Return how long each batch of a pipeline without passes back waits until it is at the same stage again."""
    through = total(f.alike * one for f, one in zip(facts, times, strict=True)) + (facts[0].stages - 1) * send
    return most([through, facts[0].micro_batches * most(times, known)], known)


def _idle(facts: Waiting, shares: Sequence[Shares], known: Relations) -> Poly:
    """Return how long a rank waits for others of which each group of layers takes as long as the slowest one."""
    # of both directions a rank has half of the micro-batches each, which go through one of its stages
    groups = ONE if SCHEDULES[facts.schedule].both_ways else facts.groups
    each = (most(times, known) / groups for times in list(zip(*shares, strict=True))[:3])
    put = dict(zip(("p", "forward", "input", "weight"), (facts.stages, *each), strict=True))
    forms, fewest = idle(facts.schedule)
    ranks = facts.stages.constant
    if ranks is not None and ranks < fewest:
        many, chunks = next(sizes(facts.schedule, int(ranks)))
        forms = tuple(sympy.Matrix([row]).dot(TIMES) for row in idle_at(facts.schedule, int(ranks), many, chunks))
    # none of the sums is more than nothing of a rank that waits for nobody
    found = [p for p in (poly(form).bind(put) for form in forms) if not known.nonnegative(-p)]
    return most(found, known) if found else ZERO


def most(times: Iterable[Poly], known: Relations) -> Poly:
    """Return the largest of some times."""
    return largest([(p, "") for p in times], known)
