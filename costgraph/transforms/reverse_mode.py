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
from ..ops.keep_alive import KeepAlive, keep
from ..ops.layout import Concat, Expand, Rearrange, Slice, concat, contiguous_copy, copied_into, slice_axis, split
from ..ops.loops import Accumulate, Empty, Kernel, Repeat, Stacked, Undef, accumulate, kernel, slice_of
from ..ops.opaque import Foreign
from ..ops.pooling import Pool
from ..optimizers import Optimizer, Slot
from .rewrite import Rewriter, flat
from .shard.partial_sums import origin
from .vjp.kernels import INSIDE, KERNELS, KernelBackward
from .vjp.table import Rule, VJPContext, is_alone, restricted, rule_of, vjp, whole

__all__ = [
    "active_in",
    "active_inside",
    "graded_in",
    "graded_inside",
    "is_leaf",
    "Update",
    "hoist",
    "apart",
    "overwritten",
    "peel",
    "BackwardHooks",
    "Leaf",
    "ReverseMode",
    "is_view_op",
    "scoped",
    "stack_of",
    "with_branches",
    "again",
    "pull_loop",
    "pull_kernel",
]


# -- activity analysis -------------------------------------------------------------------------------------------------
# A tensor is active if it depends on a differentiated source, and graded if a gradient reaches it from the loss.


def active_in(ops: Iterable[Op], start: Iterable[Tensor], standing: Container[Op] = ()) -> set[Tensor]:
    """Return the active tensors: `start` and the tensors computed from them.

    `standing` are `KeepAlive` ops that replace an op whose result is saved; all their operands count.
    """
    active = set(start)
    for op in ops:
        if op.body is not None and op.loop is not None:
            _active_carries(op, active)
        elif is_leaf(op):
            active.update(op.results)
        elif _passes(op) and any(t in active for t in (op.operands if op in standing else _before(op))):
            active.update(t for t in op.results if t.dtype.kind in ("float", "complex"))
    return active


def is_leaf(op: Op) -> bool:
    """Whether an op makes an autograd leaf, which gets a gradient whatever its operand is."""
    return isinstance(op.kind, KeepAlive) and op.kind.leaf


def _before(op: Op) -> Sequence[Tensor]:
    """Return the operands that can receive a gradient: not those only kept alive, nor unseen writes."""
    alone = isinstance(op.kind, KeepAlive) or (isinstance(op.kind, SliceUpdate) and op.kind.unseen)
    return op.operands[:1] if alone else op.operands


def _passes(op: Op) -> bool:
    return op.kind.passes_gradients and not (isinstance(op.kind, Foreign) and op.kind.is_blind)


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
        inside = active_inside(op, active)
        found = {r for r, t in zip(op.results, op.body.outputs, strict=True) if t in inside} - active
        if not found:
            return
        active |= found


def graded_in(ops: Iterable[Op], active: set[Tensor], ends: Iterable[Tensor]) -> set[Tensor]:
    """Return the active tensors that a gradient reaches: `ends` and the tensors they are computed from."""
    graded = active.intersection(ends)
    for op in reversed(list(ops)):
        if not any(t in graded for t in op.results):
            continue
        if op.body is None:
            graded.update(t for t in op.operands if t in active)
        else:
            inside = graded_inside(op, active, graded)
            pairs = zip(op.body.formals, op.operands, strict=True)
            graded.update(t for f, t in pairs if f in inside and t in active)
    return graded


def graded_inside(op: Op, active: set[Tensor], graded: set[Tensor]) -> set[Tensor]:
    """Return a body's tensors that a gradient reaches in any iteration."""
    body, loop = op.body, op.loop
    assert body is not None
    within = active_inside(op, active)
    ends = {t for t, r in zip(body.outputs, op.results, strict=False) if r in graded}
    while True:
        found = graded_in(body.ops, within, ends)
        if loop is None or loop.count == ONE:
            return found
        # one iteration's carry-in is the carry-out of the previous one
        more = {t for f, t in zip(loop.carries, loop.nexts, strict=True) if f in found} - ends
        if not more:
            return found
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
            keep(slot.param, slot.grad)  # the gradient is freed after the update, not within it
        around: Update | None = self
        while around is not None:
            around.done, around = True, around.outer


# -- hoist -------------------------------------------------------------------------------------------------------------
# Sources of a Repeat's body are declared outside it and sliced per iteration, so that ops after the loop, such as its
# backward pass or the optimizer, can read and update them. Each iteration keeps its own storage.


def hoist(graph: Graph) -> Graph:
    """Declare parameters, buffers and caches from all bodies at the top level, one storage per iteration.

    Costs do not change. A parameter of shape (D, F) inside a Repeat with count L becomes one of shape (L, D, F) whose
    storage has `pieces` 1.
    """
    if not any(_owned(op) for op in graph.ops):
        return graph
    return _Hoister().run(graph)


def _owned(op: Op) -> list[Tensor]:
    """Return the sources declared in a loop's body, including nested loops."""
    if op.loop is None:
        return []
    body = op.loop.body
    own = [t for t in body.tensors if t.producer is None and t.role != "formal"]
    return own + [t for inner in body.ops for t in _owned(inner)]


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
                made = Tensor(
                    new, new.unique(t.name), (*counts, *t.sizes), t.dtype,
                    role=t.role, requires_grad=t.requires_grad, pieces=len(counts) + t.storage.pieces,
                    host=t.storage.host,
                )  # fmt: skip
                new.add_node(made)
                self.outside[t] = made
        for inner in loop.body.ops:
            self.declare(inner, new, counts)

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        found = self.outside.get(old)
        return super().source(old, new, suffix) if found is None else found

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        owned, loop = _owned(op), op.loop
        if not owned or loop is None:
            super().emit(op, new, suffix)
            return
        if op.graph.parent is None:  # optimizers update parameters in the order of their ops
            self.declare(op, new, ())
        body = new.start_body(loop.body.name, fused=False)
        around = {t: self.outside[t] for t in owned}
        for f in (*loop.carries, *loop.slices):
            self.tensors[f] = self.formal(f, body)
        for t, outer in around.items():
            self.outside[t] = slice_of(body, outer, t.name)
        for f in loop.captured:
            self.tensors[f] = self.formal(f, body)
        self.fill(loop.body, body)
        body.outputs += [body.adopt(self.tensors[t]) for t in loop.body.outputs]
        starts, xs, shared = ([self.tensors[t] for t in ts] for ts in (loop.starts, loop.xs, loop.shared))
        kind = replace(loop.kind, body=body, xs=len(xs) + len(around))
        self.add(op, kind, [*starts, *xs, *around.values(), *shared], new)
        self.outside |= around


# -- defensive copies --------------------------------------------------------------------------------------------------
# An in-place op whose gradient reads the value it overwrites becomes out-of-place. If it writes only part of a tensor,
# the old value is copied instead, as torch does.


def apart(graph: Graph) -> Graph:
    """Return a copy of a forward graph whose in-place ops do not overwrite values saved for the backward pass."""
    active = active_in(graph.ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    rewriter = _Beside()
    for op in graph.ops:
        if isinstance(op.kind, Pointwise) and op.kind.inplace and not _is_unseen(op):
            x, stated = op.operands[0], op.kind.function.grad or ()
            places = [i for i, s in enumerate(op.kind.scalars or (None,) * len(op.operands)) if s is None]
            wanted = [i for i, t in zip(places, op.operands, strict=True) if t in active]
            if any("a" in names_in(expression) for i in wanted for expression in stated[i : i + 1]):
                whole = x.is_contiguous and x.numel == x.storage.elements
                (rewriter.ops if whole else rewriter.parts).add(op)
    return rewriter.run(graph)


def _is_unseen(op: Op) -> bool:
    """Whether an in-place write is hidden from autograd: all readers see the tensor as it was."""
    readers = [o.kind for o in op.graph.successors(op.results[0])]
    return bool(readers) and all(isinstance(kind, SliceUpdate) and kind.unseen for kind in readers)


class _Beside(Rewriter):
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
    made = peeler.run(graph)
    return made if peeler.found else graph


@dataclass(frozen=True)
class _Turn:
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
    seen: list[Carries] = []
    while first not in seen:
        seen.append(first)
        first = step(first)
    return seen, seen.index(first)


def _places(tensors: Sequence[Tensor], of: set[Tensor]) -> Carries:
    return frozenset(i for i, t in enumerate(tensors) if t in of)


class _Loop:
    """A loop with the active and graded carries of its iterations."""

    def __init__(self, op: Op, active: set[Tensor], graded: set[Tensor], *, stops: bool) -> None:
        assert op.loop is not None
        self.stops = int(stops)
        self.op = op
        self.parts = loop = op.loop
        self.fixed = [t for t in loop.body.tensors if t.producer is None and t.requires_grad]
        given = (*zip(loop.slices, loop.xs, strict=True), *zip(loop.captured, loop.shared, strict=True))
        self.fixed += [f for f, t in given if t in active]
        made = (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True))
        self.ends = [t for t, r in made if r in graded]
        self.anywhere = active_inside(op, active)
        self.entered, first = _states(_places(loop.starts, active), self._enter)
        self.left, self.last = _states(_places(loop.lasts, graded), self._leave)
        self.middle = frozenset().union(*self.entered[first:]), frozenset().union(*self.left[self.last :])
        wanted = self._leave(self.middle[1])  # no need to peel where the gradient is zero anyway
        while first and self.entered[first - 1] & wanted == self.entered[first] & wanted:
            first -= 1
        self.first = first

    def _enter(self, carries: Carries) -> Carries:
        return _places(self.parts.nexts, self.active(carries))

    def _leave(self, carries: Carries) -> Carries:
        return _places(self.parts.carries, self.graded(self.anywhere, carries))

    def active(self, carries: Carries) -> set[Tensor]:
        """Return the active tensors in an iteration with active carries-in `carries`."""
        return active_in(self.parts.body.ops, [*self.fixed, *(self.parts.carries[i] for i in carries)])

    def graded(self, active: set[Tensor], carries: Carries) -> set[Tensor]:
        """Return the graded tensors in an iteration with graded carries-out `carries`."""
        return graded_in(self.parts.body.ops, active, [*self.ends, *(self.parts.nexts[i] for i in carries)])

    def turns(self) -> list[_Turn]:
        """Return the loops that replace this one, in order."""
        count = self.parts.count
        first, last = (self.first, max(self.last, self.stops)) if self._can_be_split() else (0, 0)
        if isinstance(count.constant, int):
            first = min(first, count.constant)
            last = min(last, count.constant - first)
        rest = count - first - last
        out = [self._turn(f".first{i or ''}", ONE, i, None) for i in range(first)]
        out += [self._turn("", rest, None, None)] if rest else []
        return out + [self._turn(f".last{i or ''}", ONE, None, i) for i in reversed(range(last))]

    def _turn(self, name: str, count: Poly, i: int | None, behind: int | None) -> _Turn:
        """Describe the iteration with index `i` or with `behind` iterations after it; both None for the middle."""
        whole = self.parts.count.constant
        if whole == 1:
            i = behind = 0
        elif isinstance(whole, int) and i is not None:
            behind = whole - 1 - i
        elif isinstance(whole, int) and behind is not None:
            i = whole - 1 - behind
        active = self.entered[i] if i is not None and i < len(self.entered) else self.middle[0]
        graded = self.left[behind] if behind is not None and behind < len(self.left) else self.middle[1]
        return _Turn(name, count, active, graded)

    def may_be_empty(self, middle: _Turn) -> bool:
        """Whether the peeled iterations yield all gradients of the middle ones, which may then number zero."""
        peeled = [t for turn in self.turns() if turn.name for t in self.reached(turn)]
        return self.reached(middle).intersection((*self.parts.slices, *self.parts.captured)) <= set(peeled)

    def reached(self, turn: _Turn) -> set[Tensor]:
        """Return the tensors that a gradient reaches in the given iterations."""
        return self.graded(self.active(turn.active), turn.graded)

    def _can_be_split(self) -> bool:
        loop = self.parts
        if loop.count == ONE or loop.reverse or loop.until:
            return False
        # the residuals then come in several parts, so every reader must accept lists
        left = [t for t in loop.pieces if t.storage.pieces]
        readers = (op for t in left for op in t.graph.successors(t))
        if any(t in t.graph.outputs for t in left) or not all(op.kind.takes_lists for op in readers):
            return False
        # a tensor with one storage per iteration cannot be split
        pieces = any(t.storage.pieces for t in loop.xs)
        return not pieces and bool(self.middle[1] or self.left[0] or self.ends)


class _Peeler(Rewriter):
    def __init__(self, active: set[Tensor], graded: set[Tensor], stops_early_in: Callable[[Op], bool]) -> None:
        super().__init__()
        self.stops_early_in = stops_early_in
        self.active, self.graded = active, graded
        """Active and graded tensors in the graph or body that is being copied."""
        self.found = False

    def loop(self, loop: _Loop, turn: _Turn, operands: Sequence[Tensor], new: Graph) -> Loop:
        """Copy a loop for some of its iterations."""
        op, old, around = loop.op, loop.parts, (self.active, self.graded)
        self.active, self.graded = loop.active(turn.active), loop.reached(turn)
        kind = replace(old.kind, body=self.body(old.body, new, turn.name), count=turn.count)
        if turn.count.constant is None and turn.count != old.count and loop.may_be_empty(turn):
            kind = replace(kind, least=0)
        made = self.add(op, kind, operands, new, op.name + turn.name).loop
        assert made is not None
        self.active, self.graded = around
        return made

    def split(self, loop: _Loop, turns: Sequence[_Turn], new: Graph) -> None:
        """Replace a loop by several, which read parts of its slices and write parts of its stacks."""
        op, old = loop.op, loop.parts
        if any(not t.storage.pieces for t in old.pieces):  # parts written in place are disjoint only if counts are >= 0
            new.root.assume(*(f"{turn.count} >= 0" for turn in turns if turn.count.constant is None))
        state, dense, shared = ([self.tensors[t] for t in ts] for ts in (old.starts, old.xs, old.shared))
        counts = [turn.count.expr for turn in turns]
        with building(new):
            parts = [split(t, counts, 0, name=f"{op.name}.slices") for t in dense]
        stacks = [new.add_op(Empty(sizes=r.sizes, dtype=r.dtype), [], r.name, op.phase).results[0] for r in old.stacks]
        made = []
        for i, turn in enumerate(turns):
            made.append(self.loop(loop, turn, [*state, *(part[i] for part in parts), *shared], new))
            state = list(made[-1].lasts)
        whole = [
            new.add_op(Stacked(), [t, *(part.stacks[k] for part in made)], f"{t.name}.filled", op.phase).results[0]
            for k, t in enumerate(stacks)
        ]
        left = [self._left(old, k, made, new) for k in range(len(old.pieces))]
        self.tensors |= dict(zip(op.results, [*state, *whole, *left], strict=True))

    def _left(self, old: Loop, k: int, made: Sequence[Loop], new: Graph) -> Any:
        """Return the residuals that all parts of a loop leave, or the operand they were written into."""
        x = old.revised(k)
        if x is None:
            return [part.pieces[k] for part in made]
        whole, at = self.tensors[x], ZERO
        for part in made:
            kind = SliceUpdate(axes=(0,), starts=(at,), steps=(1,))
            (whole,) = new.add_op(kind, [whole, part.pieces[k]], f"{old.pieces[k].name}.part", old.op.phase).results
            at = at + part.count
        return whole

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
        loop = _Loop(op, self.active, self.graded, stops=self.stops_early_in(op))
        turns = loop.turns()
        if len(turns) > 1:
            self.found = True
            self.split(loop, turns, new)
        else:
            self.loop(loop, turns[0], [self.tensors[t] for t in op.operands], new)


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
    again: Callable[[ReverseMode, Sequence[Op]], None]
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


def is_view_op(op: Op) -> bool:
    """Whether an op only returns a view of its operand's storage."""
    return (
        isinstance(op.kind, Rearrange | Slice | Expand)
        and op.results[0].storage is op.operands[0].storage
        and not op.kind.overwrites()
    )


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
        self.held: Counter[Storage] = Counter()
        """Number of incomplete gradients per storage."""

    # -- accumulation -----------------------------------------------------------------------------------------------

    def put(self, t: Tensor, grad: Tensor | None) -> None:
        """Accumulate a contribution to a tensor's gradient."""
        if grad is None or t not in self.active:
            return
        if len(grad.sizes) != t.ndim or not all(map(t.graph.same, grad.sizes, t.sizes)):
            raise GraphError(f"gradient {grad!r} of {t!r}: expected its shape")
        grad = restricted(grad, t) if t.domain is not None else whole(grad)
        before = self.grads.get(t)
        if before is None and t in self.leaves and self.leaves[t].is_plain:
            grad = self.own(grad)
        if before is not None:
            self.held[before.storage] -= 1
            grad = self.add(before, grad)
        self.keep(t, grad)

    def keep(self, t: Tensor, grad: Tensor) -> None:
        """Record a tensor's partial gradient."""
        self.grads[t] = grad
        self.held[grad.storage] += 1

    def own(self, grad: Tensor) -> Tensor:
        """Return a gradient that can persist: a copy if it is expanded or shared."""
        if grad.storage.pieces or self.fused:
            return grad
        mine = not any(g is grad for g in self.grads.values()) and grad.touched == grad.numel
        return contiguous_copy(grad) if mine else pointwise("copy", grad, name="own")

    def writable(self, grad: Tensor) -> bool:
        """Whether a gradient may be written in place: nothing else holds it, and it is not a view."""
        origin = grad.producer
        while origin is not None and isinstance(origin.kind, KeepAlive):
            origin = origin.operands[0].producer
        if origin is not None and is_view_op(origin) and grad not in self.carried:
            return False
        whole = grad.touched == grad.numel and grad.numel == grad.storage.elements
        return whole and not self.held[grad.storage] and (grad.role == "activation" or grad in self.carried)

    def add(self, before: Tensor, grad: Tensor) -> Tensor:
        """Accumulate into a gradient, in place where nothing else holds it."""
        if self.fused or not self.writable(before):
            return pointwise("add", before, grad)
        if before in self.carried:
            return accumulate(before, grad, lent=grad.role == "formal" or self.held[grad.storage] > 0)
        return pointwise("add", before, grad, inplace=True)

    def take(self, t: Tensor) -> Tensor | None:
        """Remove and return a tensor's gradient, once all its users have contributed."""
        parts = self.parts.pop(t, {})
        for cuts in _tilings(t) if parts else ():
            grads = [parts.get(cut) for cut in cuts]
            if any(grad is not None for grad in grads):
                with scoped(cuts[0]):
                    self.put(t, _joined(cuts, grads, self.stacks.pop(cuts[0], None)))
        grad = self.grads.pop(t, None)
        if grad is not None:
            self.held[grad.storage] -= 1
        return grad

    def taken(self, t: Tensor) -> Tensor | None:
        """Return a source's complete gradient."""
        return self.final[t] if t in self.final else self.take(t)

    # -- ops --------------------------------------------------------------------------------------------------------

    def run(self, ops: Sequence[Op]) -> None:
        """ReverseMode back over ops in reverse order."""
        self.readers.update(t for op in ops for t in dict.fromkeys(op.operands) if t in self.leaves)
        runs = {run[-1]: run for run in self.hooks.runs(ops)}
        left = list(ops)
        while left:
            op = left.pop()
            if op in runs:
                del left[len(left) + 1 - len(runs[op]) :]
                self.hooks.again(self, runs[op])
                self.contributed(runs[op])
            else:
                self.pull(op)
                self.contributed([op])

    def contributed(self, ops: Sequence[Op]) -> None:
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
        grads = tuple(self.take(t) for t in op.results)
        needs = tuple(t in self.active for t in op.operands)
        if not (any(needs) or is_leaf(op)) or all(g is None for g in grads):
            return
        write = _write_of(op)
        if write is not None and grads[0] is not None and write.results[0] not in self.grads and not self.fused:
            with scoped(write):
                self.write_back(op, write, grads[0])
            return
        with scoped(op):
            if op not in self.rules and isinstance(op.kind, Slice) and op.kind.split and grads[0] is not None:
                self.parts.setdefault(op.operands[0], {})[op] = grads[0]
                return
            made = self.gradients(op, grads, needs)
            # gradients may share a tensor: adding one in place must not overwrite those still to come
            self.held.update(grad.storage for grad in made if grad is not None)
            for t, grad in zip(op.operands, made, strict=True):
                if grad is not None:
                    self.held[grad.storage] -= 1
                self.put(t, grad)

    def write_back(self, op: Op, write: Op, grad: Tensor) -> None:
        """ReverseMode back over an op that wrote into a slice of a tensor, as torch's `CopySlices`.

        The whole gradient is copied. The slice's gradient is cloned and passed to the op, whose result overwrites
        the slice.
        """
        copied = pointwise("copy", grad)
        part = _viewed(copied, op.operands[0], write.operands[0])
        needs = tuple(t in self.active for t in write.operands)
        own, *others = self.gradients(write, (pointwise("copy", part, name="clone"),), needs)
        if needs[0]:
            written = assign(part, fill(part.shape, dtype=part.dtype) if own is None else own)
            revised = apply(op.kind, [copied, _viewed(written, write.results[0], op.operands[1])], "revised")[0]
            self.put(op.operands[0], keep(revised, grad))
        for t, g in zip(write.operands[1:], others, strict=True):
            self.put(t, g if g is None or needs[0] else keep(g, grad, copied))

    def gradients(self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Return the gradients for an op's operands, given its results' gradients."""
        graph = current_graph()
        before = len(graph)
        made = self.in_memory_format(op, grads, needs)
        if op.kind.copies_matmul_operands and not self.fused:
            for product in [n for n in islice(graph, before, None) if isinstance(n, Op) and isinstance(n.kind, Einsum)]:
                copies = (t for t in product.operands if not has_blas_layout(t.sizes, t.strides))
                product.state(workspace=total(t.sizes[-2] * t.sizes[-1] * t.dtype.bytes for t in copies))
        return made

    def in_memory_format(
        self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> Sequence[Tensor | None]:
        """Return the gradients as `gradients` does, with the copies a kernel makes for its memory format."""
        if self.fused or not op.kind.grad_memory_format:
            return self.pulled(op, grads, needs)
        order = _memory_format(op, grads)
        copies = [None if g is None else copied_into(g, order) for g in grads]
        made = list(self.pulled(op, copies, needs))
        if op.kind.copies_grad_input and made[0] is not None:
            made[0] = _in_own_format(op, made[0], order, next(g for g in grads if g is not None))
        held = [t for pair in zip(grads, copies, strict=True) if pair[0] is not pair[1] for t in pair if t is not None]
        i = next((i for i, g in enumerate(made) if g is not None and g.role == "activation"), None)
        if held and i is not None:
            made[i] = keep(made[i], *held)  # type: ignore[arg-type]  # it is there
        return made

    def pulled(self, op: Op, grads: Sequence[Tensor | None], needs: tuple[bool, ...]) -> Sequence[Tensor | None]:
        """Dispatch to an op's rule."""
        if op in self.rules:
            return self.rules[op](VJPContext(op, tuple(grads), needs, self.saved))
        if op.body is not None:
            return (self.hooks.fused if isinstance(op.kind, Kernel) else self.hooks.repeated)(self, op, grads, needs)
        _keep_places(op)
        return self.asked(rule_of(op), op, grads, needs)

    def asked(
        self, rule: Rule[Any], op: Op, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Apply a rule; its inputs and saved tensors stay alive until all its gradients exist, as in torch."""
        read: dict[Tensor, None] = dict.fromkeys(g for g in grads if g is not None)
        graph = current_graph()
        before = len(graph)

        def saved(t: Tensor) -> Tensor:
            found = self.saved(overwritten(op, t))
            read[found] = None
            return found

        if not self.fused:
            for place in op.kind.saved_operands:
                if needs[place] or not isinstance(op.kind, Concat):  # a part is needed only for its own gradient
                    saved(op.operands[place])
        made = list(rule(VJPContext(op, tuple(grads), tuple(needs), saved)))
        if self.fused:
            return made
        added = [n for n in islice(graph, before, None) if isinstance(n, Op) and not is_view_op(n)]
        last = {t.storage for t in (added[-1].operands if added else grads) if t is not None}
        early = [t for t in read if t.storage not in last and t.role in ("activation", "formal")]
        i = next((i for i, g in enumerate(made) if g is not None and g.role == "activation"), None)
        if early and i is not None:
            made[i] = keep(made[i], *early)  # type: ignore[arg-type]  # it is there
        return made


def _memory_format(op: Op, grads: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return the memory order of axes that a backward kernel copies incoming gradients into."""
    grad = next(g for g in grads if g is not None)
    if op.kind.grad_memory_format == "bshd":  # heads may be two axes, the first being KV groups
        return (0, grad.ndim - 2, *range(1, grad.ndim - 2), grad.ndim - 1)
    like = op.operands[0] if op.kind.grad_memory_format == "operand" else grad
    contiguous = op.kind.grad_memory_format == "contiguous"
    return tuple(range(grad.ndim)) if contiguous else memory_format(like.sizes, like.strides)


def _in_own_format(op: Op, made: Tensor, order: Sequence[int], grad: Tensor) -> Tensor:
    """Copy an operand's gradient from the kernel's memory format into its own.

    For an elementwise kernel that is the format of the incoming gradient. Pooling copies inside the kernel, including
    residuals saved in another format.
    """
    maker = made.producer
    while maker is not None and isinstance(maker.kind, KeepAlive):
        maker = maker.operands[0].producer
    if maker is None:
        return made
    if op.kind.grad_memory_format == "contiguous":
        copy = copied_into(made, memory_order(grad.sizes, grad.strides) or order)
        return made if copy is made else keep(copy, *maker.operands)
    others = [t for t in (*maker.results, *maker.operands[2:]) if not is_contiguous_in(t.sizes, t.strides, order)]
    maker.state(workspace=maker.workspace + total(t.numel * t.dtype.bytes for t in others))
    return made


def _write_of(op: Op) -> Op | None:
    """Return the in-place op that wrote the slice of a `SliceUpdate` tensor, None for other ops."""
    if not isinstance(op.kind, SliceUpdate) or op.kind.unseen:
        return None
    write = op.operands[1].producer
    while write is not None and is_view_op(write):
        write = write.operands[0].producer
    return write if write is not None and write.kind.overwrites() == (0,) and len(write.results) == 1 else None


def _viewed(t: Tensor, whole: Tensor, part: Tensor) -> Tensor:
    """Apply the views that lead from `whole` to `part` to another tensor."""
    if part is whole:
        return t
    assert part.producer is not None
    return apply(part.producer.kind, [_viewed(t, whole, part.producer.operands[0])], part.producer.kind.name)[0]


def _keep_places(op: Op) -> None:
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
        axis, at, found = cuts[0][1].axis, ZERO, list[Op]()
        while not t.graph.same(at, t.sizes[axis]):
            cut = next((c for c in cuts if c[1].axis == axis and t.graph.same(c[1].start, at)), None)
            if cut is None:
                raise GraphError(f"gradient of {t!r}: its parts leave a gap at {at}, expected a split of all of it")
            cuts.remove(cut)
            found.append(cut[0])
            at = at + cut[1].size
        yield found


def _joined(cuts: Sequence[Op], grads: Sequence[Tensor | None], stack: Tensor | None) -> Tensor:
    """Concatenate the gradients for the parts of a split tensor, with zeros for parts without one."""
    dtype = next(g for g in grads if g is not None).dtype
    pairs = [(cut.results[0], g) for cut, g in zip(cuts, grads, strict=True)]
    parts = [restricted(fill(t.shape, dtype=dtype), t) if g is None else g for t, g in pairs]
    if stack is None:
        assert isinstance(cuts[0].kind, Slice)
        return concat(parts, cuts[0].kind.axis)
    return apply(Stacked(), [stack, *parts], "stacked")[0]


def stack_of(walk: ReverseMode, t: Tensor, dtype: DType) -> None:
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


def with_branches(graph: Graph, hooks: BackwardHooks) -> Graph:
    """Return a forward graph that keeps the saved tensors of gradient-free branches alive until the branch is freed.

    Recomputed ops save nothing.
    """
    ops = graph.ops
    active = active_in(ops, (t for t in graph.tensors if t.producer is None and t.requires_grad))
    graded = graded_in(ops, active, (t for t in graph.outputs if not t.sizes))
    again = {op for run in hooks.runs(ops) for op in run}
    dead = [op for op in ops if op not in again and op.loop is None and _is_dead(op, active, graded)]
    if not dead:
        return graph
    places = {op: i for i, op in enumerate(ops)}
    last: dict[Storage, int] = {t.storage: places[op] for op in ops for t in op.operands}
    last |= dict.fromkeys((t.storage for t in graph.outputs), len(ops) - 1)
    ends: dict[Op, int] = {}
    held: dict[int, set[Storage]] = {}
    with graph:
        for op in reversed(dead):
            later = [ends[o] for t in op.results for o in graph.successors(t) if o in ends]
            ends[op] = max([places[op], *(last.get(t.storage, 0) for t in op.results), *later])
            for t in _saved(op, active, hooks):
                if t.role == "activation" and last.get(t.storage, -1) < ends[op]:
                    held.setdefault(ends[op], set()).add(t.storage)
    newest = {t.storage: t for op in ops for t in op.results}  # a Keep reads a storage as of its last write
    kept = {ops[i]: [t for storage, t in newest.items() if storage in storages] for i, storages in held.items()}
    return _Holding(kept).run(graph)


def _is_dead(op: Op, active: Collection[Tensor], graded: Collection[Tensor]) -> bool:
    return not op.kind.no_grad and any(t in active for t in op.results) and not any(t in graded for t in op.results)


def _saved(op: Op, active: set[Tensor], hooks: BackwardHooks) -> list[Tensor]:
    """Return the tensors that an op's gradient rule reads; none if it has no rule."""
    scratch = Graph("saved")
    scratch.relations = op.graph.root.relations
    asked: dict[Tensor, Tensor] = {}

    def stand_in(t: Tensor) -> Tensor:
        made = Tensor(scratch, scratch.unique("x"), t.sizes, t.dtype, role="input", strides=t.strides)
        made.domain = t.domain
        scratch.add_node(made)
        return made

    def saved(t: Tensor) -> Tensor:
        return asked[t] if t in asked else asked.setdefault(t, stand_in(t))

    grads = [stand_in(t) if t in active else None for t in op.results]
    with opened(graph=scratch, levels=(), phase="backward"), suppress(UnsupportedError):
        ReverseMode(hooks, active, saved).gradients(op, grads, tuple(t in active for t in op.operands))
    return list(asked)


class _Holding(Rewriter):
    """Copies a graph, keeping tensors alive until after some of its ops."""

    def __init__(self, held: dict[Op, list[Tensor]]) -> None:
        super().__init__()
        self.held = held

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op, followed by a `KeepAlive` of the tensors that live until it."""
        super().emit(op, new, suffix)
        if op in self.held:
            new.add_op(KeepAlive(), [self.tensors[t] for t in self.held[op]], "keep", op.phase)


# -- recompute ---------------------------------------------------------------------------------------------------------

Made = Mapping[Tensor, Tensor]


def again(walk: ReverseMode, run: Sequence[Op]) -> None:
    """Recompute a run of ops from its inputs and walk back over the copies.

    As in torch's non-reentrant checkpoint, the ops run in order and stop after the last one whose result the backward
    pass reads, if `early_stop`. The inputs and saved results stay alive until the walk leaves the run, read or not.
    """
    results = [t for op in run for t in op.results]
    if not any(t in walk.grads or t in walk.parts for t in results):
        return
    graph = current_graph()
    copier, made = Rewriter(), set(results)
    inputs: dict[Tensor, Tensor] = {}
    for t in (t for op in run for t in op.operands if t not in made):
        if t not in inputs:
            inputs[t] = copier.tensors[t] = walk.saved(t)
    kept = {op: _kept(walk, op) for op in run if walk.hooks.keeps(op)}
    copies = [_recall(copier, op, kept[op], graph) if op in kept else copier.copy(op, graph) for op in run]
    for op in _every(copies):
        op.phase = "recompute"
    recalled = {copier.tensors[op.results[0]].producer for op in kept}
    active = active_in(copies, (m for t, m in inputs.items() if t in walk.active), recalled)
    leaves = {m: walk.leaves[t] for t, m in inputs.items() if t in walk.leaves}
    hooks = walk.hooks.within or replace(walk.hooks, runs=lambda ops: (), keeps=lambda op: False, start=False)
    own, standins, read = set(copies), set(inputs.values()), set[Tensor]()

    def saved(t: Tensor) -> Tensor:
        """Map a forward tensor to its copy; recomputed tensors map to themselves."""
        read.add(t)
        if t in standins or t.producer in own:
            return t
        return copier.tensors[t] if t in copier.tensors else walk.saved(t)

    back = ReverseMode(hooks, active, saved, leaves=leaves)
    back.rules = {copier.tensors[op.results[0]].producer: _forward_rule(back, op) for op in kept}
    back.active |= {t for op in kept for t in op.operands if copier.tensors[t] in active}
    _walk_back(walk, back, run, copies, copier.tensors, inputs)
    if walk.hooks.early_stop:
        _stop_early(graph, copies)
    left = [t for op, t in kept.items() if copier.tensors[op.results[0]] not in graph]
    if read:  # else no saved-tensor hook holds the run's arguments
        left += (now for t, now in inputs.items() if origin(t).role in ("activation", "input"))
    _hold(walk, inputs, left)


def _walk_back(
    walk: ReverseMode,
    back: ReverseMode,
    run: Sequence[Op],
    copies: Sequence[Op],
    made: Made,
    inputs: Mapping[Tensor, Tensor],
) -> None:
    """ReverseMode back over the recomputed ops, from gradients of results to gradients of inputs."""
    back.held, back.carried = walk.held, walk.carried
    # a gradient is complete here if no op outside is still to contribute
    back.readers.update({m: walk.readers[t] - sum(t in op.operands for op in run) for t, m in inputs.items()})
    for t in (t for op in run for t in op.results):
        grad = walk.take(t)
        if grad is not None:
            back.keep(made[t], grad)
    for t, standin in inputs.items():
        before = walk.grads.pop(t, None)
        if before is not None:
            walk.held[before.storage] -= 1
            back.keep(standin, before)
    back.run(copies)
    for t, standin in inputs.items():
        if standin in back.final:
            walk.final[t] = back.final[standin]
        grad = back.take(standin)
        if grad is not None:
            walk.keep(t, grad)


def _hold(walk: ReverseMode, inputs: Iterable[Tensor], left: Sequence[Tensor]) -> None:
    """Keep the inputs and saved results of a run alive until a gradient leaves it, like torch's checkpoint frame."""
    last = next((t for t in inputs if t in walk.grads and t not in walk.leaves), None)
    if left and last is not None:
        grad = walk.take(last)
        assert grad is not None
        walk.keep(last, keep(grad, *left))


def _kept(walk: ReverseMode, op: Op) -> Tensor:
    """Return an op's saved result from the forward pass."""
    if len(op.results) > 1:
        raise GraphError(f"keep: {op.name!r} has {len(op.results)} results, expected an op with one")
    return walk.saved(op.results[0])


def _recall(copier: Rewriter, op: Op, kept: Tensor, graph: Graph) -> Op:
    """Add a `KeepAlive` in place of an op whose result is saved; its operands are recomputed."""
    return copier.add(op, KeepAlive(), [kept, *(copier.tensors[t] for t in op.operands)], graph)


def _forward_rule(back: ReverseMode, op: Op) -> Rule[Any]:
    """Return the rule for a `KeepAlive` that replaces a saved op: that op's own."""

    def rule(pull: VJPContext[Any]) -> Sequence[Tensor | None]:
        return [None, *back.gradients(op, pull.grads, pull.needs[1:])]

    return rule


def _every(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _every(op.body.ops)


def _stop_early(graph: Graph, copies: Sequence[Op]) -> None:
    """Remove the ops after the last one whose result is read, also within a peeled last iteration."""
    for op in reversed(copies):
        if any(_is_read(t) for t in op.results):
            if op.loop is not None and op.loop.count == ONE:
                _stop_within(op, op.loop)
            return
        graph.remove_nodes_from([*op.results, op])


def _is_read(t: Tensor) -> bool:
    return t.graph.out_degree(t) > 0 or t in t.graph.outputs


def _stop_within(op: Op, loop: Loop) -> None:
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
_LEAST_BITS = 16


@dataclass
class _Reverse:
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
    seen: dict[Tensor, Tensor] = field(default_factory=dict)
    """counterparts for tensors in the forward body"""

    @cached_property
    def shared(self) -> set[int]:
        """Indices of the operands that all forward iterations read whole."""
        return {i for i, f in enumerate(self.forward.body.formals) if f in self.forward.captured}

    def carry(self, like: Tensor, name: str, start: Tensor | None) -> Tensor:
        """Add a carried formal."""
        made = self.body.formal(like, name, like.sizes, contiguous(like.sizes))
        self.carries.append((made, start))
        return made

    def drop(self, formal: Tensor) -> None:
        """Remove an unused formal."""
        self.carries = [c for c in self.carries if c[0] is not formal]
        self.xs = [x for x in self.xs if x[0] is not formal]
        self.body.remove_node(formal)
        self.body.formals.remove(formal)

    def slice(self, outer: Tensor, name: str) -> Tensor:
        """Add a formal that is one position along the first axis of `outer`."""
        found = next((f for f, t in self.xs if t is outer), None)
        if found is None:
            found = slice_of(self.body, outer, name)
            self.xs.append((found, outer))
        return found

    def part(self, outer: Tensor, name: str) -> Tensor:
        """Slice a tensor that was declared further out."""
        around = self.body.parent
        assert around is not None
        return self.slice(around.adopt(outer), name)

    def saved(self, t: Tensor) -> Tensor:
        """Return the counterpart for a tensor in the forward body."""
        if t not in self.seen:
            self.seen[t] = self.find(t)
        return self.seen[t]

    def find(self, t: Tensor) -> Tensor:
        loop, around = self.forward, self.body.parent
        assert around is not None
        if t in loop.slices:
            return self.slice(around.adopt(self.outer.saved(loop.xs[loop.slices.index(t)])), f"{t.name}.again")
        if t in loop.captured:
            return self.body.adopt(around.adopt(self.outer.saved(loop.shared[loop.captured.index(t)])))
        if t in loop.carries and self.outer.hooks.start:
            return self.from_start()[loop.carries.index(t)]
        if t.producer is not None and isinstance(t.producer.kind, KeepAlive):  # liveness of the forward pass only
            return self.saved(t.producer.operands[0])
        if t.producer is not None and is_view_op(t.producer):
            base = self.saved(t.producer.operands[0])
            op = self.body.add_op(t.producer.kind, [base], t.producer.name + ".again")
            return op.results[0]
        return self.slice(around.adopt(self.outer.saved(left_behind(loop.op, t))), f"{t.name}.saved")

    def from_start(self) -> tuple[Tensor, ...]:
        """Recompute an iteration's carries-in by running all iterations before it."""
        loop, around = self.forward, self.body.parent
        assert around is not None
        operands = [self.body.adopt(around.adopt(self.outer.saved(t))) for t in loop.op.operands]
        again = Rewriter().body(loop.body, self.body, "")
        del again.outputs[len(loop.nexts) :]
        before = replace(loop.kind, body=again, saved=0, until=True)
        made = self.body.add_op(before, operands, f"{loop.op.name}.before")
        again.owner, made.scope = made, loop.op.scope
        for each in (made, *again.walk()):
            each.phase = "recompute"
        self.seen |= dict(zip(loop.carries, made.results, strict=False))
        return made.results


def left_behind(op: Op, t: Tensor) -> Tensor:
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
    made = _Reverse(loop, walk, current_graph().start_body(f"{loop.body.name}_backward", fused=False))
    active = active_inside(op, walk.active)
    with building(made.body):
        back = ReverseMode(walk.hooks, active, made.saved)
        carried = _seed(made, back, grads)
        sums = _start_sums(made, back, needs)
        back.run(loop.body.ops)
        out = _Out(made, back, carried)
        for p in list(carried):
            out.carry(p, back.taken(loop.carries[p]))
        for i in list(sums):
            out.sum(i, back.taken(loop.body.formals[i]), sums)
        out.slices(needs)
    return _close(walk, out, grads, sums)


def _seed(made: _Reverse, back: ReverseMode, grads: Grads) -> list[int]:
    """Seed the gradients of a body's outputs; return the indices of carries with a gradient."""
    loop = made.forward
    once = loop.count == ONE
    of = dict(zip(loop.op.results, grads, strict=True))
    graded = graded_inside(loop.op, made.outer.active, {t for t, g in of.items() if g is not None})
    carried, seeds = [], []
    for p, (f, t, last) in enumerate(zip(loop.carries, loop.nexts, loop.lasts, strict=True)):
        grad = of[last]
        if f in graded or (t in graded and not once):
            carried.append(p)
            seed = made.carry(last, f"{last.name}.grad", grad)
            back.carried.add(seed)
            if grad is not None or not once:
                seeds.append((t, seed))
        elif grad is not None and t in graded:  # single iteration whose carry-in needs no gradient
            seed = made.body.adopt(grad)
            if made.outer.writable(grad):
                back.carried.add(seed)
            back.put(t, seed)
    for t, seed in seeds:
        back.put(t, seed)
    for t, r in (*zip(loop.ys, loop.stacks, strict=True), *zip(loop.saved, loop.pieces, strict=True)):
        grad = of[r]
        if grad is not None and t in back.active:
            back.put(t, made.slice(grad, f"{t.name}.grad"))
    return carried


def _start_sums(made: _Reverse, back: ReverseMode, needs: Sequence[bool]) -> dict[int, tuple[Tensor, Tensor | None]]:
    """Start the gradient sums for captured operands, and continue existing ones for slices."""
    loop, walk = made.forward, made.outer
    sums: dict[int, tuple[Tensor, Tensor | None]] = {}
    for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
        if not needs[i] or f in loop.carries:
            continue
        before = walk.grads.get(t)
        if f in loop.slices and t in walk.leaves and walk.readers[t] == 1 and t.storage.pieces:
            leaf = walk.leaves[t]
            total = None if leaf.total is None else made.slice(leaf.total, f"{t.name}.total")
            update = None if leaf.update is None else leaf.update.inside(made.part, loop.count)
            back.leaves[f] = replace(leaf, total=total, update=update)
        if before is not None:
            walk.held[before.storage] -= 1
        fits = before is not None and (bool(before.storage.pieces) or (walk.writable(before) and before.is_contiguous))
        if before is not None:
            walk.held[before.storage] += 1
        if f in loop.captured:
            start = made.carry(t, f"{t.name}.sum", before if fits else None)
            if t.dtype.bits < _LEAST_BITS:
                start.dtype = t.graph.root.dtype  # gradients never have this few bits
        elif t.storage.pieces and before is not None:
            start = made.slice(before, f"{t.name}.sum")
        else:
            continue
        back.carried.add(start)
        back.keep(f, start)
        sums[i] = start, before if fits else None
    return sums


class _Out:
    """Results of the backward loop under construction."""

    def __init__(self, made: _Reverse, back: ReverseMode, carried: list[int]) -> None:
        self.made = made
        self.back = back
        self.carried = carried
        self.passed: dict[int, Tensor | None] = {}
        self.after: list[Tensor] = []
        self.stacks: list[tuple[int, Tensor]] = []
        self.kept: list[tuple[int, Tensor]] = []

    def carry(self, p: int, grad: Tensor | None) -> None:
        """Carry a gradient to the previous iteration, or pass it around the loop if no iteration changes it."""
        like, start = self.made.carries[len(self.after)]
        if grad is like and not any(self.made.body.successors(like)):
            self.made.drop(like)
            self.carried.remove(p)
            self.passed[p] = start
            return
        if grad is None:
            grad = fill(like.shape, dtype=like.dtype)
        mine = {f.storage for f, _ in self.made.carries}
        lent = grad.role == "formal" and grad.storage not in mine
        twice = any(grad.storage is t.storage for t in self.after)
        self.after.append(pointwise("copy", grad, name="own") if lent or twice else contiguous_copy(grad))

    def sum(self, i: int, grad: Tensor | None, sums: dict[int, tuple[Tensor, Tensor | None]]) -> None:
        """Return an operand's gradient sum from the loop; drop it if nothing was added."""
        start, _ = sums[i]
        if grad is None or grad is start:
            del sums[i]
            self.made.drop(start)
        elif i in self.made.shared:
            self.after.append(contiguous_copy(grad))
        else:
            self.kept.append((i, grad))

    def slices(self, needs: Sequence[bool]) -> None:
        """Return the gradients for slices: one storage per iteration if the operand has that, else one stack."""
        loop, done = self.made.forward, {i for i, _ in self.kept}
        for i, (t, f) in enumerate(zip(loop.op.operands, loop.body.formals, strict=True)):
            wanted = f in loop.slices and needs[i] and i not in done
            grad = self.back.taken(f) if wanted else None
            if grad is None:
                continue
            own = grad.role == "activation" and not any(grad.storage is t.storage for t in self.after)
            if t.storage.pieces:
                leaf = self.back.leaves.get(f)
                if leaf is not None and leaf.update is not None:
                    continue  # the update has consumed the gradient
                if leaf is None or leaf.total is None:  # else it is in the gradient buffer already
                    grad = self.back.own(grad) if own else pointwise("copy", grad, name="own")
                self.kept.append((i, grad))
            else:
                looped = grad.producer is not None and grad.producer.loop is not None
                fresh = own and grad.is_contiguous and not grad.is_view and not looped
                fresh = fresh and not any(grad.storage is t.storage for _, t in (*self.stacks, *self.kept))
                grad = grad if fresh else pointwise("copy", grad, name="stack")
                self.stacks.append((i, contiguous_copy(grad)))


def _close(walk: ReverseMode, out: _Out, grads: Grads, sums: dict[int, tuple[Tensor, Tensor | None]]) -> Grads:
    """Append the backward loop and return operand gradients."""
    made, old, op = out.made, out.made.forward, out.made.forward.op
    body, graph = made.body, made.body.parent
    assert graph is not None
    body.outputs += [*out.after, *(t for _, t in out.stacks), *(t for _, t in out.kept)]
    for f in [f for f, _ in made.xs if not body.out_degree(f) and f not in body.outputs]:
        made.drop(f)  # read only by ops that an early stop has removed
    results: list[Tensor | None] = [out.passed.get(i) for i in range(len(op.operands))]
    if not body.outputs:
        return results
    body.formals[:] = [*(f for f, _ in made.carries), *(f for f, _ in made.xs), *map(body.capture, body.captured)]
    # an initial value that the loop also reads under another name must not be overwritten
    several = Counter(t.storage for _, t in (*made.carries, *made.xs) if t is not None)
    several.update(t.storage for t in body.captured)
    starts = []
    for i, (f, t) in enumerate(made.carries):
        # sums, which follow the incoming gradients, are known to be writable
        begun, shared = i >= len(out.carried), t is not None and several[t.storage] > 1
        starts.append(_start(walk, graph, body, f, t, begun=begun, shared=shared))
    kind = Repeat(
        body=body, count=old.count, carries=len(starts), xs=len(made.xs), saved=len(out.kept),
        reverse=not old.reverse, least=old.kind.least,
    )  # fmt: skip
    for i, t in out.stacks:
        stack_of(walk, op.operands[i], t.dtype)
    # the open scope completes the name
    loop = graph.add_op(
        kind, (*starts, *(t for _, t in made.xs), *body.captured), f"{op.name.rpartition('/')[2]}.backward"
    )
    body.owner = loop
    sliced = [i for i, _ in (*out.stacks, *out.kept)]
    listed = [*out.carried, *(i for i in sums if i in made.shared), *sliced]
    for i, t in zip(listed, loop.results, strict=True):
        if (i in sums and sums[i][1] is not None) or (i in sums and op.operands[i].storage.pieces):
            before = walk.grads.pop(op.operands[i])
            walk.held[before.storage] -= 1
            walk.keep(op.operands[i], t)
        else:
            results[i] = t
    return results


def _start(
    walk: ReverseMode, graph: Graph, body: Graph, f: Tensor, start: Tensor | None, *, begun: bool, shared: bool
) -> Tensor:
    """Return a carry's initial value: absent if the first iteration only accumulates into it, else zeros."""
    if start is None:
        readers = list(body.successors(f))
        # if the loop only accumulates into the carry, the first term becomes its value
        absent = len(readers) < 2 and all(_only_added_to(op, f) for op in readers) and f not in body.outputs
        absent = absent or _passed_on(body, f)
        if absent:
            nothing = Undef(sizes=f.sizes, dtype=f.dtype, pieces=f.storage.pieces, domain=f.domain)
            return graph.add_op(nothing, [], "absent").results[0]
        return restricted(fill(f.shape, dtype=f.dtype), f)
    start = graph.adopt(start)
    if start.storage.pieces or begun:
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
    found = list(op.body.successors(inner))
    adds = len(found) == 1 and _only_added_to(found[0], inner)
    return adds or _passed_on(op.body, inner)


@vjp(Stacked)
def _unstacked(pull: VJPContext[Stacked]) -> Grads:
    """Split a stack's gradient into its parts: one index per unrolled part, a slice per loop."""
    grad, at, out = pull.grads[0], ZERO, list[Tensor | None]([None])
    assert grad is not None
    for i, (t, need) in enumerate(zip(pull.op.operands[1:], pull.needs[1:], strict=True)):
        several = t.ndim == grad.ndim
        out.append((slice_axis(grad, 0, at, t.sizes[0]) if several else grad[i]) if need else None)
        at = at + t.sizes[0] if several else at
    return out


@vjp(Accumulate)
def _added(pull: VJPContext[Accumulate]) -> Grads:
    return [pull.grads[0] if need else None for need in pull.needs]


@vjp(Undef)
def _absent(pull: VJPContext[Undef]) -> Grads:
    return []


# -- kernels -----------------------------------------------------------------------------------------------------------
# A fused kernel is differentiated as one kernel, as separate ops, or by its own rule.

Grads = Sequence[Tensor | None]


@dataclass
class _Inside:
    """Saved or recomputed tensors from a kernel's body in its backward pass."""

    op: Op
    walk: ReverseMode
    own: KernelBackward
    graph: Graph = field(default_factory=current_graph)
    """where ops are recomputed: a backward loop inside the kernel reads slices of tensors there"""
    seen: dict[Tensor, Tensor] = field(default_factory=dict)
    loops: dict[Op, tuple[Op, Rewriter]] = field(default_factory=dict)
    """recomputed loops, and the counterparts of their body's tensors"""

    def saved(self, t: Tensor) -> Tensor:
        """Return the counterpart for a tensor in the body."""
        if t not in self.seen:
            self.seen[t] = self.find(t)
        return self.seen[t]

    def find(self, t: Tensor) -> Tensor:
        body, maker = self.op.body, t.producer
        assert body is not None
        if maker is None:
            return self.walk.saved(self.op.operands[body.formals.index(t)])
        if t in self.own.rebuilt:
            return self.own.rebuilt[t](self.saved)
        if maker.kind.save or t in self.own.kept:
            return self.walk.saved(body.export(t))
        if maker.loop is not None:
            self.seen[t] = self.repeated(maker, t)
            return self.seen[t]
        nested = isinstance(maker.kind, Kernel) and maker.kind.backward in INSIDE
        found = self.handed_out(t) if nested or is_alone(maker) else None
        if nested or found is not None:
            return self.walk.saved(body.export(t)) if found is None else found
        again = Rewriter()
        again.tensors |= {o: self.saved(o) for o in maker.operands}
        with building(self.graph):
            made = again.copy(maker, self.graph)
        _mark((made, *(made.body.walk() if made.body is not None else ())))
        self.seen |= dict(zip(maker.results, made.results, strict=True))
        return self.seen[t]

    def handed_out(self, t: Tensor) -> Tensor | None:
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

    def repeated(self, op: Op, result: Tensor) -> Tensor:
        """Return a result of a recomputed loop: a final carry, or a stack or residual added on request."""
        if op not in self.loops:
            self.loops[op] = self.loop(op)
        made, again = self.loops[op]
        old, new = op.loop, made.loop
        assert old is not None
        assert new is not None
        if result in old.lasts:
            return new.lasts[old.lasts.index(result)]
        t = old.body.outputs[op.results.index(result)]
        _compute(again, t, new.body)
        return (_stacked if result in old.stacks else left_behind)(made, again.tensors[t])

    def loop(self, op: Op) -> tuple[Op, Rewriter]:
        """Recompute a loop, with only its carries."""
        loop = op.loop
        assert loop is not None
        again = Rewriter()
        again.tensors |= {o: self.saved(o) for o in op.operands}
        with building(self.graph):
            body = self.graph.start_body(loop.body.name, fused=False)
            for f in loop.body.formals:
                again.tensors[f] = again.formal(f, body)
            for t in loop.nexts:
                _compute(again, t, body)
            body.outputs += [body.adopt(again.tensors[t]) for t in loop.nexts]
            operands = [self.graph.adopt(again.tensors[o]) for o in op.operands]
            made = self.graph.add_op(replace(loop.kind, body=body, saved=0), operands, op.name)
        made.scope, body.owner = op.scope, made
        _mark([made])
        return made, again


def _compute(again: Rewriter, t: Tensor, body: Graph) -> None:
    """Copy into a body the missing ops that compute a tensor."""
    if t in again.tensors:
        return
    maker = t.producer
    assert maker is not None
    for o in maker.operands:
        _compute(again, o, body)
    made = again.copy(maker, body)
    _mark((made, *(made.body.walk() if made.body is not None else ())))


def _stacked(op: Op, t: Tensor) -> Tensor:
    """Make a loop return a body tensor as a stack."""
    loop = op.loop
    assert loop is not None
    modify(op.graph, op.name)
    at = len(loop.lasts) + len(loop.stacks)
    loop.body.outputs.insert(at, t)
    op.graph.add_result(op, op.kind.infer(op.operands)[at], f"{t.name}.again")
    *others, made = op.results
    op.results = (*others[:at], made, *others[at:])  # in the body's output order
    return made


def _mark(ops: Iterable[Op]) -> None:
    """Mark ops as recomputed within the backward pass."""
    for op in ops:
        op.phase = "backward"
        op.state(again=True)


def pull_kernel(walk: ReverseMode, op: Op, grads: Grads, needs: Sequence[bool]) -> Grads:
    """Add a kernel's backward pass and return its operands' gradients.

    The kernel's field `backward` selects it: `ops` for separate ops, the name of a special rule, or empty for a single
    kernel built from the rules of the ops inside.
    """
    assert isinstance(op.kind, Kernel)
    how = op.kind.backward
    if how in KERNELS:
        return walk.asked(KERNELS[how], op, grads, needs)
    own = INSIDE[how](op, grads, walk.saved) if how in INSIDE else KernelBackward()
    if how == "ops" or walk.fused:
        return _pulled(walk, _Inside(op, walk, own), grads, needs, fused=walk.fused)
    operands = (op.operands[i] for i in op.kind.saved_operands)
    saved = [walk.saved(t) for t in operands if t.role in ("activation", "formal")]
    with kernel(f"{op.name.rpartition('/')[2]}_backward".replace(".", "_")) as body:
        made = _pulled(walk, _Inside(op, walk, own), grads, needs, fused=True)
    owner = body.owner
    assert owner is not None
    if op.kind.copies_grad_input:
        x = op.operands[0]
        owner.state(strides=(dense_in(x.sizes, memory_format(x.sizes, x.strides)),))
    out = [None if g is None else _handed_out(body, g) for g in made]
    for i, g in enumerate(out):
        if saved and g is not None and g.role == "activation":
            out[i] = keep(g, *saved)
            break
    owner.scope = op.scope
    space = op.kind.gradient_workspace if all(g is None or g.is_contiguous for g in grads) else ZERO
    if op.kind.workspace or space:
        owner.state(workspace=_casts(body) + space)
    if not owner.results:  # every gradient is passed through unchanged
        owner.graph.remove_node(owner)
    return out


def _casts(body: Graph) -> Poly:
    """Return the bytes for operand casts that a kernel repeats in its backward pass."""
    formats = [
        (t, op.results[0].dtype)
        for op in body.ops
        if isinstance(op.kind, Pointwise) and op.kind.function.name not in ("cast", "where", "masked_fill")
        for t in op.operands
        if t in body.formals and t.sizes
    ]
    return total(t.numel * made.bytes for t, made in formats if made.kind != "bool" and t.dtype != made)


def _handed_out(body: Graph, grad: Tensor) -> Tensor:
    if grad not in body:
        return grad
    view = _view_outside(body, grad)
    return body.export(grad) if view is None else view


def _view_outside(body: Graph, t: Tensor) -> Tensor | None:
    """Return the same view of the operand outside the kernel, None if the kernel computes the tensor."""
    lies = (t.storage, t.offset, t.sizes, t.strides)
    pairs = ((outer, body.adopt(outer)) for outer in body.captured)
    outer = next((outer for outer, x in pairs if (x.storage, x.offset, x.sizes, x.strides) == lies), None)
    if outer is not None or t.producer is None or not is_view_op(t.producer):
        return outer
    source = _view_outside(body, t.producer.operands[0])
    return None if source is None else apply(t.producer.kind, [source], t.producer.kind.name)[0]


def _pulled(walk: ReverseMode, inside: _Inside, grads: Grads, needs: Sequence[bool], *, fused: bool) -> Grads:
    op, body = inside.op, inside.op.body
    assert body is not None
    # recomputation inside a kernel is the kernel's own choice
    hooks = replace(walk.hooks, runs=lambda ops: ())
    active = active_inside(op, walk.active) | active_in(body.ops, inside.own.joint)
    needs = [need or f in inside.own.joint for f, need in zip(body.formals, needs, strict=True)]
    back = ReverseMode(hooks, active, inside.saved, fused=fused, rules=inside.own.rules)
    back.held = walk.held
    for t, grad in zip(body.outputs, grads, strict=False):
        if grad is not None:
            back.put(t, current_graph().adopt(grad))
    back.run(body.ops)
    return [back.take(f) if need else None for f, need in zip(body.formals, needs, strict=True)]
