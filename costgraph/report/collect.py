"""Build a `Report` from a graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy

from ..algebra.symbols import shorten, shown
from ..analysis.allocator import on_device
from ..analysis.communication import Message, communication
from ..analysis.costs import (
    CostRow,
    Costs,
    costs,
    executions,
    unused_names,
)
from ..analysis.memory import peak_cases, timeline
from ..analysis.params import unused_params
from ..analysis.roofline import Roofline, RooflineRow, roofline
from ..bind.evaluate import Formula
from ..errors import BindingError, GraphError, SpecError
from ..hardware.networks import Network
from ..hardware.specs import DEFAULT, Hardware, load_hardware
from ..ir.graph import (
    Bindings,
    Graph,
    bindings,
    known_names,
)
from ..notation.validation import guarded
from ..text_file import write_file
from .data import Facts, Part, Peak, Sent, training_of
from .files import to_csv, to_json
from .quantities import QUANTITIES, Figure, quantity_of, symbolic

__all__ = ["SORTS", "Report", "collect"]

#: Overlap of collectives, network between devices, and whether to model caches.
ExecutionOptions = tuple[str, "str | Network | None", bool]


@guarded()
@dataclass(frozen=True, repr=False)
class Report(Facts):
    """The costs of a graph, optionally on a device. Created by `report`."""

    def sorted(self, by: str) -> Report:
        """Return the report with its scopes sorted.

        Parameters
        ----------
        by : str
            "order" (program order), or "time", "flops" or "bytes", largest first.

        Returns
        -------
        Report
            A copy, otherwise unchanged.

        Raises
        ------
        BindingError, GraphError
            If the order is unknown, or needs numbers while a size is unbound or no device is given.
        """
        if by not in SORTS:
            raise GraphError(f"sort by {shown(by)}: expected one of {', '.join(SORTS)}")
        key = SORTS[by]
        if key is None:
            return self
        keys = [key(part) for part in self.scopes]
        if not all(isinstance(v, int | float) for v in keys):
            missing = f"sizes for {', '.join(self.unbound)}" if self.unbound else "a device"
            raise BindingError(f"sort by {by}: expected numbers, needs {missing}")
        return replace(self, scopes=tuple(sorted(self.scopes, key=key, reverse=True)))  # type: ignore[arg-type]  # all bound

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write all figures, tables and formulas as JSON; raise FormatError if writing fails."""
        write_file(path, to_json(self))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write all figures and tables as CSV, one value per line; raise FormatError if writing fails."""
        write_file(path, to_csv(self))

    def plot(self, path: str | os.PathLike[str] | None = None) -> object:
        """Draw the roofline and return the matplotlib figure; raise BindingError if there is none."""
        if self.roofline is None:
            reason = f"unbound: {', '.join(self.unbound)}" if self.unbound else "there is no device"
            raise BindingError(f"plot of graph {self.graph!r}: expected numbers on a device, {reason}")
        return self.roofline.plot(path)

    def __repr__(self) -> str:
        device = f" on {self.hardware.id}" if self.hardware else ""
        return f"Report({shorten(self.graph)}{device})"

    def __str__(self) -> str:
        try:
            from .text import render
        except ImportError:  # rich is optional
            return repr(self)
        return render(self)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


SORTS: dict[str, Callable[[Part], Formula | None] | None] = {
    "order": None,
    "time": lambda part: part.seconds,
    "flops": lambda part: part.value.flops,
    "bytes": lambda part: part.value.bytes,
}
"""sort keys of the table by scope"""


def _origin(graph: Graph) -> str:
    """Return where the graph's kernels come from. A declared model moves fewer bytes than the same model traced."""
    if all(op.call is None for op in graph.walk()):
        return "declared, fused kernels"
    fused = any(inner.call is not None for op in graph.ops if op.body is not None and op.loop is None
                for inner in op.body.walk())  # fmt: skip
    return f"traced, {'fused kernels' if fused else 'eager'}"


def _figures(graph: Graph, dims: Mapping[str, int]) -> dict[str, Figure]:
    out = {}
    twin, is_open = symbolic(graph), not dims and not graph.root.defaults
    for name, (title, unit, _) in QUANTITIES.items():
        value = quantity_of(graph, name, dims)
        if value is not None:
            formula = value if is_open else quantity_of(twin, name, {})
            assert formula is not None
            out[name] = Figure(title, unit, value, formula)
    return out


# -- peak --------------------------------------------------------------------------------------------------------


def _peak(graph: Graph, dims: Mapping[str, Any], device: str | None, arch: str | None) -> Peak:
    line = timeline(graph, device=device, arch=arch, **dims)
    number = not isinstance(line.peak, sympy.Expr)
    return Peak(
        value=line.peak,
        op=line.op if number else None,
        phase=line.phase if number else None,
        by_role=line.by_role if number else {},
        regimes=line.regimes,
        formula=peak_cases(graph, Bindings(graph), on_device("report", device, arch)),
        arch=arch,
    )


# -- tables ------------------------------------------------------------------------------------------------------


def _outer_scopes(graph: Graph, table: Costs) -> Costs:
    """Assign costs inside a kernel to the kernel's scope, which has its time and bytes."""
    outer: dict[str, str] = {}
    scope = ""
    for op, _, moves in executions(graph):
        scope = op.scope if moves else scope
        outer[op.name] = scope
    return replace(table, rows=tuple(replace(r, scope=outer[r.op]) for r in table.rows))


def _table_parts(
    bound: Costs, free: Costs, times: Roofline | None, key: Callable[[CostRow | RooflineRow], str]
) -> tuple[Part, ...]:
    values, formulas = _grouped(bound, key), _grouped(free, key)
    seconds: dict[str, dict[str, float]] = {}
    for row in times.rows if times else ():
        by_bound = seconds.setdefault(key(row), {})
        by_bound[str(row.bound)] = by_bound.get(str(row.bound), 0.0) + row.seconds
    out = []
    total = sum((s for by_bound in seconds.values() for s in by_bound.values()), start=0.0)  # without overlap
    for name in formulas:
        part = Part(name, values[name].total(), formulas[name].total())
        out.append(part if times is None else _timed(part, seconds.get(name, {}), total))
    return tuple(out)


def _timed(part: Part, seconds: Mapping[str, float], total: float) -> Part:
    part_seconds = sum(seconds.values())
    if not part_seconds:
        return replace(part, seconds=0.0, share=0.0)
    bound = max(seconds, key=lambda k: seconds[k])
    return replace(
        part, seconds=part_seconds, share=part_seconds / total, bound=bound, bound_share=seconds[bound] / part_seconds
    )


def _grouped(table: Costs, key: Callable[[CostRow | RooflineRow], str]) -> dict[str, Costs]:
    rows: dict[str, list[CostRow]] = {}
    for r in table.rows:
        rows.setdefault(key(r), []).append(r)
    return {k: replace(table, rows=tuple(v)) for k, v in rows.items()}


def _sent(graph: Graph, device: Hardware | None, network: str | Network | None, dims: Mapping[str, Any]) -> list[Sent]:
    """Return the data that a rank sends, by axis, collective and link."""
    groups: dict[tuple[str, str, str], list[Message]] = {}
    for m in communication(graph, hardware=device, network=network, **dims):
        groups.setdefault((m.axis, m.collective, m.link), []).append(m)
    return [
        Sent(
            axis, collective, sum((m.times for m in messages), start=0), sum((m.ring_bytes for m in messages), start=0),
            sum((m.seconds for m in messages if m.seconds is not None), start=0) if link else None, link,
        )
        for (axis, collective, link), messages in groups.items()
    ]  # fmt: skip


def _times(
    graph: Graph,
    device: Hardware,
    fallback: str | Mapping[str, str] | None,
    execution: ExecutionOptions,
    dims: Mapping[str, int],
) -> Roofline:
    overlap, network, hierarchical = execution
    try:
        return roofline(
            graph, device, fallback=fallback, hierarchical=hierarchical, overlap=overlap, network=network, bound="cold",
            **dict(dims),
        )  # fmt: skip
    except OverflowError:
        largest = max(dims, key=lambda k: dims[k], default="a size")
        raise BindingError(f"{largest}: too large for a time in seconds, expected sizes of a realistic model") from None


def _architecture(hardware: Hardware | None, device: str | None, arch: str | None) -> str | None:
    """Return the compute capability for library lookups: `arch`, or the hardware's."""
    if device is not None and arch is None:
        if hardware is not None and hardware.arch is None:
            raise SpecError(f"report: {hardware.id} has no arch, expected arch=, such as 'sm_90', with {device=}")
        arch = DEFAULT if hardware is None else hardware.arch
    on_device("report", device, arch)
    return arch


# -- the report --------------------------------------------------------------------------------------------------


def collect(
    graph: Graph,
    hardware: str | os.PathLike[str] | Hardware | None,
    dims: Mapping[str, int],
    count: str,
    fallback: str | Mapping[str, str] | None,
    depth: int,
    on_cuda: tuple[str | None, str | None],
    execution: ExecutionOptions,
) -> Report:
    """Return the report of a graph; `on_cuda` is (device, arch), `between` (overlap, network, hierarchical)."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise GraphError(f"report: depth={depth!r:.60}, expected a positive integer")
    spec = None if hardware is None else load_hardware(hardware)
    if spec is not None and spec.symbols:
        raise BindingError(f"report: rates of {spec.id} are symbols, expected a device with numbers")
    device = on_cuda[0]
    arch = _architecture(spec, *on_cuda)
    values = bindings(graph, dims)
    sizes = {k: int(v.constant) for k, v in sorted(values.items()) if v.constant is not None}
    unbound = tuple(sorted(known_names(graph) - sizes.keys()))
    open_times = None if spec is None else _times(graph, spec, fallback, execution, dims)
    times = None if unbound else open_times
    figures, peak = _figures(graph, dims), _peak(graph, dims, device, arch)
    free = _outer_scopes(graph, costs(symbolic(graph), count=count))
    bound = _outer_scopes(graph, costs(graph, count=count, **dims))
    shown: Iterable[Formula] = [*(f.formula for f in figures.values()), *(r.formula for r in peak.formula)]
    return Report(
        graph=graph.root.name,
        hardware=spec,
        sizes=sizes,
        given=frozenset(dims),
        unbound=unbound,
        unused=tuple(unused_names(graph, list(shown))),
        figures=figures,
        peak=peak,
        roofline=times,
        scopes=_table_parts(bound, free, times, lambda row: "/".join(row.scope.split("/")[:depth])),
        phases=_table_parts(bound, free, times, lambda row: row.phase),
        count=count,
        defaults=dict(graph.root.defaults),
        open_roofline=open_times if unbound else None,
        training=training_of(graph, dims, times),
        unused_params=unused_params(graph, **dims),
        sent=tuple(_sent(graph, spec, execution[1], dims)),
        origin=_origin(graph),
        legend=dict(graph.root.legend),
    )
