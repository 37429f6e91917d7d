"""Pipeline schedules against the action lists of torch.distributed.pipelining, generated without running a model."""

from collections import Counter

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import costgraph as cg

TORCHS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: Stages per rank by schedule, and micro-batches as multiples of the ranks.
PARTS = {"interleaved": (2, 3), "interleaved-zb": (2, 3), "zbv": (2,), "dualpipev": (2,)}
UNITS = {2: (1, 2, 5), 4: (2,), 8: (2,)}
KINDS = {
    "FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "SEND_F": "send F",
    "RECV_F": "receive F", "SEND_B": "send B", "RECV_B": "receive B",
}  # fmt: skip


def torch_schedule(name, p, v, m, **options):
    ranks = []
    for actions in get_schedule_ops(TORCHS[name], p, m, None if v == 1 else v, **options):
        made, count = [], 0
        for action in actions:
            for a in (action and action.sub_actions) or [action]:
                kind = a and KINDS.get(a.computation_type.name)
                if kind is None:
                    continue  # a bubble, or a parameter action
                number = a.microbatch_index
                if (name, kind) == ("1f1b", "F"):  # the dump numbers forward actions on the last rank from 1
                    number, count = count, count + 1
                made.append((kind, a.stage_index, number))
        ranks.append(made)
    return ranks


def max_in_flight(actions, ends):
    held = most = 0
    for kind, *_ in actions:
        held += (kind == "F") - (kind in ends)
        most = max(most, held + (kind in ends))
    return most


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb", "zbv", "dualpipev"])
def test_schedule_sends_and_receives_equal_torchs(name):
    p, v, m = 4, 2, 12
    ours = cg.plan.schedule(name, p, m, v, sends=True)
    for rank, (mine, theirs) in enumerate(zip(ours, torch_schedule(name, p, v, m, with_comms=True), strict=True)):
        assert Counter(a[:3] for a in mine) == Counter(theirs)
        assert cg.plan.sends(name, p, m, v, rank) == sum(kind.startswith("send") for kind, *_ in theirs)


def makespan(ranks, times):
    """Return the end time of the last rank, round by round, with free communication."""
    last = max(stage for actions in ranks for _, stage, _ in actions)
    done, at, now = {}, [0] * len(ranks), [0] * len(ranks)
    while any(k < len(actions) for k, actions in zip(at, ranks, strict=True)):
        before = list(at)
        for r, actions in enumerate(ranks):
            while at[r] < len(actions):
                kind, stage, number = actions[at[r]]
                needs = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("F", stage), ("I", stage + 1)])
                needs = [(what, s, number) for what, s in needs if 0 <= s <= last]
                if not all(need in done for need in needs):
                    break
                now[r] = max([now[r], *(done[need] for need in needs)]) + sum(times[k] for k in kind.replace("B", "IW"))
                done["I" if kind == "B" else kind, stage, number] = now[r]
                at[r] += 1
        assert at != before
    return max(now)


def cases(name, p):
    """Yield the stages per rank and numbers of micro-batches; bidirectional schedules need at least two per rank."""
    least = 2 if name in ("zbv", "dualpipev") else 1
    return [(v, max(k, least) * p) for v in PARTS.get(name, (1,)) for k in UNITS[p]]


@pytest.mark.parametrize("p", [2, 4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TORCHS)
def test_schedules_and_bubbles_equal_torchs(name, p):
    for case in cases(name, p):
        v, m = case
        theirs, ours = torch_schedule(name, p, v, m), cg.plan.schedule(name, p, m, v)
        assert [[a[:3] for a in actions] for actions in ours] == theirs, case
        for rank, actions in enumerate(theirs):
            for until, ends in (("input", "BI"), ("weights", "BW")):
                assert cg.plan.in_flight(name, p, m, v, rank, until) == max_in_flight(actions, ends), case
        for times in ((1, 1, 1), (7, 5, 3), (2, 3, 13)):
            took, busy = makespan(theirs, dict(zip("FIW", times, strict=True))), m * v * sum(times)
            named = dict(zip(("forward", "backward_input", "backward_weight"), times, strict=True))
            assert cg.plan.simulate(ours, **named).makespan == took, case
            share = pytest.approx(took / busy - 1, rel=1e-12, abs=1e-12)
            assert cg.plan.bubble(name, p, m, v, **named) == share, case
            if times == (1, 1, 1):
                parts = 3 if name in ("interleaved-zb", "zbv", "dualpipev") else 1
                assert took * m * v * parts == busy * (m * v * parts + p - 1), case
