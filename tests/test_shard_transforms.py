"""What may be made of the graph of one rank: it is still one, or what is asked is refused."""

import pytest
from test_parallelize import step

import costgraph as cg
from costgraph import models, testing

D, F, DP, TP = cg.dims("D F DP TP")
SIZES = {"B": 2, "D": 4, "H": 2, "G": 2, "K": 2, "F": 6, "V": 8}


@pytest.fixture(scope="module")
def whole():
    return step("llama-2-13b")


@pytest.fixture(scope="module")
def rank(whole):
    return cg.parallelize(whole, dp=DP, tp=TP, zero=3, strict=True)


def test_iterations_lie_as_the_loop_has_them(whole, rank):
    apart = cg.unroll(rank, L=2, DP=2)
    assert str(apart.sharding.mesh) == "mesh(dp=2, tp=TP)"
    loop, first = (g.sharding.places[f"layers/mlp/up/weight{end}"] for g, end in ((rank, ""), (apart, ".i0")))
    assert str(first.local((D, F))) == "(D/2, F/TP)"
    assert first.axes == loop.axes == {"dp", "tp"}
    testing.check_sharded(cg.unroll(whole, L=2), apart, **SIZES, S=3, TP=2)


def test_fused_ops_lie_as_before(whole, rank):
    fused = cg.fuse(rank)
    assert fused.sharding == rank.sharding
    assert len([*fused.walk()]) > len(fused.ops)
    testing.check_sharded(whole, fused, **SIZES, S=3, L=2, DP=2, TP=1)


@pytest.mark.parametrize(
    ("place", "transform"),
    [
        ("training_step", cg.training_step), ("backward", cg.backward), ("prefill", cg.prefill),
        ("decode", cg.decode), ("shard", lambda g: cg.shard(g, cg.mesh(dp=2), {})),
    ],
)  # fmt: skip
def test_what_ranks_do_together_is_derived_of_all_of_them(place, transform):
    rank = cg.parallelize(models.load("gpt2"), tp=2)
    wrong = f"{place}: graph 'gpt2' is that of one rank already, expected one of all devices"
    with pytest.raises(cg.GraphError, match=wrong):
        transform(rank)
