"""Build the self-contained HTML page of `explore`: formulas as data, views of a graph, devices, and markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, TypeVar

import sympy

from ... import models
from ...algebra.conditions import Requirement as Test
from ...algebra.extremum import Max, Min
from ...algebra.polynomial import Monomial, Poly, Rational, generator, poly, total
from ...algebra.symbols import shorten, shown, size_or_name
from ...analysis.collective_time import exchange, whole
from ...analysis.costs import compulsory, flops, matmul_flops
from ...analysis.liveness import Program, copies_for, holds_from, live_bytes, play
from ...analysis.memory import peak_cases
from ...analysis.params import param_bytes, param_count
from ...analysis.step_time import unit_times, when
from ...analysis.work import DeviceQuestion, Rates, Work, works
from ...errors import CostGraphError, FormatError, SpecError, UnsupportedError
from ...hardware.file import LINK_KINDS
from ...hardware.specs import Hardware, list_hardware, load_hardware
from ...ir.graph import Graph, InFlightMicroBatches, bindings, conditions, known_names, need_choice, stages
from ...notation.progress import progressing
from ...ops.collectives import Send
from ...optimizers import OPTIMIZERS
from ...text_file import write_file
from ...transforms.checkpoint import read_checkpoint
from ...transforms.inference import decode, prefill
from ...transforms.loss import read_loss
from ...transforms.shard.parallelize import CONTEXTS, parallelize
from ...transforms.training import training_step
from ..quantities import symbolic

__all__ = [
    "Tables",
    "views_of",
    "page_data",
    "Page",
    "explore",
]


# -- formula tables ----------------------------------------------------------------------------------------------------
# Formulas are plain data: polynomials are rows over a shared table of monomials.

T = TypeVar("T", bound=Hashable)
# JavaScript numbers are exact up to this; larger coefficients are strings
_LARGEST_EXACT = 2**53
_KINDS = {
    Max: "max", Min: "min", sympy.Max: "max", sympy.Min: "min",
    sympy.floor: "floor", sympy.ceiling: "ceil", sympy.Pow: "pow", sympy.log: "log",
}  # fmt: skip


class Tables:
    """Polynomials by index, deduplicated, over shared tables of monomials and generators.

    Examples
    --------
    >>> from costgraph import dims
    >>> B, D = dims("B D")
    >>> tables = Tables()
    >>> tables.row(poly(3 * B * D**2))
    0
    >>> tables.data()
    {'rows': [[0, 3]], 'monomials': [[0, 1, 1, 2]], 'generators': ['B', 'D']}
    """

    def __init__(self) -> None:
        self._rows: dict[Poly, int] = {}
        self._monomials: dict[Monomial, int] = {}
        self._generators: dict[str, int] = {}
        self._entries: dict[str, list[Any]] = {"rows": [], "monomials": [], "generators": []}

    def row(self, p: Poly) -> int:
        """Return the index of a polynomial; raise UnsupportedError for functions that the engine lacks."""
        if p not in self._rows:
            row = [x for m, c in p.terms.items() for x in (self._monomial(m), _coefficient(c))]
            self._add("rows", self._rows, p, row)
        return self._rows[p]

    def data(self) -> dict[str, list[Any]]:
        """Return the tables as JSON data."""
        return self._entries

    def _add(self, table: str, indices: dict[T, int], key: T, entry: object) -> None:
        indices[key] = len(self._entries[table])
        self._entries[table].append(entry)

    def _monomial(self, m: Monomial) -> int:
        if m not in self._monomials:
            self._add("monomials", self._monomials, m, [x for key, power in m for x in (self._generator(key), power)])
        return self._monomials[m]

    def _generator(self, key: str) -> int:
        if key not in self._generators:
            self._add("generators", self._generators, key, key if key[0] != "~" else self._atom(generator(key)))
        return self._generators[key]

    def _atom(self, expr: sympy.Expr) -> list[Any]:
        for kind, name in _KINDS.items():
            if isinstance(expr, kind):
                return [name, *(self.row(poly(a)) for a in expr.args)]
        kinds = ", ".join(dict.fromkeys(_KINDS.values()))
        raise UnsupportedError(
            f"explore: {shorten(str(expr))}: no rule for {type(expr).__name__}, expected one of {kinds}"
        )


def _coefficient(value: Rational) -> int | str:
    return value if isinstance(value, int) and abs(value) < _LARGEST_EXACT else str(value)


# -- views -------------------------------------------------------------------------------------------------------------

_PASSES: Mapping[str, Callable[[Graph], Graph]] = {"forward": lambda g: g, "prefill": prefill, "decode": decode}
_DEGREES = ("dp", "tp", "cp", "ep", "pp")
#: Options of `parallelize` besides degrees; those without a value are flags.
_RANK_OPTIONS = ("zero", "sequence", "context", "reduce_every_microbatch", "schedule")
_CHOICES = {"zero": ("0", "1", "2", "3"), "reduce_every_microbatch": ("yes", "no"), "context": CONTEXTS}
_STEP_OPTIONS = ("optimizer", "precision", "checkpoint", "accumulate", "clip", "loss")
#: Training steps by their options, shared between the views of ranks.
_Steps = dict[frozenset[tuple[str, str]], Graph]
_DEFAULT = (
    "forward", "train precision=bf16", "train precision=bf16 checkpoint=every-block",
    "train optimizer=sgd precision=bf16", "prefill", "decode", "train precision=bf16 dp=dp tp=tp",
    "train precision=bf16 dp=dp zero=1", "train precision=bf16 dp=dp zero=2", "train precision=bf16 dp=dp zero=3",
    "train precision=bf16 accumulate=8 pp=4",
)  # fmt: skip


def views_of(graph: Graph, requested: object = None) -> dict[str, Graph]:
    """Return the graphs to show by view name, by default all standard views that the graph supports.

    `requested` has graphs, or option strings such as `train optimizer=adamw precision=bf16 checkpoint=every-block dp=8
    tp=T zero=3`. Raises if an option is unknown, or a transform rejects the graph.
    """
    if isinstance(requested, Mapping):
        views = dict(requested)
        if not views or not all(isinstance(k, str) and isinstance(v, Graph) for k, v in views.items()):
            raise FormatError(f"explore: views is {shown(requested)}, expected a mapping from view names to graphs")
        return views
    if requested is None:
        return dict(_supported_views(graph))
    if isinstance(requested, str) or not isinstance(requested, Iterable):
        raise FormatError(f"explore: views is {shown(requested)}, expected a list such as ['forward', 'decode']")
    steps: _Steps = {}
    views = {text: _view(graph, text, steps) for text in list(requested)}
    if not views:
        raise FormatError("explore: views is empty, expected at least one view")
    return views


def _supported_views(graph: Graph) -> Iterable[tuple[str, Graph]]:
    steps: _Steps = {}
    for text in _DEFAULT:
        try:
            yield text, _view(graph, text, steps)
        except CostGraphError:  # no loss, no tokens, or already a training step
            continue


def _view(graph: Graph, text: object, steps: _Steps) -> Graph:
    if not isinstance(text, str) or not text.strip():
        raise FormatError(f"explore: view {shown(text)}, expected one such as {', '.join(map(repr, _DEFAULT))}")
    mode, *settings = text.split()
    options = dict(option.partition("=")[::2] for option in settings)
    allowed = (*_DEGREES, *_RANK_OPTIONS, *(_STEP_OPTIONS if mode == "train" else ()))
    for name, value in options.items():
        if name not in allowed or bool(value) == (name == "sequence"):
            flags = (k if k == "sequence" else f"{k}=" for k in allowed)
            raise FormatError(f"explore: view {shorten(text)}: {shorten(name)}, expected {', '.join(flags)}")
    if mode == "train":
        key = frozenset((k, v) for k, v in options.items() if k in _STEP_OPTIONS)
        step_graph = steps[key] = steps.get(key) or _step(graph, options)
    elif mode in _PASSES:
        step_graph = _PASSES[mode](graph)
    else:
        raise FormatError(f"explore: view {shorten(text)}: expected {', '.join(_PASSES)} or train, then options")
    return _rank(step_graph, options) if options.keys() & {*_DEGREES, *_RANK_OPTIONS} else step_graph


def _step(graph: Graph, options: Mapping[str, str]) -> Graph:
    name = options.get("optimizer", "adamw")
    if name not in OPTIMIZERS:
        raise FormatError(f"explore: optimizer={shorten(name)}, expected one of {', '.join(OPTIMIZERS)}")
    loss = read_loss(options["loss"]) if "loss" in options else None
    policy = read_checkpoint(options.get("checkpoint", "none"))
    accumulate = size_or_name(options.get("accumulate", "1"), "accumulate")
    try:
        clip = float(options["clip"]) if "clip" in options else None
    except ValueError:
        raise FormatError(f"explore: clip={shorten(options['clip'])}, expected a number") from None
    return training_step(graph, loss, OPTIMIZERS[name](), options.get("precision"), policy, accumulate, clip=clip)


def _rank(graph: Graph, options: Mapping[str, str]) -> Graph:
    arguments: dict[str, Any] = {name: size_or_name(options[name], name) for name in _DEGREES if name in options}
    arguments |= {name: options[name] for name in ("context", "schedule") if name in options}
    for name, choices in _CHOICES.items():
        if name in options:
            need_choice(f"explore: {name}", options[name], choices)
    if "zero" in options:
        arguments["zero"] = int(options["zero"])
    if "reduce_every_microbatch" in options:
        arguments["reduce_every_microbatch"] = options["reduce_every_microbatch"] == "yes"
    micro_batches = size_or_name(options.get("accumulate", "1"), "accumulate")
    return parallelize(graph, sequence="sequence" in options, micro_batches=micro_batches, **arguments)


# -- page data ---------------------------------------------------------------------------------------------------------

#: Initial sizes of unbound dimensions, small enough for most devices: the first that the model allows.
_START = {"S": (2048, 1024, 512, 256, 128, 64, 1)}
#: To find valid sizes, try these powers of two for up to so many other dimensions.
_MAX_FREE, _CANDIDATES = 4, (1, 2, 4, 8)
_STAGES = ("first", "middle", "last")


def page_data(name: str, views: Mapping[str, Graph], devices: Sequence[Hardware]) -> dict[str, Any]:
    """Return the page data: `tables`, `views`, `devices` and the initial sizes.

    Only memory is shown for a device without rates.
    """
    tables = Tables()
    twins = {view: [symbolic(stage) for stage in stages(graph)] for view, graph in views.items()}
    all_stages = [stage for stage_graphs in twins.values() for stage in stage_graphs]
    keys = sorted({key for g in all_stages for w in works(g) for key in (*w.flops, *w.least)})
    view_data: list[dict[str, Any]] = []
    with progressing("explore", len(all_stages)) as step:
        for view, stage_graphs in twins.items():
            indices = range(len(view_data), len(view_data) + len(stage_graphs))
            for i, (stage, index) in enumerate(zip(stage_graphs, indices, strict=True)):
                named = f"{view}: {_STAGES[-1 if index == indices[-1] else i]} stage" if len(stage_graphs) > 1 else view
                step(named)
                view_data.append(_view_data(named, stage, tables, keys, devices))
                if len(stage_graphs) > 1 and stage.waiting is not None:
                    view_data[-1] |= _pipeline(stage, stage.waiting, indices, tables, devices)
    return {
        "name": name,
        "keys": [f"{kind} {dtype}" for kind, dtype in keys],
        "views": view_data,
        "devices": [_device(d, keys) for d in devices],
        "legend": {n: text for graph in reversed([*views.values()]) for n, text in graph.legend.items()},
        "sizes": _initial_sizes(list(views.values()), all_stages, [view["counts"] for view in view_data]),
        "tables": tables.data(),
    }


def _initial_sizes(
    graphs: Sequence[Graph], stage_graphs: Sequence[Graph], counts: Sequence[Mapping[str, int]]
) -> dict[str, int]:
    """Return the initial sizes: model defaults or small values, valid in all views if possible."""
    names = sorted(frozenset().union(*map(known_names, stage_graphs)))
    defaults = {name: size for graph in reversed(graphs) for name, size in graph.defaults.items()}
    initial = {n: defaults.get(n, _START.get(n, (1,))[0]) for n in names}
    for stage, minimums in zip(stage_graphs, counts, strict=True):
        names_of_stage = known_names(stage)
        unbound = [n for n in names if n in names_of_stage and n not in defaults]
        started = [n for n in unbound if n in _START]
        free = [n for n in unbound if n not in _START][:_MAX_FREE]
        for tried in product(*(_START[n] for n in started), *(_CANDIDATES for _ in free)):
            sizes = initial | {
                n: (min if n in _START else max)(initial[n], size)
                for n, size in zip([*started, *free], tried, strict=True)
            }
            if _are_valid(stage, {n: sizes[n] for n in names_of_stage}) and all(
                sizes[n] >= minimum for n, minimum in minimums.items()
            ):
                initial = sizes
                break
    return initial


def _are_valid(stage: Graph, sizes: Mapping[str, int]) -> bool:
    try:
        bindings(stage, sizes)
    except CostGraphError:
        return False
    return all(test.holds(sizes) for test, _ in _stage_conditions(stage))


def _stage_conditions(stage: Graph) -> list[tuple[Test, str]]:
    """Return the conditions on the number of pipeline stages."""
    if stage.waiting is None:
        return []
    count, identical = stage.waiting.stages, stage.waiting.alike
    return [
        (Test(count, 2), f"a pipeline has {count.brief()} stages, 2 or more"),
        (Test(identical, 1), f"there are {identical.brief()} stages like this one, 1 or more"),
    ]


def _pipeline(
    stage: Graph, pipeline: InFlightMicroBatches, indices: Sequence[int], tables: Tables, devices: Sequence[Hardware]
) -> dict[str, Any]:
    """Return a stage's data for the pipeline time: its position, and the times of its sends."""
    row, values = tables.row, bindings(stage, {})
    sends = [op for op in stage.walk() if isinstance(op.kind, Send)]

    def times(device: Hardware) -> list[int] | str:
        try:
            return [row(exchange(op, stage, values, device)[0]) for op in sends]
        except SpecError as error:
            return str(error)

    return {
        "pipeline": list(indices), "schedule": pipeline.schedule, "stages": row(pipeline.stages),
        "micro_batches": row(pipeline.micro_batches), "alike": row(pipeline.alike),
        "ranks": [[row(n) for n in run] for run in pipeline.ranks], "sends": [times(d) for d in devices],
    }  # fmt: skip


def _view_data(
    name: str, graph: Graph, tables: Tables, keys: Sequence[tuple[str, str]], devices: Sequence[Hardware]
) -> dict[str, Any]:
    values, row = bindings(graph, {}), tables.row
    exchanged: dict[object, Any] = {}
    cases = [
        [
            row(poly(r.formula)),
            r.op or "(start)",
            r.phase or "forward",
            r.label,
            [[k, row(p)] for k, p in r._roles if p],
        ]
        for r in peak_cases(graph, values)
    ]
    op_work = works(graph)
    totals = {
        "flops": flops(graph), "matmul": matmul_flops(graph), "bytes": total(w.bytes for w in op_work),
        "fused": compulsory(graph), "params": param_count(graph), "param_bytes": param_bytes(graph),
    }  # fmt: skip
    return {
        "name": name,
        "group": _group(graph),
        "sizes": sorted(known_names(graph)),
        "totals": {k: row(p if isinstance(p, Poly) else poly(p)) for k, p in totals.items()},
        "peak": cases,
        "ops": [_op(w, graph, tables, keys, devices, exchanged) for w in op_work],
        "memory": _memory(play(graph, copies_for(values), values), row),
        "asked": [[row(a.amount), a.least, a.whole, a.equal, a.strict, text] for a, text in _conditions(graph)],
        "counts": holds_from(graph, values),
    }


def _conditions(graph: Graph) -> list[tuple[Test, str]]:
    """Return the conditions on sizes, with warning texts."""
    return [
        *((Test(r.difference, equal=r.equal, strict=r.strict), r.text) for r in graph.root.relations.relations),
        *((Test(c.formula, c.least, whole=c.whole),
           f"{c.place}, {c.formula.brief()}, is {'an integer, ' if c.whole else ''}{c.least} or more")
          for c in conditions(graph)),
        *((test, text) for test, text in _stage_conditions(graph) if test.amount.names()),
    ]  # fmt: skip


def _group(graph: Graph) -> str:
    """Return the heading for a group of views."""
    if graph.waiting is not None:
        return "a stage of a pipeline"
    if graph.sharding is not None:
        return "one of several ranks"
    return "steps of training" if graph.gradients else "passes"


def _op(
    work: Work,
    graph: Graph,
    tables: Tables,
    keys: Sequence[tuple[str, str]],
    devices: Sequence[Hardware],
    exchanged: dict[object, Any],
) -> dict[str, Any]:
    row = tables.row
    out: dict[str, Any] = {
        "op": work.op.name, "phase": work.op.phase, "bytes": row(work.bytes),
        "flops": [[keys.index(key), row(p)] for key, p in work.flops.items()],
    }  # fmt: skip
    if work.least != work.flops:
        out["least"] = [[keys.index(key), row(p)] for key, p in work.least.items()]
    if work.link is not None:
        out["link"] = work.link
    if work.collective is not None:
        out |= {"collective": work.collective.collective, "axis": work.collective.axis or ""}
        # most collectives recur in another layer or phase
        kind = work.collective
        key = (kind.collective, kind.axis, kind.ranks, work.times, whole(work.op), work.op.operands[0].storage.pieces)
        if key not in exchanged:
            exchanged[key] = [_sent(work, graph, d, row) for d in devices]
        out["sent"] = exchanged[key]
    if graph.waiting is not None:
        out["when"] = when(work.op)
    return out


def _sent(work: Work, graph: Graph, device: Hardware, row: Callable[[Poly], int]) -> list[Any] | str:
    """Return a collective's time, link and lower bound by unit, or an error text if the device has no link."""
    values = bindings(graph, {})
    try:
        rates = Rates(device)
        once, link = exchange(work.op, graph, values, device)
        bound = unit_times(DeviceQuestion(graph, rates, values, [work]))
    except SpecError as error:
        return str(error)
    return [row(once * work.times), link, {unit: row(p) for unit, p in bound.items() if unit != "memory"}]


def _memory(program: Program, row: Callable[[Poly], int]) -> dict[str, Any]:
    """Return live ranges, and the steps at which to evaluate live memory."""
    return {
        "lives": [
            [life.role, row(life.bytes), -1 if life.born is None else life.born, life.dies]
            for life in program.lives if life.bytes
        ],
        "steps": [
            [step, *(_step_label(program, step) if step >= 0 else ("(start)", "forward")),
             row(program.steps[step].workspace) if step >= 0 and program.steps[step].workspace else None]
            for step, _ in live_bytes(program)
        ],
    }  # fmt: skip


def _step_label(program: Program, step: int) -> tuple[str, str]:
    return program.steps[step].where, program.steps[step].op.phase


def _device(hardware: Hardware, keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "id": hardware.id, "name": hardware.name, "capacity": int(hardware.capacity().value),
        "bandwidth": float(hardware.bandwidth.value),
        "links": dict(_links(hardware)),
    }  # fmt: skip
    rates = Rates(hardware)
    try:
        out["rates"] = [_rate(rates.of(*key)) for key in keys]
        out["least"] = [
            ["vector" if rates.shares_unit(*key) else "matmul", _rate(rates.of(*key, highest=True) * rates.headroom)]
            for key in keys
        ]
        out["notes"] = [str(instead) for instead in rates.stand_ins.values()]
    except SpecError as error:
        out["refused"] = str(error)
    return out


def _links(hardware: Hardware) -> Iterator[tuple[str, float]]:
    for kind in LINK_KINDS:
        with suppress(SpecError):
            yield kind, float(hardware.link(kind).value)


def _rate(p: Poly) -> float:
    return float(Fraction(p.constant or 0))


# -- HTML --------------------------------------------------------------------------------------------------------------
# One self-contained file whose content security policy allows no other source.


@dataclass(frozen=True, repr=False)
class Page:
    """An interactive page, displayed inline in notebooks."""

    name: str
    """title"""
    data: str
    """page data as JSON"""

    @property
    def html(self) -> str:
        """The HTML file, without external resources."""
        style = _asset("uplot.css") + _asset("page.css")
        script = "".join(map(_asset, ("uplot.js", "engine.js", "page.js")))
        policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
        # compressed, so that no text in a model can close its element
        contents = {
            "policy": policy, "title": html.escape(self.name), "style": style, "script": script,
            "data": base64.b64encode(zlib.compress(self.data.encode(), 9)).decode(), "licence": _asset("uplot-LICENSE"),
        }  # fmt: skip
        head, *pieces = _asset("page.html").split("{{")
        return head + "".join(contents[name] + text for name, _, text in (piece.partition("}}") for piece in pieces))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML file; raise FormatError if writing fails."""
        write_file(path, self.html)

    def __repr__(self) -> str:
        return f"Page({self.name!r}: {len(self.html):,} characters of HTML)"

    def _repr_html_(self) -> str:
        source = html.escape(self.html, quote=True)
        title = html.escape(f"costs of {self.name}", quote=True)
        return f'<iframe title="{title}" width="100%" height="900" style="border: 0" srcdoc="{source}"></iframe>'


# uPlot is the unchanged `npm pack uplot@1.6.32`: dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE
@cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def explore(graph: str | Graph, path: str | os.PathLike[str] | None = None, /, *, views: object = None) -> Page:
    """Return a page with a slider for every size that shows costs interactively, without server or network.

    Parameters
    ----------
    graph : str or Graph
        A preset name, or a forward graph. A training step or sharded graph is its only view.
    path : str or path-like, optional
        HTML file to write.
    views : sequence of str or mapping of str to Graph, optional
        Views to offer: options such as `forward`, `decode`, `train optimizer=adamw precision=bf16 dp=8 tp=T zero=3` or
        `train accumulate=8 pp=4`, or graphs by name. The default views, if the graph supports them, are: forward,
        bf16 training with AdamW and SGD, inference, one rank of `dp * tp`, one rank of `dp` for each ZeRO stage, and a
        pipeline of 4 stages. Degrees are symbolic. Each pipeline stage is a view, with its own memory and the time of
        the whole pipeline.

    Returns
    -------
    The page: `.html`, `.save(path)`, or the last expression of a notebook cell.
        `.html`, `.save(path)`; in a notebook, its last line shows it.

    Raises
    ------
    CostGraphError
        If a preset or view does not exist, a formula contains an unsupported function, or the file cannot be written.

    Notes
    -----
    The page contains the exact symbolic formulas of `peak_memory`, `flops`, `roofline` and `timeline`, and evaluates
    them with integer arithmetic where it shows digits. Times, as in `roofline`, are floats.

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
    data = page_data(graph.name, views_of(graph, views), devices)
    page = Page(graph.name, json.dumps(data, separators=(",", ":"), allow_nan=False))
    if path is not None:
        page.save(path)
    return page
