"""Which ops make up one layer of a stack: in a loop, in an unrolled loop, and in numbered scopes of a program.

A layer is one iteration of a loop. Where layers of several kinds take turns, it is each scope that
`costgraph.nn.layers` has marked in `Graph.layers`. `unroll` adds each iteration to `Graph.layers`, as a scope with the
iteration behind it: `layers.i3`, or `layers/local.i0.i3`. Without a loop, the scopes `h/0`, `h/1`, ... are layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ..graph.graph import Graph
from ..graph.op import Op
from ..graph.scopes import base_name, iterations_of, scopes_of

__all__ = ["Layers", "layers_of"]


def layers_of(loop: Op, suffix: str) -> set[str]:
    """Return the entries of `Graph.layers` for one iteration of a loop that is unrolled.

    Parameters
    ----------
    loop : Op
        The loop.
    suffix : str
        The iteration, with those of the loops around it, such as `.i0.i3`.

    Returns
    -------
    set of str
        The scope of the loop, unless it is inside another layer, and the marked scopes that its own ops stand in.
    """
    if loop.phase != "forward" or loop.body is None:
        return set()
    marked = loop.graph.root.layers
    scope = base_name(loop.name)
    around = {level for level in scopes_of(scope) if level in marked}
    own = {found for op in loop.body.ops for found in scopes_of(op.scope) if found in marked and found not in around}
    outermost = suffix.count(".i") == 1
    return {f"{each}{suffix}" for each in (own | {scope} if outermost else own)}


class Layers:
    """The layers that the ops of a graph, or of the body of a loop, belong to.

    Parameters
    ----------
    graph : Graph
        The graph or the body.
    """

    def __init__(self, graph: Graph) -> None:
        self.marked = graph.root.layers
        self.stacks = _stacks(graph)

    def layer(self, op: Op) -> str:
        """Return the innermost layer that an op stands in, empty where it stands in none."""
        return self.layer_of(op.scope, op.name)

    def layer_of(self, scope: str, name: str) -> str:
        """Return the innermost layer for a scope and a name."""
        suffixes = [*accumulate(iterations_of(name))]
        for own in reversed(scopes_of(scope)):
            for suffix in reversed(suffixes):
                if f"{own}{suffix}" in self.marked:
                    return f"{own}{suffix}"
            if own in self.marked and not suffixes:
                return own
        return self.numbered(scope)

    def period(self, op: Op) -> tuple[str, int] | None:
        """Return the outermost loop or stack that an op stands in, and the iteration; None outside of all."""
        return self.period_of(op.scope, op.name)

    def period_of(self, scope: str, name: str) -> tuple[str, int] | None:
        """Return the outermost loop or stack, and the iteration, for a scope and a name."""
        iterations = iterations_of(name)
        for own in scopes_of(scope):
            if iterations and f"{own}{iterations[0]}" in self.marked:
                return own, int(iterations[0][2:])
        stack, _, number = self.numbered(scope).rpartition("/")
        return (stack, int(number)) if number else None

    def numbered(self, scope: str) -> str:
        """Return the numbered scope of a stack that a scope is in."""
        levels = scope.split("/")
        for n, level in enumerate(levels):
            if level.isdigit() and "/".join(levels[:n]) in self.stacks:
                return "/".join(levels[: n + 1])
        return ""


def _stacks(graph: Graph) -> set[str]:
    """Return the scopes whose numbered children are layers.

    Of stacks inside each other, the outer one has the layers, unless all of its children differ, such as the stages of
    a hierarchical model. Inside the body of a loop, only the scope of the loop itself counts: an iteration is a layer,
    whatever numbered parts it has.
    """
    owner = graph.owner
    inside = None if owner is None or owner.loop is None else base_name(owner.name)
    children: dict[str, dict[str, list[object]]] = {}
    for op in graph.ops:
        if op.phase != "forward":
            continue
        levels = op.scope.split("/")
        for n, level in enumerate(levels):
            stack = "/".join(levels[:n])
            if level.isdigit() and (inside is None or stack == inside):
                sizes = tuple(t.sizes for t in op.results)
                row = ("/".join(levels[n + 1 :]), op.kind.name, sizes)
                children.setdefault(stack, {}).setdefault(level, []).append(row)
    found = set[str]()
    for stack, parts in children.items():  # in program order, an outer one before those inside it
        if any(_is_inside(stack, outer) for outer in found):
            continue
        nested = any(other != stack and _is_inside(other, stack) for other in children)
        if nested and len(parts) > 1 and not _any_equal(parts.values()):
            continue
        found.add(stack)
    return found


def _is_inside(stack: str, outer: str) -> bool:
    return stack != outer and (not outer or stack.startswith(f"{outer}/"))


def _any_equal(parts: Iterable[Sequence[object]]) -> bool:
    rows = [tuple(part) for part in parts]
    return len(set(rows)) < len(rows)
