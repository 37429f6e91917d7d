"""What each op does, and how long a device takes for it: in compute, and in memory or over a link."""

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

__all__ = ["Asked", "Fallback", "Rates", "Work", "ask", "exact", "need_other_names", "works"]


Fallback = str | Mapping[str, str] | None


class Rates:
    """What a device does in a second, as the algebra has it; what stands in for a missing rate is noted.

    Rates are numbers, or symbols where the device has them.
    """

    def __init__(self, hardware: Hardware, fallback: Fallback = None) -> None:
        self.hardware, self.fallback = hardware, fallback
        self.stand_ins: dict[tuple[str, str], StandIn] = {}
        """by the missing place and by why it was taken"""
        self.bandwidth = poly(hardware.bandwidth.value)
        """B/s of the memory"""
        self.headroom = _headroom(hardware)
        """how much faster than its peaks the device may run"""
        self._found: dict[tuple[str, str, bool], Poly] = {}

    def of(self, kind: str, dtype: str, *, highest: bool = False) -> Poly:
        """Return the FLOP/s of a kind of FLOPs in a format; of one that is missing the highest it can be, if asked."""
        key = ("matmul" if kind == "matmul" else "vector", dtype, highest)
        if key not in self._found:
            rate, instead = self.hardware.nearest_rate(dtype, key[0], self.fallback, highest=highest)
            if instead is not None:
                self.stand_ins[instead.wanted, instead.why] = instead
            self._found[key] = poly(rate.value)
        return self._found[key]

    def shares_unit(self, kind: str, dtype: str) -> bool:
        """Whether FLOPs of this kind run on the vector unit.

        A device whose plain fp32 products run on its vector unit lists one rate in both places; fp64 products are
        compared with the fp64 unit alone, as their matrix rate is often that of fp32 pointwise work.
        """
        if kind != "matmul":
            return True
        own = self.hardware.vector.get("fp64" if dtype == "fp64" else "fp32")
        return own is not None and poly(own.value) == self.of(kind, dtype, highest=True)


def _headroom(hardware: Hardware) -> Fraction:
    """Return the clock that a device was seen to reach under load over its boost clock, at which peaks are stated.

    It is 1 where a file has not both, and of hardware that is an unknown: its symbols are the highest rates there are.
    """
    clock = hardware.tables.get("clock", {})
    if hardware.symbols or "reached" not in clock or "boost" not in clock:
        return Fraction(1)
    return max(Fraction(1), Fraction(clock["reached"].number) / Fraction(clock["boost"].number))


def _of_host(hardware: Hardware) -> Poly:
    """Return a device's share of the B/s of its host's memory."""
    there = hardware.tables.get("host", {})
    if "bandwidth" not in there:
        raise SpecError(f"hardware {hardware.id}: host.bandwidth is missing; expected it beside a table [host]")
    return poly(there["bandwidth"].value)


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
    least: dict[tuple[str, str], Poly]
    """as `flops`, of the algorithm that needs the fewest products: a convolution has others than its index points"""
    through: tuple[tuple[Poly, Level], ...] = ()
    """bytes out of levels of memory: of several for one level the most"""

    @property
    def link(self) -> str | None:
        """The link that a transfer goes over; None for what moves its bytes to and from the memory."""
        return self.op.kind.link if isinstance(self.op.kind, Transfer) else None

    @property
    def unit(self) -> str:
        """What its bytes are moved by: memory, link of a transfer, or host."""
        return "link" if self.link is not None else "host" if self.op.on_host else "memory"

    @property
    def collective(self) -> Collective | None:
        """The record of a collective; None for what a device does alone."""
        return self.op.kind if isinstance(self.op.kind, Collective) else None

    @property
    def rings(self) -> list[Op]:
        """Collectives inside of a kernel, which works while they send."""
        inner = () if self.op.body is None else self.op.body.walk()
        return [op for op in inner if isinstance(op.kind, Collective)]

    def bound(self, values: Mapping[str, Poly]) -> Work:
        """Return the same with sizes put in."""
        flops, least = (
            {key: amount.bind(values) for key, amount in found.items()} for found in (self.flops, self.least)
        )
        through = tuple((p.bind(values), level) for p, level in self.through)
        return Work(self.op, self.times.bind(values), flops, self.bytes.bind(values), least, through)

    def seconds(self, rates: Rates) -> tuple[Poly, Poly]:
        """Return the time in compute and in memory (over the link of a transfer, in that of the host), in seconds."""
        if self.op.on_host:  # what optimizers do to states is bound by the memory of a host
            return ZERO, self.bytes / _of_host(rates.hardware)
        parts = [amount / rates.of(kind, dtype) for (kind, dtype), amount in self.flops.items()]
        if self.link is not None:
            # what it reads and what it writes is one stream over the link
            return total(parts), self.bytes / 2 / poly(rates.hardware.link(self.link).value)
        return total(parts), self.bytes / rates.bandwidth


def works(graph: Graph, through: tuple[Level, ...] = ()) -> list[Work]:
    """Return what each op does, in program order, those that do nothing (views) left out.

    `through` are levels of memory whose traffic is asked for as well.
    """
    if through:
        return _works(graph, through)
    if "works" not in graph.cache:
        graph.cache["works"] = _works(graph, ())
    found: list[Work] = graph.cache["works"]
    return found


def _works(graph: Graph, through: tuple[Level, ...]) -> list[Work]:
    out: list[Work] = []
    for op, times, moves in executions(graph):
        if moves:
            amounts = [
                *zip(op.operands, op.kind.reads(op), strict=False),
                *zip(op.results, op.kind.writes(op), strict=False),
            ]
            moved = total(a * t.element_bytes() for t, a in amounts) * times
            # here, where it is known which operands of an op in a loop are one tensor
            parts = tuple((p * times, level) for level in through for p in parts_of_traffic(op, level.nearer))
            out.append(Work(op, times, {}, moved, {}, parts))
        for kind, amount in op.kind.flops(op).by_kind().items():
            if amount:
                key = (kind, compute_dtype(op))
                out[-1].flops[key] = out[-1].flops.get(key, ZERO) + amount * times
                fewest = op.kind.least(op) if kind == "matmul" and isinstance(op.kind, Einsum) else amount
                out[-1].least[key] = out[-1].least.get(key, ZERO) + fewest * times
    return [w for w in out if w.flops or w.bytes]


@dataclass(frozen=True)
class Asked:
    """A graph on a device, with sizes put in as far as they are given."""

    graph: Graph
    rates: Rates
    values: Bindings
    works: list[Work]
    levels: tuple[Level, ...] = ()
    """Levels of memory, where the answer is to take each into account."""
    resident: Poly = ZERO
    """Bytes of operands and results that the last-level cache may hold from an earlier run."""

    @property
    def hardware(self) -> Hardware:
        """The device."""
        return self.rates.hardware

    @property
    def unbound(self) -> tuple[str, ...]:
        """Names of what is open: sizes, and the symbols of hardware that is an unknown."""
        sizes = (n for n in known_names(self.graph) if n not in self.values or self.values[n].constant is None)
        return tuple(sorted({*sizes, *self.hardware.symbols}))

    def need_numbers(self, question: str) -> None:
        """Raise BindingError if something is open, naming all of it."""
        if self.unbound:
            left = ", ".join(self.unbound)
            raise BindingError(f"{question} of graph {self.graph.name!r}: expected numbers, still unbound: {left}")


def ask(
    graph: Graph,
    hardware: str | Hardware,
    fallback: Fallback,
    dims: Mapping[str, object],
    question: str,
    *,
    hierarchical: bool = False,
    network: str | Network | None = None,
) -> Asked:
    """Return a graph on a device; BindingError if a dimension of it is named as a rate of hardware is."""
    need_flag(question, hierarchical=hierarchical)
    device = joined(hardware, network)
    values = bindings(graph, dims)
    need_other_names(graph, device, question)
    if hierarchical:
        found = levels(device)
        return Asked(graph, Rates(device, fallback), values, [w.bound(values) for w in works(graph, found)], found)
    # devices are compared at the same sizes
    kept: tuple[object, list[Work]] = graph.cache.get("bound works", (None, []))
    if kept[0] != values:
        kept = values, [w.bound(values) for w in works(graph)]
        graph.cache["bound works"] = kept
    return Asked(graph, Rates(device, fallback), values, kept[1])


def need_other_names(graph: Graph, hardware: Hardware, question: str) -> None:
    """Raise BindingError if a dimension is named as a rate of hardware that is an unknown."""
    both = sorted(hardware.symbols & known_names(graph))
    if both:
        raise BindingError(
            f"{question} of graph {graph.name!r}: {', '.join(both)} names a dimension and a rate of the device, "
            f"expected another name of the dimension"
        )


def exact(p: Poly) -> Fraction:
    """Return the value of a formula that is bound."""
    constant = p.constant
    assert constant is not None
    return Fraction(constant)
