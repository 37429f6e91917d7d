"""A fast memory, simulated element by element: what schedules of a contraction load and store."""

import heapq
import random
import re
from collections import OrderedDict
from itertools import product

_TERM = re.compile(r"([a-z])(?:\*(\d+))?|(-?\d+)")


def _place(dim, point):
    """Position along one axis at an index point."""
    total = 0
    for name, factor, offset in _TERM.findall(dim.replace("+", " ")):
        total += point[name] * int(factor or 1) if name else int(offset)
    return total


class Nest:
    """Index points of a pattern, and the elements that each of them reads and adds to."""

    def __init__(self, pattern, sizes, shapes, bytes_=4, same=False):
        left, _, right = pattern.partition("->")
        self.operands = [part.split() for part in left.split(",")]
        self.result = right.split()
        self.sizes, self.shapes = sizes, shapes
        self.weights = bytes_ if isinstance(bytes_, tuple) else (bytes_,) * (len(self.operands) + 1)
        self.same = same  # all operands are one tensor
        self.made = len(self.operands)
        self.begun, self.held = {self.made}, set()  # arrays that begin in the cache, and such as are never written

    def elements(self, point):
        """(array, place) of every operand that is no padding, and of the result."""
        out = []
        for i, dims in enumerate([*self.operands, self.result]):
            place = tuple(_place(d, point) for d in dims)
            if all(0 <= x < n for x, n in zip(place, self.shapes[i], strict=True)):
                out.append((0 if self.same and i < self.made else i, place))
        return out

    def blocks(self, loops):
        """Blocks of a loop nest, each as the index points in it; a loop runs over some indices as if they were one."""
        cut = []
        for names, length in loops:
            places = [dict(zip(names, at, strict=True)) for at in product(*(range(self.sizes[n]) for n in names))]
            cut.append([places[i : i + length] for i in range(0, len(places), length)])
        for block in product(*cut):
            yield [{k: v for part in parts for k, v in part.items()} for parts in product(*block)]

    def accesses(self, loops):
        """The elements of every index point, block by block."""
        return [self.elements(p) for block in self.blocks(loops) for p in block]


def least_recently_used(nest, accesses, room):
    """Bytes loaded and stored where what was used least recently goes first; everything is written at the end."""
    inside, dirty, made, moved, used = OrderedDict(), set(), set(), 0, 0
    for elements in accesses:
        for e in elements:
            weight = nest.weights[e[0]]
            if e in inside:
                inside.move_to_end(e)
            else:
                result = e[0] in nest.begun
                moved += weight if not result or e in made else 0  # a new sum begins in the cache
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
    """The same where what is used again last goes first (Belady 1966)."""
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
    """Bytes moved and most bytes held where each array's block is fetched as it changes, and dropped before that."""
    held = [set() for _ in (*nest.operands, nest.result)]
    moved = most = 0
    made = set()
    for block in nest.blocks(loops):
        found = [set() for _ in held]
        for array, place in (e for p in block for e in nest.elements(p)):
            found[array].add(place)
        for i, new in enumerate(found):
            if new != held[i]:
                # of a result what is replaced is written, and what was there before is read again
                count = len(new) if i < nest.made else len(held[i]) + len(new & made)
                moved += count * nest.weights[i]
                made |= new if i == nest.made else set()
                held[i] = new
        most = max(most, sum(len(s) * w for s, w in zip(held, nest.weights, strict=True)))
    return moved + len(held[-1]) * nest.weights[-1], most


def loops_of(nest, seed):
    """Loops over all indices in some order, with blocks of some lengths."""
    draw = random.Random(seed)
    order = draw.sample(sorted(nest.sizes), len(nest.sizes))
    return [((n,), draw.randint(1, nest.sizes[n])) for n in order]
