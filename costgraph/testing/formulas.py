"""Laws of formulas: what they say at a point, how loops and sizes change it."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..algebra.polynomial import Poly
from ..analysis.costs import intensity
from ..analysis.lifetimes import Program, copies_needed, play
from ..analysis.live import live_bytes
from ..analysis.memory import peak_memory, timeline
from ..analysis.regimes import regimes
from ..bind.evaluate import evaluate
from ..graph.graph import Graph
from ..graph.loop import Loop, loops
from ..graph.sizes import bindings, known_names
from ..transforms.unroll import unroll
from .arithmetic import value
from .laws import QUESTIONS, Trial, law, same

__all__ = ["played"]


@law
def a_formula_at_a_point_is_the_answer_there(trial: Trial) -> None:
    """By Python's fractions and by `evaluate`, in one step and in two; the peak from the least count that it states."""
    least = timeline(trial.graph).holds_from
    # 3, more where a body hands a carry on to another place
    most = max(map(copies_needed, loops(trial.graph)), default=3)
    assert all(n <= most for n in least.values()), f"the peak holds from {least}, expected {most} at the most"
    names = sorted(trial.point)
    for question, ask in QUESTIONS.items():
        expected = trial.answers[question]
        formula = ask(trial.graph)
        holds = question != "peak_memory" or all(trial.point[n] >= k for n, k in least.items())
        if holds:
            same(expected, value(formula, trial.point), f"{question}: bound, against the formula at the point")
            same(expected, Fraction(evaluate(formula, **_used(formula, trial.point))), f"{question}: evaluate")
        for some in (names[: len(names) // 2], names[1::2]):
            if question == "peak_memory" and not all(trial.point[n] >= k for n, k in least.items() if n not in some):
                continue
            partly = ask(trial.graph, **{n: trial.point[n] for n in some})
            same(expected, value(partly, trial.point), f"{question}: bound in two steps, {some} first")


def _used(formula: Any, point: Mapping[str, int]) -> dict[str, int]:
    symbols = {s.name for s in getattr(formula, "free_symbols", ())}
    return {k: v for k, v in point.items() if k in symbols}


def played(graph: Graph, point: Mapping[str, int]) -> Program:
    """Return every execution of an op and the life of every storage, loops played out in full."""
    values = bindings(graph, point)

    def copies(loop: Loop) -> int:
        return int(value(loop.count.expr, point))

    return play(graph, copies, values)


@law
def pruning_changes_no_value(trial: Trial) -> None:
    """The largest of all live sets, none of them left out, is the peak."""
    live = [value(p.expr, trial.point) for _, p in live_bytes(played(trial.graph, trial.point))]
    same(trial.answers["peak_memory"], Fraction(max(live)), "peak memory")


@law
def a_peak_in_a_box_is_the_peak(trial: Trial) -> None:
    """Cases that may hold near the point have the peak there among them, and the bytes of their roles add up."""
    if not all(trial.point[n] >= k for n, k in timeline(trial.graph).holds_from.items()):
        return
    formula = peak_memory(trial.graph)
    names = sorted(_used(formula, trial.point))
    near = {n: (max(trial.point[n] - 1, 1), trial.point[n] + 1) for n in names[:2]}
    cases = regimes(formula, within={n: (trial.point[n], trial.point[n]) for n in names} | near)
    found = max(value(case.formula, trial.point) for case in cases)
    same(trial.answers["peak_memory"], found, f"peak memory in a box around {names}")
    for case in regimes(formula):
        if case.by_role:
            whole = sum(value(part, trial.point) for part in case.by_role.values())
            same(value(case.formula, trial.point), whole, f"bytes of the roles at {case.op!r}")


@law
def a_repeat_is_its_iterations(trial: Trial) -> None:
    """FLOPs, bytes, parameters and peak of the unrolled graph, from one iteration on."""
    least = timeline(trial.graph).holds_from
    tried = [{name: n} for name in trial.counts for n in (1, 2, 3, 4)]
    points = [{**trial.point, **dims} for dims in tried if trial.takes(**dims)] or [trial.point]
    for point in points:
        plain = unroll(trial.graph, **point)
        for question, ask in QUESTIONS.items():
            if question == "fused":
                continue  # a lower bound, and a tighter one where a loop is unrolled
            same(ask(trial.graph, **point), Fraction(ask(plain)), f"{question} at {point}, of the loop and unrolled")
            if question == "peak_memory" and all(point[n] >= k for n, k in least.items()):
                same(ask(plain), value(ask(trial.graph), point), f"{question} at {point}, the closed form")


@law
def costs_grow_with_every_size(trial: Trial) -> None:
    """No cost falls when a size grows to the next that fits; sizes that others are divided by, and scales, aside."""
    if any(t.dtype.block is not None for g in trial.graph.bodies() for t in g.tensors):
        return  # of one element a smaller share of the scales is moved where there are more elements
    for name in sorted(known_names(trial.graph) - _divisors(trial.graph)):
        size = trial.point[name]
        more = next((n for n in range(size + 1, size + _FURTHEST) if trial.takes(**{name: n})), None)
        if more is None:
            continue  # another size has to grow with it
        larger = {**trial.point, name: more}
        for question, ask in QUESTIONS.items():
            before, after = trial.answers[question], ask(trial.graph, **larger)
            assert after >= before, f"{question} falls from {before} to {after} with {name}={larger[name]}"


#: Sizes that are tried for one that fits.
_FURTHEST = 24


def _divisors(graph: Graph) -> set[str]:
    """Symbols that some size is divided by: ranks, groups, heads that share a width."""
    sizes = [p for g in graph.bodies() for t in g.tensors for p in t.sizes]
    facts = [v for op in graph.walk() for v in op.kind.facts().values()]
    sizes += [p for v in facts for p in (v.values() if isinstance(v, Mapping) else [v])]
    return {k for p in sizes if isinstance(p, Poly) for m in p.terms for k, e in m if e < 0}


@law
def intensity_is_flops_over_bytes(trial: Trial) -> None:
    """FLOPs by bytes moved, also as a formula."""
    moved = trial.answers["bytes_moved"]
    if moved:
        expected = Fraction(trial.answers["flops"]) / Fraction(moved)
        assert abs(float(intensity(trial.graph, False, **trial.point)) - float(expected)) <= 1e-12 * float(expected)
