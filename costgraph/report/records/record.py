"""What others measured: a file of records, each with its source, device, inputs and one number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Annotated, Any, TypeVar

from ...algebra.symbols import shown
from ...errors import FormatError, UnsupportedError
from ...notation.validation import (
    Rule,
    Text,
    read_record,
)
from ...text_file import place_of, read_text

__all__ = ["Amount", "Record", "column", "facts", "last_digits", "read_records"]

T = TypeVar("T")

_MOST_BYTES = 2**25
# no run takes longer or is faster, and floats made of these are finite
_LEAST, _MOST = Decimal("1e-30"), Decimal("1e30")


def _is_amount(value: object) -> bool:
    """Whether a value is a positive number that a measurement can give."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return False
    return Decimal(value).is_finite() and _LEAST <= value <= _MOST


#: A number as it is printed, digit by digit.
Amount = Annotated[int | Decimal, Rule("a number above 0, from 1e-30 to 1e30", _is_amount)]
_Inputs = Annotated[
    Mapping[str, object], Rule("facts by name", lambda found: all(isinstance(name, str) for name in found))
]


@dataclass(frozen=True)
class Record:
    """One measurement, as its source prints it."""

    id: Text
    """name, of which a file has one"""
    source: Text
    """where it was published: repository, path and commit, or address"""
    device: Text
    """name of the device, as `costgraph hardware` lists them"""
    family: Text
    """what was measured how; all records of a family have the same inputs"""
    what: Text
    """in words: kernel, training step, peak memory"""
    inputs: _Inputs
    """sizes, formats and settings of what ran"""
    quantity: Text
    """what the number is"""
    unit: Text
    """unit of the number"""
    value: Amount
    """the number, digit by digit"""
    note: str = ""
    """what else the source says"""


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Read a file of measurements.

    Parameters
    ----------
    path : str or path-like
        JSON: a list of records with the fields of `Record`. Numbers keep the digits that they are printed with.

    Returns
    -------
    tuple of Record
        In the order of the file.

    Raises
    ------
    FormatError
        If it cannot be read or is no such list: the text names the record, the key, its value, and what was expected.
    """
    place = place_of(path)
    given = _parsed(path, place)
    if not isinstance(given, list) or not given:
        raise FormatError(f"{place}: {shown(given, 80)}, expected a list of records, one at least")
    names: set[str] = set()
    found = []
    for i, each in enumerate(given):
        record = read_record(f"{place}: record {i}", each, Record)
        if record.id in names:
            raise FormatError(f"{place}: record {i}: id {shown(record.id, 200)} is there twice, expected one of each")
        names.add(record.id)
        found.append(record)
    return tuple(found)


def _parsed(path: str | os.PathLike[str], place: str) -> object:
    text = read_text(path, place, _MOST_BYTES, "the JSON file of records")
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=Decimal)
    except RecursionError:
        raise FormatError(f"{place}: nested too deep, expected a list of records") from None
    except (ValueError, ArithmeticError) as error:
        raise FormatError(f"{place}: {error or type(error).__name__}, expected a readable JSON file") from None


def facts(record: Record, kind: type[T]) -> T:
    """Read those inputs of a record that a prediction depends on; one that is null was not stated.

    UnsupportedError if one of them is missing, not stated, or none that can be predicted.
    """
    own: Any = kind
    names = [field.name for field in fields(own)]
    given = {name: record.inputs[name] for name in names if record.inputs.get(name) is not None}
    return read_record("inputs", given, kind, UnsupportedError)


def last_digits(records: Iterable[Record]) -> Mapping[tuple[str, ...], Decimal]:
    """Return the last printed digit of each column of numbers: those of one family, device, quantity and unit.

    A number of its own may have lost the zeros at its end, so that the finest of a column is that of all.
    """
    found: dict[tuple[str, ...], Decimal] = {}
    for record in records:
        exponent = Decimal(record.value).as_tuple().exponent
        assert isinstance(exponent, int)  # a number that was read is finite
        last = Decimal(1).scaleb(exponent)
        found[column(record)] = min(last, found.get(column(record), last))
    return found


def column(record: Record) -> tuple[str, ...]:
    """Return what the numbers of one column have in common."""
    return record.family, record.device, record.quantity, record.unit
