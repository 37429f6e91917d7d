"""Where one plan overtakes another as a size grows: the closed forms of plans that were found, with that size open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Annotated, Any

import numpy as np

from ..algebra.symbols import shorten, shown
from ..errors import BindingError
from ..hardware.tables import Column, Table
from ..ir.graph import dimension_size as size_of
from ..notation.validation import READ, guarded
from .strategy_search import TIE, Plan, Point, Search, columns
from .strategy_templates import CHOICES, Family, Forms, Structure

__all__ = [
    "Crossing",
    "Crossovers",
    "crossovers",
]

#: Sizes that are looked at before it is known where the fastest plan changes.
_SAMPLES = 64
#: Times that differ by less are equal.
_CLOSE = 1e-12


@dataclass(frozen=True)
class Crossing:
    """From which size on a plan is the first of a search."""

    size: int
    """the first size"""
    plan: Plan | None
    """the plan, with the figures that it was found with; None where none fits"""
    seconds: float
    """of its step at this size; inf where none fits"""
    memory: float
    """bytes of a device at the peak, at this size"""


@guarded()
@dataclass(frozen=True, repr=False)
class Crossovers(Table):
    """Sizes from which on other plans are the fastest, but for a tie. Made by `crossovers`."""

    graph: str
    """name of the model"""
    symbol: str
    """the dimension whose size grows"""
    rows: tuple[Crossing, ...]
    """by size"""

    def _about(self) -> str:
        return f"{shorten(self.graph)}, {shorten(self.symbol)}: {len(self.rows)} plans"

    def _columns(self) -> Sequence[Column]:
        def of(name: str) -> Any:
            return lambda row: None if row.plan is None else getattr(row.plan, name)

        degrees = [d for d in ("dp", "tp", "pp", "cp", "ep") if d in ("dp", "tp") or self._varies(d)]
        return (
            Column("size", "1", title=f"from {self.symbol}"), *(Column(d, "1", read=of(d)) for d in degrees),
            Column("zero", "1", read=of("zero")), Column("micro_batch", "1", title="micro", read=of("micro_batch")),
            Column("accumulate", "1", title="times", read=of("accumulate")),
            Column("checkpoint", read=of("checkpoint")), Column("seconds", "s", title="step"),
            Column("memory", "B", title="peak memory"),
        )  # fmt: skip

    def _varies(self, degree: str) -> bool:
        return any(row.plan is not None and getattr(row.plan, degree) != 1 for row in self.rows)


@dataclass
class _Curves:
    """Plans of one structure, as functions of a size."""

    family: Family
    symbol: str
    structure: Structure
    plans: Sequence[Plan]

    def __post_init__(self) -> None:
        self.points = [Point(*(getattr(p, name) for name in Point._fields)) for p in self.plans]
        self.forms: Forms = self.family.forms(self.structure)

    def at(self, sizes: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return bytes and seconds of each plan at each size, NaN where the model refuses it."""
        degrees = {name: np.repeat(array, len(sizes)) for name, array in columns(self.points).items()}
        known = self.family.sizes(degrees, self.structure)
        known[self.symbol] = np.tile(np.array(sizes, dtype=np.int64), len(self.points))
        found = self.forms.at(known, self.family.cuts(self.structure, degrees["pp"]))
        peak = np.max([*found.peaks.values()], axis=0)  # NaN stays
        return peak.reshape(-1, len(sizes)), found.seconds.reshape(-1, len(sizes))


def crossovers(
    found: Search, symbol: str, within: Annotated[Any, READ], /, *, multiple_of: int = 1
) -> Crossovers:  # fmt: skip
    """Return from which sizes of a dimension on which plan of a search is the fastest that fits, but for a tie.

    Parameters
    ----------
    found : Search
        Plans, which fitted at the sizes that were searched.
    symbol : str
        The dimension whose size changes, such as `"S"`; the sequences of a step stay as many.
    within : tuple of (int, int)
        Least and largest size.
    multiple_of : int
        Only multiples of it are looked at, such as of all degrees that split it.

    Returns
    -------
    Crossovers
        `.rows`: a size, and the plan that a search has first from it to the next one, which is the fastest, or one of
        fewer stages up to 1 % behind; `print` it.

    Raises
    ------
    BindingError
        If the dimension had no size in the search, or the range has no multiple in it.

    Notes
    -----
    Time and peak of each plan are closed forms in the size, in which the order of plans is looked at on 64 sizes and,
    wherever it changes between two of them, by halving down to a single multiple. A plan that is the fastest between
    two neighbours of these 64 alone is not found.

    Examples
    --------
    >>> import costgraph as cg
    >>> model = cg.models.load("llama-3-8b")
    >>> found = cg.plan.search(
    ...     model, devices=8, hardware="h100-sxm", precision="bf16", B=8, S=2048, tp=(1, 8), zero=3, checkpoint="none",
    ...     sequence=True, accumulate=1,
    ... )
    >>> print(cg.plan.crossovers(found, "S", (1024, 65536), multiple_of=1024))
    from S  dp  tp  zero  micro  times  checkpoint      step  peak memory
     1,024   1   8     3      8      1  none          124 ms     20.17 GB
     3,072   8   1     3      1      1  none        285.3 ms     31.08 GB
    12,288                                               inf          inf
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
        raise BindingError(f"{place}: no multiple of {step} from {low} to {high}, expected some")
    opened = replace(family, dims={k: v for k, v in family.dims.items() if k != symbol})
    curves = [_Curves(opened, symbol, *group) for group in _grouped(opened, found.rows).items()]
    best: dict[int, Crossing] = {}

    def look(at: Iterable[int]) -> None:
        sizes = [n * step for n in at]
        best.update(zip((n // step for n in sizes), _fastest(curves, sizes, found), strict=True))

    look(sorted({round(float(n)) for n in np.geomspace(first, last, _SAMPLES)}))
    while between := [(a + b) // 2 for a, b in pairwise(sorted(best)) if b - a > 1 and best[a].plan != best[b].plan]:
        look(between)
    every = [best[n] for n in sorted(best)]
    return Crossovers(found.graph, symbol, tuple(every[:1] + [b for a, b in pairwise(every) if a.plan != b.plan]))


def _pair(place: str, within: object) -> tuple[Any, Any]:
    if not isinstance(within, tuple | list) or len(within) != 2:
        raise BindingError(f"{place}: within {shown(within)}, expected the least and the largest size")
    return within[0], within[1]


def _grouped(family: Family, plans: Sequence[Plan]) -> Mapping[Structure, list[Plan]]:
    """Return plans by structure, as a search has them."""
    out: dict[Structure, list[Plan]] = {}
    tensor = {tp: family.tensor(tp) for tp in {p.tp for p in plans}}
    for p in plans:
        choices = {name: getattr(p, name) for name in CHOICES}
        out.setdefault(family.structure(p, tensor[p.tp], **choices), []).append(p)
    return out


def _fastest(curves: Sequence[_Curves], sizes: Sequence[int], found: Search) -> Iterator[Crossing]:
    """Yield the plan at each size that a search has first: of a tie the fastest of the fewest stages."""
    plans = [plan for curve in curves for plan in curve.plans]
    both = [curve.at(sizes) for curve in curves]
    peaks, times = (np.vstack([pair[i] for pair in both]) for i in (0, 1))
    fits = np.isfinite(peaks) & np.isfinite(times) & (peaks <= found.limit)
    times = np.where(fits, times, inf)
    places = {id(plan): i for i, plan in enumerate(found.rows)}
    rank, stages = np.array([(places[id(plan)], plan.pp) for plan in plans]).T
    for j, size in enumerate(sizes):
        least = times[:, j].min()
        if least == inf:
            yield Crossing(size, None, inf, inf)
            continue
        tie = np.flatnonzero(times[:, j] <= least * (1 + TIE))
        few = tie[stages[tie] == stages[tie].min()]
        close = few[times[few, j] <= times[few, j].min() * (1 + _CLOSE)]
        at = int(close[rank[close].argmin()])
        yield Crossing(size, plans[at], float(times[at, j]), float(peaks[at, j]))
