"""Pipelines in a plan search: every stage against a separately derived graph with its own depth."""

import pytest

import costgraph as cg

B, S, D, F, V, L = cg.dims("B S D F V L")
SIZES = {"S": 52, "D": 104, "F": 208, "V": 182}
PLAIN = {"overlap": "none", "reduce_every_microbatch": True}
FEW = {"devices": 52, "hardware": "h100-sxm", "precision": "bf16", "B": 52, "checkpoint": "none", **SIZES, **PLAIN}


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
    """Return the number of layers per stage, as even as possible."""
    most = -(-depth // pp)
    every = [most] * pp
    for at in [pp - 1, 0, *range(pp - 2, 0, -1)][: most * pp - depth]:
        every[at] -= 1
    assert sum(every) == depth
    return every


def alone(model, plan, depth, overlap="none", **options):
    """Return bytes of the first, middle and last stage, and seconds, derived with the plan's own sizes."""
    m, every = plan.accumulate, layers_of(depth, plan.pp)
    step = cg.training_step(model, precision=plan.precision, accumulate=m)
    split = {"dp": plan.dp, "tp": plan.tp, "zero": plan.zero, "sequence": plan.sequence, "offload": plan.offload}
    split |= {"pp": plan.pp, "micro_batches": m, "schedule": plan.schedule}
    split |= {"virtual_stages": plan.virtual_stages} if len(set(every)) == 1 else {"layers": every}
    rank = cg.parallelize(step, **split, **options)
    sizes = {**SIZES, "B": plan.micro_batch * plan.dp, "L": depth}
    peaks = []
    for stage in rank.stages:
        own = {name: n for name, n in sizes.items() if name in {s.name for s in cg.peak_memory(stage).free_symbols}}
        peaks.append(cg.peak_memory(stage, **own))
    known = {n: k for n, k in sizes.items() if n != "L" or len(set(every)) == 1}
    stages = (peaks[0], *([max(peaks[1:-1])] if plan.pp > 2 else []), peaks[-1])
    return stages, cg.seconds(rank, "h100-sxm", overlap=overlap, **known)


def same(model, plan, depth, **options):
    stages, seconds = alone(model, plan, depth, **options)
    assert plan.stages == stages, plan
    assert plan.memory == max(plan.stages)
    assert plan.seconds == pytest.approx(seconds, rel=1e-9), plan
    if "overlap" not in options:
        assert sum(plan.parts.values()) == pytest.approx(plan.seconds, rel=1e-9)
    assert "send over pp" in plan.parts
    # with dualpipe on two ranks, each rank has both stages and neither waits
    assert "idle" in plan.parts or (plan.schedule, plan.pp) == ("dualpipe", 2)


@pytest.mark.parametrize("depth", [7, 8, 13])
def test_stage_plans_match_separate_graphs(model, depth):
    result = cg.plan.search(model, **FEW, L=depth, pp=(2, 4), zero=(0, 1), tp=(1, 13), sequence=True)
    assert {p.pp for p in result.rows} == {2, 4}
    assert all(p.dp * p.tp * p.pp == 52 and p.dp * p.micro_batch * p.accumulate == 52 for p in result.rows)
    for plan in result.rows[:: len(result.rows) // 5]:
        same(model, plan, depth)


@pytest.mark.parametrize("zero", [1, 0, 2, 3])
def test_once_reduced_stage_gradients_match_separate_graphs(model, zero):
    few = {**FEW, "L": 7, "pp": 2, "zero": zero, "tp": (1, 13), "sequence": True, "precision": "bf16-mixed"}
    result = cg.plan.search(model, **{**few, "reduce_every_microbatch": False})
    assert {p.dp for p in result.rows} == {2, 26}
    for plan in result.rows[:: len(result.rows) // 3]:
        same(model, plan, 7, reduce_every_microbatch=False)


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_overlapped_stage_plans_match_separate_graphs(model, pp):
    few = {**FEW, "L": 7, "pp": pp, "zero": 1, "tp": 13, "devices": 26 * pp, "sequence": True, "overlap": "streams"}
    result = cg.plan.search(model, **few)
    for plan in result.rows[:: len(result.rows) // 3]:
        same(model, plan, 7, overlap="streams")


#: Chunks per rank, ranks, and layers per stage; 0 if the stages do not divide the layers.
ORDERS = {
    "gpipe": {(1, 2), (1, 4)}, "interleaved": {(2, 2), (3, 2), (6, 2), (3, 4)}, "zb-h1": {(1, 2), (1, 4)},
    "interleaved-zb": {(2, 2), (3, 2), (6, 2), (3, 4)}, "zbv": {(2, 2)}, "dualpipev": {(2, 2)},
    "dualpipe": {(2, 2), (2, 4)},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("interleaved", "zbv") else pytest.mark.long) for n in ORDERS]
)
def test_schedule_plans_match_separate_graphs(model, name):
    few = {**FEW, "B": 208, "L": 12, "zero": 1, "tp": 13, "pp": (2, 4), "sequence": True, "micro_batch": 1}
    result = cg.plan.search(model, **few, schedule=name)
    assert {(p.virtual_stages, p.pp) for p in result.rows} == ORDERS[name]
    assert {p.schedule for p in result.rows} == {name}
    for plan in result.rows[:: max(1, len(result.rows) // 6)]:
        same(model, plan, 12)


@pytest.mark.parametrize("name", [pytest.param("gpipe", marks=pytest.mark.long), "zb-h1"])
def test_uneven_stages_under_other_schedules(model, name):
    few = {**FEW, "L": 13, "zero": 0, "tp": 1, "sequence": True, "micro_batch": 1, "devices": 8, "B": 32}
    result = cg.plan.search(model, **few, pp=8, schedule=name)
    assert result.rows
    for plan in result.rows:
        same(model, plan, 13)


@pytest.mark.parametrize("pp", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_megatron_plans_match_separate_graphs(model, pp):
    few = {
        **FEW,
        "devices": 26 * pp,  # two ranks per stage share the batch, as otherwise there is nothing to shard
        "B": 104,
        "L": 12,
        "tp": 13,
        "pp": pp,
        "sequence": True,
        "micro_batch": 2,
        "precision": "megatron-bf16",
    }
    result = cg.plan.search(model, **{**few, "reduce_every_microbatch": None}, system="megatron")
    assert {p.zero for p in result.rows} == {0, 1}
    for plan in result.rows:
        fused = cg.AdamW(implementation="fused")
        step = cg.training_step(model, precision="megatron-bf16", accumulate=plan.accumulate, optimizer=fused)
        split = {"dp": plan.dp, "tp": plan.tp, "zero": plan.zero, "sequence": plan.sequence, "system": "megatron"}
        rank = cg.parallelize(step, **split, pp=pp, micro_batches=plan.accumulate if pp > 1 else 1)
        sizes = {**SIZES, "B": plan.micro_batch * plan.dp, "L": 12}
        assert plan.memory == cg.peak_memory(rank, **sizes), plan
        assert plan.seconds == pytest.approx(cg.seconds(rank, "h100-sxm", **sizes), rel=1e-9), plan


#: For a long sequence, one stage becomes faster than four.
TIED = {**FEW, "L": 8, "zero": 0, "pp": (1, 2, 4), "tp": 1, "B": 104}


def test_ties_prefer_fewest_stages_then_fastest(model):
    result = cg.plan.search(model, **{**TIED, "S": 2652})
    left, turned = [*result.rows], 0
    # the first plan is the fastest with the fewest stages, among all within 1 % of the fastest remaining one
    while left:
        fastest = min(p.seconds for p in left)
        tie = [p for p in left if p.seconds <= 1.01 * fastest]
        assert left[: len(tie)] == sorted(tie, key=lambda p: (p.pp, p.seconds, p.memory))
        turned += left[0].seconds > fastest
        left = left[len(tie) :]
    assert turned
    assert result.best is result.rows[0]
    front = result.pareto().rows
    assert front[0] == result.best
    for plan in result.rows:
        assert any(p.seconds <= 1.01 * plan.seconds and p.memory <= plan.memory for p in front)


def test_crossovers_break_ties_like_search(model):
    result = cg.plan.search(model, **TIED)
    before, row = cg.plan.crossovers(result, "S", (52 * 40, 52 * 60), multiple_of=52).rows
    assert (before.plan.pp, row.plan.pp) == (4, 1)
    ahead, at = (cg.plan.search(model, **{**TIED, "S": size}) for size in (row.size - 52, row.size))
    assert (ahead.best.pp, at.best.pp) == (4, 1)
    assert row.seconds == pytest.approx(at.best.seconds, rel=1e-9)
    assert at.best.seconds > min(p.seconds for p in at.rows)
