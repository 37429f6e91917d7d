"""The law of refusals: what a formula holds for travels with it, so that it refuses what its graph does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..analysis.costs import costs, flops
from ..analysis.memory import timeline
from ..bind.evaluate import compile, evaluate
from ..errors import CostGraphError
from .laws import QUESTIONS, Trial, law

__all__ = ["around"]

Point = Mapping[str, int]


def around(point: Point) -> Iterator[dict[str, int]]:
    """Yield a point and its neighbours: one size at a time 1, one less, one more, and twice as much and one."""
    yield dict(point)
    for name, size in point.items():
        for other in sorted({1, max(size - 1, 1), size + 1, 2 * size + 1} - {size}):
            yield {**point, name: other}


def _said(ask: Callable[..., Any], /, *args: Any, **sizes: Any) -> Any:
    """Return an answer, or None for a refusal."""
    try:
        return ask(*args, **sizes)
    except CostGraphError:
        return None


@law
def what_the_graph_refuses_its_formulas_refuse(trial: Trial) -> None:
    """At the point and around it: evaluated, bound in two steps, in arrays and in the table of costs."""
    least = getattr(_said(timeline, trial.graph), "holds_from", {})
    fixed = {k: v for k, v in trial.graph.defaults.items() if k in trial.point}  # formulas have these put in
    places = [p for p in around(trial.point) if fixed.items() <= p.items()]
    for question, ask in QUESTIONS.items():
        formula = _said(ask, trial.graph)
        points = places if hasattr(formula, "free_symbols") else []
        singles, steps = [], {}
        for point in points:
            below = question == "peak_memory" and any(point[n] < k for n, k in least.items())
            expected = _said(ask, trial.graph, **point)
            singles.append(_agree(formula, point, expected, f"{question} at {point}", below))
            some = tuple(list(point.items())[::2])
            if some not in steps:  # the same for all neighbours that another size is changed of
                steps[some] = _said(ask, trial.graph, **dict(some))
            if hasattr(steps[some], "free_symbols"):  # a number is one for all sizes
                _agree(steps[some], point, expected, f"{question} at {point}, {dict(some)} first", below)
        if points and formula.free_symbols:
            _arrays_agree(formula, points, singles, question)
    table = _said(costs, trial.graph)
    for point in places if table is not None else ():
        expected = _said(flops, trial.graph, **point)
        bound = _said(table.bind, **point)
        # parts of a FLOP are rounded once: the sum of the kinds, each rounded already, may be off by the last bit
        found = None if bound is None else evaluate(sum(r.amount.expr for r in bound.filter(direction="compute").rows))
        assert found == expected, f"costs at {point}: {_shown(found)}, where the graph: {_shown(expected)}"


def _shown(answer: Any) -> str:
    return "refused" if answer is None else f"answers {answer}"


def _agree(formula: Any, point: Point, expected: Any, what: str, below: bool) -> Any:
    """Hold a formula at a point to what the graph says there; below the counts that it holds for it may refuse.

    Returns what the formula says.
    """
    found = _said(evaluate, formula, **_asked_of(formula, point))
    assert found == expected or (below and found is None), (
        f"{what}: the formula {_shown(found)}, the graph {_shown(expected)}"
    )
    return found


def _asked_of(formula: Any, point: Point) -> dict[str, int]:
    """Return the sizes of those symbols that are in a formula, or that it asks something of."""
    names = {s.name for s in getattr(formula, "free_symbols", ())}
    return {k: v for k, v in point.items() if k in names.union(*(v.names for v in getattr(formula, "held", ())))}


def _arrays_agree(formula: Any, points: list[dict[str, int]], single: list[Any], question: str) -> None:
    """Hold arrays to what single points say: NaN where these are refused, none where nothing is."""
    columns = {n: np.array([p[n] for p in points]) for n in _asked_of(formula, points[0])}
    found = np.broadcast_to(compile(formula, outside="nan")(**columns), len(points))
    for point, one, many in zip(points, single, found, strict=True):
        assert np.isnan(many) if one is None else np.isclose(many, one, rtol=1e-9), (
            f"{question} at {point}: {many} in an array, the point alone {_shown(one)}"
        )
    assert (_said(compile(formula), **columns) is None) == (None in single), f"{question}: {points} in an array"
