"""Search for a parallelization strategy: closed forms by structure, evaluated over arrays of degrees."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice, product
from math import inf, isqrt
from typing import Annotated, Any, NamedTuple

import numpy as np

from ..algebra.polynomial import poly
from ..algebra.symbols import shorten, shown
from ..analysis.collective_time import placed
from ..analysis.step_time import OVERLAPS
from ..errors import BindingError, CostGraphError, SpecError, UnsupportedError
from ..hardware.links import joined
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..hardware.tables import Column, Fact, Table
from ..hardware.units import format_bytes, format_quantity
from ..ir.graph import Graph, need_choice, need_flag, need_graph
from ..ir.graph import dimension_size as size_of
from ..notation.progress import progressing
from ..notation.validation import READ, guarded
from ..optimizers import AdamW, Optimizer, optimizer_of
from ..transforms.checkpoint import every_block, read_checkpoint
from ..transforms.offload import OFFLOADED, need_offloaded
from ..transforms.pipeline_schedules import SCHEDULES, schedule_sizes
from ..transforms.precision import find_policy
from ..transforms.shard.parallelize import SYSTEMS, System
from .capacity import Bytes, memory_limit
from .strategy_templates import CHOICES, DEGREES, Fallback, PlanFamily, Policies, RankCosts, Structure, batch_of, whole

__all__ = [
    "TIE",
    "Plan",
    "Search",
    "FittingPlan",
    "PlanPoint",
    "StructureWorker",
    "search",
]


# -- plans -------------------------------------------------------------------------------------------------------------

#: Relative difference of step times below which plans tie: no prediction is more accurate.
TIE = 0.01

#: Choices that have a column only if plans differ in them.
_CHOICES = ("schedule", "virtual_stages", "precision", "offload")


@guarded()
@dataclass(frozen=True)
class Plan:
    """One strategy for training on several devices."""

    dp: int
    """data-parallel ranks"""
    tp: int
    """tensor-parallel ranks"""
    pp: int
    """pipeline stages"""
    cp: int
    """context-parallel ranks"""
    ep: int
    """expert-parallel ranks, which split the batch as well"""
    zero: int
    """ZeRO stage, as in `parallelize`"""
    sequence: bool
    """whether activations between layers are split along the sequence, over `tp`"""
    micro_batch: int
    """samples in a rank's micro-batch"""
    accumulate: int
    """micro-batches of a step"""
    checkpoint: str
    """activation checkpointing, as on the command line: none, every-block and the like"""
    schedule: str
    """pipeline schedule, empty without a pipeline"""
    virtual_stages: int
    """model chunks per rank"""
    precision: str
    """name of the precision policy"""
    offload: tuple[str, ...]
    """tensors in host memory"""
    seconds: float
    """estimated seconds of a step"""
    throughput: float
    """tokens or samples per second on all devices; `Search.unit` says which"""
    memory: int
    """peak memory of a device in bytes, in the stage with the highest"""
    parts: Mapping[str, float]
    """seconds without overlap by part: compute, memory traffic beyond it, each collective; for a pipeline, those of the
    slowest stage, with sends and idle time"""
    stages: tuple[int, ...] = ()
    """peak bytes of the first, middle and last stage; one entry without a pipeline, two if there is no middle stage"""
    why: str = ""
    """the part that makes it slower than the previous plan, and by how many seconds; empty if it is not slower"""

    @property
    def bound(self) -> str:
        """Largest part of the time: compute, memory traffic, or a collective over an axis."""
        return max(self.parts, key=lambda name: self.parts[name])


@guarded()
@dataclass(frozen=True, repr=False)
class Search(Table):
    """Plans that fit, fastest first; among ties, fewer pipeline stages first. Created by `search`."""

    graph: str
    """name of the model"""
    hardware: Hardware
    """the devices"""
    devices: int
    """number of devices"""
    limit: float
    """memory limit per device in bytes"""
    rows: tuple[Plan, ...]
    """by time, then memory; within 1 % of the fastest remaining plan, fewer pipeline stages come first"""
    tried: int
    """number of plans that divide the devices and the batch, including those that do not fit or are rejected"""
    notes: tuple[str, ...] = ()
    """degrees that the network has no links for, and structures whose formulas hold for single degrees only"""
    unit: str = "tokens"
    """unit of throughput: tokens or samples"""
    family: PlanFamily | None = field(default=None, compare=False)
    """the searched family, for further questions"""
    policies: str = ""
    """policies of all plans, in words"""

    @property
    def best(self) -> Plan | None:
        """The first plan: the fastest, or one with fewer stages within 1 % of it. None if no plan fits."""
        return self.rows[0] if self.rows else None

    def pareto(self) -> Search:
        """Return the Pareto front of time and memory, with ties counted as equal time.

        Returns
        -------
        Search
            From the best to the smallest: each plan takes less memory than all before it.
        """
        front: list[Plan] = []
        for plan in self.rows:
            if not front or plan.memory < front[-1].memory:
                front.append(plan)
        return replace(self, rows=explained(front))

    def _description(self) -> str:
        return f"{shorten(self.graph)} on {self.devices:,} {self.hardware.id}, {len(self.rows):,} plans"

    def _columns(self) -> Sequence[Column]:
        return (
            *(Column(d, "1") for d in ("dp", "tp", "pp", "cp", "ep") if d in ("dp", "tp") or self._varies(d)),
            Column("zero", "1"),
            Column("sequence", title="seq", text=lambda split: "yes" if split else ""),
            Column("micro_batch", "1", title="micro-batch"), Column("accumulate", "1"),
            Column("checkpoint"),
            *(Column(name, text=_joined) for name in _CHOICES if self._several(name)),
            Column("seconds", "s", title="step"), Column("throughput", "1",
            title=f"{self.unit}/s"), Column("memory", "B", title="peak memory"), Column("bound", title="bottleneck"),
            Column("why", title="slower by"),
        )  # fmt: skip

    def _varies(self, degree: str) -> bool:
        return any(getattr(plan, degree) != 1 for plan in self.rows)

    def _several(self, name: str) -> bool:
        values = {getattr(plan, name) for plan in self.rows if name != "schedule" or plan.pp > 1}
        return len(values) > 1 or (name == "offload" and any(values))

    def _facts(self) -> Iterable[Fact]:
        yield Fact("fit", f"{len(self.rows):,} of {self.tried:,} plans")
        yield from (Fact("note", text) for text in (*self.notes[:3], self.policies) if text)


def _joined(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def ordered(plans: Iterable[Plan]) -> list[Plan]:
    """Sort plans by time, and ties by the number of pipeline stages.

    Plans within 1 % of the fastest remaining plan tie.
    """
    out, tie = list[Plan](), list[Plan]()
    for plan in sorted(plans, key=_order):
        if tie and plan.seconds > tie[0].seconds * (1 + TIE):
            out += sorted(tie, key=lambda p: p.pp)
            tie = []
        tie.append(plan)
    return out + sorted(tie, key=lambda p: p.pp)


def _order(plan: Plan) -> tuple[Any, ...]:
    degrees = plan.pp, plan.tp, plan.cp, plan.ep
    names = plan.schedule, plan.virtual_stages, plan.precision, plan.offload
    return plan.seconds, plan.memory, plan.zero, *degrees, plan.sequence, plan.micro_batch, plan.checkpoint, *names


def explained(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return plans with the reason why each is slower than the previous one."""
    return tuple(replace(p, why=_longer(plans[i - 1], p) if i else "") for i, p in enumerate(plans))


def _longer(before: Plan, plan: Plan) -> str:
    grown = {name: seconds - before.parts.get(name, 0.0) for name, seconds in plan.parts.items()}
    name = max(grown, key=lambda n: grown[n])
    return f"{format_quantity(grown[name], 's')} {name}" if grown[name] > 0 and plan.seconds > before.seconds else ""


# -- fitting -----------------------------------------------------------------------------------------------------------
# Derive structures, sequentially or in parallel, evaluate them over arrays of degrees, and keep plans that fit.


class PlanPoint(NamedTuple):
    """Degrees and sizes of a plan within its structure."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    accumulate: int
    virtual_stages: int = 1


class FittingPlan(NamedTuple):
    """A plan that fits."""

    structure: Structure
    point: PlanPoint
    stages: tuple[int, ...]
    """bytes by stage"""
    seconds: float
    parts: dict[str, float]
    """seconds by part"""


class WorkerResult(NamedTuple):
    """Results of a structure from another process."""

    fitting: list[FittingPlan]
    derived: int
    notes: list[str]
    error: CostGraphError | None
    over: float
    refused: str


@dataclass
class StructureWorker:
    """Derives structures and collects plans that fit."""

    family: PlanFamily
    limit: float
    fitting: list[FittingPlan] = field(default_factory=list)
    tried: int = 0
    derived: int = 0
    notes: list[str] = field(default_factory=list)
    error: CostGraphError | None = None
    """why a structure could not be derived"""
    over: float = inf
    """the smallest memory, or lower bound of memory, above the limit"""
    refused: str = ""
    """why the first rejected plan does not fit the model's sizes"""
    apart: tuple[Structure, list[PlanPoint]] | None = None
    """the first plans that do not divide the sharded axes; derived only to report why"""

    def do(self, groups: Mapping[Structure, list[PlanPoint]], progress: bool | None, executor: Executor | None) -> None:
        """Evaluate all points, with structures in parallel if there is an executor."""
        self.tried += sum(map(len, groups.values()))
        likely = {
            structure: remaining
            for structure, points in groups.items()
            if (remaining := self.likely(structure, points))
        }
        for structure in likely:
            self.family.step(structure)  # always raise an error if the model cannot be trained
        likely = {
            structure: remaining for structure, points in likely.items() if (remaining := self.whole(structure, points))
        }
        with progressing("search", len(likely), progress) as step:
            for structure, tried in zip(likely, self.tries(likely, executor), strict=True):
                step(f"ZeRO {structure.zero}, {structure.checkpoint}")
                self.error = tried() or self.error
        if self.apart is not None and not (self.fitting or self.refused):
            self.error = self.one(*self.apart) or self.error  # it reports why
        if self.error is not None and not self.derived:
            raise self.error

    def tries(
        self, likely: Mapping[Structure, list[PlanPoint]], executor: Executor | None
    ) -> Iterator[Callable[[], CostGraphError | None]]:
        """Yield a callable for each structure, which evaluates it and returns the error if it cannot be derived."""
        if executor is None:
            yield from (partial(self.one, structure, points) for structure, points in likely.items())
            return
        payload = pickle.dumps((self.family, self.limit))
        futures = [executor.submit(_in_worker, payload, structure, points) for structure, points in likely.items()]
        try:
            yield from (partial(self.gathered, future) for future in futures)
        finally:
            for future in futures:  # pending after an error
                future.cancel()

    def gathered(self, future: Future[WorkerResult]) -> CostGraphError | None:
        """Collect the results of another process."""
        fitting, derived, notes, error, over, refused = future.result()
        self.fitting += fitting
        self.derived += derived
        self.notes += notes
        self.over, self.refused = min(self.over, over), self.refused or refused
        return error

    def likely(self, structure: Structure, points: Sequence[PlanPoint]) -> list[PlanPoint]:
        """Return the points whose parameters, gradients and states fit; others need not be derived."""
        if self.limit == inf:
            return [*points]
        lower_bounds = np.broadcast_to(np.asarray(self.family.least(structure, columns(points)), float), len(points))
        self.over = lower_bounds.min(where=lower_bounds > self.limit, initial=self.over)
        return [p for p, ok in zip(points, (lower_bounds <= self.limit).tolist(), strict=True) if ok]

    def whole(self, structure: Structure, points: Sequence[PlanPoint]) -> list[PlanPoint]:
        """Return the points whose degrees divide all sharded axes; others need not be derived."""
        ok = np.broadcast_to(whole(self.family, structure, columns(points)), len(points)).tolist()
        if self.apart is None and not all(ok):
            self.apart = structure, [p for p, fits in zip(points, ok, strict=True) if not fits]
        return [p for p, fits in zip(points, ok, strict=True) if fits]

    def reasons(self, apart: object) -> Iterator[str]:
        """Yield why there is no plan; `apart` holds degrees that the network has no links for."""
        if self.fitting:
            return
        if self.over < inf:
            yield f"no plan fits: {format_bytes(self.over)} or more of {format_bytes(self.limit)}"
        yield from (f"refused: {why}" for why in (self.refused, *self.family.unsplit.values()) if why)
        if not (self.tried or self.family.unsplit or apart):
            yield "no plan: no degrees within the limits divide the devices and the batch"

    def one(self, structure: Structure, points: Sequence[PlanPoint]) -> CostGraphError | None:
        """Evaluate a structure; bind its degrees if the graph cannot be derived symbolically."""
        try:
            forms = self.family.forms(structure)
        except SpecError:
            raise
        except UnsupportedError as error:
            if structure.pp == 1:
                return self.bound(structure, points, error)
            self.notes.append(f"no stages: {error}")
            return error
        except CostGraphError as error:
            return self.bound(structure, points, error)
        self.evaluate(structure, forms, points)
        return None

    def bound(self, structure: Structure, points: Sequence[PlanPoint], error: CostGraphError) -> CostGraphError | None:
        """Evaluate a structure for each value of one degree, and note why."""
        name = next((d for d in DEGREES if not isinstance(getattr(structure, d), int)), None)
        if name is None:
            return error
        self.notes.append(f"by single {name}, ZeRO {structure.zero}: {error}")
        last: CostGraphError | None = None
        for n in sorted({getattr(p, name) for p in points}):
            last = self.one(replace(structure, **{name: n}), [p for p in points if getattr(p, name) == n]) or last
        return last

    def evaluate(self, structure: Structure, forms: RankCosts, points: Sequence[PlanPoint]) -> None:
        """Evaluate the closed forms at all points, and keep plans that fit."""
        self.derived += len(points)
        degrees = columns(points)
        sizes, cuts = self.family.sizes(degrees, structure), self.family.cuts(structure, degrees["pp"])
        costs = forms.at(sizes, cuts)
        if self.family.rings is not None and self.family.rings.why:
            self.notes.append(f"no rings: {self.family.rings.why}")
        stages = np.array([*costs.peaks.values()], float)
        peak = stages.max(0)
        self.over = peak.min(where=peak > self.limit, initial=self.over)
        if np.isnan(peak).any() and not self.refused:
            self.refused = forms.refusal(sizes, cuts, int(np.isnan(peak).argmax()))
        fits = np.isfinite(peak) & np.isfinite(costs.seconds) & (peak <= self.limit)
        for i in np.flatnonzero(fits).tolist():
            seconds_by_part = {name: float(values[i]) for name, values in costs.parts.items() if values[i]}
            each = tuple(round(float(p)) for p in stages[:, i] if p)
            self.fitting.append(FittingPlan(structure, points[i], each, float(costs.seconds[i]), seconds_by_part))


@lru_cache(maxsize=1)
def _received(payload: bytes) -> tuple[PlanFamily, float]:
    """Unpickle a family and a memory limit, once for each process."""
    family_and_limit: tuple[PlanFamily, float] = pickle.loads(payload)
    return family_and_limit


def _in_worker(payload: bytes, structure: Structure, points: Sequence[PlanPoint]) -> WorkerResult:
    """Evaluate a structure in another process, which caches training steps."""
    work = StructureWorker(*_received(payload))
    error = work.one(structure, points)
    return WorkerResult(work.fitting, work.derived, work.notes, error, work.over, work.refused)


def columns(points: Sequence[PlanPoint]) -> dict[str, np.ndarray[Any, Any]]:
    return dict(zip(PlanPoint._fields, np.array(points, dtype=np.int64).T, strict=True))


# -- search ------------------------------------------------------------------------------------------------------------

#: Allowed values: one or several.
Limit = Annotated[Any, READ]
#: Largest numbers of devices and samples whose divisors are enumerated.
_MOST = 2**32
_MOST_VALUES = 10_000


def search(
    model: Graph, /, *, devices: int, hardware: str | Hardware, network: str | Network | None = None,
    loss: object = None, precision: Limit = None, optimizer: Optimizer | type | str | None = None,
    memory: Bytes | None = None, overlap: str | None = None, system: System = "torch",
    reduce_every_microbatch: bool | None = None, keep_gathered: bool | None = None,
    fallback: Fallback = None, dp: Limit = None, tp: Limit = None, pp: Limit = None, cp: Limit = 1, ep: Limit = None,
    zero: Limit = None, sequence: Limit = None, micro_batch: Limit = None, accumulate: Limit = None,
    checkpoint: Limit = None, schedule: Limit = "1f1b", virtual_stages: Limit = None, offload: Limit = "none",
    defer_accumulation: bool = False, progress: bool | None = None, executor: Executor | None = None,
    **dims: int,
) -> Search:  # fmt: skip
    """Return the training plans that fit, fastest first; among ties, fewer pipeline stages first.

    The search covers all plans that divide the devices, the batch and the model: data, tensor, context, expert and
    pipeline parallelism, schedules and virtual stages, ZeRO stages, sequence parallelism, micro-batches, activation
    checkpointing, offloading and precisions.

    Parameters
    ----------
    model : Graph
        The forward pass, as returned by `models.load`.
    devices : int
        Number of devices: `dp * tp * pp * cp * ep` of each plan.
    hardware : str, path-like or Hardware
        The devices.
    network : str, path-like or Network, optional
        Network between the interconnect domains, as in `roofline`.
    loss : str or callable, optional
        As in `training_step`; by default the model's own loss.
    precision : str, mapping or Policy, or iterable of these, optional
        As in `training_step`; all values are tried.
    optimizer : Optimizer, optional
        As in `training_step`; by default AdamW, fused with `system="megatron"`, as in Megatron.
    memory : int or float, optional
        Memory limit of a device in bytes, by default its usable memory (`Hardware.capacity`).
    overlap : str, optional
        Overlap of communication: none, ideal or streams, as in `roofline`. The default with torch is streams, as
        DistributedDataParallel and `fully_shard` overlap gradient reduction with the backward pass. It is none with
        megatron, where overlap is optional (`--overlap-grad-reduce`), and in a torus. Plans with more ops than
        `streams` simulates are charged all collectives.
    system : str
        torch or megatron, as in `parallelize`; Megatron has ZeRO stages 0 and 1.
    reduce_every_microbatch : bool, optional
        Whether the gradients of each micro-batch are reduced, as in `parallelize`. By default accumulated gradients are
        reduced after the last micro-batch, as with `no_sync` of torch's DistributedDataParallel, torch's pipelines and
        Megatron. ZeRO-2 and ZeRO-3 without a pipeline reduce each, as `fully_shard` does, and keep no unsharded
        gradients.
    keep_gathered : bool, optional
        Whether activations all-gathered for sequence parallelism are saved, as in `parallelize`, with the same default.
    fallback : str or mapping, optional
        As in `Hardware.rate`.
    dp, tp : int or iterable of int, optional
        Allowed values; by default all divisors.
    pp : int or iterable of int, optional
        Allowed pipeline stages, with several micro-batches; by default all divisors of the devices up to the layer
        count.
    cp : int or iterable of int, optional
        Allowed context-parallel ranks, by default 1; None for all divisors.
    ep : int or iterable of int, optional
        Allowed expert-parallel ranks; by default all divisors if the model has experts.
    zero : int or iterable of int, optional
        Allowed ZeRO stages; by default 0 to 3, with a pipeline 0 and 1.
    sequence : bool or iterable of bool, optional
        Whether to use sequence parallelism; by default both are tried.
    micro_batch, accumulate : int or iterable of int, optional
        Allowed values, as for `dp`.
    checkpoint : str or iterable of str, optional
        Activation checkpointing policies; by default none and every-block. Others are every:K, from-start,
        selective:NAME,NAME and keep:NAME,NAME.
    schedule : str or iterable of str
        Pipeline schedules, as in `parallelize`: gpipe, 1f1b, interleaved, zb-h1, interleaved-zb, zbv, dualpipe and
        dualpipev.
    virtual_stages : int or iterable of int, optional
        Model chunks per rank under interleaved and interleaved-zb; by default all divisors of its layers. zbv,
        dualpipe and dualpipev have two, other schedules one.
    offload : str or iterable of str
        Tensors in host memory: none, optimizer, parameters or activations, joined by a plus sign for several, such as
        optimizer+parameters.
    defer_accumulation : bool
        As in `training_step`.
    progress : bool, optional
        Whether to show progress; by default if standard error is a terminal.
    executor : concurrent.futures.Executor, optional
        Executor that derives structures in parallel, such as a `ProcessPoolExecutor`, or `client.get_executor()` of a
        dask.distributed client; by default they are derived sequentially in this process.
    **dims : int
        Sizes, including the batch of a whole step: all devices and micro-batches together.

    Returns
    -------
    Search
        `.rows`, `.best`, `.unit`, `.pareto()`; `print` it.

    Raises
    ------
    BindingError, GraphError, SpecError
        If an amount is not a positive integer, a size is missing, no value is allowed, or the graph cannot be trained;
        as in `training_step`, `peak_memory` and `seconds`.
    UnsupportedError
        If streams are requested in a torus, or would simulate more than a million ops.

    Notes
    -----
    The time is the estimate of `seconds`, based on vendors' peak rates, and the peak follows `peak_memory`.
    Throughput counts tokens if all inputs are sequences of one length, else samples. Closed forms are derived once for
    each structure (ZeRO stage, sequence parallelism, checkpointing), and evaluated over arrays of degrees. Choices that
    make no difference, because an axis has one rank, count as one plan. Plans are not derived if their parameters,
    gradients and states exceed the memory limit, or if their degrees do not divide the sharded axes.

    Plans within 1 % of the fastest remaining plan tie, as no prediction is more accurate: fewer pipeline stages come
    first, since their time rests on fewer assumptions, then faster plans.

    If the stages of a pipeline do not divide the layers, the last stage has one less, then the first, then middle ones;
    several model chunks are tried if the layers are divisible by all chunks. Without overlap the time equals that of
    `seconds`. With overlap, each pass of a stage is shorter by the same factor, and sends are exposed. Reductions in
    the last micro-batch come at the end. The peak is the highest among the stages. In a torus, degrees that do
    not fill whole dimensions, and a line of one more, are left out; notes say which. If there is no plan, notes state
    the smallest memory needed, and the sizes that the degrees do not divide. Schedules of one kind (gpipe and 1f1b, zbv
    and dualpipev) differ only in their in-flight micro-batches, so they share graphs.

    Examples
    --------
    >>> import costgraph as cg
    >>> model = cg.models.load("llama-3-8b")
    >>> found = cg.plan.search(
    ...     model, devices=64, hardware="h100-sxm", precision="bf16", B=64, S=8192, tp=(1, 2), pp=1, zero=(1, 3),
    ...     checkpoint="none",
    ... )
    >>> found.best.dp, found.best.tp, found.best.zero, found.best.sequence
    (64, 1, 1, False)
    """
    place = "search"
    need_graph(place, model)
    if overlap is not None:
        need_choice(f"{place}: overlap", overlap, OVERLAPS)
    need_choice(f"{place}: system", system, SYSTEMS)
    keep_gathered = system == "torch" if keep_gathered is None else keep_gathered
    need_flag(place, keep_gathered=keep_gathered, defer_accumulation=defer_accumulation)
    if reduce_every_microbatch is not None:
        need_flag(place, reduce_every_microbatch=reduce_every_microbatch)
    if optimizer is None and system == "megatron":
        optimizer = AdamW(implementation="fused")
    optimizer = optimizer_of(optimizer, place)
    count = size_of(f"{place}: devices", devices)
    device = joined(hardware, network)
    limit = memory_limit(place, None, memory) if memory is not None else memory_limit(place, device, None)
    options = {"loss": loss, "optimizer": optimizer, "defer_accumulation": defer_accumulation}
    precisions = _precisions(f"{place}: precision", precision)
    named = batch_of(model)
    if named not in dims:
        raise BindingError(f"{place}: no size of {named}; expected the batch size of a step")
    batch = size_of(f"{place}: {named}", dims[named])
    if max(count, batch) > _MOST:
        raise BindingError(f"{place}: {count} devices, {batch} samples, expected at most {_MOST} of each")
    fixed = {name: n for name, n in dims.items() if name != named}
    torus = device.cluster is not None and device.cluster.torus
    if overlap == "streams" and torus:
        raise UnsupportedError(f"{place}: overlap 'streams' in a torus, expected none or ideal")
    policies = Policies(
        overlap or ("streams" if system == "torch" and not torus else "none"), overlap is None, reduce_every_microbatch
    )
    family = PlanFamily(model, named, device, fallback, policies, system, keep_gathered, options, precisions, fixed)
    amount, unit = family.goes_over(batch)
    numbers = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro_batch, "accumulate": accumulate}
    allowed = {name: _numbers(f"{place}: {name}", values) for name, values in numbers.items()}
    choices = _Choices(
        _chosen(f"{place}: zero", zero, (0, 1, 2, 3) if system == "torch" else (0, 1)), zero is not None,
        _chosen(f"{place}: sequence", sequence, (False, True)), _policies(f"{place}: checkpoint", checkpoint, model),
        _chosen(f"{place}: schedule", schedule, tuple(SCHEDULES)), _numbers(f"{place}: virtual_stages", virtual_stages),
        _offloads(f"{place}: offload", offload),
    )  # fmt: skip
    work = StructureWorker(family, limit)
    unlinked: list[str] = []
    work.do(_grouped(family, _points(family, count, batch, allowed, unlinked), choices), progress, executor)
    rows = ordered(_plan(fit, amount) for fit in work.fitting)
    mesh_notes = [f"meshes left out: {len(unlinked)}, such as: {unlinked[0]}"] if unlinked else []
    notes = (*mesh_notes, *work.reasons(unlinked), *dict.fromkeys(work.notes))
    return Search(
        model.name, device, count, limit, explained(rows), work.tried, notes, unit, family, family.policy_text()
    )


# -- limits ----------------------------------------------------------------------------------------------------------


def _listed_values(place: str, values: object) -> list[Any]:
    """Return the allowed values as a list."""
    listed: list[Any] = [values]
    if isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping):
        listed = list(islice(values, _MOST_VALUES + 1))  # it may be infinite
    if not 0 < len(listed) <= _MOST_VALUES:
        raise BindingError(
            f"{place}: {'no' if not listed else f'more than {_MOST_VALUES}'} values, expected 1 to {_MOST_VALUES}"
        )
    return listed


def _numbers(place: str, values: object) -> set[int] | None:
    """Return the allowed numbers, None for all."""
    return None if values is None else {size_of(place, n) for n in _listed_values(place, values)}


def _chosen(place: str, values: object, choices: tuple[Any, ...]) -> list[Any]:
    """Return the allowed choices, in their order."""
    selected = [*choices] if values is None else _listed_values(place, values)
    for value in selected:
        if not any(value == c and type(value) is type(c) for c in choices):
            raise BindingError(f"{place}: {shown(value)}, expected one of {', '.join(map(str, choices))}, or several")
    return [c for c in choices if c in selected]


def _precisions(place: str, values: object) -> dict[str, object]:
    """Return precision policies by name."""
    policies: dict[str, object] = {}
    for value in [None] if values is None else _listed_values(place, values):
        name = find_policy(value).name
        same_name = [n for n in policies if n.split(" ")[0] == name]
        if value not in policies.values():
            policies[f"{name} {len(same_name) + 1}" if same_name else name] = value
    return policies


def _offloads(place: str, values: object) -> list[tuple[str, ...]]:
    """Return the allowed combinations of offloaded tensors."""
    combinations = []
    for value in _listed_values(place, values):
        if not isinstance(value, str):
            raise BindingError(f"{place}: {shown(value)}, expected a text such as 'none' or 'optimizer+parameters'")
        named = need_offloaded(place, () if value == "none" else value.split("+"))
        combinations.append(tuple(name for name in OFFLOADED if name in named))
    return list(dict.fromkeys(combinations))


def _policies(place: str, values: object, model: Graph) -> list[str]:
    """Return checkpointing policies by name; by default those that recompute something in the model."""
    usual = ["none", "every-block"] if every_block().recomputes(model) else ["none"]
    selected = usual if values is None else _listed_values(place, values)
    for value in selected:
        if not isinstance(value, str):
            raise BindingError(f"{place}: {shown(value)}, expected a text such as 'every-block'")
        read_checkpoint(value)
    return list(dict.fromkeys(selected))


# -- enumeration -----------------------------------------------------------------------------------------------------


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def _degrees(devices: int, allowed: Sequence[set[int] | None]) -> Iterator[tuple[int, ...]]:
    """Yield factorizations of the number of devices into allowed values."""
    if len(allowed) == 1:
        yield from [(devices,)] if allowed[0] is None or devices in allowed[0] else []
        return
    for n in _divisors(devices):
        if allowed[0] is None or n in allowed[0]:
            yield from ((n, *rest) for rest in _degrees(devices // n, allowed[1:]))


def _points(
    family: PlanFamily, devices: int, batch: int, allowed: dict[str, set[int] | None], notes: list[str]
) -> Iterator[PlanPoint]:
    """Yield the allowed degrees that divide devices and batch; note those that the network has no links for."""
    depth = None if family.layers is None else family.size(family.layers)
    if allowed["pp"] is None:
        allowed["pp"] = {n for n in _divisors(devices) if n <= (depth or 1)}
    if allowed["ep"] is None and not family.experts():
        allowed["ep"] = {1}
    for tp, pp, cp, ep, dp in _degrees(devices, [allowed[d] for d in ("tp", "pp", "cp", "ep", "dp")]):
        if refused := _apart(family.hardware, {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}):
            notes.append(refused)
            continue
        per_rank, remainder = divmod(batch, dp * ep)
        for micro in _divisors(per_rank) if not remainder else ():
            times = per_rank // micro
            if pp > 1 and times == 1:  # stages would run one after the other
                continue
            if all(
                (ns := allowed[key]) is None or n in ns for key, n in (("micro_batch", micro), ("accumulate", times))
            ):
                yield PlanPoint(dp, tp, pp, cp, ep, micro, times)


def _apart(device: Hardware, degrees: Mapping[str, int]) -> str:
    """Return why a network has no links for some degrees, given innermost first; empty if it has."""
    stride = 1
    for axis, ranks in degrees.items():
        try:
            if ranks > 1:
                placed(axis, poly(ranks), poly(stride), device)
        except SpecError as error:
            return str(error)
        stride *= ranks
    return ""


class _Choices(NamedTuple):
    """Allowed choices of structures in addition to degrees."""

    stages: Sequence[int]
    asked: bool
    """whether stages were requested: with a pipeline, 2 and 3 are not tried by default"""
    splits: Sequence[bool]
    kept: Sequence[str]
    schedules: Sequence[str]
    groups: set[int] | None
    """allowed model chunks of a rank, None for all divisors"""
    away: Sequence[tuple[str, ...]]

    def orders(self, family: PlanFamily, point: PlanPoint) -> Iterator[tuple[str, PlanPoint]]:
        """Yield the schedules and model chunks that have action lists for the degrees of a point."""
        if point.pp == 1:
            yield "", point
            return
        share, remainder = divmod(family.depth, point.pp)
        for name in self.schedules:
            fixed = SCHEDULES[name].chunks
            every = [fixed] if fixed is not None else _divisors(share)[1:]
            for n in every:
                is_needed = fixed is not None or self.groups is None or n in self.groups
                # chunks have equal numbers of layers, as have the stages of a folded pipeline; a bidirectional one has
                # two whole stages on each rank
                groups = 1 if SCHEDULES[name].both_ways else n
                if (
                    is_needed
                    and (n == 1 or (not remainder and not share % groups))
                    and _runs(name, point.pp, point.accumulate, n)
                ):
                    yield name, point._replace(virtual_stages=n)


@lru_cache(maxsize=1 << 16)
def _runs(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> bool:
    """Whether a schedule has action lists for these numbers."""
    try:
        schedule_sizes(schedule, pp, micro_batches, virtual_stages)
    except CostGraphError:
        return False
    return True


def _grouped(family: PlanFamily, points: Iterable[PlanPoint], choices: _Choices) -> dict[Structure, list[PlanPoint]]:
    """Group points by structure.

    If an axis has one rank, only the first of the choices that split along it is tried. Structures that share graphs
    are adjacent.
    """
    out: dict[Structure, list[PlanPoint]] = {}
    tensor: dict[int, int | str | None] = {}
    for p in points:
        if p.tp not in tensor:
            tensor[p.tp] = family.tensor(p.tp)
        if tensor[p.tp] == 0:  # it does not divide the model
            continue
        few = [z for z in choices.stages if z < 2 or p.pp == 1 or choices.asked] or [*choices.stages]
        stages, splits = few[: None if p.dp * p.cp > 1 else 1], choices.splits[: None if p.tp > 1 else 1]
        choice_sets = product(stages, splits, choices.kept, family.precisions, choices.away)
        for (zero, split, policy, precision, away), (order, point) in product(
            choice_sets, [*choices.orders(family, p)]
        ):
            options = {"checkpoint": policy, "schedule": order, "precision": precision, "offload": away}
            group = family.structure(p, tensor[p.tp], zero=zero, sequence=split, **options)
            out.setdefault(group, []).append(point)
    alike = [*dict.fromkeys(structure.like() for structure in out)]
    return dict(sorted(out.items(), key=lambda pair: alike.index(pair[0].like())))


def _plan(fit: FittingPlan, amount: int) -> Plan:
    choices = {name: getattr(fit.structure, name) for name in CHOICES}
    return Plan(
        **fit.point._asdict(), **choices, seconds=fit.seconds, throughput=amount / fit.seconds,
        memory=max(fit.stages), parts=fit.parts, stages=fit.stages,
    )  # fmt: skip
