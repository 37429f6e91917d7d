"""What ranks of a pipeline hold and send, counted in the action lists of their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import sympy

from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import dims
from ..bind.evaluate import Formula, answer
from ..errors import UnsupportedError
from ..graph.arguments import need_choice
from .schedules import SCHEDULES, Schedule, asked, done_by, here

__all__ = ["at_last", "beside", "in_flight", "of_end", "reached", "sends"]

_M, _P, _V, _PLACE = dims("m p v place")

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
    forms = [found for at in _of_phases(name, _M, _P, _V, here()) if (found := asked_for(*at))]
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
    halves = {"p": poly(_P / 2), "m": poly(_M / 2)} if SCHEDULES[name].both_ways else {}
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
    terms = [sympy.Integer(1), _P, *([here()] if at == "any" else [])]
    terms += [_V, _V * _P] if made.chunks is None else []
    used = [
        (sizes, actions) for sizes, actions in _lists(name)
        if at == "any" or sizes[3] == (0 if at == "first" else sizes[1] - 1)
    ]  # fmt: skip
    value = sympy.lambdify((_M, _P, _V, _PLACE), terms)
    table = np.array([value(m, p, v, r + 1) for (m, p, v, r), _ in used])
    counted = np.array([count(actions, sizes[2]) for sizes, actions in used])
    many = np.array([sizes[0] for sizes, _ in used])
    free = counted < many if enough else many > 0
    factors = np.round(np.linalg.lstsq(table[free], counted[free], rcond=None)[0]).astype(int)
    said = table @ factors
    if not ((np.minimum(said, many) if enough else said) == counted).all():
        raise UnsupportedError(f"schedule {name!r}: what is counted in its lists is not linear in ranks and chunks")
    formula = sympy.Add(*(int(n) * t for n, t in zip(factors, terms, strict=True)))
    return _of_whole(name, sympy.Min(_M, formula) if enough else formula)


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
    before, behind = sympy.Min(1, here()), sympy.Min(1, _P - 1 - here())
    made = SCHEDULES[schedule]
    if made.both_ways:  # of each half, the same rank is the first for one and the last for the other
        found = _M * (before + behind)
    elif made.folded:  # to both neighbours, on the way there and on the way back
        found = 2 * _M * (before + behind)
    else:  # ranks are a ring for all but the ends of the model
        found = _M * (2 * (_V - 1) * sympy.Min(1, _P - 1) + before + behind)
    return answer(poly(found).bind(values), held)
