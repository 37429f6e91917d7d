"""Domains: which pairs of a query and a key position an attention computes, counted exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..algebra.dominance import NOTHING_KNOWN, Relations
from ..algebra.extremum import at_least_zero, smaller
from ..algebra.polynomial import ONE, ZERO, Poly
from ..errors import ShapeError
from ..notation.door import READ
from .arguments import need_flag, positive

__all__ = ["Domain"]


def _triangle(n: Poly) -> Poly:
    """1 + 2 + ... + n."""
    return n * (n + 1) / 2


@dataclass(frozen=True)
class Domain:
    """Restriction of two axes, query positions s < S and key positions t < T, aligned at their last positions.

    With `causal`, query s sees the keys up to its own position s + T - S. With a `window` of W it sees the last W of
    them; without `causal` it sees the keys less than W positions away on either side.
    """

    causal: bool
    """Whether later keys are hidden."""
    window: Annotated[Poly | None, READ] = None
    """How many positions are seen, the own one included, or None for all."""

    def __post_init__(self) -> None:
        need_flag("domain", causal=self.causal)
        if self.window is not None:  # a number or symbol is taken as well
            object.__setattr__(self, "window", positive("domain: window", self.window))
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

    def queries_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of queries that see any key."""
        return queries if known.nonnegative(keys - queries) else smaller(queries, keys)

    def keys_used(self, queries: Poly, keys: Poly, known: Relations = NOTHING_KNOWN) -> Poly:
        """Return the number of keys that any query sees."""
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
