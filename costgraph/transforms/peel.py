"""First iterations taken out of loops: what they start from may want no gradient, which saves their backward pass work.

The first layer's dX is not computed where its input is data; in all other layers it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..graph import Graph
from ..op import Op
from ..polynomial import ONE, Poly
from ..tensor import Tensor
from .rewrite import Rewriter
from .walk import active_in

__all__ = ["peel"]


def peel(graph: Graph) -> Graph:
    """Split a stack of layers whose input wants no gradient, while what the layers make does: the first, and the rest.

    Parameters
    ----------
    graph : Graph
        It stays as it is.

    Returns
    -------
    Graph
        With loops of count 1 and of count - 1, which may be 0, in place of such a loop. Loops that read or write
        slices stay as they are: their first iteration makes the gradient of what it starts from as all others do.
    """
    sources = {t for t in graph.tensors if t.producer is None and t.requires_grad}
    return _Peeler(sources).run(graph) if _any(graph.ops, sources) else graph


def _owns(op: Op) -> list[Tensor]:
    """Return the parameters inside a loop that want gradients: they make what it returns active."""
    assert op.body is not None
    return [t for g in op.body.bodies() for t in g.tensors if t.producer is None and t.requires_grad]


def _inside(op: Op, start: Iterable[Tensor]) -> set[Tensor]:
    assert op.body is not None
    return active_in(op.body.ops, {*start, *_owns(op)})


def _started(op: Op, active: Iterable[Tensor]) -> set[Tensor]:
    """Return what is active in the first iteration."""
    assert op.body is not None
    known = set(active)
    return _inside(op, (f for f, t in zip(op.body.formals, op.operands, strict=True) if t in known))


def _splits(op: Op, active: set[Tensor]) -> bool:
    """Whether a carry that starts without a gradient has one after the first iteration."""
    if op.kind.body != "repeated" or op.body is None or op.attrs["xs"] or len(op.results) > op.attrs["carries"]:
        return False
    if op.attrs["count"] == ONE:
        return False  # the first iteration is the only one
    inside = _started(op, active)
    return any(
        f not in inside and out in inside and f.dtype.kind == "float" and list(op.body.successors(f))
        for f, out in zip(op.body.formals, op.body.outputs, strict=False)
    )


def _any(ops: Iterable[Op], active: set[Tensor]) -> bool:
    known = set(active)
    for op in ops:
        if _splits(op, known):
            return True
        if op.kind.body == "repeated" and op.body is not None:
            inside = _started(op, known)
            if _any(op.body.ops, inside):
                return True
            known |= {r for r, t in zip(op.results, op.body.outputs, strict=True) if t in inside}
        else:
            known = active_in([op], known)
    return False


class _Peeler(Rewriter):
    def __init__(self, sources: set[Tensor]) -> None:
        super().__init__(None, _emit)
        self.active = set(sources)
        """Tensors of the old graph that want gradients where the copying has come to."""

    def copy(self, op: Op, new: Graph, suffix: str = "") -> Op:
        made = super().copy(op, new, suffix)
        if op.kind.body != "repeated":
            self.active |= active_in([op], self.active)
        return made

    def loop(self, op: Op, new: Graph, count: Poly, suffix: str) -> None:
        """Copy a loop with another count."""
        assert op.body is not None
        before, operands = set(self.active), [self.tensors[t] for t in op.operands]
        inside = _started(op, self.active)
        self.active |= inside
        attrs = {**op.attrs, "body": self.body(op.body, new, suffix), "count": count}
        if count != op.attrs["count"] and count != ONE:
            attrs["least"] = 0
        made = new.add_op(op.kind, operands, attrs, op.name + suffix, op.phase)
        made.scope = op.scope
        made.body.owner = made  # type: ignore[union-attr]  # it has one
        self.tensors |= dict(zip(op.results, made.results, strict=True))
        found = {r for r, t in zip(op.results, op.body.outputs, strict=True) if t in inside}
        self.active = before | found


def _emit(rewriter: Rewriter, op: Op, new: Graph) -> bool:
    assert isinstance(rewriter, _Peeler)
    if op.kind.body != "repeated":
        return False
    if not _splits(op, rewriter.active):
        rewriter.loop(op, new, op.attrs["count"], "")
        return True
    rewriter.loop(op, new, ONE, ".first")
    for t, r in zip(op.operands, op.results, strict=False):
        rewriter.tensors[t] = rewriter.tensors[r]
        if r in rewriter.active:
            rewriter.active.add(t)
    rewriter.loop(op, new, op.attrs["count"] - 1, "")
    return True
