"""Structures of plans: what changes the graph of a rank, each with formulas in all that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod
from typing import Any

import numpy as np

from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import symbol
from ..analysis.arrays import Array
from ..analysis.collecting import collection_paused
from ..analysis.training import goes_over
from ..analysis.training_memory import StateBytes, state_bytes
from ..analysis.work import Fallback, ask
from ..errors import BindingError, CostGraphError
from ..graph.graph import Graph
from ..graph.sizes import bindings, known_names, size_of
from ..graph.sizes import stages as stages_of
from ..hardware.specs import Hardware
from ..optimizers import AdamW
from ..transforms.checkpoint import read_checkpoint
from ..transforms.schedules import SCHEDULES
from ..transforms.shard.parallelize import parallelize
from ..transforms.stages import Kind as Stage
from ..transforms.stages import waiting_of
from ..transforms.stages_held import Order
from ..transforms.training import training_step
from .forms import Cut, Forms, Kind
from .rings import Rings

__all__ = ["CHOICES", "DEGREES", "Fallback", "Family", "Policies", "Structure"]

DEGREES = ("dp", "tp", "pp", "cp", "ep", "accumulate")
#: What structures differ in beside degrees.
CHOICES = ("zero", "sequence", "checkpoint", "schedule", "precision", "offload")
#: Further symbols: groups of layers of a rank, and the last of the ranks that have the most layers.
_MORE = ("virtual", "rank")
_MOST_KEPT = 32  # structures


@dataclass(frozen=True)
class Structure:
    """What changes the graph: plans of one structure differ in numbers that its formulas are in.

    A degree is 1, which takes its collectives out of the graph, None where it is open, or a number where no formula
    holds with it open. Of tensor parallelism it may be a name: the degree is a multiple of that dimension.
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
    """of a pipeline, else nothing"""
    precision: str = ""
    offload: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    """of dp, cp and ep, some with which ZeRO splits the axes that it does; none where these are the longest"""

    def like(self) -> Structure:
        """Return that of which the graphs are the same: schedules may differ only in what waits."""
        if self.pp == 1:
            return self
        own = _differs(self.schedule)
        return replace(self, schedule=next(name for name in SCHEDULES if _differs(name) == own))


def _differs(schedule: str) -> tuple[bool, ...]:
    """Return what of a schedule changes graphs: gradients of weights apart, groups of layers, where these turn."""
    made = SCHEDULES[schedule]
    return Order(schedule, ONE, ONE, ONE).splits, made.chunks is None, made.folded, made.both_ways


class _Last(dict[Structure, list[Kind]]):
    """Keeps what was put in last: graphs are large."""

    def __setitem__(self, key: Structure, value: list[Kind]) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST_KEPT:
            del self[next(iter(self))]


@dataclass
class Derived:
    """What is derived for a family: it stays with the model until that is changed, or asked for another family."""

    steps: dict[tuple[str, str, int | None], Graph] = field(default_factory=dict)
    states: dict[str, StateBytes] = field(default_factory=dict)
    """bytes by precision"""
    kinds: dict[Structure, list[Kind]] = field(default_factory=_Last)
    """of structures with different graphs, what their ranks take"""


@dataclass(frozen=True)
class Policies:
    """How collectives of all plans of a search are run."""

    overlap: str
    """none, ideal or streams"""
    charge_all: bool = False
    """whether plans of too many ops for streams are charged all collectives, where nobody asked for streams"""
    reduce_each: bool | None = None
    """whether each micro-batch reduces gradients; by default as a structure does"""


@dataclass
class Family:
    """Steps of training of one model on one device, and the formulas of its structures."""

    model: Graph
    batch: str
    """name of the dimension of the batch"""
    hardware: Hardware
    fallback: Fallback
    policies: Policies
    system: str
    """torch or megatron, as `parallelize` has it"""
    hold: bool
    """whether the backward pass has what a split sequence has gathered"""
    options: Mapping[str, Any]
    """of `training_step`"""
    precisions: Mapping[str, Any]
    """policies by their names"""
    dims: Mapping[str, Any]
    """sizes, all but that of the batch"""
    placed: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """by degrees, those of which the axes that ZeRO splits are taken"""
    first: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """by axes, the first degrees with which ZeRO splits these"""
    unsplit: dict[int, str] = field(default_factory=dict)
    """why the model is not split over ranks of `tp`, by their number"""

    @cached_property
    def derived(self) -> Derived:
        """What is derived already, by an earlier search as well; a function that makes the loss may make another."""
        if callable(self.options["loss"]):
            return Derived()
        asked = self.batch, self.hardware, self.fallback, self.system, self.policies.reduce_each, self.hold
        stated = self.model.defaults, self.options, self.precisions, self.dims
        key = (*self.model.outputs,), deepcopy((asked, stated))
        kept: tuple[object, Derived] = self.model.cache.get("search", (None, Derived()))
        if kept[0] != key:
            kept = self.model.cache["search"] = key, Derived()
        return kept[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "derived"}

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the degrees as dimensions, which are none of the model."""
        known, every = known_names(self.model), (*DEGREES, *_MORE)
        return {d: next(n for i in range(len(known) + 1) if (n := d + "_" * i) not in known) for d in every}

    @cached_property
    def layers(self) -> str | None:
        """Name of the number of layers, None where a pipeline has nothing to cut: a loop of a count that is a name."""
        loops = [op.loop for op in self.model.ops if op.loop is not None and op.loop.starts]
        names = sorted(loops[0].count.names()) if len(loops) == 1 else []
        return names[0] if len(names) == 1 and self.size(names[0]) is not None else None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return (None if self.layers is None else self.size(self.layers)) or 1

    def size(self, name: str) -> int | None:
        """Return what a dimension of the model is bound to."""
        found = self.dims.get(name, self.model.defaults.get(name))
        return None if found is None else size_of(f"search: {name}", found)

    def sizes(self, degrees: Mapping[str, Any], structure: Structure) -> dict[str, Any]:
        """Return what the formulas are in, for degrees: their batch is that of all ranks, of one micro-batch."""
        found = {self.names[d]: n for d, n in degrees.items() if d in self.names}
        if isinstance(structure.tp, str):
            found[self.names["tp"]] = degrees["tp"] // self.size(structure.tp)
        if structure.pp != 1:
            found[self.names["rank"]] = self.turn(degrees["pp"])
        return {**found, self.batch: degrees["micro_batch"] * degrees["dp"] * degrees["ep"]}

    def turn(self, pp: Array) -> Array:
        """Return the last rank but one with the most layers."""
        found: Array = np.maximum(pp - np.maximum(-(-self.depth // pp) * pp - self.depth, 2), 1)
        return found

    def cuts(self, structure: Structure, pp: Array) -> dict[str, Cut]:
        """Return the layers of the kinds of stages that there are, and how many stages are of each.

        Where layers are no multiple of the stages, the last one has one less, then the first one, which have more to do
        beside layers, then middle ones, the last of them first.
        """
        if structure.pp == 1:
            return {"all": Cut(np.ones_like(pp), np.ones_like(pp))}
        most, few = -(-self.depth // pp), np.minimum(pp, 1)
        missing = most * pp - self.depth
        less = np.maximum(missing - 2, 0)
        found = {
            "first": Cut(most - (missing >= 2), few),
            "middle": Cut(most, np.maximum(pp - 2 - less, 0)),
            "less": Cut(most - 1, less),
            "last": Cut(most - (missing >= 1), few),
        }
        return {name: cut for name, cut in found.items() if cut.alike.any()}

    def structure(self, point: Any, tensor: int | str | None, **choices: Any) -> Structure:
        """Return the structure of what has all degrees, as a plan does."""
        found: dict[str, Any] = {d: 1 if getattr(point, d) == 1 else None for d in DEGREES if d != "tp"}
        return Structure(tp=tensor, ranks=self.ranks(point) if choices["zero"] else (), **found, **choices)

    def ranks(self, point: Any) -> tuple[int, ...]:
        """Return degrees with which ZeRO splits the axes that it does with those of a point; none if the longest."""
        every = point.dp, point.cp, point.ep
        if every not in self.placed:
            each = [(n, sizes) for n in (every[0] * every[1], prod(every)) for sizes in self.uneven]
            axes = tuple(_split(sizes, n) for n, sizes in each)
            longest = all(at == sizes.index(max(sizes)) for at, (_, sizes) in zip(axes, each, strict=True))
            self.placed[every] = () if longest else self.first.setdefault(axes, every)
        return self.placed[every]

    @cached_property
    def uneven(self) -> list[tuple[float, ...]]:
        """Sizes of parameters of several axes, without end where one is open."""
        params = (t for t in self.model.tensors if t.role == "param" and t.producer is None)
        known = {name: poly(n) for name, n in self.model.defaults.items()}
        sizes = ([n.bind(known).constant for n in t.sizes[t.storage.pieces :]] for t in params)
        return sorted({tuple(inf if n is None else float(n) for n in ns) for ns in sizes if len(ns) > 1})

    def step(self, structure: Structure) -> Graph:
        """Return the step of all devices together."""
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
        """Return the graph of a rank."""
        degrees = {d: self.degree(d, structure) for d in DEGREES if d != "accumulate"}
        if structure.pp != 1:
            degrees |= {"micro_batches": self.degree("accumulate", structure), "schedule": structure.schedule}
            if SCHEDULES[structure.schedule].chunks is None:
                degrees["virtual"] = symbol(self.names["virtual"])
        options = {"zero": structure.zero, "sequence": structure.sequence, "offload": structure.offload}
        options |= {"system": self.system, "reduce_each": self.reduces_each(structure), "hold": self.hold}
        with self.at_ranks(graph, structure):
            return parallelize(graph, **degrees, **options)  # type: ignore[arg-type]

    def reduces_each(self, structure: Structure) -> bool:
        """Whether each micro-batch reduces gradients: by default if ranks keep no whole ones, and not in a pipeline."""
        asked = self.policies.reduce_each
        return structure.zero >= 2 and structure.pp == 1 if asked is None else asked

    def policy_text(self) -> str:
        """Return the policies of all plans of a search, in words."""
        asked = self.policies.reduce_each
        gradients = f"reduced {'in each' if asked else 'behind the last'} micro-batch"
        if asked is None and self.system == "torch":  # Megatron has neither of them
            gradients += ", without a pipeline by ZeRO-2 and ZeRO-3 in each"
        optimizer = self.options.get("optimizer") or AdamW()
        made = f"{type(optimizer).__name__} ({getattr(optimizer, 'implementation', '')})".replace(" ()", "")
        return f"{self.system}: gradients {gradients}; overlap {self.policies.overlap}; {made}"

    @contextmanager
    def at_ranks(self, graph: Graph, structure: Structure) -> Iterator[None]:
        """Have the axes of a graph split that the ranks of a structure divide."""
        given, ranks = graph.defaults, zip(("dp", "cp", "ep"), structure.ranks, strict=False)
        if structure.ranks:  # what is stated anew has what was derived of a graph forgotten
            graph.defaults = {**given, **{self.names[d]: n for d, n in ranks}}
        try:
            yield
        finally:
            if structure.ranks:
                graph.defaults = given

    def degree(self, name: str, structure: Structure) -> object:
        """Return a degree of a structure, as parallelize takes it."""
        found = getattr(structure, name)
        if isinstance(found, str):
            return symbol(found) * symbol(self.names[name])
        return symbol(self.names[name]) if found is None else found

    @collection_paused()
    def forms(self, structure: Structure) -> Forms:
        """Derive what ranks of a structure take, of graphs that are derived already if these are the same."""
        like, kinds = structure.like(), self.derived.kinds
        if like not in kinds:
            rank = self.split(self.step(structure), like)
            kinds[like] = [self.formed(graph, like) for graph in stages_of(rank)]
        own = [
            kind.beside(self.policies.overlap, self.rings, charge_all=self.policies.charge_all) for kind in kinds[like]
        ]
        if structure.pp == 1:
            return Forms({"all": own[0]}, self.names)
        return Forms(dict(self.waiting(structure, own)), self.names, self.layers)

    def waiting(self, structure: Structure, kinds: Sequence[Kind]) -> Any:
        """Yield the kinds of stages by name, each with what waits there under a schedule."""
        made = SCHEDULES[structure.schedule]
        p, m = (self.poly(d, structure) for d in ("pp", "accumulate"))
        turn, groups = (poly(symbol(self.names[d])) for d in ("rank", "virtual"))
        order = Order(structure.schedule, p, m, groups if made.chunks is None else poly(made.chunks))
        # a folded pipeline ends where it has begun, one that goes both ways at both ends
        both = made.both_ways
        ranks = {
            "first": Stage("first", (ZERO,), ONE, ONE, first=True, last=made.folded),
            "middle": Stage("middle", (ONE, p / 2 - 1 if both else turn), ONE, ONE),
            "less": Stage("less", (turn + 1, p - 2), ONE, ONE),
            "last": Stage("last", (ZERO if both else p - 1,), ONE, ONE, first=both, last=both or not made.folded),
        }
        first, *between, last = kinds
        graphs = {"first": first, "last": last} | {name: kind for name in ("middle", "less") for kind in between}
        for name in ranks.keys() & graphs.keys():
            found = copy(graphs[name])
            found.waiting, found.programs = waiting_of(order, ranks[name], torch=self.system == "torch"), {}
            yield name, found

    def formed(self, rank: Graph, structure: Structure) -> Kind:
        """Derive what a rank takes; the number of layers of a stage stays open."""
        known, waiting = known_names(rank), rank.waiting
        left = () if structure.pp == 1 else (self.layers,)
        if left:
            assert waiting is not None
            rank.waiting = replace(waiting, first=(), later=(), asked=())  # schedules have their own
        own = {*left, *self.names.values()}
        rank.defaults = {name: n for name, n in rank.defaults.items() if name not in own}
        dims = {name: n for name, n in self.dims.items() if name in known and name not in left}
        asked = ask(rank, self.hardware, self.fallback, dims, "search")
        return Kind(asked, waiting, self.rings)

    @cached_property
    def rings(self) -> Rings | None:
        """Times over rings of the network, where it is a torus."""
        torus = self.hardware.cluster is not None and self.hardware.cluster.torus
        return Rings(self.hardware) if torus else None

    def poly(self, name: str, structure: Structure) -> Poly:
        """Return a degree of a structure."""
        return poly(self.degree(name, structure))

    def state(self, structure: Structure) -> StateBytes:
        """Return the bytes of parameters, gradients and states: those of any step of the same number formats."""
        name = structure.precision
        states, steps = self.derived.states, self.derived.steps
        if name not in states:
            step = next((g for (made, _, _), g in steps.items() if made == name), None) or self.step(structure)
            sizes = {**self.dims, **dict.fromkeys((self.batch, self.names["accumulate"]), 1)}  # parameters have neither
            states[name] = state_bytes(step, **{n: size for n, size in sizes.items() if n in known_names(step)})
        return states[name]

    def least(self, structure: Structure, degrees: Mapping[str, Any]) -> Any:
        """Return bytes that no rank of a structure is below: parameters, gradients and states in equal parts."""
        found = self.state(structure)
        ranks = degrees["tp"] * degrees["pp"] * degrees["ep"]
        split = ranks * degrees["dp"] * degrees["cp"]
        # gradients go to where their updates are as they are made
        places = {"parameters": {3}, "optimizer": {1, 2}}
        away = {stage for name in structure.offload for stage in places.get(name, ())}
        by_stage = zip((3, 2, 1), (found.params, found.gradients, found.state), strict=True)
        kept = [(stage, float(amount)) for stage, amount in by_stage if stage not in away]
        return sum((amount / (split if structure.zero >= stage else ranks) for stage, amount in kept), 0 * ranks)

    def goes_over(self, batch: int) -> tuple[int, str]:
        """Return the tokens of a step, or its samples, and which of both."""
        amount, unit = goes_over(self.model, poly(symbol(self.batch)))
        known = bindings(self.model, {**self.dims, self.batch: batch})
        left = [name for name in sorted(known_names(self.model)) if name not in known or known[name].constant is None]
        if left:
            raise BindingError(f"search: graph {self.model.name!r} needs sizes for {', '.join(left)}, expected numbers")
        count = amount.bind(known).constant
        assert count is not None  # all sizes are known
        return int(count), unit

    def tensor(self, tp: int) -> int | str | None:
        """Return how a degree of tensor parallelism can be asked for: None where open, itself, or 0 where not at all.

        Of fewer heads of keys and values than ranks the graph is another one: where the degree is a multiple of a
        dimension that says how many, that is asked for, which is one graph for all of these.
        """
        if tp == 1:
            return 1
        sizes = {name: self.size(name) or tp for name in sorted({*self.model.defaults, *self.dims})}
        multiples = [name for name, n in sizes.items() if 1 < n < tp and not tp % n]
        for way in (None, *multiples, tp):
            structure = Structure(0, False, "none", tp=way)
            try:
                made = self.split(self.model, structure)
                own = self.names["tp"]
                given = self.sizes({**dict.fromkeys((*DEGREES, "micro_batch"), 1), "tp": tp}, structure)
                bindings(made, {**self.dims, **({own: given[own]} if way != tp else {})})
            except CostGraphError as error:
                self.unsplit[tp] = str(error)
                continue
            if not isinstance(way, str) or (made.sharding is not None and made.sharding.mesh.joint):
                self.unsplit.pop(tp, None)
                return way
        return 0

    def experts(self) -> bool:
        """Whether the model has experts that ranks may have some of."""
        try:
            self.split(self.model, Structure(0, False, "none", ep=None))
        except CostGraphError:
            return False
        return True


def _split(sizes: tuple[float, ...], ranks: int) -> int:
    """Return which axis some ranks split: the longest that they divide, or the longest."""
    return max(range(len(sizes)), key=lambda i: (sizes[i] == inf or not sizes[i] % ranks, sizes[i], -i))
