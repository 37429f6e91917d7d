"""Pipeline schedules: per-rank action lists, their idle time, and the activations in flight.

A schedule is one symbolic description. Closed forms are derived from it and checked against its action lists.
"""

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
    "schedule_sizes",
    "rank_actions",
    "rank_symbol",
    "schedule",
    "COSTS",
    "TIMES",
    "idle",
    "idle_at",
    "run_actions",
    "sizes",
    "waiting_at_last_forward",
    "other_waiting",
    "in_flight",
    "end_stage_peaks",
    "until_each_chunk",
    "sends",
    "RankOrder",
]


# -- schedules ---------------------------------------------------------------------------------------------------------

_MAX_ACTIONS = 5_000_000
_M, _P, _V, _RANK_PLUS_1 = dims("m p v place")


class Action(NamedTuple):
    """One step of a rank: a computation, a send or a receive."""

    kind: str
    """F forward; I input gradient, W weight gradient, B both at once; `send F`, `receive F`, and the same for B"""
    stage: int
    """stage of the model, counted from 0"""
    micro_batch: int
    """micro-batch, counted from 0"""
    peer: int | None = None
    """rank at the other end of a send or receive"""


@dataclass(frozen=True)
class Schedule:
    """A rank's work, as phases in which a sequence of words repeats.

    A word is an action, followed by the rank's chunk unless chunks alternate. A bare `W` belongs to the oldest
    micro-batch without weight gradients. Counts are formulas in micro-batches m, ranks p, chunks v per rank, and the
    rank r.
    """

    phases: Callable[[Any, Any, Any, Any], list[tuple[str, Any]]]
    """words, and their number of repetitions"""
    surplus: Callable[[Any, Any], Any] = lambda m, p: m - 1
    """formula that must not be negative, so that there are enough micro-batches"""
    chunks: int | None = 1
    """stages per rank, None for any number"""
    folded: bool = False
    """whether a rank has stages r and 2 p - 1 - r instead of r, r + p, ..."""
    in_rounds: bool = False
    """whether p micro-batches of each chunk alternate, so that m is a multiple of p"""
    both_ways: bool = False
    """whether half the micro-batches enter at each end: two folded half pipelines, face to face"""


def _gpipe(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    return [("F", m), ("B", m)]


def _one_by_one(ahead: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any, Any], list[tuple[str, Any]]]:
    """Return the phases of a 1F1B schedule: `ahead` warm-up forwards, the steady state, and the cool-down."""

    def phases(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
        candidates = (m * v, ahead(p, v, r))
        w = min(candidates) if isinstance(m, int) else sympy.Min(*candidates)
        return [("F", w), ("B F", m * v - w), ("B", w)]

    return phases


def _zero_bubble(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    # weight gradients lag by r, so that all ranks hold the same number of micro-batches
    w = v * p - r
    return [("F", w), ("I F", r), ("I W F", m * v - w - r), ("I W", w), ("W", r)]


def _zbv(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    return [
        ("F0", 2 * (p - r) - 1), ("F1 F0", r), ("F1 I1 W1", p - r), ("F0 I0 W0 F1 I1 W1", m - 2 * p + r + 1),
        ("I0 W0 F1 I1 W1", p - 1 - r), ("I0 I1", r), ("I0 W0", p - r), ("W1", r), ("W0", r),
    ]  # fmt: skip


def _dualpipe_v(m: Any, p: Any, v: Any, r: Any) -> list[tuple[str, Any]]:
    behind = p - r - 1
    return [
        ("F0", 2 * behind), ("F0 F1", r + 1), ("I1 W F1", behind), ("F0 B1 F1 B0", m - 2 * p + r + 1),
        ("B1 F1 B0", behind), ("B", r + 1), ("I", r + 1), ("W I0", behind), ("W", r + 1),
    ]  # fmt: skip


@cache
def rank_symbol() -> sympy.Expr:
    """Return the rank in a schedule's formulas."""
    # symbols are positive, ranks start at 0; a function, as sympy's first sum imports its tensor module
    return _RANK_PLUS_1 - 1


SCHEDULES: Mapping[str, Schedule] = {
    # Huang et al. 2018, arXiv 1811.06965
    "gpipe": Schedule(_gpipe),
    # Narayanan et al. 2021, arXiv 2104.04473: before its first backward, rank r runs the forwards of p - r
    # micro-batches; if interleaved, of all chunks but the last, plus a round trip from the last rank
    "1f1b": Schedule(_one_by_one(lambda p, v, r: p - r)),
    "interleaved": Schedule(
        _one_by_one(lambda p, v, r: (v - 1) * p + 2 * (p - 1 - r) + 1), lambda m, p: m - p, None, in_rounds=True
    ),
    # Qi et al. 2023, arXiv 2401.10241, and 2024, arXiv 2405.15362
    "zb-h1": Schedule(_zero_bubble, lambda m, p: m - p),
    "interleaved-zb": Schedule(_zero_bubble, lambda m, p: m - p, None, in_rounds=True),
    "zbv": Schedule(_zbv, lambda m, p: m - 2 * p + 1, 2, folded=True),
    # DeepSeek-AI 2024, arXiv 2412.19437
    **{
        name: Schedule(_dualpipe_v, lambda m, p: m - 2 * p, 2, folded=True, both_ways=both)
        for name, both in (("dualpipe", True), ("dualpipev", False))
    },
}


# -- validity --------------------------------------------------------------------------------------------------------


def _conditions(name: str, ranked: bool) -> Iterator[tuple[Any, str, int]]:
    """Yield formulas, their descriptions, and their minimum values."""
    spec = SCHEDULES[name]
    yield spec.surplus(_M, _P), "micro-batches above the minimum", 0
    if spec.chunks is None:
        yield _V - 1, "virtual stages per rank beyond one", 1
    else:
        for sign in (1, -1):
            yield sign * (_V - spec.chunks), f"virtual stages per rank beyond {spec.chunks}", 0
    if spec.in_rounds:
        yield _M / _P, "micro-batches per rank", 1
    if spec.both_ways:
        yield _M / 2, "half the micro-batches", 1
        yield _P / 2, "half the ranks", 1
    if ranked:
        yield _P - 1 - rank_symbol(), "ranks after this one", 0


def schedule_sizes(
    name: object, pp: object, micro_batches: object, virtual_stages: object = None, rank: object = None, fewest: int = 1
) -> tuple[dict[str, Poly], tuple[Validity, ...]]:
    """Return the sizes of a schedule by symbol name, and the conditions on symbolic sizes.

    `fewest` is the number of ranks from which a formula holds; it applies to a symbolic number of ranks only.
    """
    need_choice("schedule", name, SCHEDULES)
    assert isinstance(name, str)
    virtual_stages = (SCHEDULES[name].chunks or 2) if virtual_stages is None else virtual_stages
    arguments = {"p": ("pp", pp), "m": ("micro_batches", micro_batches), "v": ("virtual_stages", virtual_stages)}
    values = {key: positive(f"schedule {name!r}: {text}", value) for key, (text, value) in arguments.items()}
    if rank is not None:
        values["place"] = amount(f"schedule {name!r}: rank", rank) + poly(1)
    unresolved = []
    extra = [(_P - fewest, "ranks above the minimum", 0)] if fewest > 1 and values["p"].names() else []
    for formula, text, minimum in (*_conditions(name, rank is not None), *extra):
        condition = Condition(
            poly(formula), f"schedule {name!r}: {text}", minimum, True, frozenset(poly(formula).names())
        )
        bound = condition.formula.bind(values)
        if bound.names():
            unresolved.append(condition._replace(formula=bound, names=frozenset(bound.names())))
        else:
            condition.check(values)
    return values, (Validity(Conditions((), tuple(unresolved))),) if unresolved else ()


# -- action lists ----------------------------------------------------------------------------------------------------


def rank_actions(spec: Schedule, m: int, p: int, v: int, r: int) -> Iterator[tuple[str, int, int]]:
    """Yield a rank's actions with chunk and micro-batch, in order."""
    counts: Counter[str] = Counter()
    done: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    last = 0
    for words, count in spec.phases(m, p, v, r):
        for word in words.split() * int(count):
            kind, direction = word[0], "F" if word[0] == "F" else "B"
            if kind == "W":
                chunk, k = waiting.popleft() if word == "W" else next(w for w in waiting if w[0] == int(word[1]))
                if word != "W":
                    waiting.remove((chunk, k))
            else:
                position = counts[direction] // p % v
                chunk = (
                    int(word[1])
                    if word[1:]
                    else 1 - last
                    if spec.folded
                    else position
                    if direction == "F"
                    else v - 1 - position
                )
                last = chunk if direction == "B" else last
                k = done[direction, chunk]
                counts[direction] += 1
                done[direction, chunk] += 1
                if kind == "I":
                    waiting.append((chunk, k))
            yield kind, chunk, k


def _actions(name: str, m: int, p: int, v: int, r: int) -> Iterator[Action]:
    spec = SCHEDULES[name]
    if not spec.both_ways:
        for kind, chunk, k in rank_actions(spec, m, p, v, r):
            yield Action(kind, 2 * p - 1 - r if spec.folded and chunk else r + chunk * p, k)
        return
    mirrored = min(r, p - 1 - r)
    for kind, chunk, k in rank_actions(spec, m // 2, p // 2, v, mirrored):
        # the second chunk belongs to micro-batches that entered at the other end
        other = chunk != (r != mirrored)
        yield Action(kind, p - 1 - mirrored if chunk else mirrored, k + other * m // 2)


def _with_sends(ranks: list[list[Action]]) -> list[list[Action]]:
    """Insert each receive right before its consumer, and each send right after its producer."""
    owner = {(a.stage, a.micro_batch): r for r, actions in enumerate(ranks) for a in actions if a.kind == "F"}
    out: list[list[Action]] = []
    for r, actions in enumerate(ranks):
        out.append([])
        for a in actions:
            direction, on = ("F", 1) if a.kind == "F" else ("B", -1)
            peers = [owner.get((a.stage + step, a.micro_batch), r) for step in (-on, on)]
            if a.kind != "W" and peers[0] != r:
                out[r].append(Action(f"receive {direction}", *a[1:3], peers[0]))
            out[r].append(a)
            if a.kind != "W" and peers[1] != r:
                out[r].append(Action(f"send {direction}", *a[1:3], peers[1]))
    return out


def schedule(
    name: str, pp: int, micro_batches: int, virtual_stages: int | None = None, *, sends: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Return a pipeline's action list for each rank.

    Parameters
    ----------
    name : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev.
    pp, micro_batches : int
        Ranks, and micro-batches per step.
    virtual_stages : int, optional
        Stages per rank. Default: the number that the schedule requires, else 2.
    sends : bool
        Whether to list sends and receives as well, each receive right before its consumer.

    Returns
    -------
    tuple of tuple of Action
        One action list per rank.

    Raises
    ------
    BindingError, GraphError, ShapeError, UnsupportedError
        If the schedule is unknown or not defined for these numbers, or the lists are too long.

    Examples
    --------
    >>> import costgraph as cg
    >>> for actions in cg.plan.schedule("zb-h1", 2, 3):
    ...     print(*(f"{a.kind}{a.micro_batch}" for a in actions))
    F0 F1 I0 W0 F2 I1 W1 I2 W2
    F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    need_flag("schedule", sends=sends)
    values, _ = schedule_sizes(name, pp, micro_batches, virtual_stages)
    p, m, v = (int(values[key].expr) for key in "pmv")
    if m * p * v > _MAX_ACTIONS:
        raise UnsupportedError(f"schedule {name!r}: {m * p * v} forward actions, expected at most {_MAX_ACTIONS}")
    ranks = [list(_actions(name, m, p, v, r)) for r in range(p)]
    return tuple(map(tuple, _with_sends(ranks) if sends else ranks))


# -- simulation --------------------------------------------------------------------------------------------------------

_F, _I, _W = dims("forward input weight")
#: Symbols of `idle`, in the order of the columns of `idle_at`.
TIMES = (_F, _I, _W)
#: Action times as coefficient rows for forward, input and weight time; a time is the maximum of its rows.
COSTS = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}
_SAMPLES = 6
_FEW_ROWS = 16


def _needs(action: Action, last: int) -> Iterator[tuple[str, int, int]]:
    """Yield the forwards and input gradients that an action depends on."""
    kind, stage, number, _ = action
    if kind == "F":
        yield from [("F", stage - 1, number)] if stage else []
    elif kind == "W":
        yield "I", stage, number
    else:
        yield "F", stage, number
        yield from [("I", stage + 1, number)] if stage < last else []


def run_actions(
    ranks: Sequence[Sequence[Action]], zero: Any, after: Callable[[Any, Action], Any],
    latest: Callable[[list[Any]], Any], sent: Callable[[Any], Any] = lambda time: time,
) -> list[list[tuple[Action, Any, Any]]]:  # fmt: skip
    """Return start and end of each action, for any ordered time type with a `latest`."""
    last = max((a.stage for actions in ranks for a in actions), default=0)
    done: dict[tuple[str, int, int], tuple[int, Any]] = {}
    out: list[list[tuple[Action, Any, Any]]] = [[] for _ in ranks]
    remaining = [list(reversed([a for a in actions if a.kind in COSTS])) for actions in ranks]
    waiting = True
    while waiting:
        waiting = False
        for r, actions in enumerate(remaining):
            while actions and all(need in done for need in _needs(actions[-1], last)):
                a = actions.pop()
                before = [done[need] for need in _needs(a, last)]
                start = latest(
                    [out[r][-1][2] if out[r] else zero, *(t if rank == r else sent(t) for rank, t in before)]
                )
                out[r].append((a, start, after(start, a)))
                done["I" if a.kind == "B" else a.kind, a.stage, a.micro_batch] = r, out[r][-1][2]
                waiting = True
    for r, actions in enumerate(remaining):
        if actions:
            kind, stage, number, _ = actions[-1]
            raise GraphError(
                f"simulate: rank {r} deadlocks at {kind} of stage {stage} and micro-batch {number}; expected action "
                f"lists in which the actions that it depends on come first"
            )
    return out


# -- idle time in closed form ----------------------------------------------------------------------------------------


def _hull(rows: Table) -> Table:
    """Keep the rows that are the maximum for some forward, input and weight times."""
    rows = rows[skyline(rows, range(len(rows)))]
    return rows[corners(rows)]


def _latest(times: Sequence[Table]) -> Table:
    rows = np.vstack(times)  # with few rows, searching for corners does not pay off
    return rows if len(times) == 1 else rows[skyline(rows, range(len(rows)))] if len(rows) < _FEW_ROWS else _hull(rows)


@cache
def idle_at(name: str, p: int, m: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return a step's idle time for any action times: the coefficient rows whose maximum it is.

    Events are as in `simulate`.
    """
    ranks = schedule(name, p, m, v)
    costs = {kind: np.array([cost]) for kind, cost in COSTS.items()}
    zero = np.zeros((1, 3), dtype=np.int64)
    finish_times = [row[-1][2] for row in run_actions(ranks, zero, lambda start, a: start + costs[a.kind], _latest)]
    busy = sum(costs[a.kind] for a in ranks[0])
    return tuple(sorted(tuple(int(n) for n in row) for row in _hull(_latest(finish_times)) - busy))


def sizes(name: str, p: int) -> Iterator[tuple[int, int]]:
    """Yield valid numbers of micro-batches and chunks for some ranks: the fewest, and a few more."""
    spec = SCHEDULES[name]
    step = p if spec.in_rounds else 2 if spec.both_ways else 1
    ranks = p // 2 if spec.both_ways else p
    fewest = max(1, -int(spec.surplus(0, ranks)) * (p // ranks))
    start = -(-fewest // step) * step
    for v in (2, 3) if spec.chunks is None else (spec.chunks,):
        for more in (0, 1, 2):
            yield start + more * step, v


@cache
def idle(name: str) -> tuple[tuple[sympy.Expr, ...], int]:
    """Return formulas in the number of ranks whose maximum is the idle time, and the fewest ranks they hold for.

    They are fitted to runs on a few ranks. In all runs, the idle time must not depend on chunks and micro-batches, and
    each formula must grow linearly with the number of ranks.
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
                sympy.Add(*((a + b * _P / step) * t for a, b, t in zip(*pair, (_F, _I, _W), strict=True)))
                for pair in zip(first.tolist(), grown.tolist(), strict=True)
            ]
            return tuple(sums), next(p for i, p in enumerate(counts) if all(holds[i:]))
    raise UnsupportedError(
        f"bubble: the idle time of schedule {name!r} does not grow linearly with the number of ranks"
    )


def _as_rows(table: Table) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(int(n) for n in row) for row in table))


# -- in-flight micro-batches -------------------------------------------------------------------------------------------


# -- chunks in flight ------------------------------------------------------------------------------------------------

_MAX_RANKS = 4
_CHANGE = {"F": (1, 0), "I": (-1, 1), "B": (-1, 0), "W": (0, -1)}
"""change in the numbers of chunks that await their backward pass, and their weight gradients, per action"""
_OWN_CHUNK = {"F": (0, 0), "I": (1, 0), "B": (1, 0), "W": (0, 1)}
"""whether the action's own chunk is among those before it"""
_BYTES = np.array([(i, j) for i in range(8) for j in range(8)]).T
"""sample sizes of the two kinds of waiting chunks"""

_Pair: TypeAlias = tuple[Any, Any]
_ActionList: TypeAlias = list[tuple[str, int, int]]
#: Selects the relevant counts of other waiting chunks, given an action's kind; None to skip it.
_Selector: TypeAlias = Callable[[str, Any, Any], _Pair | None]


def _samples(spec: Schedule) -> Iterator[tuple[int, int, int]]:
    """Yield valid numbers of micro-batches, ranks and chunks: the fewest, and more."""
    for p in range(1, _MAX_RANKS + 1):
        fewest = max(1, -int(spec.surplus(0, p)))
        for v in (2, 3) if spec.chunks is None else (spec.chunks,):
            for more in (0, 1, 3):
                yield (p * (1 + more) if spec.in_rounds else fewest + more * p), p, v


@cache
def _lists(name: str) -> tuple[tuple[tuple[int, int, int, int], _ActionList], ...]:
    """Return the action lists for all ranks, with micro-batches, ranks, chunks and the rank."""
    spec = SCHEDULES[name]
    cases = [(m, p, v, r) for m, p, v in _samples(spec) for r in range(p)]
    return tuple((sizes, list(rank_actions(spec, *sizes))) for sizes in cases)


def _waiting_in_phases(name: str, m: Any, p: Any, v: Any, r: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the other waiting chunks at each action in the first and last repetition of each phase.

    Counts change linearly between repetitions, so neither they nor their sums are larger in between.
    """
    waiting: _Pair = (0, 0)
    for words, count in SCHEDULES[name].phases(m, p, v, r):
        ahead: list[tuple[str, _Pair]] = []
        grown: _Pair = (0, 0)
        for kind in (word[0] for word in words.split()):
            ahead.append((kind, _minus(grown, _OWN_CHUNK[kind])))
            grown = _plus(grown, _CHANGE[kind])
        last = _plus(waiting, (grown[0] * (count - 1), grown[1] * (count - 1)))
        for start in (waiting, last):
            yield from ((kind, *_plus(start, more)) for kind, more in ahead)
        waiting = _plus(last, grown)


def _waiting_in_list(actions: _ActionList) -> Iterator[tuple[str, int, int]]:
    """Yield the other waiting chunks at each action in a list."""
    waiting: _Pair = (0, 0)
    for kind, _, _ in actions:
        yield kind, *_minus(waiting, _OWN_CHUNK[kind])
        waiting = _plus(waiting, _CHANGE[kind])


def _plus(a: _Pair, b: _Pair) -> _Pair:
    return a[0] + b[0], a[1] + b[1]


def _minus(a: _Pair, b: _Pair) -> _Pair:
    return a[0] - b[0], a[1] - b[1]


def _peaks(name: str, select: _Selector, within: _Selector | None = None) -> list[_Pair]:
    """Return formulas whose maximum is the peak number of waiting chunks: few, selected by the action lists.

    Excluded are formulas that overestimate on some rank, where their phase may not occur, and dominated ones. With
    `within`, the maximum may exceed the selected peak up to the one that `within` selects.
    """
    rows = [
        [pair for counts in _waiting_in_phases(name, *sizes) if (pair := select(*counts))] for sizes, _ in _lists(name)
    ]
    bounds = np.array(rows, dtype=np.int64) @ _BYTES
    peaks, limits = (
        np.array([
            (np.array([pair for n in {*_waiting_in_list(actions)} if (pair := selector(*n))]) @ _BYTES).max(axis=0)
            for _, actions in _lists(name)
        ])
        for selector in (select, within or select)
    )  # fmt: skip
    forms = [pair for counts in _waiting_in_phases(name, _M, _P, _V, rank_symbol()) if (pair := select(*counts))]
    forms = [(sympy.expand(a), sympy.expand(b)) for a, b in forms]
    selected = [k for k in range(len(forms)) if (bounds[:, k] <= limits).all() and forms.index(forms[k]) == k]
    for k in sorted(selected, key=lambda k: (-len(str(forms[k])), k)):
        others = [j for j in selected if j != k]
        if others and (bounds[:, others].max(axis=1) >= peaks).all():
            selected = others
    if not selected or not (bounds[:, selected].max(axis=1) >= peaks).all():
        raise UnsupportedError(
            f"schedule {name!r}: the formulas of its phases do not match the waiting chunks in its action lists"
        )
    return [(_for_full_pipeline(name, forms[k][0]), _for_full_pipeline(name, forms[k][1])) for k in selected]


def _for_full_pipeline(name: str, formula: Any) -> Poly:
    """Express a formula in ranks and micro-batches of the whole pipeline, not one half."""
    halves = {"p": poly(_P / 2), "m": poly(_M / 2)} if SCHEDULES[name].both_ways else {}
    return poly(formula).bind(halves)


@cache
def other_waiting(name: str) -> tuple[tuple[Poly, Poly, bool], ...]:
    """Return the numbers of other chunks in flight: awaiting their backward pass, and only their weight gradients.

    There is one pair for each time at which either, or a weighted sum, may peak, with a flag for actions that compute
    input and weight gradients together in a schedule that splits others. A forward counts like the action after it.
    """

    def selecting(kinds: str) -> _Selector:
        return lambda kind, waits, weights: (waits, weights) if kind in kinds else None

    all_actions = selecting("FBIW")
    if not {"B", "I"} <= {kind for _, actions in _lists(name) for kind, *_ in actions}:
        return tuple((*pair, False) for pair in _peaks(name, all_actions))
    return tuple((*pair, kinds == "B") for kinds in ("IW", "B") for pair in _peaks(name, selecting(kinds), all_actions))


@cache
def _peak_waiting(name: str, until: str) -> Poly:
    """Return the peak number of waiting chunks including the running one, right after a forward."""
    later = int(until == "weights")
    pairs = _peaks(name, lambda kind, a, b: (a + 1 + b * later, 0) if kind == "F" else None)
    return poly(sympy.Max(*(p.expr for p, _ in pairs)))


# -- chunks counted separately ---------------------------------------------------------------------------------------


def _fitted(name: str, count: Callable[[_ActionList, int], int], position: str, *, enough: bool) -> Poly:
    """Fit a count over the action lists by a formula linear in ranks, in chunks, and in their product.

    With `enough` the formula is capped by the number of micro-batches. Raises UnsupportedError unless it is exact for
    all lists.
    """
    spec = SCHEDULES[name]
    terms = [sympy.Integer(1), _P, *([rank_symbol()] if position == "any" else [])]
    terms += [_V, _V * _P] if spec.chunks is None else []
    used = [
        (sizes, actions) for sizes, actions in _lists(name)
        if position == "any" or sizes[3] == (0 if position == "first" else sizes[1] - 1)
    ]  # fmt: skip
    evaluate = sympy.lambdify((_M, _P, _V, _RANK_PLUS_1), terms)
    table = np.array([evaluate(m, p, v, r + 1) for (m, p, v, r), _ in used])
    counted = np.array([count(actions, sizes[2]) for sizes, actions in used])
    micro_batches = np.array([sizes[0] for sizes, _ in used])
    free = counted < micro_batches if enough else micro_batches > 0
    factors = np.round(np.linalg.lstsq(table[free], counted[free], rcond=None)[0]).astype(int)
    fit = table @ factors
    if not ((np.minimum(fit, micro_batches) if enough else fit) == counted).all():
        raise UnsupportedError(f"schedule {name!r}: a count over its action lists is not linear in ranks and chunks")
    formula = sympy.Add(*(int(n) * t for n, t in zip(factors, terms, strict=True)))
    return _for_full_pipeline(name, sympy.Min(_M, formula) if enough else formula)


@cache
def until_each_chunk(name: str) -> Poly:
    """Return the number of weight gradients until each chunk of a rank has one."""

    def count(actions: _ActionList, v: int) -> int:
        done = [chunk for kind, chunk, _ in actions if kind in "BW"]
        return max(done.index(chunk) for chunk in range(v)) + 1

    return _fitted(name, count, "any", enough=False)


@cache
def end_stage_peaks(name: str, last: bool) -> tuple[Poly, Poly]:
    """Return the peak number of micro-batches that a rank holds of the first or last stage of the model.

    The first number counts until the input gradient, the second those that await only weight gradients other_waiting a
    running one.
    """
    folded = SCHEDULES[name].folded

    def part(actions: _ActionList, v: int) -> _ActionList:
        return [a for a in actions if a[1] == (v - 1 if last else 0)]

    def waits(actions: _ActionList, v: int) -> int:
        return max(n + 1 for kind, n, _ in _waiting_in_list(part(actions, v)) if kind == "F")

    def weights(actions: _ActionList, v: int) -> int:
        return max(n for *_, n in _waiting_in_list(part(actions, v)))

    position = "last" if last and not folded else "first"
    return _fitted(name, waits, position, enough=True), _fitted(name, weights, position, enough=False)


@cache
def waiting_at_last_forward(name: str, chunk: int, position: str) -> Poly:
    """Return how many micro-batches of chunk 0 or -1 await their backward pass at a rank's last forward."""

    def count(actions: _ActionList, v: int) -> int:
        last = max(i for i, (kind, *_) in enumerate(actions) if kind == "F")
        done = [kind for kind, of, _ in actions[: last + 1] if of == chunk % v]
        return sum(_CHANGE[kind][0] for kind in done)

    return _fitted(name, count, position, enough=True)


# -- public counts ---------------------------------------------------------------------------------------------------


def in_flight(
    schedule: str,
    pp: Formula,
    micro_batches: Formula,
    virtual_stages: Formula | None,
    rank: Formula,
    until: str = "input",
) -> Formula:
    """Return the peak number of in-flight micro-batches of a rank, counted per chunk.

    Parameters
    ----------
    schedule : str
        gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe or dualpipev.
    pp : int or sympy.Expr
        Ranks of the pipeline.
    micro_batches : int or sympy.Expr
        Micro-batches per step.
    virtual_stages : int or sympy.Expr, optional
        Chunks per rank. Default: the number that the schedule requires, else 2.
    rank : int or sympy.Expr
        The rank, counted from 0, also in a formula such as `r - 1`.
    until : str
        `input`: from a forward until its input gradient; `weights`: until its weight gradient.

    Returns
    -------
    int or sympy.Expr
        Chunks of one micro-batch, each 1/virtual_stages of a rank's layers; the maximum over the phases of the
        schedule. The validity conditions of a formula are checked when it is bound.

    Raises
    ------
    BindingError, GraphError, ShapeError
        If the schedule is unknown or not defined for these numbers.

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
    values, conditions = schedule_sizes(schedule, pp, micro_batches, virtual_stages, rank)
    return answer(_peak_waiting(schedule, until).bind(values), conditions)


def sends(schedule: str, pp: Formula, micro_batches: Formula, virtual_stages: Formula | None, rank: Formula) -> Formula:
    """Return the number of tensors that a rank sends in a step: activations and their gradients.

    Parameters
    ----------
    schedule : str
        As in `in_flight`.
    pp : int or sympy.Expr
        Ranks of the pipeline.
    micro_batches : int or sympy.Expr
        Micro-batches per step.
    virtual_stages : int or sympy.Expr, optional
        Chunks per rank.
    rank : int or sympy.Expr
        The rank, counted from 0.

    Returns
    -------
    int or sympy.Expr
        Each of v stages sends m activations forward and m gradients back, except at the ends of the model and between
        stages on the same rank.

    Raises
    ------
    BindingError, GraphError, ShapeError
        As in `in_flight`.

    Examples
    --------
    >>> import costgraph as cg
    >>> [cg.plan.sends("1f1b", 4, 16, 1, rank) for rank in range(4)]
    [16, 32, 32, 16]
    """
    values, conditions = schedule_sizes(schedule, pp, micro_batches, virtual_stages, rank)
    # 1 if there is a neighbour on that side, else 0
    before, after = sympy.Min(1, rank_symbol()), sympy.Min(1, _P - 1 - rank_symbol())
    spec = SCHEDULES[schedule]
    if spec.both_ways:  # a rank is the first for one half and the last for the other
        count = _M * (before + after)
    elif spec.folded:  # to both neighbours, in both directions
        count = 2 * _M * (before + after)
    else:  # ranks form a ring, except at the ends of the model
        count = _M * (2 * (_V - 1) * sympy.Min(1, _P - 1) + before + after)
    return answer(poly(count).bind(values), conditions)


# -- activations held by a rank ----------------------------------------------------------------------------------------


class RankOrder:
    """Execution order of a pipeline, or of one half if micro-batches enter at both ends.

    `groups` counts layer groups per rank, `micro_batches` those per step.
    """

    def __init__(self, name: str, pp: Poly, micro_batches: Poly, groups: Poly) -> None:
        self.name, self.v, self.schedule = name, groups, SCHEDULES[name]
        self.totals = pp, micro_batches
        half = 2 if self.schedule.both_ways else 1
        self.p, self.m = pp / half, micro_batches / half
        self.splits = any("W" in words for words, _ in self.schedule.phases(*_EXAMPLE))
        """Whether weight gradients are computed later than input gradients."""

    def held(self, rank: Poly, *, first: bool, last: bool, later: bool) -> Iterator[Held]:
        """Yield the activations that a rank holds at each potential peak, without those of the pass through its groups.

        `rank` counts from 0, `first` and `last` tell whether it has that end of the model, and `later` whether all its
        weight gradients exist already.
        """
        sizes = {**dict(zip("pm", self.totals, strict=True)), "v": self.v, "place": rank + 1}
        for *pair, at_once in other_waiting(self.name):
            waits, weights = (n.bind(sizes) for n in pair)
            if later:  # everything left except the running one
                remaining = smaller(waits + weights, self.m * self.v - until_each_chunk(self.name).bind(sizes) - 1)
                weights = smaller(weights, remaining) if weights else ZERO
                waits = remaining - weights
            # chunks that await their backward pass beyond the groups that the pass itself goes through
            beyond = waits - (self.v - 1)
            before, behind = (
                self.end_waiting(at_end, sizes) if present and self.v != ONE else (beyond, weights)
                for present, at_end in ((first, False), (last, True))
            )
            yield (beyond, weights, *before, *behind, ONE if at_once else ZERO)

    def end_waiting(self, last: bool, sizes: Mapping[str, Poly]) -> tuple[Poly, Poly]:
        """Return the numbers of waiting micro-batches of an end of the model, without the running one."""
        waits, weights = (n.bind(sizes) for n in end_stage_peaks(self.name, last))
        return waits - 1, weights

    def ends(self, *, first: bool, last: bool, turning: bool) -> tuple[Poly, Poly]:
        """Return the micro-batches waiting at the last forward, in groups that receive nothing and that send nothing.

        These are the first and last group of the model; on the rank where a folded pipeline turns, its own second and
        first group.
        """
        if self.v == ONE:  # a single group per rank
            return ZERO, ZERO
        folded, sizes = self.schedule.folded, {**dict(zip("pm", self.totals, strict=True)), "v": self.v}
        if folded and turning and not last:
            counts = waiting_at_last_forward(self.name, -1, "last"), waiting_at_last_forward(self.name, 0, "last")
        else:
            counts = (
                waiting_at_last_forward(self.name, 0, "first"),
                waiting_at_last_forward(self.name, -1, "first" if folded else "last"),
            )
        return counts[0].bind(sizes), counts[1].bind(sizes)


#: Micro-batches, ranks, groups and a rank for which every schedule has all its phases.
_EXAMPLE = (12, 4, 2, 1)
