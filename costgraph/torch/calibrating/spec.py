"""A specification as the text of a TOML file, in the layout that `costgraph.hardware.specs` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from ...hardware.specs import Hardware
from ...hardware.units import UNITS, Quantity

__all__ = ["Table", "entry", "specification", "taken_over"]

Table = dict[str, str]
"""Entries of a table by key, as they stand in the file."""

_SCALED = {
    "FLOP/s": ("TFLOP/s", "GFLOP/s", "MFLOP/s"),
    "B/s": ("TB/s", "GB/s", "MB/s"),
    "B": ("GiB", "MiB", "KiB"),
    "s": ("s", "ms", "us", "ns"),
}
_DIGITS = 5
_ALL = 500  # of any number that a file may have: their denominators have only twos and fives in them


def _text(value: str) -> str:
    # a string of JSON is one of TOML too, once DEL is written out
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def entry(value: float, unit: str, source: str, note: str = "") -> str:
    """Return a measured number above zero, in a base unit, as it stands in a file, in a unit that people read.

    A rate is rounded up to five digits and a time down, so that no bound made of it is above what was measured. `note`
    is what a reader has to know.

    Examples
    --------
    >>> print(entry(29_312_345_678.9, "B/s", "RUN"))
    { value = 29.313, unit = "GB/s", source = ["RUN"] }
    >>> print(entry(2.38629e-6, "s", "RUN"))
    { value = 2.3862, unit = "us", source = ["RUN"] }
    """
    exact = Fraction(value)
    scaled = next((u for u in _SCALED[unit] if exact >= UNITS[u][0]), _SCALED[unit][-1])
    number = exact / UNITS[scaled][0]
    # bytes are counted, not measured
    precision = _ALL if unit == "B" else _DIGITS
    rounding = ROUND_FLOOR if unit == "s" else ROUND_CEILING
    return _entry(_decimal(number, Context(prec=precision, rounding=rounding)), scaled, [source], note)


def _decimal(number: Fraction, context: Context) -> str:
    quotient = context.divide(Decimal(number.numerator), Decimal(number.denominator))
    return format(context.normalize(quotient), "f")


def _entry(digits: str, unit: str, sources: list[str], note: str) -> str:
    keys = ", ".join(_text(key) for key in sources)
    more = f", note = {_text(note)}" if note else ""
    return f'{{ value = {digits}, unit = "{unit}", source = [{keys}]{more} }}'


def taken_over(quantity: Quantity) -> str:
    """Return a number of another specification as it stands in a file, exact and with its sources."""
    digits = _decimal(Fraction(quantity.value), Context(prec=_ALL))
    return _entry(digits, quantity.unit, quantity.source.split(", "), quantity.note)


def specification(
    name: str,
    vendor: str,
    sources: Mapping[str, str],
    tables: Mapping[str, Table],
    like: Hardware | None = None,
) -> str:
    """Return the text of a specification with references by key and entries by table; an empty table is left out.

    Numbers, types and notes of `like` are taken over where `tables` has no such entry.
    """
    known = {} if like is None else {t: {k: taken_over(q) for k, q in rows.items()} for t, rows in like.tables.items()}
    types = {} if like is None else like.types
    lines = [f"name = {_text(name)}", f"vendor = {_text(vendor)}"]
    if like is not None and like.arch is not None:
        lines += [f"arch = {_text(like.arch)}"]
    if like is not None and like.disagreements:
        lines += ["disagreements = [", *(f"  {_text(note)}," for note in like.disagreements), "]"]
    references = {**({} if like is None else like.sources), **sources}
    lines += ["", "[sources]", *(f"{_key(key)} = {_text(text)}" for key, text in references.items())]
    for table in dict.fromkeys([*known, *types, *tables]):
        rows = {**known.get(table, {}), **tables.get(table, {})}
        if table in types:
            rows = {"type": _text(types[table]), **rows}
        if rows:
            lines += ["", f"[{table}]", *(f"{_key(key)} = {row}" for key, row in rows.items())]
    return "\n".join(lines) + "\n"
