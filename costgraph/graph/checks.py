"""What a graph must keep: looked at when its context closes, when it is loaded and when it is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import networkx as nx

from ..errors import GraphError
from .op import Op
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["check", "overwritten_by"]


def check(graph: Graph) -> None:
    """Raise GraphError where a graph, or a body inside it, breaks a rule."""
    for g in graph.bodies():
        _check_nodes(g)
        _check_order(g)
        _check_overwritten(g)


def _check_nodes(graph: Graph) -> None:
    for node in graph.nodes:
        if not isinstance(node, Op | Tensor):
            raise GraphError(f"graph {graph.name!r}: node {node!r}, expected tensors and ops only")
    if not nx.is_directed_acyclic_graph(graph):
        raise GraphError(f"graph {graph.name!r}: its edges make a cycle, expected none")


def _check_order(graph: Graph) -> None:
    ready = {t for t in graph.tensors if t.producer is None}
    for op in graph.ops:
        for t in (*op.operands, *op.results):
            if t not in graph or not (graph.has_edge(t, op) if t in op.operands else graph.has_edge(op, t)):
                raise GraphError(f"op {op.name!r}: tensor {t.name!r} is not joined to it, expected an edge")
        late = next((t for t in op.operands if t not in ready), None)
        if late is not None:
            raise GraphError(f"op {op.name!r}: reads {late.name!r} before it is made, expected program order")
        if op.body is not None and op.body.fused and not op.results:
            raise GraphError(f"kernel {op.name!r}: nothing outside reads what it makes, expected a result that is used")
        ready.update(op.results)


def _behind(t: Tensor, first: Mapping[Storage, Tensor] = MappingProxyType({})) -> Iterator[Storage]:
    """Yield the storages that a tensor may lie in: its own, and that of a carry which a loop only hands on.

    `first` has the tensor that each storage was made for, where that is known: of a sum in place there are many views.
    """
    t = first.get(t.storage, t)
    while t.is_view and t.producer is not None:
        t = next(o for o in t.producer.operands if o.storage is t.storage)
    yield t.storage
    loop = None if t.producer is None else t.producer.loop
    if loop is None:
        return
    inputs = {f.storage: o for f, o in zip(loop.body.formals, loop.op.operands, strict=True)}
    handed = [inputs[s] for s in _behind(loop.body.outputs[loop.op.results.index(t)]) if s in inputs]
    carries = loop.starts
    # carries that change places may have been in any of them
    for o in dict.fromkeys((*handed, *(carries if any(h in carries for h in handed) else ()))):
        yield from _behind(o, first)


def overwritten_by(op: Op, first: Mapping[Storage, Tensor] = MappingProxyType({})) -> list[Storage]:
    """Storages of operands that an op leaves with other values: its own, or those that its iterations carry on."""
    written = op.kind.overwrites()
    if written:
        return [s for i in written for s in _behind(op.operands[i], first)]
    if op.body is None or op.loop is None:
        return []
    outside = {f.storage: t.storage for f, t in zip(op.body.formals, op.operands, strict=True)}
    return [outside[s] for inner in op.body.ops for s in overwritten_by(inner) if s in outside]


def _is_left(t: Tensor, op: Op) -> bool:
    """Whether what an op writes into is another part of a tensor's storage."""
    parts = [op.operands[i] for i in op.kind.overwrites()]
    if op.loop is not None:  # each iteration its slice of something
        written = {s for inner in op.loop.body.ops for s in overwritten_by(inner)}
        around = zip(op.loop.body.formals, op.operands, strict=True)
        parts = [o for f, o in around if f.storage in written]
        if not set(parts) <= set(op.loop.xs):
            return False
    return bool(parts) and all(t.apart(part) for part in parts)


def _check_overwritten(graph: Graph) -> None:
    """An op in place leaves nothing of the old values that it writes over: whoever reads them afterwards is wrong."""
    gone: dict[Tensor, Op] = {}
    first: dict[Storage, Tensor] = {}
    by_storage: dict[Storage, list[Tensor]] = {}
    for op in graph.ops:
        lost = None if op.kind.renames else next((t for t in op.operands if t in gone), None)
        if lost is not None:
            raise GraphError(f"op {op.name!r}: reads {lost.name!r}, which {gone[lost].name!r} has overwritten in place")
        for t in op.operands:
            first.setdefault(t.storage, t)
            by_storage.setdefault(t.storage, []).append(t)
        for storage in overwritten_by(op, first):
            before = by_storage.pop(storage, [])
            by_storage[storage] = [t for t in before if _is_left(t, op)]
            gone |= {t: op for t in before if t not in by_storage[storage]}
        for t in op.results:
            first.setdefault(t.storage, t)
            by_storage.setdefault(t.storage, []).append(t)
    lost = next((t for t in graph.outputs if t in gone), None)
    if lost is not None:
        raise GraphError(f"output {lost.name!r}, which {gone[lost].name!r} has overwritten in place")
