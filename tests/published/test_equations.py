"""Equations 1 to 6 of Korthikanti et al. 2022 (arXiv 2205.05198), each from the graph of one rank, symbolic in t.

A layer of GPT in bf16 with dropout, masks of one byte; s, b, h, a, L, t are S, B, D, H, L, T here, and the width of the
MLP is 4h. Mean and scale of the two norms, 16 bytes a token in fp32, are left out as in the source.
"""

import pytest
import sympy
from derive_activations import gpt
from derive_sharding import MEGATRON, SEQUENCE, kept

import costgraph as cg
from costgraph import testing

B, S, D, H, L, T = cg.dims("B S D H L T")
#: 2sbh each: inputs of q, k and v, of the product behind attention and of both norms, of up; what GELU and down read is
#: four times as wide; q, k, v; masks of two dropouts, sbh each. What softmax and its dropout make are 2as^2b each, the
#: mask is as^2b. That is 34sbh + 5as^2b.
LAYER = 34 * S * B * D + 5 * H * S**2 * B


def same(found, expected):
    assert sympy.simplify(found - expected) == 0, found


def test_equation_1_is_that_of_a_mesh_of_one():
    step = cg.training_step(gpt(), optimizer=cg.SGD())
    one = cg.shard(step, cg.mesh(tp=1), {**MEGATRON, **SEQUENCE}, strict=True)
    same(cg.saved_bytes(one)["layers"] - 16 * B * S, LAYER)
    for sequence in (False, True):
        same(kept(sequence=sequence).subs(T, 1), LAYER)


def test_equation_2_splits_what_is_between_the_reductions():
    """Inputs of both norms, of q, k, v and of up, and two masks are whole: 2*2 + 2*2 + 2*1 sbh."""
    same(kept(sequence=False), 10 * S * B * D + (LAYER - 10 * S * B * D) / T)


def test_equation_3_is_an_identity_of_values():
    """[Y1, Y2] = LayerNorm([X1, X2]), Y = g(Y1, Y2), [Z1, Z2] = GeLU(Y A), W = Z B, [W1, W2] = g'(W), Dropout."""
    F = cg.dims("F")
    with cg.Graph("mlp", dtype="fp32") as g:
        x = g.input("x", (S, B, D), grad=True)
        z = cg.gelu(cg.einsum(cg.layer_norm(x), g.param("a", (D, F)), "s b d, d f -> s b f"))
        w = cg.einsum(z, g.param("b", (F, D)), "s b f, f d -> s b d")
        g.output(cg.reduce((x + cg.dropout(w, 0.5)) ** 2, "s b d -> ", "mean"))
    step = cg.training_step(g, optimizer=cg.SGD())
    rank = cg.shard(step, cg.mesh(tp=T), {"x": "(s tp) b d", "a": "d (f tp)", "b": "(f tp) d"}, strict=True)
    whole = 4 * S * B * D
    sent = [(m.phase, m.collective) for m in cg.communication(rank) if m.bytes == whole]
    # g and its conjugate; in the backward pass they take turns, and Y is gathered again for the gradient of A
    assert sent[:2] == [("forward", "all_gather"), ("forward", "reduce_scatter")]
    assert sorted(sent[2:]) == [("backward", "all_gather")] * 2 + [("backward", "reduce_scatter")]
    testing.check_sharded(step, rank, S=4, B=3, D=5, F=6, T=2)


def test_equation_4_splits_all():
    same(kept(), LAYER / T)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_equation_5_is_what_the_first_stage_of_a_pipeline_keeps(ranks):
    """L/p layers for each of the p micro-batches that wait in 1F1B: what L layers keep, whatever p is."""
    step = cg.training_step(gpt(), optimizer=cg.SGD(), accumulate=8)
    first = cg.parallelize(step, tp=T, pp=ranks, micro_batches=8, sequence=True, keep_gathered=False).stages[0]
    layer = cg.saved_bytes(first)["layers"] - 16 * B * S / T
    same(layer * L / ranks * cg.plan.in_flight("1f1b", ranks, 8, 1, 0), L * LAYER / T)


def test_equation_6_leaves_out_what_selective_recomputation_computes_again():
    same(kept("core"), 34 * S * B * D / T)
