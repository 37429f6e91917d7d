"""Saved tensors: bytes that the forward pass leaves for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..algebra.polynomial import Poly, total
from ..bind.evaluate import Formula, bound_answer
from ..errors import GraphError
from ..ir.graph import (
    Graph,
    Loop,
    Op,
    Storage,
    Tensor,
    bindings,
    need_graph,
)
from ..ops.collectives import Send

__all__ = ["behind", "deferred_grad_bytes", "saved_by_pass", "saved_bytes", "saved_for_weights"]


def saved_bytes(graph: Graph, /, **dims: int) -> dict[str, Formula]:
    """Return the bytes that the forward pass leaves for the backward pass.

    Parameters
    ----------
    graph : Graph
        A step, of `training_step` or `backward`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    dict of str to int or sympy.Expr
        Bytes saved per iteration by each forward loop, by loop name. Nested loops have their own entries. Tensors saved
        outside loops are under the name "". Inputs, parameters and buffers do not count.

    Raises
    ------
    GraphError
        If the graph has no backward pass.
    BindingError
        If a size cannot be bound.

    Notes
    -----
    A storage counts if a forward op produces it and a backward or recompute op reads it. It counts once and in full,
    even if only a view is read. Papers call this activation memory. Recomputed tensors do not count.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, L = cg.dims("B D F L")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     layer = lambda x: x + cg.nn.mlp(x, F)
    ...     x = cg.repeat(L, layer, cg.linear(g.input("x", (B, D)), "b d -> b e", e=D), name="layers")
    ...     g.output(cg.reduce(x, "b d -> ", "mean"))
    >>> cg.saved_bytes(cg.training_step(g))["layers"]
    2*B*D + 4*B*F
    >>> cg.saved_bytes(cg.training_step(g, checkpoint=cg.every_block()))["layers"]
    2*B*D
    """
    need_graph("saved_bytes", graph)
    if all(op.phase == "forward" for op in graph.walk()):
        raise GraphError(
            f"saved_bytes: graph {graph.name!r} has no backward pass; expected the result of training_step"
        )
    values = bindings(graph, dims)
    by_scope: dict[str, list[Storage]] = {"": list(dict.fromkeys(_saved_storages(graph)))}
    for op in graph.walk():
        if op.loop is not None and op.phase == "forward":
            by_scope[op.name] = list(dict.fromkeys((*_stacked_storages(op.loop), *_saved_storages(op.loop.body))))
    return {name: bound_answer(total(s.bytes for s in storages), values) for name, storages in by_scope.items()}


def saved_by_pass(graph: Graph) -> tuple[Poly, Poly, Poly]:
    """Return the device bytes saved by a forward pass: stacked by loops, before the loops, and after them."""
    forward_loops = [op.loop for op in graph.ops if op.loop is not None and op.phase == "forward"]
    layers = [
        loop.count * total([_of_device(_stacked_storages(loop)), *saved_by_pass(loop.body)]) for loop in forward_loops
    ]
    return total(layers), *_split_bytes(graph, _saved_storages(graph))


def saved_for_weights(graph: Graph) -> tuple[Poly, Poly, Poly]:
    """Return the bytes needed by weight gradients after the input gradients have been sent, as in `saved_by_pass`.

    Saved tensors read by weight gradients before the layers count as before.
    """
    late = behind(graph)
    produced = _produced_storages(op for op in graph.ops if op not in late) - _preexisting_storages(graph)
    read = dict.fromkeys(t for op in late for t in op.operands)
    return _of_pieces(read), *_split_bytes(graph, (t.storage for t in read if t.storage in produced))


def deferred_grad_bytes(graph: Graph) -> Poly:
    """Return the gradient bytes that backward loops keep for weight gradients."""
    read = dict.fromkeys(t for op in behind(graph) for t in op.operands)
    return _of_pieces(t for t in read if t.producer is not None and t.producer.phase != "forward")


def _of_pieces(read: Iterable[Tensor]) -> Poly:
    """Return the device bytes of stacked residuals, counting each storage once."""
    requested, pieces = dict.fromkeys(read), dict[Storage, Poly]()
    for loop in (t.producer.loop for t in requested if t.producer is not None and _is_stacked(t)):
        assert loop is not None
        stacked = {inner.storage for t, inner in zip(loop.pieces, loop.saved, strict=True) if t in requested}
        pieces |= {s: loop.count * s.bytes for s in _stacked_storages(loop) if s in stacked and not s.host}
    return total(pieces.values())


def behind(graph: Graph) -> list[Op]:
    """List the ops after the last input gradient in a pass: they compute only weight gradients."""
    ops = graph.ops
    last = max((i for i, op in enumerate(ops) if op.phase != "forward" and _passes_gradient(op)), default=len(ops))
    return [op for op in ops[last + 1 :] if op.phase != "optimizer"]


def _split_bytes(graph: Graph, storages: Iterable[Storage]) -> tuple[Poly, Poly]:
    """Return the device bytes of storages produced before the layers or as their final gradients, and of all others."""
    before: set[Storage] = set()
    for op in graph.ops:
        if op.loop is not None and op.loop.pieces:
            break
        before |= {t.storage for t in op.results}
    before |= {t.storage for op in graph.ops if op.phase != "forward" and _passes_gradient(op) for t in op.results}
    unique = dict.fromkeys(storages)
    return _of_device(s for s in unique if s in before), _of_device(s for s in unique if s not in before)


def _passes_gradient(op: Op) -> bool:
    """Whether an op passes a gradient to earlier layers or to other ranks."""
    return isinstance(op.kind, Send) or (op.loop is not None and bool(op.loop.starts))


def _of_device(storages: Iterable[Storage]) -> Poly:
    """Return the bytes in device memory."""
    return total(s.bytes for s in dict.fromkeys(storages) if not s.host)


def _saved_storages(graph: Graph) -> Iterator[Storage]:
    """Yield the storages that forward ops produce and backward or recompute ops read, in one graph or body."""
    produced = _produced_storages(op for op in graph.ops if op.phase == "forward") - _preexisting_storages(graph)
    for op in graph.ops:
        if op.phase in ("backward", "recompute"):
            yield from (t.storage for t in op.operands if t.storage in produced)


def _stacked_storages(loop: Loop) -> Iterator[Storage]:
    """Yield the storages that a loop stacks per iteration: produced in its body or carried, not captured."""
    per_iteration = (_produced_storages(loop.body.ops) - _preexisting_storages(loop.body)) | {
        f.storage for f in loop.carries
    }
    yield from (t.storage for t in loop.saved if t.storage in per_iteration)


def _produced_storages(ops: Iterable[Op]) -> set[Storage]:
    """Return the storages that ops produce, except the stacked residuals of inner loops."""
    return {t.storage for op in ops for t in op.results if not _is_stacked(t)}


def _preexisting_storages(graph: Graph) -> set[Storage]:
    """Return the storages that no op in a graph or body produces."""
    return {t.storage for t in graph.tensors if t.producer is None}


def _is_stacked(t: Tensor) -> bool:
    """Whether a tensor is a stacked residual of a loop."""
    return t.producer is not None and t.producer.loop is not None and t in t.producer.loop.pieces
