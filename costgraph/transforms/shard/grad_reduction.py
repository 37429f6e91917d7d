"""Gradient reduction in buckets, as in DistributedDataParallel, and the last micro-batch peeled for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from ...algebra.polynomial import ZERO
from ...algebra.symbols import shown
from ...errors import GraphError, UnsupportedError
from ...ir.graph import Graph, Loop, Op, Repeat, Sharding, Storage, Tensor, is_count, is_pass, need_flag, optional
from ...notation.validation import guarded
from ...ops.collectives import Collective, Pack
from ...ops.layout import KeepAlive, Rearrange, Slice
from ...ops.loops import Empty, Stacked
from ..rewrite import Rewriter
from ..unroll import position
from .fsdp import is_cast
from .grad_buffers import add_op
from .partial_sums import adds, origin

__all__ = [
    "PeeledLastMicroBatch",
    "Buckets",
    "in_buckets",
]


# -- peeling -----------------------------------------------------------------------------------------------------------
# The last micro-batch reduces the accumulated gradients.

T = TypeVar("T")


class PeeledLastMicroBatch(Rewriter):
    """Copies a graph with the last iteration of a micro-batch loop peeled."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_tensors: dict[Tensor, Tensor] = {}
        """New tensors in the remaining loop, by old tensor."""

    def translated(self, of: Mapping[Tensor, T]) -> dict[Tensor, T]:
        """Translate a mapping of old tensors to both copies."""
        return {
            new: value
            for t, value in of.items()
            for new in (self.tensors[t], self.loop_tensors.get(t, self.tensors[t]))
        }

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op; peel a loop over micro-batches.

        Loops that accumulate into persistent gradient buffers stay whole: these are reduced in place afterwards.
        """
        loop = op.loop if new.parent is None else None
        if loop is not None and is_pass(loop.body) and all(t.storage.role == "activation" for t in loop.starts):
            self.peel(loop, new)
        else:
            super().emit(op, new, suffix)

    def peel(self, loop: Loop, new: Graph) -> None:
        """Copy a loop without its last iteration, and then that iteration."""
        op, count = loop.op, loop.count - 1
        full = {t: self.tensors[t] for t in (*loop.xs, *loop.shared)}
        for t in loop.xs:
            first = Slice(axis=0, start=ZERO, size=count, step=1, split=True)
            self.tensors[t] = add_op(new, first, [full[t]], f"{t.name}.first", op.phase)
        stacks = {t: add_op(new, Empty(sizes=t.sizes, dtype=t.dtype), [], t.name, op.phase) for t in loop.stacks}
        minimum = 0 if count.constant is None else 1
        body = self.body(loop.body, new, "")
        kind = replace(loop.kind, body=body, count=count, min_count=minimum)
        loop_op = self.add(op, kind, [self.tensors[t] for t in op.operands], new)
        self.tensors |= full
        self.loop_tensors |= self.tensors
        self.tensors |= dict(zip(loop.carries, loop_op.results, strict=False))
        for f, t in zip(loop.slices, loop.xs, strict=True):
            self.tensors[f] = position(full[t], count, new, op)
        self.tensors |= {f: full[t] for f, t in zip(loop.captured, loop.shared, strict=True)}
        self.fill(loop.body, new, ".last")
        self.tensors |= {t: self.tensors[o] for t, o in zip(loop.lasts, loop.nexts, strict=True)}
        before = dict(zip(op.results, loop_op.results, strict=True))
        for t, o in zip(loop.stacks, loop.ys, strict=True):
            slices = [stacks[t], before[t], self.tensors[o]]
            self.tensors[t] = add_op(new, Stacked(), slices, f"{t.name}.filled", op.phase)


# -- buckets -----------------------------------------------------------------------------------------------------------

_Bytes = Annotated[int | None, optional("bytes, at least 1", lambda v: is_count(v, 1))]


@guarded()
@dataclass(frozen=True)
class Buckets:
    """Reduce gradients in buckets, as torch's DistributedDataParallel does; the defaults are torch's.

    Buckets for all reduced gradients persist from step to step. A gradient is copied into its bucket as soon as it is
    complete, and a full bucket is one message. After the backward pass, reduced gradients are copied back.

    Parameters
    ----------
    axes : str or iterable of str
        Mesh axes.
    view : bool
        Whether gradients become views of their buckets: `gradient_as_bucket_view`. If a step keeps its gradients, they
        are the buckets.
    cap : int, optional
        Bucket size in bytes; by default 25 MiB, and 1 MiB for the first bucket.

    Raises
    ------
    GraphError
        If an argument is invalid.

    Notes
    -----
    torch 2.13, `torch/nn/parallel/distributed.py` and `torch/csrc/distributed/c10d/reducer.cpp`. Gradients of each
    format have their own buckets and fill them in the order of completion, as from the second step on
    (`_rebuild_buckets`). With `find_unused_parameters`, torch keeps the reverse order of parameters, and reduces an
    additional 4 bytes for each of them.

    Examples
    --------
    >>> import costgraph as cg
    >>> step = cg.training_step(cg.models.load("gpt2"))
    >>> rank = cg.parallelize(step, dp=8, buckets=cg.Buckets())
    >>> sum(m.messages for m in cg.communication(rank, B=8, S=512) if m.phase == "backward")
    7
    """

    axes: str | Iterable[str] = "dp"
    view: bool = False
    cap: _Bytes = None

    def __post_init__(self) -> None:
        names = (self.axes,) if isinstance(self.axes, str) else tuple(self.axes)
        if not all(isinstance(name, str) for name in names):
            raise GraphError(f"Buckets: axes={shown(self.axes)}, expected one or several names")
        object.__setattr__(self, "axes", names)
        need_flag("Buckets", view=self.view)

    @property
    def limits(self) -> tuple[int, int]:
        """Sizes in bytes of the first bucket, and all others."""
        return (2**20, 25 * 2**20) if self.cap is None else (self.cap, self.cap)


def in_buckets(graph: Graph, policy: Buckets, axes: frozenset[str]) -> Graph:
    """Replace gradient all-reduces along some mesh axes by bucketed all-reduces.

    Each reduced gradient gets a bucket buffer in the graph. Raise UnsupportedError if a gradient is reduce-scattered,
    or if gradients of micro-batches are each reduced and shall stay in a bucket.
    """
    return _InBuckets(policy, axes, graph).run(graph)


@dataclass
class _Reduction:
    """All-reduces of a gradient, or of one term."""

    param: Tensor
    """The parameter."""
    chain: tuple[Op, ...]
    """Consecutive all-reduces along one mesh axis each."""
    loops: tuple[Op, ...]
    """Enclosing loops, outermost first."""
    outer: Tensor
    """The result outside all loops."""
    deferred: bool
    """Whether it is not needed before the end of the backward pass."""
    persistent: bool
    """Whether the gradient has a persistent buffer that serves as its bucket."""
    bucket: Tensor = field(init=False)
    """The bucket in the new graph."""


class _InBuckets(Rewriter):
    """Copies the graph of a rank with a source for each bucket, which loops read in slices."""

    lies = True

    def __init__(self, policy: Buckets, axes: frozenset[str], graph: Graph) -> None:
        super().__init__()
        self.policy, self.axes = policy, axes
        self.by_op: dict[Op, _Reduction] = {}
        """Reductions, by their first op."""
        for t, g in graph.gradients.items():
            for r in self.reductions(t, g):
                self.by_op.setdefault(r.chain[0], r)
        self.others = {op for r in self.by_op.values() for op in r.chain[1:]}
        self.by_storage: dict[Graph, dict[Storage, list[Tensor]]] = {}
        self.waiting: list[_Reduction] = []
        """Reductions whose result is not copied back yet."""

    # -- reductions of the old graph ---------------------------------------------------------------------------------

    def reductions(self, t: Tensor, g: Tensor) -> Iterator[_Reduction]:
        """Yield the reductions of a gradient's terms."""
        worklist: list[tuple[Tensor, tuple[Op, ...], Tensor]] = [(g, (), g)]
        while worklist:
            tensor, loops, outer = worklist.pop()
            op, kind = tensor.producer, None if tensor.producer is None else tensor.producer.kind
            if op is None:
                continue
            if isinstance(kind, Collective) and kind.axis in self.axes:
                if kind.collective != "all_reduce":
                    raise UnsupportedError(
                        f"shard: buckets cannot be combined with {op.name!r}, a {kind.collective} of the gradient of "
                        f"{t.name!r}; expected gradients that are replicated on all ranks"
                    )
                yield self.reduction(t, op, loops, outer if loops else tensor, persistent=origin(g).role == "gradient")
            elif op.loop is not None:
                inner = op.loop.body.outputs[op.results.index(tensor)]
                worklist.append((inner, (*loops, op), outer if loops else tensor))
            elif adds(op) or isinstance(kind, KeepAlive | Collective) or is_cast(op):
                worklist += [(o, loops, outer) for o in op.operands[: 2 if adds(op) else 1]]

    def reduction(self, t: Tensor, last: Op, loops: tuple[Op, ...], outer: Tensor, *, persistent: bool) -> _Reduction:
        """Return the reduction that ends with an op."""
        chain = [last]
        while (op := chain[0].operands[0].producer) is not None and self.reduces(op):
            chain.insert(0, op)
        (result,) = last.results
        per_micro_batch = any(is_pass(op.loop.body) for op in loops if op.loop is not None)
        alone = not loops or (result in result.graph.outputs and not [*result.graph.successors(result)])
        if per_micro_batch and self.policy.view and not persistent:
            raise UnsupportedError(
                f"shard: buckets with view=True cannot hold the gradient of {t.name!r}, because micro-batches "
                f"accumulate into it; expected reduce_every_microbatch=False, a step with set_to_none=False, or "
                f"view=False"
            )
        return _Reduction(
            t,
            tuple(chain),
            loops,
            outer,
            deferred=alone and not per_micro_batch,
            persistent=persistent and self.policy.view,
        )

    def reduces(self, op: Op) -> bool:
        """Whether an op is an all-reduce along one of the axes."""
        kind = op.kind
        return isinstance(kind, Collective) and kind.collective == "all_reduce" and kind.axis in self.axes

    # -- the new graph -----------------------------------------------------------------------------------------------

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy sources and ops, and add buckets."""
        for r in self.by_op.values() if old.parent is None else ():
            if not r.persistent:
                r.bucket = self.declared(r, new)
        super().fill(old, new, suffix)
        if old.parent is None:
            self.copy_back(self.waiting, new)

    def declared(self, r: _Reduction, new: Graph) -> Tensor:
        """Declare the bucket of a gradient, with as many storages as the gradient."""
        (x,) = r.chain[0].operands
        counts = [op.loop.count for op in r.loops if op.loop is not None and not is_pass(op.loop.body)]
        tensor = Tensor(
            new, new.unique(f"{r.param.name}.bucket"), (*counts, *x.sizes), x.dtype, role="gradient", pieces=len(counts)
        )
        new.add_node(tensor)
        return tensor

    def laid(self, old: Graph, sharding: Sharding) -> Sharding:
        """Return the placements of the new graph, buckets included."""
        placed = super().laid(old, sharding)
        buckets = {
            r.bucket.storage.name: sharding.gradients[r.param.name] for r in self.by_op.values() if not r.persistent
        }
        return replace(placed, places={**placed.places, **buckets}, own=(*placed.own, *buckets))

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op; reduced gradients that it reads are copied back first."""
        if op.graph.parent is None and self.waiting:
            due = self.waiting if op.phase == "optimizer" else [r for r in self.waiting if r.outer in op.operands]
            self.copy_back(due, new)
        if op in self.by_op:
            self.reduce(self.by_op[op], new)
        elif op not in self.others:
            self.copy(op, new, suffix)

    def reduce(self, r: _Reduction, new: Graph) -> None:
        """Add the reduction of a gradient in its bucket."""
        grad, name, phase = self.tensors[r.chain[0].operands[0]], r.chain[0].name, r.chain[0].phase
        (x,), t = r.chain[0].operands, grad
        if not r.persistent:
            if not self.policy.view and not self.is_alone(x):
                copy = Rearrange(split=x.sizes, order=tuple(range(x.ndim)), merged=x.sizes, copy=True)
                grad = add_op(new, copy, [grad], f"{name}.own", phase)
            r.bucket = t = add_op(new, Pack(), [r.bucket, grad], f"{name}.copy_in", phase)
        for op in r.chain:
            kind = op.kind
            assert isinstance(kind, Collective)
            inplace = not r.persistent or kind.inplace or self.is_alone(x)
            (t,) = self.add(op, replace(kind, inplace=inplace, bucket=self.policy.limits), [t], new).results
        if not r.persistent:
            r.bucket = t
        if not self.policy.view:
            t = grad if r.deferred else add_op(new, Pack(), [grad, t], f"{name}.copy_out", phase)
            if r.deferred:
                self.waiting.append(r)
        self.tensors[r.chain[-1].results[0]] = t

    def is_alone(self, x: Tensor) -> bool:
        """Whether nothing else reads a gradient's storage: autograd steals such a gradient and copies others.

        This holds for gradients that micro-batches accumulate into.
        """
        tensors = self.by_storage.setdefault(x.graph, {})
        if not tensors:
            for t in x.graph.tensors:
                tensors.setdefault(t.storage, []).append(t)
        readers = [op for t in tensors[x.storage] for op in x.graph.successors(t)]
        others = [op for op in readers if not all(t.storage is x.storage for t in op.results)]
        fills_storage = x.storage.bytes == x.numel * x.element_bytes()
        return origin(x).producer is None or (fills_storage and len(others) <= 1)

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        """Copy an op; a loop receives the buckets of the gradients reduced in it."""
        reduced = [r for r in self.by_op.values() if op in r.loops and not r.persistent]
        if not reduced:
            return super().copy(op, new, suffix)
        loop, kind = op.loop, op.kind
        assert loop is not None
        assert isinstance(kind, Repeat)
        outer, body = [r.bucket for r in reduced], new.start_body(loop.body.name, fused=False)
        for f in loop.body.formals:
            self.tensors[f] = self.formal(f, body, suffix)
        self.enter(loop, reduced, body)
        self.fill(loop.body, body, suffix)
        outputs = [body.adopt(self.tensors[t]) for t in loop.body.outputs]
        sliced = not is_pass(loop.body)
        saved = [body.adopt(r.bucket) for r in reduced if sliced and r.bucket not in outputs]
        body.outputs += [*outputs, *saved]
        inputs = [self.tensors[t] for t in op.operands]
        index = kind.carries + kind.xs
        operands = [*inputs[:index], *outer, *inputs[index:]] if sliced else [*inputs, *outer]
        kind = replace(kind, body=body, xs=kind.xs + sliced * len(outer), saved=kind.saved + len(saved))
        loop_op = self.add(op, kind, operands, new, op.name + suffix)
        for r, t in zip(reduced, outer, strict=True):
            r.bucket = loop_op.results[body.outputs.index(r.bucket)] if sliced else t
        return loop_op

    def enter(self, loop: Loop, reduced: Sequence[_Reduction], body: Graph) -> None:
        """Add formals for buckets: slices in a loop over layers, whole buckets in one over micro-batches."""
        drop = 0 if is_pass(loop.body) else 1
        for i, r in enumerate(reduced):
            t = r.bucket
            r.bucket = body.formal(t, t.name, t.sizes[drop:], t.strides[drop:], t.storage.pieces - drop)
            if drop:  # slices precede captured operands
                body.formals.remove(r.bucket)
                body.formals.insert(len(loop.carries) + len(loop.slices) + i, r.bucket)

    # -- after the backward pass -------------------------------------------------------------------------------------

    def copy_back(self, due: Sequence[_Reduction], new: Graph) -> None:
        """Copy reduced buckets back to their gradients."""
        for r in [*due]:
            self.waiting.remove(r)
            self.tensors[r.outer] = _copied(self.tensors[r.outer], r.bucket, r.chain[-1], new)


def _copied(t: Tensor, bucket: Tensor, last: Op, new: Graph) -> Tensor:
    """Copy a bucket into its gradient, one storage at a time."""
    if not t.storage.pieces:
        return add_op(new, Pack(), [t, bucket], f"{last.name}.copy_out", last.phase)
    name = f"{t.name}.copy_out"
    body = new.start_body(name, fused=False)
    into, of = (body.formal(o, o.name, o.sizes[1:], o.strides[1:], o.storage.pieces - 1) for o in (t, bucket))
    body.outputs.append(_copied(into, of, last, body))
    op = new.add_op(Repeat(body=body, count=t.sizes[0], carries=0, xs=2, saved=1), [t, bucket], name, last.phase)
    op.scope, body.owner = last.scope, op
    return op.results[0]
