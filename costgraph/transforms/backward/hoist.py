"""Sources of a Repeat's body declared outside it: what belongs to each iteration becomes a slice of one tensor.

Each iteration still has a storage of its own. What runs after the loop, its backward pass or an optimizer, can then
read and update what the iterations own.
"""

from __future__ import annotations

from dataclasses import replace

from ...algebra.polynomial import Poly
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.pieces import slice_of
from ..rewrite import Rewriter

__all__ = ["hoist"]


def hoist(graph: Graph) -> Graph:
    """Declare parameters, buffers and caches of all bodies at the top, one storage for each iteration.

    Every cost stays. A parameter of shape (D, F) inside a Repeat with count L is one of shape (L, D, F) whose storage
    has `pieces` 1.
    """
    if not any(_owned(op) for op in graph.ops):
        return graph
    return _Hoister().run(graph)


def _owned(op: Op) -> list[Tensor]:
    """Sources that belong to each iteration of a loop, those of loops inside it included."""
    if op.loop is None:
        return []
    body = op.loop.body
    own = [t for t in body.tensors if t.producer is None and t.role != "formal"]
    return own + [t for inner in body.ops for t in _owned(inner)]


class _Hoister(Rewriter):
    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[Tensor, Tensor] = {}
        """What stands for a source of a body in the graph that is being filled."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        if old.parent is None:
            for op in old.ops:
                self.declare(op, new, ())
        super().fill(old, new, suffix)

    def declare(self, op: Op, new: Graph, counts: tuple[Poly, ...]) -> None:
        """Add to the top what the iterations of a loop own."""
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
