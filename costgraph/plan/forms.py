"""What ranks of a structure take, over arrays of its degrees: bytes at the peak, and seconds by what they go into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..algebra.polynomial import Poly, poly
from ..algebra.symbols import symbol
from ..analysis.arrays import Array, Programs, Values, peaks, refused
from ..analysis.duration import between, by_pass
from ..analysis.exchange import exchange
from ..analysis.passes import Shares, of_few, of_shares
from ..analysis.seconds import Spent, in_place, memory_time, spent, unit_times
from ..analysis.streams import finished
from ..analysis.work import Asked, Work
from ..bind.sweep import Plan as Evaluated
from ..bind.sweep import plan
from ..errors import BindingError, UnsupportedError
from ..graph.loop import loops
from ..graph.op import Op
from ..graph.placement import Waiting
from ..graph.sizes import bindings, known_names
from ..ops.hops import Send
from .rings import Rings

__all__ = ["IDLE", "Cut", "Forms", "Found", "Kind"]

#: Points that are worked out at a time.
_CHUNK = 1 << 14
#: Parts of the time of a step beside collectives, which are parts of their own; idle is a stage of a pipeline while
#: others work.
COMPUTE, MEMORY, IDLE, SENT = "compute", "memory traffic", "idle", "send over pp"


class Cut(NamedTuple):
    """Stages of one kind of some pipelines."""

    layers: Array
    """how many each of them has"""
    alike: Array
    """how many stages: none where a pipeline has no such stage"""


@dataclass
class Kind:
    """What a rank takes, or each of some that do the same."""

    asked: Asked
    waiting: Waiting | None = None
    """what a stage of a pipeline knows of the others"""
    rings: Rings | None = None
    """of what is sent in a torus"""
    overlap: str = "none"
    charge_all: bool = False
    """whether all collectives are charged where streams would play too many ops"""
    times: list[list[Spent]] = field(default_factory=list)
    programs: Programs = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.times = [(spent if self.rings is None else in_place)(w, self.asked) for w in self.asked.works]
        self.compute = [w.seconds(self.asked.rates)[0] for w in self.asked.works]
        self.passes = list(by_pass(self.asked, self.waiting.schedule)) if self.waiting is not None else []
        graph, device = self.asked.graph, self.asked.hardware
        self.handed = [op for op in graph.walk() if isinstance(op.kind, Send)] if self.waiting is not None else []
        ops = self.handed if self.rings is None else ()
        self.sends = [exchange(op, graph, self.asked.values, device)[0] for op in ops]
        self.least: list[Poly] = []

    def beside(self, overlap: str, rings: Rings | None, *, charge_all: bool = False) -> Kind:
        """Return the same where collectives overlap with all else as it says, with what one search notes of rings."""
        out = copy(self)
        out.overlap, out.rings, out.charge_all = overlap, rings, charge_all
        out.least = [memory_time(self.asked)] if overlap == "ideal" else []
        if overlap == "streams":
            rest = [w for w in self.asked.works if not between(w)]
            out.least = [*unit_times(replace(self.asked, works=rest)).values()]
        return out

    def at(self, sizes: Mapping[str, Any]) -> _Taken:
        """Return what it takes at points; NaN where its graph refuses the sizes."""
        value, shape = Values(sizes), _shape(sizes)
        asked = {**{name: value(p) for name, p in self.asked.values.items()}, **sizes}
        whole = {name: np.asarray(n, dtype=np.int64) for name, n in asked.items()}
        wrong = refused(self.asked.values.held, {name: np.asarray(n) for name, n in sizes.items()})
        passes, parts, kinds, ops = self.added(value, shape)
        apart = busy = np.broadcast_to(sum(kinds.values()), shape)
        if self.least:
            least = [np.broadcast_to(value(p), shape) for p in self.least]
            beside = (kinds["alone"], kinds["sent"]) if self.overlap == "ideal" else [self.played(ops, value, shape)]
            busy = np.max([*(np.broadcast_to(t, shape) for t in beside), *least], axis=0) + kinds["waited"]
        sends = [np.broadcast_to(value(p), shape) for p in self.sends] or self.around(self.handed, value, shape)
        send = np.max(sends, axis=0) if sends else 0.0
        peak = np.where(wrong, np.nan, peaks(self.asked.graph, whole, self.waiting, self.programs))
        return _Taken(peak, np.where(wrong, np.nan, busy), apart, passes, send, parts)

    def added(self, value: Values, shape: tuple[int, ...]) -> tuple[dict[Any, Any], ...]:
        """Return seconds by pass, by what they go into, by what else may be done at that time, and by op."""
        passes: dict[str, Any] = dict.fromkeys(Shares._fields, np.float64(0))
        parts: dict[str, Any] = dict.fromkeys((COMPUTE, MEMORY), np.float64(0))
        kinds: dict[str, Any] = dict.fromkeys(("alone", "sent", "waited"), np.float64(0))
        ops: dict[Any, Any] = {}
        for i, (work, found) in enumerate(zip(self.asked.works, self.times, strict=True)):
            times = [np.broadcast_to(value(p), shape) for p, _ in found]
            if links := self.around([work.op] if work.collective else work.rings, value, shape):
                times.append(sum(links) * value(work.times))
            taken = np.max(times, axis=0)
            own, part = self.passes[i] if self.passes else "once", _sent_as(work)
            if part is None:
                compute = value(self.compute[i])
                parts[COMPUTE], parts[MEMORY] = parts[COMPUTE] + compute, parts[MEMORY] + taken - compute
            else:
                parts[part] = parts.get(part, 0) + taken
            passes[own] = passes[own] + taken
            sent = work.collective is not None or work.unit != "memory"
            # what goes to other stages is waited for, whatever else overlaps
            kind = "waited" if between(work) else "sent" if sent else "alone"
            kinds[kind] = kinds[kind] + taken
            if kind != "waited":
                ops[work.op] = ops.get(work.op, 0) + taken
        return passes, parts, kinds, ops

    def played(self, ops: Mapping[Op, Array], value: Values, shape: tuple[int, ...]) -> Array:
        """Return when all streams are done: those of points at which loops have as many iterations together."""
        graph, (many,) = self.asked.graph, shape
        every = [loop for loop in loops(graph) if not loop.until]
        counts = [np.broadcast_to(value(loop.count.bind(self.asked.values)), shape) for loop in every]
        same, place = np.unique(np.rint(counts).reshape(len(every), many), axis=1, return_inverse=True)
        there = np.isfinite(np.sum([*ops.values()], axis=0))
        out = np.full(shape, np.nan)
        for i, found in enumerate(same.T):
            at = np.flatnonzero(there & (place.reshape(-1) == i))
            known = dict(zip((loop.op for loop in every), found.astype(int).tolist(), strict=True))
            try:
                out[at] = finished(graph, {op: t[at] for op, t in ops.items()}, known)
            except UnsupportedError:
                if not self.charge_all:
                    raise
                out[at] = np.sum([np.broadcast_to(t, shape)[at] for t in ops.values()], axis=0)
        return out

    def around(self, ops: Sequence[Op], value: Values, shape: tuple[int, ...]) -> list[Array]:
        """Return the seconds that each of what is sent takes in a torus; nothing elsewhere."""
        return [] if self.rings is None else [self.rings.seconds(op, self.asked, value, shape) for op in ops]


class _Taken(NamedTuple):
    """What ranks of a kind take at points."""

    peak: Array
    busy: Array
    """seconds of all that they do"""
    apart: Array
    """the same, one after the other"""
    shares: dict[str, Any]
    """of `apart` by pass, of all micro-batches"""
    send: Any
    """seconds of one thing that they hand on"""
    parts: dict[str, Any]
    """of `apart`, by what they go into"""


class Found(NamedTuple):
    """What plans take."""

    peaks: Mapping[str, Array]
    """bytes of the first, a middle and the last stage: NaN where its graph refuses the sizes, 0 where there is none"""
    seconds: Array
    parts: dict[str, Array]
    """of the seconds: of the slowest stage, with what it sends and the time that it is idle"""


@dataclass
class Forms:
    """What ranks of a structure take: several kinds where it is a pipeline."""

    kinds: Mapping[str, Kind]
    """by name, as cuts have them"""
    names: Mapping[str, str]
    """names of the degrees as dimensions"""
    layers: str | None = None
    """name of the number of layers"""

    def at(self, sizes: Mapping[str, Array], cuts: Mapping[str, Cut]) -> Found:
        """Evaluate at points, of which all degrees are given: some at a time, which stay in a cache."""
        (many,) = _shape(sizes)
        if many > _CHUNK:
            places = [slice(i, i + _CHUNK) for i in range(0, many, _CHUNK)]
            each = [
                self.at(_some(sizes, p), {k: Cut(c.layers[p], c.alike[p]) for k, c in cuts.items()}) for p in places
            ]
            return Found(
                {name: np.concatenate([f.peaks[name] for f in each]) for name in each[0].peaks},
                np.concatenate([f.seconds for f in each]),
                {name: np.concatenate([f.parts[name] for f in each]) for name in each[0].parts},
            )
        if "all" in cuts:
            one = self.kinds["all"].at(sizes)
            parts = {name: np.broadcast_to(v, one.peak.shape) for name, v in one.parts.items()}
            return Found({"all": one.peak}, one.busy, parts)
        return self.of_pipeline(sizes, cuts)

    def refusal(self, sizes: Mapping[str, Array], cuts: Mapping[str, Cut], at: int) -> str:
        """Return why a graph is against the sizes of a point, nothing if none is."""
        for name, cut in cuts.items():
            asked, own = self.kinds[name].asked, sizes if "all" in cuts else self.of_stage(sizes, cut)
            known = {n: int(found) for n, p in asked.values.items() if (found := p.constant) is not None}
            given = {n: int(np.broadcast_to(array, _shape(own))[at]) for n, array in own.items()}
            try:
                bindings(asked.graph, {n: k for n, k in {**known, **given}.items() if n in known_names(asked.graph)})
            except BindingError as error:
                return str(error)
        return ""

    def of_pipeline(self, sizes: Mapping[str, Array], cuts: Mapping[str, Cut]) -> Found:
        """Evaluate stages, and what they take together."""
        there = np.array([cut.alike > 0 for cut in cuts.values()])
        taken = [self.kinds[name].at(self.of_stage(sizes, cut)) for name, cut in cuts.items()]
        m, p = (np.asarray(sizes[self.names[d]], dtype=np.float64) for d in ("accumulate", "pp"))
        env: dict[str, Any] = {"p": p, "m": m, "v": np.asarray(sizes[self.names["virtual"]], dtype=np.float64)}
        for i, (t, cut) in enumerate(zip(taken, cuts.values(), strict=True)):
            squeezed = np.where(there[i], t.busy / t.apart, 0)  # with overlap, each pass by the same factor
            env |= {f"{name}{i}": share * squeezed for name, share in t.shares.items()} | {f"n{i}": cut.alike}
            env |= {f"{name}{i}": env[f"{name}{i}"] / m for name in Shares._fields[:3]}
        env["send"] = np.max([np.where(there[i], t.send, 0) for i, t in enumerate(taken)], axis=0)
        waiting = self.kinds["first"].waiting
        assert waiting is not None
        schedule = waiting.schedule
        seconds = np.array(np.broadcast_to(_whole_step(schedule, len(cuts))(env), m.shape))
        if schedule == "1f1b":  # its formula is of two micro-batches for each stage or more
            for few in {*zip(m[m < 2 * p].tolist(), p[m < 2 * p].tolist(), strict=True)}:
                at = (m == few[0]) & (p == few[1])
                seconds[at] = _of_few({name: np.broadcast_to(n, m.shape)[at] for name, n in env.items()}, len(cuts))
        busy = np.where(there, [t.busy for t in taken], 0)
        slowest = busy.argmax(0)
        parts = {}
        for name in dict.fromkeys(name for t in taken for name in t.parts):
            each = np.array([np.broadcast_to(t.parts.get(name, 0.0), m.shape) for t in taken])
            parts[name] = np.take_along_axis(each, slowest[None], 0)[0]
        waited = _waits(schedule)(env) * env["send"]
        parts[SENT] = parts.get(SENT, 0) + waited
        parts[IDLE] = np.maximum(seconds - np.take_along_axis(busy, slowest[None], 0)[0] - waited, 0)
        peaks_ = {name: np.where(at, t.peak, 0) for name, at, t in zip(cuts, there, taken, strict=True)}
        return Found(_by_place(peaks_), seconds, parts)

    def of_stage(self, sizes: Mapping[str, Array], cut: Cut) -> dict[str, Array]:
        """Return the sizes of a stage: as many layers in all as if each had its own."""
        assert self.layers is not None
        return {**sizes, self.layers: np.maximum(cut.layers, 1) * sizes[self.names["pp"]]}


def _by_place(peaks_: Mapping[str, Array]) -> dict[str, Array]:
    """Return the bytes of stages, those in the middle as one."""
    found = {"first": peaks_["first"]}
    between = [peaks_[name] for name in ("middle", "less") if name in peaks_]
    if between:
        found["middle"] = np.max(between, axis=0)
    return {**found, "last": peaks_["last"]}


def _some(sizes: Mapping[str, Array], at: slice) -> dict[str, Array]:
    return {name: n[at] for name, n in sizes.items()}


def _shape(sizes: Mapping[str, Any]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(np.shape(n) for n in sizes.values()))


@lru_cache(maxsize=64)
def _whole_step(schedule: str, kinds: int) -> Evaluated:
    """Return the seconds of a step of a pipeline, in those of its stages."""
    p, m, v = (poly(symbol(n)) for n in "pmv")
    facts = [Waiting((), (), schedule, p, m, poly(symbol(f"n{i}")), v) for i in range(kinds)]
    starts = [*accumulate((fact.alike for fact in facts[:-1]), initial=poly(0))]
    facts = [replace(f, ranks=((at, at + f.alike - 1),)) for f, at in zip(facts, starts, strict=True)]
    shares = [Shares(*(poly(symbol(f"{name}{i}")) for name in Shares._fields)) for i in range(kinds)]
    return plan(of_shares(facts, shares, poly(symbol("send"))))


def _of_few(env: dict[str, Any], kinds: int) -> Array:
    """Return the seconds of steps of 1F1B of as many ranks and as few micro-batches as each other."""
    ranks = [i for i in range(kinds) for _ in range(int(env[f"n{i}"][0]))]
    forward, backward = ([env[f"{way}{i}"] for i in ranks] for way in ("forward", "backward"))
    passes: Array = of_few(forward, backward, int(env["m"][0]), lambda times: np.maximum.reduce(times))
    once: Array = np.maximum.reduce([env[f"once{i}"] for i in ranks])
    sends: Array = np.asarray(_waits("1f1b")(env) * env["send"])
    found: Array = passes + once + sends
    return found


@lru_cache(maxsize=64)
def _waits(schedule: str) -> Evaluated:
    """Return how many sends are waited for: what a step takes whose stages do nothing."""
    p, m, v = (poly(symbol(n)) for n in "pmv")
    facts = Waiting((), (), schedule, p, m, p, v, ranks=((poly(0), p - 1),))
    return plan(of_shares([facts], [Shares(*(poly(0) for _ in Shares._fields))], poly(1)))


def _sent_as(work: Work) -> str | None:
    """Return what a collective or a send is called among the parts of the time, None for what a device does alone."""
    if isinstance(work.op.kind, Send):
        return f"send over {work.op.kind.axis}"
    return None if work.collective is None else f"{work.collective.collective} over {work.collective.axis}"
