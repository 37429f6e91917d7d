"""Formats by their names, those with scales added to them too; the common format of two operands; bits an element.

The result of two formats is torch's, from ``torch.promote_types``, where torch has one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from costgraph.algebra.symbols import shown
from costgraph.errors import FormatError

from .known import ALIASES, DTYPES
from .record import KINDS, BlockScale, DType

__all__ = ["bits_per_element", "dtype", "promote"]

_SHARED = r"(?:g([1-9]\d{0,6})|row|b([1-9]\d{0,6})x([1-9]\d{0,6}))"
_MORE = r"(_zero(?:_(?:fp32|fp16|bf16))?)?(_flat)?(?:_pad([1-9]\d{0,4})x([1-9]\d{0,4}))?"
_SCALED = re.compile(rf"(\w+?)_{_SHARED}_(fp32|fp16|bf16|fp8_e4m3|fp8_e8m0){_MORE}", re.ASCII)


@lru_cache(maxsize=1 << 10)
def _scaled(name: str) -> DType | None:
    """Return the format that such a name stands for: integers or floats of 8 bits and fewer with scales added."""
    found = _SCALED.fullmatch(name)
    own = found and DTYPES.get(ALIASES.get(found[1], found[1]))
    if found is None or own is None or own.bits > 8 or own.scale or own.kind == "bool" or own.name == "fp8_e8m0":
        return None
    group, high, wide, scale, zero, flat, along, across = found.groups()[1:]
    per, rows = int(group or wide or 0), int(high or 1)
    if (zero and own.kind != "int") or (flat and not group):
        return None
    shared = [DTYPES[scale], *([DTYPES[zero[6:]] if zero[6:] else own] if zero else [])]
    scales = tuple(BlockScale(d.bits, per, d.name, rows, flat=bool(flat)) for d in shared)
    whole = own.name + name.removeprefix(found[1])
    return replace(own, name=whole, scale=scales, element=own.name, padded=(int(along or 1), int(across or 1)))


def dtype(name_or_dtype: object) -> DType:
    """Return the format of that name; a format is returned as it is.

    A format of 8 bits or fewer with scales is named after both: `int4_g128_fp16` has a scale in fp16 for each 128
    elements along the innermost axis, `int8_row_fp32` one in fp32 for all of it, `fp8_e4m3_b128x128_fp32` one for 128
    of it in 128 rows; `_zero` behind it adds a zero point in the format of the elements for each scale, `_zero_bf16`
    one in bf16, `_flat` lets a block go on where a row ends, and `_pad1024x8` stores whole 1024s of the innermost axis,
    and whole 8s of the rows.

    Raises
    ------
    FormatError
        If there is no format of that name; the text lists those known and the nearest one.

    Examples
    --------
    >>> dtype("bfloat16").name, dtype("fp8").name
    ('bf16', 'fp8_e4m3')
    >>> float(bits_per_element("int4_g128_fp16_zero"))  # (4*128 + 16 + 4) / 128
    4.15625
    """
    if isinstance(name_or_dtype, DType):
        return name_or_dtype
    known = ", ".join(DTYPES)
    if not isinstance(name_or_dtype, str):
        raise FormatError(f"number format {shown(name_or_dtype)}: expected a name or a DType; known are {known}")
    name = ALIASES.get(name_or_dtype, name_or_dtype)
    if name in DTYPES:
        return DTYPES[name]
    scaled = _scaled(name)
    if scaled is not None:
        return scaled
    near = difflib.get_close_matches(name_or_dtype.lower(), [*DTYPES, *ALIASES], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise FormatError(f"number format {shown(name_or_dtype)} is unknown: {hint}known are {known}")


def promote(a: str | DType, b: str | DType) -> DType:
    """Return the format of the result of two tensors, as ``torch.promote_types`` has it.

    A complex format wins over a float, a float over an int, an int over a bool; of two floats the wider wins; bf16
    with fp16 is fp32, int8 with uint8 is int16. Where torch has no result, as for its own fp8 formats, the same rules
    hold: a float of 8 bits or fewer, or a block format, beside a float of 16 bits and more gives the latter.

    Raises
    ------
    FormatError
        If both are floats of 8 bits or fewer and differ: neither holds the other, so one has to be cast.

    Examples
    --------
    >>> promote("bf16", "fp16").name, promote("int64", "fp16").name, promote("int8", "uint8").name
    ('fp32', 'fp16', 'int16')
    """
    first, second = dtype(a), dtype(b)
    if first == second:
        return first
    if "complex" in (first.kind, second.kind):  # two parts of the wider one
        return DTYPES["complex128" if 52 in (first.mantissa, second.mantissa) else "complex64"]
    if first.kind != second.kind:
        return max(first, second, key=lambda d: KINDS.index(d.kind))
    if first.kind == "int":
        return _promote_ints(first, second)
    if max(first.bits, second.bits) <= 8:
        raise FormatError(
            f"{first.name} with {second.name}: neither holds the values of the other; "
            "expected equal formats or one of 16 bits and more, cast one of the two first"
        )
    for wide, narrow in ((first, second), (second, first)):
        if narrow.bits <= 8 or (wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa):
            return wide
    return DTYPES["fp32"]


def _promote_ints(first: DType, second: DType) -> DType:
    if first.signed == second.signed:
        return max(first, second, key=lambda d: d.bits)
    signed = first if first.signed else second
    return signed if signed.bits > 8 else DTYPES["int16"]


def bits_per_element(name_or_dtype: str | DType) -> Fraction:
    """Return the bits that an element of a large tensor takes, with its share of the block scales.

    Scales that are stored once for a tensor vanish in the limit; a tensor whose innermost axis is no multiple
    of the block takes more.

    Raises
    ------
    FormatError
        If there is no such format.

    Examples
    --------
    >>> float(bits_per_element("mxfp4")), float(bits_per_element("nvfp4")), bits_per_element("bf16")
    (4.25, 4.5, Fraction(16, 1))
    """
    format_ = dtype(name_or_dtype)
    shared = (Fraction(s.bits, s.per * s.rows) for s in format_.scale if s.per)
    return format_.bits + sum(shared, Fraction(0))
