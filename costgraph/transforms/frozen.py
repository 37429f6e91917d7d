"""Which parameters are trained: others have neither gradient nor state."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GraphError
from ..graph.graph import Graph
from ..graph.tensor import Tensor
from .rewrite import Rewriter
from .selecting import Names, patterns_of, split_at_layers

__all__ = ["with_frozen"]


def with_frozen(graph: Graph, freeze: object, trainable: object) -> Graph:
    """Return the graph with some of its parameters frozen, or the graph where nothing is asked for.

    Patterns are of names, scopes or layers: of what is frozen, or of what alone is not. GraphError if a pattern is
    none, or no parameter answers to it, or there are patterns of both kinds.
    """
    if freeze is None and trainable is None:
        return graph
    if freeze is not None and trainable is not None:
        raise GraphError("training_step: freeze beside trainable, expected one of the two")
    what, given = ("freeze", freeze) if trainable is None else ("trainable", trainable)
    graph = split_at_layers(f"training_step: {what}", graph, given)
    names = Names(graph)
    patterns = patterns_of(f"training_step: {what}", given, names, graph.params)
    return _Freezer(names, patterns, named=trainable is None).run(graph)


class _Freezer(Rewriter):
    def __init__(self, names: Names, patterns: Sequence[str], *, named: bool) -> None:
        super().__init__()
        self.names, self.patterns, self.named = names, patterns, named

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        made: Tensor = super().source(old, new, suffix)
        if old.role == "param" and self.names.answers(old, self.patterns) == self.named:
            made.requires_grad = False
        return made
