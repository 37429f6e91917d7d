"""Devices: what they compute and move in a second, and what they hold, each number with unit and source.

A device is a TOML file, from ``hardware_specs`` or the user; docs/reference/hardware_files.md describes the format. The
loader rejects unknown keys, so that a misspelt rate is not a missing one. Rates are dense: halve a figure with 2:4
structured sparsity before you write it down.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import sympy

from costgraph.algebra.polynomial import poly
from costgraph.algebra.symbols import shown, symbol
from costgraph.dtypes import DType, dtype
from costgraph.errors import SpecError
from costgraph.hardware.file import read_file
from costgraph.hardware.find import known, path_of
from costgraph.hardware.keys import LINK_KINDS, symbols_of
from costgraph.hardware.networks import Network
from costgraph.hardware.rates import NAMED, Fallback, StandIn, chosen_fallback, fastest, named_rate, nearest, rate_key
from costgraph.hardware.scaled import as_attained, as_symbols, at_clock, of_share, share_of
from costgraph.hardware.tables import SOURCE, Column, Fact, Table
from costgraph.hardware.units import Quantity
from costgraph.notation.door import READ

from ..notation.door import guarded

__all__ = ["Hardware", "list_hardware", "load_hardware"]


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
