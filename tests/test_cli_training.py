"""Training commands: printed output and one-line errors."""

import csv
import io
import json

import pytest
from shared import load, training_step
from test_cli_ranks import model

import costgraph as cg
from costgraph.cli import app as cli

pytest.importorskip("typer")
pytest.importorskip("rich")

from costgraph.cli.training_commands import OPTIMIZERS, read_checkpoint
from costgraph.report.explore.page import views_of
from costgraph.report.text import plan_json


def run(capsys, *words):
    """Return exit code, standard output, standard error."""
    code = cli.main(list(words))
    done = capsys.readouterr()
    return code, done.out, done.err


def run_ok(capsys, *words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    return out


def mlp_report(capsys, *words):
    return json.loads(run_ok(capsys, "train", "mlp", "B=2", "--json", "-", *words))


def test_times_account_for_memory_hierarchy(capsys):
    words = ("--hardware", "a100-80-sxm", "--hierarchical")
    roofline = mlp_report(capsys, *words)["roofline"]
    step = training_step(load("mlp"))
    expected = cg.roofline(step, "a100-80-sxm", hierarchical=True, B=2)
    assert roofline["estimate"]["value"] == expected.estimate
    assert [level["level"] for level in roofline["levels"]] == ["memory", "l2"]
    assert [op["caches"]["l2"]["value"] for op in roofline["ops"]] == [row.caches_s["l2"] for row in expected.rows]
    assert mlp_report(capsys, *words[:2])["roofline"]["levels"] == []
    out = run_ok(capsys, "report", "mlp", "B=2", "--hardware", "gb300", "--hierarchical")
    assert "note                     gb300 has no bandwidth of a cache" in out
    code, _, err = run(capsys, "report", "mlp", "B=2", "hierarchical=2")
    assert (code, "hierarchical" in err) == (2, True)


# -- train -----------------------------------------------------------------------------------------------------------


def test_llama_training_step_with_all_options(capsys):
    words = (
        "train llama-3-8b --hardware h100-sxm --optimizer adamw --implementation foreach --precision bf16-mixed "
        "--checkpoint every-block --accumulate 4 --clip 1.0 B=1 S=4096"
    )
    out = run_ok(capsys, *words.split())
    step = cg.training_step(
        load("llama-3-8b"), None, cg.AdamW(), "bf16-mixed", cg.every_block(), 4, clip=1.0
    )  # fmt: skip
    sizes = {"B": 1, "S": 4096}
    assert f"= {cg.peak_memory(step, **sizes):,} B" in out
    assert f"= {cg.model_flops(step, **sizes):,} FLOP" in out
    assert f"= {cg.hardware_flops(step, **sizes):,} FLOP" in out
    assert f"= {cg.state_bytes(step, **sizes).total:,} B" in out
    assert f"= {cg.activation_memory(step, **sizes):,} B" in out
    assert "does NOT fit" in out
    assert max(map(len, out.split("\n"))) <= 80


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_selectable_by_name(capsys, name):
    expected = cg.training_step(load("mlp"), optimizer=OPTIMIZERS[name]())
    assert mlp_report(capsys, "--optimizer", name)["peak_memory"]["value"] == cg.peak_memory(expected, B=2)


def test_training_options_change_the_step(capsys, tmp_path):
    cg.save(model(), tmp_path / "lm.json")
    sizes = {"D": 24, "F": 44, "L": 4, "V": 52, "B": 4, "S": 7}
    words = ["train", str(tmp_path / "lm.json"), *(f"{name}={n}" for name, n in sizes.items()), "--json", "-"]

    def step_report(*options):
        return json.loads(run_ok(capsys, *words, *options))

    def expected(**options):
        return cg.peak_memory(training_step(model(), **options), **sizes)

    fused, mlp = cg.AdamW(implementation="fused"), cg.selective("mlp")
    assert step_report()["peak_memory"]["value"] == expected()
    report = step_report("--implementation", "fused", "--precision", "fp32")
    assert report["peak_memory"]["value"] == expected(optimizer=fused, precision="fp32")
    assert step_report("--checkpoint", "selective:mlp")["peak_memory"]["value"] == expected(checkpoint=mlp)
    report = step_report("--clip", "1.0", "--checkpoint", "every:2", "--accumulate", "3")
    step = training_step(model(), clip=1.0, checkpoint=cg.every(2), accumulate=3)
    assert report["figures"]["flops"]["value"] == cg.flops(step, **sizes)
    assert report["peak_memory"]["value"] == cg.peak_memory(step, **sizes)


@pytest.mark.parametrize("word", ["transformers", "fp32", "chunked:7"])
def test_loss_option_changes_the_step(capsys, tmp_path, word):
    cg.save(model(), tmp_path / "lm.json")
    words = [str(tmp_path / "lm.json"), "D=24", "F=44", "L=4", "V=52", "B=4", "S=7", "--loss", word]
    loss = cg.chunked_cross_entropy(7) if word == "chunked:7" else word
    step, sizes = training_step(model(), loss), {"D": 24, "F": 44, "L": 4, "V": 52, "B": 4, "S": 7}
    report = json.loads(run_ok(capsys, "train", *words, "--json", "-"))
    assert report["peak_memory"]["value"] == cg.peak_memory(step, **sizes)
    assert report["figures"]["flops"]["value"] == cg.flops(step, **sizes)
    checks = json.loads(run_ok(capsys, "plan", *words, "--hardware", "h100-sxm", "--json", "-"))
    assert checks["checks"] == json.loads(plan_json(cg.plan.preflight(step, "h100-sxm", **sizes)))["checks"]
    found = json.loads(run_ok(capsys, "search", *words, "--devices", "1", "--hardware", "h100-sxm", "--json", "-"))
    expected = cg.plan.search(model(), devices=1, hardware="h100-sxm", loss=loss, **sizes)
    assert [plan["memory"] for plan in found["plans"]] == [plan.memory for plan in expected.rows]
    (view,) = views_of(model(), [f"train loss={word}"]).values()
    assert (view.loss, cg.flops(view, **sizes)) == (step.loss, cg.flops(step, **sizes))
    code, _, err = run(capsys, "train", "mlp", "B=2", "--loss", "huggingface")
    assert (code, "--loss 'huggingface': expected cross_entropy, fp32, transformers" in err) == (2, True)


def test_checkpoint_policies_parse_from_text():
    assert read_checkpoint("none") is None
    assert read_checkpoint("every-block") == cg.every_block()
    assert read_checkpoint("from-start") == cg.from_start()
    assert read_checkpoint("every:4") == cg.every(4)
    assert read_checkpoint("keep:matmul,mlp/gelu") == cg.every_block(keep=["matmul", "mlp/gelu"])
    assert read_checkpoint("selective:attention,mlp/gelu") == cg.selective("attention", "mlp/gelu")


def test_open_sizes_and_outputs(capsys, tmp_path):
    out = run_ok(capsys, "train", "gpt2", "B=2")
    assert "unbound  S" in out
    rows = list(csv.DictReader(io.StringIO(run_ok(capsys, "train", "mlp", "B=2", "--csv", "-"))))
    value = next(r["value"] for r in rows if r["quantity"] == "model-flops")
    assert int(value) == cg.model_flops(training_step(load("mlp")), B=2)
    run_ok(capsys, "train", "mlp", "B=2", "--json", str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text()) == mlp_report(capsys)
    assert "peak memory [B]" in run_ok(capsys, "train", "mlp", "B=2", "--formulas")


def test_train_writes_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    roof, memory = tmp_path / "roof.png", tmp_path / "memory.png"
    words = ["--hardware", "h100-sxm", "--plot", str(roof), "--memory-plot", str(memory)]
    run_ok(capsys, "train", "mlp", "B=2", *words)
    assert roof.stat().st_size > 10_000
    assert memory.stat().st_size > 10_000


# -- plan ------------------------------------------------------------------------------------------------------------

PLAN = ["plan", "llama-3-8b", "--hardware", "h100-sxm", "--devices", "1024", "--tokens", "15T", "--mfu", "0.5"]
PLAN += ["--precision", "bf16", "--checkpoint", "every-block", "B=1"]


def planned():
    step = training_step(load("llama-3-8b"), precision="bf16", checkpoint=cg.every_block())
    return cg.plan.preflight(step, "h100-sxm", devices=1024, tokens=15 * 10**12, mfu=0.5, B=1, S=8192)


def test_plan_of_a_training_run(capsys):
    out = run_ok(capsys, *PLAN, "S=8192")
    days = planned()["training time"].figure
    assert out.startswith("llama-3-8b on 1,024 x NVIDIA H100 SXM5 80GB\n")
    assert f" training time           {days:.2f} days" in out
    assert "needs sharding" in out
    assert out.endswith("\nall checks pass\n")
    assert max(map(len, out.split("\n"))) <= 80


def test_plan_with_open_sizes(capsys):
    out = run_ok(capsys, *PLAN)
    assert "training time                needs S" in out
    assert "activation memory [B]\n" in out
    assert out.endswith("the verdict depends on unbound sizes\n\nsymbols  S sequence length\n")
    assert max(map(len, out.split("\n"))) <= 80


def test_infeasible_plan_reports_failed_check(capsys):
    out = run_ok(capsys, *PLAN, "S=8192", "--days", "7")
    assert "at most 7 days" in out
    assert out.endswith("a check FAILS\n")


def test_plans_are_written_to_files(capsys, tmp_path):
    data = json.loads(run_ok(capsys, *PLAN, "S=8192", "--json", "-"))
    plan = planned()
    assert (data["schema"], data["ok"], data["devices"]) == ("costgraph/plan/1", True, 1024)
    assert [c["figure"] for c in data["checks"]] == [row.figure for row in plan.rows]
    assert [c["verdict"] for c in data["checks"]] == [row.verdict for row in plan.rows]
    out = run_ok(capsys, *PLAN, "S=8192", "--csv", "-", "--json", str(tmp_path / "plan.json"))
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [r["check"] for r in rows] == [row.name.strip() for row in plan.rows]
    assert [float(r["figure"]) for r in rows] == [float(row.figure) for row in plan.rows]
    open_ = json.loads(run_ok(capsys, *PLAN, "--json", "-"))
    assert open_["ok"] is None
    assert "S" in next(c["figure"] for c in open_["checks"] if c["check"] == "training time")
    assert json.loads((tmp_path / "plan.json").read_text()) == data


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train"], "Missing argument 'MODEL'"),
        (["train", "gpt9"], "model 'gpt9': unknown"),
        (["train", "gpt2", "--optimizer", "adamm"], "--optimizer 'adamm': expected one of sgd, adam, adamw"),
        (["train", "gpt2", "--implementation", "fast"], "AdamW: implementation 'fast', expected one of foreach"),
        (["train", "gpt2", "--precision", "bf17"], "policy 'bf17', expected one of fp32, bf16"),
        (
            ["train", "gpt2", "--checkpoint", "all"],
            "--checkpoint 'all': expected none, every-block, from-start",
        ),
        (["train", "gpt2", "--checkpoint", "every:x"], "--checkpoint every: got 'x', expected a size"),
        (["train", "gpt2", "--checkpoint", "every:5"], "L=12: count of 'layers' has size L/5 = 12/5, expected"),
        (["train", "gpt2", "--checkpoint", "selective:atention"], "--checkpoint: no op is in 'atention'"),
        (["train", "gpt2", "--checkpoint", "selective:"], "selective: '', expected identifiers"),
        (["train", "gpt2", "--accumulate", "0"], "--accumulate: got '0', expected a positive integer"),
        (["train", "gpt2", "--accumulate", "1.5"], "--accumulate: got '1.5', expected a positive integer"),
        (["train", "gpt2", "--clip", "-1"], "expected"),
        (["train", "gpt2", "--clip", "one"], "'--clip'"),
        (["train", "gpt2", "B=0"], "B: got '0', expected a positive integer"),
        (["train", "gpt2", "Q=1"], "'Q' is not a dimension"),
        (["train", "gpt2", "--json", "-", "--csv", "-"], "--json - and --csv -"),
        (["train", "gpt2", "--memory-plot", "r.gif"], "'r.gif', expected a file ending in .png, .svg, .pdf"),
        (["train", "gpt2", "--hardware", "h1"], "hardware 'h1' is unknown"),
        (["plan", "gpt2"], "Missing option '--hardware'"),
        (["plan", "gpt2", "--hardware", "h1"], "hardware 'h1' is unknown"),
        (["plan", "gpt2", "--hardware", "h100-sxm", "--tokens", "many"], "--tokens: got 'many', expected a size"),
        (
            ["plan", "gpt2", "--hardware", "h100-sxm", "--devices", "0"],
            "--devices: got '0', expected a positive integer",
        ),
        (["plan", "gpt2", "--hardware", "h100-sxm", "--mfu", "0"], "preflight: mfu: 0.0, expected a number above 0"),
        (
            ["plan", "gpt2", "--hardware", "h100-sxm", "--days", "-1", "--tokens", "1T", "--mfu", "0.5"],
            "most_days: -1.0",
        ),
        (["plan", "gpt2", "--hardware", "v100-sxm2-16gb"], "no matmul rate peak.bf16 for bf16"),
        (["plan", "gpt2", "--hardware", "h100-sxm", "tokens=3"], "tokens='3': the name is reserved"),
    ],
)
def test_usage_errors_print_one_line_and_exit_2(capsys, words, text):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("costgraph: ")
    assert text in err
    assert err.count("\n") == 1


def test_commands_are_listed_with_an_example(capsys):
    for command in ("train", "plan"):
        assert command in run_ok(capsys, "--help")
        out = run_ok(capsys, command, "--help")
        assert f"costgraph {command} llama-3-8b" in out
