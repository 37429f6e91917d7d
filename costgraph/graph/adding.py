"""Nodes that come to a graph: sources that are declared, ops with their results, and the names of them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import networkx as nx

from ..algebra.polynomial import Poly
from ..algebra.symbols import is_level, shorten
from ..dtypes import DType
from ..dtypes import dtype as find_dtype
from ..errors import CostGraphError, GraphError, UnsupportedError
from .arguments import need_name, sizes_of
from .changes import modify
from .op import Op, OpKind, Result
from .scopes import current_graph, here, with_suffix
from .strides import is_integral, united
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["add_node", "add_op", "add_result", "added_since", "home", "source", "unique"]


def unique(graph: Graph, base: str) -> str:
    """Return the name, numbered if it is taken."""
    taken = graph.root._taken
    number = taken.get(base, 0)
    name = base
    while name in taken:
        name = f"{base}_{number}"
        number += 1
    _take(graph, base, max(number, 1))
    _take(graph, name, taken.get(name, 1))
    return name


def _take(graph: Graph, name: str, number: int = 1) -> None:
    """Take a name, with the number that the next one of it gets."""
    taken = graph.root._taken
    before = taken.get(name)
    taken[name] = number
    graph.note(lambda: taken.pop(name, None) if before is None else taken.__setitem__(name, before))


def home(graph: Graph) -> Graph:
    """Return where a parameter declared now belongs: the innermost body being built that is not fused."""
    found = current_graph(graph)
    while found.fused and found.parent is not None:
        found = found.parent
    return found


def source(
    graph: Graph,
    name: str,
    shape: Sequence[object],
    dtype: str | DType | None,
    role: str,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """Declare a tensor that no op makes."""
    modify(graph, f"{role} {shorten(str(name))}")
    if not isinstance(name, str) or not all(map(is_level, name.replace(".", "/").split("/"))):
        raise GraphError(f"{role} {shorten(str(name))}: expected a name of letters, digits, '_', '.' and '/'")
    full = with_suffix("/".join((*here().levels, name))) if role != "input" else name
    if full in graph.root._taken:
        raise GraphError(f"{role} {full!r}: the name is taken in graph {graph.root.name!r}, expected a new one")
    format_ = graph.root.dtype if dtype is None else find_dtype(dtype)
    tensor = Tensor(graph, full, sizes_of(shape, f"{role} {full!r}"), format_, role=role, requires_grad=requires_grad)
    with graph.whole():
        _take(graph, full)
        graph.add_node(tensor)
    return tensor


def add_node(graph: Graph, /, node: Tensor | Op, **attr: object) -> None:
    """Append a node."""
    if graph.frozen:
        modify(graph, f"add_node {node!r}")
    root, new = graph.root, [n for n in (node.sizes if isinstance(node, Tensor) else ()) if not is_integral(n)]
    if not root.quotients.issuperset(new):
        before, root.quotients = root.quotients, united(root.quotients, frozenset(new))
        graph.note(lambda: setattr(root, "quotients", before))
    nx.DiGraph.add_node(graph, node, **attr)
    graph.note(lambda: node in graph and nx.DiGraph.remove_node(graph, node))


def add_result(graph: Graph, op: Op, result: Result, name: str | None = None) -> None:
    """Attach one more result to an op."""
    base = op.operands[result.of] if result.of is not None else None
    tensor = Tensor(
        graph,
        unique(graph, name or op.name) if name or op.results else op.name,
        result.sizes,
        result.dtype,
        role="activation",
        strides=result.strides,
        offset=result.offset,
        storage=None if base is None else base.storage,
        pieces=result.pieces,
        host=any(t.storage.host for t in op.operands) if result.host is None else result.host,
    )
    tensor.storage.bytes += result.spare
    tensor.producer = op
    tensor.domain = result.domain
    before, op.results = op.results, (*op.results, tensor)
    graph.note(lambda: setattr(op, "results", before))
    graph.add_node(tensor)
    nx.DiGraph.add_edge(graph, op, tensor)


def add_op(graph: Graph, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None = None) -> Op:
    """Append an op; its results are inferred."""
    need_name(kind.name, name)
    operands = tuple(operands)
    foreign = next((t for t in operands if graph.frozen and t.graph.root is not graph.root), None)
    if foreign is not None:
        graph.adopt(foreign)  # which says more than that this one is finished
    modify(graph, name)
    with graph.whole():
        return _op(graph, kind, operands, name, phase)


def _op(graph: Graph, kind: OpKind, operands: Iterable[Tensor], name: str, phase: str | None) -> Op:
    adopted = tuple(graph.adopt(t) for t in operands)
    full = unique(graph, with_suffix("/".join((*here().levels, name))))
    try:
        need_one_memory(kind, adopted)
        results = kind.results_of(adopted)
        for i, result in enumerate(results):
            sizes_of(result.sizes, f"result {i + 1}")
    except CostGraphError as error:
        raise type(error)(f"{full!r} in graph {graph.root.name!r}: {error}") from None
    op = Op(graph, kind, full, adopted, full.rpartition("/")[0], phase or here().phase)
    graph.add_node(op)
    nx.DiGraph.add_edges_from(graph, ((t, op) for t in adopted))
    for result in results:
        add_result(graph, op, result)
    if op.body is not None:
        _share_scales(op)
    if op.loop is not None:
        _hand(graph, op.loop.handed_on())
    if any(t.dtype.kind == "complex" for t in (*adopted, *op.results)):
        _need_complex(op)
    return op


def need_one_memory(kind: OpKind, operands: Sequence[Tensor]) -> None:
    """Refuse operands of which some lie on the host and others on the device."""
    away = [t for t in operands if t.storage.host]
    here = next((t for t in operands if not t.storage.host), None)
    if away and here is not None and not kind.crosses:
        raise GraphError(
            f"{kind.name} of {away[0]!r} on the host and {here!r} on the device, expected a transfer of one of them"
        )


def _need_complex(op: Op) -> None:
    """Refuse an op whose FLOPs are counted for real numbers alone."""
    counted = op.kind.flops(op).by_kind()
    if any(counted.values()) and not op.kind.takes_complex:
        raise UnsupportedError(
            f"{op.name!r} in graph {op.graph.root.name!r}: {op.kind.name} of complex numbers has no rule that says "
            f"what it costs, expected real numbers, or an op of elements"
        )


def _share_scales(op: Op) -> None:
    """Give inputs of a body the same number of scales per element as the operands that they stand for."""
    assert op.body is not None
    pairs = [(f, t) for f, t in zip(op.body.formals, op.operands, strict=False) if f.dtype == t.dtype]
    scaled = [(f, t) for f, t in pairs if t.dtype.block is not None]
    for f, t in scaled:
        f.storage.bytes = f.storage.elements * t.element_bytes()
    for inner in op.body.ops if scaled else ():
        if inner.body is not None:
            _share_scales(inner)


def _hand(graph: Graph, storages: dict[Storage, tuple[Storage, Poly]]) -> None:
    handed = graph.root.handed
    handed.update(storages)
    graph.note(lambda: [handed.pop(s, None) for s in storages])


def added_since(graph: Graph, nodes: int) -> list[Op]:
    """Return the ops that were added since a graph had so many nodes, in program order."""
    added = [*islice(reversed(graph._node), len(graph) - nodes)]  # what networkx keeps nodes in
    return [node for node in reversed(added) if isinstance(node, Op)]
