"""Command line output for hostile names, closed or full outputs, and interruptions."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from budget import examples
from limits import PROCESS

import costgraph as cg
from costgraph.cli import app as cli

pytest.importorskip("typer")
pytest.importorskip("rich")

from costgraph.cli.registry import COMMANDS

B, D = cg.dims("B D")
COMMAND = [sys.executable, "-m", "costgraph"]
#: Styles that the library itself emits on a terminal.
STYLE = re.compile(r"\x1b\[[\d;]*m")
#: Escape sequences, a bell, bidirectional overrides, line ends, a lone surrogate, and rich markup.
HOSTILE = "\x1b[31m\x1b]0;title\x07\u202e\x9b1m\x7f\u2028\ud800[bold][/nope]\\[red]{}\r\x08"
PRINTABLE = "[/nope][red]\\[b]{}"


def run_ok(capsys, *words):
    assert cli.main(list(words)) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


def controls(text):
    return sorted({c for c in text if not (c.isprintable() or c in "\n\t")})


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip


# -- untrusted names -----------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A graph and a device in which every name is hostile, as far as the format allows."""
    monkeypatch.chdir(tmp_path)
    with cg.Graph("g", dtype="bf16") as g:
        with cg.scope("here"):
            y = cg.linear(g.input("x", (B, 64)), "b d -> b f", f=D, name="up")
            y = cg.ops.pointwise("relu", y, name="act" + PRINTABLE)
        g.output(cg.reduce(y, "b f -> ", "mean", name="mean" + PRINTABLE))
    for name, graph in (("g.json", g), ("decoder.json", cg.models.from_config(CONFIG))):
        cg.save(graph, name)
        data = json.loads(Path(name).read_text())
        data["graph"]["name"] = HOSTILE
        Path(name).write_text(json.dumps(data))
    device = Path(cg.__file__).parent.parent / "hardware_specs" / "h100-sxm.toml"
    if not device.is_file():
        device = Path(cg.__file__).parent / "hardware_specs" / "h100-sxm.toml"
    escaped = json.dumps(HOSTILE.replace("\ud800", ""))  # TOML has no lone surrogates
    lines = []
    for line in device.read_text().split("\n"):
        line = re.sub(r'^(name|vendor) = ".*"$', rf"\1 = {'@'}", line)
        line = re.sub(r'note = "[^"]*"', "note = @", line)
        lines.append(re.sub(r'^([A-Z]\w*) = ".*"$', r"\1 = @", line).replace("@", escaped))
    Path("d.toml").write_text("\n".join(lines))
    assert "\x1b" in cg.load_hardware("d.toml").name


ASKED = {
    "report": ["report", "g.json", "--hardware", "d.toml", "B=3", "D=5", "--formulas", "--depth", "3"],
    "open report": ["report", "g.json", "--hardware", "d.toml"],
    "formula": ["formula", "g.json", "peak-memory"],
    "crossover": ["crossover", "g.json", "B", "--hardware", "d.toml", "D=8192"],
    "train": ["train", "g.json", "--hardware", "d.toml", "--formulas", "B=3", "D=5"],
    "plan": ["plan", "g.json", "--hardware", "d.toml", "B=3", "D=5"],
    "decode": ["decode", "decoder.json", "--hardware", "d.toml", "S=5", "--values", "1,2"],
    "hardware": ["hardware", "d.toml"],
}
DATA = [
    [*ASKED[name], form, "-"]
    for name in ("report", "train", "plan", "decode") for form in ("--json", "--csv")
]  # fmt: skip


@pytest.mark.parametrize("words", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("color", [False, True], ids=["pipe", "terminal"])
def test_output_escapes_foreign_control_characters(capsys, monkeypatch, files, words, color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if color:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    out = run_ok(capsys, *words)
    assert color == bool(STYLE.search(out)) or words[0] in ("formula", "crossover", "decode")
    assert "\x1b[31m" not in out
    assert not controls(STYLE.sub("", out) if color else out)
    if words[0] not in ("formula", "crossover"):
        assert "[/nope]" in "".join(out.split())  # markup is escaped too


@pytest.mark.parametrize("words", DATA, ids=" ".join)
def test_machine_readable_output_escapes_control_characters(capsys, files, words):
    out = run_ok(capsys, *words)
    assert not controls(out)
    if "--json" in words:
        assert json.loads(out)["graph"].startswith(HOSTILE)


@pytest.mark.parametrize("words", [[HOSTILE], ["report", HOSTILE], ["report", "g.json", HOSTILE + "=1"],
                                   ["report", "g.json", "--hardware", HOSTILE], ["report", "g.json", "--sort", HOSTILE],
                                   ["report", "g.json", "--json", HOSTILE + "/x"]])  # fmt: skip
def test_error_messages_escape_control_characters(capsys, files, words):
    assert cli.main(words) == 2
    done = capsys.readouterr()
    assert (done.out, controls(done.err), done.err.count("\n")) == ("", [], 1)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_text_with_examples_on_own_lines(capsys, command):
    out = run_ok(capsys, command, "--help")
    assert not controls(out)
    assert "\\b" not in out
    shown = re.search(r"^  Examples:\n((?:    .*\n)+)", out, re.MULTILINE)
    assert shown is None if command == "models" else f"    costgraph {command} " in shown[1] or command == "hardware"
    assert all(len(line) <= 82 for line in out.split("\n"))


def test_listing_models_builds_no_graph(capsys, monkeypatch):
    declared = []
    enter = cg.Graph.__enter__
    monkeypatch.setattr(cg.Graph, "__enter__", lambda self: declared.append(self.name) or enter(self))
    assert "8,030,261,248" in run_ok(capsys, "models")
    assert declared == []


# -- model arguments -----------------------------------------------------------------------------------------------


def test_file_type_follows_content(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for place in ("config.json", "folder/config.json", "model.cfg", "gpt2"):
        Path(place).write_text(json.dumps(CONFIG))
    expected = cg.param_count(cg.models.from_config(CONFIG))
    cg.save(cg.models.from_config(CONFIG), "saved.json")
    cg.save(cg.models.from_config(CONFIG), "saved")
    for place in ("config.json", "folder", "folder/config.json", "model.cfg", "saved.json", "saved"):
        report = json.loads(run_ok(capsys, "report", place, "--json", "-"))
        assert report["figures"]["params"]["value"] == expected
    # a preset name wins over files in the directory
    assert run_ok(capsys, "formula", "gpt2", "params", "--preset") == "124439808\n"
    for words in (
        "train folder B=1 S=8",
        "plan config.json --hardware h100-sxm B=1 S=8",
        "decode config.json --hardware h100-sxm S=8 --values 1,2",
        "formula config.json flops",
        "crossover config.json B --hardware h100-sxm S=8",
        "report config.json --dtype fp32 --attention eager --dropout 0.1",
    ):
        run_ok(capsys, *words.split())


@pytest.mark.parametrize(
    ("content", "words", "text"),
    [
        (CONFIG, ["--eager-ops"], "--eager-ops: 'f.json' is a config.json, expected a preset for this option"),
        ({"nodes": []}, ["--dtype", "fp32"], "--dtype: 'f.json' is a saved graph, expected a preset for this option"),
        ({**CONFIG, "hidden_size": "x"}, [], "f.json: hidden_size is 'x', expected an integer"),
        ({"nodes": []}, [], "f.json: "),
        ([1], [], "f.json: "),
    ],
)
def test_unknown_files_and_inapplicable_options_raise(capsys, tmp_path, monkeypatch, content, words, text):
    monkeypatch.chdir(tmp_path)
    Path("f.json").write_text(json.dumps(content))
    assert cli.main(["report", "f.json", *words]) == 2
    assert capsys.readouterr().err.startswith(f"costgraph: {text}")


@pytest.mark.parametrize("part", ["0", "40", "nan", "-0.1", "1.01", "inf"])
def test_utilization_outside_zero_to_one_raises(capsys, part):
    assert cli.main(["plan", "gpt2", "--hardware", "h100-sxm", "--mfu", part, "B=1", "S=8"]) == 2
    assert re.search(r"preflight: mfu: \S+, expected a number above 0 and up to 1", capsys.readouterr().err)


# -- output destinations -------------------------------------------------------------------------------------------

pipes = pytest.mark.skipif(os.name == "nt", reason="outputs break in another way there")
CLOSED = "costgraph: the standard output: Bad file descriptor, expected a writable destination\n"
FULL = "costgraph: the standard output: No space left on device, expected a writable destination\n"


@pipes
@pytest.mark.parametrize(
    ("words", "to", "status", "said"),
    [
        ("--version", ">&-", 2, CLOSED),
        pytest.param("report --help", ">/dev/full", 2, FULL, marks=pytest.mark.long),
        ("formula mlp params", ">/dev/full", 2, FULL),
        ("--version", "2>&- >/dev/full", 2, ""),
        ("models --help", "| true", 141, ""),
        pytest.param("report mlp", ">/dev/full", 2, FULL, marks=pytest.mark.long),
        pytest.param("report mlp --csv -", "2>&- >/dev/full", 2, "", marks=pytest.mark.long),
        pytest.param("models", "| true", 141, "", marks=pytest.mark.long),
    ],
)
def test_closed_or_full_outputs_set_exit_status(words, to, status, said):
    if "/dev/full" in to and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {to}', "-", *COMMAND, *words.split()],
        capture_output=True, text=True, timeout=PROCESS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


#: Send SIGINT at the n-th audit event after the first import of the package.
SITE = """
import os, signal, sys
seen = None
def hook(event, arguments):
    global seen
    if event == "import" and arguments[0] == "costgraph.analysis":
        seen = 0
    if seen is not None:
        seen += 1
        if seen == {number}:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
"""


def interrupted(tmp_path, number, *words, run=COMMAND):
    (tmp_path / "sitecustomize.py").write_text(SITE.format(number=number))
    paths = os.pathsep.join([str(tmp_path), str(Path(cg.__file__).parent.parent)])
    return subprocess.run([*run, *words], capture_output=True, text=True, timeout=PROCESS, check=False,
                          env={**os.environ, "PYTHONPATH": paths})  # fmt: skip


@pipes
@pytest.mark.parametrize("number", [1, 200, 2000, 1000][: examples(3)])
def test_interruption_at_any_time_is_silent(tmp_path, number):
    done = interrupted(tmp_path, number, "report", "mlp", "B=1")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pipes
def test_script_and_module_handle_interruption_alike(tmp_path):
    script = tmp_path / "costgraph"
    script.write_text("import sys\nfrom costgraph.cli import main\nsys.exit(main())\n")
    done = interrupted(tmp_path, 100, "report", "mlp", "B=1", run=[sys.executable, str(script)])
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pipes
def test_importing_the_package_keeps_the_sigint_handler(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import signal\nimport costgraph\nprint(signal.getsignal(2) is signal.default_int_handler)\n")
    env = {**os.environ, "PYTHONPATH": str(Path(cg.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, timeout=PROCESS, check=True
    )
    assert done.stdout == "True\n"


class Terminal(io.StringIO):
    """A standard error stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("words", ["formula mlp params", "explore mlp --out p.html", "report x"])
def test_terminal_shows_elapsed_time_until_output(words, monkeypatch, tmp_path):
    words = words.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("costgraph.notation.progress._AFTER", 0.0)
    monkeypatch.setattr("costgraph.notation.progress._EVERY", 0.001)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert cli.main(words) == (2 if words[0] == "report" else 0)
    said = terminal.getvalue()
    first, *_ = said.split("\r")[1:]
    assert re.fullmatch(rf"{words[0]}: \d+ s", first)
    # the status line is cleared before the command's output or a progress bar
    wiped = said.index("\r" + " " * len(first) + "\r")
    assert f"{words[0]}: 0 s" not in said[wiped:]
    assert words[0] != "explore" or "stage" in said[wiped:]


def test_no_progress_without_a_terminal(capsys):
    assert run_ok(capsys, "formula", "mlp", "params")
