"""Collective times on rings, trees, switches and tori, and lower bounds on the time that links are busy."""

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
# One ring per dimension, with a link to each neighbour and no switches.


class _Dimension(NamedTuple):
    """Extent of a group of ranks along one dimension: the whole ring, or consecutive devices in a line."""

    devices: int
    latency: Fraction
    """seconds per message over one link, without its bytes"""
    bandwidth: Fraction
    """B/s per link and direction"""
    links: int
    """links over which a device at the end receives: two in a ring, one in a line"""

    @property
    def rate(self) -> Fraction:
        """B/s received by a device at the end."""
        return self.links * self.bandwidth

    @property
    def hops(self) -> int:
        """Links between the two most distant devices."""
        return self.devices // 2 if self.links == 2 else self.devices - 1

    @property
    def crossed(self) -> Fraction:
        """Seconds per byte that a rank sends in an all-to-all: half the bytes cross the bisection."""
        return self.devices**2 // 4 / (self.devices * self.rate)


def covered(name: str, ranks: Poly, stride: Poly, hardware: Hardware) -> tuple[tuple[str, Poly], ...]:
    """Return the torus dimensions that ranks extend along, with the number of ranks in each, first dimension first.

    Consecutive ranks are `apart` devices apart. Raises UnsupportedError if a degree is open, since the rings depend on
    it, and SpecError if the ranks are not whole dimensions plus a line of devices in one more: they would start in the
    middle of a dimension, where several groups share links, or end in the middle of a row.
    """
    context, ranks_text = f"time of {name!r}", f"{ranks} ranks that are {stride} apart"
    if ranks.constant is None or stride.constant is None:
        raise UnsupportedError(
            f"{context}: {ranks_text} in a torus; expected bound sizes, since its rings depend on them"
        )
    first, end, low, out = stride.constant, stride.constant * ranks.constant, 1, []
    for dimension, high in extents(hardware):
        assert high is not None
        start, stop = max(low, min(first, high)), max(low, min(end, high))
        if start != stop and (start != low or stop % low):
            size = high // low
            raise SpecError(
                f"{context}: {ranks_text}, expected full dimensions of the torus and a leading part of one more; "
                f"these have {stop / start:g} of the {size} devices along {dimension}, {start / low:g} apart"
            )
        out.append((dimension, poly(stop) / start))
        low = high
    if end > low and ranks.constant > 1:
        raise SpecError(f"{context}: {ranks_text}, but the torus joins at most {low:,} devices")
    return tuple((dimension, count) for dimension, count in out if count.constant != 1) or tuple(out[:1])


def _dimensions(levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> dict[str, _Dimension]:
    assert hardware.cluster is not None
    rings, ranks_inside = {}, 1
    for name, level in hardware.cluster.levels.items():
        reached = int(level["devices"].number)
        rings[name] = level["ring"].number if "ring" in level else reached // ranks_inside
        ranks_inside = reached
    out = {}
    for name, reach in levels:
        count, link = _number(reach), wire(hardware, name)
        links = 2 if 2 < count == rings[name] else 1  # two devices share one link
        if count != 1:
            out[name] = _Dimension(int(count), _number(link.latency), _number(link.bandwidth), links)
    return out


def _number(p: Poly) -> Fraction:
    assert p.constant is not None
    return Fraction(p.constant)


def _gather_bound(dimensions: dict[str, _Dimension]) -> tuple[tuple[str, ...], int, Fraction]:
    """Return the dimensions that bound an all-gather, the devices along them, and seconds per byte.

    Devices that differ only in the other dimensions hold the whole together. All of it except their own share of 1/P
    enters over their links along the bounding dimensions.
    """
    n = prod(d.devices for d in dimensions.values())
    best: tuple[tuple[str, ...], int, Fraction] = ((), 1, Fraction(0))
    for some in (names for k in range(len(dimensions), 0, -1) for names in combinations(dimensions, k)):
        along = prod(dimensions[name].devices for name in some)
        spent = Fraction(along - 1, n) / sum(dimensions[name].rate for name in some)
        if spent > best[2]:
            best = some, along, spent
    return best


def around(collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware) -> Poly:
    """Return the seconds of a collective or send in a torus, over `levels` from `covered`.

    `size` is in bytes: the full gathered or reduced tensor, otherwise the bytes that a rank sends.

    Chunks travel in both directions of a ring, one dimension after another. With d dimensions, several orders run at
    the same time, each on a share of the bytes, so that all links stay busy: (n - 1)/n of the bytes over all links of a
    device. Such shares exist if and only if no subset of dimensions takes longer (the loads form the base polytope of a
    submodular function), so the time is the maximum over subsets. An all-reduce is a reduce-scatter and an all-gather.
    In an all-to-all, messages between the halves of a dimension cross a ring at two places and a line at one; the
    longest dimension determines the time.
    """
    dimensions = _dimensions(levels, hardware)
    if not dimensions:
        return ZERO
    latency = sum(d.hops * d.latency for d in dimensions.values())
    if collective == "send":  # to a neighbour in any dimension
        slowest = min(dimensions.values(), key=lambda d: d.bandwidth)
        return slowest.latency + size / slowest.bandwidth
    if collective == "all_to_all":
        return latency + size * max(d.crossed for d in dimensions.values())
    gather = latency + size * _gather_bound(dimensions)[2]
    return 2 * gather if collective == "all_reduce" else gather


def least_around(
    collective: str, size: Poly, levels: Sequence[tuple[str, Poly]], hardware: Hardware
) -> dict[str, Poly]:
    """Return the least seconds that a collective keeps links busy, by dimensions; parameters as in `around`.

    In an all-reduce, each element of the result has to arrive once. In an all-to-all on a line, the links at its end
    count rather than the bisection, so that the times of several collectives refer to the same links.
    """
    dimensions = _dimensions(levels, hardware)
    if not dimensions:
        return {}
    names, along, spent = _gather_bound(dimensions)
    if collective == "all_to_all":
        name, longest = max(dimensions.items(), key=lambda item: item[1].crossed)
        end_time = (longest.devices - 1) / (longest.devices * longest.rate)
        return {name: size * (longest.crossed if longest.links == 2 else end_time)}
    if collective == "send":  # half may take the other direction
        return {"+".join(dimensions): size / (2 * sum(d.rate for d in dimensions.values()))}
    return {"+".join(names): size * spent * (Fraction(along, along - 1) if collective == "all_reduce" else 1)}


# -- buckets -----------------------------------------------------------------------------------------------------------


@dataclass
class Bucketed:
    """Messages that a bucketed reduction contributes to, in one backward pass."""

    parts: dict[int, int] = field(default_factory=dict)
    """Bytes that it contributes over all runs, by message size."""
    runs: int = 0
    """Number of runs."""
    completes: int = 0
    """Number of messages that it completes."""


def bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    """Return the messages of bucketed reductions, with all parameter sizes bound.

    Each mesh axis and format has one open bucket. Gradients join it in program order. Once it reaches its size limit it
    is sent, and the remainder is sent at the end of the backward pass, as in `compute_bucket_assignment_by_size`
    (torch/csrc/distributed/c10d/reducer.cpp). Raises BindingError if a gradient size or the number of layers is open.
    """
    sizes = dict(values)
    if graph.cache.get("bucketed", (None,))[0] != sizes:
        graph.cache["bucketed"] = sizes, _bucketed(graph, values)
    out: Mapping[Op, Bucketed] = graph.cache["bucketed"][1]
    return out


@dataclass
class _Open:
    """A bucket that is not full yet."""

    members: list[Op] = field(default_factory=list)
    size: int = 0
    before: int = 0
    """Number of full buckets before it."""


def _bucketed(graph: Graph, values: Mapping[str, Poly]) -> Mapping[Op, Bucketed]:
    bytes_of: dict[Op, int] = {}
    open_: dict[object, _Open] = defaultdict(_Open)
    out: dict[Op, Bucketed] = {}

    def close(bucket: _Open) -> None:
        for op in bucket.members:
            shares = out.setdefault(op, Bucketed()).parts
            shares[bucket.size] = shares.get(bucket.size, 0) + bytes_of[op]
            out[op].runs += 1
        out[op].completes += 1
        bucket.members, bucket.size, bucket.before = [], 0, bucket.before + 1

    for op, kind in _in_order(graph, values):
        (x,) = op.operands
        if op not in bytes_of:
            bytes_of[op] = _concrete(op, "bytes", x.numel * x.element_bytes(), values)
        bucket = open_[kind.axis, x.dtype]
        bucket.members.append(op)
        bucket.size += bytes_of[op]
        if bucket.size >= kind.bucket[min(bucket.before, 1)]:
            close(bucket)
    for bucket in open_.values():
        if bucket.members:
            close(bucket)
    return out


def _in_order(graph: Graph, values: Mapping[str, Poly]) -> Iterator[tuple[Op, Collective]]:
    """Yield bucketed reductions once per execution in one backward pass, that is, for a single micro-batch."""
    for op in graph.ops:
        if isinstance(op.kind, Collective) and op.kind.bucket:
            yield op, op.kind
        elif op.loop is not None and any(isinstance(o.kind, Collective) and o.kind.bucket for o in op.loop.body.walk()):
            single_pass = is_pass(op.loop.body)
            for _ in range(1 if single_pass else _concrete(op, "iterations", op.loop.count, values)):
                yield from _in_order(op.loop.body, values)


def _concrete(op: Op, unit: str, size: Poly, values: Mapping[str, Poly]) -> int:
    value = size.bind(values).constant
    if value is None:
        raise BindingError(
            f"messages of {op.name!r}: {size.bind(values)} {unit}, expected a number; bind the sizes of all "
            f"parameters, since a bucket is a number of bytes"
        )
    return int(value)


# -- exchange ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Ranks of a collective, spread evenly over as few domains per link as possible."""

    hardware: Hardware
    levels: tuple[tuple[str, Poly], ...]
    """Links, nearest first, with the participants that each joins: ranks, or domains on the previous link."""

    @property
    def ranks(self) -> Poly:
        """Number of ranks."""
        return prod((count for _, count in self.levels), start=ONE)

    @property
    def torus(self) -> bool:
        """Whether the links are the dimensions of a torus."""
        return self.hardware.cluster is not None and self.hardware.cluster.torus

    @property
    def link(self) -> str:
        """Slowest link that messages use: "link" if that depends on an open degree."""
        reached = [level for level in self.levels if level[1] != ONE] or [*self.levels[:1]]
        if self.torus:
            return "+".join(name for name, _ in reached)
        name, count = reached[-1]
        return name if count.constant is not None or len(reached) == 1 else "link"

    @cached_property
    def joined(self) -> tuple[tuple[Poly, Callable[[], Wire]], ...]:
        """Number of participants per link, and a function that looks up the link."""
        return tuple((count, partial(wire, self.hardware, name)) for name, count in self.levels)

    def below(self) -> Iterator[tuple[Poly, Poly]]:
        """Yield for each link the ranks in one domain below it, and in all domains that it joins."""
        domain = ONE
        for _, count in self.levels:
            yield domain, domain * count
            domain *= count


def group_of(op: Op, graph: Graph, values: Mapping[str, Poly], hardware: Hardware) -> Group:
    """Return the placement of a collective's ranks, with neighbours along the last mesh axis on adjacent devices.

    Ranks without a mesh axis are adjacent too. Devices fill the mesh domain by domain. Raises UnsupportedError if the
    graph has no mesh or lacks the op's axis, and SpecError if the size of the interconnect is unknown or the network
    joins too few devices.
    """
    ranks, stride = (p.bind(values) for p in ranks_apart(op, graph))
    return placed(op.name, ranks, stride, hardware)


def placed(name: str, ranks: Poly, stride: Poly, hardware: Hardware) -> Group:
    """Return the placement of ranks that are `apart` devices apart; errors as in `group_of`, naming `name`."""
    if hardware.cluster is not None and hardware.cluster.torus:
        return Group(hardware, covered(name, ranks, stride, hardware))
    domains_left, levels = ranks, []
    for link, size in extents(hardware):
        if size is None:
            levels.append((link, domains_left))
            break
        # devices left over in a domain do not hold a whole group of the next axis
        one_per_domain = size == 1 or (stride.constant is not None and stride.constant >= size)
        room = ONE if one_per_domain else poly(Max(1, _rounded(sympy.floor, poly(size) / stride).expr))
        domains = ranks if one_per_domain else _rounded(sympy.ceiling, ranks / room)
        levels.append((link, domains_left / domains))
        domains_left = domains
    else:
        if domains_left.constant not in (None, 1):
            ranks_text = f"{ranks} ranks that are {stride} apart"
            raise SpecError(f"time of {name!r}: {ranks_text}, but the {link} joins at most {size:,} devices")
    return Group(hardware, tuple(levels))


def ranks_apart(op: Op, graph: Graph) -> tuple[Poly, Poly]:
    """Return the number of ranks and their distance in devices; each pipeline stage has a whole mesh."""
    assert isinstance(op.kind, Collective | Send)
    of_mesh, stage = graph.root.sharding, graph.root.waiting
    if op.kind.axis == "pp" and of_mesh is not None and stage is not None:
        devices = of_mesh.mesh.devices
        if isinstance(op.kind, Send) or op.kind.ranks == stage.stages:
            return stage.stages, devices
        return op.kind.ranks, devices * stage.stages / 2  # both ends, in one domain where all stages are
    stride = _stride(op, op.kind.axis, graph)
    return (poly(2) if isinstance(op.kind, Send) else op.kind.ranks), stride


def _stride(op: Op, axis: str, graph: Graph) -> Poly:
    """Return the distance in devices between neighbouring ranks of an axis."""
    if not axis:
        return ONE
    sharding = graph.root.sharding
    if sharding is None or axis not in sharding.mesh:
        expected = "a mesh, as in a graph from shard" if sharding is None else str(sharding.mesh)
        raise UnsupportedError(
            f"time of {op.name!r} over {axis!r} in graph {graph.name!r}: expected an axis of {expected}"
        )
    names, last = list(sharding.mesh), sharding.mesh.parts(axis)[-1]
    return prod((sharding.mesh[name] for name in names[names.index(last) + 1 :]), start=ONE)


def _rounded(rounding: Callable[[sympy.Expr], sympy.Expr], p: Poly) -> Poly:
    return poly(rounding(p.expr))


def _several(n: Poly) -> Poly:
    """Return 1 if n > 1, and 0 if n is 1."""
    return ONE - _rounded(sympy.floor, ONE / n)


def _levels(n: Poly) -> Poly:
    """Return the height of a binary tree."""
    return _rounded(sympy.ceiling, poly(sympy.log(n.expr) / sympy.log(2))) if n != ONE else ZERO


def whole(op: Op) -> Poly:
    """Return the bytes in the full gathered tensor, or for other collectives in the tensor on one rank."""
    kind, (x,), (gathered_tensor,) = op.kind, op.operands, op.results
    gathered = isinstance(kind, Collective) and kind.collective == "all_gather"
    return (gathered_tensor if gathered else x).numel * x.element_bytes()


def message(op: Op, values: Mapping[str, Poly]) -> tuple[Poly, str, Poly]:
    """Return the message count of a collective or send, its kind for `taken`, and the bytes per message."""
    (x,) = op.operands
    size = whole(op).bind(values)
    if isinstance(op.kind, Collective) and op.kind.ring:
        return op.kind.sends.bind(values), "send", size / op.kind.ranks.bind(values)
    # tensors stacked by a loop are sent one by one
    messages = prod(x.sizes[: x.storage.pieces], start=ONE).bind(values)
    return messages, op.kind.collective if isinstance(op.kind, Collective) else "send", size / messages


def exchange(op: Op, graph: Graph, values: Mapping[str, Poly], hardware: Hardware) -> tuple[Poly, str]:
    """Return the seconds of one collective or send, and its slowest link; errors as in `group_of`."""
    group = group_of(op, graph, values, hardware)
    if isinstance(op.kind, Collective) and op.kind.bucket:
        bucket = bucketed(graph, values)[op]  # its share of the time of each message
        times = (taken(op.kind.collective, poly(size), group) * mine / size for size, mine in bucket.parts.items())
        return total(times) / bucket.runs, group.link
    messages, collective, size = message(op, values)
    return messages * taken(collective, size, group), group.link


def taken(collective: str, size: Poly, group: Group) -> Poly:
    """Return the seconds of one collective: within domains, then over the network between them.

    `size` is in bytes, as from `whole`.

    A message takes latency + bytes/bandwidth. n = m*k ranks, m in each of k domains, pass chunks around: m - 1 steps
    within the domain and k - 1 between domains, with a fraction 1/m of the bytes there, since each rank has its own
    network card. An all-reduce takes the smaller of two algorithms: a reduce-scatter and an all-gather in such rings,
    or a double binary tree in which each rank receives and forwards all bytes twice (Patarasuk and Yuan 2009; Sanders,
    Speck and Traeff 2009). In an all-to-all, each rank sends a fraction 1/n to each other rank.
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
    """Return the smaller of two times, cached because a search requests the same messages for many structures."""
    return smaller(a, b)


def _steps(n: Poly, share: Poly, link: Callable[[], Wire]) -> Poly:
    """Return the time in which each of n ranks in a domain sends `share` bytes to each other one, over all links."""
    if n == ONE:
        return ZERO
    fast, peers = link(), n - 1
    moved = peers * share / fast.bandwidth if fast.pair == fast.bandwidth else _several(n) * share / fast.pair
    return peers * fast.latency + moved


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
    for (domain, reached), (_, link) in zip([*group.below()][1:], further, strict=True):
        if reached != domain:
            out += (reached - domain) * (link().latency + share / link().bandwidth)
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

    Latencies are ignored, and switches may reduce and multicast. A rank receives the missing part of a gathered tensor,
    or sends the other ranks' part of a scattered sum: (n - 1)/n of the bytes. The network carries the part from outside
    the domain, shared by the cards in the domain. In an all-reduce, each rank has to receive every sum once, since its
    own values are not enough: for many ranks half the bytes of a ring.
    """
    if group.torus:
        return least_around(collective, size, group.levels, group.hardware)
    out, n, nearer = {}, group.ranks, ONE
    further = [prod((ONE - _several(k) for k, _ in group.joined[i + 1 :]), start=ONE) for i in range(len(group.levels))]
    for (name, count), (domain, reached), beyond in zip(group.levels, group.below(), further, strict=True):
        amount = (reached - domain) / n / domain
        if collective == "all_to_all":
            amount *= domain
        elif collective == "all_reduce":
            amount = _several(count) * beyond / domain
        elif collective == "send":  # the next rank may be in the same domain
            amount = _several(count) * nearer
            nearer -= amount
        if count != ONE and amount:
            out[name] = amount * size / wire(group.hardware, name).bandwidth
    return out
