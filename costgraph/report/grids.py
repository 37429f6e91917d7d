"""Tables and columns as rich draws them; what they show is others'."""

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
from ..hardware.tables import Column

__all__ = ["WIDTH", "clean", "draw", "grid", "line", "listing", "texts"]

#: Columns of what is no terminal.
WIDTH = 80

_LONGEST_NAME = 120
_LONGEST_CELL = 1000


def line(text: str, most: int = _LONGEST_NAME) -> str:
    """Return a text from outside as one line that is not too long."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return printable(short).replace("\n", r"\n").replace("\t", r"\t")


def clean(text: str, most: int = _LONGEST_NAME) -> str:
    """Return such a line as rich may print it: no markup."""
    return escape(line(text, most))


def draw(parts: Iterable[RenderableType], width: int | None = None, *, color: bool = False) -> str:
    """Return what rich makes of some renderables, one below the other, with no control characters but its own.

    The width is 80 by default; `color` asks for the escape sequences of a terminal. No line ends with spaces.
    """
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
    console.print(Segments(Segment(printable(s.text), s.style) for s in console.render(Group(*parts))))
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().split("\n"))


def grid(rows: Iterable[Sequence[str]], *, narrow: int = 1) -> Table:
    """Return rows as columns without lines, the last column wide; `narrow` columns before it never wrap."""
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
    """Return a table for a terminal: a row for each record, a last one whose name is `total` apart.

    Amounts stand on the right and never wrap, nor do columns with the heads of `whole`; those of `wide` share the room
    that is left, with their parts of it.
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
    """Return the columns of rows that are texts already, from outside even; those of amounts stand on the right."""
    cell = partial(line, most=_LONGEST_CELL)
    return [Column(h, "1" if h in amounts else "", itemgetter(i), text=cell) for i, h in enumerate(heads)]
