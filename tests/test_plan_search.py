"""Plan search: vectorized formulas against single plans, limits, and refusals."""

import csv
import json
import pickle
import re
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.analysis.training import goes_over
from costgraph.cli import main
from costgraph.hardware.units import format_bytes
from costgraph.plan import (
    strategy_search,
    strategy_templates,
)
from costgraph.plan.strategy_templates import PlanFamily

B, S, D, F, V = cg.dims("B S D F V")
SIZES = {"S": 52, "D": 104, "F": 208, "V": 182}
#: Reduce gradients in every micro-batch without overlap, which is the time of the per-rank graph alone.
PLAIN = {"overlap": "none", "reduce_every_microbatch": True}
MANY = {"devices": 26, "hardware": "h100-sxm", "B": 78, "precision": "bf16", **SIZES, **PLAIN}
FEW = {**MANY, "zero": (1, 3), "checkpoint": "every-block"}


EVERY_BLOCK = cg.every_block()


def lm(**defaults):
    with cg.Graph("lm", dtype="bf16") as g:
        table = g.param("tokens/table", (V, D))
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), table)

        def block(x):
            with cg.scope("mlp"):
                h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
                return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        x = cg.repeat(3, block, x, name="layers")
        g.output(cg.einsum(x, table, "b s d, v d -> b s v"))
        g.loss, g.defaults = "cross_entropy", defaults
    return g


@pytest.fixture(scope="module")
def model():
    return lm()


@pytest.fixture(scope="module")
def found(model):
    return cg.plan.search(model, **MANY, sequence=True, checkpoint="none")


@pytest.fixture(scope="module")
def few(model):
    return cg.plan.search(model, **FEW)


def mean(logits):
    return cg.reduce(logits, "b s v -> ", "mean")


OTHERS = [
    {"devices": 3, "B": 6}, {"overlap": "ideal"}, {"S": 26}, {"precision": "fp32"}, {"loss": mean},
    {"optimizer": cg.SGD()}, {"hardware": "a100-80-sxm"}, {"reduce_every_microbatch": False, "accumulate": 2, "B": 8},
]  # fmt: skip


def test_search_cache_is_reused_only_for_same_question(monkeypatch):
    steps = []
    monkeypatch.setattr(
        strategy_templates, "training_step", lambda *a, **k: steps.append(a) or cg.training_step(*a, **k)
    )
    model, one = lm(), {**FEW, "devices": 2, "B": 4, "zero": 1, "tp": 1, "accumulate": 1, "checkpoint": "none"}
    first, made = cg.plan.search(model, **one), len(steps)
    assert cg.plan.search(model, **one).rows == first.rows
    assert len(steps) == made > 0
    for other in OTHERS:
        assert cg.plan.search(model, **{**one, **other}).rows == cg.plan.search(lm(), **{**one, **other}).rows, other
    assert cg.plan.search(model, **one).rows == first.rows
    with model:
        model.outputs[0] = cg.relu(model.outputs[0])
    changed = lm()
    with changed:
        changed.outputs[0] = cg.relu(changed.outputs[0])
    assert cg.plan.search(model, **one).rows == cg.plan.search(changed, **one).rows


def alone(model, plan, overlap="none", precision="bf16", sizes=SIZES, **options):
    """Return peak bytes and seconds of a plan, derived with its own sizes and degrees."""
    how = {"none": None, "every-block": EVERY_BLOCK}[plan.checkpoint]
    step = training_step(model, precision=precision, checkpoint=how, accumulate=plan.accumulate)
    rank = cg.parallelize(step, dp=plan.dp, tp=plan.tp, zero=plan.zero, sequence=plan.sequence, **options)
    sizes = {**sizes, "B": plan.micro_batch * plan.dp}
    return cg.peak_memory(rank, **sizes), cg.seconds(rank, "h100-sxm", overlap=overlap, **sizes)


def of_each_kind(rows):
    """Return the first plan of each kind of graph: degrees of 1 and of more, ZeRO, split sequences, checkpoints."""
    kinds = {}
    for p in rows:
        kinds.setdefault((p.dp > 1, p.tp > 1, p.accumulate > 1, p.zero, p.sequence, p.checkpoint, p.offload), p)
    return [*kinds.values()]


def test_plans_match_separately_derived_graphs(model, found, few):
    assert {(p.dp, p.tp) for p in found.rows} == {(26, 1), (13, 2), (2, 13), (1, 26)}
    assert {p.zero for p in found.rows} == {0, 1, 2, 3}
    for plan in (*of_each_kind(found.rows), *few.rows[::9]):
        peak, taken = alone(model, plan)
        assert plan.memory == peak, plan
        assert plan.seconds == pytest.approx(taken, rel=1e-9), plan
        assert sum(plan.parts.values()) == pytest.approx(taken, rel=1e-9)
        assert plan.throughput == pytest.approx(78 * 52 / taken, rel=1e-9)
        assert plan.dp * plan.micro_batch * plan.accumulate == 78


def test_models_without_tokens_are_searched_by_samples():
    C, R = cg.dims("C R")
    with cg.Graph("convnet", dtype="bf16") as g:
        x = cg.relu(cg.nn.conv(g.input("images", (B, C, R, R)), "b c h w -> b d h w", window=3, padding=1, d=D))
        g.output(cg.linear(cg.reduce(x, "b d h w -> b d", "mean"), "b d -> b v", v=V, name="head"))
        g.loss = "cross_entropy"
    sizes = {"C": 3, "R": 17, "D": 26, "V": 13}
    result = cg.plan.search(g, devices=2, hardware="h100-sxm", precision="bf16", tp=1, zero=0, B=38, **sizes, **PLAIN)
    assert result.unit == "samples"
    assert "  samples/s  " in str(result)
    assert {(p.dp, p.accumulate) for p in result.rows} == {(2, 1), (2, 19)}
    for plan in result.rows:
        peak, taken = alone(g, plan, sizes=sizes)
        assert (plan.memory, plan.seconds) == (peak, pytest.approx(taken, rel=1e-9))
        assert plan.throughput == pytest.approx(38 / taken, rel=1e-9)


def test_throughput_unit_is_tokens_for_equal_length_inputs():
    inputs = {
        "tokens": [("tokens", (B, S), "int64"), ("types", (B, S), "int64")],
        "samples": [("source", (B, F), "int64"), ("tokens", (B, S), "int64")],
        "samples of images": [("images", (B, F, D, D), "bf16"), ("tokens", (B, S), "int64")],
        "samples of labels": [("ids", (B,), "int64")],
    }
    for name, given in inputs.items():
        with cg.Graph("g") as g:
            for t in given:
                g.input(t[0], t[1], dtype=t[2])
        amount, unit = goes_over(g, poly(B))
        assert unit == name.split()[0]
        assert amount == poly(B * S if unit == "tokens" else B)


def test_plans_are_sorted_and_explain_slowdowns(found):
    times = [p.seconds for p in found.rows]
    assert times == sorted(times)
    assert found.best is found.rows[0]
    assert found.best.why == ""
    for before, plan in pairwise(found.rows):
        grown = {name: t - before.parts.get(name, 0) for name, t in plan.parts.items()}
        name = max(grown, key=grown.get)
        # a tie in time is broken by memory
        assert plan.why.endswith(name) or plan.seconds == pytest.approx(before.seconds, rel=1e-12)
        assert plan.parts[plan.bound] == max(plan.parts.values())


def test_pareto_front_is_not_dominated(found):
    front = found.pareto().rows
    for plan in found.rows:
        better = [p for p in front if p.seconds <= plan.seconds and p.memory <= plan.memory]
        assert better
        assert (plan.seconds, plan.memory) in {(p.seconds, p.memory) for p in front} or any(
            p.seconds < plan.seconds or p.memory < plan.memory for p in better
        )
    assert all(b.memory < a.memory for a, b in pairwise(front))


@pytest.mark.parametrize(
    ("limit", "holds"),
    [
        ({"dp": 13}, lambda p: p.dp == 13),
        ({"tp": (1, 2)}, lambda p: p.tp in (1, 2)),
        ({"zero": [3]}, lambda p: p.zero == 3),
        ({"sequence": True}, lambda p: p.sequence),
        ({"sequence": False}, lambda p: not p.sequence),
        ({"micro_batch": range(1, 3)}, lambda p: p.micro_batch in (1, 2)),
        ({"accumulate": 3}, lambda p: p.accumulate == 3),
        ({"micro_batch": 3, "tp": 2}, lambda p: p.micro_batch == 3),
    ],
)
def test_limits_filter_plans(model, few, limit, holds):
    less = cg.plan.search(model, **{**FEW, **limit})
    assert less.rows
    assert all(map(holds, less.rows))
    assert {(p.seconds, p.memory) for p in less.rows} <= {(p.seconds, p.memory) for p in few.rows}
    assert less.best.seconds >= few.best.seconds


def test_plans_beyond_memory_are_left_out(model, few):
    limit = sorted(p.memory for p in few.rows)[len(few.rows) // 2]
    less = cg.plan.search(model, **FEW, memory=limit)
    assert [(p.seconds, p.memory) for p in less.rows] == [(p.seconds, p.memory) for p in few.rows if p.memory <= limit]
    assert less.tried == few.tried
    nothing = cg.plan.search(lm(), **{**FEW, "checkpoint": ("none", "every-block", "from-start")}, memory=1)
    assert (nothing.best, nothing.tried) == (None, 3 * few.tried)
    least = (2 + 2 + 8) * cg.param_count(model, **SIZES) / 26  # weights, gradients and two moments, of 26 ranks
    (note,) = nothing.notes
    assert note == f"no plan fits: {format_bytes(least)} or more of 1 B"
    assert f"note  {note}" in str(nothing)
    assert len(nothing.family.derived.steps) == 1  # recomputation does not change the states
    with pytest.raises(cg.FormatError, match="--checkpoint 'some': expected none, every-block"):
        cg.plan.search(model, **{**FEW, "checkpoint": "some"}, memory=1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tp": 3, "devices": 3}, "refused: V=182: axis 0 of 'tokens/table' has size V/3 = 182/3, expected a positive"),
        (
            {"dp": 3, "devices": 3, "zero": 3},
            "refused: D=104, dp=3: axis 1 of 'tokens/table' has size D/dp = 104/3",
        ),
        ({"tp": 3, "devices": 26}, "no plan: no degrees within the limits divide the devices and the batch"),
        ({"dp": 5, "devices": 5}, "no plan: no degrees within the limits divide the devices and the batch"),
    ],
)
def test_notes_explain_missing_plans(given, why):
    asked = {**FEW, "checkpoint": "none", "micro_batch": 1, **given}
    for executor in (None, Elsewhere()):
        result = cg.plan.search(lm(V=182), **asked, executor=executor)
        (note,) = result.notes
        assert result.rows == ()
        assert re.match(why, note)


@pytest.mark.parametrize(("overlap", "limits"), [("ideal", {}), ("streams", {"tp": (1, 2), "accumulate": (1, 3, 39)})])
def test_overlapped_collectives_are_not_slower(model, few, overlap, limits):
    beside = cg.plan.search(model, **{**FEW, **limits, "overlap": overlap})
    assert beside.best.seconds <= few.best.seconds
    for plan in beside.rows[:: 7 if overlap == "ideal" else 3]:
        assert plan.seconds == pytest.approx(alone(model, plan, overlap)[1], rel=1e-9)


def test_indivisible_axis_falls_back_to_another():
    odd = {"V": 181, "D": 104}  # 26 ranks divide only the width of the table, 3 ranks neither axis
    model, few = lm(**odd), {**MANY, **odd, "tp": 1, "checkpoint": "none", "zero": (0, 3), "micro_batch": 3}
    result = cg.plan.search(model, **few)
    assert {p.zero for p in cg.plan.search(model, **{**few, "devices": 3, "micro_batch": 1}).rows} == {0}
    assert [p.zero for p in result.rows] == [0, 3]
    assert cg.plan.search(model, **few, executor=Elsewhere()).rows == result.rows
    with pytest.raises(cg.BindingError, match="'tokens/table' has size V/26"):
        alone(lm(), result.rows[1], sizes={**SIZES, **odd})
    for plan in result.rows:
        peak, taken = alone(model, plan, sizes={**SIZES, **odd})
        assert plan.memory == peak, plan
        assert plan.seconds == pytest.approx(taken, rel=1e-9), plan
    later = cg.plan.crossovers(result, "S", (52, 53))
    assert later.rows[0].plan == result.best
    assert later.rows[0].seconds == pytest.approx(result.best.seconds, rel=1e-9)


def test_once_reduced_gradients_match_separate_graphs(model):
    limits = {**FEW, "precision": "bf16-mixed", "zero": (0, 1, 2, 3), "tp": 2, "sequence": True}
    once = cg.plan.search(model, **{**limits, "reduce_every_microbatch": False})
    assert {p.zero for p in once.rows if p.accumulate > 1} == {0, 1, 2, 3}
    for plan in of_each_kind(once.rows):
        peak, taken = alone(model, plan, precision="bf16-mixed", reduce_every_microbatch=False)
        assert plan.memory == peak, plan
        assert plan.seconds == pytest.approx(taken, rel=1e-9), plan


def test_sharded_gradients_are_reduced_per_micro_batch_by_default(model):
    limits = {**FEW, "zero": (1, 2), "tp": 1, "accumulate": 3, "checkpoint": "none"}
    each, once, default = (
        {p.zero: p.seconds for p in cg.plan.search(model, **{**limits, "reduce_every_microbatch": how}).rows}
        for how in (True, False, None)
    )
    assert once[1] < each[1]
    assert once[2] < each[2]
    assert default == {1: once[1], 2: each[2]}


def test_deferred_accumulation_matches_separate_graphs(model):
    limits = {**MANY, "precision": "megatron-bf16", "zero": 1, "tp": 1, "sequence": False, "checkpoint": "none"}
    at_once, found = (
        cg.plan.search(model, **{**limits, "reduce_every_microbatch": False}, defer_accumulation=wait).rows
        for wait in (False, True)
    )
    for plan in found[::2]:
        step = cg.training_step(model, precision="megatron-bf16", accumulate=plan.accumulate, defer_accumulation=True)
        rank, sizes = (
            cg.parallelize(step, dp=plan.dp, zero=1, reduce_every_microbatch=False),
            {**SIZES, "B": plan.micro_batch * 26},
        )
        assert plan.memory == cg.peak_memory(rank, **sizes), plan
        assert plan.seconds == pytest.approx(cg.seconds(rank, "h100-sxm", **sizes), rel=1e-9), plan
    assert max(p.memory for p in found) > max(p.memory for p in at_once)


@pytest.mark.parametrize("away", ["parameters+optimizer", "activations"])
def test_offloaded_plans_match_separate_graphs(model, few, away):
    limits = {**FEW, "zero": 3, "tp": 2, "sequence": True, "memory": 1e12}
    result = cg.plan.search(model, **limits, offload=("none", away))
    names = tuple(sorted(away.split("+")))
    assert {p.offload for p in result.rows} == {(), names}
    for plan in of_each_kind(p for p in result.rows if p.offload):
        step = training_step(model, precision="bf16", checkpoint=EVERY_BLOCK, accumulate=plan.accumulate)
        split = {"dp": plan.dp, "tp": plan.tp, "zero": 3, "sequence": plan.sequence, "offload": names}
        rank, sizes = cg.parallelize(step, **split), {**SIZES, "B": plan.micro_batch * plan.dp}
        assert plan.memory == cg.peak_memory(rank, **sizes), plan
        assert plan.seconds == pytest.approx(cg.seconds(rank, "h100-sxm", **sizes), rel=1e-9), plan
        assert "memory traffic" in plan.parts


def test_search_over_precisions_equals_separate_searches(model):
    several = ("bf16", "bf16-mixed", {"matmul": "bf16"}, {"matmul": "fp16"})
    limits = {**FEW, "zero": 1, "tp": 1, "accumulate": 3}
    result = cg.plan.search(model, **{**limits, "precision": several})
    rows = {
        name: [p for p in result.rows if p.precision == name] for name in ("bf16", "bf16-mixed", "custom", "custom 2")
    }
    assert sum(map(len, rows.values())) == len(result.rows)
    for (name, own), given in zip(rows.items(), several, strict=True):
        alone = cg.plan.search(model, **{**limits, "precision": given}).rows
        assert [replace(p, why="", precision="") for p in own] == [replace(p, why="", precision="") for p in alone], (
            name
        )
    assert "precision" in str(result)


@pytest.mark.long
def test_tp_beyond_key_value_heads_is_searched():
    zoo = load("llama-3-8b")
    result = cg.plan.search(zoo, devices=16, hardware="h100-sxm", B=2, S=64, L=2, zero=0, checkpoint="none")
    assert {p.tp for p in result.rows} == {8, 16}  # 8 heads of keys and values, two ranks with each
    plan = next(p for p in result.rows if p.tp == 16 and p.sequence and p.accumulate == 1)
    rank = cg.parallelize(cg.training_step(zoo), tp=16, sequence=True)
    assert plan.memory == cg.peak_memory(rank, B=2, S=64, L=2)
    seconds = cg.seconds(rank, "h100-sxm", overlap="streams", B=2, S=64, L=2)  # as torch, the default `system`
    assert plan.seconds == pytest.approx(seconds, rel=1e-9)


def test_float_input_graph_counts_samples():
    with cg.Graph("g") as g:
        g.output(cg.linear(g.input("x", (B, 5)), "b d -> b f", f=7))
        g.loss = "mean_squared_error"
    result = cg.plan.search(g, devices=2, hardware="h100-sxm", B=2)
    assert result.unit == "samples"
    assert [p.throughput * p.seconds for p in result.rows] == pytest.approx([2] * len(result.rows))
    assert result.rows


def test_table_is_short_and_frame_is_complete(found):
    text = str(found)
    assert len(text.split("\n")) <= 40
    assert re.search(rf"fit +{len(found.rows)} of {found.tried} plans", text)
    assert "<table>" in found._repr_html_()
    frame = found.to_pandas()
    assert len(frame) == len(found.rows)
    assert frame.seconds.tolist() == [p.seconds for p in found.rows]
    assert repr(found) == f"Search('lm' on 26 h100-sxm, {len(found.rows)} plans)"


@each(
    ("given", "says"),
    [
        ({"devices": 0}, "search: devices=0: expected a positive integer"),
        ({"devices": 2**33}, "expected at most 4294967296 of each"),
        ({"B": None}, "search: B=None: expected a positive integer"),
        ({"pp": 2}, "pp"),
        ({"tp": ()}, "search: tp: no values, expected 1 to"),
        ({"tp": "8"}, "search: tp='8': expected a positive integer"),
        ({"zero": 4}, "search: zero: 4, expected one of 0, 1, 2, 3, or several"),
        ({"zero": True}, "search: zero: True, expected one of 0, 1, 2, 3"),
        ({"sequence": 1}, "search: sequence: 1, expected one of False, True"),
        ({"checkpoint": cg.every_block()}, "search: checkpoint: .* expected a text such as 'every-block'"),
        ({"checkpoint": "some"}, "--checkpoint"),
        ({"schedule": "2f2b"}, "search: schedule: '2f2b', expected one of gpipe, 1f1b, interleaved"),
        ({"system": "megatron", "zero": 2}, "search: zero: 2, expected one of 0, 1, or several"),
        ({"virtual_stages": 0}, "search: virtual_stages=0: expected a positive integer"),
        ({"offload": "gradients"}, "search: offload: 'gradients', expected one of optimizer, parameters, activations"),
        ({"offload": 3}, "search: offload: 3, expected a text such as 'none' or 'optimizer\\+parameters'"),
        ({"precision": ("bf16", "bf17")}, "bf17"),
        ({"overlap": "some"}, "search: overlap 'some', expected one of none, ideal, streams"),
        ({"system": "deepspeed"}, "search: system is 'deepspeed', expected torch or megatron"),
        ({"defer_accumulation": 1}, "search: defer_accumulation is 1, expected True or False"),
        (
            {"defer_accumulation": True},
            "defer_accumulation needs gradients in a wider format than they are computed in",
        ),
        ({"reduce_every_microbatch": "never"}, "search: reduce_every_microbatch is 'never', expected True or False"),
        ({"memory": -1}, "memory"),
    ],
)
def test_invalid_limits_are_refused(model, given, says):
    with pytest.raises(cg.CostGraphError, match=says):
        cg.plan.search(model, **{**MANY, **given})


def test_missing_size_is_named(model):
    with pytest.raises(cg.BindingError, match="search: no size of B; expected the batch size of a step"):
        cg.plan.search(model, devices=2, hardware="h100-sxm", S=52)
    with pytest.raises(cg.BindingError, match="search: graph 'lm' needs sizes for F, S, V, expected numbers"):
        cg.plan.search(model, devices=2, hardware="h100-sxm", B=4, D=104)
    with pytest.raises(cg.BindingError, match="search: graph 't5-small' needs sizes for M, expected numbers"):
        cg.plan.search(load("t5-small"), devices=2, hardware="h100-sxm", B=4, S=52)


def test_command_prints_search_result(model, capsys, tmp_path):
    cg.save(model, tmp_path / "lm.json")
    words = "--devices 26 --hardware h100-sxm --precision bf16 --tp 1,2 --zero 0,3 --checkpoint none --overlap none"
    words += " --reduce-every-microbatch --sequence yes --accumulate 1"
    sizes = [f"{name}={n}" for name, n in {"B": 78, **SIZES}.items()]
    own = {"tp": (1, 2), "zero": (0, 3), "checkpoint": "none", "sequence": True, "accumulate": 1}
    expected = cg.plan.search(model, **MANY, **own)
    assert len({(p.tp, p.zero) for p in expected.rows}) == len(expected.rows) == 4
    for form, read in (("--json", json.loads), ("--csv", lambda text: list(csv.DictReader(text.splitlines())))):
        assert main(["search", str(tmp_path / "lm.json"), *words.split(), *sizes, form, "-"]) == 0
        rows = read(capsys.readouterr().out)
        rows = rows["plans"] if form == "--json" else rows
        assert [float(r["seconds"]) for r in rows] == [p.seconds for p in expected.rows]
    assert main(["search", str(tmp_path / "lm.json"), *words.split(), *sizes, "--pareto"]) == 0
    assert capsys.readouterr().out == f"{expected.pareto()}\n"
    assert main(["search", str(tmp_path / "lm.json"), *words.split(), "--sequence", "maybe"]) == 2
    assert "--sequence 'maybe': expected yes or no" in capsys.readouterr().err
    assert main(["search", str(tmp_path / "lm.json"), *words.split(), "tp=2"]) == 2
    assert "tp=2: search has an option with this name, expected --tp" in capsys.readouterr().err


def test_underivable_open_degrees_fall_back_to_numeric_ones(model, monkeypatch):
    limits = {**FEW, "zero": 1, "accumulate": 3, "tp": (1, 2), "sequence": True}
    expected, derived = cg.plan.search(model, **limits), PlanFamily.forms

    def only_bound(family, structure):
        if structure.dp is None:
            raise cg.ShapeError("dp is open")
        return derived(family, structure)

    monkeypatch.setattr(PlanFamily, "forms", only_bound)
    result = cg.plan.search(model, **limits)
    assert [p.memory for p in result.rows] == [p.memory for p in expected.rows]
    assert [p.seconds for p in result.rows] == pytest.approx([p.seconds for p in expected.rows], rel=1e-12)
    assert (result.notes, expected.notes) == (("by single dp, ZeRO 1: dp is open",), ())
    assert "note  by single dp" in str(result)


class Elsewhere(Executor):
    """Executor that only pickles calls and results, as a process pool does."""

    def submit(self, function, /, *given, **named):
        out = Future()
        function, given, named = pickle.loads(pickle.dumps((function, given, named)))
        try:
            out.set_result(pickle.loads(pickle.dumps(function(*given, **named))))
        except Exception as error:
            out.set_exception(pickle.loads(pickle.dumps(error)))
        return out


@pytest.mark.parametrize("kind", ["pickled", pytest.param("processes", marks=pytest.mark.long)])
def test_executor_gives_same_plans(model, few, kind):
    limits = {**FEW, "sequence": True} if kind == "pickled" else FEW
    with Elsewhere() if kind == "pickled" else ProcessPoolExecutor(2) as executor:
        result = cg.plan.search(model, **limits, executor=executor)
    few = cg.plan.search(model, **limits)
    assert result.rows == few.rows
    assert (result.tried, result.notes) == (few.tried, few.notes)


@pytest.mark.long
def test_dask_gives_same_plans(model, few):
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    # dask workers are separate processes that cannot import tests, so the model belongs to no module
    with distributed.LocalCluster(processes=True, **options) as cluster, distributed.Client(cluster) as client:
        result = cg.plan.search(model, **FEW, executor=client.get_executor())
    assert result.rows == few.rows


def test_executor_errors_are_propagated(model):
    limits = {**FEW, "fallback": {"tf32": "bf16"}, "checkpoint": "selective:nowhere"}
    texts = []
    for executor in (None, Elsewhere()):
        with pytest.raises(cg.CostGraphError) as caught:
            cg.plan.search(model, **limits, executor=executor)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("degrees", [{"cp": 2, "ep": 2}, {"cp": 1, "ep": 2}, {"cp": 2, "ep": 1}], ids=str)
def test_context_and_expert_parallel_plans_match_separate_graphs(degrees):
    mixture = load("mixtral-8x7b")
    sizes = {"D": 16, "H": 4, "G": 2, "K": 4, "Fe": 12, "L": 2, "V": 52, "E": 4, "k": 2, "S": 24}
    asked = {
        "devices": 8,
        "hardware": "h100-sxm",
        "B": 16,
        "precision": "bf16",
        "pp": 1,
        "zero": 1,
        "tp": (1, 2),
        "sequence": True,
        **PLAIN,
    }
    result = cg.plan.search(mixture, checkpoint="none", **asked, **degrees, **sizes)
    assert {(p.cp, p.ep) for p in result.rows} == {(degrees["cp"], degrees["ep"])}
    assert all(p.dp * p.tp * p.cp * p.ep == 8 for p in result.rows)
    for plan in of_each_kind(result.rows):
        step = training_step(mixture, precision="bf16", accumulate=plan.accumulate)
        split = {"dp": plan.dp, "tp": plan.tp, "zero": plan.zero, "sequence": plan.sequence}
        rank, at = cg.parallelize(step, **split, **degrees), {**sizes, "B": plan.micro_batch * plan.dp * plan.ep}
        assert plan.memory == cg.peak_memory(rank, **at), plan
        assert plan.seconds == pytest.approx(cg.seconds(rank, "h100-sxm", **at), rel=1e-9), plan


def test_indivisible_degrees_are_skipped_before_derivation(monkeypatch):
    asked, derived, forms = (
        {**MANY, "devices": 6, "B": 12, "cp": None, "zero": (0, 3), "sequence": True},
        [],
        PlanFamily.forms,
    )
    monkeypatch.setattr(PlanFamily, "forms", lambda family, s: derived.append(s) or forms(family, s))
    found, few = cg.plan.search(lm(), **asked, checkpoint="none"), len(derived)
    monkeypatch.setattr(strategy_search, "whole", lambda *_: True)
    every = cg.plan.search(lm(), **asked, checkpoint="none")
    assert (found.rows, found.tried, found.notes) == (every.rows, every.tried, every.notes)
    assert {p.cp for p in found.rows} == {1, 2}  # divisors of 52 positions
    assert few < 0.6 * (len(derived) - few)


@pytest.mark.long
def test_crossovers_match_repeated_searches():
    zoo = load("llama-3-8b")
    few = {
        "devices": 16,
        "hardware": "h100-sxm",
        "B": 16,
        "L": 3,
        "zero": (0, 3),
        "sequence": True,
        "memory": 1e12,
        **PLAIN,
    }
    few |= {"checkpoint": "none", "accumulate": 1, "tp": (1, 4), "pp": 1, "precision": "bf16"}
    result = cg.plan.search(zoo, S=1024, **few)
    rows = cg.plan.crossovers(result, "S", (8, 1 << 17), multiple_of=8).rows
    assert rows[0].size == 8
    assert len(rows) > 1
    for before, row in pairwise(rows):
        at, ahead = (cg.plan.search(zoo, S=size, **few).best for size in (row.size, row.size - 8))
        for plan, best in ((row.plan, at), (before.plan, ahead)):
            assert (plan.dp, plan.tp, plan.zero, plan.micro_batch) == (best.dp, best.tp, best.zero, best.micro_batch)
        assert (row.seconds, row.memory) == (pytest.approx(at.seconds, rel=1e-9), at.memory)


def test_crossovers_without_fitting_plan_have_none(model):
    few = cg.plan.search(model, **{**FEW, "zero": 3, "tp": (1, 2), "sequence": True})
    tight = replace(few, limit=few.rows[0].memory)
    crossovers = cg.plan.crossovers(tight, "S", (52, 52 * 64), multiple_of=52)
    rows = crossovers.rows
    assert rows[0].plan is not None
    assert rows[-1].plan is None
    assert rows[-1].seconds == float("inf")
    assert "from S" in str(crossovers)


@each(
    ("given", "says"),
    [
        (("B", (1, 9)), "crossovers: 'B' had no size in the search, expected one of D, F, S, V"),
        (("S", (5, 6)), "crossovers: no multiple of 4 from 5 to 6"),
        (("S", 7), "crossovers: within 7, expected the smallest and largest size"),
        (("S", (0, 7)), "crossovers: within=0: expected a positive integer"),
    ],
)
def test_invalid_crossover_arguments_are_refused(few, given, says):
    with pytest.raises(cg.BindingError, match=says):
        cg.plan.crossovers(few, *given, multiple_of=4)


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_context_and_expert_gradients_are_reduced_once(axis):
    mixture = load("mixtral-8x7b")
    sizes = {"D": 16, "H": 4, "G": 2, "K": 4, "Fe": 12, "L": 2, "V": 52, "E": 4, "k": 2, "S": 24}
    asked = {
        "devices": 2,
        "hardware": "h100-sxm",
        "B": 8 if axis == "ep" else 4,
        "pp": 1,
        "tp": 1,
        "zero": 0,
        "checkpoint": "none",
        **sizes,
        "overlap": "none",
    }
    asked |= {"dp": 1, "cp": 1, "ep": 1, "micro_batch": 1, axis: 2}
    plan = cg.plan.search(mixture, **asked, reduce_every_microbatch=False).best
    rank = cg.parallelize(
        training_step(mixture, accumulate=plan.accumulate), **{axis: 2}, reduce_every_microbatch=False
    )
    at = {**sizes, "B": 2 if axis == "ep" else 1}
    assert (plan.memory, plan.accumulate) == (cg.peak_memory(rank, **at), 4)
    assert plan.seconds == pytest.approx(cg.seconds(rank, "h100-sxm", **at), rel=1e-9)
    rows = cg.communication(rank, **at).filter(axis=axis, collective="all_reduce")
    experts = 3 * sizes["E"] * sizes["D"] * sizes["Fe"] * sizes["L"]  # gate, up and down, sharded over ep
    whole = cg.param_count(mixture, **{k: n for k, n in sizes.items() if k != "S"}) - (experts if axis == "ep" else 0)
    assert sum(row.times * row.bytes for row in rows if row.phase == "backward") == 2 * whole
