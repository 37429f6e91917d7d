"""Placement of gradients that pass through casts and transposes: it follows the parameter."""

import pytest
from sympy import sympify

import costgraph as cg
from costgraph import testing

B, S, D, F, T = cg.dims("B S D F T")


def step(precision, turned):
    """Return a step of a residual MLP; `turned` weights have the contracted axis last, as in torch."""
    with cg.Graph("mlp") as g:
        x = g.input("x", (B, S, D))
        up, down = (g.param(n, s[::-1] if turned else s) for n, s in (("up", (D, F)), ("down", (F, D))))
        if turned:
            up, down = (cg.rearrange(w, "a b -> b a") for w in (up, down))
        x = x * 2.0
        h = cg.silu(cg.einsum(x, up, "b s d, d f -> b s f"))
        y = x + cg.einsum(h, down, "b s f, f d -> b s d")
        g.output(cg.reduce(y * y, "b s d ->", "mean"))
    return cg.training_step(g, optimizer=cg.SGD(), precision=precision)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16-mixed", 2), ("bf16", 2)])
@pytest.mark.parametrize("turned", [False, True])
def test_weight_gradients_use_sequence_parallel_collectives(precision, each, turned):
    whole = step(precision, turned)
    weights = {"up": "(f tp) d", "down": "d (f tp)"} if turned else {"up": "d (f tp)", "down": "(f tp) d"}
    rank = cg.shard(whole, cg.mesh(tp=T), {"x": "b (s tp) d", **weights}, strict=True)
    sent = [m for m in cg.communication(rank) if sympify(m.bytes).has(S)]
    # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: in both passes, tokens are gathered before the first
    # matmul and scattered after the last one. The first ones are gathered again for the weight gradient. x is no
    # parameter, so nothing is sent back to it.
    assert sorted((m.collective, m.phase) for m in sent) == [
        ("all_gather", "backward"), ("all_gather", "backward"), ("all_gather", "forward"),
        ("reduce_scatter", "forward"),
    ]  # fmt: skip
    assert {m.bytes for m in sent} == {each * B * S * D}
    assert not any(sympify(m.bytes).has(F) for m in cg.communication(rank))
    testing.check_sharded(whole, cg.shard(whole, cg.mesh(tp=2), {"x": "b (s tp) d", **weights}), B=3, S=4, D=5, F=6)


def test_replicated_gradient_is_sliced_to_shard():
    with cg.Graph("scan") as g:
        rows = g.param("rows", (S, D))
        _, squares = cg.scan(S, lambda c, x: (cg.relu(c), x * x), g.input("x", (D,)), rows)
        g.output(cg.reduce(squares, "s d ->", "sum"))
    whole = cg.training_step(g, optimizer=cg.SGD())
    rank = cg.shard(whole, cg.mesh(dp=T), {"rows": "s (d dp)"}, gather="dp")
    # only the parameter is sharded: ranks compute the same gradient, and each keeps its own shard
    assert {m.collective for m in cg.communication(rank)} == {"all_gather"}
    testing.check_sharded(whole, rank, S=3, D=10, T=2)


def test_unread_root_gradients_follow_shard():
    """The root stays gathered after the forward pass, and nothing reads it again."""
    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.reduce(g.param("w", (6,)), "a -> ", "sum"))
    whole = cg.backward(g)
    rank = cg.shard(whole, cg.mesh(dp=2), {"w": "(a dp)"}, gather="dp")
    assert [t.sizes for t in rank.gradients] == [(3,)]
    testing.check_sharded(whole, rank)
