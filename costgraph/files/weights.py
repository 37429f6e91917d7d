"""What a checkpoint holds, read from the headers of its files: names, shapes, formats and bytes, and no data.

A safetensors file begins with the length of its header in 8 bytes, little-endian, and the header, a JSON object of
`dtype`, `shape` and `data_offsets` for each tensor; the data follow without a gap
(https://huggingface.co/docs/safetensors, "Format"). An index names the file of each tensor of a model in several files.
GGUF is read beside.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from ..algebra.symbols import shorten, shown
from ..errors import FormatError
from ..hardware.tables import Column, Fact, Table
from ..notation.door import guarded
from ..text_file import place_of, read_start, read_text, unique
from .gguf import read_gguf

__all__ = ["Weight", "Weights", "read_weights"]

#: Bytes of a header or an index: of the largest models they have 10 MB.
_LARGEST = 2**24
_MOST_FILES = 2**12
_MOST = 2**63 - 1

#: Formats by the words of a file: as the library names them where it has them, and bits of an element.
_FORMATS = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64), "F16": ("fp16", 16),
    "BF16": ("bf16", 16), "F32": ("fp32", 32), "F64": ("fp64", 64), "C64": ("complex64", 64),
    "F8_E4M3": ("fp8_e4m3", 8), "F8_E5M2": ("fp8_e5m2", 8), "F8_E8M0": ("fp8_e8m0", 8),
    "F8_E4M3FNUZ": ("fp8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("fp8_e5m2fnuz", 8), "F4": ("fp4_e2m1", 4),
    "F6_E2M3": ("fp6_e2m3", 6), "F6_E3M2": ("fp6_e3m2", 6),
}  # fmt: skip


@guarded()
@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint."""

    name: str
    """as the file has it"""
    shape: tuple[int, ...]
    """sizes of its axes, as the file has them"""
    format: str
    """number format, by the library's name where it has it"""
    bytes: int
    """bytes that it takes in the file"""

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)


@guarded()
@dataclass(frozen=True, repr=False)
class Weights(Table):
    """What a checkpoint holds: a table of its tensors, with their number, elements and bytes below."""

    rows: tuple[Weight, ...]
    """one for each tensor"""
    place: str = ""
    """where it was read"""

    @property
    def elements(self) -> int:
        """How many elements all tensors have."""
        return sum(r.elements for r in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, headers left out."""
        return sum(r.bytes for r in self.rows)

    def by_format(self) -> dict[str, int]:
        """Return the bytes of each number format."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.format] += row.bytes
        return dict(found)

    def _about(self) -> str:
        return f"{self.place}: {len(self.rows)} tensors"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("name"),
            Column("shape", text=str),
            Column("format"),
            Column("elements", "1"),
            Column("bytes", "B"),
        )

    def _facts(self) -> Iterator[Fact]:
        yield Fact("tensors", len(self.rows), "1")
        yield Fact("elements", self.elements, "1")
        yield Fact("bytes", self.bytes, "B")
        for name, count in self.by_format().items():
            yield Fact(f"  {name}", count, "B")


def read_weights(path: str | os.PathLike[str]) -> Weights:
    """Read which tensors a checkpoint holds, from its headers alone.

    Parameters
    ----------
    path : str or path-like
        A safetensors file, the index of several (`model.safetensors.index.json`), a folder with one of the two, or a
        GGUF file.

    Returns
    -------
    Weights
        `.rows`, `.elements`, `.bytes`, `.by_format()`; `print` it.

    Raises
    ------
    FormatError
        If a file cannot be read, its header is not what the format says or longer than 16 MiB (64 MiB of
        GGUF), tensors overlap, leave a
        gap or do not fill the file, or files and index name different tensors: the text says which.

    Examples
    --------
    >>> import json, tempfile
    >>> from pathlib import Path
    >>> import costgraph as cg
    >>> header = json.dumps({"up.weight": {"dtype": "BF16", "shape": [7, 5], "data_offsets": [0, 70]}}).encode()
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> _ = file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(70))
    >>> found = cg.read_weights(file)
    >>> found.elements, found.bytes, found.rows[0].format
    (35, 70, 'bf16')
    """
    place = place_of(path)
    if not isinstance(path, str | os.PathLike):
        raise FormatError(f"read_weights of {type(path).__name__}, expected a path")
    file = _in_folder(path, place) if os.path.isdir(path) else os.fspath(path)
    read = _index if file.endswith(".json") else _gguf if file.lower().endswith(".gguf") else _safetensors
    return Weights(tuple(read(file)), place)


def _in_folder(path: str | os.PathLike[str], place: str) -> str:
    names = ("model.safetensors.index.json", "model.safetensors")
    found = [file for name in names if os.path.exists(file := os.path.join(os.fspath(path), name))]
    if not found:
        raise FormatError(f"{place}: a folder without weights, expected one of {', '.join(names)} in it")
    return found[0]


def _gguf(path: str) -> list[Weight]:
    return [Weight(t.name, t.shape, t.format, t.bytes) for t in read_gguf(path).tensors]


# -- one file ----------------------------------------------------------------------------------------------------


def _safetensors(path: str) -> list[Weight]:
    place, expected = place_of(path), "a safetensors file"
    start, size = read_start(path, place, 8, expected)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(_LARGEST, size - 8):
        raise FormatError(
            f"{place}: a header of {length} bytes in a file of {size}, expected {expected}, and {_LARGEST} at most"
        )
    raw, _ = read_start(path, place, 8 + length, expected)
    try:
        header = _object(raw[8:].decode("utf-8"), place)
    except UnicodeDecodeError as wrong:
        raise FormatError(f"{place}: byte {8 + wrong.start} is no UTF-8, expected a header in JSON") from None
    placed = [_entry(name, data, place) for name, data in header.items() if name != "__metadata__"]
    at = 0
    for weight, begin, end in sorted(placed, key=lambda p: p[1:]):
        if begin != at or end - begin != weight.bytes:
            raise FormatError(
                f"{place}: {shorten(weight.name)} has bytes {begin} to {end}, expected {at} to {at + weight.bytes}: "
                f"{weight.format} of shape {shown(weight.shape)}, and no gap"
            )
        at = end
    if at != size - 8 - length:
        raise FormatError(f"{place}: {size - 8 - length} bytes of data, expected the {at} of its header")
    return [weight for weight, _, _ in placed]


def _entry(name: str, data: Any, place: str) -> tuple[Weight, int, int]:
    """Return a tensor of a header, and where its data begin and end."""
    right = isinstance(data, Mapping) and data.keys() == {"dtype", "shape", "data_offsets"}
    fields: Mapping[str, Any] = data if right else {}
    word, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    format_, bits = _FORMATS.get(word, ("", 0)) if isinstance(word, str) else ("", 0)
    if not bits or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or prod(shape) > _MOST:
        raise FormatError(
            f"{place}: {shorten(name)} is {shown(data)}, expected a dtype of {', '.join(_FORMATS)}, a shape and two "
            f"data_offsets"
        )
    return Weight(name, tuple(shape), format_, -(-prod(shape) * bits // 8)), offsets[0], offsets[1]


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n <= _MOST for n in value)


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: {shown(str(error), 200)}, expected JSON") from None
    if not isinstance(data, dict):
        raise FormatError(f"{place}: {shown(data)}, expected an object")
    return data


# -- several files -----------------------------------------------------------------------------------------------


def _index(path: str) -> list[Weight]:
    place = place_of(path)
    listed = _object(read_text(path, place, _LARGEST, "the index of a checkpoint"), place).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
        raise FormatError(f"{place}: weight_map is {shown(listed)}, expected the name of a file for each tensor")
    files = dict.fromkeys(listed.values())
    odd = next((f for f in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", f, re.ASCII)), None)
    if odd is not None or len(files) > _MOST_FILES:
        wrong = f"{len(files)} files" if odd is None else shorten(odd)
        raise FormatError(f"{place}: {wrong}, expected up to {_MOST_FILES} safetensors files of the same folder")
    folder, found = os.path.dirname(path), []
    for file in files:
        held = _safetensors(os.path.join(folder, file))
        if odd := {w.name for w in held} ^ {name for name, of in listed.items() if of == file}:
            raise FormatError(f"{place}: {shorten(min(odd))} is in {file} or named by the index alone, expected both")
        found += held
    return found
