"""How long ranks take for a collective: over the links of their devices, and the least that these are busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import combinations
from math import prod
from typing import NamedTuple

import sympy

from ..algebra.extremum import Max, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..errors import BindingError, SpecError, UnsupportedError
from ..hardware.links import Wire, extents, wire
from ..hardware.specs import Hardware
from ..ir.graph import Graph, Op, is_pass
from ..ops.collectives import Collective, Send

__all__ = [
    "around",
    "covered",
    "least_around",
    "Bucketed",
    "bucketed",
    "Group",
    "exchange",
    "group_of",
    "least_busy",
    "message",
    "placed",
    "ranks_apart",
    "taken",
    "whole",
]


# -- torus -------------------------------------------------------------------------------------------------------------
# Collectives in a torus: rings of devices, one for each dimension, with a link to either side and no switches.


class _Dimension(NamedTuple):
    """What a group of ranks has of a dimension: the whole ring, or devices of it in a line."""

    devices: int
    latency: Fraction
    """s of a message over one link, beside its bytes"""
    bandwidth: Fraction
    """B/s of one link in each direction"""
    links: int
    """over which a device at the end receives: two of a ring, one of a line"""

    @property
    def rate(self) -> Fraction:
        """B/s that a device at the end receives."""
        return self.links * self.bandwidth

    @property
    def hops(self) -> int:
        """Links between the two devices that are the furthest from each other."""
        return self.devices // 2 if self.links == 2 else self.devices - 1

    @property
    def crossed(self) -> Fraction:
        """Seconds for each byte that a rank sends to all alike: half of them cross the middle."""
        return self.devices**2 // 4 / (self.devices * self.rate)


def covered(name: str, ranks: Poly, apart: Poly, hardware: Hardware) -> tuple[tuple[str, Poly], ...]:
    """Return the dimensions that ranks lie along, and how many of each: the first dimension is filled first.

    From one rank to the next are `apart` devices. UnsupportedError if a degree is open, since which rings there are
    depends on it; SpecError if ranks fill whole dimensions and devices in a line of one more in no way: they start in
    the middle of a dimension, where several groups would share its links, or end there in the middle of a row.
    """
    place, has = f"time of {name!r}", f"{ranks} ranks that are {apart} apart"
    if ranks.constant is None or apart.constant is None:
        raise UnsupportedError(f"{place}: {has} in a torus, expected numbers: its rings depend on them")
    first, end, low, out = apart.constant, apart.constant * ranks.constant, 1, []
    for dimension, high in extents(hardware):
        assert high is not None
        start, stop = max(low, min(first, high)), max(low, min(end, high))
        if start != stop and (start != low or stop % low):
            size = high // low
            raise SpecError(
                f"{place}: {has}, expected whole dimensions of the torus, and the first devices of one more: these "
                f"have {stop / start:g} of the {size} devices along {dimension}, {start / low:g} apart"
            )
        out.append((dimension, poly(stop) / start))
        low = high
    if end > low and ranks.constant > 1:
        raise SpecError(f"{place}: {has}, expected the {low:,} devices that the torus joins at most")
    return tuple((dimension, count) for dimension, count in out if count.constant != 1) or tuple(out[:1])


def _dimensions(levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> dict[str, _Dimension]:
    assert hardware.cluster is not None
    rings, inside = {}, 1
    for name, level in hardware.cluster.levels.items():
        reached = int(level["devices"].number)
        rings[name] = level["ring"].number if "ring" in level else reached // inside
        inside = reached
    out = {}
    for name, many in levels:
        count, link = _number(many), wire(hardware, name)
        links = 2 if 2 < count == rings[name] else 1  # two devices have one link between them
        if count != 1:
            out[name] = _Dimension(int(count), _number(link.latency), _number(link.bandwidth), links)
    return out


def _number(p: Poly) -> Fraction:
    assert p.constant is not None
    return Fraction(p.constant)


def _gathered(found: dict[str, _Dimension]) -> tuple[tuple[str, ...], int, Fraction]:
    """Return the dimensions that an all-gather is bound by, how many devices are along these, and seconds for a byte.

    Devices that differ in other dimensions alone have a whole together, of which all but one part of P comes from
    outside, over their links along these dimensions.
    """
    n = prod(d.devices for d in found.values())
    best: tuple[tuple[str, ...], int, Fraction] = ((), 1, Fraction(0))
    for some in (names for k in range(len(found), 0, -1) for names in combinations(found, k)):
        along = prod(found[name].devices for name in some)
        spent = Fraction(along - 1, n) / sum(found[name].rate for name in some)
        if spent > best[2]:
            best = some, along, spent
    return best


def around(collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> Poly:
    """Return the seconds that a collective, or a send, takes once in a torus, over levels as `covered` returns them.

    The bytes are of the whole that is gathered or reduced, and of what a rank sends otherwise.

    Parts go around a ring both ways at once, dimension after dimension. With d dimensions, the orders of these run at
    the same time with a share of the bytes each, chosen so that all links are busy to the end: (n - 1)/n of the bytes
    over all links of a device. Shares that do so exist if and only if no set of dimensions needs longer (orders give
    loads that are the base polytope of a submodular function), so that the time is the longest over all sets. An
    all-reduce is a reduce-scatter and an all-gather. In an all-to-all, messages between the halves of a dimension cross
    it at two places of a ring and at one of a line; the longest dimension takes as long as all.
    """
    found = _dimensions(levels, hardware)
    if not found:
        return ZERO
    latency = sum(d.hops * d.latency for d in found.values())
    if collective == "send":  # to a neighbour, along any of them
        slowest = min(found.values(), key=lambda d: d.bandwidth)
        return slowest.latency + size / slowest.bandwidth
    if collective == "all_to_all":
        return latency + size * max(d.crossed for d in found.values())
    once = latency + size * _gathered(found)[2]
    return 2 * once if collective == "all_reduce" else once


def least_around(
    collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware
) -> dict[str, Poly]:
    """Return the least seconds that a collective keeps links along dimensions busy; parameters as `around`.

    Of a sum that devices share each number has to come from outside once. Of an all-to-all in a line, the device at its
    end counts, and not the middle, so that times of several collectives are those of the same links.
    """
    found = _dimensions(levels, hardware)
    if not found:
        return {}
    names, along, spent = _gathered(found)
    if collective == "all_to_all":
        name, longest = max(found.items(), key=lambda item: item[1].crossed)
        at_end = (longest.devices - 1) / (longest.devices * longest.rate)
        return {name: size * (longest.crossed if longest.links == 2 else at_end)}
    if collective == "send":  # half of it may go around the other way
        return {"+".join(found): size / (2 * sum(d.rate for d in found.values()))}
    return {"+".join(names): size * spent * (Fraction(along, along - 1) if collective == "all_reduce" else 1)}


# -- messages ----------------------------------------------------------------------------------------------------------
# Which messages what is reduced in buckets goes in: how many there are, and how large each is.


@dataclass
class Bucketed:
    """What a reduction in buckets takes part in, in one backward pass."""

    parts: dict[int, int] = field(default_factory=dict)
    """Bytes of messages, and how many of them are its own, all of its runs together."""
    runs: int = 0
    """How often it runs."""
    completes: int = 0
    """How many messages it is the last one of."""


def bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    """Return what reductions in buckets take part in, for sizes of all parameters.

    Each format has a bucket that is open. What is reduced is added to it in the order of the program; once it has as
    many bytes as its limit it is a message, and what is left at the end of a backward pass is the last one:
    `compute_bucket_assignment_by_size` of torch/csrc/distributed/c10d/reducer.cpp. BindingError if the size of a
    gradient or the number of layers is open.
    """
    wanted = dict(values)
    if graph.cache.get("bucketed", (None,))[0] != wanted:
        graph.cache["bucketed"] = wanted, _bucketed(graph, values)
    out: Mapping[Op, Bucketed] = graph.cache["bucketed"][1]
    return out


@dataclass
class _Open:
    """A bucket that is not full yet."""

    members: list[Op] = field(default_factory=list)
    size: int = 0
    before: int = 0
    """How many of its kind are full."""


def _bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    own: dict[Op, int] = {}
    open_: dict[object, _Open] = defaultdict(_Open)
    found: dict[Op, Bucketed] = {}

    def close(bucket: _Open) -> None:
        for op in bucket.members:
            parts = found.setdefault(op, Bucketed()).parts
            parts[bucket.size] = parts.get(bucket.size, 0) + own[op]
            found[op].runs += 1
        found[op].completes += 1
        bucket.members, bucket.size, bucket.before = [], 0, bucket.before + 1

    for op, kind in _in_order(graph, values):
        (x,) = op.operands
        if op not in own:
            own[op] = _messages_number(op, "bytes", x.numel * x.element_bytes(), values)
        bucket = open_[kind.axis, x.dtype]
        bucket.members.append(op)
        bucket.size += own[op]
        if bucket.size >= kind.bucket[min(bucket.before, 1)]:
            close(bucket)
    for bucket in open_.values():
        if bucket.members:
            close(bucket)
    return found


def _in_order(graph: Graph, values: Mapping[str, Poly]) -> Iterator[tuple[Op, Collective]]:
    """Yield reductions in buckets as often as a backward pass runs them: of micro-batches one."""
    for op in graph.ops:
        if isinstance(op.kind, Collective) and op.kind.bucket:
            yield op, op.kind
        elif op.loop is not None and any(isinstance(o.kind, Collective) and o.kind.bucket for o in op.loop.body.walk()):
            once = is_pass(op.loop.body)
            for _ in range(1 if once else _messages_number(op, "iterations", op.loop.count, values)):
                yield from _in_order(op.loop.body, values)


def _messages_number(op: Op, what: str, size: Poly, values: Mapping[str, Poly]) -> int:
    found = size.bind(values).constant
    if found is None:
        raise BindingError(
            f"messages of {op.name!r}: {size.bind(values)} {what}, expected sizes of parameters that are bound: what "
            f"fills a bucket is a number of bytes"
        )
    return int(found)


# -- exchange ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Ranks of a collective, spread evenly over as few domains of each link as hold them."""

    hardware: Hardware
    levels: tuple[tuple[str, Poly], ...]
    """Links, the nearest first, and how many ranks each joins, or domains of the link before it."""

    @property
    def ranks(self) -> Poly:
        """How many ranks there are."""
        return prod((count for _, count in self.levels), start=ONE)

    @property
    def torus(self) -> bool:
        """Whether they are in a torus, whose dimensions are the links."""
        return self.hardware.cluster is not None and self.hardware.cluster.torus

    @property
    def link(self) -> str:
        """What its messages go over at their slowest: link where that depends on a degree that is open."""
        reached = [level for level in self.levels if level[1] != ONE] or [*self.levels[:1]]
        if self.torus:
            return "+".join(name for name, _ in reached)
        name, count = reached[-1]
        return name if count.constant is not None or len(reached) == 1 else "link"

    @cached_property
    def joined(self) -> tuple[tuple[Poly, Callable[[], Wire]], ...]:
        """How many each link joins, and the link, which is looked up where it is needed."""
        return tuple((count, partial(wire, self.hardware, name)) for name, count in self.levels)

    def below(self) -> Iterator[tuple[Poly, Poly]]:
        """Yield for each link the ranks of a domain that it joins to others, and the ranks of those together."""
        inside = ONE
        for _, count in self.levels:
            yield inside, inside * count
            inside *= count


def group_of(op: Op, graph: Graph, values: Mapping[str, Poly], hardware: Hardware) -> Group:
    """Return where the ranks of a collective are: ranks along the last axis of the mesh are next to each other.

    So are those of a collective without an axis. Devices fill the mesh domain by domain. UnsupportedError if the graph
    has no mesh, or none with the axis that the op names; SpecError if it is not said how many devices the interconnect
    joins, or the ranks are more than a network joins.
    """
    ranks, apart = (p.bind(values) for p in ranks_apart(op, graph))
    return placed(op.name, ranks, apart, hardware)


def placed(name: str, ranks: Poly, apart: Poly, hardware: Hardware) -> Group:
    """Return where ranks are that have so many devices from one to the next; errors as `group_of`, of what is named."""
    if hardware.cluster is not None and hardware.cluster.torus:
        return Group(hardware, covered(name, ranks, apart, hardware))
    left, levels = ranks, []
    for link, size in extents(hardware):
        if size is None:
            levels.append((link, left))
            break
        # what is left over in a domain has no whole place of the next axis
        one = size == 1 or (apart.constant is not None and apart.constant >= size)
        room = ONE if one else poly(Max(1, _rounded(sympy.floor, poly(size) / apart).expr))
        domains = ranks if one else _rounded(sympy.ceiling, ranks / room)
        levels.append((link, left / domains))
        left = domains
    else:
        if left.constant not in (None, 1):
            has = f"{ranks} ranks that are {apart} apart"
            raise SpecError(f"time of {name!r}: {has}, expected the {size:,} devices that the {link} joins at most")
    return Group(hardware, tuple(levels))


def ranks_apart(op: Op, graph: Graph) -> tuple[Poly, Poly]:
    """Return how many ranks there are, and how many devices from one to the next: stages have whole meshes each."""
    assert isinstance(op.kind, Collective | Send)
    of_mesh, stage = graph.root.sharding, graph.root.waiting
    if op.kind.axis == "pp" and of_mesh is not None and stage is not None:
        devices = of_mesh.mesh.devices
        if isinstance(op.kind, Send) or op.kind.ranks == stage.stages:
            return stage.stages, devices
        return op.kind.ranks, devices * stage.stages / 2  # both ends, in one domain where all stages are
    apart = _apart(op, op.kind.axis, graph)
    return (poly(2) if isinstance(op.kind, Send) else op.kind.ranks), apart


def _apart(op: Op, axis: str, graph: Graph) -> Poly:
    """Return how many devices there are from one rank of an axis to the next."""
    if not axis:
        return ONE
    sharding = graph.root.sharding
    if sharding is None or axis not in sharding.mesh:
        has = "a mesh: a graph as shard makes it has one" if sharding is None else str(sharding.mesh)
        raise UnsupportedError(f"time of {op.name!r} over {axis!r} in graph {graph.name!r}: expected an axis of {has}")
    names, last = list(sharding.mesh), sharding.mesh.parts(axis)[-1]
    return prod((sharding.mesh[name] for name in names[names.index(last) + 1 :]), start=ONE)


def _rounded(how: Callable[[sympy.Expr], sympy.Expr], p: Poly) -> Poly:
    return poly(how(p.expr))


def _several(n: Poly) -> Poly:
    """Return 1 where there are several, 0 where there is one."""
    return ONE - _rounded(sympy.floor, ONE / n)


def _levels(n: Poly) -> Poly:
    """Return the steps from the leaves of a tree to its root."""
    return _rounded(sympy.ceiling, poly(sympy.log(n.expr) / sympy.log(2))) if n != ONE else ZERO


def whole(op: Op) -> Poly:
    """Return the bytes that all ranks of a group have together, of what is reduced or sent those of one rank."""
    kind, (x,), (made,) = op.kind, op.operands, op.results
    gathered = isinstance(kind, Collective) and kind.collective == "all_gather"
    return (made if gathered else x).numel * x.element_bytes()


def message(op: Op, values: Mapping[str, Poly]) -> tuple[Poly, str, Poly]:
    """Return how many messages a collective or send is, what each is for `taken`, and the bytes of each."""
    (x,) = op.operands
    size = whole(op).bind(values)
    if isinstance(op.kind, Collective) and op.kind.ring:
        return op.kind.sends.bind(values), "send", size / op.kind.ranks.bind(values)
    # tensors that have a storage for each iteration of a loop are sent one by one
    apart = prod(x.sizes[: x.storage.pieces], start=ONE).bind(values)
    return apart, op.kind.collective if isinstance(op.kind, Collective) else "send", size / apart


def exchange(op: Op, graph: Graph, values: Mapping[str, Poly], hardware: Hardware) -> tuple[Poly, str]:
    """Return the seconds that a collective or send takes once, and its slowest link; errors as `group_of`."""
    group = group_of(op, graph, values, hardware)
    if isinstance(op.kind, Collective) and op.kind.bucket:
        found = bucketed(graph, values)[op]  # its part of the time of each message
        times = (taken(op.kind.collective, poly(size), group) * mine / size for size, mine in found.parts.items())
        return total(times) / found.runs, group.link
    many, what, size = message(op, values)
    return many * taken(what, size, group), group.link


def taken(collective: str, size: Poly, group: Group) -> Poly:
    """Return the seconds that a collective takes once: domains and the network between them one after the other.

    `size` is in bytes, as `whole` returns them.

    A message takes latency + bytes/bandwidth. n = m*k ranks, m in each of k domains, pass n-th parts around: m - 1
    steps within the domain and k - 1 between domains, there with a m-th of the bytes for each, as each has a network
    card of its own. An all-reduce is a reduce-scatter and an all-gather in such rings, or goes up and down two trees at
    once that halve the bytes between them, where each rank receives and hands on all bytes twice: the smaller of both
    (Patarasuk and Yuan 2009; Sanders, Speck and Traeff 2009). In an all-to-all each rank sends one n-th to each other.
    """
    if group.torus:
        return around(collective, size, group.levels, group.hardware)
    if collective == "all_reduce":
        return _smaller(2 * _ring(size, group), _tree(size, group))
    if collective == "all_to_all":
        return _all_to_all(size / group.ranks, group)
    if collective == "send":
        return _send(size, group)
    return _ring(size, group)


@lru_cache(maxsize=1 << 10)
def _smaller(a: Poly, b: Poly) -> Poly:
    """Return the smaller one of two times: a search asks of the same messages for structure after structure."""
    return smaller(a, b)


def _steps(n: Poly, share: Poly, link: Callable[[], Wire]) -> Poly:
    """Return the time in which n ranks of a domain send a share to each other one, over all links at once."""
    if n == ONE:
        return ZERO
    fast, others = link(), n - 1
    moved = others * share / fast.bandwidth if fast.pair == fast.bandwidth else _several(n) * share / fast.pair
    return others * fast.latency + moved


def _ring(size: Poly, group: Group) -> Poly:
    out, share = ZERO, size
    for count, link in group.joined:
        share = share / count
        out += _steps(count, share, link)
    return out


def _tree(size: Poly, group: Group) -> Poly:
    out, share = ZERO, size
    for count, link in group.joined:
        if count != ONE:
            out += _levels(count) * link().latency + _several(count) * share / link().pair
            share = share / count
    return 2 * out


def _all_to_all(share: Poly, group: Group) -> Poly:
    (count, nearest), *further = group.joined
    out = _steps(count, share, nearest)
    for (inside, reached), (_, link) in zip([*group.below()][1:], further, strict=True):
        if reached != inside:
            out += (reached - inside) * (link().latency + share / link().bandwidth)
    return out


def _send(size: Poly, group: Group) -> Poly:
    out, near = ZERO, ONE
    for count, link in reversed(group.joined[1:]):
        if far := _several(count) * near:
            out += far * (link().latency + size / link().bandwidth)
            near -= far
    if near:
        fast = group.joined[0][1]()
        out += near * (fast.latency + size / fast.pair)
    return out


def least_busy(collective: str, size: Poly, group: Group) -> dict[str, Poly]:
    """Return the least seconds that a collective keeps each link busy, whatever its algorithm.

    Latencies count nothing, and switches may reduce and copy. A rank receives what others have of a gathered whole, and
    sends what others need of a scattered sum: (n - 1)/n of it, over the network what is not in its domain, shared by
    the cards of the domain. Of what is all-reduced it has to receive each sum once, since its own values are not
    enough: half of what a ring takes, for many ranks.
    """
    if group.torus:
        return least_around(collective, size, group.levels, group.hardware)
    out, n, nearer = {}, group.ranks, ONE
    further = [prod((ONE - _several(k) for k, _ in group.joined[i + 1 :]), start=ONE) for i in range(len(group.levels))]
    for (name, count), (inside, reached), beyond in zip(group.levels, group.below(), further, strict=True):
        part = (reached - inside) / n / inside
        if collective == "all_to_all":
            part *= inside
        elif collective == "all_reduce":
            part = _several(count) * beyond / inside
        elif collective == "send":  # a rank may have the next one beside it
            part = _several(count) * nearer
            nearer -= part
        if count != ONE and part:
            out[name] = part * size / wire(group.hardware, name).bandwidth
    return out
