"""Break-even sizes: where one plan overtakes another, from the closed forms of a search with one size symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Annotated, Any

import numpy as np

from ..algebra.symbols import shorten, shown
from ..errors import BindingError
from ..hardware.tables import Column, Fact, Table, legend_rows
from ..ir.graph import dimension_size as size_of
from ..notation.validation import READ, guarded
from .strategy_search import TIE, Plan, PlanPoint, Search, columns
from .strategy_templates import CHOICES, PlanFamily, RankCosts, Structure

__all__ = [
    "Crossing",
    "Crossovers",
    "crossovers",
]

#: Sizes at which the fastest plan is determined first.
_SAMPLES = 64
#: Times with a smaller relative difference are equal.
_CLOSE = 1e-12


@dataclass(frozen=True)
class Crossing:
    """The smallest size from which a plan is the first of a search."""

    size: int
    """the smallest size"""
    plan: Plan | None
    """the plan, with its figures at the searched sizes; None if no plan fits"""
    seconds: float
    """seconds of a step at this size; inf if no plan fits"""
    memory: float
    """peak memory of a device at this size, in bytes"""


@guarded()
@dataclass(frozen=True, repr=False)
class Crossovers(Table):
    """Sizes at which the best plan changes. Created by `crossovers`."""

    graph: str
    """name of the model"""
    symbol: str
    """the dimension that varies"""
    rows: tuple[Crossing, ...]
    """by size"""
    legend: Mapping[str, str] = field(default_factory=dict, compare=False)
    """descriptions of dimensions"""

    def _description(self) -> str:
        return f"{shorten(self.graph)}, {shorten(self.symbol)}: {len(self.rows)} plans"

    def _columns(self) -> Sequence[Column]:
        def of(name: str) -> Any:
            return lambda row: None if row.plan is None else getattr(row.plan, name)

        degrees = [d for d in ("dp", "tp", "pp", "cp", "ep") if d in ("dp", "tp") or self._varies(d)]
        return (
            Column("size", "1", title=f"from {self.symbol}"), *(Column(d, "1", read=of(d)) for d in degrees),
            Column("zero", "1", read=of("zero")), Column("micro_batch", "1", of("micro_batch"), "micro-batch"),
            Column("accumulate", "1", of("accumulate")), Column("checkpoint", read=of("checkpoint")),
            Column("seconds", "s", title="step"), Column("memory", "B", title="peak memory"),
        )  # fmt: skip

    def _facts(self) -> Iterable[Fact]:
        return [Fact(*row) for row in legend_rows({self.symbol}, self.legend)]

    def _varies(self, degree: str) -> bool:
        return any(row.plan is not None and getattr(row.plan, degree) != 1 for row in self.rows)


@dataclass
class _Curves:
    """Plans with a common structure, as functions of one size."""

    family: PlanFamily
    symbol: str
    structure: Structure
    plans: Sequence[Plan]

    def __post_init__(self) -> None:
        self.points = [PlanPoint(*(getattr(p, name) for name in PlanPoint._fields)) for p in self.plans]
        self.forms: RankCosts = self.family.forms(self.structure)

    def at(self, sizes: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return peak bytes and seconds of each plan at each size, NaN if the model rejects the size."""
        degrees = {name: np.repeat(array, len(sizes)) for name, array in columns(self.points).items()}
        values = self.family.sizes(degrees, self.structure)
        values[self.symbol] = np.tile(np.array(sizes, dtype=np.int64), len(self.points))
        costs = self.forms.at(values, self.family.cuts(self.structure, degrees["pp"]))
        peak = np.max([*costs.peaks.values()], axis=0)  # NaN stays
        return peak.reshape(-1, len(sizes)), costs.seconds.reshape(-1, len(sizes))


def crossovers(
    found: Search, symbol: str, within: Annotated[Any, READ], /, *, multiple_of: int = 1
) -> Crossovers:  # fmt: skip
    """Return the sizes of a dimension at which the best plan changes: the fastest that fits, up to ties.

    Parameters
    ----------
    found : Search
        Plans that fit at the searched sizes.
    symbol : str
        The dimension to vary, such as `"S"`; the batch stays the same.
    within : tuple of (int, int)
        Smallest and largest size.
    multiple_of : int
        Try only multiples of this number, such as a common multiple of the degrees that split the dimension.

    Returns
    -------
    Crossovers
        `.rows`: the sizes from which a plan is the best, which is the fastest, or one with fewer pipeline stages within
        1 % of it; `print` it.

    Raises
    ------
    BindingError
        If the dimension had no size in the search, or the range contains no multiple.

    Notes
    -----
    Time and peak memory of each plan are closed forms in the size. The best plan is evaluated at 64 sizes and, where it
    changes between two of them, by bisection down to a single multiple. A plan that is the best only between two
    neighbouring sizes of these 64 is not found.

    Examples
    --------
    >>> import costgraph as cg
    >>> model = cg.models.load("llama-3-8b")
    >>> found = cg.plan.search(
    ...     model, devices=8, hardware="h100-sxm", precision="bf16", B=8, S=2048, tp=(1, 8), zero=3, checkpoint="none",
    ...     sequence=True, accumulate=1,
    ... )
    >>> print(cg.plan.crossovers(found, "S", (1024, 65536), multiple_of=1024))
    from S  dp  tp  zero  micro-batch  accumulate  checkpoint      step  peak memory
     1,024   1   8     3            8           1  none          124 ms     20.17 GB
     3,072   8   1     3            1           1  none        287.9 ms     31.08 GB
    12,288                                                          inf          inf
    symbols  S sequence length
    """
    place = "crossovers"
    family = found.family
    if family is None or symbol not in family.dims or symbol in family.model.defaults:
        names = ", ".join(sorted(family.dims)) if family is not None else "none"
        raise BindingError(f"{place}: {shown(symbol)} had no size in the search, expected one of {names}")
    step = size_of(f"{place}: multiple_of", multiple_of)
    low, high = (size_of(f"{place}: within", n) for n in _pair(place, within))
    first, last = -(-low // step), high // step
    if last < first:
        raise BindingError(f"{place}: no multiple of {step} from {low} to {high}")
    opened = replace(family, dims={k: v for k, v in family.dims.items() if k != symbol})
    curves = [_Curves(opened, symbol, *group) for group in _grouped(opened, found.rows).items()]
    best: dict[int, Crossing] = {}

    def look(multiples: Iterable[int]) -> None:
        sizes = [n * step for n in multiples]
        best.update(zip((n // step for n in sizes), _fastest(curves, sizes, found), strict=True))

    look(sorted({round(float(n)) for n in np.geomspace(first, last, _SAMPLES)}))
    while between := [(a + b) // 2 for a, b in pairwise(sorted(best)) if b - a > 1 and best[a].plan != best[b].plan]:
        look(between)
    every = [best[n] for n in sorted(best)]
    rows = tuple(every[:1] + [b for a, b in pairwise(every) if a.plan != b.plan])
    return Crossovers(found.graph, symbol, rows, dict(family.model.legend))


def _pair(place: str, within: object) -> tuple[Any, Any]:
    if not isinstance(within, tuple | list) or len(within) != 2:
        raise BindingError(f"{place}: within {shown(within)}, expected the smallest and largest size")
    return within[0], within[1]


def _grouped(family: PlanFamily, plans: Sequence[Plan]) -> Mapping[Structure, list[Plan]]:
    """Group plans by structure, as in a search."""
    out: dict[Structure, list[Plan]] = {}
    tensor = {tp: family.tensor(tp) for tp in {p.tp for p in plans}}
    for p in plans:
        choices = {name: getattr(p, name) for name in CHOICES}
        out.setdefault(family.structure(p, tensor[p.tp], **choices), []).append(p)
    return out


def _fastest(curves: Sequence[_Curves], sizes: Sequence[int], result: Search) -> Iterator[Crossing]:
    """Yield the best plan at each size: among ties, the fastest with the fewest stages."""
    plans = [plan for curve in curves for plan in curve.plans]
    evaluated = [curve.at(sizes) for curve in curves]
    peaks, times = (np.vstack([pair[i] for pair in evaluated]) for i in (0, 1))
    fits = np.isfinite(peaks) & np.isfinite(times) & (peaks <= result.limit)
    times = np.where(fits, times, inf)
    places = {id(plan): i for i, plan in enumerate(result.rows)}
    rank, stages = np.array([(places[id(plan)], plan.pp) for plan in plans]).T
    for j, size in enumerate(sizes):
        shortest = times[:, j].min()
        if shortest == inf:
            yield Crossing(size, None, inf, inf)
            continue
        tie = np.flatnonzero(times[:, j] <= shortest * (1 + TIE))
        few = tie[stages[tie] == stages[tie].min()]
        close = few[times[few, j] <= times[few, j].min() * (1 + _CLOSE)]
        index = int(close[rank[close].argmin()])
        yield Crossing(size, plans[index], float(times[index, j]), float(peaks[index, j]))
