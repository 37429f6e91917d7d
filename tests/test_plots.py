import subprocess
import sys

import pytest
from lazy import lazy_import

import costgraph as cg
from costgraph.report import plot_roofline, plot_timeline

lazy_import("matplotlib")

SIZES = {"B": 8, "D": 64, "F": 256}


def model(name="mlp"):
    B, D, F = cg.dims("B D F")
    with cg.Graph(name, dtype="bf16") as g:
        h = cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up"))
        y = cg.linear(h, "b f -> b d", d=D, name="down")
        ids = g.input("ids", (B,), dtype="int64")
        g.output(y, cg.embedding(ids, g.param("table", (F, D))))
    return g


def texts(figure):
    (ax,) = figure.axes
    legend = [t.get_text() for part in figure.legends for t in (*part.get_texts(), part.get_title())]
    return [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), *(t.get_text() for t in ax.texts), *legend]


def test_roofline_labels_axes_roofs_ridge_and_ops():
    figure = cg.roofline(model(), "h100-sxm", **SIZES).plot()
    shown = texts(figure)
    assert shown[:3] == [
        "mlp on NVIDIA H100 SXM5 80GB",
        "arithmetic intensity, unfused [FLOP/B]",
        "attainable rate [FLOP/s]",
    ]
    assert {
        "matmul bf16, 989.4 TFLOP/s",
        "vector, 66.9 TFLOP/s",
        "memory, 3.35 TB/s",
        "ridge point, 295.3 FLOP/B",
    } <= set(shown)
    assert {"matmul", "pointwise"} <= set(shown)
    assert any("1 op(s) without FLOPs or bytes are not shown" in t for t in shown)
    assert any(t.startswith("up/matmul, ") for t in shown)
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    areas = {c.get_label(): max(c.get_sizes()) for c in ax.collections}
    assert areas["matmul"] > areas["pointwise"]


def test_roofline_points_match_rows():
    estimate = cg.roofline(model(), "h100-sxm", **SIZES)
    (ax,) = plot_roofline(estimate).axes
    points = {tuple(map(float, p)) for c in ax.collections for p in c.get_offsets()}
    assert points == {(r.intensity, r.attainable) for r in estimate.rows if r.flops}


def test_timeline_marks_the_peak_and_the_capacity():
    line = cg.timeline(model(), **SIZES)
    figure = plot_timeline(line, capacity=80e9)
    shown = texts(figure)
    assert "live memory [B]" in shown
    assert any(line.op in t for t in shown)
    assert any(t.startswith("capacity, 80 GB (74.51 GiB)") for t in shown)
    (ax,) = figure.axes
    assert max(ax.lines[0].get_ydata()) == line.peak
    assert len(texts(line.plot())) < len(shown)  # no capacity line


@pytest.mark.parametrize("ending", ["png", "PNG", "svg", "pdf"])
def test_plot_files_are_written(tmp_path, ending):
    roofline, timeline = cg.roofline(model(), "h100-sxm", **SIZES), cg.timeline(model(), **SIZES)
    for answer in {"png": (roofline, timeline), "PNG": (timeline,)}.get(ending, (roofline,)):
        path = tmp_path / f"{type(answer).__name__}.{ending}"
        answer.plot(path)
        assert path.stat().st_size > 5000
        head = path.read_bytes()[:200]
        assert {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending.lower()] in head


def test_empty_graph_gives_empty_plot(tmp_path):
    N = cg.dims("N")
    with cg.Graph("views") as g:
        g.output(g.input("x", (N, N)).T)
    cg.roofline(g, "h100-sxm", N=2).plot(tmp_path / "roof.png")
    cg.timeline(g, N=2).plot(tmp_path / "line.png")


def test_user_names_are_not_parsed_as_math(tmp_path):
    g = model("$\\frac{1}{$\x1b[31m" * 20)
    cg.roofline(g, "h100-sxm", **SIZES).plot(tmp_path / "roof.png")


def test_phases_are_marked():
    line = cg.timeline(model(), **SIZES)
    moments = [
        type(line.moments[0])("a", "forward", 8),
        type(line.moments[0])("b", "backward", 24),
        type(line.moments[0])("c", "optimizer", 16),
    ]
    figure = plot_timeline(type(line)(24, tuple(moments), {}, {}))
    assert {"forward", "backward", "optimizer"} <= set(texts(figure))


def test_invalid_paths_are_refused(tmp_path):
    found, line = cg.roofline(model(), "h100-sxm", **SIZES), cg.timeline(model(), **SIZES)
    with pytest.raises(cg.FormatError, match=r"'roof\.gif', expected a file ending in \.png, \.svg, \.pdf"):
        found.plot("roof.gif")
    with pytest.raises(cg.FormatError, match="No such file or directory"):
        line.plot(tmp_path / "missing" / "roof.png")
    with pytest.raises(cg.FormatError, match="path 3, expected a string or a path"):
        line.plot(3)


def test_unbound_timelines_are_refused():
    with pytest.raises(cg.BindingError, match="still unbound: B, D, F"):
        cg.timeline(model()).plot()


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(cg.UnsupportedError, match=r'pip install "costgraph\[plot\]"'):
        cg.timeline(model(), **SIZES).plot()


def test_plots_do_not_change_global_state():
    code = (
        "import sys, costgraph as cg, costgraph.report as r\n"
        "assert not {'matplotlib', 'rich', 'typer'} & sys.modules.keys()\n"
        "B = cg.dims('B')\n"
        "with cg.Graph('g') as g:\n"
        "    g.output(cg.relu(g.input('x', (B,))))\n"
        "cg.roofline(g, 'h100-sxm', B=3).plot()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_views_are_imported_on_first_use():
    code = (
        "import sys, costgraph; from costgraph.ir.graph import VIEWS;"
        "assert 'matplotlib' not in sys.modules and 'costgraph.report.plots' not in sys.modules;"
        "print(sorted(VIEWS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"'{view}'" in done.stdout for view in ("explore", "plot_roofline", "summary"))
