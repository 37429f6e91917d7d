"""Reverse-mode differentiation of graphs, loops and fused kernels.

Activity analysis, preparation of the forward graph (hoisting, defensive copies, peeling), and the reverse walk that
accumulates gradients, recomputes segments and differentiates loops and kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from ..algebra.polynomial import ONE, ZERO, Poly, total
from ..dtypes import DType
from ..errors import GraphError, UnsupportedError
from ..ir.graph import Graph, Loop, Op, Storage, Tensor, apply, building, current_graph, modify, opened, overwritten_by
from ..ir.strides import contiguous, dense_in, has_blas_layout, is_contiguous_in, memory_format, memory_order
from ..ops.einsum import Einsum
from ..ops.elementwise import Pointwise, cast, pointwise
from ..ops.fill import SliceUpdate, assign, fill
from ..ops.functions import FUNCTIONS, names_in
from ..ops.layout import (
    Concat,
    KeepAlive,
    Rearrange,
    Slice,
    concat,
    contiguous_copy,
    copied_into,
    keep_alive,
    slice_axis,
    split,
)
from ..ops.loops import Accumulate, Empty, Kernel, Repeat, Stacked, Undef, accumulate, kernel, slice_of
from ..ops.opaque import CustomCall
from ..ops.reduce import Pool
from ..optimizers import Optimizer, Slot
from .rewrite import Rewriter, flat
from .shard.partial_sums import origin
from .views import embed, is_untracked, is_view_op, replay, view_path, write_through, written_op
from .vjp.kernels import INSIDE, KERNELS, KernelBackward
from .vjp.table import Rule, VJPContext, is_alone, restricted, rule_of, vjp, zero_filled

__all__ = [
    "active_in",
    "active_inside",
    "graded_in",
    "graded_inside",
    "is_leaf",
    "Update",
    "hoist",
    "protect_saved",
    "overwritten",
    "peel",
    "BackwardHooks",
    "Leaf",
    "ReverseMode",
    "scoped",
    "preallocate_stack",
    "keep_branch_residuals",
    "recompute",
    "pull_loop",
    "pull_kernel",
]


# -- activity analysis -------------------------------------------------------------------------------------------------
# A tensor is active if it depends on a differentiated source, and graded if a gradient reaches it from the loss.


def active_in(ops: Iterable[Op], start: Iterable[Tensor], placeholders: Container[Op] = ()) -> set[Tensor]:
    """Return the active tensors: `start` and the tensors computed from them.

    `placeholders` are `KeepAlive` ops that replace an op whose result is saved; all their operands count.
    """
    active = set(start)
    for op in ops:
        if op.body is not None and op.loop is not None:
            _active_carries(op, active)
        elif is_leaf(op):
            active.update(op.results)
        elif _passes_gradients(op) and any(
            t in active for t in (op.operands if op in placeholders else _grad_operands(op))
        ):
            active.update(t for t in op.results if t.dtype.kind in ("float", "complex"))
    return active


def is_leaf(op: Op) -> bool:
    """Whether an op makes an autograd leaf, which gets a gradient whatever its operand is."""
    return isinstance(op.kind, KeepAlive) and op.kind.leaf


def _grad_operands(op: Op) -> Sequence[Tensor]:
    """Return the operands that can receive a gradient: not those only kept alive, nor untracked writes."""
    alone = isinstance(op.kind, KeepAlive) or (isinstance(op.kind, SliceUpdate) and op.kind.untracked)
    return op.operands[:1] if alone else op.operands


def _passes_gradients(op: Op) -> bool:
    return op.kind.passes_gradients and not (isinstance(op.kind, CustomCall) and op.kind.is_blind)


def active_inside(op: Op, active: set[Tensor]) -> set[Tensor]:
    """Return a body's tensors that are active in any iteration."""
    body, loop = op.body, op.loop
    assert body is not None
    start = [f for f, t in zip(body.formals, op.operands, strict=True) if t in active]
    start += [t for t in body.tensors if t.producer is None and t.requires_grad]
    if loop is not None and loop.count != ONE:  # an active carry-out makes the next carry-in active
        start += [f for f, r in zip(loop.carries, loop.lasts, strict=True) if r in active]
    return active_in(body.ops, start)


def _active_carries(op: Op, active: set[Tensor]) -> None:
    """Add a loop's active results, up to the fixed point over its carries."""
    assert op.body is not None
    while True:
        active_tensors = active_inside(op, active)
        new_results = {r for r, t in zip(op.results, op.body.outputs, strict=True) if t in active_tensors} - active
        if not new_results:
            return
        active |= new_results


def graded_in(ops: Iterable[Op], active: set[Tensor], ends: Iterable[Tensor]) -> set[Tensor]:
    """Return the active tensors that a gradient reaches: `ends` and the tensors they are computed from."""
    graded = active.intersection(ends)
    for op in reversed(list(ops)):
        if not any(t in graded for t in op.results):
            continue
        if op.body is None:
            graded.update(t for t in op.operands if t in active)
        else:
            graded_tensors = graded_inside(op, active, graded)
            pairs = zip(op.body.formals, op.operands, strict=True)
            graded.update(t for f, t in pairs if f in graded_tensors and t in active)
    return graded


def graded_inside(op: Op, active: set[Tensor], graded: set[Tensor]) -> set[Tensor]:
    """Return a body's tensors that a gradient reaches in any iteration."""
    body, loop = op.body, op.loop
    assert body is not None
    active_tensors = active_inside(op, active)
    ends = {t for t, r in zip(body.outputs, op.results, strict=False) if r in graded}
    while True:
        graded_tensors = graded_in(body.ops, active_tensors, ends)
        if loop is None or loop.count == ONE:
            return graded_tensors
        # one iteration's carry-in is the carry-out of the previous one
        more = {t for f, t in zip(loop.carries, loop.nexts, strict=True) if f in graded_tensors} - ends
        if not more:
            return graded_tensors
        ends |= more


# -- optimizer in backward ---------------------------------------------------------------------------------------------
# Each parameter is updated as soon as its gradient is complete, and the gradient is freed.

#: Declares optimizer state of a parameter: name, sizes and dtype.
Declare = Callable[[str, Sequence[object], "str | DType"], Tensor]
#: Adds a slice at one position of a tensor's first axis, under a name.
Cut = Callable[[Tensor, str], Tensor]


class Update:
    """Optimizer update of one parameter.

    `declare` declares its state; `master` and `moments` are the dtypes of a master copy and the state. For a slice of a
    larger parameter, `outer` is the update of the whole, marked as done together with this one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        declare: Declare,
        master: DType | None,
        moments: DType | None,
        outer: Update | None = None,
    ) -> None:
        self.optimizer, self.declare, self.master, self.moments = optimizer, declare, master, moments
        self.outer = outer
        self.done = False

    def inside(self, cut: Cut, count: Poly) -> Update:
        """Return the update for the slice that one loop iteration owns."""

        def declare(name: str, sizes: Sequence[object], dtype: str | DType) -> Tensor:
            return cut(self.declare(name, (count, *sizes), dtype), name)

        return Update(self.optimizer, declare, self.master, self.moments, self)

    def __call__(self, param: Tensor, grad: Tensor) -> None:
        """Add the ops of the update, once."""
        if self.done:
            return
        with opened(phase="optimizer"):
            master = None if self.master is None else self.declare("master", param.sizes, self.master)
            (slot,) = self.optimizer.update([Slot(param, grad, master, self.moments, self.declare)])
            keep_alive(slot.param, slot.grad)  # the gradient is freed after the update, not within it
        update: Update | None = self
        while update is not None:
            update.done, update = True, update.outer


# -- hoist -------------------------------------------------------------------------------------------------------------
# Sources of a Repeat's body are declared outside it and sliced per iteration, so that ops after the loop, such as its
# backward pass or the optimizer, can read and update them. Each iteration keeps its own storage.


def hoist(graph: Graph) -> Graph:
    """Declare parameters, buffers and caches from all bodies at the top level, one storage per iteration.

    Costs do not change. A parameter of shape (D, F) inside a Repeat with count L becomes one of shape (L, D, F) whose
    storage has `pieces` 1.
    """
    if not any(_body_sources(op) for op in graph.ops):
        return graph
    return _Hoister().run(graph)


def _body_sources(op: Op) -> list[Tensor]:
    """Return the sources declared in a loop's body, including nested loops."""
    if op.loop is None:
        return []
    body = op.loop.body
    sources = [t for t in body.tensors if t.producer is None and t.role != "formal"]
    return sources + [t for inner in body.ops for t in _body_sources(inner)]


class _Hoister(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[Tensor, Tensor] = {}
        """Hoisted sources, as seen from the graph that is being filled."""

    def declare(self, op: Op, new: Graph, counts: tuple[Poly, ...]) -> None:
        """Declare a loop body's sources at the top level."""
        loop = op.loop
        if loop is None:
            return
        counts = (*counts, loop.count)
        for t in loop.body.tensors:
            if t.producer is None and t.role != "formal":
                source = Tensor(
                    new, new.unique(t.name), (*counts, *t.sizes), t.dtype,
                    role=t.role, requires_grad=t.requires_grad, pieces=len(counts) + t.storage.pieces,
                    host=t.storage.host,
                )  # fmt: skip
                new.add_node(source)
                self.outside[t] = source
        for inner in loop.body.ops:
            self.declare(inner, new, counts)

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        outer = self.outside.get(old)
        return super().source(old, new, suffix) if outer is None else outer

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        sources, loop = _body_sources(op), op.loop
        if not sources or loop is None:
            super().emit(op, new, suffix)
            return
        if op.graph.parent is None:  # optimizers update parameters in the order of their ops
            self.declare(op, new, ())
        body = new.start_body(loop.body.name, fused=False)
        outer_sources = {t: self.outside[t] for t in sources}
        for f in (*loop.carries, *loop.slices):
            self.tensors[f] = self.formal(f, body)
        for t, outer in outer_sources.items():
            self.outside[t] = slice_of(body, outer, t.name)
        for f in loop.captured:
            self.tensors[f] = self.formal(f, body)
        self.fill(loop.body, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in loop.body.outputs]
        starts, xs, shared = ([self.tensors[t] for t in ts] for ts in (loop.starts, loop.xs, loop.shared))
        kind = replace(loop.kind, body=body, xs=len(xs) + len(outer_sources))
        self.add(op, kind, [*starts, *xs, *outer_sources.values(), *shared], new)
        self.outside |= outer_sources


# -- defensive copies --------------------------------------------------------------------------------------------------
# An in-place op whose gradient reads the value it overwrites becomes out-of-place. If it writes only part of a tensor,
# the old value is copied instead, as torch does.


def protect_saved(graph: Graph) -> Graph:
    """Return a copy of a forward graph whose in-place ops do not overwrite values saved for the backward pass."""
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    rewriter = _SavedProtector()
    for op in graph.ops:
        if isinstance(op.kind, Pointwise) and op.kind.inplace and not is_untracked(op):
            x, grad_expressions = op.operands[0], op.kind.function.grad or ()
            tensor_arguments = [i for i, s in enumerate(op.kind.scalars or (None,) * len(op.operands)) if s is None]
            active_arguments = [i for i, t in zip(tensor_arguments, op.operands, strict=True) if t in active]
            if any("a" in names_in(expression) for i in active_arguments for expression in grad_expressions[i : i + 1]):
                found = view_path(x)
                is_base = found is None or not found[1]
                writes_all = is_base and x.is_contiguous and x.numel == x.storage.elements
                (rewriter.ops if writes_all else rewriter.parts).add(op)
    return rewriter.run(graph)


class _SavedProtector(Rewriter):
    """Copies a graph, making some in-place ops out-of-place (`ops`) or cloning their operand first (`parts`)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Op] = set()
        self.parts: set[Op] = set()

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, out-of-place or after a clone where needed."""
        if op in self.ops and isinstance(op.kind, Pointwise):
            self.add(op, replace(op.kind, inplace=False), [self.tensors[t] for t in op.operands], new)
            return
        if op in self.parts:
            kind = Pointwise(function=FUNCTIONS["copy"])
            new.add_op(kind, [self.tensors[op.operands[0]]], "clone", op.phase).scope = op.scope
        super().emit(op, new, suffix)


def overwritten(op: Op, t: Tensor) -> Tensor:
    """Return an operand's value before an in-place op: the defensive copy if there is one."""
    if not isinstance(op.kind, Pointwise) or not op.kind.inplace or t is not op.operands[0]:
        return t
    copies = [o for o in t.graph.successors(t) if isinstance(o.kind, Pointwise) and o.kind.function.name == "copy"]
    return copies[-1].results[0] if copies else t


# -- peel --------------------------------------------------------------------------------------------------------------
# First and last iterations with fewer gradients than the others are peeled off loops. The initial carry may need no
# gradient (the first layer computes no dX if its input is data), and the final carry may be unread (the last state of
# a recurrence gets no gradient). Recomputation may also stop early in the last iteration.

Carries = frozenset[int]


def peel(graph: Graph, stops_early_in: Callable[[Op], bool]) -> Graph:
    """Peel iterations with other gradients than the middle ones off both loop ends.

    The active and graded carries of an iteration follow from its neighbour's; iterations are peeled until that state
    repeats. The loop becomes single-iteration loops around a middle one, possibly empty, which read parts of its
    slices and write into one stack. Loops inside kernels are left alone. `stops_early_in` selects loops whose last
    iteration is always peeled.
    """
    if not any(op.loop is not None for op in graph.walk()):
        return graph
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    losses = (t for t in graph.outputs if not t.sizes and t.dtype.kind == "float")
    peeler = _Peeler(active, graded_in(graph.ops, active, losses), stops_early_in)
    new = peeler.run(graph)
    return new if peeler.peeled else graph


@dataclass(frozen=True)
class _IterationGroup:
    """Consecutive loop iterations with the same active and graded carries."""

    name: str
    """suffix of the loop's name"""
    count: Poly
    """number of iterations"""
    active: Carries
    """carries-in that are active"""
    graded: Carries
    """carries-out that receive a gradient"""


def _states(first: Carries, step: Callable[[Carries], Carries]) -> tuple[list[Carries], int]:
    """Return the successive states up to the first repetition, and the repeated one's index."""
    states: list[Carries] = []
    while first not in states:
        states.append(first)
        first = step(first)
    return states, states.index(first)


def _indices_in(tensors: Sequence[Tensor], of: set[Tensor]) -> Carries:
    return frozenset(i for i, t in enumerate(tensors) if t in of)


class _LoopActivity:
    """A loop with the active and graded carries of its iterations."""

    def __init__(self, op: Op, active: set[Tensor], graded: set[Tensor], *, stops: bool) -> None:
        assert op.loop is not None
        self.stops = int(stops)
        self.op = op
        self.loop = loop = op.loop
        self.fixed = [t for t in loop.body.tensors if t.producer is None and t.requires_grad]
        inputs = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        self.fixed += [f for f, t in inputs if t in active]
        outputs = (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True))
        self.ends = [t for t, r in outputs if r in graded]
        self.active_anywhere = active_inside(op, active)
        self.carries_in, first = _states(_indices_in(loop.starts, active), self._enter)
        self.carries_out, self.last = _states(_indices_in(loop.lasts, graded), self._leave)
        self.middle = frozenset().union(*self.carries_in[first:]), frozenset().union(*self.carries_out[self.last :])
        needed = self._leave(self.middle[1])  # no need to peel where the gradient is zero anyway
        while first and self.carries_in[first - 1] & needed == self.carries_in[first] & needed:
            first -= 1
        self.first = first

    def _enter(self, carries: Carries) -> Carries:
        return _indices_in(self.loop.nexts, self.active(carries))

    def _leave(self, carries: Carries) -> Carries:
        return _indices_in(self.loop.carries, self.graded(self.active_anywhere, carries))

    def active(self, carries: Carries) -> set[Tensor]:
        """Return the active tensors in an iteration with active carries-in `carries`."""
        return active_in(self.loop.body.ops, [*self.fixed, *(self.loop.carries[i] for i in carries)])

    def graded(self, active: set[Tensor], carries: Carries) -> set[Tensor]:
        """Return the graded tensors in an iteration with graded carries-out `carries`."""
        return graded_in(self.loop.body.ops, active, [*self.ends, *(self.loop.nexts[i] for i in carries)])

    def iteration_groups(self) -> list[_IterationGroup]:
        """Return the loops that replace this one, in order."""
        count = self.loop.count
        first, last = (self.first, max(self.last, self.stops)) if self._can_be_split() else (0, 0)
        if isinstance(count.constant, int):
            first = min(first, count.constant)
            last = min(last, count.constant - first)
        middle_count = count - first - last
        out = [self._iteration_group(f".first{i or ''}", ONE, i, None) for i in range(first)]
        out += [self._iteration_group("", middle_count, None, None)] if middle_count else []
        return out + [self._iteration_group(f".last{i or ''}", ONE, None, i) for i in reversed(range(last))]

    def _iteration_group(self, name: str, count: Poly, i: int | None, remaining: int | None) -> _IterationGroup:
        """Describe the iteration with index `i` or with `remaining` iterations after it; both None for the middle."""
        loop_count = self.loop.count.constant
        if loop_count == 1:
            i = remaining = 0
        elif isinstance(loop_count, int) and i is not None:
            remaining = loop_count - 1 - i
        elif isinstance(loop_count, int) and remaining is not None:
            i = loop_count - 1 - remaining
        active = self.carries_in[i] if i is not None and i < len(self.carries_in) else self.middle[0]
        graded = (
            self.carries_out[remaining]
            if remaining is not None and remaining < len(self.carries_out)
            else self.middle[1]
        )
        return _IterationGroup(name, count, active, graded)

    def may_be_empty(self, middle: _IterationGroup) -> bool:
        """Whether the peeled iterations yield all gradients of the middle ones, which may then number zero."""
        peeled = [t for group in self.iteration_groups() if group.name for t in self.reached(group)]
        return self.reached(middle).intersection((*self.loop.slices, *self.loop.captured)) <= set(peeled)

    def reached(self, group: _IterationGroup) -> set[Tensor]:
        """Return the tensors that a gradient reaches in the given iterations."""
        return self.graded(self.active(group.active), group.graded)

    def _can_be_split(self) -> bool:
        loop = self.loop
        if loop.count == ONE or loop.reverse or loop.until:
            return False
        # the residuals then come in several parts, so every reader must accept lists
        residuals = [t for t in loop.pieces if t.storage.pieces]
        readers = (op for t in residuals for op in t.graph.successors(t))
        if any(t in t.graph.outputs for t in residuals) or not all(op.kind.takes_lists for op in readers):
            return False
        # a tensor with one storage per iteration cannot be split
        pieces = any(t.storage.pieces for t in loop.xs)
        return not pieces and bool(self.middle[1] or self.carries_out[0] or self.ends)


class _Peeler(Rewriter):
    def __init__(self, active: set[Tensor], graded: set[Tensor], stops_early_in: Callable[[Op], bool]) -> None:
        super().__init__()
        self.stops_early_in = stops_early_in
        self.active, self.graded = active, graded
        """Active and graded tensors in the graph or body that is being copied."""
        self.peeled = False

    def copy_loop(
        self, activity: _LoopActivity, group: _IterationGroup, operands: Sequence[Tensor], new: Graph
    ) -> Loop:
        """Copy a loop for some of its iterations."""
        op, old, previous = activity.op, activity.loop, (self.active, self.graded)
        self.active, self.graded = activity.active(group.active), activity.reached(group)
        kind = replace(old.kind, body=self.body(old.body, new, group.name), count=group.count)
        if group.count.constant is None and group.count != old.count and activity.may_be_empty(group):
            kind = replace(kind, min_count=0)
        new_loop = self.add(op, kind, operands, new, op.name + group.name).loop
        assert new_loop is not None
        self.active, self.graded = previous
        return new_loop

    def split(self, activity: _LoopActivity, groups: Sequence[_IterationGroup], new: Graph) -> None:
        """Replace a loop by several, which read parts of its slices and write parts of its stacks."""
        op, old = activity.op, activity.loop
        if any(not t.storage.pieces for t in old.pieces):  # parts written in place are disjoint only if counts are >= 0
            new.root.assume(*(f"{group.count} >= 0" for group in groups if group.count.constant is None))
        state, dense, shared = ([self.tensors[t] for t in ts] for ts in (old.starts, old.xs, old.shared))
        counts = [group.count.expr for group in groups]
        with building(new):
            parts = [split(t, counts, 0, name=f"{op.name}.slices") for t in dense]
        stacks = [new.add_op(Empty(sizes=r.sizes, dtype=r.dtype), [], r.name, op.phase).results[0] for r in old.stacks]
        loops = []
        for i, group in enumerate(groups):
            loops.append(self.copy_loop(activity, group, [*state, *(part[i] for part in parts), *shared], new))
            state = list(loops[-1].lasts)
        filled = [
            new.add_op(Stacked(), [t, *(part.stacks[k] for part in loops)], f"{t.name}.filled", op.phase).results[0]
            for k, t in enumerate(stacks)
        ]
        residuals = [self._residuals(old, k, loops, new) for k in range(len(old.pieces))]
        self.tensors |= dict(zip(op.results, [*state, *filled, *residuals], strict=True))

    def _residuals(self, old: Loop, k: int, loops: Sequence[Loop], new: Graph) -> Any:
        """Return the residuals that all parts of a loop leave, or the operand they were written into."""
        x = old.updated_operand(k)
        if x is None:
            return [part.pieces[k] for part in loops]
        target, offset = self.tensors[x], ZERO
        for part in loops:
            kind = SliceUpdate(axes=(0,), starts=(offset,), steps=(1,))
            (target,) = new.add_op(kind, [target, part.pieces[k]], f"{old.pieces[k].name}.part", old.op.phase).results
            offset = offset + part.count
        return target

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op, whose list operands may have grown."""
        if any(isinstance(self.tensors[t], list) for t in op.operands):
            return self.add(op, op.kind, flat(op, self.tensors), new, op.name)
        return super().copy(op, new, suffix)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, or peel a loop."""
        if op.loop is None or new.fused:
            super().emit(op, new, suffix)
            return
        activity = _LoopActivity(op, self.active, self.graded, stops=self.stops_early_in(op))
        groups = activity.iteration_groups()
        if len(groups) > 1:
            self.peeled = True
            self.split(activity, groups, new)
        else:
            self.copy_loop(activity, groups[0], [self.tensors[t] for t in op.operands], new)


# -- reverse walk ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """How a leaf's complete gradient is stored."""

    total: Tensor | None = None
    """gradient buffer to add to, None for none"""
    dtype: DType | None = None
    """dtype to store it in, None for the tensor's own"""
    update: Update | None = None
    """optimizer update that consumes the gradient at once"""

    @property
    def is_plain(self) -> bool:
        """Whether the summed contributions are stored unchanged."""
        return self.total is None and self.dtype is None


@dataclass(frozen=True)
class BackwardHooks:
    """How a walk treats ops with a body, and recomputed ops."""

    fused: Pullers
    """differentiates a kernel"""
    repeated: Pullers
    """differentiates a loop"""
    recompute: Callable[[ReverseMode, Sequence[Op]], None]
    """recomputes a run of ops and walks back over it"""
    runs: Callable[[Sequence[Op]], Sequence[Sequence[Op]]]
    """returns the recomputed runs among the ops in a graph or body"""
    keeps: Callable[[Op], bool]
    """whether the result of an op in a run is saved instead of recomputed"""
    early_stop: bool = True
    """whether recomputation stops after the last op of a run that the backward pass reads"""
    start: bool = False
    """whether carries-in of a loop are recomputed from its initial carry"""
    within: BackwardHooks | None = None
    """hooks for ops already being recomputed; None if nothing is recomputed twice"""


Pullers = Callable[["ReverseMode", Op, Sequence["Tensor | None"], Sequence[bool]], Sequence["Tensor | None"]]


def scoped(op: Op) -> AbstractContextManager[None]:
    """Add new ops in an existing op's scope."""
    return opened(levels=tuple(op.scope.split("/")) if op.scope else ())


class ReverseMode:
    """Reverse walk over one graph or body, with the gradients of its tensors.

    `active` are the tensors that need gradients, and `saved` maps a forward tensor to the graph being
    built. `carried` are inputs of the body being built that may be overwritten, and `leaves` says how gradients that
    persist are stored. `fused` emits ops into a kernel, where sums need no storage. `rules` override the rules of
    single ops.
    """

    def __init__(
        self,
        hooks: BackwardHooks,
        active: set[Tensor],
        saved: Callable[[Tensor], Tensor],
        *,
        carried: set[Tensor] | None = None,
        leaves: Mapping[Tensor, Leaf] | None = None,
        fused: bool = False,
        rules: Mapping[Op, Rule[Any]] | None = None,
    ) -> None:
        self.hooks = hooks
        self.active = active
        self.saved = saved
        self.carried: set[Tensor] = set() if carried is None else carried
        self.leaves = dict(leaves or {})
        self.final: dict[Tensor, Tensor] = {}
        """Complete gradients of leaves."""
        self.readers: Counter[Tensor] = Counter()
        """Number of ops still to contribute to a leaf's gradient."""
        self.fused = fused
        self.rules = dict(rules or {})
        self.grads: dict[Tensor, Tensor] = {}
        self.parts: dict[Tensor, dict[Op, Tensor]] = {}
        """Gradients for the parts of a split tensor."""
        self.stacks: dict[Op, Tensor] = {}
        """Stacks that loops write the gradients of parts into, by the first part."""
        self.partial_grads: Counter[Storage] = Counter()
        """Number of incomplete gradients per storage."""

    # -- accumulation -----------------------------------------------------------------------------------------------

    def put(self, t: Tensor, grad: Tensor | None) -> None:
        """Accumulate a contribution to a tensor's gradient."""
        if grad is None or t not in self.active:
            return
        if len(grad.sizes) != t.ndim or not all(map(t.graph.same, grad.sizes, t.sizes)):
            raise GraphError(f"gradient {grad!r} does not have the shape of {t!r}")
        grad = restricted(grad, t) if t.domain is not None else zero_filled(grad)
        previous = self.grads.get(t)
        if previous is None and t in self.leaves and self.leaves[t].is_plain:
            grad = self.persistent(grad)
        if previous is not None:
            self.partial_grads[previous.storage] -= 1
            grad = self.add(previous, grad)
        self.record(t, grad)

    def record(self, t: Tensor, grad: Tensor) -> None:
        """Record a tensor's partial gradient."""
        self.grads[t] = grad
        self.partial_grads[grad.storage] += 1

    def persistent(self, grad: Tensor) -> Tensor:
        """Return a gradient that can persist: a copy if it is expanded or shared."""
        if grad.storage.pieces or self.fused:
            return grad
        exclusive = not any(g is grad for g in self.grads.values()) and grad.touched == grad.numel
        return contiguous_copy(grad) if exclusive else pointwise("copy", grad, name="own")

    def writable(self, grad: Tensor) -> bool:
        """Whether a gradient may be written in place: nothing else holds it, and it is not a view."""
        producer = grad.producer
        while producer is not None and isinstance(producer.kind, KeepAlive):
            producer = producer.operands[0].producer
        if producer is not None and is_view_op(producer) and grad not in self.carried:
            return False
        covers_storage = grad.touched == grad.numel and grad.numel == grad.storage.elements
        return (
            covers_storage
            and not self.partial_grads[grad.storage]
            and (grad.role == "activation" or grad in self.carried)
        )

    def add(self, previous: Tensor, grad: Tensor) -> Tensor:
        """Accumulate into a gradient, in place where nothing else holds it."""
        if self.fused or not self.writable(previous):
            return pointwise("add", previous, grad)
        if previous in self.carried:
            return accumulate(previous, grad, aliased=grad.role == "formal" or self.partial_grads[grad.storage] > 0)
        return pointwise("add", previous, grad, inplace=True)

    def take(self, t: Tensor) -> Tensor | None:
        """Remove and return a tensor's gradient, once all its users have contributed."""
        parts = self.parts.pop(t, {})
        for cuts in _tilings(t) if parts else ():
            grads = [parts.get(cut) for cut in cuts]
            if any(grad is not None for grad in grads):
                with scoped(cuts[0]):
                    self.put(t, _concat_part_grads(cuts, grads, self.stacks.pop(cuts[0], None)))
        grad = self.grads.pop(t, None)
        if grad is not None:
            self.partial_grads[grad.storage] -= 1
        return grad

    def final_grad(self, t: Tensor) -> Tensor | None:
        """Return a source's complete gradient."""
        return self.final[t] if t in self.final else self.take(t)

    # -- ops --------------------------------------------------------------------------------------------------------

    def run(self, ops: Sequence[Op]) -> None:
        """Walk back over ops in reverse order."""
        self.readers.update(t for op in ops for t in dict.fromkeys(op.operands) if t in self.leaves)
        runs = {run[-1]: run for run in self.hooks.runs(ops)}
        remaining = list(ops)
        while remaining:
            op = remaining.pop()
            if op in runs:
                del remaining[len(remaining) + 1 - len(runs[op]) :]
                self.hooks.recompute(self, runs[op])
                self.finalize_leaves(runs[op])
            else:
                self.pull(op)
                self.finalize_leaves([op])

    def finalize_leaves(self, ops: Sequence[Op]) -> None:
        """Finalize the gradients of leaves whose last contribution came from `ops`."""
        for op in ops:
            # bias of a linear layer before its weight, whose gradient torch must transpose first
            for t in dict.fromkeys(reversed(op.operands)):
                if t not in self.leaves:
                    continue
                self.readers[t] -= 1
                grad = self.take(t) if not self.readers[t] and t not in self.final else None
                if grad is not None:
                    self.final[t] = self.complete(t, grad)
                    update = self.leaves[t].update
                    if update is not None:
                        update(self.saved(t), self.final[t])

    def complete(self, t: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient in the form in which it persists."""
        leaf = self.leaves[t]
        if leaf.is_plain or t.storage.pieces:  # a loop has finalized it slice by slice
            return grad
        total = leaf.total
        if leaf.dtype is not None and leaf.dtype.bits <= grad.dtype.bits:
            grad = cast(grad, leaf.dtype)
        if total is None:
            return grad
        if total.dtype == grad.dtype:
            return accumulate(total, grad)
        return pointwise("add", total, grad, inplace=True)  # into a buffer of another dtype

    def pull(self, op: Op) -> None:
        """Apply one op's gradient rule and accumulate the results."""
        needs = tuple(t in self.active for t in op.operands)
        write = None if self.fused else written_op(op)
        if write is not None and any(needs):
            with scoped(write):
                self.write_back(op, write)
            return
        grads = tuple(self.take(t) for t in op.results)
        if not (any(needs) or is_leaf(op)) or all(g is None for g in grads):
            return
        with scoped(op):
            if isinstance(op.kind, KeepAlive) and op.kind.rebased and grads[0] is not None:
                found = view_path(*op.operands)
                assert found is not None
                self.put(op.operands[1], embed(found[1], op.operands[1], grads[0]))
                return
            if op not in self.rules and isinstance(op.kind, Slice) and op.kind.split and grads[0] is not None:
                self.parts.setdefault(op.operands[0], {})[op] = grads[0]
                return
            operand_grads = list(self.gradients(op, grads, needs))
            overwritten = op.kind.overwrites() == (0,) and needs[0] and operand_grads[0] is None
            # in a kernel, other readers give the overwritten value its gradient
            is_read = self.fused and op.graph.out_degree(op.operands[0]) > 1
            if overwritten and grads[0] is not None and not is_read:
                zeros = fill(op.operands[0].shape, dtype=grads[0].dtype)  # as `zero_`, `fill_` and `copy_` do
                operand_grads[0] = zeros if self.fused else keep_alive(zeros, grads[0])
            # gradients may share a tensor: adding one in place must not overwrite those still to come
            self.partial_grads.update(grad.storage for grad in operand_grads if grad is not None)
            for t, grad in zip(op.operands, operand_grads, strict=True):
                if grad is not None:
                    self.partial_grads[grad.storage] -= 1
                self.put(t, grad)

    def write_back(self, op: Op, write: Op) -> None:
        """Walk back over an op that wrote into a view of a tensor, as torch's `CopySlices`.

        The view is taken of the written tensor again, so that its gradient arrives through `AsStridedBackward`. The
        whole gradient is copied. The view's gradient is cloned and passed to the op, whose result overwrites the view.
        """
        base, found = op.operands[0], view_path(write.operands[0], op.operands[0])
        if found is None:
            raise GraphError(f"gradient of {base!r}: {write.name!r} does not write into it")
        _, path = found
        view_grad = self.take(write.results[0])
        if view_grad is not None:
            self.put(op.results[0], embed(path, base, view_grad))
        grad = self.take(op.results[0])
        if grad is None:
            return
        copied = pointwise("copy", grad)
        part = replay(path, copied)
        needs = tuple(t in self.active for t in write.operands)
        clone = pointwise("copy", part, name="clone")
        operand_grad, *other_grads = self.gradients(write, (clone,), needs)
        if needs[0]:
            if operand_grad is None:
                operand_grad = keep_alive(fill(part.shape, dtype=part.dtype), clone)
            self.put(base, keep_alive(write_through(copied, part, assign(part, operand_grad)), grad))
        for t, g in zip(write.operands[1:], other_grads, strict=True):
            self.put(t, g if g is None or needs[0] else keep_alive(g, grad, copied))

    def gradients(self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Return the gradients for an op's operands, given its results' gradients."""
        graph = current_graph()
        before = len(graph)
        operand_grads = self.in_memory_format(op, grads, needs)
        if op.kind.copies_matmul_operands and not self.fused:
            for product in [n for n in islice(graph, before, None) if isinstance(n, Op) and isinstance(n.kind, Einsum)]:
                copies = (t for t in product.operands if not has_blas_layout(t.sizes, t.strides))
                product.state(workspace=total(t.sizes[-2] * t.sizes[-1] * t.dtype.bytes for t in copies))
        return operand_grads

    def in_memory_format(
        self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> Sequence[Tensor | None]:
        """Return the gradients as `gradients` does, with the copies a kernel makes for its memory format."""
        ndim = op.results[0].ndim  # kernels copy no gradients of statistics, such as a logsumexp or a mean
        grad = next((g for g in grads if g is not None and g.ndim == ndim), None)
        if self.fused or not op.kind.grad_memory_format or grad is None:
            return self.dispatch(op, grads, needs)
        order = _memory_format(op, grad)
        copies = [copied_into(g, order) if g is not None and g.ndim == ndim else g for g in grads]
        operand_grads = list(self.dispatch(op, copies, needs))
        if op.kind.copies_grad_input and operand_grads[0] is not None:
            operand_grads[0] = _in_own_format(op, operand_grads[0], order, grad)
        copied = [
            t for pair in zip(grads, copies, strict=True) if pair[0] is not pair[1] for t in pair if t is not None
        ]
        i = next((i for i, g in enumerate(operand_grads) if g is not None and g.role == "activation"), None)
        if copied and i is not None:
            operand_grads[i] = keep_alive(operand_grads[i], *copied)  # type: ignore[arg-type]  # it is there
        return operand_grads

    def dispatch(self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Dispatch to an op's rule."""
        if op in self.rules:
            return self.rules[op](VJPContext(op, tuple(grads), needs, self.saved))
        if op.body is not None:
            return (self.hooks.fused if isinstance(op.kind, Kernel) else self.hooks.repeated)(self, op, grads, needs)
        _save_indices(op)
        return self.apply_rule(rule_of(op), op, grads, needs)

    def apply_rule(
        self, rule: Rule[Any], op: Op, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Apply a rule; its inputs and saved tensors stay alive until all its gradients exist, as in torch."""
        alive: dict[Tensor, None] = dict.fromkeys(g for g in grads if g is not None)
        graph = current_graph()
        before = len(graph)

        def saved(t: Tensor) -> Tensor:
            tensor = self.saved(overwritten(op, t))
            alive[tensor] = None
            return tensor

        if not self.fused:
            for index in op.kind.saved_operands:
                if needs[index] or not isinstance(op.kind, Concat):  # a part is needed only for its own gradient
                    saved(op.operands[index])
        operand_grads = list(rule(VJPContext(op, tuple(grads), tuple(needs), saved)))
        if self.fused:
            return operand_grads
        new_ops = [n for n in islice(graph, before, None) if isinstance(n, Op) and not is_view_op(n)]
        last = {t.storage for t in (new_ops[-1].operands if new_ops else grads) if t is not None}
        freed_early = [t for t in alive if t.storage not in last and t.role in ("activation", "formal")]
        i = next((i for i, g in enumerate(operand_grads) if g is not None and g.role == "activation"), None)
        if freed_early and i is not None:
            operand_grads[i] = keep_alive(operand_grads[i], *freed_early)  # type: ignore[arg-type]  # it is there
        return operand_grads


def _memory_format(op: Op, grad: Tensor) -> tuple[int, ...]:
    """Return the memory order of axes that a backward kernel copies an incoming gradient into."""
    if op.kind.grad_memory_format == "bshd":  # heads may be two axes, the first being KV groups
        return (0, grad.ndim - 2, *range(1, grad.ndim - 2), grad.ndim - 1)
    like = op.operands[0] if op.kind.grad_memory_format == "operand" else grad
    contiguous = op.kind.grad_memory_format == "contiguous"
    return tuple(range(grad.ndim)) if contiguous else memory_format(like.sizes, like.strides)


def _in_own_format(op: Op, operand_grad: Tensor, order: Sequence[int], grad: Tensor) -> Tensor:
    """Copy an operand's gradient from the kernel's memory format into its own.

    For an elementwise kernel that is the format of the incoming gradient. Pooling copies inside the kernel, including
    residuals saved in another format.
    """
    producer = operand_grad.producer
    while producer is not None and isinstance(producer.kind, KeepAlive):
        producer = producer.operands[0].producer
    if producer is None:
        return operand_grad
    if op.kind.grad_memory_format == "contiguous":
        copy = copied_into(operand_grad, memory_order(grad.sizes, grad.strides) or order)
        return operand_grad if copy is operand_grad else keep_alive(copy, *producer.operands)
    converted = [
        t for t in (*producer.results, *producer.operands[2:]) if not is_contiguous_in(t.sizes, t.strides, order)
    ]
    producer.state(workspace=producer.workspace + total(t.numel * t.dtype.bytes for t in converted))
    return operand_grad


def _save_indices(op: Op) -> None:
    """Make a max pooling return its indices."""
    if not isinstance(op.kind, Pool) or op.kind.operation != "max" or op.kind.indices:
        return
    modify(op.graph, op.name)
    op.state(indices=True)
    op.graph.add_result(op, op.kind.infer(op.operands)[1], f"{op.name}.places")


def _tilings(t: Tensor) -> Iterator[list[Op]]:
    """Yield the parts of a tensor, once for each time it was split."""
    cuts = [(op, op.kind) for op in t.graph.successors(t) if isinstance(op.kind, Slice) and op.kind.split]
    while cuts:
        axis, offset, parts = cuts[0][1].axis, ZERO, list[Op]()
        while not t.graph.same(offset, t.sizes[axis]):
            cut = next((c for c in cuts if c[1].axis == axis and t.graph.same(c[1].start, offset)), None)
            if cut is None:
                raise GraphError(
                    f"gradient of {t!r}: the parts leave a gap at {offset}, expected parts that cover the tensor"
                )
            cuts.remove(cut)
            parts.append(cut[0])
            offset = offset + cut[1].size
        yield parts


def _concat_part_grads(cuts: Sequence[Op], grads: Sequence[Tensor | None], stack: Tensor | None) -> Tensor:
    """Concatenate the gradients for the parts of a split tensor, with zeros for parts without one."""
    dtype = next(g for g in grads if g is not None).dtype
    pairs = [(cut.results[0], g) for cut, g in zip(cuts, grads, strict=True)]
    parts = [restricted(fill(t.shape, dtype=dtype), t) if g is None else g for t, g in pairs]
    if stack is None:
        assert isinstance(cuts[0].kind, Slice)
        return concat(parts, cuts[0].kind.axis)
    return apply(Stacked(), [stack, *parts], "stacked")[0]


def preallocate_stack(walk: ReverseMode, t: Tensor, dtype: DType) -> None:
    """Let loops that read parts of a tensor write their gradients into one preallocated stack."""
    cut = t.producer
    if cut is None or not isinstance(cut.kind, Slice) or not cut.kind.split or cut.kind.axis:
        return
    cuts = next(cuts for cuts in _tilings(cut.operands[0]) if cut in cuts)
    readers = [list(t.graph.successors(c.results[0])) for c in cuts]
    if cuts[0] in walk.stacks or any(len(ops) != 1 or ops[0].loop is None for ops in readers):
        return
    sizes = cut.operands[0].sizes
    walk.stacks[cuts[0]] = apply(Empty(sizes=sizes, dtype=dtype), [], f"{cuts[0].name}.grad")[0]


# -- residuals of branches without gradient ----------------------------------------------------------------------------
# A mask, an index or an unused variable may be computed from parameters. The backward pass never reaches these ops, yet
# autograd saves tensors for them, and frees these with the last tensor of the branch.


def keep_branch_residuals(graph: Graph, hooks: BackwardHooks) -> Graph:
    """Return a forward graph that keeps the saved tensors of gradient-free branches alive until the branch is freed.

    Recomputed ops save nothing.
    """
    ops = graph.ops
    active = active_in(ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    graded = graded_in(ops, active, (t for t in graph.outputs if not t.sizes))
    recomputed = {op for run in hooks.runs(ops) for op in run}
    dead = [op for op in ops if op not in recomputed and op.loop is None and _is_dead(op, active, graded)]
    if not dead:
        return graph
    index_of = {op: i for i, op in enumerate(ops)}
    last: dict[Storage, int] = {t.storage: index_of[op] for op in ops for t in op.operands}
    last |= dict.fromkeys((t.storage for t in graph.outputs), len(ops) - 1)
    freed_at: dict[Op, int] = {}
    storages_until: dict[int, set[Storage]] = {}
    with graph:
        for op in reversed(dead):
            later = [freed_at[o] for t in op.results for o in graph.successors(t) if o in freed_at]
            freed_at[op] = max([index_of[op], *(last.get(t.storage, 0) for t in op.results), *later])
            for t in _rule_reads(op, active, hooks):
                if t.role == "activation" and last.get(t.storage, -1) < freed_at[op]:
                    storages_until.setdefault(freed_at[op], set()).add(t.storage)
    newest = {t.storage: t for op in ops for t in op.results}  # a Keep reads a storage as of its last write
    tensors_after = {
        ops[i]: [t for storage, t in newest.items() if storage in storages] for i, storages in storages_until.items()
    }
    return _KeepAliveInserter(tensors_after).run(graph)


def _is_dead(op: Op, active: Collection[Tensor], graded: Collection[Tensor]) -> bool:
    return not op.kind.no_grad and any(t in active for t in op.results) and not any(t in graded for t in op.results)


def _rule_reads(op: Op, active: set[Tensor], hooks: BackwardHooks) -> list[Tensor]:
    """Return the tensors that an op's gradient rule reads; none if it has no rule."""
    scratch = Graph("saved")
    scratch.relations = op.graph.root.relations
    reads: dict[Tensor, Tensor] = {}

    def stand_in(t: Tensor) -> Tensor:
        standin = Tensor(scratch, scratch.unique("x"), t.sizes, t.dtype, role="input", strides=t.strides)
        standin.domain = t.domain
        scratch.add_node(standin)
        return standin

    def saved(t: Tensor) -> Tensor:
        return reads[t] if t in reads else reads.setdefault(t, stand_in(t))

    grads = [stand_in(t) if t in active else None for t in op.results]
    with opened(graph=scratch, levels=(), phase="backward"), suppress(UnsupportedError):
        ReverseMode(hooks, active, saved).gradients(op, grads, tuple(t in active for t in op.operands))
    return list(reads)


class _KeepAliveInserter(Rewriter):
    """Copies a graph, keeping tensors alive until after some of its ops."""

    def __init__(self, tensors_after: dict[Op, list[Tensor]]) -> None:
        super().__init__()
        self.tensors_after = tensors_after

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, followed by a `KeepAlive` of the tensors that live until it."""
        super().emit(op, new, suffix)
        if op in self.tensors_after:
            new.add_op(KeepAlive(), [self.tensors[t] for t in self.tensors_after[op]], "keep_alive", op.phase)


# -- recompute ---------------------------------------------------------------------------------------------------------

TensorMap = Mapping[Tensor, Tensor]


def recompute(walk: ReverseMode, run: Sequence[Op]) -> None:
    """Recompute a run of ops from its inputs and walk back over the copies.

    As in torch's non-reentrant checkpoint, the ops run in order and stop after the last one whose result the backward
    pass reads, if `early_stop`. The inputs and saved results stay alive until the walk leaves the run, read or not.
    """
    results = [t for op in run for t in op.results]
    if not any(t in walk.grads or t in walk.parts for t in results):
        return
    graph = current_graph()
    copier, produced = Rewriter(), set(results)
    inputs: dict[Tensor, Tensor] = {}
    for t in (t for op in run for t in op.operands if t not in produced):
        if t not in inputs:
            inputs[t] = copier.tensors[t] = walk.saved(t)
    saved_results = {op: _saved_result(walk, op) for op in run if walk.hooks.keeps(op)}
    copies = [
        _keep_op(copier, op, saved_results[op], graph) if op in saved_results else copier.copy(op, graph) for op in run
    ]
    for op in _walk_ops(copies):
        op.phase = "recompute"
    keep_ops = {copier.tensors[op.results[0]].producer for op in saved_results}
    active = active_in(copies, (m for t, m in inputs.items() if t in walk.active), keep_ops)
    leaves = {m: walk.leaves[t] for t, m in inputs.items() if t in walk.leaves}
    hooks = walk.hooks.within or replace(walk.hooks, runs=lambda ops: (), keeps=lambda op: False, start=False)
    copied_ops, standins, read = set(copies), set(inputs.values()), set[Tensor]()

    def saved(t: Tensor) -> Tensor:
        """Map a forward tensor to its copy; recomputed tensors map to themselves."""
        read.add(t)
        if t in standins or t.producer in copied_ops:
            return t
        return copier.tensors[t] if t in copier.tensors else walk.saved(t)

    back = ReverseMode(hooks, active, saved, leaves=leaves)
    back.rules = {copier.tensors[op.results[0]].producer: _forward_rule(back, op) for op in saved_results}
    back.active |= {t for op in saved_results for t in op.operands if copier.tensors[t] in active}
    _walk_back(walk, back, run, copies, copier.tensors, inputs)
    if walk.hooks.early_stop:
        _stop_early(graph, copies)
    unread = [t for op, t in saved_results.items() if copier.tensors[op.results[0]] not in graph]
    if read:  # else no saved-tensor hook holds the run's arguments
        unread += (copy for t, copy in inputs.items() if origin(t).role in ("activation", "input"))
    _hold(walk, inputs, unread)


def _walk_back(
    walk: ReverseMode,
    back: ReverseMode,
    run: Sequence[Op],
    copies: Sequence[Op],
    copied: TensorMap,
    inputs: Mapping[Tensor, Tensor],
) -> None:
    """Walk back over the recomputed ops, from gradients of results to gradients of inputs."""
    back.partial_grads, back.carried = walk.partial_grads, walk.carried
    # a gradient is complete here if no op outside is still to contribute
    back.readers.update({m: walk.readers[t] - sum(t in op.operands for op in run) for t, m in inputs.items()})
    for t in (t for op in run for t in op.results):
        grad = walk.take(t)
        if grad is not None:
            back.record(copied[t], grad)
    for t, standin in inputs.items():
        previous = walk.grads.pop(t, None)
        if previous is not None:
            walk.partial_grads[previous.storage] -= 1
            back.record(standin, previous)
    back.run(copies)
    for t, standin in inputs.items():
        if standin in back.final:
            walk.final[t] = back.final[standin]
        grad = back.take(standin)
        if grad is not None:
            walk.record(t, grad)


def _hold(walk: ReverseMode, inputs: Iterable[Tensor], tensors: Sequence[Tensor]) -> None:
    """Keep the inputs and saved results of a run alive until a gradient leaves it, like torch's checkpoint frame."""
    last = next((t for t in inputs if t in walk.grads and t not in walk.leaves), None)
    if tensors and last is not None:
        grad = walk.take(last)
        assert grad is not None
        walk.record(last, keep_alive(grad, *tensors))


def _saved_result(walk: ReverseMode, op: Op) -> Tensor:
    """Return an op's saved result from the forward pass."""
    if len(op.results) > 1:
        raise GraphError(f"keep: {op.name!r} has {len(op.results)} results, expected one")
    return walk.saved(op.results[0])


def _keep_op(copier: Rewriter, op: Op, saved: Tensor, graph: Graph) -> Op:
    """Add a `KeepAlive` in place of an op whose result is saved; its operands are recomputed."""
    return copier.add(op, KeepAlive(), [saved, *(copier.tensors[t] for t in op.operands)], graph)


def _forward_rule(back: ReverseMode, op: Op) -> Rule[Any]:
    """Return the rule for a `KeepAlive` that replaces a saved op: that op's own."""

    def rule(pull: VJPContext[Any]) -> Sequence[Tensor | None]:
        return [None, *back.gradients(op, pull.grads, pull.needs[1:])]

    return rule


def _walk_ops(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _walk_ops(op.body.ops)


def _stop_early(graph: Graph, copies: Sequence[Op]) -> None:
    """Remove the ops after the last one whose result is read, also within a peeled last iteration."""
    for op in reversed(copies):
        if any(_is_read(t) for t in op.results):
            if op.loop is not None and op.loop.count == ONE:
                _stop_in_loop(op, op.loop)
            return
        graph.remove_nodes_from([*op.results, op])


def _is_read(t: Tensor) -> bool:
    return t.graph.out_degree(t) > 0 or t in t.graph.outputs


def _stop_in_loop(op: Op, loop: Loop) -> None:
    """Stop early within a single-iteration loop, for final carries that are not read."""
    body, unread = loop.body, [t for t in loop.stacks if not _is_read(t)]
    for i, (start, t) in enumerate(zip(loop.starts, loop.lasts, strict=True)):
        if not _is_read(t):  # the carry passes through unchanged
            body.outputs[i] = loop.carries[i]
            t.storage, t.offset = start.storage, start.offset
    body.outputs[:] = [t for t, r in zip(body.outputs, op.results, strict=True) if r not in unread]
    op.results = tuple(r for r in op.results if r not in unread)
    op.graph.remove_nodes_from(unread)
    _stop_early(body, list(body.ops))


# -- loops -------------------------------------------------------------------------------------------------------------
# The backward pass of a loop runs its iterations in reverse and reads the stacked residuals of the forward loop.

# narrower dtypes are for matmul operands only: their gradients have the graph's default dtype
_MIN_GRAD_BITS = 16


@dataclass
class _BackwardLoop:
    """The backward loop under construction; inputs are added as they are needed."""

    forward: Loop
    """the forward loop"""
    outer: ReverseMode
    """walk over the graph that contains the loop"""
    body: Graph
    """body of the backward loop"""
    carries: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    """carried formals, and their initial values if known"""
    xs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """sliced formals, and the tensors they slice"""
    counterparts: dict[Tensor, Tensor] = field(default_factory=dict)
    """counterparts for tensors in the forward body"""

    @cached_property
    def shared(self) -> set[int]:
        """Indices of the operands that all forward iterations read whole."""
        return {i for i, f in enumerate(self.forward.body.formals) if f in self.forward.captured}

    def carry(self, like: Tensor, name: str, start: Tensor | None) -> Tensor:
        """Add a carried formal."""
        formal = self.body.formal(like, name, like.sizes, contiguous(like.sizes))
        self.carries.append((formal, start))
        return formal

    def drop(self, formal: Tensor) -> None:
        """Remove an unused formal."""
        self.carries = [c for c in self.carries if c[0] is not formal]
        self.xs = [x for x in self.xs if x[0] is not formal]
        self.body.remove_node(formal)
        self.body.formals.remove(formal)

    def slice(self, outer: Tensor, name: str) -> Tensor:
        """Add a formal that is one position along the first axis of `outer`."""
        formal = next((f for f, t in self.xs if t is outer), None)
        if formal is None:
            formal = slice_of(self.body, outer, name)
            self.xs.append((formal, outer))
        return formal

    def part(self, outer: Tensor, name: str) -> Tensor:
        """Slice a tensor that was declared further out."""
        parent = self.body.parent
        assert parent is not None
        return self.slice(parent.adopt(outer), name)

    def saved(self, t: Tensor) -> Tensor:
        """Return the counterpart for a tensor in the forward body."""
        if t not in self.counterparts:
            self.counterparts[t] = self.find(t)
        return self.counterparts[t]

    def find(self, t: Tensor) -> Tensor:
        loop, parent = self.forward, self.body.parent
        assert parent is not None
        if t in loop.slices:
            return self.slice(parent.adopt(self.outer.saved(loop.xs[loop.slices.index(t)])), f"{t.name}.again")
        if t in loop.captured:
            return self.body.adopt(parent.adopt(self.outer.saved(loop.shared[loop.captured.index(t)])))
        if t in loop.carries and self.outer.hooks.start:
            return self.from_start()[loop.carries.index(t)]
        if t.producer is not None and isinstance(t.producer.kind, KeepAlive):  # liveness of the forward pass only
            return self.saved(t.producer.operands[0])
        if t.producer is not None and is_view_op(t.producer):
            base = self.saved(t.producer.operands[0])
            op = self.body.add_op(t.producer.kind, [base], t.producer.name + ".again")
            return op.results[0]
        return self.slice(parent.adopt(self.outer.saved(stacked_residual(loop.op, t))), f"{t.name}.saved")

    def from_start(self) -> tuple[Tensor, ...]:
        """Recompute an iteration's carries-in by running all iterations before it."""
        loop, parent = self.forward, self.body.parent
        assert parent is not None
        operands = [self.body.adopt(parent.adopt(self.outer.saved(t))) for t in loop.op.operands]
        body = Rewriter().body(loop.body, self.body, "")
        del body.outputs[len(loop.nexts) :]
        kind = replace(loop.kind, body=body, saved=0, until=True)
        op = self.body.add_op(kind, operands, f"{loop.op.name}.before")
        body.owner, op.scope = op, loop.op.scope
        for each in (op, *body.walk()):
            each.phase = "recompute"
        self.counterparts |= dict(zip(loop.carries, op.results, strict=False))
        return op.results


def stacked_residual(op: Op, t: Tensor) -> Tensor:
    """Return the stacked residuals for a tensor in a loop body, one storage per iteration, adding the result if new."""
    loop = op.loop
    assert loop is not None
    if t in loop.saved:
        return loop.pieces[loop.saved.index(t)]
    modify(op.graph, op.name)
    loop.body.outputs.append(t)
    op.state(saved=loop.kind.saved + 1)
    result = op.kind.infer(op.operands)[-1]
    op.graph.add_result(op, replace(result, of=None) if result.of is not None else result, f"{t.name}.kept")
    return op.results[-1]


def pull_loop(walk: ReverseMode, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add the backward loop for a loop and return its operands' gradients."""
    loop = op.loop
    assert loop is not None
    backward = _BackwardLoop(loop, walk, current_graph().start_body(f"{loop.body.name}_backward", fused=False))
    active = active_inside(op, walk.active)
    with building(backward.body):
        back = ReverseMode(walk.hooks, active, backward.saved)
        carried = _seed(backward, back, grads)
        sums = _start_sums(backward, back, needs)
        back.run(loop.body.ops)
        out = _LoopResults(backward, back, carried)
        for p in list(carried):
            out.carry(p, back.final_grad(loop.carries[p]))
        for i in list(sums):
            out.sum(i, back.final_grad(loop.body.formals[i]), sums)
        out.slices(needs)
    return _close(walk, out, grads, sums)


def _seed(backward: _BackwardLoop, back: ReverseMode, grads: Grads) -> list[int]:
    """Seed the gradients of a body's outputs; return the indices of carries with a gradient."""
    loop = backward.forward
    single = loop.count == ONE
    grad_of = dict(zip(loop.op.results, grads, strict=True))
    graded = graded_inside(loop.op, backward.outer.active, {t for t, g in grad_of.items() if g is not None})
    carried, seeds = [], []
    for p, (f, t, last) in enumerate(zip(loop.carries, loop.nexts, loop.lasts, strict=True)):
        grad = grad_of[last]
        if f in graded or (t in graded and not single):
            carried.append(p)
            seed = backward.carry(last, f"{last.name}.grad", grad)
            back.carried.add(seed)
            if grad is not None or not single:
                seeds.append((t, seed))
        elif grad is not None and t in graded:  # single iteration whose carry-in needs no gradient
            seed = backward.body.adopt(grad)
            if backward.outer.writable(grad):
                back.carried.add(seed)
            back.put(t, seed)
    for t, seed in seeds:
        back.put(t, seed)
    for t, r in (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True)):
        grad = grad_of[r]
        if grad is not None and t in back.active:
            back.put(t, backward.slice(grad, f"{t.name}.grad"))
    return carried


def _start_sums(
    backward: _BackwardLoop, back: ReverseMode, needs: Sequence[bool]
) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Start the gradient sums for captured operands, and continue existing ones for slices."""
    loop, walk = backward.forward, backward.outer
    sums: dict[int, tuple[Tensor, Tensor | None]] = {}
    for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
        if not needs[i] or f in loop.carries:
            continue
        previous = walk.grads.get(t)
        if f in loop.slices and t in walk.leaves and walk.readers[t] == 1 and t.storage.pieces:
            leaf = walk.leaves[t]
            total = None if leaf.total is None else backward.slice(leaf.total, f"{t.name}.total")
            update = None if leaf.update is None else leaf.update.inside(backward.part, loop.count)
            back.leaves[f] = replace(leaf, total=total, update=update)
        if previous is not None:
            walk.partial_grads[previous.storage] -= 1
        reusable = previous is not None and (
            bool(previous.storage.pieces) or (walk.writable(previous) and previous.is_contiguous)
        )
        if previous is not None:
            walk.partial_grads[previous.storage] += 1
        if f in loop.captured:
            start = backward.carry(t, f"{t.name}.sum", previous if reusable else None)
            if t.dtype.bits < _MIN_GRAD_BITS:
                start.dtype = t.graph.root.dtype  # gradients never have this few bits
        elif t.storage.pieces and previous is not None:
            start = backward.slice(previous, f"{t.name}.sum")
        else:
            continue
        back.carried.add(start)
        back.record(f, start)
        sums[i] = start, previous if reusable else None
    return sums


class _LoopResults:
    """Results of the backward loop under construction."""

    def __init__(self, backward: _BackwardLoop, back: ReverseMode, carried: list[int]) -> None:
        self.backward = backward
        self.back = back
        self.carried = carried
        self.forwarded: dict[int, Tensor | None] = {}
        self.next_carries: list[Tensor] = []
        self.stacks: list[tuple[int, Tensor]] = []
        self.per_iteration: list[tuple[int, Tensor]] = []

    def carry(self, p: int, grad: Tensor | None) -> None:
        """Carry a gradient to the previous iteration, or pass it around the loop if no iteration changes it."""
        like, start = self.backward.carries[len(self.next_carries)]
        if grad is like and not any(self.backward.body.successors(like)):
            self.backward.drop(like)
            self.carried.remove(p)
            self.forwarded[p] = start
            return
        if grad is None:
            grad = fill(like.shape, dtype=like.dtype)
        own_storages = {f.storage for f, _ in self.backward.carries}
        borrowed = grad.role == "formal" and grad.storage not in own_storages
        repeated = any(grad.storage is t.storage for t in self.next_carries)
        self.next_carries.append(pointwise("copy", grad, name="own") if borrowed or repeated else contiguous_copy(grad))

    def sum(self, i: int, grad: Tensor | None, sums: dict[int, tuple[Tensor, Tensor | None]]) -> None:
        """Return an operand's gradient sum from the loop; drop it if nothing was added."""
        start, _ = sums[i]
        if grad is None or grad is start:
            del sums[i]
            self.backward.drop(start)
        elif i in self.backward.shared:
            self.next_carries.append(contiguous_copy(grad))
        else:
            self.per_iteration.append((i, grad))

    def slices(self, needs: Sequence[bool]) -> None:
        """Return the gradients for slices: one storage per iteration if the operand has that, else one stack."""
        loop, done = self.backward.forward, {i for i, _ in self.per_iteration}
        for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
            needed = f in loop.slices and needs[i] and i not in done
            grad = self.back.final_grad(f) if needed else None
            if grad is None:
                continue
            exclusive = grad.role == "activation" and not any(grad.storage is t.storage for t in self.next_carries)
            if t.storage.pieces:
                leaf = self.back.leaves.get(f)
                if leaf is not None and leaf.update is not None:
                    continue  # the update has consumed the gradient
                if leaf is None or leaf.total is None:  # else it is in the gradient buffer already
                    grad = self.back.persistent(grad) if exclusive else pointwise("copy", grad, name="own")
                self.per_iteration.append((i, grad))
            else:
                looped = grad.producer is not None and grad.producer.loop is not None
                fresh = exclusive and grad.is_contiguous and not grad.is_view and not looped
                fresh = fresh and not any(grad.storage is t.storage for _, t in (*self.stacks, *self.per_iteration))
                grad = grad if fresh else pointwise("copy", grad, name="stack")
                self.stacks.append((i, contiguous_copy(grad)))


def _close(walk: ReverseMode, out: _LoopResults, grads: Grads, sums: dict[int, tuple[Tensor, Tensor | None]]) -> Grads:
    """Append the backward loop and return operand gradients."""
    backward, forward, op = out.backward, out.backward.forward, out.backward.forward.op
    body, graph = backward.body, backward.body.parent
    assert graph is not None
    body.outputs += [*out.next_carries, *(t for _, t in out.stacks), *(t for _, t in out.per_iteration)]
    for f in [f for f, _ in backward.xs if not body.out_degree(f) and f not in body.outputs]:
        backward.drop(f)  # read only by ops that an early stop has removed
    results: list[Tensor | None] = [out.forwarded.get(i) for i in range(len(op.operands))]
    if not body.outputs:
        return results
    body.formals[:] = [
        *(f for f, _ in backward.carries),
        *(f for f, _ in backward.xs),
        *map(body.capture, body.captured),
    ]
    # an initial value that the loop also reads under another name must not be overwritten
    uses = Counter(t.storage for _, t in (*backward.carries, *backward.xs) if t is not None)
    uses.update(t.storage for t in body.captured)
    starts = []
    for i, (f, t) in enumerate(backward.carries):
        # sums, which follow the incoming gradients, are known to be writable
        is_sum, shared = i >= len(out.carried), t is not None and uses[t.storage] > 1
        starts.append(_start(walk, graph, body, f, t, is_sum=is_sum, shared=shared))
    kind = Repeat(
        body=body, count=forward.count, carries=len(starts), xs=len(backward.xs), saved=len(out.per_iteration),
        reverse=not forward.reverse, min_count=forward.kind.min_count,
    )  # fmt: skip
    for i, t in out.stacks:
        preallocate_stack(walk, op.operands[i], t.dtype)
    # the open scope completes the name
    loop = graph.add_op(
        kind, (*starts, *(t for _, t in backward.xs), *body.captured), f"{op.name.rpartition('/')[2]}.backward"
    )
    body.owner = loop
    sliced = [i for i, _ in (*out.stacks, *out.per_iteration)]
    order = [*out.carried, *(i for i in sums if i in backward.shared), *sliced]
    for i, t in zip(order, loop.results, strict=True):
        if (i in sums and sums[i][1] is not None) or (i in sums and op.operands[i].storage.pieces):
            previous = walk.grads.pop(op.operands[i])
            walk.partial_grads[previous.storage] -= 1
            walk.record(op.operands[i], t)
        else:
            results[i] = t
    return results


def _start(
    walk: ReverseMode, graph: Graph, body: Graph, f: Tensor, start: Tensor | None, *, is_sum: bool, shared: bool
) -> Tensor:
    """Return a carry's initial value: undefined if the first iteration only accumulates into it, else zeros."""
    if start is None:
        readers = list(body.successors(f))
        # if the loop only accumulates into the carry, the first term becomes its value
        undefined = len(readers) < 2 and all(_only_added_to(op, f) for op in readers) and f not in body.outputs
        undefined = undefined or _passed_on(body, f)
        if undefined:
            undef = Undef(sizes=f.sizes, dtype=f.dtype, pieces=f.storage.pieces, domain=f.domain)
            return graph.add_op(undef, [], "undef").results[0]
        return restricted(fill(f.shape, dtype=f.dtype), f)
    start = graph.adopt(start)
    if start.storage.pieces or is_sum:
        return start
    written = any(s is f.storage for inner in body.ops for s in overwritten_by(inner))
    # a carry that is forwarded, in any position, is overwritten later
    written |= any(t.role == "formal" for t in body.outputs[: len(body.formals) - len(body.captured)])
    if written and (shared or (start not in walk.carried and not walk.writable(start))):
        return pointwise("copy", start, name="own")
    return contiguous_copy(start)


def _only_added_to(op: Op, f: Tensor) -> bool:
    return isinstance(op.kind, Accumulate) and op.operands[0] is f


def _passed_on(body: Graph, f: Tensor) -> bool:
    """Whether the only user of a sum is an inner loop that accumulates into it."""
    readers = list(body.successors(f))
    if len(readers) != 1 or readers[0].loop is None or f in body.outputs:
        return False
    op = readers[0]
    inner = op.body.formals[op.operands.index(f)]
    inner_readers = list(op.body.successors(inner))
    adds = len(inner_readers) == 1 and _only_added_to(inner_readers[0], inner)
    return adds or _passed_on(op.body, inner)


@vjp(Stacked)
def _unstacked(pull: VJPContext[Stacked]) -> Grads:
    """Split a stack's gradient into its parts: one index per unrolled part, a slice per loop."""
    grad, offset, out = pull.grads[0], ZERO, list[Tensor | None]([None])
    assert grad is not None
    for i, (t, need) in enumerate(zip(pull.op.operands[1:], pull.needs[1:], strict=True)):
        is_slice = t.ndim == grad.ndim
        out.append((slice_axis(grad, 0, offset, t.sizes[0]) if is_slice else grad[i]) if need else None)
        offset = offset + t.sizes[0] if is_slice else offset
    return out


@vjp(Accumulate)
def _added(pull: VJPContext[Accumulate]) -> Grads:
    return [pull.grads[0] if need else None for need in pull.needs]


@vjp(Undef)
def _undef(pull: VJPContext[Undef]) -> Grads:
    return []


# -- kernels -----------------------------------------------------------------------------------------------------------
# A fused kernel is differentiated as one kernel, as separate ops, or by its own rule.

Grads = Sequence[Tensor | None]


@dataclass
class _KernelResiduals:
    """Saved or recomputed tensors from a kernel's body in its backward pass."""

    op: Op
    walk: ReverseMode
    kernel_backward: KernelBackward
    graph: Graph = field(default_factory=current_graph)
    """where ops are recomputed: a backward loop inside the kernel reads slices of tensors there"""
    counterparts: dict[Tensor, Tensor] = field(default_factory=dict)
    loops: dict[Op, tuple[Op, Rewriter]] = field(default_factory=dict)
    """recomputed loops, and the counterparts of their body's tensors"""

    def saved(self, t: Tensor) -> Tensor:
        """Return the counterpart for a tensor in the body."""
        if t not in self.counterparts:
            self.counterparts[t] = self.find(t)
        return self.counterparts[t]

    def find(self, t: Tensor) -> Tensor:
        body, producer = self.op.body, t.producer
        assert body is not None
        if producer is None:
            return self.walk.saved(self.op.operands[body.formals.index(t)])
        if t in self.kernel_backward.rebuilt:
            return self.kernel_backward.rebuilt[t](self.saved)
        if producer.kind.save or t in self.kernel_backward.written:
            return self.walk.saved(body.export(t))
        if producer.loop is not None:
            self.counterparts[t] = self.loop_result(producer, t)
            return self.counterparts[t]
        nested = isinstance(producer.kind, Kernel) and producer.kind.backward in INSIDE
        returned = self.from_result(t) if nested or is_alone(producer) else None
        if nested or returned is not None:
            return self.walk.saved(body.export(t)) if returned is None else returned
        copier = Rewriter()
        copier.tensors |= {o: self.saved(o) for o in producer.operands}
        with building(self.graph):
            copied = copier.copy(producer, self.graph)
        _mark_recomputed((copied, *(copied.body.walk() if copied.body is not None else ())))
        self.counterparts |= dict(zip(producer.results, copied.results, strict=True))
        return self.counterparts[t]

    def from_result(self, t: Tensor) -> Tensor | None:
        """Return a body tensor from a kernel result, undoing rearrangements; None if not returned."""
        body = self.op.body
        assert body is not None
        for out, result in zip(body.outputs, self.op.results, strict=False):
            moves: list[Op] = []
            while out is not t and out.producer is not None and isinstance(out.producer.kind, Rearrange):
                moves.append(out.producer)
                (out,) = out.producer.operands
            if out is t:
                value = self.walk.saved(result)
                for op in moves:  # the gradient rule of a rearrangement inverts it
                    (moved,) = rule_of(op)(VJPContext(op, (value,), (True,), self.saved))
                    assert moved is not None
                    value = moved
                return value
        return None

    def loop_result(self, op: Op, result: Tensor) -> Tensor:
        """Return a result of a recomputed loop: a final carry, or a stack or residual added on request."""
        if op not in self.loops:
            self.loops[op] = self.recompute_loop(op)
        new_op, copier = self.loops[op]
        old, new = op.loop, new_op.loop
        assert old is not None
        assert new is not None
        if result in old.lasts:
            return new.lasts[old.lasts.index(result)]
        t = old.body.outputs[op.results.index(result)]
        _copy_producers(copier, t, new.body)
        return (_add_stack if result in old.stacks else stacked_residual)(new_op, copier.tensors[t])

    def recompute_loop(self, op: Op) -> tuple[Op, Rewriter]:
        """Recompute a loop, with only its carries."""
        loop = op.loop
        assert loop is not None
        copier = Rewriter()
        copier.tensors |= {o: self.saved(o) for o in op.operands}
        with building(self.graph):
            body = self.graph.start_body(loop.body.name, fused=False)
            for f in loop.body.formals:
                copier.tensors[f] = copier.formal(f, body)
            for t in loop.nexts:
                _copy_producers(copier, t, body)
            body.outputs += [body.adopt(copier.tensors[t]) for t in loop.nexts]
            operands = [self.graph.adopt(copier.tensors[o]) for o in op.operands]
            copied = self.graph.add_op(replace(loop.kind, body=body, saved=0), operands, op.name)
        copied.scope, body.owner = op.scope, copied
        _mark_recomputed([copied])
        return copied, copier


def _copy_producers(copier: Rewriter, t: Tensor, body: Graph) -> None:
    """Copy into a body the missing ops that compute a tensor."""
    if t in copier.tensors:
        return
    producer = t.producer
    assert producer is not None
    for o in producer.operands:
        _copy_producers(copier, o, body)
    copied = copier.copy(producer, body)
    _mark_recomputed((copied, *(copied.body.walk() if copied.body is not None else ())))


def _add_stack(op: Op, t: Tensor) -> Tensor:
    """Make a loop return a body tensor as a stack."""
    loop = op.loop
    assert loop is not None
    modify(op.graph, op.name)
    index = len(loop.lasts) + len(loop.stacks)
    loop.body.outputs.insert(index, t)
    op.graph.add_result(op, op.kind.infer(op.operands)[index], f"{t.name}.again")
    *others, stack = op.results
    op.results = (*others[:index], stack, *others[index:])  # in the body's output order
    return stack


def _mark_recomputed(ops: Iterable[Op]) -> None:
    """Mark ops as recomputed within the backward pass."""
    for op in ops:
        op.phase = "backward"
        op.state(recompute=True)


def pull_kernel(walk: ReverseMode, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add a kernel's backward pass and return its operands' gradients.

    The kernel's field `backward` selects it: `ops` for separate ops, the name of a special rule, or empty for a single
    kernel built from the rules of the ops inside.
    """
    assert isinstance(op.kind, Kernel)
    method = op.kind.backward
    if method in KERNELS:
        return walk.apply_rule(KERNELS[method], op, grads, needs)
    kernel_backward = INSIDE[method](op, grads, walk.saved) if method in INSIDE else KernelBackward()
    if method == "ops" or walk.fused:
        return _pull_body(walk, _KernelResiduals(op, walk, kernel_backward), grads, needs, fused=walk.fused)
    operands = (op.operands[i] for i in op.kind.saved_operands)
    saved = [walk.saved(t) for t in operands if t.role in ("activation", "formal")]
    with kernel(f"{op.name.rpartition('/')[2]}_backward".replace(".", "_")) as body:
        body_grads = _pull_body(walk, _KernelResiduals(op, walk, kernel_backward), grads, needs, fused=True)
    owner = body.owner
    assert owner is not None
    if op.kind.copies_grad_input:
        x = op.operands[0]
        owner.state(strides=(dense_in(x.sizes, memory_format(x.sizes, x.strides)),))
    out = [None if g is None else _kernel_result(body, g) for g in body_grads]
    for i, g in enumerate(out):
        if saved and g is not None and g.role == "activation":
            out[i] = keep_alive(g, *saved)
            break
    owner.scope = op.scope
    workspace = op.kind.gradient_workspace if all(g is None or g.is_contiguous for g in grads) else ZERO
    if op.kind.workspace or workspace:
        owner.state(workspace=_cast_bytes(body) + workspace)
    if not owner.results:  # every gradient is passed through unchanged
        owner.graph.remove_node(owner)
    return out


def _cast_bytes(body: Graph) -> Poly:
    """Return the bytes for operand casts that a kernel repeats in its backward pass."""
    formats = [
        (t, op.results[0].dtype)
        for op in body.ops
        if isinstance(op.kind, Pointwise) and op.kind.function.name not in ("cast", "where", "masked_fill")
        for t in op.operands
        if t in body.formals and t.sizes
    ]
    return total(t.numel * dtype.bytes for t, dtype in formats if dtype.kind != "bool" and t.dtype != dtype)


def _kernel_result(body: Graph, grad: Tensor) -> Tensor:
    if grad not in body:
        return grad
    view = _view_outside(body, grad)
    return body.export(grad) if view is None else view


def _view_outside(body: Graph, t: Tensor) -> Tensor | None:
    """Return the same view of the operand outside the kernel, None if the kernel computes the tensor."""
    key = (t.storage, t.offset, t.sizes, t.strides)
    pairs = ((outer, body.adopt(outer)) for outer in body.captured)
    outer = next((outer for outer, x in pairs if (x.storage, x.offset, x.sizes, x.strides) == key), None)
    if outer is not None or t.producer is None or not is_view_op(t.producer):
        return outer
    source = _view_outside(body, t.producer.operands[0])
    return None if source is None else apply(t.producer.kind, [source], t.producer.kind.name)[0]


def _pull_body(
    walk: ReverseMode, residuals: _KernelResiduals, grads: Grads, needs: Sequence[bool], *, fused: bool
) -> Grads:
    op, body = residuals.op, residuals.op.body
    assert body is not None
    # recomputation inside a kernel is the kernel's own choice
    hooks = replace(walk.hooks, runs=lambda ops: ())
    active = active_inside(op, walk.active) | active_in(body.ops, residuals.kernel_backward.joint)
    needs = [need or f in residuals.kernel_backward.joint for f, need in zip(body.formals, needs, strict=True)]
    back = ReverseMode(hooks, active, residuals.saved, fused=fused, rules=residuals.kernel_backward.rules)
    back.partial_grads = walk.partial_grads
    for t, grad in zip(body.outputs, grads, strict=False):
        if grad is not None:
            back.put(t, current_graph().adopt(grad))
    back.run(body.ops)
    return [back.take(f) if need else None for f, need in zip(body.formals, needs, strict=True)]
