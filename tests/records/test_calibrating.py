"""`costgraph calibrate --records`: recovered rates, held-out records, output files and errors."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from shared import load

import costgraph as cg
from costgraph.analysis.calibrated import (
    SHIPPED,
    Rows,
    load_calibration,
    loads_of,
    rows_of,
    shipped,
)
from costgraph.analysis.work import ask
from costgraph.cli import app as cli
from costgraph.report.records import calibrate
from costgraph.report.records.fitting import Measured, fit

PEAKS = {"h100-sxm": 989.4, "a100-80-sxm": 312.0}
OTHER = {"b200": 2250.0}
SIZES = [(4093, 4099, 4111), (8191, 2039, 4093), (2039, 8191, 8191), (6143, 6151, 2053), (8191, 8209, 8219)]


def record(device, M, N, K, share):
    return {
        "id": f"{device}-{M}-{N}-{K}", "source": "made up", "device": device, "family": "squares", "what": "kernel",
        "inputs": {"op": "gemm", "M": M, "N": N, "K": K, "dtype": "fp16"}, "quantity": "rate", "unit": "TFLOP/s",
        "value": round((PEAKS | OTHER)[device] * share, 3),
    }  # fmt: skip


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.json"
    rows = [record(device, *sizes, 0.6) for device in PEAKS for sizes in SIZES]
    path.write_text(json.dumps([*rows, rows[0] | {"id": "x", "family": "knitting"}]))
    return path


def product(M, N, K):
    with cg.Graph("product", dtype="fp16") as g:
        g.output(cg.einsum(g.input("a", (M, K)), g.input("b", (K, N)), "m k, k n -> m n"))
    return g


def test_calibration_recovers_a_share_of_the_peak(records):
    calibration = calibrate(records, validate=False)
    assert calibration.model.figures is None
    assert sum(calibration.unpredicted.values()) == 1
    for device in ("h100-sxm", "a100-80-sxm"):  # 60 % of the peak, at a size between the measured ones
        query = ask(product(5119, 5113, 5107), device, None, {}, "test")
        predicted = calibration.model.seconds(loads_of(query), query.rates)
        assert predicted == pytest.approx(2 * 5119 * 5113 * 5107 / (PEAKS[device] * 1e12 * 0.6), rel=0.08)


def test_held_out_records_do_not_affect_the_fit():
    graph, rows = product(*cg.dims("M N K")), []
    for device in PEAKS:
        for M, N, K in SIZES:
            query = ask(graph, device, None, {"M": M, "N": N, "K": K}, "test")
            rows.append(rows_of(loads_of(query), query.rates, shipped().typical))
    seconds = np.concatenate([r.matrix for r in rows]) * 1.5
    names = np.repeat(list(PEAKS), len(SIZES))
    train = names == "h100-sxm"
    of = np.arange(len(rows))
    first, second = (
        fit(Measured(np.where(train, seconds, seconds * factor), names, Rows.joined(rows), of), train)
        for factor in (1.0, 7.0)
    )
    assert np.array_equal(first.predicted, second.predicted)
    assert list(first.devices) == ["h100-sxm"]
    # a held-out device is predicted from the rates common to all devices
    assert np.exp(first.predicted[~train]) == pytest.approx(seconds[~train], rel=0.35)


def test_calibrate_records_command_prints_and_writes(records, capsys):
    out = records.with_name("model.json")
    assert cli.main(["calibrate", "--records", str(records), "--out", str(out)]) == 0
    done = capsys.readouterr()
    assert "records.json: share of measurements that are within 25%" in done.out
    assert "squares" in done.out
    assert "device left out: 2 of 2" in done.err
    model = load_calibration(out)
    assert model.records == "records.json"
    assert model.figures.rows == 10
    assert model.figures.fitted == 1.0
    assert len(model.places) == len(model.weights)


def test_several_record_files_are_merged(records):
    other = records.with_name("other.json")
    other.write_text(json.dumps([record("b200", *sizes, 0.5) for sizes in SIZES]))
    model = calibrate(records, other, validate=False).model
    assert model.records == "records.json, other.json"
    for device, rate in (("h100-sxm", 0.6 * 989.4), ("b200", 0.5 * 2250)):
        query = ask(product(5119, 5113, 5107), device, None, {}, "test")
        taken = model.seconds(loads_of(query), query.rates)
        assert taken == pytest.approx(2 * 5119 * 5113 * 5107 / (rate * 1e12), rel=0.08)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--device", "cuda"], "--device: not used with --records, expected only --out and --quick"),
        (["--like", "t4"], "--like: not used with --records, expected only --out and --quick"),
        (["--out", "model.toml"], "model.toml: expected a path that ends in .json"),
    ],
)
def test_meaningless_options_are_refused(records, capsys, words, text):
    assert cli.main(["calibrate", "--records", str(records), *words]) == 2
    assert text in capsys.readouterr().err


def test_calibration_needs_predicted_times(records, capsys):
    records.write_text(json.dumps([record("h100-sxm", 5, 7, 11, 0.1)]))
    assert cli.main(["calibrate", "--records", str(records)]) == 2
    assert "1 records with a time that is predicted, expected two at least" in capsys.readouterr().err
    assert cli.main(["calibrate"]) == 2
    assert "calibrate: no --out, expected --out FILE for the specification, or --records FILE" in (
        capsys.readouterr().err
    )


@pytest.mark.long
def test_shipped_model_is_fitted_to_the_records():
    folder = Path(__file__).parents[1] / "measured" / "published"
    model = calibrate(folder / "gpus.json", folder / "b200.json", validate=False).model
    given = json.loads(SHIPPED.read_text())
    assert model.records == given["records"]
    graph = load("llama-3-8b")
    for device in ("h100-sxm", "t4", "b200"):
        query = ask(graph, device, None, {"B": 1, "S": 512}, "test")
        taken, wanted = (m.seconds(loads_of(query), query.rates) for m in (model, shipped()))
        assert taken == pytest.approx(wanted, rel=0.05)
