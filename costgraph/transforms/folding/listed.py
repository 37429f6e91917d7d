"""Loops over a list of what turns of another have made: nothing counts them, and they are known by what is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ...graph.graph import Graph
from ...graph.op import Op
from ...ops.keep import Keep
from .cuts import Path, Turns
from .runs import FEWEST

__all__ = ["with_lists"]

#: Turns of a loop at the edges of which nothing need be read: first and last ones may stand apart.
_EDGES = 2


def with_lists(graph: Graph, turns: Turns) -> Turns:
    """Label the ops that go over what a loop has made, part by part, by turns of a loop of their own."""
    ops = graph.ops
    counts, played, paths = dict(turns.counts), dict(turns.played), dict(turns.paths)
    rows = [
        (found, around, loop)
        for (around, loop), reads in _reads(ops, turns).items()
        for found in _in_order(reads)
        if len(found) >= max(FEWEST, turns.played[loop] - _EDGES)
    ]
    starts = [found[0][0] for found, *_ in rows]
    for found, around, loop in sorted(rows, key=lambda row: row[0][0]):
        own = {op: turn for turn, part in _parts(ops, found, starts) for op in part}
        if any(paths.get(op) != turns.paths.get(op) or not _within(op, around, turns) for op in own):
            continue  # of such a loop already, or of turns of another one
        number = max(counts) + 1
        counts[number], played[number] = turns.counts[loop], turns.played[loop]
        for op, turn in own.items():
            paths[op] = (*around, (number, turn), *turns.paths.get(op, ())[len(around) :])
    return replace(turns, counts=counts, played=played, paths=paths)


def _within(op: Op, around: Path, turns: Turns) -> bool:
    return turns.paths.get(op, ())[: len(around)] == around


def _reads(ops: Sequence[Op], turns: Turns) -> dict[tuple[Path, int], list[tuple[int, int]]]:
    """Return where something of one turn of a loop is read, and of which, by what is around the reader and the loop."""
    out: dict[tuple[Path, int], list[tuple[int, int]]] = {}
    for i, op in enumerate(ops):
        around, found = turns.paths.get(op, ()), set[tuple[int, int]]()
        for t in op.operands if not isinstance(op.kind, Keep) else ():
            path = () if t.producer is None else turns.paths.get(t.producer, ())
            if len(path) > len(around) and path[: len(around)] == around:
                found.add(path[len(around)])
        for loop in {n for n, _ in found}:
            turn, *more = sorted((k for n, k in found if n == loop), reverse=True)
            if len(more) <= 1:  # no more than one beside the one before it
                out.setdefault((around, loop), []).append((i, turn))
    return out


def _in_order(reads: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the stretches in which turns are read one after the other, forward or back, with where each is first."""
    found: list[tuple[int, int]] = []
    for at, turn in reads:
        if found and turn == found[-1][1]:
            continue
        steps = {b - a for (_, a), (_, b) in pairwise([*found, (at, turn)])}
        if found and steps not in ({1}, {-1}):
            yield found
            found = []
        found.append((at, turn))
    yield found


def _parts(
    ops: Sequence[Op], found: Sequence[tuple[int, int]], others: Sequence[int]
) -> Iterator[tuple[int, Sequence[Op]]]:
    """Yield the ops of each turn, which begins where it reads its part.

    The last is as long as the one before it, unless another loop begins there.
    """
    starts = [at for at, _ in found]
    ends = [*starts[1:], min(2 * starts[-1] - starts[-2], *(n for n in others if n > starts[-1]), len(ops))]
    for (at, turn), end in zip(found, ends, strict=True):
        yield turn, ops[at:end]
