"""Plan search in a torus: feasible degrees, with every plan against a separately derived graph."""

import pytest
from test_networks_torus import torus

import costgraph as cg

B, S, D, F, V, L = cg.dims("B S D F V L")
SIZES = {"S": 48, "D": 96, "F": 192, "V": 192, "L": 6}
FEW = {"devices": 12, "precision": "bf16", "checkpoint": "none", "B": 24, "reduce_every_microbatch": True, **SIZES}


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


def alone(model, plan, device, overlap):
    """Return bytes and seconds of a plan, derived with its own sizes."""
    step = cg.training_step(model, precision="bf16", accumulate=plan.accumulate)
    split = {"dp": plan.dp, "tp": plan.tp, "zero": plan.zero, "sequence": plan.sequence}
    rank = cg.parallelize(step, **split, pp=plan.pp, micro_batches=plan.accumulate if plan.pp > 1 else 1)
    sizes = {**SIZES, "B": plan.micro_batch * plan.dp}
    return cg.peak_memory(rank, **sizes), cg.seconds(rank, device, overlap=overlap, **sizes)


@pytest.mark.parametrize("overlap", ["none", pytest.param("ideal", marks=pytest.mark.long)])
def test_torus_plans_match_separate_graphs(model, overlap):
    device = torus(4, 3)
    result = cg.plan.search(model, hardware=device, **FEW, zero=0, sequence=False, overlap=overlap)
    # inner axes fill x with 4 devices and then y with 3; x with part of y, or part of x alone, has no ring
    assert {(p.tp, p.dp, p.pp) for p in result.rows} == {
        (1, 12, 1), (4, 3, 1), (12, 1, 1), (4, 1, 3), (1, 4, 3)
    }  # fmt: skip
    for plan in result.rows[:: len(result.rows) // 4]:
        peak, seconds = alone(model, plan, device, overlap)
        assert plan.memory == peak, plan
        assert plan.seconds == pytest.approx(seconds, rel=1e-9), plan


def test_notes_name_degrees_left_out(model):
    result = cg.plan.search(model, hardware=torus(4, 3), **FEW, zero=0, tp=(3, 4), pp=1)
    assert {p.tp for p in result.rows} == {4}
    (note,) = result.notes
    assert note.startswith("meshes left out: 1, such as: time of 'dp': 4 ranks that are 3 apart, expected whole dim")
    assert "note  meshes left out: 1" in str(result)
    nothing = cg.plan.search(model, hardware=torus(4, 2), **FEW, zero=0)
    assert nothing.best is None
    assert "the torus joins at most 8 devices" in nothing.notes[0]


def test_network_with_too_few_devices_has_no_plans(model):
    result = cg.plan.search(
        model, hardware="h100-sxm", network="meta-24k", **{**FEW, "devices": 49152, "B": 49152}, zero=0
    )
    assert result.best is None
    assert "but the aggregation joins at most 24,576 devices" in result.notes[0]


def test_overlap_in_a_torus_is_refused(model):
    with pytest.raises(cg.UnsupportedError, match="search: overlap 'streams' in a torus, expected none or ideal"):
        cg.plan.search(model, hardware=torus(4, 3), **FEW, overlap="streams")
