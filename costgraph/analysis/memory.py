"""Peak memory, memory timelines and tensor lifetimes, in closed form for symbolic sizes and trip counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from ..algebra.conditions import Validity
from ..algebra.dominance import prune
from ..algebra.extremum import Owner, as_expr, extremum
from ..algebra.polynomial import ONE, Monomial, Poly, Rational, as_poly, total
from ..algebra.symbols import shorten
from ..bind.evaluate import Formula, answer, bound_answer, need_bound, number, outside, plan
from ..hardware.tables import Column, Fact, Table
from ..ir.graph import VIEWS, Bindings, Graph, InFlightMicroBatches, bindings, loops, need_choice, need_graph, of_stages
from ..notation.validation import guarded
from .allocator import CachingAllocator, on_device
from .costs import collection_paused
from .liveness import Copies, LiveRange, Program, View, closed, copies_for, holds_from, live_bytes, live_cases, play
from .regimes import Range, Regime, narrowed, ranges, regime

__all__ = [
    "Lifetime",
    "Lifetimes",
    "lifetimes",
    "Moment",
    "Timeline",
    "peak_cases",
    "peak_memory",
    "timeline",
    "Array",
    "Programs",
    "PointValues",
    "peaks",
    "refused",
]


# -- lifetimes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lifetime:
    """A storage and its live range."""

    tensor: str
    """name of the tensor that allocated it, with iterations in brackets"""
    role: str
    """input, param, buffer, cache, output, activation, or workspace of a device"""
    bytes: Formula
    """size in bytes"""
    born: str | None
    """op that allocates it, None if it exists from the start"""
    dies: str | None
    """last op that needs it, None if it lives to the end"""


class Lifetimes(Table, list[Lifetime]):
    """List of storages from `lifetimes`."""

    graph = ""
    """name of the graph"""

    @property
    def rows(self) -> tuple[Lifetime, ...]:
        """The storages."""
        return tuple(self)

    def _description(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self)} storages"

    def _columns(self) -> Sequence[Column]:
        return Column("tensor"), Column("role"), Column("bytes", "B"), Column("born"), Column("dies")

    def _facts(self) -> Sequence[Fact]:
        throughout = [r.bytes for r in self if r.born is None and r.dies is None]
        return (Fact("throughout", sum(throughout), "B"),) if throughout else ()


def lifetimes(graph: Graph, /, *, device: str | None = None, arch: str | None = None, **dims: int) -> Lifetimes:
    """List every storage with its live range.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    device, arch : str, optional
        As in `peak_memory`; workspaces and temporaries of CUDA libraries are added with the role workspace.
    **dims : int
        Sizes to bind.

    Returns
    -------
    Lifetimes
        List of `Lifetime` rows (tensor, role, bytes, born, dies), storages that live throughout first. For a loop, the
        first, a middle and the last iteration are listed.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    GraphError
        If the device or architecture is unknown.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     x = g.input("x", (B, D))
    ...     g.output(cg.relu(cg.relu(x)))
    >>> [(r.tensor, r.role, r.born, r.dies) for r in cg.lifetimes(g)]
    [('x', 'input', None, None), ('relu', 'activation', 'relu', 'relu_1'), ('relu_1', 'output', 'relu_1', None)]
    """
    need_graph("lifetimes", graph)
    out = Lifetimes(_rows(graph, dims, on_device("lifetimes", device, arch)))
    out.graph, out.legend = graph.name, dict(graph.root.legend)
    return out


def _rows(graph: Graph, dims: Mapping[str, object], view: View) -> Iterator[Lifetime]:
    values = bindings(graph, dims)
    program = play(graph, copies_for(values), values)
    if view is not None:
        program = view(graph, program)
    for life in program.lives:
        born = None if life.born is None else program.steps[life.born].where
        dies = None if life.dies is None else program.steps[life.dies].where
        yield Lifetime(life.name, life.role, bound_answer(life.bytes, values), born, dies)
    for step in program.steps if view is not None else ():
        if step.workspace:
            yield Lifetime(step.where, "workspace", bound_answer(step.workspace, values), step.where, step.where)


# -- memory ------------------------------------------------------------------------------------------------------------

# Longer programs are not fully unrolled for a timeline.
_MOST_STEPS = 20_000


#: "exact" allocates the requested bytes; "cuda" simulates torch's caching allocator.
ALLOCATORS = ("exact", "cuda")


def peak_memory(
    graph: Graph,
    /,
    *,
    allocator: str | bool = "exact",
    within: Mapping[str, Range] | None = None,
    device: str | None = None,
    arch: str | None = None,
    side: str = "device",
    **dims: int,
) -> Formula:
    """Return the peak memory: the maximum of live bytes.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    allocator : str or bool
        "exact", or "cuda" (also True) for torch's caching allocator: blocks are multiples of 512 B, and a large block
        is not split if at most 1 MiB would remain. "cuda" requires all sizes to be bound.
    within : mapping of str to (int, int), optional
        Ranges of dimensions, which replace their defaults. The formula keeps only cases that may hold within them
        (`regimes`), and rejects sizes outside.
    device : str, optional
        "cuda" to include memory that torch's libraries and kernels allocate beside tensors, as in
        `Timeline.workspaces`.
    arch : str, optional
        Compute capability in torch's notation, sm_90 by default.
    side : str
        "device", or "host" for the memory used by `offload`.
    **dims : int
        Sizes to bind.

    Returns
    -------
    int or sympy.Expr
        Bytes. If sizes are open, a `costgraph.Max` whose regimes name the op and phase at the peak (`regimes`). A
        symbolic trip count is assumed to be at least `timeline(graph).holds_from`; a bound one is exact from 1 on.

    Raises
    ------
    BindingError
        If a size cannot be bound, or a range does not belong to an open dimension.
    GraphError
        If the allocator, device or architecture is unknown.

    Notes
    -----
    Peak memory is the maximum over ops of the storages live while each op runs, including its operands, results and
    workspace. Inputs, parameters, buffers and caches live throughout, outputs until the end, and other storages until
    the last op that reads them or a view of them.

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
    >>> cg.peak_memory(g, within={"F": (1, 64), "K": (128, 1024)})
    4*B*D + 4*B*F + 4*B*K + 4*D*F + 4*F*K
    """
    need_graph("peak_memory", graph)
    if isinstance(allocator, bool):
        allocator = ALLOCATORS[allocator]
    need_choice("peak_memory: allocator", allocator, ALLOCATORS)
    range_names = within if isinstance(within, Mapping) else {}
    view = on_device("peak_memory", device, arch, side)
    stages = of_stages(graph, dims, [name for name in range_names if name not in dims])
    if allocator != "exact":
        return max(_allocated_peak(_played(g, copies_for(values), values, view), values) for g, values in stages)
    cases = [case for g, values in stages for case in _bound_regimes(g, values, view)]
    peak = answer(extremum(cases), tuple(v for g, values in stages for v in closed(g, values, view)))
    return peak if within is None else answer(narrowed(as_expr(peak), ranges(within, peak, "peak_memory"))[0])


def _played(graph: Graph, copies: Copies, values: Mapping[str, Poly], view: View) -> Program:
    program = play(graph, copies, values)
    return program if view is None else view(graph, program)


def _allocated_peak(program: Program, values: Mapping[str, Poly]) -> int:
    """Return the peak allocated bytes with torch's caching allocator."""
    allocator, blocks = CachingAllocator(), {}
    born, dies = (defaultdict[int, list[int]](list) for _ in range(2))
    for i, life in enumerate(program.lives):
        born[-1 if life.born is None else life.born].append(i)
        if life.dies is not None:
            dies[life.dies].append(i)

    def parts(bytes_: Poly, count_formula: Poly = ONE) -> list[int]:
        amount, count = (answer(p.bind(values)) for p in (bytes_, count_formula))
        need_bound([amount, count], "peak in blocks of an allocator")
        return [-(-Fraction(amount) // int(count))] * int(count) if amount else []

    for now in range(-1, len(program.steps)):
        for i in born[now]:
            life = program.lives[i]
            blocks[i] = [allocator.take(size) for size in parts(life.bytes, life.many)]
        if now >= 0 and program.steps[now].workspace:
            blocks[len(program.lives)] = [allocator.take(size) for size in parts(program.steps[now].workspace)]
            dies[now].insert(0, len(program.lives))
        for i in dies[now]:
            for block in blocks.pop(i):
                allocator.give(block)
    return allocator.most


def peak_cases(graph: Graph, values: Bindings, view: View = None) -> tuple[Regime, ...]:
    """Return the cases of the peak with the op and phase of each, even if there is only one."""
    cases, validity = _bound_regimes(graph, values, view), closed(graph, values, view)
    return tuple(regime(p.expr, owner, validity) for p, owner in cases)


def _bound_regimes(graph: Graph, values: Bindings, view: View) -> list[tuple[Poly, Owner]]:
    cases = [(p.bind(values), owner) for p, owner in live_cases(graph, values, view)]
    if all(p.constant is not None for p, _ in cases):
        cases = [max(cases, key=lambda item: item[0].constant or 0)]
    undominated = prune(cases, values.validity.known) if values else cases
    return [(p, owner.bound(values)) for p, owner in undominated]


@dataclass(frozen=True)
class Moment:
    """Live memory at one step."""

    op: str
    """running op, with iterations in brackets"""
    phase: str
    """its phase"""
    bytes: Formula
    """bytes live while it runs"""


@guarded()
@dataclass(frozen=True, repr=False)
class Timeline(Table):
    """Live memory over the program."""

    peak: Formula
    """maximum of live bytes"""
    moments: tuple[Moment, ...]
    """steps that allocate memory, in order"""
    holds_from: dict[str, int]
    """smallest value of each symbolic trip count for which the formulas hold"""
    _roles: dict[str, Formula] | None
    regimes: tuple[Regime, ...] = ()
    """cases of the peak with the op and phase of each; a single one once all sizes are bound"""
    roles: Mapping[str, tuple[int | float, ...]] = field(default_factory=dict)
    """bytes per role at each of the moments; empty while a size is open"""
    graph: str = ""
    """name of the graph"""
    workspaces: Mapping[str, Formula] = field(default_factory=dict)
    """workspace bytes by name: persistent for libraries, temporary for ops"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions"""

    @property
    def rows(self) -> tuple[Moment, ...]:
        """The moments."""
        return self.moments

    def _description(self) -> str:
        return f"graph {shorten(self.graph)}: {len(self.moments)} moments"

    def _columns(self) -> Sequence[Column]:
        return Column("op", read=lambda m: m.op or "(start)"), Column("phase"), Column("bytes", "B")

    def _facts(self) -> Sequence[Fact]:
        owners = {f"{r.op or '(start)'} ({r.phase or 'forward'})": None for r in self.regimes}
        return Fact("peak", self.peak, "B"), Fact("peak at", " or ".join(owners))

    def _held(self) -> Moment:
        if len(self.regimes) > 1:
            need_bound([self.peak], "what holds the peak")
        return next(m for m in self.moments if m.bytes == self.peak)

    @property
    def op(self) -> str:
        """Op at the peak; sizes have to be bound if `regimes` has several cases."""
        return self._held().op

    @property
    def phase(self) -> str:
        """Phase of that op."""
        return self._held().phase

    @property
    def by_role(self) -> dict[str, Formula]:
        """Bytes at the peak by storage role; all sizes have to be bound."""
        need_bound([self.peak], "roles at the peak")
        assert self._roles is not None
        return self._roles

    def plot(self, path: object = None) -> object:
        """Plot live bytes over steps with the peak marked; requires bound sizes and matplotlib.

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
        return VIEWS["plot_timeline"](self, path)


def _played_out(graph: Graph, values: Mapping[str, Poly]) -> int:
    """Return the number of steps with all loops unrolled, or more than the limit if a count is open."""

    def steps(g: Graph) -> int:
        out = 0
        for op in g.ops:
            if op.loop is not None:
                count = op.loop.count.bind(values).constant
                inner = max(steps(op.loop.body), 1)
                out += (_MOST_STEPS + 1 if count is None else int(count)) * inner
            else:
                out += 1
        return out

    return steps(graph)


def timeline(
    graph: Graph, /, *, device: str | None = None, arch: str | None = None, side: str = "device", **dims: int
) -> Timeline:
    """Return the live memory over the program.

    Parameters
    ----------
    graph : Graph
        Graph to analyze.
    device, arch : str, optional
        As in `peak_memory`.
    side : str
        As in `peak_memory`.
    **dims : int
        Sizes to bind; with all of them, loops are unrolled (up to 20,000 steps).

    Returns
    -------
    Timeline
        `.peak`, `.op`, `.phase`, `.by_role`, `.moments`, `.roles` (at each moment), `.workspaces` and `.plot(path)`.

    Raises
    ------
    BindingError
        If a size cannot be bound.
    GraphError
        If the device or architecture is unknown.
    """
    need_graph("timeline", graph)
    view = on_device("timeline", device, arch, side)
    values = bindings(graph, dims)
    unrolled = _played_out(graph, values) <= _MOST_STEPS
    copies = (lambda loop: int(loop.count.bind(values).constant or 0)) if unrolled else copies_for(values)
    program = _played(graph, copies, values, view)
    for life in program.lives:  # once, rather than at each step of the live range
        life.bytes = life.bytes.bind(values)
    live = [(now, p.bind(values)) for now, p in live_bytes(program)]
    validity = values.held if unrolled else closed(graph, values, view)
    spaces = _workspaces(program, values, validity)
    moments = tuple(
        Moment(program.steps[now].where, program.steps[now].op.phase, answer(p, validity))
        if now >= 0
        else Moment("", "forward", answer(p, validity))
        for now, p in live
    )
    if all(p.constant is not None for _, p in live):
        now, peak_bytes = max(live, key=lambda item: item[1].constant or 0)
        roles: dict[str, list[Poly]] = {}
        for life in program.lives:
            if (life.born is None or life.born <= now) and (life.dies is None or life.dies >= now):
                roles.setdefault(life.role, []).append(life.bytes.bind(values))
        if now >= 0 and program.steps[now].workspace:
            roles.setdefault("workspace", []).append(program.steps[now].workspace.bind(values))
        by_role = {role: answer(total(amounts)) for role, amounts in roles.items()}
        owner = program.steps[now].where if now >= 0 else None, program.steps[now].op.phase if now >= 0 else None
        return Timeline(
            answer(peak_bytes), moments, {} if unrolled else holds_from(graph, values, view), by_role,
            (Regime(peak_bytes.expr, *owner),), _roles_over(program, values, [now for now, _ in live]), graph.name,
            spaces, dict(graph.root.legend),
        )  # fmt: skip
    peak = answer(extremum(_bound_regimes(graph, values, view)), validity)
    from_, cases = holds_from(graph, values, view), peak_cases(graph, values, view)
    return Timeline(
        peak, moments, from_, None, cases, graph=graph.name, workspaces=spaces, legend=dict(graph.root.legend)
    )


def _workspaces(program: Program, values: Mapping[str, Poly], validity: Sequence[Validity]) -> dict[str, Formula]:
    amounts = {life.name: life.bytes for life in program.lives if life.role == "workspace"}
    amounts |= {step.where: step.workspace for step in program.steps if step.workspace}
    return {name: answer(p.bind(values), validity) for name, p in amounts.items()}


def _roles_over(
    program: Program, values: Mapping[str, Poly], steps: Sequence[int]
) -> dict[str, tuple[int | float, ...]]:
    """Return the bytes per role at the given steps, with all sizes bound."""
    changes: dict[str, dict[int, Rational]] = {}
    for life in program.lives:
        deltas, amount = changes.setdefault(life.role, {}), life.bytes.bind(values).constant or 0
        born = -1 if life.born is None else life.born
        deltas[born] = deltas.get(born, 0) + amount
        if life.dies is not None:
            deltas[life.dies + 1] = deltas.get(life.dies + 1, 0) - amount
    needs = {i: step.workspace.bind(values).constant or 0 for i, step in enumerate(program.steps) if step.workspace}
    out: dict[str, tuple[int | float, ...]] = {}
    for role, deltas in changes.items():
        live, due, amounts = Fraction(0), sorted(deltas, reverse=True), []
        for now in steps:
            while due and due[-1] <= now:
                live += deltas[due.pop()]
            amounts.append(number(live))
        out[role] = tuple(amounts)
    if needs:
        buffers = out.get("workspace", (0,) * len(steps))
        out["workspace"] = tuple(
            amount_kept + number(Fraction(needs.get(now, 0))) for now, amount_kept in zip(steps, buffers, strict=True)
        )
    return out


# -- arrays of sizes ---------------------------------------------------------------------------------------------------

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Programs by the number of unrolled iterations in each loop.
Programs: TypeAlias = dict[tuple[object, ...], Program]


class PointValues:
    """Evaluates formulas at arrays of sizes, caching each formula, monomial and generator."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        self.sizes = {name: np.asarray(n, dtype=np.float64) for name, n in sizes.items()}
        self._generators: dict[str, Any] = {}
        self._monomials: dict[Monomial, Any] = {}
        self._found: dict[Poly, Any] = {}

    def __call__(self, p: Poly) -> Any:
        """Return the values of a formula, a scalar if it is constant."""
        value = self._found.get(p)
        if value is None:
            with np.errstate(all="ignore"):
                each = [self._monomial(m) if c == 1 else float(c) * self._monomial(m) for m, c in p.terms.items()]
                value = self._found[p] = sum(each[1:], each[0]) if each else np.float64(0)
        return value

    def _monomial(self, m: Monomial) -> Any:
        value = self._monomials.get(m)
        if value is None:
            numerator, denominator = np.float64(1), np.float64(1)
            for key, e in m:  # divide once: exact for integers that divide
                factor = self._generator(key) ** abs(e)
                numerator, denominator = (
                    (numerator * factor, denominator) if e > 0 else (numerator, denominator * factor)
                )
            value = self._monomials[m] = numerator / denominator
        return value

    def _generator(self, key: str) -> Any:
        if key not in self._generators:
            self._generators[key] = plan(Poly({((key, 1),): 1}))(dict(self.sizes))
        return self._generators[key]


def refused(conditions: Iterable[Validity], sizes: Mapping[str, Array]) -> Any:
    """Return a mask of points that violate the conditions of a formula, or False if there are none."""
    mask = outside([requirement for validity in conditions for requirement in validity.tests()], sizes)
    return False if mask is None else mask


@collection_paused()
def peaks(
    graph: Graph,
    sizes: Mapping[str, Array],
    waiting: InFlightMicroBatches | None = None,
    programs: Programs | None = None,
) -> Array:
    """Return the peak memory at arrays of sizes, equal to `peak_memory` at each point.

    Loops are unrolled once for all points with the same distinguishable iterations. `waiting` describes the other
    pipeline stages, by default those of the graph; `programs` caches unrolled programs.
    """
    out = np.zeros(np.broadcast_shapes(*(np.shape(n) for n in sizes.values())))
    for mask, program in _programs(graph, sizes, out.size, waiting, {} if programs is None else programs):
        out[mask] = _most(program, PointValues({name: n if np.ndim(n) == 0 else n[mask] for name, n in sizes.items()}))
    return out


def _programs(
    graph: Graph, sizes: Mapping[str, Array], n_points: int, waiting: InFlightMicroBatches | None, programs: Programs
) -> Iterator[tuple[Array, Program]]:
    """Yield programs with a mask of the points that each applies to."""
    every = list(loops(graph))
    names = sorted({name for loop in every for name in loop.count.names()})
    columns = np.array([np.broadcast_to(sizes[name], n_points) for name in names], dtype=np.int64).reshape(
        len(names), n_points
    )
    counts, inverse = np.unique(columns, axis=1, return_inverse=True)
    groups: dict[tuple[object, ...], list[int]] = {}
    until = any(loop.until for loop in every)  # the iteration index bounds these loops
    for i, point in enumerate(counts.T.tolist()):
        copies = copies_for({name: as_poly(n) for name, n in zip(names, point, strict=True)})
        groups.setdefault((*map(copies, every), *(point if until else ())), []).append(i)
    for key, like in groups.items():
        if key not in programs:
            values = {name: as_poly(int(n)) for name, n in zip(names, counts[:, like[0]], strict=True)}
            programs[key] = play(graph, copies_for(values), values if until else {}, waiting)
        yield np.isin(inverse.reshape(-1), like), programs[key]


def _most(program: Program, value: PointValues) -> Any:
    """Return the maximum of live bytes."""
    births: dict[int | None, list[LiveRange]] = {}
    deaths: dict[int | None, list[LiveRange]] = {}
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


def _bytes(lives: Iterable[LiveRange], value: PointValues) -> Any:
    return sum((value(life.bytes) for life in lives), np.float64(0))
