"""Gradients for top-k and grouped matmuls over experts."""

import numpy as np
from pulls import check

import costgraph as cg
from costgraph.ops.experts import grouped_outer

#: Seven rows for three experts; the second one gets none.
ENDS = np.array([2.0, 2.0, 7.0])


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape)


def test_top_k_gradient_goes_to_selected_elements():
    distinct = np.random.default_rng(1).permutation(10).reshape(2, 5) / 10 + 0.5
    (mine,), ops = check(lambda x: cg.ops.top_k(x, 3)[0], distinct)
    assert [op.kind.name for op in ops] == ["fill", "scatter"]
    assert (mine != 0).sum(axis=1).tolist() == [3, 3]


def test_grouped_matmul_gradients():
    (_, weights), ops = check(
        lambda x, w, ends: cg.ops.grouped_matmul(x, w, ends, 1),
        numbers(7, 2), numbers(3, 2, 4, seed=1), ENDS, dtypes={2: "int32"},
    )  # fmt: skip
    assert [op.kind.name for op in ops] == ["rearrange", "grouped_matmul", "grouped_outer"]
    assert [op.kind.flops(op).matmul.constant for op in ops[1:]] == [2 * 7 * 2 * 4] * 2
    assert np.all(weights[1] == 0)  # no row is routed to the second expert


def test_grouped_outer_product_gradients():
    _, ops = check(
        lambda a, b, ends: grouped_outer(a, b, ends),
        numbers(7, 2), numbers(7, 4, seed=1), ENDS, dtypes={2: "int32"},
    )  # fmt: skip
    assert [op.kind.name for op in ops] == ["rearrange", "grouped_matmul", "grouped_matmul"]


def test_mixture_of_experts_gradients():
    def build(x, scores, gate_up, down):
        best, ids = cg.ops.top_k(scores, 2)
        sent = cg.ops.dispatch(ids, 3)
        h = cg.ops.grouped_matmul(cg.ops.gather(x, sent.tokens), gate_up, sent.ends, 2)
        gate, up = cg.ops.split(h, (3, 3))
        y = cg.ops.gather(cg.ops.grouped_matmul(cg.silu(gate) * up, down, sent.ends, 2), sent.places)
        return cg.reduce(y * cg.rearrange(cg.ops.pointwise("exp", best), "t k -> t k 1"), "t k d -> t d", "sum")

    distinct = np.random.default_rng(2).permutation(12).reshape(4, 3) / 12 + 0.5
    check(build, numbers(4, 2), distinct, numbers(3, 2, 6, seed=3), numbers(3, 3, 2, seed=4))
