"""Roofline: for each op the time in compute and the time in memory, the larger of which bounds it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..algebra.polynomial import ZERO, Poly, total
from ..algebra.symbols import shorten
from ..bind.evaluate import number, real
from ..errors import BindingError, UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.sizes import bindings, known_names
from ..hardware.specs import Hardware, load_hardware
from ..hardware.tables import Column, Fact, Table
from ..ops.stated import Collective, Transfer
from .costs import compute_dtype, executions
from .hooks import PLOTTERS
from .traffic import compulsory

__all__ = ["Roofline", "RooflineRow", "Work", "roofline", "works"]


Fallback = str | Mapping[str, str] | None


@dataclass
class Work:
    """What one op does, all its iterations together: a kernel with all that is fused into it."""

    op: Op
    """the op"""
    times: Poly
    """how often it runs"""
    flops: dict[tuple[str, str], Poly]
    """FLOPs by kind and number format"""
    bytes: Poly
    """bytes read and written"""

    def seconds(self, hardware: Hardware, fallback: Fallback) -> tuple[Poly, Poly]:
        """Return the time in compute and the time in memory (or over a link), as formulas in seconds."""
        parts = [amount / _rate(hardware, kind, dtype, fallback) for (kind, dtype), amount in self.flops.items()]
        if isinstance(self.op.kind, Collective):
            raise UnsupportedError(
                f"roofline: {self.op.name!r} is a collective, whose time on a network has no rule yet"
            )
        if isinstance(self.op.kind, Transfer):
            # what it reads and what it writes is one stream over the link
            return total(parts), self.bytes / 2 / Fraction(hardware.link(self.op.kind.link).value)
        return total(parts), self.bytes / Fraction(hardware.bandwidth.value)


def _rate(hardware: Hardware, kind: str, dtype: str, fallback: Fallback) -> Fraction:
    unit = "matmul" if kind == "matmul" else "vector"
    return Fraction(hardware.rate(dtype, unit, fallback=fallback).value)


def works(graph: Graph) -> list[Work]:
    """Return what each op does, those that do nothing (views) left out.

    Parameters
    ----------
    graph : Graph
        What is asked.

    Returns
    -------
    list of Work
        In program order.
    """
    if "works" not in graph.cache:
        out: list[Work] = []
        for op, times, moves in executions(graph):
            if moves:
                amounts = [
                    *zip(op.operands, op.kind.reads(op), strict=False),
                    *zip(op.results, op.kind.writes(op), strict=False),
                ]
                out.append(Work(op, times, {}, total(a * t.element_bytes() for t, a in amounts) * times))
            for kind, amount in op.kind.flops(op).by_kind().items():
                if amount:
                    key = (kind, compute_dtype(op))
                    out[-1].flops[key] = out[-1].flops.get(key, ZERO) + amount * times
        graph.cache["works"] = [w for w in out if w.flops or w.bytes]
    found: list[Work] = graph.cache["works"]
    return found


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
    flops: int | float
    """FLOPs"""
    bytes: int | float
    """bytes moved"""
    intensity: float
    """FLOP/B; infinite where nothing is moved"""
    compute_s: float
    """seconds at the peak rates of its kinds and formats"""
    memory_s: float
    """seconds at the bandwidth of the memory, or of the link for a transfer"""
    bound: str
    """compute, memory or link: the larger of the two times"""
    attainable: float
    """FLOP/s that the roof allows at this intensity"""

    @property
    def seconds(self) -> float:
        """The larger of the two times."""
        return max(self.compute_s, self.memory_s)


@dataclass(frozen=True, repr=False)
class Roofline(Table):
    """A graph on the roof of a device."""

    graph: str
    """name of the graph"""
    hardware: Hardware
    """the device"""
    rows: tuple[RooflineRow, ...]
    """ops that do something, in program order"""
    flops: int | float
    """FLOPs of all ops, as executed"""
    bytes: int | float
    """bytes moved as declared, each op one kernel"""
    fused_bytes: int | float
    """bytes that no fusion avoids"""
    ridge: float
    """FLOP/B at which the peak of the graph's main kind of FLOPs and the bandwidth meet"""
    lower_bound: float
    """seconds below which no run is: the busiest unit, or the fused bytes"""
    estimate: float
    """seconds as declared: sum over ops of the larger of compute and memory time"""
    rates: Mapping[str, float]
    """FLOP/s of each unit and number format that the ops use, such as `matmul bf16`"""

    def _about(self) -> str:
        return f"graph {shorten(self.graph)} on {self.hardware.id}: {len(self.rows)} rows"

    def _columns(self) -> Sequence[Column]:
        return (
            *map(Column, ("op", "scope", "phase", "kind")), Column("flops", "FLOP"), Column("bytes", "B"),
            Column("intensity", "FLOP/B"), Column("compute_s", "s", title="compute"),
            Column("memory_s", "s", title="memory"), Column("bound"), Column("attainable", "FLOP/s"),
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        return (
            Fact("FLOPs", self.flops, "FLOP"), Fact("bytes moved", self.bytes, "B"),
            Fact("lower bound", self.lower_bound, "s"), Fact("estimate", self.estimate, "s"),
        )  # fmt: skip

    @property
    def intensity(self) -> float:
        """FLOP/B as declared."""
        return float(self.flops / self.bytes) if self.bytes else math.inf

    @property
    def fused_intensity(self) -> float:
        """FLOP/B of the bytes that no fusion avoids."""
        return float(self.flops / self.fused_bytes) if self.fused_bytes else math.inf

    @property
    def bound(self) -> str:
        """What bounds most of the estimated time: compute, memory or link."""
        times: dict[str, float] = {}
        for r in self.rows:
            times[r.bound] = times.get(r.bound, 0.0) + r.seconds
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
        """
        return PLOTTERS["roofline"](self, path)


def exact(p: Poly) -> Fraction:
    """Return the value of a formula that is bound."""
    constant = p.constant
    assert constant is not None
    return Fraction(constant)


def _need_all(graph: Graph, values: Mapping[str, Poly], question: str) -> None:
    left = sorted(n for n in known_names(graph) if n not in values or values[n].constant is None)
    if left:
        raise BindingError(f"{question} of graph {graph.name!r}: expected numbers, still unbound: {', '.join(left)}")


def roofline(graph: Graph, hardware: str | Hardware, /, *, fallback: Fallback = None, **dims: int) -> Roofline:
    """Place every op of a graph on the roof of a device.

    Parameters
    ----------
    graph : Graph
        What is asked.
    hardware : str, path-like or Hardware
        Name of a device, path of a TOML file, or what `load_hardware` returned.
    fallback : str or mapping, optional
        Number format whose rate stands in for one that the device lacks, or a mapping from wanted to used format.
    **dims : int
        Sizes; all of them have to be bound.

    Returns
    -------
    Roofline
        `.rows`, `.lower_bound` and `.estimate` in seconds, `.plot(path)`.

    Raises
    ------
    BindingError
        If a symbol is left, naming all of them.
    SpecError
        If the device is unknown or lacks a rate.
    UnsupportedError
        If the graph has a collective.

    Notes
    -----
    Of Williams, Waterman and Patterson 2009: time in compute is the sum over kinds of FLOPs of FLOPs / peak rate, time
    in memory is bytes / bandwidth. Contractions run at the matrix rate of their format, all else on the vector unit.
    Units that can overlap (matrix, vector, memory, link) are not summed in the lower bound.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> [cg.roofline(g, "h100-sxm", N=n).rows[0].bound for n in (512, 1024)]
    ['memory', 'compute']
    """
    device = load_hardware(hardware)
    values = bindings(graph, dims)
    _need_all(graph, values, "roofline")
    rows, units = [], {"link": Fraction(0)}
    estimate = Fraction(0)
    for work in works(graph):
        compute, memory = (exact(p.bind(values)) for p in work.seconds(device, fallback))
        estimate += max(compute, memory)
        rows.append(_row(work, values, compute, memory, device))
        if isinstance(work.op.kind, Transfer):
            units["link"] += memory
        for unit, seconds in _by_unit(work, values, device, fallback):
            units[unit] = units.get(unit, Fraction(0)) + seconds
    fused = exact(compulsory(graph).bind(values))
    work_total = total(a for w in works(graph) for a in w.flops.values()).bind(values)
    return Roofline(
        graph=graph.name,
        hardware=device,
        rows=tuple(rows),
        flops=number(exact(work_total)),
        bytes=number(exact(total(w.bytes for w in works(graph)).bind(values))),
        fused_bytes=number(fused),
        ridge=_ridge(graph, values, device, fallback),
        lower_bound=real(max(*units.values(), fused / Fraction(device.bandwidth.value))),
        estimate=real(estimate),
        rates=_rates(graph, device, fallback),
    )


def _rates(graph: Graph, device: Hardware, fallback: Fallback) -> dict[str, float]:
    out = {}
    for work in works(graph):
        for kind, dtype in work.flops:
            # pointwise work is done in fp32 whatever is stored
            name = f"matmul {dtype}" if kind == "matmul" else "vector fp64" if dtype == "fp64" else "vector"
            out[name] = float(_rate(device, kind, dtype, fallback))
    return out


def _by_unit(
    work: Work, values: Mapping[str, Poly], device: Hardware, fallback: Fallback
) -> Iterator[tuple[str, Fraction]]:
    for (kind, dtype), amount in work.flops.items():
        rate = _rate(device, kind, dtype, fallback)
        # a device whose plain fp32 products run on its vector unit lists one rate in both places; fp64 products are
        # compared with the fp64 unit alone, as their matrix rate is often that of fp32 pointwise work
        own = device.vector.get("fp64" if dtype == "fp64" else "fp32")
        shared = kind != "matmul" or (own is not None and own.value == rate)
        yield ("vector" if shared else "matmul"), exact(amount.bind(values)) / rate


def _ridge(graph: Graph, values: Mapping[str, Poly], device: Hardware, fallback: Fallback) -> float:
    sums: dict[tuple[str, str], Fraction] = {}
    for work in works(graph):
        for key, amount in work.flops.items():
            sums[key] = sums.get(key, Fraction(0)) + exact(amount.bind(values))
    if not sums:
        return 0.0
    kind, dtype = max(sums, key=lambda k: sums[k])
    return float(_rate(device, kind, dtype, fallback) / Fraction(device.bandwidth.value))


def _row(work: Work, values: Mapping[str, Poly], compute: Fraction, memory: Fraction, device: Hardware) -> RooflineRow:
    amounts = {key: exact(p.bind(values)) for key, p in work.flops.items()}
    flops, moved = sum(amounts.values(), start=Fraction(0)), exact(work.bytes.bind(values))
    slow = "link" if isinstance(work.op.kind, Transfer) else "memory"
    seconds = max(compute, memory)
    return RooflineRow(
        op=work.op.name,
        scope=work.op.scope,
        phase=work.op.phase,
        kind=max(amounts, key=lambda k: amounts[k])[0] if amounts else "data",
        flops=number(flops),
        bytes=number(moved),
        intensity=real(flops / moved) if moved else math.inf,
        compute_s=real(compute),
        memory_s=real(memory),
        bound="compute" if compute >= memory else slow,
        attainable=real(flops / seconds) if seconds else 0.0,
    )
