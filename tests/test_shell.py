"""Shell integration: fast lists, and completions."""

import json
import subprocess
import sys

import pytest
from each import each
from shared import load

import costgraph as cg
from costgraph.cli import app as cli
from costgraph.models.registry import (
    PARAMETERS,
    published,
)

pytest.importorskip("typer")
pytest.importorskip("rich")

COUNTS = json.loads(PARAMETERS.read_text(encoding="utf-8"))


# -- lists ---------------------------------------------------------------------------------------------------------


def test_list_shows_every_model_with_sizes():
    rows = {name: (count, sizes) for name, count, sizes in published()}
    assert list(rows) == cg.models.names() == sorted(COUNTS)
    assert rows["mlp"][1] == load("mlp").defaults


def wrong(names):
    return {n: COUNTS[n] for n in names if cg.param_count(load(n)) != COUNTS[n]}


def test_recorded_counts_match_derived_counts():
    assert wrong(cg.models.names()[::23]) == {}
    assert wrong(["mlp"]) == {}


@pytest.mark.parametrize("words", [["models"], ["hardware"], ["--help"]])
def test_lists_import_only_what_they_need(words):
    code = (
        "import sys\nfrom costgraph.cli import main\nassert main(sys.argv[1:]) == 0\n"
        "print(*(m for m in sys.modules if m.startswith('costgraph.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    rooms = {m.split(".")[1] for m in done.stderr.split()}
    assert rooms.isdisjoint({"analysis", "transforms", "plan", "optimizers", "files", "torch", "testing"})
    assert ("costgraph.models.registry" in done.stderr.split()) == (words == ["models"])


# -- completion ----------------------------------------------------------------------------------------------------


@pytest.fixture
def completed(capsys, monkeypatch):
    """Return the completions that each shell gets through its own script."""

    def ask(line, shell="bash"):
        monkeypatch.setenv("_COSTGRAPH_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (not line.endswith(" "))))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        assert cli.main([]) == 0
        return capsys.readouterr().out

    return ask


def beginning(names, start):
    return [n for n in names if n.startswith(start)]


@each(
    ("line", "expected"),
    [
        ("costgraph re", ["report"]),
        ("costgraph report gpt2", beginning(cg.models.names(), "gpt2")),
        ("costgraph weights x.safetensors llama-3-", beginning(cg.models.names(), "llama-3-")),
        ("costgraph report gpt2 --hardware h1", beginning(cg.list_hardware(), "h1")),
        ("costgraph hardware b", beginning(cg.list_hardware(), "b")),
        ("costgraph train gpt2 --optimizer ada", ["adam", "adamw", "adagrad", "adafactor"]),
        ("costgraph train gpt2 --precision bf16-", ["bf16-master", "bf16-mixed"]),
        ("costgraph plan gpt2 --implementation fo", ["foreach", "for-loop"]),
        ("costgraph train gpt2 --checkpoint every", ["every-block", "every:"]),
        ("costgraph report gpt2 --dtype fp1", ["fp16"]),
        ("costgraph formula gpt2 peak", ["peak-memory"]),
        ("costgraph decode gpt2 --val", ["--values"]),
        ("costgraph report none-such", []),
    ],
)
def test_bash_completion(completed, line, expected):
    assert completed(line).split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_completion(completed, shell):
    found = completed("costgraph report gpt2-m", shell)
    assert [n for n in cg.models.names() if n in found] == ["gpt2", "gpt2-medium"]


def test_completion_imports_no_command(completed, monkeypatch):
    monkeypatch.setattr("costgraph.cli.registry.import_module", None)
    assert "report" in completed("costgraph ").split()


def test_completion_script_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert cli.main(["--show-completion", "bash"]) == 0
    assert "_COSTGRAPH_COMPLETE=complete_bash" in capsys.readouterr().out
