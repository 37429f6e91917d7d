"""Ranks for random models and degrees: the `ranks.check` invariants with fixed seeds, and further cases."""

from __future__ import annotations

import random

import pytest

import costgraph as cg
from costgraph import testing
from tests.fuzz.ranks import FEW, SIZES, VOCABULARY, check, model


@pytest.mark.parametrize("seed", range(4))
def test_ranks_keep_the_invariants_at_all_degrees(seed):
    check(random.Random(seed))


@pytest.mark.parametrize(("kinds", "zero"), [(1, 0), (2, 3)])
def test_gradients_of_a_mean_after_a_norm_are_accumulated_as_partial_sums(kinds, zero):
    """The first gradient is an expanded scalar: each rank computes its own part."""
    g = model(kinds, gated=False, fused=False, post_norm=True)
    step = cg.training_step(g, optimizer=cg.SGD(), accumulate=2)
    rank = cg.parallelize(step, dp=2, zero=zero, reduce_every_microbatch=False)
    testing.check_sharded(step, rank, **FEW)
    expanded = {str(t.sizes[0]) for op in rank.walk() if op.kind.name == "expand" for t in op.results if t.ndim == 3}
    assert expanded == {"B/2"}


@pytest.mark.parametrize("padding_idx", [0, VOCABULARY - 1])
def test_padding_rows_of_split_tables_get_no_gradient(padding_idx):
    """The padding row of the first rank, or of the last one."""
    g = model(1, gated=False, fused=False, padding_idx=padding_idx)
    step = cg.training_step(g, optimizer=cg.SGD())
    rank = cg.parallelize(step, dp=2, tp=2)
    assert rank.sharding.places["tokens/table"].axes == {"tp"}
    testing.check_sharded(step, rank, **FEW)


def test_identical_layer_kinds_are_gathered_alike():
    counts_by_model = []
    for kinds in (1, 2):
        step = cg.training_step(model(kinds, gated=False, fused=False), optimizer=cg.SGD())
        rank = cg.parallelize(step, dp=4, zero=3)
        counts = {}
        for m in cg.communication(rank, **SIZES):
            counts[m.collective, m.phase] = counts.get((m.collective, m.phase), 0) + m.times
        counts_by_model.append(counts)
    assert counts_by_model[0] == counts_by_model[1]


@pytest.mark.parametrize("degrees", [pytest.param({"ep": 4}, marks=pytest.mark.long), {"dp": 2, "ep": 4}])
def test_zero_shards_dense_parameters_over_expert_ranks(degrees):
    step = cg.training_step(cg.models.load("qwen3-30b-a3b"), optimizer=cg.AdamW(implementation="fused"))
    held = [cg.state_bytes(cg.parallelize(step, zero=stage, **degrees)) for stage in (0, 1, 3)]
    assert held[2].state <= held[1].state < held[0].state
    assert held[2].params < held[0].params


def test_strict_refuses_replicated_weights():
    B, D, F = cg.dims("B D F")
    with cg.Graph("odd") as g:
        x = g.input("x", (B, D))
        h = cg.relu(cg.linear(x, "b d -> b f", f=F, name="one"))
        h = cg.rms_norm(cg.linear(h, "b f -> b d", d=D, name="two"))
        g.output(cg.reduce(cg.rms_norm(cg.linear(h, "b d -> b f", f=F, name="alone")), "b f ->", "mean"))
    rank = cg.parallelize(g, tp=2)
    assert rank.sharding.replicated == ("alone/weight",)
    assert cg.matmul_flops(rank) == 4 * B * D * F  # half of the column/row pair, and the whole third weight
    with pytest.raises(
        cg.UnsupportedError, match="tp leaves 1 weights replicated on every rank, such as 'alone/weight'"
    ):
        cg.parallelize(g, tp=2, strict=True)
