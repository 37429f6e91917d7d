"""Derived collectives against torch's DTensor, FSDP2 and ZeRO: to the byte, with a reason for each difference.

`sharded_oracles.json` has torch's collectives (see `sharded_oracles.py`); for an all-to-all, a rank's input.
"""

import json
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
from sharded_steps import Case, experts, gathered, parallel, step
from shared import load, training_step

import costgraph as cg

HERE = Path(__file__).parent
RECORD = json.loads((HERE / "sharded_oracles.json").read_text(encoding="utf-8"))
SIZES, L = RECORD["sizes"], RECORD["sizes"]["L"]
P = 4 * 229_952  # bytes in all parameters, in a layer, and in the rest
LAYER, REST = 4 * 41_088, 4 * 65_600
X, ROW = 4 * 2 * 32 * 64, 4 * 2 * 32  # an activation between layers (B, S, D), a number per position (B, S)


def torch_calls(name):
    """Return the number of torch's collectives by phase, kind, ranks and bytes."""
    rows = RECORD["programs"][name]["collectives"]
    return Counter({(r["phase"], r["collective"], r["ranks"], r["bytes"]): r["times"] for r in rows})


def calls(case):
    """Return the same for the derived collectives."""
    counts = Counter()
    for m in cg.communication(case.sharded, **case.sizes):
        counts[m.phase, m.collective, m.ranks, m.bytes] += m.times
    return counts


def ring_bytes(found, *key):
    """Return the bytes that a rank sends in ring algorithms in all calls of a phase and kind, over a group size."""
    sent = Fraction()
    for (phase, collective, ranks, size), times in found.items():
        if (phase, collective, ranks)[: len(key)] == key:
            sent += Fraction(ranks - 1, ranks) * (2 if collective == "all_reduce" else 1) * size * times
    return sent


def call_count(found, *key):
    return sum(n for row, n in found.items() if row[: len(key)] == key)


@cache
def case(dp=1, **options):
    """A llama on a mesh, with a batch of two on every rank."""
    return parallel(sizes={**SIZES, "B": SIZES["B"] * dp}, dp=dp, dtype="fp32", **options)


# -- tensor and sequence parallelism ---------------------------------------------------------------------------------


def test_recorded_sizes_match_the_model():
    graph = step(dtype="fp32")
    assert cg.param_bytes(graph, **SIZES) == P == L * LAYER + REST


def test_tensor_parallel_collectives_match_dtensor():
    ours, torchs = calls(case(tp=4)), torch_calls("tensor, loss parallel")
    # two per layer, and the embedding
    assert ours["forward", "all_reduce", 4, X] == torchs["forward", "all_reduce", 4, X] == 2 * L + 1
    assert ours - torchs == {("forward", "all_reduce", 4, 4): 1}
    assert torchs - ours == {
        # a loss of sharded logits: a maximum, a sum, and the target's logit at each position, where the derived graph
        # averages over positions before it reduces a scalar
        ("forward", "all_reduce", 4, ROW): 1,
        # DTensor reduces the input gradients for q, k and v separately, and so for gate and up; the derived graph adds
        # them before the reduction, like Megatron
        ("backward", "all_reduce", 4, X): (3 - 1) * L + (2 - 1) * L,
    }


@pytest.mark.parametrize("hold", [True, False])
def test_sequence_parallel_collectives_match_dtensor(hold):
    ours, torchs = (
        calls(case(tp=4, sequence=True, keep_gathered=hold)),
        torch_calls("tensor and sequence, loss parallel"),
    )
    for key in (("forward", "all_gather"), ("forward", "reduce_scatter"), ("backward", "reduce_scatter")):
        assert ring_bytes(ours, *key) == ring_bytes(torchs, *key) == 110_592  # (2L + 1) * 3/4 * 16,384
    # the gathered forward activations are saved, like torch's, or gathered again, like Megatron's
    again = {} if hold else {("backward", "all_gather", 4, X): 2 * L + 1}
    assert ours - torchs == again | {
        # each rank has a sequence shard, so norm weight gradients are reduced once they are complete
        ("backward", "all_reduce", 4, 4 * SIZES["D"]): 2 * L + 1,
        ("forward", "all_reduce", 4, 4): 1,  # the loss, as above
    }
    assert torchs - ours == {
        # DTensor leaves norm weight gradients as partial sums, and three foreach AdamW ops each reduce them again
        ("optimizer", "all_reduce", 4, 4 * SIZES["D"]): 3 * (2 * L + 1),
        ("forward", "all_reduce", 4, ROW): 1,
    }


def test_saved_gathered_activations_are_not_regathered():
    key = ("backward", "all_gather")
    ours, torchs = calls(case(tp=4, sequence=True)), torch_calls("tensor and sequence, loss parallel")
    assert {row: n for row, n in ours.items() if row[:2] == key} == {(*key, 4, X): 2 * L + 1}
    assert (
        call_count(ours, *key) == call_count(torchs, *key) == 2 * L + 1
    )  # gradients for the scattered activations only


@pytest.mark.parametrize("name", ["tensor", "tensor and sequence"])
def test_torch_gathers_logits_without_a_parallel_loss(name):
    """The derived graph always has the sharded-logits loss: the placement of logits is not configurable."""
    whole, split = torch_calls(name), torch_calls(f"{name}, loss parallel")
    assert whole - split == {("forward", "all_gather", 4, ROW * SIZES["V"]): 1}
    assert split - whole == {("forward", "all_reduce", 4, ROW): 3}


# -- gathered parameters -----------------------------------------------------------------------------------------------

GATHERED = ("forward", "all_gather")
AGAIN = ("backward", "all_gather")
REDUCED = ("backward", "reduce_scatter")
#: torch computes the loss of each rank's batch; the derived loss is the mean over all ranks.
LOSS = ("forward", "all_reduce")


@cache
def fully(ranks=4, **policy):
    return calls(gathered(cg.FullyShard("dp", **policy), {**SIZES, "B": ranks * SIZES["B"]}, "fp32", dp=ranks))


@pytest.mark.parametrize(
    ("name", "ranks", "policy"),
    [
        ("fully sharded", 4, {}),
        ("fully sharded, root too", 4, {"reshard_root": True}),
        ("fully sharded, root too, on 2", 2, {"reshard_root": True}),
        ("fully sharded, kept", 4, {"reshard_after_forward": False}),
    ],
)
def test_fsdp_collectives_match_call_for_call(name, ranks, policy):
    ours, torchs = fully(ranks, **policy), torch_calls(name)
    assert ours - torchs == {(*LOSS, ranks, 4): 1}
    assert not torchs - ours
    assert ring_bytes(ours, *GATHERED) == ring_bytes(ours, *REDUCED) == Fraction(ranks - 1, ranks) * P


@pytest.mark.parametrize("each", [True, False])
def test_micro_batch_collectives_match_fully_shard(each):
    graph = training_step(load("llama-3-8b", symbolic=True, dtype="fp32"), accumulate=3)
    rank = cg.parallelize(graph, dp=4, zero=3, reduce_every_microbatch=each, strict=True)
    ours = calls(Case(graph, rank, {"dp": 4}, {**SIZES, "B": 4 * SIZES["B"]}))
    torchs = torch_calls("fully sharded, micro-batches" + (", reduced once" if not each else ""))
    for key in (GATHERED, AGAIN, REDUCED):
        assert ring_bytes(ours, *key) == ring_bytes(torchs, *key)
    assert ring_bytes(ours, *REDUCED) == Fraction(3, 4) * P * (3 if each else 1)
    assert ours - torchs == {(*LOSS, 4, 4): 3}
    assert not torchs - ours


def test_per_parameter_sharding_sends_as_much_as_units():
    """9 parameters per layer and 3 others, where `fully_shard` has one bucket per unit."""
    ours, torchs = fully(by_unit=False), torch_calls("fully sharded")
    assert [call_count(torchs, *key) for key in (GATHERED, AGAIN, REDUCED)] == [L + 1, L, L + 1]
    assert [call_count(ours, *key) for key in (GATHERED, AGAIN, REDUCED)] == [9 * L + 3, 9 * L, 9 * L + 3]
    for key in (GATHERED, AGAIN, REDUCED):
        assert ring_bytes(ours, *key) == ring_bytes(torchs, *key)


def test_partial_resharding_matches_fully_shard():
    """`reshard_after_forward=2`: over one axis of two; the other axis stays gathered between the passes."""
    policy = cg.FullyShard(("node", "own"), reshard_after_forward="own", reshard_root=True)
    ours = calls(gathered(policy, {**SIZES, "B": 4 * SIZES["B"]}, "fp32", node=2, own=2))
    torchs = torch_calls("fully sharded, kept by 2")
    # torch has one call over four ranks where the derived graph has one per axis; ring algorithms send the same bytes
    for key in (GATHERED, AGAIN, REDUCED):
        assert ring_bytes(ours, *key) == ring_bytes(torchs, *key)
    assert {row: n for row, n in ours.items() if row[:2] == AGAIN} == {(*AGAIN, 2, LAYER): L, (*AGAIN, 2, REST): 1}
    assert ring_bytes(torchs, *AGAIN) == P / 2


@pytest.mark.parametrize("hold", [True, False])
def test_fsdp_with_tensor_and_sequence_parallelism_matches_torch(hold):
    ours = calls(case(dp=2, tp=4, sequence=True, zero=3, keep_gathered=hold))
    torchs = torch_calls("fully sharded and tensor")
    again = {} if hold else {("backward", "all_gather", 4, X): 2 * L + 1}  # as without the other axis
    assert ours - torchs == again | {
        (*LOSS, 4, 4): 1,
        (*LOSS, 2, 4): 1,
    }
    assert torchs - ours == {("forward", "all_reduce", 4, ROW): 1}
    gains = 4 * SIZES["D"]
    whole = (P - (2 * L + 1) * gains) / 4 + (2 * L + 1) * gains  # norm weights are replicated over tp
    for key in (GATHERED, REDUCED):
        assert ring_bytes(ours, *key, 2) == whole / 2 == 115_840
    # gradients of norm weights are reduced over tp before they are scattered over dp
    assert ours["backward", "all_reduce", 4, gains] == 2 * L + 1


@pytest.mark.parametrize(
    "degrees",
    [
        {"rep": 2, "own": 4},
        {"own": 4, "rep": 2},
    ],
    ids=lambda degrees: " ".join(degrees),
)
def test_hybrid_sharding_matches_torch(degrees):
    ours = calls(gathered(cg.FullyShard("own"), {**SIZES, "B": 8 * SIZES["B"]}, "fp32", **degrees))
    torchs = torch_calls("hybrid")
    assert ours - torchs == {(*LOSS, 4, 4): 1, (*LOSS, 2, 4): 1}
    assert not torchs - ours
    # a quarter of each gradient remains after the reduce-scatter; it is all-reduced
    assert ring_bytes(ours, "backward", "all_reduce", 2) == P / 4


def test_zero1_collectives_match_zero_redundancy_optimizer():
    ours, torchs = calls(case(dp=4, zero=1, optimizer="AdamW")), torch_calls("states")
    key = ("backward", "all_reduce")
    assert ring_bytes(ours, *key) == ring_bytes(torchs, *key) == 1_379_712 == Fraction(2 * 3, 4) * P
    # one bucket of 25 MB against a call per parameter, 39 in all
    assert (call_count(torchs, *key), call_count(ours, *key)) == (1, 39)
    # ZeroRedundancyOptimizer assigns whole parameters to a rank, which broadcasts them; the derived graph shards each
    sent = sum(n * row[3] for row, n in torchs.items() if row[1] == "broadcast")
    assert sent == sum(n * row[3] for row, n in ours.items() if row[:2] == ("optimizer", "all_gather")) == P


def test_gshard_experts_match_dtensor():
    ours, torchs = calls(experts(RECORD["experts"], dtype="fp32")), torch_calls("experts")
    assert ours - torchs == {("forward", "all_reduce", 4, 4): 1}  # the sum over all tokens, torch's is per rank
    assert not torchs - ours


def test_ulysses_collectives_match_torch():
    sizes = {**SIZES, **RECORD["attention"], "L": 1}
    ours = calls(parallel(sizes=sizes, cp=4, context="all_to_all", dtype="fp32"))
    ours = Counter({row: n for row, n in ours.items() if row[1] == "all_to_all"})
    # the attention output is exchanged again for its gradient, where torch saves it
    assert ours - torch_calls("context, by heads") == {("backward", "all_to_all", 4, 8192): 1}
    assert not torch_calls("context, by heads") - ours


@pytest.mark.long
def test_ring_attention_collectives_match_torch():
    sizes = {**SIZES, **RECORD["attention"], "L": 1}
    case = parallel(sizes=sizes, cp=4, context="ring", dtype="fp32")
    ours = Counter()
    for m in cg.communication(case.sharded, **case.sizes).filter(collective="send"):
        ours[m.phase, m.bytes] += m.times
    # torch packs keys and values into one buffer, and each rank sends it to one peer in an all-to-all
    both = 4 * 2 * 2 * 4 * 64 * 16 // 4
    assert torch_calls("context, round") == {
        ("forward", "all_to_all", 4, both): 3, ("backward", "all_to_all", 4, both): 7
    }  # fmt: skip
    assert ours == {("forward", both // 2): 2 * 3, ("backward", both // 2): 2 * 7}


@pytest.mark.long  # torch only
def test_recorded_collectives_match_installed_torch(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.__version__.partition("+")[0] != RECORD["torch"]:
        pytest.skip(f"recorded with torch {RECORD['torch']}")
    record = tmp_path / "record.json"
    subprocess.run([sys.executable, str(HERE / "sharded_oracles.py"), str(record), RECORD["date"]], check=True)
    assert json.loads(record.read_text(encoding="utf-8")) == RECORD
