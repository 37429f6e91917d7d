"""What ranks of a pipeline hold and send, counted in the action lists of their schedules."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import sympy

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.dominance import Table, corners, skyline
from ..algebra.extremum import smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import dims
from ..bind.evaluate import Formula, answer
from ..errors import GraphError, UnsupportedError
from ..ir.graph import Held, amount, need_choice, need_flag, positive

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "asked",
    "done_by",
    "here",
    "schedule",
    "COSTS",
    "TIMES",
    "idle",
    "idle_at",
    "played",
    "sizes",
    "at_last",
    "beside",
    "in_flight",
    "of_end",
    "reached",
    "sends",
    "Order",
]


# -- schedules ---------------------------------------------------------------------------------------------------------
# Schedules of a pipeline: one description each, from which action lists and all that is counted in them follow.

_MOST_ACTIONS = 5_000_000
_M, _P, _V, _PLACE = dims("m p v place")


class Action(NamedTuple):
    """What a rank does at its turn."""

    kind: str
    """F forward; I the gradient of the input, W of the weights, B both at once; `send F`, `receive F`, and of B"""
    stage: int
    """stage of the model, from 0"""
    micro_batch: int
    """number of the micro-batch, from 0"""
    peer: int | None = None
    """the rank at the other end of a send or receive"""


@dataclass(frozen=True)
class Schedule:
    """What a rank does, as phases of words that are repeated.

    A word is an action and, where its chunk is not the next one in turn, the chunk of the rank that it is of; `W` is
    of the oldest micro-batch whose weights have no gradient yet. Counts are formulas of micro-batches m, ranks p,
    chunks v of a rank, and the rank r.
    """

    phases: Callable[[Any, Any, Any, Any], list[tuple[str, Any]]]
    """words, and how often they are repeated"""
    least: Callable[[Any, Any], Any] = lambda m, p: m - 1
    """not negative where there are micro-batches enough"""
    chunks: int | None = 1
    """stages of a rank, None for any number"""
    folded: bool = False
    """a rank has the stages r and 2 p - 1 - r instead of r, r + p, ..."""
    whole: bool = False
    """ranks take turns with p micro-batches of each chunk: their number is a multiple of p"""
    both_ways: bool = False
    """micro-batches enter at both ends, half of them each: two half pipelines, folded and face to face"""


def _gpipe(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    return [("F", m), ("B", m)]


def _one_by_one(ahead: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any, Any], list[tuple[str, Any]]]:
    """Return phases of as many forwards as are ahead of the first backward, then one each in turn."""

    def phases(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
        every = (m * v, ahead(p, v, r))
        w = min(every) if isinstance(m, int) else sympy.Min(*every)
        return [("F", w), ("B F", m * v - w), ("B", w)]

    return phases


def _zero_bubble(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    # gradients of weights lag by r, so that all ranks hold the same number of micro-batches
    w = v * p - r
    return [("F", w), ("I F", r), ("I W F", m * v - w - r), ("I W", w), ("W", r)]


def _zbv(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    return [
        ("F0", 2 * (p - r) - 1), ("F1 F0", r), ("F1 I1 W1", p - r), ("F0 I0 W0 F1 I1 W1", m - 2 * p + r + 1),
        ("I0 W0 F1 I1 W1", p - 1 - r), ("I0 I1", r), ("I0 W0", p - r), ("W1", r), ("W0", r),
    ]  # fmt: skip


def _dualpipe_v(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    rest = p - r - 1
    return [
        ("F0", 2 * rest), ("F0 F1", r + 1), ("I1 W F1", rest), ("F0 B1 F1 B0", m - 2 * p + r + 1),
        ("B1 F1 B0", rest), ("B", r + 1), ("I", r + 1), ("W I0", rest), ("W", r + 1),
    ]  # fmt: skip


@cache
def here() -> sympy.Expr:
    """Return the rank in formulas of a schedule."""
    # a symbol is positive, and ranks count from 0; no formula is made while the package is imported: sympy's first sum
    # imports its tensors
    return _PLACE - 1


SCHEDULES: Mapping[str, Schedule] = {
    # Huang et al. 2018, arXiv 1811.06965
    "gpipe": Schedule(_gpipe),
    # Narayanan et al. 2021, arXiv 2104.04473: the first backward reaches rank r behind the forwards of p - r
    # micro-batches; with chunks, behind those of all but the last one, and a step there and back from the last rank
    "1f1b": Schedule(_one_by_one(lambda p, v, r: p - r)),
    "interleaved": Schedule(
        _one_by_one(lambda p, v, r: (v - 1) * p + 2 * (p - 1 - r) + 1), lambda m, p: m - p, None, whole=True
    ),
    # Qi et al. 2023, arXiv 2401.10241, and 2024, arXiv 2405.15362
    "zb-h1": Schedule(_zero_bubble, lambda m, p: m - p),
    "interleaved-zb": Schedule(_zero_bubble, lambda m, p: m - p, None, whole=True),
    "zbv": Schedule(_zbv, lambda m, p: m - 2 * p + 1, 2, folded=True),
    # DeepSeek-AI 2024, arXiv 2412.19437
    **{
        name: Schedule(_dualpipe_v, lambda m, p: m - 2 * p, 2, folded=True, both_ways=both)
        for name, both in (("dualpipe", True), ("dualpipev", False))
    },
}


# -- what is asked ---------------------------------------------------------------------------------------------------


def _conditions(name: str, ranked: bool) -> Iterator[tuple[Any, str, int]]:
    """Yield formulas, what they are, and their least value."""
    made = SCHEDULES[name]
    yield made.least(_M, _P), "micro-batches above the fewest", 0
    if made.chunks is None:
        yield _V - 1, "virtual stages of a rank beyond one", 1
    else:
        for sign in (1, -1):
            yield sign * (_V - made.chunks), f"virtual stages of a rank beyond {made.chunks}", 0
    if made.whole:
        yield _M / _P, "micro-batches for each rank", 1
    if made.both_ways:
        yield _M / 2, "half of the micro-batches", 1
        yield _P / 2, "half of the ranks", 1
    if ranked:
        yield _P - 1 - here(), "ranks behind this one", 0


def asked(
    name: object, pp: object, micro_batches: object, virtual: object = None, rank: object = None, fewest: int = 1
) -> tuple[dict[str, Poly], tuple[Validity, ...]]:
    """Return the sizes of a schedule by the names of its formulas, and what is asked of those that are open.

    A formula that holds from some number of ranks on says so by `fewest`, which a number is not held to.
    """
    need_choice("schedule", name, SCHEDULES)
    assert isinstance(name, str)
    virtual = (SCHEDULES[name].chunks or 2) if virtual is None else virtual
    given = {"p": ("pp", pp), "m": ("micro_batches", micro_batches), "v": ("virtual", virtual)}
    values = {key: positive(f"schedule {name!r}: {text}", value) for key, (text, value) in given.items()}
    if rank is not None:
        values["place"] = amount(f"schedule {name!r}: rank", rank) + poly(1)
    open_ones = []
    more = [(_P - fewest, "ranks above the fewest", 0)] if fewest > 1 and values["p"].names() else []
    for formula, text, least in (*_conditions(name, rank is not None), *more):
        held = Condition(poly(formula), f"schedule {name!r}: {text}", least, True, frozenset(poly(formula).names()))
        bound = held.formula.bind(values)
        if bound.names():
            open_ones.append(held._replace(formula=bound, names=frozenset(bound.names())))
        else:
            held.check(values)
    return values, (Validity(Conditions((), tuple(open_ones))),) if open_ones else ()


# -- action lists ----------------------------------------------------------------------------------------------------


def done_by(made: Schedule, m: int, p: int, v: int, r: int) -> Iterator[tuple[str, int, int]]:
    """Yield action, chunk and number of micro-batch of a rank."""
    turns: Counter[str] = Counter()
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    last = 0
    for words, count in made.phases(m, p, v, r):
        for word in words.split() * int(count):
            kind, way = word[0], "F" if word[0] == "F" else "B"
            if kind == "W":
                chunk, k = waiting.popleft() if word == "W" else next(w for w in waiting if w[0] == int(word[1]))
                if word != "W":
                    waiting.remove((chunk, k))
            else:
                turn = turns[way] // p % v
                chunk = int(word[1]) if word[1:] else 1 - last if made.folded else turn if way == "F" else v - 1 - turn
                last = chunk if way == "B" else last
                k = done[way, chunk]
                turns[way] += 1
                done[way, chunk] += 1
                if kind == "I":
                    waiting.append((chunk, k))
            yield kind, chunk, k


def _actions(name: str, m: int, p: int, v: int, r: int) -> Iterator[Action]:
    made = SCHEDULES[name]
    if not made.both_ways:
        for kind, chunk, k in done_by(made, m, p, v, r):
            yield Action(kind, 2 * p - 1 - r if made.folded and chunk else r + chunk * p, k)
        return
    mirrored = min(r, p - 1 - r)
    for kind, chunk, k in done_by(made, m // 2, p // 2, v, mirrored):
        # the second chunk is of micro-batches that entered at the other end
        other = chunk != (r != mirrored)
        yield Action(kind, p - 1 - mirrored if chunk else mirrored, k + other * m // 2)


def _with_sends(ranks: list[list[Action]]) -> list[list[Action]]:
    """Return lists with a receive right before what needs it and a send right behind what it is of."""
    owner = {(a.stage, a.micro_batch): r for r, actions in enumerate(ranks) for a in actions if a.kind == "F"}
    out: list[list[Action]] = []
    for r, actions in enumerate(ranks):
        out.append([])
        for a in actions:
            way, on = ("F", 1) if a.kind == "F" else ("B", -1)
            ends = [owner.get((a.stage + step, a.micro_batch), r) for step in (-on, on)]
            if a.kind != "W" and ends[0] != r:
                out[r].append(Action(f"receive {way}", *a[1:3], ends[0]))
            out[r].append(a)
            if a.kind != "W" and ends[1] != r:
                out[r].append(Action(f"send {way}", *a[1:3], ends[1]))
    return out


def schedule(
    name: str, pp: int, micro_batches: int, virtual: int | None = None, *, sends: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank of a pipeline does, in its order.

    Parameters
    ----------
    name : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev.
    pp, micro_batches : int
        Ranks, and micro-batches of a step.
    virtual : int, optional
        Stages of a rank: by default what the schedule has, 2 where it has any number.
    sends : bool
        Whether sends and receives are listed too: a receive right before what needs it.

    Returns
    -------
    tuple of tuple of Action
        By rank.

    Raises
    ------
    BindingError, GraphError, ShapeError, UnsupportedError
        If the schedule is unknown, has no action lists for these numbers, or they are too long.

    Examples
    --------
    >>> import costgraph as cg
    >>> for actions in cg.plan.schedule("zb-h1", 2, 3):
    ...     print(*(f"{a.kind}{a.micro_batch}" for a in actions))
    F0 F1 I0 W0 F2 I1 W1 I2 W2
    F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    need_flag("schedule", sends=sends)
    values, _ = asked(name, pp, micro_batches, virtual)
    p, m, v = (int(values[key].expr) for key in "pmv")
    if m * p * v > _MOST_ACTIONS:
        raise UnsupportedError(f"schedule {name!r}: {m * p * v} forwards, expected at most {_MOST_ACTIONS}")
    ranks = [list(_actions(name, m, p, v, r)) for r in range(p)]
    return tuple(map(tuple, _with_sends(ranks) if sends else ranks))


# -- events ------------------------------------------------------------------------------------------------------------
# Actions of a pipeline played as events, and the idle time of its ranks in closed form for any times.

_EVENTS_P, _F, _I, _W = dims("p forward input weight")
#: The times in the formulas of `idle`, of which each row of `idle_at` has amounts.
TIMES = (_F, _I, _W)
#: Rows of amounts of forward, input and weight in a time; the largest of them is meant.
COSTS = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}
_SAMPLES = 6
_MANY = 16


def _needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield forwards and gradients of inputs that are there before an action starts."""
    kind, stage, number, _ = action
    if kind == "F":
        yield from [("F", stage - 1, number)] if stage else []
    elif kind == "W":
        yield "I", stage, number
    else:
        yield "F", stage, number
        yield from [("I", stage + 1, number)] if stage < last else []


def played(
    ranks: Sequence[Sequence[Action]], zero: Any, after: Callable[[Any, Action], Any],
    latest: Callable[[list[Any]], Any], sent: Callable[[Any], Any] = lambda time: time,
) -> list[list[tuple[Action, Any, Any]]]:  # fmt: skip
    """Return when each action starts and ends, in any order of numbers that has a latest of several."""
    last = max((a.stage for actions in ranks for a in actions), default=0)
    done: dict[tuple[str, int, int], tuple[int, Any]] = {}
    out: list[list[tuple[Action, Any, Any]]] = [[] for _ in ranks]
    left = [list(reversed([a for a in actions if a.kind in COSTS])) for actions in ranks]
    waiting = True
    while waiting:
        waiting = False
        for r, actions in enumerate(left):
            while actions and all(need in done for need in _needs(actions[-1], last)):
                a = actions.pop()
                before = [done[need] for need in _needs(a, last)]
                start = latest([out[r][-1][2] if out[r] else zero, *(t if at == r else sent(t) for at, t in before)])
                out[r].append((a, start, after(start, a)))
                done["I" if a.kind == "B" else a.kind, a.stage, a.micro_batch] = r, out[r][-1][2]
                waiting = True
    for r, actions in enumerate(left):
        if actions:
            kind, stage, number, _ = actions[-1]
            raise GraphError(
                f"simulate: rank {r} waits for ever to do {kind} of stage {stage} and micro-batch {number}, expected "
                f"lists in which what it needs is done before"
            )
    return out


# -- the idle share as a formula -------------------------------------------------------------------------------------


def _hull(rows: Table) -> Table:
    """Keep the rows of which one is the largest for some times of forward, input and weight."""
    rows = rows[skyline(rows, range(len(rows)))]
    return rows[corners(rows)]


def _latest(times: Sequence[Table]) -> Table:
    found = np.vstack(times)  # of few rows, corners are not worth their search
    return (
        found if len(times) == 1 else found[skyline(found, range(len(found)))] if len(found) < _MANY else _hull(found)
    )


@cache
def idle_at(name: str, p: int, m: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return the idle time of a step: the largest of some sums of times, for any times, as amounts of each of three.

    The events are those of `simulate`; a time is a set of sums, the largest of which it is.
    """
    ranks = schedule(name, p, m, v)
    costs = {kind: np.array([cost]) for kind, cost in COSTS.items()}
    zero = np.zeros((1, 3), dtype=np.int64)
    ends = [row[-1][2] for row in played(ranks, zero, lambda start, a: start + costs[a.kind], _latest)]
    busy = sum(costs[a.kind] for a in ranks[0])
    return tuple(sorted(tuple(int(n) for n in row) for row in _hull(_latest(ends)) - busy))


def sizes(name: str, p: int) -> Iterator[tuple[int, int]]:
    """Yield micro-batches and chunks that a schedule has lists for on some ranks: the fewest, and a few more."""
    made = SCHEDULES[name]
    step = p if made.whole else 2 if made.both_ways else 1
    ranks = p // 2 if made.both_ways else p
    fewest = max(1, -int(made.least(0, ranks)) * (p // ranks))
    start = -(-fewest // step) * step
    for v in (2, 3) if made.chunks is None else (made.chunks,):
        for more in (0, 1, 2):
            yield start + more * step, v


@cache
def idle(name: str) -> tuple[tuple[sympy.Expr, ...], int]:
    """Return the sums of which the idle time is the largest, in the number of ranks, and from how many ranks on.

    A run on a few ranks has its idle time in closed form, for any times. What is asked of all runs: chunks and
    micro-batches do not matter, and each sum grows by the same amounts with every rank.
    """
    step = 2 if SCHEDULES[name].both_ways else 1
    counts = range(step, step * (_SAMPLES + 1), step)
    runs = {p: {idle_at(name, p, m, v) for m, v in sizes(name, p)} for p in counts}
    tables = [np.array(min(runs[p])) for p in counts[-2:]]
    if tables[0].shape == tables[1].shape:
        grown, first = tables[1] - tables[0], tables[1] - _SAMPLES * (tables[1] - tables[0])
        holds = [runs[p] == {_as_rows(_hull(first + grown * (p // step)))} for p in counts]
        if all(holds[2:]):
            sums = [
                sympy.Add(*((a + b * _EVENTS_P / step) * t for a, b, t in zip(*pair, (_F, _I, _W), strict=True)))
                for pair in zip(first.tolist(), grown.tolist(), strict=True)
            ]
            return tuple(sums), next(p for i, p in enumerate(counts) if all(holds[i:]))
    raise UnsupportedError(f"bubble: schedule {name!r} has no idle time that grows evenly with its ranks")


def _as_rows(table: Table) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(int(n) for n in row) for row in table))


# -- in flight ---------------------------------------------------------------------------------------------------------

_IN_FLIGHT_M, _IN_FLIGHT_P, _IN_FLIGHT_V, _IN_FLIGHT_PLACE = dims("m p v place")

# -- chunks that wait -----------------------------------------------------------------------------------------------

_MOST_RANKS = 4
_LEAVES = {"F": (1, 0), "I": (-1, 1), "B": (-1, 0), "W": (0, -1)}
"""what an action adds to chunks that wait for their backward pass, and for gradients of their weights"""
_OWN = {"F": (0, 0), "I": (1, 0), "B": (1, 0), "W": (0, 1)}
"""whether the chunk that it is of waits there itself before"""
_BYTES = np.array([(i, j) for i in range(8) for j in range(8)]).T
"""what chunks may hold, both of these"""

_Pair: TypeAlias = tuple[Any, Any]
_Played: TypeAlias = list[tuple[str, int, int]]
#: What of the chunks beside one that an action of a kind is of is asked for, if anything.
_Asked: TypeAlias = Callable[[str, Any, Any], _Pair | None]


def _samples(made: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield numbers of micro-batches, ranks and chunks that a schedule has lists for: the fewest, and more."""
    for p in range(1, _MOST_RANKS + 1):
        fewest = max(1, -int(made.least(0, p)))
        for v in (2, 3) if made.chunks is None else (made.chunks,):
            for more in (0, 1, 3):
                yield (p * (1 + more) if made.whole else fewest + more * p), p, v


@cache
def _lists(name: str) -> tuple[tuple[tuple[int, int, int, int], _Played], ...]:
    """Return lists of all ranks, each with micro-batches, ranks, chunks and its rank."""
    made = SCHEDULES[name]
    every = [(m, p, v, r) for m, p, v in _samples(made) for r in range(p)]
    return tuple((sizes, list(done_by(made, *sizes))) for sizes in every)


def _of_phases(name: str, m: Any, p: Any, v: Any, r: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what waits beside each action of the first and of the last repetition of each phase.

    From one repetition to the next it changes by the same numbers: no other one has more of both, or of a sum of both.
    """
    held: _Pair = (0, 0)
    for words, count in SCHEDULES[name].phases(m, p, v, r):
        ahead: list[tuple[str, _Pair]] = []
        grown: _Pair = (0, 0)
        for kind in (word[0] for word in words.split()):
            ahead.append((kind, _minus(grown, _OWN[kind])))
            grown = _plus(grown, _LEAVES[kind])
        last = _plus(held, (grown[0] * (count - 1), grown[1] * (count - 1)))
        for start in (held, last):
            yield from ((kind, *_plus(start, more)) for kind, more in ahead)
        held = _plus(last, grown)


def _of_list(actions: _Played) -> Iterator[tuple[str, int, int]]:
    """Yield what waits beside each action of a list."""
    held: _Pair = (0, 0)
    for kind, _, _ in actions:
        yield kind, *_minus(held, _OWN[kind])
        held = _plus(held, _LEAVES[kind])


def _plus(a: _Pair, b: _Pair) -> _Pair:
    return a[0] + b[0], a[1] + b[1]


def _minus(a: _Pair, b: _Pair) -> _Pair:
    return a[0] - b[0], a[1] - b[1]


def _most(name: str, asked_for: _Asked, within: _Asked | None = None) -> list[_Pair]:
    """Return formulas of what waits, the largest of which is what waits at the most: few, chosen by lists.

    Where a phase is not done on some rank, what would be held in it says nothing, and most times hold less than others.
    With `within` it may be more, but no more than what is asked for by that.
    """
    rows = [[found for at in _of_phases(name, *sizes) if (found := asked_for(*at))] for sizes, _ in _lists(name)]
    might = np.array(rows, dtype=np.int64) @ _BYTES
    is_so, most = (
        np.array([(np.array([found for at in {*_of_list(actions)} if (found := ask(*at))]) @ _BYTES).max(axis=0)
                  for _, actions in _lists(name)])
        for ask in (asked_for, within or asked_for)
    )  # fmt: skip
    forms = [
        found for at in _of_phases(name, _IN_FLIGHT_M, _IN_FLIGHT_P, _IN_FLIGHT_V, here()) if (found := asked_for(*at))
    ]
    forms = [(sympy.expand(a), sympy.expand(b)) for a, b in forms]
    kept = [k for k in range(len(forms)) if (might[:, k] <= most).all() and forms.index(forms[k]) == k]
    for k in sorted(kept, key=lambda k: (-len(str(forms[k])), k)):
        others = [j for j in kept if j != k]
        if others and (might[:, others].max(axis=1) >= is_so).all():
            kept = others
    if not kept or not (might[:, kept].max(axis=1) >= is_so).all():
        raise UnsupportedError(f"schedule {name!r}: what waits in its lists is not what its phases say")
    return [(_of_whole(name, forms[k][0]), _of_whole(name, forms[k][1])) for k in kept]


def _of_whole(name: str, formula: Any) -> Poly:
    """Return a formula of a schedule's phases in ranks and micro-batches of the whole pipeline."""
    halves = {"p": poly(_IN_FLIGHT_P / 2), "m": poly(_IN_FLIGHT_M / 2)} if SCHEDULES[name].both_ways else {}
    return poly(formula).bind(halves)


@cache
def beside(name: str) -> tuple[tuple[Poly, Poly, bool], ...]:
    """Return how many chunks wait beside one that runs, for their backward pass and for gradients of weights alone.

    At all times at which one of both, or a sum of both, may be largest, and whether the one that runs makes all of its
    gradients at once where others make those of weights later. Beside a forward wait those that wait beside what
    follows it.
    """

    def beside_of(kinds: str) -> _Asked:
        return lambda kind, waits, weights: (waits, weights) if kind in kinds else None

    every = beside_of("FBIW")
    if not {"B", "I"} <= {kind for _, actions in _lists(name) for kind, *_ in actions}:
        return tuple((*pair, False) for pair in _most(name, every))
    return tuple((*pair, kinds == "B") for kinds in ("IW", "B") for pair in _most(name, beside_of(kinds), every))


@cache
def _most_held(name: str, until: str) -> Poly:
    """Return how many chunks wait at the most, the one included that an action is of: right behind a forward."""
    later = int(until == "weights")
    found = _most(name, lambda kind, a, b: (a + 1 + b * later, 0) if kind == "F" else None)
    return poly(sympy.Max(*(p.expr for p, _ in found)))


# -- chunks apart ----------------------------------------------------------------------------------------------------


def _fitted(name: str, count: Callable[[_Played, int], int], at: str, *, enough: bool) -> Poly:
    """Return what is counted in lists as a formula that is linear in ranks, in chunks, and in their product.

    With `enough` it is the smaller one of the number of micro-batches and such a formula. It is that of all lists, or
    there is none.
    """
    made = SCHEDULES[name]
    terms = [sympy.Integer(1), _IN_FLIGHT_P, *([here()] if at == "any" else [])]
    terms += [_IN_FLIGHT_V, _IN_FLIGHT_V * _IN_FLIGHT_P] if made.chunks is None else []
    used = [
        (sizes, actions) for sizes, actions in _lists(name)
        if at == "any" or sizes[3] == (0 if at == "first" else sizes[1] - 1)
    ]  # fmt: skip
    value = sympy.lambdify((_IN_FLIGHT_M, _IN_FLIGHT_P, _IN_FLIGHT_V, _IN_FLIGHT_PLACE), terms)
    table = np.array([value(m, p, v, r + 1) for (m, p, v, r), _ in used])
    counted = np.array([count(actions, sizes[2]) for sizes, actions in used])
    many = np.array([sizes[0] for sizes, _ in used])
    free = counted < many if enough else many > 0
    factors = np.round(np.linalg.lstsq(table[free], counted[free], rcond=None)[0]).astype(int)
    said = table @ factors
    if not ((np.minimum(said, many) if enough else said) == counted).all():
        raise UnsupportedError(f"schedule {name!r}: what is counted in its lists is not linear in ranks and chunks")
    formula = sympy.Add(*(int(n) * t for n, t in zip(factors, terms, strict=True)))
    return _of_whole(name, sympy.Min(_IN_FLIGHT_M, formula) if enough else formula)


@cache
def reached(name: str) -> Poly:
    """Return how many gradients of weights are made until each chunk of a rank has one."""

    def count(actions: _Played, v: int) -> int:
        done = [chunk for kind, chunk, _ in actions if kind in "BW"]
        return max(done.index(chunk) for chunk in range(v)) + 1

    return _fitted(name, count, "any", enough=False)


@cache
def of_end(name: str, last: bool) -> tuple[Poly, Poly]:
    """Return how many micro-batches of an end of the model a rank holds at the most until both gradients are there.

    Until those that go to other ranks, and beside one that runs until those of weights.
    """
    folded = SCHEDULES[name].folded

    def part(actions: _Played, v: int) -> _Played:
        return [a for a in actions if a[1] == (v - 1 if last else 0)]

    def waits(actions: _Played, v: int) -> int:
        return max(n + 1 for kind, n, _ in _of_list(part(actions, v)) if kind == "F")

    def weights(actions: _Played, v: int) -> int:
        return max(n for *_, n in _of_list(part(actions, v)))

    at = "last" if last and not folded else "first"
    return _fitted(name, waits, at, enough=True), _fitted(name, weights, at, enough=False)


@cache
def at_last(name: str, chunk: int, at: str) -> Poly:
    """Return how many micro-batches of a chunk, 0 or -1, wait for their backward pass at the last forward of a rank."""

    def count(actions: _Played, v: int) -> int:
        last = max(i for i, (kind, *_) in enumerate(actions) if kind == "F")
        done = [kind for kind, of, _ in actions[: last + 1] if of == chunk % v]
        return sum(_LEAVES[kind][0] for kind in done)

    return _fitted(name, count, at, enough=True)


# -- what is asked ---------------------------------------------------------------------------------------------------


def in_flight(
    schedule: str, pp: Formula, micro_batches: Formula, virtual: Formula | None, rank: Formula, until: str = "input"
) -> Formula:
    """Return how many micro-batches a rank holds at the most, those of its chunks counted apart.

    Parameters
    ----------
    schedule : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev.
    pp : int or sympy.Expr
        Ranks of the pipeline.
    micro_batches : int or sympy.Expr
        Micro-batches of a step.
    virtual : int or sympy.Expr, optional
        Chunks of a rank: by default what the schedule has, 2 where it has any number.
    rank : int or sympy.Expr
        The rank, from 0; a formula such as `r - 1` counts from there too.
    until : str
        input: from a forward until the gradient of its input; weights: until the gradient of its weights.

    Returns
    -------
    int or sympy.Expr
        Chunks of one micro-batch, each a virtual-th of what a rank has; the largest sum over the phases of the
        schedule. A formula holds under the conditions of the schedule, which are looked at when it is bound.

    Raises
    ------
    BindingError, GraphError, ShapeError
        If the schedule is unknown, or has no action lists for these numbers.

    Examples
    --------
    >>> import costgraph as cg
    >>> m, p, v, r = cg.dims("m p v r")
    >>> cg.plan.in_flight("1f1b", 4, 16, 1, rank=1), cg.plan.in_flight("1f1b", p, m, 1, r)
    (3, Min(m, p - r))
    >>> [cg.plan.in_flight("interleaved-zb", p, m, v, r, until=until) for until in ("input", "weights")]
    [p*v - r, p*v]
    """
    need_choice("in_flight: until", until, ("input", "weights"))
    values, held = asked(schedule, pp, micro_batches, virtual, rank)
    return answer(_most_held(schedule, until).bind(values), held)


def sends(schedule: str, pp: Formula, micro_batches: Formula, virtual: Formula | None, rank: Formula) -> Formula:
    """Return how many tensors a rank sends in a step, results of stages and gradients of their inputs together.

    Parameters
    ----------
    schedule : str
        As of `in_flight`.
    pp : int or sympy.Expr
        Ranks of the pipeline.
    micro_batches : int or sympy.Expr
        Micro-batches of a step.
    virtual : int or sympy.Expr, optional
        Chunks of a rank.
    rank : int or sympy.Expr
        The rank, from 0.

    Returns
    -------
    int or sympy.Expr
        Sends. Each of v stages sends on m results and back m gradients, but for the last and the first stage of the
        model, and from stage to stage of one rank nothing is sent.

    Raises
    ------
    BindingError, GraphError, ShapeError
        As `in_flight`.

    Examples
    --------
    >>> import costgraph as cg
    >>> [cg.plan.sends("1f1b", 4, 16, 1, rank) for rank in range(4)]
    [16, 32, 32, 16]
    """
    values, held = asked(schedule, pp, micro_batches, virtual, rank)
    # 1 where there is a rank on that side, else 0
    before, behind = sympy.Min(1, here()), sympy.Min(1, _IN_FLIGHT_P - 1 - here())
    made = SCHEDULES[schedule]
    if made.both_ways:  # of each half, the same rank is the first for one and the last for the other
        found = _IN_FLIGHT_M * (before + behind)
    elif made.folded:  # to both neighbours, on the way there and on the way back
        found = 2 * _IN_FLIGHT_M * (before + behind)
    else:  # ranks are a ring for all but the ends of the model
        found = _IN_FLIGHT_M * (2 * (_IN_FLIGHT_V - 1) * sympy.Min(1, _IN_FLIGHT_P - 1) + before + behind)
    return answer(poly(found).bind(values), held)


# -- stages held -------------------------------------------------------------------------------------------------------
# What ranks of a pipeline hold of micro-batches that wait, from their schedules.


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
