"""How long ranks take for a collective: over the links of their devices, and the least that these are busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod

import sympy

from ..algebra.extremum import Max, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..errors import SpecError, UnsupportedError
from ..graph.graph import Graph
from ..graph.op import Op
from ..hardware.links import Wire, extents, wire
from ..hardware.specs import Hardware
from ..ops.collectives import Collective
from ..ops.hops import Send
from .messages import bucketed
from .torus import around, covered, least_around

__all__ = ["Group", "exchange", "group_of", "least_busy", "message", "placed", "ranks_apart", "taken", "whole"]


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
