"""Regimes: the cases behind a maximum, the sizes for which they hold, and crossover between memory and compute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import sympy

from ..algebra.conditions import Conditions, Requirement, Validity, conditioned, held_by, plain
from ..algebra.dominance import NOTHING_KNOWN, Relation, Relations, prune
from ..algebra.extremum import Max, Min, Owner, as_expr, as_latex, as_text, extremum
from ..algebra.polynomial import ONE, Poly, poly, total
from ..algebra.solving import solve
from ..algebra.symbols import shown, symbol
from ..bind.evaluate import Formula, answer, plan
from ..errors import BindingError, GraphError, PatternError, UnsupportedError
from ..hardware.specs import Hardware, load_hardware
from ..ir.graph import Graph, Op, bindings, conditions, need_open
from ..ir.graph import dimension_size as size_of
from .step_time import warn_of
from .work import Fallback, Rates, exact, need_other_names, works

__all__ = [
    "Range",
    "Regime",
    "Regimes",
    "narrowed",
    "ranges",
    "regime",
    "regimes",
    "crossover",
]


# -- regimes -----------------------------------------------------------------------------------------------------------


#: Smallest and largest size.
Range = tuple[int, int]

# Sample points for shares.
_POINTS = 4096
# Maximum number of sub-boxes in which a case may be excluded; each size with a range doubles the work per sub-box.
_MOST_PARTS, _MOST_WORK = 48, 48 << 8

_Case = tuple[Poly, Owner]


class _Plain(NamedTuple):
    formula: Formula
    op: str | None
    phase: str | None


class Regime(_Plain):
    """One case in a Max or Min; otherwise the tuple `(formula, op, phase)`.

    Parameters
    ----------
    formula : sympy.Expr or number
        Value in this case.
    op, phase : str or None
        Name and phase of the op that owns it: forward, recompute, backward or optimizer.
    label : str
        Description for readers: scope, kind, phase, and the tensor whose gradient it computes.
    share : float, optional
        Fraction of a box in which the case holds, by logarithmic measure.
    roles : sequence of (str, Poly)
        For a peak, the bytes per role.
    held : sequence of Validity
        Conditions under which the formulas hold.
    """

    label: str
    share: float | None
    _roles: Sequence[tuple[str, Poly]]
    _held: Sequence[Validity]

    def __new__(
        cls,
        formula: Formula,
        op: str | None,
        phase: str | None,
        *,
        label: str = "",
        share: float | None = None,
        roles: Sequence[tuple[str, Poly]] = (),
        held: Sequence[Validity] = (),
    ) -> Regime:
        """Create the tuple and attach the other attributes."""
        out = super().__new__(cls, formula, op, phase)
        out.label, out.share, out._roles, out._held = label or op or "", share, roles, held
        return out

    @property
    def by_role(self) -> dict[str, Formula]:
        """For a peak, the bytes per role, which add up to the formula; otherwise empty."""
        return {role: answer(p, self._held) for role, p in self._roles if p}


class Regimes(list[Regime]):
    """Case list from `regimes`, printed one per line."""

    largest = True
    """whether the largest or the smallest case holds"""

    def __str__(self) -> str:
        return as_text(self._cases(), largest=self.largest)

    def _repr_latex_(self) -> str:
        """Return the LaTeX form for notebooks."""
        return rf"$\displaystyle {as_latex(self._cases(), largest=self.largest)}$"

    def _cases(self) -> list[tuple[Poly, str]]:
        shares = ["" if r.share is None else f", {100 * r.share:.3g} % of the box" for r in self]
        return [(poly(_exact(r.formula)), r.label + share) for r, share in zip(self, shares, strict=True)]


def _exact(formula: Formula) -> sympy.Expr:
    """Return a formula with a float such as 5.25 bytes converted to a fraction."""
    expr = plain(as_expr(formula))
    return sympy.Rational(*float(expr).as_integer_ratio()) if expr.is_Float else expr


def regimes(formula: Formula, within: Mapping[str, Range] | None = None) -> Regimes:
    """List the cases of a formula, with the op and phase that own each.

    Parameters
    ----------
    formula : sympy.Expr or number
        A Max or Min, also with a factor or summand, or any other formula.
    within : mapping of str to (int, int), optional
        Ranges for symbols; only cases that may hold within them are listed.

    Returns
    -------
    list of Regime
        `(formula, op, phase)` for each argument of the Max or Min; a single entry for other formulas. Each has `.label`
        and, for a peak, `.by_role`. If every symbol has a range or follows from others, `.share` is the fraction of
        4,096 points, uniform in the logarithm of each size, at which the case holds.

    Raises
    ------
    BindingError
        If a range is not a pair of sizes, names no symbol in the formula, or contradicts the graph's assumptions.

    Notes
    -----
    Dropped cases are proved redundant: in the box, or in each of several sub-boxes, a convex combination of other cases
    is at least as large (`costgraph.Max`). A case remains with a share of 0 if neither this proof nor a point at which
    it holds is found.

    Examples
    --------
    >>> from costgraph import dims
    >>> B, D, F = dims("B D F")
    >>> [r.formula for r in regimes(1 + Max(B*D, B*F))]
    [B*D + 1, B*F + 1]
    >>> [(r.formula, r.share) for r in regimes(Max(B**2, 100*B), within={"B": (1, 64)})]
    [(100*B, 1.0)]
    """
    formula = as_expr(formula)
    shares: Sequence[float | None] | None = None
    if within is not None:
        formula, shares = narrowed(formula, ranges(within, formula, "regimes"))
    expr, validities = plain(formula), held_by(formula)
    extremum_expr = _inner(expr)
    if extremum_expr is None:
        return Regimes([Regime(formula, None, None, share=None if shares is None else shares[0])])
    out = Regimes()
    out.largest = isinstance(extremum_expr, Max)
    for i, (arg, owner) in enumerate(zip(extremum_expr.args, extremum_expr.owners, strict=True)):
        # arguments of a Max may contain another one, such as a minimum over windows in a FLOP count
        case = arg if expr is extremum_expr else expr.xreplace({extremum_expr: arg})
        mine = owner if expr is extremum_expr else owner._replace(roles=())
        out.append(regime(case, mine, validities, None if shares is None else shares[i]))
    return out


def regime(formula: sympy.Expr, owner: Owner, validities: Sequence[Validity], share: float | None = None) -> Regime:
    """Return a public Regime."""
    value = conditioned(formula, validities)
    return Regime(value, owner.op, owner.phase, label=owner.label, share=share, roles=owner.roles, held=validities)


def _inner(expr: sympy.Expr) -> Any:
    """Return the first Max or Min in an expression."""
    return next((e for e in sympy.preorder_traversal(expr) if isinstance(e, Max | Min)), None)


# -- ranges of sizes ---------------------------------------------------------------------------------------------------


def ranges(within: object, formula: Formula, question: str) -> dict[str, Range]:
    """Return validated ranges for a formula's symbols, or raise BindingError."""
    if not isinstance(within, Mapping):
        raise BindingError(f"{question}: within is {shown(within)}, expected sizes such as {{'B': (1, 64)}}")
    names = {s.name for s in as_expr(formula).free_symbols}.union(*(v.names for v in held_by(formula)))
    return {name: _range(name, pair, names, question) for name, pair in within.items()}


def _range(name: object, pair: object, names: set[str], question: str) -> Range:
    if name not in names:
        expected = ", ".join(sorted(names)) or "none, as all are bound"
        raise BindingError(f"{question}: within has {shown(name)}, expected open sizes: {expected}")
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise BindingError(f"{question}: within has {name}={shown(pair)}, expected its smallest and largest size")
    low, high = (size_of(str(name), n) for n in pair)
    if low > high:
        raise BindingError(f"{question}: within has {name}={shown(pair)}, expected the smallest size first")
    return low, high


def _relations(box: Mapping[str, Range]) -> Iterator[Relation]:
    for name, (low, high) in sorted(box.items()):
        size = poly(symbol(name))
        if low == high:
            yield Relation(f"{name} == {low}", size - low, equal=True, subject=[name])
        else:
            yield Relation(f"{name} >= {low}", size - low, equal=False, subject=[name])
            yield Relation(f"{name} <= {high}", high - size, equal=False, subject=[name])


def narrowed(formula: sympy.Expr, box: Mapping[str, Range]) -> tuple[sympy.Expr, list[float | None]]:
    """Return a formula restricted to ranges, and each remaining case's share of the box."""
    validities, expr = held_by(formula), plain(formula)
    assumptions = [r for v in validities for r in v.known.relations]
    try:
        relations = Relations([*_relations(box), *assumptions])
    except PatternError as error:
        raise BindingError(f"within: {error}") from None
    validities_in_box = (*validities, Validity(Conditions(tuple(_relations(box)), ())))
    extremum_expr = _inner(expr)
    cases: list[_Case] = (
        [] if extremum_expr is None else list(zip(map(poly, extremum_expr.args), extremum_expr.owners, strict=True))
    )
    points = _points(relations, box, [p for p, _ in cases] or [poly(_exact(expr))])
    if extremum_expr is None:
        return conditioned(expr, validities_in_box), [None if points is None else 1.0]
    largest = isinstance(extremum_expr, Max)
    remaining = _needed(cases, assumptions, box, _holding(cases, points, largest=largest), largest=largest)
    inner = extremum(remaining, largest=largest)
    shares = _shares([p for p, _ in remaining], inner, points, largest=largest)
    return conditioned(
        inner if expr is extremum_expr else expr.xreplace({extremum_expr: inner}), validities_in_box
    ), shares


def _needed(
    cases: Sequence[_Case], assumptions: Sequence[Relation], box: Mapping[str, Range], sure: set[Poly], *, largest: bool
) -> list[_Case]:
    """Return the cases that hold at some point, or are not proved redundant in some sub-box."""
    needed, queue, n_boxes = set(sure), deque([(dict(box), list(cases))]), 0
    limit = min(_MOST_PARTS, _MOST_WORK >> sum(low < high for low, high in box.values()))
    while queue:
        sub_box, candidates = queue.popleft()
        try:
            relations = Relations([*_relations(sub_box), *assumptions])
        except PatternError:  # no admissible sizes there
            continue
        candidates = prune(candidates, relations, largest=largest)
        n_boxes += 1
        undecided = [p for p, _ in candidates if p not in needed]
        name = max(sub_box, key=lambda n: (sub_box[n][1] / sub_box[n][0], n))
        low, high = sub_box[name]
        if not undecided or low == high or n_boxes + len(queue) >= limit:
            needed.update(undecided)
        else:
            middle = isqrt(low * high)
            queue += [({**sub_box, name: half}, candidates) for half in ((low, middle), (middle + 1, high))]
    return [case for case in cases if case[0] in needed]


# -- sample points -----------------------------------------------------------------------------------------------------

_Points = dict[str, "np.ndarray[Any, Any]"]


def _points(relations: Relations, box: Mapping[str, Range], formulas: Sequence[Poly]) -> _Points | None:
    """Return admissible sample sizes, log-uniform; None if a symbol has no range."""
    names = set(box).union(*(p.names() for p in formulas), *(r.difference.names() for r in relations.relations))
    fixed = dict(relations.settled)
    if not (names - fixed.keys()) <= box.keys():
        return None
    draw = np.random.default_rng(0)
    out: _Points = {}
    for name in sorted(names - fixed.keys()):
        low, high = box[name]
        spread = np.exp(draw.uniform(np.log(low), np.log(high + 1), _POINTS))
        out[name] = np.clip(np.floor(spread), low, high)
    for name, value in reversed(relations.settled):
        out[name] = np.broadcast_to(np.asarray(plan(value)(out), dtype=float), (_POINTS,))
    fits = np.ones(_POINTS, dtype=bool)
    for relation in relations.relations:
        margin = plan(relation.difference)(out)
        fits &= np.abs(margin) < 0.5 if relation.equal else margin >= 0
    for name, _ in relations.settled:
        fits &= (out[name] == np.floor(out[name])) & (out[name] >= 1)
    return {name: sizes[fits] for name, sizes in out.items()} if fits.any() else None


def _values(ps: Sequence[Poly], points: _Points) -> np.ndarray[Any, Any]:
    n_points = len(next(iter(points.values()), ()))
    return np.array([np.broadcast_to(np.asarray(plan(p)(points), dtype=float), (n_points,)) for p in ps])


def _first(ps: Sequence[Poly], points: _Points, *, largest: bool) -> np.ndarray[Any, Any]:
    values = _values(ps, points)
    return np.asarray(values.argmax(axis=0) if largest else values.argmin(axis=0))


def _holding(cases: Sequence[_Case], points: _Points | None, *, largest: bool) -> set[Poly]:
    if points is None:
        return set()
    ps = [p for p, _ in cases]
    return {ps[i] for i in np.unique(_first(ps, points, largest=largest))}


def _shares(ps: Sequence[Poly], inner: sympy.Expr, points: _Points | None, *, largest: bool) -> list[float | None]:
    """Return the shares in the extremum's argument order."""
    if points is None:
        return [None] * len(ps)
    ordered = list(map(poly, inner.args)) if isinstance(inner, Max | Min) else list(ps)
    first = _first(ordered, points, largest=largest)
    return [float(n) for n in np.bincount(first, minlength=len(ordered)) / len(first)]


# -- crossover ---------------------------------------------------------------------------------------------------------


# Maximum size for the search, as a power of two.
_DOUBLINGS = 61


def crossover(
    of: Graph | Op, hardware: str | Hardware, symbol: str, /, *, fallback: Fallback = None, **dims: int
) -> Formula:
    """Return the size at which an op or graph changes from memory-bound to compute-bound.

    Parameters
    ----------
    of : Graph or Op
        Op or graph to analyze; a graph counts as declared, all ops together.
    hardware : str, path-like or Hardware
        The device.
    symbol : str
        Dimension to solve for, such as `"B"`, or a symbol of symbolic hardware, such as `"bandwidth"`.
    fallback : str or mapping, optional
        As in `roofline`.
    **dims : int
        Sizes for other dimensions.

    Returns
    -------
    sympy.Expr or float
        Size at which compute time equals memory time: a formula while other sizes are open, else a number. If it is not
        a ratio of two sums, the first integer size after the change. `math.inf` if memory-bound and 0 if compute-bound
        at every size; with all other sizes bound, at every size that the assumptions allow. A formula ignores
        assumptions: if its value is below 1 or infinite, all sizes have the same bound, and relations between the
        symbol and open sizes are not considered.

    Raises
    ------
    BindingError, SpecError, UnsupportedError
        If a name is not a dimension, the device has no rate, or no closed form exists: then bind the other sizes.

    Warns
    -----
    StandInWarning
        If a rate is missing; the text names its stand-in.

    Examples
    --------
    >>> import costgraph as cg
    >>> N = cg.dims("N")
    >>> with cg.Graph("g", dtype="bf16") as g:
    ...     g.output(g.input("a", (N, N)) @ g.input("b", (N, N)))
    >>> round(cg.crossover(g, "h100-sxm", "N"), 1)
    886.0
    >>> unknown = cg.load_hardware("h100-sxm").symbolic()
    >>> cg.crossover(g, unknown, "N"), cg.crossover(g, unknown, "bandwidth")
    (3*peak_bf16/bandwidth, 3*peak_bf16/N)
    """
    if not isinstance(of, Graph | Op):
        raise GraphError(f"crossover of {type(of).__name__}, expected a graph or one of its ops")
    device = load_hardware(hardware)
    graph = of if isinstance(of, Graph) else of.graph.root
    need_other_names(graph, device, "crossover")
    if symbol not in device.symbols:
        need_open(graph, symbol, dims, "crossover")
    values = bindings(graph, dims)
    values.pop(symbol, None)
    chosen = [w for w in works(graph) if of is graph or w.op is of]
    if not chosen:
        raise GraphError(f"crossover: op {getattr(of, 'name', '')!r} takes no time")
    collective_work = next((w for w in chosen if w.collective), None)
    if collective_work is not None:
        raise UnsupportedError(
            f"crossover: {collective_work.op.name!r} is a collective; expected an op of a single device"
        )
    rates = Rates(device, fallback)
    excess = total(c - m for c, m in (w.seconds(rates) for w in chosen)).bind(values)
    warn_of(device, rates.stand_ins.values())
    size = _root(excess, symbol, _allowed(graph, values, symbol))
    return answer(size, values.held) if isinstance(size, sympy.Expr) else size


@dataclass(frozen=True)
class _Sizes:
    """Interval of allowed sizes, unbounded above if `most` is None."""

    least: int = 1
    most: int | None = None

    def __contains__(self, size: float) -> bool:
        return self.least <= size and (self.most is None or size <= self.most)

    def both(self, other: _Sizes) -> _Sizes:
        """Return the intersection with another interval."""
        ends = [m for m in (self.most, other.most) if m is not None]
        return _Sizes(max(self.least, other.least), min(ends, default=None))

    def spread(self) -> list[int]:
        """Return both ends, and the powers of two between them."""
        powers = (2**i for i in range(_DOUBLINGS) if 2**i in self)
        return sorted({*powers, self.least, *([] if self.most is None else [self.most])})


def _allowed(graph: Graph, values: Mapping[str, Poly], symbol: str) -> _Sizes:
    """Return the sizes that assumptions and declared sizes allow, with all others bound."""
    out = _Sizes()
    for requirement in _asked(graph, values):
        if requirement.amount.names() == {symbol}:
            out = out.both(_meeting(requirement, symbol))
    if out.most is not None and out.least > out.most:
        raise UnsupportedError(f"crossover: no size of {symbol} is allowed with the other sizes")
    return out


def _asked(graph: Graph, values: Mapping[str, Poly]) -> Iterator[Requirement]:
    for r in graph.root.relations.relations:
        yield Requirement(r.difference.bind(values), equal=r.equal, strict=r.strict)
    for c in conditions(graph):
        yield Requirement(c.formula.bind(values), c.least)


def _meeting(requirement: Requirement, symbol: str) -> _Sizes:
    """Return the interval in which a condition holds; all sizes if none is found."""
    if requirement.equal:
        solution = solve(requirement.amount, [symbol])
        size = None if solution is None else solution[1].constant
        return _Sizes() if size is None else _Sizes(math.ceil(size), math.floor(size))

    def holds(size: int) -> bool:
        return requirement.holds({symbol: size})

    met = [holds(2**i) for i in range(_DOUBLINGS)]
    if not any(met):
        return _Sizes()
    first, last = met.index(True), _DOUBLINGS - 1 - met[::-1].index(True)
    smallest = 1 if first == 0 else _first_size(holds, 2 ** (first - 1), 2**first)
    return _Sizes(
        smallest, None if last == _DOUBLINGS - 1 else _first_size(lambda n: not holds(n), 2**last, 2 ** (last + 1)) - 1
    )


def _first_size(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest size up to `high` for which `holds` is true, by bisection."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _root(excess: Poly, symbol: str, sizes: _Sizes) -> Formula:
    """Solve for the size at which the excess of compute over memory time becomes positive."""
    powers: dict[int, list[Poly]] = {}
    for m, c in excess.terms.items():
        power = dict(m).get(symbol, 0)
        cofactor = Poly({tuple(f for f in m if f[0] != symbol): c})
        if symbol in cofactor.names():
            return _search(excess, symbol, sizes)
        powers.setdefault(power, []).append(cofactor)
    sums = {p: total(coefficients) for p, coefficients in powers.items() if total(coefficients)}
    if NOTHING_KNOWN.nonnegative(excess):
        return 0
    if NOTHING_KNOWN.nonnegative(-excess):
        return math.inf
    lowest_power = min(sums)
    if max(sums) - lowest_power != 1:
        return _search(excess, symbol, sizes)
    turn = answer(sympy.cancel(-sums[lowest_power].expr / sums[lowest_power + 1].expr))
    if isinstance(turn, sympy.Expr) or turn in sizes:
        return turn
    return 0 if _is_positive(excess, symbol, sizes.least) else math.inf


def _is_positive(excess: Poly, symbol: str, size: int) -> bool:
    return bool(exact(excess.bind({symbol: ONE * size})) >= 0)


def _search(excess: Poly, symbol: str, sizes: _Sizes) -> Formula:
    """Find the first size after the change by bisection; all other names have to be bound."""
    open_names = sorted(excess.names() - {symbol})
    if open_names:
        raise UnsupportedError(
            f"crossover: no closed form for {symbol} in {excess}, expected sizes for {', '.join(open_names)}"
        )

    def positive(size: int) -> bool:
        return _is_positive(excess, symbol, size)

    tried = sizes.spread()
    signs = [positive(size) for size in tried]
    changes = [i for i in range(len(tried) - 1) if signs[i] != signs[i + 1]]
    if not changes:
        return 0 if signs[0] else math.inf
    if len(changes) > 1:
        places = ", ".join(str(tried[i]) for i in changes)
        raise UnsupportedError(
            f"crossover: {symbol} has several crossovers, above {places}; expected an op or a graph with one"
        )
    before = signs[changes[0]]
    return _first_size(lambda size: positive(size) != before, tried[changes[0]], tried[changes[0] + 1])
