"""Plans that fit: structures are derived, one after the other or side by side, and evaluated over arrays of degrees."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ..errors import CostGraphError, SpecError, UnsupportedError
from ..hardware.units import format_bytes
from ..notation.progress import progressing
from .dividing import whole
from .forms import Forms
from .structures import DEGREES, Family, Structure

__all__ = ["Fit", "Point", "Work"]


class Point(NamedTuple):
    """What plans of one structure differ in."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch: int
    accumulate: int
    virtual: int = 1


class Fit(NamedTuple):
    """A plan that fits."""

    structure: Structure
    point: Point
    stages: tuple[int, ...]
    """bytes of each stage"""
    seconds: float
    parts: dict[str, float]
    """of the time, in seconds"""


class Done(NamedTuple):
    """What another process hands back of a structure."""

    fitting: list[Fit]
    derived: int
    notes: list[str]
    error: CostGraphError | None
    over: float
    refused: str


@dataclass
class Work:
    """Derives structures and keeps what fits."""

    family: Family
    limit: float
    fitting: list[Fit] = field(default_factory=list)
    tried: int = 0
    derived: int = 0
    notes: list[str] = field(default_factory=list)
    error: CostGraphError | None = None
    """why a structure could not be derived"""
    over: float = inf
    """the fewest bytes that a plan takes, or takes at least, which are more than there are"""
    refused: str = ""
    """why the graph of a plan, the first such one, is against its sizes"""
    apart: tuple[Structure, list[Point]] | None = None
    """plans, the first such ones, that do not divide what is split: not derived unless it is to be said why"""

    def do(self, groups: Mapping[Structure, list[Point]], progress: bool | None, executor: Executor | None) -> None:
        """Try all points of all structures, structures side by side where there is what runs them."""
        self.tried += sum(map(len, groups.values()))
        likely = {structure: found for structure, points in groups.items() if (found := self.likely(structure, points))}
        for structure in likely:
            self.family.step(structure)  # what cannot be trained is an error, whatever else there is
        likely = {structure: found for structure, points in likely.items() if (found := self.whole(structure, points))}
        with progressing("search", len(likely), progress) as step:
            for structure, tried in zip(likely, self.tries(likely, executor), strict=True):
                step(f"ZeRO {structure.zero}, {structure.checkpoint}")
                self.error = tried() or self.error
        if self.apart is not None and not (self.fitting or self.refused):
            self.error = self.one(*self.apart) or self.error  # it says why
        if self.error is not None and not self.derived:
            raise self.error

    def tries(
        self, likely: Mapping[Structure, list[Point]], executor: Executor | None
    ) -> Iterator[Callable[[], CostGraphError | None]]:
        """Yield for each structure what tries its points, and returns why it cannot be derived."""
        if executor is None:
            yield from (partial(self.one, structure, points) for structure, points in likely.items())
            return
        sent = pickle.dumps((self.family, self.limit))
        futures = [executor.submit(_elsewhere, sent, structure, points) for structure, points in likely.items()]
        try:
            yield from (partial(self.gathered, future) for future in futures)
        finally:
            for future in futures:  # those that an error leaves behind
                future.cancel()

    def gathered(self, future: Future[Done]) -> CostGraphError | None:
        """Wait for what another process tries."""
        fitting, derived, notes, error, over, refused = future.result()
        self.fitting += fitting
        self.derived += derived
        self.notes += notes
        self.over, self.refused = min(self.over, over), self.refused or refused
        return error

    def likely(self, structure: Structure, points: Sequence[Point]) -> list[Point]:
        """Return the points whose parameters, gradients and states alone would fit: others need no derivation."""
        if self.limit == inf:
            return [*points]
        least = np.broadcast_to(np.asarray(self.family.least(structure, columns(points)), float), len(points))
        self.over = least.min(where=least > self.limit, initial=self.over)
        return [p for p, ok in zip(points, (least <= self.limit).tolist(), strict=True) if ok]

    def whole(self, structure: Structure, points: Sequence[Point]) -> list[Point]:
        """Return the points whose ranks have whole parts of what is split: others need no derivation."""
        ok = np.broadcast_to(whole(self.family, structure, columns(points)), len(points)).tolist()
        if self.apart is None and not all(ok):
            self.apart = structure, [p for p, fits in zip(points, ok, strict=True) if not fits]
        return [p for p, fits in zip(points, ok, strict=True) if fits]

    def reasons(self, apart: object) -> Iterator[str]:
        """Yield why there is no plan, where there is none; `apart`: what the network has no links for."""
        if self.fitting:
            return
        if self.over < inf:
            yield f"no plan fits: {format_bytes(self.over)} or more of {format_bytes(self.limit)}"
        yield from (f"refused: {why}" for why in (self.refused, *self.family.unsplit.values()) if why)
        if not (self.tried or self.family.unsplit or apart):
            yield "no plan: no degrees within the limits divide the devices and the batch"

    def one(self, structure: Structure, points: Sequence[Point]) -> CostGraphError | None:
        """Try the points of a structure; with degrees bound where its graph cannot be derived with them open."""
        try:
            forms = self.family.forms(structure)
        except SpecError:
            raise
        except UnsupportedError as error:
            if structure.pp == 1:
                return self.bound(structure, points, error)
            self.notes.append(f"no stages: {error}")
            return error
        except CostGraphError as error:
            return self.bound(structure, points, error)
        self.evaluate(structure, forms, points)
        return None

    def bound(self, structure: Structure, points: Sequence[Point], error: CostGraphError) -> CostGraphError | None:
        """Try the points of a structure degree by degree, and say why."""
        name = next((d for d in DEGREES if not isinstance(getattr(structure, d), int)), None)
        if name is None:
            return error
        self.notes.append(f"by single {name}, ZeRO {structure.zero}: {error}")
        last: CostGraphError | None = None
        for n in sorted({getattr(p, name) for p in points}):
            last = self.one(replace(structure, **{name: n}), [p for p in points if getattr(p, name) == n]) or last
        return last

    def evaluate(self, structure: Structure, forms: Forms, points: Sequence[Point]) -> None:
        """Evaluate formulas at all points at once, and keep those that fit."""
        self.derived += len(points)
        degrees = columns(points)
        sizes, cuts = self.family.sizes(degrees, structure), self.family.cuts(structure, degrees["pp"])
        found = forms.at(sizes, cuts)
        if self.family.rings is not None and self.family.rings.why:
            self.notes.append(f"no rings: {self.family.rings.why}")
        stages = np.array([*found.peaks.values()], float)
        peak = stages.max(0)
        self.over = peak.min(where=peak > self.limit, initial=self.over)
        if np.isnan(peak).any() and not self.refused:
            self.refused = forms.refusal(sizes, cuts, int(np.isnan(peak).argmax()))
        fits = np.isfinite(peak) & np.isfinite(found.seconds) & (peak <= self.limit)
        for i in np.flatnonzero(fits).tolist():
            own = {name: float(values[i]) for name, values in found.parts.items() if values[i]}
            each = tuple(round(float(p)) for p in stages[:, i] if p)
            self.fitting.append(Fit(structure, points[i], each, float(found.seconds[i]), own))


@lru_cache(maxsize=1)
def _received(sent: bytes) -> tuple[Family, float]:
    """Return a family and a limit in another process, once for all that is tried there."""
    found: tuple[Family, float] = pickle.loads(sent)
    return found


def _elsewhere(sent: bytes, structure: Structure, points: Sequence[Point]) -> Done:
    """Try the points of a structure in another process, which keeps the steps that it makes."""
    work = Work(*_received(sent))
    error = work.one(structure, points)
    return Done(work.fitting, work.derived, work.notes, error, work.over, work.refused)


def columns(points: Sequence[Point]) -> dict[str, np.ndarray[Any, Any]]:
    return dict(zip(Point._fields, np.array(points, dtype=np.int64).T, strict=True))
