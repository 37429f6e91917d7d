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

    Parameters
    ----------
    graph : Graph
        It stays as it is.

    Returns
    -------
    Graph
        Equal in every cost. A parameter of shape (D, F) inside a Repeat with count L is one of shape (L, D, F) whose
        storage has `pieces` 1.
    """
    if not any(_owned(op) for op in graph.ops):
        return graph
    return _Hoister().run(graph)


def _owned(op: Op) -> list[Tensor]:
    """Sources that belong to each iteration of a loop, those of loops inside it included."""
    if op.body is None or op.loop is None:
        return []
    own = [t for t in op.body.tensors if t.producer is None and t.role != "formal"]
    return own + [t for inner in op.body.ops for t in _owned(inner)]


class _Hoister(Rewriter):
    def __init__(self) -> None:
        super().__init__(None, _emit)
        self.outside: dict[Tensor, Tensor] = {}
        """What stands for a source of a body in the graph that is being filled."""

    def fill(self, old: Graph, new: Graph, suffix: str = "") -> None:
        if old.parent is None:
            for op in old.ops:
                self.declare(op, new, ())
        super().fill(old, new, suffix)

    def declare(self, op: Op, new: Graph, counts: tuple[Poly, ...]) -> None:
        """Add to the top what the iterations of a loop own."""
        if op.body is None or op.loop is None:
            return
        counts = (*counts, op.attrs["count"])
        for t in op.body.tensors:
            if t.producer is None and t.role != "formal":
                made = Tensor(
                    new, new.unique(t.name), (*counts, *t.sizes), t.dtype,
                    role=t.role, requires_grad=t.requires_grad, pieces=len(counts) + t.storage.pieces,
                )  # fmt: skip
                new.add_node(made)
                self.outside[t] = made
        for inner in op.body.ops:
            self.declare(inner, new, counts)

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        found = self.outside.get(old)
        return super().source(old, new, suffix) if found is None else found


def _emit(rewriter: Rewriter, op: Op, new: Graph) -> bool:
    owned = _owned(op)
    if not owned:
        return False
    assert isinstance(rewriter, _Hoister)
    old, first = op.body, op.attrs["carries"] + op.attrs["xs"]
    assert old is not None
    body = new.start_body(old.name, fused=False)
    around = [rewriter.outside[t] for t in owned]
    for f in old.formals[:first]:
        rewriter.tensors[f] = rewriter.formal(f, body)
    for t in owned:
        rewriter.outside[t] = slice_of(body, rewriter.outside[t], t.name)
    for f in old.formals[first:]:
        rewriter.tensors[f] = rewriter.formal(f, body)
    rewriter.fill(old, body)
    body.outputs += [body.adopt(rewriter.tensors[t]) for t in old.outputs]
    operands = [rewriter.tensors[t] for t in op.operands]
    operands[first:first] = around
    assert op.loop is not None
    kind = replace(op.loop.kind, body=body, xs=len(op.loop.xs) + len(around))
    made = new.add_op(kind, operands, op.name, op.phase)
    made.scope, body.owner = op.scope, made
    rewriter.tensors |= dict(zip(op.results, made.results, strict=True))
    for t, outer in zip(owned, around, strict=True):
        rewriter.outside[t] = outer
    return True
