"""Steps of inference on a mesh: what they keep is split with the batch, and with the heads that it is of."""

import pytest
import sympy
from test_parallelize import DP, OTHERS, SIZES, TP

import costgraph as cg
from costgraph import models, testing

#: Models that keep no heads: latent vectors, which all heads share, and states of recurrences without heads that tp
#: splits; and those of which one weight makes queries and fewer keys.
WHOLE = ("deepseek", "falcon", "mamba", "phi-3", "rwkv", "xlstm")


LONG = pytest.mark.long
FEW = ("deepseek-v2-lite", "falcon-7b", "gemma-2-27b", "mamba-1.4b", "t5-11b")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=LONG) for n in (*SIZES, *OTHERS)])
def test_what_is_kept_is_split_with_the_batch_and_the_heads(name):
    whole = cg.decode(models.load(name, symbolic=True))
    rank = cg.parallelize(whole, dp=DP, tp=TP, strict=True)
    share = sympy.cancel(cg.cache_bytes(rank) / cg.cache_bytes(whole))
    assert share == (1 / DP if name.startswith(WHOLE) else 1 / (DP * TP))
    assert sympy.cancel(cg.matmul_flops(rank) * DP / cg.matmul_flops(whole)).subs(TP, 1) == 1


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x22b", *(pytest.param(n, marks=LONG) for n in SIZES)])
@pytest.mark.parametrize("transform", [cg.decode, cg.prefill])
def test_a_pass_leaves_the_same_numbers_and_caches(name, transform):
    whole = transform(models.load(name, symbolic=True, dtype="fp32"))
    rank = cg.parallelize(whole, dp=2, tp=2, strict=True)
    testing.check_sharded(whole, rank, **SIZES[name], B=2, S=3)


def test_memory_of_a_rank_that_generates():
    step = cg.decode(models.load("llama-3-70b"))
    rank = cg.parallelize(step, dp=2, tp=8)
    sizes = {"B": 32, "S": 8192}
    # keys and values of 80 layers, 8 heads of 128 elements of 2 bytes: a head, and 16 sequences
    kept = 2 * 80 * 1 * 128 * 2 * 16 * 8192
    assert cg.cache_bytes(rank, **sizes) == kept
    # a rank's weights and caches are there throughout, and the logits of its part of the vocabulary are small
    rest = cg.peak_memory(rank, **sizes) - cg.param_bytes(rank, **sizes) - kept
    assert 0 < rest < kept // 1000
    # gains of norms are on all ranks: 2 of each layer and the last one
    assert cg.param_count(rank) * 8 - cg.param_count(step) == 7 * (2 * 80 + 1) * 8192
    # two sums of what a token's layer makes, that of the table's parts, and nothing of the cache
    sent = cg.communication(rank, **sizes)
    assert {(m.collective, m.axis) for m in sent} == {("all_reduce", "tp")}
    assert sum(m.times * m.bytes for m in sent) == (2 * 80 + 1) * 16 * 8192 * 2
