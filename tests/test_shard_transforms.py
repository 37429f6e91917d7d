"""Transforms of per-rank graphs: the result is still a per-rank graph, or the transform is refused."""

import pytest
from shared import load
from test_parallelize import step

import costgraph as cg
from costgraph import testing

D, F, DP, TP = cg.dims("D F DP TP")
SIZES = {"B": 2, "D": 4, "H": 2, "G": 2, "K": 2, "F": 6, "V": 8}


@pytest.fixture(scope="module")
def whole():
    return step("llama-2-13b")


@pytest.fixture(scope="module")
def rank(whole):
    return cg.parallelize(whole, dp=DP, tp=TP, zero=3, strict=True)


def test_unrolled_iterations_keep_loop_placement(whole, rank):
    apart = cg.unroll(rank, L=2, DP=2)
    assert str(apart.sharding.mesh) == "mesh(dp=2, tp=TP)"
    loop, first = (g.sharding.places[f"layers/mlp/up/weight{end}"] for g, end in ((rank, ""), (apart, ".i0")))
    assert str(first.local((D, F))) == "(D/2, F/TP)"
    assert first.axes == loop.axes == {"dp", "tp"}
    testing.check_sharded(cg.unroll(whole, L=2), apart, **SIZES, S=3, TP=2)


def test_fused_ops_keep_placement(whole, rank):
    fused = cg.fuse(rank)
    assert fused.sharding == rank.sharding
    assert len([*fused.walk()]) > len(fused.ops)
    testing.check_sharded(whole, fused, **SIZES, S=3, L=2, DP=2, TP=1)


def test_unsharded_parameters_are_in_memory_outside_fused_kernels():
    """The fully_shard hooks copy them out of the all-gather buffer, outside compiled code."""
    rank = cg.parallelize(step("llama-2-13b"), dp=2, zero=3)
    fused = {t.name for op in cg.fuse(rank).walk() if not op.graph.fused for t in op.results}
    copied = {t.name for op in rank.walk() if op.name.endswith("/table.all_gather") for t in op.results}
    assert copied
    assert copied <= fused


@pytest.mark.parametrize(
    ("place", "transform"),
    [
        ("training_step", cg.training_step), ("backward", cg.backward), ("prefill", cg.prefill),
        ("decode", cg.decode), ("shard", lambda g: cg.shard(g, cg.mesh(dp=2), {})),
    ],
)  # fmt: skip
def test_whole_graph_transforms_refuse_per_rank_graphs(place, transform):
    rank = cg.parallelize(load("gpt2"), tp=2)
    wrong = f"{place}: graph 'gpt2' is already the graph of one rank, expected an unsharded graph"
    with pytest.raises(cg.GraphError, match=wrong):
        transform(rank)


def towers(place="d (f tp)"):
    """Return four equal unrolled blocks, and the graph for one of two ranks; the last weight may have another
    placement.
    """
    B, D, F = cg.dims("B D F")
    with cg.Graph("towers", dtype="fp32") as g:
        x = g.input("x", (B, D), grad=True)
        for i in range(4):
            with cg.scope(f"h/{i}"):
                up = cg.relu(cg.einsum(x, g.param("up", (D, F)), "b d, d f -> b f"))
                x = x + cg.einsum(up, g.param("down", (F, D)), "b f, f d -> b d")
        g.output(cg.reduce(x * x, "b d -> ", "sum"))
    whole = cg.training_step(g, optimizer=cg.SGD())
    places = {"*/up": "d (f tp)", "*/down": "(f tp) d", "h/3/up": place}
    return whole, cg.shard(whole, cg.mesh(tp=2), places)


def test_folded_rank_blocks_keep_placement():
    whole, rank = towers()
    folded = cg.fold(rank)
    assert str(folded.sharding.places["h/up"].local((TP, D, F))) == "(TP, D, F/2)"
    assert cg.peak_memory(folded, L=4, B=3, D=5, F=6) == cg.peak_memory(rank, B=3, D=5, F=6)
    testing.check_sharded(cg.fold(whole), folded, L=4, B=3, D=5, F=6)


def test_blocks_with_different_placement_are_not_folded():
    _, rank = towers("(d tp) f")
    with pytest.raises(cg.GraphError, match="fold of graph 'towers': "):
        cg.fold(rank)
