"""Equal blocks of a graph turned into a Repeat: what was written out block by block has a depth again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...algebra.polynomial import poly
from ...algebra.symbols import dims, is_name, shown
from ...errors import GraphError
from ...graph.graph import Graph, need_graph
from ...graph.op import Op
from ...graph.sizes import known_names
from .around import Around
from .build import Folder
from .equal import Differs, difference
from .match import Match
from .runs import FEWEST, Labels, Run, find_runs, stacks_of

__all__ = ["fold"]


def fold(graph: Graph, scope: str | None = None, count: str = "L", /) -> Graph:
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
        and its path without what all paths begin with, such as `L_encoder_layer`. It has no default size.

    Returns
    -------
    Graph
        With a Repeat for each pass over the blocks: forward, backward (in reverse, reading what the forward pass left
        behind, one storage a block) and the updates of an optimizer. Bound to the
        number of blocks that were there, equal to the given graph in every cost; bound to another one, to the graph of
        a model with so many blocks. Blocks at either end that are not like the others stay outside of the loops and
        count as well.

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
    if scope is None:
        return _fold_all(graph, count)
    if not isinstance(scope, str):
        raise GraphError(f"fold of graph {graph.name!r}: scope {shown(scope)}, expected a path such as 'transformer/h'")
    if not isinstance(count, str) or not is_name(count) or count in known_names(graph):
        raise GraphError(
            f"fold of graph {graph.name!r}: count {shown(count)}, expected the name of a symbol that is not in use"
        )
    labels = Labels(graph, scope)
    match = _matched(graph, labels, find_runs(graph.ops, labels))
    outside = labels.count - len(match.blocks)
    new = Folder(match, Around(match), poly(dims(count)) - outside).run(graph)
    if outside:
        with new:
            new.assume(f"{count} >= {outside + 1}")
    return new


def _fold_all(graph: Graph, count: str) -> Graph:
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
        graph = fold(graph, scope, name)
    return graph


def _names(count: str, scopes: Sequence[str]) -> list[str]:
    """Return a name for the depth of each stack: those of several have its path behind them, from where these part."""
    if len(scopes) == 1:
        return [count]
    paths = [scope.split("/") for scope in scopes]
    alike = next(i for i, levels in enumerate(zip(*paths, strict=False)) if len(set(levels)) > 1)
    return [re.sub(r"\W", "_", "_".join((count, *path[alike:]))) for path in paths]


def _matched(graph: Graph, labels: Labels, runs: Sequence[Run]) -> Match:
    """Compare the blocks; those at the edges that are not like the others are left out."""
    blocks = range(labels.count)
    while True:
        try:
            return Match(graph, labels, runs, blocks)
        except Differs as error:
            after = error.low + 1
            front = after - blocks.start <= blocks.stop - after
            blocks = range(after, blocks.stop) if front else range(blocks.start, after)
            if len(blocks) < FEWEST:
                hint = "; these alternate" if _alternate(graph.ops, labels, runs) else ""
                raise GraphError(
                    f"fold of graph {graph.name!r}: {error}, expected {FEWEST} equal blocks in a row at least, apart "
                    f"from those at the edges{hint}"
                ) from None


def _alternate(ops: Sequence[Op], labels: Labels, runs: Sequence[Run]) -> bool:
    """Whether every block is equal to the next but one, and none to the next."""
    run = runs[0]
    turns = [ops[a:b] for a, b in zip(run.starts, run.starts[1:], strict=False)]

    def equal(i: int, j: int) -> bool:
        names = [lambda name, block=run.blocks[k]: labels.relative(name, block) for k in (i, j)]
        pairs = zip(turns[i], turns[j], strict=False)
        return len(turns[i]) == len(turns[j]) and all(difference(a, b, (names[0], names[1])) is None for a, b in pairs)

    alike = [equal(i, i + 2) for i in range(len(turns) - 2)]
    return bool(alike) and all(alike) and not any(equal(i, i + 1) for i in range(len(turns) - 1))
