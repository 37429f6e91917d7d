"""Stages of a pipeline: what they do together, what each holds, and what it sends."""

import pytest
import sympy

import costgraph as cg
from costgraph import models
from costgraph.graph.graph import current_graph

P, M = cg.dims("P M")
SIZES = {"B": 2, "S": 64, "D": 64, "F": 128, "H": 4, "K": 16, "V": 256, "L": 16}
#: Most bytes at once above what is there between steps, of ranks 0, 1 and 3: 1F1B of four gloo processes, torch 2.13.0
#: on a CPU, fp32, by micro-batches. torch keeps what the first rank has sent: B*S*D*4 bytes of each one that waits.
MEASURED = {4: (9_781_248, 7_936_000, 3_586_836), 8: (10_504_192, 7_968_768, 3_586_852)}


def norm(x, name):
    """As torch has it on a CPU: an op each."""
    scale = cg.ops.pointwise("rsqrt", cg.reduce(x * x, "b s d -> b s 1", "mean") + 1e-5)
    return x * scale * current_graph().param(name, (x.shape[-1],))


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


def cut(graph, pp=P, m=M, optimizer=None, **degrees):
    whole = cg.training_step(graph, optimizer=optimizer or cg.SGD(), accumulate=m)
    return whole, cg.parallelize(whole, pp=pp, micro_batches=m, **degrees)


def together(stages, ask):
    """Add up an answer of all stages, P of them."""
    first, middle, last = map(ask, stages)
    return first + (P - 2) * middle + last


@pytest.mark.parametrize("optimizer", [cg.SGD(), cg.AdamW()], ids=["sgd", "adamw"])
def test_stages_do_together_what_the_step_does(optimizer):
    whole, s = cut(llama(), optimizer=optimizer)
    for ask in (cg.flops, cg.param_count, cg.param_bytes):
        assert sympy.expand(together(s.stages, ask) - ask(whole)) == 0, ask
    assert [len(g.outputs) for g in s.stages] == [0, 0, 1]


def test_tables_of_both_ends_are_on_both_and_their_gradients_are_added_up():
    D, V = cg.dims("D V")
    whole, s = cut(models.load("gpt2", symbolic=True, dtype="fp32"))
    assert sympy.expand(together(s.stages, cg.param_count) - cg.param_count(whole)) == D * V
    found = [[(m.collective, m.bytes, m.ranks) for m in cg.communication(g).filter(phase="backward")] for g in s.stages]
    added = ("all_reduce", 4 * D * V, 2)
    assert [rows.count(added) for rows in found] == [1, 0, 1]
    assert sympy.expand(together(s.stages, cg.matmul_flops) - cg.matmul_flops(whole)) == 0


@pytest.mark.parametrize("m", MEASURED)
def test_peaks_are_those_of_real_processes(m):
    _, s = cut(llama(), 4)
    for g, measured, least in zip(s.stages, MEASURED[m], (0.987, 0.995, 0.99999), strict=True):
        sizes = {name: n for name, n in {**SIZES, "M": m}.items() if name != "V" or g is not s.stages[1]}
        line = cg.timeline(g, **sizes)
        there = sum(n for role, n in line.by_role.items() if role in ("param", "input"))
        assert line.peak == cg.peak_memory(g, **sizes)
        assert least <= (line.peak - there) / measured <= 1


def test_degrees_go_with_stages():
    N = cg.dims("N")
    whole, s = cut(llama(), dp=N)
    for g in s.stages:
        assert g.sharding.mesh["dp"].expr == N
    assert sympy.expand(together(s.stages, cg.matmul_flops) * N - cg.matmul_flops(whole)) == 0


def test_numbers_of_layers_that_stages_do_not_divide_are_refused_where_they_are_bound():
    _, s = cut(llama(), 3, 3)
    with pytest.raises(cg.BindingError):
        cg.flops(s.stages[1], **{name: n for name, n in SIZES.items() if name != "V"})


def test_what_is_not_cut_is_refused():
    whole = cg.training_step(llama(), optimizer=cg.SGD(), accumulate=4)
    with pytest.raises(cg.GraphError, match=r"2 micro_batches of graph 'llama', which has 4, expected as many"):
        cg.parallelize(whole, pp=2, micro_batches=2)
    with pytest.raises(cg.GraphError, match="parallelize: schedule 'zbv', expected"):
        cg.parallelize(whole, pp=2, micro_batches=4, schedule="zbv")
    with pytest.raises(cg.UnsupportedError, match="parallelize: virtual is 2, expected 1: stages of one chunk"):
        cg.parallelize(whole, pp=2, micro_batches=4, virtual=2)
    with pytest.raises(cg.UnsupportedError, match="4 micro_batches of one stage, expected training_step"):
        cg.parallelize(whole, micro_batches=4)
    with pytest.raises(cg.UnsupportedError, match="which has 1 loops with carries, expected a step of training"):
        cg.parallelize(llama(), pp=2)
    clipped = cg.training_step(llama(), accumulate=4, clip=1.0)
    with pytest.raises(cg.UnsupportedError, match="of different stages together, expected updates of each parameter"):
        cg.parallelize(clipped, pp=2, micro_batches=4)
    with pytest.raises(cg.UnsupportedError, match="pp of 4 layers, expected a number of layers that is one symbol"):
        cg.parallelize(cg.training_step(llama(4)), pp=2)


def test_stages_send_what_the_schedule_says():
    _, s = cut(llama(), 4)
    B, S, D = cg.dims("B S D")
    for g, rank in zip(s.stages, (0, 1, 3), strict=True):
        rows = [m for m in cg.communication(g) if m.collective == "send"]
        assert sum(m.times for m in rows) == cg.plan.sends("1f1b", 4, M, 1, rank)
        assert {(m.axis, m.bytes) for m in rows} == {("pp", 4 * B * S * D)}
    assert 4 * SIZES["B"] * SIZES["S"] * SIZES["D"] == 32_768  # what gloo has sent


def test_questions_of_the_whole_are_those_of_the_largest_stage():
    _, s = cut(llama(), 4)
    sizes = {**SIZES, "M": 8}
    own = [{k: n for k, n in sizes.items() if k != "V" or g is not s.stages[1]} for g in s.stages]
    for ask in (cg.flops, cg.peak_memory):
        assert ask(s, **sizes) == max(ask(g, **kept) for g, kept in zip(s.stages, own, strict=True))
        assert cg.evaluate(ask(s), **sizes) == ask(s, **sizes)
    with pytest.raises(cg.BindingError, match=r"'Q' is no dimension of graph 'llama\.first'"):
        cg.flops(s, Q=1)
