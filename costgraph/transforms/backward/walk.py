"""The walk from the results of a graph back to its inputs: in reverse program order, and gradients add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...algebra.polynomial import ZERO, total
from ...dtypes import DType
from ...errors import GraphError
from ...graph.changes import modify
from ...graph.graph import apply, current_graph
from ...graph.op import Op
from ...graph.scopes import opened
from ...graph.strides import has_blas_layout, is_contiguous_in, memory_format, memory_order
from ...graph.tensor import Storage, Tensor
from ...ops.blocks import Kernel
from ...ops.contraction import Einsum
from ...ops.fill import Revised, assign, fill
from ...ops.keep import Keep, keep
from ...ops.layout import concat, contiguous_copy, copied_into
from ...ops.moves import Concat, Expand, Rearrange, Slice
from ...ops.pieces import accumulate
from ...ops.pointwise import cast, pointwise
from ...ops.pooling import Pool
from ...ops.stacks import Empty, Stacked
from ..vjp.common import restricted, whole
from ..vjp.table import Pull, Rule, rule_of
from .apart import overwritten
from .flow import is_leaf
from .updating import Update

__all__ = ["Hooks", "Leaf", "Walk", "is_view_op", "scoped", "stack_of"]


@dataclass(frozen=True)
class Leaf:
    """What becomes of a gradient that stays, once it is complete."""

    total: Tensor | None = None
    """what it is added to, None where it is the first"""
    dtype: DType | None = None
    """format that it is kept in, None for that of the tensor"""
    update: Update | None = None
    """of the parameter, where it is updated at once and the gradient does not stay"""

    @property
    def is_plain(self) -> bool:
        """Whether the sum of the contributions is the gradient itself."""
        return self.total is None and self.dtype is None


@dataclass(frozen=True)
class Hooks:
    """What a walk does with ops that have a body, and with ops that are computed again."""

    fused: Pullers
    """of a kernel"""
    repeated: Pullers
    """of a loop"""
    again: Callable[[Walk, Sequence[Op]], None]
    """computes a run of ops again and walks back over it"""
    runs: Callable[[Sequence[Op]], Sequence[Sequence[Op]]]
    """of the ops of a graph or body, the runs that are computed again"""
    keeps: Callable[[Op], bool]
    """whether what an op of a run makes is kept, and not computed again"""
    early_stop: bool = True
    """whether recomputation stops after the last op of a run that the backward pass reads"""
    start: bool = False
    """whether what an iteration of a loop starts from is computed again from the first one's start"""
    within: Hooks | None = None
    """the same for ops that are computed again already; None where nothing of them is once more"""


Pullers = Callable[["Walk", Op, Sequence["Tensor | None"], Sequence[bool]], Sequence["Tensor | None"]]


def scoped(op: Op) -> AbstractContextManager[None]:
    """Let ops that are made now stand in the scope of another one."""
    return opened(levels=tuple(op.scope.split("/")) if op.scope else ())


def is_view_op(op: Op) -> bool:
    """Whether an op only gives another view of its operand's storage."""
    return (
        isinstance(op.kind, Rearrange | Slice | Expand)
        and op.results[0].storage is op.operands[0].storage
        and not op.kind.overwrites()
    )


class Walk:
    """Gradients of the tensors of one graph, or of one body.

    `hooks` say what is done with ops that have a body, `active` whose gradients are wanted, and `saved` what stands for
    a tensor of the forward pass in the graph that is being built. `carried` are inputs of the body that is being built
    that may be written into; `leaves` tensors whose gradients stay, and what becomes of each. Ops that are `fused` go
    into a kernel: sums then need no storage. `rules` are of single ops, in place of those of their kinds.
    """

    def __init__(
        self,
        hooks: Hooks,
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
        """Gradients of leaves that are complete."""
        self.readers: Counter[Tensor] = Counter()
        """Ops that have not contributed yet to the gradient of a leaf."""
        self.fused = fused
        self.rules = dict(rules or {})
        self.grads: dict[Tensor, Tensor] = {}
        self.parts: dict[Tensor, dict[Op, Tensor]] = {}
        """Gradients of parts that a tensor was split into."""
        self.stacks: dict[Op, Tensor] = {}
        """What loops write the gradients of parts into, by the first of these."""
        self.held: Counter[Storage] = Counter()
        """How many gradients that are not complete yet lie in a storage."""

    # -- gradients that add up --------------------------------------------------------------------------------------

    def put(self, t: Tensor, grad: Tensor | None) -> None:
        """Add a contribution to the gradient of a tensor: the first one becomes it, others are added."""
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
        """Note the gradient of a tensor as far as it is known."""
        self.grads[t] = grad
        self.held[grad.storage] += 1

    def own(self, grad: Tensor) -> Tensor:
        """Return a gradient that can stay: a copy if it is expanded, or someone else's."""
        if grad.storage.pieces or self.fused:
            return grad
        mine = not any(g is grad for g in self.grads.values()) and grad.touched == grad.numel
        return contiguous_copy(grad) if mine else pointwise("copy", grad, name="own")

    def writable(self, grad: Tensor) -> bool:
        """Whether nothing else holds a gradient, so that it may be written into: a view holds what it is of."""
        origin = grad.producer
        while origin is not None and isinstance(origin.kind, Keep):
            origin = origin.operands[0].producer
        if origin is not None and is_view_op(origin) and grad not in self.carried:
            return False
        whole = grad.touched == grad.numel and grad.numel == grad.storage.elements
        return whole and not self.held[grad.storage] and (grad.role == "activation" or grad in self.carried)

    def add(self, before: Tensor, grad: Tensor) -> Tensor:
        """Add to a gradient, in place where nothing else holds it."""
        if self.fused or not self.writable(before):
            return pointwise("add", before, grad)
        if before in self.carried:
            return accumulate(before, grad, lent=grad.role == "formal" or self.held[grad.storage] > 0)
        return pointwise("add", before, grad, inplace=True)

    def take(self, t: Tensor) -> Tensor | None:
        """Return the gradient of a tensor that all who read it have contributed to."""
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
        """Return the gradient of a source."""
        return self.final[t] if t in self.final else self.take(t)

    # -- ops --------------------------------------------------------------------------------------------------------

    def run(self, ops: Sequence[Op]) -> None:
        """Walk back over ops."""
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
        """Add the gradients of leaves, that ops were the last to contribute to, to what there is already."""
        for op in ops:
            # the bias of a linear layer before its weight, whose gradient torch has to transpose first
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
        """Return the gradient that stays."""
        leaf = self.leaves[t]
        if leaf.is_plain or t.storage.pieces:  # a loop has done it slice by slice
            return grad
        total = leaf.total
        if leaf.dtype is not None and leaf.dtype.bits <= grad.dtype.bits:
            grad = cast(grad, leaf.dtype)
        if total is None:
            return grad
        if total.dtype == grad.dtype:
            return accumulate(total, grad)
        return pointwise("add", total, grad, inplace=True)  # into a buffer of another format

    def pull(self, op: Op) -> None:
        """Ask the rule of one op."""
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
            # several may be one tensor: the sum that one becomes part of must not overwrite those still to come
            self.held.update(grad.storage for grad in made if grad is not None)
            for t, grad in zip(op.operands, made, strict=True):
                if grad is not None:
                    self.held[grad.storage] -= 1
                self.put(t, grad)

    def write_back(self, op: Op, write: Op, grad: Tensor) -> None:
        """Walk back over an op that wrote into a slice of a tensor, as torch's `CopySlices`.

        The whole gradient is copied. The gradient of the slice is cloned and passed to the op; the gradient that the op
        returns overwrites the slice.
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
        """Return the gradients of the operands of an op, given those of its results."""
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
        """Return gradients as `gradients`, with the copies that a kernel makes in its memory format."""
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
        """Ask the rule of an op."""
        if op in self.rules:
            return self.rules[op](Pull(op, tuple(grads), needs, self.saved))
        if op.body is not None:
            return (self.hooks.fused if isinstance(op.kind, Kernel) else self.hooks.repeated)(self, op, grads, needs)
        _keep_places(op)
        return self.asked(rule_of(op), op, grads, needs)

    def asked(
        self, rule: Rule[Any], op: Op, grads: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Ask the rule of an op; what it was given and has read stays until all it makes is there, as in torch."""
        read: dict[Tensor, None] = dict.fromkeys(g for g in grads if g is not None)
        graph = current_graph()
        before = len(graph)

        def saved(t: Tensor) -> Tensor:
            found = self.saved(overwritten(op, t))
            read[found] = None
            return found

        if not self.fused:
            for place in op.kind.saved_operands:
                if needs[place] or not isinstance(op.kind, Concat):  # one part of another one's gradient
                    saved(op.operands[place])
        made = list(rule(Pull(op, tuple(grads), tuple(needs), saved)))
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
    """Return the order of axes in memory that a backward kernel copies incoming gradients into."""
    grad = next(g for g in grads if g is not None)
    if op.kind.grad_memory_format == "bshd":  # heads may be two axes: groups, and those that share keys
        return (0, grad.ndim - 2, *range(1, grad.ndim - 2), grad.ndim - 1)
    like = op.operands[0] if op.kind.grad_memory_format == "operand" else grad
    contiguous = op.kind.grad_memory_format == "contiguous"
    return tuple(range(grad.ndim)) if contiguous else memory_format(like.sizes, like.strides)


def _in_own_format(op: Op, made: Tensor, order: Sequence[int], grad: Tensor) -> Tensor:
    """Copy the gradient of an operand from the memory format of the kernel into its own.

    That of an elementwise kernel is the incoming gradient's. Windows copy inside the kernel, and what the forward pass
    saved in another format, too.
    """
    maker = made.producer
    while maker is not None and isinstance(maker.kind, Keep):
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
    """Return the in-place op that wrote the slice of a `Revised` tensor, None for other ops."""
    if not isinstance(op.kind, Revised) or op.kind.unseen:
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
    """Let a pooling tell where its maxima stand."""
    if not isinstance(op.kind, Pool) or op.kind.operation != "max" or op.kind.indices:
        return
    modify(op.graph, op.name)
    op.state(indices=True)
    op.graph.add_result(op, op.kind.infer(op.operands)[1], f"{op.name}.places")


def _tilings(t: Tensor) -> Iterator[list[Op]]:
    """Yield the parts that a tensor was split into, once for each time that it was."""
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
    """Join the gradients of the parts that a tensor was split into: zeros where a part has none."""
    dtype = next(g for g in grads if g is not None).dtype
    pairs = [(cut.results[0], g) for cut, g in zip(cuts, grads, strict=True)]
    parts = [restricted(fill(t.shape, dtype=dtype), t) if g is None else g for t, g in pairs]
    if stack is None:
        assert isinstance(cuts[0].kind, Slice)
        return concat(parts, cuts[0].kind.axis)
    return apply(Stacked(), [stack, *parts], "stacked")[0]


def stack_of(walk: Walk, t: Tensor, dtype: DType) -> None:
    """Let loops that read parts of a tensor write the gradients of these into one stack, made before the first."""
    cut = t.producer
    if cut is None or not isinstance(cut.kind, Slice) or not cut.kind.split or cut.kind.axis:
        return
    cuts = next(cuts for cuts in _tilings(cut.operands[0]) if cut in cuts)
    readers = [list(t.graph.successors(c.results[0])) for c in cuts]
    if cuts[0] in walk.stacks or any(len(ops) != 1 or ops[0].loop is None for ops in readers):
        return
    sizes = cut.operands[0].sizes
    walk.stacks[cuts[0]] = apply(Empty(sizes=sizes, dtype=dtype), [], f"{cuts[0].name}.grad")[0]
