"""Number formats: bits, exponent, mantissa, range and shared scales."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from costgraph.algebra.symbols import shown
from costgraph.errors import FormatError
from costgraph.notation.door import REAL

from ..notation.door import guarded

__all__ = ["KINDS", "BlockScale", "DType"]

#: From the narrowest to the one that wins over all others.
KINDS = ("bool", "int", "float", "complex")
_SPECIALS = ("ieee", "nan", "none")
# the range of a format is written out: IEEE 754-2019 gives the exponent of binary256 19 bits
_MOST_BITS, _MOST_EXPONENT = 1024, 19


@dataclass(frozen=True)
class BlockScale:
    """A scale that elements of a block format share, or a minimum, or a scale of scales."""

    bits: int
    """bits of one scale"""
    per: int | None
    """elements along the innermost axis that share it; 0: all of the axis; None: one for the whole tensor"""
    format: str
    """name of the scale's own format"""
    rows: int = 1
    """rows that share it, a row being the innermost axis; the last ones of a tensor may be fewer"""
    flat: bool = False
    """whether its elements follow each other in memory, wherever rows end"""


@guarded()
@dataclass(frozen=True)
class DType:
    """A number format.

    The range of a block format is that of its elements, before any scale is applied; the range of a complex format is
    that of either part.

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
    """bits that one element takes in memory, without scales"""
    kind: str
    """"float", "complex", "int" or "bool\""""
    exponent: int = 0
    """exponent bits of a float, or of each part of a complex number"""
    mantissa: int = 0
    """mantissa bits of the same, without the implied one"""
    signed: bool = True
    specials: str = "ieee"
    """codes of a float that are no numbers: "ieee" the top exponent, "nan" the last of it, "none" no code"""
    scale: tuple[BlockScale, ...] = ()
    """scales of a block format"""
    element: str = ""
    """name of the format that elements have alone, where scales were added to one, as in int4_g128_fp16; of a complex
    format, that of either part"""
    padded: tuple[int, int] = (1, 1)
    """what the innermost axis, and the number of rows, are rounded up to a multiple of where they are stored"""
    codes: tuple[Fraction, ...] = ()
    """values of a format whose elements are looked up in a table, in ascending order"""

    def __post_init__(self) -> None:
        ranges = {"bits": (1, _MOST_BITS), "exponent": (0, _MOST_EXPONENT), "mantissa": (0, _MOST_BITS)}
        for field, (least, most) in ranges.items():
            if not least <= getattr(self, field) <= most:
                value = shown(getattr(self, field))
                raise FormatError(f"{self.name}: {field} is {value}, expected a whole number from {least} to {most}")
        for field, choices in (("kind", KINDS), ("specials", _SPECIALS)):
            if getattr(self, field) not in choices:
                value = shown(getattr(self, field))
                raise FormatError(f"{self.name}: {field} is {value}, expected one of {', '.join(choices)}")

        if len(self.codes) > 2**self.bits or list(self.codes) != sorted(set(self.codes)):
            raise FormatError(f"{self.name}: codes {shown(self.codes)}, expected at most 2**bits in ascending order")

    @property
    def bytes(self) -> Fraction:
        """Bytes of one element in memory, without scales."""
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
        # without a mantissa the NaN takes the top exponent, else the last code of it
        return (2 - 2 * self.epsilon) * _power_of_two(top) if self.mantissa else _power_of_two(top - 1)

    @property
    def min(self) -> Fraction:
        """Least finite value."""
        if self.codes:
            return self.codes[0]
        if self.kind == "int":
            return -self.max - 1 if self.signed else Fraction(0)
        if self.kind == "bool":
            return Fraction(0)
        return -self.max if self.signed else self.smallest_normal

    @property
    def smallest_normal(self) -> Fraction:
        """Smallest positive value of full precision."""
        self._only_float("smallest normal value")
        return _power_of_two(self._lowest)

    @property
    def smallest_subnormal(self) -> Fraction:
        """Smallest positive value; E8M0 has no subnormals, so that it is its smallest normal one."""
        self._only_float("smallest subnormal value")
        return _power_of_two(self._lowest - self.mantissa)

    @property
    def epsilon(self) -> Fraction:
        """Distance from 1 to the next larger value."""
        self._only_float("epsilon")
        return Fraction(1, 2**self.mantissa)

    @property
    def block(self) -> int | None:
        """Elements that share the first of the scales, 0 for all of the innermost axis; None where none do."""
        return next((s.per for s in self.scale if s.per is not None), None)

    @property
    def rows(self) -> int:
        """Rows, each the innermost axis, that share the scales of their blocks; 1 where each has its own."""
        return next((s.rows for s in self.scale if s.per is not None), 1)

    @property
    def scale_bits(self) -> int:
        """Bits that are stored for one block: scales of several blocks not among them."""
        return sum(s.bits for s in self.scale if s.per is not None and s.per == self.block)

    @property
    def shares(self) -> list[tuple[int, int, int, bool]]:
        """Bits that elements share, by which of them do: `per`, `rows` and `flat` of a `BlockScale`."""
        found: dict[tuple[int, int, bool], int] = {}
        for s in self.scale:
            if s.per is not None:
                place = (s.per, s.rows, s.flat)
                found[place] = found.get(place, 0) + s.bits
        return [(bits, *place) for place, bits in found.items()]

    @property
    def tensor_bits(self) -> int:
        """Bits of scale that are stored once for a tensor."""
        return sum(s.bits for s in self.scale if s.per is None)

    def round(self, x: Annotated[float, REAL]) -> float:
        """Return the value of the format that is nearest to ``x``; of two equally near ones, the even one.

        What is too large becomes infinity in the formats of 16 bits and more, as IEEE 754 has it, and the
        largest value of its sign in integers and in floats of 8 bits and fewer, as in the saturating mode of
        OFP8 and MX. In bool, everything but 0 is 1. NaN stays NaN where there is one.

        Raises
        ------
        FormatError
            For a block format, which rounds a whole block at once; for NaN or infinity in a format that has
            nothing for it; for a value that is not positive in E8M0.

        Examples
        --------
        >>> import costgraph as cg
        >>> cg.dtype("fp8_e4m3").round(1000.0), cg.dtype("bf16").round(1.005), cg.dtype("int8").round(2.5)
        (448.0, 1.0078125, 2.0)
        """
        x = float(x)  # NumPy's and sympy's numbers too
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
        """Exponent of the smallest normal value; E8M0 uses the code that others keep for subnormals."""
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
