"""Tables and columns as rich renders them."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.segment import Segment, Segments
from rich.table import Table

from ..algebra.symbols import printable
from ..hardware.tables import Column, legend_rows
from .formula import written_symbols

__all__ = ["WIDTH", "clean", "draw", "grid", "line", "listing", "texts"]


#: Width without a terminal.
WIDTH = 80

_LONGEST_NAME = 120
_LONGEST_CELL = 1000


def line(text: str, most: int = _LONGEST_NAME) -> str:
    """Return untrusted text as one printable line, truncated."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return printable(short).replace("\n", r"\n").replace("\t", r"\t")


def clean(text: str, most: int = _LONGEST_NAME) -> str:
    """Return untrusted text as one printable line, escaped for rich."""
    return escape(line(text, most))


def draw(
    parts: Iterable[RenderableType], legend: Mapping[str, str], width: int | None = None, *, color: bool = False
) -> str:
    """Render rich renderables one below the other, without other control characters or trailing spaces.

    The symbols of the formulas that the parts write follow, as `legend` describes them. The default width is 80. With
    `color`, include ANSI escape sequences.
    """
    with written_symbols() as names:
        blocks = [*parts]
    file = io.StringIO()
    console = Console(
        file=file,
        width=width or WIDTH,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    console.print(Segments(Segment(printable(s.text), s.style) for s in console.render(Group(*blocks))))
    lines = [line.rstrip() for line in file.getvalue().rstrip().split("\n")]
    rows = legend_rows(names, legend, (width or WIDTH) - 9)
    return "\n".join([*lines, *([""] if rows else []), *map("  ".join, rows)])


def grid(rows: Iterable[Sequence[str]], *, narrow: int = 1) -> Table:
    """Arrange rows in columns without lines: `narrow` columns that never wrap, then a wide one."""
    table = Table.grid(padding=(0, 2))
    for _ in range(narrow):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def listing(
    title: str,
    columns: Sequence[Column],
    records: Sequence[Any],
    *,
    whole: Collection[str] = (),
    wide: Mapping[str, int] = MappingProxyType({}),
) -> Table:
    """Return a rich table with one row per record; a last record named `total` is set apart.

    Amounts are right-aligned and never wrap, nor do columns with a head in `whole`. Columns in `wide` share the
    remaining width by weight.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for c in columns:
        table.add_column(
            c.head, justify="right" if c.unit else "left", overflow="fold", no_wrap=bool(c.unit) or c.head in whole,
            ratio=wide.get(c.head),
        )  # fmt: skip
    for i, record in enumerate(records):
        last = i + 2 == len(records) and getattr(records[-1], "name", "") == "total"
        table.add_row(*(escape(c.cell(record)) for c in columns), end_section=last)
    return table


def texts(*heads: str, amounts: Collection[str] = ()) -> list[Column]:
    """Return columns for rows of (untrusted) texts, those in `amounts` right-aligned."""
    cell = partial(line, most=_LONGEST_CELL)
    return [Column(h, "1" if h in amounts else "", itemgetter(i), text=cell) for i, h in enumerate(heads)]
