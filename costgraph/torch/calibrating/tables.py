"""The tables of a specification that a calibration fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .spec import Table, entry

if TYPE_CHECKING:
    from .calibration import Calibration

__all__ = ["tables_of"]

_VECTOR = "the fastest of products and elementwise work in this format: the same units do both"


def tables_of(calibration: Calibration, source: str) -> dict[str, Table]:
    """Return the entries of a calibration by table and key.

    Parameters
    ----------
    calibration : Calibration
        What was measured.
    source : str
        Key of its source.
    """
    attained = _attained(calibration, source)
    bytes_ = int(calibration.environment["memory_bytes"])
    tables: dict[str, Table] = {"peak": {}, "vector": {}, "memory": {"measured": entry(bytes_, "B", source)}}
    if calibration.like is None:
        vectors = {key.removeprefix("vector_"): e for key, e in attained.items() if key.startswith("vector_")}
        peaks = {key: e for key, e in attained.items() if key not in ("bandwidth", "launch") and key[:7] != "vector_"}
        memory = {"capacity": entry(bytes_, "B", source, "all that the system shows"), **tables["memory"]}
        tables |= {"peak": peaks, "vector": vectors, "memory": {**memory, "bandwidth": attained["bandwidth"]}}
        if calibration.cache:
            tables["cache"] = {"last_level": entry(calibration.cache, "B", source)}
    return tables | {"attained": attained, "measured": _measured(calibration, source)}


def _attained(calibration: Calibration, source: str) -> Table:
    out: Table = {}
    for dtype in dict.fromkeys(which for kind, which, _ in calibration.rates if kind == "matmul"):
        best = calibration.best("matmul", dtype)
        if best is not None:
            out[dtype] = entry(best.value, "FLOP/s", source, best.how)
    for dtype in ("fp64", "fp32"):
        # elementwise work is measured in fp32 alone
        kinds = ("matmul", "pointwise") if dtype == "fp32" else ("matmul",)
        found = [calibration.best(kind, dtype if kind == "matmul" else None) for kind in kinds]
        fastest = max((r for r in found if r is not None), key=lambda r: r.value, default=None)
        if fastest is not None:
            out[f"vector_{dtype}"] = entry(fastest.value, "FLOP/s", source, f"{_VECTOR}; {fastest.how}")
    bandwidth = calibration.best("bandwidth")
    if bandwidth is not None:
        note = f"{bandwidth.how}, the fastest stream beyond the last-level cache"
        out["bandwidth"] = entry(bandwidth.value, "B/s", source, note)
    launch = calibration.best("launch")
    if launch is not None:
        out["launch"] = entry(1 / launch.value, "s", source, launch.how)
    return out


def _measured(calibration: Calibration, source: str) -> Table:
    out: Table = {}
    for kind, which, size in calibration.rates:
        rate = calibration.rates[kind, which, size]
        if kind == "bandwidth":
            label, sets = _size(int(size)), [r for (k, _, s), r in calibration.rates.items() if (k, s) == (kind, size)]
            fastest = max(sets, key=lambda r: r.value)
            out[f"bandwidth_{label}"] = entry(fastest.value, "B/s", source, f"working set of {label}; {fastest.how}")
        elif kind == "matmul":
            out[f"matmul_{which}_{size}"] = entry(rate.value, "FLOP/s", source, rate.how)
    for kind in ("bandwidth", "pointwise", "transcendental"):
        unit, where = (
            ("B/s", "beyond the last-level cache; ") if kind == "bandwidth" else ("FLOP/s", "within a cache; ")
        )
        for which in dict.fromkeys(one for of, one, _ in calibration.rates if of == kind):
            best = calibration.best(kind, which)
            if best is not None:
                out[f"{kind}_{which}"] = entry(best.value, unit, source, where + best.how)
    return out


def _size(n: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n % 2**power == 0:
            return f"{n >> power}{unit}"
    return f"{n}B"
