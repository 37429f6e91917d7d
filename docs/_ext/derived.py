"""Formulas, derived when a page is built.

The directive `derived` evaluates its argument in the names of the page's examples above it, and shows the LaTeX of the
result. The examples run as doctests; a failing one is a warning of the build. Formulas are MathML, so pages need
neither JavaScript nor a network.
"""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any, ClassVar

import sympy
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import costgraph as cg

LOGGER = logging.getLogger(__name__)
# Terms of a sum per line.
TERMS_A_LINE = 5


class Session:
    """The examples of one page, run as far as the page has been read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left = doctest.DocTestParser().get_examples(path.read_text(encoding="utf-8"), str(path))
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, line: int) -> None:
        """Run the pending examples above a line."""
        due = [e for e in self.left if e.lineno < line]
        self.left = self.left[len(due) :]
        test = doctest.DocTest(due, {}, self.path.name, str(self.path), 0, None)
        test.globs = self.names  # the constructor would copy them
        said: list[str] = []
        if due and doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False).failed:
            LOGGER.warning("".join(said), location=str(self.path))


def latex(value: object) -> str:
    """Return the LaTeX of a number or formula, and break long sums and maxima into lines."""
    expr = sympy.sympify(value, strict=True)
    if isinstance(expr, cg.Max | cg.Min):
        lines = [sympy.latex(a) for a in expr.args]
        name = r"\max" if isinstance(expr, cg.Max) else r"\min"
        return rf"{name}\left\{{{_aligned([f'&{t}' for t in lines], ', ')}\right\}}" if len(lines) > 1 else lines[0]
    terms = expr.as_ordered_terms()
    if not isinstance(expr, sympy.Add) or len(terms) <= TERMS_A_LINE:
        return sympy.latex(expr)
    parts = [terms[i : i + TERMS_A_LINE] for i in range(0, len(terms), TERMS_A_LINE)]
    # split in the order in which the whole sum prints its terms
    lines = [sympy.latex(sympy.Add(*part)) for part in parts]
    return _aligned([f"& {t}" if i == 0 or t.startswith("-") else f"& + {t}" for i, t in enumerate(lines)])


def _aligned(lines: list[str], end: str = "") -> str:
    return r"\begin{aligned} " + rf"{end} \\ ".join(lines) + r" \end{aligned}"


def session_of(directive: SphinxDirective) -> Session:
    """Return the examples of the current page, run up to a directive."""
    # rebuild the page if the library changes
    for source in Path(cg.__file__).parent.rglob("*.py"):
        directive.env.note_dependency(str(source))
    data = directive.env.temp_data
    if "derived" not in data:
        data["derived"] = Session(Path(directive.env.doc2path(directive.env.docname)))
    session: Session = data["derived"]
    session.run(directive.lineno)
    return session


class Derived(SphinxDirective):
    """Show the LaTeX of a Python expression, evaluated with the names of the page's examples.

    The option `of` is the text before the equals sign.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {"of": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """Return the formula as a block of mathematics."""
        session = session_of(self)
        try:
            text = latex(eval(self.arguments[0], session.names))
        except Exception as error:
            raise self.error(f"derived {self.arguments[0]!r}: {type(error).__name__}: {error}") from error
        if "of" in self.options:
            text = rf"\text{{{self.options['of']}}} = {text}"
        return [nodes.math_block(text, text, nowrap=True, number=None, docname=self.env.docname)]


def inline_mathml(writer: Any, node: nodes.Element) -> None:
    """Write inline mathematics."""
    writer.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def block_mathml(writer: Any, node: nodes.Element) -> None:
    """Write displayed mathematics."""
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def strip_examples(app: Sphinx, document: nodes.document) -> None:
    """Drop the empty line at the end of an example: doctest needs it, a reader does not."""
    for block in document.findall(nodes.literal_block):
        text = block.astext().rstrip("\n")
        block.rawsource, block.children = text, []
        block += nodes.Text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive and the renderer."""
    app.add_directive("derived", Derived)
    app.add_html_math_renderer("mathml", (inline_mathml, None), (block_mathml, None))
    app.connect("doctree-read", strip_examples)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
