"""Holding an op kind to the laws on graphs that are drawn around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from ..errors import UnsupportedError
from ..graph.op import Bodied
from ..ops.registry import KINDS
from .bodies import ops
from .laws import check
from .meanings import MEANINGS
from .samples import SAMPLES
from .sketch import Case

__all__ = ["hold", "search"]


def hold(kind: str, examples: int = 100, *, laws: Iterable[str] | None = None, seed: int | None = None) -> None:
    """Hold an op kind to the laws on drawn graphs: its record against what it does at each index point.

    Parameters
    ----------
    kind : str
        Name of a registered op kind; one without a body needs a `meaning`, and each a `sample`.
    examples : int
        How many graphs are drawn; of one that fails some smaller ones are tried, and the smallest that fails is told.
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
    if not issubclass(KINDS[kind], Bodied) and kind not in MEANINGS:
        raise UnsupportedError(f"hold: op kind {kind!r} has no meaning, expected one from costgraph.testing.meaning")
    if kind not in SAMPLES:
        raise UnsupportedError(f"hold: op kind {kind!r} has no sample, expected one from costgraph.testing.sample")
    chosen = None if laws is None else tuple(laws)

    search(ops(kind), lambda case: check(case.graph, chosen, **case.point), examples, seed=seed)


#: Smaller graphs that are tried once one has failed.
TRIES = 60


class _Enough(BaseException):
    """Raised through hypothesis, which catches any Exception, to end its search."""


def search(
    strategy: st.SearchStrategy[Case], holds: Callable[[Case], None], examples: int, *, seed: int | None = None
) -> None:
    """Hold drawn graphs to something; of those that fail, the first and what it is shrunk to, the smallest is told.

    Parameters
    ----------
    strategy : strategy of Case
        What is drawn.
    holds : callable
        Called with each; raises where it does not hold.
    examples : int
        How many are drawn.
    seed : int, optional
        For other graphs at each run; by default the same are drawn each time.

    Raises
    ------
    Exception
        What `holds` raised of the smallest graph for which it did.
    """
    worst: tuple[int, Exception] | None = None
    left = TRIES

    @settings(
        max_examples=examples,
        deadline=None,  # an interpreter is slow, and a machine may be busy
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        nonlocal worst, left
        left -= worst is not None
        if left < 0:
            raise _Enough
        case = data.draw(strategy)
        try:
            holds(case)
        except Exception as error:
            size = sum(1 for _ in case.graph.walk())
            if worst is None or size <= worst[0]:
                worst = size, error
            raise

    if seed is not None:
        seeded(seed)(drawn)
    try:
        drawn()
    except (Exception, _Enough):
        if worst is None:  # what is drawn cannot be
            raise
        vars(worst[1]).pop("__notes__", None)  # hypothesis' own account, of many lines
        raise worst[1] from None
