"""Formulas and peaks of a graph over arrays of sizes: what is played once is worked out at all points together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..algebra.conditions import Validity
from ..algebra.polynomial import Monomial, Poly, as_poly
from ..bind.sweep import outside, plan
from ..graph.graph import Graph
from ..graph.loop import loops
from ..graph.placement import Waiting
from .collecting import collection_paused
from .lifetimes import Life, Program, copies_for, play

__all__ = ["Array", "Programs", "Values", "peaks", "refused"]

Array: TypeAlias = "np.ndarray[Any, Any]"
#: By the iterations that are played of each loop.
Programs: TypeAlias = dict[tuple[object, ...], Program]


class Values:
    """Values of formulas at points, of sizes of one length; each formula, monomial and generator is worked out once."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self.sizes = {name: np.asarray(n, dtype=np.float64) for name, n in sizes.items()}
        self._generators: dict[str, Any] = {}
        self._monomials: dict[Monomial, Any] = {}
        self._found: dict[Poly, Any] = {}

    def __call__(self, p: Poly) -> Any:
        """Return the values of a formula, one number where it is the same at all points."""
        found = self._found.get(p)
        if found is None:
            with np.errstate(all="ignore"):
                each = [self._monomial(m) if c == 1 else float(c) * self._monomial(m) for m, c in p.terms.items()]
                found = self._found[p] = sum(each[1:], each[0]) if each else np.float64(0)
        return found

    def _monomial(self, m: Monomial) -> Any:
        found = self._monomials.get(m)
        if found is None:
            above, below = np.float64(1), np.float64(1)
            for key, e in m:  # divided once: of whole numbers that divide, that is exact
                factor = self._generator(key) ** abs(e)
                above, below = (above * factor, below) if e > 0 else (above, below * factor)
            found = self._monomials[m] = above / below
        return found

    def _generator(self, key: str) -> Any:
        if key not in self._generators:
            self._generators[key] = plan(Poly({((key, 1),): 1}))(dict(self.sizes))
        return self._generators[key]


def refused(held: Iterable[Validity], sizes: Mapping[str, Array]) -> Any:
    """Return where what a formula holds for is not so, False where it is everywhere."""
    found = outside([asked for validity in held for asked in validity.tests()], sizes)
    return False if found is None else found


@collection_paused()
def peaks(
    graph: Graph, sizes: Mapping[str, Array], waiting: Waiting | None = None, programs: Programs | None = None
) -> Array:
    """Return the peak memory at points, of which all sizes are given, as `peak_memory` says it of each.

    The program is played once for all points at which its loops have the same iterations that can differ. `waiting` is
    what a stage of a pipeline knows of the others, where that is not the graph's own; `programs` keeps those that were
    played.
    """
    out = np.zeros(np.broadcast_shapes(*(np.shape(n) for n in sizes.values())))
    for at, program in _programs(graph, sizes, out.size, waiting, {} if programs is None else programs):
        out[at] = _most(program, Values({name: n if np.ndim(n) == 0 else n[at] for name, n in sizes.items()}))
    return out


def _programs(
    graph: Graph, sizes: Mapping[str, Array], many: int, waiting: Waiting | None, programs: Programs
) -> Iterator[tuple[Array, Program]]:
    """Yield programs, and the points that each is the one of."""
    every = list(loops(graph))
    names = sorted({name for loop in every for name in loop.count.names()})
    columns = np.array([np.broadcast_to(sizes[name], many) for name in names], dtype=np.int64).reshape(len(names), many)
    counts, place = np.unique(columns, axis=1, return_inverse=True)
    same: dict[tuple[object, ...], list[int]] = {}
    until = any(loop.until for loop in every)  # how often these run depends on the counts themselves
    for i, found in enumerate(counts.T.tolist()):
        copies = copies_for({name: as_poly(n) for name, n in zip(names, found, strict=True)})
        same.setdefault((*map(copies, every), *(found if until else ())), []).append(i)
    for key, like in same.items():
        if key not in programs:
            known = {name: as_poly(int(n)) for name, n in zip(names, counts[:, like[0]], strict=True)}
            programs[key] = play(graph, copies_for(known), known if until else {}, waiting)
        yield np.isin(place.reshape(-1), like), programs[key]


def _most(program: Program, value: Values) -> Any:
    """Return the most bytes that are live at once."""
    births: dict[int | None, list[Life]] = {}
    deaths: dict[int | None, list[Life]] = {}
    for life in program.lives:
        births.setdefault(life.born, []).append(life)
        deaths.setdefault(life.dies, []).append(life)
    live = _bytes(births.get(None, ()), value)
    most = live
    for now, step in enumerate(program.steps):
        if now in births:
            live = live + _bytes(births[now], value)
        most = np.maximum(most, live + value(step.workspace) if step.workspace else live)
        if now in deaths:
            live = live - _bytes([life for life in deaths[now] if life.born is not None], value)
    return most


def _bytes(lives: Iterable[Life], value: Values) -> Any:
    return sum((value(life.bytes) for life in lives), np.float64(0))
