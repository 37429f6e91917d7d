"""Number formats: bits, exponent, mantissa, range and block scales."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated

from .algebra.symbols import shown
from .errors import FormatError
from .notation.validation import REAL, guarded

__all__ = [
    "KINDS",
    "BlockScale",
    "DType",
    "ALIASES",
    "DTYPES",
    "bits_per_element",
    "dtype",
    "promote",
]


# -- record ------------------------------------------------------------------------------------------------------------

#: In order of promotion, the strongest last.
KINDS = ("bool", "int", "float", "complex")
_SPECIALS = ("ieee", "nan", "none")
# IEEE 754-2019 gives the exponent of binary256 19 bits; ranges are computed exactly
_MOST_BITS, _MOST_EXPONENT = 1024, 19


@dataclass(frozen=True)
class BlockScale:
    """A scale shared by elements in a block format; also a shared minimum, or a scale of scales."""

    bits: int
    """bits per scale"""
    per: int | None
    """elements along the innermost axis that share it; 0: the whole axis; None: the whole tensor"""
    format: str
    """name of the scale's format"""
    rows: int = 1
    """rows that share it, where a row is the innermost axis; the last block may have fewer"""
    flat: bool = False
    """whether blocks are contiguous in memory and may cross rows"""


@guarded()
@dataclass(frozen=True)
class DType:
    """A number format.

    The range of a block format applies to its elements before scaling, that of a complex format to each part.

    Examples
    --------
    >>> import costgraph as cg
    >>> fp16 = cg.dtype("fp16")
    >>> fp16.bits, fp16.exponent, fp16.mantissa, fp16.max, fp16.bytes
    (16, 5, 10, Fraction(65504, 1), Fraction(2, 1))
    >>> fp16.round(1e-8), cg.dtype("bf16").round(1e-8) > 0
    (0.0, True)
    """

    name: str
    bits: int
    """bits per element in memory, without scales"""
    kind: str
    """"float", "complex", "int" or "bool\""""
    exponent: int = 0
    """exponent bits of a float, or of each part of a complex number"""
    mantissa: int = 0
    """mantissa bits, without the implicit one"""
    signed: bool = True
    specials: str = "ieee"
    """codes of a float for non-finite values: "ieee" the top exponent, "nan" only its last code, "none" no code"""
    scale: tuple[BlockScale, ...] = ()
    """scales of a block format"""
    element: str = ""
    """name of the element format if scales were added, as in int4_g128_fp16, or of each part of a complex format"""
    padded: tuple[int, int] = (1, 1)
    """multiples that the innermost axis and the number of rows are padded to in storage"""
    codes: tuple[Fraction, ...] = ()
    """values of a lookup-table format, in ascending order"""

    def __post_init__(self) -> None:
        ranges = {"bits": (1, _MOST_BITS), "exponent": (0, _MOST_EXPONENT), "mantissa": (0, _MOST_BITS)}
        for field, (least, most) in ranges.items():
            if not least <= getattr(self, field) <= most:
                value = shown(getattr(self, field))
                raise FormatError(f"{self.name}: {field} is {value}, expected an integer from {least} to {most}")
        for field, choices in (("kind", KINDS), ("specials", _SPECIALS)):
            if getattr(self, field) not in choices:
                value = shown(getattr(self, field))
                raise FormatError(f"{self.name}: {field} is {value}, expected one of {', '.join(choices)}")

        if len(self.codes) > 2**self.bits or list(self.codes) != sorted(set(self.codes)):
            raise FormatError(f"{self.name}: codes {shown(self.codes)}, expected at most 2**bits in ascending order")

    @property
    def bytes(self) -> Fraction:
        """Bytes per element in memory, without scales."""
        return Fraction(self.bits, 8)

    @property
    def max(self) -> Fraction:
        """Largest finite value."""
        if self.codes:
            return self.codes[-1]
        if self.kind == "bool":
            return Fraction(1)
        if self.kind == "int":
            return Fraction(2 ** (self.bits - self.signed) - 1)
        top = 2**self.exponent - 1 - self._bias - (self.specials == "ieee")
        if self.specials != "nan":
            return (2 - self.epsilon) * _power_of_two(top)
        # without a mantissa NaN takes the top exponent, else its last code
        return (2 - 2 * self.epsilon) * _power_of_two(top) if self.mantissa else _power_of_two(top - 1)

    @property
    def min(self) -> Fraction:
        """Smallest finite value."""
        if self.codes:
            return self.codes[0]
        if self.kind == "int":
            return -self.max - 1 if self.signed else Fraction(0)
        if self.kind == "bool":
            return Fraction(0)
        return -self.max if self.signed else self.smallest_normal

    @property
    def smallest_normal(self) -> Fraction:
        """Smallest positive normal value."""
        self._only_float("smallest normal value")
        return _power_of_two(self._lowest)

    @property
    def smallest_subnormal(self) -> Fraction:
        """Smallest positive value; E8M0 has no subnormals, so it equals the smallest normal value."""
        self._only_float("smallest subnormal value")
        return _power_of_two(self._lowest - self.mantissa)

    @property
    def epsilon(self) -> Fraction:
        """Distance from 1 to the next larger value."""
        self._only_float("epsilon")
        return Fraction(1, 2**self.mantissa)

    @property
    def block(self) -> int | None:
        """Elements that share the first scale, 0 for the whole innermost axis; None without block scales."""
        return next((s.per for s in self.scale if s.per is not None), None)

    @property
    def rows(self) -> int:
        """Rows (innermost axes) that share block scales; 1 if each row has its own."""
        return next((s.rows for s in self.scale if s.per is not None), 1)

    @property
    def scale_bits(self) -> int:
        """Scale bits stored per block, without scales shared by several blocks."""
        return sum(s.bits for s in self.scale if s.per is not None and s.per == self.block)

    @property
    def shares(self) -> list[tuple[int, int, int, bool]]:
        """Shared bits, by the `per`, `rows` and `flat` of their `BlockScale`."""
        found: dict[tuple[int, int, bool], int] = {}
        for s in self.scale:
            if s.per is not None:
                place = (s.per, s.rows, s.flat)
                found[place] = found.get(place, 0) + s.bits
        return [(bits, *place) for place, bits in found.items()]

    @property
    def tensor_bits(self) -> int:
        """Scale bits stored once per tensor."""
        return sum(s.bits for s in self.scale if s.per is None)

    def round(self, x: Annotated[float, REAL]) -> float:
        """Round to the nearest value of the format, ties to even.

        Overflow gives infinity in formats with at least 16 bits, as in IEEE 754. Integers and floats with up to 8 bits
        saturate, as in OFP8 and MX. bool maps every nonzero value to 1. NaN is preserved if the format has one.

        Raises
        ------
        FormatError
            For a block format, which rounds whole blocks; for NaN or infinity in a format without them; for a
            nonpositive value in E8M0.

        Examples
        --------
        >>> import costgraph as cg
        >>> cg.dtype("fp8_e4m3").round(1000.0), cg.dtype("bf16").round(1.005), cg.dtype("int8").round(2.5)
        (448.0, 1.0078125, 2.0)
        """
        x = float(x)  # also numbers from NumPy and sympy
        if self.scale:
            raise FormatError(
                f"{self.name}: cannot round {x!r} alone, blocks share scales; expected a format without them"
            )
        if self.kind == "bool":
            return float(x != 0)
        if math.isnan(x):
            if self.kind == "int" or self.specials == "none":
                raise FormatError(f"{self.name}: cannot round nan, the format has none; expected a number")
            return x
        if self.kind == "float" and not self.signed and x <= 0:
            raise FormatError(
                f"{self.name}: cannot round {x!r}, the format holds powers of two; expected a positive number"
            )
        if math.isinf(x):
            return x if self._overflows else float(self.max if x > 0 else self.min)
        return self._nearest(x)

    def _nearest(self, x: float) -> float:
        if self.codes:
            return float(min(self.codes, key=lambda code: abs(code - Fraction(x))))
        if self.kind == "int":
            return float(min(max(Fraction(round(x)), self.min), self.max))
        _, exponent = math.frexp(x)  # x = m * 2**exponent with 1/2 <= |m| < 1
        quantum = _power_of_two(max(exponent - 1, self._lowest) - self.mantissa)
        size = round(abs(Fraction(x)) / quantum) * quantum
        if not self.signed:
            size = max(size, self.smallest_normal)
        if size > self.max:
            return math.copysign(math.inf if self._overflows else float(self.max), x)
        return math.copysign(float(size), x)

    @property
    def _bias(self) -> int:
        return int(2 ** (self.exponent - 1)) - 1

    @property
    def _lowest(self) -> int:
        """Exponent of the smallest normal value; E8M0 uses the code that other formats reserve for subnormals."""
        return 1 - self._bias if self.mantissa else -self._bias

    @property
    def _overflows(self) -> bool:
        return self.bits >= 16 and self.kind in ("float", "complex")

    def _only_float(self, what: str) -> None:
        if self.codes:
            raise FormatError(f"{self.name}: a format of {len(self.codes)} given values has no {what}")
        if self.kind not in ("float", "complex"):
            raise FormatError(f"{self.name}: a format of kind {self.kind!r} has no {what}; expected a float format")


def _power_of_two(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


# -- formats -----------------------------------------------------------------------------------------------------------
# Sources: IEEE 754-2019 (fp64, fp32, fp16); Wang and Kanwar 2019 for bf16; NVIDIA A100 whitepaper for tf32; OCP 8-bit
# Floating Point Specification (OFP8) 1.0 for E4M3 and E5M2; OCP Microscaling Formats (MX) 1.0 for fp6, fp4, E8M0 and
# formats with a scale per 32 elements; NVIDIA's description of NVFP4 (E2M1, an E4M3 scale per 16 elements and one fp32
# scale per tensor); Dettmers et al. 2023, arXiv 2305.14314, section 3 and appendix E for NF4 and its double
# quantization; llama.cpp's ggml/src/ggml-common.h (structs block_q4_0 to block_q6_K) for GGUF formats.


def _mx(name: str, bits: int, exponent: int, mantissa: int, specials: str) -> DType:
    return DType(name, bits, "float", exponent, mantissa, True, specials, (BlockScale(8, 32, "fp8_e8m0"),))


def _gguf(name: str, bits: int, *shared: tuple[int, int, str], signed: bool = True) -> DType:
    return DType(name, bits, "int", signed=signed, scale=tuple(BlockScale(*facts) for facts in shared))


# quantiles of the normal distribution, scaled to [-1, 1]
_NF4 = tuple(
    Fraction(code)
    for code in (
        "-1", "-0.6961928009986877", "-0.5250730514526367", "-0.39491748809814453", "-0.28444138169288635",
        "-0.18477343022823334", "-0.09105003625154495", "0", "0.07958029955625534", "0.16093020141124725",
        "0.24611230194568634", "0.33791524171829224", "0.44070982933044434", "0.5626170039176941",
        "0.7229568362236023", "1",
    )
)  # fmt: skip
# an 8-bit scale per 64 elements, an fp32 scale per 256 of those scales, and their subtracted mean
_DOUBLE = (
    BlockScale(8, 64, "fp8_e4m3", flat=True), BlockScale(32, 64 * 256, "fp32", flat=True), BlockScale(32, None, "fp32"),
)  # fmt: skip

_FORMATS = (
    DType("fp64", 64, "float", 11, 52),
    DType("fp32", 32, "float", 8, 23),
    DType("tf32", 32, "float", 8, 10),  # 19 bits in a matmul, 32 in memory
    DType("fp16", 16, "float", 5, 10),
    DType("bf16", 16, "float", 8, 7),
    DType("fp8_e4m3", 8, "float", 4, 3, specials="nan"),
    DType("fp8_e5m2", 8, "float", 5, 2),
    DType("fp8_e8m0", 8, "float", 8, 0, signed=False, specials="nan"),
    DType("fp6_e2m3", 6, "float", 2, 3, specials="none"),
    DType("fp6_e3m2", 6, "float", 3, 2, specials="none"),
    DType("fp4_e2m1", 4, "float", 2, 1, specials="none"),
    DType("complex128", 128, "complex", 11, 52, element="fp64"),
    DType("complex64", 64, "complex", 8, 23, element="fp32"),
    DType("int64", 64, "int"),
    DType("int32", 32, "int"),
    DType("int16", 16, "int"),
    DType("int8", 8, "int"),
    DType("uint64", 64, "int", signed=False),
    DType("uint32", 32, "int", signed=False),
    DType("uint16", 16, "int", signed=False),
    DType("uint8", 8, "int", signed=False),
    DType("int6", 6, "int"),
    DType("uint6", 6, "int", signed=False),
    DType("int4", 4, "int"),
    DType("uint4", 4, "int", signed=False),
    DType("bool", 8, "bool"),
    _mx("mxfp8", 8, 4, 3, "nan"),
    _mx("mxfp8_e5m2", 8, 5, 2, "ieee"),
    _mx("mxfp6", 6, 2, 3, "none"),
    _mx("mxfp6_e3m2", 6, 3, 2, "none"),
    _mx("mxfp4", 4, 2, 1, "none"),
    DType("nvfp4", 4, "float", 2, 1, True, "none", (BlockScale(8, 16, "fp8_e4m3"), BlockScale(32, None, "fp32"))),
    DType("nf4", 4, "float", specials="none", codes=_NF4),
    DType("nf4_double", 4, "float", specials="none", scale=_DOUBLE, codes=_NF4),
    # one block: a scale, and a minimum for unsigned elements
    _gguf("q4_0", 4, (16, 32, "fp16")),
    _gguf("q4_1", 4, (16, 32, "fp16"), (16, 32, "fp16"), signed=False),
    _gguf("q5_0", 5, (16, 32, "fp16")),
    _gguf("q5_1", 5, (16, 32, "fp16"), (16, 32, "fp16"), signed=False),
    _gguf("q8_0", 8, (16, 32, "fp16")),
    # blocks in a super-block of 256, whose scales and minima are multiples of an fp16 value
    _gguf("q2_k", 2, (4, 16, "uint4"), (4, 16, "uint4"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q3_k", 3, (6, 16, "int6"), (16, 256, "fp16")),
    _gguf("q4_k", 4, (6, 32, "uint6"), (6, 32, "uint6"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q5_k", 5, (6, 32, "uint6"), (6, 32, "uint6"), (16, 256, "fp16"), (16, 256, "fp16"), signed=False),
    _gguf("q6_k", 6, (8, 16, "int8"), (16, 256, "fp16")),
)

DTYPES: Mapping[str, DType] = MappingProxyType({f.name: f for f in _FORMATS})
"""All formats by name."""

_OTHER_NAMES = {
    "fp64": ("float64", "double"), "fp32": ("float32", "float"), "tf32": ("tfloat32",),
    "fp16": ("float16", "half"), "bf16": ("bfloat16",),
    "fp8_e4m3": ("fp8", "e4m3", "float8_e4m3fn"),
    "fp8_e5m2": ("e5m2", "float8_e5m2"),
    "fp8_e8m0": ("e8m0", "float8_e8m0fnu"),
    "fp6_e2m3": ("fp6", "e2m3"), "fp6_e3m2": ("e3m2",),
    "fp4_e2m1": ("fp4", "e2m1"),
    "complex128": ("cdouble",), "complex64": ("cfloat",),
    "int64": ("long",), "int32": ("int",), "int16": ("short",), "int8": ("char",), "uint8": ("byte",),
    "mxfp8": ("mxfp8_e4m3",), "mxfp6": ("mxfp6_e2m3",), "mxfp4": ("mxfp4_e2m1",),
}  # fmt: skip

ALIASES: Mapping[str, str] = MappingProxyType(
    {other: name for name, others in _OTHER_NAMES.items() for other in others}
)
"""Other format names, including torch's."""


# -- lookup and promotion ----------------------------------------------------------------------------------------------

_SHARED = r"(?:g([1-9]\d{0,6})|row|b([1-9]\d{0,6})x([1-9]\d{0,6}))"
_MORE = r"(_zero(?:_(?:fp32|fp16|bf16))?)?(_flat)?(?:_pad([1-9]\d{0,4})x([1-9]\d{0,4}))?"
_SCALED = re.compile(rf"(\w+?)_{_SHARED}_(fp32|fp16|bf16|fp8_e4m3|fp8_e8m0){_MORE}", re.ASCII)


@lru_cache(maxsize=1 << 10)
def _scaled(name: str) -> DType | None:
    """Return the format for a name such as int4_g128_fp16: ints or floats with up to 8 bits and added scales."""
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
    """Return the format with the given name; a DType is returned unchanged.

    Torch's names and dtype objects are accepted where a format corresponds: `dtype(torch.bfloat16)`.

    Formats with up to 8 bits can have scales added by name: `int4_g128_fp16` has an fp16 scale per 128 elements along
    the innermost axis, `int8_row_fp32` an fp32 scale per row, and `fp8_e4m3_b128x128_fp32` one per block of 128 rows by
    128 elements. The suffix `_zero` adds a zero point per scale in the element format, `_zero_bf16` in bf16. `_flat`
    lets blocks cross rows, and `_pad1024x8` pads the innermost axis to multiples of 1024 and the rows to multiples of
    8.

    Raises
    ------
    FormatError
        If the name is unknown; the text lists the known formats and the nearest one.

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
    if type(name_or_dtype).__module__ == "torch":
        name_or_dtype = str(name_or_dtype).removeprefix("torch.")
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
    """Return the promoted format of two tensors, as in ``torch.promote_types``.

    complex wins over float, float over int, int over bool. The wider of two floats wins; bf16 with fp16 gives fp32, and
    int8 with uint8 gives int16. The same rules apply where torch has no result, as for fp8 formats: a float with at
    least 16 bits wins over a smaller one or a block format.

    Raises
    ------
    FormatError
        If both are different floats with up to 8 bits: neither holds the other's values, so one has to be cast.

    Examples
    --------
    >>> promote("bf16", "fp16").name, promote("int64", "fp16").name, promote("int8", "uint8").name
    ('fp32', 'fp16', 'int16')
    """
    first, second = dtype(a), dtype(b)
    if first == second:
        return first
    if "complex" in (first.kind, second.kind):  # two parts in the wider format
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
    """Return the bits per element in a large tensor, including its share of block scales.

    Scales stored once per tensor vanish in the limit. A tensor whose innermost axis is not a multiple of the block
    takes more.

    Raises
    ------
    FormatError
        If the format is unknown.

    Examples
    --------
    >>> float(bits_per_element("mxfp4")), float(bits_per_element("nvfp4")), bits_per_element("bf16")
    (4.25, 4.5, Fraction(16, 1))
    """
    format_ = dtype(name_or_dtype)
    shared = (Fraction(s.bits, s.per * s.rows) for s in format_.scale if s.per)
    return format_.bits + sum(shared, Fraction(0))
