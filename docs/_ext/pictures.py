"""Plots, drawn when a page is built.

The directive `picture` evaluates its argument, as `derived` does, and embeds the figure. The option `alt` describes it
for screen readers.
"""

from __future__ import annotations

import base64
import html
from typing import Any, ClassVar

from derived import session_of
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Picture(SphinxDirective):
    """Show a figure: the value of a Python expression in the names of the page's examples."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {"alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return the picture as part of the page, without a file."""
        if "alt" not in self.options:
            raise self.error("picture: expected the option alt, which says what is seen")
        session = session_of(self)
        try:
            drawn = eval(self.arguments[0], session.names)._repr_png_()
        except Exception as error:
            raise self.error(f"picture {self.arguments[0]!r}: {type(error).__name__}: {error}") from error
        source = base64.b64encode(drawn).decode()
        text = f'<img class="picture" alt="{html.escape(self.options["alt"])}" src="data:image/png;base64,{source}">'
        text = f'<div class="picture">{text}</div>'
        return [nodes.raw("", text, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("picture", Picture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
