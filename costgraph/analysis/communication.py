"""Communication table: one row per collective in the graph of one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..algebra.polynomial import Poly, poly, total
from ..bind.evaluate import Formula, bound_answer
from ..errors import BindingError
from ..hardware.links import joined
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import (
    Bindings,
    Graph,
    Op,
    bindings,
    need_graph,
)
from ..ops.collectives import Collective, Send
from .collective_time import (
    bucketed,
    exchange,
    whole,
)
from .costs import executions
from .step_time import as_seconds
from .work import need_other_names

__all__ = ["Communication", "Message", "communication"]


@dataclass(frozen=True)
class Message:
    """A collective in the graph of one rank."""

    op: str
    """name of the op"""
    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send"""
    axis: str
    """mesh axis of its ranks, empty if none is named"""
    ranks: Formula
    """number of ranks"""
    phase: str
    """forward, recompute, backward or optimizer"""
    scope: str
    """module scope, levels separated by /"""
    times: Formula
    """number of executions"""
    bytes: Formula
    """bytes of the full gathered or reduced tensor, per execution"""
    ring_bytes: Formula
    """bytes that a rank sends in a ring algorithm, over all executions"""
    seconds: Formula | None = None
    """time on the given device, over all executions"""
    link: str = ""
    """interconnect, network or one of their levels; "link" while it depends on open degrees"""
    messages: Formula | None = None
    """number of messages, over all executions; a bucket counts for the op that completes it, None while sizes are
    open"""


@dataclass(frozen=True, repr=False)
class Communication(Table):
    """The collectives in a graph."""

    rows: tuple[Message, ...]
    """One row per op, in program order."""
    graph: str = field(default="", compare=False)
    """Name of the graph."""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Descriptions of dimensions."""

    def __iter__(self) -> Iterator[Message]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def filter(self, **facts: str) -> Communication:
        """Return the rows with the given values: `filter(collective="all_gather", phase="forward")`."""
        selected = (m for m in self.rows if all(getattr(m, name) == value for name, value in facts.items()))
        return replace(self, rows=tuple(selected))

    def total(self) -> Formula:
        """Return the bytes that a rank sends in ring algorithms, over all rows."""
        return sum((m.ring_bytes for m in self.rows), start=0)

    def _description(self) -> str:
        return f"graph {self.graph}: {len(self.rows)} collectives"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("op"), Column("collective"), Column("axis"), Column("ranks", unit="1"), Column("phase"),
            Column("scope", shown=False), Column("times", unit="1"), Column("bytes", unit="B"),
            Column("ring_bytes", unit="B", title="ring bytes"),
            *([Column("messages", unit="1")] if any(m.messages != m.times for m in self.rows) else []),
            *([Column("link"), Column("seconds", unit="s", title="time")] if any(m.link for m in self.rows) else []),
        )  # fmt: skip

    def _facts(self) -> Iterable[Fact]:
        times = [m.seconds for m in self.rows if m.seconds is not None]
        return (Fact("ring bytes", self.total(), "B"), *([Fact("time", sum(times), "s")] if times else []))


def communication(
    graph: Graph, /, *, hardware: str | Hardware | None = None, network: str | Network | None = None, **dims: int
) -> Communication:
    """List the collectives in the graph of one rank, with their bytes.

    Parameters
    ----------
    graph : Graph
        Sharded graph, for example from `shard`.
    hardware : str, path-like or Hardware, optional
        Device whose links determine the times, as in `roofline`.
    network : str, path-like or Network, optional
        Network between interconnect domains, as in `roofline`.
    **dims : int
        Sizes to bind, including mesh degrees.

    Returns
    -------
    Communication
        One row per collective. Bytes and times are formulas while a size is open.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    SpecError
        If the device is unknown, or lacks data on a link that a collective uses.
    UnsupportedError
        If a time is requested over an axis that the graph has no mesh for; some transforms drop the mesh.

    Notes
    -----
    In a ring of n ranks, each rank sends (n - 1)/n of the whole for an all-gather, a reduce-scatter or an all-to-all,
    and twice that for an all-reduce, which is one of each (Patarasuk and Yuan 2009, bandwidth optimal all-reduce).

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, n = cg.dims("B D F n")
    >>> with cg.Graph("mlp") as g:
    ...     h = cg.relu(cg.einsum(g.input("x", (B, D)), g.param("up", (D, F)), "b d, d f -> b f"))
    ...     g.output(cg.einsum(h, g.param("down", (F, D)), "b f, f d -> b d"))
    >>> s = cg.shard(g, cg.mesh(tp=n), {"up": "d (f tp)", "down": "(f tp) d"})
    >>> [(m.collective, m.axis, m.ring_bytes) for m in cg.communication(s)]
    [('all_reduce', 'tp', 8*B*D - 8*B*D/n)]
    >>> for m in cg.communication(s, hardware="h100-sxm", B=8192, D=8192, n=8):
    ...     print(f"{m.seconds * 1e6:.0f} us over the {m.link}")
    1092 us over the interconnect
    """
    need_graph("communication", graph)
    values = bindings(graph, dims)
    device = None if hardware is None else joined(hardware, network)
    if device is not None:
        need_other_names(graph, device, "communication")
    times: dict[Op, list[Poly]] = {}
    for op, runs, _ in executions(graph):
        if isinstance(op.kind, Collective | Send):
            times.setdefault(op, []).append(runs)
    rows = [
        _message(op, op.kind, total(runs), values)
        for op, runs in times.items()
        if isinstance(op.kind, Collective | Send)
    ]
    rows = [_in_messages(m, *facts, graph, values) for m, facts in zip(rows, times.items(), strict=True)]
    if device is not None:
        rows = [_timed(m, *facts, graph, values, device) for m, facts in zip(rows, times.items(), strict=True)]
    return Communication(tuple(rows), graph.name, dict(graph.root.legend))


def _timed(m: Message, op: Op, runs: list[Poly], graph: Graph, values: Bindings, device: Hardware) -> Message:
    seconds_once, link = exchange(op, graph, values, device)
    return replace(m, seconds=as_seconds(seconds_once * total(runs).bind(values), values), link=link)


def _in_messages(m: Message, op: Op, runs: list[Poly], graph: Graph, values: Bindings) -> Message:
    """Add the number of messages; bucketed reductions need all their sizes bound."""
    if not isinstance(op.kind, Collective) or not op.kind.bucket:
        return replace(m, messages=m.times)
    try:
        bucket = bucketed(graph, values)[op]
    except BindingError:
        return m
    return replace(m, messages=bound_answer(total(runs) * bucket.completes / bucket.runs, values))


def _message(op: Op, kind: Collective | Send, times: Poly, values: Bindings) -> Message:
    collective, ranks = (kind.collective, kind.ranks) if isinstance(kind, Collective) else ("send", poly(2))
    size = whole(op)
    ring_bytes = size * (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)
    if collective == "send":
        ring_bytes = size
    if isinstance(kind, Collective) and kind.ring:
        collective, times, size = "send", times * kind.sends, size / ranks
        ring_bytes = size

    def bound(p: Poly) -> Formula:
        return bound_answer(p, values)

    return Message(
        op.name, collective, kind.axis, bound(ranks), op.phase, op.scope, bound(times), bound(size),
        bound(ring_bytes * times),
    )  # fmt: skip
