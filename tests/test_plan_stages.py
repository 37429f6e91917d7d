"""Pipelines in a search: each stage beside a graph of its own, with as many layers as it has."""

import pytest

import costgraph as cg

B, S, D, F, V, L = cg.dims("B S D F V L")
SIZES = {"S": 52, "D": 104, "F": 208, "V": 182}
FEW = {"devices": 52, "hardware": "h100-sxm", "precision": "bf16", "B": 52, "checkpoint": "none", **SIZES}


@pytest.fixture(scope="module")
def model():
    with cg.Graph("lm", dtype="bf16") as g:
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("tokens/table", (V, D)))

        def block(x):
            with cg.scope("mlp"):
                h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
                return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


def layers_of(depth, pp):
    """Return the layers of the first, a middle and the last stage, from all of a pipeline, one taken away by one."""
    most = -(-depth // pp)
    every = [most] * pp
    for at in [pp - 1, 0, *range(pp - 2, 0, -1)][: most * pp - depth]:
        every[at] -= 1
    assert sum(every) == depth
    return [every[0], max(every[1:-1], default=0), every[-1]] if pp > 2 else every


def alone(model, plan, stage, layers):
    """Return bytes and seconds of a stage that is derived with its own numbers; what it sends goes over the network."""
    m, mesh = plan.accumulate, plan.dp * plan.tp
    step = cg.training_step(model, precision="bf16", accumulate=m)
    split = {"dp": plan.dp, "tp": plan.tp, "zero": plan.zero, "sequence": plan.sequence}
    rank = cg.parallelize(step, pp=plan.pp, micro_batches=m, **split).stages[stage]
    sizes = {**SIZES, "B": plan.micro_batch * plan.dp, "L": layers * plan.pp}
    sizes = {name: n for name, n in sizes.items() if name in "SDFBL" or stage != 1 or plan.pp == 2}
    device = cg.load_hardware("h100-sxm")
    link = device.tables["network" if plan.pp * mesh > 8 else "interconnect"]
    sends = [row for row in cg.communication(rank, **sizes) if row.collective == "send"]
    extra = sum(
        row.ring_bytes / link["per_direction"].value
        + row.times * link["latency"].value
        - row.ring_bytes / device.bandwidth.value
        for row in sends
    )
    updates = sum(row.seconds for row in cg.roofline(rank, device, **sizes).rows if row.phase == "optimizer")
    busy = cg.seconds(rank, device, **sizes) + extra
    return cg.peak_memory(rank, **sizes), busy + (plan.pp - 1) / m * (busy - updates)


@pytest.mark.parametrize("depth", [7, 8, 13])
def test_stages_take_what_their_graphs_take_alone(model, depth):
    found = cg.plan.search(model, **FEW, L=depth, pp=(2, 4), zero=(0, 1))
    assert {p.pp for p in found.rows} == {2, 4}
    assert all(p.dp * p.tp * p.pp == 52 and p.dp * p.micro_batch * p.accumulate == 52 for p in found.rows)
    for plan in found.rows[:: len(found.rows) // 7]:
        each = [alone(model, plan, i, n) for i, n in enumerate(layers_of(depth, plan.pp))]
        assert plan.stages == tuple(peak for peak, _ in each), plan
        assert plan.memory == max(plan.stages)
        assert plan.seconds == pytest.approx(max(taken for _, taken in each), rel=1e-9), plan
        assert sum(plan.parts.values()) == pytest.approx(plan.seconds, rel=1e-9)
        assert {"idle", "send over pp"} <= plan.parts.keys()
