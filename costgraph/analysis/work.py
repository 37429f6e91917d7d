"""FLOPs and bytes per op, and the time that a device needs for them in compute, in memory or over a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ..algebra.polynomial import ZERO, Poly, poly, total
from ..errors import BindingError, SpecError
from ..hardware.links import joined
from ..hardware.networks import Network
from ..hardware.specs import (
    Hardware,
    Level,
    StandIn,
    levels,
)
from ..ir.graph import (
    Bindings,
    Graph,
    Op,
    bindings,
    known_names,
    need_flag,
)
from ..ops.collectives import Collective
from ..ops.einsum import Einsum
from ..ops.opaque import Transfer
from .costs import compute_dtype, executions
from .tiling import parts_of_traffic

__all__ = ["DeviceQuestion", "Fallback", "Rates", "Work", "ask", "exact", "need_other_names", "works"]


Fallback = str | Mapping[str, str] | None


class Rates:
    """Rates of a device as exact numbers or symbols, recording stand-ins for missing rates."""

    def __init__(self, hardware: Hardware, fallback: Fallback = None) -> None:
        self.hardware, self.fallback = hardware, fallback
        self.stand_ins: dict[tuple[str, str], StandIn] = {}
        """by missing table entry and reason"""
        self.bandwidth = poly(hardware.bandwidth.value)
        """memory bandwidth in B/s"""
        self.headroom = _headroom(hardware)
        """factor by which the device may exceed its peak rates"""
        self._found: dict[tuple[str, str, bool], Poly] = {}

    def of(self, kind: str, dtype: str, *, highest: bool = False) -> Poly:
        """Return the FLOP/s of one kind in a format; `highest` bounds a missing rate from above."""
        key = ("matmul" if kind == "matmul" else "vector", dtype, highest)
        if key not in self._found:
            rate, instead = self.hardware.nearest_rate(dtype, key[0], self.fallback, highest=highest)
            if instead is not None:
                self.stand_ins[instead.wanted, instead.why] = instead
            self._found[key] = poly(rate.value)
        return self._found[key]

    def shares_unit(self, kind: str, dtype: str) -> bool:
        """Whether FLOPs of this kind run on the vector unit.

        A device that runs plain fp32 matmuls on its vector unit lists one rate in both tables. fp64 matmuls are
        compared only with the fp64 vector rate, since their matrix rate often equals that of fp32 pointwise work.
        """
        if kind != "matmul":
            return True
        vector_rate = self.hardware.vector.get("fp64" if dtype == "fp64" else "fp32")
        return vector_rate is not None and poly(vector_rate.value) == self.of(kind, dtype, highest=True)


def _headroom(hardware: Hardware) -> Fraction:
    """Return the clock reached under load over the boost clock for which peaks are stated.

    It is 1 if a file lacks either clock. For symbolic hardware the symbols are upper bounds already.
    """
    clock = hardware.tables.get("clock", {})
    if hardware.symbols or "reached" not in clock or "boost" not in clock:
        return Fraction(1)
    return max(Fraction(1), Fraction(clock["reached"].number) / Fraction(clock["boost"].number))


def _of_host(hardware: Hardware) -> Poly:
    """Return a device's share of its host's memory bandwidth in B/s."""
    table = hardware.tables.get("host", {})
    if "bandwidth" not in table:
        raise SpecError(f"hardware {hardware.id}: host.bandwidth is missing; add it to table [host]")
    return poly(table["bandwidth"].value)


@dataclass
class Work:
    """FLOPs and bytes of one op over all its iterations; a kernel includes the ops fused into it."""

    op: Op
    """the op"""
    times: Poly
    """number of executions"""
    flops: dict[tuple[str, str], Poly]
    """FLOPs by kind and number format"""
    bytes: Poly
    """bytes read and written"""
    least: dict[tuple[str, str], Poly]
    """as `flops`, for the algorithm with the fewest multiplications, such as Winograd convolution"""
    through: tuple[tuple[Poly, Level], ...] = ()
    """bytes moved out of memory levels, several bounds per level of which the largest holds"""

    @property
    def link(self) -> str | None:
        """Link that a transfer uses; None for ops that access memory."""
        return self.op.kind.link if isinstance(self.op.kind, Transfer) else None

    @property
    def unit(self) -> str:
        """Unit that moves its bytes: memory, link or host."""
        return "link" if self.link is not None else "host" if self.op.on_host else "memory"

    @property
    def collective(self) -> Collective | None:
        """Kind of a collective; None for local ops."""
        return self.op.kind if isinstance(self.op.kind, Collective) else None

    @property
    def rings(self) -> list[Op]:
        """Collectives inside a kernel, which overlap with its computation."""
        inner = () if self.op.body is None else self.op.body.walk()
        return [op for op in inner if isinstance(op.kind, Collective)]

    def bound(self, values: Mapping[str, Poly]) -> Work:
        """Return the same work with sizes bound."""
        flops, least = (
            {key: amount.bind(values) for key, amount in amounts.items()} for amounts in (self.flops, self.least)
        )
        through = tuple((p.bind(values), level) for p, level in self.through)
        return Work(self.op, self.times.bind(values), flops, self.bytes.bind(values), least, through)

    def seconds(self, rates: Rates) -> tuple[Poly, Poly]:
        """Return the seconds in compute and in memory (for a transfer: over its link; on the host: in host memory)."""
        if self.op.on_host:  # optimizer updates on the host are bound by its memory
            return ZERO, self.bytes / _of_host(rates.hardware)
        flop_seconds = [amount / rates.of(kind, dtype) for (kind, dtype), amount in self.flops.items()]
        if self.link is not None:
            # reads and writes are one stream over the link
            return total(flop_seconds), self.bytes / 2 / poly(rates.hardware.link(self.link).value)
        return total(flop_seconds), self.bytes / rates.bandwidth


def works(graph: Graph, through: tuple[Level, ...] = ()) -> list[Work]:
    """Return the work of each op in program order, without ops that cost nothing, such as views.

    `through` lists memory levels whose traffic is included.
    """
    if through:
        return _works(graph, through)
    if "works" not in graph.cache:
        graph.cache["works"] = _works(graph, ())
    out: list[Work] = graph.cache["works"]
    return out


def _works(graph: Graph, through: tuple[Level, ...]) -> list[Work]:
    out: list[Work] = []
    for op, times, moves in executions(graph):
        if moves:
            amounts = [
                *zip(op.operands, op.kind.reads(op), strict=False),
                *zip(op.results, op.kind.writes(op), strict=False),
            ]
            moved = total(a * t.element_bytes() for t, a in amounts) * times
            # computed here, where operands that are one tensor in a loop are known
            traffic = tuple((p * times, level) for level in through for p in parts_of_traffic(op, level.nearer))
            out.append(Work(op, times, {}, moved, {}, traffic))
        for kind, amount in op.kind.flops(op).by_kind().items():
            if amount:
                key = (kind, compute_dtype(op))
                out[-1].flops[key] = out[-1].flops.get(key, ZERO) + amount * times
                fewest = op.kind.least(op) if kind == "matmul" and isinstance(op.kind, Einsum) else amount
                out[-1].least[key] = out[-1].least.get(key, ZERO) + fewest * times
    return [w for w in out if w.flops or w.bytes]


@dataclass(frozen=True)
class DeviceQuestion:
    """A graph on a device, with sizes bound as far as given."""

    graph: Graph
    rates: Rates
    values: Bindings
    works: list[Work]
    levels: tuple[Level, ...] = ()
    """Memory levels to include, for a hierarchical roofline."""
    resident: Poly = ZERO
    """Bytes of inputs and outputs that the last-level cache may keep from an earlier run."""

    @property
    def hardware(self) -> Hardware:
        """The device."""
        return self.rates.hardware

    @property
    def unbound(self) -> tuple[str, ...]:
        """Unbound names: sizes, and symbols of symbolic hardware."""
        sizes = (n for n in known_names(self.graph) if n not in self.values or self.values[n].constant is None)
        return tuple(sorted({*sizes, *self.hardware.symbols}))

    def need_numbers(self, question: str) -> None:
        """Raise BindingError if a name is unbound, listing all of them."""
        if self.unbound:
            names = ", ".join(self.unbound)
            raise BindingError(f"{question} of graph {self.graph.name!r}: expected numbers, still unbound: {names}")


def ask(
    graph: Graph,
    hardware: str | Hardware,
    fallback: Fallback,
    dims: Mapping[str, object],
    question: str,
    *,
    hierarchical: bool = False,
    network: str | Network | None = None,
) -> DeviceQuestion:
    """Return a graph on a device; BindingError if a dimension has the name of a hardware symbol."""
    need_flag(question, hierarchical=hierarchical)
    device = joined(hardware, network)
    values = bindings(graph, dims)
    need_other_names(graph, device, question)
    if hierarchical:
        memory_levels = levels(device)
        return DeviceQuestion(
            graph,
            Rates(device, fallback),
            values,
            [w.bound(values) for w in works(graph, memory_levels)],
            memory_levels,
        )
    # the last binding is cached, since devices are compared at equal sizes
    entry: tuple[object, list[Work]] = graph.cache.get("bound works", (None, []))
    if entry[0] != values:
        entry = values, [w.bound(values) for w in works(graph)]
        graph.cache["bound works"] = entry
    return DeviceQuestion(graph, Rates(device, fallback), values, entry[1])


def need_other_names(graph: Graph, hardware: Hardware, question: str) -> None:
    """Raise BindingError if a dimension has the name of a hardware symbol."""
    clashes = sorted(hardware.symbols & known_names(graph))
    if clashes:
        raise BindingError(
            f"{question} of graph {graph.name!r}: {', '.join(clashes)} names a dimension and a rate of the device; "
            f"rename the dimension"
        )


def exact(p: Poly) -> Fraction:
    """Return the value of a formula without unbound names."""
    constant = p.constant
    assert constant is not None
    return Fraction(constant)
