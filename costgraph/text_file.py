"""The only place where a file is read or written: what is read has an end, and what is written is there whole or not.

A path from outside may be anything: a pipe that nobody writes to, a device without an end, a folder, a huge file.
"""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .algebra.symbols import shorten, shown
from .errors import CostGraphError, FormatError

__all__ = ["as_csv", "as_json", "place_of", "read_start", "read_text", "target_of", "unique", "write_file"]


def place_of(path: object) -> str:
    """Return a path as error texts name it."""
    return shown(os.fspath(path) if isinstance(path, os.PathLike) else path, 200).strip("'")


def read_text(
    path: str | os.PathLike[str],
    place: str,
    most: int,
    expected: str = "a text file",
    error: type[CostGraphError] = FormatError,
) -> str:
    """Return what a regular file of UTF-8, of `most` bytes at the most, or a link to one holds.

    An error of the kind given if it cannot be read, is no such file, larger, or no UTF-8: its text says `place`, and
    what was `expected` in its place.
    """
    raw, size = read_start(path, place, most + 1, expected, error)
    if size > most:
        raise error(f"{place}: more than {most} bytes, expected {expected}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as found:
        raise error(f"{place}: byte {found.start} is no UTF-8, expected {expected}") from None


def read_start(
    path: str | os.PathLike[str], place: str, most: int, expected: str, error: type[CostGraphError] = FormatError
) -> tuple[bytes, int]:
    """Return the first bytes of a regular file, `most` of them, and how many it has; an error if it is none."""
    try:
        if not isinstance(path, str | os.PathLike):  # a number would be a descriptor that is open
            raise TypeError(f"a path of type {type(path).__name__}")
        # a pipe is opened at once, whether or not somebody writes to it; what it is, is asked of what was opened
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("no regular file")
            raw = stream.read(most)
            return raw, max(found.st_size, len(raw))  # some files of the system say that they have none
    except (OSError, ValueError, TypeError) as wrong:
        raise error(f"{place}: {_reason(wrong)}, expected {expected}") from None


def target_of(path: str | os.PathLike[str], ending: str) -> Path:
    """Return the path of a file that is to be written.

    FormatError if it has another ending, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix != ending:
        raise FormatError(f"{place_of(target)}: expected a path that ends in {ending}")
    if not target.parent.is_dir():
        raise FormatError(f"{place_of(target)}: no such folder, expected a file that can be written")
    return target


def write_file(path: str | os.PathLike[str], content: str | bytes, place: str | None = None) -> None:
    """Write a file so that whoever looks sees the one before or this one, whole, whenever the program ends.

    It is written beside its place and put there at once. An existing one keeps its permissions, and a link is followed.
    A pipe, a device, and the file that the standard output goes to, are written to as they are. FormatError, which
    calls it by `place`, if it cannot be written: the one before is still there then.
    """
    try:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"a path of type {type(path).__name__}")
        raw = content.encode("utf-8") if isinstance(content, str) else content
        target = Path(os.path.realpath(path))
        before = None
        with suppress(FileNotFoundError):
            before = target.stat()
        if before is not None and _is_stream(before):
            _pour(path, raw)
        else:
            _replace(target, raw, before)
    except (OSError, ValueError, TypeError) as found:
        raise FormatError(f"{place or place_of(path)}: {_reason(found)}, expected a file that can be written") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _is_stream(found: os.stat_result) -> bool:
    """Whether there is nothing to replace: no regular file, or one that this program's own output goes to."""
    if not stat.S_ISREG(found.st_mode):
        return True
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return True
    return False


def _pour(path: str | os.PathLike[str], raw: bytes) -> None:
    # a pipe that nobody reads is refused at once, instead of waited for
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "wb") as stream:
        os.set_blocking(descriptor, True)
        stream.write(raw)


def _replace(target: Path, raw: bytes, before: os.stat_result | None) -> None:
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError("read-only")  # on purpose, though it could be replaced
    beside = target.with_name(f".{os.urandom(8).hex()}.costgraph")  # short: the target's may be as long as names can be
    access = 0o666 if before is None else 0o600  # nobody else's until it has the permissions of the one before
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, access), "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        if before is not None:
            with suppress(PermissionError):  # only root may give a file to somebody
                os.chown(beside, before.st_uid, before.st_gid)
            os.chmod(beside, stat.S_IMODE(before.st_mode))
        os.replace(beside, target)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            beside.unlink()
        raise


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as its `object_pairs_hook`; ValueError where a key stands twice."""
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"key {shorten(twice)} twice in one object, expected it once")
    return data


def as_json(schema: str, data: Mapping[str, object]) -> str:
    """Return an object as JSON for people and programs, its schema first; infinity and NaN are none."""
    return json.dumps({"schema": schema, **data}, indent=2, allow_nan=False) + "\n"


def as_csv(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV below the names of their columns."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return file.getvalue()
