"""Structures of plans: what changes the graph of a rank, each with closed forms in all that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..algebra.polynomial import Poly, poly, total
from ..algebra.symbols import symbol
from ..analysis.memory import peak_memory
from ..analysis.seconds import as_seconds, estimate, spent, together
from ..analysis.training import tokens_poly
from ..analysis.work import Asked, Fallback, Work, ask
from ..bind.evaluate import Compiled, Formula, compile
from ..errors import BindingError, CostGraphError, GraphError
from ..graph.graph import Graph
from ..graph.sizes import bindings, known_names
from ..hardware.specs import Hardware
from ..transforms.checkpoint import read_checkpoint
from ..transforms.shard.parallelize import parallelize
from ..transforms.training import training_step

__all__ = ["DEGREES", "Fallback", "Family", "Forms", "Structure", "batch_of", "evaluated"]

#: Parts of the time of a step beside collectives, which are parts of their own.
COMPUTE, MEMORY = "compute", "memory traffic"
#: The stage from which on gradients are split: those of each micro-batch are reduced.
_SPLIT = 2
DEGREES = ("dp", "tp", "accumulate")


@dataclass(frozen=True)
class Structure:
    """What changes the graph: plans of one structure differ in numbers that its formulas are in.

    A degree is 1, which takes its collectives out of the graph, None where it is open, or a number where no formula
    holds with it open. What a pipeline does to the graph belongs here too.
    """

    zero: int
    sequence: bool
    checkpoint: str
    dp: int | None
    tp: int | None
    accumulate: int | None


@dataclass(frozen=True)
class Forms:
    """Closed forms of a structure, as functions of arrays."""

    peak: Compiled
    seconds: Compiled
    parts: Mapping[str, Compiled]
    """by what the time goes into"""


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

    def sizes(self, dp: Any, tp: Any, micro_batch: Any, accumulate: Any) -> dict[str, Any]:
        """Return what the formulas are in, for degrees: their batch is that of all ranks, of one micro-batch."""
        found = {self.names[d]: n for d, n in zip(DEGREES, (dp, tp, accumulate), strict=True)}
        return {**found, self.batch: micro_batch * dp}

    def step(self, structure: Structure) -> Graph:
        """Return the step of all devices together."""
        key, times = (structure.checkpoint, structure.accumulate), structure.accumulate
        if key not in self.steps:
            times = symbol(self.names["accumulate"]) if times is None else times
            policy = read_checkpoint(structure.checkpoint)
            self.steps[key] = training_step(self.model, checkpoint=policy, accumulate=times, **self.options)
        return self.steps[key]

    def split(self, graph: Graph, structure: Structure) -> Graph:
        """Return the graph of a rank."""
        degrees: dict[str, object] = {
            d: symbol(self.names[d]) if n is None else n for d, n in (("dp", structure.dp), ("tp", structure.tp))
        }
        return parallelize(graph, **degrees, zero=structure.zero, sequence=structure.sequence)  # type: ignore[arg-type]

    def forms(self, structure: Structure) -> Forms:
        """Derive the closed forms of a structure."""
        rank = self.split(self.step(structure), structure)
        asked = ask(rank, self.hardware, self.fallback, self.dims, "search")
        if self.reduce == "last" and structure.zero < _SPLIT and structure.accumulate != 1:
            count = symbol(self.names["accumulate"]) if structure.accumulate is None else structure.accumulate
            asked = replace(asked, works=[_by_last(w, poly(count)) for w in asked.works])
        times = [spent(w, asked) for w in asked.works]
        made = {name: _compiled(as_seconds(p, asked.values)) for name, p in _parts(asked).items()}
        whole = as_seconds(together(times, asked, self.overlap), asked.values)
        return Forms(_compiled(peak_memory(rank, **self.dims)), _compiled(whole), made)

    def tokens(self, batch: int) -> int:
        """Return the tokens of a step."""
        values = bindings(self.model, {**self.dims, self.batch: batch})
        found = tokens_poly(self.model).bind(values)
        if found.constant is None:
            left = ", ".join(sorted(found.names()))
            raise BindingError(f"search: graph {self.model.name!r} needs sizes for {left}, expected numbers")
        return int(found.constant)

    def tensor(self, tp: int) -> int | None:
        """Return how a degree of tensor parallelism can be asked for: None where open, itself, or 0 where not at all.

        Of fewer heads of keys and values than ranks the graph is another one, for which the number has to be known.
        """
        if tp == 1:
            return 1
        for structure in (Structure(0, False, "none", 1, None, 1), Structure(0, False, "none", 1, tp, 1)):
            try:
                made = self.split(self.model, structure)
                sizes = {self.names["tp"]: tp} if structure.tp is None else {}
                bindings(made, {**self.dims, **sizes})
            except CostGraphError:
                continue
            return structure.tp
        return 0


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


def _by_last(work: Work, count: Poly) -> Work:
    """Return what reduces a gradient over ranks of data as the last of some micro-batches does it alone."""
    if work.collective is None or work.collective.axis != "dp" or work.op.phase != "backward":
        return work
    flops = {key: amount / count for key, amount in work.flops.items()}
    return replace(work, times=work.times / count, bytes=work.bytes / count, flops=flops)


def _compiled(formula: Formula) -> Compiled:
    return compile(formula, outside="nan")


def _parts(asked: Asked) -> dict[str, Poly]:
    """Return the time of a step in parts: FLOPs at their rates, what memory takes beyond these, each collective."""
    known = asked.graph.root.relations
    alone = [w for w in asked.works if w.collective is None]
    compute = total(w.seconds(asked.rates)[0] for w in alone)
    out = {COMPUTE: compute, MEMORY: estimate([spent(w, asked) for w in alone], known) - compute}
    sent: dict[str, list[Any]] = {}
    for w in asked.works:
        if w.collective is not None:
            sent.setdefault(f"{w.collective.collective} over {w.collective.axis}", []).append(spent(w, asked))
    return out | {name: estimate(found, known) for name, found in sent.items()}


def evaluated(form: Compiled, sizes: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the value of a formula at each point, NaN where its graph refuses the sizes."""
    count = len(next(iter(sizes.values())))
    found = form(**{n: sizes[n] for n in form.names}) if form.names else float(form.formula)
    return np.broadcast_to(np.asarray(found, dtype=np.float64), count)
