"""The part of a graph that one rank of a pipeline does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..algebra.polynomial import ZERO, Poly
from ..errors import UnsupportedError
from ..graph.changes import carry_facts
from ..graph.graph import Graph
from ..graph.loop import Repeat
from ..graph.op import Op, OpKind
from ..graph.scopes import opened
from ..graph.tensor import Tensor
from ..ops.blocks import Kernel
from ..ops.hops import Receive, Send
from ..ops.keep import Keep
from ..ops.moves import Concat
from ..ops.pieces import Accumulate
from ..ops.pointwise import FUNCTIONS, Pointwise
from ..ops.updates import Unscale
from .rewrite import Rewriter, bound, bound_record
from .stages_plan import Plan

__all__ = ["Share"]


class Share(Rewriter):
    """Copies of a step what one rank does; what is left out has nothing that stands for it.

    Where a rank has several groups of layers it goes through all of them, and between two of them sends on what the
    one has made and receives what the next one starts from.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        values: Mapping[str, Poly],
        *,
        first: bool,
        last: bool,
        between: Poly = ZERO,
        half: bool = False,
    ) -> None:
        super().__init__(values)
        self.flags, self.meets = dict[Tensor, None](), dict[str, str]()
        self.alike, self.part = set[Tensor](), set[Tensor]()
        """scalars of which all stages have the same, and stacks of scalars of which each one has some"""
        self.graph, self.plan, self.first, self.last, self.between = graph, plan, first, last, between
        self.half = half
        """Whether half of the micro-batches enter at each end: a pass is of one of each, of other groups of layers."""
        self.wanted: set[Tensor] = set()
        self.kept = self.needed()
        self.used = self.sources()
        self.left = self.left_out()

    # -- what is kept --------------------------------------------------------------------------------------------

    def needed(self) -> set[Op]:
        """Return the ops of the pass that this stage does, and note the tensors that they read."""
        plan, kept = self.plan, {*self.plan.loops}
        if self.last:
            kept |= plan.behind | plan.added | plan.sums.keys()
        if self.first:
            kept |= plan.ahead
            kept |= {op for op in plan.home.ops if op not in plan.behind and self.unread(op)}
        for op in reversed(plan.home.ops):
            if op in kept or not self.wanted.isdisjoint(op.results):
                if op in plan.behind and not self.last:
                    raise UnsupportedError(f"parallelize: pp: the first stage needs {op.name!r} of the last one")
                kept.add(op)
                self.wanted |= {*self.read(op)}
        if self.last:
            self.wanted |= {*plan.home.outputs} & {t for op in kept for t in op.results}
        return kept

    def unread(self, op: Op) -> bool:
        """Whether an op of the forward pass is there for what it writes into."""
        return (
            op.phase == "forward"
            and bool(op.kind.overwrites())
            and not any(list(self.plan.home.successors(t)) for t in op.results)
        )

    def read(self, op: Op) -> tuple[Tensor, ...]:
        """Return the operands that this stage has."""
        assert op.kind is not None
        if self.arrives(op):
            assert isinstance(op.kind, Repeat)
            return op.operands[op.kind.carries :]
        if op in self.plan.sums and not (self.first and self.last):
            late, early = self.plan.sums[op]
            so_far = self.begun(op)
            return (late,) if self.last else (early,) if so_far is None else (so_far, early)
        return op.operands

    def begun(self, op: Op) -> Tensor | None:
        """Return what a sum starts from without the terms of the last stage, None for a sum of two terms."""
        t = op.operands[0]
        while isinstance(op.kind, Accumulate) and t.producer in self.plan.behind:
            if not isinstance(t.producer.kind, Accumulate):
                return None
            t = t.producer.operands[0]
        return t if isinstance(op.kind, Accumulate) else None

    def arrives(self, op: Op) -> bool:
        """Whether the carries of a loop come from a neighbour."""
        return (op is self.plan.forward and not self.first) or (op is self.plan.backward and not self.last)

    def leaves(self, op: Op) -> bool:
        """Whether what a loop hands on goes to a neighbour."""
        return (op is self.plan.forward and not self.last) or (op is self.plan.backward and not self.first)

    def sources(self) -> set[Tensor]:
        """Return the tensors around the pass that this stage needs."""
        used = set(self.wanted)
        if self.plan.home is not self.graph:
            owner = self.plan.home.owner
            assert owner is not None
            used = {t for f, t in zip(self.plan.home.formals, owner.operands, strict=True) if f in self.wanted}
            for op in reversed(self.graph.ops):
                if op is not owner and op.phase != "optimizer" and not used.isdisjoint(op.results):
                    used |= {*op.operands}
        return used

    def left_out(self) -> set[Tensor]:
        """Return the sources of the step that this stage does not have, with what optimizers keep of them."""
        sources = [t for t in self.graph.tensors if t.producer is None]
        out = {t for t in sources if t not in self.used and t.role in ("param", "input", "buffer", "cache")}
        names = {t.name for t in out if t.role == "param"}
        return out | {t for t in sources if t.name.rpartition(".")[0] in names and t.role in ("state", "gradient")}

    # -- what is made --------------------------------------------------------------------------------------------

    def run(self, old: Graph, name: str | None = None) -> Graph:
        """Return the graph of the rank."""
        new = Graph(old.name if name is None else name, dtype=old.dtype)
        carry_facts(old, new)
        with opened(levels=()):  # names are complete already
            self.fill(old, new)
            new.output(*(made for t in old.outputs if (made := self.tensors[t]) is not None))
            made = {self.tensors[t]: self.tensors[g] for t, g in old.gradients.items() if t not in self.left}
            new.gradients |= {t: g for t, g in made.items() if t is not None and g is not None}
        return new.freeze()

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor | None:
        """Copy a source, unless it is of another rank."""
        if old in self.left:
            return None
        made: Tensor = super().source(old, new, suffix)
        passes = self.plan.home.owner
        if (
            self.half
            and passes is not None
            and passes.loop is not None
            and old in passes.loop.xs
            and old.role == "input"
        ):
            made.sizes = (made.sizes[0] / 2, *made.sizes[1:])
        return made

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Add what the rank does of an op."""
        if op.graph is self.plan.home and op.phase != "optimizer":
            self.of_pass(op, new)
        elif op.body is self.plan.home:
            self.partly(op, new)
        elif op.graph is self.graph:
            self.around(op, new)
        else:
            self.copy(op, new, suffix)

    def of_pass(self, op: Op, new: Graph) -> None:
        """Add an op of the pass, with what comes before and goes behind it."""
        if op not in self.kept:
            self.tensors |= dict.fromkeys(op.results)
            return
        if op in self.plan.sums and not (self.first and self.last):
            read = [self.tensors[t] for t in self.read(op)]
            self.tensors[op.results[0]] = read[-1]
            if len(read) > 1:
                self.add(op, op.kind, read, new)
            return
        for t in op.loop.starts if op.loop is not None and self.arrives(op) else ():
            kind = Receive(sizes=tuple(bound(n, self.values) for n in t.sizes), dtype=t.dtype)
            self.tensors[t] = new.add_op(kind, [], f"{op.name}.receive", op.phase).results[0]
        self.copy(op, new)
        if op in (self.plan.forward, self.plan.backward) and self.between != ZERO:
            self.hand_over(op, new)
        for t in op.loop.lasts if op.loop is not None and self.leaves(op) else ():
            new.add_op(Send(), [self.tensors[t]], f"{op.name}.send", op.phase)

    def hand_over(self, op: Op, new: Graph) -> None:
        """Add what goes on between groups of layers: other ranks have those that are next."""
        assert op.loop is not None
        body = new.start_body(f"{op.name}.groups", fused=False)
        starts = [self.tensors[t] for t in op.loop.lasts]
        for i, t in enumerate(starts):
            f = body.formal(t, f"{op.name}.group{i}", t.sizes, t.strides)
            body.add_op(Send(), [f], f"{op.name}.between.send", op.phase)
            there = Receive(sizes=t.sizes, dtype=t.dtype)
            body.outputs += body.add_op(there, [], f"{op.name}.between.receive", op.phase).results
        kind = Repeat(body=body, count=self.between, carries=len(starts), xs=0)
        made = new.add_op(kind, starts, f"{op.name}.between", op.phase)
        made.scope, body.owner = op.scope, made
        self.tensors |= dict(zip(op.loop.lasts, made.results, strict=True))

    def partly(self, op: Op, new: Graph) -> None:
        """Add the loop over micro-batches, with the carries and slices that this stage has."""
        old, loop = self.plan.home, op.loop
        assert loop is not None
        assert isinstance(op.kind, Repeat)
        formals = [f for f in old.formals if f in self.wanted]
        body = new.start_body(old.name, fused=False)
        for f in formals:
            self.tensors[f] = self.formal(f, body)
        self.fill(old, body)
        ends = [
            (t, r)
            for i, (t, r) in enumerate(zip(old.outputs, op.results, strict=True))
            if (old.formals[i] in self.wanted if i < op.kind.carries else self.tensors[t] is not None)
        ]
        body.outputs += [body.adopt(self.tensors[t]) for t, _ in ends]
        kind = replace(
            bound_record(op.kind, self.values), body=body,
            count=bound(loop.count, self.values) / (2 if self.half else 1),
            carries=sum(f in self.wanted for f in loop.carries), xs=sum(f in self.wanted for f in loop.slices),
        )  # fmt: skip
        operands = [self.tensors[t] for f, t in zip(old.formals, op.operands, strict=True) if f in self.wanted]
        made = new.add_op(kind, operands, op.name, op.phase)
        made.scope, body.owner = op.scope, made
        self.tensors |= dict.fromkeys(op.results)
        self.tensors |= dict(zip((r for _, r in ends), made.results, strict=True))

    def around(self, op: Op, new: Graph) -> None:
        """Add an op outside of the pass, such as an update, unless it is of another stage."""
        if op.phase != "optimizer":
            if self.used.isdisjoint(op.results):
                self.tensors |= dict.fromkeys(op.results)
            else:
                self.copy(op, new)
            return
        self.flags |= dict.fromkeys(found := [*_flags(op)])
        if self.flags and not found:
            self.meet(list(self.flags), "max", op, new)
            self.flags = {}
        gone = [t for t in op.operands if self.tensors[t] is None]
        rest = [
            t for t in op.operands if self.tensors[t] is not None and t not in self.alike and (t.ndim or t.producer)
        ]
        stack = _is_stack(op)
        if gone and rest and not stack:
            raise UnsupportedError(
                f"parallelize: pp: {op.name!r} puts {gone[0].name!r} and {rest[0].name!r} of different stages "
                f"together, expected updates of each parameter by itself"
            )
        if stack:
            self.add(op, op.kind, [self.tensors[t] for t in op.operands if self.tensors[t] is not None], new)
            self.part |= {*op.results}
        elif gone:
            self.tensors |= dict.fromkeys(op.results)
        else:
            self.copy(op, new)
            self.alike |= {t for t in op.results if not t.ndim and all(map(self.is_alike, op.operands))}
            if not self.part.isdisjoint(op.operands):
                self.norm_of_all(op, new)

    def is_alike(self, t: Tensor) -> bool:
        """Whether all stages have the same: counts of steps and scales, and what is made of these alone."""
        return t in self.alike or (not t.ndim and t.producer is None)

    @property
    def clips(self) -> bool:
        """Whether gradients of all parameters have one norm."""
        return any(map(_is_stack, self.graph.ops))

    def norm_of_all(self, op: Op, new: Graph) -> None:
        """Add what makes the norm of all gradients of one of those that a stage has: the root of a sum of squares."""
        if op.results[0].ndim or not isinstance(op.kind, Kernel) or op.kind.body.ops[-1].kind != _ROOT:
            raise UnsupportedError(f"parallelize: pp: {op.name!r} of what each stage has a part of, expected a 2-norm")
        (t,) = op.results
        self.tensors[t] = self.step(Pointwise(function=FUNCTIONS["square"]), t, f"{t.name}.square", op, new)
        self.meet([t], "sum", op, new)
        self.tensors[t] = self.step(_ROOT, t, f"{t.name}.root", op, new)

    def meet(self, tensors: Sequence[Tensor], operation: str, op: Op, new: Graph) -> None:
        """Note where scalars of all stages are put together: once it is known where all else lies."""
        for t in tensors:
            self.tensors[t] = self.step(Keep(), t, f"{t.name}.all_reduce", op, new)
            self.meets[self.tensors[t].producer.name] = operation
            self.alike.add(t)

    def step(self, kind: OpKind, t: Tensor, name: str, op: Op, new: Graph) -> Tensor:
        """Add an op on what stands for a tensor beside another op."""
        made = new.add_op(kind, [self.tensors[t]], name, op.phase)
        made.scope = op.scope
        return made.results[0]


def _is_stack(op: Op) -> bool:
    """Whether an op puts scalars of several parameters in a row: norms, of which each stage has some."""
    axes = {t.ndim - t.storage.pieces for t in op.operands}
    return op.phase == "optimizer" and isinstance(op.kind, Concat) and axes == {1}


def _flags(op: Op) -> Iterator[Tensor]:
    """Yield the scalars that an op sets where a gradient is not finite."""
    if isinstance(op.kind, Unscale):
        yield op.operands[-1]
    elif op.loop is not None:
        outside = dict(zip(op.loop.captured, op.loop.shared, strict=True))
        yield from (outside[t] for inner in op.loop.body.ops for t in _flags(inner) if t in outside)


_ROOT = Pointwise(function=FUNCTIONS["sqrt"])
