"""The explorer page: its data and JavaScript engine against the library, and the generated file."""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
import zlib
from fractions import Fraction
from functools import cache
from importlib.resources import files

import pytest
import sympy
from shared import load

import costgraph as cg
from costgraph.algebra.polynomial import poly
from costgraph.cli import main
from costgraph.ir.graph import bindings
from costgraph.report.explore import (
    Page,
)
from costgraph.report.explore import (
    page as tables,
)
from costgraph.report.explore.page import Tables, page_data, views_of

ENGINE = files("costgraph") / "report" / "explore" / "assets" / "engine.js"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed: the engine needs a JavaScript to run in")
B, S, D, F, L, T = cg.dims("B S D F L T")

#: Queries sent to node: at each state the exact totals and peak, the times per device, and live memory.
PROGRAM = """
const {Engine, holding, least, spent, timeline, violated} = require(process.argv[1]);
const {data, asked} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const engine = new Engine(data.tables);
const text = pair => pair && pair.join("/");
process.stdout.write(JSON.stringify(asked.map(({view: at, sizes, device}) => {
  engine.set(sizes);
  const view = data.views[at], hardware = data.devices[device], peak = view.peak[holding(engine, view.peak)];
  const times = spent(engine, view, hardware, device);
  return {
    totals: Object.fromEntries(Object.entries(view.totals).map(([name, row]) => [name, text(engine.exact(row))])),
    doubles: Object.fromEntries(Object.entries(view.totals).map(([name, row]) => [name, engine.number(row)])),
    peak: text(engine.exact(peak[0])), op: peak[1], phase: peak[2],
    roles: peak[4].map(([role, row]) => [role, text(engine.exact(row))]),
    estimate: times && times.reduce((sum, t) => sum + t.seconds, 0),
    bounds: times && times.map(t => t.bound), least: times && least(engine, view, hardware, device),
    live: timeline(engine, view.memory), violated: violated(engine, view),
  };
})));
"""


def in_node(program, given):
    done = subprocess.run([NODE, "-e", program, str(ENGINE)], input=json.dumps(given), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mlp():
    """A stack of blocks with a quotient, a ceiling and an assumption among its sizes."""
    with cg.Graph("mlp", dtype="bf16") as g:
        g.assume("F >= D")

        def block(x):
            return x + cg.linear(cg.silu(cg.linear(cg.rms_norm(x), "b s d -> b s f", f=F)), "b s f -> b s d", d=D)

        g.output(cg.repeat(L, block, g.input("x", (B, S, D)), name="layers"))
        g.loss = "mean_squared_error"
    return g


@cache
def page_of(name):
    graph = mlp() if name == "mlp" else load(name)
    views = views_of(graph, VIEWS.get(name, ["forward"]))
    return views, json.loads(cg.explore(graph, views=views).data)


#: Models from six families: attention, latent recurrences, convolutions, state spaces, tables, and the stack above.
VIEWS = {
    "llama-3-8b": ["forward", "train precision=bf16 checkpoint=every-block", "forward dp=2 tp=T"],
    "gru-ptb-small": ["forward"],
    "alexnet": ["forward"],
    "mamba-130m": ["forward"],
    "dlrm-small": ["forward"],
    "mlp": ["forward", "train", "forward dp=2"],
}


def drawn(data, views, times):
    """Sample states: sizes that the graphs allow, with a view and a device each."""
    draw, names = random.Random(7), list(views)
    while times:
        at = draw.randrange(len(names))
        graph = views[names[at]]
        view_sizes = data["views"][at]["sizes"]
        free = [n for n in view_sizes if n in ("B", "S", "T", "L")]
        sizes = {n: size for n, size in data["sizes"].items() if n in view_sizes}
        sizes |= {n: draw.choice([2, 4] if n == "T" else [8, 16, 56] if n == "B" else [3, 5, 7, 31] if n == "L"
                                 else [128, 1024, 4096, 131072]) for n in free}  # fmt: skip
        try:
            bindings(graph, sizes)
        except cg.CostGraphError:
            continue
        yield {"view": at, "sizes": {**data["sizes"], **sizes}, "device": draw.randrange(len(data["devices"]))}, sizes
        times -= 1


@needs_node
@pytest.mark.parametrize("name", VIEWS)
def test_engine_matches_library(name):
    views, data = page_of(name)
    asked = list(drawn(data, views, 4))
    answers = in_node(PROGRAM, {"data": data, "asked": [state for state, _ in asked]})
    for (state, sizes), answer in zip(asked, answers, strict=True):
        graph = list(views.values())[state["view"]]
        questions = {
            "flops": cg.flops, "matmul": cg.matmul_flops, "bytes": cg.bytes_moved, "params": cg.param_count,
            "param_bytes": cg.param_bytes, "fused": lambda g, **d: cg.bytes_moved(g, True, **d),
        }  # fmt: skip
        for key, question in questions.items():
            expected = question(graph, **sizes)
            assert Fraction(answer["totals"][key]) == Fraction(expected), (name, key, sizes)
            assert answer["doubles"][key] == pytest.approx(float(expected), rel=1e-14)
        line = cg.timeline(graph, **sizes)
        assert (
            Fraction(answer["peak"])
            == line.peak
            == max(map(sum, zip(*(r["bytes"] for r in answer["live"]), strict=True)))
        )
        assert {k: Fraction(v) for k, v in answer["roles"] if Fraction(v)} == {
            k: v for k, v in line.by_role.items() if v
        }
        assert not answer["violated"]
        hardware = data["devices"][state["device"]]["id"]
        try:
            times = cg.roofline(graph, hardware, **sizes)
        except cg.SpecError:  # undeclared link
            assert answer["estimate"] is None
            continue
        assert answer["estimate"] == pytest.approx(times.estimate, rel=1e-12)
        assert answer["least"] == pytest.approx(times.lower_bound, rel=1e-12)
        for found, r in zip(answer["bounds"], times.rows, strict=True):  # an open degree can decide the link
            assert found == r.bound or (found == "link" and r.links_s)


STAGES = """
const {Engine, holding, least, pipelined} = require(process.argv[1]);
const {data, asked} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const engine = new Engine(data.tables);
process.stdout.write(JSON.stringify(asked.map(({sizes, device: at}) => {
  engine.set(sizes);
  const hardware = data.devices[at];
  return {
    seconds: pipelined(engine, data.views, hardware, at),
    least: Math.max(...data.views.map(v => least(engine, v, hardware, at))),
    peaks: data.views.map(v => engine.exact(v.peak[holding(engine, v.peak)][0]).join("/")),
  };
})));
"""


@cache
def lm():
    """A language model with one product per layer, the smallest with stages."""
    V = cg.dims("V")
    with cg.Graph("lm", dtype="bf16") as g:
        x = cg.embedding(g.input("tokens", (B, S), dtype="int64"), g.param("table", (V, D)))
        x = cg.repeat(L, lambda x: x + cg.linear(cg.relu(x), "b s d -> b s e", e=D, name="own"), x, name="layers")
        g.output(cg.linear(x, "b s d -> b s v", v=V, name="head"))
        g.loss, g.defaults = "cross_entropy", {"D": 4096, "V": 32000, "L": 32}
    return g


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "whisper-tiny"])
def test_page_opens_at_sizes_that_the_model_allows(name):
    graph = load(name)
    sizes = page_data(name, {"forward": graph}, [cg.load_hardware("h100-sxm")])["sizes"]
    assert sizes["S"] <= sizes["P"]
    assert cg.peak_memory(graph, **{n: size for n, size in sizes.items() if n not in graph.defaults}) > 0


@needs_node
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.long)])
def test_pipeline_stages_are_views_with_total_time(schedule):
    view = f"train precision=bf16 accumulate=m pp=P dp=2 zero=1 schedule={schedule}"
    graph = views_of(lm(), [view])[view]
    data = json.loads(cg.explore(lm(), views={view: graph}).data)
    assert [v["name"] for v in data["views"]] == [f"{view}: {n} stage" for n in ("first", "middle", "last")]
    assert data["sizes"]["P"] == 4  # least value with a middle stage
    own = {"B": 2, "S": 128}
    asked = [{**own, "L": n * p, "P": p, "m": m} for n, p, m in ((3, 4, 11), (5, 3, 7), (4, 8, 8))]
    at = [d["id"] for d in data["devices"]].index("h100-sxm")
    answers = in_node(STAGES, {"data": data, "asked": [{"sizes": {**data["sizes"], **a}, "device": at} for a in asked]})
    for sizes, answer in zip(asked, answers, strict=True):
        assert answer["seconds"] == pytest.approx(cg.seconds(graph, "h100-sxm", **sizes), rel=1e-12)
        assert answer["least"] == pytest.approx(cg.seconds(graph, "h100-sxm", "lower", **sizes), rel=1e-12)
        peaks = [cg.peak_memory(stage, **sizes) for stage in graph.stages]
        assert [Fraction(p) for p in answer["peaks"]] == peaks
        assert max(peaks) == cg.peak_memory(graph, **sizes)
    few = {"data": data, "asked": [{"view": 1, "sizes": {**data["sizes"], "P": 2}, "device": at}]}
    assert "there are P - 2 stages like this one, 1 or more" in in_node(PROGRAM, few)[0]["violated"]
    start = {"data": data, "asked": [{"view": v, "sizes": data["sizes"], "device": at} for v in range(3)]}
    assert not any(answer["violated"] for answer in in_node(PROGRAM, start))


def test_default_views_cover_training_ranks_and_stages():
    data = json.loads(cg.explore("mlp").data)
    groups = {}
    for view in data["views"]:
        groups.setdefault(view["group"], []).append(view["name"])
    assert groups == {
        "passes": ["forward"],
        "steps of training": [f"train {o}" for o in (
            "precision=bf16", "precision=bf16 checkpoint=every-block", "optimizer=sgd precision=bf16")],
        "one of several ranks": [f"train precision=bf16 dp=dp {o}" for o in ("tp=tp", "zero=1", "zero=2", "zero=3")],
        "a stage of a pipeline": [f"train precision=bf16 accumulate=8 pp=4: {n} stage" for n in (
            "first", "middle", "last")],
    }  # fmt: skip


def test_page_data_is_compressed():
    """Page data are a zlib stream in base 64: 1,000,000 equal letters shrink a hundredfold."""
    page = Page("x", json.dumps("a" * 1_000_000))
    (packed,) = re.findall(r'id="data">([^<]*)</script>', page.html)
    assert zlib.decompress(base64.b64decode(packed)).decode() == page.data
    assert len(packed) < 10_000


EXACT = """
const {Engine} = require(process.argv[1]);
const {tables, rows, sizes} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const engine = new Engine(tables);
process.stdout.write(JSON.stringify(sizes.map(s => {
  engine.set(s);
  return rows.map(r => [(engine.exact(r) ?? []).join("/"), engine.number(r)]);
})));
"""


@needs_node
def test_engine_evaluates_every_algebra_function():
    """Integers derived by hand: at B = 7, S = 2**40 + 1, D = 9, and at B = 8, S = 5, D = 7."""
    formulas = {
        3 * B**2 * S - 4: (3 * 49 * (2**40 + 1) - 4, 3 * 64 * 5 - 4),
        cg.Max(B * S, D**20): (9**20, 7**20),
        cg.Min(B, D) / 3: (Fraction(7, 3), Fraction(7, 3)),
        sympy.floor(B / D): (0, 1),
        sympy.ceiling(S / B): ((2**40 + 1 + 4) // 7, 1),  # 2**40 is 2 modulo 7
        1 / (B + D): (Fraction(1, 16), Fraction(1, 15)),
        (1 + 1 / B) ** D: (Fraction(8, 7) ** 9, Fraction(9, 8) ** 7),
        sympy.ceiling(sympy.log(B) / sympy.log(2)): (3, 3),
        sympy.sqrt(B): (7**0.5, 8**0.5),
    }
    made = Tables()
    rows = [made.row(poly(f)) for f in formulas]
    sizes = [{"B": 7, "S": 2**40 + 1, "D": 9}, {"B": 8, "S": 5, "D": 7}]
    answers = in_node(EXACT, {"tables": made.data(), "rows": rows, "sizes": sizes})
    for i, expected in enumerate(formulas.values()):
        for state, value in zip(answers, expected, strict=True):
            exact, double = state[i]
            assert double == pytest.approx(float(value), rel=1e-14)
            assert Fraction(exact) == value if exact else i >= 7


def test_unsupported_function_raises(monkeypatch):
    monkeypatch.delitem(tables._KINDS, sympy.log)
    with pytest.raises(cg.UnsupportedError, match=r"explore: 'log\(B\)': no rule for log, expected one of max, min"):
        Tables().row(poly(sympy.log(B)))


COUNTED = """
const {Engine, holding, least, spent, timeline} = require(process.argv[1]);
const data = JSON.parse(require("fs").readFileSync(0, "utf8"));
const engine = new Engine(data.tables), monomial = engine.monomial;
const at = data.devices.findIndex(d => d.id === "h100-sxm");
let terms = 0;
engine.monomial = function (...given) { terms++; return monomial.apply(this, given); };
process.stdout.write(JSON.stringify(data.views.map(view => {
  terms = 0;
  engine.set(data.sizes);
  for (const twice of [1, 2]) {
    holding(engine, view.peak); spent(engine, view, data.devices[at], at); least(engine, view, data.devices[at], at);
    timeline(engine, view.memory);
  }
  return terms;
})));
"""


@needs_node
def test_each_formula_is_evaluated_once_per_state():
    """The maximum is all rows' terms: as doubles, and again where cases need exact comparison."""
    _, data = page_of("llama-3-8b")
    terms = sum(len(row) // 2 for row in data["tables"]["rows"])
    counted = in_node(COUNTED, data)
    assert all(0 < count <= 2 * terms for count in counted)


@needs_node
def test_page_lists_assumptions_and_minimum_counts():
    _, data = page_of("mlp")
    sizes = {**data["sizes"], "L": 1, "D": 64, "F": 32}
    (answer,) = in_node(PROGRAM, {"data": data, "asked": [{"view": 0, "sizes": sizes, "device": 0}]})
    assert answer["violated"] == ["F >= D", *(v for v in answer["violated"] if "hold from L = " in v)]
    assert len(answer["violated"]) == 2


@pytest.mark.parametrize(
    ("views", "error"),
    [
        (["sideways"], "view 'sideways': expected forward, prefill, decode or train"),
        (
            ["train bits=3"],
            "'bits', expected dp=, tp=, cp=, ep=, pp=, zero=, sequence, context=, reduce_every_microbatch=, schedule",
        ),
        (["forward dp=2 sequence=3"], "'sequence', expected dp=, tp=, "),
        (["train dp=2 zero"], "'zero', expected dp=, tp=, "),
        (["train dp=2 zero=one"], "explore: zero 'one', expected one of 0, 1, 2, 3"),
        (["train dp=2 zero=4"], "zero '4', expected one of 0, 1, 2, 3"),
        (["train dp=2 context=spiral"], "context 'spiral', expected one of gather"),
        (
            ["train dp=2 reduce_every_microbatch=never"],
            "explore: reduce_every_microbatch 'never', expected one of yes, no",
        ),
        (["train clip=much"], "explore: clip='much', expected a number"),
        (["train optimizer=newton"], "optimizer='newton', expected one of sgd"),
        (["train checkpoint=never"], "--checkpoint 'never': expected none"),
        ("forward", "expected a list such as"),
        ([], "views is empty"),
        ({"a": 3}, "expected a mapping from view names to graphs"),
        ([7], "view 7, expected one such as"),
    ],
)
def test_invalid_views_raise(views, error):
    with pytest.raises(cg.CostGraphError, match=re.escape(error)):
        cg.explore(mlp(), views=views)


def test_exploring_a_non_graph_raises():
    with pytest.raises(cg.FormatError, match="explore: got 3, expected a graph or the name of a preset"):
        cg.explore(3)


def test_page_is_one_file_with_content_security_policy(tmp_path):
    page = mlp().explore(tmp_path / "page.html", views={"</script><b>": mlp()})
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page.html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    for kind, inside in (("script", r"<script>(.*?)</script>"), ("style", r"<style>(.*?)</style>")):
        (body,) = re.findall(inside, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    # no network requests and no inline code but our own: only uPlot mentions its home page
    assert not re.search(r"<link|\bsrc=|\beval\(|new Function|fetch\(|XMLHttp|import\(|innerHTML", text)
    assert "</script><b>" not in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert page._repr_html_().startswith("<iframe title=")
    assert "<script" not in page._repr_html_()


@pytest.mark.parametrize("name", ["llama-3-8b"])
def test_page_size_is_bounded(name):
    assert len(cg.explore(name, views=["forward", "decode"]).html) < 1_500_000


def test_explore_command_writes_the_page(tmp_path, capsys):
    path = tmp_path / "p.html"
    assert main(["explore", "mlp", "--out", str(path), "--views", "forward", "--views", "train optimizer=sgd"]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: mlp, ")
    assert '"name":"train optimizer=sgd"' in unpacked(path)


def unpacked(path):
    """Return the data embedded in a page."""
    (packed,) = re.findall(r'id="data">([^<]*)</script>', path.read_text(encoding="utf-8"))
    return zlib.decompress(base64.b64decode(packed)).decode()
