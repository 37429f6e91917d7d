"""What a validation found, and its record in JSON: schema `costgraph/validation/1`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from ...algebra.symbols import shorten, shown
from ...errors import FormatError
from ...hardware.specs import Hardware, load_hardware
from ...hardware.tables import Column, Fact, Table
from ...notation.door import Rule
from ...notation.records import Size, one_of, read_fields, read_record
from ...text_file import read_text, target_of, write_file
from ..calibrating.spec import specification
from .rows import Failed, Row
from .table import Cells, bytes_and_flops, markdown, summary, times

__all__ = ["SCHEMA", "Validation"]

SCHEMA = "costgraph/validation/1"
"""What the JSON of this version calls itself; another number means other keys."""

_MOST_BYTES = 2**24
_FACTS = {"device": Annotated[str, one_of(("cpu", "cuda"))], "name": str, "torch": str, "date": str, "command": str,
          "threads": Size}  # fmt: skip


@dataclass(frozen=True)
class _Device:
    """Where the specification stands, and what it does not have."""

    specification: str
    cache_bytes: Size | None


@dataclass(frozen=True)
class _Record:
    """What a file holds."""

    schema: Annotated[str, Rule(repr(SCHEMA), SCHEMA.__eq__)]
    environment: Annotated[Mapping[str, str | int | bool], Rule("texts and whole numbers by name", bool)]
    hardware: _Device
    rows: Sequence[Row]
    failed: Sequence[Failed]


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
        from ...analysis.hooks import plotter

        drawn: list[Path] = plotter("validation")(self, directory)
        return drawn

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record, and beside it the specification that times are held to, with `.toml` at its end.

        Raises
        ------
        FormatError
            If the path does not end in `.json`, or cannot be written.
        """
        target = target_of(path, ".json")
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
    record = read_record(place, data, _Record)
    of, spec = record.environment, path.with_suffix(".toml")
    read_fields(f"{place}: environment", {key: of[key] for key in _FACTS if key in of}, _FACTS)
    if record.hardware.specification != spec.name:
        found = shown(record.hardware.specification)
        raise FormatError(f"{place}: hardware: specification {found}, expected the file beside the record")
    return Validation(of, load_hardware(spec), record.hardware.cache_bytes, tuple(record.rows), tuple(record.failed))


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text}, which is no number of JSON")
