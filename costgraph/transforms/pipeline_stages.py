"""Pipeline parallelism: cut a step between layers into the graphs of its pipeline ranks.

Finds the cut, copies the part of each rank with its sends and receives, and, for zero-bubble schedules, splits the
backward pass into input gradients and weight gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from ..algebra.polynomial import ONE, ZERO, Poly, poly, total
from ..algebra.symbols import shown, symbol
from ..errors import GraphError, UnsupportedError
from ..ir.graph import (
    FORWARD,
    Graph,
    InFlightMicroBatches,
    Op,
    OpKind,
    Repeat,
    Tensor,
    carry_facts,
    is_pass,
    need_choice,
    opened,
    positive,
)
from ..ops.collectives import Collective, Receive, Send, need_of_all
from ..ops.elementwise import FUNCTIONS, Pointwise
from ..ops.layout import Concat, KeepAlive
from ..ops.loops import Accumulate, Kernel
from ..ops.updates import Unscale
from .pipeline_schedules import SCHEDULES, RankOrder, schedule_sizes
from .rewrite import Rewriter, bound, bound_record

__all__ = [
    "BACK",
    "StageCuts",
    "micro_batches_of",
    "planned",
    "StageExtractor",
    "SplitBackward",
    "EqualRanks",
    "Stage",
    "in_stages",
    "with_stage_reductions",
    "waiting_of",
]


# -- where to cut ------------------------------------------------------------------------------------------------------

#: Phases of the backward pass through the layers.
BACK = ("backward", "recompute")


@dataclass(frozen=True)
class StageCuts:
    """Where a step is cut: between a loop's layers, and between this loop and the ops at either end."""

    home: Graph
    """Graph that contains the loops over layers: the step, or its loop body over micro-batches."""
    forward: Op
    backward: Op | None
    """None for a pass without gradients."""
    last_stage: frozenset[Op]
    """Last-stage ops, after the forward layers and before the backward ones."""
    before: Poly
    """Number of leading layers of another kind, all in the first stage."""
    first_stage: frozenset[Op] = frozenset()
    """First-stage ops that read the gradients of the first layer's inputs."""
    sums: Mapping[Op, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sums of gradients from both stages, for shared parameters, with their two terms."""
    sum_readers: frozenset[Op] = frozenset()
    """Ops that read these sums."""
    weights: frozenset[Op] = frozenset()
    """Loops that compute weight gradients later, and the `KeepAlive` ops that extend live ranges until then."""

    @property
    def loops(self) -> frozenset[Op]:
        """Loops over layers that are divided between the stages."""
        return self.weights | ({self.forward} if self.backward is None else {self.forward, self.backward})


def _after(home: Graph, starts: Iterable[Tensor], stop: Op | None) -> frozenset[Op]:
    """Return the ops that depend on `starts`, up to the loop `stop`."""
    reached, ops = set(starts), set()
    for op in home.ops:
        if op is not stop and op.phase != "optimizer" and not reached.isdisjoint(op.operands):
            ops.add(op)
            reached |= {*op.results}
    return frozenset(ops)


def planned(graph: Graph) -> StageCuts:
    """Find where a graph is cut: at its last loop over layers and that loop's backward loop, if any."""
    micro_batch_loops = [op.loop.body for op in graph.ops if op.loop is not None and is_pass(op.loop.body)]
    home = micro_batch_loops[0] if micro_batch_loops else graph
    loops = [op.loop for op in home.ops if op.loop is not None and op.loop.starts and op.phase != "optimizer"]
    pairs = [
        (f, b) for f in loops for b in loops
        if f.op.phase == "forward" and b.op.phase in BACK and not set(f.pieces).isdisjoint(b.xs)
    ]  # fmt: skip
    if loops and all(op.phase == "forward" for op in graph.walk()):
        *others, last = loops
        return StageCuts(home, last.op, None, _after(home, last.lasts, None), total(f.count for f in others))
    if not pairs or len(loops) != 2 * len(pairs):
        raise UnsupportedError(
            f"parallelize: pp: graph {graph.name!r} has {len(loops)} loops with carries; expected loops over layers, "
            f"each with its backward pass in a training step"
        )
    forward, backward = pairs[-1]
    if len(backward.starts) > len(forward.starts):
        raise UnsupportedError(
            f"parallelize: pp: the layers of graph {graph.name!r} share a parameter; expected parameters of their own"
        )
    first_stage = _after(home, backward.lasts, None)
    last_stage = _after(home, forward.lasts, backward.op) - first_stage
    sums = dict(_sums(home, last_stage, first_stage))
    sum_readers = _after(home, [t for op in sums for t in op.results], None)
    before = total(f.count for f, _ in pairs[:-1])
    weights = {o for o in home.ops if o.loop is not None and not set(backward.pieces).isdisjoint(o.loop.xs)}
    weights |= {o for o in home.ops if isinstance(o.kind, KeepAlive) and o.operands[0].producer in weights}
    return StageCuts(
        home, forward.op, backward.op, last_stage, before, first_stage, sums, sum_readers, frozenset(weights)
    )


def _sums(
    home: Graph, last_stage: frozenset[Op], first_stage: frozenset[Op]
) -> Iterator[tuple[Op, tuple[Tensor, Tensor]]]:
    """Yield the ops that add last-stage gradients to first-stage ones."""
    for op in home.ops:
        late = [t for t in op.operands if t.producer in last_stage] if op in first_stage else []
        if not late:
            continue
        adds = isinstance(op.kind, Accumulate) or (isinstance(op.kind, Pointwise) and op.kind.function.name == "add")
        early = [t for t in op.operands if t not in late]
        if not adds or len(late) != 1 or len(early) != 1:
            raise UnsupportedError(
                f"parallelize: pp: {op.name!r} of the first stage reads {late[0]!r} of the last stage; expected only "
                f"sums of gradients to do so"
            )
        yield op, (late[0], early[0])


def micro_batches_of(graph: Graph) -> Poly:
    """Return the number of micro-batches in a step."""
    return next((op.loop.count for op in graph.ops if op.loop is not None and is_pass(op.loop.body)), ONE)


# -- the part of a rank ------------------------------------------------------------------------------------------------


class StageExtractor(Rewriter):
    """Copies one rank's part of a step; tensors on other ranks map to None.

    A rank with several layer groups runs them one after the other, sending its activations and receiving the next
    ones in between.
    """

    def __init__(
        self,
        graph: Graph,
        plan: StageCuts,
        values: Mapping[str, Poly],
        *,
        first: bool,
        last: bool,
        between: Poly = ZERO,
        half: bool = False,
    ) -> None:
        super().__init__(values)
        self.flags, self.all_reduces = dict[Tensor, None](), dict[str, str]()
        self.stage_scalars, self.split_stacks = set[Tensor](), set[Tensor]()
        """Scalars equal on all stages, and stacks of scalars that are split between stages."""
        self.graph, self.plan, self.first, self.last, self.between = graph, plan, first, last, between
        self.half = half
        """Whether half the micro-batches enter at each end: a pass runs one from each, in different layer groups."""
        self.required: set[Tensor] = set()
        self.ops = self.needed()
        self.used = self.sources()
        self.omitted = self.omitted_sources()

    # -- selection -----------------------------------------------------------------------------------------------

    def needed(self) -> set[Op]:
        """Return the ops that this stage executes, and record the tensors they read."""
        plan, ops = self.plan, {*self.plan.loops}
        if self.last:
            ops |= plan.last_stage | plan.sum_readers | plan.sums.keys()
        if self.first:
            ops |= plan.first_stage
            ops |= {op for op in plan.home.ops if op not in plan.last_stage and self.unread(op)}
        for op in reversed(plan.home.ops):
            if op in ops or not self.required.isdisjoint(op.results):
                if op in plan.last_stage and not self.last:
                    raise UnsupportedError(f"parallelize: pp: the first stage needs {op.name!r} of the last stage")
                ops.add(op)
                self.required |= {*self.read(op)}
        if self.last:
            self.required |= {*plan.home.outputs} & {t for op in ops for t in op.results}
        return ops

    def unread(self, op: Op) -> bool:
        """Whether a forward op has only a side effect: it writes into its operand."""
        return (
            op.phase == "forward"
            and bool(op.kind.overwrites())
            and not any(list(self.plan.home.successors(t)) for t in op.results)
        )

    def read(self, op: Op) -> tuple[Tensor, ...]:
        """Return the operands that exist on this stage."""
        assert op.kind is not None
        if self.receives_carries(op):
            assert isinstance(op.kind, Repeat)
            return op.operands[op.kind.carries :]
        if op in self.plan.sums and not (self.first and self.last):
            late, early = self.plan.sums[op]
            so_far = self.initial_value(op)
            return (late,) if self.last else (early,) if so_far is None else (so_far, early)
        return op.operands

    def initial_value(self, op: Op) -> Tensor | None:
        """Return a sum's initial value without last-stage terms, None for a sum of two terms."""
        t = op.operands[0]
        while isinstance(op.kind, Accumulate) and t.producer in self.plan.last_stage:
            if not isinstance(t.producer.kind, Accumulate):
                return None
            t = t.producer.operands[0]
        return t if isinstance(op.kind, Accumulate) else None

    def receives_carries(self, op: Op) -> bool:
        """Whether a loop's carries are received from a neighbour."""
        return (op is self.plan.forward and not self.first) or (op is self.plan.backward and not self.last)

    def sends_carries(self, op: Op) -> bool:
        """Whether a loop's final carries are sent to a neighbour."""
        return (op is self.plan.forward and not self.last) or (op is self.plan.backward and not self.first)

    def sources(self) -> set[Tensor]:
        """Return the tensors outside the pass that this stage needs."""
        used = set(self.required)
        if self.plan.home is not self.graph:
            owner = self.plan.home.owner
            assert owner is not None
            used = {t for f, t in zip(self.plan.home.formals, owner.operands, strict=True) if f in self.required}
            for op in reversed(self.graph.ops):
                if op is not owner and op.phase != "optimizer" and not used.isdisjoint(op.results):
                    used |= {*op.operands}
        return used

    def omitted_sources(self) -> set[Tensor]:
        """Return the sources that this stage does not have, including their optimizer state."""
        sources = [t for t in self.graph.tensors if t.producer is None]
        out = {t for t in sources if t not in self.used and t.role in ("param", "input", "buffer", "cache")}
        names = {t.name for t in out if t.role == "param"}
        return out | {t for t in sources if t.name.rpartition(".")[0] in names and t.role in ("state", "gradient")}

    # -- copying -------------------------------------------------------------------------------------------------

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the rank's graph."""
        new = Graph(old.name if name is None else name, dtype=old.dtype)
        carry_facts(old, new)
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(copy for t in old.outputs if (copy := self.tensors[t]) is not None))
            grads = {self.tensors[t]: self.tensors[g] for t, g in old.gradients.items() if t not in self.omitted}
            new.gradients |= {t: g for t, g in grads.items() if t is not None and g is not None}
        return new.freeze()

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor | None:
        """Copy a source, unless it belongs to another rank."""
        if old in self.omitted:
            return None
        copy: Tensor = super().source(old, new, suffix)
        passes = self.plan.home.owner
        if (
            self.half
            and passes is not None
            and passes.loop is not None
            and old in passes.loop.xs
            and old.role == "input"
        ):
            copy.sizes = (copy.sizes[0] / 2, *copy.sizes[1:])
        return copy

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy the rank's part of an op."""
        if op.graph is self.plan.home and op.phase != "optimizer":
            self.inside_pass(op, new)
        elif op.body is self.plan.home:
            self.micro_batch_loop(op, new)
        elif op.graph is self.graph:
            self.outside_pass(op, new)
        else:
            self.copy(op, new, suffix)

    def inside_pass(self, op: Op, new: Graph) -> None:
        """Copy an op in the pass, with its receives and sends."""
        if op not in self.ops:
            self.tensors |= dict.fromkeys(op.results)
            return
        if op in self.plan.sums and not (self.first and self.last):
            read = [self.tensors[t] for t in self.read(op)]
            self.tensors[op.results[0]] = read[-1]
            if len(read) > 1:
                self.add(op, op.kind, read, new)
            return
        for t in op.loop.starts if op.loop is not None and self.receives_carries(op) else ():
            kind = Receive(sizes=tuple(bound(n, self.values) for n in t.sizes), dtype=t.dtype)
            self.tensors[t] = new.add_op(kind, [], f"{op.name}.receive", op.phase).results[0]
        self.copy(op, new)
        if op in (self.plan.forward, self.plan.backward) and self.between != ZERO:
            self.exchange_groups(op, new)
        for t in op.loop.lasts if op.loop is not None and self.sends_carries(op) else ():
            new.add_op(Send(), [self.tensors[t]], f"{op.name}.send", op.phase)

    def exchange_groups(self, op: Op, new: Graph) -> None:
        """Add sends and receives between layer groups; the next ones are on other ranks."""
        assert op.loop is not None
        body = new.start_body(f"{op.name}.groups", fused=False)
        starts = [self.tensors[t] for t in op.loop.lasts]
        for i, t in enumerate(starts):
            f = body.formal(t, f"{op.name}.group{i}", t.sizes, t.strides)
            body.add_op(Send(), [f], f"{op.name}.between.send", op.phase)
            receive = Receive(sizes=t.sizes, dtype=t.dtype)
            body.outputs += body.add_op(receive, [], f"{op.name}.between.receive", op.phase).results
        kind = Repeat(body=body, count=self.between, carries=len(starts), xs=0)
        exchange = new.add_op(kind, starts, f"{op.name}.between", op.phase)
        exchange.scope, body.owner = op.scope, exchange
        self.tensors |= dict(zip(op.loop.lasts, exchange.results, strict=True))

    def micro_batch_loop(self, op: Op, new: Graph) -> None:
        """Copy the loop over micro-batches, with this stage's carries and slices."""
        old, loop = self.plan.home, op.loop
        assert loop is not None
        assert isinstance(op.kind, Repeat)
        formals = [f for f in old.formals if f in self.required]
        body = new.start_body(old.name, fused=False)
        for f in formals:
            self.tensors[f] = self.formal(f, body)
        self.fill(old, body)
        present = [
            (t, r)
            for i, (t, r) in enumerate(zip(old.outputs, op.results, strict=True))
            if (old.formals[i] in self.required if i < op.kind.carries else self.tensors[t] is not None)
        ]
        body.outputs += [body.adopt(self.tensors[t]) for t, _ in present]
        kind = replace(
            bound_record(op.kind, self.values), body=body,
            count=bound(loop.count, self.values) / (2 if self.half else 1),
            carries=sum(f in self.required for f in loop.carries), xs=sum(f in self.required for f in loop.slices),
        )  # fmt: skip
        operands = [self.tensors[t] for f, t in zip(old.formals, op.operands, strict=True) if f in self.required]
        loop_op = new.add_op(kind, operands, op.name, op.phase)
        loop_op.scope, body.owner = op.scope, loop_op
        self.tensors |= dict.fromkeys(op.results)
        self.tensors |= dict(zip((r for _, r in present), loop_op.results, strict=True))

    def outside_pass(self, op: Op, new: Graph) -> None:
        """Copy an op outside the pass, such as an update, unless it belongs to another stage."""
        if op.phase != "optimizer":
            if self.used.isdisjoint(op.results):
                self.tensors |= dict.fromkeys(op.results)
            else:
                self.copy(op, new)
            return
        self.flags |= dict.fromkeys(flags := [*_flags(op)])
        if self.flags and not flags:
            self.mark_all_reduce(list(self.flags), "max", op, new)
            self.flags = {}
        missing = [t for t in op.operands if self.tensors[t] is None]
        present = [
            t
            for t in op.operands
            if self.tensors[t] is not None and t not in self.stage_scalars and (t.ndim or t.producer)
        ]
        stack = _is_stack(op)
        if missing and present and not stack:
            raise UnsupportedError(
                f"parallelize: pp: {op.name!r} combines {missing[0].name!r} and {present[0].name!r} of different "
                f"stages; expected a separate update for each parameter"
            )
        if stack:
            self.add(op, op.kind, [self.tensors[t] for t in op.operands if self.tensors[t] is not None], new)
            self.split_stacks |= {*op.results}
        elif missing:
            self.tensors |= dict.fromkeys(op.results)
        else:
            self.copy(op, new)
            self.stage_scalars |= {t for t in op.results if not t.ndim and all(map(self.is_stage_scalar, op.operands))}
            if not self.split_stacks.isdisjoint(op.operands):
                self.norm_of_all(op, new)

    def is_stage_scalar(self, t: Tensor) -> bool:
        """Whether a scalar is equal on all stages: step counts, scales, and their functions."""
        return t in self.stage_scalars or (not t.ndim and t.producer is None)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped by a global norm."""
        return any(map(_is_stack, self.graph.ops))

    def norm_of_all(self, op: Op, new: Graph) -> None:
        """Turn the norm of a stage's gradients into the global norm: all-reduce the squares, then take the root."""
        if op.results[0].ndim or not isinstance(op.kind, Kernel) or op.kind.body.ops[-1].kind != _ROOT:
            raise UnsupportedError(
                f"parallelize: pp: {op.name!r} reduces over parameters of all stages; expected a 2-norm"
            )
        (t,) = op.results
        self.tensors[t] = self.step(Pointwise(function=FUNCTIONS["square"]), t, f"{t.name}.square", op, new)
        self.mark_all_reduce([t], "sum", op, new)
        self.tensors[t] = self.step(_ROOT, t, f"{t.name}.root", op, new)

    def mark_all_reduce(self, tensors: Sequence[Tensor], operation: str, op: Op, new: Graph) -> None:
        """Mark scalars for an all-reduce over the stages, inserted once all placements are known."""
        for t in tensors:
            self.tensors[t] = self.step(KeepAlive(), t, f"{t.name}.all_reduce", op, new)
            self.all_reduces[self.tensors[t].producer.name] = operation
            self.stage_scalars.add(t)

    def step(self, kind: OpKind, t: Tensor, name: str, op: Op, new: Graph) -> Tensor:
        """Add an op on a rewritten tensor, in another op's scope."""
        added = new.add_op(kind, [self.tensors[t]], name, op.phase)
        added.scope = op.scope
        return added.results[0]


def _is_stack(op: Op) -> bool:
    """Whether an op stacks one scalar per parameter, such as norms, so that each stage has some."""
    axes = {t.ndim - t.storage.pieces for t in op.operands}
    return op.phase == "optimizer" and isinstance(op.kind, Concat) and axes == {1}


def _flags(op: Op) -> Iterator[Tensor]:
    """Yield the scalars that an op sets if a gradient is not finite."""
    if isinstance(op.kind, Unscale):
        yield op.operands[-1]
    elif op.loop is not None:
        outside = dict(zip(op.loop.captured, op.loop.shared, strict=True))
        yield from (outside[t] for inner in op.loop.body.ops for t in _flags(inner) if t in outside)


_ROOT = Pointwise(function=FUNCTIONS["sqrt"])


# -- split backward ----------------------------------------------------------------------------------------------------
# Zero-bubble schedules compute input gradients first and weight gradients later.


@dataclass(frozen=True)
class _Parts:
    """Split of a backward pass."""

    late: frozenset[Op]
    """Ops that contribute only to weight gradients."""
    out_of_place: frozenset[Op]
    """In-place ops that become out-of-place, because late ops read the value they would overwrite."""


def _parts(ops: Sequence[Op], required: Collection[Tensor]) -> _Parts:
    """Split ops into those that `required` depends on and late ones, which only weight gradients need.

    An op is not late if it reads a tensor that is overwritten by then, or overwrites one that is read before.
    """
    immediate, read = set[Op](), set(required)
    while True:
        for op in reversed(ops):
            if op in immediate or not read.isdisjoint(op.results):
                immediate.add(op)
                read |= {*op.operands}
        late = [op for op in ops if op not in immediate]
        out_of_place, moved = _overwriting(ops, late)
        if not moved:
            return _Parts(frozenset(late), frozenset(out_of_place))
        immediate |= moved


def _overwriting(ops: Sequence[Op], late: Collection[Op]) -> tuple[set[Op], set[Op]]:
    """Return the ops that must become out-of-place for late ops, and the late ops that cannot be late."""
    late_reads = {t for op in late for t in op.operands}
    versions: dict[Tensor, object] = {}
    by_version: dict[object, set[Tensor]] = {}
    out_of_place, moved = set[Op](), set[Op]()
    for op in ops:
        for t in op.operands:
            by_version.setdefault(versions.setdefault(t, t.storage), set()).add(t)
        if op in late:
            continue
        for i in op.kind.overwrites():
            version = versions[op.operands[i]]
            overwritten = by_version[version] & late_reads
            if overwritten and _out_of_place(op.kind) is not None:
                out_of_place.add(op)
            else:
                moved |= {o for o in late if not overwritten.isdisjoint(o.operands)}
        read = {t.storage for t in op.operands}
        before = (o for o in ops[: ops.index(op)] if o in late)
        moved |= {o for o in before if any(o.operands[i].storage in read for i in o.kind.overwrites())}
        for t in op.results:
            same = next((versions[o] for o in op.operands if o.storage is t.storage), t.storage)
            versions[t] = op if op in out_of_place else same
            by_version.setdefault(versions[t], set()).add(t)
    return out_of_place, moved


def _out_of_place(kind: OpKind) -> OpKind | None:
    """Return a kind's out-of-place version, None if there is none."""
    if isinstance(kind, Accumulate):
        return Pointwise(function=FUNCTIONS["add"])
    return replace(kind, inplace=False) if isinstance(kind, Pointwise) and kind.inplace else None


class SplitBackward(Rewriter):
    """Copies a step, splitting each micro-batch's backward pass in two.

    The first half computes the layers' input gradients, the second one the weight gradients, each in its own
    loop. The first loop stacks residuals for the second one, with a storage per iteration.
    """

    def __init__(self, plan: StageCuts, *, retain_saved: bool = False) -> None:
        super().__init__()
        assert plan.backward is not None
        self.back, loop = plan.backward, plan.backward.loop
        assert loop is not None
        if loop.until or plan.before or any(t.producer is None and t.role != "formal" for t in loop.body.tensors):
            raise UnsupportedError(
                f"parallelize: schedule: {loop.op.name!r} is a backward loop over several kinds of layers, or over "
                f"some of them; expected one loop from which weight gradients can be split off"
            )
        self.plan, self.loop, self.deferred, self.retain_saved = plan, loop, list[Op](), retain_saved
        before = [op for op in plan.home.ops if op.phase in BACK]
        self.outer_parts = _parts(before[: before.index(self.back)], self.back.operands)
        self.layer_parts = _parts(loop.body.ops, loop.nexts)
        self.recomputed = set[Op]()
        self.crossing = list(dict.fromkeys(self.needed()))

    def needed(self) -> Iterator[Tensor]:
        """Yield the tensors that weight gradients need from the first half; views of them are made again."""
        ahead = [t for op in reversed(self.loop.body.ops) if op in self.layer_parts.late for t in op.operands]
        inputs = {*self.loop.slices, *self.loop.captured}
        for t in ahead:  # grows during iteration
            op = t.producer
            if t in inputs or op in self.layer_parts.late:
                continue
            if op is None or op in self.layer_parts.out_of_place or op.kind.overwrites() or not _is_view(op):
                yield t
            else:
                self.recomputed.add(op)
                ahead += op.operands[:1] if isinstance(op.kind, KeepAlive) else op.operands

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op; late ops wait for the loop over layers."""
        if op in self.outer_parts.late:
            self.deferred.append(op)
        elif op in self.outer_parts.out_of_place or op in self.layer_parts.out_of_place:
            kind = _out_of_place(op.kind)
            assert kind is not None
            self.add(op, kind, [self.tensors[t] for t in op.operands], new)
        elif op is self.back:
            self.add_loops(new)
        else:
            super().emit(op, new, suffix)

    # -- loops over layers ---------------------------------------------------------------------------------------

    def add_loops(self, new: Graph) -> None:
        """Add the loop for input gradients, and the one for weight gradients."""
        loop, late = self.loop, self.layer_parts.late
        outer = dict(zip(loop.slices, loop.xs, strict=True)) | dict(zip(loop.captured, loop.shared, strict=True))
        values = {f: self.tensors[t] for f, t in outer.items()}
        immediate = [op for op in loop.body.ops if op not in late]
        residuals = self.add_loop(immediate, values, loop.carries, new)
        for op in self.deferred:
            self.copy(op, new)
        values = dict(zip(self.crossing, residuals, strict=True)) | values
        self.add_loop([op for op in loop.body.ops if op in late or op in self.recomputed], values, (), new)
        if self.retain_saved:
            self.keep_saved(new)

    def keep_saved(self, new: Graph) -> None:
        """Keep saved tensors alive until the weight gradients exist, as the autograd graph does.

        Tensors saved after the last op with weights are not reachable from these gradients and are freed before.
        """
        late, home, loop = self.outer_parts.late, self.plan.home, self.loop
        immediate = [op for op in home.ops if op.phase in BACK and op not in late]
        reached = {t for op in late for t in op.operands} & {t for op in immediate for t in op.results}
        read: list[Tensor] = []
        for op in immediate[: immediate.index(self.back)]:
            if not reached.isdisjoint(op.operands):
                reached |= {*op.results}
                read += op.operands
        late_results = (t for i, t in enumerate(loop.op.results) if self.is_late(i, loop.body.outputs[i]))
        outside = (t for op in self.deferred for t in op.results if t in home.outputs or {*home.successors(t)} - late)
        for done, saved in ((next(late_results, None), loop.xs), (next(outside, None), read)):
            tensors = [t for t in dict.fromkeys(saved) if t.producer is not None and t.producer.phase == "forward"]
            if done is not None and tensors:
                op = new.add_op(
                    KeepAlive(), [self.tensors[t] for t in (done, *tensors)], f"{done.name}.kept", "backward"
                )
                op.scope = loop.op.scope
                self.tensors[done] = op.results[0]

    def add_loop(
        self, ops: Sequence[Op], values: Mapping[Tensor, Tensor], carries: Sequence[Tensor], new: Graph
    ) -> Sequence[Tensor]:
        """Add a loop with some backward ops, and return its residuals for the other loop."""
        loop = self.loop
        fixed, first = len(loop.nexts) + len(loop.ys), bool(carries)
        outputs = [(i, t) for i, t in enumerate(loop.body.outputs) if self.is_late(i, t) != first]
        crossing = self.crossing if first else []
        read = {t for op in ops for t in op.operands} | {t for _, t in outputs}
        slices = [t for t in values if t in read and t not in loop.captured]
        shared = [t for t in values if t in read and t in loop.captured]
        starts = [self.tensors[t] for t in loop.starts] if first else []
        body = new.start_body(loop.body.name, fused=False)
        for t in (*carries, *slices, *shared):
            self.tensors[t] = self.formal(t, body)
        for op in ops:
            if op in self.recomputed and not first and isinstance(op.kind, KeepAlive):
                self.tensors[op.results[0]] = self.tensors[op.operands[0]]
            elif first:
                self.emit(op, body)
            else:
                self.copy(op, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in (*(t for _, t in outputs), *crossing)]
        saved = sum(i >= fixed for i, _ in outputs) + len(crossing)
        kind = replace(bound_record(loop.kind, {}), body=body, carries=len(carries), xs=len(slices), saved=saved)
        operands = [*starts, *(values[t] for t in (*slices, *shared))]
        loop_op = new.add_op(kind, operands, loop.op.name if first else f"{loop.op.name}.weights", loop.op.phase)
        loop_op.scope, body.owner = loop.op.scope, loop_op
        results = [loop.op.results[i] for i, _ in outputs]
        self.tensors |= dict(zip(results, loop_op.results[: len(results)], strict=True))
        return loop_op.results[len(results) :]

    def is_late(self, i: int, t: Tensor) -> bool:
        """Whether an output of the body belongs to the second half."""
        return i >= len(self.loop.nexts) and t.producer in self.layer_parts.late


def _is_view(op: Op) -> bool:
    return any(op.results[0].storage is t.storage for t in op.operands)


# -- stages ------------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """Graph of a pipeline rank, and its relation to other ranks."""

    graph: Graph
    waiting: InFlightMicroBatches | None = None
    shared: frozenset[str] = frozenset()
    """parameters that the rank at the other end has too"""
    all_reduces: Mapping[str, str] = MappingProxyType({})
    """all-reduces of scalars over the stages: op name to reduction"""


@dataclass(frozen=True)
class EqualRanks:
    """Pipeline ranks with identical work."""

    name: str
    ranks: tuple[Poly, ...]
    """candidates for the rank with the highest memory"""
    alike: Poly
    """number of ranks"""
    layers: Poly
    first: bool = False
    last: bool = False
    between: Poly = ZERO
    """number of exchanges with other ranks between its layer groups"""
    runs: tuple[tuple[Poly, Poly], ...] = ()
    """first and last rank of each contiguous range"""


def in_stages(
    graph: Graph, pp: object, schedule: str, micro_batches: object, virtual_stages: object, layers: object = None, *,
    torch: bool = False,
) -> list[Stage]:  # fmt: skip
    """Return the graphs of the first, middle and last ranks, with their in-flight activations.

    Between input and weight gradients, a rank holds the residuals of the latter, or with `torch` all saved tensors.
    """
    stages, m = positive("parallelize: pp", pp), positive("parallelize: micro_batches", micro_batches)
    need_choice("parallelize: schedule", schedule, SCHEDULES)
    layer_counts = _listed(layers, stages)
    groups = positive("parallelize: virtual_stages", virtual_stages)
    if layer_counts:
        stages = poly(len(layer_counts))
    if stages == ONE:
        for name, value in (("micro_batches", m), ("virtual_stages", groups)):
            if value != ONE:
                raise UnsupportedError(f"parallelize: {name} is {value} with one pipeline stage, expected 1")
        return [Stage(graph)]
    need_of_all("parallelize", graph)
    groups = _groups(schedule, groups, layer_counts)
    _, unresolved = schedule_sizes(schedule, stages.expr, m.expr, groups.expr)
    order = RankOrder(schedule, stages, m, groups)
    plan = planned(graph)
    if plan.backward is None:
        return _passes(graph, plan, order, layer_counts)
    if order.splits:
        graph = SplitBackward(plan, retain_saved=torch).run(graph)
        plan = planned(graph)
    if micro_batches_of(graph) != m:
        raise GraphError(
            f"parallelize: micro_batches is {m}, but graph {graph.name!r} has {micro_batches_of(graph)}; expected a "
            f"step from training_step(accumulate={m})"
        )
    count = _count(plan)
    kinds = (
        _uneven(order, layer_counts)
        if layer_counts
        else _both_ways(order, count)
        if order.schedule.both_ways
        else _even(order, count)
    )
    conditions = [c for validity in unresolved for c in validity.conditions.declared]
    requirements = [(c.formula, c.place, c.least) for c in conditions]
    if groups != ONE:
        requirements.append((count / (order.p * groups), f"layers per group, with {groups} groups per rank", 1))
    if stages.constant is None:
        requirements += [(stages, "stages of a pipeline", 2)]
    shares, shared = cut(graph, plan, kinds, both_ways=order.schedule.both_ways)
    graphs = [s.run(graph, f"{graph.name}.{k.name}".replace(" ", "_")) for s, k in zip(shares, kinds, strict=True)]
    extras = [
        [(kind.alike, "stages between the first and the last one", 1)] * bool(kind.alike.names()) for kind in kinds
    ]
    in_flight = [
        replace(waiting_of(order, k, torch=torch), asked=(*requirements, *extra))
        for k, extra in zip(kinds, extras, strict=True)
    ]
    twice = order.schedule.both_ways
    shared_by_kind = [shared if kind.first or kind.last or twice else frozenset() for kind in kinds]
    return list(map(Stage, graphs, in_flight, shared_by_kind, (share.all_reduces for share in shares)))


def _passes(graph: Graph, plan: StageCuts, order: RankOrder, layer_counts: Sequence[int]) -> list[Stage]:
    """Return the graphs for the ranks of a forward pass, with as many batches in flight as micro-batches."""
    if order.name != "1f1b" or order.v != ONE:
        raise UnsupportedError(
            f"parallelize: schedule {order.name!r} with {order.v} layer groups per rank, but graph {graph.name!r} has "
            f"no backward pass; omit schedule= and virtual_stages=, as batches run one after the other"
        )
    kinds = _uneven(order, layer_counts) if layer_counts else _even(order, _count(plan))
    shares, _ = cut(graph, plan, kinds)
    graphs = [s.run(graph, f"{graph.name}.{k.name}".replace(" ", "_")) for s, k in zip(shares, kinds, strict=True)]
    return [
        Stage(g, InFlightMicroBatches((), (), FORWARD, order.p, order.m, k.alike))
        for g, k in zip(graphs, kinds, strict=True)
    ]


def _listed(layers: object, stages: Poly) -> tuple[int, ...]:
    """Return the number of layers per stage, empty for an even split."""
    if layers is None:
        return ()
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str) and len(layers) > 0
    if not is_list or not all(type(n) is int and n > 0 for n in layers):  # type: ignore[attr-defined]
        raise GraphError(f"parallelize: layers is {shown(layers)}, expected a positive number of layers for each stage")
    layer_counts: tuple[int, ...] = tuple(layers)  # type: ignore[arg-type]
    if stages != poly(len(layer_counts)):
        raise GraphError(f"parallelize: layers lists {len(layer_counts)} stages, expected pp={stages}")
    return layer_counts


def _groups(schedule: str, virtual_stages: Poly, layer_counts: Sequence[int]) -> Poly:
    """Return the number of layer groups per rank."""
    spec = SCHEDULES[schedule]
    groups = poly(spec.chunks) if spec.chunks is not None and virtual_stages == ONE else virtual_stages
    if layer_counts and groups != ONE:
        raise UnsupportedError(f"parallelize: layers with {groups} layer groups per rank, expected one group per rank")
    return groups


def _count(plan: StageCuts) -> Poly:
    """Return the number of layers, including any of another kind: a single symbol."""
    assert plan.forward.loop is not None
    count = plan.forward.loop.count + plan.before
    names = sorted(count.names())
    if len(names) != 1 or (plan.before and count != poly(symbol(names[0]))):
        raise UnsupportedError(f"parallelize: pp: the number of layers is {count}, expected a single symbol")
    return count


def _even(order: RankOrder, count: Poly) -> list[EqualRanks]:
    """Return the first, middle and last ranks, with equal numbers of layers."""
    p, folded, between = order.p, order.schedule.folded, order.v - 1
    share = poly(symbol(*count.names())) / p
    # a folded pipeline turns at its last rank and ends on its first
    last = EqualRanks("last", (p - 1,), ONE, share, last=not folded, between=ZERO if folded else between)
    last = replace(last, runs=((p - 1, p - 1),))
    kinds = [EqualRanks("first", (ZERO,), ONE, share, first=True, last=folded, between=between, runs=((ZERO, ZERO),))]
    if p.constant != 2:
        candidates = tuple(dict.fromkeys((ONE, p - 2)))
        kinds.append(EqualRanks("middle", candidates, p - 2, share, between=between, runs=((ONE, p - 2),)))
    return [*kinds, last]


def _both_ways(order: RankOrder, count: Poly) -> list[EqualRanks]:
    """Return the ranks at both ends, which have both ends of the model, and the pairs of ranks between them."""
    p, share = order.p, poly(symbol(*count.names())) / order.p
    first, last = (EqualRanks(n, (ZERO,), ONE, share, first=True, last=True, between=ONE) for n in ("first", "last"))
    between = [EqualRanks("middle", tuple(dict.fromkeys((ONE, p - 1))), 2 * p - 2, share, between=ONE)]
    return [first, *between * (p != ONE), last]


def _uneven(order: RankOrder, layer_counts: Sequence[int]) -> list[EqualRanks]:
    """Return the first rank, groups of middle ranks with equal numbers of layers, and the last rank."""
    last = len(layer_counts) - 1
    kinds = [EqualRanks("first", (ZERO,), ONE, poly(layer_counts[0]), first=True, runs=((ZERO, ZERO),))]
    for n in dict.fromkeys(layer_counts[1:last]):
        ranks = [i for i in range(1, last) if layer_counts[i] == n]
        candidates = tuple(dict.fromkeys((poly(ranks[0]), poly(ranks[-1]))))
        name = "middle" if len({*layer_counts[1:last]}) == 1 else f"middle of {n}"
        runs = tuple((poly(i), poly(i)) for i in ranks)
        kinds.append(EqualRanks(name, candidates, poly(len(ranks)), poly(n), runs=runs))
    end = poly(last)
    return [*kinds, EqualRanks("last", (end,), ONE, poly(layer_counts[last]), last=True, runs=((end, end),))]


def waiting_of(order: RankOrder, kind: EqualRanks, *, torch: bool) -> InFlightMicroBatches:
    """Return the in-flight activations for ranks of one kind."""
    # of the middle ranks, the first holds most chunks awaiting a backward pass, the last most awaiting weight gradients
    ranks = kind.ranks if order.splits else kind.ranks[:1]
    first, later = (
        tuple(dict.fromkeys(h for r in ranks for h in order.held(r, first=kind.first, last=kind.last, later=later)))
        for later in (False, True)
    )
    ends = order.ends(first=kind.first, last=kind.last, turning=kind.name == "last") if torch else (ZERO, ZERO)
    return InFlightMicroBatches(
        first, later, order.name, *order.totals, kind.alike, order.v, ranks=kind.runs, handed=torch, ends=ends
    )


def cut(
    graph: Graph, plan: StageCuts, kinds: Sequence[EqualRanks], *, both_ways: bool = False
) -> tuple[list[StageExtractor], frozenset[str]]:
    """Return the share of each kind of rank, and the parameters that two ranks have: those at both ends, or all."""
    (name,) = _count(plan).names()
    _need_constant_sizes(plan, name)
    extractors = [
        StageExtractor(
            graph, plan, {name: kind.layers + (ZERO if kind.first else plan.before)},
            first=kind.first, last=kind.last, between=kind.between, half=both_ways,
        )
        for kind in kinds
    ]  # fmt: skip
    _need_local_layers(plan, StageExtractor(graph, plan, {}, first=False, last=True))
    if plan.backward is None:  # nothing to reduce
        return extractors, frozenset()
    inner_used = (
        extractors[0].used if extractors[0].last else StageExtractor(graph, plan, {}, first=False, last=False).used
    )
    tied = (extractors[0].used & extractors[-1].used) - inner_used
    if both_ways:
        tied = {t for t in graph.tensors if t.role == "param"}
    freed = next((t for t in tied if t.role == "param" and t.requires_grad and t not in graph.gradients), None)
    if freed is not None:
        raise UnsupportedError(
            f"parallelize: pp: the gradient of {freed.name!r} has contributions from the first and the last stage but "
            f"is freed before they are reduced; expected a step without optimizer_in_backward"
        )
    shared = frozenset(t.name for t in tied if t in graph.gradients)
    if shared and any(share.clips for share in extractors):
        raise UnsupportedError(
            f"parallelize: pp: gradients are clipped by their global norm, in which {min(shared)!r}, shared by two "
            f"stages, would count twice; expected parameters that belong to one stage"
        )
    return extractors, shared


def _need_local_layers(plan: StageCuts, last: StageExtractor) -> None:
    """Raise UnsupportedError if layers read a tensor that only the last stage computes."""
    shared_op = next((op for op in last.ops if op.loop and op not in plan.loops and op.phase != "optimizer"), None)
    if shared_op is not None:
        raise UnsupportedError(
            f"parallelize: pp: {shared_op.name!r} is read by layers of every stage; expected layers that pass "
            f"results only to the next layer"
        )


class _StageReductions(Rewriter):
    """Inserts all-reduces over stages: for gradients of shared parameters, global norms, and non-finite flags."""

    lies = True

    def __init__(self, graph: Graph, stage: Stage) -> None:
        super().__init__()
        self.unreduced = [_before_updates(g) for t, g in graph.gradients.items() if t.name in stage.shared]
        self.stage = stage

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        if new.parent is None and op.name in self.stage.all_reduces:
            assert self.stage.waiting is not None
            ranks, operation = self.stage.waiting.stages, self.stage.all_reduces[op.name]
            kind = Collective(collective="all_reduce", ranks=ranks, axis="pp", operation=operation)
            self.add(op, kind, [self.tensors[t] for t in op.operands], new)
            return
        while self.unreduced and op.phase == "optimizer" and new.parent is None:
            g = self.unreduced.pop()
            kind = Collective(collective="all_reduce", ranks=poly(2), axis="pp")
            reduced = new.add_op(kind, [self.tensors[g]], f"{g.name}.all_reduce", "backward")
            self.tensors[g] = reduced.results[0]
        super().emit(op, new, suffix)


def _before_updates(gradient: Tensor) -> Tensor:
    """Return the gradient as updates read it, before its buffer is changed by them."""
    while gradient.producer is not None and gradient.producer.phase == "optimizer":
        gradient = gradient.producer.operands[0]
    return gradient


def with_stage_reductions(graph: Graph, stage: Stage) -> Graph:
    """Return a pipeline rank's graph, including communication between stages."""
    result = _StageReductions(graph, stage).run(graph) if stage.shared or stage.all_reduces else graph
    result.waiting = stage.waiting
    return result


def _need_constant_sizes(plan: StageCuts, layers: str) -> None:
    """Raise UnsupportedError for sizes outside the layers that depend on their number."""
    for op in {*plan.last_stage, *plan.first_stage}:
        for t in op.results:
            if any(layers in n.names() for n in t.sizes):
                raise UnsupportedError(
                    f"parallelize: pp: {t!r} outside the layers has a size that depends on their number {layers}"
                )
