"""Records and predictions as text for a terminal or a pipe; needs rich."""

from __future__ import annotations

from ..text import clean, draw, grid, listing
from .held import Held

__all__ = ["render_held"]

_LONGEST_REASON = 200


def render_held(held: Held, width: int | None = None, *, color: bool = False) -> str:
    """Return the families by device, what is not predicted and why, and the limits, as text for a terminal.

    Parameters
    ----------
    held : Held
        What is shown.
    width : int, optional
        Columns, 80 by default.
    color : bool
        Whether escape sequences of a terminal are wanted.
    """
    title = f"{clean(held.name)}: {len(held.records):,} records, measured over estimated times"
    parts = [listing(title, held._columns(), held.rows, whole=("family", "device"))]
    if held.reasons:
        rows = [(f"{n:,} of {clean(family)}", clean(why, _LONGEST_REASON)) for (family, why), n in held.reasons.items()]
        parts += [grid([("not predicted", ""), *rows])]
    parts += [grid([("holds" if limit.holds else "fails", clean(str(limit), 400)) for limit in held.limits])]
    return draw(parts, width, color=color)
