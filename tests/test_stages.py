"""Pipeline stages: their total cost, their memory, and the messages between them."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
import sympy
from shared import load, parallelize, training_step

import costgraph as cg
from costgraph.algebra.dominance import NOTHING_KNOWN
from costgraph.algebra.polynomial import poly
from costgraph.analysis.collective_time import exchange
from costgraph.analysis.step_time import (
    estimate,
    of_pipeline,
    shares_of,
    spent,
)
from costgraph.analysis.work import ask as on_device
from costgraph.ir.graph import current_graph, known_names

P, M = cg.dims("P M")
SGD = cg.SGD()
SIZES = {"B": 2, "S": 64, "D": 64, "F": 128, "H": 4, "K": 16, "V": 256, "L": 16}


def norm(x, name):
    """Normalize as torch does on a CPU, one op per step."""
    scale = cg.ops.pointwise("rsqrt", cg.reduce(x * x, "b s d -> b s 1", "mean") + 1e-5)
    return x * scale * current_graph().param(name, (x.shape[-1],))


@cache
def llama(layers=None):
    B, S, D, F, H, K, V, L = cg.dims("B S D F H K V L")
    with cg.Graph("llama") as g:

        def block(x):
            h = norm(x, "norm1")
            q, k, v = (cg.einsum(h, g.param(n, (D, H, K)), "b s d, d h k -> b h s k") for n in "qkv")
            a = cg.attention(q, k, v, causal=True)
            x = x + cg.einsum(cg.rearrange(a, "b h s k -> b s (h k)"), g.param("o", (H * K, D)), "b s e, e d -> b s d")
            h = norm(x, "norm2")
            up = cg.silu(cg.linear(h, "b s d -> b s f", f=F, name="gate")) * cg.linear(
                h, "b s d -> b s f", f=F, name="up"
            )
            return x + cg.linear(up, "b s f -> b s d", d=D, name="down")

        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("table", (V, D)))
        x = norm(cg.repeat(layers or L, block, x, name="layers"), "norm")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def tied():
    """Return a model whose embedding and head share one table."""
    B, S, D, V, L = cg.dims("B S D V L")
    with cg.Graph("tied") as g:
        table = g.param("table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)
        x = cg.repeat(L, lambda x: x + cg.linear(cg.relu(x), "b s d -> b s e", e=D), x, name="layers")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
        g.loss = "cross_entropy"
    return g


def two_kinds():
    B, D, L = cg.dims("B D L")
    with cg.Graph("two kinds") as g:
        x = g.input("x", (B, D), grad=True)
        for count, what in ((2, cg.relu), (L, cg.tanh)):
            x = cg.repeat(count, lambda x, what=what: what(cg.linear(x, "b d -> b e", e=D)), x)
        g.output(cg.reduce(x, "b d -> ", "mean"))
    return g


def cut(graph, pp=P, m=M, optimizer=None, **degrees):
    whole = training_step(graph, optimizer=optimizer or SGD, accumulate=m)
    return whole, parallelize(whole, pp=pp, micro_batches=m, **degrees)


def together(stages, ask):
    """Sum an answer over all P stages."""
    first, middle, last = map(ask, stages)
    return first + (P - 2) * middle + last


@pytest.mark.parametrize("optimizer", [cg.SGD(), cg.AdamW()], ids=["sgd", "adamw"])
def test_stage_costs_add_up_to_the_whole_step(optimizer):
    whole, s = cut(llama(), optimizer=optimizer)
    for ask in (cg.flops, cg.param_count, cg.param_bytes):
        assert sympy.expand(together(s.stages, ask) - ask(whole)) == 0, ask
    assert [len(g.outputs) for g in s.stages] == [0, 0, 1]


def test_leading_dense_layers_belong_to_first_stage():
    """The leading dense layers of DeepSeek belong to the first stage, which has as many layers as any other."""
    whole, s = cut(load("deepseek-v2", symbolic=True))
    for ask in (cg.matmul_flops, cg.param_count):
        assert sympy.expand(together(s.stages, ask) - ask(whole)) == 0, ask
    S, Kr = cg.dims("S Kr")  # each stage builds the rotary angles
    assert sympy.expand(together(s.stages, cg.flops) - cg.flops(whole) - (P - 1) * M * 3 * S * Kr / 2) == 0
    L, Ld = cg.dims("L Ld")
    first, middle, _ = (cg.param_count(g) for g in s.stages)
    assert Ld in first.free_symbols
    assert middle.coeff(L) != 0
    assert Ld not in middle.free_symbols


def test_tied_table_is_on_both_ends_and_gradients_are_summed():
    D, V = cg.dims("D V")
    whole, s = cut(load("gpt2", symbolic=True, dtype="fp32"))
    assert sympy.expand(together(s.stages, cg.param_count) - cg.param_count(whole)) == D * V
    found = [[(m.collective, m.bytes, m.ranks) for m in cg.communication(g).filter(phase="backward")] for g in s.stages]
    added = ("all_reduce", 4 * D * V, 2)
    assert [rows.count(added) for rows in found] == [1, 0, 1]
    assert sympy.expand(together(s.stages, cg.matmul_flops) - cg.matmul_flops(whole)) == 0


@pytest.mark.parametrize(
    "split",
    [{"zero": 1, "system": "megatron"}, {"zero": 2, "reduce_every_microbatch": False}],
    ids=["megatron", "torch"],
)
def test_sharded_tied_gradients_are_summed_shard_by_shard(split):
    """Megatron's gradient buffers persist between steps and are zeroed after the updates that read them."""
    D, V = cg.dims("D V")
    step = cg.training_step(tied(), optimizer=cg.SGD(), precision="megatron-bf16", accumulate=3)
    for g in cg.parallelize(step, pp=2, micro_batches=3, dp=7, **split).stages:
        sent = [(m.collective, m.bytes, m.ranks) for m in cg.communication(g) if m.axis == "pp"]
        assert sent.count(("all_reduce", 4 * D * V / 7, 2)) == 1
        (op,) = (op for op in g.ops if op.name.endswith(".all_reduce") and op.kind.axis == "pp")
        (part,) = op.operands
        assert part.producer.name == "table.grad.reduce_scatter"
        assert [o.phase for o in g.successors(op.results[0])] == [
            "optimizer"
        ] * 2  # the update, and the op that zeroes the buffer


def test_stages_combine_with_parallelism_degrees():
    N = cg.dims("N")
    whole, s = cut(llama(), dp=N)
    for g in s.stages:
        assert g.sharding.mesh["dp"].expr == N
    assert sympy.expand(together(s.stages, cg.matmul_flops) * N - cg.matmul_flops(whole)) == 0


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("llama-2-13b", {"cp": 2, "sequence": True}),  # the first reader of the received gradient gathers it along tp
        ("gpt2", {"reduce_every_microbatch": False}),  # a bias gradient is a partial sum of the received gradient
    ],
)
def test_received_gradients_are_placed_like_those_of_the_whole_model(name, split):
    def sent(graph):
        return sum(m.times * m.bytes for m in cg.communication(graph, **sizes).filter(axis="tp"))

    sizes = {"B": 4, "S": 64, "D": 64, "F": 128, "H": 4, "V": 256, "L": 4}
    step = training_step(
        load(name, symbolic=True), precision="megatron-bf16", accumulate=2, checkpoint=cg.every_block()
    )
    whole, stages = (
        cg.parallelize(step, **split, **pipeline, dp=2, tp=2, strict=True)
        for pipeline in ({}, {"pp": 2, "micro_batches": 2})
    )
    assert sum(map(sent, stages.stages)) == sent(whole)


def test_depth_not_divisible_by_stages_is_refused_at_binding():
    _, s = cut(llama(), 3, 3)
    with pytest.raises(cg.BindingError):
        cg.flops(s.stages[1], **{name: n for name, n in SIZES.items() if name != "V"})


def test_graphs_that_cannot_be_staged_are_refused():
    whole = training_step(llama(), optimizer=SGD, accumulate=4)
    with pytest.raises(cg.GraphError, match=r"micro_batches is 2, but graph 'llama' has 4; expected a step"):
        cg.parallelize(whole, pp=2, micro_batches=2)
    with pytest.raises(cg.GraphError, match="parallelize: schedule 'zbw', expected one of gpipe, 1f1b"):
        cg.parallelize(whole, pp=2, micro_batches=4, schedule="zbw")
    with pytest.raises(cg.BindingError, match="schedule '1f1b': virtual stages per rank beyond 1"):
        cg.parallelize(whole, pp=2, micro_batches=4, virtual_stages=2)
    with pytest.raises(cg.UnsupportedError, match="micro_batches is 4 with one pipeline stage, expected 1"):
        cg.parallelize(whole, micro_batches=4)
    with cg.Graph("flat") as flat:
        flat.output(cg.linear(flat.input("x", cg.dims("B D")), "b d -> b e", e=3))
    with pytest.raises(
        cg.UnsupportedError, match="graph 'flat' has 0 loops with carries; expected loops over layers, each"
    ):
        cg.parallelize(flat, pp=2)
    with pytest.raises(cg.UnsupportedError, match="the number of layers is L \\+ 2, expected a single symbol"):
        cg.parallelize(cg.training_step(two_kinds()), pp=2)
    with pytest.raises(cg.UnsupportedError, match="the number of layers is 4, expected a single symbol"):
        cg.parallelize(cg.training_step(llama(4)), pp=2)


def test_stage_sends_follow_schedule():
    _, s = cut(llama(), 4)
    B, S, D = cg.dims("B S D")
    for g, rank in zip(s.stages, (0, 1, 3), strict=True):
        rows = [m for m in cg.communication(g) if m.collective == "send"]
        assert sum(m.times for m in rows) == cg.plan.sends("1f1b", 4, M, 1, rank)
        assert {(m.axis, m.bytes) for m in rows} == {("pp", 4 * B * S * D)}
    assert 4 * SIZES["B"] * SIZES["S"] * SIZES["D"] == 32_768  # bytes sent by gloo


def test_whole_pipeline_answers_are_maxima_over_stages():
    _, s = cut(llama(), 4)
    sizes = {**SIZES, "M": 8}
    own = [{k: n for k, n in sizes.items() if k != "V" or g is not s.stages[1]} for g in s.stages]
    for ask in (cg.flops, cg.peak_memory):
        assert ask(s, **sizes) == max(ask(g, **kept) for g, kept in zip(s.stages, own, strict=True))
        assert cg.evaluate(ask(s), **sizes) == ask(s, **sizes)
        assert type(ask(s, **sizes)) is int
    with pytest.raises(cg.BindingError, match=r"'Q' is not a dimension of graph 'llama\.first'"):
        cg.flops(s, Q=1)


def played(s, schedule, m, sizes):
    """Return the makespan of a simulated pipeline, with stage times summed from their rows."""
    own = [{k: n for k, n in sizes.items() if k != "V" or "middle" not in g.name} for g in s.stages]
    ranks = [0, 1, 1, 2]
    times, sends, once = [], [], []
    for g, kept in zip(s.stages, own, strict=True):
        rows = cg.roofline(g, "h100-sxm", **kept).rows
        passes = [sum(r.seconds for r in rows if (r.phase == "forward") == way and r.phase != "optimizer") / m
                  for way in (True, False)]  # fmt: skip
        times.append(passes)
        once.append(sum(r.seconds for r in rows if r.phase == "optimizer"))
        sends += [r.seconds / r.times for r in cg.communication(g, hardware="h100-sxm", **kept).rows]
    forward, backward = ([times[r][way] for r in ranks] for way in (0, 1))
    found = cg.plan.simulate(
        cg.plan.schedule(schedule, 4, m), forward=forward, backward_input=backward, backward_weight=0, send=max(sends)
    )
    return found.makespan + max(once)


@pytest.mark.parametrize("m", [1, 3, 4, 11])
@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 1), ("1f1b", 1.07)])
def test_step_time_matches_simulated_events(schedule, most, m):
    _, s = cut(llama(), 4, schedule=schedule)
    sizes = {**SIZES, "M": m, "S": 1021, "V": 32003}
    events, found = played(s, schedule, m, sizes), cg.seconds(s, "h100-sxm", **sizes)
    assert found == cg.roofline(s, "h100-sxm", **sizes).estimate
    assert (1 - 1e-12) * events <= found <= (most + 1e-12) * events
    left = {k: n for k, n in sizes.items() if k not in ("M", "B")}
    formula = cg.seconds(s, "h100-sxm", **left)
    if schedule == "1f1b" and m < 8:
        with pytest.raises(cg.BindingError, match="micro-batches beyond two per stage"):
            cg.evaluate(formula, M=m, B=2)
    else:
        assert float(cg.evaluate(formula, M=m, B=2)) == pytest.approx(found, rel=1e-12)
    least = [cg.seconds(g, "h100-sxm", "lower", **{k: n for k, n in sizes.items() if k in known_names(g)})
             for g in s.stages]  # fmt: skip
    assert cg.seconds(s, "h100-sxm", "lower", **sizes) == max(least) < found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_exactly_the_simulated_time(schedule):
    g = cg.parallelize(cut(llama(), 4)[0], pp=4, micro_batches=M, schedule=schedule).stages[1]
    # fewer micro-batches than stages, as many, one more, and enough to fill the pipeline
    for p, m in ((2, 1), (2, 3), (2, 8), (3, 2), (3, 3), (5, 1), (5, 6), (5, 17)):
        g.cache.clear()
        g.waiting = replace(g.waiting, stages=poly(p), alike=poly(p), ranks=((poly(0), poly(p - 1)),))
        asked = on_device(g, "h100-sxm", None, {**{k: SIZES[k] for k in "BSDFHKL"}, "M": m}, "seconds")
        send = Fraction(exchange(next(op for op in g.walk() if op.kind.name == "send"), g, asked.values,
                                 asked.hardware)[0].constant)  # fmt: skip
        for forward, backward in ((2, 3), (send / 7, send / 5)):
            cost = {"forward": forward * m, "backward": backward * m, "optimizer": 17}
            found = of_pipeline([asked], lambda part, cost=cost: poly(cost[part.works[0].op.phase]))
            events = cg.plan.simulate(
                cg.plan.schedule(schedule, p, m), forward=forward, backward_input=backward, backward_weight=0, send=send
            )
            assert found.constant == events.makespan + 17


@pytest.mark.parametrize(("schedule", "overlap"), list(product(["gpipe", "1f1b"], ["streams", "ideal"])))
def test_overlapped_collectives_take_simulated_time_of_shorter_passes(schedule, overlap):
    """Each device has its own streams; time exposed on them is spread over its passes."""
    _, s = cut(llama(), 4, schedule=schedule, dp=2)
    sizes = {**SIZES, "M": 8, "S": 1021, "V": 32003}
    found, whole = cg.seconds(s, "h100-sxm", overlap=overlap, **sizes), cg.seconds(s, "h100-sxm", **sizes)
    assert found == cg.roofline(s, "h100-sxm", overlap=overlap, **sizes).estimate < whole
    forward, backward, once, factors = [], [], [], []
    for g in s.stages:
        own = {name: n for name, n in sizes.items() if name in known_names(g)}
        asked = on_device(g, "h100-sxm", None, own, "seconds")
        shares = shares_of(asked, lambda part: estimate([spent(w, part) for w in part.works], NOTHING_KNOWN), poly(8))
        alone = cg.seconds(g, "h100-sxm", **own)
        assert sum(float(n.constant) * k for n, k in zip(shares, (8, 8, 8, 1), strict=True)) == pytest.approx(alone)
        factor = cg.seconds(g, "h100-sxm", overlap=overlap, **own) / alone
        for times, share in ((forward, shares[0]), (backward, shares[1] + shares[2]), (once, shares[3])):
            times.append(float(share.constant) * factor)
        factors.append(factor)
    assert min(factors) < 0.999
    ranks, lists = [0, 1, 1, 2], cg.plan.schedule(schedule, 4, 8)
    times = {"forward": [forward[r] for r in ranks], "backward_input": [backward[r] for r in ranks]}
    events = cg.plan.simulate(lists, **times, backward_weight=0).makespan + max(once)
    sends = [r.seconds / r.times for g in s.stages for r in cg.communication(
        g, hardware="h100-sxm", **{name: n for name, n in sizes.items() if name in known_names(g)}
    ).rows if r.collective == "send"]  # fmt: skip
    waits = 2 * 3 if schedule == "gpipe" else 2 * (11 - 3)
    # a single stage also overlaps its sends, but a pipeline waits for them
    assert events + waits * max(sends) <= found == pytest.approx(events + waits * max(sends), rel=1e-3)


def test_unknown_stage_times_are_refused():
    _, s = cut(llama(), 4)
    with pytest.raises(cg.BindingError, match=r"overlap 'ideal' in a pipeline of graph 'llama\.first': .* unbound: M"):
        cg.seconds(s, "h100-sxm", overlap="ideal", **SIZES)
    with pytest.raises(cg.BindingError, match=r"still unbound: M"):
        cg.seconds(s, "h100-sxm", "calibrated", **SIZES)


def test_one_stage_costs_the_same_as_the_whole_step():
    whole = training_step(llama(), optimizer=SGD)
    assert cg.seconds(cg.parallelize(whole, pp=1), "h100-sxm", **SIZES) == cg.seconds(whole, "h100-sxm", **SIZES)


def test_tied_table_reduction_uses_links_between_end_stages():
    _, s = cut(load("gpt2"), 4, 8, dp=2)
    rows = cg.communication(s.stages[0], hardware="h100-sxm", B=2, S=64).rows
    (added,) = [r for r in rows if r.axis == "pp" and r.collective == "all_reduce"]
    h100 = cg.load_hardware("h100-sxm")
    assert added.link == "interconnect"
    assert added.seconds >= added.bytes / float(h100.link("interconnect").value)


def test_run_counts_all_pipeline_devices():
    whole, s = cut(llama(), 4, dp=2)
    sizes = {**SIZES, "B": 6, "M": 8}
    figures = cg.plan.run(s, "h100-sxm", 10**6, **sizes)
    assert (figures.devices, figures.step_tokens) == (8, 8 * 6 * SIZES["S"])
    assert figures.seconds == cg.seconds(s, "h100-sxm", **sizes)
    rate = float(cg.load_hardware("h100-sxm").rate("fp32").value)
    assert figures.mfu == pytest.approx(cg.model_flops(whole, **sizes) / 8 / figures.seconds / rate)
    with pytest.raises(cg.GraphError, match="run: graph 'llama' already has pipeline stages; expected no bubble"):
        cg.plan.run(s, "h100-sxm", 10**6, schedule="1f1b", pp=4, micro_batches=8, **sizes)
