"""Gradients that another op hands on: another format, or other axes, lie where what they are of does."""

import pytest
from sympy import sympify

import costgraph as cg
from costgraph import testing

B, S, D, F, T = cg.dims("B S D F T")


def step(precision, turned):
    """Return a step of a residual MLP; `turned` weights have the axis that is multiplied last, as torch's have."""
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
def test_a_weight_is_not_summed_over_tokens_of_other_ranks(precision, each, turned):
    whole = step(precision, turned)
    weights = {"up": "(f tp) d", "down": "d (f tp)"} if turned else {"up": "d (f tp)", "down": "(f tp) d"}
    rank = cg.shard(whole, cg.mesh(tp=T), {"x": "b (s tp) d", **weights}, strict=True)
    sent = [m for m in cg.communication(rank) if sympify(m.bytes).has(S)]
    # Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2: tokens are gathered before the first product and
    # scattered behind the last one, both ways, and those of the first one are gathered again for its weights' gradient;
    # x is nobody's parameter, so that nothing goes back to it
    assert sorted((m.collective, m.phase) for m in sent) == [
        ("all_gather", "backward"), ("all_gather", "backward"), ("all_gather", "forward"),
        ("reduce_scatter", "forward"),
    ]  # fmt: skip
    assert {m.bytes for m in sent} == {each * B * S * D}
    assert not any(sympify(m.bytes).has(F) for m in cg.communication(rank))
    testing.check_sharded(whole, cg.shard(whole, cg.mesh(tp=2), {"x": "b (s tp) d", **weights}), B=3, S=4, D=5, F=6)


def test_the_part_of_a_gradient_that_every_rank_has_is_kept_without_the_rest():
    with cg.Graph("scan") as g:
        rows = g.param("rows", (S, D))
        _, squares = cg.scan(S, lambda c, x: (cg.relu(c), x * x), g.input("x", (D,)), rows)
        g.output(cg.reduce(squares, "s d ->", "sum"))
    whole = cg.training_step(g, optimizer=cg.SGD())
    rank = cg.shard(whole, cg.mesh(dp=T), {"rows": "s (d dp)"}, gather="dp")
    # nothing is split but the parameter: ranks compute the same gradient, and each keeps its own part
    assert {m.collective for m in cg.communication(rank)} == {"all_gather"}
    testing.check_sharded(whole, rank, S=3, D=10, T=2)


def test_gradients_are_of_what_a_rank_has_where_no_backward_pass_reads_it():
    """The root stays put together behind the forward pass, and nothing of it is read again."""
    with cg.Graph("g", dtype="fp64") as g:
        g.output(cg.reduce(g.param("w", (6,)), "a -> ", "sum"))
    whole = cg.backward(g)
    rank = cg.shard(whole, cg.mesh(dp=2), {"w": "(a dp)"}, gather="dp")
    assert [t.sizes for t in rank.gradients] == [(3,)]
    testing.check_sharded(whole, rank)
