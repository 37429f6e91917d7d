"""Bodies and what is around them: tensors of the one stand for tensors of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import GraphError
from .changes import append, modify
from .strides import Sizes
from .tensor import Tensor

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["adopt", "capture", "export", "formal"]


def formal(graph: Graph, like: Tensor, name: str, sizes: Sizes, strides: Sizes, pieces: int | None = None) -> Tensor:
    """Add an input of a body, which stands for a tensor outside."""
    pieces = like.storage.pieces if pieces is None else pieces
    tensor = Tensor(graph, graph.unique(name), sizes, like.dtype, role="formal", strides=strides, pieces=pieces,
                    host=like.storage.host)  # fmt: skip
    tensor.domain = like.domain
    append(graph, graph.formals, tensor)
    graph.add_node(tensor)
    return tensor


def adopt(graph: Graph, tensor: Tensor) -> Tensor:
    """Return the tensor as this graph sees it: itself, a captured one, or what a finished kernel hands out."""
    home = tensor.graph
    if home is graph or tensor in graph:
        return tensor
    ancestor = graph.parent
    while ancestor is not None and ancestor is not home:
        ancestor = ancestor.parent
    if ancestor is not None:
        return capture(graph, adopt(graph.parent, tensor))  # type: ignore[arg-type]  # it has an ancestor
    if home.fused and home.owner is not None:
        return adopt(graph, export(home, tensor))
    if home.owner is not None and home.root is graph.root:
        raise GraphError(
            f"tensor {tensor.name!r} is made inside {home.owner.name!r}: expected it among the results of its body"
        )
    raise GraphError(
        f"tensor {tensor.name!r} belongs to graph {home.root.name!r}, expected one of graph {graph.root.name!r}"
    )


def capture(graph: Graph, outer: Tensor) -> Tensor:
    """Return this body's input that stands for a tensor of the graph around it."""
    found = graph._captured.get(outer)
    if found is None:
        found = graph._captured[outer] = formal(graph, outer, f"{outer.name}.in", outer.sizes, outer.strides)
        found.offset = outer.offset
        graph.note(lambda: graph._captured.pop(outer, None))
    return found


def export(graph: Graph, tensor: Tensor) -> Tensor:
    """Return the outer tensor for one made inside this fused body: read outside, it has to reach memory."""
    owner = graph.owner
    assert owner is not None
    if tensor in graph.outputs:
        return owner.results[graph.outputs.index(tensor)]
    for outer, inner in graph._captured.items():
        if inner is tensor:
            return outer
    modify(owner.graph, owner.name)
    append(graph, graph.outputs, tensor)
    name = tensor.name if owner.results else None
    owner.graph.add_result(owner, owner.kind.infer(owner.operands)[len(graph.outputs) - 1], name)
    return owner.results[-1]
