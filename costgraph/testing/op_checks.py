"""Property-based checks of a single op kind, and its missing registrations."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from ..errors import UnsupportedError
from ..ir.graph import BodyKind, OpKind
from ..transforms.vjp.table import RULES
from .interpreter import REFERENCE_SEMANTICS
from .properties import check
from .strategies import STRATEGIES, Case, Named, kind_of, ops

__all__ = [
    "check_op",
    "missing",
    "search",
]


def missing(kind: Named, **tables: Container[type[OpKind]]) -> tuple[str, ...]:
    """Return the rules and registrations that an op kind lacks.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name.
    **tables : container of subclasses of OpKind
        Further registries to check, such as `lowering=costgraph.torch.lowering.LOWERINGS`.

    Returns
    -------
    tuple of str
        The missing ones among `infer`, `flops`, `reads`, `writes`, `reference_semantics`, `strategy`, `vjp` and the
        keys of `tables`. Not all are required: without `vjp` a kind is not differentiable, and one with a body needs no
        `reference_semantics`.

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
    registered = {
        "infer": kind.infer is not OpKind.infer,
        "flops": kind.flops is not OpKind.flops,
        "reads": kind.reads is not OpKind.reads,
        "writes": kind.writes is not OpKind.writes,
        "reference_semantics": kind in REFERENCE_SEMANTICS or issubclass(kind, BodyKind),
        "strategy": kind in STRATEGIES,
        "vjp": kind in RULES,
    }
    return tuple(
        rule for rule, present in (registered | {k: kind in t for k, t in tables.items()}).items() if not present
    )


def check_op(kind: Named, examples: int = 100, *, laws: Iterable[str] | None = None, seed: int | None = None) -> None:
    """Check an op kind on random graphs: its cost rules must match its reference semantics.

    Parameters
    ----------
    kind : subclass of OpKind or str
        A registered op kind, or its name. It needs a `strategy` and, unless it has a body, `reference_semantics`.
    examples : int
        Number of graphs to draw. After a failure, smaller graphs are tried and the smallest failure is reported.
    laws : iterable of str, optional
        Names of the properties to check, by default all of `LAWS`.
    seed : int, optional
        Seed of the random graphs. By default every run draws the same graphs.

    Raises
    ------
    UnsupportedError
        If the kind is not registered, or lacks reference semantics or a strategy.
    AssertionError
        If a property does not hold.

    Examples
    --------
    >>> from costgraph import testing
    >>> testing.check_op("einsum", examples=5)
    """
    kind = kind_of("check_op", kind)
    for registration in ("reference_semantics", "strategy"):
        if registration in missing(kind):
            raise UnsupportedError(
                f"check_op: op kind {kind.name!r} has no {registration.replace('_', ' ')}, expected one from "
                f"costgraph.testing.{registration}"
            )
    chosen = None if laws is None else tuple(laws)

    search(ops(kind), lambda case: check(case.graph, chosen, **case.point), examples, seed=seed)


#: Number of smaller graphs to try after the first failure.
TRIES = 60


class _Enough(BaseException):
    """Stop hypothesis, which catches every Exception but no BaseException."""


def search(
    strategy: st.SearchStrategy[Case], holds: Callable[[Case], None], examples: int, *, seed: int | None = None
) -> None:
    """Run a check on random graphs and raise the failure of the smallest one.

    Parameters
    ----------
    strategy : strategy of Case
        Strategy for the graphs.
    holds : callable
        Check to call on each case. It raises an exception on failure.
    examples : int
        Number of graphs to draw.
    seed : int, optional
        Seed of the random graphs. By default every run draws the same graphs.

    Raises
    ------
    Exception
        The exception raised for the smallest failing graph.
    """
    worst: tuple[int, Exception] | None = None
    tries_left = TRIES

    @settings(
        max_examples=examples,
        deadline=None,  # the interpreter is slow, and the machine may be busy
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def drawn(data: st.DataObject) -> None:
        nonlocal worst, tries_left
        tries_left -= worst is not None
        if tries_left < 0:
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
        if worst is None:  # the strategy itself failed
            raise
        vars(worst[1]).pop("__notes__", None)  # drop hypothesis' multi-line report
        raise worst[1] from None
