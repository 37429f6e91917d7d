"""Pipeline-parallel inference: values equal the whole model's, per-rank caches, and times against simulated batches."""

import numpy as np
import pytest
import sympy
from shared import load

import costgraph as cg
from costgraph import testing
from costgraph.algebra.polynomial import poly
from costgraph.analysis.collective_time import exchange
from costgraph.analysis.step_time import (
    of_pipeline,
    stages_asked,
)
from costgraph.ir.graph import known_names
from costgraph.ops.collectives import (
    Receive,
    Send,
)
from costgraph.testing.interpreter import whole

P, M = cg.dims("P M")
SMALL = {"B": 2, "S": 3, "D": 8, "H": 4, "G": 2, "K": 2, "F": 6, "L": 6, "V": 7}
MODELS = {
    "llama-2-13b": {},
    "gpt2": {"P": 5},  # one table for both ends
    "deepseek-v3": {  # 1 of 6 layers is dense, at the start; every token chooses all experts
        "Fe": 6, "E": 4, "k": 4, "Eg": 2, "kg": 2, "Es": 1, "Ld": 1, "C": 4, "Cq": 4, "Kn": 2, "Kr": 2, "Kv": 2,
    },
}  # fmt: skip


def own(graph, sizes):
    return {name: n for name, n in sizes.items() if name in known_names(graph)}


def composed(stages, given, sizes):
    """Run the stages in sequence; each receives the previous stage's output."""
    sent, runs = [], []

    def send(at):
        sent.append(np.array(at.operands[0].array))
        return at.operands[0].array

    meanings = {**testing.REFERENCE_SEMANTICS, Send: whole(send), Receive: whole(lambda at: sent.pop())}
    for g in stages:
        names = {t.name for body in g.bodies() for t in body.tensors if t.producer is None and t.role != "formal"}
        mine = {name: a for name, a in given.items() if name in names}
        runs.append(testing.run(g, mine, meanings=meanings, **own(g, sizes)))
        assert len(sent) == (g is not stages[-1])
    return runs


@pytest.mark.parametrize(("transform", "name"), [
    (cg.prefill, "gpt2"), (cg.decode, "llama-2-13b"),
    *(pytest.param(*which, marks=pytest.mark.long) for which in [
        (cg.prefill, "llama-2-13b"), (cg.prefill, "deepseek-v3"), (cg.decode, "gpt2"), (cg.decode, "deepseek-v3"),
    ]),
])  # fmt: skip
def test_stages_compute_logits_and_caches_of_whole_model(transform, name):
    graph = transform(load(name, symbolic=True, dtype="fp32"))
    sizes = own(graph, {**SMALL, **MODELS[name]})
    s = cg.parallelize(graph, pp=3)
    random, point = np.random.default_rng(0), {n: poly(k) for n, k in sizes.items()}
    given = {}  # the same for all layers, by input name
    for body in graph.bodies():
        for t in body.tensors:
            if t.producer is None and t.role in ("param", "input", "cache", "buffer"):
                shape = [int(n.bind(point).constant) for n in t.sizes]
                high = sizes["V"] if t.dtype.kind == "int" else 0
                given[t.name] = random.integers(0, high, shape) if high else random.uniform(0.1, 0.5, shape)
    expected = testing.run(graph, given, **sizes)
    first, middle, last = s.stages
    runs = composed([first, middle, last], given, sizes)
    np.testing.assert_allclose(runs[-1].outputs[0], expected.outputs[0], rtol=1e-9)
    kept = [[b for b in run.buffers if "cache" in b.name or ".kept" in b.name] for run in (expected, *runs)]
    assert len(kept[0]) == sum(map(len, kept[1:])) > 0
    for before, after in zip(kept[0], [b for each in kept[1:] for b in each], strict=True):
        assert before.name.partition("[")[0] == after.name.partition("[")[0]
        np.testing.assert_allclose(after.array, before.array, rtol=1e-9, err_msg=after.name)


@pytest.mark.parametrize("transform", [cg.prefill, cg.decode])
def test_stage_work_weights_and_caches_add_up(transform):
    graph = transform(load("llama-2-13b", symbolic=True))
    first, middle, last = cg.parallelize(graph, pp=P).stages
    for ask in (cg.matmul_flops, cg.param_count, cg.cache_bytes):
        assert sympy.expand(ask(first) + (P - 2) * ask(middle) + ask(last) - ask(graph)) == 0, ask
    # a layer sends B sequences of D 2-byte elements per position of the pass
    B, S, D = cg.dims("B S D")
    (row,) = cg.communication(first)
    assert (row.collective, row.bytes) == ("send", 2 * B * D * (S if transform is cg.prefill else 1))


def test_each_in_flight_batch_has_its_own_cache():
    graph = cg.decode(load("llama-3-70b"))
    sizes = {"B": 8, "S": 4096}
    one, four = (cg.parallelize(graph, pp=4, micro_batches=m) for m in (1, 4))
    # 20 of 80 layers; per position keys and values in 8 heads of 128 2-byte elements
    kept = 20 * 8 * 4096 * 2 * 8 * 128 * 2
    for before, after in zip(one.stages, four.stages, strict=True):
        assert cg.cache_bytes(before, **sizes) == cg.cache_bytes(after, **sizes) == kept
        assert cg.peak_memory(after, **sizes) - cg.peak_memory(before, **sizes) == 3 * kept
    assert cg.peak_memory(four, **sizes) == max(cg.peak_memory(g, **sizes) for g in four.stages)


def test_dp_and_tp_shard_caches_of_every_stage():
    graph = cg.decode(load("llama-3-70b"))
    rank = cg.parallelize(graph, pp=4, dp=2, tp=8, strict=True)
    sizes = {"B": 8, "S": 4096}
    for g in rank.stages:
        assert cg.cache_bytes(g, **sizes) * 4 * 2 * 8 == cg.cache_bytes(graph, **sizes)


def simulated(times, send, m, steps):
    """Return the time when the last batch leaves the last stage, for m batches over repeated steps.

    A stage takes batches in order. Each batch must have left the previous stage; at the first stage, it must have left
    the last one.
    """
    free, back = [0] * len(times), [0] * m
    for _ in range(steps):
        for batch in range(m):
            at = back[batch]
            for i, time in enumerate(times):
                at = max(at + (send if i else 0), free[i]) + time
                free[i] = at
            back[batch] = at
    return max(back)


@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_step_times_match_simulated_batches(m):
    s = cg.parallelize(cg.decode(load("llama-3-70b")), pp=4, micro_batches=m)
    stages = stages_asked(s, "h100-sxm", None, {"B": 8, "S": 4096}, "test")
    (send,) = {exchange(op, g, a.values, a.hardware)[0] for a in stages for g in [a.graph] for op in g.ops if sends(op)}
    for times in ((5, 5, 5, 5), (7, 5, 5, 11), (13, 5, 5, 2)):
        taken = dict(zip([a.graph.name for a in stages], (times[0], times[1], times[3]), strict=True))
        found = of_pipeline(stages, lambda asked, taken=taken: poly(taken[asked.graph.name]))
        some, more = (simulated(times, send.constant, m, steps) for steps in (40, 90))
        assert found.constant == (more - some) / 50, times


def sends(op):
    return isinstance(op.kind, Send)


def test_training_options_are_refused_for_inference():
    graph = cg.decode(load("llama-3-8b"))
    for options in ({"schedule": "gpipe"}, {"virtual_stages": 2, "schedule": "interleaved"}):
        with pytest.raises(cg.UnsupportedError) as refused:
            cg.parallelize(graph, pp=4, micro_batches=4, **options)
        assert "has no backward pass; omit schedule= and virtual_stages=" in str(refused.value)
    with pytest.raises(cg.GraphError, match=r"has 2 micro-batches, expected as many sequences in each of 7"):
        cg.plan.disaggregated(
            cg.prefill(load("llama-3-8b")), cg.parallelize(graph, pp=4, micro_batches=2), "h100-sxm",
            prompt=512, steps=8, sequences=(1, 7),
        )  # fmt: skip
