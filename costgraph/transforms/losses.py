"""Losses: what closes a forward graph that a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..algebra.symbols import shown
from ..errors import GraphError, ShapeError
from ..graph.graph import Graph
from ..graph.tensor import Tensor
from ..nn.losses import binary_cross_entropy, cross_entropy
from ..ops.blocks import fused
from ..ops.collectives import need_of_all
from ..ops.index import arange
from ..ops.operators import transpose
from ..ops.pointwise import pointwise
from ..ops.reduce import reduce
from .statistics import Trained

__all__ = ["Loss", "with_loss"]

Loss = Callable[..., Tensor]


def _cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross-entropy against targets, which become an input."""
    targets = logits.graph.input("targets", [n.expr for n in logits.sizes[:-1]], dtype="int64")
    return cross_entropy(logits, targets)


def _contrastive(logits: Tensor) -> Tensor:
    """Return the mean of the cross-entropies of rows and of columns: the n-th row belongs to the n-th column.

    Radford et al. 2021 (arXiv 2103.00020), figure 3.
    """
    if logits.ndim != 2 or not logits.graph.same(*logits.sizes):
        raise ShapeError(f"loss 'contrastive' of {logits!r}: expected as many rows as columns")
    own = arange(logits.sizes[0], name="targets")
    return (cross_entropy(logits, own) + cross_entropy(transpose(logits), own)) / 2


def _binary_cross_entropy(p: Tensor) -> Tensor:
    """Return the cross-entropy of probabilities against targets of 0 or 1, which become an input."""
    return binary_cross_entropy(p, p.graph.input("targets", [n.expr for n in p.sizes], dtype=p.dtype))


def _mean_squared_error(made: Tensor) -> Tensor:
    """Return the mean of squared differences from targets, which become an input."""
    targets = made.graph.input("targets", [n.expr for n in made.sizes], dtype=made.dtype)
    squares = fused("mse", lambda made, targets: pointwise("square", made - targets), made, targets)
    assert isinstance(squares, Tensor)
    names = " ".join(f"a{i}" for i in range(made.ndim))
    return reduce(squares, f"{names} -> ", "mean") if made.ndim else squares


#: Losses that a model names.
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "contrastive": _contrastive,
    "binary_cross_entropy": _binary_cross_entropy,
    "mean_squared_error": _mean_squared_error,
}


def with_loss(graph: Graph, loss: str | Loss | None = None) -> Graph:
    """Return the graph with its loss as its only output.

    The loss is a name such as `cross_entropy`, or a function of the outputs that returns a scalar; by default the one
    that the graph names, and none is added to a graph with one scalar output. GraphError if it has neither a scalar
    output nor a loss.
    """
    need_of_all("training_step", graph)
    named = graph.loss if loss is None else loss
    scalars = [t for t in graph.outputs if not t.sizes]
    new = Trained().run(graph)
    with new:
        new.loss = None
        if loss is not None or len(scalars) != 1 or len(graph.outputs) != 1:
            new.outputs = [_closed(new, named)]
    return new


def _closed(new: Graph, named: object) -> Tensor:
    """Add a loss, of a name or a function, to a graph that is open."""
    if named is None:
        raise GraphError(
            f"training_step: graph {new.name!r} has {len(new.outputs)} outputs and names no loss, expected one "
            f"scalar output, or loss='cross_entropy' or a function of the outputs"
        )
    function = LOSSES.get(named) if isinstance(named, str) else named
    if not callable(function):
        raise GraphError(f"training_step: loss {shown(named)}, expected one of {', '.join(LOSSES)} or a function")
    if isinstance(named, str) and len(new.outputs) != 1:
        raise GraphError(
            f"training_step: loss {named!r} of graph {new.name!r}, which has {len(new.outputs)} outputs, expected one, "
            f"or a function of the outputs"
        )
    made = function(*new.outputs)
    if not isinstance(made, Tensor) or made.sizes:
        raise GraphError(f"training_step: the loss is {made!r}, expected a scalar")
    return made
