"""Roofline model: compute and memory time per op, and the resource that bounds it."""

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
from ..ir.graph import VIEWS, Graph, need_choice
from ..notation.validation import guarded
from .costs import compulsory
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
    overlapped_time,
    spent,
    stages_asked,
    warn_of,
    which,
)
from .work import DeviceQuestion, Fallback, Work

__all__ = ["Roofline", "RooflineRow", "bound_roofline", "roofline"]


#: Maximum width of a condition in a table.
_WIDEST = 60


@dataclass(frozen=True)
class RooflineRow:
    """One op on the roofline, over all its iterations."""

    op: str
    """name of the op"""
    scope: str
    """module scope"""
    phase: str
    """phase of the op"""
    kind: str
    """kind with the most FLOPs, or data if it has none"""
    flops: Formula
    """FLOPs"""
    bytes: Formula
    """bytes moved"""
    compute_s: Formula
    """seconds at the peak rates for its kinds and formats"""
    memory_s: Formula
    """seconds at memory bandwidth, or link bandwidth for a transfer"""
    bound: str | Bound
    """compute, memory, a link or a cache: the largest time; a condition if that depends on open sizes"""
    caches_s: Mapping[str, Formula] = field(default_factory=dict)
    """seconds at the bandwidth of each cache, in a hierarchical roofline"""
    links_s: Mapping[str, Formula] = field(default_factory=dict)
    """seconds of a collective over its links: interconnect, network between domains, link while a degree is open"""

    @property
    def seconds(self) -> Formula:
        """Largest of the times."""
        if isinstance(self.bound, Bound):
            return answer(Max(self.compute_s, self.memory_s, *self.caches_s.values(), *self.links_s.values()))
        return {"compute": self.compute_s, **self.caches_s, **self.links_s}.get(self.bound, self.memory_s)

    @property
    def intensity(self) -> Formula:
        """FLOP/B; infinite if no bytes are moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def attainable(self) -> Formula:
        """FLOP/s that the roofline allows at this intensity."""
        return self.flops / self.seconds if self.seconds else 0.0


@guarded()
@dataclass(frozen=True, repr=False)
class Roofline(Table):
    """Roofline of a graph on a device."""

    graph: str
    """name of the graph"""
    hardware: Hardware
    """the device"""
    rows: tuple[RooflineRow, ...]
    """ops that do work, in program order"""
    flops: Formula
    """FLOPs of all ops, as executed"""
    bytes: Formula
    """bytes moved as declared, with one kernel per op"""
    fused_bytes: Formula
    """bytes that no fusion avoids"""
    ridge: Formula
    """FLOP/B at the ridge point of the graph's main kind of FLOPs"""
    lower_bound: Formula
    """lower bound in seconds, given `start`: the busiest unit, or the fused bytes"""
    estimate: Formula
    """seconds as declared: sum over ops of the largest compute, memory or link time; see `overlap`"""
    rates: Mapping[str, Formula]
    """FLOP/s by unit and number format in use, such as `matmul bf16`"""
    stand_ins: tuple[StandIn, ...] = ()
    """substitutes for rates that the device lacks"""
    levels: tuple[Level, ...] = ()
    """memory levels of a hierarchical roofline, device memory first; otherwise empty"""
    overlap: str = "none"
    """overlap of collectives with computation: none, ideal or streams"""
    start: str = "cold"
    """location of operands in the lower bound: cold, in device memory; warm, in the last-level cache as far as they
    fit"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions"""

    def _description(self) -> str:
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
        """Remarks on the times: stand-in rates, overlap, missing memory levels."""
        return (*map(str, self.stand_ins), *self._notes())

    def _notes(self) -> Iterator[str]:
        if self.overlap != "none":
            estimate_text = {"ideal": "the larger of both", "streams": "when the last of all streams is done"}[
                self.overlap
            ]
            yield f"collectives take their time beside all else: the estimate is {estimate_text}"
        if len(self.levels) == 1:
            cache_text = "of caches it has sizes alone" if self.levels[0].nearer else "it has no caches"
            yield f"{self.hardware.id} has no bandwidth of a cache, {cache_text}: the memory is its only level"
        if self.levels and not self.levels[0].whole:
            yield f"{self.hardware.id} lacks the size of registers or of first caches: no cache is in the lower bound"

    @property
    def intensity(self) -> Formula:
        """FLOP/B as declared."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def fused_intensity(self) -> Formula:
        """FLOP/B for compulsory bytes."""
        return self.flops / self.fused_bytes if self.fused_bytes else math.inf

    @property
    def bound(self) -> str:
        """Resource that bounds most of the estimated time: compute, memory or link.

        Raises BindingError while a size is open.
        """
        need_bound([self.estimate], f"bound of graph {self.graph!r}")
        times: dict[str, float] = {}
        for r in self.rows:
            times[str(r.bound)] = times.get(str(r.bound), 0.0) + r.seconds
        return max(times, key=lambda k: times[k], default="memory")

    def plot(self, path: object = None) -> object:
        """Plot the ops on a log-log roofline with the ridge point marked; requires matplotlib.

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
        return VIEWS["plot_roofline"](self, path)


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
    """Place every op in a graph on a device's roofline.

    Parameters
    ----------
    graph : Graph
        Graph to analyze. For a pipeline, rows and sums describe its slowest stage, or the last one if sizes are open,
        and the estimate covers the whole step, as in `seconds`.
    hardware : str, path-like or Hardware
        Device name, path of a TOML file, or Hardware from `load_hardware`.
    fallback : str or mapping, optional
        Number format whose rate replaces a missing one, or a mapping from wanted to used format.
    hierarchical : bool
        Include each memory level: an op takes at least its traffic out of each level, that is, the least traffic of any
        schedule through all stores closer to the arithmetic, as in `bytes_moved` with `cache=`.
    overlap : str
        Overlap of collectives with computation in the estimate. "none": sequential. "ideal": full overlap, so that the
        larger sum remains. "streams": one stream per mesh axis for collectives and one for all else, in program order,
        each op starting when its operands are ready; requires all sizes to be bound.
    network : str, path-like or Network, optional
        Name, TOML file or record of the network between interconnect domains; without it, any device reaches any other
        at the rate of its network card.
    bound : {"cold", "warm"}
        Location of operands at the start in the lower bound. "cold": in device memory, which holds for models larger
        than the caches. "warm": the last-level cache holds as many bytes of operands and results as fit, as in a
        benchmark that repeats one kernel on the same data; these bytes are subtracted.
    **dims : int
        Sizes to bind; if one is left open, times are formulas, and bounds may be conditions.

    Returns
    -------
    Roofline
        `.rows`, `.lower_bound` and `.estimate` in seconds, `.stand_ins` for rates that are missing, `.plot(path)`.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    SpecError
        If the device is unknown, has no rate, or lacks data on a link that a collective uses; if `bound="warm"` and the
        size of the last-level cache is unknown.
    UnsupportedError
        If the graph has no mesh for a collective's axis, or streams would run more than a million ops.

    Notes
    -----
    The model of Williams, Waterman and Patterson 2009: compute time is the sum over kinds of FLOPs / peak rate, and
    memory time is bytes / bandwidth. Contractions run at the matrix rate of their format, everything else on the vector
    unit. Units that can overlap (matrix, vector, memory, link) are not summed in the lower bound; on symbolic hardware,
    all can. A missing rate is replaced by the next wider format, then by the matrix unit, then by the nearest format;
    in the lower bound by the highest rate of the device. The ranks of a collective fill interconnect domains, with
    neighbours along the last mesh axis adjacent; `costgraph.analysis.collective_time` documents its time. The lower
    bound assumes the cheapest known algorithm for a convolution, and the highest clock observed on the device.

    With `hierarchical`, the levels are the memory and each cache whose bandwidth the specification states, as in Yang,
    Kurth and Williams 2020, but with derived instead of measured traffic. The lower bound then includes the bytes that
    a contraction of inputs and parameters has to move out of memory, if the sizes of all closer stores are known,
    including registers.

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
            f"roofline: bound='warm' needs the size of the last-level cache, and hardware {hardware.id!r} has none; "
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
    """Return a numeric roofline and warn about stand-in rates; for results derived from it.

    Raises BindingError if a name is unbound, listing all of them.
    """
    stages = stages_asked(graph, hardware, fallback, dims, question, network=network)
    for asked in stages:
        asked.need_numbers(question)
    out = _of_all(graph, stages)
    warn_of(hardware, out.stand_ins)
    return out


def _of_all(graph: Graph, stages: Sequence[DeviceQuestion], overlap: str = "none") -> Roofline:
    """Return the roofline of a graph; for a pipeline, of its slowest or last stage."""
    if not graph.parts:
        return _placed(stages[0], overlap)
    total_estimate = in_total(as_declared(stages, overlap), stages, holds_for(stages))
    rooflines = [_placed(asked) for asked in stages]
    all_numbers = all(isinstance(item.estimate, float) for item in rooflines)
    slowest = max(rooflines, key=lambda item: item.estimate) if all_numbers else rooflines[-1]
    return replace(slowest, graph=graph.name, estimate=total_estimate, lower_bound=in_total(least(stages), stages))


def _placed(asked: DeviceQuestion, overlap: str = "none") -> Roofline:
    graph, validities = asked.graph, asked.values.held
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
        flops=answer(total(sums.values()), validities),
        bytes=answer(total(w.bytes for w in asked.works), validities),
        fused_bytes=answer(compulsory(graph).bind(asked.values), validities),
        ridge=_ridge(sums, asked),
        lower_bound=in_seconds(lower_bound(asked), asked),
        estimate=in_seconds(overlapped_time(times, asked, overlap), asked),
        rates={unit: in_seconds(rate, asked) for unit, rate in rates.items()},
        stand_ins=tuple(asked.rates.stand_ins.values()),
        levels=asked.levels,
        overlap=overlap,
        legend=dict(graph.root.legend),
    )


def _unit(kind: str, dtype: str) -> str:
    # pointwise work runs in fp32 whatever the stored format
    return f"matmul {dtype}" if kind == "matmul" else "vector fp64" if dtype == "fp64" else "vector"


def _ridge(sums: Mapping[tuple[str, str], Poly], asked: DeviceQuestion) -> Formula:
    """Return the ridge point for the main kind of FLOPs."""
    if not sums:
        return 0.0
    kind, dtype = _main(sums, asked.graph.root.relations)
    return in_seconds(asked.rates.of(kind, dtype) / asked.rates.bandwidth, asked)


def _main(amounts: Mapping[tuple[str, str], Poly], relations: Relations) -> tuple[str, str]:
    """Return the kind and format with the most FLOPs, preferring contractions if sizes do not decide."""
    if all(p.constant is not None for p in amounts.values()):
        return max(amounts, key=lambda key: amounts[key].constant or 0)
    largest_kinds = [key for _, key in prune([(p, key) for key, p in amounts.items()], relations)]
    return min(largest_kinds, key=lambda key: key[0] != "matmul")


def _row(work: Work, times: Sequence[Spent], asked: DeviceQuestion) -> RooflineRow:
    relations, validities = asked.graph.root.relations, asked.values.held
    named: dict[str, list[Spent]] = {}
    for resource in times:
        named.setdefault(resource[1], []).append(resource)
    compute, memory, *others = (
        (name, in_seconds(largest(resource, relations), asked)) for name, resource in named.items()
    )
    caches = {level.name for level in asked.levels}
    return RooflineRow(
        op=work.op.name,
        scope=work.op.scope,
        phase=work.op.phase,
        kind=_main(work.flops, relations)[0] if work.flops else "data",
        flops=answer(total(work.flops.values()), validities),
        bytes=answer(work.bytes, validities),
        compute_s=compute[1],
        memory_s=memory[1],
        bound=which(times, relations),
        caches_s={name: time for name, time in others if name in caches},
        links_s={name: time for name, time in others if name not in caches},
    )
