"""Tables of results: classes declare columns, and text, HTML and pandas output follow."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy

from ..algebra.symbols import printable, shown
from ..errors import SpecError, UnsupportedError
from .units import format_bytes, format_quantity

__all__ = ["MOST_LINES", "SOURCE", "Column", "Fact", "Table", "html_cells", "legend_rows", "names_in"]

#: Maximum number of printed lines, including the header and facts below.
MOST_LINES = 40
_WIDEST, _WIDEST_FACT = 40, 200
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


# -- legends -----------------------------------------------------------------------------------------------------------


def names_in(value: object, text: str) -> set[str]:
    """Return the symbols of a formula or condition that occur in its text, which may be truncated."""
    return {s.name for s in getattr(value, "free_symbols", ())} & {*_NAME.findall(text)}


def legend_rows(names: Iterable[str], descriptions: Mapping[str, str], width: int = 88) -> list[tuple[str, str]]:
    """Return the legend of symbols as rows of a label and a text, which is wrapped between entries.

    Symbols without a description are omitted.

    Examples
    --------
    >>> legend_rows({"S", "B", "n"}, {"B": "batch size", "S": "sequence length", "V": "vocabulary size"})
    [('symbols', 'B batch size, S sequence length')]
    """
    lines: list[str] = []
    for name in sorted({*names} & descriptions.keys(), key=lambda name: (name.lower(), name)):
        entry = f"{name} {_line(descriptions[name])[:_WIDEST_FACT]}"
        if lines and len(lines[-1]) + len(entry) + 3 <= width:
            lines[-1] += f", {entry}"
        else:
            lines = [*lines[:-1], *(f"{line}," for line in lines[-1:]), entry]
    return [("       " if i else "symbols", line) for i, line in enumerate(lines)]


# -- tables ------------------------------------------------------------------------------------------------------------


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

    `print` shows at most 40 lines, notebooks show HTML, and `to_pandas` returns a DataFrame. A legend explains the
    symbols in formulas.
    """

    rows: Any
    """records"""
    legend: Mapping[str, str] = MappingProxyType({})
    """descriptions of dimensions, from the graph"""

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
        columns, heads, body, omitted, facts = _parts(self)
        lines = _aligned([heads, *body], columns)
        lines += [f"... {omitted:,} more rows"] if omitted else []
        width = max((len(name) for name, _ in facts), default=0)
        return "\n".join(
            [*lines, *(f"{name.ljust(width)}  {text}".rstrip() if width else text for name, text in facts)]
        )

    def _repr_html_(self) -> str:
        columns, heads, body, omitted, facts = _parts(self)
        sides = ["right" if c.unit else "left" for c in columns]
        rows = [html_cells("td", row, sides) for row in body]
        rows += [f'<td colspan="{len(columns)}">... {omitted:,} more rows</td>'] if omitted else []
        value_cell = f'<td colspan="{len(columns) - 1}" style="text-align: left">'
        footer = [f"{html_cells('th', [name], ['left'])}{value_cell}{html.escape(text)}</td>" for name, text in facts]
        head = html_cells("th", heads, sides)
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


def _parts(table: Table) -> tuple[list[Column], list[str], list[list[str]], int, list[tuple[str, str]]]:
    """Return columns, heads, formatted first rows, the number of omitted rows, and facts with the legend."""
    columns, rows = [c for c in table._columns() if c.shown], table.rows
    known = [*table._facts()]
    facts = [(f.name, _fact(f)) for f in known]
    names: set[str] = set().union(*(names_in(f.value, text) for f, (_, text) in zip(known, facts, strict=True)))
    legend: list[tuple[str, str]] = []
    while True:
        max_rows = MOST_LINES - 1 - len(facts) - len(legend)
        omitted = 0 if len(rows) <= max_rows else len(rows) - (max_rows - 1)
        records = [*islice(rows, len(rows) - omitted)]
        body = [[c.cell(r) for c in columns] for r in records]
        cells = [
            (c.of(r), text) for r, row in zip(records, body, strict=True) for c, text in zip(columns, row, strict=True)
        ]
        found = legend_rows(names.union(*(names_in(value, text) for value, text in cells)), table.legend)
        if len(found) <= len(legend):  # fewer rows have no other symbols, so the second round is the last
            break
        legend = found
    heads = [_head(c, records) for c in columns]
    return columns, heads, body, omitted, facts + found


def _head(column: Column, records: Iterable[Any]) -> str:
    """Return a column's header, with the units of its formulas."""
    formulas = [r for r in records if column.unit and isinstance(column.of(r), sympy.Expr)]
    units = dict.fromkeys(column.unit if isinstance(column.unit, str) else column.unit(r) for r in formulas)
    units.pop("1", None)
    return f"{column.head} [{', '.join(units)}]" if units else column.head


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
        return _end_of(_line(value))
    if isinstance(value, sympy.Basic):
        return _start_of(value, _WIDEST)
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


def _end_of(name: str) -> str:
    """Truncate a name at the start, before a level if possible."""
    if len(name) <= _WIDEST:
        return name
    end = name[3 - _WIDEST :]
    return "..." + end[max(end.find("/"), 0) :]


def _start_of(formula: sympy.Basic, most: int) -> str:
    """Truncate a formula at the end, but not within a symbol or number."""
    text = shown(formula, most)
    return text if len(text) < most else re.sub(r"\w+\.\.\.$", "...", text)


def _fact(fact: Fact) -> str:
    if isinstance(fact.value, sympy.Expr):
        return f"{_start_of(fact.value, _WIDEST_FACT)}  [{fact.unit}]"
    if isinstance(fact.value, str):
        text = _line(fact.value)
        return text if len(text) <= _WIDEST_FACT else text[: _WIDEST_FACT - 3] + "..."
    if fact.unit == "B" and fact.value:
        return format_bytes(fact.value)
    return _text(fact.value, fact.unit)


def _line(text: str) -> str:
    return printable(text).replace("\n", " ").replace("\t", " ")
