"""Per-rank reports: communication on the command line and in files."""

import json
import math
from functools import cache

import pytest
from shared import load, parallelize, training_step

import costgraph as cg
from costgraph.cli import app as cli
from costgraph.report.files import to_csv, to_json
from costgraph.report.formula import formula_text

pytest.importorskip("typer")
pytest.importorskip("rich")

SIZES = {"D": 24, "F": 44, "L": 4, "V": 52, "B": 4, "S": 7}
WORDS = [f"{name}={size}" for name, size in SIZES.items()]
SPLIT = {"dp": 4, "tp": 2, "zero": 3}


@cache
def model():
    """A language model with two products per layer: its steps are fast to derive."""
    B, S, D, F, V, L = cg.dims("B S D F V L")
    with cg.Graph("lm", dtype="bf16") as g:

        def block(x):
            with cg.scope("mlp"):
                h = cg.relu(cg.linear(x, "b s d -> b s f", f=F, name="up"))
                return x + cg.linear(h, "b s f -> b s d", d=D, name="down")

        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("tokens/table", (V, D)))
        x = cg.repeat(L, block, x, name="layers")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss = "cross_entropy"
    return g


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cg.save(model(), "lm.json")


def run(capsys, *words):
    code = cli.main(["train", "lm.json", *words])
    done = capsys.readouterr()
    return code, done.out, done.err


def rank(**more):
    return parallelize(training_step(model()), **SPLIT, **more)


def test_parallel_degree_selects_per_rank_report(capsys):
    code, out, err = run(
        capsys, *WORDS, "--dp", "4", "--tp", "2", "--zero", "3", "--hardware", "h100-sxm", "--json", "-"
    )
    assert (code, err) == (0, "")
    data, sent = json.loads(out), cg.communication(rank(), hardware="h100-sxm", **SIZES)
    assert data["peak_memory"]["value"] == cg.peak_memory(rank(), **SIZES)
    assert data["roofline"]["estimate"]["value"] == cg.seconds(rank(), "h100-sxm", **SIZES)
    assert sum(row["ring_bytes"]["value"] for row in data["sent"]) == sent.total()
    for row in data["sent"]:
        rows = sent.filter(axis=row["axis"], collective=row["collective"], link=row["link"])
        assert row["times"]["value"] == sum(m.times for m in rows)
        assert row["time"]["value"] == pytest.approx(sum(m.seconds for m in rows))


def test_parallel_degree_can_stay_symbolic(capsys):
    code, out, err = run(capsys, *WORDS, "--dp", "n", "--zero", "2")
    assert (code, err) == (0, "")
    step = training_step(model())
    graph = cg.parallelize(step, dp=cg.dims("n"), zero=2)
    reduced = cg.communication(graph, **SIZES).filter(collective="reduce_scatter")
    assert cg.dims("n") in reduced.total().free_symbols
    assert f"dp     reduce_scatter   {formula_text(reduced.total(), grouped=True)}" in out


PIPELINE = ["--pp", "2", "--micro-batches", "4", "--hardware", "h100-sxm"]


def test_pipeline_degree_selects_per_stage_report(capsys):
    step = training_step(model(), accumulate=4)
    cut = cg.parallelize(step, pp=2, micro_batches=4, schedule="interleaved", virtual_stages=2)
    words = [*WORDS, *PIPELINE, "--schedule", "interleaved", "--virtual-stages", "2"]
    for name, stage in zip(("first", "last"), cut.stages, strict=True):
        code, out, err = run(capsys, *words, "--stage", name, "--json", "-")
        assert (code, err) == (0, "")
        assert json.loads(out)["peak_memory"]["value"] == cg.peak_memory(stage, **SIZES)
    seconds = cg.seconds(cut, "h100-sxm", **SIZES)
    assert f"A step of the pipeline takes {seconds * 1e6:.4g}" in run(capsys, *words)[1]
    words = [word for word in WORDS if word != "L=4"]
    code, out, err = run(capsys, *words, *PIPELINE[:4], "--layers", "1,3", "--json", "-")
    uneven = cg.parallelize(step, pp=2, micro_batches=4, layers=(1, 3))
    stage_sizes = {name: n for name, n in SIZES.items() if name != "L"}
    assert json.loads(out)["peak_memory"]["value"] == cg.peak_memory(uneven.stages[0], **stage_sizes)


def test_overlap_option_reduces_estimated_time(capsys):
    words = [*WORDS, "--dp", "4", "--zero", "3", "--hardware", "h100-sxm", "--checkpoint", "every-block"]
    waited, beside = (json.loads(run(capsys, *words, "--overlap", how, "--json", "-")[1]) for how in ("none", "ideal"))
    assert waited["roofline"]["estimate"]["value"] > beside["roofline"]["estimate"]["value"]
    assert waited["scopes"] == beside["scopes"]
    assert sum(part["share"] for part in beside["scopes"]) == pytest.approx(1)
    assert "without overlap of collectives" in run(capsys, *words, "--overlap", "ideal")[1]


def test_host_memory_is_excluded_from_peak(capsys):
    words = ["--dp", "4", "--tp", "2", "--zero", "3", "--offload", "optimizer,activations"]
    code, out, err = run(capsys, *WORDS, *words, "--json", "-")
    assert (code, err) == (0, "")
    away = rank(offload=("optimizer", "activations"))
    assert json.loads(out)["peak_memory"]["value"] == cg.peak_memory(away, **SIZES) < cg.peak_memory(rank(), **SIZES)


def test_files_and_text_list_communication():
    report = cg.report(rank(), "h100-sxm", **SIZES)
    (gathered,) = (s for s in report.sent if (s.axis, s.collective, s.link) == ("dp", "all_gather", "interconnect"))
    lines = to_csv(report).splitlines()
    assert f"sent,dp all_gather,ring-bytes,{gathered.ring_bytes},B," in lines
    assert any(row["axis"] == "dp" for row in json.loads(to_json(report))["sent"])
    assert "sent by a rank" in str(report)
    assert cg.report(load("mlp"), B=3).sent == ()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tp", "0"], "--tp: got '0', expected a positive integer"),
        (["--dp", "1.5x"], "--dp: got '1.5x', expected a size such as 8192, 8Ki, 1.5M or 70B"),
        (["--cp", "2", "--context", "round"], "--context 'round': expected gather or all_to_all or ring"),
        (["--dp", "2", "--buckets", "many"], "--buckets 'many': expected none or copy or view"),
        (["--tp", "2", "--network", "moon", "--hardware", "h100-sxm"], "network 'moon' is unknown"),
        (["--tp", "2", "--overlap", "all", "--hardware", "h100-sxm"], "overlap 'all', expected one of none, ideal"),
        (["--offload", "disk"], "offload: 'disk', expected one of optimizer, parameters, activations"),
        (["--tp", "7"], "expected a positive integer"),
        (["--pp", "2", "--stage", "third"], "--stage 'third': expected one of first, last"),
        (["--pp", "2", "--schedule", "zbw"], "schedule 'zbw', expected one of gpipe, 1f1b"),
        (["--pp", "2", "--layers", "1,x"], "--layers: got 'x', expected a size"),
        (["--pp", "2", "--layers", "1,2,1"], "layers lists 3 stages, expected pp=2"),
        (
            ["--pp", "2", "--accumulate", "2", "--micro-batches", "4"],
            "--micro-batches '4': expected '2', the value of --accumulate",
        ),
    ],
)
def test_invalid_rank_options_raise(capsys, words, text):
    code, out, err = run(capsys, *WORDS, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err


# -- inference -----------------------------------------------------------------------------------------------------

OWN = {"D": 24, "H": 6, "G": 2, "K": 4, "F": 44, "L": 4, "V": 52}
SERVED = [f"{name}={n}" for name, n in OWN.items()]
MESHES = [{"dp": 3}, {"tp": 2, "cp": 7}, {"pp": 2, "tp": 2, "micro_batches": 3}]


def said(capsys, *words):
    assert cli.main([*words, "--json", "-"]) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return json.loads(done.out)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parallel_generation_matches_python_api(capsys, mesh):
    rank = cg.parallelize(cg.decode(load("llama-3-8b")), **mesh)
    expected = cg.plan.throughput(rank, "h100-sxm", "B", [3, 9], network="dgx-superpod", S=77, **OWN)
    options = [word for axis, n in mesh.items() for word in (f"--{axis.replace('_', '-')}", str(n))]
    words = ["decode", "llama-3-8b", "--hardware", "h100-sxm", "--network", "dgx-superpod", *options, *SERVED, "S=77"]
    data = said(capsys, *words, "--values", "3,9")
    columns = ("tokens", "seconds", "memory", "devices", "tokens_per_device", "tokens_per_second")
    for row, own in zip(data["rows"], expected.rows, strict=True):
        assert [row[c] for c in columns] == [getattr(own, c) for c in columns]
    many = math.prod(n for axis, n in mesh.items() if axis != "micro_batches")
    assert {row["devices"] for row in data["rows"]} == {many}
    assert cli.main([*words, "--values", "3,9"]) == 0
    out = capsys.readouterr().out
    assert f"per device, on {many} devices\n\n{expected}\n" in out


def test_expert_and_quantized_steps_match_python_api(capsys):
    step = cg.quantize(cg.decode(load("mixtral-8x7b")), cache="fp8_e4m3")
    rank = cg.parallelize(step, ep=4, tp=2)
    expected = cg.plan.throughput(rank, "h200-sxm", "B", [8], S=101, L=3)
    words = "decode mixtral-8x7b --hardware h200-sxm --ep 4 --tp 2 --cache fp8_e4m3 S=101 L=3"
    (row,) = said(capsys, *words.split(), "--values", "8")["rows"]
    assert (row["seconds"], row["memory"]) == (expected.rows[0].seconds, expected.rows[0].memory)


@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "dp": 2}], ids=str)
def test_generation_time_matches_python_api(capsys, tmp_path, mesh):
    model = load("llama-3-8b")
    passes = cg.prefill(model, logits="last"), cg.decode(model)
    first, step = (cg.parallelize(g, **mesh) if mesh else g for g in passes)
    expected = cg.plan.latency(first, step, "h100-sxm", prompt=77, steps=13, B=6, **OWN)
    options = [word for axis, n in mesh.items() for word in (f"--{axis}", str(n))]
    words = ["latency", "llama-3-8b", "--hardware", "h100-sxm", "--prompt", "77", "--steps", "13", *options, *SERVED]
    data = said(capsys, *words, "B=6", "--csv", str(tmp_path / "answer.csv"))
    times = {
        name: getattr(expected, name) for name in ("first_token", "next_token", "last_token", "per_token", "total")
    }
    assert {name: data[name] for name in times} == times
    assert (data["schema"], data["prompt"], data["steps"]) == ("costgraph/latency/1", 77, 13)
    names, row = (tmp_path / "answer.csv").read_text().splitlines()
    assert dict(zip(names.split(","), map(float, row.split(",")), strict=True)) == times
    assert cli.main([*words, "B=6"]) == 0
    assert f"total        {expected.total * 1e6:.4g} us\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("decode llama-3-8b --hardware h100-sxm --tp x S=7", "--tp: got 'x', expected a size"),
        (
            "decode llama-3-8b --hardware h100-sxm --micro-batches 2 S=7",
            "micro_batches is 2 with one pipeline stage, expected 1",
        ),
        ("decode llama-3-8b --hardware h100-sxm --ep 2 S=7", "ep splits no parameter of graph 'llama-3-8b.decode'"),
        ("latency llama-3-8b --hardware h100-sxm --prompt 0 --steps 3 B=1", "--prompt: got '0', expected"),
        ("latency llama-3-8b --hardware h100-sxm --prompt 7 --steps 3 B=1 Q=2", "Q is not a dimension of either graph"),
    ],
)
def test_invalid_inference_options_raise(capsys, words, text):
    assert cli.main(words.split()) == 2
    assert text in capsys.readouterr().err
