"""Commands that report costs and read checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import sympy
import typer
from rich.markup import escape

from ..algebra.symbols import shorten
from ..algebra.symbols import symbol as size_symbol
from ..analysis.compare import compare_weights
from ..analysis.memory import peak_cases, peak_memory
from ..analysis.regimes import crossover
from ..bind.evaluate import Formula
from ..errors import BindingError, FormatError
from ..files.checkpoints import read_weights
from ..ir.graph import Graph, bindings
from ..report import report, text
from ..report.explore import explore
from ..report.files import to_csv, to_json
from ..report.formula import formula_text, shared, with_legend, write_formula
from ..report.quantities import QUANTITIES, quantity_of
from ..report.rich_tables import clean, draw, grid
from . import options as opt
from .loading import load_model
from .output import check_files, draw_report, say, screen, write_files
from .registry import command

__all__ = [
    "crossover_command",
    "formula_command",
    "report_command",
    "explore_command",
    "weights_command",
]


# -- report ------------------------------------------------------------------------------------------------------


@command("report")
def report_command(
    model: opt.Model, sizes: opt.Sizes = None, hardware: opt.Hardware = None, attention: opt.Attention = None,
    dtype: opt.Format = None, dropout: opt.Dropout = None, eager_ops: opt.EagerOps = False,
    symbolic: opt.Symbolic = False, count: opt.Count = "executed", fallback: opt.Fallback = None,
    depth: opt.Depth = 2, sort: opt.Sort = "order", formulas: opt.Formulas = False, json: opt.Json = None,
    csv: opt.Csv = None, plot: opt.Plot = None, memory_plot: opt.Memory = None,
    device: opt.TargetDevice = None, arch: opt.Arch = None, hierarchical: opt.Hierarchical = False,
) -> None:  # fmt: skip
    """Print the costs of a model: parameters, FLOPs, bytes moved, peak memory, and times on a device.

    Unbound sizes stay symbolic, and the results are formulas.

    Examples
    --------
      costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192
    """
    check_files(json, csv, plot, memory_plot)
    dims: dict[str, Any] = dict(opt.read_sizes(sizes))  # Any: passed together with keywords of other types
    graph = load_model(model, attention, dtype, dropout, eager_ops, symbolic)
    result = report(
        graph, hardware, count=count, fallback=fallback, depth=depth, device=device, arch=arch,
        hierarchical=hierarchical, **dims,
    ).sorted(sort)  # fmt: skip
    draw_report(graph, result, dims, plot, memory_plot)
    if not write_files((json, lambda: to_json(result)), (csv, lambda: to_csv(result))):
        width, color = screen()
        say(text.render(result, formulas=formulas, width=width, color=color), styled=color)


# -- formula -----------------------------------------------------------------------------------------------------


@command("formula")
def formula_command(
    model: opt.Model,
    quantity: Annotated[str, typer.Argument(metavar="QUANTITY", help=f"peak-memory, {', '.join(QUANTITIES)}.",
        autocompletion=opt.one_of(lambda: ("peak-memory", *QUANTITIES)))],
    sizes: opt.Sizes = None,
    format: Annotated[str, typer.Option("--format", help="text, latex or python.",
        autocompletion=opt.one_of(lambda: ("text", "latex", "python")))] = "text",
    preset: Annotated[bool, typer.Option("--preset", help="Bind the preset's default sizes.")] = False,
    attention: opt.Attention = None, dtype: opt.Format = None, dropout: opt.Dropout = None,
    eager_ops: opt.EagerOps = False,
) -> None:  # fmt: skip
    """Print the closed form of a quantity; unbound sizes stay symbolic.

    Examples
    --------
      costgraph formula llama-3-8b matmul-flops
      costgraph formula llama-3-8b peak-memory --preset --format python
    """
    dims = opt.read_sizes(sizes)
    if quantity != "peak-memory" and quantity not in QUANTITIES:
        quantities = ", ".join(["peak-memory", *QUANTITIES])
        raise FormatError(f"quantity {shorten(quantity)}: expected one of {quantities}")
    graph = load_model(model, attention, dtype, dropout, eager_ops, not preset)
    lines = _formula(graph, quantity, dims, format)
    # programs that read the output expect the formula alone
    described = graph.legend if format == "text" and sys.stdout.isatty() else {}
    say("\n".join(with_legend(lines, described)))


def _formula(graph: Graph, quantity: str, dims: Mapping[str, Any], format_: str) -> Iterator[str]:
    if quantity == "peak-memory":
        yield write_formula(peak_memory(graph, **dims), format_, "peak_memory", "peak memory, B")
        if format_ == "text":
            yield from _peak_cases(graph, dims)
        return
    formula = quantity_of(graph, quantity, dims)
    if formula is None:
        raise BindingError(
            f"{quantity} of graph {shorten(graph.name)}: no op moves bytes, expected at least one that does"
        )
    title, unit, _ = QUANTITIES[quantity]
    unit = "a count" if unit == "1" else unit
    yield write_formula(formula, format_, quantity.replace("-", "_"), f"{title}, {unit}")


def _peak_cases(graph: Graph, dims: Mapping[str, Any]) -> Iterator[str]:
    cases = peak_cases(graph, bindings(graph, dims))
    _, remainders = shared([c.formula for c in cases])
    locations = [clean(f"{c.op or 'throughout'} ({c.phase or 'forward'})") for c in cases]
    rows = [
        (location, escape(formula_text(remainder))) for location, remainder in zip(locations, remainders, strict=True)
    ]
    head = "peak at" if len(cases) == 1 else "cases without their common part, and where each peaks"
    yield draw(["", head, grid(rows if len(cases) > 1 else [(locations[0], "")])], {}, screen()[0])


# -- crossover ---------------------------------------------------------------------------------------------------


@command("crossover")
def crossover_command(
    model: opt.Model,
    symbol: Annotated[str, typer.Argument(metavar="SYMBOL", help="Dimension to solve for.")],
    hardware: opt.Device,
    sizes: opt.Sizes = None,
    fallback: opt.Fallback = None,
    attention: opt.Attention = None, dtype: opt.Format = None, dropout: opt.Dropout = None,
    eager_ops: opt.EagerOps = False,
    symbolic: opt.Symbolic = False,
) -> None:  # fmt: skip
    """Print the size at which compute time overtakes memory time, over all ops together.

    Examples
    --------
      costgraph crossover llama-3-8b B --hardware h100-sxm S=1
    """
    dims = opt.read_sizes(sizes)
    graph = load_model(model, attention, dtype, dropout, eager_ops, symbolic)
    threshold = crossover(graph, hardware, symbol, fallback=fallback, **dims)
    say("\n".join(with_legend(_crossover(threshold, symbol), graph.legend)))


def _crossover(threshold: Formula, symbol: str) -> Iterator[str]:
    # written as a formula, so that the legend has it
    name = size_symbol(symbol)
    if isinstance(threshold, sympy.Expr):
        yield f"compute time equals memory time at {formula_text(name)} = {formula_text(threshold, grouped=True)}"
    elif threshold == 0:
        yield f"compute-bound at every {formula_text(name)}"
    elif threshold == float("inf"):
        yield f"memory-bound at every {formula_text(name)}"
    else:
        yield f"compute time equals memory time at {symbol} = {float(threshold):.6g}"


# -- explore -----------------------------------------------------------------------------------------------------------

_Out = Annotated[str, typer.Option("--out", metavar="FILE", help="HTML file to write.")]
_Views = Annotated[
    list[str] | None,
    typer.Option("--views", metavar="VIEW", help="View of the page (repeatable): forward, prefill, decode or "
                 "train, with optimizer=, precision=, checkpoint=, accumulate=, clip=, loss=, and for one rank dp=, "
                 "tp=, cp=, ep=, pp=, zero=, sequence, context=, reduce_every_microbatch=, schedule=."),
]  # fmt: skip


@command("explore")
def explore_command(
    model: opt.Model, out: _Out, views: _Views = None, attention: opt.Attention = None, dtype: opt.Format = None,
    dropout: opt.Dropout = None, eager_ops: opt.EagerOps = False, symbolic: opt.Symbolic = False,
) -> None:  # fmt: skip
    """Write an HTML page that shows memory, FLOPs and time for adjustable sizes, without a server.

    Examples
    --------
      costgraph explore llama-3-8b --out page.html
      costgraph explore llama-3-8b --out page.html --views forward
        --views "train precision=bf16 checkpoint=every-block dp=8 tp=T zero=3"
        --views "train precision=bf16 accumulate=8 pp=4"
    """
    page = explore(load_model(model, attention, dtype, dropout, eager_ops, symbolic), out, views=views)
    say(f"{out}: {page.name}, {len(page.html):,} characters")


# -- weights -----------------------------------------------------------------------------------------------------------


@command("weights")
def weights_command(
    path: Annotated[str, typer.Argument(metavar="FILE",
          help="A safetensors file, an index, a folder with one, or a GGUF file.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Model to compare with, as for report.",
        autocompletion=opt.one_of(opt.presets))] = None,
    sizes: opt.Sizes = None, dtype: opt.Format = None,
) -> None:  # fmt: skip
    """Print the tensors of a checkpoint, read from its headers; with a model, print the differences.

    The exit code is 1 if they differ.

    Examples
    --------
      costgraph weights model.safetensors
      costgraph weights folder llama-3-8b
    """
    weights = read_weights(path)
    if model is None:
        say(str(weights))
        return
    comparison = compare_weights(load_model(model, None, dtype, None), weights, **opt.read_sizes(sizes))
    say(str(comparison))
    if not comparison.agree:
        raise typer.Exit(1)
