"""Time per step: `seconds`, roofline estimates and lower bounds, stream overlap, and pipeline schedules."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import sympy

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.dominance import NOTHING_KNOWN, Relations, prune
from ..algebra.extremum import Max, Owner, extremum
from ..algebra.polynomial import ONE, ZERO, Poly, content, poly, total
from ..bind.evaluate import Formula, answer, real
from ..errors import StandInWarning, UnsupportedError
from ..hardware.networks import Network
from ..hardware.specs import NAMED, Hardware, StandIn
from ..ir.graph import (
    FORWARD,
    Bindings,
    Graph,
    InFlightMicroBatches,
    Loop,
    Op,
    OpKind,
    Storage,
    Tensor,
    is_pass,
    known_names,
    loops,
    need_choice,
    need_graph,
    of_stages,
)
from ..ops.collectives import Collective, Send
from ..ops.opaque import Transfer
from ..transforms.pipeline_schedules import SCHEDULES, TIMES, idle, idle_at, sizes
from .calibrated import load_of, shipped
from .collective_time import exchange, group_of, least_busy, whole
from .costs import compulsory
from .liveness import behind
from .tiling import unavoidable
from .work import DeviceQuestion, Fallback, Work, ask, exact

__all__ = [
    "finished",
    "OVERLAPS",
    "Bound",
    "Spent",
    "as_seconds",
    "estimate",
    "local_times",
    "in_seconds",
    "largest",
    "lower_bound",
    "memory_time",
    "spent",
    "overlapped_time",
    "unit_times",
    "warn_of",
    "which",
    "EqualStages",
    "StageSeconds",
    "most",
    "inference_pipeline_seconds",
    "few_batches_time",
    "pipeline_seconds",
    "one_by_one",
    "as_declared",
    "crosses_stages",
    "by_pass",
    "holds_for",
    "in_total",
    "least",
    "of_pipeline",
    "seconds",
    "shares_of",
    "stages_asked",
    "when",
]


# -- stream schedule ---------------------------------------------------------------------------------------------------

#: Maximum number of ops to simulate.
_MOST = 10**6
#: Relative rounding error allowed between the times of two iterations.
_EXACT = 1e-12


def finished(graph: Graph, seconds: Mapping[Op, Any], iterations: Mapping[Op, int]) -> Any:
    """Return the makespan of a graph with one stream per mesh axis for collectives, and one for all other ops.

    Host links have one stream per direction, and host ops have their own. `seconds` maps each op to its time over all
    iterations, as numbers or as arrays over several points; views are missing. `iterations` maps each loop to its trip
    count. Raises UnsupportedError if more than a million ops would be simulated one by one.

    This is list scheduling (Graham 1969): a stream runs its ops in program order, each as soon as its operands exist
    and all readers of overwritten storages are done. Copies that pack the operands for a collective join its stream. A
    stacked tensor exists once its last slice does. Streams may run ahead without limit: `peak_memory` does not count
    tensors that are gathered early.

    Loops are extrapolated. If three consecutive boundaries move by equal amounts, later iterations are skipped,
    provided that the last one then moves by the same amount too. If iterations start at times that are linear in their
    index, each time is a maximum of sums, hence convex in the index; a convex function with three collinear points is
    linear between them.
    """
    runs = Counter[Op]()
    _count(graph, {0: 1}, iterations, runs)
    played = _Play(graph, {op: s / runs[op] for op, s in seconds.items() if runs[op]}, iterations)
    played.run(graph, {})
    return _last(0.0, *played.free.values())


def _count(graph: Graph, runs_by_index: Mapping[int, int], iterations: Mapping[Op, int], runs: Counter[Op]) -> None:
    """Count how often each op runs; `turns` counts runs by the iteration index of the enclosing loop."""
    often = sum(runs_by_index.values())
    for op in graph.ops:
        if op.loop is None:
            runs[op] += often
            continue
        body, count = op.loop.body, iterations[op.loop.op]
        if op.loop.until:
            inner = dict(
                enumerate(accumulate(runs_by_index.get(n, 0) for n in range(max(runs_by_index, default=0), 0, -1)))
            )
            inner = {len(inner) - 1 - i: times for i, times in inner.items()}
        elif any(loop.until for loop in loops(body)):
            inner = dict.fromkeys(range(min(count, _MOST + 1)), often)  # longer loops raise an error when simulated
        else:
            inner = {0: often * count}
        _count(body, inner, iterations, runs)


def _last(time: Any, *times: Any) -> Any:
    """Return the pointwise maximum of times."""
    for t in times:
        numbers = type(t) is float and type(time) is float
        time = max(time, t) if numbers else np.maximum(time, t)
    return time


def _stream(op: Op) -> str:
    """Return an op's stream; ops without FLOPs join the stream of the collectives that read their results."""
    if isinstance(op.kind, Collective):
        return f"over {op.kind.axis}"
    if isinstance(op.kind, Transfer) or op.on_host:
        return f"to the {op.kind.to}" if isinstance(op.kind, Transfer) else "host"
    if any(op.kind.flops(op).by_kind().values()) or any(t in op.graph.outputs for t in op.results):
        return ""
    kinds = (reader.kind for t in op.results for reader in op.graph.successors(t))
    axes = {kind.axis if isinstance(kind, Collective) else None for kind in kinds}
    return f"over {axis}" if len(axes) == 1 and (axis := axes.pop()) is not None else ""


class _Step(NamedTuple):
    """Static facts about an op that each simulated run needs."""

    op: Op
    loop: Loop | None
    stream: str
    overwritten: tuple[Storage, ...]
    made: tuple[Storage, ...]
    touched: tuple[Storage, ...]
    same: bool
    """whether all iterations of a loop do the same work"""

    @classmethod
    def of(cls, op: Op) -> _Step:
        operand_storages = {t.storage for t in op.operands}
        allocated = tuple(t.storage for t in op.results if t.storage not in operand_storages)
        overwritten = tuple(op.operands[i].storage for i in op.kind.overwrites())
        touched = tuple(dict.fromkeys(t.storage for t in (*op.operands, *op.results)))
        loop = op.loop
        same = loop is None or not any(inner.until for inner in loops(loop.body))
        return cls(op, loop, _stream(op), overwritten, allocated, touched, same)


class _Play:
    """Simulates ops in program order and records when each result exists."""

    def __init__(self, graph: Graph, seconds: Mapping[Op, Any], iterations: Mapping[Op, int]) -> None:
        self.graph, self.seconds, self.iterations = graph, seconds, iterations
        self.played = 0
        self.free: dict[str, Any] = {}
        """Time at which each stream becomes free."""
        self.memory: dict[Storage, object] = {}
        """Current memory of each storage, since storages allocated in a loop differ per iteration."""
        self.touched: dict[object, Any] = {}
        """Time at which the last reader or writer of a memory is done."""

    def run(self, graph: Graph, ready: dict[Tensor, Any], nth: int = 0) -> None:
        """Simulate a graph; `ready` holds the times of its inputs, and receives the times of all tensors."""
        steps: list[_Step] | None = graph.cache.get("streams")
        if steps is None:
            steps = graph.cache["streams"] = [_Step.of(op) for op in graph.ops]
        self.played += len(steps)
        if self.played > _MOST:
            raise UnsupportedError(
                f"overlap 'streams' of graph {self.graph.name!r}: more than {_MOST:,} ops to simulate"
            )
        for step in steps:
            if step.loop is not None:
                self.repeat(step, step.loop, ready, nth)
                continue
            finish = self.done(step, ready)
            self.make(step.made)
            for storage in step.touched:
                self.touch(storage, finish)
            ready.update(dict.fromkeys(step.op.results, finish))

    def done(self, step: _Step, ready: Mapping[Tensor, Any]) -> Any:
        """Return the finish time of an op and occupy its stream until then."""
        begin = _last(0.0, *[ready.get(t, 0.0) for t in step.op.operands])
        if step.op not in self.seconds:
            return begin
        overwritten = [self.touched.get(self.at(storage), 0.0) for storage in step.overwritten]
        free = _last(begin, self.free.get(step.stream, 0.0), *overwritten) + self.seconds[step.op]
        self.free[step.stream] = free
        return free

    def touch(self, storage: Storage, finish: Any) -> None:
        """Record when an op that accesses a storage is done."""
        memory = self.at(storage)
        self.touched[memory] = _last(self.touched.get(memory, 0.0), finish)

    def at(self, storage: Storage) -> object:
        """Return the current memory of a storage."""
        return self.memory.get(storage, storage)

    def make(self, storages: Iterable[Storage]) -> None:
        """Assign new memory to storages that an op allocates."""
        for storage in storages:
            self.memory[storage] = object()

    def enter(self, formals: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Bind a body's inputs to memory, all at once because an iteration may permute them."""
        self.memory.update([(f.storage, self.at(t.storage)) for f, t in formals])

    def repeat(self, step: _Step, loop: Loop, ready: dict[Tensor, Any], around: int) -> None:
        """Simulate a loop; `around` is the iteration index of the enclosing loop."""
        count = around if loop.until else self.iterations[loop.op]
        self.make(step.made)
        iterations = _Iterations(self, loop, ready)
        nth, boundaries = 0, list[_Boundary]()
        while nth < count:
            iterations.play(nth)
            nth, boundaries = nth + 1, [*boundaries[-2:], iterations.boundary()]
            by = _moved(*boundaries) if step.same and len(boundaries) == 3 and nth + 1 < count else None
            if by is not None and (ahead := iterations.ahead(by, count - nth)):
                nth, boundaries = nth + ahead, []
        iterations.leave(ready)


class _Boundary(NamedTuple):
    """State between two iterations."""

    shared: tuple[object, ...]
    """which tensors share memory, and the active streams"""
    times: np.ndarray[Any, Any]
    """all times of the state, with points as columns"""


def _all_close(times: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], longest: np.ndarray[Any, Any]) -> bool:
    return bool((np.abs(times - expected) <= _EXACT * longest.max(0, initial=0)).all())


def _moved(first: _Boundary, second: _Boundary, third: _Boundary) -> np.ndarray[Any, Any] | None:
    """Return how far one iteration moves each time, or None if two iterations differ."""
    if not first.shared == second.shared == third.shared:
        return None
    by = third.times - second.times
    return by if _all_close(by, second.times - first.times, third.times) else None


class _Iterations:
    """Iterations of a loop and their carried state."""

    def __init__(self, play: _Play, loop: Loop, ready: Mapping[Tensor, Any]) -> None:
        self.of, self.loop, self.ready = play, loop, ready
        self.inputs = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        self.carry_times = [ready.get(t, 0.0) for t in loop.starts]
        self.carries: Sequence[Tensor] = loop.starts
        """tensors whose memory holds the carries"""
        self.results: dict[Tensor, Any] = dict.fromkeys((*loop.stacks, *loop.pieces), 0.0)

    def play(self, nth: int) -> None:
        """Simulate one iteration."""
        loop, play = self.loop, self.of
        play.enter([*self.inputs, *zip(loop.carries, self.carries, strict=True)])
        inner = {f: self.ready.get(t, 0.0) for f, t in self.inputs} | dict(
            zip(loop.carries, self.carry_times, strict=True)
        )
        play.run(loop.body, inner, nth)
        self.carry_times, self.carries = [inner.get(t, 0.0) for t in loop.nexts], loop.nexts
        for t, value in zip(self.results, (*loop.ys, *loop.saved), strict=True):
            self.results[t] = _last(self.results[t], inner.get(value, 0.0))
            play.touch(t.storage, play.touched.get(play.at(value.storage), 0.0))

    def leave(self, ready: dict[Tensor, Any]) -> None:
        """Record the times of the loop's results."""
        for t, time, carry in zip(self.loop.lasts, self.carry_times, self.carries, strict=True):
            ready[t] = time
            self.of.touch(t.storage, self.of.touched.get(self.of.at(carry.storage), 0.0))
        ready.update(self.results)

    def memories(self) -> list[object]:
        """Return the memories that iterations share."""
        return [self.of.at(t.storage) for t in (*(t for _, t in self.inputs), *self.results, *self.carries)]

    def boundary(self) -> _Boundary:
        """Return the state after the simulated iterations."""
        memories, streams = self.memories(), sorted(self.of.free)
        touched = [self.of.touched.get(m, 0.0) for m in memories]
        times = [*self.carry_times, *self.results.values(), *touched, *(self.of.free[name] for name in streams)]
        return _Boundary((*map(memories.index, memories), *streams), np.array(np.broadcast_arrays(*times)))

    def ahead(self, by: np.ndarray[Any, Any], remaining: int) -> int:
        """Skip iterations in steady state and simulate the next one; return how many iterations that covers."""
        play, before = self.of, self.boundary()
        saved: tuple[Any, ...] = (
            self.carry_times,
            dict(self.results),
            dict(play.free),
            dict(play.touched),
            dict(play.memory),
        )
        out = remaining - 1
        while out:
            self.put(before.times + out * by)
            self.play(0)
            after = self.boundary()
            expected = before.times + (out + 1) * by
            if after.shared == before.shared and _all_close(after.times, expected, expected):
                return out + 1
            self.carry_times, self.results, play.free, play.touched, play.memory = (copy(state) for state in saved)
            out //= 2
        return 0

    def put(self, times: np.ndarray[Any, Any]) -> None:
        """Replace the times of the state."""
        values = iter(times.tolist() if times.ndim == 1 else times)
        self.carry_times = [next(values) for _ in self.carry_times]
        self.results = {t: next(values) for t in self.results}
        self.of.touched.update([(memory, next(values)) for memory in self.memories()])
        self.of.free = {name: next(values) for name in sorted(self.of.free)}


# -- roofline times ----------------------------------------------------------------------------------------------------

Spent = tuple[Poly, str]
#: How communication overlaps with computation: not at all, perfectly, or as scheduled on streams.
OVERLAPS = ("none", "ideal", "streams")


@dataclass(frozen=True)
class Bound:
    """Bounding resource of an op, as a condition on sizes.

    With several memory levels, conditions are nested.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> device = cg.load_hardware("h100-sxm")
    >>> print(cg.roofline(g, device.symbolic()).rows[0].bound)
    compute where N*bandwidth >= 3*peak_bf16, else memory
    >>> cg.roofline(g, device).rows[0].bound.compute.subs(N, 1024)
    True
    """

    compute: sympy.Basic
    """condition under which compute, or `first`, takes longest: a sympy relation, or And and Or of several"""
    otherwise: str | Bound
    """bounding resource elsewhere: memory, link or a cache"""
    first: str = "compute"
    """bounding resource where the condition holds"""

    def __str__(self) -> str:
        return f"{self.first} where {_text(self.compute)}, else {self.otherwise}"

    @property
    def free_symbols(self) -> set[sympy.Symbol]:
        """Symbols in the conditions."""
        names: set[sympy.Symbol] = set(self.compute.free_symbols)
        return names | self.otherwise.free_symbols if isinstance(self.otherwise, Bound) else names


def _text(condition: sympy.Basic) -> str:
    if isinstance(condition, sympy.And | sympy.Or):
        terms = sorted(map(_text, condition.args), key=lambda text: (len(text), text))
        return " and ".join(terms) if isinstance(condition, sympy.And) else f"({' or '.join(terms)})"
    sides = (side if _is_whole(side) else side.n(4) for side in (condition.lhs, condition.rhs))
    return " >= ".join(map(str, sides))


def _is_whole(side: sympy.Expr) -> bool:
    return all(number.is_Integer for number in side.atoms(sympy.Rational))


def which(times: Sequence[Spent], facts: Relations) -> str | Bound:
    """Return the name of the largest time, or a `Bound` if it depends on sizes.

    Times are as in `spent`; the first of equal times wins.
    """
    if len(times) > 2 or all(not p.names() for p, _ in times):
        times = _undominated(times, facts)
    name = times[0][1]
    others = [p for p, other in times if other != name]
    if not others:
        return name
    named = [p for p, other in times if other == name]
    undecided = [p for p in others if not facts.nonnegative(_most(named) - p)]
    if not undecided:
        return name
    without = which([t for t in times if t[1] != name], facts)
    if facts.nonnegative(_most(others) - _most(named)):
        return without
    relations = ([_relation(p - other, facts) for p in named] for other in undecided)
    return Bound(_all(sympy.And, [_all(sympy.Or, some) for some in relations]), without, name)


def _all(join: type[sympy.And | sympy.Or], conditions: Sequence[sympy.Basic]) -> sympy.Basic:
    return conditions[0] if len(conditions) == 1 else join(*conditions, evaluate=False)


def _most(times: Sequence[Poly]) -> Poly:
    return times[0] if len(times) == 1 else poly(extremum([(p, Owner()) for p in times]))


def _relation(excess: Poly, relations: Relations) -> sympy.Ge:
    """Return the condition that a difference of times is nonnegative, with positive terms on the left."""
    cleared = relations.cleared([excess])
    plain = cleared[0] if cleared else excess
    plain = plain * lcm(*(c.denominator for c in plain.terms.values()))
    positive, negative = (Poly({m: c for m, c in p.terms.items() if c > 0}) for p in (plain, -plain))
    shared, scale = content(plain.terms)
    if len(positive.terms) == 1:  # a single product, such as B*S >= 295.3
        (scale,) = positive.terms.values()
    factor = Poly({shared: scale if scale > 0 else -scale})
    return sympy.Ge((positive / factor).expr, (negative / factor).expr, evaluate=False)


def _undominated(times: Sequence[Spent], relations: Relations) -> list[Spent]:
    """Drop times that are never the largest; among numbers, keep the first maximum."""
    times = [t for t in times if t[0]] or [times[0]]
    if all(not p.names() for p, _ in times):
        exactly = all(p.constant is not None for p, _ in times)
        values = [exact(p) if exactly else sympy.N(p.expr, 30) for p, _ in times]
        return [times[values.index(max(values))]]
    return prune(times, relations)


def largest(times: Sequence[Spent], relations: Relations) -> Poly:
    """Return the largest time, with common factors outside the Max so that multiples share one atom."""
    candidates = _undominated(times, relations)
    if len(candidates) == 1:
        return candidates[0][0]
    factor = _common_factor([p for p, _ in candidates])
    return factor * poly(extremum([(p / factor, Owner()) for p, _ in candidates]))


def _common_factor(times: Sequence[Poly]) -> Poly:
    """Return the common factor of all terms, from numbers and (positive) symbols."""
    terms = [term for p in times for term in p.terms.items()]
    number = Fraction(gcd(*(c.numerator for _, c in terms)), lcm(*(c.denominator for _, c in terms)))
    powers = [dict(m) for m, _ in terms]
    shared = []
    for key in sorted(k for k in powers[0] if k[0] != "~"):
        exponents = [p.get(key, 0) for p in powers]
        if min(exponents) > 0 or max(exponents) < 0:
            shared.append((key, min(exponents, key=abs)))
    return Poly({tuple(shared): number})


def spent(work: Work, asked: DeviceQuestion) -> list[Spent]:
    """Return an op's time on each resource; the op takes the largest.

    Names are compute, link, memory or a cache, and interconnect or network for collectives. With memory levels,
    traffic out of a level is the least traffic through all nearer levels, given as several formulas: the largest holds.
    """
    out = local_times(work, asked)
    if work.collective is not None:
        seconds_once, link = exchange(work.op, asked.graph, asked.values, asked.hardware)
        out.append((seconds_once * work.times, link))
    sends = [exchange(op, asked.graph, asked.values, asked.hardware) for op in work.rings]
    if sends:  # one after another, over one link
        out.append((total(time for time, _ in sends) * work.times, sends[0][1]))
    return list(dict.fromkeys(out))


def local_times(work: Work, asked: DeviceQuestion) -> list[Spent]:
    """Return the times of an op except those on links between ranks; parameters as in `spent`."""
    compute, memory = work.seconds(asked.rates)
    out = [(compute, "compute"), (memory, work.unit)]
    if work.unit == "memory":
        out += [(p / poly(level.bandwidth.value), level.name) for p, level in work.through]
    return out


def estimate(times: Iterable[Sequence[Spent]], relations: Relations) -> Poly:
    """Return the sum over ops of their largest time from `spent`, grouping equal ops."""
    alike: dict[tuple[Spent, ...], int] = {}
    for resources in times:
        alike[tuple(resources)] = alike.get(tuple(resources), 0) + 1
    return total(largest(resources, relations) * count for resources, count in alike.items())


def overlapped_time(times: Sequence[Sequence[Spent]], asked: DeviceQuestion, overlap: str) -> Poly:
    """Return a graph's time with communication: a sum, the larger of communication and the rest, or a makespan.

    Times are as in `spent`; `overlap` is one of `OVERLAPS`.
    """
    relations = asked.graph.root.relations
    if overlap == "none":
        return estimate(times, relations)
    if overlap == "streams":
        asked.need_numbers("overlap 'streams'")
        op_seconds: dict[Op, float] = {}
        for work, resources in zip(asked.works, times, strict=True):
            op_seconds[work.op] = op_seconds.get(work.op, 0.0) + float(in_seconds(largest(resources, relations), asked))
        busy = (float(in_seconds(time, asked)) for time in unit_times(asked).values())
        iterations = {o.op: int(o.count.bind(asked.values).constant or 0) for o in loops(asked.graph)}
        finish = finished(asked.graph, op_seconds, iterations)
        return poly(Fraction(max(float(finish), *busy)))
    off_memory = [bool(w.collective) or w.unit != "memory" for w in asked.works]
    exposed, local = (
        [t for t, is_off in zip(times, off_memory, strict=True) if is_off == off] for off in (True, False)
    )
    # computation and communication share the device memory
    totals = {"alone": estimate(local, relations), "sent": estimate(exposed, relations), "memory": memory_time(asked)}
    return largest([(p, name) for name, p in totals.items()], relations)


def lower_bound(asked: DeviceQuestion) -> Poly:
    """Return a lower bound in seconds: the busiest unit, or the traffic that no fusion avoids.

    A missing rate is replaced by the highest one of the device, which keeps the bound valid.
    """
    bounds = [(p, unit) for unit, p in unit_times(asked).items()]
    if asked.levels and asked.levels[0].whole:  # not a bound for caches that overlap reads and writes
        moved = unavoidable(asked.graph, asked.levels[0].nearer)
        bounds += [((p.bind(asked.values) - asked.resident) / asked.rates.bandwidth, "memory") for p in moved]
    candidates = _undominated(bounds, asked.graph.root.relations)
    return candidates[0][0] if len(candidates) == 1 else poly(extremum([(p, Owner(unit)) for p, unit in candidates]))


def unit_times(asked: DeviceQuestion) -> dict[str, Poly]:
    """Return the least busy seconds of each unit in use: vector, matmul, links and memory."""
    units: dict[str, list[Poly]] = {}
    for work in asked.works:
        if work.unit != "memory":  # a link carries both directions at once
            direction = f" to the {work.op.kind.to}" if isinstance(work.op.kind, Transfer) else ""
            units.setdefault(f"{work.unit}{direction}", []).append(work.seconds(asked.rates)[1])
            continue
        messages = [work.op] if work.collective else work.rings
        on_links = [(u, p * work.times) for op in messages for u, p in _of_collective(op, op.kind, asked)]
        for unit, spent in [*on_links, *(() if work.collective else _by_unit(work, asked))]:
            units.setdefault(unit, []).append(spent)
    out = {unit: total(parts) for unit, parts in units.items()}
    out["memory"] = memory_time(asked)
    return out


def memory_time(asked: DeviceQuestion) -> Poly:
    """Return the least seconds that memory is busy."""
    moved = compulsory(asked.graph).bind(asked.values)
    if asked.resident:
        moved = poly(Max(0, (moved - asked.resident).expr))
    return moved / asked.rates.bandwidth


def _by_unit(work: Work, asked: DeviceQuestion) -> Iterator[tuple[str, Poly]]:
    for (kind, dtype), amount in work.least.items():
        unit = "vector" if asked.rates.shares_unit(kind, dtype) else "matmul"
        yield unit, amount / (asked.rates.of(kind, dtype, highest=True) * asked.rates.headroom)


def _of_collective(op: Op, kind: OpKind, asked: DeviceQuestion) -> Iterator[tuple[str, Poly]]:
    """Yield the least busy time of each link for one execution; a switch may do the reduction."""
    assert isinstance(kind, Collective)
    group = group_of(op, asked.graph, asked.values, asked.hardware)
    yield from least_busy(kind.collective, whole(op).bind(asked.values), group).items()


def warn_of(hardware: Hardware, stand_ins: Iterable[StandIn]) -> None:
    """Warn about stand-ins for missing rates, except those that the caller chose."""
    texts = [str(instead) for instead in stand_ins if instead.why != NAMED]
    if texts:
        warnings.warn(f"hardware {hardware.id}: {'; '.join(texts)}", StandInWarning, stacklevel=5)


def in_seconds(value: Poly, asked: DeviceQuestion) -> Formula:
    """Return a time as a float, or as a formula while a name is unbound."""
    return as_seconds(value, asked.values)


def as_seconds(value: Poly, values: Bindings) -> Formula:
    """Return a time with bound sizes as a float or formula."""
    return answer(value, values.held) if value.constant is None else real(Fraction(value.constant))


# -- 1F1B in closed form -----------------------------------------------------------------------------------------------

#: Numbers, formulas or arrays of times.
T = TypeVar("T", bound=Any)


class EqualStages(NamedTuple):
    """Neighbouring pipeline ranks whose stages take equal times."""

    first: Poly
    last: Poly
    forward: Poly
    backward: Poly


class _Rank(NamedTuple):
    """A rank: the index of its run of equal ranks, and its number."""

    run: int
    at: Poly


def one_by_one(runs: Sequence[EqualStages], m: Poly, relations: Relations) -> Poly:
    """Return the seconds of a 1F1B step with `m` micro-batches, without sends.

    If the number of micro-batches or ranks is open, there are at least two micro-batches per rank.

    Derived as the longest path from the first forward to the last backward pass. It follows forward passes to some rank
    a, p - 1 - a times on the slowest rank on its way. It then alternates between forward passes down the ranks and
    backward passes up, as often as possible on one rank s, and follows backward passes from some rank c on. For fixed
    s, a and c are independent. With fewer than 2 p micro-batches, some of these paths do not exist.
    """
    p = runs[-1].last + 1
    beyond = (m - 2 * p).constant
    if beyond is not None and beyond < 0:
        each = [run for run in runs for _ in range(int((run.last - run.first + 1).constant or 0))]
        micro_batches = int(m.constant or 0)
        return few_batches_time(
            [r.forward for r in each], [r.backward for r in each], micro_batches, lambda times: most(times, relations)
        )
    paths = _Paths(runs, relations)
    ends = paths.ends()
    path_times = []
    for s in ends:
        into, out = (largest([(paths.way(a, s, back=back), "") for a in ends], relations) for back in (False, True))
        path_times.append((into + out + (m - p + s.at) * paths.both(s), ""))
    return largest(path_times, relations)


def few_batches_time(forward: Sequence[T], backward: Sequence[T], m: int, largest_of: Callable[[list[T]], T]) -> T:
    """Return the 1F1B time for any number of micro-batches, as `one_by_one`; `largest_of` compares times.

    A path through forward passes to rank a is on the slowest rank at most once per other micro-batch. If it reaches
    rank s from an earlier rank, each rank on the way uses one of the m - p + s turns there.
    """
    p, path_times = len(forward), list[T]()
    ahead, back = (_Way(times, m, largest_of) for times in (forward, backward))
    for s in range(max(0, p - m), p):
        remaining, both = m - p + s, forward[s] + backward[s]
        # the longest way within each number of turns
        into, out = ([n - both * k for k, n in way.to(s, other)] for way, other in ((ahead, back), (back, ahead)))
        most_out = list(accumulate(out, lambda one, other: largest_of([one, other])))
        for k, one in enumerate(into):
            after = remaining - (k + 1 if k else 0)
            if after >= 0:
                path_times.append(one + both * remaining + most_out[min(max(after - 1, 0), s)])
    return largest_of(path_times)


class _Way(Generic[T]):
    """Paths through forward passes only, or back through backward passes only."""

    def __init__(self, times: Sequence[T], m: int, largest_of: Callable[[list[T]], T]) -> None:
        self.times, self.largest_of = times, largest_of
        self.sums: list[T] = list(accumulate(times))
        slowest = accumulate(times, lambda one, other: largest_of([one, other]))
        waits = (min(len(times) - 1 - a, m - 1) for a in range(len(times)))
        self.alone = [n + slowest_time * k for n, slowest_time, k in zip(self.sums, slowest, waits, strict=True)]

    def to(self, s: int, other: _Way[T]) -> Iterator[tuple[int, T]]:
        """Yield the turns on rank s used by a path from each earlier rank, and its time."""
        alone, back = self.alone, other.sums
        yield 0, self.largest_of([alone[a] + back[a] - back[s] for a in range(s, len(alone))])
        for a in range(s - 1, -1, -1):
            yield s - a + 1, alone[a] + other.times[a] + self.sums[s] - self.sums[a] + self.times[a]


class _Paths:
    """Segments of critical paths through all ranks."""

    def __init__(self, runs: Sequence[EqualStages], relations: Relations) -> None:
        self.runs, self.p = runs, runs[-1].last + 1
        self.times = [[run.forward for run in runs], [run.backward for run in runs]]
        # slowest time among the ranks up to each run
        self.most = [
            [largest([(t, "") for t in times[: k + 1]], relations) for k in range(len(runs))] for times in self.times
        ]

    def ends(self) -> list[_Rank]:
        """Return the first and last rank of each run: some longest path has its corners there."""
        both = ((k, rank) for k, run in enumerate(self.runs) for rank in dict.fromkeys((run.first, run.last)))
        return [_Rank(k, rank) for k, rank in both]

    def both(self, s: _Rank) -> Poly:
        """Return the time of one forward and one backward pass on a rank."""
        return self.times[0][s.run] + self.times[1][s.run]

    def through(self, a: _Rank, s: _Rank, *, back: bool) -> Poly:
        """Return the time of forward or backward passes from rank a to rank s."""
        counts = (
            (s.at if k == s.run else run.last) - (a.at if k == a.run else run.first) + ONE
            for k, run in enumerate(self.runs[a.run : s.run + 1], a.run)
        )
        return total(n * t for n, t in zip(counts, self.times[back][a.run : s.run + 1], strict=True))

    def way(self, a: _Rank, s: _Rank, *, back: bool) -> Poly:
        """Return the extra time of a path on s that is in one direction only up to rank a or, with `back`, from it."""
        one_way = self.through(_Rank(0, ZERO), a, back=back) + (self.p - 1 - a.at) * self.most[back][a.run]
        if _ahead(a, s):
            visits = s.at - a.at + 1
            return one_way + self.times[not back][a.run] + self.through(a, s, back=back) - visits * self.both(s)
        return one_way + self.through(s, a, back=not back) - self.times[not back][s.run]


def _ahead(a: _Rank, s: _Rank) -> bool:
    """Whether rank a precedes rank s; ranks of one run are its ends, or numbers."""
    if a.run != s.run or a.at == s.at:
        return a.run < s.run
    between = (s.at - a.at).constant
    return between is None or between > 0


# -- all schedules -----------------------------------------------------------------------------------------------------


class StageSeconds(NamedTuple):
    """Seconds of a pipeline stage: per micro-batch for each pass, and once per step."""

    forward: Poly
    backward: Poly
    weights: Poly
    """of weight gradients computed after the input gradients are sent"""
    once: Poly


def pipeline_seconds(
    facts: Sequence[InFlightMicroBatches],
    shares: Sequence[StageSeconds],
    send: Poly,
    relations: Relations = NOTHING_KNOWN,
) -> Poly:
    """Return the seconds per pipeline step, given the times per stage and the time per send.

    `facts` describes the pipeline as seen from each kind of stage.
    """
    p, m, v = facts[0].stages, facts[0].micro_batches, facts[0].groups
    passes = [forward + back + weights for forward, back, weights, _ in shares]
    once = most((share[-1] for share in shares), relations)
    if facts[0].schedule not in ("gpipe", "1f1b"):
        schedule = SCHEDULES[facts[0].schedule]
        of_model = p if schedule.both_ways else p * v
        waits = 2 * (
            of_model - (2 if schedule.folded and not schedule.both_ways else 1)
        )  # local where a folded pipeline turns
        return m * most(passes, relations) + _idle(facts[0], shares, relations) + waits * send + once
    if facts[0].schedule == "gpipe":
        through = total(fact.alike * one for one, fact in zip(passes, facts, strict=True))
        slowest = most((f for f, *_ in shares), relations) + most((b for _, b, *_ in shares), relations)
        return through + (m - 1) * slowest + 2 * (p - 1) * send + once
    # the last stage waits for a send back once less per p micro-batches
    n = m + p - 1
    waits = 2 * (n - poly(sympy.ceiling((n / p).expr)))
    runs = [
        EqualStages(*run, forward, back)
        for fact, (forward, back, *_) in zip(facts, shares, strict=True)
        for run in fact.ranks
    ]
    if all(run.first.constant is not None for run in runs):
        runs.sort(key=lambda run: run.first.constant or 0)
    return one_by_one(runs, m, relations) + waits * send + once


def inference_pipeline_seconds(
    facts: Sequence[InFlightMicroBatches], times: Sequence[Poly], send: Poly, relations: Relations
) -> Poly:
    """Return the period of a batch in a forward-only pipeline, from one visit to a stage to the next."""
    through = total(f.alike * one for f, one in zip(facts, times, strict=True)) + (facts[0].stages - 1) * send
    return most([through, facts[0].micro_batches * most(times, relations)], relations)


def _idle(facts: InFlightMicroBatches, shares: Sequence[StageSeconds], relations: Relations) -> Poly:
    """Return the bubble of the slowest rank, with each layer group as slow as the slowest one."""
    # with both directions, each rank has half the micro-batches in each, which visit one of its stages
    groups = ONE if SCHEDULES[facts.schedule].both_ways else facts.groups
    each = (most(times, relations) / groups for times in list(zip(*shares, strict=True))[:3])
    substitutions = dict(zip(("p", "forward", "input", "weight"), (facts.stages, *each), strict=True))
    forms, fewest = idle(facts.schedule)
    ranks = facts.stages.constant
    if ranks is not None and ranks < fewest:
        micro_batches, chunks = next(sizes(facts.schedule, int(ranks)))
        forms = tuple(
            sympy.Matrix([row]).dot(TIMES) for row in idle_at(facts.schedule, int(ranks), micro_batches, chunks)
        )
    # drop sums that are never positive: the rank does not wait
    bubbles = [p for p in (poly(form).bind(substitutions) for form in forms) if not relations.nonnegative(-p)]
    return most(bubbles, relations) if bubbles else ZERO


def most(times: Iterable[Poly], relations: Relations) -> Poly:
    """Return the largest time."""
    return largest([(p, "") for p in times], relations)


# -- time per step -----------------------------------------------------------------------------------------------------

#: Returns the seconds for a subset of a graph's ops.
Timing: TypeAlias = Callable[[DeviceQuestion], Poly]


def seconds(
    graph: Graph,
    hardware: str | Hardware,
    which: str = "estimate",
    /,
    *,
    fallback: Fallback = None,
    hierarchical: bool = False,
    overlap: str = "none",
    network: str | Network | None = None,
    **dims: int,
) -> Formula:
    """Return the time of a graph on a device, as a formula while sizes are open.

    Parameters
    ----------
    graph : Graph
        Graph to time; for a pipeline from `parallelize`, the whole step counts.
    hardware : str, path-like or Hardware
        Device name, path of a TOML file, or Hardware from `load_hardware`, also `.symbolic()`.
    which : str
        "estimate": sum over ops, as declared, of the larger of compute and memory time. "lower": lower bound.
        "calibrated": time with the efficiency measured on devices, with all sizes bound; collectives as estimated,
        never below the lower bound.
    fallback : str or mapping, optional
        Number format whose rate replaces a missing one, or a mapping from wanted to used format.
    hierarchical : bool
        Include each memory level, as in `roofline`.
    overlap : str
        Overlap of collectives with computation, as in `roofline`.
    network : str, path-like or Network, optional
        Network between the domains of the interconnect, as in `roofline`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        Seconds: the `estimate` or `lower_bound` of `roofline`, or the calibrated time, which is a float.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or is open for a calibrated time, or such a time does not exist.
    SpecError
        If the device is unknown, has no rate, or lacks data on a link that a collective uses.
    UnsupportedError
        If a calibrated time is requested with `hierarchical`, and as in `roofline`.

    Warns
    -----
    StandInWarning
        If a rate is missing; the text names its stand-in. `roofline` lists them as `stand_ins`.

    Notes
    -----
    Per op, the estimate is the roofline of Williams, Waterman and Patterson 2009. Ops with equal times are collected
    into one term, and a maximum is resolved where sizes and assumptions decide it.

    GPipe takes the first micro-batch through all stages and back, and each other one on the slowest stage in each
    direction. 1F1B takes the longest path through the forward and backward passes of its stages. Exposed sends are
    added, 2 (p - 1) for GPipe and, for m micro-batches and p stages, 2 (n - ceil(n/p)) with n = m + p - 1 for 1F1B,
    then the work after the last micro-batch. This equals the event simulation of `costgraph.plan.simulate` if stages
    take equal times, and without sends for any stages. With sends and unequal stages it is an overestimate, since a
    rank that waits for a slower stage does not also wait for its sends. A 1F1B formula with open micro-batches or
    stages holds from two micro-batches per stage on.

    With overlap, the passes of each stage shrink by the ratio of its times with and without overlap. All sizes
    have to be bound.

    Other schedules take m times the slowest rank, plus its bubble as in `costgraph.plan.bubble`, plus the sends of one
    micro-batch there and back. With equal ranks, this matches the events of interleaved schedules. Zero-bubble
    schedules expose more or fewer sends and differ by some 2 p sends. Gradient reductions outside the passes, or of a
    single micro-batch, count once.

    Forward-only pipelines, as for inference, have m batches in flight. The time covers one pass of all m: the larger of
    one trip through all stages with p - 1 sends, and m times the slowest stage.

    Examples
    --------
    >>> import costgraph as cg
    >>> N, M = cg.dims("N M")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     x = g.input("x", (N, M))
    ...     g.output(cg.relu(cg.linear(x, "n m -> n k", k=M)))
    >>> device = cg.load_hardware("h100-sxm").symbolic()
    >>> cg.seconds(g, device)
    M*N*Max(4/bandwidth, 1/vector_fp32) + 2*M*Max(M*N/peak_bf16, M/bandwidth + 2*N/bandwidth)
    >>> f"{cg.seconds(g, 'h100-sxm', N=8192, M=4096) * 1e6:.1f} us"
    '317.9 us'
    >>> sizes = {"N": 8192, "M": 4096}
    >>> cg.seconds(g, "h100-sxm", "calibrated", **sizes) > cg.seconds(g, "h100-sxm", "lower", **sizes)
    True
    """
    need_graph("seconds", graph)
    need_choice("seconds: which", which, ("estimate", "lower", "calibrated"))
    need_choice("seconds: overlap", overlap, OVERLAPS)
    stages = stages_asked(graph, hardware, fallback, dims, "seconds", hierarchical=hierarchical, network=network)
    if which == "calibrated":
        for asked in stages:
            _need_calibrated(asked)
        timed = _overlapping(stages, overlap, _calibrated, _calibrated_overlapped)
        value = poly(max(exact(timed), exact(least(stages))))
    else:
        value = least(stages) if which == "lower" else as_declared(stages, overlap)
    for asked in stages:
        warn_of(asked.hardware, asked.rates.stand_ins.values())
    return in_total(value, stages, () if which == "lower" else holds_for(stages))


def in_total(value: Poly, stages: Sequence[DeviceQuestion], conditions: Sequence[Validity] = ()) -> Formula:
    """Return the time of all stages as a float, or as a formula while a name is unbound."""
    validity = (*(v for asked in stages for v in asked.values.held), *conditions)
    return answer(value, validity) if value.constant is None else real(Fraction(value.constant))


def stages_asked(
    graph: Graph, hardware: str | Hardware, fallback: Fallback, dims: Mapping[str, object], question: str, *,
    hierarchical: bool = False, network: str | Network | None = None,
) -> list[DeviceQuestion]:  # fmt: skip
    """Return each pipeline stage on its device with its sizes; other graphs as a single stage."""
    if not graph.parts:
        return [ask(graph, hardware, fallback, dims, question, hierarchical=hierarchical, network=network)]
    stage_sizes = [(g, {k: n for k, n in dims.items() if k in known_names(g)}) for g, _ in of_stages(graph, dims)]
    return [
        ask(g, hardware, fallback, bound, question, hierarchical=hierarchical, network=network)
        for g, bound in stage_sizes
    ]


def least(stages: Sequence[DeviceQuestion]) -> Poly:
    """Return the lower bound in seconds; for several stages, of the busiest one."""
    first = _bound_facts(stages[0]) if stages[0].graph.waiting is not None else None
    batches = first.micro_batches if first is not None and first.schedule == FORWARD else ONE
    return batches * most((lower_bound(asked) for asked in stages), stages[0].graph.root.relations)


def as_declared(stages: Sequence[DeviceQuestion], overlap: str) -> Poly:
    """Return the estimate: a sum over ops as declared, for a pipeline with bubbles and sends."""
    return _overlapping(stages, overlap, _declared, _declared_overlapped)


def _overlapping(
    stages: Sequence[DeviceQuestion],
    overlap: str,
    exposed_timing: Timing,
    overlapped_timing: Callable[[DeviceQuestion, str], Poly],
) -> Poly:
    """Return the time of all stages, combining times without overlap and with `overlap`."""
    if len(stages) == 1:
        return overlapped_timing(stages[0], overlap)
    if overlap == "none":
        return of_pipeline(stages, exposed_timing)
    ratios = dict[Graph, Poly]()
    for asked in stages:
        asked.need_numbers(f"overlap {overlap!r} in a pipeline")
        local = replace(asked, works=[w for w in asked.works if not crosses_stages(w)])
        sends = exposed_timing(replace(asked, works=[w for w in asked.works if crosses_stages(w)]))  # always exposed
        exposed, overlapped = exposed_timing(local), overlapped_timing(local, overlap)
        ratios[asked.graph] = (overlapped + sends) / (exposed + sends) if exposed else ONE
    return of_pipeline(stages, lambda stage: exposed_timing(stage) * ratios[stage.graph])


def crosses_stages(work: Work) -> bool:
    """Whether it is communication between pipeline stages."""
    return isinstance(work.op.kind, Collective | Send) and work.op.kind.axis == "pp"


def _declared(asked: DeviceQuestion) -> Poly:
    return estimate([spent(w, asked) for w in asked.works], asked.graph.root.relations)


def _declared_overlapped(asked: DeviceQuestion, overlap: str) -> Poly:
    return overlapped_time([spent(w, asked) for w in asked.works], asked, overlap)


def of_pipeline(stages: Sequence[DeviceQuestion], timing: Timing) -> Poly:
    """Return the seconds per pipeline step, from one stage of each kind."""
    facts = [_bound_facts(asked) for asked in stages]
    relations = stages[0].graph.root.relations
    send = most([time for asked in stages for time in _sends(asked)], relations)
    if facts[0].schedule == FORWARD:
        return inference_pipeline_seconds(facts, [timing(asked) for asked in stages], send, relations)
    shares = [shares_of(asked, timing, facts[0].micro_batches) for asked in stages]
    return pipeline_seconds(facts, shares, send, relations)


def holds_for(stages: Sequence[DeviceQuestion]) -> tuple[Validity, ...]:
    """Return the conditions on a pipeline's time: open sizes of 1F1B with unequal stages."""
    facts = _bound_facts(stages[0]) if len(stages) > 1 else None
    if facts is None or facts.schedule != "1f1b":
        return ()
    excess = facts.micro_batches - 2 * facts.stages
    place = "number of micro-batches beyond two per stage (this formula requires two)"
    asked = Condition(excess, place, 0, True, frozenset(excess.names()))
    return (Validity(Conditions((), (asked,))),) if excess.names() else ()


def _bound_facts(asked: DeviceQuestion) -> InFlightMicroBatches:
    """Return the pipeline facts of a stage with sizes bound."""
    facts, values = asked.graph.waiting, asked.values
    assert facts is not None
    return replace(
        facts, stages=facts.stages.bind(values), micro_batches=facts.micro_batches.bind(values),
        alike=facts.alike.bind(values), ranks=tuple((a.bind(values), b.bind(values)) for a, b in facts.ranks),
    )  # fmt: skip


def shares_of(asked: DeviceQuestion, timing: Timing, m: Poly) -> StageSeconds:
    """Return the times of one pipeline stage in a step with `m` micro-batches."""
    assert asked.graph.waiting is not None
    works_by_pass: dict[str, list[Work]] = {name: [] for name in StageSeconds._fields}
    for work, pass_name in zip(asked.works, by_pass(asked, asked.graph.waiting.schedule), strict=True):
        works_by_pass[pass_name].append(work)
    forward, back, weights, once_seconds = (
        timing(replace(asked, works=works)) if works else ZERO for works in works_by_pass.values()
    )
    return StageSeconds(forward / m, back / m, weights / m, once_seconds)


def by_pass(asked: DeviceQuestion, schedule: str) -> Iterator[str]:
    """Yield the pass that each work in a stage belongs to, as a field name of `StageSeconds`."""
    splits_backward = schedule not in ("gpipe", "1f1b", "interleaved")
    graphs = asked.graph.bodies()
    late = {op for g in graphs if is_pass(g) or g is asked.graph for op in behind(g)} if splits_backward else set()
    return (when(work.op, late) for work in asked.works)


def when(op: Op, late: Collection[Op] = ()) -> str:
    """Return the pass that an op belongs to, or "once" if it runs once per step."""
    root, only_reduces = op.graph.root, _reduces(op)
    while op.graph is not root and not is_pass(op.graph):
        assert op.graph.owner is not None
        op = op.graph.owner
        only_reduces = only_reduces and (op.graph is root or not is_pass(op.graph))
    passes = op.graph is not root and is_pass(op.graph)
    several = any(is_pass(o.loop.body) for o in root.ops if o.loop)
    if op.phase == "optimizer" or (not passes and (several or only_reduces)):
        return "once"
    return "forward" if op.phase == "forward" else "weights" if op in late else "backward"


def _reduces(op: Op) -> bool:
    """Whether an op reduces gradients across ranks without an earlier layer waiting for it."""
    if not isinstance(op.kind, Collective) or op.phase != "backward":
        return False
    graph, reached = op.graph, {*op.results}
    for other in graph.ops[graph.ops.index(op) + 1 :]:
        if other.phase != "optimizer" and not reached.isdisjoint(other.operands):
            if isinstance(other.kind, Send) or (other.loop is not None and not reached.isdisjoint(other.loop.starts)):
                return False
            reached |= {*other.results}
    return graph.owner is None or graph.owner.loop is None or reached.isdisjoint(graph.owner.loop.nexts)


def _sends(asked: DeviceQuestion) -> Iterator[Poly]:
    """Yield the time per send in a stage."""
    for op in asked.graph.walk():
        if isinstance(op.kind, Send):
            yield exchange(op, asked.graph, asked.values, asked.hardware)[0]


def _need_calibrated(asked: DeviceQuestion) -> None:
    """Raise for graphs without a calibrated time."""
    question = "seconds, calibrated,"
    if asked.levels:
        raise UnsupportedError(f"{question} of graph {asked.graph.name!r}: hierarchical=True, expected False, since "
                               "the calibration includes caches")  # fmt: skip
    asked.need_numbers(question)
    for work in asked.works:
        work.seconds(asked.rates)  # raises if a rate is missing


def _calibrated(asked: DeviceQuestion) -> Poly:
    """Return the calibrated seconds without overlap, for bound sizes."""
    return poly(sum(_calibrated_times(asked), Fraction(0)))


def _calibrated_overlapped(asked: DeviceQuestion, overlap: str) -> Poly:
    """Return the calibrated seconds with overlapping collectives."""
    if overlap == "none":
        return _calibrated(asked)
    times = [[(poly(seconds_of_op), "calibrated")] for seconds_of_op in _calibrated_times(asked)]
    return overlapped_time(times, asked, overlap)


def _calibrated_times(asked: DeviceQuestion) -> list[Fraction]:
    """Return the calibrated time of each op.

    Links between devices and hosts are not calibrated: their ops take the estimated time. A kernel with ring sends
    takes the larger of its own time and the time of its sends.
    """
    uncalibrated = [bool(work.collective) or work.unit == "host" for work in asked.works]
    loads = [
        load_of(w, asked.values)
        for w, is_uncalibrated in zip(asked.works, uncalibrated, strict=True)
        if not is_uncalibrated and w.times
    ]
    measured = iter(shipped().times(loads, asked.rates))
    relations, out = asked.graph.root.relations, list[Fraction]()
    for work, is_uncalibrated in zip(asked.works, uncalibrated, strict=True):
        if not work.times:
            out.append(Fraction(0))
        elif is_uncalibrated:
            out.append(Fraction(exact(largest(spent(work, asked), relations))))
        else:
            own_seconds = Fraction(next(measured))
            out.append(max(own_seconds, Fraction(exact(_of_links(asked, work)))) if work.rings else own_seconds)
    return out


def _of_links(asked: DeviceQuestion, work: Work) -> Poly:
    return total(exchange(op, asked.graph, asked.values, asked.hardware)[0] for op in work.rings) * work.times
