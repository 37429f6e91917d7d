"""Summary table of a graph by scope, shown by `print(graph)`."""

from __future__ import annotations

import html
from collections.abc import Iterable

from ..algebra.extremum import as_expr
from ..algebra.polynomial import Poly, total
from ..analysis.costs import costs, repeated_bodies
from ..bind.evaluate import Formula, answer
from ..errors import CostGraphError
from ..hardware.tables import html_cells, legend_rows
from ..ir.graph import Graph, bindings, scopes_of
from ..ir.strides import numel
from .formula import formula_text, written_symbols

__all__ = ["summary", "summary_html"]

#: Maximum number of rows.
_MOST_ROWS = 40
#: Row of ops and parameters without a scope.
_TOP = "(no scope)"


def summary(graph: Graph) -> str:
    """Summarize a graph by scope: output shape, parameters and FLOPs, in at most 40 rows.

    Parameters
    ----------
    graph : Graph
        Any graph. Loops count all iterations, and default sizes are bound.

    Returns
    -------
    str
        A header with the sizes, one row per scope in program order, the total, and the legend of the symbols if the
        graph has one. Scopes are cut off at the deepest level with at most 40 rows.

    Examples
    --------
    >>> import costgraph as cg
    >>> B, D, F = cg.dims("B D F")
    >>> with cg.Graph("mlp") as g:
    ...     h = cg.relu(cg.linear(g.input("x", (B, D)), "b d -> b f", f=F, name="up"))
    ...     g.output(cg.linear(h, "b f -> b d", d=D, name="down"))
    >>> print(g)
    mlp: 3 ops
    scope       output shape  parameters  FLOPs
    up          (B, F)        D*F         2*B*D*F
    (no scope)  (B, F)        0           B*F
    down        (B, D)        D*F         2*B*D*F
    total                     2*D*F       4*B*D*F + B*F
    """
    try:
        title, rows, legend = _described(graph)
    except CostGraphError:  # analyses fail on some graphs, such as unfinished ones
        return repr(graph)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([title, *lines, *map("  ".join, legend)])


def summary_html(graph: Graph) -> str:
    """Return the table of `summary` as HTML, which a notebook shows for a graph."""
    try:
        title, (head, *rows), legend = _described(graph)
    except CostGraphError:
        return f"<pre>{html.escape(repr(graph))}</pre>"
    sides = ["left"] * len(head)
    body = "".join(f"<tr>{html_cells('td', row, sides)}</tr>" for row in rows)
    body += "".join(
        f'<tr>{html_cells("th", [label], ["left"])}<td colspan="{len(head) - 1}" style="text-align: left">'
        f"{html.escape(text)}</td></tr>"
        for label, text in legend
    )
    return f"<table><caption>{html.escape(title)}</caption><tr>{html_cells('th', head, sides)}</tr>{body}</table>"


def _described(graph: Graph) -> tuple[str, list[tuple[str, ...]], list[tuple[str, str]]]:
    """Return the title of a graph, its rows with the head first, and the legend."""
    with written_symbols() as names:
        title, rows = _table(graph)
    return title, rows, legend_rows(names, graph.root.legend)


def _table(graph: Graph) -> tuple[str, list[tuple[str, ...]]]:
    """Return the title of a graph, and its rows with the head first."""
    values = bindings(graph, {})
    bodies = [(g, times) for g, times in repeated_bodies(graph) if not g.fused]
    ops = [op for g, _ in bodies for op in g.ops if op.loop is None]
    level = _level({op.scope for op in ops})
    shapes: dict[str, str] = {}
    for op in ops:
        output_sizes = op.results[-1].sizes if op.results else ()
        shapes[_truncated(op.scope, level)] = (
            f"({', '.join(formula_text(answer(n.bind(values))) for n in output_sizes)})"
        )
    params: dict[str, list[Poly]] = {}
    for g, times in bodies:
        for t in g.tensors:
            if t.role == "param" and t.producer is None:
                params.setdefault(_scope_of(t.name, shapes), []).append(numel(t.sizes) * times)
    flops: dict[str, list[Formula]] = {}
    table = costs(graph)
    for scope, part in table.group("scope").items():
        flops.setdefault(_truncated(scope, level), []).append(part.total().flops)
    rows: list[tuple[str, ...]] = [("scope", "output shape", "parameters", "FLOPs")]
    for scope in dict.fromkeys((*shapes, *params)):
        scope_params = answer(total(params.get(scope, ())).bind(values))
        scope_flops = sum(map(as_expr, flops.get(scope, ())), start=as_expr(0))
        rows.append((scope or _TOP, shapes.get(scope, ""), _cell(scope_params), _cell(answer(scope_flops))))
    total_params = answer(total(p for counts in params.values() for p in counts).bind(values))
    rows.append(("total", "", _cell(total_params), _cell(table.total().flops)))
    hidden = len(rows) - 2 - _MOST_ROWS
    if hidden > 0:
        rows[_MOST_ROWS + 1 : -1] = [(f"... {hidden} more", "", "", "")]
    sizes = [f", {name}={values[name].expr}" for name in sorted(values)]
    return f"{graph.name}: {len(ops)} ops{''.join(sizes)}", rows


def _cell(value: Formula) -> str:
    return f"{value:,}" if isinstance(value, int) else formula_text(value)


def _level(scopes: set[str]) -> int:
    """Return the deepest scope level with few enough rows."""
    deepest = max((scope.count("/") + 1 for scope in scopes), default=1)
    levels = range(deepest, 1, -1)
    return next((n for n in levels if len({_truncated(scope, n) for scope in scopes}) <= _MOST_ROWS), 1)


def _truncated(scope: str, level: int) -> str:
    return "/".join(scope.split("/")[:level])


def _scope_of(name: str, scopes: Iterable[str]) -> str:
    """Return a parameter's row: its innermost enclosing scope, or one inside that scope."""
    for enclosing in reversed(scopes_of(name)[:-1]):
        if matching := [scope for scope in scopes if f"{scope}/".startswith(f"{enclosing}/")]:
            return enclosing if enclosing in matching else matching[0]
    return ""
