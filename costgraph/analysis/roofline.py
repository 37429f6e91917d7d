"""Roofline: for each op the time in compute and the time in memory, the larger of which bounds it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..algebra.dominance import Relations, prune
from ..algebra.extremum import Max
from ..algebra.polynomial import ZERO, Poly, poly, total
from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, answer, need_bound
from ..errors import SpecError
from ..hardware.networks import Network
from ..hardware.specs import Hardware, Level, StandIn
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import Graph, need_choice
from ..notation.validation import guarded
from .costs import compulsory
from .registrations import plotter
from .step_time import (
    OVERLAPS,
    Bound,
    Spent,
    as_declared,
    holds_for,
    in_seconds,
    in_total,
    largest,
    least,
    lower_bound,
    spent,
    stages_asked,
    together,
    warn_of,
    which,
)
from .work import Asked, Fallback, Work

__all__ = ["Roofline", "RooflineRow", "bound_roofline", "roofline"]


#: Of a condition that a table shows.
_WIDEST = 60


@dataclass(frozen=True)
class RooflineRow:
    """One op on the roofline, all its iterations together."""

    op: str
    """name of the op"""
    scope: str
    """module scope"""
    phase: str
    """phase of the op"""
    kind: str
    """kind of most of its FLOPs, or data where it has none"""
    flops: Formula
    """FLOPs"""
    bytes: Formula
    """bytes moved"""
    compute_s: Formula
    """seconds at the peak rates of its kinds and formats"""
    memory_s: Formula
    """seconds at the bandwidth of the memory, or of the link for a transfer"""
    bound: str | Bound
    """compute, memory, a link or a cache: the largest of the times; a condition where that depends on what is open"""
    caches_s: Mapping[str, Formula] = field(default_factory=dict)
    """seconds at the bandwidth of each cache, where these are taken into account"""
    links_s: Mapping[str, Formula] = field(default_factory=dict)
    """of a collective the seconds over its links: interconnect, network where it leaves a domain, link while a degree
    that decides is open"""

    @property
    def seconds(self) -> Formula:
        """The largest of the times."""
        if isinstance(self.bound, Bound):
            return answer(Max(self.compute_s, self.memory_s, *self.caches_s.values(), *self.links_s.values()))
        return {"compute": self.compute_s, **self.caches_s, **self.links_s}.get(self.bound, self.memory_s)

    @property
    def intensity(self) -> Formula:
        """FLOP/B; infinite where nothing is moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def attainable(self) -> Formula:
        """FLOP/s that the roof allows at this intensity."""
        return self.flops / self.seconds if self.seconds else 0.0


@guarded()
@dataclass(frozen=True, repr=False)
class Roofline(Table):
    """A graph on the roof of a device."""

    graph: str
    """name of the graph"""
    hardware: Hardware
    """the device"""
    rows: tuple[RooflineRow, ...]
    """ops that do something, in program order"""
    flops: Formula
    """FLOPs of all ops, as executed"""
    bytes: Formula
    """bytes moved as declared, each op one kernel"""
    fused_bytes: Formula
    """bytes that no fusion avoids"""
    ridge: Formula
    """FLOP/B at which the peak of the graph's main kind of FLOPs and the bandwidth meet"""
    lower_bound: Formula
    """seconds below which no run is, given `start`: the busiest unit, or the fused bytes"""
    estimate: Formula
    """seconds as declared: sum over ops of the largest of compute, memory and link time; see `overlap`"""
    rates: Mapping[str, Formula]
    """FLOP/s of each unit and number format that the ops use, such as `matmul bf16`"""
    stand_ins: tuple[StandIn, ...] = ()
    """rates in the place of those that the device has none of"""
    levels: tuple[Level, ...] = ()
    """levels of memory that are taken into account, the memory itself first; empty where that was not asked for"""
    overlap: str = "none"
    """what collectives are assumed to do beside all else: none, ideal or streams"""
    start: str = "cold"
    """where operands start in the lower bound: cold, in device memory; warm, in the last-level cache as far as
    they fit"""

    def _about(self) -> str:
        return f"graph {shorten(self.graph)} on {self.hardware.id}: {len(self.rows)} rows"

    def _columns(self) -> Sequence[Column]:
        return (
            *map(Column, ("op", "scope", "phase", "kind")), Column("flops", "FLOP"), Column("bytes", "B"),
            Column("intensity", "FLOP/B"), Column("compute_s", "s", title="compute"),
            Column("memory_s", "s", title="memory"),
            *([Column("links_s", "s", _on_links, "links")] if any(r.links_s for r in self.rows) else []),
            *(Column(f"{level.name}_s", "s", partial(_in_cache, level.name), level.name) for level in self.levels[1:]),
            Column("bound", text=_short), Column("attainable", "FLOP/s"),
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        return (
            Fact("FLOPs", self.flops, "FLOP"), Fact("bytes moved", self.bytes, "B"),
            Fact("lower bound", self.lower_bound, "s"), Fact("estimate", self.estimate, "s"),
            *(Fact("note", note) for note in self.notes),
        )  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader has to know of the times: rates that stand in, overlap, missing levels of memory."""
        return (*map(str, self.stand_ins), *self._notes())

    def _notes(self) -> Iterator[str]:
        if self.overlap != "none":
            how = {"ideal": "the larger of both", "streams": "when the last of all streams is done"}[self.overlap]
            yield f"collectives take their time beside all else: the estimate is {how}"
        if len(self.levels) == 1:
            has = "of caches it has sizes alone" if self.levels[0].nearer else "it has no caches"
            yield f"{self.hardware.id} has no bandwidth of a cache, {has}: the memory is its only level"
        if self.levels and not self.levels[0].whole:
            yield f"{self.hardware.id} lacks the size of registers or of first caches: no cache is in the lower bound"

    @property
    def intensity(self) -> Formula:
        """FLOP/B as declared."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def fused_intensity(self) -> Formula:
        """FLOP/B of the bytes that no fusion avoids."""
        return self.flops / self.fused_bytes if self.fused_bytes else math.inf

    @property
    def bound(self) -> str:
        """What bounds most of the estimated time: compute, memory or link; BindingError while a size is open."""
        need_bound([self.estimate], f"bound of graph {self.graph!r}")
        times: dict[str, float] = {}
        for r in self.rows:
            times[str(r.bound)] = times.get(str(r.bound), 0.0) + r.seconds
        return max(times, key=lambda k: times[k], default="memory")

    def plot(self, path: object = None) -> object:
        """Draw the ops on the log-log roof, the ridge marked; needs matplotlib.

        Parameters
        ----------
        path : str or path-like, optional
            File to write.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.

        Raises
        ------
        BindingError
            If a size is open.
        """
        need_bound([self.estimate, self.ridge], f"plot of graph {self.graph!r}")
        return plotter("roofline")(self, path)


def roofline(
    graph: Graph,
    hardware: str | Hardware,
    /,
    *,
    fallback: Fallback = None,
    hierarchical: bool = False,
    overlap: str = "none",
    network: str | Network | None = None,
    bound: str = "cold",
    **dims: int,
) -> Roofline:
    """Place every op of a graph on the roof of a device.

    Parameters
    ----------
    graph : Graph
        What is asked; of a pipeline the rows and sums are those of its slowest stage, of the last one where sizes are
        open, and the estimate is that of the whole step, as in `seconds`.
    hardware : str, path-like or Hardware
        Name of a device, path of a TOML file, or what `load_hardware` returned.
    fallback : str or mapping, optional
        Number format whose rate stands in for one that the device lacks, or a mapping from wanted to used format.
    hierarchical : bool
        Take each level of memory into account: an op takes no less than its traffic out of each one, which is the least
        that any schedule moves through all stores that are nearer to the arithmetic, as `bytes_moved` with `cache=`.
    overlap : str
        What the estimate assumes of collectives: none, they and all else follow each other; ideal, both fill the same
        time, so that the larger sum remains; streams, one runs those over each axis of a mesh, and one all else, in the
        order of the program, each once its operands are there: all sizes are bound then.
    network : str, path-like or Network, optional
        Name, TOML file or record of the network between the domains of the interconnect; without it any device
        reaches any other at the rate of its network card.
    bound : {"cold", "warm"}
        Where the lower bound assumes that operands start. "cold": in device memory, which is true of a model that is
        larger than the caches. "warm": the last-level cache holds as many bytes of operands and results as fit, as
        when a benchmark runs one kernel again on the same data; these bytes are subtracted.
    **dims : int
        Sizes; with one left open, times are formulas, and what bounds an op may be a condition.

    Returns
    -------
    Roofline
        `.rows`, `.lower_bound` and `.estimate` in seconds, `.stand_ins` for rates that are missing, `.plot(path)`.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    SpecError
        If the device is unknown, has no rate at all, or lacks what is said of a link that a collective goes over; if
        `bound="warm"` and the size of its last-level cache is unknown.
    UnsupportedError
        If a collective is over an axis that the graph has no mesh for, or streams are to run more than a million ops.

    Notes
    -----
    Of Williams, Waterman and Patterson 2009: time in compute is the sum over kinds of FLOPs of FLOPs / peak rate, time
    in memory is bytes / bandwidth. Contractions run at the matrix rate of their format, all else on the vector unit.
    Units that can overlap (matrix, vector, memory, link) are not summed in the lower bound; of hardware that is an
    unknown, all can. For a missing rate the next wider format stands in, then the matrix unit, then the nearest
    format; in the lower bound the highest rate of the device. The ranks of a collective fill the domains of the
    interconnect, those along the last axis of a mesh next to each other; `costgraph.analysis.collective_time` has its
    time. In the lower bound a convolution has the fewest products that an
    algorithm is known to need, and a device the highest clock that it was seen to reach.

    With `hierarchical` (Yang, Kurth and Williams 2020, but with traffic that is derived, not measured) the levels are
    the memory and each cache whose bandwidth the specification has. The lower bound then holds what one product of
    inputs and parameters has to move out of the memory, where all that is nearer is known, registers included.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> [cg.roofline(g, "h100-sxm", N=n).rows[0].bound for n in (512, 1024)]
    ['memory', 'compute']
    >>> cold, warm = (cg.roofline(g, "h100-sxm", N=512, bound=start).lower_bound for start in ("cold", "warm"))
    >>> cold > warm  # 1.5 MiB fit the L2 cache
    True
    """
    need_choice("roofline: overlap", overlap, OVERLAPS)
    need_choice("roofline: bound", bound, ("cold", "warm"))
    stages = stages_asked(graph, hardware, fallback, dims, "roofline", hierarchical=hierarchical, network=network)
    if bound == "warm":
        stages = [replace(asked, resident=_resident(asked.hardware)) for asked in stages]
    return replace(_of_all(graph, stages, overlap), start=bound)


def _resident(hardware: Hardware) -> Poly:
    size = hardware.last_level_cache
    if size is None:
        raise SpecError(
            f"roofline: bound='warm' needs the size of the last-level cache, and hardware {hardware.id!r} states none; "
            f"add cache.l2 or cache.last_level to its file, or ask for bound='cold'"
        )
    return poly(size.value)


def _in_cache(name: str, row: RooflineRow) -> Formula | None:
    return row.caches_s.get(name)


def _on_links(row: RooflineRow) -> Formula | None:
    return next(iter(row.links_s.values()), None)


def _short(bound: str | Bound) -> str:
    text = str(bound)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def bound_roofline(
    question: str, graph: Graph, hardware: Hardware, fallback: Fallback, dims: Mapping[str, object],
    network: str | Network | None = None,
) -> Roofline:  # fmt: skip
    """Return a roofline of numbers alone, with a warning of rates that stand in: for answers made of it.

    BindingError if a symbol is left, naming all of them.
    """
    stages = stages_asked(graph, hardware, fallback, dims, question, network=network)
    for asked in stages:
        asked.need_numbers(question)
    found = _of_all(graph, stages)
    warn_of(hardware, found.stand_ins)
    return found


def _of_all(graph: Graph, stages: Sequence[Asked], overlap: str = "none") -> Roofline:
    """Return the roofline of a graph; of a pipeline that of its slowest stage, or the last one."""
    if not graph.parts:
        return _placed(stages[0], overlap)
    whole = in_total(as_declared(stages, overlap), stages, holds_for(stages))
    found = [_placed(asked) for asked in stages]
    known = all(isinstance(one.estimate, float) for one in found)
    slowest = max(found, key=lambda one: one.estimate) if known else found[-1]
    return replace(slowest, graph=graph.name, estimate=whole, lower_bound=in_total(least(stages), stages))


def _placed(asked: Asked, overlap: str = "none") -> Roofline:
    graph, held = asked.graph, asked.values.held
    times = [spent(work, asked) for work in asked.works]
    sums: dict[tuple[str, str], Poly] = {}
    for work in asked.works:
        for key, amount in work.flops.items():
            sums[key] = sums.get(key, ZERO) + amount
    rates = {_unit(kind, dtype): asked.rates.of(kind, dtype) for kind, dtype in sums}
    return Roofline(
        graph=graph.name,
        hardware=asked.hardware,
        rows=tuple(_row(work, pair, asked) for work, pair in zip(asked.works, times, strict=True)),
        flops=answer(total(sums.values()), held),
        bytes=answer(total(w.bytes for w in asked.works), held),
        fused_bytes=answer(compulsory(graph).bind(asked.values), held),
        ridge=_ridge(sums, asked),
        lower_bound=in_seconds(lower_bound(asked), asked),
        estimate=in_seconds(together(times, asked, overlap), asked),
        rates={unit: in_seconds(rate, asked) for unit, rate in rates.items()},
        stand_ins=tuple(asked.rates.stand_ins.values()),
        levels=asked.levels,
        overlap=overlap,
    )


def _unit(kind: str, dtype: str) -> str:
    # pointwise work is done in fp32 whatever is stored
    return f"matmul {dtype}" if kind == "matmul" else "vector fp64" if dtype == "fp64" else "vector"


def _ridge(sums: Mapping[tuple[str, str], Poly], asked: Asked) -> Formula:
    """Return the ridge point of the main kind of FLOPs."""
    if not sums:
        return 0.0
    kind, dtype = _main(sums, asked.graph.root.relations)
    return in_seconds(asked.rates.of(kind, dtype) / asked.rates.bandwidth, asked)


def _main(amounts: Mapping[tuple[str, str], Poly], known: Relations) -> tuple[str, str]:
    """Return the kind and format of most FLOPs; of several that no size decides between, contractions."""
    if all(p.constant is not None for p in amounts.values()):
        return max(amounts, key=lambda key: amounts[key].constant or 0)
    kept = [key for _, key in prune([(p, key) for key, p in amounts.items()], known)]
    return min(kept, key=lambda key: key[0] != "matmul")


def _row(work: Work, times: Sequence[Spent], asked: Asked) -> RooflineRow:
    known, held = asked.graph.root.relations, asked.values.held
    named: dict[str, list[Spent]] = {}
    for found in times:
        named.setdefault(found[1], []).append(found)
    compute, memory, *others = ((name, in_seconds(largest(found, known), asked)) for name, found in named.items())
    caches = {level.name for level in asked.levels}
    return RooflineRow(
        op=work.op.name,
        scope=work.op.scope,
        phase=work.op.phase,
        kind=_main(work.flops, known)[0] if work.flops else "data",
        flops=answer(total(work.flops.values()), held),
        bytes=answer(work.bytes, held),
        compute_s=compute[1],
        memory_s=memory[1],
        bound=which(times, known),
        caches_s={name: time for name, time in others if name in caches},
        links_s={name: time for name, time in others if name not in caches},
    )
