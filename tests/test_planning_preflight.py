"""The preflight checks of a training run: figures equal the library's answers, and every verdict occurs."""

import pytest
import sympy
from each import each
from shared import load, training_step

import costgraph as cg
from costgraph.plan.preflight import PreflightCheck

CAPACITY = 85_017_493_504  # on an H100
SIZES = {"B": 1, "S": 4096}


@pytest.fixture(scope="module")
def step():
    return training_step(load("llama-3-8b"), precision="bf16", checkpoint=cg.every_block())


@pytest.fixture(scope="module")
def found(step):
    return cg.plan.preflight(step, "h100-sxm", devices=1024, tokens=15e12, mfu=0.5, **SIZES)


def test_figures_match_library_answers(step, found):
    flops = cg.plan.training_flops(step, 15e12, **SIZES)
    split = cg.plan.leading_term(step, 15e12, **SIZES)
    state, activations = cg.state_bytes(step, **SIZES), cg.activation_memory(step, **SIZES)
    days = cg.plan.training_days(flops, "h100-sxm", devices=1024, mfu=0.5, dtype="bf16")
    expected = {
        "parameters": (8_030_261_248, "1", None),
        "model FLOPs of a step": (cg.model_flops(step, **SIZES), "FLOP", None),
        "training FLOPs": (flops, "FLOP", None),
        "  6 * parameters * tokens": (split.leading, "FLOP", None),
        "  remainder": (split.remainder, "FLOP", None),
        "training time": (days, "days", None),
        "weights": (state.params, "B", None),
        "gradients": (state.gradients, "B", None),
        "optimizer state": (state.state, "B", None),
        "state memory": (12 * 8_030_261_248, "B", 1024 * CAPACITY),
        "checkpoint": (10 * 8_030_261_248, "B", None),
        "activation memory": (activations, "B", CAPACITY),
        "peak memory of a step": (cg.peak_memory(step, **SIZES), "B", CAPACITY),
        "even share of the state, and activations": (state.total / 1024 + activations, "B", CAPACITY),
    }
    rows = {row.name: (row.figure, row.unit, row.limit) for row in found.rows}
    assert list(rows)[: len(expected)] == list(expected)
    for name, row in expected.items():
        assert rows[name] == pytest.approx(row) if name.startswith("even") else rows[name] == row
    assert list(rows)[len(expected) :] == ["arithmetic intensity", "MFU"]


def test_preflight_verdicts(found):
    verdicts = {row.name: row.verdict for row in found.rows if row.verdict}
    assert verdicts == {
        "state memory": "ok",
        "activation memory": "ok",
        "peak memory of a step": "needs sharding",
        "even share of the state, and activations": "ok",
        "arithmetic intensity": "compute-bound",
        "MFU": "ok",
    }
    assert found.ok is True


def test_intensity_is_compared_with_ridge_point(step, found):
    row = found["arithmetic intensity"]
    assert row.figure == pytest.approx(cg.intensity(step, **SIZES))
    assert row.limit == pytest.approx(989.4 / 3.35)
    small = cg.plan.preflight(training_step(load("mlp")), "h100-sxm", B=2)
    assert small["arithmetic intensity"].verdict == "memory-bound"


def test_step_must_fit_on_one_device(step):
    checks = cg.plan.preflight(step, "h100-sxm", **SIZES)
    assert "even share of the state, and activations" not in [row.name for row in checks.rows]
    assert (checks["state memory"].verdict, checks["peak memory of a step"].verdict) == ("fails", "fails")
    assert checks.ok is False
    assert cg.plan.preflight(step, "b200", devices=1, L=2, **SIZES).ok is True


def test_day_limit(step):
    def time(most):
        return cg.plan.preflight(step, "h100-sxm", devices=64, tokens=1e12, mfu=0.4, most_days=most, **SIZES)[
            "training time"
        ]

    assert time(30).verdict == "ok"
    assert (time(20).verdict, time(20).limit) == ("fails", 20)
    assert time(30).figure == time(20).figure


@pytest.mark.parametrize(("used", "verdict"), [(0.5, "ok"), (0.95, "fails"), (1, "fails")])
def test_mfu_is_limited_by_roofline(step, used, verdict):
    row = cg.plan.preflight(step, "h100-sxm", mfu=used, tokens=1e9, **SIZES)["MFU"]
    times = cg.roofline(step, "h100-sxm", **SIZES)
    assert row.limit == pytest.approx(cg.mfu(step, times.lower_bound, "h100-sxm", **SIZES))
    assert row.limit < 0.95
    assert row.verdict == verdict


def test_default_mfu_is_roofline_estimate(step):
    row = cg.plan.preflight(step, "h100-sxm", **SIZES)["MFU"]
    estimate = cg.roofline(step, "h100-sxm", **SIZES).estimate
    assert row.figure == pytest.approx(cg.mfu(step, estimate, "h100-sxm", **SIZES))
    assert 0 < row.figure < row.limit < 1


def test_open_sizes_stay_symbolic(step):
    n, S = cg.dims("n S")
    checks = cg.plan.preflight(step, "h100-sxm", devices=n, tokens=15e12, mfu=0.5, B=1)
    assert checks.ok is None
    assert checks["state memory"].limit == n * CAPACITY
    assert checks["training time"].figure.free_symbols == {n, S}
    bound = cg.plan.preflight(step, "h100-sxm", devices=1024, tokens=15e12, mfu=0.5, **SIZES)
    for row in checks.rows:
        if isinstance(row.figure, sympy.Expr):
            known = {s.name: {"n": 1024, "S": 4096}[s.name] for s in row.figure.free_symbols}
            assert cg.evaluate(row.figure, **known) == pytest.approx(bound[row.name].figure)
    assert checks["arithmetic intensity"].verdict == "open"
    assert (checks["MFU"].limit, checks["MFU"].verdict) == (1, "ok")
    assert (
        cg.plan.preflight(step, "h100-sxm", tokens=1e9, B=1).rows[-1].name == "arithmetic intensity"
    )  # there is no MFU to assume


def test_preflight_text(found):
    lines = str(found).split("\n")
    assert lines[0] == "parameters: 8,030,261,248"
    assert "state memory: 96.36 GB (89.75 GiB), all devices have 87.06 TB (79.18 TiB): ok" in lines
    assert repr(found) == "Preflight('llama-3-8b' on 1024 h100-sxm)"
    assert str(PreflightCheck("x", cg.dims("B"), "B")) == "x: B [B]"
    with pytest.raises(KeyError, match="speed"):
        found["speed"]


@each(
    ("options", "error", "text"),
    [
        ({"mfu": 0}, cg.BindingError, "preflight: mfu: 0, expected a number above 0 and up to 1, or a formula"),
        ({"mfu": 40}, cg.BindingError, "preflight: mfu: 40, expected a number above 0 and up to 1, or a formula"),
        ({"tokens": -1}, cg.BindingError, "preflight: tokens: -1, expected"),
        ({"devices": "8"}, cg.BindingError, "preflight: devices: '8', expected"),
        ({"tokens": 1, "mfu": 0.5, "most_days": 0}, cg.BindingError, "preflight: most_days: 0, expected"),
        ({"Q": 1}, cg.BindingError, "'Q' is not a dimension"),
        ({"dtype": "bf17"}, cg.FormatError, "bf17"),
    ],
)
def test_invalid_arguments_are_refused(step, options, error, text):
    with pytest.raises(error, match=text):
        cg.plan.preflight(step, "h100-sxm", **options)


def test_forward_graph_and_unknown_device_are_refused(step):
    with pytest.raises(cg.GraphError, match="'gpt2' has no gradients; expected the result of training_step"):
        cg.plan.preflight(load("gpt2"), "h100-sxm")
    with pytest.raises(cg.SpecError, match="hardware 'h1' is unknown"):
        cg.plan.preflight(step, "h1")
    with pytest.raises(cg.SpecError, match=r"no matmul rate peak\.bf16"):
        cg.plan.preflight(step, "v100-sxm2-16gb")
    assert cg.plan.preflight(step, "v100-sxm2-16gb", fallback="fp16", **SIZES).ok is False
