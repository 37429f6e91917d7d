"""Evaluate formulas over a grid of sizes and devices as an xarray dataset, optionally lazily with dask."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import sympy

from ..algebra.extremum import as_expr
from ..algebra.polynomial import poly
from ..algebra.symbols import shorten, shown, symbol
from ..errors import BindingError, ShapeError, UnsupportedError
from ..hardware.file import (
    SYMBOLS,
    TABLES,
)
from ..hardware.specs import (
    FORMATS,
    Hardware,
    StandIn,
    load_hardware,
)
from .evaluate import (
    Compiled,
    Formula,
    checked,
    compile,
    largest_met,
)

__all__ = ["sweep"]

#: Integers up to this value are exact in float64.
_EXACT = 1 << 53


def sweep(formulas: Mapping[str, Any], /, *, chunks: Any = None, **axes: Any) -> Any:
    """Evaluate formulas over a grid: every combination of sizes and devices.

    Parameters
    ----------
    formulas : mapping of str to formula
        Formulas by name, optionally in a pair with a unit, which becomes the attribute `units`. A function of a device,
        such as `lambda device: cg.seconds(g, device)`, is called for each one. A formula in symbols from
        `Hardware.symbolic` is evaluated with the rates of each device.
    chunks : int, mapping or "auto", optional
        Block sizes for dask, as in xarray's `chunk`; evaluation is then lazy.
    **axes : int or array_like of int
        Sizes and hardware rates by name: a list is an axis, a number is bound. `device`: device names, paths, or
        results of `load_hardware`.

    Returns
    -------
    xarray.Dataset
        One variable per formula, with only the axes that it depends on. It is int64 if the formula is a sum with
        integer coefficients whose intermediate values do not exceed 2**53, hence exact, otherwise float64. If a device
        lacks a rate, the attribute `stand_ins` of the variable names the replacement.

    Raises
    ------
    BindingError
        If an axis is missing, unused or not of positive integers, or sizes violate conditions of a graph.
    SpecError
        If a device is unknown, or lacks a rate without replacement.
    UnsupportedError
        If xarray, or dask for chunks, is not installed; the extra `sweep` includes both.

    Examples
    --------
    >>> import costgraph as cg
    >>> g = cg.models.load("gpt2")
    >>> found = cg.sweep(
    ...     {"peak": (cg.peak_memory(g), "B"), "time": (lambda device: cg.seconds(g, device), "s")},
    ...     B=[1, 8], S=[128, 256, 1024], device=["a100-80-sxm", "h100-sxm"],
    ... )
    >>> dict(found.sizes), found.peak.dims, found.time.dims, found.time.attrs["units"]
    ({'B': 2, 'S': 3, 'device': 2}, ('B', 'S'), ('B', 'S', 'device'), 's')
    >>> int(found.peak.sel(B=8, S=1024)) == cg.peak_memory(g, B=8, S=1024)
    True
    """
    grid = _Grid(_library("xarray", "sweep"), chunks, *_read(axes))
    if chunks is not None:
        _library("dask", "sweep with chunks")
    duplicates = sorted(formulas.keys() & axes.keys())
    if duplicates:
        raise BindingError(f"sweep: {shorten(duplicates[0])} is both a formula and an axis; expected different names")
    variables = {name: grid.variable(name, *_with_unit(formula)) for name, formula in formulas.items()}
    unused = sorted(axes.keys() - grid.used)
    if unused:
        raise BindingError(f"sweep: {shorten(unused[0])} is in none of the formulas, expected a size of one of them")
    return grid.xarray.Dataset(variables, coords=grid.coordinates())


def _library(name: str, place: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        hint = "pip install costgraph[sweep]"
        raise UnsupportedError(f"{place}: {name} is missing, expected it from: {hint}") from None


def _with_unit(value: Any) -> tuple[Any, str | None]:
    """Return a formula and its unit, if a pair was given."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return value
    return value, None


def _read(axes: Mapping[str, Any]) -> tuple[dict[str, np.ndarray[Any, Any]], list[Hardware]]:
    """Return sizes as arrays with at most one axis, and the devices."""
    sizes, devices = {}, []
    for name, values in axes.items():
        if name == "device":
            listed = values if isinstance(values, Collection) and not isinstance(values, str | bytes) else [values]
            devices = [load_hardware(v) for v in listed]
            continue
        sizes[name] = checked(name, values)
        if sizes[name].ndim > 1:
            raise BindingError(f"sweep: {name} has {sizes[name].ndim} axes, expected a list of sizes, or one")
    return sizes, devices


@dataclass
class _Grid:
    """Grid axes, and evaluation of formulas along the axes that they depend on."""

    xarray: Any
    chunks: Any
    sizes: dict[str, np.ndarray[Any, Any]]
    devices: list[Hardware]

    def __post_init__(self) -> None:
        self.used: set[str] = set()
        ids = [device.id for device in self.devices]
        if len(set(ids)) < len(ids):
            raise BindingError(f"sweep: devices {shown(ids)} contain duplicates; expected each once")

    def coordinates(self) -> dict[str, Any]:
        """Return coordinates with their units."""
        units = {name: _unit(key) for key, name in SYMBOLS.items()}
        out: dict[str, Any] = {n: (n, v, {"units": units.get(n, "1")}) for n, v in self.sizes.items() if v.ndim}
        return out | ({"device": [device.id for device in self.devices]} if "device" in self.used else {})

    def variable(self, name: str, formula: Any, unit: str | None) -> Any:
        """Return a formula, or a function's result for each device, along its axes."""
        notes: list[str] = []
        if callable(formula) and not isinstance(formula, sympy.Basic):
            if not self.devices:
                raise BindingError(f"sweep: {shorten(name)} is a function of a device, expected device=[...]")
            out = self._each(name, [formula(device) for device in self.devices])
        elif self.devices and _rates_in(as_expr(formula)):
            values = [_on(device, as_expr(formula), notes) for device in self.devices]
            out = self._each(name, values)
        else:
            out = self._along(name, formula)
        out.attrs.update({"units": unit} if unit else {}, **({"stand_ins": notes} if notes else {}))
        return out

    def _each(self, name: str, values: list[Formula]) -> Any:
        self.used.add("device")
        arrays = self.xarray.broadcast(*(self._along(name, value) for value in values))
        return self.xarray.concat(arrays, dim="device").transpose(..., "device")

    def _along(self, name: str, formula: Formula) -> Any:
        compiled = compile(formula)
        missing = sorted(set(compiled.names) - self.sizes.keys())
        if missing:
            raise BindingError(f"sweep: {shorten(name)} has no sizes for {', '.join(missing)}")
        self.used |= set(compiled.names)
        arrays = [self._array(n) for n in self.sizes if n in compiled.names]
        order = [n for n in self.sizes if n in compiled.names]
        kind = np.int64 if self._is_exact(compiled) else np.float64
        return self.xarray.apply_ufunc(
            _worked_out, *arrays, kwargs={"formula": compiled, "names": order, "kind": kind}, dask="parallelized",
            output_dtypes=[kind],
        ) if arrays else self.xarray.DataArray(_worked_out(formula=compiled, names=[], kind=kind))  # fmt: skip

    def _array(self, name: str) -> Any:
        out = self.xarray.DataArray(self.sizes[name], dims=[name] if self.sizes[name].ndim else [])
        if self.chunks is None or not self.sizes[name].ndim:
            return out
        blocks = self.chunks.get(name, -1) if isinstance(self.chunks, Mapping) else self.chunks
        return out.chunk({name: blocks})

    def _is_exact(self, compiled: Compiled) -> bool:
        largest = {n: int(self.sizes[n].max()) if self.sizes[n].size else 1 for n in compiled.names}
        try:
            met = largest_met(poly(compiled.formula), largest)
        except ShapeError:  # floats
            return False
        return met is not None and met < _EXACT


def _worked_out(*arrays: Any, formula: Compiled, names: list[str], kind: Any) -> Any:
    return np.asarray(formula(**dict(zip(names, arrays, strict=True)))).astype(kind)


def _unit(key_path: str) -> str:
    table, _, key = key_path.partition(".")
    return TABLES[table][key]


def _rates_in(formula: sympy.Expr) -> dict[str, str]:
    names = {s.name for s in formula.free_symbols}
    return {name: key_path for key_path, name in SYMBOLS.items() if name in names}


def _on(device: Hardware, formula: sympy.Expr, notes: list[str]) -> Formula:
    """Substitute a device's rates into a formula, and note stand-ins for missing ones."""
    rates = {}
    for name, key_path in _rates_in(formula).items():
        table, _, key = key_path.partition(".")
        rate = device.tables.get(table, {}).get(key)
        instead: StandIn | None = None
        if rate is None and table in ("peak", "vector"):
            rate, instead = device.nearest_rate(FORMATS[key].name, "matmul" if table == "peak" else "vector")
        if instead is not None:
            notes.append(f"{device.id}: {instead}")
        rates[symbol(name)] = sympy.sympify((rate or device.link(name)).value, strict=True)
    return formula.xreplace(rates)
