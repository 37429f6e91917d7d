"""Pipeline schedules: formulas against counted action lists, and refusals."""

from collections import Counter

import pytest
from each import each

import costgraph as cg

m, p, v, r = cg.dims("m p v r")
# names, chunks per rank, and ranks and micro-batches, prime where possible
CASES = [
    ("gpipe", 1, 5, 3), ("1f1b", 1, 5, 3), ("1f1b", 1, 5, 11), ("interleaved", 3, 5, 5), ("interleaved", 2, 7, 21),
    ("zb-h1", 1, 5, 5), ("zb-h1", 1, 5, 11), ("interleaved-zb", 3, 5, 10), ("zbv", 2, 5, 9), ("zbv", 2, 7, 17),
    ("dualpipev", 2, 5, 11), ("dualpipev", 2, 1, 2), ("dualpipe", 2, 6, 12), ("dualpipe", 2, 10, 26), ("1f1b", 1, 1, 3),
]  # fmt: skip


def finishes(ranks):
    """Return whether the action lists complete if each rank runs in order and waits for its dependencies."""
    stages = 1 + max(a.stage for actions in ranks for a in actions)
    done, at = set(), [0] * len(ranks)
    while True:
        before = len(done)
        for k, actions in enumerate(ranks):
            while at[k] < len(actions):
                kind, stage, number, _ = actions[at[k]]
                if kind == "F":
                    needs = {("F", stage - 1, number)} if stage else set()
                elif kind == "W":
                    needs = {("I", stage, number)}
                else:
                    needs = {("F", stage, number)} | ({("I", stage + 1, number)} if stage + 1 < stages else set())
                if not needs <= done:
                    break
                done |= {(each, stage, number) for each in ("IW" if kind == "B" else kind)}
                at[k] += 1
        if len(done) == before:
            return at == [len(actions) for actions in ranks]


@pytest.mark.parametrize(("name", "chunks", "ranks", "many"), CASES)
def test_formulas_match_counted_actions(name, chunks, ranks, many):
    lists = cg.plan.schedule(name, ranks, many, chunks)
    assert finishes(lists)
    stages = ranks if name == "dualpipe" else ranks * chunks
    each = Counter((a.kind, a.stage, a.micro_batch) for actions in lists for a in actions)
    for kinds in ("F", "IB", "WB"):  # once for every stage and micro-batch
        made = [(s, k) for (kind, s, k), n in each.items() if kind in kinds for _ in range(n)]
        assert sorted(made) == [(s, k) for s in range(stages) for k in range(many)]
    sent = cg.plan.schedule(name, ranks, many, chunks, sends=True)
    sizes = {"p": ranks, "m": many, **({"v": chunks} if name.startswith("interleaved") else {})}
    for rank, actions in enumerate(lists):
        for until, ends in (("input", "IB"), ("weights", "WB")):
            held = most = 0
            for a in actions:
                most = max(most, held := held + (a.kind == "F"))
                held -= a.kind in ends
            assert cg.plan.in_flight(name, ranks, many, chunks, rank, until) == most
            formula = cg.plan.in_flight(name, p, m, v if "v" in sizes else chunks, r - 1, until)
            asked = {s.name for s in formula.free_symbols}
            assert cg.evaluate(formula, **{k: n for k, n in {**sizes, "r": rank + 1}.items() if k in asked}) == most
        count = sum(a.kind.startswith("send") for a in sent[rank])
        assert cg.plan.sends(name, ranks, many, chunks, rank) == count
    for way in "FB":  # every send has a matching receive on the neighbouring stage
        step = 1 if way == "F" else -1
        out = {
            (k, a.peer, a.stage + step, a.micro_batch) for k, l in enumerate(sent) for a in l if a.kind == f"send {way}"
        }
        into = {
            (a.peer, k, a.stage, a.micro_batch) for k, l in enumerate(sent) for a in l if a.kind == f"receive {way}"
        }
        assert out == into


@each(
    ("arguments", "text"),
    [
        (("1f1c", 4, 8), "schedule '1f1c', expected one of gpipe, 1f1b"),
        (("1f1b", 0, 8), "schedule '1f1b': pp: 0, expected a positive integer"),
        (("1f1b", 4, 8, 2), "virtual stages per rank beyond 1"),
        (("interleaved", 4, 6), "schedule 'interleaved': micro-batches per rank has size m/p = 3/2, expected"),
        (("interleaved", 4, 8, 1), "virtual stages per rank beyond one"),
        (("zb-h1", 4, 3), "m=3, p=4: schedule 'zb-h1': micro-batches above the minimum has size m - p = -1"),
        (("zbv", 4, 6), "micro-batches above the minimum"),
        (("dualpipev", 4, 7), "micro-batches above the minimum"),
        (("dualpipe", 3, 8), "half the ranks"),
        (("1f1b", p, 8), "pp is p, expected a whole number"),
        (("gpipe", 1000, 10**9), "expected at most 5000000"),
    ],
)  # fmt: skip
def test_schedules_without_action_lists_are_refused(arguments, text):
    with pytest.raises(cg.CostGraphError) as refused:
        cg.plan.schedule(*arguments)
    assert text in str(refused.value)


def test_formulas_state_their_assumptions():
    with pytest.raises(cg.BindingError, match="ranks after this one"):
        cg.plan.in_flight("1f1b", 4, 8, 1, 4)
    with pytest.raises(cg.CostGraphError, match="rank: -1"):
        cg.plan.in_flight("1f1b", 4, 8, 1, -1)
    with pytest.raises(cg.GraphError, match="until 'end', expected one of input, weights"):
        cg.plan.in_flight("1f1b", 4, 8, 1, 1, "end")
    formula = cg.plan.in_flight("zb-h1", p, m, 1, r)
    with pytest.raises(cg.BindingError, match="micro-batches above the minimum"):
        cg.evaluate(formula, p=5, m=3, r=2)
    assert cg.evaluate(formula, p=5, m=7, r=2) == 3
