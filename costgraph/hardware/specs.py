"""Devices: what they compute and move in a second, and what they hold, each number with unit and source.

A device is a TOML file, from ``hardware_specs`` or the user; docs/reference/hardware_files.md describes the format. The
loader rejects unknown keys, so that a misspelt rate is not a missing one. Rates are dense: halve a figure with 2:4
structured sparsity before you write it down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, NamedTuple

import sympy

from ..algebra.polynomial import ZERO, Poly, poly, total
from ..algebra.symbols import shown, symbol
from ..dtypes import DType, dtype
from ..errors import GraphError, SpecError
from ..notation.validation import READ, guarded
from .file import LINK_KINDS, PEAKS, RATE_KEYS, TABLES, known, path_of, read_file, symbols_of
from .networks import Network
from .tables import SOURCE, Column, Fact, Table
from .units import Quantity, exact

__all__ = [
    "DEFAULT",
    "Arch",
    "arch_of",
    "FORMATS",
    "NAMED",
    "Fallback",
    "StandIn",
    "chosen_fallback",
    "fastest",
    "named_rate",
    "nearest",
    "rate_key",
    "as_attained",
    "as_symbols",
    "at_clock",
    "of_share",
    "share_of",
    "Hardware",
    "list_hardware",
    "load_hardware",
    "Level",
    "levels",
]


# -- arch --------------------------------------------------------------------------------------------------------------
# Architectures of GPUs, by compute capability.

#: That of an H100 and an H200.
DEFAULT = "sm_90"
#: torch's kernels for attention know devices from the one to the other (`check_mem_efficient_hardware_support`).
_FIRST, _LAST = (5, 0), (12, 1)
_NAME = re.compile(r"sm_(\d{1,2})(\d)[af]?\Z", re.ASCII)


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability; earlier ones are smaller."""

    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"


def arch_of(name: object, place: str) -> Arch:
    """Return the architecture of a name as `torch.cuda.get_arch_list` has it, such as `sm_90`.

    GraphError if it is no name of one, or of one that torch has no kernels for.
    """
    found = _NAME.match(name) if isinstance(name, str) else None
    number = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if not _FIRST <= number <= _LAST:
        raise GraphError(
            f"{place}: arch {shown(name)}, expected a compute capability from sm_50 to sm_121, such as sm_80 or sm_90"
        )
    return Arch(*number)


# -- rates -------------------------------------------------------------------------------------------------------------
# Rates that a specification lacks: which of those that it has stands in, and how it bounds the missing one.

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


# -- scaled ------------------------------------------------------------------------------------------------------------
# Tables of a device that is derived from another one: as an unknown, as it was measured, a part of it, or slower.

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


# -- specs -------------------------------------------------------------------------------------------------------------


@guarded()
@dataclass(frozen=True, repr=False)
class Hardware(Table):
    """A device. All rates are dense and for the whole device that the name says.

    Examples
    --------
    >>> h100 = load_hardware("h100-sxm")
    >>> print(h100.rate("bf16"), "|", h100.bandwidth, "|", h100.memory)
    989.4 TFLOP/s | 3.35 TB/s | 80 GB
    >>> round(h100.ridge("bf16"))
    295
    """

    id: str
    """name of the file without its ending"""
    name: str
    vendor: str
    peak: Mapping[str, Quantity]
    """matrix work, FLOP/s, by number format"""
    vector: Mapping[str, Quantity]
    """pointwise work, FLOP/s; empty where no source gives it"""
    bandwidth: Quantity
    """of the device memory, B/s, reads and writes together"""
    memory: Quantity
    """capacity as the vendor prints it, B"""
    measured_memory: Quantity | None
    """capacity that CUDA reports to a program, B"""
    tables: Mapping[str, Mapping[str, Quantity]]
    """every number of the file by table and key, those above included"""
    types: Mapping[str, str]
    """what a table is of, as in {"memory": "HBM3"}"""
    sources: Mapping[str, str]
    """key of a source -> reference"""
    disagreements: tuple[str, ...]
    """where sources differ, and figures that look wrong"""
    arch: str | None = None
    """compute capability of a GPU of NVIDIA as torch names it, such as sm_90, where it is stated"""
    cluster: Network | None = None
    """the network that it is in, where one is named"""

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def rate(self, dtype_name: str | DType, unit: str = "matmul", fallback: Fallback | None = None) -> Quantity:
        """Return the peak rate in FLOP/s for operands of a number format.

        Parameters
        ----------
        dtype_name : str or DType
            Format of the operands as they are stored.
        unit : {"matmul", "vector"}
            "matmul" looks the format up among the dense rates of matrix work: fp8 formats and mxfp8 under
            ``fp8``, fp6 and fp4 alike, nvfp4 under ``fp4`` where it has no rate of its own. "vector" is
            pointwise work: done in fp32 whatever the operands are stored in, and in fp64 for fp64.
        fallback : str, DType or mapping, optional
            What to take where the device has no such rate: a format, ``peak.KEY``, ``vector.KEY``, or a
            mapping from a wanted format to one of these. Without it nothing is taken instead.

        Raises
        ------
        SpecError
            If there is no such rate and no fallback for it, or the fallback is missing too.
        FormatError
            If there is no such number format.

        Examples
        --------
        >>> print(load_hardware("v100-sxm2-16gb").rate("bf16", fallback="fp16"))
        125 TFLOP/s
        """
        wanted, place = self._wanted(dtype_name, unit)
        instead = chosen_fallback(f"hardware {self.id}", fallback, wanted)
        found = self._at(place)
        if found is not None:
            return found
        place = f"hardware {self.id}: no {unit} rate {place} for {wanted}"
        return named_rate(self.tables, instead, unit, place)

    def nearest_rate(
        self, dtype_name: str | DType, unit: str = "matmul", fallback: Fallback | None = None, *, highest: bool = False
    ) -> tuple[Quantity, StandIn | None]:
        """Return the peak rate in FLOP/s, or what bounds it where the device has none, and then what stands in.

        Parameters
        ----------
        dtype_name : str or DType
            Format of the operands, as in ``rate``.
        unit : {"matmul", "vector"}
            As in ``rate``.
        fallback : str, DType or mapping, optional
            As in ``rate``.
        highest : bool
            False: take the next wider format, which is no faster, or the matrix unit. True: take the highest rate of
            the device, which no missing one exceeds.

        Returns
        -------
        tuple of Quantity and StandIn or None
            None where the device has the rate.

        Raises
        ------
        SpecError
            If the device has no rate at all, or a fallback that is named is missing too.
        FormatError
            If there is no such number format.

        Examples
        --------
        >>> rate, instead = load_hardware("v100-sxm2-16gb").nearest_rate("bf16")
        >>> print(rate, "|", instead)
        15.7 TFLOP/s | peak.bf16 is missing, peak.fp32 (next wider format) stands in
        """
        wanted, place = self._wanted(dtype_name, unit)
        named, found = chosen_fallback(f"hardware {self.id}", fallback, wanted), self._at(place)
        if found is not None:
            return found, None
        if named is not None:
            rate = self.rate(dtype_name, unit, fallback)
            used = next(f"{t}.{k}" for t in ("peak", "vector") for k, q in self.tables[t].items() if q is rate)
            return rate, StandIn(place, used, NAMED)
        if highest:
            top = fastest(self.peak, self.vector)
            chosen = None if top is None else (top, "highest rate, for the lower bound")
        else:
            of = dtype(wanted) if unit == "matmul" else dtype(place.removeprefix("vector."))
            chosen = nearest(of, unit, self.peak, self.vector)
        if chosen is None:
            raise SpecError(f"hardware {self.id}: no {unit} rate {place} for {wanted}; expected one rate at least")
        rate_there = self._at(chosen[0])
        assert rate_there is not None
        return rate_there, StandIn(place, *chosen)

    def symbolic(self) -> Hardware:
        """Return hardware as an unknown: peak rates and bandwidths are symbols, so that times are formulas in them.

        Returns
        -------
        Hardware
            With ``peak_bf16``, ``vector_fp32`` and the like for all formats in FLOP/s, and ``bandwidth``,
            ``interconnect``, ``c2c``, ``pcie`` and ``network`` in B/s: whole numbers above 0. The names are the same
            whatever the device, so that a formula can be asked of another one. Caches that the device has are
            ``l2_size``, ``l2_bandwidth`` and the like.

        Examples
        --------
        >>> print(load_hardware("h100-sxm").symbolic().ridge("bf16"))
        peak_bf16/bandwidth
        """
        return self._with(as_symbols(self.tables))

    @property
    def symbols(self) -> frozenset[str]:
        """Names of its symbols, where it is ``symbolic()``; empty for a device of numbers."""
        found = [self.bandwidth, *self.peak.values(), *self.vector.values()]
        names = symbols_of(self.tables).values() if any(isinstance(q.value, sympy.Symbol) for q in found) else ()
        return frozenset(names)

    def bindings(self) -> dict[sympy.Symbol, sympy.Rational]:
        """Return the numbers for the symbols of ``symbolic()``, as ``subs`` takes them; a missing rate has none.

        Examples
        --------
        >>> h100 = load_hardware("h100-sxm")
        >>> float(h100.symbolic().ridge("bf16").subs(h100.bindings())) == float(h100.ridge("bf16"))
        True
        """
        found = {name: self._at(place) for place, name in symbols_of(self.tables).items()}
        return {symbol(name): sympy.sympify(q.value, strict=True) for name, q in found.items() if q is not None}

    def ridge(self, dtype_name: str | DType, fallback: Fallback | None = None) -> Fraction | sympy.Expr:
        """Return the ridge point in FLOP/B: the intensity above which a matmul is bound by compute.

        Raises
        ------
        SpecError, FormatError
            As ``rate``.

        Examples
        --------
        >>> load_hardware("h100-sxm").ridge("bf16") == Fraction(9894, 10) / Fraction(335, 100)
        True
        """
        found = poly(self.rate(dtype_name, fallback=fallback).value) / poly(self.bandwidth.value)
        return found.expr if found.constant is None else Fraction(found.constant)

    def capacity(self, measured: bool | None = None) -> Quantity:
        """Return the memory that a program can use, in bytes.

        Parameters
        ----------
        measured : bool, optional
            None takes the capacity that CUDA reports to a program (``total_memory``) where the specification has
            it, else the vendor's figure. True asks for the reported capacity, False for the vendor's figure.

        Raises
        ------
        SpecError
            If the reported capacity is asked for and the specification has none.

        Notes
        -----
        An "80 GB" board of NVIDIA holds 79.1 to 79.3 GiB, which is 85e9 bytes.

        Examples
        --------
        >>> h100 = load_hardware("h100-sxm")
        >>> h100.capacity().value, h100.capacity(measured=False).value
        (85017493504, 80000000000)
        """
        if measured is None:
            return self.measured_memory or self.memory
        if not measured:
            return self.memory
        if self.measured_memory is None:
            place = f"hardware {self.id}: memory.measured is missing"
            raise SpecError(f"{place}; expected it there, or measured=False for the vendor's {self.memory}")
        return self.measured_memory

    @property
    def last_level_cache(self) -> Quantity | None:
        """The bytes of the cache that is nearest to the memory: the largest figure stated, None without any.

        Examples
        --------
        >>> print(load_hardware("h200-sxm").last_level_cache)
        62.91 MB
        """
        stated = self.tables.get("cache", {})
        found = [stated[key] for key in ("last_level", "l2_reported_by_driver", "l2") if key in stated]
        if self.symbols:
            return found[0] if found else None
        return max(found, key=lambda size: Fraction(size.value), default=None)

    def part(self, share: object) -> Hardware:
        """Return a share of the device, such as one of two dies: of rates, memory, caches, cores and power alike.

        What was measured of the whole, and links, are left out: asking for them is an error.

        Raises
        ------
        SpecError
            If the share is no number above 0 and at most 1.

        Examples
        --------
        >>> die = load_hardware("mi250x").part(0.5)
        >>> print(die.name, "|", die.rate("bf16"), "|", die.memory)
        0.5 of AMD Instinct MI250X (whole package, 2 GCD) | 191.5 TFLOP/s | 68.72 GB
        """
        found = share_of(f"hardware {self.id}: share", share)
        name = f"{float(found):g} of {self.name}"
        made = self._with(of_share(self.tables, found))
        return replace(made, id=f"{float(found):g} of {self.id}", name=name, measured_memory=None)

    def at_clock(self, share: object) -> Hardware:
        """Return the device at a share of its clocks, as under a limit of power: arithmetic is slower, memory is not.

        Raises
        ------
        SpecError
            As ``part``.

        Examples
        --------
        >>> limited = load_hardware("h100-sxm").at_clock(0.8)
        >>> print(limited.id, "|", limited.rate("bf16"), "|", limited.bandwidth)
        h100-sxm at 0.8 of its clock | 791.5 TFLOP/s | 3.35 TB/s
        """
        found = share_of(f"hardware {self.id}: share of the clock", share)
        slower = f"at {float(found):g} of its clock"
        return replace(self._with(at_clock(self.tables, found)), id=f"{self.id} {slower}", name=f"{self.name} {slower}")

    def _with(self, tables: Mapping[str, Mapping[str, Quantity]]) -> Hardware:
        peak, vector, memory = (tables.get(name, {}) for name in ("peak", "vector", "memory"))
        bandwidth, capacity = memory["bandwidth"], memory["capacity"]
        return replace(self, tables=tables, peak=peak, vector=vector, bandwidth=bandwidth, memory=capacity)

    def attained(self) -> Hardware:
        """Return the device with the rates of [attained], measured on it, in the place of all those of the vendor.

        Raises
        ------
        SpecError
            If no matrix rate or no bandwidth was measured.
        """
        return self._with(as_attained(f"hardware {self.id}", self.tables))

    def link(self, kind: Annotated[str, READ]) -> Quantity:
        """Return the bandwidth of a link in B/s, one direction.

        Parameters
        ----------
        kind : {"interconnect", "c2c", "pcie", "network"}
            Between accelerators, to the CPU of the same package, to the host over PCIe x16, to other hosts.

        Raises
        ------
        SpecError
            If there is no such link in the specification.

        Examples
        --------
        >>> print(load_hardware("h100-sxm").link("pcie"))
        63 GB/s
        """
        if not isinstance(kind, str) or kind not in LINK_KINDS:
            raise SpecError(
                f"hardware {self.id}: link {shown(kind)} is unknown; expected one of {', '.join(LINK_KINDS)}"
            )
        table, key = LINK_KINDS[kind]
        there = self.tables.get(table, {})
        if key in there:
            return there[key]
        has = ", ".join(f"{table}.{k} = {v}" for k, v in there.items()) or f"a table [{table}]"
        raise SpecError(f"hardware {self.id}: {table}.{key} is missing; expected it beside {has}")

    @property
    def rows(self) -> list[tuple[str, Quantity]]:
        """Every number of the specification with its place, table by table.

        Examples
        --------
        >>> place, bf16 = load_hardware("h100-sxm").rows[3]
        >>> place, bf16.value, bf16.unit, bf16.source.split(", ")[:2]
        ('peak.bf16', 989400000000000, 'FLOP/s', ['KLOCK_H100', 'STAS'])
        """
        return [(f"{table}.{key}", q) for table, keys in self.tables.items() for key, q in keys.items()]

    def _about(self) -> str:
        return f"{shown(self.id)}: {len(self.rows)} numbers of {shown(self.name)}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("place", read=lambda row: row[0]),
            Column("value", lambda row: row[1].unit, lambda row: row[1].value),
            Column("unit", read=lambda row: row[1].unit, shown=False), SOURCE,
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        found = {"name": self.name, "arch": self.arch, **{f"{table}.type": text for table, text in self.types.items()}}
        return [Fact(key, text) for key, text in found.items() if text is not None]

    def _wanted(self, dtype_name: str | DType, unit: str) -> tuple[str, str]:
        """Return the format that work is done in, and the place of its rate."""
        table = {"matmul": "peak", "vector": "vector"}.get(unit) if isinstance(unit, str) else None
        if table is None:
            raise SpecError(f"hardware {self.id}: unit {shown(unit)} is unknown; expected 'matmul' or 'vector'")
        found_format = dtype(dtype_name)
        wanted = found_format.element or found_format.name
        return wanted, f"{table}.{rate_key(wanted, unit, self.peak)}"

    def _at(self, place: str) -> Quantity | None:
        table, _, key = place.partition(".")
        return self.tables.get(table, {}).get(key)


def list_hardware() -> list[str]:
    """Return the names of the devices that come with the library, sorted.

    Examples
    --------
    >>> [name for name in list_hardware() if name.startswith("h100")]
    ['h100-nvl', 'h100-pcie', 'h100-sxm']
    """
    return known()


def load_hardware(name_or_path: str | os.PathLike[str] | Hardware) -> Hardware:
    """Return a device by its name, or from a TOML file of one's own; a Hardware is returned as it is.

    Parameters
    ----------
    name_or_path : str, path or Hardware
        One of ``list_hardware()``, or a path: a text that ends with ``.toml`` or has a slash in it is one.

    Raises
    ------
    SpecError
        If there is no such device or file, or the file is no valid specification.

    Examples
    --------
    >>> load_hardware("mi300x").name
    'AMD Instinct MI300X'
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    path = path_of(name_or_path)
    return Hardware(id=path.stem, **read_file(path))


# -- levels ------------------------------------------------------------------------------------------------------------
# Levels of memory: what each hands out in a second, and what lies between it and the arithmetic.

#: From the memory to the arithmetic; of places on a line the first that a specification has, as it holds the others.
_ORDER = (
    ("last_level",), ("l2",), ("cmem",), ("sram",), ("vmem",), ("sbuf",), ("l1_and_shared_per_core", "shared_per_core"),
    ("tensor_memory_per_core",), ("registers_per_core",),
)  # fmt: skip
#: Where these are known, nothing that counts is missing.
_NEAREST = {"l1_and_shared_per_core", "registers_per_core"}


class Level(NamedTuple):
    """A level of memory."""

    name: str
    """memory, last_level or l2"""
    bandwidth: Quantity
    """B/s from it to what is nearer to the arithmetic"""
    nearer: Poly
    """bytes of all stores that are nearer, those of all cores together"""
    whole: bool
    """whether the specification has all of these: with registers, and with first caches and not shared memory alone"""


def levels(hardware: Hardware) -> tuple[Level, ...]:
    """Return the levels of a device's memory that have a bandwidth, from the memory to the arithmetic.

    Parameters
    ----------
    hardware : Hardware
        The device, of numbers or of symbols.

    Returns
    -------
    tuple of Level
        The memory, and each cache whose bandwidth the specification has and that has something nearer.

    Examples
    --------
    >>> import costgraph as cg
    >>> [(level.name, str(level.bandwidth)) for level in levels(cg.load_hardware("a100-80-sxm"))]
    [('memory', '2.039 TB/s'), ('l2', '7.219 TB/s')]
    """
    cache = hardware.tables.get("cache", {})
    stores = [next(key for key in places if key in cache) for places in _ORDER if not cache.keys().isdisjoint(places)]
    sizes = [_whole_device(hardware, cache, key) for key in stores]
    whole = _NEAREST.issubset(stores) and bool(sizes[-1])
    out = [Level("memory", hardware.bandwidth, total(sizes), whole)]
    for i, key in enumerate(stores, start=1):
        rate = cache.get(f"{key}_bandwidth")
        if rate is not None and sizes[i:]:
            out.append(Level(key, rate, total(sizes[i:]), whole))
    return tuple(out)


def _whole_device(hardware: Hardware, cache: Mapping[str, Quantity], key: str) -> Poly:
    """Return the bytes of a store, of all cores together; nothing where it is not known how many there are."""
    if not key.endswith("_per_core"):
        return poly(cache[key].value)
    count = hardware.tables.get("cores", {}).get("count")
    return ZERO if count is None else poly(cache[key].value) * poly(count.value)
