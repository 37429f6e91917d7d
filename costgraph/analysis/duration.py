"""How long a step takes on devices: the door, and the time of one whose layers are stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

from ..algebra.conditions import Condition, Conditions, Validity
from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..bind.evaluate import Formula, answer, real
from ..errors import UnsupportedError
from ..graph.arguments import need_choice
from ..graph.graph import Graph, need_graph
from ..graph.loop import is_pass
from ..graph.op import Op
from ..graph.placement import FORWARD, Waiting
from ..graph.sizes import known_names, of_stages
from ..hardware.networks import Network
from ..hardware.specs import Hardware
from ..ops.collectives import Collective
from ..ops.hops import Send
from .calibrated.loads import load_of
from .calibrated.model import shipped
from .exchange import exchange
from .passes import Shares, most, of_batches, of_shares
from .saved import behind
from .seconds import OVERLAPS, estimate, largest, lower_bound, spent, together, warn_of
from .work import Asked, Fallback, Work, ask, exact

__all__ = [
    "as_declared", "between", "by_pass", "holds_for", "in_total", "least", "of_pipeline", "seconds",
    "shares_of", "stages_asked", "when",
]  # fmt: skip

#: Seconds of some of the ops of a graph.
Timing: TypeAlias = Callable[[Asked], Poly]


def seconds(
    graph: Graph,
    hardware: str | Hardware,
    which: str = "estimate",
    /,
    *,
    fallback: Fallback = None,
    hierarchical: bool = False,
    overlap: str = "none",
    network: str | Network | None = None,
    **dims: int,
) -> Formula:
    """Return the time of a graph on a device, as a formula while sizes are open.

    Parameters
    ----------
    graph : Graph
        What is asked; of a pipeline, as `parallelize` makes it, the whole step counts.
    hardware : str, path-like or Hardware
        Name of a device, path of a TOML file, what `load_hardware` returned, or `symbolic()` of it.
    which : str
        estimate: the sum over ops, as declared, of the larger of compute and memory time. lower: what no run is below.
        calibrated: what devices were seen to attain of their peaks, at all sizes bound, collectives as estimated, and
        no less than the bound.
    fallback : str or mapping, optional
        Number format whose rate stands in for one that the device lacks, or a mapping from wanted to used format.
    hierarchical : bool
        Take each level of memory into account, as `roofline`.
    overlap : str
        Of collectives with all else, as `roofline`.
    network : str, path-like or Network, optional
        What is between the domains of its interconnect, as `roofline`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    float or sympy.Expr
        Seconds: the `estimate` or `lower_bound` of `roofline`, or the calibrated time, which is a float.

    Raises
    ------
    BindingError, GraphError
        If a size cannot be bound, or is open for a calibrated time, or there is no such time.
    SpecError
        If the device is unknown, has no rate at all, or lacks what is said of a link that a collective goes over.
    UnsupportedError
        If a calibrated time is asked for with `hierarchical`; as `roofline`.

    Warns
    -----
    StandInWarning
        If a rate is missing: the text says which one stands in. `roofline` has them as `stand_ins`.

    Notes
    -----
    Of Williams, Waterman and Patterson 2009, for each op. Ops with the same times are one term with their number, and
    what is decided for all sizes, assumptions included, is no maximum.

    A pipeline of GPipe takes the first micro-batch through all stages and back, each other one on the slowest stage
    each way; one of 1F1B the longest path through forwards and backwards of its stages. Then the sends that a stage
    waits for, 2 (p - 1) of GPipe, and of m micro-batches and p stages of 1F1B 2 (n - ceil(n/p)), n = m + p - 1; and
    once what follows the last micro-batch. It is what the events of `costgraph.plan.simulate` take where stages take
    the same times, and without sends of any stages; with sends rather more, as who waits for a slower stage does not
    wait for its sends. A formula of 1F1B with open micro-batches or stages holds from two micro-batches a stage on.

    Where collectives overlap, each stage takes as long in all as it does by itself, its passes shorter by the same
    factor; all sizes are bound then.

    Under other schedules it is m times the slowest rank, what that one waits as `costgraph.plan.bubble` has it, and the
    sends of one micro-batch there and back. Where ranks take the same times, these are the events of interleaved ones;
    of zero bubbles, of which more or fewer sends are waited for, they differ by some 2 p sends. What ranks reduce of
    gradients alone, behind the last micro-batch or of a single one, counts once.

    Stages of a pass without gradients, as of inference, have m batches on their way, one pass after the other: the time
    is that of one pass of them all, the larger of once through all stages with p - 1 sends and m times the slowest one.

    Examples
    --------
    >>> import costgraph as cg
    >>> N, M = cg.dims("N M")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     x = g.input("x", (N, M))
    ...     g.output(cg.relu(cg.linear(x, "n m -> n k", k=M)))
    >>> device = cg.load_hardware("h100-sxm").symbolic()
    >>> cg.seconds(g, device)
    M*N*Max(4/bandwidth, 1/vector_fp32) + 2*M*Max(M*N/peak_bf16, M/bandwidth + 2*N/bandwidth)
    >>> f"{cg.seconds(g, 'h100-sxm', N=8192, M=4096) * 1e6:.1f} us"
    '317.9 us'
    >>> sizes = {"N": 8192, "M": 4096}
    >>> cg.seconds(g, "h100-sxm", "calibrated", **sizes) > cg.seconds(g, "h100-sxm", "lower", **sizes)
    True
    """
    need_graph("seconds", graph)
    need_choice("seconds: which", which, ("estimate", "lower", "calibrated"))
    need_choice("seconds: overlap", overlap, OVERLAPS)
    stages = stages_asked(graph, hardware, fallback, dims, "seconds", hierarchical=hierarchical, network=network)
    if which == "calibrated":
        for asked in stages:
            _need_calibrated(asked)
        timed = _overlapping(stages, overlap, _calibrated, _calibrated_beside)
        found = poly(max(exact(timed), exact(least(stages))))
    else:
        found = least(stages) if which == "lower" else as_declared(stages, overlap)
    for asked in stages:
        warn_of(asked.hardware, asked.rates.stand_ins.values())
    return in_total(found, stages, () if which == "lower" else holds_for(stages))


def in_total(found: Poly, stages: Sequence[Asked], more: Sequence[Validity] = ()) -> Formula:
    """Return a time of all stages as it is handed out: a float, or a formula while something is open."""
    held = (*(v for asked in stages for v in asked.values.held), *more)
    return answer(found, held) if found.constant is None else real(Fraction(found.constant))


def stages_asked(
    graph: Graph, hardware: str | Hardware, fallback: Fallback, dims: Mapping[str, object], question: str, *,
    hierarchical: bool = False, network: str | Network | None = None,
) -> list[Asked]:  # fmt: skip
    """Return each stage of a pipeline on its device, with the sizes that it has; other graphs as they are."""
    if not graph.parts:
        return [ask(graph, hardware, fallback, dims, question, hierarchical=hierarchical, network=network)]
    parts = [(g, {k: n for k, n in dims.items() if k in known_names(g)}) for g, _ in of_stages(graph, dims)]
    return [ask(g, hardware, fallback, own, question, hierarchical=hierarchical, network=network) for g, own in parts]


def least(stages: Sequence[Asked]) -> Poly:
    """Return the seconds that no run is below: of several stages those of the busiest one."""
    first = _knows(stages[0]) if stages[0].graph.waiting is not None else None
    many = first.micro_batches if first is not None and first.schedule == FORWARD else ONE
    return many * most((lower_bound(asked) for asked in stages), stages[0].graph.root.relations)


def as_declared(stages: Sequence[Asked], overlap: str) -> Poly:
    """Return the estimate: a sum over ops as declared, of a pipeline with what its stages wait for."""
    return _overlapping(stages, overlap, _declared, _declared_beside)


def _overlapping(
    stages: Sequence[Asked], overlap: str, alone_timing: Timing, beside_timing: Callable[[Asked, str], Poly]
) -> Poly:
    """Return the time of all stages, from that of ops one after the other and of those that overlap as is said."""
    if len(stages) == 1:
        return beside_timing(stages[0], overlap)
    if overlap == "none":
        return of_pipeline(stages, alone_timing)
    taken = dict[Graph, Poly]()
    for asked in stages:
        asked.need_numbers(f"overlap {overlap!r} in a pipeline")
        rest = replace(asked, works=[w for w in asked.works if not between(w)])
        sent = alone_timing(replace(asked, works=[w for w in asked.works if between(w)]))  # waited for in any case
        alone, beside = alone_timing(rest), beside_timing(rest, overlap)
        taken[asked.graph] = (beside + sent) / (alone + sent) if alone else ONE
    return of_pipeline(stages, lambda part: alone_timing(part) * taken[part.graph])


def between(work: Work) -> bool:
    """Whether it is what stages do with each other."""
    return isinstance(work.op.kind, Collective | Send) and work.op.kind.axis == "pp"


def _declared(asked: Asked) -> Poly:
    return estimate([spent(w, asked) for w in asked.works], asked.graph.root.relations)


def _declared_beside(asked: Asked, overlap: str) -> Poly:
    return together([spent(w, asked) for w in asked.works], asked, overlap)


def of_pipeline(stages: Sequence[Asked], timing: Timing) -> Poly:
    """Return the seconds of a step of a pipeline, of which there is one stage of each kind."""
    facts = [_knows(asked) for asked in stages]
    known = stages[0].graph.root.relations
    send = most([time for asked in stages for time in _sends(asked)], known)
    if facts[0].schedule == FORWARD:
        return of_batches(facts, [timing(asked) for asked in stages], send, known)
    shares = [shares_of(asked, timing, facts[0].micro_batches) for asked in stages]
    return of_shares(facts, shares, send, known)


def holds_for(stages: Sequence[Asked]) -> tuple[Validity, ...]:
    """Return what the time of a pipeline holds for: where stages differ, 1F1B of which sizes are open."""
    facts = _knows(stages[0]) if len(stages) > 1 else None
    if facts is None or facts.schedule != "1f1b":
        return ()
    over = facts.micro_batches - 2 * facts.stages
    place = "micro-batches beyond two for each stage, from which on the time of stages that differ has this form,"
    asked = Condition(over, place, 0, True, frozenset(over.names()))
    return (Validity(Conditions((), (asked,))),) if over.names() else ()


def _knows(asked: Asked) -> Waiting:
    """Return what a stage knows of the others, sizes put in."""
    known, values = asked.graph.waiting, asked.values
    assert known is not None
    return replace(
        known, stages=known.stages.bind(values), micro_batches=known.micro_batches.bind(values),
        alike=known.alike.bind(values), ranks=tuple((a.bind(values), b.bind(values)) for a, b in known.ranks),
    )  # fmt: skip


def shares_of(asked: Asked, timing: Timing, m: Poly) -> Shares:
    """Return what a stage of a pipeline takes of a step of `m` micro-batches."""
    assert asked.graph.waiting is not None
    parts: dict[str, list[Work]] = {name: [] for name in Shares._fields}
    for work, part in zip(asked.works, by_pass(asked, asked.graph.waiting.schedule), strict=True):
        parts[part].append(work)
    forward, back, weights, once = (timing(replace(asked, works=part)) if part else ZERO for part in parts.values())
    return Shares(forward / m, back / m, weights / m, once)


def by_pass(asked: Asked, schedule: str) -> Iterator[str]:
    """Yield of which pass of a micro-batch each work of a stage is, as `Shares` has them."""
    apart = schedule not in ("gpipe", "1f1b", "interleaved")
    graphs = asked.graph.bodies()
    late = {op for g in graphs if is_pass(g) or g is asked.graph for op in behind(g)} if apart else set()
    return (when(work.op, late) for work in asked.works)


def when(op: Op, late: Collection[Op] = ()) -> str:
    """Say of which pass of a micro-batch an op is, or that it is done once a step."""
    root, alone = op.graph.root, _reduces(op)
    while op.graph is not root and not is_pass(op.graph):
        assert op.graph.owner is not None
        op = op.graph.owner
        alone = alone and (op.graph is root or not is_pass(op.graph))
    passes = op.graph is not root and is_pass(op.graph)
    several = any(is_pass(o.loop.body) for o in root.ops if o.loop)
    if op.phase == "optimizer" or (not passes and (several or alone)):
        return "once"
    return "forward" if op.phase == "forward" else "weights" if op in late else "backward"


def _reduces(op: Op) -> bool:
    """Whether an op puts gradients of ranks together that nothing before in the model waits for."""
    if not isinstance(op.kind, Collective) or op.phase != "backward":
        return False
    graph, reached = op.graph, {*op.results}
    for other in graph.ops[graph.ops.index(op) + 1 :]:
        if other.phase != "optimizer" and not reached.isdisjoint(other.operands):
            if isinstance(other.kind, Send) or (other.loop is not None and not reached.isdisjoint(other.loop.starts)):
                return False
            reached |= {*other.results}
    return graph.owner is None or graph.owner.loop is None or reached.isdisjoint(graph.owner.loop.nexts)


def _sends(asked: Asked) -> Iterator[Poly]:
    """Yield how long what a stage hands on is on its way."""
    for op in asked.graph.walk():
        if isinstance(op.kind, Send):
            yield exchange(op, asked.graph, asked.values, asked.hardware)[0]


def _need_calibrated(asked: Asked) -> None:
    """Refuse what has no calibrated time."""
    question = "seconds, calibrated,"
    if asked.levels:
        raise UnsupportedError(f"{question} of graph {asked.graph.name!r}: hierarchical=True, expected False: what a "
                               "cache attains is in the terms")  # fmt: skip
    asked.need_numbers(question)
    for work in asked.works:
        work.seconds(asked.rates)  # refuses what has no time


def _calibrated(asked: Asked) -> Poly:
    """Return what devices were seen to take, all sizes put in, one op after the other."""
    return poly(sum(_seen(asked), Fraction(0)))


def _calibrated_beside(asked: Asked, overlap: str) -> Poly:
    """Return the same where collectives overlap."""
    if overlap == "none":
        return _calibrated(asked)
    times = [[(poly(found), "calibrated")] for found in _seen(asked)]
    return together(times, asked, overlap)


def _seen(asked: Asked) -> list[Fraction]:
    """Return what devices were seen to take for each op.

    Links between devices and hosts are not calibrated: what they do takes its estimated time, the sends of a ring what
    of it is longer than the kernel that they are inside of.
    """
    apart = [bool(work.collective) or work.unit == "host" for work in asked.works]
    loads = [load_of(w, asked.values) for w, away in zip(asked.works, apart, strict=True) if not away and w.times]
    measured = iter(shipped().times(loads, asked.rates))
    known, found = asked.graph.root.relations, list[Fraction]()
    for work, away in zip(asked.works, apart, strict=True):
        if not work.times:
            found.append(Fraction(0))
        elif away:
            found.append(Fraction(exact(largest(spent(work, asked), known))))
        else:
            taken = Fraction(next(measured))
            found.append(max(taken, Fraction(exact(_of_links(asked, work)))) if work.rings else taken)
    return found


def _of_links(asked: Asked, work: Work) -> Poly:
    return total(exchange(op, asked.graph, asked.values, asked.hardware)[0] for op in work.rings) * work.times
