"""Parallel inference steps: caches are sharded with the batch and with their heads."""

import pytest
import sympy
from each import each
from shared import load
from test_parallelize import DP, OTHERS, SIZES, TP

import costgraph as cg
from costgraph import testing
from costgraph.ops.kv_cache import append

#: Models without cached heads: latent vectors shared by all heads, and recurrent states without heads for tp; and
#: models with one weight for queries and fewer keys.
RECURRENT = ("mamba", "rwkv", "xlstm")
WHOLE = ("deepseek", "falcon", "mamba", "phi-3", "rwkv", "xlstm")


CP = sympy.Symbol("CP", positive=True, integer=True)
LONG = pytest.mark.long
FEW = ("deepseek-v2-lite", "falcon-7b", "gemma-2-27b", "mamba-1.4b", "t5-11b")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=LONG) for n in (*SIZES, *OTHERS)])
def test_caches_are_sharded_with_batch_and_heads(name, tmp_path):
    whole = cg.decode(load(name, symbolic=True))
    recurrent = name.startswith(RECURRENT)  # tp replicates their matmuls, which `strict` refuses
    rank = cg.parallelize(whole, dp=DP, tp=TP, strict=not recurrent)
    assert bool(rank.sharding.replicated) == recurrent
    cg.save(rank, tmp_path / "rank.json")
    assert cg.load(tmp_path / "rank.json").sharding == rank.sharding
    share = sympy.cancel(cg.cache_bytes(rank) / cg.cache_bytes(whole))
    assert share == (1 / DP if name.startswith(WHOLE) else 1 / (DP * TP))
    assert sympy.cancel(cg.matmul_flops(rank) * DP / cg.matmul_flops(whole)).subs(TP, 1) == 1


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x22b", *(pytest.param(n, marks=LONG) for n in SIZES)])
@pytest.mark.parametrize("transform", [cg.decode, cg.prefill])
def test_parallel_pass_computes_same_values_and_caches(name, transform):
    whole = transform(load(name, symbolic=True, dtype="fp32"))
    rank = cg.parallelize(whole, dp=2, tp=2, strict=not name.startswith(RECURRENT))
    assert rank.sharding.resharded == ()
    testing.check_sharded(whole, rank, **SIZES[name], B=2, S=3)


def test_decode_memory_of_one_rank():
    step = cg.decode(load("llama-3-70b"))
    rank = cg.parallelize(step, dp=2, tp=8)
    sizes = {"B": 32, "S": 8192}
    # keys and values of 80 layers, 8 heads of 128 elements of 2 bytes; a rank has one head and 16 sequences
    kept = 2 * 80 * 1 * 128 * 2 * 16 * 8192
    assert cg.cache_bytes(rank, **sizes) == kept
    # weights and caches of a rank are always live, and the logits for its vocabulary shard are small
    rest = cg.peak_memory(rank, **sizes) - cg.param_bytes(rank, **sizes) - kept
    assert 0 < rest < kept // 1000
    # norm gains are replicated: 2 per layer and the final one
    assert cg.param_count(rank) * 8 - cg.param_count(step) == 7 * (2 * 80 + 1) * 8192
    # two all-reduces per layer and token, one for the embedding table, and none for the cache
    sent = cg.communication(rank, **sizes)
    assert {(m.collective, m.axis) for m in sent} == {("all_reduce", "tp")}
    assert sum(m.times * m.bytes for m in sent) == (2 * 80 + 1) * 16 * 8192 * 2


#: Cases in the plain run: grouped heads and windows decode; latent vectors and windows prefill.
PARTS = {cg.decode: ("falcon-7b", "gemma-2-27b"), cg.prefill: ("deepseek-v2-lite", "gemma-2-27b")}


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        pytest.param(name, transform, marks=() if name in PARTS[transform] else LONG)
        for name in SIZES
        for transform in PARTS
        if name != "mamba-1.4b"
    ],
)
def test_context_parallel_cache_is_sharded(name, transform):
    whole = transform(load(name, symbolic=True, dtype="fp32"))
    rank = cg.parallelize(whole, cp=CP)
    assert sympy.cancel(cg.cache_bytes(rank) * CP / cg.cache_bytes(whole)) == 1
    # W = 2: windows gather whole tokens, and their last positions are on different ranks
    testing.check_sharded(whole, rank, **{**SIZES[name], "P": 7} if name == "gpt2" else SIZES[name], B=2, S=6, CP=2)


@pytest.mark.parametrize(
    ("context", "new"),
    [
        ("gather", 1), ("gather", 5), ("all_to_all", 2), ("ring", 5),
        *(pytest.param(*c, marks=LONG) for c in [
            ("gather", 2), ("all_to_all", 1), ("all_to_all", 5), ("ring", 1), ("ring", 2),
        ]),
    ],
)  # fmt: skip
def test_new_positions_are_cached_by_last_ranks(context, new):
    whole = cg.decode(load("llama-2-13b", symbolic=True, dtype="fp32"), new)
    rank = cg.parallelize(whole, cp=3, tp=2, context=context, strict=new == 1)
    testing.check_sharded(whole, rank, B=1, S=6, D=4, H=2, G=2, K=2, L=2, V=4, F=4)
    # Several new positions see different keys: all ranks gather them, but no cache from another layer.
    assert {m.collective for m in cg.communication(rank) if m.axis == "cp"} == (
        {"all_reduce"} if new == 1 else {"send" if context == "ring" else "all_gather"}
    )


@each("new", [1, 2, 5, 7])
def test_ranks_append_their_own_positions(new):
    with cg.Graph("g") as g:
        g.output(append(g.buffer("held", (6, 3)), g.input("x", (new, 3)), 0))
    rank = cg.shard(g, cg.mesh(cp=3), {"held": "(t cp) d"}, strict=True)
    testing.check_sharded(g, rank)
    # the last rank has the last two positions
    assert cg.bytes_moved(rank) == 2 * min(new, 2) * 3 * 4
    assert not cg.communication(rank)


def test_memory_and_traffic_of_context_parallel_rank():
    step = cg.decode(load("llama-3-70b"))
    rank = cg.parallelize(step, cp=4, tp=8, strict=True)
    sizes = {"B": 5, "S": 131072}
    # keys and values of 80 layers, one of 8 heads, 128 elements of 2 bytes: 32,768 positions
    assert cg.cache_bytes(rank, **sizes) == 2 * 80 * 128 * 2 * 5 * 32768
    sent = [m for m in cg.communication(rank, **sizes) if m.axis == "cp"]
    # for 8 of 64 heads the maximum score, the sum of exponentials and 128 value sums, in bf16 like the scores
    assert sorted(m.bytes for m in sent) == [5 * 8 * 2, 5 * 8 * 2, 5 * 8 * 128 * 2]
    assert {(m.collective, m.times) for m in sent} == {("all_reduce", 80)}
    alone = cg.parallelize(step, tp=8)
    best = [cg.plan.throughput(g, "h200-sxm", "B", S=131072).best.size for g in (alone, rank)]
    # the memory beside the weights fits almost four times as many sequences; their activations take some of it
    assert 4 * best[0] <= best[1] < 4 * (best[0] + 1)


def test_pipeline_stages_support_context_parallelism():
    whole = cg.decode(load("llama-3-8b"))
    rank = cg.parallelize(whole, cp=2, pp=4)
    assert {sympy.cancel(cg.cache_bytes(g) * 8 / cg.cache_bytes(whole)) for g in rank.stages} == {1}


def test_recurrent_state_has_no_positions_to_shard():
    with pytest.raises(
        cg.GraphError, match=r"tokens\(B, 1; int64\) of graph 'mamba-1.4b.decode' has a single position"
    ):
        cg.parallelize(cg.decode(load("mamba-1.4b")), cp=2)


@pytest.mark.parametrize("new", [1, 3])
def test_latency_follows_rank_with_most_positions(new):
    model, at = load("llama-3-8b"), {"B": 5}
    first, step = cg.parallelize(cg.prefill(model), cp=2), cg.parallelize(cg.decode(model, new), cp=4)
    latency = cg.plan.latency(first, step, "h200-sxm", prompt=1024, steps=7, **at)
    # After 1,024 positions, each cache has room for equal shares on 4 ranks.
    rooms = [-(-(1024 + new * (i + 1)) // 4) * 4 for i in range(7)]
    each = [cg.roofline(step, "h200-sxm", S=n, **at).estimate for n in rooms]
    assert latency.next_token == each[0]
    assert latency.total - latency.first_token == pytest.approx(sum(each), rel=1e-9)
    apart = cg.plan.disaggregated(first, step, "h200-sxm", prompt=1024, steps=7, sequences=(1, 5))
    assert apart.next_token == each[0]
