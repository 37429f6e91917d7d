import csv
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from shared import load

import costgraph as cg
from costgraph import models
from costgraph.cli import app as cli
from costgraph.report import formula_text

pytest.importorskip("typer")
pytest.importorskip("rich")

LLAMA = ["llama-3-8b", "--hardware", "h100-sxm", "B=1", "S=8192"]


def run(capsys, *words):
    """Return exit code, standard output, standard error."""
    code = cli.main(list(words))
    done = capsys.readouterr()
    return code, done.out, done.err


def run_ok(capsys, *words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    return out


def process(*words, **options):
    command = [sys.executable, "-W", "error", "-m", "costgraph", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


# -- report ------------------------------------------------------------------------------------------------------


def test_report_of_llama_on_h100(capsys):
    out = run_ok(capsys, "report", *LLAMA)
    g = load("llama-3-8b")
    times = cg.roofline(g, "h100-sxm", B=1, S=8192)
    line = cg.timeline(g, B=1, S=8192)
    assert "parameters                 8,030,261,248\n" in out
    assert "16.06 GB (14.96 GiB) = 16,060,522,496 B" in out
    assert f"= {cg.flops(g, B=1, S=8192):,} FLOP" in out
    assert f"= {cg.matmul_flops(g, 'full', B=1, S=8192):,} FLOP" in out
    assert f"= {cg.bytes_moved(g, B=1, S=8192):,} B" in out
    assert f"= {cg.bytes_moved(g, fused=True, B=1, S=8192):,} B" in out
    assert "ridge point                295.3 FLOP/B = 989.4 TFLOP/s / 3.35 TB/s" in out
    assert f"peak at                  {line.op} (forward)" in out
    assert f"= {line.peak:,} B" in out
    assert "85.02 GB (79.18 GiB): fits, 21.4% used" in out
    assert f"{times.lower_bound * 1e3:.1f} ms, if operands start in device memory" in out
    assert re.search(r"layers/mlp .* TFLOP .* GB .* ms .*% +compute \d+%", out)
    assert max(map(len, out.split("\n"))) <= 80


def test_report_with_open_sizes(capsys):
    out = run_ok(capsys, "report", "llama-3-8b", "--hardware", "h100-sxm", "B=1")
    assert "unbound  S" in out
    assert "needs sizes, still unbound: S" in out
    assert "262_144*S**2" in out
    out = run_ok(capsys, "report", "llama-3-8b", "B=1", "S=8")
    assert "needs a device: --hardware NAME" in out
    assert "of FLOPs" in out
    out = run_ok(capsys, "report", "llama-3-8b", "--symbolic")
    assert "unbound  B D F G H K L S V" in out
    assert "preset" not in out


def test_report_options_change_the_model(capsys):
    def flops(*words):
        return json.loads(run_ok(capsys, "report", "gpt2", "--json", "-", "B=2", "S=16", *words))["figures"]["flops"]

    base = flops()["value"]
    assert base == cg.flops(load("gpt2"), B=2, S=16)
    assert flops("--attention", "eager")["value"] > base
    assert flops("--dropout", "0.1")["value"] == cg.flops(load("gpt2", dropout=0.1), B=2, S=16)
    composed = load("gpt2", attention="eager", eager_ops=True)
    assert flops("--attention", "eager", "--eager-ops")["value"] == cg.flops(composed, B=2, S=16)
    assert flops("L=24")["value"] > base
    assert flops("--symbolic")["value"] is None
    wide = json.loads(run_ok(capsys, "report", "gpt2", "--json", "-", "--dtype", "fp32"))["figures"]["param-bytes"]
    assert wide["value"] == 4 * 124_439_808


def test_depth_sort_count_and_formulas(capsys):
    flat = run_ok(capsys, "report", *LLAMA, "--depth", "1")
    assert "layers/mlp" not in flat
    assert re.search(r"^ layers ", flat, re.M)
    by_time = run_ok(capsys, "report", *LLAMA, "--sort", "time")
    assert by_time.index("layers/mlp") < by_time.index("layers/attention")
    executed = json.loads(run_ok(capsys, "report", *LLAMA, "--json", "-"))["scopes"]
    full = json.loads(run_ok(capsys, "report", *LLAMA, "--json", "-", "--count", "full"))["scopes"]
    assert sum(p["matmul"]["value"] for p in full) > sum(p["matmul"]["value"] for p in executed)
    assert "matmul FLOPs of full squares" in run_ok(capsys, "report", *LLAMA, "--count", "full")
    assert "peak memory [B]: the largest of the cases below" in run_ok(capsys, "report", *LLAMA, "--formulas")


def test_fallback(capsys):
    words = ["report", "gpt2", "B=1", "S=8", "--hardware", "v100-sxm2-16gb"]
    assert "peak.bf16 is missing, peak.fp32 (next wider format)" in run_ok(capsys, *words)
    assert "125 TFLOP/s" in run_ok(capsys, *words, "--fallback", "fp16")


def test_json_and_csv_go_to_files_and_to_the_output(capsys, tmp_path):
    g = load("llama-3-8b")
    data = json.loads(run_ok(capsys, "report", *LLAMA, "--json", "-"))
    assert data["schema"] == "costgraph/report/2"
    assert data["figures"]["params"]["value"] == 8_030_261_248
    assert data["peak_memory"]["value"] == cg.peak_memory(g, B=1, S=8192)
    assert data["roofline"]["estimate"]["value"] == cg.roofline(g, "h100-sxm", B=1, S=8192).estimate
    rows = list(csv.DictReader(io.StringIO(run_ok(capsys, "report", *LLAMA, "--csv", "-"))))
    value = next(r["value"] for r in rows if r["quantity"] == "fused-bytes")
    assert int(value) == cg.bytes_moved(g, fused=True, B=1, S=8192)
    out = run_ok(capsys, "report", *LLAMA, "--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv"))
    assert out.startswith("llama-3-8b on ")
    assert json.loads((tmp_path / "r.json").read_text()) == data
    assert list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))) == rows


def test_plots_are_written(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    roof, memory = tmp_path / "roof.png", tmp_path / "memory.svg"
    run_ok(capsys, "report", *LLAMA, "--plot", str(roof), "--memory-plot", str(memory))
    assert roof.read_bytes().startswith(b"\x89PNG")
    assert roof.stat().st_size > 20_000
    assert "capacity" in memory.read_text() or memory.stat().st_size > 10_000


def test_saved_graph_is_accepted_as_model(capsys, tmp_path):
    g = load("gpt2")
    path = tmp_path / "g.json"
    from costgraph.files.graphs import save

    save(g, path)
    data = json.loads(run_ok(capsys, "report", str(path), "--json", "-", "B=1", "S=8"))
    assert data["figures"]["flops"]["value"] == cg.flops(g, B=1, S=8)
    code, _, err = run(capsys, "report", str(path), "--attention", "eager")
    assert code == 2
    assert "is a saved graph, expected a preset for this option" in err


# -- formula, crossover, lists -----------------------------------------------------------------------------------


def test_formula_in_each_format(capsys):
    g = load("mlp", symbolic=True)
    assert run_ok(capsys, "formula", "mlp", "params") == f"{cg.param_count(g)}\n"
    assert run_ok(capsys, "formula", "mlp", "params", "--preset") == "669706\n"
    assert run_ok(capsys, "formula", "mlp", "matmul-flops", "L=1", "C=10") == f"{cg.matmul_flops(g, L=1, C=10)}\n"
    assert r"F^{2}" in run_ok(capsys, "formula", "mlp", "params", "--format", "latex")
    source = run_ok(capsys, "formula", "mlp", "fused-bytes", "--format", "python")
    assert source.startswith("def fused_bytes(B, C, D, F, L):\n")
    assert '"""bytes moved, ideal fusion, B"""' in source


def test_formula_of_the_peak_names_the_op_of_each_case(capsys):
    out = run_ok(capsys, "formula", "mlp", "peak-memory")
    peak = cg.peak_memory(load("mlp", symbolic=True))
    assert out.split("\n")[0] == formula_text(peak)
    for case in cg.regimes(peak):
        assert f"{case.op} ({case.phase})" in out
    source = run_ok(capsys, "formula", "mlp", "peak-memory", "--preset", "--format", "python")
    assert source.startswith("def peak_memory(B):")
    one = run_ok(capsys, "formula", "mlp", "peak-memory", "--preset", "B=4")
    assert one.split("\n")[0] == str(cg.peak_memory(load("mlp"), B=4))
    assert "peak at" in one


@pytest.mark.parametrize("quantity", ["flops", "intensity", "bytes", "param-bytes", "matmul-flops-full"])
def test_formula_of_each_quantity(capsys, quantity):
    for form in ("text", "latex", "python"):
        assert run_ok(capsys, "formula", "gpt2", quantity, "--format", form).strip()


def test_crossover(capsys):
    out = run_ok(capsys, "crossover", "llama-3-8b", "B", "--hardware", "h100-sxm", "S=1")
    turn = cg.crossover(load("llama-3-8b"), "h100-sxm", "B", S=1)
    assert out == f"compute time equals memory time at B = {turn:.6g}\n"
    assert "B = " in run_ok(capsys, "crossover", "mlp", "B", "--hardware", "h100-sxm", "--symbolic")
    assert "memory-bound at every B" in run_ok(capsys, "crossover", "mlp", "B", "--hardware", "h100-sxm", "D=2", "F=3")
    code, _, err = run(capsys, "crossover", "mlp", "Z", "--hardware", "h100-sxm")
    assert code == 2
    assert "crossover: 'Z', expected an unbound dimension" in err


def test_lists(capsys):
    out = run_ok(capsys, "models")
    for name in models.names():
        assert f" {name} " in out
    assert "8,030,261,248" in out
    out = run_ok(capsys, "hardware")
    for name in cg.list_hardware():
        assert re.search(rf"^ {name} ", out, re.M)
    assert "989.4 TFLOP/s" in out


def test_device_listing_shows_every_field(capsys):
    out = run_ok(capsys, "hardware", "h100-sxm")
    h100 = cg.load_hardware("h100-sxm")
    for place, q in h100.rows:
        assert place in out
        assert (str(q) if q.unit != "B" else cg.hardware.units.format_bytes(q.value)) in out
    flat = " ".join(out.split())
    for note in h100.disagreements:
        assert " ".join(note.split()) in flat
    for key in h100.sources:
        assert key in out


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["report", "llama-3-8b", "B"], "'B': expected NAME=SIZE, such as B=1 or S=8Ki"),
        (["report", "llama-3-8b", "B=0"], "B: got '0', expected a positive integer"),
        (["report", "llama-3-8b", "B=-1"], "B: got '-1', expected a size such as 8192, 8Ki, 1.5M or 70B"),
        (["report", "llama-3-8b", "B=__import__('os')"], "B: got \"__import__('os')\", expected a size"),
        (["report", "llama-3-8b", "1=2"], "'1=2': expected NAME=SIZE"),
        (["report", "llama-3-8b", "B=1", "B=2"], "B: given twice, expected one size"),
        (["report", "llama-3-8b", "Q=1"], "'Q' is not a dimension of graph 'llama-3-8b', expected one of B, D, F"),
        (["report", "llama-3-8b", "fused=1"], "fused='1': the name is reserved"),
        (["report", "llama-9"], "model 'llama-9': unknown"),
        (["report", "missing.json"], "missing.json: "),
        (["report", "llama-3-8b", "--hardware", "h1000"], "hardware 'h1000' is unknown"),
        (["report", "llama-3-8b", "--hardware", "missing.toml"], "missing.toml: No such file"),
        (["report", "llama-3-8b", "--count", "half"], "expected"),
        (["report", "llama-3-8b", "--sort", "name"], "sort by 'name': expected one of order, time, flops, bytes"),
        (["report", "llama-3-8b", "--sort", "time"], "sort by time: expected numbers, needs sizes for B, S"),
        (["report", "llama-3-8b", "--depth", "0"], "'--depth'"),
        (["report", "llama-3-8b", "--depth", "two"], "'--depth'"),
        (["report", "llama-3-8b", "--attention", "slow"], "attention 'slow', expected 'flash' or 'eager'"),
        (["report", "llama-3-8b", "--dropout", "2"], "dropout 2.0, expected a number from 0 to below 1"),
        (["report", "llama-3-8b", "--dtype", "bf17"], "bf17"),
        (["report", "llama-3-8b", "--plot", "roof.gif"], "'roof.gif', expected a file ending in .png, .svg, .pdf"),
        (["report", "llama-3-8b", "--plot", "-"], "'-', expected a file ending in .png, .svg, .pdf"),
        (["report", "llama-3-8b", "--plot", "r.png"], "expected numbers on a device, unbound: B, S"),
        (["report", "llama-3-8b", "--memory-plot", "r.png"], "timeline: expected numbers, still unbound: B, S"),
        (["report", "llama-3-8b", "--json", "/missing/r.json"], "/missing/r.json: No such file or directory"),
        (["report", "llama-3-8b", "--json", "-", "--csv", "-"], "--json - and --csv -"),
        (["report", *LLAMA, "B=1e99"], "B: given twice"),
        (["report", "llama-3-8b", *[f"{n}=1e99T" for n in "BSDF"]], "out of range"),
        (["report"], "Missing argument 'MODEL'"),
        (["report", "llama-3-8b", "--bogus"], "No such option"),
        (["repotr"], "No such command 'repotr'"),
        (["formula", "mlp", "speed"], "quantity 'speed': expected one of peak-memory, params"),
        (["formula", "mlp", "flops", "--format", "html"], "format 'html': expected one of text, latex, python"),
        (["crossover", "mlp", "B"], "Missing option '--hardware'"),
        (["hardware", "h1000"], "hardware 'h1000' is unknown"),
    ],
)
def test_usage_errors_print_one_line_and_exit_2(capsys, words, text):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("costgraph: ")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["report", "x\x1b[31m\r\n" * 100_000],
        ["report", "gpt2", "B=" + "9" * 100_000],
        ["report", "gpt2", "B" * 100_000 + "=1"],
        ["report", "gpt2", "--hardware", "\u202e" * 100_000],
        ["report", "gpt2", "--plot", "a" * 100_000],
        ["report", "gpt2", "--json", "a" * 100_000],
        ["report", "gpt2", "--attention", "a\n" * 100_000],
        ["report", "gpt2", "--dtype", "a" * 100_000],
        ["report", "gpt2", "--bogus\n" * 1000],
        ["x" * 100_000],
        ["report", "\udcff.json"],
        ["report", "a\0b.json"],
        ["hardware", "a\0b.toml"],
        ["report", "gpt2", "--json", "a\0b"],
    ],
    ids=lambda words: repr(words[-1][:12]),
)
def test_huge_or_unprintable_values_give_short_error(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err) < 2100
    assert err.rstrip("\n").isprintable()


def test_internal_errors_keep_their_traceback(monkeypatch):
    from costgraph.cli import commands

    def broken(*words, **more):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(commands, "report", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["report", "gpt2"])


def test_interruptions_and_overflows(monkeypatch, capsys):
    from costgraph.cli import commands

    for error, expected in ((KeyboardInterrupt, 130), (OverflowError, 2)):
        monkeypatch.setattr(commands, "report", lambda *words, error=error, **more: (_ for _ in ()).throw(error()))
        assert cli.main(["report", "gpt2"]) == expected
    assert "too large" in capsys.readouterr().err


# -- the process -------------------------------------------------------------------------------------------------


def test_version_and_help(capsys):
    assert run_ok(capsys, "--version") == f"costgraph {cg.__version__}\n"
    assert run_ok(capsys) == run_ok(capsys, "--help")
    assert "costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192" in run_ok(capsys, "--help")
    for command in ("report", "formula", "crossover", "models", "hardware"):
        assert command in run_ok(capsys, "--help")
        assert "Usage: costgraph" in run_ok(capsys, command, "--help")


def test_module_and_exit_codes():
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"costgraph {cg.__version__}\n", "")
    done = process("report", "nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("costgraph: model 'nope': unknown")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extras_print_one_line(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom costgraph.cli import main\nsys.exit(main(['--version']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'costgraph: the command line needs typer and rich: pip install "costgraph[cli]"\n'


@pytest.mark.skipif(os.name == "nt", reason="pipes break in another way there")
def test_closed_pipe_is_silent():
    words = [sys.executable, "-m", "costgraph", "report", "gpt2", "--json", "-"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.close()
        said = done.stderr.read()
    assert (done.returncode, said) == (141, b"")


def test_output_width_follows_pipe_or_terminal(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    narrow = run_ok(capsys, "report", "gpt2", "--formulas")
    assert 60 < max(map(len, narrow.split("\n"))) <= 80
    monkeypatch.setenv("COLUMNS", "150")
    assert 100 < max(map(len, run_ok(capsys, "report", "gpt2", "--formulas").split("\n"))) <= 150
    monkeypatch.setenv("COLUMNS", "1")
    assert run_ok(capsys, "report", "gpt2")


def test_output_falls_back_to_ascii():
    done = process("report", "gpt2", "B=1", "S=8", env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "-----" in done.stdout
    assert done.stdout.isascii()


def test_colors_only_on_a_terminal(monkeypatch, capsys):
    assert "\x1b" not in run_ok(capsys, "report", "gpt2")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in run_ok(capsys, "report", "gpt2")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run_ok(capsys, "report", "gpt2")


def test_documented_output_matches_actual_output(capsys):
    root = pathlib.Path(__file__).parent.parent
    text = (root / "README.md").read_text() + (root / "docs" / "reference" / "cli.md").read_text()
    blocks = re.findall(r"```console\n\$ costgraph (.*)\n([^`]*)```", text)
    assert len(blocks) == 7
    for words, expected in blocks:
        assert run_ok(capsys, *words.split()) == expected
