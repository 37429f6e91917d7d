import csv
import io
import json
import random
from fractions import Fraction

import pytest
import sympy
from each import each

import costgraph as cg
from costgraph.report import common_part, formula_latex, formula_python, formula_text, report
from costgraph.report.files import SCHEMA, to_csv, to_json
from costgraph.report.formula import factored, shared, write_formula

B, D, F, K, L, S, W = cg.dims("B D F K L S W")
SIZES = {"B": 2, "D": 3, "F": 5, "K": 7}


def model():
    with cg.Graph("mlp", dtype="fp32") as g:
        h = cg.einsum(g.input("x", (B, D)), g.param("w1", (D, F)), "b d, d f -> b f")
        with cg.scope("act/inner"):
            r = cg.relu(h)
        with cg.scope("head"):
            g.output(cg.einsum(r, g.param("w2", (F, K)), "b f, f k -> b k"))
    return g


def window():
    with cg.Graph("window", dtype="bf16") as g:
        q = g.input("q", (B, 2, S, D))
        g.output(cg.attention(q, q, q, causal=True, window=W))
    return g


def test_report_caches_derived_results():
    graph = model()
    report(graph, None, **SIZES)
    derived = {key: of for key, of in graph.cache.items() if "bound" not in str(key)}
    report(graph)
    report(graph, None, **{**SIZES, "B": 11})
    assert derived
    assert all(graph.cache[key] is of for key, of in derived.items())


# -- formulas ----------------------------------------------------------------------------------------------------


def test_common_terms_of_cases_are_printed_once():
    # the worked example: 4(DF + FK + BD) + Max(8BF, 4BF + 4BK)
    peak = cg.peak_memory(model())
    assert formula_text(peak) == "4*(B*D + B*F + D*F + F*K) + Max(4*B*F, 4*B*K)"
    common, rest = common_part(peak)
    assert sympy.expand(common - 4 * (B * D + B * F + D * F + F * K)) == 0
    assert rest.args == (4 * B * F, 4 * B * K)
    assert [r.op for r in cg.regimes(rest)] == ["act/inner/relu", "head/einsum"]


def test_negative_common_coefficient_is_factored():
    common, rest = common_part(cg.Max(5 * B - 2 * D, 3 * F - 3 * D))
    assert common == -3 * D
    assert rest == cg.Max(5 * B + D, 3 * F)
    assert formula_text(cg.Min(2 * S + B, 2 * S + D)) == "2*S + Min(B, D)"
    assert common_part(3 * B) == (0, 3 * B)
    assert shared([B * D]) == (0, [B * D])
    assert formula_text(cg.Max(B, D)) == "Max(B, D)"
    assert factored(6 * B * D + 4 * B) == "2*B*(3*D + 2)"
    assert factored(sympy.Integer(0)) == "0"


def test_digit_grouping_is_optional():
    formula = 123456 * B**2 + sympy.Rational(1000, 3) * S + 7
    assert formula_text(formula) == "123456*B**2 + 1000*S/3 + 7"
    assert formula_text(formula, grouped=True) == "123_456*B**2 + 1_000*S/3 + 7"
    assert formula_text(10**6 * cg.Max(B, 1000 * S), grouped=True) == "1_000_000*Max(B, 1_000*S)"


def test_latex_treats_names_as_words():
    alpha, heads = cg.dims("alpha n_heads")
    assert formula_latex(2 * alpha * heads**2 + B) == r"B + 2 \mathit{alpha} \mathit{n\_heads}^{2}"
    assert formula_latex(cg.Max(8 * B * F + D, 4 * B * K + D)) == r"D + \max\left(8 B F, 4 B K\right)"
    assert formula_latex(cg.Max(2 * D + B, 2 * D + F)) == r"2 D + \max\left(B, F\right)"
    assert formula_latex(cg.Max(2 * D + 2 * K + B, 2 * D + 2 * K + F)) == (
        r"2 \left(D + K\right) + \max\left(B, F\right)"
    )


def run(source):
    # our own text, generated from a formula in this file
    scope = {}
    exec(source, scope)
    return next(f for name, f in scope.items() if callable(f) and name not in ("Fraction",))


@each(
    "formula",
    [
        cg.peak_memory(model()),
        cg.flops(window()),
        cg.bytes_moved(window(), fused=True),
        cg.intensity(model()),
        B * D / 3 + S**2 / 7,
        B * D / S - F,
        -B + 1,
        sympy.ceiling(S / 4) * B + sympy.floor(B * D / S),
        (1 - B / (B + S)) ** 3 * D,
        1 / (B + S) + D,
        (1 - B / (B + S)) ** S,
        sympy.Integer(12),
    ],
    ids=str,
)
def test_python_source_is_exact(formula):
    f = run(formula_python(formula, "quantity", "an amount"))
    names = sorted(s.name for s in sympy.sympify(formula).free_symbols)
    assert list(f.__code__.co_varnames) == names
    draw = random.Random(0)
    for most in (5, 10**3, 10**25):
        if any(isinstance(e, sympy.Pow) and e.exp.free_symbols for e in sympy.preorder_traversal(formula)) and most > 5:
            continue  # the exponent is too large
        sizes = {name: draw.randint(1, most) for name in names}
        expected = sympy.sympify(formula).subs({cg.dims(k): v for k, v in sizes.items()})
        got = f(**sizes)
        assert Fraction(got) == Fraction(int(expected.p), int(expected.q))


def test_python_source_renames_keywords():
    names = cg.dims("lambda max math")
    source = formula_python(sympy.ceiling(names[0] / 3) + cg.Max(names[1], names[2] * B))
    assert "def formula(B, lambda_, math_, max_):" in source
    assert run(source)(B=2, lambda_=4, math_=5, max_=11) == 2 + 11


def test_python_source_for_numbers_and_docstring():
    assert formula_python(2.5) == "def formula():\n    return 2.5"
    assert formula_python(7) == "def formula():\n    return 7"
    source = formula_python(B, "f", 'ends """ here\\ \x1b')
    assert source == 'def f(B):\n    """ends  here """\n    return B'


def test_unknown_formats_are_refused():
    with pytest.raises(cg.FormatError, match="format 'html': expected one of text, latex, python"):
        write_formula(B, "html", "f", "")
    with pytest.raises(cg.FormatError, match="name 'a b', expected an identifier"):
        formula_python(B, "a b")
    with pytest.raises(cg.UnsupportedError, match="no rule for log"):
        formula_python(sympy.log(B))


# -- the report --------------------------------------------------------------------------------------------------


def test_figures_match_library_answers():
    g = model()
    r = report(g, "h100-sxm", **SIZES)
    asked = {
        "params": cg.param_count,
        "param-bytes": cg.param_bytes,
        "flops": cg.flops,
        "matmul-flops": cg.matmul_flops,
        "matmul-flops-full": lambda g, **d: cg.matmul_flops(g, "full", **d),
        "pointwise-flops": lambda g, **d: cg.costs(g, **d).total().pointwise,
        "transcendental-flops": lambda g, **d: cg.costs(g, **d).total().transcendental,
        "bytes": cg.bytes_moved,
        "fused-bytes": lambda g, **d: cg.bytes_moved(g, fused=True, **d),
        "intensity": cg.intensity,
        "fused-intensity": lambda g, **d: cg.intensity(g, fused=True, **d),
    }
    assert r.figures.keys() == asked.keys()
    for name, ask in asked.items():
        assert r.figures[name].value == ask(g, **SIZES)
        assert r.figures[name].formula == ask(g)
    assert r.peak.value == cg.peak_memory(g, **SIZES) == 4 * (15 + 35 + 6) + max(8 * 10, 4 * 10 + 4 * 14)
    assert (r.peak.op, r.peak.phase) == ("head/einsum", "forward")
    assert r.peak.by_role == cg.timeline(g, **SIZES).by_role
    assert sum(r.peak.by_role.values()) == r.peak.value
    assert [c.op for c in r.peak.formula] == ["act/inner/relu", "head/einsum"]
    assert r.fits
    assert r.roofline == cg.roofline(g, "h100-sxm", **SIZES)
    assert (r.unbound, r.unused, dict(r.sizes)) == ((), (), SIZES)


def test_table_rows_add_up_at_every_depth():
    for depth in (1, 2, 5):
        r = report(model(), "h100-sxm", depth=depth, **SIZES)
        assert [p.name for p in r.scopes] == ["", "act" if depth == 1 else "act/inner", "head"]
        for parts in (r.scopes, r.phases):
            assert sum(p.value.flops for p in parts) == r.figures["flops"].value
            assert sum(p.value.bytes for p in parts) == r.figures["bytes"].value
            assert sum(p.seconds for p in parts) == pytest.approx(r.roofline.estimate)
            assert sum(p.share for p in parts) == pytest.approx(1)
        assert sympy.expand(sum(p.formula.flops for p in r.scopes) - r.figures["flops"].formula) == 0
    assert r.scopes[1].bound == "memory"
    assert r.scopes[1].bound_share == 1


def test_kernel_contents_count_in_kernel_scope():
    sizes = {"B": 1, "S": 64, "D": 8, "W": 16}
    r = report(window(), "h100-sxm", depth=9, **sizes)
    assert [p.name for p in r.scopes] == ["attention"]
    assert r.scopes[0].value.flops == cg.flops(window(), **sizes)
    full = report(window(), "h100-sxm", count="full", **sizes)
    assert full.scopes[0].value.matmul == cg.matmul_flops(window(), "full", **sizes)
    assert full.roofline.estimate == r.roofline.estimate


def test_defaults_are_bound_only_in_values():
    g = model()
    with g:
        g.defaults.update(D=3, F=5, K=7)
    r = report(g, B=2)
    assert (dict(r.sizes), r.given) == (SIZES, frozenset("B"))
    assert r.figures["matmul-flops"].value == 2 * 2 * (3 * 5 + 5 * 7)
    assert r.figures["matmul-flops"].formula == 2 * B * D * F + 2 * B * F * K
    assert g.defaults == {"D": 3, "F": 5, "K": 7}
    assert report(g, B=2, D=1).figures["params"].value == 5 + 35


def test_open_sizes_stay_symbolic_and_are_named():
    r = report(model(), "h100-sxm", B=2)
    assert r.unbound == ("D", "F", "K")
    assert (r.roofline, r.fits, r.peak.op, r.peak.by_role) == (None, None, None, {})
    assert [c.op for c in r.peak.regimes] == ["act/inner/relu", "head/einsum"]
    assert r.figures["flops"].value == 4 * D * F + 4 * F * K + 2 * F
    text = str(r)
    assert "needs sizes, still unbound: D, F, K" in text
    assert "whether it fits\n" in text or "whether it fits " in text
    assert r.open_roofline.estimate == cg.seconds(model(), "h100-sxm", B=2)
    assert r.open_roofline.lower_bound == cg.seconds(model(), "h100-sxm", "lower", B=2)
    assert "time, estimate" in text
    for figure in ("estimate", "lower_bound"):
        formula = json.loads(to_json(r))["roofline"][figure]
        assert formula == {"value": None, "unit": "s", "bound": formula_text(getattr(r.open_roofline, figure))}
        assert formula["bound"] in to_csv(r)
    assert formula_text(r.open_roofline.estimate, grouped=True).split()[0] in text
    assert report(model(), "h100-sxm", **SIZES).open_roofline is report(model()).open_roofline is None
    with pytest.raises(cg.BindingError, match="unbound: D, F, K"):
        r.plot("roof.png")
    with pytest.raises(cg.BindingError, match="there is no device"):
        report(model(), **SIZES).plot("roof.png")


def test_unused_dimension_is_reported():
    g = model()
    with g:
        g.assume("W >= 2")
    r = report(g, W=4)
    assert r.unused == ("W",)
    assert "note: dimension W appears in no figure" in str(r)


def test_single_regime_peak_names_its_op():
    with cg.Graph("g") as g:
        g.output(cg.relu(g.input("x", (B, D))))
    r = report(g)
    assert [(c.formula, c.op) for c in r.peak.regimes] == [(8 * B * D, "relu")]
    assert "peak at                  relu (forward)" in str(r)


def test_graph_without_traffic():
    with cg.Graph("views") as g:
        g.output(g.input("x", (B, D)).T)
    r = report(g, "h100-sxm", B=2, D=3)
    assert "intensity" not in r.figures
    assert "intensity, unfused         no bytes are moved" in str(r)
    assert json.loads(to_json(r))["roofline"]["ops"] == []


def test_report_states_when_model_does_not_fit():
    r = report(model(), "h100-sxm", B=10**6, D=10**4, F=10**5, K=7)
    assert r.fits is False
    assert "does NOT fit" in str(r)


def test_row_orders():
    r = report(model(), "h100-sxm", **SIZES)
    names = {by: [p.name for p in r.sorted(by).scopes] for by in ("order", "time", "flops", "bytes")}
    assert names["order"] == ["", "act/inner", "head"]
    assert names["flops"] == ["head", "", "act/inner"]  # 2BFK = 140, 2BDF = 60, BF = 10
    assert names["bytes"] == names["time"] == ["head", "", "act/inner"]  # 236, 124, 80
    with pytest.raises(cg.GraphError, match="sort by 'name': expected one of order, time, flops, bytes"):
        r.sorted("name")
    with pytest.raises(cg.BindingError, match="needs sizes for D, F, K"):
        report(model(), B=2).sorted("flops")
    with pytest.raises(cg.BindingError, match="needs a device"):
        report(model(), **SIZES).sorted("time")


@each("depth", [0, -1, True, "2"])
def test_invalid_depths_are_refused(depth):
    with pytest.raises(cg.GraphError, match="expected a positive integer"):
        report(model(), depth=depth)


# -- text --------------------------------------------------------------------------------------------------------


def test_text_is_narrow_and_has_units():
    for r in (report(model(), "h100-sxm", **SIZES), report(model()), report(window(), "h100-sxm", B=2)):
        for formulas in (False, True):
            from costgraph.report.text import render

            lines = render(r, formulas=formulas).split("\n")
            assert max(map(len, lines)) <= 80
            assert lines == [line.rstrip() for line in lines]
            assert not any("\x1b" in line for line in lines)
    text = str(report(model(), "h100-sxm", B=1000, D=1000, F=1000, K=1000))
    assert "8 MB (7.629 MiB) = 8,000,000 B" in text
    assert "4.001 GFLOP = 4,001,000,000 FLOP" in text
    assert "85.02 GB (79.18 GiB): fits" in text


def test_user_names_are_not_parsed_as_markup():
    r = report(cg.Graph("[red]x\x1b[31m\u202e[/red]" + "y" * 500))
    text = str(r)
    assert text.startswith("[red]x\\x1b[31m\\u202e[/red]yyy")
    assert "..." in text
    assert "\x1b" not in text
    assert r._repr_html_().startswith("<pre>[red]x")
    assert repr(r).startswith("Report('[red]x\\x1b[31m")


def test_html_is_escaped():
    assert "&lt;script&gt;" in report(cg.Graph("<script>"))._repr_html_()


def test_report_without_rich_prints_its_name(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "costgraph.report.text", None)
    assert str(report(model())) == "Report('mlp')"


# -- files -------------------------------------------------------------------------------------------------------


def test_json_matches_library_answers(tmp_path):
    g = model()
    path = tmp_path / "report.json"
    report(g, "h100-sxm", **SIZES).to_json(path)
    data = json.loads(path.read_text())
    assert data["schema"] == SCHEMA == "costgraph/report/2"
    assert (data["graph"], data["sizes"], data["unbound"]) == ("mlp", SIZES, [])
    assert data["hardware"] == {"id": "h100-sxm", "name": "NVIDIA H100 SXM5 80GB"}
    assert data["figures"]["flops"] == {
        "value": cg.flops(g, **SIZES),
        "unit": "FLOP",
        "formula": str(cg.flops(g)),
    }
    peak = data["peak_memory"]
    assert (peak["value"], peak["unit"], peak["op"], peak["fits"]) == (320, "B", "head/einsum", True)
    assert peak["capacity"] == {"value": 85_017_493_504, "unit": "B"}
    assert [c["op"] for c in peak["formulas"]] == ["act/inner/relu", "head/einsum"]
    times = cg.roofline(g, "h100-sxm", **SIZES)
    assert data["roofline"]["estimate"] == {"value": times.estimate, "unit": "s"}
    assert data["roofline"]["lower_bound"]["value"] == times.lower_bound
    assert [row["op"] for row in data["roofline"]["ops"]] == [row.op for row in times.rows]
    assert sum(p["flops"]["value"] for p in data["scopes"]) == cg.flops(g, **SIZES)


def test_json_of_open_sizes_has_no_value():
    data = json.loads(to_json(report(model(), B=2)))
    assert data["figures"]["flops"]["value"] is None
    assert data["figures"]["flops"]["bound"] == "4*D*F + 4*F*K + 2*F"
    assert data["figures"]["flops"]["formula"] == "2*B*D*F + 2*B*F*K + B*F"
    assert (data["roofline"], data["hardware"], data["unbound"]) == (None, None, ["D", "F", "K"])


def test_csv_matches_library_answers(tmp_path):
    g = model()
    path = tmp_path / "report.csv"
    report(g, "h100-sxm", **SIZES).to_csv(path)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert list(rows[0]) == ["part", "name", "quantity", "value", "unit", "formula"]
    found = {(r["part"], r["name"], r["quantity"]): r for r in rows}
    assert len(found) == len(rows)
    assert int(found["graph", "", "flops"]["value"]) == cg.flops(g, **SIZES)
    assert found["graph", "", "flops"]["unit"] == "FLOP"
    assert int(found["graph", "", "peak-memory"]["value"]) == 320
    assert float(found["graph", "", "estimate"]["value"]) == cg.roofline(g, "h100-sxm", **SIZES).estimate
    assert int(found["scope", "head", "matmul"]["value"]) == 2 * 2 * 5 * 7
    assert found["scope", "head", "matmul"]["formula"] == "2*B*F*K"
    assert found["scope", "head", "bound"]["value"] == "memory"
    open_rows = {(r["part"], r["name"], r["quantity"]): r for r in csv.DictReader(io.StringIO(to_csv(report(g, B=2))))}
    assert open_rows["scope", "head", "matmul"]["value"] == "4*F*K"


def test_unwritable_files_are_refused(tmp_path):
    r = report(model())
    with pytest.raises(cg.FormatError, match="No such file or directory"):
        r.to_json(tmp_path / "missing" / "r.json")
    with pytest.raises(cg.FormatError, match="Is a directory"):
        r.to_csv(tmp_path)
    with pytest.raises(cg.FormatError, match="null"):
        r.to_csv("a\0b")


# -- parts of a model that do not run -----------------------------------------------------------------------------


def test_unread_parameters_are_named(tmp_path):
    """A vision tower skipped by a text-only forward pass has parameters, but no FLOPs and no activations."""
    B, D, L = cg.dims("B D L")
    with cg.Graph("vl") as g:
        x = g.input("x", (B, D))
        for name in ("weight", "bias"):
            g.param(f"model/visual/merger/{name}", (D,))
        g.param("model/language/extra", (7,))

        def layer(y):
            with cg.scope("adapter"):
                y.graph.param("scale", (D,))
            return cg.linear(y, "b d -> b e", e=D, name="up")

        with cg.scope("model"), cg.scope("language"):
            x = cg.repeat(L, layer, x, name="layers")
        g.output(x)
    found = report(g, B=2, L=5)
    adapter = "model/language/layers/adapter"
    assert {scope: str(n) for scope, n in found.unused_params.items()} == {
        "model/visual": "2*D", "model/language/extra": "7", adapter: "5*D",
    }  # fmt: skip
    assert "  not run                  7 in model/language/extra" in str(found)
    assert json.loads(to_json(found))["unused_params"]["model/language/extra"] == {"value": 7, "unit": "1"}
    assert dict(report(model(), **SIZES).unused_params) == {}
