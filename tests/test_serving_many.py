"""Serving on several devices: degree 1 equals one device, data-parallel replicas are independent, times match hand
counts.
"""

import math
from fractions import Fraction

import pytest
from each import each
from shared import load

import costgraph as cg

LLAMA = load("llama-3-70b")
PREFILL, DECODE = cg.prefill(LLAMA, logits="last"), cg.decode(LLAMA)
# 2 bytes for key and value per position, 8 heads of 128, 80 layers
CACHE = 2 * 2 * 8 * 128 * 80
H200 = cg.load_hardware("h200-sxm")


# -- degree 1 and independent replicas -------------------------------------------------------------------------------


def test_degree_one_equals_single_device():
    for whole in (PREFILL, DECODE):
        alone = cg.parallelize(whole, dp=1, tp=1)
        ours, theirs = (cg.plan.throughput(g, H200, "B", [1, 7], S=1021) for g in (alone, whole))
        assert ours.rows == theirs.rows
        assert ours.rows[0].tokens_per_device == ours.rows[0].tokens_per_second
    sizes = {"prompt": 1021, "steps": 31, "B": 5}
    alone = cg.plan.latency(*(cg.parallelize(g, tp=1) for g in (PREFILL, DECODE)), H200, **sizes)
    assert alone == cg.plan.latency(PREFILL, DECODE, H200, **sizes)


def test_replicas_multiply_served_sequences():
    one, three = cg.parallelize(DECODE, tp=4), cg.parallelize(DECODE, dp=3, tp=4)
    ours = cg.plan.throughput(three, H200, "B", [3, 21], S=1021).rows
    theirs = cg.plan.throughput(one, H200, "B", [1, 7], S=1021).rows
    assert [(r.devices, r.tokens, r.size) for r in ours] == [(12, 3, 3), (12, 21, 21)]
    for r, alike in zip(ours, theirs, strict=True):
        assert (r.seconds, r.memory, r.tokens) == (alike.seconds, alike.memory, 3 * alike.tokens)
        assert r.tokens_per_device == pytest.approx(alike.tokens_per_device)


def test_batch_sizes_are_divisible_by_mesh():
    table = cg.plan.throughput(cg.parallelize(DECODE, dp=3, tp=4), H200, "B", S=8191)
    most = cg.largest(cg.parallelize(DECODE, tp=4), "B", hardware=H200, S=8191)
    assert [r.size for r in table.rows] == [3, 6, 12, 24, 48, 96, 192, 384, 3 * most]
    assert "per device" in str(table)
    assert all(r.fits for r in table.rows)


# -- by hand ---------------------------------------------------------------------------------------------------------


def all_reduce(ranks, size, device):
    """Return the all-reduce time within one domain: a ring, or two trees."""
    link = device.tables["interconnect"]
    late, rate = Fraction(link["latency"].value), device.link("interconnect").value
    ring = 2 * (ranks - 1) * (late + Fraction(size, ranks) / rate)
    return min(ring, 2 * (math.ceil(math.log2(ranks)) * late + Fraction(size, rate)))


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_step_time_is_memory_share_plus_all_reduces(tp):
    batch, context = 7, 4093
    rank = cg.parallelize(DECODE, tp=tp)
    row = cg.plan.throughput(rank, H200, "B", [batch], S=context).rows[0]
    # 80 layers' matrices, the head, and the cache, sharded over ranks; the table is read only by row
    width, keys, inner, words = 8192, 8 * 128, 28672, 128256
    matrices = 80 * (2 * width * width + 2 * width * keys + 3 * width * inner) + words * width
    read = Fraction(2 * matrices + CACHE * batch * context, tp) / H200.bandwidth.value
    # two reductions per layer and one for the embedding, each as wide as a token
    sums = (2 * 80 + 1) * all_reduce(tp, 2 * width * batch, H200)
    assert float(read + sums) < row.seconds < 1.02 * float(read + sums)
    # weights sharded over ranks except norm gains, and the cache
    weights = Fraction(2 * (matrices + words * width), tp) + 2 * 161 * width
    assert row.memory == pytest.approx(float(weights + Fraction(CACHE * batch * context, tp)), rel=1e-3)
    assert cg.cache_bytes(rank, B=batch, S=context) == CACHE * batch * context // tp
    most = cg.largest(rank, "B", hardware=H200, S=context)
    fit = (H200.capacity().value - weights) / Fraction(CACHE * context, tp)
    assert math.floor(fit) - 2 <= most <= fit


def test_eight_devices_cut_first_token_time_to_an_eighth():
    ranks = [cg.parallelize(g, tp=8) for g in (PREFILL, DECODE)]
    latency = cg.plan.latency(*ranks, H200, prompt=2039, steps=31, B=1)
    # 2 FLOPs per multiplying weight, and reductions over all positions
    products = 2 * (70553706496 - 2 * 128256 * 8192) * 2039 / 8 / H200.peak["bf16"].value
    sums = 161 * float(all_reduce(8, 2 * 8192 * 2039, H200))
    assert products + sums < latency.first_token < 1.35 * (products + sums)
    alone = cg.plan.latency(PREFILL, DECODE, H200, prompt=2039, steps=31, B=1)
    assert 8 / 2 < alone.next_token / latency.next_token < 8


def test_network_is_slower_than_domain():
    ranks = [cg.parallelize(g, tp=16) for g in (PREFILL, DECODE)]
    sizes = {"prompt": 1021, "steps": 3, "B": 1}
    inside = cg.plan.latency(*ranks, "gb200", **sizes)  # 72 of them are one domain
    outside = cg.plan.latency(*ranks, "h200-sxm", network="meta-24k", **sizes)
    assert inside.next_token < outside.next_token
    estimate = cg.seconds(ranks[0], "h200-sxm", network="meta-24k", hierarchical=False, S=1021, B=1)
    assert outside.first_token == pytest.approx(estimate, rel=1e-12)
    row = cg.plan.throughput(ranks[1], "h200-sxm", "B", [1], network="meta-24k", S=1022).rows[0]
    assert row.seconds == outside.next_token


def test_expert_parallel_serving():
    step = cg.decode(load("mixtral-8x7b"))
    found = cg.plan.throughput(cg.parallelize(step, ep=8), H200, "B", [64], S=1021).rows[0]
    assert (found.devices, found.tokens) == (8, 64)
    sent = cg.communication(cg.parallelize(step, ep=8), hardware=H200, B=64, S=1021)
    assert {m.collective for m in sent} >= {"all_to_all"}
    assert found.seconds > sum(m.seconds for m in sent)


# -- two meshes ------------------------------------------------------------------------------------------------------


def test_disaggregated_serving_adds_cache_transfer():
    ranks = [cg.parallelize(g, tp=4) for g in (PREFILL, DECODE)]
    serving = cg.plan.disaggregated(*ranks, H200, prompt=2039, steps=31, sequences=(3, 3))
    alike = cg.plan.latency(*ranks, H200, prompt=2039, steps=31, B=3)
    assert (serving.first_token, serving.next_token) == (alike.first_token, alike.next_token)
    assert serving.last_token == alike.last_token
    # each rank holds two key-value heads of three sequences
    assert serving.sent == 3 * CACHE * 2039 // 4
    # four and four fit into a domain of eight
    link = H200.tables["interconnect"]
    assert serving.link == "interconnect"
    assert serving.transfer == pytest.approx(link["latency"].value + serving.sent / H200.link("interconnect").value)
    assert serving.total == pytest.approx(alike.total + serving.transfer)
    # prefill over all meshes is as fast as decode
    assert serving.prefilled == pytest.approx(3 / alike.first_token)
    assert serving.decoded == pytest.approx(3 / (alike.total - alike.first_token))
    assert serving.meshes * serving.prefilled == pytest.approx(serving.decoded)
    assert serving.devices == pytest.approx(serving.meshes)
    assert serving.tokens_per_device == pytest.approx(32 * serving.decoded / (4 * serving.meshes + 4))
    assert serving.prefill_memory == cg.peak_memory(ranks[0], B=3, S=2039)
    assert serving.decode_memory == cg.peak_memory(ranks[1], B=3, S=2039 + 31)
    assert serving.fits


def test_received_cache_matches_rank_share():
    first = cg.parallelize(PREFILL, tp=8)
    for copies, many, most in ((1, 1, 1), (5, 1, 1), (5, 5, 1), (5, 7, 2)):
        step = cg.parallelize(DECODE, dp=copies, tp=2)
        serving = cg.plan.disaggregated(first, step, "b200", prompt=1021, steps=3, sequences=(many, 5 * 13))
        # a rank gets half of the cache of the sequences for one replica; a rank of the other mesh holds an eighth of
        # all
        assert serving.sent == max(Fraction(many, 8), Fraction(most, 2)) * CACHE * 1021
        assert (serving.prefill_devices, serving.decode_devices) == (8, 2 * copies)
        assert serving.link == "network"
        card = cg.load_hardware("b200")
        took = card.tables["network"]["latency"].value + serving.sent / card.link("network").value
        assert serving.transfer == pytest.approx(took)


def test_slow_network_limits_prefill_rate(tmp_path):
    ranks = [cg.parallelize(g, tp=8) for g in (PREFILL, DECODE)]
    sizes = {"prompt": 2039, "steps": 31, "sequences": (1, 8)}
    fast = cg.plan.disaggregated(*ranks, H200, **sizes)
    file = tmp_path / "slow.toml"
    file.write_text(
        'name = "slow"\ntopology = "one switch"\n[sources]\na = "made up"\n[levels.switch]\n'
        'devices = { value = 16, unit = "1", source = ["a"] }\n'
        'per_direction = { value = 1e6, unit = "B/s", source = ["a"] }\n'
    )
    slow = cg.plan.disaggregated(*ranks, H200, network=str(file), **sizes)
    assert slow.link == "switch"
    assert slow.transfer == pytest.approx(slow.sent / 1e6, rel=1e-3)
    assert slow.prefilled == pytest.approx(1 / slow.transfer)
    assert (fast.prefilled, fast.decoded) == (pytest.approx(1 / fast.first_token), slow.decoded)
    more = cg.parallelize(DECODE, dp=2, tp=8)
    with pytest.raises(cg.SpecError, match="24 devices, but the switch joins at most 16"):
        cg.plan.disaggregated(ranks[0], more, H200, network=str(file), **sizes)


@each(
    ("named", "text"),
    [
        ({"sequences": (0, 8)}, "disaggregated: sequences[0]=0"),
        ({"steps": 0}, "disaggregated: steps=0"),
        ({"Z": 3}, "disaggregated: Z is not a dimension of either graph"),
        ({"B": 3}, "disaggregated: 'B', expected an unbound dimension"),
        ({"batch": "Q"}, "disaggregated: 'Q', expected an unbound dimension"),
        ({"batch": "S"}, "disaggregated"),
        ({"time": "best"}, "disaggregated: time 'best', expected one of estimate, lower_bound"),
        ({"network": "none"}, "none"),
    ],
)  # fmt: skip
def test_invalid_serving_arguments_are_refused(named, text):
    with pytest.raises(cg.CostGraphError) as refused:
        cg.plan.disaggregated(PREFILL, DECODE, H200, **{"prompt": 13, "steps": 3, "sequences": (1, 8), **named})
    assert text in str(refused.value)


def test_swapped_prefill_and_decode_are_refused():
    with pytest.raises(cg.GraphError, match="has 1 tokens, expected 13 for each of 1 sequences"):
        cg.plan.disaggregated(DECODE, PREFILL, H200, prompt=13, steps=3, sequences=(1, 8))
