"""`costgraph validate --records`: printed output, files, errors, and exit codes."""

import json
import re

import pytest
from each import each
from lazy import lazy_import

pytest.importorskip("typer")
pytest.importorskip("rich")

from costgraph.cli import app as cli

lazy_import("matplotlib")

INPUTS = {"op": "gemm", "M": 4093, "N": 4099, "K": 4111, "dtype": "fp16"}
RECORD = {
    "id": "a", "source": "a page", "device": "h100-sxm", "family": "squares", "what": "kernel", "inputs": INPUTS,
    "quantity": "rate", "unit": "TFLOP/s", "value": 700,
}  # fmt: skip


@pytest.fixture
def run(capsys, tmp_path):
    def _run(records, *words):
        path = tmp_path / "records.json"
        path.write_text(json.dumps(records))
        code = cli.main(["validate", "--records", str(path), *words])
        done = capsys.readouterr()
        return code, done.out, done.err

    return _run


def test_held_limits_exit_with_zero(run, tmp_path):
    out, pictures = tmp_path / "out.json", tmp_path / "pictures"
    code, text, err = run(
        [RECORD, RECORD | {"id": "b", "family": "knitting"}], "--out", str(out), "--plot", str(pictures)
    )
    assert (code, err) == (0, "")
    # 989.4 TFLOP/s from the datasheet over the measured 700
    assert re.search(r"squares +h100-sxm +1 +1 +0 +1\.41 +1\.41 +1\.41", text)
    assert "1 of knitting  expected a family that has a prediction" in text
    assert "holds  no time is below its lower bound: 0 of 1 are" in text
    assert (pictures / "times.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads(out.read_text())
    assert (saved["schema"], saved["records"]) == ("costgraph/held/1", "records.json")
    assert [limit["holds"] for limit in saved["limits"]] == [True, True]
    assert saved["rows"][1] == {"id": "b", "reason": "expected a family that has a prediction"}


@each(
    ("value", "text"),
    [
        (1100, "fails  no time is below its lower bound: 1 of 1 are"),
        (300, "fails  measured over estimated times of products are from 0.9 to 2.0 in the\n       median: 3.30 of 1"),
    ],
)
def test_failed_limits_exit_with_one(run, value, text):
    code, out, err = run([RECORD | {"value": value}])
    assert (code, err) == (1, "")
    assert text in out


def test_limits_hold_without_predictions(run):
    code, out, _ = run([RECORD | {"family": "knitting"}])
    assert code == 0
    assert "1 of knitting" in out


def test_markup_and_control_characters_are_escaped(run):
    odd = {"family": "[bold]x\x1b[31m\n", "device": "[/]\x07"}
    code, out, _ = run([RECORD | odd])
    assert code == 0
    assert "[bold]x" in out
    assert not {"\x1b", "\x07"} & set(out)


@each(
    ("words", "text"),
    [
        (["--device", "cuda"], "--device: not used with --records, expected only --out and --plots"),
        (["--quick"], "--quick: not used with --records, "),
        (["--out", "x.txt"], "x.txt: expected a path that ends in .json"),
        (["--out", "/no/such/folder/x.json"], "/no/such/folder/x.json: no such folder, "),
    ],
)
def test_invalid_validate_options_are_refused(run, words, text):
    code, out, err = run([RECORD], *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"costgraph: {text}")


def test_validate_needs_out_or_records(capsys):
    assert cli.main(["validate"]) == 2
    assert capsys.readouterr().err == (
        "costgraph: validate: no --out, expected --out FILE for the record, or --records FILE\n"
    )
    assert cli.main(["validate", "--records", "/no/such.json"]) == 2
    assert capsys.readouterr().err.startswith("costgraph: /no/such.json: No such file or directory, expected ")


def test_unpredicted_peak_fails(run):
    peak = {"family": "liger", "what": "peak memory", "quantity": "max_memory_allocated", "unit": "MiB",
            "inputs": {"kernel": "softmax", "provider": "torch", "mode": "full"}}  # fmt: skip
    code, out, _ = run([RECORD | peak])
    assert code == 1
    assert "fails  peaks that an allocator counted are predicted: 0 of 1 are" in out


def test_one_of_two_peaks_without_prediction_fails(run):
    pytest.importorskip("torch.utils.flop_counter")
    inputs = {"kernel": "relu_squared", "provider": "torch", "mode": "full", "M": 4, "N": 8, "dtype": "float32"}
    peak = {"family": "liger", "what": "peak memory", "quantity": "max_memory_allocated", "unit": "B", "inputs": inputs}
    norm = peak | {"device": "t4", "id": "norm", "inputs": inputs | {"kernel": "layer_norm"}, "value": 40_000}
    code, out, _ = run([RECORD | peak, RECORD | norm])
    assert code == 1
    text = " ".join(out.split())
    assert "1 of liger peak memory: a vector of N elements is measured, no matrix" in text
    assert "fails at least 95% of predicted peaks are within 4 KiB of those counted: 0 of 1 are, off by" in text
