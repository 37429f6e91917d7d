"""The reader of published measurements rejects malformed files, records and numbers, and names the place."""

import json
from decimal import Decimal

import pytest
from each import each

from costgraph.errors import FormatError
from costgraph.report.records import read_records

RECORD = {
    "id": "a", "source": "a page", "device": "h100-sxm", "family": "squares", "what": "kernel",
    "inputs": {"op": "gemm", "M": 127, "N": 131, "K": 137, "dtype": "fp16"}, "quantity": "time", "unit": "ms",
    "value": 1.50,
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "file.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return write


def without(key):
    return {name: value for name, value in RECORD.items() if name != key}


def test_numbers_keep_their_digits(written):
    text = json.dumps([RECORD]).replace("1.5", "1.50").encode()
    (record,) = read_records(written(text))
    assert str(record.value) == "1.50"
    assert (record.note, record.inputs["M"]) == ("", 127)


NAMES = "id, source, device, family, what, inputs, quantity, unit, value, note"
REFUSED = [
    (b"", "Expecting value: line 1 column 1 (char 0), expected a readable JSON file"),
    (b"[" * 10**5, "nested too deep, expected a list of records"),
    (b"\xff", "byte 0 is no UTF-8, expected the JSON file of records"),
    ({}, "{}, expected a list of records, one at least"),
    ([], "[], expected a list of records, one at least"),
    ([3], f"record 0: 3, expected a record with {NAMES}"),
    ([without("device")], f"record 0: no 'device', expected {NAMES}"),
    ([RECORD, RECORD], "record 1: id 'a' is there twice, expected one of each"),
    ([RECORD | {"valu": 3}], f"record 0: key 'valu' is unknown, did you mean value? expected {NAMES}"),
    ([RECORD | {"unit": ""}], "record 0: unit '', expected a text"),
    ([RECORD | {"inputs": [1]}], "record 0: inputs [1], expected facts by name"),
    *(
        ([RECORD | {"value": value}], f"record 0: value {shown}, expected a number above 0, from 1e-30 to 1e30")
        for value, shown in ((0, "0"), (-1, "-1"), (True, "True"), ("1", "'1'"), (None, "None"), (10**31, str(10**31)))
    ),
]  # fmt: skip


@each(("content", "expected"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_record_lists_are_refused(written, content, expected):
    path = written(content)
    with pytest.raises(FormatError) as error:
        read_records(path)
    assert str(error.value).removeprefix(f"{path}: ") == expected


@each("number", ["NaN", "Infinity", "-Infinity", "1e31", "1e-31", "1e999999999"])
def test_implausible_numbers_are_refused(written, number):
    text = json.dumps([RECORD]).replace("1.5", number).encode()
    with pytest.raises(FormatError, match="expected a number above 0, from 1e-30 to 1e30"):
        read_records(written(text))


def test_huge_integers_raise_format_errors(written):
    with pytest.raises(FormatError):
        read_records(written(json.dumps([RECORD]).replace("1.5", "9" * 5000).encode()))
    with pytest.raises(FormatError, match=r"no regular file|directory"):
        read_records("/")


def test_shipped_measurements_are_read(measured):
    assert len(measured) == 3324
    assert len({r.id for r in measured}) == 3324
    assert all(isinstance(r.value, int | Decimal) and r.source for r in measured)
