"""In which order a product of several tensors is contracted: the cheapest for all sizes, or all that may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from ..algebra.dominance import Relations
from ..algebra.extremum import Max, Min
from ..algebra.polynomial import ONE, ZERO, Poly, atom, poly
from ..algebra.pruning import prune
from ..errors import GraphError

__all__ = ["Orders", "best_orders"]

# 2**n subsets, each split in two: 8 operands are 3,000 splits
_MOST_OPERANDS = 8

Path = tuple[tuple[int, int], ...]
Tree = tuple["Tree", "Tree"] | int


class Orders(NamedTuple):
    """Contraction orders that no other one beats for all sizes."""

    paths: list[Path]
    """Pairs of positions, as opt_einsum writes them."""
    flops: Poly
    """FLOPs: of the one path, or the Min over them."""
    workspace: Poly
    """Elements of the intermediates that live at once, the most over the paths that are best for sizes above 1."""


def best_orders(
    axes: Sequence[frozenset[str]], result: frozenset[str], extents: Mapping[str, Poly], relations: Relations
) -> Orders:
    """Find the orders by dynamic programming over subsets, keeping what dominance cannot decide.

    GraphError if there are more operands than are searched: the caller has to give the order.
    """
    n = len(axes)
    if n > _MOST_OPERANDS:
        raise GraphError(f"einsum of {n} operands: expected order=, as at most {_MOST_OPERANDS} are searched")
    everything = frozenset(range(n))

    def kept(part: frozenset[int]) -> frozenset[str]:
        outside = result.union(*(axes[i] for i in everything - part))
        return frozenset().union(*(axes[i] for i in part)) & outside if part != everything else result

    def cost(a: frozenset[int], b: frozenset[int]) -> Poly:
        before = (axes[min(a)] if len(a) == 1 else kept(a)) | (axes[min(b)] if len(b) == 1 else kept(b))
        points = prod((extents[x] for x in sorted(before)), start=ONE)
        return 2 * points if before - kept(a | b) else points

    best: dict[frozenset[int], list[tuple[Poly, Tree]]] = {frozenset([i]): [(ZERO, i)] for i in range(n)}
    for size in range(2, n + 1):
        for part in map(frozenset, combinations(range(n), size)):
            found = []
            first = min(part)
            for k in range(size - 1):
                for rest in combinations(sorted(part - {first}), k):
                    a = frozenset((first, *rest))
                    b = part - a
                    here = cost(a, b)
                    found += [(x + y + here, (s, t)) for x, s in best[a] for y, t in best[b]]
            best[part] = prune(found, relations, largest=False)
    top = best[everything]
    flops = top[0][0] if len(top) == 1 else atom(Min(*(p.expr for p, _ in top)))
    spaces = [_space(tree, axes, kept, extents)[1] for tree in _ordinary(top)]
    return Orders([_path(tree, n) for _, tree in top], flops, poly(Max(*(s.expr for s in spaces))))


def _ordinary(orders: list[tuple[Poly, Tree]]) -> list[Tree]:
    """Leave out orders that are best only where sizes are 1: an outer product there is as small as anything."""
    names = {k for p, _ in orders for k in p.generators() if k[0] != "~"}
    larger = {k: Poly({((k, 1),): 1}) + 1 for k in names}
    return [tree for _, tree in prune([(p.substitute(larger), tree) for p, tree in orders], largest=False)]


def _path(tree: Tree, n: int) -> Path:
    """Write a tree as positions in a list from which each pair is taken and to whose end its product goes."""
    steps: list[tuple[int, int]] = []
    places: list[object] = list(range(n))

    def visit(node: Tree) -> Tree:
        if isinstance(node, int):
            return node
        a, b = visit(node[0]), visit(node[1])
        i, j = sorted((places.index(a), places.index(b)))
        steps.append((i, j))
        places.pop(j)
        places.pop(i)
        places.append(node)
        return node

    visit(tree)
    return tuple(steps)


def _space(
    tree: Tree,
    axes: Sequence[frozenset[str]],
    kept: Callable[[frozenset[int]], frozenset[str]],
    extents: Mapping[str, Poly],
) -> tuple[frozenset[int], Poly]:
    """Return the operands under a tree and the elements of the intermediates made under it, itself left out."""
    if isinstance(tree, int):
        return frozenset([tree]), ZERO
    (a, x), (b, y) = (_space(t, axes, kept, extents) for t in tree)
    own = [prod((extents[n] for n in sorted(kept(p))), start=ONE) for p in (a, b) if len(p) > 1]
    return a | b, sum([x, y, *own], start=ZERO)
