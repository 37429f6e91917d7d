"""Command lines give a result, or one line on stderr and exit code 2; never a traceback."""

import json
import random
import subprocess
import sys

import pytest
from budget import examples, is_plain
from damage import REPLACEMENTS, changed, places, saved
from hostile import TEXTS
from limits import PROCESS, limited

pytest.importorskip("typer")
pytest.importorskip("rich")

from costgraph.cli import app as cli

COMMANDS = ["report", "formula", "crossover", "models", "hardware"]
OPTIONS = [
    "--hardware", "--attention", "--dtype", "--dropout", "--symbolic", "--count", "--fallback", "--depth", "--sort",
    "--formulas", "--json", "--csv", "--format", "--preset", "--help", "--version",
]  # fmt: skip
WORDS = [
    "gpt2", "llama-3-8b", "mlp", "h100-sxm", "peak-memory", "flops", "intensity", "B", "S", "B=1", "S=8", "B=8Ki",
    "L=2", "B=", "=1", "B=0", "B=-1", "B=1e99", "S=1e99T", "B=1.5", "B=1.5K", "b=1", "B=1=2", "count=1", "fp16", "fp8",
    "flash", "eager", "executed", "full", "time", "order", "latex", "python", "text", "0", "1", "-1", "0.5", "1e400",
    "nan", "inf", "10" * 30, "-", "--", "-x", "none.json", "none.toml", "/dev/null", "/", "/dev/zero.json",
    "[red]", "{}",
]  # fmt: skip


def ask(capsys, *words):
    """Return the exit code and both outputs of a command, within the time limit; errors take one line."""
    with limited():
        code = cli.main(list(words))
    done = capsys.readouterr()
    assert "Traceback" not in done.err, words
    if code == 0:
        assert done.err == "", words
    else:
        assert code == 2, (words, code)
        assert done.out == "", (words, done.out[:200])
        assert done.err.startswith("costgraph: "), (words, done.err[:200])
        assert done.err.count("\n") == 1, (words, done.err[:200])
        assert len(done.err) <= 2100, words
    return code, done.out, done.err


HOLES = [
    ["report", None], ["report", "mlp", None], ["report", "mlp", "--hardware", None],
    ["report", "mlp", "--dtype", None],
    ["report", "mlp", "B={}"], ["report", "mlp", "{}=1"], ["report", "mlp", "--dropout", None],
    ["report", "mlp", "--depth", None], ["report", "mlp", "--sort", None], ["report", "gpt2", "--attention", None],
    ["formula", "mlp", None], ["formula", "mlp", "flops", "--format", None], ["crossover", "mlp", None, "--hardware",
    "h100-sxm"], ["hardware", None], [None], ["report", "mlp", "--count", None], ["report", "mlp", "--fallback", None],
]  # fmt: skip


@pytest.mark.parametrize("hole", HOLES, ids=lambda h: " ".join(map(str, h)))
def test_hostile_words_in_every_place(capsys, hole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = 25 if is_plain() else 1
    for text in TEXTS[HOLES.index(hole) % step :: step]:
        ask(capsys, *(text if w is None else w.replace("{}", text) for w in hole))


def test_random_command_lines(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(11)
    for _ in range(examples(60)):
        words = [rng.choice(COMMANDS)]
        for _ in range(rng.randint(0, 6)):
            words.append(rng.choice(WORDS if rng.random() < 0.75 else OPTIONS))
        ask(capsys, *words)


def test_sizes_that_no_model_has(capsys):
    for size in ("1e99", "9" * 30 + "e99T", "1.5Ki"):
        for model in ("mlp",):
            ask(capsys, "report", model, "--hardware", "h100-sxm", f"B={size}", f"D={size}", f"L={size}")
            ask(capsys, "report", model, "--json", "-", f"B={size}")
            for quantity in ("peak-memory", "flops", "intensity"):
                ask(capsys, "formula", model, quantity, f"B={size}", f"L={size}")
        ask(capsys, "crossover", "mlp", "B", "--hardware", "h100-sxm", f"D={size}", f"F={size}", "L=1", "C=3")


def test_reports_of_damaged_files(capsys, tmp_path):
    rng = random.Random(12)
    path = tmp_path / "f.json"
    for name in ("dense", "looped", "varied", "attended"):
        data = saved(name, tmp_path)
        spots = list(places(data))
        for _ in range(examples(6)):
            path.write_text(json.dumps(changed(data, rng.choice(spots), "replace", rng.choice(REPLACEMENTS))))
            ask(capsys, "report", str(path))
            ask(capsys, "formula", str(path), "flops")


@pytest.mark.parametrize(
    "words",
    [pytest.param(["report", "mlp", "B=1"], marks=pytest.mark.long), ["report", "\udcff.json"]],
    ids=["good", "no-utf8"],
)
def test_processes_end_with_a_code_and_one_line(words):
    command = [sys.executable, "-X", "utf8", "-m", "costgraph", *words]
    done = subprocess.run(command, capture_output=True, timeout=PROCESS, check=False)
    assert b"Traceback" not in done.stderr
    assert (done.returncode, done.stderr.count(b"\n")) == ((0, 0) if words[-1] == "B=1" else (2, 1))
