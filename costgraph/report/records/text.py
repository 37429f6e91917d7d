"""Records and predictions as text for a terminal or a pipe; needs rich."""

from __future__ import annotations

from ..text import clean, draw, grid, listing, texts
from .calibrating import Calibrated
from .held import Held

__all__ = ["render_calibrated", "render_held"]

_LONGEST_REASON = 200


def render_held(held: Held, width: int | None = None, *, color: bool = False) -> str:
    """Return the families by device, what is not predicted and why, and the limits, as text; the rest as in `draw`."""
    title = f"{clean(held.name)}: {len(held.records):,} records, measured over estimated times"
    parts = [listing(title, held._columns(), held.rows, whole=("family", "device"))]
    if held.reasons:
        rows = [(f"{n:,} of {clean(family)}", clean(why, _LONGEST_REASON)) for (family, why), n in held.reasons.items()]
        parts += [grid([("not predicted", ""), *rows])]
    parts += [grid([("holds" if limit.holds else "fails", clean(str(limit), 400)) for limit in held.limits])]
    return draw(parts, width, color=color)


def render_calibrated(found: Calibrated, width: int | None = None, *, color: bool = False) -> str:
    """Return how well a calibrated model predicts, by family, as text: `width` and `color` as `draw`."""
    figures = found.model.figures
    left = sum(found.unpredicted.values())
    if figures is None:
        return draw([f"{clean(found.model.records)}: fitted, {left:,} records have no time"], width, color=color)
    heads = ("fitted", "folds", "shapes", "devices")
    rows = [*figures.families.items(), ("all", (figures.rows, *(getattr(figures, head) for head in heads)))]
    cells = [(name, f"{n:,.0f}", *(f"{share:.1%}" for share in shares)) for name, (n, *shares) in rows]
    title = f"{clean(found.model.records)}: share of measurements that are within 25% of the calibrated time"
    columns = texts("family", "records", *heads, amounts=("records", *heads))
    legend = grid([
        ("fitted", "all are fitted"), ("folds", "a tenth is left out, and predicted"),
        ("shapes", "all of a tenth of the shapes and models are"), ("devices", "all of a device are"),
        ("no time", f"{left:,} records"),
    ])  # fmt: skip
    return draw([listing(title, columns, cells, whole=("family",)), legend], width, color=color)
