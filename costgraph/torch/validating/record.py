"""What a validation found, and its record in JSON: schema `costgraph/validation/1`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from ...algebra.symbols import shorten
from ...errors import FormatError
from ...hardware.specs import Hardware, load_hardware
from ...hardware.tables import Column, Fact, Table
from ...hardware.units import show
from ...text_file import read_text, write_file
from ..calibrating.spec import specification
from .judging import OUTCOMES
from .rows import Failed, Row
from .table import Cells, bytes_and_flops, markdown, summary, times

__all__ = ["SCHEMA", "Validation", "check_target"]

SCHEMA = "costgraph/validation/1"
"""What the JSON of this version calls itself; another number means other keys."""

_MOST_BYTES = 2**24
_MODES = ("kernel", "forward", "step")
_BOUNDS = ("compute", "memory")
_AT_LEAST = {"noisy": 0, "spread": 0, "flops": 0, "uncounted": 0, "above": 0, "left": -(2**62), "held": 0, "fused": 0,
             "compute": 0, "memory": 0, "bound": 0, "estimate": 0}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Validation(Table):
    """A suite of cases, predicted and measured on one device.

    `.rows` are the cases, `.table()` shows them, `.plot(directory)` draws them, `.save(path)` writes a record that
    `Validation.load(path)` reads.
    """

    environment: Mapping[str, str | int | bool]
    """device, versions, threads, date and command"""
    hardware: Hardware
    """the device that times are held to"""
    cache: int | None
    """bytes of its last-level cache; None where nothing says"""
    rows: tuple[Row, ...]
    """one of each case that ran"""
    failed: tuple[Failed, ...] = ()
    """the others"""

    def _about(self) -> str:
        return f"{len(self.rows)} cases on {self.hardware.id}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("case", read=lambda r: r.case.name),
            Column("flops", "FLOP", lambda r: r.declared.flops, title="matmul FLOPs"),
            Column("peak", "B", lambda r: r.measured.peak), Column("declared", "B", lambda r: r.off("declared")),
            Column("traced", "B", lambda r: r.off("traced")),
            Column("seconds", "s", lambda r: r.seconds.min, title="fastest run"),
            Column("lower_bound", "s", lambda r: r.modelled.bound, title="at least"),
            Column("estimate", "s", lambda r: r.modelled.estimate), Column("outcome", title="follows"),
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        failed = f"Could not run: {len(self.failed)} cases, see `failed`."
        told = summary(self.rows, (), self.cache) + [failed] * bool(self.failed)
        return [Fact("", text) for text in told]

    def beyond(self, row: Row) -> bool:
        """Say whether the last-level cache holds a quarter at most of the bytes that a case has to move."""
        return row.beyond(self.cache)

    def tables(self) -> tuple[Cells, Cells]:
        """Return head and rows, as texts, of the table of FLOPs and bytes and of that of times."""
        return bytes_and_flops(self.rows), times(self.rows, self.cache)

    def summary(self) -> list[str]:
        """Return what the rows come to, in a sentence each."""
        return summary(self.rows, self.failed, self.cache)

    def table(self) -> str:
        """Return what the rows come to and both tables, in Markdown."""
        return markdown(self.summary(), self.tables())

    def plot(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Draw predicted against measured peaks, and ops on the measured roof; needs matplotlib.

        Parameters
        ----------
        directory : str or path-like
            Where `peaks.png` and `roof.png` go; it is made if it is not there.

        Returns
        -------
        list of Path
            What was written.
        """
        from ...analysis.hooks import PLOTTERS

        drawn: list[Path] = PLOTTERS["validation"](self, directory)
        return drawn

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record, and beside it the specification that times are held to, with `.toml` at its end.

        Raises
        ------
        FormatError
            If the path does not end in `.json`, or cannot be written.
        """
        target = check_target(path)
        spec = target.with_suffix(".toml")
        data = {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "hardware": {"specification": spec.name, "cache_bytes": self.cache},
            "rows": [_plain(row) for row in self.rows],
            "failed": [_plain(row) for row in self.failed],
        }
        write_file(spec, specification(self.hardware.name, self.hardware.vendor, {}, {}, self.hardware))
        write_file(target, json.dumps(data, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Validation:
        """Read a record.

        Raises
        ------
        FormatError
            If it is not one; the text names the place and the key.
        SpecError
            If its specification is none.
        """
        return _read(Path(path))


def check_target(path: str | os.PathLike[str]) -> Path:
    """Return the path of a record that is to be written.

    Raises
    ------
    FormatError
        If it does not end in `.json`, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix != ".json":
        raise FormatError(f"{shorten(str(target), 200)}: expected a path that ends in .json")
    if not target.parent.is_dir():
        raise FormatError(f"{shorten(str(target), 200)}: no such folder, expected a file that can be written")
    return target


# -- as JSON -------------------------------------------------------------------------------------------------------


def _plain(row: Row | Failed) -> dict[str, Any]:
    data = asdict(row)
    data["case"] = {k: v for k, v in data["case"].items() if v != ""}
    return data


def _read(path: Path) -> Validation:
    place = shorten(str(path), 200)
    text = read_text(path, place, _MOST_BYTES, "a record of a validation")
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {str(error)[:200]}, expected JSON") from None
    _keys(place, data, ("schema", "environment", "hardware", "rows", "failed"))
    if data["schema"] != SCHEMA:
        raise FormatError(f"{place}: schema {show(data['schema'])}, expected {SCHEMA!r}")
    hardware = data["hardware"]
    _keys(f"{place}: hardware", hardware, ("specification", "cache_bytes"))
    name, cache = hardware["specification"], hardware["cache_bytes"]
    if not isinstance(name, str) or name != path.with_suffix(".toml").name:
        raise FormatError(f"{place}: hardware: specification {show(name)}, expected the file beside the record")
    if cache is not None:
        _number(f"{place}: hardware", "cache_bytes", cache, int)
    for key in ("rows", "failed"):
        if not isinstance(data[key], list):
            raise FormatError(f"{place}: {key} {show(data[key])}, expected a list")
    rows = tuple(_row(f"{place}: row {i}", row) for i, row in enumerate(data["rows"]))
    failed = tuple(_fields(f"{place}: failed {i}", row, Failed) for i, row in enumerate(data["failed"]))
    environment = _environment(place, data["environment"])
    return Validation(environment, load_hardware(path.with_name(name)), cache, rows, failed)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text}, which is no number of JSON")


def _environment(place: str, found: object) -> dict[str, str | int | bool]:
    wanted = ("device", "name", "torch", "date", "command", "threads")
    if not isinstance(found, dict) or not all(isinstance(v, str | int) for v in found.values()):
        raise FormatError(f"{place}: environment {show(found)}, expected texts and whole numbers by name")
    missing = [k for k in wanted if k not in found]
    if missing:
        raise FormatError(f"{place}: environment has no {missing[0]!r}, expected {', '.join(wanted)} in it")
    if found["device"] not in ("cpu", "cuda"):
        raise FormatError(f"{place}: environment: device {show(found['device'])}, expected cpu or cuda")
    return found


def _row(place: str, given: object) -> Row:
    row: Row = _fields(place, given, Row)
    for key, value, choices in (
        ("outcome", row.outcome, OUTCOMES),
        ("case: mode", row.case.mode, _MODES),
        ("modelled: limit", row.modelled.limit, _BOUNDS),
    ):
        if value not in choices:
            raise FormatError(f"{place}: {key} {show(value)}, expected one of {', '.join(choices)}")
    times = row.seconds
    if not times.min <= times.lower <= times.median <= times.upper <= times.max:
        raise FormatError(f"{place}: seconds {show(asdict(times))}, expected them in order")
    return row


def _fields(place: str, given: object, kind: Any) -> Any:
    """Read a dataclass whose fields are texts, numbers, sizes by name, and dataclasses of these."""
    hints = get_type_hints(kind)
    optional = {f.name for f in fields(kind) if f.default is not MISSING}
    _keys(place, given, tuple(hints), optional)
    assert isinstance(given, dict)
    return kind(**{key: _value(place, key, value, hints[key]) for key, value in given.items()})


def _value(place: str, key: str, value: object, kind: Any) -> object:
    if kind is str:
        if not isinstance(value, str):
            raise FormatError(f"{place}: {key} {show(value)}, expected a text")
        return value
    if kind in (int, float):
        return _number(place, key, value, kind)
    if isinstance(kind, UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
        return None if value is None else _fields(f"{place}: {key}", value, kind)
    if is_dataclass(kind):
        return _fields(f"{place}: {key}", value, kind)
    if not isinstance(value, dict) or not value:
        raise FormatError(f"{place}: {key} {show(value)}, expected sizes by name")
    return {name: _number(f"{place}: {key}", name, size, int) for name, size in value.items()}


def _number(place: str, key: str, value: object, kind: type) -> Any:
    allowed = (int, float) if kind is float else (int,)
    least = _AT_LEAST.get(key, 1 if kind is int else 1e-12)
    fits = isinstance(value, allowed) and not isinstance(value, bool)
    if not fits or not math.isfinite(value) or value < least:  # type: ignore[arg-type,operator]  # a number by now
        what = "a whole number" if kind is int else "a number"
        raise FormatError(f"{place}: {key} {show(value)}, expected {what} of at least {least}")
    return value


def _keys(place: str, given: object, known: tuple[str, ...], optional: set[str] | frozenset[str] = frozenset()) -> None:
    if not isinstance(given, dict):
        raise FormatError(f"{place}: {show(given)}, expected an object with {', '.join(known)}")
    for key in given:
        if key not in known:
            raise FormatError(f"{place}: key {show(key)} is unknown, expected {', '.join(known)}")
    for key in known:
        if key not in given and key not in optional:
            raise FormatError(f"{place}: no {key!r}, expected {', '.join(known)}")
