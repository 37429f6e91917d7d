"""Element-wise simulation of a fast memory: loads and stores of contraction schedules."""

import heapq
import random
import re
from collections import OrderedDict
from itertools import product

_TERM = re.compile(r"([a-z])(?:\*(\d+))?|(-?\d+)")


def _place(dim, point):
    """Return the position along one axis at an index point."""
    total = 0
    for name, factor, offset in _TERM.findall(dim.replace("+", " ")):
        total += point[name] * int(factor or 1) if name else int(offset)
    return total


class Nest:
    """Index points of a contraction, with the elements that each point reads and accumulates."""

    def __init__(self, pattern, sizes, shapes, bytes_=4, same=False):
        left, _, right = pattern.partition("->")
        self.operands = [part.split() for part in left.split(",")]
        self.result = right.split()
        self.sizes, self.shapes = sizes, shapes
        self.weights = bytes_ if isinstance(bytes_, tuple) else (bytes_,) * (len(self.operands) + 1)
        self.same = same  # all operands are one tensor
        self.made = len(self.operands)
        self.begun, self.held = {self.made}, set()  # arrays that start in the cache, and arrays that are never written

    def elements(self, point):
        """Return (array, place) of every operand outside the padding, and of the result."""
        out = []
        for i, dims in enumerate([*self.operands, self.result]):
            place = tuple(_place(d, point) for d in dims)
            if all(0 <= x < n for x, n in zip(place, self.shapes[i], strict=True)):
                out.append((0 if self.same and i < self.made else i, place))
        return out

    def blocks(self, loops):
        """Yield the blocks of a loop nest as lists of index points; a loop over several indices treats them as one."""
        cut = []
        for names, length in loops:
            places = [dict(zip(names, at, strict=True)) for at in product(*(range(self.sizes[n]) for n in names))]
            cut.append([places[i : i + length] for i in range(0, len(places), length)])
        for block in product(*cut):
            yield [{k: v for part in parts for k, v in part.items()} for parts in product(*block)]

    def accesses(self, loops):
        """Yield the elements of every index point, block by block."""
        return [self.elements(p) for block in self.blocks(loops) for p in block]


def least_recently_used(nest, accesses, room):
    """Return bytes loaded and stored under LRU eviction; all results are written at the end."""
    inside, dirty, made, moved, used = OrderedDict(), set(), set(), 0, 0
    for elements in accesses:
        for e in elements:
            weight = nest.weights[e[0]]
            if e in inside:
                inside.move_to_end(e)
            else:
                result = e[0] in nest.begun
                moved += weight if not result or e in made else 0  # a new sum starts in the cache
                inside[e] = None
                used += weight
                made |= {e} if result else set()
            dirty |= {e} if e[0] in nest.begun else set()
        while used > room:
            old, _ = inside.popitem(last=False)
            used -= nest.weights[old[0]]
            if old in dirty:
                dirty.discard(old)
                moved += nest.weights[old[0]]
    return moved + sum(nest.weights[e[0]] for e in dirty)


def ideal(nest, accesses, room):
    """Return the same under optimal eviction, furthest next use first (Belady 1966)."""
    uses = {}
    for at, elements in enumerate(accesses):
        for e in elements:
            uses.setdefault(e, []).append(at)
    left = {e: iter([*at[1:], len(accesses)]) for e, at in uses.items()}
    inside, dirty, made, moved, used, heap = {}, set(), set(), 0, 0, []
    for elements in accesses:
        for e in elements:
            weight = nest.weights[e[0]]
            if e not in inside:
                result = e[0] in nest.begun
                moved += weight if not result or e in made else 0
                used += weight
                made |= {e} if result else set()
            dirty |= {e} if e[0] in nest.begun else set()
            inside[e] = next(left[e])
            heapq.heappush(heap, (-inside[e], e))
        while used > room:
            then, old = heapq.heappop(heap)
            if inside.get(old) != -then:
                continue
            del inside[old]
            used -= nest.weights[old[0]]
            if old in dirty and not (old[0] in nest.held and then == -len(accesses)):
                moved += nest.weights[old[0]]
            dirty.discard(old)
    return moved + sum(nest.weights[e[0]] for e in dirty if e[0] not in nest.held)


def by_blocks(nest, loops):
    """Return bytes moved and peak bytes held for blocks loaded when they change, after evicting the old ones."""
    held = [set() for _ in (*nest.operands, nest.result)]
    moved = most = 0
    made = set()
    for block in nest.blocks(loops):
        found = [set() for _ in held]
        for array, place in (e for p in block for e in nest.elements(p)):
            found[array].add(place)
        for i, new in enumerate(found):
            if new != held[i]:
                # a replaced result block is written, and its earlier contents are loaded again
                count = len(new) if i < nest.made else len(held[i]) + len(new & made)
                moved += count * nest.weights[i]
                made |= new if i == nest.made else set()
                held[i] = new
        most = max(most, sum(len(s) * w for s, w in zip(held, nest.weights, strict=True)))
    return moved + len(held[-1]) * nest.weights[-1], most


def loops_of(nest, seed):
    """Draw loops over all indices in some order, with some block lengths."""
    draw = random.Random(seed)
    order = draw.sample(sorted(nest.sizes), len(nest.sizes))
    return [((n,), draw.randint(1, nest.sizes[n])) for n in order]
