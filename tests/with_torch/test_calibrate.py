"""A quick calibration of the current CPU, and its time bounds."""

import sys

import pytest

pytest.importorskip("torch.utils.flop_counter")

import torch
from outside_cache import CPU, elementwise, fastest, products, shortly

import costgraph as cg
from costgraph.cli import app as cli
from costgraph.torch.calibration import (
    BUILT_IN,
    Calibration,
    Rate,
    calibrate,
    last_level_cache,
)
from costgraph.torch.measurement import environment


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Run on one thread: synchronizing threads would measure the machine's load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def calibration(one_thread):
    with pytest.MonkeyPatch.context() as patch:
        shortly(patch)
        return calibrate("cpu", quick=True, command="a test")


@pytest.fixture(scope="module")
def outside(one_thread):
    """Use working sets beyond this machine's cache, which may take gigabytes."""
    return calibrate("cpu", quick=True, command="a test")


def test_calibration_lists_its_measurements(calibration):
    hardware = calibration.hardware
    kinds = {(kind, which) for kind, which, _ in calibration.rates}
    assert {("bandwidth", s) for s in ("read", "write", "copy", "triad", "update")} < kinds
    assert {("matmul", d) for d in ("fp64", "fp32", "bf16")} < kinds
    assert {("pointwise", "add"), ("transcendental", "exp"), ("launch", "op")} < kinds
    assert hardware.attained().peak.keys() == hardware.peak.keys() >= {"fp64", "fp32", "bf16"}
    assert hardware.bandwidth == hardware.attained().bandwidth
    assert "1 thread, torch" in hardware.sources["CALIBRATED"]
    assert hardware.sources["CALIBRATED"].endswith("command: a test")
    shown = str(calibration)
    assert all(text in shown for text in ("1 thread", "bandwidth  update", "matmul     bf16", "launch"))


def test_calibrated_rates_are_plausible(calibration):
    """Errors by a factor of 1000 fail here."""
    hardware = calibration.hardware
    assert 10**9 < hardware.bandwidth.value < 10**12
    assert 10**8 < hardware.rate("fp64").value <= hardware.rate("fp32").value < 10**14
    assert hardware.rate("fp32", "vector").value >= calibration.best("pointwise").value
    assert 10**-8 < float(hardware.tables["attained"]["launch"]) < 10**-3


def test_calibration_restores_torch_settings(calibration):
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.is_grad_enabled()


# -- the bound -----------------------------------------------------------------------------------------------------


def outside_cases():
    """Return working sets of more than twice the last-level cache, and two matmul shapes."""
    cache = last_level_cache(CPU) or 2**26
    rows = 3 * cache // 4096 + 1
    yield from elementwise(rows)
    edge = 1 + int((cache / 2) ** 0.5)  # three fp32 matrices: 6 times the cache
    yield from products(67, edge, edge)
    yield from products(4 * edge // 5, 509, 4 * edge // 5)
    yield from products(67, 2039, 2053, "bf16")
    yield from products(509, 521, 523, "fp64")


@pytest.mark.long
def test_no_run_beats_the_lower_bound(outside):
    """Background load slows runs and lowers attained rates; a failure is measured again."""
    calibration = outside
    graphs, seconds = {}, {}
    for name, graph, call in outside_cases():
        graphs[name], seconds[name] = graph, fastest(call, least=3, budget=0.1)

    def bounds():
        return {name: cg.roofline(graph, calibration.hardware).lower_bound for name, graph in graphs.items()}

    for _ in range(3):
        if all(seconds[name] >= bound for name, bound in bounds().items()):
            break
        calibration = calibration.faster(calibrate("cpu", quick=True))
    assert {n: (seconds[n], bound) for n, bound in bounds().items() if seconds[n] < bound} == {}
    # the bound is tight: streams and matmuls are close to it
    ratios = {name: seconds[name] / bound for name, bound in bounds().items()}
    assert min(ratios.values()) < 10, ratios


@pytest.mark.long
def test_in_place_updates_do_not_beat_the_bandwidth(outside):
    calibration = outside
    cache = last_level_cache(CPU) or 2**26
    x, y = torch.rand(cache // 4 * 2), torch.rand(cache // 4 * 2)  # together 4 times the cache
    moved = 3 * 4 * len(x)
    seconds = fastest(lambda: x.add_(y))
    for _ in range(3):
        if seconds >= moved / float(calibration.hardware.bandwidth):
            break
        calibration = calibration.faster(calibrate("cpu", quick=True))
    assert seconds >= moved / float(calibration.hardware.bandwidth)


# -- devices with a datasheet ------------------------------------------------------------------------------------------


def test_calibration_may_refer_to_a_similar_device(calibration, monkeypatch, tmp_path):
    monkeypatch.setattr("costgraph.torch.calibration._probes", lambda *a: iter(()))
    assert calibrate("cpu", quick=True, like="h100-sxm").like == cg.load_hardware("h100-sxm")
    with pytest.raises(cg.errors.SpecError, match="hardware 'h100' is unknown"):
        calibrate("cpu", like="h100")
    calibration.save(tmp_path / "mine.toml")
    with pytest.raises(cg.errors.SpecError, match="hardware mine: it was calibrated itself, expected a data sheet"):
        calibrate("cpu", like=tmp_path / "mine.toml")
    with pytest.raises(cg.errors.UnsupportedError, match="device 'mps': cannot be measured"):
        calibrate("mps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_calibration_keeps_datasheet_peaks(tmp_path):
    hardware = calibrate("cuda", quick=True).save(tmp_path / "gpu.toml")
    sheet = BUILT_IN.get(torch.cuda.get_device_name())
    attained = hardware.attained()
    if sheet is not None:
        assert hardware.peak == cg.load_hardware(sheet).peak
        for dtype in ("bf16", "fp16", "tf32", "fp32"):
            assert attained.rate(dtype).value <= hardware.rate(dtype).value, dtype
        assert attained.bandwidth.value <= hardware.bandwidth.value
    assert attained.rate("bf16").value > attained.rate("fp32").value


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch):
    """Run the command with an existing calibration."""
    pytest.importorskip("typer")
    asked = []

    def fake(device, *, quick, like):
        asked.append((device, quick, like, torch.get_num_threads()))
        rates = {
            ("bandwidth", "read", "1073741824"): Rate(1e10, "sum"),
            ("matmul", "bf16", "256"): Rate(1e11, "a @ b"),
        }
        place = environment("cpu", command="a test")
        return Calibration(place, rates, None, None)

    monkeypatch.setattr("costgraph.torch.calibration.calibrate", fake)
    return asked


def test_calibrate_command_writes_a_loadable_specification(quickly, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert cli.main(["calibrate", "--out", str(path), "--quick"]) == 0
    assert quickly == [("cpu", True, None, 1)]
    out = capsys.readouterr().out
    assert "bandwidth  read            10 GB/s   sum" in out
    assert f"written to '{path}'" in out
    words = ["report", "mlp", "--hardware", str(path), "--fallback", "bf16", "B=7"]
    assert cli.main(words) == 0
    assert "ridge point                10 FLOP/B = 100 GFLOP/s / 10 GB/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--out", "mine.json"],
            "costgraph: mine.json: expected a path that ends in .toml",
        ),
        (["--out", "no/mine.toml"], "costgraph: no/mine.toml: no such folder, expected a file that can be written"),
        (["--out", "mine.toml", "--threads", "100000"], "costgraph: --threads 100000: this machine has"),
        (["--out", "mine.toml", "--threads", "all"], "costgraph: --threads"),
        ([], "costgraph: calibrate: no --out, expected --out FILE for the specification, or --records FILE"),
    ],
)
def test_calibrate_command_rejects_invalid_arguments(quickly, words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", *words]) == 2
    assert capsys.readouterr().err.startswith(text)
    assert quickly == []


def test_calibrate_command_without_torch_explains_the_installation(monkeypatch, capsys, tmp_path):
    pytest.importorskip("typer")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["calibrate", "--out", str(tmp_path / "mine.toml")]) == 2
    assert capsys.readouterr().err == (
        "costgraph: calibrate: torch is not installed: pip install torch, or the build "
        "for this machine from https://pytorch.org/get-started\n"
    )
