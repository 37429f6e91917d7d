"""Stages of a pipeline: the graphs of its ranks, cut out of a training step between layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import shown, symbol
from ..errors import GraphError, UnsupportedError
from ..graph.arguments import need_choice, positive
from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.placement import FORWARD, Waiting
from ..graph.tensor import Tensor
from ..ops.collectives import Collective, need_of_all
from .rewrite import Rewriter
from .schedules import SCHEDULES, asked
from .stages_cut import Share
from .stages_halves import Halves
from .stages_held import Order
from .stages_plan import Plan, planned
from .stages_plan import micro_batches as micro_batches_of

__all__ = ["Kind", "Stage", "in_stages", "together", "waiting_of"]


class Stage(NamedTuple):
    """What a rank of a pipeline has."""

    graph: Graph
    waiting: Waiting | None = None
    shared: frozenset[str] = frozenset()
    """parameters that the rank at the other end has as well"""
    meets: Mapping[str, str] = MappingProxyType({})
    """where scalars of all ranks are put together, and how"""


@dataclass(frozen=True)
class Kind:
    """Ranks of a pipeline that do the same."""

    name: str
    ranks: tuple[Poly, ...]
    """of which one holds the most"""
    alike: Poly
    """how many"""
    layers: Poly
    first: bool = False
    last: bool = False
    between: Poly = ZERO
    """how often it hands on what it has made to another group of its layers, by way of other ranks"""
    runs: tuple[tuple[Poly, Poly], ...] = ()
    """the first and the last of those that are neighbours"""


def in_stages(
    graph: Graph, pp: object, schedule: str, micro_batches: object, virtual: object, layers: object = None, *,
    torch: bool = False,
) -> list[Stage]:  # fmt: skip
    """Return the graphs of the first rank, of those in the middle and of the last one, with what they hold.

    What waits for gradients of weights holds what these need, or under torch all that the forward pass has saved.
    """
    stages, m = positive("parallelize: pp", pp), positive("parallelize: micro_batches", micro_batches)
    need_choice("parallelize: schedule", schedule, SCHEDULES)
    every = _listed(layers, stages)
    groups = positive("parallelize: virtual", virtual)
    if every:
        stages = poly(len(every))
    if stages == ONE:
        for name, value in (("micro_batches", m), ("virtual", groups)):
            if value != ONE:
                raise UnsupportedError(f"parallelize: {name} is {value} of one stage, expected 1: a step accumulates")
        return [Stage(graph)]
    need_of_all("parallelize", graph)
    groups = _groups(schedule, groups, every)
    _, open_ones = asked(schedule, stages.expr, m.expr, groups.expr)
    order = Order(schedule, stages, m, groups)
    plan = planned(graph)
    if plan.backward is None:
        return _passes(graph, plan, order, every)
    if order.splits:
        graph = Halves(plan, whole=torch).run(graph)
        plan = planned(graph)
    if micro_batches_of(graph) != m:
        raise GraphError(
            f"parallelize: {m} micro_batches of graph {graph.name!r}, which has {micro_batches_of(graph)}, expected as "
            f"many: training_step(accumulate={m})"
        )
    count = _count(plan)
    kinds = (
        _uneven(order, every) if every else _both_ways(order, count) if order.made.both_ways else _even(order, count)
    )
    conditions = [c for validity in open_ones for c in validity.conditions.declared]
    wanted = [(c.formula, c.place, c.least) for c in conditions]
    if groups != ONE:
        wanted.append((count / (order.p * groups), f"layers of each of {groups} groups of a rank", 1))
    if stages.constant is None:
        wanted += [(stages, "stages of a pipeline", 2)]
    shares, shared = cut(graph, plan, kinds, both_ways=order.made.both_ways)
    made = [s.run(graph, f"{graph.name}.{k.name}".replace(" ", "_")) for s, k in zip(shares, kinds, strict=True)]
    more = [[(kind.alike, "stages between the first and the last one", 1)] * bool(kind.alike.names()) for kind in kinds]
    held = [
        replace(waiting_of(order, k, torch=torch), asked=(*wanted, *own)) for k, own in zip(kinds, more, strict=True)
    ]
    twice = order.made.both_ways
    ends = [shared if kind.first or kind.last or twice else frozenset() for kind in kinds]
    return list(map(Stage, made, held, ends, (share.meets for share in shares)))


def _passes(graph: Graph, plan: Plan, order: Order, every: Sequence[int]) -> list[Stage]:
    """Return the graphs of the ranks of a forward pass: as many batches are on their way as there are micro-batches."""
    if order.name != "1f1b" or order.v != ONE:
        raise UnsupportedError(
            f"parallelize: schedule {order.name!r} with {order.v} groups of layers of a rank, of graph {graph.name!r} "
            f"that has no backward pass, expected neither to be stated: batches go through one after the other"
        )
    kinds = _uneven(order, every) if every else _even(order, _count(plan))
    shares, _ = cut(graph, plan, kinds)
    made = [s.run(graph, f"{graph.name}.{k.name}".replace(" ", "_")) for s, k in zip(shares, kinds, strict=True)]
    return [Stage(g, Waiting((), (), FORWARD, order.p, order.m, k.alike)) for g, k in zip(made, kinds, strict=True)]


def _listed(layers: object, stages: Poly) -> tuple[int, ...]:
    """Return the layers of each stage, nothing where they are even."""
    if layers is None:
        return ()
    known = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    if not known or not all(type(n) is int and n > 0 for n in layers):  # type: ignore[attr-defined]
        raise GraphError(f"parallelize: layers is {shown(layers)}, expected a whole number of layers for each stage")
    every: tuple[int, ...] = tuple(layers)  # type: ignore[arg-type]
    if stages != poly(len(every)):
        raise GraphError(f"parallelize: layers of {len(every)} stages, expected as many as pp, which is {stages}")
    return every


def _groups(schedule: str, virtual: Poly, every: Sequence[int]) -> Poly:
    """Return the groups of layers of a rank."""
    made = SCHEDULES[schedule]
    groups = poly(made.chunks) if made.chunks is not None and virtual == ONE else virtual
    if every and groups != ONE:
        raise UnsupportedError(f"parallelize: layers of stages with {groups} groups each, expected stages of one group")
    return groups


def _count(plan: Plan) -> Poly:
    """Return the layers of all stages, those of another kind before them included: one symbol."""
    assert plan.forward.loop is not None
    count = plan.forward.loop.count + plan.before
    names = sorted(count.names())
    if len(names) != 1 or (plan.before and count != poly(symbol(names[0]))):
        raise UnsupportedError(f"parallelize: pp of {count} layers, expected a number of layers that is one symbol")
    return count


def _even(order: Order, count: Poly) -> list[Kind]:
    """Return the first rank, those in the middle, and the last one, with as many layers each."""
    p, folded, between = order.p, order.made.folded, order.v - 1
    share = poly(symbol(*count.names())) / p
    # a folded pipeline turns around within its last rank, and ends where it has begun
    last = Kind("last", (p - 1,), ONE, share, last=not folded, between=ZERO if folded else between)
    last = replace(last, runs=((p - 1, p - 1),))
    kinds = [Kind("first", (ZERO,), ONE, share, first=True, last=folded, between=between, runs=((ZERO, ZERO),))]
    if p.constant != 2:
        ends = tuple(dict.fromkeys((ONE, p - 2)))
        kinds.append(Kind("middle", ends, p - 2, share, between=between, runs=((ONE, p - 2),)))
    return [*kinds, last]


def _both_ways(order: Order, count: Poly) -> list[Kind]:
    """Return the ranks at both ends, which have both ends of the model, and those between them, alike by twos."""
    p, share = order.p, poly(symbol(*count.names())) / order.p
    first, last = (Kind(n, (ZERO,), ONE, share, first=True, last=True, between=ONE) for n in ("first", "last"))
    between = [Kind("middle", tuple(dict.fromkeys((ONE, p - 1))), 2 * p - 2, share, between=ONE)]
    return [first, *between * (p != ONE), last]


def _uneven(order: Order, every: Sequence[int]) -> list[Kind]:
    """Return the first rank, those in the middle that have as many layers as each other, and the last one."""
    last = len(every) - 1
    kinds = [Kind("first", (ZERO,), ONE, poly(every[0]), first=True, runs=((ZERO, ZERO),))]
    for n in dict.fromkeys(every[1:last]):
        ranks = [i for i in range(1, last) if every[i] == n]
        ends = tuple(dict.fromkeys((poly(ranks[0]), poly(ranks[-1]))))
        name = "middle" if len({*every[1:last]}) == 1 else f"middle of {n}"
        runs = tuple((poly(i), poly(i)) for i in ranks)
        kinds.append(Kind(name, ends, poly(len(ranks)), poly(n), runs=runs))
    end = poly(last)
    return [*kinds, Kind("last", (end,), ONE, poly(every[last]), last=True, runs=((end, end),))]


def waiting_of(order: Order, kind: Kind, *, torch: bool) -> Waiting:
    """Return what a rank of some that do the same knows of the others."""
    # of ranks in the middle, the first one has most that wait for their backward pass, the last one most for weights
    ranks = kind.ranks if order.splits else kind.ranks[:1]
    first, later = (
        tuple(dict.fromkeys(h for r in ranks for h in order.held(r, first=kind.first, last=kind.last, later=later)))
        for later in (False, True)
    )
    ends = order.ends(first=kind.first, last=kind.last, turns=kind.name == "last") if torch else (ZERO, ZERO)
    return Waiting(
        first, later, order.name, *order.whole, kind.alike, order.v, ranks=kind.runs, handed=torch, ends=ends
    )


def cut(
    graph: Graph, plan: Plan, kinds: Sequence[Kind], *, both_ways: bool = False
) -> tuple[list[Share], frozenset[str]]:
    """Return what ranks do, and the parameters that another one has as well: those of both ends, or all of them."""
    (name,) = _count(plan).names()
    _need_apart(plan, name)
    made = [
        Share(
            graph, plan, {name: kind.layers + (ZERO if kind.first else plan.before)},
            first=kind.first, last=kind.last, between=kind.between, half=both_ways,
        )
        for kind in kinds
    ]  # fmt: skip
    _need_own(plan, Share(graph, plan, {}, first=False, last=True))
    if plan.backward is None:  # both ends have what they read
        return made, frozenset()
    own = made[0].used if made[0].last else Share(graph, plan, {}, first=False, last=False).used
    tied = (made[0].used & made[-1].used) - own
    if both_ways:
        tied = {t for t in graph.tensors if t.role == "param"}
    late = next((t for t in tied if t.role == "param" and t.requires_grad and t not in graph.gradients), None)
    if late is not None:
        raise UnsupportedError(
            f"parallelize: pp: the gradient of {late.name!r} has a part in the first and in the last stage and is gone "
            f"before they meet, expected a step without optimizer_in_backward"
        )
    shared = frozenset(t.name for t in tied if t in graph.gradients)
    if shared and any(share.clips for share in made):
        raise UnsupportedError(
            f"parallelize: pp: gradients are clipped by their norm, to which {min(shared)!r} of both ends would count "
            f"twice, expected tables of one stage"
        )
    return made, shared


def _need_own(plan: Plan, last: Share) -> None:
    """Refuse layers that read what the last stage alone makes."""
    again = next((op for op in last.kept if op.loop and op not in plan.loops and op.phase != "optimizer"), None)
    if again is not None:
        raise UnsupportedError(
            f"parallelize: pp: {again.name!r} is read by layers of every stage, expected layers that hand on what "
            f"they make to the next one alone"
        )


class _Together(Rewriter):
    """Adds up the gradients of parameters that the first and the last stage have both, before they are updated.

    Scalars of all stages, of norms and of what is not finite, are put together too.
    """

    lies = True

    def __init__(self, graph: Graph, stage: Stage) -> None:
        super().__init__()
        self.left = [_before_updates(g) for t, g in graph.gradients.items() if t.name in stage.shared]
        self.stage = stage

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if new.parent is None and op.name in self.stage.meets:
            assert self.stage.waiting is not None
            ranks, operation = self.stage.waiting.stages, self.stage.meets[op.name]
            kind = Collective(collective="all_reduce", ranks=ranks, axis="pp", operation=operation)
            self.add(op, kind, [self.tensors[t] for t in op.operands], new)
            return
        while self.left and op.phase == "optimizer" and new.parent is None:
            g = self.left.pop()
            kind = Collective(collective="all_reduce", ranks=poly(2), axis="pp")
            made = new.add_op(kind, [self.tensors[g]], f"{g.name}.all_reduce", "backward")
            self.tensors[g] = made.results[0]
        super().emit(op, new, suffix)


def _before_updates(gradient: Tensor) -> Tensor:
    """Return what updates read of a gradient that stays: the buffer that it is a part of is seen once they are done."""
    while gradient.producer is not None and gradient.producer.phase == "optimizer":
        gradient = gradient.producer.operands[0]
    return gradient


def together(graph: Graph, stage: Stage) -> Graph:
    """Return the graph of one rank of a stage, with what goes on between stages."""
    made = _Together(graph, stage).run(graph) if stage.shared or stage.meets else graph
    made.waiting = stage.waiting
    return made


def _need_apart(plan: Plan, layers: str) -> None:
    """Refuse sizes outside of the layers that would change with their number."""
    for op in {*plan.behind, *plan.ahead}:
        for t in op.results:
            if any(layers in n.names() for n in t.sizes):
                raise UnsupportedError(
                    f"parallelize: pp: {t!r} has a size of the {layers} layers, expected none outside"
                )
