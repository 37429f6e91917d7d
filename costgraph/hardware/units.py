"""Exact quantities with base unit and source, and their formatting.

The set of units is closed. ``GB`` is 10**9 bytes and ``GiB`` is 2**30 bytes, everywhere; ``FLOP`` is an amount and
``FLOP/s`` a rate. Numbers are ints or Fractions, so 989.4 TFLOP/s is exactly 989400000000000 FLOP/s.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction

import sympy

from costgraph.algebra.symbols import check_symbol, shown
from costgraph.errors import SpecError

__all__ = ["BASE_UNITS", "UNITS", "Quantity", "exact", "format_bytes", "format_quantity", "quantity"]

Number = int | Fraction

BASE_UNITS = ("FLOP/s", "B/s", "B", "Hz", "W", "s", "1", "FLOP", "FLOP/B")
"""Units of stored values. FLOP and FLOP/B result from products and quotients of the others."""

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50}

# larger exponents are implausible, and their Fractions would fill memory
_LARGEST_EXPONENT = 400


def _units() -> dict[str, tuple[Fraction, str]]:
    """Return every accepted unit with its factor and base unit."""
    table = {"1": (Fraction(1), "1")}
    for prefix, power in _DECIMAL.items():
        factor = Fraction(10**power)
        for base in ("FLOP/s", "B/s", "B", "Hz", "W", "FLOP"):
            table[prefix + base] = (factor, base)
        table[f"{prefix}bit/s"] = (factor / 8, "B/s")
    for prefix, power in _BINARY.items():
        table[f"{prefix}B"] = (Fraction(2**power), "B")
        table[f"{prefix}B/s"] = (Fraction(2**power), "B/s")
    table["KB"], table["KB/s"] = table["kB"], table["kB/s"]
    table["FLOP/B"] = (Fraction(1), "FLOP/B")
    table.update(
        {f"{prefix}s": (Fraction(1, 10**n), "s") for prefix, n in zip(("", "m", "u", "n"), (0, 3, 6, 9), strict=True)}
    )
    return table


UNITS = _units()
"""Accepted units as (factor, base unit): ``UNITS["Gbit/s"] == (Fraction(125000000), "B/s")``."""

# units of supported quotients; others raise an error
_QUOTIENTS = {
    ("FLOP/s", "B/s"): "FLOP/B",
    ("FLOP", "B"): "FLOP/B",
    ("FLOP", "FLOP/s"): "s",
    ("B", "B/s"): "s",
    ("FLOP", "s"): "FLOP/s",
    ("B", "s"): "B/s",
}


@dataclass(frozen=True)
class Quantity:
    """A number with its base unit and source.

    Raises
    ------
    SpecError
        If ``unit`` is not a base unit, or ``value`` is not a finite number.
    ShapeError
        If ``value`` is a symbol not created by ``dims``.

    Examples
    --------
    >>> peak, bandwidth = Quantity(989400000000000, "FLOP/s"), Quantity(3350000000000, "B/s")
    >>> (peak / bandwidth).unit, round(peak / bandwidth)
    ('FLOP/B', 295)
    >>> print(peak)
    989.4 TFLOP/s
    """

    value: Number | sympy.Symbol
    """value in ``unit``; an int if integral, a symbol for symbolic hardware"""
    unit: str
    """one of BASE_UNITS"""
    source: str = ""
    """source keys in a specification, or a reference; empty for derived quantities"""
    note: str = ""
    """remark on the number"""

    def __post_init__(self) -> None:
        if self.unit not in BASE_UNITS:
            raise SpecError(
                f"quantity: unit {shown(self.unit)} is not a base unit; expected one of {', '.join(BASE_UNITS)}"
            )
        for name in ("source", "note"):
            if not isinstance(getattr(self, name), str):
                raise SpecError(f"quantity: {name} {shown(getattr(self, name))}; expected text")
        if isinstance(self.value, sympy.Symbol):
            check_symbol(self.value)
        else:
            object.__setattr__(self, "value", exact(self.value))

    @property
    def number(self) -> Number:
        """The value; SpecError if it is a symbol."""
        if isinstance(self.value, sympy.Symbol):
            raise SpecError(f"quantity {self.value}: a symbol of symbolic hardware; expected a number")
        return self.value

    def __add__(self, other: Quantity) -> Quantity:
        return self._sum(other, 1)

    def __sub__(self, other: Quantity) -> Quantity:
        return self._sum(other, -1)

    def __truediv__(self, other: Quantity) -> Quantity:
        if not isinstance(other, Quantity):
            return NotImplemented
        if other.number == 0:
            raise SpecError(f"quantity: {self} divided by {other}; expected a nonzero divisor")
        if self.unit == other.unit:
            unit = "1"
        elif other.unit == "1":
            unit = self.unit
        elif (self.unit, other.unit) in _QUOTIENTS:
            unit = _QUOTIENTS[self.unit, other.unit]
        else:
            raise SpecError(
                f"quantity: {self} divided by {other} has no supported unit; expected one of {_known_quotients()}"
            )
        return Quantity(exact(Fraction(self.number) / other.number), unit)

    def __float__(self) -> float:
        return float(self.number)

    def __round__(self) -> int:
        return round(self.number)

    def __str__(self) -> str:
        if isinstance(self.value, sympy.Symbol):
            return f"{self.value} {self.unit}"
        return format_quantity(self.value, self.unit)

    def _sum(self, other: Quantity, sign: int) -> Quantity:
        if not isinstance(other, Quantity):
            return NotImplemented
        if self.unit != other.unit:
            raise SpecError(
                f"quantity: {self} in {self.unit} and {other} in {other.unit} cannot be added; expected the same unit"
            )
        return Quantity(self.number + sign * other.number, self.unit)


def _known_quotients() -> str:
    return ", ".join(f"({a})/({b}) = {c}" for (a, b), c in _QUOTIENTS.items())


def exact(value: object) -> Number:
    """Convert a number to an exact int or Fraction, without binary error.

    A float counts as its shortest decimal text: 989.4 is 4947/5. Raises SpecError if the value is not a finite number,
    or a bool.

    Examples
    --------
    >>> exact(989.4), exact(80.0)
    (Fraction(4947, 5), 80)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real | Decimal):
        raise SpecError(
            f"quantity: value {shown(value)} is not a number; expected an int, a Fraction, a Decimal or a float"
        )
    if isinstance(value, numbers.Rational):
        fraction = Fraction(int(value.numerator), int(value.denominator))
        if max(abs(fraction.numerator), fraction.denominator) > 10**_LARGEST_EXPONENT:
            raise SpecError(f"quantity: value is out of range; expected a number to 1e{_LARGEST_EXPONENT}")
    else:
        decimal = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
        if not decimal.is_finite() or abs(decimal.adjusted()) > _LARGEST_EXPONENT:
            raise SpecError(
                f"quantity: value {shown(value)} is out of range; expected a finite number to 1e{_LARGEST_EXPONENT}"
            )
        fraction = Fraction(decimal)
    return fraction.numerator if fraction.denominator == 1 else fraction


def quantity(value: object, unit: str, source: str = "", note: str = "") -> Quantity:
    """Convert a number in a scaled unit to a Quantity in the base unit.

    Units are FLOP/s, B/s, B, Hz, W and FLOP with prefixes k M G T P E, B and B/s also with Ki Mi Gi Ti Pi, bit/s with k
    M G T P E, s with m u n, and 1 for counts. ``KB`` is ``kB``, 1000 bytes. Raises SpecError if the unit is unknown, or
    the value is negative or not finite.

    Examples
    --------
    >>> quantity(989.4, "TFLOP/s").value
    989400000000000
    >>> quantity(80, "GB").value, quantity(80, "GiB").value, quantity(400, "Gbit/s").value
    (80000000000, 85899345920, 50000000000)
    """
    converted = _scaled(value, unit, source, note)
    if converted.value < 0:
        raise SpecError(f"quantity: value {shown(value)} {unit}; expected a nonnegative number")
    return converted


def _scaled(value: object, unit: str, source: str = "", note: str = "") -> Quantity:
    if not isinstance(unit, str) or unit not in UNITS:
        raise SpecError(
            f"quantity: unit {shown(unit)} of value {shown(value)} is unknown; expected one of {', '.join(UNITS)}"
        )
    factor, base = UNITS[unit]
    return Quantity(exact(Fraction(exact(value)) * factor), base, source, note)


def format_quantity(value: object, unit: str) -> str:
    """Format a quantity with four significant digits and a decimal prefix.

    Examples
    --------
    >>> format_quantity(989400000000000, "FLOP/s"), format_quantity(80e9, "B"), format_quantity(0, "B/s")
    ('989.4 TFLOP/s', '80 GB', '0 B/s')
    """
    measured = _scaled(value, unit)
    if measured.unit in ("1", "FLOP/B"):
        text = _digits(_rounded(measured.value))
        return text if measured.unit == "1" else f"{text} FLOP/B"
    prefixes = {"": 0, "m": -3, "u": -6, "n": -9} if measured.unit == "s" else _DECIMAL
    lowest, *_, highest = sorted(prefixes.values())
    number = _rounded(measured.value)
    power = min(max(number.adjusted() // 3 * 3, lowest), highest) if number else 0
    scaled = number.scaleb(-power)
    if scaled.adjusted() > 3:  # past the largest prefix a power of ten is easier to read
        return f"{_digits(number)} {measured.unit}"
    prefix = next(name for name, exponent in prefixes.items() if exponent == power)
    return f"{_digits(scaled)} {prefix}{measured.unit}"


def format_bytes(n: object) -> str:
    """Format bytes with decimal units, and binary units in brackets; SpecError if they are not a finite number.

    Examples
    --------
    >>> format_bytes(16_060_522_496), format_bytes(8192), format_bytes(512)
    ('16.06 GB (14.96 GiB)', '8.192 kB (8 KiB)', '512 B')
    """
    value = Fraction(exact(n))
    if abs(value) < 1000:
        return format_quantity(value, "B")
    binary = f"{_digits(_rounded(value))} B"
    for prefix, power in _BINARY.items():
        scaled = _rounded(Fraction(value, 2**power))
        if abs(scaled) >= 1:
            binary = f"{_digits(scaled)} {prefix}B"
    return f"{format_quantity(value, 'B')} ({binary})"


def _rounded(value: Number) -> Decimal:
    """Round to four significant digits, not through a float, which may overflow."""
    with localcontext() as context:
        context.prec = 4
        return Decimal(value.numerator) / Decimal(value.denominator)


def _digits(number: Decimal) -> str:
    number = number.normalize()
    if number and not -4 <= number.adjusted() <= 5:
        mantissa = format(number.scaleb(-number.adjusted()), "f")
        return f"{mantissa}e{number.adjusted():+03d}"
    return format(number, "f") if math.isfinite(number) else str(number)
