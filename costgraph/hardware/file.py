"""TOML specifications of devices and networks: their schema, lookup and validation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from ..algebra.symbols import shown
from ..errors import SpecError
from ..notation.validation import Rule, Text, near, one_of, read_fields
from ..text_file import read_text
from .units import UNITS, Quantity, quantity

__all__ = [
    "CACHE_SYMBOLS",
    "LEVEL",
    "LINK_KINDS",
    "PEAKS",
    "PER_LINK",
    "RATE_KEYS",
    "SYMBOLS",
    "TABLES",
    "symbols_of",
    "DEVICES",
    "NETWORKS",
    "known",
    "path_of",
    "read_file",
    "read_network",
]


# -- schema ------------------------------------------------------------------------------------------------------------

_TEXT = "text"
PEAKS = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "nvfp4", "int8", "int4"]
# GeForce doubles the rate with fp16 accumulation
_FP16_SUMS = ["fp16_accum_fp16", "fp8_accum_fp16"]
_CACHES = ["l2", "l2_reported_by_driver", "last_level", "l1_and_shared_per_core", "shared_per_core"]
_SCRATCHPADS = ["tensor_memory_per_core", "registers_per_core", "vmem", "cmem", "sbuf", "sram"]
# outermost first
_CACHE_RATES = ["last_level_bandwidth", "l2_bandwidth"]
_LINKS = ["per_direction", "bidirectional", "per_link_per_direction", "c2c_per_direction"]
_CHIP_LINKS = ["per_chip", "bidirectional_per_chip", "per_axis_bidirectional"]
TABLES: dict[str, dict[str, str]] = {
    "peak": dict.fromkeys(PEAKS + _FP16_SUMS, "FLOP/s"),
    "vector": dict.fromkeys(("fp64", "fp32"), "FLOP/s"),
    "memory": {"type": _TEXT, "capacity": "B", "measured": "B", "reported": "B", "bandwidth": "B/s"},
    "cache": dict.fromkeys(_CACHES + _SCRATCHPADS, "B") | dict.fromkeys(_CACHE_RATES, "B/s"),
    "cores": {"type": _TEXT, "count": "1"},
    "clock": dict.fromkeys(("boost", "max", "reached"), "Hz"),
    "power": dict.fromkeys(("tdp", "measured_min", "measured_mean", "measured_max"), "W"),
    "interconnect": {"type": _TEXT, "links": "1", "domain": "1", "latency": "s"}
    | dict.fromkeys(_LINKS + _CHIP_LINKS, "B/s"),
    "pcie": {"generation": "1", "x16_per_direction": "B/s"},
    "network": {"type": _TEXT, "per_direction": "B/s", "latency": "s"},
    "host": {"type": _TEXT, "bandwidth": "B/s"},
    "attained": dict.fromkeys([*PEAKS, "vector_fp64", "vector_fp32"], "FLOP/s") | {"bandwidth": "B/s", "launch": "s"},
    "measured": {},
}
"""Tables of a device specification, with the base unit of each key; [measured] takes any name and unit."""

PER_LINK = "per_link_per_direction"
LEVEL = {"devices": "1", "per_direction": "B/s", PER_LINK: "B/s", "ring": "1", "latency": "s", "oversubscription": "1"}
"""Keys of a network level with their base units; a level with PER_LINK is a torus dimension."""

LINK_KINDS = {
    "interconnect": ("interconnect", "per_direction"), "c2c": ("interconnect", "c2c_per_direction"),
    "pcie": ("pcie", "x16_per_direction"), "network": ("network", "per_direction"),
}  # fmt: skip

# tensor cores run both 8-bit floats at one rate, and block formats at the rate of their elements
RATE_KEYS = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp8_e5m2"), "fp8"),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2", "mxfp6", "mxfp6_e3m2"), "fp6"),
    **dict.fromkeys(("fp4_e2m1", "mxfp4"), "fp4"),
    "uint8": "int8",
}

SYMBOLS = {
    **{f"peak.{key}": f"peak_{key}" for key in PEAKS},
    **{f"vector.{key}": f"vector_{key}" for key in TABLES["vector"]},
    "memory.bandwidth": "bandwidth",
    **{f"{table}.{key}": kind for kind, (table, key) in LINK_KINDS.items()},
}
"""Symbol names of rates in symbolic hardware, by table entry."""

CACHE_SYMBOLS = {key: f"{key}_size" if unit == "B" else key for key, unit in TABLES["cache"].items()}
"""The same for [cache] entries, if the device has them."""


def symbols_of(tables: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the symbol names for a symbolic device by table entry, with [cache] entries that it has."""
    return SYMBOLS | {f"cache.{key}": CACHE_SYMBOLS[key] for key in tables.get("cache", ())}


# -- lookup ------------------------------------------------------------------------------------------------------------

#: Kind of specification, and its folder within the library's files.
DEVICES, NETWORKS = ("hardware", "."), ("network", "networks")


def _folder() -> Path:
    # inside the package in a wheel, beside it in a checkout or an editable install
    packaged, checkout = (folder / "hardware_specs" for folder in Path(__file__).resolve().parents[1:3])
    return packaged if packaged.is_dir() else checkout


def known(of: tuple[str, str] = DEVICES) -> list[str]:
    """Return the sorted names of the devices, or networks, that ship with the library."""
    return sorted(path.stem for path in (_folder() / of[1]).glob("*.toml"))


def path_of(name_or_path: object, of: tuple[str, str] = DEVICES) -> Path:
    """Return the file for a name, or a path itself, which ends with ``.toml`` or contains a slash."""
    kind, folder = of
    if not isinstance(name_or_path, str | os.PathLike):
        raise SpecError(f"{kind} {shown(name_or_path)}: expected a name or the path of a TOML file")
    text = os.fsdecode(name_or_path)
    if isinstance(name_or_path, os.PathLike) or text.endswith(".toml") or "/" in text or os.sep in text:
        return Path(text)
    names = known(of)
    if text not in names:
        expected = f"{near(text, names)}expected the path of a .toml file or one of {', '.join(names)}"
        raise SpecError(f"{kind} {shown(text)} is unknown: {expected}")
    return _folder() / folder / f"{text}.toml"


# -- parsing -----------------------------------------------------------------------------------------------------------

_MAX_FILE_BYTES = 2**20
_MAX_DOTS = 1000  # per line: parsing a key takes quadratic time

# plausible range, within which derived times are floats
_LEAST, _MOST = Decimal("1e-60"), Decimal("1e60")


def _is_number(value: object) -> bool:
    if type(value) is int:
        return 0 < value <= 10**60
    return isinstance(value, Decimal) and value.is_finite() and _LEAST <= value <= _MOST


_Number = Annotated[int | Decimal, Rule("a number above 0, from 1e-60 to 1e60", _is_number)]
_Key = Annotated[
    str, Rule("a key of letters, digits, - and _", lambda v: re.fullmatch(r"[A-Za-z0-9_-]+", v) is not None)
]
_Keys = Annotated[Sequence[str], Rule("a list of keys of [sources]", bool)]
_TABLE = Rule("a table", lambda table: True)


def _is_arch(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"sm_[1-9][0-9]{1,2}", value) is not None


_Arch = Annotated[str, Rule("a compute capability, such as sm_90", _is_arch)]


@dataclass(frozen=True)
class _Entry:
    """A number in a table."""

    value: _Number
    unit: Annotated[str, one_of(UNITS)]
    source: _Keys
    note: Text = ""


_TOP = {
    "name": Text, "vendor": Text, "arch": _Arch, "disagreements": Sequence[Text],
    "sources": Annotated[Mapping[_Key, Text], _TABLE],
    **dict.fromkeys(TABLES, Annotated[Mapping[str, object], _TABLE]),
}  # fmt: skip
_NAMES = ("interconnect", "network", "link", "compute", "memory")
_Level = Annotated[
    str,
    Rule(
        "a lower-case name other than that of a link", lambda v: re.fullmatch("[a-z][a-z0-9_]*", v) and v not in _NAMES
    ),
]
_NETWORK = {
    "name": Text, "topology": Text, "sources": Annotated[Mapping[_Key, Text], _TABLE],
    "levels": Annotated[Mapping[_Level, Mapping[str, object]], Rule("a table of levels", bool)],
}  # fmt: skip
_NEEDED = {"memory": ("bandwidth", "capacity")}


def read_file(path: Path) -> dict[str, Any]:
    """Return the fields of `Hardware` in a file, parsing an unchanged file only once.

    Raises SpecError if the file is unreadable or invalid, naming the place, key, value and expectation.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError):  # reported when reading, with the expectation
        return _read(path)
    data: dict[str, Any] = _copied(_read_version(path, stat.st_mtime_ns, stat.st_size))
    return data


def _copied(value: Any) -> Any:
    """Copy nested tables, so that callers can change them."""
    return {key: _copied(v) for key, v in value.items()} if isinstance(value, dict) else value


@lru_cache(maxsize=128)
def _read_version(path: Path, _changed: int, _size: int) -> dict[str, Any]:
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    place, data = str(path), _parsed(path, "device")
    _refuse_sparsity(place, data)
    optional = (*TABLES, "arch", "disagreements", "sources")
    top = {"sources": {}, "disagreements": ()} | read_fields(place, data, _TOP, optional, SpecError)
    tables: dict[str, dict[str, Quantity]] = {"peak": {}, "vector": {}, "memory": {}}
    types: dict[str, str] = {}
    for name, units in TABLES.items():
        table = top.pop(name, {})
        # [measured] takes any name and unit
        hints = {key: Text if unit == "text" else _Entry for key, unit in units.items()} or dict.fromkeys(table, _Entry)
        entries = read_fields(f"{place}: {name}", table, hints, hints.keys() - _NEEDED.get(name, ()), SpecError)
        types |= {name: entries.pop("type")} if "type" in entries else {}
        quantities = {
            key: _quantity(f"{place}: {name}: {key}", entry, units.get(key), top["sources"])
            for key, entry in entries.items()
        }
        tables |= {name: quantities} if quantities else {}
    if not tables["peak"]:
        raise SpecError(f"{place}: peak has no rate, expected at least one, such as bf16")
    memory = tables["memory"]
    main = {"bandwidth": memory["bandwidth"], "memory": memory["capacity"], "measured_memory": memory.get("measured")}
    return top | main | {"peak": tables["peak"], "vector": tables["vector"], "tables": tables, "types": types}


def read_network(path: Path) -> dict[str, Any]:
    """Return the fields of `Network` in a file.

    Raises SpecError as `read_file`, and if a level joins fewer devices than the previous one, or only some levels are
    torus dimensions.
    """
    place, data = str(path), _parsed(path, "network")
    top = read_fields(place, data, _NETWORK, (), SpecError)
    levels: dict[str, dict[str, Quantity]] = {}
    previous = 1
    for name, table in top.pop("levels").items():
        entries = read_fields(
            f"{place}: {name}", table, dict.fromkeys(LEVEL, _Entry), LEVEL.keys() - {"devices"}, SpecError
        )
        levels[name] = quantities = {
            key: _quantity(f"{place}: {name}: {key}", entry, LEVEL[key], top["sources"])
            for key, entry in entries.items()
        }
        devices, oversubscription = quantities["devices"].number, quantities.get("oversubscription")
        if not isinstance(devices, int) or devices < previous:
            raise SpecError(f"{place}: {name}: devices is {devices}, expected an integer of at least {previous}")
        if oversubscription is not None and oversubscription.number < 1:
            raise SpecError(f"{place}: {name}: oversubscription is {oversubscription.number}, expected 1 or more")
        previous = devices
    _check_torus(place, levels)
    return top | {"levels": levels}


def _check_torus(place: str, levels: Mapping[str, Mapping[str, Quantity]]) -> None:
    """Raise for an inconsistent torus: every level is a dimension with whole rings, without switches."""
    inner_devices = 1
    for name, level in levels.items():
        if (PER_LINK in level) != any(PER_LINK in other for other in levels.values()):
            raise SpecError(f"{place}: {name}: {PER_LINK} is missing; expected it in all levels of a torus")
        if PER_LINK in level:
            devices = int(level["devices"].number)
            if devices % inner_devices:
                raise SpecError(
                    f"{place}: {name}: devices is {devices}, expected a multiple of {inner_devices} in a torus"
                )
            if switch_keys := [key for key in ("per_direction", "oversubscription") if key in level]:
                raise SpecError(
                    f"{place}: {name}: {switch_keys[0]} together with {PER_LINK}; expected no switches in a torus"
                )
            ring, inner_rings = level["ring"].number if "ring" in level else devices, devices // inner_devices
            if not isinstance(ring, int) or ring < inner_rings:
                raise SpecError(f"{place}: {name}: ring is {ring}, expected an integer of at least {inner_rings}")
            inner_devices = devices
        elif "ring" in level:
            raise SpecError(f"{place}: {name}: ring outside a torus; expected it together with {PER_LINK}")


def _parsed(path: Path, kind: str) -> dict[str, Any]:
    import tomllib  # most programs read no device

    text = read_text(path, str(path), _MAX_FILE_BYTES, f"the TOML file of one {kind}", SpecError)
    try:
        if max(line.count(".") for line in text.split("\n")) > _MAX_DOTS:
            raise SpecError(f"{path}: a line with more than {_MAX_DOTS} dots; expected short keys")
        return tomllib.loads(text, parse_float=Decimal)
    except RecursionError:
        raise SpecError(f"{path}: nested too deeply; expected the tables of a specification") from None
    except (ValueError, ArithmeticError) as error:
        raise SpecError(f"{path}: {error or type(error).__name__}; expected a readable TOML file") from None


def _refuse_sparsity(place: str, data: Mapping[str, Any], levels: int = 3) -> None:
    """Raise for any key that mentions sparsity, at every level."""
    for key, value in data.items():
        if "spars" in key.lower():
            raise SpecError(f"{place}: key {shown(key)}, expected dense rates only; halve one with 2:4 sparsity")
        if isinstance(value, dict) and levels > 1:
            _refuse_sparsity(f"{place}: {key}", value, levels - 1)


def _quantity(place: str, entry: _Entry, base: str | None, sources: Mapping[str, str]) -> Quantity:
    if base is not None and UNITS[entry.unit][1] != base:
        raise SpecError(f"{place}: unit {shown(entry.unit)}, expected a unit of {base}")
    for key in entry.source:
        if key not in sources:
            defined = ", ".join(sources) or "none yet"
            raise SpecError(f"{place}: source {shown(key)}, expected keys of [sources], which has {defined}")
    return quantity(entry.value, entry.unit, ", ".join(entry.source), entry.note)
