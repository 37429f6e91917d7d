"""Iterations of a Repeat that differ in which of its tensors are one: an op that reads both reads it once.

What a loop starts from may be a tensor that its body captures as well, so that the two are one in the first iteration
alone; a body may hand a captured tensor on, or one result in two places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import sympy

from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import symbol
from ..graph.graph import Graph
from ..graph.loop import Loop
from ..graph.tensor import ALIASES, Storage

__all__ = ["aliased", "situations"]

Aliases = Mapping[Storage, tuple[Storage, Poly]]
Place = tuple[Storage, Poly]


@contextmanager
def aliased(aliases: Aliases) -> Iterator[None]:
    """Let regions of tensors be told in the storages that these stand for."""
    token = ALIASES.set({**ALIASES.get(), **aliases})
    try:
        yield
    finally:
        ALIASES.reset(token)


def situations(loop: Loop) -> list[tuple[Aliases, Poly]]:
    """Return which inputs of a Repeat's body are one tensor, and in how many iterations they are.

    For each situation it says what the storages of the body's inputs stand for; there is one in the ordinary case that
    nothing is read under two names.
    """
    count = loop.count
    seen, first = _followed(loop)
    if len(seen) == 1:
        return [(seen[0], count)]
    out = []
    for k, aliases in enumerate(seen):
        if k < first:
            times = smaller(ONE, at_least_zero(count - k)) if k else ONE
        else:  # every so many iterations from here on
            times = at_least_zero(poly(sympy.ceiling(((count - k) / (len(seen) - first)).expr)))
        if times:
            out.append((aliases, times))
    return out


def _followed(loop: Loop) -> tuple[list[Aliases], int]:
    """Follow the carries until a situation comes back; returns the situations and which one it is."""
    iteration = _iteration(loop.body)
    before = {name: poly(symbol(name)) - 1 for name in iteration.names()}
    fixed = dict(_entries(loop, iteration))
    state = [_resolved(t.storage, t.offset) for t in loop.starts]
    made: dict[tuple[Storage, int], Storage] = {}
    places = {f.storage: i for i, f in enumerate(loop.carries)}
    history: list[tuple[Place, ...]] = []
    while tuple(state) not in history:
        history.append(tuple(state))
        after = []
        for t in loop.nexts:
            if t.storage in places:
                base, delta = state[places[t.storage]]
                after.append((_older(made, base), delta.bind(before) + t.offset))
            elif t.storage in fixed:  # a slice is that of the iteration before, for the next one
                base, delta = fixed[t.storage]
                after.append((base, delta.bind(before) + t.offset))
            else:
                after.append((made.setdefault((t.storage, 0), _copy(t.storage)), t.offset))
        state = after
    first = history.index(tuple(state))
    inputs = [f.storage for f in loop.carries]
    told = [_told(loop.body, {**fixed, **dict(zip(inputs, s, strict=True))}) for s in history]
    if all(t == told[0] for t in told):
        return told[:1], 0
    return _shortened(told, first)


def _shortened(told: list[Aliases], first: int) -> tuple[list[Aliases], int]:
    """Leave out what comes back sooner than the carries themselves do."""
    if all(t == told[first] for t in told[first:]):
        told = told[: first + 1]
    while first and len(told) == first + 1 and told[first - 1] == told[first]:
        told.pop()
        first -= 1
    return told, first


def _copy(storage: Storage) -> Storage:
    """Stand for what an earlier iteration made: this one makes its own."""
    out = Storage.__new__(Storage)
    out.name, out.elements, out.bytes, out.role = storage.name, storage.elements, storage.bytes, storage.role
    return out


def _older(made: dict[tuple[Storage, int], Storage], base: Storage) -> Storage:
    """Return what stands for a tensor an iteration later: one that a body made is then older than its newest one."""
    key = next((k for k, s in made.items() if s is base), None)
    return base if key is None else made.setdefault((key[0], key[1] + 1), _copy(base))


def _resolved(storage: Storage, offset: Poly) -> Place:
    aliases = ALIASES.get()
    while storage in aliases:
        storage, delta = aliases[storage]
        offset = offset + delta
    return storage, offset


def _iteration(body: Graph) -> Poly:
    """Return the number of an iteration, of which a loop around has another one."""
    depth = 0
    while body.parent is not None:
        body, depth = body.parent, depth + 1
    return poly(symbol(f"iteration_{depth}"))


def _entries(loop: Loop, iteration: Poly) -> Iterator[tuple[Storage, Place]]:
    """Yield what the inputs of a body stand for that are the same in all iterations, slices apart."""
    for f, t in zip(loop.slices, loop.xs, strict=True):
        yield f.storage, _resolved(t.storage, t.offset + t.strides[0] * iteration)
    for f, t in zip(loop.captured, loop.shared, strict=True):
        yield f.storage, _resolved(t.storage, ZERO)  # its own offset is that of the outer one


def _told(body: Graph, places: Mapping[Storage, Place]) -> Aliases:
    """Keep what matters: storages under several names of which an op reads two."""
    bases = [base for base, _ in places.values()]
    shared = {name: place for name, place in places.items() if bases.count(place[0]) > 1}
    if not shared:
        return {}
    same = partial(_base, shared)
    for inner in body.walk():
        names = {t.storage for t in inner.operands}
        if len({same(n) for n in names}) < len(names):
            return shared
    return {}


def _base(shared: Aliases, storage: Storage) -> Storage:
    return shared[storage][0] if storage in shared else storage
