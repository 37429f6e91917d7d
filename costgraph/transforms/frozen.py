"""Which parameters are trained: others have neither gradient nor state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ..algebra.symbols import shown
from ..errors import GraphError
from ..graph.graph import Graph
from ..graph.tensor import Tensor
from .rewrite import Rewriter

__all__ = ["answers", "patterns_of", "with_frozen"]


def with_frozen(graph: Graph, freeze: object, trainable: object) -> Graph:
    """Return the graph with some of its parameters frozen, or the graph where nothing is asked for.

    Patterns are of names or scopes: of what is frozen, or of what alone is not. GraphError if a pattern is none, or no
    parameter answers to it, or there are patterns of both kinds.
    """
    if freeze is None and trainable is None:
        return graph
    if freeze is not None and trainable is not None:
        raise GraphError("training_step: freeze beside trainable, expected one of the two")
    what, given = ("freeze", freeze) if trainable is None else ("trainable", trainable)
    patterns = patterns_of(f"training_step: {what}", given, [t.name for t in _parameters(graph)])
    return _Freezer(patterns, named=trainable is None).run(graph)


def _parameters(graph: Graph) -> Iterator[Tensor]:
    return (t for g in graph.bodies() for t in g.tensors if t.role == "param" and t.producer is None)


def patterns_of(place: str, given: object, names: Sequence[str]) -> Sequence[str]:
    """Return patterns of names or scopes; GraphError where one is none, or no name answers to it."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise GraphError(f"{place} {shown(given)}, expected names or scopes, such as 'layers/*'")
    for pattern in patterns:
        if not any(answers(name, [pattern]) for name in names):
            raise GraphError(f"{place} {pattern!r} is no parameter or scope, expected some of {', '.join(names)}")
    return patterns


def answers(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter, or a scope that it is in, has a name of such a pattern."""
    levels = name.split("/")
    scopes = ["/".join(levels[: n + 1]) for n in range(len(levels))]
    return any(fnmatchcase(scope, pattern) for scope in scopes for pattern in patterns)


class _Freezer(Rewriter):
    def __init__(self, patterns: Sequence[str], *, named: bool) -> None:
        super().__init__()
        self.patterns, self.named = patterns, named

    def source(self, old: Tensor, new: Graph, suffix: str) -> Tensor:
        made: Tensor = super().source(old, new, suffix)
        if old.role == "param" and answers(old.name, self.patterns) == self.named:
            made.requires_grad = False
        return made
