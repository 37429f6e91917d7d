"""Structures of plans: what changes the graph of a rank, each with closed forms in all that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, TypeAlias

import numpy as np

from ..algebra.extremum import as_expr
from ..algebra.polynomial import Poly, poly, total
from ..algebra.symbols import symbol
from ..analysis.exchange import exchange
from ..analysis.memory import peak_memory
from ..analysis.seconds import Spent, as_seconds, estimate, spent, together
from ..analysis.training import tokens_poly
from ..analysis.training_memory import state_bytes
from ..analysis.work import Asked, Fallback, Work, ask
from ..bind.evaluate import Compiled, Formula, compile
from ..errors import BindingError, CostGraphError, GraphError
from ..graph.graph import Graph
from ..graph.sizes import bindings, known_names, size_of, stages
from ..hardware.specs import Hardware
from ..ops.collectives import Collective
from ..ops.hops import Send
from ..transforms.checkpoint import read_checkpoint
from ..transforms.rewrite import Rewriter
from ..transforms.shard.parallelize import parallelize
from ..transforms.training import training_step
from .pipeline import bubble

__all__ = ["DEGREES", "Fallback", "Family", "Forms", "Structure", "IDLE", "batch_of", "evaluated", "spent_in"]

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Parts of the time of a step beside collectives, which are parts of their own; idle is a stage of a pipeline while
#: others work on the first and on the last micro-batches.
COMPUTE, MEMORY, IDLE = "compute", "memory traffic", "idle"
#: The stage from which on gradients are split: those of each micro-batch are reduced.
_SPLIT = 2
#: Layers of a stage from which on one closed form holds; of fewer, each number has its own.
_SURE = 3
DEGREES = ("dp", "tp", "pp", "cp", "ep", "accumulate")


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


@dataclass(frozen=True)
class Forms:
    """Closed forms of a rank, as functions of arrays."""

    peak: Compiled
    seconds: Compiled
    """all of a step that is not waited"""
    parts: Mapping[str, Formula]
    """by what the time goes into; not compiled, since most structures have no plan that fits"""
    idle: Compiled | None = None
    """time of a stage of a pipeline that waits for others"""
    stage: int = 0
    """which of the kinds of stages it is"""
    layers: Mapping[str, Array] = field(default_factory=dict)
    """layers of the stage, by name"""
    there: Array | None = None
    """for which points it is one of the stages, and holds"""

    def in_parts(self) -> dict[str, Compiled]:
        """Return what the time of a step goes into, waiting included."""
        parts = {name: _compiled(formula) for name, formula in self.parts.items()}
        return parts if self.idle is None else {**parts, IDLE: self.idle}


class _Laid(Rewriter):
    """Puts sizes into the graph of a rank."""

    lies = True


@dataclass
class Family:
    """Steps of training of one model on one device, and the closed forms of its structures."""

    model: Graph
    batch: str
    """name of the dimension of the batch"""
    hardware: Hardware
    fallback: Fallback
    overlap: str
    reduce: str
    """each, or last: micro-batches that reduce gradients which ranks have whole"""
    options: Mapping[str, Any]
    """of `training_step`"""
    dims: Mapping[str, Any]
    """sizes, all but that of the batch"""
    steps: dict[tuple[str, int | None], Graph] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of the degrees as dimensions, which are none of the model."""
        known = known_names(self.model)
        return {d: next(n for i in range(len(known) + 1) if (n := d + "_" * i) not in known) for d in DEGREES}

    @cached_property
    def layers(self) -> str | None:
        """Name of the number of layers, None where a pipeline has nothing to cut: a loop of a count that is a name."""
        loops = [op.loop for op in self.model.ops if op.loop is not None and op.loop.starts]
        names = sorted(loops[0].count.names()) if len(loops) == 1 else []
        return names[0] if len(names) == 1 and self.size(names[0]) is not None else None

    def size(self, name: str) -> int | None:
        """Return what a dimension of the model is bound to."""
        found = self.dims.get(name, self.model.defaults.get(name))
        return None if found is None else size_of(f"search: {name}", found)

    def sizes(self, degrees: Mapping[str, Any], micro_batch: Any, structure: Structure) -> dict[str, Any]:
        """Return what the formulas are in, for degrees: their batch is that of all ranks, of one micro-batch."""
        found = {self.names[d]: n for d, n in degrees.items()}
        if isinstance(structure.tp, str):
            found[self.names["tp"]] = degrees["tp"] // self.size(structure.tp)
        return {**found, self.batch: micro_batch * degrees["dp"] * degrees["ep"]}

    def cuts(self, structure: Structure, pp: Array) -> list[tuple[Array, Array]]:
        """Return the layers of the first, a middle and the last stage, and of which pipelines it is one.

        Where layers are no multiple of the stages, the last one has one less, then the first one, which have more to do
        beside layers, then middle ones, of which there are some as large as any.
        """
        if structure.pp == 1:
            return [(np.full(len(pp), _SURE), np.ones(len(pp), dtype=bool))]
        depth = self.size(self.layers or "") or 1
        most = -(-depth // pp)
        missing = most * pp - depth
        found = [(most - (missing >= m), pp > few) for m, few in ((2, 1), (inf, 2), (1, 1))]
        return found if structure.pp != 2 else [found[0], found[2]]

    def step(self, structure: Structure) -> Graph:
        """Return the step of all devices together."""
        key, times = (structure.checkpoint, structure.accumulate), structure.accumulate
        if key not in self.steps:
            times = symbol(self.names["accumulate"]) if times is None else times
            policy = read_checkpoint(structure.checkpoint)
            self.steps[key] = training_step(self.model, checkpoint=policy, accumulate=times, **self.options)
        return self.steps[key]

    def split(self, graph: Graph, structure: Structure) -> Graph:
        """Return the graph of a rank; the sizes of a stage of a pipeline leave the number of layers open."""
        degrees = {d: self.degree(d, structure) for d in DEGREES if d != "accumulate"}
        if structure.pp != 1:
            degrees["micro_batches"] = self.degree("accumulate", structure)
        made = parallelize(graph, **degrees, zero=structure.zero, sequence=structure.sequence)  # type: ignore[arg-type]
        if made.parts:
            made.parts = tuple(self.by_layers(stage, structure) for stage in made.parts)
        return made

    def by_layers(self, stage: Graph, structure: Structure) -> Graph:
        """Return the graph of a stage in the number of its own layers."""
        assert self.layers is not None
        made = _Laid({self.layers: poly(symbol(self.layers)) * self.poly("pp", structure)}).run(stage)
        made.defaults = {name: n for name, n in made.defaults.items() if name != self.layers}
        return made

    def degree(self, name: str, structure: Structure) -> object:
        """Return a degree of a structure, as parallelize takes it."""
        found = getattr(structure, name)
        if isinstance(found, str):
            return symbol(found) * symbol(self.names[name])
        return symbol(self.names[name]) if found is None else found

    def forms(self, structure: Structure, pp: Array) -> list[Forms]:
        """Derive the closed forms of a structure for some numbers of stages: several of each stage of a pipeline."""
        rank, out = self.split(self.step(structure), structure), []
        for stage, (graph, (layers, there)) in enumerate(zip(stages(rank), self.cuts(structure, pp), strict=True)):
            kinds = np.where(there, np.minimum(layers, _SURE), 0)
            for n in sorted({*kinds.tolist()} - {0}):
                found = self.formed(graph, structure, n if n < _SURE else None)
                more = {self.layers: layers} if self.layers else {}
                out.append(replace(found, stage=stage, layers=more, there=kinds == n))
        return out

    def formed(self, rank: Graph, structure: Structure, layers: int | None) -> Forms:
        """Derive the closed forms of a rank, of a stage with so many layers or any number of them."""
        known = known_names(rank)
        dims = {name: n for name, n in self.dims.items() if name in known}
        if structure.pp != 1 and self.layers in known:
            assert self.layers is not None
            dims = {name: n for name, n in (dims | {self.layers: layers}).items() if n is not None}
        asked = ask(rank, self.hardware, self.fallback, dims, "search")
        once: list[Work] = []
        if self.reduce == "last" and structure.zero < _SPLIT and structure.accumulate != 1:
            count = self.poly("accumulate", structure)
            once = [_by_last(w, count) for w in asked.works if _reduces(w)]
            asked = replace(asked, works=[w for w in asked.works if not _reduces(w)] + once)
        times = [_spent(w, asked) for w in asked.works]
        parts = {name: as_seconds(p, asked.values) for name, p in _parts(asked, times).items()}
        busy, idle = self.together(times, asked), None
        if structure.pp != 1:
            each = [
                (w, t)
                for w, t in zip(asked.works, times, strict=True)
                if w.op.phase != "optimizer" and all(w is not o for o in once)
            ]
            share = bubble("1f1b", self.poly("pp", structure).expr, self.poly("accumulate", structure).expr)
            # updates, and what the last micro-batch reduces, come behind all of them
            waited = self.together([t for _, t in each], replace(asked, works=[w for w, _ in each]))
            idle = _compiled(as_seconds(poly(as_expr(share)) * waited, asked.values))
        seconds = _compiled(as_seconds(busy, asked.values))
        return Forms(_compiled(peak_memory(rank, **dims)), seconds, parts, idle)

    def together(self, times: Sequence[Sequence[Spent]], asked: Asked) -> Poly:
        """Return the time of a rank; what goes to other stages is waited for, whatever else overlaps."""
        both = [*zip(asked.works, times, strict=True)]
        alone = [pair for pair in both if not _between(pair[0])]
        rest = together([t for _, t in alone], replace(asked, works=[w for w, _ in alone]), self.overlap)
        return rest + estimate([t for w, t in both if _between(w)], asked.graph.root.relations)

    def poly(self, name: str, structure: Structure) -> Poly:
        """Return a degree of a structure."""
        return poly(self.degree(name, structure))

    def least(self, structure: Structure, degrees: Mapping[str, Any]) -> Any:
        """Return bytes that no rank of a structure is below: parameters, gradients and states in equal parts."""
        step = self.step(structure)
        sizes = {**self.dims, **dict.fromkeys((self.batch, self.names["accumulate"]), 1)}  # parameters have neither
        found = state_bytes(step, **{name: n for name, n in sizes.items() if name in known_names(step)})
        ranks = degrees["tp"] * degrees["pp"] * degrees["ep"]
        split = ranks * degrees["dp"] * degrees["cp"]
        by_stage = zip((3, 2, 1), (found.params, found.gradients, found.state), strict=True)
        return sum(float(amount) / (split if structure.zero >= stage else ranks) for stage, amount in by_stage)

    def tokens(self, batch: int) -> int:
        """Return the tokens of a step."""
        values = bindings(self.model, {**self.dims, self.batch: batch})
        found = tokens_poly(self.model).bind(values)
        if found.constant is None:
            left = ", ".join(sorted(found.names()))
            raise BindingError(f"search: graph {self.model.name!r} needs sizes for {left}, expected numbers")
        return int(found.constant)

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
                given = self.sizes({**dict.fromkeys(DEGREES, 1), "tp": tp}, 1, structure)
                bindings(made, {**self.dims, **({own: given[own]} if way != tp else {})})
            except CostGraphError:
                continue
            if not isinstance(way, str) or (made.sharding is not None and made.sharding.mesh.joint):
                return way
        return 0

    def experts(self) -> bool:
        """Whether the model has experts that ranks may have some of."""
        try:
            self.split(self.model, Structure(0, False, "none", ep=None))
        except CostGraphError:
            return False
        return True


def spent_in(forms: Forms, sizes: Mapping[str, Array]) -> Array:
    """Return the seconds of a step, waiting included."""
    idle = 0 if forms.idle is None else evaluated(forms.idle, sizes)
    return evaluated(forms.seconds, sizes) + idle


def batch_of(model: Graph) -> str:
    """Return the name of the dimension of the batch: the first axis of all inputs."""
    firsts = {t.sizes[0] for t in model.tensors if t.producer is None and t.role == "input" and t.ndim}
    names = {name for n in firsts for name in n.names()}
    if len(names) != 1 or firsts != {poly(symbol(*names))}:
        found = ", ".join(sorted(map(str, firsts))) or "no axis"
        raise GraphError(
            f"search: inputs of graph {model.name!r} begin with {found}, expected one dimension: the batch"
        )
    return names.pop()


def _reduces(work: Work) -> bool:
    """Whether an op reduces gradients that ranks have whole over these; what else goes over `cp` and `ep` is parts."""
    found = work.collective
    if found is None or work.op.phase != "backward":
        return False
    return found.axis == "dp" or (found.axis in ("cp", "ep") and found.collective == "all_reduce")


def _by_last(work: Work, count: Poly) -> Work:
    """Return what reduces a gradient as the last of some micro-batches does it alone."""
    flops = {key: amount / count for key, amount in work.flops.items()}
    return replace(work, times=work.times / count, bytes=work.bytes / count, flops=flops)


def _compiled(formula: Formula) -> Compiled:
    return compile(formula, outside="nan")


def _between(work: Work) -> bool:
    """Whether an op is between stages of a pipeline."""
    return isinstance(work.op.kind, Send | Collective) and work.op.kind.axis == "pp"


def _spent(work: Work, asked: Asked) -> list[Spent]:
    """Return the times of an op, of a send to the next stage on its link as well."""
    found = spent(work, asked)
    if isinstance(work.op.kind, Send):
        once, link = exchange(work.op, asked.graph, asked.values, asked.hardware)
        found.append((once * work.times, link))
    return found


def _sent_as(work: Work) -> str | None:
    """Return what a collective or a send is called among the parts of the time, None for what a device does alone."""
    if isinstance(work.op.kind, Send):
        return f"send over {work.op.kind.axis}"
    return None if work.collective is None else f"{work.collective.collective} over {work.collective.axis}"


def _parts(asked: Asked, times: Sequence[Sequence[Spent]]) -> dict[str, Poly]:
    """Return the time of a step in parts: FLOPs at their rates, what memory takes beyond these, each collective."""
    known = asked.graph.root.relations
    sent: dict[str | None, list[Sequence[Spent]]] = {None: []}
    for w, found in zip(asked.works, times, strict=True):
        sent.setdefault(_sent_as(w), []).append(found)
    compute = total(w.seconds(asked.rates)[0] for w in asked.works if _sent_as(w) is None)
    out = {COMPUTE: compute, MEMORY: estimate(sent.pop(None), known) - compute}
    return out | {name: estimate(found, known) for name, found in sent.items() if name is not None}


def evaluated(form: Compiled, sizes: Mapping[str, Array]) -> Array:
    """Return the value of a formula at each point, NaN where its graph refuses the sizes."""
    count = len(next(iter(sizes.values())))
    found = form(**{n: sizes[n] for n in form.names}) if form.names else float(form.formula)
    return np.broadcast_to(np.asarray(found, dtype=np.float64), count)
