"""Pipeline times: simulated events against an independent recursion, and idle fractions against simulations."""

from fractions import Fraction
from functools import cache
from random import Random

import pytest
from each import each

import costgraph as cg
from costgraph.algebra.dominance import NOTHING_KNOWN
from costgraph.algebra.polynomial import poly
from costgraph.analysis.step_time import (
    EqualStages,
    one_by_one,
)

m, p, v, f, i, w = cg.dims("m p v f i w")
# names, chunks per rank, ranks and micro-batches, beyond the sizes that formulas were fitted to
CASES = [
    ("gpipe", 1, 11, 3), ("gpipe", 1, 2, 7), ("1f1b", 1, 7, 13), ("1f1b", 1, 11, 5), ("1f1b", 1, 1, 3),
    ("interleaved", 5, 7, 14), ("interleaved", 2, 3, 15), ("zb-h1", 1, 7, 13), ("zb-h1", 1, 11, 11),
    ("interleaved-zb", 5, 7, 14), ("zbv", 2, 7, 23), ("zbv", 2, 2, 3), ("zbv", 2, 1, 5), ("dualpipev", 2, 7, 17),
    ("dualpipev", 2, 3, 13), ("dualpipe", 2, 14, 34), ("dualpipe", 2, 2, 6),
]  # fmt: skip
# forward, input gradient and weight gradient; each of the three dominates once and is negligible once
TIMES = [(1, 1, 1), (7, 3, 2), (2, 11, 3), (3, 5, 13), (13, 2, 11), (Fraction(1, 3), Fraction(2, 7), 5), (5, 31, 1)]


def ends(ranks, times, send):
    """Return when actions end.

    Each action starts after its predecessor on the rank and after its dependencies; the recursion runs backwards.
    """
    place = {}
    for r, actions in enumerate(ranks):
        for k, a in enumerate(actions):
            place.update({(kind, a.stage, a.micro_batch): (r, k) for kind in ("IW" if a.kind == "B" else a.kind)})
    last = max(a.stage for actions in ranks for a in actions)

    @cache
    def end(r, k):
        kind, stage, number, _ = ranks[r][k]
        waits = [end(r, k - 1)] if k else [0]
        needs = {"F": [("F", stage - 1)] if stage else [], "W": [("I", stage)]}.get(
            kind, [("F", stage), *([("I", stage + 1)] if stage < last else [])]
        )
        for what, at in needs:
            owner = place[what, at, number]
            waits.append(end(*owner) + (send if owner[0] != r else 0))
        forward, inputs, weights = times
        return max(waits) + {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}[kind]

    return [[end(r, k) for k in range(len(actions))] for r, actions in enumerate(ranks)]


def played(lists, times, send=0):
    forward, inputs, weights = times
    return cg.plan.simulate(lists, forward=forward, backward_input=inputs, backward_weight=weights, send=send)


@each(("name", "chunks", "ranks", "many"), CASES)
def test_events_match_recursion(name, chunks, ranks, many):
    lists = cg.plan.schedule(name, ranks, many, chunks)
    for times, send in ((TIMES[1], 0), (TIMES[5], Fraction(3, 11))):
        found = played(lists, times, send)
        assert [[e.end for e in row] for row in found.events] == ends(lists, times, send)
        assert [[e.action for e in row] for row in found.events] == [list(row) for row in lists]
        work = many * (2 if name == "zbv" or name == "dualpipev" else chunks if name != "dualpipe" else 1)
        assert set(found.busy) == {work * sum(times)}
        assert found.idle == tuple(found.makespan - n for n in found.busy)
        sent = cg.plan.schedule(name, ranks, many, chunks, sends=True)  # takes the same time
        assert played(sent, times, send) == found


@pytest.mark.parametrize(("name", "chunks", "ranks", "many"), CASES)
def test_idle_fraction_matches_events(name, chunks, ranks, many):
    lists = cg.plan.schedule(name, ranks, many, chunks)
    looped = name.startswith("interleaved")
    sizes = {"p": ranks, "m": many, **({"v": chunks} if looped else {})}
    open_times = cg.plan.bubble(name, p, m, chunks, forward=f, backward_input=i, backward_weight=w)
    asked = {s.name for s in open_times.free_symbols}
    for times in TIMES:
        found = played(lists, times)
        idle = Fraction(found.idle[0]) / Fraction(found.busy[0])
        forward, inputs, weights = times
        named = {"forward": forward, "backward_input": inputs, "backward_weight": weights}
        assert cg.plan.bubble(name, ranks, many, chunks, **named) == pytest.approx(float(idle), rel=1e-14)
        if (name, ranks) != ("zbv", 1):  # its formula needs at least two ranks
            formula = cg.plan.bubble(name, p, m, v if looped else None, **named)
            assert cg.evaluate(formula, **sizes if formula.free_symbols else {}) == pytest.approx(
                float(idle), rel=1e-14
            )
            if all(isinstance(t, int) for t in times):
                every = {**sizes, "f": forward, "i": inputs, "w": weights}
                assert cg.evaluate(open_times, **{k: n for k, n in every.items() if k in asked}) == float(idle)


def drawn(random):
    """Draw runs of equal ranks, distinct first and last ranks with two times each, and few or many micro-batches."""
    ranks, most, at, runs = random.randint(2, 9), random.randint(1, 30), 0, []
    while at < ranks:
        behind = at + random.randint(1, ranks - at)
        runs.append((at, behind - 1, random.randint(1, most), random.randint(1, most)))
        at = behind
    return runs, random.randint(1, 2 * ranks) if random.random() < 0.5 else random.randint(2 * ranks, 4 * ranks)


@pytest.mark.parametrize("many", [200, pytest.param(4000, marks=pytest.mark.long)])
def test_1f1b_time_of_unequal_stages_matches_events(many):
    random = Random(0)
    for _ in range(many):
        runs, m = drawn(random)
        each = [run for run in runs for _ in range(run[0], run[1] + 1)]
        events = cg.plan.simulate(
            cg.plan.schedule("1f1b", len(each), m), forward=[r[2] for r in each],
            backward_input=[r[3] for r in each], backward_weight=0,
        )  # fmt: skip
        found = one_by_one([EqualStages(*map(poly, run)) for run in runs], poly(m), NOTHING_KNOWN)
        assert found.constant == events.makespan, (runs, m)


def test_1f1b_time_with_symbolic_sizes_is_one_formula():
    random, (last, many) = Random(1), map(poly, (p - 1, m))
    for _ in range(40):
        times = [tuple(poly(random.randint(1, 20)) for _ in range(2)) for _ in range(3)]
        ends = ((poly(0), poly(0)), (poly(1), last - 1), (last, last))
        formula = one_by_one([EqualStages(*e, *t) for e, t in zip(ends, times, strict=True)], many, NOTHING_KNOWN)
        for ranks in (3, 4, 7):
            each = [times[0], *[times[1]] * (ranks - 2), times[2]]
            for count in (2 * ranks, 3 * ranks + 1):
                found = formula.bind({"p": poly(ranks), "m": poly(count)}).constant
                assert found == cg.plan.simulate(
                    cg.plan.schedule("1f1b", ranks, count), forward=[t.constant for t, _ in each],
                    backward_input=[t.constant for _, t in each], backward_weight=0,
                ).makespan  # fmt: skip


def test_idle_fractions_match_publications():
    # Narayanan et al. 2021, sections 2.2.1 and 2.2.2; Qi et al. 2023, table 2, with the times that the paper assumes
    assert cg.plan.bubble("gpipe", p, m) == cg.plan.bubble("1f1b", p, m) == (p - 1) / m
    assert cg.plan.bubble("interleaved", p, m, v, forward=f, backward_input=i) == (p - 1) / (m * v)
    idle = cg.plan.bubble("zb-h1", p, m, forward=f, backward_input=i, backward_weight=w) * m * (f + i + w)
    assert cg.evaluate(idle, p=5, m=7, f=13, i=11, w=3) == 4 * (13 + 11 - 3)


def test_unequal_stage_times():
    # two stages: the second waits for each of three forward passes of 7; after its last gradient comes one of 7
    found = cg.plan.simulate(cg.plan.schedule("gpipe", 2, 3), forward=[7, 2], backward_input=[5, 3], backward_weight=2)
    assert [e.end for e in found.events[1]] == [9, 16, 23, 28, 33, 38]
    assert found.makespan == 28 + 3 * 7
    assert found.busy == (3 * 14, 3 * 7)


@each(
    ("actions", "named", "text"),
    [
        ("1f1b", {"forward": -1}, "simulate: forward is -1, expected a nonnegative time"),
        ("1f1b", {"send": "1 s"}, "simulate: send is '1 s', expected a time"),
        ("1f1b", {"forward": p}, "simulate: forward is p, expected a time"),
        ("1f1b", {"backward_weight": float("nan")}, "simulate: backward_weight is nan, expected a time"),
        ("1f1b", {"forward": [1, 2]}, "forward of 2 stages, expected a number, or one for each of 3"),
        ("1f1b", {"forward": [1, 2, None]}, "forward[2] is None, expected a time"),
        ([], {}, "simulate: no actions"),
        ([[("F", 0, 0, None)]], {}, "simulate: actions is [[('F', 0, 0, None)]], expected"),
    ],
)  # fmt: skip
def test_invalid_times_are_refused(actions, named, text):
    with pytest.raises(cg.CostGraphError) as refused:
        cg.plan.simulate(cg.plan.schedule(actions, 3, 5) if isinstance(actions, str) else actions, **named)
    assert text in str(refused.value)


def test_invalid_action_lists_are_refused():
    (first, *rest), *others = cg.plan.schedule("1f1b", 3, 5)
    for lists, text in (
        ([[*rest, first], *others], "rank 0 deadlocks at B of stage 0 and micro-batch 0"),
        ([[first, first, *rest], *others], "actions[0][1] is ('F', 0, 0) a second time"),
        ([[first._replace(kind="G"), *rest], *others], "actions[0][0] is ('G', 0, 0), expected one as schedule lists"),
        ([[first._replace(stage=-1), *rest], *others], "actions[0][0] is ('F', -1, 0), expected one"),
    ):
        with pytest.raises(cg.GraphError) as refused:
            cg.plan.simulate(lists)
        assert text in str(refused.value)


def test_invalid_idle_fraction_arguments_are_refused():
    for arguments, named, text in (
        (("1f1c", 3, 5), {}, "schedule '1f1c', expected one of gpipe"),
        (("zb-h1", 5, 3), {}, "micro-batches above the minimum"),
        (("1f1b", 3, 5), {"forward": 0}, "bubble: forward: 0, expected a positive number"),
    ):
        with pytest.raises(cg.CostGraphError) as refused:
            cg.plan.bubble(*arguments, **named)
        assert text in str(refused.value)
    with pytest.raises(cg.BindingError, match="ranks above the minimum"):
        cg.evaluate(cg.plan.bubble("zbv", p, m), p=1, m=3)
