"""Equal blocks of a graph turned into a Repeat: what was written out block by block has a depth again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...algebra.polynomial import poly
from ...algebra.symbols import dims, is_name, shown
from ...errors import GraphError
from ...graph.arguments import need_flag
from ...graph.graph import Graph, need_graph
from ...graph.sizes import known_names
from .around import Around
from .build import Folder
from .equal import Differs
from .match import Match
from .runs import FEWEST, Labels, Numbered, Run, find_runs, stacks_of

__all__ = ["equal_blocks", "fold", "without_an_edge"]


def fold(graph: Graph, scope: str | None = None, count: str = "L", /, *, default: bool = False) -> Graph:
    """Turn the equal blocks of a stack into loops, so that their number is a symbol.

    Parameters
    ----------
    graph : Graph
        With one op for each call in each block, as a trace or `unroll` makes it; it stays as it is.
    scope : str, optional
        Path whose children `0`, `1`, ... are the blocks, such as `transformer/h`; of an unrolled graph, the name of the
        loop. By default every stack that the paths of ops show, as a trace gives them, and that has equal blocks; of
        stacks in each other the outer one, where its blocks are equal.
    count : str
        Name of the symbol for the number of blocks. Where several stacks are found, each has a symbol of this name
        and its path without what all paths begin with, such as `L_encoder_layer`.
    default : bool
        Whether the number of blocks that were there is the symbol's default size, as presets have them.

    Returns
    -------
    Graph
        With a Repeat for each pass over the blocks: forward, backward (in reverse, reading what the forward pass left
        behind, one storage a block) and the updates of an optimizer. Bound to the
        number of blocks that were there, equal to the given graph in every cost; bound to another one, to the graph of
        a model with so many blocks. Blocks at either end that are not like the others stay outside of the loops and
        count as well. Layers that take turns, as of two kinds, are a block together: the loop runs L/2 times.

    Raises
    ------
    GraphError
        If there are no such blocks, fewer than three neighbours are equal (the text names the first op that differs,
        and how), something outside reads what one block in the middle makes, or the symbol is in use.

    Notes
    -----
    Blocks are equal where their ops are, one by one in program order: kind, phase, facts, shapes, layouts, and
    what they read: something of the same block, of the one before, of the same block in an earlier pass, a parameter
    that each block has for itself, or one tensor that all of them share. Ops without a scope that stand between two
    blocks belong to the first of them.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     for i in range(4):
    ...         with cg.scope(f"h/{i}"):
    ...             x = x + cg.relu(x @ g.param("w", (D, D)))
    ...     g.output(x)
    >>> f = cg.fold(g)
    >>> cg.matmul_flops(f), cg.param_count(f)
    (2*B*D**2*L, D**2*L)
    >>> cg.peak_memory(f, L=4, B=2, D=3) == cg.peak_memory(g, B=2, D=3)
    True
    """
    need_graph("fold", graph)
    need_flag(f"fold of graph {graph.name!r}", default=default)
    if scope is None:
        return _fold_all(graph, count, default)
    if not isinstance(scope, str):
        raise GraphError(f"fold of graph {graph.name!r}: scope {shown(scope)}, expected a path such as 'transformer/h'")
    if not isinstance(count, str) or not is_name(count) or count in known_names(graph):
        raise GraphError(
            f"fold of graph {graph.name!r}: count {shown(count)}, expected the name of a symbol that is not in use"
        )
    labels, match = _matched(graph, scope)
    outside, rest = labels.count - len(match.blocks), labels.layers % labels.period
    around = labels.period * outside - (labels.period - rest if rest else 0)  # the last layers are less than a block
    new = Folder(match, Around(match), (poly(dims(count)) - around) / labels.period).run(graph)
    with new:
        if around:
            new.assume(f"{count} >= {around + labels.period}")
        if default:
            new.defaults = new.defaults | {count: labels.layers}
    return new


def _fold_all(graph: Graph, count: str, default: bool) -> Graph:
    """Fold every stack that has equal blocks; the error is that of the first one where none has."""
    found: list[str] = []
    refused: GraphError | None = None
    for scope in stacks_of(graph):
        if any(not outer or scope.startswith(f"{outer}/") for outer in found):
            continue
        try:
            fold(graph, scope, count)
        except GraphError as error:
            refused = refused or error
        else:
            found.append(scope)
    if not found:
        raise refused or GraphError(
            f"fold of graph {graph.name!r}: no scope has blocks 0, 1, ..., expected a graph with a stack of layers"
        )
    for scope, name in zip(found, _names(count, found), strict=True):
        graph = fold(graph, scope, name, default=default)
    return graph


def _names(count: str, scopes: Sequence[str]) -> list[str]:
    """Return a name for the depth of each stack: those of several have its path behind them, from where these part."""
    if len(scopes) == 1:
        return [count]
    paths = [scope.split("/") for scope in scopes]
    alike = next(i for i, levels in enumerate(zip(*paths, strict=False)) if len(set(levels)) > 1)
    return [re.sub(r"\W", "_", "_".join((count, *path[alike:]))) for path in paths]


def _matched(graph: Graph, scope: str) -> tuple[Labels, Match]:
    """Compare the blocks of a stack: single layers, or as few as take turns."""
    labels = Labels(graph, scope)
    if (period := labels.taking_turns()) > 1:
        labels = Labels(graph, scope, period)
    return labels, equal_blocks(graph, labels, find_runs(graph.ops, labels))


def equal_blocks(graph: Graph, labels: Numbered, runs: Sequence[Run], blocks: range | None = None) -> Match:
    """Compare some blocks, or all; those at the edges that are not like the others are left out."""
    blocks = range(labels.count) if blocks is None else blocks
    while True:
        try:
            return Match(graph, labels, runs, blocks)
        except Differs as error:
            blocks = without_an_edge(graph, blocks, error)


def without_an_edge(graph: Graph, blocks: range, error: Differs) -> range:
    """Return the larger part of blocks of which two neighbours differ; GraphError if it is small."""
    after = error.low + 1
    front = after - blocks.start <= blocks.stop - after
    blocks = range(after, blocks.stop) if front else range(blocks.start, after)
    if len(blocks) < FEWEST:
        raise GraphError(
            f"fold of graph {graph.name!r}: {error}, expected {FEWEST} equal blocks in a row at least, apart "
            f"from those at the edges"
        ) from None
    return blocks
