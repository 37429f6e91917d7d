"""Schedules of a pipeline: one description each, from which action lists and all that is counted in them follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import sympy

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import dims
from ..errors import UnsupportedError
from ..graph.arguments import amount, need_choice, need_flag, positive

__all__ = ["SCHEDULES", "Action", "Schedule", "asked", "done_by", "here", "schedule"]

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
