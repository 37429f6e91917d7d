"""Which ops of a graph its results depend on, and which of them makes the logits."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...graph.graph import Graph
from ...graph.op import Op
from ...graph.tensor import Tensor
from ...ops.blocks import Kernel
from ...ops.cached import Cache
from ...ops.contraction import Einsum
from ...ops.keep import Keep
from ...ops.moves import Rearrange
from ...ops.pointwise import Pointwise

__all__ = ["head_of", "needed_ops", "needed_formals"]


def needed_ops(graph: Graph, *, static: bool = False) -> set[Op]:
    """Return the ops that the outputs depend on, those inside bodies included.

    Of a loop that is needed, all carries and slices are; what it reads from outside is if an op in it needs it.
    `static` says whether what is cached once, by a `cache` without an axis, is there already: its operands are then not
    needed.
    """
    found: set[Op] = set()
    _walk(graph, found, static=static)
    return found


def _walk(graph: Graph, found: set[Op], *, static: bool) -> set[Tensor]:
    """Add the ops that the outputs of a graph or body depend on, and return the tensors that they read."""
    wanted = set(graph.outputs)
    for op in reversed(graph.ops):
        if not any(t in wanted for t in op.results):
            continue
        found.add(op)
        if static and _is_static(op):
            continue
        if op.body is None:
            wanted.update(op.operands)
            continue
        inside = _walk(op.body, found, static=static)
        inside |= _always_read(op)
        wanted.update(t for f, t in zip(op.body.formals, op.operands, strict=True) if f in inside)
    return wanted


def _is_static(op: Op) -> bool:
    """Whether an op marks what is cached once."""
    return isinstance(op.kind, Cache) and op.kind.axis is None


def _always_read(op: Op) -> set[Tensor]:
    """Return the inputs of a body that are carried or read by slices."""
    return set() if op.loop is None else {*op.loop.carries, *op.loop.slices}


def needed_formals(op: Op, needed: set[Op]) -> list[bool]:
    """Return which inputs of a body its needed ops read; those that are carried or read by slices always count."""
    assert op.body is not None
    read = {t for o in op.body.ops if o in needed for t in _read(o, needed)} | set(op.body.outputs) | _always_read(op)
    return [f in read for f in op.body.formals]


def _read(op: Op, needed: set[Op]) -> list[Tensor]:
    if _is_static(op):
        return []
    if op.body is None:
        return list(op.operands)
    return [t for t, wanted in zip(op.operands, needed_formals(op, needed), strict=True) if wanted]


def head_of(place: str, graph: Graph, positions: str) -> Op:
    """Return the product that makes the logits: behind it, only ops of one operand that has positions.

    UnsupportedError if the output is made in another way.
    """
    op = graph.outputs[0].producer if len(graph.outputs) == 1 else None
    while op is not None:
        along = [t for t in op.operands if any(positions in n.names() for n in t.sizes)]
        contracts = isinstance(op.kind, Einsum) or (
            isinstance(op.kind, Kernel) and op.body is not None and any(isinstance(o.kind, Einsum) for o in op.body.ops)
        )
        if len(along) != 1:
            break
        if contracts:
            return op
        if not isinstance(op.kind, Pointwise | Rearrange | Keep | Kernel):
            break
        op = along[0].producer
    raise UnsupportedError(
        f"{place}: graph {graph.name!r} has no head that makes its output, expected logits='all' or one output that a "
        f"linear layer makes"
    )
