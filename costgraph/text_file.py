"""Safe file access: bounded reads of regular files, and atomic writes.

A path from outside may be anything, such as a pipe without a writer, an endless device, a folder or a huge file.
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
    """Return a path as named in error messages."""
    return shown(os.fspath(path) if isinstance(path, os.PathLike) else path, 200).strip("'")


def read_text(
    path: str | os.PathLike[str],
    place: str,
    most: int,
    expected: str = "a text file",
    error: type[CostGraphError] = FormatError,
) -> str:
    """Return the contents of a regular UTF-8 file with at most `most` bytes.

    Raises `error`, naming `place` and `expected`, if the file cannot be read, is not regular, is too large, or is not
    UTF-8.
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
    """Return the first `most` bytes of a regular file and its size; raise `error` for other files."""
    try:
        if not isinstance(path, str | os.PathLike):  # a number would be an open descriptor
            raise TypeError(f"a path of type {type(path).__name__}")
        # nonblocking, so that a pipe without a writer opens at once; the type is checked on the open file
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("no regular file")
            raw = stream.read(most)
            return raw, max(found.st_size, len(raw))  # some system files report size 0
    except (OSError, ValueError, TypeError) as wrong:
        raise error(f"{place}: {_reason(wrong)}, expected {expected}") from None


def target_of(path: str | os.PathLike[str], ending: str) -> Path:
    """Return the path of a file to write.

    Raises FormatError if it has another suffix, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix != ending:
        raise FormatError(f"{place_of(target)}: expected a path that ends in {ending}")
    if not target.parent.is_dir():
        raise FormatError(f"{place_of(target)}: no such folder, expected a file that can be written")
    return target


def write_file(path: str | os.PathLike[str], content: str | bytes, place: str | None = None) -> None:
    """Write a file atomically: readers see either the old or the new contents, even if the program is interrupted.

    A temporary file in the same folder replaces the target. An existing file keeps its permissions, and links are
    followed. Pipes, devices and the target of standard output are written directly. Raises FormatError, naming `place`,
    if writing fails; the old file then remains.
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
    """Whether to write directly: not a regular file, or the target of this program's output."""
    if not stat.S_ISREG(found.st_mode):
        return True
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return True
    return False


def _pour(path: str | os.PathLike[str], raw: bytes) -> None:
    # nonblocking, so that a pipe without a reader fails at once
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "wb") as stream:
        os.set_blocking(descriptor, True)
        stream.write(raw)


def _replace(target: Path, raw: bytes, before: os.stat_result | None) -> None:
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError("read-only")  # refuse although it could be replaced
    beside = target.with_name(f".{os.urandom(8).hex()}.costgraph")  # short, since names are limited
    access = 0o666 if before is None else 0o600  # private until it has the old permissions
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, access), "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        if before is not None:
            with suppress(PermissionError):  # only root may change the owner
                os.chown(beside, before.st_uid, before.st_gid)
            os.chmod(beside, stat.S_IMODE(before.st_mode))
        os.replace(beside, target)
    except BaseException:  # including Ctrl-C
        with suppress(OSError):
            beside.unlink()
        raise


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for JSON that raises ValueError for duplicate keys."""
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(k for k, n in Counter(k for k, _ in pairs).items() if n > 1)
        raise ValueError(f"key {shorten(twice)} twice in one object, expected it once")
    return data


def as_json(schema: str, data: Mapping[str, object]) -> str:
    """Format an object as JSON with its schema first; raises for infinity and NaN."""
    return json.dumps({"schema": schema, **data}, indent=2, allow_nan=False) + "\n"


def as_csv(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format rows as CSV below their column names."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return file.getvalue()
