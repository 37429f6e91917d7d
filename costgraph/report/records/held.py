"""A file of records held to predictions: every record a row, ratios by family and device, and limits."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median, quantiles

from ...hardware.tables import Column, Fact, Table
from ...text_file import target_of, write_file
from . import generation, kernels, models, recurrent, traced, training  # noqa: F401  # families register themselves
from .limits import LIMITS, Limit
from .predicting import Row, predict
from .record import column, last_digits, read_records

__all__ = ["Group", "Held", "hold"]

SCHEMA = "costgraph/held/1"
"""What the JSON of this version calls itself; another number means other keys."""


@dataclass(frozen=True)
class Group:
    """What the records of one family on one device come to."""

    family: str
    device: str
    rows: int
    """records"""
    predicted: int
    """those of them with a prediction"""
    violations: int
    """times below the lower bound"""
    p10: float | None
    """measured over estimate: what a tenth is below"""
    median: float | None
    p90: float | None


def spread(ratios: Sequence[float]) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return what a tenth, a half and nine tenths of some numbers are below; None of none."""
    if len(ratios) < 2:
        return (ratios[0],) * 3 if ratios else (None,) * 3
    tenths = quantiles(ratios, n=10, method="inclusive")
    return tenths[0], median(ratios), tenths[-1]


@dataclass(frozen=True, repr=False)
class Held(Table):
    """Records of measurements and what is predicted of each.

    `.rows` are the families by device, `.records` a row for each record, `.save(path)` writes all of it as JSON.
    """

    name: str
    """of the file"""
    records: tuple[Row, ...]
    """in the order of the file"""

    @cached_property
    def rows(self) -> tuple[Group, ...]:
        """Families by device, in the order of the file."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.records:
            groups.setdefault((row.record.family, row.record.device), []).append(row)
        return tuple(_group(*key, found) for key, found in groups.items())

    @cached_property
    def reasons(self) -> Mapping[tuple[str, str], int]:
        """How many records of a family are not predicted, by family and reason."""
        return Counter((row.record.family, row.reason) for row in self.records if row.reason)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What is asked of the whole file, and whether it holds."""
        return tuple(found for ask in LIMITS for found in ask(self.records))

    @property
    def holds(self) -> bool:
        """Whether all limits hold."""
        return all(limit.holds for limit in self.limits)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every record with its prediction, or the reason that there is none, as JSON.

        Raises
        ------
        FormatError
            If the file cannot be written, or does not end in .json.
        """
        whole = {
            "schema": SCHEMA, "records": self.name, "limits": [limit.facts() for limit in self.limits],
            "rows": [_facts(row) for row in self.records],
        }  # fmt: skip
        write_file(target_of(path, ".json"), json.dumps(whole, indent=1) + "\n")

    def _about(self) -> str:
        return f"{len(self.records)} records of {self.name}"

    def _columns(self) -> Sequence[Column]:
        def ratio(value: float | None) -> str:
            return "" if value is None else f"{value:.2f}"

        return (
            *map(Column, ("family", "device")), Column("rows", "1"), Column("predicted", "1"),
            Column("violations", "1", title="below bound"),
            *(Column(name, "1", text=ratio) for name in ("p10", "median", "p90")),
        )  # fmt: skip

    def _facts(self) -> Iterable[Fact]:
        return [Fact("holds" if limit.holds else "fails", str(limit)) for limit in self.limits]


def _group(family: str, device: str, rows: Sequence[Row]) -> Group:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    counts = (len(rows), sum(not row.reason for row in rows), sum(row.violated for row in rows))
    return Group(family, device, *counts, *spread(ratios))


def _facts(row: Row) -> dict[str, object]:
    """Return what a row says, by name: what it has nothing to say of left out."""
    own = {
        name: getattr(row, name)
        for name in ("subject", "reason", "seconds", "estimate", "bound", "printed", "bytes", "peak")
    }
    found = {name: value for name, value in own.items() if value not in (None, "")}
    more = {"violated": True} if row.violated else {}
    return {"id": row.record.id, **found, **more} | ({"notes": list(row.notes)} if row.notes else {})


def hold(path: str | os.PathLike[str]) -> Held:
    """Predict every record of a file.

    Parameters
    ----------
    path : str or path-like
        JSON, as `read_records` reads it.

    Returns
    -------
    Held
        A row for each record: a prediction, or the reason that there is none.

    Raises
    ------
    FormatError
        If the file cannot be read, or is no list of records.
    """
    found = read_records(path)
    last = last_digits(found)
    # a list first: a trace looks at all that refers to tensors, and a tuple that is still made may not be looked at
    rows = [predict(record, last[column(record)]) for record in found]
    return Held(os.path.basename(os.fspath(path)), tuple(rows))
