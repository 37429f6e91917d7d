"""Checkpoint headers: tensor names, shapes, dtypes and bytes from safetensors and GGUF files, without the data.

A safetensors file starts with the header length (8 bytes, little-endian) and the header, a JSON object with
`dtype`, `shape` and `data_offsets` per tensor; the data follow without gaps (https://huggingface.co/docs/safetensors,
"Format"). An index maps each tensor of a sharded checkpoint to its file.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

from ..algebra.symbols import shorten, shown
from ..errors import FormatError
from ..hardware.tables import Column, Fact, Table
from ..notation.validation import guarded
from ..text_file import place_of, read_start, read_text, unique

__all__ = [
    "FILE_TYPES",
    "FORMATS",
    "Gguf",
    "StoredTensor",
    "read_gguf",
    "Weight",
    "Weights",
    "read_weights",
]


# -- GGUF --------------------------------------------------------------------------------------------------------------
# Little-endian: counts of tensors and metadata fields, the fields, the tensor infos with sizes from the fastest axis
# on, and the data, with each tensor at a multiple of the alignment
# (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The gguf package is not used, as it maps whole files into
# memory and creates an array for each vocabulary entry.

#: Header limit in bytes: vocabularies with 260,000 words take about 10 MB.
_MAX_HEADER_BYTES = 2**26
_MAX_DIMS, _MOST = 8, 2**63 - 1
_EXPECTED = "a GGUF file"

#: Formats by number (ggml.h, `ggml_type`): name, as in `costgraph.dtypes` if there, elements and bytes of a block.
FORMATS = {
    0: ("fp32", 1, 4), 1: ("fp16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("int8", 1, 1), 25: ("int16", 1, 2), 26: ("int32", 1, 4), 27: ("int64", 1, 8), 28: ("fp64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17), 40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
}  # fmt: skip

#: Dtype or mixture of the matrices by `general.file_type` (llama.h, `llama_ftype`).
FILE_TYPES = {
    0: "fp32", 1: "fp16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "bf16",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a GGUF file; the shape is outermost axis first, as in torch."""

    name: str
    shape: tuple[int, ...]
    format: str
    bytes: int


@dataclass(frozen=True)
class Gguf:
    """GGUF header: scalar fields, lengths of array fields, and tensors."""

    fields: Mapping[str, Any]
    lengths: Mapping[str, int]
    tensors: tuple[StoredTensor, ...]


class _Reader:
    """Cursor over the header bytes."""

    def __init__(self, raw: bytes, place: str) -> None:
        self.raw, self.place, self.position = raw, place, 0

    def skip(self, size: int) -> int:
        start, self.position = self.position, self.position + size
        if self.position > len(self.raw):
            raise FormatError(
                f"{self.place}: {size} bytes needed at byte {start} of {len(self.raw)}, expected {_EXPECTED} with "
                f"a complete header of at most {_MAX_HEADER_BYTES} bytes"
            )
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self.raw, self.skip(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        try:
            return self.raw[start : start + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.place}: byte {start + error.start} is not valid UTF-8, expected text") from None

    def value(self, kind: int, place: str) -> Any:
        if kind not in _SCALARS and kind != _STRING:
            raise FormatError(f"{place}: type {kind}, expected a GGUF type")
        return self.text() if kind == _STRING else self.number(_SCALARS[kind])

    def length(self, place: str) -> int:
        """Skip an array and return its length."""
        element_type, count = self.number("I"), self.number("Q")
        if element_type in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[element_type]}"))
        elif element_type == _STRING:
            for _ in range(count):  # each takes at least 8 bytes
                self.skip(self.number("Q"))
        else:
            raise FormatError(f"{place}: an array of type {element_type}, expected numbers or strings")
        return int(count)


def read_gguf(path: str) -> Gguf:
    """Read a GGUF header.

    Raise FormatError if it cannot be read or violates the format; the message says where.
    """
    place = place_of(path)
    raw, size = read_start(path, place, _MAX_HEADER_BYTES, _EXPECTED)
    reader = _Reader(raw, place)
    if not raw.startswith(b"GGUF"):
        raise FormatError(f"{place}: begins with {shown(raw[:4])}, expected {_EXPECTED}")
    reader.skip(4)
    version = reader.number("I")
    if version not in (2, 3):
        raise FormatError(f"{place}: version {version}, expected 2 or 3, little-endian")
    tensors, fields = reader.number("Q"), reader.number("Q")
    scalars, lengths = dict[str, Any](), dict[str, int]()
    for _ in range(fields):  # each takes at least 12 bytes, as does a tensor
        name, kind = reader.text(), reader.number("I")
        if name in scalars or name in lengths:
            raise FormatError(f"{place}: {shorten(name)} occurs twice, expected once")
        if kind == _ARRAY:
            lengths[name] = reader.length(f"{place}: {shorten(name)}")
        else:
            scalars[name] = reader.value(kind, f"{place}: {shorten(name)}")
    tensor_starts = [_tensor(reader) for _ in range(tensors)]
    _check_offsets(tensor_starts, scalars, reader.position, size, place)
    return Gguf(scalars, lengths, tuple(t for t, _ in tensor_starts))


def _tensor(reader: _Reader) -> tuple[StoredTensor, int]:
    name, dims = reader.text(), reader.number("I")
    place = f"{reader.place}: {shorten(name)}"
    if dims > _MAX_DIMS:
        raise FormatError(f"{place}: {dims} axes, expected at most {_MAX_DIMS}")
    shape = [reader.number("Q") for _ in range(dims)]
    kind, start = reader.number("I"), reader.number("Q")
    format_, elements, size = FORMATS.get(kind, ("", 1, 0))
    if not format_ or prod(shape) > _MOST or (shape or [1])[0] % elements:
        raise FormatError(
            f"{place}: type {kind} of sizes {shown(shape)}, expected a known type and a first size divisible by "
            f"{elements}"
        )
    return StoredTensor(name, tuple(reversed(shape)), format_, prod(shape) // elements * size), start


def _check_offsets(
    tensor_starts: list[tuple[StoredTensor, int]], fields: Mapping[str, Any], end: int, size: int, place: str
) -> None:
    """Raise FormatError if tensors share a name, overlap, or exceed the file."""
    step = fields.get("general.alignment", 32)
    if type(step) is not int or not 0 < step <= _MAX_HEADER_BYTES:
        raise FormatError(f"{place}: general.alignment is {shown(step)}, expected a number of bytes")
    if len({t.name for t, _ in tensor_starts}) < len(tensor_starts):
        raise FormatError(f"{place}: two tensors have the same name, expected unique names")
    data_start, free_from = -(-end // step) * step, 0
    for tensor, start in sorted(tensor_starts, key=lambda p: (p[1], p[0].bytes)):
        if start % step or start < free_from or data_start + start + tensor.bytes > size:
            raise FormatError(
                f"{place}: {shorten(tensor.name)} has {tensor.bytes} bytes at offset {start}, expected a multiple of "
                f"{step} of at least {free_from}, and an end within the file of {size} bytes"
            )
        free_from = start + tensor.bytes


# -- safetensors -------------------------------------------------------------------------------------------------------

#: Header and index limit in bytes: headers of the largest models take 10 MB.
_MAX_SAFETENSORS_HEADER = 2**24
_MOST_FILES = 2**12

#: Formats by safetensors dtype: name, as in `costgraph.dtypes` if there, and bits per element.
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
    """Checkpoint tensor."""

    name: str
    """name in the file"""
    shape: tuple[int, ...]
    """shape in the file"""
    format: str
    """dtype, as in `costgraph.dtypes` if there"""
    bytes: int
    """bytes in the file"""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@guarded()
@dataclass(frozen=True, repr=False)
class Weights(Table):
    """Table of checkpoint tensors, with total tensors, elements and bytes."""

    rows: tuple[Weight, ...]
    """one row per tensor"""
    place: str = ""
    """path that was read"""

    @property
    def elements(self) -> int:
        """Number of elements in all tensors."""
        return sum(r.elements for r in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes in all tensors, without headers."""
        return sum(r.bytes for r in self.rows)

    def by_format(self) -> dict[str, int]:
        """Return the bytes per dtype."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals[row.format] += row.bytes
        return dict(totals)

    def _description(self) -> str:
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
    """List a checkpoint's tensors, from its headers only.

    Parameters
    ----------
    path : str or path-like
        A safetensors file, a sharded checkpoint's index (`model.safetensors.index.json`), a folder with either, or
        a GGUF file.

    Returns
    -------
    Weights
        `.rows`, `.elements`, `.bytes`, `.by_format()`; `print` it.

    Raises
    ------
    FormatError
        If a file cannot be read, its header is invalid or longer than 16 MiB (64 MiB for GGUF), tensors overlap, leave
        a gap or do not fill the file, or files and index disagree; the message says which.

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
    existing = [file for name in names if os.path.exists(file := os.path.join(os.fspath(path), name))]
    if not existing:
        raise FormatError(f"{place}: no weights in this folder, expected one of {', '.join(names)}")
    return existing[0]


def _gguf(path: str) -> list[Weight]:
    return [Weight(t.name, t.shape, t.format, t.bytes) for t in read_gguf(path).tensors]


def _safetensors(path: str) -> list[Weight]:
    place, expected = place_of(path), "a safetensors file"
    start, size = read_start(path, place, 8, expected)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(_MAX_SAFETENSORS_HEADER, size - 8):
        raise FormatError(
            f"{place}: a header of {length} bytes in a file of {size}, expected {expected} with a header of at most "
            f"{_MAX_SAFETENSORS_HEADER} bytes"
        )
    raw, _ = read_start(path, place, 8 + length, expected)
    try:
        header = _object(raw[8:].decode("utf-8"), place)
    except UnicodeDecodeError as error:
        raise FormatError(f"{place}: byte {8 + error.start} is not valid UTF-8, expected a header in JSON") from None
    entries = [_entry(name, data, place) for name, data in header.items() if name != "__metadata__"]
    offset = 0
    for weight, begin, end in sorted(entries, key=lambda p: p[1:]):
        if begin != offset or end - begin != weight.bytes:
            raise FormatError(
                f"{place}: {shorten(weight.name)} has bytes {begin} to {end}, expected {offset} to "
                f"{offset + weight.bytes}: {weight.format} of shape {shown(weight.shape)}, and no gap"
            )
        offset = end
    if offset != size - 8 - length:
        raise FormatError(f"{place}: {size - 8 - length} bytes of data, expected {offset} according to the header")
    return [weight for weight, _, _ in entries]


def _entry(name: str, data: Any, place: str) -> tuple[Weight, int, int]:
    """Return a tensor from a header, with the begin and end of its data."""
    valid = isinstance(data, Mapping) and data.keys() == {"dtype", "shape", "data_offsets"}
    fields: Mapping[str, Any] = data if valid else {}
    dtype_name, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    format_, bits = _FORMATS.get(dtype_name, ("", 0)) if isinstance(dtype_name, str) else ("", 0)
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


def _index(path: str) -> list[Weight]:
    place = place_of(path)
    weight_map = _object(read_text(path, place, _MAX_SAFETENSORS_HEADER, "the index of a checkpoint"), place).get(
        "weight_map"
    )
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError(f"{place}: weight_map is {shown(weight_map)}, expected the name of a file for each tensor")
    files = dict.fromkeys(weight_map.values())
    unexpected = next((f for f in files if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", f, re.ASCII)), None)
    if unexpected is not None or len(files) > _MOST_FILES:
        problem = f"{len(files)} files" if unexpected is None else shorten(unexpected)
        raise FormatError(f"{place}: {problem}, expected up to {_MOST_FILES} safetensors files in the same folder")
    folder, weights = os.path.dirname(path), []
    for file in files:
        shard_weights = _safetensors(os.path.join(folder, file))
        if unexpected := {w.name for w in shard_weights} ^ {
            name for name, shard_file in weight_map.items() if shard_file == file
        }:
            raise FormatError(
                f"{place}: {shorten(min(unexpected))} is only in {file} or only in the index, expected it in both"
            )
        weights += shard_weights
    return weights
