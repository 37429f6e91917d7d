"""Documentation: formulas derived at build time and a reference that lists every public name."""

import base64
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sympy
from public import DOTTED

import costgraph

DOCS = Path(__file__).resolve().parent.parent / "docs"
BUILDERS = ("sphinx", "myst_nb", "numpydoc")
needs_sphinx = pytest.mark.skipif(
    any(find_spec(name) is None for name in BUILDERS), reason="needs costgraph[docs]: sphinx, myst-nb and numpydoc"
)

CONF = f"""
import sys
sys.path.insert(0, {str(DOCS / "_ext")!r})
extensions = ["myst_parser", "derived", "pictures"]
html_math_renderer = "mathml"
"""
PAGE = """# Page

```python
>>> import costgraph as cg
>>> B, D, F = cg.dims("B D F")
>>> size = 2 * B * D

```

```{derived} size
:of: first
```

```python
>>> size = cg.Max(B * F, B * D)

```

```{derived} size
```
"""


def build(folder, page, **others):
    """Build a site with a page and named others; a failure in one page does not stop the others."""
    (folder / "conf.py").write_text(CONF)
    for name, text in {"index": page, **others}.items():
        (folder / f"{name}.md").write_text(text if name == "index" else f"---\norphan: true\n---\n\n{text}")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", folder, folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, folder / "out" / "index.html"


def formulas(page):
    """Return the text of each math block."""
    blocks = re.findall(r'<div class="math">(.*?)</div>', page.read_text(encoding="utf-8"), re.DOTALL)
    return ["".join(re.sub(r"<[^>]*>", "", b).split()) for b in blocks]


DRAWN = """# Page

```python
>>> import costgraph as cg
>>> B = cg.dims("B")
>>> with cg.Graph("g") as g:
...     g.output(cg.relu(g.input("x", (B,))))

```

```{picture} cg.timeline(g, B=7).plot()
:alt: a <step>
```
"""


@needs_sphinx
def test_formulas_and_plots_render_in_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    code, said, page = build(tmp_path, PAGE, drawn=DRAWN)
    assert code == 0, said
    assert formulas(page) == ["first=2BD", "max{BD,BF}"]
    text = page.with_name("drawn.html").read_text(encoding="utf-8")
    ((alt, drawn),) = re.findall(r'alt="(.*?)" src="data:image/png;base64,(.*?)"', text)
    assert alt == "a &lt;step&gt;"
    assert base64.b64decode(drawn).startswith(b"\x89PNG")


#: Failing pages with one reason each: build warnings name the page.
FAILING = {
    "unknown_name": (
        PAGE.replace("{derived} size\n```", "{derived} width\n```"), "NameError: name 'width' is not defined",
    ),
    "failing_example": (
        PAGE.replace(">>> size = 2 * B * D\n", ">>> 2 * B * D\nB*D\n>>> size = 2 * B * D\n"), "Expected:",
    ),
    "text": (PAGE.replace("{derived} size\n```", "{derived} 'size'\n```"), "SympifyError"),
    "without_words": (DRAWN.replace(":alt: a <step>\n", ""), "expected the option alt"),
    "size": (DRAWN.replace("B=7", "B=-7"), "BindingError"),
    "no_figure": (DRAWN.replace("cg.timeline(g, B=7).plot()", "g.name"), "AttributeError"),
}  # fmt: skip


@needs_sphinx
def test_failing_formula_or_plot_fails_the_build(tmp_path):
    code, said, _ = build(tmp_path, "# Page\n", **{name: page for name, (page, _) in FAILING.items()})
    assert code != 0
    # a warning's text extends to the next page's warning
    starts = r"^\S*?(\w+)\.md\S* (?:WARNING|ERROR): "
    _, *parts = re.split(starts, said, flags=re.MULTILINE)
    warnings = dict(zip(parts[::2], parts[1::2], strict=True))
    assert warnings.keys() == FAILING.keys(), said
    for name, (_, text) in FAILING.items():
        assert text in warnings[name], name


@needs_sphinx
def test_long_sums_keep_all_terms():
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        from derived import TERMS_A_LINE, latex
    finally:
        sys.path.pop(0)
    names = costgraph.dims(" ".join(f"a{i}" for i in range(2 * TERMS_A_LINE + 1)))
    total = sum(names[1:]) - names[0]
    text = latex(total)
    assert text.count(r"\\") == 2
    on_one_line = re.sub(r"\\(begin|end)\{aligned\}|\\\\|[&\s]", "", text)
    assert on_one_line == sympy.latex(total).replace(" ", "")


#: A directive that documents an object on its page.
ENTRY = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.MULTILINE)
#: A table listing a module's objects; Sphinx writes a page for each.
TABLE = re.compile(
    r"^\.\. currentmodule:: ([\w.]+)\n\n\.\. autosummary::\n   :toctree: generated\n   :nosignatures:\n\n"
    r"((?:   ~?[\w.]+\n)+)",
    re.MULTILINE,
)


def listed():
    """Names that the reference documents."""
    pages = [page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")]
    names = [name for page in pages for name in ENTRY.findall(page)]
    for module, rows in (found for page in pages for found in TABLE.findall(page)):
        names += [f"{module}.{row.strip().removeprefix('~')}" for row in rows.splitlines()]
    return {name.removeprefix("costgraph.") for name in names}


#: Layers listed by their short names.
TWICE = {f"nn.{name}" for name in set(costgraph.__all__) & set(costgraph.nn.__all__)}


def test_every_public_name_is_in_the_reference():
    assert sorted(DOTTED - TWICE - listed()) == []


def entries(page):
    """Return pages in the toctrees of a page, recursively."""
    text = page.read_text(encoding="utf-8")
    pages = []
    for block in re.findall(r"^```{toctree}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for entry in re.findall(r"^[\w./]+$", block, re.MULTILINE):
            path = DOCS / entry.lstrip("/") if entry.startswith("/") else page.parent / entry
            child = path.resolve().with_suffix(".md")
            pages += [str(child.relative_to(DOCS).with_suffix("")), *entries(child)]
    return pages


def test_every_page_is_in_the_site():
    pages = [str(p.relative_to(DOCS).with_suffix("")) for p in DOCS.rglob("*.md") if "_build" not in p.parts]
    assert sorted([*entries(DOCS / "index.md"), "index"]) == sorted(pages)


def test_front_page_figures_match_the_report():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    model = costgraph.models.load("llama-3-8b")
    report = str(costgraph.report(model, "h100-sxm", B=1, S=8192)).replace(",", " ").splitlines()
    for line in block.replace(",", " ").splitlines():
        words = line.split()
        assert words in [found.split()[: len(words)] for found in report], line


def numbers(text):
    return set(re.findall(r"\d+(?:\.\d+)?", text.replace(",", "")))


def test_accuracy_overview_figures_appear_on_linked_pages():
    folder = DOCS / "accuracy"
    table = (folder / "index.md").read_text(encoding="utf-8").partition("## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if "](" in line and line.startswith("|")]
    assert len(rows) >= 8
    for figure, source, result in rows:
        pages = re.findall(r"\((\w+)\.md", source)
        stated = numbers(" ".join((folder / f"{page}.md").read_text(encoding="utf-8") for page in pages))
        assert numbers(result) <= stated, figure
