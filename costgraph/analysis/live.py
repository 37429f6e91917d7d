"""What is live at each step, and from which counts of Repeats on the closed forms of that hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import lcm
from typing import NamedTuple

from ..algebra.conditions import Condition, Conditions, Counts, Validity
from ..algebra.extremum import Owner
from ..algebra.polynomial import Monomial, Poly, Rational, as_poly, poly, total
from ..algebra.pruning import prune, reached_by
from ..algebra.symbols import symbol
from ..graph.graph import Graph
from ..graph.loop import Loop, loops
from ..graph.op import Op
from ..graph.sizes import Bindings
from .collecting import collection_paused
from .hull import corners
from .lifetimes import Program, copies_for, copies_needed, period, play

__all__ = ["closed", "holds_from", "live_bytes", "live_cases"]

#: What of a program is looked at.
View = Callable[[Graph, Program], Program] | None


class Instant(NamedTuple):
    """A step of a program; -1 before the first one."""

    program: Program
    at: int

    @property
    def op(self) -> str | None:
        """Name of the op that runs."""
        return self.program.steps[self.at].where if self.at >= 0 else None

    def owner(self) -> Owner:
        """Return what a peak at this step belongs to, and what it consists of."""
        if self.at < 0:
            return Owner(roles=self.roles())
        step = self.program.steps[self.at]
        return Owner(step.where, step.op.phase, label(step.op), self.roles())

    def roles(self) -> tuple[tuple[str, Poly], ...]:
        """Return the live bytes by role of the storage."""
        found: dict[str, list[Poly]] = {}
        for life in self.program.lives:
            if (life.born is None or life.born <= self.at) and (life.dies is None or life.dies >= self.at):
                found.setdefault(life.role, []).append(life.bytes)
        if self.at >= 0 and self.program.steps[self.at].workspace:
            found.setdefault("workspace", []).append(self.program.steps[self.at].workspace)
        return tuple((role, total(parts)) for role, parts in found.items())


def label(op: Op) -> str:
    """Return an op as a reader knows it: where it stands, what it does, with or for which parameter, in which phase."""
    made = {t.storage for t in op.results}
    own = next((t.name for t, grad in op.graph.root.gradients.items() if grad.storage in made), None)
    read = next((t.name for t in op.operands if t.role == "param" and not t.name.startswith(f"{op.scope}/")), None)
    about = f" for the gradient of {own}" if own else f" with {read}" if read else ""
    place, _, last = op.name.rpartition("/")
    place = place if op.scope in ("", op.name) else op.scope  # a kernel is a scope of its own
    return f"{place}: {re.sub(r'_[0-9]+$', '', last)}{about} ({op.phase})".removeprefix(": ")


def live_bytes(program: Program) -> Iterator[tuple[int, Poly]]:
    """Yield the bytes that are live at each step at which something is born or workspace is needed."""
    births: dict[int, list[Poly]] = {}
    deaths: dict[int, list[Poly]] = {}
    start = [life.bytes for life in program.lives if life.born is None]
    for life in program.lives:
        if life.born is not None:
            births.setdefault(life.born, []).append(life.bytes)
            if life.dies is not None:
                deaths.setdefault(life.dies, []).append(life.bytes)
    live: dict[Monomial, Rational] = dict(total(start).terms)
    if not program.steps:
        yield -1, Poly(dict(live))
    for now, step in enumerate(program.steps):
        for p in births.get(now, ()):
            _accumulate(live, p, 1)
        if now in births or now == 0 or step.workspace:
            at = Poly(dict(live))
            yield now, at + step.workspace if step.workspace else at
        for p in deaths.get(now, ()):
            _accumulate(live, p, -1)


def _accumulate(live: dict[Monomial, Rational], p: Poly, sign: int) -> None:
    for m, c in p.terms.items():
        value = live.get(m, 0) + sign * c
        if value:
            live[m] = value
        else:
            del live[m]


@collection_paused()
def live_cases(graph: Graph, values: Mapping[str, Poly], view: View = None) -> list[tuple[Poly, Owner]]:
    """Return the live bytes at every op that may hold the peak, dominated ones left out.

    Of bound sizes only counts of Repeats matter here; `view` says what of a program is looked at.
    """
    every = list(loops(graph))
    # where a body exchanges carries, an open count may leave them in any of their places
    ends = lcm(*(period(loop) for loop in every if loop.count.bind(values).constant is None))
    rules = [copies_for(values, extra) for extra in range(ends)]
    key: tuple[object, ...] = ("peak", view, tuple(copies(loop) for copies in rules for loop in every))
    counts: Mapping[str, Poly] = {}
    if any(loop.until for loop in every):  # how often these run depends on the counts themselves
        counts = values
        key = (*key, tuple(loop.count.bind(values) for loop in every))
    if key not in graph.cache:
        programs = [play(graph, copies, counts) for copies in rules]
        if view is not None:
            programs = [view(graph, program) for program in programs]
        # one by one: most of them are equal, and only the first of equal ones is kept
        candidates = ((p, Instant(program, at)) for program in programs for at, p in live_bytes(program))
        kept = prune(corners(candidates), Bindings(graph).validity.known)
        graph.cache[key] = [(p, instant.owner()) for p, instant in kept]
    out: list[tuple[Poly, Owner]] = graph.cache[key]
    return out


def closed(graph: Graph, values: Bindings, view: View = None) -> tuple[Validity, ...]:
    """Return what live bytes hold for as closed forms, where the count of a Repeat is open."""
    sure = {name: count for name, count in _sure(graph, values).items() if count > 1}
    more = _of_several(graph, values, view)
    asked = values.validity.conditions
    if more:
        asked = Conditions(asked.relations, (*asked.declared, *more))
    if not sure:
        return (replace(values.validity, conditions=asked),) if more else values.held
    key = ("closed", view, values.validity.values)

    def holds(chosen: dict[str, int]) -> bool:
        # of a graph that was changed since, nothing is known
        return graph.cache.get(key) is counts and _same(graph, values, chosen, view)

    counts: Counts = graph.cache.setdefault(key, Counts(sure, holds))
    return (replace(values.validity, conditions=asked, counts=counts),)


def _of_several(graph: Graph, values: Mapping[str, Poly], view: View) -> tuple[Condition, ...]:
    """Return from which counts on a form holds where these are no sum of one symbol, such as L/P layers of a stage."""
    key = ("several", view, tuple(sorted((k, p) for k, p in values.items())))
    if key not in graph.cache:
        found: dict[Poly, int] = {}
        for loop in loops(graph):
            count = loop.count.bind(values)
            names = sorted(count.names())
            if len(names) > 1 or (names and not (count * poly(symbol(*names))).names()):
                found[count] = max(found.get(count, 1), copies_needed(loop))
        least = {count: _least_of(graph, values, view, count, most) for count, most in found.items()}
        graph.cache[key] = tuple(
            Condition(
                count - (n - 1), f"iterations of a loop, which the formula holds for from {n} on,", 1, True,
                frozenset(count.names()),
            )
            for count, n in least.items() if n > 1
        )  # fmt: skip
    out: tuple[Condition, ...] = graph.cache[key]
    return out


def _least_of(graph: Graph, values: Mapping[str, Poly], view: View, count: Poly, most: int) -> int:
    """Return the least number of iterations that a form holds for, tried where a size makes them as many."""
    for name in sorted(count.names()):
        one = poly(symbol(name))
        for rest, up in ((count / one, True), (count * one, False)):
            if name in rest.names():
                continue
            for k in range(most - 1, 0, -1):
                size = poly(k) / rest if up else rest / k
                # what is no whole size is never met
                if (size.names() or size.is_size) and not _same(graph, values, {name: size}, view):
                    return k + 1
            return 1
    return 1


def _open_counts(graph: Graph, values: Mapping[str, Poly]) -> dict[str, list[tuple[Poly, Loop]]]:
    """Return the loops whose count is open in one symbol, by that symbol."""
    out: dict[str, list[tuple[Poly, Loop]]] = {}
    for loop in loops(graph):
        count = loop.count.bind(values)
        if len(count.names()) == 1:
            (name,) = count.names()
            out.setdefault(name, []).append((count, loop))
    return out


def _sure(graph: Graph, values: Mapping[str, Poly]) -> dict[str, int]:
    """Return for each symbol in a count a value from which on all iterations that can differ are there."""
    out = {}
    for name, found in sorted(_open_counts(graph, values).items()):
        value = 1
        while any((p.bind({name: as_poly(value)}).constant or 0) < copies_needed(loop) for p, loop in found):
            value += 1
        out[name] = value
    return out


def holds_from(graph: Graph, values: Mapping[str, Poly], view: View = None) -> dict[str, int]:
    """Find for each symbol in a count the least value from which on the formulas hold.

    With the symbol bound, a formula has to be what comes out where the loops have so many iterations. Symbols are
    tried one by one, the others open or at the least value that was found for them; of counts with several symbols,
    such as L/P, it is a condition of the formulas.
    """
    least: dict[str, int] = {}
    for name, value in _sure(graph, values).items():
        tried = [dict(zip(least, picked, strict=True)) for picked in product(*((None, k) for k in least.values()))]
        while value > 1 and all(_same(graph, values, {**others, name: value - 1}, view) for others in tried):
            value -= 1
        least[name] = value
    return least


def _same(graph: Graph, values: Mapping[str, Poly], chosen: Mapping[str, int | Poly | None], view: View) -> bool:
    """Whether the formula, with counts put in, is what comes out with so many iterations."""
    bound = {**values, **{name: poly(k) for name, k in chosen.items() if k is not None}}
    known = Bindings(graph, bound).validity.known
    formula, played = (dict.fromkeys(p.bind(bound) for p, _ in live_cases(graph, at, view)) for at in (values, bound))
    # most stand in both as a rule, and are reached
    return all(
        reached_by([p for p in ps if p not in others], others, known)
        for ps, others in ((formula, played), (played, formula))
    )
