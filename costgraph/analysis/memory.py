"""Peak memory: the most bytes that are live at once, as a formula in which counts of Repeats may be symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import lcm

from ..bind import Formula, answer, need_bound
from ..dominance import prune
from ..extremum import Owner, Regime, extremum
from ..graph import Graph, need_graph
from ..op import Op
from ..polynomial import Monomial, Poly, Rational, total
from ..sizes import bindings
from .collecting import collection_paused
from .hooks import PLOTTERS
from .lifetimes import Program, copies_for, copies_needed, period, play

__all__ = ["Moment", "Timeline", "live_bytes", "peak_cases", "peak_memory", "timeline"]

# Unrolled further than this, a timeline is played with the iterations that can differ alone.
_MOST_STEPS = 20_000


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
def _regimes(graph: Graph, values: Mapping[str, Poly]) -> list[tuple[Poly, Owner]]:
    """Return the live bytes at every op that may hold the peak, dominated ones left out.

    Parameters
    ----------
    graph : Graph
        What is asked.
    values : mapping of str to Poly
        Bound sizes: only their counts of Repeats matter here.

    Returns
    -------
    list of (Poly, Owner)
        Not yet bound.
    """
    loops = [op for op in graph.walk() if op.kind.body == "repeated"]
    # where a body exchanges carries, an open count may leave them in any of their places
    ends = lcm(*(period(op) for op in loops if op.attrs["count"].bind(values).constant is None))
    rules = [copies_for(values, extra) for extra in range(ends)]
    key = ("peak", tuple(copies(op) for copies in rules for op in loops))
    if key not in graph.cache:
        programs = [play(graph, copies) for copies in rules]
        # one by one: most of them are equal, and only the first of equal ones is kept
        candidates = (
            (p, Owner(program.steps[at].where, program.steps[at].op.phase) if at >= 0 else Owner())
            for program in programs
            for at, p in live_bytes(program)
        )
        graph.cache[key] = prune(candidates, graph.root.relations)
    out: list[tuple[Poly, Owner]] = graph.cache[key]
    return out


def peak_memory(graph: Graph, /, **dims: int) -> Formula:
    """Return the peak memory: the most bytes live at once.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes; unbound, a `costgraph.Max` whose regimes name the op and the phase that own them (`regimes`). A symbolic
        count of a Repeat is taken as at least `timeline(graph).holds_from` of it; a bound one is exact from 1 on.

    Raises
    ------
    BindingError
        If a size cannot be bound.

    Notes
    -----
    At each op, all storages that are live while it runs, its operands, results and stated workspace included; the
    maximum over ops. Inputs, parameters, buffers and caches live throughout, outputs from birth to the end, anything
    else to the last op that reads it or a view of it.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F, K = cg.dims("B D F K")
    >>> with cg.Graph("g") as g:
    ...     h = cg.einsum(g.input("x", (B, D)), g.param("w1", (D, F)), "b d, d f -> b f")
    ...     g.output(cg.einsum(cg.relu(h), g.param("w2", (F, K)), "b f, f k -> b k"))
    >>> cg.peak_memory(g, B=2, D=3, F=5, K=7)
    320
    >>> [r.op for r in cg.regimes(cg.peak_memory(g))]
    ['relu', 'einsum_1']
    """
    need_graph("peak_memory", graph)
    return answer(extremum(_bound_regimes(graph, bindings(graph, dims))))


def peak_cases(graph: Graph, values: Mapping[str, Poly]) -> tuple[Regime, ...]:
    """Return what the peak can be, with the op and the phase that own each case, also where there is only one."""
    return tuple(Regime(p.expr, owner.op, owner.phase) for p, owner in _bound_regimes(graph, values))


def _bound_regimes(graph: Graph, values: Mapping[str, Poly]) -> list[tuple[Poly, Owner]]:
    found = [(p.bind(values), owner) for p, owner in _regimes(graph, values)]
    if all(p.constant is not None for p, _ in found):
        return [max(found, key=lambda item: item[0].constant or 0)]
    return prune(found, graph.root.relations) if values else found


@dataclass(frozen=True)
class Moment:
    """Live memory at one step."""

    op: str
    """op that runs, iterations of a Repeat in brackets"""
    phase: str
    """its phase"""
    bytes: Formula
    """bytes live while it runs"""


@dataclass(frozen=True)
class Timeline:
    """Live memory over the program."""

    peak: Formula
    """most bytes live at once"""
    moments: tuple[Moment, ...]
    """steps at which memory is taken, in order"""
    holds_from: dict[str, int]
    """for each count of a Repeat that is a symbol, the least value for which the formulas hold"""
    _roles: dict[str, Formula] | None
    regimes: tuple[Regime, ...] = ()
    """what the peak can be, with the op and the phase that own each case; one once all sizes are bound"""

    def _held(self) -> Moment:
        if len(self.regimes) > 1:
            need_bound([self.peak], "what holds the peak")
        return next(m for m in self.moments if m.bytes == self.peak)

    @property
    def op(self) -> str:
        """Op that holds the peak; needs sizes to be bound where `regimes` has several cases."""
        return self._held().op

    @property
    def phase(self) -> str:
        """Phase of that op."""
        return self._held().phase

    @property
    def by_role(self) -> dict[str, Formula]:
        """Bytes at the peak by role of the storage; needs all sizes bound."""
        need_bound([self.peak], "roles at the peak")
        assert self._roles is not None
        return self._roles

    def plot(self, path: object = None) -> object:
        """Draw live bytes over steps, the peak marked; needs all sizes bound and matplotlib.

        Parameters
        ----------
        path : str or path-like, optional
            File to write.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        need_bound([self.peak], "plot of a timeline")
        return PLOTTERS["timeline"](self, path)


def _played_out(graph: Graph, values: Mapping[str, Poly]) -> int:
    """Return how many steps the program has with every loop played out, or one more than can be."""

    def steps(g: Graph) -> int:
        out = 0
        for op in g.ops:
            if op.kind.body == "repeated":
                count = op.attrs["count"].bind(values).constant
                inner = max(steps(op.body), 1)  # type: ignore[arg-type]  # it has one
                out += (_MOST_STEPS + 1 if count is None else int(count)) * inner
            else:
                out += 1
        return out

    return steps(graph)


def timeline(graph: Graph, /, **dims: int) -> Timeline:
    """Return the live memory over the program.

    Parameters
    ----------
    graph : Graph
        What is asked.
    **dims : int
        Sizes to bind; with all of them, loops are played out (up to 20,000 steps).

    Returns
    -------
    Timeline
        `.peak`, `.op`, `.phase`, `.by_role`, `.moments` and `.plot(path)`.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    """
    need_graph("timeline", graph)
    values = bindings(graph, dims)
    whole = _played_out(graph, values) <= _MOST_STEPS
    copies = (lambda op: int(op.attrs["count"].bind(values).constant)) if whole else copies_for(values)
    program = play(graph, copies, values)
    live = [(at, p.bind(values)) for at, p in live_bytes(program)]
    moments = tuple(
        Moment(program.steps[at].where, program.steps[at].op.phase, answer(p))
        if at >= 0
        else Moment("", "forward", answer(p))
        for at, p in live
    )
    if all(p.constant is not None for _, p in live):
        at, most = max(live, key=lambda item: item[1].constant or 0)
        roles: dict[str, list[Poly]] = {}
        for life in program.lives:
            if (life.born is None or life.born <= at) and (life.dies is None or life.dies >= at):
                roles.setdefault(life.role, []).append(life.bytes.bind(values))
        if at >= 0 and program.steps[at].workspace:
            roles["workspace"] = [program.steps[at].workspace.bind(values)]
        by_role = {role: answer(total(parts)) for role, parts in roles.items()}
        owner = program.steps[at].where if at >= 0 else None, program.steps[at].op.phase if at >= 0 else None
        return Timeline(
            answer(most), moments, {} if whole else _holds_from(graph, values), by_role, (Regime(most.expr, *owner),)
        )
    peak = answer(extremum(_bound_regimes(graph, values)))
    return Timeline(peak, moments, _holds_from(graph, values), None, peak_cases(graph, values))


def _holds_from(graph: Graph, values: Mapping[str, Poly]) -> dict[str, int]:
    """Find for each symbolic count the least value at which fewer iterations give the same peak.

    Loops of the same count have fewer iterations together, and counts that differ at the same time or one alone.
    """
    groups: dict[Poly, list[Op]] = {}
    for op in graph.walk():
        if op.kind.body == "repeated" and op.attrs["count"].bind(values).constant is None:
            groups.setdefault(op.attrs["count"].bind(values), []).append(op)
    general = copies_for(values)
    full = {p for p, _ in _regimes(graph, values)}
    least: dict[Poly, int] = {}

    def same(chosen: Mapping[Poly, int | None]) -> bool:
        """Whether the peak is the same with so many iterations of some loops."""

        def copies(op: Op) -> int:
            fewer = chosen.get(op.attrs["count"].bind(values))
            return general(op) if fewer is None else min(fewer, general(op))

        found = prune(((p, None) for _, p in live_bytes(play(graph, copies))), graph.root.relations)
        return {p for p, _ in found} == full

    for count, loops in groups.items():
        n = max(map(copies_needed, loops))
        others = [dict(zip(least, picked, strict=True)) for picked in product(*((None, k) for k in least.values()))]
        while n > 1 and all(same({**other, count: n - 1}) for other in others):
            n -= 1
        least[count] = n
    out: dict[str, int] = {}
    for count, n in least.items():
        for name in count.names():
            out[name] = max(n, out.get(name, 1))
    return out
