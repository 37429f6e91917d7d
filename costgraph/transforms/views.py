"""In-place writes to views: a write reaches the base, and later reads of other views start from it, as in autograd.

Autograd keeps one history per storage. After an in-place write to a view, `rebase_history` puts a `CopySlices` node on
the base, and each view gets a new gradient function, `AsStridedBackward`, when it is used next. `rebase_views` makes
both explicit in a forward graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..ir.graph import Graph, Op, Storage, Tensor, apply, opened, overwritten_by
from ..ops.fill import SliceUpdate, assign, fill
from ..ops.layout import Expand, KeepAlive, Rearrange, Slice
from .rewrite import Rewriter

__all__ = [
    "is_view_op",
    "is_untracked",
    "view_path",
    "replay",
    "rebased",
    "write_through",
    "written_op",
    "embed",
    "rebase_views",
]


# -- paths -------------------------------------------------------------------------------------------------------------


def is_view_op(op: Op) -> bool:
    """Whether an op only returns a view of its operand's storage."""
    return (
        isinstance(op.kind, Rearrange | Slice | Expand)
        and op.results[0].storage is op.operands[0].storage
        and not op.kind.overwrites()
    )


def is_untracked(op: Op) -> bool:
    """Whether an in-place write is hidden from autograd: all readers see the tensor as it was."""
    readers = [o.kind for o in op.graph.successors(op.results[0])]
    return bool(readers) and all(isinstance(kind, SliceUpdate) and kind.untracked for kind in readers)


def _renamed(op: Op) -> bool:
    """Whether an op returns its first operand, written in place or under another name."""
    if isinstance(op.kind, KeepAlive):
        return not op.kind.custom_grad
    return isinstance(op.kind, SliceUpdate) or op.kind.overwrites() == (0,)


def view_path(t: Tensor, base: Tensor | None = None) -> tuple[Tensor, list[Op]] | None:
    """Return the base of a view and the view ops that lead from it to the view; None for other views.

    Names of the same tensor, before and after a write, count as one. With `base`, the path starts there.
    """
    start, path = None if base is None else _first_name(base), list[Op]()
    t = _first_name(t)
    while t is not start and t.producer is not None and is_view_op(t.producer) and not _is_unsafe_view(t.producer):
        path.insert(0, t.producer)
        t = _first_name(t.producer.operands[0])
    is_base = not t.is_view or (t.producer is not None and _is_unsafe_view(t.producer))
    known = t is start if start is not None else is_base
    return (t, path) if known else None


def _is_unsafe_view(op: Op) -> bool:
    """Whether autograd sees a new tensor: the reshaped result of a matmul or a copy."""
    return op.call is not None and op.call.target.startswith("_unsafe_view")


def _first_name(t: Tensor) -> Tensor:
    """Return a tensor as it was before all writes."""
    while t.producer is not None and t.is_view and _renamed(t.producer):
        t = t.producer.operands[0]
    return t


def replay(path: Sequence[Op], base: Tensor) -> Tensor:
    """Apply view ops to another base."""
    for op in path:
        (base,) = apply(op.kind, [base], op.kind.name)
    return base


def rebased(path: Sequence[Op], base: Tensor) -> Tensor:
    """Recreate a view from a written base, as autograd does with `as_strided`."""
    view = replay(path, base)
    if sum(isinstance(op.kind, Slice) for op in path) == 1 or not path:
        return view  # the gradient of a single slice is embedded in zeros of the base anyway
    return apply(KeepAlive(rebased=True), [view, base], "as_strided")[0]


def write_through(base: Tensor, view: Tensor, part: Tensor, *, untracked: bool = False) -> Tensor:
    """Return a base after a write to one of its views; `part` is the view after the write."""
    start, inner = _first_name(base), _first_name(view)
    is_slice = False
    while inner is not start:
        op = inner.producer
        assert op is not None
        inner = _first_name(op.operands[0])
        outer = base if inner is start else op.operands[0]
        is_slice = isinstance(op.kind, Slice)
        if isinstance(op.kind, Slice):
            axes, starts, steps = (op.kind.axis,), (op.kind.start,), (op.kind.step,)
            update = SliceUpdate(axes=axes, starts=starts, steps=steps, untracked=untracked)
            (part,) = apply(update, [outer, part], "slice_update")
        else:
            assert isinstance(op.kind, Rearrange)
            (part,) = apply(op.kind.inverse(outer.sizes), [part], op.kind.name)
    whole = SliceUpdate(axes=(), starts=(), steps=(), untracked=untracked)
    return part if is_slice else apply(whole, [base, part], "slice_update")[0]


def written_op(op: Op) -> Op | None:
    """Return the in-place op behind a `SliceUpdate`, None for other ops."""
    if not isinstance(op.kind, SliceUpdate) or op.kind.untracked:
        return None
    write = op.operands[1].producer
    while write is not None and (is_view_op(write) or isinstance(write.kind, SliceUpdate)):
        write = write.operands[isinstance(write.kind, SliceUpdate)].producer
    return write if write is not None and write.kind.overwrites() == (0,) and len(write.results) == 1 else None


def embed(path: Sequence[Op], base: Tensor, grad: Tensor) -> Tensor:
    """Copy the gradient of a view into zeros for its base, as `AsStridedBackward` does."""
    zeros = fill(base.shape, dtype=grad.dtype)
    view = replay(path, zeros)
    return write_through(zeros, view, assign(view, grad))


# -- rebase ------------------------------------------------------------------------------------------------------------


def rebase_views(graph: Graph, active: Collection[Tensor]) -> Graph:
    """Return a forward graph in which in-place writes reach the base at once, and views are replayed from it.

    `active` are the tensors that need a gradient; other tensors have no history.
    """
    storages = {op.results[0].storage for op in graph.ops if _is_write(op) and op.results[0] in active}
    storages &= {op.results[0].storage for op in graph.ops if is_view_op(op)}
    for op in graph.ops if storages else ():
        storages.difference_update(t.storage for t in op.operands if t in active and view_path(t) is None)
        storages.difference_update(() if _is_write(op) and _is_invertible(op) else overwritten_by(op))
    return _Rebaser(graph, storages).run(graph) if storages else graph


def _is_write(op: Op) -> bool:
    return op.kind.overwrites() == (0,) and len(op.results) == 1 and op.results[0].storage is op.operands[0].storage


def _is_invertible(op: Op) -> bool:
    """Whether the base of a written view follows from the view.

    Autograd does not track the parts of `unsafe_split` as views, and refuses writes to those of `split`.
    """
    found = view_path(op.operands[0])
    kinds = [] if found is None else [view.kind for view in found[1]]
    return found is not None and all(isinstance(k, Rearrange) or (isinstance(k, Slice) and not k.split) for k in kinds)


@dataclass
class _History:
    """Autograd's history of a storage."""

    base: Tensor
    """the whole tensor after the last write"""
    version: int = 0
    """number of writes"""
    replayed: dict[Tensor, int] = field(default_factory=dict)
    """version that each old view shows"""


class _Rebaser(Rewriter):
    """Copies a graph, with all views of some storages replayed after each write."""

    def __init__(self, graph: Graph, storages: Collection[Storage]) -> None:
        super().__init__()
        self.graph, self.storages = graph, storages
        self.histories: dict[Storage, _History] = {}

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        """Copy a graph, with outputs that show the last write."""
        super().fill(old, new, suffix)
        if old is self.graph:
            with opened(graph=new):
                for t in old.outputs:
                    self.refresh(t)

    def emit(self, op: Op, new: Graph, suffix: str = "") -> None:
        """Copy an op that reads the current views; a write is followed by its base."""
        if op.graph is not self.graph:
            super().emit(op, new, suffix)
            return
        place = partial(opened, graph=new, levels=tuple(op.scope.split("/")) if op.scope else (), phase=op.phase)
        is_read = not isinstance(op.kind, KeepAlive) or op.graph.out_degree(op.results[0])
        with place():
            if isinstance(op.kind, SliceUpdate) and op.operands[1].storage in self.histories:
                self.refresh(op.results[0])
                return
            for t in op.operands if is_read else ():
                self.refresh(t)
        super().emit(op, new, suffix)
        storage = op.operands[0].storage if op.operands else None
        if storage in self.storages and _is_write(op):
            with place():
                self.write(op)
        elif storage in self.histories and op.results and op.results[0].storage is storage:
            self.histories[storage].replayed[op.results[0]] = self.histories[storage].version

    def refresh(self, t: Tensor) -> None:
        """Replay a view from its base, unless it shows the last write."""
        history = self.histories.get(t.storage)
        found = view_path(t)
        if history is None or found is None or history.replayed.get(t, 0) == history.version:
            return
        self.tensors[t] = rebased(found[1], history.base)
        history.replayed[t] = history.version

    def write(self, op: Op) -> None:
        """Apply a write to the base."""
        found = view_path(op.operands[0])
        assert found is not None
        root, path = found
        history = self.histories.setdefault(root.storage, _History(self.tensors[root]))
        history.version += 1
        part, untracked = self.tensors[op.results[0]], op.kind.no_grad or is_untracked(op)
        view = self.tensors[op.operands[0]]
        history.base = write_through(history.base, view, part, untracked=untracked) if path or untracked else part
        history.replayed[op.results[0]] = history.version
