"""Tables of a device that is derived from another one: as an unknown, as it was measured, a part of it, or slower."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from costgraph.algebra.symbols import shown, symbol
from costgraph.errors import SpecError
from costgraph.hardware.keys import PEAKS, TABLES, symbols_of
from costgraph.hardware.units import Quantity, exact

__all__ = ["as_attained", "as_symbols", "at_clock", "of_share", "share_of"]

Tables = Mapping[str, Mapping[str, Quantity]]

#: What each part of a device has a share of; what is said of one core, and of clocks, holds for a part as well.
_SHARED = {"peak": "", "vector": "", "memory": "", "cores": "", "power": "", "cache": "_per_core"}


def share_of(place: str, value: object) -> Fraction:
    """Return a share as it is exactly, or raise SpecError."""
    try:
        found = Fraction(exact(value))
    except SpecError:
        found = Fraction(0)
    if not 0 < found <= 1:
        raise SpecError(f"{place} is {shown(value)}, expected a number above 0 and at most 1")
    return found


def _times(q: Quantity, share: Fraction) -> Quantity:
    return Quantity(exact(q.number * share), q.unit, q.source, q.note)


def of_share(tables: Tables, share: Fraction) -> dict[str, dict[str, Quantity]]:
    """Return the tables of a part: what was measured of the whole, and its links, are not among them."""
    out = {
        name: {
            key: q if _SHARED[name] and key.endswith(_SHARED[name]) else _times(q, share) for key, q in found.items()
        }
        for name, found in tables.items()
        if name in _SHARED
    }
    out["memory"] = {key: q for key, q in out["memory"].items() if key in ("capacity", "bandwidth")}
    return out | {"clock": dict(tables["clock"])} if "clock" in tables else out


def at_clock(tables: Tables, share: Fraction) -> dict[str, dict[str, Quantity]]:
    """Return the tables at a share of the clock: rates of arithmetic are that share, those of memory stay."""
    slower = ("FLOP/s", "Hz")
    return {
        name: {key: _times(q, share) if q.unit in slower and name != "measured" else q for key, q in found.items()}
        for name, found in tables.items()
    }


def as_symbols(tables: Tables) -> dict[str, dict[str, Quantity]]:
    """Return the tables with symbols for rates, bandwidths and caches."""
    out = {name: dict(found) for name, found in tables.items()}
    for place, name in symbols_of(tables).items():
        table, _, key = place.partition(".")
        out.setdefault(table, {})[key] = Quantity(symbol(name), TABLES[table][key])
    return out


def as_attained(place: str, tables: Tables) -> dict[str, Mapping[str, Quantity]]:
    """Return the tables with the rates of [attained] in the place of all those of the vendor."""
    found = tables.get("attained", {})
    peak = {key: rate for key, rate in found.items() if key in PEAKS}
    if "bandwidth" not in found or not peak:
        raise SpecError(
            f"{place}: [attained] has no bandwidth or no matrix rate; expected both, as costgraph calibrate writes them"
        )
    vector = {key.removeprefix("vector_"): rate for key, rate in found.items() if key.startswith("vector_")}
    memory = {**tables["memory"], "bandwidth": found["bandwidth"]}
    return {**tables, "peak": peak, "vector": vector, "memory": memory}
