"""What a GGUF file says of itself before its data: fields, and the name, shape, format and place of each tensor.

The format is little-endian: a count of tensors and of fields, the fields, the tensors with their sizes from the fastest
axis on, and the data behind, each tensor at a multiple of the alignment
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). It is read here, as the package of that name maps whole
files into memory and makes an array of each word of a vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..algebra.symbols import shorten, shown
from ..errors import FormatError
from ..text_file import place_of, read_start

__all__ = ["FILE_TYPES", "FORMATS", "Gguf", "Stored", "read_gguf"]

#: Bytes of all that stands before the data: vocabularies of 260,000 words take some 10 MB.
_LARGEST = 2**26
_MOST_DIMS, _MOST = 8, 2**63 - 1
_EXPECTED = "a GGUF file"

#: Formats by their numbers (ggml.h, `ggml_type`): a name, the library's where it has it, and elements and bytes of a
#: block.
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

#: What `general.file_type` says of all matrices (llama.h, `llama_ftype`): a float format, or a mixture.
FILE_TYPES = {
    0: "fp32", 1: "fp16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "bf16",
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its shape as torch has it, outermost axis first."""

    name: str
    shape: tuple[int, ...]
    format: str
    bytes: int


@dataclass(frozen=True)
class Gguf:
    """Fields, of those that are arrays their lengths alone, and tensors."""

    fields: Mapping[str, Any]
    lengths: Mapping[str, int]
    tensors: tuple[Stored, ...]


class _Reader:
    """The bytes before the data, from which one thing after the other is taken."""

    def __init__(self, raw: bytes, place: str) -> None:
        self.raw, self.place, self.at = raw, place, 0

    def skip(self, size: int) -> int:
        start, self.at = self.at, self.at + size
        if self.at > len(self.raw):
            raise FormatError(
                f"{self.place}: {size} more bytes at byte {start} of {len(self.raw)}, expected {_EXPECTED} whose "
                f"header ends, and before byte {_LARGEST}"
            )
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self.raw, self.skip(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        size = self.number("Q")
        start = self.skip(size)
        try:
            return self.raw[start : start + size].decode("utf-8")
        except UnicodeDecodeError as wrong:
            raise FormatError(f"{self.place}: byte {start + wrong.start} is no UTF-8, expected a text") from None

    def value(self, kind: int, place: str) -> Any:
        if kind not in _SCALARS and kind != _STRING:
            raise FormatError(f"{place}: type {kind}, expected one of GGUF's")
        return self.text() if kind == _STRING else self.number(_SCALARS[kind])

    def length(self, place: str) -> int:
        """Skip an array and return its length."""
        of, count = self.number("I"), self.number("Q")
        if of in _SCALARS:
            self.skip(count * struct.calcsize(f"<{_SCALARS[of]}"))
        elif of == _STRING:
            for _ in range(count):  # each takes 8 bytes at least
                self.skip(self.number("Q"))
        else:
            raise FormatError(f"{place}: an array of type {of}, expected numbers or texts")
        return int(count)


def read_gguf(path: str) -> Gguf:
    """Read what stands before the data of a file.

    FormatError if it cannot be read, or is not as the format says: the text says where.
    """
    place = place_of(path)
    raw, size = read_start(path, place, _LARGEST, _EXPECTED)
    reader = _Reader(raw, place)
    if not raw.startswith(b"GGUF"):
        raise FormatError(f"{place}: begins with {shown(raw[:4])}, expected {_EXPECTED}")
    reader.skip(4)
    version = reader.number("I")
    if version not in (2, 3):
        raise FormatError(f"{place}: version {version}, expected 2 or 3, little-endian")
    tensors, fields = reader.number("Q"), reader.number("Q")
    found, lengths = dict[str, Any](), dict[str, int]()
    for _ in range(fields):  # each takes 12 bytes at least, as a tensor does
        name, kind = reader.text(), reader.number("I")
        if name in found or name in lengths:
            raise FormatError(f"{place}: {shorten(name)} twice, expected it once")
        if kind == _ARRAY:
            lengths[name] = reader.length(f"{place}: {shorten(name)}")
        else:
            found[name] = reader.value(kind, f"{place}: {shorten(name)}")
    placed = [_tensor(reader) for _ in range(tensors)]
    _check_places(placed, found, reader.at, size, place)
    return Gguf(found, lengths, tuple(t for t, _ in placed))


def _tensor(reader: _Reader) -> tuple[Stored, int]:
    name, dims = reader.text(), reader.number("I")
    place = f"{reader.place}: {shorten(name)}"
    if dims > _MOST_DIMS:
        raise FormatError(f"{place}: {dims} axes, expected {_MOST_DIMS} at most")
    shape = [reader.number("Q") for _ in range(dims)]
    kind, start = reader.number("I"), reader.number("Q")
    format_, elements, size = FORMATS.get(kind, ("", 1, 0))
    if not format_ or prod(shape) > _MOST or (shape or [1])[0] % elements:
        raise FormatError(
            f"{place}: type {kind} of sizes {shown(shape)}, expected a known type, and whole blocks of {elements} first"
        )
    return Stored(name, tuple(reversed(shape)), format_, prod(shape) // elements * size), start


def _check_places(placed: list[tuple[Stored, int]], fields: Mapping[str, Any], end: int, size: int, place: str) -> None:
    """Refuse tensors of one name, on top of each other, or outside the file."""
    step = fields.get("general.alignment", 32)
    if type(step) is not int or not 0 < step <= _LARGEST:
        raise FormatError(f"{place}: general.alignment is {shown(step)}, expected a number of bytes")
    if len({t.name for t, _ in placed}) < len(placed):
        raise FormatError(f"{place}: two tensors of one name, expected one")
    first, at = -(-end // step) * step, 0
    for tensor, start in sorted(placed, key=lambda p: (p[1], p[0].bytes)):
        if start % step or start < at or first + start + tensor.bytes > size:
            raise FormatError(
                f"{place}: {shorten(tensor.name)} has {tensor.bytes} bytes from {start} on, expected a multiple of "
                f"{step} that is {at} or more, and the end within the file of {size}"
            )
        at = start + tensor.bytes
