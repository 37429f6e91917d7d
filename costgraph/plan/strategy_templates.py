"""Strategy templates: closed forms for all plans with the same per-rank graph, evaluated over arrays of degrees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf, nan, prod
from typing import Any, NamedTuple

import numpy as np

from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import symbol
from ..analysis.collective_time import exchange, message, placed, ranks_apart, taken
from ..analysis.costs import collection_paused
from ..analysis.memory import Array, PointValues, Programs, peaks, refused
from ..analysis.step_time import (
    Spent,
    StageSeconds,
    by_pass,
    crosses_stages,
    few_batches_time,
    finished,
    local_times,
    memory_time,
    pipeline_seconds,
    spent,
    unit_times,
)
from ..analysis.training import goes_over
from ..analysis.training_memory import StateBytes, state_bytes
from ..analysis.work import DeviceQuestion, Fallback, Work, ask, exact
from ..bind.evaluate import Plan as Evaluated
from ..bind.evaluate import plan
from ..errors import BindingError, CostGraphError, GraphError, SpecError, UnsupportedError
from ..hardware.specs import Hardware
from ..ir.graph import Graph, InFlightMicroBatches, Op, bindings, known_names, loops
from ..ir.graph import dimension_size as size_of
from ..ir.graph import stages as stages_of
from ..ops.collectives import Send
from ..optimizers import AdamW
from ..transforms.checkpoint import read_checkpoint
from ..transforms.pipeline_schedules import SCHEDULES, RankOrder
from ..transforms.pipeline_stages import EqualRanks as Stage
from ..transforms.pipeline_stages import waiting_of
from ..transforms.shard.parallelize import parallelize, shares
from ..transforms.training import training_step

__all__ = [
    "Rings",
    "IDLE",
    "StageKind",
    "RankCosts",
    "PlanCosts",
    "RankCost",
    "CHOICES",
    "DEGREES",
    "Fallback",
    "PlanFamily",
    "Policies",
    "Structure",
    "batch_of",
    "whole",
]


# -- torus rings -------------------------------------------------------------------------------------------------------
# Communication time in a torus at many points: the available rings depend on the degrees.


@dataclass
class Rings:
    """Cached ring times, as latency plus seconds for each byte."""

    hardware: Hardware
    """with a torus network"""
    lines: dict[tuple[str, Fraction, Fraction], tuple[float, float]] = field(default_factory=dict)
    """(latency, seconds per byte) by collective, ranks and stride of the ring; NaN if the torus has no such ring"""
    why: str = ""
    """why the first of these has no ring"""

    def seconds(self, op: Op, asked: DeviceQuestion, value: PointValues, shape: tuple[int, ...]) -> Array:
        """Return the seconds that a collective or send takes at each point; NaN if there are no rings for it."""
        times, collective, size = message(op, asked.values)
        group = (np.broadcast_to(value(p.bind(asked.values)), shape) for p in ranks_apart(op, asked.graph))
        pairs, inverse = np.unique(np.array([*group]), axis=1, return_inverse=True)
        each = np.array([self.line(op, collective, *map(Fraction, pair)) for pair in pairs.T.tolist()])
        start, slope = each[inverse.reshape(-1)].T
        out: Array = np.broadcast_to(value(times) * (start + slope * value(size)), shape)
        return out

    def line(self, op: Op, collective: str, ranks: Fraction, stride: Fraction) -> tuple[float, float]:
        """Return the latency and the seconds for each byte."""
        key = collective, ranks, stride
        if key not in self.lines:
            try:
                group = placed(op.kind.axis, poly(ranks), poly(stride), self.hardware)  # type: ignore[attr-defined]
            except SpecError as error:
                self.why, self.lines[key] = self.why or str(error), (nan, nan)
            else:
                latency, per_byte = (exact(taken(collective, poly(n), group)) for n in (0, 1))
                self.lines[key] = float(latency), float(per_byte - latency)
        return self.lines[key]


# -- closed forms ------------------------------------------------------------------------------------------------------
# Peak memory and seconds of each rank, over arrays of degrees.

#: Points that are evaluated together.
_CHUNK = 1 << 14
#: Parts of a step's time other than collectives. A pipeline stage is idle while others compute.
COMPUTE, MEMORY, IDLE, SENT = "compute", "memory traffic", "idle", "send over pp"


class StageKind(NamedTuple):
    """Pipeline stages with equal graphs, over an array of pipelines."""

    layers: Array
    """layers per stage"""
    alike: Array
    """number of stages, possibly 0"""


@dataclass
class RankCost:
    """Costs of one rank, or of all ranks with the same graph."""

    asked: DeviceQuestion
    waiting: InFlightMicroBatches | None = None
    """position and schedule of a pipeline stage"""
    rings: Rings | None = None
    """ring times in a torus"""
    overlap: str = "none"
    charge_all: bool = False
    """whether to charge all collectives if the graph has too many ops to simulate streams"""
    times: list[list[Spent]] = field(default_factory=list)
    programs: Programs = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.times = [(spent if self.rings is None else local_times)(w, self.asked) for w in self.asked.works]
        self.compute = [w.seconds(self.asked.rates)[0] for w in self.asked.works]
        self.passes = list(by_pass(self.asked, self.waiting.schedule)) if self.waiting is not None else []
        graph, device = self.asked.graph, self.asked.hardware
        self.stage_sends = [op for op in graph.walk() if isinstance(op.kind, Send)] if self.waiting is not None else []
        ops = self.stage_sends if self.rings is None else ()
        self.sends = [exchange(op, graph, self.asked.values, device)[0] for op in ops]
        self.lower_bounds: list[Poly] = []

    def with_overlap(self, overlap: str, rings: Rings | None, *, charge_all: bool = False) -> RankCost:
        """Return a copy with the given communication overlap, for one search."""
        out = copy(self)
        out.overlap, out.rings, out.charge_all = overlap, rings, charge_all
        out.lower_bounds = [memory_time(self.asked)] if overlap == "ideal" else []
        if overlap == "streams":
            local = [w for w in self.asked.works if not crosses_stages(w)]
            out.lower_bounds = [*unit_times(replace(self.asked, works=local)).values()]
        return out

    def at(self, sizes: Mapping[str, Any]) -> _RankCosts:
        """Return the costs at points; NaN if the graph rejects the sizes."""
        value, shape = PointValues(sizes), _shape(sizes)
        bound = {**{name: value(p) for name, p in self.asked.values.items()}, **sizes}
        dims = {name: np.asarray(n, dtype=np.int64) for name, n in bound.items()}
        wrong = refused(self.asked.values.held, {name: np.asarray(n) for name, n in sizes.items()})
        passes, parts, kinds, ops = self.added(value, shape)
        exposed = busy = np.broadcast_to(sum(kinds.values()), shape)
        if self.lower_bounds:
            bounds = [np.broadcast_to(value(p), shape) for p in self.lower_bounds]
            overlapped = (
                (kinds["alone"], kinds["sent"]) if self.overlap == "ideal" else [self.played(ops, value, shape)]
            )
            busy = np.max([*(np.broadcast_to(t, shape) for t in overlapped), *bounds], axis=0) + kinds["waited"]
        sends = [np.broadcast_to(value(p), shape) for p in self.sends] or self.around(self.stage_sends, value, shape)
        send = np.max(sends, axis=0) if sends else 0.0
        peak = np.where(wrong, np.nan, peaks(self.asked.graph, dims, self.waiting, self.programs))
        return _RankCosts(peak, np.where(wrong, np.nan, busy), exposed, passes, send, parts)

    def added(self, value: PointValues, shape: tuple[int, ...]) -> tuple[dict[Any, Any], ...]:
        """Return seconds by pass, by part, by overlap class and by op."""
        passes: dict[str, Any] = dict.fromkeys(StageSeconds._fields, np.float64(0))
        parts: dict[str, Any] = dict.fromkeys((COMPUTE, MEMORY), np.float64(0))
        kinds: dict[str, Any] = dict.fromkeys(("alone", "sent", "waited"), np.float64(0))
        ops: dict[Any, Any] = {}
        for i, (work, resources) in enumerate(zip(self.asked.works, self.times, strict=True)):
            times = [np.broadcast_to(value(p), shape) for p, _ in resources]
            if links := self.around([work.op] if work.collective else work.rings, value, shape):
                times.append(sum(links) * value(work.times))
            seconds = np.max(times, axis=0)
            pass_name, component = self.passes[i] if self.passes else "once", _sent_as(work)
            if component is None:
                compute = value(self.compute[i])
                parts[COMPUTE], parts[MEMORY] = parts[COMPUTE] + compute, parts[MEMORY] + seconds - compute
            else:
                parts[component] = parts.get(component, 0) + seconds
            passes[pass_name] = passes[pass_name] + seconds
            is_sent = work.collective is not None or work.unit != "memory"
            # sends to other stages are exposed, whatever else overlaps
            kind = "waited" if crosses_stages(work) else "sent" if is_sent else "alone"
            kinds[kind] = kinds[kind] + seconds
            if kind != "waited":
                ops[work.op] = ops.get(work.op, 0) + seconds
        return passes, parts, kinds, ops

    def played(self, ops: Mapping[Op, Array], value: PointValues, shape: tuple[int, ...]) -> Array:
        """Return when all streams finish; points with equal loop counts are simulated together."""
        graph, (n_points,) = self.asked.graph, shape
        every = [loop for loop in loops(graph) if not loop.until]
        counts = [np.broadcast_to(value(loop.count.bind(self.asked.values)), shape) for loop in every]
        unique_counts, inverse = np.unique(np.rint(counts).reshape(len(every), n_points), axis=1, return_inverse=True)
        valid = np.isfinite(np.sum([*ops.values()], axis=0))
        out = np.full(shape, np.nan)
        for i, loop_counts in enumerate(unique_counts.T):
            points = np.flatnonzero(valid & (inverse.reshape(-1) == i))
            iterations = dict(zip((loop.op for loop in every), loop_counts.astype(int).tolist(), strict=True))
            try:
                out[points] = finished(graph, {op: t[points] for op, t in ops.items()}, iterations)
            except UnsupportedError:
                if not self.charge_all:
                    raise
                out[points] = np.sum([np.broadcast_to(t, shape)[points] for t in ops.values()], axis=0)
        return out

    def around(self, ops: Sequence[Op], value: PointValues, shape: tuple[int, ...]) -> list[Array]:
        """Return the seconds of each message in a torus; an empty list for other networks."""
        return [] if self.rings is None else [self.rings.seconds(op, self.asked, value, shape) for op in ops]


class _RankCosts(NamedTuple):
    """Costs of one rank at points."""

    peak: Array
    busy: Array
    """seconds with overlap"""
    apart: Array
    """seconds without overlap"""
    shares: dict[str, Any]
    """`apart` by pass, over all micro-batches"""
    send: Any
    """seconds per send"""
    parts: dict[str, Any]
    """`apart` by part"""


class PlanCosts(NamedTuple):
    """Costs of plans."""

    peaks: Mapping[str, Array]
    """bytes of the first, middle and last stage: NaN if its graph rejects the sizes, 0 if there is no such stage"""
    seconds: Array
    parts: dict[str, Array]
    """seconds by part, in the slowest stage, with sends and idle time"""


@dataclass
class RankCosts:
    """A structure's closed forms; a pipeline has several kinds of ranks."""

    kinds: Mapping[str, RankCost]
    """by name, as in cuts"""
    names: Mapping[str, str]
    """dimension names by degree"""
    layers: str | None = None
    """dimension name of the layers"""

    def at(self, sizes: Mapping[str, Array], cuts: Mapping[str, StageKind]) -> PlanCosts:
        """Evaluate at points with known degrees, in chunks that stay in cache."""
        (n_points,) = _shape(sizes)
        if n_points > _CHUNK:
            chunks = [slice(i, i + _CHUNK) for i in range(0, n_points, _CHUNK)]
            each = [
                self.at(_slice_sizes(sizes, p), {k: StageKind(c.layers[p], c.alike[p]) for k, c in cuts.items()})
                for p in chunks
            ]
            return PlanCosts(
                {name: np.concatenate([f.peaks[name] for f in each]) for name in each[0].peaks},
                np.concatenate([f.seconds for f in each]),
                {name: np.concatenate([f.parts[name] for f in each]) for name in each[0].parts},
            )
        if "all" in cuts:
            costs = self.kinds["all"].at(sizes)
            parts = {name: np.broadcast_to(v, costs.peak.shape) for name, v in costs.parts.items()}
            return PlanCosts({"all": costs.peak}, costs.busy, parts)
        return self.of_pipeline(sizes, cuts)

    def refusal(self, sizes: Mapping[str, Array], cuts: Mapping[str, StageKind], index: int) -> str:
        """Return why a graph rejects the sizes of a point, an empty string if it does not."""
        for name, cut in cuts.items():
            asked, stage_sizes = self.kinds[name].asked, sizes if "all" in cuts else self.of_stage(sizes, cut)
            bound = {n: int(constant) for n, p in asked.values.items() if (constant := p.constant) is not None}
            point = {n: int(np.broadcast_to(array, _shape(stage_sizes))[index]) for n, array in stage_sizes.items()}
            try:
                bindings(asked.graph, {n: k for n, k in {**bound, **point}.items() if n in known_names(asked.graph)})
            except BindingError as error:
                return str(error)
        return ""

    def of_pipeline(self, sizes: Mapping[str, Array], cuts: Mapping[str, StageKind]) -> PlanCosts:
        """Evaluate the stages, and combine them by the schedule."""
        exists = np.array([cut.alike > 0 for cut in cuts.values()])
        costs = [self.kinds[name].at(self.of_stage(sizes, cut)) for name, cut in cuts.items()]
        m, p = (np.asarray(sizes[self.names[d]], dtype=np.float64) for d in ("accumulate", "pp"))
        env: dict[str, Any] = {"p": p, "m": m, "v": np.asarray(sizes[self.names["virtual_stages"]], dtype=np.float64)}
        for i, (t, cut) in enumerate(zip(costs, cuts.values(), strict=True)):
            squeezed = np.where(exists[i], t.busy / t.apart, 0)  # overlap shortens each pass by the same factor
            env |= {f"{name}{i}": share * squeezed for name, share in t.shares.items()} | {f"n{i}": cut.alike}
            env |= {f"{name}{i}": env[f"{name}{i}"] / m for name in StageSeconds._fields[:3]}
        env["send"] = np.max([np.where(exists[i], t.send, 0) for i, t in enumerate(costs)], axis=0)
        waiting = self.kinds["first"].waiting
        assert waiting is not None
        schedule = waiting.schedule
        seconds = np.array(np.broadcast_to(_whole_step(schedule, len(cuts))(env), m.shape))
        if schedule == "1f1b":  # its formula requires two micro-batches for each stage
            for few in {*zip(m[m < 2 * p].tolist(), p[m < 2 * p].tolist(), strict=True)}:
                mask = (m == few[0]) & (p == few[1])
                seconds[mask] = _few_batches_seconds(
                    {name: np.broadcast_to(n, m.shape)[mask] for name, n in env.items()}, len(cuts)
                )
        busy = np.where(exists, [t.busy for t in costs], 0)
        slowest = busy.argmax(0)
        parts = {}
        for name in dict.fromkeys(name for t in costs for name in t.parts):
            each = np.array([np.broadcast_to(t.parts.get(name, 0.0), m.shape) for t in costs])
            parts[name] = np.take_along_axis(each, slowest[None], 0)[0]
        waited = _exposed_sends(schedule)(env) * env["send"]
        parts[SENT] = parts.get(SENT, 0) + waited
        parts[IDLE] = np.maximum(seconds - np.take_along_axis(busy, slowest[None], 0)[0] - waited, 0)
        peaks_ = {name: np.where(mask, t.peak, 0) for name, mask, t in zip(cuts, exists, costs, strict=True)}
        return PlanCosts(_peaks_by_stage(peaks_), seconds, parts)

    def of_stage(self, sizes: Mapping[str, Array], cut: StageKind) -> dict[str, Array]:
        """Return the sizes for a stage; its graph takes the total number of layers."""
        assert self.layers is not None
        return {**sizes, self.layers: np.maximum(cut.layers, 1) * sizes[self.names["pp"]]}


def _peaks_by_stage(peaks_: Mapping[str, Array]) -> dict[str, Array]:
    """Return bytes by stage, with one entry for all middle stages."""
    out = {"first": peaks_["first"]}
    between = [peaks_[name] for name in ("middle", "less") if name in peaks_]
    if between:
        out["middle"] = np.max(between, axis=0)
    return {**out, "last": peaks_["last"]}


def _slice_sizes(sizes: Mapping[str, Array], chunk: slice) -> dict[str, Array]:
    return {name: n[chunk] for name, n in sizes.items()}


def _shape(sizes: Mapping[str, Any]) -> tuple[int, ...]:
    return np.broadcast_shapes(*(np.shape(n) for n in sizes.values()))


@lru_cache(maxsize=64)
def _whole_step(schedule: str, kinds: int) -> Evaluated:
    """Return the seconds of a pipelined step in terms of its stages' seconds."""
    p, m, v = (poly(symbol(n)) for n in "pmv")
    facts = [InFlightMicroBatches((), (), schedule, p, m, poly(symbol(f"n{i}")), v) for i in range(kinds)]
    starts = [*accumulate((fact.alike for fact in facts[:-1]), initial=poly(0))]
    facts = [replace(f, ranks=((start, start + f.alike - 1),)) for f, start in zip(facts, starts, strict=True)]
    shares = [StageSeconds(*(poly(symbol(f"{name}{i}")) for name in StageSeconds._fields)) for i in range(kinds)]
    return plan(pipeline_seconds(facts, shares, poly(symbol("send"))))


def _few_batches_seconds(env: dict[str, Any], kinds: int) -> Array:
    """Return the seconds of 1F1B steps with equal numbers of ranks and micro-batches."""
    ranks = [i for i in range(kinds) for _ in range(int(env[f"n{i}"][0]))]
    forward, backward = ([env[f"{direction}{i}"] for i in ranks] for direction in ("forward", "backward"))
    passes: Array = few_batches_time(forward, backward, int(env["m"][0]), lambda times: np.maximum.reduce(times))
    once: Array = np.maximum.reduce([env[f"once{i}"] for i in ranks])
    sends: Array = np.asarray(_exposed_sends("1f1b")(env) * env["send"])
    out: Array = passes + once + sends
    return out


@lru_cache(maxsize=64)
def _exposed_sends(schedule: str) -> Evaluated:
    """Return the number of exposed sends: the step time if stages take no time."""
    p, m, v = (poly(symbol(n)) for n in "pmv")
    facts = InFlightMicroBatches((), (), schedule, p, m, p, v, ranks=((poly(0), p - 1),))
    return plan(pipeline_seconds([facts], [StageSeconds(*(poly(0) for _ in StageSeconds._fields))], poly(1)))


def _sent_as(work: Work) -> str | None:
    """Return a collective's or send's name among the parts of the time, None for other work."""
    if isinstance(work.op.kind, Send):
        return f"send over {work.op.kind.axis}"
    return None if work.collective is None else f"{work.collective.collective} over {work.collective.axis}"


# -- structures --------------------------------------------------------------------------------------------------------

DEGREES = ("dp", "tp", "pp", "cp", "ep", "accumulate")
#: Choices other than degrees.
CHOICES = ("zero", "sequence", "checkpoint", "schedule", "precision", "offload")
#: Further symbols: model chunks per rank, and the last rank with the most layers.
_MORE = ("virtual_stages", "rank")
_MOST_KEPT = 32  # structures


@dataclass(frozen=True)
class Structure:
    """The choices that change the graph: plans of one structure share closed forms.

    A degree is 1, which removes its collectives from the graph, None if it is symbolic, or a number if no formula holds
    symbolically. A tensor-parallel degree may name a dimension, of which it is a multiple.
    """

    zero: int
    sequence: bool
    checkpoint: str
    dp: int | None = 1
    tp: int | str | None = 1
    pp: int | None = 1
    cp: int | None = 1
    ep: int | None = 1
    accumulate: int | None = 1
    schedule: str = ""
    """of a pipeline, else empty"""
    precision: str = ""
    offload: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """dp, cp and ep for which ZeRO shards the same axes; empty if these are the longest"""

    def like(self) -> Structure:
        """Return the structure with the same graphs: schedules may differ only in in-flight micro-batches."""
        if self.pp == 1:
            return self
        traits = _graph_traits(self.schedule)
        return replace(self, schedule=next(name for name in SCHEDULES if _graph_traits(name) == traits))


def _graph_traits(schedule: str) -> tuple[bool, ...]:
    """Return the graph-relevant traits of a schedule: split backward, virtual stages, folded, bidirectional."""
    order = SCHEDULES[schedule]
    return RankOrder(schedule, ONE, ONE, ONE).splits, order.chunks is None, order.folded, order.both_ways


class _Last(dict[Structure, list[RankCost]]):
    """Keeps the most recent entries: graphs are large."""

    def __setitem__(self, key: Structure, value: list[RankCost]) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST_KEPT:
            del self[next(iter(self))]


@dataclass
class DerivedStructures:
    """Results cached on the model for one family."""

    steps: dict[tuple[str, str, int | None], Graph] = field(default_factory=dict)
    states: dict[str, StateBytes] = field(default_factory=dict)
    """bytes by precision"""
    kinds: dict[Structure, list[RankCost]] = field(default_factory=_Last)
    """costs by structure, for structures with different graphs"""


@dataclass(frozen=True)
class Policies:
    """Communication policies, common to all plans of a search."""

    overlap: str
    """none, ideal or streams"""
    charge_all: bool = False
    """whether to charge all collectives of plans with too many ops for streams, if streams are the default"""
    reduce_every_microbatch: bool | None = None
    """whether each micro-batch reduces its gradients; by default it depends on the structure"""


@dataclass
class PlanFamily:
    """Training steps for one model and one device type, with closed forms by structure."""

    model: Graph
    batch: str
    """batch dimension"""
    hardware: Hardware
    fallback: Fallback
    policies: Policies
    system: str
    """torch or megatron, as in `parallelize`"""
    keep_gathered: bool
    """whether all-gathered activations are saved for the backward pass"""
    options: Mapping[str, Any]
    """arguments of `training_step`"""
    precisions: Mapping[str, Any]
    """policies by name"""
    dims: Mapping[str, Any]
    """sizes, except the batch"""
    placed: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """by degrees, the representative degrees with the same axes sharded by ZeRO"""
    first: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """by axes, the first degrees with which ZeRO shards them"""
    unsplit: dict[int, str] = field(default_factory=dict)
    """why the model cannot be split over `tp` ranks, by degree"""

    @cached_property
    def derived(self) -> DerivedStructures:
        """Cached results, shared with earlier searches; a loss function may build another graph on each call."""
        if callable(self.options["loss"]):
            return DerivedStructures()
        settings = (
            self.batch,
            self.hardware,
            self.fallback,
            self.system,
            self.policies.reduce_every_microbatch,
            self.keep_gathered,
        )
        declared = self.model.defaults, self.options, self.precisions, self.dims
        key = (*self.model.outputs,), deepcopy((settings, declared))
        entry: tuple[object, DerivedStructures] = self.model.cache.get("search", (None, DerivedStructures()))
        if entry[0] != key:
            entry = self.model.cache["search"] = key, DerivedStructures()
        return entry[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "derived"}

    @cached_property
    def names(self) -> dict[str, str]:
        """Dimension names for the degrees, distinct from the model's."""
        model_names, every = known_names(self.model), (*DEGREES, *_MORE)
        return {d: next(n for i in range(len(model_names) + 1) if (n := d + "_" * i) not in model_names) for d in every}

    @cached_property
    def layers(self) -> str | None:
        """Dimension that counts layers, None if the model has no loop with a named count to cut into stages."""
        loops = [op.loop for op in self.model.ops if op.loop is not None and op.loop.starts]
        names = sorted(loops[0].count.names()) if len(loops) == 1 else []
        return names[0] if len(names) == 1 and self.size(names[0]) is not None else None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return (None if self.layers is None else self.size(self.layers)) or 1

    def size(self, name: str) -> int | None:
        """Return the size of a model dimension."""
        value = self.dims.get(name, self.model.defaults.get(name))
        return None if value is None else size_of(f"search: {name}", value)

    def sizes(self, degrees: Mapping[str, Any], structure: Structure) -> dict[str, Any]:
        """Return the sizes in the closed forms; the batch is one micro-batch on all ranks."""
        out = {self.names[d]: n for d, n in degrees.items() if d in self.names}
        if isinstance(structure.tp, str):
            out[self.names["tp"]] = degrees["tp"] // self.size(structure.tp)
        if structure.pp != 1:
            out[self.names["rank"]] = self.turn(degrees["pp"])
        return {**out, self.batch: degrees["micro_batch"] * degrees["dp"] * degrees["ep"]}

    def turn(self, pp: Array) -> Array:
        """Return the last middle rank with the most layers."""
        out: Array = np.maximum(pp - np.maximum(-(-self.depth // pp) * pp - self.depth, 2), 1)
        return out

    def cuts(self, structure: Structure, pp: Array) -> dict[str, StageKind]:
        """Return the kinds of stages, each with layers per stage and number of stages.

        If the stages do not divide the layers, the last stage has one layer less, then the first (both have other work
        as well), then middle stages from the last.
        """
        if structure.pp == 1:
            return {"all": StageKind(np.ones_like(pp), np.ones_like(pp))}
        longest, few = -(-self.depth // pp), np.minimum(pp, 1)
        missing = longest * pp - self.depth
        shorter = np.maximum(missing - 2, 0)
        kinds = {
            "first": StageKind(longest - (missing >= 2), few),
            "middle": StageKind(longest, np.maximum(pp - 2 - shorter, 0)),
            "less": StageKind(longest - 1, shorter),
            "last": StageKind(longest - (missing >= 1), few),
        }
        return {name: cut for name, cut in kinds.items() if cut.alike.any()}

    def structure(self, point: Any, tensor: int | str | None, **choices: Any) -> Structure:
        """Return the structure for a plan's degrees and choices."""
        degrees: dict[str, Any] = {d: 1 if getattr(point, d) == 1 else None for d in DEGREES if d != "tp"}
        return Structure(tp=tensor, ranks=self.ranks(point) if choices["zero"] else (), **degrees, **choices)

    def ranks(self, point: Any) -> tuple[int, ...]:
        """Return representative degrees with the same axes sharded by ZeRO; empty if these are the longest."""
        every = point.dp, point.cp, point.ep
        if every not in self.placed:
            each = [(n, sizes) for n in (every[0] * every[1], prod(every)) for sizes in self.uneven]
            axes = tuple(_split(sizes, n) for n, sizes in each)
            longest = all(index == sizes.index(max(sizes)) for index, (_, sizes) in zip(axes, each, strict=True))
            self.placed[every] = () if longest else self.first.setdefault(axes, every)
        return self.placed[every]

    @cached_property
    def uneven(self) -> list[tuple[float, ...]]:
        """Sizes of parameters with several axes, infinity for symbolic ones."""
        params = (t for t in self.model.tensors if t.role == "param" and t.producer is None)
        defaults = {name: poly(n) for name, n in self.model.defaults.items()}
        sizes = ([n.bind(defaults).constant for n in t.sizes[t.storage.pieces :]] for t in params)
        return sorted({tuple(inf if n is None else float(n) for n in ns) for ns in sizes if len(ns) > 1})

    def step(self, structure: Structure) -> Graph:
        """Return the training step of all devices together."""
        times = structure.accumulate
        key = structure.precision, structure.checkpoint, times
        steps = self.derived.steps
        if key not in steps:
            times = symbol(self.names["accumulate"]) if times is None else times
            policy, precision = read_checkpoint(structure.checkpoint), self.precisions[structure.precision]
            options = {**self.options, "precision": precision, "checkpoint": policy, "accumulate": times}
            steps[key] = training_step(self.model, **options)
        return steps[key]

    def split(self, graph: Graph, structure: Structure) -> Graph:
        """Return the per-rank graph."""
        degrees = {d: self.degree(d, structure) for d in DEGREES if d != "accumulate"}
        if structure.pp != 1:
            degrees |= {"micro_batches": self.degree("accumulate", structure), "schedule": structure.schedule}
            if SCHEDULES[structure.schedule].chunks is None:
                degrees["virtual_stages"] = symbol(self.names["virtual_stages"])
        options = {"zero": structure.zero, "sequence": structure.sequence, "offload": structure.offload}
        options |= {
            "system": self.system,
            "reduce_every_microbatch": self.reduces_each(structure),
            "keep_gathered": self.keep_gathered,
        }
        with self.at_ranks(graph, structure):
            return parallelize(graph, **degrees, **options)  # type: ignore[arg-type]

    def reduces_each(self, structure: Structure) -> bool:
        """Whether each micro-batch reduces its gradients; by default with ZeRO-2 and ZeRO-3 without a pipeline."""
        reduce_every_microbatch = self.policies.reduce_every_microbatch
        return structure.zero >= 2 and structure.pp == 1 if reduce_every_microbatch is None else reduce_every_microbatch

    def policy_text(self) -> str:
        """Return the policies of a search, in words."""
        reduce_every_microbatch = self.policies.reduce_every_microbatch
        gradients = f"reduced {'in each' if reduce_every_microbatch else 'behind the last'} micro-batch"
        if reduce_every_microbatch is None and self.system == "torch":  # Megatron has neither of them
            gradients += ", without a pipeline by ZeRO-2 and ZeRO-3 in each"
        optimizer = self.options.get("optimizer") or AdamW()
        text = f"{type(optimizer).__name__} ({getattr(optimizer, 'implementation', '')})".replace(" ()", "")
        return f"{self.system}: gradients {gradients}; overlap {self.policies.overlap}; {text}"

    @contextmanager
    def at_ranks(self, graph: Graph, structure: Structure) -> Iterator[None]:
        """Make ZeRO choose the axes that it shards with a structure's degrees."""
        defaults, ranks = graph.defaults, zip(("dp", "cp", "ep"), structure.ranks, strict=False)
        if structure.ranks:  # assigning defaults clears the graph's caches
            graph.defaults = {**defaults, **{self.names[d]: n for d, n in ranks}}
        try:
            yield
        finally:
            if structure.ranks:
                graph.defaults = defaults

    def degree(self, name: str, structure: Structure) -> object:
        """Return a structure's degree as an argument for parallelize."""
        value = getattr(structure, name)
        if isinstance(value, str):
            return symbol(value) * symbol(self.names[name])
        return symbol(self.names[name]) if value is None else value

    @collection_paused()
    def forms(self, structure: Structure) -> RankCosts:
        """Derive the closed forms of a structure; structures with the same graphs share them."""
        like, kinds = structure.like(), self.derived.kinds
        if like not in kinds:
            rank = self.split(self.step(structure), like)
            kinds[like] = [self.formed(graph, like) for graph in stages_of(rank)]
        costs = [
            kind.with_overlap(self.policies.overlap, self.rings, charge_all=self.policies.charge_all)
            for kind in kinds[like]
        ]
        if structure.pp == 1:
            return RankCosts({"all": costs[0]}, self.names)
        return RankCosts(dict(self.waiting(structure, costs)), self.names, self.layers)

    def waiting(self, structure: Structure, kinds: Sequence[RankCost]) -> Any:
        """Yield the kinds of stages by name, each with its in-flight micro-batches under the schedule."""
        schedule = SCHEDULES[structure.schedule]
        p, m = (self.poly(d, structure) for d in ("pp", "accumulate"))
        turn, groups = (poly(symbol(self.names[d])) for d in ("rank", "virtual_stages"))
        order = RankOrder(structure.schedule, p, m, groups if schedule.chunks is None else poly(schedule.chunks))
        # a folded pipeline ends on its first rank, a bidirectional one on both ends
        both_ways = schedule.both_ways
        ranks = {
            "first": Stage("first", (ZERO,), ONE, ONE, first=True, last=schedule.folded),
            "middle": Stage("middle", (ONE, p / 2 - 1 if both_ways else turn), ONE, ONE),
            "less": Stage("less", (turn + 1, p - 2), ONE, ONE),
            "last": Stage(
                "last",
                (ZERO if both_ways else p - 1,),
                ONE,
                ONE,
                first=both_ways,
                last=both_ways or not schedule.folded,
            ),
        }
        first, *between, last = kinds
        graphs = {"first": first, "last": last} | {name: kind for name in ("middle", "less") for kind in between}
        for name in ranks.keys() & graphs.keys():
            cost = copy(graphs[name])
            cost.waiting, cost.programs = waiting_of(order, ranks[name], torch=self.system == "torch"), {}
            yield name, cost

    def formed(self, rank: Graph, structure: Structure) -> RankCost:
        """Derive the costs of a rank; the number of layers per stage stays symbolic."""
        rank_names, waiting = known_names(rank), rank.waiting
        open_names = () if structure.pp == 1 else (self.layers,)
        if open_names:
            assert waiting is not None
            rank.waiting = replace(waiting, first=(), later=(), asked=())  # set for each schedule
        unbound = {*open_names, *self.names.values()}
        rank.defaults = {name: n for name, n in rank.defaults.items() if name not in unbound}
        dims = {name: n for name, n in self.dims.items() if name in rank_names and name not in open_names}
        question = ask(rank, self.hardware, self.fallback, dims, "search")
        return RankCost(question, waiting, self.rings)

    @cached_property
    def rings(self) -> Rings | None:
        """Ring times of a torus network, None for other networks."""
        torus = self.hardware.cluster is not None and self.hardware.cluster.torus
        return Rings(self.hardware) if torus else None

    def poly(self, name: str, structure: Structure) -> Poly:
        """Return a degree as a polynomial."""
        return poly(self.degree(name, structure))

    def state(self, structure: Structure) -> StateBytes:
        """Return the bytes of parameters, gradients and states, which depend only on the precision."""
        name = structure.precision
        states, steps = self.derived.states, self.derived.steps
        if name not in states:
            step = next((g for (precision, _, _), g in steps.items() if precision == name), None) or self.step(
                structure
            )
            sizes = {**self.dims, **dict.fromkeys((self.batch, self.names["accumulate"]), 1)}  # parameters have neither
            states[name] = state_bytes(step, **{n: size for n, size in sizes.items() if n in known_names(step)})
        return states[name]

    def least(self, structure: Structure, degrees: Mapping[str, Any]) -> Any:
        """Return a lower bound for a rank's memory: equal shards of parameters, gradients and states."""
        state = self.state(structure)
        ranks = degrees["tp"] * degrees["pp"] * degrees["ep"]
        split = ranks * degrees["dp"] * degrees["cp"]
        # gradients are offloaded with the optimizer
        places = {"parameters": {3}, "optimizer": {1, 2}}
        away = {stage for name in structure.offload for stage in places.get(name, ())}
        by_stage = zip((3, 2, 1), (state.params, state.gradients, state.state), strict=True)
        shardable = [(stage, float(amount)) for stage, amount in by_stage if stage not in away]
        return sum((amount / (split if structure.zero >= stage else ranks) for stage, amount in shardable), 0 * ranks)

    def goes_over(self, batch: int) -> tuple[int, str]:
        """Return a step's number of tokens, or else samples, and the unit."""
        amount, unit = goes_over(self.model, poly(symbol(self.batch)))
        values = bindings(self.model, {**self.dims, self.batch: batch})
        missing = [
            name for name in sorted(known_names(self.model)) if name not in values or values[name].constant is None
        ]
        if missing:
            raise BindingError(
                f"search: graph {self.model.name!r} needs sizes for {', '.join(missing)}, expected numbers"
            )
        count = amount.bind(values).constant
        assert count is not None  # all sizes are known
        return int(count), unit

    def tensor(self, tp: int) -> int | str | None:
        """Return how to express a tensor-parallel degree: None (symbolic), a name, a number, or 0 (impossible).

        With fewer KV heads than ranks the graph is different. If the degree is a multiple of a dimension, such as the
        number of KV heads, its name covers all such degrees with one graph.
        """
        if tp == 1:
            return 1
        sizes = {name: self.size(name) or tp for name in sorted({*self.model.defaults, *self.dims})}
        multiples = [name for name, n in sizes.items() if 1 < n < tp and not tp % n]
        for degree in (None, *multiples, tp):
            structure = Structure(0, False, "none", tp=degree)
            try:
                rank = self.split(self.model, structure)
                tp_name = self.names["tp"]
                degree_sizes = self.sizes({**dict.fromkeys((*DEGREES, "micro_batch"), 1), "tp": tp}, structure)
                bindings(rank, {**self.dims, **({tp_name: degree_sizes[tp_name]} if degree != tp else {})})
            except CostGraphError as error:
                self.unsplit[tp] = str(error)
                continue
            if not isinstance(degree, str) or (rank.sharding is not None and rank.sharding.mesh.joint):
                self.unsplit.pop(tp, None)
                return degree
        return 0

    def experts(self) -> bool:
        """Whether the model has experts to split."""
        try:
            self.split(self.model, Structure(0, False, "none", ep=None))
        except CostGraphError:
            return False
        return True


def _split(sizes: tuple[float, ...], ranks: int) -> int:
    """Return the axis that ZeRO shards: the longest that the ranks divide, or the longest."""
    return max(range(len(sizes)), key=lambda i: (sizes[i] == inf or not sizes[i] % ranks, sizes[i], -i))


# -- divisibility ------------------------------------------------------------------------------------------------------

_AXES = ("dp", "cp", "tp", "ep")


def whole(family: PlanFamily, structure: Structure, degrees: Mapping[str, Any]) -> Any:
    """Return a mask of degrees that divide all sharded axes."""
    graph = family.step(structure)
    defaults = {name: poly(n) for name, n in {**graph.defaults, **family.dims}.items()}
    degrees_by_axis = {axis: family.degree(axis, structure) for axis in _AXES}
    try:
        with family.at_ranks(graph, structure):
            divided_sizes = {
                p.bind(defaults)
                for p in shares(graph, degrees_by_axis, structure.zero, structure.sequence, family.system)
            }
    except CostGraphError:  # raised again when the structure is derived
        divided_sizes = set()
    sizes = family.sizes(degrees, structure)
    value, out = PointValues(sizes), np.True_
    for p in (p for p in divided_sizes if p.names() <= sizes.keys()):
        out = out & (value(p) % 1 == 0)
    return out


def batch_of(model: Graph) -> str:
    """Return the batch dimension's name: the first axis of all inputs."""
    firsts = {t.sizes[0] for t in model.tensors if t.producer is None and t.role == "input" and t.ndim}
    names = {name for n in firsts for name in n.names()}
    if len(names) != 1 or firsts != {poly(symbol(*names))}:
        description = ", ".join(sorted(map(str, firsts))) or "no axis"
        raise GraphError(
            f"search: inputs of graph {model.name!r} begin with {description}, expected a common batch dimension"
        )
    return names.pop()
