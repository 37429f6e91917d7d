"""Result display: text tables of at most 40 lines, escaped HTML, records, and data frames."""

import html
import re
import sys
from functools import cache
from html.parser import HTMLParser
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import sympy
from each import each
from shared import load

import costgraph as cg

B, D, F = cg.dims("B D F")
SIZES = {"B": 8, "D": 64, "F": 256}


def chain(length=2, name="chain"):
    with cg.Graph(name) as g:
        h = g.input("x", (B, D))
        for i in range(length):
            h = cg.relu(cg.linear(h, "b d -> b f", f=D, name=f"up{i}"))
        g.output(h)
    return g


def inference():
    return cg.decode(load("llama-3-8b"))


SHORT, LONG = chain(), chain(60)
RESULTS = {
    "costs": lambda: cg.costs(LONG),
    "bound costs": lambda: cg.costs(LONG, B=8, D=64),
    "few costs": lambda: cg.costs(SHORT),
    "groups": lambda: cg.costs(LONG).group("scope"),
    "roofline": lambda: cg.roofline(LONG, "h100-sxm", B=8, D=64),
    "timeline": lambda: cg.timeline(LONG),
    "bound timeline": lambda: cg.timeline(LONG, B=8, D=64),
    "lifetimes": lambda: cg.lifetimes(LONG),
    "hardware": lambda: cg.load_hardware("h100-sxm"),
    "throughput": lambda: cg.plan.throughput(inference(), "h100-sxm", "B", range(1, 50), S=8192),
    "comparison": lambda: cg.compare(SHORT, LONG),
}


@cache
def made(name):
    return RESULTS[name]()


class Cells(HTMLParser):
    """Collect the rows of an HTML table as lists of cell texts."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.open = [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", RESULTS)
def test_results_render_as_text_and_html_tables(name):
    found = made(name)
    lines = str(found).splitlines()
    assert len(lines) <= 40
    assert lines == [line.rstrip() for line in lines]
    assert repr(found).startswith(type(found).__name__ + "(")
    assert len(repr(found)) < 100
    assert "\n" not in repr(found)
    shown = found._repr_html_()
    assert html.escape(repr(found)) in shown
    # the same cells in both
    assert [" ".join(" ".join(row).split()) for row in Cells(shown).rows] == [" ".join(line.split()) for line in lines]
    words = [n for n, line in enumerate(lines) if line.endswith("more rows")]
    rows = len(list(found.rows))
    if words:
        assert len(lines) == 40
        assert lines[words[0]] == f"... {rows - words[0] + 1} more rows"
    else:
        assert len(lines) > rows


def test_omitted_rows_are_counted_and_totals_kept():
    costs = cg.costs(LONG)
    lines = str(costs).splitlines()
    whole = costs.total()
    assert [line.split()[-2] for line in lines[-3:]] == [
        str(amount).split()[-1] for amount in (whole.flops, whole.matmul, whole.bytes)
    ]
    assert lines[-4] == f"... {len(costs) - 35} more rows"
    assert str(cg.costs(SHORT)).count("more rows") == 0


def test_amounts_have_units():
    g = chain(1)
    cells = {tuple(line.split()[-2:]) for line in str(cg.costs(g, B=1000, D=1000)).splitlines()[1:]}
    # a square matmul with side 1000; an fp32 operand; both operands; a ReLU
    assert {("2", "GFLOP"), ("4", "MB"), ("8", "MB"), ("1", "MFLOP")} <= cells
    # formulas are printed unscaled, in the unit of the column
    assert any(line.endswith("  2*B*D**2") for line in str(cg.costs(g)).splitlines())


def test_kb_is_1000_and_kib_is_1024_bytes():
    lines = [" ".join(line.split()) for line in str(cg.timeline(chain(0), B=64, D=64)).splitlines()]
    assert lines == [
        "op phase bytes",
        "(start) forward 16.38 kB",
        "peak 16.38 kB (16 KiB)",
        "peak at (start) (forward)",
    ]


def test_long_formulas_and_names_are_truncated():
    names = " ".join(f"N{i}" for i in range(30))
    with cg.Graph("wide") as g:
        x = g.input("x" * 60, (sum(cg.dims(names)),))
        g.output(cg.relu(x))
    rows = str(cg.lifetimes(g)).splitlines()
    assert max(map(len, rows[:-1])) < 140
    assert rows[1].startswith("..." + "x" * 37 + "  input")
    assert re.search(r"  4\*N0 \+ .{30}\.\.\.  relu", rows[2])
    assert max(map(len, str(cg.timeline(g)).splitlines())) <= 220


@each("name", ["<b>x</b>", "a&b", "\x1b[31mred", "two\nlines"])
def test_user_names_are_escaped(name):
    g = chain(1, name)
    for found in (cg.costs(g), cg.timeline(g), cg.lifetimes(g), cg.compare(g, g), cg.roofline(g, "h100-sxm", B=1, D=1)):
        shown = found._repr_html_()
        assert "<b>x" not in shown
        assert "\x1b" not in shown + str(found)
        assert "\n" not in repr(found)
        Cells(shown)


def test_lifetimes_table():
    lifetimes = cg.lifetimes(SHORT)
    assert isinstance(lifetimes, list)
    assert lifetimes == list(lifetimes) == [*lifetimes[:1], *lifetimes[1:]]
    assert lifetimes.rows == tuple(lifetimes)
    assert cg.lifetimes(cg.Graph("nothing")) == []
    assert str(cg.lifetimes(cg.Graph("nothing"))).split() == ["tensor", "role", "bytes", "born", "dies"]


def test_rows_are_records():
    assert [r.op for r in cg.timeline(SHORT).rows] == [m.op for m in cg.timeline(SHORT).moments]
    assert dict(cg.load_hardware("h100-sxm").rows)["memory.capacity"].value == 80 * 10**9
    assert dict(cg.costs(SHORT).group("phase").rows)["forward"] == cg.costs(SHORT).total()


@each("result", ["costs", "roofline", "timeline"])
def test_repr_contains_graph_name(result):
    assert "graph 'chain'" in repr(made(result))
    kept = cg.costs(SHORT).filter(kind="matmul").bind(B=2)
    assert repr(kept) == f"Costs(graph 'chain': {len(kept)} rows)"


# -- frames ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pandas(monkeypatch):
    """A stub of pandas, which tests do not require."""

    class DataFrame:
        def __init__(self, data, columns):
            assert all(len(row) == len(columns) for row in data)
            self.columns = {name: [row[i] for row in data] for i, name in enumerate(columns)}

    module = ModuleType("pandas")
    module.DataFrame, module.__spec__ = DataFrame, ModuleSpec("pandas", None)
    monkeypatch.setitem(sys.modules, "pandas", module)
    return module


@each("name", RESULTS)
def test_frame_has_all_rows(pandas, name):
    found = made(name)
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert {len(column) for column in frame.columns.values()} == {len(list(found.rows))}
    assert all(frame.columns)


def test_frame_holds_numbers_and_formulas(pandas):
    frame = cg.costs(LONG).to_pandas().columns
    assert frame["amount"] == [r.value for r in cg.costs(LONG)]
    assert all(isinstance(v, sympy.Expr) for v in frame["amount"])
    assert frame["op"] == [r.op for r in cg.costs(LONG)]
    sheet = cg.load_hardware("h100-sxm").to_pandas().columns
    assert dict(zip(sheet["place"], zip(sheet["value"], sheet["unit"], strict=True), strict=True))["peak.bf16"] == (
        989_400_000_000_000, "FLOP/s",
    )  # fmt: skip
    steps = cg.plan.throughput(inference(), "h100-sxm", "B", [1, 72], S=8192).to_pandas().columns
    assert (steps["size"], steps["tokens"], steps["fits"]) == ([1, 72], [1, 72], [True, False])


@pytest.mark.parametrize("name", ["costs", "hardware", "lifetimes"])
def test_frame_without_pandas_names_package_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pandas", None)  # simulates a missing package
    found = made(name)
    wanted = f"{type(found).__name__}.to_pandas: pandas is not installed; install it with: pip install pandas"
    with pytest.raises(cg.UnsupportedError) as caught:
        found.to_pandas()
    assert str(caught.value) == wanted


# -- with torch, and pictures ----------------------------------------------------------------------------------------


def test_validation_renders_as_table(pandas):
    pytest.importorskip("torch")
    from costgraph.torch import Validation

    found = Validation.load(Path(__file__).parent / "measured" / "validate-cpu.json")
    lines = str(found).splitlines()
    assert len(lines) <= 40
    assert lines[0].split()[:3] == ["case", "matmul", "FLOPs"]
    assert lines[1].startswith(found.rows[0].case.name)
    assert [s for s in found.summary() if not s.startswith("Could not run")] == [
        s for s in lines if s in found.summary()
    ]
    assert found._repr_html_().count("<tr>") == len(lines)
    assert found.to_pandas().columns["peak"] == [r.measured.peak for r in found.rows]


@pytest.mark.parametrize("result", ["roofline", "bound timeline", "throughput"])
def test_figures_display_in_notebooks(result):
    pytest.importorskip("matplotlib")
    figure = made(result).plot()
    picture = figure._repr_png_()  # called by notebooks
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 10_000
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
