"""Domains: which pairs of a query and a key position an attention computes, counted exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

import sympy

from ..algebra.dominance import NOTHING_KNOWN, Relations
from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly, poly
from ..algebra.symbols import shown
from ..errors import ShapeError
from ..notation.door import READ, guarded
from .arguments import need_flag, positive

__all__ = ["Domain"]


def _triangle(n: Poly) -> Poly:
    """1 + 2 + ... + n."""
    return n * (n + 1) / 2


@guarded()
@dataclass(frozen=True)
class Domain:
    """Restriction of two axes, query positions s < S and key positions t < T, aligned at their last positions.

    With `causal`, query s sees the keys up to its own position s + T - S. With a `window` of W it sees the last W of
    them; without `causal` it sees the keys less than W positions away on either side.

    On a mesh queries may be split into consecutive blocks, one for each rank: S and what is counted are then those of
    a rank, T is that of all. What differs from rank to rank is counted as the mean over them: the sum over all ranks
    is the number without a mesh.
    """

    causal: bool
    """Whether later keys are hidden."""
    window: Annotated[Poly | None, READ] = None
    """How many positions are seen, the own one included, or None for all."""
    ranks: Annotated[tuple[tuple[str, Poly], ...], READ] = ()
    """Axes of a mesh that split the queries, the outermost first, and how many ranks each has."""

    def __post_init__(self) -> None:
        need_flag("domain", causal=self.causal)
        if self.window is not None:  # a number or symbol is taken as well
            object.__setattr__(self, "window", positive("domain: window", self.window))
        pairs = isinstance(self.ranks, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in self.ranks)
        if not pairs or not all(isinstance(axis, str) for axis, _ in self.ranks):
            raise ShapeError(f"domain: ranks {shown(self.ranks)}, expected pairs of an axis of a mesh and its ranks")
        object.__setattr__(self, "ranks", tuple((axis, positive(f"domain: {axis}", n)) for axis, n in self.ranks))
        if not self.causal and self.window is None:
            raise ShapeError("domain: neither causal nor a window, expected one of them at least")

    def points(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of pairs (s, t); assumptions may tell that there are as many keys as queries at least.

        Notes
        -----
        Row k = 1..T of a causal square sees min(W, k) keys, and the queries are its last S rows: G(T) - G(T - S) with
        G(n) = sum(min(W, k), k=1..n) = m*n - m*(m - 1)/2, m = min(n, W). With T = S this is S*(S + 1)/2 without a
        window and m*S - m*(m - 1)/2 with one. Without `causal` each pair of different positions counts twice.
        """
        if self.ranks:
            return self._all.points(self._queries(queries, keys), keys, known) / self.parts
        if self.causal:
            earlier = keys - queries
            return self._rows(keys) - self._rows(earlier if known.nonnegative(earlier) else at_least_zero(earlier))
        if queries != keys:
            raise ShapeError(f"window without causal: {queries} queries and {keys} keys, expected as many of both")
        return 2 * self._rows(keys) - keys

    def _rows(self, n: Poly) -> Poly:
        if not n:
            return ZERO
        if self.window is None:
            return _triangle(n)
        m = smaller(n, self.window)
        return m * n - m * (m - 1) / 2

    @property
    def parts(self) -> Poly:
        """How many ranks have some of the queries each."""
        return prod((n for _, n in self.ranks), start=ONE)

    @property
    def _all(self) -> Domain:
        return replace(self, ranks=())

    def _queries(self, queries: Poly, keys: Poly) -> Poly:
        """Return how many queries all ranks have: there is a key for each."""
        if queries * self.parts != keys:
            raise ShapeError(f"{queries} queries on each of {self.parts} ranks, expected as many in all as {keys} keys")
        return keys

    def _beyond(self, b: Poly) -> Poly:
        """Return how many keys before their own all ranks see."""
        others = self.parts - 1
        if self.window is None:
            return b * others * self.parts / 2
        seen = self.window - 1
        full = smaller(others, poly(sympy.floor(seen.expr / b.expr)))
        return b * full * (full + 1) / 2 + (others - full) * seen

    def queries_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of queries that see any key."""
        if self.ranks:
            return self._all.queries_used(self._queries(queries, keys), keys, known) / self.parts
        return queries if known.nonnegative(keys - queries) else smaller(queries, keys)

    def keys_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of keys that any query sees.

        Notes
        -----
        Rank r = 0..P-1 has b queries, whose own positions are b keys; of the r*b keys before them it sees as many as
        its first query does, min(r*b, W - 1), and without `causal` as many of those after rank P - 1 - r. With
        f = min(P - 1, floor((W - 1)/b)) the sum over all ranks is b*f*(f + 1)/2 + (P - 1 - f)*(W - 1).
        """
        if self.ranks:
            self._queries(queries, keys)
            return queries + self._beyond(queries) * (1 if self.causal else 2) / self.parts
        if self.window is None or queries == keys:
            return keys
        return smaller(keys, queries + self.window - 1)

    def reached(
        self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN, *, query: bool = True, key: bool = True
    ) -> Poly:
        """Return the positions that pairs of the domain reach in something that has both axes, one of them or none."""
        if query and key:
            return self.points(queries, keys, known)
        if query:
            return self.queries_used(queries, keys, known)
        return self.keys_used(queries, keys, known) if key else ONE
