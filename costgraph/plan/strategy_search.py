"""The search for a plan of training on several devices: closed forms of structures over arrays of all degrees."""

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
from ..transforms.pipeline_schedules import SCHEDULES, asked
from ..transforms.precision import find_policy
from ..transforms.shard.parallelize import SYSTEMS, System
from .capacity import Bytes, memory_limit
from .strategy_templates import CHOICES, DEGREES, Fallback, Family, Forms, Policies, Structure, batch_of, whole

__all__ = [
    "TIE",
    "Plan",
    "Search",
    "Fit",
    "Point",
    "Work",
    "search",
]


# -- plans -------------------------------------------------------------------------------------------------------------
# Plans of training on several devices, as a table: the fastest first, each with what it takes and why it is slower.

#: Times of steps that differ by less are a tie: no prediction is as exact.
TIE = 0.01

#: What has a column where plans differ in it.
_CHOICES = ("schedule", "virtual", "precision", "offload")


@guarded()
@dataclass(frozen=True)
class Plan:
    """One way to train on several devices."""

    dp: int
    """ranks that have a part of the batch each"""
    tp: int
    """ranks that have a part of each layer each"""
    pp: int
    """stages of a pipeline"""
    cp: int
    """ranks that have a part of the sequence each"""
    ep: int
    """ranks that have a part of the experts each, and of the batch"""
    zero: int
    """stage of ZeRO, as in `parallelize`"""
    sequence: bool
    """whether what layers hand on is split along the sequence, over `tp`"""
    micro_batch: int
    """samples that a rank works on at once"""
    accumulate: int
    """micro-batches of a step"""
    checkpoint: str
    """what is computed again, as on the command line: none, every-block and the like"""
    schedule: str
    """of the pipeline, nothing where there is none"""
    virtual: int
    """groups of layers of a rank"""
    precision: str
    """name of the policy"""
    offload: tuple[str, ...]
    """what lies on the host"""
    seconds: float
    """estimated seconds of a step"""
    throughput: float
    """tokens or samples in a second, of all devices: `unit` of the search says which"""
    memory: int
    """bytes of a device at the peak, of the stage that needs the most"""
    parts: Mapping[str, float]
    """seconds by what they go into, one after the other: compute, memory traffic beyond it, each collective; of the
    slowest stage of a pipeline, with what it sends and the time that it is idle"""
    stages: tuple[int, ...] = ()
    """bytes of the first, a middle and the last stage; one where there is no pipeline, two where it has no middle"""
    why: str = ""
    """which part of the time is longer than that of the plan before it, and by how much; nothing where it is faster, as
    of a tie"""

    @property
    def bound(self) -> str:
        """What most of the time goes into: compute, memory traffic, or a collective over an axis."""
        return max(self.parts, key=lambda name: self.parts[name])


@guarded()
@dataclass(frozen=True, repr=False)
class Search(Table):
    """Plans that fit, the fastest first; of a tie, fewer stages of a pipeline. Made by `search`."""

    graph: str
    """name of the model"""
    hardware: Hardware
    """the devices"""
    devices: int
    """how many there are"""
    limit: float
    """bytes that a plan may take on each"""
    rows: tuple[Plan, ...]
    """by time, then by memory; of those up to 1 % behind the fastest that is left, fewer stages of a pipeline first"""
    tried: int
    """plans that divide the devices and the batch, those that the model refuses or that do not fit included"""
    notes: tuple[str, ...] = ()
    """what the network has no links for, and structures whose formulas hold for single degrees alone, each with why"""
    unit: str = "tokens"
    """what a step goes over, and its throughput is of: tokens or samples"""
    family: Family | None = field(default=None, compare=False)
    """what was searched, for further questions"""
    policies: str = ""
    """whose policies all plans follow, in words"""

    @property
    def best(self) -> Plan | None:
        """The first plan: the fastest, or one of fewer stages that is up to 1 % behind it. None where none fits."""
        return self.rows[0] if self.rows else None

    def pareto(self) -> Search:
        """Return the plans beside which no other is both as fast and as small, where a tie is as fast.

        Returns
        -------
        Search
            From the best to the smallest: each takes less memory than all before it.
        """
        kept: list[Plan] = []
        for plan in self.rows:
            if not kept or plan.memory < kept[-1].memory:
                kept.append(plan)
        return replace(self, rows=explained(kept))

    def _about(self) -> str:
        return f"{shorten(self.graph)} on {self.devices:,} {self.hardware.id}, {len(self.rows):,} plans"

    def _columns(self) -> Sequence[Column]:
        return (
            *(Column(d, "1") for d in ("dp", "tp", "pp", "cp", "ep") if d in ("dp", "tp") or self._varies(d)),
            Column("zero", "1"),
            Column("sequence", title="seq", text=lambda split: "yes" if split else ""),
            Column("micro_batch", "1", title="micro"), Column("accumulate", "1", title="times"),
            Column("checkpoint"),
            *(Column(name, text=_joined) for name in _CHOICES if self._several(name)),
            Column("seconds", "s", title="step"), Column("throughput", "1",
            title=f"{self.unit}/s"), Column("memory", "B", title="peak memory"), Column("bound", title="bound by"),
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
    """Return plans as a search has them: by time, and of a tie those first whose time rests on less, as of one stage.

    A tie is of all that are no more than 1 % behind the fastest that is left.
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
    names = plan.schedule, plan.virtual, plan.precision, plan.offload
    return plan.seconds, plan.memory, plan.zero, *degrees, plan.sequence, plan.micro_batch, plan.checkpoint, *names


def explained(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return plans, each with what makes it slower than the one before it."""
    return tuple(replace(p, why=_longer(plans[i - 1], p) if i else "") for i, p in enumerate(plans))


def _longer(before: Plan, plan: Plan) -> str:
    grown = {name: seconds - before.parts.get(name, 0.0) for name, seconds in plan.parts.items()}
    name = max(grown, key=lambda n: grown[n])
    return f"{format_quantity(grown[name], 's')} {name}" if grown[name] > 0 and plan.seconds > before.seconds else ""


# -- fitting -----------------------------------------------------------------------------------------------------------
# Plans that fit: structures are derived, one after the other or side by side, and evaluated over arrays of degrees.


class Point(NamedTuple):
    """What plans of one structure differ in."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    accumulate: int
    virtual: int = 1


class Fit(NamedTuple):
    """A plan that fits."""

    structure: Structure
    point: Point
    stages: tuple[int, ...]
    """bytes of each stage"""
    seconds: float
    parts: dict[str, float]
    """of the time, in seconds"""


class Done(NamedTuple):
    """What another process hands back of a structure."""

    fitting: list[Fit]
    derived: int
    notes: list[str]
    error: CostGraphError | None
    over: float
    refused: str


@dataclass
class Work:
    """Derives structures and keeps what fits."""

    family: Family
    limit: float
    fitting: list[Fit] = field(default_factory=list)
    tried: int = 0
    derived: int = 0
    notes: list[str] = field(default_factory=list)
    error: CostGraphError | None = None
    """why a structure could not be derived"""
    over: float = inf
    """the fewest bytes that a plan takes, or takes at least, which are more than there are"""
    refused: str = ""
    """why the graph of a plan, the first such one, is against its sizes"""
    apart: tuple[Structure, list[Point]] | None = None
    """plans, the first such ones, that do not divide what is split: not derived unless it is to be said why"""

    def do(self, groups: Mapping[Structure, list[Point]], progress: bool | None, executor: Executor | None) -> None:
        """Try all points of all structures, structures side by side where there is what runs them."""
        self.tried += sum(map(len, groups.values()))
        likely = {structure: found for structure, points in groups.items() if (found := self.likely(structure, points))}
        for structure in likely:
            self.family.step(structure)  # what cannot be trained is an error, whatever else there is
        likely = {structure: found for structure, points in likely.items() if (found := self.whole(structure, points))}
        with progressing("search", len(likely), progress) as step:
            for structure, tried in zip(likely, self.tries(likely, executor), strict=True):
                step(f"ZeRO {structure.zero}, {structure.checkpoint}")
                self.error = tried() or self.error
        if self.apart is not None and not (self.fitting or self.refused):
            self.error = self.one(*self.apart) or self.error  # it says why
        if self.error is not None and not self.derived:
            raise self.error

    def tries(
        self, likely: Mapping[Structure, list[Point]], executor: Executor | None
    ) -> Iterator[Callable[[], CostGraphError | None]]:
        """Yield for each structure what tries its points, and returns why it cannot be derived."""
        if executor is None:
            yield from (partial(self.one, structure, points) for structure, points in likely.items())
            return
        sent = pickle.dumps((self.family, self.limit))
        futures = [executor.submit(_elsewhere, sent, structure, points) for structure, points in likely.items()]
        try:
            yield from (partial(self.gathered, future) for future in futures)
        finally:
            for future in futures:  # those that an error leaves behind
                future.cancel()

    def gathered(self, future: Future[Done]) -> CostGraphError | None:
        """Wait for what another process tries."""
        fitting, derived, notes, error, over, refused = future.result()
        self.fitting += fitting
        self.derived += derived
        self.notes += notes
        self.over, self.refused = min(self.over, over), self.refused or refused
        return error

    def likely(self, structure: Structure, points: Sequence[Point]) -> list[Point]:
        """Return the points whose parameters, gradients and states alone would fit: others need no derivation."""
        if self.limit == inf:
            return [*points]
        least = np.broadcast_to(np.asarray(self.family.least(structure, columns(points)), float), len(points))
        self.over = least.min(where=least > self.limit, initial=self.over)
        return [p for p, ok in zip(points, (least <= self.limit).tolist(), strict=True) if ok]

    def whole(self, structure: Structure, points: Sequence[Point]) -> list[Point]:
        """Return the points whose ranks have whole parts of what is split: others need no derivation."""
        ok = np.broadcast_to(whole(self.family, structure, columns(points)), len(points)).tolist()
        if self.apart is None and not all(ok):
            self.apart = structure, [p for p, fits in zip(points, ok, strict=True) if not fits]
        return [p for p, fits in zip(points, ok, strict=True) if fits]

    def reasons(self, apart: object) -> Iterator[str]:
        """Yield why there is no plan, where there is none; `apart`: what the network has no links for."""
        if self.fitting:
            return
        if self.over < inf:
            yield f"no plan fits: {format_bytes(self.over)} or more of {format_bytes(self.limit)}"
        yield from (f"refused: {why}" for why in (self.refused, *self.family.unsplit.values()) if why)
        if not (self.tried or self.family.unsplit or apart):
            yield "no plan: no degrees within the limits divide the devices and the batch"

    def one(self, structure: Structure, points: Sequence[Point]) -> CostGraphError | None:
        """Try the points of a structure; with degrees bound where its graph cannot be derived with them open."""
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

    def bound(self, structure: Structure, points: Sequence[Point], error: CostGraphError) -> CostGraphError | None:
        """Try the points of a structure degree by degree, and say why."""
        name = next((d for d in DEGREES if not isinstance(getattr(structure, d), int)), None)
        if name is None:
            return error
        self.notes.append(f"by single {name}, ZeRO {structure.zero}: {error}")
        last: CostGraphError | None = None
        for n in sorted({getattr(p, name) for p in points}):
            last = self.one(replace(structure, **{name: n}), [p for p in points if getattr(p, name) == n]) or last
        return last

    def evaluate(self, structure: Structure, forms: Forms, points: Sequence[Point]) -> None:
        """Evaluate formulas at all points at once, and keep those that fit."""
        self.derived += len(points)
        degrees = columns(points)
        sizes, cuts = self.family.sizes(degrees, structure), self.family.cuts(structure, degrees["pp"])
        found = forms.at(sizes, cuts)
        if self.family.rings is not None and self.family.rings.why:
            self.notes.append(f"no rings: {self.family.rings.why}")
        stages = np.array([*found.peaks.values()], float)
        peak = stages.max(0)
        self.over = peak.min(where=peak > self.limit, initial=self.over)
        if np.isnan(peak).any() and not self.refused:
            self.refused = forms.refusal(sizes, cuts, int(np.isnan(peak).argmax()))
        fits = np.isfinite(peak) & np.isfinite(found.seconds) & (peak <= self.limit)
        for i in np.flatnonzero(fits).tolist():
            own = {name: float(values[i]) for name, values in found.parts.items() if values[i]}
            each = tuple(round(float(p)) for p in stages[:, i] if p)
            self.fitting.append(Fit(structure, points[i], each, float(found.seconds[i]), own))


@lru_cache(maxsize=1)
def _received(sent: bytes) -> tuple[Family, float]:
    """Return a family and a limit in another process, once for all that is tried there."""
    found: tuple[Family, float] = pickle.loads(sent)
    return found


def _elsewhere(sent: bytes, structure: Structure, points: Sequence[Point]) -> Done:
    """Try the points of a structure in another process, which keeps the steps that it makes."""
    work = Work(*_received(sent))
    error = work.one(structure, points)
    return Done(work.fitting, work.derived, work.notes, error, work.over, work.refused)


def columns(points: Sequence[Point]) -> dict[str, np.ndarray[Any, Any]]:
    return dict(zip(Point._fields, np.array(points, dtype=np.int64).T, strict=True))


# -- searching ---------------------------------------------------------------------------------------------------------

#: Values of a limit: one, or several that are tried.
Limit = Annotated[Any, READ]
#: Devices and samples of a step that are looked through for divisors.
_MOST = 2**32
_MOST_VALUES = 10_000


def search(
    model: Graph, /, *, devices: int, hardware: str | Hardware, network: str | Network | None = None,
    loss: object = None, precision: Limit = None, optimizer: Optimizer | type | str | None = None,
    memory: Bytes | None = None,
    overlap: str | None = None, system: System = "torch", reduce_each: bool | None = None, hold: bool | None = None,
    fallback: Fallback = None, dp: Limit = None, tp: Limit = None, pp: Limit = None, cp: Limit = 1, ep: Limit = None,
    zero: Limit = None, sequence: Limit = None, micro_batch: Limit = None, accumulate: Limit = None,
    checkpoint: Limit = None, schedule: Limit = "1f1b", virtual: Limit = None, offload: Limit = "none",
    defer_accumulation: bool = False, progress: bool | None = None, executor: Executor | None = None,
    **dims: int,
) -> Search:  # fmt: skip
    """Return the plans of training on several devices that fit, the fastest first; of a tie, fewer stages.

    Plans are all that divide the devices, the batch and the model: degrees of data, tensor, context and expert
    parallelism, stages of a pipeline, its schedules and groups of layers, stages of ZeRO, what is split along the
    sequence, sizes and numbers of micro-batches, what is computed again, what lies on the host, and number formats.

    Parameters
    ----------
    model : Graph
        The forward pass, such as `models.load` returns.
    devices : int
        How many there are: `dp * tp * pp * cp * ep` of each plan.
    hardware : str, path-like or Hardware
        The devices.
    network : str, path-like or Network, optional
        Between the domains of their interconnect, as in `roofline`.
    loss : str or callable, optional
        As in `training_step`: what is trained on where that is not the model's own loss, such as one in another format.
    precision : str, mapping or Policy, or iterable of these, optional
        As in `training_step`; several are tried.
    optimizer : Optimizer, optional
        As in `training_step`; by default AdamW, fused with `system="megatron"`, as Megatron runs it.
    memory : int or float, optional
        Bytes that a plan may take on a device, by default its usable memory (`Hardware.capacity`).
    overlap : str, optional
        none, ideal or streams: of collectives with all else, as in `roofline`. The default follows `system`: streams
        with torch, whose DistributedDataParallel and `fully_shard` reduce gradients beside the backward pass, none with
        megatron, which overlaps if asked (`--overlap-grad-reduce`), and in a torus. Plans of more ops than `streams`
        plays one by one are charged all collectives.
    system : str
        torch or megatron: whose policies, as `system` of `parallelize`; Megatron has stages 0 and 1 of ZeRO.
    reduce_each : bool, optional
        Whether gradients of each micro-batch are reduced, or are added up and reduced once, as `reduce_each` of
        `parallelize`. By default they are reduced behind the last micro-batch, as with `no_sync` of torch's
        DistributedDataParallel, torch's pipelines and Megatron; ZeRO-2 and ZeRO-3 without a pipeline reduce each, as
        `fully_shard` does, and keep no whole gradients.
    hold : bool, optional
        Whether the backward pass has what a split sequence has gathered, as `hold` of `parallelize`, which has the
        default as well.
    fallback : str or mapping, optional
        As `Hardware.rate`.
    dp, tp : int or iterable of int, optional
        Limits: values that a plan may have. All that divide by default.
    pp : int or iterable of int, optional
        Limit: stages of a pipeline of several micro-batches, by default all that divide the devices and are no more
        than the layers.
    cp : int or iterable of int, optional
        Limit: ranks that have a part of the sequence each, by default 1; None for all that divide.
    ep : int or iterable of int, optional
        Limit: ranks that have a part of the experts each, by default all that divide where the model has experts.
    zero : int or iterable of int, optional
        Limit: stages of ZeRO, by default 0 to 3, beside a pipeline 0 and 1.
    sequence : bool or iterable of bool, optional
        Limit: whether what layers hand on is split along the sequence; both by default.
    micro_batch, accumulate : int or iterable of int, optional
        Limits, as `dp`.
    checkpoint : str or iterable of str, optional
        Limit: what is computed again, by default none and every-block; also every:K, from-start, selective:NAME,NAME or
        keep:NAME,NAME.
    schedule : str or iterable of str
        Limit: orders of a pipeline, of those that `parallelize` takes: gpipe, 1f1b, interleaved, zb-h1, interleaved-zb,
        zbv, dualpipe and dualpipev.
    virtual : int or iterable of int, optional
        Limit: groups of layers of a rank under interleaved and interleaved-zb, by default all that divide its layers;
        zbv, dualpipe and dualpipev have two, other schedules one.
    offload : str or iterable of str
        Limit: what lies on the host: none, optimizer, parameters or activations, several of them joined by a plus sign
        such as optimizer+parameters.
    defer_accumulation : bool
        As in `training_step`.
    progress : bool, optional
        Whether a line says how far the search is; by default where the standard error is a terminal.
    executor : concurrent.futures.Executor, optional
        Where structures are derived side by side, such as a `ProcessPoolExecutor`, or `client.get_executor()` of a
        client of dask.distributed; by default one after the other, here.
    **dims : int
        Sizes, that of the batch among them: of a step, all devices and micro-batches together.

    Returns
    -------
    Search
        `.rows`, `.best`, `.unit`, `.pareto()`; `print` it.

    Raises
    ------
    BindingError, GraphError, SpecError
        If an amount is no positive integer, a size is left open, a limit has nothing in it, or the graph cannot be
        trained; as `training_step`, `peak_memory` and `seconds`.
    UnsupportedError
        If streams are asked for in a torus, or are to run more than a million ops one by one.

    Notes
    -----
    The time is the estimate of `seconds`, which is of vendors' peak rates, the peak that of `peak_memory`; throughput
    is of tokens where all inputs are sequences of one length, else of samples. Formulas are derived once for all
    degrees of a structure (a stage of ZeRO, the sequence split or not, what is computed again), and evaluated over
    arrays of these. Of one rank along an axis, all that splits along it is the same: one plan. What cannot fit, since
    parameters, gradients and states alone are more, is not derived, nor is what degrees do not divide.

    Plans up to 1 % behind the fastest that is left are a tie, as no prediction is more exact: first come those of fewer
    stages of a pipeline, whose time rests on less, then faster ones.

    Where layers are no multiple of the stages of a pipeline, the last one has one less, then the first one, then middle
    ones; several groups of a rank are tried where layers are a multiple of all groups. The time is that of `seconds`
    where nothing overlaps; with overlap each pass of a stage is shorter by the same factor, and what it hands on is
    waited for. What the last micro-batch alone reduces comes behind. The peak is that of the stage that needs the most.
    In a torus, degrees that are no whole dimensions of it, and a line of one more, are left out, as notes say. Where
    there is no plan, notes say how much the smallest would take, and which sizes are against it.
    Schedules of one kind (gpipe and 1f1b, zbv and dualpipev) differ in what waits alone: their graphs are derived once.

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
    hold = system == "torch" if hold is None else hold
    need_flag(place, hold=hold, defer_accumulation=defer_accumulation)
    if reduce_each is not None:
        need_flag(place, reduce_each=reduce_each)
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
        raise BindingError(f"{place}: no size of {named}, expected the samples of a step")
    batch = size_of(f"{place}: {named}", dims[named])
    if max(count, batch) > _MOST:
        raise BindingError(f"{place}: {count} devices, {batch} samples, expected at most {_MOST} of each")
    others = {name: n for name, n in dims.items() if name != named}
    torus = device.cluster is not None and device.cluster.torus
    if overlap == "streams" and torus:
        raise UnsupportedError(f"{place}: overlap 'streams' in a torus, expected none or ideal")
    policies = Policies(
        overlap or ("streams" if system == "torch" and not torus else "none"), overlap is None, reduce_each
    )
    family = Family(model, named, device, fallback, policies, system, hold, options, precisions, others)
    amount, unit = family.goes_over(batch)
    numbers = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro_batch, "accumulate": accumulate}
    allowed = {name: _numbers(f"{place}: {name}", given) for name, given in numbers.items()}
    choices = _Choices(
        _chosen(f"{place}: zero", zero, (0, 1, 2, 3) if system == "torch" else (0, 1)), zero is not None,
        _chosen(f"{place}: sequence", sequence, (False, True)), _policies(f"{place}: checkpoint", checkpoint, model),
        _chosen(f"{place}: schedule", schedule, tuple(SCHEDULES)), _numbers(f"{place}: virtual", virtual),
        _offloads(f"{place}: offload", offload),
    )  # fmt: skip
    work = Work(family, limit)
    apart: list[str] = []
    work.do(_grouped(family, _points(family, count, batch, allowed, apart), choices), progress, executor)
    rows = ordered(_plan(fit, amount) for fit in work.fitting)
    left = [f"meshes left out: {len(apart)}, such as: {apart[0]}"] if apart else []
    notes = (*left, *work.reasons(apart), *dict.fromkeys(work.notes))
    return Search(
        model.name, device, count, limit, explained(rows), work.tried, notes, unit, family, family.policy_text()
    )


# -- limits ----------------------------------------------------------------------------------------------------------


def _several(place: str, given: object) -> list[Any]:
    """Return what a limit lists; the one value that is no list."""
    found: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        found = list(islice(given, _MOST_VALUES + 1))  # it may have no end
    if not 0 < len(found) <= _MOST_VALUES:
        raise BindingError(f"{place}: {'no' if not found else f'more than {_MOST_VALUES}'} values, expected some")
    return found


def _numbers(place: str, given: object) -> set[int] | None:
    """Return the numbers that a limit allows, None for all."""
    return None if given is None else {size_of(place, n) for n in _several(place, given)}


def _chosen(place: str, given: object, choices: tuple[Any, ...]) -> list[Any]:
    """Return those of some values that a limit allows, in their order."""
    found = [*choices] if given is None else _several(place, given)
    for value in found:
        if not any(value == c and type(value) is type(c) for c in choices):
            raise BindingError(f"{place}: {shown(value)}, expected one of {', '.join(map(str, choices))}, or several")
    return [c for c in choices if c in found]


def _precisions(place: str, given: object) -> dict[str, object]:
    """Return policies of number formats by name."""
    found: dict[str, object] = {}
    for value in [None] if given is None else _several(place, given):
        name = find_policy(value).name
        same = [n for n in found if n.split(" ")[0] == name]
        if value not in found.values():
            found[f"{name} {len(same) + 1}" if same else name] = value
    return found


def _offloads(place: str, given: object) -> list[tuple[str, ...]]:
    """Return what may lie on the host."""
    found = []
    for value in _several(place, given):
        if not isinstance(value, str):
            raise BindingError(f"{place}: {shown(value)}, expected a text such as 'none' or 'optimizer+parameters'")
        named = need_offloaded(place, () if value == "none" else value.split("+"))
        found.append(tuple(name for name in OFFLOADED if name in named))
    return list(dict.fromkeys(found))


def _policies(place: str, given: object, model: Graph) -> list[str]:
    """Return policies of checkpointing by name; by default those that recompute something of the model."""
    usual = ["none", "every-block"] if every_block().recomputes(model) else ["none"]
    found = usual if given is None else _several(place, given)
    for value in found:
        if not isinstance(value, str):
            raise BindingError(f"{place}: {shown(value)}, expected a text such as 'every-block'")
        read_checkpoint(value)
    return list(dict.fromkeys(found))


# -- what there is to try --------------------------------------------------------------------------------------------


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def _degrees(devices: int, allowed: Sequence[set[int] | None]) -> Iterator[tuple[int, ...]]:
    """Yield factors of a number of devices, each within its limits."""
    if len(allowed) == 1:
        yield from [(devices,)] if allowed[0] is None or devices in allowed[0] else []
        return
    for n in _divisors(devices):
        if allowed[0] is None or n in allowed[0]:
            yield from ((n, *rest) for rest in _degrees(devices // n, allowed[1:]))


def _points(
    family: Family, devices: int, batch: int, allowed: dict[str, set[int] | None], notes: list[str]
) -> Iterator[Point]:
    """Yield the degrees that divide devices and batch, within their limits; note why the network has not some."""
    depth = None if family.layers is None else family.size(family.layers)
    if allowed["pp"] is None:
        allowed["pp"] = {n for n in _divisors(devices) if n <= (depth or 1)}
    if allowed["ep"] is None and not family.experts():
        allowed["ep"] = {1}
    for tp, pp, cp, ep, dp in _degrees(devices, [allowed[d] for d in ("tp", "pp", "cp", "ep", "dp")]):
        if refused := _apart(family.hardware, {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}):
            notes.append(refused)
            continue
        own, left = divmod(batch, dp * ep)
        for micro in _divisors(own) if not left else ():
            times = own // micro
            if pp > 1 and times == 1:  # one stage after the other, and nothing else to do
                continue
            if all(
                (ns := allowed[key]) is None or n in ns for key, n in (("micro_batch", micro), ("accumulate", times))
            ):
                yield Point(dp, tp, pp, cp, ep, micro, times)


def _apart(device: Hardware, degrees: Mapping[str, int]) -> str:
    """Return why a network has no links for degrees, of which those before have the ranks beside each other."""
    apart = 1
    for axis, ranks in degrees.items():
        try:
            if ranks > 1:
                placed(axis, poly(ranks), poly(apart), device)
        except SpecError as error:
            return str(error)
        apart *= ranks
    return ""


class _Choices(NamedTuple):
    """What structures differ in beside degrees."""

    stages: Sequence[int]
    asked: bool
    """whether these were asked for: beside a pipeline, 2 and 3 are not tried by themselves"""
    splits: Sequence[bool]
    kept: Sequence[str]
    schedules: Sequence[str]
    groups: set[int] | None
    """groups of layers of a rank, None for all that divide"""
    away: Sequence[tuple[str, ...]]

    def orders(self, family: Family, point: Point) -> Iterator[tuple[str, Point]]:
        """Yield the schedules of a pipeline, and groups of layers, that have action lists for its numbers."""
        if point.pp == 1:
            yield "", point
            return
        share, left = divmod(family.depth, point.pp)
        for name in self.schedules:
            fixed = SCHEDULES[name].chunks
            every = [fixed] if fixed is not None else _divisors(share)[1:]
            for n in every:
                wanted = fixed is not None or self.groups is None or n in self.groups
                # groups are even, and so are the stages of a pipeline that turns around in its last rank, or goes both
                # ways, of which a rank has two whole ones
                groups = 1 if SCHEDULES[name].both_ways else n
                if (
                    wanted
                    and (n == 1 or (not left and not share % groups))
                    and _runs(name, point.pp, point.accumulate, n)
                ):
                    yield name, point._replace(virtual=n)


@lru_cache(maxsize=1 << 16)
def _runs(schedule: str, pp: int, micro_batches: int, virtual: int) -> bool:
    """Whether a schedule has action lists for these numbers."""
    try:
        asked(schedule, pp, micro_batches, virtual)
    except CostGraphError:
        return False
    return True


def _grouped(family: Family, points: Iterable[Point], choices: _Choices) -> dict[Structure, list[Point]]:
    """Return the points of each structure: the one place that says which structures there are.

    Along an axis of one rank nothing is split: of what differs in that alone, the first is taken. Structures of which
    the graphs are the same stand beside each other.
    """
    out: dict[Structure, list[Point]] = {}
    tensor: dict[int, int | str | None] = {}
    for p in points:
        if p.tp not in tensor:
            tensor[p.tp] = family.tensor(p.tp)
        if tensor[p.tp] == 0:  # it does not divide the model
            continue
        few = [z for z in choices.stages if z < 2 or p.pp == 1 or choices.asked] or [*choices.stages]
        stages, splits = few[: None if p.dp * p.cp > 1 else 1], choices.splits[: None if p.tp > 1 else 1]
        ways = product(stages, splits, choices.kept, family.precisions, choices.away)
        for (zero, split, how, precision, away), (order, at) in product(ways, [*choices.orders(family, p)]):
            options = {"checkpoint": how, "schedule": order, "precision": precision, "offload": away}
            found = family.structure(p, tensor[p.tp], zero=zero, sequence=split, **options)
            out.setdefault(found, []).append(at)
    alike = [*dict.fromkeys(structure.like() for structure in out)]
    return dict(sorted(out.items(), key=lambda pair: alike.index(pair[0].like())))


def _plan(fit: Fit, amount: int) -> Plan:
    how = {name: getattr(fit.structure, name) for name in CHOICES}
    return Plan(
        **fit.point._asdict(), **how, seconds=fit.seconds, throughput=amount / fit.seconds,
        memory=max(fit.stages), parts=fit.parts, stages=fit.stages,
    )  # fmt: skip
