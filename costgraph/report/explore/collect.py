"""What a page knows of graphs and devices, as JSON has it: formulas by their number in `Tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from typing import Any

from ...algebra.conditions import Asked as Test
from ...algebra.polynomial import Poly, poly, total
from ...analysis.costs import flops, matmul_flops
from ...analysis.duration import when
from ...analysis.exchange import exchange, whole
from ...analysis.lifetimes import Program, copies_for, play
from ...analysis.live import holds_from, live_bytes
from ...analysis.memory import peak_cases
from ...analysis.params import param_bytes, param_count
from ...analysis.seconds import unit_times
from ...analysis.traffic import compulsory
from ...analysis.work import Asked, Rates, Work, works
from ...errors import CostGraphError, SpecError
from ...graph.graph import Graph
from ...graph.placement import Waiting
from ...graph.sizes import bindings, conditions, known_names, stages
from ...hardware.keys import LINK_KINDS
from ...hardware.specs import Hardware
from ...notation.progress import progressing
from ...ops.hops import Send
from ..quantities import symbolic
from .tables import Tables

__all__ = ["collected"]

# Sizes that a model leaves open start here or at 1: small, so that most devices have room.
_START = {"S": 2048}
#: Of so many others powers of two are tried to find sizes that a view allows.
_MOST_TRIED, _TRIED = 4, (1, 2, 4, 8)
_STAGES = ("first", "middle", "last")


def collected(name: str, views: Mapping[str, Graph], devices: Sequence[Hardware]) -> dict[str, Any]:
    """Return all that a page shows: `tables`, `views`, `devices` and the sizes at which the page starts.

    A device without any rate is shown with its memory alone.
    """
    tables = Tables()
    twins = {view: [symbolic(part) for part in stages(graph)] for view, graph in views.items()}
    every = [part for parts in twins.values() for part in parts]
    keys = sorted({key for g in every for w in works(g) for key in (*w.flops, *w.least)})
    found: list[dict[str, Any]] = []
    with progressing("explore", len(every)) as step:
        for view, parts in twins.items():
            places = range(len(found), len(found) + len(parts))
            for i, (part, at) in enumerate(zip(parts, places, strict=True)):
                named = f"{view}: {_STAGES[-1 if at == places[-1] else i]} stage" if len(parts) > 1 else view
                step(named)
                found.append(_view(named, part, tables, keys, devices))
                if len(parts) > 1 and part.waiting is not None:
                    found[-1] |= _pipeline(part, part.waiting, places, tables, devices)
    return {
        "name": name,
        "keys": [f"{kind} {dtype}" for kind, dtype in keys],
        "views": found,
        "devices": [_device(d, keys) for d in devices],
        "sizes": _starts(list(views.values()), every, [view["counts"] for view in found]),
        "tables": tables.data(),
    }


def _starts(graphs: Sequence[Graph], parts: Sequence[Graph], counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sizes at which a page starts: those of the model, small ones else, which all views allow if any do."""
    names = sorted(frozenset().union(*map(known_names, parts)))
    given = {name: size for graph in reversed(graphs) for name, size in graph.defaults.items()}
    found = {n: given.get(n, _START.get(n, 1)) for n in names}
    for part, least in zip(parts, counts, strict=True):
        own = known_names(part)
        free = [n for n in names if n in own and n not in given and n not in _START][:_MOST_TRIED]
        for tried in product(_TRIED, repeat=len(free)):
            sizes = found | {n: max(found[n], size) for n, size in zip(free, tried, strict=True)}
            if _allows(part, {n: sizes[n] for n in own}) and all(sizes[n] >= low for n, low in least.items()):
                found = sizes
                break
    return found


def _allows(part: Graph, sizes: Mapping[str, int]) -> bool:
    try:
        bindings(part, sizes)
    except CostGraphError:
        return False
    return all(test.holds(sizes) for test, _ in _of_stages(part))


def _of_stages(part: Graph) -> list[tuple[Test, str]]:
    """Return what makes a stage of a pipeline one."""
    if part.waiting is None:
        return []
    whole, alike = part.waiting.stages, part.waiting.alike
    return [
        (Test(whole, 2), f"a pipeline has {whole.brief()} stages, 2 or more"),
        (Test(alike, 1), f"there are {alike.brief()} stages as this one, 1 or more"),
    ]


def _pipeline(
    part: Graph, known: Waiting, places: Sequence[int], tables: Tables, devices: Sequence[Hardware]
) -> dict[str, Any]:
    """Return what the time of a pipeline needs of one of its stages: its place, and how long what it hands on takes."""
    row, values = tables.row, bindings(part, {})
    sends = [op for op in part.walk() if isinstance(op.kind, Send)]

    def times(device: Hardware) -> list[int] | str:
        try:
            return [row(exchange(op, part, values, device)[0]) for op in sends]
        except SpecError as error:
            return str(error)

    return {
        "pipeline": list(places), "schedule": known.schedule, "stages": row(known.stages),
        "micro_batches": row(known.micro_batches), "alike": row(known.alike),
        "ranks": [[row(n) for n in run] for run in known.ranks], "sends": [times(d) for d in devices],
    }  # fmt: skip


def _view(
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
    found = works(graph)
    totals = {
        "flops": flops(graph), "matmul": matmul_flops(graph), "bytes": total(w.bytes for w in found),
        "fused": compulsory(graph), "params": param_count(graph), "param_bytes": param_bytes(graph),
    }  # fmt: skip
    return {
        "name": name,
        "group": _group(graph),
        "sizes": sorted(known_names(graph)),
        "totals": {k: row(p if isinstance(p, Poly) else poly(p)) for k, p in totals.items()},
        "peak": cases,
        "ops": [_op(w, graph, tables, keys, devices, exchanged) for w in found],
        "memory": _memory(play(graph, copies_for(values), values), row),
        "asked": [[row(a.amount), a.least, a.whole, a.equal, a.strict, text] for a, text in _asked(graph)],
        "counts": holds_from(graph, values),
    }


def _asked(graph: Graph) -> list[tuple[Test, str]]:
    """Return what sizes have to satisfy, with the words of a warning."""
    return [
        *((Test(r.difference, equal=r.equal, strict=r.strict), r.text) for r in graph.root.relations.relations),
        *((Test(c.formula, c.least, whole=c.whole),
           f"{c.place}, {c.formula.brief()}, is {'a whole number, ' if c.whole else ''}{c.least} or more")
          for c in conditions(graph)),
        *((test, text) for test, text in _of_stages(graph) if test.amount.names()),
    ]  # fmt: skip


def _group(graph: Graph) -> str:
    """Return the words above the views of a kind."""
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
        # most collectives of a graph are those of another layer or phase again
        kind = work.collective
        key = (kind.collective, kind.axis, kind.ranks, work.times, whole(work.op), work.op.operands[0].storage.pieces)
        if key not in exchanged:
            exchanged[key] = [_sent(work, graph, d, row) for d in devices]
        out["sent"] = exchanged[key]
    if graph.waiting is not None:
        out["when"] = when(work.op)
    return out


def _sent(work: Work, graph: Graph, device: Hardware, row: Callable[[Poly], int]) -> list[Any] | str:
    """Return the seconds of a collective over its link, and the least of each unit; words where there is no link."""
    values = bindings(graph, {})
    try:
        rates = Rates(device)
        once, link = exchange(work.op, graph, values, device)
        least = unit_times(Asked(graph, rates, values, [work]))
    except SpecError as error:
        return str(error)
    return [row(once * work.times), link, {unit: row(p) for unit, p in least.items() if unit != "memory"}]


def _memory(program: Program, row: Callable[[Poly], int]) -> dict[str, Any]:
    """Return storages, and the steps at which live memory is looked at."""
    return {
        "lives": [
            [life.role, row(life.bytes), -1 if life.born is None else life.born, life.dies]
            for life in program.lives if life.bytes
        ],
        "steps": [
            [at, *(_step(program, at) if at >= 0 else ("(start)", "forward")),
             row(program.steps[at].workspace) if at >= 0 and program.steps[at].workspace else None]
            for at, _ in live_bytes(program)
        ],
    }  # fmt: skip


def _step(program: Program, at: int) -> tuple[str, str]:
    return program.steps[at].where, program.steps[at].op.phase


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
