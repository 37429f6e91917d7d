"""Peak memory: the most bytes that are live at once, as a formula in which counts of Repeats may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, product
from math import lcm

from ..arguments import need_choice
from ..bind import Formula, answer, need_bound, number
from ..dominance import prune
from ..extremum import Owner, Regime, extremum
from ..graph import Graph, need_graph
from ..polynomial import ONE, Monomial, Poly, Rational, as_poly, total
from ..sizes import bindings
from .collecting import collection_paused
from .hooks import PLOTTERS
from .hull import at_most, corners
from .lifetimes import Program, copies_for, copies_needed, period, play

__all__ = ["Moment", "Timeline", "live_bytes", "live_cases", "peak_cases", "peak_memory", "timeline"]

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
def live_cases(
    graph: Graph, values: Mapping[str, Poly], view: Callable[[Graph, Program], Program] | None = None
) -> list[tuple[Poly, Owner]]:
    """Return the live bytes at every op that may hold the peak, dominated ones left out.

    Parameters
    ----------
    graph : Graph
        What is asked.
    values : mapping of str to Poly
        Bound sizes: only their counts of Repeats matter here.
    view : callable, optional
        What of a program is looked at.

    Returns
    -------
    list of (Poly, Owner)
        Not yet bound.
    """
    loops = [op for op in graph.walk() if op.kind.body == "repeated"]
    # where a body exchanges carries, an open count may leave them in any of their places
    ends = lcm(*(period(op) for op in loops if op.attrs["count"].bind(values).constant is None))
    rules = [copies_for(values, extra) for extra in range(ends)]
    key: tuple[object, ...] = ("peak", view, tuple(copies(op) for copies in rules for op in loops))
    counts: Mapping[str, Poly] = {}
    if any(op.attrs.get("until") for op in loops):  # how often these run depends on the counts themselves
        counts = values
        key = (*key, tuple(op.attrs["count"].bind(values) for op in loops))
    if key not in graph.cache:
        programs = [play(graph, copies, counts) for copies in rules]
        if view is not None:
            programs = [view(graph, program) for program in programs]
        # one by one: most of them are equal, and only the first of equal ones is kept
        candidates = (
            (p, Owner(program.steps[at].where, program.steps[at].op.phase) if at >= 0 else Owner())
            for program in programs
            for at, p in live_bytes(program)
        )
        graph.cache[key] = prune(corners(candidates), graph.root.relations)
    out: list[tuple[Poly, Owner]] = graph.cache[key]
    return out


#: Bytes of which an allocator hands out multiples: torch's on CUDA has blocks of 512 B.
ALLOCATORS = {"exact": 1, "cuda": 512}


def peak_memory(graph: Graph, /, *, allocator: str = "exact", **dims: int) -> Formula:
    """Return the peak memory: the most bytes live at once.

    Parameters
    ----------
    graph : Graph
        What is asked.
    allocator : str
        exact, or cuda: each storage takes whole blocks of 512 B, as torch hands them out; all sizes are bound then.
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
    need_choice("peak_memory: allocator", allocator, tuple(ALLOCATORS))
    values = bindings(graph, dims)
    if allocator != "exact":
        return _in_blocks(graph, values, ALLOCATORS[allocator])
    return answer(extremum(_bound_regimes(graph, values)))


def _in_blocks(graph: Graph, values: Mapping[str, Poly], block: int) -> int:
    """Return the peak where each storage takes whole blocks."""
    program = play(graph, copies_for(values), values)

    def taken(bytes_: Poly, many: Poly = ONE) -> int:
        amount, count = (answer(p.bind(values)) for p in (bytes_, many))
        need_bound([amount, count], "peak in blocks of an allocator")
        return int(count) * int(-(-Fraction(amount) / int(count) // block)) * block if amount else 0

    change = [0] * (len(program.steps) + 1)
    for life in program.lives:
        amount = taken(life.bytes, life.many)
        change[life.born or 0] += amount
        if life.dies is not None:
            change[life.dies + 1] -= amount
    live = list(accumulate(change))
    return max((live[i] + taken(step.workspace) for i, step in enumerate(program.steps)), default=live[0])


def peak_cases(graph: Graph, values: Mapping[str, Poly]) -> tuple[Regime, ...]:
    """Return what the peak can be, with the op and the phase that own each case, also where there is only one."""
    return tuple(Regime(p.expr, owner.op, owner.phase) for p, owner in _bound_regimes(graph, values))


def _bound_regimes(graph: Graph, values: Mapping[str, Poly]) -> list[tuple[Poly, Owner]]:
    found = [(p.bind(values), owner) for p, owner in live_cases(graph, values)]
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
    roles: Mapping[str, tuple[int | float, ...]] = field(default_factory=dict)
    """bytes of each role at each of the moments; empty while a size is open"""

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
        `.peak`, `.op`, `.phase`, `.by_role`, `.moments`, `.roles` (of each moment) and `.plot(path)`.

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
            answer(most), moments, {} if whole else _holds_from(graph, values), by_role, (Regime(most.expr, *owner),),
            _roles_over(program, values, [at for at, _ in live]),
        )  # fmt: skip
    peak = answer(extremum(_bound_regimes(graph, values)))
    return Timeline(peak, moments, _holds_from(graph, values), None, peak_cases(graph, values))


def _roles_over(program: Program, values: Mapping[str, Poly], at: Sequence[int]) -> dict[str, tuple[int | float, ...]]:
    """Return the bytes of each role, all sizes bound, at some steps."""
    changes: dict[str, dict[int, Rational]] = {}
    for life in program.lives:
        own, amount = changes.setdefault(life.role, {}), life.bytes.bind(values).constant or 0
        born = -1 if life.born is None else life.born
        own[born] = own.get(born, 0) + amount
        if life.dies is not None:
            own[life.dies + 1] = own.get(life.dies + 1, 0) - amount
    needs = {i: step.workspace.bind(values).constant or 0 for i, step in enumerate(program.steps) if step.workspace}
    out: dict[str, tuple[int | float, ...]] = {}
    for role, own in changes.items():
        live, due, amounts = Fraction(0), sorted(own, reverse=True), []
        for now in at:
            while due and due[-1] <= now:
                live += own[due.pop()]
            amounts.append(number(live))
        out[role] = tuple(amounts)
    return out | ({"workspace": tuple(number(Fraction(needs.get(now, 0))) for now in at)} if needs else {})


def _holds_from(graph: Graph, values: Mapping[str, Poly]) -> dict[str, int]:
    """Find for each symbol in a count the least value from which on the formulas hold.

    With the symbol bound, a formula has to be what comes out where the loops have so many iterations. Symbols are
    tried one by one, the others open or at the least value that was found for them; those of counts with several
    symbols, such as L/k, hold wherever the counts are whole.
    """
    counts = {
        op.attrs["count"].bind(values): op
        for op in graph.walk()
        if op.kind.body == "repeated" and op.attrs["count"].bind(values).constant is None
    }
    least: dict[str, int] = {}
    for name in sorted({n for p in counts if len(p.names()) == 1 for n in p.names()}):
        loops = [(p, op) for p, op in counts.items() if p.names() == {name}]
        value = 1
        while any((p.bind({name: as_poly(value)}).constant or 0) < copies_needed(op) for p, op in loops):
            value += 1
        tried = [dict(zip(least, picked, strict=True)) for picked in product(*((None, k) for k in least.values()))]
        while value > 1 and all(_same(graph, values, {**others, name: value - 1}) for others in tried):
            value -= 1
        least[name] = value
    return least


def _same(graph: Graph, values: Mapping[str, Poly], chosen: Mapping[str, int | None]) -> bool:
    """Whether the formula, with counts put in, is what comes out with so many iterations."""
    bound = {**values, **{name: as_poly(k) for name, k in chosen.items() if k is not None}}
    relations = graph.root.relations
    formula = [p for p, _ in prune(((p.bind(bound), None) for p, _ in live_cases(graph, values)), relations)]
    played = [p for p, _ in prune(((p.bind(bound), None) for p, _ in live_cases(graph, bound)), relations)]
    return at_most(formula, played) and at_most(played, formula)
