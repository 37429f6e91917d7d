"""The search for a plan: formulas over arrays beside each plan on its own, limits, and what is refused."""

import pytest

import costgraph as cg

B, S, D, F, V = cg.dims("B S D F V")
SIZES = {"S": 52, "D": 104, "F": 208, "V": 182}
MANY = {"devices": 26, "hardware": "h100-sxm", "B": 78, "precision": "bf16", **SIZES}


@pytest.fixture(scope="module")
def model():
    with cg.Graph("lm", dtype="bf16") as g:
        table = g.param("tokens/table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)

        def block(x):
            with cg.scope("mlp"):
                h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
                return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        x = cg.repeat(3, block, x, name="layers")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
        g.loss = "cross_entropy"
    return g


@pytest.fixture(scope="module")
def found(model):
    return cg.plan.search(model, **MANY)


def alone(model, plan):
    """Return bytes and seconds of a plan that is derived with its own numbers."""
    how = {"none": None, "every-block": cg.every_block()}[plan.checkpoint]
    step = cg.training_step(model, precision="bf16", checkpoint=how, accumulate=plan.accumulate)
    rank = cg.parallelize(step, dp=plan.dp, tp=plan.tp, zero=plan.zero, sequence=plan.sequence)
    sizes = {**SIZES, "B": plan.micro_batch * plan.dp}
    return cg.peak_memory(rank, **sizes), cg.seconds(rank, "h100-sxm", **sizes)


def test_each_plan_takes_what_its_graph_takes_alone(model, found):
    assert {(p.dp, p.tp) for p in found.rows} == {(26, 1), (13, 2), (2, 13), (1, 26)}
    assert {p.zero for p in found.rows} == {0, 1, 2, 3}
    for plan in found.rows[::3]:
        peak, taken = alone(model, plan)
        assert plan.memory == peak, plan
        assert plan.seconds == pytest.approx(taken, rel=1e-9), plan
        assert sum(plan.parts.values()) == pytest.approx(taken, rel=1e-9)
        assert plan.tokens_per_second == pytest.approx(78 * 52 / taken, rel=1e-9)
        assert plan.dp * plan.micro_batch * plan.accumulate == 78
