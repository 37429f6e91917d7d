"""The list of checks before a training run as text, JSON and CSV; needs rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..bind.evaluate import Formula
from ..hardware.units import format_quantity
from ..plan.preflight import Preflight, PreflightCheck
from ..text_file import as_csv, as_json
from .amounts import show
from .formula import formula_text
from .text import clean, draw, grid, listing, texts

__all__ = ["PLAN_SCHEMA", "plan_csv", "plan_json", "render_plan"]

PLAN_SCHEMA = "costgraph/plan/1"
"""What the JSON of this version calls itself; another number means other keys."""

_COLUMNS = ("check", "figure", "unit", "limit", "against", "verdict")


def _value(value: Formula | None) -> int | float | str | None:
    return formula_text(value) if isinstance(value, sympy.Expr) else value


def _record(row: PreflightCheck) -> dict[str, Any]:
    values = (row.name.strip(), _value(row.figure), row.unit, _value(row.limit), row.against, row.verdict)
    return dict(zip(_COLUMNS, values, strict=True))


def plan_json(found: Preflight) -> str:
    """Return the list as JSON: an object with a `schema`; a figure that is not bound is its formula, a text."""
    data = {
        "graph": found.graph,
        "hardware": {"id": found.hardware.id, "name": found.hardware.name},
        "devices": _value(found.devices),
        "sizes": dict(found.sizes),
        "ok": found.ok,
        "checks": [_record(row) for row in found.rows],
    }
    return as_json(PLAN_SCHEMA, data)


def plan_csv(found: Preflight) -> str:
    """Return the list as CSV, one check a line."""
    return as_csv(_COLUMNS, (_record(row).values() for row in found.rows))


def _amount(value: Formula, unit: str) -> str:
    """Return an amount as a cell has room for it; formulas stand below the table."""
    if isinstance(value, sympy.Expr):
        return f"needs {', '.join(sorted(s.name for s in value.free_symbols if isinstance(s, sympy.Symbol)))}"
    if unit == "days":
        return f"{format_quantity(value, '1')} days"
    return format_quantity(value, "B") if unit == "B" else show(value, unit)


def _limit(row: PreflightCheck) -> str:
    return "" if row.limit is None else f"{row.against} {_amount(row.limit, row.unit)}"


def _sections(found: Preflight) -> Iterator[RenderableType]:
    count = "" if found.devices == 1 else f"{_amount(found.devices, '1')} x "
    yield f"[bold]{clean(found.graph)} on {count}{clean(found.hardware.name)}[/bold]"
    yield grid([("sizes", " ".join(f"{k}={v}" for k, v in found.sizes.items()))])
    rows = [(row.name, _amount(row.figure, row.unit), _limit(row), row.verdict) for row in found.rows]
    yield listing("", texts("", "figure", "limit", ""), rows, whole=["figure"])
    for row in found.rows:
        for what, value in (("", row.figure), ("limit of ", row.limit)):
            if isinstance(value, sympy.Expr):
                yield Text(f"{what}{row.name.strip()} [{row.unit}]")
                yield Padding(Text(formula_text(value, grouped=True), overflow="fold"), (0, 0, 0, 4))
    if found.ok is None:
        yield "whether all is well depends on open sizes"
    else:
        yield "no check fails" if found.ok else "a check FAILS"


def render_plan(found: Preflight, *, width: int | None = None, color: bool = False) -> str:
    """Return the list as text: `width` and `color` as `draw`."""
    return draw(_sections(found), width, color=color)
