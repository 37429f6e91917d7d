"""Render reports, validations and training plans as text, with rich; export plans as JSON and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import sympy
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from ..analysis.costs import Cost
from ..analysis.regimes import Regime
from ..analysis.roofline import Roofline
from ..bind.evaluate import Formula
from ..hardware.tables import Column
from ..hardware.units import format_bytes, format_quantity
from ..plan.preflight import Preflight, PreflightCheck
from ..text_file import as_csv, as_json
from .data import Facts, Part, Sent
from .formatting import amount, exact, percent, show
from .formula import factored, formula_text, shared
from .quantities import QUANTITIES

if TYPE_CHECKING:
    from ..torch.validation import Validation

from .rich_tables import clean, draw, grid, line, listing, texts

__all__ = [
    "training_rows",
    "exact",
    "percent",
    "render",
    "show",
    "render_validation",
    "PLAN_SCHEMA",
    "plan_csv",
    "plan_json",
    "render_plan",
]


# -- training ----------------------------------------------------------------------------------------------------------

#: Labels of figures indented below another figure.
_PARTS = {"model-flops-full": "full squares", "weight-bytes": "", "gradient-bytes": "", "optimizer-bytes": ""}
_PARTS["bytes-per-param"] = ""


def training_rows(r: Facts) -> Iterator[tuple[str, str]]:
    """Yield label and text of each training figure."""
    if r.training is None:
        return
    if r.training.loss is not None:
        yield "loss", clean(r.training.loss)
    for name, figure in r.training.figures.items():
        label = f"  {_PARTS[name] or figure.title}" if name in _PARTS else figure.title
        yield label, amount(figure.value, figure.unit)
    if r.training.mfu is not None and r.training.hfu is not None and r.training.most_mfu is not None:
        yield (
            "MFU at the estimate",
            f"{percent(r.training.mfu)} of the {r.training.dtype} peak, at most {percent(r.training.most_mfu)}",
        )
        yield "HFU at the estimate", percent(r.training.hfu)
        for name, share in r.training.others.items():
            yield f"  matmuls in {name}", f"{percent(share)} of the matmul FLOPs"


# -- report ------------------------------------------------------------------------------------------------------------


def _heading(r: Facts) -> Iterator[RenderableType]:
    device = f" on {clean(r.hardware.name)}" if r.hardware else ""
    yield f"[bold]{clean(r.graph)}{device}[/bold]"
    explicit = [f"{k}={v}" for k, v in r.sizes.items() if k in r.given]
    default = [f"{k}={v}" for k, v in r.sizes.items() if k not in r.given]
    rows = [("model", r.origin)] if r.origin else []
    rows += [("sizes", " ".join(explicit))] if explicit else []
    rows += [("preset", " ".join(default))] if default else []
    rows += [("unbound", " ".join(r.unbound))] if r.unbound else []
    yield grid(rows)
    yield ""


def _figure_rows(r: Facts) -> Iterator[tuple[str, str]]:
    short = {
        "param-bytes": "bytes", "matmul-flops": "matmul", "matmul-flops-full": "matmul, full squares",
        "pointwise-flops": "pointwise", "transcendental-flops": "transcendental",
    }  # fmt: skip
    for name, (title, _, _) in QUANTITIES.items():
        if name in r.figures:
            figure = r.figures[name]
            label = f"  {short[name]}" if name in short else title
            yield label, amount(figure.value, figure.unit) + _against_ridge(r, name)
            if name == "params":
                yield from (("  not run", f"{show(n, '1')} in {clean(scope)}") for scope, n in r.unused_params.items())
        else:
            yield title, "no bytes are moved"
    if r.roofline and r.roofline.ridge:
        yield "ridge point", f"{show(r.roofline.ridge, 'FLOP/B')} = {_ridge(r.roofline)}"


def _ridge(times: Roofline) -> str:
    peak, bandwidth = times.ridge * float(times.hardware.bandwidth.value), times.hardware.bandwidth
    return f"{format_quantity(peak, 'FLOP/s')} / {bandwidth}"


def _against_ridge(r: Facts, name: str) -> str:
    if r.roofline is None or not r.roofline.ridge or "intensity" not in name:
        return ""
    value = r.roofline.fused_intensity if name.startswith("fused") else r.roofline.intensity
    return ", above the ridge point" if value >= r.roofline.ridge else ", below the ridge point"


def _peak_rows(r: Facts) -> Iterator[tuple[str, str]]:
    if r.peak.op is None:
        yield from _symbolic_peak(r.peak.regimes)
    else:
        yield "peak memory", amount(r.peak.value, "B")
        yield "  peak at", _peak_location(r.peak.op, r.peak.phase)
        for role, role_bytes in sorted(r.peak.by_role.items()):
            yield f"  {role}", f"{show(role_bytes, 'B')}{_part_of(role_bytes, r.peak.value)}"
    if r.peak.arch is not None:
        yield "  with workspaces", f"of CUDA's libraries and kernels on {clean(r.peak.arch)}"
    if r.hardware is not None:
        yield f"capacity of {clean(r.hardware.id, 20)}", _capacity(r)
        if r.hardware.capacity() != r.hardware.memory:
            yield "  vendor's figure", str(r.hardware.memory)


def _symbolic_peak(cases: Sequence[Regime]) -> Iterator[tuple[str, str]]:
    """Show the symbolic peak: the part common to all cases, then the rest of each."""
    if len(cases) == 1:
        yield "peak memory", escape(show(cases[0].formula, "B"))
        yield "  peak at", _peak_location(cases[0].op, cases[0].phase)
        return
    common, remainders = shared([case.formula for case in cases])
    yield "peak memory", escape(f"{factored(common, grouped=True)} + the largest of  [B]")
    for case, remainder in zip(cases, remainders, strict=True):
        yield "", f"{escape(formula_text(remainder, grouped=True))}\n  at {_peak_location(case.op, case.phase)}"


def _peak_location(op: str | None, phase: str | None) -> str:
    return f"{clean(op)} ({phase or 'forward'})" if op else "tensors that live throughout"


def _part_of(amount: Formula, total: Formula) -> str:
    return f", {percent(float(amount / total))}" if total else ""


def _capacity(r: Facts) -> str:
    assert r.hardware is not None
    capacity = r.hardware.capacity()
    text = format_bytes(capacity.value)
    if r.fits is None:
        return escape(f"{text}: whether it fits depends on {', '.join(r.unbound)}")
    used = percent(float(r.peak.value) / float(capacity.value))
    return escape(f"{text}: {'fits' if r.fits else 'does NOT fit'}, {used} used")


def _time_rows(r: Facts) -> Iterator[tuple[str, str]]:
    if r.hardware is None:
        yield "time", "needs a device: --hardware NAME"
    elif r.roofline is None:
        yield from _symbolic_time_rows(r)
    else:
        yield "time, lower bound", show(r.roofline.lower_bound, "s") + ", if operands start in device memory"
        by_bound: dict[str, float] = {}
        for row in r.roofline.rows:
            by_bound[str(row.bound)] = by_bound.get(str(row.bound), 0.0) + row.seconds
        total = sum(by_bound.values())
        shares = [f"{percent(s / total)} of it {b}-bound" for b, s in by_bound.items() if total]
        estimate = [show(r.roofline.estimate, "s"), *_overlapped(r.roofline, total), *sorted(shares)]
        yield "time, estimate", ", ".join(estimate)
        yield from (("  note", escape(note)) for note in r.roofline.notes)


def _overlapped(times: Roofline, serial: float) -> list[str]:
    """Return the time without overlap, for comparison with tables that have none."""
    return [] if times.overlap == "none" else [f"{show(serial, 's')} without overlap of collectives"]


def _symbolic_time_rows(r: Facts) -> Iterator[tuple[str, str]]:
    times = r.open_roofline
    if times is not None:
        yield "time, lower bound", escape(show(times.lower_bound, "s"))
        yield "time, estimate", escape(show(times.estimate, "s"))
        yield from (("  note", escape(note)) for note in times.notes)
    yield "  bottleneck", f"needs sizes, still unbound: {', '.join(r.unbound)}"


def _table(title: str, head: str, parts: Sequence[Part], r: Facts) -> RenderableType:
    if any(isinstance(v, sympy.Expr) for p in parts for v in (p.value.flops, p.value.bytes)):
        return _formulas_by(title, head, parts, bound=True)
    total = sum((p.value for p in parts), start=Cost())
    columns = [
        Column("name", read=_name, title=head, text=str), Column("FLOPs", "FLOP", lambda p: p.value.flops),
        Column("bytes", "B", lambda p: p.value.bytes),
    ]  # fmt: skip
    if r.roofline is None:
        share = Column(
            "of FLOPs", "%", lambda p: None if p.value is total else p.value.flops, text=_share_of(total.flops)
        )
        return listing(title, [*columns, share], [*parts, Part("total", total, total)])
    columns += [
        Column("time", "s", lambda p: p.seconds), Column("of time", "%", lambda p: p.share, text=_share_of(1)),
        Column("bound", "%", lambda p: f"{p.bound} {100 * (p.bound_share or 0.0):.0f}%" if p.bound else ""),
    ]  # fmt: skip
    return listing(title, columns, [*parts, Part("total", total, total, sum(p.seconds or 0.0 for p in parts))])


def _sent_table(rows: Sequence[Sent]) -> RenderableType:
    """Show the communication of a rank by mesh axis and collective."""
    if any(isinstance(v, sympy.Expr) for s in rows for v in (s.times, s.ring_bytes, s.seconds)):
        formulas = [(s.axis, s.collective, formula_text(s.ring_bytes, grouped=True)) for s in rows]
        columns = [*texts("axis", "collective"), Column("ring bytes [B]", read=itemgetter(2), text=str)]
        return listing("sent by a rank", columns, formulas, whole=["axis", "collective"], wide={"ring bytes [B]": 1})
    amounts = [Column("times", "1"), Column("ring_bytes", "B", title="ring bytes")]
    links = [Column("seconds", "s", title="time"), Column("link", title="over")] if any(s.link for s in rows) else []
    return listing("sent by a rank", [Column("axis"), Column("collective"), *amounts, *links], rows)


def _share_of(total: Formula) -> Callable[[Formula | None], str]:
    return lambda part: "" if part is None or not total else percent(float(part / total))


def _name(part: Part) -> str:
    return line(part.name) or "(no scope)"


def _formulas_by(title: str, head: str, parts: Sequence[Part], *, bound: bool) -> RenderableType:
    rows = []
    for p in parts:
        cost = p.value if bound else p.formula
        rows += [(_name(p), "FLOP", formula_text(cost.flops, grouped=True))]
        rows += [("", "B", formula_text(cost.bytes, grouped=True))]
    columns = [*texts(head, ""), Column("formula", read=itemgetter(2), text=str)]
    return listing(title, columns, rows, whole=[""], wide={head: 1, "formula": 3})


def _formulas(r: Facts) -> Iterator[RenderableType]:
    yield ""
    yield "[bold]formulas[/bold]"
    for figure in r.figures.values():
        if figure.unit != "FLOP/B":
            yield _block(f"{figure.title} [{figure.unit}]", formula_text(figure.formula, grouped=True))
    yield _block("intensities [FLOP/B]", "FLOPs / bytes moved, unfused or with ideal fusion")
    yield from _peak_formula(r.peak.formula)
    yield ""
    yield _formulas_by(f"formulas by scope, matmul FLOPs {r.count}", "scope", r.scopes, bound=False)


def _peak_formula(cases: Sequence[Regime]) -> Iterator[RenderableType]:
    """Write the part common to all cases once, then the rest of each with its op."""
    common, remainders = shared([case.formula for case in cases])
    if len(cases) > 1:
        yield _block("peak memory [B]: the largest of the cases below, each added to", factored(common, grouped=True))
    for case, remainder in zip(cases, remainders, strict=True):
        location = f"at {case.op or 'the start'} ({case.phase or 'forward'})"
        label = f"  {location}" if len(cases) > 1 else f"peak memory [B] {location}"
        yield _block(label, formula_text(remainder, grouped=True))


def _block(title: str, text: str) -> RenderableType:
    return Group(Text(title), Padding(Text(text, overflow="fold"), (0, 0, 0, 4)))


def sections(r: Facts, *, formulas: bool = False) -> Iterator[RenderableType]:
    """Yield the sections of a report."""
    yield from _heading(r)
    yield grid([*_figure_rows(r), *training_rows(r), *_peak_rows(r), *_time_rows(r)])
    if r.unused:
        names = ", ".join(r.unused)
        yield f"\nnote: dimension {names} appears in no figure"
    yield ""
    counted = "" if r.count == "executed" else ", matmul FLOPs of full squares"
    yield _table(f"by module scope{counted}", "scope", r.scopes, r)
    if len(r.phases) > 1:
        yield _table(f"by phase{counted}", "phase", r.phases, r)
    if r.sent:
        yield _sent_table(r.sent)
    if formulas:
        yield from _formulas(r)


def render(r: Facts, *, formulas: bool = False, width: int | None = None, color: bool = False) -> str:
    """Return a report as text, with closed forms if `formulas`; `width` and `color` as in `draw`."""
    return draw(sections(r, formulas=formulas), r.legend, width, color=color)


# -- validation --------------------------------------------------------------------------------------------------------


def render_validation(validation: Validation, width: int | None = None, *, color: bool = False) -> str:
    """Return a validation's tables and results as text; `width` and `color` as in `draw`."""
    env, tables = validation.environment, validation.tables()
    heading = f"{clean(str(env['name']))}, torch {clean(str(env['torch']))}, {clean(str(env['date']))}"
    blocks = [
        listing(title, texts(*head, amounts=head[1:]), rows)
        for title, (head, rows) in zip((heading, "times"), tables, strict=True)
    ]
    return draw([*blocks, *(clean(text, 400) for text in validation.summary())], {}, width, color=color)


# -- training plan -----------------------------------------------------------------------------------------------------

PLAN_SCHEMA = "costgraph/plan/1"
"""schema of the JSON; changes when keys change"""

_COLUMNS = ("check", "figure", "unit", "limit", "against", "verdict")


def _value(value: Formula | None) -> int | float | str | None:
    return formula_text(value) if isinstance(value, sympy.Expr) else value


def _record(row: PreflightCheck) -> dict[str, Any]:
    values = (row.name.strip(), _value(row.figure), row.unit, _value(row.limit), row.against, row.verdict)
    return dict(zip(_COLUMNS, values, strict=True))


def plan_json(plan: Preflight) -> str:
    """Return the checks as JSON: an object with a `schema`; unbound figures are formulas as strings."""
    data = {
        "graph": plan.graph,
        "hardware": {"id": plan.hardware.id, "name": plan.hardware.name},
        "devices": _value(plan.devices),
        "sizes": dict(plan.sizes),
        "ok": plan.ok,
        "checks": [_record(row) for row in plan.rows],
    }
    return as_json(PLAN_SCHEMA, data)


def plan_csv(plan: Preflight) -> str:
    """Return the checks as CSV, one per line."""
    return as_csv(_COLUMNS, (_record(row).values() for row in plan.rows))


def _amount(value: Formula, unit: str) -> str:
    """Format an amount for a table cell; formulas are listed below the table."""
    if isinstance(value, sympy.Expr):
        return f"needs {', '.join(sorted(s.name for s in value.free_symbols if isinstance(s, sympy.Symbol)))}"
    if unit == "days":
        return f"{format_quantity(value, '1')} days"
    return format_quantity(value, "B") if unit == "B" else show(value, unit)


def _limit(row: PreflightCheck) -> str:
    return "" if row.limit is None else f"{row.against} {_amount(row.limit, row.unit)}"


def _sections(plan: Preflight) -> Iterator[RenderableType]:
    count = "" if plan.devices == 1 else f"{_amount(plan.devices, '1')} x "
    yield f"[bold]{clean(plan.graph)} on {count}{clean(plan.hardware.name)}[/bold]"
    yield grid([("sizes", " ".join(f"{k}={v}" for k, v in plan.sizes.items()))])
    rows = [(row.name, _amount(row.figure, row.unit), _limit(row), row.verdict) for row in plan.rows]
    yield listing("", texts("", "figure", "limit", ""), rows, whole=["figure"])
    for row in plan.rows:
        for prefix, value in (("", row.figure), ("limit of ", row.limit)):
            if isinstance(value, sympy.Expr):
                yield Text(f"{prefix}{row.name.strip()} [{row.unit}]")
                yield Padding(Text(formula_text(value, grouped=True), overflow="fold"), (0, 0, 0, 4))
    if plan.ok is None:
        yield "the verdict depends on unbound sizes"
    else:
        yield "all checks pass" if plan.ok else "a check FAILS"


def render_plan(plan: Preflight, *, width: int | None = None, color: bool = False) -> str:
    """Return the checks as text; `width` and `color` as in `draw`."""
    return draw(_sections(plan), plan.legend, width, color=color)
