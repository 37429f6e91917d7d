"""Read published measurements: records with source, device, inputs and one number."""

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
# limits of plausible times and rates; floats computed from these stay finite
_LEAST, _MOST = Decimal("1e-30"), Decimal("1e30")


def _is_amount(value: object) -> bool:
    """Whether a value is a plausible positive number."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return False
    return Decimal(value).is_finite() and _LEAST <= value <= _MOST


#: A number with the printed digits.
Amount = Annotated[int | Decimal, Rule("a number above 0, from 1e-30 to 1e30", _is_amount)]
_Inputs = Annotated[
    Mapping[str, object], Rule("facts by name", lambda found: all(isinstance(name, str) for name in found))
]


@dataclass(frozen=True)
class Record:
    """One published measurement."""

    id: Text
    """name, unique in its file"""
    source: Text
    """publication: repository, path and commit, or URL"""
    device: Text
    """device name, as in `costgraph hardware`"""
    family: Text
    """benchmark; records of a family have the same inputs"""
    what: Text
    """description: kernel, training step, peak memory"""
    inputs: _Inputs
    """sizes, formats and settings"""
    quantity: Text
    """measured quantity"""
    unit: Text
    """unit"""
    value: Amount
    """the number, with the printed digits"""
    note: str = ""
    """further remarks"""


def read_records(path: str | os.PathLike[str]) -> tuple[Record, ...]:
    """Read a file of measurements.

    Parameters
    ----------
    path : str or path-like
        JSON file: a list of objects with `Record` fields. Numbers keep their printed digits.

    Returns
    -------
    tuple of Record
        In file order.

    Raises
    ------
    FormatError
        If the file cannot be read or its content is invalid. The message names the record, key and value.
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
    """Read the inputs that a prediction needs into a dataclass; null means unknown.

    Raises UnsupportedError if an input is missing, unknown or unsupported.
    """
    own: Any = kind
    names = [field.name for field in fields(own)]
    given = {name: record.inputs[name] for name in names if record.inputs.get(name) is not None}
    return read_record("inputs", given, kind, UnsupportedError)


def last_digits(records: Iterable[Record]) -> Mapping[tuple[str, ...], Decimal]:
    """Return the last printed digit's unit by column (family, device, quantity, unit).

    Single numbers may have lost trailing zeros, so a column uses its most precise number.
    """
    found: dict[tuple[str, ...], Decimal] = {}
    for record in records:
        exponent = Decimal(record.value).as_tuple().exponent
        assert isinstance(exponent, int)  # numbers in records are finite
        last = Decimal(1).scaleb(exponent)
        found[column(record)] = min(last, found.get(column(record), last))
    return found


def column(record: Record) -> tuple[str, ...]:
    """Return the key of a record's column."""
    return record.family, record.device, record.quantity, record.unit
