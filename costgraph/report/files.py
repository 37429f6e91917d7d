"""Export a report as JSON or CSV."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import sympy

from ..algebra.polynomial import poly
from ..analysis.regimes import Regime
from ..analysis.roofline import Roofline
from ..bind.evaluate import Formula, answer
from ..text_file import as_csv, as_json
from .data import Facts, Part, Sent
from .formula import formula_text

__all__ = ["SCHEMA", "rows", "to_csv", "to_json"]

SCHEMA = "costgraph/report/2"
"""schema of the JSON; changes when keys change"""

_COLUMNS = ("part", "name", "quantity", "value", "unit", "formula")


def _number(value: Formula | None) -> int | float | None:
    """Return a JSON number, or None for formulas and infinity."""
    if value is None or isinstance(value, sympy.Expr) or not math.isfinite(value):
        return None
    return _plain(value)


def _figure(value: Formula, unit: str, formula: Formula | None = None) -> dict[str, Any]:
    out: dict[str, Any] = {"value": _number(value), "unit": unit}
    if isinstance(value, sympy.Expr):
        out["bound"] = formula_text(value)
    if formula is not None:
        out["formula"] = formula_text(formula)
    return out


def _cases(cases: tuple[Regime, ...]) -> list[dict[str, Any]]:
    return [{"formula": formula_text(c.formula), "unit": "B", "op": c.op, "phase": c.phase} for c in cases]


def _peak(r: Facts) -> dict[str, Any]:
    capacity = None if r.hardware is None else {"value": _number(_plain(r.hardware.capacity().value)), "unit": "B"}
    return {
        **_figure(r.peak.value, "B"),
        "op": r.peak.op,
        "phase": r.peak.phase,
        "by_role": {role: _figure(v, "B") for role, v in r.peak.by_role.items()},
        "arch": r.peak.arch,
        "cases": _cases(r.peak.regimes),
        "formulas": _cases(r.peak.formula),
        "capacity": capacity,
        "fits": r.fits,
    }


def _training(r: Facts) -> dict[str, Any] | None:
    if r.training is None:
        return None
    utilization = {"mfu": r.training.mfu, "hfu": r.training.hfu, "most_mfu": r.training.most_mfu}
    return {
        "figures": {name: _figure(f.value, f.unit, f.formula) for name, f in r.training.figures.items()},
        "loss": r.training.loss,
        "dtype": r.training.dtype,
        "others": dict(r.training.others),
        **{name: {"value": value, "unit": "1"} for name, value in utilization.items()},
    }


def _plain(value: Any) -> int | float:
    return value if isinstance(value, int) else float(value)


def _times(times: Roofline | None) -> dict[str, Any] | None:
    if times is None:
        return None
    return {
        "ridge": _figure(times.ridge, "FLOP/B"),
        "lower_bound": _figure(times.lower_bound, "s"),
        "estimate": _figure(times.estimate, "s"),
        "bound": None if isinstance(times.estimate, sympy.Expr) else times.bound,
        "stand_ins": [instead._asdict() for instead in times.stand_ins],
        "notes": list(times.notes),
        "levels": [
            {
                "level": level.name,
                "bandwidth": _figure(answer(poly(level.bandwidth.value)), "B/s"),
                "nearer": _figure(answer(level.nearer), "B"),
            }
            for level in times.levels
        ],
        "ops": [
            {
                "op": row.op,
                "scope": row.scope,
                "phase": row.phase,
                "kind": row.kind,
                "flops": _figure(row.flops, "FLOP"),
                "bytes": _figure(row.bytes, "B"),
                "intensity": _figure(row.intensity, "FLOP/B"),
                "compute": _figure(row.compute_s, "s"),
                "memory": _figure(row.memory_s, "s"),
                "caches": {name: _figure(seconds, "s") for name, seconds in row.caches_s.items()},
                "bound": str(row.bound),
            }
            for row in times.rows
        ],
    }


def _part(part: Part) -> dict[str, Any]:
    out: dict[str, Any] = {"name": part.name}
    for quantity, unit in _PART_UNITS.items():
        out[quantity] = _figure(getattr(part.value, quantity), unit, getattr(part.formula, quantity))
    if part.seconds is not None:
        out |= {
            "time": _figure(part.seconds, "s"),
            "share": part.share,
            "bound": part.bound,
            "bound_share": part.bound_share,
        }
    return out


_PART_UNITS = {
    "flops": "FLOP", "matmul": "FLOP", "pointwise": "FLOP", "transcendental": "FLOP",
    "bytes": "B", "read": "B", "written": "B",
}  # fmt: skip


def _sent(sent: Sent) -> dict[str, Any]:
    out = {
        "axis": sent.axis,
        "collective": sent.collective,
        "times": _figure(sent.times, "1"),
        "ring_bytes": _figure(sent.ring_bytes, "B"),
    }
    return out if sent.seconds is None else {**out, "time": _figure(sent.seconds, "s"), "link": sent.link}


def to_json(r: Facts) -> str:
    """Return a report as JSON text.

    The object has a `schema`. Every amount is an object with value, unit and possibly `formula`. An unbound value is
    null, and `bound` then has the formula in the unbound sizes. Infinity is null.
    """
    device = None if r.hardware is None else {"id": r.hardware.id, "name": r.hardware.name}
    data = {
        "graph": r.graph,
        "hardware": device,
        "sizes": dict(r.sizes),
        "given": sorted(r.given),
        "unbound": list(r.unbound),
        "unused": list(r.unused),
        "count": r.count,
        "figures": {name: _figure(f.value, f.unit, f.formula) for name, f in r.figures.items()},
        "unused_params": {scope: _figure(n, "1") for scope, n in r.unused_params.items()},
        "training": _training(r),
        "peak_memory": _peak(r),
        "roofline": _times(r.roofline or r.open_roofline),
        "sent": [_sent(s) for s in r.sent],
        "scopes": [_part(p) for p in r.scopes],
        "phases": [_part(p) for p in r.phases],
    }
    return as_json(SCHEMA, data)


def rows(r: Facts) -> Iterator[tuple[str, str, str, object, str, str]]:
    """Yield one (part, name, quantity, value, unit, formula) per value of a report."""
    for name, f in r.figures.items():
        yield ("graph", "", name, _cell(f.value), f.unit, formula_text(f.formula))
    yield from (("unused parameters", scope, "params", _cell(n), "1", "") for scope, n in r.unused_params.items())
    if r.training is not None:
        for name, f in r.training.figures.items():
            yield ("training", "", name, _cell(f.value), f.unit, formula_text(f.formula))
        utilization = {"mfu": r.training.mfu, "hfu": r.training.hfu, "most-mfu": r.training.most_mfu}
        yield from (("training", "", name, value, "1", "") for name, value in utilization.items() if value is not None)
    yield ("graph", "", "peak-memory", _cell(r.peak.value), "B", "")
    for role, amount in r.peak.by_role.items():
        yield ("role at the peak", role, "bytes", _cell(amount), "B", "")
    times = r.roofline or r.open_roofline
    if times is not None:
        yield ("graph", "", "ridge", _cell(times.ridge), "FLOP/B", "")
        yield ("graph", "", "lower-bound", _cell(times.lower_bound), "s", "")
        yield ("graph", "", "estimate", _cell(times.estimate), "s", "")
    for sent in r.sent:
        name = f"{sent.axis} {sent.collective}"
        yield ("sent", name, "times", _cell(sent.times), "1", "")
        yield ("sent", name, "ring-bytes", _cell(sent.ring_bytes), "B", "")
        if sent.seconds is not None:
            yield ("sent", name, "time", _cell(sent.seconds), "s", "")
            yield ("sent", name, "link", sent.link, "", "")
    for kind, parts in (("scope", r.scopes), ("phase", r.phases)):
        for part in parts:
            for quantity, unit in _PART_UNITS.items():
                value, formula = getattr(part.value, quantity), getattr(part.formula, quantity)
                yield (kind, part.name, quantity, _cell(value), unit, formula_text(formula))
            if part.seconds is not None:
                yield (kind, part.name, "time", part.seconds, "s", "")
                yield (kind, part.name, "share", part.share, "1", "")
                yield (kind, part.name, "bound", part.bound or "", "", "")


def _cell(value: Formula) -> object:
    return formula_text(value) if isinstance(value, sympy.Expr) else value


def to_csv(r: Facts) -> str:
    """Return a report as CSV text, with one value and its unit per line.

    The columns are part (graph, unused parameters, training, role at the peak, sent, scope, phase), name, quantity,
    value, unit and formula. An unbound value is a formula in the unbound sizes.
    """
    return as_csv(_COLUMNS, rows(r))
