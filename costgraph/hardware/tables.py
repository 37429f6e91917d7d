"""Tables of results: classes declare columns, and text, HTML and pandas output follow."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import sympy

from ..algebra.symbols import printable, shown
from ..errors import SpecError, UnsupportedError
from .units import format_bytes, format_quantity

__all__ = ["MOST_LINES", "SOURCE", "Column", "Fact", "Table", "html_cells"]

#: Maximum number of printed lines, including the header and facts below.
MOST_LINES = 40
_WIDEST, _WIDEST_FACT = 40, 200


@dataclass(frozen=True)
class Column:
    """A table column: its name, and how cells are read and formatted."""

    name: str
    """name in a DataFrame; also the attribute to read, unless `read` is given"""
    unit: str | Callable[[Any], str] = ""
    """unit of amounts, optionally by record; empty for text"""
    read: Callable[[Any], Any] | None = None
    """function from record to value"""
    title: str | None = None
    """header in text output, by default the name"""
    text: Callable[[Any], str] | None = None
    """formats a value, instead of the default for amounts and text"""
    shown: bool = True
    """whether text output includes it; a DataFrame always does"""

    @property
    def head(self) -> str:
        """Header in text output."""
        return self.name if self.title is None else self.title

    def of(self, record: Any) -> Any:
        """Return the value for a record."""
        return getattr(record, self.name) if self.read is None else self.read(record)

    def cell(self, record: Any) -> str:
        """Return the formatted value for a record."""
        value = self.of(record)
        if self.text is not None:
            return self.text(value)
        return _text(value, self.unit if isinstance(self.unit, str) else self.unit(record))


#: Source of a quantity, for rows of a key and a quantity.
SOURCE = Column("source", read=lambda row: row[1].source, text=lambda s: s if len(s) <= 40 else f"{s[:37]}...")


class Fact(NamedTuple):
    """Line below a table: a total, or a property common to all rows."""

    name: str
    value: Any
    unit: str = ""


class Table:
    """Base class for results displayed as a table of their `rows`.

    `print` shows at most 40 lines, notebooks show HTML, and `to_pandas` returns a DataFrame.
    """

    rows: Any
    """records"""

    def _description(self) -> str:
        """Return a short description."""
        raise NotImplementedError

    def _columns(self) -> Sequence[Column]:
        raise NotImplementedError

    def _facts(self) -> Iterable[Fact]:
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description()})"

    def __str__(self) -> str:
        columns, body, omitted, facts = _parts(self)
        lines = _aligned([[c.head for c in columns], *body], columns)
        lines += [f"... {omitted:,} more rows"] if omitted else []
        width = max((len(name) for name, _ in facts), default=0)
        return "\n".join([*lines, *(f"{name.ljust(width)}  {text}".strip() for name, text in facts)])

    def _repr_html_(self) -> str:
        columns, body, omitted, facts = _parts(self)
        sides = ["right" if c.unit else "left" for c in columns]
        rows = [html_cells("td", row, sides) for row in body]
        rows += [f'<td colspan="{len(columns)}">... {omitted:,} more rows</td>'] if omitted else []
        value_cell = f'<td colspan="{len(columns) - 1}" style="text-align: left">'
        footer = [f"{html_cells('th', [name], ['left'])}{value_cell}{html.escape(text)}</td>" for name, text in facts]
        head = html_cells("th", [c.head for c in columns], sides)
        parts = (("thead", [head]), ("tbody", rows), ("tfoot", footer))
        sections = "".join(
            f"<{part}>{''.join(f'<tr>{r}</tr>' for r in part_rows)}</{part}>" for part, part_rows in parts
        )
        return f"<table><caption>{html.escape(repr(self))}</caption>{sections}</table>"

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame: numbers in base units (B, FLOP, s), formulas unchanged.

        Returns
        -------
        pandas.DataFrame
            One column for each column of the table.

        Raises
        ------
        UnsupportedError
            If pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError:
            place = f"{type(self).__name__}.to_pandas"
            raise UnsupportedError(f"{place}: pandas is not installed; install it with: pip install pandas") from None
        columns = self._columns()
        return pandas.DataFrame([[c.of(r) for c in columns] for r in self.rows], columns=[c.name for c in columns])


def _parts(table: Table) -> tuple[list[Column], list[list[str]], int, list[tuple[str, str]]]:
    """Return columns, formatted first rows, the number of omitted rows, and facts."""
    columns = [c for c in table._columns() if c.shown]
    facts = [(f.name, _fact(f)) for f in table._facts()]
    rows, max_rows = table.rows, MOST_LINES - 1 - len(facts)
    omitted = 0 if len(rows) <= max_rows else len(rows) - (max_rows - 1)
    return columns, [[c.cell(r) for c in columns] for r in islice(rows, len(rows) - omitted)], omitted, facts


def _aligned(cells: Sequence[Sequence[str]], columns: Sequence[Column]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    sides = [str.rjust if c.unit else str.ljust for c in columns]
    return ["  ".join(s(c, w) for s, c, w in zip(sides, row, widths, strict=True)).rstrip() for row in cells]


def html_cells(tag: str, cells: Iterable[str], sides: Iterable[str]) -> str:
    """Return the cells of an HTML table row, each aligned to its side."""
    return "".join(
        f'<{tag} style="text-align: {side}">{html.escape(c)}</{tag}>' for c, side in zip(cells, sides, strict=True)
    )


def _text(value: object, unit: str) -> str:
    """Format a value for a cell: amounts with unit, names cut at the start, formulas at the end."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = _line(value)
        return text if len(text) <= _WIDEST else "..." + text[3 - _WIDEST :]
    if not isinstance(value, int | float | Fraction):
        return shown(value, _WIDEST)
    if not value:
        return "0"
    if unit == "1":
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
    try:
        return format_quantity(value, unit)
    except SpecError:  # infinite or out of range
        return shown(value, _WIDEST)


def _fact(fact: Fact) -> str:
    if isinstance(fact.value, sympy.Expr):
        return f"{shown(fact.value, _WIDEST_FACT)}  [{fact.unit}]"
    if isinstance(fact.value, str):
        text = _line(fact.value)
        return text if len(text) <= _WIDEST_FACT else text[: _WIDEST_FACT - 3] + "..."
    if fact.unit == "B" and fact.value:
        return format_bytes(fact.value)
    return _text(fact.value, fact.unit)


def _line(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")
