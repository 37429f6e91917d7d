"""Pipeline time: discrete-event simulation of action lists, and the bubble as a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Annotated, Any, NamedTuple, TypeAlias

import sympy

from ..algebra.extremum import Max
from ..algebra.symbols import dims, shown
from ..analysis.training import given
from ..bind.evaluate import Formula, answer
from ..errors import GraphError
from ..notation.validation import (
    READ,
    guarded,
)
from ..transforms.pipeline_schedules import (
    COSTS,
    SCHEDULES,
    Action,
    idle,
    idle_at,
    run_actions,
    schedule_sizes,
    sizes,
)

__all__ = ["Event", "Simulated", "bubble", "simulate"]

#: Seconds, or any other unit; exact for integers and fractions.
Time: TypeAlias = int | float | Fraction

_M, _P, _V, _F, _I, _W = dims("m p v forward input weight")


# -- discrete events -------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An action with its start and end time."""

    action: Action
    """the action"""
    start: Time
    """start time: inputs have arrived, and the previous action of the rank has ended"""
    end: Time
    """end time"""


@guarded()
@dataclass(frozen=True)
class Simulated:
    """A simulated pipeline step. Created by `simulate`."""

    events: tuple[tuple[Event, ...], ...]
    """events by rank, in order"""

    @property
    def makespan(self) -> Time:
        """Time at which the last rank finishes."""
        return max(e[-1].end for e in self.events if e)

    @property
    def busy(self) -> tuple[Time, ...]:
        """Busy time by rank."""
        return tuple(sum((e.end - e.start for e in events), 0) for events in self.events)

    @property
    def idle(self) -> tuple[Time, ...]:
        """Idle time of each rank, until the last one finishes."""
        return tuple(self.makespan - busy for busy in self.busy)


def simulate(
    actions: Sequence[Sequence[Action]], *, forward: Annotated[Any, READ] = 1, backward_input: Annotated[Any, READ] = 1,
    backward_weight: Annotated[Any, READ] = 1, send: Annotated[Any, READ] = 0,
) -> Simulated:  # fmt: skip
    """Simulate a pipeline step, in which each rank runs its actions in order.

    Parameters
    ----------
    actions : sequence of sequence of Action
        Actions of each rank, as `schedule` lists them, with or without sends.
    forward : number or sequence of number
        Time of a stage's forward pass, or a list for all stages.
    backward_input : number or sequence of number
        Time of the input gradient, likewise.
    backward_weight : number or sequence of number
        Time of the weight gradient, likewise; a full backward pass takes the sum.
    send : number
        Time until a message arrives; the sender continues meanwhile, and links are not shared.

    Returns
    -------
    Simulated
        `.events` by rank, `.makespan`, `.busy` and `.idle`; exact if times are integers or fractions.

    Raises
    ------
    GraphError
        If a time is not a number or negative, or the actions deadlock.

    Examples
    --------
    >>> import costgraph as cg
    >>> found = cg.plan.simulate(cg.plan.schedule("1f1b", 3, 5), forward=2, backward_input=3, backward_weight=2)
    >>> found.makespan, found.busy, found.idle
    (49, (35, 35, 35), (14, 14, 14))
    >>> [f"{e.action.kind}{e.action.micro_batch} {e.start}-{e.end}" for e in found.events[2][:3]]
    ['F0 4-6', 'B0 6-11', 'F1 11-13']
    """
    _check(actions)
    stages = 1 + max(a.stage for row in actions for a in row)
    durations = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    costs = list(zip(*(_times(name, value, stages) for name, value in durations.items()), strict=True))
    wait = _time("send", send)

    def after(start: Time, action: Action) -> Time:
        took: Time = sum((t for n, t in zip(COSTS[action.kind], costs[action.stage], strict=True) if n), 0)
        return start + took

    events = run_actions(actions, 0, after, max, lambda time: time + wait)
    return Simulated(tuple(tuple(Event(*e) for e in row) for row in events))


def _check(actions: Sequence[Sequence[Action]]) -> None:
    """Raise GraphError if there are no actions, an unknown one, or a duplicate."""
    kinds = {*COSTS, *(f"{verb} {direction}" for verb in ("send", "receive") for direction in "FB")}
    performed = set()
    for r, row in enumerate(actions):
        for i, a in enumerate(row):
            where = f"simulate: actions[{r}][{i}]"
            if a.kind not in kinds or any(type(n) is not int or n < 0 for n in a[1:3]):
                raise GraphError(f"{where} is {shown(tuple(a[:3]))}, expected an action as returned by schedule")
            for component in ("IW" if a.kind == "B" else a.kind) if a.kind in COSTS else ():
                if (component, *a[1:3]) in performed:
                    raise GraphError(f"{where} is {shown(tuple(a[:3]))} a second time, expected each action once")
                performed.add((component, *a[1:3]))
    if not performed:
        raise GraphError("simulate: no actions; expected a list for each rank, as from schedule")


def _times(name: str, value: Any, stages: int) -> list[Time]:
    if not isinstance(value, list | tuple):
        return [_time(name, value)] * stages
    if len(value) != stages:
        raise GraphError(f"simulate: {name} of {len(value)} stages, expected a number, or one for each of {stages}")
    return [_time(f"{name}[{i}]", t) for i, t in enumerate(value)]


def _time(name: str, value: object) -> Time:
    number = Fraction(value) if isinstance(value, Rational) and not isinstance(value, int) else value
    if not isinstance(number, int | float | Fraction) or isinstance(number, bool) or not 0 <= number < float("inf"):
        raise GraphError(f"simulate: {name} is {shown(value)}, expected a nonnegative time")
    return number


# -- bubble ----------------------------------------------------------------------------------------------------------


def _forwards(name: str) -> sympy.Expr:
    """Return a rank's number of forward passes in a step."""
    schedule = SCHEDULES[name]
    half = 2 if schedule.both_ways else 1
    phases = schedule.phases(_M / half, _P / half, _V, sympy.Integer(0))
    count = sympy.Add(*(sum(word[0] == "F" for word in words.split()) * times for words, times in phases))
    return sympy.expand(count)


def bubble(
    name: str, pp: Formula, micro_batches: Formula, virtual_stages: Formula | None = None, *, forward: Formula = 1,
    backward_input: Formula = 1, backward_weight: Formula = 1,
) -> Formula:  # fmt: skip
    """Return a pipeline rank's idle time as a fraction of its busy time.

    Parameters
    ----------
    name : str
        Schedule name, as in `schedule`.
    pp, micro_batches : int or sympy.Expr
        Ranks, and micro-batches per step.
    virtual_stages : int or sympy.Expr, optional
        Model chunks of a rank, as in `schedule`.
    forward, backward_input, backward_weight : number or sympy.Expr
        Times of the forward pass, input gradient and weight gradient, equal for all stages.

    Returns
    -------
    float or sympy.Expr
        The fraction: a formula in sizes and times, with a maximum if the times decide which wait is the longest.

    Raises
    ------
    BindingError, GraphError, ShapeError, UnsupportedError
        If the schedule is unknown or has no action lists for these numbers, or a time is not positive.

    Notes
    -----
    Sends take no time; use `simulate` for these. The formula is the longest path through the events of `simulate` with
    symbolic times. It is derived and checked for up to six ranks and several numbers of micro-batches and chunks. In
    all schedules the longest paths grow by equal amounts with each rank, independent of micro-batches and chunks. For
    more than six ranks this growth is extrapolated.

    Examples
    --------
    >>> import costgraph as cg
    >>> m, p, v, f, i, w = cg.dims("m p v f i w")
    >>> cg.plan.bubble("1f1b", p, m), cg.plan.bubble("interleaved", p, m, v), cg.plan.bubble("zb-h1", p, m)
    ((p - 1)/m, (p - 1)/(m*v), (p - 1)/(3*m))
    >>> cg.plan.bubble("zb-h1", p, m, forward=f, backward_input=i, backward_weight=w)
    (p - 1)*Max(f, i, f + i - w)/(m*(f + i + w))
    """
    times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    exact = [given(f"bubble: {key}", value) for key, value in times.items()]
    _, fewest = idle(name) if isinstance(name, str) and name in SCHEDULES else ((), 1)
    values, validities = schedule_sizes(name, pp, micro_batches, virtual_stages, fewest=fewest)
    m, p, v = (values[key] for key in "mpv")
    forms, _ = idle(name)
    if p.constant is not None and int(p.constant) < fewest:  # too few ranks for the general formula
        batches, chunks = next(sizes(name, int(p.constant)))
        forms = tuple(
            sympy.Add(*map(sympy.Mul, row, (_F, _I, _W))) for row in idle_at(name, int(p.constant), batches, chunks)
        )
    substitutions = dict(zip((_M, _P, _V, _F, _I, _W), (m.expr, p.expr, v.expr, *exact), strict=True))
    common = sympy.gcd_list(forms) or sympy.Integer(1)
    each = [sympy.cancel(form / common) for form in forms]
    busy = _F + _I + _W
    if len(each) == 1:
        share = (common * sympy.cancel(each[0] / busy) / _forwards(name)).xreplace(substitutions)
    else:
        share = (common / busy / _forwards(name)).xreplace(substitutions) * Max(
            *(e.xreplace(substitutions) for e in each)
        )
    return answer(share if share.has(Max) else sympy.factor(share), validities)
