"""Actions of a pipeline played as events, and the idle time of its ranks in closed form for any times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import sympy

from ..algebra.convex import Table, corners, skyline
from ..algebra.symbols import dims
from ..errors import GraphError, UnsupportedError
from .schedules import SCHEDULES, Action, schedule

__all__ = ["COSTS", "TIMES", "idle", "idle_at", "played", "sizes"]

_P, _F, _I, _W = dims("p forward input weight")
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
                sympy.Add(*((a + b * _P / step) * t for a, b, t in zip(*pair, (_F, _I, _W), strict=True)))
                for pair in zip(first.tolist(), grown.tolist(), strict=True)
            ]
            return tuple(sums), next(p for i, p in enumerate(counts) if all(holds[i:]))
    raise UnsupportedError(f"bubble: schedule {name!r} has no idle time that grows evenly with its ranks")


def _as_rows(table: Table) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(int(n) for n in row) for row in table))
