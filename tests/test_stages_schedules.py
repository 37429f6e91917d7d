"""Pipeline stages under every schedule: memory, messages and times of ranks, and their combined results."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from queue import Queue
from threading import Barrier, Thread

import numpy as np
import pytest
import sympy
from each import each
from limits import PROCESS
from shared import load, parallelize, training_step
from test_stages import SGD, SIZES, M, P, cut, llama

import costgraph as cg
from costgraph import testing
from costgraph.algebra.polynomial import ONE, poly
from costgraph.analysis import step_time
from costgraph.analysis.collective_time import exchange
from costgraph.analysis.liveness import behind, saved_for_weights
from costgraph.analysis.work import ask as on_device
from costgraph.ir.graph import known_names
from costgraph.ops.collectives import (
    Collective,
    Receive,
    Send,
)
from costgraph.testing.interpreter import whole
from costgraph.transforms.pipeline_schedules import RankOrder
from costgraph.transforms.pipeline_stages import SplitBackward, planned

GROUPS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "interleaved-zb": 2, "zbv": 2, "dualpipev": 2}
SMALL = {"B": 2, "S": 3, "D": 4, "F": 5, "H": 2, "K": 2, "V": 7}
HANDED = 4 * SIZES["B"] * SIZES["S"] * SIZES["D"]
#: Schedules run on gloo processes, with ranks, micro-batches, chunks and layers. Then the measured peak bytes of rank
#: 0, of rank 1 or 2 (the larger one), and of the last rank; the bytes between steps; and the number of gradients that
#: torch keeps until the next step, as it does for input gradients computed separately from weight gradients. torch
#: 2.13.0+cpu, fp32. Outputs are returned (`return_outputs`), those of the last step until the next one.
MEASURED = {
    ("1f1b", 4, 8, 1, 16): ((11_505_664, 1_001_472, 0), (9_166_848, 1_198_080, 0), (5_637_156, 2_050_304, 0)),
    ("gpipe", 4, 8, 1, 16): ((20_400_128, 1_001_472, 0), (20_334_592, 1_198_080, 0), (22_862_144, 2_050_304, 0)),
    ("interleaved", 4, 8, 2, 16): (
        (15_947_776, 1_525_760, 0), (13_641_728, 1_722_368, 0), (10_177_572, 2_574_592, 0)
    ),
    ("interleaved", 3, 6, 3, 18): (
        (16_863_232, 2_046_976, 0), (14_557_184, 2_178_048, 0), (13_202_460, 2_833_664, 0)
    ),
    ("interleaved-zb", 4, 8, 2, 16): (
        (13_111_296, 1_787_904, 8), (14_684_160, 2_246_656, 16), (17_373_736, 3_098_880, 16)
    ),
    ("interleaved-zb", 3, 6, 3, 18): (
        (15_212_544, 2_440_192, 12), (15_998_976, 2_767_872, 18), (18_262_048, 3_423_488, 18)
    ),
    ("zbv", 4, 16, 2, 16): (
        (16_012_348, 4_491_520, 16), (15_998_976, 3_835_904, 32), (17_512_448, 3_311_616, 16)
    ),
    ("dualpipev", 4, 16, 2, 16): (
        (16_280_632, 4_065_536, 3), (15_689_728, 2_951_168, 5), (14_837_760, 2_852_864, 2)
    ),
}  # fmt: skip
#: Tolerance on top of 1 %: at the turning point of a folded pipeline, and where one rank has the first and last stage.
FURTHER = {("zbv", 2): 0.014, ("dualpipev", 0): 0.021}
#: Peak bytes above the level between steps, for 48 layers.
DEEP = {"interleaved": (41_824_256, 34_578_432, 20_775_716), "interleaved-zb": (33_052_672, 37_050_368, 40_329_512)}

#: Schedules with ranks, micro-batches, and chunks per rank.
LISTS = [
    ("gpipe", 3, 5, 1), ("1f1b", 5, 7, 1), ("1f1b", 5, 3, 1), ("interleaved", 3, 3, 2), ("interleaved", 3, 9, 3),
    ("interleaved", 5, 10, 2), ("zb-h1", 5, 7, 1), ("zb-h1", 3, 3, 1), ("interleaved-zb", 3, 6, 2),
    ("interleaved-zb", 5, 15, 3), ("zbv", 5, 11, 2), ("zbv", 3, 7, 2), ("dualpipev", 5, 11, 2),
    ("dualpipev", 3, 8, 2), ("dualpipe", 2, 6, 2), ("dualpipe", 6, 16, 2), ("dualpipe", 10, 22, 2),
]  # fmt: skip


def step(m=M, **options):
    return training_step(llama(), optimizer=SGD, accumulate=m, **options)


def own_sizes(g, **sizes):
    return {name: n for name, n in {**SIZES, **sizes}.items() if name in known_names(g)}


# -- memory ----------------------------------------------------------------------------------------------------------


def states(name, p, m, v, rank):
    """Yield in-flight stages beside a running chunk, one by one, until their backward pass or weight gradient."""
    waits, weights = [], []
    for kind, stage, k, _ in cg.plan.schedule(name, p, m, v)[rank]:
        if kind == "F":
            waits.append((stage, k))
        here = [w for w in waits if w != (stage, k)], [w for w in weights if w != (stage, k)]
        yield stage, [s for s, _ in here[0]], [s for s, _ in here[1]]
        if kind in "IB":
            waits.remove((stage, k))
        if kind == "I":
            weights.append((stage, k))
        if kind == "W":
            weights.remove((stage, k))


@each(("name", "p", "m", "v"), LISTS)
def test_in_flight_formula_matches_counted_schedule(name, p, m, v):
    order = RankOrder(name, poly(p), poly(m), poly(v))
    for rank in range(p):
        folded = name in ("zbv", "dualpipev", "dualpipe")
        at = min(rank, p - 1 - rank) if name == "dualpipe" else rank  # both halves run the same mirrored schedule
        first, last = at == 0, at == (0 if folded else p - 1)
        held = [[int(n.constant) for n in h] for h in order.held(poly(at), first=first, last=last, later=False)]
        seen = list(states(name, p, m, v, rank))
        # a pass goes through all chunks of a rank, and holds the in-flight inputs for all but one of them
        for bytes_waiting, bytes_weights in ((5, 3), (4, 5), (1, 0), (0, 1)):
            counted = max(len(a) * bytes_waiting + len(b) * bytes_weights for _, a, b in seen)
            found = max((h[0] + v - 1) * bytes_waiting + h[1] * bytes_weights for h in held)
            assert found == counted
        for at, stage, there in ((2, 0, first), (4, (p if name == "dualpipe" else p * v) - 1, last)):
            if there:
                counted = max(a.count(stage) + (s == stage) for s, a, _ in seen)
                assert max(h[at] for h in held) + 1 == counted


def after(name, p, m, v, rank):
    """Yield how many chunks are in flight beside a running one, once each chunk of a rank has a weight gradient."""
    made, left = set(), set()
    for kind, stage, k, _ in cg.plan.schedule(name, p, m, v)[rank]:
        left |= {(stage, k)} if kind == "F" else set()
        if len(made) == v:
            yield len(left) - 1
        if kind in "BW":
            left.remove((stage, k))
            made.add(stage)


@each(("name", "p", "m", "v"), LISTS)
def test_in_flight_after_first_weight_gradients_matches_count(name, p, m, v):
    order = RankOrder(name, poly(p), poly(m), poly(v))
    for rank in range(p):
        at = min(rank, p - 1 - rank) if name == "dualpipe" else rank
        held = [h[0] + h[1] for h in order.held(poly(at), first=False, last=False, later=True)]
        counted = max(after(name, p, m, v, rank), default=0)
        assert max(n.constant for n in held) + v - 1 == max(counted, v - 1)


@each(("name", "p", "m", "v"), [case for case in LISTS if case[3] > 1])
def test_in_flight_at_last_forward_matches_count(name, p, m, v):
    order, both = RankOrder(name, poly(p), poly(m), poly(v)), name == "dualpipe"
    folded, half = both or name in ("zbv", "dualpipev"), p // 2 if both else p
    for rank in {0, half - 1}:
        first, last = rank == 0, rank == (0 if folded else half - 1)
        actions = cg.plan.schedule(name, p, m, v)[rank]
        done = actions[: max(i for i, a in enumerate(actions) if a.kind == "F") + 1]
        if both:  # the micro-batches that enter at this end
            done = [a for a in done if (a.micro_batch < m // 2) == (a.stage < half)]
        waits = Counter(a.stage for a in done if a.kind == "F")
        waits.subtract(a.stage for a in done if a.kind in "BI")
        own, found = sorted(waits), [int(n.constant) for n in order.ends(first=first, last=last, turning=rank > 0)]
        if folded and not first:
            assert found == [waits[own[1]], waits[own[0]]]
        else:
            assert not first or found[0] == waits[own[0]]
            assert not last or found[1] == waits[own[-1]]


def stages(name, p=4, v=None):
    return parallelize(step(), pp=p, micro_batches=M, schedule=name, virtual_stages=v or GROUPS[name]).stages


@pytest.mark.parametrize(("name", "p", "m", "v", "depth"), MEASURED)
def test_peaks_match_gloo_processes(name, p, m, v, depth):
    """Receive buffers for all micro-batches, outputs until their backward pass, and sent tensors until completion."""
    tokens, returned = (m * n * SIZES["B"] * SIZES["S"] for n in (2 * 8, 4 * SIZES["V"]))
    rows = MEASURED[name, p, m, v, depth]
    for i, (g, (peak, between, left)) in enumerate(zip(stages(name, p, v), rows, strict=True)):
        line = cg.timeline(g, **own_sizes(g, M=m, L=depth))
        beside = tokens + returned * (i == (0 if name in ("zbv", "dualpipev") else 2))
        assert line.by_role["param"] + line.by_role["buffer"] + beside + left * HANDED == between
        if p == 4:  # each schedule once
            assert line.peak == cg.peak_memory(g, **own_sizes(g, M=m, L=depth))
        found = line.peak - line.by_role.get("input", 0) + beside
        assert found == pytest.approx(peak, rel=FURTHER.get((name, i), 0.01))


@pytest.mark.long  # 11 s
@pytest.mark.parametrize("name", DEEP)
def test_peaks_of_deep_models_match_gloo_processes(name):
    lefts = [left for _, _, left in MEASURED[name, 4, 8, 2, 16]]
    for g, measured, left in zip(stages(name), DEEP[name], lefts, strict=True):
        line = cg.timeline(g, **own_sizes(g, L=48, M=8))
        found = line.peak - sum(n for role, n in line.by_role.items() if role in ("param", "input", "buffer"))
        assert found == pytest.approx(measured + left * HANDED, rel=0.008)


def test_megatron_has_no_receive_buffers_and_frees_sent_tensors():
    for g in cg.parallelize(step(), pp=4, micro_batches=M, system="megatron").stages:
        assert "buffer" not in cg.timeline(g, **own_sizes(g, M=8)).by_role


def test_weight_gradients_keep_operands_and_output_gradients():
    """The gradient of w in y = x w needs x and the gradient of y, not the tensors attention and activations keep."""
    s = cg.parallelize(step(), pp=4, micro_batches=M, schedule="zb-h1", system="megatron")
    B, S, D, F, H, K, L = cg.dims("B S D F H K L")
    body = next(op.body for op in s.stages[1].ops if op.loop and op.loop.count == poly(M))
    # Operands: one for q, k, v; those of o; one for gate and up; those of down. Output gradients: q, k, v, o, gate, up
    # and down. Both norms: the scaled value, and the gradient of the result, which gate and up, and q, k and v,
    # accumulate.
    kept = (D + H * K + D + F) + (3 * H * K + D + 2 * F + D) + (2 * D + 2 * D)
    assert sympy.expand(saved_for_weights(body)[0].expr - 4 * B * S * L / 4 * kept) == 0


# -- work and messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_ranks_do_all_step_work_and_send_per_schedule(name):
    whole_step, s = cut(llama(), schedule=name, virtual_stages=GROUPS[name])
    first, middle, last = s.stages
    for ask in (cg.matmul_flops, cg.param_count):
        assert sympy.expand(ask(first) + (P - 2) * ask(middle) + ask(last) - ask(whole_step)) == 0
    _, s = cut(llama(), 4, schedule=name, virtual_stages=GROUPS[name])
    for g, rank in zip(s.stages, (0, 1, 3), strict=True):
        rows = [r for r in cg.communication(g) if r.collective == "send"]
        assert sum(r.times for r in rows) == cg.plan.sends(name, 4, M, GROUPS[name], rank)


@pytest.mark.parametrize("optimizer", [cg.AdamW(), cg.AdamW(implementation="for-loop")], ids=["foreach", "for-loop"])
def test_single_micro_batch_step_is_staged_with_updates(optimizer):
    whole_step = cg.training_step(llama(), optimizer=optimizer)
    s = cg.parallelize(whole_step, pp=P)
    first, middle, last = s.stages
    for ask in (cg.flops, cg.param_count, cg.param_bytes):
        assert sympy.expand(ask(first) + (P - 2) * ask(middle) + ask(last) - ask(whole_step)) == 0


@pytest.mark.parametrize("checkpoint", [None, cg.every_block()], ids=["kept", "checkpoint"])
def test_split_backward_pass_computes_same_gradients(checkpoint):
    before = step(checkpoint=checkpoint)
    after = SplitBackward(planned(before)).run(before)
    assert len(behind(planned(after).home)) > len(behind(planned(before).home))
    one, two = (testing.run(g, M=2, L=2, **SMALL) for g in (before, after))
    assert [b.name for b in one.buffers] == [b.name for b in two.buffers]
    for a, b in zip(one.buffers, two.buffers, strict=True):
        assert np.allclose(a.array, b.array, rtol=1e-9)


@pytest.mark.parametrize(("name", "options"), [("1f1b", {}), ("zb-h1", {}), ("gpipe", {"clip": 1e-3})])
def test_stages_compute_the_values_of_the_whole_step(name, options):
    p, m, depth = 3, 3, 3
    point = {k: poly(n) for k, n in {**SMALL, "M": m, "L": depth}.items()}
    whole_step = step(**options)
    s = cg.parallelize(whole_step, pp=p, micro_batches=M, schedule=name)
    random = np.random.default_rng(0)
    given = {
        t.name: random.uniform(0.1, 0.5, [int(n.bind(point).constant) for n in t.sizes])
        for t in whole_step.tensors
        if t.role == "param" and t.producer is None
    }
    tokens = {n: random.integers(0, SMALL["V"], (m, SMALL["B"], SMALL["S"])) for n in ("tokens", "targets")}
    expected = {b.name: b.array for b in testing.run(whole_step, {**given, **tokens}, M=m, L=depth, **SMALL).buffers}
    links = {(r, way): Queue() for r in range(p) for way in ("forward", "backward")}
    found, failed, brought, barrier = {}, [], {}, Barrier(p)

    def rank(r):
        g = s.stages[min(r, 1) + (r == p - 1)]

        def send(at):
            links[r, at.op.phase].put(np.array(at.operands[0].array))
            return at.operands[0].array

        def receive(at):
            return links[r + (1 if at.op.phase == "backward" else -1), at.op.phase].get(True, PROCESS)

        def all_reduce(at):
            brought[r] = np.array(at.operands[0].array)
            barrier.wait(PROCESS)
            total = sum(brought.values())
            barrier.wait(PROCESS)
            return total

        names = {t.name for t in g.tensors if t.producer is None}
        mine = {n: a[r : r + 1] if n.startswith("layers/") else a for n, a in {**given, **tokens}.items() if n in names}
        sizes = {n: k for n, k in {**SMALL, "M": m, "L": depth}.items() if n in known_names(g)}
        try:
            meanings = {Send: whole(send), Receive: whole(receive), Collective: whole(all_reduce)}
            found[r] = testing.run(g, mine, meanings={**testing.REFERENCE_SEMANTICS, **meanings}, **sizes)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [Thread(target=rank, args=(r,)) for r in range(p)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    for r, run in found.items():
        for buffer in run.buffers:
            name, _, _ = buffer.name.partition("[")
            if name in given:
                there = [(n, a) for n, a in expected.items() if n.partition("[")[0] == name]
                want = there[0][1] if not name.startswith("layers/") or len(there) == 1 else there[r][1]
                want = want[r : r + 1] if want.shape != buffer.array.shape else want
                assert np.allclose(buffer.array, want, rtol=1e-9), buffer.name


def test_gradient_norms_and_flags_are_reduced_over_stages():
    whole_step = cg.training_step(llama(), accumulate=M, precision="fp16-mixed", clip=1.0)
    s = cg.parallelize(whole_step, pp=5, micro_batches=M, dp=2, zero=2)
    for g in s.stages:
        met = [op for op in g.ops if isinstance(op.kind, Collective) and op.kind.axis == "pp"]
        assert [(op.kind.operation, op.kind.ranks) for op in met] == [("max", poly(5)), ("sum", poly(5))]
        rows = [r for r in cg.communication(g, hardware="h100-sxm", **own_sizes(g, M=8, L=15)).rows if r.axis == "pp"]
        assert [(r.bytes, r.times, r.link) for r in rows if r.collective == "all_reduce"] == [(4, 1, "network")] * 2
    with pytest.raises(cg.UnsupportedError, match="'tokens/table', shared by two stages, would count twice"):
        cg.parallelize(training_step(load("gpt2"), accumulate=2, clip=1.0), pp=2, micro_batches=2)


# -- times -----------------------------------------------------------------------------------------------------------


def test_dualpipe_ranks_hold_two_stages_and_half_the_micro_batches_each():
    """A rank works like one of a folded pipeline with half the micro-batches, and also holds mirrored parameters."""
    whole_step, s = cut(llama(), 6, 16, schedule="dualpipe")
    halved, half = cut(llama(), 3, 8, schedule="dualpipev")
    assert [g.name for g in s.stages] == ["llama.first", "llama.middle", "llama.last"]
    assert [g.waiting.alike.constant for g in s.stages] == [1, 4, 1]
    for mine, other in zip(s.stages, (half.stages[0], half.stages[1], half.stages[0]), strict=True):
        assert cg.peak_memory(mine, **own_sizes(mine, L=12)) == cg.peak_memory(other, **own_sizes(other, L=12))
    first, middle, last = ([ask(g) for ask in (cg.param_count, cg.matmul_flops)] for g in s.stages)
    params, flops = (a + 4 * b + c for a, b, c in zip(first, middle, last, strict=True))
    assert sympy.expand(params - 2 * cg.param_count(whole_step)) == 0
    assert sympy.expand(flops - cg.matmul_flops(whole_step)) == sympy.expand(flops - 2 * cg.matmul_flops(halved)) == 0
    for g, rank in zip(s.stages, (0, 2, 5), strict=True):
        rows = cg.communication(g).rows
        assert sum(r.times for r in rows if r.collective == "send") == cg.plan.sends("dualpipe", 6, 16, 2, rank)
        met = [r for r in rows if r.collective == "all_reduce"]
        assert sympy.expand(sum(r.bytes for r in met) - 4 * cg.param_count(g)) == 0
        assert {(r.axis, r.ranks, r.times) for r in met} == {("pp", 2, 1)}
    figures = cg.plan.run(s, "h100-sxm", 10**6, **{**SIZES, "L": 12})
    assert (figures.devices, figures.step_tokens) == (6, 16 * SIZES["B"] * SIZES["S"])
    with pytest.raises(cg.BindingError, match="half the ranks"):
        cut(llama(), 5, 16, schedule="dualpipe")


@pytest.mark.parametrize("name", [*GROUPS, "dualpipe"])
def test_runs_count_tokens_and_devices_of_the_whole_pipeline(name):
    # each end of dualpipe gets half of the micro-batches, so their number must be known
    m = 8 if name == "dualpipe" else M
    whole_step, s = cut(llama(), 4, m, schedule=name, virtual_stages=GROUPS.get(name, 1))
    sizes = SIZES if name == "dualpipe" else {**SIZES, "M": 8}
    figures = cg.plan.run(s, "h100-sxm", 10**6, **sizes)
    assert (figures.devices, figures.step_tokens) == (4, 8 * SIZES["B"] * SIZES["S"])
    assert figures.seconds == cg.seconds(s, "h100-sxm", **sizes)
    rate = float(cg.load_hardware("h100-sxm").rate("fp32").value)
    assert figures.mfu == pytest.approx(cg.model_flops(whole_step, **sizes) / 4 / figures.seconds / rate)


@pytest.mark.parametrize("name", [*(n for n in GROUPS if n not in ("gpipe", "1f1b")), "dualpipe"])
def test_time_matches_events_except_for_a_few_sends(name):
    v = GROUPS.get(name, 1)  # in each direction, a micro-batch goes through one stage of a rank
    g = cg.parallelize(step(), pp=4, micro_batches=M, schedule=name, virtual_stages=v).stages[1]
    late = {op for body in g.bodies() for op in behind(body)}
    for p in (2, 5) if name != "dualpipe" else (2, 6):
        m = 2 * p
        g.waiting = replace(g.waiting, stages=poly(p), alike=poly(p), micro_batches=poly(m), asked=())
        g.cache.clear()
        asked = on_device(g, "h100-sxm", None, {**{k: SIZES[k] for k in "BSDFHKL"}, "M": m}, "seconds")
        op = next(op for op in g.walk() if op.kind.name == "send")
        send = Fraction(exchange(op, g, asked.values, asked.hardware)[0].constant)
        for f, i, w in ((2, 3, 2), (1, 1, 1), (7, 5, 3), (3, 11, 5)):
            cost = {"forward": f, "backward": i if name != "interleaved" else i + w, "weights": w, "once": 17}

            def timing(part, cost=cost, m=m):
                (which,) = {step_time.when(work.op, late if name != "interleaved" else ()) for work in part.works}
                return poly(cost[which] * (1 if which == "once" else m * v))

            found = Fraction(step_time.of_pipeline([asked], timing).constant) - 17
            lists = cg.plan.schedule(name, p, m, GROUPS.get(name))
            events = cg.plan.simulate(lists, forward=f, backward_input=i, backward_weight=w, send=send).makespan
            assert abs(found - events) <= (0 if name == "interleaved" else 2 * p * send)


def test_once_reduced_gradients_are_excluded_from_pass_times():
    """Stages wait for each other's passes, not for local gradient reductions."""
    sizes = {**SIZES, "S": 1021, "V": 32003, "B": 2}
    s = parallelize(training_step(llama(), optimizer=SGD), pp=4, dp=2)
    seconds = cg.seconds(s, "h100-sxm", **sizes)
    reduced = []
    for g in s.stages:
        rows = cg.communication(g, hardware="h100-sxm", **own_sizes(g, **sizes)).rows
        reduced.append(sum(r.seconds for r in rows if r.axis == "dp" and r.phase == "backward"))
    alone = parallelize(training_step(llama(), optimizer=SGD), pp=4)
    least = cg.seconds(alone, "h100-sxm", **{**sizes, "B": 1})
    # it would be four times as much as part of the passes; the loss is reduced as well
    assert least + max(reduced) <= seconds < least + 1.5 * max(reduced) < least + 2 * min(reduced)


@pytest.mark.parametrize("open_ones", ["LP", "P"])
def test_closed_forms_state_minimum_layers_per_stage(open_ones):
    """With one layer the first iteration is also the last, so no residuals of other layers are held."""
    g = cg.parallelize(step(), pp=P, micro_batches=M).stages[1]
    for depth, stages in ((16, 16), (16, 8), (16, 4), (9, 3)):
        sizes = own_sizes(g, M=16, L=depth, P=stages)
        formula = cg.peak_memory(g, **{name: n for name, n in sizes.items() if name not in open_ones})
        point = {name: sizes[name] for name in open_ones}
        if depth > stages:
            assert cg.evaluate(formula, **point) == cg.peak_memory(g, **sizes)
        else:
            with pytest.raises(cg.BindingError, match=r"iterations beyond 1 \(the formula holds from 2\) has size"):
                cg.evaluate(formula, **point)
            assert cg.peak_memory(g, **sizes) < cg.peak_memory(g, **{**sizes, "L": 2 * depth})


# -- uneven ----------------------------------------------------------------------------------------------------------


def test_uneven_stages_are_supported():
    whole_step = step()
    s = cg.parallelize(whole_step, pp=5, layers=(2, 3, 5, 3, 1), micro_batches=M)
    assert [g.name for g in s.stages] == ["llama.first", "llama.middle_of_3", "llama.middle_of_5", "llama.last"]
    times = [1, 2, 1, 1]
    for ask in (cg.matmul_flops, cg.param_count):
        found = sum(n * ask(g) for n, g in zip(times, s.stages, strict=True))
        assert sympy.expand(found - ask(whole_step).subs(cg.dims("L"), 14)) == 0
    assert [g.waiting.alike.constant for g in s.stages] == times
    # ranks 1 and 3 have 3 layers each; rank 1 holds the most, for 4 of 5 micro-batches at a time
    assert s.stages[1].waiting.first[0][0].bind({"M": poly(9)}) == poly(3)
    even = cg.parallelize(whole_step, pp=4, layers=(4, 4, 4, 4), micro_batches=M)
    shared = cg.parallelize(whole_step, pp=4, micro_batches=M)
    for a, b in zip(even.stages, shared.stages, strict=True):
        assert cg.peak_memory(a, **own_sizes(a, M=8)) == cg.peak_memory(b, **own_sizes(b, M=8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "1f1b", "virtual_stages": 2}, "virtual stages per rank beyond 1"),
        ({"schedule": "interleaved"}, "virtual stages per rank beyond one"),
        ({"schedule": "dualpipe", "virtual_stages": 3}, "schedule 'dualpipe': virtual stages per rank beyond 2"),
        ({"schedule": "1f1c"}, "parallelize: schedule '1f1c', expected one of gpipe"),
        ({"schedule": "zbv", "layers": (1, 2, 3, 4)}, "layers with 2 layer groups per rank, expected one group"),
        ({"layers": (1, 2, 3)}, "layers lists 3 stages, expected pp=4"),
        ({"layers": (1, 2, 0, 3)}, "layers is (1, 2, 0, 3), expected a positive number of layers for each stage"),
        ({"layers": 7}, "layers is 7, expected a positive number of layers for each stage"),
    ],
)  # fmt: skip
def test_invalid_schedule_arguments_are_refused(options, text):
    with pytest.raises(cg.CostGraphError) as refused:
        cg.parallelize(step(), pp=4, micro_batches=M, **options)
    assert text in str(refused.value)


def test_unsupported_schedule_sizes_are_refused_at_binding():
    s = cg.parallelize(step(), pp=P, micro_batches=M, schedule="interleaved", virtual_stages=2)
    g = s.stages[1]
    with pytest.raises(cg.BindingError, match="micro-batches per rank has size M/P = 7/4"):
        cg.peak_memory(g, **own_sizes(g, M=7, P=4))
    with pytest.raises(cg.BindingError, match="layers per group, with 2 groups per rank has size L"):
        cg.peak_memory(g, **own_sizes(g, M=8, P=4, L=12))
    assert g.waiting.groups == 2 * ONE
