"""Crossover sizes between memory-bound and compute-bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import sympy

from ..algebra.conditions import Requirement
from ..algebra.dominance import NOTHING_KNOWN
from ..algebra.polynomial import ONE, Poly, total
from ..algebra.solving import solve
from ..bind.evaluate import Formula, answer
from ..errors import GraphError, UnsupportedError
from ..hardware.specs import Hardware, load_hardware
from ..ir.graph import (
    Graph,
    Op,
    bindings,
    conditions,
    need_open,
)
from .step_time import warn_of
from .work import Fallback, Rates, exact, need_other_names, works

__all__ = ["crossover"]

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
    smallest = 1 if first == 0 else _first(holds, 2 ** (first - 1), 2**first)
    return _Sizes(
        smallest, None if last == _DOUBLINGS - 1 else _first(lambda n: not holds(n), 2**last, 2 ** (last + 1)) - 1
    )


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
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
    return _first(lambda size: positive(size) != before, tried[changes[0]], tried[changes[0] + 1])
