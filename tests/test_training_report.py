"""The training section of a report, and the memory plot of a step."""

import csv
import io
import json

import pytest
from shared import load, training_step

import costgraph as cg
from costgraph.report import plot_timeline
from costgraph.report.data import TRAINING_QUANTITIES
from costgraph.report.files import to_csv, to_json
from costgraph.report.text import render

SIZES = {"B": 2, "S": 7, "D": 12, "H": 3, "F": 11, "L": 3, "V": 13, "P": 17}


@pytest.fixture(scope="module")
def step():
    g = load("gpt2", symbolic=True)
    return cg.training_step(g, precision="bf16-mixed", checkpoint=cg.every_block())


@pytest.fixture(scope="module")
def found(step):
    return cg.report(step, "h100-sxm", **SIZES)


def test_figures_match_library_answers(step, found):
    state = cg.state_bytes(step, **SIZES)
    expected = {
        "model-flops": cg.model_flops(step, **SIZES),
        "model-flops-full": cg.model_flops(step, "full", **SIZES),
        "hardware-flops": cg.hardware_flops(step, **SIZES),
        "state-bytes": 16 * cg.param_count(step, **SIZES),
        "weight-bytes": state.params,
        "gradient-bytes": state.gradients,
        "optimizer-bytes": state.state,
        "bytes-per-param": 16,
        "saved-state-bytes": 12 * cg.param_count(step, **SIZES),
        "activation-bytes": cg.activation_memory(step, **SIZES),
    }
    assert list(expected) == list(TRAINING_QUANTITIES)
    assert {name: f.value for name, f in found.training.figures.items()} == expected
    assert found.training.figures["model-flops"].formula == cg.model_flops(step)
    assert found.training.figures["activation-bytes"].formula == cg.activation_memory(step)


def test_utilizations_follow_from_the_roofline(step, found):
    times = cg.roofline(step, "h100-sxm", **SIZES)
    assert found.training.dtype == "bf16"
    assert found.training.mfu == pytest.approx(cg.mfu(step, times.estimate, "h100-sxm", **SIZES))
    assert found.training.hfu == pytest.approx(cg.hfu(step, times.estimate, "h100-sxm", **SIZES))
    assert found.training.most_mfu == pytest.approx(cg.mfu(step, times.lower_bound, "h100-sxm", **SIZES))
    assert found.training.mfu < found.training.hfu < 1
    assert found.training.mfu < found.training.most_mfu
    by_phase = {part.name: part.value.matmul for part in found.phases}
    assert list(by_phase) == ["forward", "backward", "recompute", "optimizer"]
    assert sum(by_phase.values()) == cg.hardware_flops(step, **SIZES)


def test_forward_graph_has_no_training_section():
    r = cg.report(load("mlp"), "h100-sxm", B=3)
    assert r.training is None
    assert json.loads(to_json(r))["training"] is None
    assert "MFU" not in str(r)


def test_utilization_requires_device_and_sizes(step):
    for r in (cg.report(step, **SIZES), cg.report(step, "h100-sxm", B=2)):
        assert (r.training.dtype, r.training.mfu, r.training.hfu, r.training.most_mfu) == (None,) * 4
        assert "MFU" not in str(r)


def test_step_without_matmuls_has_no_utilization():
    B = cg.dims("B")
    with cg.Graph("g") as g:
        g.output(cg.reduce(cg.relu(g.param("w", (B,))), "b -> ", "mean"))
    r = cg.report(cg.training_step(g), "h100-sxm", B=3)
    assert r.training.mfu is None
    assert "model FLOPs                0 FLOP" in str(r)


def test_text_separates_state_and_activations(step):
    real = training_step(load("llama-3-8b"), precision="bf16-mixed", checkpoint=cg.every_block())
    r = cg.report(real, "h100-sxm", B=1, S=4096)
    text = str(r)
    n = 8_030_261_248
    for line in (
        f"model FLOPs                197.6 TFLOP = {cg.model_flops(real, B=1, S=4096):,} FLOP",
        f"hardware FLOPs             246 TFLOP = {cg.hardware_flops(real, B=1, S=4096):,} FLOP",
        f"state memory               128.5 GB (119.7 GiB) = {16 * n:,} B",
        f"  weights                  32.12 GB (29.92 GiB) = {4 * n:,} B",
        f"  gradients                32.12 GB (29.92 GiB) = {4 * n:,} B",
        f"  optimizer state          64.24 GB (59.83 GiB) = {8 * n:,} B",
        "  bytes per parameter      16 B",
        f"activation memory          9.605 GB (8.945 GiB) = {cg.activation_memory(real, B=1, S=4096):,} B",
        f"  peak at                  {r.peak.op} ({r.peak.phase})",
    ):
        assert line in text
    assert r.peak.phase == "optimizer"  # temporaries in the update come on top of the state
    assert f"MFU at the estimate        {100 * r.training.mfu:.1f}% of the bf16 peak, at most" in text
    for shown in (r, cg.report(step, B=2)):
        for formulas in (False, True):
            assert max(map(len, render(shown, formulas=formulas).split("\n"))) <= 80


def test_json_and_csv_have_same_numbers(found):
    data = json.loads(to_json(found))["training"]
    rows = {r["quantity"]: r for r in csv.DictReader(io.StringIO(to_csv(found))) if r["part"] == "training"}
    for name, figure in found.training.figures.items():
        assert data["figures"][name]["value"] == figure.value
        assert float(rows[name]["value"]) == figure.value
        assert rows[name]["formula"] == data["figures"][name]["formula"]
    assert data["dtype"] == "bf16"
    assert (data["mfu"]["value"], float(rows["mfu"]["value"])) == (found.training.mfu, found.training.mfu)
    assert float(rows["most-mfu"]["value"]) == data["most_mfu"]["value"] == found.training.most_mfu


def test_plot_stacks_roles_and_marks_phases(step):
    pytest.importorskip("matplotlib")
    line = cg.timeline(step, **SIZES)
    figure = plot_timeline(line, capacity=1e6)
    (ax,) = figure.axes
    (legend,) = figure.legends
    names = [t.get_text() for t in legend.get_texts()]
    held = {role for role, amounts in line.roles.items() if any(amounts)}
    assert {"param", "state", "gradient", "activation", "temporary"} <= held
    phases = {f"phase {p}" for p in ("forward", "recompute", "backward", "optimizer")}
    above, beside = phases & {f"phase {t.get_text()}" for t in ax.texts}, set(names) - held
    # each label appears once: above a phase that is long enough, otherwise beside the roles
    assert above.isdisjoint(beside)
    assert above | beside == phases
    assert set(names) >= held
    assert names.index("temporary") < names.index("activation") < names.index("param")  # in stacking order
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "step [ops that take memory, in program order]",
        "live memory [B]",
    )
    tops = [c.get_paths()[0].vertices[:, 1].max() for c in ax.collections if c.get_label() in held]
    assert max(tops) == max(ax.lines[0].get_ydata()) == line.peak


def test_few_phases_are_labelled_at_their_start(tmp_path):
    pytest.importorskip("matplotlib")
    plain = training_step(load("gpt2", symbolic=True))
    path = tmp_path / "line.png"
    figure = cg.timeline(plain, **SIZES).plot(path)
    assert {"forward", "backward", "optimizer"} <= {t.get_text() for t in figure.axes[0].texts}
    assert path.stat().st_size > 10_000
