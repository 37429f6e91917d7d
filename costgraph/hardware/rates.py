"""Rates that a specification lacks: which of those that it has stands in, and how it bounds the missing one."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from costgraph.dtypes import DType, dtype
from costgraph.errors import SpecError
from costgraph.hardware.keys import PEAKS, RATE_KEYS, TABLES
from costgraph.hardware.units import Quantity

__all__ = ["FORMATS", "NAMED", "Fallback", "StandIn", "chosen_fallback", "fastest", "named_rate", "nearest", "rate_key"]

Rates = Mapping[str, Quantity]
Fallback = str | DType | Mapping[str, str]

#: Why a fallback stands in that was named where a question was asked.
NAMED = "asked for"

FORMATS = {key: dtype({"fp8": "fp8_e4m3", "fp6": "fp6_e2m3", "fp4": "fp4_e2m1"}.get(key, key)) for key in PEAKS}


class StandIn(NamedTuple):
    """A rate in the place of one that a device has none of."""

    wanted: str
    """place of the missing rate, such as peak.bf16"""
    used: str
    """place of the one that is taken"""
    why: str
    """what it is to the missing one"""

    def __str__(self) -> str:
        return f"{self.wanted} is missing, {self.used} ({self.why}) stands in"


def nearest(wanted: DType, unit: str, peak: Rates, vector: Rates) -> tuple[str, str] | None:
    """Return the place of the rate that stands in for a missing one, as `peak.fp32`, and why.

    None where there is no rate at all. A format that holds all values of another one is no faster than that; the matrix
    unit is no slower than the vector unit, whose work is in fp32 or fp64.
    """
    own, other = (("peak", peak), ("vector", vector))[:: 1 if unit == "matmul" else -1]
    another = "vector unit" if unit == "matmul" else "matrix unit"
    found = (
        (own, _wider(own[1], wanted), "next wider format"),
        (other, _wider(other[1], wanted, same=True), another),
        (own, _other(own[1], wanted), "nearest format"),
        (other, _other(other[1], wanted), f"{another}, nearest format"),
    )
    return next(((f"{table}.{key}", why) for (table, _), key, why in found if key is not None), None)


def fastest(peak: Rates, vector: Rates) -> str | None:
    """Return the place of the highest rate of all, None where there is none: no missing rate is above it."""
    tables = (("peak", peak), ("vector", vector))
    both = [(_speed(q), f"{table}.{key}") for table, rates in tables for key, q in rates.items()]
    return max(both)[1] if both else None


def _wider(rates: Rates, wanted: DType, *, same: bool = False) -> str | None:
    """Return the narrowest format that holds the wanted one, of its own kind where there is one; then the slowest."""
    found = {key: f for key, f in _formats(rates).items() if _holds(f, wanted) and (same or f.name != wanted.name)}
    return min(
        found, key=lambda key: (found[key].kind != wanted.kind, _size(found[key]), _speed(rates[key])), default=None
    )


def _other(rates: Rates, wanted: DType) -> str | None:
    """Return the widest of what does not hold the wanted one, of its own kind where there is one; then the fastest."""
    found = _formats(rates)
    return max(
        found, key=lambda key: (found[key].kind == wanted.kind, _size(found[key]), _speed(rates[key])), default=None
    )


def _formats(rates: Rates) -> dict[str, DType]:
    return {key: FORMATS[key] for key in rates if key in FORMATS}


def _size(f: DType) -> int:
    return f.exponent + f.mantissa if f.kind == "float" else f.bits


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of a format is one of another."""
    if narrow.kind == "float":
        return wide.kind == "float" and wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa
    digits = 1 if narrow.kind == "bool" else narrow.bits - narrow.signed
    return (wide.mantissa + 1 if wide.kind == "float" else wide.bits - wide.signed) >= digits


def _speed(rate: Quantity) -> Fraction:
    return Fraction(rate.value) if isinstance(rate.value, int | Fraction) else Fraction(0)


def rate_key(name: str, unit: str, peak: Mapping[str, Quantity]) -> str:
    """Return the key that the rate of a format has in a specification."""
    if unit == "vector":
        return "fp64" if name == "fp64" else "fp32"
    if name == "nvfp4" and "nvfp4" not in peak:
        return "fp4"
    return RATE_KEYS.get(name, name)


def chosen_fallback(place: str, fallback: Fallback | None, wanted: str) -> str | None:
    """Return the fallback of a format or None; one that no device can have is refused, needed or not."""
    chosen: str | None = None
    alone = {} if fallback is None else {wanted: fallback}
    for asked, use in (fallback if isinstance(fallback, Mapping) else alone).items():
        table, dot, key = use.rpartition(".") if isinstance(use, str) else ("", "", "")
        if dot and (table not in ("peak", "vector") or key not in TABLES[table]):
            raise SpecError(f"{place}: fallback {use}; expected a number format, peak.KEY or vector.KEY")
        name = use if isinstance(use, str) and (dot or use in TABLES["peak"]) else dtype(use).name
        if dtype(asked).name == wanted:
            chosen = name
    return chosen


def named_rate(tables: Mapping[str, Rates], use: str | None, unit: str, place: str) -> Quantity:
    """Return the rate that was named to stand in for a missing one, or raise SpecError."""
    rates = ", ".join(f"{table}.{key}" for table in ("peak", "vector") for key in tables[table])
    if use is None:
        raise SpecError(f"{place}; expected one of {rates}, or fallback= that names one of them")
    table, dot, key = use.rpartition(".")
    if dot:
        places = [tables[table]] if table in ("peak", "vector") else []
    else:
        key = use if use in TABLES["peak"] else rate_key(dtype(use).name, "matmul", tables["peak"])
        places = [tables["peak"]] if unit == "matmul" else [tables["vector"], tables["peak"]]
    for rates_there in places:
        if key in rates_there:
            return rates_there[key]
    raise SpecError(f"{place}, nor one for its fallback {use}; expected one of {rates}")
