"""One self-contained HTML file: markup, style, engine and data, under a policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import zlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ... import models
from ...algebra.symbols import shown
from ...errors import FormatError
from ...graph.graph import Graph
from ...graph.showing import SHOWN
from ...hardware.specs import list_hardware, load_hardware
from ...text_file import write_file
from .collect import collected
from .views import views_of

__all__ = ["Page", "explore"]


@dataclass(frozen=True, repr=False)
class Page:
    """The page of a graph; in a notebook it shows itself."""

    name: str
    """what it is of"""
    data: str
    """JSON: formulas as rows of numbers, and what they are of"""

    @property
    def html(self) -> str:
        """The file: it asks for nothing from anywhere."""
        style = _asset("uplot.css") + _asset("page.css")
        script = "".join(map(_asset, ("uplot.js", "engine.js", "page.js")))
        policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
        # packed, no text of a model can end the element that it stands in
        parts = {
            "policy": policy, "title": html.escape(self.name), "style": style, "script": script,
            "data": base64.b64encode(zlib.compress(self.data.encode(), 9)).decode(), "licence": _asset("uplot-LICENSE"),
        }  # fmt: skip
        head, *rest = _asset("page.html").split("{{")
        return head + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; FormatError if it cannot be written."""
        write_file(path, self.html)

    def __repr__(self) -> str:
        return f"Page({self.name!r}: {len(self.html):,} characters of HTML)"

    def _repr_html_(self) -> str:
        source = html.escape(self.html, quote=True)
        title = html.escape(f"costs of {self.name}", quote=True)
        return f'<iframe title="{title}" width="100%" height="900" style="border: 0" srcdoc="{source}"></iframe>'


# uPlot is that of `npm pack uplot@1.6.32`, unchanged: dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE
@cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def explore(graph: str | Graph, path: str | os.PathLike[str] | None = None, /, *, views: object = None) -> Page:
    """Return a page with a slider for every size, which shows what follows from them: no server, no network.

    Parameters
    ----------
    graph : str or Graph
        A preset, or the graph of a forward pass; of a step, or the part of one rank, the only view is itself.
    path : str or path-like, optional
        HTML file to write.
    views : sequence of str or mapping of str to Graph, optional
        What can be chosen: words such as `forward`, `decode`, `train optimizer=adamw precision=bf16 dp=8 tp=T zero=3`
        or `train accumulate=8 pp=4`, or graphs by name. By default the forward pass, steps of training in bf16 with
        AdamW and SGD, passes of inference, the step of one rank of `dp * tp`, and of one of `dp` at each stage of
        ZeRO, all open, and the stages of a pipeline of 4, as far as the graph has them. Of a pipeline each stage is a
        view, with its own memory, and with the time of the whole pipeline.

    Returns
    -------
    Page
        `.html`, `.save(path)`; in a notebook, its last line shows it.

    Raises
    ------
    CostGraphError
        If there is no such preset or view, a formula has a function that the page has no rule for, or the file cannot
        be written.

    Notes
    -----
    The page holds the formulas of `peak_memory`, `flops`, `roofline` and `timeline` with every size open, exactly, and
    works them out in whole numbers where digits are shown. Times are those of `roofline`, as floats.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D = cg.dims("B D")
    >>> with cg.Graph("g") as g:
    ...     g.output(cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=5)))
    >>> page = cg.explore(g, views=["forward"])
    >>> '<meta http-equiv="Content-Security-Policy"' in page.html
    True
    """
    if isinstance(graph, str):
        graph = models.load(graph)
    if not isinstance(graph, Graph):
        raise FormatError(f"explore: got {shown(graph)}, expected a graph or the name of a preset")
    devices = [load_hardware(name) for name in list_hardware()]
    data = collected(graph.name, views_of(graph, views), devices)
    page = Page(graph.name, json.dumps(data, separators=(",", ":"), allow_nan=False))
    if path is not None:
        page.save(path)
    return page


SHOWN["explore"] = explore
