"""Holding an op kind to the laws on graphs that are drawn around it, and what has to be said of it before."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from ..errors import UnsupportedError
from ..ir.graph import Bodied, OpKind
from ..transforms.vjp.table import RULES
from .interpreter import MEANINGS
from .properties import check
from .strategies import SAMPLES, Case, Named, kind_of, ops

__all__ = [
    "hold",
    "missing",
    "search",
]


def missing(kind: Named, **tables: Container[type[OpKind]]) -> tuple[str, ...]:
    """Say what is missing of an op kind: rules of its record, and what is registered for it elsewhere.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name.
    **tables : container of subclasses of OpKind
        Where else it should be found, such as `lowering=costgraph.torch.lowering.LOWERINGS`.

    Returns
    -------
    tuple of str
        Of `infer`, `flops`, `reads`, `writes`, `meaning`, `sample`, `vjp` and the names of the tables those that it
        has not. Not all of them are needed: a kind without `vjp` cannot be differentiated, and one with a body means
        what its ops do.

    Raises
    ------
    UnsupportedError
        If the kind is not registered.

    Examples
    --------
    >>> from costgraph import testing
    >>> testing.missing("einsum"), testing.missing("unscale")
    ((), ('vjp',))
    """
    kind = kind_of("missing", kind)
    found = {
        "infer": kind.infer is not OpKind.infer,
        "flops": kind.flops is not OpKind.flops,
        "reads": kind.reads is not OpKind.reads,
        "writes": kind.writes is not OpKind.writes,
        "meaning": kind in MEANINGS or issubclass(kind, Bodied),
        "sample": kind in SAMPLES,
        "vjp": kind in RULES,
    }
    return tuple(what for what, there in (found | {k: kind in t for k, t in tables.items()}).items() if not there)


def hold(kind: Named, examples: int = 100, *, laws: Iterable[str] | None = None, seed: int | None = None) -> None:
    """Hold an op kind to the laws on drawn graphs: its record against what it does at each index point.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name; one without a body needs a `meaning`, and each a `sample`.
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
    kind = kind_of("hold", kind)
    for needed in ("meaning", "sample"):
        if needed in missing(kind):
            raise UnsupportedError(
                f"hold: op kind {kind.name!r} has no {needed}, expected one from costgraph.testing.{needed}"
            )
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
