"""Holding an op kind to the laws on graphs that are drawn around it."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings

from ..errors import UnsupportedError
from ..ops.registry import KINDS
from .bodies import ops
from .laws import check
from .meanings import MEANINGS
from .samples import SAMPLES
from .sketch import Case

__all__ = ["hold"]


def hold(kind: str, examples: int = 100, *, laws: Iterable[str] | None = None, seed: int | None = None) -> None:
    """Hold an op kind to the laws on drawn graphs: its record against what it does at each index point.

    Parameters
    ----------
    kind : str
        Name of a registered op kind; one without a body needs a `meaning`, and each a `sample`.
    examples : int
        How many graphs are drawn; what fails is shrunk to the smallest graph that does.
    laws : iterable of str, optional
        Names of laws, all of `LAWS` by default.
    seed : int, optional
        For other graphs at each run; by default the same are drawn each time.

    Raises
    ------
    UnsupportedError
        If the kind is not registered, or has no meaning or no sample.
    AssertionError
        If a law is broken.

    Examples
    --------
    >>> from costgraph import testing
    >>> testing.hold("einsum", examples=5)
    """
    if kind not in KINDS:
        raise UnsupportedError(f"hold: op kind {kind!r} is not registered, expected one of {', '.join(KINDS)}")
    if KINDS[kind].body is None and kind not in MEANINGS:
        raise UnsupportedError(f"hold: op kind {kind!r} has no meaning, expected one from costgraph.testing.meaning")
    if kind not in SAMPLES:
        raise UnsupportedError(f"hold: op kind {kind!r} has no sample, expected one from costgraph.testing.sample")
    chosen = None if laws is None else tuple(laws)

    @settings(
        max_examples=examples,
        deadline=None,  # an interpreter is slow, and a machine may be busy
        derandomize=seed is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(ops(kind))
    def drawn(case: Case) -> None:
        check(case.graph, chosen, **case.point)

    if seed is not None:
        from hypothesis import seed as seeded

        seeded(seed)(drawn)
    drawn()
