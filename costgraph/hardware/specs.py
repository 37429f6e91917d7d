"""Device specifications: compute rates, bandwidths, capacities and caches, each with unit and source.

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


# -- GPU architectures -------------------------------------------------------------------------------------------------

#: Architecture of H100 and H200.
DEFAULT = "sm_90"
#: Range supported by torch's attention kernels (`check_mem_efficient_hardware_support`).
_FIRST, _LAST = (5, 0), (12, 1)
_NAME = re.compile(r"sm_(\d{1,2})(\d)[af]?\Z", re.ASCII)


@dataclass(frozen=True, order=True)
class Arch:
    """A compute capability; earlier ones compare as smaller."""

    major: int
    minor: int = 0

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}"


def arch_of(name: object, place: str) -> Arch:
    """Parse an architecture name as in `torch.cuda.get_arch_list`, such as `sm_90`.

    Raises GraphError if the name is invalid, or torch has no kernels for the architecture.
    """
    match = _NAME.match(name) if isinstance(name, str) else None
    number = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if not _FIRST <= number <= _LAST:
        raise GraphError(
            f"{place}: arch {shown(name)}, expected a compute capability from sm_50 to sm_121, such as sm_80 or sm_90"
        )
    return Arch(*number)


# -- missing rates -----------------------------------------------------------------------------------------------------

Rates = Mapping[str, Quantity]
Fallback = str | DType | Mapping[str, str]

#: Reason for a stand-in that the caller named.
NAMED = "asked for"

FORMATS = {key: dtype({"fp8": "fp8_e4m3", "fp6": "fp6_e2m3", "fp4": "fp4_e2m1"}.get(key, key)) for key in PEAKS}


class StandIn(NamedTuple):
    """Replacement for a rate that a device lacks."""

    wanted: str
    """entry of the missing rate, such as peak.bf16"""
    used: str
    """entry of the rate used instead"""
    why: str
    """reason, such as the relation of both formats"""

    def __str__(self) -> str:
        return f"{self.wanted} is missing, {self.used} ({self.why}) stands in"


def nearest(wanted: DType, unit: str, peak: Rates, vector: Rates) -> tuple[str, str] | None:
    """Return the entry that replaces a missing rate, such as `peak.fp32`, and the reason; None if there is no rate.

    A format that holds all values of another one is no faster than that. The matrix unit is no slower than the vector
    unit, which works in fp32 or fp64.
    """
    own_unit, other_unit = (("peak", peak), ("vector", vector))[:: 1 if unit == "matmul" else -1]
    other_name = "vector unit" if unit == "matmul" else "matrix unit"
    candidates = (
        (own_unit, _next_wider(own_unit[1], wanted), "next wider format"),
        (other_unit, _next_wider(other_unit[1], wanted, same=True), other_name),
        (own_unit, _nearest_narrower(own_unit[1], wanted), "nearest format"),
        (other_unit, _nearest_narrower(other_unit[1], wanted), f"{other_name}, nearest format"),
    )
    return next(((f"{table}.{key}", why) for (table, _), key, why in candidates if key is not None), None)


def fastest(peak: Rates, vector: Rates) -> str | None:
    """Return the entry of the highest rate, an upper bound on any missing rate; None without rates."""
    tables = (("peak", peak), ("vector", vector))
    all_rates = [(_speed(q), f"{table}.{key}") for table, rates in tables for key, q in rates.items()]
    return max(all_rates)[1] if all_rates else None


def _next_wider(rates: Rates, narrow: DType, *, same: bool = False) -> str | None:
    """Return the narrowest format that holds `narrow`, preferring its own kind, then the slowest."""
    candidates = {key: f for key, f in _formats(rates).items() if _holds(f, narrow) and (same or f.name != narrow.name)}
    return min(
        candidates,
        key=lambda key: (candidates[key].kind != narrow.kind, _size(candidates[key]), _speed(rates[key])),
        default=None,
    )


def _nearest_narrower(rates: Rates, wanted: DType) -> str | None:
    """Return the widest format that does not hold `wanted`, preferring its own kind, then the fastest."""
    candidates = _formats(rates)
    return max(
        candidates,
        key=lambda key: (candidates[key].kind == wanted.kind, _size(candidates[key]), _speed(rates[key])),
        default=None,
    )


def _formats(rates: Rates) -> dict[str, DType]:
    return {key: FORMATS[key] for key in rates if key in FORMATS}


def _size(f: DType) -> int:
    return f.exponent + f.mantissa if f.kind == "float" else f.bits


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether one format represents every value of another."""
    if narrow.kind == "float":
        return wide.kind == "float" and wide.exponent >= narrow.exponent and wide.mantissa >= narrow.mantissa
    digits = 1 if narrow.kind == "bool" else narrow.bits - narrow.signed
    return (wide.mantissa + 1 if wide.kind == "float" else wide.bits - wide.signed) >= digits


def _speed(rate: Quantity) -> Fraction:
    return Fraction(rate.value) if isinstance(rate.value, int | Fraction) else Fraction(0)


def rate_key(name: str, unit: str, peak: Mapping[str, Quantity]) -> str:
    """Return the specification key for the rate of a format."""
    if unit == "vector":
        return "fp64" if name == "fp64" else "fp32"
    if name == "nvfp4" and "nvfp4" not in peak:
        return "fp4"
    return RATE_KEYS.get(name, name)


def chosen_fallback(place: str, fallback: Fallback | None, format_: str) -> str | None:
    """Return the fallback for a format, or None; invalid fallbacks raise an error even if unused."""
    chosen: str | None = None
    fallbacks = {} if fallback is None else {format_: fallback}
    for format_name, use in (fallback if isinstance(fallback, Mapping) else fallbacks).items():
        table, dot, key = use.rpartition(".") if isinstance(use, str) else ("", "", "")
        if dot and (table not in ("peak", "vector") or key not in TABLES[table]):
            raise SpecError(f"{place}: fallback {use}; expected a number format, peak.KEY or vector.KEY")
        name = use if isinstance(use, str) and (dot or use in TABLES["peak"]) else dtype(use).name
        if dtype(format_name).name == format_:
            chosen = name
    return chosen


def named_rate(tables: Mapping[str, Rates], fallback: str | None, unit: str, place: str) -> Quantity:
    """Return the rate that a fallback names, or raise SpecError."""
    rates = ", ".join(f"{table}.{key}" for table in ("peak", "vector") for key in tables[table])
    if fallback is None:
        raise SpecError(f"{place}; expected one of {rates}, or fallback= with one of them")
    table, dot, key = fallback.rpartition(".")
    if dot:
        rate_tables = [tables[table]] if table in ("peak", "vector") else []
    else:
        key = fallback if fallback in TABLES["peak"] else rate_key(dtype(fallback).name, "matmul", tables["peak"])
        rate_tables = [tables["peak"]] if unit == "matmul" else [tables["vector"], tables["peak"]]
    for table_rates in rate_tables:
        if key in table_rates:
            return table_rates[key]
    raise SpecError(f"{place}, nor one for its fallback {fallback}; expected one of {rates}")


# -- derived devices ---------------------------------------------------------------------------------------------------

Tables = Mapping[str, Mapping[str, Quantity]]

#: Tables that scale with a share of the device, with the suffix of keys per core, which do not.
_SHARED = {"peak": "", "vector": "", "memory": "", "cores": "", "power": "", "cache": "_per_core"}


def share_of(place: str, value: object) -> Fraction:
    """Convert a share to a Fraction; SpecError if it is not in (0, 1]."""
    try:
        fraction = Fraction(exact(value))
    except SpecError:
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise SpecError(f"{place} is {shown(value)}, expected a number above 0 and at most 1")
    return fraction


def _scaled_by(q: Quantity, share: Fraction) -> Quantity:
    return Quantity(exact(q.number * share), q.unit, q.source, q.note)


def of_share(tables: Tables, share: Fraction) -> dict[str, dict[str, Quantity]]:
    """Return the tables for a share of a device, without measurements of the whole and links."""
    shared = {
        name: {
            key: q if _SHARED[name] and key.endswith(_SHARED[name]) else _scaled_by(q, share)
            for key, q in entries.items()
        }
        for name, entries in tables.items()
        if name in _SHARED
    }
    shared["memory"] = {key: q for key, q in shared["memory"].items() if key in ("capacity", "bandwidth")}
    return shared | {"clock": dict(tables["clock"])} if "clock" in tables else shared


def at_clock(tables: Tables, share: Fraction) -> dict[str, dict[str, Quantity]]:
    """Return the tables at a fraction of the clock: arithmetic rates scale, memory rates do not."""
    slower = ("FLOP/s", "Hz")
    return {
        name: {
            key: _scaled_by(q, share) if q.unit in slower and name != "measured" else q for key, q in entries.items()
        }
        for name, entries in tables.items()
    }


def as_symbols(tables: Tables) -> dict[str, dict[str, Quantity]]:
    """Return the tables with symbols for rates, bandwidths and caches."""
    symbolic = {name: dict(entries) for name, entries in tables.items()}
    for entry, name in symbols_of(tables).items():
        table, _, key = entry.partition(".")
        symbolic.setdefault(table, {})[key] = Quantity(symbol(name), TABLES[table][key])
    return symbolic


def as_attained(place: str, tables: Tables) -> dict[str, Mapping[str, Quantity]]:
    """Return the tables with measured rates from [attained] in place of the vendor's."""
    measured = tables.get("attained", {})
    peak = {key: rate for key, rate in measured.items() if key in PEAKS}
    if "bandwidth" not in measured or not peak:
        raise SpecError(
            f"{place}: [attained] has no bandwidth or no matrix rate; expected both, as costgraph calibrate writes them"
        )
    vector = {key.removeprefix("vector_"): rate for key, rate in measured.items() if key.startswith("vector_")}
    memory = {**tables["memory"], "bandwidth": measured["bandwidth"]}
    return {**tables, "peak": peak, "vector": vector, "memory": memory}


# -- devices -----------------------------------------------------------------------------------------------------------


@guarded()
@dataclass(frozen=True, repr=False)
class Hardware(Table):
    """A device. All rates are dense, for the whole device that the name refers to.

    Examples
    --------
    >>> h100 = load_hardware("h100-sxm")
    >>> print(h100.rate("bf16"), "|", h100.bandwidth, "|", h100.memory)
    989.4 TFLOP/s | 3.35 TB/s | 80 GB
    >>> round(h100.ridge("bf16"))
    295
    """

    id: str
    """file name without suffix"""
    name: str
    vendor: str
    peak: Mapping[str, Quantity]
    """matrix rates in FLOP/s by number format"""
    vector: Mapping[str, Quantity]
    """vector rates in FLOP/s; empty without a source"""
    bandwidth: Quantity
    """device memory bandwidth in B/s, reads and writes together"""
    memory: Quantity
    """capacity in bytes as stated by the vendor"""
    measured_memory: Quantity | None
    """capacity in bytes as reported by CUDA"""
    tables: Mapping[str, Mapping[str, Quantity]]
    """every number in the file by table and key, including those above"""
    types: Mapping[str, str]
    """type of a table's subject, as in {"memory": "HBM3"}"""
    sources: Mapping[str, str]
    """references by source key"""
    disagreements: tuple[str, ...]
    """conflicts between sources, and implausible figures"""
    arch: str | None = None
    """compute capability of an NVIDIA GPU in torch's notation, such as sm_90, if stated"""
    cluster: Network | None = None
    """network that it is attached to, if any"""

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    def rate(self, dtype_name: str | DType, unit: str = "matmul", fallback: Fallback | None = None) -> Quantity:
        """Return the peak rate in FLOP/s for a number format.

        Parameters
        ----------
        dtype_name : str or DType
            Storage format of the operands.
        unit : {"matmul", "vector"}
            "matmul" looks up the dense matrix rate of the format: fp8 formats and mxfp8 under ``fp8``, fp6 and fp4
            alike, nvfp4 under ``fp4`` unless it has its own rate. "vector" looks up pointwise work, which runs in fp64
            for fp64 and in fp32 for all other formats.
        fallback : str, DType or mapping, optional
            Replacement for a missing rate: a format, ``peak.KEY``, ``vector.KEY``, or a mapping from a wanted format to
            one of these. By default a missing rate is an error.

        Raises
        ------
        SpecError
            If the rate is missing, without fallback or with a fallback that is missing too.
        FormatError
            If the number format is unknown.

        Examples
        --------
        >>> print(load_hardware("v100-sxm2-16gb").rate("bf16", fallback="fp16"))
        125 TFLOP/s
        """
        wanted, place = self._rate_entry(dtype_name, unit)
        replacement = chosen_fallback(f"hardware {self.id}", fallback, wanted)
        peak_rate = self._entry(place)
        if peak_rate is not None:
            return peak_rate
        place = f"hardware {self.id}: no {unit} rate {place} for {wanted}"
        return named_rate(self.tables, replacement, unit, place)

    def nearest_rate(
        self, dtype_name: str | DType, unit: str = "matmul", fallback: Fallback | None = None, *, highest: bool = False
    ) -> tuple[Quantity, StandIn | None]:
        """Return the peak rate in FLOP/s, or a stand-in for a missing rate with its reason.

        Parameters
        ----------
        dtype_name : str or DType
            Format of the operands, as in ``rate``.
        unit : {"matmul", "vector"}
            As in ``rate``.
        fallback : str, DType or mapping, optional
            As in ``rate``.
        highest : bool
            False: use the next wider format, which is no faster, or the matrix unit. True: use the highest rate of the
            device, an upper bound.

        Returns
        -------
        tuple of Quantity and StandIn or None
            The stand-in is None if the device has the rate.

        Raises
        ------
        SpecError
            If the device has no rate at all, or a named fallback is missing too.
        FormatError
            If the number format is unknown.

        Examples
        --------
        >>> rate, instead = load_hardware("v100-sxm2-16gb").nearest_rate("bf16")
        >>> print(rate, "|", instead)
        15.7 TFLOP/s | peak.bf16 is missing, peak.fp32 (next wider format) stands in
        """
        format_, entry = self._rate_entry(dtype_name, unit)
        named, exact_rate = chosen_fallback(f"hardware {self.id}", fallback, format_), self._entry(entry)
        if exact_rate is not None:
            return exact_rate, None
        if named is not None:
            rate = self.rate(dtype_name, unit, fallback)
            used = next(f"{t}.{k}" for t in ("peak", "vector") for k, q in self.tables[t].items() if q is rate)
            return rate, StandIn(entry, used, NAMED)
        if highest:
            top = fastest(self.peak, self.vector)
            chosen = None if top is None else (top, "highest rate, for the lower bound")
        else:
            wanted_format = dtype(format_) if unit == "matmul" else dtype(entry.removeprefix("vector."))
            chosen = nearest(wanted_format, unit, self.peak, self.vector)
        if chosen is None:
            raise SpecError(f"hardware {self.id}: no {unit} rate {entry} for {format_}; expected at least one rate")
        stand_in_rate = self._entry(chosen[0])
        assert stand_in_rate is not None
        return stand_in_rate, StandIn(entry, *chosen)

    def symbolic(self) -> Hardware:
        """Return symbolic hardware: peak rates and bandwidths are symbols, so that times are formulas in them.

        Returns
        -------
        Hardware
            Device with positive integer symbols ``peak_bf16``, ``vector_fp32`` etc. for all formats in FLOP/s, and
            ``bandwidth``, ``interconnect``, ``c2c``, ``pcie`` and ``network`` in B/s. The names do not depend on the
            device, so a formula can be evaluated for another one. Caches that the device has are ``l2_size``,
            ``l2_bandwidth`` etc.

        Examples
        --------
        >>> print(load_hardware("h100-sxm").symbolic().ridge("bf16"))
        peak_bf16/bandwidth
        """
        return self._with_tables(as_symbols(self.tables))

    @property
    def symbols(self) -> frozenset[str]:
        """Names of its symbols for ``symbolic()`` hardware; otherwise empty."""
        rates = [self.bandwidth, *self.peak.values(), *self.vector.values()]
        names = symbols_of(self.tables).values() if any(isinstance(q.value, sympy.Symbol) for q in rates) else ()
        return frozenset(names)

    def bindings(self) -> dict[sympy.Symbol, sympy.Rational]:
        """Return the numeric values for the symbols of ``symbolic()``, for use with ``subs``; missing rates are absent.

        Examples
        --------
        >>> h100 = load_hardware("h100-sxm")
        >>> float(h100.symbolic().ridge("bf16").subs(h100.bindings())) == float(h100.ridge("bf16"))
        True
        """
        values = {name: self._entry(entry) for entry, name in symbols_of(self.tables).items()}
        return {symbol(name): sympy.sympify(q.value, strict=True) for name, q in values.items() if q is not None}

    def ridge(self, dtype_name: str | DType, fallback: Fallback | None = None) -> Fraction | sympy.Expr:
        """Return the ridge point in FLOP/B, the intensity above which a matmul is compute-bound.

        Raises
        ------
        SpecError, FormatError
            As in ``rate``.

        Examples
        --------
        >>> load_hardware("h100-sxm").ridge("bf16") == Fraction(9894, 10) / Fraction(335, 100)
        True
        """
        intensity = poly(self.rate(dtype_name, fallback=fallback).value) / poly(self.bandwidth.value)
        return intensity.expr if intensity.constant is None else Fraction(intensity.constant)

    def capacity(self, measured: bool | None = None) -> Quantity:
        """Return the usable memory in bytes.

        Parameters
        ----------
        measured : bool, optional
            None: the capacity reported by CUDA (``total_memory``) if the specification has it, else the vendor's
            figure. True: the reported capacity. False: the vendor's figure.

        Raises
        ------
        SpecError
            If the reported capacity is requested but not specified.

        Notes
        -----
        An NVIDIA "80 GB" board has 79.1 to 79.3 GiB, which is 85e9 bytes.

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
        """Size in bytes of the cache nearest to memory: the largest stated figure, None without one.

        Examples
        --------
        >>> print(load_hardware("h200-sxm").last_level_cache)
        62.91 MB
        """
        cache = self.tables.get("cache", {})
        sizes = [cache[key] for key in ("last_level", "l2_reported_by_driver", "l2") if key in cache]
        if self.symbols:
            return sizes[0] if sizes else None
        return max(sizes, key=lambda size: Fraction(size.value), default=None)

    def part(self, share: object) -> Hardware:
        """Return a share of the device, such as one of two dies: rates, memory, caches, cores and power scale with it.

        Measurements of the whole device and links are left out, and requesting them raises an error.

        Raises
        ------
        SpecError
            If the share is not a number above 0 and at most 1.

        Examples
        --------
        >>> die = load_hardware("mi250x").part(0.5)
        >>> print(die.name, "|", die.rate("bf16"), "|", die.memory)
        0.5 of AMD Instinct MI250X (whole package, 2 GCD) | 191.5 TFLOP/s | 68.72 GB
        """
        fraction = share_of(f"hardware {self.id}: share", share)
        name = f"{float(fraction):g} of {self.name}"
        device = self._with_tables(of_share(self.tables, fraction))
        return replace(device, id=f"{float(fraction):g} of {self.id}", name=name, measured_memory=None)

    def at_clock(self, share: object) -> Hardware:
        """Return the device at a fraction of its clock, as under a power limit: arithmetic slows down, memory does not.

        Raises
        ------
        SpecError
            As in ``part``.

        Examples
        --------
        >>> limited = load_hardware("h100-sxm").at_clock(0.8)
        >>> print(limited.id, "|", limited.rate("bf16"), "|", limited.bandwidth)
        h100-sxm at 0.8 of its clock | 791.5 TFLOP/s | 3.35 TB/s
        """
        fraction = share_of(f"hardware {self.id}: share of the clock", share)
        suffix = f"at {float(fraction):g} of its clock"
        return replace(
            self._with_tables(at_clock(self.tables, fraction)), id=f"{self.id} {suffix}", name=f"{self.name} {suffix}"
        )

    def _with_tables(self, tables: Mapping[str, Mapping[str, Quantity]]) -> Hardware:
        peak, vector, memory = (tables.get(name, {}) for name in ("peak", "vector", "memory"))
        bandwidth, capacity = memory["bandwidth"], memory["capacity"]
        return replace(self, tables=tables, peak=peak, vector=vector, bandwidth=bandwidth, memory=capacity)

    def attained(self) -> Hardware:
        """Return the device with the measured rates of [attained] in place of the vendor's.

        Raises
        ------
        SpecError
            If no matrix rate or no bandwidth was measured.
        """
        return self._with_tables(as_attained(f"hardware {self.id}", self.tables))

    def link(self, kind: Annotated[str, READ]) -> Quantity:
        """Return the bandwidth of a link in B/s per direction.

        Parameters
        ----------
        kind : {"interconnect", "c2c", "pcie", "network"}
            Between accelerators, to the CPU in the same package, to the host over PCIe x16, or to other hosts.

        Raises
        ------
        SpecError
            If the specification does not have the link.

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
        entries = self.tables.get(table, {})
        if key in entries:
            return entries[key]
        known_entries = ", ".join(f"{table}.{k} = {v}" for k, v in entries.items()) or f"a table [{table}]"
        raise SpecError(f"hardware {self.id}: {table}.{key} is missing; expected it along with {known_entries}")

    @property
    def rows(self) -> list[tuple[str, Quantity]]:
        """Every number in the specification with its key, table by table.

        Examples
        --------
        >>> place, bf16 = load_hardware("h100-sxm").rows[3]
        >>> place, bf16.value, bf16.unit, bf16.source.split(", ")[:2]
        ('peak.bf16', 989400000000000, 'FLOP/s', ['KLOCK_H100', 'STAS'])
        """
        return [(f"{table}.{key}", q) for table, keys in self.tables.items() for key, q in keys.items()]

    def _description(self) -> str:
        return f"{shown(self.id)}: {len(self.rows)} numbers of {shown(self.name)}"

    def _columns(self) -> Sequence[Column]:
        return (
            Column("place", read=lambda row: row[0]),
            Column("value", lambda row: row[1].unit, lambda row: row[1].value),
            Column("unit", read=lambda row: row[1].unit, shown=False), SOURCE,
        )  # fmt: skip

    def _facts(self) -> Sequence[Fact]:
        properties = {
            "name": self.name,
            "arch": self.arch,
            **{f"{table}.type": text for table, text in self.types.items()},
        }
        return [Fact(key, text) for key, text in properties.items() if text is not None]

    def _rate_entry(self, dtype_name: str | DType, unit: str) -> tuple[str, str]:
        """Return the compute format, and the entry of its rate."""
        table = {"matmul": "peak", "vector": "vector"}.get(unit) if isinstance(unit, str) else None
        if table is None:
            raise SpecError(f"hardware {self.id}: unit {shown(unit)} is unknown; expected 'matmul' or 'vector'")
        format_ = dtype(dtype_name)
        format_name = format_.element or format_.name
        return format_name, f"{table}.{rate_key(format_name, unit, self.peak)}"

    def _entry(self, place: str) -> Quantity | None:
        table, _, key = place.partition(".")
        return self.tables.get(table, {}).get(key)


def list_hardware() -> list[str]:
    """Return the sorted names of the devices that ship with the library.

    Examples
    --------
    >>> [name for name in list_hardware() if name.startswith("h100")]
    ['h100-nvl', 'h100-pcie', 'h100-sxm']
    """
    return known()


def load_hardware(name_or_path: str | os.PathLike[str] | Hardware) -> Hardware:
    """Load a device by name or from a TOML file; a Hardware is returned unchanged.

    Parameters
    ----------
    name_or_path : str, path or Hardware
        One of ``list_hardware()``, or a path, which ends with ``.toml`` or contains a slash.

    Raises
    ------
    SpecError
        If the device or file does not exist, or the file is invalid.

    Examples
    --------
    >>> load_hardware("mi300x").name
    'AMD Instinct MI300X'
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    path = path_of(name_or_path)
    return Hardware(id=path.stem, **read_file(path))


# -- memory levels -----------------------------------------------------------------------------------------------------

#: From memory to arithmetic; only the first key on each line counts, since it includes the others.
_ORDER = (
    ("last_level",), ("l2",), ("cmem",), ("sram",), ("vmem",), ("sbuf",), ("l1_and_shared_per_core", "shared_per_core"),
    ("tensor_memory_per_core",), ("registers_per_core",),
)  # fmt: skip
#: With these stores known, the bytes near the arithmetic are complete.
_NEAREST = {"l1_and_shared_per_core", "registers_per_core"}


class Level(NamedTuple):
    """A level of the memory hierarchy."""

    name: str
    """memory, last_level or l2"""
    bandwidth: Quantity
    """B/s towards the arithmetic"""
    nearer: Poly
    """bytes in all stores closer to the arithmetic, over all cores"""
    whole: bool
    """whether the specification states all of them: registers, and first-level caches beside shared memory"""


def levels(hardware: Hardware) -> tuple[Level, ...]:
    """Return the memory levels of a device that have a bandwidth, from memory to arithmetic.

    Parameters
    ----------
    hardware : Hardware
        Numeric or symbolic device.

    Returns
    -------
    tuple of Level
        The memory, and each cache with a specified bandwidth and a closer store.

    Examples
    --------
    >>> import costgraph as cg
    >>> [(level.name, str(level.bandwidth)) for level in levels(cg.load_hardware("a100-80-sxm"))]
    [('memory', '2.039 TB/s'), ('l2', '7.219 TB/s')]
    """
    cache = hardware.tables.get("cache", {})
    stores = [next(key for key in places if key in cache) for places in _ORDER if not cache.keys().isdisjoint(places)]
    sizes = [_whole_device(hardware, cache, key) for key in stores]
    complete = _NEAREST.issubset(stores) and bool(sizes[-1])
    hierarchy = [Level("memory", hardware.bandwidth, total(sizes), complete)]
    for i, key in enumerate(stores, start=1):
        rate = cache.get(f"{key}_bandwidth")
        if rate is not None and sizes[i:]:
            hierarchy.append(Level(key, rate, total(sizes[i:]), complete))
    return tuple(hierarchy)


def _whole_device(hardware: Hardware, cache: Mapping[str, Quantity], key: str) -> Poly:
    """Return the bytes of a store over all cores; zero if the number of cores is unknown."""
    if not key.endswith("_per_core"):
        return poly(cache[key].value)
    count = hardware.tables.get("cores", {}).get("count")
    return ZERO if count is None else poly(cache[key].value) * poly(count.value)
