"""Plot labels: drawn boxes do not overlap, axes fit the data, and colours are distinguishable."""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from lazy import lazy_import
from shared import load, training_step

import costgraph as cg
from costgraph.report import plot_timeline
from costgraph.report.figures import COLORS, PALETTE
from costgraph.report.plots import _ROLES, place_labels

pytest.importorskip("torch")
from costgraph.torch.validation import Validation

lazy_import("matplotlib")

MEASURED = Path(__file__).parent / "measured/validate-cpu.json"
SIZES = {"B": 1, "S": 2039}


@cache
def llama(kind="forward"):
    g = load("llama-3-8b")
    return {"forward": lambda: g, "decode": lambda: cg.decode(g), "step": lambda: training_step(g)}[kind]()


def boxes(figure):
    """Return every drawn text with its bounding box in pixels."""
    from matplotlib.text import Text

    figure.savefig("/dev/null", format="png")
    renderer = figure.canvas.get_renderer()
    shown = [t for t in figure.findobj(Text) if t.get_text() and t.get_visible()]
    found = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in shown]
    # matplotlib keeps tick labels outside the axes, which it does not draw
    ticks = {t for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for t in axis.get_ticklabels(which="both")}
    drawn = {t.label1 for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for t in axis._update_ticks()}
    return [pair for t, pair in zip(shown, found, strict=True) if t not in ticks or t in drawn]


def hold_apart(figure):
    found = boxes(figure)
    assert len(found) > 8
    for (a, one), (b, other) in combinations(found, 2):
        assert not one.overlaps(other), (a, b)
    for text, box in found:
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0, text
        assert box.y1 <= figure.bbox.y1, text


def long(value):
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


@pytest.mark.parametrize("kind", [long("forward"), "decode", "step"])
@pytest.mark.parametrize("device", ["h100-sxm", *map(long, ["a100-80-sxm", "mi300x"])])
def test_roofline_labels_do_not_overlap(kind, device):
    figure = cg.roofline(llama(kind), device, **SIZES).plot()
    hold_apart(figure)
    assert all(titles(figure))


@pytest.mark.parametrize(
    ("kind", "capacity"), [("step", None), ("forward", 23e9), *(long(("step", n)) for n in (1e9, 131e9, 7e15))]
)
def test_timeline_labels_do_not_overlap(kind, capacity):
    figure = plot_timeline(cg.timeline(llama(kind), **SIZES), capacity=capacity)
    hold_apart(figure)
    assert "llama-3-8b" in titles(figure)[0]


def test_validation_labels_do_not_overlap():
    from costgraph.report.plots import (
        plot_peaks,
        plot_roof,
    )

    found = Validation.load(MEASURED)
    for figure in (plot_peaks(found), plot_roof(found)):
        hold_apart(figure)
        assert all(titles(figure))


def test_serving_labels_do_not_overlap():
    hold_apart(cg.plan.throughput(llama("decode"), "h100-sxm", "B", [1, 2, 3, 5, 7, 512, 521], S=2039).plot())


def test_zero_time_op_does_not_stretch_axis():
    estimate = cg.roofline(llama(), "h100-sxm", **SIZES)
    plain = estimate.plot().axes[0].get_xlim()
    first = next(r for r in estimate.rows if r.flops)
    odd = replace(first, flops=1, bytes=10**5, compute_s=0, memory_s=3e-8, bound="memory")
    assert odd.intensity == 1e-5
    figure = replace(estimate, rows=(*estimate.rows, odd)).plot()
    low, high = figure.axes[0].get_xlim()
    assert low > 1e-5
    assert np.log10(plain[0] / low) <= 1
    assert high == plain[1]
    assert any("1 op(s) beyond these axes, 0.0% of the time" in text for text, _ in boxes(figure))


@pytest.mark.parametrize("times", [1.1, 2.3, 3.1, 1009])
def test_capacity_line_leaves_room_for_memory(times):
    line = cg.timeline(llama(), **SIZES)
    (ax,) = plot_timeline(line, capacity=times * line.peak).axes
    assert line.peak > ax.get_ylim()[1] / 3
    broken = times > 2.5
    assert any("times the peak" in t.get_text() for t in ax.texts) == broken
    at = next(y for y in (ln.get_ydata()[0] for ln in ax.lines if ln.get_linestyle() == "--"))
    assert at > line.peak
    if broken:  # the axis has no scale above the break
        end = ax.spines["left"].get_bounds()[1]
        assert line.peak < end < at
        assert max(ax.get_yticks()) <= end
    else:
        assert at == times * line.peak


def test_plots_without_room_are_refused():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    left = place_labels(ax, [("short", (0.5, 0.5)), ("wide" * 99, (0.5, 0.5))])
    assert left == ["wide" * 99]
    assert [t.get_text() for t in ax.texts if t.get_text()] == ["short"]


# Okabe and Ito 2008, figure 16, as 8-bit RGB
PUBLISHED = {
    "black": (0, 0, 0), "orange": (230, 159, 0), "sky": (86, 180, 233), "green": (0, 158, 115),
    "yellow": (240, 228, 66), "blue": (0, 114, 178), "vermilion": (213, 94, 0), "purple": (204, 121, 167),
}  # fmt: skip
# Machado, Oliveira and Fernandes 2009: dichromacy matrices for linear RGB, one per missing cone type
SIGHTS = {
    "all": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color, sight):
    """Return the CIE 1976 lightness and chromaticity of a colour under a dichromacy."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHTS[sight]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.maximum((to_xyz @ seen) / [0.9505, 1, 1.089], 1e-4))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colours_match_okabe_ito():
    assert {name: tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for name, c in PALETTE.items()} == PUBLISHED


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_are_distinguishable_under_dichromacy(sight):
    for one, other in [*combinations(COLORS.values(), 2), *pairwise(_ROLES.values())]:
        assert np.linalg.norm(lab(one, sight) - lab(other, sight)) > 12, (one, other)
