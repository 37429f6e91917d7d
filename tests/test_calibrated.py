"""Calibrated times: per-op features, times derived by hand, the lower bound, and model files."""

import json
from math import exp, prod
from pathlib import Path

import pytest
from shared import load

import costgraph as cg
from costgraph.analysis.calibrated import (
    DEVICE,
    PLACE,
    SHIPPED,
    Calibration,
    facts_of,
    load_calibration,
    loads_of,
    shipped,
)
from costgraph.analysis.work import ask

#: A model with no fitted terms: launch latency plus time at peak rates.
PLAIN = {
    "schema": "costgraph/calibration/1", "records": "none.json", "versions": {}, "date": "2026-01-01", "compute": {},
    "memory": {}, "launch": {}, "vector": 0, "special": 0, "typical": dict.fromkeys(DEVICE, 10.0), "devices": {},
    "width": 1, "places": [], "weights": [],
}  # fmt: skip
LAUNCH = 5e-6


def product_of(M, N, K, dtype="fp16"):
    with cg.Graph("product", dtype=dtype) as g:
        g.output(cg.einsum(g.input("a", (M, K)), g.input("b", (K, N)), "m k, k n -> m n"))
    return g


def loads(graph, device="h100-sxm", **sizes):
    return loads_of(ask(graph, device, None, sizes, "test"))


def plain(tmp_path, **changed):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(PLAIN | changed))
    return load_calibration(path)


def seconds(model, graph, device="h100-sxm", **sizes):
    asked = ask(graph, device, None, sizes, "test")
    return model.seconds(loads_of(asked), asked.rates)


# -- features of ops -----------------------------------------------------------------------------------------------


def test_convolution_and_its_gradients_are_single_matmuls():
    # B images, C by H by W; O filters, 3 by 5, without padding: H - 2 by W - 4 positions each
    B, C, H, W, O = 2, 7, 13, 17, 11
    with cg.Graph("conv", dtype="fp16") as g:
        x = g.param("x", (B, C, H, W))
        g.output(cg.reduce(cg.conv(x, "b c h w -> b o h w", window=(3, 5), o=O), "b o h w -> ", "sum"))
    step = cg.backward(g)
    matmuls = {load.product.windows: load.product for load in loads(step) if load.product is not None}
    points = B * (H - 2) * (W - 4) * O * C * 3 * 5
    assert set(matmuls) == {"summed", "kept", "spread"}
    # im2col: a positions-by-window matrix times a window-by-filters matrix
    assert (matmuls["summed"].m, matmuls["summed"].n, matmuls["summed"].k) == (B * (H - 2) * (W - 4), O, C * 3 * 5)
    # weight gradient: window by positions times positions by filters, in either order
    assert sorted((matmuls["kept"].m, matmuls["kept"].n)) == sorted((C * 3 * 5, O))
    assert matmuls["kept"].k == B * (H - 2) * (W - 4)
    # input gradient: one row per input position
    assert sorted((matmuls["spread"].m, matmuls["spread"].n)) == sorted((B * H * W, C))
    for p in matmuls.values():
        assert p.flops == 2 * points
        assert 2 * prod((p.batch, p.m, p.n, p.k)) == pytest.approx(p.flops)


def test_load_roles_follow_op_kinds():
    D = 64
    with cg.Graph("roles", dtype="bf16") as g:
        x = cg.embedding(g.input("ids", (2, 31), dtype="int64"), g.param("table", (101, D)))
        q = cg.rearrange(cg.linear(x, "b s d -> b s f", f=D), "b s (h k) -> b h s k", h=4)
        y = cg.rearrange(cg.attention(q, q, q, causal=True), "b h s k -> b s (h k)")
        g.output(cg.reduce(cg.gelu(cg.layer_norm(y)), "b s d -> b d", "sum"))
    assert [load.role for load in loads(g)] == [
        "indexed", "product", "attention", *["copy"] * (len(loads(g)) - 6), "norm", "pointwise", "reduction",
    ]  # fmt: skip


# -- times ---------------------------------------------------------------------------------------------------------


def test_matmul_without_terms_takes_launch_plus_peak_time(tmp_path):
    M, N, K = 4093, 2039, 1021
    compute = 2 * M * N * K / 989.4e12
    memory = 2 * (M * K + K * N + M * N) / 3.35e12
    # compute and memory overlap almost fully: the cube root of the sum of cubes
    wanted = LAUNCH + (compute**3 + memory**3) ** (1 / 3)
    assert seconds(plain(tmp_path), product_of(M, N, K)) == pytest.approx(wanted, rel=1e-9)


def test_terms_multiply_time_and_devices_add_their_own(tmp_path):
    graph, at_peak = product_of(8191, 8191, 8191), 2 * 8191**3 / 989.4e12
    # two thirds of the peak on all devices, times nine tenths on this one
    model = plain(tmp_path, compute={"matrix unit": 0.4}, devices={"h100-sxm": {"matrix unit": 0.1}})
    assert seconds(model, graph) == pytest.approx(at_peak * exp(0.5), rel=0.01)
    assert seconds(model, graph, "h200-sxm") == pytest.approx(at_peak * exp(0.4), rel=0.01)


def test_ops_near_a_measured_point_take_its_correction(tmp_path):
    near, far = product_of(8191, 8191, 8191), product_of(127, 131, 8191)
    plain_model = plain(tmp_path)
    asked = ask(near, "h100-sxm", None, {}, "test")
    from costgraph.analysis.calibrated import rows_of

    place = rows_of(loads_of(asked), asked.rates, plain_model.typical).shape[0].tolist()
    seen = plain(tmp_path, places=[place], weights=[0.7])
    work = seconds(plain_model, near) - LAUNCH
    assert seconds(seen, near) == pytest.approx(LAUNCH + work * exp(0.7), rel=1e-6)
    assert seconds(seen, far) == pytest.approx(seconds(plain_model, far), rel=0.01)


def test_calibrated_time_is_clamped_to_lower_bound(monkeypatch, tmp_path):
    graph = product_of(4093, 4099, 4111)
    fast = plain(tmp_path, compute={"matrix unit": -3.0}, memory={"all": -3.0})
    monkeypatch.setattr("costgraph.analysis.step_time.shipped", lambda: fast)
    assert cg.seconds(graph, "h100-sxm", "calibrated") == cg.seconds(graph, "h100-sxm", "lower")


@pytest.mark.filterwarnings("ignore::costgraph.StandInWarning")
def test_calibrated_time_exceeds_lower_bound_on_every_device():
    graph = product_of(521, 1031, 509, "bf16")
    for device in cg.list_hardware():
        lower, calibrated = (cg.seconds(graph, device, which) for which in ("lower", "calibrated"))
        assert 0 < lower <= calibrated < 1e-3


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", {"S": 64}), ("mixtral-8x7b", {"S": 128}), ("resnet50", {}), ("vit-b-16", {}),
        ("mamba-130m", {"S": 128}), ("gru-ptb-small", {"S": 16}),
    ],
)  # fmt: skip
def test_calibrated_time_of_models_is_above_lower_bound(name, sizes):
    graph, sizes = load(name), {"B": 2, **sizes}
    lower, calibrated = (cg.seconds(graph, "b200", which, **sizes) for which in ("lower", "calibrated"))
    assert lower < calibrated < 100 * lower + 0.1


def test_empty_graph_takes_no_time():
    with cg.Graph("nothing") as g:
        g.output(g.input("x", (3, 5)))
    assert cg.seconds(g, "h100-sxm", "calibrated") == 0


# -- errors --------------------------------------------------------------------------------------------------------


def test_open_sizes_and_unknown_hardware_raise():
    graph, device = product_of(*cg.dims("M N K")), cg.load_hardware("h100-sxm")
    text = "seconds, calibrated, of graph 'product': expected numbers, still unbound: K, N"
    with pytest.raises(cg.BindingError, match=text):
        cg.seconds(graph, device, "calibrated", M=3)
    with pytest.raises(cg.BindingError, match=r"still unbound: .*bandwidth"):
        cg.seconds(graph, device.symbolic(), "calibrated", M=3, N=5, K=7)
    with pytest.raises(cg.UnsupportedError, match="hierarchical=True, expected False"):
        cg.seconds(graph, device, "calibrated", hierarchical=True, M=3, N=5, K=7)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"schema": "costgraph/calibration/0"}, "no schema costgraph/calibration/1, expected a model that"),
        ({"vector": "fast"}, "vector 'fast', expected a number"),
        ({"vector": float("nan")}, "vector nan, expected a number"),
        ({"compute": {"matrix unit": [1]}}, r"compute: matrix unit \[1\], expected a number"),
        ({"width": 0}, "width 0, expected a number above 0"),
        ({"places": [[1.0, 2.0]], "weights": [1.0]}, f"expected rows of {PLACE} numbers"),
        ({"weights": [1.0]}, "0 places, 1 weights, expected a model that"),
        ({"typical": {}}, "typical has no 'intensity', expected a model that"),
        ({"colour": 1}, "key 'colour' is unknown"),
    ],
)
def test_invalid_model_files_raise(tmp_path, changed, text):
    with pytest.raises(cg.FormatError, match=text):
        plain(tmp_path, **changed)


def test_unreadable_model_files_raise(tmp_path):
    path = tmp_path / "model.json"
    with pytest.raises(cg.FormatError, match=r"model\.json: .*, expected a model that costgraph calibrate --records"):
        load_calibration(path)
    path.write_text("[" * 100_000)
    with pytest.raises(cg.FormatError, match=r"model\.json"):
        load_calibration(path)


# -- shipped model -------------------------------------------------------------------------------------------------


def test_shipped_model_reports_validation_accuracy():
    model = shipped()
    assert isinstance(model, Calibration)
    assert model.records == "gpus.json, b200.json"
    assert SHIPPED.stat().st_size < 200_000
    assert model.figures.rows > 2000
    assert model.figures.folds >= 0.75  # share of measurements within 25 %, cross-validated on tenths
    assert model.figures.devices >= 0.55  # leaving one device out


def test_missing_device_facts_are_omitted():
    # 400 W for 312 TFLOP/s, 108 cores, 2039 GB/s, 40 MiB L2, 19.5 TFLOP/s vector rate
    facts = {name: exp(value) for name, value in facts_of(cg.load_hardware("a100-80-sxm")).items()}
    wanted = (312e12 / 2.039e12, 108, 2.039e12 / 108, 40 * 2**20, 312e12 / 400, 312 / 19.5, 2.039e12)
    assert facts == pytest.approx(dict(zip(DEVICE, wanted, strict=True)))
    # the two large cores are not units that tiles are distributed over
    assert set(facts_of(cg.load_hardware("tpu-v4"))) == {"intensity", "bandwidth"}


def test_calibration_page_matches_shipped_figures():
    page = Path(__file__).parents[1] / "docs" / "accuracy" / "calibration.md"
    if not page.exists():
        pytest.skip("the package is tested without its pages")
    figures = shipped().figures
    whole = (figures.rows, figures.fitted, figures.folds, figures.shapes, figures.devices)
    for name, (count, *shares) in [*figures.families.items(), ("all", whole)]:
        row = f"| {name} | {count:,.0f} | {' | '.join(f'{share:.1%}' for share in shares)} |"
        assert row in page.read_text()
